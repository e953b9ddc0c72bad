#!/bin/sh
# need-qemu.sh DIR: puts QEMU, a Debian kernel and busybox under DIR/root, unpacked from Debian packages, once. Nothing is installed,
# so it needs no rights, and the machine's own QEMU, which may be too old, stays as it is. Packages come from the machine's own
# sources; if their QEMU is older than 8, which has no placement of data (FDP), it and what it needs are taken from the backports.
# The exit status is 3, and the last line the reason, where that cannot be.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
dir=$1
[ ! -e "$dir/ready" ] || exit 0
cannot() { echo "$*"; exit 3; }
[ "$(uname -m)" = x86_64 ] || cannot "the emulated machine is an x86-64 one, and its programs are built here: this is $(uname -m)"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || cannot "no apt-get here: QEMU and the kernel are Debian's packages"
# shellcheck disable=SC1091 # not ours
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")

# Lists and packages of our own: no rights and no locks are needed, and the machine's stay as they are.
rm -rf "$dir"
mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/sources" "$dir/debs" "$dir/root"
dir=$(cd "$dir" && pwd)
cat >"$dir/apt.conf" <<END
Dir::State::Lists "$dir/lists";
Dir::Cache "$dir/cache";
Dir::Etc::SourceParts "$dir/sources";
Debug::NoLocking "true";
APT::Sandbox::User "$(id -un)";
APT::Update::Error-Mode "any";
Acquire::Retries "2";
Acquire::http::Timeout "20";
END
export APT_CONFIG="$dir/apt.conf"
for s in /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
  [ ! -r "$s" ] || ln -s "$s" "$dir/sources/"
done
update() { apt-get update -qq >"$dir/log" 2>&1 || { cat "$dir/log"; cannot "the lists of Debian's packages cannot be had"; }; }
candidate() { apt-cache policy "$1" | sed -n 's/^  Candidate: //p'; }

echo "getting QEMU and a kernel, from Debian's packages into $dir"
update
release=''
case $(candidate qemu-system-x86) in
'' | '(none)') cannot "no package qemu-system-x86 in this machine's sources" ;;
?:[0-7].*)
  # shellcheck disable=SC2016 # apt's variables
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE)-backports main' 'Created-By: Packages' 'Component: main' |
    grep " $codename-backports " >"$dir/sources/backports.list"
  update
  release=$codename-backports
  ;;
esac
kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1)
[ -n "$kernel" ] || cannot "no package linux-image-cloud-amd64 in this machine's sources"
# What would be installed or replaced: libraries that are there already are not fetched.
qemu=$(apt-get -s install --no-install-recommends ${release:+-t "$release"} qemu-system-x86 2>"$dir/log" |
  sed -n 's/^Inst \([^ ]*\).* (\([^ ]*\) .*/\1=\2/p') && [ -n "$qemu" ] ||
  qemu="qemu-system-x86 qemu-system-common qemu-system-data seabios"
# shellcheck disable=SC2086 # one word a package
(cd "$dir/debs" && apt-get download -qq $qemu "$kernel" busybox-static) >"$dir/log" 2>&1 ||
  { cat "$dir/log"; cannot "packages cannot be had: $(echo $qemu) $kernel busybox-static"; }
for deb in "$dir"/debs/*.deb; do
  HOME=$dir dpkg -x "$deb" "$dir/root"
done
rm -rf "$dir/debs" "$dir/lists" "$dir/cache" "$dir/root/usr/share/doc"
du -sh "$dir/root" | sed 's,^\([^ 	]*\).*,\1 unpacked,'
touch "$dir/ready"

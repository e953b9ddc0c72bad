#!/bin/sh
# gpu-bench.sh [FLAGS]: `tuttifs bench gpu` with what it measures beside: finds PyTorch's cuBLAS and cuFile, and an ext4
# filesystem for cuFile, in an image of its own where the system's folder for temporary files is on none.
# TUTTIFS names the binary, bin/tuttifs by default.
set -eu
cd "$(dirname "$0")/.." || exit 1
binary=${TUTTIFS:-bin/tuttifs}
[ -x "$binary" ] || { echo "gpu-bench: there is no $binary: 'make build' makes it, TUTTIFS names another" >&2; exit 1; }

# What PyTorch brings is not where the linker looks.
libraries=$(python3 - <<'PYTHON' 2>/dev/null || true
import glob, os, site
folders = site.getsitepackages() + [site.getusersitepackages()]
print(":".join(d for f in folders for d in sorted(glob.glob(os.path.join(f, "nvidia", "*", "lib")))))
PYTHON
)
LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
# Without the nvidia-fs module cuFile copies through the host's memory, if it may.
export CUFILE_FORCE_COMPAT_MODE=true CUFILE_ALLOW_COMPAT_MODE=true

work=$(mktemp -d "${TMPDIR:-/tmp}/tuttifs-gpu-bench.XXXXXX")
entry= made=
clean() {
  if mountpoint -q "$work/ext4" 2>/dev/null; then umount "$work/ext4"; fi
  if [ -n "$entry" ]; then rm -f "$entry"; fi
  if [ -n "$made" ]; then rmdir -p /run/udev/data 2>/dev/null || :; fi
  rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM

mkdir "$work/ext4"
if [ "$(stat -f -c %T "$work")" != ext2/ext3 ]; then
  truncate -s 1G "$work/image"
  mkfs.ext4 -q -F "$work/image" && mount -o loop "$work/image" "$work/ext4" ||
    echo "gpu-bench: no ext4 image can be mounted here; cuFile will be left out" >&2
fi
# cuFile looks the block device up in udev's database, which containers do not have.
device=$(findmnt -n -o MAJ:MIN -T "$work/ext4" | tail -n 1 | tr -d ' ')
[ -d /run/udev/data ] || made=yes
if [ -n "$device" ] && [ ! -e "/run/udev/data/b$device" ] && mkdir -p /run/udev/data 2>/dev/null; then
  entry=/run/udev/data/b$device
  printf 'E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n' >"$entry" 2>/dev/null || entry=
fi

"$binary" bench gpu --dir "$work/ext4" "$@"

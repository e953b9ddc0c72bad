#!/bin/sh
# need-tools.sh COMMAND:PACKAGE ...: installs Debian packages whose commands are absent, where it can, and says so. What cannot be
# installed is named; whoever wants the command does without it.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
packages=
for pair in "$@"; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || packages="$packages ${pair#*:}"
done
[ -n "$packages" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing Debian packages:$packages"
  # shellcheck disable=SC2086 # one word a package
  { apt-get install -qq -y --no-install-recommends $packages ||
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends $packages; }; } >/dev/null 2>&1 && exit 0
fi
echo "not installed, and done without:$packages"

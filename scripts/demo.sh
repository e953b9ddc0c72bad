#!/bin/bash
# demo.sh TUTTIFS: a volume on four files, from mkfs to umount, in a temporary directory. Leaves nothing behind.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -euo pipefail
bin=$(realpath -- "${1:-bin/tuttifs}")
bold='' dim='' plain=''
[ -t 1 ] && bold=$'\033[1m' dim=$'\033[2m' plain=$'\033[0m'
title() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }
run() { local words="${*//$bin/tuttifs}"; printf '%s$ %s%s\n' "$dim" "${words//$work/DIR}" "$plain"; "$@"; }
fail() { echo "demo: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "mounting needs root: try 'sudo make demo'"
[ -c /dev/fuse ] || fail "there is no /dev/fuse: load the fuse module, or give the container the device"
"$(dirname "$0")/need-tools.sh" getfattr:attr

work=$(mktemp -d "${TMPDIR:-/tmp}/tuttifs-demo.XXXXXX")
mnt=$work/mnt log=$work/log
cleanup() {
  code=$?
  set +e # whatever fails here, the rest is still to be taken away
  trap - EXIT
  trap '' INT TERM HUP PIPE
  exec >&2
  if mountpoint -q "$mnt" || grep -qF " $mnt fuse.tuttifs " /proc/mounts; then "$bin" umount "$mnt" || umount -l "$mnt" || true; fi
  [ $code = 0 ] || { echo "demo: failed with status $code; the daemon's log:" >&2; cat "$log" >&2 2>/dev/null; }
  rm -rf "$work"
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP
trap 'exit 141' PIPE
mkdir "$mnt"
drives=("$work"/d0 "$work"/d1 "$work"/d2 "$work"/d3)
replay=(--model llama3-8b --scale 1024)

title "four drives, one volume"
run "$bin" mkfs -L demo --size 512m "${drives[@]}"

title "mounted; one drive finds the others"
run "$bin" mount --log "$log" "${drives[0]}" "$mnt"

title "a trace of prompts that share prefixes: look up, restore and verify what is there, store the rest"
run "$bin" trace --requests 150 --seed 7 -o "$work/trace.jsonl"
run "$bin" replay "${replay[@]}" "$work/trace.jsonl" "$mnt"

title "the same things as files"
pool=replay-llama3-8b
run ls "$mnt" "$mnt/$pool"
block=$(find "$mnt/$pool/blocks" -type f -print -quit)
run stat "$block"
if command -v getfattr >/dev/null; then
  run getfattr -d --absolute-names "$block"
  run getfattr -n user.tuttifs.extents --absolute-names "$block"
fi
tip=$(find "$mnt/$pool/prefixes" -mindepth 1 -maxdepth 1 -print -quit)
echo "a prefix, root first: $(ls -U "$tip" | wc -l) blocks"
run df -h "$mnt"
run "$bin" ls "$mnt"
run "$bin" info "$mnt"

title "remounted: everything survived, and verifies"
run "$bin" umount "$mnt"
run "$bin" mount --log "$log" "${drives[2]}" "$mnt"
run "$bin" replay "${replay[@]}" "$work/trace.jsonl" "$mnt"
rate=$("$bin" replay --json "${replay[@]}" "$work/trace.jsonl" "$mnt" | sed -n 's/.*"hit_rate": \([0-9.]*\).*/\1/p')
[ "$rate" = 1 ] || fail "hit rate after the remount: $rate of 1"

title "removed like files; a miss at once"
run rm "$block"
[ ! -e "$block" ] || fail "$block is still there"

title "unmounted and checked"
run "$bin" umount "$mnt"
run "$bin" fsck -n --data "${drives[0]}"
title "done; nothing is left behind"

#!/bin/bash
# bubbles.sh [FLAGS]: bubbles.py, on a machine with a GPU, PyTorch and much memory, so that nothing is left of it: whatever ends
# it, its volumes are unmounted and their memory given back; what a killed run left behind goes when the next one begins.
# Flags are those of bubbles.py; --limit SECONDS is how long it may take, and half a minute later it is ended.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
binary=bin/tuttifs
limit=540 where=/dev/shm
words=("$@")
for ((i = 0; i < ${#words[@]}; i++)); do
  case ${words[i]} in
    --limit) limit=${words[i + 1]:-540} ;;
    --limit=*) limit=${words[i]#*=} ;;
    --where) where=${words[i + 1]:-} ;;
    --where=*) where=${words[i]#*=} ;;
    --tuttifs) binary=${words[i + 1]:-} ;;
    --tuttifs=*) binary=${words[i]#*=} ;;
  esac
done
if ! [[ $limit =~ ^[0-9]{1,9}(\.[0-9]*)?$ ]]; then
  echo "bubbles.sh: --limit: '$limit' is no number of seconds" >&2
  exit 2
fi

# clean DIRECTORY: unmounts what is mounted below it, and removes it.
clean() {
  local mounted
  for mounted in "$1"/tuttifs-*/mnt; do
    mountpoint -q "$mounted" 2>/dev/null || continue
    timeout 20 "$binary" umount "$mounted" >/dev/null 2>&1 || umount -l "$mounted"
  done
  rm -rf "$1"
}
for left in "$where"/bubbles.*; do
  [ -f "$left/lock" ] && flock -n "$left/lock" true && clean "$left"
done

work=$(mktemp -d "$where/bubbles.XXXXXX") || exit 1
exec 9>"$work/lock"
flock -n 9 # for as long as this or its child lives
child=
trap 'clean "$work"' EXIT
trap '[ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }; exit 130' INT TERM HUP
timeout -k 15 "$((10#${limit%.*} + 30))" "$python" -B scripts/bubbles.py "$@" --where "$work" &
child=$!
wait "$child"

#!/bin/bash
# bubbles.sh [FLAGS]: bubbles.py, on a machine with a GPU, PyTorch and much memory, so that nothing is left of it:
# whatever ends it, its volumes are unmounted and their memory given back (ram_volume.py). What is left when this script
# is killed goes when the next one makes a volume.
# Flags are those of bubbles.py; --limit SECONDS is how long it may take, and half a minute later it is ended.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
limit=540
words=("$@")
for ((i = 0; i < ${#words[@]}; i++)); do
  case ${words[i]} in
    --limit) limit=${words[i + 1]:-540} ;;
    --limit=*) limit=${words[i]#*=} ;;
  esac
done
if ! [[ $limit =~ ^[0-9]{1,9}(\.[0-9]*)?$ ]]; then
  echo "bubbles.sh: --limit: '$limit' is no number of seconds" >&2
  exit 2
fi

child=
trap '"$python" -B scripts/ram_volume.py "$@"' EXIT
trap '[ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }; exit 130' INT TERM HUP
# --foreground: it would end with what it kills, and not wait until that has let its volume's lock go.
timeout --foreground -k 15 "$((10#${limit%.*} + 30))" "$python" -B scripts/bubbles.py "$@" &
child=$!
wait "$child"

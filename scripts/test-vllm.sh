#!/bin/sh
# test-vllm.sh DIR: runs the connector in engines, with vLLM from need-vllm.sh in DIR and what is built in this tree.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.."
dir=$1
status=0
why=$(scripts/need-vllm.sh "$dir") || status=$?
case $status in
  0) ;;
  3) echo "not run: $(printf '%s\n' "$why" | tail -n 1)"; exit 0 ;;
  *) printf '%s\n' "$why"; exit "$status" ;;
esac
PYTHONPATH=$PWD/python TUTTIFS_LIBRARY=$PWD/build/lib/libtuttifs.so TUTTIFS_BINARY=$PWD/bin/tuttifs \
  PYTHONDONTWRITEBYTECODE=1 exec "$dir/bin/python" -m unittest discover -v -s python/vllmtests

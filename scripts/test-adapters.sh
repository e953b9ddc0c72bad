#!/bin/sh
# test-adapters.sh DIR: runs the adapters for SGLang and LMCache, with those from need-adapters.sh in DIR and what is built in this
# tree. Each has a process of its own.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.."
dir=$1
status=0
why=$(scripts/need-adapters.sh "$dir") || status=$?
case $status in
  0) ;;
  3) echo "not run: $(printf '%s\n' "$why" | tail -n 1)"; exit 0 ;;
  *) printf '%s\n' "$why"; exit "$status" ;;
esac
export PYTHONPATH="$PWD/python" TUTTIFS_LIBRARY="$PWD/build/lib/libtuttifs.so" TUTTIFS_BINARY="$PWD/bin/tuttifs" \
  PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
for engine in sglang lmcache; do
  "$dir/bin/python" -m unittest discover -v -s python/adaptertests -p "test_$engine.py" || status=1
done
exit "$status"

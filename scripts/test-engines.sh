#!/bin/sh
# test-engines.sh vllm|adapters DIR: runs what is built in this tree with the engines of need-engines.sh in DIR: the connector for
# vLLM, or the adapters for SGLang and LMCache, each in a process of its own.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.."
kind=$1 dir=$2
scripts/need-engines.sh "$kind" "$dir" || exit $(($? == 3 ? 0 : $?))
export PYTHONPATH="$PWD/python" TUTTIFS_LIBRARY="$PWD/build/lib/libtuttifs.so" TUTTIFS_BINARY="$PWD/bin/tuttifs" \
  PYTHONDONTWRITEBYTECODE=1
status=0
run() { "$dir/bin/python" -m unittest discover -v -s "$@" || status=1; }
case $kind in
  vllm) run python/vllmtests ;;
  adapters)
    for engine in sglang lmcache lmcache_mp; do
      OMP_NUM_THREADS=1 run python/adaptertests -p "test_$engine.py"
    done ;;
esac
exit "$status"

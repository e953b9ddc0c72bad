#!/bin/sh
# compare_engines.sh DIR VLLM [FLAGS]: runs compare_engines.py with vLLM and LMCache from need-engines.sh in DIR and VLLM, and
# with what is built in this tree.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.."
dir=$1 vllm=$2
shift 2
scripts/need-engines.sh compare "$dir" "$vllm" || exit $(($? == 3 ? 0 : $?))
PYTHONDONTWRITEBYTECODE=1 exec "$dir/bin/python" scripts/compare_engines.py "$@"

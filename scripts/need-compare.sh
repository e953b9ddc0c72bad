#!/bin/sh
# need-compare.sh DIR VLLM: makes DIR a Python environment that has what VLLM, one from need-engines.sh, has, and LMCache, from PyPI,
# once: some 150 MB. Of what LMCache asks for only that is installed which its connector and its local disk import.
# The exit status is 3, and the last line the reason, where that cannot be.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.."
dir=$1 vllm=$2
version=0.5.6
scripts/need-engines.sh vllm "$vllm"
[ ! -e "$dir/ready-$version" ] || exit 0
cannot() { echo "$*"; exit 3; }
rm -rf "$dir"
"$vllm/bin/python" -m venv "$dir" || cannot "python3 has no venv here"
log=$dir/install.log
there=$("$vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
here=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Behind its own packages. addsitedir reads the other environment's .pth files as well.
echo "import site; site.addsitedir('$there')" >"$here/zz_vllm.pth"
pip() { "$dir/bin/python" -m pip --no-input --disable-pip-version-check "$@" >>"$log" 2>&1; }
echo "installing LMCache $version in $dir"
pip install --no-deps "lmcache==$version" || cannot "LMCache $version cannot be had: see $log"
pip install --no-deps sortedcontainers aiofile caio aiofiles orjson nvtx redis httptools uvicorn ||
  cannot "what LMCache imports cannot be had: see $log"
touch "$dir/ready-$version"

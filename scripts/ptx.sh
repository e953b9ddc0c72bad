#!/bin/sh
# ptx.sh build | check: compiles cuda/*.cu to the PTX beside them, which is committed and embedded, or compiles them anew and
# compares. nvcc 13.0 comes from its PyPI packages and is installed in build/nvcc on first use; nothing else of CUDA is needed.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
cd "$(dirname "$0")/.." || exit 1
# The compiler's exact version: another one may write other PTX from the same source.
packages='nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96'
home=build/nvcc/nvidia/cu13
unset NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS

# install exits with 75 where no package index can be reached.
install() {
  [ ! -f build/nvcc/complete ] || return 0
  scripts/need-tools.sh python3:python3 g++:g++
  python3 -m pip --version >/dev/null 2>&1 || scripts/need-tools.sh pip3:python3-pip
  echo "installing nvcc 13.0 from PyPI in build/nvcc (about 100 MB)"
  rm -rf build/nvcc && mkdir -p build/nvcc
  # shellcheck disable=SC2086 # one word a package
  # With --target nothing of the system's Python is touched; the variables keep pip from fearing that.
  if ! PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -vv --disable-pip-version-check --no-deps --no-compile \
    --target build/nvcc $packages >build/nvcc/log 2>&1; then
    if grep -iE -m 1 'could not fetch URL.*(connection|timed out|ssl)|NewConnectionError|ProxyError' build/nvcc/log >&2; then
      echo "ptx: pip reaches no package index, so nvcc is not installed" >&2
      exit 75
    fi
    grep -E '^(ERROR|WARNING)' build/nvcc/log >&2 || tail -n 20 build/nvcc/log >&2
    echo "ptx: pip could not install nvcc; its words are above" >&2
    exit 1
  fi
  chmod +x $home/bin/* $home/nvvm/bin/*
  touch build/nvcc/complete
}

# compile writes the PTX of all sources to a folder. In the names of functions of internal linkage is a hash of the folder that
# nvcc ran in, which is taken out.
compile() {
  nvcc=$PWD/$home/bin/nvcc
  for source in cuda/*.cu; do
    name=$(basename "$source" .cu)
    (cd cuda && "$nvcc" -ptx -arch=compute_80 -O3 --std=c++17 -o "$1/$name.ptx" "$name.cu")
    sed -i 's/_INTERNAL_[0-9a-f]\{8\}_/_INTERNAL_00000000_/g' "$1/$name.ptx"
  done
}

case ${1-} in
build)
  install
  compile "$PWD/cuda"
  ;;
check)
  (install) || {
    status=$?
    [ $status = 75 ] || exit $status
    echo "ptx: skipped: the committed PTX is not compared with its sources"
    exit 0
  }
  rm -rf build/ptx && mkdir -p build/ptx
  compile "$PWD/build/ptx"
  for ptx in build/ptx/*.ptx; do
    cmp "$ptx" "cuda/${ptx##*/}" || {
      echo "ptx: cuda/${ptx##*/} is not what its source compiles to; run 'make ptx' and commit it" >&2
      exit 1
    }
  done
  for ptx in cuda/*.ptx; do
    [ -f "build/ptx/${ptx##*/}" ] || { echo "ptx: $ptx has no source" >&2; exit 1; }
  done
  echo "ptx: the committed PTX is what nvcc makes of its sources"
  ;;
*)
  echo "usage: ptx.sh build | check" >&2
  exit 2
  ;;
esac

#!/bin/bash
# gpu-check.sh DIRECTORY: the correctness tests that need a GPU, on this machine's, in three minutes and a half. The test
# binaries are those of 'make gpu-tests', so this machine needs neither Go nor the network. A line each is printed, and
# what they said lies in DIRECTORY. TUTTIFS_GPU names the GPU by its number, TUTTIFS_SEED repeats what is random, and
# TUTTIFS_CHECK_SECONDS is the most that all of it may take, 220 by default.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# = 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 1
logs=$(realpath "$1")
tests=$PWD/build/gpu
for t in cuda cudatest gio engine; do
  [ -x "$tests/$t.test" ] || { echo "gpu-check: there is no build/gpu/$t.test: 'make gpu-tests' makes it" >&2; exit 1; }
done
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>/dev/null
# Volumes of the tests lie in memory where that is possible.
if [ -d /dev/shm ] && [ -w /dev/shm ]; then
  TMPDIR=$(mktemp -d /dev/shm/tuttifs-gpu-check.XXXXXX)
  export TMPDIR
  trap 'rm -rf "$TMPDIR"' EXIT
fi
failed=0
# Machines with GPUs are dear: after so many seconds what is left is left out. What tells most comes first.
most=${TUTTIFS_CHECK_SECONDS:-220}

# check NAME SECONDS PACKAGE PATTERN [VARIABLE=VALUE...]: runs the tests of a package that match, but not those of the
# fake, for so many seconds at most.
check() {
  local name=$1 limit=$2 package=$3 pattern=$4 log=$logs/$1.log begin=$SECONDS verdict=ok
  shift 4
  [ $limit -le $((most - SECONDS)) ] || limit=$((most - SECONDS))
  if [ $limit -lt 5 ]; then
    printf '%-28s left out, no time\n' "$name"
    return 1
  fi
  (cd "$package" && env "$@" timeout -k 5 $limit "$tests/${package##*/}.test" -test.v -test.timeout $((limit - 2))s \
    -test.run "$pattern" -test.skip 'Fake|Companion|/fake' >"$log" 2>&1)
  local code=$?
  if [ $code != 0 ]; then
    verdict="FAILED ($code)"
  elif grep -q 'needs a GPU' "$log"; then
    verdict='skipped, no GPU'
  fi
  printf '%-28s %4d s  %4d passed %3d failed %3d skipped  %s\n' "$name" $((SECONDS - begin)) \
    "$(grep -c -- '--- PASS' "$log")" "$(grep -c -- '--- FAIL' "$log")" "$(grep -c -- '--- SKIP' "$log")" "$verdict"
  [ $code = 0 ] || grep -m 12 -E -- '^ *--- FAIL|_test.go|giotest/|panic:|fatal' "$log"
  [ "$verdict" = ok ]
}

# together: waits for checks in the background.
together() {
  local pid
  for pid in "$@"; do wait "$pid" || failed=1; done
}

some='./^(Geometries|Mixed|Order|Faults|Storm|HeldWrites|Concurrent|Layers)$'
check kernels 40 cuda/cudatest '^TestGPU' || failed=1
check ring 70 gio '^TestGPU(Load|Compute|StoreWaits|StoreFrees|Registers)|^TestGPU$/^ring$' & ring=$!
check polling 70 gio '^TestGPU$/^polling$' & polling=$!
check stores 70 gio '^TestGPU(Stores|Paced|Scheduled|SeesCompute|HostAhead)$' & stores=$!
together $ring $polling $stores
check two-processes 40 engine '^TestGPUProcess' || failed=1
beside=
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  beside="python3 $PWD/scripts/gpu_churn.py"
else
  echo "gpu-check: no PyTorch with CUDA here: its allocator is left out" >&2
fi
# The number of hardware queues decides which streams hold which others up.
check connections-1 40 gio "^TestGPU\$/$some" CUDA_DEVICE_MAX_CONNECTIONS=1 & first=$!
check connections-8 40 gio "^TestGPU\$/$some" CUDA_DEVICE_MAX_CONNECTIONS=8 & eighth=$!
check cuda 40 cuda . & calls=$!
together $first $eighth $calls
others=(TUTTIFS_COMPANIONS=3 "TUTTIFS_BESIDE=$beside")
check beside-others-ring 60 gio '^TestGPUBesideOthers$/^ring$' "${others[@]}" || failed=1
# Kernels that poll for what the host does have their turn on the GPU only now and then: all of it would take minutes.
check beside-others-polling 90 gio '^TestGPUBesideOthers$/^polling$/^(Mixed|Order|Faults|Layers)$' \
  "${others[@]}" || failed=1
exit $failed

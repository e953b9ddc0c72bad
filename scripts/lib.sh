#!/bin/bash
# lib.sh GO DIRECTORY: builds libtuttifs.so. Nothing but the functions of include/libtuttifs.h can be seen in it.
set -euo pipefail
go=$1
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
command -v "${CC:-gcc}" >/dev/null || { echo "lib.sh: the library has a C side: install gcc, or set CC" >&2; exit 1; }
link="-Wl,--version-script=$PWD/lib/libtuttifs.map -Wl,-soname,libtuttifs.so -Wl,-z,defs"
CGO_ENABLED=1 "$go" build -trimpath -buildmode=c-shared -ldflags "-s -w -extldflags '$link'" -o "$out/libtuttifs.so" ./lib
rm -f "$out/libtuttifs.h" # Go's own; include/libtuttifs.h is the interface

#!/bin/bash
# lib.sh GO DIRECTORY: builds libtuttifs.so. Nothing but the functions of include/libtuttifs.h can be seen in it.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -euo pipefail
go=$1
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
command -v "${CC:-gcc}" >/dev/null || { echo "lib.sh: the library has a C side: install gcc, or set CC" >&2; exit 1; }
# The name that programs ask for at run time has the interface's major number; the other one is for the linker.
name=libtuttifs.so.$(sed -n 's/^#define TUTTIFS_LIB_MAJOR //p' include/libtuttifs.h)
link="-Wl,--version-script=$PWD/lib/libtuttifs.map -Wl,-soname,$name -Wl,-z,defs"
CGO_ENABLED=1 "$go" build -trimpath -buildmode=c-shared -ldflags "-s -w -extldflags '$link'" -o "$out/$name" ./lib
ln -sf "$name" "$out/libtuttifs.so"
rm -f "$out/libtuttifs.so.h" # Go's own; include/libtuttifs.h is the interface

#!/bin/sh
# need-go.sh [GO]: says what is missing if the Go toolchain is absent or older than go.mod asks.
go=${1:-go}
want=$(sed -n 's/^go \([0-9]*\.[0-9]*\).*/\1/p' "$(dirname "$0")/../go.mod")
command -v "$go" >/dev/null 2>&1 || {
  echo "tuttifs is built with Go $want or newer, and there is no '$go' in PATH: see https://go.dev/dl/" >&2
  exit 1
}
have=$("$go" env GOVERSION | sed 's/^go//')
oldest=$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n 1)
[ "$oldest" = "$want" ] || {
  echo "tuttifs needs Go $want or newer; '$go' is $have: see https://go.dev/dl/" >&2
  exit 1
}

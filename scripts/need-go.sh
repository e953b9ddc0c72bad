#!/bin/sh
# need-go.sh [GO]: makes sure of a Go toolchain that is as new as go.mod asks. Where there is none, it installs Debian's or Ubuntu's
# package and says so; a Go of 1.21 or later fetches the version that go.mod names by itself.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -u
go=${1:-go}
cd "$(dirname "$0")/.." || exit 1
want=$(sed -n 's/^go \([0-9]*\.[0-9]*\).*/\1/p' go.mod)
if ! command -v "$go" >/dev/null 2>&1 && [ "$go" = go ]; then
  scripts/need-tools.sh go:golang-go
fi
command -v "$go" >/dev/null 2>&1 || {
  echo "tuttifs is built with Go $want or newer, and there is no '$go' in PATH: see https://go.dev/dl/" >&2
  exit 1
}
have=$("$go" env GOVERSION 2>/dev/null | sed 's/^go//')
oldest=$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n 1)
[ "$oldest" = "$want" ] || {
  echo "tuttifs needs Go $want or newer; '$go' is ${have:-older than that}: see https://go.dev/dl/" >&2
  exit 1
}

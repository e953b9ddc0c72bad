#!/bin/sh
# fuzz.sh GO TIME: runs every fuzz target of the tree for TIME each. A finding is written below the package's testdata/fuzz.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -eu
go=$1 time=$2
cd "$(dirname "$0")/.."
grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
  sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file" | while read -r name; do
    echo "== $(dirname "$file") $name"
    "$go" test -run '^$' -fuzz "^$name\$" -fuzztime "$time" "$(dirname "$file")"
  done
done

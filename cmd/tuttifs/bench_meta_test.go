package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBenchMeta(t *testing.T) {
	dir := t.TempDir()
	var out, messages bytes.Buffer
	e := &env{stdout: &out, stderr: &messages}
	argv := []string{"tuttifs", "bench", "meta", "--files", "20000", "--dir", dir, "--json"}
	code := runMain(context.Background(), e, argv)
	require.Zero(t, code, messages.String())
	var got map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	for _, k := range []string{"mount_seconds", "bytes_per_file", "lookups_per_second"} {
		require.Greater(t, got[k], 0.0, k)
	}
	require.Equal(t, 20000.0, got["files"])
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "the drive files are removed")
}

func TestBenchMetaRefuses(t *testing.T) {
	for _, args := range [][]string{{"--files", "0"}, {"surplus"}, {"--dir", "/nonexistent"}} {
		var out, messages bytes.Buffer
		e := &env{stdout: &out, stderr: &messages}
		code := runMain(context.Background(), e, append([]string{"tuttifs", "bench", "meta"}, args...))
		require.NotZero(t, code)
		require.Empty(t, out.String())
		require.NotEmpty(t, messages.String())
	}
}

func TestBenchKeysDiffer(t *testing.T) {
	seen := map[[32]byte]bool{}
	for n := range uint64(100_000) {
		k := benchKey(n)
		require.False(t, seen[k])
		seen[k] = true
	}
}

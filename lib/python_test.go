//go:build cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// python is an interpreter with the given module.
func python(t *testing.T, module string) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	if err := exec.Command(path, "-c", "import "+module).Run(); err != nil {
		t.Skipf("python3 has no %s here", module)
	}
	return path
}

const sizesInPython = `
import sys, ctypes, re
sys.path.insert(0, "../scripts")
import tuttifs_ctypes as t
for name in "SessionOptions SessionStats Run Object PoolOptions PoolStats StridedRun Paged Lease Item".split():
    c = re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
    print("tuttifs_" + c, ctypes.sizeof(getattr(t, name)))
`

// TestPythonStructures: the module for Python has the header's structures, and all of its functions.
func TestPythonStructures(t *testing.T) {
	gcc := compiler(t, "gcc")
	interpreter := python(t, "ctypes")
	program := filepath.Join(t.TempDir(), "sizes")
	run(t, gcc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I../include", "-o", program, "testdata/sizes.c")
	want, err := exec.Command(program).Output()
	require.NoError(t, err)
	got, err := exec.Command(interpreter, "-B", "-c", sizesInPython).CombinedOutput()
	require.NoError(t, err, "%s", got)
	require.Equal(t, string(want), string(got))

	header, err := os.ReadFile("../include/libtuttifs.h")
	require.NoError(t, err)
	module, err := os.ReadFile("../scripts/tuttifs_ctypes.py")
	require.NoError(t, err)
	for _, f := range regexp.MustCompile(`(?m)^int tuttifs_(\w+)\(`).FindAllStringSubmatch(string(header), -1) {
		if !strings.HasSuffix(f[1], "_at") { // flat memory is for C
			require.Contains(t, string(module), `"`+f[1]+`": [`)
		}
	}
	for _, s := range regexp.MustCompile(`(?m)^struct (tuttifs_\w+) \{`).FindAllStringSubmatch(string(header), -1) {
		require.Contains(t, string(want), s[1]+" ", "a structure whose size is not compared")
	}
}

// TestBubbleReport: what is made of measurements of bubbles, which needs nothing that is measured.
func TestBubbleReport(t *testing.T) {
	interpreter := python(t, "unittest")
	command := exec.Command(interpreter, "-B", "-m", "unittest", "test_bubbles")
	command.Dir = "../scripts"
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "OK")
}

// TestScripts runs the programs that need PyTorch, in their smallest cases, without a GPU.
func TestScripts(t *testing.T) {
	interpreter := python(t, "torch")
	needMount(t)
	dir := t.TempDir()
	run(t, "../scripts/lib.sh", "go", dir)
	binary := filepath.Join(dir, "tuttifs")
	run(t, "go", "build", "-o", binary, "../cmd/tuttifs")
	common := []string{"--device", "cpu", "--runs", "1", "--tuttifs", binary, "--lib",
		filepath.Join(dir, "libtuttifs.so"), "--where", dir}
	for script, args := range map[string][]string{
		"llama_restore.py": {"--tokens", "256", "--layers", "2", "--block", "16", "--piece", "64", "--cached", "50,90"},
		"ranks_restore.py": {"--ranks", "2", "--layers", "2", "--files", "8"},
		"bubbles.py": {"--tokens", "256", "--layers", "2", "--block", "16", "--hits", "90,85", "--seconds", "1",
			"--ways", "tuttifs,by-hand,no-scheduler", "--backlog-ways", "by-hand", "--output", filepath.Join(dir, "bubbles")},
	} {
		t.Run(script, func(t *testing.T) {
			run(t, interpreter, append(append([]string{"-B", "../scripts/" + script}, common...), args...)...)
		})
	}
}

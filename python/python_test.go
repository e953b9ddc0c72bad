// Package python has no Go code: this test runs the Python package's own, against what the tree builds.
package python

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// interpreter is a python3 that is new enough.
func interpreter(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	if exec.Command(path, "-c", "import sys; sys.exit(sys.version_info < (3, 10))").Run() != nil {
		t.Skip("python3 is older than 3.10 here")
	}
	return path
}

// run runs a tool and returns what it said.
func run(t *testing.T, environ []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), environ...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", name, out)
	return string(out)
}

// build builds the command, the library and another Go library into a directory, and returns the environment by which
// the package finds them.
func build(t *testing.T) []string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc here")
	}
	dir := t.TempDir()
	run(t, nil, "go", "build", "-o", filepath.Join(dir, "tuttifs"), "../cmd/tuttifs")
	run(t, nil, "../scripts/lib.sh", "go", dir)
	second := filepath.Join(dir, "second.so")
	run(t, nil, "go", "build", "-buildmode=c-shared", "-o", second, "testdata/second/second.go")
	here, err := os.Getwd()
	require.NoError(t, err)
	return []string{"TUTTIFS_LIBRARY=" + filepath.Join(dir, "libtuttifs.so"),
		"TUTTIFS_BINARY=" + filepath.Join(dir, "tuttifs"), "TUTTIFS_SECOND_GO=" + second, "PYTHONPATH=" + here,
		"PYTHONDONTWRITEBYTECODE=1", "TMPDIR=" + dir}
}

// TestPackage runs the unit tests, file by file. What they skip, and why, is in the log.
func TestPackage(t *testing.T) {
	python := interpreter(t)
	environ := build(t)
	files, err := filepath.Glob("tests/test_*.py")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".py")
		t.Run(name, func(t *testing.T) {
			t.Parallel() // each has volumes of its own, and waits for processes
			out := run(t, environ, python, "-m", "unittest", "discover", "-v", "-s", "tests", "-p", name+".py")
			for _, line := range strings.Split(out, "\n") {
				if strings.Contains(line, "skipped") {
					t.Log(line)
				}
			}
			require.NotContains(t, out, "Ran 0 tests")
		})
	}
}

// TestTypes checks the package's types, where mypy is installed.
func TestTypes(t *testing.T) {
	python := interpreter(t)
	if exec.Command(python, "-m", "mypy", "--version").Run() != nil {
		t.Skip("python3 has no mypy here")
	}
	run(t, nil, python, "-m", "mypy", "--strict", "--cache-dir=/dev/null", "tuttifs")
}

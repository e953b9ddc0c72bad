//go:build cgo

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// structuresInPython says where the fields of the package's structures are, or writes the C program that says it.
const structuresInPython = `
import sys, ctypes, re
sys.path.insert(0, "../python")
import tuttifs._lib as t
in_c = sys.argv[1] == "c"
if in_c:
    print('#include <stddef.h>\n#include <stdio.h>\n#include "libtuttifs.h"\nint main(void) {')
for name, s in vars(t).items():
    if isinstance(s, type) and issubclass(s, ctypes.Structure) and hasattr(s, "_fields_"):
        c = "struct tuttifs_" + re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
        for f, _ in s._fields_:
            if in_c:
                print(f'printf("{c}.{f} %zu %zu\\n", offsetof({c}, {f}), sizeof((({c} *)0)->{f}));')
            else:
                print(f"{c}.{f}", getattr(s, f).offset, getattr(s, f).size)
        print(f'printf("{c} %zu\\n", sizeof({c}));' if in_c else f"{c} {ctypes.sizeof(s)}")
if in_c:
    print("return 0; }")
`

// TestPythonStructures: the package for Python has the header's structures, all of them with their fields in their
// places, and its functions.
func TestPythonStructures(t *testing.T) {
	gcc := compiler(t, "gcc")
	interpreter := python(t, "ctypes")
	inPython := func(what string) []byte {
		out, err := exec.Command(interpreter, "-B", "-c", structuresInPython, what).CombinedOutput()
		require.NoError(t, err, "%s", out)
		return out
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "structures.c"), filepath.Join(dir, "structures")
	require.NoError(t, os.WriteFile(source, inPython("c"), 0o600))
	run(t, gcc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I../include", "-o", program, source)
	want, err := exec.Command(program).Output()
	require.NoError(t, err)
	require.Equal(t, string(want), string(inPython("python")))

	header, err := os.ReadFile("../include/libtuttifs.h")
	require.NoError(t, err)
	module, err := os.ReadFile("../python/tuttifs/_lib.py")
	require.NoError(t, err)
	for _, f := range regexp.MustCompile(`(?m)^int tuttifs_(\w+)\(`).FindAllStringSubmatch(string(header), -1) {
		require.Contains(t, string(module), `"`+f[1]+`": [`)
	}
	for _, s := range regexp.MustCompile(`(?m)^struct (tuttifs_\w+) \{`).FindAllStringSubmatch(string(header), -1) {
		require.Contains(t, string(want), "struct "+s[1]+" ", "a structure that is not compared")
	}
}

// TestReports: what is made of measurements, and which flags are refused: nothing is measured for that.
func TestReports(t *testing.T) {
	interpreter := python(t, "unittest")
	command := exec.Command(interpreter, "-B", "-m", "unittest", "test_bubbles", "test_compare", "test_flags")
	command.Dir = "../scripts"
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "OK")
}

// TestScripts runs the programs that measure engines, in their smallest cases, without a GPU.
func TestScripts(t *testing.T) {
	python(t, "ctypes")
	needMount(t)
	dir := t.TempDir()
	run(t, "../scripts/lib.sh", "go", dir)
	binary := filepath.Join(dir, "tuttifs")
	run(t, "go", "build", "-o", binary, "../cmd/tuttifs")
	common := []string{"--runs", "1", "--tuttifs", binary, "--lib", filepath.Join(dir, "libtuttifs.so"), "--where", dir}
	figures := filepath.Join(dir, "bubbles")
	for name, script := range map[string]struct {
		module string
		words  []string
	}{
		"llama": {"torch", []string{"llama_restore.py", "--device", "cpu", "--tokens", "256", "--layers", "2",
			"--block", "16", "--piece", "64", "--cached", "50,90"}},
		"compare": {"torch", []string{"compare_torch.py", "--device", "cpu", "--tokens", "512", "--layers", "2",
			"--block", "16", "--piece", "256", "--cached", "50", "--bandwidth-tokens", "256"}},
		"ranks": {"torch", []string{"ranks_restore.py", "--device", "cpu", "--ranks", "2", "--layers", "2", "--files", "8"}},
		"bubbles": {"torch", []string{"bubbles.py", "--device", "cpu", "--tokens", "256", "--layers", "2", "--block", "16",
			"--hits", "90", "--seconds", "1", "--drives", "ram", "--output", figures + ".cpu"}},
		// The study of bubbles at a small scale: compute is slept, and takes no PyTorch.
		"study": {"ctypes", []string{"bubbles.py", "--device", "none", "--tokens", "4096", "--layers", "3", "--piece", "256",
			"--hits", "98,90", "--seconds", "0.5", "--backlog-seconds", "0.05", "--store-mib", "64",
			"--output", figures + ".none"}},
	} {
		t.Run(name, func(t *testing.T) {
			words := append([]string{"-B", "../scripts/" + script.words[0]}, script.words[1:]...)
			run(t, python(t, script.module), append(words, common...)...)
		})
	}
	requireStudy(t, figures+".none")
	t.Run("killed", func(t *testing.T) {
		command := exec.Command(python(t, "unittest"), "-B", "-m", "unittest", "test_ram_volume")
		command.Dir, command.Env = "../scripts", append(os.Environ(), "TUTTIFS_BINARY="+binary)
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.NotContains(t, string(out), "skipped")
	})
}

// requireStudy: every way that needs no GPU was measured, and drives whose phases are on saw no mixed commands.
func requireStudy(t *testing.T, path string) {
	document, err := os.ReadFile(path)
	require.NoError(t, err)
	var study struct {
		Cells []struct {
			Drives, Way, Stores string
			Mixed               int `json:"mixed_commands"`
		}
		Backlog  []struct{ Way string }
		Failures []string
	}
	require.NoError(t, json.Unmarshal(document, &study))
	require.Empty(t, study.Failures)
	seen := map[string]bool{}
	for _, c := range study.Cells {
		seen[c.Drives+" "+c.Way+" "+c.Stores] = true
		if c.Way == "tuttifs" || c.Way == "no-scheduler" {
			require.Zero(t, c.Mixed)
		}
	}
	for _, way := range []string{"tuttifs", "no-scheduler", "no-separation"} {
		for _, kind := range []string{"ram " + way + " own", "paper " + way + " own", "paper " + way + " backlog"} {
			require.True(t, seen[kind], kind)
		}
	}
	require.Len(t, study.Backlog, 4)
}

// Package tuttifs holds nothing but the test of the house: which room may import which.
package tuttifs

import (
	"bytes"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// rooms is the import graph of docs/design.md: an edge that is not here is a fault of the design or of this table. The
// command may import everything and is not listed. Rooms named ...test hold what several rooms' tests share; no edge
// leads to them.
var rooms = map[string][]string{
	"stripe":            {},
	"checksum":          {},
	"lifetime":          {},
	"drive":             {"lifetime", "nvme"},
	"strictjson":        {},
	"wholefile":         {},
	"drivemodel":        {"strictjson"},
	"phase":             {},
	"nvme":              {},
	"ioctl":             {},
	"wear":              {"strictjson"},
	"slack":             {"drivemodel", "strictjson", "wholefile"},
	"contentkey":        {},
	"extentmap/ondisk":  {"stripe"},
	"extentmap":         {"extentmap/ondisk", "stripe", "drive"},
	"extentmap/maptest": {"drive"},
	"extentmap/check":   {"extentmap/ondisk", "stripe", "drive", "checksum"},
	"gpufile": {"extentmap", "extentmap/ondisk", "stripe", "checksum", "wear", "strictjson",
		"lifetime"},
	"nvme/emu":      {"nvme", "drive", "drivemodel", "phase", "lifetime"},
	"nvme/vfio":     {"nvme", "drive", "lifetime"},
	"nvme/treetest": {},
	"nvme/nvmetest": {"nvme", "nvme/emu", "nvme/vfio", "drive", "lifetime"},
	"cuda":          {},
	"cuda/cudatest": {"cuda", "nvme", "checksum"},
	"gio":           {"stripe", "nvme", "checksum", "cuda", "slack", "lifetime"},
	"gio/giotest":   {"gio", "stripe", "nvme", "nvme/emu", "drive", "drivemodel", "phase", "checksum"},
	"engine": {"ioctl", "gio", "nvme", "nvme/emu", "drive", "checksum", "stripe", "cuda", "slack", "lifetime",
		"wear"},
	"lib": {"engine", "gio", "stripe", "checksum", "cuda", "contentkey"},
	"fs":  {"ioctl", "gpufile", "extentmap", "stripe"},
	"daemon": {"fs", "ioctl", "gpufile", "extentmap", "nvme", "nvme/emu", "nvme/vfio", "drive", "drivemodel",
		"checksum", "phase", "stripe", "wear", "lifetime"},
}

// onlyIn names the rooms that may import a module (tests included).
var onlyIn = map[string]string{
	"github.com/hanwen/go-fuse":    "fs",
	"github.com/ebitengine/purego": "cuda",
	"github.com/spf13/pflag":       "cmd",
	"C":                            "lib",
	"github.com/prometheus":        "daemon",
}

// sources calls f for every Go file of the tree, by its slash-separated path.
func sources(t *testing.T, f func(path string, text []byte)) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (d.Name()[0] == '.' || d.Name() == "build" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			n++
			f(filepath.ToSlash(path), text)
		}
		return err
	})
	require.NoError(t, err)
	require.Greater(t, n, len(rooms), "the walk found the tree")
}

func room(path string) string {
	return strings.TrimSuffix(path[:strings.LastIndexByte("/"+path, '/')], "/")
}

// edges reports every import that the tables do not allow.
func edges(path string, text []byte) (bad []string) {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ImportsOnly)
	if err != nil {
		return []string{err.Error()}
	}
	from, test := room(path), strings.HasSuffix(path, "_test.go")
	for _, spec := range file.Imports {
		to, _ := strconv.Unquote(spec.Path.Value)
		for module, owner := range onlyIn {
			if strings.HasPrefix(to, module) && from != owner && !strings.HasPrefix(from, owner+"/") {
				bad = append(bad, path+" imports "+to+", which is for "+owner)
			}
		}
		to, ours := strings.CutPrefix(to, "tuttifs/")
		if !ours || test || strings.HasPrefix(from, "cmd/") {
			continue
		}
		if allowed, known := rooms[from]; !known {
			bad = append(bad, path+": room "+from+" is not in the table")
		} else if !slices.Contains(allowed, to) {
			bad = append(bad, path+" imports "+to+", which is not drawn in the design")
		}
	}
	return bad
}

func TestImportEdges(t *testing.T) {
	sources(t, func(path string, text []byte) {
		for _, e := range edges(path, text) {
			t.Error(e)
		}
	})
}

func TestImportEdgesAreSeen(t *testing.T) {
	const file = "package x\nimport (\n\"tuttifs/daemon\"\n\"github.com/hanwen/go-fuse/v2/fs\"\n)\n"
	require.Len(t, edges("gio/x.go", []byte(file)), 2)
	require.Len(t, edges("nowhere/x.go", []byte(file)), 2)
	require.Len(t, edges("gio/x_test.go", []byte(file)), 1, "tests may join rooms, but not modules")
	require.Len(t, edges("cmd/tuttifs/x.go", []byte(file)), 1)
	require.Empty(t, edges("fs/x.go", []byte("package fs\nimport \"tuttifs/gpufile\"\n")))
}

// columnsMax is the longest line, a tab counted once.
const columnsMax = 120

// Only the command exits the process; everything is finished; the project depends on no machine.
func TestHouseStyle(t *testing.T) {
	unfinished := []string{"TO" + "DO", "FIX" + "ME", `panic("st` + `ub")`}
	sources(t, func(path string, text []byte) {
		for i, line := range bytes.Split(text, []byte("\n")) {
			if n := utf8.RuneCount(line); n > columnsMax {
				t.Errorf("%s:%d: %d columns", path, i+1, n)
			}
			for _, word := range unfinished {
				if bytes.Contains(line, []byte(word)) {
					t.Errorf("%s:%d: unfinished: %s", path, i+1, word)
				}
			}
			exits := bytes.Contains(line, []byte("os.Exit(")) || bytes.Contains(line, []byte("log.Fatal"))
			if exits && !strings.HasPrefix(path, "cmd/") && !strings.HasSuffix(path, "_test.go") {
				t.Errorf("%s:%d: only the command exits the process", path, i+1)
			}
		}
	})
}

// goBuild builds for the given environment and fails with the compiler's words.
func goBuild(t *testing.T, environ []string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", append([]string{"build"}, args...)...)
	cmd.Env = append(os.Environ(), environ...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestBuildsForARM64(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles everything once more")
	}
	goBuild(t, []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=arm64"}, "./...")
}

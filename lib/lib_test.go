//go:build cgo

package main

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/engine"
	"tuttifs/extentmap"
	"tuttifs/gio"
	"tuttifs/nvme/nvmetest"
)

// run runs a tool and fails with what it said.
func run(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s: %s", name, out)
}

// compiler is a C compiler of the machine.
func compiler(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no %s here", name)
	}
	return path
}

// needMount skips a test where nothing can be mounted.
func needMount(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root here")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse")
	}
}

// newMount formats three drives and mounts them until the test ends.
func newMount(t *testing.T) string {
	t.Helper()
	return newMountOf(t, daemon.Options{})
}

// newMountOfSSDs has virtual controllers for hardware, and gives everybody queue pairs of theirs.
func newMountOfSSDs(t *testing.T) string {
	t.Helper()
	trust, err := daemon.ParseTrust("on")
	require.NoError(t, err)
	return newMountOf(t, daemon.Options{Paths: nvmetest.Addresses(3), Real: trust})
}

func newMountOf(t *testing.T, o daemon.Options) string {
	t.Helper()
	needMount(t)
	dir := t.TempDir()
	var drives []drive.Drive
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprintf("drive%d", i))
		require.NoError(t, drive.Create(path, 64<<20))
		d, err := drive.Open(path, drive.Options{})
		require.NoError(t, err)
		drives = append(drives, d)
	}
	_, err := extentmap.Format(drives, extentmap.FormatOptions{Label: "lib"})
	require.NoError(t, err)
	for _, d := range drives {
		require.NoError(t, d.Close())
	}
	mount := filepath.Join(dir, "mnt")
	require.NoError(t, os.Mkdir(mount, 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "run"), 0o700))
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	o.Dir, o.SocketDir, o.Ready = mount, filepath.Join(dir, "run"), func() { close(ready) }
	if o.Paths == nil {
		o.Paths = []string{filepath.Join(dir, "drive0")}
	} else {
		before := drive.OpenAddress
		drive.OpenAddress = nvmetest.SSDs(dir)
		t.Cleanup(func() { drive.OpenAddress = before })
	}
	go func() { ended <- daemon.Run(ctx, o) }()
	select {
	case <-ready:
	case err := <-ended:
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(20 * time.Second):
			t.Error("the daemon did not end")
		}
	})
	return mount
}

// describeInPython opens sessions with the package for Python, which say whose queue pairs they have.
const describeInPython = `
import sys
sys.path.insert(0, "../python")
import tuttifs
with tuttifs.Store(sys.argv[1]) as store:
    with store.session(real=True, lanes=2, depth=64, dma_bytes=96 << 20) as session:
        assert "real queue pairs of all drives: 2 lanes on 3 drives" in session.describe(), session.describe()
    with store.session(lanes=2, depth=64, dma_bytes=96 << 20) as session:
        assert "mediated: 2 lanes on 3 drives" in session.describe(), session.describe()
`

// TestC builds the library as make lib does, and C programs that use it on a real mount.
func TestC(t *testing.T) {
	gcc := compiler(t, "gcc")
	dir := t.TempDir()
	run(t, "../scripts/lib.sh", "go", dir)
	requireLittleTLS(t, filepath.Join(dir, "libtuttifs.so"))
	for _, name := range []string{"roundtrip", "threads"} {
		t.Run(name, func(t *testing.T) {
			mount := newMount(t)
			program := filepath.Join(dir, name)
			run(t, gcc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-I../include", "-o", program,
				"testdata/"+name+".c", "-L"+dir, "-ltuttifs", "-lpthread", "-Wl,-rpath,"+dir)
			run(t, program, mount)
		})
	}
	t.Run("real queue pairs", func(t *testing.T) {
		mount := newMountOfSSDs(t)
		run(t, filepath.Join(dir, "roundtrip"), mount, "real")
		t.Setenv("TUTTIFS_LIBRARY", filepath.Join(dir, "libtuttifs.so"))
		run(t, python(t, "ctypes"), "-B", "-c", describeInPython, mount)
	})
}

// TestInstalled builds the example against what make install-lib installs, and runs it twice.
func TestInstalled(t *testing.T) {
	gcc := compiler(t, "gcc")
	mount := newMount(t)
	root := t.TempDir()
	prefix := filepath.Join(root, "usr")
	run(t, "make", "-s", "-C", "..", "install-lib", "DESTDIR="+root, "PREFIX=/usr", "LIBOUT="+filepath.Join(root, "out"))
	pc, err := os.ReadFile(filepath.Join(prefix, "lib/pkgconfig/libtuttifs.pc"))
	require.NoError(t, err)
	require.Regexp(t, `(?m)^prefix=/usr$`, string(pc))
	require.Regexp(t, `(?m)^Version: \d+\.\d+$`, string(pc))
	program := filepath.Join(root, "prefix")
	run(t, gcc, "-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-I"+filepath.Join(prefix, "include"), "-o", program,
		"../examples/prefix.c", "-L"+filepath.Join(prefix, "lib"), "-ltuttifs", "-Wl,-rpath,"+filepath.Join(prefix, "lib"))
	for _, want := range []string{"computed 330 tokens, stored 20 files\n",
		"restored 20 files, 10 tokens left to compute\n"} {
		out, err := exec.Command(program, mount).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, want, string(out))
	}
	// Another mount, another engine: nothing is stored there.
	out, err := exec.Command(program, "/").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "tuttifs_open(argv[1], &mount): ")
	run(t, "make", "-s", "-C", "..", "uninstall", "DESTDIR="+root, "PREFIX=/usr", "HELPERS=/usr/sbin")
	left, err := filepath.Glob(filepath.Join(prefix, "*/*tuttifs*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestSymbols: the library shows the header's functions, each with the version that it came with, and nothing else.
func TestSymbols(t *testing.T) {
	compiler(t, "gcc")
	readelf := compiler(t, "readelf")
	dir := t.TempDir()
	run(t, "../scripts/lib.sh", "go", dir)
	header, err := os.ReadFile("../include/libtuttifs.h")
	require.NoError(t, err)
	want := map[string]string{}
	for _, f := range regexp.MustCompile(`(?m)^\w[\w ]*[ *](tuttifs_\w+)\(`).FindAllStringSubmatch(string(header), -1) {
		want[f[1]] = "TUTTIFS_1.0"
	}
	require.Contains(t, want, "tuttifs_last_error")
	library := filepath.Join(dir, "libtuttifs.so")
	out, err := exec.Command(readelf, "--wide", "--dyn-syms", library).Output()
	require.NoError(t, err)
	got := map[string]string{}
	for _, line := range strings.Split(string(out), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 8 || fields[3] != "FUNC" || fields[6] == "UND" {
			continue
		}
		name, version, _ := strings.Cut(fields[7], "@@")
		got[name] = version
	}
	require.Equal(t, want, got)
	out, err = exec.Command(readelf, "--wide", "--dynamic", library).Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "soname: [libtuttifs.so.1]")
}

// requireLittleTLS: Go's thread-local memory is in the static block, and so is the library's then. What is loaded late
// has some 1.5 KiB there, for all libraries together.
func requireLittleTLS(t *testing.T, library string) {
	t.Helper()
	f, err := elf.Open(library)
	require.NoError(t, err)
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_TLS {
			require.LessOrEqual(t, p.Memsz, uint64(64))
		}
	}
}

// TestHeader: the header stands alone, in C and in C++.
func TestHeader(t *testing.T) {
	for name, args := range map[string][]string{"gcc": {"-std=c99", "-xc"}, "g++": {"-std=c++11", "-xc++"}} {
		t.Run(name, func(t *testing.T) {
			run(t, compiler(t, name), append(args, "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
				"../include/libtuttifs.h")...)
		})
	}
}

// TestHandles: a handle is good for its kind until it, or what it was made from, is closed.
func TestHandles(t *testing.T) {
	parent := newHandle("parent", 0)
	child := newHandle(7, parent)
	grandchild := newHandle(8.5, child)
	v, err := find[int](child, "child")
	require.NoError(t, err)
	require.Equal(t, 7, v)
	require.Equal(t, []int{7}, madeFrom[int](parent))
	_, err = find[string](child, "other")
	require.ErrorIs(t, err, errHandle)
	_, err = take[string](parent, "parent")
	require.NoError(t, err)
	for _, h := range []uintptr{0, parent, child, grandchild} {
		_, err = take[any](h, "closed")
		require.ErrorIs(t, err, errHandle)
	}
}

// TestCodes: what is wrapped in several meanings has the code of the one about the whole.
func TestCodes(t *testing.T) {
	require.Zero(t, codeOf(nil))
	require.EqualValues(t, -116, codeOf(fmt.Errorf("%w: %w", gio.ErrTimeout, gio.ErrDead)))
	require.EqualValues(t, -1, codeOf(fmt.Errorf("%w: of another session", engine.ErrLease)))
	require.EqualValues(t, -84, codeOf(fmt.Errorf("slot: %w", gio.ErrChecksum)))
	require.EqualValues(t, -5, codeOf(errors.New("of an unknown kind")))
}

// TestHalfGivenBack: memory of which an unregister gave a part back, before another part was busy, is refused.
func TestHalfGivenBack(t *testing.T) {
	m := memory{classes: make([]class, 1), blocks: 1}
	require.Zero(t, m.block(0, 0))
	require.Empty(t, m.registrations())
}

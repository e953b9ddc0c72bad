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
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gio"
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
	go func() {
		ended <- daemon.Run(ctx, daemon.Options{Paths: []string{filepath.Join(dir, "drive0")}, Dir: mount,
			SocketDir: filepath.Join(dir, "run"), Ready: func() { close(ready) }})
	}()
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

// TestC builds the library as make lib does, and a C program that uses it on a real mount.
func TestC(t *testing.T) {
	gcc := compiler(t, "gcc")
	mount := newMount(t)
	dir := t.TempDir()
	run(t, "../scripts/lib.sh", "go", dir)
	requireLittleTLS(t, filepath.Join(dir, "libtuttifs.so"))
	program := filepath.Join(dir, "roundtrip")
	run(t, gcc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-I../include", "-o", program,
		"testdata/roundtrip.c", "-L"+dir, "-ltuttifs", "-lpthread", "-Wl,-rpath,"+dir)
	run(t, program, mount)
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
	require.EqualValues(t, -84, codeOf(fmt.Errorf("slot: %w", gio.ErrChecksum)))
	require.EqualValues(t, -5, codeOf(errors.New("of an unknown kind")))
}

// TestHalfGivenBack: memory of which an unregister gave a part back, before another part was busy, is refused.
func TestHalfGivenBack(t *testing.T) {
	m := memory{classes: make([]class, 1), blocks: 1}
	require.Zero(t, m.block(0, 0))
	require.Empty(t, m.registrations())
}

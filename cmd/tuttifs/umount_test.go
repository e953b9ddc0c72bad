package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestUmountOfAStuckDaemon: -l asks nothing of a daemon that never answers. When that goes on, it ends cleanly.
func TestUmountOfAStuckDaemon(t *testing.T) {
	paths := formatted(t, 1, "64m")
	dir := mounted(t, paths[0])
	link, way := filepath.Join(t.TempDir(), "link"), filepath.Join(t.TempDir(), "way")
	require.NoError(t, os.Symlink(dir, link))
	require.NoError(t, os.Symlink(filepath.Dir(dir), way))
	for _, name := range []string{dir, dir + "/", link, filepath.Join(way, filepath.Base(dir))} {
		m, ok := findMount(name)
		require.True(t, ok, name)
		require.Equal(t, dir, m.dir, name)
	}
	for _, name := range []string{filepath.Dir(dir), filepath.Join(dir, ".tuttifs"), link + "x"} {
		_, ok := findMount(name)
		require.False(t, ok, name)
	}
	pid := daemonPID(t, dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	defer syscall.Kill(pid, syscall.SIGCONT)
	tuttifs(t, "umount", "-l", filepath.Join(way, filepath.Base(dir)))
	_, still := findMount(dir)
	require.False(t, still)
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	waitGone(t, pid)
	label, err := readLabel(paths[0])
	require.NoError(t, err)
	require.True(t, label.Clean)
}

// TestUmountUnderAnEngine: an engine keeps its mount; who unmounts is told which process it is and what to do. With -l
// the engine goes on, and the daemon ends with it and leaves a clean volume.
func TestUmountUnderAnEngine(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	engine := started(t, smallTrace(t, 500), dir)
	pid := daemonPID(t, dir)
	committed := func() uint64 {
		return decode[statusDocument](t, tuttifs(t, "status", "--json", dir)).Total.Committed
	}
	refused(t, 1, fmt.Sprintf("pid %d); close these or use 'tuttifs umount -l'", engine.Process.Pid), "umount", dir)
	before := committed()
	require.Eventually(t, func() bool { return committed() > before }, time.Minute, 20*time.Millisecond,
		"the engine has noticed nothing")

	tuttifs(t, "umount", "-l", dir)
	_, still := findMount(dir)
	require.False(t, still)
	refused(t, 1, "not a tuttifs mount", "umount", dir)
	time.Sleep(100 * time.Millisecond)
	require.NoError(t, syscall.Kill(pid, 0), "the daemon serves its engine")
	require.NoError(t, engine.Process.Signal(syscall.Signal(0)))
	require.NoError(t, engine.Process.Kill())
	require.Error(t, engine.Wait())
	waitGone(t, pid)
	label, err := readLabel(paths[0])
	require.NoError(t, err)
	require.True(t, label.Clean, "its last engine's end is the volume's unmount")
	tuttifs(t, "fsck", "-n", "--data", paths[0])
}

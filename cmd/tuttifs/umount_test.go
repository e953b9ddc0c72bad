package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
)

// TestUmountOfAStuckDaemon: -l asks nothing of a daemon that never answers. When that goes on, it ends cleanly.
// Meanwhile other volumes are formatted, mounted and unmounted.
func TestUmountOfAStuckDaemon(t *testing.T) {
	paths, others := formatted(t, 1, "64m"), formatted(t, 1, "64m")
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
	fd, err := unix.PidfdOpen(pid, 0) // it ends before the test does, and then its number may be another's
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	defer unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0)
	tuttifs(t, "mkfs", "-q", "-f", others[0])
	other := mounted(t, others[0])
	refused(t, 1, "mounted on "+other, "mkfs", "-f", others[0])
	tuttifs(t, "umount", other)
	tuttifs(t, "umount", "-l", filepath.Join(way, filepath.Base(dir)))
	_, still := findMount(dir)
	require.False(t, still)
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	waitGone(t, pid)
	label, err := readLabel(paths[0])
	require.NoError(t, err)
	require.True(t, label.Clean)
}

// A filesystem that somebody has mounted over the volume is not taken for it.
func TestUmountOfACoveredMount(t *testing.T) {
	paths := formatted(t, 1, "64m")
	dir := mounted(t, paths[0])
	require.NoError(t, unix.Mount("none", dir, "tmpfs", 0, "size=64k"))
	covered := true
	defer func() {
		if covered {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	}()
	over := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(over, nil, 0o600))
	for _, flag := range []string{"--lazy=false", "--lazy"} {
		refused(t, 1, dir+" is not a tuttifs mount", "umount", flag, dir)
		require.FileExists(t, over)
	}
	require.NoError(t, unix.Unmount(dir, 0))
	covered = false
	tuttifs(t, "umount", dir)
}

// Whether the label is clean is seen on a drive that is there.
func TestUmountWithoutTheFirstDrive(t *testing.T) {
	paths := formatted(t, 3, "64m")
	away := paths[0] + "-away"
	require.NoError(t, os.Rename(paths[0], away))
	dir := mounted(t, paths[1], "-o", "degraded")
	tuttifs(t, "umount", dir)
	label, err := readLabel(paths[1])
	require.NoError(t, err)
	require.True(t, label.Clean)
	require.NoError(t, os.Rename(away, paths[0]))
	mountOn(t, paths[1], dir) // and the drive is back
}

// A daemon in a container, where its process has another number, is waited for from outside. From where it cannot be
// seen, that is said.
func TestUmountOfAContainersMount(t *testing.T) {
	paths := formatted(t, 1, "64m")
	dir := mountPoint(t)
	contained := func(args ...string) (*exec.Cmd, *bytes.Buffer) {
		cmd := exec.Command(builtBinary(t), args...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		if err := cmd.Start(); errors.Is(err, unix.EPERM) {
			t.Skip("no PID namespace here: ", err)
		} else {
			require.NoError(t, err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd, &stderr
	}
	for _, outside := range []bool{true, false} {
		mount, log := contained("mount", "--foreground", "-o", "sockets="+filepath.Dir(dir), paths[0], dir)
		require.Eventually(t, func() bool {
			pid, err := daemonProcess(dir)
			return err == nil && pid == mount.Process.Pid
		}, time.Minute, 10*time.Millisecond)
		var v daemon.VersionDocument
		require.NoError(t, readStatus(dir, "version", &v))
		require.Equal(t, 1, v.PID)
		refused(t, 1, fmt.Sprintf("(pid %d)", mount.Process.Pid), "mkfs", "-f", paths[0])
		if outside {
			tuttifs(t, "umount", dir)
		} else {
			umount, stderr := contained("umount", dir)
			require.NoError(t, umount.Wait(), stderr.String())
			require.Contains(t, stderr.String(), errElsewhere.Error())
		}
		require.NoError(t, mount.Wait(), log.String())
		label, err := readLabel(paths[0])
		require.NoError(t, err)
		require.True(t, label.Clean)
	}
}

func TestInnermostPID(t *testing.T) {
	for status, pid := range map[string]int{
		"Name:\tx\nNSpid:\t4711\t12\t1\nNSpgid:\t4711\t7\t7\n": 1, "NSpid:\t12\n": 12, "NSpid:\n": 0, "Pid:\t3\n": 0, "": 0,
	} {
		require.Equal(t, pid, innermostPID([]byte(status)), status)
	}
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

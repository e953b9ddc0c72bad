package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/ioctl"
)

// extentOf is where an object of some file of a mount lies: drive index and byte offset.
func extentOf(t *testing.T, dir string, nth int) (driveIndex uint16, off int64) {
	t.Helper()
	c, err := ioctl.Open(dir, false)
	require.NoError(t, err)
	defer c.Close()
	var s ioctl.Session
	require.NoError(t, c.SessionCreate(&s))
	a, err := s.Attach(ioctl.AttachOptions{})
	require.NoError(t, err)
	defer a.Close()
	info := ioctl.PoolInfo{}
	require.NoError(t, c.PoolInfo(&info, ioctl.PoolByIndex))
	for slot, found := uint32(0), 0; ; slot++ {
		x := ioctl.Extents{Target: info.Target, Slot: slot, Extents: ioctl.Span{Bytes: 16}}
		require.Less(t, slot, uint32(1<<16), "no file")
		if c.Extents(&x) != nil {
			continue
		}
		if found++; found > nth {
			e := ioctl.View[ioctl.Extent](a.Arena, x.Extents)[0]
			return e.Drive, int64(e.Unit) * 4096
		}
	}
}

// TestScrub: damage under a mounted volume is found and evicted, and the next scrub finds nothing.
func TestScrub(t *testing.T) {
	paths := formatted(t, 3, "64m")
	dir := mounted(t, paths[0])
	require.Contains(t, tuttifs(t, "scrub", dir), "0 files")
	replayed(t, smallTrace(t, 10), dir)
	whole := decode[scrubResult](t, tuttifs(t, "scrub", "--json", "--rate", "0", dir))
	require.NotZero(t, whole.Files)
	require.NotZero(t, whole.Bytes)
	require.Zero(t, whole.ExitStatus)

	index, off := extentOf(t, dir, 3)
	f, err := os.OpenFile(paths[index], os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("damage"), off+100)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	require.NoError(t, f.Close())
	r := execAs(t, "tuttifs", "scrub", "--json", "--rate", "1g", dir)
	require.Equal(t, 1, r.code, r.stderr)
	found := decode[scrubResult](t, r.stdout)
	require.Equal(t, []any{whole.Files, uint64(1), 1}, []any{found.Files, found.Damaged, found.ExitStatus})
	require.Contains(t, tuttifs(t, "scrub", "--rate", "0", dir), "verified in")
	var stats daemon.StatsDocument
	require.NoError(t, readStatus(dir, "stats", &stats))
	require.EqualValues(t, 1, stats.Total.Bad)

	refused(t, 16, "name a mount point", "scrub")
	refused(t, 16, "--rate", "scrub", "--rate", "much", dir)
	refused(t, 8, "not a tuttifs mount", "scrub", t.TempDir())

	// A drive that does not give what it has is not damage. Its files come to an end only when fsck is told so.
	require.NoError(t, os.Truncate(paths[2], 2<<20))
	r = execAs(t, "tuttifs", "scrub", "--json", "--rate", "0", dir)
	require.Equal(t, 4, r.code, r.stderr)
	lost := decode[scrubResult](t, r.stdout)
	require.Zero(t, lost.Damaged)
	require.NotZero(t, lost.Unreadable)
	r = execAs(t, "tuttifs", "fsck", "-y", paths[0])
	require.Equal(t, 8, r.code)
	require.Contains(t, r.stderr, "it is mounted on "+dir)
	execAs(t, "tuttifs", "umount", dir)
	r = execAs(t, "tuttifs", "fsck", "-y", "--data", paths[0])
	require.Equal(t, 1, r.code, r.stdout+r.stderr)
	require.Contains(t, r.stdout, "repaired, ")
}

// TestScrubStops: there is one scrub at a time, and it ends with the command that asked for it.
func TestScrubStops(t *testing.T) {
	paths := formatted(t, 2, "64m")
	dir := mounted(t, paths[0])
	replayed(t, smallTrace(t, 10), dir)
	begun := 0
	start := func() *exec.Cmd {
		slow := exec.Command(builtBinary(t), "scrub", "--rate", "1", dir)
		require.NoError(t, slow.Start())
		begun++
		require.Eventually(t, func() bool {
			log, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "log"))
			return err == nil && strings.Count(string(log), "scrub begins") >= begun
		}, 30*time.Second, 20*time.Millisecond)
		return slow
	}
	slow := start()
	refused(t, 8, "a scrub is under way", "scrub", "--rate", "0", dir)
	require.NoError(t, slow.Process.Signal(os.Interrupt))
	var exit *exec.ExitError
	require.ErrorAs(t, slow.Wait(), &exit)
	require.Equal(t, 32, exit.ExitCode())
	require.Eventually(t, func() bool { return execAs(t, "tuttifs", "scrub", "--rate", "0", dir).code == 0 },
		30*time.Second, 20*time.Millisecond)
	begun++

	// And with the mount.
	slow = start()
	tuttifs(t, "umount", dir)
	require.ErrorAs(t, slow.Wait(), &exit)
	require.Equal(t, 8, exit.ExitCode())
}

// TestFsckAfterKill: a daemon that was killed leaves a volume that fsck -p makes clean, with all its files. With -q it
// says nothing.
func TestFsckAfterKill(t *testing.T) {
	paths := formatted(t, 2, "64m")
	dir := mounted(t, paths[0])
	replayed(t, smallTrace(t, 10), dir)
	before := decode[scrubResult](t, tuttifs(t, "scrub", "--json", "--rate", "0", dir))
	pid := daemonPID(t, dir)
	require.NoError(t, unix.Kill(pid, unix.SIGKILL))
	waitGone(t, pid)
	require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH))
	require.Contains(t, tuttifs(t, "fsck", "-n", paths[0]), "consistent, not unmounted")
	r := execAs(t, "fsck.tuttifs", "-pq", paths[0])
	require.Equal(t, fsckCorrected, r.code, r.stdout+r.stderr)
	require.Empty(t, r.stdout+r.stderr)
	require.Contains(t, tuttifs(t, "fsck", "-n", "--data", paths[0]), ": clean: ")
	mountOn(t, paths[0], dir)
	after := decode[scrubResult](t, tuttifs(t, "scrub", "--json", "--rate", "0", dir))
	require.Equal(t, before.Files, after.Files)
	require.Zero(t, after.Damaged)
}

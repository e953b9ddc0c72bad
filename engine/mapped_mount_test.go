package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/gio"
)

// TestMountDrivesInMemory: drives that are files on tmpfs are mapped by the daemon. When somebody makes one shorter,
// what lay there fails to be read, and the daemon goes on.
func TestMountDrivesInMemory(t *testing.T) {
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("no tmpfs at /dev/shm")
	}
	v := newVolumeIn(t, "/dev/shm")
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", v.cmd.Process.Pid))
	require.NoError(t, err)
	for i := range 3 {
		require.Contains(t, string(maps), filepath.Join(v.dir, fmt.Sprintf("drive%d", i)))
	}
	u := newUser(t, v, mountOptions, nil)
	keys, items := chain(1, 60)
	u.store(1, keys, items, true)
	u.restore(2, 0, keys, true)
	u.restore(3, 1, keys, false)

	// Drive 2 has no copy of the metadata. Its first label stays, so that it is not lost.
	require.NoError(t, os.Truncate(filepath.Join(v.dir, "drive2"), 64<<10))
	grants := make([]Grant, len(keys))
	n, err := u.pool.Pin(0, 4, keys, grants)
	require.NoError(t, err)
	require.Equal(t, len(keys), n)
	var ctxs []gio.IOCTX
	memory, err := u.session.Ring().Register(hostMemory(t, len(keys)*16384))
	require.NoError(t, err)
	for i, g := range grants { // object 0 of each file, of 16 KiB
		ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(i * 16384), Slot: g.Slot})
	}
	ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
	require.NoError(t, err)
	failed, err := u.session.Ring().Wait(ticket)
	require.NoError(t, err)
	require.NotEmpty(t, failed)
	require.Less(t, len(failed), len(ctxs), "the other drives are whole")
	for _, f := range failed {
		require.ErrorIs(t, f.Err, gio.ErrStatus)
		require.ErrorContains(t, f.Err, "unrecovered read")
	}
	require.NoError(t, u.pool.Release(4))

	again, items := chain(2, 60) // writes make the drive as long again
	u.store(5, again, items, false)
	u.restore(6, 0, again, true)
}

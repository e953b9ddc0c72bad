package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/drive"
)

func driveList(t *testing.T, dir string) []daemon.DriveDocument {
	t.Helper()
	return decode[daemon.DrivesDocument](t, tuttifs(t, "drive", "list", "--json", dir)).Drives
}

// TestDrives: drives are added, replaced and forgotten while the volume is in use and after one of them has vanished.
func TestDrives(t *testing.T) {
	paths := formatted(t, 3, "64m", "--width", "1")
	dir := mounted(t, paths[0])
	trace := smallTrace(t, 10)
	replayed(t, trace, dir)
	more := filepath.Join(t.TempDir(), "d3")
	require.NoError(t, drive.Create(more, 64<<20))
	refused(t, 1, "no drive 9", "drive", "forget", dir, "9")
	refused(t, 2, "number", "drive", "forget", dir, "x")
	refused(t, 1, "d1 is drive 1 of the volume that is mounted on "+dir, "drive", "add", dir, paths[1])
	require.Equal(t, "drive 3 added\n", tuttifs(t, "drive", "add", dir, more))
	list := driveList(t, dir)
	require.Len(t, list, 4)
	require.Equal(t, "online", list[3].State)
	require.Eventually(t, func() bool { return !driveList(t, dir)[3].Held }, 30*time.Second, 50*time.Millisecond)
	require.Equal(t, "drive 1 forgotten\n", tuttifs(t, "drive", "forget", dir, "1"))
	list = driveList(t, dir)
	require.Len(t, list, 3)
	copies := 0
	for _, d := range list {
		if d.Metadata {
			copies++
		}
	}
	require.Equal(t, 2, copies)
	require.Zero(t, replayed(t, trace, dir).VerifyFailures)

	// One vanishes: a reader finds out, the others go on.
	require.NoError(t, os.Truncate(paths[2], 0))
	require.Eventually(t, func() bool {
		r := execAs(t, "tuttifs", "replay", "--json", "--scale", "1024", trace, dir)
		return driveList(t, dir)[1].State == "lost" && r.code == 0
	}, time.Minute, 100*time.Millisecond)
	info := decode[infoDocument](t, tuttifs(t, "info", "--json", dir))
	require.True(t, info.Degraded)
	require.Contains(t, tuttifs(t, "info", dir), "degraded")
	status := decode[statusDocument](t, tuttifs(t, "status", "--json", dir))
	require.EqualValues(t, 1, status.DrivesLost)
	require.Zero(t, status.DriveErrors["2"].Online)
	require.NotZero(t, status.DriveErrors["2"].Reads+status.DriveErrors["2"].Writes+status.Drives["2"].Errors)
	require.Zero(t, replayed(t, trace, dir).VerifyFailures)

	tuttifs(t, "umount", dir)
	require.NoError(t, os.Remove(paths[2]))
	r := execAs(t, "tuttifs", "mount", paths[0], more, dir)
	require.Equal(t, 32, r.code)
	require.Contains(t, r.stderr, "degraded")
	mountOn(t, more, dir, "-o", "degraded,search="+filepath.Dir(paths[0]))
	require.Equal(t, "lost", driveList(t, dir)[1].State)
	fresh := filepath.Join(filepath.Dir(paths[0]), "d4")
	require.NoError(t, drive.Create(fresh, 64<<20))
	r = execAs(t, "tuttifs", "drive", "replace", dir, "2", fresh)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, "drive 4 is in its place\n", r.stdout)
	require.Contains(t, r.stderr, "drive 2 (")
	require.Contains(t, r.stderr, "none is copied")
	for _, d := range driveList(t, dir) {
		require.Equal(t, "online", d.State)
	}
	require.False(t, decode[infoDocument](t, tuttifs(t, "info", "--json", dir)).Degraded)
	require.Zero(t, replayed(t, trace, dir).VerifyFailures)

	// An engine that is attached does not know a drive that is added.
	engine := started(t, smallTrace(t, 500), dir)
	later := filepath.Join(filepath.Dir(paths[0]), "d5")
	require.NoError(t, drive.Create(later, 64<<20))
	r = execAs(t, "tuttifs", "drive", "add", dir, later)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "do not know drive 5")
	require.True(t, driveList(t, dir)[3].Held)
	require.NoError(t, engine.Process.Kill())
	require.Error(t, engine.Wait())
	require.Eventually(t, func() bool { return !driveList(t, dir)[3].Held }, 30*time.Second, 50*time.Millisecond)
	r = execAs(t, "tuttifs", "drive", "forget", dir, "5")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "are evicted")
	tuttifs(t, "umount", dir)
	require.NoError(t, os.Rename(more, filepath.Join(filepath.Dir(paths[0]), "d3")))
	mountOn(t, paths[0], dir)
	require.Len(t, driveList(t, dir), 3)
	tuttifs(t, "umount", dir)
}

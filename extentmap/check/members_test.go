package check_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// imageFiles writes the images to files of a new directory, with something else beside them.
func imageFiles(t *testing.T) (paths []string) {
	t.Helper()
	dir := t.TempDir()
	for i, image := range usedImages(t) {
		path := filepath.Join(dir, fmt.Sprintf("drive%d", i))
		require.NoError(t, os.WriteFile(path, image, 0o600))
		paths = append(paths, path)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("not a drive"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o700))
	return paths
}

func TestOpenFindsMembers(t *testing.T) {
	paths := imageFiles(t)
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(paths[2], link))
	for _, given := range [][]string{{paths[0]}, {paths[2], paths[2]}, paths, {link}} {
		m, err := check.Open(given, check.Read)
		require.NoError(t, err)
		require.Len(t, m.Drives, 3)
		require.Empty(t, m.Busy)
		requireClean(t, m.Drives, check.Options{Data: true})
		require.NoError(t, m.Close())
	}
	_, err := check.Open(nil, check.Read)
	require.Error(t, err)
	_, err = check.Open([]string{filepath.Join(filepath.Dir(paths[0]), "missing")}, check.Read)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = check.Open([]string{filepath.Dir(paths[0])}, check.Read)
	require.ErrorContains(t, err, "neither a regular file nor a block device")
}

func TestOpenBusy(t *testing.T) {
	paths := imageFiles(t)
	daemon, err := drive.Open(paths[1], drive.Options{})
	require.NoError(t, err)
	defer daemon.Close()
	_, err = check.Open(paths[:1], check.Read)
	require.ErrorIs(t, err, drive.ErrBusy)
	require.ErrorContains(t, err, paths[1])
	m, err := check.Open(paths[:1], check.ReadBusy)
	require.NoError(t, err)
	require.Equal(t, paths[1:2], m.Busy)
	requireClean(t, m.Drives, check.Options{})
	require.NoError(t, m.Close())
}

// A drive that only a newer version understands is named, and not reported as missing.
func TestOpenFindsNewerMember(t *testing.T) {
	paths := imageFiles(t)
	image, err := os.ReadFile(paths[1])
	require.NoError(t, err)
	l := label(t, image)
	for _, unit := range []uint64{0, l.Units - 1} {
		l.Version, l.Unit = ondisk.Version+1, unit
		l.Encode(unitOf(image, unit))
	}
	require.NoError(t, os.WriteFile(paths[1], image, 0o600))
	m, err := check.Open(paths[:1], check.Read)
	require.NoError(t, err)
	defer m.Close()
	_, _, err = run(t, m.Drives, check.Options{})
	require.ErrorIs(t, err, check.ErrNewer)
	require.ErrorContains(t, err, paths[1])
}

// What fsck says the next mounts write anew is whole after them.
func TestMountsWriteDamagedCopiesAnew(t *testing.T) {
	images := usedImages(t)
	l, s := label(t, images[1]), newest(t, images[1])
	flip(unitOf(images[1], l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks))
	flip(unitOf(images[1], s.Unit))
	set := maptest.FromImages(images)
	_, list, err := run(t, set.Drives(), check.Options{})
	require.NoError(t, err)
	require.Len(t, list.of(check.Error), 2, "%v", list)
	for range 2 {
		v, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{})
		require.NoError(t, err)
		require.NoError(t, v.Close())
	}
	requireClean(t, set.Drives(), check.Options{Data: true})
}

package check_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap/check"
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
		m, err := check.Open(given, false)
		require.NoError(t, err)
		require.Len(t, m.Drives, 3)
		require.Empty(t, m.Busy)
		requireClean(t, m.Drives, check.Options{Data: true})
		require.NoError(t, m.Close())
	}
	_, err := check.Open(nil, false)
	require.Error(t, err)
	_, err = check.Open([]string{filepath.Join(filepath.Dir(paths[0]), "missing")}, false)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = check.Open([]string{filepath.Dir(paths[0])}, false)
	require.ErrorContains(t, err, "neither a regular file nor a block device")
}

func TestOpenBusy(t *testing.T) {
	paths := imageFiles(t)
	daemon, err := drive.Open(paths[1], drive.Options{})
	require.NoError(t, err)
	defer daemon.Close()
	_, err = check.Open(paths[:1], false)
	require.ErrorIs(t, err, drive.ErrBusy)
	require.ErrorContains(t, err, paths[1])
	m, err := check.Open(paths[:1], true)
	require.NoError(t, err)
	require.Equal(t, paths[1:2], m.Busy)
	requireClean(t, m.Drives, check.Options{})
	require.NoError(t, m.Close())
}

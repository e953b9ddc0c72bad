package wholefile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "a*"), filepath.Join(dir, "link")
	require.NoError(t, Write(path, []byte("first, and longer"), 0o600))
	require.NoError(t, os.Symlink(path, link))
	old, err := os.Open(path)
	require.NoError(t, err)
	defer old.Close()
	require.NoError(t, Write(link, []byte("second"), 0o644))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "second", string(b))
	st, err := os.Lstat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o644), st.Mode())
	st, err = os.Lstat(link)
	require.NoError(t, err)
	require.Equal(t, fs.ModeSymlink, st.Mode().Type(), "it is followed")
	b = make([]byte, 32)
	n, err := old.ReadAt(b, 0)
	require.Error(t, err)
	require.Equal(t, "first, and longer", string(b[:n]), "who has the old one open reads all of it")

	require.ErrorContains(t, Write(dir, nil, 0o600), "is a directory")
	require.ErrorIs(t, Write(filepath.Join(dir, "none", "a"), nil, 0o600), fs.ErrNotExist)
	require.Error(t, Write(filepath.Join(path, "below a file"), nil, 0o600))
	require.NoError(t, Write("/dev/null", []byte("x"), 0o600))
	st, err = os.Stat("/dev/null")
	require.NoError(t, err)
	require.Equal(t, fs.ModeDevice|fs.ModeCharDevice, st.Mode().Type(), "a device is not replaced")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2, "nothing else is left")
}

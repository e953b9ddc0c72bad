package wholefile

import (
	"bytes"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
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
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "deep", "other"), 0o700))
	require.NoError(t, os.Symlink(filepath.Join(dir, "deep", "other"), filepath.Join(dir, "way")))
	require.NoError(t, Write(filepath.Join(dir, "way")+"/../b", nil, 0o600))
	require.FileExists(t, filepath.Join(dir, "deep", "b"), "as the kernel goes")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 4, "nothing else is left")
}

// What cannot be written is named as the caller named it: nobody knows the temporary file.
func TestWriteNamesItsFile(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{filepath.Join(dir, "none", "table"), "/proc/table"} {
		err := Write(path, []byte("x"), 0o600)
		var of *fs.PathError
		require.ErrorAs(t, err, &of, path)
		require.Equal(t, path, of.Path)
		require.NotContains(t, err.Error(), ".table", path)
	}
	limited := filepath.Join(dir, "limited")
	require.NoError(t, os.WriteFile(limited, []byte("as it was"), 0o600))
	signal.Ignore(unix.SIGXFSZ)
	defer signal.Reset(unix.SIGXFSZ)
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: old.Max}))
	err := Write(limited, make([]byte, 8192), 0o600)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &old))
	require.ErrorIs(t, err, unix.EFBIG)
	require.Equal(t, "write "+limited+": file too large", err.Error())
	b, err := os.ReadFile(limited)
	require.NoError(t, err)
	require.Equal(t, "as it was", string(b))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is left")
}

// A pipe is written to if somebody reads it, and not waited for.
func TestWritePipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	require.ErrorIs(t, Write(pipe, []byte("x"), 0o600), unix.ENXIO)
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer reader.Close()
	want := bytes.Repeat([]byte("more than a pipe holds "), 10_000)
	written := make(chan error)
	go func() { written <- Write(pipe, want, 0o600) }()
	got := make([]byte, len(want))
	_, err = io.ReadFull(waiting{reader}, got)
	require.NoError(t, err)
	require.NoError(t, <-written)
	require.Equal(t, want, got)
}

// waiting reads on where nobody has the pipe open for writing yet.
type waiting struct{ io.Reader }

func (w waiting) Read(b []byte) (n int, err error) {
	for n == 0 && (err == nil || err == io.EOF) {
		n, err = w.Reader.Read(b)
	}
	return n, err
}

// Check refuses what Write would, before there is anything to write, and touches nothing.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	file, fifo, socket := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "socket")
	require.NoError(t, os.WriteFile(file, []byte("as it was"), 0o400), "it is replaced, and so may be read-only")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	defer listener.Close()
	require.NoError(t, os.Symlink(filepath.Join(dir, "none", "x"), filepath.Join(dir, "dangling")))
	events, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(events)
	_, err = unix.InotifyAddWatch(events, dir, unix.IN_ALL_EVENTS)
	require.NoError(t, err)
	for path, good := range map[string]bool{
		file: true, fifo: true, socket: false,
		filepath.Join(dir, "new"): true, filepath.Join(dir, "dangling"): true, "/dev/null": true,
		dir: false, filepath.Join(dir, "none", "x"): false, dir + "/none/../x": false, dir + "/x/": false, file + "/x": false,
		"": false,
	} {
		err := Check(path)
		require.Equal(t, good, err == nil, "%s: %v", path, err)
		if !good {
			require.Error(t, Write(path, nil, 0o600), path)
		}
	}
	require.ErrorContains(t, Check(dir+"/none/../x"), "its directory")
	_, err = unix.Read(events, make([]byte, 4096))
	require.ErrorIs(t, err, unix.EAGAIN, "nothing in the directory was opened, made or changed")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "as it was", string(b))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 4)
	require.NoError(t, Write(filepath.Join(dir, "dangling"), nil, 0o600))
	require.NoError(t, Write(filepath.Join(dir, "new"), nil, 0o600))
}

// Package wholefile writes files that are there as a whole or as they were before, whatever ends the writer.
package wholefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// place follows path to the file that is to be replaced, and its directory. No file: what is there is no regular one,
// which is not replaced but written to.
func place(path string) (file, dir string, err error) {
	if path == "" {
		return "", "", errors.New("a file without a name cannot be written")
	}
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		return "", "", &fs.PathError{Op: "write", Path: path, Err: errors.New("is a directory")}
	case err == nil && st.Mode().Type() == fs.ModeSocket:
		return "", "", &fs.PathError{Op: "write", Path: path, Err: errors.New("is a socket")}
	case err == nil && !st.Mode().IsRegular():
		return "", "", nil
	case err == nil:
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return "", "", err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return "", "", err
	}
	// Not filepath.Dir, for which the directory of none/../a would be there.
	if dir, _ = filepath.Split(path); dir == "" {
		dir = "."
	}
	return path, dir, nil
}

// Check says what would keep Write from writing, but for space, and for a pipe's reader that is not there yet. It makes
// and opens nothing: the reader of a pipe would take a writer that comes and goes for the only one.
func Check(path string) error {
	file, dir, err := place(path)
	if err != nil {
		return err
	}
	if file == "" {
		if err := unix.Access(path, unix.W_OK); err != nil {
			return &fs.PathError{Op: "write", Path: path, Err: err}
		}
		return nil
	}
	if err := unix.Access(dir, unix.R_OK|unix.W_OK|unix.X_OK); err != nil { // it is opened to be synced
		return fmt.Errorf("%s: its directory: %w", path, err)
	}
	return nil
}

// Write replaces what path names by b: a temporary file beside it is written, synced and renamed. A symbolic link is
// followed. What is no regular file, such as a pipe or /dev/stdout, cannot be replaced: it is written to, a pipe only
// while somebody reads it.
func Write(path string, b []byte, mode fs.FileMode) error {
	file, dir, err := place(path)
	if err != nil {
		return err
	}
	if file == "" {
		return writeTo(path, b)
	}
	f, err := os.CreateTemp(dir, "."+strings.ReplaceAll(filepath.Base(file), "*", "_")+"-")
	if err != nil {
		return named(path, err)
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return errors.Join(named(path, err), os.Remove(f.Name()))
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// named gives an error of the temporary file the name that the caller knows: nobody has heard of the other.
func named(path string, err error) error {
	var of *fs.PathError
	var renaming *os.LinkError
	switch {
	case errors.As(err, &of):
		err = of.Err
	case errors.As(err, &renaming):
		err = renaming.Err
	}
	return &fs.PathError{Op: "write", Path: path, Err: err}
}

// writeTo writes to what is no regular file. A pipe that nobody reads is not waited for: no signal would end that.
func writeTo(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("%w: a pipe is to be read by somebody before", err)
	} else if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

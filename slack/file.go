package slack

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tuttifs/strictjson"
	"tuttifs/wholefile"
)

// FileBytesMax bounds files of tables and of layer times.
const FileBytesMax = 1 << 20

// Parse reads a table that we did not write, strictly: every field at most once under its exact name, no other, nothing
// behind; and validates it.
func Parse(b []byte) (*Table, error) {
	if len(b) > FileBytesMax {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrTable, FileBytesMax)
	}
	var t Table
	if err := strictjson.Decode(b, &t); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTable, err)
	}
	if err := t.Validate(); err != nil {
		return nil, err
	}
	return &t, nil
}

// Encode is the table's file.
func (t *Table) Encode() ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	whole := *t
	whole.Fingerprint.Machine.Drives = append([]string{}, t.Fingerprint.Machine.Drives...) // files have no null
	b, err := json.MarshalIndent(&whole, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTable, err)
	}
	return append(b, '\n'), nil
}

// Path is where a table is kept when nobody says otherwise: in the user's cache directory, by its fingerprint.
func Path(f *Fingerprint) (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no place for the table, set XDG_CACHE_HOME or name a file: %w", err)
	}
	return filepath.Join(dir, "tuttifs", "slack", f.Model.Name+"-"+f.Key()+".json"), nil
}

// Save replaces the file at once or not at all. Only the user may read it.
func Save(path string, t *Table) error {
	b, err := t.Encode()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return wholefile.Write(path, b, 0o600)
}

// Load reads a table and refuses it, by ErrFingerprint, where it is not of the model and machine that are wanted.
func Load(path string, want *Fingerprint) (*Table, error) {
	b, err := ReadFile(path)
	if err != nil {
		return nil, err
	}
	t, err := Parse(b)
	if err == nil {
		err = t.Fingerprint.check(want)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// ReadFile reads what may be a table or layer times, at most one byte more than those may have.
func ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, FileBytesMax+1))
	return b, errors.Join(err, f.Close())
}

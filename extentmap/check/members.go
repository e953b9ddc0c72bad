package check

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// Members are the opened drives of a volume.
type Members struct {
	Drives []drive.Drive
	Busy   []string // those that somebody else has locked: they may change while they are read
}

// Access is what Open opens drives for.
type Access uint8

const (
	// Read refuses drives that somebody else writes to.
	Read Access = iota
	// ReadBusy opens those too, without lock.
	ReadBusy
	// Write refuses drives that somebody else has at all, and keeps others out.
	Write
)

// Open opens the given drives, and the other members of their volume that lie in the same directories. A drive that
// another process has is drive.ErrBusy, but see Access.
func Open(paths []string, a Access) (*Members, error) {
	if len(paths) == 0 {
		return nil, errors.New("check: no drive given")
	}
	all, err := find(paths)
	if err != nil {
		return nil, err
	}
	m := &Members{}
	for _, path := range all {
		d, err := drive.Open(path, drive.Options{ReadOnly: a != Write})
		if a == ReadBusy && errors.Is(err, drive.ErrBusy) {
			m.Busy = append(m.Busy, path)
			d, err = drive.Open(path, drive.Options{ReadOnly: true, NoLock: true})
		}
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.Drives = append(m.Drives, d)
	}
	return m, nil
}

// Close releases the drives.
func (m *Members) Close() error {
	var errs []error
	for _, d := range m.Drives {
		errs = append(errs, d.Close())
	}
	m.Drives = nil
	return errors.Join(errs...)
}

// identity tells drives apart whatever their names.
type identity struct {
	block    bool
	dev, ino uint64
	address  string // of a namespace that has one
}

func identify(path string) (identity, error) {
	if drive.IsAddress(path) {
		return identity{address: path}, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return identity{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return identity{block: true, dev: st.Rdev}, nil
	case unix.S_IFREG:
		return identity{dev: st.Dev, ino: st.Ino}, nil
	}
	return identity{}, &os.PathError{Op: "open", Path: path,
		Err: errors.New("neither a regular file nor a block device")}
}

// find lists the given drives, each once, and the members of their volumes beside them.
func find(paths []string) ([]string, error) {
	var all []string
	seen := make(map[identity]bool)
	volumes := make(map[[16]byte]bool)
	var dirs []string
	for _, path := range paths {
		id, err := identify(path)
		if err != nil {
			return nil, fmt.Errorf("check: %w", err)
		}
		if !seen[id] {
			seen[id] = true
			all = append(all, path)
		}
		if l := peek(path); l != nil {
			volumes[l.Volume] = true
		}
		if drive.IsAddress(path) {
			continue // controllers are not searched
		}
		dirs = append(dirs, filepath.Dir(path))
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // a directory that may be searched and not listed: the given paths must do
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			id, err := identify(path)
			if err != nil || seen[id] {
				continue
			}
			if l := peek(path); l != nil && volumes[l.Volume] {
				seen[id] = true
				all = append(all, path)
			}
		}
	}
	return all, nil
}

// peek reads a drive's label without a lock, to learn whose it is; nil if it has none. Of a newer format's label that
// much can be read.
func peek(path string) *ondisk.Label {
	d, err := drive.Open(path, drive.Options{ReadOnly: true, NoLock: true, Buffered: true})
	if err != nil {
		return nil
	}
	defer d.Close()
	for _, unit := range []uint64{0, units(d) - 1} {
		if l := readLabelCopy(d, unit).label; l != nil {
			return l
		}
	}
	return nil
}

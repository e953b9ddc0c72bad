package drive

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// address is a namespace of a controller on the PCI bus: 0000:3b:00.0 is its first one, 0000:3b:00.0/2 number 2.
var address = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](/[0-9]{1,10})?$`)

// IsAddress says whether a drive's name is the address of a namespace rather than a path. A file of such a name can be
// had as ./NAME.
func IsAddress(name string) bool { return address.MatchString(name) }

// OpenAddress opens namespaces by address. Whoever has a driver for them sets it before any drive is opened; without it
// there are files and block devices only.
var OpenAddress func(address string, o Options) (Drive, error)

// Open opens an existing regular file or block device, or a namespace by its address.
//
// The lock is an flock, exclusive for writers and shared for readers; a block device opened for writing is also
// claimed (O_EXCL), which refuses one that holds a mounted filesystem or belongs to RAID, LVM or a device mapper.
func Open(path string, o Options) (Drive, error) {
	if o.LBABytes != 0 && o.LBABytes != 512 && o.LBABytes != 4096 {
		return nil, fmt.Errorf("drive %s: LBA size %d: only 512 and 4096 exist", path, o.LBABytes)
	}
	if IsAddress(path) {
		if OpenAddress == nil {
			return nil, fmt.Errorf("drive %s: an address, and no driver here: %w", path, ErrNotSupported)
		}
		return OpenAddress(path, o)
	}
	var st unix.Stat_t
	if err := retry(func() error { return unix.Stat(path, &st) }); err != nil {
		return nil, fmt.Errorf("drive %s: %w", path, err)
	}
	kind, err := kindOf(&st)
	if err != nil {
		return nil, fmt.Errorf("drive %s: %w", path, err)
	}
	fd, err := openDescriptor(path, kind, o)
	if err != nil {
		return nil, err
	}
	f := &file{name: path, fd: fd, kind: kind, readOnly: o.ReadOnly, fdOpen: true}
	if err := f.prepare(o, &st); err != nil {
		_ = unix.Close(fd) // nothing was written: its result changes nothing
		return nil, err
	}
	return f, nil
}

// Create makes a sparse regular file of size bytes (a multiple of UnitBytes); it refuses an existing one.
func Create(path string, size int64) (err error) {
	if size <= 0 || size%UnitBytes != 0 {
		return fmt.Errorf("drive %s: size %d is not a positive multiple of %d", path, size, UnitBytes)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("drive %s: create: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(path) // the first error is the one to report
		}
	}()
	if err := errors.Join(f.Truncate(size), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("drive %s: create with %d bytes: %w", path, size, err)
	}
	// The name must survive a power cut as well as the file does.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("drive %s: create: %w", path, err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("drive %s: flush its directory: %w", path, err)
	}
	return nil
}

func kindOf(st *unix.Stat_t) (Kind, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return File, nil
	case unix.S_IFBLK:
		return Block, nil
	}
	return 0, errors.New("neither a regular file nor a block device")
}

// openDescriptor opens without O_DIRECT, which is switched on once it is known to work.
func openDescriptor(path string, kind Kind, o Options) (int, error) {
	flags := unix.O_CLOEXEC | unix.O_RDWR
	if o.ReadOnly {
		flags = unix.O_CLOEXEC | unix.O_RDONLY
	}
	if kind == Block && !o.ReadOnly && !o.NoLock {
		flags |= unix.O_EXCL
	}
	fd := -1
	err := retry(func() (err error) {
		fd, err = unix.Open(path, flags, 0)
		return err
	})
	switch {
	case errors.Is(err, unix.EBUSY):
		return -1, fmt.Errorf("drive %s: claimed by a mounted filesystem or another owner: %w", path, ErrBusy)
	case err != nil:
		return -1, fmt.Errorf("drive %s: open: %w", path, err)
	}
	return fd, nil
}

// prepare locks the descriptor, then measures and probes what it leads to.
func (f *file) prepare(o Options, named *unix.Stat_t) error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("drive %s: %w", f.name, err)
	}
	if st.Dev != named.Dev || st.Ino != named.Ino || st.Mode&unix.S_IFMT != named.Mode&unix.S_IFMT {
		return fmt.Errorf("drive %s: replaced while it was being opened; try again", f.name)
	}
	if !o.NoLock {
		if err := f.lock(); err != nil {
			return err
		}
	}
	size, err := f.measure(&st)
	if err != nil {
		return err
	}
	if f.size = size &^ (UnitBytes - 1); f.size == 0 {
		return fmt.Errorf("drive %s: %d bytes are less than one unit of %d", f.name, size, UnitBytes)
	}
	if !o.Buffered {
		if err := f.probeDirect(); err != nil {
			return err
		}
	}
	if err := f.chooseLBA(o.LBABytes); err != nil {
		return err
	}
	f.mapMemory()
	return nil
}

// lock never waits: a drive in use is reported, not queued for.
func (f *file) lock() error {
	how := unix.LOCK_EX
	if f.readOnly {
		how = unix.LOCK_SH
	}
	err := retry(func() error { return unix.Flock(f.fd, how|unix.LOCK_NB) })
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("drive %s: locked (is its volume mounted or being checked?): %w", f.name, ErrBusy)
	case err != nil:
		return fmt.Errorf("drive %s: lock: %w", f.name, err)
	}
	return nil
}

// retry repeats a call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

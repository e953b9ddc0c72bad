// Package drive is block I/O to one member of a volume: a regular file, a block device or plain memory.
//
// It knows nothing of labels or layouts. Offsets and lengths are bytes. Reads and writes are all or nothing:
// a nil error means that every byte was transferred.
package drive

import "errors"

// UnitBytes is the allocation unit of tuttifs, whatever the drive's LBA size.
const UnitBytes = 4096

// Kind says what stands behind a drive.
type Kind uint8

const (
	File Kind = iota
	Block
	Memory
	NVMe // a namespace of a controller that this process drives itself
)

var (
	// ErrBusy: another process holds the drive's lock.
	ErrBusy = errors.New("drive: in use by another process")
	// ErrNotSupported: the operation does not exist on this drive (discard on a filesystem without holes).
	ErrNotSupported = errors.New("drive: not supported")
	// ErrReadOnly: a write to a drive opened read-only.
	ErrReadOnly = errors.New("drive: opened read-only")
	// ErrRange: offset or length outside the drive.
	ErrRange = errors.New("drive: outside the drive")
	// ErrShrunk: the drive ends before its size when it was opened, which is how a block device that was taken out looks,
	// or the controller of its namespace is gone.
	ErrShrunk = errors.New("drive: taken out, or shorter than it was")
)

// Drive is one opened member. Methods are safe for concurrent use.
type Drive interface {
	// ReadAt fills p from byte offset off. Any alignment: what direct I/O refuses is bounced.
	ReadAt(p []byte, off int64) error
	// WriteAt stores p at byte offset off; volatile until Flush returns.
	WriteAt(p []byte, off int64) error
	// Flush makes every write that returned before it durable.
	Flush() error
	// Discard tells the drive that a range holds nothing of value; reads of it are undefined afterwards.
	Discard(off, n int64) error
	// WriteZeroes makes a range read as zeroes.
	WriteZeroes(off, n int64) error
	// Size is the drive's length in bytes, a multiple of UnitBytes.
	Size() int64
	// LBABytes is the logical block size, 512 or 4096.
	LBABytes() int
	Kind() Kind
	// Direct says whether I/O bypasses the page cache (probed, never assumed).
	Direct() bool
	// Name is the path, a label for memory, or a namespace's address.
	Name() string
	// Fd is the descriptor for asynchronous I/O, or -1 where there is none.
	Fd() int
	// Bytes is the storage itself, where it can be addressed: of a memory drive, and of a file on a filesystem that is
	// memory. It is the same storage that the methods reach, and gone after Close: whoever keeps it must have ended
	// its accesses by then. nil for all others.
	//
	// Addressing a file can fault (SIGBUS, or SIGSEGV for writes where it was opened read-only): somebody made it
	// shorter, or a hole was touched and the filesystem is full. ReadAt and WriteAt of the same place then say what is
	// wrong.
	Bytes() []byte
	// Close releases the lock and the descriptor.
	Close() error
}

// Options of Open. The zero value opens read-write, locked, direct where possible.
type Options struct {
	// ReadOnly opens without write permission and takes a shared lock.
	ReadOnly bool
	// NoLock skips the lock (looking at a label of a drive that a daemon holds).
	NoLock bool
	// LBABytes overrides the logical block size of a regular file; 0 means probed (512 for files that allow it,
	// else 4096).
	LBABytes int
	// Buffered forbids direct I/O.
	Buffered bool
}

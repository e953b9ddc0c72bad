package drive

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// memory is a drive in anonymous memory. Pages come into being when they are first written.
type memory struct {
	name string
	size int64

	life  sync.RWMutex // held shared by every access, exclusively by Close
	bytes []byte       // guarded by life; nil once closed
}

// NewMemory is a zero-filled drive in anonymous memory, outside the garbage collector's sight. Nothing is reserved:
// a drive larger than the machine's memory works as long as it stays mostly unwritten.
func NewMemory(name string, size int64) (Drive, error) {
	if size <= 0 || size%UnitBytes != 0 || size != int64(int(size)) {
		return nil, fmt.Errorf("drive %s: size %d is not a positive multiple of %d", name, size, UnitBytes)
	}
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("drive %s: map %d bytes of memory: %w", name, size, err)
	}
	return &memory{name: name, size: size, bytes: b}, nil
}

// use runs f on the storage of [off, off+n), keeping Close out meanwhile.
func (m *memory) use(op string, off, n int64, f func(b []byte) error) error {
	if err := checkRange(m.name, op, off, n, m.size); err != nil {
		return err
	}
	m.life.RLock()
	defer m.life.RUnlock()
	if m.bytes == nil {
		return closedError(m.name, op)
	}
	return f(m.bytes[off : off+n : off+n])
}

func (m *memory) ReadAt(p []byte, off int64) error {
	return m.use("read", off, int64(len(p)), func(b []byte) error { copy(p, b); return nil })
}

func (m *memory) WriteAt(p []byte, off int64) error {
	return m.use("write", off, int64(len(p)), func(b []byte) error { copy(b, p); return nil })
}

// Flush has nothing to do: memory is as durable as it gets.
func (m *memory) Flush() error {
	return m.use("flush", 0, 0, func([]byte) error { return nil })
}

// Discard gives whole pages back to the system.
func (m *memory) Discard(off, n int64) error {
	return m.use("discard", off, n, func([]byte) error {
		start, end := inward(off, n, int64(unix.Getpagesize()))
		return m.dropPages("discard", start, end)
	})
}

// WriteZeroes drops the whole pages of the range, which then read as zeroes, and clears its ragged ends.
func (m *memory) WriteZeroes(off, n int64) error {
	return m.use("write zeroes", off, n, func(b []byte) error {
		start, end := inward(off, n, int64(unix.Getpagesize()))
		if start >= end {
			clear(b)
			return nil
		}
		clear(b[:start-off])
		clear(b[end-off:])
		return m.dropPages("write zeroes", start, end)
	})
}

// dropPages gives [start, end) of the storage back. Both are multiples of the page size and inside the drive; life
// is held.
func (m *memory) dropPages(op string, start, end int64) error {
	if start >= end {
		return nil
	}
	if err := unix.Madvise(m.bytes[start:end], unix.MADV_DONTNEED); err != nil {
		return ioError(m.name, op, start, end-start, err)
	}
	return nil
}

func (m *memory) Size() int64   { return m.size }
func (m *memory) LBABytes() int { return 512 }
func (m *memory) Kind() Kind    { return Memory }
func (m *memory) Direct() bool  { return true } // no page cache stands before memory
func (m *memory) Name() string  { return m.name }
func (m *memory) Fd() int       { return -1 }

func (m *memory) Bytes() []byte {
	m.life.RLock()
	defer m.life.RUnlock()
	return m.bytes
}

func (m *memory) Close() error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.bytes == nil {
		return closedError(m.name, "close")
	}
	err := unix.Munmap(m.bytes)
	m.bytes = nil
	if err != nil {
		return fmt.Errorf("drive %s: unmap: %w", m.name, err)
	}
	return nil
}

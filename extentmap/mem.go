package extentmap

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reservation is address space that takes memory only where it is touched, outside the garbage collector's sight.
// Pools reserve what their largest possible number of rows would need, so tables never move.
type reservation struct {
	b []byte
}

// hugeBytes is the size from which a table is advised to use huge pages: smaller ones would waste most of one.
const hugeBytes = 64 << 20

func reserve(n int) (*reservation, error) {
	n = max(n, 1)
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("extentmap: cannot reserve %d bytes of address space: %w", n, err)
	}
	return &reservation{b}, nil
}

// drop gives the memory of a page-aligned range back; it reads as zeroes afterwards.
func (r *reservation) drop(off, n int) {
	if n == 0 {
		return
	}
	if off%4096 != 0 || n%4096 != 0 || unix.Madvise(r.b[off:off+n], unix.MADV_DONTNEED) != nil {
		clear(r.b[off : off+n])
	}
}

func (r *reservation) advise(off, n int) {
	if n >= hugeBytes {
		_ = unix.Madvise(r.b[off:off+n], unix.MADV_HUGEPAGE) // advice: smaller pages work too
	}
}

// adviseWhole asks for huge pages for what is going to be filled as a whole.
func (r *reservation) adviseWhole() { _ = unix.Madvise(r.b, unix.MADV_HUGEPAGE) }

func (r *reservation) release() {
	if r.b != nil {
		_ = unix.Munmap(r.b)
		r.b = nil
	}
}

func (r *reservation) uint32s() []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(r.b))), len(r.b)/4)
}

func (r *reservation) uint64s() []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(r.b))), len(r.b)/8)
}

package gpufile

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// heapTableBytes is the size below which a table lives on the Go heap (as pointer-free memory, so it costs the
	// garbage collector nothing to scan): a pool of a thousand files should not take 256 mappings.
	heapTableBytes = 64 << 10
	hugePageBytes  = 2 << 20
)

// mapWords returns n zeroed words. raw is the mapping behind them, or nil when they are on the heap: memory that the
// kernel refuses to map is asked of the heap, whose own failure is the end of any Go program.
func mapWords(n int) (words []uint64, raw []byte) {
	size := n * 8
	if size < heapTableBytes {
		return make([]uint64, n), nil
	}
	raw, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return make([]uint64, n), nil
	}
	adviseHuge(raw)
	return unsafe.Slice((*uint64)(unsafe.Pointer(&raw[0])), n), raw
}

// unmap gives a mapping back; nil is allowed.
func unmap(raw []byte) {
	if raw != nil {
		// The only possible failure is a range that is not mapped, which would be a fault of ours without remedy.
		_ = unix.Munmap(raw)
	}
}

// adviseHuge asks for huge pages where a table is large enough to have one; a kernel without them says no.
func adviseHuge(raw []byte) {
	if len(raw) >= hugePageBytes {
		_ = unix.Madvise(raw, unix.MADV_HUGEPAGE)
	}
}

// nodes is the array of all slots' nodes in anonymous memory. Growing may move it, so nobody keeps a pointer into it
// beyond the lock that guards it.
type nodes struct {
	s   []node
	raw []byte
}

// ensure makes slots below n addressable. New nodes are zero: not visible, not pinned.
func (a *nodes) ensure(n uint32) error {
	if int(n) <= len(a.s) {
		return nil
	}
	want := max(int(n), len(a.s)+len(a.s)/4, 4096)
	size := (want*nodeBytes + hugePageBytes - 1) &^ (hugePageBytes - 1)
	var raw []byte
	var err error
	if a.raw == nil {
		raw, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	} else {
		raw, err = unix.Mremap(a.raw, size, unix.MREMAP_MAYMOVE)
	}
	if err != nil {
		return err
	}
	adviseHuge(raw)
	a.raw = raw
	a.s = unsafe.Slice((*node)(unsafe.Pointer(&raw[0])), size/nodeBytes)
	return nil
}

func (a *nodes) close() {
	unmap(a.raw)
	a.raw, a.s = nil, nil
}

package drive

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mappedFromBytes is the length from which AlignedBuffer maps memory of its own: the collector then neither scans nor
// counts it.
const mappedFromBytes = 1 << 20

// bounceBytes is the size of one pooled bounce buffer: one transfer through it is at most this long.
const bounceBytes = 256 << 10

// mapped remembers the buffers that AlignedBuffer mapped, so that FreeBuffer knows them from collected ones.
var mapped struct {
	sync.Mutex
	bytes map[*byte][]byte
}

var bouncePool = sync.Pool{New: func() any {
	b := AlignedBuffer(bounceBytes)
	return &b
}}

// AlignedBuffer returns n zero bytes aligned to 4096, outside the garbage collector's sight when n is 1 MiB or more.
// Such a large buffer lives until FreeBuffer; a small one is collected.
func AlignedBuffer(n int) []byte {
	if n >= mappedFromBytes {
		if b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err == nil {
			mapped.Lock()
			defer mapped.Unlock()
			if mapped.bytes == nil {
				mapped.bytes = make(map[*byte][]byte)
			}
			mapped.bytes[unsafe.SliceData(b)] = b
			return b
		}
		// Out of mappings or of memory: the collector's heap gives it or reports it as it does for every slice.
	}
	b := make([]byte, n+UnitBytes)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (UnitBytes - 1))
	return b[skip : skip+n : skip+n]
}

// FreeBuffer gives back a buffer of AlignedBuffer, which nobody may touch afterwards. It is optional for small
// buffers. b must be the slice that AlignedBuffer returned, or one that starts where it does.
func FreeBuffer(b []byte) {
	mapped.Lock()
	defer mapped.Unlock()
	p := unsafe.SliceData(b)
	if whole, ok := mapped.bytes[p]; ok {
		delete(mapped.bytes, p)
		_ = unix.Munmap(whole) // the mapping is ours and whole: munmap has nothing to refuse
	}
}

// addressAligned says whether p starts at a multiple of align, a power of two.
func addressAligned(p []byte, align int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(p)))&uintptr(align-1) == 0
}

package cudatest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
)

// kind is where memory is and who made it.
type kind int

const (
	device     kind = iota
	pinned          // MemHostAlloc
	registered      // MemHostRegister
	foreign         // IpcOpenMemHandle
)

// region is an allocation. Freed ones stay, without access, so that their addresses never are somebody else's.
type region struct {
	base    uint64
	n       uint64
	mapped  uint64 // whole pages that are mapped here; 0 of registered memory
	kind    kind
	device  int32
	context *context
	fd      int // of device memory, which other processes may map
	freed   bool
}

func (r *region) end() uint64 { return r.base + r.n }

// regions are in the order of their addresses.
type regions []*region

// find is the region of n bytes that live at an address, nil where some do not.
func (r regions) find(address, n uint64) *region {
	i, exact := slices.BinarySearchFunc(r, address, func(x *region, a uint64) int {
		switch {
		case x.base < a:
			return -1
		case x.base > a:
			return 1
		}
		return 0
	})
	if !exact {
		i--
	}
	if i < 0 || address+n < address || address+n > r[i].end() || r[i].freed {
		return nil
	}
	return r[i]
}

// add adds a region. What was registered here before, and freed since, is forgotten: its addresses are the caller's.
func (r *regions) add(x *region) {
	*r = slices.DeleteFunc(*r, func(y *region) bool {
		return y.freed && y.mapped == 0 && y.base < x.end() && x.base < y.end()
	})
	i, _ := slices.BinarySearchFunc(*r, x.base, func(y *region, a uint64) int {
		if y.base < a {
			return -1
		}
		return 1
	})
	*r = slices.Insert(*r, i, x)
}

func (r *regions) unmap() error {
	var all []error
	for _, x := range *r {
		if x.kind == device && !x.freed {
			all = append(all, unix.Close(x.fd))
		}
		if x.mapped != 0 {
			all = append(all, unix.MunmapPtr(pointer(x.base), uintptr(x.mapped)))
		}
	}
	*r = nil
	return errors.Join(all...)
}

// pointer is an address of memory that Go does not manage.
func pointer(address uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

const pageMask = 4095

func wholePages(n uint64) uint64 { return (n + pageMask) &^ pageMask }

// garbage is what fresh memory holds, as far as the first MiB.
const garbage = 0xa5

// mapMemory maps memory, of a file where fd is not negative.
func mapMemory(n uint64, fd int) (uint64, error) {
	flags := unix.MAP_SHARED
	if fd < 0 {
		flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	}
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(wholePages(n)), unix.PROT_READ|unix.PROT_WRITE, flags)
	return uint64(uintptr(p)), err
}

// spoil fills fresh memory, in which callers must not look for zeros.
func spoil(base, n uint64) { setBytes(base, garbage, min(n, 1<<20)) }

// give takes a region's memory away and keeps its addresses.
func (f *Fake) give(r *region) cuda.Result {
	r.freed = true
	if r.kind == device {
		f.used[r.device] -= wholePages(r.n)
		if err := unix.Close(r.fd); err != nil {
			f.misused("closing %d bytes of device memory: %v", r.n, err)
			return cuda.ErrUnknown
		}
	}
	if r.mapped == 0 {
		return cuda.Success
	}
	_, err := unix.MmapPtr(-1, 0, pointer(r.base), uintptr(r.mapped), unix.PROT_NONE,
		unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		f.misused("unmapping %d bytes: %v", r.n, err)
		return cuda.ErrUnknown
	}
	return cuda.Success
}

func (f *Fake) memInfo(free, total *uint64) cuda.Result {
	c, r := f.enterBound("MemGetInfo")
	defer f.mu.Unlock()
	if r == cuda.Success {
		*free, *total = f.config.MemoryBytes-f.used[c.device], f.config.MemoryBytes
	}
	return r
}

func (f *Fake) alloc(p *cuda.Pointer, n uint64) cuda.Result {
	c, r := f.enterBound("MemAlloc")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if n == 0 {
		f.misused("cuMemAlloc of no bytes")
		return cuda.ErrInvalidValue
	}
	if n > f.config.MemoryBytes || wholePages(n) > f.config.MemoryBytes-f.used[c.device] {
		return cuda.ErrOutOfMemory
	}
	fd, err := unix.MemfdCreate("cudatest", unix.MFD_CLOEXEC)
	if err != nil {
		return cuda.ErrUnknown
	}
	var base uint64
	if err = unix.Ftruncate(fd, int64(wholePages(n))); err == nil {
		base, err = mapMemory(n, fd)
	}
	if err != nil {
		unix.Close(fd)
		return cuda.ErrOutOfMemory
	}
	spoil(base, n)
	f.used[c.device] += wholePages(n)
	f.regions.add(&region{base: base, n: n, mapped: wholePages(n), kind: device, device: c.device, context: c, fd: fd})
	*p = cuda.Pointer(base)
	return cuda.Success
}

// whole is the live region of a kind that begins at an address.
func (f *Fake) whole(function string, base uint64, k kind) *region {
	x := f.regions.find(base, 0)
	if x == nil || x.base != base || x.kind != k {
		f.misused("cu%s of %#x, where no such memory begins or lives any longer", function, base)
		return nil
	}
	return x
}

// free waits for the device, as the driver does.
func (f *Fake) free(p cuda.Pointer) cuda.Result {
	c, r := f.enterBound("MemFree")
	if r != cuda.Success || p == 0 {
		f.mu.Unlock()
		return r
	}
	if f.whole("MemFree", uint64(p), device) == nil {
		f.mu.Unlock()
		return cuda.ErrInvalidValue
	}
	marks := f.marks(func(s *stream) bool { return s.context.device == c.device })
	f.mu.Unlock()
	if r := f.await(marks); r != cuda.Success {
		return r
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.whole("MemFree", uint64(p), device)
	if x == nil {
		return cuda.ErrInvalidValue
	}
	return f.give(x)
}

func (f *Fake) allocHost(p *unsafe.Pointer, n uint64, _ uint32) cuda.Result {
	c, r := f.enterBound("MemHostAlloc")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	base, err := mapMemory(n, -1)
	if err != nil {
		return cuda.ErrOutOfMemory
	}
	spoil(base, n)
	f.regions.add(&region{base: base, n: n, mapped: wholePages(n), kind: pinned, context: c})
	*p = pointer(base)
	return cuda.Success
}

func (f *Fake) freeHost(p unsafe.Pointer) cuda.Result {
	_, r := f.enterBound("MemFreeHost")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.whole("MemFreeHost", uint64(uintptr(p)), pinned)
	if x == nil {
		return cuda.ErrInvalidValue
	}
	return f.give(x)
}

// register refuses pages that are registered, as the driver does, which pins whole ones.
func (f *Fake) register(p unsafe.Pointer, n uint64, _ uint32) cuda.Result {
	c, r := f.enterBound("MemHostRegister")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	base := uint64(uintptr(p))
	for _, x := range f.regions {
		if !x.freed && x.base&^pageMask < wholePages(base+n) && base&^pageMask < wholePages(x.end()) {
			return cuda.ErrAlreadyRegistered
		}
	}
	f.regions.add(&region{base: base, n: n, kind: registered, context: c})
	return cuda.Success
}

func (f *Fake) unregister(p unsafe.Pointer) cuda.Result {
	_, r := f.enterBound("MemHostUnregister")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.whole("MemHostUnregister", uint64(uintptr(p)), registered)
	if x == nil {
		return cuda.ErrNotRegistered
	}
	return f.give(x)
}

func (f *Fake) devicePointer(d *cuda.Pointer, p unsafe.Pointer, _ uint32) cuda.Result {
	_, r := f.enterBound("MemHostGetDevicePointer")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.regions.find(uint64(uintptr(p)), 1)
	if x == nil || x.kind != pinned && x.kind != registered {
		f.misused("cuMemHostGetDevicePointer of memory that is not registered")
		return cuda.ErrInvalidValue
	}
	*d = cuda.Pointer(uintptr(p))
	return cuda.Success
}

func (f *Fake) addressRange(base *cuda.Pointer, n *uint64, p cuda.Pointer) cuda.Result {
	_, r := f.enterBound("MemGetAddressRange")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.regions.find(uint64(p), 1)
	if x == nil || x.kind != device && x.kind != foreign {
		return cuda.ErrNotFound
	}
	*base, *n = cuda.Pointer(x.base), x.n
	return cuda.Success
}

// pointerAttribute knows CU_POINTER_ATTRIBUTE_MEMORY_TYPE.
func (f *Fake) pointerAttribute(data unsafe.Pointer, attribute int32, p cuda.Pointer) cuda.Result {
	_, r := f.enterBound("PointerGetAttribute")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.regions.find(uint64(p), 1)
	if x == nil || attribute != 2 {
		return cuda.ErrInvalidValue
	}
	*(*cuda.MemoryType)(data) = cuda.MemoryDevice
	if x.kind == pinned || x.kind == registered {
		*(*cuda.MemoryType)(data) = cuda.MemoryHost
	}
	return cuda.Success
}

// exportRange gives the file that device memory is of, so it exports from an allocation's first byte only.
func (f *Fake) exportRange(out unsafe.Pointer, p cuda.Pointer, n uint64, kind uint32, _ uint64) cuda.Result {
	_, r := f.enterBound("MemGetHandleForAddressRange")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if f.config.NoDMABuf {
		return cuda.ErrNotSupported
	}
	x := f.regions.find(uint64(p), n)
	if x == nil || x.kind != device || x.base != uint64(p) || n&pageMask != 0 || kind != 1 {
		return cuda.ErrInvalidValue
	}
	fd, err := unix.FcntlInt(uintptr(x.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return cuda.ErrUnknown
	}
	*(*int32)(out) = int32(fd)
	return cuda.Success
}

// The handle of shared memory: the process, its file, the bytes.

func (f *Fake) ipcHandle(h *cuda.IPCHandle, p cuda.Pointer) cuda.Result {
	_, r := f.enterBound("IpcGetMemHandle")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.regions.find(uint64(p), 1)
	if x == nil || x.kind != device {
		return cuda.ErrInvalidValue
	}
	*h = cuda.IPCHandle{}
	binary.LittleEndian.PutUint64(h[0:], uint64(os.Getpid()))
	binary.LittleEndian.PutUint64(h[8:], uint64(x.fd))
	binary.LittleEndian.PutUint64(h[16:], x.n)
	return cuda.Success
}

// ipcOpen refuses memory of its own process, as the driver does.
func (f *Fake) ipcOpen(p *cuda.Pointer, h *cuda.IPCHandle, _ uint32) cuda.Result {
	c, r := f.enterBound("IpcOpenMemHandle")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	pid, n := binary.LittleEndian.Uint64(h[0:]), binary.LittleEndian.Uint64(h[16:])
	if pid == uint64(os.Getpid()) {
		return cuda.ErrInvalidContext
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, binary.LittleEndian.Uint64(h[8:])),
		unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return cuda.ErrMapFailed
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || n == 0 || uint64(st.Size) != wholePages(n) {
		return cuda.ErrInvalidValue
	}
	base, err := mapMemory(n, fd)
	if err != nil {
		return cuda.ErrMapFailed
	}
	f.regions.add(&region{base: base, n: n, mapped: wholePages(n), kind: foreign, device: c.device, context: c})
	*p = cuda.Pointer(base)
	return cuda.Success
}

func (f *Fake) ipcClose(p cuda.Pointer) cuda.Result {
	_, r := f.enterBound("IpcCloseMemHandle")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	x := f.whole("IpcCloseMemHandle", uint64(p), foreign)
	if x == nil {
		return cuda.ErrInvalidValue
	}
	return f.give(x)
}

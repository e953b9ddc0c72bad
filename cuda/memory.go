package cuda

import (
	"errors"
	"unsafe"
)

// MemInfo is the device's memory: what is free, and all.
func (c *Context) MemInfo() (free, total uint64, err error) {
	v := new([2]uint64)
	if r := c.api().MemGetInfo(&v[0], &v[1]); r != Success {
		return 0, 0, c.failed(r, "cuMemGetInfo")
	}
	return v[0], v[1], nil
}

// Alloc allocates device memory, aligned to 256 bytes at least. What it holds is undefined.
func (c *Context) Alloc(n uint64) (Pointer, error) {
	p := new(Pointer)
	if r := c.api().MemAlloc(p, n); r != Success {
		return 0, c.failed(r, "cuMemAlloc of %d bytes", n)
	}
	return *p, nil
}

// Free gives device memory back. It waits for the work of the device.
func (c *Context) Free(p Pointer) error {
	if r := c.api().MemFree(p); r != Success {
		return c.failed(r, "cuMemFree of %#x", uint64(p))
	}
	return nil
}

// HostMemory is pinned or registered memory of the host, with the address that the GPU knows it by.
type HostMemory struct {
	Bytes []byte
	GPU   Pointer
}

// address is that of the first byte, for the driver.
func (m *HostMemory) address() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(m.Bytes)) }

var errNoBytes = errors.New("cuda: host memory of no bytes")

// AllocHost allocates pinned host memory that all contexts see. Write-combined memory is quick to write for the CPU
// and to read for the GPU, and very slow to read for the CPU.
func (c *Context) AllocHost(n int, writeCombined bool) (*HostMemory, error) {
	if n <= 0 {
		return nil, errNoBytes
	}
	flags := uint32(hostPortable | hostDeviceMap)
	if writeCombined {
		flags |= hostWriteCombined
	}
	p := new(unsafe.Pointer)
	if r := c.api().MemHostAlloc(p, uint64(n), flags); r != Success {
		return nil, c.failed(r, "cuMemHostAlloc of %d bytes", n)
	}
	m := &HostMemory{Bytes: unsafe.Slice((*byte)(*p), n)}
	if err := c.mapHost(m); err != nil {
		c.api().MemFreeHost(*p)
		return nil, err
	}
	return m, nil
}

// FreeHost gives back what AllocHost allocated.
func (c *Context) FreeHost(m *HostMemory) error {
	if r := c.api().MemFreeHost(m.address()); r != Success {
		return c.failed(r, "cuMemFreeHost of %d bytes", len(m.Bytes))
	}
	m.Bytes, m.GPU = nil, 0
	return nil
}

// RegisterHost pins memory of the process and maps it for all contexts. Memory that the Go runtime manages stays where
// it is, but must be kept alive.
func (c *Context) RegisterHost(b []byte) (*HostMemory, error) {
	if len(b) == 0 {
		return nil, errNoBytes
	}
	m := &HostMemory{Bytes: b}
	if r := c.api().MemHostRegister(m.address(), uint64(len(b)), hostPortable|hostDeviceMap); r != Success {
		return nil, c.failed(r, "cuMemHostRegister of %d bytes", len(b))
	}
	if err := c.mapHost(m); err != nil {
		c.api().MemHostUnregister(m.address())
		return nil, err
	}
	return m, nil
}

// UnregisterHost undoes RegisterHost.
func (c *Context) UnregisterHost(m *HostMemory) error {
	if r := c.api().MemHostUnregister(m.address()); r != Success {
		return c.failed(r, "cuMemHostUnregister of %d bytes", len(m.Bytes))
	}
	m.Bytes, m.GPU = nil, 0
	return nil
}

func (c *Context) mapHost(m *HostMemory) error {
	p := new(Pointer)
	if r := c.api().MemHostGetDevicePointer(p, m.address(), 0); r != Success {
		return c.failed(r, "cuMemHostGetDevicePointer of %d bytes", len(m.Bytes))
	}
	m.GPU = *p
	return nil
}

// PointerRange is the allocation that p lies in.
func (c *Context) PointerRange(p Pointer) (base Pointer, n uint64, err error) {
	v := &struct {
		base Pointer
		n    uint64
	}{}
	if r := c.api().MemGetAddressRange(&v.base, &v.n, p); r != Success {
		return 0, 0, c.failed(r, "cuMemGetAddressRange of %#x", uint64(p))
	}
	return v.base, v.n, nil
}

// MemoryType is CUmemorytype.
type MemoryType uint32

// Kinds of memory.
const (
	MemoryHost   MemoryType = 1
	MemoryDevice MemoryType = 2
)

// PointerType says where the memory of an address is. Addresses that CUDA does not know fail with ErrInvalidValue.
func (c *Context) PointerType(p Pointer) (MemoryType, error) {
	v := new(MemoryType)
	if r := c.api().PointerGetAttribute(unsafe.Pointer(v), pointerMemoryType, p); r != Success {
		return 0, c.failed(r, "cuPointerGetAttribute of %#x", uint64(p))
	}
	return *v, nil
}

// IPCHandle names the whole allocation that p lies in to other processes, which open its base: the offset of p travels
// beside it (PointerRange).
func (c *Context) IPCHandle(p Pointer) (IPCHandle, error) {
	h := new(IPCHandle)
	if r := c.api().IpcGetMemHandle(h, p); r != Success {
		return IPCHandle{}, c.failed(r, "cuIpcGetMemHandle of %#x", uint64(p))
	}
	return *h, nil
}

// OpenIPC maps another process' allocation.
func (c *Context) OpenIPC(h IPCHandle) (Pointer, error) {
	v := &struct {
		p Pointer
		h IPCHandle
	}{h: h}
	if r := c.api().IpcOpenMemHandle(&v.p, &v.h, ipcLazyPeerAccess); r != Success {
		return 0, c.failed(r, "cuIpcOpenMemHandle")
	}
	return v.p, nil
}

// CloseIPC unmaps what OpenIPC mapped.
func (c *Context) CloseIPC(p Pointer) error {
	if r := c.api().IpcCloseMemHandle(p); r != Success {
		return c.failed(r, "cuIpcCloseMemHandle of %#x", uint64(p))
	}
	return nil
}

// ExportDMABuf makes a dma-buf of device memory, whole pages of the host. The caller closes the file descriptor.
func (c *Context) ExportDMABuf(p Pointer, n uint64) (fd int, err error) {
	v := new(int32)
	r := c.api().MemGetHandleForAddressRange(unsafe.Pointer(v), p, n, rangeHandleDMABuf, 0)
	if r != Success {
		return -1, c.failed(r, "cuMemGetHandleForAddressRange of %d bytes at %#x", n, uint64(p))
	}
	return int(*v), nil
}

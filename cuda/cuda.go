// Package cuda is the CUDA driver API by dlopen: no cgo, no toolkit, nothing needed to build or run without
// a GPU. Open says clearly what is missing there.
//
// Contexts are per OS thread: a goroutine that calls Context.Bind locks its thread first and stays on it. Functions
// that act in a context say so. Nothing here allocates Go memory per call on the paths that a ring uses.
package cuda

import (
	"errors"
	"unsafe"
)

// Errors of Open.
var (
	// ErrNoDriver: libcuda.so.1 is not installed, or lacks something that is needed.
	ErrNoDriver = errors.New("cuda: no usable CUDA driver")
	// ErrNoDevice: the driver sees no GPU.
	ErrNoDevice = errors.New("cuda: the driver sees no GPU")
)

// Pointer is an address in a context's unified address space.
type Pointer uint64

// Driver is the loaded driver. A fake has the same functions over host memory (package cudatest).
type Driver struct {
	api *API
}

// API is the driver's functions as they are called. The field's name is the function's without "cu", and its version
// suffix is in the loader. Open fills it from libcuda, cudatest from Go.
type API struct {
	Init             func(flags uint32) Result
	DriverGetVersion func(version *int32) Result
	// Every other function of the driver that the package calls, each once.
}

// NewDriver makes a driver of the given functions, all of which are set.
func NewDriver(api *API) (*Driver, error) { return nil, errors.New("cuda: not built yet") }

// Open loads the driver of this machine, once a process. The error is ErrNoDriver or ErrNoDevice, wrapped with what to
// do.
func Open() (*Driver, error) { return nil, ErrNoDriver }

// Result is CUresult.
type Result int32

// Error is a driver call that failed: what was being done, the code, the driver's own name and text.
type Error struct {
	Op   string // "cuMemAlloc of 4096 bytes on device 0"
	Code Result
	Name string // CUDA_ERROR_OUT_OF_MEMORY
	Text string // out of memory
}

func (e *Error) Error() string { return e.Op }

// Device is a GPU.
type Device struct {
	Ordinal int
}

// Attributes that callers ask for (CUdevice_attribute).
type Attribute int32

// Context is a device's primary context (shared with the runtime API, so with PyTorch in the same process), or a green
// context of some SMs of it.
type Context struct{}

// Stream, Event, Module, Function, HostMemory are the driver's.
type (
	Stream   struct{}
	Event    struct{}
	Module   struct{}
	Function struct{}
)

// HostMemory is pinned memory of the host, or registered memory, with the address that the GPU knows it by.
type HostMemory struct {
	Bytes []byte
	GPU   Pointer
}

// The methods that the ring, the engine and the benches use. Each returns *Error.
//
//	func (d *Driver) Version() int                         // 13000
//	func (d *Driver) Devices() (int, error)
//	func (d *Driver) Device(ordinal int) (*Device, error)
//	func (d *Device) Name() string; UUID() [16]byte; TotalBytes() uint64; PCIBusID() string; SMs() int
//	func (d *Device) Attribute(a Attribute) (int, error)
//	func (d *Device) Primary() (*Context, error)           // retains
//	func (c *Context) Close() error                        // releases
//	func (c *Context) Bind() error                         // cuCtxSetCurrent; the goroutine's thread must be locked
//	func (c *Context) Unbind() error
//	func (c *Context) Device() *Device
//	func (c *Context) Green(sms int, ignoreCoScheduling bool) (*Context, error) // with the SMs really given: SMs()
//	func (c *Context) MemInfo() (free, total uint64, err error)
//	func (c *Context) Synchronize() error
//	func (c *Context) Alloc(n uint64) (Pointer, error); Free(p Pointer) error
//	func (c *Context) AllocHost(n int, writeCombined bool) (*HostMemory, error); FreeHost(*HostMemory) error
//	func (c *Context) RegisterHost(b []byte) (*HostMemory, error); UnregisterHost(*HostMemory) error // portable, mapped
//	func (c *Context) NewStream(priority int) (*Stream, error)   // non-blocking; in a green context: of its SMs
//	func (c *Context) StreamFromHandle(h uintptr) *Stream          // the engine's own stream, not owned
//	func (c *Context) NewEvent(timing bool) (*Event, error)
//	func (c *Context) LoadModule(ptx []byte) (*Module, error)      // error has the JIT's log
//	func (m *Module) Function(name string) (*Function, error); Close() error
//	func (s *Stream) Launch(f *Function, grid, block, sharedBytes uint32, params unsafe.Pointer) error // one struct
//	func (s *Stream) CopyHtoD(dst Pointer, src unsafe.Pointer, n uint64) error
//	func (s *Stream) CopyDtoH(dst unsafe.Pointer, src Pointer, n)
//	func (s *Stream) CopyDtoD(dst, src Pointer, n uint64) error; Memset(p Pointer, v byte, n uint64) error
//	func (s *Stream) CopyBatch(dst, src []Pointer, sizes []uint64) error        // cuMemcpyBatchAsync
//	func (s *Stream) WaitEvent(e *Event) error; Synchronize() error; Query() (done bool, err error); Close() error
//	func (s *Stream) WaitValue32(p Pointer, v uint32, geq bool) error; WriteValue32(p Pointer, v uint32) error
//	func (e *Event) Record(s *Stream) error; Query() (done bool, err error); Synchronize() error
//	func (e *Event) Elapsed(since *Event) (milliseconds float32, err error); Close() error
//	func (c *Context) IPCHandle(p Pointer) ([64]byte, error); OpenIPC(h [64]byte) (Pointer, error); CloseIPC(p Pointer)
//	func (c *Context) ExportDMABuf(p Pointer, n uint64) (fd int, err error)     // cuMemGetHandleForAddressRange
//	func (c *Context) PointerRange(p Pointer) (base Pointer, n uint64, err error)
//	func HostOf(p Pointer) is not there: host and device addresses are never mixed up.
var _ unsafe.Pointer

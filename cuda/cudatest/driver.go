// Package cudatest is a CUDA driver without a GPU: the functions of cuda.API in Go, over memory of the host.
//
// Device addresses are addresses of this process, so kernels are Go functions. Streams are asynchronous, each has a
// goroutine, so that whoever forgets to wait reads wrong bytes. It is strict where the driver is lenient: what would be
// undefined, slow or lucky on a GPU is misuse, which it notes and refuses. Live counts what has not been given back.
package cudatest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/cuda"
)

// Kernel is what a kernel does. It returns when the grid would be done. params is a copy of the launch's, as long as
// the PTX says that the parameter is.
//
// Memory that it shares with Go code may be of the Go heap (registered host memory), and what Go code sees of the
// kernel's progress is words in memory, which the race detector does not take for synchronization: kernels access such
// memory in functions marked go:norace.
type Kernel = func(grid, block uint32, params unsafe.Pointer)

// Config is the machine. The zero value is one GPU of 1 GiB with 132 SMs and no kernels.
type Config struct {
	Kernels     map[string]Kernel
	Devices     int
	MemoryBytes uint64 // of each device
	SMs         int
	Version     int           // of CUDA; 13000 by default
	Jitter      time.Duration // the most that an operation of a stream is delayed, at random
	Seed        uint64
	NoDMABuf    bool // the platform exports no dma-buf
}

// Counts is what lives.
type Counts struct {
	Contexts    int // holders of primary ones, and green ones
	Streams     int
	Events      int
	Modules     int
	Device      int // allocations
	DeviceBytes uint64
	Pinned      int
	Registered  int
	IPC         int // mappings of other processes' memory
}

// Fake is the driver.
type Fake struct {
	config Config
	driver *cuda.Driver
	quit   chan struct{} // closed by Close: waits end

	running sync.WaitGroup // streams' goroutines

	mu       sync.Mutex
	random   *rand.Rand
	next     uintptr // handle
	primary  []primary
	contexts map[uintptr]*context
	greens   map[uintptr]*context
	descs    map[uintptr]uint32
	bound    map[int]*context // by thread
	streams  map[uintptr]*stream
	events   map[uintptr]*event
	modules  map[uintptr]*module
	kernels  map[uintptr]*kernel
	regions  regions
	used     []uint64 // device memory, by device
	failures map[string]*failure
	before   func(stream uintptr, op string) cuda.Result
	broken   cuda.Result // every call's result, once a stream's operation has failed
	misuse   []string
}

type primary struct {
	holders int
	context *context
}

type context struct {
	handle   uintptr
	green    uintptr
	device   int32
	fallback *stream // the default stream, which somebody else's handles 0 to 2 mean
}

type failure struct {
	after int // calls that succeed first
	code  cuda.Result
}

// New makes a driver. Close ends it.
func New(c Config) (*Fake, error) {
	if c.Devices == 0 {
		c.Devices = 1
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = 1 << 30
	}
	if c.SMs == 0 {
		c.SMs = 132
	}
	if c.Version == 0 {
		c.Version = 13000
	}
	f := &Fake{
		config: c, quit: make(chan struct{}), random: rand.New(rand.NewPCG(c.Seed, 1)), next: 0x1000,
		primary: make([]primary, c.Devices), used: make([]uint64, c.Devices),
		contexts: map[uintptr]*context{}, greens: map[uintptr]*context{}, descs: map[uintptr]uint32{},
		bound: map[int]*context{}, streams: map[uintptr]*stream{}, events: map[uintptr]*event{},
		modules: map[uintptr]*module{}, kernels: map[uintptr]*kernel{}, failures: map[string]*failure{},
	}
	d, err := cuda.NewDriver(f.API())
	f.driver = d
	return f, err
}

// Start makes a driver for a test, at the end of which nothing of it lives and nothing was misused.
func Start(t testing.TB, c Config) *Fake {
	t.Helper()
	f, err := New(c)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.Empty(t, f.Misuse(), "misuse of the driver")
		if f.Broken() == cuda.Success {
			require.Equal(t, Counts{}, f.Live(), "what has not been given back")
		}
		require.NoError(t, f.Close())
	})
	return f
}

// Driver is the driver as Open returns one.
func (f *Fake) Driver() *cuda.Driver { return f.driver }

// Live counts what has been made and not been given back.
func (f *Fake) Live() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := Counts{Contexts: len(f.greens), Streams: len(f.streams), Events: len(f.events), Modules: len(f.modules)}
	for _, p := range f.primary {
		n.Contexts += p.holders
	}
	for _, r := range f.regions {
		switch {
		case r.freed:
		case r.kind == device:
			n.Device++
			n.DeviceBytes += r.n
		case r.kind == pinned:
			n.Pinned++
		case r.kind == registered:
			n.Registered++
		case r.kind == foreign:
			n.IPC++
		}
	}
	return n
}

// Misuse lists what was done wrong.
func (f *Fake) Misuse() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.misuse)
}

// Fail makes the n-th next call of a function (1 is the next) return a code and do nothing. Functions are named as the
// fields of cuda.API.
func (f *Fake) Fail(function string, n int, code cuda.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := reflect.TypeFor[cuda.API]().FieldByName(function); !known || n < 1 {
		f.misused("call %d of %s cannot fail", n, function)
		return
	}
	f.failures[function] = &failure{n - 1, code}
}

// Before sets what is called before each operation of a stream, on the stream's goroutine: it may wait, and so hold the
// stream, and what it returns is the operation's result. Operations are named as the functions that enqueue them;
// launches are named as their kernels.
func (f *Fake) Before(hook func(stream uintptr, op string) cuda.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = hook
}

// Break makes every call from now on fail, as after a kernel's fault, which nothing but the process' end mends.
func (f *Fake) Break(code cuda.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.broken = code
}

// Broken is the result of all calls since an operation of a stream failed.
func (f *Fake) Broken() cuda.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken
}

// Close ends the driver: operations that wait are given up, and all memory is unmapped.
func (f *Fake) Close() error {
	f.mu.Lock()
	close(f.quit)
	f.broken = cuda.ErrDeinitialized
	all := slices.Collect(maps.Values(f.streams))
	for _, c := range f.contexts {
		all = append(all, c.fallback)
	}
	f.mu.Unlock()
	for _, s := range all {
		s.end()
	}
	f.running.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.regions.unmap()
}

// misused notes misuse. The lock is held.
func (f *Fake) misused(format string, args ...any) {
	f.misuse = append(f.misuse, fmt.Sprintf(format, args...))
}

func (f *Fake) handle() uintptr {
	f.next += 0x10
	return f.next
}

// enter begins a call: it takes the lock, which the caller releases whatever the result.
func (f *Fake) enter(function string) cuda.Result {
	f.mu.Lock()
	if x := f.failures[function]; x != nil {
		if x.after == 0 {
			delete(f.failures, function)
			return x.code
		}
		x.after--
	}
	return f.broken
}

// enterBound begins a call that wants the thread to have a context.
func (f *Fake) enterBound(function string) (*context, cuda.Result) {
	if r := f.enter(function); r != cuda.Success {
		return nil, r
	}
	c := f.bound[unix.Gettid()]
	if c == nil {
		f.misused("cu%s on a thread without a context", function)
		return nil, cuda.ErrInvalidContext
	}
	return c, cuda.Success
}

// API is the table of the driver's functions.
func (f *Fake) API() *cuda.API {
	return &cuda.API{
		GetErrorName: errorName, GetErrorString: errorText,
		Init: f.start, DriverGetVersion: f.version,
		DeviceGetCount: f.deviceCount, DeviceGet: f.deviceGet, DeviceGetName: f.deviceName,
		DeviceGetUuid: f.deviceUUID, DeviceTotalMem: f.deviceMemory, DeviceGetAttribute: f.deviceAttribute,
		DeviceGetPCIBusId: f.deviceBus, DevicePrimaryCtxRetain: f.retain, DevicePrimaryCtxRelease: f.release,
		CtxSetCurrent: f.setCurrent, CtxSynchronize: f.synchronizeContext,
		CtxGetStreamPriorityRange: f.priorities,
		DeviceGetDevResource:      f.devResource, DevSmResourceSplitByCount: f.split,
		DevResourceGenerateDesc: f.generateDesc, GreenCtxCreate: f.greenCreate, GreenCtxDestroy: f.greenDestroy,
		CtxFromGreenCtx: f.fromGreen, GreenCtxStreamCreate: f.greenStream,
		MemGetInfo: f.memInfo, MemAlloc: f.alloc, MemFree: f.free, MemHostAlloc: f.allocHost, MemFreeHost: f.freeHost,
		MemHostRegister: f.register, MemHostUnregister: f.unregister, MemHostGetDevicePointer: f.devicePointer,
		MemGetAddressRange: f.addressRange, PointerGetAttribute: f.pointerAttribute,
		MemGetHandleForAddressRange: f.exportRange, IpcGetMemHandle: f.ipcHandle, IpcOpenMemHandle: f.ipcOpen,
		IpcCloseMemHandle: f.ipcClose,
		ModuleLoadDataEx:  f.moduleLoad, ModuleUnload: f.moduleUnload, ModuleGetFunction: f.moduleFunction,
		LaunchKernel:             f.launch,
		StreamCreateWithPriority: f.streamCreate, StreamDestroy: f.streamDestroy,
		StreamSynchronize: f.streamSynchronize, StreamQuery: f.streamQuery, StreamWaitEvent: f.streamWaitEvent,
		StreamWaitValue32: f.streamWaitValue, StreamWriteValue32: f.streamWriteValue,
		MemcpyHtoDAsync: f.copyIn, MemcpyDtoHAsync: f.copyOut, MemcpyDtoDAsync: f.copyWithin, MemsetD8Async: f.memset,
		MemcpyBatchAsync: f.copyBatch,
		EventCreate:      f.eventCreate, EventDestroy: f.eventDestroy, EventRecord: f.eventRecord,
		EventQuery: f.eventQuery, EventSynchronize: f.eventSynchronize, EventElapsedTime: f.eventElapsed,
	}
}

// words are names and texts of the driver's results.
var words = map[cuda.Result][2]string{
	cuda.Success:              {"CUDA_SUCCESS", "no error"},
	cuda.ErrInvalidValue:      {"CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	cuda.ErrOutOfMemory:       {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	cuda.ErrNotInitialized:    {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	cuda.ErrDeinitialized:     {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
	cuda.ErrDeviceAbsent:      {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	cuda.ErrInvalidDevice:     {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	cuda.ErrInvalidContext:    {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	cuda.ErrMapFailed:         {"CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
	cuda.ErrInvalidPTX:        {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	cuda.ErrInvalidHandle:     {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	cuda.ErrNotFound:          {"CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	cuda.ErrNotReady:          {"CUDA_ERROR_NOT_READY", "device not ready"},
	cuda.ErrIllegalAddress:    {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	cuda.ErrLaunchTimeout:     {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
	cuda.ErrAlreadyRegistered: {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is mapped"},
	cuda.ErrNotRegistered:     {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer is not of registered memory"},
	cuda.ErrLaunchFailed:      {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	cuda.ErrNotPermitted:      {"CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	cuda.ErrNotSupported:      {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	cuda.ErrUnknown:           {"CUDA_ERROR_UNKNOWN", "unknown error"},
}

func errorName(r cuda.Result) string { return words[r][0] }
func errorText(r cuda.Result) string { return words[r][1] }

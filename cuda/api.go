package cuda

import "unsafe"

// API is the driver's functions as they are called. A field's name is the function's without "cu"; the symbol with its
// version is in the loader. Handles (contexts, streams, events, modules, functions) are uintptr. Open fills it from
// libcuda, cudatest from Go.
type API struct {
	// The driver's own names and texts of results, empty for unknown ones.
	GetErrorName   func(r Result) string
	GetErrorString func(r Result) string

	Init             func(flags uint32) Result
	DriverGetVersion func(version *int32) Result

	DeviceGetCount          func(n *int32) Result
	DeviceGet               func(device *int32, ordinal int32) Result
	DeviceGetName           func(name *byte, n int32, device int32) Result
	DeviceGetUuid           func(uuid *[16]byte, device int32) Result
	DeviceTotalMem          func(n *uint64, device int32) Result
	DeviceGetAttribute      func(v *int32, a Attribute, device int32) Result
	DeviceGetPCIBusId       func(id *byte, n int32, device int32) Result
	DevicePrimaryCtxRetain  func(context *uintptr, device int32) Result
	DevicePrimaryCtxRelease func(device int32) Result

	CtxSetCurrent             func(context uintptr) Result
	CtxSynchronize            func() Result
	CtxGetStreamPriorityRange func(least, greatest *int32) Result

	DeviceGetDevResource      func(device int32, resource *DevResource, kind uint32) Result
	DevSmResourceSplitByCount func(result *DevResource, groups *uint32, input, remaining *DevResource,
		flags, least uint32) Result
	DevResourceGenerateDesc func(desc *uintptr, resources *DevResource, n uint32) Result
	GreenCtxCreate          func(green *uintptr, desc uintptr, device int32, flags uint32) Result
	GreenCtxDestroy         func(green uintptr) Result
	CtxFromGreenCtx         func(context *uintptr, green uintptr) Result
	GreenCtxStreamCreate    func(stream *uintptr, green uintptr, flags uint32, priority int32) Result

	MemGetInfo                  func(free, total *uint64) Result
	MemAlloc                    func(p *Pointer, n uint64) Result
	MemFree                     func(p Pointer) Result
	MemHostAlloc                func(p *unsafe.Pointer, n uint64, flags uint32) Result
	MemFreeHost                 func(p unsafe.Pointer) Result
	MemHostRegister             func(p unsafe.Pointer, n uint64, flags uint32) Result
	MemHostUnregister           func(p unsafe.Pointer) Result
	MemHostGetDevicePointer     func(d *Pointer, p unsafe.Pointer, flags uint32) Result
	MemGetAddressRange          func(base *Pointer, n *uint64, p Pointer) Result
	PointerGetAttribute         func(data unsafe.Pointer, attribute int32, p Pointer) Result
	MemGetHandleForAddressRange func(handle unsafe.Pointer, p Pointer, n uint64, kind uint32, flags uint64) Result
	IpcGetMemHandle             func(handle *IPCHandle, p Pointer) Result
	// The handle is passed by value in C.
	IpcOpenMemHandle  func(p *Pointer, handle *IPCHandle, flags uint32) Result
	IpcCloseMemHandle func(p Pointer) Result

	ModuleLoadDataEx  func(m *uintptr, image unsafe.Pointer, n uint32, options *int32, values unsafe.Pointer) Result
	ModuleUnload      func(m uintptr) Result
	ModuleGetFunction func(f *uintptr, m uintptr, name *byte) Result
	// Of one kernel parameter at most: params is the address of its address.
	LaunchKernel func(f uintptr, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes uint32, stream uintptr,
		params *unsafe.Pointer) Result

	StreamCreateWithPriority func(stream *uintptr, flags uint32, priority int32) Result
	StreamDestroy            func(stream uintptr) Result
	StreamSynchronize        func(stream uintptr) Result
	StreamQuery              func(stream uintptr) Result
	StreamWaitEvent          func(stream, event uintptr, flags uint32) Result
	StreamWaitValue32        func(stream uintptr, p Pointer, v, flags uint32) Result
	StreamWriteValue32       func(stream uintptr, p Pointer, v, flags uint32) Result

	MemcpyHtoDAsync  func(dst Pointer, src unsafe.Pointer, n uint64, stream uintptr) Result
	MemcpyDtoHAsync  func(dst unsafe.Pointer, src Pointer, n uint64, stream uintptr) Result
	MemcpyDtoDAsync  func(dst, src Pointer, n uint64, stream uintptr) Result
	MemsetD8Async    func(p Pointer, v uint8, n uint64, stream uintptr) Result
	MemcpyBatchAsync func(dsts, srcs *Pointer, sizes *uint64, n uint64, attributes *MemcpyAttributes, firsts *uint64,
		attributeCount uint64, stream uintptr) Result

	EventCreate      func(event *uintptr, flags uint32) Result
	EventDestroy     func(event uintptr) Result
	EventRecord      func(event, stream uintptr) Result
	EventQuery       func(event uintptr) Result
	EventSynchronize func(event uintptr) Result
	EventElapsedTime func(milliseconds *float32, from, to uintptr) Result
}

// Attribute is CUdevice_attribute: a property that Device.Attribute asks for.
type Attribute int32

// Attributes that callers ask for.
const (
	AttributeSMs                   Attribute = 16
	AttributeCanMapHostMemory      Attribute = 19
	AttributeL2Bytes               Attribute = 38
	AttributeCopyEngines           Attribute = 40
	AttributeComputeMajor          Attribute = 75
	AttributeComputeMinor          Attribute = 76
	AttributeHostRegisterSameAddr  Attribute = 91
	AttributeGPUDirectRDMA         Attribute = 116
	AttributeGPUDirectRDMAFlush    Attribute = 117
	AttributeGPUDirectRDMAOrdering Attribute = 118 // of others' writes: DirectOrderedOwner or more needs no flush here
	AttributeDMABuf                Attribute = 124
)

// DirectOrderedOwner is CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: kernels of the memory's own device that are launched
// when a device's write is known to be done see it.
const DirectOrderedOwner = 100

// DevResource is CUdevResource of ABI version 1.
type DevResource struct {
	Type uint32
	_    [92]byte
	// CUdevSmResource, in a union of 48 bytes.
	SMs       uint32
	LeastSMs  uint32
	Alignment uint32
	_         [36]byte
}

// MemcpyAttributes is CUmemcpyAttributes.
type MemcpyAttributes struct {
	SrcAccessOrder uint32
	SrcLocation    [2]int32 // type, id; both hints are for managed and pageable memory
	DstLocation    [2]int32
	Flags          uint32
}

// IPCHandle names an allocation of device memory to other processes.
type IPCHandle [64]byte

// Constants of the driver's calls.
const (
	devResourceSM           = 1
	splitIgnoreCoScheduling = 1
	greenDefaultStream      = 1
	streamNonBlocking       = 1
	eventDisableTiming      = 2
	hostPortable            = 1 // of MemHostAlloc and MemHostRegister
	hostDeviceMap           = 2
	hostWriteCombined       = 4
	jitErrorLog             = 5
	jitErrorLogBytes        = 6
	srcAccessOrderStream    = 1
	waitValueGEQ            = 0
	waitValueEQ             = 1
	rangeHandleDMABuf       = 1
	ipcLazyPeerAccess       = 1
	pointerMemoryType       = 2
)

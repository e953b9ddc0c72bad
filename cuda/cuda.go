// Package cuda is the CUDA driver API by dlopen: no cgo, no toolkit, nothing needed to build or to run without a GPU.
// Open says clearly what is missing there.
//
// Contexts are per OS thread. A goroutine that calls Context.Bind locks its thread first and stays on it. Every method
// of Context, Stream, Event and Module wants a bound context on the calling thread, but Bind, Green and Close of a
// Context. Nothing here allocates Go memory on the paths that a ring uses: launches, copies, events, queries.
package cuda

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Pointer is an address in a context's unified address space.
type Pointer uint64

// VersionNeeded is the least CUDA version of the driver: the kernels' PTX is of this version.
const VersionNeeded = 13000

// Driver is the loaded driver. A fake has the same functions over host memory (package cudatest).
type Driver struct {
	api     *API
	version int
	devices int
	// One attribute serves all copies of every batch; they live here because the driver is given their addresses.
	batchAttributes MemcpyAttributes
	batchFirst      uint64
}

// NewDriver starts a driver of the given functions, all of which are set.
func NewDriver(api *API) (*Driver, error) {
	d := &Driver{api: api, batchAttributes: MemcpyAttributes{SrcAccessOrder: srcAccessOrderStream}}
	if r := api.Init(0); r == ErrDeviceAbsent {
		return nil, fmt.Errorf("%w: %w", ErrNoDevice, d.failed(r, "cuInit"))
	} else if r != Success {
		return nil, fmt.Errorf("%w: %w", ErrNoDriver, d.failed(r, "cuInit"))
	}
	version, devices := new(int32), new(int32)
	if r := api.DriverGetVersion(version); r != Success {
		return nil, fmt.Errorf("%w: %w", ErrNoDriver, d.failed(r, "cuDriverGetVersion"))
	}
	if *version < VersionNeeded {
		return nil, fmt.Errorf("%w: it is of CUDA %d.%d, and %d.%d or newer is needed: install a newer NVIDIA driver",
			ErrNoDriver, *version/1000, *version%1000/10, VersionNeeded/1000, VersionNeeded%1000/10)
	}
	if r := api.DeviceGetCount(devices); r != Success {
		return nil, fmt.Errorf("%w: %w", ErrNoDevice, d.failed(r, "cuDeviceGetCount"))
	}
	if *devices == 0 {
		return nil, fmt.Errorf("%w: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides it", ErrNoDevice)
	}
	d.version, d.devices = int(*version), int(*devices)
	return d, nil
}

// Version is the CUDA version of the driver: 13000 is 13.0.
func (d *Driver) Version() int { return d.version }

// Devices is the number of GPUs that the process sees.
func (d *Driver) Devices() int { return d.devices }

// Device is a GPU.
type Device struct {
	Ordinal int

	driver *Driver
	handle int32
	name   string
	uuid   [16]byte
	bytes  uint64
	bus    string
	sms    int
}

// Device returns the GPU of that number, and asks it what it is.
func (d *Driver) Device(ordinal int) (*Device, error) {
	if ordinal < 0 || ordinal >= d.devices {
		return nil, fmt.Errorf("cuda: there is no GPU %d: the process sees %d, from 0", ordinal, d.devices)
	}
	a, v := d.api, &struct {
		handle    int32
		name, bus [256]byte
		uuid      [16]byte
		bytes     uint64
	}{}
	if r := a.DeviceGet(&v.handle, int32(ordinal)); r != Success {
		return nil, d.failed(r, "cuDeviceGet %d", ordinal)
	}
	if r := a.DeviceGetName(&v.name[0], int32(len(v.name)), v.handle); r != Success {
		return nil, d.failed(r, "cuDeviceGetName of device %d", ordinal)
	}
	if r := a.DeviceGetUuid(&v.uuid, v.handle); r != Success {
		return nil, d.failed(r, "cuDeviceGetUuid of device %d", ordinal)
	}
	if r := a.DeviceTotalMem(&v.bytes, v.handle); r != Success {
		return nil, d.failed(r, "cuDeviceTotalMem of device %d", ordinal)
	}
	if r := a.DeviceGetPCIBusId(&v.bus[0], int32(len(v.bus)), v.handle); r != Success {
		return nil, d.failed(r, "cuDeviceGetPCIBusId of device %d", ordinal)
	}
	g := &Device{Ordinal: ordinal, driver: d, handle: v.handle, name: text(v.name[:]), uuid: v.uuid, bytes: v.bytes,
		bus: text(v.bus[:])}
	sms, err := g.Attribute(AttributeSMs)
	g.sms = sms
	return g, err
}

// text is what comes before the first NUL.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Name is the product's: "NVIDIA H200".
func (g *Device) Name() string { return g.name }

// UUID tells GPUs apart across processes and reboots.
func (g *Device) UUID() [16]byte { return g.uuid }

// TotalBytes is the GPU's memory.
func (g *Device) TotalBytes() uint64 { return g.bytes }

// PCIBusID is domain:bus:device.function, hexadecimal.
func (g *Device) PCIBusID() string { return g.bus }

// SMs is the number of streaming multiprocessors.
func (g *Device) SMs() int { return g.sms }

// Attribute asks for a property of the device.
func (g *Device) Attribute(a Attribute) (int, error) {
	v := new(int32)
	if r := g.driver.api.DeviceGetAttribute(v, a, g.handle); r != Success {
		return 0, g.driver.failed(r, "cuDeviceGetAttribute %d of device %d", a, g.Ordinal)
	}
	return int(*v), nil
}

// Context is a device's primary context (shared with the runtime API, so with PyTorch in the same process), or a green
// context of some SMs of it.
type Context struct {
	device *Device
	handle uintptr
	green  uintptr // 0 for the primary context
	sms    int
}

// Primary retains the device's primary context, and makes it if it is the first in the process to do so.
func (g *Device) Primary() (*Context, error) {
	h := new(uintptr)
	if r := g.driver.api.DevicePrimaryCtxRetain(h, g.handle); r != Success {
		return nil, g.driver.failed(r, "cuDevicePrimaryCtxRetain of device %d", g.Ordinal)
	}
	return &Context{device: g, handle: *h, sms: g.sms}, nil
}

// Close releases a primary context, which ends with its last holder, or destroys a green one. It is bound to no thread
// then, and all that was made in it is closed.
func (c *Context) Close() error {
	if c.green != 0 {
		if r := c.api().GreenCtxDestroy(c.green); r != Success {
			return c.failed(r, "cuGreenCtxDestroy")
		}
		return nil
	}
	if r := c.api().DevicePrimaryCtxRelease(c.device.handle); r != Success {
		return c.failed(r, "cuDevicePrimaryCtxRelease")
	}
	return nil
}

func (c *Context) api() *API { return c.device.driver.api }

// failed makes the error of a call that concerns the device.
func (c *Context) failed(r Result, op string, args ...any) error {
	return c.device.driver.failed(r, op+" on device %d", append(args, c.device.Ordinal)...)
}

// Bind makes the context the calling thread's. The goroutine has locked its thread.
func (c *Context) Bind() error {
	if r := c.api().CtxSetCurrent(c.handle); r != Success {
		return c.failed(r, "cuCtxSetCurrent")
	}
	return nil
}

// Unbind leaves the calling thread without a context. Threads of a host program that had one are not unbound.
func (c *Context) Unbind() error {
	if r := c.api().CtxSetCurrent(0); r != Success {
		return c.failed(r, "cuCtxSetCurrent to none")
	}
	return nil
}

// Device is the GPU of the context.
func (c *Context) Device() *Device { return c.device }

// SMs is the number of SMs that the context's kernels can run on.
func (c *Context) SMs() int { return c.sms }

// Green makes a context of at least so many SMs of the device, as few as the hardware can set aside; SMs says how many.
// With ignoreCoScheduling SMs need not be neighbours, so that fewer can be asked for, and clusters cannot be launched.
// Memory is that of the primary context.
func (c *Context) Green(sms int, ignoreCoScheduling bool) (*Context, error) {
	return c.split(sms, ignoreCoScheduling, false)
}

// GreenRest makes a context of the SMs that Green leaves when it is asked for the same: the split depends on nothing
// else.
func (c *Context) GreenRest(sms int, ignoreCoScheduling bool) (*Context, error) {
	return c.split(sms, ignoreCoScheduling, true)
}

// split makes a context of the first so many SMs, or of the rest.
func (c *Context) split(sms int, ignoreCoScheduling, rest bool) (*Context, error) {
	if sms < 1 || sms > c.device.sms {
		return nil, fmt.Errorf("cuda: a green context of %d SMs: device %d has %d", sms, c.device.Ordinal, c.device.sms)
	}
	v := &struct {
		all, part, rest DevResource
		parts           uint32
		desc, green     uintptr
		context         uintptr
	}{parts: 1}
	if r := c.api().DeviceGetDevResource(c.device.handle, &v.all, devResourceSM); r != Success {
		return nil, c.failed(r, "cuDeviceGetDevResource")
	}
	flags := uint32(0)
	if ignoreCoScheduling {
		flags = splitIgnoreCoScheduling
	}
	if r := c.api().DevSmResourceSplitByCount(&v.part, &v.parts, &v.all, &v.rest, flags, uint32(sms)); r != Success {
		return nil, c.failed(r, "cuDevSmResourceSplitByCount of %d SMs", sms)
	}
	if v.parts != 1 {
		return nil, c.failed(ErrInvalidValue, "cuDevSmResourceSplitByCount of %d SMs gave %d parts", sms, v.parts)
	}
	if rest {
		v.part = v.rest
	}
	if r := c.api().DevResourceGenerateDesc(&v.desc, &v.part, 1); r != Success {
		return nil, c.failed(r, "cuDevResourceGenerateDesc")
	}
	if r := c.api().GreenCtxCreate(&v.green, v.desc, c.device.handle, greenDefaultStream); r != Success {
		return nil, c.failed(r, "cuGreenCtxCreate of %d SMs", v.part.SMs)
	}
	if r := c.api().CtxFromGreenCtx(&v.context, v.green); r != Success {
		c.api().GreenCtxDestroy(v.green)
		return nil, c.failed(r, "cuCtxFromGreenCtx")
	}
	return &Context{device: c.device, handle: v.context, green: v.green, sms: int(v.part.SMs)}, nil
}

// Synchronize waits for all work of the bound context.
func (c *Context) Synchronize() error {
	if r := c.api().CtxSynchronize(); r != Success {
		return c.failed(r, "cuCtxSynchronize")
	}
	return nil
}

// StreamPriorities is the range of priorities: the greatest is the smaller number.
func (c *Context) StreamPriorities() (least, greatest int, err error) {
	v := new([2]int32)
	if r := c.api().CtxGetStreamPriorityRange(&v[0], &v[1]); r != Success {
		return 0, 0, c.failed(r, "cuCtxGetStreamPriorityRange")
	}
	return int(v[0]), int(v[1]), nil
}

// Module is loaded code.
type Module struct {
	context *Context
	handle  uintptr
}

// Function is a kernel of a module.
type Function struct {
	name   string
	handle uintptr
}

// Name is the kernel's.
func (f *Function) Name() string { return f.name }

// jitValues are the values of the options that LoadModule gives, each as wide as a pointer.
type jitValues struct {
	log      unsafe.Pointer
	logBytes uintptr
}

// LoadModule compiles PTX for the GPU and loads it. The error has the compiler's log.
func (c *Context) LoadModule(ptx []byte) (*Module, error) {
	image := make([]byte, len(ptx)+1) // ends with a NUL
	copy(image, ptx)
	v := &struct {
		handle  uintptr
		options [2]int32
		values  jitValues
		log     [16 << 10]byte
	}{options: [2]int32{jitErrorLog, jitErrorLogBytes}}
	v.values = jitValues{unsafe.Pointer(&v.log), uintptr(len(v.log))}
	r := c.api().ModuleLoadDataEx(&v.handle, unsafe.Pointer(&image[0]), 2, &v.options[0], unsafe.Pointer(&v.values))
	log := text(v.log[:])
	runtime.KeepAlive(image)
	if r == Success {
		return &Module{c, v.handle}, nil
	}
	err := c.failed(r, "cuModuleLoadDataEx of %d bytes", len(ptx))
	if log != "" {
		err = fmt.Errorf("%w\n%s", err, log)
	}
	return nil, err
}

// Function finds a kernel by its name.
func (m *Module) Function(name string) (*Function, error) {
	h, n := new(uintptr), append([]byte(name), 0)
	if r := m.context.api().ModuleGetFunction(h, m.handle, &n[0]); r != Success {
		return nil, m.context.failed(r, "cuModuleGetFunction %q", name)
	}
	return &Function{name, *h}, nil
}

// Close unloads the module. None of its kernels runs.
func (m *Module) Close() error {
	if r := m.context.api().ModuleUnload(m.handle); r != Success {
		return m.context.failed(r, "cuModuleUnload")
	}
	return nil
}

package cudatest

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
)

func (f *Fake) start(uint32) cuda.Result {
	r := f.enter("Init")
	f.mu.Unlock()
	return r
}

func (f *Fake) version(v *int32) cuda.Result {
	r := f.enter("DriverGetVersion")
	f.mu.Unlock()
	*v = int32(f.config.Version)
	return r
}

func (f *Fake) deviceCount(n *int32) cuda.Result {
	r := f.enter("DeviceGetCount")
	f.mu.Unlock()
	*n = int32(f.config.Devices)
	return r
}

// enterDevice begins a call that concerns a device.
func (f *Fake) enterDevice(function string, device int32) cuda.Result {
	if r := f.enter(function); r != cuda.Success {
		return r
	}
	if device < 0 || int(device) >= f.config.Devices {
		f.misused("cu%s of device %d", function, device)
		return cuda.ErrInvalidDevice
	}
	return cuda.Success
}

func (f *Fake) deviceGet(device *int32, ordinal int32) cuda.Result {
	r := f.enterDevice("DeviceGet", ordinal)
	f.mu.Unlock()
	*device = ordinal
	return r
}

// fill writes a C string.
func fill(p *byte, n int32, s string) cuda.Result {
	if int(n) <= len(s) {
		return cuda.ErrInvalidValue
	}
	b := unsafe.Slice(p, n)
	b[copy(b, s)] = 0
	return cuda.Success
}

func (f *Fake) deviceName(name *byte, n int32, device int32) cuda.Result {
	r := f.enterDevice("DeviceGetName", device)
	f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	return fill(name, n, fmt.Sprintf("Fake GPU %d", device))
}

func (f *Fake) deviceUUID(uuid *[16]byte, device int32) cuda.Result {
	r := f.enterDevice("DeviceGetUuid", device)
	f.mu.Unlock()
	*uuid = [16]byte{0: 0xfa, 15: byte(device)}
	return r
}

func (f *Fake) deviceMemory(n *uint64, device int32) cuda.Result {
	r := f.enterDevice("DeviceTotalMem", device)
	f.mu.Unlock()
	*n = f.config.MemoryBytes
	return r
}

func (f *Fake) deviceAttribute(v *int32, a cuda.Attribute, device int32) cuda.Result {
	r := f.enterDevice("DeviceGetAttribute", device)
	f.mu.Unlock()
	switch a {
	case cuda.AttributeSMs:
		*v = int32(f.config.SMs)
	case cuda.AttributeComputeMajor:
		*v = 9
	case cuda.AttributeComputeMinor:
		*v = 0
	case cuda.AttributeCopyEngines:
		*v = 3
	case cuda.AttributeL2Bytes:
		*v = 50 << 20
	case cuda.AttributeCanMapHostMemory, cuda.AttributeHostRegisterSameAddr:
		*v = 1
	case cuda.AttributeGPUDirectRDMAOrdering:
		*v = cuda.DirectOrderedOwner
	case cuda.AttributeDMABuf:
		*v = 1
		if f.config.NoDMABuf {
			*v = 0
		}
	default:
		*v = 0
	}
	return r
}

func (f *Fake) deviceBus(id *byte, n int32, device int32) cuda.Result {
	r := f.enterDevice("DeviceGetPCIBusId", device)
	f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	return fill(id, n, fmt.Sprintf("0000:%02x:00.0", device+1))
}

// newContext makes a context. The lock is held.
func (f *Fake) newContext(device int32) *context {
	c := &context{handle: f.handle(), device: device}
	c.fallback = f.newStream(c)
	f.contexts[c.handle] = c
	return c
}

// endContext takes a context from the threads that it is bound to. What lives in it is misuse: it would be lost.
func (f *Fake) endContext(c *context) {
	delete(f.contexts, c.handle)
	for tid, b := range f.bound {
		if b == c {
			delete(f.bound, tid)
		}
	}
	streams, events, modules, memory := 0, 0, 0, 0
	for _, s := range f.streams {
		streams += count(s.context == c)
	}
	for _, e := range f.events {
		events += count(e.context == c)
	}
	for _, m := range f.modules {
		modules += count(m.context == c)
	}
	for _, r := range f.regions {
		memory += count(r.context == c && !r.freed)
	}
	if streams+events+modules+memory != 0 {
		f.misused("a context ended that %d streams, %d events, %d modules and %d allocations lived in", streams, events,
			modules, memory)
	}
	c.fallback.end()
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (f *Fake) retain(h *uintptr, device int32) cuda.Result {
	r := f.enterDevice("DevicePrimaryCtxRetain", device)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	p := &f.primary[device]
	if p.holders == 0 {
		p.context = f.newContext(device)
	}
	p.holders++
	*h = p.context.handle
	return cuda.Success
}

func (f *Fake) release(device int32) cuda.Result {
	r := f.enterDevice("DevicePrimaryCtxRelease", device)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	p := &f.primary[device]
	if p.holders == 0 {
		f.misused("the primary context of device %d was released once too often", device)
		return cuda.ErrInvalidContext
	}
	if p.holders--; p.holders == 0 {
		f.endContext(p.context)
		p.context = nil
	}
	return cuda.Success
}

func (f *Fake) setCurrent(h uintptr) cuda.Result {
	r := f.enter("CtxSetCurrent")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if h == 0 {
		delete(f.bound, unix.Gettid())
		return cuda.Success
	}
	c := f.contexts[h]
	if c == nil {
		f.misused("cuCtxSetCurrent of a context that is not there")
		return cuda.ErrInvalidContext
	}
	f.bound[unix.Gettid()] = c
	return cuda.Success
}

func (f *Fake) synchronizeContext() cuda.Result {
	c, r := f.enterBound("CtxSynchronize")
	if r != cuda.Success {
		f.mu.Unlock()
		return r
	}
	marks := f.marks(func(s *stream) bool { return s.context == c })
	f.mu.Unlock()
	return f.await(marks)
}

func (f *Fake) priorities(least, greatest *int32) cuda.Result {
	_, r := f.enterBound("CtxGetStreamPriorityRange")
	f.mu.Unlock()
	*least, *greatest = 0, -5
	return r
}

func (f *Fake) devResource(device int32, out *cuda.DevResource, kind uint32) cuda.Result {
	r := f.enterDevice("DeviceGetDevResource", device)
	f.mu.Unlock()
	*out = cuda.DevResource{Type: kind, SMs: uint32(f.config.SMs), LeastSMs: 8, Alignment: 8}
	return r
}

// split gives one group, of as few SMs as a GPU of compute capability 9.0 can set aside.
func (f *Fake) split(out *cuda.DevResource, groups *uint32, in, rest *cuda.DevResource, flags,
	least uint32) cuda.Result {
	r := f.enter("DevSmResourceSplitByCount")
	f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	align := in.Alignment
	if flags&1 != 0 {
		align = 2
	}
	n := max(align, (least+align-1)/align*align)
	if *groups != 1 || n > in.SMs {
		return cuda.ErrInvalidValue
	}
	*out, *rest = *in, *in
	out.SMs, rest.SMs = n, in.SMs-n
	return cuda.Success
}

func (f *Fake) generateDesc(desc *uintptr, in *cuda.DevResource, n uint32) cuda.Result {
	r := f.enter("DevResourceGenerateDesc")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if n != 1 || in.SMs == 0 {
		return cuda.ErrInvalidValue
	}
	*desc = f.handle()
	f.descs[*desc] = in.SMs
	return cuda.Success
}

func (f *Fake) greenCreate(h *uintptr, desc uintptr, device int32, flags uint32) cuda.Result {
	r := f.enterDevice("GreenCtxCreate", device)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if f.descs[desc] == 0 || flags != 1 {
		f.misused("cuGreenCtxCreate of no description, or flags %d", flags)
		return cuda.ErrInvalidValue
	}
	c := f.newContext(device)
	c.green = f.handle()
	f.greens[c.green], *h = c, c.green
	return cuda.Success
}

// enterGreen begins a call that concerns a green context.
func (f *Fake) enterGreen(function string, green uintptr) (*context, cuda.Result) {
	if r := f.enter(function); r != cuda.Success {
		return nil, r
	}
	c := f.greens[green]
	if c == nil {
		f.misused("cu%s of a green context that is not there", function)
		return nil, cuda.ErrInvalidHandle
	}
	return c, cuda.Success
}

func (f *Fake) greenDestroy(green uintptr) cuda.Result {
	c, r := f.enterGreen("GreenCtxDestroy", green)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	delete(f.greens, green)
	f.endContext(c)
	return cuda.Success
}

func (f *Fake) fromGreen(h *uintptr, green uintptr) cuda.Result {
	c, r := f.enterGreen("CtxFromGreenCtx", green)
	defer f.mu.Unlock()
	if r == cuda.Success {
		*h = c.handle
	}
	return r
}

func (f *Fake) greenStream(h *uintptr, green uintptr, flags uint32, _ int32) cuda.Result {
	c, r := f.enterGreen("GreenCtxStreamCreate", green)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	return f.addStream(h, c, flags)
}

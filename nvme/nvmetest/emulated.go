// Package nvmetest is the conformance suite of controllers and of the driver that starts them: the same tests for the
// virtual controller, in process, and for controllers of hardware or of a machine emulator, through VFIO. Each vouches
// for the other.
package nvmetest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// registerBytes is enough for the doorbells of a thousand queues.
const registerBytes = 16 << 10

// Emulated is the transport to a virtual controller in this process. It finds memory as an IOMMU does: what is not
// mapped is not reached.
type Emulated struct {
	Controller *emu.Controller

	gone      atomic.Bool
	requested chan struct{}
	faults    atomic.Pointer[Faults]

	mu      sync.Mutex
	next    uint64
	regions atomic.Pointer[[]emu.Region] // never changed in place
	closed  bool
	bells   atomic.Pointer[doorbells] // nil: they cannot be mapped
}

// iovaBase is where the controller's address space begins: not zero, so that forgotten addresses are noticed.
const iovaBase = 1 << 32

// NewEmulated makes the transport. It owns the controller from then on.
func NewEmulated(c *emu.Controller) *Emulated {
	t := &Emulated{Controller: c, next: iovaBase, requested: make(chan struct{})}
	t.regions.Store(&[]emu.Region{})
	c.SetHostMemory(t)
	return t
}

// Translate finds memory for the controller.
func (t *Emulated) Translate(iova uint64, n uint32) []byte {
	for _, r := range *t.regions.Load() {
		if b := r.Translate(iova, n); b != nil {
			return b
		}
	}
	return nil
}

// Name is an address that no PCI device has.
func (t *Emulated) Name() string { return "emulated" }

// Load32 reads a register.
func (t *Emulated) Load32(off uint32) uint32 {
	if t.gone.Load() || off >= registerBytes {
		return 0xffffffff
	}
	if f := t.faults.Load(); f != nil && f.Load != nil {
		if v, ok := f.Load(off); ok {
			return v
		}
	}
	return uint32(t.Controller.ReadRegister(off, 4))
}

// Store32 writes a register. What was rung before comes first, as writes do on a bus.
func (t *Emulated) Store32(off, v uint32) {
	if b := t.bells.Load(); b != nil {
		b.forward(t)
	}
	t.store(off, v)
}

func (t *Emulated) store(off, v uint32) {
	if t.gone.Load() || off >= registerBytes {
		return
	}
	if f := t.faults.Load(); f != nil && f.Store != nil && f.Store(off, v) {
		return
	}
	t.Controller.WriteRegister(off, uint64(v), 4)
}

// RegisterBytes is the size of the register space.
func (t *Emulated) RegisterBytes() uint32 { return registerBytes }

var errMap = errors.New("emulated: map")

// Map gives memory an address. A page between two regions stays unmapped.
func (t *Emulated) Map(b []byte) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(b) == 0 || (len(b)|int(uintptr(unsafe.Pointer(&b[0]))))%emu.PageBytes != 0 {
		return 0, fmt.Errorf("%w: %d bytes", errMap, len(b))
	}
	iova := t.next
	t.next += uint64(len(b)) + emu.PageBytes
	t.add(b, iova)
	return iova, nil
}

// MapAt gives memory an address of the caller's choice.
func (t *Emulated) MapAt(b []byte, iova uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(b) == 0 || (len(b)|int(uintptr(unsafe.Pointer(&b[0]))))%emu.PageBytes != 0 {
		return fmt.Errorf("%w: %d bytes", errMap, len(b))
	}
	for _, r := range *t.regions.Load() {
		if iova < r.Base+uint64(len(r.Bytes)) && r.Base < iova+uint64(len(b)) {
			return fmt.Errorf("emulated: %w: %#x", vfio.ErrTaken, iova)
		}
	}
	t.add(b, iova)
	return nil
}

// add maps memory at an address. mu is held.
func (t *Emulated) add(b []byte, iova uint64) {
	regions := append(slices.Clone(*t.regions.Load()), emu.Region{Base: iova, Bytes: b})
	t.regions.Store(&regions)
}

// Unmap takes it away.
func (t *Emulated) Unmap(b []byte, iova uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	regions := slices.Clone(*t.regions.Load())
	i := slices.IndexFunc(regions, func(r emu.Region) bool { return r.Base == iova && len(r.Bytes) == len(b) })
	switch {
	case i >= 0:
		regions = slices.Delete(regions, i, i+1)
		t.regions.Store(&regions)
	case !t.closed:
		return fmt.Errorf("%w: %#x was not mapped", errMap, iova)
	}
	return nil
}

// Mapped is how many regions are mapped.
func (t *Emulated) Mapped() int { return len(*t.regions.Load()) }

// Gone says whether Remove was called.
func (t *Emulated) Gone() bool { return t.gone.Load() }

// Remove takes the controller away by surprise: registers read as all ones, and nothing touches memory any more.
func (t *Emulated) Remove() {
	t.gone.Store(true)
	t.Controller.Close()
}

// Faults are what tests do to the way to the controller. Each may be nil.
type Faults struct {
	Load  func(off uint32) (v uint32, instead bool)
	Store func(off, v uint32) (swallowed bool)
	Reset func() error // instead of a reset from outside, if it is an error
}

// SetFaults installs them; nil removes them.
func (t *Emulated) SetFaults(f *Faults) { t.faults.Store(f) }

// Reset resets the function.
func (t *Emulated) Reset() error {
	if f := t.faults.Load(); f != nil && f.Reset != nil {
		if err := f.Reset(); err != nil {
			return err
		}
	}
	t.Controller.WriteRegister(nvme.RegCC, 0, 4)
	return nil
}

// Requested is closed by Request.
func (t *Emulated) Requested() <-chan struct{} { return t.requested }

// Request is the system's wish to have the controller back.
func (t *Emulated) Request() { close(t.requested) }

// Doorbells says where they can be mapped from: nowhere, unless ShareDoorbells was called.
func (t *Emulated) Doorbells() (fd int, offset int64, ok bool) {
	b := t.bells.Load()
	if b == nil {
		return -1, 0, false
	}
	return b.fd, 0, true
}

// Close ends the controller; it reaches nothing any more.
func (t *Emulated) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return os.ErrClosed
	}
	t.closed = true
	t.bells.Load().close()
	t.Controller.Close()
	t.regions.Store(&[]emu.Region{})
	t.gone.Store(true)
	return nil
}

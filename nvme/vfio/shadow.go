package vfio

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

// doorbellBuffer is the memory of a controller's doorbell buffer: a page of shadow doorbells and one of event indexes.
// It is a memfd, so that whoever has queue pairs of the controller can map it.
type doorbellBuffer struct {
	fd     int
	memory *Buffer
}

// newDoorbellBuffer makes the memory, whole pages of the system.
func (c *Controller) newDoorbellBuffer() (*doorbellBuffer, error) {
	page := os.Getpagesize()
	size := (2*nvme.ShadowBytes + page - 1) &^ (page - 1)
	fd, err := unix.MemfdCreate("nvme doorbells", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, c.errorf("doorbell buffer: %w", err)
	}
	var b []byte
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		b, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, c.errorf("doorbell buffer: %w", err)
	}
	m, err := c.MapMemory(b)
	if err != nil {
		_ = unix.Munmap(b)
		_ = unix.Close(fd)
		return nil, err
	}
	m.ours = true // like what Alloc maps
	return &doorbellBuffer{fd, m}, nil
}

func (d *doorbellBuffer) free() error {
	if d == nil {
		return nil
	}
	return errors.Join(d.memory.Free(), unix.Close(d.fd))
}

// startBuffer tells a controller that was just started, and has no I/O queue yet, of its doorbell buffer, if it takes
// one. Without it all doorbells are registers. The caller holds recovery.
func (c *Controller) startBuffer() error {
	c.shadowed.Store(false)
	id, last := c.Identity(), c.DoorbellBytes()
	if c.o.NoDoorbellBuffer || id.OACS&nvme.OACSDoorbellBuffer == 0 || last > nvme.ShadowBytes {
		return nil
	}
	if c.buffer == nil {
		b, err := c.newDoorbellBuffer()
		if err != nil {
			return err
		}
		c.buffer = b
	}
	clear(c.buffer.memory.Bytes)
	var e nvme.SQE
	nvme.BuildDoorbellBuffer(&e, 0, c.buffer.memory.IOVA, c.buffer.memory.IOVA+nvme.ShadowBytes)
	_, err := c.quick(e)
	var st nvme.Status
	if errors.As(err, &st) {
		return nil // it does without
	}
	if err != nil {
		return c.errorf("doorbell buffer: %w", err)
	}
	c.shadowed.Store(true)
	return nil
}

// shadow is the doorbell at an offset of the registers as it lies in the doorbell buffer.
func (c *Controller) shadow(offset uint32) nvme.Shadow {
	at := offset - nvme.RegDoorbells
	word := func(at uint32) *uint32 { return (*uint32)(unsafe.Pointer(&c.buffer.memory.Bytes[at])) }
	return nvme.Shadow{Doorbell: word(at), Event: word(at + nvme.ShadowBytes)}
}

// ring writes the doorbell of a pair: to its shadow, where there is one, and to the register if it has to be.
func (c *Controller) ring(p *Pair, offset, value uint32) {
	if p.ID != 0 && c.shadowed.Load() && !c.shadow(offset).Advance(value) {
		c.saved.Add(1)
		return
	}
	c.rung.Add(1)
	c.t.Store32(offset, value)
}

// clearShadows makes the doorbells of a pair those of empty queues, before the controller looks at them.
func (c *Controller) clearShadows(p *Pair) {
	if p.ID == 0 || !c.shadowed.Load() {
		return
	}
	for _, offset := range []uint32{p.SQTail, p.CQHead} {
		s := c.shadow(offset)
		*s.Doorbell, *s.Event = 0, 0
	}
}

// DoorbellBuffer is the descriptor of the memory in which the controller looks for the doorbells of its queues: a page
// of them, laid out as the registers are from nvme.RegDoorbells on, and a page of event indexes. Whoever rings a pair's
// doorbells does it as nvme.Shadow says. false: there is none, and doorbells are registers alone.
func (c *Controller) DoorbellBuffer() (fd int, ok bool) {
	if !c.shadowed.Load() {
		return -1, false
	}
	return c.buffer.fd, true
}

// Rings counts the writes of doorbell registers by this process, and those that the doorbell buffer has saved.
func (c *Controller) Rings() (written, saved uint64) { return c.rung.Load(), c.saved.Load() }

package emu

import (
	"sync/atomic"

	"tuttifs/nvme"
)

// registers are what a driver sees in the first BAR, guarded by Controller.mu.
type registers struct {
	cap      nvme.CAP
	cc       nvme.CC
	csts     uint32
	intms    uint32
	aqa      uint32
	asq, acq uint64
}

// readyTimeout is CAP.TO in units of 500 ms: how long a driver has to wait for a change of CSTS.RDY at most.
const readyTimeout = 20

func (r *registers) reset(c *Controller) {
	*r = registers{cap: nvme.MakeCAP(c.cfg.QueueEntries, true, readyTimeout, nvme.CSSNVM)}
}

// SetHostMemory is where admin queues and admin data live (the driver's own address space). It takes effect when the
// controller is enabled next.
func (c *Controller) SetHostMemory(m Memory) {
	c.mu.Lock()
	c.host = m
	c.mu.Unlock()
}

// ReadRegister is a read of the BAR: offsets of Base 2.0 section 3.1.3. Accesses are 4 bytes, or 8 at a multiple of 8;
// any other access and any offset without a register read as zero. Doorbells read as zero.
func (c *Controller) ReadRegister(off uint32, size int) uint64 {
	if !accessOK(off, size) {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	v := uint64(c.regs.load(off))
	if size == 8 {
		v |= uint64(c.regs.load(off+4)) << 32
	}
	return v
}

func accessOK(off uint32, size int) bool {
	return size == 4 && off%4 == 0 || size == 8 && off%8 == 0
}

func (r *registers) load(off uint32) uint32 {
	switch off {
	case nvme.RegCAP:
		return uint32(r.cap)
	case nvme.RegCAP + 4:
		return uint32(r.cap >> 32)
	case nvme.RegVS:
		return nvme.Version20
	case nvme.RegINTMS, nvme.RegINTMC:
		return r.intms
	case nvme.RegCC:
		return uint32(r.cc)
	case nvme.RegCSTS:
		return r.csts
	case nvme.RegAQA:
		return r.aqa
	case nvme.RegASQ:
		return uint32(r.asq)
	case nvme.RegASQ + 4:
		return uint32(r.asq >> 32)
	case nvme.RegACQ:
		return uint32(r.acq)
	case nvme.RegACQ + 4:
		return uint32(r.acq >> 32)
	}
	return 0
}

// WriteRegister is a write to the BAR; doorbells are from 0x1000 with a stride of 4. Accesses that ReadRegister would
// not answer, and writes to read-only registers, are ignored.
func (c *Controller) WriteRegister(off uint32, v uint64, size int) {
	if !accessOK(off, size) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if off >= nvme.RegDoorbells {
		if size == 4 && c.admin != nil {
			c.admin.ring((off-nvme.RegDoorbells)/4, uint32(v))
		}
		return
	}
	c.store(off, uint32(v))
	if size == 8 {
		c.store(off+4, uint32(v>>32))
	}
}

func (c *Controller) store(off, v uint32) {
	r := &c.regs
	switch off {
	case nvme.RegINTMS:
		r.intms |= v
	case nvme.RegINTMC:
		r.intms &^= v
	case nvme.RegCC:
		c.configure(nvme.CC(v))
	case nvme.RegAQA:
		r.aqa = v & 0x0fff0fff
	case nvme.RegASQ:
		r.asq = r.asq&^0xffffffff | uint64(v&^0xfff)
	case nvme.RegASQ + 4:
		r.asq = r.asq&0xffffffff | uint64(v)<<32
	case nvme.RegACQ:
		r.acq = r.acq&^0xffffffff | uint64(v&^0xfff)
	case nvme.RegACQ + 4:
		r.acq = r.acq&0xffffffff | uint64(v)<<32
	}
}

// configure follows a write of CC: enable, reset, shutdown.
func (c *Controller) configure(cc nvme.CC) {
	r := &c.regs
	old := r.cc
	r.cc = cc
	switch {
	case cc.Enabled() && !old.Enabled():
		if c.enable() {
			r.csts = nvme.CSTSReady
		} else {
			r.csts = nvme.CSTSFatal
		}
	case !cc.Enabled() && old.Enabled():
		c.disable()
		r.csts &^= nvme.CSTSReady | nvme.CSTSFatal
	}
	if cc.ShutdownNotification() != 0 && old.ShutdownNotification() == 0 {
		// What the host has completed is made durable; whether that fails, the host cannot be told any more but by CFS.
		if c.drive.Flush() != nil {
			r.csts |= nvme.CSTSFatal
		}
		r.csts = r.csts&^nvme.CSTSShutdownMask | nvme.CSTSShutdownComplete
	}
	if cc.ShutdownNotification() == 0 && !cc.Enabled() {
		r.csts &^= nvme.CSTSShutdownMask
	}
}

// enable starts the admin queue; it is false when the configuration is one that this controller does not have.
func (c *Controller) enable() bool {
	r := &c.regs
	sqEntries, cqEntries := nvme.AQAEntries(r.aqa)
	cc := r.cc
	switch {
	case c.host == nil,
		cc.CommandSet() != 0, cc.PageShift() != 12, cc.Arbitration() != 0,
		sqEntries < 2, cqEntries < 2:
		return false
	}
	sq, ok1 := mapEntries[nvme.SQE](c.host, r.asq, sqEntries)
	cq, ok2 := mapEntries[nvme.CQE](c.host, r.acq, cqEntries)
	if !ok1 || !ok2 {
		return false
	}
	a, err := newAdmin(c, sq, cq)
	if err != nil {
		return false
	}
	c.admin = a
	go a.poller.Run()
	return true
}

// disable is a controller reset: all queues that came through the admin queue are gone when it returns.
func (c *Controller) disable() {
	if c.admin == nil {
		return
	}
	c.admin.poller.Stop()
	c.admin = nil
	c.writeThrough.Store(false)
}

// Close stops the admin queue and the queues made through it, if the controller is enabled. Attached queues are their
// pollers' and are quiesced by their owner.
func (c *Controller) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.disable()
	c.regs.reset(c)
}

// ring is a doorbell write: index 2n is the tail of submission queue n, 2n+1 the head of completion queue n.
func (a *admin) ring(index, v uint32) {
	a.poller.mu.Lock()
	known := int(index) < len(a.bells)
	if known {
		if id := uint16(index / 2); index%2 == 0 {
			known = a.sqs[id] != nil
		} else {
			known = a.cqs[id] != nil
		}
	}
	if known {
		atomic.StoreUint32(&a.bells[index], v)
	} else {
		a.event(nvme.AsyncInvalidDoorbell)
	}
	a.poller.mu.Unlock()
	a.poller.kick()
}

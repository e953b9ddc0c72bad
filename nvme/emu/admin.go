package emu

import (
	"sync/atomic"
	"unsafe"

	"tuttifs/nvme"
)

// Limits of the admin command set.
const (
	asyncMax  = 4  // parked Asynchronous Event Requests
	abortsMax = 4  // concurrent Aborts; they complete at once, so that the limit is never met
	errorsMax = 64 // entries of the error log
)

// admin is the admin queue and all that was made through it. It lives from CC.EN to reset and is guarded by the lock of
// its poller, which serves the admin queue and the driver's I/O queues.
type admin struct {
	c        *Controller
	mem      Memory
	poller   *Poller
	words    [2]uint32 // armed, wake of the poller
	bells    []uint32
	sqs      map[uint16]*Queue
	cqs      map[uint16]*completionQueue
	features features
	shadows  []byte // page of shadow doorbells; nil without a doorbell buffer
	events   []byte // page of event indexes
	backend  Backend
	reason   string

	parked  []*command  // Asynchronous Event Requests
	pending uint32      // events by information bit, not reported yet
	masked  bool        // an error event was reported and its log not read since
	deletes []deleteJob // Delete I/O Submission Queue commands that wait for the queue to drain
	page    [nvme.IdentifyBytes]byte
}

type deleteJob struct {
	command *command
	queue   *Queue
}

// mapEntries finds a contiguous queue in host memory.
func mapEntries[T nvme.SQE | nvme.CQE](m Memory, addr uint64, entries uint32) ([]T, bool) {
	var e T
	b := translate(m, addr, entries*uint32(unsafe.Sizeof(e)))
	if b == nil || addr%PageBytes != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(b)))%8 != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), entries), true
}

func newAdmin(c *Controller, sq []nvme.SQE, cq []nvme.CQE) (*admin, error) {
	a := &admin{
		c: c, mem: c.host, bells: make([]uint32, 2*(int(c.cfg.Queues)+1)),
		sqs: map[uint16]*Queue{}, cqs: map[uint16]*completionQueue{}, parked: make([]*command, 0, asyncMax),
	}
	a.features.reset(c)
	p, err := NewPoller(PollerConfig{Armed: &a.words[0], Wake: &a.words[1]})
	if err != nil {
		return nil, err
	}
	a.poller = p
	a.backend, a.reason = p.pick(c)
	p.extra = a.step
	a.cqs[0] = &completionQueue{entries: cq, headBell: bell{value: &a.bells[1]}, phase: 1}
	q := newQueue(c, 0, sq, &a.bells[0], a.cqs[0], a.mem, nil)
	q.admin, q.onKill = a, a.die
	q.order.slots = nil // a parked command must hold up nobody
	a.sqs[0] = q
	p.add(q, Inline, "admin")
	return a, nil
}

// die is the end of the admin queue by a bad doorbell: only a reset helps.
func (a *admin) die() {
	// The register's lock comes before the poller's, which is held here.
	go func() {
		a.c.mu.Lock()
		if a.c.admin == a {
			a.c.regs.csts |= nvme.CSTSFatal
		}
		a.c.mu.Unlock()
	}()
}

// accept executes one admin command, or parks it.
func (a *admin) accept(c *command) {
	e := &c.sqe
	st := nvme.InvalidOpcode | dnr
	parked := false
	if e.Flags&^uint8(nvme.FlagPSDTMask) != 0 || e.Flags&nvme.FlagPSDTMask != 0 {
		st = nvme.InvalidField | dnr // neither fused commands nor, for admin commands of this transport, SGLs
	} else {
		switch e.Opcode {
		case nvme.AdminIdentify:
			st = a.identify(c)
		case nvme.AdminGetLogPage:
			st = a.getLog(c)
		case nvme.AdminSetFeatures:
			st = a.setFeatures(c)
		case nvme.AdminGetFeatures:
			st = a.getFeatures(c)
		case nvme.AdminCreateCQ:
			st = a.createCQ(e)
		case nvme.AdminCreateSQ:
			st = a.createSQ(e)
		case nvme.AdminDeleteCQ:
			st = a.deleteCQ(e)
		case nvme.AdminDeleteSQ:
			st, parked = a.deleteSQ(c)
		case nvme.AdminAbort:
			st = a.abort(c)
		case nvme.AdminDoorbellBuf:
			st = a.setShadows(e)
		case nvme.AdminFormatNVM:
			st = a.format(e)
		case nvme.AdminAsyncEvent:
			st, parked = a.asyncEvent(c)
		}
	}
	if !parked {
		a.complete(c, st)
	}
}

func (a *admin) complete(c *command, st nvme.Status) {
	c.status = st
	if !st.OK() {
		c.queue.stats.Errors++
		a.c.log.add(0, &c.sqe, st)
	}
	c.moved = true
	c.queue.ready1(c)
}

// step finishes what waited for other queues.
func (a *admin) step() int {
	n := 0
	for i := 0; i < len(a.deletes); {
		d := a.deletes[i]
		if !a.poller.drain(d.queue) {
			i++
			continue
		}
		delete(a.sqs, d.queue.id)
		d.queue.cq.queues--
		a.deletes = append(a.deletes[:i], a.deletes[i+1:]...)
		a.complete(d.command, nvme.Success)
		n++
	}
	if n += a.report(); n > 0 {
		a.sqs[0].serve(a.poller)
	}
	return n
}

// send puts up to n bytes of data into the command's buffer.
func (a *admin) send(c *command, data []byte) nvme.Status {
	if st := c.data.parse(a.mem, &c.sqe, uint32(len(data)), false, true); !st.OK() {
		return st
	}
	c.scatter(data)
	return nvme.Success
}

// queueID checks a queue identifier of Create: in range and free.
func (a *admin) queueID(id uint32, taken bool) nvme.Status {
	if id == 0 || id > uint32(a.features.queues) || taken {
		return nvme.QueueIDInvalid | dnr
	}
	return nvme.Success
}

// queueShape checks what Create I/O Submission and Completion Queue have in common.
func (a *admin) queueShape(e *nvme.SQE) nvme.Status {
	entries := e.CDW10>>16 + 1
	switch {
	case entries < 2 || entries > a.c.cfg.QueueEntries:
		return nvme.QueueSizeInvalid | dnr
	case e.CDW11&nvme.QueueContiguous == 0:
		return nvme.InvalidField | dnr // CAP.CQR
	case e.DPTR[0]%PageBytes != 0:
		return nvme.PRPOffsetInvalid | dnr
	}
	return nvme.Success
}

func (a *admin) createCQ(e *nvme.SQE) nvme.Status {
	id := uint16(e.CDW10)
	if st := a.queueID(uint32(id), a.cqs[id] != nil); !st.OK() {
		return st
	}
	if st := a.queueShape(e); !st.OK() {
		return st
	}
	if e.CDW11&0xfffc != 0 {
		return nvme.InvalidField | dnr
	}
	if vector := e.CDW11 >> 16; e.CDW11&nvme.QueueInterrupts != 0 && vector > uint32(a.c.cfg.Queues) {
		return nvme.VectorInvalid | dnr
	}
	entries, ok := mapEntries[nvme.CQE](a.mem, e.DPTR[0], e.CDW10>>16+1)
	if !ok {
		return nvme.DataTransferError | dnr
	}
	head := &a.bells[2*int(id)+1]
	atomic.StoreUint32(head, 0)
	cq := &completionQueue{id: id, entries: entries, headBell: bell{value: head}, phase: 1}
	a.shadowHead(cq)
	a.cqs[id] = cq
	a.features.created = true
	return nvme.Success
}

func (a *admin) createSQ(e *nvme.SQE) nvme.Status {
	id, cqid := uint16(e.CDW10), uint16(e.CDW11>>16)
	if st := a.queueID(uint32(id), a.sqs[id] != nil); !st.OK() {
		return st
	}
	if cqid == 0 || cqid > a.features.queues {
		return nvme.QueueIDInvalid | dnr
	}
	cq := a.cqs[cqid]
	if cq == nil {
		return nvme.CQInvalid | dnr
	}
	if st := a.queueShape(e); !st.OK() {
		return st
	}
	if e.CDW11&0xfff8 != 0 || e.CDW12 != 0 { // reserved bits, NVM set
		return nvme.InvalidField | dnr
	}
	entries, ok := mapEntries[nvme.SQE](a.mem, e.DPTR[0], e.CDW10>>16+1)
	if !ok {
		return nvme.DataTransferError | dnr
	}
	tail := &a.bells[2*int(id)]
	atomic.StoreUint32(tail, 0)
	q := newQueue(a.c, id, entries, tail, cq, a.mem, nil)
	a.shadowTail(q)
	q.onKill = func() { a.event(nvme.AsyncInvalidValue) }
	a.sqs[id] = q
	a.poller.add(q, a.backend, a.reason)
	a.features.created = true
	return nvme.Success
}

func (a *admin) deleteCQ(e *nvme.SQE) nvme.Status {
	id := uint16(e.CDW10)
	cq := a.cqs[id]
	switch {
	case id == 0 || cq == nil:
		return nvme.QueueIDInvalid | dnr
	case cq.queues > 0:
		return nvme.QueueDeletion | dnr
	}
	delete(a.cqs, id)
	return nvme.Success
}

func (a *admin) deleteSQ(c *command) (nvme.Status, bool) {
	id := uint16(c.sqe.CDW10)
	q := a.sqs[id]
	if id == 0 || q == nil || q.draining {
		return nvme.QueueIDInvalid | dnr, false
	}
	q.draining = true
	a.deletes = append(a.deletes, deleteJob{c, q})
	return nvme.Success, true
}

// abort ends a command that has not begun. Bit 0 of the result is 0 if it did; most commands are too fast for that.
func (a *admin) abort(c *command) nvme.Status {
	c.result = 1
	q := a.sqs[uint16(c.sqe.CDW10)]
	if q == nil {
		return nvme.InvalidField | dnr
	}
	cid := uint16(c.sqe.CDW10 >> 16)
	for i, v := range a.poller.timers {
		if v.queue == q && v.sqe.CID == cid && !v.moved && !v.conflict {
			a.poller.timers.remove(i)
			v.status = nvme.AbortRequested
			a.poller.end(v)
			c.result = 0
			break
		}
	}
	for i, v := range a.parked {
		if q.id == 0 && v.sqe.CID == cid {
			a.parked = append(a.parked[:i], a.parked[i+1:]...)
			a.complete(v, nvme.AbortRequested)
			c.result = 0
			break
		}
	}
	return nvme.Success
}

func (a *admin) asyncEvent(c *command) (nvme.Status, bool) {
	if len(a.parked) == asyncMax {
		return nvme.AsyncEventLimit | dnr, false
	}
	a.parked = append(a.parked, c)
	return nvme.Success, true
}

// event notes an error event; it is reported when a request is parked and the last one was acknowledged by reading the
// error log.
func (a *admin) event(info uint32) { a.pending |= 1 << info }

func (a *admin) report() int {
	if a.pending == 0 || a.masked || len(a.parked) == 0 {
		return 0
	}
	info := uint32(nvme.AsyncInvalidDoorbell)
	if a.pending&(1<<info) == 0 {
		info = nvme.AsyncInvalidValue
	}
	a.pending &^= 1 << info
	a.masked = true
	c := a.parked[0]
	a.parked = append(a.parked[:0], a.parked[1:]...)
	c.result = uint64(nvme.AsyncTypeError | info<<8 | nvme.LogError<<16)
	a.complete(c, nvme.Success)
	return 1
}

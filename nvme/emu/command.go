package emu

import (
	"time"

	"tuttifs/nvme"
)

// kind is what a decoded command does to the drive.
type kind uint8

const (
	doFlush kind = iota
	doRead
	doWrite
	doZeroes
	doDiscard
	doManage // the placement of data; done when it is decoded
)

// command is one fetched command. It lives in its queue's table and never moves; exactly one of the queue's free list,
// a backlog, the timers, a backend and the queue's ready list holds it.
type command struct {
	queue *Queue
	next  *command // in whichever intrusive list holds it

	sqe      nvme.SQE // the private copy: nothing is read from shared memory twice
	kind     kind
	fua      bool
	status   nvme.Status
	result   uint64 // DW0 and DW1 of the completion
	off      int64
	n        uint32 // bytes of data
	data     segments
	grants   []Access // what the authority granted, to be completed exactly once
	ranges   []byteRange
	fault    Fault
	due      time.Time // of what is in the timers, and of what is paced
	paced    bool      // a modelled drive says when it completes
	moved    bool      // the transfer is over; only the completion is waited for
	done     bool      // in-order queues: may be published
	lost     bool      // in-order queues: never published
	refused  bool      // by the kernel, or by memory; goes through the drive's own calls
	conflict bool      // its id belongs to another command
	running  bool      // it counts in the drive's phase
	large    bool      // its lists are longer than a command may keep

	progress uint32 // bytes that io_uring has transferred so far
	first    int    // first segment that is not done yet
	slot     uint32 // in the ring's table
}

// byteRange is one range of a Dataset Management or Write Zeroes command.
type byteRange struct{ off, n int64 }

func (c *command) reset() {
	c.next, c.status, c.fua, c.fault = nil, nvme.Success, false, Fault{}
	c.grants, c.ranges = c.grants[:0], c.ranges[:0]
	c.moved, c.paced, c.done, c.lost, c.conflict, c.refused = false, false, false, false, false, false
	c.progress, c.first, c.off, c.n, c.result = 0, 0, 0, 0, 0
	c.data.reset()
}

// held says that a fault keeps the command from beginning yet.
func (c *command) held() bool { return c.fault.Hold != nil && !c.fault.Hold() }

// keepMax is how many entries each list of a command may have that it keeps for the next one. Longer ones, which take
// kilobytes, are for as long as the transfer lasts, and for one in largeShare of a queue's commands at a time: an
// executor chooses their lengths, and need not even hold a lease.
const (
	keepMax    = 32
	largeShare = 16
)

// weigh notes whether a command that was decoded is a large one.
func (c *command) weigh() {
	if cap(c.data.list) > keepMax || cap(c.ranges) > keepMax {
		c.large = true
		c.queue.large++
	}
}

// trim gives long lists back when the transfer is over.
func (c *command) trim() {
	if c.large {
		c.large = false
		c.queue.large--
	}
	if cap(c.data.list) > keepMax {
		c.data.list = nil
	}
	if cap(c.ranges) > keepMax {
		c.ranges = nil
	}
	if cap(c.grants) > keepMax {
		c.grants = nil
	}
}

// decode checks everything that the command itself says and translates its data pointer. It moves nothing.
func (c *command) decode() nvme.Status {
	e, ct := &c.sqe, c.queue.controller
	switch e.Opcode {
	case nvme.IOFlush, nvme.IOWrite, nvme.IORead, nvme.IOWriteZeroes, nvme.IODSM:
	case nvme.IOManageReceive, nvme.IOManageSend:
		if ct.flash == nil {
			return nvme.InvalidOpcode | dnr
		}
	default:
		return nvme.InvalidOpcode | dnr
	}
	if e.Flags&(nvme.FlagFuseMask|nvme.FlagReservedMask) != 0 {
		return nvme.InvalidField | dnr
	}
	if e.NSID != 1 && (e.Opcode != nvme.IOFlush || e.NSID != nvme.NSIDBroadcast) {
		return nvme.InvalidNamespace | dnr
	}
	changes := e.Opcode != nvme.IORead && e.Opcode != nvme.IOFlush && e.Opcode != nvme.IOManageReceive
	if ct.cfg.ReadOnly && changes {
		return nvme.WriteProtected | dnr
	}
	switch e.Opcode {
	case nvme.IORead:
		c.kind = doRead
		return c.decodeRW()
	case nvme.IOWrite:
		c.kind = doWrite
		return c.decodeRW()
	case nvme.IOWriteZeroes:
		c.kind = doZeroes
		return c.decodeZeroes()
	case nvme.IODSM:
		c.kind = doDiscard
		return c.decodeDSM()
	case nvme.IOManageReceive, nvme.IOManageSend:
		c.kind = doManage
		return c.manage()
	}
	c.kind = doFlush
	return nvme.Success
}

// Bits of CDW12 that Read and Write leave reserved, or whose feature (directives) is not there. Protection information
// bits mean nothing on a namespace without metadata and are ignored, as the specification has it.
const (
	rwReserved = uint32(nvme.RWDirective) | 1<<25 | 0xf<<16
	wzReserved = uint32(nvme.RWDirective) | 0xf<<16
)

// place checks blocks from lba against the namespace and, where there is an authority, against its units.
func (c *command) place(lba, blocks uint64) (byteRange, nvme.Status) {
	shift := c.queue.controller.shift()
	size := uint64(c.queue.controller.drive.Size()) >> shift
	if lba >= size || blocks > size-lba {
		return byteRange{}, nvme.LBAOutOfRange | dnr
	}
	r := byteRange{int64(lba << shift), int64(blocks << shift)}
	if c.queue.authority != nil && (r.off|r.n)%PageBytes != 0 {
		return byteRange{}, nvme.InvalidField | dnr
	}
	return r, nvme.Success
}

func (c *command) decodeRW() nvme.Status {
	e, ct := &c.sqe, c.queue.controller
	reserved := rwReserved
	if kind, _ := e.Directive(); c.kind == doWrite && ct.flash != nil && kind == nvme.DirectivePlacement {
		reserved &^= nvme.RWDirective
	}
	if e.CDW12&reserved != 0 {
		return nvme.InvalidField | dnr
	}
	blocks := uint64(e.Blocks())
	if blocks<<ct.shift() > uint64(ct.dataMax) {
		return nvme.InvalidField | dnr
	}
	r, st := c.place(e.LBA(), blocks)
	if !st.OK() {
		return st
	}
	c.off, c.n = r.off, uint32(r.n)
	c.fua = c.kind == doWrite && (e.CDW12&nvme.RWForceUnit != 0 || ct.writeThrough.Load())
	return c.data.parse(c.queue.dma, e, c.n, ct.cfg.SGL, c.kind == doRead)
}

func (c *command) decodeZeroes() nvme.Status {
	e := &c.sqe
	if e.CDW12&wzReserved != 0 || e.Flags&nvme.FlagPSDTMask != 0 {
		return nvme.InvalidField | dnr
	}
	r, st := c.place(e.LBA(), uint64(e.Blocks()))
	if !st.OK() {
		return st
	}
	c.fua = e.CDW12&nvme.RWForceUnit != 0 || c.queue.controller.writeThrough.Load()
	c.ranges = append(c.ranges, r)
	return nvme.Success
}

// decodeDSM copies the ranges before it believes them. Attributes other than deallocation are hints that need no
// action.
func (c *command) decodeDSM() nvme.Status {
	e, ct := &c.sqe, c.queue.controller
	if e.CDW10&^0xff != 0 || e.CDW11&^7 != 0 {
		return nvme.InvalidField | dnr
	}
	n := e.CDW10&0xff + 1
	most := &ct.cfg.DSM
	if most.Ranges != 0 && n > uint32(most.Ranges) {
		return nvme.SizeLimit | dnr
	}
	if st := c.data.parse(c.queue.dma, e, n*nvme.DSMRangeBytes, ct.cfg.SGL, false); !st.OK() {
		return st
	}
	var private [nvme.DSMRangesMax * nvme.DSMRangeBytes]byte
	b := private[:0]
	for i := range c.data.list {
		b = append(b, c.data.bytesAt(i)...)
	}
	if e.CDW11&nvme.DSMDeallocate == 0 {
		return nvme.Success
	}
	for sum := uint64(0); len(b) >= nvme.DSMRangeBytes; b = b[nvme.DSMRangeBytes:] {
		blocks, lba := uint64(le32(b[4:])), le64(b[8:])
		sum += blocks
		if most.RangeBlocks != 0 && blocks > uint64(most.RangeBlocks) || most.Blocks != 0 && sum > most.Blocks {
			return nvme.SizeLimit | dnr
		}
		if blocks == 0 {
			continue
		}
		r, st := c.place(lba, blocks)
		if !st.OK() {
			return st
		}
		c.ranges = append(c.ranges, r)
	}
	return nvme.Success
}

// authorize asks for every range the command touches. All or nothing: on a refusal the caller gives the grants back.
func (c *command) authorize() nvme.Status {
	q := c.queue
	if q.authority == nil || c.kind == doFlush {
		return nvme.Success
	}
	if c.kind == doRead || c.kind == doWrite {
		return c.ask(byteRange{c.off, int64(c.n)})
	}
	for _, r := range c.ranges {
		if st := c.ask(r); !st.OK() {
			return st
		}
	}
	return nvme.Success
}

func (c *command) ask(r byteRange) nvme.Status {
	q := c.queue
	a, ok := q.authority.Authorize(c.kind != doRead, q.controller.cfg.Index,
		uint64(r.off)/PageBytes, uint32(r.n/PageBytes))
	if !ok {
		return nvme.AccessDenied | dnr
	}
	c.grants = append(c.grants, a)
	return nvme.Success
}

// conclude gives the grants back; once, whatever the outcome.
func (c *command) conclude() {
	ok := c.status.OK() && c.kind != doDiscard
	for _, a := range c.grants {
		c.queue.authority.Complete(a, ok)
	}
	clear(c.grants)
	c.grants = c.grants[:0]
}

package emu

import (
	"errors"
	"fmt"
	"structs"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// io_uring by raw system calls (io_uring_setup(2), io_uring_enter(2)): one ring a poller, submission and completion by
// the polling thread only. The kernel's ABI as in linux/io_uring.h.

// ringEntries is how many transfers one poller keeps in the kernel; what comes on top waits in a backlog.
const ringEntries = 1024

const (
	opReadv  = 1
	opWritev = 2
	opRead   = 22
	opWrite  = 23

	setupClamp = 1 << 4

	enterGetEvents = 1 << 0
	enterExtArg    = 1 << 3

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1
	featExtArg     = 1 << 8
	featNeeded     = featSingleMmap | featNoDrop | featExtArg

	offRings = 0
	offSQEs  = 0x10000000
)

type ringSQE struct {
	_        structs.HostLayout
	opcode   uint8
	flags    uint8
	ioprio   uint16
	fd       int32
	off      uint64
	addr     uint64
	len      uint32
	rwFlags  uint32
	userData uint64
	bufIndex uint16
	person   uint16
	spliceFd int32
	_        [2]uint64
}

type ringCQE struct {
	_        structs.HostLayout
	userData uint64
	res      int32
	flags    uint32
}

type ringSQOffsets struct {
	head, tail, mask, entries, flags, dropped, array, _ uint32
	_                                                   uint64
}

type ringCQOffsets struct {
	head, tail, mask, entries, overflow, cqes, flags, _ uint32
	_                                                   uint64
}

type ringParams struct {
	_                                      structs.HostLayout
	sqEntries, cqEntries, flags, cpu, idle uint32
	features, wqFd                         uint32
	_                                      [3]uint32
	sq                                     ringSQOffsets
	cq                                     ringCQOffsets
}

type ringWaitArg struct {
	_       structs.HostLayout
	sigmask uint64
	sigSize uint32
	_       uint32
	ts      uint64
}

var (
	_ = [1]struct{}{}[unsafe.Sizeof(ringSQE{})-64]
	_ = [1]struct{}{}[unsafe.Sizeof(ringCQE{})-16]
	_ = [1]struct{}{}[unsafe.Sizeof(ringParams{})-120]
	_ = [1]struct{}{}[unsafe.Sizeof(ringWaitArg{})-24]
)

// ring is one io_uring. All but wait is guarded by the poller's lock.
type ring struct {
	fd                  int
	rings, sqeMemory    []byte
	sqHead, sqTail      *uint32
	cqHead, cqTail      *uint32
	sqMask, cqMask      uint32
	sqes                []ringSQE
	cqes                []ringCQE
	tail                uint32 // of the submission queue, as far as it is filled
	pending             uint32 // filled and not yet taken by the kernel
	inflight            int    // pushed and not reaped, the backlog included
	table               []*command
	free                []uint32
	backFirst, backLast *command
	waitArg             ringWaitArg // of the one thread that waits
	waitTime            unix.Timespec
}

var errRingFeatures = errors.New("the kernel's io_uring is too old (5.11 is needed)")

func newRing(entries uint32) (*ring, error) {
	p := ringParams{flags: setupClamp}
	fd, _, errno := syscall.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", errno)
	}
	r := &ring{fd: int(fd)}
	unix.CloseOnExec(r.fd)
	if p.features&featNeeded != featNeeded {
		r.close()
		return nil, errRingFeatures
	}
	if err := r.mmap(&p); err != nil {
		r.close()
		return nil, err
	}
	r.table = make([]*command, p.sqEntries)
	r.free = make([]uint32, p.sqEntries)
	for i := range r.free {
		r.free[i] = uint32(i)
	}
	return r, nil
}

func (r *ring) mmap(p *ringParams) error {
	size := max(p.sq.array+4*p.sqEntries, p.cq.cqes+16*p.cqEntries)
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	var err error
	if r.rings, err = unix.Mmap(r.fd, offRings, int(size), prot, flags); err != nil {
		return fmt.Errorf("mmap of the rings: %w", err)
	}
	if r.sqeMemory, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries)*64, prot, flags); err != nil {
		return fmt.Errorf("mmap of the entries: %w", err)
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail, r.sqMask = word(p.sq.head), word(p.sq.tail), *word(p.sq.mask)
	r.cqHead, r.cqTail, r.cqMask = word(p.cq.head), word(p.cq.tail), *word(p.cq.mask)
	r.sqes = unsafe.Slice((*ringSQE)(unsafe.Pointer(&r.sqeMemory[0])), p.sqEntries)
	r.cqes = unsafe.Slice((*ringCQE)(unsafe.Pointer(&r.rings[p.cq.cqes])), p.cqEntries)
	array := unsafe.Slice(word(p.sq.array), p.sqEntries)
	for i := range array {
		array[i] = uint32(i)
	}
	r.tail = *r.sqTail
	return nil
}

func (r *ring) close() {
	if r.rings != nil {
		_ = unix.Munmap(r.rings)
	}
	if r.sqeMemory != nil {
		_ = unix.Munmap(r.sqeMemory)
	}
	_ = unix.Close(r.fd)
}

// push takes a read or write whose segments direct I/O accepts.
func (r *ring) push(c *command) {
	r.inflight++
	if len(r.free) == 0 || r.backFirst != nil {
		r.postpone(c)
		return
	}
	r.fill(c)
}

func (r *ring) postpone(c *command) {
	c.next = nil
	if r.backLast == nil {
		r.backFirst = c
	} else {
		r.backLast.next = c
	}
	r.backLast = c
}

// fill writes the submission entry. There are as many table slots as entries, so that there is always one.
func (r *ring) fill(c *command) {
	slot := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.table[slot] = c
	c.slot = slot
	iov := c.data.list[c.first:]
	e := &r.sqes[r.tail&r.sqMask]
	*e = ringSQE{
		opcode: opReadv, fd: int32(c.queue.controller.fd), off: uint64(c.off) + uint64(c.progress),
		addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(iov)))), len: uint32(len(iov)), userData: uint64(slot),
	}
	if len(iov) == 1 {
		e.opcode, e.addr, e.len = opRead, uint64(uintptr(unsafe.Pointer(iov[0].Base))), uint32(iov[0].Len)
	}
	if c.kind == doWrite {
		e.opcode += opWritev - opReadv // and so from opRead to opWrite
		if c.fua {
			e.rwFlags = unix.RWF_DSYNC
		}
	}
	r.tail++
	r.pending++
}

// submit hands what was filled to the kernel. What it does not take now stays for the next time.
func (r *ring) submit() {
	for r.backFirst != nil && len(r.free) > 0 {
		c := r.backFirst
		if r.backFirst = c.next; r.backFirst == nil {
			r.backLast = nil
		}
		r.fill(c)
	}
	if r.pending == 0 {
		return
	}
	atomic.StoreUint32(r.sqTail, r.tail)
	n, _, errno := syscall.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.pending), 0, 0, 0, 0)
	if errno == 0 {
		r.pending -= uint32(n)
	}
}

// reap concludes what the kernel has finished.
func (r *ring) reap(p *Poller) int {
	head, tail, n := *r.cqHead, atomic.LoadUint32(r.cqTail), 0
	for ; head != tail; head++ {
		e := r.cqes[head&r.cqMask]
		atomic.StoreUint32(r.cqHead, head+1)
		c := r.table[e.userData]
		r.table[e.userData] = nil
		r.free = append(r.free, uint32(e.userData))
		switch errno := syscall.Errno(-e.res); {
		case e.res < 0 && (errno == syscall.EAGAIN || errno == syscall.EINTR):
			r.postpone(c)
			continue
		case e.res < 0 && c.refusedAsIs(errno):
			r.inflight--
			p.blocked++
			p.workers.submit(c)
			continue
		case e.res < 0:
			c.status = c.statusOf(errno)
		case e.res == 0:
			c.status = c.statusOf(errShort)
		default:
			if c.advance(uint32(e.res)); c.progress < c.n {
				r.postpone(c)
				continue
			}
		}
		r.inflight--
		n++
		p.finish(c)
	}
	return n
}

// wait blocks until the ring has a completion, at most for a time.
func (r *ring) wait(timeout time.Duration) {
	r.waitTime = unix.NsecToTimespec(int64(timeout))
	r.waitArg = ringWaitArg{ts: uint64(uintptr(unsafe.Pointer(&r.waitTime)))}
	syscall.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 0, 1, enterGetEvents|enterExtArg,
		uintptr(unsafe.Pointer(&r.waitArg)), unsafe.Sizeof(r.waitArg))
}

package giotest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// bus joins an executor to controllers by what a driver has of them: registers, and admin queues through which it makes
// the queue pairs. Executors leave doorbells in memory; the bus carries them to the registers.
type bus struct {
	r           *Rig
	mu          sync.Mutex
	admin       []*admin // by controller
	bells       []bells  // by queue
	stop, ended chan struct{}
}

// bells are what was carried of a queue pair's doorbells.
type bells struct {
	there      bool // the controller has the queue pair
	tail, head uint32
}

// admin is a controller's admin queue as its driver has it.
type admin struct {
	c          *emu.Controller
	sq         []nvme.SQE
	cq         []nvme.CQE
	sqAt, cqAt uint64
	tail, head uint32
	phase      uint16
	enabled    bool
}

const adminEntries = 8

// blockBase and its number give a block of queue memory the address that controllers have of it.
const (
	blockBase  = 1 << 56
	blockShift = 24
)

// queueID is that of a lane's queue pair on each of its controllers.
func (b *bus) queueID(i int) uint16 { return uint16(1 + i/b.r.Shape.Drives) }

// newBus takes the controllers up. Blocks of queue memory are those of the queue pairs, then those of admin queues.
func newBus(r *Rig) *bus {
	b := &bus{r: r, bells: make([]bells, len(r.pages)), stop: make(chan struct{}), ended: make(chan struct{})}
	for _, c := range r.Controllers {
		block := drive.AlignedBuffer(2 * nvme.PageBytes)
		at := uint64(blockBase + len(r.blocks)<<blockShift)
		r.blocks = append(r.blocks, block)
		b.admin = append(b.admin, &admin{
			c: c, sqAt: at, cqAt: at + nvme.PageBytes,
			sq: unsafe.Slice((*nvme.SQE)(unsafe.Pointer(&block[0])), adminEntries),
			cq: unsafe.Slice((*nvme.CQE)(unsafe.Pointer(&block[nvme.PageBytes])), adminEntries),
		})
	}
	r.region.blocks = r.blocks
	for _, c := range r.Controllers {
		c.SetHostMemory(r.region)
	}
	return b
}

// carry brings doorbells to the registers, until it is told to stop.
func (b *bus) carry() {
	defer close(b.ended)
	for {
		select {
		case <-b.stop:
			return
		case <-time.After(20 * time.Microsecond):
		}
		b.mu.Lock()
		for i := range b.bells {
			b.carryOne(i)
		}
		b.mu.Unlock()
	}
}

func (b *bus) carryOne(i int) {
	x, m, c := &b.bells[i], &b.r.pages[i], b.admin[i%len(b.admin)].c
	if !x.there {
		return
	}
	if head := atomic.LoadUint32(m.CQHead); head != x.head {
		x.head = head
		c.WriteRegister(nvme.CQHeadDoorbell(b.queueID(i), 0), uint64(head), 4)
	}
	if tail := atomic.LoadUint32(m.SQTail); tail != x.tail {
		x.tail = tail
		c.WriteRegister(nvme.SQTailDoorbell(b.queueID(i), 0), uint64(tail), 4)
	}
}

// close ends the controllers.
func (b *bus) close() {
	close(b.stop)
	<-b.ended
	for _, a := range b.admin {
		a.c.Close()
	}
}

// create makes a queue pair, of a controller that is enabled for it if need be.
func (b *bus) create(i int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	a, id := b.admin[i%len(b.admin)], b.queueID(i)
	if err := a.enable(); err != nil {
		return err
	}
	at := func(p unsafe.Pointer) uint64 {
		return uint64(blockBase+i<<blockShift) + uint64(uintptr(p)-uintptr(unsafe.Pointer(&b.r.blocks[i][0])))
	}
	var cq, sq nvme.SQE
	entries := uint32(len(b.r.pages[i].SQ))
	nvme.BuildCreateCQ(&cq, 1, id, at(unsafe.Pointer(&b.r.pages[i].CQ[0])), entries)
	nvme.BuildCreateSQ(&sq, 2, id, id, at(unsafe.Pointer(&b.r.pages[i].SQ[0])), entries)
	b.bells[i] = bells{there: true}
	return errors.Join(a.do(&cq), a.do(&sq))
}

// remove deletes a queue pair, unless the controller has lost it.
func (b *bus) remove(i int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.bells[i].there {
		return nil
	}
	b.bells[i].there = false
	a := b.admin[i%len(b.admin)]
	var cq, sq nvme.SQE
	nvme.BuildDeleteQueue(&sq, 3, b.queueID(i), false)
	nvme.BuildDeleteQueue(&cq, 4, b.queueID(i), true)
	return errors.Join(a.do(&sq), a.do(&cq))
}

// disable clears CC.EN of a controller, which loses all its queues.
func (b *bus) disable(d int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.admin[d]
	a.c.WriteRegister(nvme.RegCC, uint64(nvme.MakeCC(false, 12)), 4)
	require.Zero(b.r.t, a.c.ReadRegister(nvme.RegCSTS, 4), "not ready any more")
	a.enabled = false
	for i := d; i < len(b.bells); i += len(b.admin) {
		b.bells[i].there = false
	}
}

func (a *admin) enable() error {
	if a.enabled {
		return nil
	}
	clear(a.sq)
	clear(a.cq)
	a.tail, a.head, a.phase = 0, 0, 1
	a.c.WriteRegister(nvme.RegAQA, uint64(nvme.MakeAQA(adminEntries, adminEntries)), 4)
	a.c.WriteRegister(nvme.RegASQ, a.sqAt, 8)
	a.c.WriteRegister(nvme.RegACQ, a.cqAt, 8)
	a.c.WriteRegister(nvme.RegCC, uint64(nvme.MakeCC(true, 12)), 4)
	if s := a.c.ReadRegister(nvme.RegCSTS, 4); s != nvme.CSTSReady {
		return fmt.Errorf("giotest: CSTS is %#x after CC.EN", s)
	}
	a.enabled = true
	return nil
}

// do executes an admin command.
func (a *admin) do(e *nvme.SQE) error {
	a.sq[a.tail] = *e
	a.tail = (a.tail + 1) % adminEntries
	a.c.WriteRegister(nvme.SQTailDoorbell(0, 0), uint64(a.tail), 4)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Microsecond) {
		id, status, ok := a.cq[a.head].Poll(a.phase)
		switch {
		case !ok && time.Now().After(end):
			return fmt.Errorf("giotest: admin command %#x does not complete", e.Opcode)
		case !ok:
			continue
		}
		if a.head++; a.head == adminEntries {
			a.head, a.phase = 0, a.phase^1
		}
		a.c.WriteRegister(nvme.CQHeadDoorbell(0, 0), uint64(a.head), 4)
		if id != e.CID || !status.OK() {
			return fmt.Errorf("giotest: admin command %#x: %w", e.Opcode, status)
		}
		return nil
	}
}

// testDisabled: somebody clears CC.EN of a controller while it has commands. They never complete, and its queues are
// gone; the executor is not told. Once it has timed out, it gets queues of the controller that was enabled again.
func testDisabled(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("controllers have threads of their own")
		}
		for _, write := range []bool{false, true} {
			shape := w.shape()
			shape.Deadline, shape.Registers = short, true
			r := NewRig(t, s, shape)
			ctxs := all(r)
			store(r, ctxs, 1)
			a := w.memory(r, ctxs)
			a.fill(1)
			if !write {
				a.set(0xee)
			}
			var shut atomic.Bool
			var held atomic.Int32
			shut.Store(true)
			r.setFaults(0, func(*nvme.SQE) *emu.Fault {
				held.Add(1)
				return &emu.Fault{Hold: func() bool { return !shut.Load() }}
			})
			ticket, err := r.Ring.Issue(write, r.Map, a.ctxs)
			require.NoError(t, err)
			for held.Load() == 0 && !ticket.Done() { // a busy machine may pass the deadline before
				time.Sleep(50 * time.Microsecond)
			}
			r.bus.disable(0)
			shut.Store(false)
			r.SetFaults(nil)
			results, err := r.Ring.Wait(ticket)
			require.NoError(t, err)
			require.NotEmpty(t, results)
			failed := map[int]bool{}
			for _, f := range results {
				require.ErrorIs(t, f.Err, gio.ErrTimeout)
				failed[f.Index] = !write
			}
			require.True(t, held.Load() == 0 || r.Quiesced.Load() > 0)
			a.check(1, failed)
			a.recovers(2)
		}
	})
}

package vfio

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/nvme"
)

// Pair is a queue pair that a controller serves. Whoever has it writes entries and rings the doorbells: an engine, or a
// Queue.
type Pair struct {
	ID     uint16
	Memory *Buffer // nvme.QueueBytes of it, as nvme.MapQueue lays it out; the page of doorbells is not used
	SQ     []nvme.SQE
	CQ     []nvme.CQE
	// SQTail and CQHead are the offsets of the doorbells among the registers. Transport.Doorbells says where their page
	// can be mapped from.
	SQTail, CQHead uint32

	c       *Controller
	own     bool // the memory was allocated with it
	deleted atomic.Bool
	lost    chan struct{}
}

// Lost is closed when the controller serves the pair no more, though nobody deleted it: it was reset, or is gone or
// dead. Nothing was told of its commands. If the error of Controller.Err is not ErrQuarantined, nothing touches their
// memory any more.
func (p *Pair) Lost() <-chan struct{} { return p.lost }

// Queue is a queue pair of this process's own, filled and reaped here.
type Queue struct {
	c       *Controller
	pair    *Pair
	timeout time.Duration // of its commands
	gens    uint          // bits of a slot's index in a command id; the rest count its uses

	mu       sync.Mutex
	tail     uint32
	head     uint32
	phase    uint16
	slots    []slot
	free     []uint16
	held     bool  // being made anew: nothing is submitted
	ended    error // for good
	spurious uint64
}

// slot is a place for one command in flight.
type slot struct {
	state     slotState
	cid       uint16 // index | use << gens: a completion that comes twice, or late, finds another id
	expired   bool   // its time was over before it ended
	abandoned bool   // nobody waits for it
	result    uint64
	status    nvme.Status
	err       error
	due       time.Time
	opcode    uint8
}

type slotState uint8

const (
	slotFree slotState = iota
	slotFlying
	slotDone // its result waits to be taken
)

// Ticket is a command that was submitted. Each must be given to Wait.
type Ticket struct{ cid uint16 }

func newQueue(c *Controller, p *Pair, timeout time.Duration) *Queue {
	n := len(p.SQ) - 1 // one entry stays free, or a full queue would look like an empty one
	q := &Queue{
		c: c, pair: p, timeout: timeout, gens: uint(bits.Len(uint(n - 1))), phase: 1,
		slots: make([]slot, n), free: make([]uint16, 0, n),
	}
	for i := range q.slots {
		q.slots[i].cid = uint16(i)
		q.free = append(q.free, uint16(n-1-i))
	}
	return q
}

// ID is the queue's number.
func (q *Queue) ID() uint16 { return q.pair.ID }

// Depth is how many commands can be in flight.
func (q *Queue) Depth() int { return len(q.slots) }

// Spurious counts completions that belong to no command in flight. A controller that works has none.
func (q *Queue) Spurious() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.spurious
}

// Do runs one command to its end and returns DW0 and DW1 of its completion. A status that is not success is the error,
// an nvme.Status; the others are those of this package. Once Do has returned, whatever it returned but ErrQuarantined,
// the controller does not touch the command's memory any more.
func (q *Queue) Do(e nvme.SQE) (uint64, error) {
	t, err := q.Submit(e)
	if err != nil {
		return 0, err
	}
	return q.Wait(t)
}

// Submit hands a command to the controller, with an id of its own; it waits for room.
func (q *Queue) Submit(e nvme.SQE) (Ticket, error) { return q.submit(e, q.timeout) }

func (q *Queue) submit(e nvme.SQE, timeout time.Duration) (Ticket, error) {
	var full time.Time
	for p := (pause{}); ; p.wait() {
		t, err := q.trySubmit(e, timeout)
		switch {
		case err == nil || !errors.Is(err, ErrFull):
			return t, err
		case q.isHeld():
			full = time.Time{} // the time of a reset counts for nobody
		case full.IsZero():
			full = time.Now()
		case time.Since(full) > timeout:
			return t, q.c.errorf("queue %d: %w", q.pair.ID, err)
		}
		if p.long() {
			q.c.checkHealth()
		}
	}
}

func (q *Queue) isHeld() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.held
}

// trySubmit is ErrFull when there is no room now.
func (q *Queue) trySubmit(e nvme.SQE, timeout time.Duration) (Ticket, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended != nil {
		return Ticket{}, q.ended
	}
	if !q.held && len(q.free) == 0 {
		q.reap(true)
	}
	if q.held || len(q.free) == 0 {
		return Ticket{}, ErrFull
	}
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[i]
	*s = slot{state: slotFlying, cid: s.cid + 1<<q.gens, due: time.Now().Add(timeout), opcode: e.Opcode}
	e.CID = s.cid
	q.pair.SQ[q.tail] = e
	if q.tail++; q.tail == uint32(len(q.pair.SQ)) {
		q.tail = 0
	}
	q.pair.RingSQ(q.tail)
	return Ticket{s.cid}, nil
}

// Wait waits for a command's end, and ends it itself when its time is over: by an Abort, else by making its queue anew,
// else by resetting the controller.
func (q *Queue) Wait(t Ticket) (uint64, error) {
	for p := (pause{}); ; p.wait() {
		result, err, done := q.take(t)
		if done {
			return result, err
		}
		if q.overdue(t) {
			q.c.expire(q, t)
		} else if p.long() {
			q.c.checkHealth()
		}
	}
}

func (q *Queue) slotOf(cid uint16) (*slot, bool) {
	i := int(cid & (1<<q.gens - 1))
	if i >= len(q.slots) || q.slots[i].cid != cid || q.slots[i].state == slotFree {
		return nil, false
	}
	return &q.slots[i], true
}

// take looks for a command's result and frees its slot.
func (q *Queue) take(t Ticket) (uint64, error, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, ok := q.slotOf(t.cid)
	if !ok {
		return 0, q.c.errorf("queue %d: no command %#x is in flight: %w", q.pair.ID, t.cid, ErrUnsuitable), true
	}
	if s.state == slotFlying && !q.held && q.ended == nil {
		q.reap(true)
	}
	if s.state != slotDone {
		return 0, nil, false
	}
	result, err := s.result, q.outcome(s)
	q.release(s)
	return result, err, true
}

// outcome is what a command's slot says of its end.
func (q *Queue) outcome(s *slot) error {
	err := s.err
	if err == nil && !s.status.OK() {
		err = s.status
		if s.status.Is(nvme.AbortRequested) || s.status.Is(nvme.SQDeleted) {
			err = fmt.Errorf("%w: %w", ErrAborted, s.status)
		}
	}
	if err == nil {
		return nil
	}
	if s.expired && errors.Is(err, ErrAborted) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	return q.c.errorf("queue %d, opcode %02xh: %w", q.pair.ID, s.opcode, err)
}

func (q *Queue) overdue(t Ticket) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, ok := q.slotOf(t.cid)
	return ok && s.state == slotFlying && time.Now().After(s.due)
}

// reap takes the completions that are there, and says so to a controller that still serves the queue. The caller holds
// mu.
func (q *Queue) reap(served bool) {
	n := 0
	for ; n < len(q.pair.CQ); n++ { // no more than fit: a broken controller could go on for ever
		e := &q.pair.CQ[q.head]
		cid, status, ok := e.Poll(q.phase)
		if !ok {
			break
		}
		if s, ok := q.slotOf(cid); ok && s.state == slotFlying && e.SQID == q.pair.ID {
			s.status, s.result = status, uint64(e.DW0)|uint64(e.DW1)<<32
			q.done(s)
		} else {
			q.spurious++
		}
		if q.head++; q.head == uint32(len(q.pair.CQ)) {
			q.head, q.phase = 0, q.phase^1
		}
	}
	if n > 0 && served {
		q.pair.RingCQ(q.head)
	}
}

// done ends a command; a slot that nobody waits for is free at once.
func (q *Queue) done(s *slot) {
	s.state = slotDone
	if s.abandoned {
		q.release(s)
	}
}

func (q *Queue) release(s *slot) {
	s.state = slotFree
	q.free = append(q.free, s.cid&(1<<q.gens-1))
}

// abandon is for a command whose end nobody waits for any more.
func (q *Queue) abandon(t Ticket) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s, ok := q.slotOf(t.cid); ok {
		if s.abandoned = true; s.state == slotDone {
			q.release(s)
		}
	}
}

// markExpired is false if the command ended after all.
func (q *Queue) markExpired(t Ticket) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, ok := q.slotOf(t.cid)
	if ok && s.state == slotFlying && q.ended == nil {
		q.reap(true)
	}
	if !ok || s.state != slotFlying {
		return false
	}
	s.expired = true
	return true
}

// hold keeps everybody from submitting, and from looking at entries that are about to be cleared.
func (q *Queue) hold() {
	q.mu.Lock()
	q.held = true
	q.mu.Unlock()
}

// end accounts for every command in flight: none of them will complete any more. The entries are looked at once more
// if they can be.
func (q *Queue) end(err error, look bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if look {
		q.reap(false)
	}
	for i := range q.slots {
		if s := &q.slots[i]; s.state == slotFlying {
			s.err = err
			q.done(s)
		}
	}
}

// endForGood is end, and the answer to everything afterwards.
func (q *Queue) endForGood(err error, look bool) {
	q.end(err, look)
	q.mu.Lock()
	q.ended, q.held = err, false
	q.mu.Unlock()
}

// restart makes the memory an empty queue. Nobody else touches it.
func (q *Queue) restart() {
	q.mu.Lock()
	clear(q.pair.Memory.Bytes)
	q.tail, q.head, q.phase = 0, 0, 1
	q.mu.Unlock()
}

func (q *Queue) resume() {
	q.mu.Lock()
	q.held = false
	q.mu.Unlock()
}

// pause is a wait that begins short.
type pause struct{ n int }

const (
	pauseYields = 200 // before it sleeps
	pauseMin    = 10 * time.Microsecond
	pauseMax    = 500 * time.Microsecond
	pauseCheck  = 16 // sleeps between looks at the controller's health
)

func (p *pause) wait() {
	p.n++
	if p.n <= pauseYields {
		runtime.Gosched()
		return
	}
	time.Sleep(min(pauseMin<<min((p.n-pauseYields)/8, 10), pauseMax))
}

// long is true every now and then in a wait that is not short.
func (p *pause) long() bool { return p.n > pauseYields && (p.n-pauseYields)%pauseCheck == 0 }

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

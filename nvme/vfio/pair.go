package vfio

import (
	"errors"
	"maps"
	"slices"

	"tuttifs/nvme"
)

// Offsets in the memory of a pair, as nvme.MapQueue has them.
const sqOffset = PageBytes

func cqOffset(depth int) uint64 {
	return sqOffset + uint64(depth*nvme.SQEBytes+PageBytes-1)&^(PageBytes-1)
}

// run is how an admin command is carried out: by anybody (Queue.Do), or while others wait for recovery (quick).
type run func(nvme.SQE) (uint64, error)

// newPair lays a pair out over memory, which is cleared; nil memory is allocated.
func (c *Controller) newPair(id uint16, depth int, memory *Buffer) (*Pair, error) {
	n := nvme.QueueBytes(depth)
	if n == 0 || id != 0 && uint32(depth) > c.cap.Entries() {
		return nil, c.errorf("queues of %d entries, want a power of two of %d to %d: %w", depth, nvme.QueueEntriesMin,
			min(c.cap.Entries(), nvme.QueueEntriesMax), ErrUnsuitable)
	}
	own := memory == nil
	if own {
		var err error
		if memory, err = c.Alloc(n); err != nil {
			return nil, err
		}
	}
	m, err := nvme.MapQueue(memory.Bytes, depth)
	if err != nil {
		return nil, c.errorf("%w: %w", ErrUnsuitable, err)
	}
	clear(memory.Bytes[:n])
	stride := c.cap.Stride()
	return &Pair{
		ID: id, Memory: memory, SQ: m.SQ, CQ: m.CQ, c: c, own: own, lost: make(chan struct{}),
		SQTail: nvme.SQTailDoorbell(id, stride), CQHead: nvme.CQHeadDoorbell(id, stride),
	}, nil
}

// reserve takes the lowest free identifier.
func (c *Controller) reserve() (id uint16, resets uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, 0, c.err
	}
	for id = 1; id <= c.most; id++ {
		if !c.used[id] {
			c.used[id] = true
			return id, c.resets, nil
		}
	}
	return 0, 0, c.errorf("all of its %d I/O queues are in use: %w", c.most, ErrUnsuitable)
}

func (c *Controller) unreserve(id uint16) {
	c.mu.Lock()
	delete(c.used, id)
	c.mu.Unlock()
}

// NewPair creates a queue pair for somebody else to drive, an engine for instance. memory has nvme.QueueBytes(depth)
// bytes, is cleared, and stays the caller's; nil is allocated, and freed by Delete. The pair does not survive a reset
// of the controller: see Pair.Lost.
func (c *Controller) NewPair(depth int, memory *Buffer) (*Pair, error) {
	p, err := c.create(depth, memory, func(p *Pair) { c.pairs[p.ID] = p })
	return p, err
}

// NewQueue creates a queue pair for this process. It survives resets.
func (c *Controller) NewQueue(depth int) (q *Queue, err error) {
	_, err = c.create(depth, nil, func(p *Pair) {
		q = newQueue(c, p, c.o.CommandTimeout)
		c.queues[p.ID] = q
	})
	return q, err
}

// create makes a pair and registers it, unless the controller was reset meanwhile.
func (c *Controller) create(depth int, memory *Buffer, register func(*Pair)) (*Pair, error) {
	id, resets, err := c.reserve()
	if err != nil {
		return nil, err
	}
	p, err := c.newPair(id, depth, memory)
	if err != nil {
		c.unreserve(id)
		return nil, err
	}
	if err = c.createOn(c.admin.Do, p); err == nil && !c.enroll(p, resets, register) {
		err = c.errorf("reset while queue %d was being created: %w", id, ErrAborted)
		if undo := c.deleteOn(c.admin.Do, p, nil); errors.Is(undo, ErrQuarantined) {
			err = errors.Join(err, undo)
		}
	}
	if err != nil {
		c.unreserve(id)
		if memory == nil && !errors.Is(err, ErrQuarantined) {
			err = errors.Join(err, p.Memory.Free())
		}
		return nil, err
	}
	return p, nil
}

// enroll makes a pair known, unless the controller was reset since: it may have gone with that.
func (c *Controller) enroll(p *Pair, resets uint64, register func(*Pair)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resets != resets || c.err != nil {
		return false
	}
	register(p)
	return true
}

// createOn sends the two commands; the completion queue does not stay if there is no submission queue.
func (c *Controller) createOn(do run, p *Pair) error {
	var e nvme.SQE
	depth := len(p.SQ)
	c.clearShadows(p)
	nvme.BuildCreateCQ(&e, 0, p.ID, p.Memory.IOVA+cqOffset(depth), uint32(depth))
	if _, err := do(e); err != nil {
		return c.errorf("create completion queue %d of %d entries: %w", p.ID, depth, err)
	}
	nvme.BuildCreateSQ(&e, 0, p.ID, p.ID, p.Memory.IOVA+sqOffset, uint32(depth))
	if _, err := do(e); err != nil {
		nvme.BuildDeleteQueue(&e, 0, p.ID, true)
		_, undo := do(e)
		return errors.Join(c.errorf("create submission queue %d of %d entries: %w", p.ID, depth, err), undo)
	}
	return nil
}

// deleteOn sends the two commands. When the first has completed, no command of the queue is in flight any more
// (Base 2.0 section 5.6): drained is called then, before the completion queue goes. A queue that is not there is
// deleted: a reset did it.
func (c *Controller) deleteOn(do run, p *Pair, drained func()) error {
	var e nvme.SQE
	for _, completion := range []bool{false, true} {
		nvme.BuildDeleteQueue(&e, 0, p.ID, completion)
		if _, err := do(e); err != nil && !errors.Is(err, nvme.QueueIDInvalid) {
			return c.errorf("delete queue %d: %w", p.ID, err)
		}
		if !completion && drained != nil {
			drained()
		}
	}
	return nil
}

// all are the pairs that were handed out.
func (c *Controller) all() []*Pair {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.pairs))
}

// Delete ends the pair. After nil no command of it is in flight and its memory is the caller's again; what NewPair
// allocated is freed. A lost pair has ended already.
func (p *Pair) Delete() error {
	c := p.c
	if p.deleted.Swap(true) {
		return c.errorf("queue %d: %w", p.ID, ErrClosed)
	}
	c.mu.Lock()
	mine := c.pairs[p.ID] == p
	if mine {
		delete(c.pairs, p.ID)
	}
	err := c.err
	c.mu.Unlock()
	if !mine {
		<-p.lost // a reset may not be over yet
		err = c.Err()
	}
	if mine && err == nil {
		err = c.deleteOn(c.admin.Do, p, nil)
	}
	return c.finish(p, mine, err)
}

// finish gives a deleted pair's identifier and memory back. If the controller stopped serving meanwhile, the pair is
// as deleted as can be; only memory that it may still write to is kept.
func (c *Controller) finish(p *Pair, mine bool, err error) error {
	if mine {
		c.unreserve(p.ID)
	}
	switch {
	case errors.Is(err, ErrQuarantined):
		return err
	case errors.Is(err, ErrAborted), errors.Is(err, ErrTimeout), errors.Is(err, ErrGone), errors.Is(err, ErrDead),
		errors.Is(err, ErrClosed):
		err = nil // the reset that this ended with, or the removal, has ended the queue too
	}
	if err == nil && p.own {
		err = p.Memory.Free()
	}
	return err
}

// Close ends the queue; commands in flight end with ErrClosed. Nobody may use it afterwards.
func (q *Queue) Close() error {
	c := q.c
	c.recovery.Lock() // nobody makes the queue anew meanwhile
	defer c.recovery.Unlock()
	c.mu.Lock()
	mine := c.queues[q.pair.ID] == q
	delete(c.queues, q.pair.ID)
	err := c.err
	c.mu.Unlock()
	closed := c.errorf("queue %d: %w", q.pair.ID, ErrClosed)
	if !mine {
		return closed
	}
	q.hold()
	if err == nil && c.deleteOn(c.quick, q.pair, nil) != nil {
		err = c.reset() // which ends it too
	}
	if errors.Is(err, ErrQuarantined) {
		closed = err
	}
	q.endForGood(closed, err == nil)
	return c.finish(q.pair, true, err)
}

// RingSQ and RingCQ write the pair's doorbells.
func (p *Pair) RingSQ(tail uint32) { p.c.ring(p, p.SQTail, tail) }

// RingCQ says how far completions were consumed.
func (p *Pair) RingCQ(head uint32) { p.c.ring(p, p.CQHead, head) }

package gio

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// ringTicket is a batch in flight. (The IOCB.)
type ringTicket struct {
	ring     *Ring
	m        *Map
	ctxs     []IOCTX
	write    bool
	deferred bool  // a write that waits for the pacer
	place    place // what it has of the store buffer
	layer    int32 // noLayer
	chunk    int   // most commands of a chunk
	left     atomic.Int64
	undone   atomic.Int64 // goes before left: with its end all is counted
	nth      int64        // of the reads

	size      ioSize
	open      ioCounter    // what of it has not arrived
	since     int64        // when it was deferred
	awaitedAt atomic.Int64 // 0: nobody waits

	next   int         // first IOCTX in no chunk; Ring.mu, as are the two below
	after  *ringTicket // in its list
	queued bool

	mu     sync.Mutex
	failed []Result

	memories []*Memory // those that the batch keeps from being unregistered
}

// chunkLeast keeps small batches together: a doorbell and a chunk's bookkeeping cost as much as several commands.
const chunkLeast = 8

// Issue queues a batch (any length; it is cut into chunks by lane). Reads land at the descriptors, payload length each
// object's own. The caller leaves ctxs and the buffers alone until Wait has returned, and calls Wait exactly once.
func (r *Ring) Issue(write bool, m *Map, ctxs []IOCTX) (Ticket, error) {
	t, err := r.issue(write, m, ctxs, noLayer)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (r *Ring) issue(write bool, m *Map, ctxs []IOCTX, layer int32) (*ringTicket, error) {
	return r.issueTicket(&ringTicket{ring: r, m: m, ctxs: ctxs, write: write, layer: layer})
}

func (r *Ring) issueTicket(t *ringTicket) (*ringTicket, error) {
	if t.m == nil {
		return nil, fmt.Errorf("%w: no extent map", ErrInvalid)
	}
	t.memories = r.regions.hold(t.ctxs)
	lanes := r.common()
	switch {
	case t.deferred:
		lanes = r.config.StoreLanes
	case t.write:
		lanes = int(writeLanes(int32(lanes)))
	}
	t.chunk = max(chunkLeast, (len(t.ctxs)+lanes-1)/lanes)
	if limit := r.config.ChunkCommands; limit > 0 {
		t.chunk = min(t.chunk, limit)
	}
	if err := r.enqueue(t); err != nil {
		letGo(t.memories)
		return nil, err
	}
	r.Poll()
	return t, nil
}

func (r *Ring) enqueue(t *ringTicket) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	if err := r.broken.Load(); err != nil {
		return *err
	}
	if t.deferred && r.storeAlive.Load() == 0 || !t.deferred && r.alive.Load() == 0 {
		return fmt.Errorf("%w: no lane is left", ErrDead)
	}
	if len(t.ctxs) == 0 {
		return nil
	}
	t.left.Store(int64(len(t.ctxs)))
	t.undone.Store(int64(len(t.ctxs)))
	r.flow.begins(t)
	r.list(t).add(t)
	return nil
}

// rest is what of a batch is in no chunk, at most so many IOCTXs.
func (t *ringTicket) rest(most int) ioSize {
	end := min(len(t.ctxs), t.next+most)
	n := ioSize{objects: uint64(end - t.next)}
	for i := t.next; i < end; i++ {
		if t.ctxs[i].Flags == 0 {
			n.bytes += uint64(t.m.ObjectBytes(t.ctxs[i].Object))
		}
	}
	return n
}

// countOff counts IOCTXs that have their outcomes.
func (t *ringTicket) countOff(n int64) {
	if n == 0 {
		return
	}
	if t.undone.Add(-n) == 0 {
		t.ring.flow.ends(t)
	}
	t.left.Add(-n)
}

// Wait blocks until the batch is complete, at most the ring's deadline (and the time of a quiesce); it returns failed
// IOCTXs in batch order (empty when all is well) and zeroes their targets for reads. The error is for the ring as a
// whole: it is gone; the failed IOCTXs are returned with it.
func (r *Ring) Wait(ticket Ticket) ([]Result, error) {
	t, ours := ticket.(*ringTicket)
	if !ours || t.ring != r {
		return nil, fmt.Errorf("%w: a ticket of another executor", ErrInvalid)
	}
	return r.wait(t)
}

func (r *Ring) wait(t *ringTicket) ([]Result, error) {
	begin := int64(0)
	r.flow.awaits(t)
	for idle := 0; t.left.Load() > 0; idle++ {
		if r.Poll() {
			idle = 0
			continue
		}
		if idle%checkEvery == checkEvery-1 || idle > r.spins {
			now := clock()
			if begin == 0 {
				begin = now
			}
			if t.deferred { // others go before it: what counts is that any does
				begin = max(t.awaitedAt.Load(), r.flow.progress.Load())
			}
			r.expire(t, now-begin > int64(r.config.Deadline))
		}
		r.rest(idle)
	}
	letGo(t.memories)
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortFunc(t.failed, func(a, b Result) int { return cmp.Compare(a.Index, b.Index) })
	if err := r.broken.Load(); err != nil && len(t.failed) > 0 {
		return t.failed, *err
	}
	return t.failed, nil
}

// Done says whether Wait would return at once.
func (t *ringTicket) Done() bool { return t.left.Load() == 0 }

// fail records one IOCTX's error and zeroes its target. The caller counts it off.
func (t *ringTicket) fail(index int, err error) {
	ctx := &t.ctxs[index]
	if !t.write {
		if m := t.ring.regions.lookup(ctx.Desc); m != nil {
			clear(m.at(ctx.Desc, t.m.ObjectBytes(ctx.Object)))
		}
	}
	t.mu.Lock()
	t.failed = append(t.failed, Result{Index: index, Err: err})
	t.mu.Unlock()
}

// failRest fails what is in no chunk yet. Ring.mu is held.
func (t *ringTicket) failRest(err error) {
	n := len(t.ctxs) - t.next
	for ; t.next < len(t.ctxs); t.next++ {
		t.fail(t.next, err)
	}
	t.countOff(int64(n))
}

// awaited and outcome are a deferred write's, for Finish.
func (t *ringTicket) awaited()                   { t.ring.flow.awaits(t) }
func (t *ringTicket) outcome() ([]Result, error) { return t.ring.wait(t) }

// payload is an IOCTX's memory. Its descriptor was checked when its command was built.
func (t *ringTicket) payload(index uint32) []byte {
	ctx := &t.ctxs[index]
	return t.ring.regions.lookup(ctx.Desc).at(ctx.Desc, t.m.objects[ctx.Object].bytes)
}

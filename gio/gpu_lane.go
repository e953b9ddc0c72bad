package gio

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// gpuLane is one set of queue pairs, one per drive: like a lane of the CPU ring, it has one chunk under way, in one
// direction. The commands of the chunks that follow stand in its queues already, beyond the doorbells. All of it is
// the I/O thread's.
type gpuLane struct {
	g         *GPU
	number    int
	store     bool   // it carries deferred writes and nothing else
	cells     []byte // the lane's bounce cells
	cellsBase uint64
	laneQueues
	addresses []queueAddress

	state    laneState
	active   *gpuChunk   // in every state but idle and dead
	deadline int64       // of the active chunk, from when it was rung
	ahead    []*gpuChunk // built, or being built, in order
	built    []uint32    // by drive: commands of those ahead that are built
	unbuilt  uint32      // IOCTXs of those ahead that are being built
	building bool
	rewinds  bool  // what is ahead is to be built again
	polled   bool  // a polling kernel has the queues
	cause    error // why it was quiesced
	cursor   []uint32
	helper   atomic.Pointer[helped]
}

type laneState uint8

const (
	laneIdle    laneState = iota
	laneLoading           // a write's bytes are on their way to the cells
	laneRung
	laneMoving // a read's bytes are on their way to the staging
	laneQuiescing
	laneReattaching
	laneDead
)

// queueAddress is where the GPU finds a queue.
type queueAddress struct{ sq, cq, sqTail, cqHead uint64 }

// helped is what a helper, which may block, has found.
type helped struct {
	err    error
	queues []Queue
}

// pinShared registers the DMA memory and the queues with CUDA.
func (g *GPU) pinShared() error {
	if err := g.pins.add(g, g.config.DMA); err != nil {
		return fmt.Errorf("gio: the DMA memory: %w", err)
	}
	g.dmaGPU, _ = g.pins.address(g.config.DMA)
	for _, queues := range g.config.Lanes {
		if err := g.pinQueues(queues); err != nil {
			return err
		}
	}
	return nil
}

func (g *GPU) pinQueues(queues []Queue) error {
	for d := range queues {
		if err := g.pins.add(g, queueBytes(&queues[d])); err != nil {
			return fmt.Errorf("gio: memory of queues: %w", err)
		}
	}
	return nil
}

func (g *GPU) makeLanes() error {
	drives := len(g.config.Lanes[0])
	g.depth = nvme.QueueEntriesMax
	for _, queues := range g.config.Lanes {
		for d := range queues {
			g.depth = min(g.depth, len(queues[d].Memory.SQ)-1)
		}
	}
	for i, queues := range g.config.Lanes {
		l := &gpuLane{
			g: g, number: i, laneQueues: laneQueues{queues: make([]laneQueue, drives)},
			store:     i >= g.common(),
			addresses: make([]queueAddress, drives), built: make([]uint32, drives), cursor: make([]uint32, drives),
		}
		l.cells, l.cellsBase = g.cells(i)
		if err := l.attach(queues); err != nil {
			return err
		}
		g.lanes = append(g.lanes, l)
	}
	return nil
}

// attach takes empty queues, whose memory is pinned.
func (l *gpuLane) attach(queues []Queue) error {
	for d := range queues {
		m := &queues[d].Memory
		if len(m.SQ) <= l.g.depth {
			return fmt.Errorf("%w: lane %d came back with queues of %d entries", ErrInvalid, l.number, len(m.SQ))
		}
		a := &l.addresses[d]
		b := queueBytes(&queues[d])
		base, ok := l.g.pins.address(b)
		if !ok {
			return fmt.Errorf("%w: queue memory that is not pinned", ErrMemory)
		}
		base -= uint64(uintptr(unsafe.Pointer(&b[0])))
		a.sq = base + uint64(uintptr(unsafe.Pointer(&m.SQ[0])))
		a.cq = base + uint64(uintptr(unsafe.Pointer(&m.CQ[0])))
		if !queues[d].Device { // a polling kernel rings them, which has no queue of a device's
			a.sqTail = base + uint64(uintptr(unsafe.Pointer(m.SQTail)))
			a.cqHead = base + uint64(uintptr(unsafe.Pointer(m.CQHead)))
		}
		l.queues[d].attach(&queues[d], &l.g.bells)
	}
	return nil
}

// direction says which way the lane's chunks go; none is true if it has none.
func (l *gpuLane) direction() (write, none bool) {
	switch {
	case l.active != nil:
		return l.active.t.write, false
	case len(l.ahead) > 0:
		return l.ahead[0].t.write, false
	}
	return false, true
}

// poll moves the lane on.
func (l *gpuLane) poll(now int64) (moved bool) {
	if l.g.broken.Load() != nil && l.state < laneQuiescing {
		return l.drop()
	}
	if l.rewinds && !l.building {
		l.rewind()
		moved = true
	}
	switch l.state {
	case laneRung:
		if l.arrived() {
			l.finish(now)
			moved = true
		}
	case laneQuiescing, laneReattaching:
		return l.help() || moved
	}
	if l.state == laneIdle && !l.rewinds && l.startable() && l.g.thread.permits(l, now) {
		l.begin(now)
		moved = true
	}
	return moved
}

// startable says whether the first chunk ahead is built and has its bytes where they are wanted.
func (l *gpuLane) startable() bool {
	if len(l.ahead) == 0 {
		return false
	}
	c := l.ahead[0]
	return c.ready && (!c.t.write || c.gathered == gatherDone)
}

// begin takes the next chunk: a write's cells are filled first.
func (l *gpuLane) begin(now int64) {
	c := l.ahead[0]
	l.ahead = append(l.ahead[:0], l.ahead[1:]...)
	l.active, c.lane = c, l
	for d := range l.queues {
		q := &l.queues[d]
		has := c.t.memory.counts[c.index*len(l.queues)+d]
		q.count, q.units = has.Commands, has.Units
		l.built[d] -= q.count
	}
	if c.commands == 0 {
		l.over()
		return
	}
	if c.t.write && c.bytes > 0 {
		l.state = laneLoading
		l.g.out.add(c)
		return
	}
	l.hand(now)
}

// hand rings the chunk.
func (l *gpuLane) hand(now int64) {
	c, g := l.active, l.g
	if c.t.over != nil {
		// Its batch was given up, and no controller knows of it yet.
		l.takeBack()
		g.failChunk(c, c.t.over)
		return
	}
	l.state, l.pending = laneRung, 0
	for d := range l.queues {
		if q := &l.queues[d]; q.count > 0 {
			clear(q.slots[:q.count])
			l.pending++
		}
	}
	g.thread.issued(c, now)
	g.arm()
	l.advanceTails(c.t.write)
	g.thread.rang = true
	l.deadline = now + int64(g.config.Deadline)
	s := &g.stats
	s.chunks.Add(1)
	s.commands.Add(uint64(c.commands))
	if c.t.write {
		s.written.Add(c.payload)
	} else {
		s.read.Add(c.payload)
	}
}

// finish matches every entry of an arrived chunk; a read's bytes are moved on.
func (l *gpuLane) finish(now int64) {
	c, bad := l.active, 0
	for d := range l.queues {
		q := &l.queues[d]
		if q.count == 0 {
			continue
		}
		n, err := q.match()
		if err != nil {
			drive := l.g.config.Lanes[l.number][d].Drive
			l.fail(fmt.Errorf("%w: lane %d drive %d: %w", ErrProtocol, l.number, drive, err))
			return
		}
		if n > 0 && q.gate != nil {
			q.gate.Fail(l.write, uint64(n))
		}
		bad += n
	}
	if bad > 0 {
		c.failed = true
		l.report()
	}
	for d := range l.queues {
		if q := &l.queues[d]; q.count > 0 {
			q.advance()
		}
	}
	l.g.disarm()
	c.t.progress = now
	l.g.thread.arrived(c, now)
	if !c.t.write && c.bytes > 0 {
		l.state = laneMoving
		l.g.in.add(c)
		return
	}
	l.over()
}

// report fails the IOCTXs of commands with a bad status. The k-th command of the chunk on a drive is that of the k-th
// IOCTX that lies there and was not refused.
func (l *gpuLane) report() {
	c, t := l.active, l.active.t
	clear(l.cursor)
	for i := c.first; i < c.first+c.count; i++ {
		if t.memory.outcomes[i] != cuda.OutcomeOK {
			continue
		}
		ctx := &t.memory.ctxs[i]
		drive, _, _, ok := t.m.Locate(ctx.Slot, ctx.Object)
		if !ok || int(drive) >= len(l.g.drives) || l.g.drives[drive] < 0 {
			continue
		}
		d := l.g.drives[drive]
		q := &l.queues[d]
		if l.cursor[d] >= q.count {
			continue
		}
		if status := q.slots[l.cursor[d]].status; status != 0 {
			t.fail(int(i), t.statusError(int(i), nvme.Status(status)))
		}
		l.cursor[d]++
	}
}

// over ends a chunk of which nothing is left to move, and frees the lane.
func (l *gpuLane) over() {
	c := l.active
	l.g.thread.arrived(c, l.g.now())
	l.active, l.state = nil, laneIdle
	l.g.arrivedChunk(c)
}

// moved is called when the last piece of the active chunk has been copied, or when the last piece of one that was
// cancelled has.
func (l *gpuLane) moved(now int64) {
	if l.state == laneLoading {
		l.g.giveSlot(l.active)
		if l.g.broken.Load() == nil {
			l.hand(now)
		}
		return // drop sees to it
	}
	l.over()
}

// takeBack forgets the active chunk's commands: no controller has been told.
func (l *gpuLane) takeBack() {
	for d := range l.queues {
		l.queues[d].count = 0
	}
	// The commands of the chunks ahead stand behind those that were taken back, and have other ids.
	l.active, l.state = nil, laneIdle
	l.rewinds = len(l.ahead) > 0
}

// rewind gives the chunks ahead back to their batches, to be built again.
func (l *gpuLane) rewind() {
	l.rewinds = false
	for i := len(l.ahead) - 1; i >= 0; i-- {
		c := l.ahead[i]
		c.ready = false
		if c.t.over != nil {
			l.g.failChunk(c, c.t.over)
		} else {
			l.g.thread.rebuild(c)
		}
	}
	l.ahead = l.ahead[:0]
	clear(l.built)
}

// fail quiesces the lane, which ends its chunk with an error. The chunk's memory is given back only after the owner
// of the controllers has confirmed that nothing of it is in flight. That may take long, and so a helper asks.
func (l *gpuLane) fail(cause error) {
	l.state, l.cause = laneQuiescing, cause
	l.helper.Store(nil)
	go func() {
		l.helper.Store(&helped{err: l.g.quiesce(l.number)})
		l.g.ring()
	}()
}

// help goes on when the helper has an answer.
func (l *gpuLane) help() (moved bool) {
	h := l.helper.Load()
	if h == nil || l.building { // a kernel still writes into the queues that were given up
		return false
	}
	if l.state == laneReattaching {
		l.reattached(h)
		return true
	}
	g := l.g
	c := l.active
	if c != nil {
		g.disarm()
		l.forgo(h.err == nil)
	}
	for d := range l.queues {
		q := &l.queues[d]
		q.firstID += uint16(q.count)
		q.count = 0
	}
	l.active = nil
	if h.err != nil {
		err := fmt.Errorf("%w: lane %d: %w (after: %w)", ErrDead, l.number, h.err, l.cause)
		g.breakWith(err)
		g.thread.noteClose(err)
		if c != nil {
			g.failChunk(c, err)
		}
		l.state = laneIdle
		l.drop()
		return true
	}
	if c != nil {
		g.failChunk(c, l.cause)
	}
	l.rewind()
	if g.closing.Load() || g.broken.Load() != nil || errors.Is(l.cause, ErrClosed) {
		l.die(ErrClosed)
		return true
	}
	l.state = laneReattaching
	l.helper.Store(nil)
	go func() {
		h := &helped{}
		if h.queues, h.err = g.reattach(l.number); h.err == nil {
			h.err = g.control.do(func() error { return g.pinQueues(h.queues) })
		}
		l.helper.Store(h)
		g.ring()
	}()
	return true
}

func (l *gpuLane) reattached(h *helped) {
	err := h.err
	if err == nil {
		err = l.attach(h.queues)
	}
	if err != nil {
		l.die(err)
		return
	}
	l.state = laneIdle
}

// die takes the lane out of service. It has no chunks.
func (l *gpuLane) die(err error) {
	l.state = laneDead
	err = fmt.Errorf("%w: %w: %w", ErrDead, errNoLane, err)
	switch {
	case l.store && l.g.stores.Add(-1) == 0:
		l.g.thread.failStores(err)
	case !l.store && l.g.alive.Add(-1) == 0:
		l.g.thread.failQueued(err)
	}
}

// drop ends the lane and its chunks without quiescing: the ring is broken. It waits for what the GPU still does with
// their memory.
func (l *gpuLane) drop() (moved bool) {
	g := l.g
	if l.active != nil {
		g.in.cancel(l.active)
		g.out.cancel(l.active)
	}
	if l.building || l.active != nil && l.active.pieces > 0 {
		return false
	}
	err := *g.broken.Load()
	if c := l.active; c != nil {
		if l.state == laneRung {
			g.disarm()
			l.forgo(false)
		}
		l.active = nil
		if !c.listed {
			g.failChunk(c, err)
		}
	}
	for _, c := range l.ahead {
		g.failChunk(c, err)
	}
	l.ahead, l.rewinds = l.ahead[:0], false
	l.die(err)
	return true
}

package gio

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/nvme"
)

// lane is one set of queue pairs, one per drive, for one chunk in flight in one direction.
type lane struct {
	ring      *Ring
	number    int
	cells     []byte // the lane's bounce cells; a chunk packs its commands into them from the start
	cellsBase uint64
	store     bool // it carries deferred writes and nothing else

	mu sync.Mutex // guards everything below; held while a chunk is built, rung, completed or failed
	laneQueues
	busy     bool
	dead     bool
	ticket   *ringTicket
	deadline time.Time
	commands int    // of the chunk
	bounced  int    // bytes of cells in use
	errors   int    // commands with a bad status
	payload  uint64 // bytes of the chunk
	rung     int64  // when it was given to the drives
	ahead    bool   // nobody waited for its batch, or one behind it, when it was
}

// laneQueues are the queue pairs of a lane and what of its chunk is outstanding.
type laneQueues struct {
	queues  []laneQueue
	pending int  // queues that have commands of the chunk and whose last entry is not in
	write   bool // the chunk's direction
	held    int  // queues that are held
}

// laneQueue is one queue pair as the executor sees it. Tail, head and phase are private: what stands in shared memory
// is written and never read back.
type laneQueue struct {
	sq             []nvme.SQE
	cq             []nvme.CQE
	sqTail, cqHead *uint32
	mask           uint32
	lbaShift       uint8 // of units: 0 or 3
	device         bool  // doorbells are registers
	namespace      uint32
	directive      Directive
	// In the controller's doorbell buffer, where it has one.
	tailShadow, headShadow nvme.Shadow
	bells                  *doorbells
	gate                   Gate // nil: nothing is asked
	tail, head             uint32
	phase                  uint32 // of the entry at head

	// Command ids count on from chunk to chunk, so that a completion that comes late or twice is not taken for one of
	// the next chunk's.
	firstID uint16
	count   uint32 // commands of the chunk
	units   uint32 // that they move
	arrived bool
	held    bool // it may not begin yet
	slots   []command
}

// command is what the executor keeps of one command.
type command struct {
	index  uint32 // of its IOCTX in the batch
	cell   uint32 // offset of its bounce cell in the lane's, noCell if it is direct
	status uint16
	done   bool
}

const noCell = ^uint32(0)

func (q *laneQueue) attach(c *Queue, bells *doorbells) {
	depth := len(c.Memory.SQ)
	*q = laneQueue{
		sq: c.Memory.SQ, cq: c.Memory.CQ, sqTail: c.Memory.SQTail, cqHead: c.Memory.CQHead,
		mask: uint32(depth - 1), lbaShift: uint8(bits.TrailingZeros(uint(pageBytes / c.LBABytes))), phase: 1,
		firstID: q.firstID, slots: make([]command, depth), device: c.Device, namespace: max(c.Namespace, 1),
		directive: c.Directive, gate: c.Gate, tailShadow: c.TailShadow, headShadow: c.HeadShadow, bells: bells,
	}
}

// doorbells counts the writes of doorbell registers, and those that a doorbell buffer has saved.
type doorbells struct{ written, saved atomic.Uint64 }

// ring writes a doorbell, after everything that it announces. An atomic store would lock the bus on a register.
func (q *laneQueue) ring(doorbell *uint32, shadow nvme.Shadow, value uint32) {
	switch {
	case !q.device:
		atomic.StoreUint32(doorbell, value)
	case shadow.Set() && !shadow.Advance(value):
		q.bells.saved.Add(1)
	default:
		q.bells.written.Add(1)
		nvme.StoreRegister(doorbell, value)
	}
}

// start cuts a chunk off the batch whose turn it is, builds its commands and rings. It reports whether it did. The lane
// is locked and idle.
func (l *lane) start() bool {
	r := l.ring
	r.mu.Lock()
	var t *ringTicket
	for l.commands == 0 {
		if t = r.turn(l); t == nil {
			break
		}
		l.cut(t)
		if t.next == len(t.ctxs) {
			r.list(t).remove(t)
		}
	}
	if l.commands > 0 {
		if t.write && !l.store {
			r.writing.Add(1)
		}
		r.flow.issued(l, t)
	}
	r.mu.Unlock()
	if l.commands == 0 {
		return false
	}
	if t.write && l.bounced > 0 {
		l.gather(t)
	}
	l.ticket, l.busy, l.errors = t, true, 0
	l.deadline = time.Now().Add(r.config.Deadline)
	r.keeper.add(1)
	l.ringDoorbells()
	return true
}

// cut builds commands of t until the chunk is full. IOCTXs that can never be commands are failed. Ring.mu is held.
func (l *lane) cut(t *ringTicket) {
	refused := int64(0)
	for l.commands < t.chunk && t.next < len(t.ctxs) {
		fits, err := l.build(t, t.next)
		if !fits {
			break
		}
		if err != nil {
			t.fail(t.next, err)
			refused++
		}
		t.next++
	}
	t.countOff(refused)
}

// build makes one command. fits is false when the chunk has no room for it; with an error it never will.
func (l *lane) build(t *ringTicket, index int) (fits bool, err error) {
	ctx := &t.ctxs[index]
	drive, unit, units, ok := t.m.Locate(ctx.Slot, ctx.Object)
	if !ok {
		return true, fmt.Errorf("%w: slot %d object %d", ErrUnmapped, ctx.Slot, ctx.Object)
	}
	if int(drive) >= len(l.ring.drives) || l.ring.drives[drive] < 0 {
		return true, fmt.Errorf("%w: slot %d object %d lies on drive %d, to which the ring has no queue",
			ErrUnmapped, ctx.Slot, ctx.Object, drive)
	}
	q := &l.queues[l.ring.drives[drive]]
	if q.count == q.mask {
		return false, nil // a queue of n entries holds n - 1
	}
	sqe := &q.sq[(q.tail+q.count)&q.mask]
	cid := q.firstID + uint16(q.count)
	cell := noCell
	if ctx.Flags == 0 {
		var address uint64
		n := units * pageBytes
		if address, cell, fits, err = l.place(t, ctx, n); !fits || err != nil {
			return fits, err
		}
		nvme.BuildRW(sqe, t.write, cid, q.namespace, unit<<q.lbaShift, units<<q.lbaShift)
		if t.write && q.directive.Type != 0 {
			sqe.SetDirective(q.directive.Type, q.directive.Specific[t.m.lifetime(ctx.Slot)])
		}
		if l.ring.config.SGL {
			sqe.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLDataBlock, address, n))
		} else {
			l.ring.prp.put(sqe, address, n)
		}
	} else if ctx.Flags == FlagFlush && t.write {
		nvme.BuildFlush(sqe, cid, q.namespace)
	} else {
		return true, fmt.Errorf("%w: flags %#x", ErrInvalid, ctx.Flags)
	}
	q.slots[q.count] = command{index: uint32(index), cell: cell}
	if q.count == 0 {
		l.pending++
		q.units = 0
	}
	q.count++
	l.commands++
	if ctx.Flags == 0 {
		q.units += units
		l.payload += uint64(t.m.objects[ctx.Object].bytes)
	}
	return true, nil
}

// place finds the I/O address of an IOCTX's n bytes: its own, or that of a bounce cell.
func (l *lane) place(t *ringTicket, ctx *IOCTX, n uint32) (address uint64, cell uint32, fits bool, err error) {
	m := l.ring.regions.lookup(ctx.Desc)
	payload := t.m.ObjectBytes(ctx.Object)
	if m == nil || m.at(ctx.Desc, payload) == nil {
		return 0, 0, true, fmt.Errorf("%w: descriptor %#x of %d bytes", ErrMemory, ctx.Desc, payload)
	}
	if m.direct && (payload == n || m.padded && m.at(ctx.Desc, n) != nil) {
		if address = m.base + ctx.Desc&(1<<offsetBits-1); address%4 == 0 { // Base 2.0 section 4.1.1
			return address, noCell, true, nil
		}
	}
	if int(n) > len(l.cells) {
		return 0, 0, true, fmt.Errorf("%w: %d bytes must be bounced, a lane has %d bytes of cells",
			ErrMemory, n, len(l.cells))
	}
	if int(n) > len(l.cells)-l.bounced {
		return 0, 0, false, nil
	}
	cell = uint32(l.bounced)
	l.bounced += int(n)
	return l.cellsBase + uint64(cell), cell, true, nil
}

// gather copies a write chunk's payloads into its cells and zeroes what follows them, so that no other object's bytes
// reach the drive.
func (l *lane) gather(t *ringTicket) {
	for d := range l.queues {
		q := &l.queues[d]
		for i := range q.slots[:q.count] {
			if c := &q.slots[i]; c.cell != noCell {
				payload := t.payload(c.index)
				n := copy(l.cells[c.cell:], payload)
				clear(l.cells[int(c.cell)+n : int(c.cell)+(n+pageBytes-1)&^(pageBytes-1)])
			}
		}
	}
}

// scatter copies a read chunk's payloads out of their cells. Those with a bad status are left out.
func (l *lane) scatter(t *ringTicket) {
	for d := range l.queues {
		q := &l.queues[d]
		for i := range q.slots[:q.count] {
			if c := &q.slots[i]; c.cell != noCell && c.status == 0 {
				copy(t.payload(c.index), l.cells[c.cell:])
			}
		}
	}
}

// ringDoorbells rings the doorbell of every queue that has commands, once.
func (l *lane) ringDoorbells() {
	l.ring.arm()
	l.advanceTails(l.ticket.write)
	l.ring.wakeUp()
}

// advanceTails hands the chunk's commands to the controllers, but for those that their drives' phases hold back.
func (l *laneQueues) advanceTails(write bool) {
	l.write = write
	for d := range l.queues {
		if q := &l.queues[d]; q.count > 0 {
			q.arrived = false
			l.attempt(q)
		}
	}
}

// arm keeps the pollers awake, from before a chunk is rung until disarm when it is done.
func (b *base) arm() {
	if b.config.Armed != nil {
		atomic.AddUint32(b.config.Armed, 1)
	}
}

func (b *base) disarm() {
	if b.config.Armed != nil {
		atomic.AddUint32(b.config.Armed, ^uint32(0))
	}
}

// wakeUp wakes a poller that sleeps, after ringing.
func (b *base) wakeUp() {
	if b.config.Wake != nil {
		nvme.Wake(b.config.Wake)
	}
}

// lastWord reads the last word of a completion entry, which has its phase; everything before it in the entry and in the
// entries before is visible after.
func lastWord(e *nvme.CQE) uint32 { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&e.CID))) }

// arrived says whether the chunk's last entry is in on every queue.
func (l *laneQueues) arrived() bool {
	if l.pending == 0 {
		return true
	}
	if l.held > 0 {
		l.attemptHeld()
	}
	for d := range l.queues {
		q := &l.queues[d]
		if q.count == 0 || q.arrived {
			continue
		}
		at := q.head + q.count - 1
		phase := q.phase ^ at>>bits.TrailingZeros32(q.mask+1)&1
		switch {
		case !q.held && lastWord(&q.cq[at&q.mask])>>16&1 == phase:
			l.leave(q)
		case q.gate == nil:
			return false // the others are looked at when this one is in
		}
	}
	return l.pending == 0
}

// finish matches every entry of an arrived chunk, gives the outcomes and frees the lane.
func (l *lane) finish() {
	for d := range l.queues {
		q := &l.queues[d]
		if q.count == 0 {
			continue
		}
		bad, err := q.match()
		if err != nil {
			drive := l.ring.config.Lanes[l.number][d].Drive
			_ = l.fail(fmt.Errorf("%w: lane %d drive %d: %w", ErrProtocol, l.number, drive, err))
			return
		}
		if bad > 0 && q.gate != nil {
			q.gate.Fail(l.write, uint64(bad))
		}
		l.errors += bad
	}
	t := l.ticket
	if !t.write && l.bounced > 0 {
		l.scatter(t)
	}
	if l.errors > 0 {
		l.report(t)
	}
	for d := range l.queues {
		if q := &l.queues[d]; q.count > 0 {
			q.advance()
		}
	}
	l.release(t)
}

var (
	errUnknownID = errors.New("completion of an unknown command id")
	errTwice     = errors.New("command id completed twice")
	errPhase     = errors.New("completion entry out of order")
)

// match goes through the chunk's completion entries in order and counts those with a bad status.
func (q *laneQueue) match() (bad int, err error) {
	head, phase := q.head, q.phase
	for range q.count {
		w := lastWord(&q.cq[head])
		if w>>16&1 != phase {
			return 0, errPhase
		}
		i := uint16(w) - q.firstID
		if uint32(i) >= q.count {
			return 0, fmt.Errorf("%w %#x", errUnknownID, uint16(w))
		}
		c := &q.slots[i]
		if c.done {
			return 0, fmt.Errorf("%w: %#x", errTwice, uint16(w))
		}
		c.done = true
		if c.status = uint16(w >> 17); c.status != 0 {
			bad++
		}
		if head++; head > q.mask {
			head, phase = 0, phase^1
		}
	}
	if lastWord(&q.cq[head])>>16&1 == phase {
		return 0, fmt.Errorf("%w: one more entry than commands", errUnknownID)
	}
	return bad, nil
}

// advance consumes the chunk's completion entries.
func (q *laneQueue) advance() {
	q.head += q.count
	if q.head > q.mask {
		q.head &= q.mask
		q.phase ^= 1
	}
	q.ring(q.cqHead, q.headShadow, q.head)
	q.firstID += uint16(q.count)
	q.count = 0
}

// report fails the IOCTXs of commands with a bad status.
func (l *lane) report(t *ringTicket) {
	for d := range l.queues {
		q := &l.queues[d]
		for i := range q.slots[:q.count] {
			c := &q.slots[i]
			if c.status == 0 {
				continue
			}
			ctx := &t.ctxs[c.index]
			drive, _, _, _ := t.m.Locate(ctx.Slot, ctx.Object)
			t.fail(int(c.index), &StatusError{
				Status: nvme.Status(c.status), Drive: drive, Slot: ctx.Slot, Object: ctx.Object, Write: t.write,
			})
		}
	}
}

// release counts the chunk off and makes the lane idle.
func (l *lane) release(t *ringTicket) {
	n := l.commands
	l.ring.flow.arrived(l, t)
	l.busy, l.ticket, l.commands, l.pending, l.bounced, l.payload = false, nil, 0, 0, 0, 0
	if t.write && !l.store {
		l.ring.writing.Add(-1)
	}
	l.ring.disarm()
	l.ring.keeper.add(-1)
	t.countOff(int64(n))
}

// fail ends the chunk in flight with an error: it quiesces first, and only then gives the chunk's memory back. The lane
// goes on if it could be attached again. A lane that could not be quiesced takes the whole ring with it, because nobody
// knows what will still land. The lane is locked and busy.
func (l *lane) fail(cause error) error {
	r := l.ring
	if quiesced := r.quiesce(l.number); quiesced != nil {
		err := fmt.Errorf("%w: lane %d: %w (after: %w)", ErrDead, l.number, quiesced, cause)
		r.broken.CompareAndSwap(nil, &err)
		if r.store != nil {
			r.store.fail(err)
			r.driver.ring() // to fail the rest, where nobody else is in the ring
		}
		l.drop(err)
		return err
	}
	l.forgo(true)
	l.failChunk(cause)
	err := cause
	if !errors.Is(cause, ErrClosed) {
		err = l.reattach()
	}
	if err != nil {
		l.dead = true
		l.gone(fmt.Errorf("%w: no lane is left: %w", ErrDead, err))
	}
	return nil
}

// gone counts a dead lane. With the last one of its kind, what waits for such lanes fails.
func (l *lane) gone(err error) {
	r := l.ring
	switch {
	case l.store && r.storeAlive.Add(-1) == 0:
		r.failList(&r.deferred, err)
		r.store.fail(err)
	case !l.store && r.alive.Add(-1) == 0:
		r.failList(&r.reads, err)
		r.failList(&r.writes, err)
	}
}

// drop ends the lane and its chunk without quiescing: the ring is broken.
func (l *lane) drop(err error) {
	if l.busy {
		l.forgo(false)
		l.failChunk(err)
	}
	if !l.dead {
		l.dead = true
		l.gone(err)
	}
}

// failChunk gives every command of the chunk one outcome.
func (l *lane) failChunk(err error) {
	t := l.ticket
	for d := range l.queues {
		q := &l.queues[d]
		for i := range q.slots[:q.count] {
			t.fail(int(q.slots[i].index), err)
		}
		q.firstID += uint16(q.count)
		q.count = 0
	}
	l.release(t)
}

var errNoReattach = errors.New("gio: quiesced lanes are not attached again in this configuration")

// reattach gives the quiesced lane empty queues.
func (l *lane) reattach() error {
	queues, err := l.ring.reattach(l.number)
	if err != nil {
		return err
	}
	for d := range queues {
		l.queues[d].attach(&queues[d], &l.ring.bells)
	}
	return nil
}

// reattach asks for new queues for a quiesced lane.
func (b *base) reattach(lane int) ([]Queue, error) {
	if b.config.Reattach == nil {
		return nil, errNoReattach
	}
	queues, err := b.config.Reattach(lane)
	if err != nil {
		return nil, err
	}
	if len(queues) != len(b.config.Lanes[lane]) {
		return nil, fmt.Errorf("%w: lane %d came back with %d queues of %d",
			ErrInvalid, lane, len(queues), len(b.config.Lanes[lane]))
	}
	for d := range queues {
		if err := queues[d].validate(); err != nil {
			return nil, err
		}
	}
	return queues, nil
}

// quiesce stops a lane.
func (b *base) quiesce(lane int) error {
	if b.config.Quiesce == nil {
		return errors.New("gio: no way to quiesce a lane is configured")
	}
	return b.config.Quiesce(lane)
}

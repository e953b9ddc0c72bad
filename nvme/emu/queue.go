package emu

import (
	"sync/atomic"
	"time"

	"tuttifs/nvme"
)

// completionQueue is the controller's side of one completion queue. Several submission queues may complete to it.
type completionQueue struct {
	id       uint16
	entries  []nvme.CQE
	headBell bell
	head     uint32 // as the executor last said
	tail     uint32
	phase    uint16
	queues   int // that complete to it
}

// room is how many entries can be posted without overrunning what the executor has not consumed.
func (cq *completionQueue) room() uint32 {
	return uint32(len(cq.entries)) - 1 - distance(cq.head, cq.tail, uint32(len(cq.entries)))
}

// distance is how far to lies behind from in a ring of n.
func distance(from, to, n uint32) uint32 {
	if to >= from {
		return to - from
	}
	return to + n - from
}

// poll takes the head doorbell. It is false when the executor claims to have consumed what was never posted. While
// there is room the executor need not tell of the head: it cannot go beyond the tail.
func (cq *completionQueue) poll() bool {
	h, n := cq.headBell.read(), uint32(len(cq.entries))
	if cq.room() == 0 {
		h = cq.headBell.load()
	}
	if h != cq.head {
		if h >= n || distance(cq.head, h, n) > distance(cq.head, cq.tail, n) {
			return false
		}
		cq.head = h
	}
	if cq.room() > 0 {
		cq.headBell.ask(cq.tail)
	}
	return true
}

func (cq *completionQueue) post(result uint64, sqHead, sqID, cid uint16, st nvme.Status) {
	at, phase := cq.tail, cq.phase
	if cq.tail++; cq.tail == uint32(len(cq.entries)) {
		cq.tail = 0
		cq.phase ^= 1
	}
	if cq.room() > 0 {
		cq.headBell.ask(cq.tail) // before the executor can consume the entry
	}
	cq.entries[at].Publish(result, sqHead, sqID, cid, st, phase)
}

// Bounds of one service of one queue, so that a busy one neither starves the others nor delays its own completions.
const (
	fetchMax     = 64
	fetchMaxCopy = 1 << 20 // bytes copied inline before completions are published
)

// Queue is an attached queue pair: one submission queue and the completion queue it completes to. Everything but the
// atomics is guarded by the lock of the poller that serves it.
type Queue struct {
	controller *Controller
	id         uint16
	entries    []nvme.SQE
	tailBell   bell
	cq         *completionQueue
	dma        Memory
	authority  Authority

	head     uint32 // next entry to fetch
	tail     uint32 // as the executor last said
	reported uint32 // head as the last completion told the executor

	commands []command
	free     *command
	ready    []*command // served; to be published
	order    commandRing
	busy     [1 << 16 / 64]uint64 // command ids in flight
	inflight int                  // commands that a backend or the authority knows of
	large    int                  // decoded commands with long lists
	copied   int                  // bytes moved inline in this service
	worked   int                  // commands fetched and completed in this step
	shuffle  uint32
	stats    Stats

	backend  Backend
	reason   string
	phase    *drivePhase // nil where the drive's reads and writes may mix
	draining bool
	admin    *admin // of the admin queue itself
	onKill   func() // the admin queue's report of a bad doorbell; nil for attached queues
	poller   atomic.Pointer[Poller]
	dead     atomic.Bool
}

func newQueue(c *Controller, id uint16, entries []nvme.SQE, tail *uint32, cq *completionQueue, dma Memory,
	authority Authority) *Queue {
	n := len(entries)
	q := &Queue{
		controller: c, id: id, entries: entries, tailBell: bell{value: tail}, cq: cq, dma: dma, authority: authority,
		commands: make([]command, n), ready: make([]*command, 0, 2*n), shuffle: uint32(id)*2654435761 | 1,
	}
	if c.cfg.InOrder {
		q.order.slots = make([]*command, n)
	}
	for i := range q.commands {
		q.commands[i].queue = q
		q.release(&q.commands[i])
	}
	cq.queues++
	return q
}

// Dead says that the queue was killed for a bad doorbell; other queues go on.
func (q *Queue) Dead() bool { return q.dead.Load() }

// Backend says which way the queue's commands go, and why that one. It is known once the queue is added to a poller.
func (q *Queue) Backend() (Backend, string) {
	p := q.poller.Load()
	if p == nil {
		return Auto, "not served yet"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return q.backend, q.reason
}

func (q *Queue) release(c *command) {
	c.next = q.free
	q.free = c
}

// kill stops the queue for good. What is in flight ends, but nobody is told.
func (q *Queue) kill(p *Poller) {
	if q.dead.Swap(true) {
		return
	}
	p.drop(q)
	q.controller.stats.killed.Add(1)
	if q.onKill != nil {
		q.onKill()
	}
}

// pollTail takes the tail doorbell. It is false when the doorbell is outside the queue or moves past entries that the
// executor cannot know to be free.
func (q *Queue) pollTail() bool {
	t, n := q.tailBell.load(), uint32(len(q.entries))
	if t == q.tail {
		return true
	}
	if t >= n || distance(q.tail, t, n) > n-1-distance(q.reported, q.tail, n) {
		return false
	}
	q.tail = t
	return true
}

// serve takes the doorbells, fetches and starts commands, and publishes completions.
func (q *Queue) serve(p *Poller) int {
	if q.dead.Load() {
		q.discardReady()
		return 0
	}
	if !q.cq.poll() || !q.draining && !q.pollTail() {
		q.kill(p)
		return 0
	}
	if (q.head == q.tail || q.draining) && len(q.ready) == 0 && q.order.n == 0 {
		return 0
	}
	n := 0
	if !q.draining {
		n = q.fetch(p)
	}
	return n + q.publish()
}

func (q *Queue) fetch(p *Poller) int {
	n := 0
	q.copied = 0
	for q.head != q.tail && n < fetchMax && q.copied < fetchMaxCopy && q.large <= len(q.commands)/largeShare {
		c := q.free
		if c == nil {
			break // the executor reaps no completions; it will get no service before it does
		}
		q.free = c.next
		c.reset()
		nvme.CopySQE(&c.sqe, &q.entries[q.head])
		if q.phase != nil && c.sqe.Opcode != nvme.IOFlush && !p.admits(q.phase, c.sqe.Opcode, p.now) {
			q.release(c) // the entry stays where it is, and is copied anew
			break
		}
		if q.head++; q.head == uint32(len(q.entries)) {
			q.head = 0
		}
		if q.order.slots != nil {
			q.order.push(c)
		}
		n++
		p.accept(c)
	}
	return n
}

// accept takes one fetched command through its checks and starts it.
func (p *Poller) accept(c *command) {
	q := c.queue
	if q.claim(c.sqe.CID) {
		c.conflict, c.status = true, nvme.CIDConflict|dnr
		p.end(c)
		return
	}
	if q.admin != nil {
		q.admin.accept(c)
		return
	}
	if hook := q.controller.faults.Load(); hook != nil {
		if f := (*hook)(&c.sqe); f != nil {
			c.fault = *f
		}
		switch {
		case c.fault.Drop:
			q.lose(c)
			return
		case c.fault.Status != 0:
			c.status = nvme.Status(c.fault.Status)
			p.end(c)
			return
		}
	}
	c.status = c.decode()
	c.weigh()
	if !c.status.OK() {
		p.end(c)
		return
	}
	if c.fault.Delay > 0 || c.held() {
		c.due = time.Now().Add(c.fault.Delay)
		p.timers.push(c)
		return
	}
	p.begin(c)
}

// begin authorizes and moves. From here to end the queue counts as busy.
func (p *Poller) begin(c *command) {
	if c.status = c.authorize(); !c.status.OK() {
		c.queue.stats.Refused++
		p.end(c)
		return
	}
	if c.fault.Short > 0 && c.fault.Short < c.n {
		c.n = c.fault.Short &^ (1<<c.queue.controller.shift() - 1)
		c.data.truncate(uint64(c.n))
		if c.n == 0 {
			p.end(c)
			return
		}
	}
	if c.queue.phase != nil && c.kind != doFlush {
		c.enterPhase()
	}
	if m := c.queue.controller.cfg.Medium; m != nil && (c.kind == doRead || c.kind == doWrite) {
		c.due, c.paced = m.Serve(time.Now(), c.kind == doWrite, c.n), true
	}
	if c.inline() {
		c.queue.copied += int(c.n)
		if c.serveMemory() {
			p.end(c)
			return
		}
		c.refused = true
	}
	c.queue.inflight++
	p.dispatch(c)
}

// finish is the end of a command that a backend had.
func (p *Poller) finish(c *command) {
	c.queue.inflight--
	p.end(c)
}

// end concludes a command: grants, counters, log; then it waits for its place in the completion queue. A modelled drive
// holds it back before that.
func (p *Poller) end(c *command) {
	q := c.queue
	if c.fault.Short > 0 && c.status.OK() {
		c.status = nvme.DataTransferError
	}
	c.conclude()
	q.count(c)
	c.moved = true
	if c.paced && time.Now().Before(c.due) {
		c.trim() // its lists are for the transfer, which is over
		p.timers.push(c)
		return
	}
	q.ready1(c)
}

// ready1 hands a concluded command to the publisher.
func (q *Queue) ready1(c *command) {
	if c.running {
		c.leavePhase()
	}
	c.trim()
	if q.order.slots != nil {
		c.done = true
		return
	}
	q.ready = append(q.ready, c)
}

// claim marks a command id as in flight; it is true when it was already.
func (q *Queue) claim(cid uint16) bool {
	w, bit := &q.busy[cid/64], uint64(1)<<(cid%64)
	was := *w&bit != 0
	*w |= bit
	return was
}

// lose drops a command: its id stays in flight for ever, its place is free.
func (q *Queue) lose(c *command) {
	if q.order.slots != nil {
		c.done, c.lost = true, true
		return
	}
	q.release(c)
}

func (q *Queue) count(c *command) {
	s := &q.stats
	if !c.status.OK() {
		s.Errors++
		q.controller.log.add(q.id, &c.sqe, c.status)
		return
	}
	if f := q.controller.flash; f != nil {
		f.count(c)
	}
	switch c.kind {
	case doRead:
		s.Reads++
		s.BytesRead += uint64(c.n)
	case doWrite:
		s.Writes++
		s.BytesWritten += uint64(c.n)
	case doFlush:
		s.Flushes++
	}
}

// publish posts what is ready and fits. Unless the controller is in order, a batch goes out shuffled, so that no
// executor comes to rely on an order that hardware does not give.
func (q *Queue) publish() int {
	room := q.cq.room()
	if q.order.slots != nil {
		return q.publishInOrder(room)
	}
	n := min(int(room), len(q.ready))
	if n == 0 {
		return 0
	}
	if len(q.ready) > 1 {
		for i := range n {
			q.shuffle = q.shuffle*1664525 + 1013904223
			j := i + int(uint64(q.shuffle)*uint64(len(q.ready)-i)>>32)
			q.ready[i], q.ready[j] = q.ready[j], q.ready[i]
		}
	}
	batch := q.ready[:n]
	kept := 0
	for _, c := range batch {
		if q.postOne(c) {
			batch[kept] = c
			kept++
		}
	}
	rest := copy(q.ready[kept:], q.ready[n:])
	clear(q.ready[kept+rest:])
	q.ready = q.ready[:kept+rest]
	return n
}

func (q *Queue) publishInOrder(room uint32) int {
	n := 0
	for q.order.n > 0 && room > 0 {
		c := q.order.front()
		if !c.done {
			break
		}
		if c.lost {
			q.order.pop()
			q.release(c)
			continue
		}
		room--
		n++
		if !q.postOne(c) {
			q.order.pop()
		}
	}
	return n
}

// postOne writes one completion. It is true when a fault asks for the same completion again.
func (q *Queue) postOne(c *command) bool {
	q.cq.post(c.result, uint16(q.head), q.id, c.sqe.CID, c.status)
	q.reported = q.head
	if c.fault.Double {
		c.fault.Double = false
		return true
	}
	if !c.conflict {
		q.busy[c.sqe.CID/64] &^= 1 << (c.sqe.CID % 64)
	}
	q.release(c)
	return false
}

// discardReady drops the completions of a queue that nobody may listen to any more.
func (q *Queue) discardReady() {
	for _, c := range q.ready {
		q.release(c)
	}
	clear(q.ready)
	q.ready = q.ready[:0]
	for q.order.n > 0 && q.order.front().done {
		q.release(q.order.pop())
	}
	q.controller.stats.add(&q.stats)
}

// commandRing is the order in which an in-order queue fetched.
type commandRing struct {
	slots []*command
	head  int
	n     int
}

func (r *commandRing) push(c *command) {
	r.slots[(r.head+r.n)%len(r.slots)] = c
	r.n++
}

func (r *commandRing) front() *command { return r.slots[r.head] }

func (r *commandRing) pop() *command {
	c := r.slots[r.head]
	r.slots[r.head] = nil
	r.head = (r.head + 1) % len(r.slots)
	r.n--
	return c
}

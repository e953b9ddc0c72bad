package gio

import (
	"math"
	"slices"

	"tuttifs/cuda"
)

// A store by way of the store buffer is two batches. The evacuation gathers and moves like a write, into places of the
// buffer, and has no commands. Its writes are a batch with the same chunks; each may be built once its bytes are in the
// buffer, with its place for cells, and is rung when the pacer lets it go.

// gpuFlow is what the pacer is told. It is the I/O thread's.
type gpuFlow struct {
	reads, reading   ioSize
	waiting, writing ioSize
	live             int   // batches of deferred writes
	progress         int64 // when a deferred write ended
	denied           int64 // the round in which the pacer said no
	again            int64 // when it is to be asked again
}

func (n *ioSize) add(m ioSize) {
	n.objects += m.objects
	n.bytes += m.bytes
}

func (n *ioSize) sub(m ioSize) {
	n.objects -= m.objects
	n.bytes -= m.bytes
}

// pieceBytes is the most bytes of cells of a chunk that is evacuated.
func (g *GPU) pieceBytes() int { return min(g.store.piece, g.staging.slot) }

// address is a place's I/O address.
func (s *storeBuffer) address(p place) uint64 { return s.memory.base + uint64(s.offset(p)) }

// cellsOf is the host memory that a chunk's bytes are moved from or to.
func (g *GPU) cellsOf(c *gpuChunk) []byte {
	if c.lane != nil {
		return c.lane.cells
	}
	return g.store.bytes(c.place)
}

// givePlace frees a chunk's place in the store buffer.
func (g *GPU) givePlace(c *gpuChunk) {
	if c.place.count > 0 {
		g.store.free(c.place)
		c.place = place{}
	}
}

// planEvacuation cuts a batch that goes to the store buffer, whatever memory it is in.
func (p *planner) planEvacuation() {
	g := p.t.g
	p.most = g.pieceBytes()
	p.limit = max(1, g.depth/2) // of the lane that writes it
	if c := g.config.ChunkCommands; c > 0 {
		p.limit = min(p.limit, c)
	}
	p.pack(p.period())
	p.cut(0, p.t.n, false)
}

// prepareWrites makes the batch that writes what this one evacuates.
func (t *gpuTicket) prepareWrites(p *planner) (err error) {
	g := t.g
	w := g.newTicket(t.m, t.n, true, &batchOptions{layer: t.layer, deferred: true})
	t.writes, w.size = w, t.size
	if w.tables, err = g.maps.get(g, t.m); err != nil {
		return err
	}
	w.chunks = slices.Clone(t.chunks)
	w.limit = len(w.chunks)
	for i := range w.chunks {
		c := &w.chunks[i]
		c.t, c.direct, c.bytes, c.gathered = w, true, 0, gatherDone
	}
	b := &w.memory
	err = b.take(g, &batchSizes{
		ctxs: t.n, chunks: len(w.chunks), drives: len(g.config.Lanes[0]), group: len(p.offsets),
	})
	if err != nil {
		return err
	}
	copy(b.offsets, p.offsets)
	clear(b.outcomes)
	for i := range p.ctxs {
		b.ctxs[i] = p.ctxs[i]
		if b.ctxs[i].Desc = g.store.memory.Desc(0); p.cellOf(p.ctxs[i].Object) == 0 {
			t.memory.outcomes[i], b.ctxs[i].Desc = cuda.OutcomeMemory, 0
		}
	}
	w.cells = cuda.KernelCells{Offsets: b.offsetsGPU, Stride: t.cells.Stride, Group: t.cells.Group}
	if g.store.policy != StoreRefuse {
		return nil
	}
	sizes := make([]int, len(t.chunks))
	for i := range sizes {
		sizes[i] = int(t.chunks[i].bytes)
	}
	places, err := g.store.takeAll(sizes)
	for i := range places {
		t.chunks[i].place = places[i]
	}
	return err
}

// evacuate begins chunks that are to be evacuated, in their order: each takes a place in the buffer and a slot of the
// staging, and is gathered.
func (th *ioThread) evacuate() {
	g := th.g
	for len(th.evacs) > 0 {
		t := th.evacs[0]
		for ; t.next < len(t.chunks); t.next++ {
			c := &t.chunks[t.next]
			if g.staging.room(true) == 0 {
				return
			}
			if c.place.count == 0 {
				p, ok, err := g.store.take(int(c.bytes))
				if !ok || err != nil {
					return // until a write ends; an error has ended all batches, or is about to
				}
				c.place = p
			}
			g.staging.take(c)
			c.gathered = gatherRuns
			th.list(c)
		}
		th.evacs = append(th.evacs[:0], th.evacs[1:]...)
	}
}

// moveOut has a chunk that was gathered moved to its place.
func (th *ioThread) moveOut(c *gpuChunk) {
	if c.bytes == 0 { // nothing of it can be stored
		th.evacuated(c, th.now)
		return
	}
	th.g.out.add(c)
}

// evacuated hands a chunk whose bytes are in the buffer over to the batch that writes it.
func (th *ioThread) evacuated(c *gpuChunk, now int64) {
	g, t := th.g, c.t
	g.giveSlot(c)
	w := t.writes
	if d := &w.chunks[c.index]; w.over != nil {
		g.givePlace(c)
	} else {
		d.place, c.place = c.place, place{}
		for i := c.first; i < c.first+c.count; i++ {
			if t.memory.outcomes[i] != cuda.OutcomeOK { // it was not gathered: its write is refused too
				w.memory.ctxs[i].Desc = 0
			}
		}
		w.ready = c.index + 1
		th.deferChunk(d)
	}
	t.progress = now
	th.settle(t, 1)
}

// loseEvacuation fails a chunk that will never come to its place, and its write.
func (th *ioThread) loseEvacuation(c *gpuChunk, err error) {
	t := c.t
	c.gathered, c.pieces = gatherNone, 0
	for i := int(c.first); i < int(c.first+c.count); i++ {
		t.fail(i, err)
	}
	th.g.givePlace(c)
	th.failWrites(t.writes, c.index, err)
	th.settle(t, 1)
}

// failWrites fails the writes of chunks that will not come to the buffer: those from first on.
func (th *ioThread) failWrites(w *gpuTicket, first int, err error) {
	if w.over != nil { // then they have failed
		return
	}
	end := w.limit
	w.limit = min(first, end)
	for i := w.limit; i < end; i++ {
		th.g.failChunk(&w.chunks[i], err)
	}
}

// loseMoves fails what a batch has on its way from the staging to the buffer.
func (th *ioThread) loseMoves(t *gpuTicket, err error) {
	if t.writes == nil {
		return
	}
	for i := range t.chunks {
		if c := &t.chunks[i]; c.gathered == gatherDone && c.place.count > 0 {
			th.loseEvacuation(c, err)
		}
	}
}

// deferChunk lets a write wait for the pacer.
func (th *ioThread) deferChunk(c *gpuChunk) {
	t := c.t
	c.open, c.since = true, th.now
	th.flow.waiting.add(c.size())
	th.g.store.came(c.size())
	th.g.pacer.note(ioEvent{kind: writeQueued, layer: t.layer, ioSize: c.size(), at: c.since})
	switch {
	case slices.Contains(th.deferred, t):
	case t.layer == noLayer: // trailers: Finish waits for nothing else any more
		th.deferred = slices.Insert(th.deferred, 0, t)
	default:
		th.deferred = append(th.deferred, t)
	}
}

// queued counts a batch of reads that may go.
func (th *ioThread) queued(t *gpuTicket) {
	if !t.counted() {
		return
	}
	for i := range t.chunks {
		t.chunks[i].open = true
	}
	th.flow.reads.add(t.size)
	th.g.pacer.note(ioEvent{kind: readQueued, layer: t.layer, ioSize: t.size, at: th.now})
}

// issued counts a chunk that is about to be rung.
func (th *ioThread) issued(c *gpuChunk, now int64) {
	if !c.open {
		return
	}
	kind := readIssued
	if c.rung = now; c.t.deferred {
		kind = writeIssued
		th.flow.waiting.sub(c.size())
		th.flow.writing.add(c.size())
	} else {
		th.flow.reading.add(c.size())
	}
	th.g.pacer.note(ioEvent{kind: kind, layer: c.t.layer, ioSize: c.size(), at: now})
}

// arrived counts a chunk of which the drives have nothing to do any more.
func (th *ioThread) arrived(c *gpuChunk, now int64) {
	if !c.open {
		return
	}
	c.open = false
	f, n, kind := &th.flow, c.size(), readArrived
	switch {
	case c.t.deferred:
		kind = writeArrived
		th.g.store.went(n)
		f.progress = now
		if c.rung != 0 {
			f.writing.sub(n)
		} else {
			f.waiting.sub(n)
		}
	default:
		f.reads.sub(n)
		if c.rung != 0 {
			f.reading.sub(n)
		}
	}
	if c.rung != 0 {
		th.g.pacer.note(ioEvent{kind: kind, layer: c.t.layer, ioSize: n, at: now, took: now - c.rung})
	}
}

// permits says whether a lane may begin its next chunk.
func (th *ioThread) permits(l *gpuLane, now int64) bool {
	c := l.ahead[0]
	switch {
	case !c.open || c.t.over != nil:
		return true
	case l.store:
		return th.mayWrite(c, now)
	}
	return th.mayRead(l, now)
}

// mayRead says whether a lane may begin a chunk of reads. What is behind it in the lane may be awaited too.
func (th *ioThread) mayRead(l *gpuLane, now int64) bool {
	g := th.g
	limit := g.pacer.readAhead(now)
	if limit == math.MaxUint64 {
		return true
	}
	awaited := g.awaits.Load()
	for _, c := range l.ahead {
		if c.t.nth <= awaited {
			return true
		}
	}
	ahead := uint64(0)
	for _, x := range g.lanes {
		if c := x.active; c != nil && c.open && !c.t.write && c.t.nth > awaited {
			ahead += c.payload
		}
	}
	return ahead+l.ahead[0].payload <= limit
}

// mayWrite says whether a deferred write may go. The pacer is asked once a round when it says no.
func (th *ioThread) mayWrite(c *gpuChunk, now int64) bool {
	g, f := th.g, &th.flow
	if f.denied == now {
		return g.store.pressed()
	}
	l := load{
		next: c.size(), deferred: f.waiting, writing: f.writing, reads: f.reads, reading: f.reading, oldest: c.since,
	}
	for _, x := range g.lanes {
		if x.store && len(x.ahead) > 0 {
			l.oldest = min(l.oldest, x.ahead[0].since)
		}
	}
	if g.store.describe(&l) {
		return true
	}
	grant := g.pacer.writes(now, &l)
	if grant.allows(l.next) {
		return true
	}
	f.denied, f.again = now, grant.again
	return false
}

// heldBack says that there is nothing to do but to wait for the pacer.
func (th *ioThread) heldBack() bool {
	f := &th.flow
	return f.denied == th.now && len(th.live) == f.live && th.flying == 0 && f.writing.objects == 0 && !th.looks
}

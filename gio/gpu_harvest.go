package gio

import (
	"unsafe"

	"tuttifs/cuda"
)

// arrivedChunk takes a chunk over from its lane: all of its commands are complete, and its bytes are where they go,
// or in the staging.
func (g *GPU) arrivedChunk(c *gpuChunk) {
	t, th := c.t, &g.thread
	if t.write {
		g.giveSlot(c)
		g.givePlace(c)
		th.settle(t, 1)
		return
	}
	if c.direct && t.sums.Seeds == 0 && !c.failed && c.commands == c.count {
		t.plain++
		th.tell(t)
		th.settle(t, 1)
		return
	}
	if c.listed {
		return
	}
	if c.comes {
		t.coming--
	}
	th.list(c)
}

// comes takes note that the last piece of a read's chunk is enqueued. With that of the batch's last chunk, its last
// harvest can be: behind the copies, in place of when somebody has seen that they ended. So streams can be told to wait
// for the batch while the copy engine is still at it, and whoever enqueues compute behind that is not late.
func (th *ioThread) comes(c *gpuChunk) error {
	t := c.t
	c.comes = true
	t.coming++
	if t.copied == nil || t.listed+t.plain+t.coming < len(t.chunks) {
		return nil
	}
	if err := t.copied.Record(th.g.device.copyIn); err != nil {
		return err
	}
	t.behind = true
	m := &th.g.in
	for i := range m.count {
		if p := &m.pieces[(m.head+i)%len(m.pieces)]; p.last && p.chunk.t == t {
			p.chunk.listed = true
			th.list(p.chunk)
		}
	}
	t.coming = 0
	return nil
}

// failChunk gives every IOCTX of a chunk that has no outcome yet the same one, and has the targets of a read zeroed.
// No controller and no copy touches the chunk's memory any more.
func (g *GPU) failChunk(c *gpuChunk, err error) {
	t, th := c.t, &g.thread
	for i := int(c.first); i < int(c.first+c.count); i++ {
		t.fail(i, err)
	}
	c.failed = true
	th.arrived(c, g.now())
	switch {
	case t.untouched():
		t.plain++
		th.tell(t)
		th.settle(t, 1)
	case !t.write:
		g.giveSlot(c)
		th.list(c)
	case c.gathered == gatherRuns:
		c.late = true
	default:
		if c.gathered == gatherNone {
			c.gathered = gatherDone
			t.plain++
			th.tell(t)
		}
		g.giveSlot(c)
		g.givePlace(c)
		th.settle(t, 1)
	}
}

// untouched says whether a read or the zeroing of targets still waits for their last reader. Its targets stay as they
// are, whatever becomes of it: zeroing them would take the bytes from under that reader.
func (t *gpuTicket) untouched() bool { return !t.write && t.after != nil && !t.began }

// fail records one IOCTX's error.
func (t *gpuTicket) fail(index int, err error) {
	if o := &t.memory.outcomes[index]; *o == cuda.OutcomeOK {
		*o = cuda.OutcomeFailed
		t.failed = append(t.failed, Result{Index: index, Err: err})
	}
}

// list adds a chunk to those that wait for a harvest, or for a gather.
func (th *ioThread) list(c *gpuChunk) {
	t := c.t
	if th.dead {
		th.zeroOnHost(c)
		t.listed++
		t.launched++
		th.tell(t)
		th.settle(t, 1)
		return
	}
	k := &t.memory.moved[t.listed]
	*k = cuda.KernelChunk{First: c.first, Count: c.count}
	switch {
	case c.direct:
	case c.slot != noSlot:
		k.Cells = th.g.staging.address(c)
	default:
		k.Cells = uint64(th.g.staging.memory) // it is not read: no IOCTX of the chunk succeeded
	}
	t.chunks[t.listed].nth = c.index
	if t.launched == t.listed {
		th.listed = append(th.listed, t)
	}
	t.listed++
	t.bytes += int(c.bytes)
}

// launchMoves starts gathers at once, and harvests when enough has arrived, when the batch is all there, or when the
// staging is short; not more often, since beside long kernels each of them waits for an SM. For the same reason a batch
// has one of them under way: what would wait behind it in its stream is better off in one kernel when it has ended.
func (th *ioThread) launchMoves(now int64) (moved bool, err error) {
	g := th.g
	for i := 0; i < len(th.listed); {
		t := th.listed[i]
		all := t.listed+t.plain == len(t.chunks)
		short := th.harvests == 0 && g.staging.slots > 0 && len(g.staging.free) <= g.staging.slots/4
		due := all || t.write || short || t.bytes >= g.gpu.HarvestBytes
		known := t.write || t.verified == nil || t.verified.Load() // the sums
		if !due || !known || t.moving || th.flying == launchesMax {
			i++
			continue
		}
		if err := th.launchMove(t, now); err != nil {
			return moved, err
		}
		moved = true
		th.listed = append(th.listed[:i], th.listed[i+1:]...)
		th.tell(t)
	}
	return moved, nil
}

func (th *ioThread) launchMove(t *gpuTicket, now int64) error {
	g := th.g
	kind, f, count := launchHarvest, g.device.harvest, &g.stats.harvests
	if t.write {
		kind, f, count = launchGather, g.device.gather, &g.stats.gathers
		th.gathers++
	} else {
		th.harvests++
	}
	t.moving = true
	x := th.claim(kind, t, t.launched, t.listed, now)
	x.target = uint32(g.gpu.HarvestBlocks)
	if n := g.pacer.harvestBlocks(now); n > 0 {
		x.target = uint32(min(n, g.gpu.HarvestBlocks))
	}
	p := &th.harvestParams
	*p = cuda.HarvestParams{
		Tables: t.tables.tables, Cells: t.cells, Sums: t.sums, IOCTXs: t.memory.ctxsGPU,
		Chunks:   t.memory.movedGPU + uint64(t.launched)*uint64(unsafe.Sizeof(cuda.KernelChunk{})),
		Outcomes: t.memory.outcomesGPU, Done: x.doneGPU, Blocks: x.blocks,
		ChunkCount: uint32(t.listed - t.launched),
	}
	t.launched, t.bytes = t.listed, 0
	count.Add(1)
	if t.behind {
		t.behind, x.since = false, max(now, g.in.end)
		if err := t.stream.WaitEvent(t.copied); err != nil {
			return err
		}
	}
	return t.stream.Launch(f, x.target, cuda.MoveThreads, 0, unsafe.Pointer(p))
}

// harvested frees the staging of chunks whose bytes are in place, and counts them off.
func (th *ioThread) harvested(t *gpuTicket, from, to int) {
	th.harvests--
	for i := from; i < to; i++ {
		th.g.giveSlot(&t.chunks[t.chunks[i].nth])
	}
	th.settle(t, to-from)
}

// gatherLeast is the staging slots that are worth a kernel of their own for chunks which no lane needs at once.
const gatherLeast = 4

// gatherAhead brings writes' bytes to the staging: those of the chunks that lanes take next first.
func (th *ioThread) gatherAhead() {
	s := &th.g.staging
	for depth := range writeAhead {
		for _, l := range th.g.lanes {
			if depth >= len(l.ahead) {
				continue
			}
			c := l.ahead[depth]
			if !c.t.write || !c.ready || c.gathered != gatherNone || c.t.over != nil {
				continue
			}
			if !c.direct {
				// The last slot is for a chunk that is a lane's next: one that waits behind such a chunk would hold
				// it for ever.
				// What a lane does not need yet is gathered a few chunks at a time.
				room := s.room(true)
				if room == 0 || depth > 0 && room <= gatherLeast && len(th.listed) == 0 || depth > 0 && room == 1 {
					return
				}
				s.take(c)
			}
			c.gathered = gatherRuns
			th.list(c)
		}
	}
}

// gathered lets the lanes have chunks whose bytes are in the staging.
func (th *ioThread) gathered(t *gpuTicket, from, to int) {
	th.gathers--
	for i := from; i < to; i++ {
		c := &t.chunks[t.chunks[i].nth]
		c.gathered = gatherDone
		if t.writes != nil {
			th.moveOut(c)
			continue
		}
		if c.late {
			th.g.giveSlot(c)
			th.settle(t, 1)
		}
	}
}

// tell lets streams wait for a batch whose last kernel is enqueued.
func (th *ioThread) tell(t *gpuTicket) {
	if t.listed == 0 || t.launched < t.listed || t.listed+t.plain < len(t.chunks) || t.inPlace || t.told.Load() {
		return
	}
	if t.event != nil && !th.dead {
		if err := t.event.Record(t.stream); err != nil {
			th.failure = err
			return
		}
	}
	t.tell()
}

// tell ends the waits for what is to be enqueued, once.
func (t *gpuTicket) tell() {
	if !t.told.CompareAndSwap(false, true) {
		return
	}
	close(t.enqueued)
	if t.counted() && !t.write {
		e := ioEvent{kind: readEnded, layer: t.layer, ioSize: t.size, at: t.g.now()}
		if since := t.waiting.Load(); since != 0 {
			e.took = e.at - since
		}
		t.g.pacer.note(e)
	}
}

// settle counts chunks off, and ends the batch with the last one.
func (th *ioThread) settle(t *gpuTicket, n int) {
	if t.settled += n; t.settled == len(t.chunks) {
		th.end(t)
	}
}

// zeroOnHost zeroes the host memory that a failed read's chunk has for its targets: all that can be done when the GPU
// is gone.
func (th *ioThread) zeroOnHost(c *gpuChunk) {
	t := c.t
	for i := c.first; i < c.first+c.count; i++ {
		ctx := &t.memory.ctxs[i]
		if m := th.g.regions.lookup(ctx.Desc); m != nil && t.memory.outcomes[i] != cuda.OutcomeOK {
			clear(m.at(ctx.Desc, t.m.ObjectBytes(ctx.Object)))
		}
	}
}

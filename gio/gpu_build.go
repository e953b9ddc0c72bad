package gio

import (
	"math"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
)

// launch is a kernel that was launched and is not known to be done. Kernels count a word up in pinned memory, which
// costs the host a load to see.
type launch struct {
	kind      launchKind
	done      *uint32
	doneGPU   uint64
	blocks    uint64 // device memory, where the kernel's blocks are counted
	target    uint32
	queues    []cuda.KernelQueue // of a build
	queuesGPU uint64
	t         *gpuTicket
	from, to  int // chunks: of memory.chunks for builds, of memory.moved for others
	run       *pollRun
	since     int64
}

type launchKind uint8

const (
	launchFree launchKind = iota
	launchBuild
	launchHarvest
	launchGather
	launchPoll
)

// launchesMax bounds the kernels under way.
const launchesMax = 16

// buildThreads is the block of the build kernel.
const buildThreads = 256

// claim finds a free launch, nil if all are under way.
func (th *ioThread) claim(kind launchKind, t *gpuTicket, from, to int, now int64) *launch {
	for i := range th.launches {
		if l := &th.launches[i]; l.kind == launchFree {
			l.kind, l.t, l.from, l.to, l.since = kind, t, from, to, now
			t.kernels++
			atomic.StoreUint32(l.done, 0)
			th.flying++
			return l
		}
	}
	return nil
}

// collect takes note of kernels that are done.
func (th *ioThread) collect(now int64) (moved bool) {
	if th.flying == 0 {
		return false
	}
	for i := range th.launches {
		l := &th.launches[i]
		if l.kind == launchFree || atomic.LoadUint32(l.done) < l.target {
			continue
		}
		moved = true
		kind, t := l.kind, l.t
		if kind == launchHarvest || kind == launchGather {
			th.g.stats.moving.Add(uint64(max(0, now-max(l.since, th.movedAt))))
			th.movedAt = now
			t.moving = false
		}
		t.kernels--
		t.progress = now
		l.kind, l.t = launchFree, nil
		th.flying--
		switch kind {
		case launchBuild:
			th.built(t, l.from, l.to)
		case launchHarvest:
			th.g.in.hasten(now) // what it followed has ended, sooner than expected
			th.harvested(t, l.from, l.to)
		case launchGather:
			th.gathered(t, l.from, l.to)
		case launchPoll:
			th.polled(l.run)
		}
	}
	return moved
}

// build has commands written ahead of the doorbells, for batches in their order: reads before writes.
func (th *ioThread) build(now int64) (moved bool, err error) {
	queue := &th.reads
	if len(*queue) == 0 {
		queue = &th.writes
	}
	moved, err = th.buildQueue(queue, now)
	if err != nil {
		return moved, err
	}
	some, err := th.buildQueue(&th.deferred, now)
	return moved || some, err
}

func (th *ioThread) buildQueue(queue *[]*gpuTicket, now int64) (moved bool, err error) {
	for i := 0; i < len(*queue) && !th.g.gpu.Polling; {
		t := (*queue)[i]
		launched, err := th.buildSome(t, now)
		if err != nil {
			return moved, err
		}
		moved = moved || launched
		if t.next < t.ready || len(t.again) > 0 {
			if launched {
				continue
			}
			return moved, nil // no room; others wait their turn
		}
		*queue = append((*queue)[:i], (*queue)[i+1:]...)
	}
	return moved, nil
}

// writeAhead is how many chunks of writes a lane has built: lanes are to be free for reads soon.
const writeAhead = 3

// takes says whether a lane may have chunks of a batch built now.
func (th *ioThread) takes(l *gpuLane, t *gpuTicket) bool {
	if l.state >= laneQuiescing || l.building || l.rewinds || l.store != t.deferred {
		return false
	}
	if th.g.gpu.BuildPerChunk && (l.active != nil || len(l.ahead) > 0) {
		return false
	}
	direction, none := l.direction()
	if !none {
		return direction == t.write && (!t.write || len(l.ahead) < writeAhead)
	}
	return !t.write || t.deferred || th.carrying < int(writeLanes(th.g.alive.Load()))
}

// writing counts the lanes that carry writes.
func (th *ioThread) writing() (n int) {
	for _, l := range th.g.lanes {
		if write, none := l.direction(); write && !none && !l.store {
			n++
		}
	}
	return n
}

// room is how many commands a lane has room for whatever drives they are for.
func (l *gpuLane) room() uint32 {
	room := ^uint32(0)
	for d := range l.queues {
		q := &l.queues[d]
		room = min(room, q.mask-q.count-l.built[d])
	}
	return room - l.unbuilt
}

// load is the bytes of the chunks that a lane has.
func (l *gpuLane) load() (n uint64) {
	if l.active != nil {
		n = l.active.payload
	}
	for _, c := range l.ahead {
		n += c.payload
	}
	return n
}

// carries says whether a lane has chunks, and those of a batch's kind.
func (l *gpuLane) carries(t *gpuTicket) bool {
	write, none := l.direction()
	return !none && write == t.write && l.store == t.deferred
}

// hungry says whether less than half of what a lane may have built is left.
func (l *gpuLane) hungry() bool {
	left := uint32(0)
	for _, c := range l.ahead {
		left += c.count
	}
	return int(left) <= l.g.depth/2
}

// survey looks at what lanes have before a build for a batch is put together. It says whether one is needed.
func (th *ioThread) survey(t *gpuTicket) (hungry bool) {
	if t.write {
		th.carrying = th.writing()
	}
	th.least = math.MaxUint64
	for i, l := range th.g.lanes {
		th.open[i], th.load[i] = th.takes(l, t), l.load()
		hungry = hungry || th.open[i] && (t.write && len(l.ahead) <= 1 || !t.write && l.hungry())
		if l.building && l.state < laneQuiescing && !l.rewinds && l.carries(t) {
			th.least = min(th.least, th.load[i])
		}
	}
	return hungry
}

// buildSome launches one build for a batch: of chunks that were built in vain, one at a time, or of the next ones, as
// many as lanes have room for.
func (th *ioThread) buildSome(t *gpuTicket, now int64) (bool, error) {
	if !th.survey(t) || th.flying == launchesMax {
		return false, nil
	}
	from, again := t.next, false
	if len(t.again) > 0 {
		from, again = t.again[0].index, true
	}
	to := from
	for to < t.limit && (again || to < t.ready) && (!again || to == from) && th.assign(&t.chunks[to]) {
		to++
		if th.g.gpu.BuildPerChunk {
			break
		}
	}
	if to == from {
		return false, nil
	}
	if again {
		t.again = append(t.again[:0], t.again[1:]...)
	} else {
		t.next = to
	}
	return true, th.launchBuild(t, from, to, now)
}

// assign gives a chunk to the lane with the least to do of those that take it, in turns. Lanes that take none because a
// build of theirs is under way will in a moment: until then none gets more than a chunk beyond what they have, or few
// lanes would have all to do while the others rest.
func (th *ioThread) assign(c *gpuChunk) bool {
	number := -1
	for i := range th.g.lanes {
		i = (th.lane + 1 + i) % len(th.g.lanes)
		if th.willing(i, c) && (number < 0 || th.load[i] < th.load[number]) {
			number = i
		}
	}
	if number < 0 || th.load[number] > th.least {
		return false
	}
	th.give(c, number)
	return true
}

// willing says whether a lane takes a chunk.
func (th *ioThread) willing(number int, c *gpuChunk) bool {
	l := th.g.lanes[number]
	if !th.open[number] || l.room() < c.count {
		return false
	}
	if !c.t.write {
		return true
	}
	_, none := l.direction()
	switch {
	case !none:
		return len(l.ahead) < writeAhead
	case l.store:
		return true
	}
	return th.carrying < int(writeLanes(th.g.alive.Load()))
}

// give puts a chunk behind what a lane has.
func (th *ioThread) give(c *gpuChunk, number int) {
	l := th.g.lanes[number]
	if _, none := l.direction(); none && c.t.write && !l.store {
		th.carrying++
	}
	th.lane, th.load[number] = number, th.load[number]+c.payload
	l.ahead = append(l.ahead, c)
	l.unbuilt += c.count
	k := &c.t.memory.chunks[c.index]
	*k = cuda.KernelChunk{First: c.first, Count: c.count, Lane: uint32(l.number)}
	switch {
	case c.place.count > 0:
		k.Cells = th.g.store.address(c.place)
	case !c.direct:
		k.Cells = l.cellsBase
	}
	if th.g.gpu.BuildPerChunk {
		th.open[number] = false
	}
}

func (th *ioThread) launchBuild(t *gpuTicket, from, to int, now int64) error {
	g := th.g
	x := th.claim(launchBuild, t, from, to, now)
	drives := len(g.config.Lanes[0])
	for i := from; i < to; i++ {
		g.lanes[t.memory.chunks[i].Lane].building = true
	}
	for i, l := range g.lanes {
		if !l.building {
			continue
		}
		for d := range l.queues {
			q := &l.queues[d]
			x.queues[i*drives+d] = cuda.KernelQueue{
				SQ: l.addresses[d].sq, CQ: l.addresses[d].cq, Mask: q.mask,
				Tail: l.next(d), FirstID: uint32(q.firstID) + q.count + l.built[d],
				LBAShift: uint32(q.lbaShift), NSID: q.namespace,
			}
		}
	}
	p := &th.buildParams
	*p = cuda.BuildParams{
		Tables: t.tables.tables, Cells: t.cells, IOCTXs: t.memory.ctxsGPU,
		Chunks:   t.memory.chunksGPU + uint64(from)*uint64(unsafe.Sizeof(cuda.KernelChunk{})),
		Counts:   t.memory.countsGPU + uint64(from*drives)*uint64(unsafe.Sizeof(cuda.KernelCount{})),
		Outcomes: t.memory.outcomesGPU, Queues: x.queuesGPU, Done: x.doneGPU, Blocks: x.blocks,
		PRPBase: g.prp.base, PRPDMA: g.prp.dma,
		ChunkCount: uint32(to - from), Lanes: uint32(len(g.lanes)), Drives: uint32(drives),
		CellBytes: uint32(g.staging.bytes),
	}
	if t.deferred && g.store != nil {
		p.CellBytes = uint32(g.store.piece)
	}
	if t.write {
		p.Write = 1
	}
	if g.config.SGL {
		p.SGL = 1
	}
	x.target = p.Lanes * p.Drives
	g.stats.builds.Add(1)
	return g.device.buildS.Launch(g.device.build, x.target, buildThreads, 0, unsafe.Pointer(p))
}

// next is where the command after those that are built goes.
func (l *gpuLane) next(d int) uint32 {
	q := &l.queues[d]
	next := q.tail + l.built[d]
	if l.state == laneLoading || q.held { // the active chunk is not rung yet
		next += q.count
	}
	return next & q.mask
}

// built takes the chunks of a build over.
func (th *ioThread) built(t *gpuTicket, from, to int) {
	drives := len(th.g.config.Lanes[0])
	for i := from; i < to; i++ {
		c := &t.chunks[i]
		l := th.g.lanes[t.memory.chunks[i].Lane]
		l.building = false
		l.unbuilt -= c.count
		c.commands, c.ready = 0, true
		for d, n := range t.memory.counts[i*drives : (i+1)*drives] {
			l.built[d] += n.Commands
			c.commands += n.Commands
		}
		if t.write && c.gathered == gatherNone && (c.direct && t.sums.Seeds == 0 || c.commands == 0) {
			c.gathered = gatherDone
			t.plain++
			th.tell(t)
		}
	}
}

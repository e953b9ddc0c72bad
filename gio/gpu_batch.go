package gio

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
)

// GPUTicket is a batch in flight of a GPU executor.
type GPUTicket interface {
	Ticket
	// WaitOn makes everything that is enqueued on s from now on wait for the batch: for a read until its bytes are in
	// place, for a write until its source may be changed. It blocks until the kernels that do it are enqueued, since
	// a stream cannot wait for what is not there yet: for a read mostly until the copy engine has come to its last
	// piece. Outcomes are told by Wait.
	WaitOn(s *cuda.Stream) error
}

// gpuTicket is a batch in flight. Fields below "I/O thread" are that thread's until done is closed.
type gpuTicket struct {
	g        *GPU
	m        *Map
	tables   *deviceMap
	n        int
	write    bool
	zeroing  bool // no commands: all targets are zeroed
	aside    bool // nobody's layer waits for the lanes because of it: a deferred write, or trailers
	deferred bool // a write that waits for the pacer: of the store buffer, or trailers
	layer    int32
	writes   *gpuTicket // of an evacuation, which has no commands: what writes its bytes from the store buffer
	bounced  bool       // polling only: through the lanes' cells
	inPlace  bool       // a write of which controllers read the source itself: that is theirs until the end
	memory   batchMemory
	cells    cuda.KernelCells
	sums     cuda.SumsParams
	verified *atomic.Bool // nil, or whether the sums of a read are known: it is harvested then
	chunks   []gpuChunk
	nth      int64 // of the reads
	size     ioSize
	after    *cuda.Event  // nothing is touched before it
	began    bool         // I/O thread: it has come, or there is none
	stream   *cuda.Stream // of all its harvests or gathers
	event    *cuda.Event  // of the last one; nil where nobody waits on it
	copied   *cuda.Event  // of a read: that all of it is in the staging; likewise
	memories []*Memory

	enqueued chan struct{} // closed when WaitOn has what it waits for
	done     chan struct{}
	ended    atomic.Bool  // done is closed, or about to be
	told     atomic.Bool  // enqueued is closed, or about to be
	waiting  atomic.Int64 // since when somebody waits, 0: nobody
	hung     error        // set before done is closed, when the I/O thread hangs
	kept     bool         // likewise, when a kernel or a copy hangs: nothing that the batch has is given back

	mu       sync.Mutex // guards released, with which the outcomes are in failed and the rest has gone back
	released bool

	// I/O thread.
	next     int         // first chunk that was not built yet; of an evacuation, that was not begun
	ready    int         // the first that may not be built yet
	limit    int         // the first that never will be, since its bytes never came to the store buffer
	again    []*gpuChunk // built in vain: their lane was quiesced, or rewound
	listed   int         // chunks in memory.moved
	plain    int         // chunks that need no harvest or gather
	launched int         // of those listed
	bytes    int         // of those listed and not launched
	settled  int         // chunks that are over
	over     error       // why the batch was given up
	kernels  int         // under way for it
	moving   bool        // one of them is a harvest or gather
	coming   int         // chunks that are not listed, and whose last pieces are enqueued
	behind   bool        // what is listed and not launched is to wait for copied
	progress int64       // when the last one ended, or a chunk arrived
	late     bool        // a chunk missed its deadline
	failed   []Result
}

// gpuChunk is a piece of a batch: consecutive IOCTXs that one lane carries at a time.
type gpuChunk struct {
	t        *gpuTicket
	index    int
	nth      int // of the place with this chunk's index in memory.moved: the index of the chunk that stands there
	first    uint32
	count    uint32
	bytes    uint32 // of cells
	commands uint32 // once built
	payload  uint64 // bytes, for statistics
	slot     int32  // of staging, noSlot
	at       uint32 // where its cells begin in the slot
	direct   bool
	ready    bool // its commands stand in a lane's queues
	gathered gatherState
	comes    bool // its last piece is enqueued
	listed   bool // before that was seen to have ended
	failed   bool // at least in part
	late     bool // failed while it was gathered: over when that is

	lane   *gpuLane // whose cells its bytes are moved from or to; nil: the place in the store buffer
	place  place    // of an evacuation, and then of its write
	pieces int      // copies under way
	since  int64    // when it was deferred
	rung   int64    // when it was given to the drives
	open   bool     // it is counted as to be done
}

// size is what pacers count.
func (c *gpuChunk) size() ioSize { return ioSize{objects: uint64(c.count), bytes: c.payload} }

const noSlot = -1

type gatherState uint8

const (
	gatherNone gatherState = iota
	gatherRuns
	gatherDone
)

// batchMemory is what a batch has in pinned memory.
type batchMemory struct {
	pinned   *pinned
	ctxs     []IOCTX
	chunks   []cuda.KernelChunk // as built: lanes' cells
	moved    []cuda.KernelChunk // as harvested or gathered: staging, in the order of launches
	counts   []cuda.KernelCount // [chunk*drives+drive]
	outcomes []uint8
	statuses []uint16 // polling only
	active   []uint32 // of a layer
	ordinals []uint16

	ctxsGPU, chunksGPU, movedGPU, countsGPU, outcomesGPU, statusesGPU, offsetsGPU uint64
	offsets                                                                       []uint32
	activeGPU, ordinalsGPU                                                        uint64
}

// batchSizes are the lengths of its parts.
type batchSizes struct{ ctxs, chunks, drives, group, active, ordinals, statuses int }

func (b *batchMemory) carve(c *carver, s *batchSizes) {
	b.ctxs, b.ctxsGPU = carve[IOCTX](c, s.ctxs)
	b.chunks, b.chunksGPU = carve[cuda.KernelChunk](c, s.chunks)
	b.moved, b.movedGPU = carve[cuda.KernelChunk](c, s.chunks)
	b.counts, b.countsGPU = carve[cuda.KernelCount](c, s.chunks*s.drives)
	b.outcomes, b.outcomesGPU = carve[uint8](c, s.ctxs)
	b.statuses, b.statusesGPU = carve[uint16](c, s.statuses)
	b.offsets, b.offsetsGPU = carve[uint32](c, s.group)
	b.active, b.activeGPU = carve[uint32](c, s.active)
	b.ordinals, b.ordinalsGPU = carve[uint16](c, s.ordinals)
}

// take takes it from the pool.
func (b *batchMemory) take(g *GPU, s *batchSizes) (err error) {
	measure := carver{}
	b.carve(&measure, s)
	if b.pinned, err = g.pool.get(g, measure.at); err != nil {
		return err
	}
	b.carve(&carver{host: b.pinned.memory.Bytes, gpu: uint64(b.pinned.memory.GPU)}, s)
	return nil
}

// batchOptions are what only some batches have.
type batchOptions struct {
	layer    int32 // noLayer
	evacuate bool  // to the store buffer
	deferred bool
	after    *cuda.Event
	quiet    bool // nobody waits on it by a stream
	zeroing  bool
	sums     *cuda.SumsParams // all but the batch's own parts
	verified *atomic.Bool     // says whether a read's sums are known
	active   []uint32
	ordinals []uint16
}

// Issue queues a batch of any length; the Ticket is a GPUTicket. ctxs is the caller's again at once, the buffers are
// when Wait, which is called exactly once, has returned.
func (g *GPU) Issue(write bool, m *Map, ctxs []IOCTX) (Ticket, error) {
	t, err := g.issue(write, m, ctxs, batchOptions{layer: noLayer})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// IssueAfter queues a batch that touches its buffers only after an event of the engine's, if it is not nil: the
// target's last reader, or the compute that produced the source. The event was recorded before and stays alive until
// Wait.
func (g *GPU) IssueAfter(write bool, m *Map, ctxs []IOCTX, after *cuda.Event) (GPUTicket, error) {
	t, err := g.issue(write, m, ctxs, batchOptions{layer: noLayer, after: after})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (g *GPU) issue(write bool, m *Map, ctxs []IOCTX, o batchOptions) (*gpuTicket, error) {
	release, err := g.hold()
	if err != nil {
		return nil, err
	}
	defer release()
	return g.issueHeld(write, m, ctxs, o)
}

func (g *GPU) issueHeld(write bool, m *Map, ctxs []IOCTX, o batchOptions) (*gpuTicket, error) {
	if m == nil {
		return nil, fmt.Errorf("%w: no extent map", ErrInvalid)
	}
	if err := g.usable(); err != nil && !o.zeroing {
		return nil, err
	}
	t := g.newTicket(m, len(ctxs), write, &o)
	t.memories = g.regions.hold(ctxs)
	if err := t.prepare(ctxs, &o); err != nil {
		t.abandon()
		return nil, err
	}
	if err := g.enqueue(t); err != nil {
		t.abandon()
		return nil, err
	}
	return t, nil
}

func (g *GPU) newTicket(m *Map, n int, write bool, o *batchOptions) *gpuTicket {
	return &gpuTicket{
		g: g, m: m, n: n, write: write, zeroing: o.zeroing, deferred: o.deferred, layer: o.layer, after: o.after,
		aside: o.deferred || o.quiet, verified: o.verified,
		enqueued: make(chan struct{}), done: make(chan struct{}),
	}
}

// abandon gives back what a batch has that was never enqueued.
func (t *gpuTicket) abandon() {
	if w := t.writes; w != nil {
		for i := range t.chunks {
			t.g.store.free(t.chunks[i].place)
		}
		w.release()
	}
	t.release()
}

func (g *GPU) usable() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.usableLocked()
}

func (g *GPU) usableLocked() error {
	if g.closed {
		return ErrClosed
	}
	if err := g.broken.Load(); err != nil {
		return *err
	}
	if g.alive.Load() == 0 {
		return fmt.Errorf("%w: %w", ErrDead, errNoLane)
	}
	return nil
}

// hangs says whether the I/O thread was given up.
func (g *GPU) hangs() bool {
	select {
	case <-g.stuck:
		return true
	default:
		return false
	}
}

func (g *GPU) enqueue(t *gpuTicket) error {
	g.mu.Lock()
	// Targets are zeroed by a ring that is broken, too.
	if err := g.usableLocked(); err != nil && (!t.zeroing || g.closed || g.hangs()) {
		g.mu.Unlock()
		return err
	}
	if (t.deferred || t.writes != nil) && g.stores.Load() == 0 {
		g.mu.Unlock()
		return fmt.Errorf("%w: %w for what is stored", ErrDead, errNoLane)
	}
	if t.n == 0 {
		g.mu.Unlock()
		t.ended.Store(true)
		close(t.enqueued)
		close(t.done)
		return nil
	}
	if t.writes != nil { // it is there before what might fail it
		g.incoming = append(g.incoming, t.writes)
		g.live = append(g.live, t.writes)
	}
	g.incoming = append(g.incoming, t)
	g.live = append(g.live, t)
	if !t.aside {
		g.busy.Add(1)
	}
	if !t.write {
		g.reads++
		t.nth = g.reads
	}
	g.mu.Unlock()
	g.ring()
	return nil
}

// prepare plans the chunks and brings what kernels need of the batch to where they see it.
func (t *gpuTicket) prepare(ctxs []IOCTX, o *batchOptions) (err error) {
	g := t.g
	if t.n == 0 {
		return nil
	}
	if t.tables, err = g.maps.get(g, t.m); err != nil {
		return err
	}
	if !o.quiet {
		if t.event, err = g.events.get(g); err != nil {
			return err
		}
		if !t.write && !g.gpu.Polling {
			if t.copied, err = g.events.get(g); err != nil {
				return err
			}
		}
	}
	p := planner{t: t, ctxs: ctxs}
	switch {
	case g.gpu.Polling:
		p.planWhole()
	case o.evacuate:
		p.planEvacuation()
	default:
		p.plan()
		t.inPlace = t.write && slices.ContainsFunc(t.chunks, func(c gpuChunk) bool { return c.direct })
	}
	t.ready, t.limit = len(t.chunks), len(t.chunks)
	for i := range t.chunks {
		t.size.objects += uint64(t.chunks[i].count)
		t.size.bytes += t.chunks[i].payload
	}
	sizes := batchSizes{
		ctxs: t.n, chunks: len(t.chunks), drives: len(g.config.Lanes[0]), group: len(p.offsets),
		active: len(o.active), ordinals: len(o.ordinals),
	}
	if g.gpu.Polling {
		sizes.statuses = t.n
	}
	b := &t.memory
	if err := b.take(g, &sizes); err != nil {
		return err
	}
	copy(b.ctxs, ctxs)
	copy(b.offsets, p.offsets)
	copy(b.active, o.active)
	copy(b.ordinals, o.ordinals)
	outcome := cuda.OutcomeOK
	if t.zeroing {
		outcome = cuda.OutcomeFailed
	}
	for i := range b.outcomes {
		b.outcomes[i] = outcome
	}
	t.cells = cuda.KernelCells{Offsets: b.offsetsGPU, Stride: p.stride, Group: uint32(len(p.offsets))}
	if o.sums != nil {
		t.sums = *o.sums
		t.sums.Active, t.sums.Ordinals, t.sums.PerSlot = b.activeGPU, b.ordinalsGPU, uint32(len(o.ordinals))
	}
	if o.evacuate {
		return t.prepareWrites(&p)
	}
	return nil
}

// planner cuts a batch into chunks and packs their cells. Kernels find an IOCTX's cell by arithmetic, so that cells
// repeat by groups: of the objects of a layer's slot, mostly. Where the objects' lengths do not repeat, all cells are
// as long as the longest.
type planner struct {
	t       *gpuTicket
	ctxs    []IOCTX
	offsets []uint32 // of the cells of a group
	stride  uint32
	limit   int // commands of a chunk
	most    int // bytes of a lane's cells, 0: nothing is bounced
	parts   int // so many chunks share them; 0: one has them all
}

// groupMax bounds the search for a pattern.
const groupMax = 1024

// restParts are the chunks of a read for which a lane has cells where nothing else is under way.
const restParts = 3

func (p *planner) plan() {
	g := p.t.g
	p.most = g.staging.bytes
	lanes := g.common()
	switch {
	case p.t.deferred:
		lanes = g.config.StoreLanes
	case p.t.write:
		lanes = int(writeLanes(int32(lanes)))
	}
	p.limit = max(chunkLeast, (p.t.n+lanes-1)/lanes)
	if c := g.config.ChunkCommands; c > 0 {
		p.limit = min(p.limit, c)
	}
	// Half of a queue at most, so that the next chunk can be built while this one is under way.
	p.limit = max(1, min(p.limit, g.depth/2))
	direct, bounce := 0, 0
	kinds := kindOf{t: p.t}
	for i := range p.ctxs {
		if p.ctxs[i].Flags != 0 {
			continue
		} else if kinds.direct(&p.ctxs[i]) {
			direct++
		} else {
			bounce++
		}
	}
	group := 1
	if direct == 0 || bounce == 0 {
		group = p.period()
	}
	p.pack(group)
	if !p.t.write && g.busy.Load() == 0 {
		p.parts = restParts
	}
	if direct > 0 && bounce > 0 {
		p.cutMixed()
		return
	}
	p.cut(0, p.t.n, bounce == 0)
}

// cellOf is the bytes of an object's cell, 0 for one that no cell can hold: it is refused.
func (p *planner) cellOf(object uint16) uint32 {
	if int(object) >= len(p.t.m.objects) {
		return 0
	}
	n := uint32(p.t.m.objects[object].units) * pageBytes
	if int(n) > p.most {
		return 0
	}
	return n
}

// period is the length of the shortest group of IOCTXs whose objects repeat all through the batch, 1 if there is
// none.
func (p *planner) period() int {
	n := 1
	for n < len(p.ctxs) && p.ctxs[n].Object != p.ctxs[0].Object {
		if n++; n > min(groupMax, p.limit) {
			return 1
		}
	}
	if n > min(groupMax, p.limit) {
		return 1
	}
	room := 0
	for i := range p.ctxs {
		if i >= n && p.ctxs[i].Object != p.ctxs[i-n].Object {
			return 1
		}
		if i < n {
			room += int(p.cellOf(p.ctxs[i].Object))
		}
	}
	if room > p.most {
		return 1
	}
	return n
}

func (p *planner) pack(group int) {
	p.offsets = make([]uint32, group)
	if group > 1 {
		for i := range p.offsets {
			p.offsets[i] = p.stride
			p.stride += p.cellOf(p.ctxs[i].Object)
		}
		return
	}
	for i := range p.ctxs {
		p.stride = max(p.stride, p.cellOf(p.ctxs[i].Object))
	}
}

// cut makes chunks of the IOCTXs from first to end. Drives serve all lanes at once, so that chunks which are rung
// together arrive together, and until then the copy engine rests: where nothing else is under way they are short. So
// few cells are used again and again then, which are in the CPU's caches soon.
func (p *planner) cut(first, end int, direct bool) {
	group := len(p.offsets)
	n := max(group, p.limit/group*group)
	if !direct && p.stride > 0 {
		n = max(group, min(n, p.most/max(1, p.parts)/int(p.stride)*group))
	}
	if p.t.chunks == nil {
		p.t.chunks = make([]gpuChunk, 0, (end-first+n-1)/n)
	}
	for first < end {
		c := gpuChunk{t: p.t, index: len(p.t.chunks), first: uint32(first), direct: direct, slot: noSlot}
		length := min(n, end-first)
		first += length
		c.count = uint32(length)
		if !direct {
			c.bytes = p.bytes(int(c.count))
		}
		c.payload = p.payload(first-length, first)
		p.t.chunks = append(p.t.chunks, c)
	}
}

// payload is the bytes of the IOCTXs from first to end.
func (p *planner) payload(first, end int) (n uint64) {
	for i := first; i < end; i++ {
		if p.ctxs[i].Flags == 0 {
			n += uint64(p.t.m.ObjectBytes(p.ctxs[i].Object))
		}
	}
	return n
}

// bytes is what the cells of n IOCTXs from a group's start take.
func (p *planner) bytes(n int) uint32 {
	group := len(p.offsets)
	bytes := uint32(n/group) * p.stride
	if rest := n % group; rest > 0 {
		bytes += p.offsets[rest]
	}
	return bytes
}

// cutMixed cuts where direct and bounced IOCTXs meet: a chunk is one or the other as a whole.
func (p *planner) cutMixed() {
	p.t.chunks = make([]gpuChunk, 0, 16)
	kinds := kindOf{t: p.t}
	for first := 0; first < len(p.ctxs); {
		direct, end := kinds.direct(&p.ctxs[first]), first+1
		for end < len(p.ctxs) && kinds.direct(&p.ctxs[end]) == direct {
			end++
		}
		p.cut(first, end, direct)
		first = end
	}
}

// kindOf tells which IOCTXs controllers reach directly. It remembers the last memory, since most batches have one.
type kindOf struct {
	t        *gpuTicket
	id       uint64
	last     *Memory
	previous bool
}

func (k *kindOf) direct(ctx *IOCTX) bool {
	if ctx.Flags == 0 { // others have nothing to move and go with those before
		k.previous = k.reached(ctx)
	}
	return k.previous
}

func (k *kindOf) reached(ctx *IOCTX) bool {
	g := k.t.g
	if g.staging.bytes == 0 {
		return true // or refused
	}
	if id := ctx.Desc >> offsetBits; k.last == nil || id != k.id {
		k.id, k.last = id, g.regions.lookup(ctx.Desc)
	}
	m := k.last
	if m == nil || !m.direct {
		return false
	}
	payload := k.t.m.ObjectBytes(ctx.Object)
	units := (payload + pageBytes - 1) &^ (pageBytes - 1)
	if m.device.paged != nil {
		return payload == units
	}
	at := ctx.Desc & (1<<offsetBits - 1)
	room := payload == units || m.padded && at <= uint64(len(m.buf)) && uint64(units) <= uint64(len(m.buf))-at
	return room && (m.base+at)%4 == 0
}

// WaitOn makes a stream wait for the batch; see GPUTicket.
func (t *gpuTicket) WaitOn(s *cuda.Stream) error {
	t.awaited()
	<-t.enqueued
	if t.ended.Load() {
		<-t.done
		return t.hung
	}
	return t.g.onThread(func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.released || t.event == nil {
			return nil
		}
		return s.WaitEvent(t.event)
	})
}

// Done says whether Wait would return at once.
func (t *gpuTicket) Done() bool {
	select {
	case <-t.done:
		return true
	default:
		return false
	}
}

// Wait blocks until the batch is complete; see Ring.Wait.
func (g *GPU) Wait(ticket Ticket) ([]Result, error) {
	t, ours := ticket.(*gpuTicket)
	if !ours || t.g != g {
		return nil, fmt.Errorf("%w: a ticket of another executor", ErrInvalid)
	}
	return g.wait(t)
}

// awaited tells that somebody waits, which is when a batch begins to be given up for want of progress.
func (t *gpuTicket) awaited() {
	g := t.g
	now := g.now()
	if !t.waiting.CompareAndSwap(0, max(1, now)) || t.write || !t.counted() || t.ended.Load() {
		return
	}
	// The pacer hears of it before anything is issued for that reason.
	g.pacer.note(ioEvent{kind: readAwaited, layer: t.layer, ioSize: t.size, at: now})
	for last := g.awaits.Load(); last < t.nth && !g.awaits.CompareAndSwap(last, t.nth); {
		last = g.awaits.Load()
	}
}

// counted says whether pacers hear of a batch.
func (t *gpuTicket) counted() bool {
	return t.g.paced && !t.zeroing && (!t.write || t.deferred) && t.n > 0
}

// outcome is wait for a deferred write.
func (t *gpuTicket) outcome() ([]Result, error) { return t.g.wait(t) }

func (g *GPU) wait(t *gpuTicket) ([]Result, error) {
	t.awaited()
	<-t.done
	if t.hung != nil {
		// The I/O thread may still touch all that the batch has: it is never given back.
		failed := make([]Result, t.n)
		for i := range failed {
			failed[i] = Result{Index: i, Err: t.hung}
		}
		return failed, t.hung
	}
	failed := t.conclude()
	if err := g.broken.Load(); err != nil && len(failed) > 0 {
		return failed, *err
	}
	return failed, nil
}

// conclude takes the outcomes of a batch that has ended, and gives back what it holds.
func (t *gpuTicket) conclude() []Result {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.released {
		return t.failed
	}
	t.failed = t.results()
	t.g.mu.Lock()
	t.g.live = slices.DeleteFunc(t.g.live, func(x *gpuTicket) bool { return x == t })
	t.g.mu.Unlock()
	if t.kept {
		t.released = true
	} else {
		t.release()
	}
	return t.failed
}

// results are the failed IOCTXs in batch order.
func (t *gpuTicket) results() []Result {
	if t.zeroing {
		return nil
	}
	failed := t.failed
	for i := 0; i < len(t.memory.outcomes); i++ {
		if i%8 == 0 && i+8 <= t.n && *(*uint64)(unsafe.Pointer(&t.memory.outcomes[i])) == 0 {
			i += 7
			continue
		}
		switch o := t.memory.outcomes[i]; o {
		case cuda.OutcomeOK, cuda.OutcomeFailed:
		default:
			failed = append(failed, Result{Index: i, Err: t.refusal(i, o)})
		}
	}
	slices.SortFunc(failed, func(a, b Result) int { return cmp.Compare(a.Index, b.Index) })
	return failed
}

// refusal is the error of an outcome that a kernel gave.
func (t *gpuTicket) refusal(i int, outcome uint8) error {
	ctx, payload := &t.memory.ctxs[i], t.m.ObjectBytes(t.memory.ctxs[i].Object)
	switch outcome {
	case cuda.OutcomeUnmapped:
		if drive, _, _, ok := t.m.Locate(ctx.Slot, ctx.Object); ok {
			return fmt.Errorf("%w: slot %d object %d lies on drive %d, to which the ring has no queue",
				ErrUnmapped, ctx.Slot, ctx.Object, drive)
		}
		return fmt.Errorf("%w: slot %d object %d", ErrUnmapped, ctx.Slot, ctx.Object)
	case cuda.OutcomeInvalid:
		return fmt.Errorf("%w: flags %#x", ErrInvalid, ctx.Flags)
	case cuda.OutcomeChecksum:
		t.g.stats.checksums.Add(1)
		return fmt.Errorf("%w: slot %d object %d", ErrChecksum, ctx.Slot, ctx.Object)
	}
	if t.writes != nil {
		return fmt.Errorf("%w: descriptor %#x of %d bytes; a piece of the store buffer has %d bytes",
			ErrMemory, ctx.Desc, payload, t.g.pieceBytes())
	}
	if cells := t.g.staging.bytes; cells > 0 && int(payload) > cells {
		return fmt.Errorf("%w: %d bytes must be bounced, a lane has %d bytes of cells", ErrMemory, payload, cells)
	}
	return fmt.Errorf("%w: descriptor %#x of %d bytes", ErrMemory, ctx.Desc, payload)
}

// release gives back what the batch holds. Nothing of it is in flight any more. t.mu is held, or nobody knows of t.
func (t *gpuTicket) release() {
	letGo(t.memories)
	t.memories = nil
	t.released = true
	for _, e := range [...]**cuda.Event{&t.event, &t.copied} {
		if *e != nil {
			t.g.events.put(*e)
			*e = nil
		}
	}
	if t.tables != nil {
		t.g.maps.put(t.tables)
		t.tables = nil
	}
	if t.memory.pinned != nil {
		t.g.pool.put(t.memory.pinned)
		t.memory.pinned = nil
	}
}

package gio

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"tuttifs/checksum"
)

// SlotIO is one slot of a layer verb.
type SlotIO struct {
	Slot uint32
	Seed checksum.Seed
}

// scratch is DMA memory in which trailers pass by, a round at a time.
type scratch struct {
	mu     sync.Mutex
	memory *Memory
}

// layerState is what the layer verbs of all executors keep for one batch of slots and one rank: the slots' trailers
// (read and verified at first, or collected for a store). Several layers may be in flight; methods are safe for
// concurrent use, but not Finish and Close beside others.
//
// A slot fails alone: its targets are zeroed, it is skipped from then on and Failed says why. The error that a verb
// itself returns is about the batch: a wrong argument, or a ring that is gone.
type layerState struct {
	base    *base
	issue   issueTrailers
	m       *Map
	rank    uint16
	slots   []SlotIO
	objects int // of the rank, trailer not counted
	store   bool
	sums    []uint64 // [slot*objects + ordinal in rank]
	owned   []uint64 // places of storeOwners

	// anyFailed says that failed has an error. All slots are asked about for every layer, and nearly never has one failed.
	anyFailed atomic.Bool

	mu       sync.Mutex
	failed   []error // by slot, the first of each
	stored   []bool  // by ordinal, once a ticket that wrote it has been waited for
	deferred []deferredPart
	closed   bool
	draining sync.Mutex // held by whoever waits for what was deferred
}

// deferredPart is a write from the store buffer that nobody has waited for yet.
type deferredPart struct {
	active []uint32 // slots of the layer's IOCTXs, each objects of them
	each   int
	first  int // the part's first IOCTX in the layer
	write  deferredWrite
}

type deferredWrite interface {
	awaited() // says that outcome is about to be called
	outcome() ([]Result, error)
}

// defers keeps a write for Finish.
func (l *layerState) defers(b *layerBatch, first int, w deferredWrite) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deferred = append(l.deferred, deferredPart{active: b.active, each: len(b.objects), first: first, write: w})
}

// drain waits for the writes that were deferred, and gives slots their errors. Its own error is for the whole.
func (l *layerState) drain() (err error) {
	l.draining.Lock()
	defer l.draining.Unlock()
	l.mu.Lock()
	parts := l.deferred
	l.deferred = nil
	l.mu.Unlock()
	for i := range parts {
		parts[i].write.awaited()
	}
	for i := range parts {
		p := &parts[i]
		failed, whole := p.write.outcome()
		for _, f := range failed {
			l.failSlot(int(p.active[(p.first+f.Index)/p.each]), f.Err)
		}
		if err == nil {
			err = whole
		}
	}
	return err
}

// init checks the arguments. sums makes room for so many.
func (l *layerState) init(m *Map, rank uint16, slots []SlotIO, sums func(n int) ([]uint64, error)) (err error) {
	if m == nil || int(rank) >= m.layout.Ranks() {
		return fmt.Errorf("%w: rank %d of a geometry without it", ErrInvalid, rank)
	}
	l.m, l.rank, l.slots = m, rank, slots
	l.objects = len(m.layout.RankObjects(rank))
	l.failed, l.stored = make([]error, len(slots)), make([]bool, l.objects)
	l.sums, err = sums(l.objects * len(slots))
	return err
}

// open reads and verifies the trailers.
func (l *layerState) open() error { return l.trailers(false, l.verifyTrailer) }

// verifyTrailer takes a slot's sums from its trailer. Those of a bad one stay 0.
func (l *layerState) verifyTrailer(i int, b []byte) {
	object := l.m.layout.TrailerObject(l.rank)
	if !checksum.ParseTrailer(b, l.slots[i].Seed, l.rank, object, l.slotSums(i)) {
		l.failSlot(i, fmt.Errorf("%w: trailer of slot %d rank %d", ErrChecksum, l.slots[i].Slot, l.rank))
	}
}

// ringLayers is the layer verbs on the CPU.
type ringLayers struct {
	layerState
	ring *Ring
}

func (r *Ring) newLayers(m *Map, rank uint16, slots []SlotIO, store bool) (*ringLayers, error) {
	l := &ringLayers{ring: r, layerState: layerState{base: &r.base, issue: r.issueTrailers, store: store}}
	return l, l.init(m, rank, slots, func(n int) ([]uint64, error) { return make([]uint64, n), nil })
}

// issueTrailers begins to move a batch of trailers; wait has its outcome, and is called once. Those that are written
// are deferred like what they are about.
type issueTrailers func(write bool, m *Map, ctxs []IOCTX) (wait func() ([]Result, error), err error)

func (r *Ring) issueTrailers(write bool, m *Map, ctxs []IOCTX) (wait func() ([]Result, error), err error) {
	t, err := r.issueTicket(&ringTicket{
		ring: r, m: m, ctxs: ctxs, write: write, deferred: write && r.store != nil, layer: noLayer,
	})
	if err != nil {
		return nil, err
	}
	return func() ([]Result, error) { return r.wait(t) }, nil
}

// OpenLayers prepares restoring: it reads and verifies the rank's trailers of all slots. Slots whose trailer is bad
// are reported by Failed. The caller leaves slots alone until Close.
func (r *Ring) OpenLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) {
	l, err := r.newLayers(m, rank, slots, false)
	if err != nil {
		return nil, err
	}
	if err := l.open(); err != nil {
		return nil, err
	}
	return l, nil
}

// CreateLayers prepares storing.
func (r *Ring) CreateLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) {
	l, err := r.newLayers(m, rank, slots, true)
	if err != nil {
		return nil, err
	}
	l.own()
	return l, nil
}

func (l *layerState) slotSums(i int) []uint64 { return l.sums[i*l.objects : (i+1)*l.objects] }

// trailers moves the trailers of all slots that have not failed through the scratch memory, and calls each with every
// one: after it was read, or to fill it before it is written.
func (l *layerState) trailers(write bool, each func(i int, b []byte)) error {
	s := l.base.scratchFor(write)
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := l.round(s)
	if err != nil {
		return err
	}
	for next := 0; next < len(l.slots); {
		next = r.fill(next, write, each)
		wait, err := l.issue(write, l.m, r.ctxs)
		if err != nil {
			return err
		}
		failed, err := wait()
		if err != nil {
			return err
		}
		r.settle(failed, write, each)
	}
	return nil
}

// scratchFor is the scratch memory of a direction.
func (b *base) scratchFor(write bool) *scratch {
	if write {
		return &b.scratch[1]
	}
	return &b.scratch[0]
}

// trailerRound is the trailers that are in the scratch memory at a time.
type trailerRound struct {
	l       *layerState
	s       *scratch // locked
	payload int
	room    int // of one trailer in the memory
	most    int // of a round
	ctxs    []IOCTX
	index   []int // their slots
}

// round prepares for rounds. The scratch memory is the caller's.
func (l *layerState) round(s *scratch) (*trailerRound, error) {
	r := &trailerRound{l: l, s: s, payload: int(l.m.ObjectBytes(l.m.layout.TrailerObject(l.rank)))}
	r.room = (r.payload + pageBytes - 1) &^ (pageBytes - 1)
	r.most = min(len(s.memory.buf)/r.room, len(l.slots))
	if r.most == 0 && len(l.slots) > 0 {
		return nil, fmt.Errorf("%w: a trailer of %d bytes does not fit the scratch memory of %d",
			ErrMemory, r.room, len(s.memory.buf))
	}
	r.ctxs, r.index = make([]IOCTX, 0, r.most), make([]int, 0, r.most)
	return r, nil
}

// fill makes a round of the slots from first on, and returns where the next one begins.
func (r *trailerRound) fill(first int, write bool, each func(i int, b []byte)) (next int) {
	l, object := r.l, r.l.m.layout.TrailerObject(r.l.rank)
	r.ctxs, r.index = r.ctxs[:0], r.index[:0]
	for next = first; next < len(l.slots) && len(r.ctxs) < r.most; next++ {
		if l.slotError(next) != nil {
			continue
		}
		at := len(r.ctxs) * r.room
		if b := r.s.memory.buf[at : at+r.room]; write {
			each(next, b[:r.payload])
			clear(b[r.payload:])
		}
		r.ctxs = append(r.ctxs, IOCTX{Desc: r.s.memory.Desc(at), Slot: l.slots[next].Slot, Object: object})
		r.index = append(r.index, next)
	}
	return next
}

// settle takes the outcomes of a round, and what was read.
func (r *trailerRound) settle(failed []Result, write bool, each func(i int, b []byte)) {
	l := r.l
	for _, f := range failed {
		l.failSlot(r.index[f.Index], f.Err)
	}
	if write {
		return
	}
	inParallel(len(r.index), func(k int) {
		if i := r.index[k]; l.slotError(i) == nil {
			each(i, r.s.memory.buf[k*r.room:k*r.room+r.payload])
		}
	})
}

// inParallel calls f with the numbers below n, many at a time on a thread: a prompt has a thousand trailers, and a
// request waits for them. The caller has its share, since threads of engines do not wait for others cheaply.
func inParallel(n int, f func(i int)) {
	const least = 128 // worth a thread
	workers := max(1, min(4, runtime.GOMAXPROCS(0), n/least))
	share := func(w int) {
		for i := w * n / workers; i < (w+1)*n/workers; i++ {
			f(i)
		}
	}
	var group sync.WaitGroup
	for w := 1; w < workers; w++ {
		group.Go(func() { share(w) })
	}
	share(0)
	group.Wait()
}

// ringLayerTicket is a layer in flight; Wait completes and (for reads) verifies it.
type ringLayerTicket struct {
	layerBatch
	layers *ringLayers
	layer  int32
	ticket *ringTicket // nil: it was evacuated

	mu      sync.Mutex
	refused []Result // what could not be evacuated
}

// RetrieveLayer reads the layer's objects of all slots into dst: dst[i*objectsOfLayer+j] is the descriptor for slot
// i, object j of the layer. Wait verifies each object's checksum; failed slots are zeroed and reported by Failed. The
// caller leaves dst alone until Wait.
func (l *ringLayers) RetrieveLayer(layer uint16, dst []uint64) (LayerTicket, error) {
	t := &ringLayerTicket{layers: l, layer: int32(layer)}
	batch, ctxs, err := l.prepare(layer, dst, false)
	if err != nil {
		return nil, err
	}
	t.layerBatch = batch
	for _, i := range t.skipped {
		t.zero(int(i))
	}
	t.ticket, err = l.ring.issue(false, l.m, ctxs, t.layer)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// StoreLayer writes the layer's objects of all slots and keeps their sums. The caller leaves src and the payloads
// alone until Wait. With a store buffer they are evacuated before it returns, for which it waits for room or is refused
// (StorePolicy); what becomes of their writes is told by Finish.
func (l *ringLayers) StoreLayer(layer uint16, src []uint64) (LayerTicket, error) {
	t := &ringLayerTicket{layers: l, layer: int32(layer)}
	batch, ctxs, err := l.prepare(layer, src, true)
	if err != nil {
		return nil, err
	}
	t.layerBatch = batch
	if l.ring.store != nil {
		if err := t.evacuate(ctxs); err != nil {
			return nil, err
		}
		return t, nil
	}
	t.each(func(i int) {
		for j, object := range t.objects {
			if b := t.payload(i, j); b != nil { // else its IOCTX reports it
				l.sum(i, object, b)
			}
		}
	})
	t.ticket, err = l.ring.issue(true, l.m, ctxs, t.layer)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// sum keeps the sum of an object of slot i.
func (l *layerState) sum(i int, object uint16, payload []byte) {
	l.sums[i*l.objects+l.m.layout.OrdinalInRank(object)] = checksum.Sum(l.slots[i].Seed, l.rank, object, payload)
}

// layerBatch is the batch of one layer.
type layerBatch struct {
	objects []uint16 // of the layer
	desc    []uint64 // [slot*len(objects) + j]
	active  []uint32 // slots of the batch's IOCTXs, len(objects) each
	skipped []uint32 // slots that have failed before
}

// prepare makes the batch of a layer from the slots that have not failed.
func (l *layerState) prepare(layer uint16, desc []uint64, store bool) (b layerBatch, ctxs []IOCTX, err error) {
	objects := l.m.layout.LayerObjects(layer, l.rank)
	switch {
	case l.store != store:
		return b, nil, fmt.Errorf("%w: layers opened for the other direction", ErrInvalid)
	case len(objects) == 0:
		return b, nil, fmt.Errorf("%w: rank %d has no layer %d", ErrInvalid, l.rank, layer)
	case len(desc) != len(l.slots)*len(objects):
		return b, nil, fmt.Errorf("%w: %d descriptors for %d slots of %d objects",
			ErrInvalid, len(desc), len(l.slots), len(objects))
	}
	b = layerBatch{objects: objects, desc: desc, active: make([]uint32, 0, len(l.slots))}
	ctxs = make([]IOCTX, 0, len(desc))
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return b, nil, ErrClosed
	}
	for i := range l.slots {
		if l.failed[i] != nil {
			b.skipped = append(b.skipped, uint32(i))
			continue
		}
		b.active = append(b.active, uint32(i))
		ctxs = b.append(ctxs, l, uint32(i))
	}
	return b, ctxs, nil
}

// append adds the IOCTXs of one slot.
func (b *layerBatch) append(ctxs []IOCTX, l *layerState, i uint32) []IOCTX {
	for j, object := range b.objects {
		ctxs = append(ctxs, IOCTX{
			Desc: b.desc[int(i)*len(b.objects)+j], Slot: l.slots[i].Slot, Object: object,
		})
	}
	return ctxs
}

// settle notes the outcomes of a layer that is done.
func (l *layerState) settle(b *layerBatch, results []Result, err error) {
	for _, f := range results {
		l.failSlot(int(b.active[f.Index/len(b.objects)]), f.Err)
	}
	if l.store && err == nil {
		l.mu.Lock()
		for _, object := range b.objects {
			l.stored[l.m.layout.OrdinalInRank(object)] = true
		}
		l.mu.Unlock()
	}
}

// payload is object j of slot i, nil if its descriptor is bad.
func (t *ringLayerTicket) payload(i, j int) []byte {
	desc := t.desc[i*len(t.objects)+j]
	m := t.layers.ring.regions.lookup(desc)
	if m == nil {
		return nil
	}
	return m.at(desc, t.layers.m.ObjectBytes(t.objects[j]))
}

// zero clears all objects of slot i.
func (t *ringLayerTicket) zero(i int) {
	for j := range t.objects {
		clear(t.payload(i, j))
	}
}

// Wait completes the layer and, for reads, verifies it. Slots that failed are in Failed and zeroed; the error is for
// the whole: the ring is gone.
func (t *ringLayerTicket) Wait() error {
	l := t.layers
	if t.ticket == nil {
		l.settle(&t.layerBatch, t.refused, nil)
		return nil
	}
	results, err := l.ring.wait(t.ticket)
	l.settle(&t.layerBatch, results, err)
	if !l.store {
		t.each(t.verify)
	}
	return err
}

// verify compares a slot's objects with its trailer.
func (t *ringLayerTicket) verify(i int) {
	l := t.layers
	for j, object := range t.objects {
		if l.slotError(i) != nil {
			break
		}
		want := l.sums[i*l.objects+l.m.layout.OrdinalInRank(object)]
		if checksum.Sum(l.slots[i].Seed, l.rank, object, t.payload(i, j)) != want {
			l.failSlot(i, fmt.Errorf("%w: slot %d object %d", ErrChecksum, l.slots[i].Slot, object))
		}
	}
	if l.slotError(i) != nil {
		t.zero(i)
	}
}

// spreadBytes is the work that is worth another goroutine.
const spreadBytes = 256 << 10

// each calls f with every active slot, on several cores when that is worth it.
func (t *ringLayerTicket) each(f func(i int)) {
	bytes := 0
	for _, object := range t.objects {
		bytes += int(t.layers.m.ObjectBytes(object))
	}
	spread(len(t.active), len(t.active)*bytes, func(k int) { f(int(t.active[k])) })
}

// spread calls f with the numbers below n, on several cores when so many bytes are worth it.
func spread(n, bytes int, f func(k int)) {
	workers := min(runtime.GOMAXPROCS(0), n, bytes/spreadBytes)
	if workers <= 1 {
		for k := range n {
			f(k)
		}
		return
	}
	var next atomic.Int64
	work := func() {
		for k := next.Add(1) - 1; k < int64(n); k = next.Add(1) - 1 {
			f(int(k))
		}
	}
	var wg sync.WaitGroup
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}

func (l *layerState) slotError(i int) error {
	if !l.anyFailed.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed[i]
}

// failSlot keeps the first error of a slot.
func (l *layerState) failSlot(i int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed[i] == nil {
		l.failed[i] = err
		l.anyFailed.Store(true)
	}
}

// Finish waits for the writes that were deferred and writes the trailers, once every layer was stored and waited for.
// Commit may follow when it returns nil: then all slots are whole. Otherwise Failed names those that are not.
func (l *layerState) Finish() error {
	if !l.store || l.closed {
		return fmt.Errorf("%w: nothing is being stored", ErrInvalid)
	}
	for ordinal, done := range l.stored {
		if !done {
			return fmt.Errorf("%w: object %d", ErrIncomplete, l.m.layout.RankObjects(l.rank)[ordinal])
		}
	}
	defer l.base.store.await(l.base.wake)()
	if err := l.drain(); err != nil {
		return err
	}
	object := l.m.layout.TrailerObject(l.rank)
	err := l.trailers(true, func(i int, b []byte) {
		checksum.PutTrailer(b, l.slots[i].Seed, l.rank, object, l.slotSums(i))
	})
	if err != nil {
		return err
	}
	for i, err := range l.failed {
		if err != nil {
			return fmt.Errorf("gio: slot %d was not stored: %w", l.slots[i].Slot, err)
		}
	}
	return nil
}

// Failed has one error (or nil) a slot, in the order of the slots: a copy.
func (l *layerState) Failed() []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]error(nil), l.failed...)
}

// Close waits for the writes that were deferred and gives the trailers' memory back. Tickets must have been waited for.
func (l *layerState) Close() {
	done := l.base.store.await(l.base.wake)
	_ = l.drain() // Failed has what it comes to; without Finish nothing of it counts
	done()
	l.base.owners.forget(l)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.sums = true, nil
}

package gio

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// ioCounter is an ioSize that threads add to.
type ioCounter struct{ objects, bytes atomic.Uint64 }

func (c *ioCounter) add(n ioSize) {
	c.objects.Add(n.objects)
	c.bytes.Add(n.bytes)
}

func (c *ioCounter) sub(n ioSize) {
	c.objects.Add(-n.objects)
	c.bytes.Add(-n.bytes)
}

func (c *ioCounter) size() ioSize { return ioSize{objects: c.objects.Load(), bytes: c.bytes.Load()} }

// ringFlow is what the pacer is told of the ring, counted where somebody may ask for it.
type ringFlow struct {
	paced          bool // there is a store buffer, or a pacer that counts
	reads, reading ioCounter
	waiting        ioCounter // deferred writes that are in no chunk
	writing        ioCounter
	ahead          atomic.Uint64 // bytes of reads in flight that nobody waited for when they were issued
	awaited        atomic.Int64  // number of the newest batch of reads that somebody waits for
	progress       atomic.Int64  // when a deferred write ended
	again          atomic.Int64  // the pacer is not asked before
	wakes          atomic.Uint64 // times that it was to be asked again
}

// begins counts a batch that was issued. Ring.mu is held.
func (f *ringFlow) begins(t *ringTicket) {
	if !f.paced || t.write && !t.deferred {
		return
	}
	n := t.rest(len(t.ctxs))
	t.size = n
	t.open.add(n)
	kind := readQueued
	if t.deferred {
		kind = writeQueued
		f.waiting.add(n)
		t.since = clock()
		t.ring.store.came(n)
	} else {
		f.reads.add(n)
		t.ring.issued++
		t.nth = t.ring.issued
	}
	t.ring.pacer.note(ioEvent{kind: kind, layer: t.layer, ioSize: n, at: clock()})
	if t.deferred {
		t.ring.paceAgain()
	}
}

// issued counts a chunk that is about to be rung. The lane and Ring.mu are held.
func (f *ringFlow) issued(l *lane, t *ringTicket) {
	if !f.paced || t.write && !t.deferred {
		return
	}
	n, kind := ioSize{objects: uint64(l.commands), bytes: l.payload}, readIssued
	l.rung = clock()
	if t.deferred {
		kind = writeIssued
		f.waiting.sub(n)
		f.writing.add(n)
	} else {
		f.reading.add(n)
		if l.ahead = t.nth > f.awaited.Load(); l.ahead {
			f.ahead.Add(n.bytes)
		}
	}
	t.ring.pacer.note(ioEvent{kind: kind, layer: t.layer, ioSize: n, at: l.rung})
}

// arrived counts a chunk that is over.
func (f *ringFlow) arrived(l *lane, t *ringTicket) {
	if !f.paced || t.write && !t.deferred {
		return
	}
	n, kind := ioSize{objects: uint64(l.commands), bytes: l.payload}, readArrived
	now := clock()
	t.open.sub(n)
	if t.deferred {
		kind = writeArrived
		f.writing.sub(n)
		t.ring.store.went(n)
		f.progress.Store(now)
	} else {
		f.reads.sub(n)
		f.reading.sub(n)
		if l.ahead {
			f.ahead.Add(-n.bytes)
			l.ahead = false
		}
	}
	t.ring.pacer.note(ioEvent{kind: kind, layer: t.layer, ioSize: n, at: now, took: now - l.rung})
	if t.deferred {
		t.ring.paceAgain()
	}
}

// ends counts a batch that is over, with what of it never was a command.
func (f *ringFlow) ends(t *ringTicket) {
	if !f.paced || t.write && !t.deferred {
		return
	}
	rest := t.open.size()
	if t.deferred {
		f.waiting.sub(rest)
		t.ring.store.went(rest)
		t.ring.store.free(t.place)
		return
	}
	f.reads.sub(rest)
	e := ioEvent{kind: readEnded, layer: t.layer, ioSize: t.size, at: clock()}
	if since := t.awaitedAt.Load(); since != 0 {
		e.took = e.at - since
	}
	t.ring.pacer.note(e)
	t.ring.paceAgain()
}

// awaits notes that somebody waits for a batch.
func (f *ringFlow) awaits(t *ringTicket) {
	if !f.paced || t.write && !t.deferred || !t.awaitedAt.CompareAndSwap(0, clock()) || t.deferred {
		return
	}
	// The pacer hears of it before anything is issued for that reason.
	t.ring.pacer.note(ioEvent{kind: readAwaited, layer: t.layer, ioSize: t.size, at: t.awaitedAt.Load()})
	for last := f.awaited.Load(); last < t.nth && !f.awaited.CompareAndSwap(last, t.nth); {
		last = f.awaited.Load()
	}
}

// mayRead says whether a batch of reads may have a chunk issued.
func (r *Ring) mayRead(t *ringTicket) bool {
	f := &r.flow
	if !f.paced || t.nth <= f.awaited.Load() {
		return true
	}
	limit := r.pacer.readAhead(clock())
	return limit == math.MaxUint64 || f.ahead.Load()+t.rest(t.chunk).bytes <= limit
}

// mayWrite says whether the first deferred write may be issued. Ring.mu is held.
func (r *Ring) mayWrite(t *ringTicket) bool {
	f := &r.flow
	wakes := f.wakes.Load()
	oldest := t.since
	for x := t; x.layer == noLayer && x.after != nil; { // trailers go first and are younger
		x = x.after
		oldest = min(oldest, x.since)
	}
	l := load{
		next: t.rest(t.chunk), deferred: f.waiting.size(), writing: f.writing.size(),
		reads: f.reads.size(), reading: f.reading.size(), oldest: oldest,
	}
	if r.store.describe(&l) {
		return true
	}
	g := r.pacer.writes(clock(), &l)
	if g.allows(l.next) {
		return true
	}
	f.again.Store(g.again)
	if f.wakes.Load() != wakes {
		f.again.Store(0)
	}
	return false
}

// paceAgain has the pacer asked again.
func (r *Ring) paceAgain() {
	if r.store == nil {
		return
	}
	r.flow.wakes.Add(1)
	r.flow.again.Store(0)
	r.driver.ring()
}

// storeDriver is the goroutine that moves deferred writes on.
type storeDriver struct {
	bell  chan struct{}
	stop  chan struct{}
	ended chan struct{}
	once  sync.Once
}

func (d *storeDriver) start(r *Ring) {
	d.bell, d.stop, d.ended = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	go d.run(r)
}

// end stops the goroutine and waits for it.
func (d *storeDriver) end() {
	d.once.Do(func() { close(d.stop) })
	<-d.ended
}

func (d *storeDriver) ring() {
	select {
	case d.bell <- struct{}{}:
	default:
	}
}

func (d *storeDriver) run(r *Ring) {
	defer close(d.ended)
	lanes := r.lanes[r.common():]
	timer := time.NewTimer(0)
	defer timer.Stop()
	for idle := 1; ; idle++ {
		select {
		case <-d.stop:
			return
		default:
		}
		if r.broken.Load() != nil {
			r.failAll()
			<-d.stop
			return
		}
		if r.pollLanes(lanes) {
			continue
		}
		if idle%checkEvery == 0 {
			r.expireLanes(lanes, time.Now())
		}
		switch {
		case r.flow.writing.objects.Load() == 0:
			timer.Reset(r.held())
			select {
			case <-d.bell:
			case <-d.stop:
			case <-timer.C:
			}
		case r.config.Step != nil:
			r.config.Step()
		default:
			nap(r.procs)
		}
	}
}

// held is how long nothing is to be done, as long as nobody rings.
func (r *Ring) held() time.Duration {
	if r.deferred.waiting.Load() == 0 {
		return time.Duration(never)
	}
	return max(napNanoseconds, time.Duration(r.flow.again.Load()-clock()))
}

// evacuate copies what a layer stores into the store buffer, a piece at a time, and has each piece written from there.
func (t *ringLayerTicket) evacuate(ctxs []IOCTX) error {
	r := t.layers.ring
	cuts, sizes := t.pieces(ctxs)
	var places []place
	if r.store.policy == StoreRefuse {
		var err error
		if places, err = r.store.takeAll(sizes); err != nil {
			return err
		}
	}
	for i, size := range sizes {
		var p place
		if places != nil {
			p = places[i]
		} else {
			var err error
			if p, err = r.store.wait(size, r.paceAgain); err != nil {
				return err
			}
		}
		first, end := cuts[i], cuts[i+1]
		t.fill(p, ctxs, first, end)
		w := &ringTicket{
			ring: r, m: t.layers.m, ctxs: ctxs[first:end], write: true, deferred: true, place: p, layer: t.layer,
			chunk: end - first,
		}
		if limit := r.config.ChunkCommands; limit > 0 {
			w.chunk = min(w.chunk, limit)
		}
		if err := r.enqueue(w); err != nil {
			for ; i < len(places); i++ {
				r.store.free(places[i])
			}
			if places == nil {
				r.store.free(p)
			}
			return err
		}
		t.layers.defers(&t.layerBatch, first, w)
	}
	return nil
}

// pieces cuts a layer where the cells of its objects fill a piece. Those that no piece can hold take no room: they are
// refused when their command is built.
func (t *ringLayerTicket) pieces(ctxs []IOCTX) (cuts, sizes []int) {
	most, size := t.layers.ring.store.piece, 0
	cuts = append(cuts, 0)
	for i := range ctxs {
		n := t.cell(&ctxs[i])
		if size+n > most {
			cuts, sizes = append(cuts, i), append(sizes, size)
			size = 0
		}
		size += n
	}
	if len(ctxs) > 0 {
		cuts, sizes = append(cuts, len(ctxs)), append(sizes, size)
	}
	return cuts, sizes
}

// cell is the room that an object takes in the buffer.
func (t *ringLayerTicket) cell(ctx *IOCTX) int {
	n := int(t.layers.m.objects[ctx.Object].units) * pageBytes
	if n > t.layers.ring.store.piece {
		return 0
	}
	return n
}

// fill copies the objects from first to end into a place, takes their sums on the way, and makes their IOCTXs name it.
func (t *ringLayerTicket) fill(p place, ctxs []IOCTX, first, end int) {
	s := t.layers.ring.store
	room, at := s.bytes(p), 0
	offsets := make([]int, end-first)
	for i := first; i < end; i++ {
		offsets[i-first] = at
		at += t.cell(&ctxs[i])
	}
	spread(end-first, at, func(k int) {
		i := first + k
		slot, object := int(t.active[i/len(t.objects)]), t.objects[i%len(t.objects)]
		payload := t.payload(slot, i%len(t.objects))
		n := t.cell(&ctxs[i])
		if payload == nil || n == 0 {
			t.refuse(&ctxs[i], i)
			return
		}
		cell := room[offsets[k] : offsets[k]+n]
		clear(cell[copy(cell, payload):])
		t.layers.sum(slot, object, cell[:len(payload)])
		ctxs[i].Desc = s.memory.Desc(s.offset(p) + offsets[k])
	})
}

// refuse notes an object that cannot be evacuated, and has its write refused too: no memory has that descriptor.
func (t *ringLayerTicket) refuse(ctx *IOCTX, i int) {
	err := fmt.Errorf("%w: descriptor %#x of %d bytes; a piece of the store buffer has %d bytes",
		ErrMemory, ctx.Desc, t.layers.m.ObjectBytes(ctx.Object), t.layers.ring.store.piece)
	ctx.Desc = 0
	t.mu.Lock()
	t.refused = append(t.refused, Result{Index: i, Err: err})
	t.mu.Unlock()
}

package gio

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// The store buffer is DMA memory in which what is stored lies from when it has left its source until its drive has it.
// A store is evacuated into it at once, piece by piece; each piece's write is deferred until the pacer lets it go, and
// goes by lanes that carry nothing else. A piece's place is free again when its write has completed, or has failed and
// its lane was quiesced.

// ErrStoreBuffer: the store buffer has no room, and the policy is to refuse.
var ErrStoreBuffer = errors.New("gio: the store buffer is full; store later, or not at all")

// StorePolicy is what becomes of a store for which the store buffer has no room.
type StorePolicy uint8

const (
	// StoreBlock: it waits for room. On the CPU StoreLayer waits, on a GPU WaitOn and Wait do.
	StoreBlock StorePolicy = iota
	// StoreRefuse: StoreLayer returns ErrStoreBuffer. A layer is taken whole or not at all.
	StoreRefuse
)

func (p StorePolicy) String() string {
	if p == StoreRefuse {
		return "refuse"
	}
	return "block"
}

// StoreStats are what the store buffer holds and has done.
type StoreStats struct {
	Policy        StorePolicy
	Size          uint64 // bytes; 0: there is no store buffer
	Fill, Peak    uint64 // bytes that are taken, now and at most
	Objects       uint64 // that wait for their drives or are on their way, now
	Bytes         uint64 // of their payloads
	OldestNanos   uint64 // how long the oldest has been there
	StoredObjects uint64 // that came through it
	StoredBytes   uint64
	Refused       uint64 // layers
	BlockedNanos  uint64 // in which a store waited for room
}

const (
	// StoreLeast is the smallest store buffer.
	StoreLeast = 1 << 20
	// storePieceMost bounds a piece: what a lane carries at a time, and the copy engine without a pause.
	storePieceMost = 4 << 20
	// storeGrains bounds how finely the buffer is divided, since a search goes over all of it.
	storeGrains = 16384
	// storeLanesDefault is how many lanes carry deferred writes: while one is refilled, the others keep the drives busy.
	storeLanesDefault = 2
)

// place is a part of the store buffer.
type place struct {
	first, count int32 // grains
	since        int64 // when it was taken
}

// storeBuffer divides the buffer. Methods are safe for concurrent use.
type storeBuffer struct {
	memory   *Memory
	grain    int
	piece    int // the most bytes of a piece
	policy   StorePolicy
	deadline time.Duration
	freed    chan struct{} // has one when a place has come free since it was last looked at
	waiting  sync.Mutex    // held by the one that waits for room

	mu      sync.Mutex
	taken   []bool  // by grain
	next    int     // where the next search begins
	places  []place // those that are taken, in order
	used    int     // grains
	peak    int
	awaited []int64 // since when callers of Finish and the like wait, in order
	err     error   // why nothing is given out any more
	blocked int64   // since when somebody waits for room, 0: nobody
	stats   StoreStats
}

func newStoreBuffer(m *Memory, policy StorePolicy, deadline time.Duration) *storeBuffer {
	n := len(m.buf)
	grain := max(pageBytes, (n/storeGrains+pageBytes-1)&^(pageBytes-1))
	return &storeBuffer{
		memory: m, grain: grain, piece: min(storePieceMost, n/4&^(pageBytes-1)), policy: policy, deadline: deadline,
		freed: make(chan struct{}, 1), taken: make([]bool, n/grain),
		stats: StoreStats{Policy: policy, Size: uint64(n)},
	}
}

// offset is where a place begins in the buffer.
func (s *storeBuffer) offset(p place) int { return int(p.first) * s.grain }

// bytes is a place's memory.
func (s *storeBuffer) bytes(p place) []byte {
	return s.memory.buf[s.offset(p) : s.offset(p)+int(p.count)*s.grain]
}

// take finds room for a piece, if there is any now.
func (s *storeBuffer) take(n int) (p place, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return place{}, false, s.err
	}
	p, ok = s.find(n)
	now := clock()
	switch {
	case ok && s.blocked != 0:
		s.stats.BlockedNanos += uint64(now - s.blocked)
		s.blocked = 0
	case !ok && s.blocked == 0:
		s.blocked = now
	}
	return p, ok, nil
}

// unblock ends the time of a store that does not wait for room any more.
func (s *storeBuffer) unblock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocked != 0 {
		s.stats.BlockedNanos += uint64(clock() - s.blocked)
		s.blocked = 0
	}
}

// takeAll finds room for all pieces of a layer or for none.
func (s *storeBuffer) takeAll(sizes []int) ([]place, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	places := make([]place, 0, len(sizes))
	for _, n := range sizes {
		p, ok := s.find(n)
		if !ok {
			for _, p := range places {
				s.clear(p)
			}
			s.stats.Refused++
			return nil, fmt.Errorf("%w: a layer of %d pieces, %d of %d bytes are taken",
				ErrStoreBuffer, len(sizes), s.used*s.grain, len(s.memory.buf))
		}
		places = append(places, p)
	}
	return places, nil
}

// find looks for consecutive grains, from where the last search ended: what comes first goes first, so that what is
// free is mostly in one piece. mu is held.
func (s *storeBuffer) find(n int) (place, bool) {
	count := max(1, (n+s.grain-1)/s.grain)
	if count > len(s.taken)-s.used {
		return place{}, false
	}
	first, ok := s.search(s.next, len(s.taken), count)
	if !ok {
		if first, ok = s.search(0, min(s.next+count, len(s.taken)), count); !ok {
			return place{}, false
		}
	}
	for i := first; i < first+count; i++ {
		s.taken[i] = true
	}
	s.next, s.used = first+count, s.used+count
	s.peak = max(s.peak, s.used)
	p := place{first: int32(first), count: int32(count), since: clock()}
	s.places = append(s.places, p)
	return p, true
}

// search looks between two grains. One that is taken rules out all starts up to it.
func (s *storeBuffer) search(from, end, count int) (first int, ok bool) {
	for from+count <= end {
		i := from + count - 1
		for i >= from && !s.taken[i] {
			i--
		}
		if i < from {
			return from, true
		}
		from = i + 1
	}
	return 0, false
}

// clear frees a place. mu is held.
func (s *storeBuffer) clear(p place) {
	for i := p.first; i < p.first+p.count; i++ {
		s.taken[i] = false
	}
	s.used -= int(p.count)
	for i := range s.places {
		if s.places[i].first == p.first {
			s.places = append(s.places[:i], s.places[i+1:]...)
			break
		}
	}
}

// free gives a place back.
func (s *storeBuffer) free(p place) {
	if p.count == 0 {
		return
	}
	s.mu.Lock()
	s.clear(p)
	s.mu.Unlock()
	s.signal()
}

func (s *storeBuffer) signal() {
	select {
	case s.freed <- struct{}{}:
	default:
	}
}

// wait is take by a thread that waits for room, as long as places come free. It calls blocked when it begins to.
func (s *storeBuffer) wait(n int, blocked func()) (place, error) {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	timer := time.NewTimer(s.deadline)
	defer timer.Stop()
	for first := true; ; first = false {
		p, ok, err := s.take(n)
		if err != nil {
			s.unblock()
		}
		if ok || err != nil {
			return p, err
		}
		if first {
			blocked()
		}
		select {
		case <-s.freed:
			timer.Reset(s.deadline)
		case <-timer.C:
			s.unblock()
			return place{}, fmt.Errorf("%w: the store buffer has no room, and none of its writes ended", ErrTimeout)
		}
	}
}

// fail refuses everything from now on and ends a wait.
func (s *storeBuffer) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.signal()
}

// pressed says that the buffer is above its high water, three quarters, or that a store waits for room, which may be
// there in pieces that are too small: writes go regardless of windows then.
func (s *storeBuffer) pressed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pressedLocked()
}

func (s *storeBuffer) pressedLocked() bool { return s.used > len(s.taken)*3/4 || s.blocked != 0 }

// describe fills in what a pacer is to know. It is true where none is to be asked, because the buffer is pressed: one
// look, since a store may fill it between two.
func (s *storeBuffer) describe(l *load) (pressed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.fill, l.size = uint64(s.used*s.grain), s.stats.Size
	if len(s.awaited) > 0 {
		l.awaited = s.awaited[0]
	}
	return s.pressedLocked()
}

// await says that somebody waits for the end of deferred writes, until the returned function is called. It is safe to
// call where there is no buffer.
func (s *storeBuffer) await(wake func()) (done func()) {
	if s == nil {
		return func() {}
	}
	s.mu.Lock()
	since := clock()
	s.awaited = append(s.awaited, since)
	s.mu.Unlock()
	wake()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		i := slices.Index(s.awaited, since) // one that began at the same time does as well
		s.awaited = slices.Delete(s.awaited, i, i+1)
	}
}

// came and went count what lies in the buffer.
func (s *storeBuffer) came(n ioSize) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Objects += n.objects
	s.stats.Bytes += n.bytes
	s.stats.StoredObjects += n.objects
	s.stats.StoredBytes += n.bytes
}

func (s *storeBuffer) went(n ioSize) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Objects -= n.objects
	s.stats.Bytes -= n.bytes
}

// StoreStats is safe to call at any time. It is zero where there is no store buffer.
func (b *base) StoreStats() StoreStats { return b.store.report() }

// report is safe to call on an executor without a buffer.
func (s *storeBuffer) report() StoreStats {
	if s == nil {
		return StoreStats{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.stats
	r.Fill, r.Peak = uint64(s.used*s.grain), uint64(s.peak*s.grain)
	now := clock()
	if len(s.places) > 0 {
		r.OldestNanos = uint64(now - s.places[0].since)
	}
	if s.blocked != 0 {
		r.BlockedNanos += uint64(now - s.blocked)
	}
	return r
}

// storeOwners knows which layers are stored into which slots. A slot that was given up and is stored into anew, while
// writes to it are still deferred, is not to be overwritten by them.
type storeOwners struct {
	mu sync.Mutex
	of map[uint64]*layerState // by the place of the rank's trailer on the drives
}

// own makes the layers those of their slots. It waits for what was deferred for these slots before.
func (l *layerState) own() {
	if l.base.store == nil {
		return
	}
	before := l.base.owners.claim(l)
	if len(before) > 0 {
		defer l.base.store.await(l.base.wake)()
	}
	for _, b := range before {
		_ = b.drain() // its slots have its errors
	}
}

// claim returns the layers that had any of the slots before.
func (o *storeOwners) claim(l *layerState) (before []*layerState) {
	object := l.m.layout.TrailerObject(l.rank)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of == nil {
		o.of = make(map[uint64]*layerState)
	}
	l.owned = make([]uint64, 0, len(l.slots))
	for i := range l.slots {
		drive, unit, _, ok := l.m.Locate(l.slots[i].Slot, object)
		if !ok {
			continue
		}
		at := uint64(drive)<<unitBits | unit
		if x := o.of[at]; x != nil && x != l && !slices.Contains(before, x) {
			before = append(before, x)
		}
		o.of[at] = l
		l.owned = append(l.owned, at)
	}
	return before
}

// forget is for layers that are closed.
func (o *storeOwners) forget(l *layerState) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, at := range l.owned {
		if o.of[at] == l {
			delete(o.of, at)
		}
	}
	l.owned = nil
}

package gpufile

import (
	"math/bits"
	"sync/atomic"

	"tuttifs/extentmap"
	"tuttifs/lifetime"
)

// A lease is a session's hold on one slot: for reading, or for writing. Commands are checked against leases by many
// pollers at once, so this is the one table here that is read without a mutex:
//
//   - A lease's word holds its rights and the number of its commands in flight. A command enters by compare-and-swap,
//     so that none enters after its right was taken away, and leaves by subtraction.
//   - Leases lie in chunks that are never moved or freed while their session lives, and are used again only when no
//     command is in flight. A reader that found a lease by an outdated table enters, then looks at the key again.
//   - A lease that ends with commands in flight keeps its hold on the slot (quarantine). Whoever brings the count to
//     zero claims the rest of its end, exactly once, and does it under the session's mutex.
//
// All changes but those of commands are made under the session's mutex.

const (
	leaseRead uint64 = 1 << (63 - iota)
	leaseWrite
	leaseEnding  // no rights any more; the last command out claims its end
	leaseClaimed // the last command out waits for the session's mutex to end it
	leaseEnded   // no rights and no commands: its end is being made under the session's mutex
	leaseFlight  = 1<<32 - 1

	leaseChunkLen = 256
	leaseUsed     = 1 << 63 // set in keys, so that zero is no key
	leaseGone     = ^uint32(0)
)

type lease struct {
	key   atomic.Uint64 // leaseUsed | pool<<32 | slot
	word  atomic.Uint64
	index uint32 // its own number in the table

	// Under the session's mutex; none but requests changes while commands are in flight.
	requests uint32 // pinsets that name it
	pool     *Pool
	r        *reservation // of a write lease, and its file
	file     *resFile
}

type leaseChunk [leaseChunkLen]lease

// leaseMap is what readers see: open addressing over lease numbers, 0 empty, leaseGone a hole.
type leaseMap struct {
	slots  []atomic.Uint32 // lease number + 1; a power of two of them
	shift  int
	chunks []*leaseChunk
}

type leaseTable struct {
	m    atomic.Pointer[leaseMap]
	free []uint32
	live int // leases in use
	used int // entries of slots that are not empty, holes included
}

func leaseKey(pool extentmap.PoolID, slot uint32) uint64 {
	return leaseUsed | uint64(pool)<<32 | uint64(slot)
}

func (t *leaseTable) init() { t.m.Store(newLeaseMap(64, nil)) }

func newLeaseMap(size int, chunks []*leaseChunk) *leaseMap {
	return &leaseMap{slots: make([]atomic.Uint32, size), shift: 64 - bits.Len(uint(size-1)), chunks: chunks}
}

func (m *leaseMap) home(key uint64) int { return int(key * 0x9e3779b97f4a7c15 >> m.shift) }

// find returns the lease of a key, and its place in slots. Without the session's mutex it may be of another key a
// moment later.
func (m *leaseMap) find(key uint64) (*lease, int) {
	for i := m.home(key); ; i++ {
		i &= len(m.slots) - 1
		n := m.slots[i].Load()
		if n == 0 {
			return nil, i
		}
		if n == leaseGone || int(n-1)/leaseChunkLen >= len(m.chunks) {
			continue
		}
		if l := &m.chunks[(n-1)/leaseChunkLen][(n-1)%leaseChunkLen]; l.key.Load() == key {
			return l, i
		}
	}
}

// get returns the lease of a key, or nil.
func (t *leaseTable) get(key uint64) *lease {
	l, _ := t.m.Load().find(key)
	return l
}

// getOrAdd returns the lease of a key, made if there is none.
func (t *leaseTable) getOrAdd(key uint64) (l *lease, added bool) {
	m := t.m.Load()
	l, i := m.find(key)
	if l != nil {
		return l, false
	}
	if len(t.free) == 0 || t.full(m) {
		return t.add(key), true
	}
	t.used++ // find ends at an empty entry, not at a hole
	return t.place(m, i, key), true
}

// full says that one more entry needs a larger table, or one without holes.
func (t *leaseTable) full(m *leaseMap) bool { return (t.used+1)*4 > len(m.slots)*3 }

// place makes the lease of a free number at an entry that is unused.
func (t *leaseTable) place(m *leaseMap, i int, key uint64) *lease {
	n := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	l := &m.chunks[n/leaseChunkLen][n%leaseChunkLen]
	l.key.Store(key)
	m.slots[i].Store(n + 1)
	t.live++
	return l
}

// add makes a lease of a key that has none, with no rights yet.
func (t *leaseTable) add(key uint64) *lease {
	m := t.m.Load()
	if len(t.free) == 0 {
		c := new(leaseChunk)
		base := uint32(len(m.chunks) * leaseChunkLen)
		for i := leaseChunkLen - 1; i >= 0; i-- {
			c[i].index = base + uint32(i)
			t.free = append(t.free, c[i].index)
		}
		m = &leaseMap{slots: m.slots, shift: m.shift, chunks: append(m.chunks[:len(m.chunks):len(m.chunks)], c)}
		t.m.Store(m)
	}
	if t.full(m) {
		m = t.rebuild(m)
	}
	for i := m.home(key); ; i++ {
		i &= len(m.slots) - 1
		switch m.slots[i].Load() {
		case 0:
			t.used++
			return t.place(m, i, key)
		case leaseGone:
			return t.place(m, i, key)
		}
	}
}

// rebuild makes a table without holes, at most half full.
func (t *leaseTable) rebuild(old *leaseMap) *leaseMap {
	size := 64
	for size < (t.live+1)*3 {
		size *= 2
	}
	m := newLeaseMap(size, old.chunks)
	for i := range old.slots {
		n := old.slots[i].Load()
		if n == 0 || n == leaseGone {
			continue
		}
		key := m.chunks[(n-1)/leaseChunkLen][(n-1)%leaseChunkLen].key.Load()
		j := m.home(key)
		for m.slots[j&(size-1)].Load() != 0 {
			j++
		}
		m.slots[j&(size-1)].Store(n)
	}
	t.used = t.live
	t.m.Store(m)
	return m
}

// remove forgets a lease that has no rights and no commands in flight.
func (t *leaseTable) remove(l *lease) {
	m := t.m.Load()
	_, i := m.find(l.key.Load())
	if m.slots[(i+1)&(len(m.slots)-1)].Load() == 0 {
		m.slots[i].Store(0) // nobody's probing goes on behind it
		t.used--
	} else {
		m.slots[i].Store(leaseGone)
	}
	l.key.Store(0)
	l.pool, l.r, l.file, l.requests = nil, nil, nil, 0
	l.word.Store(0)
	t.free = append(t.free, l.index)
	t.live--
}

// enter counts a command in if the lease has the right.
func (l *lease) enter(right uint64) bool {
	for {
		w := l.word.Load()
		if w&right == 0 || w&leaseFlight == leaseFlight {
			return false
		}
		if l.word.CompareAndSwap(w, w+1) {
			return true
		}
	}
}

// leave counts a command out, and ends the lease if it was the last one of an ending lease.
func (l *lease) leave(ses *session) {
	if l.claim() {
		ses.finish(l)
	}
}

// claim counts a command out and says whether the lease's end falls to the caller.
func (l *lease) claim() bool {
	return l.word.Add(^uint64(0)) == leaseEnding && l.word.CompareAndSwap(leaseEnding, leaseClaimed)
}

// end takes a lease's rights away. It reports whether no command is in flight: then the caller finishes it.
func (l *lease) end() bool {
	for {
		w := l.word.Load()
		next := w&leaseFlight | leaseEnding
		if w&leaseFlight == 0 {
			next = leaseEnded
		}
		if l.word.CompareAndSwap(w, next) {
			return next == leaseEnded
		}
	}
}

// revive gives a lease that may be ending a right.
func (l *lease) revive(right uint64) {
	for {
		w := l.word.Load()
		if l.word.CompareAndSwap(w, w&leaseFlight|right) {
			return
		}
	}
}

// hold adds one request's pin of a slot to the session's lease; the pool's mutex is held for writing. The pool counts
// one pin for each lease.
func (ses *session) hold(p *Pool, slot uint32) *lease {
	key := leaseKey(p.m.ID(), slot)
	l, added := ses.leases.getOrAdd(key)
	if added {
		l.pool = p
		p.pin(slot)
	}
	if l.requests == 0 {
		l.revive(leaseRead)
	}
	l.requests++
	return l
}

// unhold undoes hold.
func (ses *session) unhold(p *Pool, slot uint32) {
	l := ses.leases.get(leaseKey(p.m.ID(), slot))
	if l.requests--; l.requests == 0 && l.end() {
		ses.unlease(l)
	}
}

// finish ends a claimed lease outside of a verb, unless the claim has lapsed.
func (ses *session) finish(l *lease) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if l.word.Load() != leaseClaimed {
		return
	}
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if ses.s.detached.Load() {
		return
	}
	ses.unlease(l)
	p.flushFrees()
}

// unlease gives a lease's slot back: a pin, or a reserved slot that was not committed. The pool's mutex is held for
// writing.
func (ses *session) unlease(l *lease) {
	p, slot := l.pool, uint32(l.key.Load())
	r := l.r
	ses.leases.remove(l)
	if r == nil {
		p.unpin(slot)
		return
	}
	ses.reserved--
	p.nodes.s[slot].meta = 0
	p.reserved--
	p.charge(r.tenant, -1)
	p.m.Unalloc(slot)
}

// Access is one authorised command in flight; Complete must be called exactly once. Its fields fit those of the
// controller's.
type Access struct {
	Slot  uint32
	Index uint32 // what the command covers: accessWrite and so on
	Life  lifetime.Class
	Ref   any // *lease
}

// Bits of Access.Index below the object's number in the upper half.
const (
	accessWrite      = 1 << 0
	accessWhole      = 1 << 1 // covers the whole object
	accessDriveShift = 2      // six bits of drive index
	accessDriveMask  = 63
	accessObject     = 16
)

// Authorize checks a command of this session against its leases: a pinned slot may only be read, a reserved one only
// written, and the range must lie in one object. Lock-free, no allocation.
func (m *Member) Authorize(write bool, driveIndex uint16, unit uint64, units uint32) (a Access, ok bool) {
	mp, slot, object, within, ok := m.ses.s.v.Resolve(driveIndex, unit)
	if !ok || units == 0 || m.closed.Load() {
		return Access{}, false
	}
	id := mp.ID()
	p := m.ses.s.pool(id)
	if p == nil || int(object) >= len(p.objectUnits) {
		return Access{}, false
	}
	size := p.objectUnits[object]
	if uint64(within)+uint64(units) > uint64(size) {
		return Access{}, false
	}
	key := leaseKey(id, slot)
	l := m.ses.leases.get(key)
	if l == nil {
		return Access{}, false
	}
	right := leaseRead
	a = Access{Slot: slot, Index: uint32(object)<<accessObject | uint32(driveIndex&accessDriveMask)<<accessDriveShift}
	if write {
		right = leaseWrite
		a.Index |= accessWrite
		if within == 0 && units == size {
			a.Index |= accessWhole
		}
	}
	if !l.enter(right) {
		return Access{}, false
	}
	if l.key.Load() != key {
		l.leave(m.ses)
		return Access{}, false
	}
	if write {
		a.Life = l.file.life
	}
	a.Ref = l
	return a, true
}

// Complete ends an access; a successful write marks its object written when the whole object was covered. After a
// failed write, or a deallocation, nobody knows what the object holds: it counts as not written.
func (m *Member) Complete(a Access, ok bool) {
	l, _ := a.Ref.(*lease)
	if l == nil {
		return
	}
	if a.Index&accessWrite != 0 && l.file.written != nil {
		f, object := l.file, a.Index>>accessObject
		switch {
		case !ok:
			f.written[object/64].And(^(uint64(1) << (object % 64)))
		case a.Index&accessWhole != 0:
			f.written[object/64].Or(1 << (object % 64))
		}
		f.flush.Or(1 << (a.Index >> accessDriveShift & accessDriveMask))
	}
	l.leave(m.ses)
}

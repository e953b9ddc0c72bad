package gpufile

// lru evicts the least recently used leaf. A committed child goes right behind its parent, so that a request's blocks
// lie in the order root, ..., leaf whether they were hit or stored; then the oldest file is a leaf as a rule, and a
// parent that has lost its children is where its own last use put it.
//
// Files that cannot go are set aside when eviction comes to them, and come back when they can or are used: each is
// passed over once, however long it stays inner or pinned.
type lru struct {
	q     list
	aside list // flagSecond: inner or pinned; no file that is evictable
	gave  bool // victim gave up before the end of q
}

// lruLooks bounds the files that one call of victim sets aside.
const lruLooks = 1 << 16

func newLRU(a *nodes) *lru { return &lru{q: newList(a), aside: newList(a)} }

func (p *lru) isAside(slot uint32) bool { return p.q.a.s[slot].is(flagSecond) }

// fetch takes a file that was set aside from there.
func (p *lru) fetch(slot uint32) {
	p.aside.remove(slot)
	p.q.a.s[slot].clear(flagSecond)
}

func (p *lru) insert(slot, parent uint32) {
	if parent == none || p.q.a.s[parent].is(flagOrphan) {
		p.q.pushNewest(slot)
		return
	}
	if p.isAside(parent) {
		p.touch(parent) // being continued is a use
	}
	p.q.insertBehind(slot, parent)
}

func (p *lru) load(words []uint64, mask uint64) { p.q.load(words, mask) }

func (p *lru) touch(slot uint32) {
	if p.isAside(slot) {
		p.fetch(slot)
		p.q.pushNewest(slot)
		return
	}
	p.q.toNewest(slot)
}

func (p *lru) remove(slot uint32) {
	if p.isAside(slot) {
		p.fetch(slot)
		return
	}
	p.q.remove(slot)
}

// exposed lets a file that was met before its children follow the last of them out.
func (p *lru) exposed(slot uint32) {
	if p.isAside(slot) {
		p.fetch(slot)
		p.q.pushOldest(slot)
	}
}

// unpinned makes a file that was met while it was pinned the most recent, which it is.
func (p *lru) unpinned(slot uint32) {
	if p.isAside(slot) {
		p.touch(slot)
	}
}

func (p *lru) restore(slot uint32) { p.q.pushOldest(slot) }
func (p *lru) evicted(uint32)      {}
func (p *lru) len() int            { return p.q.n + p.aside.n }
func (p *lru) close()              {}

func (p *lru) victim(evictable func(uint32) bool) (uint32, bool) {
	p.gave = false
	for range lruLooks {
		s := p.q.oldest
		if s == none {
			return none, false
		}
		p.q.remove(s)
		if evictable(s) {
			return s, true
		}
		p.q.a.s[s].set(flagSecond)
		p.aside.pushNewest(s)
	}
	p.gave = p.q.n > 0
	return none, false
}

func (p *lru) gaveUp() bool { return p.gave }

// each ends with what cannot be evicted before others.
func (p *lru) each(f func(uint32) bool) {
	more := true
	p.q.each(func(s uint32) bool { more = f(s); return more })
	if more {
		p.aside.each(f)
	}
}

// each visits from the oldest to the newest.
func (l *list) each(f func(uint32) bool) {
	for s := l.oldest; s != none; {
		next := l.a.s[s].newer
		if !f(s) {
			return
		}
		s = next
	}
}

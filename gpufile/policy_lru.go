package gpufile

// lru evicts the least recently used leaf. A committed child goes right behind its parent, so that a request's blocks
// lie in the order root, ..., leaf whether they were hit or stored; then the oldest file is a leaf as a rule, and a
// parent that has lost its children is where its own last use put it.
type lru struct{ q list }

func newLRU(a *nodes) *lru { return &lru{q: newList(a)} }

func (p *lru) insert(slot, parent uint32) {
	if parent != none && !p.q.a.s[parent].is(flagOrphan) {
		p.q.insertBehind(slot, parent)
		return
	}
	p.q.pushNewest(slot)
}

func (p *lru) load(words []uint64, mask uint64) { p.q.load(words, mask) }

func (p *lru) touch(slot uint32)   { p.q.toNewest(slot) }
func (p *lru) remove(slot uint32)  { p.q.remove(slot) }
func (p *lru) exposed(uint32)      {}
func (p *lru) restore(slot uint32) { p.q.pushOldest(slot) }
func (p *lru) evicted(uint32)      {}
func (p *lru) len() int            { return p.q.n }
func (p *lru) close()              {}

// victim passes over files that cannot go. A pinned one becomes the most recent, which it is. An inner one goes right
// ahead of a child: that child was stored or hit without it, and it is to follow the child out.
func (p *lru) victim(evictable func(uint32) bool) (uint32, bool) {
	for range 2 * p.q.n {
		s := p.q.oldest
		if evictable(s) {
			p.q.remove(s)
			return s, true
		}
		p.q.remove(s)
		if child := p.q.a.s[s].first; child != none {
			p.q.insertAhead(s, child)
		} else {
			p.q.pushNewest(s)
		}
	}
	// Chains with pinned leaves have gone round and round: look at all there is.
	found := none
	p.q.each(func(s uint32) bool {
		if evictable(s) {
			found = s
		}
		return found == none
	})
	if found != none {
		p.q.remove(found)
	}
	return found, found != none
}

func (p *lru) each(f func(uint32) bool) { p.q.each(f) }

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

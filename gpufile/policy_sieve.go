package gpufile

// sieve is SIEVE (Zhang et al., NSDI '24): a queue in order of arrival, one visited bit, and a hand that moves from
// the oldest to the newest, sparing the visited once. A scan never displaces what was hit: its files are unvisited
// and new.
//
// The hand passes an inner node before it reaches its children, so a parent that loses its last child is tried before
// the hand goes on; otherwise it would stay for a whole round.
type sieve struct {
	q     list
	hand  uint32
	freed uint32 // the parent to be tried next, or none
}

func newSieve(a *nodes) *sieve { return &sieve{q: newList(a), hand: none, freed: none} }

func (p *sieve) insert(slot, _ uint32) {
	p.q.a.s[slot].clear(refMask)
	p.q.pushNewest(slot)
}

func (p *sieve) load(words []uint64, mask uint64) { p.q.load(words, mask) }

func (p *sieve) touch(slot uint32) { p.q.a.s[slot].set(refOne) }

func (p *sieve) remove(slot uint32) {
	if p.hand == slot {
		p.hand = p.q.a.s[slot].newer
	}
	if p.freed == slot {
		p.freed = none
	}
	p.q.remove(slot)
}

func (p *sieve) exposed(slot uint32) { p.freed = slot }

// restore puts a victim where the hand meets it next.
func (p *sieve) restore(slot uint32) {
	if p.freed != none {
		p.freed = none
	}
	switch {
	case p.hand == none, p.q.a.s[p.hand].older == none:
		p.q.pushOldest(slot)
	default:
		p.q.insertBehind(slot, p.hand)
	}
	p.hand = slot
}

func (p *sieve) evicted(uint32)  {}
func (p *sieve) unpinned(uint32) {}
func (p *sieve) gaveUp() bool    { return false }
func (p *sieve) len() int        { return p.q.n }
func (p *sieve) close()          {}

func (p *sieve) victim(evictable func(uint32) bool) (uint32, bool) {
	if s := p.freed; s != none {
		p.freed = none
		if n := &p.q.a.s[s]; !n.is(refMask) && evictable(s) {
			p.remove(s)
			return s, true
		}
	}
	// Twice around: the first round may clear the bits of all.
	for range 2*p.q.n + 1 {
		s := p.hand
		if s == none {
			if s = p.q.oldest; s == none {
				return none, false
			}
		}
		n := &p.q.a.s[s]
		p.hand = n.newer
		if !evictable(s) {
			continue
		}
		if n.is(refMask) {
			n.clear(refMask)
			continue
		}
		p.q.remove(s)
		return s, true
	}
	return none, false
}

func (p *sieve) each(f func(uint32) bool) { p.q.each(f) }

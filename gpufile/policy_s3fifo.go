package gpufile

// s3fifo is S3-FIFO (Yang et al., SOSP '23): a small queue that new files pass on probation, a main queue for those
// that were hit there, and a memory of keys that failed the probation: who comes back soon goes to the main queue at
// once.
type s3fifo struct {
	small, main list // flagSecond: in main
	ghost       ghost
	key         func(slot uint32) uint64
	freed       uint32 // a parent that has lost its last child: tried before the queues go on
}

const (
	s3SmallShare = 10 // the small queue's share of the files, in 1/100
	s3RefsMax    = 3
	s3Promote    = 2 // hits on probation that lead to the main queue
)

func newS3FIFO(a *nodes, key func(uint32) uint64) *s3fifo {
	return &s3fifo{small: newList(a), main: newList(a), key: key, freed: none}
}

func (p *s3fifo) node(slot uint32) *node { return &p.small.a.s[slot] }

func (p *s3fifo) queue(slot uint32) *list {
	if p.node(slot).is(flagSecond) {
		return &p.main
	}
	return &p.small
}

func (p *s3fifo) insert(slot, _ uint32) {
	n := p.node(slot)
	n.clear(refMask | flagSecond)
	if p.ghost.take(p.key(slot)) {
		n.set(flagSecond)
	}
	p.queue(slot).pushNewest(slot)
}

// load puts all files on probation: nothing is remembered of who failed it before.
func (p *s3fifo) load(words []uint64, mask uint64) { p.small.load(words, mask) }

func (p *s3fifo) touch(slot uint32) {
	if n := p.node(slot); n.refs() < s3RefsMax {
		n.meta += refOne
	}
}

func (p *s3fifo) remove(slot uint32) {
	if p.freed == slot {
		p.freed = none
	}
	p.queue(slot).remove(slot)
}

func (p *s3fifo) exposed(slot uint32) { p.freed = slot }

func (p *s3fifo) restore(slot uint32) {
	p.freed = none
	p.queue(slot).pushOldest(slot)
}

// evicted remembers who failed the probation.
func (p *s3fifo) evicted(slot uint32) {
	if !p.node(slot).is(flagSecond) {
		p.ghost.put(p.key(slot), p.len())
	}
}

func (p *s3fifo) unpinned(uint32) {}
func (p *s3fifo) gaveUp() bool    { return false }
func (p *s3fifo) len() int        { return p.small.n + p.main.n }
func (p *s3fifo) close()          { p.ghost.close() }

func (p *s3fifo) victim(evictable func(uint32) bool) (uint32, bool) {
	if s := p.freed; s != none {
		p.freed = none
		if p.node(s).refs() == 0 && evictable(s) {
			p.queue(s).remove(s)
			return s, true
		}
	}
	// Each file leaves the small queue at most once and loses its references in at most s3RefsMax rounds of the main.
	for range (s3RefsMax+2)*p.len() + 1 {
		var s uint32
		var ok bool
		if p.small.n > 0 && (p.small.n*100 > p.len()*s3SmallShare || p.main.n == 0) {
			s, ok = p.fromSmall(evictable)
		} else if p.main.n > 0 {
			s, ok = p.fromMain(evictable)
		}
		if ok {
			return s, true
		}
	}
	// The main queue may hold nothing that can go while the small one, within its share, does.
	for range p.small.n {
		s := p.small.oldest
		if evictable(s) {
			p.small.remove(s)
			return s, true
		}
		p.small.toNewest(s)
	}
	return none, false
}

// fromSmall looks at one file: hit or in use, it moves on to the main queue.
func (p *s3fifo) fromSmall(evictable func(uint32) bool) (uint32, bool) {
	s := p.small.oldest
	p.small.remove(s)
	n := p.node(s)
	if evictable(s) && n.refs() < s3Promote {
		return s, true
	}
	n.clear(refMask)
	n.set(flagSecond)
	p.main.pushNewest(s)
	return none, false
}

func (p *s3fifo) fromMain(evictable func(uint32) bool) (uint32, bool) {
	s := p.main.oldest
	n := p.node(s)
	if !evictable(s) {
		p.main.toNewest(s)
		return none, false
	}
	if n.refs() > 0 {
		n.meta -= refOne
		p.main.toNewest(s)
		return none, false
	}
	p.main.remove(s)
	return s, true
}

func (p *s3fifo) each(f func(uint32) bool) {
	more := true
	p.small.each(func(s uint32) bool { more = f(s); return more })
	if more {
		p.main.each(f)
	}
}

// ghost remembers hashes of the last files that were evicted, about as many as there are files. An entry is the upper
// half of the hash and the time of its eviction, counted in evictions; what is older than the memory's length is
// forgotten, and two hashes that meet in one place overwrite each other: it is a hint.
type ghost struct {
	b     []uint64
	raw   []byte
	clock uint32
	keep  uint32
}

const ghostMin = 1024

func (g *ghost) put(h uint64, files int) {
	if want := max(ghostMin, files); want > len(g.b) || want*8 < len(g.b) {
		g.close()
		size := ghostMin
		for size < want*2 {
			size *= 2
		}
		g.b, g.raw = mapWords(size)
	}
	g.keep = uint32(max(ghostMin, files))
	g.clock++
	g.b[h%uint64(len(g.b))] = h&^0xffffffff | uint64(g.clock)
}

// take reports whether the hash is remembered, and forgets it.
func (g *ghost) take(h uint64) bool {
	if len(g.b) == 0 {
		return false
	}
	e := &g.b[h%uint64(len(g.b))]
	if *e == 0 || (*e^h)>>32 != 0 || g.clock-uint32(*e) > g.keep {
		return false
	}
	*e = 0
	return true
}

func (g *ghost) close() {
	unmap(g.raw)
	g.b, g.raw = nil, nil
}

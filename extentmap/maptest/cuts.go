package maptest

import (
	"hash/maphash"
	"math/rand/v2"
)

// Cuts plays power cuts at every operation of a log: what was flushed is there, and of the rest any choice. Up to a
// bound of pieces of 4 KiB every choice is played; beyond it none, all, and random ones. Pieces are also torn at 512
// bytes.
type Cuts struct {
	// Bound is the number of pieces up to which all choices are played, Random how many are beyond it.
	Bound, Random int

	log     []Op
	next    int
	durable []*Image
	pending []Op // of all drives, not flushed
	fresh   bool // the last operation made choices that there were not before
	mark    int
	hash    uint64 // of durable
	rng     *rand.Rand
}

// seed of all image hashes of the process.
var seed = maphash.MakeSeed()

// NewCuts starts from the drives' contents before the log.
func NewCuts(before []*Image, log []Op, random uint64) *Cuts {
	return &Cuts{Bound: 4, Random: 4, log: log, durable: Clone(before), rng: rand.New(rand.NewPCG(random, 2))}
}

// Next takes one operation; false at the end.
func (c *Cuts) Next() bool {
	if c.next == len(c.log) {
		return false
	}
	op := c.log[c.next]
	c.next++
	switch op.Kind {
	case Write, Discard:
		c.pending = append(c.pending, op)
		c.fresh = true
	case Flush:
		var rest []Op
		for _, w := range c.pending {
			if w.Drive != op.Drive {
				rest = append(rest, w)
				continue
			}
			c.hash ^= c.change(c.durable, []Op{w}, func() { apply(c.durable[w.Drive], w) })
		}
		c.pending = rest
		c.fresh = false
	case Mark:
		c.mark = op.Note
		c.fresh = false
	}
	return true
}

// Mark is the last note before the next operation.
func (c *Cuts) Mark() int { return c.mark }

// page is one page of one drive.
type page struct {
	drive int
	index int64
}

// change returns what f, which applies the operations, adds to the images' hash.
func (c *Cuts) change(images []*Image, ops []Op, f func()) (d uint64) {
	touched := map[page]bool{}
	for _, op := range ops {
		n := int64(len(op.Data))
		if op.Kind == Discard {
			n = op.N
		}
		for i := op.Off / pageBytes; n > 0 && i <= (op.Off+n-1)/pageBytes; i++ {
			touched[page{op.Drive, i}] = true
		}
	}
	for p := range touched {
		d ^= hashPage(p, images[p.drive].pages[p.index])
	}
	f()
	for p := range touched {
		d ^= hashPage(p, images[p.drive].pages[p.index])
	}
	return d
}

// hashPage is 0 for a page of zeroes, whether it is there or not.
func hashPage(p page, b *[pageBytes]byte) uint64 {
	if b == nil || *b == ([pageBytes]byte{}) {
		return 0
	}
	var h maphash.Hash
	h.SetSeed(seed)
	h.WriteByte(byte(p.drive))
	var at [8]byte
	for i := range at {
		at[i] = byte(p.index >> (8 * i))
	}
	h.Write(at[:])
	h.Write(b[:])
	return h.Sum64()
}

// Each calls visit with what the drives might hold if the power failed now, and the images' hash, until it says false.
// Choices that were played at an earlier operation are left out unless all is set.
func (c *Cuts) Each(all bool, visit func(hash uint64, images []*Image) bool) {
	play := func(ops []Op) bool {
		images := Clone(c.durable)
		hash := c.hash ^ c.change(images, ops, func() {
			for _, op := range ops {
				apply(images[op.Drive], op)
			}
		})
		return visit(hash, images)
	}
	pieces := split(c.pending, pageBytes)
	if !all && !c.fresh {
		return
	}
	if len(pieces) <= c.Bound {
		for choice := range 1 << len(pieces) {
			// The last piece was just written: choices without it are not new.
			if n := len(pieces); !all && n > 0 && choice>>(n-1)&1 == 0 {
				continue
			}
			var ops []Op
			for i, p := range pieces {
				if choice>>i&1 != 0 {
					ops = append(ops, p)
				}
			}
			if !play(ops) {
				return
			}
		}
	} else if !play(pieces) || all && !play(nil) {
		return
	}
	for range c.Random {
		if len(c.pending) == 0 || len(pieces) > c.Bound && !play(c.some(pieces, 2)) ||
			!play(c.some(split(c.pending, SectorBytes), 2)) || !play(c.torn()) {
			return
		}
	}
}

// some is a random choice: of one piece in n on average, or of all but those.
func (c *Cuts) some(pieces []Op, n int) (ops []Op) {
	for _, p := range pieces {
		if c.rng.IntN(n) == 0 {
			ops = append(ops, p)
		}
	}
	return ops
}

// torn is everything, but of the last write only its beginning.
func (c *Cuts) torn() []Op {
	last := len(c.pending) - 1
	ops := append([]Op(nil), c.pending[:last]...)
	if op := c.pending[last]; op.Kind == Write {
		op.Data = op.Data[:c.rng.IntN(len(op.Data)/SectorBytes+1)*SectorBytes]
		ops = append(ops, op)
	}
	return ops
}

// split cuts writes into pieces.
func split(ops []Op, size int) (pieces []Op) {
	for _, op := range ops {
		if op.Kind != Write {
			pieces = append(pieces, op)
			continue
		}
		for off := 0; off < len(op.Data); off += size {
			p := op
			p.Off, p.Data = op.Off+int64(off), op.Data[off:min(off+size, len(op.Data))]
			pieces = append(pieces, p)
		}
	}
	return pieces
}

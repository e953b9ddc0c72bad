// Package maptest has drives for tests: memory that records every write and flush, so that a power cut can be played
// at any of them, and that fails on demand.
package maptest

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"tuttifs/drive"
)

// SectorBytes is the piece that a power cut leaves whole or untouched.
const SectorBytes = 512

// Kind of an operation.
type Kind uint8

const (
	Write Kind = iota
	Flush
	Discard
	Mark // set by the test: what came before was acknowledged
)

// Op is one recorded operation.
type Op struct {
	Kind  Kind
	Drive int
	Off   int64
	Data  []byte // of a Write
	N     int64  // of a Discard
	Note  int    // of a Mark
}

// Set is drives that record into one common log, in the order in which their operations happened.
type Set struct {
	mu     sync.Mutex
	drives []*Drive
	log    []Op
	record bool
	// fail, if set, may refuse an operation before it happens.
	fail func(Op) error
}

// Drive is one member of a set.
type Drive struct {
	set   *Set
	index int
	name  string
	lba   int
	image *Image
}

var _ drive.Drive = (*Drive)(nil)

// NewSet makes zeroed drives of the given sizes.
func NewSet(sizes ...int64) *Set {
	var images []*Image
	for _, n := range sizes {
		images = append(images, NewImage(n))
	}
	return FromImages(images)
}

// Content is what a drive may be made from.
type Content interface{ []byte | *Image }

func imagesOf[T Content](contents []T) []*Image {
	var out []*Image
	for _, c := range contents {
		switch c := any(c).(type) {
		case []byte:
			m := NewImage(int64(len(c)))
			m.WriteAt(c, 0)
			out = append(out, m)
		case *Image:
			out = append(out, c.Clone())
		}
	}
	return out
}

// FromImages makes drives that hold copies of the images.
func FromImages[T Content](images []T) *Set {
	s := &Set{}
	for i, m := range imagesOf(images) {
		s.drives = append(s.drives, &Drive{set: s, index: i, name: fmt.Sprintf("mem%d", i), lba: 512, image: m})
	}
	return s
}

// SetLBA changes the logical block size of all drives.
func (s *Set) SetLBA(n int) {
	for _, d := range s.drives {
		d.lba = n
	}
}

// Drives are the members.
func (s *Set) Drives() []drive.Drive {
	out := make([]drive.Drive, len(s.drives))
	for i, d := range s.drives {
		out[i] = d
	}
	return out
}

// Images copies what the drives hold now.
func (s *Set) Images() [][]byte {
	var out [][]byte
	for _, m := range s.Snapshot() {
		out = append(out, m.Bytes())
	}
	return out
}

// Snapshot is what the drives hold now, cheaply.
func (s *Set) Snapshot() []*Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*Image
	for _, d := range s.drives {
		out = append(out, d.image.Clone())
	}
	return out
}

// Record starts an empty log.
func (s *Set) Record() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log, s.record = nil, true
}

// Log is what was recorded.
func (s *Set) Log() []Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Op(nil), s.log...)
}

// Mark notes an acknowledgement in the log.
func (s *Set) Mark(note int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.record {
		s.log = append(s.log, Op{Kind: Mark, Note: note})
	}
}

// FailWith installs a function that may refuse operations; nil removes it.
func (s *Set) FailWith(f func(Op) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = f
}

// do runs one operation under the set's lock, so that the log is a total order.
func (s *Set) do(op Op, f func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		if err := s.fail(op); err != nil {
			return err
		}
	}
	if s.record {
		if op.Kind == Write {
			op.Data = append([]byte(nil), op.Data...)
		}
		s.log = append(s.log, op)
	}
	if f != nil {
		f()
	}
	return nil
}

func (d *Drive) inside(off, n int64) error {
	if off < 0 || n < 0 || off+n > d.image.Size() {
		return drive.ErrRange
	}
	return nil
}

func (d *Drive) ReadAt(p []byte, off int64) error {
	if err := d.inside(off, int64(len(p))); err != nil {
		return err
	}
	d.set.mu.Lock()
	defer d.set.mu.Unlock()
	d.image.ReadAt(p, off)
	return nil
}

func (d *Drive) WriteAt(p []byte, off int64) error {
	if err := d.inside(off, int64(len(p))); err != nil {
		return err
	}
	return d.set.do(Op{Kind: Write, Drive: d.index, Off: off, Data: p}, func() { d.image.WriteAt(p, off) })
}

func (d *Drive) Flush() error { return d.set.do(Op{Kind: Flush, Drive: d.index}, nil) }

// Discard fills the range with a pattern that nobody may rely on.
func (d *Drive) Discard(off, n int64) error {
	if err := d.inside(off, n); err != nil {
		return err
	}
	return d.set.do(Op{Kind: Discard, Drive: d.index, Off: off, N: n}, func() { d.image.fill(off, n) })
}

// Grow makes the drive longer.
func (d *Drive) Grow(size int64) error {
	d.set.mu.Lock()
	defer d.set.mu.Unlock()
	d.image.grow(size)
	return nil
}

func (d *Drive) WriteZeroes(off, n int64) error { return d.WriteAt(make([]byte, n), off) }
func (d *Drive) Size() int64                    { return d.image.Size() }
func (d *Drive) LBABytes() int                  { return d.lba }
func (d *Drive) Kind() drive.Kind               { return drive.Memory }
func (d *Drive) Direct() bool                   { return true }
func (d *Drive) Name() string                   { return d.name }
func (d *Drive) Fd() int                        { return -1 }
func (d *Drive) Bytes() []byte                  { return nil }
func (d *Drive) Close() error                   { return nil }

// Cutter plays power cuts over a log: after each operation it can say what the drives might hold.
type Cutter struct {
	log     []Op
	next    int
	durable []*Image // writes up to each drive's last flush
	pending [][]Op   // writes since
	marks   []int
	rng     *rand.Rand
}

// NewCutter starts from the drives' contents before the log.
func NewCutter[T Content](before []T, log []Op, seed uint64) *Cutter {
	return &Cutter{log: log, durable: imagesOf(before), pending: make([][]Op, len(before)),
		rng: rand.New(rand.NewPCG(seed, 1))}
}

// Step takes one operation; false at the end.
func (c *Cutter) Step() (Op, bool) {
	if c.next == len(c.log) {
		return Op{}, false
	}
	op := c.log[c.next]
	c.next++
	switch op.Kind {
	case Write, Discard:
		c.pending[op.Drive] = append(c.pending[op.Drive], op)
	case Flush:
		for _, w := range c.pending[op.Drive] {
			apply(c.durable[op.Drive], w)
		}
		c.pending[op.Drive] = nil
	case Mark:
		c.marks = append(c.marks, op.Note)
	}
	return op, true
}

func apply(m *Image, op Op) {
	if op.Kind == Write {
		m.WriteAt(op.Data, op.Off)
		return
	}
	m.fill(op.Off, op.N)
}

// Marks are the notes acknowledged so far.
func (c *Cutter) Marks() []int { return c.marks }

// Cut is what the drives might hold if the power failed now: everything flushed, and of the rest nothing, everything,
// or a random choice of whole writes or of single sectors.
func (c *Cutter) Cut() []*Image {
	mode := c.rng.IntN(4)
	var out []*Image
	for d, durable := range c.durable {
		b := durable.Clone()
		for _, op := range c.pending[d] {
			switch {
			case mode == 0:
			case mode == 1 || mode == 2 && c.rng.IntN(2) == 0:
				apply(b, op)
			case mode == 3 && op.Kind == Write:
				for off := 0; off < len(op.Data); off += SectorBytes {
					if c.rng.IntN(2) == 0 {
						b.WriteAt(op.Data[off:min(off+SectorBytes, len(op.Data))], op.Off+int64(off))
					}
				}
			}
		}
		out = append(out, b)
	}
	return out
}

package engine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"tuttifs/checksum"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/lifetime"
	"tuttifs/stripe"
)

// PoolSpec of OpenPool: Identity is canonical JSON (gpufile.Identity).
type PoolSpec struct {
	Name               string
	Identity           []byte
	Geometry           stripe.Geometry // trailers are appended if it has none
	TokensPerFile      uint32
	Family             string
	TrailingHit        uint32
	MinBytes, MaxBytes uint64
	MaxSlots           uint32
	// KeepBytes of the session's memory for blocks that are declined; 0: all that no pool has. A pool that is opened again
	// has the part that it had.
	KeepBytes int64
}

// Pool is an opened pool. Its verbs act on it alone, also where it belongs to a family: verbs on whole families are the
// ABI's.
type Pool struct {
	control    *control
	target     ioctl.Target
	layout     *stripe.Layout
	entryUnits uint64

	refresh sync.Mutex // one refresh at a time
	extents atomic.Pointer[gio.Map]
	word    atomic.Uint64 // the session's map word when the map was fetched
	lives   gio.Lifetimes

	mu    sync.Mutex
	parts map[uint64]int // batches of a pin or reservation that did not fit one call

	keeper *keeper // of blocks that are declined, nil: there is none
}

// OpenPool opens or creates, waits for it to be durable, and fetches layout and rows.
func (s *Session) OpenPool(spec PoolSpec) (*Pool, error) {
	s.opening.Lock()
	defer s.opening.Unlock()
	keepers := len(s.keepers)
	p, err := s.open(&spec)
	if err != nil {
		s.unkeep(keepers)
		return nil, fmt.Errorf("engine: pool %q: %w", spec.Name, err)
	}
	return p, nil
}

func (s *Session) open(spec *PoolSpec) (*Pool, error) {
	if err := s.checkModel(spec); err != nil {
		return nil, err
	}
	keep := func(p *Pool) error { return s.keep(p, spec) }
	p, err := s.control.openPool(*spec, keep)
	if err != nil {
		return nil, err
	}
	// Virtual controllers take commands of any object's size; an SSD has a limit of its own (MDTS).
	for o := range p.layout.Objects() {
		if n := uint64(p.layout.ObjectUnits(uint16(o))) * stripe.UnitBytes; n > uint64(s.attach.Reply.CommandBytes) {
			return nil, fmt.Errorf("%w: object %d has %d bytes, and the session's drives take commands of %d: make objects "+
				"smaller (fewer tokens a file, K and V apart), or use a session without Real", ErrInvalid, o, n,
				s.attach.Reply.CommandBytes)
		}
	}
	if s.gpu.memory != nil {
		s.gpu.memory.prove(s, p)
	}
	return p, nil
}

// openPool calls laidOut when the layout is known, before the map is fetched.
func (c *control) openPool(spec PoolSpec, laidOut func(p *Pool) error) (*Pool, error) {
	geometry := spec.Geometry
	if n := len(geometry.Objects); n > 0 && !geometry.Objects[n-1].IsTrailer() {
		geometry = geometry.WithTrailers()
	}
	encoded, err := geometry.MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	a := ioctl.PoolOpen{
		MinBytes: spec.MinBytes, MaxBytes: spec.MaxBytes, MaxSlots: spec.MaxSlots,
		TokensPerFile: spec.TokensPerFile, TrailingHit: spec.TrailingHit, ChecksumAlg: 1,
	}
	if len(spec.Name) > len(a.Name) || len(spec.Family) > len(a.Family) {
		return nil, fmt.Errorf("%w: names have at most %d bytes", ErrInvalid, ioctl.NameBytes)
	}
	copy(a.Name[:], spec.Name)
	copy(a.Family[:], spec.Family)
	err = c.retry(func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		spans, err := c.spans(len(spec.Identity), len(encoded))
		if err != nil {
			return err
		}
		copy(c.bytes(spans[0]), spec.Identity)
		copy(c.bytes(spans[1]), encoded)
		a.Identity, a.Geometry = spans[0], spans[1]
		return c.verbs.PoolOpen(&a)
	})
	if err != nil {
		return nil, err
	}
	if err := c.ticket(a.Ticket); err != nil {
		return nil, err
	}
	p := &Pool{control: c, target: a.Target, parts: map[uint64]int{}}
	if err := p.fetchLayout(len(encoded)); err != nil {
		return nil, err
	}
	if err := laidOut(p); err != nil {
		return nil, err
	}
	return p, p.fetchMap()
}

// spans divides the arena among consecutive spans of the given lengths. The lock is held.
func (c *control) spans(lengths ...int) ([]ioctl.Span, error) {
	if c.arena == nil {
		return nil, errClosed
	}
	spans := make([]ioctl.Span, len(lengths))
	at := 0
	for i, n := range lengths {
		spans[i] = ioctl.Span{Offset: uint64(at), Bytes: uint64(n)}
		at += (n + 7) &^ 7
	}
	if at > len(c.arena) {
		return nil, fmt.Errorf("%w: %d bytes do not fit the arena of %d: raise SessionOptions.ArenaBytes",
			ErrInvalid, at, len(c.arena))
	}
	return spans, nil
}

// bytes is a span's memory.
func (c *control) bytes(s ioctl.Span) []byte { return c.arena[s.Offset : s.Offset+s.Bytes] }

// fetchLayout asks for the pool's own geometry, which is the truth whatever was sent.
func (p *Pool) fetchLayout(hint int) error {
	c := p.control
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(hint)
	if err != nil {
		return err
	}
	a := ioctl.Layout{Target: p.target, Geometry: spans[0]}
	if err := c.verbs.Layout(&a); err != nil {
		return explain(err)
	}
	if a.GeometryBytes > spans[0].Bytes {
		return fmt.Errorf("%w: geometry of %d bytes was answered in %d", ErrInvalid, a.GeometryBytes, spans[0].Bytes)
	}
	// Parsing reads a copy: the arena is shared.
	geometry, err := stripe.ParseGeometry(bytes.Clone(c.bytes(spans[0])[:a.GeometryBytes]))
	if err != nil {
		return err
	}
	p.layout, err = stripe.NewLayout(geometry, int(a.Width))
	if err != nil {
		return err
	}
	if n := p.layout.SlotsPerRow(a.EntryUnits); n != a.SlotsPerRow || p.layout.SlotUnits() != a.SlotUnits {
		return fmt.Errorf("%w: mount has %d slots of %d units a row, this build makes it %d of %d: versions differ",
			ErrInvalid, a.SlotsPerRow, a.SlotUnits, n, p.layout.SlotUnits())
	}
	p.entryUnits = a.EntryUnits
	return nil
}

// mapRounds bounds the attempts at a map that changes while it is read.
const mapRounds = 20

// fetchMap fetches the rows and acknowledges their generation.
func (p *Pool) fetchMap() error {
	p.refresh.Lock()
	defer p.refresh.Unlock()
	word := p.control.mapWord()
	for range mapRounds {
		rows, generation, state, err := p.rows()
		if err != nil {
			return explain(err)
		}
		if state == rowsTorn {
			continue
		}
		if state == rowsKnown {
			p.word.Store(word)
			return nil
		}
		known := generation
		if p.keeper != nil {
			whole := false
			if rows, whole = p.keeper.behind(rows); !whole {
				known = noGeneration
			}
		}
		m, err := gio.NewMap(p.layout, p.entryUnits, rows, known)
		if err != nil {
			return err
		}
		m.SetLifetimes(&p.lives)
		p.extents.Store(m)
		p.word.Store(word)
		return explain(p.control.verbs.MapAck(&ioctl.MapAck{Target: p.target, MapGeneration: generation}))
	}
	return fmt.Errorf("%w: the extent map changed %d times while it was read", ErrAgain, mapRounds)
}

// noGeneration is that of a map which lacks rows: whatever the mount's is, they are fetched again.
const noGeneration = math.MaxUint64

type rowsState int

const (
	rowsWhole rowsState = iota
	rowsTorn            // the map changed between two pages
	rowsKnown           // the pool's map is the one it has: another pool's rows have changed
)

// rows reads all pages of rows.
func (p *Pool) rows() (rows []gio.MapRow, generation uint64, state rowsState, err error) {
	known := p.extents.Load()
	c := p.control
	width := p.layout.Width()
	size := int(unsafe.Sizeof(ioctl.RowHead{})) + width*int(unsafe.Sizeof(ioctl.RowEntry{}))
	c.mu.Lock()
	defer c.mu.Unlock()
	for first := uint32(0); ; {
		spans, err := c.spans(len(c.arena) / size * size)
		if err != nil {
			return nil, 0, rowsTorn, err
		}
		a := ioctl.Rows{Target: p.target, Rows: spans[0], First: first}
		if err := c.verbs.Rows(&a); err != nil {
			return nil, 0, rowsTorn, err
		}
		if int(a.RowBytes) != size || uint64(a.Count)*uint64(size) > spans[0].Bytes {
			return nil, 0, rowsTorn, fmt.Errorf("%w: %d rows of %d bytes answered, width is %d",
				ErrInvalid, a.Count, a.RowBytes, width)
		}
		switch {
		case first > 0 && a.MapGeneration != generation:
			return nil, 0, rowsTorn, nil
		case first == 0 && known != nil && a.MapGeneration == known.Generation():
			return nil, 0, rowsKnown, nil
		}
		generation = a.MapGeneration
		for i := range int(a.Count) {
			rows = append(rows, parseRow(c.bytes(spans[0])[i*size:(i+1)*size], width))
		}
		if a.Next == 0 {
			return rows, generation, rowsWhole, nil
		}
		if a.Next <= first {
			return nil, 0, rowsTorn, fmt.Errorf("%w: rows after %d begin at %d", ErrInvalid, first, a.Next)
		}
		first = a.Next
	}
}

// parseRow decodes a RowHead and its RowEntries.
func parseRow(b []byte, width int) gio.MapRow {
	row := gio.MapRow{Number: binary.LittleEndian.Uint32(b)}
	b = b[unsafe.Sizeof(ioctl.RowHead{}):]
	for range width {
		row.Units = append(row.Units, binary.LittleEndian.Uint64(b))
		row.Drives = append(row.Drives, binary.LittleEndian.Uint16(b[8:]))
		b = b[unsafe.Sizeof(ioctl.RowEntry{}):]
	}
	return row
}

// Layout is the pool's layout; it never changes.
func (p *Pool) Layout() *stripe.Layout { return p.layout }

// Map is the pool's extent map, refreshed when the mount says that rows have moved. If that fails, the last one is
// still right for every slot that is leased: rows under leases do not move.
func (p *Pool) Map() *gio.Map {
	if p.control.mapWord() != p.word.Load() {
		_ = p.fetchMap()
	}
	return p.extents.Load()
}

// follow makes the map at least as new as a verb's answer.
func (p *Pool) follow(generation uint64) error {
	if p.extents.Load().Generation() == generation {
		return nil
	}
	return p.fetchMap()
}

// Grant is a leased slot.
type Grant struct {
	Slot       uint32
	Status     uint8 // ioctl.Grant*
	Tokens     uint32
	Generation uint64
	Seed       checksum.Seed
	Lifetime   lifetime.Class // of what is to be written
}

// grantBytes is the size of an ioctl.Grant.
const grantBytes = int(unsafe.Sizeof(ioctl.Grant{}))

// parseGrants decodes n grants of the arena.
func parseGrants(b []byte, grants []Grant) {
	for i := range grants {
		e := b[i*grantBytes : (i+1)*grantBytes]
		grants[i] = Grant{
			Slot: binary.LittleEndian.Uint32(e), Tokens: binary.LittleEndian.Uint32(e[4:]),
			Generation: binary.LittleEndian.Uint64(e[8:]), Seed: checksum.Seed(e[16:32]), Status: e[32],
			Lifetime: lifetime.Class(e[33]),
		}
	}
}

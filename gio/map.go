package gio

import (
	"fmt"
	"math"

	"tuttifs/lifetime"
	"tuttifs/stripe"
)

// MapRow is one row: unit addresses and drives of its W entries.
type MapRow struct {
	Number uint32
	Drives []uint16
	Units  []uint64
}

// RowsMax bounds row numbers, so that a damaged map cannot ask for unbounded memory.
const RowsMax = 1 << 22

// unitBits is the room of a unit address in a packed entry; 2^48 units are an exbibyte.
const unitBits = 48

// noEntry marks the entries of rows that the map does not hold.
const noEntry = math.MaxUint64

// objectPlace is an object's row of the layout table. 16 bytes, as executors on a GPU read it.
type objectPlace struct {
	offset   uint32 // units from the set's base on its entry
	bytes    uint32 // payload
	units    uint16
	position uint16 // place in the (size, layer, rank) order, modulo the width
	_        uint32
}

// Map is the extent map of one pool as executors have it: the layout table and the rows, so that two table reads turn
// (slot, object) into (drive, unit). Immutable; replaced when the pool's generation changes. Safe for concurrent use.
type Map struct {
	layout      *stripe.Layout
	objects     []objectPlace
	entries     []uint64 // [row*width + entry]: drive in the top 16 bits, first unit below; noEntry where unmapped
	width       uint32
	slotsPerRow uint32
	slotUnits   uint64
	generation  uint64
	lives       *Lifetimes // nil: nothing is known
}

// NewMap builds the tables. Rows may come in any order and with gaps.
func NewMap(l *stripe.Layout, entryUnits uint64, rows []MapRow, generation uint64) (*Map, error) {
	m := &Map{
		layout: l, width: uint32(l.Width()), slotsPerRow: l.SlotsPerRow(entryUnits), slotUnits: l.SlotUnits(),
		generation: generation,
	}
	if m.slotsPerRow == 0 {
		return nil, fmt.Errorf("%w: an entry of %d units holds no stripe set of %d",
			ErrInvalid, entryUnits, m.slotUnits)
	}
	if err := m.fillObjects(); err != nil {
		return nil, err
	}
	return m, m.fillRows(rows, entryUnits)
}

func (m *Map) fillObjects() error {
	g := m.layout.Geometry()
	m.objects = make([]objectPlace, len(g.Objects))
	for i := range g.Objects {
		o := &g.Objects[i]
		offset := m.layout.Offset(uint16(i))
		if offset > math.MaxUint32 {
			return fmt.Errorf("%w: object %d lies %d units into its set", ErrInvalid, i, offset)
		}
		m.objects[i] = objectPlace{
			offset: uint32(offset), bytes: o.Bytes(), units: uint16(o.Units()),
			position: uint16(uint32(m.layout.Position(uint16(i))) % m.width),
		}
	}
	return nil
}

func (m *Map) fillRows(rows []MapRow, entryUnits uint64) error {
	count := uint32(0)
	for i := range rows {
		if rows[i].Number >= RowsMax {
			return fmt.Errorf("%w: row %d, the highest is %d", ErrInvalid, rows[i].Number, RowsMax-1)
		}
		count = max(count, rows[i].Number+1)
	}
	m.entries = make([]uint64, int(count)*int(m.width))
	for i := range m.entries {
		m.entries[i] = noEntry
	}
	for i := range rows {
		r := &rows[i]
		if len(r.Drives) != int(m.width) || len(r.Units) != int(m.width) {
			return fmt.Errorf("%w: row %d has %d drives and %d addresses, width is %d",
				ErrInvalid, r.Number, len(r.Drives), len(r.Units), m.width)
		}
		for e, unit := range r.Units {
			if unit+entryUnits < unit || unit+entryUnits > 1<<unitBits-1 {
				return fmt.Errorf("%w: row %d entry %d begins at unit %d", ErrInvalid, r.Number, e, unit)
			}
			p := &m.entries[int(r.Number)*int(m.width)+e]
			if *p != noEntry {
				return fmt.Errorf("%w: row %d is given twice", ErrInvalid, r.Number)
			}
			*p = uint64(r.Drives[e])<<unitBits | unit
		}
	}
	return nil
}

// Locate turns (slot, object) into its extent: the drive, its first 4-KiB unit and how many. ok is false for a slot in
// no row of the map and for an object that the geometry does not have.
func (m *Map) Locate(slot uint32, object uint16) (drive uint16, unit uint64, units uint32, ok bool) {
	if int(object) >= len(m.objects) {
		return 0, 0, 0, false
	}
	o := &m.objects[object]
	row, index := slot/m.slotsPerRow, slot%m.slotsPerRow
	set, r := index/m.width, index%m.width
	entry := r + uint32(o.position)
	if entry >= m.width {
		entry -= m.width
	}
	i := uint64(row)*uint64(m.width) + uint64(entry)
	if i >= uint64(len(m.entries)) {
		return 0, 0, 0, false
	}
	e := m.entries[i]
	if e == noEntry {
		return 0, 0, 0, false
	}
	return uint16(e >> unitBits), e&(1<<unitBits-1) + uint64(set)*m.slotUnits + uint64(o.offset), uint32(o.units), true
}

// ObjectBytes is an object's payload length, 0 if the geometry does not have it.
func (m *Map) ObjectBytes(object uint16) uint32 {
	if int(object) >= len(m.objects) {
		return 0
	}
	return m.objects[object].bytes
}

// Slots is the number behind the highest slot that a row of the map could have.
func (m *Map) Slots() uint64 {
	return uint64(len(m.entries)) / uint64(m.width) * uint64(m.slotsPerRow)
}

// SetLifetimes says what is expected of slots that are written, before anybody else has the map.
func (m *Map) SetLifetimes(t *Lifetimes) { m.lives = t }

// lifetime is what is expected of a slot that is written.
func (m *Map) lifetime(slot uint32) lifetime.Class {
	if m.lives == nil {
		return lifetime.Normal
	}
	return m.lives.of(slot)
}

func (m *Map) Layout() *stripe.Layout { return m.layout }
func (m *Map) Generation() uint64     { return m.generation }

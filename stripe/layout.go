package stripe

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// Layout is the layout of one geometry over rows of width W: tables only. Safe for concurrent use.
//
// Methods that take an object number want one below Objects().
type Layout struct {
	geometry Geometry
	width    int

	slotUnits uint64
	places    []place // by object number
	order     []uint16
	groups    []group // by position

	layers   int
	byLayer  map[uint32][]uint16 // rank << 16 | layer
	byRank   [][]uint16
	trailers []uint16
}

// place is where one object lies in every slot.
type place struct {
	offset   uint64 // units from its set's base
	bytes    uint32
	units    uint32
	position uint16
	turn     uint8 // position mod W
	ordinal  int32 // index in RankObjects, -1 for a trailer
}

// group is a range of positions whose objects have one size, so that a unit is found by one division.
type group struct {
	offset   uint64 // of the first object
	position uint32 // likewise
	units    uint32 // of each object
}

// NewLayout builds the tables.
func NewLayout(g Geometry, width int) (*Layout, error) {
	if width < 1 || width > MaxWidth {
		return nil, fmt.Errorf("stripe: width %d, want 1 to %d", width, MaxWidth)
	}
	if err := g.Validate(); err != nil {
		return nil, err
	}
	l := &Layout{geometry: g.Clone(), width: width}
	l.sortObjects()
	l.groupObjects()
	return l, nil
}

// sortObjects lays the objects out in their order.
func (l *Layout) sortObjects() {
	objects := l.geometry.Objects
	l.places = make([]place, len(objects))
	l.order = make([]uint16, len(objects))
	for t := range objects {
		l.places[t].bytes = objects[t].Bytes()
		l.places[t].units = objects[t].Units()
		l.order[t] = uint16(t)
	}
	slices.SortFunc(l.order, func(a, b uint16) int {
		return cmp.Or(
			cmp.Compare(l.places[a].units, l.places[b].units),
			cmp.Compare(objects[a].Layer, objects[b].Layer),
			cmp.Compare(objects[a].Rank, objects[b].Rank),
			cmp.Compare(a, b),
		)
	})
	for i, t := range l.order {
		p := &l.places[t]
		p.position = uint16(i)
		p.turn = uint8(i % l.width)
		p.offset = l.slotUnits
		if n := len(l.groups); n == 0 || l.groups[n-1].units != p.units {
			l.groups = append(l.groups, group{offset: p.offset, position: uint32(i), units: p.units})
		}
		l.slotUnits += uint64(p.units)
	}
}

// groupObjects lists the objects by layer and rank.
func (l *Layout) groupObjects() {
	ranks := l.geometry.ranks()
	l.byLayer = make(map[uint32][]uint16)
	l.byRank = make([][]uint16, ranks)
	l.trailers = make([]uint16, ranks)
	for t := range l.geometry.Objects {
		o := &l.geometry.Objects[t]
		if o.IsTrailer() {
			l.trailers[o.Rank] = uint16(t)
			l.places[t].ordinal = -1
			continue
		}
		l.layers = max(l.layers, int(o.Layer)+1)
		key := layerKey(o.Layer, o.Rank)
		l.byLayer[key] = append(l.byLayer[key], uint16(t))
		l.places[t].ordinal = int32(len(l.byRank[o.Rank]))
		l.byRank[o.Rank] = append(l.byRank[o.Rank], uint16(t))
	}
}

func layerKey(layer, rank uint16) uint32 { return uint32(rank)<<16 | uint32(layer) }

// Geometry is what the layout was made from; not to be modified.
func (l *Layout) Geometry() *Geometry { return &l.geometry }

// Width is W.
func (l *Layout) Width() int { return l.width }

// Objects is the number of objects of a slot, trailers included.
func (l *Layout) Objects() int { return len(l.places) }

// SlotUnits is the sum of all objects' units: what one slot occupies, and what a stripe set occupies on each entry.
func (l *Layout) SlotUnits() uint64 { return l.slotUnits }

// Position is object t's place in the (size, layer, rank) order.
func (l *Layout) Position(object uint16) int { return int(l.places[object].position) }

// Offset is object t's first unit, relative to its set's base on its entry.
func (l *Layout) Offset(object uint16) uint64 { return l.places[object].offset }

// ObjectBytes is object t's payload length.
func (l *Layout) ObjectBytes(object uint16) uint32 { return l.places[object].bytes }

// ObjectUnits is object t's length on the drive.
func (l *Layout) ObjectUnits(object uint16) uint32 { return l.places[object].units }

// Locate turns (index of the slot in its row, object) into (entry, first unit within the entry).
func (l *Layout) Locate(index uint32, object uint16) (entry int, unit uint64) {
	p := &l.places[object]
	set, turn := index/uint32(l.width), index%uint32(l.width)
	entry = int(turn) + int(p.turn)
	if entry >= l.width {
		entry -= l.width
	}
	return entry, uint64(set)*l.slotUnits + p.offset
}

// Resolve is Locate's inverse: which slot of the row and which object holds a unit of an entry, and which unit of
// that object it is. ok is false for units that hold no object (the tail of an entry). slots is the row's slot
// count.
func (l *Layout) Resolve(entry int, unit uint64, slots uint32) (index uint32, object uint16, within uint32, ok bool) {
	if entry < 0 || entry >= l.width {
		return 0, 0, 0, false
	}
	set, rest := unit/l.slotUnits, unit%l.slotUnits
	if set > math.MaxUint32/uint64(l.width) {
		return 0, 0, 0, false
	}
	g := l.groupOf(rest)
	position := int(g.position) + int((rest-g.offset)/uint64(g.units))
	turn := (entry - position%l.width + l.width) % l.width
	slot := set*uint64(l.width) + uint64(turn)
	if slot >= uint64(slots) {
		return 0, 0, 0, false
	}
	return uint32(slot), l.order[position], uint32((rest - g.offset) % uint64(g.units)), true
}

// groupOf is the last group that starts at or before a unit of a slot.
func (l *Layout) groupOf(unit uint64) *group {
	low, high := 0, len(l.groups)
	for high-low > 1 {
		if middle := (low + high) / 2; l.groups[middle].offset <= unit {
			low = middle
		} else {
			high = middle
		}
	}
	return &l.groups[low]
}

// EntryShift is k: the smallest k so that an entry of segmentUnits<<k wastes at most 1/16 behind whole stripe sets;
// if none up to maxShift does, the one that wastes least. ok is false if not even one set fits in
// segmentUnits<<maxShift.
func EntryShift(slotUnits, segmentUnits uint64, maxShift int) (k int, ok bool) {
	if slotUnits == 0 || segmentUnits == 0 {
		return 0, false
	}
	var bestWaste, bestEntry uint64
	for shift := 0; shift <= maxShift && shift < bits.LeadingZeros64(segmentUnits)+1; shift++ {
		entry := segmentUnits << shift
		if entry < slotUnits {
			continue
		}
		waste := entry % slotUnits
		if waste <= entry/16 {
			return shift, true
		}
		if !ok || lessFraction(waste, entry, bestWaste, bestEntry) {
			k, ok, bestWaste, bestEntry = shift, true, waste, entry
		}
	}
	return k, ok
}

// lessFraction says whether a/b < c/d, without overflow.
func lessFraction(a, b, c, d uint64) bool {
	leftHigh, leftLow := bits.Mul64(a, d)
	rightHigh, rightLow := bits.Mul64(c, b)
	return leftHigh < rightHigh || (leftHigh == rightHigh && leftLow < rightLow)
}

// SlotsPerRow is W x whole stripe sets that fit an entry, kept within u32.
func (l *Layout) SlotsPerRow(entryUnits uint64) uint32 {
	sets := min(entryUnits/l.slotUnits, math.MaxUint32/uint64(l.width))
	return uint32(sets) * uint32(l.width)
}

// LayerObjects lists the object numbers of one layer and rank, in order; none for a layer or rank that does not
// exist. Not to be modified.
func (l *Layout) LayerObjects(layer, rank uint16) []uint16 { return l.byLayer[layerKey(layer, rank)] }

// RankObjects lists all objects of one rank but its trailer. Not to be modified.
func (l *Layout) RankObjects(rank uint16) []uint16 {
	if int(rank) >= len(l.byRank) {
		return nil
	}
	return l.byRank[rank]
}

// TrailerObject is that rank's trailer, NoObject for a rank that does not exist.
func (l *Layout) TrailerObject(rank uint16) uint16 {
	if int(rank) >= len(l.trailers) {
		return NoObject
	}
	return l.trailers[rank]
}

// OrdinalInRank is an object's index within RankObjects of its rank: its place in the trailer. -1 for a trailer.
func (l *Layout) OrdinalInRank(object uint16) int { return int(l.places[object].ordinal) }

// Ranks is the number of ranks.
func (l *Layout) Ranks() int { return len(l.byRank) }

// Layers is one more than the highest layer; layers between may have no objects (another pool of the family has
// them).
func (l *Layout) Layers() int { return l.layers }

package stripe

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// randomGeometry mixes what models bring: one to several sizes, odd rows, split or joined tensors, ranks.
func randomGeometry(r *rand.Rand) Geometry {
	ranks, layers := 1+r.IntN(5), 1+r.IntN(9)
	sizes := make([]uint32, 1+r.IntN(4))
	for i := range sizes {
		switch r.IntN(4) {
		case 0:
			sizes[i] = 132 * uint32(1+r.IntN(64))
		case 1:
			sizes[i] = 656 * uint32(1+r.IntN(64))
		case 2:
			sizes[i] = UnitBytes * uint32(1+r.IntN(MaxObjectBytes/UnitBytes))
		default:
			sizes[i] = 1 + r.Uint32N(MaxObjectBytes)
		}
	}
	var g Geometry
	for layer := range layers {
		for rank := range ranks {
			for range 1 + r.IntN(3) {
				n := sizes[r.IntN(len(sizes))]
				runs := []Run{{Kind: RunKind(r.IntN(int(RunTrailer))), Bytes: n}}
				if n > 1 && r.IntN(2) == 0 {
					cut := 1 + r.Uint32N(n-1)
					runs = []Run{{Kind: RunK, Bytes: cut}, {Kind: RunV, Bytes: n - cut}}
				}
				g.Objects = append(g.Objects, Object{Layer: uint16(layer * 3), Rank: uint16(rank), Runs: runs})
			}
		}
	}
	r.Shuffle(len(g.Objects), func(i, j int) { g.Objects[i], g.Objects[j] = g.Objects[j], g.Objects[i] })
	return g.WithTrailers()
}

func everyWidth(t *testing.T, f func(t *testing.T, r *rand.Rand, l *Layout)) {
	for width := 1; width <= MaxWidth; width++ {
		r := rand.New(rand.NewPCG(uint64(width), 7))
		for range 6 {
			l, err := NewLayout(randomGeometry(r), width)
			require.NoError(t, err)
			f(t, r, l)
		}
	}
}

// TestSetIsFull: the objects of a stripe set's W slots cover each entry's share of the set exactly once. So there
// is no overlap, and nothing is wasted beyond the rounding to units.
func TestSetIsFull(t *testing.T) {
	everyWidth(t, func(t *testing.T, r *rand.Rand, l *Layout) {
		set := uint64(r.IntN(1000))
		covered := make([]map[uint64]uint64, l.Width()) // first unit -> units
		for e := range covered {
			covered[e] = make(map[uint64]uint64)
		}
		for turn := range l.Width() {
			for o := range l.Objects() {
				entry, unit := l.Locate(uint32(set)*uint32(l.Width())+uint32(turn), uint16(o))
				_, twice := covered[entry][unit]
				require.False(t, twice)
				covered[entry][unit] = uint64(l.ObjectUnits(uint16(o)))
			}
		}
		for _, pieces := range covered {
			at := set * l.SlotUnits()
			for range pieces {
				units, ok := pieces[at]
				require.True(t, ok, "gap or overlap at unit %d", at)
				at += units
			}
			require.Equal(t, (set+1)*l.SlotUnits(), at)
		}
		var payload uint64
		for o := range l.Objects() {
			require.Less(t, uint64(l.ObjectUnits(uint16(o)))*UnitBytes-uint64(l.ObjectBytes(uint16(o))), uint64(UnitBytes))
			payload += uint64(l.ObjectUnits(uint16(o)))
		}
		require.Equal(t, payload, l.SlotUnits())
	})
}

// TestObjectIsSpread: every object of W consecutive slots lies on W entries, wherever the run of slots starts.
func TestObjectIsSpread(t *testing.T) {
	everyWidth(t, func(t *testing.T, r *rand.Rand, l *Layout) {
		start := r.Uint32N(1 << 20)
		for o := range l.Objects() {
			var entries uint64
			for i := range l.Width() {
				entry, _ := l.Locate(start+uint32(i), uint16(o))
				entries |= 1 << entry
			}
			require.Equal(t, uint64(math.MaxUint64)>>(64-l.Width()), entries)
		}
	})
}

// TestSizesAreBalanced: a slot's objects of one size lie on all entries in equal numbers, give or take one.
func TestSizesAreBalanced(t *testing.T) {
	everyWidth(t, func(t *testing.T, r *rand.Rand, l *Layout) {
		index := r.Uint32N(1 << 20)
		counts := make(map[uint32][]int)
		for o := range l.Objects() {
			units := l.ObjectUnits(uint16(o))
			if counts[units] == nil {
				counts[units] = make([]int, l.Width())
			}
			entry, _ := l.Locate(index, uint16(o))
			counts[units][entry]++
		}
		for units, perEntry := range counts {
			low, high := perEntry[0], perEntry[0]
			for _, n := range perEntry {
				low, high = min(low, n), max(high, n)
			}
			require.LessOrEqual(t, high-low, 1, "%d units: %v", units, perEntry)
		}
	})
}

// TestRanksAreSpread: the objects of one layer, one for each rank and all of one size, lie on as many entries as
// there can be.
func TestRanksAreSpread(t *testing.T) {
	for width := 1; width <= MaxWidth; width++ {
		for _, ranks := range []int{1, 2, 3, 4, 8, 16} {
			g, err := KV{Layers: 5, KVHeads: 48, HeadDim: 128, DTypeBytes: 2, Tokens: 16, Ranks: ranks}.Geometry()
			require.NoError(t, err)
			l, err := NewLayout(g, width)
			require.NoError(t, err)
			for layer := range l.Layers() {
				var entries uint64
				for rank := range ranks {
					for _, o := range l.LayerObjects(uint16(layer), uint16(rank)) {
						entry, _ := l.Locate(12345, o)
						entries |= 1 << entry
					}
				}
				spread := 0
				for ; entries != 0; entries &= entries - 1 {
					spread++
				}
				require.Equal(t, min(width, ranks), spread)
			}
		}
	}
}

func TestResolveInvertsLocate(t *testing.T) {
	everyWidth(t, func(t *testing.T, r *rand.Rand, l *Layout) {
		entryUnits := l.SlotUnits()*uint64(1+r.IntN(5)) + r.Uint64N(l.SlotUnits())
		slots := l.SlotsPerRow(entryUnits)
		require.Equal(t, uint32(entryUnits/l.SlotUnits())*uint32(l.Width()), slots)
		for range 60 {
			index, object := r.Uint32N(slots), uint16(r.IntN(l.Objects()))
			within := r.Uint32N(l.ObjectUnits(object))
			entry, unit := l.Locate(index, object)
			require.Less(t, unit+uint64(within), entryUnits)
			gotIndex, gotObject, gotWithin, ok := l.Resolve(entry, unit+uint64(within), slots)
			require.True(t, ok)
			require.Equal(t, []any{index, object, within}, []any{gotIndex, gotObject, gotWithin})
		}
		tail := l.SlotUnits() * (entryUnits / l.SlotUnits())
		for _, unit := range []uint64{tail, entryUnits, entryUnits + l.SlotUnits(), math.MaxUint64} {
			_, _, _, ok := l.Resolve(r.IntN(l.Width()), unit, slots)
			require.False(t, ok)
		}
		for _, entry := range []int{-1, l.Width(), math.MaxInt, math.MinInt} {
			_, _, _, ok := l.Resolve(entry, 0, slots)
			require.False(t, ok)
		}
	})
}

func TestTables(t *testing.T) {
	everyWidth(t, func(t *testing.T, r *rand.Rand, l *Layout) {
		objects := l.Geometry().Objects
		seen := make([]bool, len(objects))
		for rank := range l.Ranks() {
			ofRank := l.RankObjects(uint16(rank))
			for i, o := range ofRank {
				require.Equal(t, i, l.OrdinalInRank(o))
				require.EqualValues(t, rank, objects[o].Rank)
				seen[o] = true
			}
			trailer := l.TrailerObject(uint16(rank))
			require.True(t, objects[trailer].IsTrailer())
			require.EqualValues(t, rank, objects[trailer].Rank)
			require.Equal(t, -1, l.OrdinalInRank(trailer))
			seen[trailer] = true
			inLayers := 0
			for layer := range l.Layers() {
				for _, o := range l.LayerObjects(uint16(layer), uint16(rank)) {
					require.EqualValues(t, layer, objects[o].Layer)
					inLayers++
				}
			}
			require.Len(t, ofRank, inLayers)
		}
		require.NotContains(t, seen, false)
		require.Nil(t, l.RankObjects(uint16(l.Ranks())))
		require.Nil(t, l.LayerObjects(0, uint16(l.Ranks())))
		require.EqualValues(t, NoObject, l.TrailerObject(uint16(l.Ranks())))
		for o := range objects {
			require.Equal(t, objects[o].Bytes(), l.ObjectBytes(uint16(o)))
		}
	})
}

func TestOrder(t *testing.T) {
	one := func(layer, rank uint16, n uint32) Object {
		return Object{Layer: layer, Rank: rank, Runs: []Run{{RunKV, n}}}
	}
	g := Geometry{Objects: []Object{
		one(1, 0, 8192), // 0
		one(0, 1, 8192), // 1
		one(0, 0, 8000), // 2: as many units
		one(0, 0, 8192), // 3: a tie with 2, decided by number
		one(9, 0, 100),  // 4
	}}.WithTrailers() // 5, 6: one unit, behind 4 by their layer
	l, err := NewLayout(g, 4)
	require.NoError(t, err)
	for position, object := range []uint16{4, 5, 6, 2, 3, 1, 0} {
		require.Equal(t, position, l.Position(object))
	}
	require.EqualValues(t, 11, l.SlotUnits())
	require.EqualValues(t, 3, l.Offset(2))
	entry, unit := l.Locate(4*10+2, 3)
	require.Equal(t, (2+4)%4, entry)
	require.EqualValues(t, 10*11+5, unit)
}

func TestValidate(t *testing.T) {
	good := func() Geometry {
		g, err := KV{Layers: 2, KVHeads: 2, HeadDim: 64, DTypeBytes: 2, Tokens: 16, Ranks: 2}.Geometry()
		require.NoError(t, err)
		return g.Clone()
	}
	require.NoError(t, good().Validate())
	cases := map[string]func(g *Geometry){
		"0 objects":       func(g *Geometry) { g.Objects = nil },
		"0 runs":          func(g *Geometry) { g.Objects[1].Runs = nil },
		"257 runs":        func(g *Geometry) { g.Objects[1].Runs = make([]Run, 257) },
		"is empty":        func(g *Geometry) { g.Objects[1].Runs = []Run{{RunK, 0}} },
		"several objects": func(g *Geometry) { g.Objects[1].Runs = []Run{{RunK, MaxObjectBytes + 1}} },
		"8589934590 bytes": func(g *Geometry) {
			g.Objects[1].Runs = []Run{{RunK, math.MaxUint32}, {RunV, math.MaxUint32}}
		},
		"unknown kind":         func(g *Geometry) { g.Objects[1].Runs = []Run{{RunTrailer + 1, 9}} },
		"contradict":           func(g *Geometry) { g.Objects[1].Runs = []Run{{RunTrailer, 9}} },
		"rank 65535":           func(g *Geometry) { g.Objects[1].Rank = 65535 },
		"rank 1 has no object": func(g *Geometry) { *g = Geometry{Objects: []Object{g.Objects[0], g.Objects[5]}} },
		"not a trailer":        func(g *Geometry) { g.Objects = g.Objects[:5] },
		"before the last 2":    func(g *Geometry) { g.Objects[0] = g.Objects[4] },
		"want that of rank":    func(g *Geometry) { g.Objects[4], g.Objects[5] = g.Objects[5], g.Objects[4] },
		"want 48 in 1":         func(g *Geometry) { g.Objects[4].Runs = []Run{{RunTrailer, 56}} },
		"problems more":        func(g *Geometry) { *g = Geometry{Objects: make([]Object, 100)} },
		"65536 objects":        func(g *Geometry) { *g = Geometry{Objects: make([]Object, 65536)} },
	}
	for want, damage := range cases {
		g := good()
		damage(&g)
		err := g.Validate()
		require.ErrorIs(t, err, ErrGeometry)
		require.ErrorContains(t, err, want)
		_, err = NewLayout(g, 4)
		require.ErrorIs(t, err, ErrGeometry)
		_, err = g.MarshalBinary()
		require.ErrorIs(t, err, ErrGeometry)
	}
	for _, width := range []int{-1, 0, 65} {
		_, err := NewLayout(good(), width)
		require.ErrorContains(t, err, "width")
	}
}

func TestWithTrailersTwice(t *testing.T) {
	g := randomGeometry(rand.New(rand.NewPCG(1, 1)))
	require.Equal(t, g, g.WithTrailers())
}

func TestEntryShift(t *testing.T) {
	for _, c := range []struct {
		slot, segment uint64
		maxShift, k   int
		ok            bool
	}{
		{slot: 16, segment: 16, maxShift: 10, k: 0, ok: true},
		{slot: 15, segment: 16, maxShift: 10, k: 0, ok: true},  // wastes exactly 1/16
		{slot: 14, segment: 16, maxShift: 10, k: 3, ok: true},  // 2/16, 4/32, 8/64, then 2/128
		{slot: 17, segment: 16, maxShift: 0, ok: false},        // does not fit
		{slot: 17, segment: 16, maxShift: 1, k: 1, ok: true},   // fits, wastes much: the best there is
		{slot: 9, segment: 16, maxShift: 1, k: 1, ok: true},    // 7/16, 5/32
		{slot: 11, segment: 16, maxShift: 0, k: 0, ok: true},   // the only one
		{slot: 1, segment: 1 << 63, maxShift: 60, ok: true},    // no overflow
		{slot: 3 << 62, segment: 1 << 63, maxShift: 60},        // nor here: nothing fits
		{slot: 0, segment: 16, maxShift: 10},                   // nonsense is refused
		{slot: 16, segment: 0, maxShift: 10},                   //
		{slot: 16, segment: 16, maxShift: -1, k: 0, ok: false}, //
	} {
		k, ok := EntryShift(c.slot, c.segment, c.maxShift)
		require.Equal(t, c.ok, ok, "%+v", c)
		require.Equal(t, c.k, k, "%+v", c)
	}
}

// TestEntryShiftRule compares with the rule spelled out.
func TestEntryShiftRule(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		slot, segment, maxShift := 1+r.Uint64N(5000), uint64(1)<<r.IntN(14), r.IntN(12)
		want, fits, least := 0, false, math.Inf(1)
		for k := 0; k <= maxShift; k++ {
			entry := segment << k
			if entry < slot {
				continue
			}
			waste := float64(entry%slot) / float64(entry)
			if waste <= 1.0/16 {
				want, fits = k, true
				break
			}
			if waste < least {
				want, fits, least = k, true, waste
			}
		}
		k, ok := EntryShift(slot, segment, maxShift)
		require.Equal(t, []any{want, fits}, []any{k, ok}, "%d %d %d", slot, segment, maxShift)
	}
}

func TestSlotsPerRowStaysInRange(t *testing.T) {
	g, err := KV{Layers: 1, KVHeads: 1, HeadDim: 1, DTypeBytes: 1, Tokens: 1, Ranks: 1}.Geometry()
	require.NoError(t, err)
	for _, width := range []int{1, 3, 64} {
		l, err := NewLayout(g, width)
		require.NoError(t, err)
		slots := l.SlotsPerRow(math.MaxUint64)
		require.Zero(t, slots%uint32(width))
		require.Greater(t, slots, uint32(math.MaxUint32-64))
		entry, unit := l.Locate(slots-1, 1)
		index, object, _, ok := l.Resolve(entry, unit, slots)
		require.True(t, ok)
		require.Equal(t, slots-1, index)
		require.EqualValues(t, 1, object)
	}
}

func TestNoAllocation(t *testing.T) {
	l, err := NewLayout(randomGeometry(rand.New(rand.NewPCG(5, 6))), 4)
	require.NoError(t, err)
	var sink uint64
	require.Zero(t, testing.AllocsPerRun(100, func() {
		entry, unit := l.Locate(17, 3)
		index, object, within, _ := l.Resolve(entry, unit, 100)
		sink += uint64(index) + uint64(object) + uint64(within) + uint64(len(l.LayerObjects(0, 0)))
	}))
}

func BenchmarkLocate(b *testing.B) {
	for _, name := range []string{"llama3-8b", "deepseek-v3"} {
		m, _ := FindModel(name)
		g, err := m.KV(64, 1).Geometry()
		require.NoError(b, err)
		l, err := NewLayout(g, 4)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("%s/locate", name), func(b *testing.B) {
			var sink uint64
			for i := 0; b.Loop(); i++ {
				_, unit := l.Locate(uint32(i), uint16(i&15))
				sink += unit
			}
		})
		b.Run(fmt.Sprintf("%s/resolve", name), func(b *testing.B) {
			var sink uint32
			for i := 0; b.Loop(); i++ {
				index, _, _, _ := l.Resolve(i&3, uint64(i&0xffffff), math.MaxUint32)
				sink += index
			}
		})
	}
}

package gpufile

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// TestPinnedNeverEvicted, leaf first, all or nothing: with every policy.
func TestPinnedNeverEvicted(t *testing.T) {
	for _, policy := range Policies {
		w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
		p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 40 })
		g := w.s.GroupOfPool(p.ID())
		m := w.member()
		pinned, loose := chainKeys(1, 20), chainKeys(2, 20)
		require.NoError(t, store(t, m, g, 0, chainItems(pinned)))
		require.NoError(t, store(t, m, g, 0, chainItems(loose)))
		_, err := m.Pin(g, 0, 1, pinned, make([]Grant, 20))
		require.NoError(t, err)
		_, err = reserve(t, m, g, 0, 1, chainItems(chainKeys(3, 21)))
		require.ErrorIs(t, err, ErrNoSpace)
		require.EqualValues(t, 40, p.Stats().Files, "no side effects")
		require.Zero(t, p.Stats().Evicted)
		checkPool(t, p)
		for i := range 20 {
			require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(uint64(10+i), 1))))
			n, err := m.Peek(g, 0, loose)
			require.NoError(t, err)
			found := 0
			slots := make([]uint32, 20)
			if found = p.Lookup(loose, slots); found != n {
				t.Fatalf("%s: a file went before its children: prefix %d, %d files", policy, n, found)
			}
		}
		require.EqualValues(t, 40, p.Stats().Files)
		require.EqualValues(t, 20, p.Stats().Evicted)
		n, err := m.Peek(g, 0, pinned)
		require.NoError(t, err)
		require.Equal(t, 20, n)
		checkPool(t, p)
		w.close()
	}
}

// TestOwnPrefixIsSpared: a reservation never evicts what it builds on, pinned or not.
func TestOwnPrefixIsSpared(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 10 })
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 12)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)[:5]))
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(2, 5))))
	require.NoError(t, store(t, m, g, 0, chainItems(keys)[:10]))
	n, err := m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Equal(t, 10, n)
	_, err = reserve(t, m, g, 0, 1, chainItems(keys)[10:])
	require.ErrorIs(t, err, ErrNoSpace, "only its own prefix could go")
	require.EqualValues(t, 10, p.Stats().Files)
	checkPool(t, p)
}

// TestEvictMany: an eviction goes on over several holds of the pool's mutex until it has what was asked for.
func TestEvictMany(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	for chain := range uint64(7) {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(chain+1, 400))))
	}
	n, err := p.EvictCount(2 * evictBatch)
	require.NoError(t, err)
	require.Equal(t, 2*evictBatch, n)
	require.EqualValues(t, 2800-2*evictBatch, p.Stats().Files)
	n, err = p.EvictCount(1 << 30)
	require.NoError(t, err)
	require.Equal(t, 2800-2*evictBatch, n)
	checkPool(t, p)
}

// TestGenerations: a slot that is used again has another generation and seed.
func TestGenerations(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 4 })
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	type use struct {
		slot       uint32
		generation uint64
	}
	seen, slots := make(map[use]bool), make(map[uint32]int)
	seeds := make(map[[16]byte]bool)
	for i := range 60 {
		keys := chainKeys(uint64(i%3), 2) // the same keys again and again
		require.NoError(t, store(t, m, g, 0, chainItems(keys)))
		out := make([]Grant, 2)
		_, err := m.Pin(g, 0, 1, keys, out)
		require.NoError(t, err)
		require.NoError(t, m.Release(g, 1))
		for j, gr := range out {
			require.False(t, seen[use{gr.Slot, gr.Generation}])
			require.False(t, seeds[gr.Seed])
			seen[use{gr.Slot, gr.Generation}], seeds[gr.Seed] = true, true
			slots[gr.Slot]++
			_, ok := p.Stat(gr.Slot, gr.Generation, 64)
			require.True(t, ok)
			_, ok = p.Stat(gr.Slot, gr.Generation+1, 64)
			require.False(t, ok)
			require.NoError(t, p.Unlink(&keys[j]))
			_, ok = p.Stat(gr.Slot, gr.Generation, 64)
			require.False(t, ok)
		}
	}
	most := 0
	for _, n := range slots {
		most = max(most, n)
	}
	require.Greater(t, most, 1, "slots were used again")
}

// TestFullVolume is invariants (d) and (l): without a cap the volume is the limit; it fills, evicts, and df tells the
// truth throughout.
func TestFullVolume(t *testing.T) {
	w := newWorld(t, 2, 4*mib, Options{NoIO: true})
	empty := w.s.Space()
	require.Equal(t, empty.TotalBytes, empty.FreeBytes)
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	promised := w.s.Space()
	require.NotZero(t, promised.TotalBytes)
	for i := range 300 {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(uint64(i), 3))))
		sp := w.s.Space()
		require.Equal(t, sp.TotalBytes, sp.UsedBytes+sp.FreeBytes)
		// A volume this small shows the segments that record tables come in.
		require.InDelta(t, promised.TotalBytes, sp.TotalBytes, float64(p.rowCost()), "the total does not move")
		require.Equal(t, p.Stats().Files*p.m.SlotBytes(), sp.UsedBytes)
		require.Equal(t, sp.FilesMax*p.m.SlotBytes(), sp.TotalBytes)
	}
	st := p.Stats()
	require.NotZero(t, st.Evicted)
	kept := uint64(ahead(int(st.SlotsUsed+st.SlotsFree))) + 3
	require.GreaterOrEqual(t, st.Files+kept, promised.FilesMax,
		"what was promised can be stored, but for what is kept ahead")
	checkPool(t, p)
	_, err := m.Reserve(g, 0, 1<<50, chainItems(chainKeys(1000, int(promised.FilesMax)+1)), false,
		make([]Grant, promised.FilesMax+1))
	require.ErrorIs(t, err, ErrNoSpace)
	require.Equal(t, st.Files, p.Stats().Files)
}

// TestRowsMove: a pool above its minimum gives rows back to one that has none.
func TestRowsMove(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	a := w.pool("a", 1, nil)
	m := w.member()
	ga := w.s.GroupOfPool(a.ID())
	for i := range 400 {
		require.NoError(t, store(t, m, ga, 0, chainItems(chainKeys(uint64(i), 4))))
	}
	require.NotZero(t, a.Stats().Evicted, "a has taken everything")
	held := chainKeys(399, 4)
	_, err := m.Pin(ga, 0, 1, held, make([]Grant, 4))
	require.NoError(t, err)
	b := w.pool("b", 1, nil)
	gb := w.s.GroupOfPool(b.ID())
	w.clock = w.clock.Add(time.Hour)
	require.NoError(t, store(t, m, gb, 0, chainItems(chainKeys(5000, 4))))
	require.EqualValues(t, 4, b.Stats().Files)
	n, err := m.Peek(ga, 0, held)
	require.NoError(t, err)
	require.Equal(t, 4, n, "pinned files stay")
	// What a has not used for an hour is worth less than what b uses now: rows move on, b evicting its own meanwhile.
	i := uint64(6000)
	require.Eventually(t, func() bool {
		require.NoError(t, store(t, m, gb, 0, chainItems(chainKeys(i, 4))))
		i++
		return b.Stats().Files > 3*uint64(b.m.SlotsPerRow())
	}, waitFor, tick)
	checkPool(t, a)
	checkPool(t, b)
	sp := w.s.Space()
	require.Equal(t, sp.TotalBytes, sp.UsedBytes+sp.FreeBytes)
}

func TestUnlinkOrphansAndEvictPrefix(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	root := chainKeys(1, 3)
	left := append(append([]Key(nil), root...), chainKeys(2, 3)...)
	right := append(append([]Key(nil), root...), chainKeys(3, 4)...)
	require.NoError(t, store(t, m, g, 0, chainItems(left)))
	require.NoError(t, store(t, m, g, 0, chainItems(right)))
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(4, 1))))
	tips := make([]ListEntry, 8)
	require.Equal(t, 3, p.ListTips(0, tips))
	n, err := p.EvictPrefix(&root[1])
	require.NoError(t, err)
	require.Zero(t, n, "shared by both chains")
	n, err = p.EvictPrefix(&left[5])
	require.NoError(t, err)
	require.Equal(t, 3, n, "up to where the chains part")
	require.EqualValues(t, 8, p.Stats().Files)
	require.NoError(t, p.Unlink(&right[3]))
	chain, complete, ok := p.Chain(&right[6])
	require.True(t, ok)
	require.False(t, complete)
	require.Equal(t, right[4:], chain)
	checkPool(t, p)
	// What hangs on the missing file goes first, leaf first, then by policy.
	for i, want := range []Key{right[6], right[5], right[4], root[2]} {
		n, err := p.EvictCount(1)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		_, _, found := p.Find(&want)
		require.False(t, found, "%d", i)
		checkPool(t, p)
	}
	_, err = p.EvictCount(-1)
	require.ErrorIs(t, err, ErrInvalid)
	n, err = p.EvictCount(100)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Zero(t, p.Stats().Files)
	checkPool(t, p)
}

// TestReadOnly: a read-only mount finds everything and changes nothing.
func TestReadOnly(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, w.member(), w.s.GroupOfPool(p.ID()), 0, chainItems(keys)))
	w.close()
	v, err := extentmap.OpenDrives(w.drives[:], extentmap.Options{ReadOnly: true})
	require.NoError(t, err)
	defer v.Abandon()
	s, err := Open(v, Options{})
	require.NoError(t, err)
	defer s.Close()
	p = s.PoolByName("a")
	g := s.GroupOfPool(p.ID())
	m, err := s.NewSession(1)
	require.NoError(t, err)
	n, err := m.Pin(g, 0, 1, keys, make([]Grant, 3))
	require.NoError(t, err)
	require.Equal(t, 3, n)
	_, err = m.Reserve(g, 0, 1, chainItems(chainKeys(2, 1)), false, make([]Grant, 1))
	require.ErrorIs(t, err, ErrReadOnly)
	require.ErrorIs(t, p.Unlink(&keys[0]), ErrReadOnly)
	_, err = p.EvictCount(1)
	require.ErrorIs(t, err, ErrReadOnly)
	_, err = p.EvictPrefix(&keys[2])
	require.ErrorIs(t, err, ErrReadOnly)
	spec := extentmap.PoolSpec{Name: "a", Geometry: testGeometry(1, 3), ChecksumAlg: 1}
	_, _, err = s.OpenPool(testIdentity("a"), spec)
	require.NoError(t, err)
	_, _, err = s.OpenPool(testIdentity("b"), spec)
	require.ErrorIs(t, err, ErrIdentity)
	spec.Name = "b"
	_, _, err = s.OpenPool(testIdentity("b"), spec)
	require.ErrorIs(t, err, ErrReadOnly)
}

func TestOpenPool(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	require.Equal(t, p, w.pool("a", 1, nil), "idempotent")
	spec := extentmap.PoolSpec{Name: "a", Geometry: testGeometry(1, 3), ChecksumAlg: 1}
	id := testIdentity("a")
	id.WeightsEpoch++
	_, _, err := w.s.OpenPool(id, spec)
	require.ErrorIs(t, err, ErrIdentity)
	spec.Geometry = testGeometry(2, 3)
	_, _, err = w.s.OpenPool(testIdentity("a"), spec)
	require.ErrorIs(t, err, ErrIdentity)
	spec.TokensPerFile = 5
	_, _, err = w.s.OpenPool(testIdentity("a"), spec)
	require.ErrorIs(t, err, ErrInvalid)
	_, _, err = w.s.OpenPool(Identity{}, spec)
	require.ErrorIs(t, err, ErrIdentity)
	_, err = Open(w.v, Options{Policy: "fifo"})
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, p.Identity(), testIdentity("a"))
	require.WithinDuration(t, time.Now(), p.Created(), time.Hour)
	w.s.Close()
	w.s.Close()
	_, err = w.s.NewSession(1)
	require.ErrorIs(t, err, ErrSession)
	_, _, found := p.Find(&Key{})
	require.False(t, found, "a closed store finds nothing and does not crash")
	require.False(t, errors.Is(p.Unlink(&Key{}), ErrReadOnly))
}

// TestOrderSurvivesMount: what was used last is evicted last, before and after a mount.
func TestOrderSurvivesMount(t *testing.T) {
	for _, policy := range Policies {
		w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
		p := w.pool("a", 1, nil)
		for i := range uint64(5) {
			require.NoError(t, store(t, w.member(), w.s.GroupOfPool(p.ID()), 0, chainItems(chainKeys(i, 4))))
			w.clock = w.clock.Add(time.Minute)
		}
		m := w.member()
		first := chainKeys(0, 4)
		_, err := m.Pin(w.s.GroupOfPool(p.ID()), 0, 1, first, make([]Grant, 4))
		require.NoError(t, err)
		m.Close()
		w.reopen()
		p = w.s.PoolByName("a")
		for _, chain := range []uint64{1, 2, 3, 4, 0} {
			keys := chainKeys(chain, 4)
			for i := 3; i >= 0; i-- {
				_, _, found := p.Find(&keys[i])
				require.True(t, found)
				n, err := p.EvictCount(1)
				require.NoError(t, err)
				require.Equal(t, 1, n)
				_, _, found = p.Find(&keys[i])
				require.False(t, found, "%s: file %d of chain %d", policy, i, chain)
			}
		}
		checkPool(t, p)
		w.close()
	}
}

// TestContinuedChainIsRecent: a chain that grows without being pinned again is as recent as its last block, and its
// first blocks outlive it.
func TestContinuedChainIsRecent(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 60 })
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	long := chainKeys(0, 20)
	require.NoError(t, store(t, m, g, 0, chainItems(long)[:5]))
	for i := range 15 {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(uint64(100+i), 2))))
		require.NoError(t, store(t, m, g, 0, chainItems(long)[5+i:6+i]))
	}
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(50, 35))))
	n, err := m.Peek(g, 0, long)
	require.NoError(t, err)
	require.Equal(t, 20, n, "the older short chains went")
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(51, 8))))
	n, err = m.Peek(g, 0, long)
	require.NoError(t, err)
	slots := make([]uint32, 20)
	require.Equal(t, n, p.Lookup(long, slots), "leaf first")
	checkPool(t, p)
}

// TestNothingEvictable: inner files of chains whose leaves are pinned one by one are no victims, and are not looked
// for for ever.
func TestNothingEvictable(t *testing.T) {
	for _, policy := range Policies {
		w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
		p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 60 })
		g := w.s.GroupOfPool(p.ID())
		m := w.member()
		for c := range uint64(6) {
			keys := chainKeys(c, 10)
			require.NoError(t, store(t, m, g, 0, chainItems(keys)))
			slot, generation, ok := p.Find(&keys[9])
			require.True(t, ok)
			_, release, ok := p.HoldRead(slot, generation, 64)
			require.True(t, ok)
			defer release()
		}
		_, err := reserve(t, m, g, 0, 1<<40, chainItems(chainKeys(9, 1)))
		require.ErrorIs(t, err, ErrNoSpace)
		n, err := p.EvictCount(5)
		require.NoError(t, err)
		require.Zero(t, n)
		require.EqualValues(t, 60, p.Stats().Files)
		checkPool(t, p)
	}
}

// TestUndoneEvictionLeavesTheOrder: a reservation that finds too few victims puts those that it found back in their
// places.
func TestUndoneEvictionLeavesTheOrder(t *testing.T) {
	for _, policy := range Policies {
		w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
		p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 11 })
		g := w.s.GroupOfPool(p.ID())
		m := w.member()
		chain := chainKeys(0, 5)
		require.NoError(t, store(t, m, g, 0, chainItems(chain)))
		slot, generation, _ := p.Find(&chain[4])
		_, release, ok := p.HoldRead(slot, generation, 64)
		require.True(t, ok)
		for i := range uint64(3) {
			require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(1+i, 2))))
		}
		for range 3 {
			_, err := reserve(t, m, g, 0, 1<<40, chainItems(chainKeys(9, 7)))
			require.ErrorIs(t, err, ErrNoSpace)
			checkPool(t, p)
		}
		for i := range uint64(3) {
			keys := chainKeys(1+i, 2)
			for j := 1; j >= 0; j-- {
				n, err := p.EvictCount(1)
				require.NoError(t, err)
				require.Equal(t, 1, n)
				_, _, found := p.Find(&keys[j])
				require.False(t, found, "%s: file %d of chain %d", policy, j, 1+i)
			}
		}
		release()
		checkPool(t, p)
	}
}

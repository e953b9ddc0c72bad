package gpufile

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// familyWorld has a family of a full-attention pool (ALL), and one of a sliding window (TRAILING 2).
func familyWorld(t *testing.T) (*world, *Group, *Member) {
	w := newWorld(t, 2, 64*mib, Options{})
	w.pool("full", 1, func(s *extentmap.PoolSpec) { s.Family = "hybrid" })
	w.pool("window", 2, func(s *extentmap.PoolSpec) { s.Family, s.TrailingHit = "hybrid", 2 })
	w.pool("other", 1, nil)
	f := w.v.Families()
	require.Len(t, f, 1)
	return w, w.s.GroupOfFamily(f[0].ID), w.member()
}

// TestFamily is invariant (h): pools of a hybrid model hit and commit together.
func TestFamily(t *testing.T) {
	w, g, m := familyWorld(t)
	require.Len(t, g.Pools(), 2)
	require.Nil(t, w.s.GroupOfFamily(99))
	require.Nil(t, w.s.GroupOfPool(99))
	full, window := g.pools[0], g.pools[1]
	keys := chainKeys(1, 6)
	grants, err := reserve(t, m, g, 0, 1, chainItems(keys))
	require.NoError(t, err)
	for at, gr := range grants {
		require.Equal(t, GrantNew, gr.Status)
		p := g.pools[at%2]
		for rank := range p.rankObjects {
			skip := -1
			if at == 5*2+1 && rank == 1 {
				skip = 0 // the window's part of the last file is not complete
			}
			writeAll(t, m, p, gr.Slot, rank, skip)
		}
	}
	first, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	require.Zero(t, full.Stats().Files, "no pool before the last rank")
	last, err := m.Commit(g, 1, 1)
	require.ErrorIs(t, err, ErrIncomplete)
	require.ErrorIs(t, wait(t, last), ErrIncomplete)
	require.ErrorIs(t, wait(t, first), ErrIncomplete)
	require.EqualValues(t, 5, full.Stats().Files, "given up in all pools")
	require.EqualValues(t, 5, window.Stats().Files)

	peek := func(want int) {
		t.Helper()
		n, err := m.Peek(g, 0, keys)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	peek(5)
	out := make([]Grant, 12)
	n, err := m.Pin(g, 0, 1, keys, out)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	for i := range 5 {
		require.Equal(t, GrantPinned, out[2*i].Status)
		require.Equal(t, i >= 3, out[2*i+1].Status == GrantPinned, "only the trailing 2 of the window's")
		require.Equal(t, i >= 3, out[2*i+1].Slot != extentmap.NoSlot)
	}
	require.EqualValues(t, 5, full.Stats().FilesPinned)
	require.EqualValues(t, 2, window.Stats().FilesPinned)
	for _, p := range g.pools {
		st := p.Stats()
		require.Equal(t, st.Lookups, st.Hits+st.Misses)
	}
	require.NoError(t, m.Release(g, 1))

	require.NoError(t, window.Unlink(&keys[1]))
	peek(5) // its window is complete
	require.NoError(t, window.Unlink(&keys[4]))
	peek(4) // the window of 4 is files 2 and 3
	require.NoError(t, window.Unlink(&keys[3]))
	peek(1) // of 3 and 2, file 1 is missing
	require.NoError(t, full.Unlink(&keys[0]))
	peek(0)

	// What one pool still has exists; the others are stored again, and found together.
	again, err := reserve(t, m, g, 0, 2, chainItems(keys))
	require.NoError(t, err)
	require.Equal(t, GrantNew, again[0].Status)
	require.Equal(t, GrantExists, again[1].Status)
	require.NoError(t, m.Abort(g, 2))
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	peek(6)
	checkPool(t, full)
	checkPool(t, window)
	w.reopen()
	m = w.member()
	g = w.s.GroupOfFamily(w.v.Families()[0].ID)
	peek(6)
}

// TestHitRule compares the rule with its definition, on random presence.
func TestHitRule(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		n := rng.IntN(12)
		g := &Group{}
		present := make([][]bool, 1+rng.IntN(3))
		slots := make([]uint32, n*len(present))
		limit := n
		for j := range present {
			rule := uint32(1 + rng.IntN(4))
			g.trailing = append(g.trailing, rule)
			for i := range n {
				present[j] = append(present[j], rng.IntN(4) != 0)
				if slots[j*n+i] = none; present[j][i] {
					slots[j*n+i] = uint32(i)
				}
			}
		}
		want := 0
		for l := range limit + 1 {
			ok := true
			for j, rule := range g.trailing {
				for i := max(0, l-int(rule)); i < l; i++ {
					ok = ok && present[j][i]
				}
			}
			if ok {
				want = l
			}
		}
		require.Equal(t, want, g.longest(limit, n, slots))
	}
}

// TestFamilyWithoutSpace: when one pool has no room, no pool gives a slot.
func TestFamilyWithoutSpace(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	a := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.Family, s.MaxSlots = "f", 100 })
	b := w.pool("b", 1, func(s *extentmap.PoolSpec) { s.Family, s.MaxSlots = "f", 4 })
	g := w.s.GroupOfFamily(w.v.Families()[0].ID)
	m := w.member()
	keys := chainKeys(1, 6)
	_, err := reserve(t, m, g, 0, 1, chainItems(keys))
	require.ErrorIs(t, err, ErrNoSpace)
	require.Zero(t, a.Stats().FilesReserved+b.Stats().FilesReserved)
	grants, err := reserveSome(m, g, 0, 1, chainItems(keys), true)
	require.NoError(t, err)
	require.Len(t, grants, 2*4, "a leading run, in both")
	require.EqualValues(t, 4, a.Stats().FilesReserved)
	require.EqualValues(t, 4, b.Stats().FilesReserved)
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	w.done(ticket)
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(2, 3))))
	require.EqualValues(t, 7, a.Stats().Files)
	require.LessOrEqual(t, b.Stats().Files, uint64(4))
	checkPool(t, a)
	checkPool(t, b)
}

// TestTenants: a tenant finds only its own files and stays within its quota at its own cost.
func TestTenants(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	ticket, err := w.v.SetTenant(extentmap.Tenant{ID: 7, Name: "seven", QuotaBytes: 10*p.m.SlotBytes() + 1})
	require.NoError(t, err)
	w.done(ticket)
	m := w.member()
	mine, theirs := chainKeys(1, 8), chainKeys(2, 8)
	require.NoError(t, store(t, m, g, 7, chainItems(mine)))
	require.NoError(t, store(t, m, g, 8, chainItems(theirs)))
	peek := func(tenant uint32, keys []Key) int {
		n, err := m.Peek(g, tenant, keys)
		require.NoError(t, err)
		return n
	}
	require.Equal(t, 8, peek(7, mine))
	require.Zero(t, peek(8, mine))
	require.Zero(t, peek(0, mine))
	both, present := append(slices.Clone(mine[5:]), theirs[5:]...), make([]bool, 6)
	for tenant, want := range map[uint32][]bool{7: {true, true, true, false, false, false}, 0: make([]bool, 6),
		8: {false, false, false, true, true, true}} {
		found, err := m.Present(p, tenant, both, present)
		require.NoError(t, err)
		require.Equal(t, want, present, "whatever is before them")
		require.Equal(t, tenant != 0, found == 3)
	}
	_, err = m.Present(p, 7, both, present[1:])
	require.ErrorIs(t, err, ErrInvalid)
	n, err := m.Pin(g, 8, 1, mine, make([]Grant, 8))
	require.NoError(t, err)
	require.Zero(t, n)
	_, err = reserve(t, m, g, 8, 99, chainItems(mine))
	require.ErrorIs(t, err, ErrInvalid, "another tenant's key")
	_, _, ok := p.Find(&mine[0])
	require.True(t, ok, "the mount sees all tenants")

	// Its own leaves go, nobody else's.
	require.NoError(t, store(t, m, g, 7, chainItems(chainKeys(3, 6))))
	require.Equal(t, 4, peek(7, mine))
	require.Equal(t, 6, peek(7, chainKeys(3, 6)))
	require.Equal(t, 8, peek(8, theirs))
	checkPool(t, p)
	_, err = reserve(t, m, g, 7, 100, chainItems(chainKeys(4, 11)))
	require.ErrorIs(t, err, ErrQuota)
	require.Equal(t, 6, peek(7, chainKeys(3, 6)), "no side effects")
	grants, err := reserveSome(m, g, 7, 101, chainItems(chainKeys(4, 11)), true)
	require.NoError(t, err)
	require.Len(t, grants, 10)
	require.Zero(t, peek(7, chainKeys(3, 6)))
	_, err = reserve(t, m, g, 7, 102, chainItems(chainKeys(5, 1)))
	require.ErrorIs(t, err, ErrQuota)
	require.NoError(t, m.Abort(g, 101))
	require.NoError(t, store(t, m, g, 7, chainItems(mine)))
	w.reopen()
	p = w.s.PoolByName("a")
	checkPool(t, p)
	m, g = w.member(), w.s.GroupOfPool(p.ID())
	require.Equal(t, 8, peek(7, mine))
	_, err = reserve(t, m, g, 7, 103, chainItems(chainKeys(6, 11)))
	require.ErrorIs(t, err, ErrQuota, "what was there before counts")

	// Numbers that have nothing take no memory.
	for tenant := range uint32(100) {
		_, err = reserve(t, m, g, 1000+tenant, 200, chainItems(chainKeys(7, 1)))
		require.NoError(t, err)
		require.NoError(t, m.Abort(g, 200))
	}
	require.Len(t, p.tenants, 2)
	require.Len(t, w.s.tenants, 2)

	// A child of another tenant's file is no child: it neither holds the file nor hangs on it.
	require.NoError(t, store(t, m, g, 9, []ReserveItem{{Key: testKey(55), Parent: theirs[7], Tokens: 1}}))
	require.Equal(t, 1, p.orphans.n)
	checkPool(t, p)
}

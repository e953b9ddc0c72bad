package gpufile

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/wear"
)

func admission(texts ...string) Options {
	var o Options
	for _, text := range texts {
		if err := o.Admission.Admissions.Set(text); err != nil {
			panic(err)
		}
	}
	return o
}

// store reserves items, writes what is new, commits, and returns the grants.
func (w *world) storeItems(m *Member, g *Group, id uint64, items []ReserveItem) []Grant {
	w.t.Helper()
	grants, err := reserve(w.t, m, g, 0, id, items)
	require.NoError(w.t, err)
	for at := range grants {
		p := g.pools[at%len(g.pools)]
		if grants[at].Status != GrantNew {
			require.Equal(w.t, extentmap.NoSlot, grants[at].Slot)
			continue
		}
		for rank := range p.rankObjects {
			writeAll(w.t, m, p, grants[at].Slot, rank, -1)
		}
	}
	for rank := range g.ranks() {
		ticket, err := m.Commit(g, id, uint16(rank))
		require.NoError(w.t, err)
		if rank == g.ranks()-1 {
			w.done(ticket)
		}
	}
	return grants
}

func statuses(grants []Grant) (out []GrantStatus) {
	for i := range grants {
		out = append(out, grants[i].Status)
	}
	return out
}

func repeat(s GrantStatus, n int) (out []GrantStatus) {
	for range n {
		out = append(out, s)
	}
	return out
}

// A chain is refused when it is first asked for, which costs no slot and fails nothing, and stored the second time.
func TestSecondTouch(t *testing.T) {
	w := newWorld(t, 2, 64*mib, admission("second-touch"))
	p := w.pool("a", 1, nil)
	require.Equal(t, wear.SecondTouch, p.Admission())
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	keys := chainKeys(1, 8)
	items := chainItems(keys)

	require.Equal(t, repeat(GrantDeclined, 4), statuses(w.storeItems(m, g, 1, items[:4])))
	st := p.Stats()
	require.EqualValues(t, 4, st.Declined)
	require.Zero(t, st.Files+st.FilesReserved+st.SlotsUsed+st.Reserved)
	n, err := m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Zero(t, n)

	got := statuses(w.storeItems(m, g, 2, items))
	require.Equal(t, append(repeat(GrantNew, 4), repeat(GrantDeclined, 4)...), got, "the known part of a longer chain")
	n, err = m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Equal(t, 4, n)
	got = statuses(w.storeItems(m, g, 3, items))
	require.Equal(t, append(repeat(GrantExists, 4), repeat(GrantNew, 4)...), got)
	require.EqualValues(t, 8, p.Stats().Files)
	require.EqualValues(t, 8, p.Stats().Declined)
}

// Asking again with the same id is the same question: other ranks, and engines that lost an answer, do so.
func TestSecondTouchRepeated(t *testing.T) {
	w := newWorld(t, 2, 64*mib, admission("second-touch"))
	p := w.pool("a", 2, nil)
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	items := chainItems(chainKeys(1, 3))
	for range 3 {
		grants, err := reserve(t, m, g, 0, 1, items)
		require.NoError(t, err)
		require.Equal(t, repeat(GrantDeclined, 3), statuses(grants))
	}
	require.EqualValues(t, 3, p.Stats().Declined)
	require.NoError(t, m.Abort(g, 1))
	require.Equal(t, repeat(GrantNew, 3), statuses(w.storeItems(m, g, 2, items)))
}

// A reservation that finds no room was no touch.
func TestSecondTouchNoRoom(t *testing.T) {
	w := newWorld(t, 1, 64*mib, admission("second-touch"))
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 4 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	full := chainItems(chainKeys(1, 4))
	w.storeItems(m, g, 1, full)
	grants, err := reserve(t, m, g, 0, 2, full)
	require.NoError(t, err)
	require.Equal(t, repeat(GrantNew, 4), statuses(grants), "reserved until the end: there is no room for others")
	known := chainItems(chainKeys(2, 1))
	w.storeItems(m, g, 3, known)
	more := append(known, chainItems(chainKeys(3, 2))...)
	for range 2 {
		_, err = reserve(t, m, g, 0, 4, more)
		require.ErrorIs(t, err, ErrNoSpace)
	}
	require.NoError(t, m.Abort(g, 2))
	require.Equal(t, []GrantStatus{GrantNew, GrantDeclined, GrantDeclined}, statuses(w.storeItems(m, g, 5, more)))
}

// What hangs on a file that is not there is not stored: nobody could hit it.
func TestAdmissionKeepsChains(t *testing.T) {
	w := newWorld(t, 2, 64*mib, admission("second-touch"))
	p := w.pool("a", 1, nil)
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	items := chainItems(chainKeys(1, 6))
	w.storeItems(m, g, 1, items[3:])
	require.Equal(t, repeat(GrantDeclined, 3), statuses(w.storeItems(m, g, 2, items[3:])), "its parent is not there")
	require.Equal(t, repeat(GrantDeclined, 6), statuses(w.storeItems(m, g, 3, items)))
	grants, err := reserve(t, m, g, 0, 4, items[:3])
	require.NoError(t, err)
	require.Equal(t, repeat(GrantNew, 3), statuses(grants))
	tail, err := reserve(t, m, g, 0, 5, items[3:])
	require.NoError(t, err)
	require.Equal(t, repeat(GrantNew, 3), statuses(tail), "its parent is being stored")
}

// Pools and families may have policies of their own, and a session may be above them.
func TestAdmissionByName(t *testing.T) {
	w := newWorld(t, 2, 64*mib, admission("second-touch", "b:all", "hybrid:cost-aware"))
	a, b := w.pool("a", 1, nil), w.pool("b", 1, nil)
	full := w.pool("full", 1, func(s *extentmap.PoolSpec) { s.Family = "hybrid" })
	window := w.pool("window", 1, func(s *extentmap.PoolSpec) { s.Family, s.TrailingHit = "hybrid", 2 })
	require.Equal(t, wear.SecondTouch, a.Admission())
	require.Equal(t, wear.All, b.Admission())
	require.Equal(t, wear.CostAware, full.Admission())
	require.Equal(t, full.keySpace, window.keySpace, "a family's keys are one")
	m := w.member()
	items := chainItems(chainKeys(1, 2))
	require.Equal(t, repeat(GrantNew, 2), statuses(w.storeItems(m, w.s.GroupOfPool(b.ID()), 1, items)))
	require.Equal(t, repeat(GrantDeclined, 2), statuses(w.storeItems(m, w.s.GroupOfPool(a.ID()), 1, items)))
	byHand := w.member()
	byHand.AdmitAll()
	other := chainItems(chainKeys(2, 2))
	require.Equal(t, repeat(GrantNew, 2), statuses(w.storeItems(byHand, w.s.GroupOfPool(a.ID()), 2, other)))
	_, err := Open(w.v, Options{Admission: wear.GateOptions{
		Admissions: wear.Admissions{Default: wear.SecondTouch}, FilterBytes: 1}})
	require.ErrorIs(t, err, wear.ErrInvalid)
}

// A family is admitted in all of its pools or in none.
func TestAdmissionOfFamilies(t *testing.T) {
	w := newWorld(t, 2, 64*mib, admission("hybrid:second-touch"))
	full := w.pool("full", 1, func(s *extentmap.PoolSpec) { s.Family = "hybrid" })
	window := w.pool("window", 1, func(s *extentmap.PoolSpec) { s.Family, s.TrailingHit = "hybrid", 2 })
	g, m := w.s.GroupOfFamily(w.v.Families()[0].ID), w.member()
	items := chainItems(chainKeys(1, 3))
	require.Equal(t, repeat(GrantDeclined, 6), statuses(w.storeItems(m, g, 1, items)))
	require.EqualValues(t, 3, full.Stats().Declined)
	require.EqualValues(t, 3, window.Stats().Declined)
	require.Equal(t, repeat(GrantNew, 6), statuses(w.storeItems(m, g, 2, items)))
}

// Cost-aware learns from pins and evictions through the store's own verbs.
func TestCostAwareLearns(t *testing.T) {
	o := admission("cost-aware")
	o.NoIO = true
	w := newWorld(t, 1, 64*mib, o)
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 64 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	_, ok := w.s.Expectation()
	require.True(t, ok)
	const n = 3000
	out := make([]Grant, 1)
	for i := range uint64(n) {
		items := chainItems(chainKeys(100+i, 1))
		grants, err := reserve(t, m, g, 0, 2*i+1, items)
		require.NoError(t, err)
		ticket, err := m.Commit(g, 2*i+1, 0)
		require.NoError(t, err)
		w.done(ticket)
		if grants[0].Status == GrantNew {
			_, err = m.Pin(g, 0, 2*i+2, []Key{items[0].Key}, out)
			require.NoError(t, err)
			require.NoError(t, m.Release(g, 2*i+2))
		}
	}
	e, ok := w.s.Expectation()
	require.True(t, ok)
	require.Greater(t, e.Hits[0], 0.9, "every block was hit")
	require.Zero(t, e.Lost, "none was missed after its eviction")
	require.Zero(t, p.Stats().Declined)
	require.Greater(t, p.Stats().Evicted, uint64(n-200))
}

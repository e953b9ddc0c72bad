package gpufile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// partOf reserves a leading run of n files that are new, asking again as an engine does, and says how often it asked.
func partOf(t *testing.T, m *Member, g *Group, tenant uint32, n int) (id uint64, granted, tries int, err error) {
	t.Helper()
	id = nextID()
	items, grants := chainItems(chainKeys(1<<40+id, n)), make([]Grant, n*len(g.pools))
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		tries++
		if granted, err = m.Reserve(g, tenant, id, items, true, grants); !errors.Is(err, ErrAgain) || time.Now().After(end) {
			return id, granted, tries, err
		}
	}
}

// stock stores chains of four files for a tenant, n files in all.
func stock(t *testing.T, m *Member, g *Group, tenant uint32, n int) {
	t.Helper()
	for ; n > 0; n -= 4 {
		require.NoError(t, store(t, m, g, tenant, chainItems(chainKeys(1<<50+nextID(), min(n, 4)))))
	}
}

// TestPartialEvictsWhatItUses: a reservation that may be shortened is granted all that can fit, and evicts no more
// files than it has use for.
func TestPartialEvictsWhatItUses(t *testing.T) {
	const most, files = 96, 80
	for name, c := range map[string]struct{ pinned, wanted, granted int }{
		"what is free":       {0, most - files, most - files},
		"all that is wanted": {0, 60, 60},
		"as much as fits":    {0, most, most},
		"more than fits":     {0, 180, most},
		"far more than fits": {0, 4000, most},
		"between pins":       {40, 70, most - 40},
		"more, between pins": {40, 180, most - 40},
		"what pins leave":    {files, 60, most - files},
	} {
		for _, policy := range Policies {
			t.Run(name+"/"+policy, func(t *testing.T) {
				w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
				p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = most })
				g, m := w.s.GroupOfPool(p.ID()), w.member()
				keys := chainKeys(1, c.pinned)
				if c.pinned > 0 {
					require.NoError(t, store(t, m, g, 0, chainItems(keys)))
					_, err := m.Pin(g, 0, 1, keys, make([]Grant, c.pinned))
					require.NoError(t, err)
				}
				stock(t, m, g, 0, files-c.pinned)
				require.Zero(t, p.Stats().Evicted)
				for try := range 3 {
					before := p.Stats()
					id, granted, _, err := partOf(t, m, g, 0, c.wanted)
					require.NoError(t, err)
					require.Equal(t, c.granted, granted, "try %d", try)
					evicted := int(p.Stats().Evicted - before.Evicted)
					free := most - int(before.Files)
					require.LessOrEqual(t, evicted, max(0, granted-free)+ahead(int(before.SlotsUsed+before.SlotsFree+
						before.SlotsFreeing)), "%d were free", free)
					checkPool(t, p)
					require.NoError(t, m.Abort(g, id))
				}
			})
		}
	}
}

// TestPartialOfAGrowingPool: without a cap, a pool grows by rows first, then evicts, up to all that the volume holds.
func TestPartialOfAGrowingPool(t *testing.T) {
	w := newWorld(t, 2, 4*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	stock(t, m, g, 0, 8)
	most := int(p.m.Capacity())
	for _, wanted := range []int{most / 2, 2 * most, 2 * most} {
		before := p.Stats()
		id, granted, _, err := partOf(t, m, g, 0, wanted)
		require.NoError(t, err)
		// In a volume this small, the segments that record tables come in change what it holds by a row.
		require.InDelta(t, min(wanted, most), granted, float64(p.m.SlotsPerRow()))
		evicted := int(p.Stats().Evicted - before.Evicted)
		if wanted < most {
			require.Equal(t, wanted, granted)
			require.Zero(t, evicted)
		}
		require.LessOrEqual(t, evicted, max(0, granted-int(before.SlotsFree)))
		checkPool(t, p)
		require.NoError(t, m.Abort(g, id))
		stock(t, m, g, 0, 8)
	}
}

// TestPartialWaitsOnce: files go at the first asking. While they are being freed, and whatever else is asked, no more
// do, and what is asked again ends.
func TestPartialWaitsOnce(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 64 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	stock(t, m, g, 0, 64)
	evicted := uint64(0)
	for range 20 {
		id, granted, tries, err := partOf(t, m, g, 0, 200)
		require.NoError(t, err)
		require.Equal(t, 64, granted)
		require.Less(t, tries, 10_000)
		if evicted == 0 {
			evicted = p.Stats().Evicted
			require.EqualValues(t, 64, evicted)
		}
		require.Equal(t, evicted, p.Stats().Evicted, "there was nothing left to evict")
		require.NoError(t, m.Abort(g, id))
	}
	checkPool(t, p)
}

// TestPartialTogether: engines that ask for more than there is, all at a time, each get something or hear that others
// have it all, and nobody asks for ever.
func TestPartialTogether(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 64 })
	g := w.s.GroupOfPool(p.ID())
	var engines sync.WaitGroup
	for e := range uint64(4) {
		m := w.member()
		engines.Go(func() {
			grants := make([]Grant, 200)
			for id := uint64(1); id <= 25; id++ {
				items := chainItems(chainKeys(e<<32+id, 200))
				n, err := m.Reserve(g, 0, id, items, true, grants)
				for try := 0; errors.Is(err, ErrAgain) && try < 100_000; try++ {
					time.Sleep(100 * time.Microsecond)
					n, err = m.Reserve(g, 0, id, items, true, grants)
				}
				if errors.Is(err, ErrNoSpace) {
					continue
				}
				if !assert.NoError(t, err) || !assert.Positive(t, n) {
					return
				}
				ticket, err := m.Commit(g, id, 0)
				for errors.Is(err, ErrAgain) {
					ticket, err = m.Commit(g, id, 0)
				}
				if assert.NoError(t, err) {
					<-ticket.Done()
				}
			}
		})
	}
	engines.Wait()
	checkPool(t, p)
	require.Zero(t, p.Stats().FilesReserved)
}

// TestPartialUnderQuota: only the tenant's own files go, and no more than it is granted.
func TestPartialUnderQuota(t *testing.T) {
	const quota = 30
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 100 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	ticket, err := w.v.SetTenant(extentmap.Tenant{ID: 7, Name: "seven", QuotaBytes: quota * p.m.SlotBytes()})
	require.NoError(t, err)
	w.done(ticket)
	stock(t, m, g, 1, 60)
	stock(t, m, g, 7, 20)
	for _, wanted := range []int{15, 200, 200} {
		before, own := p.Stats(), int(p.tenantSlots(7))
		id, granted, _, err := partOf(t, m, g, 7, wanted)
		require.NoError(t, err)
		require.Equal(t, min(wanted, quota), granted)
		require.LessOrEqual(t, int(p.Stats().Evicted-before.Evicted), max(0, granted-(quota-own)))
		require.EqualValues(t, 60, p.tenantSlots(1))
		checkPool(t, p)
		require.NoError(t, m.Abort(g, id))
		stock(t, m, g, 7, 8)
	}
}

// TestPartialOfAFamily: the pool with least room bounds the run, and the others evict for no more than that.
func TestPartialOfAFamily(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	a := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.Family, s.MaxSlots = "f", 60 })
	b := w.pool("b", 1, func(s *extentmap.PoolSpec) { s.Family, s.MaxSlots = "f", 40 })
	g, m := w.s.GroupOfFamily(w.v.Families()[0].ID), w.member()
	stock(t, m, w.s.GroupOfPool(a.ID()), 0, 56)
	stock(t, m, w.s.GroupOfPool(b.ID()), 0, 36)
	for range 3 {
		id, granted, _, err := partOf(t, m, g, 0, 300)
		require.NoError(t, err)
		require.Equal(t, 40, granted)
		require.EqualValues(t, 36, a.Stats().Evicted)
		require.EqualValues(t, 36, b.Stats().Evicted)
		checkPool(t, a)
		checkPool(t, b)
		require.NoError(t, m.Abort(g, id))
	}
}

// TestPartialHistories: whatever is stored, pinned and reserved, a part is as long as can be, and costs no more than it
// is worth.
func TestPartialHistories(t *testing.T) {
	const most = 50
	for seed := range uint64(3) {
		policy := Policies[seed%uint64(len(Policies))]
		t.Run(fmt.Sprintf("%s/%d", policy, seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			w := newWorld(t, 2, 64*mib, Options{NoIO: true, Policy: policy})
			p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = most })
			g, m := w.s.GroupOfPool(p.ID()), w.member()
			var open, pins []uint64
			for step := range 120 {
				switch rng.IntN(4) {
				case 0:
					keys := chainKeys(1<<50+nextID(), 1+rng.IntN(5))
					if err := store(t, m, g, 0, chainItems(keys)); errors.Is(err, ErrNoSpace) {
						continue
					} else {
						require.NoError(t, err)
					}
					if len(pins) < 4 && rng.IntN(2) == 0 {
						pins = append(pins, nextID())
						_, err := m.Pin(g, 0, pins[len(pins)-1], keys, make([]Grant, len(keys)))
						require.NoError(t, err)
					}
				case 1:
					if len(pins) > 0 {
						require.NoError(t, m.Release(g, pins[0]))
						pins = pins[1:]
					}
				case 2:
					if len(open) > 0 {
						require.NoError(t, m.Abort(g, open[0]))
						open = open[1:]
					}
				case 3:
					before := p.Stats()
					want := 1 + rng.IntN(2*most)
					fits := most - int(before.FilesPinned+before.FilesReserved)
					id, granted, _, err := partOf(t, m, g, 0, want)
					evicted := int(p.Stats().Evicted - before.Evicted)
					if fits == 0 {
						require.ErrorIs(t, err, ErrNoSpace)
						require.Zero(t, evicted)
						continue
					}
					require.NoError(t, err)
					require.Equal(t, min(want, fits), granted)
					free := most - int(before.Files+before.FilesReserved)
					require.LessOrEqual(t, evicted, max(0, granted-free)+ahead(most+most/8))
					open = append(open, id)
				}
				if step%20 == 0 {
					checkPool(t, p)
				}
			}
			checkPool(t, p)
		})
	}
}

// TestAbortAfterCommit: a reservation whose ranks have all committed is over, whole or not: on its way, and when done.
func TestAbortAfterCommit(t *testing.T) {
	for name, written := range map[string]int{"whole": 3, "in part": 2, "nothing": 0} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 2, 64*mib, Options{})
			p := w.pool("a", 1, nil)
			g, m := w.s.GroupOfPool(p.ID()), w.member()
			grants, err := reserve(t, m, g, 0, 1, chainItems(chainKeys(1, 3)))
			require.NoError(t, err)
			for _, gr := range grants[:written] {
				writeAll(t, m, p, gr.Slot, 0, -1)
			}
			ticket, err := m.Commit(g, 1, 0)
			require.Equal(t, written < 3, errors.Is(err, ErrIncomplete))
			require.ErrorIs(t, m.Abort(g, 1), ErrNotFound)
			require.Equal(t, written < 3, errors.Is(wait(t, ticket), ErrIncomplete))
			require.ErrorIs(t, m.Abort(g, 1), ErrNotFound)
			require.EqualValues(t, written, p.Stats().Files)
			checkPool(t, p)
		})
	}
}

// TestNoSpaceSaysWhy: a request that no pool of this size can hold is told so, and one that others are in the way of.
func TestNoSpaceSaysWhy(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 10 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	err := once(m, g, 1, 11)
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, "can have 10 at most")
	require.NotContains(t, err.Error(), "reserved")
	_, err = reserve(t, m, g, 0, 2, chainItems(chainKeys(2, 4)))
	require.NoError(t, err)
	err = once(m, g, 3, 8)
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, "4 are pinned or reserved")
}

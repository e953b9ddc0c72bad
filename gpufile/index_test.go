package gpufile

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// TestListWhileChanging: files that are there throughout are listed exactly once, whatever else comes and goes, in
// tables that grow, shrink and shift meanwhile.
func TestListWhileChanging(t *testing.T) {
	w := newWorld(t, 2, 128*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	rng := rand.New(rand.NewPCG(3, 4))
	shardKey := func(n uint64) Key { // all in one shard
		k := testKey(n)
		k[0] = 0x5a
		return k
	}
	var lasting, passing []Key
	add := func(list *[]Key, n uint64) {
		k := shardKey(n)
		require.NoError(t, store(t, m, g, 0, []ReserveItem{{Key: k, Tokens: 1}}))
		*list = append(*list, k)
	}
	for i := range uint64(300) {
		add(&lasting, i)
	}
	next := uint64(1000)
	for range 6 {
		seen := make(map[Key]int)
		out := make([]ListEntry, 7)
		for cookie := uint64(0); ; {
			n := p.List(0x5a, cookie, out)
			if n == 0 {
				break
			}
			for _, e := range out[:n] {
				seen[e.Key]++
				require.Greater(t, e.Cookie, cookie)
				require.Less(t, e.Cookie, uint64(1)<<63)
				cookie = e.Cookie
			}
			for range rng.IntN(20) {
				if rng.IntN(2) == 0 || len(passing) == 0 {
					add(&passing, next)
					next++
				} else {
					i := rng.IntN(len(passing))
					require.NoError(t, p.Unlink(&passing[i]))
					passing = append(passing[:i], passing[i+1:]...)
				}
			}
		}
		for _, k := range lasting {
			require.Equal(t, 1, seen[k])
		}
		for _, n := range seen {
			require.Equal(t, 1, n)
		}
		if len(passing) > 200 {
			for _, k := range passing[20:] {
				require.NoError(t, p.Unlink(&k))
			}
			passing = passing[:20]
		}
	}
	checkPool(t, p)
	require.Zero(t, p.List(0x5b, 0, make([]ListEntry, 1)))
	require.Zero(t, p.List(0x5a, 1<<62, make([]ListEntry, 1)))
	require.Zero(t, p.List(0x5a, ^uint64(0), make([]ListEntry, 1)))

	tips, out := make(map[Key]int), make([]ListEntry, 11)
	for cookie := uint64(0); ; {
		n := p.ListTips(cookie, out)
		if n == 0 {
			break
		}
		for _, e := range out[:n] {
			tips[e.Key]++
			cookie = e.Cookie
		}
	}
	require.Len(t, tips, len(lasting)+len(passing))
	require.Zero(t, testing.AllocsPerRun(10, func() { p.List(0x5a, 0, out) }))
}

// TestTable compares a table with a sorted list, at sizes where runs are long and meet the end.
func TestTable(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10 {
		var tab table
		tab.resize(uint64(8 + rng.IntN(50)))
		have := make(map[uint64]bool)
		span := uint64(1) << (tagBits - rng.IntN(10))
		for range 600 {
			v := (rng.Uint64N(span) + (1<<tagBits - span)) << 32 // crowded at the end
			v |= uint64(rng.Uint32())
			if len(have) > 200 || rng.IntN(3) == 0 {
				for v = range have {
					break
				}
				if !have[v] {
					continue
				}
				tab.remove(v)
				delete(have, v)
			} else {
				for uint64(tab.count+1)*100 > tab.size*loadMax || !tab.insert(v) {
					tab.resize(tab.size + tab.size/4 + 8)
				}
				have[v] = true
			}
			checkTable(t, &tab)
			require.Len(t, have, tab.count)
		}
		out := make([]uint64, len(have)+1)
		require.Equal(t, len(have), tab.scan(0, out))
		for _, v := range out[:len(have)] {
			require.True(t, have[v])
		}
	}
}

// TestLoadPrefersHigherSequence: of two records with one key the later wins, and the other's slot is freed.
func TestLoadPrefersHigherSequence(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 50)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	out := make([]Grant, 50)
	_, err := m.Pin(g, 0, 1, keys, out)
	require.NoError(t, err)
	for i := range 10 {
		require.NoError(t, p.Unlink(&keys[i*5])) // pinned: the record stays
	}
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	newer := make(map[Key]uint32)
	for _, k := range keys {
		newer[k], _, _ = p.Find(&k)
	}
	// The daemon dies: nothing of the doomed files' freeing is known.
	w.kill()
	w.open()
	p = w.s.PoolByName("a")
	checkPool(t, p)
	require.EqualValues(t, 50, p.Stats().Files)
	for _, k := range keys {
		slot, _, ok := p.Find(&k)
		require.True(t, ok)
		require.Equal(t, newer[k], slot)
	}
	require.Eventually(t, func() bool { _, freeing, _ := p.m.Counts(); return freeing == 0 }, waitFor, tick)
	checkPool(t, p)
}

// TestMaxSlotsIsExact: files never exceed the cap, and reach it.
func TestMaxSlotsIsExact(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 64 }) // exactly two rows
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	for i := range 200 {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(uint64(i), 1+i%3))))
		st := p.Stats()
		require.LessOrEqual(t, st.Files+st.FilesReserved, uint64(64))
		if i > 50 {
			require.EqualValues(t, 64, st.Files)
		}
	}
}

// TestBudgetCountsWhatWasThere (invariant d): after an unmount or a death what is on the drives counts as before: the
// figures are the same, and neither a pool's cap nor the volume is exceeded by what is stored then.
func TestBudgetCountsWhatWasThere(t *testing.T) {
	for _, again := range []struct {
		name string
		f    func(w *world)
	}{{"unmounted", (*world).reopen}, {"died", func(w *world) { w.kill(); w.open() }}} {
		t.Run(again.name, func(t *testing.T) {
			w := newWorld(t, 2, 4*mib, Options{NoIO: true})
			w.pool("capped", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 40 })
			w.pool("open", 1, nil)
			next, most := uint64(0), uint64(0)
			fill := func() {
				m := w.member()
				defer m.Close()
				for range 150 {
					for _, name := range []string{"capped", "open"} {
						p := w.s.PoolByName(name)
						next++
						require.NoError(t, store(t, m, w.s.GroupOfPool(p.ID()), 0, chainItems(chainKeys(next, 9))))
					}
					capped, open := w.s.PoolByName("capped").Stats(), w.s.PoolByName("open").Stats()
					require.LessOrEqual(t, capped.Files+capped.FilesReserved, uint64(40))
					most = max(most, open.Files)
				}
			}
			figures := func() [3]uint64 {
				return [3]uint64{w.s.PoolByName("capped").Stats().Files, w.s.PoolByName("open").Stats().Files,
					w.v.Info().FreeBytes}
			}
			fill()
			before, full := figures(), most
			require.Equal(t, uint64(40), before[0])
			require.Positive(t, w.s.PoolByName("open").Stats().Evicted, "the volume is full")
			again.f(w)
			require.Equal(t, before, figures())
			fill()
			require.Equal(t, full, most, "the same drives hold no more than before")
		})
	}
}

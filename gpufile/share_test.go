package gpufile

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
)

// fill stores chains of four files until the pool evicts, and returns the next chain's number.
func (w *world) fill(p *Pool, from uint64) (next uint64) {
	m, g := w.member(), w.s.GroupOfPool(p.ID())
	for next = from; p.Stats().Evicted == 0; next++ {
		require.NoError(w.t, store(w.t, m, g, 0, chainItems(chainKeys(next, 4))))
	}
	return next
}

// once reserves without a retry.
func once(m *Member, g *Group, id uint64, n int) error {
	grants := make([]Grant, n*len(g.pools))
	_, err := m.Reserve(g, 0, id, chainItems(chainKeys(1<<40+id, n)), false, grants)
	return err
}

// TestHopelessReserve: what can never fit is refused at once, and costs nobody a file.
func TestHopelessReserve(t *testing.T) {
	for name, c := range map[string]struct {
		a, b func(w *world, s *extentmap.PoolSpec)
		n    func(a, b *Pool) int
	}{
		"more than the volume": {
			n: func(a, b *Pool) int { return int(a.Stats().SlotsUsed+a.Stats().SlotsFree) + int(b.m.Capacity()) + 1 },
		},
		"more than the maximum": {
			b: func(w *world, s *extentmap.PoolSpec) { s.MaxBytes = rowOf(w) + 1 },
			n: func(a, b *Pool) int { return int(b.m.SlotsPerRow()) + 1 },
		},
		"more than the cap": {
			b: func(w *world, s *extentmap.PoolSpec) { s.MaxSlots = 10 },
			n: func(a, b *Pool) int { return 11 },
		},
		"more than another's minimum leaves": {
			a: func(w *world, s *extentmap.PoolSpec) { s.MinBytes = 3 * rowOf(w) },
			n: func(a, b *Pool) int { return int(a.Stats().SlotsUsed+a.Stats().SlotsFree) - 2*int(a.m.SlotsPerRow()) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 2, 8*mib, Options{NoIO: true})
			change := func(f func(*world, *extentmap.PoolSpec)) func(*extentmap.PoolSpec) {
				return func(s *extentmap.PoolSpec) {
					if f != nil {
						f(w, s)
					}
				}
			}
			a := w.pool("a", 1, change(c.a))
			b := w.pool("b", 1, change(c.b))
			w.fill(a, 0)
			w.clock = w.clock.Add(time.Hour)
			before := a.Stats()
			m, g := w.member(), w.s.GroupOfPool(b.ID())
			require.ErrorIs(t, once(m, g, 1, c.n(a, b)), ErrNoSpace)
			require.ErrorIs(t, once(m, g, 2, c.n(a, b)), ErrNoSpace)
			after := a.Stats()
			require.Equal(t, before.Files, after.Files)
			require.Equal(t, before.Evicted, after.Evicted)
			grants, err := reserveSome(m, g, 0, 3, chainItems(chainKeys(9000, c.n(a, b))), true)
			require.NoError(t, err)
			require.NotEmpty(t, grants, "a part is granted")
			checkPool(t, a)
			checkPool(t, b)
		})
	}
}

// rowOf is what a row of the test geometry takes, which a pool that is not kept shows.
func rowOf(w *world) uint64 {
	drives := newWorld(w.t, len(w.drives), 8*mib, Options{NoIO: true})
	return drives.pool("x", 1, nil).m.RowBytes()
}

// TestPinsInAllRows: rows that hold a pinned file each do not come, and nothing is evicted on the way to finding out.
func TestPinsInAllRows(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	a := w.pool("a", 1, nil)
	b := w.pool("b", 1, nil)
	w.fill(a, 0)
	slots := pinRows(a) // one row can go
	for _, slot := range slots {
		defer a.drop(slot)
	}
	require.Greater(t, len(slots), 2)
	before := a.Stats()
	m, g := w.member(), w.s.GroupOfPool(b.ID())
	_, err := reserve(t, m, g, 0, 1, chainItems(chainKeys(9000, 3*int(b.m.SlotsPerRow()))))
	require.ErrorIs(t, err, ErrNoSpace)
	require.Equal(t, before.Evicted, a.Stats().Evicted)
	checkPool(t, a)
}

// pinRows pins a file in each row but the first, and returns their slots.
func pinRows(p *Pool) (pinned []uint32) {
	rows := p.m.Rows()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range rows[1:] {
		for slot := r.Number * p.m.SlotsPerRow(); slot < (r.Number+1)*p.m.SlotsPerRow(); slot++ {
			if p.nodes.s[slot].is(flagVisible) {
				p.pin(slot)
				pinned = append(pinned, slot)
				break
			}
		}
	}
	return pinned
}

// TestPartOfWhatIsWanted: a reservation that may be shortened gets what the others can give, if not all of it.
func TestPartOfWhatIsWanted(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	a, b := w.pool("a", 1, nil), w.pool("b", 1, nil)
	w.fill(a, 0)
	for _, slot := range pinRows(a) {
		defer a.drop(slot)
	}
	per, g := int(b.m.SlotsPerRow()), w.s.GroupOfPool(b.ID())
	grants, err := reserveSome(w.member(), g, 0, 1, chainItems(chainKeys(9000, 3*per)), true)
	require.NoError(t, err)
	require.Len(t, grants, per)
	checkPool(t, a)
	checkPool(t, b)
}

// gate is a drive whose writes wait while it is held.
type gate struct {
	drive.Drive
	held *sync.RWMutex
}

func (d gate) WriteAt(b []byte, off int64) error {
	d.held.RLock()
	defer d.held.RUnlock()
	return d.Drive.WriteAt(b, off)
}

// TestRowsOnTheirWay: while a row is being given back nobody is told that there is no space, and then all may have it,
// whatever they were refused before.
func TestRowsOnTheirWay(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	w.close()
	var held sync.RWMutex
	for i, d := range w.drives {
		w.drives[i] = gate{d, &held}
	}
	w.open()
	a, b, c := w.pool("a", 1, nil), w.pool("b", 1, nil), w.pool("c", 1, nil)
	w.fill(a, 0)
	slots := pinRows(a)
	for _, slot := range slots {
		defer a.drop(slot)
	}
	first := a.m.Rows()[0].Number * a.m.SlotsPerRow()
	a.mu.Lock()
	for !a.nodes.s[first].is(flagVisible) {
		first++
	}
	a.pin(first)
	a.mu.Unlock()
	m := w.member()
	ask := func(p *Pool, id uint64) error { return once(m, w.s.GroupOfPool(p.ID()), id, 4) }
	// c is refused for as long as the clock stands still.
	require.Eventually(t, func() bool { return errors.Is(ask(c, 1), ErrNoSpace) }, waitFor, tick)
	a.drop(first)
	require.ErrorIs(t, ask(c, 1), ErrNoSpace)

	held.Lock()
	asked := ask(b, 2)
	given := assert.Eventually(t, w.s.giving.Load, waitFor, tick)
	waits := ask(c, 1)
	held.Unlock()
	require.ErrorIs(t, asked, ErrAgain)
	require.True(t, given)
	require.ErrorIs(t, waits, ErrAgain)
	var err error
	require.Eventually(t, func() bool { err = ask(c, 1); return !errors.Is(err, ErrAgain) }, waitFor, tick)
	require.NoError(t, err)
	checkPool(t, a)
	checkPool(t, c)
}

// TestCappedPoolsTakeNoRows: a pool that has rows for all the files that it may have empties no rows of others.
func TestCappedPoolsTakeNoRows(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	a := w.pool("a", 1, nil)
	per := a.m.SlotsPerRow()
	b := w.pool("b", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 2*per - 3 })
	m, g := w.member(), w.s.GroupOfPool(b.ID())
	for i := range uint64(per) {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(1<<20+i, 4))))
	}
	require.Len(t, b.m.Rows(), 2)
	w.fill(a, 0)
	require.True(t, a.mayGive())
	b.mu.Lock()
	for kind := range wishKinds {
		assert.False(t, w.s.wantRow(b, kind, 1), "wish %d", kind)
	}
	b.mu.Unlock()
	checkPool(t, b)
}

// TestSpareRowsGoFirst: a pool whose rows are mostly empty gives them up before another evicts its own files, however
// recent what they hold is, and keeps its minimum and what it can hold in the rows that stay.
func TestSpareRowsGoFirst(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	b := w.pool("b", 1, nil)
	a := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MinBytes = b.m.RowBytes() })
	m := w.member()
	require.NoError(t, store(t, m, w.s.GroupOfPool(b.ID()), 0, chainItems(chainKeys(1<<20, 4))))
	w.fill(a, 0)
	rows := len(a.m.Rows())
	require.Greater(t, rows, 3)
	// One file stays in every row.
	for _, r := range a.m.Rows() {
		kept := false
		for slot := r.Number * a.m.SlotsPerRow(); slot < (r.Number+1)*a.m.SlotsPerRow(); slot++ {
			if info, ok := a.Stat(slot, 0, 0); ok && kept {
				require.NoError(t, a.Unlink(&info.Key))
			} else if ok {
				kept = true
			}
		}
	}
	w.clock = w.clock.Add(time.Hour)
	for slot := range uint32(len(a.nodes.s)) {
		if _, ok := a.Stat(slot, 0, 0); ok {
			a.m.Touch(slot, uint32(w.clock.Unix()))
		}
	}
	per := int(b.m.SlotsPerRow())
	want := uint64((rows - 1) * per) // all rows but a's minimum, less what b keeps ahead
	for i := uint64(1<<20 + 1); b.Stats().Files < want-uint64(per); i++ {
		require.NoError(t, store(t, m, w.s.GroupOfPool(b.ID()), 0, chainItems(chainKeys(i, 4))))
		require.Zero(t, b.Stats().Evicted, "%d files stored, %d rows of a", b.Stats().Files, len(a.m.Rows()))
	}
	require.NotEmpty(t, a.m.Rows())
	require.NotZero(t, a.Stats().Files)
	checkPool(t, a)
	checkPool(t, b)
}

// TestFullRowsStay: rows that are well filled by recent files are not taken from a pool that has a row's worth of free
// slots here and there.
func TestFullRowsStay(t *testing.T) {
	w := newWorld(t, 2, 8*mib, Options{NoIO: true})
	b := w.pool("b", 1, nil)
	a := w.pool("a", 1, nil)
	m := w.member()
	require.NoError(t, store(t, m, w.s.GroupOfPool(b.ID()), 0, chainItems(chainKeys(1<<20, 4))))
	w.fill(a, 0)
	rows, per := a.m.Rows(), int(a.m.SlotsPerRow())
	empty := 2*per/len(rows) + 1 // slots of every row
	require.Less(t, empty, per/spareShare)
	files := 0 // in well filled rows
	for _, r := range rows {
		kept, before := 0, files
		for slot := r.Number * a.m.SlotsPerRow(); slot < (r.Number+1)*a.m.SlotsPerRow(); slot++ {
			info, ok := a.Stat(slot, 0, 0)
			if kept == per-empty && ok {
				require.NoError(t, a.Unlink(&info.Key))
			} else if ok {
				kept++
			}
		}
		if files += kept; kept <= per-per/spareShare {
			files = before // what evictions ahead have taken was here: this row may go
		}
	}
	require.Greater(t, files, (len(rows)-2)*(per-empty))
	w.clock = w.clock.Add(time.Hour)
	for slot := range uint32(len(a.nodes.s)) {
		if _, ok := a.Stat(slot, 0, 0); ok {
			a.m.Touch(slot, uint32(w.clock.Unix()))
		}
	}
	for i := uint64(1<<20 + 1); b.Stats().Evicted == 0; i++ {
		require.NoError(t, store(t, m, w.s.GroupOfPool(b.ID()), 0, chainItems(chainKeys(i, 4))))
	}
	require.GreaterOrEqual(t, a.Stats().Files, uint64(files))
	checkPool(t, a)
}

// TestLRULooksAreBounded: inner files whose leaves are pinned are passed over once, a bounded number in one call.
func TestLRULooksAreBounded(t *testing.T) {
	const stuck = 3*lruLooks + 5
	a := nodes{s: make([]node, stuck+2)}
	p := newLRU(&a)
	for i := range a.s {
		a.s[i] = node{meta: flagVisible, first: none, next: none, prev: none, older: none, newer: none}
		p.insert(uint32(i), none)
		if i < stuck {
			a.s[i].first = stuck + 1
		}
	}
	looks := 0
	evictable := func(s uint32) bool { looks++; return a.s[s].first == none && s != stuck+1 }
	for call := 0; ; call++ {
		require.Less(t, call, 10)
		looks = 0
		slot, ok := p.victim(evictable)
		require.LessOrEqual(t, looks, lruLooks)
		if ok {
			require.EqualValues(t, stuck, slot)
			break
		}
		require.True(t, p.gaveUp())
	}
	require.Equal(t, stuck+1, p.len())
	for range 3 {
		looks = 0
		_, ok := p.victim(evictable)
		require.False(t, ok)
		require.False(t, p.gaveUp(), "nothing is left to look at")
		require.LessOrEqual(t, looks, 1)
	}
	a.s[7].first = none
	p.exposed(7)
	slot, ok := p.victim(evictable)
	require.True(t, ok)
	require.EqualValues(t, 7, slot)
}

// TestEvictionGoesOnAfterGivingUp: who needs a victim that lies behind more files that cannot go than one call looks at
// is asked to come again, and gets it.
func TestEvictionGoesOnAfterGivingUp(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 8 })
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(1, 8))))
	times := 3
	p.mu.Lock()
	p.policy = &givesUp{policy: p.policy, times: &times}
	p.mu.Unlock()
	require.ErrorIs(t, once(m, g, 1, 1), ErrAgain)
	n, err := p.EvictCount(1)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Zero(t, times)
}

// givesUp is a policy that finds nothing for so many times.
type givesUp struct {
	policy
	times *int
	gave  bool
}

func (p *givesUp) gaveUp() bool { return p.gave }

func (p *givesUp) victim(evictable func(uint32) bool) (uint32, bool) {
	if p.gave = *p.times > 0; p.gave {
		*p.times--
		return none, false
	}
	return p.policy.victim(evictable)
}

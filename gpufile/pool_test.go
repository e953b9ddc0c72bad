package gpufile

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/stripe"
)

const mib = 1 << 20

// testIdentity is a valid identity of a pool.
func testIdentity(group string) Identity {
	return Identity{
		Model: "test", Revision: "r1", WeightsEpoch: 0, DType: "bf16", Quantisation: "none", ScaleFormat: "none",
		Layout: "NHD", PageBytes: 4096, BlockTokens: 16, FileTokens: 64, TP: 1, PP: 1, CP: 1, Group: group,
	}
}

// testGeometry has n objects of 4 KiB on each rank, and the trailers.
func testGeometry(ranks, n int) stripe.Geometry {
	var g stripe.Geometry
	for r := range ranks {
		for i := range n {
			runs := []stripe.Run{{Kind: stripe.RunKV, Bytes: 4096}}
			g.Objects = append(g.Objects, stripe.Object{Layer: uint16(i), Rank: uint16(r), Runs: runs})
		}
	}
	return g.WithTrailers()
}

// world is a volume in memory and a store over it.
type world struct {
	t      testing.TB
	drives []drive.Drive
	v      *extentmap.Volume
	s      *Store
	o      Options
	clock  time.Time
}

func newWorld(t testing.TB, drives int, bytes int64, o Options) *world {
	w := &world{t: t, o: o, clock: time.Unix(1_700_000_000, 0)}
	for i := range drives {
		d, err := drive.NewMemory(fmt.Sprintf("mem%d", i), bytes)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		w.drives = append(w.drives, d)
	}
	_, err := extentmap.Format(w.drives, extentmap.FormatOptions{})
	require.NoError(t, err)
	w.open()
	t.Cleanup(w.close)
	return w
}

// keepOpen stands between a volume, which closes its drives, and drives that a test mounts again.
type keepOpen struct{ drive.Drive }

func (keepOpen) Close() error { return nil }

func (w *world) open() {
	var drives []drive.Drive
	for _, d := range w.drives {
		drives = append(drives, keepOpen{d})
	}
	var err error
	w.v, err = extentmap.OpenDrives(drives, extentmap.Options{})
	require.NoError(w.t, err)
	o := w.o
	if o.Now == nil {
		o.Now = func() time.Time { return w.clock }
	}
	w.s, err = Open(w.v, o)
	require.NoError(w.t, err)
}

func (w *world) close() {
	if w.s != nil {
		w.s.Close()
		require.NoError(w.t, w.v.Close())
	}
	w.s = nil
}

// kill drops store and volume as a dying daemon does: nothing more is written.
func (w *world) kill() {
	w.s.mu.Lock()
	w.s.closed = true
	w.s.mu.Unlock()
	close(w.s.quit)
	w.s.workers.Wait()
	w.s.closePools()
	w.v.Abandon()
	w.s = nil
}

// reopen unmounts cleanly and mounts again.
func (w *world) reopen() {
	w.close()
	w.open()
}

func (w *world) pool(name string, ranks int, change func(*extentmap.PoolSpec)) *Pool {
	spec := extentmap.PoolSpec{Name: name, Geometry: testGeometry(ranks, 3), ChecksumAlg: 1}
	if change != nil {
		change(&spec)
	}
	p, ticket, err := w.s.OpenPool(testIdentity(name), spec)
	require.NoError(w.t, err)
	w.done(ticket)
	return p
}

func (w *world) member() *Member {
	m, err := w.s.NewSession(1000)
	require.NoError(w.t, err)
	return m
}

func (w *world) done(t *extentmap.Ticket) {
	w.t.Helper()
	require.NoError(w.t, wait(w.t, t))
}

func wait(t testing.TB, ticket *extentmap.Ticket) error {
	t.Helper()
	select {
	case <-ticket.Done():
		return ticket.Err()
	case <-time.After(30 * time.Second):
		t.Fatal("ticket never done")
		return nil
	}
}

func testKey(n ...uint64) (k Key) {
	h := sha256.New()
	for _, x := range n {
		_ = binary.Write(h, binary.LittleEndian, x)
	}
	return Key(h.Sum(nil))
}

// chainItems are the files of a chain: item i's key is keys[i], its parent keys[i-1].
func chainItems(keys []Key) []ReserveItem {
	items := make([]ReserveItem, len(keys))
	for i, k := range keys {
		items[i] = ReserveItem{Key: k, Tokens: 64, Position: uint32(i)}
		if i > 0 {
			items[i].Parent = keys[i-1]
		}
	}
	return items
}

func chainKeys(chain uint64, n int) []Key {
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = testKey(chain, uint64(i))
	}
	return keys
}

// reserve retries while space is being freed.
func reserve(t testing.TB, m *Member, g *Group, tenant uint32, id uint64, items []ReserveItem) ([]Grant, error) {
	t.Helper()
	grants, err := reserveSome(m, g, tenant, id, items, false)
	if err == nil {
		require.Len(t, grants, len(items)*len(g.pools))
	}
	return grants, err
}

func reserveSome(m *Member, g *Group, tenant uint32, id uint64, items []ReserveItem, partial bool) ([]Grant, error) {
	grants := make([]Grant, len(items)*len(g.pools))
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		n, err := m.Reserve(g, tenant, id, items, partial, grants)
		if err == nil {
			return grants[:n*len(g.pools)], nil
		}
		if !errors.Is(err, ErrAgain) || time.Now().After(deadline) {
			return nil, err
		}
	}
}

var lastID uint64

func nextID() uint64 { lastID++; return lastID }

// store reserves, marks written and commits items.
func store(t testing.TB, m *Member, g *Group, tenant uint32, items []ReserveItem) error {
	t.Helper()
	id := nextID()
	grants, err := reserve(t, m, g, tenant, id, items)
	if err != nil {
		return err
	}
	for at, gr := range grants {
		if gr.Status == GrantNew {
			require.NoError(t, m.MarkWritten(g.pools[at%len(g.pools)], gr.Slot))
		}
	}
	for rank := range g.ranks() {
		ticket, err := m.Commit(g, id, uint16(rank))
		for errors.Is(err, ErrAgain) {
			time.Sleep(time.Millisecond)
			ticket, err = m.Commit(g, id, uint16(rank))
		}
		require.NoError(t, err)
		if rank == g.ranks()-1 {
			return wait(t, ticket)
		}
	}
	return nil
}

// checkPool verifies everything that holds whenever the mutex is free.
func checkPool(t testing.TB, p *Pool) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	listed := make(map[uint32]string)
	note := func(name string) func(uint32) bool {
		return func(s uint32) bool {
			require.Empty(t, listed[s], "slot %d is listed twice", s)
			listed[s] = name
			return true
		}
	}
	p.policy.each(note("policy"))
	p.orphans.each(note("orphans"))
	require.Equal(t, len(listed), p.policy.len()+p.orphans.n)
	require.EqualValues(t, p.files, len(listed))
	var files, reserved, doomed, pinned, away, held, indexed int
	use := make(map[uint32]uint64)
	for i := range p.nodes.s {
		slot, n := uint32(i), &p.nodes.s[i]
		if n.is(flagReserved|flagDoomed|flagAway|flagVisible) && p.m.Available(slot) {
			held++
		}
		if n.is(flagReserved) {
			reserved++
			continue
		}
		if n.pins() > 0 {
			pinned++
		}
		if n.is(flagDoomed) {
			doomed++
			require.NotZero(t, n.pins())
		}
		if n.is(flagAway) {
			away++
			require.False(t, n.is(flagVisible|flagDoomed))
			if n.pins() > 0 {
				doomed++
			}
		}
		if !n.is(flagVisible) {
			require.Empty(t, listed[slot])
			continue
		}
		files++
		r := p.m.Record(slot)
		use[r.Tenant]++
		require.Equal(t, slot, p.index.find(&r.Key))
		require.Equal(t, n.is(flagOrphan), listed[slot] == "orphans")
		if n.is(flagLinked) {
			parent := p.index.find(&r.Parent)
			require.NotEqual(t, none, parent)
			require.True(t, p.nodes.s[parent].is(flagVisible))
		} else {
			require.Equal(t, n.is(flagOrphan), r.Parent != Key{})
		}
		children := uint32(0)
		for c := n.first; c != none; c = p.nodes.s[c].next {
			require.Equal(t, r.Key, p.m.Record(c).Parent)
			require.True(t, p.nodes.s[c].is(flagLinked))
			children++
		}
		require.Equal(t, children, p.children(slot))
	}
	for i := range p.index.shards {
		indexed += p.index.shards[i].count
		checkTable(t, &p.index.shards[i])
	}
	require.EqualValues(t, p.files, files)
	require.EqualValues(t, p.files, indexed)
	require.EqualValues(t, p.reserved, reserved)
	require.EqualValues(t, p.doomed, doomed)
	require.EqualValues(t, p.away, away)
	require.EqualValues(t, p.pinned, pinned)
	charged := uint64(0)
	for tenant, u := range p.tenants {
		require.GreaterOrEqual(t, u.slots, use[tenant]+reservedBy(p, tenant))
		charged += u.slots
	}
	require.Equal(t, p.files+p.reserved, charged)
	_, _, used := p.m.Counts()
	require.EqualValues(t, held+len(p.toFree)+len(p.growth.parked), used)
	c := &p.count
	require.Equal(t, c.lookups.Load(), c.hits.Load()+c.misses.Load())
}

func reservedBy(p *Pool, tenant uint32) (n uint64) {
	for _, w := range p.pending {
		if w.r.tenant == tenant {
			n++
		}
	}
	return n
}

func checkTable(t testing.TB, tab *table) {
	t.Helper()
	last, n := uint64(0), 0
	for i, v := range tab.b {
		if v == empty {
			continue
		}
		if uint64(i) < home(v, tab.size) || n > 0 && v <= last {
			t.Fatalf("entry %x at %d: home %d, behind %x", v, i, home(v, tab.size), last)
		}
		last = v
		n++
	}
	require.Equal(t, tab.count, n)
}

// TestLifeOfOneChain is invariants (a), commit before visible, and (j), deletion at any time.
func TestLifeOfOneChain(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 2, nil)
	m := w.member()
	g := w.s.GroupOfPool(p.ID())
	keys := chainKeys(1, 5)
	grants, err := reserve(t, m, g, 0, 7, chainItems(keys))
	require.NoError(t, err)
	n, err := m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Zero(t, n, "a reserved file is not visible")
	_, err = m.Commit(g, 7, 0)
	require.ErrorIs(t, err, ErrIncomplete, "nothing was written")
	require.ErrorIs(t, m.MarkWritten(p, grants[0].Slot), ErrLease)
	checkPool(t, p)

	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	checkPool(t, p)
	more := append(keys, testKey(99))
	out := make([]Grant, len(more))
	n, err = m.Pin(g, 0, 1, more, out)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	again := make([]Grant, len(more))
	n, err = m.Pin(g, 0, 1, more, again)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	require.Equal(t, out[:5], again[:5])
	st := p.Stats()
	require.EqualValues(t, 6, st.Lookups)
	require.EqualValues(t, 5, st.Hits)
	require.EqualValues(t, 5, st.FilesPinned)

	chain, complete, ok := p.Chain(&keys[4])
	require.True(t, ok && complete)
	require.Equal(t, keys, chain)
	info, ok := p.Stat(out[2].Slot, out[2].Generation, 64)
	require.True(t, ok)
	require.Equal(t, keys[2], info.Key)
	require.EqualValues(t, 2, info.Position)
	require.EqualValues(t, 1, info.Children)
	require.EqualValues(t, 1, info.Pins)
	require.EqualValues(t, 1000, info.Owner)
	require.Equal(t, out[2].Seed, p.Seed(&info))

	require.NoError(t, p.Unlink(&keys[2]))
	n, err = m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Equal(t, 2, n, "an unlinked file is a miss at once")
	checkPool(t, p)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)[2:3]))
	n, err = m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Equal(t, 5, n, "the key is storable again while the old file is pinned")
	checkPool(t, p)
	require.NoError(t, m.Release(g, 1))
	require.ErrorIs(t, m.Release(g, 1), ErrNotFound)
	checkPool(t, p)
	w.reopen()
	p = w.s.PoolByName("a")
	checkPool(t, p)
	m = w.member()
	n, err = m.Peek(w.s.GroupOfPool(p.ID()), 0, keys)
	require.NoError(t, err)
	require.Equal(t, 5, n)
}

const (
	waitFor = 30 * time.Second
	tick    = time.Millisecond
)

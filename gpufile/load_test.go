package gpufile

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap/ondisk"
)

// TestLoadOrder: after a mount, files stand in the policy and among the orphans by their last use, the deepest first
// where that is equal, and chains are linked as they were; in pools large enough that all sorts count.
func TestLoadOrder(t *testing.T) {
	for _, policy := range Policies {
		t.Run(policy, func(t *testing.T) { loadOrder(t, policy) })
	}
}

func loadOrder(t *testing.T, policy string) {
	w := newWorld(t, 2, 96*mib, Options{Policy: policy, NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	rng := rand.New(rand.NewPCG(5, 6))
	for c := range uint64(60) {
		keys := chainKeys(c, 1+rng.IntN(150))
		items := chainItems(keys)
		require.NoError(t, store(t, m, g, uint32(c%3), items[:(len(items)+1)/2]))
		w.clock = w.clock.Add(time.Duration(rng.IntN(3)) * 1500 * time.Second)
		require.NoError(t, store(t, m, g, uint32(c%3), items[(len(items)+1)/2:]))
		if c%2 == 0 {
			require.NoError(t, p.Unlink(&keys[len(keys)/3]))
		}
	}
	require.Greater(t, p.files, uint64(2*radixMin))
	type state struct{ children, orphan, linked uint32 }
	states := func() map[Key]state {
		out := make(map[Key]state)
		for i := range p.nodes.s {
			if n := &p.nodes.s[i]; n.is(flagVisible) {
				out[*p.m.RecordKey(uint32(i))] = state{p.children(uint32(i)), n.meta & flagOrphan, n.meta & flagLinked}
			}
		}
		return out
	}
	before := states()
	w.reopen()
	p = w.s.PoolByName("a")
	checkPool(t, p)
	require.Equal(t, before, states())
	require.Greater(t, p.orphans.n, 20)
	byAge := func(a, b uint32) int {
		x, y := p.m.Record(a), p.m.Record(b)
		used := func(r *ondisk.Record) int64 { return max(int64(r.LastHit), r.CommitTime/1e9) }
		return cmp.Or(cmp.Compare(used(&x), used(&y)), cmp.Compare(y.Position, x.Position), cmp.Compare(a, b))
	}
	var listed, orphans []uint32
	p.policy.each(func(s uint32) bool { listed = append(listed, s); return true })
	p.orphans.each(func(s uint32) bool { orphans = append(orphans, s); return true })
	require.True(t, slices.IsSortedFunc(listed, byAge))
	require.True(t, slices.IsSortedFunc(orphans, byAge))
	for _, l := range [][]uint32{listed, orphans} {
		for i, s := range l[1:] {
			require.Equal(t, l[i], p.nodes.s[s].older)
		}
		require.Equal(t, none, p.nodes.s[l[0]].older)
	}
}

// TestLoadForeignParents: who names a parent of another tenant, of no lower position, or one that is not there, has
// none, wherever that lies.
func TestLoadForeignParents(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	put := func(n uint64, parent Key, tenant, position uint32) Key {
		slot, ok := p.m.Alloc(none)
		for !ok {
			ticket, err := p.m.AddRow()
			require.NoError(t, err)
			w.done(ticket)
			slot, ok = p.m.Alloc(none)
		}
		nonce, generation := w.v.NextGeneration()
		r := ondisk.Record{Key: testKey(n), Parent: parent, Nonce: nonce, Generation: generation, Tokens: 1,
			CommitTime: w.clock.UnixNano(), Tenant: tenant, Position: position}
		tx := w.v.Begin()
		tx.Put(p.m, slot, &r, 0)
		ticket, err := tx.Submit(nil)
		require.NoError(t, err)
		w.done(ticket)
		return r.Key
	}
	root := put(1, Key{}, 0, 5)
	other := put(2, root, 1, 6)
	same := put(3, root, 0, 5)
	child := put(4, root, 0, 6)
	grandchild := put(5, child, 0, 7)
	lost := put(6, testKey(7), 0, 8)
	self := put(8, testKey(8), 0, 9)
	w.reopen()
	p = w.s.PoolByName("a")
	checkPool(t, p)
	for key, flag := range map[Key]uint32{
		root: 0, child: flagLinked, grandchild: flagLinked,
		other: flagOrphan, same: flagOrphan, lost: flagOrphan, self: flagOrphan,
	} {
		slot, _, ok := p.Find(&key)
		require.True(t, ok)
		require.Equal(t, flag, p.nodes.s[slot].meta&(flagLinked|flagOrphan))
	}
}

func TestRadixSort(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 200 {
		n := rng.IntN(3 * radixMin)
		low := 1 + rng.IntN(40)
		top := low + rng.IntN(65-low)
		a := make([]uint64, n)
		for i := range a { // ascending below low, random in a few bits above
			a[i] = uint64(i)&(1<<low-1) | rng.Uint64()&rng.Uint64()>>(64-top)>>low<<low
		}
		if low < 12 {
			slices.SortFunc(a, func(x, y uint64) int { return cmp.Compare(x&(1<<low-1), y&(1<<low-1)) })
		}
		want := slices.Clone(a)
		slices.Sort(want)
		require.Equal(t, want, radixSort(a, make([]uint64, n), low, top, 1+rng.IntN(4)))
	}
}

package gpufile

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// TestPinsAnswerTheSame is invariant (h): what one rank's pin has found is what the others get under its request id,
// whatever has been stored, removed and stored anew in between.
func TestPinsAnswerTheSame(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 2, nil)
	g := w.s.GroupOfPool(p.ID())
	scheduler, other := w.member(), w.member()
	keys := chainKeys(1, 6)
	items := chainItems(keys)
	require.NoError(t, store(t, other, g, 0, items[:4]))
	pin := func(m *Member, want int) []Grant {
		t.Helper()
		grants := make([]Grant, len(keys))
		n, err := m.Pin(g, 0, 1, keys, grants)
		require.NoError(t, err)
		require.Equal(t, want, n)
		return grants[:n]
	}
	first := pin(scheduler, 4)
	for i, change := range []func(){
		func() { require.NoError(t, store(t, other, g, 0, items[4:])) },
		func() { require.NoError(t, p.Unlink(&keys[1])) },
		func() { require.NoError(t, store(t, other, g, 0, items[1:2])) },
		func() { require.NoError(t, p.Unlink(&keys[0])) },
	} {
		change()
		rank, err := w.s.Join(scheduler.Token(), 1000)
		require.NoError(t, err)
		require.Equal(t, first, pin(rank, 4), "after change %d", i)
		d, unit, units := access(p, first[1].Slot, p.rankObjects[1][0])
		a, ok := rank.Authorize(false, d, unit, units)
		require.True(t, ok, "its slots stay readable, those of removed files too")
		rank.Complete(a, true)
	}
	n, err := scheduler.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Zero(t, n, "another request finds what there is now")
	checkPool(t, p)

	// What finds nothing is not remembered.
	require.NoError(t, scheduler.Release(g, 1))
	pin(scheduler, 0)
	require.ErrorIs(t, scheduler.Release(g, 1), ErrNotFound)
	require.NoError(t, store(t, other, g, 0, items[:1]))
	pin(scheduler, 6)
	require.NoError(t, scheduler.Release(g, 1))
	checkPool(t, p)
}

// TestKeysOfOneTag is invariant (b): of keys that the index cannot tell apart each finds its own file, and one that is
// not stored finds none, whichever way it is asked for.
func TestKeysOfOneTag(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := make([]Key, 6)
	for i := range keys { // one factor of the hash is zero, so that the last eight bytes do not count
		keys[i] = testKey(1)
		binary.LittleEndian.PutUint64(keys[i][16:], p.index.secret[2])
		binary.LittleEndian.PutUint64(keys[i][24:], uint64(i))
		require.Equal(t, p.index.tag(&keys[0]), p.index.tag(&keys[i]))
	}
	const stored = 4
	var items []ReserveItem
	for _, k := range keys[:stored] {
		items = append(items, ReserveItem{Key: k, Tokens: 1})
	}
	require.NoError(t, store(t, m, g, 0, items))
	finds := func(k *Key, want bool) {
		t.Helper()
		n, err := m.Peek(g, 0, []Key{*k})
		require.NoError(t, err)
		require.Equal(t, want, n == 1)
		grants := make([]Grant, 1)
		n, err = m.Pin(g, 0, 1, []Key{*k}, grants)
		require.NoError(t, err)
		require.Equal(t, want, n == 1)
		slot, _, ok := p.Find(k)
		require.Equal(t, want, ok)
		if want {
			require.Equal(t, slot, grants[0].Slot)
			require.Equal(t, *k, *p.m.RecordKey(slot))
			require.NoError(t, m.Release(g, 1))
		}
	}
	for i := range keys {
		finds(&keys[i], i < stored)
	}
	checkPool(t, p)
	require.ErrorIs(t, p.Unlink(&keys[stored]), ErrNotFound)
	require.NoError(t, p.Unlink(&keys[1]))
	for i := range keys {
		finds(&keys[i], i < stored && i != 1)
	}
	grants, err := reserve(t, m, g, 0, 2, []ReserveItem{{Key: keys[stored], Parent: keys[1], Tokens: 1, Position: 1}})
	require.NoError(t, err)
	require.Equal(t, GrantNew, grants[0].Status)
	require.NoError(t, m.Abort(g, 2))
	checkPool(t, p)
}

// TestLookupsHoldNothing is invariant (i): engines that look prompts up and go away, or let their pins run out, leave
// every file evictable.
func TestLookupsHoldNothing(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true, PinTimeout: time.Minute})
	const files = 64
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = files })
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, files)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	before := p.Stats()
	for range 100_000 {
		n, err := m.Peek(g, 0, keys[:8])
		require.NoError(t, err)
		require.Equal(t, 8, n)
	}
	require.Equal(t, before, p.Stats())

	// Pins of the dead, and pins that nobody has released.
	dead := w.member()
	for i, who := range []*Member{dead, m} {
		for request := range uint64(1000) {
			_, err := who.Pin(g, 0, uint64(i)<<32|request, keys, make([]Grant, files))
			require.NoError(t, err)
		}
	}
	others := chainItems(chainKeys(2, files))
	_, err := reserveSome(m, g, 0, 1, others, true)
	require.ErrorIs(t, err, ErrNoSpace, "everything is pinned")
	dead.Close()
	for _, ses := range w.s.allSessions() {
		ses.sweep(w.clock.Add(61 * time.Second))
	}
	require.Zero(t, p.Stats().FilesPinned)
	require.NoError(t, store(t, m, g, 0, others))
	require.EqualValues(t, files, p.Stats().Evicted, "all of what was there has made room")
	checkPool(t, p)
}

// TestIdentitiesShareNothing is invariant (c): a pool whose identity differs in one field, any of them, hits nothing of
// another under the same keys, and cannot be opened in its place.
func TestIdentitiesShareNothing(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("base", 1, nil)
	m := w.member()
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, m, w.s.GroupOfPool(p.ID()), 0, chainItems(keys)))
	spec := extentmap.PoolSpec{Geometry: testGeometry(1, 3), ChecksumAlg: 1}
	v := reflect.TypeFor[Identity]()
	for i := range v.NumField() {
		id := testIdentity("base")
		switch f := reflect.ValueOf(&id).Elem().Field(i); f.Kind() {
		case reflect.String:
			f.SetString(f.String() + "x")
		default:
			f.SetUint(max(1, 2*f.Uint()))
		}
		spec.Name = "base"
		_, _, err := w.s.OpenPool(id, spec)
		require.ErrorIs(t, err, ErrIdentity, v.Field(i).Name)
		spec.Name = fmt.Sprint("other", i)
		other, ticket, err := w.s.OpenPool(id, spec)
		require.NoError(t, err, v.Field(i).Name)
		w.done(ticket)
		g := w.s.GroupOfPool(other.ID())
		n, err := m.Peek(g, 0, keys)
		require.NoError(t, err)
		require.Zero(t, n, v.Field(i).Name)
		require.NoError(t, store(t, m, g, 0, chainItems(keys[:1])), "the same key is another file there")
	}
	require.EqualValues(t, 3, p.Stats().Files)
}

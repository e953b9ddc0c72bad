package gpufile

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/extentmap"
)

// writeAll writes all objects of a rank of a reserved slot, as a controller would, and leaves out one of them if skip
// is one.
func writeAll(t testing.TB, m *Member, p *Pool, slot uint32, rank, skip int) {
	t.Helper()
	for i, o := range p.rankObjects[rank] {
		if i == skip {
			continue
		}
		d, unit, units, ok := p.m.Extent(slot, o)
		require.True(t, ok)
		a, ok := m.Authorize(true, d, unit, units)
		require.True(t, ok)
		require.Equal(t, slot, a.Slot)
		m.Complete(a, true)
	}
}

func access(p *Pool, slot uint32, object uint16) (drive uint16, unit uint64, units uint32) {
	drive, unit, units, _ = p.m.Extent(slot, object)
	return drive, unit, units
}

// TestAuthorize is invariant (f): a reserved slot can only be written, a pinned one only read, and nothing else at all.
func TestAuthorize(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m, other := w.member(), w.member()
	items := chainItems(chainKeys(1, 2))
	grants, err := reserve(t, m, g, 0, 1, items)
	require.NoError(t, err)
	d, unit, units := access(p, grants[0].Slot, 0)
	_, ok := m.Authorize(false, d, unit, units)
	require.False(t, ok, "reserved slots cannot be read")
	_, ok = other.Authorize(true, d, unit, units)
	require.False(t, ok, "another session's slot")
	for _, bad := range []struct {
		drive uint16
		unit  uint64
		units uint32
	}{
		{d, unit, 0}, {d, unit, units + 1}, {d, unit, ^uint32(0)}, {d, 0, 1}, {d, 1 << 40, 1},
		{63, unit, units}, {64, unit, units}, {999, unit, units},
	} {
		_, ok = m.Authorize(true, bad.drive, bad.unit, bad.units)
		require.False(t, ok, "%+v", bad)
	}
	writeAll(t, m, p, grants[0].Slot, 0, -1)
	writeAll(t, m, p, grants[1].Slot, 0, -1)
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	_, ok = m.Authorize(true, d, unit, units)
	require.False(t, ok, "a committed slot cannot be written any more")
	w.done(ticket)
	_, ok = m.Authorize(false, d, unit, units)
	require.False(t, ok, "committed is not pinned")

	out := make([]Grant, 2)
	_, err = m.Pin(g, 0, 5, []Key{items[0].Key, items[1].Key}, out)
	require.NoError(t, err)
	a, ok := m.Authorize(false, d, unit, units)
	require.True(t, ok)
	_, ok = m.Authorize(true, d, unit, units)
	require.False(t, ok, "pinned slots cannot be written")
	_, ok = other.Authorize(false, d, unit, units)
	require.False(t, ok)

	// Quarantine: the read in flight outlives the pin and the file.
	require.NoError(t, m.Release(g, 5))
	require.NoError(t, p.Unlink(&items[0].Key))
	_, ok = m.Authorize(false, d, unit, units)
	require.False(t, ok, "released")
	checkPool(t, p)
	require.EqualValues(t, 1, p.doomed, "not freed while a command is in flight")
	m.Complete(a, true)
	require.Zero(t, p.doomed)
	checkPool(t, p)
	m.Complete(Access{}, true) // of a refused command: nothing happens
}

// TestPinAgainWhileEnding: a lease that ends with a command in flight can be taken again.
func TestPinAgainWhileEnding(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 1)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	out := make([]Grant, 1)
	_, err := m.Pin(g, 0, 1, keys, out)
	require.NoError(t, err)
	d, unit, units := access(p, out[0].Slot, 0)
	a, ok := m.Authorize(false, d, unit, units)
	require.True(t, ok)
	require.NoError(t, m.Release(g, 1))
	_, err = m.Pin(g, 0, 2, keys, out)
	require.NoError(t, err)
	m.Complete(a, true)
	a, ok = m.Authorize(false, d, unit, units)
	require.True(t, ok)
	m.Complete(a, false)
	require.NoError(t, m.Release(g, 2))
	require.Zero(t, m.ses.leases.live)
	require.Zero(t, p.Stats().FilesPinned)
	checkPool(t, p)
}

// TestLateClaim: between a poller's claim of a lease's end and its turn at the session's mutex, the lease may be ended
// by a verb and used for a slot that is being committed. The claim must not end that one.
func TestLateClaim(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 1)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	out := make([]Grant, 1)
	_, err := m.Pin(g, 0, 1, keys, out)
	require.NoError(t, err)
	l := m.ses.leases.get(leaseKey(p.ID(), out[0].Slot))
	d, unit, units := access(p, out[0].Slot, 0)
	_, ok := m.Authorize(false, d, unit, units)
	require.True(t, ok)
	require.NoError(t, m.Release(g, 1))
	require.True(t, l.claim(), "the last command is out")

	_, err = m.Pin(g, 0, 2, keys, out)
	require.NoError(t, err)
	require.NoError(t, m.Release(g, 2))
	grants, err := reserve(t, m, g, 0, 3, chainItems(chainKeys(2, 1)))
	require.NoError(t, err)
	key := leaseKey(p.ID(), grants[0].Slot)
	require.Same(t, l, m.ses.leases.get(key), "used again")
	require.True(t, l.end(), "as a commit does")
	m.ses.finish(l)
	require.Same(t, l, m.ses.leases.get(key))
	require.EqualValues(t, 1, p.Stats().FilesReserved)
	require.NoError(t, m.Abort(g, 3))
	require.Zero(t, m.ses.leases.live)
	checkPool(t, p)
}

// TestIncompleteIsGivenUp is invariant (m): what was not written is not stored, nor what hangs on it.
func TestIncompleteIsGivenUp(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 2, nil)
	g := w.s.GroupOfPool(p.ID())
	m, rank1 := w.member(), (*Member)(nil)
	rank1, err := w.s.Join(m.Token(), 1000)
	require.NoError(t, err)
	_, err = w.s.Join(m.Token(), 1001)
	require.ErrorIs(t, err, ErrSession, "another user")
	keys := chainKeys(1, 4)
	grants, err := reserve(t, m, g, 0, 1, chainItems(keys))
	require.NoError(t, err)
	joined := make([]Grant, 4)
	_, err = rank1.Reserve(g, 0, 1, chainItems(keys), false, joined)
	require.NoError(t, err)
	for i := range grants {
		require.Equal(t, GrantNew, grants[i].Status)
		require.Equal(t, GrantJoined, joined[i].Status)
		require.Equal(t, grants[i].Slot, joined[i].Slot)
		require.Equal(t, grants[i].Seed, joined[i].Seed)
		writeAll(t, m, p, grants[i].Slot, 0, -1)
	}
	_, err = rank1.Reserve(g, 0, 1, chainItems(chainKeys(2, 4)), false, joined)
	require.ErrorIs(t, err, ErrInvalid)
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	again, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	require.Equal(t, ticket, again)
	// Rank 1 writes all, but of file 2 one object in two halves, and of file 3 all.
	for i := range grants {
		skip := -1
		if i == 2 {
			skip = 1
		}
		writeAll(t, rank1, p, grants[i].Slot, 1, skip)
	}
	d, unit, units := access(p, grants[2].Slot, p.rankObjects[1][1])
	require.EqualValues(t, 1, units)
	for _, outcome := range []bool{true, false} {
		a, ok := rank1.Authorize(true, d, unit, units)
		require.True(t, ok)
		rank1.Complete(a, outcome) // a failed write counts for nothing, and undoes those before it
	}
	last, err := rank1.Commit(g, 1, 1)
	require.ErrorIs(t, err, ErrIncomplete)
	require.ErrorIs(t, wait(t, last), ErrIncomplete)
	require.ErrorIs(t, wait(t, ticket), ErrIncomplete, "every rank learns it")
	n, err := m.Peek(g, 0, keys)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.EqualValues(t, 2, p.Stats().Files, "the child of what was given up is given up")
	require.Zero(t, m.ses.leases.live)
	require.Zero(t, m.ses.reserved)
	_, err = m.Commit(g, 9, 0)
	require.ErrorIs(t, err, ErrNotFound)
	checkPool(t, p)
}

// TestWriteFailsAfterCommit: what a rank had in flight when it committed counts until the last rank commits.
func TestWriteFailsAfterCommit(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 2, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	grants, err := reserve(t, m, g, 0, 1, chainItems(chainKeys(1, 2)))
	require.NoError(t, err)
	for _, gr := range grants {
		writeAll(t, m, p, gr.Slot, 0, -1)
		writeAll(t, m, p, gr.Slot, 1, -1)
	}
	d, unit, units := access(p, grants[1].Slot, p.rankObjects[0][0])
	again, ok := m.Authorize(true, d, unit, units)
	require.True(t, ok)
	_, err = m.Commit(g, 1, 0)
	require.NoError(t, err)
	m.Complete(again, false)
	ticket, err := m.Commit(g, 1, 1)
	require.ErrorIs(t, err, ErrIncomplete)
	require.ErrorIs(t, wait(t, ticket), ErrIncomplete)
	require.EqualValues(t, 1, p.Stats().Files)
	require.Zero(t, m.ses.leases.live)
	checkPool(t, p)
}

// TestWriteInFlightAtCommit: a late write must find nobody, so its file is not committed.
func TestWriteInFlightAtCommit(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 2)
	grants, err := reserve(t, m, g, 0, 1, chainItems(keys))
	require.NoError(t, err)
	writeAll(t, m, p, grants[0].Slot, 0, -1)
	writeAll(t, m, p, grants[1].Slot, 0, -1)
	d, unit, units := access(p, grants[1].Slot, 0)
	a, ok := m.Authorize(true, d, unit, units)
	require.True(t, ok)
	ticket, err := m.Commit(g, 1, 0)
	require.ErrorIs(t, err, ErrIncomplete)
	require.ErrorIs(t, wait(t, ticket), ErrIncomplete)
	st := p.Stats()
	require.EqualValues(t, 1, st.Files)
	require.EqualValues(t, 1, st.FilesReserved, "quarantined until the write is over")
	m.Complete(a, true)
	require.Zero(t, p.Stats().FilesReserved)
	require.EqualValues(t, 1, p.Stats().Aborted)
	checkPool(t, p)
}

// TestDeath is invariant (i): a member's end frees its pins and the reservations it took part in, after commands in
// flight.
func TestDeath(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 2, nil)
	g := w.s.GroupOfPool(p.ID())
	scheduler := w.member()
	rank, err := w.s.Join(scheduler.Token(), 1000)
	require.NoError(t, err)
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, scheduler, g, 0, chainItems(keys)))
	grants := make([]Grant, 3)
	_, err = scheduler.Pin(g, 0, 1, keys, grants)
	require.NoError(t, err)
	_, err = rank.Pin(g, 0, 1, keys, grants)
	require.NoError(t, err)
	_, err = rank.Pin(g, 0, 2, keys[:2], grants)
	require.NoError(t, err)
	mine, err := reserve(t, scheduler, g, 0, 10, chainItems(chainKeys(2, 2)))
	require.NoError(t, err)
	_, err = reserve(t, scheduler, g, 0, 11, chainItems(chainKeys(3, 2)))
	require.NoError(t, err)
	_, err = rank.Reserve(g, 0, 10, chainItems(chainKeys(2, 2)), false, grants)
	require.NoError(t, err)
	ticket, err := func() (*extentmap.Ticket, error) {
		writeAll(t, scheduler, p, mine[0].Slot, 0, -1)
		writeAll(t, scheduler, p, mine[1].Slot, 0, -1)
		return scheduler.Commit(g, 10, 0)
	}()
	require.NoError(t, err)
	d, unit, units := access(p, mine[0].Slot, p.rankObjects[1][0])
	a, ok := rank.Authorize(true, d, unit, units)
	require.True(t, ok)

	rank.Close()
	rank.Close()
	require.ErrorIs(t, wait(t, ticket), ErrNotFound, "the other rank learns that nothing was stored")
	_, ok = rank.Authorize(true, d, unit, units)
	require.False(t, ok)
	_, err = rank.Peek(g, 0, keys)
	require.ErrorIs(t, err, ErrSession)
	st := p.Stats()
	require.EqualValues(t, 3, st.FilesPinned, "the scheduler holds request 1")
	require.EqualValues(t, 3, st.FilesReserved, "reservation 11, and the slot with a command in flight")
	checkPool(t, p)
	rank.Complete(a, true)
	require.EqualValues(t, 2, p.Stats().FilesReserved)
	infos := w.s.Sessions()
	require.Len(t, infos, 1)
	require.Equal(t, 1, infos[0].Members)
	require.Equal(t, 3, infos[0].Pins)
	require.Equal(t, 2, infos[0].Reserved)

	scheduler.Close()
	require.Empty(t, w.s.Sessions())
	st = p.Stats()
	require.Zero(t, st.FilesPinned+st.FilesReserved)
	_, err = w.s.Join(scheduler.Token(), 1000)
	require.ErrorIs(t, err, ErrSession)
	checkPool(t, p)
}

func TestDeadlines(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{PinTimeout: time.Minute, ReserveTimeout: time.Hour})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	grants := make([]Grant, 3)
	_, err := m.Pin(g, 0, 1, keys, grants)
	require.NoError(t, err)
	_, err = reserve(t, m, g, 0, 1<<40, chainItems(chainKeys(2, 2)))
	require.NoError(t, err)
	sweep := func(after time.Duration) {
		for _, ses := range w.s.allSessions() {
			ses.sweep(w.clock.Add(after))
		}
	}
	sweep(59 * time.Second)
	require.EqualValues(t, 3, p.Stats().FilesPinned)
	sweep(61 * time.Second)
	require.Zero(t, p.Stats().FilesPinned)
	require.ErrorIs(t, m.Release(g, 1), ErrNotFound)
	require.EqualValues(t, 2, p.Stats().FilesReserved)
	sweep(61 * time.Minute)
	require.Zero(t, p.Stats().FilesReserved)
	require.Empty(t, m.ses.reservations, "finished ones are forgotten as well")
	checkPool(t, p)
}

// TestNamedFilesAreBounded: neither pins nor reservations of files that exist take memory without end.
func TestNamedFilesAreBounded(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 4)
	items := chainItems(keys)
	require.NoError(t, store(t, m, g, 0, items))
	require.Zero(t, m.ses.itemsNamed)
	grants := make([]Grant, 4)
	pin := func(request uint64, keys []Key) error {
		_, err := m.Pin(g, 0, request, keys, grants)
		return err
	}

	m.ses.pinsNamed = PinnedMax - 6
	require.NoError(t, pin(1, keys))
	require.ErrorIs(t, pin(2, keys), ErrInvalid)
	require.NoError(t, pin(1, keys), "again")
	require.NoError(t, pin(2, keys[:2]))
	require.NoError(t, m.Release(g, 1))
	require.NoError(t, pin(3, keys))
	require.Equal(t, PinnedMax, m.ses.pinsNamed)
	require.NoError(t, m.Release(g, 2))
	require.NoError(t, m.Release(g, 3))
	require.Equal(t, PinnedMax-6, m.ses.pinsNamed)

	m.ses.itemsNamed = ReservedMax - 6
	reserve := func(id uint64, items []ReserveItem) error {
		_, err := m.Reserve(g, 0, id, items, false, grants)
		return err
	}
	require.NoError(t, reserve(1, items))
	require.ErrorIs(t, reserve(2, items), ErrAgain)
	require.NoError(t, reserve(1, items), "again")
	require.NoError(t, reserve(2, items[:2]))
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	w.done(ticket)
	require.NoError(t, reserve(3, items))
	require.NoError(t, m.Abort(g, 2))
	require.NoError(t, m.Abort(g, 3))
	require.Equal(t, ReservedMax-6, m.ses.itemsNamed)
	checkPool(t, p)
}

// TestParentsAreHeld: what a reservation builds on stays until its outcome, whether it is among its items or not;
// another tenant's file is not built on, and no number of reservations makes the pins run over.
func TestParentsAreHeld(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 3)
	items := chainItems(keys)
	require.NoError(t, store(t, m, g, 7, items[:1]))
	slot, _, ok := p.Find(&keys[0])
	require.True(t, ok)
	evictable := func() uint64 { return p.Stats().Files - p.Stats().FilesPinned }

	for _, from := range []int{0, 1} {
		_, err := reserve(t, m, g, 7, 1, items[from:])
		require.NoError(t, err)
		n, err := p.EvictCount(1)
		require.NoError(t, err)
		require.Zero(t, n, "items from %d", from)
		require.NoError(t, m.Abort(g, 1))
		require.EqualValues(t, 1, evictable())
	}
	_, err := reserve(t, m, g, 8, 2, []ReserveItem{{Key: testKey(9), Parent: keys[0], Tokens: 1}})
	require.NoError(t, err)
	require.EqualValues(t, 1, evictable(), "another tenant's")
	require.NoError(t, m.Abort(g, 2))

	for p.nodes.s[slot].pins() < pinsLimit {
		p.pin(slot)
	}
	_, err = reserve(t, m, g, 7, 3, items)
	require.NoError(t, err)
	require.Equal(t, pinsLimit, p.nodes.s[slot].pins())
	_, _, ok = p.HoldRead(slot, 0, 0)
	require.False(t, ok)
	require.NoError(t, m.Abort(g, 3))
	for p.nodes.s[slot].pins() > 0 {
		p.unpin(slot)
	}
	checkPool(t, p)
}

// TestHoldWrite: a slot that the daemon itself is writing outlives the time-out of its reservation.
func TestHoldWrite(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{ReserveTimeout: time.Minute})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	items := chainItems(chainKeys(1, 1))
	grants, err := reserve(t, m, g, 0, 1, items)
	require.NoError(t, err)
	done, err := m.HoldWrite(p, grants[0].Slot)
	require.NoError(t, err)
	m.ses.sweep(w.clock.Add(2 * time.Minute))
	require.EqualValues(t, 1, p.Stats().FilesReserved)
	require.ErrorIs(t, m.MarkWritten(p, grants[0].Slot), ErrLease)
	_, err = m.HoldWrite(p, grants[0].Slot)
	require.ErrorIs(t, err, ErrLease)
	done()
	done()
	require.Zero(t, p.Stats().FilesReserved)
	checkPool(t, p)

	grants, err = reserve(t, m, g, 0, 2, items)
	require.NoError(t, err)
	done, err = m.HoldWrite(p, grants[0].Slot)
	require.NoError(t, err)
	require.NoError(t, m.MarkWritten(p, grants[0].Slot))
	done()
	ticket, err := m.Commit(g, 2, 0)
	require.NoError(t, err)
	w.done(ticket)
	checkPool(t, p)
}

// TestVouch: a member whose commands nobody sees commits by its word, for the drives that it vouches for; and its slots
// go to nobody else while it may be writing to them.
func TestVouch(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{ReserveTimeout: time.Minute})
	p := w.pool("a", 2, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	other, err := w.s.Join(m.Token(), 1000)
	require.NoError(t, err)
	m.Vouch([]uint16{0, 1})

	items := chainItems(chainKeys(1, 2))
	grants, err := reserve(t, m, g, 0, 1, items)
	require.NoError(t, err)
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err, "nothing was seen to be written")
	_, err = other.Reserve(g, 0, 1, items, false, grants)
	require.NoError(t, err)
	_, err = other.Commit(g, 1, 1)
	require.ErrorIs(t, err, ErrIncomplete, "of its own rank alone")
	require.ErrorIs(t, wait(t, ticket), ErrIncomplete)
	require.Zero(t, p.Stats().FilesReserved, "all ranks were done with it")

	for name, end := range map[string]func(id uint64){
		"abort": func(id uint64) { require.ErrorIs(t, m.Abort(g, id), ErrNotFound) },
		"commit": func(id uint64) {
			_, err := m.Commit(g, id, 0)
			require.ErrorIs(t, err, ErrNotFound)
		},
	} {
		id := uint64(len(name))
		_, err = reserve(t, m, g, 0, id, items)
		require.NoError(t, err)
		m.ses.sweep(w.clock.Add(2 * time.Minute))
		require.EqualValues(t, 2, p.Stats().FilesReserved, "timed out, and may be written to")
		end(id)
		require.Zero(t, p.Stats().FilesReserved, name)
	}

	_, err = reserve(t, m, g, 0, 20, items)
	require.NoError(t, err)
	_, err = other.Reserve(g, 0, 20, items, false, grants)
	require.NoError(t, err)
	_, err = other.Commit(g, 20, 1)
	require.ErrorIs(t, err, ErrIncomplete, "given up, and the first rank does not know")
	require.EqualValues(t, 2, p.Stats().FilesReserved)
	ticket, err = m.Commit(g, 20, 0)
	require.NoError(t, err)
	require.ErrorIs(t, wait(t, ticket), ErrIncomplete)
	require.Zero(t, p.Stats().FilesReserved)

	_, err = reserve(t, m, g, 0, 30, items)
	require.NoError(t, err)
	_, err = other.Reserve(g, 0, 30, items, false, grants)
	require.NoError(t, err)
	other.Close()
	require.EqualValues(t, 2, p.Stats().FilesReserved, "another rank's death does not stop this one's commands")
	m.Close()
	require.Zero(t, p.Stats().FilesReserved)
	checkPool(t, p)
}

// TestVouchForSomeDrives: what lies on other drives must be seen to be written.
func TestVouchForSomeDrives(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	m.Vouch([]uint16{0})
	grants, err := reserve(t, m, g, 0, 1, chainItems(chainKeys(1, 1)))
	require.NoError(t, err)
	seen := 0
	for _, o := range p.rankObjects[0] {
		if d, unit, units := access(p, grants[0].Slot, o); d != 0 {
			a, ok := m.Authorize(true, d, unit, units)
			require.True(t, ok)
			m.Complete(a, true)
			seen++
		}
	}
	require.NotZero(t, seen)
	require.Less(t, seen, len(p.rankObjects[0]))
	ticket, err := m.Commit(g, 1, 0)
	require.NoError(t, err)
	w.done(ticket)
	_, err = reserve(t, m, g, 0, 2, chainItems(chainKeys(2, 1)))
	require.NoError(t, err)
	_, err = m.Commit(g, 2, 0)
	require.ErrorIs(t, err, ErrIncomplete)
	checkPool(t, p)
}

// TestPendingAndParents: two engines, one key; children that are durable before their parent are adopted when it comes.
func TestPendingAndParents(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	a, b := w.member(), w.member()
	keys := chainKeys(1, 4)
	items := chainItems(keys)
	first, err := reserve(t, a, g, 0, 1, items[:2])
	require.NoError(t, err)
	second, err := reserve(t, b, g, 0, 1, items)
	require.NoError(t, err)
	require.Equal(t, GrantPending, second[0].Status)
	require.Equal(t, GrantPending, second[1].Status)
	require.Equal(t, extentmap.NoSlot, second[1].Slot)
	require.Equal(t, GrantNew, second[2].Status)
	for _, gr := range second[2:] {
		require.NoError(t, b.MarkWritten(p, gr.Slot))
	}
	ticket, err := b.Commit(g, 1, 0)
	require.NoError(t, err)
	w.done(ticket)
	require.Equal(t, 1, p.orphans.n)
	checkPool(t, p)
	for _, gr := range first {
		require.NoError(t, a.MarkWritten(p, gr.Slot))
	}
	ticket, err = a.Commit(g, 1, 0)
	require.NoError(t, err)
	w.done(ticket)
	require.Zero(t, p.orphans.n)
	checkPool(t, p)
	third, err := reserve(t, b, g, 0, 2, items)
	require.NoError(t, err)
	for i := range third {
		require.Equal(t, GrantExists, third[i].Status)
	}
	ticket, err = b.Commit(g, 2, 0)
	require.NoError(t, err)
	w.done(ticket)

	// An engine that names rings of parents gets files, but no ring of links.
	x, y := testKey(7, 1), testKey(7, 2)
	require.NoError(t, store(t, a, g, 0, []ReserveItem{{Key: x, Parent: y, Tokens: 1, Position: 9}}))
	require.NoError(t, store(t, a, g, 0, []ReserveItem{{Key: y, Parent: x, Tokens: 1}}))
	out := make([]Grant, 2)
	_, err = a.Pin(g, 0, 77, []Key{y, x}, out)
	require.NoError(t, err)
	checkPool(t, p)
	chain, complete, ok := p.Chain(&y)
	require.True(t, ok)
	require.False(t, complete)
	require.Equal(t, []Key{x, y}, chain)
}

func TestReserveRefuses(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	k := chainKeys(1, 3)
	grants := make([]Grant, 8)
	ok := chainItems(k)
	for name, items := range map[string][]ReserveItem{
		"zero key":            {{Tokens: 1}},
		"own parent":          {{Key: k[0], Parent: k[0], Tokens: 1}},
		"no tokens":           {{Key: k[0]}},
		"too many tokens":     {{Key: k[0], Tokens: 65}},
		"twice":               {ok[0], ok[0]},
		"child before parent": {ok[1], ok[0]},
		"more than grants":    make([]ReserveItem, 9),
		"far too many":        make([]ReserveItem, KeysMax+1),
	} {
		_, err := m.Reserve(g, 0, 1, items, false, grants)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	_, err := m.Reserve(nil, 0, 1, ok, false, grants)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = m.Pin(nil, 0, 1, k, grants)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = m.Pin(g, 0, 1, k, grants[:2])
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, m.Release(nil, 1), ErrInvalid)
	_, err = reserve(t, m, g, 0, 1, ok)
	require.NoError(t, err)
	_, err = m.Commit(g, 1, 1)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, m.Abort(g, 2), ErrNotFound)
	require.NoError(t, m.Abort(g, 1))
	st := p.Stats()
	require.Zero(t, st.FilesReserved)
	require.EqualValues(t, 3, st.Aborted)
	checkPool(t, p)
}

func TestReportBad(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	slot, generation, ok := p.Find(&keys[1])
	require.True(t, ok)
	_, err := m.ReportBad(p, slot, generation)
	require.ErrorIs(t, err, ErrInvalid, "nobody can verify")
	info, _ := p.Stat(slot, generation, 64)
	verdict := Intact
	w.s.SetVerifier(func(q *Pool, s uint32, seed checksum.Seed) Verdict {
		require.Equal(t, p, q)
		require.Equal(t, slot, s)
		require.Equal(t, p.Seed(&info), seed)
		return verdict
	})
	_, err = m.ReportBad(p, slot, generation+1)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = m.ReportBad(p, ^uint32(0), generation)
	require.ErrorIs(t, err, ErrNotFound)
	ticket, err := m.ReportBad(p, slot, generation)
	require.NoError(t, err)
	w.done(ticket)
	require.EqualValues(t, 3, p.Stats().Files, "one reader's word does not evict")
	verdict = Damaged
	ticket, err = m.ReportBad(p, slot, generation)
	require.NoError(t, err)
	w.done(ticket)
	st := p.Stats()
	require.EqualValues(t, 2, st.Files)
	require.EqualValues(t, 1, st.Bad)
	require.Equal(t, 1, p.orphans.n)
	checkPool(t, p)
}

// TestRaces: engines, evictors, readers and dying members at once.
func TestRaces(t *testing.T) {
	w := newWorld(t, 2, 24*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 300 })
	g := w.s.GroupOfPool(p.ID())
	const rounds = 400
	var wg sync.WaitGroup
	for e := range 4 {
		wg.Go(func() { raceEngine(t, w, p, g, uint64(e), rounds) })
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	readers.Go(func() {
		out := make([]ListEntry, 64)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			for _, e := range out[:p.List(byte(i), 0, out)] {
				if info, release, ok := p.HoldRead(e.Slot, e.Generation, 64); ok {
					if info.Key != e.Key {
						t.Error("generation says the same, key does not")
					}
					release()
				}
				p.Chain(&e.Key)
			}
			p.ListTips(0, out)
			p.Stats()
			w.s.Space()
			w.s.Sessions()
			if i%16 == 0 {
				_, _ = p.EvictCount(3)
			}
		}
	})
	wg.Wait()
	close(stop)
	readers.Wait()
	checkPool(t, p)
	require.Eventually(t, func() bool { // what was with the journal when its members died
		st := p.Stats()
		return st.FilesPinned+st.FilesReserved == 0
	}, waitFor, tick)
	checkPool(t, p)
	require.LessOrEqual(t, p.Stats().Files, uint64(300))
}

func raceEngine(t *testing.T, w *world, p *Pool, g *Group, e uint64, rounds int) {
	for i := range rounds {
		m, err := w.s.NewSession(1)
		if err != nil {
			t.Error(err)
			return
		}
		keys := chainKeys(uint64(i%20)*10+e%2, 1+i%12)
		grants := make([]Grant, len(keys))
		n, err := m.Pin(g, 0, 1, keys, grants)
		if err != nil {
			t.Error(err)
		}
		for _, gr := range grants[:n] {
			d, unit, units := access(p, gr.Slot, 0)
			a, ok := m.Authorize(false, d, unit, units)
			if !ok {
				t.Error("pinned slot cannot be read")
			}
			defer m.Complete(a, true)
		}
		if items := chainItems(keys)[n:]; len(items) > 0 {
			if _, err := m.Reserve(g, 0, 2, items, i%3 == 0, grants); err == nil && i%5 != 0 {
				if ticket, err := m.Commit(g, 2, 0); err == nil && i%2 == 0 {
					<-ticket.Done()
				}
			}
		}
		if i%7 == 0 {
			_ = p.Unlink(&keys[len(keys)/2])
		}
		m.Close()
	}
}

// TestLeasesWhilePolling: pollers check commands while pins come and go. A command is let in only while its slot is
// pinned, and the slot stays pinned until it is out.
func TestLeasesWhilePolling(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	const chains, length = 16, 40
	slots := make([]uint32, 0, chains*length)
	for c := range uint64(chains) {
		keys := chainKeys(c, length)
		require.NoError(t, store(t, m, g, 0, chainItems(keys)))
		out := make([]uint32, length)
		require.Equal(t, length, p.Lookup(keys, out))
		slots = append(slots, out...)
	}
	stop := make(chan struct{})
	var pollers sync.WaitGroup
	for poller := range 3 {
		pollers.Go(func() {
			let := 0
			for i := poller; ; i++ {
				select {
				case <-stop:
					if let == 0 {
						t.Error("no command was let in")
					}
					return
				default:
				}
				slot := slots[i*7%len(slots)]
				d, unit, units := access(p, slot, uint16(i%3))
				if a, ok := m.Authorize(false, d, unit, units); ok {
					p.mu.RLock()
					if p.nodes.s[slot].pins() == 0 {
						t.Error("a command in flight on a slot that is not pinned")
					}
					p.mu.RUnlock()
					m.Complete(a, true)
					let++
				}
			}
		})
	}
	for i := range uint64(500) {
		_, err := m.Pin(g, 0, i, chainKeys(i*5%chains, length), make([]Grant, length))
		require.NoError(t, err)
		if i >= 3 {
			require.NoError(t, m.Release(g, i-3))
		}
	}
	close(stop)
	pollers.Wait()
	for i := range uint64(3) {
		require.NoError(t, m.Release(g, 497+i))
	}
	require.Zero(t, m.ses.leases.live)
	require.Zero(t, p.Stats().FilesPinned)
	checkPool(t, p)
}

// TestManyReservations: a session stores far more often than it remembers.
func TestManyReservations(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 100 })
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	for i := range uint64(2 * doneMax) {
		require.NoError(t, store(t, m, g, 0, chainItems(chainKeys(i, 1))))
	}
	require.LessOrEqual(t, len(m.ses.reservations), doneMax)
	require.LessOrEqual(t, len(m.ses.done), doneMax)
	checkPool(t, p)
}

// TestRacesOfPools: families and single pools on a volume too small for them, rows moving between pools. Nothing
// deadlocks, and everything adds up afterwards.
func TestRacesOfPools(t *testing.T) {
	w := newWorld(t, 2, 6*mib, Options{NoIO: true, Now: time.Now})
	a := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.Family = "f" })
	b := w.pool("b", 1, func(s *extentmap.PoolSpec) { s.Family, s.TrailingHit = "f", 2 })
	c := w.pool("c", 2, nil)
	groups := []*Group{w.s.GroupOfFamily(a.m.FamilyID()), w.s.GroupOfPool(a.ID()), w.s.GroupOfPool(c.ID())}
	var wg sync.WaitGroup
	for e := range uint64(4) {
		wg.Go(func() {
			for i := range uint64(120) {
				m, err := w.s.NewSession(1)
				if err != nil {
					t.Error(err)
					return
				}
				g := groups[(i+e)%3]
				keys := chainKeys(i%40*4+e%3, 1+int(i%9))
				grants := make([]Grant, len(keys)*len(g.pools))
				if _, err = m.Pin(g, 0, 1, keys, grants); err != nil {
					t.Error(err)
				}
				if _, err = reserveSome(m, g, 0, 2, chainItems(keys), i%4 == 0); err == nil {
					for rank := range g.ranks() {
						_, _ = m.Commit(g, 2, uint16(rank))
					}
				} else if !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrAgain) {
					t.Error(err)
				}
				m.Close()
				if sp := w.s.Space(); sp.TotalBytes != sp.UsedBytes+sp.FreeBytes {
					t.Error("df does not add up")
				}
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool {
		n := uint64(0)
		for _, p := range w.s.Pools() {
			st := p.Stats()
			n += st.FilesPinned + st.FilesReserved
		}
		return n == 0
	}, waitFor, tick)
	for _, p := range []*Pool{a, b, c} {
		checkPool(t, p)
		require.NotZero(t, p.Stats().Committed)
	}
	w.reopen()
	for _, p := range w.s.Pools() {
		checkPool(t, p)
	}
}

package engine

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// written is the bytes of files that the mount was given to write, by whoever.
func written(t *testing.T, v *volume) uint64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(v.mount(), ".tuttifs", "stats"))
	require.NoError(t, err)
	var doc daemon.StatsDocument
	require.NoError(t, json.Unmarshal(b, &doc))
	return doc.IO.BytesWritten
}

// TestMountKeepsWhatIsDeclined: on a mount that admits what is asked for a second time, blocks that are stored for the
// first time stay in the session's memory, serve their reuse from there, by both executors, and are on the drives after
// that, for everybody.
func TestMountKeepsWhatIsDeclined(t *testing.T) {
	t.Setenv(admissionVariable, "second-touch")
	v := newVolume(t)
	o := mountOptions
	o.BounceBytes, o.KeepBytes = 1<<20, 4<<20
	buffered := o
	buffered.StoreBytes, buffered.DMABytes = StoreLeast, 16<<20+StoreLeast
	withGPU := buffered
	withGPU.GPU = gpuMountOptions(startFake(t), "0").GPU
	for seed, o := range []SessionOptions{o, buffered, withGPU} {
		u := newUser(t, v, o, nil)
		require.Contains(t, u.session.Describe(), "on 3 drives")
		require.Contains(t, u.session.Describe(), "4 MiB for blocks that are declined")
		other := newUser(t, v, mountOptions, nil)
		keys, items := chain(uint64(100+seed), 4)
		before := written(t, v)

		// What is reserved and not committed is nobody's; then it is this session's.
		grants := make([]Grant, 4)
		n, err := u.pool.Reserve(0, 1, items, false, grants)
		require.NoError(t, err)
		require.Equal(t, 4, n)
		for rank := range uint16(2) {
			u.storeRank(rank, keys, grants, false)
			found, err := u.pool.Peek(0, keys)
			require.NoError(t, err)
			require.Zero(t, found, "rank %d", rank)
		}
		require.NoError(t, u.pool.CommitRanks(1, 0, 1))
		found, err := u.pool.Peek(0, keys)
		require.NoError(t, err)
		require.Equal(t, 4, found)
		present := make([]bool, 4)
		require.NoError(t, u.pool.Present(0, append([]Key{{9}}, keys[:3]...), present))
		require.Equal(t, []bool{false, true, true, true}, present)
		found, err = u.pool.Peek(7, keys)
		require.NoError(t, err)
		require.Zero(t, found, "another tenant's")
		found, err = other.pool.Peek(0, keys)
		require.NoError(t, err)
		require.Zero(t, found, "another session's")
		require.Equal(t, before, written(t, v), "nothing went to the drives")
		s := u.pool.KeepStats()
		require.EqualValues(t, 4, s.Declined)
		require.EqualValues(t, 4, s.Kept)
		require.EqualValues(t, 4, s.Blocks)

		// The first reuse is served by the memory, and brings the blocks to the drives.
		u.restore(2, 1, keys, false)
		require.EqualValues(t, 4, u.pool.KeepStats().Hits)
		require.Eventually(t, func() bool { return u.pool.KeepStats().Written == 4 }, 20*time.Second, time.Millisecond)
		require.Greater(t, written(t, v), before)
		found, err = other.pool.Peek(0, keys)
		require.NoError(t, err)
		require.Equal(t, 4, found)
		for rank := range uint16(2) {
			other.restore(uint64(10+rank), rank, keys, false)
			u.restore(uint64(20+rank), rank, keys, false)
		}
		s = u.pool.KeepStats()
		require.Zero(t, s.Blocks, "they are on the drives now")
		require.EqualValues(t, 4, s.Hits)
		require.Zero(t, s.Bad)

		// A chain that continues one of the drives is pinned as one.
		longer, more := chain(uint64(100+seed), 6)
		n, err = u.pool.Reserve(0, 3, more[4:], false, grants)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		for rank := range uint16(2) {
			u.storeRank(rank, longer[4:], grants[:2], false)
		}
		require.NoError(t, u.pool.CommitRanks(3, 0, 1))
		u.restore(4, 0, longer, false)
		require.EqualValues(t, 6, u.pool.KeepStats().Hits)
		require.NoError(t, other.session.Close())
		require.NoError(t, u.session.Close())
	}
}

// TestMountKeeper: what is given up, damaged or pushed out is a miss, and everything that was held comes back.
func TestMountKeeper(t *testing.T) {
	t.Setenv(admissionVariable, "second-touch")
	v := newVolume(t)
	o := mountOptions
	o.BounceBytes, o.KeepBytes = 1<<20, KeepLeast
	u := newUser(t, v, o, nil)
	room := int(u.pool.KeepStats().Slots)
	require.Positive(t, room)
	reserve := func(id uint64, items []Item) []Grant {
		grants := make([]Grant, len(items))
		_, err := u.pool.Reserve(0, id, items, false, grants)
		require.NoError(t, err)
		return grants
	}
	statuses := func(grants []Grant) (s []uint8) {
		for _, g := range grants {
			s = append(s, g.Status)
		}
		return s
	}
	count := func(keys []Key) int {
		n, err := u.pool.Peek(0, keys)
		require.NoError(t, err)
		return n
	}

	// Given up.
	keys, items := chain(1, 2)
	first := reserve(1, items)
	require.Equal(t, []uint8{ioctl.GrantNew, ioctl.GrantNew}, statuses(first))
	require.Equal(t, first, reserve(1, items), "the same reservation again")
	require.NoError(t, u.pool.Abort(1))
	require.Zero(t, count(keys))
	require.Zero(t, u.pool.KeepStats().Blocks)

	// Committed without having been written: the trailers are not theirs. Whoever reads them finds out, or reports it, or
	// they are found out when they are to be copied to the drives.
	var keyLists [][]Key
	for seed := range uint64(2) {
		keys, items := chain(2+seed, 1)
		reserve(2+seed, items)
		require.NoError(t, u.pool.CommitRanks(2+seed, 0, 1))
		require.Equal(t, 1, count(keys))
		keyLists = append(keyLists, keys)
	}
	grants := make([]Grant, 1)
	for i, keys := range keyLists {
		n, err := u.pool.Pin(0, uint64(10+i), keys, grants)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		l, err := u.session.Ring().OpenLayers(u.pool.Map(), 0, slotsOf(grants))
		require.NoError(t, err)
		require.ErrorIs(t, l.Failed()[0], gio.ErrChecksum)
		l.Close()
	}
	require.NoError(t, u.pool.ReportBad(grants[0].Slot, grants[0].Generation))
	require.Zero(t, count(keyLists[1]))
	require.NoError(t, u.pool.Release(10))
	require.NoError(t, u.pool.Release(11))
	require.ErrorIs(t, u.pool.Release(11), ErrNotFound)
	require.Eventually(t, func() bool { return u.pool.KeepStats().Bad == 2 }, 20*time.Second, time.Millisecond)
	require.Zero(t, count(keyLists[0]))
	require.Zero(t, u.pool.KeepStats().Written)
	require.Eventually(t, func() bool {
		shown, _ := engineStats(t, v, u.session.ID())
		return shown.KeptHits == 2 && shown.KeptBad == 2
	}, 20*time.Second, 20*time.Millisecond, "the mount shows it")

	// Pushed out: the oldest goes first, and what is pinned never does.
	stored := func(seed uint64) []Key {
		keys, items := chain(seed, 1)
		u.store(1000+seed, keys, items, false)
		return keys
	}
	pinned := stored(10)
	n, err := u.pool.Pin(0, 4, pinned, grants)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Eventually(t, func() bool { return u.pool.KeepStats().Written == 1 }, 20*time.Second, time.Millisecond)
	u.restoreGrants(pinned, grants[:1])
	var oldest []Key
	for i := range room {
		k := stored(uint64(20 + i))
		if i == 0 {
			oldest = k
		}
	}
	require.Zero(t, count(oldest))
	require.EqualValues(t, 1, u.pool.KeepStats().Evicted)
	u.restoreGrants(pinned, grants[:1])
	require.NoError(t, u.pool.Release(4))

	// Without room it is declined as ever.
	keys, items = chain(4, room+1)
	all := reserve(5, items)
	require.EqualValues(t, ioctl.GrantNew, all[room-1].Status)
	require.EqualValues(t, ioctl.GrantDeclined, all[room].Status)
	require.NoError(t, u.pool.Abort(5))
	require.Zero(t, count(keys))
}

// restoreGrants reads what was pinned before, and compares every byte.
func (u *user) restoreGrants(keys []Key, grants []Grant) {
	u.t.Helper()
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), 0, slotsOf(grants))
	require.NoError(u.t, err)
	defer l.Close()
	for layer := range uint16(3) {
		b := u.buffer(layer, 0, len(keys), false)
		ticket, err := l.RetrieveLayer(layer, b.desc)
		require.NoError(u.t, err)
		require.NoError(u.t, ticket.Wait())
		for i := range keys {
			for j, object := range b.objects {
				want := make([]byte, len(b.object(u, i, j)))
				content(want, &keys[i], object)
				require.Equal(u.t, want, b.object(u, i, j))
			}
		}
		require.NoError(u.t, u.session.Ring().Unregister(b.memory))
	}
	for _, err := range l.Failed() {
		require.NoError(u.t, err)
	}
}

func TestKeepOptions(t *testing.T) {
	for _, o := range []SessionOptions{
		{KeepBytes: -1, BounceBytes: 1 << 20}, {KeepBytes: KeepLeast - 4096, BounceBytes: 1 << 20},
		{KeepBytes: KeepLeast + 1, BounceBytes: 1 << 20}, {KeepBytes: KeepLeast},
	} {
		require.ErrorIs(t, o.validate(), ErrInvalid)
	}
	require.NoError(t, (&SessionOptions{KeepBytes: KeepLeast, BounceBytes: 1 << 20}).validate())
	_, err := (&Mount{}).JoinSession([16]byte{}, SessionOptions{KeepBytes: KeepLeast, BounceBytes: 1 << 20})
	require.ErrorContains(t, err, "sessions of one process")
}

// TestMountKeeperFails: a command to the memory that does not complete costs its file and no lane, and the death of the
// daemon ends a session that keeps something like any.
func TestMountKeeperFails(t *testing.T) {
	t.Setenv(admissionVariable, "second-touch")
	v := newVolume(t)
	o := mountOptions
	o.BounceBytes, o.KeepBytes, o.Deadline = 1<<20, 4<<20, 2*time.Second
	u := newUser(t, v, o, nil)
	keys, items := chain(1, 2)
	u.store(1, keys, items, false)
	grants := make([]Grant, 2)
	n, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	lanes := u.session.Ring().Alive()
	var lost atomic.Bool
	u.session.kept.controller.SetFaults(func(e *nvme.SQE) *emu.Fault {
		if e.Opcode == nvme.IORead && lost.CompareAndSwap(false, true) {
			return &emu.Fault{Drop: true}
		}
		return nil
	})
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), 0, slotsOf(grants))
	require.NoError(t, err)
	failed := l.Failed()
	l.Close()
	require.True(t, lost.Load())
	require.True(t, errors.Is(failed[0], gio.ErrTimeout) || errors.Is(failed[1], gio.ErrTimeout), "%v", failed)
	require.Eventually(t, func() bool { return u.session.Ring().Alive() == lanes }, 10*time.Second, time.Millisecond)
	u.restoreGrants(keys, grants)

	require.Eventually(t, func() bool { return u.pool.KeepStats().Written == 2 }, 20*time.Second, time.Millisecond)
	v.kill()
	_, err = u.pool.Pin(0, 3, keys, grants)
	require.Error(t, err)
	_ = u.session.Close()
	v.start()
}

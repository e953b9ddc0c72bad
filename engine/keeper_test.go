package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// keeping is a pool of two ranks on a fake mount that declines everything, with memory for some of it. Nothing copies
// that to the drives: tests say when it is there.
type keeping struct {
	*Pool
	t      *testing.T
	mount  *fakeMount
	waited *[]uint64
}

func newKeeping(t *testing.T, slots int) *keeping {
	c, f, waited := newControl(1 << 16)
	f.declined = true
	var g stripe.Geometry
	for rank := range uint16(2) {
		runs := []stripe.Run{{Kind: stripe.RunKV, Bytes: 9000}}
		g.Objects = append(g.Objects, stripe.Object{Rank: rank, Runs: runs})
	}
	keep := func(p *Pool) (err error) {
		d, err := drive.NewMemory("kept", int64(slots)*int64(p.layout.SlotUnits())*stripe.UnitBytes)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		p.keeper, err = newKeeper(p, &keptMemory{drive: d}, 0, nil)
		return err
	}
	p, err := c.openPool(PoolSpec{Name: "pool", Identity: []byte("{}"), Geometry: g}, keep)
	require.NoError(t, err)
	require.EqualValues(t, slots, p.KeepStats().Slots)
	return &keeping{p, t, f, waited}
}

// reserved are the answers to a reservation of keys.
func (k *keeping) reserved(id uint64, keys []Key) []Grant {
	k.t.Helper()
	items, grants := make([]Item, len(keys)), make([]Grant, len(keys))
	for i := range keys {
		items[i] = Item{Key: keys[i], Tokens: 16, Position: uint32(i)}
	}
	n, err := k.Reserve(0, id, items, false, grants)
	require.NoError(k.t, err)
	require.Equal(k.t, len(keys), n)
	return grants
}

// stored has the memory keep blocks.
func (k *keeping) stored(id uint64, keys []Key) {
	k.t.Helper()
	k.reserved(id, keys)
	require.NoError(k.t, k.CommitRanks(id, 0, 1))
}

// pinned are the answers to a pin of keys.
func (k *keeping) pinned(request uint64, keys []Key) []Grant {
	k.t.Helper()
	grants := make([]Grant, len(keys))
	n, err := k.Pin(0, request, keys, grants)
	require.NoError(k.t, err)
	return grants[:n]
}

// A pin that is repeated answers the same, whatever has come to the drives since, and its release leaves nothing there.
func TestKeptPinIsRepeated(t *testing.T) {
	k := newKeeping(t, 8)
	all := keys(6)
	k.stored(1, all[:2])
	first := k.pinned(1, all[:3])
	require.Len(t, first, 2)
	for _, copied := range []int{1, 2, 3} {
		for i := range copied {
			k.mount.present[all[i]] = true
		}
		require.Equal(t, first, k.pinned(1, all[:3]), "%d on the drives", copied)
	}
	require.Len(t, k.pinned(2, all[:3]), 3, "another request finds them there")
	require.NoError(t, k.Release(2))
	_, err := k.Pin(0, 1, all[1:3], first)
	require.ErrorIs(t, err, ErrInvalid, "other keys")
	_, err = k.Pin(9, 1, all[:3], first)
	require.ErrorIs(t, err, ErrInvalid, "another tenant")
	require.NoError(t, k.Release(1))
	require.Empty(t, k.mount.pins)
	require.ErrorIs(t, k.Release(1), ErrNotFound)

	// Neither does one grow that was answered from the drives alone, nor one of both.
	onDrives := k.pinned(3, all)
	require.Len(t, onDrives, 3)
	k.stored(2, all[3:5])
	require.Len(t, k.pinned(3, all), 3)
	both := k.pinned(4, all)
	require.Len(t, both, 5)
	k.mount.present[all[3]] = true
	for i, g := range k.pinned(4, all) {
		require.Equal(t, both[i].Generation, g.Generation, "%d", i)
		require.Equal(t, i >= 3, k.keeper.owns(g.Slot), "%d", i)
	}
	require.NoError(t, k.Release(3))
	require.NoError(t, k.Release(4))
	require.Empty(t, k.mount.pins)
	require.Empty(t, k.keeper.pins)
}

// Two ranks may pin side by side while a block comes to the drives between them: both are answered the same.
func TestKeptPinSideBySide(t *testing.T) {
	k := newKeeping(t, 8)
	all := keys(2)
	k.stored(1, all)
	first := k.pinned(1, all)
	k.mount.present[all[0]] = true
	grants := make([]Grant, 2)
	n, _, err := k.pin(0, 1, all, grants) // this one had asked the mount before the other was answered
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, 2, k.keeper.pin(0, 1, all, grants, n))
	require.Equal(t, first, grants)
	require.NoError(t, k.Release(1))
	require.Empty(t, k.mount.pins)
	require.EqualValues(t, ioctl.GrantPinned, first[0].Status)
}

// A prefix that ends where a batch does is released without an error.
func TestReleaseOfWholeBatches(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	most, err := p.control.batch(ioctl.KeyBytes + grantBytes)
	require.NoError(t, err)
	all := keys(3 * most)
	for _, key := range all[:2*most] {
		f.present[key] = true
	}
	n, err := p.Pin(0, 1, all, make([]Grant, len(all)))
	require.NoError(t, err)
	require.Equal(t, 2*most, n)
	require.NoError(t, p.Release(1))
	require.Empty(t, f.pins)
}

// Who joins a reservation is answered as the first was, also where places have become free since, so that no block has
// one rank without the others.
func TestKeptJoin(t *testing.T) {
	k := newKeeping(t, 2)
	all := keys(5)
	k.reserved(1, all[:1]) // has a place
	first := k.reserved(2, all[1:3])
	require.Equal(t, []uint8{ioctl.GrantNew, ioctl.GrantDeclined}, []uint8{first[0].Status, first[1].Status})
	require.NoError(t, k.CommitRanks(2, 0))
	require.NoError(t, k.Abort(1))
	declined := k.KeepStats().Declined
	again := k.reserved(2, all[1:4])
	require.Equal(t, first[0], again[0])
	require.EqualValues(t, ioctl.GrantDeclined, again[1].Status, "the first rank did not write it")
	require.EqualValues(t, ioctl.GrantDeclined, again[2].Status, "the first rank did not have it")
	require.Equal(t, declined, k.KeepStats().Declined, "counted once")
	require.NoError(t, k.CommitRanks(2, 1))
	require.Empty(t, k.keeper.stores)
	require.EqualValues(t, 1, k.KeepStats().Kept)

	// What is committed twice is not released twice: a pin protects its place.
	k.keeper.commit(2, []uint16{0, 1})
	pinned := k.pinned(1, all[1:2])
	require.Len(t, pinned, 1)
	third := k.reserved(3, all[2:4])
	require.Equal(t, []uint8{ioctl.GrantNew, ioctl.GrantDeclined}, []uint8{third[0].Status, third[1].Status})
	require.NotEqual(t, pinned[0].Slot, third[0].Slot)

	// What the mount admitted at first and declines now, its own reservation having ended, stays declined.
	k.keeper.stores[3].grants[1] = Grant{}
	require.EqualValues(t, ioctl.GrantDeclined, k.reserved(3, all[2:4])[1].Status)

	// An id that is another reservation's now has the answers of that.
	fourth := k.reserved(3, all[3:5])
	require.EqualValues(t, ioctl.GrantNew, fourth[0].Status)
	require.NotEqual(t, third[0].Generation, fourth[0].Generation)
	require.NoError(t, k.CommitRanks(3, 0, 1))
	require.EqualValues(t, 2, k.KeepStats().Blocks)
	n, err := k.Peek(0, all[3:4])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.EqualValues(t, 2, k.KeepStats().Kept)
}

// Pins and reservations that nobody ends do so themselves, and their places are free then.
func TestKeptLeasesEnd(t *testing.T) {
	k := newKeeping(t, 2)
	now := time.Unix(1, 0)
	k.keeper.now = func() time.Time { return now }
	all := keys(6)
	k.stored(1, all[:1])
	require.Len(t, k.pinned(1, all[:1]), 1)
	(&keptCopier{keeper: k.keeper}).done(k.keeper.next(1)) // the copy holds it no more
	require.EqualValues(t, ioctl.GrantNew, k.reserved(2, all[1:2])[0].Status)
	require.EqualValues(t, ioctl.GrantDeclined, k.reserved(3, all[2:3])[0].Status)

	// A pin that is repeated goes on, a reservation that is joined does not.
	now = now.Add(keptTimeout)
	require.Len(t, k.pinned(1, all[:1]), 1)
	require.EqualValues(t, ioctl.GrantNew, k.reserved(2, all[1:2])[0].Status)
	now = now.Add(keptSweep + 1)
	got := k.reserved(4, all[3:5])
	require.Equal(t, []uint8{ioctl.GrantNew, ioctl.GrantDeclined}, []uint8{got[0].Status, got[1].Status})
	require.Len(t, k.keeper.stores, 1, "the others, also those without a place, have ended")
	k.keeper.commit(2, []uint16{0, 1})
	n, err := k.Peek(0, all[1:2])
	require.NoError(t, err)
	require.Zero(t, n)

	now = now.Add(keptTimeout + keptSweep)
	got = k.reserved(5, all[4:6])
	require.Equal(t, []uint8{ioctl.GrantNew, ioctl.GrantNew}, []uint8{got[0].Status, got[1].Status})
	require.Empty(t, k.keeper.pins)
	require.ErrorIs(t, k.Release(1), ErrNotFound)
}

// A pool that is opened twice in a session has one memory for what is declined, and one that cannot be opened has none.
func TestPoolKeepsOnce(t *testing.T) {
	c, f, waited := newControl(1 << 16)
	f.declined = true
	d, err := drive.NewMemory("kept", KeepLeast)
	require.NoError(t, err)
	defer d.Close()
	paces, err := gio.NewScheduler(gio.SchedulerConfig{})
	require.NoError(t, err)
	s := &Session{kept: &keptMemory{drive: d}, paces: paces, stop: make(chan struct{}),
		attach: &ioctl.Attachment{Reply: ioctl.AttachReply{CommandBytes: 1 << 20}}}
	s.verbs, s.deadline, s.arena, s.mapWord, s.wait = f, c.deadline, f.arena, c.mapWord, c.wait
	runs := []stripe.Run{{Kind: stripe.RunKV, Bytes: 9000}}
	g := stripe.Geometry{Objects: []stripe.Object{{Runs: runs}}}
	spec := PoolSpec{Name: "pool", Identity: []byte("{}"), Geometry: g}

	f.rowsAnswer = func(*ioctl.Rows) {} // rows of no bytes
	_, err = s.OpenPool(spec)
	require.ErrorIs(t, err, ErrInvalid)
	require.Empty(t, s.keepers)
	f.rowsAnswer, s.attach.Reply.CommandBytes = nil, 4096
	_, err = s.OpenPool(spec)
	require.ErrorContains(t, err, "make objects smaller")
	require.Empty(t, s.keepers)
	require.Zero(t, s.kept.used)

	s.attach.Reply.CommandBytes = 1 << 20
	a, err := s.OpenPool(spec)
	require.NoError(t, err)
	slots := a.KeepStats().Slots
	require.Positive(t, slots)
	b, err := s.OpenPool(spec)
	require.NoError(t, err)
	require.Equal(t, slots, b.KeepStats().Slots)
	first := &keeping{a, t, f, waited}
	grants := first.reserved(1, keys(1))
	require.NoError(t, a.CommitRanks(1, 0))
	found, err := b.Peek(0, keys(1))
	require.NoError(t, err)
	require.Equal(t, 1, found)
	require.True(t, b.keeper.owns(grants[0].Slot))
	second := (&keeping{b, t, f, waited}).reserved(2, keys(2)[1:])
	require.NotEqual(t, grants[0].Slot, second[0].Slot)

	// A later failure leaves what there was.
	f.rowsAnswer = func(*ioctl.Rows) {}
	_, err = s.OpenPool(spec)
	require.ErrorIs(t, err, ErrInvalid)
	require.Len(t, s.keepers, 1)
	close(s.stop)
	s.endKeepers()
	f.rowsAnswer = nil
	_, err = s.OpenPool(spec)
	require.ErrorIs(t, err, ErrGone)
}

// A pool whose drives come to need the memory's numbers goes on without it, and what was to be written to the memory is
// not written to them.
func TestKeptNumbersRunOut(t *testing.T) {
	k := newKeeping(t, 8)
	all := keys(5)
	k.stored(1, all[:2])
	pinned := k.pinned(1, all[:2])
	writing := k.reserved(2, all[2:3])[0]
	require.EqualValues(t, ioctl.GrantNew, writing.Status)
	drive, _, _, ok := k.Map().Locate(writing.Slot, 0)
	require.True(t, ok)
	require.EqualValues(t, keptDrive, drive)

	k.mount.rows = append(k.mount.rows, gio.MapRow{Number: keptRow, Drives: []uint16{0, 1}, Units: []uint64{9, 9}})
	k.mount.generation, k.mount.word = k.mount.generation+1, k.mount.word+1
	_, _, _, ok = k.Map().Locate(writing.Slot, 0)
	require.False(t, ok, "nobody writes to the drives what was for the memory")
	require.Equal(t, k.mount.generation, k.mount.acked)
	perRow := k.Layout().SlotsPerRow(fakeEntry)
	_, _, _, ok = k.Map().Locate(12*perRow, 0)
	require.True(t, ok, "all other rows are there")
	n, err := k.Peek(0, all[:2])
	require.NoError(t, err)
	require.Zero(t, n)
	require.Empty(t, k.pinned(1, all[:2]))
	require.NoError(t, k.Release(1))
	require.Empty(t, k.pinned(2, all[:2]))
	require.EqualValues(t, ioctl.GrantDeclined, k.reserved(3, all[3:4])[0].Status)
	require.False(t, k.keeper.owns(pinned[0].Slot))
	require.Zero(t, k.KeepStats().Slots)

	require.NoError(t, k.Abort(2))
	k.reserved(4, all[4:5])
	drive, _, _, ok = k.Map().Locate(keptRow*perRow, 0)
	require.True(t, ok, "the drives' row is there once nobody can write to the memory")
	require.Less(t, drive, uint16(2))
}

// noRing registers nothing, and has seen what it was to register.
type noRing struct {
	gio.Executor
	seen []byte
}

func (r *noRing) Register(b []byte) (*gio.Memory, error) {
	r.seen = b
	return nil, ErrInvalid
}

// Memory for copies that cannot be registered is given back at once.
func TestKeptStagingIsGivenBack(t *testing.T) {
	k, ring := newKeeping(t, 2), &noRing{}
	k.keeper.ring = ring
	c := &keptCopier{keeper: k.keeper, most: 2}
	require.ErrorIs(t, c.prepare(), ErrInvalid)
	require.NotEmpty(t, ring.seen)
	require.ErrorIs(t, unix.Munmap(ring.seen), unix.EINVAL, "it is mapped no more")
	require.NoError(t, k.keeper.close(), "it is not given back twice")
}

// A copy that fails is counted and leaves nothing behind; what is declined once more is committed like any reservation.
func TestKeptCopyFails(t *testing.T) {
	k := newKeeping(t, 2)
	k.keeper.ring = &noRing{}
	c := &keptCopier{keeper: k.keeper, most: 2}
	all := keys(2)
	k.stored(1, all)
	k.pinned(1, all)
	k.mount.declined = false
	c.copy(k.keeper.next(2))
	s := k.KeepStats()
	require.EqualValues(t, 2, s.Failed)
	require.EqualValues(t, 2, s.Blocks)
	require.Zero(t, s.Written)
	require.Len(t, k.mount.aborts, 1)
	require.Contains(t, k.mount.reserved, uint64(1))
	require.Len(t, k.mount.reserved, 1, "only what was stored")

	require.NoError(t, k.Release(1))
	require.Len(t, k.pinned(2, all), 2, "they are tried again")
	k.mount.declined, *k.waited = true, nil
	c.copy(k.keeper.next(2))
	s = k.KeepStats()
	require.EqualValues(t, 2, s.Refused)
	require.EqualValues(t, 2, s.Failed)
	require.Len(t, *k.waited, 2, "for both ranks")
	require.Len(t, k.mount.aborts, 1)

	require.NoError(t, k.Release(2))
	k.pinned(3, all)
	k.mount.room = 1
	c.copy(k.keeper.next(2))
	s = k.KeepStats()
	require.EqualValues(t, 3, s.Refused)
	require.EqualValues(t, 3, s.Failed, "for one there was no room")
	require.EqualValues(t, 2, s.Blocks)

	k.keeper.mu.Lock()
	k.keeper.spoiled(k.keeper.find(0, &all[0]))
	k.keeper.mu.Unlock()
	page := ioctl.EngineCounters{KeptFailed: 10}
	(&Session{keepers: []*keeper{k.keeper, k.keeper}}).countKept(&page)
	require.Equal(t, ioctl.EngineCounters{DeclinedBlocks: 4, KeptBlocks: 4, KeptHits: 12, SparedBytes: 4 * s.SlotBytes,
		KeptFailed: 16, KeptBad: 2}, page, "of all pools")
}

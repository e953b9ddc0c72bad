package extentmap_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
)

// batching is a drive that takes many ranges a command.
type batching struct {
	drive.Drive
	commands, ranges *atomic.Int64
}

func (batching) DiscardMost() int { return 256 }

func (b batching) DiscardRanges(list []drive.Range) (int, error) {
	b.commands.Add(1)
	b.ranges.Add(int64(len(list)))
	for _, r := range list {
		if err := b.Discard(r.Off, r.N); err != nil {
			return 1, err
		}
	}
	return 1, nil
}

// discardWorld is a pool whose slots are all in use, on drives that are told what is freed.
func discardWorld(t *testing.T, o extentmap.Options, wrap func(d drive.Drive) drive.Drive) (
	*maptest.Set, *extentmap.Volume, *extentmap.Pool) {
	set := maptest.NewSet(16*mib, 16*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	o.Discard = new(true)
	drives := set.Drives()
	for i := range drives {
		drives[i] = wrap(drives[i])
	}
	v := open(t, drives, o)
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	for i := range p.Slots() {
		slot, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
		put(t, p, v, slot, uint64(i))
	}
	return set, v, p
}

// freeSlots frees slots in transactions of one each.
func freeSlots(t *testing.T, v *extentmap.Volume, p *extentmap.Pool, slots ...uint32) {
	t.Helper()
	for _, s := range slots {
		tx := v.Begin()
		tx.Free(p, s)
		ticket, err := tx.Submit(nil)
		require.NoError(t, err)
		require.NoError(t, ticket.Wait())
	}
}

func awaitFree(t *testing.T, p *extentmap.Pool, n uint32) {
	t.Helper()
	require.Eventually(t, func() bool { free, _, _ := p.Counts(); return free == n }, 10*time.Second, time.Millisecond)
}

// TestDiscardsGather: slots that are freed one after the other go in few commands, neighbours as one range, and each
// byte of theirs once.
func TestDiscardsGather(t *testing.T) {
	var commands, ranges atomic.Int64
	_, v, p := discardWorld(t, extentmap.Options{},
		func(d drive.Drive) drive.Drive { return batching{d, &commands, &ranges} })
	n := p.Slots()
	var slots []uint32
	for s := range n {
		if s%16 < 8 { // runs of neighbours, with gaps
			slots = append(slots, s)
		}
	}
	freeSlots(t, v, p, slots...)
	awaitFree(t, p, uint32(len(slots)))
	var told extentmap.DiscardCounts
	for _, d := range v.Info().Drives {
		require.True(t, d.Discard)
		told.Commands, told.Ranges = told.Commands+d.Discards.Commands, told.Ranges+d.Discards.Ranges
		told.Bytes, told.Failed = told.Bytes+d.Discards.Bytes, told.Failed+d.Discards.Failed
	}
	require.EqualValues(t, commands.Load(), told.Commands)
	require.EqualValues(t, ranges.Load(), told.Ranges)
	units := uint64(0)
	for o := range p.Layout().Objects() {
		units += uint64(p.Layout().ObjectUnits(uint16(o)))
	}
	require.Equal(t, uint64(len(slots))*units*4096, told.Bytes)
	require.Zero(t, told.Failed)
	require.Less(t, told.Commands, uint64(len(slots)), "many slots a command")
	require.Less(t, told.Ranges, uint64(len(slots))*uint64(p.Layout().Objects()), "neighbours are one range")
	info := v.Info()
	require.Zero(t, info.DiscardsWaiting)
	require.Zero(t, info.DiscardsSpared)
}

// TestDiscardsAreSpared: slots that are needed at once are had without a discard, and no drive is told about them
// later.
func TestDiscardsAreSpared(t *testing.T) {
	set, v, p := discardWorld(t, extentmap.Options{}, func(d drive.Drive) drive.Drive { return d })
	told := atomic.Int64{}
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Discard {
			told.Add(1)
		}
		return nil
	})
	freeSlots(t, v, p, 3)
	for !p.Hurry() { // unless the time to gather was over
		free, _, _ := p.Counts()
		if free == 1 {
			t.Skip("the machine is too slow for the race that this is about")
		}
	}
	slot, ok := p.Alloc(extentmap.NoSlot)
	require.True(t, ok)
	require.EqualValues(t, 3, slot)
	require.False(t, p.Hurry(), "nothing waits")
	require.NoError(t, v.Close())
	require.Zero(t, told.Load())
}

// sparseSlots are n slots that are no neighbours, from first on.
func sparseSlots(first, n uint32) (slots []uint32) {
	for i := range n {
		slots = append(slots, first+2*i)
	}
	return slots
}

// TestDiscardsAreBoundedOneByOne: a drive that takes one range a command has its time for each of them.
func TestDiscardsAreBoundedOneByOne(t *testing.T) {
	const each, slots = 50 * time.Millisecond, 10
	var told atomic.Int64
	set, v, p := discardWorld(t, extentmap.Options{DriveTimeout: each * slots},
		func(d drive.Drive) drive.Drive { return d })
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Discard {
			told.Add(1)
			time.Sleep(each)
		}
		return nil
	})
	freeSlots(t, v, p, sparseSlots(0, slots)...)
	awaitFree(t, p, slots)
	require.Greater(t, told.Load(), int64(2*slots), "in all they take longer than a command may")
	for _, d := range v.Info().Drives {
		require.Zero(t, d.Timeouts)
		require.Zero(t, d.WriteErrors)
	}
}

// TestDiscardsEndWhereSlotsAreNeeded: where all freed slots are being discarded, who needs some waits for the command
// that is under way and not for the others.
func TestDiscardsEndWhereSlotsAreNeeded(t *testing.T) {
	var told atomic.Int64
	set, v, p := discardWorld(t, extentmap.Options{}, func(d drive.Drive) drive.Drive { return d })
	begun, gate := make(chan struct{}, 1), make(chan struct{})
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Discard && told.Add(1) == 1 {
			begun <- struct{}{}
			<-gate
		}
		return nil
	})
	slots := sparseSlots(1, 12)
	freeSlots(t, v, p, slots...)
	<-begun
	for p.Hurry() { // those that came after it
	}
	free, freeing, _ := p.Counts()
	require.Positive(t, freeing)
	require.EqualValues(t, len(slots), free+freeing)
	close(gate)
	awaitFree(t, p, uint32(len(slots)))
	require.EqualValues(t, 1, told.Load())
	require.EqualValues(t, len(slots), v.Info().DiscardsSpared)
}

// TestLateDiscards: a drive that does not answer keeps the slots it was told about: nobody gets them while it might
// still discard.
func TestLateDiscards(t *testing.T) {
	set, v, p := discardWorld(t, extentmap.Options{DriveTimeout: 100 * time.Millisecond},
		func(d drive.Drive) drive.Drive { return d })
	gate := make(chan struct{})
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Discard {
			<-gate
		}
		return nil
	})
	freeSlots(t, v, p, 3)
	require.Eventually(t, func() bool {
		info := v.Info()
		return info.Drives[0].Timeouts+info.Drives[1].Timeouts > 0
	}, 10*time.Second, time.Millisecond)
	require.False(t, p.Hurry(), "it is not one that waits")
	free, freeing, _ := p.Counts()
	require.Equal(t, [2]uint32{0, 1}, [2]uint32{free, freeing})
	require.EqualValues(t, 1, v.Info().DiscardsWaiting)
	close(gate)
	require.Eventually(t, func() bool { return v.Info().DiscardsWaiting == 0 }, 10*time.Second, time.Millisecond)
}

package extentmap_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

var errBroken = errors.New("broken")

// failing makes operations of the given drives fail.
func failing(drives ...int) func(maptest.Op) error {
	return func(op maptest.Op) error {
		for _, d := range drives {
			if op.Drive == d {
				return errBroken
			}
		}
		return nil
	}
}

func pick(drives []drive.Drive, which ...int) (out []drive.Drive) {
	for _, i := range which {
		out = append(out, drives[i])
	}
	return out
}

// filled makes a volume of drives with one pool and a row of files.
func filled(t *testing.T, o extentmap.FormatOptions, sizes ...int64) (
	*maptest.Set, *extentmap.Volume, *extentmap.Pool) {
	t.Helper()
	set := maptest.NewSet(sizes...)
	format(t, set.Drives(), o)
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	for n := range uint64(5) {
		slot, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
		put(t, p, v, slot, n)
	}
	return set, v, p
}

// giveUp drops all rows on a drive.
func giveUp(t *testing.T, p *extentmap.Pool, index uint16) {
	t.Helper()
	for _, n := range p.RowsOn(index) {
		ticket, err := p.GiveUpRow(n)
		require.NoError(t, err)
		require.NoError(t, ticket.Wait())
	}
}

// A mirror is lost in the middle of a mount: what is acknowledged afterwards is durable without it, and a mount of the
// lost one alone does not believe that it is the volume.
func TestLostMirror(t *testing.T) {
	set, v, p := filled(t, extentmap.FormatOptions{Width: 1}, 8*mib, 8*mib)
	before := readLabel(t, set, 0)
	set.FailWith(failing(0))
	slot, _ := p.Alloc(extentmap.NoSlot)
	put(t, p, v, slot, 100)
	set.FailWith(nil)
	after := readLabel(t, set, 1)
	require.Equal(t, before.Epoch+1, after.Epoch)
	require.Equal(t, before.Nonce, after.Predecessor)
	require.NotEqual(t, before.Nonce, after.Nonce)
	require.Equal(t, uint64(2), after.Holders)
	require.Equal(t, uint64(2), after.Metadata)
	info := v.Info()
	require.True(t, info.Degraded)
	require.Equal(t, extentmap.DriveLost, info.Drives[0].State)
	require.Contains(t, info.Drives[0].Cause, "broken")
	require.NotZero(t, info.Drives[0].WriteErrors)
	want := state(v)
	v.Abandon()

	_, err := extentmap.OpenDrives(pick(set.Drives(), 1), extentmap.Options{})
	require.ErrorIs(t, err, extentmap.ErrMissing)
	require.ErrorContains(t, err, "-o degraded")
	alone := maptest.FromImages(set.Snapshot())
	v = open(t, pick(alone.Drives(), 1), extentmap.Options{Degraded: true})
	require.Equal(t, want, state(v))
	v.Abandon()
	// The other half alone is an older state. The two have gone on apart then, and do not come together any more.
	v = open(t, pick(alone.Drives(), 0), extentmap.Options{Degraded: true})
	require.NotEqual(t, want, state(v))
	v.Abandon()
	_, err = extentmap.OpenDrives(alone.Drives(), extentmap.Options{Degraded: true})
	require.ErrorIs(t, err, extentmap.ErrDiverged)
	v = open(t, pick(alone.Drives(), 1), extentmap.Options{Degraded: true})
	p = v.Pools()[0]
	onBoth := state(v)
	require.ErrorIs(t, v.Forget(0), extentmap.ErrAgain, "rows are on it")
	giveUp(t, p, 0)
	require.NoError(t, v.Forget(0))
	require.NotEqual(t, onBoth, state(v))
	left := state(v)
	require.NoError(t, v.Close())
	v = open(t, alone.Drives(), extentmap.Options{}) // passes over what was forgotten
	require.Equal(t, left, state(v))
	require.Len(t, v.Info().Drives, 1)
	v.Abandon()

	// Together, the lost one is behind and comes in again.
	v = open(t, set.Drives(), extentmap.Options{})
	require.Equal(t, want, state(v))
	require.False(t, v.Info().Degraded)
	require.NoError(t, v.Close())
	for i := range 2 {
		l := readLabel(t, set, i)
		require.Equal(t, uint64(3), l.Holders)
		require.Equal(t, uint64(3), l.Metadata)
	}
	for i := range 2 {
		v = open(t, pick(maptest.FromImages(set.Snapshot()).Drives(), i), extentmap.Options{Degraded: true})
		require.Equal(t, want, state(v), "each half has it all again")
		v.Abandon()
	}
}

// A drive without metadata is lost: its rows are out of use and out of the counts, and not one record changes. New rows
// use the rest. When it comes back in the same mount, its files are there.
func TestLostRows(t *testing.T) {
	set, v, p := filled(t, extentmap.FormatOptions{Width: 2}, 8*mib, 8*mib, 8*mib, 8*mib)
	addRow(t, p)
	rows := p.Rows()
	free, _, used := p.Counts()
	require.NoError(t, v.LoseDrive(rows[0].Drives[0], errBroken))
	require.False(t, p.Available(0))
	require.True(t, p.Rows()[0].Away)
	require.Equal(t, uint64(1), v.Info().RowsUnavailable)
	freeNow, _, usedNow := p.Counts()
	require.Zero(t, usedNow)
	require.Equal(t, free+used-p.SlotsPerRow(), freeNow)
	require.Len(t, committed(p), 5)
	require.Nil(t, v.Drive(rows[0].Drives[0]))
	_, err := p.DropRow(rows[0].Number)
	require.ErrorIs(t, err, extentmap.ErrAgain)
	for range p.SlotsPerRow() + 1 {
		slot, ok := p.Alloc(extentmap.NoSlot)
		if !ok {
			addRow(t, p)
			slot, ok = p.Alloc(0)
		}
		require.True(t, ok)
		require.NotContains(t, p.Rows()[slot/p.SlotsPerRow()].Drives, rows[0].Drives[0])
		put(t, p, v, slot, 1000+uint64(slot))
	}
	want := state(v)
	require.NoError(t, v.Checkpoint())
	lost := int(rows[0].Drives[0])
	index, err := v.AddDrive(set.Drives()[lost], extentmap.AddOptions{})
	require.NoError(t, err)
	require.Equal(t, rows[0].Drives[0], index)
	require.True(t, p.Available(0))
	require.False(t, v.Info().Degraded)
	require.Equal(t, want, state(v))
	_, _, usedNow = p.Counts()
	require.Equal(t, used+p.SlotsPerRow()+1, usedNow)
	v.Abandon()
	v = open(t, set.Drives(), extentmap.Options{})
	require.Equal(t, want, state(v))
	checkSpace(t, v)
}

// A metadata drive is lost and a third one takes its place at once.
func TestMirrorMoves(t *testing.T) {
	set, v, p := filled(t, extentmap.FormatOptions{Width: 1}, 8*mib, 8*mib, 8*mib)
	set.FailWith(failing(0))
	slot, _ := p.Alloc(extentmap.NoSlot)
	put(t, p, v, slot, 100)
	require.Eventually(t, func() bool {
		info := v.Info()
		return info.Drives[1].Metadata && info.Drives[2].Metadata
	}, 10*time.Second, time.Millisecond)
	set.FailWith(failing(0, 1))
	tx := v.Begin()
	tx.Put(p, slot, record(v, 101), 0)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	want := state(v)
	v.Abandon()
	set.FailWith(nil)
	_, err = extentmap.OpenDrives(pick(set.Drives(), 2), extentmap.Options{Degraded: true})
	require.ErrorIs(t, err, extentmap.ErrMissing)
	require.ErrorContains(t, err, "half")
	_, err = extentmap.OpenDrives(pick(set.Drives(), 0, 1), extentmap.Options{Degraded: true, ReadOnly: true})
	require.NoError(t, err, "nobody there knows better")
	v = open(t, pick(set.Drives(), 0, 2), extentmap.Options{Degraded: true})
	require.Equal(t, want, state(v))
	v.Abandon()
	v = open(t, set.Drives(), extentmap.Options{})
	require.Equal(t, want, state(v))
}

// A drive that does not answer is given up, and the commit goes on with the others.
func TestStuckDrive(t *testing.T) {
	set, v, p := filled(t, extentmap.FormatOptions{Width: 1}, 8*mib, 8*mib)
	v.Abandon()
	drives := set.Drives()
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	hang := &stuckDrive{Drive: drives[1], release: release}
	v = open(t, []drive.Drive{drives[0], hang}, extentmap.Options{DriveTimeout: 200 * time.Millisecond})
	p = v.Pools()[0]
	hang.on.Store(true)
	slot, _ := p.Alloc(extentmap.NoSlot)
	put(t, p, v, slot, 100)
	info := v.Info()
	require.Equal(t, extentmap.DriveLost, info.Drives[1].State)
	require.NotZero(t, info.Drives[1].Timeouts)
	put(t, p, v, slot, 101)
	_, err := v.AddDrive(drives[1], extentmap.AddOptions{})
	require.ErrorIs(t, err, extentmap.ErrAgain, "its write may still arrive")
	require.NoError(t, v.Close())
}

// Drives come and go while the volume is in use.
func TestAddAndForget(t *testing.T) {
	set, v, p := filled(t, extentmap.FormatOptions{Width: 1}, 8*mib, 8*mib)
	more := maptest.NewSet(8*mib, 8*mib, mib)
	_, err := v.AddDrive(more.Drives()[2], extentmap.AddOptions{})
	require.ErrorIs(t, err, extentmap.ErrTooSmall)
	_, err = v.AddDrive(set.Drives()[0], extentmap.AddOptions{})
	require.ErrorIs(t, err, extentmap.ErrDuplicate)
	free := v.Info().FreeBytes
	index, err := v.AddDrive(more.Drives()[0], extentmap.AddOptions{Hold: true})
	require.NoError(t, err)
	require.Equal(t, uint16(2), index)
	require.True(t, v.Info().Drives[2].Held)
	for range 3 {
		addRow(t, p)
	}
	for _, r := range p.Rows() {
		require.NotContains(t, r.Drives, index, "held")
	}
	v.Release(index)
	require.Greater(t, v.Info().FreeBytes, free)
	addRow(t, p)
	rows := p.Rows()
	require.Equal(t, []uint16{index}, rows[len(rows)-1].Drives)
	want := committed(p)

	// Forgetting one that is in use: its rows are given up, and the metadata moves.
	require.ErrorIs(t, v.Forget(0), extentmap.ErrInvalid)
	require.NoError(t, v.Leave(0))
	require.ErrorIs(t, v.Forget(0), extentmap.ErrAgain)
	for _, n := range p.RowsOn(0) {
		for slot := range want {
			if slot/p.SlotsPerRow() == n {
				delete(want, slot)
			}
		}
		ticket, err := p.GiveUpRow(n)
		require.NoError(t, err)
		tx := v.Begin()
		tx.Free(p, n*p.SlotsPerRow())
		_, err = tx.Submit(nil)
		require.ErrorIs(t, err, extentmap.ErrMissing, "condemned")
		require.NoError(t, ticket.Wait())
	}
	require.NoError(t, v.Forget(0))
	require.Equal(t, want, committed(p))
	info := v.Info()
	require.Len(t, info.Drives, 2)
	require.False(t, info.Degraded)
	require.True(t, info.Drives[1].Metadata)
	b := make([]byte, ondisk.BlockBytes)
	require.NoError(t, set.Drives()[0].ReadAt(b, 0))
	_, err = ondisk.DecodeLabel(b, 0)
	require.ErrorIs(t, err, ondisk.ErrMagic, "wiped")
	index, err = v.AddDrive(more.Drives()[1], extentmap.AddOptions{})
	require.NoError(t, err)
	require.Equal(t, uint16(3), index, "numbers are not used again")
	text := state(v)
	v.Abandon()
	v = open(t, append(pick(set.Drives(), 1), pick(more.Drives(), 0, 1)...), extentmap.Options{})
	require.Equal(t, text, state(v))
	checkSpace(t, v)
	require.NoError(t, v.LoseDrive(1, errBroken))
	require.Eventually(t, func() bool { return v.Info().Drives[2].Metadata }, 10*time.Second, time.Millisecond)
	require.NoError(t, v.LoseDrive(2, errBroken))
	require.Error(t, v.Leave(3), "the last one")
}

// Half of the drives with both metadata copies on the other half are refused, whatever flag is given.
func TestDegradedNeedsMetadata(t *testing.T) {
	set, v, _ := filled(t, extentmap.FormatOptions{Width: 2}, 8*mib, 8*mib, 8*mib, 8*mib)
	want := state(v)
	require.NoError(t, v.Close())
	for _, c := range []struct {
		drives []int
		err    string
	}{{[]int{2, 3}, "metadata"}, {[]int{0}, "half"}, {[]int{0, 3}, ""}, {[]int{1, 2, 3}, ""}} {
		t.Run(fmt.Sprint(c.drives), func(t *testing.T) {
			some := pick(maptest.FromImages(set.Snapshot()).Drives(), c.drives...)
			for _, ro := range []bool{true, false} {
				v, err := extentmap.OpenDrives(some, extentmap.Options{Degraded: true, ReadOnly: ro})
				if c.err != "" {
					require.ErrorIs(t, err, extentmap.ErrMissing)
					require.ErrorContains(t, err, c.err)
					continue
				}
				require.NoError(t, err)
				require.True(t, v.Info().Degraded)
				if ro || len(c.drives) == 3 {
					require.Equal(t, want, state(v), "every row has a table here")
				}
				v.Abandon()
			}
		})
	}
}

// A drive is lost at any operation of an unmount, the last ones included: the labels call the volume clean under an
// epoch that its superblock names, so all drives mount, and those that are left alone.
func TestLossAtUnmount(t *testing.T) {
	for _, dirty := range []bool{false, true} {
		for lost := range 3 {
			for n, reached := 0, true; reached; n++ {
				set, v, p := filled(t, extentmap.FormatOptions{Width: 1}, 8*mib, 8*mib, 8*mib)
				require.NoError(t, v.Checkpoint())
				if dirty {
					slot, _ := p.Alloc(extentmap.NoSlot)
					put(t, p, v, slot, 100)
				}
				want := state(v)
				reached = closeFailing(t, set, v, lost, n)
				message := fmt.Sprintf("drive %d fails at operation %d of the unmount", lost, n)

				l := readLabel(t, set, (lost+1)%3)
				super := readSuperblock(t, set, l)
				require.True(t, l.Clean, message)
				require.Equal(t, [2]uint64{super.Epoch, super.Epoch}, [2]uint64{l.Epoch, l.Base}, message)
				rest := maptest.FromImages(set.Snapshot()).Drives()
				v = open(t, pick(rest, (lost+1)%3, (lost+2)%3), extentmap.Options{Degraded: true})
				require.Equal(t, want, state(v), message)
				v.Abandon()
				v = open(t, set.Drives(), extentmap.Options{})
				require.Equal(t, want, state(v), message)
				v.Abandon()
			}
		}
	}
}

// closeFailing unmounts while a drive fails from its n-th operation on, and says whether it had so many.
func closeFailing(t *testing.T, set *maptest.Set, v *extentmap.Volume, lost, n int) (reached bool) {
	t.Helper()
	set.FailWith(func(op maptest.Op) error {
		if op.Drive != lost {
			return nil
		}
		if n--; n >= 0 {
			return nil
		}
		reached = true
		return errBroken
	})
	require.NoError(t, v.Close())
	set.FailWith(nil)
	return reached
}

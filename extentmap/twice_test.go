package extentmap_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// place is a block of a drive.
type place struct {
	drive int
	unit  int64
}

// secondCopies are where a log writes the second copies of record-table blocks: each is written after its first.
func secondCopies(log []maptest.Op) (out []place) {
	seen := map[[12]byte]place{}
	for _, op := range log {
		for off := 0; op.Kind == maptest.Write && off+ondisk.BlockBytes <= len(op.Data); off += ondisk.BlockBytes {
			b := op.Data[off:]
			if ondisk.Kind(binary.LittleEndian.Uint32(b[4:])) != ondisk.KindTable {
				continue
			}
			id, at := [12]byte(b[32:44]), place{op.Drive, (op.Off + int64(off)) / ondisk.BlockBytes}
			if first, twice := seen[id]; !twice {
				seen[id] = at
			} else if first != at {
				out = append(out, at)
			}
		}
	}
	return out
}

// TestSecondCrash: after a crash that left second copies torn, another crash during the
// mount tears first copies. One of the two must always be whole.
func TestSecondCrash(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	put := func(n uint64) {
		slot, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
		tx := v.Begin()
		tx.Put(p, slot, record(v, n), 0)
		ticket, err := tx.Submit(nil)
		require.NoError(t, err)
		require.NoError(t, ticket.Wait())
	}
	for n := range uint64(20) {
		put(n)
	}
	set.Record()
	require.NoError(t, v.Checkpoint())
	seconds := secondCopies(set.Log())
	require.NotEmpty(t, seconds)
	put(20)
	want := state(v)
	v.Abandon()
	torn := set.Snapshot()
	for _, at := range seconds {
		torn[at.drive].Add(at.unit*ondisk.BlockBytes+700, 1)
	}
	again := maptest.FromImages(torn)
	again.Record()
	v = open(t, again.Drives(), extentmap.Options{})
	require.Equal(t, want, state(v))
	v.Abandon()
	for seed := range uint64(30) {
		cutter := maptest.NewCutter(torn, again.Log(), seed)
		for {
			op, more := cutter.Step()
			if !more {
				break
			}
			cut := open(t, maptest.FromImages(cutter.Cut()).Drives(), extentmap.Options{})
			require.Equal(t, want, state(cut), "kind %d at unit %d of drive %d", op.Kind, op.Off/ondisk.BlockBytes, op.Drive)
			cut.Abandon()
		}
	}
}

// TestNewestSuperblockLost: the first checkpoint of a mount is damaged on all drives. What the mount acknowledged is in
// the journal under a nonce that only that superblock names: the one before must not be taken for the newest.
func TestNewestSuperblockLost(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	require.NoError(t, v.Close())
	v = open(t, set.Drives(), extentmap.Options{})
	p = v.Pools()[0]
	slot, ok := p.Alloc(extentmap.NoSlot)
	require.True(t, ok)
	tx := v.Begin()
	tx.Put(p, slot, record(v, 1), 0)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	v.Abandon()
	images := set.Snapshot()
	newest, at := uint64(0), int64(0)
	for _, unit := range []int64{1, 2} {
		b := make([]byte, ondisk.BlockBytes)
		images[0].ReadAt(b, unit*ondisk.BlockBytes)
		if n := binary.LittleEndian.Uint64(b[24:]); n > newest {
			newest, at = n, unit
		}
	}
	for _, image := range images {
		image.Add(at*ondisk.BlockBytes+100, 1)
	}
	_, err = extentmap.OpenDrives(maptest.FromImages(images).Drives(), extentmap.Options{})
	require.ErrorIs(t, err, extentmap.ErrCorrupt)
	require.ErrorContains(t, err, "run tuttifs fsck")
}

// TestUnreadableSectors: one sector of each journal that cannot be read, and one of each catalog, not the same, cost
// nothing.
func TestUnreadableSectors(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	want := state(v)
	v.Abandon()
	drives := set.Drives()
	for i := range drives {
		drives[i] = &unreadable{Drive: drives[i], unit: int64(3 + 50 + 70*i)}
	}
	require.Equal(t, want, state(open(t, drives, extentmap.Options{})))
}

// unreadable is a drive with a block that cannot be read.
type unreadable struct {
	drive.Drive
	unit int64
}

func (u *unreadable) ReadAt(p []byte, off int64) error {
	if off <= u.unit*ondisk.BlockBytes && u.unit*ondisk.BlockBytes < off+int64(len(p)) {
		return errors.New("medium error")
	}
	return u.Drive.ReadAt(p, off)
}

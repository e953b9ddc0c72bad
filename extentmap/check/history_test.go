package check_test

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// later is what images hold after one more mount, in which files come and go.
func later(t testing.TB, images [][]byte, start uint64) [][]byte {
	b := &builder{t: t, set: maptest.FromImages(images), r: rand.New(rand.NewPCG(start, 1))}
	b.mount()
	p := b.v.Pools()[0]
	var slots []uint32
	p.Committed(func(slot uint32) { slots = append(slots, slot) })
	b.free(p, slots[:3]...)
	b.chain(p, start, 5)
	require.NoError(t, b.v.Close())
	return b.set.Images()
}

func mix(images [][]byte, from [][]byte, drives ...int) [][]byte {
	out := cloneImages(images)
	for _, d := range drives {
		out[d] = append([]byte(nil), from[d]...)
	}
	return out
}

func dataOf(t testing.TB, images [][]byte) contents {
	return mounted(t, maptest.FromImages(images).Drives())
}

// relabel changes the label of an image, in both copies.
func relabel(t testing.TB, image []byte, change func(l *ondisk.Label)) {
	l := label(t, image)
	change(l)
	for _, unit := range []uint64{0, l.Units - 1} {
		l.Unit = unit
		l.Encode(unitOf(image, unit))
	}
}

// refused wants a repair to write nothing, and to say why.
func refused(t testing.TB, images [][]byte, o check.Options, obstacle string) {
	t.Helper()
	set := maptest.FromImages(images)
	result, list, err := run(t, set.Drives(), o)
	require.NoError(t, err)
	require.NotEmpty(t, list.of(check.Error))
	require.Contains(t, result.Obstacle, obstacle)
	require.Zero(t, result.Repaired)
	require.Equal(t, images, set.Images(), "nothing is written")
}

// A drive that missed a mount is taken in again: what was removed meanwhile stays removed, what was there before is
// there, and what was stored meanwhile is there but for what would lie on it.
func TestStaleDrivePutBack(t *testing.T) {
	before := usedImages(t)
	after := later(t, before, 5000)
	old, now := dataOf(t, before), dataOf(t, after)
	for drive := range before {
		images := mix(after, before, drive)
		refused(t, images, check.Options{Repair: onlySafe}, "has another history")
		result, list, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: yes})
		require.Contains(t, list.of(check.Error)[0].Message, "last mounted in epoch")
		requireSubset(t, now, is)
		require.Zero(t, is.damaged)
		for name := range old.files {
			if _, kept := now.files[name]; kept {
				require.Contains(t, is.files, name, "drive %d", drive)
			}
		}
		require.LessOrEqual(t, result.GivenUp, uint64(5))
	}
}

// All drives but one missed a mount: the metadata drives are older than that one, and nothing says what happened.
func TestOldMetadataDrives(t *testing.T) {
	before := usedImages(t)
	after := later(t, before, 5000)
	images := mix(before, after, 2)
	refused(t, images, check.Options{Repair: yes}, "has another history")
	_, _, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: yes, Trust: "mem1"})
	requireSubset(t, dataOf(t, before), is)
	require.GreaterOrEqual(t, len(is.files), 96-8, "what was stored over is lost")
}

// Drives that were mounted apart from each other contradict, and it takes a word to make them agree.
func TestHalvesMountedAlone(t *testing.T) {
	before := usedImages(t)
	one, other := later(t, before, 5000), later(t, before, 6000)
	twice := later(t, other, 7000)
	alone := func(images [][]byte, holders uint64) [][]byte {
		images = cloneImages(images)
		for i := range images {
			relabel(t, images[i], func(l *ondisk.Label) { l.Holders = holders })
		}
		return images
	}
	for name, halves := range map[string][2][][]byte{
		"once each":    {one, other},
		"one twice":    {alone(one, 0b001), alone(twice, 0b110)},
		"other twice":  {alone(twice, 0b001), alone(one, 0b110)},
		"while locked": {alone(one, 0b001), alone(other, 0b110)},
	} {
		t.Run(name, func(t *testing.T) {
			images := mix(halves[1], halves[0], 0)
			refused(t, images, check.Options{Repair: yes}, "has another history")
			_, list, err := run(t, maptest.FromImages(images).Drives(), check.Options{})
			require.NoError(t, err)
			require.Contains(t, list.of(check.Error)[0].String(), "halves have diverged")
			require.Contains(t, list.of(check.Error)[0].String(), "--trust")
			for i, trusted := range []string{"mem0", "mem2"} {
				result, _, is := repaired(t, maptest.FromImages(images),
					check.Options{Data: true, Repair: yes, Trust: trusted})
				requireSubset(t, dataOf(t, alone(halves[i], 0b111)), is)
				require.GreaterOrEqual(t, result.Files, uint64(96-3-10), "what both had is there")
			}
		})
	}
	_, _, err := run(t, maptest.FromImages(before).Drives(), check.Options{Trust: "mem9"})
	require.ErrorContains(t, err, "mem9, which is to be trusted")
}

// degraded mounts some drives of a volume alone, stores files, and unmounts.
func degraded(t testing.TB, images [][]byte, start uint64, drives ...int) [][]byte {
	var some [][]byte
	for _, d := range drives {
		some = append(some, images[d])
	}
	set := maptest.FromImages(some)
	v, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{Degraded: true})
	require.NoError(t, err)
	b := &builder{t: t, set: set, v: v, r: rand.New(rand.NewPCG(start, 1))}
	b.wait(v.SetTenant(extentmap.Tenant{ID: uint32(start), Name: "t", QuotaBytes: 1 << 30}))
	require.NoError(t, v.Close())
	out := cloneImages(images)
	for i, image := range set.Images() {
		out[drives[i]] = image
	}
	return out
}

// Each half mounted alone in turn, by the engine: both refuse to be one volume again until it is said which one counts.
func TestEachHalfMountedAlone(t *testing.T) {
	b := newVolume(t, 4*mib, 4*mib)
	p := b.pool("p", 1, 1)
	b.chain(p, 0, 6)
	require.NoError(t, b.v.Close())
	images := b.set.Images()
	original := dataOf(t, images)
	one := degraded(t, images, 7, 0)
	both := mix(one, degraded(t, images, 8, 1), 1)
	_, err := extentmap.OpenDrives(maptest.FromImages(both).Drives(), extentmap.Options{})
	require.ErrorIs(t, err, extentmap.ErrDiverged)
	refused(t, both, check.Options{Repair: yes}, "has another history")
	for i, trust := range []string{"mem0", "mem1"} {
		set := maptest.FromImages(both)
		_, _, is := repaired(t, set, check.Options{Data: true, Repair: yes, Trust: trust})
		require.Equal(t, original, is, "files were out of use in both halves, and are whole")
		v, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{ReadOnly: true})
		require.NoError(t, err)
		ids := map[uint32]bool{}
		for _, tenant := range v.Tenants() {
			ids[tenant.ID] = true
		}
		require.Equal(t, []bool{i == 0, i == 1}, []bool{ids[7], ids[8]}, "what the other half did is undone")
		v.Abandon()
	}
}

// A write of one copy of a record table that never reached the drive leaves an older block that is whole: the newer
// counts, whichever of the two it is.
func TestLostWrite(t *testing.T) {
	before := usedImages(t)
	after := later(t, before, 5000)
	now := dataOf(t, after)
	stale := 0
	for _, row := range parse(t, before).rows {
		for _, at := range row.Tables {
			images := cloneImages(after)
			old, current := unitOf(before[at.Drive()], at.Unit()), unitOf(images[at.Drive()], at.Unit())
			if string(old) == string(current) {
				continue
			}
			stale++
			copy(current, old)
			result, list, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: onlySafe})
			require.EqualValues(t, 1, result.Repaired)
			require.Contains(t, list.of(check.Error)[0].Message, "the copies hold different records")
			require.Equal(t, now, is)
		}
	}
	require.GreaterOrEqual(t, stale, 2)
}

// A volume that goes on without a drive is repaired without it, and takes it in when it is back.
func TestRepairOfDegraded(t *testing.T) {
	images := usedImages(t)
	original := dataOf(t, images)
	for missing := range images {
		var here []int
		for i := range images {
			if i != missing {
				here = append(here, i)
			}
		}
		now := degraded(t, images, 9, here...)
		rest := append(append([][]byte(nil), now[:missing]...), now[missing+1:]...)
		requireMountable(t, original, maptest.FromImages(rest).Drives())
		l := label(t, rest[0])
		flip(unitOf(rest[0], l.Units-1))
		set := maptest.FromImages(rest)
		result, list, err := run(t, set.Drives(), check.Options{Data: true, Repair: yes})
		require.NoError(t, err)
		require.Empty(t, result.Obstacle)
		require.Equal(t, result.Errors, result.RepairedErrors, "%v", list)
		_, list, err = run(t, set.Drives(), check.Options{Data: true})
		require.NoError(t, err)
		require.Empty(t, list.of(check.Error))
		whole := cloneImages(now)
		for i, image := range set.Images() {
			whole[here[i]] = image
		}
		_, _, is := repaired(t, maptest.FromImages(whole), check.Options{Data: true, Repair: onlySafe})
		require.Equal(t, original, is, "drive %d is back with its files", missing)
		require.Equal(t, original, dataOf(t, whole), "and a mount takes it in as well")
	}
}

// A repair that takes a drive in again may be cut off anywhere: until it is done the drive is known to be behind.
func TestTakingInIsCut(t *testing.T) {
	before := usedImages(t)
	after := later(t, before, 5000)
	for drive := range before {
		images := mix(after, before, drive)
		_, _, whole := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: yes})
		set := maptest.FromImages(images)
		set.Record()
		_, _, err := run(t, set.Drives(), check.Options{Data: true, Repair: yes})
		require.NoError(t, err)
		cutter := maptest.NewCutter(images, set.Log(), uint64(drive))
		for n := 0; ; n++ {
			if _, more := cutter.Step(); !more {
				break
			}
			if n%15 != 5*drive {
				continue
			}
			_, _, now := repaired(t, maptest.FromImages(cutter.Cut()), check.Options{Data: true, Repair: yes})
			require.Equal(t, whole, now, "drive %d, operation %d", drive, n)
		}
	}
}

func TestDriveOfAnotherSize(t *testing.T) {
	images := usedImages(t)
	original := dataOf(t, images)
	images[1] = append(images[1], make([]byte, mib)...)
	requireClean(t, maptest.FromImages(images).Drives(), check.Options{Data: true})
	flip(unitOf(images[1], 0)) // and its first label is bad: the second is not where it should be
	_, list, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: yes})
	require.Contains(t, list.of(check.Error)[0].Message, "it is drive 1")
	require.Equal(t, original, is)
}

// A drive without any label is the missing one only if something on it says so.
func TestForeignDriveIsNotAdopted(t *testing.T) {
	images := usedImages(t)
	for missing := range images {
		blank := cloneImages(images)
		clear(blank[missing])
		refused(t, blank, check.Options{Repair: yes}, "is missing")
	}
}

func TestMissingDriveIsNotLeftBehind(t *testing.T) {
	images := usedImages(t)
	flip(unitOf(images[0], 0))
	refused(t, images[:2], check.Options{Repair: yes}, "drive 2 is missing")
}

// bad is a drive with units that cannot be read until they are written.
type bad struct {
	drive.Drive
	units map[int64]bool
}

func (b bad) ReadAt(p []byte, off int64) error {
	for at := off / block; at*block < off+int64(len(p)); at++ {
		if b.units[at] {
			return context.DeadlineExceeded
		}
	}
	return b.Drive.ReadAt(p, off)
}

func (b bad) WriteAt(p []byte, off int64) error {
	for at := off / block; at*block < off+int64(len(p)); at++ {
		delete(b.units, at)
	}
	return b.Drive.WriteAt(p, off)
}

func (b bad) WriteZeroes(off, n int64) error { return b.WriteAt(make([]byte, n), off) }

// Sectors that cannot be read are written, so that the drive can put others in their place.
func TestUnreadableSectors(t *testing.T) {
	images := usedImages(t)
	original := dataOf(t, images)
	l, s := label(t, images[1]), newest(t, images[1])
	row := parse(t, images).rows[0]
	set := maptest.FromImages(images)
	drives := set.Drives()
	units := map[int64]bool{0: true, int64(s.Unit): true, int64(l.Region.JournalUnit + 9): true,
		int64(l.Region.CatalogUnit + uint64(s.CatalogArea)*l.Region.CatalogBlocks): true}
	for i, at := range row.Tables {
		if at.Drive() == 1 {
			units[int64(row.Tables[i].Unit())] = true
		}
	}
	drives[1] = bad{drives[1], units}
	result, list, err := run(t, drives, check.Options{Repair: onlySafe})
	require.NoError(t, err)
	require.Equal(t, result.Errors, result.RepairedErrors, "%v", list)
	delete(units, int64(l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks)) // not in use any more
	require.Empty(t, units)
	requireClean(t, drives, check.Options{Data: true})
	require.Equal(t, original, mounted(t, drives))
}

// A drive that answers nothing any more is not the same as files that are damaged.
func TestDriveLostWhileFilesAreRead(t *testing.T) {
	images := usedImages(t)
	drives := maptest.FromImages(images).Drives()
	var gone atomic.Bool
	drives[2] = failing{drives[2], func(int64) bool { return gone.Load() }}
	var list findings
	result, err := check.Run(context.Background(), drives, check.Options{Data: true, Repair: yes,
		Report: func(f check.Finding) { list = append(list, f) },
		Progress: func(p check.Pass, _, _ uint64) {
			gone.Store(p == check.PassData)
		}})
	require.NoError(t, err)
	require.Len(t, list.of(check.Error), 1, "%v", list)
	require.Contains(t, list.of(check.Error)[0].Message, "mem2 reads nothing any more")
	require.Zero(t, result.GivenUp)
}

func TestRepairOfRecords(t *testing.T) {
	images := usedImages(t)
	original := dataOf(t, images)
	r := &parse(t, images).rows[0]
	files := rowFiles(t, images, r)
	edit := func(images [][]byte, index int, change func(*ondisk.Record)) {
		editRecord(t, images, r, files[index], change)
	}
	cycle := cloneImages(images)
	var keys [3]ondisk.Key
	for i := range keys {
		edit(cycle, i, func(x *ondisk.Record) { keys[i] = x.Key })
	}
	for i := range keys {
		edit(cycle, i, func(x *ondisk.Record) { x.Parent, x.Position = keys[(i+2)%3], uint32(i)+1 })
	}
	result, _, is := repaired(t, maptest.FromImages(cycle), check.Options{Data: true, Repair: yes})
	require.EqualValues(t, 1, result.GivenUp, "a cycle is cut in one place")
	requireSubset(t, original, is)
	require.Len(t, is.files, 95)

	// Two records of a key: the later one counts, and its own payload.
	double := cloneImages(images)
	var early, late ondisk.Record
	first, last := 0, 0
	for i := range files {
		edit(double, i, func(x *ondisk.Record) {
			if i == 0 || x.Sequence < early.Sequence {
				early, first = *x, i
			}
			if x.Sequence > late.Sequence {
				late, last = *x, i
			}
		})
	}
	require.NotEqual(t, first, last)
	edit(double, first, func(x *ondisk.Record) { x.Key = late.Key })
	_, list, is := repaired(t, maptest.FromImages(double), check.Options{Repair: onlySafe})
	require.Empty(t, list.of(check.Error))
	require.Zero(t, is.damaged)
	require.Len(t, is.files, 95)
}

func TestRepairOfJournal(t *testing.T) {
	b := newVolume(t, 4*mib, 4*mib, 4*mib)
	p := b.pool("p", 1, 1)
	b.chain(p, 0, 6)
	images := b.set.Images()
	original := dataOf(t, images)
	require.Len(t, original.files, 6)
	l, s := label(t, images[0]), newest(t, images[0])
	at := func(n uint64) uint64 { return l.Region.JournalUnit + (s.Tail+n)%l.Region.JournalBlocks }

	_, list, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: onlySafe})
	require.Empty(t, list.of(check.Error))
	require.Equal(t, original, is, "a volume that was not unmounted is as it should be")

	one := cloneImages(images)
	flip(unitOf(one[1], at(2)))
	_, _, is = repaired(t, maptest.FromImages(one), check.Options{Data: true, Repair: onlySafe})
	require.Equal(t, original, is)

	both := cloneImages(images)
	onMetadata(both, func(image []byte) { flip(unitOf(image, at(4))) })
	refused(t, both, check.Options{Repair: onlySafe}, "batches of the journal are lost")
	_, _, is = repaired(t, maptest.FromImages(both), check.Options{Data: true, Repair: yes})
	requireSubset(t, original, is)
	require.Len(t, is.files, 5, "what was committed later counts")
}

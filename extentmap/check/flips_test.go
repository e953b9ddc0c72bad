package check_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// flipsDefault is how many sets of images are spoilt when TUTTIFS_FLIPS asks for nothing else.
const flipsDefault = 600

// flipVolume is a volume to spoil, and what each of its bytes is worth.
type flipVolume struct {
	name     string
	clean    bool
	mirrored bool
	images   []*maptest.Image
	contents contents
	// ever has what was freed as well: losing both copies of the last batch looks like a crash before it.
	ever     contents
	metadata []region // what must be as it is
	payload  []region // what files are made of
	// counts, for all workers
	single, multiple, flips, found, wrong, gone, refused, beyond atomic.Uint64
}

// region is a range of bytes of a drive.
type region struct {
	drive    int
	from, to int64
	critical bool // a copy of a label or of the superblock
}

func (r region) has(drive int, off int64) bool {
	return r.drive == drive && r.from <= off && off < r.to
}

// newFlipVolume makes a small volume with chains, families, tails and freed slots.
func newFlipVolume(t testing.TB, name string, drives int, clean bool) *flipVolume {
	var sizes []int64
	for range drives {
		sizes = append(sizes, int64(7-drives)*mib)
	}
	set := maptest.NewSet(sizes...)
	_, err := extentmap.Format(set.Drives(), extentmap.FormatOptions{Label: "flips", JournalBytes: 64 << 10,
		Random: rand.NewChaCha8([32]byte{1})})
	require.NoError(t, err)
	b := &builder{t: t, set: set, r: rand.New(rand.NewPCG(1, 2))}
	b.mount()
	b.wait(b.v.SetTenant(extentmap.Tenant{ID: 3, Name: "three", QuotaBytes: 1 << 40}))
	p, q := b.pool("p", 1, 1), b.pool("q", 2, 2)
	slots := b.chain(p, 0, 8)
	b.chain(q, 100, 5)
	ever := read(t, b.v)
	require.NoError(t, b.v.Checkpoint())
	b.free(p, slots[2], slots[7])
	require.NoError(t, b.v.Close())
	b.mount()
	b.chain(b.v.Pools()[0], 50, 4)
	b.free(b.v.Pools()[0], slots[4])
	if clean {
		require.NoError(t, b.v.Close())
	} else {
		b.v.Abandon()
	}
	v := &flipVolume{name: name, clean: clean, mirrored: drives > 1, images: set.Snapshot()}
	v.contents = mounted(t, maptest.FromImages(v.images).Drives())
	maps.Copy(ever.files, v.contents.files)
	v.ever = ever
	require.Len(t, v.contents.files, 14)
	require.Zero(t, v.contents.damaged)
	v.mapMetadata(t, set.Images())
	v.mapPayload(t)
	return v
}

func (v *flipVolume) units(drive int, first, n uint64, critical bool) {
	v.metadata = append(v.metadata, region{drive, int64(first) * block, int64(first+n) * block, critical})
}

// mapMetadata is the list of docs/format.md, section 13: what is covered, and by that what is not in use.
func (v *flipVolume) mapMetadata(t testing.TB, images [][]byte) {
	l, s := label(t, images[0]), newest(t, images[0])
	j := ondisk.Journal{First: l.Region.JournalUnit, Blocks: l.Region.JournalBlocks,
		Tag: ondisk.VolumeTag(l.Volume), Nonce: s.JournalNonce}
	ring := images[0][j.First*block:][:j.Blocks*block]
	scan, err := j.Replay([][]byte{ring}, s.Tail, s.Chain, func(uint64, []byte) error { return nil })
	require.NoError(t, err)
	require.Equal(t, v.clean, scan.Head == s.Tail)
	for d, image := range images {
		v.units(d, 0, 1, true)
		v.units(d, uint64(len(image))/block-1, 1, true)
		if l.Metadata>>d&1 == 0 {
			continue
		}
		v.units(d, 1, 2, true)
		v.units(d, l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks, uint64(s.CatalogBlocks), false)
		for n := s.Tail; n < scan.Head; n++ {
			v.units(d, j.Unit(n), 1, false)
		}
	}
	for _, r := range parse(t, images).rows {
		for _, at := range r.Tables {
			v.units(int(at.Drive()), at.Unit(), tableBlocks(t, images, r), false)
		}
	}
}

// tableBlocks is the length of a row's table.
func tableBlocks(t testing.TB, images [][]byte, r ondisk.Row) uint64 {
	mount, err := extentmap.OpenDrives(maptest.FromImages(images).Drives(), extentmap.Options{ReadOnly: true})
	require.NoError(t, err)
	defer mount.Abandon()
	for _, p := range mount.Pools() {
		if uint16(p.ID()) == r.Pool {
			return uint64(ondisk.TableBlocks(p.SlotsPerRow()))
		}
	}
	t.Fatalf("row of no pool")
	return 0
}

func (v *flipVolume) mapPayload(t testing.TB) {
	mount, err := extentmap.OpenDrives(maptest.FromImages(v.images).Drives(), extentmap.Options{ReadOnly: true})
	require.NoError(t, err)
	defer mount.Abandon()
	for _, p := range mount.Pools() {
		p.Committed(func(slot uint32) {
			for o := range p.Layout().Geometry().Objects {
				d, unit, _, ok := p.Extent(slot, uint16(o))
				require.True(t, ok)
				v.payload = append(v.payload, region{int(d), int64(unit) * block,
					int64(unit)*block + int64(p.Layout().ObjectBytes(uint16(o))), false})
			}
		})
	}
}

// place is a byte of a drive.
type place struct {
	drive int
	off   int64
}

// flipped is a set of images with changed bits.
type flipped struct {
	images    []*maptest.Image
	bits      map[place]byte
	metadata  int // bits in metadata
	critical  int
	payload   int
	elsewhere int // bits that mean nothing
}

// spoilBits flips n bits, most of them where it counts.
func (v *flipVolume) spoilBits(r *rand.Rand, base []*maptest.Image, n int) flipped {
	f := flipped{images: maptest.Clone(base), bits: make(map[place]byte)}
	for range n {
		at := place{drive: r.IntN(len(base))}
		at.off = r.Int64N(base[at.drive].Size())
		pick := v.metadata[r.IntN(len(v.metadata))]
		switch k := r.IntN(8); {
		case k == 0:
			pick = v.payload[r.IntN(len(v.payload))]
			fallthrough
		case k < 7:
			at = place{pick.drive, pick.from + r.Int64N(pick.to-pick.from)}
		}
		f.bits[at] ^= 1 << r.IntN(8)
	}
	for at, bits := range f.bits {
		if bits == 0 {
			continue
		}
		b := make([]byte, 1)
		f.images[at.drive].ReadAt(b, at.off)
		b[0] ^= bits
		f.images[at.drive].WriteAt(b, at.off)
		f.classify(v, at)
	}
	return f
}

func (f *flipped) classify(v *flipVolume, at place) {
	for _, r := range v.metadata {
		if r.has(at.drive, at.off) {
			f.metadata++
			if r.critical {
				f.critical++
			}
			return
		}
	}
	for _, r := range v.payload {
		if r.has(at.drive, at.off) {
			f.payload++
			return
		}
	}
	f.elsewhere++
}

func (f *flipped) String() string {
	return fmt.Sprintf("%d bits in metadata, %d in files, %d elsewhere: %v", f.metadata, f.payload, f.elsewhere, f.bits)
}

// judge spoils one set of images and looks at all that becomes of them.
func (v *flipVolume) judge(t testing.TB, r *rand.Rand, base []*maptest.Image) {
	n := 1
	if r.IntN(2) == 0 {
		n = 2 + r.IntN(7)
	}
	f := v.spoilBits(r, base, n)
	if n == 1 {
		v.single.Add(1)
	} else {
		v.multiple.Add(1)
	}
	v.flips.Add(uint64(n))
	defer func() {
		if t.Failed() {
			t.Logf("%s: %v", v.name, &f)
		}
	}()
	v.find(t, &f)
	if r.IntN(3) == 0 {
		v.mountUnchecked(t, &f)
	}
	v.repair(t, &f)
}

// find wants the damage found, and nothing found where there is none.
func (v *flipVolume) find(t testing.TB, f *flipped) {
	result, list, err := run(t, maptest.FromImages(f.images).Drives(), check.Options{Data: true, Parallel: 1})
	if errors.Is(err, check.ErrNotVolume) {
		return // for repair to judge
	}
	require.NoError(t, err)
	if result.Errors > 0 {
		v.found.Add(1)
	}
	switch {
	case !v.clean && f.payload == 0:
		// What was in writing looks like this, and is set right by a mount. It is never called clean.
		require.False(t, result.Clean && result.Errors == 0, "%v", f)
	case f.metadata+f.payload > 0:
		require.NotZero(t, result.Errors, "%v", f)
	default:
		require.Zero(t, result.Errors, "%v: %v", f, list)
	}
}

// mountUnchecked mounts what nobody has repaired: it is refused, or shows nothing but files as they were.
func (v *flipVolume) mountUnchecked(t testing.TB, f *flipped) {
	volume, err := extentmap.OpenDrives(maptest.FromImages(f.images).Drives(), extentmap.Options{})
	if err != nil {
		v.refused.Add(1)
		return
	}
	now := read(t, volume)
	v.wrong.Add(uint64(now.damaged))
	requireSubset(t, v.ever, now)
	require.NoError(t, volume.Close())
}

// repair wants a volume that is whole and mounts, with every file that verified before and was not touched.
func (v *flipVolume) repair(t testing.TB, f *flipped) {
	set := maptest.FromImages(f.images)
	result, list, err := run(t, set.Drives(), check.Options{Data: true, Parallel: 1, Repair: yes})
	if errors.Is(err, check.ErrNotVolume) || err == nil && result.Obstacle != "" {
		// Both copies of the label, of the only drive or of one of which nothing else says which it is; or all superblocks.
		require.GreaterOrEqual(t, f.critical, 2, "%v: %v", f, list)
		require.True(t, !v.mirrored || f.metadata >= 3, "%v: %v", f, list)
		v.beyond.Add(1)
		return
	}
	require.NoError(t, err)
	require.Equal(t, result.Errors, result.RepairedErrors, "%v: %v", f, list)
	again, list, err := run(t, set.Drives(), check.Options{Data: true, Parallel: 1})
	require.NoError(t, err)
	require.Empty(t, list.of(check.Error), "%v", f)
	require.True(t, again.Clean)
	now := mounted(t, set.Drives())
	require.Zero(t, now.damaged, "%v", f)
	requireSubset(t, v.ever, now)
	missing := len(v.contents.files) - len(now.files)
	v.gone.Add(uint64(missing))
	if v.mirrored && f.metadata <= 1 || f.metadata == 0 { // a freed file does not count
		require.LessOrEqual(t, missing, f.payload, "%v: %v", f, list)
	}
}

// TestFlips flips bits of the images of several volumes, one or up to eight at a time, and holds the promise to
// them: no panic, no wrong byte, no clean verdict on damage, and after a repair a volume that mounts with all that
// was not damaged. "make flips" does it a hundred thousand times and says so.
func TestFlips(t *testing.T) {
	total := flipsDefault
	if n, err := strconv.Atoi(os.Getenv("TUTTIFS_FLIPS")); err == nil {
		total = n
	}
	volumes := []*flipVolume{
		newFlipVolume(t, "three drives, unmounted", 3, true), newFlipVolume(t, "three drives, cut off", 3, false),
		newFlipVolume(t, "one drive, unmounted", 1, true),
	}
	for i, v := range volumes {
		t.Run(v.name, func(t *testing.T) {
			images := (total + len(volumes) - 1) / len(volumes)
			v.all(t, uint64(i), images)
			t.Logf("%d images: %d with one bit flipped, %d with more, %d bits in all; damage found in %d; mounts of what "+
				"was not repaired: %d refused, %d files misses; files lost for good: %d", images, v.single.Load(),
				v.multiple.Load(), v.flips.Load(), v.found.Load(), v.refused.Load(), v.wrong.Load(), v.gone.Load())
		})
	}
}

// TestSealedDamage puts damage behind right checksums, as a defect or somebody with access to the drives might: fields
// of any value in any block. No panic, and no wrong byte; what can be repaired mounts, and the rest is left as it is.
func TestSealedDamage(t *testing.T) {
	total := flipsDefault / 4
	if n, err := strconv.Atoi(os.Getenv("TUTTIFS_FLIPS")); err == nil {
		total = n / 5
	}
	v := newFlipVolume(t, "three drives, unmounted", 3, true)
	var mended, left atomic.Uint64
	v.each(t, 77, total, func(r *rand.Rand, base []*maptest.Image) {
		images := maptest.Clone(base)
		for range 1 + r.IntN(3) {
			v.sealDamage(r, images)
		}
		v.mountUnchecked(t, &flipped{images: images})
		set := maptest.FromImages(images)
		if repairedOrNot(t, v.ever, set) {
			mended.Add(1)
		} else {
			left.Add(1)
		}
	})
	t.Logf("%d images: %d repaired, %d beyond repair; mounts of what was not repaired: %d refused, %d files misses", total,
		mended.Load(), left.Load(), v.refused.Load(), v.wrong.Load())
}

// sealDamage changes some bytes of a block of metadata, in one copy or, half of the time, in all that are the same, and
// makes its checksum right.
func (v *flipVolume) sealDamage(r *rand.Rand, images []*maptest.Image) {
	pick := v.metadata[r.IntN(len(v.metadata))]
	unit := pick.from + r.Int64N((pick.to-pick.from)/block)*block
	off, n, both := r.IntN(block), 1+r.IntN(8), r.IntN(2) == 0
	if r.IntN(2) == 0 {
		off = r.IntN(600) // where the fields are
	}
	change := make([]byte, n)
	for i := range change {
		change[i] = byte(r.Uint32())
	}
	b, like := make([]byte, block), make([]byte, block)
	images[pick.drive].ReadAt(like, unit)
	for _, m := range v.metadata {
		for at := m.from; at < m.to; at += block {
			images[m.drive].ReadAt(b, at)
			same := m.drive == pick.drive && at == unit || both && string(b[32:]) == string(like[32:])
			if !same {
				continue
			}
			copy(b[off:], change)
			reseal(b)
			images[m.drive].WriteAt(b, at)
		}
	}
}

// all spoils so many sets of images.
func (v *flipVolume) all(t *testing.T, seed uint64, images int) {
	v.each(t, seed, images, func(r *rand.Rand, base []*maptest.Image) { v.judge(t, r, base) })
}

// each calls f so often, on all cores.
func (v *flipVolume) each(t *testing.T, seed uint64, images int, f func(r *rand.Rand, base []*maptest.Image)) {
	var left atomic.Int64
	left.Store(int64(images))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var group sync.WaitGroup
	for worker := range runtime.GOMAXPROCS(0) {
		base := maptest.Clone(v.images)
		group.Go(func() {
			defer func() {
				if t.Failed() {
					cancel()
				}
			}()
			r := rand.New(rand.NewPCG(seed, uint64(worker)))
			for ctx.Err() == nil && left.Add(-1) >= 0 {
				f(r, base)
			}
		})
	}
	group.Wait()
}

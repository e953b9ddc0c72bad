package check_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

func yes(check.Finding) bool { return true }

// onlySafe is what -p agrees to.
func onlySafe(f check.Finding) bool { return f.Repair == check.RepairSafe }

// contents is what a mount of drives shows: by pool and key the hash of the payload of each file that verifies. Those
// that do not are counted.
type contents struct {
	files   map[string][32]byte
	damaged int
}

// mounted opens the drives with the engine, for writing, and reads every file as a reader would: nothing that its
// checksums do not vouch for.
func mounted(t testing.TB, drives []drive.Drive) contents {
	t.Helper()
	v, err := extentmap.OpenDrives(drives, extentmap.Options{})
	require.NoError(t, err)
	c := read(t, v)
	require.NoError(t, v.Close())
	return c
}

func read(t testing.TB, v *extentmap.Volume) contents {
	c := contents{files: make(map[string][32]byte)}
	newest := make(map[string]uint64)
	for _, p := range v.Pools() {
		p.Committed(func(slot uint32) {
			r := p.Record(slot)
			name := fmt.Sprintf("%x/%x", p.Spec().IdentityDigest, r.Key)
			sum, ok := readFile(t, v, p, slot, &r)
			switch {
			case !ok:
				c.damaged++
			case r.Sequence >= newest[name]:
				c.files[name], newest[name] = sum, r.Sequence
			}
		})
	}
	return c
}

func readFile(t testing.TB, v *extentmap.Volume, p *extentmap.Pool, slot uint32, r *ondisk.Record) ([32]byte, bool) {
	seed := checksum.NewPoolSeed(p.Spec().IdentityDigest, r.Tenant).Seed(&r.Key, r.Nonce, r.Generation)
	l := p.Layout()
	h := sha256.New()
	object := func(o uint16) []byte {
		b := make([]byte, l.ObjectBytes(o))
		d, unit, _, ok := p.Extent(slot, o)
		require.True(t, ok)
		require.NoError(t, v.Drive(d).ReadAt(b, int64(unit)*block))
		return b
	}
	for rank := range uint16(l.Ranks()) {
		objects := l.RankObjects(rank)
		sums := make([]uint64, len(objects))
		if !checksum.ParseTrailer(object(l.TrailerObject(rank)), seed, rank, l.TrailerObject(rank), sums) {
			return [32]byte{}, false
		}
		for i, o := range objects {
			b := object(o)
			if checksum.Sum(seed, rank, o, b) != sums[i] {
				return [32]byte{}, false
			}
			h.Write(b)
		}
	}
	return [32]byte(h.Sum(nil)), true
}

// requireSubset wants every file to be one of the original's, byte for byte.
func requireSubset(t testing.TB, original, now contents) {
	t.Helper()
	for name, sum := range now.files {
		was, ok := original.files[name]
		require.True(t, ok, "%s came from nowhere", name)
		require.Equal(t, was, sum, "%s has other bytes", name)
	}
}

// repaired runs a repair and wants what comes after it: nothing to be found, nothing to be written again, a mount that
// shows right files only.
func repaired(t testing.TB, set *maptest.Set, o check.Options) (check.Result, findings, contents) {
	t.Helper()
	result, list, err := run(t, set.Drives(), o)
	require.NoError(t, err)
	require.Empty(t, result.Obstacle)
	require.Equal(t, result.Errors, result.RepairedErrors, "%v", list)
	before := set.Images()
	again, list2, err := run(t, set.Drives(), check.Options{Data: o.Data, Repair: yes})
	require.NoError(t, err)
	require.Empty(t, list2.of(check.Error), "after %v", list)
	require.Zero(t, again.Repaired, "%v", list2)
	require.Equal(t, result.Files, again.Files)
	require.True(t, again.Clean)
	require.Equal(t, before, set.Images(), "the second time nothing is written")
	return result, list, mounted(t, set.Drives())
}

// lost is how many files a kind of damage may cost; -1 means that it cannot be repaired.
var lost = map[string]int{
	"copy in place of a drive": -1, "truncated drive": 25,
	"catalog on all drives": 96, "catalog cut short": 83, "geometry": 50, "unknown checksum": 46,
	"wrong slot size": 46, "pool twice": 0, "row of no pool": 50, "row out of numbers": 50, "narrow row": 50,
	"rows overlap": 50, "tables overlap": 50, "row outside": 50, "row over metadata": 50, "row not aligned": 50,
	"row on no drive": 50, "tables on one drive": 50, "both record tables": 31,
	"invalid record": 1, "unknown state": 1, "too many tokens": 1, "no tokens": 1, "root not at 0": 1,
	"child at 0": 1, "own parent": 1, "payload": 1, "trailer": 1, "key without its payload": 1,
}

func TestRepair(t *testing.T) {
	images := usedImages(t)
	original := mounted(t, maptest.FromImages(images).Drives())
	require.Len(t, original.files, 96)
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			spoilt := cloneImages(images)
			d.spoil(t, spoilt)
			set := maptest.FromImages(spoilt)
			most := lost[d.name]
			if most < 0 {
				before := set.Images()
				result, _, err := run(t, set.Drives(), check.Options{Data: true, Repair: yes})
				require.NoError(t, err)
				require.NotEmpty(t, result.Obstacle)
				require.Zero(t, result.Repaired)
				require.Equal(t, before, set.Images(), "nothing is written")
				return
			}
			result, list, now := repaired(t, set, check.Options{Data: true, Repair: yes})
			require.NotZero(t, result.Repaired)
			require.Zero(t, now.damaged)
			requireSubset(t, original, now)
			require.GreaterOrEqual(t, len(now.files)+most, len(original.files), "%v", list)
			require.EqualValues(t, len(now.files), result.Files)
		})
	}
}

// TestRepairKeepsFeatures: what a compatible feature that is not known put into a drive's label stays there.
func TestRepairKeepsFeatures(t *testing.T) {
	images := usedImages(t)
	for i, image := range images {
		relabel(t, image, func(l *ondisk.Label) { l.Compat, l.Extension[7] = 1<<20, byte(i) })
	}
	requireClean(t, maptest.FromImages(images).Drives(), check.Options{})
	flip(unitOf(images[1], 0))
	flip(unitOf(images[1], newest(t, images[0]).Unit))
	set := maptest.FromImages(images)
	repaired(t, set, check.Options{Repair: yes})
	for i, image := range set.Images() {
		l := label(t, image)
		require.Equal(t, [2]uint64{1 << 20, uint64(i)}, [2]uint64{l.Compat, uint64(l.Extension[7])})
	}
}

// TestRepairSafe: without anybody's agreement only what loses nothing is done.
func TestRepairSafe(t *testing.T) {
	images := usedImages(t)
	original := mounted(t, maptest.FromImages(images).Drives())
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			spoilt := cloneImages(images)
			d.spoil(t, spoilt)
			set := maptest.FromImages(spoilt)
			before := set.Images()
			result, list, err := run(t, set.Drives(), check.Options{Data: true, Repair: onlySafe})
			require.NoError(t, err)
			asked := slices.ContainsFunc(list, func(f check.Finding) bool { return f.Repair == check.RepairAsk })
			if result.Obstacle != "" || result.Repaired == 0 {
				require.Equal(t, before, set.Images())
				return
			}
			require.Equal(t, asked, result.RepairedErrors < result.Errors)
			again, left, err := run(t, set.Drives(), check.Options{Data: true})
			require.NoError(t, err)
			require.Equal(t, result.Errors-result.RepairedErrors, again.Errors, "%v\n%v", list, left)
			if !asked {
				require.Equal(t, original, mounted(t, set.Drives()), "nothing is lost")
			}
		})
	}
}

// TestRepairCut cuts a repair off at each of its writes: repairing again leads to a volume that is whole, and mounting
// without that shows no wrong byte.
func TestRepairCut(t *testing.T) {
	images := usedImages(t)
	original := mounted(t, maptest.FromImages(images).Drives())
	every := 40 // of the writes and flushes; all of them by the long target
	if os.Getenv("TUTTIFS_LONG") != "" {
		every = 1
	}
	for i, d := range damages() {
		if lost[d.name] < 0 || d.name == "truncated drive" { // lengthening is not recorded
			continue
		}
		t.Run(d.name, func(t *testing.T) {
			spoilt := cloneImages(images)
			d.spoil(t, spoilt)
			set := maptest.FromImages(spoilt)
			set.Record()
			_, _, whole := repaired(t, maptest.FromImages(spoilt), check.Options{Data: true, Repair: yes})
			_, _, err := run(t, set.Drives(), check.Options{Data: true, Repair: yes})
			require.NoError(t, err)
			cutter := maptest.NewCutter(spoilt, set.Log(), uint64(i))
			for n := i; ; n++ {
				op, more := cutter.Step()
				if !more {
					break
				}
				if n%every != 0 {
					continue
				}
				cut := cutter.Cut()
				if op.Kind == maptest.Write {
					requireMountable(t, original, maptest.FromImages(cut).Drives())
				}
				_, _, now := repaired(t, maptest.FromImages(cut), check.Options{Data: true, Repair: yes})
				require.Equal(t, whole, now, "%d at %d of drive %d", op.Kind, op.Off/block, op.Drive)
			}
		})
	}
}

// requireMountable: a mount refuses, or shows nothing but files as they were.
func requireMountable(t testing.TB, original contents, drives []drive.Drive) {
	v, err := extentmap.OpenDrives(drives, extentmap.Options{})
	if err != nil {
		return
	}
	requireSubset(t, original, read(t, v))
	require.NoError(t, v.Close())
}

// TestDamageSparesTheOthers: a mount of what nobody has repaired is not refused for one file's sake, nor for a table's
// block or its copies. The file is a miss, and so is what a lost block held; all others are there, byte for byte.
func TestDamageSparesTheOthers(t *testing.T) {
	images := usedImages(t)
	original := mounted(t, maptest.FromImages(images).Drives())
	tried := 0
	for _, d := range damages() {
		if d.structure != "record" && d.structure != "record table" && d.structure != "object" {
			continue
		}
		tried++
		t.Run(d.name, func(t *testing.T) {
			spoilt := cloneImages(images)
			d.spoil(t, spoilt)
			now := mounted(t, maptest.FromImages(spoilt).Drives())
			requireSubset(t, original, now)
			require.LessOrEqual(t, now.damaged, 1)
			if d.message == "no valid record" {
				require.Equal(t, len(original.files)-1, len(now.files))
			}
			require.GreaterOrEqual(t, len(now.files)+max(1, lost[d.name]), len(original.files))
		})
	}
	require.Greater(t, tried, 10)
}

package check_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// liveUnits are the blocks of an unmounted volume that must be as they are: labels, superblocks, the catalog,
// record tables of all rows.
func liveUnits(t testing.TB, images [][]byte) (places []ondisk.Locator) {
	l, s := label(t, images[0]), newest(t, images[0])
	for i, image := range images {
		d := uint16(i)
		places = append(places, ondisk.Locate(d, 0), ondisk.Locate(d, uint64(len(image))/block-1))
		if l.Metadata>>i&1 == 0 {
			continue
		}
		places = append(places, ondisk.Locate(d, 1), ondisk.Locate(d, 2))
		for n := range uint64(s.CatalogBlocks) {
			places = append(places, ondisk.Locate(d,
				l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks+n))
		}
	}
	for _, r := range parse(t, images).rows {
		places = append(places, r.Tables[0], r.Tables[1])
	}
	return places
}

// TestEveryKindOfBitFlip: a flipped bit in any block that counts is found, and changes nothing else.
func TestEveryKindOfBitFlip(t *testing.T) {
	images := usedImages(t)
	r := rand.New(rand.NewPCG(5, 6))
	for _, at := range liveUnits(t, images) {
		for range 5 {
			off, bit := int(at.Unit())*block+r.IntN(block), byte(1)<<r.IntN(8)
			images[at.Drive()][off] ^= bit
			result, _, err := run(t, maptest.FromImages(images).Drives(), check.Options{})
			require.NoError(t, err)
			require.NotZero(t, result.Errors, "drive %d, byte %d, bit %#x", at.Drive(), off, bit)
			images[at.Drive()][off] ^= bit
		}
	}
	requireClean(t, maptest.FromImages(images).Drives(), check.Options{Data: true})
}

// spoil changes bytes as a script says: drive, offset within the unit, what to xor, and which of the places that
// count, or any unit if the drive's top bit is set.
func spoil(images [][]byte, places []ondisk.Locator, script []byte) {
	for ; len(script) >= 6; script = script[6:] {
		n := binary.LittleEndian.Uint16(script[1:])
		image, unit := images[int(script[0]&0x7f)%len(images)], uint64(n)%(uint64(len(images[0]))/block)
		if script[0]&0x80 == 0 {
			at := places[int(n)%len(places)]
			image, unit = images[at.Drive()], at.Unit()
		}
		off := unit*block + uint64(binary.LittleEndian.Uint16(script[3:])%block)
		if off < uint64(len(image)) {
			image[off] ^= script[5]
		}
	}
}

// FuzzCheck spoils the images of a small volume and may then seal some blocks again, so that what lies behind the
// checksums is reached. Whatever comes, the check ends without a panic, and finds what it says again when it is run
// again; a repair leaves nothing to be found, and a volume that mounts and shows nothing but files as they were.
func FuzzCheck(f *testing.F) {
	images := usedImages(f)
	original := mounted(f, maptest.FromImages(images).Drives())
	places := liveUnits(f, images)
	f.Add([]byte{}, false)
	f.Add([]byte{0, 0, 0, 100, 0, 1}, true)
	f.Add([]byte{0x80, 3, 0, 8, 0, 0xff, 1, 9, 0, 32, 0, 7}, true)
	r := rand.New(rand.NewPCG(9, 9))
	for range 40 {
		script := make([]byte, 6*(1+r.IntN(8)))
		for i := range script {
			script[i] = byte(r.Uint32())
		}
		f.Add(script, r.IntN(2) == 0)
	}
	f.Fuzz(func(t *testing.T, script []byte, sealed bool) {
		spoilt := cloneImages(images)
		spoil(spoilt, places, script)
		if sealed {
			for _, at := range places {
				reseal(unitOf(spoilt[at.Drive()], at.Unit()))
			}
		}
		set := maptest.FromImages(spoilt)
		first, list, err := run(t, set.Drives(), check.Options{Data: true, Parallel: 2})
		again, _, errAgain := run(t, set.Drives(), check.Options{Data: true, Parallel: 2})
		require.Equal(t, err == nil, errAgain == nil)
		require.Equal(t, first, again)
		for _, x := range list {
			require.NotEmpty(t, x.String())
		}
		if err == nil {
			repairedOrNot(t, original, set)
		}
	})
}

// repairedOrNot repairs what may be beyond it: then it says so, and has written nothing.
func repairedOrNot(t *testing.T, original contents, set *maptest.Set) bool {
	before := set.Images()
	result, list, err := run(t, set.Drives(), check.Options{Data: true, Repair: yes})
	if err != nil || result.Obstacle != "" {
		require.Equal(t, before, set.Images())
		return false
	}
	if result.Errors > result.RepairedErrors {
		return false // a drive too many, and such
	}
	again, left, err := run(t, set.Drives(), check.Options{Data: true})
	require.NoError(t, err)
	require.Empty(t, left.of(check.Error), "after %v", list)
	now := mounted(t, set.Drives())
	require.Zero(t, now.damaged)
	require.EqualValues(t, again.Files, len(now.files))
	requireSubset(t, original, now)
	return true
}

// reseal makes a block's checksum right, whatever the block says: labels keep theirs behind the magic, all others
// in front.
func reseal(b []byte) {
	if string(b[:len(ondisk.LabelMagic)]) == ondisk.LabelMagic {
		binary.LittleEndian.PutUint32(b[8:], ondisk.CRC(b[12:]))
		return
	}
	binary.LittleEndian.PutUint32(b, ondisk.CRC(b[4:]))
}

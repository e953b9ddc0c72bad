package extentmap_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// makeFiles formats n drive files in a new directory and mounts them once.
func makeFiles(t *testing.T, n int) (dir string, paths []string) {
	t.Helper()
	dir = t.TempDir()
	for i := range n {
		path := filepath.Join(dir, "d"+string(rune('0'+i))+".img")
		require.NoError(t, drive.Create(path, 8*mib))
		paths = append(paths, path)
	}
	formatFiles(t, paths, extentmap.FormatOptions{})
	remount(t, paths)
	return dir, paths
}

func formatFiles(t *testing.T, paths []string, o extentmap.FormatOptions) {
	t.Helper()
	var drives []drive.Drive
	for _, p := range paths {
		d, err := drive.Open(p, drive.Options{})
		require.NoError(t, err)
		defer d.Close()
		drives = append(drives, d)
	}
	format(t, drives, o)
}

func remount(t *testing.T, paths []string) {
	t.Helper()
	v, err := extentmap.Open(paths, extentmap.Options{})
	require.NoError(t, err)
	require.NoError(t, v.Close())
}

// editLabel changes both copies of a drive file's label.
func editLabel(t *testing.T, path string, f func(*ondisk.Label)) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, off := range []int{0, len(b) - ondisk.BlockBytes} {
		block := b[off : off+ondisk.BlockBytes]
		l, err := ondisk.DecodeLabel(block, uint64(off/ondisk.BlockBytes))
		require.NoError(t, err)
		f(l)
		l.Encode(block)
	}
	require.NoError(t, os.WriteFile(path, b, 0o600))
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, b, 0o600))
}

func TestMountFindsAllFromAny(t *testing.T) {
	dir, paths := makeFiles(t, 4)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("nothing"), 0o600))
	for _, p := range paths {
		v, err := extentmap.Open([]string{p}, extentmap.Options{})
		require.NoError(t, err)
		require.Len(t, v.Info().Drives, 4)
		for i, d := range v.Info().Drives {
			require.Equal(t, uint16(i), d.Index)
			require.Equal(t, paths[i], d.Name)
			require.Equal(t, i < 2, d.Metadata)
		}
		require.NoError(t, v.Close())
	}
	// Through a symlink from elsewhere, and one drive under two names.
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(paths[2], link))
	v, err := extentmap.Open([]string{link, paths[2]}, extentmap.Options{})
	require.NoError(t, err)
	require.NoError(t, v.Close())
	// Without a scan all must be named.
	v, err = extentmap.Open(paths, extentmap.Options{NoScan: true})
	require.NoError(t, err)
	require.NoError(t, v.Close())
}

// TestRefusals: each case damages a volume of four files and says how mounting it must fail, and what the message
// names.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(t *testing.T, dir string, paths []string) (give []string)
		o      extentmap.Options
		err    error
		names  []string // with P replaced by the third drive's path
	}{
		"missing": {
			damage: func(t *testing.T, _ string, p []string) []string {
				require.NoError(t, os.Remove(p[2]))
				return p[:1]
			},
			err: extentmap.ErrMissing, names: []string{"drive 2", "UUID"},
		},
		"missing, no scan": {
			damage: func(_ *testing.T, _ string, p []string) []string { return p[:2] },
			o:      extentmap.Options{NoScan: true}, err: extentmap.ErrMissing, names: []string{"drive 2"},
		},
		"no such path": {
			damage: func(_ *testing.T, dir string, _ []string) []string { return []string{filepath.Join(dir, "none")} },
			err:    extentmap.ErrMissing, names: []string{"none"},
		},
		"foreign": {
			damage: func(t *testing.T, _ string, p []string) []string {
				_, other := makeFiles(t, 1)
				return append(p[:4:4], other[0])
			},
			err: extentmap.ErrForeign, names: []string{"belongs to volume", "d0.img"},
		},
		"not a tuttifs drive": {
			damage: func(t *testing.T, dir string, p []string) []string {
				path := filepath.Join(dir, "plain")
				require.NoError(t, drive.Create(path, mib))
				return []string{p[0], path}
			},
			err: extentmap.ErrForeign, names: []string{"plain", "mkfs"},
		},
		"too small for a label": {
			damage: func(t *testing.T, dir string, p []string) []string {
				path := filepath.Join(dir, "tiny")
				require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
				return []string{path}
			},
			err: extentmap.ErrForeign, names: []string{"tiny"},
		},
		"a directory": {
			damage: func(_ *testing.T, dir string, _ []string) []string { return []string{dir} },
			err:    extentmap.ErrOpen, names: []string{"neither a regular file nor a block device"},
		},
		"duplicate": {
			damage: func(t *testing.T, dir string, p []string) []string {
				copyFile(t, p[2], filepath.Join(dir, "copy.img"))
				return p[:1]
			},
			err: extentmap.ErrDuplicate, names: []string{"P", "copy.img", "drive 2"},
		},
		"stale": {
			damage: func(t *testing.T, _ string, p []string) []string {
				b, err := os.ReadFile(p[2])
				require.NoError(t, err)
				remount(t, p)
				require.NoError(t, os.WriteFile(p[2], b, 0o600))
				return p[:1]
			},
			err: extentmap.ErrStale, names: []string{"P", "drive 2", "epoch 2", "epoch 3"},
		},
		"stale metadata drives": {
			damage: func(t *testing.T, _ string, p []string) []string {
				var old [2][]byte
				for i := range old {
					b, err := os.ReadFile(p[i])
					require.NoError(t, err)
					old[i] = b
				}
				remount(t, p)
				for i := range old {
					require.NoError(t, os.WriteFile(p[i], old[i], 0o600))
				}
				return p[:1]
			},
			err: extentmap.ErrStale, names: []string{"metadata drives are old copies"},
		},
		"diverged": {
			damage: func(t *testing.T, _ string, p []string) []string {
				editLabel(t, p[2], func(l *ondisk.Label) { l.Nonce++ })
				return p[:1]
			},
			err: extentmap.ErrDiverged, names: []string{"P", "diverged"},
		},
		"newer version": {
			damage: func(t *testing.T, _ string, p []string) []string {
				editLabel(t, p[2], func(l *ondisk.Label) { l.Version = 2 })
				return p[:1]
			},
			err: extentmap.ErrNewerFormat, names: []string{"P", "drive 2", "newer tuttifs"},
		},
		"draft": {
			damage: func(t *testing.T, _ string, p []string) []string {
				editLabel(t, p[2], func(l *ondisk.Label) { l.Incompat |= ondisk.FeatureDraft })
				return p[:1]
			},
			err: extentmap.ErrDraftFormat, names: []string{"P", "drive 2", "mkfs --force"},
		},
		"unknown incompatible feature": {
			damage: func(t *testing.T, _ string, p []string) []string {
				editLabel(t, p[2], func(l *ondisk.Label) { l.Incompat |= 1 << 40 })
				return p[:1]
			},
			err: extentmap.ErrNewerFormat, names: []string{"P", "drive 2"},
		},
		"unknown read-only-compatible feature": {
			damage: func(t *testing.T, _ string, p []string) []string {
				editLabel(t, p[2], func(l *ondisk.Label) { l.ROCompat |= 2 })
				return p[:1]
			},
			err: extentmap.ErrNewerFormat, names: []string{"P", "mount read-only"},
		},
		"truncated": {
			damage: func(t *testing.T, _ string, p []string) []string {
				require.NoError(t, os.Truncate(p[2], 7*mib))
				return p[:1]
			},
			err: extentmap.ErrTruncated, names: []string{"P", "drive 2"},
		},
		"both labels damaged": {
			damage: func(t *testing.T, _ string, p []string) []string {
				b, err := os.ReadFile(p[2])
				require.NoError(t, err)
				b[3000]++
				b[len(b)-100]++
				require.NoError(t, os.WriteFile(p[2], b, 0o600))
				return p
			},
			err: extentmap.ErrCorrupt, names: []string{"P", "fsck"},
		},
		"no drive": {
			damage: func(*testing.T, string, []string) []string { return nil },
			err:    extentmap.ErrInvalid, names: []string{"no drive given"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, paths := makeFiles(t, 4)
			give := c.damage(t, dir, paths)
			v, err := extentmap.Open(give, c.o)
			if v != nil {
				v.Abandon()
			}
			require.ErrorIs(t, err, c.err)
			for _, n := range c.names {
				if n == "P" {
					n = paths[2]
				}
				require.ErrorContains(t, err, n)
			}
			// A refusal leaves no lock behind.
			for _, p := range paths {
				if _, err := os.Stat(p); err == nil {
					d, err := drive.Open(p, drive.Options{})
					require.NoError(t, err)
					require.NoError(t, d.Close())
				}
			}
		})
	}
}

func TestBusyAndReadOnly(t *testing.T) {
	_, paths := makeFiles(t, 2)
	v, err := extentmap.Open(paths[:1], extentmap.Options{})
	require.NoError(t, err)
	for _, ro := range []bool{false, true} {
		_, err = extentmap.Open(paths, extentmap.Options{ReadOnly: ro})
		require.ErrorIs(t, err, extentmap.ErrBusy)
		require.ErrorContains(t, err, paths[0])
		require.ErrorContains(t, err, "drive 0")
	}
	require.NoError(t, v.Close())
	// Two may read at once, and an unknown read-only-compatible feature does not keep them from it.
	editLabel(t, paths[1], func(l *ondisk.Label) { l.ROCompat |= 2; l.Compat |= 8 })
	for range 2 {
		v, err = extentmap.Open(paths, extentmap.Options{ReadOnly: true})
		require.NoError(t, err)
		defer v.Abandon()
	}
}

// TestFeaturesAreKept: bits that are unknown and compatible, and what belongs to them in a drive's label, stay as they
// are through mounts, drives that are added, and repairs.
func TestFeaturesAreKept(t *testing.T) {
	dir, paths := makeFiles(t, 2)
	editLabel(t, paths[0], func(l *ondisk.Label) { l.Compat = 8 })
	editLabel(t, paths[1], func(l *ondisk.Label) { l.Compat, l.Extension[0], l.Extension[1535] = 8, 5, 6 })
	remount(t, paths[:1])
	v, err := extentmap.Open(paths, extentmap.Options{})
	require.NoError(t, err)
	more := filepath.Join(dir, "more")
	require.NoError(t, drive.Create(more, 8*mib))
	d, err := drive.Open(more, drive.Options{})
	require.NoError(t, err)
	_, err = v.AddDrive(d, extentmap.AddOptions{})
	require.NoError(t, err)
	require.NoError(t, v.Close())
	kept := func(path string) (uint64, byte, byte) {
		var l ondisk.Label
		editLabel(t, path, func(x *ondisk.Label) { l = *x })
		return l.Compat, l.Extension[0], l.Extension[1535]
	}
	want := map[string][3]byte{paths[0]: {8, 0, 0}, paths[1]: {8, 5, 6}, more: {8, 0, 0}}
	for path, w := range want {
		compat, first, last := kept(path)
		require.Equal(t, w, [3]byte{byte(compat), first, last}, path)
	}
}

// TestLabelCopies: one damaged copy of a label is mended by the next mount; a file that grew is still the same drive.
func TestLabelCopies(t *testing.T) {
	for _, off := range []int64{0, 8*mib - ondisk.BlockBytes} {
		_, paths := makeFiles(t, 2)
		f, err := os.OpenFile(paths[1], os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = f.WriteAt(make([]byte, ondisk.BlockBytes), off)
		require.NoError(t, err)
		remount(t, paths[:1])
		b := make([]byte, ondisk.BlockBytes)
		_, err = f.ReadAt(b, off)
		require.NoError(t, err)
		_, err = ondisk.DecodeLabel(b, uint64(off/ondisk.BlockBytes))
		require.NoError(t, err)
		require.NoError(t, f.Truncate(9*mib))
		require.NoError(t, f.Close())
		remount(t, paths[:1])
	}
}

func TestFormatRefusals(t *testing.T) {
	drives := func(sizes ...int64) []drive.Drive { return maptest.NewSet(sizes...).Drives() }
	two := drives(8*mib, 8*mib)
	many := make([]int64, 65)
	for i := range many {
		many[i] = 4096
	}
	for name, c := range map[string]struct {
		drives []drive.Drive
		o      extentmap.FormatOptions
		err    error
	}{
		"none":          {nil, extentmap.FormatOptions{}, extentmap.ErrInvalid},
		"too many":      {drives(many...), extentmap.FormatOptions{}, extentmap.ErrInvalid},
		"too small":     {drives(8*mib, 2*mib), extentmap.FormatOptions{}, extentmap.ErrTooSmall},
		"far too small": {drives(8192), extentmap.FormatOptions{}, extentmap.ErrTooSmall},
		"twice": {[]drive.Drive{two[0], two[1], two[0]}, extentmap.FormatOptions{},
			extentmap.ErrDuplicate},
		"width":                {two, extentmap.FormatOptions{Width: 65}, extentmap.ErrInvalid},
		"negative width":       {two, extentmap.FormatOptions{Width: -1}, extentmap.ErrInvalid},
		"segment no power":     {two, extentmap.FormatOptions{SegmentBytes: 3 << 20}, extentmap.ErrInvalid},
		"segment small":        {two, extentmap.FormatOptions{SegmentBytes: 4096}, extentmap.ErrInvalid},
		"segment of the drive": {two, extentmap.FormatOptions{SegmentBytes: 8 << 20}, extentmap.ErrTooSmall},
		"journal odd":          {two, extentmap.FormatOptions{JournalBytes: 100000}, extentmap.ErrInvalid},
		"label long":           {two, extentmap.FormatOptions{Label: string(make([]byte, 65))}, extentmap.ErrInvalid},
		"label control":        {two, extentmap.FormatOptions{Label: "a\x01"}, extentmap.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := extentmap.Plan(c.drives, c.o)
			require.ErrorIs(t, err, c.err)
			_, err = extentmap.Format(c.drives, c.o)
			require.ErrorIs(t, err, c.err)
		})
	}
}

// A drive that fails is no fault of an argument.
func TestFormatOfAFailingDrive(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Write && op.Drive == 1 {
			return unix.ENOSPC
		}
		return nil
	})
	_, err := extentmap.Format(set.Drives(), extentmap.FormatOptions{})
	var of *extentmap.DriveError
	require.ErrorAs(t, err, &of)
	require.Equal(t, 1, of.Index)
	require.ErrorIs(t, err, extentmap.ErrIO)
	require.NotErrorIs(t, err, extentmap.ErrInvalid)
	require.ErrorIs(t, err, unix.ENOSPC)
}

func TestFormatKnowsSignatures(t *testing.T) {
	for what, s := range map[string]struct {
		off   int
		magic string
	}{
		"ext4": {0x438, "\x53\xef"}, "XFS": {0, "XFSB"}, "btrfs": {0x10040, "_BHRfS_M"}, "LVM": {512, "LABELONE"},
		"swap": {4086, "SWAPSPACE2"},
		"GUID": {512, "EFI PART"}, "MBR": {446 + 4, "\x83"}, "LUKS": {0, "LUKS\xba\xbe"},
		"ZFS":  {0x20000, "\x0c\xb1\xba\x00\x00\x00\x00\x00"},
		"RAID": {4096, "\xfc\x4e\x2b\xa9"}, "tuttifs": {0, ondisk.LabelMagic},
		"tuttifs drive": {8*mib - 4096, ondisk.LabelMagic},
	} {
		t.Run(what, func(t *testing.T) {
			set := maptest.NewSet(8 * mib)
			d := set.Drives()
			require.NoError(t, d[0].WriteAt([]byte(s.magic), int64(s.off)))
			if what == "MBR" {
				require.NoError(t, d[0].WriteAt([]byte{0x55, 0xaa}, 510))
			}
			before := set.Images()
			_, err := extentmap.Format(d, extentmap.FormatOptions{})
			require.ErrorIs(t, err, extentmap.ErrSignature)
			require.ErrorContains(t, err, "--force")
			require.Equal(t, before, set.Images())
			_, err = extentmap.Plan(d, extentmap.FormatOptions{Force: true})
			require.NoError(t, err)
			require.Equal(t, before, set.Images(), "a plan writes nothing")
			format(t, d, extentmap.FormatOptions{Force: true})
			v := open(t, d, extentmap.Options{})
			require.NoError(t, v.Close())
		})
	}
}

// TestFormatIsAllOrNothing cuts the power during mkfs over an older volume: what is left mounts as neither or as the
// new one, or as the old one if nothing was durable yet.
func TestFormatIsAllOrNothing(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{Label: "old"})
	before := set.Snapshot()
	set.Record()
	format(t, set.Drives(), extentmap.FormatOptions{Label: "new", Force: true})
	for seed := range uint64(4) {
		cutter := maptest.NewCutter(maptest.Clone(before), set.Log(), seed)
		for begun := false; ; {
			op, more := cutter.Step()
			if !more {
				break
			}
			begun = begun || op.Kind == maptest.Flush
			v, err := extentmap.OpenDrives(maptest.FromImages(cutter.Cut()).Drives(), extentmap.Options{ReadOnly: true})
			if err != nil {
				require.True(t, errors.Is(err, extentmap.ErrForeign) || errors.Is(err, extentmap.ErrMissing) ||
					errors.Is(err, extentmap.ErrCorrupt), err)
				continue
			}
			if begun {
				require.Equal(t, "new", v.Info().Label)
			}
			v.Abandon()
		}
	}
}

package check_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

func TestFreshVolume(t *testing.T) {
	for _, sizes := range [][]int64{{8 * mib}, {8 * mib, 9 * mib}, {8 * mib, 8 * mib, 8 * mib, 8 * mib, 16 * mib}} {
		set := maptest.NewSet(sizes...)
		_, err := extentmap.Format(set.Drives(), extentmap.FormatOptions{Label: "fresh"})
		require.NoError(t, err)
		result := requireClean(t, set.Drives(), check.Options{Data: true})
		require.True(t, result.Clean)
		require.Equal(t, "fresh", result.Label)
		require.Equal(t, len(sizes), result.Drives)
		require.Zero(t, result.Files)
	}
}

func TestUsedVolume(t *testing.T) {
	b := newVolume(t, 5*mib, 4*mib, 4*mib)
	files := b.fill()
	info := b.v.Info()
	// Not unmounted: the journal is replayed in memory.
	result := requireClean(t, b.set.Drives(), check.Options{Data: true})
	require.False(t, result.Clean)
	require.NotZero(t, result.Transactions)
	require.EqualValues(t, files, result.Files)
	require.NotZero(t, result.Bytes)

	require.NoError(t, b.v.Close())
	again := requireClean(t, b.set.Drives(), check.Options{Data: true, Parallel: 1})
	require.True(t, again.Clean)
	require.Zero(t, again.Transactions)
	require.EqualValues(t, files, again.Files)
	require.Equal(t, info.UUID, again.Volume)
	require.Equal(t, [2]int{3, 2}, [2]int{again.Drives, again.Pools})
	require.Equal(t, [3]any{result.Objects, result.Bytes, result.Slots}, [3]any{again.Objects, again.Bytes,
		again.Slots})

	// And after a second life, in which a row is dropped.
	b.mount()
	pool := b.v.Pools()[1]
	var slots []uint32
	pool.Committed(func(slot uint32) { slots = append(slots, slot) })
	b.free(pool, slots...)
	ticket, err := pool.DropRow(0)
	require.NoError(t, err)
	requireClean(t, b.set.Drives(), check.Options{Data: true})
	require.NoError(t, ticket.Wait())
	require.NoError(t, b.v.Close())
	requireClean(t, b.set.Drives(), check.Options{Data: true})
}

// TestPowerCuts checks what a power cut may leave at each operation: never damage.
func TestPowerCuts(t *testing.T) {
	b := newVolume(t, 4*mib, 4*mib)
	p := b.pool("p", 1, 1)
	slots := b.chain(p, 0, 3)
	require.NoError(t, b.v.Close())
	before := b.set.Images()
	b.set.Record()
	b.mount()
	p = b.v.Pools()[0]
	more := b.chain(p, 100, 8)
	b.free(p, slots[1])
	require.NoError(t, b.v.Checkpoint())
	p.Touch(more[7], 2000) // hits alone
	require.NoError(t, b.v.Checkpoint())
	b.chain(b.pool("q", 2, 1), 200, 3)
	require.NoError(t, b.v.Close())
	for seed := range uint64(2) {
		n := 0
		for cutter := maptest.NewCutter(cloneImages(before), b.set.Log(), seed); ; n++ {
			if _, more := cutter.Step(); !more {
				break
			}
			set := maptest.FromImages(cutter.Cut())
			cut := requireClean(t, set.Drives(), check.Options{Data: true})
			// And the next mount leaves the same files and no damage.
			v, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{})
			require.NoError(t, err)
			require.NoError(t, v.Close())
			after := requireClean(t, set.Drives(), check.Options{})
			require.Equal(t, cut.Files, after.Files)
		}
		require.Greater(t, n, 50)
	}
}

// damage is one way to spoil a used, unmounted volume, and what must be said of it.
type damage struct {
	name      string
	structure string
	message   string
	spoil     func(t *testing.T, images [][]byte)
	data      bool
}

func flip(b []byte) { b[len(b)/3] ^= 0x10 }

func swap(a, b []byte) {
	was := string(a)
	copy(a, b)
	copy(b, was)
}

// onMetadata calls f for the images of both metadata drives.
func onMetadata(images [][]byte, f func(image []byte)) {
	f(images[0])
	f(images[1])
}

func damages() []damage {
	record := func(name, message string, change func(*ondisk.Record)) damage {
		return damage{name: name, structure: "record", message: message, spoil: func(t *testing.T, images [][]byte) {
			r := &parse(t, images).rows[0]
			editRecord(t, images, r, rowFiles(t, images, r)[3], change)
		}}
	}
	inCatalog := func(name, structure, message string, change func(p *parts)) damage {
		return damage{name: name, structure: structure, message: message, spoil: func(t *testing.T, images [][]byte) {
			p := parse(t, images)
			change(p)
			setCatalog(t, images, p.encode())
		}}
	}
	return []damage{
		{name: "first label", structure: "label", message: "first copy is bad",
			spoil: func(_ *testing.T, images [][]byte) { flip(unitOf(images[2], 0)) }},
		{name: "second label", structure: "label", message: "second copy is bad",
			spoil: func(_ *testing.T, images [][]byte) { flip(images[1][len(images[1])-block:]) }},
		{name: "both labels", structure: "label", message: "no label",
			spoil: func(_ *testing.T,
				images [][]byte) {
				clear(images[2][:block])
				clear(images[2][len(images[2])-block:])
			}},
		{name: "older second label", structure: "label", message: "copies differ", spoil: func(t *testing.T,
			images [][]byte) {
			l := label(t, images[2])
			l.Sequence, l.Unit = l.Sequence-5, l.Units-1
			l.Encode(images[2][len(images[2])-block:])
		}},
		{name: "old drive", structure: "label", message: "last mounted in epoch 1", spoil: func(t *testing.T,
			images [][]byte) {
			l := label(t, images[2])
			l.Epoch, l.Sequence = 1, l.Sequence-2
			for _, unit := range []uint64{0, l.Units - 1} {
				l.Unit = unit
				l.Encode(unitOf(images[2], unit))
			}
		}},
		{name: "truncated drive", structure: "label", message: "the label says",
			spoil: func(_ *testing.T, images [][]byte) { images[2] = images[2][:len(images[2])-mib] }},
		{name: "copy in place of a drive", structure: "label", message: "same drive 1",
			spoil: func(_ *testing.T, images [][]byte) { images[2] = append([]byte(nil), images[1]...) }},
		{name: "superblock on one drive", structure: "superblock", message: "bad", spoil: func(t *testing.T,
			images [][]byte) {
			flip(unitOf(images[1], newest(t, images[1]).Unit))
		}},
		{name: "superblock before on one drive", structure: "superblock", message: "bad", spoil: func(t *testing.T,
			images [][]byte) {
			flip(unitOf(images[0], 3-newest(t, images[0]).Unit))
		}},
		{name: "erased superblock", structure: "superblock", message: "without checkpoint", spoil: func(t *testing.T,
			images [][]byte) {
			clear(unitOf(images[0], newest(t, images[0]).Unit))
		}},
		{name: "newest superblock on all drives", structure: "superblock", message: "bad",
			spoil: func(t *testing.T, images [][]byte) {
				onMetadata(images, func(b []byte) { flip(unitOf(b, newest(t, b).Unit)) })
			}},
		{name: "contradicting superblocks", structure: "superblock", message: "differs", spoil: func(t *testing.T,
			images [][]byte) {
			s := newest(t, images[1])
			s.NextCommit++
			s.Encode(unitOf(images[1], s.Unit))
		}},
		{name: "catalog on one drive", structure: "catalog", message: "block 0 is bad", spoil: func(t *testing.T,
			images [][]byte) {
			l, s := label(t, images[1]), newest(t, images[1])
			flip(unitOf(images[1], l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks))
		}},
		{name: "catalog on all drives", structure: "catalog", message: "on no metadata drive",
			spoil: func(t *testing.T, images [][]byte) {
				onMetadata(images, func(b []byte) {
					l, s := label(t, b), newest(t, b)
					flip(unitOf(b, l.Region.CatalogUnit+uint64(s.CatalogArea)*l.Region.CatalogBlocks))
				})
			}},
		{name: "catalog cut short", structure: "catalog", message: "truncated", spoil: func(t *testing.T,
			images [][]byte) {
			stream := catalog(t, images[0])
			setCatalog(t, images, stream[:len(stream)-8])
		}},
		inCatalog("pool twice", "catalog", "pool 1 is there twice", func(p *parts) {
			p.pools = append(p.pools,
				p.pools[0])
		}),
		inCatalog("two pools of one name", "catalog", `have the name "small"`,
			func(p *parts) { p.pools[1].Name = "small" }),
		inCatalog("unknown family", "catalog", "family 9 does not exist", func(p *parts) { p.pools[1].Family = 9 }),
		inCatalog("unknown checksum", "catalog", "unknown checksum algorithm 7",
			func(p *parts) { p.pools[1].ChecksumAlg = 7 }),
		inCatalog("wrong slot size", "catalog", "its geometry says", func(p *parts) { p.pools[1].SlotUnits++ }),
		inCatalog("geometry", "catalog", "bad geometry",
			func(p *parts) { p.pools[0].Geometry = []byte("what is this") }),
		inCatalog("limits", "catalog", "above maximum", func(p *parts) {
			p.pools[0].MinBytes,
				p.pools[0].MaxBytes = 2, 1
		}),
		inCatalog("tenant twice", "catalog", "tenant 3 is there twice",
			func(p *parts) { p.tenants = append(p.tenants, p.tenants[0]) }),
		inCatalog("row twice", "catalog", "is there twice", func(p *parts) { p.rows = append(p.rows, p.rows[0]) }),
		inCatalog("row of no pool", "catalog", "pool 77, which does not exist",
			func(p *parts) { p.rows[0].Pool = 77 }),
		inCatalog("row out of numbers", "catalog", "have no numbers",
			func(p *parts) { p.rows[0].Number = 1<<32 - 1 }),
		inCatalog("narrow row", "catalog", "2 entries", func(p *parts) { p.rows[0].Entries = p.rows[0].Entries[:2] }),
		inCatalog("rows overlap", "row", "overlaps", func(p *parts) { p.rows[1].Entries = p.rows[0].Entries }),
		inCatalog("tables overlap", "row", "overlaps", func(p *parts) { p.rows[1].Tables = p.rows[0].Tables }),
		inCatalog("row outside", "row", "lies outside", func(p *parts) {
			p.rows[0].Entries[0] = ondisk.Locate(p.rows[0].Entries[0].Drive(), 1<<40)
		}),
		inCatalog("row over metadata", "row", "lies outside", func(p *parts) {
			p.rows[0].Entries[0] = ondisk.Locate(p.rows[0].Entries[0].Drive(), 1)
		}),
		inCatalog("row not aligned", "row", "not aligned", func(p *parts) { p.rows[0].Entries[0]++ }),
		inCatalog("row on no drive", "row", "drive 9, which is no member",
			func(p *parts) { p.rows[0].Entries[0] = ondisk.Locate(9, 64) }),
		inCatalog("tables on one drive", "row", "both record tables are on drive",
			func(p *parts) { p.rows[0].Tables[1] = p.rows[0].Tables[0] }),
		{name: "one record table", structure: "record table", message: "copy 1 of block 0 is bad",
			spoil: func(t *testing.T, images [][]byte) {
				at := parse(t, images).rows[1].Tables[1]
				flip(unitOf(images[at.Drive()], at.Unit()))
			}},
		{name: "both record tables", structure: "record table", message: "whole on no drive",
			spoil: func(t *testing.T, images [][]byte) {
				for _, at := range parse(t, images).rows[1].Tables {
					flip(unitOf(images[at.Drive()], at.Unit()))
				}
			}},
		{name: "record table of another row", structure: "record table", message: "belongs elsewhere",
			spoil: func(t *testing.T, images [][]byte) {
				rows := parse(t, images).rows
				a, b := rows[0].Tables[0], rows[1].Tables[0]
				copy(unitOf(images[a.Drive()], a.Unit()), unitOf(images[b.Drive()], b.Unit()))
			}},
		{name: "swapped record tables", structure: "record table", message: "belongs elsewhere",
			spoil: func(t *testing.T, images [][]byte) {
				rows := parse(t, images).rows
				a, b := rows[0].Tables[0], rows[1].Tables[0]
				swap(unitOf(images[a.Drive()], a.Unit()), unitOf(images[b.Drive()], b.Unit()))
			}},
		{name: "swapped superblocks", structure: "superblock", message: "belongs elsewhere",
			spoil: func(_ *testing.T, images [][]byte) { swap(unitOf(images[1], 1), unitOf(images[1], 2)) }},
		{name: "swapped labels", structure: "label", message: "it is drive 1",
			spoil: func(_ *testing.T, images [][]byte) {
				swap(unitOf(images[1], 0), unitOf(images[1], uint64(len(images[1]))/block-1))
			}},
		{name: "record tables differ", structure: "record table", message: "different records",
			spoil: func(t *testing.T, images [][]byte) {
				r := parse(t, images).rows[0]
				index := rowFiles(t, images, &r)[0]
				r.Tables[0] = r.Tables[1]
				editRecord(t, images, &r, index, func(x *ondisk.Record) { x.Owner++ })
			}},
		{name: "table from the future", structure: "record table", message: "written by checkpoint",
			spoil: func(t *testing.T, images [][]byte) {
				r := parse(t, images).rows[0]
				at := r.Tables[0]
				ondisk.SealTable(unitOf(images[at.Drive()], at.Unit()), at, ondisk.VolumeTag(label(t,
					images[0]).Volume), 1<<40,
					ondisk.TableID{Pool: r.Pool, Row: r.Number})
			}},
		record("invalid record", "no valid record", func(r *ondisk.Record) { r.Flags = 0x80 }),
		record("unknown state", "no valid record", func(r *ondisk.Record) { r.State = 9 }),
		record("commit sequence", "commit sequence", func(r *ondisk.Record) { r.Sequence = 1 << 50 }),
		record("same commit sequence", "two records have commit sequence", func(r *ondisk.Record) { r.Sequence = 1 }),
		record("too many tokens", "17 tokens", func(r *ondisk.Record) { r.Tokens = 17 }),
		record("no tokens", "0 tokens", func(r *ondisk.Record) { r.Tokens = 0 }),
		record("root not at 0", "a root at position 5", func(r *ondisk.Record) {
			r.Parent,
				r.Position = ondisk.Key{}, 5
		}),
		record("child at 0", "although it has a parent", func(r *ondisk.Record) {
			r.Parent, r.Position = key(5000),
				0
		}),
		record("own parent", "leads back to itself", func(r *ondisk.Record) { r.Parent, r.Position = r.Key, 7 }),
		{name: "payload", structure: "object", message: "wrong checksum", data: true, spoil: func(t *testing.T,
			images [][]byte) {
			spoilObject(t, images, 0)
		}},
		{name: "trailer", structure: "object", message: "the trailer of rank 0 is damaged", data: true,
			spoil: func(t *testing.T, images [][]byte) { spoilObject(t, images, 2) }},
		{name: "key without its payload", structure: "object", message: "damaged", data: true,
			spoil: func(t *testing.T, images [][]byte) {
				r := &parse(t, images).rows[0]
				editRecord(t, images, r, rowFiles(t, images, r)[0], func(x *ondisk.Record) { x.Generation++ })
			}},
	}
}

// spoilObject flips a bit of an object of the first file of the first pool.
func spoilObject(t *testing.T, images [][]byte, object uint16) {
	v, err := extentmap.OpenDrives(maptest.FromImages(cloneImages(images)).Drives(),
		extentmap.Options{ReadOnly: true})
	require.NoError(t, err)
	defer v.Abandon()
	p := v.Pools()[0]
	first := extentmap.NoSlot
	p.Committed(func(slot uint32) { first = min(first, slot) })
	d, unit, _, ok := p.Extent(first, object)
	require.True(t, ok)
	images[d][unit*block+20] ^= 1
}

func TestDamage(t *testing.T) {
	images := usedImages(t)
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			spoilt := cloneImages(images)
			d.spoil(t, spoilt)
			result, list, err := run(t, maptest.FromImages(spoilt).Drives(), check.Options{Data: d.data})
			require.NoError(t, err)
			require.NotZero(t, result.Errors)
			var texts []string
			for _, f := range list.of(check.Error) {
				require.NotEmpty(t, f.Advice+f.Message)
				if f.Structure == d.structure {
					texts = append(texts, f.String())
				}
			}
			require.Contains(t, strings.Join(texts, "\n"), d.message, "%v", list)
		})
	}
}

// TestOddities are legal and must not count as errors.
func TestOddities(t *testing.T) {
	images := usedImages(t)
	edit := func(index int, change func(*ondisk.Record)) func(t *testing.T, images [][]byte) {
		return func(t *testing.T, images [][]byte) {
			r := &parse(t, images).rows[0]
			editRecord(t, images, r, rowFiles(t, images, r)[index], change)
		}
	}
	for message, spoil := range map[string]func(t *testing.T, images [][]byte){
		"whose parent is gone": edit(3, func(r *ondisk.Record) { r.Parent = key(9999) }),
		"has a later record":   edit(3, func(r *ondisk.Record) { r.Key = key(100) }),
		"its parent of tenant": edit(3, func(r *ondisk.Record) { r.Tenant = 0 }),
		"not in the tenant table": edit(3, func(r *ondisk.Record) {
			r.Tenant, r.Parent, r.Position = 44, ondisk.Key{}, 0
		}),
		"its parent's is": edit(9, func(r *ondisk.Record) { r.Position = 900 }),
		"its quota is 1 now": func(t *testing.T, images [][]byte) {
			p := parse(t, images)
			p.tenants[0].Quota = 1
			setCatalog(t, images, p.encode())
		},
		"the limit is 2 now": func(t *testing.T, images [][]byte) {
			p := parse(t, images)
			p.pools[0].MaxSlots = 2
			setCatalog(t, images, p.encode())
		},
		"the maximum is 4096 now": func(t *testing.T, images [][]byte) {
			p := parse(t, images)
			p.pools[0].MaxBytes = 4096
			setCatalog(t, images, p.encode())
		},
		"writings behind": func(t *testing.T, images [][]byte) {
			l := label(t, images[2])
			l.Sequence, l.Clean = l.Sequence-1, false
			for _, unit := range []uint64{0, l.Units - 1} {
				l.Unit = unit
				l.Encode(unitOf(images[2], unit))
			}
		},
	} {
		t.Run(message, func(t *testing.T) {
			odd := cloneImages(images)
			spoil(t, odd)
			result, list, err := run(t, maptest.FromImages(odd).Drives(), check.Options{})
			require.NoError(t, err)
			require.Empty(t, list.of(check.Error))
			require.Zero(t, result.Errors)
			said := ""
			for _, f := range list {
				said += f.String() + "\n"
			}
			require.Contains(t, said, message)
		})
	}
}

// TestTablesOnOneDrive: after other drives were lost both record tables of a row may lie on one drive, apart from each
// other. That is legal: said, and neither an error nor a reason to give the row up.
func TestTablesOnOneDrive(t *testing.T) {
	images := usedImages(t)
	original := dataOf(t, images)
	p := parse(t, images)
	row := &p.rows[0]
	l, blocks := label(t, images[0]), tableBlocks(t, images, *row)
	first, from := row.Tables[0], row.Tables[1]
	require.NotEqual(t, first.Drive(), from.Drive())
	// Tables fill a segment from its beginning: its end is free.
	segment := uint64(l.Region.SegmentUnits)
	end := first.Unit() - (first.Unit()-l.Region.SegmentUnit)%segment + segment
	to := ondisk.Locate(first.Drive(), end-blocks)
	tag, id := ondisk.VolumeTag(l.Volume), ondisk.TableID{Pool: row.Pool, Row: row.Number}
	for i := range blocks {
		b := unitOf(images[to.Drive()], to.Unit()+i)
		require.Zero(t, bytes.Count(b, []byte{0})-len(b), "the place is free")
		copy(b, unitOf(images[from.Drive()], from.Unit()+i))
		id.Block = uint32(i)
		sequence, err := ondisk.OpenTable(b, from+ondisk.Locator(i), tag, id)
		require.NoError(t, err)
		ondisk.SealTable(b, to+ondisk.Locator(i), tag, sequence, id)
	}
	row.Tables[1] = to
	setCatalog(t, images, p.encode())

	result, list, err := run(t, maptest.FromImages(images).Drives(), check.Options{Data: true})
	require.NoError(t, err)
	require.Empty(t, list.of(check.Error))
	require.Len(t, list.of(check.Warning), 1)
	require.Contains(t, list.of(check.Warning)[0].Message, "both record tables are on drive")
	require.EqualValues(t, len(original.files), result.Files)
	require.Equal(t, original, dataOf(t, images), "it mounts")
	_, _, is := repaired(t, maptest.FromImages(images), check.Options{Data: true, Repair: yes})
	require.Equal(t, original, is, "no repair gives the row up")
}

func TestCycle(t *testing.T) {
	images := usedImages(t)
	r := &parse(t, images).rows[0]
	files := rowFiles(t, images, r)
	var keys [3]ondisk.Key
	for i := range keys {
		editRecord(t, images, r, files[i], func(x *ondisk.Record) { keys[i] = x.Key })
	}
	for i := range keys {
		editRecord(t, images, r, files[i], func(x *ondisk.Record) {
			x.Parent, x.Position = keys[(i+2)%3],
				uint32(i)+1
		})
	}
	_, list, err := run(t, maptest.FromImages(images).Drives(), check.Options{})
	require.NoError(t, err)
	cycles := list.of(check.Error)
	require.Len(t, cycles, 1, "one cycle is said once: %v", list)
	require.Contains(t, cycles[0].Message, "leads back to itself")
}

func TestJournalDamage(t *testing.T) {
	b := newVolume(t, 4*mib, 4*mib, 4*mib)
	p := b.pool("p", 1, 1)
	b.chain(p, 0, 6)
	images := b.set.Images()
	l, s := label(t, images[0]), newest(t, images[0])
	at := func(n uint64) uint64 { return l.Region.JournalUnit + (s.Tail+n)%l.Region.JournalBlocks }
	requireClean(t, maptest.FromImages(images).Drives(), check.Options{Data: true})

	one := cloneImages(images)
	flip(unitOf(one[1], at(2)))
	result, list, err := run(t, maptest.FromImages(one).Drives(), check.Options{Data: true})
	require.NoError(t, err)
	require.EqualValues(t, 6, result.Files, "the other copy counts")
	require.Len(t, list.of(check.Error), 1)
	require.Contains(t, list.of(check.Error)[0].Message, "this copy ends at block")

	both := cloneImages(images)
	onMetadata(both, func(image []byte) { flip(unitOf(image, at(2))) })
	_, list, err = run(t, maptest.FromImages(both).Drives(), check.Options{Data: true})
	require.NoError(t, err)
	require.NotEmpty(t, list.of(check.Error))
	require.Contains(t, list.of(check.Error)[0].Message, "whole on no metadata drive")
	require.Equal(t, "journal", list.of(check.Error)[0].Structure)
}

func TestMissingDrives(t *testing.T) {
	images := usedImages(t)
	for missing := range images {
		var rest [][]byte
		for i, image := range images {
			if i != missing {
				rest = append(rest, image)
			}
		}
		_, list, err := run(t, maptest.FromImages(rest).Drives(), check.Options{Data: true})
		require.NoError(t, err)
		require.Len(t, list.of(check.Error), 1, "%v", list)
		require.Contains(t, list.of(check.Error)[0].Message, "is missing")
	}
	other := newVolume(t, 4*mib)
	require.NoError(t, other.v.Close())
	foreign := other.set.Images()[0]
	l := label(t, foreign)
	l.Volume[0]++
	for _, unit := range []uint64{0, l.Units - 1} {
		l.Unit = unit
		l.Encode(unitOf(foreign, unit))
	}
	_, list, err := run(t, maptest.FromImages(append(images, foreign)).Drives(), check.Options{})
	require.NoError(t, err)
	require.Len(t, list.of(check.Error), 1)
	require.Contains(t, list.of(check.Error)[0].Message, "belongs to volume")
}

func TestNotAVolume(t *testing.T) {
	_, _, err := run(t, maptest.NewSet(8*mib).Drives(), check.Options{})
	require.ErrorIs(t, err, check.ErrNotVolume)
	_, _, err = run(t, nil, check.Options{})
	require.ErrorIs(t, err, check.ErrNotVolume)

	images := usedImages(t)
	onMetadata(images, func(image []byte) { clear(image[block : 3*block]) })
	result, list, err := run(t, maptest.FromImages(images).Drives(), check.Options{})
	require.ErrorIs(t, err, check.ErrNotVolume)
	require.NotZero(t, result.Errors)
	require.Contains(t, list.of(check.Error)[0].Message, "none on any metadata drive")
}

func TestNewerFormat(t *testing.T) {
	for _, change := range []func(l *ondisk.Label){
		func(l *ondisk.Label) { l.Version++ },
		func(l *ondisk.Label) { l.Incompat |= 1 << 40 },
	} {
		images := usedImages(t)
		l := label(t, images[1])
		change(l)
		l.Encode(unitOf(images[1], 0))
		_, _, err := run(t, maptest.FromImages(images).Drives(), check.Options{})
		require.ErrorIs(t, err, check.ErrNewer)
		require.ErrorContains(t, err, "mem1")
	}
	images := usedImages(t)
	relabel(t, images[1], func(l *ondisk.Label) { l.Incompat = ondisk.FeatureDraft })
	_, _, err := run(t, maptest.FromImages(images).Drives(), check.Options{Repair: yes})
	require.ErrorIs(t, err, check.ErrDraft)
	require.ErrorContains(t, err, "mem1")
}

// TestGoldenImagesAreClean: the images that are kept with the code are judged as when they were made.
func TestGoldenImagesAreClean(t *testing.T) {
	for name, clean := range map[string]bool{"clean": true, "crashed": false} {
		var images [][]byte
		for i := range 2 {
			f, err := os.Open(fmt.Sprintf("../testdata/%s-%d.img.gz", name, i))
			require.NoError(t, err)
			r, err := gzip.NewReader(f)
			require.NoError(t, err)
			b, err := io.ReadAll(r)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			images = append(images, b)
		}
		result := requireClean(t, maptest.FromImages(images).Drives(), check.Options{})
		require.Equal(t, clean, result.Clean, name)
		require.NotZero(t, result.Files)
		require.Zero(t, label(t, images[0]).Incompat)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	var last check.Pass
	_, err := check.Run(ctx, maptest.FromImages(usedImages(t)).Drives(), check.Options{Progress: func(p check.Pass,
		_, _ uint64) {
		if last = p; p == check.PassTables {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, check.PassTables, last)
}

// failing is a drive that cannot read some units.
type failing struct {
	drive.Drive
	bad func(unit int64) bool
}

func (f failing) ReadAt(p []byte, off int64) error {
	for at := off / block; at*block < off+int64(len(p)); at++ {
		if f.bad(at) {
			return context.DeadlineExceeded
		}
	}
	return f.Drive.ReadAt(p, off)
}

// TestUnreadable: a drive that reads nothing, or nothing but its labels, is damage to be told, not the end of the
// check.
func TestUnreadable(t *testing.T) {
	images := usedImages(t)
	for i := range images {
		for _, bad := range []func(int64) bool{
			func(int64) bool { return true },
			func(unit int64) bool { return unit != 0 && unit != int64(len(images[i]))/block-1 },
			func(unit int64) bool { return unit%7 == 3 },
		} {
			drives := maptest.FromImages(images).Drives()
			drives[i] = failing{drives[i], bad}
			result, _, err := run(t, drives, check.Options{Data: true})
			require.NoError(t, err)
			require.NotZero(t, result.Errors)
		}
	}
}

// TestManyFindings: a flood is counted and cut off.
func TestManyFindings(t *testing.T) {
	images := usedImages(t)
	r := rand.New(rand.NewPCG(1, 1))
	l := label(t, images[2])
	for i := int(l.Region.SegmentUnit) * block; i < len(images[2])-block; i += 64 {
		images[2][i] ^= byte(r.Uint32()) | 1
	}
	for i := int(l.Region.SegmentUnit) * block; i < len(images[1])-block; i += 64 {
		images[1][i] ^= byte(r.Uint32()) | 1
	}
	result, list, err := run(t, maptest.FromImages(images).Drives(), check.Options{Data: true})
	require.NoError(t, err)
	require.NotZero(t, result.Errors)
	perPass := make(map[check.Pass]int)
	for _, f := range list.of(check.Error) {
		perPass[f.Pass]++
		require.LessOrEqual(t, perPass[f.Pass], check.FindingsMax+1)
	}
	if result.Errors > uint64(len(list.of(check.Error))) {
		require.Contains(t, list[len(list)-1].Message, "more findings")
	}
}

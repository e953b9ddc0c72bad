package extentmap_test

import (
	"errors"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

func memoryVolume(t *testing.T, o extentmap.FormatOptions, sizes ...int64) (*maptest.Set, *extentmap.Volume) {
	t.Helper()
	set := maptest.NewSet(sizes...)
	format(t, set.Drives(), o)
	return set, open(t, set.Drives(), extentmap.Options{})
}

func allocAll(t *testing.T, p *extentmap.Pool) {
	t.Helper()
	for range p.Slots() {
		_, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
	}
}

func TestOverheadOfSmallDrives(t *testing.T) {
	set := maptest.NewSet(64*mib, 64*mib, 64*mib, 64*mib)
	plan, err := extentmap.Plan(set.Drives(), extentmap.FormatOptions{})
	require.NoError(t, err)
	require.Equal(t, uint64(256<<10), plan.SegmentBytes)
	require.GreaterOrEqual(t, float64(plan.UsableBytes), 0.95*4*64*mib)
	require.LessOrEqual(t, float64(plan.MetadataBytes), 0.05*64*mib)
}

// fill adds rows until there is no space, and returns how many.
func fill(t *testing.T, p *extentmap.Pool) (rows int) {
	t.Helper()
	for {
		ticket, err := p.AddRow()
		if errors.Is(err, extentmap.ErrNoSpace) {
			return rows
		}
		require.NoError(t, err)
		require.NoError(t, ticket.Wait())
		rows++
	}
}

func TestRowsUseUnequalDrives(t *testing.T) {
	_, v := memoryVolume(t, extentmap.FormatOptions{Width: 2}, 8*mib, 16*mib, 32*mib)
	p := createPool(t, v, spec("p", 3))
	rows := fill(t, p)
	i := v.Info()
	require.LessOrEqual(t, i.FreeBytes, 2*i.SegmentBytes*uint64(v.Info().Width),
		"all drives are used up, the large one too")
	distinct := 0
	for _, r := range p.Rows() {
		if r.Drives[0] != r.Drives[1] {
			distinct++
		}
	}
	// 24 MiB beside the largest drive's 32: about three quarters of the rows can be on two drives.
	require.Greater(t, distinct, rows*2/3)
	require.Equal(t, uint32(rows)*p.SlotsPerRow(), p.Slots())
}

func TestOneDriveAnyWidth(t *testing.T) {
	for _, width := range []int{1, 3, 4, 7, 64} {
		_, v := memoryVolume(t, extentmap.FormatOptions{Width: width}, 64*mib)
		p := createPool(t, v, spec("p", 5))
		addRow(t, p)
		// Every unit of every object is found again.
		for slot := range p.Slots() {
			for object := range uint16(p.Layout().Objects()) {
				d, unit, units, ok := p.Extent(slot, object)
				require.True(t, ok)
				for w := range units {
					q, s, o, within, ok := v.Resolve(d, unit+uint64(w))
					require.True(t, ok)
					require.Same(t, p, q)
					require.Equal(t, [3]uint32{slot, uint32(object), w}, [3]uint32{s, uint32(o), within})
				}
			}
		}
		seen := map[uint32]bool{}
		parent := extentmap.NoSlot
		for range p.Slots() {
			slot, ok := p.Alloc(parent)
			require.True(t, ok)
			require.False(t, seen[slot])
			seen[slot], parent = true, slot
		}
		_, ok := p.Alloc(parent)
		require.False(t, ok)
		p.Unalloc(parent)
		slot, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
		require.Equal(t, parent, slot)
	}
}

func TestResolveRefusesWhatNoFileHas(t *testing.T) {
	_, v := memoryVolume(t, extentmap.FormatOptions{}, 8*mib, 8*mib)
	p := createPool(t, v, spec("p", 5))
	addRow(t, p)
	row := p.Rows()[0]
	for _, c := range []struct {
		drive uint16
		unit  uint64
	}{
		{0, 0}, {0, 1}, {0, 2047}, {0, 1 << 40}, {2, row.Units[0]}, {64, 500}, {0xffff, 500},
		{row.Drives[0], row.Units[0] + p.EntryUnits()},
		// 64 units hold ten sets of six; the last four units are behind them.
		{row.Drives[0], row.Units[0] + 60},
	} {
		_, _, _, _, ok := v.Resolve(c.drive, c.unit)
		require.False(t, ok, "drive %d unit %d", c.drive, c.unit)
	}
	_, _, _, ok := p.Extent(p.Slots(), 0)
	require.False(t, ok)
	_, _, _, ok = p.Extent(0, 6)
	require.False(t, ok)
	require.Zero(t, testing.AllocsPerRun(100, func() { v.Resolve(row.Drives[0], row.Units[0]) }))
}

func TestMinimumAndMaximum(t *testing.T) {
	_, v := memoryVolume(t, extentmap.FormatOptions{}, 16*mib, 16*mib)
	a := createPool(t, v, spec("a", 3))
	keep := spec("b", 3)
	keep.MinBytes = 10*a.RowBytes() - 1
	b := createPool(t, v, keep)
	require.Greater(t, a.Capacity(), uint32(0))
	capacity := a.Capacity()
	rows := fill(t, a)
	require.InDelta(t, capacity, uint32(rows)*a.SlotsPerRow(), float64(a.SlotsPerRow()))
	for range 10 {
		addRow(t, b)
	}
	// What was kept for record tables may have been a little more than they took.
	require.LessOrEqual(t, fill(t, a), 1)

	// A minimum that the drives cannot hold is refused, and so is one beside others' minimums.
	over := spec("c", 3)
	over.MinBytes = 1 << 40
	_, _, err := v.CreatePool(over)
	require.ErrorIs(t, err, extentmap.ErrNoSpace)
	_, err = v.SetPoolLimits(b.ID(), 1<<40, 0, 0)
	require.ErrorIs(t, err, extentmap.ErrNoSpace)

	// A maximum counts whole rows; so does a cap on files.
	over.MinBytes, over.MaxBytes = 0, 2*a.RowBytes()-1
	ticket, err := a.DropRow(a.Rows()[0].Number)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	ticket, err = a.DropRow(a.Rows()[0].Number)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	c := createPool(t, v, over)
	addRow(t, c)
	_, err = c.AddRow()
	require.ErrorIs(t, err, extentmap.ErrNoSpace)
	ticket, err = v.SetPoolLimits(c.ID(), 0, 0, 3)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.Equal(t, uint32(3), c.Capacity())
	_, err = c.AddRow()
	require.ErrorIs(t, err, extentmap.ErrNoSpace)
	for range 3 {
		_, ok := c.Alloc(extentmap.NoSlot)
		require.True(t, ok)
	}
	_, ok := c.Alloc(extentmap.NoSlot)
	require.False(t, ok)
}

// TestCapacityIsTrue: what a pool is said to be able to hold is what it can be given, within a row, whatever the shape.
func TestCapacityIsTrue(t *testing.T) {
	for _, objects := range []int{1, 3, 62, 63, 100, 200} {
		for _, sizes := range [][]int64{{64 * mib}, {16 * mib, 24 * mib, 40 * mib},
			{20 * mib, 20 * mib, 20 * mib, 20 * mib}} {
			_, v := memoryVolume(t, extentmap.FormatOptions{}, sizes...)
			other := spec("other", 5)
			createPool(t, v, other)
			p := createPool(t, v, spec("p", objects))
			said := p.Capacity()
			rows := fill(t, p)
			require.InDelta(t, said, uint32(rows)*p.SlotsPerRow(), float64(p.SlotsPerRow()), "%d objects on %v",
				objects, sizes)
			require.Equal(t, p.Slots(), p.Capacity())
		}
	}
}

func TestDroppedRowsServeOthers(t *testing.T) {
	set, v := memoryVolume(t, extentmap.FormatOptions{}, 8*mib, 8*mib)
	a, b := createPool(t, v, spec("a", 3)), createPool(t, v, spec("b", 100))
	n := fill(t, a)
	require.Zero(t, fill(t, b))
	slot, ok := a.Alloc(extentmap.NoSlot)
	require.True(t, ok)
	_, err := a.DropRow(slot / a.SlotsPerRow())
	require.ErrorIs(t, err, extentmap.ErrAgain)
	_, err = a.DropRow(uint32(n))
	require.ErrorIs(t, err, extentmap.ErrInvalid)
	a.Unalloc(slot)
	generation := a.Generation()
	for _, r := range a.Rows() {
		ticket, err := a.DropRow(r.Number)
		require.NoError(t, err)
		_, err = a.DropRow(r.Number)
		require.Error(t, err)
		require.NoError(t, ticket.Wait())
	}
	require.NotEqual(t, generation, a.Generation())
	require.Zero(t, a.Slots())
	f, fr, u := a.Counts()
	require.Zero(t, f+fr+u)
	rows := fill(t, b)
	require.Positive(t, rows)
	require.NoError(t, v.Close())
	v = open(t, set.Drives(), extentmap.Options{})
	require.Len(t, v.Pools()[1].Rows(), rows)
	require.Empty(t, v.Pools()[0].Rows())
}

func TestPoolsFamiliesTenants(t *testing.T) {
	set, v := memoryVolume(t, extentmap.FormatOptions{}, 8*mib, 8*mib)
	for _, name := range []string{"", ".hidden", "a/b", "white space", string(make([]byte, 65))} {
		s := spec("x", 1)
		s.Name = name
		_, _, err := v.CreatePool(s)
		require.ErrorIs(t, err, extentmap.ErrInvalid, "%q", name)
	}
	s := spec("x", 1)
	s.Geometry.Objects = nil
	_, _, err := v.CreatePool(s)
	require.ErrorIs(t, err, extentmap.ErrInvalid)
	s = spec("x", 1)
	s.Identity = make([]byte, 17<<10)
	_, _, err = v.CreatePool(s)
	require.ErrorIs(t, err, extentmap.ErrInvalid)

	full, window := spec("full", 4), spec("window", 2)
	full.Family, window.Family, window.TrailingHit = "gemma", "gemma", 3
	full.MaxBytes, full.MaxSlots = 4*mib, 99
	createPool(t, v, full)
	createPool(t, v, window)
	createPool(t, v, spec("alone", 2))
	for _, tenant := range []extentmap.Tenant{{ID: 7, Name: "lora-a", QuotaBytes: 5}, {ID: 0, QuotaBytes: 9},
		{ID: 7, Name: "lora-a", QuotaBytes: 6}} {
		ticket, err := v.SetTenant(tenant)
		require.NoError(t, err)
		require.NoError(t, ticket.Wait())
	}
	_, err = v.SetTenant(extentmap.Tenant{ID: 8, Name: "lora-a"})
	require.ErrorIs(t, err, extentmap.ErrExists)
	check := func(v *extentmap.Volume) {
		require.Equal(t, []extentmap.Family{{ID: 1, Name: "gemma", Pools: []extentmap.PoolID{1, 2}}}, v.Families())
		require.Equal(t, []extentmap.Tenant{{0, "", 9}, {7, "lora-a", 6}}, v.Tenants())
		require.Equal(t, full, v.PoolByID(1).Spec())
		require.Equal(t, window, v.PoolByID(2).Spec())
		require.Nil(t, v.PoolByID(4))
	}
	check(v)
	v.Abandon() // from the journal
	v = open(t, set.Drives(), extentmap.Options{})
	check(v)
	require.NoError(t, v.Close()) // from the catalog
	v = open(t, set.Drives(), extentmap.Options{})
	check(v)
}

// TestCatalogFull creates pools until the catalog is full: a clear error, and everything before it is there.
func TestCatalogFull(t *testing.T) {
	set, v := memoryVolume(t, extentmap.FormatOptions{}, 8*mib)
	n := 0
	for ; ; n++ {
		s := spec("p"+strconv.Itoa(n), 1)
		s.Identity = make([]byte, 16<<10)
		_, ticket, err := v.CreatePool(s)
		if err != nil {
			require.ErrorIs(t, err, extentmap.ErrNoSpace)
			require.ErrorContains(t, err, "catalog")
			break
		}
		require.NoError(t, ticket.Wait())
	}
	require.Greater(t, n, 10)
	require.NoError(t, v.Close())
	require.Len(t, open(t, set.Drives(), extentmap.Options{}).Pools(), n)
}

// TestDiscardInEffect: a drive that answers that it cannot discard is not asked again, and Info says so.
func TestDiscardInEffect(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{Discard: new(true)})
	require.True(t, v.Info().Drives[0].Discard)
	require.True(t, v.Info().Drives[1].Discard)
	set.FailWith(func(op maptest.Op) error {
		if op.Kind == maptest.Discard {
			return drive.ErrNotSupported
		}
		return nil
	})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	slot, ok := p.Alloc(extentmap.NoSlot)
	require.True(t, ok)
	put(t, p, v, slot, 1)
	tx := v.Begin()
	tx.Free(p, slot)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.Eventually(t, func() bool {
		drives := v.Info().Drives
		return !drives[0].Discard && !drives[1].Discard
	}, 10*time.Second, time.Millisecond)
	require.Zero(t, v.Info().Drives[0].WriteErrors)
	require.NoError(t, v.Close())

	reader := open(t, set.Drives(), extentmap.Options{Discard: new(true), ReadOnly: true})
	require.False(t, reader.Info().Drives[0].Discard)
}

// TestFreedOnlyWhenDurable: a slot that is being freed is not handed out before the journal holds its freeing, and
// with discard not before it is discarded.
func TestFreedOnlyWhenDurable(t *testing.T) {
	for _, discard := range []bool{false, true} {
		set := maptest.NewSet(8*mib, 8*mib)
		format(t, set.Drives(), extentmap.FormatOptions{})
		v := open(t, set.Drives(), extentmap.Options{Discard: &discard})
		p := createPool(t, v, spec("p", 3))
		addRow(t, p)
		for i := range p.Slots() {
			slot, ok := p.Alloc(extentmap.NoSlot)
			require.True(t, ok)
			put(t, p, v, slot, uint64(i))
		}
		gate, entered := make(chan struct{}), make(chan struct{}, 1)
		hold := func(kind maptest.Kind) {
			set.FailWith(func(op maptest.Op) error {
				if op.Kind == kind {
					select {
					case entered <- struct{}{}:
					default:
					}
					<-gate
				}
				return nil
			})
		}
		hold(maptest.Flush)
		tx := v.Begin()
		tx.Free(p, 5)
		done := make(chan error, 1)
		ticket, err := tx.Submit(func(err error) { done <- err })
		require.NoError(t, err)
		<-entered
		_, ok := p.Alloc(extentmap.NoSlot)
		require.False(t, ok)
		f, freeing, used := p.Counts()
		require.Equal(t, [3]uint32{0, 1, p.Slots() - 1}, [3]uint32{f, freeing, used})
		close(gate)
		require.NoError(t, <-done)
		require.NoError(t, ticket.Wait())
		require.Eventually(t, func() bool { f, _, _ := p.Counts(); return f == 1 }, 10*time.Second, time.Millisecond)
		slot, ok := p.Alloc(extentmap.NoSlot)
		require.True(t, ok)
		require.Equal(t, uint32(5), slot)
		set.FailWith(nil)
		d, unit, _, ok := p.Extent(5, 0)
		require.True(t, ok)
		b := make([]byte, 1)
		require.NoError(t, v.Drive(d).ReadAt(b, int64(unit)*4096))
		require.Equal(t, discard, b[0] == 0xdd)
	}
}

// TestGroupCommitUnderLoad has many goroutines commit and free; what was acknowledged is there after a crash.
func TestGroupCommitUnderLoad(t *testing.T) {
	set := maptest.NewSet(16*mib, 16*mib, 16*mib)
	format(t, set.Drives(), extentmap.FormatOptions{JournalBytes: 64 << 10})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	for range 20 {
		addRow(t, p)
	}
	const workers = 8
	kept := make(chan map[uint32]uint64, workers)
	for w := range workers {
		go func() {
			mine := map[uint32]uint64{}
			defer func() { kept <- mine }()
			rng := rand.New(rand.NewPCG(uint64(w), 3))
			for i := range 150 {
				tx := v.Begin()
				n := uint64(w*1000 + i)
				slot, ok := p.Alloc(extentmap.NoSlot)
				if ok {
					tx.Put(p, slot, record(v, n), 1<<rng.IntN(3))
				}
				var gone []uint32
				for s := range mine {
					if rng.IntN(8) == 0 {
						tx.Free(p, s)
						gone = append(gone, s)
					}
				}
				ticket, err := tx.Submit(nil)
				if err != nil || ticket.Wait() != nil {
					return
				}
				for _, s := range gone {
					delete(mine, s)
				}
				if ok {
					mine[slot] = n
				}
			}
		}()
	}
	want := map[uint32]uint64{}
	for range workers {
		for s, n := range <-kept {
			want[s] = n
		}
	}
	require.Greater(t, len(want), workers)
	require.Positive(t, v.Info().Checkpoints)
	v.Abandon()
	v = open(t, set.Drives(), extentmap.Options{})
	got := committed(v.Pools()[0])
	require.Len(t, got, len(want))
	for s, n := range want {
		require.Equal(t, key(n), got[s])
	}
}

// TestWriteErrors: a payload drive that cannot flush fails its own transactions and is lost; so is a metadata drive
// that cannot write while another one can; the last one stops the volume. What was acknowledged survives.
func TestWriteErrors(t *testing.T) {
	broken := errors.New("broken")
	set := maptest.NewSet(8*mib, 8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	allocAll(t, p)
	put(t, p, v, 1, 1)
	set.FailWith(func(op maptest.Op) error {
		if op.Drive == 2 {
			return broken
		}
		return nil
	})
	var tickets []*extentmap.Ticket
	for i, mask := range []uint64{4, 3} {
		tx := v.Begin()
		tx.Put(p, uint32(2+i), record(v, uint64(2+i)), mask)
		ticket, err := tx.Submit(nil)
		require.NoError(t, err)
		tickets = append(tickets, ticket)
	}
	require.ErrorIs(t, tickets[0].Wait(), broken)
	require.NoError(t, tickets[1].Wait())
	require.False(t, p.IsCommitted(2))
	require.True(t, p.IsCommitted(3))
	set.FailWith(func(op maptest.Op) error {
		if op.Drive == 1 && op.Kind == maptest.Write {
			return broken
		}
		return nil
	})
	put(t, p, v, 5, 5)
	for i, d := range v.Info().Drives {
		require.Equal(t, []extentmap.DriveState{extentmap.DriveOnline, extentmap.DriveLost, extentmap.DriveLost}[i], d.State)
	}
	require.True(t, v.Info().Degraded)
	set.FailWith(func(op maptest.Op) error { return broken })
	tx := v.Begin()
	tx.Put(p, 4, record(v, 4), 0)
	tx.Free(p, 1)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.ErrorIs(t, ticket.Wait(), extentmap.ErrFailed)
	require.ErrorIs(t, ticket.Wait(), broken)
	require.True(t, p.IsCommitted(1))
	_, err = v.Begin().Submit(nil)
	require.ErrorIs(t, err, extentmap.ErrFailed)
	require.ErrorIs(t, v.Err(), broken)
	require.ErrorIs(t, v.Close(), extentmap.ErrFailed)
	set.FailWith(nil)
	v = open(t, set.Drives(), extentmap.Options{})
	require.False(t, v.Info().Degraded, "all are in again")
	got := committed(v.Pools()[0])
	require.Contains(t, got, uint32(3))
	require.Contains(t, got, uint32(5))
	// The failed one was in flight: whole or not at all.
	_, four := got[4]
	_, one := got[1]
	require.NotEqual(t, four, one)
}

// TestDamagedTables damages record-table blocks: one copy is served by the other, both are a miss and a count.
func TestDamagedTables(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	for i := range p.Slots() {
		slot, _ := p.Alloc(extentmap.NoSlot)
		put(t, p, v, slot, uint64(i))
	}
	want := committed(p)
	require.NoError(t, v.Close())
	// Tables lie in the highest segment.
	images := set.Snapshot()
	table := (8*mib/(256<<10) - 2) * (256 << 10)
	flip := func(images []*maptest.Image, d int) { images[d].Add(int64(table)+1000, 1) }
	one := maptest.Clone(images)
	flip(one, 0)
	v = open(t, maptest.FromImages(one).Drives(), extentmap.Options{})
	require.Equal(t, want, committed(v.Pools()[0]))
	require.Zero(t, v.Info().DamagedBlocks)
	both := maptest.Clone(images)
	flip(both, 0)
	flip(both, 1)
	set = maptest.FromImages(both)
	v = open(t, set.Drives(), extentmap.Options{})
	p = v.Pools()[0]
	require.Equal(t, uint64(1), v.Info().DamagedBlocks)
	got := committed(p)
	require.Len(t, got, len(want)-31)
	for s, k := range got {
		require.Equal(t, want[s], k)
	}
	free, _, _ := p.Counts()
	require.Equal(t, uint32(31), free)
	require.NoError(t, v.Close())
	v = open(t, set.Drives(), extentmap.Options{})
	require.Zero(t, v.Info().DamagedBlocks, "written anew")
	require.Equal(t, got, committed(v.Pools()[0]))
}

// TestDamagedJournal: acknowledged transactions behind a damaged block are not silently lost.
func TestDamagedJournal(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	addRow(t, p)
	allocAll(t, p)
	require.NoError(t, v.Checkpoint())
	require.Zero(t, v.Info().JournalUsedBytes)
	set.Record()
	for i := range uint32(3) {
		put(t, p, v, i, uint64(i))
	}
	want := committed(p)
	v.Abandon()
	first := set.Log()[0].Off
	images := set.Snapshot()
	one := maptest.Clone(images)
	one[0].Add(first+200, 1)
	v = open(t, maptest.FromImages(maptest.Clone(one)).Drives(), extentmap.Options{})
	require.Equal(t, want, committed(v.Pools()[0]))
	both := maptest.Clone(one)
	both[1].Add(first+200, 1)
	_, err := extentmap.OpenDrives(maptest.FromImages(both).Drives(), extentmap.Options{ReadOnly: true})
	require.ErrorIs(t, err, extentmap.ErrCorrupt)
	require.ErrorContains(t, err, "fsck")
}

// TestStaleSuperblock: the journal of a volume that was unmounted is read as a whole where its tail's place says that
// the superblock is not the unmount's, and what is missing is not taken as never written.
func TestStaleSuperblock(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{JournalBytes: 64 << 10})
	v := open(t, set.Drives(), extentmap.Options{})
	addRow(t, createPool(t, v, spec("p", 3)))
	require.NoError(t, v.Close())
	images := set.Snapshot()
	l, err := ondisk.DecodeLabel(images[0].Bytes()[:ondisk.BlockBytes], 0)
	require.NoError(t, err)
	super := readSuperblock(t, set, l)
	j := ondisk.Journal{First: l.Region.JournalUnit, Blocks: l.Region.JournalBlocks,
		Tag: ondisk.VolumeTag(l.Volume), Nonce: super.Nonce}
	block := make([]byte, ondisk.BlockBytes)
	for _, s := range []uint64{super.Tail + 1, super.Tail + j.Blocks} { // the tail itself is overwritten
		j.Seal(block, ondisk.BatchBlock{Sequence: s, Count: 1}, nil)
		for _, m := range images {
			m.WriteAt(block, int64(j.Unit(s))*ondisk.BlockBytes)
		}
	}
	_, err = extentmap.OpenDrives(maptest.FromImages(images).Drives(), extentmap.Options{})
	require.ErrorIs(t, err, extentmap.ErrCorrupt)
	require.ErrorContains(t, err, "fsck")
}

// TestHostileJournal mounts journals that are whole and right but for what they say. Whatever that is, a mount refuses
// it or applies it; it never crashes, and never gives two rows one segment.
func TestHostileJournal(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	v := open(t, set.Drives(), extentmap.Options{})
	addRow(t, createPool(t, v, spec("p", 3)))
	addRow(t, createPool(t, v, spec("q", 9)))
	require.NoError(t, v.Close())
	image := set.Snapshot()
	l := readLabel(t, set, 0)
	super := readSuperblock(t, set, l)
	geometry, err := smallGeometry(2).MarshalBinary()
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(5, 6))
	locator := func() ondisk.Locator {
		return ondisk.Locate(uint16(rng.IntN(4)),
			l.Region.SegmentUnit+uint64(rng.IntN(30))*uint64(l.Region.SegmentUnits)+uint64(rng.IntN(2)))
	}
	refused := 0
	for range 2000 {
		var b []byte
		for range 1 + rng.IntN(4) {
			pool, n := uint16(rng.IntN(4)), uint32(rng.IntN(70))
			switch rng.IntN(7) {
			case 0:
				e := ondisk.Pool{ID: 1 + pool, SlotUnits: uint64(1 + rng.IntN(4)), EntryShift: uint8(rng.IntN(32)),
					Name: "x", Geometry: geometry}
				b = e.Append(b)
			case 1:
				b = (&ondisk.Limits{Pool: pool, MinBytes: rng.Uint64(), MaxBytes: rng.Uint64()}).Append(b)
			case 2, 3:
				e := ondisk.Row{Pool: pool, Number: n, Tables: [2]ondisk.Locator{locator(), locator()}}
				for range 1 + rng.IntN(3) {
					e.Entries = append(e.Entries, locator())
				}
				b = e.Append(b)
			case 4:
				b = (&ondisk.DropRow{Pool: pool, Number: n}).Append(b)
			case 5:
				b = ondisk.AppendPut(b, pool, n, &ondisk.Record{Key: key(uint64(n)), State: ondisk.StateCommitted,
					Sequence: rng.Uint64()})
			case 6:
				b = ondisk.AppendFree(b, pool, n)
			}
		}
		images := maptest.Clone(image)
		j := ondisk.Journal{First: l.Region.JournalUnit, Blocks: l.Region.JournalBlocks,
			Tag: ondisk.VolumeTag(l.Volume), Nonce: super.Nonce}
		block := make([]byte, ondisk.BlockBytes)
		j.Seal(block, ondisk.BatchBlock{Sequence: super.Tail, Chain: super.Chain, Count: 1}, b)
		for _, m := range images {
			m.WriteAt(block, int64(j.Unit(super.Tail))*ondisk.BlockBytes)
		}
		v, err := extentmap.OpenDrives(maptest.FromImages(images).Drives(), extentmap.Options{})
		if err != nil {
			require.ErrorIs(t, err, extentmap.ErrCorrupt)
			refused++
			continue
		}
		checkSpace(t, v)
		v.Abandon()
	}
	require.Greater(t, refused, 100)
	require.Less(t, refused, 2000)
}

// readSuperblock finds the newest superblock of a drive that a label gives the metadata role.
func readSuperblock(t *testing.T, set *maptest.Set, l *ondisk.Label) *ondisk.Superblock {
	t.Helper()
	var best *ondisk.Superblock
	b := make([]byte, ondisk.BlockBytes)
	d := set.Drives()[bits.TrailingZeros64(l.Metadata)]
	for unit := range uint64(ondisk.SuperblockSlots) {
		unit += l.Region.SuperblockUnit
		require.NoError(t, d.ReadAt(b, int64(unit)*ondisk.BlockBytes))
		if s, err := ondisk.DecodeSuperblock(b, unit, l.Volume); err == nil &&
			(best == nil || s.Sequence > best.Sequence) {
			best = s
		}
	}
	require.NotNil(t, best)
	return best
}

func TestTransactionsRefuse(t *testing.T) {
	_, v := memoryVolume(t, extentmap.FormatOptions{JournalBytes: 64 << 10}, 8*mib)
	p := createPool(t, v, spec("p", 3))
	tx := v.Begin()
	tx.Put(p, 0, record(v, 1), 0)
	_, err := tx.Submit(nil)
	require.ErrorIs(t, err, extentmap.ErrInvalid, "no row backs the slot")
	addRow(t, p)
	tx = v.Begin()
	tx.Put(p, 0, record(v, 1), 0)
	_, err = tx.Submit(nil)
	require.ErrorIs(t, err, extentmap.ErrInvalid, "not allocated")
	allocAll(t, p)
	tx = v.Begin()
	for range v.MaxTransactionBytes()/144 + 1 {
		tx.Put(p, 0, record(v, 1), 0)
	}
	_, err = tx.Submit(nil)
	require.ErrorIs(t, err, extentmap.ErrInvalid)
	tx = v.Begin()
	tx.Put(p, 0, record(v, 1), 1<<63)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.ErrorIs(t, ticket.Wait(), extentmap.ErrInvalid, "no such drive to flush")
	ticket, err = v.Begin().Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.NoError(t, v.Close())
	_, err = v.Begin().Submit(nil)
	require.ErrorIs(t, err, extentmap.ErrClosed)
	require.ErrorIs(t, v.Checkpoint(), extentmap.ErrClosed)
}

func TestGenerationsAreUnique(t *testing.T) {
	set := maptest.NewSet(8 * mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	type generation struct{ nonce, n uint64 }
	seen := map[generation]bool{}
	numbers := map[uint64]bool{}
	for range 5 {
		v := open(t, set.Drives(), extentmap.Options{})
		for range 100 {
			nonce, n := v.NextGeneration()
			require.False(t, seen[generation{nonce, n}] || numbers[n])
			seen[generation{nonce, n}], numbers[n] = true, true
		}
		v.Abandon()
	}
}

func TestSectorSizes(t *testing.T) {
	for _, lba := range []int{512, 4096} {
		set := maptest.NewSet(8*mib, 8*mib)
		set.SetLBA(lba)
		format(t, set.Drives(), extentmap.FormatOptions{})
		v := open(t, set.Drives(), extentmap.Options{})
		require.Equal(t, lba, v.Info().Drives[1].LBABytes)
	}
}

// TestLoopDevices runs a volume on block devices, with discard on by default.
func TestLoopDevices(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		paths := []string{loopDevice(t, 16*mib, sector), loopDevice(t, 16*mib, sector)}
		formatFiles(t, paths, extentmap.FormatOptions{})
		v, err := extentmap.Open(paths, extentmap.Options{NoScan: true})
		require.NoError(t, err)
		defer v.Abandon()
		require.Equal(t, drive.Block, v.Info().Drives[0].Kind)
		require.Equal(t, int(sector), v.Info().Drives[0].LBABytes)
		p := createPool(t, v, spec("p", 3))
		addRow(t, p)
		allocAll(t, p)
		d, unit, _, _ := p.Extent(3, 1)
		fullBlock := make([]byte, 4096)
		for i := range fullBlock {
			fullBlock[i] = 0xab
		}
		require.NoError(t, v.Drive(d).WriteAt(fullBlock, int64(unit)*4096))
		put(t, p, v, 3, 3)
		free(t, p, v, 3)
		require.Eventually(t, func() bool { _, freeing, _ := p.Counts(); return freeing == 0 }, 10*time.Second,
			time.Millisecond)
		require.NoError(t, v.Drive(d).ReadAt(fullBlock, int64(unit)*4096))
		require.Equal(t, make([]byte, 4096), fullBlock, "the backing file has a hole there")
		require.NoError(t, v.Close())
		v, err = extentmap.Open(paths, extentmap.Options{NoScan: true, ReadOnly: true})
		require.NoError(t, err)
		require.Len(t, v.Pools(), 1)
		require.NoError(t, v.Close())
	}
}

// loopDevice is a loop device over a new file; it detaches by itself at its last close.
func loopDevice(t *testing.T, size int64, sector uint32) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no loop devices here: %v", err)
	}
	defer unix.Close(ctl)
	path := filepath.Join(t.TempDir(), "backing")
	require.NoError(t, drive.Create(path, size))
	backing, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(backing)
	for range 32 { // somebody else may take the free device first
		n, err := unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skipf("no free loop device: %v", err)
		}
		name := "/dev/loop" + strconv.Itoa(n)
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skipf("no node for a free loop device: %v", err)
		}
		config := unix.LoopConfig{Fd: uint32(backing), Size: sector}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		if err := unix.IoctlLoopConfigure(fd, &config); err != nil {
			_ = unix.Close(fd)
			if err == unix.EBUSY {
				continue
			}
			t.Skipf("loop device with %d-byte sectors: %v", sector, err)
		}
		t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
		return name
	}
	t.Skip("loop devices are taken faster than this test can")
	return ""
}

func BenchmarkResolve(b *testing.B) {
	set := maptest.NewSet(64*mib, 64*mib, 64*mib, 64*mib)
	_, err := extentmap.Format(set.Drives(), extentmap.FormatOptions{})
	require.NoError(b, err)
	v := open(b, set.Drives(), extentmap.Options{})
	p := createPool(b, v, spec("p", 20))
	ticket, err := p.AddRow()
	require.NoError(b, err)
	require.NoError(b, ticket.Wait())
	d, unit, _, _ := p.Extent(7, 3)
	b.ReportAllocs()
	for b.Loop() {
		v.Resolve(d, unit)
	}
}

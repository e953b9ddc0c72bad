package ondisk

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func testLabel() *Label {
	l := &Label{
		Version: Version, Compat: 0xf0, Unit: 0, Volume: [16]byte{1}, Drive: [16]byte{2},
		Index: 1, Width: 2, LBAShift: 12, Clean: true, Units: 16384,
		Region: Region{SuperblockUnit: 1, JournalUnit: 3, JournalBlocks: 256, CatalogUnit: 259, CatalogBlocks: 70,
			SegmentUnit: 448, SegmentUnits: 64, Segments: 248},
		Epoch: 7, Nonce: 8, Predecessor: 9, Base: 6, Holders: 3, Metadata: 3, Sequence: 11,
		CreationTime: 12, Name: "kv0",
	}
	l.Members[0] = Member{UUID: [16]byte{3}, State: DriveActive, Units: 16384}
	l.Members[1] = Member{UUID: [16]byte{2}, State: DriveActive, Units: 16384}
	l.Members[5] = Member{UUID: [16]byte{4}, State: DriveRemoved, Units: 99}
	return l
}

func testSuperblock() *Superblock {
	return &Superblock{
		Unit: 2, Sequence: 5, Volume: [16]byte{1}, Epoch: 7, Nonce: 8, Tail: 1000, Chain: 77, CatalogArea: 1,
		CatalogBlocks: 3, CatalogCRC: 99, CatalogBytes: 9000, CatalogSeq: 4, NextCommit: 123456, Time: 1e18,
	}
}

func testRecord() *Record {
	return &Record{
		Key: Key{1, 2}, Parent: Key{3}, Nonce: 4, Generation: 5, Sequence: 6, CommitTime: 7, LastHit: 8, Hits: 9,
		Tenant: 10, Owner: 11, Tokens: 12, Position: 13, State: StateCommitted,
	}
}

func TestSizes(t *testing.T) {
	require.Equal(t, BlockBytes, tableHeaderBytes+RecordsPerBlock*RecordBytes)
	require.Equal(t, 128, tableHeaderBytes)
	require.LessOrEqual(t, labelEnd, BlockBytes)
	require.Equal(t, 144, PutBytes)
	require.Equal(t, 16, FreeBytes)
	require.Equal(t, BlockBytes, RecordOffset(31)-tableHeaderBytes)
	require.Len(t, AppendPut(nil, 1, 2, testRecord()), PutBytes)
	require.Len(t, AppendFree(nil, 1, 2), FreeBytes)
	require.Len(t, (&Row{Entries: make([]Locator, 4)}).Append(nil), RowEntrySize(4))
}

func TestRoundTrips(t *testing.T) {
	b := make([]byte, BlockBytes)
	l := testLabel()
	l.Encode(b)
	got, err := DecodeLabel(b, 0)
	require.NoError(t, err)
	require.Equal(t, l, got)

	s := testSuperblock()
	s.Encode(b)
	gotS, err := DecodeSuperblock(b, 2, s.Volume)
	require.NoError(t, err)
	require.Equal(t, s, gotS)

	r := testRecord()
	r.Encode(b)
	require.True(t, ValidRecord(b))
	var gotR Record
	gotR.Decode(b)
	require.Equal(t, *r, gotR)
}

// recorder is a visitor that encodes what it is given.
type recorder struct{ b []byte }

func (r *recorder) Pool(e *Pool) error     { r.b = e.Append(r.b); return nil }
func (r *recorder) Family(e *Family) error { r.b = e.Append(r.b); return nil }
func (r *recorder) Tenant(e *Tenant) error { r.b = e.Append(r.b); return nil }
func (r *recorder) Row(e *Row) error       { r.b = e.Append(r.b); return nil }
func (r *recorder) Limits(e *Limits) error { r.b = e.Append(r.b); return nil }
func (r *recorder) DropRow(e DropRow) error {
	r.b = e.Append(r.b)
	return nil
}

func (r *recorder) Free(e Free) error {
	r.b = AppendFree(r.b, e.Pool, e.Slot)
	return nil
}

func (r *recorder) Put(e Put) error {
	var x Record
	x.Decode(e.Record)
	r.b = AppendPut(r.b, e.Pool, e.Slot, &x)
	return nil
}

func testStream() []byte {
	p := Pool{ID: 3, Family: 1, TokensPerFile: 256, TrailingHit: 2, MaxSlots: 7, MinBytes: 8, MaxBytes: 9,
		CreationTime: 10, SlotUnits: 17, EntryShift: 2, ChecksumAlg: 1, Digest: [32]byte{5},
		Name: "llama", Identity: []byte("{}"), Geometry: []byte("geo")}
	b := (&Family{ID: 1, Name: "hybrid"}).Append(nil)
	b = (&Tenant{ID: 4, Quota: 5, Name: "lora"}).Append(b)
	b = (&Tenant{}).Append(b)
	b = p.Append(b)
	b = (&Limits{Pool: 3, MaxSlots: 1, MinBytes: 2, MaxBytes: 3}).Append(b)
	b = (&Row{Pool: 3, Number: 9, Tables: [2]Locator{Locate(0, 5), Locate(1, 6)},
		Entries: []Locator{Locate(0, 448), Locate(1, 512)}}).Append(b)
	b = AppendPut(b, 3, 100, testRecord())
	b = AppendFree(b, 3, 101)
	return (&DropRow{Pool: 3, Number: 9}).Append(b)
}

func TestEntriesRoundTrip(t *testing.T) {
	b := testStream()
	var r recorder
	require.NoError(t, VisitEntries(b, &r))
	require.Equal(t, b, r.b)
	for n := 1; n < len(b); n++ {
		err := VisitEntries(b[:n], &recorder{})
		if err != nil {
			continue
		}
		// A cut between entries is a shorter stream.
		r = recorder{}
		require.NoError(t, VisitEntries(b[:n], &r))
		require.Equal(t, b[:n], r.b)
	}
}

// TestEveryBitCounts flips each bit of each kind of block: none may be read as valid.
func TestEveryBitCounts(t *testing.T) {
	id := TableID{Pool: 3, Row: 4, Block: 5}
	at := Locate(1, 77)
	j := &Journal{First: 3, Blocks: 16, Tag: 42, Nonce: 8}
	kinds := map[string]struct {
		fill  func(b []byte)
		check func(b []byte) error
	}{
		"label": {func(b []byte) { testLabel().Encode(b) },
			func(b []byte) error { _, err := DecodeLabel(b, 0); return err }},
		"superblock": {func(b []byte) { testSuperblock().Encode(b) },
			func(b []byte) error { _, err := DecodeSuperblock(b, 2, [16]byte{1}); return err }},
		"table": {func(b []byte) { testRecord().Encode(BlockRecord(b, 30)); SealTable(b, at, 42, 9, id) },
			func(b []byte) error { _, err := OpenTable(b, at, 42, id); return err }},
		"catalog": {func(b []byte) { SealCatalog(b, 300, 2, 42, 9, []byte("payload")) },
			func(b []byte) error { _, err := OpenCatalog(b, 300, 2, 42, 9); return err }},
		"journal": {func(b []byte) { j.Seal(b, BatchBlock{20, 5, 0, 1}, []byte("payload")) },
			func(b []byte) error { _, _, err := j.Open(b, 20); return err }},
	}
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			b := make([]byte, BlockBytes)
			k.fill(b)
			require.NoError(t, k.check(b))
			for i := range BlockBytes * 8 {
				b[i/8] ^= 1 << (i % 8)
				require.Error(t, k.check(b), "bit %d", i)
				b[i/8] ^= 1 << (i % 8)
			}
			require.NoError(t, k.check(b))
			require.Error(t, k.check(make([]byte, BlockBytes)))
			require.Error(t, k.check(b[:100]))
		})
	}
}

// TestBlocksElsewhere reads valid blocks as if they lay in another place.
func TestBlocksElsewhere(t *testing.T) {
	b := make([]byte, BlockBytes)
	testLabel().Encode(b)
	_, err := DecodeLabel(b, 16383)
	require.ErrorIs(t, err, ErrAddress)
	testSuperblock().Encode(b)
	_, err = DecodeSuperblock(b, 1, [16]byte{1})
	require.ErrorIs(t, err, ErrAddress)
	_, err = DecodeSuperblock(b, 2, [16]byte{9})
	require.ErrorIs(t, err, ErrAddress)
	id := TableID{Pool: 3, Row: 4, Block: 5}
	SealTable(b, Locate(1, 77), 42, 9, id)
	for _, c := range []struct {
		at  Locator
		tag uint64
		id  TableID
	}{
		{Locate(1, 78), 42, id}, {Locate(2, 77), 42, id}, {Locate(1, 77), 43, id},
		{Locate(1, 77), 42, TableID{3, 4, 6}},
		{Locate(1, 77), 42, TableID{3, 5, 5}}, {Locate(1, 77), 42, TableID{4, 4, 5}},
	} {
		_, err := OpenTable(b, c.at, c.tag, c.id)
		require.ErrorIs(t, err, ErrAddress)
	}
}

func TestLabelVersions(t *testing.T) {
	b := make([]byte, BlockBytes)
	l := testLabel()
	l.Version = 2
	l.Encode(b)
	got, err := DecodeLabel(b, 0)
	require.ErrorIs(t, err, ErrVersion)
	require.Equal(t, l.Drive, got.Drive)
	l = testLabel()
	l.Incompat |= 1 << 9
	l.Encode(b)
	got, err = DecodeLabel(b, 0)
	require.ErrorIs(t, err, ErrFeature)
	require.Equal(t, uint16(1), got.Index)
	l = testLabel()
	l.Incompat = FeatureDraft
	l.Encode(b)
	got, err = DecodeLabel(b, 0)
	require.ErrorIs(t, err, ErrDraft)
	require.Equal(t, uint16(1), got.Index)
	l = testLabel()
	l.Compat, l.ROCompat = ^uint64(0), 1<<5
	l.Encode(b)
	got, err = DecodeLabel(b, 0)
	require.NoError(t, err)
	require.Equal(t, l, got)
}

// TestLabelFields changes one field of a valid label at a time to what no volume has.
func TestLabelFields(t *testing.T) {
	for i, f := range []func(*Label){
		func(l *Label) { l.Width = 0 },
		func(l *Label) { l.Width = 65 },
		func(l *Label) { l.LBAShift = 10 },
		func(l *Label) { l.Units = 4 },
		func(l *Label) { l.Units++ },
		func(l *Label) { l.Index = 2 },
		func(l *Label) { l.Index = 64 },
		func(l *Label) { l.Metadata = 0 },
		func(l *Label) { l.Metadata = 1 << 6 },
		func(l *Label) { l.Holders = 1 << 63 },
		func(l *Label) { l.Name = "a\nb" },
		func(l *Label) { l.Drive[5]++ },
		func(l *Label) { l.Members[9].Units = 5 },
		func(l *Label) { l.Members[1].State = 7 },
		func(l *Label) { l.Region.SegmentUnits = 65 },
		func(l *Label) { l.Region.SegmentUnits = 0 },
		func(l *Label) { l.Region.SegmentUnits = 32 },
		func(l *Label) { l.Region.SegmentUnits = 1 << 19 },
		func(l *Label) { l.Region.Segments = 249 },
		func(l *Label) { l.Region.Segments = 0 },
		func(l *Label) { l.Region.SegmentUnit = 384 },
		func(l *Label) { l.Region.SegmentUnit = ^uint64(0) &^ 63 },
		func(l *Label) { l.Region.JournalBlocks = ^uint64(0) },
		func(l *Label) { l.Region.CatalogBlocks = 1 << 63 },
		func(l *Label) { l.Region.CatalogUnit++ },
		func(l *Label) { l.Region.JournalUnit = 4 },
		func(l *Label) { l.Region.SuperblockUnit = 0 },
		func(l *Label) { l.Compat, l.Extension[3] = 0, 1 },
	} {
		l := testLabel()
		f(l)
		b := make([]byte, BlockBytes)
		l.Encode(b)
		_, err := DecodeLabel(b, l.Unit)
		require.ErrorIs(t, err, ErrField, "change %d", i)
	}
}

// TestReservedBytes: what docs/format.md calls zero is zero, under a right checksum too.
func TestReservedBytes(t *testing.T) {
	at, id := Locate(1, 77), TableID{Pool: 3, Row: 4, Block: 5}
	j := &Journal{First: 3, Blocks: 16, Tag: 42, Nonce: 8}
	for name, k := range map[string]struct {
		label    bool
		fill     func(b []byte)
		open     func(b []byte) error
		reserved [][2]int
	}{
		"label": {true, func(b []byte) { l := testLabel(); l.Compat = 0; l.Encode(b) },
			func(b []byte) error { _, err := DecodeLabel(b, 0); return err },
			[][2]int{{87, 88}, {156, 160}, {224, 232}, {235, 512}, {512 + 25, 544}, {512 + 63*32 + 25, 2560}, {2560, 4096}}},
		"superblock": {false, func(b []byte) { testSuperblock().Encode(b) },
			func(b []byte) error { _, err := DecodeSuperblock(b, 2, [16]byte{1}); return err },
			[][2]int{{32, 64}, {160, 4096}}},
		"journal": {false, func(b []byte) { j.Seal(b, BatchBlock{20, 5, 0, 1}, []byte("payload")) },
			func(b []byte) error { _, _, err := j.Open(b, 20); return err },
			[][2]int{{56, 64}, {64 + 7, 4096}}},
		"catalog": {false, func(b []byte) { SealCatalog(b, 300, 2, 42, 9, []byte("payload")) },
			func(b []byte) error { _, err := OpenCatalog(b, 300, 2, 42, 9); return err },
			[][2]int{{40, 64}, {64 + 7, 4096}}},
		"table": {false, func(b []byte) { SealTable(b, at, 42, 9, id) },
			func(b []byte) error { _, err := OpenTable(b, at, 42, id); return err },
			[][2]int{{34, 36}, {44, 128}}},
	} {
		t.Run(name, func(t *testing.T) {
			b := make([]byte, BlockBytes)
			for _, r := range k.reserved {
				for i := r[0]; i < r[1]; i++ {
					clear(b)
					k.fill(b)
					require.Zero(t, b[i], "byte %d", i)
					b[i] = 0x40
					repair(b, k.label)
					require.ErrorIs(t, k.open(b), ErrField, "byte %d", i)
				}
			}
		})
	}
}

// TestLabelExtension: who does not know a feature keeps what it put into the label.
func TestLabelExtension(t *testing.T) {
	for _, set := range []func(*Label){func(l *Label) { l.Compat = 1 << 40 }, func(l *Label) { l.ROCompat = 1 << 3 }} {
		l := testLabel()
		l.Compat = 0
		set(l)
		for i := range l.Extension {
			l.Extension[i] = byte(i)
		}
		b := make([]byte, BlockBytes)
		l.Encode(b)
		got, err := DecodeLabel(b, 0)
		require.NoError(t, err)
		require.Equal(t, l, got)
	}
}

// ring is a journal for tests: batches of entries, sealed.
type ring struct {
	j     Journal
	b     []byte
	seq   uint64
	chain uint32
}

func newRing(blocks uint64) *ring {
	return &ring{j: Journal{First: 3, Blocks: blocks, Tag: 42, Nonce: 8}, b: make([]byte, blocks*BlockBytes)}
}

func (r *ring) add(payloads ...[]byte) {
	for i, p := range payloads {
		off := r.seq % r.j.Blocks * BlockBytes
		r.chain = r.j.Seal(r.b[off:], BatchBlock{r.seq, r.chain, uint32(i), uint32(len(payloads))}, p)
		r.seq++
	}
}

func (r *ring) block(s uint64) []byte {
	off := s % r.j.Blocks * BlockBytes
	return r.b[off : off+BlockBytes]
}

func replayAll(t *testing.T, r *ring, copies [][]byte, tail uint64, chain uint32) ([]string, Scan) {
	t.Helper()
	var got []string
	scan, err := r.j.Replay(copies, tail, chain, func(_ uint64, b []byte) error {
		got = append(got, string(b))
		return nil
	})
	require.NoError(t, err)
	return got, scan
}

func TestReplay(t *testing.T) {
	r := newRing(8)
	r.add([]byte("one"))
	r.add([]byte("tw"), []byte("o"))
	r.add([]byte("three"))
	got, scan := replayAll(t, r, [][]byte{r.b}, 0, 0)
	require.Equal(t, []string{"one", "two", "three"}, got)
	require.Equal(t, Scan{Head: 4, Chain: r.chain}, scan)

	// Each block may come from either copy.
	other := bytes.Clone(r.b)
	r.block(0)[100] ^= 1
	r.block(2)[100] ^= 1
	other[BlockBytes+70] ^= 1
	got, scan = replayAll(t, r, [][]byte{r.b, other, nil}, 0, 0)
	require.Equal(t, []string{"one", "two", "three"}, got)
	require.Equal(t, 3+4, scan.Bad)

	// Block 1 on neither copy: the batch in the middle was acknowledged, and is damaged.
	r.block(1)[100] ^= 1
	got, scan = replayAll(t, r, [][]byte{r.b, other}, 0, 0)
	require.Equal(t, []string{"one"}, got)
	require.True(t, scan.Damaged)
	require.Equal(t, uint64(1), scan.Head)

	// A last batch that is not whole never happened, whichever of its blocks made it.
	r = newRing(8)
	r.add([]byte("one"))
	r.add([]byte("t"), []byte("w"), []byte("o"))
	r.block(2)[4000] ^= 1
	got, scan = replayAll(t, r, [][]byte{r.b}, 0, 0)
	require.Equal(t, []string{"one"}, got)
	require.False(t, scan.Damaged)
}

func TestReplayWrapsAndStops(t *testing.T) {
	r := newRing(8)
	for i := range 21 {
		r.add([]byte{byte(i)})
	}
	chain := binary.LittleEndian.Uint32(r.block(14))
	got, scan := replayAll(t, r, [][]byte{r.b}, 15, chain)
	require.Len(t, got, 6)
	require.Equal(t, uint64(21), scan.Head)
	// A whole ring of valid blocks ends after one lap.
	got, scan = replayAll(t, r, [][]byte{r.b}, 13, binary.LittleEndian.Uint32(r.block(20))+1)
	require.Empty(t, got)
	require.True(t, scan.Damaged, "the chain is broken, and later batches are there")
	// Another mount's nonce, and another volume's tag, are not ours.
	r.j.Nonce++
	got, _ = replayAll(t, r, [][]byte{r.b}, 15, chain)
	require.Empty(t, got)
}

func TestRecordRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		var b, out [RecordBytes]byte
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		b[RecordStateOff], b[121], b[122], b[123] = byte(StateCommitted), 0, 0, 0
		clear(b[124:])
		require.True(t, ValidRecord(b[:]))
		var r Record
		r.Decode(b[:])
		r.Encode(out[:])
		require.Equal(t, b, out)
	}
	var zero [RecordBytes]byte
	require.True(t, ValidRecord(zero[:]))
	for i := range zero {
		zero[i] = 2
		require.False(t, ValidRecord(zero[:]), "byte %d", i)
		zero[i] = 0
	}
}

func TestVisitorErrorsStop(t *testing.T) {
	var calls int
	err := VisitEntries(testStream(), stopper{&calls})
	require.ErrorIs(t, err, ErrShort)
	require.Equal(t, 1, calls)
}

type stopper struct{ calls *int }

func (s stopper) stop() error           { *s.calls++; return ErrShort }
func (s stopper) Pool(*Pool) error      { return s.stop() }
func (s stopper) Family(*Family) error  { return s.stop() }
func (s stopper) Tenant(*Tenant) error  { return s.stop() }
func (s stopper) Row(*Row) error        { return s.stop() }
func (s stopper) Limits(*Limits) error  { return s.stop() }
func (s stopper) DropRow(DropRow) error { return s.stop() }
func (s stopper) Put(Put) error         { return s.stop() }
func (s stopper) Free(Free) error       { return s.stop() }

// repair puts a right checksum under mutated bytes, so that fuzzing reaches the fields behind it.
func repair(b []byte, label bool) {
	if len(b) != BlockBytes {
		return
	}
	if label {
		copy(b, LabelMagic)
		binary.LittleEndian.PutUint32(b[8:], labelCRC(b))
		return
	}
	binary.LittleEndian.PutUint32(b, CRC(b[4:]))
}

// patched puts bytes over a valid block: mutated patches stay close to what a decoder accepts.
func patched(b []byte, off uint16, patch []byte) []byte {
	b = bytes.Clone(b)
	if int(off) < len(b) {
		copy(b[off:], patch)
	}
	return b
}

func FuzzLabel(f *testing.F) {
	valid := make([]byte, BlockBytes)
	testLabel().Encode(valid)
	f.Add(uint16(80), []byte{1, 0, 2}, uint64(0))
	f.Fuzz(func(t *testing.T, off uint16, patch []byte, unit uint64) {
		b := patched(valid, off, patch)
		_, _ = DecodeLabel(b, unit)
		_, _ = DecodeLabel(patch, unit)
		repair(b, true)
		l, err := DecodeLabel(b, unit)
		if err != nil {
			return
		}
		out := make([]byte, BlockBytes)
		l.Encode(out)
		require.Equal(t, b, out)
	})
}

func FuzzSuperblock(f *testing.F) {
	valid := make([]byte, BlockBytes)
	testSuperblock().Encode(valid)
	f.Add(uint16(104), []byte{1}, uint64(2))
	f.Fuzz(func(t *testing.T, off uint16, patch []byte, unit uint64) {
		b := patched(valid, off, patch)
		_, _ = DecodeSuperblock(patch, unit, [16]byte{1})
		repair(b, false)
		s, err := DecodeSuperblock(b, unit, [16]byte{1})
		if err != nil {
			return
		}
		out := make([]byte, BlockBytes)
		s.Encode(out)
		require.Equal(t, b, out)
	})
}

func FuzzTable(f *testing.F) {
	id := TableID{Pool: 3, Row: 4, Block: 5}
	valid := make([]byte, BlockBytes)
	testRecord().Encode(BlockRecord(valid, 0))
	SealTable(valid, Locate(1, 77), 42, 9, id)
	f.Add(uint16(248), []byte{1})
	f.Fuzz(func(t *testing.T, off uint16, patch []byte) {
		b := patched(valid, off, patch)
		_, _ = OpenTable(patch, Locate(1, 77), 42, id)
		repair(b, false)
		seq, err := OpenTable(b, Locate(1, 77), 42, id)
		if err != nil {
			return
		}
		out := bytes.Clone(b)
		for i := range RecordsPerBlock {
			if rec := BlockRecord(out, i); ValidRecord(rec) {
				var r Record
				r.Decode(rec)
				r.Encode(rec)
			}
		}
		SealTable(out, Locate(1, 77), 42, seq, id)
		require.Equal(t, b, out)
	})
}

func FuzzCatalogBlock(f *testing.F) {
	valid := make([]byte, BlockBytes)
	SealCatalog(valid, 300, 2, 42, 9, testStream())
	f.Add(uint16(32), []byte{2})
	f.Fuzz(func(t *testing.T, off uint16, patch []byte) {
		b := patched(valid, off, patch)
		_, _ = OpenCatalog(patch, 300, 2, 42, 9)
		repair(b, false)
		p, err := OpenCatalog(b, 300, 2, 42, 9)
		if err != nil {
			return
		}
		out := make([]byte, BlockBytes)
		SealCatalog(out, 300, 2, 42, 9, p)
		require.Equal(t, b, out)
	})
}

func FuzzEntries(f *testing.F) {
	f.Add(testStream())
	f.Fuzz(func(t *testing.T, b []byte) {
		var r recorder
		if VisitEntries(b, &r) == nil {
			require.True(t, bytes.Equal(b, r.b))
		}
	})
}

func FuzzJournal(f *testing.F) {
	r := newRing(4)
	r.add([]byte("one"))
	r.add([]byte("tw"), []byte("o"))
	f.Add(uint16(40), []byte{1}, uint64(0), uint32(0))
	f.Fuzz(func(t *testing.T, off uint16, patch []byte, tail uint64, chain uint32) {
		b := patched(r.b, off, patch)
		for i := 0; i+BlockBytes <= len(b); i += BlockBytes {
			repair(b[i:i+BlockBytes], false)
		}
		tail %= 1 << 60
		last := tail
		scan, err := r.j.Replay([][]byte{b, patch}, tail, chain, func(s uint64, _ []byte) error {
			require.GreaterOrEqual(t, s, last)
			last = s
			return nil
		})
		require.NoError(t, err)
		require.LessOrEqual(t, scan.Head-tail, r.j.Blocks)
		for s := range r.j.Blocks {
			block := b[s*BlockBytes : (s+1)*BlockBytes]
			if at, p, err := r.j.Open(block, s); err == nil {
				out := make([]byte, BlockBytes)
				r.j.Seal(out, at, p)
				require.Equal(t, block, out)
			}
		}
	})
}

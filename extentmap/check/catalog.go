package check

import (
	"fmt"
	"maps"
	"slices"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

const (
	// readBlocks is how much of a structure is read at once.
	readBlocks = 256
	// checksumAlgorithm is the only one of this version.
	checksumAlgorithm = 1
	// streamBytesMax bounds the catalog that is believed: a volume's rows and pools need far less.
	streamBytesMax = 4 << 30
)

// checkCatalog compares the catalog's copies, and takes pools, families, tenants and rows from it.
func (c *checker) checkCatalog() error {
	s, r := c.super, &c.label.Region
	if uint64(s.CatalogBlocks) > r.CatalogBlocks || s.CatalogBytes > streamBytesMax {
		return c.salvageCatalog(nil, errorf("catalog", adviceLost, "not checked: the superblock names %d blocks, "+
			"an area has %d", s.CatalogBlocks, r.CatalogBlocks))
	}
	first := r.CatalogUnit + uint64(s.CatalogArea)*r.CatalogBlocks
	payloads := make([][]byte, s.CatalogBlocks)
	for _, m := range c.metadata() {
		if m.behind {
			continue
		}
		if err := c.readCatalog(m, first, payloads); err != nil {
			return err
		}
	}
	var stream []byte
	for i, p := range payloads {
		if p == nil {
			return c.salvageCatalog(stream, errorf("catalog", adviceLost,
				"block %d is whole on no metadata drive: the pools and rows in it are not known", i))
		}
		stream = append(stream, p...)
	}
	if uint64(len(stream)) != s.CatalogBytes || ondisk.CRC(stream) != s.CatalogCRC {
		return c.salvageCatalog(stream, errorf("catalog", adviceLost,
			"%d bytes with checksum %#x, the superblock says %d with %#x", len(stream), ondisk.CRC(stream),
			s.CatalogBytes, s.CatalogCRC))
	}
	return c.takeCatalog(stream)
}

// takeCatalog brings a stream's entries into memory.
func (c *checker) takeCatalog(stream []byte) error {
	if err := ondisk.VisitEntries(stream, &entries{c: c, from: "catalog"}); err != nil {
		c.must(c.volume(errorf("catalog", "report this as a defect: the checksum is right", "%v", err).
			ask("what follows is left out")), "the catalog cannot be read to its end")
	}
	return nil
}

// readCatalog reads one drive's copy and fills in the payloads that are not there yet.
func (c *checker) readCatalog(m *member, first uint64, payloads [][]byte) error {
	b := drive.AlignedBuffer(min(readBlocks, len(payloads)) * ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	const advice = "another copy is whole; the next mount writes it anew"
	const fix = "the catalog is written anew"
	for at := 0; at < len(payloads); at += readBlocks {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		part := b[:min(readBlocks, len(payloads)-at)*ondisk.BlockBytes]
		whole := read(m, part, first+uint64(at))
		for i := 0; i*ondisk.BlockBytes < len(part); i++ {
			n := at + i
			block := part[i*ondisk.BlockBytes:][:ondisk.BlockBytes]
			var p []byte
			err := whole
			if err != nil { // one bad block must not take its neighbours along
				err = read(m, block, first+uint64(n))
			}
			if err == nil {
				p, err = ondisk.OpenCatalog(block, first, uint32(n), c.tag, c.super.CatalogSeq)
			}
			switch {
			case err != nil:
				c.at(m, first+uint64(n), errorf("catalog", advice, "block %d is bad: %v", n, err).safe(fix))
			case payloads[n] == nil:
				payloads[n] = slices.Clone(p)
			case string(payloads[n]) != string(p):
				c.at(m, first+uint64(n), errorf("catalog", advice, "block %d differs from the other copy", n).safe(fix))
			}
		}
	}
	return nil
}

// pool is a pool and what the checker knows of its rows.
type pool struct {
	ondisk.Pool
	layout      *stripe.Layout // nil if the pool cannot be understood
	slotsPerRow uint32
	tableBlocks uint32
	rows        map[uint32]*row
	numbered    []*row   // by number
	files       uint64   // committed slots
	index       []uint32 // open addressing by key: slot numbers + 1
}

// row is a row of a pool.
type row struct {
	ondisk.Row
	pool    *pool
	fresh   bool // from the journal: no checkpoint has written its tables
	changes []change
	table   []byte // as read, changes applied
	given   bool   // dropped by the journal: its space is free when a checkpoint has said so
	gone    bool   // dropped by a repair
	// writes says by block which copies of the table a repair writes; nil if none.
	writes []copies
}

// change is what the journal does to a slot of a row: a record, or nil to free it.
type change struct {
	index  uint32
	record []byte
}

// entries takes in what catalog and journal say. Its methods never fail: what is wrong is reported and left out.
type entries struct {
	c    *checker
	from string // "catalog" or "journal"
}

const (
	adviceEntry = "have it repaired; or mount it read-only, save what is needed, and format it anew"
	fixEntry    = "it is left out"
)

// complain reports an entry that is wrong, and says what becomes of it. Nothing can be written while one stands that
// shall not be repaired: the catalog is written from what is in memory.
func (e *entries) complain(fix, format string, args ...any) bool {
	return e.c.must(e.c.volume(errorf(e.from, adviceEntry, format, args...).ask(fix)),
		"the "+e.from+" has entries that are wrong")
}

func (e *entries) leaveOut(format string, args ...any) error {
	e.complain(fixEntry, format, args...)
	return nil
}

func (e *entries) Pool(p *ondisk.Pool) error {
	c := e.c
	if c.pools[p.ID] != nil || c.dropped[p.ID] {
		return e.leaveOut("pool %d is there twice", p.ID)
	}
	q := &pool{Pool: *p, rows: make(map[uint32]*row)}
	q.Identity, q.Geometry = slices.Clone(p.Identity), slices.Clone(p.Geometry)
	if other, twice := c.poolNames[p.Name]; twice {
		if e.complain("the later one gets another name", "pools %d and %d have the name %q", other, p.ID, p.Name) {
			q.Name = c.freeName(q)
		}
	}
	c.result.Pools++
	if p.Family != 0 && c.families[p.Family] == "" {
		if e.complain("it gets none", "pool %d (%s): family %d does not exist", p.ID, p.Name, p.Family) {
			q.Family = 0
		}
	}
	if p.MaxBytes != 0 && p.MinBytes > p.MaxBytes {
		if e.complain("it gets no minimum", "pool %d (%s): minimum %d above maximum %d", p.ID, p.Name, p.MinBytes,
			p.MaxBytes) {
			q.MinBytes = 0
		}
	}
	const fix = "it is given up with all its files"
	switch err := q.layOut(c.label); {
	case err != nil && e.complain(fix, "pool %d (%s): %v", p.ID, p.Name, err),
		err == nil && p.ChecksumAlg != checksumAlgorithm &&
			e.complain(fix, "pool %d (%s): unknown checksum algorithm %d", p.ID, p.Name, p.ChecksumAlg):
		c.dropped[p.ID] = true
		c.result.Pools--
		return nil
	}
	c.pools[p.ID], c.poolNames[q.Name] = q, p.ID
	return nil
}

// freeName makes a name for a pool whose own is taken.
func (c *checker) freeName(q *pool) string {
	for n := uint32(q.ID); ; n++ {
		suffix := fmt.Sprintf("~%d", n)
		name := q.Name[:min(len(q.Name), ondisk.MaxNameBytes-len(suffix))] + suffix
		if _, taken := c.poolNames[name]; !taken {
			return name
		}
	}
}

// layOut computes the pool's shape; layout stays nil when it fails.
func (q *pool) layOut(l *ondisk.Label) error {
	g, err := stripe.ParseGeometry(q.Geometry)
	if err != nil {
		return err
	}
	layout, err := stripe.NewLayout(g, int(l.Width))
	if err != nil {
		return err
	}
	if layout.SlotUnits() != q.SlotUnits {
		return fmt.Errorf("slot of %d units, its geometry says %d", q.SlotUnits, layout.SlotUnits())
	}
	q.slotsPerRow = layout.SlotsPerRow(q.entryUnits(l))
	q.tableBlocks = ondisk.TableBlocks(q.slotsPerRow)
	switch {
	case q.slotsPerRow == 0:
		return fmt.Errorf("a slot of %d units does not fit an entry of %d", q.SlotUnits, q.entryUnits(l))
	case q.tableBlocks > l.Region.SegmentUnits:
		return fmt.Errorf("a record table of %d blocks does not fit a segment of %d", q.tableBlocks,
			l.Region.SegmentUnits)
	}
	q.layout = layout
	return nil
}

func (q *pool) entryUnits(l *ondisk.Label) uint64 {
	return uint64(l.Region.SegmentUnits) << q.EntryShift
}

func (e *entries) Limits(l *ondisk.Limits) error {
	q := e.c.pools[l.Pool]
	if q == nil {
		return e.orphan(l.Pool, "limits of pool %d, which does not exist", l.Pool)
	}
	q.MinBytes, q.MaxBytes, q.MaxSlots = l.MinBytes, l.MaxBytes, l.MaxSlots
	return nil
}

// orphan reports an entry of a pool that does not exist. Those of a pool that is given up go with it.
func (e *entries) orphan(id uint16, format string, args ...any) error {
	if e.c.dropped[id] {
		return nil
	}
	return e.leaveOut(format, args...)
}

func (e *entries) Family(f *ondisk.Family) error {
	if name := e.c.families[f.ID]; name != "" && name != f.Name {
		return e.leaveOut("family %d is there twice, as %q and %q", f.ID, name, f.Name)
	}
	e.c.families[f.ID] = f.Name
	return nil
}

func (e *entries) Tenant(t *ondisk.Tenant) error {
	if _, twice := e.c.tenants[t.ID]; twice && e.from == "catalog" {
		return e.leaveOut("tenant %d is there twice", t.ID)
	}
	e.c.tenants[t.ID] = *t
	return nil
}

func (e *entries) Row(r *ondisk.Row) error {
	c := e.c
	q := c.pools[r.Pool]
	switch {
	case q == nil:
		return e.orphan(r.Pool, "row %d of pool %d, which does not exist", r.Number, r.Pool)
	case q.layout == nil:
		return nil // said already
	case q.rows[r.Number] != nil:
		return e.leaveOut("row %d of pool %d is there twice", r.Number, r.Pool)
	case len(r.Entries) != int(c.label.Width):
		return e.leaveOut("row %d of pool %d has %d entries, the volume's width is %d", r.Number, r.Pool,
			len(r.Entries), c.label.Width)
	case uint64(r.Number)*uint64(q.slotsPerRow)+uint64(q.slotsPerRow) >= 1<<32-1, uint64(r.Number) >= c.rowsMax(q):
		return e.leaveOut("row %d of pool %d: its slots have no numbers", r.Number, r.Pool)
	}
	x := &row{Row: *r, pool: q, fresh: e.from == "journal"}
	q.rows[r.Number] = x
	c.result.Rows++
	if !c.claimRow(x) {
		c.dropRow(x)
	}
	return nil
}

// addable is how many drives of the largest one's size may be added in one mount: row numbers are for those, too.
const addable = 8

// rowsMax bounds the numbers of a pool's rows.
func (c *checker) rowsMax(q *pool) uint64 {
	r := &c.label.Region
	segments, largest := uint64(0), uint64(0)
	for i := range c.label.Members {
		if s := &c.label.Members[i]; s.State == ondisk.DriveActive && s.Units > r.SegmentUnit {
			n := min((s.Units-1-r.SegmentUnit)/uint64(r.SegmentUnits), ondisk.MaxSegments)
			segments, largest = segments+n, max(largest, n)
		}
	}
	return (segments + addable*largest) / (uint64(c.label.Width) << q.EntryShift)
}

// dropRow gives a row up, and its files with it.
func (c *checker) dropRow(r *row) {
	r.gone = true
	if r.pool.rows[r.Number] == r {
		delete(r.pool.rows, r.Number)
		c.result.Rows--
	}
}

func (e *entries) DropRow(d ondisk.DropRow) error {
	if e.from == "catalog" {
		return e.leaveOut("a dropped row")
	}
	q := e.c.pools[d.Pool]
	switch {
	case q == nil:
		return e.orphan(d.Pool, "drops row %d of pool %d, which does not exist", d.Number, d.Pool)
	case q.rows[d.Number] == nil && q.layout != nil:
		return e.leaveOut("drops row %d of pool %d, which does not exist", d.Number, d.Pool)
	case q.layout == nil:
		return nil
	}
	q.rows[d.Number].given = true // its space stays claimed: nobody may have it before the next checkpoint
	delete(q.rows, d.Number)
	e.c.result.Rows--
	return nil
}

func (e *entries) Put(p ondisk.Put) error {
	if e.from == "catalog" {
		return e.leaveOut("a record")
	}
	var r ondisk.Record
	r.Decode(p.Record)
	e.c.journaled = max(e.c.journaled, r.Sequence+1)
	return e.change(p.Pool, p.Slot, slices.Clone(p.Record))
}

func (e *entries) Free(f ondisk.Free) error {
	if e.from == "catalog" {
		return e.leaveOut("a freed slot")
	}
	return e.change(f.Pool, f.Slot, nil)
}

func (e *entries) change(id uint16, slot uint32, record []byte) error {
	q := e.c.pools[id]
	if q == nil {
		return e.orphan(id, "changes slot %d of pool %d, which does not exist", slot, id)
	}
	if q.layout == nil {
		return nil
	}
	r := q.rows[slot/q.slotsPerRow]
	if r == nil {
		return e.leaveOut("changes slot %d of pool %d (%s), which has no row %d", slot, id, q.Name,
			slot/q.slotsPerRow)
	}
	r.changes = append(r.changes, change{slot % q.slotsPerRow, record})
	return nil
}

// encodeCatalog makes the stream of what is in memory, in the order in which the engine writes it.
func (c *checker) encodeCatalog() []byte {
	var b []byte
	for _, id := range slices.Sorted(maps.Keys(c.families)) {
		b = (&ondisk.Family{ID: id, Name: c.families[id]}).Append(b)
	}
	for _, id := range slices.Sorted(maps.Keys(c.tenants)) {
		t := c.tenants[id]
		b = t.Append(b)
	}
	for _, q := range c.sortedPools() {
		b = q.Append(b)
		for _, r := range q.numbered {
			b = r.Append(b)
		}
	}
	return b
}

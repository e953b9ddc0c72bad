package extentmap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	// checkpointSeconds is the default time between checkpoints.
	checkpointSeconds = 30
	// hitsInterval is the time between checkpoints that also write blocks in which only hits changed.
	hitsInterval = 10 * time.Minute
	// writeBlocks is the largest single write of a checkpoint.
	writeBlocks = 256
)

// Checkpoint writes all dirty metadata in place and advances the journal's head.
func (v *Volume) Checkpoint() error {
	if v.readOnly {
		return ErrReadOnly
	}
	v.queueMu.Lock()
	closing := v.closing
	v.queueMu.Unlock()
	if closing {
		return ErrClosed
	}
	return v.checkpoint(true)
}

// checkpointer runs checkpoints by time and when the journal is half full.
func (v *Volume) checkpointer() {
	defer v.background.Done()
	ticker := time.NewTicker(time.Duration(v.o.CheckpointSeconds) * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-v.stop:
			return
		case <-v.kick:
		case <-ticker.C:
		}
		if v.err() != nil {
			continue
		}
		if v.lacksMirror() {
			_ = v.exclusively(v.settleMembers) // a failure stops the volume, or costs another drive
		}
		v.checkpointMu.Lock()
		withHits := v.o.Now().Sub(v.lastHits) >= hitsInterval
		v.checkpointMu.Unlock()
		_ = v.checkpoint(withHits) // a failure stops the volume; Submit and Close report it
	}
}

// snapshot is what one checkpoint makes durable.
type snapshot struct {
	tail    uint64
	chain   uint32
	spans   []span
	seconds []span // those whose second copy is written first
	catalog []byte // nil if clean
	limbo   []*row
	vacated []vacancy
	commits uint64
	losses  uint64 // of drives, so far
}

// span is a run of blocks of a row's record table.
type span struct {
	row   *row
	first uint32
	n     uint32
	unit  uint64 // of the copy being written
}

// checkpoint writes what is dirty.
func (v *Volume) checkpoint(withHits bool) error {
	v.checkpointMu.Lock()
	defer v.checkpointMu.Unlock()
	return v.checkpointLocked(withHits)
}

// errDriveLost: a checkpoint lost a drive with record tables. Those need a second copy before the first is overwritten.
var errDriveLost = errors.New("extentmap: a drive with record tables is lost")

// checkpointLocked is checkpoint under checkpointMu. Drives that fail are lost, and it goes on without them. When it
// fails, the volume has failed: what was taken as clean is not.
func (v *Volume) checkpointLocked(withHits bool) error {
	var s *snapshot
	var super ondisk.Superblock
	for {
		if err := v.repairTables(); err != nil {
			return err
		}
		s = v.takeSnapshot(withHits)
		super = v.super
		v.labelMu.Lock()
		named := super.Epoch == v.common.Epoch && super.JournalNonce == v.journal.Nonce
		v.labelMu.Unlock()
		if named && s.idle(&super) {
			return nil
		}
		err := v.writeSnapshot(s, &super)
		if err == nil {
			break
		}
		if errors.Is(err, errDriveLost) {
			v.untake(s)
			continue
		}
		if !errors.Is(err, ErrFailed) {
			err = fmt.Errorf("%w: checkpoint: %w", ErrFailed, err)
		}
		v.fail(err)
		for _, r := range s.limbo {
			r.dropDone(err)
		}
		return err
	}
	if withHits {
		v.lastHits = v.o.Now()
	}
	v.applyMu.Lock()
	v.super, v.tail = super, s.tail
	if s.catalog != nil {
		v.catalog = s.catalog
	}
	v.room.Broadcast()
	v.applyMu.Unlock()
	v.checkpoints.Add(1)
	v.freeLimbo(s.limbo)
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range s.vacated {
		if m := v.member(x.at.Drive()); m != nil {
			m.releaseTable(x.at.Unit(), x.blocks)
		}
	}
	return nil
}

func (s *snapshot) idle(last *ondisk.Superblock) bool {
	return len(s.spans) == 0 && s.catalog == nil && len(s.limbo) == 0 && s.tail == last.Tail
}

// takeSnapshot fixes which journal block the checkpoint reaches and collects what is dirty. Blocks are copied later
// and may then contain more than that: replaying the journal over a newer block ends at the same state.
func (v *Volume) takeSnapshot(withHits bool) *snapshot {
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	s := &snapshot{tail: v.head, chain: v.chain, limbo: v.limbo, commits: v.commits.Load(), vacated: v.vacated,
		losses: v.losses.Load()}
	v.limbo, v.vacated = nil, nil
	if withHits {
		v.dirtyTouched()
	}
	rows := v.dirtyRows
	v.dirtyRows = nil
	for _, r := range rows {
		r.isDirty = false
		if r.pool.rowByNumber(r.number) != r {
			continue
		}
		if !v.covered(r, 0) && !v.covered(r, 1) {
			v.markAllDirty(r) // it has no place: tried again by the next checkpoint
			v.drivesChanged.Store(true)
			continue
		}
		s.spans = appendSpans(s.spans, r, r.dirty)
		if r.second != nil {
			s.seconds = appendSpans(s.seconds, r, r.second)
			r.second = nil
		}
		clear(r.dirty)
	}
	if v.catDirty {
		v.mu.Lock()
		s.catalog = v.encodeCatalog()
		v.mu.Unlock()
		v.catDirty = false
	}
	return s
}

// untake makes everything dirty again that a snapshot took.
func (v *Volume) untake(s *snapshot) {
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	for _, x := range s.spans {
		for b := x.first; b < x.first+x.n; b++ {
			v.markDirty(x.row, b)
		}
	}
	for _, x := range s.seconds {
		for b := x.first; b < x.first+x.n; b++ {
			v.markSecond(x.row, b)
		}
	}
	v.limbo = append(s.limbo, v.limbo...)
	v.vacated = append(s.vacated, v.vacated...)
	v.catDirty = v.catDirty || s.catalog != nil
}

// covered says whether a copy of a record table is on a drive that is in use.
func (v *Volume) covered(r *row, c int) bool {
	t := r.tables[c]
	return t != ondisk.NoLocator && !v.member(t.Drive()).lost()
}

// misplaced says whether a copy of a row's record table should lie elsewhere: it is on a lost drive, or on that of the
// other copy while another drive could take it, or had found no place. Volume.mu.
func (v *Volume) misplaced(r *row, c int) bool {
	if !v.covered(r, c) {
		return true
	}
	return c == 1 && v.covered(r, 0) && r.tables[0].Drive() == r.tables[1].Drive() &&
		slices.ContainsFunc(v.members, func(m *member) bool { return m.is(DriveOnline) && m.index != r.tables[0].Drive() })
}

// placeTables gives misplaced copies of a row's record table other places, which have to be written whole, and says
// whether there were any. Volume.applyMu.
func (v *Volume) placeTables(r *row) (moved bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for c := range r.tables {
		if !v.misplaced(r, c) {
			continue
		}
		old := r.tables[c]
		r.tables[c] = ondisk.NoLocator
		if !v.takeTableCopy(r.pool, r, c) && (old == ondisk.NoLocator || !v.member(old.Drive()).lost() ||
			!v.takeAnyTable(r, c)) {
			r.tables[c] = old
			continue
		}
		if r.tables[c] == old {
			continue
		}
		if old != ondisk.NoLocator {
			v.vacated = append(v.vacated, vacancy{old, r.pool.tableBlocks})
		}
		r.fresh |= 1 << c
		moved = true
	}
	return moved
}

// vacancy is where a record table was that moved. It is free when neither a checkpoint nor the journal names it.
type vacancy struct {
	at     ondisk.Locator
	blocks uint32
}

// takeAnyTable places a copy on any drive, also that of the other copy. Volume.mu.
func (v *Volume) takeAnyTable(r *row, c int) bool {
	for _, m := range v.members {
		if !m.is(DriveOnline) {
			continue
		}
		if unit, ok := m.takeTable(r.pool.tableBlocks); ok {
			r.tables[c] = ondisk.Locate(m.index, unit)
			return true
		}
	}
	return false
}

// rowID names a row in the catalog.
type rowID struct {
	pool   uint16
	number uint32
}

// repairTables writes the copies of record tables that are missing, after drives were lost, came back or were added. It
// touches no copy that is good, moves no journal's tail, and makes the new places durable: the next checkpoint can then
// overwrite one copy of a block while the other is whole. Volume.checkpointMu.
func (v *Volume) repairTables() error {
	for v.drivesChanged.Swap(false) {
		if err := v.err(); err != nil {
			return err
		}
		losses := v.losses.Load()
		rows, moved := v.freshRows()
		super := v.super
		super.Sequence++
		for c := range 2 {
			var spans []span
			for _, r := range rows {
				if r.fresh>>c&1 != 0 {
					spans = append(spans, span{row: r, n: r.pool.tableBlocks})
				}
			}
			err := v.writeTables(spans, c, super.Sequence, losses)
			if err != nil && !errors.Is(err, errDriveLost) {
				return err
			}
		}
		if v.losses.Load() != losses {
			v.drivesChanged.Store(true)
			continue
		}
		if len(moved) > 0 {
			if err := v.moveInCatalog(moved, &super); err != nil {
				return err
			}
		}
		v.applyMu.Lock()
		for _, r := range rows {
			r.fresh = 0
		}
		v.applyMu.Unlock()
	}
	return v.err()
}

// freshRows places what is misplaced, and lists the rows of which a copy is to be written whole, and those whose places
// the catalog does not name yet.
func (v *Volume) freshRows() (rows []*row, moved map[rowID][2]ondisk.Locator) {
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	moved = map[rowID][2]ondisk.Locator{}
	for _, p := range v.Pools() {
		for n := range p.highest.Load() {
			r := p.byNumber[n].Load()
			// What nobody knows stays where it is, unless the journal has changed it.
			if r == nil || r.noTable.Load() && !r.isDirty {
				continue
			}
			if v.placeTables(r) {
				r.moved = true
			}
			if r.moved {
				moved[rowID{uint16(p.id), n}] = r.tables
			}
			if r.fresh != 0 {
				rows = append(rows, r)
			}
		}
	}
	return rows, moved
}

// moveInCatalog makes new places of record tables durable, and nothing else: the catalog is the last checkpoint's.
func (v *Volume) moveInCatalog(moved map[rowID][2]ondisk.Locator, super *ondisk.Superblock) error {
	catalog := slices.Clone(v.catalog)
	ondisk.EachRowTables(catalog, func(pool uint16, number uint32, tables *[2]ondisk.Locator) {
		if t, ok := moved[rowID{pool, number}]; ok {
			*tables = t
		}
	})
	super.CatalogArea ^= 1
	super.CatalogSeq = super.Sequence
	super.CatalogCRC = ondisk.CRC(catalog)
	if err := v.writeCatalog(catalog, super); err != nil {
		return err
	}
	v.labelMu.Lock()
	super.Epoch, super.Nonce = v.common.Epoch, v.common.Nonce
	v.labelMu.Unlock()
	super.Time = v.o.Now().UnixNano()
	if err := v.writeSuperblock(super); err != nil {
		return err
	}
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	v.super, v.catalog = *super, catalog
	for id := range moved {
		if p := v.PoolByID(PoolID(id.pool)); p != nil {
			if r := p.rowByNumber(id.number); r != nil {
				r.moved = false
			}
		}
	}
	v.catDirty = true // rows that are newer than the catalog may have moved as well
	return nil
}

// markAllDirty has the next checkpoint write a row's whole record table. Volume.applyMu.
func (v *Volume) markAllDirty(r *row) {
	v.markDirty(r, 0)
	r.dirtyAll()
}

func (r *row) dirtyAll() {
	for b := range r.pool.tableBlocks {
		r.dirty[b/64] |= 1 << (b % 64)
	}
}

// dirtyTouched marks the blocks in which hits were noted. Volume.applyMu.
func (v *Volume) dirtyTouched() {
	for _, p := range v.Pools() {
		for n := range p.highest.Load() {
			r := p.byNumber[n].Load()
			if r == nil || !r.anyTouched.Swap(false) {
				continue
			}
			for i := range r.touched {
				for x := r.touched[i].Swap(0); x != 0; x &= x - 1 {
					v.markDirty(r, uint32(i*64+bits.TrailingZeros64(x)))
				}
			}
		}
	}
}

// appendSpans adds the runs of a row's blocks that have a bit.
func appendSpans(spans []span, r *row, set []uint64) []span {
	for b, n := uint32(0), r.pool.tableBlocks; b < n; b++ {
		if b%64 == 0 && set[b/64] == 0 {
			b += 63
			continue
		}
		if set[b/64]>>(b%64)&1 == 0 {
			continue
		}
		if k := len(spans) - 1; k >= 0 && spans[k].row == r && spans[k].first+spans[k].n == b {
			spans[k].n++
		} else {
			spans = append(spans, span{row: r, first: b, n: 1})
		}
	}
	return spans
}

// encodeCatalog makes the stream of what is durable. Volume.applyMu and mu.
func (v *Volume) encodeCatalog() []byte {
	b := []byte{}
	for _, f := range v.familiesInUse() {
		b = f.Append(b)
	}
	for _, t := range v.sortedTenants() {
		b = t.Append(b)
	}
	for _, p := range v.pools {
		if !p.durable {
			continue
		}
		e := ondisk.Pool{
			ID: uint16(p.id), Family: p.family, TokensPerFile: p.spec.TokensPerFile, TrailingHit: p.spec.TrailingHit,
			MaxSlots: p.limits.maxSlots, MinBytes: p.limits.minBytes, MaxBytes: p.limits.maxBytes,
			CreationTime: p.creationTime, SlotUnits: p.layout.SlotUnits(), EntryShift: p.shift,
			ChecksumAlg: p.spec.ChecksumAlg, Digest: p.spec.IdentityDigest, Name: p.spec.Name,
			Identity: p.spec.Identity, Geometry: p.geometry,
		}
		b = e.Append(b)
		for n := range p.highest.Load() {
			r := p.byNumber[n].Load()
			if r == nil {
				continue
			}
			x := ondisk.Row{Pool: uint16(p.id), Number: n, Tables: r.tables,
				Entries: make([]ondisk.Locator, len(r.drives))}
			for i := range r.drives {
				x.Entries[i] = ondisk.Locate(r.drives[i], r.units[i])
			}
			b = x.Append(b)
		}
	}
	return b
}

// familiesInUse are those of durable pools, by ID.
func (v *Volume) familiesInUse() []*ondisk.Family {
	used := map[uint16]bool{}
	var out []*ondisk.Family
	for _, p := range v.pools {
		if f := v.families[p.family]; p.durable && f != nil && !used[p.family] {
			used[p.family] = true
			out = append(out, f)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

func (v *Volume) sortedTenants() []ondisk.Tenant {
	var out []ondisk.Tenant
	for _, t := range v.tenants {
		out = append(out, t)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// writeSnapshot writes the tables' first copies, then the second, then the catalog, then the superblock, each durable
// before the next begins: at any moment one copy of each block is whole, and the superblock names only what is there.
// Second copies that are worth nothing yet go ahead of all.
func (v *Volume) writeSnapshot(s *snapshot, super *ondisk.Superblock) error {
	super.Sequence++
	if err := v.writeTables(s.seconds, 1, super.Sequence, s.losses); err != nil {
		return err
	}
	for c := range 2 {
		if err := v.writeTables(s.spans, c, super.Sequence, s.losses); err != nil {
			return err
		}
		if v.losses.Load() != s.losses {
			return errDriveLost
		}
	}
	if s.catalog != nil {
		super.CatalogArea ^= 1
		super.CatalogSeq = super.Sequence
		super.CatalogBytes = uint64(len(s.catalog))
		super.CatalogBlocks = uint32(ondisk.StreamBlocks(len(s.catalog)))
		super.CatalogCRC = ondisk.CRC(s.catalog)
		if err := v.writeCatalog(s.catalog, super); err != nil {
			return err
		}
	}
	v.labelMu.Lock()
	super.Epoch, super.Nonce, super.JournalNonce = v.common.Epoch, v.common.Nonce, v.journal.Nonce
	v.labelMu.Unlock()
	super.Tail, super.Chain = s.tail, s.chain
	super.NextCommit = s.commits
	super.Time = v.o.Now().UnixNano()
	return v.writeSuperblock(super)
}

// writeTables writes one copy of the dirty blocks, all drives at once, unless a drive was lost since losses was
// counted.
func (v *Volume) writeTables(spans []span, copy int, sequence, losses uint64) error {
	if len(spans) == 0 {
		return nil
	}
	byDrive := map[*member][]span{}
	for _, s := range spans {
		if !v.covered(s.row, copy) {
			continue
		}
		l := s.row.tables[copy]
		s.unit = l.Unit() + uint64(s.first)
		m := v.member(l.Drive())
		byDrive[m] = append(byDrive[m], s)
	}
	var members []*member
	blocks := map[*member]int{}
	for m, list := range byDrive {
		members = append(members, m)
		for _, s := range list {
			blocks[m] += int(s.n)
		}
		sort.Slice(list, func(i, j int) bool { return list[i].unit < list[j].unit })
	}
	timeouts := v.timeouts.Load()
	// While one copy of a block is being overwritten, the drive with the other must not be named as lost: its copy would
	// not count any more.
	v.tablesMu.Lock()
	if v.losses.Load() != losses {
		v.tablesMu.Unlock()
		return errDriveLost
	}
	errs := eachMember(members, func(m *member) error {
		w := tableWriter{v: v, m: m, copy: copy, sequence: sequence}
		w.buffer = drive.AlignedBuffer(min(writeBlocks, blocks[m]) * ondisk.BlockBytes)
		defer v.freeBuffer(w.buffer, timeouts)
		for _, s := range byDrive[m] {
			if err := w.add(s); err != nil {
				return err
			}
		}
		if err := w.write(); err != nil {
			return err
		}
		return m.flush()
	})
	v.tablesMu.Unlock()
	return v.settle(members, errs)
}

// tableWriter joins spans that are neighbours on the drive into large writes.
type tableWriter struct {
	v        *Volume
	m        *member
	copy     int
	sequence uint64
	buffer   []byte
	blocks   int
	unit     uint64 // of the first block in buffer
}

func (w *tableWriter) add(s span) error {
	for s.n > 0 {
		if w.blocks == writeBlocks || w.blocks > 0 && w.unit+uint64(w.blocks) != s.unit {
			if err := w.write(); err != nil {
				return err
			}
		}
		if w.blocks == 0 {
			w.unit = s.unit
		}
		n := min(s.n, uint32(writeBlocks-w.blocks))
		w.fill(s, n)
		s.first, s.unit, s.n = s.first+n, s.unit+uint64(n), s.n-n
	}
	return nil
}

// fill copies n blocks of a span behind those that are in the buffer, and completes them with hits and header.
func (w *tableWriter) fill(s span, n uint32) {
	p, r := s.row.pool, s.row
	out := w.buffer[w.blocks*ondisk.BlockBytes:][:int(n)*ondisk.BlockBytes]
	w.v.applyMu.Lock()
	copy(out, p.rowTable(r.number)[int(s.first)*ondisk.BlockBytes:])
	w.v.applyMu.Unlock()
	le := binary.LittleEndian
	for i := range n {
		b := out[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes]
		slot := r.number*p.slotsPerRow + (s.first+i)*ondisk.RecordsPerBlock
		for k := range uint32(ondisk.RecordsPerBlock) {
			rec := ondisk.BlockRecord(b, int(k))
			if ondisk.State(rec[ondisk.RecordStateOff]) == ondisk.StateCommitted {
				le.PutUint32(rec[ondisk.RecordLastHitOff:], atomic.LoadUint32(&p.lastHit[slot+k]))
				le.PutUint32(rec[ondisk.RecordHitsOff:], atomic.LoadUint32(&p.hits[slot+k]))
			}
		}
		at := ondisk.Locate(w.m.index, s.unit+uint64(i))
		ondisk.SealTable(b, at, w.v.tag, w.sequence, ondisk.TableID{Pool: uint16(p.id), Row: r.number,
			Block: s.first + i})
	}
	w.blocks += int(n)
}

func (w *tableWriter) write() error {
	if w.blocks == 0 {
		return nil
	}
	err := w.m.writeAt(w.buffer[:w.blocks*ondisk.BlockBytes], w.unit)
	w.blocks = 0
	return err
}

// writeCatalog writes the stream into the area that the superblock will name.
func (v *Volume) writeCatalog(stream []byte, super *ondisk.Superblock) error {
	first := v.catalogUnit(super.CatalogArea)
	b := drive.AlignedBuffer(int(super.CatalogBlocks) * ondisk.BlockBytes)
	defer v.freeBuffer(b, v.timeouts.Load())
	for i := range super.CatalogBlocks {
		payload := stream[int(i)*ondisk.PayloadBytes:]
		payload = payload[:min(len(payload), ondisk.PayloadBytes)]
		ondisk.SealCatalog(b[int(i)*ondisk.BlockBytes:], first, i, v.tag, super.CatalogSeq, payload)
	}
	return v.write(v.metadataMembers(), func(m *member) error {
		if len(b) > 0 {
			if err := m.writeAt(b, first); err != nil {
				return err
			}
		}
		return m.flush()
	})
}

func (v *Volume) catalogUnit(area uint32) uint64 {
	return v.region.CatalogUnit + uint64(area)*v.region.CatalogBlocks
}

// writeSuperblock writes the slot that does not hold the last one.
func (v *Volume) writeSuperblock(super *ondisk.Superblock) error {
	super.Unit = v.region.SuperblockUnit + super.Sequence%ondisk.SuperblockSlots
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	super.Encode(b)
	return v.write(v.metadataMembers(), func(m *member) error {
		if err := m.writeAt(b, super.Unit); err != nil {
			return err
		}
		return m.flush()
	})
}

// freeLimbo gives the space of dropped rows back: no durable catalog names them any more.
func (v *Volume) freeLimbo(rows []*row) {
	for _, r := range rows {
		p := r.pool
		var late lateDiscards
		for i, d := range r.drives {
			ranges := []drive.Range{rangeOf(r.units[i], p.entryUnits)}
			gaveUp, _ := v.discards.discard(v.member(d), ranges, v.discards.stopping)
			late = append(late, gaveUp...)
		}
		late.then(func() {
			v.mu.Lock()
			v.giveBack(p, r)
			p.numbers[r.number/64] &^= 1 << (r.number % 64)
			v.catalogBytes -= ondisk.RowEntrySize(v.width)
			v.limboSegments -= p.rowSegments()
			v.mu.Unlock()
			r.dropDone(nil)
		})
	}
}

func (r *row) dropDone(err error) {
	if r.dropped != nil {
		r.dropped(err)
	}
}

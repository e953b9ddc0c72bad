package extentmap

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	// readBlocks is the largest single read of a record table.
	readBlocks = 1024
	// loadWorkers read record tables at once: enough to keep several drives busy.
	loadWorkers = 16
)

// load brings the volume's state into memory: catalog, record tables, journal. It writes nothing.
func (v *Volume) load(list []candidate) error {
	super, err := v.readSuperblock()
	if err != nil {
		return err
	}
	if err := checkEpochs(list, v.metadataMask(), super); err != nil {
		return err
	}
	v.super = *super
	v.commits.Store(super.NextCommit)
	v.head, v.tail, v.chain = super.Tail, super.Tail, super.Chain
	a := applier{v: v, catalog: true}
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	stream, damaged, err := v.readCatalog(super)
	if err != nil {
		return err
	}
	if err := ondisk.VisitEntries(stream, &a); err != nil {
		return fmt.Errorf("%w: catalog: %w", ErrCorrupt, err)
	}
	v.catDirty, v.catalog = damaged, stream
	v.loadTables(a.loaded)
	v.mu.Lock()
	for _, r := range a.loaded {
		r.pool.review(r)
	}
	v.mu.Unlock()
	if err := v.replay(super); err != nil {
		return err
	}
	v.deriveFree()
	return nil
}

// deriveFree computes the free slots of all rows, on all cores.
func (v *Volume) deriveFree() {
	var wg sync.WaitGroup
	for _, p := range v.pools {
		var next atomic.Uint32
		for range min(runtime.GOMAXPROCS(0), int(p.highest.Load())) {
			wg.Go(func() {
				for n := next.Add(1) - 1; n < p.highest.Load(); n = next.Add(1) - 1 {
					if r := p.byNumber[n].Load(); r != nil {
						p.deriveFree(r)
					}
				}
			})
		}
		wg.Wait()
	}
}

// readSuperblock finds the newest superblock on any metadata drive.
func (v *Volume) readSuperblock() (*ondisk.Superblock, error) {
	var best *ondisk.Superblock
	b := make([]byte, ondisk.BlockBytes)
	for _, m := range v.metadata {
		for slot := range uint64(ondisk.SuperblockSlots) {
			unit := m.region.SuperblockUnit + slot
			if m.readAt(b, unit) != nil {
				continue
			}
			s, err := ondisk.DecodeSuperblock(b, unit, v.uuid)
			if err == nil && (best == nil || s.Sequence > best.Sequence) {
				best = s
			}
		}
	}
	if best == nil {
		return nil, fmt.Errorf("%w: no superblock on any metadata drive; run tuttifs fsck", ErrCorrupt)
	}
	return best, nil
}

// readCatalog reads the catalog's stream, each block from whichever drive has it right. damaged says that some drive
// has not: the next checkpoint writes the catalog anew.
func (v *Volume) readCatalog(super *ondisk.Superblock) (stream []byte, damaged bool, err error) {
	if uint64(super.CatalogBlocks) > v.region.CatalogBlocks {
		return nil, false, fmt.Errorf("%w: superblock names a catalog of %d blocks; an area has %d",
			ErrCorrupt, super.CatalogBlocks, v.region.CatalogBlocks)
	}
	first := v.catalogUnit(super.CatalogArea)
	copies := make([][]byte, len(v.metadata))
	for i, m := range v.metadata {
		copies[i] = make([]byte, int(super.CatalogBlocks)*ondisk.BlockBytes)
		m.readPieces(copies[i], first)
	}
	for i := range super.CatalogBlocks {
		var payload []byte
		err := fmt.Errorf("%w: unreadable", ErrCorrupt)
		for _, c := range copies {
			b := c[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes]
			p, openErr := ondisk.OpenCatalog(b, first, i, v.tag, super.CatalogSeq)
			switch {
			case openErr == nil:
				payload, err = p, nil
			case payload == nil:
				damaged, err = true, openErr
			default:
				damaged = true
			}
		}
		if err != nil {
			return nil, false, fmt.Errorf("%w: catalog block %d on no metadata drive: %w; run tuttifs fsck", ErrCorrupt,
				i, err)
		}
		stream = append(stream, payload...)
	}
	if uint64(len(stream)) != super.CatalogBytes || ondisk.CRC(stream) != super.CatalogCRC {
		return nil, false, fmt.Errorf("%w: catalog does not match the superblock; run tuttifs fsck", ErrCorrupt)
	}
	return stream, damaged, nil
}

// loadTables reads the record tables of the catalog's rows, in parallel, straight to where they stay.
func (v *Volume) loadTables(rows []*row) {
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex // dirty marks
	for range min(len(rows), loadWorkers) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(rows) {
					return
				}
				v.loadTable(rows[i], func(block uint32, second bool) {
					mu.Lock()
					defer mu.Unlock()
					v.markDamaged(rows[i], block, second)
				})
			}
		})
	}
	wg.Wait()
}

// loadTable reads one row's table: its first copy, and the second of each block of which the first is not right. A
// block of which neither is right holds no records any more: its files are misses. The same holds for a single record
// that is not one. Whatever was not right is written anew. After a crash the second copies are read as well, because
// they may have been in writing.
//
// repair is told of blocks to be written, and whether it is the second copy that is worth nothing.
func (v *Volume) loadTable(r *row, repair func(block uint32, second bool)) {
	p := r.pool
	t := p.rowTable(r.number)
	copies := v.tableCopies(r)
	for c := range r.tables {
		// A drive that comes back is behind, and a row may have found too few places: both are written whole.
		if r.tables[c] == ondisk.NoLocator || v.covered(r, c) && !slices.Contains(copies, c) {
			r.fresh |= 1 << c
			v.drivesChanged.Store(true)
		}
	}
	if len(copies) == 0 {
		return
	}
	for first := uint32(0); first < p.tableBlocks; first += readBlocks {
		n := min(readBlocks, p.tableBlocks-first)
		part := t[int(first)*ondisk.BlockBytes:][:int(n)*ondisk.BlockBytes]
		read := v.readTable(part, r, copies[0], first) == nil
		for i := range n {
			b := part[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes]
			if !read || v.openTable(b, r, copies[0], first+i) != nil {
				if len(copies) == 1 || !v.loadBlock(b, r, copies[1], first+i) {
					clear(b)
					v.damaged.Add(1)
				}
				repair(first+i, false)
			}
			v.checkRecords(b, r, first+i, repair)
		}
	}
	if !v.wasClean && !v.readOnly && len(copies) == 2 {
		v.checkSecond(r, repair)
	}
}

// markDamaged notes a block to be written. Volume.applyMu.
func (v *Volume) markDamaged(r *row, block uint32, second bool) {
	if second {
		v.markSecond(r, block)
	} else {
		v.markDirty(r, block)
	}
}

// tableCopies lists the copies of a row's record table that count: those on the drives that took part longest. Where
// none can be read, nobody knows what the table holds, and the row is of no use until its drives come back.
func (v *Volume) tableCopies(r *row) (copies []int) {
	best := uint64(0)
	for c := range r.tables {
		if !v.covered(r, c) {
			continue
		}
		if m := v.member(r.tables[c].Drive()); m.stale && !v.covered(r, 1-c) && r.tables[1-c] != ondisk.NoLocator {
			continue // the one that is missing may know more
		}
		switch rank := v.member(r.tables[c].Drive()).rank; {
		case rank > best:
			best, copies = rank, []int{c}
		case rank == best:
			copies = append(copies, c)
		}
	}
	r.noTable.Store(len(copies) == 0 && (r.tables[0] != ondisk.NoLocator || r.tables[1] != ondisk.NoLocator))
	return copies
}

func (v *Volume) readTable(b []byte, r *row, c int, block uint32) error {
	l := r.tables[c]
	return v.member(l.Drive()).readAt(b, l.Unit()+uint64(block))
}

// checkSecond has the blocks written anew whose second copy is not right.
func (v *Volume) checkSecond(r *row, repair func(block uint32, second bool)) {
	blocks := r.pool.tableBlocks
	buffer := drive.AlignedBuffer(int(min(readBlocks, blocks)) * ondisk.BlockBytes)
	defer v.freeBuffer(buffer, v.timeouts.Load())
	for first := uint32(0); first < blocks; first += readBlocks {
		n := min(readBlocks, blocks-first)
		part := buffer[:int(n)*ondisk.BlockBytes]
		read := v.readTable(part, r, 1, first) == nil
		for i := range n {
			if !read || v.openTable(part[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes], r, 1, first+i) != nil {
				repair(first+i, true)
			}
		}
	}
}

func (v *Volume) openTable(b []byte, r *row, copy int, block uint32) error {
	l := r.tables[copy]
	_, err := ondisk.OpenTable(b, ondisk.Locate(l.Drive(), l.Unit()+uint64(block)), v.tag,
		ondisk.TableID{Pool: uint16(r.pool.id), Row: r.number, Block: block})
	return err
}

// loadBlock reads a single block of a copy.
func (v *Volume) loadBlock(b []byte, r *row, c int, block uint32) bool {
	return v.readTable(b, r, c, block) == nil && v.openTable(b, r, c, block) == nil
}

// checkRecords empties what is not a record: damage of one is a miss and spares the others.
func (v *Volume) checkRecords(b []byte, r *row, block uint32, repair func(uint32, bool)) {
	for i := range ondisk.RecordsPerBlock {
		rec := ondisk.BlockRecord(b, i)
		if !ondisk.ValidRecord(rec) || block*ondisk.RecordsPerBlock+uint32(i) >= r.pool.slotsPerRow &&
			rec[ondisk.RecordStateOff] != 0 {
			clear(rec)
			v.damaged.Add(1)
			repair(block, false)
		}
	}
}

// replay applies the journal's whole batches in memory.
func (v *Volume) replay(super *ondisk.Superblock) error {
	j := v.journal
	j.Nonce = super.JournalNonce
	if v.wasClean && v.endsAtTail(&j, super) {
		return nil
	}
	copies := make([][]byte, len(v.metadata))
	var reads sync.WaitGroup
	for i, m := range v.metadata {
		ring, err := reserve(int(j.Blocks) * ondisk.BlockBytes)
		if err != nil {
			reads.Wait()
			return err
		}
		defer ring.release()
		ring.adviseWhole()
		copies[i] = ring.b
		reads.Go(func() { m.readPieces(ring.b, j.First) })
	}
	reads.Wait()
	a := applier{v: v}
	scan, err := j.Replay(copies, super.Tail, super.Chain, func(_ uint64, entries []byte) error {
		return ondisk.VisitEntries(entries, &a)
	})
	if err != nil {
		return fmt.Errorf("%w: journal block %d: %w; run tuttifs fsck", ErrCorrupt, scan.Head, err)
	}
	if scan.Damaged {
		return fmt.Errorf("%w: journal block %d is on no metadata drive and acknowledged ones follow; run tuttifs fsck",
			ErrCorrupt, scan.Head)
	}
	if !v.anySlot(super.Sequence+1) && followed(&j, copies, &scan) {
		return fmt.Errorf("%w: journal block %d belongs to a mount whose superblock is on no metadata drive; "+
			"run tuttifs fsck", ErrCorrupt, scan.Head)
	}
	v.head, v.chain = scan.Head, scan.Chain
	return nil
}

// readPieces reads as much as can be read: one sector that cannot must not take the rest along. What is missing stays
// zero, which no block is.
func (m *member) readPieces(b []byte, unit uint64) {
	for size := min(len(b), readBlocks*ondisk.BlockBytes); len(b) > 0; {
		n := min(size, len(b))
		err := m.readAt(b[:n], unit)
		switch {
		case err == nil:
		case errors.Is(err, ErrTimeout) || m.lost(): // it is asked no more
			clear(b)
			return
		case n > ondisk.BlockBytes:
			size = ondisk.BlockBytes // from here on
			continue
		default:
			clear(b[:n])
		}
		b, unit = b[n:], unit+uint64(n/ondisk.BlockBytes)
	}
}

// anySlot says whether the slot of a checkpoint is right on any metadata drive, or was never written.
func (v *Volume) anySlot(sequence uint64) bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	for _, m := range v.metadata {
		unit := m.region.SuperblockUnit + sequence%ondisk.SuperblockSlots
		if m.readAt(b, unit) != nil {
			continue
		}
		if _, err := ondisk.DecodeSuperblock(b, unit, v.uuid); err == nil || bytes.Equal(b, zeroBlock[:]) {
			drive.FreeBuffer(b)
			return true
		}
	}
	return false
}

var zeroBlock [ondisk.BlockBytes]byte

// followed says whether a later mount went on where a journal ends: its blocks carry another nonce, and follow in
// number and chain. Only where that mount's superblock is lost can it be that we know nothing of it.
func followed(j *ondisk.Journal, copies [][]byte, scan *ondisk.Scan) bool {
	off := scan.Head % j.Blocks * ondisk.BlockBytes
	for _, ring := range copies {
		if uint64(len(ring)) < off+ondisk.BlockBytes {
			continue
		}
		b := ring[off : off+ondisk.BlockBytes]
		later := *j
		later.Nonce = ondisk.JournalNonce(b)
		if at, _, err := later.Open(b, scan.Head); err == nil && at.Chain == scan.Chain && later.Nonce != j.Nonce {
			return true
		}
	}
	return false
}

// endsAtTail says whether no metadata drive has a journal block behind the last checkpoint. That is so after an
// unmount, whose checkpoint takes in all there is before the labels are marked clean; reading the rings, up to tens of
// MiB a drive, would only show it again. Where the superblock is not the unmount's, its tail is where a newer block is.
func (v *Volume) endsAtTail(j *ondisk.Journal, super *ondisk.Superblock) bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	for _, m := range v.metadata {
		if m.readAt(b, j.Unit(super.Tail)) != nil {
			return false
		}
		if at, _, err := j.Open(b, super.Tail); err == nil || at.Sequence > super.Tail {
			return false
		}
	}
	return true
}

// metadataMask has a bit for each drive with the metadata role.
func (v *Volume) metadataMask() uint64 {
	mask := uint64(0)
	for _, m := range v.metadata {
		mask |= 1 << m.index
	}
	return mask
}

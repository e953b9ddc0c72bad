package check

import (
	"fmt"
	"slices"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// adviceTable is by copy.
var adviceTable = [2]string{
	"the other copy is whole, and counts; the next mount writes this one anew",
	"the other copy is whole, and counts; this one is written anew when a file in it is committed or freed",
}

// checkTables reads both copies of all record tables, applies the journal's changes, and compares.
func (c *checker) checkTables() error {
	total, done := uint64(0), uint64(0)
	for _, q := range c.sortedPools() {
		q.number()
		total += uint64(len(q.numbered)) * uint64(q.tableBlocks)
		c.result.Slots += uint64(len(q.numbered)) * uint64(q.slotsPerRow)
	}
	for _, q := range c.sortedPools() {
		for _, r := range q.numbered {
			if err := c.checkTable(r); err != nil {
				return err
			}
			done += uint64(q.tableBlocks)
			c.progress(done, total)
		}
	}
	return nil
}

func (c *checker) sortedPools() []*pool {
	ids := make([]uint16, 0, len(c.pools))
	for id := range c.pools {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	pools := make([]*pool, len(ids))
	for i, id := range ids {
		pools[i] = c.pools[id]
	}
	return pools
}

// number sorts the pool's rows.
func (q *pool) number() {
	q.numbered = q.numbered[:0]
	for _, r := range q.rows {
		q.numbered = append(q.numbered, r)
	}
	slices.SortFunc(q.numbered, func(a, b *row) int { return int(int64(a.Number) - int64(b.Number)) })
}

// copyState says what is known of one copy of one block; the higher is believed.
type copyState uint8

const (
	copyAbsent  copyState = iota // its drive is missing
	copyBad                      // unreadable or not the block
	copyOld                      // the block, on a drive that missed a part of the history
	copyInvalid                  // opened, and a record in it is not one
	copyRead                     // read and opened
)

// copies are two bits of one block by copy: those that a repair writes, and those that hold nothing worth keeping,
// which it writes first.
type copies uint8

const (
	writeCopy copies = 1 << iota // << copy
	_
	emptyCopy // << copy
	_

	writeBoth = writeCopy | writeCopy<<1
)

// write notes that a repair writes copies of a block.
func (r *row) write(block uint32, k copies) {
	if r.writes == nil {
		r.writes = make([]copies, r.pool.tableBlocks)
	}
	r.writes[block] |= k
}

// tableCopy is one copy of a row's table as it was read.
type tableCopy struct {
	bytes     []byte
	states    []copyState
	sequences []uint64
	errs      map[uint32]error // of bad blocks
}

// checkTable leaves the row's table, changes applied, in r.table.
func (c *checker) checkTable(r *row) error {
	n := int(r.pool.tableBlocks) * ondisk.BlockBytes
	r.table = drive.AlignedBuffer(n)
	if r.fresh {
		r.apply()
		for block := range r.pool.tableBlocks {
			r.write(block, writeBoth)
		}
		return nil
	}
	second := drive.AlignedBuffer(n)
	defer drive.FreeBuffer(second)
	var both [2]tableCopy
	for i, b := range [][]byte{r.table, second} {
		var err error
		if both[i], err = c.readTable(r, i, b); err != nil {
			return err
		}
	}
	for block := range r.pool.tableBlocks {
		c.compareBlocks(r, block, &both)
	}
	r.apply()
	return nil
}

// block is the bytes of one block.
func (t *tableCopy) block(i uint32) []byte {
	return t.bytes[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes]
}

// compareBlocks judges both copies of a block and leaves the better in the first. Of two that differ the one of the
// later checkpoint counts: the other was not written although it should have been.
func (c *checker) compareBlocks(r *row, block uint32, both *[2]tableCopy) {
	a, b := both[0].block(block), both[1].block(block)
	first, second := both[0].states[block], both[1].states[block]
	lost := max(first, second) <= copyBad
	for i := range both {
		switch both[i].states[block] {
		case copyOld:
			r.write(block, (writeCopy|emptyCopy)<<i)
		case copyBad:
			r.write(block, emptyCopy<<i)
			if c.badCopy(r, i, block, both[i].errs[block], lost) {
				r.write(block, writeCopy<<i)
			}
		}
	}
	switch {
	case lost && first == copyAbsent && second == copyAbsent: // missing drives were reported
		clear(a)
	case lost:
		clear(a)
		if !c.volume(errorf("record table", "its files are lost; mount the volume to have it written anew",
			"row %d of pool %d: block %d is whole on no drive: %d slots are unknown", r.Number, r.Row.Pool, block,
			ondisk.RecordsPerBlock).ask(fixEmpty)) {
			r.writes[block] = 0
		}
	case second > first, first == copyOld && second == copyOld && both[1].sequences[block] > both[0].sequences[block]:
		copy(a, b)
	case first == copyRead && second == copyRead && !r.sameRecords(block, a, b):
		c.differing(r, block, both)
	}
}

const fixEmpty = "it is written anew, empty"

// badCopy reports one copy of a block that is not it. It says whether it will be written. lost: the other is bad too.
func (c *checker) badCopy(r *row, number int, block uint32, err error, lost bool) bool {
	l := r.Tables[number]
	m := c.members[l.Drive()]
	if m.behind {
		return true // all that lies on it is written anew
	}
	p := c.tornOr(errorf("record table", adviceTable[number], "row %d of pool %d: copy %d of block %d is bad: %v",
		r.Number, r.Row.Pool, number, block, err).safe("it is written anew from the other copy"))
	if lost {
		p = p.ask(fixEmpty)
	}
	return c.at(m, l.Unit()+uint64(block), p)
}

// differing decides between two copies that are both whole.
func (c *checker) differing(r *row, block uint32, both *[2]tableCopy) {
	later := 0
	if both[1].sequences[block] > both[0].sequences[block] {
		later = 1
		copy(both[0].block(block), both[1].block(block))
	}
	l := r.Tables[1-later]
	p := errorf("record table", "have it repaired", "row %d of pool %d: block %d: the copies hold different records",
		r.Number, r.Row.Pool, block).safe("it is written anew from the other copy, which is newer")
	if both[0].sequences[block] == both[1].sequences[block] {
		p = p.ask("the first copy counts")
	}
	if c.at(c.members[l.Drive()], l.Unit()+uint64(block), p) {
		r.write(block, writeCopy<<(1-later))
	}
}

// sameRecords compares all but the hit fields, which each copy takes from memory when it is written. What the journal
// changes may be in one copy and not in the other.
func (r *row) sameRecords(block uint32, a, b []byte) bool {
	for i := range ondisk.RecordsPerBlock {
		x, y := ondisk.BlockRecord(a, i), ondisk.BlockRecord(b, i)
		if string(x[:ondisk.RecordLastHitOff]) == string(y[:ondisk.RecordLastHitOff]) &&
			string(x[ondisk.RecordHitsOff+4:]) == string(y[ondisk.RecordHitsOff+4:]) {
			continue
		}
		index := block*ondisk.RecordsPerBlock + uint32(i)
		if !slices.ContainsFunc(r.changes, func(k change) bool { return k.index == index }) {
			return false
		}
	}
	return true
}

// readTable reads one copy of a row's table into b and judges each block of it. What is not right is zero in b.
func (c *checker) readTable(r *row, number int, b []byte) (tableCopy, error) {
	t := tableCopy{bytes: b, states: make([]copyState, r.pool.tableBlocks),
		sequences: make([]uint64, r.pool.tableBlocks), errs: make(map[uint32]error)}
	at := r.Tables[number]
	m := c.member(at.Drive())
	if m == nil {
		return t, nil
	}
	for first := uint32(0); first < r.pool.tableBlocks; first += readBlocks {
		if err := c.ctx.Err(); err != nil {
			return t, err
		}
		n := min(readBlocks, r.pool.tableBlocks-first)
		part := b[int(first)*ondisk.BlockBytes:][:int(n)*ondisk.BlockBytes]
		whole := read(m, part, at.Unit()+uint64(first))
		for i := range n {
			block := part[int(i)*ondisk.BlockBytes:][:ondisk.BlockBytes]
			unit := at.Unit() + uint64(first+i)
			err := whole
			if err != nil { // one bad block must not take its neighbours along
				err = read(m, block, unit)
			}
			if err == nil {
				err = c.openTable(r, block, ondisk.Locate(at.Drive(), unit), first+i, &t.sequences[first+i])
			}
			if err != nil {
				clear(block)
				t.states[first+i], t.errs[first+i] = copyBad, err
				continue
			}
			t.states[first+i] = c.judgeRecords(r, m, number, first+i, block)
		}
	}
	return t, nil
}

// openTable checks that b is a block of a row's table, and notes which checkpoint wrote it.
func (c *checker) openTable(r *row, b []byte, at ondisk.Locator, block uint32, sequence *uint64) error {
	n, err := ondisk.OpenTable(b, at, c.tag, ondisk.TableID{Pool: r.Row.Pool, Row: r.Number, Block: block})
	if err != nil {
		return err
	}
	if m := c.member(at.Drive()); n > c.newest && (m == nil || !m.behind) {
		return fmt.Errorf("written by checkpoint %d, the newest is %d", n, c.newest)
	}
	if sequence != nil {
		*sequence = n
	}
	return nil
}

// validRecord says whether a record may be where it is: only those of the row's slots can be any.
func (r *row) validRecord(block uint32, i int, rec []byte) bool {
	return ondisk.ValidRecord(rec) &&
		(block*ondisk.RecordsPerBlock+uint32(i) < r.pool.slotsPerRow || allZero(rec))
}

// judgeRecords empties what is not a record, and slots behind the row's last.
func (c *checker) judgeRecords(r *row, m *member, number int, block uint32, b []byte) copyState {
	state := copyRead
	if m.behind {
		state = copyOld
	}
	for i := range ondisk.RecordsPerBlock {
		rec := ondisk.BlockRecord(b, i)
		if r.validRecord(block, i, rec) {
			continue
		}
		clear(rec)
		if m.behind {
			continue
		}
		state = copyInvalid
		if c.at(m, r.Tables[number].Unit()+uint64(block), errorf("record", "mounting drops it; its file is lost",
			"row %d of pool %d: slot %d of the row holds no valid record", r.Number, r.Row.Pool,
			block*ondisk.RecordsPerBlock+uint32(i)).ask("it is dropped, unless the other copy has it")) {
			r.write(block, writeCopy<<number)
		}
	}
	return state
}

// apply makes the journal's changes in the table.
func (r *row) apply() {
	for _, k := range r.changes {
		rec := r.record(k.index)
		if k.record == nil {
			clear(rec)
		} else {
			copy(rec, k.record)
		}
		r.write(k.index/ondisk.RecordsPerBlock, writeBoth)
	}
}

// record is the record of a slot of the row.
func (r *row) record(index uint32) []byte {
	return r.table[ondisk.RecordOffset(index):][:ondisk.RecordBytes]
}

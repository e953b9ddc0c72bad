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

// copyState says what is known of one copy of one block.
type copyState uint8

const (
	copyAbsent  copyState = iota // its drive is missing
	copyBad                      // unreadable or not the block
	copyRead                     // read and opened
	copyInvalid                  // opened, and a record in it is not one
)

// checkTable leaves the row's table, changes applied, in r.table.
func (c *checker) checkTable(r *row) error {
	n := int(r.pool.tableBlocks) * ondisk.BlockBytes
	r.table = drive.AlignedBuffer(n)
	if r.fresh {
		r.apply(r.table)
		return nil
	}
	second := drive.AlignedBuffer(n)
	defer drive.FreeBuffer(second)
	var states [2][]copyState
	for i, b := range [][]byte{r.table, second} {
		var err error
		if states[i], err = c.readTable(r, i, b); err != nil {
			return err
		}
	}
	r.apply(r.table)
	r.apply(second)
	for block := range r.pool.tableBlocks {
		a := r.table[int(block)*ondisk.BlockBytes:][:ondisk.BlockBytes]
		b := second[int(block)*ondisk.BlockBytes:][:ondisk.BlockBytes]
		c.compareBlocks(r, block, a, b, states[0][block], states[1][block])
	}
	return nil
}

// compareBlocks judges both copies of a block and leaves the better in a.
func (c *checker) compareBlocks(r *row, block uint32, a, b []byte, first, second copyState) {
	switch {
	case first != copyRead && second == copyRead:
		copy(a, b)
	case first != copyRead && second == copyInvalid && first != copyInvalid:
		copy(a, b)
	case first != copyRead && second != copyRead && first != copyInvalid:
		clear(a)
		if first == copyAbsent && second == copyAbsent {
			break // missing drives were reported
		}
		c.volume(errorf("record table", "its files are lost; mount the volume to have it written anew",
			"row %d of pool %d: block %d is whole on no drive: %d slots are unknown", r.Number, r.Row.Pool, block,
			ondisk.RecordsPerBlock))
	case first == copyRead && second == copyRead && !sameRecords(a, b):
		l := r.Tables[1]
		c.at(c.members[l.Drive()], l.Unit()+uint64(block), errorf("record table",
			"mount the volume and evict the files that the first copy holds there",
			"row %d of pool %d: block %d: the copies hold different records", r.Number, r.Row.Pool, block))
	}
}

// sameRecords compares all but the hit fields, which each copy takes from memory when it is written.
func sameRecords(a, b []byte) bool {
	for i := range ondisk.RecordsPerBlock {
		x, y := ondisk.BlockRecord(a, i), ondisk.BlockRecord(b, i)
		if string(x[:ondisk.RecordLastHitOff]) != string(y[:ondisk.RecordLastHitOff]) ||
			string(x[ondisk.RecordHitsOff+4:]) != string(y[ondisk.RecordHitsOff+4:]) {
			return false
		}
	}
	return true
}

// readTable reads one copy of a row's table into b and judges each block of it. What is not right is zero in b.
func (c *checker) readTable(r *row, number int, b []byte) ([]copyState, error) {
	states := make([]copyState, r.pool.tableBlocks)
	at := r.Tables[number]
	m := c.member(at.Drive())
	if m == nil {
		return states, nil
	}
	for first := uint32(0); first < r.pool.tableBlocks; first += readBlocks {
		if err := c.ctx.Err(); err != nil {
			return nil, err
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
				err = c.openTable(r, block, ondisk.Locate(at.Drive(), unit), first+i)
			}
			if err != nil {
				clear(block)
				states[first+i] = copyBad
				c.at(m, unit, c.tornOr(errorf("record table", adviceTable[number],
					"row %d of pool %d: copy %d of block %d is bad: %v",
					r.Number, r.Row.Pool, number, first+i, err)))
				continue
			}
			states[first+i] = c.judgeRecords(r, m, unit, first+i, block)
		}
	}
	return states, nil
}

func (c *checker) openTable(r *row, b []byte, at ondisk.Locator, block uint32) error {
	sequence, err := ondisk.OpenTable(b, at, c.tag, ondisk.TableID{Pool: r.Row.Pool, Row: r.Number, Block: block})
	if err != nil {
		return err
	}
	newest := c.super.Sequence
	if !c.label.Clean {
		newest++ // a checkpoint that was cut off
	}
	if sequence > newest {
		return fmt.Errorf("written by checkpoint %d, the newest is %d", sequence, newest)
	}
	return nil
}

// judgeRecords empties what is not a record, and slots behind the row's last.
func (c *checker) judgeRecords(r *row, m *member, unit uint64, block uint32, b []byte) copyState {
	state := copyRead
	for i := range ondisk.RecordsPerBlock {
		rec := ondisk.BlockRecord(b, i)
		index := block*ondisk.RecordsPerBlock + uint32(i)
		beyond := index >= r.pool.slotsPerRow && !allZero(rec)
		if ondisk.ValidRecord(rec) && !beyond {
			continue
		}
		clear(rec)
		state = copyInvalid
		c.at(m, unit, errorf("record", "mounting drops it; its file is lost",
			"row %d of pool %d: slot %d of the row holds no valid record",
			r.Number, r.Row.Pool, index))
	}
	return state
}

// apply makes the journal's changes in a table.
func (r *row) apply(table []byte) {
	for _, k := range r.changes {
		rec := table[ondisk.RecordOffset(k.index):][:ondisk.RecordBytes]
		if k.record == nil {
			clear(rec)
		} else {
			copy(rec, k.record)
		}
	}
}

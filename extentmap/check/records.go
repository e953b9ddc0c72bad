package check

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"tuttifs/extentmap/ondisk"
)

const (
	adviceEvict = "evict the file"
	fixDrop     = "its record is dropped, and the file with it"
)

// records is what the records pass counts over all pools.
type records struct {
	c         *checker
	sequences []uint64
	used      map[uint32]uint64 // bytes by tenant
	done      uint64
	total     uint64
}

// checkRecords judges the records: each by itself, those with one key, and the chains.
func (c *checker) checkRecords() error {
	s := &records{c: c, used: make(map[uint32]uint64)}
	for _, q := range c.sortedPools() {
		q.files = 0
		q.each(func(uint32, *row, []byte) { q.files++ })
		s.total += 2 * q.files
		c.result.Files += q.files
	}
	for _, q := range c.sortedPools() {
		if err := s.checkPool(q); err != nil {
			return err
		}
	}
	c.nextCommit = max(c.nextCommit, c.super.NextCommit, c.journaled)
	slices.Sort(s.sequences)
	extra := make(map[uint64]int)
	for i := 1; i < len(s.sequences); i++ {
		if n := s.sequences[i]; n == s.sequences[i-1] &&
			c.volume(errorf("record", "evict the files of that commit", "two records have commit sequence %d", n).
				ask("one of them gets the next one")) {
			extra[n]++
		}
	}
	s.renumber(extra)
	s.checkTenants()
	return nil
}

// renumber gives so many records of each commit sequence another one.
func (s *records) renumber(extra map[uint64]int) {
	if len(extra) == 0 {
		return
	}
	for _, q := range s.c.sortedPools() {
		q.each(func(slot uint32, r *row, rec []byte) {
			n := rec[ondisk.RecordSeqOff:]
			if sequence := binary.LittleEndian.Uint64(n); extra[sequence] > 0 {
				extra[sequence]--
				binary.LittleEndian.PutUint64(n, s.c.nextCommit)
				s.c.nextCommit++
				r.write(slot%q.slotsPerRow/ondisk.RecordsPerBlock, writeBoth)
			}
		})
	}
}

// each calls f for every committed slot.
func (q *pool) each(f func(slot uint32, r *row, record []byte)) {
	for _, r := range q.numbered {
		for i := range q.slotsPerRow {
			rec := r.record(i)
			if ondisk.State(rec[ondisk.RecordStateOff]) == ondisk.StateCommitted {
				f(r.Number*q.slotsPerRow+i, r, rec)
			}
		}
	}
}

// record is the encoded record of a slot that a row backs.
func (q *pool) record(slot uint32) []byte {
	return q.rows[slot/q.slotsPerRow].record(slot % q.slotsPerRow)
}

// drop gives a file up: a repair writes its record free. It must be the pass's only goroutine, or hold mu.
func (c *checker) drop(q *pool, slot uint32) {
	r := q.rows[slot/q.slotsPerRow]
	index := slot % q.slotsPerRow
	clear(r.record(index))
	r.write(index/ondisk.RecordsPerBlock, writeBoth)
	c.result.Files--
	c.result.GivenUp++
}

// step counts one record done and says whether to stop.
func (s *records) step() error {
	const every = 1 << 16
	if s.done++; s.done%every == 0 {
		s.c.progress(s.done, s.total)
		return s.c.ctx.Err()
	}
	return nil
}

func (s *records) checkPool(q *pool) error {
	if q.layout == nil {
		return nil
	}
	q.index = make([]uint32, 1<<bits.Len64(2*q.files))
	var twice []uint32
	var stop error
	q.each(func(slot uint32, _ *row, rec []byte) {
		if stop != nil {
			return
		}
		stop = s.step()
		if !s.judge(q, slot, rec) {
			s.c.drop(q, slot)
			return
		}
		if loser, ok := q.insert(slot, rec); ok {
			twice = append(twice, loser)
		}
	})
	if stop != nil {
		return stop
	}
	if len(twice) > 0 && s.c.volume(notef("record", "the next mount frees them",
		"pool %d (%s): %d records whose key has a later record", q.ID, q.Name, len(twice)).safe("they are freed")) {
		for _, slot := range twice {
			s.c.drop(q, slot)
			s.c.result.GivenUp-- // their keys have other files
		}
	}
	if q.MaxSlots != 0 && q.files > uint64(q.MaxSlots) {
		s.c.volume(notef("record", "", "pool %d (%s): %d files, the limit is %d now", q.ID, q.Name, q.files,
			q.MaxSlots))
	}
	bytes := uint64(len(q.numbered)) * uint64(s.c.label.Width) * q.entryUnits(s.c.label) * ondisk.BlockBytes
	if q.MaxBytes != 0 && bytes > q.MaxBytes {
		s.c.volume(notef("record", "", "pool %d (%s): rows of %d bytes, the maximum is %d now", q.ID, q.Name, bytes,
			q.MaxBytes))
	}
	return s.checkChains(q)
}

// sequenceLimit is far above what commits can reach.
const sequenceLimit = 1 << 62

// judge checks one record by itself, and says whether it stays.
func (s *records) judge(q *pool, slot uint32, rec []byte) bool {
	var x ondisk.Record
	x.Decode(rec)
	root := x.Parent == (ondisk.Key{})
	var p problem
	switch next := max(s.c.super.NextCommit, s.c.journaled); {
	case x.Sequence >= sequenceLimit:
		p = errorf("record", adviceEvict, "commit sequence %d, the volume has reached %d", x.Sequence, next)
	case q.TokensPerFile != 0 && (x.Tokens == 0 || x.Tokens > q.TokensPerFile):
		p = errorf("record", adviceEvict, "%d tokens, a file has 1 to %d", x.Tokens, q.TokensPerFile)
	case root && x.Position != 0:
		p = errorf("record", adviceEvict, "a root at position %d", x.Position)
	case !root && x.Position == 0:
		p = errorf("record", adviceEvict, "position 0, although it has a parent")
	case x.Sequence >= next:
		if s.at(q, slot, errorf("record", adviceEvict, "commit sequence %d, the volume has reached %d", x.Sequence,
			next).ask("commits go on above it")) {
			s.c.nextCommit = max(s.c.nextCommit, x.Sequence+1)
		}
	}
	if p.message != "" && s.at(q, slot, p.ask(fixDrop)) {
		return false
	}
	s.sequences = append(s.sequences, x.Sequence)
	s.used[x.Tenant] += q.SlotUnits * ondisk.BlockBytes
	return true
}

// at reports a problem of a slot's record, at its place in the first record table. It says whether it will be repaired.
func (s *records) at(q *pool, slot uint32, p problem) bool {
	l := q.rows[slot/q.slotsPerRow].Tables[0]
	f := p.finding("", NoBlock)
	f.Message = slotName(q, slot) + ": " + p.message
	if m := s.c.member(l.Drive()); m != nil {
		f.Drive, f.Block = m.Name(), l.Unit()+uint64(slot%q.slotsPerRow/ondisk.RecordsPerBlock)
	}
	return s.c.report(f)
}

// hash spreads a key over the index.
func (q *pool) hash(key []byte) uint64 {
	h := binary.LittleEndian.Uint64(key) ^ bits.RotateLeft64(binary.LittleEndian.Uint64(key[8:]), 32)
	return h * 0x9e3779b97f4a7c15 >> 32
}

// insert puts a slot into the index. Of two with one key the one with the higher commit sequence stays; the other is
// the loser.
func (q *pool) insert(slot uint32, rec []byte) (loser uint32, twice bool) {
	mask := uint64(len(q.index) - 1)
	for i := q.hash(rec) & mask; ; i = (i + 1) & mask {
		if q.index[i] == 0 {
			q.index[i] = slot + 1
			return 0, false
		}
		other := q.record(q.index[i] - 1)
		if string(other[:len(ondisk.Key{})]) != string(rec[:len(ondisk.Key{})]) {
			continue
		}
		if binary.LittleEndian.Uint64(rec[ondisk.RecordSeqOff:]) > binary.LittleEndian.Uint64(other[ondisk.RecordSeqOff:]) {
			loser, q.index[i] = q.index[i]-1, slot+1
			return loser, true
		}
		return slot, true
	}
}

// find looks a key up.
func (q *pool) find(key []byte) (slot uint32, ok bool) {
	mask := uint64(len(q.index) - 1)
	for i := q.hash(key) & mask; q.index[i] != 0; i = (i + 1) & mask {
		if string(q.record(q.index[i] - 1)[:len(key)]) == string(key) {
			return q.index[i] - 1, true
		}
	}
	return 0, false
}

// checkTenants compares use and quota.
func (s *records) checkTenants() {
	ids := make([]uint32, 0, len(s.used))
	for id := range s.used {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		t, known := s.c.tenants[id]
		switch {
		case !known && id != 0:
			s.c.volume(notef("record", "",
				"tenant %d has files and is not in the tenant table: no quota holds for it", id))
		case known && t.Quota != 0 && s.used[id] > t.Quota:
			s.c.volume(notef("record", "", "tenant %d (%s) uses %d bytes, its quota is %d now", id, t.Name,
				s.used[id], t.Quota))
		}
	}
}

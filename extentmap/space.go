package extentmap

import (
	"fmt"
	"slices"
	"sort"

	"tuttifs/extentmap/ondisk"
)

func (m *member) firstUnit(segment uint32) uint64 {
	return m.region.SegmentUnit + uint64(segment)<<m.shift
}

// segmentOf is the segment that holds a unit.
func (m *member) segmentOf(unit uint64) (uint32, bool) {
	if unit < m.region.SegmentUnit {
		return 0, false
	}
	s := (unit - m.region.SegmentUnit) >> m.shift
	return uint32(s), s < uint64(m.region.Segments)
}

func (m *member) isUsed(segment uint32) bool { return m.used[segment/64]>>(segment%64)&1 != 0 }

func (m *member) setUsed(first, n uint32, used bool) {
	for s := first; s < first+n; s++ {
		if used {
			m.used[s/64] |= 1 << (s % 64)
			m.free--
		} else {
			m.used[s/64] &^= 1 << (s % 64)
			m.free++
		}
	}
}

// takeRun assigns the lowest aligned run of n (a power of two) free segments.
func (m *member) takeRun(n uint32) (first uint32, ok bool) {
	for s := uint32(0); s+n <= m.region.Segments; {
		if s%64 == 0 && m.used[s/64] == ^uint64(0) {
			s += max(64, n)
			continue
		}
		if m.runFree(s, n) {
			m.setUsed(s, n, true)
			return s, true
		}
		s += n
	}
	return 0, false
}

func (m *member) runFree(first, n uint32) bool {
	for s := first; s < first+n; s++ {
		if s%64 == 0 && s+64 <= first+n {
			if m.used[s/64] != 0 {
				return false
			}
			s += 63
			continue
		}
		if m.isUsed(s) {
			return false
		}
	}
	return true
}

// claimRun assigns a given run; the catalog or the journal names it.
func (m *member) claimRun(unit uint64, n uint32) error {
	s, ok := m.segmentOf(unit)
	if !ok || unit != m.firstUnit(s) || s%n != 0 || uint64(s)+uint64(n) > uint64(m.region.Segments) {
		return fmt.Errorf("drive %d: no run of %d segments begins at unit %d", m.index, n, unit)
	}
	if !m.runFree(s, n) {
		return fmt.Errorf("drive %d: segments %d..%d belong to two rows", m.index, s, s+n-1)
	}
	m.setUsed(s, n, true)
	return nil
}

func (m *member) releaseRun(unit uint64, n uint32) {
	s, _ := m.segmentOf(unit)
	m.setUsed(s, n, false)
}

// takeTable assigns n units for a record table, in a segment that already holds tables if one has room.
func (m *member) takeTable(n uint32) (unit uint64, ok bool) {
	for _, t := range m.tables {
		if t.free >= n {
			if off, ok := t.findRun(n); ok {
				t.set(off, n, true)
				return m.firstUnit(t.number) + uint64(off), true
			}
		}
	}
	if n > m.region.SegmentUnits {
		return 0, false
	}
	for s := int(m.region.Segments) - 1; s >= 0; s-- {
		if s%64 == 63 && m.used[s/64] == ^uint64(0) {
			s -= 63
			continue
		}
		if !m.isUsed(uint32(s)) {
			t := m.addTableSegment(uint32(s))
			t.set(0, n, true)
			return m.firstUnit(t.number), true
		}
	}
	return 0, false
}

func (m *member) addTableSegment(s uint32) *tableSegment {
	t := &tableSegment{number: s, used: make([]uint64, (m.region.SegmentUnits+63)/64), free: m.region.SegmentUnits}
	m.setUsed(s, 1, true)
	i := sort.Search(len(m.tables), func(i int) bool { return m.tables[i].number < s })
	m.tables = append(m.tables, nil)
	copy(m.tables[i+1:], m.tables[i:])
	m.tables[i] = t
	return t
}

func (m *member) tableSegment(s uint32) *tableSegment {
	i := sort.Search(len(m.tables), func(i int) bool { return m.tables[i].number <= s })
	if i < len(m.tables) && m.tables[i].number == s {
		return m.tables[i]
	}
	return nil
}

// claimTable assigns a given place to a record table.
func (m *member) claimTable(unit uint64, n uint32) error {
	s, ok := m.segmentOf(unit)
	off := unit - m.firstUnit(s)
	if !ok || n == 0 || off+uint64(n) > uint64(m.region.SegmentUnits) {
		return fmt.Errorf("drive %d: no record table of %d blocks fits at unit %d", m.index, n, unit)
	}
	t := m.tableSegment(s)
	if t == nil {
		if m.isUsed(s) {
			return fmt.Errorf("drive %d: segment %d belongs to a row and to a record table", m.index, s)
		}
		t = m.addTableSegment(s)
	}
	if !t.isFree(uint32(off), n) {
		return fmt.Errorf("drive %d: two record tables at unit %d", m.index, unit)
	}
	t.set(uint32(off), n, true)
	return nil
}

// releaseTable gives a table's units back, and the segment when it was the last in it.
func (m *member) releaseTable(unit uint64, n uint32) {
	s, _ := m.segmentOf(unit)
	t := m.tableSegment(s)
	t.set(uint32(unit-m.firstUnit(s)), n, false)
	if t.free == m.region.SegmentUnits {
		i := sort.Search(len(m.tables), func(i int) bool { return m.tables[i].number <= s })
		m.tables = append(m.tables[:i], m.tables[i+1:]...)
		m.setUsed(s, 1, false)
	}
}

func (t *tableSegment) set(off, n uint32, used bool) {
	for u := off; u < off+n; u++ {
		if used {
			t.used[u/64] |= 1 << (u % 64)
			t.free--
		} else {
			t.used[u/64] &^= 1 << (u % 64)
			t.free++
		}
	}
}

func (t *tableSegment) isFree(off, n uint32) bool {
	for u := off; u < off+n; u++ {
		if t.used[u/64]>>(u%64)&1 != 0 {
			return false
		}
	}
	return true
}

func (t *tableSegment) findRun(n uint32) (off uint32, ok bool) {
	run, end := uint32(0), uint32(len(t.used)*64)
	for u := uint32(0); u < end; u++ {
		if u%64 == 0 && t.used[u/64] == ^uint64(0) {
			u += 63
			run = 0
			continue
		}
		if t.used[u/64]>>(u%64)&1 != 0 {
			run = 0
			continue
		}
		if run++; run == n {
			return u + 1 - n, true
		}
	}
	return 0, false
}

// rowSegments is what one row of the pool takes, record tables aside.
func (p *Pool) rowSegments() uint64 { return uint64(p.v.width) << p.shift }

// owedSegments is what the minimums of all pools but one still need: rows and their record tables. Volume.mu.
func (v *Volume) owedSegments(but *Pool) uint64 {
	segments, units := uint64(0), uint64(0)
	for _, p := range v.pools {
		if p == but {
			continue
		}
		rows, have := (p.limits.minBytes+p.rowBytes()-1)/p.rowBytes(), uint64(p.rowCount)
		if rows > have {
			segments += (rows - have) * p.rowSegments()
			units += (rows - have) * 2 * uint64(p.tableBlocks)
		}
	}
	return segments + (units+uint64(v.segmentUnits)-1)/uint64(v.segmentUnits)
}

func (v *Volume) freeSegments() uint64 {
	n := uint64(0)
	for _, m := range v.members {
		if m.usable() {
			n += uint64(m.free)
		}
	}
	return n
}

// segmentsInRuns counts the free segments that lie in whole aligned runs of 2^k. Volume.mu.
func (v *Volume) segmentsInRuns(k uint8) uint64 {
	if k == 0 {
		return v.freeSegments()
	}
	runs := uint64(0)
	for _, m := range v.members {
		for s := uint32(0); s+1<<k <= m.region.Segments && m.usable(); s += 1 << k {
			if m.runFree(s, 1<<k) {
				runs++
			}
		}
	}
	return runs << k
}

// Unassigned is how many bytes belong to no pool and are not owed to another one's minimum. They need not lie in runs
// that make a row.
func (p *Pool) Unassigned() uint64 {
	v := p.v
	v.mu.Lock()
	defer v.mu.Unlock()
	all, owed := v.freeSegments()+v.limboSegments, v.owedSegments(p)
	return (max(all, owed) - owed) * uint64(v.segmentUnits) * ondisk.BlockBytes
}

// roomForRows is how many rows more the pool could be given, the minimums of others kept. Entries need whole aligned
// runs; record tables, and what others are owed, take the segments outside of runs first. Volume.mu.
func (v *Volume) roomForRows(p *Pool) uint64 {
	all, owed := v.freeSegments()+v.limboSegments, v.owedSegments(p)
	if all <= owed {
		return 0
	}
	inRuns := v.segmentsInRuns(p.shift) + v.limboSegments
	if outside := all - inRuns; owed > outside {
		inRuns -= owed - outside
	}
	perRow := p.rowSegments()*uint64(v.segmentUnits) + 2*uint64(p.tableBlocks) // in units
	return min(inRuns/p.rowSegments(), (all-owed)*uint64(v.segmentUnits)/perRow)
}

// takeRow assigns W entries and two record tables to a row that is not yet anywhere else. Volume.mu.
func (v *Volume) takeRow(p *Pool, r *row) error {
	n := uint32(1) << p.shift
	order := v.usable()
	sort.SliceStable(order, func(i, j int) bool { return order[i].free > order[j].free })
	// Each round takes at most one entry from each drive, so drives are distinct where there are enough.
	for len(r.units) < v.width {
		took := false
		for _, m := range order {
			if len(r.units) == v.width {
				break
			}
			if s, ok := m.takeRun(n); ok {
				r.drives, r.units, took = append(r.drives, m.index), append(r.units, m.firstUnit(s)), true
			}
		}
		if !took {
			v.giveBack(p, r)
			return fmt.Errorf("%w: no %d free runs of %d segments", ErrNoSpace, v.width, n)
		}
	}
	for c := range r.tables {
		if !v.takeTableCopy(p, r, c) {
			v.giveBack(p, r)
			return fmt.Errorf("%w: no room for a record table", ErrNoSpace)
		}
	}
	return nil
}

// takeTableCopy places copy c: on the row's own drives, rotating from row to row, never on the drive of the other copy
// if there is another one.
func (v *Volume) takeTableCopy(p *Pool, r *row, c int) bool {
	online := slices.DeleteFunc(slices.Clone(v.members), func(m *member) bool { return !m.is(DriveOnline) })
	try := func(m *member) bool {
		if !m.is(DriveOnline) || len(online) > 1 && m.index == r.tables[1-c].Drive() {
			return false
		}
		unit, ok := m.takeTable(p.tableBlocks)
		if ok {
			r.tables[c] = ondisk.Locate(m.index, unit)
		}
		return ok
	}
	for i := range r.drives {
		if try(v.byIndex[r.drives[(int(r.number)+c+i)%len(r.drives)]].Load()) {
			return true
		}
	}
	for _, m := range online {
		if try(m) {
			return true
		}
	}
	return false
}

// claimRow assigns what the medium says that a row has.
func (v *Volume) claimRow(p *Pool, r *row) error {
	for i, d := range r.drives {
		m := v.member(d)
		if m == nil {
			return fmt.Errorf("entry %d is on drive %d, which is no member", i, d)
		}
		if err := m.claimRun(r.units[i], 1<<p.shift); err != nil {
			return err
		}
	}
	for _, t := range r.tables {
		if t == ondisk.NoLocator {
			continue // its drives were lost, and the others had no room
		}
		m := v.member(t.Drive())
		if m == nil {
			return fmt.Errorf("record table on drive %d, which is no member", t.Drive())
		}
		if err := m.claimTable(t.Unit(), p.tableBlocks); err != nil {
			return err
		}
	}
	return nil
}

// giveBack frees a row's segments and tables, as far as it has any.
func (v *Volume) giveBack(p *Pool, r *row) {
	for i, d := range r.drives {
		v.member(d).releaseRun(r.units[i], 1<<p.shift)
	}
	for c := range r.tables {
		v.giveBackTable(p, r, c)
	}
}

// giveBackTable frees the place of a copy of a row's record table, if it has one. Volume.mu.
func (v *Volume) giveBackTable(p *Pool, r *row, c int) {
	if t := r.tables[c]; t != ondisk.NoLocator {
		v.member(t.Drive()).releaseTable(t.Unit(), p.tableBlocks)
		r.tables[c] = ondisk.NoLocator
	}
}

package gpufile

import "slices"

// Stats are monotonic counters and gauges of one pool; all present at zero. hits + misses == lookups.
type Stats struct {
	Lookups, Hits, Misses              uint64 // blocks asked of Pin
	Reserved, Committed, Aborted       uint64
	Evicted, Doomed, Bad               uint64
	Files, FilesPinned, FilesReserved  uint64 // gauges
	SlotsFree, SlotsFreeing, SlotsUsed uint64
	BytesUsed, BytesCapacity           uint64 // capacity: what the pool could hold now at its maximum
}

// Stats is a consistent picture: counters and gauges of one moment.
func (p *Pool) Stats() Stats {
	space := p.s.rowSpace()
	p.mu.RLock() // counters move under it
	defer p.mu.RUnlock()
	c := &p.count
	st := Stats{
		Lookups: c.lookups.Load(), Hits: c.hits.Load(), Misses: c.misses.Load(),
		Reserved: c.reserved.Load(), Committed: c.committed.Load(), Aborted: c.aborted.Load(),
		Evicted: c.evicted.Load(), Doomed: c.doomed.Load(), Bad: c.bad.Load(),
		Files: p.files, FilesPinned: p.pinned, FilesReserved: p.reserved,
	}
	free, freeing, used := p.m.Counts()
	st.SlotsFree, st.SlotsFreeing, st.SlotsUsed = uint64(free), uint64(freeing), uint64(used)
	st.BytesUsed = (p.files + p.reserved) * p.m.SlotBytes()
	slots := p.slots() + p.growable(space)*uint64(p.m.SlotsPerRow())
	st.BytesCapacity = max(p.capped(slots)*p.m.SlotBytes(), st.BytesUsed)
	return st
}

// slots are those of the pool's rows.
func (p *Pool) slots() uint64 {
	free, freeing, used := p.m.Counts()
	return uint64(free) + uint64(freeing) + uint64(used)
}

// capped bounds slots by the cap on live files.
func (p *Pool) capped(slots uint64) uint64 {
	if limit := uint64(p.m.Spec().MaxSlots); limit > 0 {
		return min(slots, limit)
	}
	return slots
}

// growable is how many rows the pool could get from unassigned space.
func (p *Pool) growable(s rowSpace) uint64 {
	rows := s.rows(p.m.EntryUnits() * unitBytes)
	if limit := p.m.Spec().MaxBytes; limit > 0 {
		have := uint64(len(p.m.Rows()))
		rows = min(rows, max(limit/p.rowBytes(), have)-have)
	}
	if limit := uint64(p.m.Spec().MaxSlots); limit > 0 {
		have := min(p.slots(), limit)
		per := uint64(p.m.SlotsPerRow())
		rows = min(rows, (limit-have+per-1)/per)
	}
	return rows
}

const unitBytes = 4096

// rowSpace is the volume's unassigned space as rows see it: W entries on W drives.
type rowSpace struct {
	free    []uint64 // bytes, by drive
	width   int
	segment uint64
}

func (s *Store) rowSpace() rowSpace {
	info := s.v.Info()
	r := rowSpace{width: info.Width, segment: info.SegmentBytes}
	for _, d := range info.Drives {
		r.free = append(r.free, uint64(d.FreeSegments)*info.SegmentBytes)
	}
	return r
}

// rows is the largest number of rows of W entries on W different drives.
func (r rowSpace) rows(entryBytes uint64) uint64 {
	if entryBytes == 0 || r.width == 0 {
		return 0
	}
	fits := func(rows uint64) bool {
		sum := uint64(0)
		for _, f := range r.free {
			sum += min(f/entryBytes, rows)
		}
		return sum >= rows*uint64(r.width)
	}
	lo, hi := uint64(0), uint64(0)
	for _, f := range r.free {
		hi = max(hi, f/entryBytes)
	}
	for lo < hi {
		if mid := (lo + hi + 1) / 2; fits(mid) {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return lo
}

// take removes rows from the space, from the drives with most of it first.
func (r rowSpace) take(rows, entryBytes uint64) {
	for left := rows * uint64(r.width); left > 0; {
		d := 0
		for i := range r.free {
			if r.free[i] > r.free[d] {
				d = i
			}
		}
		n := min(left, rows, r.free[d]/entryBytes)
		if n == 0 {
			return
		}
		r.free[d] -= n * entryBytes
		left -= n
	}
}

// Space is the truth behind df: Total is all that files could occupy, Used is committed and reserved slots, Free the rest,
// Available what a store could use without evicting.
type Space struct{ TotalBytes, UsedBytes, FreeBytes, AvailableBytes, Files, FilesMax uint64 }

// Space adds up what is stored and what still could be: free slots, and whole rows from unassigned space, given to the pools
// that waste least of it first. Used + Free == Total. Slots of unlinked files that are still read count as free, but not as
// available. Before there is a pool, it is the volume's unassigned space.
func (s *Store) Space() Space {
	var sp Space
	free := s.rowSpace()
	pools := s.Pools()
	if len(pools) == 0 {
		b := s.v.Info().FreeBytes
		return Space{TotalBytes: b, FreeBytes: b, AvailableBytes: b}
	}
	// rowBytes/entry bytes: compared by cross-multiplication.
	slices.SortStableFunc(pools, func(a, b *Pool) int {
		x, y := a.rowBytes()*b.m.EntryUnits(), b.rowBytes()*a.m.EntryUnits()
		return int(min(y, x+1)) - int(min(x, y+1))
	})
	for _, p := range pools {
		p.addSpace(&sp, free)
	}
	sp.TotalBytes = sp.UsedBytes + sp.FreeBytes
	return sp
}

func (p *Pool) addSpace(sp *Space, free rowSpace) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	size := p.m.SlotBytes()
	rows := p.growable(free)
	free.take(rows, p.m.EntryUnits()*unitBytes)
	live := p.files + p.reserved
	most := max(p.capped(p.slots()+rows*uint64(p.m.SlotsPerRow())), live)
	ready, freeing, _ := p.m.Counts()
	sp.Files += p.files
	sp.FilesMax += most
	sp.UsedBytes += live * size
	sp.FreeBytes += (most - live) * size
	avail := uint64(ready) + uint64(freeing) + uint64(len(p.toFree)) + rows*uint64(p.m.SlotsPerRow())
	sp.AvailableBytes += min(avail, most-live) * size
}

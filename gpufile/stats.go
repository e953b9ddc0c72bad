package gpufile

import (
	"cmp"
	"math"
	"slices"

	"tuttifs/extentmap/ondisk"
)

// Stats are monotonic counters and gauges of one pool; all present at zero. hits + misses == lookups.
type Stats struct {
	Lookups, Hits, Misses              uint64 // blocks asked of Pin
	Reserved, Committed, Aborted       uint64
	Declined                           uint64 // files that were not admitted
	Evicted, Doomed, Bad, Unreadable   uint64
	Files, FilesPinned, FilesReserved  uint64 // gauges
	FilesAway                          uint64 // likewise: committed, on lost drives or unreadable
	SlotsFree, SlotsFreeing, SlotsUsed uint64
	BytesUsed, BytesCapacity           uint64 // capacity: what the pool could hold now at its maximum
}

// Stats is a consistent picture: counters and gauges of one moment.
func (p *Pool) Stats() Stats {
	p.mu.RLock() // counters move under it
	defer p.mu.RUnlock()
	c := &p.count
	st := Stats{
		Lookups: c.lookups.Load(), Hits: c.hits.Load(), Misses: c.misses.Load(),
		Reserved: c.reserved.Load(), Committed: c.committed.Load(), Aborted: c.aborted.Load(),
		Declined: c.declined.Load(),
		Evicted:  c.evicted.Load(), Doomed: c.doomed.Load(), Bad: c.bad.Load(),
		Unreadable: c.unreadable.Load(), FilesAway: p.away,
		Files: p.files, FilesPinned: p.pinned, FilesReserved: p.reserved,
	}
	free, freeing, used := p.m.Counts()
	st.SlotsFree, st.SlotsFreeing, st.SlotsUsed = uint64(free), uint64(freeing), uint64(used)
	st.BytesUsed = (p.files + p.reserved) * p.m.SlotBytes()
	st.BytesCapacity = max(uint64(p.m.Capacity())*p.m.SlotBytes(), st.BytesUsed)
	return st
}

// Space is the truth behind df: Total is all that files could occupy, Used is committed and reserved slots, Free the
// rest, Available what a store could use without evicting.
type Space struct{ TotalBytes, UsedBytes, FreeBytes, AvailableBytes, Files, FilesMax uint64 }

// Space adds up what is stored and what still could be: free slots, and whole rows from unassigned space with their
// record tables, given to the pools that waste least of it first. Used + Free == Total. Before there is a pool, it is
// the volume's unassigned space.
func (s *Store) Space() Space {
	var sp Space
	left := s.v.Info().FreeBytes
	pools := s.Pools()
	if len(pools) == 0 {
		return Space{TotalBytes: left, FreeBytes: left, AvailableBytes: left}
	}
	if len(pools) == 1 {
		left = math.MaxInt64 // nobody to share with: the volume knows best how many rows will fit
	}
	slices.SortStableFunc(pools, func(a, b *Pool) int { return cmp.Compare(b.fill(), a.fill()) })
	for _, p := range pools {
		left -= p.addSpace(&sp, left)
	}
	sp.TotalBytes = sp.UsedBytes + sp.FreeBytes
	return sp
}

// fill is the part of a row that files occupy.
func (p *Pool) fill() float64 {
	return float64(uint64(p.m.SlotsPerRow())*p.m.SlotBytes()) / float64(p.rowCost())
}

// rowCost is what a row takes from the volume, both copies of its record table included.
func (p *Pool) rowCost() uint64 {
	return p.m.RowBytes() + 2*ondisk.BlockBytes*uint64(ondisk.TableBlocks(p.m.SlotsPerRow()))
}

// addSpace adds a pool's part, and returns what it could take of the volume's unassigned bytes.
func (p *Pool) addSpace(sp *Space, left uint64) (taken uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size, per := p.m.SlotBytes(), uint64(p.m.SlotsPerRow())
	room := p.room()
	live, have := p.files+p.reserved, uint64(room.total)+per*uint64(len(p.growth.tickets))
	rows := uint64(0)
	if most := uint64(p.m.Capacity()); most > have {
		rows = min((most-have+per-1)/per, left/p.rowCost())
	}
	most := max(p.capped(have+rows*per), live)
	sp.Files += p.files
	sp.FilesMax += most
	sp.UsedBytes += live * size
	sp.FreeBytes += (most - live) * size
	sp.AvailableBytes += min(uint64(room.free+room.coming)+rows*per, most-live) * size
	return rows * p.rowCost()
}

// capped bounds slots by the cap on live files.
func (p *Pool) capped(slots uint64) uint64 {
	if limit := uint64(p.m.Spec().MaxSlots); limit > 0 {
		return min(slots, limit)
	}
	return slots
}

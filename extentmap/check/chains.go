package check

import (
	"fmt"

	"tuttifs/extentmap/ondisk"
)

// checkChains follows each file to its parent.
//
// Positions grow along a chain, so a cycle has at least one file that does not lie behind its parent: only those
// are walked.
func (s *records) checkChains(q *pool) error {
	orphans := uint64(0)
	walked := make(map[uint32]bool)
	var stop error
	q.each(func(slot uint32, _ *row, rec []byte) {
		if stop != nil {
			return
		}
		stop = s.step()
		var x, parent ondisk.Record
		x.Decode(rec)
		if x.Parent == (ondisk.Key{}) {
			return
		}
		at, ok := q.find(x.Parent[:])
		if !ok {
			orphans++
			return
		}
		parent.Decode(q.record(at))
		if parent.Tenant != x.Tenant {
			s.at(q, slot, warningf("record", "", "of tenant %d, its parent of tenant %d: it counts as a root",
				x.Tenant,
				parent.Tenant))
		}
		if x.Position == parent.Position+1 {
			return
		}
		s.at(q, slot, warningf("record", "", "position %d, its parent's is %d", x.Position, parent.Position))
		if x.Position <= parent.Position && q.inCycle(slot, walked) {
			if s.at(q, slot, errorf("record", "evict the files of the chain",
				"its chain of parents leads back to itself").ask(fixDrop)) {
				s.c.drop(q, slot)
			}
		}
	})
	if orphans > 0 {
		s.c.volume(notef("record", "they are evicted first", "pool %d (%s): %d files whose parent is gone", q.ID,
			q.Name, orphans))
	}
	return stop
}

// inCycle says whether the way up from a slot meets itself. walked remembers the slots of earlier walks, whose
// cycles are known.
func (q *pool) inCycle(slot uint32, walked map[uint32]bool) bool {
	way := make(map[uint32]bool)
	for !walked[slot] {
		walked[slot], way[slot] = true, true
		var x ondisk.Record
		x.Decode(q.record(slot))
		if x.Parent == (ondisk.Key{}) {
			return false
		}
		next, ok := q.find(x.Parent[:])
		if !ok {
			return false
		}
		slot = next
	}
	return way[slot]
}

func slotName(q *pool, slot uint32) string {
	return fmt.Sprintf("pool %d (%s): slot %d (file %x)", q.ID, q.Name, slot, q.record(slot)[:8])
}

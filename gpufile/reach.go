package gpufile

import (
	"fmt"
	"math"
	"slices"
)

// checkReach refuses what could not be granted if everything else were evicted, in all pools, before anything is: an
// error comes with how many slots are too many. Only pools that must grow or evict for it are looked at. The pools'
// mutexes are held; those of others are only tried, and while one is busy the volume's limit is left to who gives rows.
func (r *reservation) checkReach() (cut int, err error) {
	for j, p := range r.g.pools {
		if room := p.room(); r.need[j] <= room.free+room.coming && (room.cap == 0 || room.used+r.need[j] <= room.cap) {
			continue
		}
		held := int(p.pinned + p.reserved)
		reach := r.reach(j)
		if over := held + r.need[j] - reach; over > cut {
			cut = over
			err = tooMany(p, r.need[j], reach, held)
		}
	}
	// Pools of a family make room for each other as the reservation is shortened.
	return (cut + len(r.g.pools) - 1) / len(r.g.pools), err
}

// tooMany says what is in the way: the pool's limits, or what others hold in it.
func tooMany(p *Pool, need, reach, held int) error {
	if need > reach {
		return fmt.Errorf("%w: %d files are wanted, pool %q can have %d at most", ErrNoSpace, need, p.Name(), reach)
	}
	return fmt.Errorf("%w: %d files are wanted, pool %q can have %d at most, and %d are pinned or reserved",
		ErrNoSpace, need, p.Name(), reach, held)
}

// reach is how many slots a pool could have within its limits if all others gave what they can, what the reservation
// needs in them and their minimums kept.
func (r *reservation) reach(pool int) int {
	p := r.g.pools[pool]
	per, bytes, busy := int(p.m.SlotsPerRow()), int64(0), false
	for _, q := range r.ses.s.set.Load().list {
		if q == p {
			continue
		}
		if j := slices.Index(r.g.pools, q); j >= 0 {
			bytes += q.giveable(q.pinned + q.reserved + uint64(r.need[j]))
		} else if q.mu.TryRLock() {
			bytes += q.giveable(q.pinned + q.reserved)
			q.mu.RUnlock()
		} else {
			busy = true
		}
	}
	spec, limit := p.m.Spec(), math.MaxInt
	if spec.MaxBytes > 0 {
		limit = int(max(spec.MaxBytes/p.m.RowBytes(), p.rows())) * per
	}
	if spec.MaxSlots > 0 {
		limit = min(limit, int(spec.MaxSlots))
	}
	if busy {
		return limit
	}
	slots, cost := int(p.m.Capacity()), int64(p.rowCost())
	if slots >= limit {
		return limit
	}
	if bytes > 0 {
		return min(slots+int((bytes+cost-1)/cost)*per, limit)
	}
	return max(slots-int(-bytes/cost)*per, 0)
}

// giveable is what a pool's rows beyond those for so many slots and its minimum take from the volume; if there are too
// few for the slots, what more would take, negative. The mutex is held.
func (p *Pool) giveable(slots uint64) int64 {
	per := uint64(p.m.SlotsPerRow())
	have := p.rows() + uint64(len(p.growth.tickets))
	if p.growth.draining != none {
		have++
	}
	least := p.leastRows()
	keep := max((slots+per-1)/per, least)
	if keep > have {
		have = max(have, least) // what the minimum lacks is kept from the volume's free space already
	}
	return (int64(have) - int64(keep)) * int64(p.rowCost())
}

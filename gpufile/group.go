package gpufile

import (
	"slices"

	"tuttifs/extentmap"
)

// Group is what a verb acts on: one pool, or all pools of a family. Results are laid out [key][pool]. It never
// changes; a family that gains a pool has a new one.
type Group struct {
	id       uint32
	pools    []*Pool  // by ID
	trailing []uint32 // each pool's hit rule: 0 ALL, n TRAILING n
}

// familyGroup keeps families' groups apart from pools' of equal number.
const familyGroup = 1 << 16

func groupID(id extentmap.PoolID) uint32 { return uint32(id) }

// GroupOfPool is the group of one pool, nil if there is no such pool.
func (s *Store) GroupOfPool(id extentmap.PoolID) *Group {
	if p := s.pool(id); p != nil {
		return p.group
	}
	return nil
}

// GroupOfFamily is the group of a family's pools, nil if there is no such family.
func (s *Store) GroupOfFamily(id uint16) *Group {
	return s.set.Load().families[id]
}

// Pools are the group's pools, in the order of the results' columns.
func (g *Group) Pools() []*Pool { return slices.Clone(g.pools) }

func (g *Group) lock() {
	for _, p := range g.pools {
		p.mu.Lock()
	}
}

func (g *Group) unlock() {
	for _, p := range g.pools {
		p.mu.Unlock()
	}
}

func (g *Group) rlock() {
	for _, p := range g.pools {
		p.mu.RLock()
	}
}

func (g *Group) runlock() {
	for _, p := range g.pools {
		p.mu.RUnlock()
	}
}

// ranks is the number of ranks that commit: the most that any pool of the group has.
func (g *Group) ranks() int {
	n := 0
	for _, p := range g.pools {
		n = max(n, len(p.rankObjects))
	}
	return n
}

// hit finds how many of keys hit together: the largest L so that every pool with the rule ALL has keys[:L], and every
// pool with TRAILING n the last min(n, L) of them. slots is filled [pool][key] for keys[:L] as far as the rule asks;
// elsewhere it is undefined. Another tenant's file is a miss.
func (g *Group) hit(tenant uint32, keys []Key, slots []uint32) int {
	limit := len(keys)
	for j, p := range g.pools {
		if g.trailing[j] == 0 {
			limit = p.prefix(tenant, keys[:limit], slots[j*len(keys):][:limit])
		}
	}
	for j, p := range g.pools {
		if g.trailing[j] != 0 {
			p.lookupOwn(tenant, keys[:limit], slots[j*len(keys):][:limit])
		}
	}
	return g.longest(limit, len(keys), slots)
}

// longest finds the largest hit of at most limit keys that all TRAILING pools allow.
func (g *Group) longest(limit, stride int, slots []uint32) int {
	for n := limit; n > 0; {
		shorter := g.trailingHit(n, stride, slots)
		if shorter == n {
			return n
		}
		n = shorter
	}
	return 0
}

// trailingHit returns n if every TRAILING pool has what the rule asks of n keys, else the largest smaller n that the
// pool found wanting leaves possible.
func (g *Group) trailingHit(n, stride int, slots []uint32) int {
	for j, rule := range g.trailing {
		if rule == 0 {
			continue
		}
		row := slots[j*stride:]
		for i := n - 1; i >= max(0, n-int(min(rule, uint32(n)))); i-- {
			if row[i] == none {
				// Any longer hit than i keys whose window covers key i fails as well, and so do all between.
				return i
			}
		}
	}
	return n
}

// prefix looks keys up to the first miss, a stage at a time, and returns the length of the prefix found.
func (p *Pool) prefix(tenant uint32, keys []Key, slots []uint32) int {
	for base := 0; base < len(keys); base += lookupStage {
		n := min(lookupStage, len(keys)-base)
		p.lookupOwn(tenant, keys[base:base+n], slots[base:base+n])
		for i := range n {
			if slots[base+i] == none {
				return base + i
			}
		}
	}
	return len(keys)
}

// lookupOwn looks keys up; another tenant's files are misses.
func (p *Pool) lookupOwn(tenant uint32, keys []Key, slots []uint32) {
	p.index.lookup(keys, slots)
	for i := range keys {
		if s := slots[i]; s != none && p.m.RecordTenant(s) != tenant {
			slots[i] = none
		}
	}
}

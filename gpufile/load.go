package gpufile

import (
	"cmp"
	"runtime"
	"slices"
	"sync"

	"tuttifs/extentmap/ondisk"
)

// load makes index, chains and policy from the committed records. Passes are linear, and in parallel where they only
// write to places of their own.
func (p *Pool) load() error {
	slots := p.m.Slots()
	if slots == 0 {
		return nil
	}
	if err := p.nodes.ensure(slots); err != nil {
		return err
	}
	entries, raw := mapWords(int(slots))
	defer func() { unmap(raw) }()
	n := 0
	p.m.Committed(func(slot uint32) { entries[n] = uint64(slot); n++ })
	losers := p.loadIndex(entries[:n])
	p.files = uint64(n - len(losers))
	order := entries[:n]
	p.loadChains(order)
	for _, slot := range losers {
		p.nodes.s[slot].meta = 0
	}
	if !p.s.readOnly {
		p.toFree = append(p.toFree, losers...)
		p.flushFrees()
	}
	return nil
}

// parallel runs f over parts of n, on all cores.
func parallel(n int, f func(from, to int)) {
	parts := runtime.GOMAXPROCS(0)
	var wg sync.WaitGroup
	for i := range parts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			f(n*i/parts, n*(i+1)/parts)
		}()
	}
	wg.Wait()
}

// loadIndex fills the index, and returns the slots that lost their key to a record of a higher sequence.
func (p *Pool) loadIndex(slots []uint64) (losers []uint32) {
	var counts [indexShards]int
	for _, s := range slots {
		counts[p.m.RecordKey(uint32(s))[0]]++
	}
	x := p.index
	x.reserveArena(&counts)
	sorted, raw := mapWords(len(slots))
	defer unmap(raw)
	var at [indexShards + 1]int
	for i, c := range counts {
		at[i+1] = at[i] + c
	}
	next := at
	for _, s := range slots {
		k := p.m.RecordKey(uint32(s))
		sorted[next[k[0]]] = x.entry(k, uint32(s))
		next[k[0]]++
	}
	var mu sync.Mutex
	parallel(indexShards, func(from, to int) {
		for shard := from; shard < to; shard++ {
			part := sorted[at[shard]:at[shard+1]]
			slices.Sort(part)
			lost := p.dropDuplicates(part)
			t := &x.shards[shard]
			if !t.place(part) {
				t.count = 0
				t.resizeFrom(part)
			}
			mu.Lock()
			losers = append(losers, lost...)
			mu.Unlock()
		}
	})
	return losers
}

// resizeFrom makes a table of sorted entries that the prepared one had no room for.
func (t *table) resizeFrom(sorted []uint64) {
	old := table{b: sorted, size: t.size}
	old.resize(t.size + t.size/8 + 8)
	*t = old
}

// dropDuplicates empties the entries of records whose key another record with a higher sequence has.
func (p *Pool) dropDuplicates(sorted []uint64) (losers []uint32) {
	for i := range sorted {
		for j := i - 1; j >= 0 && sorted[i] != empty && (sorted[j] == empty || sorted[j]>>32 == sorted[i]>>32); j-- {
			if sorted[j] == empty {
				continue
			}
			a, b := uint32(sorted[j]), uint32(sorted[i])
			if *p.m.RecordKey(a) != *p.m.RecordKey(b) {
				continue
			}
			lose := i
			if p.m.Record(a).Sequence < p.m.Record(b).Sequence {
				lose = j
			}
			losers = append(losers, uint32(sorted[lose]))
			sorted[lose] = empty
		}
	}
	return losers
}

// loadChains links files to their parents and puts them into the policy, the least recent first.
func (p *Pool) loadChains(order []uint64) {
	for _, e := range order {
		p.nodes.s[uint32(e)] = node{first: none, next: none, prev: none, older: none, newer: none}
	}
	for i := range p.index.shards {
		for _, v := range p.index.shards[i].b {
			if v != empty {
				p.nodes.s[uint32(v)].meta = flagVisible
			}
		}
	}
	parents, raw := mapWords(len(order))
	defer unmap(raw)
	ages, raw2 := mapWords(len(p.nodes.s)) // by slot: position above, time of the last use below
	defer unmap(raw2)
	parallel(len(order), func(from, to int) { p.findParents(order[from:to], parents[from:to], ages) })
	for i, e := range order {
		slot := uint32(e)
		if !p.nodes.s[slot].is(flagVisible) {
			continue
		}
		if parent := uint32(parents[i]); parent != none {
			p.link(parent, slot)
		} else if parents[i]>>32 != 0 {
			p.nodes.s[slot].set(flagOrphan)
		}
	}
	p.loadPolicy(order, parents, ages)
}

// findParents looks the parents of slots up: the parent's slot in the lower half, all ones for none; the upper half
// is not zero for a file that should have one. It also fills ages, and counts tenants' slots.
func (p *Pool) findParents(slots, parents, ages []uint64) {
	var keys [lookupStage]Key
	var found [lookupStage]uint32
	var recs [lookupStage]ondisk.Record
	use := make(map[uint32]int64)
	for base := 0; base < len(slots); base += lookupStage {
		n := min(lookupStage, len(slots)-base)
		for i, s := range slots[base : base+n] {
			recs[i] = p.m.Record(uint32(s))
			keys[i] = recs[i].Parent
			used := max(recs[i].LastHit, uint32(recs[i].CommitTime/1e9))
			ages[s] = uint64(recs[i].Position)<<32 | uint64(used)
		}
		p.index.lookup(keys[:n], found[:n])
		for i := range n {
			parent := found[i]
			if parent != none && !isParent(p.m.Record(parent), &recs[i]) {
				parent = none
			}
			parents[base+i] = uint64(parent)
			if keys[i] != (Key{}) {
				parents[base+i] |= 1 << 32
			} else {
				parents[base+i] = uint64(none)
			}
			if p.nodes.s[uint32(slots[base+i])].is(flagVisible) {
				use[recs[i].Tenant]++
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for tenant, n := range use {
		p.charge(tenant, n)
	}
}

// loadPolicy inserts the files by the time of their last use, children before their parents where that is equal.
func (p *Pool) loadPolicy(order, scratch, ages []uint64) {
	// Sort by position, the deepest first, then stably by time.
	for i, e := range order {
		slot := uint32(e)
		order[i] = ^(ages[slot]>>32)<<32 | uint64(slot)
	}
	radixSort(order, scratch)
	for i, e := range order {
		slot := uint32(e)
		order[i] = ages[slot]<<32 | uint64(slot)
	}
	radixSort(order, scratch)
	for _, e := range order {
		slot := uint32(e)
		switch n := &p.nodes.s[slot]; {
		case !n.is(flagVisible):
		case n.is(flagOrphan):
			p.orphans.pushNewest(slot)
		default:
			p.policy.insert(slot, none)
		}
	}
}

// radixSort sorts by the upper halves, stably.
func radixSort(a, scratch []uint64) {
	if len(a) < 1<<16 {
		slices.SortStableFunc(a, func(x, y uint64) int { return cmp.Compare(x>>32, y>>32) })
		return
	}
	const bitsPerPass = 16
	for shift := 32; shift < 64; shift += bitsPerPass {
		var counts [1<<bitsPerPass + 1]int
		for _, v := range a {
			counts[v>>shift&(1<<bitsPerPass-1)+1]++
		}
		for i := 1; i < len(counts); i++ {
			counts[i] += counts[i-1]
		}
		for _, v := range a {
			d := v >> shift & (1<<bitsPerPass - 1)
			scratch[counts[d]] = v
			counts[d]++
		}
		copy(a, scratch[:len(a)])
	}
}

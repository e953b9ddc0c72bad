package gpufile

import (
	"encoding/binary"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"tuttifs/extentmap/ondisk"
)

// loading makes index, chains and policy from the committed records. Memory is what that waits for: to be read, and to
// be given by the system in the first place. So every pass runs on all cores, over parts of the rows or over what only
// one worker writes, and reads only the fields it needs; and the scratch tables are two words a slot, used again and
// again.
type loading struct {
	p     *Pool
	parts []loadPart
	// words are the index entries in the order of their shards, then the files in the order of their age.
	words []uint64
	// scratch has by slot what the index needs to know of the key; then one more than the parent's slot, 0 for no
	// parent; then it is the sort's.
	scratch []uint64
	losers  []uint32 // slots that lost their key to a record of a higher sequence
}

// loadPart is one worker's share: a range of rows, and what was counted there.
type loadPart struct {
	from, to         uint32
	at               [indexShards]int // entries by shard; then where the next of each goes
	tenants          map[uint32]int64
	first, last      uint32 // time of use
	position         uint32 // highest
	files            int
	visible, orphans int // in the policy, and among the orphans
}

func (p *Pool) load() error {
	slots := p.m.Slots()
	if slots == 0 {
		return nil
	}
	if err := p.nodes.ensure(slots); err != nil {
		return err
	}
	scratch, raw := mapWords(int(slots))
	defer unmap(raw)
	l := loading{p: p, parts: loadParts(slots / p.m.SlotsPerRow()), scratch: scratch}
	l.each((*loading).readRecords)
	files := 0
	for i := range l.parts {
		files += l.parts[i].files
	}
	words, raw2 := mapWords(files)
	defer unmap(raw2)
	l.words = words
	l.loadIndex()
	l.each((*loading).findParents)
	parallel(len(scratch), l.linkParents)
	l.loadPolicy()
	l.chargeTenants()
	p.files = uint64(files - len(l.losers))
	if !p.s.readOnly {
		p.toFree = append(p.toFree, l.losers...)
		p.flushFrees()
	}
	return nil
}

// loadParts divides rows among all cores.
func loadParts(rows uint32) []loadPart {
	n := min(uint32(runtime.GOMAXPROCS(0)), rows)
	parts := make([]loadPart, n)
	for i := range parts {
		parts[i] = loadPart{
			from: uint32(uint64(rows) * uint64(i) / uint64(n)), to: uint32(uint64(rows) * uint64(i+1) / uint64(n)),
			tenants: make(map[uint32]int64), first: ^uint32(0),
		}
	}
	return parts
}

// each runs f for all parts at once.
func (l *loading) each(f func(l *loading, part *loadPart)) {
	parallel(len(l.parts), func(from, to int) {
		for i := from; i < to; i++ {
			f(l, &l.parts[i])
		}
	})
}

// parallel runs f over parts of n, on all cores.
func parallel(n int, f func(from, to int)) {
	workers := runtime.GOMAXPROCS(0)
	var wg sync.WaitGroup
	for i := range workers {
		if from, to := n*i/workers, n*(i+1)/workers; from < to {
			wg.Go(func() { f(from, to) })
		}
	}
	wg.Wait()
}

// A committed slot's word of scratch, for the index: committedWord, the key's shard above its tag.
const committedWord = uint64(1) << 63

// readRecords counts, and makes the nodes and the words for the index. Until the policy links them, a node's links hold
// what it is sorted by: the position in older, the time of the last use in newer.
func (l *loading) readRecords(part *loadPart) {
	le := binary.LittleEndian
	nodes := l.p.nodes.s
	tenant, n := uint32(0), int64(0)
	l.p.m.CommittedIn(part.from, part.to, func(slot uint32, rec []byte) {
		used := max(l.p.m.LastHit(slot), uint32(int64(le.Uint64(rec[ondisk.RecordTimeOff:]))/1e9))
		position := le.Uint32(rec[ondisk.RecordPositionOff:])
		nodes[slot] = node{
			meta: flagVisible, first: none, next: none, prev: none, older: position, newer: used,
		}
		part.first, part.last = min(part.first, used), max(part.last, used)
		part.position = max(part.position, position)
		k := (*Key)(rec[ondisk.RecordKeyOff:])
		l.scratch[slot] = committedWord | uint64(k[0])<<tagBits | l.p.index.tag(k)
		part.at[k[0]]++
		part.files++
		if t := le.Uint32(rec[ondisk.RecordTenantOff:]); t != tenant {
			part.tenants[tenant] += n
			tenant, n = t, 0
		}
		n++
	})
	part.tenants[tenant] += n
}

// loadIndex fills the index. Of records with one key the one with the highest sequence stays.
func (l *loading) loadIndex() {
	var ends [indexShards]int
	next := 0
	for shard := range ends {
		for i := range l.parts {
			at := &l.parts[i].at[shard]
			*at, next = next, next+*at
		}
		ends[shard] = next
	}
	x := l.p.index
	x.reserveArena(&ends)
	l.each((*loading).scatterEntries)
	var mu sync.Mutex // losers
	var shards atomic.Int32
	parallel(runtime.GOMAXPROCS(0), func(int, int) {
		var scratch []uint64
		for shard := int(shards.Add(1)) - 1; shard < indexShards; shard = int(shards.Add(1)) - 1 {
			entries := l.words[:ends[shard]]
			if shard > 0 {
				entries = entries[ends[shard-1]:]
			}
			if len(scratch) < len(entries) {
				scratch = make([]uint64, len(entries)+len(entries)/8)
			}
			entries = radixSort(entries, scratch[:len(entries)], 32, 32+tagBits, 1)
			lost := l.p.dropDuplicates(entries)
			t := &x.shards[shard]
			if !t.place(entries) {
				t.count = 0
				t.resizeFrom(entries)
			}
			mu.Lock()
			l.losers = append(l.losers, lost...)
			mu.Unlock()
		}
	})
	for _, slot := range l.losers {
		l.p.nodes.s[slot] = node{}
		l.parts[0].tenants[l.p.m.RecordTenant(slot)]--
	}
}

// scatterEntries puts a part's index entries where their shards are, in the order of slots.
func (l *loading) scatterEntries(part *loadPart) {
	perRow := l.p.m.SlotsPerRow()
	first := part.from * perRow
	for i, w := range l.scratch[first : part.to*perRow] {
		if w&committedWord == 0 {
			continue
		}
		at := &part.at[w>>tagBits&(indexShards-1)]
		l.words[*at] = w&(1<<tagBits-1)<<32 | uint64(first+uint32(i))
		*at++
	}
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

// children are files whose parents are looked up together.
type children struct {
	n         int
	slots     [lookupStage]uint32
	tenants   [lookupStage]uint32
	parents   [lookupStage]Key
	positions [lookupStage]uint32
	found     [lookupStage]uint32
}

// findParents fills scratch with the visible parents of a part's files, and marks those that should have one and do
// not.
func (l *loading) findParents(part *loadPart) {
	le := binary.LittleEndian
	nodes := l.p.nodes.s
	var c children
	last, lastKey := none, &Key{}
	l.p.m.CommittedIn(part.from, part.to, func(slot uint32, rec []byte) {
		n := &nodes[slot]
		l.scratch[slot] = 0
		if !n.is(flagVisible) {
			return
		}
		part.visible++
		parent := (*Key)(rec[ondisk.RecordParentOff:])
		tenant := le.Uint32(rec[ondisk.RecordTenantOff:])
		switch {
		case *parent == (Key{}):
		case *parent == *lastKey && l.isParent(last, tenant, n.older): // as a chain stored in one go lies
			l.scratch[slot] = uint64(last) + 1
		default:
			c.slots[c.n], c.tenants[c.n], c.parents[c.n], c.positions[c.n] = slot, tenant, *parent, n.older
			if c.n++; c.n == lookupStage {
				l.lookUp(part, &c)
			}
		}
		last, lastKey = slot, (*Key)(rec[ondisk.RecordKeyOff:])
	})
	l.lookUp(part, &c)
}

// isParent is what isParent says of records, for files whose nodes are not linked yet.
func (l *loading) isParent(parent, tenant, position uint32) bool {
	return l.p.nodes.s[parent].older < position && l.p.m.RecordTenant(parent) == tenant
}

func (l *loading) lookUp(part *loadPart, c *children) {
	l.p.index.lookup(c.parents[:c.n], c.found[:c.n])
	for i, slot := range c.slots[:c.n] {
		if parent := c.found[i]; parent != none && l.isParent(parent, c.tenants[i], c.positions[i]) {
			l.scratch[slot] = uint64(parent) + 1
			continue
		}
		l.p.nodes.s[slot].set(flagOrphan)
		part.visible--
		part.orphans++
	}
	c.n = 0
}

// linkParents links the children of a range of parents. A child's links and flags, but for its own list of children,
// belong to whoever has its parent: each word has one writer.
func (l *loading) linkParents(from, to int) {
	for slot, parent := range l.scratch {
		if parent > uint64(from) && parent <= uint64(to) {
			l.p.link(uint32(parent-1), uint32(slot))
		}
	}
}

// loadPolicy inserts the files by the time of their last use, children before their parents where that is equal.
func (l *loading) loadPolicy() {
	first, last, position := ^uint32(0), uint32(0), uint32(0)
	visible, orphans := 0, 0
	for i := range l.parts {
		part := &l.parts[i]
		first, last = min(first, part.first), max(last, part.last)
		position = max(position, part.position)
		visible, orphans = visible+part.visible, orphans+part.orphans
	}
	if visible+orphans == 0 {
		return
	}
	// A word is time, depth upside down, slot. Where that is too much for one, depths beyond what fits count as equal.
	slotBits := bits.Len(uint(len(l.scratch) - 1))
	depthBits := min(bits.Len32(position), 64-slotBits-bits.Len32(last-first))
	depthMax := uint32(uint64(1)<<depthBits - 1)
	listed, orphaned := l.words[:visible], l.words[visible:visible+orphans]
	starts := make([][2]int, len(l.parts))
	for i := 1; i < len(starts); i++ {
		before := &l.parts[i-1]
		starts[i] = [2]int{starts[i-1][0] + before.visible, starts[i-1][1] + before.orphans}
	}
	perRow := l.p.m.SlotsPerRow()
	parallel(len(l.parts), func(from, to int) {
		for i := from; i < to; i++ {
			at := starts[i]
			for slot := l.parts[i].from * perRow; slot < l.parts[i].to*perRow; slot++ {
				n := &l.p.nodes.s[slot]
				if !n.is(flagVisible) {
					continue
				}
				word := uint64(n.newer-first)<<depthBits | uint64(depthMax-min(n.older, depthMax))
				word = word<<slotBits | uint64(slot)
				if n.is(flagOrphan) {
					orphaned[at[1]] = word
					at[1]++
				} else {
					listed[at[0]] = word
					at[0]++
				}
			}
		}
	})
	top := slotBits + depthBits + bits.Len32(last-first)
	mask := uint64(1)<<slotBits - 1
	l.p.policy.load(radixSort(listed, l.scratch[:visible], slotBits, top, len(l.parts)), mask)
	l.p.orphans.load(radixSort(orphaned, l.scratch[:orphans], slotBits, top, len(l.parts)), mask)
}

// chargeTenants counts the slots of all tenants.
func (l *loading) chargeTenants() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	all := l.parts[0].tenants
	for i := range l.parts[1:] {
		for tenant, n := range l.parts[i+1].tenants {
			all[tenant] += n
		}
	}
	for tenant, n := range all {
		if n != 0 {
			l.p.charge(tenant, n)
		}
	}
}

const (
	radixBits = 11
	// radixMin is the length from which counting beats comparing.
	radixMin = 1 << 10
)

// radixSort sorts words by their bits from low up to, and not including, top, where words that are equal there are in
// ascending order already. The result is in a or in scratch, which is as long. Digits that all words have alike are
// counted and no more.
func radixSort(a, scratch []uint64, low, top, workers int) []uint64 {
	if len(a) < radixMin {
		slices.Sort(a)
		return a
	}
	counts := make([][1 << radixBits]int, workers)
	share := func(f func(counts *[1 << radixBits]int, part []uint64)) {
		var wg sync.WaitGroup
		for i := range counts[1:] {
			part := a[len(a)*(i+1)/workers : len(a)*(i+2)/workers]
			wg.Go(func() { f(&counts[i+1], part) })
		}
		f(&counts[0], a[:len(a)/workers])
		wg.Wait()
	}
	for shift := low; shift < top; shift += radixBits {
		mask := uint64(1)<<min(radixBits, top-shift) - 1
		share(func(counts *[1 << radixBits]int, part []uint64) {
			clear(counts[:])
			for _, w := range part {
				counts[w>>shift&mask]++
			}
		})
		alike := 0
		for i := range counts {
			alike += counts[i][a[0]>>shift&mask]
		}
		if alike == len(a) {
			continue
		}
		next := 0
		for digit := range mask + 1 {
			for i := range counts {
				at := &counts[i][digit]
				*at, next = next, next+*at
			}
		}
		share(func(at *[1 << radixBits]int, part []uint64) {
			for _, w := range part {
				d := w >> shift & mask
				scratch[at[d]] = w
				at[d]++
			}
		})
		a, scratch = scratch, a
	}
	return a
}

package gpufile

import (
	"errors"
	"fmt"

	"tuttifs/extentmap"
	"tuttifs/wear"
)

const (
	// freeBatch bounds the frees of one transaction.
	freeBatch = 1024
	// evictBatch bounds the files that are evicted by request in one hold of a pool's mutex: lookups go on in between.
	evictBatch = 1024
	// orphanTries bounds how many orphans that cannot go a plan looks at.
	orphanTries = 64
)

// victim is one file that a plan takes: out of its lists, still in the index, so that the plan can be undone.
type victim struct {
	slot, parent uint32 // parent: the file it was linked to, or none
	orphan       bool
}

// plan takes n more victims and reports whether it found them all; what it found stays in p.victims until applyPlan or
// undoPlan. Orphans go first, then what the policy says. p.searching says whether there may be more where the policy
// looks next.
func (p *Pool) plan(n int) bool {
	p.searching = false
	if uint64(n)+uint64(len(p.victims)) > p.unpinned() {
		return false
	}
	for range n {
		slot, ok := p.orphanVictim()
		if !ok {
			slot, ok = p.policy.victim(p.evictable)
		}
		if !ok {
			p.searching = p.policy.gaveUp()
			return false
		}
		p.take(slot)
	}
	return true
}

// unpinned is the number of visible files without pins, those of a plan included.
func (p *Pool) unpinned() uint64 { return p.files - (p.pinned - p.doomed) }

func (p *Pool) evictable(slot uint32) bool {
	n := &p.nodes.s[slot]
	return n.first == none && n.pins() == 0
}

// take notes a victim that is already out of the policy or the orphans.
func (p *Pool) take(slot uint32) {
	n := &p.nodes.s[slot]
	v := victim{slot: slot, orphan: n.is(flagOrphan)}
	v.parent = p.unlink(slot)
	n.clear(flagVisible)
	p.victims = append(p.victims, v)
}

// orphanVictim takes the leaf of the oldest orphan's chain that can go: what hangs on an orphan is out of reach with
// it.
func (p *Pool) orphanVictim() (uint32, bool) {
	for range min(p.orphans.n, orphanTries) {
		top := p.orphans.oldest
		s := top
		for !p.nodes.s[s].leaf() {
			s = p.nodes.s[s].first
		}
		if !p.evictable(s) {
			p.orphans.toNewest(top)
			continue
		}
		if s == top {
			p.orphans.remove(s)
		} else {
			p.policy.remove(s)
		}
		return s, true
	}
	return none, false
}

// planTenant takes up to n more victims of one tenant, in the order of eviction, and returns how many. It walks past
// the others' files without a change to the order; because that walk is long where others own most, it takes a little
// more than asked when the tenant is large.
func (p *Pool) planTenant(tenant uint32, n int) int {
	want := n + int(p.tenantSlots(tenant)/256)
	taken := 0
	visit := func(s uint32) bool {
		if p.evictable(s) && p.m.RecordTenant(s) == tenant {
			if p.nodes.s[s].is(flagOrphan) {
				p.orphans.remove(s)
			} else {
				p.policy.remove(s)
			}
			p.take(s)
			taken++
		}
		return taken < want
	}
	// A parent that has become a leaf may lie where the walk has passed: walk until one finds nothing.
	for before := -1; taken < want && before != taken; {
		before = taken
		p.orphans.each(visit)
		if taken < want {
			p.policy.each(visit)
		}
	}
	return taken
}

// undoPlan puts all victims back, the last first.
func (p *Pool) undoPlan() {
	for i := len(p.victims) - 1; i >= 0; i-- {
		v := p.victims[i]
		p.nodes.s[v.slot].set(flagVisible)
		if v.parent != none {
			p.link(v.parent, v.slot)
		}
		if v.orphan {
			p.orphans.pushOldest(v.slot)
		} else {
			p.policy.restore(v.slot)
		}
	}
	p.victims = p.victims[:0]
}

// applyPlan evicts all victims; the caller flushes the frees.
func (p *Pool) applyPlan() int {
	n := len(p.victims)
	for _, v := range p.victims {
		if !v.orphan {
			p.policy.evicted(v.slot)
		}
		if p.admission == wear.CostAware {
			p.s.gate.Evicted(p.keySpace, p.m.RecordKey(v.slot))
		}
		p.forget(v.slot)
		p.nodes.s[v.slot].meta = 0
		p.toFree = append(p.toFree, v.slot)
	}
	p.victims = p.victims[:0]
	p.count.evicted.Add(uint64(n))
	return n
}

// forget takes a file out of the index and the accounts.
func (p *Pool) forget(slot uint32) {
	r := p.m.Record(slot)
	p.index.remove(&r.Key, slot)
	p.changes.note(&r.Key, r.Tenant, true)
	p.charge(r.Tenant, -1)
	p.files--
}

// doom makes a visible file a miss at once, whatever hangs on it; its slot is freed at the last unpin.
func (p *Pool) doom(slot uint32) {
	p.orphanChildren(slot)
	p.detach(slot)
	p.forget(slot)
	n := &p.nodes.s[slot]
	n.clear(flagVisible | flagSecond | refMask)
	if n.pins() > 0 {
		n.set(flagDoomed)
		p.doomed++
		return
	}
	n.meta = 0
	p.toFree = append(p.toFree, slot)
}

// flushFrees hands freed slots to the journal. What it has no room for now (again) waits for the store's worker.
func (p *Pool) flushFrees() (again bool) {
	for len(p.toFree) > 0 {
		n := min(len(p.toFree), freeBatch)
		t := p.s.v.Begin()
		for _, slot := range p.toFree[:n] {
			t.Free(p.m, slot)
		}
		var done func(error)
		if n == len(p.toFree) && len(p.freeWaiters) > 0 {
			waiters := p.freeWaiters
			done = func(err error) { completeAll(waiters, err) }
		}
		if _, err := t.Submit(done); err != nil {
			if errors.Is(err, extentmap.ErrAgain) {
				p.s.kick()
				return true
			}
			// The volume takes nothing any more: what the records say is found at the next mount.
			completeAll(p.freeWaiters, err)
			p.freeWaiters = nil
			return false
		}
		if done != nil {
			p.freeWaiters = nil
		}
		p.toFree = p.toFree[n:]
	}
	p.toFree = p.toFree[:0]
	if len(p.freeWaiters) > 0 { // nothing left to wait for
		completeAll(p.freeWaiters, nil)
		p.freeWaiters = nil
	}
	return false
}

func completeAll(tickets []*extentmap.Ticket, err error) {
	for _, t := range tickets {
		t.Complete(err)
	}
}

// Unlink dooms a file: a miss at once; its slot is free at the last unpin.
func (p *Pool) Unlink(key *Key) error {
	if p.s.readOnly {
		return ErrReadOnly
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	slot := p.index.find(key)
	if slot == none {
		return ErrNotFound
	}
	p.doom(slot)
	p.count.doomed.Add(1)
	p.flushFrees()
	return nil
}

// EvictPrefix evicts key and its ancestors up to the first one that another chain shares. It returns how many: none
// if other chains go on from key itself. Pinned files of the chain are doomed.
func (p *Pool) EvictPrefix(key *Key) (int, error) {
	if p.s.readOnly {
		return 0, ErrReadOnly
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	slot := p.index.find(key)
	if slot == none {
		return 0, ErrNotFound
	}
	n := 0
	for slot != none && p.nodes.s[slot].leaf() {
		parent := none
		if p.nodes.s[slot].is(flagLinked) {
			r := p.m.Record(slot)
			parent = p.index.find(&r.Parent)
		}
		p.doom(slot)
		n++
		slot = parent
	}
	p.count.evicted.Add(uint64(n))
	p.flushFrees()
	return n, nil
}

// EvictCount evicts up to n files by policy.
func (p *Pool) EvictCount(n int) (int, error) {
	if p.s.readOnly {
		return 0, ErrReadOnly
	}
	if n < 0 {
		return 0, fmt.Errorf("%w: evict %d files", ErrInvalid, n)
	}
	evicted := 0
	for evicted < n {
		k, more := p.evictSome(min(n-evicted, evictBatch))
		if k == 0 && !more {
			break
		}
		evicted += k
	}
	return evicted, nil
}

// evictSome evicts up to n files in one hold of the pool's mutex, and says whether there may be more where the policy
// looks next.
func (p *Pool) evictSome(n int) (evicted int, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n = int(min(uint64(n), p.unpinned()))
	p.plan(n)
	more = p.searching
	evicted = p.applyPlan()
	p.flushFrees()
	return evicted, more
}

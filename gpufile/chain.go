package gpufile

import (
	"slices"

	"tuttifs/extentmap/ondisk"
)

// A file is linked to its parent if that is visible, of the same tenant, and of a lower position: positions grow along
// links, so that links cannot form a ring whatever keys an engine names. The store itself numbers what it can see the
// parent of.

// parent finds the visible parent of a record, or none.
func (p *Pool) parent(r *ondisk.Record) uint32 {
	slot := p.index.find(&r.Parent)
	if slot == none || !isParent(p.m.Record(slot), r) {
		return none
	}
	return slot
}

func isParent(parent ondisk.Record, r *ondisk.Record) bool {
	return parent.Tenant == r.Tenant && parent.Position < r.Position
}

// children is the number of a file's children: kept in the first child's unused link.
func (p *Pool) children(slot uint32) uint32 {
	if first := p.nodes.s[slot].first; first != none {
		return p.nodes.s[first].prev
	}
	return 0
}

func (p *Pool) link(parent, slot uint32) {
	s := p.nodes.s
	n, up := &s[slot], &s[parent]
	n.set(flagLinked)
	n.next, n.prev = up.first, 1
	if up.first != none {
		n.prev = s[up.first].prev + 1
		s[up.first].prev = slot
	}
	up.first = slot
}

// unlink takes a linked file out of its parent's children and returns the parent; none if it was not linked.
func (p *Pool) unlink(slot uint32) (parent uint32) {
	s := p.nodes.s
	n := &s[slot]
	if !n.is(flagLinked) {
		return none
	}
	r := p.m.Record(slot)
	parent = p.index.find(&r.Parent)
	up := &s[parent]
	left := s[up.first].prev - 1
	if up.first == slot {
		up.first = n.next
	} else {
		s[n.prev].next = n.next
		if n.next != none {
			s[n.next].prev = n.prev
		}
	}
	if up.first != none {
		s[up.first].prev = left
	} else if !up.is(flagOrphan) {
		p.policy.exposed(parent)
	}
	n.clear(flagLinked)
	n.next, n.prev = none, none
	return parent
}

// orphan puts a file that is in no list among the orphans.
func (p *Pool) orphan(slot uint32) {
	p.nodes.s[slot].set(flagOrphan)
	p.orphans.pushNewest(slot)
}

// orphanChildren makes orphans of all children of a file that goes.
func (p *Pool) orphanChildren(slot uint32) {
	s := p.nodes.s
	for c := s[slot].first; c != none; {
		next := s[c].next
		s[c].clear(flagLinked)
		s[c].next, s[c].prev = none, none
		if s[c].is(flagVisible) {
			p.policy.remove(c)
			p.orphan(c)
		}
		c = next
	}
	s[slot].first = none
}

// awaitParent notes an orphan whose parent is being stored.
func (p *Pool) awaitParent(slot uint32, r *ondisk.Record) {
	if w, ok := p.pending[r.Parent]; ok && w.r.tenant == r.Tenant {
		w.orphans = append(w.orphans, slot)
		p.pending[r.Parent] = w
	}
}

// adopt links an orphan to its parent if that is there again. Orphans that another slot's reuse made something else are
// left alone.
func (p *Pool) adopt(slot uint32) {
	if !p.nodes.s[slot].is(flagOrphan) {
		return
	}
	r := p.m.Record(slot)
	parent := p.parent(&r)
	if parent == none {
		return
	}
	p.unlist(slot)
	p.link(parent, slot)
	p.policy.insert(slot, parent)
}

// Chain is the prefix of a block, root first, ending with key; it stops early where a parent is gone (complete false).
func (p *Pool) Chain(key *Key) (chain []Key, complete bool, ok bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	slot := p.index.find(key)
	if slot == none {
		return nil, false, false
	}
	for {
		r := p.m.Record(slot)
		chain = append(chain, r.Key)
		if r.Parent == (Key{}) {
			complete = true
			break
		}
		if slot = p.parent(&r); slot == none {
			break
		}
	}
	slices.Reverse(chain)
	return chain, complete, true
}

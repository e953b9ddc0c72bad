package gpufile

import "fmt"

// policy orders the committed files of one pool for eviction. It lives on the pool's nodes (links, one queue flag, two
// reference bits) and is called under the pool's mutex. Every visible file that is no orphan is in it exactly once.
//
// Victims must be evictable: a leaf, unpinned, ours to take. Who implements a policy may meet files that are not at any
// place in its order, and passes them over in amortised constant time.
type policy interface {
	// insert adds a file that was just committed; parent is its parent's slot, or none.
	insert(slot, parent uint32)
	// load adds the files of a mount, the least recently used first, to a policy that is empty: slots are the words'
	// bits in mask.
	load(words []uint64, mask uint64)
	// touch notes a hit. A pin touches a chain leaf first, so that a parent is never less recent than its children.
	touch(slot uint32)
	// remove takes a file out for other reasons than eviction.
	remove(slot uint32)
	// victim takes the next file to evict out, or reports that there is none.
	victim(evictable func(slot uint32) bool) (slot uint32, ok bool)
	// gaveUp says whether the last victim found none within the looks that one call may take: the next call goes on from
	// there.
	gaveUp() bool
	// exposed says that a file has just lost its last child: it can be a victim from now on.
	exposed(slot uint32)
	// unpinned says that a file has just lost its last pin.
	unpinned(slot uint32)
	// restore undoes victim, in reverse order of the victims.
	restore(slot uint32)
	// evicted says that a victim is gone for good.
	evicted(slot uint32)
	// each visits files in the order of their eviction, without changing it, until f says no.
	each(f func(slot uint32) bool)
	// len is the number of files in the policy.
	len() int
	close()
}

// Policies are the names that Options.Policy takes; the first is the default.
var Policies = []string{"lru", "sieve", "s3fifo"}

func newPolicy(name string, p *Pool) (policy, error) {
	switch name {
	case "", "lru":
		return newLRU(&p.nodes), nil
	case "sieve":
		return newSieve(&p.nodes), nil
	case "s3fifo":
		return newS3FIFO(&p.nodes, func(slot uint32) uint64 { return p.index.hash(p.m.RecordKey(slot)) }), nil
	}
	return nil, fmt.Errorf("%w: eviction policy %q; there are %q", ErrInvalid, name, Policies)
}

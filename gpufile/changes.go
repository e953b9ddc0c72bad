package gpufile

import "fmt"

// Change is one file of a pool that became visible, or went.
type Change struct {
	Key     Key
	Tenant  uint32
	Removed bool
}

// ChangesKept is how far behind a reader of a pool's changes may be without losing any.
const ChangesKept = 1 << 16

// changeLog is a ring of a pool's last changes. The pool's mutex guards it.
type changeLog struct {
	ring []Change // nil until somebody asks: what nobody reads costs nothing
	next uint64   // the number of the next change, from 1 on
}

// note adds a change, if somebody reads them.
func (l *changeLog) note(key *Key, tenant uint32, removed bool) {
	if l.ring == nil {
		return
	}
	l.ring[l.next%ChangesKept] = Change{Key: *key, Tenant: tenant, Removed: removed}
	l.next++
}

// Changes copies into out what happened to the pool's files from number since on, in order: n of them, and the number
// to go on with. lost is how many between since and the first of these are no longer kept. With since 0 nothing is
// copied: that is where a reader begins, before it looks for what is there.
func (p *Pool) Changes(since uint64, out []Change) (n int, next, lost uint64, err error) {
	if since == 0 {
		return 0, p.watch(), 0, nil
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	l := &p.changes
	if since > l.next {
		return 0, 0, 0, fmt.Errorf("%w: change %d is asked for, and %d is the next: begin with 0", ErrInvalid, since, l.next)
	}
	if l.next-since > ChangesKept {
		lost = l.next - since - ChangesKept
		since += lost
	}
	for n < len(out) && since < l.next {
		out[n] = l.ring[since%ChangesKept]
		n, since = n+1, since+1
	}
	return n, since, lost, nil
}

// watch has changes noted from now on, and returns the next one's number.
func (p *Pool) watch() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.changes
	if l.ring == nil {
		l.ring, l.next = make([]Change, ChangesKept), max(1, l.next)
	}
	return l.next
}

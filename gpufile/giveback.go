package gpufile

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"
)

// Pools share the volume by whole rows. A pool that finds no room asks for a row; the worker empties the cheapest row
// of a pool above its minimum, leaf first, and gives it back to the volume.

const (
	giveTries = 4 // rows of one pool that are tried
	giveWait  = 5 * time.Second
	givePause = time.Second // after nobody could give
	// innerCost is what evicting an inner node weighs against a leaf: what hangs on it goes too.
	innerCost = 4
)

// rows is the number of rows whose slots are there.
func (p *Pool) rows() uint64 {
	free, freeing, used := p.m.Counts()
	return (uint64(free) + uint64(freeing) + uint64(used)) / uint64(p.m.SlotsPerRow())
}

// mayGive says whether the pool stays at its minimum or above without one row.
func (p *Pool) mayGive() bool {
	rows := p.rows()
	return rows > 0 && (rows-1)*p.m.RowBytes() >= p.m.Spec().MinBytes
}

// mayGrow says whether the pool's maximum allows one more row.
func (p *Pool) mayGrow() bool {
	limit := p.m.Spec().MaxBytes
	return limit == 0 || (p.rows()+1)*p.m.RowBytes() <= limit
}

// wish is a pool that wants a row of another.
type wish struct {
	p *Pool
	// need: it cannot store otherwise. If not, it evicts its own, and a row is due to it only from a pool whose
	// oldest files have been idle for longer.
	need bool
}

// wantRow asks for a row of another pool and reports whether one may come. p's mutex is held.
func (s *Store) wantRow(p *Pool, need bool) bool {
	if s.now().UnixNano() < s.pause(need).Load() || !p.mayGrow() {
		return false
	}
	for _, q := range s.set.Load().list {
		if q != p && q.mayGive() {
			select {
			case s.wishes <- wish{p, need}:
			default: // one is being given already
			}
			return true
		}
	}
	return false
}

func (s *Store) pause(need bool) *atomic.Int64 {
	if need {
		return &s.noGive[1]
	}
	return &s.noGive[0]
}

// workRows serves the pools that want a row.
func (s *Store) workRows() {
	defer s.workers.Done()
	for {
		select {
		case <-s.quit:
			return
		case w := <-s.wishes:
			if !s.give(w) {
				s.pause(w.need).Store(s.now().Add(givePause).UnixNano())
			}
			w.p.mu.Lock()
			w.p.growth.full = false
			w.p.mu.Unlock()
		}
	}
}

// give makes another pool give a row back: the one whose files have been idle for longest.
func (s *Store) give(w wish) bool {
	type donor struct {
		q    *Pool
		idle uint32
	}
	var donors []donor
	mine := w.p.oldestUse()
	for _, q := range s.set.Load().list {
		if q == w.p || !q.mayGive() {
			continue
		}
		if d := (donor{q, q.oldestUse()}); w.need || d.idle < mine {
			donors = append(donors, d)
		}
	}
	slices.SortFunc(donors, func(a, b donor) int { return cmp.Compare(a.idle, b.idle) })
	for _, d := range donors {
		if d.q.giveRow() {
			return true
		}
	}
	return false
}

// oldestUse is when the file that would be evicted next was stored or hit, in Unix seconds; 0 in an empty pool.
func (p *Pool) oldestUse() (at uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy.each(func(slot uint32) bool {
		if !p.evictable(slot) {
			return true
		}
		r := p.m.Record(slot)
		at = max(r.LastHit, uint32(r.CommitTime/1e9))
		return false
	})
	return at
}

// giveRow empties a row and drops it.
func (q *Pool) giveRow() bool {
	q.mu.Lock()
	row, ok := q.emptyRow()
	if ok {
		q.growth.draining = row
		q.flushFrees()
	}
	q.mu.Unlock()
	if !ok {
		return false
	}
	dropped := false
	deadline := time.Now().Add(giveWait)
	for !dropped && time.Now().Before(deadline) {
		select {
		case <-q.s.quit:
			deadline = time.Now()
		case <-time.After(retryEvery):
			dropped = q.dropRow(row, deadline)
		}
	}
	q.mu.Lock()
	q.unpark()
	q.growth.draining = none
	q.mu.Unlock()
	return dropped
}

// dropRow tries once; frees that are not durable yet make it fail.
func (q *Pool) dropRow(row uint32, deadline time.Time) bool {
	q.mu.Lock()
	q.unpark()
	t, err := q.m.DropRow(row)
	q.mu.Unlock()
	if err != nil {
		return false
	}
	waitUntil(t, deadline)
	select {
	case <-t.Done():
		return t.Err() == nil
	default:
		return false
	}
}

func (q *Pool) unpark() {
	for _, slot := range q.growth.parked {
		q.m.Unalloc(slot)
	}
	q.growth.parked = q.growth.parked[:0]
}

// emptyRow evicts all files of the cheapest row that can be emptied, with what hangs on them.
func (q *Pool) emptyRow() (row uint32, ok bool) {
	type candidate struct{ row, cost uint32 }
	var rows []candidate
	per := q.m.SlotsPerRow()
	for _, r := range q.m.Rows() {
		c := candidate{row: r.Number}
		for slot := r.Number * per; slot < (r.Number+1)*per && int(slot) < len(q.nodes.s); slot++ {
			switch n := &q.nodes.s[slot]; {
			case n.pins() > 0 || n.is(flagReserved|flagDoomed):
				c.cost = none
			case c.cost == none:
			case n.is(flagVisible) && n.leaf():
				c.cost++
			case n.is(flagVisible):
				c.cost += innerCost
			}
		}
		if c.cost != none {
			rows = append(rows, c)
		}
	}
	slices.SortFunc(rows, func(a, b candidate) int { return cmp.Compare(a.cost, b.cost) })
	for _, c := range rows[:min(len(rows), giveTries)] {
		if q.planRow(c.row) {
			q.applyPlan()
			return c.row, true
		}
		q.undoPlan()
	}
	return none, false
}

// planRow plans the eviction of a row's files and all their descendants; a pinned one among these makes it fail.
func (q *Pool) planRow(row uint32) bool {
	per := q.m.SlotsPerRow()
	for slot := row * per; slot < (row+1)*per && int(slot) < len(q.nodes.s); slot++ {
		for q.nodes.s[slot].is(flagVisible) {
			leaf := slot
			for !q.nodes.s[leaf].leaf() {
				leaf = q.nodes.s[leaf].first
			}
			if !q.evictable(leaf) {
				return false
			}
			if q.nodes.s[leaf].is(flagOrphan) {
				q.orphans.remove(leaf)
			} else {
				q.policy.remove(leaf)
			}
			q.take(leaf)
		}
	}
	return true
}

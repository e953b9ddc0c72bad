package gpufile

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Pools share the volume by whole rows. A pool that finds no room asks for a row; the worker empties the cheapest row
// of a pool above its minimum, leaf first, and gives it back to the volume. Rows to spare are asked for before a pool
// evicts its own files.

const (
	giveTries = 4 // rows of one pool that are tried
	giveWait  = 5 * time.Second
	givePause = time.Second // after nobody could give
	// innerCost is what evicting an inner node weighs against a leaf: what hangs on it goes too.
	innerCost = 4
	// spareShare: a row to spare has at least 1/spareShare of its slots empty, so that fewer files go than find room.
	spareShare = 4
	// growHold is how long a pool keeps a row that it has asked for, filled or not.
	growHold = time.Second
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

// hasSpare says whether the pool's free slots make up a row: it can do with one less. Rows that it has just asked for
// do not count: it is about to fill them. No mutex is needed.
func (p *Pool) hasSpare() bool {
	if free, _, _ := p.m.Counts(); free < p.m.SlotsPerRow() {
		return false
	}
	return p.s.now().UnixNano()-p.growth.grewAt.Load() > int64(growHold)
}

// wishKind says what a pool that wants a row of another does without it.
type wishKind uint8

const (
	// wishIdle: it evicts its own files, and a row is due to it only from a pool whose oldest files have been idle for
	// longer.
	wishIdle wishKind = iota
	// wishSpare: it is to evict its own files only if no pool has a row to spare.
	wishSpare
	// wishNeed: it cannot store.
	wishNeed
	wishKinds
)

// wish is a pool that wants a row of another, as a part of so many slots.
type wish struct {
	p     *Pool
	kind  wishKind
	slots int
}

// wantRow asks for a row of another pool and reports whether one may come. p's mutex is held.
func (s *Store) wantRow(p *Pool, kind wishKind, slots int) bool {
	if !p.m.MayGrow() {
		return false
	}
	giving := s.giving.Load()
	if giving && kind == wishNeed {
		return true // whatever was refused before: that row is for who asks first
	}
	if no := &p.growth.refused[kind]; slots >= no.slots && s.now().Before(no.until) {
		return false
	}
	for _, q := range s.set.Load().list {
		if q != p && q.mayGive() && (kind != wishSpare || q.hasSpare()) {
			if giving {
				return true
			}
			select {
			case s.wishes <- wish{p, kind, slots}:
			default: // one is being given already
			}
			return true
		}
	}
	return false
}

// workRows serves the pools that want a row.
func (s *Store) workRows() {
	defer s.workers.Done()
	for {
		select {
		case <-s.quit:
			return
		case w := <-s.wishes:
			if able, given := s.give(w); given {
				s.rowGiven(w)
			} else {
				w.p.mu.Lock()
				w.p.growth.full = false
				w.p.growth.refused[w.kind] = refusal{able + 1, s.now().Add(givePause)}
				w.p.mu.Unlock()
			}
			s.giving.Store(false) // after the refusals have gone, so that nobody is refused a row that is there
		}
	}
}

// rowGiven lets all pools ask the volume for the row that one has given back. The wish that came meanwhile is
// forgotten: whoever still lacks something asks again, and knows of this row then.
func (s *Store) rowGiven(w wish) {
	select {
	case <-s.wishes:
	default:
	}
	for _, p := range s.set.Load().list {
		p.mu.Lock()
		p.growth.full = false
		p.growth.refused[wishNeed] = refusal{}
		if p == w.p {
			p.growth.refused[w.kind] = refusal{}
		}
		p.mu.Unlock()
	}
}

// donor is a pool that may give a row back.
type donor struct {
	q     *Pool
	spare bool
	idle  uint32 // its oldest use
}

// give makes another pool give a row back: one with a row to spare, else the one whose files have been idle for
// longest. Nobody gives towards what all of them together cannot: able is how many slots fewer could be made.
func (s *Store) give(w wish) (able int, given bool) {
	donors := s.donors(w)
	if w.kind == wishNeed {
		if able = makeable(w, donors); able < w.slots {
			return able, false
		}
	}
	slices.SortFunc(donors, func(a, b donor) int {
		switch {
		case a.spare && !b.spare:
			return -1
		case b.spare && !a.spare:
			return 1
		}
		return cmp.Compare(a.idle, b.idle)
	})
	for _, d := range donors {
		limit := math.MaxInt
		if w.kind == wishSpare {
			limit = int(d.q.m.SlotsPerRow() - d.q.m.SlotsPerRow()/spareShare)
		}
		if d.q.giveRow(limit) {
			return 0, true
		}
	}
	return 0, false
}

func (s *Store) donors(w wish) (donors []donor) {
	mine := w.p.oldestUse()
	for _, q := range s.set.Load().list {
		if q == w.p || !q.mayGive() {
			continue
		}
		d := donor{q, q.hasSpare(), q.oldestUse()}
		switch w.kind {
		case wishSpare:
			if !d.spare {
				continue
			}
		case wishIdle:
			if d.idle >= mine {
				continue
			}
		}
		donors = append(donors, d)
	}
	return donors
}

// makeable is how many slots the rows that donors could empty make, together with what no pool has, as far as a pool
// needs them. What no pool has may be in pieces that make no row: then a row of others may join them.
func makeable(w wish, donors []donor) int {
	per, row := int(w.p.m.SlotsPerRow()), int64(w.p.rowCost())
	unassigned := int64(w.p.m.Unassigned())
	need, given := max(int64((w.slots+per-1)/per)*row-unassigned, 1), int64(0)
	for _, d := range donors {
		if given >= need {
			break
		}
		cost := int64(d.q.rowCost())
		given += d.q.emptiable((need-given+cost-1)/cost) * cost
	}
	if given == 0 {
		return 0
	}
	return int((unassigned+given)/row) * per
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

// giveRow empties a row, at the price of limit files at most, and drops it.
func (q *Pool) giveRow(limit int) bool {
	q.mu.Lock()
	row, ok := q.emptyRow(limit)
	if ok {
		q.s.giving.Store(true)
		q.growth.draining = row
		q.flushFrees()
	}
	q.mu.Unlock()
	if !ok {
		return false
	}
	deadline := time.Now().Add(giveWait)
	dropped := q.dropRow(row, deadline) // at once if it was empty
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

// candidate is a row that can be emptied, and what that costs.
type candidate struct{ row, cost uint32 }

// emptyRow evicts all files of the cheapest row that can be emptied, with what hangs on them, if these are no more than
// limit. Rows are looked at in the order of the slots that they have in use, as far as that can matter.
func (q *Pool) emptyRow(limit int) (row uint32, ok bool) {
	var rows, best []candidate
	for _, r := range q.m.Rows() {
		if r.Away {
			continue
		}
		rows = append(rows, candidate{r.Number, q.m.SlotsPerRow() - q.m.RowFree(r.Number)})
	}
	byCost := func(a, b candidate) int { return cmp.Compare(a.cost, b.cost) }
	slices.SortFunc(rows, byCost)
	for _, r := range rows {
		if len(best) == giveTries && r.cost >= best[giveTries-1].cost {
			break
		}
		if cost, ok := q.rowPrice(r.row); ok {
			best = append(best, candidate{r.row, cost})
			slices.SortStableFunc(best, byCost)
			best = best[:min(len(best), giveTries)]
		}
	}
	for _, c := range best {
		if q.planRow(c.row) && len(q.victims) <= limit {
			q.applyPlan()
			return c.row, true
		}
		q.undoPlan()
	}
	return none, false
}

// rowPrice is what emptying a row costs; ok is false if it holds a slot that is pinned or reserved.
func (q *Pool) rowPrice(row uint32) (cost uint32, ok bool) {
	per := q.m.SlotsPerRow()
	for slot := row * per; slot < (row+1)*per && int(slot) < len(q.nodes.s); slot++ {
		switch n := &q.nodes.s[slot]; {
		case n.pins() > 0 || n.is(flagReserved|flagDoomed):
			return 0, false
		case n.is(flagVisible) && n.leaf():
			cost++
		case n.is(flagVisible):
			cost += innerCost
		}
	}
	return cost, true
}

// emptiable counts the rows that the pool could give, up to most.
func (q *Pool) emptiable(most int64) (rows int64) {
	q.mu.RLock()
	defer q.mu.RUnlock()
	most = min(most, int64(q.rows())-int64(q.leastRows()))
	for _, r := range q.m.Rows() {
		if rows >= most {
			break
		}
		if r.Away {
			continue
		}
		if _, ok := q.rowPrice(r.Number); ok {
			rows++
		}
	}
	return rows
}

// leastRows is the pool's minimum in rows.
func (p *Pool) leastRows() uint64 {
	return (p.m.Spec().MinBytes + p.m.RowBytes() - 1) / p.m.RowBytes()
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

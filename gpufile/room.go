package gpufile

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"tuttifs/extentmap"
)

const (
	// growRows bounds the rows on their way at one time.
	growRows = 64
	// growPause is how long a pool that was refused a row waits before it asks again, unless some pool gave one back.
	growPause = 100 * time.Millisecond
	// Free slots are kept ahead of need: 1/aheadShare of a pool's slots, at most aheadMax.
	aheadShare = 64
	aheadMax   = 4096
)

// growth is a pool's asking for rows.
type growth struct {
	tickets []*extentmap.Ticket // rows that will be allocatable when done
	retryAt time.Time           // refused until then
	full    bool                // the last refusal still holds
	soon    bool                // the volume is about to have rows again
	grewAt  atomic.Int64        // Unix ns of the last row asked for; read without the mutex
	refused [wishKinds]refusal  // what other pools could not give
	// draining is a row being given back: its free slots are parked instead of being handed out.
	draining uint32
	parked   []uint32
}

// refusal is a wish for slots, or for more, that is not heard again for a while, unless a row is given back.
type refusal struct {
	slots int
	until time.Time
}

// room is what a pool's slots are, now.
type room struct {
	free   int // allocatable
	coming int // being freed, or in rows on their way
	used   int // holding something, what waits to be freed not counted
	total  int // in rows
	cap    int // on used slots; 0 for none
}

func (p *Pool) room() room {
	free, freeing, used := p.m.Counts()
	g := &p.growth
	rows := g.tickets[:0]
	for _, t := range g.tickets {
		select {
		case <-t.Done():
		default:
			rows = append(rows, t)
		}
	}
	clear(g.tickets[len(rows):])
	g.tickets = rows
	return room{
		free:   int(free),
		coming: int(freeing) + len(p.toFree) + len(rows)*int(p.m.SlotsPerRow()),
		used:   int(used) - len(p.toFree),
		total:  int(free) + int(freeing) + int(used),
		cap:    int(p.m.Spec().MaxSlots),
	}
}

// ahead is how many free slots are kept ready.
func ahead(slots int) int { return min(slots/aheadShare, aheadMax) }

// planRoom plans evictions until need slots more may live and will be free, growing before evicting. It returns how
// many slots are too many when everything else is pinned or reserved.
func (p *Pool) planRoom(need int) (cut int, err error) {
	if need == 0 {
		return 0, nil
	}
	planned := len(p.victims)
	r := p.room()
	r.coming += planned
	r.coming += p.grow(need - r.free - r.coming)
	lack := need - r.free - r.coming
	if p.rowsComing() || lack > 0 && p.s.wantRow(p, wishSpare, lack) {
		lack = 0 // better to be asked again than to evict
	}
	evict := lack
	if r.cap > 0 {
		evict = max(evict, r.used+need-planned-r.cap)
	}
	if evict <= 0 {
		return 0, nil
	}
	// Of a plan for more than there is, what it finds is of interest too: that many fit.
	p.plan(min(evict, int(p.unpinned())-planned))
	cut = evict - (len(p.victims) - planned)
	if cut == 0 {
		if lack > 0 {
			p.s.wantRow(p, wishIdle, lack)
		}
		return 0, nil
	}
	if p.searching {
		return cut, ErrAgain
	}
	if lack > 0 && p.s.wantRow(p, wishNeed, cut) {
		return cut, ErrAgain // another pool is giving a row back
	}
	if able := p.growth.refused[wishNeed].slots - 1; able > 0 && able < cut {
		cut -= able // with so many less, the others can give what is left
	}
	return cut, fmt.Errorf("%w: of %d files wanted, %d fit in pool %q: the rest is pinned, reserved or built upon",
		ErrNoSpace, need, need-cut, p.Name())
}

// rowsComing says whether the volume is about to have more rows for the pool.
func (p *Pool) rowsComing() bool {
	g := &p.growth
	return g.soon || len(g.tickets) > 0 && !g.full
}

// grow asks for rows of at least slots more slots, and returns how many slots will come.
func (p *Pool) grow(slots int) int {
	g := &p.growth
	if slots <= 0 || g.full && p.s.now().Before(g.retryAt) {
		return 0
	}
	g.full, g.soon = false, false
	coming := 0
	for coming < slots && len(g.tickets) < growRows {
		t, err := p.m.AddRow()
		switch {
		case errors.Is(err, extentmap.ErrAgain):
			g.soon = true
			return coming
		case err != nil:
			g.full, g.retryAt = true, p.s.now().Add(growPause)
			return coming
		}
		g.tickets = append(g.tickets, t)
		g.grewAt.Store(p.s.now().UnixNano())
		coming += int(p.m.SlotsPerRow())
	}
	return coming
}

// freeAhead keeps a few slots free in physical space, so that a reservation seldom waits for frees to be durable: by
// a row where one is left or to spare, else by evicting a little ahead.
func (p *Pool) freeAhead() {
	r := p.room()
	low := ahead(r.total)
	lack := low - r.free - r.coming
	if lack <= 0 {
		return
	}
	if lack -= p.grow(lack); lack <= 0 || p.growth.soon || p.s.wantRow(p, wishSpare, lack) {
		return
	}
	for lack > 0 && p.plan(1) {
		lack--
	}
	p.applyPlan()
	p.flushFrees()
}

// alloc takes a free slot and makes its node addressable.
func (p *Pool) alloc(parent uint32) (slot uint32, ok bool) {
	for {
		slot, ok = p.m.Alloc(parent)
		if !ok {
			return none, false
		}
		if g := &p.growth; g.draining != none && slot/p.m.SlotsPerRow() == g.draining {
			g.parked = append(g.parked, slot)
			continue
		}
		break
	}
	if int(slot) >= len(p.nodes.s) && p.nodes.ensure(max(slot+1, p.m.Slots())) != nil {
		p.m.Unalloc(slot)
		return none, false
	}
	return slot, true
}

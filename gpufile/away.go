package gpufile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tuttifs/extentmap"
)

// Files on a lost drive are away: misses, in no list and charged to nobody, and still in the records. They come back
// with their row, unless their key was stored again meanwhile.

// away is a row whose files are away; unknown, if nobody knew which files it has.
type away struct{ unknown bool }

// watchRows follows the volume as it loses drives and gets them back.
func (s *Store) watchRows() {
	defer s.workers.Done()
	for {
		select {
		case <-s.quit:
			return
		case <-s.v.RowsChanged():
			s.reviewRows()
		}
	}
}

func (s *Store) reviewRows() {
	for _, p := range s.set.Load().list {
		p.reviewRows()
	}
}

// reviewRows hides the files of rows that went away, and shows those of rows that came back.
func (p *Pool) reviewRows() {
	for _, r := range p.m.Rows() {
		p.mu.Lock()
		row, known := p.awayRows[r.Number]
		switch {
		case p.s.detached.Load():
		case r.Away && !known:
			p.awayRows[r.Number] = away{unknown: r.Unknown}
			p.eachSlot(r.Number, func(slot uint32, n *node) {
				if n.is(flagVisible) {
					p.hide(slot)
				}
			})
		case !r.Away && known:
			delete(p.awayRows, r.Number)
			if p.nodes.ensure(p.m.Slots()) == nil {
				p.eachSlot(r.Number, func(slot uint32, n *node) {
					if n.is(flagAway) || row.unknown && p.m.IsCommitted(slot) {
						p.show(slot)
					}
				})
				p.flushFrees()
			}
		}
		p.mu.Unlock()
	}
}

// eachSlot visits the nodes of a row. The mutex is held.
func (p *Pool) eachSlot(row uint32, f func(slot uint32, n *node)) {
	per := p.m.SlotsPerRow()
	for slot := row * per; slot < (row+1)*per && int(slot) < len(p.nodes.s); slot++ {
		f(slot, &p.nodes.s[slot])
	}
}

// hide makes a visible file away. The mutex is held.
func (p *Pool) hide(slot uint32) {
	p.orphanChildren(slot)
	p.detach(slot)
	p.forget(slot)
	n := &p.nodes.s[slot]
	n.clear(flagVisible | flagSecond | refMask)
	n.set(flagAway)
	p.away++
	if n.pins() > 0 {
		p.doomed++
	}
}

// show makes a file visible again whose row is back. If its key is held by another one now, that is newer, and this one
// is freed. The mutex is held.
func (p *Pool) show(slot uint32) {
	n := &p.nodes.s[slot]
	if n.is(flagAway) {
		n.clear(flagAway)
		p.away--
	}
	r := p.m.Record(slot)
	_, pending := p.pending[r.Key]
	if pending || p.index.find(&r.Key) != none {
		switch {
		case n.pins() > 0:
			n.set(flagDoomed)
		case !p.s.readOnly:
			n.meta = 0
			p.toFree = append(p.toFree, slot)
		}
		return
	}
	if n.pins() > 0 {
		p.doomed--
	}
	*n = node{meta: n.meta | flagVisible, first: none, next: none, prev: none, older: none, newer: none}
	p.index.insert(&r.Key, slot)
	p.files++
	p.changes.note(&r.Key, r.Tenant, false)
	p.charge(r.Tenant, 1)
	p.attach(slot, &r)
}

// ForgetDrive takes a drive out of the volume, with the files that lie on it. Readers of these are waited for, as long
// as ctx allows.
func (s *Store) ForgetDrive(ctx context.Context, index uint16) error {
	if err := s.v.Leave(index); err != nil {
		return err
	}
	s.reviewRows()
	for {
		err := s.giveUpRows(index)
		if err == nil {
			err = s.v.Checkpoint()
		}
		if err == nil {
			err = s.v.Forget(index)
		}
		if !errors.Is(err, extentmap.ErrAgain) && !errors.Is(err, ErrAgain) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-s.quit:
			return ErrSession
		case <-time.After(retryEvery):
		}
	}
}

// giveUpRows drops the rows on a drive, ErrAgain while some are in use.
func (s *Store) giveUpRows(index uint16) error {
	var tickets []*extentmap.Ticket
	busy := 0
	for _, p := range s.set.Load().list {
		for _, row := range p.m.RowsOn(index) {
			t, err := p.giveUpRow(row)
			switch {
			case errors.Is(err, ErrAgain) || errors.Is(err, extentmap.ErrAgain):
				busy++
			case err != nil:
				return err
			default:
				tickets = append(tickets, t)
			}
		}
	}
	for _, t := range tickets {
		if err := t.Wait(); err != nil {
			return err
		}
	}
	if busy > 0 {
		return fmt.Errorf("%w: %d rows on drive %d are being read or written", ErrAgain, busy, index)
	}
	return nil
}

// giveUpRow drops a row that is away, if nobody holds a slot of it.
func (p *Pool) giveUpRow(row uint32) (*extentmap.Ticket, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flushFrees()
	held := false
	p.eachSlot(row, func(slot uint32, n *node) {
		held = held || n.pins() > 0 || n.is(flagVisible|flagReserved|flagDoomed)
	})
	for _, slot := range p.toFree {
		held = held || slot/p.m.SlotsPerRow() == row
	}
	for _, slot := range p.growth.parked {
		held = held || slot/p.m.SlotsPerRow() == row
	}
	if held {
		return nil, fmt.Errorf("%w: row %d is in use", ErrAgain, row)
	}
	t, err := p.m.GiveUpRow(row)
	if err != nil {
		return nil, err
	}
	p.eachSlot(row, func(_ uint32, n *node) {
		if n.is(flagAway) {
			p.away--
		}
		n.meta = 0
	})
	delete(p.awayRows, row)
	return t, nil
}

package gpufile

import (
	"fmt"

	"tuttifs/checksum"
	"tuttifs/extentmap"
)

// reportsMax bounds the reports that wait for the verifier.
const reportsMax = 1024

// report is one file that a reader found damaged; its slot is pinned until it has been verified.
type report struct {
	p      *Pool
	slot   uint32
	key    Key
	seed   checksum.Seed
	ticket *extentmap.Ticket
}

// Verdict is what rereading a file came to.
type Verdict uint8

const (
	Intact Verdict = iota
	// Damaged: what was read is not what was stored.
	Damaged
	// Unreadable: the drive does not give its bytes, which may be right.
	Unreadable
)

// SetVerifier installs the function that rereads a slot and judges its bytes.
func (s *Store) SetVerifier(verify func(p *Pool, slot uint32, seed checksum.Seed) Verdict) {
	s.verify.Store(&verify)
}

// ReportBad: a reader found damage. The store's worker rereads the file outside all locks, and evicts it if the
// damage is there; the ticket is done when that is durable, or when the file proved intact. Only one reader's word
// never evicts, and neither does a drive that fails: what it does not give is a miss, and stays in the records.
func (m *Member) ReportBad(p *Pool, slot uint32, generation uint64) (*extentmap.Ticket, error) {
	if err := m.lock(); err != nil {
		return nil, err
	}
	defer m.ses.mu.Unlock()
	s := m.ses.s
	if s.verify.Load() == nil {
		return nil, fmt.Errorf("%w: nothing here can verify files", ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.holds(slot, generation, 64) || p.nodes.s[slot].pins() >= pinsLimit {
		return nil, fmt.Errorf("%w: slot %d does not hold generation %d (any more)", ErrNotFound, slot, generation)
	}
	rep := p.hold(slot)
	select {
	case s.reports <- rep:
		return rep.ticket, nil
	default:
		p.unpin(slot)
		return nil, fmt.Errorf("%w: %d reports are waiting", ErrAgain, reportsMax)
	}
}

// hold pins a file so that it can be verified. The mutex is held.
func (p *Pool) hold(slot uint32) report {
	r := p.m.Record(slot)
	p.pin(slot)
	return report{
		p: p, slot: slot, key: r.Key, ticket: extentmap.NewTicket(),
		seed: p.seed(r.Tenant, &r.Key, r.Nonce, r.Generation),
	}
}

// workReports verifies what was reported, one file at a time.
func (s *Store) workReports() {
	defer s.workers.Done()
	for {
		select {
		case <-s.quit:
			s.dropReports()
			return
		case r := <-s.reports:
			r.settle((*s.verify.Load())(r.p, r.slot, r.seed))
		}
	}
}

// settle evicts a damaged file, hides an unreadable one, and ends the pin.
func (r *report) settle(verdict Verdict) {
	p := r.p
	p.mu.Lock()
	defer p.mu.Unlock()
	visible := p.nodes.s[r.slot].is(flagVisible)
	switch verdict {
	case Damaged:
		p.count.bad.Add(1)
		if visible && !p.s.readOnly {
			p.doom(r.slot)
			p.count.doomed.Add(1)
		}
	case Unreadable:
		p.count.unreadable.Add(1)
		if visible {
			p.hide(r.slot)
		}
	}
	p.unpin(r.slot)
	p.freeWaiters = append(p.freeWaiters, r.ticket)
	p.flushFrees()
}

func (s *Store) dropReports() {
	for {
		select {
		case r := <-s.reports:
			r.p.mu.Lock()
			r.p.unpin(r.slot)
			r.p.mu.Unlock()
			r.ticket.Complete(ErrSession)
		default:
			return
		}
	}
}

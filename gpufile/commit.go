package gpufile

import (
	"errors"
	"fmt"
	"sync"

	"tuttifs/extentmap"
	"tuttifs/extentmap/ondisk"
)

// find returns a reservation for a verb about it; the session's mutex is held.
func (ses *session) reservation(g *Group, reserve uint64) (*reservation, error) {
	r := ses.reservations[requestKey{g.id, reserve}]
	if r == nil {
		return nil, fmt.Errorf("%w: no reservation %d (any more)", ErrNotFound, reserve)
	}
	return r, nil
}

// Commit says that this member has written all objects of rank for every slot of the reservation. When the last of
// the geometry's ranks has committed, the records are journaled (payload flush first) in one transaction for all
// pools of the group. The ticket is that transaction's; earlier ranks' tickets complete with it. ErrIncomplete if an
// object of that rank was not written: such a file is given up in all pools, with what hangs on it, and every rank's
// ticket says so; the others go on, so the ticket comes with this error too. ErrAgain: the journal has no room now,
// commit again.
func (m *Member) Commit(g *Group, reserve uint64, rank uint16) (t *extentmap.Ticket, err error) {
	if err := checkBatch(g, 0, 0, 0); err != nil {
		return nil, err
	}
	defer func() {
		if errors.Is(err, ErrNotFound) {
			m.letGo(&requestKey{g.id, reserve}) // it ended before, and the member writes to it no more
		}
	}()
	if err := m.lock(); err != nil {
		return nil, err
	}
	ses := m.ses
	defer ses.mu.Unlock()
	r, err := ses.reservation(g, reserve)
	if err != nil {
		return nil, err
	}
	if int(rank) >= len(r.committed) {
		return nil, fmt.Errorf("%w: rank %d of %d", ErrInvalid, rank, len(r.committed))
	}
	if r.committed[rank] {
		return r.ticket, nil
	}
	if !r.has(m) {
		r.members = append(r.members, m)
	}
	r.g.lock()
	defer r.g.unlock()
	r.vouch(m, rank)
	var incomplete bool
	if r.left > 1 {
		incomplete = r.dropIncomplete(rank)
	} else {
		r.release()
		// The other ranks too: a write that was in flight when they committed may have failed since.
		incomplete = r.endWrites()
		for other := range r.committed {
			incomplete = r.dropIncomplete(uint16(other)) || incomplete
		}
		if err := r.submit(); err != nil {
			return nil, err
		}
	}
	r.committed[rank] = true
	r.left--
	if incomplete {
		return r.ticket, ErrIncomplete
	}
	return r.ticket, nil
}

// vouch marks a rank's objects on the drives that the member vouches for as written.
func (r *reservation) vouch(m *Member, rank uint16) {
	if len(m.vouch) == 0 || r.ses.s.o.NoIO {
		return
	}
	for i := range r.items {
		for j, p := range r.g.pools {
			f := r.file(i, j)
			if f.status != GrantNew || int(rank) >= len(p.rankObjects) {
				continue
			}
			for _, o := range p.rankObjects[rank] {
				if drive, _, _, ok := p.m.Extent(f.slot, o); ok && m.vouch[drive] {
					f.flush.Or(1 << (drive & accessDriveMask))
					f.written[o/64].Or(1 << (o % 64))
				}
			}
		}
	}
}

// dropIncomplete gives up the files of which a rank has objects that were not written.
func (r *reservation) dropIncomplete(rank uint16) bool {
	if r.ses.s.o.NoIO {
		return false
	}
	before := r.dropped
	for i := range r.items {
		for j, p := range r.g.pools {
			f := r.file(i, j)
			if f.status == GrantNew && int(rank) < len(p.rankObjects) && !wrote(f, p.rankObjects[rank]) {
				r.drop(i)
				break
			}
		}
	}
	r.dropChildren()
	return r.dropped > before
}

func wrote(f *resFile, objects []uint16) bool {
	for _, o := range objects {
		if f.written[o/64].Load()>>(o%64)&1 == 0 {
			return false
		}
	}
	return true
}

// endWrites takes the right to write away from all slots. A slot with a command still in flight is not complete,
// whatever the bitmap says: its file is given up.
func (r *reservation) endWrites() bool {
	before := r.dropped
	for i := range r.items {
		quiet := true
		for j, p := range r.g.pools {
			if f := r.file(i, j); f.status == GrantNew && !r.lease(p, f).end() {
				quiet = false
			}
		}
		if !quiet {
			r.drop(i)
		}
	}
	r.dropChildren()
	return r.dropped > before
}

func (r *reservation) lease(p *Pool, f *resFile) *lease {
	return r.ses.leases.get(leaseKey(p.m.ID(), f.slot))
}

// keep holds a lease that is about to end for the members that may be writing to its slot unseen. Once all ranks have
// committed there are none.
func (r *reservation) keep(l *lease) {
	if r.quiet {
		return
	}
	for _, m := range r.members {
		if m.vouch == nil || m == r.ender || m.closed.Load() || !l.enter(leaseWrite) {
			continue
		}
		if m.held == nil {
			m.held = map[requestKey][]*lease{}
		}
		m.held[r.k] = append(m.held[r.k], l)
	}
}

// release ends what members hold of it: all ranks have said that they have written what they will.
func (r *reservation) release() {
	r.quiet = true
	for _, m := range r.members {
		for _, l := range m.held[r.k] {
			if l.claim() {
				r.ses.unlease(l)
			}
		}
		delete(m.held, r.k)
	}
}

// drop gives one item up in all pools.
func (r *reservation) drop(i int) {
	held := false
	for j, p := range r.g.pools {
		f := r.file(i, j)
		if f.status != GrantNew {
			continue
		}
		held = true
		f.status = GrantNone
		delete(p.pending, r.items[i].Key)
		p.count.aborted.Add(1)
		l := r.lease(p, f)
		r.keep(l)
		if l.end() {
			r.ses.unlease(l)
		}
	}
	if held {
		r.dropped++
	}
}

// dropChildren gives up what hangs on items that were given up.
func (r *reservation) dropChildren() {
	for i, parent := range r.parents {
		if parent < 0 {
			continue
		}
		for j := range r.g.pools {
			if r.file(parent, j).status == GrantNone {
				r.drop(i)
				break
			}
		}
	}
}

// submit journals all files in one transaction; an error leaves the reservation as it was.
func (r *reservation) submit() error {
	t := r.ses.s.v.Begin()
	now := r.ses.s.now().UnixNano()
	puts := 0
	for i := range r.items {
		for j, p := range r.g.pools {
			if f := r.file(i, j); f.status == GrantNew {
				rec := r.record(i, f, now)
				t.Put(p.m, f.slot, &rec, f.flush.Load())
				puts++
			}
		}
	}
	if puts == 0 {
		r.conclude(nil)
		return nil
	}
	if _, err := t.Submit(r.settle); err != nil {
		return journalError(err)
	}
	r.state = reserveCommitting
	return nil
}

// journalError says in this room's words why a transaction was not taken.
func journalError(err error) error {
	switch {
	case errors.Is(err, extentmap.ErrAgain):
		return fmt.Errorf("%w: %w", ErrAgain, err)
	case errors.Is(err, extentmap.ErrReadOnly):
		return fmt.Errorf("%w: %w", ErrReadOnly, err)
	}
	return err
}

func (r *reservation) record(i int, f *resFile, now int64) ondisk.Record {
	it := &r.items[i]
	return ondisk.Record{
		Key: it.Key, Parent: it.Parent, Nonce: f.nonce, Generation: f.generation, CommitTime: now,
		Tenant: r.tenant, Owner: r.ses.uid, Tokens: it.Tokens, Position: it.Position, State: ondisk.StateCommitted,
	}
}

// settle runs on the committer when the outcome of the transaction is known: the records are in the table, or will
// never be.
func (r *reservation) settle(err error) {
	r.ses.mu.Lock()
	defer r.ses.mu.Unlock()
	r.g.lock()
	defer r.g.unlock()
	if r.ses.s.detached.Load() {
		r.ticket.Complete(err)
		return
	}
	if err == nil {
		r.touchParents()
	}
	for i := range r.items {
		for j, p := range r.g.pools {
			if f := r.file(i, j); f.status == GrantNew {
				r.settleFile(p, &r.items[i].Key, f, err)
			}
		}
	}
	r.conclude(err)
}

// touchParents counts a chain's continuation as a use of the file that it continues, unless a session pins that: then
// its pin was the use, and the request's files keep their order. The pools' mutexes are held, and the parents'.
func (r *reservation) touchParents() {
	for _, h := range r.held {
		if n := &h.p.nodes.s[h.slot]; n.pins() == 1 && n.is(flagVisible) && !n.is(flagOrphan) {
			h.p.policy.touch(h.slot)
		}
	}
}

// settleFile makes one file visible, or gives its slot back.
func (r *reservation) settleFile(p *Pool, key *Key, f *resFile, err error) {
	w := p.pending[*key]
	delete(p.pending, *key)
	l := r.lease(p, f)
	if err != nil {
		p.count.aborted.Add(1)
		r.ses.unlease(l)
		return
	}
	r.ses.leases.remove(l)
	r.ses.reserved--
	p.reserved--
	rec := p.m.Record(f.slot)
	p.publish(f.slot, &rec)
	p.count.committed.Add(1)
	if !p.m.Available(f.slot) {
		p.hide(f.slot) // its drive was lost after the flush
	}
	for _, o := range w.orphans {
		p.adopt(o)
	}
}

// conclude ends the reservation: parents are released, tickets completed, and what is no longer needed is let go.
func (r *reservation) conclude(err error) {
	r.unhold()
	for _, p := range r.g.pools {
		p.flushFrees()
	}
	if err == nil && r.dropped > 0 {
		err = fmt.Errorf("%w: %d of %d files were given up", ErrIncomplete, r.dropped, len(r.items))
	}
	r.state = reserveDone
	r.ses.itemsNamed -= len(r.files)
	r.items, r.parents, r.files, r.need = nil, nil, nil, nil
	r.ses.remember(r.k)
	r.ticket.Complete(err)
}

// Abort gives the reservation's uncommitted slots back (when no command is in flight on them). ErrNotFound if there is
// none any more: what its ranks have all committed goes on, whether or not a file of it was incomplete.
func (m *Member) Abort(g *Group, reserve uint64) error {
	if err := checkBatch(g, 0, 0, 0); err != nil {
		return err
	}
	defer m.letGo(&requestKey{g.id, reserve})
	if err := m.lock(); err != nil {
		return err
	}
	defer m.ses.mu.Unlock()
	r, err := m.ses.reservation(g, reserve)
	if err != nil {
		return err
	}
	if r.state != reserveOpen {
		return fmt.Errorf("%w: reservation %d is over: all ranks have committed", ErrNotFound, reserve)
	}
	m.ses.abort(r, m, fmt.Errorf("%w: reservation %d was aborted", ErrNotFound, reserve))
	return nil
}

// abort ends an open reservation, by a member's doing or by nobody's; the session's mutex is held, no pool's is.
func (ses *session) abort(r *reservation, by *Member, reason error) {
	r.g.lock()
	defer r.g.unlock()
	r.ender = by
	for i := range r.items {
		r.drop(i)
	}
	r.dropped = 0
	r.conclude(reason)
	delete(ses.reservations, r.k)
}

// HoldWrite keeps a reserved slot from anybody else while the daemon itself writes it: a reservation that times out
// meanwhile gives it back only when done is called. That is before Commit, which gives up what is still being written.
func (m *Member) HoldWrite(p *Pool, slot uint32) (done func(), err error) {
	if err := m.lock(); err != nil {
		return nil, err
	}
	defer m.ses.mu.Unlock()
	l := m.ses.leases.get(leaseKey(p.m.ID(), slot))
	if l == nil || !l.enter(leaseWrite) {
		return nil, fmt.Errorf("%w: slot %d of pool %q is not reserved", ErrLease, slot, p.Name())
	}
	var once sync.Once
	return func() { once.Do(func() { l.leave(m.ses) }) }, nil
}

// MarkWritten marks all objects of a reserved slot as written (the daemon itself wrote them for the mount, or NoIO).
func (m *Member) MarkWritten(p *Pool, slot uint32) error {
	if err := m.lock(); err != nil {
		return err
	}
	defer m.ses.mu.Unlock()
	l := m.ses.leases.get(leaseKey(p.m.ID(), slot))
	if l == nil || l.r == nil || l.word.Load()&leaseWrite == 0 {
		return fmt.Errorf("%w: slot %d of pool %q is not reserved", ErrLease, slot, p.Name())
	}
	if m.ses.s.o.NoIO {
		return nil
	}
	f := l.file
	for o := range p.objectUnits {
		if drive, _, _, ok := p.m.Extent(slot, uint16(o)); ok {
			f.flush.Or(1 << (drive & accessDriveMask))
		}
		f.written[o/64].Or(1 << (o % 64))
	}
	return nil
}

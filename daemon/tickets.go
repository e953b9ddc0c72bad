package daemon

import (
	"sync"

	"tuttifs/extentmap"
	"tuttifs/ioctl"
)

// tickets is one handle's table of completions. Ticket n lies in entry (n-1) mod max: a finished one is overwritten
// when max newer ones have been given out, an unfinished one refuses its successor. So the table is bounded and nobody
// has to free anything. It grows with the tickets given out: of many handles, few ever have many.
type tickets struct {
	max int // a power of two

	mu      sync.Mutex
	entries []ticket // the first max tickets are appended, later ones overwrite
	next    uint64   // numbers given out so far; the first ticket is 1
	closed  bool
	notify  func() // called without locks when a ticket finishes
}

type ticket struct {
	id    uint64
	state uint32 // ioctl.Ticket*
	errno ioctl.Errno
	value uint64
}

// begin gives out a number: EAGAIN while as many as may be are outstanding.
func (t *tickets) begin() (uint64, ioctl.Errno) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return 0, ioctl.ESTALE
	}
	if len(t.entries) < t.max {
		t.next++
		t.entries = append(t.entries, ticket{id: t.next, state: ioctl.TicketPending})
		return t.next, 0
	}
	e := &t.entries[t.entry(t.next+1)]
	if e.state == ioctl.TicketPending {
		return 0, ioctl.EAGAIN
	}
	t.next++
	*e = ticket{id: t.next, state: ioctl.TicketPending}
	return t.next, 0
}

// finish records the outcome.
func (t *tickets) finish(id, value uint64, err error) {
	t.mu.Lock()
	if e := t.at(id); e != nil && e.state == ioctl.TicketPending {
		e.value, e.errno = value, errnoOf(err)
		e.state = ioctl.TicketDone
		if err != nil {
			e.state = ioctl.TicketFailed
		}
	}
	notify := t.notify
	t.mu.Unlock()
	if notify != nil {
		notify()
	}
}

// follow finishes a ticket when something durable does. A nil done is done already.
func (t *tickets) follow(id uint64, done *extentmap.Ticket) {
	if done == nil {
		t.finish(id, 0, nil)
		return
	}
	select {
	case <-done.Done():
		t.finish(id, 0, done.Err())
	default:
		go func() {
			<-done.Done()
			t.finish(id, 0, done.Err())
		}()
	}
}

// entry is where a ticket lies in a table that has grown that far.
func (t *tickets) entry(id uint64) uint64 { return (id - 1) & uint64(t.max-1) }

// at is a ticket's entry, or nil. The caller holds mu.
func (t *tickets) at(id uint64) *ticket {
	i := t.entry(id)
	if i >= uint64(len(t.entries)) || t.entries[i].id != id {
		return nil
	}
	return &t.entries[i]
}

// query answers TICKET.
func (t *tickets) query(id uint64) (ticket, ioctl.Errno) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.at(id); e != nil {
		return *e, 0
	}
	return ticket{}, ioctl.ENOENT
}

// setNotify says whom to tell: the member's session page.
func (t *tickets) setNotify(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notify = f
}

// close refuses further tickets and forgets the finished ones' audience.
func (t *tickets) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed, t.notify = true, nil
}

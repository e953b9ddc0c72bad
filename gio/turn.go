package gio

import "sync/atomic"

// Whose turn it is: reads go before writes, since a model waits for what is restored and nobody for what is stored. And
// writes never hold all lanes: a drive may hold writes back for as long as it likes, and no lane is taken from a chunk
// in flight. With a single lane reads wait for the chunk that it carries. A write that reads keep from every lane fails
// at its deadline like any other. Deferred writes have lanes of their own, which they leave to nobody and share with
// nobody; when they go is the pacer's to say.

// writeLanes is how many of so many lanes writes may hold: all but one. Chunks are short against the time that a drive
// takes for what all lanes hold, so one more lane would add nothing to pure writing from a few lanes on.
func writeLanes(lanes int32) int32 { return max(1, lanes-1) }

// ticketList is batches in order of issue. Ring.mu guards it.
type ticketList struct {
	head, tail *ringTicket
	waiting    atomic.Int32 // its length, so that idle lanes need not lock to see that it is empty
}

// add puts a batch behind the others; deferred trailers in front of them, since Finish waits for nothing else any more.
func (l *ticketList) add(t *ringTicket) {
	if t.deferred && t.layer == noLayer && l.head != nil {
		t.after, l.head, t.queued = l.head, t, true
		l.waiting.Add(1)
		return
	}
	if l.tail == nil {
		l.head = t
	} else {
		l.tail.after = t
	}
	l.tail, t.queued = t, true
	l.waiting.Add(1)
}

// remove takes a ticket out, if it is in.
func (l *ticketList) remove(t *ringTicket) {
	if !t.queued {
		return
	}
	var before *ringTicket
	for x := l.head; x != t; x = x.after {
		before = x
	}
	if before == nil {
		l.head = t.after
	} else {
		before.after = t.after
	}
	if l.tail == t {
		l.tail = before
	}
	t.after, t.queued = nil, false
	l.waiting.Add(-1)
}

// list is where a batch waits.
func (r *Ring) list(t *ringTicket) *ticketList {
	switch {
	case t.deferred:
		return &r.deferred
	case t.write:
		return &r.writes
	}
	return &r.reads
}

// turn is the batch that a lane's next chunk is cut from, nil if there is none or it has to wait. Ring.mu is held.
func (r *Ring) turn(l *lane) *ringTicket {
	if l.store {
		if t := r.deferred.head; t != nil && r.mayWrite(t) {
			return t
		}
		return nil
	}
	if t := r.reads.head; t != nil && r.mayRead(t) {
		return t
	}
	if r.writing.Load() < writeLanes(r.alive.Load()) {
		return r.writes.head
	}
	return nil
}

// startable says without a lock whether an idle lane may find a chunk.
func (r *Ring) startable(l *lane) bool {
	if l.store {
		return r.deferred.waiting.Load() > 0 && clock() >= r.flow.again.Load()
	}
	return r.reads.waiting.Load() > 0 ||
		r.writes.waiting.Load() > 0 && r.writing.Load() < writeLanes(r.alive.Load())
}

package phase

import (
	"sync/atomic"
	"time"
)

// Kind of holder: what its commands are for.
type Kind uint8

const (
	Data       Kind = iota // engines' commands, and files read or stored through the mount
	Metadata               // its writes lose patience sooner
	Background             // its reads give way to writes
	Kinds                  // how many there are
)

// Holder is one user of a drive. Its methods are for one thread at a time.
type Holder struct {
	token    *Token
	patience int64
	yields   bool
	metadata bool
	touched  bool // something is to be settled

	in      [2]bool         // counted as inside
	wants   [2]bool         // counted as wanting
	refused [2]bool         // in this step
	since   [2]atomic.Int64 // when it was refused first; 0 while it is not waiting
	flight  [2]int          // commands begun that have not ended
	shown   [2]bool         // counted in Token.flight
	ended   [2]bool         // some command did, in this step
	writing int             // bytes of writes in flight
	mixed   uint64
}

// Holder registers a user of the drive, until Close.
func (t *Token) Holder(k Kind) *Holder {
	h := &Holder{token: t, patience: int64(t.o.Patience), yields: k == Background, metadata: k == Metadata}
	if k == Metadata {
		h.patience = int64(t.o.Metadata)
	}
	t.mu.Lock()
	t.holders[h] = struct{}{}
	t.mu.Unlock()
	return h
}

// Enter says whether commands of a direction may begin in this step. Whoever is refused asks again soon: within a
// fraction of a turn.
func (h *Holder) Enter(d Direction, now time.Time) bool {
	t := h.token
	if t.o.Off {
		return true
	}
	h.touched = true
	at := t.at(now)
	if !t.enter(h, d, at) {
		h.wait(d, at)
		return false
	}
	if since := h.since[d].Load(); since != 0 {
		t.waited[d].add(at - since)
		h.since[d].Store(0)
	}
	return true
}

// wait notes a refusal, and demands a turn when patience is lost.
func (h *Holder) wait(d Direction, at int64) {
	h.refused[d] = true
	since := h.since[d].Load()
	if since == 0 {
		since = at
		h.since[d].Store(at)
	}
	impatient := at-since >= h.patience
	if !h.wants[d] && (d == Write || !h.yields || impatient) {
		h.wants[d] = true
		if d == Write && h.metadata {
			h.token.metadata.Add(1)
		}
		h.token.state.Add(wantUnit(d))
	}
	if d == Write && impatient {
		h.token.demand(h, at)
	}
}

// Full says that a direction has as much in flight as this holder may have beside the others that are in. It is no
// refusal: commands that end make room.
func (h *Holder) Full(d Direction) bool {
	if d == Read || h.writing == 0 || h.token.o.Off {
		return false
	}
	return h.writing*int(inside(h.token.state.Load(), Write)) >= writeBytesMax
}

// Begin counts a command that begins now, having entered, and looks whether it meets the other direction.
func (h *Holder) Begin(d Direction, bytes int) {
	h.touched = true
	h.flight[d]++
	if d == Write {
		h.writing += bytes
	}
	if !h.shown[d] {
		h.shown[d] = true
		h.token.flight[d].holders.Add(1)
	}
	if h.token.flight[d.other()].holders.Load() > 0 {
		h.mixed++
	}
}

// Moved says that of what has begun, and was counted as one, something has ended: the drive moves.
func (h *Holder) Moved(d Direction) {
	h.touched = true
	h.ended[d] = true
}

// WriteShare is how many bytes of writes this holder may have in flight beside the others that are in, for one who does
// not tell each command. It is positive.
func (h *Holder) WriteShare() int {
	return writeBytesMax / int(max(1, inside(h.token.state.Load(), Write)))
}

// End is the end of a command: its bytes have moved, and where a modelled drive says when it completes, it is due.
func (h *Holder) End(d Direction, bytes int) {
	h.touched = true
	h.ended[d] = true
	h.flight[d]--
	if d == Write {
		h.writing -= bytes
	}
}

// Settle ends a step: it leaves what no command needs any more, and forgets what was not asked for again.
func (h *Holder) Settle(now time.Time) {
	if h.touched {
		h.touched = false
		at := h.token.at(now)
		h.leave(at)
		h.forgetUnasked()
	}
}

// Leave is the first half of Settle, for between the steps.
func (h *Holder) Leave(now time.Time) { h.leave(h.token.at(now)) }

// Touched says whether Settle has anything to do, for those who would have to ask for the time.
func (h *Holder) Touched() bool { return h.touched }

func (h *Holder) leave(at int64) {
	t := h.token
	for d := Read; d <= Write; d++ {
		if h.shown[d] && h.flight[d] == 0 {
			h.shown[d] = false
			t.flight[d].holders.Add(-1) // first: whoever enters then finds nobody
		}
		switch {
		case h.in[d] && h.flight[d] == 0:
			h.in[d] = false
			t.leave(d, at)
		case h.in[d] && h.ended[d]:
			t.moved[d].Store(at)
		}
		h.ended[d] = false
	}
	if h.mixed > 0 {
		t.mixed.Add(h.mixed)
		h.mixed = 0
	}
}

func (h *Holder) forgetUnasked() {
	for d := Read; d <= Write; d++ {
		switch {
		case h.since[d].Load() == 0:
		case h.refused[d]:
			h.refused[d] = false
			h.touched = true // for the next step
		default:
			h.forget(d)
		}
	}
}

// forget ends a wait that nobody waits any more.
func (h *Holder) forget(d Direction) {
	if h.wants[d] {
		h.token.state.Add(-wantUnit(d))
		h.unwanted(d)
	}
	h.since[d].Store(0)
}

// unwanted notes that the want of a direction is not counted any more.
func (h *Holder) unwanted(d Direction) {
	h.wants[d] = false
	if d == Write && h.metadata {
		h.token.metadata.Add(-1)
	}
}

// Close ends the holder, whatever it has in flight: after it nothing of it may touch the drive.
func (h *Holder) Close(now time.Time) {
	h.flight, h.writing = [2]int{}, 0
	h.leave(h.token.at(now))
	h.forget(Read)
	h.forget(Write)
	h.token.mu.Lock()
	delete(h.token.holders, h)
	h.token.mu.Unlock()
}

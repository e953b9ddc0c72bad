package phase

import (
	"sync"
	"sync/atomic"
	"time"
)

// Fields of Token.state: how many holders are in and how many were refused, by direction, and three bits.
const (
	inBits   = 15
	inMask   = 1<<inBits - 1
	turnBit  = uint64(1) << 60 // a turn of writes is demanded or under way
	afterBit = uint64(1) << 61 // one is over, and no read has entered since
	shortBit = uint64(1) << 62 // the turn is a short one, for metadata alone
)

func inUnit(d Direction) uint64            { return 1 << (inBits * uint(d)) }
func wantUnit(d Direction) uint64          { return 1 << (inBits * (2 + uint(d))) }
func inside(s uint64, d Direction) uint64  { return s >> (inBits * uint(d)) & inMask }
func wanting(s uint64, d Direction) uint64 { return s >> (inBits * (2 + uint(d))) & inMask }

// line keeps what different threads write apart.
type line [64]byte

// Token is the phase of one drive. Its methods are safe for concurrent use.
//
// Times are nanoseconds since begun. What is decided is decided by state alone, in one compare-and-swap; the other
// words are hints of when: a stale one makes an entry early or late, never mixed.
type Token struct {
	o     Options
	begun time.Time

	_     line
	state atomic.Uint64
	moved [2]atomic.Int64 // by direction: when a command last entered or ended
	last  atomic.Uint32   // the direction that entered last
	_     line
	// flight is how many holders have commands in flight, by direction. The rules neither read nor write it.
	flight [2]struct {
		holders atomic.Int64
		_       line
	}

	demanded  atomic.Int64 // when the turn was
	turnBegan atomic.Int64 // when its first write entered; 0 before
	nextTurn  atomic.Int64
	nextShort atomic.Int64
	metadata  atomic.Int32 // holders of metadata that were refused as writers

	switches, turns, stuck, mixed atomic.Uint64
	waited                        [2]waits

	mu      sync.Mutex // guards what follows, and the beginning of a turn
	holders map[*Holder]struct{}
}

// New makes a drive's token. Options are valid.
func New(o Options) *Token {
	// An hour ago, so that now is never 0 and nothing has moved lately.
	return &Token{o: o.WithDefaults(), begun: time.Now().Add(-time.Hour), holders: map[*Holder]struct{}{}}
}

// Options are those in effect.
func (t *Token) Options() Options { return t.o }

func (t *Token) at(now time.Time) int64 { return int64(now.Sub(t.begun)) }

// held says whether a direction keeps the other one out: some holder is in with it, and it moves.
func (t *Token) held(s uint64, d Direction, at int64) bool {
	return inside(s, d) > 0 && at-t.moved[d].Load() < int64(t.o.Stuck)
}

// enter lets a holder's commands of one direction begin, or does not: it enters, or goes on if it is in.
func (t *Token) enter(h *Holder, d Direction, at int64) bool {
	for {
		s := t.state.Load()
		if s&turnBit != 0 && t.turnIsOver(s, at) {
			t.state.CompareAndSwap(s, s&^turnBit|afterBit) // shortBit stays until a read enters
			continue
		}
		if !t.open(s, h, d, at) {
			return false
		}
		if d == Write && s&turnBit != 0 {
			t.turnBegan.CompareAndSwap(0, at)
		}
		to := s
		if d == Read {
			to &^= afterBit | shortBit
		}
		if !h.in[d] {
			to += inUnit(d)
			t.moved[d].Store(at) // first: who is in and does not move keeps nobody out
		}
		if h.wants[d] {
			to -= wantUnit(d)
		}
		if to != s && !t.state.CompareAndSwap(s, to) {
			continue
		}
		if s&^to&afterBit != 0 {
			t.reckon(h, at, s&shortBit != 0)
		}
		if !h.in[d] {
			t.count(s, d)
		}
		if h.wants[d] {
			h.unwanted(d)
		}
		h.in[d] = true
		return true
	}
}

// count notes an entry, given the state before it.
func (t *Token) count(s uint64, d Direction) {
	if inside(s, d.other()) > 0 {
		t.stuck.Add(1)
	}
	if inside(s, d) == 0 && t.last.Load() != uint32(d) {
		t.last.Store(uint32(d))
		t.switches.Add(1)
	}
}

// open is the rules: whether commands of a direction may begin, given the state.
func (t *Token) open(s uint64, h *Holder, d Direction, at int64) bool {
	switch {
	case t.held(s, d.other(), at):
		return false
	case d == Read:
		return s&turnBit == 0 && !(h.yields && !h.wants[Read] && wanting(s, Write) > 0)
	case s&turnBit != 0:
		return s&shortBit == 0 || h.metadata
	default:
		return wanting(s, Read) == 0 && at-t.moved[Read].Load() >= int64(t.o.Quiet)
	}
}

// turnIsOver says whether a turn ends: its time is up; nobody is there to use it; or who demanded it does not come.
func (t *Token) turnIsOver(s uint64, at int64) bool {
	began, length, users := t.turnBegan.Load(), int64(t.o.Turn), inside(s, Write)+wanting(s, Write)
	if s&shortBit != 0 {
		length, users = length/shortShare, inside(s, Write)+uint64(t.metadata.Load())
	}
	switch {
	case began != 0:
		return at >= began+length || users == 0 && at-t.moved[Write].Load() >= lull
	case users == 0:
		return true
	}
	return !t.held(s, Read, at) && at-max(t.demanded.Load(), t.moved[Read].Load()) >= int64(t.o.Stuck)
}

// demand begins a turn: from now on no read begins. Metadata has short ones of its own, and any where it may not yet
// have one of those.
func (t *Token) demand(h *Holder, at int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.state.Load()
	if s&(turnBit|afterBit) != 0 {
		return
	}
	bits := turnBit
	switch {
	case h.metadata && at >= t.nextShort.Load():
		bits |= shortBit
	case at < t.nextTurn.Load():
		return
	}
	t.demanded.Store(at)
	t.turnBegan.Store(0)
	for !t.state.CompareAndSwap(s, s&^shortBit|bits) {
		s = t.state.Load() // nobody else sets the bits
	}
	t.turns.Add(1)
}

// reckon sets when the next turn of a kind may be demanded, by what the last one cost the first reader after it. While
// reads that were in flight ended, the drive was still busy with them, but with fewer and fewer: half of that counts.
func (t *Token) reckon(h *Holder, at int64, short bool) {
	lost := int64(0)
	if since := h.since[Read].Load(); since != 0 {
		busy := t.demanded.Load()
		if began := t.turnBegan.Load(); began != 0 { // else no write came, and reads may have stood since
			busy += (began - busy) / 2
		}
		lost = at - max(since, busy)
	}
	if short {
		t.nextShort.Store(at + min(shortReadsShare*lost, int64(t.o.Stuck)))
	} else {
		t.nextTurn.Store(at + min(readsShare*lost, int64(t.o.Stuck)))
	}
}

// leave is the end of a holder's commands of one direction.
func (t *Token) leave(d Direction, at int64) {
	t.moved[d].Store(at)
	t.state.Add(-inUnit(d))
}

// waits are those that are over.
type waits struct{ times, total, longest atomic.Int64 }

func (w *waits) add(ns int64) {
	w.times.Add(1)
	w.total.Add(ns)
	for old := w.longest.Load(); ns > old && !w.longest.CompareAndSwap(old, ns); {
		old = w.longest.Load()
	}
}

// Stats of a token. Arrays are by direction.
type Stats struct {
	Switches uint64 // from one direction to the other
	Turns    uint64 // demanded by writes that had lost patience
	Stuck    uint64 // entries past commands that did not move
	Mixed    uint64 // commands that began while others of the other direction were in flight
	Waits    [2]uint64
	Waited   [2]time.Duration // all together
	Longest  [2]time.Duration // of those that are over, and of those that are not
	Age      [2]time.Duration // of the oldest that is not over
	Inside   [2]int           // holders that are in now
	Wanting  [2]int           // and those that wait
}

// Stats are the counters; each is exact, together they are not a snapshot.
func (t *Token) Stats(now time.Time) Stats {
	s := Stats{Switches: t.switches.Load(), Turns: t.turns.Load(), Stuck: t.stuck.Load(), Mixed: t.mixed.Load()}
	state := t.state.Load()
	t.mu.Lock()
	defer t.mu.Unlock()
	for d := range s.Waits {
		s.Inside[d], s.Wanting[d] = int(inside(state, Direction(d))), int(wanting(state, Direction(d)))
		w := &t.waited[d]
		s.Waits[d], s.Waited[d] = uint64(w.times.Load()), time.Duration(w.total.Load())
		for h := range t.holders {
			if since := h.since[d].Load(); since != 0 {
				s.Age[d] = max(s.Age[d], time.Duration(t.at(now)-since))
			}
		}
		s.Longest[d] = max(time.Duration(w.longest.Load()), s.Age[d])
	}
	return s
}

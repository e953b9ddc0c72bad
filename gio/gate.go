package gio

import (
	"sync"
	"sync/atomic"
	"time"
)

// Gate is how chunks on a drive's own queue pairs keep to the drive's read/write phase, of which nobody on the way to
// the drive reminds them: they ask before they are rung, a drive's part of a chunk at a time. One is shared by all
// queues of a drive. Its methods are safe for concurrent use, and do not block.
type Gate interface {
	// Begin says whether so many bytes may begin now; then they have, until End. commands of End completed.
	Begin(write bool, bytes uint64) bool
	End(write bool, bytes, commands uint64)
	// Want counts parts of chunks up or down that wait to begin.
	Want(write bool, n int)
	// Fail counts commands that completed with a bad status.
	Fail(write bool, commands uint64)
}

// attempt hands the queue's part of a chunk to its controller, or holds it back.
func (l *laneQueues) attempt(q *laneQueue) {
	if q.gate != nil && !q.gate.Begin(l.write, q.bytes()) {
		if !q.held {
			q.held = true
			l.held++
			q.gate.Want(l.write, 1)
		}
		return
	}
	l.admit(q)
	q.tail = (q.tail + q.count) & q.mask
	q.ring(q.sqTail, q.tailShadow, q.tail)
}

// admit ends a wait for the drive's phase.
func (l *laneQueues) admit(q *laneQueue) {
	if q.held {
		q.held = false
		l.held--
		q.gate.Want(l.write, -1)
	}
}

// attemptHeld tries again what was held back.
func (l *laneQueues) attemptHeld() {
	for d := range l.queues {
		if q := &l.queues[d]; q.held {
			l.attempt(q)
		}
	}
}

// leave tells that the queue's part of the chunk is in.
func (l *laneQueues) leave(q *laneQueue) {
	q.arrived = true
	l.pending--
	if q.gate != nil {
		q.gate.End(l.write, q.bytes(), uint64(q.count))
	}
}

// forgo ends waits for drives' phases of a chunk that is given up. If its queues were quiesced, it is in flight nowhere
// any more.
func (l *laneQueues) forgo(quiesced bool) {
	for d := range l.queues {
		q := &l.queues[d]
		switch {
		case q.count == 0 || q.gate == nil || q.arrived:
		case q.held:
			l.admit(q)
		case quiesced:
			q.gate.End(l.write, q.bytes(), 0)
		}
	}
}

// bytes are what the commands of the chunk move.
func (q *laneQueue) bytes() uint64 { return uint64(q.units) * pageBytes }

// keeper is the goroutine that moves chunks of a CPU ring on which keep to drives' phases, where nobody waits for them:
// what has ended must not be taken for in flight, nor what may begin keep others from the drive.
type keeper struct {
	chunks atomic.Int64 // in lanes
	bell   chan struct{}
	stop   chan struct{}
	ended  chan struct{}
	once   sync.Once
}

// keepEvery is how often the keeper looks at lanes that have chunks.
const keepEvery = 100 * time.Microsecond

// gated says whether any queue keeps to a drive's phase.
func (c *RingConfig) gated() bool {
	for d := range c.Lanes[0] {
		if c.Lanes[0][d].Gate != nil {
			return true
		}
	}
	return false
}

func (k *keeper) start(r *Ring) {
	k.bell, k.stop, k.ended = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	go k.run(r)
}

// end stops the goroutine and waits for it.
func (k *keeper) end() {
	if k.bell == nil {
		return
	}
	k.once.Do(func() { close(k.stop) })
	<-k.ended
}

// add counts a chunk up or down.
func (k *keeper) add(n int64) {
	if k.bell == nil || k.chunks.Add(n) != 1 || n < 0 {
		return
	}
	select {
	case k.bell <- struct{}{}:
	default:
	}
}

func (k *keeper) run(r *Ring) {
	defer close(k.ended)
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		var later <-chan time.Time
		if k.chunks.Load() > 0 {
			r.Poll()
			tick.Reset(keepEvery)
			later = tick.C
		}
		select {
		case <-k.bell:
		case <-later:
		case <-k.stop:
			return
		}
	}
}

package gio

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/nvme"
)

// Queue is one queue pair of a lane, with the drive's LBA size.
type Queue struct {
	Memory   nvme.QueueMemory
	Drive    uint16
	LBABytes int
}

// RingConfig of an executor.
type RingConfig struct {
	// Lanes[l][d] is lane l's queue on the d-th drive. All lanes have the same drives in the same order.
	Lanes [][]Queue
	// DMA is memory that controllers reach, and its I/O address; both begin on a page.
	DMA     []byte
	DMABase uint64
	// BounceBytes at the start of DMA are bounce cells, divided among the lanes; 0 means direct only.
	BounceBytes int
	// ScratchBytes of DMA behind the bounce cells hold trailers on their way, one half those that are read and one those
	// that are written; 0 means 1 MiB, or an eighth of a smaller DMA memory.
	ScratchBytes int
	// ChunkCommands bounds the commands of one chunk; 0 means that a batch is spread over all lanes.
	ChunkCommands int
	Armed, Wake   *uint32       // as in emu.PollerConfig; nil if nobody sleeps
	SGL           bool          // one SGL data block per command instead of PRPs
	Deadline      time.Duration // per wait and per chunk, 30 s
	// Quiesce asks the controller's owner to stop lane l and confirms; called before a timed-out chunk's memory is
	// given back. It must return in bounded time. An error means that nobody knows: the ring is then abandoned whole.
	Quiesce func(lane int) error
	// Reattach gives a quiesced lane new queue pairs, heads and tails at zero. Nil leaves quiesced lanes dead.
	Reattach func(lane int) ([]Queue, error)
	// Step, where set, is called by waits instead of yielding: it runs the controller on this thread (single-core
	// benches and tests).
	Step func()
}

const (
	// LanesMax bounds the lanes of a ring.
	LanesMax = 256
	// DeadlineDefault is the time a wait or a chunk may take.
	DeadlineDefault = 30 * time.Second
	scratchDefault  = 1 << 20
)

// Ring is the CPU executor. Safe for concurrent use; one lane serves one chunk at a time. It has no thread of its
// own: whoever issues or waits moves all lanes on, so that the cost of a chunk falls to a thread that has nothing
// better to do.
type Ring struct {
	base
	lanes []*lane
	spins int // looks at all lanes before a wait naps
	procs int // GOMAXPROCS

	mu            sync.Mutex
	reads, writes ticketList // batches that are not all in chunks yet
	closed        bool

	writing atomic.Int32 // lanes that carry writes; raised with mu held
	alive   atomic.Int32 // lanes that are not dead
	broken  atomic.Pointer[error]
}

// NewRing checks the configuration and lays the DMA memory out: bounce cells, PRP lists, scratch, the user's.
func NewRing(c RingConfig) (*Ring, error) {
	r := &Ring{}
	if err := r.configure(c); err != nil {
		return nil, err
	}
	cells := r.laneCells()
	for i, queues := range c.Lanes {
		l := &lane{ring: r, number: i, laneQueues: laneQueues{queues: make([]laneQueue, len(queues))},
			cells: c.DMA[i*cells : (i+1)*cells], cellsBase: c.DMABase + uint64(i*cells)}
		for d := range queues {
			l.queues[d].attach(&queues[d])
		}
		r.lanes = append(r.lanes, l)
	}
	r.alive.Store(int32(len(r.lanes)))
	r.spins, r.procs = max(spinLeast, spinLooks/len(r.lanes)), runtime.GOMAXPROCS(0)
	return r, nil
}

// Close fails what is in flight or waiting, quiescing first, and refuses everything afterwards. It returns an error
// if a lane could not be quiesced: the DMA memory may then still be written to.
func (r *Ring) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.failQueued(ErrClosed)
	var errs []error
	for _, l := range r.lanes {
		l.mu.Lock()
		if l.busy {
			errs = append(errs, l.fail(ErrClosed))
		}
		l.mu.Unlock()
	}
	return errors.Join(errs...)
}

// Abandon ends every wait with an error that is ErrDead, without quiescing: the controllers' owner is gone, and the DMA
// memory and queues with it. Direct targets may be written to until the caller has unmapped or replaced the DMA memory.
func (r *Ring) Abandon(cause error) {
	err := fmt.Errorf("%w: %w", ErrDead, cause)
	r.broken.CompareAndSwap(nil, &err)
	r.failAll()
}

// Alive counts the lanes that still carry chunks.
func (r *Ring) Alive() int { return int(r.alive.Load()) }

// failAll ends everything with the ring's own error.
func (r *Ring) failAll() {
	err := *r.broken.Load()
	r.failQueued(err)
	for _, l := range r.lanes {
		l.mu.Lock()
		l.drop(err)
		l.mu.Unlock()
	}
}

// failQueued fails everything that is in no chunk.
func (r *Ring) failQueued(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, list := range [...]*ticketList{&r.reads, &r.writes} {
		for t := list.head; t != nil; t = list.head {
			list.remove(t)
			t.failRest(err)
		}
	}
}

// Poll moves every lane on: completes chunks that are in and starts new ones. It reports whether anything happened.
// Waits call it; an engine with a thread for I/O calls it too.
func (r *Ring) Poll() bool {
	if r.broken.Load() != nil {
		r.failAll()
		return false
	}
	moved := false
	for _, l := range r.lanes {
		if !l.mu.TryLock() {
			continue // its owner moves it
		}
		if l.busy && l.arrived() {
			l.finish()
			moved = true
		}
		if !l.busy && !l.dead && r.startable() && l.start() {
			moved = true
		}
		l.mu.Unlock()
	}
	return moved
}

// expire fails chunks whose time is over, and everything that t still has outstanding when its own is.
func (r *Ring) expire(t *ringTicket, over bool) {
	if over {
		r.mu.Lock()
		r.list(t.write).remove(t)
		t.failRest(ErrTimeout)
		r.mu.Unlock()
	}
	now := time.Now()
	for _, l := range r.lanes {
		if over {
			l.mu.Lock()
		} else if !l.mu.TryLock() {
			continue
		}
		if l.busy && (over && l.ticket == t || now.After(l.deadline)) && !l.arrived() {
			_ = l.fail(ErrTimeout)
		}
		l.mu.Unlock()
	}
}

// A wait looks at its lanes again and again before it naps, for about as long as a fast drive needs for a command. It
// never calls runtime.Gosched: threads of engines are locked to their goroutines, and there every call parks the thread
// and wakes another one to wake it again.
const (
	spinLooks  = 2000 // at single lanes
	spinLeast  = 32
	yieldEvery = 16
	checkEvery = 64
)

// rest passes the time of a wait that found nothing to do.
func (r *Ring) rest(idle int) {
	switch {
	case r.config.Step != nil:
		r.config.Step()
	case idle > r.spins:
		nap(r.procs)
	case idle%yieldEvery == yieldEvery-1:
		osYield() // the controller's thread may share this core
	}
}

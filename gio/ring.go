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
	Memory    nvme.QueueMemory
	Drive     uint16
	LBABytes  int
	Namespace uint32 // that its commands are for; 0 means 1
	Directive Directive
	// TailShadow and HeadShadow are the doorbells in the doorbell buffer of a Device that looks there.
	TailShadow, HeadShadow nvme.Shadow
	Device                 bool // the doorbells are registers of an SSD, not memory
	Gate                   Gate // of the drive, where its phase is not kept behind the queue; else nil
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
	// that are written; 0 means 8 MiB, or an eighth of a smaller DMA memory. A request waits for every round of what fits.
	ScratchBytes int
	// StoreBytes of DMA behind the bounce cells are the store buffer, into which StoreLayer evacuates what it stores, to
	// be written when the drives have time for it; 0: none. The last StoreLanes of Lanes carry those writes and nothing
	// else, and have no bounce cells; 0 means two, where there are more.
	StoreBytes  int
	StoreLanes  int
	StorePolicy StorePolicy
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

	// Scheduler paces reads and deferred writes by what compute does. Nil: reads go at once, deferred writes whenever no
	// read is to be done.
	Scheduler *Scheduler

	pacer pacer // nil: the scheduler, or readsFirst
}

const (
	// LanesMax bounds the lanes of a ring.
	LanesMax = 256
	// DeadlineDefault is the time a wait or a chunk may take.
	DeadlineDefault = 30 * time.Second
	scratchDefault  = 8 << 20
)

// Ring is the CPU executor. Safe for concurrent use; one lane serves one chunk at a time. It has no thread of its
// own: whoever issues or waits moves all lanes on, so that the cost of a chunk falls to a thread that has nothing
// better to do. With a store buffer a goroutine drives the deferred writes.
type Ring struct {
	base
	lanes []*lane
	spins int // looks at all lanes before a wait naps
	procs int // GOMAXPROCS

	mu            sync.Mutex
	reads, writes ticketList // batches that are not all in chunks yet
	deferred      ticketList // likewise, of the store buffer's
	issued        int64      // batches of reads
	closed        bool

	writing    atomic.Int32 // lanes that carry writes; raised with mu held
	alive      atomic.Int32 // lanes that are not dead
	storeAlive atomic.Int32 // likewise of those for deferred writes
	broken     atomic.Pointer[error]
	flow       ringFlow
	driver     storeDriver
	keeper     keeper
}

// NewRing checks the configuration and lays the DMA memory out: bounce cells, PRP lists, scratch, the user's.
func NewRing(c RingConfig) (*Ring, error) {
	r := &Ring{}
	if err := r.configure(c); err != nil {
		return nil, err
	}
	for i, queues := range c.Lanes {
		l := &lane{ring: r, number: i, laneQueues: laneQueues{queues: make([]laneQueue, len(queues))},
			store: i >= r.common()}
		l.cells, l.cellsBase = r.cells(i)
		for d := range queues {
			l.queues[d].attach(&queues[d], &r.bells)
		}
		r.lanes = append(r.lanes, l)
	}
	r.alive.Store(int32(r.common()))
	r.storeAlive.Store(int32(r.config.StoreLanes))
	r.spins, r.procs = max(spinLeast, spinLooks/len(r.lanes)), runtime.GOMAXPROCS(0)
	r.flow.paced = r.store != nil || r.config.pacer != nil
	if r.store != nil {
		r.driver.start(r) // which asks nothing before there is a batch
	}
	r.wake = r.paceAgain
	r.pacer.start(r.wake)
	if c.gated() && c.Step == nil {
		r.keeper.start(r)
	}
	return r, nil
}

// Close fails what is in flight or waiting, quiescing first, and refuses everything afterwards. It returns an error
// if a lane could not be quiesced: the DMA memory may then still be written to.
func (r *Ring) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.failQueued(ErrClosed)
	r.keeper.end()
	if r.store != nil {
		r.store.fail(ErrClosed)
		r.driver.end()
	}
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
func (r *Ring) Alive() int { return int(r.alive.Load() + r.storeAlive.Load()) }

// failAll ends everything with the ring's own error.
func (r *Ring) failAll() {
	err := *r.broken.Load()
	r.failQueued(err)
	if r.store != nil {
		r.store.fail(err)
	}
	for _, l := range r.lanes {
		l.mu.Lock()
		l.drop(err)
		l.mu.Unlock()
	}
}

// failQueued fails everything that is in no chunk.
func (r *Ring) failQueued(err error) {
	for _, list := range [...]*ticketList{&r.reads, &r.writes, &r.deferred} {
		r.failList(list, err)
	}
}

func (r *Ring) failList(list *ticketList, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for t := list.head; t != nil; t = list.head {
		list.remove(t)
		t.failRest(err)
	}
}

// Poll moves every lane on: completes chunks that are in and starts new ones. It reports whether anything happened.
// Waits call it; an engine with a thread for I/O calls it too.
func (r *Ring) Poll() bool {
	if r.broken.Load() != nil {
		r.failAll()
		return false
	}
	return r.pollLanes(r.lanes)
}

func (r *Ring) pollLanes(lanes []*lane) (moved bool) {
	for _, l := range lanes {
		if !l.mu.TryLock() {
			continue // its owner moves it
		}
		if l.busy && l.arrived() {
			l.finish()
			moved = true
		}
		if !l.busy && !l.dead && r.startable(l) && l.start() {
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
		r.list(t).remove(t)
		t.failRest(ErrTimeout)
		r.mu.Unlock()
	}
	now := time.Now()
	if !over {
		r.expireLanes(r.lanes, now)
		return
	}
	for _, l := range r.lanes {
		l.mu.Lock()
		if l.busy && (l.ticket == t || now.After(l.deadline)) && !l.arrived() {
			_ = l.fail(ErrTimeout)
		}
		l.mu.Unlock()
	}
}

// expireLanes fails chunks whose time is over.
func (r *Ring) expireLanes(lanes []*lane, now time.Time) {
	for _, l := range lanes {
		if !l.mu.TryLock() {
			continue
		}
		if l.busy && now.After(l.deadline) && !l.arrived() {
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

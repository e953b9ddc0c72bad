package gio

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

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
	config  RingConfig
	lanes   []*lane
	drives  []int16 // index of a drive's queue in a lane, -1 for none
	prp     prpTable
	user    []byte     // what is left of DMA
	spins   int        // looks at all lanes before a wait naps
	procs   int        // GOMAXPROCS
	scratch [2]scratch // for reads and for writes, so that a write that is held back delays no read
	regions [RegionsMax + 1]region

	mu            sync.Mutex
	reads, writes ticketList // batches that are not all in chunks yet
	lastRegion    int
	closed        bool

	writing atomic.Int32 // lanes that carry writes; raised with mu held
	alive   atomic.Int32 // lanes that are not dead
	broken  atomic.Pointer[error]
}

// NewRing checks the configuration and lays the DMA memory out: bounce cells, PRP lists, scratch, the user's.
func NewRing(c RingConfig) (*Ring, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Deadline == 0 {
		c.Deadline = DeadlineDefault
	}
	if c.ScratchBytes == 0 {
		c.ScratchBytes = min(scratchDefault, len(c.DMA)/8&^(pageBytes-1))
	}
	r := &Ring{config: c}
	if err := r.layOut(); err != nil {
		return nil, err
	}
	r.mapDrives()
	cells := c.BounceBytes / len(c.Lanes) &^ (pageBytes - 1)
	for i, queues := range c.Lanes {
		l := &lane{ring: r, number: i, queues: make([]laneQueue, len(queues)),
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

func (c *RingConfig) validate() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, a...)...))
	}
	if len(c.Lanes) == 0 || len(c.Lanes) > LanesMax {
		bad("%d lanes, 1 to %d are possible", len(c.Lanes), LanesMax)
	}
	for l, queues := range c.Lanes {
		if len(queues) == 0 || len(queues) != len(c.Lanes[0]) {
			bad("lane %d has %d queues, lane 0 has %d", l, len(queues), len(c.Lanes[0]))
			continue
		}
		for d := range queues {
			if err := queues[d].validate(); err != nil {
				bad("lane %d queue %d: %v", l, d, err)
			}
			if queues[d].Drive != c.Lanes[0][d].Drive {
				bad("lane %d queue %d is of drive %d, lane 0 has drive %d there",
					l, d, queues[d].Drive, c.Lanes[0][d].Drive)
			}
		}
	}
	if len(c.DMA) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(c.DMA)))%pageBytes != 0 || c.DMABase%pageBytes != 0 {
		bad("DMA memory of %d bytes at %#x does not begin on a page", len(c.DMA), c.DMABase)
	}
	if c.BounceBytes < 0 || c.ChunkCommands < 0 || c.Deadline < 0 ||
		c.ScratchBytes < 0 || c.ScratchBytes%pageBytes != 0 {
		bad("bounce %d, scratch %d, chunk %d, deadline %v: negative or no whole pages",
			c.BounceBytes, c.ScratchBytes, c.ChunkCommands, c.Deadline)
	}
	if (c.Armed == nil) != (c.Wake == nil) {
		bad("Armed and Wake go together")
	}
	return errors.Join(errs...)
}

func (q *Queue) validate() error {
	m := &q.Memory
	if err := m.Validate(); err != nil {
		return err
	}
	if uintptr(unsafe.Pointer(&m.SQ[0]))%nvme.SQEBytes != 0 || uintptr(unsafe.Pointer(&m.CQ[0]))%nvme.CQEBytes != 0 {
		return errors.New("entries are not aligned")
	}
	if q.LBABytes != 512 && q.LBABytes != 4096 {
		return fmt.Errorf("logical blocks of %d bytes", q.LBABytes)
	}
	return nil
}

// layOut divides the DMA memory.
func (r *Ring) layOut() error {
	c := &r.config
	at := c.BounceBytes &^ (pageBytes - 1)
	lists := 0
	if !c.SGL {
		lists = prpTableBytes(len(c.DMA))
	}
	if at+lists+c.ScratchBytes >= len(c.DMA) || c.ScratchBytes < 2*pageBytes {
		return fmt.Errorf("%w: DMA memory of %d bytes is too small: %d of bounce cells, %d of PRP lists, %d of scratch",
			ErrInvalid, len(c.DMA), at, lists, c.ScratchBytes)
	}
	if !c.SGL {
		r.prp = newPRPTable(c.DMA[at:at+lists], c.DMABase+uint64(at), c.DMABase, len(c.DMA))
		at += lists
	}
	for i := range r.scratch {
		half := c.ScratchBytes / 2 &^ (pageBytes - 1)
		m := &Memory{buf: c.DMA[at : at+half : at+half], base: c.DMABase + uint64(at), direct: true, padded: true}
		at += half
		r.lastRegion++
		m.id = uint64(r.lastRegion) << offsetBits
		r.regions[r.lastRegion].memory.Store(m)
		r.scratch[i].memory = m
	}
	r.user = c.DMA[at:]
	return nil
}

func (r *Ring) mapDrives() {
	queues := r.config.Lanes[0]
	highest := uint16(0)
	for d := range queues {
		highest = max(highest, queues[d].Drive)
	}
	r.drives = make([]int16, int(highest)+1)
	for i := range r.drives {
		r.drives[i] = -1
	}
	for d := range queues {
		r.drives[queues[d].Drive] = int16(d)
	}
}

// DMA is the part of the DMA memory that the ring leaves to its user: buffers in it are reached directly.
func (r *Ring) DMA() []byte { return r.user }

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

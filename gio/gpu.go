package gio

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// PeerFunc says by what I/O address controllers reach device memory, false where they do not.
type PeerFunc func(p cuda.Pointer, n uint64) (address uint64, ok bool)

// GPUConfig of the executor whose commands are built by kernels.
type GPUConfig struct {
	// RingConfig is as for the CPU ring; Step is not used.
	RingConfig
	// Context is the primary context of the device. Its owner closes it after the executor.
	Context *cuda.Context
	// StagingBytes of device memory between the copy engine and the harvest; 0 means StagingDefault.
	StagingBytes int
	// MoveBytes is one piece of the copy engine's work, less than 4 GiB, 0 means MoveDefault; Moves are outstanding in
	// each direction, 0 means MovesDefault: one that is about to end, and those that are enqueued behind it at a time.
	// Both bound how long an engine's own small copies wait.
	MoveBytes int
	Moves     int
	// HarvestBytes that arrived start a harvest, and so does a batch's end; 0 means HarvestDefault.
	HarvestBytes int
	// HarvestBlocks is the grid of harvest and gather; 0 means HarvestBlocksDefault, at most the device's SMs.
	HarvestBlocks int
	// Peer is asked for memory that is registered. Nil: controllers reach none; transfers of device memory are bounced.
	Peer PeerFunc
	// Unpeer is told when memory that Peer, or Paged.Peer, said an address of is no longer used by it; nil: nobody is.
	Unpeer func(p cuda.Pointer, n uint64)
	// Polling serves each batch by a kernel that polls the completion queues, on PollSMs SMs (0: anywhere).
	Polling bool
	PollSMs int
	// BuildPerChunk launches a build for every chunk when its lane is free, instead of building ahead.
	BuildPerChunk bool

	grace time.Duration // kernelGrace, but for tests
}

// Defaults of GPUConfig.
const (
	StagingDefault       = 256 << 20
	MoveDefault          = 8 << 20
	HarvestDefault       = 64 << 20
	HarvestBlocksDefault = 16
	MovesDefault         = 3
	MovesMax             = 16
)

// kernelGrace is what a kernel, a copy or a call of the driver may take beyond the ring's deadline, since kernels
// wait for room beside long ones, before the GPU is given up.
const kernelGrace = 15 * time.Second

// ErrStuck: the executor's memory stays as it is, and so does its context: no call to the driver is known to return.
var ErrStuck = errors.New("gio: the CUDA driver or the GPU does not answer")

var errNoLane = errors.New("no lane is left")

// GPU is the executor on the GPU: kernels build the commands and bring bytes to their places; the host rings, checks
// completions and feeds the copy engine, chunk by chunk. Safe for concurrent use.
//
// One thread, the I/O thread, owns lanes, movers and launches, and is the only one that calls CUDA while batches
// move. A second one makes the calls that may take long: allocation, registration, uploads of extent maps. A third
// goroutine calls nothing of CUDA and ends all waits if one of them hangs in the driver.
type GPU struct {
	base
	gpu     GPUConfig
	device  device
	lanes   []*gpuLane
	depth   int    // commands that fit the smallest queue
	dmaGPU  uint64 // where the GPU has the DMA memory
	staging staging
	in, out mover
	procs   int // naps of so many threads may keep their processors: half of GOMAXPROCS, for controllers nap too

	control worker
	pins    pins
	pool    pinnedPool
	events  eventPool
	maps    mapCache
	stats   gpuCounters

	registering sync.Mutex // one change of the device's table of regions at a time

	using sync.RWMutex // held for reading by whoever uses what Close gives back, guards gone
	gone  bool         // it has been given back

	mu       sync.Mutex
	incoming []*gpuTicket  // not seen by the I/O thread yet
	requests []func()      // for the I/O thread
	live     []*gpuTicket  // issued and not concluded
	reads    int64         // batches of reads so far
	closed   bool          // nothing is issued or registered any more
	down     chan struct{} // closed when Close is done
	closeErr error

	bell    chan struct{} // wakes the I/O thread
	asleep  atomic.Bool   // it waits for the bell
	nap     uint32        // futex of its naps: 1 while it naps and nobody has rung
	pending atomic.Bool   // incoming or requests are not empty
	beat    atomic.Int64  // when it last went round
	closing atomic.Bool
	ended   chan struct{} // closed when it has ended
	stuck   chan struct{} // closed when it, or a call of the control thread, hangs
	alive   atomic.Int32
	stores  atomic.Int32 // lanes for deferred writes that are alive
	busy    atomic.Int32 // batches that were issued and have not ended, but for deferred writes and trailers
	awaits  atomic.Int64 // number of the newest batch of reads that somebody waits for
	paced   bool         // there is a store buffer, or a pacer that counts
	broken  atomic.Pointer[error]

	thread ioThread // state of the I/O thread alone
}

func (c *GPUConfig) validate() error {
	switch {
	case c.Context == nil:
		return fmt.Errorf("%w: no CUDA context", ErrInvalid)
	case c.StagingBytes < 0 || c.MoveBytes < 0 || c.Moves < 0 || c.Moves > MovesMax || c.HarvestBytes < 0 ||
		c.HarvestBlocks < 0 || c.PollSMs < 0:
		return fmt.Errorf("%w: staging %d, pieces of %d, %d outstanding (at most %d), harvest %d on %d blocks, %d SMs",
			ErrInvalid, c.StagingBytes, c.MoveBytes, c.Moves, MovesMax, c.HarvestBytes, c.HarvestBlocks, c.PollSMs)
	case c.MoveBytes > math.MaxUint32:
		return fmt.Errorf("%w: pieces of %d bytes, less than 4 GiB are possible", ErrInvalid, c.MoveBytes)
	case c.Polling && c.StoreBytes > 0:
		return fmt.Errorf("%w: the polling executor has no store buffer", ErrInvalid)
	case c.Polling && slices.ContainsFunc(c.Lanes, hasDevice):
		return fmt.Errorf("%w: the polling executor does not ring doorbells of SSDs themselves", ErrInvalid)
	case c.StagingBytes > 0 && c.StagingBytes < 2*pageBytes:
		return fmt.Errorf("%w: staging of %d bytes, two pages are the least", ErrInvalid, c.StagingBytes)
	}
	return nil
}

// hasDevice says whether an SSD serves any queue of a lane itself.
func hasDevice(lane []Queue) bool {
	return slices.ContainsFunc(lane, func(q Queue) bool { return q.Device })
}

func orDefault(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// NewGPU checks the configuration, loads the kernels, registers the queues and the DMA memory with CUDA and allocates
// the staging.
func NewGPU(c GPUConfig) (*GPU, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	g := &GPU{
		gpu: c, procs: runtime.GOMAXPROCS(0) / 2, bell: make(chan struct{}, 1),
		ended: make(chan struct{}), stuck: make(chan struct{}), down: make(chan struct{}),
	}
	if err := g.configure(c.RingConfig); err != nil {
		return nil, err
	}
	orDefault(&g.gpu.StagingBytes, StagingDefault)
	orDefault(&g.gpu.MoveBytes, MoveDefault)
	orDefault(&g.gpu.Moves, MovesDefault)
	orDefault(&g.gpu.HarvestBytes, HarvestDefault)
	orDefault(&g.gpu.HarvestBlocks, HarvestBlocksDefault)
	if c.grace == 0 {
		g.gpu.grace = kernelGrace
	}
	g.gpu.HarvestBlocks = min(g.gpu.HarvestBlocks, max(1, c.Context.SMs()))
	if err := g.control.start(c.Context, g.stuck, g.now); err != nil {
		return nil, err
	}
	if err := g.control.do(g.setUp); err != nil {
		g.takeDown()
		return nil, err
	}
	g.alive.Store(int32(g.common()))
	g.stores.Store(int32(g.config.StoreLanes))
	g.paced = !c.Polling && (g.store != nil || g.config.pacer != nil)
	g.wake = g.ring
	g.pacer.start(g.wake)
	g.beat.Store(g.now())
	go g.run()
	go g.watch()
	return g, nil
}

// setUp allocates and makes everything, on the control thread.
func (g *GPU) setUp() error {
	if err := g.pinShared(); err != nil {
		return err
	}
	if err := g.device.setUp(g); err != nil {
		return err
	}
	if err := g.makeLanes(); err != nil {
		return err
	}
	if err := g.staging.setUp(g); err != nil {
		return err
	}
	g.in.setUp(g, g.device.copyIn, true)
	g.out.setUp(g, g.device.copyOut, false)
	own := []*Memory{g.scratch[0].memory, g.scratch[1].memory}
	if g.store != nil {
		own = append(own, g.store.memory)
	}
	for _, m := range own {
		if err := g.publish(m); err != nil {
			return err
		}
	}
	return g.thread.setUp(g)
}

// now is the time of the I/O thread: see clock.
func (g *GPU) now() int64 { return clock() }

// kernelBound is how long anything on the GPU or in the driver may take, nanoseconds.
func (g *GPU) kernelBound() int64 { return int64(g.config.Deadline + g.gpu.grace) }

// Alive counts the lanes that still carry chunks.
func (g *GPU) Alive() int { return int(g.alive.Load() + g.stores.Load()) }

// Abandon ends every wait with an error that is ErrDead, without quiescing: the controllers' owner is gone. Copies
// from and to the DMA memory that are under way end before their batch does; none is started any more. The DMA memory
// stays registered with CUDA until Close.
func (g *GPU) Abandon(cause error) {
	g.breakWith(fmt.Errorf("%w: %w", ErrDead, cause))
}

// breakWith makes an error the ring's own, once.
func (g *GPU) breakWith(err error) {
	g.broken.CompareAndSwap(nil, &err)
	g.failStore()
	g.ring()
}

// failStore gives out nothing of the store buffer any more: controllers may still read what is in it.
func (g *GPU) failStore() {
	if g.store != nil {
		g.store.fail(*g.broken.Load())
	}
}

// ring wakes the I/O thread.
func (g *GPU) ring() {
	g.pending.Store(true)
	nvme.Wake(&g.nap)
	if g.asleep.Load() {
		select {
		case g.bell <- struct{}{}:
		default:
		}
	}
}

// onThread runs f on the I/O thread, where the context is bound, and returns its error.
func (g *GPU) onThread(f func() error) error {
	result := make(chan error, 1)
	g.mu.Lock()
	g.requests = append(g.requests, func() { result <- f() })
	g.mu.Unlock()
	g.ring()
	select {
	case err := <-result:
		return err
	case <-g.stuck:
		return fmt.Errorf("%w: %w", ErrDead, ErrStuck)
	case <-g.ended:
		select {
		case err := <-result:
			return err
		default:
			return ErrClosed
		}
	}
}

// Close fails what is in flight or waiting, quiescing first, gives everything back and refuses everything afterwards.
// It returns an error if a lane could not be quiesced: the DMA memory may then still be written to.
func (g *GPU) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		<-g.down
		return g.closeErr
	}
	g.closed = true
	g.mu.Unlock()
	g.closing.Store(true)
	g.ring()
	select {
	case <-g.ended:
		g.closeErr = errors.Join(g.thread.closeErrors...)
		if g.thread.hung {
			g.closeErr = fmt.Errorf("%w: %w; its memory cannot be given back", ErrDead, ErrStuck)
		}
	case <-g.stuck:
		g.closeErr = fmt.Errorf("%w: %w; its memory cannot be given back", ErrDead, ErrStuck)
	}
	if !g.hangs() {
		// Batches that nobody has waited for yet keep their outcomes only.
		g.mu.Lock()
		live := slices.Clone(g.live)
		g.mu.Unlock()
		for _, t := range live {
			t.conclude()
		}
		if !g.thread.hung {
			g.using.Lock()
			g.gone = true
			g.takeDown()
			g.using.Unlock()
			if g.hangs() {
				g.closeErr = fmt.Errorf("%w: %w; not all of its memory is given back", ErrDead, ErrStuck)
			}
		}
	}
	close(g.down)
	return g.closeErr
}

// hold keeps Close from giving anything back until the returned function is called.
func (g *GPU) hold() (release func(), err error) {
	g.using.RLock()
	if g.gone {
		g.using.RUnlock()
		return nil, ErrClosed
	}
	return g.using.RUnlock, nil
}

// takeDown gives everything back on the control thread and ends it. Errors are of no use to anybody: after a failed
// kernel every call fails, and the context's end gives the rest back.
func (g *GPU) takeDown() {
	_ = g.control.do(func() error {
		g.device.drain()
		g.thread.close()
		g.maps.close(g)
		g.closeRegions()
		g.staging.close(g)
		g.events.close()
		g.pool.close(g)
		g.device.close(g)
		g.pins.close(g)
		return nil
	})
	g.control.stop()
}

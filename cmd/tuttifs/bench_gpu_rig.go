package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/phase"
)

// gpuSetup is a ring and what it serves. Sizes that are zero are those of the flags.
type gpuSetup struct {
	prp     bool // PRPs instead of SGLs
	inOrder bool // controllers complete in order
	lanes   int
	bounce  int
	depth   int
	store   int            // bytes of the store buffer, which has lanes of its own
	phases  *phase.Options // of the drives' reads and writes; nil: nothing is kept apart or counted
	change  func(c *gio.GPUConfig)
}

// gpuRig is one engine: a ring on a GPU, a pool, and the pollers that serve its queues.
type gpuRig struct {
	gpu    *gpuDevice
	image  *gpuImage
	ring   *gio.GPU
	pool   cuda.Pointer
	memory *gio.Memory // the pool
	descs  [][]uint64  // by layer and slot
	ctxs   [][]gio.IOCTX
	polls  []*gpuPoller
	drives []*emu.Controller
	phases []*phase.Token // of the drives, if there are any
	queues []*emu.Queue
	mapped [][]byte
	armed  uint32
	wake   uint32
}

// gpuPoller is a thread that serves queues.
type gpuPoller struct {
	*emu.Poller
	done  chan struct{}
	clock int32
}

// newRig makes an engine for the image. The calling thread has the GPU's context.
func (b *gpuBench) newRig(gpu *gpuDevice, image *gpuImage, s gpuSetup) (r *gpuRig, err error) {
	r = &gpuRig{gpu: gpu, image: image}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
			r = nil
		}
	}()
	if s.lanes == 0 {
		s.lanes = b.o.lanes
	}
	if s.bounce == 0 {
		s.bounce = int(b.o.bounce)
	}
	if s.depth == 0 {
		s.depth = queueDepth
	}
	if err = r.serve(b.o.pollers); err != nil {
		return r, err
	}
	c := gio.GPUConfig{Context: gpu.context, StagingBytes: int(b.o.staging), MoveBytes: int(b.o.move), Moves: b.o.moves,
		HarvestBlocks: b.o.blocks}
	if c.RingConfig, err = r.lanes(s); err != nil {
		return r, err
	}
	if s.change != nil {
		s.change(&c)
	}
	if r.ring, err = gio.NewGPU(c); err != nil {
		return r, err
	}
	return r, r.makePool()
}

// gpuStoreLanes are those of a store buffer.
const gpuStoreLanes = 2

// queueDepth is of queues for objects of many KiB.
const queueDepth = 1024

// gpuScratch is for trailers, and gpuDMAExtra for what a ring keeps for itself besides its cells: that, and PRP lists.
const (
	gpuScratch  = 8 << 20
	gpuDMAExtra = gpuScratch + 1<<20
)

// gpuDeadline bounds what the bench waits for when something is wrong.
const gpuDeadline = 10 * time.Second

// lanes makes queues and DMA memory.
func (r *gpuRig) lanes(s gpuSetup) (c gio.RingConfig, err error) {
	if s.phases != nil {
		for range r.image.volume.drives {
			r.phases = append(r.phases, phase.New(*s.phases))
		}
	}
	controllers, err := r.image.volume.controllers(s.inOrder, r.phases)
	if err != nil {
		return c, err
	}
	r.drives = controllers
	dma, err := r.mmap(s.bounce + s.store + (s.bounce+s.store)/64&^4095 + gpuDMAExtra)
	if err != nil {
		return c, err
	}
	c = gio.RingConfig{
		DMA: dma, DMABase: benchDMABase, BounceBytes: s.bounce, StoreBytes: s.store, SGL: !s.prp,
		ScratchBytes: gpuScratch,
		Armed:        &r.armed, Wake: &r.wake, Quiesce: r.quiesce, Deadline: gpuDeadline,
	}
	if s.store > 0 {
		c.StoreLanes = gpuStoreLanes
	}
	for range s.lanes + c.StoreLanes {
		var lane []gio.Queue
		for i, controller := range controllers {
			q, err := r.attach(controller, dma, s.depth)
			if err != nil {
				return c, err
			}
			q.Drive, q.LBABytes = uint16(i), r.image.volume.drives[i].LBABytes()
			lane = append(lane, q)
		}
		c.Lanes = append(c.Lanes, lane)
	}
	return c, nil
}

// attach makes a queue pair and gives it to the next poller in turn.
func (r *gpuRig) attach(controller *emu.Controller, dma []byte, depth int) (gio.Queue, error) {
	block, err := r.mmap(nvme.QueueBytes(depth))
	if err != nil {
		return gio.Queue{}, err
	}
	memory, err := nvme.MapQueue(block, depth)
	if err != nil {
		return gio.Queue{}, err
	}
	q, err := controller.Attach(emu.QueueConfig{Memory: memory, DMA: benchMemory(dma)})
	if err != nil {
		return gio.Queue{}, err
	}
	r.polls[len(r.queues)%len(r.polls)].Add(q)
	r.queues = append(r.queues, q)
	return gio.Queue{Memory: memory}, nil
}

func (r *gpuRig) mmap(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, systemError{fmt.Errorf("%d bytes of memory: %w", n, err)}
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // as a mount's DMA memory is
	for i := 0; i < n; i += os.Getpagesize() {
		b[i] = 0
	}
	r.mapped = append(r.mapped, b)
	return b, nil
}

// serve starts the pollers.
func (r *gpuRig) serve(n int) error {
	for i := range n {
		p, err := emu.NewPoller(emu.PollerConfig{Armed: &r.armed, Wake: &r.wake, Number: uint32(i)})
		if err != nil {
			return err
		}
		t := &gpuPoller{Poller: p, done: make(chan struct{})}
		started := make(chan int32)
		go func() {
			defer close(t.done)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			started <- threadClock()
			p.Run()
		}()
		t.clock = <-started
		r.polls = append(r.polls, t)
	}
	return nil
}

func (r *gpuRig) quiesce(lane int) error {
	var errs []error
	for _, q := range r.queues[lane*len(r.drives) : (lane+1)*len(r.drives)] {
		errs = append(errs, q.Quiesce(time.Now().Add(10*time.Second)))
	}
	return errors.Join(errs...)
}

// runAt is where a block's run begins in its layer of the pool: as PyTorch allocates it, all K and then all V.
func (s *gpuShape) runAt(block uint32, run int) int {
	n := s.object / s.runs
	return run*s.slots*n + int(block)*n
}

func (r *gpuRig) allocatePool() (err error) {
	r.pool, err = r.gpu.context.Alloc(uint64(r.image.shape.layerBytes() * r.image.shape.layers))
	return err
}

// makePool allocates the pool, registers it, and makes the batches of all layers.
func (r *gpuRig) makePool() (err error) {
	shape := &r.image.shape
	layer := uint64(shape.layerBytes())
	if err = r.allocatePool(); err != nil {
		return err
	}
	paged := gio.Paged{Blocks: uint64(shape.slots)}
	for l := range shape.layers {
		var runs []cuda.StridedRun
		for run := range shape.runs {
			runs = append(runs, cuda.StridedRun{
				Base:   uint64(r.pool) + uint64(l)*layer + uint64(shape.runAt(0, run)),
				Stride: uint64(shape.object / shape.runs), Bytes: uint32(shape.object / shape.runs),
			})
		}
		paged.Classes = append(paged.Classes, runs)
	}
	if r.memory, err = r.ring.RegisterPaged(paged); err != nil {
		return err
	}
	for l := range shape.layers {
		object := r.image.m.Layout().LayerObjects(uint16(l), 0)[0]
		descs, ctxs := make([]uint64, shape.slots), make([]gio.IOCTX, shape.slots)
		for i := range descs {
			descs[i] = r.memory.Block(l, uint64(r.image.blocks[i]))
			ctxs[i] = gio.IOCTX{Desc: descs[i], Slot: uint32(i), Object: object}
		}
		r.descs, r.ctxs = append(r.descs, descs), append(r.ctxs, ctxs)
	}
	return nil
}

func (r *gpuRig) close() error {
	var errs []error
	if r.ring != nil {
		if r.memory != nil {
			errs = append(errs, r.ring.Unregister(r.memory))
		}
		errs = append(errs, r.ring.Close())
	}
	for lane := range len(r.queues) / max(len(r.drives), 1) {
		errs = append(errs, r.quiesce(lane))
	}
	if r.pool != 0 {
		errs = append(errs, r.gpu.context.Free(r.pool))
	}
	for _, p := range r.polls {
		p.Stop()
		<-p.done
	}
	for _, b := range r.mapped {
		errs = append(errs, unix.Munmap(b))
	}
	return errors.Join(errs...)
}

// pollerTime is the CPU time of all pollers.
func (r *gpuRig) pollerTime() (d time.Duration) {
	for _, p := range r.polls {
		d += cpuTime(p.clock)
	}
	return d
}

// busyTime is the part of it in which pollers found work: commands taken in, bytes copied, completions posted. The rest
// is looking for some.
func (r *gpuRig) busyTime() (d time.Duration) {
	for _, c := range r.drives {
		d += time.Duration(c.Stats().BusyNanoseconds)
	}
	return d
}

// moved is the bytes that commands asked for so far.
func (r *gpuRig) moved() uint64 {
	s := r.ring.Stats()
	return s.ReadBytes + s.WrittenBytes
}

// gpuFlying is how many layers are in flight.
const gpuFlying = 3

// openLayers prepares the layer verbs, or returns nil without sums.
func (r *gpuRig) openLayers(write, sums bool) (gio.Layers, error) {
	if !sums {
		return nil, nil
	}
	if write {
		return r.ring.CreateLayers(r.image.m, 0, r.image.slots)
	}
	layers, err := r.ring.OpenLayers(r.image.m, 0, r.image.slots)
	if err != nil {
		return nil, err
	}
	if err := firstError(layers.Failed()); err != nil {
		layers.Close()
		return nil, err
	}
	return layers, nil
}

// gpuSpan is some layers.
type gpuSpan struct{ first, count int }

func (r *gpuRig) allLayers() gpuSpan { return gpuSpan{0, r.image.shape.layers} }

// stream moves layer after layer, some of them in flight, until more says no: by the layer verbs, or by plain batches
// where layers is nil. It returns the payload moved; done layers, at least, were all moved.
func (r *gpuRig) stream(write bool, layers gio.Layers, more func() bool) (n, done int, err error) {
	return r.streamLayers(r.allLayers(), write, layers, more)
}

// streamLayers does so with some layers only. Done counts from the first of them.
func (r *gpuRig) streamLayers(span gpuSpan, write bool, layers gio.Layers, more func() bool) (n, done int, err error) {
	var flying []func() error
	wait := func() error {
		err := flying[0]()
		flying = flying[1:]
		if err == nil {
			n += r.image.shape.layerBytes()
			done = min(done+1, span.count)
		}
		return err
	}
	defer func() {
		for len(flying) > 0 {
			err = errors.Join(err, wait())
		}
		if layers != nil && err == nil {
			err = firstError(layers.Failed())
		}
	}()
	for i := 0; more(); i = (i + 1) % span.count {
		finish, err := r.issue(write, layers, span.first+i)
		if err != nil {
			return n, done, err
		}
		if flying = append(flying, finish); len(flying) == gpuFlying {
			if err := wait(); err != nil {
				return n, done, err
			}
		}
	}
	return n, done, nil
}

// issue begins a layer and returns what completes it.
func (r *gpuRig) issue(write bool, layers gio.Layers, layer int) (finish func() error, err error) {
	if layers == nil {
		t, err := r.ring.Issue(write, r.image.m, r.ctxs[layer])
		return func() error {
			failed, err := r.ring.Wait(t)
			if err == nil && len(failed) > 0 {
				err = failed[0].Err
			}
			return err
		}, err
	}
	var t gio.LayerTicket
	if write {
		t, err = layers.StoreLayer(uint16(layer), r.descs[layer])
	} else {
		t, err = layers.RetrieveLayer(uint16(layer), r.descs[layer])
	}
	return func() error { return t.Wait() }, err
}

// verify compares the first layers of the pool with the drives.
func (b *gpuBench) verify(r *gpuRig, layers int) error { return b.verifyLayers(r, gpuSpan{0, layers}) }

func (b *gpuBench) verifyLayers(r *gpuRig, span gpuSpan) error {
	shape := &r.image.shape
	memory := b.scratch.Bytes[:shape.layerBytes()]
	for layer := span.first; layer < span.first+span.count; layer++ {
		if err := r.gpu.read(memory, r.pool+cuda.Pointer(layer*shape.layerBytes())); err != nil {
			return err
		}
		if err := r.image.compare(layer, memory, shape.runAt); err != nil {
			return err
		}
	}
	return nil
}

// poison makes sure that no byte of the pool is right by chance.
func (r *gpuRig) poison() error {
	return r.gpu.set(r.pool, 0xa5, uint64(r.image.shape.layerBytes()*r.image.shape.layers))
}

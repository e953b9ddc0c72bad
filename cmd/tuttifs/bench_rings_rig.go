package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// benchLayers is the objects of one slot.
const benchLayers = 8

// benchDMABase is where the engine's memory lies in the controllers' view.
const benchDMABase = 1 << 40

// benchMemory is that memory.
func benchMemory(b []byte) *emu.Region { return &emu.Region{Base: benchDMABase, Bytes: b} }

// benchDrives is the drives of a part with their controllers, and the map over them.
type benchDrives struct {
	drives      []drive.Drive
	controllers []*emu.Controller
	m           *gio.Map
	slots       uint32
}

// newBenchDrives puts controllers in front of drives of equal size and one row over all of them. With a profile, each
// is held back to it.
func newBenchDrives(drives []drive.Drive, objectBytes int, profile *drivemodel.Profile) (
	*benchDrives, error) {
	b := &benchDrives{drives: drives}
	var g stripe.Geometry
	for layer := range benchLayers {
		run := stripe.Run{Kind: stripe.RunKV, Bytes: uint32(objectBytes)}
		g.Objects = append(g.Objects, stripe.Object{Layer: uint16(layer), Runs: []stripe.Run{run}})
	}
	layout, err := stripe.NewLayout(g.WithTrailers(), len(drives))
	if err != nil {
		return nil, err
	}
	row := gio.MapRow{Units: make([]uint64, len(drives))}
	for i, d := range drives {
		row.Drives = append(row.Drives, uint16(i))
		config := emu.Config{Drive: d, Index: uint16(i), SGL: true, Serial: fmt.Sprintf("BENCH%d", i)}
		if profile != nil {
			config.Medium = drivemodel.NewMedium(profile, uint64(i))
		}
		c, err := emu.New(config)
		if err != nil {
			return nil, err
		}
		b.controllers = append(b.controllers, c)
	}
	entry := uint64(drives[0].Size()) / drive.UnitBytes
	b.slots = layout.SlotsPerRow(entry)
	b.m, err = gio.NewMap(layout, entry, []gio.MapRow{row}, 1)
	return b, err
}

// shuffled is all objects of all slots in random order.
func (b *benchDrives) shuffled() []gio.IOCTX {
	ctxs := make([]gio.IOCTX, 0, int(b.slots)*benchLayers)
	for slot := range b.slots {
		for object := range uint16(benchLayers) {
			ctxs = append(ctxs, gio.IOCTX{Slot: slot, Object: object})
		}
	}
	rand.Shuffle(len(ctxs), func(i, j int) { ctxs[i], ctxs[j] = ctxs[j], ctxs[i] })
	return ctxs
}

// benchRig is one session: a ring, its queues and the poller that serves them.
type benchRig struct {
	b      *benchDrives
	ring   *gio.Ring
	memory *gio.Memory
	poller *emu.Poller
	queues []*emu.Queue
	mapped [][]byte
	armed  uint32
	wake   uint32
	done   chan struct{} // closed when the poller's thread has ended; nil if the waiting thread steps
	clock  int32         // CPU clock of the poller's thread
}

// benchShape of a rig.
type benchShape struct {
	lanes, depth, chunk int
	dmaBytes            int  // for objects
	stepped             bool // controller and executor on one thread
	backend             emu.Backend
}

// benchScratch is what a ring keeps of its memory for trailers, of which there are none here.
const benchScratch = 1 << 20

func newBenchRig(b *benchDrives, s benchShape) (r *benchRig, err error) {
	r = &benchRig{b: b}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
			r = nil
		}
	}()
	dma, err := r.mmap(s.dmaBytes + benchScratch)
	if err != nil {
		return r, err
	}
	config := emu.PollerConfig{Backend: s.backend}
	if !s.stepped {
		config.Armed, config.Wake = &r.armed, &r.wake
	}
	if r.poller, err = emu.NewPoller(config); err != nil {
		return r, err
	}
	c := gio.RingConfig{
		DMA: dma, DMABase: benchDMABase, SGL: true, ChunkCommands: s.chunk, ScratchBytes: benchScratch,
		Armed: config.Armed, Wake: config.Wake, Quiesce: r.quiesce,
	}
	for range s.lanes {
		var lane []gio.Queue
		for i := range b.drives {
			q, err := r.attach(i, dma, s.depth)
			if err != nil {
				return r, err
			}
			lane = append(lane, q)
		}
		c.Lanes = append(c.Lanes, lane)
	}
	if s.stepped {
		c.Step = r.step
	}
	if r.ring, err = gio.NewRing(c); err != nil {
		return r, err
	}
	if r.memory, err = r.ring.Register(r.ring.DMA()[:s.dmaBytes]); err != nil {
		return r, err
	}
	if !s.stepped {
		r.serve()
	}
	return r, nil
}

// step runs the controller on the thread that waits; with nothing to do it sleeps until a drive has finished something.
func (r *benchRig) step() {
	if r.poller.Step() == 0 {
		r.poller.Await(time.Millisecond)
	}
}

func (r *benchRig) mmap(n int) ([]byte, error) {
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

func (r *benchRig) attach(i int, dma []byte, depth int) (gio.Queue, error) {
	block, err := r.mmap(nvme.QueueBytes(depth))
	if err != nil {
		return gio.Queue{}, err
	}
	memory, err := nvme.MapQueue(block, depth)
	if err != nil {
		return gio.Queue{}, err
	}
	q, err := r.b.controllers[i].Attach(emu.QueueConfig{Memory: memory, DMA: benchMemory(dma)})
	if err != nil {
		return gio.Queue{}, err
	}
	r.queues = append(r.queues, q)
	r.poller.Add(q)
	return gio.Queue{Memory: memory, Drive: uint16(i), LBABytes: r.b.drives[i].LBABytes()}, nil
}

// serve starts the poller's thread and waits until its clock is known.
func (r *benchRig) serve() {
	r.done = make(chan struct{})
	started := make(chan int32)
	go func() {
		defer close(r.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- threadClock()
		r.poller.Run()
	}()
	r.clock = <-started
}

func (r *benchRig) quiesce(lane int) error {
	n := len(r.b.drives)
	var errs []error
	for _, q := range r.queues[lane*n : (lane+1)*n] {
		errs = append(errs, q.Quiesce(time.Now().Add(10*time.Second)))
	}
	return errors.Join(errs...)
}

func (r *benchRig) close() error {
	var errs []error
	if r.ring != nil {
		errs = append(errs, r.ring.Close())
		for lane := range len(r.queues) / len(r.b.drives) {
			errs = append(errs, r.quiesce(lane))
		}
	}
	if r.poller != nil {
		r.poller.Stop()
	}
	if r.done != nil {
		<-r.done
	}
	for _, b := range r.mapped {
		errs = append(errs, unix.Munmap(b))
	}
	return errors.Join(errs...)
}

// place gives every IOCTX a place of its own in the session's memory, in random order; there are enough for those in
// flight and they are used again in turns.
func (r *benchRig) place(ctxs []gio.IOCTX, objectBytes, dmaBytes int) {
	order := rand.Perm(dmaBytes / objectBytes)
	for i := range ctxs {
		ctxs[i].Desc = r.memory.Desc(order[i%len(order)] * objectBytes)
	}
}

// stream issues batch after batch, two of them in flight, going round in ctxs until more says no. It returns how many
// commands were completed.
func (r *benchRig) stream(write bool, ctxs []gio.IOCTX, batch int, more func() bool) (n int, err error) {
	var flying []gio.Ticket
	wait := func() error {
		failed, err := r.ring.Wait(flying[0])
		flying = flying[1:]
		if err == nil && len(failed) > 0 {
			err = failed[0].Err
		}
		return err
	}
	defer func() {
		for len(flying) > 0 {
			err = errors.Join(err, wait())
		}
	}()
	for at := 0; more(); {
		part := ctxs[at:min(at+batch, len(ctxs))]
		if at += len(part); at == len(ctxs) {
			at = 0
		}
		t, err := r.ring.Issue(write, r.b.m, part)
		if err != nil {
			return n, err
		}
		n += len(part)
		if flying = append(flying, t); len(flying) == 2 {
			if err := wait(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// threadClock is the CPU clock of the calling thread, readable from others of the process: clock_getcpuclockid(3) with
// the thread's id.
func threadClock() int32 {
	const perThread, scheduled = 4, 2
	return int32(^unix.Gettid()<<3 | perThread | scheduled)
}

// cpuTime reads a clock of CPU time.
func cpuTime(clock int32) time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(clock, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

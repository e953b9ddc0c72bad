package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"tuttifs/drive"
	"tuttifs/gio"
)

// Shapes of the parts that do not wait for a drive.
const (
	emptyDepth  = 1024
	ramLanes    = 4
	ramDepth    = 64
	ramChunk    = 16
	ramBatch    = 1024
	ramDrives   = 2
	ramRounds   = 4 // for each round with files
	emptyDriveB = 16 << 20
)

// memoryDrives makes drives of RAM, written once so that every page is there.
func memoryDrives(n int, bytes int64) (drives []drive.Drive, closeAll func(), err error) {
	closeAll = func() {
		for _, d := range drives {
			_ = d.Close()
		}
	}
	for i := range n {
		d, err := drive.NewMemory(fmt.Sprintf("ram%d", i), bytes&^(drive.UnitBytes-1))
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		drives = append(drives, d)
		b := d.Bytes()
		for at := 0; at < len(b); at += drive.UnitBytes {
			b[at] = byte(at >> 12)
		}
	}
	return drives, closeAll, nil
}

// benchEmpty measures commands without bytes on one queue: both sides on one core, which is the figure a core and
// queue, and executor and controller on two.
func (o *benchRingsOptions) benchEmpty(ctx context.Context) ([]emptyRow, error) {
	drives, closeAll, err := memoryDrives(1, emptyDriveB)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	var rows []emptyRow
	for _, stepped := range []bool{true, false} {
		row := emptyRow{Arrangement: "both sides on one core", Threads: 1}
		if !stepped {
			row = emptyRow{Arrangement: "a core for each side", Threads: 2}
		}
		var rates []float64
		for range o.rounds {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			rate, err := o.emptyRound(drives, stepped)
			if err != nil {
				return nil, err
			}
			rates = append(rates, rate)
		}
		row.CommandsPerSecond = median(rates)
		rows = append(rows, row)
	}
	return rows, nil
}

func (o *benchRingsOptions) emptyRound(drives []drive.Drive, stepped bool) (rate float64, err error) {
	b, err := newBenchDrives(drives, benchObjects[0], nil)
	if err != nil {
		return 0, err
	}
	r, err := newBenchRig(b, benchShape{lanes: 1, depth: emptyDepth, dmaBytes: 1 << 20, stepped: stepped})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	ctxs := make([]gio.IOCTX, 2*gio.BatchMax)
	for i := range ctxs {
		ctxs[i].Flags = gio.FlagFlush
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := time.Now()
	n, err := r.stream(true, ctxs, gio.BatchMax, lasting(begin, o.period/4))
	return float64(n) / time.Since(begin).Seconds(), err
}

// benchRAM compares RAM-backed drives with memcpy.
func (o *benchRingsOptions) benchRAM(ctx context.Context) ([]rateRow, error) {
	drives, closeAll, err := memoryDrives(ramDrives, int64(o.size)/ramDrives)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	counts := []int{1}
	if n := runtime.GOMAXPROCS(0); n > 1 {
		counts = append(counts, n)
	}
	if o.threads > 0 {
		counts = []int{o.threads}
	}
	var rows []rateRow
	for _, object := range benchObjects {
		for _, threads := range counts {
			more, err := o.ramRows(ctx, drives, object, threads, false)
			if err != nil {
				return nil, err
			}
			rows = append(rows, more...)
		}
		more, err := o.ramRows(ctx, drives, object, 2, true)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// ramRows measures reads and writes. Every thread is an executor and the controller that serves it, so that the threads
// that count are all there are; split puts them on two threads instead, one of which waits, and says what CPU time the
// controller's takes.
func (o *benchRingsOptions) ramRows(ctx context.Context, drives []drive.Drive, object, threads int, split bool) (
	[]rateRow, error) {
	w, err := o.newRAMWork(drives, object, threads, split)
	if err != nil {
		return nil, err
	}
	defer w.close()
	var rows []rateRow
	for _, write := range []bool{false, true} {
		row := rateRow{Arrangement: "both sides on each thread", Verb: "read", ObjectBytes: object, Threads: threads,
			Depth: ramLanes * ramChunk, Counts: !split, Split: split}
		if split {
			row.Arrangement = "a thread for each side"
		}
		if write {
			row.Verb = "write"
		}
		// Once without counting: pages, caches and clocks come up.
		if _, err := w.run(w.byRing(write)); err != nil {
			return nil, err
		}
		w.ring, w.cpy = threadCost{}, threadCost{}
		row.RingGBs, row.OtherGBs, row.Ratio, err = pairs(ctx, ramRounds*o.rounds,
			func() (float64, error) { return w.run(w.byRing(write)) },
			func() (float64, error) { return w.run(w.byCopy(write)) })
		if err != nil {
			return nil, err
		}
		row.CPUPerGB, row.OtherCPUPerGB = w.ring.perGB(), w.cpy.perGB()
		rows = append(rows, row)
	}
	return rows, nil
}

// ramWork is the same random copies for both contestants, divided among threads.
type ramWork struct {
	b       *benchDrives
	object  int
	rigs    []*benchRig
	parts   [][]gio.IOCTX // by rig
	copiers int           // threads of memcpy
	seconds time.Duration

	mu        sync.Mutex // guards what follows
	ring, cpy threadCost
}

// threadCost is the CPU time that moving some bytes took.
type threadCost struct {
	cpu    time.Duration
	poller time.Duration // of it, where that is known
	bytes  float64
}

func (c *threadCost) add(d threadCost) {
	c.cpu, c.poller, c.bytes = c.cpu+d.cpu, c.poller+d.poller, c.bytes+d.bytes
}

// perGB is seconds of CPU time.
func (c *threadCost) perGB() float64 { return perGB(c.cpu, c.bytes) }

func (c *threadCost) pollerPerGB() float64 { return perGB(c.poller, c.bytes) }

func perGB(d time.Duration, bytes float64) float64 {
	if bytes == 0 {
		return 0
	}
	return d.Seconds() / (bytes / 1e9)
}

func (o *benchRingsOptions) newRAMWork(drives []drive.Drive, object, threads int, split bool) (*ramWork, error) {
	b, err := newBenchDrives(drives, object, nil)
	if err != nil {
		return nil, err
	}
	w := &ramWork{b: b, object: object, copiers: threads, seconds: o.period / 16}
	rigs := threads
	if split {
		rigs = 1
	}
	all := b.shuffled()
	dma := int(o.size) / rigs / object * object
	for i := range rigs {
		shape := benchShape{lanes: ramLanes, depth: ramDepth, chunk: ramChunk, dmaBytes: dma, stepped: !split}
		r, err := newBenchRig(b, shape)
		if err != nil {
			w.close()
			return nil, err
		}
		w.rigs = append(w.rigs, r)
		part := all[len(all)*i/rigs : len(all)*(i+1)/rigs]
		r.place(part, object, dma)
		w.parts = append(w.parts, part)
	}
	return w, nil
}

func (w *ramWork) close() {
	for _, r := range w.rigs {
		_ = r.close()
	}
}

// lasting says yes until d has passed since begin, but once in any case: a thread that was late has a figure too.
func lasting(begin time.Time, d time.Duration) func() bool {
	begun := false
	return func() bool {
		first := !begun
		begun = true
		return first || time.Since(begin) < d
	}
}

// run starts workers together and returns the bytes a second of all.
func (w *ramWork) run(workers []func(more func() bool) (int, error)) (float64, error) {
	var wg sync.WaitGroup
	errs := make([]error, len(workers))
	counts := make([]int, len(workers))
	start := make(chan struct{})
	var begin time.Time
	for i, f := range workers {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			<-start
			counts[i], errs[i] = f(lasting(begin, w.seconds))
		})
	}
	begin = time.Now()
	close(start)
	wg.Wait()
	seconds := time.Since(begin).Seconds()
	total := 0
	for _, n := range counts {
		total += n
	}
	return float64(total) * float64(w.object) / seconds / 1e9, errors.Join(errs...)
}

func (w *ramWork) account(to *threadCost, cpu time.Duration, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	to.cpu, to.bytes = to.cpu+cpu, to.bytes+float64(n)*float64(w.object)
}

// byRing is one worker a rig.
func (w *ramWork) byRing(write bool) (workers []func(func() bool) (int, error)) {
	for i, r := range w.rigs {
		workers = append(workers, func(more func() bool) (int, error) {
			clock := r.clock
			if r.done == nil {
				clock = threadClock() // both sides are on this thread; its time is an upper bound
			}
			before := cpuTime(clock)
			n, err := r.stream(write, w.parts[i], ramBatch, more)
			w.account(&w.ring, cpuTime(clock)-before, n)
			return n, err
		})
	}
	return workers
}

// byCopy is one worker a thread: plain copies of what the rings move, in the same order.
func (w *ramWork) byCopy(write bool) (workers []func(func() bool) (int, error)) {
	for i := range w.copiers {
		r := w.rigs[i%len(w.rigs)]
		part := w.parts[i%len(w.rigs)]
		if k := w.copiers / len(w.rigs); k > 1 {
			part = part[len(part)*(i%k)/k : len(part)*(i%k+1)/k]
		}
		workers = append(workers, func(more func() bool) (n int, err error) {
			clock := threadClock()
			before := cpuTime(clock)
			defer func() { w.account(&w.cpy, cpuTime(clock)-before, n) }()
			memory := r.ring.DMA()
			base := r.memory.Desc(0)
			for more() {
				for k := 0; k < ramBatch; k++ {
					c := &part[n%len(part)]
					index, unit, _, ok := w.b.m.Locate(c.Slot, c.Object)
					if !ok {
						return n, gio.ErrUnmapped
					}
					stored := w.b.drives[index].Bytes()[unit*drive.UnitBytes:][:w.object]
					mine := memory[c.Desc-base:][:w.object]
					if write {
						copy(stored, mine)
					} else {
						copy(mine, stored)
					}
					n++
				}
			}
			return n, nil
		})
	}
	return workers
}

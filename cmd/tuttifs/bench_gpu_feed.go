package main

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/cuda"
	"tuttifs/gio"
)

// gpuFeed is the ring's job without kernels: the CPU executor reads objects from the same drives straight into pinned
// memory, as much of it as the ring has for bounce cells, and the copy engine takes them to their runs in the pool.
// Stores go the way back. One thread does both, and never waits for one while it could move the other on.
type gpuFeed struct {
	b      *gpuBench
	rig    *gpuRig // queues, pollers and the pool; it has no ring of its own
	ring   *gio.Ring
	pinned *cuda.HostMemory
	memory *gio.Memory // the same
	stream *cuda.Stream
	parts  [feedParts]feedPart
	object int // the next one, counted over all layers
	moved  atomic.Uint64
	calls  time.Duration // spent in enqueuing copies
}

// feedParts is how many parts the pinned memory has: half of them are with the drives, half with the copy engine.
const feedParts = 8

// feedPart is a part of the pinned memory, and the objects that pass through it.
type feedPart struct {
	offset int
	layer  int
	slot   int // the first
	ctxs   []gio.IOCTX
	ticket gio.Ticket // nil: nothing is with the drives
	event  *cuda.Event

	device, host []cuda.Pointer // by run
	sizes        []uint64
}

func (b *gpuBench) withFeed(shape gpuShape, f func(feed *gpuFeed) error) (err error) {
	image, err := b.image(shape)
	if err != nil {
		return err
	}
	feed := &gpuFeed{b: b, rig: &gpuRig{gpu: b.gpu, image: image}}
	defer func() { err = errors.Join(err, feed.close()) }()
	if err := feed.open(); err != nil {
		return err
	}
	return f(feed)
}

func (f *gpuFeed) open() error {
	if err := f.rig.serve(f.b.o.pollers); err != nil {
		return err
	}
	c, err := f.rig.lanes(gpuSetup{lanes: f.b.o.lanes, bounce: int(f.b.o.bounce), depth: queueDepth})
	if err != nil {
		return err
	}
	c.BounceBytes = 0 // all of it is the pinned memory
	if f.ring, err = gio.NewRing(c); err != nil {
		return err
	}
	buffer := f.ring.DMA()[:int(f.b.o.bounce)&^4095]
	if f.memory, err = f.ring.Register(buffer); err != nil {
		return err
	}
	context := f.rig.gpu.context
	if f.pinned, err = context.RegisterHost(buffer); err != nil {
		return err
	}
	if f.stream, err = context.NewStream(0); err != nil {
		return err
	}
	for i := range f.parts {
		f.parts[i].offset = i * (len(buffer) / feedParts &^ 4095)
		if f.parts[i].event, err = context.NewEvent(false); err != nil {
			return err
		}
	}
	return f.rig.allocatePool()
}

func (f *gpuFeed) close() error {
	var errs []error
	if f.stream != nil {
		errs = append(errs, f.stream.Synchronize(), f.stream.Close())
	}
	for i := range f.parts {
		if e := f.parts[i].event; e != nil {
			errs = append(errs, e.Close())
		}
	}
	if f.ring != nil {
		errs = append(errs, f.ring.Close())
	}
	if f.pinned != nil {
		errs = append(errs, f.rig.gpu.context.UnregisterHost(f.pinned))
	}
	return errors.Join(append(errs, f.rig.close())...)
}

// fill gives a part the objects that come next: those of one layer that fit.
func (f *gpuFeed) fill(p *feedPart) {
	shape := &f.rig.image.shape
	p.layer, p.slot = f.object/shape.slots, f.object%shape.slots
	n := min(max(1, len(f.pinned.Bytes)/feedParts/shape.object), shape.slots-p.slot)
	object := f.rig.image.m.Layout().LayerObjects(uint16(p.layer), 0)[0]
	p.ctxs = p.ctxs[:0]
	for i := range n {
		p.ctxs = append(p.ctxs, gio.IOCTX{Desc: f.memory.Desc(p.offset + i*shape.object), Slot: uint32(p.slot + i),
			Object: object})
	}
	f.object = (f.object + n) % (shape.slots * shape.layers)
}

// feedStage is one of the two ways that every part goes.
type feedStage struct {
	begin, wait func(p *feedPart) error
}

// run moves objects until more says no, and returns when nothing is under way.
func (f *gpuFeed) run(kind copyKind, write bool, more func() bool) (err error) {
	drives := feedStage{func(p *feedPart) error { return f.issue(p, write) }, f.waitDrives}
	copies := feedStage{func(p *feedPart) error { return f.copy(p, kind, write) }, f.waitCopies}
	first, second := drives, copies
	if write {
		first, second = copies, drives
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.abort())
		}
	}()
	part := func(i int) *feedPart { return &f.parts[i%feedParts] }
	// Parts up to ended are through, those up to handed are in the second stage, those up to begun in the first.
	for begun, handed, ended, on := 0, 0, 0, true; ; {
		on = on && more()
		switch {
		case handed < begun && (!on || begun-handed > feedParts/2):
			if err := errors.Join(first.wait(part(handed)), second.begin(part(handed))); err != nil {
				return err
			}
			handed++
		case ended < handed && (!on || begun-ended == feedParts):
			if err := second.wait(part(ended)); err != nil {
				return err
			}
			f.moved.Add(uint64(len(part(ended).ctxs) * f.rig.image.shape.object))
			ended++
		case on:
			f.fill(part(begun))
			if err := first.begin(part(begun)); err != nil {
				return err
			}
			begun++
		default:
			return nil
		}
	}
}

// abort waits for what is under way, however it ends.
func (f *gpuFeed) abort() error {
	for i := range f.parts {
		if f.parts[i].ticket != nil {
			_ = f.waitDrives(&f.parts[i]) // the first error is what counts
		}
	}
	return f.stream.Synchronize()
}

func (f *gpuFeed) issue(p *feedPart, write bool) (err error) {
	p.ticket, err = f.ring.Issue(write, f.rig.image.m, p.ctxs)
	return err
}

func (f *gpuFeed) waitDrives(p *feedPart) error {
	failed, err := f.ring.Wait(p.ticket)
	p.ticket = nil
	if err == nil && len(failed) > 0 {
		err = failed[0].Err
	}
	return err
}

// copy enqueues the copies of a part, run by run.
func (f *gpuFeed) copy(p *feedPart, kind copyKind, write bool) error {
	begin := time.Now()
	defer func() { f.calls += time.Since(begin) }()
	shape := &f.rig.image.shape
	pool := f.rig.pool + cuda.Pointer(p.layer*shape.layerBytes())
	n := shape.object / shape.runs
	p.device, p.host, p.sizes = p.device[:0], p.host[:0], p.sizes[:0]
	for i := range p.ctxs {
		for run := range shape.runs {
			device := pool + cuda.Pointer(shape.runAt(f.rig.image.blocks[p.slot+i], run))
			host := p.offset + i*shape.object + run*n
			if kind == copyBatch {
				p.device, p.sizes = append(p.device, device), append(p.sizes, uint64(n))
				p.host = append(p.host, f.pinned.GPU+cuda.Pointer(host))
				continue
			}
			var err error
			if write {
				err = f.stream.CopyDtoH(unsafe.Pointer(&f.pinned.Bytes[host]), device, uint64(n))
			} else {
				err = f.stream.CopyHtoD(device, unsafe.Pointer(&f.pinned.Bytes[host]), uint64(n))
			}
			if err != nil {
				return err
			}
		}
	}
	if kind == copyBatch {
		to, from := p.device, p.host
		if write {
			to, from = from, to
		}
		if err := f.stream.CopyBatch(to, from, p.sizes); err != nil {
			return err
		}
	}
	return p.event.Record(f.stream)
}

// waitCopies waits for a part's copies and keeps the lanes moving meanwhile.
func (f *gpuFeed) waitCopies(p *feedPart) error {
	for {
		done, err := p.event.Query()
		if done || err != nil {
			return err
		}
		if !f.ring.Poll() {
			runtime.Gosched()
		}
	}
}

// prepare makes sure that no byte is right by chance.
func (f *gpuFeed) prepare(write bool) error {
	f.object = 0
	if write {
		return f.b.refill(f.rig)
	}
	return f.rig.poison()
}

// measure moves every object, and then for a while, and compares.
func (f *gpuFeed) measure(kind copyKind, write bool) (row gpuOther, err error) {
	shape := &f.rig.image.shape
	row = gpuOther{Way: feedName(kind), Verb: verb(write), ObjectBytes: shape.object, PerObject: true, EndToEnd: true,
		Note: "no checksums"}
	if err := f.prepare(write); err != nil {
		return row, err
	}
	all := f.moved.Load() + uint64(shape.layers*shape.layerBytes())
	f.calls = 0
	run := func(more func() bool) error { return f.run(kind, write, more) }
	// Parts are counted once they are through, so this moves a few too many.
	if err := run(func() bool { return f.moved.Load() < all }); err != nil {
		return row, err
	}
	if err := f.b.measureOther(&row, f.moved.Load, &f.calls, run); err != nil {
		return row, err
	}
	err = f.b.verify(f.rig, shape.layers)
	row.Verified = err == nil
	if write {
		f.rig.image.seal()
	}
	return row, err
}

func feedName(kind copyKind) string { return "CPU executor, " + string(kind) }

// feedWay is the same beside compute.
func (b *gpuBench) feedWay(f *gpuFeed, kind copyKind) *gpuWay {
	return &gpuWay{
		name: feedName(kind), verb: verb(false), bytes: f.moved.Load,
		prepare: func() error { return f.prepare(false) },
		run: func(rounds func(round gpuRound) error) error {
			return rounds(func(more func() bool) error { return f.run(kind, false, more) })
		},
		check: func() error { return b.verify(f.rig, 1) },
	}
}

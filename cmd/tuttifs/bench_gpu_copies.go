package main

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/cuda"
)

// copyKind is a way of the copy engine between the host's memory and the pool.
type copyKind string

const (
	copyPerObject copyKind = "a copy for each object"
	copyBatch     copyKind = "cuMemcpyBatchAsync"
	copyPlain     copyKind = "one plain large copy"
)

var copyKinds = []copyKind{copyPerObject, copyBatch, copyPlain}

// gpuCopies is copies alone: a layer of objects in pinned memory and its places in a pool, each in one piece. Drives
// come on top of them, as gpuFeed has them.
type gpuCopies struct {
	b      *gpuBench
	image  *gpuImage
	memory deviceMemory
	pool   cuda.Pointer
	host   *cuda.HostMemory
	to     []cuda.Pointer // by slot
	from   []cuda.Pointer
	sizes  []uint64
	moved  atomic.Uint64
	calls  time.Duration // spent in enqueuing copies
}

// copyPiece is how much is enqueued before the host looks again; two pieces are outstanding.
const copyPiece = 16 << 20

func (b *gpuBench) withCopies(shape gpuShape, f func(c *gpuCopies) error) (err error) {
	shape.runs = 1
	image, err := b.image(shape)
	if err != nil {
		return err
	}
	c := &gpuCopies{b: b, image: image, memory: deviceMemory{gpu: b.gpu}}
	defer func() {
		if c.host != nil {
			err = errors.Join(err, b.gpu.context.FreeHost(c.host))
		}
		err = errors.Join(err, c.memory.free())
	}()
	if c.host, err = b.gpu.context.AllocHost(shape.layerBytes(), false); err != nil {
		return err
	}
	if c.pool, err = c.memory.alloc(uint64(shape.layerBytes())); err != nil {
		return err
	}
	for i := range shape.slots {
		c.to = append(c.to, c.pool+cuda.Pointer(int(image.blocks[i])*shape.object))
		c.from = append(c.from, c.host.GPU+cuda.Pointer(i*shape.object))
		c.sizes = append(c.sizes, uint64(shape.object))
	}
	return f(c)
}

// stream copies the layer again and again until more says no, in the context that is bound.
func (c *gpuCopies) stream(kind copyKind, write bool, more func() bool) (err error) {
	s, err := c.b.gpu.context.NewStream(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Synchronize(), s.Close()) }()
	var events [2]*cuda.Event
	for i := range events {
		if events[i], err = c.b.gpu.context.NewEvent(false); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, events[i].Close()) }()
	}
	slots := min(max(1, copyPiece/c.image.shape.object), c.image.shape.slots)
	var flying [2]uint64
	for at, turn := 0, 0; ; turn = 1 - turn {
		if err := events[turn].Synchronize(); err != nil {
			return err
		}
		c.moved.Add(flying[turn])
		flying[turn] = 0
		if at == 0 && !more() {
			break
		}
		end := min(at+slots, c.image.shape.slots)
		begin := time.Now()
		if err := c.enqueue(s, kind, write, at, end); err != nil {
			return err
		}
		c.calls += time.Since(begin)
		if err := events[turn].Record(s); err != nil {
			return err
		}
		flying[turn] = uint64((end - at) * c.image.shape.object)
		if at = end; at == c.image.shape.slots {
			at = 0
		}
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	c.moved.Add(flying[0] + flying[1])
	return nil
}

// enqueue copies the objects of some slots.
func (c *gpuCopies) enqueue(s *cuda.Stream, kind copyKind, write bool, at, end int) error {
	n := uint64(c.image.shape.object)
	if kind == copyBatch {
		to, from := c.to[at:end], c.from[at:end]
		if write {
			to, from = from, to
		}
		return s.CopyBatch(to, from, c.sizes[at:end])
	}
	one := func(device cuda.Pointer, host int, n uint64) error {
		if write {
			return s.CopyDtoH(unsafe.Pointer(&c.host.Bytes[host]), device, n)
		}
		return s.CopyHtoD(device, unsafe.Pointer(&c.host.Bytes[host]), n)
	}
	if kind == copyPlain {
		offset := at * int(n)
		return one(c.pool+cuda.Pointer(offset), offset, uint64(end-at)*n)
	}
	for i := at; i < end; i++ {
		if err := one(c.to[i], i*int(n), n); err != nil {
			return err
		}
	}
	return nil
}

// load gives the host's memory the drives' objects.
func (c *gpuCopies) load() {
	object, n := c.image.m.Layout().LayerObjects(0, 0)[0], c.image.shape.object
	parallel(c.image.shape.slots, func(i int) { copy(c.host.Bytes[i*n:], c.image.object(i, object)) })
}

// prepare makes sure that no byte is right by chance: for restores the host has the drives' objects, and the pool
// nothing; for stores it is the other way round.
func (c *gpuCopies) prepare(write bool) error {
	n := uint64(c.image.shape.layerBytes())
	if !write {
		c.load()
		return c.b.gpu.set(c.pool, 0xa5, n)
	}
	parallel(c.image.shape.slots, func(i int) { clear(c.host.Bytes[i*c.image.shape.object:][:c.image.shape.object]) })
	c.b.salt++
	return c.b.gpu.fillDevice(c.pool, n, 1<<60|c.b.salt<<40, ^uint64(0), 0)
}

// check compares the pool with the host's memory. Plain copies scatter nothing.
func (c *gpuCopies) check(kind copyKind) error {
	memory, n := c.b.scratch.Bytes[:c.image.shape.layerBytes()], c.image.shape.object
	if err := c.b.gpu.read(memory, c.pool); err != nil {
		return err
	}
	errs := make([]error, c.image.shape.slots)
	parallel(len(errs), func(i int) {
		at := i * n
		if kind != copyPlain {
			at = int(c.image.blocks[i]) * n
		}
		if !bytes.Equal(memory[at:at+n], c.host.Bytes[i*n:(i+1)*n]) {
			errs[i] = fmt.Errorf("%w: slot %d by %s", errGPUBytes, i, kind)
		}
	})
	return firstError(errs)
}

func copiesName(kind copyKind) string { return "copies alone, " + string(kind) }

// copyWay is a kind of copies beside compute.
func (b *gpuBench) copyWay(c *gpuCopies, kind copyKind) *gpuWay {
	return &gpuWay{
		name: copiesName(kind), verb: verb(false), bytes: c.moved.Load,
		prepare: func() error { return c.prepare(false) },
		run: func(rounds func(round gpuRound) error) error {
			return rounds(func(more func() bool) error { return c.stream(kind, false, more) })
		},
		check: func() error { return c.check(kind) },
	}
}

// gpuOther is a way that is not tuttifs', and the ring beside it.
type gpuOther struct {
	Way         string  `json:"way"`
	Verb        string  `json:"verb"`
	ObjectBytes int     `json:"object_bytes"`
	GBs         float64 `json:"gb_per_second"`
	CPUMicros   float64 `json:"cpu_us_per_16_mib,omitempty"`   // of the thread that feeds the copy engine
	CallMicros  float64 `json:"calls_us_per_16_mib,omitempty"` // of them in calls that enqueue copies
	PerObject   bool    `json:"per_object"`
	EndToEnd    bool    `json:"end_to_end"` // from and to drives
	Ring        float64 `json:"ring_gb_per_second"`
	Note        string  `json:"note,omitempty"`
	Verified    bool    `json:"verified"`
}

// others measures the same bytes by other ways: those that count from the drives to the pool and back, and copies
// alone for comparison.
func (b *gpuBench) others() error {
	ahead, first := true, 0.0
	add := func(row gpuOther, ring float64) {
		row.Ring = ring
		ahead = ahead && (!row.PerObject || !row.EndToEnd || ring > row.GBs)
		b.report.Others = append(b.report.Others, row)
	}
	for i, object := range b.o.scale.objects {
		shape := b.o.shape(object)
		ring, err := b.ringAlone(object)
		if err != nil {
			return err
		}
		if i == 0 {
			first = ring[false]
		}
		err = b.withFeed(shape, func(f *gpuFeed) error {
			return eachCopy([]copyKind{copyPerObject, copyBatch}, ring, f.measure, add)
		})
		if err != nil {
			return err
		}
		err = b.withCopies(shape, func(c *gpuCopies) error { return eachCopy(copyKinds, ring, c.measure, add) })
		if err != nil {
			return err
		}
	}
	row, err := b.cuFile(gpuObjects[0])
	switch {
	case errors.Is(err, errGPUBytes) || b.ctx.Err() != nil:
		return err
	case err != nil:
		b.report.note("cuFile was left out: %v", err)
	default:
		row.EndToEnd = true
		add(row, first)
	}
	b.report.Bars = append(b.report.Bars, gpuBar{Name: "ahead of every way per object, drives included", Met: ahead})
	return nil
}

// eachCopy measures kinds of copies in both directions.
func eachCopy(kinds []copyKind, ring map[bool]float64, measure func(kind copyKind, write bool) (gpuOther, error),
	add func(row gpuOther, ring float64)) error {
	for _, write := range []bool{false, true} {
		for _, kind := range kinds {
			row, err := measure(kind, write)
			if err != nil {
				return fmt.Errorf("%s by %s: %w", row.Verb, row.Way, err)
			}
			add(row, ring[write])
		}
	}
	return nil
}

// ringAlone is the rates of restores and stores (true) with checksums.
func (b *gpuBench) ringAlone(object int) (rates map[bool]float64, err error) {
	rates = map[bool]float64{}
	err = b.withRig(b.o.shape(object), gpuSetup{}, func(r *gpuRig) error {
		for _, write := range []bool{false, true} {
			row, err := b.rate(r, "others", "ring", write, true)
			if err != nil {
				return err
			}
			rates[write] = row.GBs
		}
		return nil
	})
	return rates, err
}

func (c *gpuCopies) measure(kind copyKind, write bool) (row gpuOther, err error) {
	row = gpuOther{Way: copiesName(kind), Verb: verb(write), ObjectBytes: c.image.shape.object,
		PerObject: kind != copyPlain, Note: "no drive"}
	if err := c.prepare(write); err != nil {
		return row, err
	}
	c.calls = 0
	run := func(more func() bool) error { return c.stream(kind, write, more) }
	if err := c.b.measureOther(&row, c.moved.Load, &c.calls, run); err != nil {
		return row, err
	}
	err = c.check(kind)
	row.Verified = err == nil
	return row, err
}

// measureOther runs a way on this thread some times for a while and fills the row's figures in.
func (b *gpuBench) measureOther(row *gpuOther, moved func() uint64, calls *time.Duration,
	run func(more func() bool) error) error {
	var rates []float64
	clock := threadClock()
	start, cpu, spent := moved(), cpuTime(clock), *calls
	for range b.o.scale.rounds {
		if err := b.ctx.Err(); err != nil {
			return err
		}
		begin, before := time.Now(), moved()
		if err := run(lasting(begin, b.o.scale.period/2)); err != nil {
			return err
		}
		rates = append(rates, float64(moved()-before)/time.Since(begin).Seconds()/1e9)
	}
	pieces := float64(moved()-start) / (16 << 20)
	row.GBs = median(rates)
	row.CPUMicros = (cpuTime(clock) - cpu).Seconds() * 1e6 / pieces
	row.CallMicros = (*calls - spent).Seconds() * 1e6 / pieces
	return nil
}

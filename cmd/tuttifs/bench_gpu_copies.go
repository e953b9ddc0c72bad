package main

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/cuda"
)

// copyKind is a way of the copy engine from the host's memory to the pool. All of them begin where the bytes are in
// pinned memory already: reading them from drives comes on top.
type copyKind string

const (
	copyPerObject copyKind = "a copy for each object"
	copyBatch     copyKind = "cuMemcpyBatchAsync"
	copyPlain     copyKind = "one plain large copy"
)

var copyKinds = []copyKind{copyPerObject, copyBatch, copyPlain}

// gpuCopies is a layer of objects in pinned memory and its places in a pool, each in one piece.
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
	calls  time.Duration // spent in calls, of the last stream
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
	object := image.m.Layout().LayerObjects(0, 0)[0]
	parallel(shape.slots, func(i int) { copy(c.host.Bytes[i*shape.object:], image.object(i, object)) })
	for i := range shape.slots {
		c.to = append(c.to, c.pool+cuda.Pointer(int(image.blocks[i])*shape.object))
		c.from = append(c.from, c.host.GPU+cuda.Pointer(i*shape.object))
		c.sizes = append(c.sizes, uint64(shape.object))
	}
	return f(c)
}

// stream copies the layer again and again until more says no, in the context that is bound.
func (c *gpuCopies) stream(kind copyKind, more func() bool) (err error) {
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
	c.calls = 0
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
		if err := c.enqueue(s, kind, at, end); err != nil {
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
func (c *gpuCopies) enqueue(s *cuda.Stream, kind copyKind, at, end int) error {
	n := uint64(c.image.shape.object)
	switch kind {
	case copyBatch:
		return s.CopyBatch(c.to[at:end], c.from[at:end], c.sizes[at:end])
	case copyPlain:
		offset := at * int(n)
		return s.CopyHtoD(c.pool+cuda.Pointer(offset), unsafe.Pointer(&c.host.Bytes[offset]), uint64(end-at)*n)
	}
	for i := at; i < end; i++ {
		if err := s.CopyHtoD(c.to[i], unsafe.Pointer(&c.host.Bytes[i*int(n)]), n); err != nil {
			return err
		}
	}
	return nil
}

func (c *gpuCopies) poison() error {
	return c.b.gpu.set(c.pool, 0xa5, uint64(c.image.shape.layerBytes()))
}

// check compares the pool with the drives. A plain copy has scattered nothing, so it is compared with the host's.
func (c *gpuCopies) check(kind copyKind) error {
	memory := c.b.scratch.Bytes[:c.image.shape.layerBytes()]
	if err := c.b.gpu.read(memory, c.pool); err != nil {
		return err
	}
	if kind != copyPlain {
		return c.image.compare(0, memory, c.image.shape.runAt)
	}
	object := c.image.m.Layout().LayerObjects(0, 0)[0]
	for i := range c.image.shape.slots {
		n := c.image.shape.object
		if string(memory[i*n:(i+1)*n]) != string(c.image.object(i, object)) {
			return fmt.Errorf("%w: slot %d by %s", errGPUBytes, i, kind)
		}
	}
	return nil
}

// copyWay is a kind of copies beside compute.
func (b *gpuBench) copyWay(c *gpuCopies, kind copyKind) *gpuWay {
	return &gpuWay{
		name: "copy engine, " + string(kind), verb: verb(false), prepare: c.poison,
		start: func() (*gpuTraffic, error) {
			return b.begin(c.moved.Load, func(more func() bool) error { return c.stream(kind, more) })
		},
		check: func() error { return c.check(kind) },
	}
}

// gpuOther is a way that is not tuttifs', and the ring beside it.
type gpuOther struct {
	Way         string  `json:"way"`
	ObjectBytes int     `json:"object_bytes"`
	GBs         float64 `json:"gb_per_second"`
	CPUMicros   float64 `json:"cpu_us_per_16_mib,omitempty"` // of the thread that enqueues
	PerObject   bool    `json:"per_object"`
	Ring        float64 `json:"ring_gb_per_second"`
	Note        string  `json:"note,omitempty"`
	Verified    bool    `json:"verified"`
}

// others measures the same bytes by other ways.
func (b *gpuBench) others() error {
	ahead := true
	for _, object := range b.o.scale.objects {
		ring, err := b.ringAlone(object)
		if err != nil {
			return err
		}
		err = b.withCopies(b.o.shape(object), func(c *gpuCopies) error {
			for _, kind := range copyKinds {
				row, err := c.measure(kind)
				if err != nil {
					return fmt.Errorf("%s: %w", kind, err)
				}
				row.Ring = ring
				ahead = ahead && (!row.PerObject || ring > row.GBs)
				b.report.Others = append(b.report.Others, row)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	ring := b.report.Others[0].Ring
	row, err := b.cuFile(gpuObjects[0])
	switch {
	case errors.Is(err, errGPUBytes) || b.ctx.Err() != nil:
		return err
	case err != nil:
		b.report.note("cuFile was left out: %v", err)
	default:
		row.Ring = ring
		ahead = ahead && ring > row.GBs
		b.report.Others = append(b.report.Others, row)
	}
	b.report.Bars = append(b.report.Bars, gpuBar{Name: "ahead of every way per object", Met: ahead})
	return nil
}

// ringAlone is the rate of restores with checksums.
func (b *gpuBench) ringAlone(object int) (rate float64, err error) {
	err = b.withRig(b.o.shape(object), gpuSetup{}, func(r *gpuRig) error {
		row, err := b.rate(r, "others", "ring", false, true)
		rate = row.GBs
		return err
	})
	return rate, err
}

func (c *gpuCopies) measure(kind copyKind) (row gpuOther, err error) {
	row = gpuOther{Way: "copy engine, " + string(kind), ObjectBytes: c.image.shape.object, PerObject: kind != copyPlain,
		Note: "from pinned memory, drives not counted"}
	if err := c.poison(); err != nil {
		return row, err
	}
	var rates, micros []float64
	for range c.b.o.scale.rounds {
		begin, before := time.Now(), c.moved.Load()
		if err := c.stream(kind, lasting(begin, c.b.o.scale.period/2)); err != nil {
			return row, err
		}
		n := float64(c.moved.Load() - before)
		rates = append(rates, n/time.Since(begin).Seconds()/1e9)
		micros = append(micros, c.calls.Seconds()*1e6/(n/(16<<20)))
	}
	row.GBs, row.CPUMicros = median(rates), median(micros)
	err = c.check(kind)
	row.Verified = err == nil
	return row, err
}

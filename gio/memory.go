package gio

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// A descriptor is a registered region and a byte offset in it: [63:56] the region's generation, so that a descriptor
// of memory that was given back is refused and not followed; [55:44] the region; [43:0] the offset.
const (
	offsetBits = 44
	regionBits = 12
	// RegionsMax is how many regions a ring has at a time.
	RegionsMax = 1<<regionBits - 1
)

// Memory is a registered range: Desc(offset) is the descriptor for a byte offset within it.
type Memory struct {
	buf    []byte
	base   uint64 // I/O address of buf[0]; 0 when it is reached through bounce cells only
	id     uint64 // the descriptor of offset 0
	direct bool
	padded bool
	users  atomic.Int32 // batches in flight that name it
	device deviceRange  // on a GPU
}

// Desc is the descriptor of the byte at off. Descriptors need no tables: they are valid as long as the registration.
func (m *Memory) Desc(off int) uint64 { return m.id | uint64(off)&(1<<offsetBits-1) }

// Direct says whether controllers reach the memory itself.
func (m *Memory) Direct() bool { return m.direct }

// at is the n bytes at a descriptor's offset, nil when they are not inside.
func (m *Memory) at(desc uint64, n uint32) []byte {
	off := desc & (1<<offsetBits - 1)
	if off > uint64(len(m.buf)) || uint64(n) > uint64(len(m.buf))-off {
		return nil
	}
	return m.buf[off : off+uint64(n) : off+uint64(n)]
}

// Register makes buf usable in IOCTXs. Inside the DMA memory it is reached directly where an object's bytes fill
// whole 4-KiB units, elsewhere through bounce cells. The caller keeps buf alive until Unregister gives everything
// back.
func (r *Ring) Register(buf []byte) (*Memory, error) { return r.register(buf, false) }

// RegisterPadded registers DMA memory in which every object has room for whole 4-KiB units, so that objects of odd
// lengths are reached directly too: a read overwrites, and a write stores, up to 4,095 bytes behind the payload.
func (r *Ring) RegisterPadded(buf []byte) (*Memory, error) { return r.register(buf, true) }

func (r *Ring) register(buf []byte, padded bool) (*Memory, error) {
	m, err := r.newMemory(buf, padded)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, ErrClosed
	}
	if err := r.regions.add(m); err != nil {
		return nil, err
	}
	return m, nil
}

// newMemory is host memory that is not in the table yet.
func (b *base) newMemory(buf []byte, padded bool) (*Memory, error) {
	if len(buf) == 0 || uint64(len(buf)) >= 1<<offsetBits {
		return nil, fmt.Errorf("%w: cannot register %d bytes", ErrInvalid, len(buf))
	}
	m := &Memory{buf: buf, padded: padded}
	if off, ok := within(b.config.DMA, buf); ok {
		m.direct, m.base = true, b.config.DMABase+uint64(off)
	} else if padded {
		return nil, fmt.Errorf("%w: padded memory must lie in the DMA memory", ErrInvalid)
	} else if b.config.BounceBytes == 0 {
		return nil, fmt.Errorf("%w: outside the DMA memory, and the ring has no bounce cells", ErrMemory)
	}
	return m, nil
}

// Unregister gives the region back; its descriptors are refused from then on. ErrBusy while a batch uses it.
func (r *Ring) Unregister(m *Memory) error { return r.regions.remove(m) }

// regionTable is the registered memory of one executor.
type regionTable struct {
	mu     sync.Mutex // serializes changes
	places [RegionsMax + 1]region
	last   uint64
}

// region is one place of the table.
type region struct {
	memory     atomic.Pointer[Memory]
	generation uint8
}

func regionOf(desc uint64) uint64 { return desc >> offsetBits & (1<<regionBits - 1) }

// add gives m a place and its descriptors.
func (t *regionTable) add(m *Memory) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for range RegionsMax {
		t.last = t.last%RegionsMax + 1
		place := &t.places[t.last]
		if place.memory.Load() == nil {
			place.generation++
			m.id = uint64(place.generation)<<(offsetBits+regionBits) | t.last<<offsetBits
			place.memory.Store(m)
			return nil
		}
	}
	return fmt.Errorf("%w: %d regions are registered, that is the most", ErrMemory, RegionsMax)
}

func (t *regionTable) remove(m *Memory) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	place := &t.places[regionOf(m.id)]
	if place.memory.Load() != m {
		return fmt.Errorf("%w: not registered with this ring", ErrMemory)
	}
	if m.users.Load() != 0 {
		return ErrBusy
	}
	place.memory.Store(nil)
	return nil
}

// lookup finds a descriptor's memory, nil when it is not registered (any more).
func (t *regionTable) lookup(desc uint64) *Memory {
	m := t.places[regionOf(desc)].memory.Load()
	if m == nil || m.id>>offsetBits != desc>>offsetBits {
		return nil
	}
	return m
}

// hold keeps the memory of a batch registered until letGo. Descriptors of no memory are left for their chunks to
// report.
func (t *regionTable) hold(ctxs []IOCTX) (held []*Memory) {
	last := ^uint64(0)
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range ctxs {
		id := ctxs[i].Desc >> offsetBits
		if id == last {
			continue
		}
		last = id
		m := t.lookup(ctxs[i].Desc)
		if m == nil || slices.Contains(held, m) {
			continue
		}
		m.users.Add(1)
		held = append(held, m)
	}
	return held
}

func letGo(held []*Memory) {
	for _, m := range held {
		m.users.Add(-1)
	}
}

// within says at which offset inner lies in outer.
func within(outer, inner []byte) (int, bool) {
	if len(outer) == 0 || len(inner) == 0 {
		return 0, false
	}
	o, i := uintptr(unsafe.Pointer(&outer[0])), uintptr(unsafe.Pointer(&inner[0]))
	if i < o || i-o > uintptr(len(outer)) || uintptr(len(inner)) > uintptr(len(outer))-(i-o) {
		return 0, false
	}
	return int(i - o), true
}

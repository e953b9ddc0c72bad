package fs

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"tuttifs/stripe"
)

// Bounds of the memory of readers, for the whole mount: buffers take at most flightBytesMax and keepBytesMax together.
const (
	// flightBytesMax bounds the objects of the reads in flight, from their start until the kernel has the bytes.
	// Beyond it reads wait for each other.
	flightBytesMax = 256 << 20
	// keepBytesMax bounds what is kept for a reader's next request: while more than that is in use, a read that is done
	// keeps nothing.
	keepBytesMax = 128 << 20
	// aheadBytesMax bounds reading ahead: while more than that is in use, readers are served without.
	aheadBytesMax = 64 << 20
)

// objectBuffers hands out buffers for one object each. Sizes are powers of two of at least a unit, which makes them
// page-aligned in practice, as direct I/O likes them. Idle buffers are left to the garbage collector.
type objectBuffers struct {
	classes [bufferClasses]sync.Pool
	inUse   atomic.Int64
}

const (
	bufferShift   = 12 // log2 of stripe.UnitBytes
	bufferClasses = 10 // up to stripe.MaxObjectBytes
)

var _ [stripe.MaxObjectBytes]struct{} = [1 << (bufferShift + bufferClasses - 1)]struct{}{}

func bufferClass(n int) int { return max(bits.Len(uint(n-1))-bufferShift, 0) }

// bufferBytes is the memory that a buffer of n bytes takes.
func bufferBytes(n int) int64 { return 1 << (bufferShift + bufferClass(n)) }

// get returns n bytes (1..stripe.MaxObjectBytes) with whole units of capacity; their content is anything. With must
// false it returns nil rather than exceed the bound.
func (b *objectBuffers) get(n int, must bool) []byte {
	class := bufferClass(n)
	size := bufferBytes(n)
	if b.inUse.Add(size) > aheadBytesMax && !must {
		b.inUse.Add(-size)
		return nil
	}
	if p, ok := b.classes[class].Get().(*[]byte); ok {
		return (*p)[:n]
	}
	return make([]byte, n, size)
}

func (b *objectBuffers) put(buf []byte) {
	buf = buf[:cap(buf)]
	b.inUse.Add(-int64(len(buf)))
	b.classes[bufferClass(len(buf))].Put(&buf)
}

// readBudget shares out flightBytesMax among the reads in flight: in their order, so that a large one is not overtaken
// for ever. A read that is alone has what it asks for, so one can always go on; and no read that holds a share waits
// for another share.
type readBudget struct {
	max int64 // flightBytesMax

	mu    sync.Mutex
	used  int64
	queue []*budgetWait // the longest waiting first
}

type budgetWait struct {
	n       int64
	granted chan struct{} // closed, under mu, when the share is given
}

// take waits for a share of n bytes: false when cancel was closed first, and then there is nothing to give back.
func (b *readBudget) take(n int64, cancel <-chan struct{}) bool {
	b.mu.Lock()
	if len(b.queue) == 0 && b.fits(n) {
		b.used += n
		b.mu.Unlock()
		return true
	}
	w := &budgetWait{n, make(chan struct{})}
	b.queue = append(b.queue, w)
	b.mu.Unlock()
	select {
	case <-w.granted:
		return true
	case <-cancel:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.queue, w); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
	} else {
		b.used -= n // granted meanwhile
	}
	b.admit() // those behind may be smaller
	return false
}

// give returns a share.
func (b *readBudget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	b.admit()
}

// fits says whether a share of n bytes is there. b.mu is held.
func (b *readBudget) fits(n int64) bool { return b.used == 0 || b.used+n <= b.max }

// admit gives shares to those that wait, as far as they reach. b.mu is held.
func (b *readBudget) admit() {
	n := 0
	for ; n < len(b.queue) && b.fits(b.queue[n].n); n++ {
		b.used += b.queue[n].n
		close(b.queue[n].granted)
	}
	b.queue = slices.Delete(b.queue, 0, n)
}

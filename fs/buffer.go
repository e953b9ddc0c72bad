package fs

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"tuttifs/stripe"
)

// readBytesMax bounds the buffers that hold objects read ahead of their readers, for the whole mount. Beyond it readers
// are served without reading ahead.
const readBytesMax = 64 << 20

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

// get returns n bytes (1..stripe.MaxObjectBytes) with whole units of capacity; their content is anything. With must
// false it returns nil rather than exceed the bound.
func (b *objectBuffers) get(n int, must bool) []byte {
	class := bufferClass(n)
	size := int64(1) << (bufferShift + class)
	if b.inUse.Add(size) > readBytesMax && !must {
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

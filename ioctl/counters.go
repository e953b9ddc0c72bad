package ioctl

import (
	"sync/atomic"
	"unsafe"
)

// countersWords are the 64-bit words of the counters behind their version, which has a word of its own.
const countersWords = int(unsafe.Sizeof(EngineCounters{})/8) - 1

// countersOf are the words of counters in a session page: version first.
func countersOf(page []byte) *[countersWords + 1]uint64 {
	return (*[countersWords + 1]uint64)(unsafe.Pointer(&page[CountersOffset]))
}

// Publish stores the counters into the session page at the start of queue memory.
func (c *EngineCounters) Publish(queues []byte) {
	to, from := countersOf(queues[:SessionPageBytes]), (*[countersWords + 1]uint64)(unsafe.Pointer(c))
	for i := countersWords; i >= 0; i-- {
		atomic.StoreUint64(&to[i], from[i])
	}
}

// ReadCounters loads the counters of the session page at the start of queue memory; false: there are none, or of a
// version that is not known here. They are what a process says of itself.
func ReadCounters(queues []byte) (c EngineCounters, ok bool) {
	from, to := countersOf(queues[:SessionPageBytes]), (*[countersWords + 1]uint64)(unsafe.Pointer(&c))
	for i := range from {
		to[i] = atomic.LoadUint64(&from[i])
	}
	if c.Version != EngineCountersVersion || c.Reserved != 0 {
		return EngineCounters{}, false
	}
	return c, true
}

// Add adds what another process of the session says. Ages are the greatest.
func (c *EngineCounters) Add(o *EngineCounters) {
	age, oldest := max(c.BacklogAgeNanos, o.BacklogAgeNanos), max(c.OldestAgeNanos, o.OldestAgeNanos)
	to, from := (*[countersWords + 1]uint64)(unsafe.Pointer(c)), (*[countersWords + 1]uint64)(unsafe.Pointer(o))
	for i := 1; i <= countersWords; i++ {
		to[i] += from[i]
	}
	c.BacklogAgeNanos, c.OldestAgeNanos = age, oldest
}

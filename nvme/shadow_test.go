package nvme

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Of all values and events, the register is written exactly when the way from the old to the new value goes past the
// event; a queue wraps before 16 bits do, and so does the difference.
func TestShadowAdvance(t *testing.T) {
	const entries = 7
	for old := range uint32(entries) {
		for value := range uint32(entries) {
			for event := range uint32(entries) {
				doorbell, at := old, event
				s := Shadow{&doorbell, &at}
				passed := false // stepping from old to value without a wrap at the queue's end, as 16-bit numbers do
				for v := uint16(old); v != uint16(value); v++ {
					passed = passed || v == uint16(event)
				}
				require.Equal(t, passed, s.Advance(value), "%d to %d, event %d", old, value, event)
				require.Equal(t, value, doorbell)
				require.Equal(t, event, at)
			}
		}
	}
	require.False(t, Shadow{}.Set())
}

// A controller that sleeps whenever it has said for what it is to be woken misses nothing, and is told less often than
// there are values.
func TestShadowWakes(t *testing.T) {
	const entries, values = 64, 20_000
	var doorbell, event, rung uint32
	s := Shadow{&doorbell, &event}
	wake, done := make(chan struct{}, values), make(chan uint32)
	go func() {
		seen, n := uint32(0), uint32(0)
		for n < values {
			at := atomic.LoadUint32(&doorbell)
			n += (at + entries - seen) % entries
			seen = at
			atomic.StoreUint32(&event, seen)
			if atomic.LoadUint32(&doorbell) != seen {
				continue
			}
			if n < values {
				<-wake
			}
		}
		done <- n
	}()
	deadline := time.After(30 * time.Second)
	for v := uint32(1); v <= values; v++ {
		for (v+entries-atomic.LoadUint32(&event))%entries >= entries-1 { // the queue is full
			select {
			case <-deadline:
				t.Fatal("the controller sleeps over a full queue")
			default:
			}
		}
		if s.Advance(v % entries) {
			rung++
			wake <- struct{}{}
		}
	}
	select {
	case n := <-done:
		require.EqualValues(t, values, n)
	case <-deadline:
		t.Fatal("the controller sleeps over the last value")
	}
	require.LessOrEqual(t, rung, uint32(values))
}

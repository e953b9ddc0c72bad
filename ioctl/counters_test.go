package ioctl

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// queueMemory is as aligned as a mapping.
func queueMemory() []byte {
	words := make([]uint64, SessionPageBytes/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), SessionPageBytes)
}

// TestCounters: what is published is read, and nothing else of the page is touched.
func TestCounters(t *testing.T) {
	require.LessOrEqual(t, CountersOffset+int(unsafe.Sizeof(EngineCounters{})), SessionPageBytes)
	require.Greater(t, CountersOffset, TicketWord)
	page := queueMemory()
	_, ok := ReadCounters(page)
	require.False(t, ok, "nothing was written")
	c := EngineCounters{Version: EngineCountersVersion, Passes: 1, StoreBlockedNanos: 1 << 60, BacklogAgeNanos: 7}
	c.Publish(page)
	got, ok := ReadCounters(page)
	require.True(t, ok)
	require.Equal(t, c, got)
	clear(page[CountersOffset:][:unsafe.Sizeof(c)])
	require.Equal(t, queueMemory(), page)

	sum := got
	sum.Add(&EngineCounters{Version: 9, Passes: 2, BacklogAgeNanos: 5, OldestAgeNanos: 8})
	require.Equal(t, EngineCounters{Version: EngineCountersVersion, Passes: 3, StoreBlockedNanos: 1 << 60,
		BacklogAgeNanos: 7, OldestAgeNanos: 8}, sum)
}

// TestCountersAreOnlyNumbers: whatever a process leaves in its page is read, or is of no known version.
func TestCountersAreOnlyNumbers(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	page := queueMemory()
	sum := EngineCounters{Version: EngineCountersVersion}
	for i := range 1000 {
		for j := CountersOffset; j < SessionPageBytes; j++ {
			page[j] = byte(random.Uint32())
		}
		if i%2 == 0 {
			clear(page[CountersOffset : CountersOffset+8])
			page[CountersOffset] = EngineCountersVersion
		}
		c, ok := ReadCounters(page)
		require.Equal(t, i%2 == 0, ok)
		sum.Add(&c)
	}
	require.EqualValues(t, EngineCountersVersion, sum.Version)
}

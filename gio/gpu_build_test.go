package gio

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// assigner is an I/O thread with idle lanes, which builds nothing.
func assigner(lanes int) *ioThread {
	g := &GPU{depth: 1024}
	for i := range lanes {
		l := &gpuLane{g: g, number: i}
		l.queues = []laneQueue{{mask: 1023}}
		l.built = make([]uint32, 1)
		g.lanes = append(g.lanes, l)
	}
	g.alive.Store(int32(lanes))
	th := &g.thread
	th.g, th.open, th.load = g, make([]bool, lanes), make([]uint64, lanes)
	return th
}

// batchOf is a batch of reads in chunks of so many MiB, with a command for every 256 KiB.
func batchOf(g *GPU, chunks int, mib uint64) *gpuTicket {
	t := &gpuTicket{g: g, memory: batchMemory{chunks: make([]cuda.KernelChunk, chunks)}}
	for i := range chunks {
		t.chunks = append(t.chunks, gpuChunk{t: t, index: i, count: uint32(4 * mib), payload: mib << 20})
	}
	t.ready, t.limit = chunks, chunks
	return t
}

// assignAll gives out what lanes take of a batch, as one build.
func (th *ioThread) assignAll(t *gpuTicket) {
	if !th.survey(t) {
		return
	}
	for t.next < t.ready && th.assign(&t.chunks[t.next]) {
		t.next++
	}
	for i := range th.g.lanes {
		th.g.lanes[i].building = th.g.lanes[i].unbuilt > 0
	}
}

// endBuilds ends the builds of all lanes.
func (th *ioThread) endBuilds() {
	for _, l := range th.g.lanes {
		l.building, l.built[0], l.unbuilt = false, l.built[0]+l.unbuilt, 0
	}
}

func loads(g *GPU) (n []uint64) {
	for _, l := range g.lanes {
		n = append(n, l.load()>>20)
	}
	return n
}

// TestGPUAssignSpreads: a batch that comes while a build has most lanes does not end on the few others.
func TestGPUAssignSpreads(t *testing.T) {
	for _, lanes := range []int{2, 8, 9} {
		for small := 1; small < lanes; small++ {
			th := assigner(lanes)
			first, second := batchOf(th.g, small, 1), batchOf(th.g, 3*lanes, 8)
			th.assignAll(first)
			require.Equal(t, small, first.next)
			for range 4 { // rounds while the first build lasts
				th.assignAll(second)
			}
			for _, n := range loads(th.g) {
				require.LessOrEqual(t, n, uint64(8+1), "%d of %d lanes had a build: %v", small, lanes, loads(th.g))
			}
			th.endBuilds()
			for second.next < second.ready {
				next := second.next
				th.assignAll(second)
				require.Greater(t, second.next, next, "%d of %d lanes: %v", small, lanes, loads(th.g))
				th.endBuilds()
			}
			least, most := uint64(1)<<40, uint64(0)
			for _, n := range loads(th.g) {
				least, most = min(least, n), max(most, n)
			}
			require.LessOrEqual(t, most-least, uint64(8), "%d of %d lanes: %v", small, lanes, loads(th.g))
		}
	}
}

// TestGPUAssignInTurns: chunks of one length go to lane after lane, from the one behind that which had the last.
func TestGPUAssignInTurns(t *testing.T) {
	th := assigner(4)
	th.lane = 1
	b := batchOf(th.g, 6, 1)
	th.assignAll(b)
	var got []uint32
	for _, c := range b.memory.chunks {
		got = append(got, c.Lane)
	}
	require.Equal(t, []uint32{2, 3, 0, 1, 2, 3}, got)
}

// TestGPUAssignWritesAhead: writes have all lanes but one, and so many chunks ahead on each.
func TestGPUAssignWritesAhead(t *testing.T) {
	th := assigner(4)
	b := batchOf(th.g, 40, 1)
	b.write = true
	th.assignAll(b)
	th.endBuilds()
	th.assignAll(b)
	var ahead []int
	for _, l := range th.g.lanes {
		if n := len(l.ahead); n > 0 {
			ahead = append(ahead, n)
		}
	}
	require.Equal(t, []int{writeAhead, writeAhead, writeAhead}, ahead)
}

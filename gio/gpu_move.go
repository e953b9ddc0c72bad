package gio

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
)

// staging is device memory between the copy engine and the kernels, in slots of one chunk each; chunks of reads that
// are short share one. Writes hold three quarters of them at most, so that those which drives hold back leave room for
// reads.
type staging struct {
	memory cuda.Pointer
	size   uint64
	bytes  int // the most bytes of cells of a chunk; 0: nothing is bounced
	slot   int // bytes of a slot: so many, or a piece of the store buffer's where that is more
	free   []int32
	slots  int
	writes int      // slots that writes hold
	chunks []uint16 // by slot: that it holds
	open   int32    // the slot in which there may be room behind a read's chunk, noSlot
	filled int      // of that one, bytes
}

// cellsMost bounds a chunk's cells: kernels count them in 32 bits.
const cellsMost = 1 << 31

func (s *staging) setUp(g *GPU) (err error) {
	cells := g.laneCells()
	if g.gpu.Polling { // kernels copy from cells themselves; a lane's are divided among its drives
		s.bytes = min(cells, cellsMost) / len(g.config.Lanes[0]) &^ (pageBytes - 1)
		return nil
	}
	most := g.gpu.StagingBytes / 2 &^ (pageBytes - 1)
	s.bytes = min(cells, most, cellsMost)
	s.slot = s.bytes
	if g.store != nil {
		s.slot = max(s.slot, min(g.store.piece, most))
	}
	if s.slot == 0 {
		return nil
	}
	s.slots = g.gpu.StagingBytes / s.slot
	s.size = uint64(s.slots) * uint64(s.slot)
	s.chunks, s.open = make([]uint16, s.slots), noSlot
	s.free = make([]int32, s.slots)
	for i := range s.free {
		s.free[i] = int32(s.slots - 1 - i)
	}
	s.memory, err = g.allocate(s.size)
	return err
}

func (s *staging) close(g *GPU) {
	if s.memory != 0 {
		g.free(s.memory, s.size)
	}
}

// address is where the cells of a chunk are that has a place.
func (s *staging) address(c *gpuChunk) uint64 {
	return uint64(s.memory) + uint64(c.slot)*uint64(s.slot) + uint64(c.at)
}

// room is how many slots a direction may take.
func (s *staging) room(write bool) int {
	if write {
		return min(len(s.free), s.slots*3/4-s.writes)
	}
	return len(s.free)
}

// take gives a chunk a slot, of which there is one for its direction.
func (s *staging) take(c *gpuChunk) {
	c.slot, c.at = s.free[len(s.free)-1], 0
	s.free = s.free[:len(s.free)-1]
	s.chunks[c.slot] = 1
	if c.t.write {
		s.writes++
		return
	}
	s.open, s.filled = c.slot, int(c.bytes)
}

// takeRead gives a read's chunk a place: behind the last one, or a slot. It is false if there is neither.
func (s *staging) takeRead(c *gpuChunk) bool {
	switch {
	case s.open != noSlot && s.filled+int(c.bytes) <= s.slot:
		c.slot, c.at = s.open, uint32(s.filled)
		s.chunks[c.slot]++
		s.filled += int(c.bytes)
	case s.room(false) > 0:
		s.take(c)
	default:
		return false
	}
	return true
}

// giveSlot gives a chunk's place back.
func (g *GPU) giveSlot(c *gpuChunk) {
	if c.slot == noSlot {
		return
	}
	s := &g.staging
	if s.chunks[c.slot]--; s.chunks[c.slot] == 0 {
		s.free = append(s.free, c.slot)
		if s.open == c.slot {
			s.open = noSlot
		}
	}
	if c.t.write {
		s.writes--
	}
	c.slot = noSlot
}

// mover feeds the copy engine in one direction, a few pieces at a time: what is enqueued ahead keeps the engine's own
// small copies waiting.
type mover struct {
	g      *GPU
	stream *cuda.Stream
	in     bool        // to the device
	queue  []*gpuChunk // that are to be moved, in order
	offset uint32      // what of the first one is enqueued
	pieces []piece     // ring
	head   int
	count  int
	hungry bool // the first chunk wants a slot and there is none

	// done counts the pieces that are copied: the copy engine writes it, to pinned memory. Asking the driver about an
	// event costs as much as enqueuing a copy.
	done    *uint32
	doneGPU uint64
	issued  uint32

	end  int64 // when the newest piece will have ended
	pace int64 // nanoseconds that a MiB takes when nothing holds it up
}

// piece is one copy that is under way.
type piece struct {
	nth   uint32 // done counts to here when it is copied
	chunk *gpuChunk
	last  bool
	since int64
	begin int64 // when the copy engine will have come to it
	end   int64 // and when it will be done with it
	late  bool  // it was not
	bytes uint32
}

const (
	never = int64(math.MaxInt64)
	// paceFirst is what is taken for the pace before any was seen: 50 GB/s.
	paceFirst = 20_000
	// paceRange is how far from that the pace may go. Small pieces, which take their time whatever their size, would
	// drive it up without end.
	paceRange = 8
	// To expect a piece's end too late leaves the copy engine at rest, too early costs a look: so the pace is corrected
	// the faster in that direction. Both are fractions.
	paceFaster = 32
	paceSlower = 256
	// leadNanos is how long before the end of a piece the next one is enqueued: about what a nap may last too long.
	leadNanos = 20_000
	// lagNanos is how long after a piece should have ended it is looked for: a look too early costs another one.
	lagNanos = 5_000
)

// due is when to look again: when the newest piece is about to end and may have a successor, or else when it has ended.
// While no chunk waits for the copy engine, or the drives have little to do, it is them that are waited for, and the
// first piece's lane is to go back to them as soon as that piece has ended.
func (m *mover) due(now int64, idle bool) int64 {
	if m.count == 0 {
		return never
	}
	if first := m.pieces[m.head].end + lagNanos; (idle || len(m.queue) == 0) && now < first {
		return first
	}
	if len(m.pieces) > 1 && now < m.end-leadNanos {
		return m.end - leadNanos
	}
	return m.end + lagNanos
}

// ready says whether it is time to enqueue pieces. Those that are enqueued sooner than they must be keep the engine's
// own small copies waiting for nothing.
func (m *mover) ready(now int64) bool { return m.count == 0 || now >= m.end-leadNanos }

// note corrects what is known of the copy engine's pace: when pieces were found to have ended before they were to, or
// not to have ended when they were.
func (m *mover) note(p *piece, done bool, now int64) {
	switch {
	case !done && now > p.end:
		late := now - p.end
		m.end += late
		for i := range m.pieces {
			m.pieces[i].end += late
		}
		if !p.late { // all looks at one piece say once how wrong the pace is
			p.late = true
			m.pace = min(m.pace+m.pace/paceSlower, paceFirst*paceRange)
		}
	case done && m.count == 1 && now < m.end:
		m.end = now
		m.pace = max(m.pace-m.pace/paceFaster, paceFirst/paceRange)
	case done && m.count == 1 && len(m.queue) > 0 && !m.hungry:
		m.pace = max(m.pace-m.pace/paceFaster, paceFirst/paceRange) // the copy engine has come to rest
	}
}

func (m *mover) setUp(g *GPU, s *cuda.Stream, in bool) {
	m.g, m.stream, m.in, m.pace = g, s, in, paceFirst
	m.queue = make([]*gpuChunk, 0, len(g.config.Lanes)+g.staging.slots)
	m.pieces = make([]piece, g.gpu.Moves)
}

func (m *mover) add(c *gpuChunk) { m.queue = append(m.queue, c) }

// pop takes the first chunk out.
func (m *mover) pop() {
	m.queue = append(m.queue[:0], m.queue[1:]...)
	m.offset = 0
}

// cancel takes a chunk out, whatever of it is enqueued already.
func (m *mover) cancel(c *gpuChunk) {
	for i, x := range m.queue {
		if x == c {
			if i == 0 {
				m.offset = 0
			}
			m.queue = append(m.queue[:i], m.queue[i+1:]...)
			return
		}
	}
}

// hasten has poll look for pieces now.
func (m *mover) hasten(now int64) {
	for i := range m.count {
		p := &m.pieces[(m.head+i)%len(m.pieces)]
		p.end = min(p.end, now)
	}
}

// poll takes note of pieces that are done.
func (m *mover) poll(now int64) (moved bool, err error) {
	for m.count > 0 {
		p := &m.pieces[m.head]
		if now < p.end-leadNanos {
			return moved, nil // it cannot be done yet
		}
		done := int32(atomic.LoadUint32(m.done)-p.nth) >= 0
		m.note(p, done, now)
		if !done {
			if now-p.since > m.g.kernelBound() {
				return moved, fmt.Errorf("%w: a copy of %d bytes did not end", ErrStuck, m.g.gpu.MoveBytes)
			}
			return moved, nil
		}
		m.head = (m.head + 1) % len(m.pieces)
		m.count--
		moved = true
		c := p.chunk
		c.pieces--
		switch {
		case !p.last:
		case c.lane != nil:
			c.lane.moved(now)
		default:
			m.g.thread.evacuated(c, now)
		}
	}
	return moved, nil
}

// submit enqueues pieces, when it is time, as many as may be outstanding.
func (m *mover) submit(now int64) (moved bool, err error) {
	m.hungry = false
	for ready := m.ready(now); ready && len(m.queue) > 0 && m.count < len(m.pieces); {
		c := m.queue[0]
		// A write has had a slot since it was gathered.
		if c.slot == noSlot && !m.g.staging.takeRead(c) {
			m.hungry = true // until a harvest frees some
			return moved, nil
		}
		n := min(uint32(m.g.gpu.MoveBytes), c.bytes-m.offset)
		device := cuda.Pointer(m.g.staging.address(c) + uint64(m.offset))
		host := unsafe.Pointer(&m.g.cellsOf(c)[m.offset])
		if m.in {
			err = m.stream.CopyHtoD(device, host, uint64(n))
		} else {
			err = m.stream.CopyDtoH(host, device, uint64(n))
		}
		if err != nil {
			return moved, err
		}
		p := &m.pieces[(m.head+m.count)%len(m.pieces)]
		m.issued++
		if err := m.stream.WriteValue32(cuda.Pointer(m.doneGPU), m.issued); err != nil {
			return moved, err
		}
		p.nth = m.issued
		m.count++
		m.offset += n
		p.chunk, p.last, p.late, p.since, p.bytes = c, m.offset == c.bytes, false, now, n
		p.begin = now
		if m.count > 1 {
			p.begin = max(now, m.end)
		}
		p.end = p.begin + int64(n)*m.pace>>20
		m.end = p.end
		c.pieces++
		moved = true
		m.g.stats.moves.Add(1)
		if p.last {
			m.pop()
			if m.in {
				if err := m.g.thread.comes(c); err != nil {
					return moved, err
				}
			}
		}
	}
	return moved, nil
}

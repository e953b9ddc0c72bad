package gio

import (
	"fmt"
	"unsafe"

	"tuttifs/cuda"
)

// staging is device memory between the copy engine and the kernels, in slots of one chunk each. Writes hold half of
// them at most, so that those which drives hold back leave room for reads.
type staging struct {
	memory cuda.Pointer
	size   uint64
	bytes  int // of a slot, and the most bytes of cells of a chunk; 0: nothing is bounced
	free   []int32
	slots  int
	writes int // slots that writes hold
}

func (s *staging) setUp(g *GPU) (err error) {
	cells := g.laneCells()
	if cells == 0 {
		return nil
	}
	if g.gpu.Polling { // kernels copy from cells themselves; a lane's are divided among its drives
		s.bytes = cells / len(g.config.Lanes[0]) &^ (pageBytes - 1)
		return nil
	}
	s.bytes = min(cells, g.gpu.StagingBytes/2&^(pageBytes-1))
	s.slots = g.gpu.StagingBytes / s.bytes
	s.size = uint64(s.slots) * uint64(s.bytes)
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

func (s *staging) address(slot int32) uint64 {
	return uint64(s.memory) + uint64(slot)*uint64(s.bytes)
}

// room is how many slots a direction may take.
func (s *staging) room(write bool) int {
	if write {
		return min(len(s.free), s.slots/2-s.writes)
	}
	return len(s.free)
}

func (s *staging) take(write bool) int32 {
	slot := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	if write {
		s.writes++
	}
	return slot
}

// giveSlot frees a chunk's slot.
func (g *GPU) giveSlot(c *gpuChunk) {
	if c.slot == noSlot {
		return
	}
	g.staging.free = append(g.staging.free, c.slot)
	if c.t.write {
		g.staging.writes--
	}
	c.slot = noSlot
}

// mover feeds the copy engine in one direction, a few pieces at a time: what is enqueued ahead keeps the engine's own
// small copies waiting.
type mover struct {
	g      *GPU
	stream *cuda.Stream
	in     bool       // to the device
	queue  []*gpuLane // whose chunks are to be moved, in order
	offset uint32     // what of the first one's is enqueued
	pieces []piece    // ring
	head   int
	count  int
	undone int64 // when the piece at head was last seen not to be done, 0: not yet
	before int64 // the same of the piece before it
}

// piece is one copy that is under way.
type piece struct {
	event *cuda.Event
	lane  *gpuLane
	last  bool
	since int64
	least int64 // nanoseconds that it takes
}

// linkBytesPerMicrosecond is more than any link carries. A piece cannot be done earlier, and is not asked for: every
// question is a call of the driver.
const linkBytesPerMicrosecond = 64_000

func (m *mover) setUp(g *GPU, s *cuda.Stream, in bool) error {
	m.g, m.stream, m.in = g, s, in
	m.queue = make([]*gpuLane, 0, len(g.config.Lanes))
	m.pieces = make([]piece, g.gpu.Moves)
	for i := range m.pieces {
		var err error
		if m.pieces[i].event, err = g.gpu.Context.NewEvent(false); err != nil {
			return err
		}
	}
	return nil
}

func (m *mover) close() {
	for i := range m.pieces {
		if e := m.pieces[i].event; e != nil {
			_ = e.Close()
		}
	}
}

func (m *mover) add(l *gpuLane) { m.queue = append(m.queue, l) }

// pop takes the first lane out.
func (m *mover) pop() {
	m.queue = append(m.queue[:0], m.queue[1:]...)
	m.offset = 0
}

// cancel takes a lane out, whatever of its chunk is enqueued already.
func (m *mover) cancel(l *gpuLane) {
	for i, x := range m.queue {
		if x == l {
			if i == 0 {
				m.offset = 0
			}
			m.queue = append(m.queue[:i], m.queue[i+1:]...)
			return
		}
	}
}

// earliest is when the piece at head may be done: not before the time that it takes has passed since it was enqueued,
// and since the one before it was seen not to be done.
func (m *mover) earliest() int64 {
	p := &m.pieces[m.head]
	return max(p.since, m.before) + p.least
}

// poll takes note of pieces that are done.
func (m *mover) poll(now int64) (moved bool, err error) {
	for m.count > 0 {
		p := &m.pieces[m.head]
		if now < m.earliest() {
			return moved, nil
		}
		done, err := p.event.Query()
		if err != nil {
			return moved, err
		}
		if !done {
			m.undone = now
			if now-p.since > m.g.kernelBound() {
				return moved, fmt.Errorf("%w: a copy of %d bytes did not end", errStuck, m.g.gpu.MoveBytes)
			}
			return moved, nil
		}
		m.before, m.undone = m.undone, 0
		m.head = (m.head + 1) % len(m.pieces)
		m.count--
		moved = true
		p.lane.pieces--
		if p.last {
			p.lane.moved(now)
		}
	}
	return moved, nil
}

// submit enqueues pieces, as many as may be outstanding.
func (m *mover) submit(now int64) (moved bool, err error) {
	for m.count < len(m.pieces) && len(m.queue) > 0 {
		l := m.queue[0]
		c := l.active
		if c.slot == noSlot { // a read's; a write has had one since it was gathered
			if m.g.staging.room(false) == 0 {
				return moved, nil // a harvest frees some
			}
			c.slot = m.g.staging.take(false)
		}
		n := min(uint32(m.g.gpu.MoveBytes), c.bytes-m.offset)
		device := cuda.Pointer(m.g.staging.address(c.slot) + uint64(m.offset))
		host := unsafe.Pointer(&l.cells[m.offset])
		if m.in {
			err = m.stream.CopyHtoD(device, host, uint64(n))
		} else {
			err = m.stream.CopyDtoH(host, device, uint64(n))
		}
		if err != nil {
			return moved, err
		}
		p := &m.pieces[(m.head+m.count)%len(m.pieces)]
		if err := p.event.Record(m.stream); err != nil {
			return moved, err
		}
		m.count++
		m.offset += n
		p.lane, p.last, p.since = l, m.offset == c.bytes, now
		p.least = int64(n) * 1000 / linkBytesPerMicrosecond
		l.pieces++
		moved = true
		m.g.stats.moves.Add(1)
		if p.last {
			m.pop()
		}
	}
	return moved, nil
}

package gio

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/lifetime"
	"tuttifs/nvme"
	"tuttifs/stripe"
)

// hand completes commands by hand, entry by entry, on a ring of one lane with one queue.
type hand struct {
	t     testing.TB
	ring  *Ring
	queue Queue
	m     *Map
	mem   *Memory
	tail  uint32
	block []byte
	calls int // of Quiesce
}

func page(n int) []byte {
	b := make([]byte, n+pageBytes)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (pageBytes - 1))
	return b[skip : skip+n]
}

func newHand(t testing.TB, depth int) *hand { return newGatedHand(t, depth, nil) }

func newGatedHand(t testing.TB, depth int, gate Gate) *hand {
	h := &hand{t: t, block: page(nvme.QueueBytes(depth))}
	memory, err := nvme.MapQueue(h.block, depth)
	require.NoError(t, err)
	h.queue = Queue{Memory: memory, LBABytes: 4096, Gate: gate}
	h.ring, err = NewRing(RingConfig{
		Lanes: [][]Queue{{h.queue}}, DMA: page(1 << 20), DMABase: 1 << 30, Deadline: 50 * time.Millisecond,
		Quiesce: func(int) error { h.calls++; return nil },
		Reattach: func(int) ([]Queue, error) {
			clear(h.block)
			h.tail = 0
			return []Queue{h.queue}, nil
		},
	})
	require.NoError(t, err)
	object := stripe.Object{Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 4096}}}
	g := stripe.Geometry{Objects: []stripe.Object{object}}.WithTrailers()
	layout, err := stripe.NewLayout(g, 1)
	require.NoError(t, err)
	h.m, err = NewMap(layout, 1000*layout.SlotUnits(), []MapRow{{Drives: []uint16{0}, Units: []uint64{0}}}, 1)
	require.NoError(t, err)
	h.mem, err = h.ring.Register(h.ring.DMA()[:16*4096])
	require.NoError(t, err)
	return h
}

// issue reads n slots into targets that hold something.
func (h *hand) issue(n int) *ringTicket {
	h.t.Helper()
	ctxs := make([]IOCTX, n)
	for i := range ctxs {
		ctxs[i] = IOCTX{Desc: h.mem.Desc(i * 4096), Slot: uint32(i)}
	}
	for i := range n {
		h.mem.buf[i*4096] = 0xee
	}
	ticket, err := h.ring.issue(false, h.m, ctxs, noLayer)
	require.NoError(h.t, err)
	return ticket
}

// ids are the command ids of the n newest commands.
func (h *hand) ids(n int) []uint16 {
	tail := atomic.LoadUint32(h.queue.Memory.SQTail)
	var ids []uint16
	for i := range n {
		ids = append(ids, h.queue.Memory.SQ[(int(tail)-n+i)&(len(h.queue.Memory.SQ)-1)].CID)
	}
	return ids
}

// post writes the next completion entry.
func (h *hand) post(id, status uint16) {
	depth := uint32(len(h.queue.Memory.CQ))
	phase := ^(h.tail / depth) & 1
	e := &h.queue.Memory.CQ[h.tail%depth]
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&e.CID)), uint32(id)|(uint32(status)<<1|phase)<<16)
	h.tail++
}

func (h *hand) wait(ticket *ringTicket, want error, failed int) {
	h.t.Helper()
	results, err := h.ring.Wait(ticket)
	require.NoError(h.t, err)
	require.Len(h.t, results, failed)
	for _, r := range results {
		require.ErrorIs(h.t, r.Err, want)
		require.Equal(h.t, make([]byte, 4096), h.mem.buf[r.Index*4096:(r.Index+1)*4096])
	}
}

func TestLaneRunsRoundItsQueue(t *testing.T) {
	h := newHand(t, 8)
	for round := range 70_000 / 4 { // command ids wrap as well
		n := 1 + round%7
		ticket := h.issue(n)
		ids := h.ids(n)
		for i := range ids {
			h.post(ids[(i+round)%n], 0)
		}
		h.wait(ticket, nil, 0)
	}
	require.Zero(t, h.calls)
}

func TestLaneChecksStatusOfEachCommand(t *testing.T) {
	h := newHand(t, 8)
	ticket := h.issue(4)
	ids := h.ids(4)
	h.post(ids[3], 0)
	h.post(ids[1], uint16(nvme.LBAOutOfRange))
	h.post(ids[2], 0)
	h.post(ids[0], 0)
	results, err := h.ring.Wait(ticket)
	require.NoError(t, err)
	require.Len(t, results, 1)
	require.Equal(t, 1, results[0].Index)
	var status *StatusError
	require.True(t, errors.As(results[0].Err, &status))
	require.Equal(t, StatusError{Status: nvme.LBAOutOfRange, Slot: 1}, *status)
	require.ErrorIs(t, results[0].Err, nvme.LBAOutOfRange)
}

func TestLaneRefusesBrokenProtocol(t *testing.T) {
	for name, post := range map[string]func(h *hand, ids []uint16){
		"unknown id": func(h *hand, ids []uint16) { h.post(ids[0], 0); h.post(ids[2]+1, 0); h.post(ids[1], 0) },
		"id twice":   func(h *hand, ids []uint16) { h.post(ids[0], 0); h.post(ids[0], 0); h.post(ids[1], 0) },
		"one entry more": func(h *hand, ids []uint16) {
			h.post(ids[0], 0)
			h.post(ids[1], 0)
			h.post(ids[2], 0)
			h.post(ids[1], 0)
		},
		"late from before": func(h *hand, ids []uint16) { h.post(ids[0]-3, 0); h.post(ids[0], 0); h.post(ids[1], 0) },
		"entry left out":   func(h *hand, ids []uint16) { h.tail++; h.post(ids[0], 0); h.post(ids[1], 0) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, 16)
			ticket := h.issue(3)
			for _, id := range h.ids(3) {
				h.post(id, 0)
			}
			h.wait(ticket, nil, 0)
			ticket = h.issue(3)
			post(h, h.ids(3))
			h.wait(ticket, ErrProtocol, 3)
			require.Equal(t, 1, h.calls)

			ticket = h.issue(2)
			for _, id := range h.ids(2) {
				h.post(id, 0)
			}
			h.wait(ticket, nil, 0)
		})
	}
}

func TestLaneTimesOutWholeChunks(t *testing.T) {
	h := newHand(t, 8)
	ticket := h.issue(5)
	ids := h.ids(5)
	h.post(ids[0], 0)
	h.post(ids[4], 0)
	h.wait(ticket, ErrTimeout, 5)
	require.Equal(t, 1, h.calls)
	require.Equal(t, 1, h.ring.Alive())
	require.Zero(t, h.mem.users.Load(), "the batch let go of its memory")
}

// A batch that waits behind one that hangs has a deadline of its own.
func TestWaitIsBoundedBehindOthers(t *testing.T) {
	h := newHand(t, 8)
	first, second := h.issue(3), h.issue(2)
	results, err := h.ring.Wait(second)
	require.NoError(t, err)
	require.Len(t, results, 2)
	h.wait(first, ErrTimeout, 3)
}

func TestRingDiesWithItsLastLane(t *testing.T) {
	h := newHand(t, 8)
	h.ring.config.Reattach = nil
	first, second := h.issue(3), h.issue(2)
	h.wait(first, ErrTimeout, 3)
	results, err := h.ring.Wait(second)
	require.NoError(t, err)
	require.Len(t, results, 2)
	require.Zero(t, h.ring.Alive())
	_, err = h.ring.Issue(false, h.m, []IOCTX{{Desc: h.mem.Desc(0)}})
	require.ErrorIs(t, err, ErrDead)
}

func TestRingConfigIsChecked(t *testing.T) {
	h := newHand(t, 8)
	good := h.ring.config
	for name, spoil := range map[string]func(c *RingConfig){
		"no lanes":       func(c *RingConfig) { c.Lanes = nil },
		"uneven lanes":   func(c *RingConfig) { c.Lanes = [][]Queue{{h.queue}, {h.queue, h.queue}} },
		"LBA":            func(c *RingConfig) { q := h.queue; q.LBABytes = 520; c.Lanes = [][]Queue{{q}} },
		"drive order":    func(c *RingConfig) { q := h.queue; q.Drive = 1; c.Lanes = [][]Queue{{h.queue}, {q}} },
		"queue":          func(c *RingConfig) { c.Lanes = [][]Queue{{{LBABytes: 512}}} },
		"no DMA":         func(c *RingConfig) { c.DMA = nil },
		"unaligned DMA":  func(c *RingConfig) { c.DMA = c.DMA[8:] },
		"unaligned base": func(c *RingConfig) { c.DMABase = 8 },
		"bounce":         func(c *RingConfig) { c.BounceBytes = 1 << 30 },
		"negative":       func(c *RingConfig) { c.BounceBytes = -1 },
		"scratch":        func(c *RingConfig) { c.ScratchBytes = 1 << 30 },
		"wake alone":     func(c *RingConfig) { c.Wake = new(uint32) },
	} {
		c := good
		spoil(&c)
		_, err := NewRing(c)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

// FuzzCompletions lets a controller write anything into its completion queue: every IOCTX has one outcome, nothing
// hangs, and the lane serves an honest controller afterwards.
func FuzzCompletions(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 2, 0})
	f.Add([]byte{0, 0, 0, 0, 1, 0, 2, 0})
	f.Add([]byte{2, 0, 0x80, 6, 1, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		h := newHand(t, 8)
		h.ring.config.Deadline = time.Millisecond
		ticket := h.issue(3)
		first := h.ids(3)[0]
		for ; len(b) >= 2; b = b[2:] {
			if b[0] == 0xff {
				h.tail++ // an entry left out
				continue
			}
			h.post(first+uint16(b[0]), uint16(b[1]))
		}
		results, err := h.ring.Wait(ticket)
		require.NoError(t, err)
		seen := map[int]bool{}
		for _, r := range results {
			require.False(t, seen[r.Index], "one outcome an IOCTX")
			require.Less(t, r.Index, 3)
			seen[r.Index] = true
		}
		require.Zero(t, h.mem.users.Load())

		// Entries that were written for nobody may lie where the next chunk's are expected.
		for try := 0; ; try++ {
			require.Less(t, try, 3)
			ticket = h.issue(2)
			for _, id := range h.ids(2) {
				h.post(id, 0)
			}
			if results, err = h.ring.Wait(ticket); len(results) == 0 && err == nil {
				break
			}
			require.NoError(t, err)
			if !errors.Is(results[0].Err, ErrProtocol) {
				require.ErrorIs(t, results[0].Err, ErrTimeout)
			}
		}
	})
}

// Writes carry the directive of what is expected of their slot, and reads none.
func TestLaneDirectives(t *testing.T) {
	h := newHand(t, 8)
	var lives Lifetimes
	h.m.SetLifetimes(&lives)
	lives.Set(1, lifetime.Long)
	lives.Set(2, lifetime.Short)
	send := func(write bool) (directives [][2]uint16) {
		ctxs := make([]IOCTX, 3)
		for i := range ctxs {
			ctxs[i] = IOCTX{Desc: h.mem.Desc(i * 4096), Slot: uint32(i)}
		}
		ticket, err := h.ring.issue(write, h.m, ctxs, noLayer)
		require.NoError(t, err)
		tail := int(atomic.LoadUint32(h.queue.Memory.SQTail))
		for i := range ctxs {
			e := &h.queue.Memory.SQ[(tail-len(ctxs)+i)&7]
			kind, specific := e.Directive()
			directives = append(directives, [2]uint16{uint16(kind), specific})
			h.post(e.CID, 0)
		}
		h.wait(ticket, nil, 0)
		return directives
	}
	none := [][2]uint16{{}, {}, {}}
	require.Equal(t, none, send(true), "the drive has none")
	h.ring.lanes[0].queues[0].directive = Directive{Type: 2, Specific: [lifetime.Classes]uint16{5, 6, 7, 8}}
	require.Equal(t, [][2]uint16{{2, 5}, {2, 8}, {2, 7}}, send(true))
	require.Equal(t, none, send(false))
}

// handGate is opened by hand. It counts parts of chunks.
type handGate struct{ open, wanted, flight, ended atomic.Int64 }

func (g *handGate) Begin(bool, uint64) bool {
	if g.open.Load() == 0 {
		return false
	}
	g.flight.Add(1)
	return true
}

func (g *handGate) End(_ bool, bytes, commands uint64) {
	g.flight.Add(-1)
	g.ended.Add(int64(commands))
}

func (g *handGate) Want(_ bool, n int) { g.wanted.Add(int64(n)) }
func (g *handGate) Fail(bool, uint64)  {}

// TestKeeper: a chunk begins when it may, and ends when its completions are in, though nobody waits for it.
func TestKeeper(t *testing.T) {
	g := &handGate{}
	h := newGatedHand(t, 16, g)
	h.ring.config.Deadline = time.Minute
	ticket := h.issue(3)
	require.EqualValues(t, 1, g.wanted.Load())
	require.Zero(t, atomic.LoadUint32(h.queue.Memory.SQTail), "held back")
	g.open.Store(1)
	require.Eventually(t, func() bool { return g.flight.Load() == 1 }, 10*time.Second, time.Millisecond)
	require.EqualValues(t, 3, atomic.LoadUint32(h.queue.Memory.SQTail))
	require.Zero(t, g.wanted.Load())
	for _, id := range h.ids(3) {
		h.post(id, 0)
	}
	require.Eventually(t, func() bool { return g.flight.Load() == 0 && ticket.Done() }, 10*time.Second, time.Millisecond)
	require.EqualValues(t, 3, g.ended.Load())
	g.open.Store(0)
	h.issue(2)
	require.EqualValues(t, 1, g.wanted.Load())
	require.NoError(t, h.ring.Close())
	require.Zero(t, g.wanted.Load()+g.flight.Load())
	require.EqualValues(t, 3, g.ended.Load())
}

package emu

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

func flush(cid uint16) nvme.SQE {
	var e nvme.SQE
	nvme.BuildFlush(&e, cid, 1)
	return e
}

func (h *host) putFlushes(from, n int) {
	for i := range n {
		h.put(flush(uint16(from + i)))
	}
	h.ring()
}

func cids(cs []completion) (out []uint16) {
	for _, c := range cs {
		out = append(out, c.cid)
	}
	return out
}

func TestOrder(t *testing.T) {
	ordered := Config{Drive: memoryDrive(t, 1<<20), InOrder: true}
	h := newHost(t, ordered, 64, 64<<10)
	for lap := range 5 {
		h.putFlushes(lap*50, 50)
		require.True(t, slices.IsSorted(cids(h.wait(50))))
	}
	ordered.InOrder = false
	h = newHost(t, ordered, 64, 64<<10)
	shuffled := false
	for lap := range 5 {
		h.putFlushes(lap*50, 50)
		got := cids(h.wait(50))
		shuffled = shuffled || !slices.IsSorted(got)
		slices.Sort(got)
		require.Len(t, slices.Compact(got), 50)
		require.Equal(t, uint16(lap*50), got[0])
	}
	require.True(t, shuffled, "completions came in order: nobody would notice an executor that relies on it")
}

// Completions carry the head as of their posting, so that the executor knows which entries are free.
func TestCompletionFields(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20)}, 8, 64<<10)
	for i := range 40 {
		h.put(flush(uint16(i)))
		h.ring()
		c := h.wait(1)[0]
		require.Equal(t, uint16(i), c.cid)
		require.Equal(t, uint16((i+1)%8), c.sqHead)
		require.Equal(t, h.q.id, c.sqID)
	}
}

// The executor does not consume: the controller holds completions back and never overwrites one.
func TestCompletionQueueFull(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20)}, 8, 64<<10)
	sent := 0
	for range 20 {
		// Fill the submission queue as far as completions allow to know.
		for (h.tail+1)%8 != h.q.head {
			h.put(flush(uint16(sent)))
			sent++
		}
		h.q.reported = h.q.head // as if the executor had learnt it some other way
		h.ring()
		h.p.Step()
	}
	require.Greater(t, sent, 14)
	require.False(t, h.q.Dead())
	require.Zero(t, h.q.cq.room())
	snapshot := slices.Clone(h.qm.CQ)
	for range 10 {
		h.p.Step()
	}
	require.Equal(t, snapshot, slices.Clone(h.qm.CQ))
	got := cids(h.wait(sent))
	slices.Sort(got)
	require.Len(t, slices.Compact(got), sent)
}

func TestBadDoorbellKillsOneQueue(t *testing.T) {
	for name, spoil := range map[string]func(h *host){
		"tail outside":    func(h *host) { atomic.StoreUint32(h.qm.SQTail, 16) },
		"tail huge":       func(h *host) { atomic.StoreUint32(h.qm.SQTail, ^uint32(0)) },
		"head outside":    func(h *host) { atomic.StoreUint32(h.qm.CQHead, 16) },
		"head unposted":   func(h *host) { atomic.StoreUint32(h.qm.CQHead, 3) },
		"head backwards":  func(h *host) { atomic.StoreUint32(h.qm.CQHead, 1) },
		"tail past room":  func(h *host) { h.q.tail, h.q.head = 8, 2; atomic.StoreUint32(h.qm.SQTail, 4) },
		"tail moved back": func(h *host) { h.q.tail, h.q.head = 8, 8; atomic.StoreUint32(h.qm.SQTail, 7) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, Config{Drive: memoryDrive(t, 1<<20)}, 16, 64<<10)
			other := attachHost(t, h.c, h.p, nil, 16, 64<<10)
			h.putFlushes(0, 2)
			h.wait(2)
			h.p.Step()
			require.False(t, h.q.Dead())
			spoil(h)
			h.p.Step()
			require.True(t, h.q.Dead())
			require.Equal(t, uint64(1), h.c.Stats().QueuesKilled)
			atomic.StoreUint32(h.qm.SQTail, 9)
			require.Zero(t, h.p.Step(), "a dead queue is not served")
			other.putFlushes(0, 5)
			other.wait(5)
			require.False(t, other.q.Dead())
			require.NoError(t, h.q.Quiesce(time.Now()))
		})
	}
}

func TestIDConflict(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20)}, 16, 64<<10)
	h.c.SetFaults(func(e *nvme.SQE) *Fault { return &Fault{Delay: time.Millisecond} })
	h.put(flush(7))
	h.put(flush(7))
	h.ring()
	got := h.wait(2)
	require.Equal(t, nvme.CIDConflict, got[0].status.Code())
	require.True(t, got[1].status.OK())
	require.True(t, h.do(flush(7)).OK(), "the id is free again")
}

func TestFaults(t *testing.T) {
	for _, inOrder := range []bool{false, true} {
		d := memoryDrive(t, 1<<20)
		h := newHost(t, Config{Drive: d, InOrder: inOrder}, 16, 256<<10)
		fill(d.Bytes(), 5)
		var f *Fault
		h.c.SetFaults(func(e *nvme.SQE) *Fault { return f })
		require.True(t, h.do(flush(1)).OK())

		f = &Fault{Status: uint16(nvme.UnrecoveredRead)}
		require.ErrorIs(t, h.do(h.rw(false, 1, 0, 8, 0)), nvme.UnrecoveredRead)
		require.Equal(t, make([]byte, 4096), h.dma[:4096])

		f = &Fault{Short: 5000}
		require.ErrorIs(t, h.do(h.rw(false, 1, 0, 16, 0)), nvme.DataTransferError)
		require.True(t, bytes.Equal(d.Bytes()[:4608], h.dma[:4608]), "whole blocks of what was asked for")
		require.Equal(t, make([]byte, 3584), h.dma[4608:8192])

		f = &Fault{Double: true}
		h.put(flush(3))
		h.ring()
		require.Equal(t, []uint16{3, 3}, cids(h.wait(2)))

		f = &Fault{Drop: true}
		h.put(flush(4))
		h.ring()
		for range 5 {
			h.p.Step()
		}
		require.Empty(t, h.reap())
		f = nil
		require.True(t, h.do(flush(5)).OK(), "others go on")
		h.c.SetFaults(nil)
		require.True(t, h.do(flush(6)).OK())
	}
}

// fake is a drive without a descriptor, whose calls a test can watch and hold up.
type fake struct {
	drive.Drive
	mu    sync.Mutex
	calls []string
	gate  chan struct{} // not nil: reads wait for it
	err   error
}

func (f *fake) Fd() int       { return -1 }
func (f *fake) Bytes() []byte { return nil }
func (f *fake) Direct() bool  { return false }

func (f *fake) note(s string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, s)
	return f.err
}

func (f *fake) ReadAt(p []byte, off int64) error {
	if f.gate != nil {
		<-f.gate
	}
	if err := f.note("read"); err != nil {
		return err
	}
	return f.Drive.ReadAt(p, off)
}

func (f *fake) WriteAt(p []byte, off int64) error {
	if err := f.note("write"); err != nil {
		return err
	}
	return f.Drive.WriteAt(p, off)
}

func (f *fake) Flush() error { return f.note("flush") }

func TestQuiesceWaitsForWhatMoves(t *testing.T) {
	f := &fake{Drive: memoryDrive(t, 1<<20), gate: make(chan struct{})}
	fill(f.Drive.Bytes(), 6)
	c, err := New(Config{Drive: f})
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	l := &ledger{}
	h := attachHost(t, c, p, l, 16, 256<<10)
	h.put(h.rw(false, 1, 0, 8, 0))
	h.put(h.rw(false, 2, 8, 8, 4096))
	h.ring()
	h.p.Step()
	h.put(h.rw(false, 3, 16, 8, 8192)) // rung but not fetched before the quiesce
	h.ring()
	require.ErrorIs(t, h.q.Quiesce(time.Now()), ErrQuiesce)
	require.Equal(t, 2, l.held)
	h.p.Step()
	require.Equal(t, 2, l.asked, "nothing is fetched any more")
	close(f.gate)
	require.NoError(t, h.q.Quiesce(time.Now().Add(10*time.Second)))
	require.Zero(t, l.held)
	require.True(t, bytes.Equal(f.Drive.Bytes()[:8192], h.dma[:8192]))
	got := cids(h.reap())
	slices.Sort(got)
	require.Equal(t, []uint16{1, 2}, got)
	clear(h.dma)
	snapshot := bytes.Clone(h.raw)
	for range 5 {
		require.Zero(t, h.p.Step())
	}
	require.True(t, bytes.Equal(snapshot, h.raw), "a quiesced queue's memory is nobody's")
	require.NoError(t, h.q.Quiesce(time.Now()), "twice is fine")
}

// A delayed command that has not begun never does.
func TestQuiesceCancelsDelayed(t *testing.T) {
	d := memoryDrive(t, 1<<20)
	fill(d.Bytes(), 1)
	h := newHost(t, Config{Drive: d}, 16, 256<<10)
	h.c.SetFaults(func(*nvme.SQE) *Fault { return &Fault{Delay: time.Hour} })
	h.put(h.rw(false, 1, 0, 8, 0))
	h.ring()
	h.p.Step()
	require.NoError(t, h.q.Quiesce(time.Now()))
	require.Equal(t, make([]byte, 4096), h.dma[:4096])
}

// A held command lets others pass, begins when it may, and never does once its queue is quiesced.
func TestHold(t *testing.T) {
	d := memoryDrive(t, 1<<20)
	fill(d.Bytes(), 1)
	h := newHost(t, Config{Drive: d}, 16, 256<<10)
	free := false
	h.c.SetFaults(func(e *nvme.SQE) *Fault {
		if e.CID != 1 {
			return nil
		}
		return &Fault{Hold: func() bool { return free }}
	})
	h.put(h.rw(false, 1, 0, 8, 0))
	h.ring()
	for cid := uint16(2); cid < 30; cid++ {
		require.True(t, h.do(flush(cid)).OK())
	}
	require.Equal(t, make([]byte, 4096), h.dma[:4096])
	free = true
	require.Equal(t, []uint16{1}, cids(h.wait(1)))
	require.Equal(t, d.Bytes()[:4096], h.dma[:4096])

	free = false
	clear(h.dma)
	h.put(h.rw(false, 1, 0, 8, 0))
	h.ring()
	h.p.Step()
	require.NoError(t, h.q.Quiesce(time.Now()))
	free = true
	h.p.Step()
	require.Equal(t, make([]byte, 4096), h.dma[:4096])
}

func TestFlushAndForceUnit(t *testing.T) {
	f := &fake{Drive: memoryDrive(t, 1<<20)}
	h := newHost(t, Config{Drive: f}, 16, 256<<10)
	require.True(t, h.do(h.rw(true, 1, 0, 8, 0)).OK())
	require.Equal(t, []string{"write"}, f.calls)
	require.True(t, h.do(flush(2)).OK())
	require.Equal(t, []string{"write", "flush"}, f.calls)
	e := h.rw(true, 3, 0, 8, 0)
	e.CDW12 |= nvme.RWForceUnit
	require.True(t, h.do(e).OK())
	require.Equal(t, []string{"write", "flush", "write", "flush"}, f.calls)
	h.c.writeThrough.Store(true)
	require.True(t, h.do(h.rw(true, 1, 0, 8, 0)).OK())
	require.Equal(t, []string{"write", "flush", "write", "flush", "write", "flush"}, f.calls)
}

func TestDriveErrors(t *testing.T) {
	f := &fake{Drive: memoryDrive(t, 1<<20)}
	h := newHost(t, Config{Drive: f}, 16, 256<<10)
	for _, c := range []struct {
		err   error
		write bool
		want  nvme.Status
	}{
		{drive.ErrReadOnly, true, nvme.WriteProtected},
		{drive.ErrRange, false, nvme.LBAOutOfRange},
		{errShort, false, nvme.UnrecoveredRead},
		{errShort, true, nvme.WriteFault},
		{syscall.ENOSPC, true, nvme.CapacityExceeded},
	} {
		f.err = c.err
		require.Equal(t, c.want, h.do(h.rw(c.write, 1, 0, 8, 0)).Code(), "%v", c.err)
	}
	require.Equal(t, nvme.WriteFault, func() nvme.Status { f.err = errShort; return h.do(flush(1)).Code() }())
}

// An executor that rewrites entries, lists and doorbells while they are read gets statuses or a dead queue, no more.
func TestConcurrentMutation(t *testing.T) {
	d := memoryDrive(t, 1<<20)
	c, err := New(Config{Drive: d, SGL: true})
	require.NoError(t, err)
	var armed, wake uint32 = 1, 0
	p, err := NewPoller(PollerConfig{Armed: &armed, Wake: &wake})
	require.NoError(t, err)
	go p.Run()
	t.Cleanup(p.Stop)
	good := attachHost(t, c, p, nil, 16, 64<<10)
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		// No data ever lies in DMA memory here: only lists do, and they are read by atomic loads as these writes are.
		h := attachHost(t, c, p, &ledger{deny: true}, 16, 64<<10)
		sq := unsafe.Slice((*uint64)(unsafe.Pointer(&h.qm.SQ[0])), 16*8)
		lists := words(h.dma)
		for i := range 16 {
			nvme.BuildRW(&h.qm.SQ[i], i%2 == 0, uint16(i), 1, 8, 24)
			h.qm.SQ[i].DPTR = [2]uint64{dmaBase, dmaBase + 4096}
		}
		for i := range 2000 {
			atomic.StoreUint64(&lists[r.IntN(len(lists))], dmaBase+r.Uint64()%(80<<10)&^0xff)
			if i%3 == 0 {
				atomic.StoreUint64(&sq[r.IntN(len(sq))], r.Uint64())
			} else {
				atomic.StoreUint64(&sq[r.IntN(16)*8+3+r.IntN(2)], dmaBase+r.Uint64()%(80<<10)&^0x3f)
			}
			if i%5 == 0 {
				for range h.reap() {
				}
				atomic.StoreUint32(h.qm.SQTail, uint32(r.IntN(16)))
			}
		}
		require.NoError(t, h.q.Quiesce(time.Now().Add(10*time.Second)))
	}
	good.putFlushes(0, 5)
	for n := 0; n < 5; n += len(good.reap()) {
		runtime.Gosched()
	}
	require.False(t, good.q.Dead())
}

func TestNoAllocation(t *testing.T) {
	d := memoryDrive(t, 1<<20)
	for _, dr := range []drive.Drive{d, &fake{Drive: d}} {
		h := newHost(t, Config{Drive: dr, SGL: true}, 64, 256<<10)
		if f, ok := dr.(*fake); ok {
			f.calls = make([]string, 0, 1<<20)
		}
		step := func() {
			h.pump(32, 16, func() { h.p.Step() }, func(e *nvme.SQE, cid uint16) {
				nvme.BuildRW(e, cid%2 == 0, cid, 1, 8, 8)
				_ = e.SetSGL(dmaBase+4096, 4096)
			})
		}
		step()
		perRun := testing.AllocsPerRun(50, step)
		require.LessOrEqual(t, perRun, 1.0, "one is the pump's own list") // 32 commands a run
	}
}

func TestConfigIsChecked(t *testing.T) {
	d := memoryDrive(t, 1<<20)
	for _, c := range []Config{{}, {Drive: d, MDTS: 14}, {Drive: d, QueueEntries: 1}, {Drive: d, QueueEntries: 8192},
		{Drive: d, Queues: 0xffff}} {
		_, err := New(c)
		require.ErrorIs(t, err, ErrConfig)
	}
	_, err := NewPoller(PollerConfig{Backend: "carrier pigeon"})
	require.ErrorIs(t, err, ErrConfig)
	c, err := New(Config{Drive: d, Queues: 1, QueueEntries: 16})
	require.NoError(t, err)
	qm, err := nvme.MapQueue(mmapTest(t, nvme.QueueBytes(32)), 32)
	require.NoError(t, err)
	_, err = c.Attach(QueueConfig{Memory: qm, DMA: &Region{}})
	require.ErrorIs(t, err, ErrConfig)
	qm, err = nvme.MapQueue(mmapTest(t, nvme.QueueBytes(16)), 16)
	require.NoError(t, err)
	_, err = c.Attach(QueueConfig{Memory: qm})
	require.ErrorIs(t, err, ErrConfig)
	q, err := c.Attach(QueueConfig{Memory: qm, DMA: &Region{}})
	require.NoError(t, err)
	_, err = c.Attach(QueueConfig{Memory: qm, DMA: &Region{}})
	require.ErrorIs(t, err, ErrQueues)
	require.NoError(t, q.Quiesce(time.Now()), "a queue that nobody served")
	_, err = c.Attach(QueueConfig{Memory: qm, DMA: &Region{}})
	require.NoError(t, err)
	_, err = c.Attach(QueueConfig{})
	require.ErrorIs(t, err, nvme.ErrQueueMemory)
}

// Stop gets through even if the executor keeps writing the wake word.
func TestStopAgainstAHostileWakeWord(t *testing.T) {
	var armed, wake uint32
	p, err := NewPoller(PollerConfig{Armed: &armed, Wake: &wake})
	require.NoError(t, err)
	go p.Run()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for {
			select {
			case <-stop:
				return
			default:
				atomic.StoreUint32(&wake, 1)
				runtime.Gosched()
			}
		}
	}()
	time.Sleep(time.Millisecond)
	p.Stop()
	close(stop)
	wg.Wait()
	p.Run() // a stopped poller does not run again
	p.Stop()
}

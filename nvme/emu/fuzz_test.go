package emu

import (
	"bytes"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

// guarded is memory between pages that fault, so that a step outside ends the test.
func guarded(t testing.TB, n int) []byte {
	b, err := unix.Mmap(-1, 0, n+2*PageBytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	in := b[PageBytes:][:n:n]
	require.NoError(t, unix.Mprotect(in, unix.PROT_READ|unix.PROT_WRITE))
	return in
}

// guardedDrive is a memory drive in guarded memory.
type guardedDrive struct {
	fake
	b []byte
}

func (d *guardedDrive) Bytes() []byte { return d.b }
func (d *guardedDrive) Size() int64   { return int64(len(d.b)) }

func (d *guardedDrive) WriteZeroes(off, n int64) error { clear(d.b[off:][:n]); return nil }
func (d *guardedDrive) Discard(off, n int64) error     { clear(d.b[off:][:n]); return nil }

// sixteen is an authority over the drive's first sixteen units.
type sixteen struct{ held int }

func (s *sixteen) Authorize(_ bool, _ uint16, unit uint64, units uint32) (Access, bool) {
	if unit >= 16 || uint64(units) > 16-unit {
		return Access{}, false
	}
	s.held++
	return Access{}, true
}

func (s *sixteen) Complete(Access, bool) { s.held-- }

// FuzzSQE gives the controller one arbitrary entry and arbitrary DMA memory. Exactly one completion comes back; nothing
// outside the two memories is touched; a refused command moves nothing; a served one touches only its own blocks, and
// no block outside what the authority allows.
func FuzzSQE(f *testing.F) {
	seed := func(e nvme.SQE, mode byte, dma ...uint64) {
		b := append([]byte{mode}, unsafe.Slice((*byte)(unsafe.Pointer(&e)), nvme.SQEBytes)...)
		for _, w := range dma {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
		f.Add(b)
	}
	var e nvme.SQE
	for _, write := range []bool{false, true} {
		nvme.BuildRW(&e, write, 1, 1, 8, 8)
		_ = e.SetPRP(dmaBase+4096, 4096, nil, 0)
		seed(e, 0)
		seed(e, 1)
		nvme.BuildRW(&e, write, 1, 1, 8, 32)
		e.DPTR = [2]uint64{dmaBase + 512, dmaBase}
		seed(e, 2, dmaBase+8192, dmaBase+4096, dmaBase+12288, dmaBase+16384)
		e.DPTR[1] = dmaBase + 4088
		seed(e, 0)
		_ = e.SetSGL(dmaBase+100, 32*512)
		seed(e, 3)
		e.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLLastSegment, dmaBase, 32))
		seed(e, 3, dmaBase+4096, 16000, dmaBase+100, 384)
		e.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLSegment, dmaBase, 32))
		seed(e, 3, dmaBase+4096, 16000, dmaBase, 32|3<<60)
	}
	nvme.BuildDSM(&e, 2, 1, 2)
	e.DPTR[0] = dmaBase
	seed(e, 0, 8<<32, 16, 16<<32, 40)
	nvme.BuildWriteZeroes(&e, 2, 1, 3, 70, true)
	seed(e, 1)
	nvme.BuildFlush(&e, 2, 1)
	seed(e, 0)

	const dmaBytes, driveBytes = 32 << 10, 128 << 10
	store, dma := guarded(f, driveBytes), guarded(f, dmaBytes)
	fresh := make([]byte, driveBytes)
	fill(fresh, 77)
	before := make([]byte, dmaBytes)
	type side struct {
		h     *host
		guard *sixteen
	}
	var sides [4]side
	for mode := range sides {
		c, err := New(Config{Drive: &guardedDrive{fake: fake{Drive: memoryDrive(f, driveBytes)}, b: store},
			MDTS: 2, SGL: mode&1 != 0, InOrder: mode&2 != 0})
		require.NoError(f, err)
		p, err := NewPoller(PollerConfig{})
		require.NoError(f, err)
		f.Cleanup(p.Stop)
		s := side{guard: &sixteen{}}
		var a Authority
		if mode&2 != 0 {
			a = s.guard
		}
		h := &host{t: f, c: c, p: p, phase: 1, dma: dma, raw: guarded(f, nvme.QueueBytes(2))}
		h.qm, err = nvme.MapQueue(h.raw, 2)
		require.NoError(f, err)
		h.q, err = c.Attach(QueueConfig{Memory: h.qm, DMA: &Region{dmaBase, dma}, Authority: a})
		require.NoError(f, err)
		p.Add(h.q)
		s.h = h
		sides[mode] = s
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 1+nvme.SQEBytes {
			return
		}
		s := sides[in[0]&3]
		var e nvme.SQE
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), nvme.SQEBytes), in[1:])
		clear(dma)
		copy(dma, in[1+nvme.SQEBytes:])
		copy(before, dma)
		copy(store, fresh)

		s.h.t = t
		s.h.put(e)
		s.h.ring()
		var got []completion
		for end := time.Now().Add(10 * time.Second); len(got) == 0 && time.Now().Before(end); {
			s.h.p.Step()
			got = s.h.reap()
		}
		require.Len(t, got, 1)
		require.Equal(t, e.CID, got[0].cid)
		require.False(t, s.h.q.Dead())
		require.Zero(t, s.guard.held)
		ok := got[0].status.OK()
		if !ok || e.Opcode != nvme.IORead {
			require.True(t, bytes.Equal(before, dma), "%v", got[0].status)
		}
		if !ok || e.Opcode == nvme.IORead || e.Opcode == nvme.IOFlush {
			require.True(t, bytes.Equal(fresh, store), "%v", got[0].status)
		}
		if in[0]&2 != 0 {
			require.True(t, bytes.Equal(fresh[16*PageBytes:], store[16*PageBytes:]))
		}
		if ok && (e.Opcode == nvme.IOWrite || e.Opcode == nvme.IOWriteZeroes) {
			lo, hi := e.LBA()*512, (e.LBA()+uint64(e.Blocks()))*512
			require.True(t, bytes.Equal(fresh[:lo], store[:lo]) && bytes.Equal(fresh[hi:], store[hi:]))
		}
	})
}

// hostile is an executor that obeys no rule, beside one that obeys all, on the same controller and poller.
type hostile struct {
	store, dma   []byte // of the drive, and of the hostile executor
	fresh        []byte // what the drive holds at first
	guard        *sixteen
	bad, good    *host
	queue        *Queue // the hostile one
	raw          []byte // its memory
	controller   *Controller
	poller       *Poller
	goodDMA      []byte
	expectedGood []byte
}

const (
	hostileDMA   = 32 << 10
	hostileDrive = 128 << 10
	hostileDepth = 8
)

func newHostile(f *testing.F, inOrder bool) *hostile {
	x := &hostile{store: guarded(f, hostileDrive), dma: guarded(f, hostileDMA), guard: &sixteen{},
		raw: guarded(f, nvme.QueueBytes(hostileDepth)), fresh: make([]byte, hostileDrive)}
	fill(x.fresh, 77)
	var err error
	x.controller, err = New(Config{Drive: &guardedDrive{fake: fake{Drive: memoryDrive(f, hostileDrive)}, b: x.store},
		MDTS: 2, SGL: true, InOrder: inOrder})
	require.NoError(f, err)
	x.poller, err = NewPoller(PollerConfig{})
	require.NoError(f, err)
	f.Cleanup(x.poller.Stop)
	x.good = attachHost(f, x.controller, x.poller, nil, hostileDepth, 64<<10)
	x.goodDMA, x.expectedGood = x.good.dma, make([]byte, len(x.good.dma))
	return x
}

// attach begins the hostile queue anew.
func (x *hostile) attach(t testing.TB) {
	copy(x.store, x.fresh)
	clear(x.raw)
	clear(x.dma)
	qm, err := nvme.MapQueue(x.raw, hostileDepth)
	require.NoError(t, err)
	x.queue, err = x.controller.Attach(QueueConfig{Memory: qm, DMA: &Region{dmaBase, x.dma}, Authority: x.guard})
	require.NoError(t, err)
	x.poller.Add(x.queue)
	x.bad = &host{t: t, c: x.controller, p: x.poller, q: x.queue, qm: qm, raw: x.raw, dma: x.dma, phase: 1}
	x.good.t = t
	fill(x.goodDMA, 33)
	copy(x.expectedGood, x.goodDMA)
}

// end takes the hostile queue down and checks that nothing outside its rights has changed, that nothing of the drive
// outside them is in its memory, and that the other executor is served.
func (x *hostile) end(t *testing.T) {
	require.NoError(t, x.queue.Quiesce(time.Now().Add(10*time.Second)))
	require.Zero(t, x.guard.held, "every grant is given back")
	require.True(t, bytes.Equal(x.fresh[16*PageBytes:], x.store[16*PageBytes:]), "outside its leases")
	require.True(t, bytes.Equal(x.expectedGood, x.goodDMA), "another's memory")
	for at := 16 * PageBytes; at < hostileDrive; at += PageBytes {
		require.False(t, bytes.Contains(x.dma, x.fresh[at:at+64]), "bytes of unit %d", at/PageBytes)
	}
	require.True(t, x.good.do(x.good.rw(false, 7, uint64(16*PageBytes>>x.controller.shift()), 1, 0)).OK())
	require.Equal(t, x.fresh[16*PageBytes:][:1<<x.controller.shift()], x.goodDMA[:1<<x.controller.shift()])
}

// FuzzChanging has the controller serve entries, PRP lists, SGLs and ranges that another thread changes all the time
// between two states: what is checked of one copy must not be believed of another.
func FuzzChanging(f *testing.F) {
	entry := func(e nvme.SQE) []byte {
		return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&e)), nvme.SQEBytes)...)
	}
	list := func(words ...uint64) (b []byte) {
		for _, w := range words {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
		return b
	}
	var e, o nvme.SQE
	for _, write := range []bool{false, true} {
		nvme.BuildRW(&e, write, 1, 1, 8, 32)
		nvme.BuildRW(&o, write, 1, 1, 128, 64)
		e.DPTR, o.DPTR = [2]uint64{dmaBase + 4096, dmaBase}, [2]uint64{dmaBase + 8192, dmaBase + 8}
		f.Add(entry(e), entry(o), list(dmaBase+8192, dmaBase+4096, dmaBase+12288, dmaBase+16384),
			list(dmaBase+hostileDMA, 0, ^uint64(4095), dmaBase-4096), false)
		e.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLLastSegment, dmaBase, 32))
		o.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLSegment, dmaBase, 32))
		f.Add(entry(e), entry(o), list(dmaBase+4096, 16000, dmaBase+100, 384),
			list(dmaBase+hostileDMA-8, 1<<31, dmaBase, 32|3<<60), true)
	}
	nvme.BuildDSM(&e, 2, 1, 2)
	nvme.BuildDSM(&o, 2, 1, 200)
	e.DPTR[0], o.DPTR[0] = dmaBase, dmaBase+hostileDMA-32
	f.Add(entry(e), entry(o), list(8<<32, 16, 16<<32, 40), list(8<<32, 120, 1<<63, 1<<40), false)
	sides := [2]*hostile{newHostile(f, false), newHostile(f, true)}
	f.Fuzz(func(t *testing.T, entryA, entryB, listA, listB []byte, inOrder bool) {
		x := sides[0]
		if inOrder {
			x = sides[1]
		}
		x.attach(t)
		entries := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x.bad.qm.SQ))), hostileDepth*nvme.SQEBytes)
		put := func(entry, list []byte) {
			for at := 0; at < len(entries); at += nvme.SQEBytes {
				copy(entries[at:at+nvme.SQEBytes], entry)
				entries[at+2] = byte(at / nvme.SQEBytes) // command ids differ, mostly
			}
			copy(x.dma, list)
		}
		put(entryA, listA)
		stop, began := make(chan struct{}), make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			close(began)
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if n%2 == 0 {
					put(entryB, listB)
				} else {
					put(entryA, listA)
				}
			}
		})
		<-began
		for range 3 {
			x.bad.tail = (x.bad.tail + hostileDepth - 1) % hostileDepth
			x.bad.ring()
			n := 0
			for end := time.Now().Add(10 * time.Second); n < hostileDepth-1 && time.Now().Before(end); {
				x.poller.Step()
				n += len(x.bad.reap())
			}
			require.Equal(t, hostileDepth-1, n, "each entry is answered once")
		}
		close(stop)
		wg.Wait()
		x.end(t)
	})
}

// FuzzDoorbells writes any values to the doorbells of one queue while it is served. At the worst that kills this queue;
// no entry is served that is not the executor's, and another queue of the controller goes on.
func FuzzDoorbells(f *testing.F) {
	f.Add([]byte{1, 0, 2, 0, 2, 2})
	f.Add([]byte{7, 0, 6, 7, 0xff, 0xff})
	f.Add([]byte{0, 1, 0x80, 0, 8, 8, 3, 3})
	x := newHostile(f, false)
	f.Fuzz(func(t *testing.T, values []byte) {
		x.attach(t)
		for i := range x.bad.qm.SQ {
			e := &x.bad.qm.SQ[i]
			nvme.BuildRW(e, i%2 == 0, uint16(i), 1, uint64(i*8), 8)
			require.NoError(t, e.SetPRP(dmaBase+uint64(i)*4096%hostileDMA, 4096, nil, 0))
		}
		served := uint64(0)
		before := x.controller.Stats()
		for ; len(values) >= 2; values = values[2:] {
			wide := func(b byte) uint32 { return uint32(int32(int8(b))) } // large ones, too
			atomic.StoreUint32(x.bad.qm.SQTail, wide(values[0]))
			atomic.StoreUint32(x.bad.qm.CQHead, wide(values[1]))
			x.poller.Step()
			served += hostileDepth - 1 // at most, by one tail
		}
		after := x.controller.Stats()
		require.LessOrEqual(t, after.Reads+after.Writes-before.Reads-before.Writes, served)
		dead := x.queue.Dead()
		x.end(t)
		require.Equal(t, dead, after.QueuesKilled > before.QueuesKilled)
	})
}

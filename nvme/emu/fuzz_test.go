package emu

import (
	"bytes"
	"encoding/binary"
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
		h.q, err = c.Attach(QueueConfig{Memory: h.qm, DMA: regionMemory{dmaBase, dma}, Authority: a})
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

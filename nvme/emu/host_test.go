package emu

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// host is an executor with one queue pair and some DMA memory, laid out as the daemon does it.
type host struct {
	t     testing.TB
	c     *Controller
	p     *Poller
	q     *Queue
	qm    nvme.QueueMemory
	raw   []byte // queue memory
	dma   []byte
	tail  uint32
	head  uint32
	phase uint16
}

// dmaBase is where DMA memory lies in the host's address space: not zero, so that forgotten addresses are noticed.
const dmaBase = 0x1_0000_0000

func mmapTest(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func memoryDrive(t testing.TB, size int64) drive.Drive {
	t.Helper()
	d, err := drive.NewMemory("ram", size)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func newHost(t testing.TB, cfg Config, depth, dmaBytes int) *host {
	t.Helper()
	c, err := New(cfg)
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	return attachHost(t, c, p, nil, depth, dmaBytes)
}

func attachHost(t testing.TB, c *Controller, p *Poller, a Authority, depth, dmaBytes int) *host {
	t.Helper()
	h := &host{t: t, c: c, p: p, phase: 1}
	h.raw = mmapTest(t, nvme.QueueBytes(depth))
	h.dma = mmapTest(t, dmaBytes)
	var err error
	h.qm, err = nvme.MapQueue(h.raw, depth)
	require.NoError(t, err)
	h.q, err = c.Attach(QueueConfig{Memory: h.qm, DMA: &Region{dmaBase, h.dma}, Authority: a})
	require.NoError(t, err)
	p.Add(h.q)
	t.Cleanup(func() { _ = h.q.Quiesce(time.Now().Add(5 * time.Second)) })
	return h
}

// put writes an entry at the tail; ring shows it to the controller.
func (h *host) put(e nvme.SQE) {
	h.qm.SQ[h.tail] = e
	h.tail = (h.tail + 1) % uint32(len(h.qm.SQ))
}

func (h *host) ring() { atomic.StoreUint32(h.qm.SQTail, h.tail) }

type completion struct {
	cid    uint16
	status nvme.Status
	sqHead uint16
	sqID   uint16
}

// reap takes what has completed, without waiting.
func (h *host) reap() (out []completion) {
	for {
		e := &h.qm.CQ[h.head]
		cid, st, ok := e.Poll(h.phase)
		if !ok {
			break
		}
		out = append(out, completion{cid, st, e.SQHead, e.SQID})
		if h.head++; h.head == uint32(len(h.qm.CQ)) {
			h.head, h.phase = 0, h.phase^1
		}
	}
	atomic.StoreUint32(h.qm.CQHead, h.head)
	return out
}

// wait steps the poller until n commands have completed.
func (h *host) wait(n int) []completion {
	h.t.Helper()
	var out []completion
	for end := time.Now().Add(20 * time.Second); len(out) < n; {
		h.p.Step()
		out = append(out, h.reap()...)
		require.True(h.t, time.Now().Before(end), "only %d of %d commands completed", len(out), n)
	}
	require.Len(h.t, out, n)
	return out
}

// do runs one command to its end.
func (h *host) do(e nvme.SQE) nvme.Status {
	h.t.Helper()
	h.put(e)
	h.ring()
	c := h.wait(1)[0]
	require.Equal(h.t, e.CID, c.cid)
	return c.status
}

// rw builds a transfer of blocks to or from DMA offset off by PRPs, whose list lies in the last page of DMA memory.
func (h *host) rw(write bool, cid uint16, lba uint64, nlb uint32, off uint64) nvme.SQE {
	var e nvme.SQE
	nvme.BuildRW(&e, write, cid, 1, lba, nlb)
	n := nlb << h.c.shift()
	at := uint64(len(h.dma) - PageBytes)
	list := words(h.dma[at:])
	require.NoError(h.t, e.SetPRP(dmaBase+off, n, list, dmaBase+at))
	return e
}

func TestRegionBounds(t *testing.T) {
	const base = dmaBase
	d := Region{Base: base, Bytes: make([]byte, 8192)}
	for _, x := range []struct {
		iova uint64
		n    uint32
		ok   bool
	}{
		{base, 8192, true}, {base, 0, true}, {base + 8192, 0, true}, {base + 4096, 4096, true}, {base + 8191, 1, true},
		{base, 8193, false}, {base + 8192, 1, false}, {base + 4096, 4097, false}, {base - 1, 1, false}, {0, 1, false},
		{^uint64(0), 1, false}, {^uint64(0), ^uint32(0), false}, {base + 1<<32, 1, false}, {base - 4096, 8192, false},
	} {
		got := d.Translate(x.iova, x.n)
		require.Equal(t, x.ok, got != nil, "%#x+%d", x.iova, x.n)
		if x.ok {
			require.Len(t, got, int(x.n))
			require.Equal(t, int(x.n), cap(got))
		}
	}
}

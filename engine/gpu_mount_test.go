package engine

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/gio"
)

// The tests of this file have a real mount and a driver without a GPU.

func startFake(t *testing.T) *cudatest.Fake {
	t.Helper()
	return cudatest.Start(t, cudatest.Config{Kernels: cudatest.Kernels(), Devices: 2, Jitter: 50 * time.Microsecond})
}

// TestStuckContextIsKept: a driver that hangs is not asked to release the context, which might never return.
func TestStuckContextIsKept(t *testing.T) {
	f := startFake(t)
	var g gpuSide
	require.NoError(t, g.open(&GPUOptions{Driver: f.Driver()}))
	require.NoError(t, g.close(fmt.Errorf("%w: after a call", gio.ErrStuck)))
	require.Equal(t, cudatest.Counts{Contexts: 1}, f.Live())
	require.NoError(t, g.close(gio.ErrDead))
	require.Equal(t, cudatest.Counts{}, f.Live())
}

// gpuMountOptions are for one of the fake's devices.
func gpuMountOptions(f *cudatest.Fake, device string) SessionOptions {
	o := mountOptions
	o.GPU = &GPUOptions{Driver: f.Driver(), Device: device, StagingBytes: 8 << 20}
	return o
}

// bound runs f on a thread that has the context.
func bound(t *testing.T, c *cuda.Context, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, c.Bind())
	f()
	require.NoError(t, c.Unbind())
}

// pagedPool is device memory for one rank's objects in blocks, K apart from V, as engines allocate it.
type pagedPool struct {
	u      *user
	memory *gio.Memory
	bytes  []byte // the device's memory: the fake's addresses are this process' own
	paged  gio.Paged
	free   cuda.Pointer
}

func newPagedPool(u *user, rank uint16, blocks int) *pagedPool {
	u.t.Helper()
	l := u.pool.Layout()
	p := &pagedPool{u: u, paged: gio.Paged{Blocks: uint64(blocks)}}
	total := uint64(0)
	for _, object := range l.RankObjects(rank) {
		n := l.ObjectBytes(object)
		first := n / 2 &^ 15
		runs := []cuda.StridedRun{
			{Base: total, Stride: uint64(first), Bytes: first},
			{Base: total + uint64(first)*uint64(blocks), Stride: uint64(n - first), Bytes: n - first},
		}
		total += uint64(n) * uint64(blocks)
		p.paged.Classes = append(p.paged.Classes, runs)
	}
	bound(u.t, u.session.CUDA(), func() {
		var err error
		p.free, err = u.session.CUDA().Alloc(total)
		require.NoError(u.t, err)
	})
	for _, runs := range p.paged.Classes {
		for i := range runs {
			runs[i].Base += uint64(p.free)
		}
	}
	p.bytes = unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p.free))), total)
	var err error
	p.memory, err = u.session.GPU().RegisterPaged(p.paged)
	require.NoError(u.t, err)
	require.Positive(u.t, p.memory.DeviceBytes())
	return p
}

// runs are the bytes of a class in a block.
func (p *pagedPool) runs(class int, block uint64) (parts [][]byte) {
	for _, r := range p.paged.Classes[class] {
		at := r.Base - uint64(p.free) + block*r.Stride
		parts = append(parts, p.bytes[at:at+uint64(r.Bytes)])
	}
	return parts
}

func (p *pagedPool) close() {
	require.NoError(p.u.t, p.u.session.GPU().Unregister(p.memory))
	bound(p.u.t, p.u.session.CUDA(), func() { require.NoError(p.u.t, p.u.session.CUDA().Free(p.free)) })
}

// restorePaged pins a chain and brings a rank of it into a paged pool, all layers ahead, behind an event of the
// engine's and before work of the engine's stream.
func (u *user) restorePaged(request uint64, rank uint16, keys []Key) {
	u.t.Helper()
	grants := make([]Grant, len(keys))
	n, err := u.pool.Pin(0, request, keys, grants)
	require.NoError(u.t, err)
	require.Equal(u.t, len(keys), n)
	p := newPagedPool(u, rank, 2*len(keys))
	block := func(i int) uint64 { return uint64(2*(len(keys)-1-i) + i%2) }
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), rank, slotsOf(grants))
	require.NoError(u.t, err)
	layers := l.(gio.GPULayers)
	layout := u.pool.Layout()
	var stream *cuda.Stream
	var after *cuda.Event
	context := u.session.CUDA()
	bound(u.t, context, func() {
		stream, err = context.NewStream(0)
		require.NoError(u.t, err)
		after, err = context.NewEvent(false)
		require.NoError(u.t, err)
		require.NoError(u.t, stream.Memset(p.free, 0xee, uint64(len(p.bytes))))
		require.NoError(u.t, after.Record(stream))
	})
	var tickets []gio.GPULayerTicket
	for layer := range uint16(3) {
		var desc []uint64
		for i := range keys {
			for _, object := range layout.LayerObjects(layer, rank) {
				desc = append(desc, p.memory.Block(layout.OrdinalInRank(object), block(i)))
			}
		}
		ticket, err := layers.RetrieveLayerAfter(layer, desc, context.EventFromHandle(after.Handle()))
		require.NoError(u.t, err)
		tickets = append(tickets, ticket)
	}
	for layer := range uint16(3) {
		require.NoError(u.t, tickets[layer].WaitOn(context.StreamFromHandle(stream.Handle())))
		bound(u.t, context, func() { require.NoError(u.t, stream.Synchronize()) })
		for i := range keys {
			for _, object := range layout.LayerObjects(layer, rank) {
				want := make([]byte, layout.ObjectBytes(object))
				content(want, &keys[i], object)
				got := bytes.Join(p.runs(layout.OrdinalInRank(object), block(i)), nil)
				require.True(u.t, bytes.Equal(want, got), "key %d object %d", i, object)
			}
		}
	}
	for _, ticket := range tickets {
		require.NoError(u.t, ticket.Wait())
	}
	require.Equal(u.t, make([]error, len(keys)), l.Failed())
	l.Close()
	bound(u.t, context, func() {
		require.NoError(u.t, after.Close())
		require.NoError(u.t, stream.Close())
	})
	p.close()
	require.NoError(u.t, u.pool.Release(request))
}

// TestMountGPU: ranks in one session, each with a GPU of its own, and a session without any, exchange files.
func TestMountGPU(t *testing.T) {
	f := startFake(t)
	v := newVolume(t)
	a := newUser(t, v, gpuMountOptions(f, ""), nil)
	require.Contains(t, a.session.Describe(), "GPU ring on device 0")
	require.Contains(t, a.session.Describe(), "bounce 1 MiB of 16 MiB DMA memory; staging 8 MiB")
	keys, items := chain(1, 40)
	a.store(1, keys, items, true)
	more, moreItems := chain(2, 7)
	a.store(2, more, moreItems, false)

	token := a.session.Token()
	b := newUser(t, v, gpuMountOptions(f, "1"), &token)
	require.Equal(t, 1, b.session.CUDA().Device().Ordinal)
	c := newUser(t, v, mountOptions, nil)
	require.Nil(t, c.session.GPU())
	var wg sync.WaitGroup
	wg.Go(func() { a.restorePaged(1, 0, keys) })
	b.restorePaged(2, 1, keys)
	wg.Wait()
	b.restore(3, 0, more, false)
	b.restore(4, 1, more, true)
	c.restore(1, 0, keys, false)
	require.Positive(t, b.session.GPU().Stats().Harvests)
	for _, u := range []*user{a, b} {
		require.NoError(t, u.session.Close())
	}
	require.Equal(t, cudatest.Counts{}, f.Live(), "closed sessions hold nothing of the GPUs")
}

// TestMountGPUDaemonDies: waits end, and nothing of the GPU is kept.
func TestMountGPUDaemonDies(t *testing.T) {
	f := startFake(t)
	v := newVolume(t)
	u := newUser(t, v, gpuMountOptions(f, "0"), nil)
	keys, items := chain(1, 20)
	u.store(1, keys, items, true)
	grants := make([]Grant, 20)
	_, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	memory, err := u.session.Ring().Register(hostMemory(t, 20*16384))
	require.NoError(t, err)
	var ctxs []gio.IOCTX
	for i, g := range grants {
		ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(i * 16384), Slot: g.Slot})
	}
	done := make(chan error, 1)
	first := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
			if err == nil {
				_, err = u.session.Ring().Wait(ticket)
			}
			if err != nil {
				done <- err
				return
			}
			if n == 0 {
				close(first)
			}
		}
	}()
	<-first
	v.kill()
	endsWithDaemon(t, done)
	_ = u.session.Close() // the mount is gone; what matters is that it ends, and what it leaves
	require.Equal(t, cudatest.Counts{}, f.Live())
	v.start()
	again := newUser(t, v, gpuMountOptions(f, "0"), nil)
	again.restorePaged(1, 0, keys)
}

// TestMountGPUFails: a GPU that gives no memory refuses the session, which leaves nothing behind.
func TestMountGPUFails(t *testing.T) {
	f := startFake(t)
	v := newVolume(t)
	m, err := Open(v.mount())
	require.NoError(t, err)
	f.Fail("MemHostRegister", 2, cuda.ErrOutOfMemory)
	_, err = m.NewSession(gpuMountOptions(f, "0"))
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.Equal(t, cudatest.Counts{}, f.Live())
	_, err = m.NewSession(gpuMountOptions(f, "2"))
	require.ErrorIs(t, err, ErrNoGPU)
	require.NoError(t, m.Close())
}

func TestFindDevice(t *testing.T) {
	f := startFake(t)
	for ordinal := range 2 {
		want, err := f.Driver().Device(ordinal)
		require.NoError(t, err)
		for _, name := range []string{want.PCIBusID(), uuidText(want.UUID()), string(rune('0' + ordinal))} {
			got, err := findDevice(f.Driver(), name)
			require.NoError(t, err)
			require.Equal(t, ordinal, got.Ordinal, name)
		}
	}
	d, err := findDevice(f.Driver(), "")
	require.NoError(t, err)
	require.Zero(t, d.Ordinal)
	_, err = findDevice(f.Driver(), "GPU-none")
	require.ErrorIs(t, err, ErrNoGPU)
	require.ErrorContains(t, err, d.PCIBusID(), "it lists those that there are")
}

package gio_test

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/gio/giotest"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// orderRig is layers in device memory, and what an engine has: a stream of its own and a word that holds it.
type orderRig struct {
	*giotest.Rig
	t      *testing.T
	w      *world
	slots  []gio.SlotIO
	objs   [][]uint16 // of each layer
	layers [][]byte   // what each layer's memory is to hold, [slot][object]
	at     []uint64   // its address
	desc   [][]uint64
	engine *cuda.Stream
	event  *cuda.Event
	word   *cuda.HostMemory
}

func newOrderRig(t *testing.T, w *world, polling, buffer bool) *orderRig {
	s := w.sized(&sizes{}, testSeed(t), polling)
	s.Store = buffer
	return orderRigOf(t, w, &s)
}

func orderRigOf(t *testing.T, w *world, s *giotest.Subject) *orderRig {
	r := &orderRig{t: t, w: w}
	r.make()
	r.Rig = giotest.NewRig(t, s, giotest.Shape{BounceBytes: 1 << 20, Depth: 256, Lanes: 6})
	for _, slot := range r.Slots {
		r.slots = append(r.slots, gio.SlotIO{Slot: slot, Seed: checksum.Seed{byte(slot), 1}})
	}
	g := r.Ring.(*gio.GPU)
	layout := r.Map.Layout()
	for layer := range layout.Layers() {
		objects := layout.LayerObjects(uint16(layer), 0)
		var content []byte
		var offsets []int
		for _, slot := range r.slots {
			for _, object := range objects {
				offsets = append(offsets, len(content))
				b := make([]byte, r.Bytes(object))
				giotest.Content(b, slot.Slot, object, 1)
				content = append(content, b...)
			}
		}
		p, err := w.Alloc(len(content))
		require.NoError(t, err)
		m, err := g.RegisterDevice(cuda.Pointer(p), uint64(len(content)))
		require.NoError(t, err)
		var desc []uint64
		for _, off := range offsets {
			desc = append(desc, m.Desc(off))
		}
		r.objs, r.layers = append(r.objs, objects), append(r.layers, content)
		r.at, r.desc = append(r.at, p), append(r.desc, desc)
	}
	t.Cleanup(r.release) // before the executor ends, should a test have failed
	return r
}

// make makes what the engine has. It is freed after the executor has ended.
func (r *orderRig) make() {
	require.NoError(r.t, r.w.do(func() (err error) {
		if r.engine, err = r.w.context.NewStream(0); err != nil {
			return err
		}
		if r.event, err = r.w.context.NewEvent(false); err != nil {
			return err
		}
		r.word, err = r.w.context.AllocHost(4, false)
		return err
	}))
	r.t.Cleanup(func() {
		for _, p := range r.at {
			require.NoError(r.t, r.w.Free(p))
		}
		r.do(func() error { return r.engine.Close() })
		r.do(func() error { return r.event.Close() })
		r.do(func() error { return r.w.context.FreeHost(r.word) })
	})
}

func (r *orderRig) do(f func() error) {
	r.t.Helper()
	require.NoError(r.t, r.w.do(f))
}

// holdEngine makes the engine's stream wait for release, and the event come after that.
func (r *orderRig) holdEngine(then func() error) {
	r.t.Helper()
	atomic.StoreUint32(r.flag(), 0)
	r.do(func() error {
		if err := r.engine.WaitValue32(r.word.GPU, 1, false); err != nil {
			return err
		}
		if err := then(); err != nil {
			return err
		}
		return r.event.Record(r.engine)
	})
}

func (r *orderRig) flag() *uint32 { return (*uint32)(unsafe.Pointer(&r.word.Bytes[0])) }
func (r *orderRig) release()      { atomic.StoreUint32(r.flag(), 1) }

func nothing() error { return nil }

// set gives a layer's memory one value.
func (r *orderRig) set(layer int, b byte) {
	r.t.Helper()
	require.NoError(r.t, r.w.Upload(r.at[layer], bytes.Repeat([]byte{b}, len(r.layers[layer]))))
}

func (r *orderRig) memory(layer int) []byte {
	r.t.Helper()
	b := make([]byte, len(r.layers[layer]))
	require.NoError(r.t, r.w.Download(b, r.at[layer]))
	return b
}

// store puts everything on the drives.
func (r *orderRig) store() {
	r.t.Helper()
	l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
	require.NoError(r.t, err)
	defer l.Close()
	for layer := range r.layers {
		require.NoError(r.t, r.w.Upload(r.at[layer], r.layers[layer]))
		ticket, err := l.StoreLayer(uint16(layer), r.desc[layer])
		require.NoError(r.t, err)
		require.NoError(r.t, ticket.Wait())
	}
	require.NoError(r.t, l.Finish())
}

func (r *orderRig) open() gio.GPULayers {
	r.t.Helper()
	l, err := r.Ring.OpenLayers(r.Map, 0, r.slots)
	require.NoError(r.t, err)
	r.t.Cleanup(l.Close)
	require.Equal(r.t, make([]error, len(r.slots)), l.Failed())
	return l.(gio.GPULayers)
}

// onMedium compares what the drives hold of a layer with its content.
func (r *orderRig) onMedium(layer int) {
	r.t.Helper()
	want := r.layers[layer]
	for _, slot := range r.slots {
		for _, object := range r.objs[layer] {
			got, _ := r.Stored(slot.Slot, object)
			require.True(r.t, bytes.Equal(want[:len(got)], got), "slot %d object %d", slot.Slot, object)
			want = want[len(got):]
		}
	}
}

// eachWorld is every executor on the fake, and on the machine's GPU.
func eachWorld(t *testing.T, f func(t *testing.T, w *world, polling bool)) {
	t.Run("fake", func(t *testing.T) { eachExecutor(t, onFake, f) })
	t.Run("gpu", func(t *testing.T) { eachExecutor(t, gpuWorld, f) })
}

// eachStore is eachWorld by way of the lanes' cells, and where there is one of a store buffer.
func eachStore(t *testing.T, f func(t *testing.T, w *world, polling, buffer bool)) {
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		t.Run("cells", func(t *testing.T) { f(t, w, polling, false) })
		if !polling {
			t.Run("buffer", func(t *testing.T) { f(t, w, polling, true) })
		}
	})
}

// A load waits for the last reader of its target (invariant n).
func TestGPULoadWaitsForReader(t *testing.T) {
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		r := newOrderRig(t, w, polling, false)
		r.store()
		r.set(0, 0xee)
		l := r.open()
		r.holdEngine(nothing)
		ticket, err := l.RetrieveLayerAfter(0, r.desc[0], r.event)
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond) // for bytes that do not wait
		require.True(t, bytes.Equal(bytes.Repeat([]byte{0xee}, len(r.layers[0])), r.memory(0)),
			"the target was changed before its reader was done")
		r.release()
		require.NoError(t, ticket.Wait())
		require.Equal(t, make([]error, len(r.slots)), l.Failed())
		require.True(t, bytes.Equal(r.layers[0], r.memory(0)))
	})
}

// Compute waits for a load: what is enqueued after WaitOn reads the layer's bytes, however late the drives are.
func TestGPUComputeWaitsForLoad(t *testing.T) {
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		r := newOrderRig(t, w, polling, false)
		r.store()
		l := r.open()
		r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Delay: time.Millisecond} })
		for layer := range r.layers {
			r.set(layer, 0xee)
			n := len(r.layers[layer])
			seen, err := w.Alloc(n)
			require.NoError(t, err)
			ticket, err := l.RetrieveLayerAfter(uint16(layer), r.desc[layer], nil)
			require.NoError(t, err)
			r.do(func() error {
				if err := ticket.WaitOn(r.engine); err != nil {
					return err
				}
				err := r.engine.CopyDtoD(cuda.Pointer(seen), cuda.Pointer(r.at[layer]), uint64(n))
				if err != nil {
					return err
				}
				return r.engine.Synchronize()
			})
			got := make([]byte, n)
			require.NoError(t, w.Download(got, seen))
			require.NoError(t, w.Free(seen))
			require.True(t, bytes.Equal(r.layers[layer], got), "layer %d", layer)
			require.NoError(t, ticket.Wait())
		}
		require.Equal(t, make([]error, len(r.slots)), l.Failed())
	})
}

// A store waits for the compute that produced it (invariant n), and what is enqueued after WaitOn may use the memory
// again.
func TestGPUStoreWaitsForCompute(t *testing.T) {
	eachStore(t, func(t *testing.T, w *world, polling, buffer bool) {
		r := newOrderRig(t, w, polling, buffer)
		l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
		require.NoError(t, err)
		defer l.Close()
		for layer := range r.layers {
			r.set(layer, 0xee)
			n := uint64(len(r.layers[layer]))
			produced, err := w.Alloc(int(n))
			require.NoError(t, err)
			require.NoError(t, w.Upload(produced, r.layers[layer]))
			r.holdEngine(func() error {
				return r.engine.CopyDtoD(cuda.Pointer(r.at[layer]), cuda.Pointer(produced), n)
			})
			ticket, err := l.(gio.GPULayers).StoreLayerAfter(uint16(layer), r.desc[layer], r.event)
			require.NoError(t, err)
			time.Sleep(5 * time.Millisecond) // for a store that does not wait
			r.release()
			r.do(func() error {
				if err := ticket.WaitOn(r.engine); err != nil {
					return err
				}
				return r.engine.Memset(cuda.Pointer(r.at[layer]), 0x11, n)
			})
			require.NoError(t, ticket.Wait())
			r.do(r.engine.Synchronize)
			require.NoError(t, w.Free(produced))
		}
		require.NoError(t, l.Finish())
		for layer := range r.layers {
			r.onMedium(layer)
		}
		r.checkRestores()
	})
}

// checkRestores reads everything back by the trailers.
func (r *orderRig) checkRestores() {
	r.t.Helper()
	l := r.open()
	for layer := range r.layers {
		ticket, err := l.RetrieveLayer(uint16(layer), r.desc[layer])
		require.NoError(r.t, err)
		require.NoError(r.t, ticket.Wait())
		require.True(r.t, bytes.Equal(r.layers[layer], r.memory(layer)), "layer %d", layer)
	}
	require.Equal(r.t, make([]error, len(r.slots)), l.Failed())
}

// The blocks of a store are free at once, however long the drives hold its writes back. The polling executor knows no
// such buffer: its kernels copy into the cells of commands.
func TestGPUStoreFreesItsBlocks(t *testing.T) {
	eachStore(t, func(t *testing.T, w *world, polling, buffer bool) {
		if polling {
			t.Skip("it has no staging")
		}
		r := newOrderRig(t, w, polling, buffer)
		l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
		require.NoError(t, err)
		defer l.Close()
		var shut atomic.Bool
		shut.Store(true)
		r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Hold: func() bool { return !shut.Load() }} })
		var tickets []gio.LayerTicket
		for layer := range r.layers {
			require.NoError(t, w.Upload(r.at[layer], r.layers[layer]))
			ticket, err := l.(gio.GPULayers).StoreLayerAfter(uint16(layer), r.desc[layer], nil)
			require.NoError(t, err)
			r.do(func() error {
				if err := ticket.WaitOn(r.engine); err != nil {
					return err
				}
				err := r.engine.Memset(cuda.Pointer(r.at[layer]), 0x11, uint64(len(r.layers[layer])))
				if err != nil {
					return err
				}
				return r.engine.Synchronize()
			})
			if buffer {
				require.NoError(t, ticket.Wait()) // nothing is promised of the drives
			}
			tickets = append(tickets, ticket)
		}
		shut.Store(false)
		for layer, ticket := range tickets {
			if !buffer {
				require.NoError(t, ticket.Wait(), "layer %d", layer)
			}
		}
		require.NoError(t, l.Finish())
		r.checkRestores()
	})
}

// A pool as an engine has it registers at once and costs the device little, and unregistering gives everything back.
func TestGPURegistersLargePools(t *testing.T) {
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		for _, sgl := range []bool{true, false} {
			t.Run(fmt.Sprintf("SGL %v", sgl), func(t *testing.T) { testLargePool(t, w, polling, sgl) })
		}
	})
}

// testLargePool registers 64 layers of K and V for as many blocks as there is memory for, up to 1.5 million tensors.
func testLargePool(t *testing.T, w *world, polling, sgl bool) {
	const layers, tensor, most = 64, 128 << 10, 180 << 30
	blocks := most / (layers * 2 * tensor)
	var free uint64
	require.NoError(t, w.do(func() (err error) { free, _, err = w.context.MemInfo(); return err }))
	blocks = min(blocks, int(free/2/(layers*2*tensor)))
	if w.fake != nil {
		blocks = 64
	}
	s := w.subject(testSeed(t), polling)
	peer := w.fake != nil
	r := giotest.NewRig(t, &s, giotest.Shape{BounceBytes: 1 << 20, SGL: sgl, Peer: peer})
	g := r.Ring.(*gio.GPU)
	p, err := w.Alloc(blocks * layers * 2 * tensor)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Free(p)) })
	pool := gio.Paged{Blocks: uint64(blocks)}
	for layer := range uint64(layers) {
		base, area := p+layer*2*uint64(blocks)*tensor, uint64(blocks)*tensor
		pool.Classes = append(pool.Classes, []cuda.StridedRun{
			{Base: base, Stride: tensor, Bytes: tensor}, {Base: base + area, Stride: tensor, Bytes: tensor},
		})
	}
	before := g.Stats().DeviceBytes
	start := time.Now()
	m, err := g.RegisterPaged(pool)
	require.NoError(t, err)
	tensors := uint64(blocks * layers * 2)
	per := float64(m.DeviceBytes()) / float64(tensors)
	t.Logf("%d tensors of %d KiB in %v, %.1f bytes each", tensors, tensor>>10, time.Since(start), per)
	if sgl {
		require.LessOrEqual(t, per, 24.0)
	} else {
		require.LessOrEqual(t, per, 280.0)
	}
	require.NoError(t, g.Unregister(m))
	require.Equal(t, before, g.Stats().DeviceBytes)
}

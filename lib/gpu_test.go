//go:build cgo

package main

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/engine"
	"tuttifs/gio"
	"tuttifs/stripe"
)

const gpuIdentity = `{"model":"g","revision":"r","weights_epoch":1,"dtype":"bf16","quantisation":"none",` +
	`"scale_format":"none","layout":"NHD","page_bytes":4096,"block_tokens":16,"file_tokens":16,"tp":1,"pp":1,"cp":1,` +
	`"group":"full"}`

const gpuLayers, gpuRun, gpuBlocks, gpuFiles = 3, 6000, 30, 20

// gpuUser is an engine with a GPU, as far as this package knows it, and a pool of K and V in device memory.
type gpuUser struct {
	pool    *pool
	context *cuda.Context
	base    cuda.Pointer
	bytes   []byte // the device memory: a fake's addresses are this process' own
	memory  *memory
	stream  *cuda.Stream
	after   *cuda.Event
}

func newGPUUser(t *testing.T, f *cudatest.Fake, mount string) *gpuUser {
	t.Helper()
	m, err := engine.Open(mount)
	require.NoError(t, err)
	s, err := m.NewSession(engine.SessionOptions{Lanes: 2, Depth: 32, DMABytes: 8 << 20, BounceBytes: 1 << 20,
		Deadline: 20 * time.Second, GPU: &engine.GPUOptions{Driver: f.Driver(), StagingBytes: 4 << 20}})
	require.NoError(t, err)
	spec := engine.PoolSpec{Name: "gpu", Identity: []byte(gpuIdentity), TokensPerFile: 16}
	for layer := range uint16(gpuLayers) {
		spec.Geometry.Objects = append(spec.Geometry.Objects,
			stripe.Object{Layer: layer, Runs: []stripe.Run{{Bytes: gpuRun}, {Bytes: gpuRun}}})
	}
	p, err := s.OpenPool(spec)
	require.NoError(t, err)
	u := &gpuUser{pool: &pool{Pool: p, session: &session{Session: s}}, context: s.CUDA()}
	total := uint64(2 * gpuLayers * gpuBlocks * gpuRun)
	u.bound(t, func() {
		u.base, err = u.context.Alloc(total)
		require.NoError(t, err)
		u.stream, err = u.context.NewStream(0)
		require.NoError(t, err)
		u.after, err = u.context.NewEvent(false)
		require.NoError(t, err)
	})
	u.bytes = unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&u.base))), total)
	var runs [][]cuda.StridedRun
	for layer := range uint64(gpuLayers) {
		var class []cuda.StridedRun
		for kv := range uint64(2) { // as [2, blocks, ...] of each layer
			base := uint64(u.base) + (2*layer+kv)*gpuBlocks*gpuRun
			class = append(class, cuda.StridedRun{Base: base, Stride: gpuRun, Bytes: gpuRun})
		}
		runs = append(runs, class)
	}
	u.memory, err = registerPaged(u.pool.session, runs, gpuBlocks)
	require.NoError(t, err)
	require.Len(t, u.memory.registrations(), 1)
	require.Positive(t, u.memory.registrations()[0].DeviceBytes())
	t.Cleanup(func() {
		require.NoError(t, u.memory.unregister())
		u.bound(t, func() {
			require.NoError(t, u.after.Close())
			require.NoError(t, u.stream.Close())
			require.NoError(t, u.context.Free(u.base))
		})
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
	})
	return u
}

// bound runs f on a thread that has the GPU's context.
func (u *gpuUser) bound(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, u.context.Bind())
	f()
	require.NoError(t, u.context.Unbind())
}

// move brings all layers of leases to or from blocks, behind an event and before the stream's next work.
func (u *gpuUser) move(t *testing.T, store bool, grants []engine.Grant, blocks []uint64) {
	t.Helper()
	var slots []gio.SlotIO
	for _, g := range grants {
		slots = append(slots, gio.SlotIO{Slot: g.Slot, Seed: g.Seed})
	}
	l, err := openLayers(u.pool, 0, store, slots, u.memory, blocks)
	require.NoError(t, err)
	u.bound(t, func() { require.NoError(t, u.after.Record(u.stream)) })
	var transfers []*transfer
	for layer := range uint16(gpuLayers) {
		x, err := l.begin(layer, l.blockDescs(layer), u.after.Handle())
		require.NoError(t, err)
		transfers = append(transfers, x)
	}
	for _, x := range transfers {
		require.NoError(t, x.waitOn(u.stream.Handle()))
		require.NoError(t, x.wait())
	}
	u.bound(t, func() { require.NoError(t, u.stream.Synchronize()) })
	require.Equal(t, make([]error, len(grants)), l.Failed())
	if store {
		require.NoError(t, l.Finish())
	}
	require.NoError(t, l.close())
	_, err = l.begin(0, nil, 0)
	require.ErrorIs(t, err, errHandle)
}

// TestGPU stores from scattered K and V of device memory, and restores to other blocks.
func TestGPU(t *testing.T) {
	mount := newMount(t)
	f := cudatest.Start(t, cudatest.Config{Kernels: cudatest.Kernels(), Jitter: 50 * time.Microsecond})
	u := newGPUUser(t, f, mount)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range u.bytes {
		u.bytes[i] = byte(random.Uint32())
	}
	want := append([]byte(nil), u.bytes...)
	keys, items := make([]engine.Key, gpuFiles), make([]engine.Item, gpuFiles)
	for i := range keys {
		keys[i][0] = byte(i + 1)
		items[i] = engine.Item{Key: keys[i], Tokens: 16, Position: uint32(i)}
		if i > 0 {
			items[i].Parent = keys[i-1]
		}
	}
	var from, to []uint64
	for _, b := range random.Perm(gpuBlocks)[:gpuFiles] {
		from = append(from, uint64(b))
	}
	for _, b := range random.Perm(gpuBlocks)[:gpuFiles] {
		to = append(to, uint64(b))
	}
	grants := make([]engine.Grant, gpuFiles)
	_, err := u.pool.Reserve(0, 1, items, false, grants)
	require.NoError(t, err)
	u.move(t, true, grants, from)
	require.NoError(t, u.pool.Commit(1, 0))
	u.bound(t, func() {
		require.NoError(t, u.stream.Memset(u.base, 0xee, uint64(len(u.bytes))))
		require.NoError(t, u.stream.Synchronize())
	})
	n, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	require.Equal(t, gpuFiles, n)
	u.move(t, false, grants, to)
	require.NoError(t, u.pool.Release(2))
	for array := range 2 * gpuLayers {
		for i := range keys {
			at := func(block uint64) int { return (array*gpuBlocks + int(block)) * gpuRun }
			got := u.bytes[at(to[i]) : at(to[i])+gpuRun]
			require.Equal(t, want[at(from[i]):at(from[i])+gpuRun], got, "array %d file %d", array, i)
		}
	}
	_, err = openLayers(u.pool, 0, false, make([]gio.SlotIO, 1), u.memory, []uint64{gpuBlocks})
	require.ErrorIs(t, err, engine.ErrInvalid)
}

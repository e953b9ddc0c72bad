//go:build !nogpu

package cudatest

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// gpu is the first GPU of this machine, bound to the test's thread, with the ring's kernels.
type gpu struct {
	t       testing.TB
	context *cuda.Context
	module  *cuda.Module
	stream  *cuda.Stream
}

func openGPU(t testing.TB) *gpu {
	t.Helper()
	d, err := cuda.Open()
	if err != nil {
		t.Skip(err)
	}
	device, err := d.Device(0)
	require.NoError(t, err)
	c, err := device.Primary()
	require.NoError(t, err)
	runtime.LockOSThread()
	require.NoError(t, c.Bind())
	g := &gpu{t: t, context: c}
	g.module, err = c.LoadModule(cuda.RingPTX)
	require.NoError(t, err)
	g.stream, err = c.NewStream(0)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, g.stream.Close())
		require.NoError(t, g.module.Close())
		require.NoError(t, c.Unbind())
		require.NoError(t, c.Close())
		runtime.UnlockOSThread()
	})
	return g
}

// pinned is host memory that the GPU knows by the host's own address.
func (g *gpu) pinned(n int) []byte {
	g.t.Helper()
	m, err := g.context.AllocHost(n, false)
	require.NoError(g.t, err)
	g.t.Cleanup(func() { require.NoError(g.t, g.context.FreeHost(m)) })
	require.EqualValues(g.t, uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes))), m.GPU)
	return m.Bytes
}

func (g *gpu) device(n uint64) uint64 {
	g.t.Helper()
	p, err := g.context.Alloc(n)
	require.NoError(g.t, err)
	g.t.Cleanup(func() { require.NoError(g.t, g.context.Free(p)) })
	return uint64(p)
}

// launch is a launcher. Subtests run on threads of their own, so it binds its own.
func (g *gpu) launch(kernel string, grid, block uint32, params unsafe.Pointer) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(g.t, g.context.Bind())
	f, err := g.module.Function(kernel)
	require.NoError(g.t, err)
	require.NoError(g.t, g.stream.Launch(f, grid, block, 0, params))
	require.NoError(g.t, g.stream.Synchronize())
}

func TestGPUKernels(t *testing.T) {
	g := openGPU(t)
	compare(t, g.pinned(worldBytes), g.launch, 40, []uint32{32, 256, 512, 1024})
}

func TestGPUPoll(t *testing.T) {
	g := openGPU(t)
	memory := g.pinned(worldBytes)
	comparePoll(t, memory, g.launch, 30, []uint32{32, 256, 1024})
	pollFaults(t, memory, g.launch, 1024)
}

const (
	benchBatch   = 64 << 20 // of a launch
	benchBatches = 4        // more than the caches hold
)

// benchMoves is objects of one size, each in two runs, scattered over device memory, and their staging.
type benchMoves struct {
	params [benchBatches]cuda.HarvestParams
}

// upload is a slice in device memory.
func upload[T any](g *gpu, s []T) uint64 {
	n := uint64(len(s)) * uint64(unsafe.Sizeof(s[0]))
	b := g.pinned(int(n))
	copy(b, unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), n))
	p := g.device(n)
	require.NoError(g.t, g.stream.CopyHtoD(cuda.Pointer(p), unsafe.Pointer(&b[0]), n))
	require.NoError(g.t, g.stream.Synchronize())
	return p
}

func (g *gpu) benchMoves(size uint32) *benchMoves {
	n := uint32(benchBatch / size)
	w := &world{memory: g.pinned(32 << 20), random: rand.New(rand.NewPCG(1, 2))}
	m := &benchMoves{}
	targets, staging := g.device(benchBatches*benchBatch), g.device(benchBatches*benchBatch)
	fill := g.pinned(benchBatch)
	_, _ = rand.NewChaCha8([32]byte{}).Read(fill)
	for i := range uint64(benchBatches) {
		require.NoError(g.t, g.stream.CopyHtoD(cuda.Pointer(targets+i*benchBatch), unsafe.Pointer(&fill[0]), benchBatch))
	}
	require.NoError(g.t, g.stream.Synchronize())
	table := make([]cuda.KernelRun, 2*n*benchBatches)
	for i, place := range w.random.Perm(len(table)) {
		table[i] = cuda.KernelRun{Address: targets + uint64(place)*uint64(size/2), Bytes: size / 2}
	}
	regions := make([]cuda.KernelRegion, 2)
	regions[1] = cuda.KernelRegion{
		Base: upload(g, table), Limit: uint64(len(table)), Kind: cuda.RegionTable, Generation: 1,
	}
	tables := cuda.KernelTables{
		Objects:     upload(g, []cuda.KernelObject{{Bytes: size, Units: uint16(size / unitBytes)}}),
		ObjectCount: 1, Regions: upload(g, regions), Width: 1, SlotsPerRow: 1,
	}
	for b := range m.params {
		ctxs, seeds := make([]cuda.KernelIOCTX, n), make([]uint64, 2*n)
		for i := range ctxs {
			ctxs[i].Desc = 1<<(offsetBits+regionBits) | 1<<offsetBits | 2*(uint64(b)*uint64(n)+uint64(i))
			seeds[2*i], seeds[2*i+1] = w.random.Uint64(), w.random.Uint64()
		}
		per := uint32(8<<20) / size
		var chunks []cuda.KernelChunk
		for first := uint32(0); first < n; first += per {
			cells := staging + uint64(b)*benchBatch + uint64(first)*uint64(size)
			chunks = append(chunks, cuda.KernelChunk{Cells: cells, First: first, Count: per})
		}
		m.params[b] = cuda.HarvestParams{
			Tables: tables, Cells: cuda.KernelCells{Offsets: put(w, []uint32{0}), Stride: size, Group: 1},
			Sums: cuda.SumsParams{
				Seeds: put(w, seeds), Sums: put(w, make([]uint64, n)), Ordinals: put(w, []uint16{0}), PerSlot: 1, RankObjs: 1,
			},
			IOCTXs: put(w, ctxs), Chunks: put(w, chunks), Outcomes: put(w, make([]uint8, n)), Done: put(w, []uint32{0}),
			Blocks:     upload(g, []uint32{0}),
			ChunkCount: uint32(len(chunks)),
		}
	}
	return m
}

// requireOK looks at all outcomes.
func (m *benchMoves) requireOK(t testing.TB, size uint32) {
	t.Helper()
	for i := range m.params {
		for _, o := range bytesAt(m.params[i].Outcomes, benchBatch/size) {
			require.Equal(t, cuda.OutcomeOK, o)
		}
	}
}

// BenchmarkGPUMoves is a launch of harvest and gather over 64 MiB, by object size, grid, block and with sums or not. A
// byte moved is read once and written once. SM-us is what a launch takes from whatever else runs: SMs times duration.
func BenchmarkGPUMoves(b *testing.B) {
	g := openGPU(b)
	for _, size := range []uint32{32 << 10, 64 << 10, 128 << 10} {
		m := g.benchMoves(size)
		for i := range m.params { // fills in the staging and the sums
			g.launch("tuttifs_gather", 32, cuda.MoveThreads, unsafe.Pointer(&m.params[i]))
		}
		for _, kernel := range []string{"harvest", "gather"} {
			f, err := g.module.Function("tuttifs_" + kernel)
			require.NoError(b, err)
			for _, grid := range []uint32{8, 16, 32, 64, 132} {
				for _, block := range []uint32{128, cuda.MoveThreads} {
					for _, sums := range []bool{false, true} {
						name := fmt.Sprintf("%s/%dKiB/%dx%d/sums=%v", kernel, size>>10, grid, block, sums)
						b.Run(name, func(b *testing.B) { g.benchMove(b, m, f, grid, block, sums) })
					}
				}
			}
		}
		m.requireOK(b, size)
	}
}

func (g *gpu) benchMove(b *testing.B, m *benchMoves, f *cuda.Function, grid, block uint32, sums bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(b, g.context.Bind())
	params := m.params
	for i := range params {
		if !sums {
			params[i].Sums = cuda.SumsParams{}
		}
	}
	for i := range b.N {
		require.NoError(b, g.stream.Launch(f, grid, block, 0, unsafe.Pointer(&params[i%benchBatches])))
	}
	require.NoError(b, g.stream.Synchronize())
	seconds := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(seconds*1e6, "us")
	b.ReportMetric(benchBatch/1e9/seconds, "GB/s")
	b.ReportMetric(seconds*1e6*float64(grid), "SM-us")
}

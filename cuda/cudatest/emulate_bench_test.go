//go:build !nogpu

package cudatest

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// The kernels of bench.cu compute what their mirrors do.
func TestEmulatedBenchKernels(t *testing.T) {
	run := emulator(t)
	random := rand.New(rand.NewPCG(1, 2))
	halves := func(n int) []uint16 {
		h := onHeap[uint16](t, n)
		for i := range h {
			h[i] = toBF16(float32(random.NormFloat64()))
		}
		return h
	}
	t.Run("fill", func(t *testing.T) {
		got := onHeap[uint64](t, 1000)
		run("tuttifs_bench_fill", 3, 64, unsafe.Pointer(&cuda.BenchFillParams{Dst: addressOf(got), Words: 999, Salt: 7,
			Keep: cuda.BenchKeepBF16, Set: cuda.BenchSetBF16}))
		for i, w := range got[:999] {
			require.Equal(t, cuda.BenchWord(7, uint64(i), cuda.BenchKeepBF16, cuda.BenchSetBF16), w)
		}
		require.Zero(t, got[999])
	})
	t.Run("step", func(t *testing.T) {
		const rows = 21
		x, got, want := onHeap[float32](t, cuda.BenchStepWidth), onHeap[float32](t, rows), onHeap[float32](t, rows)
		for i := range x {
			x[i] = float32(random.NormFloat64())
		}
		p := &cuda.BenchStepParams{Weights: addressOf(halves(rows * cuda.BenchStepWidth)), X: addressOf(x), Rows: rows}
		p.Y = addressOf(want)
		benchStep(p)
		p.Y = addressOf(got)
		run("tuttifs_bench_step", 2, 128, unsafe.Pointer(p))
		require.InDeltaSlice(t, want, got, 0.01)
	})
	// Queries that see all of some tiles and parts of others, for heads of which two share keys.
	for _, kernel := range []string{"tuttifs_bench_attention", "tuttifs_bench_attention_plain"} {
		t.Run(kernel, func(t *testing.T) {
			const tokens, context, heads, kvHeads, n = 128, 192, 4, 2, 128 * 4 * cuda.BenchHead
			p := &cuda.BenchAttentionParams{
				Q: addressOf(halves(n)), K: addressOf(halves(context * kvHeads * cuda.BenchHead)),
				V:      addressOf(halves(context * kvHeads * cuda.BenchHead)),
				Tokens: tokens, Context: context, Heads: heads, KVHeads: kvHeads, Scale: 0.3,
			}
			got, want := onHeap[uint16](t, n), onHeap[uint16](t, n)
			p.Out = addressOf(want)
			attention(p)
			p.Out = addressOf(got)
			grid, block := uint32(tokens/cuda.BenchQueries*heads), uint32(256)
			if kernel == "tuttifs_bench_attention_plain" {
				grid, block = tokens*heads, cuda.BenchHead
			}
			run(kernel, grid, block, unsafe.Pointer(p))
			for i := range got {
				// A weight near 1 is rounded to 8 bits, and so is the result.
				g, w := float64(fromBF16(got[i])), float64(fromBF16(want[i]))
				require.InDelta(t, w, g, 0.02*math.Max(1, math.Abs(w)), "element %d", i)
			}
		})
	}
}

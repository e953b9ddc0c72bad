package cudatest

import (
	"encoding/binary"
	"math"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// The PTX takes what the Go structs are.
func TestBenchParameters(t *testing.T) {
	require.Equal(t, map[string]int{
		"tuttifs_bench_fill":            int(unsafe.Sizeof(cuda.BenchFillParams{})),
		"tuttifs_bench_step":            int(unsafe.Sizeof(cuda.BenchStepParams{})),
		"tuttifs_bench_attention":       int(unsafe.Sizeof(cuda.BenchAttentionParams{})),
		"tuttifs_bench_attention_plain": int(unsafe.Sizeof(cuda.BenchAttentionParams{})),
		"tuttifs_spin":                  8,
	}, entries(string(cuda.BenchPTX)))
	for name := range entries(string(cuda.BenchPTX)) {
		require.Contains(t, BenchKernels(), name)
	}
}

// onHeap is memory on the heap, which stays where it is.
func onHeap[T any](t *testing.T, n int) []T {
	s := make([]T, n)
	t.Cleanup(func() { runtime.KeepAlive(s) })
	return s
}

// addressOf is a slice's, as kernels take it.
func addressOf[T any](s []T) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s)))) }

func TestBenchFill(t *testing.T) {
	words := onHeap[uint64](t, 1000)
	benchFill(&cuda.BenchFillParams{Dst: addressOf(words), Words: 999, Salt: 5, Keep: ^uint64(0)})
	seen := map[uint64]bool{}
	for i, w := range words[:999] {
		require.Equal(t, cuda.BenchWord(5, uint64(i), ^uint64(0), 0), w)
		require.False(t, seen[w])
		seen[w] = true
	}
	require.Zero(t, words[999])
	b := make([]byte, 8)
	for i := range uint64(100) {
		binary.LittleEndian.PutUint64(b, cuda.BenchWord(0, i, cuda.BenchKeepBF16, cuda.BenchSetBF16))
		for k := 0; k < 8; k += 2 {
			x := math.Abs(float64(fromBF16(binary.LittleEndian.Uint16(b[k:]))))
			require.True(t, x >= 0.5 && x < 1, "%v", x)
		}
	}
}

func TestBenchAttention(t *testing.T) {
	const head = cuda.BenchHead
	q, out := onHeap[uint16](t, 2*head), onHeap[uint16](t, 2*head)
	k, v := onHeap[uint16](t, 3*head), onHeap[uint16](t, 3*head)
	for key := range 3 {
		for d := range head {
			v[key*head+d] = toBF16(float32(key + 1))
		}
	}
	// Without scores all keys that are seen weigh the same.
	attention(&cuda.BenchAttentionParams{Q: addressOf(q), K: addressOf(k), V: addressOf(v), Out: addressOf(out),
		Tokens: 2, Context: 3, Heads: 1, KVHeads: 1, Scale: 1})
	require.Equal(t, float32(1.5), fromBF16(out[0]))
	require.Equal(t, float32(2), fromBF16(out[head]))
	// A key like the query outweighs the others.
	for d := range head {
		q[head+d], k[head+d] = toBF16(1), toBF16(1)
	}
	attention(&cuda.BenchAttentionParams{Q: addressOf(q), K: addressOf(k), V: addressOf(v), Out: addressOf(out),
		Tokens: 2, Context: 3, Heads: 1, KVHeads: 1, Scale: 1})
	require.Equal(t, float32(2), fromBF16(out[2*head-1]))
}

package cudatest

import (
	"math"
	"unsafe"

	"tuttifs/cuda"
)

// BenchKernels are the kernels of bench.cu in Go.
func BenchKernels() map[string]Kernel {
	return map[string]Kernel{
		"tuttifs_bench_fill":            func(_, _ uint32, p unsafe.Pointer) { benchFill((*cuda.BenchFillParams)(p)) },
		"tuttifs_bench_step":            func(_, _ uint32, p unsafe.Pointer) { benchStep((*cuda.BenchStepParams)(p)) },
		"tuttifs_bench_attention":       func(_, _ uint32, p unsafe.Pointer) { attention((*cuda.BenchAttentionParams)(p)) },
		"tuttifs_bench_attention_plain": func(_, _ uint32, p unsafe.Pointer) { attention((*cuda.BenchAttentionParams)(p)) },
		"tuttifs_spin":                  func(uint32, uint32, unsafe.Pointer) {},
	}
}

// array is n Ts at an address.
func array[T any](address uint64, n int) []T { return unsafe.Slice(at[T](address, 0), n) }

func benchFill(p *cuda.BenchFillParams) {
	dst := array[uint64](p.Dst, int(p.Words))
	for i := range dst {
		dst[i] = cuda.BenchWord(p.Salt, uint64(i), p.Keep, p.Set)
	}
}

func fromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// toBF16 rounds to the nearest, to even between two.
func toBF16(f float32) uint16 {
	u := math.Float32bits(f)
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

func benchStep(p *cuda.BenchStepParams) {
	x, y := array[float32](p.X, cuda.BenchStepWidth), array[float32](p.Y, int(p.Rows))
	weights := array[uint16](p.Weights, len(y)*len(x))
	for row := range y {
		sum := float32(0)
		for i, w := range weights[row*len(x) : (row+1)*len(x)] {
			sum += fromBF16(w) * x[i]
		}
		y[row] = sum
	}
}

// numbers are n bf16 numbers at an address.
//
//go:norace
func numbers(address uint64, n int) []float32 {
	all := make([]float32, n)
	for i, h := range array[uint16](address, n) {
		all[i] = fromBF16(h)
	}
	return all
}

//go:norace
func attention(p *cuda.BenchAttentionParams) {
	const head = cuda.BenchHead
	tokens, context, heads, kvHeads := int(p.Tokens), int(p.Context), int(p.Heads), int(p.KVHeads)
	q, out := array[uint16](p.Q, tokens*heads*head), array[uint16](p.Out, tokens*heads*head)
	k, v := numbers(p.K, context*kvHeads*head), numbers(p.V, context*kvHeads*head)
	weights := make([]float32, context)
	for i := range tokens * heads {
		seen := context - tokens + i/heads + 1
		kvHead := i % heads / (heads / kvHeads)
		most := float32(math.Inf(-1))
		var query [head]float32
		for d := range query {
			query[d] = fromBF16(q[i*head+d])
		}
		for key := range seen {
			at, dot := (key*kvHeads+kvHead)*head, float32(0)
			for d, h := range k[at : at+head] {
				dot += query[d] * h
			}
			weights[key] = dot * p.Scale
			most = max(most, weights[key])
		}
		var sums [head]float32
		total := float32(0)
		for key := range seen {
			w := float32(math.Exp(float64(weights[key] - most)))
			total += w
			at := (key*kvHeads + kvHead) * head
			for d, h := range v[at : at+head] {
				sums[d] += w * h
			}
		}
		for d := range sums {
			out[i*head+d] = toBF16(sums[d] / total)
		}
	}
}

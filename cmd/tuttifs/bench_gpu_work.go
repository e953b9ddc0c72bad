package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"
	"unsafe"

	"tuttifs/cuda"
)

// gpuWork is compute that transfers are measured beside.
type gpuWork struct {
	name   string
	launch func(s *cuda.Stream) error // enqueues it once
	close  func() error
	once   time.Duration // about how long it takes
}

// within runs f with another context bound to the thread.
func (b *gpuBench) within(context *cuda.Context, f func() error) error {
	if context == b.gpu.context {
		return f()
	}
	if err := context.Bind(); err != nil {
		return err
	}
	return errors.Join(f(), b.gpu.context.Bind())
}

// works are the kinds of compute, ready to run in a context. What cannot be had is noted.
func (b *gpuBench) works(context *cuda.Context) (works []*gpuWork, err error) {
	gemm, err := b.gemmWork(context)
	switch {
	case errors.Is(err, cuda.ErrNoLibrary):
		b.report.note("no GEMM: %v", err)
	case err != nil:
		return nil, err
	default:
		works = append(works, gemm)
	}
	attention, err := b.attentionWork(context)
	if err != nil {
		return nil, errors.Join(err, closeWorks(works))
	}
	works = append(works, attention)
	for _, w := range works {
		if err := b.calibrate(context, w); err != nil {
			return nil, errors.Join(err, closeWorks(works))
		}
	}
	return works, nil
}

func closeWorks(works []*gpuWork) error {
	var errs []error
	for _, w := range works {
		errs = append(errs, w.close())
	}
	return errors.Join(errs...)
}

// calibrate warms the work up and finds out how long it takes.
func (b *gpuBench) calibrate(context *cuda.Context, w *gpuWork) (err error) {
	t, err := b.newTimer(context)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	const times = 4
	for range 2 {
		d, err := t.run(w, times)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		w.once = d / times
	}
	return nil
}

// gemmWork is C = A B of large bf16 matrices. cuBLAS chooses its kernels by the context that it is opened in.
func (b *gpuBench) gemmWork(context *cuda.Context) (*gpuWork, error) {
	var blas *cuda.BLAS
	err := b.within(context, func() (err error) {
		blas, err = cuda.OpenBLAS()
		return err
	})
	if err != nil {
		return nil, err
	}
	n := b.o.scale.gemm
	memory := &deviceMemory{gpu: b.gpu}
	w := &gpuWork{
		name:  fmt.Sprintf("GEMM %d", n),
		close: func() error { return errors.Join(b.within(context, blas.Close), memory.free()) },
	}
	var m [3]cuda.Pointer
	for i := range m {
		if m[i], err = memory.numbers(uint64(n) * uint64(n) * 2); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	w.launch = func(s *cuda.Stream) error { return blas.MultiplyBF16(s, n, m[0], m[1], m[2]) }
	return w, nil
}

// attentionWork is the attention of a prefill with a cached prefix. Its kernel is checked first.
func (b *gpuBench) attentionWork(context *cuda.Context) (w *gpuWork, err error) {
	if !b.checked {
		if err := b.checkAttention(); err != nil {
			return nil, err
		}
		b.checked = true
	}
	memory := &deviceMemory{gpu: b.gpu}
	tokens, cached := b.o.scale.tokens, b.o.scale.cached
	p, err := newAttention(memory, tokens, tokens+cached, b.o.scale.heads, b.o.scale.kvHeads)
	if err != nil {
		return nil, errors.Join(err, memory.free())
	}
	w = &gpuWork{name: fmt.Sprintf("attention %d on %d", tokens, cached), close: memory.free}
	kernel := b.gpu.attention
	if context != b.gpu.context {
		if kernel, err = b.kernelIn(context, w); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	w.launch = func(s *cuda.Stream) error { return launchAttention(s, kernel, p) }
	return w, nil
}

// kernelIn loads the attention kernel in another context, until the work is closed.
func (b *gpuBench) kernelIn(context *cuda.Context, w *gpuWork) (kernel *cuda.Function, err error) {
	err = b.within(context, func() error {
		module, err := context.LoadModule(cuda.BenchPTX)
		if err != nil {
			return err
		}
		free := w.close
		w.close = func() error { return errors.Join(b.within(context, module.Close), free()) }
		kernel, err = module.Function(b.gpu.attention.Name())
		return err
	})
	return kernel, err
}

func newAttention(memory *deviceMemory, tokens, context, heads, kvHeads int) (*cuda.BenchAttentionParams, error) {
	p := &cuda.BenchAttentionParams{
		Tokens: uint32(tokens), Context: uint32(context), Heads: uint32(heads), KVHeads: uint32(kvHeads),
		Scale: float32(1 / math.Sqrt(cuda.BenchHead)),
	}
	q, kv := uint64(tokens*heads*cuda.BenchHead*2), uint64(context*kvHeads*cuda.BenchHead*2)
	for _, m := range []struct {
		to *uint64
		n  uint64
	}{{&p.Q, q}, {&p.K, kv}, {&p.V, kv}, {&p.Out, q}} {
		at, err := memory.numbers(m.n)
		if err != nil {
			return nil, err
		}
		*m.to = uint64(at)
	}
	return p, nil
}

func launchAttention(s *cuda.Stream, kernel *cuda.Function, p *cuda.BenchAttentionParams) error {
	const threads = 256
	return s.Launch(kernel, p.Tokens/cuda.BenchQueries*p.Heads, threads, 0, unsafe.Pointer(p))
}

// checkAttention compares the kernel with a plain one on a small shape: several blocks of queries and tiles of keys,
// some of them behind the queries.
func (b *gpuBench) checkAttention() error {
	const tokens, context, heads, kvHeads = 2 * cuda.BenchQueries, 7 * cuda.BenchKeys, 4, 2
	memory := &deviceMemory{gpu: b.gpu}
	p, err := newAttention(memory, tokens, context, heads, kvHeads)
	if err != nil {
		return errors.Join(err, memory.free())
	}
	const n = tokens * heads * cuda.BenchHead * 2
	got, want := b.scratch.Bytes[:n], b.scratch.Bytes[n:2*n]
	err = errors.Join(
		launchAttention(b.gpu.stream, b.gpu.attention, p),
		b.gpu.read(got, cuda.Pointer(p.Out)),
		b.gpu.set(cuda.Pointer(p.Out), 0xff, uint64(len(want))),
		b.gpu.stream.Launch(b.gpu.plain, p.Tokens*p.Heads, cuda.BenchHead, 0, unsafe.Pointer(p)),
		b.gpu.read(want, cuda.Pointer(p.Out)),
		memory.free(),
	)
	if err != nil {
		return err
	}
	// Weights are rounded to bf16 on one of the two ways, and results on both: 8 bits each.
	const tolerance = 1.0 / 512
	for i := 0; i < len(got); i += 2 {
		g, w := bf16(got[i:]), bf16(want[i:])
		if diff := math.Abs(g - w); !(diff <= tolerance) {
			return fmt.Errorf("%w: the attention kernel computes %v where a plain one computes %v (element %d)",
				errGPUBytes, g, w, i/2)
		}
	}
	return nil
}

func bf16(b []byte) float64 {
	return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16))
}

// gpuTimer times work by events of its own stream.
type gpuTimer struct {
	bench      *gpuBench
	context    *cuda.Context
	stream     *cuda.Stream
	begin, end *cuda.Event
}

func (b *gpuBench) newTimer(context *cuda.Context) (t *gpuTimer, err error) {
	t = &gpuTimer{bench: b, context: context}
	err = b.within(context, func() (err error) {
		if t.stream, err = context.NewStream(0); err != nil {
			return err
		}
		if t.begin, err = context.NewEvent(true); err != nil {
			return err
		}
		t.end, err = context.NewEvent(true)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

func (t *gpuTimer) close() error {
	return t.bench.within(t.context, func() error {
		var errs []error
		for _, e := range []*cuda.Event{t.begin, t.end} {
			if e != nil {
				errs = append(errs, e.Close())
			}
		}
		if t.stream != nil {
			errs = append(errs, t.stream.Close())
		}
		return errors.Join(errs...)
	})
}

// run does the work n times and returns how long it took.
func (t *gpuTimer) run(w *gpuWork, n int) (d time.Duration, err error) {
	err = t.bench.within(t.context, func() error {
		if err := t.begin.Record(t.stream); err != nil {
			return err
		}
		for range n {
			if err := w.launch(t.stream); err != nil {
				return err
			}
		}
		if err := errors.Join(t.end.Record(t.stream), t.end.Synchronize()); err != nil {
			return err
		}
		ms, err := t.end.Elapsed(t.begin)
		d = time.Duration(float64(ms) * float64(time.Millisecond))
		return err
	})
	return d, err
}

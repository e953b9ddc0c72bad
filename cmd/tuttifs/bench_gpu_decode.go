package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
	"unsafe"

	"tuttifs/cuda"
)

// Bars of a decode-like step beside a restore, in microseconds more.
const (
	gpuStepBar50 = 40
	gpuStepBar99 = 120
)

// gpuDecode is a decode-like step alone and beside a way of transfers.
type gpuDecode struct {
	Way      string  `json:"way"`
	Steps    int     `json:"steps"`
	Alone50  float64 `json:"alone_p50_us"`
	Alone99  float64 `json:"alone_p99_us"`
	Beside50 float64 `json:"beside_p50_us"`
	Beside99 float64 `json:"beside_p99_us"`
	GBs      float64 `json:"gb_per_second"`
	Ours     bool    `json:"ours"`
	Verified bool    `json:"verified"`
}

// gpuStep is a decode-like step: a small upload, a kernel that is bound by HBM, and a read-back that the next step
// would wait for.
type gpuStep struct {
	gpu    *gpuDevice
	memory deviceMemory
	stream *cuda.Stream
	in     *cuda.HostMemory
	out    *cuda.HostMemory
	params cuda.BenchStepParams
	salt   uint64 // of the weights
}

const (
	stepUpload   = cuda.BenchStepWidth * 4
	stepReadBack = 16
)

func (b *gpuBench) newStep() (s *gpuStep, err error) {
	s = &gpuStep{gpu: b.gpu, memory: deviceMemory{gpu: b.gpu}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
			s = nil
		}
	}()
	context := b.gpu.context
	if s.stream, err = context.NewStream(0); err != nil {
		return s, err
	}
	if s.in, err = context.AllocHost(stepUpload, false); err != nil {
		return s, err
	}
	if s.out, err = context.AllocHost(stepReadBack, false); err != nil {
		return s, err
	}
	rows := b.o.scale.stepRows
	s.params.Rows = uint32(rows)
	weights, err := s.memory.alloc(uint64(rows) * cuda.BenchStepWidth * 2)
	if err != nil {
		return s, err
	}
	err = b.gpu.fillDevice(weights, uint64(rows)*cuda.BenchStepWidth*2, s.salt, cuda.BenchKeepBF16, cuda.BenchSetBF16)
	if err != nil {
		return s, err
	}
	x, err := s.memory.alloc(stepUpload)
	if err != nil {
		return s, err
	}
	y, err := s.memory.alloc(uint64(rows) * 4)
	if err != nil {
		return s, err
	}
	s.params.Weights, s.params.X, s.params.Y = uint64(weights), uint64(x), uint64(y)
	return s, nil
}

func (s *gpuStep) close() error {
	var errs []error
	if s.stream != nil {
		errs = append(errs, s.stream.Close())
	}
	for _, m := range []*cuda.HostMemory{s.in, s.out} {
		if m != nil {
			errs = append(errs, s.gpu.context.FreeHost(m))
		}
	}
	return errors.Join(append(errs, s.memory.free())...)
}

// run makes steps, of which each depends on the one before it.
func (s *gpuStep) run(n int) (times []float64, err error) {
	const threads = 256
	grid := max(1, min(s.params.Rows/(threads/32), uint32(s.gpu.device.SMs()*8)))
	for i := range n {
		for k := 0; k < stepUpload; k += 4 {
			binary.LittleEndian.PutUint32(s.in.Bytes[k:], math.Float32bits(stepInput(i, k/4)))
		}
		begin := time.Now()
		err := errors.Join(
			s.stream.CopyHtoD(cuda.Pointer(s.params.X), unsafe.Pointer(&s.in.Bytes[0]), stepUpload),
			s.stream.Launch(s.gpu.step, grid, threads, 0, unsafe.Pointer(&s.params)),
			s.stream.CopyDtoH(unsafe.Pointer(&s.out.Bytes[0]), cuda.Pointer(s.params.Y), stepReadBack),
			s.stream.Synchronize(),
		)
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(begin).Seconds()*1e6)
	}
	return times, s.check(n - 1)
}

// stepInput is an element of a step's upload.
func stepInput(step, i int) float32 { return float32((step+i)%7 - 3) }

// check computes the first rows of the last step.
func (s *gpuStep) check(step int) error {
	for row := range stepReadBack / 4 {
		want := 0.0
		for i := range cuda.BenchStepWidth {
			at := row*cuda.BenchStepWidth + i
			word := cuda.BenchWord(s.salt, uint64(at/4), cuda.BenchKeepBF16, cuda.BenchSetBF16)
			w := math.Float32frombits(uint32(word>>(at%4*16)) << 16)
			want += float64(w) * float64(stepInput(step, i))
		}
		got := float64(math.Float32frombits(binary.LittleEndian.Uint32(s.out.Bytes[row*4:])))
		const tolerance = 0.1 // thousands of additions of single precision
		if diff := math.Abs(got - want); !(diff <= tolerance) {
			return fmt.Errorf("%w: the decode step computes %v where it should %v (row %d)", errGPUBytes, got, want, row)
		}
	}
	return nil
}

// quantile of sorted figures.
func quantile(sorted []float64, q float64) float64 {
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// decode measures decode-like steps beside a restore by the ring, and by other ways.
func (b *gpuBench) decode() (err error) {
	step, err := b.newStep()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, step.close()) }()
	if _, err := step.run(min(200, b.o.scale.steps)); err != nil {
		return err
	}
	err = b.withRig(b.o.shape(gpuObjects[0]), gpuSetup{}, func(r *gpuRig) error {
		return b.stepsBeside(step, b.ringWay(r, "ring", false, true, true))
	})
	if err != nil {
		return err
	}
	row := b.report.Decode[len(b.report.Decode)-1]
	b.report.atMost("decode step's p50 grows by", row.Beside50-row.Alone50, gpuStepBar50, "us")
	b.report.atMost("decode step's p99 grows by", row.Beside99-row.Alone99, gpuStepBar99, "us")
	shape := b.o.shape(gpuObjects[0])
	err = b.withFeed(shape, func(f *gpuFeed) error { return b.stepsBeside(step, b.feedWay(f, copyBatch)) })
	if err != nil {
		return err
	}
	return b.withCopies(shape, func(c *gpuCopies) error {
		for _, kind := range copyKinds {
			if err := b.stepsBeside(step, b.copyWay(c, kind)); err != nil {
				return err
			}
		}
		return nil
	})
}

// stepsBeside takes turns with steps alone and steps beside a way.
func (b *gpuBench) stepsBeside(step *gpuStep, way *gpuWay) error {
	row := gpuDecode{Way: way.name, Ours: way.ours}
	if err := way.prepare(); err != nil {
		return err
	}
	t := b.begin(way)
	if err := errors.Join(b.stepTurns(&row, step, t), t.end()); err != nil {
		return err
	}
	if err := way.check(); err != nil {
		return err
	}
	row.Verified = true
	b.report.Decode = append(b.report.Decode, row)
	return nil
}

func (b *gpuBench) stepTurns(row *gpuDecode, step *gpuStep, t *gpuTraffic) error {
	nap := func() error {
		time.Sleep(100 * time.Microsecond)
		return nil
	}
	var alone, beside, rates []float64
	for range b.o.scale.rounds {
		times, err := step.run(b.o.scale.steps)
		if err != nil {
			return err
		}
		alone = append(alone, times...)
		if err := b.start(t, nap); err != nil {
			return err
		}
		bytes, at := t.way.bytes(), time.Now()
		times, err = step.run(b.o.scale.steps)
		rates = append(rates, float64(t.way.bytes()-bytes)/time.Since(at).Seconds()/1e9)
		if err := errors.Join(err, b.stop(t, nap)); err != nil {
			return err
		}
		beside = append(beside, times...)
	}
	slices.Sort(alone)
	slices.Sort(beside)
	row.Steps, row.GBs = len(beside), median(rates)
	row.Alone50, row.Alone99 = quantile(alone, 0.5), quantile(alone, 0.99)
	row.Beside50, row.Beside99 = quantile(beside, 0.5), quantile(beside, 0.99)
	return nil
}

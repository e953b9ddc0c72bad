package main

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/cuda"
)

// Bars of the layer verbs, GB/s.
const (
	gpuReadBar  = 50
	gpuWriteBar = 48
)

// gpuRate is a rate of one direction and size.
type gpuRate struct {
	Part        string  `json:"part"`
	Way         string  `json:"way"`
	Verb        string  `json:"verb"`
	ObjectBytes int     `json:"object_bytes"`
	Objects     int     `json:"objects"` // of a layer
	Sums        bool    `json:"sums"`
	GBs         float64 `json:"gb_per_second"`
	Worst       float64 `json:"worst_gb_per_second"`
	CPUMicros   float64 `json:"io_thread_cpu_us_per_16_mib"`
	PollerPerGB float64 `json:"poller_cpu_seconds_per_gb"`
	BusyPerGB   float64 `json:"poller_busy_seconds_per_gb"` // of it with work found
	MovingPerGB float64 `json:"harvest_gather_ms_per_gb"`
	DeviceBytes uint64  `json:"registration_device_bytes,omitempty"`
	Verified    bool    `json:"verified"`
}

func verb(write bool) string {
	if write {
		return "store"
	}
	return "restore"
}

// gpuSample is what a measurement took.
type gpuSample struct {
	bytes   int
	layers  int // how many of them were moved, from the first
	seconds float64
	cpu     time.Duration // of the I/O thread
	poller  time.Duration // of the pollers' threads
	busy    time.Duration // of it with work found
	moving  time.Duration // in which harvests or gathers were under way
}

func (s *gpuSample) rate() float64 { return float64(s.bytes) / s.seconds / 1e9 }

func (s *gpuSample) add(t gpuSample) {
	s.layers = max(s.layers, t.layers)
	s.bytes, s.seconds = s.bytes+t.bytes, s.seconds+t.seconds
	s.cpu, s.moving = s.cpu+t.cpu, s.moving+t.moving
	s.poller, s.busy = s.poller+t.poller, s.busy+t.busy
}

// cpuMicros is microseconds for each 16 MiB.
func (s *gpuSample) cpuMicros() float64 {
	return s.cpu.Seconds() * 1e6 / (float64(s.bytes) / (16 << 20))
}

// sample streams for a time.
func (r *gpuRig) sample(write, sums bool, period time.Duration) (gpuSample, error) {
	return r.sampleLayers(r.allLayers(), write, sums, period)
}

func (r *gpuRig) sampleLayers(span gpuSpan, write, sums bool, period time.Duration) (s gpuSample, err error) {
	layers, err := r.openLayers(write, sums)
	if err != nil {
		return s, err
	}
	if layers != nil {
		defer layers.Close()
	}
	begin, before, poller, busy := time.Now(), r.ring.Stats(), r.pollerTime(), r.busyTime()
	s.bytes, s.layers, err = r.streamLayers(span, write, layers, lasting(begin, period))
	s.seconds = time.Since(begin).Seconds()
	s.poller, s.busy = r.pollerTime()-poller, r.busyTime()-busy
	after := r.ring.Stats()
	s.cpu = time.Duration(after.CPUNanos - before.CPUNanos)
	s.moving = time.Duration(after.MovingNanos - before.MovingNanos)
	return s, err
}

// restoreOnce moves every layer to the poisoned pool and compares.
func (b *gpuBench) restoreOnce(r *gpuRig, sums bool) error {
	if err := r.poison(); err != nil {
		return err
	}
	if err := r.every(false, sums); err != nil {
		return err
	}
	return b.verify(r, r.image.shape.layers)
}

// storeOnce moves every layer of a fresh pool to the drives, with its trailers where there are sums, and compares.
func (b *gpuBench) storeOnce(r *gpuRig, sums bool) error {
	if err := b.refill(r); err != nil {
		return err
	}
	if err := r.every(true, sums); err != nil {
		return err
	}
	if err := b.verify(r, r.image.shape.layers); err != nil {
		return err
	}
	if sums {
		return r.image.checkTrailers()
	}
	r.image.seal() // for restores with sums
	return nil
}

// refill gives the pool other bytes than it and the drives ever had.
func (b *gpuBench) refill(r *gpuRig) error { return b.refillLayers(r, r.allLayers()) }

func (b *gpuBench) refillLayers(r *gpuRig, span gpuSpan) error {
	b.salt++
	layer := r.image.shape.layerBytes()
	at := r.pool + cuda.Pointer(span.first*layer)
	return r.gpu.fillDevice(at, uint64(span.count*layer), 1<<60|b.salt<<40, ^uint64(0), 0)
}

// every moves each layer once.
func (r *gpuRig) every(write, sums bool) error {
	layers, err := r.openLayers(write, sums)
	if err != nil {
		return err
	}
	if layers != nil {
		defer layers.Close()
	}
	left := r.image.shape.layers
	_, done, err := r.stream(write, layers, func() bool { left--; return left >= 0 })
	switch {
	case err != nil:
		return err
	case done != r.image.shape.layers:
		return fmt.Errorf("%d of %d layers were moved", done, r.image.shape.layers)
	case write && layers != nil:
		return layers.Finish()
	}
	return nil
}

// once verifies one direction.
func (b *gpuBench) once(r *gpuRig, write, sums bool) error {
	if write {
		return b.storeOnce(r, sums)
	}
	return b.restoreOnce(r, sums)
}

// rate verifies a direction once, measures it several times, and verifies it again.
func (b *gpuBench) rate(r *gpuRig, part, way string, write, sums bool) (row gpuRate, err error) {
	shape := &r.image.shape
	row = gpuRate{Part: part, Way: way, Verb: verb(write), ObjectBytes: shape.object, Objects: shape.slots, Sums: sums,
		DeviceBytes: r.memory.DeviceBytes()}
	if err := b.once(r, write, sums); err != nil {
		return row, err
	}
	if !write {
		if err := r.poison(); err != nil {
			return row, err
		}
	}
	var all gpuSample
	var rates []float64
	for range b.o.scale.rounds {
		if err := b.ctx.Err(); err != nil {
			return row, err
		}
		s, err := r.sample(write, sums, b.o.scale.period)
		if err != nil {
			return row, err
		}
		all.add(s)
		rates = append(rates, s.rate())
	}
	row.GBs, row.Worst = median(rates), rates[0]
	for _, x := range rates {
		row.Worst = min(row.Worst, x)
	}
	row.CPUMicros, row.PollerPerGB = all.cpuMicros(), perGB(all.poller, float64(all.bytes))
	row.BusyPerGB, row.MovingPerGB = perGB(all.busy, float64(all.bytes)), 1e3*perGB(all.moving, float64(all.bytes))
	err = b.verify(r, all.layers)
	row.Verified = err == nil
	return row, err
}

// withRig runs f with a rig for a shape.
func (b *gpuBench) withRig(shape gpuShape, s gpuSetup, f func(r *gpuRig) error) (err error) {
	image, err := b.image(shape)
	if err != nil {
		return err
	}
	r, err := b.newRig(b.gpu, image, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	return f(r)
}

// image lays a shape over the drives, unless that is what they hold.
func (b *gpuBench) image(shape gpuShape) (*gpuImage, error) {
	if b.last == nil || b.last.shape != shape {
		image, err := b.volume.newImage(shape)
		if err != nil {
			return nil, err
		}
		b.last = image
	}
	return b.last, nil
}

// oneWay is the parts restore and store.
func (b *gpuBench) oneWay(part string, write bool, bar float64) error {
	worst := 0.0
	for i, object := range gpuObjects {
		err := b.withRig(b.o.shape(object), gpuSetup{}, func(r *gpuRig) error {
			for _, sums := range []bool{true, false} {
				row, err := b.rate(r, part, "ring", write, sums)
				if err != nil {
					return err
				}
				b.report.Rates = append(b.report.Rates, row)
				if sums && (i == 0 || row.GBs < worst) {
					worst = row.GBs
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s objects: %w", humanBytes(uint64(object)), err)
		}
	}
	b.report.atLeast(part+" with checksums, worst object size", worst, bar, "GB/s")
	return nil
}

func (b *gpuBench) restore() error { return b.oneWay("restore", false, gpuReadBar) }
func (b *gpuBench) store() error   { return b.oneWay("store", true, gpuWriteBar) }

// gpuSumsCost is what checksums cost.
type gpuSumsCost struct {
	Verb        string  `json:"verb"`
	ObjectBytes int     `json:"object_bytes"`
	With        float64 `json:"gb_per_second_with"`
	Without     float64 `json:"gb_per_second_without"`
	Cost        float64 `json:"cost_percent"`
}

// sums measures the same with checksums and without, in turns.
func (b *gpuBench) sums() error {
	worst := 0.0
	for _, object := range b.o.scale.objects {
		err := b.withRig(b.o.shape(object), gpuSetup{}, func(r *gpuRig) error {
			for _, write := range []bool{false, true} {
				if err := b.once(r, write, true); err != nil {
					return err
				}
				row := gpuSumsCost{Verb: verb(write), ObjectBytes: object}
				one := func(sums bool) func() (float64, error) {
					return func() (float64, error) {
						s, err := r.sample(write, sums, b.o.scale.period/2)
						return s.rate(), err
					}
				}
				with, without, ratio, err := pairs(b.ctx, b.o.scale.rounds, one(true), one(false))
				if err != nil {
					return err
				}
				row.With, row.Without, row.Cost = with, without, 100*(1-ratio)
				worst = max(worst, row.Cost)
				b.report.Sums = append(b.report.Sums, row)
			}
			r.image.seal()
			return nil
		})
		if err != nil {
			return err
		}
	}
	b.report.atMost("checksums cost at worst", worst, 5, "%")
	return nil
}

// descriptors compares SGLs and PRPs.
func (b *gpuBench) descriptors() error {
	for _, object := range b.o.scale.objects {
		for _, prp := range []bool{false, true} {
			way := "SGL"
			if prp {
				way = "PRP"
			}
			err := b.withRig(b.o.shape(object), gpuSetup{prp: prp}, func(r *gpuRig) error {
				for _, write := range []bool{false, true} {
					row, err := b.rate(r, "descriptors", way, write, true)
					if err != nil {
						return err
					}
					b.report.Rates = append(b.report.Rates, row)
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("%s: %w", way, err)
			}
		}
	}
	return nil
}

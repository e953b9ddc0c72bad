package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
)

// gpuSeveralBar is how much of its rate alone every GPU should keep: two reach 1.8 times one GPU's rate.
const gpuSeveralBar = 0.9

// gpuSeveral is restores of several GPUs, each with lanes, pollers and a pool of its own.
type gpuSeveral struct {
	GPUs       int       `json:"gpus"`
	Alone      []float64 `json:"alone_gb_per_second"`
	Together   []float64 `json:"together_gb_per_second"`
	Sum        float64   `json:"sum_gb_per_second"`
	LinksGBs   float64   `json:"links_gb_per_second"`  // the bound by what GPUs do alone
	MemcpyGBs  float64   `json:"memcpy_gb_per_second"` // of all cores: each byte is read and written
	LimitedBy  string    `json:"limited_by"`
	Verified   bool      `json:"verified"`
	ObjectSize int       `json:"object_bytes"`
}

// several measures every GPU alone and all of them together.
func (b *gpuBench) several() (err error) {
	row := gpuSeveral{GPUs: b.o.gpus, ObjectSize: gpuObjects[0]}
	image, err := b.image(b.o.shape(row.ObjectSize))
	if err != nil {
		return err
	}
	var rigs []*gpuRig
	var others []*gpuDevice
	defer func() {
		for _, r := range rigs {
			err = errors.Join(err, r.gpu.context.Bind(), r.close())
		}
		for _, g := range others {
			err = errors.Join(err, g.close())
		}
		err = errors.Join(err, b.gpu.context.Bind())
	}()
	for i := range b.o.gpus {
		gpu := b.gpu
		if i > 0 {
			if gpu, err = openGPUDevice(b.driver, b.o.device+i); err != nil {
				return err
			}
			others = append(others, gpu)
		}
		r, err := b.newRig(gpu, image, gpuSetup{})
		if err != nil {
			return fmt.Errorf("GPU %d: %w", b.o.device+i, err)
		}
		rigs = append(rigs, r)
		if err := b.restoreOnce(r, true); err != nil {
			return fmt.Errorf("GPU %d: %w", b.o.device+i, err)
		}
		if err := r.poison(); err != nil {
			return err
		}
	}
	for _, r := range rigs {
		rate, err := b.together([]*gpuRig{r})
		if err != nil {
			return err
		}
		row.Alone = append(row.Alone, rate[0])
	}
	if row.Together, err = b.together(rigs); err != nil {
		return err
	}
	for _, r := range rigs {
		if err := errors.Join(r.gpu.context.Bind(), b.verify(r, image.shape.layers)); err != nil {
			return err
		}
	}
	row.Verified = true
	least := row.Alone[0]
	for i, rate := range row.Together {
		row.Sum += rate
		least = min(least, row.Alone[i])
	}
	row.MemcpyGBs = b.memcpy()
	row.LinksGBs = gpuSeveralBar * float64(row.GPUs) * least
	wanted := row.LinksGBs
	row.LimitedBy = "the GPUs' links"
	if row.MemcpyGBs < wanted {
		wanted, row.LimitedBy = row.MemcpyGBs, "the copies of the host's memory"
	}
	b.report.Several = &row
	b.report.atLeast(fmt.Sprintf("%d GPUs together (%s are the lower bound)", row.GPUs, row.LimitedBy), row.Sum, wanted,
		"GB/s")
	return b.ctx.Err()
}

// together restores with all rigs at the same time, and returns the median rate of each.
func (b *gpuBench) together(rigs []*gpuRig) ([]float64, error) {
	rates := make([][]float64, len(rigs))
	for range b.o.scale.rounds {
		errs := make([]error, len(rigs))
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i, r := range rigs {
			wg.Go(func() {
				<-start
				s, err := r.sample(false, true, b.o.scale.period)
				rates[i], errs[i] = append(rates[i], s.rate()), err
			})
		}
		close(start)
		wg.Wait()
		if err := errors.Join(firstError(errs), b.ctx.Err()); err != nil {
			return nil, err
		}
	}
	medians := make([]float64, len(rigs))
	for i := range rates {
		medians[i] = median(rates[i])
	}
	return medians, nil
}

// memcpy is the rate of plain copies by all cores, of more than their caches hold.
func (b *gpuBench) memcpy() float64 {
	threads := runtime.GOMAXPROCS(0)
	from, to := make([][]byte, threads), make([][]byte, threads)
	parallel(threads, func(i int) {
		from[i], to[i] = make([]byte, b.o.scale.memcpyBytes), make([]byte, b.o.scale.memcpyBytes)
		for at := 0; at < len(from[i]); at += 4096 {
			from[i][at], to[i][at] = 1, 1
		}
	})
	const times = 4
	begin := time.Now()
	parallel(threads, func(i int) {
		for range times {
			copy(to[i], from[i])
		}
	})
	return float64(times*threads*b.o.scale.memcpyBytes) / time.Since(begin).Seconds() / 1e9
}

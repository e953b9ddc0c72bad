package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"tuttifs/gio"
)

// Bars of transfers beside compute.
const (
	gpuBesideBar   = 48  // GB/s
	gpuSlowerBar   = 1   // per cent
	gpuIntervalBar = 1   // points, the whole width
	gpuGreenSMs    = 2   // of the polling executor's green context
	gpuPairsMax    = 200 // however short they are
)

// gpuBeside is one way of moving bytes beside one kind of compute.
type gpuBeside struct {
	Way      string  `json:"way"`
	Verb     string  `json:"verb"`
	Compute  string  `json:"compute"`
	GBs      float64 `json:"gb_per_second"`
	Slower   float64 `json:"compute_slower_percent"`
	Interval float64 `json:"interval_points"` // half the width at 95 % confidence
	Pairs    int     `json:"pairs"`
	Millis   float64 `json:"compute_ms_undisturbed"` // of one piece of work
	Ours     bool    `json:"ours"`                   // the ring
	Verified bool    `json:"verified"`
}

// gpuTraffic is transfers in the background.
type gpuTraffic struct {
	stop  atomic.Bool
	done  chan struct{}
	err   error
	bytes func() uint64 // moved so far
}

// begin runs f on a thread of its own until it has moved something, and goes on in the background. f returns soon after
// more says no.
func (b *gpuBench) begin(bytes func() uint64, f func(more func() bool) error) (*gpuTraffic, error) {
	t := &gpuTraffic{done: make(chan struct{}), bytes: bytes}
	before := bytes()
	go func() {
		defer close(t.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		t.err = b.gpu.context.Bind()
		if t.err == nil {
			t.err = errors.Join(f(func() bool { return !t.stop.Load() }), b.gpu.context.Unbind())
		}
	}()
	// What has just begun is not yet what it will be: wait for some bytes.
	for limit := time.Now().Add(10 * time.Second); bytes()-before < uint64(b.o.staging) && time.Now().Before(limit); {
		select {
		case <-t.done:
			return nil, errors.Join(t.err, errors.New("transfers ended at once"))
		case <-time.After(time.Millisecond):
		}
	}
	return t, nil
}

// end stops the transfers and waits for them.
func (t *gpuTraffic) end() error {
	t.stop.Store(true)
	<-t.done
	return t.err
}

// gpuWay is a way of moving bytes.
type gpuWay struct {
	name    string
	verb    string
	ours    bool
	prepare func() error // makes sure that no byte is right by chance
	start   func() (*gpuTraffic, error)
	check   func() error // that the right bytes were moved
}

// beside measures a way beside compute: undisturbed, disturbed and undisturbed again and again, until the interval is
// narrow enough or the time is over.
func (b *gpuBench) beside(way *gpuWay, w *gpuWork, undisturbed, disturbed *gpuTimer, other *gpuWork) (
	row gpuBeside, err error) {
	row = gpuBeside{Way: way.name, Verb: way.verb, Compute: w.name, Ours: way.ours}
	limit := b.o.scale.others
	if way.ours {
		limit = b.o.scale.ours
	}
	if err := way.prepare(); err != nil {
		return row, err
	}
	n := max(1, int(b.o.scale.window/max(w.once, time.Microsecond)))
	alone := func() (float64, error) {
		d, err := undisturbed.run(w, n)
		return d.Seconds(), err
	}
	if _, err := alone(); err != nil { // clocks rise
		return row, err
	}
	before, err := alone()
	if err != nil {
		return row, err
	}
	var ratios, rates, alones []float64
	for begin := time.Now(); ; {
		if err := b.ctx.Err(); err != nil {
			return row, err
		}
		t, err := way.start()
		if err != nil {
			return row, err
		}
		bytes, at := t.bytes(), time.Now()
		d, err := disturbed.run(other, n)
		rate := float64(t.bytes()-bytes) / time.Since(at).Seconds() / 1e9
		if err := errors.Join(err, t.end()); err != nil {
			return row, err
		}
		after, err := alone()
		if err != nil {
			return row, err
		}
		ratios, rates = append(ratios, 100*(2*d.Seconds()/(before+after)-1)), append(rates, rate)
		alones, before = append(alones, before/float64(n)*1e3), after
		row.Slower, row.Interval = interval(ratios)
		enough := len(ratios) >= b.o.scale.pairs && 2*row.Interval <= gpuIntervalBar*0.9
		if enough || len(ratios) >= 2 && time.Since(begin) > limit || len(ratios) == gpuPairsMax {
			break
		}
	}
	row.GBs, row.Millis, row.Pairs = median(rates), median(alones), len(ratios)
	err = way.check()
	row.Verified = err == nil
	return row, err
}

// ringWay streams a rig's layers.
func (b *gpuBench) ringWay(r *gpuRig, name string, write, sums, ours bool) *gpuWay {
	return &gpuWay{
		name: name, verb: verb(write), ours: ours,
		prepare: func() error {
			if write {
				return b.refill(r)
			}
			return r.poison()
		},
		start: func() (*gpuTraffic, error) {
			return b.begin(r.moved, func(more func() bool) error {
				layers, err := r.openLayers(write, sums)
				if err != nil {
					return err
				}
				if layers != nil {
					defer layers.Close()
				}
				_, _, err = r.stream(write, layers, more)
				return err
			})
		},
		check: func() error {
			err := b.verify(r, 1)
			if write {
				r.image.seal()
			}
			return err
		},
	}
}

// compute is the part of that name.
func (b *gpuBench) compute() (err error) {
	works, err := b.works(b.gpu.context)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeWorks(works)) }()
	timer, err := b.newTimer(b.gpu.context)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, timer.close()) }()
	rows := func(way *gpuWay) error {
		for _, w := range works {
			if err := b.besideRow(way, w, timer, timer, w); err != nil {
				return err
			}
		}
		return nil
	}
	if err := b.ringsBeside(rows, works, timer); err != nil {
		return err
	}
	return b.withCopies(b.o.shape(gpuObjects[0]), func(c *gpuCopies) error {
		for _, kind := range copyKinds {
			if err := rows(b.copyWay(c, kind)); err != nil {
				return err
			}
		}
		return nil
	})
}

// besideRow reports a way beside one kind of compute. What is not tuttifs' ring may fail without ending the bench.
func (b *gpuBench) besideRow(way *gpuWay, w *gpuWork, undisturbed, disturbed *gpuTimer, other *gpuWork) error {
	row, err := b.beside(way, w, undisturbed, disturbed, other)
	switch {
	case err != nil && (way.ours || b.ctx.Err() != nil):
		return fmt.Errorf("%s beside %s: %w", way.name, w.name, err)
	case err != nil:
		b.report.note("%s beside %s: %v", way.name, w.name, err)
		return nil
	}
	b.report.Beside = append(b.report.Beside, row)
	return nil
}

// ringsBeside measures the ring and the polling executor.
func (b *gpuBench) ringsBeside(rows func(way *gpuWay) error, works []*gpuWork, timer *gpuTimer) error {
	shape := b.o.shape(gpuObjects[0])
	err := b.withRig(shape, gpuSetup{}, func(r *gpuRig) error {
		for _, write := range []bool{false, true} {
			if err := b.once(r, write, true); err != nil {
				return err
			}
			if err := rows(b.ringWay(r, "ring", write, true, true)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i := range b.report.Beside {
		row := &b.report.Beside[i]
		name := fmt.Sprintf("%s beside %s", row.Verb, row.Compute)
		b.report.atLeast(name, row.GBs, gpuBesideBar, "GB/s")
		b.report.atMost(row.Compute+" beside "+row.Verb+" is slower by", row.Slower, gpuSlowerBar, "%")
		b.report.atMost("  its interval is wide", 2*row.Interval, gpuIntervalBar, "points")
	}
	polling := func(sms int) gpuSetup {
		return gpuSetup{change: func(c *gio.GPUConfig) { c.Polling, c.PollSMs = true, sms }}
	}
	for _, sms := range []int{0, gpuGreenSMs} {
		name := "polling kernel, anywhere"
		if sms > 0 {
			name = fmt.Sprintf("polling kernel, green context of %d SMs", sms)
		}
		err := b.withRig(shape, polling(sms), func(r *gpuRig) error {
			if err := b.once(r, false, true); err != nil {
				return err
			}
			way := b.ringWay(r, name, false, true, false)
			if sms > 0 {
				return b.greenBeside(way, works, timer)
			}
			return rows(way)
		})
		if b.ctx.Err() != nil {
			return err
		}
		if err != nil {
			b.report.note("%s: %v", name, err)
		}
	}
	return nil
}

// greenBeside measures a way that has SMs of its own beside compute on all others. Undisturbed compute has the whole
// GPU: what it would have without the way.
func (b *gpuBench) greenBeside(way *gpuWay, works []*gpuWork, undisturbed *gpuTimer) (err error) {
	rest, err := b.gpu.context.GreenRest(gpuGreenSMs, true)
	if err != nil {
		b.report.note("no green contexts: %v", err)
		return nil
	}
	defer func() { err = errors.Join(err, rest.Close()) }()
	mine, err := b.works(rest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeWorks(mine)) }()
	disturbed, err := b.newTimer(rest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disturbed.close()) }()
	for i, w := range works {
		if err := b.besideRow(way, w, undisturbed, disturbed, mine[i]); err != nil {
			return err
		}
	}
	return nil
}

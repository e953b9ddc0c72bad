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
	gpuPairsMax    = 500 // however short they are
)

// gpuBeside is one way of moving bytes beside one kind of compute.
type gpuBeside struct {
	Way      string  `json:"way"`
	Verb     string  `json:"verb"`
	Compute  string  `json:"compute"`
	GBs      float64 `json:"gb_per_second"`
	Slower   float64 `json:"compute_slower_percent"`
	Interval float64 `json:"interval_points"`        // half the width at 95 % confidence
	Pairs    int     `json:"pairs"`                  // of as much compute undisturbed as disturbed
	Millis   float64 `json:"compute_ms_undisturbed"` // of one piece of work
	Ours     bool    `json:"ours"`                   // the ring
	Verified bool    `json:"verified"`
}

// gpuWay is a way of moving bytes.
type gpuWay struct {
	name    string
	verb    string
	ours    bool
	bytes   func() uint64 // moved so far
	prepare func() error  // makes sure that no byte is right by chance
	// run gets ready to move bytes, calls rounds, and cleans up.
	run   func(rounds func(round gpuRound) error) error
	check func() error // that the right bytes were moved
}

// gpuRound moves bytes until more says no, and ends what is under way.
type gpuRound func(more func() bool) error

// gpuTraffic is transfers in the background, on a thread of their own, that rest and go on in turns.
type gpuTraffic struct {
	way     *gpuWay
	starts  chan struct{} // of rounds
	halted  atomic.Bool   // the round is to end
	resting atomic.Bool   // it has ended
	done    chan struct{}
	err     error  // once done
	before  uint64 // bytes when the round began
}

// begin gets a way ready. It rests until resume.
func (b *gpuBench) begin(way *gpuWay) *gpuTraffic {
	t := &gpuTraffic{way: way, starts: make(chan struct{}, 1), done: make(chan struct{})}
	t.resting.Store(true)
	go func() {
		defer close(t.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if t.err = b.gpu.context.Bind(); t.err == nil {
			t.err = errors.Join(way.run(t.rounds), b.gpu.context.Unbind())
		}
	}()
	return t
}

func (t *gpuTraffic) rounds(round gpuRound) error {
	for range t.starts {
		if err := round(func() bool { return !t.halted.Load() }); err != nil {
			return err
		}
		t.resting.Store(true)
	}
	return nil
}

// resume begins a round. The one before it has ended.
func (t *gpuTraffic) resume() {
	t.before = t.way.bytes()
	t.resting.Store(false)
	t.halted.Store(false)
	t.starts <- struct{}{}
}

func (t *gpuTraffic) pause() { t.halted.Store(true) }

// end stops the transfers and waits for them.
func (t *gpuTraffic) end() error {
	t.halted.Store(true)
	close(t.starts)
	<-t.done
	return t.err
}

// settle repeats step until the transfers are as they should be: a GPU that has nothing to do meanwhile has another
// clock and another temperature afterwards.
func (b *gpuBench) settle(t *gpuTraffic, until func() bool, step func() error) error {
	for limit := time.Now().Add(gpuDeadline); !until(); {
		select {
		case <-t.done:
			return errors.New("transfers ended before they were to") // end has their error
		default:
		}
		if time.Now().After(limit) {
			return fmt.Errorf("transfers neither begin nor end in %v", gpuDeadline)
		}
		if err := errors.Join(b.ctx.Err(), step()); err != nil {
			return err
		}
	}
	return nil
}

// start begins a round and waits until it is what it will be: what has just begun is not yet.
func (b *gpuBench) start(t *gpuTraffic, step func() error) error {
	t.resume()
	return b.settle(t, func() bool { return t.way.bytes()-t.before >= uint64(b.o.staging) }, step)
}

// stop ends a round.
func (b *gpuBench) stop(t *gpuTraffic, step func() error) error {
	t.pause()
	return b.settle(t, t.resting.Load, step)
}

// gpuContest is compute without transfers and with them.
type gpuContest struct {
	b                      *gpuBench
	t                      *gpuTraffic
	work, other            *gpuWork // undisturbed and disturbed
	undisturbed, disturbed *gpuTimer
	n                      int // pieces of work in a window
	bytes                  uint64
	seconds                float64 // of disturbed windows
}

// quarter runs a quarter of a window, which is not timed.
func (c *gpuContest) quarter(timer *gpuTimer, w *gpuWork) func() error {
	return func() error {
		_, err := timer.run(w, max(1, c.n/4))
		return err
	}
}

// quad is one window undisturbed, two disturbed, and one undisturbed: a drift of clocks that goes on through all of
// them cancels out. Between them compute goes on while transfers begin and end. It returns by how many per cent
// compute was slower, and the seconds of a window undisturbed. No two quads share a window, so that they are samples
// of which each knows nothing of the others.
func (c *gpuContest) quad() (slower, alone float64, err error) {
	first, err := c.undisturbed.run(c.work, c.n)
	if err != nil {
		return 0, 0, err
	}
	if err := c.b.start(c.t, c.quarter(c.disturbed, c.other)); err != nil {
		return 0, 0, err
	}
	bytes, at := c.t.way.bytes(), time.Now()
	beside, err := c.disturbed.run(c.other, 2*c.n)
	if err != nil {
		return 0, 0, err
	}
	c.bytes += c.t.way.bytes() - bytes
	c.seconds += time.Since(at).Seconds()
	if err := c.b.stop(c.t, c.quarter(c.undisturbed, c.work)); err != nil {
		return 0, 0, err
	}
	last, err := c.undisturbed.run(c.work, c.n)
	both := (first + last).Seconds()
	return 100 * (beside.Seconds()/both - 1), both / 2, err
}

// beside measures a way beside compute, until the interval is narrow enough or the time is over.
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
	c := &gpuContest{b: b, t: b.begin(way), work: w, other: other, undisturbed: undisturbed, disturbed: disturbed,
		n: max(1, int(b.o.scale.window/max(w.once, time.Microsecond)))}
	if err := errors.Join(c.measure(&row, limit), c.t.end()); err != nil {
		return row, err
	}
	err = way.check()
	row.Verified = err == nil
	return row, err
}

func (c *gpuContest) measure(row *gpuBeside, limit time.Duration) error {
	if _, _, err := c.quad(); err != nil { // clocks rise
		return err
	}
	c.bytes, c.seconds = 0, 0
	var ratios, alones []float64
	for begin := time.Now(); ; {
		slower, alone, err := c.quad()
		if err != nil {
			return err
		}
		ratios, alones = append(ratios, slower), append(alones, alone/float64(c.n)*1e3)
		row.Slower, row.Interval = interval(ratios)
		enough := len(ratios) >= c.b.o.scale.pairs && 2*row.Interval <= gpuIntervalBar*0.9
		if enough || len(ratios) >= 2 && time.Since(begin) > limit || len(ratios) == gpuPairsMax {
			break
		}
	}
	row.GBs, row.Millis, row.Pairs = float64(c.bytes)/c.seconds/1e9, median(alones), len(ratios)
	return nil
}

// ringWay streams a rig's layers.
func (b *gpuBench) ringWay(r *gpuRig, name string, write, sums, ours bool) *gpuWay {
	return &gpuWay{
		name: name, verb: verb(write), ours: ours, bytes: r.moved,
		prepare: func() error {
			if write {
				return b.refill(r)
			}
			return r.poison()
		},
		run: func(rounds func(round gpuRound) error) error {
			layers, err := r.openLayers(write, sums)
			if err != nil {
				return err
			}
			if layers != nil {
				defer layers.Close()
			}
			return rounds(func(more func() bool) error {
				_, _, err := r.stream(write, layers, more)
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
	shape := b.o.shape(gpuObjects[0])
	err = b.withFeed(shape, func(f *gpuFeed) error { return rows(b.feedWay(f, copyBatch)) })
	if err != nil {
		return err
	}
	return b.withCopies(shape, func(c *gpuCopies) error {
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
	if way.ours {
		b.report.atLeast(fmt.Sprintf("%s beside %s", row.Verb, row.Compute), row.GBs, gpuBesideBar, "GB/s")
		b.report.atMost(row.Compute+" beside "+row.Verb+" is slower by", row.Slower, gpuSlowerBar, "%")
		b.report.atMost("  its interval is wide", 2*row.Interval, gpuIntervalBar, "points")
	}
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

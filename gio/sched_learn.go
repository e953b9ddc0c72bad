package gio

import (
	"math"
	"math/bits"
	"slices"
	"time"

	"tuttifs/slack"
)

// estimate is the logarithm (base 2) of a factor that is learned from samples. Two of any five may be wrong by any
// amount: each step goes towards the median of the last five.
type estimate struct {
	recent [5]float64
	count  int
	value  float64
}

const (
	estimateStep  = 0.25 // of the way to the median; less than 14 % is left of any error after seven
	estimateRange = 40   // of a sample's logarithm, either way
	estimateLeast = 3    // samples before a value that nothing was known of is believed
)

// expect begins with a value that is believed as much as two samples.
func (e *estimate) expect(x float64) {
	e.recent[0], e.recent[1], e.count, e.value = x, x, 2, x
}

func (e *estimate) note(x float64) {
	if math.IsNaN(x) {
		return
	}
	x = min(max(x, -estimateRange), estimateRange)
	e.recent[e.count%len(e.recent)] = x
	if e.count++; e.count == 2*len(e.recent) {
		e.count = len(e.recent) // as many as ever, at the same place
	}
	sorted := e.recent
	n := min(e.count, len(sorted))
	slices.Sort(sorted[:n])
	median := (sorted[(n-1)/2] + sorted[n/2]) / 2
	if n <= estimateLeast {
		e.value = median
	} else {
		e.value += (median - e.value) * estimateStep
	}
}

func (e *estimate) known() bool     { return e.count >= estimateLeast }
func (e *estimate) factor() float64 { return math.Exp2(e.value) }

// most is the greatest factor of what is believed and those of the last five samples that are not above a limit.
func (e *estimate) most(limit float64) float64 {
	most := e.value
	limit = math.Log2(limit)
	for _, x := range e.recent[:min(e.count, len(e.recent))] {
		if x <= limit {
			most = max(most, x)
		}
	}
	return math.Exp2(most)
}

// windows knows what a layer, or a decode step, takes: a table's window, times a factor that is learned for each power
// of two of input and prefix. Without a table the factor is all there is.
type windows struct {
	table  *slack.Table
	layers [lengthBits][lengthBits]estimate
	steps  [lengthBits]estimate // of decode steps, by the length
	last   estimate             // of all: what a place that was never seen begins with
}

const lengthBits = 26 // of lengths up to slack.LengthMax

func lengthPlace(tokens int) int { return min(bits.Len(uint(max(tokens, 0))), lengthBits-1) }

// base is what is corrected: the table's window, or a nanosecond a token.
func (w *windows) base(input, prefix int) float64 {
	if w.table == nil {
		return float64(max(input, 1))
	}
	window, _ := w.table.Window(input, prefix)
	return float64(window)
}

// stepBase is the same of a decode step.
func (w *windows) stepBase(length, layers int) float64 {
	if w.table == nil {
		return 1
	}
	return w.base(1, length) * float64(layers)
}

// layer is the window of one layer, or 0 where nothing is known. Sure: it was seen, or stands in the table, and is no
// bound.
func (w *windows) layer(input, prefix int) (window int64, sure bool) {
	i, j := lengthPlace(input), lengthPlace(prefix)
	switch e := &w.layers[i][j]; {
	case e.known():
		return nanoseconds(w.base(input, prefix) * e.factor()), true
	case w.table != nil:
		return nanoseconds(w.base(input, prefix) * w.last.factor()), true
	}
	// No window is shorter than one of fewer tokens: the longest of those is a bound.
	for a := range i {
		for b := range max(j, 1) {
			if e := &w.layers[a][b]; e.known() {
				window = max(window, nanoseconds(float64(uint(1)<<max(a-1, 0))*e.factor()))
			}
		}
	}
	return window, false
}

// step is the window of a decode step, or 0 where nothing is known, and the most that one of the last few took. One of
// more than the limit counts for the window alone: it may have been the pause behind an answer that nobody ended.
func (w *windows) step(length, layers int, limit time.Duration) (window, most int64) {
	e, base := &w.steps[lengthPlace(length)], w.stepBase(length, layers)
	if e.known() || w.table != nil {
		window = nanoseconds(base * e.factor())
	}
	return window, nanoseconds(base * e.most(float64(limit)/base))
}

// note takes what a layer has taken.
func (w *windows) note(input, prefix int, took int64) {
	e := &w.layers[lengthPlace(input)][lengthPlace(prefix)]
	if e.count == 0 && w.table != nil {
		e.expect(w.last.value)
	}
	x := math.Log2(float64(max(took, 1)) / w.base(input, prefix))
	e.note(x)
	if w.table != nil {
		w.last.note(x)
	}
}

// noteStep takes what a decode step has taken.
func (w *windows) noteStep(length, layers int, took int64) {
	e := &w.steps[lengthPlace(length)]
	base := w.stepBase(length, layers)
	if base == 0 {
		return
	}
	if e.count == 0 && w.table != nil {
		e.expect(0)
	}
	e.note(math.Log2(float64(max(took, 1)) / base))
}

// nanoseconds is bounded by an hour, so that sums of a pass are in range.
func nanoseconds(ns float64) int64 { return int64(min(ns, float64(time.Hour))) }

// flow is what is in flight in one direction, and how fast it goes.
type flow struct {
	nominal float64 // bytes/s
	latency int64
	rate    estimate // of the true rate to the nominal one

	flying  int64 // bytes
	since   int64
	bytes   int64 // that have arrived since then
	fresh   bool  // nothing was in flight before that: the latency is in it
	limited bool  // less was in flight than keeps the drives busy, or reads were: this says nothing of the rate
}

const (
	flowNanos = int64(2 * time.Millisecond) // of a sample of the rate, where the flow does not end
	flowBytes = 64 << 10                    // that say something
)

func (f *flow) setUp(d *slack.Direction) {
	f.nominal = d.RingBytesPerSecond
	if d.DrivesBytesPerSecond > 0 {
		f.nominal = min(f.nominal, d.DrivesBytesPerSecond)
	}
	f.latency = int64(d.LatencyUS * 1e3)
}

// bytesPerSecond is the rate as it is now believed to be.
func (f *flow) bytesPerSecond() float64 { return f.nominal * f.rate.factor() }

// takes is how long so many bytes take, without the latency.
func (f *flow) takes(bytes int64) int64 {
	return nanoseconds(float64(bytes) * 1e9 / f.bytesPerSecond())
}

func (f *flow) issue(now, bytes int64) {
	if f.flying == 0 {
		f.since, f.bytes, f.fresh, f.limited = now, 0, true, false
	}
	f.flying += bytes
}

// done counts bytes off that are no longer in flight, and corrects the rate now and then.
func (f *flow) done(now, bytes int64) {
	f.flying = max(0, f.flying-bytes)
	f.bytes += bytes
	took := now - f.since
	if f.flying > 0 && took < flowNanos {
		return
	}
	if f.fresh {
		took -= f.latency
	}
	if !f.limited && f.bytes >= flowBytes && took > f.latency/2 {
		f.rate.note(math.Log2(float64(f.bytes) * 1e9 / float64(took) / f.nominal))
	}
	f.since, f.bytes, f.fresh, f.limited = now, 0, false, false
}

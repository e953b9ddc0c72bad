package gio

import (
	"time"

	"tuttifs/slack"
)

// policy is the scheduler's logic: no clock, no lock, no I/O. Times are nanoseconds on the executor's clock, passed in.
//
// Three rules: reads go first; writes wait for what reads leave of a window, for a decode step or for idleness; and I/O
// stays within the budget of its window, but for what compute waits for, since there nothing is left to hide behind.
//
// Invariants, while no switch is on:
//   - no write is granted while a read is queued or in flight, unless it is old, and then one part in turnEvery of the
//     time at most: older than MaxAge, or somebody has waited in Finish for Patience;
//   - what is granted ends, as far as is known, within the window or step that it was granted for, unless it is old or
//     nothing computes;
//   - reads in flight beyond the awaited layer fit the window;
//   - a backlog is granted something at most MaxAge and a turn after its oldest piece came; and reads are never held
//     back for longer than compute takes to wait for them.
type policy struct {
	c  SchedulerConfig
	io slack.IO // rates are the flows'

	windows     windows
	read, write flow
	bytesAToken float64 // of a layer's reads: the table's, or learned; 0: not known

	first     int   // the least layer that was ever read or told
	restores  bool  // layers were read: first is the first one; else it may have been told for all before it
	at        int64 // of the last call
	announced int   // passes that were begun and wait for compute to come to them
	pass      pass
	reads     readBook
	granted   granted
	stats     SchedulerStats
	bubbles   []time.Duration // by layer
	stood     uint64          // the last bubble that was counted: pass and layer
}

// Lengths of what has no window of its own, nanoseconds.
const (
	idleNanos = int64(10 * time.Millisecond) // of writes that are in flight at a time while nothing computes
	turnNanos = int64(5 * time.Millisecond)  // of those that are too old to wait
	turnEvery = 25                           // beside reads they have one part in so many of the time
	// stepOver is the least after which a decode step without a successor is taken for the last one.
	stepOver = int64(100 * time.Millisecond)
)

// firstCounts is how few layers a pass must have for its first one's time to say something of the others'.
const firstCounts = 4

// schedLayersMax bounds the layers of a pass.
const schedLayersMax = 1024

// passKind is what compute is doing.
type passKind uint8

const (
	passNone passKind = iota
	passPrefill
	passDecode
)

// pass is one prefill, or one decode step.
type pass struct {
	kind          passKind
	input, prefix int // of a prefill; of a decode step the length is the prefix
	layers        int
	layer         int   // that is computed now: those before are done
	begin         int64 // of the pass
	since         int64 // of the layer: when the one before was done; or of the step
	stood         int64 // what compute has stood in the layer
	window        int64 // of the layer or step, 0: not known
	ahead         slack.Share
	over          int64 // when a decode step that has no successor is taken for the last one
	ended         int64 // when there was none any more
	unended       bool  // it was a decode step, which was only taken for the last one: it may go on
	predicted     int64 // of the pass with its reads, 0: nothing
	bytes         int64 // of its layers' reads that have arrived
}

func (p *policy) setUp(c SchedulerConfig) {
	p.c, p.io, p.windows.table = c, unknownIO(), c.Table
	if c.Table != nil {
		p.io = c.Table.IO
		p.bytesAToken = float64(p.io.BytesPerToken)
		p.windows.last.expect(0)
		p.read.rate.expect(0)
		p.write.rate.expect(0)
	}
	p.read.setUp(&p.io.Read)
	p.write.setUp(&p.io.Write)
	p.first = schedLayersMax
	p.reads.setUp()
	p.bubbles = make([]time.Duration, 0, schedLayersMax)
	p.pass.ended = -int64(c.Idle) // nothing was ever under way
}

// unknownIO is what stands for a table's figures: rates to begin with that many drives reach, and no limit of SMs.
func unknownIO() slack.IO {
	way := slack.Direction{RingBytesPerSecond: 2e9, LatencyUS: 150}
	return slack.IO{
		BytesPerToken: 1, ObjectBytes: 64 << 10, Read: way, Write: way,
		Harvest: slack.Harvest{SMs: HarvestBlocksDefault, SMShareMax: 1, LaunchBytes: HarvestDefault,
			Grids: []slack.Grid{{Blocks: HarvestBlocksDefault, BytesPerSecond: 429e9}}},
	}
}

func (p *policy) prefill(now int64, input, prefix, layers int) {
	now = p.account(now)
	p.end(now)
	p.pass = pass{kind: passPrefill, input: input, prefix: prefix, layers: layers, layer: p.begins(layers), begin: now}
	p.pass.predicted = p.loaded(input, prefix, layers)
	p.stats.Passes++
	p.beginLayer(now)
}

// begins is the first layer of a pass: of a pipeline's later stage it is not 0.
func (p *policy) begins(layers int) int {
	if p.restores && p.first < layers {
		return p.first
	}
	return 0
}

// beginLayer begins the window of the next layer.
func (p *policy) beginLayer(now int64) {
	s := &p.pass
	s.since, s.stood = now, 0
	s.window, _ = p.windows.layer(s.input, s.prefix)
	s.ahead = p.share(slack.Read, s.window)
}

func (p *policy) layerDone(now int64, layer int) {
	now = p.account(now)
	s := &p.pass
	if s.kind != passPrefill || layer < 0 {
		return
	}
	p.first = min(p.first, layer)
	if layer < s.layer {
		return
	}
	first, end := p.begins(s.layers), min(layer+1, s.layers)
	n := end - max(s.layer, first)
	// Before the first layer computes, its pass is prepared: it says little alone, and is one of many in a whole pass.
	counts := s.layer > first || end == s.layers || s.layers-first < firstCounts
	if took := (now - s.since - s.stood) / int64(n); took > 0 && counts {
		p.windows.note(s.input, s.prefix, took)
	}
	p.stats.Layers += uint64(n)
	p.endWindow()
	if s.layer = end; s.layer < s.layers {
		p.beginLayer(now)
		return
	}
	p.noteLoad(now)
	p.end(now)
}

func (p *policy) decodeStep(now int64, length int) {
	now = p.account(now)
	p.noteStep(now)
	p.end(now)
	layers := p.pass.layers
	if p.c.Table != nil {
		layers = p.c.Table.Fingerprint.Model.Layers
	}
	// Writes wait no longer than MaxAge for a step to end, so that nothing is lost where a longer one counts for nothing.
	window, most := p.windows.step(length, layers, p.c.MaxAge)
	p.pass = pass{kind: passDecode, prefix: length, layers: layers, begin: now, since: now, window: window,
		over: now + max(2*most+int64(p.c.Idle), stepOver), ahead: p.share(slack.Read, window)}
	p.stats.DecodeSteps++
}

// noteStep learns from a decode step that ends, also from one that was taken for the last one and was not: else no step
// would ever be longer than was believed.
func (p *policy) noteStep(now int64) {
	if s := &p.pass; s.kind == passDecode || s.unended {
		p.windows.noteStep(s.prefix, s.layers, now-s.since)
	}
}

func (p *policy) endPass(now int64) {
	now = p.account(now)
	p.pass.unended = false // it was the last one, and ended nobody knows when
	p.noteStep(now)
	p.end(now)
}

func (p *policy) end(now int64) {
	if p.pass.kind == passNone {
		return
	}
	p.endWindow()
	p.pass.kind, p.pass.ended = passNone, now
	p.reads.turn()
}

// endWindow counts what was granted for the window and is in flight still.
func (p *policy) endWindow() {
	if p.granted.windowed > 0 {
		p.stats.Overruns++
		p.granted.windowed = 0
	}
}

// stands says whether compute stands because the reads of the layer that is next are not there.
func (p *policy) stands() bool {
	return p.pass.kind == passPrefill && p.reads.layers[0][p.pass.layer].pending > 0
}

// account gives the time since the last call to what went on in it, and returns the time of this one. Callers' clocks
// are read before they wait for each other, so time may seem to go back.
func (p *policy) account(now int64) int64 {
	now = max(now, p.at)
	gone := now - p.at
	p.at = now
	stands := p.stands()
	if stands && gone > 0 {
		p.pass.stood += gone
		p.stand(time.Duration(gone))
	}
	switch {
	case p.reads.flying == 0:
	case stands:
		p.stats.ReadExposed += time.Duration(gone)
	default:
		p.stats.ReadHidden += time.Duration(gone)
	}
	if p.write.flying > 0 {
		p.stats.WriteTime += time.Duration(gone)
	}
	if p.pass.kind == passDecode && now > p.pass.over {
		p.end(p.pass.since + p.pass.window)
		p.pass.unended = true
	}
	return now
}

// stand counts time that compute stood.
func (p *policy) stand(t time.Duration) {
	layer := p.pass.layer
	for len(p.bubbles) <= layer {
		p.bubbles = append(p.bubbles, 0)
	}
	p.bubbles[layer] += t
	p.stats.Bubble += t
	if layer == p.begins(p.pass.layers) {
		p.stats.FirstBubble += t
	}
	if here := p.stats.Passes*schedLayersMax + uint64(layer) + 1; p.stood != here {
		p.stood = here
		p.stats.Bubbles++
	}
}

// note takes what the executor tells.
func (p *policy) note(e ioEvent) {
	now, bytes := p.account(e.at), int64(e.bytes)
	layer := int(e.layer)
	if layer >= schedLayersMax {
		layer = noLayer
	}
	switch e.kind {
	case readQueued:
		if layer != noLayer {
			p.first, p.restores = min(p.first, layer), true
		}
		p.reads.queued(layer, bytes, p.forNext(layer))
	case readIssued:
		p.besideWrites()
		p.read.issue(now, bytes)
		p.reads.issued(layer, bytes)
	case readArrived:
		p.besideWrites()
		p.read.done(now, bytes)
		if p.reads.arrived(layer, bytes) && p.pass.kind == passPrefill {
			p.pass.bytes += bytes
		}
	case readAwaited:
		p.reads.awaited(layer)
	case readEnded:
		p.reads.ended(layer, bytes)
	case writeQueued:
		p.stats.Deferred += e.objects
		p.stats.DeferredBytes += e.bytes
	case writeIssued:
		p.write.issue(now, bytes)
		p.wrote(bytes)
	case writeArrived:
		if p.reads.flying > 0 {
			p.besideWrites()
		}
		p.write.done(now, bytes)
		p.granted.windowed = min(p.granted.windowed, p.write.flying)
	}
}

// besideWrites takes note of a read in flight: what writes do meanwhile is not what they can do, since reads have the
// drives most of the time.
func (p *policy) besideWrites() {
	if p.write.flying > 0 {
		p.write.limited = true
	}
}

// forNext says whether reads of a layer that come now are for a pass that has not begun.
func (p *policy) forNext(layer int) bool {
	s := &p.pass
	return p.announced > 0 || s.kind == passDecode || s.kind == passPrefill && (layer < s.layer || layer >= s.layers)
}

package gio

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Simulated time: an engine that computes passes, an executor that keeps to the pacer's contract, and drives that do
// one direction at a time. Nothing sleeps; the policy under test is told the simulation's clock.

const (
	us = int64(1000)
	ms = 1000 * us
)

// simDrives are all drives together: one server, and a latency behind it.
type simDrives struct {
	readRate, writeRate float64 // bytes/s
	latency             int64
	free                int64 // when the server is
}

// simOp is a piece in flight.
type simOp struct {
	write bool
	batch *simBatch
	bytes int64
	lands int64
}

// simBatch is the reads of one layer.
type simBatch struct {
	layer          int32
	bytes          int64
	unissued, left int64
}

// simWrite is a piece in the store buffer.
type simWrite struct{ bytes, came int64 }

// simPass is what an engine computes.
type simPass struct {
	input, prefix, layers int
	window                int64 // true time of a layer
	jitter                float64
	reads, stores         int64 // bytes of each layer
	lazy                  bool  // reads of a layer are issued when the one before begins
	hosts                 bool  // the host blocks for the first layer that is missing
	decode                bool  // one decode step instead, over prefix tokens, of window
	idle                  int64 // before it begins
}

// sim is one run.
type sim struct {
	t      *testing.T
	random *rand.Rand
	p      *policy
	drives simDrives
	now    int64

	queue   []*simBatch // reads that are not in place, in order
	flights []simOp
	buffer  []simWrite // deferred
	filled  int64      // with what is in flight
	size    int64      // of the buffer
	piece   int64
	again   int64
	host    int32 // the last layer that the host blocks for
	awaited int64 // since when somebody waits for the end of what is deferred, 0: nobody

	turn       int64 // when one began beside reads
	turnBytes  int64
	turnShare  int64
	bubble     int64
	beside     int64 // bytes of writes that were issued while there were reads
	oldest     int64 // the greatest age at which a piece was issued
	disorder   bool  // layers are read in any order
	layersDone int
	onLayer    func()
}

func newSim(t *testing.T, seed uint64, c SchedulerConfig, drives simDrives) *sim {
	t.Helper()
	scheduler, err := NewScheduler(c)
	require.NoError(t, err)
	return &sim{t: t, random: rand.New(rand.NewPCG(seed, 5)), p: &scheduler.policy, drives: drives, size: 1 << 30,
		piece: 1 << 20, host: noLayer, now: 3 * ms, turn: -turnEvery * turnNanos}
}

func (s *sim) note(kind ioEventKind, layer int32, bytes int64) {
	s.p.note(ioEvent{kind: kind, layer: layer, ioSize: ioSize{1, uint64(bytes)}, at: s.now})
}

func (s *sim) read(layer int, bytes int64) {
	if bytes > 0 {
		s.queue = append(s.queue, &simBatch{layer: int32(layer), bytes: bytes, unissued: bytes, left: bytes})
		s.note(readQueued, int32(layer), bytes)
	}
}

func (s *sim) deferWrite(bytes int64) {
	for bytes > 0 && s.filled < s.size {
		n := min(bytes, s.piece, s.size-s.filled)
		s.buffer = append(s.buffer, simWrite{n, s.now})
		s.filled += n
		bytes -= n
		s.note(writeQueued, noLayer, n)
	}
}

func (s *sim) missing(layer int) bool {
	for _, b := range s.queue {
		if int(b.layer) == layer {
			return true
		}
	}
	return false
}

func (s *sim) flying(write bool) (pieces int, bytes int64) {
	for _, f := range s.flights {
		if f.write == write {
			pieces++
			bytes += f.bytes
		}
	}
	return pieces, bytes
}

// start gives a piece to the drives, which do not begin one direction before the other has ended.
func (s *sim) start(op simOp) {
	rate := s.drives.readRate
	if op.write {
		rate = s.drives.writeRate
	}
	begin := max(s.now, s.drives.free)
	for _, f := range s.flights {
		if f.write != op.write {
			begin = max(begin, f.lands)
		}
	}
	s.drives.free = begin + int64(float64(op.bytes)*1e9/rate)
	op.lands = s.drives.free + s.drives.latency
	s.flights = append(s.flights, op)
}

const simLanes = 8

// pump issues what may be issued, as executors do.
func (s *sim) pump() {
	s.pumpReads()
	s.pumpWrites()
}

func (s *sim) pumpReads() {
	for _, b := range s.queue {
		for b.unissued > 0 {
			n := min(b.unissued, s.piece)
			if pieces, _ := s.flying(false); pieces == simLanes {
				return
			}
			if b.layer > s.host && s.flyingBehind(s.host)+n > int64(min(s.p.readAhead(s.now), 1<<60)) {
				s.checkHeld()
				return
			}
			s.checkRead(b, n)
			b.unissued -= n
			s.note(readIssued, b.layer, n)
			s.start(simOp{batch: b, bytes: n})
		}
	}
}

// flyingBehind is what of reads is in flight behind a layer.
func (s *sim) flyingBehind(layer int32) (n int64) {
	for _, f := range s.flights {
		if !f.write && f.batch.layer > layer {
			n += f.bytes
		}
	}
	return n
}

func (s *sim) pumpWrites() {
	s.again = never
	for len(s.buffer) > 0 {
		l := load{oldest: s.buffer[0].came, awaited: s.awaited, fill: uint64(s.filled), size: uint64(s.size)}
		l.next = ioSize{1, uint64(s.buffer[0].bytes)}
		for _, w := range s.buffer {
			l.deferred.objects++
			l.deferred.bytes += uint64(w.bytes)
		}
		pieces, bytes := s.flying(true)
		l.writing = ioSize{uint64(pieces), uint64(bytes)}
		for _, b := range s.queue {
			if b.left > 0 {
				l.reads.objects++
				l.reads.bytes += uint64(b.left)
			}
		}
		if pieces == 2 {
			return
		}
		if high := s.filled > s.size*3/4; !high || l.reads.objects > 0 {
			g := s.p.writes(s.now, &l)
			if !g.allows(l.next) {
				s.again = g.again
				return
			}
			s.checkWrite(&l)
		}
		n := s.buffer[0].bytes
		s.oldest = max(s.oldest, s.now-s.buffer[0].came)
		s.buffer = s.buffer[1:]
		s.note(writeIssued, noLayer, n)
		s.start(simOp{write: true, bytes: n})
	}
}

// checkRead: what runs ahead of the layer that compute or the host waits for fits the window.
func (s *sim) checkRead(b *simBatch, n int64) {
	c := &s.p.c
	if c.Off || c.NoBudget || s.p.pass.kind != passPrefill || s.p.pass.window == 0 || s.disorder {
		return
	}
	last := max(int32(s.p.pass.layer), s.host)
	due := s.due()
	if b.layer <= last || b.layer <= due {
		return
	}
	budget := int64(0)
	for _, f := range s.flights {
		if !f.write && f.batch.layer > max(last, due) {
			budget += f.bytes
		}
	}
	if fits := s.p.pass.ahead.Bytes; budget+n > fits {
		require.Failf(s.t, "read ahead", "of layer %d, for layer %d: %d bytes of %d", last, b.layer, budget+n, fits)
	}
}

// due is the first missing layer, if compute will have to wait for it at the believed rate.
func (s *sim) due() int32 {
	var before int64
	for _, b := range s.queue {
		before += b.left
		if int(b.layer) > s.p.pass.layer {
			starts := s.p.computeEnds(s.now) + int64(int(b.layer)-s.p.pass.layer-1)*s.p.pass.window
			takes := int64(float64(before) * 1e9 / s.p.read.bytesPerSecond())
			if s.now+s.p.read.latency+takes+us >= starts {
				return b.layer
			}
			return noLayer
		}
	}
	return noLayer
}

// checkHeld: the layer that compute waits for is never held back.
func (s *sim) checkHeld() {
	for _, b := range s.queue {
		if b.unissued > 0 {
			if s.p.stands() && int(b.layer) == s.p.pass.layer {
				r := s.p.reads.layers[0][b.layer]
				require.LessOrEqual(s.t, r.left, r.flying, "layer %d is held back while compute waits for it", b.layer)
			}
			return
		}
	}
}

// checkWrite: reads first, and what is granted for a window ends in it.
func (s *sim) checkWrite(l *load) {
	c := &s.p.c
	if c.Off {
		return
	}
	aged := s.now-l.oldest >= int64(c.MaxAge) || l.awaited != 0 && s.now-l.awaited >= int64(c.Patience)
	if l.reads.objects > 0 && !c.ReadsNotFirst {
		require.True(s.t, aged, "a write beside reads, %d us old", (s.now-l.oldest)/us)
		s.beside += int64(l.next.bytes)
		if s.now >= s.turn+turnEvery*turnNanos {
			s.turn, s.turnBytes, s.turnShare = s.now, 0, s.p.progress(turnNanos)+s.piece
		}
		s.turnBytes += int64(l.next.bytes)
		require.LessOrEqual(s.t, s.turnBytes, 2*s.turnShare, "a turn beside reads")
	}
	if cause := s.p.granted.cause; cause == CauseWindow || cause == CauseDecode {
		takes := int64(float64(l.writing.bytes+l.next.bytes) * 1e9 / s.p.write.bytesPerSecond())
		left := s.p.pass.since + s.p.pass.stood + s.p.pass.window - s.now
		if takes > left {
			require.Failf(s.t, "writes that do not end in their window or step", "%d us, %d are left", takes/us, left/us)
		}
	}
}

// until lets time pass up to end, in steps at which something happens; stop, if not nil, ends it sooner.
func (s *sim) until(end int64, stop func() bool) {
	for s.pump(); s.now < end; s.pump() {
		if stop != nil && stop() {
			return
		}
		next := min(end, s.again)
		for _, f := range s.flights {
			next = min(next, f.lands)
		}
		if len(s.queue) > 0 || stop != nil {
			next = min(next, s.now+100*us) // the executor's nap
		}
		next = max(next, s.now+us)
		s.now = next
		s.land()
	}
}

func (s *sim) land() {
	flights := s.flights[:0]
	for _, f := range s.flights {
		switch {
		case f.lands > s.now:
			flights = append(flights, f)
		case f.write:
			s.filled -= f.bytes
			s.note(writeArrived, noLayer, f.bytes)
		default:
			s.note(readArrived, f.batch.layer, f.bytes)
			f.batch.left -= f.bytes
		}
	}
	s.flights = flights
	queue := s.queue[:0]
	for _, b := range s.queue {
		if b.left > 0 {
			queue = append(queue, b)
		} else {
			s.note(readEnded, b.layer, b.bytes)
		}
	}
	s.queue = queue
}

// run computes passes one after the other.
func (s *sim) run(passes ...simPass) {
	for i := range passes {
		s.pass(&passes[i])
	}
}

func (s *sim) takes(x *simPass) int64 {
	return max(1, int64(float64(x.window)*(1+x.jitter*(2*s.random.Float64()-1))))
}

func (s *sim) pass(x *simPass) {
	if x.idle > 0 {
		s.p.endPass(s.now)
		s.until(s.now+x.idle, nil)
	}
	if x.decode {
		s.p.decodeStep(s.now, x.prefix)
		s.until(s.now+s.takes(x), nil)
		return
	}
	s.p.prefill(s.now, x.input, x.prefix, x.layers)
	for l := range x.layers {
		if !x.lazy || l == 0 {
			s.read(l, x.reads)
		}
	}
	for l := range x.layers {
		s.host = noLayer
		if x.hosts {
			s.host = int32(l)
			s.note(readAwaited, int32(l), 0)
		}
		begin := s.now
		s.until(s.now+60_000*ms, func() bool { return !s.missing(l) })
		require.False(s.t, s.missing(l), "layer %d never came", l)
		s.bubble += s.now - begin
		if x.lazy && l+1 < x.layers {
			s.read(l+1, x.reads)
		}
		s.until(s.now+s.takes(x), nil)
		s.p.layerDone(s.now, l)
		s.layersDone++
		s.deferWrite(x.stores)
		if s.onLayer != nil {
			s.onLayer()
		}
	}
	s.host = noLayer
}

// settle ends all passes and waits until the buffer is empty.
func (s *sim) settle() {
	s.p.endPass(s.now)
	s.until(s.now+60_000*ms, func() bool { return len(s.buffer)+len(s.flights)+len(s.queue) == 0 })
	require.Empty(s.t, s.buffer, "deferred writes that never went")
	require.Empty(s.t, s.flights)
}

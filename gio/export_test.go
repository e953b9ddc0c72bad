package gio

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// TestPacer grants what a test says, and checks what it is told.
type TestPacer struct {
	mu      sync.Mutex
	wake    func()
	granted uint64 // objects of deferred writes that may go
	ahead   uint64
	told    [writeArrived + 1]ioSize
	awaited int32
	early   uint64
	err     error
}

// WithPacer is a configuration with a pacer that grants nothing and reads without limit.
func WithPacer(c RingConfig) (RingConfig, *TestPacer) {
	p := &TestPacer{ahead: math.MaxUint64, awaited: noLayer}
	c.pacer = p
	return c, p
}

// Allow lets so many more objects be written.
func (p *TestPacer) Allow(objects uint64) {
	p.mu.Lock()
	p.granted += objects
	p.mu.Unlock()
	p.wake()
}

// Ahead bounds the bytes of reads that nobody waits for, and forgets which ones somebody waited for.
func (p *TestPacer) Ahead(bytes uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead, p.awaited, p.early = bytes, noLayer, 0
}

// Early is how many pieces of layers were read though nobody waited for them or one behind them.
func (p *TestPacer) Early() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.early
}

// Written is how many objects of deferred writes were issued.
func (p *TestPacer) Written() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told[writeIssued].objects
}

// Check says what was told wrongly, or is told to be under way when nothing is.
func (p *TestPacer) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range [...][2]ioEventKind{
		{readQueued, readIssued}, {readIssued, readArrived}, {readQueued, readEnded},
		{writeQueued, writeIssued}, {writeIssued, writeArrived},
	} {
		if p.err == nil && p.told[k[0]] != p.told[k[1]] {
			p.err = fmt.Errorf("events %d tell of %+v, events %d of %+v", k[0], p.told[k[0]], k[1], p.told[k[1]])
		}
	}
	return p.err
}

func (p *TestPacer) fail(format string, a ...any) {
	if p.err == nil {
		p.err = fmt.Errorf(format, a...)
	}
}

func (p *TestPacer) start(wake func()) { p.wake = wake }

func (p *TestPacer) writes(now int64, l *load) grant {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case l.next.objects == 0 || l.next.objects > l.deferred.objects || l.next.bytes > l.deferred.bytes:
		p.fail("the next of %+v is %+v", l.deferred, l.next)
	case l.reading.objects > l.reads.objects || l.reading.bytes > l.reads.bytes:
		p.fail("reads are %+v, in flight %+v", l.reads, l.reading)
	case l.oldest <= 0 || l.oldest > now:
		p.fail("the oldest is of %d at %d", l.oldest, now)
	case l.fill > l.size/4*3 || l.size == 0:
		p.fail("asked with %d of %d bytes taken", l.fill, l.size)
	}
	if p.granted < l.next.objects {
		return grant{ioSize: ioSize{objects: p.granted, bytes: math.MaxUint64}, again: never}
	}
	return everything
}

func (p *TestPacer) readAhead(int64) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ahead
}

func (p *TestPacer) harvestBlocks(int64) int { return 2 }

func (p *TestPacer) note(e ioEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := &p.told[e.kind]
	n.objects += e.objects
	n.bytes += e.bytes
	switch e.kind {
	case readIssued:
		if e.layer > p.awaited {
			p.early++
		}
	case readAwaited:
		p.awaited = max(p.awaited, e.layer)
	case writeIssued:
		p.granted -= min(p.granted, e.objects)
	}
	if e.at <= 0 || e.at > clock() || e.took < 0 || e.took > e.at {
		p.fail("event %d at %d took %d", e.kind, e.at, e.took)
	}
}

// TestScheduler is a scheduler whose user computes passes of all kinds, now and then.
type TestScheduler struct{ *Scheduler }

// WithScheduler is a configuration with a scheduler.
func WithScheduler(c RingConfig) (RingConfig, TestScheduler) {
	s, err := NewScheduler(SchedulerConfig{MaxAge: 5 * time.Millisecond})
	if err != nil {
		panic(err)
	}
	c.Scheduler = s
	return c, TestScheduler{s}
}

// Step tells something of compute.
func (s TestScheduler) Step(random *rand.Rand) error {
	switch random.IntN(5) {
	case 0:
		return s.Prefill(1+random.IntN(1<<14), random.IntN(1<<14), 1+random.IntN(12))
	case 1:
		return s.DecodeStep(1 + random.IntN(1<<14))
	case 2:
		s.EndPass()
	default:
		s.LayerDone(random.IntN(12), nil)
	}
	return nil
}

// Check says what of reads and writes the scheduler takes for under way, of which there is none.
func (s TestScheduler) Check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.policy
	if n := p.reads.left + p.reads.flying + p.reads.layer + p.read.flying + p.write.flying; n != 0 {
		return fmt.Errorf("the scheduler takes %d bytes for under way", n)
	}
	for i := range p.reads.layers {
		for l, r := range p.reads.layers[i] {
			if r != (layerReads{}) {
				return fmt.Errorf("the scheduler takes %+v of layer %d for under way", r, l)
			}
		}
	}
	return nil
}

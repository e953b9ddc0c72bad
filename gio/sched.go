package gio

import (
	"fmt"
	"sync"
	"time"

	"tuttifs/slack"
)

// SchedulerConfig of a session. The zero value learns all it needs.
type SchedulerConfig struct {
	// Table has windows and rates to begin with; nil: everything is learned.
	Table *slack.Table
	// Idle is how long no pass is under way before deferred writes take that for idleness. 0: IdleDefault.
	Idle time.Duration
	// MaxAge of a deferred write: an older one waits for no window, and has turns beside reads. 0: MaxAgeDefault.
	MaxAge time.Duration

	// Switches for ablation. Off: reads and writes go whenever they like, and are counted. NoBudget: as much of either
	// is in flight as there is. ReadsNotFirst: writes do not wait for reads.
	Off, NoBudget, ReadsNotFirst bool
}

// Defaults of SchedulerConfig.
const (
	IdleDefault   = 5 * time.Millisecond
	MaxAgeDefault = time.Second
)

// Scheduler says what an executor may have in flight. It is told what compute does (by the session's user) and what
// I/O does (by the executor), and may be called from any thread; policy has its rules. A scheduler is of one executor:
// RingConfig.Scheduler.
type Scheduler struct {
	mu     sync.Mutex
	policy policy
	wake   func() // has the executor ask again
}

// NewScheduler checks the configuration.
func NewScheduler(c SchedulerConfig) (*Scheduler, error) {
	if c.Idle < 0 || c.MaxAge < 0 {
		return nil, fmt.Errorf("%w: idle %v, age %v of a scheduler", ErrInvalid, c.Idle, c.MaxAge)
	}
	if c.Idle == 0 {
		c.Idle = IdleDefault
	}
	if c.MaxAge == 0 {
		c.MaxAge = MaxAgeDefault
	}
	if c.Table != nil {
		if err := c.Table.Validate(); err != nil {
			return nil, fmt.Errorf("%w: the slack table: %w", ErrInvalid, err)
		}
	}
	s := &Scheduler{wake: func() {}}
	s.policy.setUp(c)
	return s, nil
}

// Table is the one that it was made with, nil if there is none.
func (s *Scheduler) Table() *slack.Table { return s.policy.c.Table }

// told calls f of the policy, and has the executor ask again, since compute has gone on.
func (s *Scheduler) told(f func(p *policy, now int64)) {
	s.mu.Lock()
	f(&s.policy, clock())
	wake := s.wake
	s.mu.Unlock()
	wake()
}

// Prefill begins a pass of so many layers over input new tokens behind prefix cached ones, and ends the one before.
// Reads that are issued from now on are for it; so are those that were issued while nothing was under way, or for
// layers that the pass before had behind it.
func (s *Scheduler) Prefill(input, prefix, layers int) error {
	if input < 1 || input > slack.LengthMax || prefix < 0 || prefix > slack.LengthMax || layers < 1 ||
		layers > schedLayersMax {
		return fmt.Errorf("%w: a pass of %d tokens behind %d, of %d layers: want 1 to %d, 0 to %d, 1 to %d", ErrInvalid,
			input, prefix, layers, slack.LengthMax, slack.LengthMax, schedLayersMax)
	}
	s.told(func(p *policy, now int64) { p.prefill(now, input, prefix, layers) })
	return nil
}

// LayerDone says that compute has done a layer of the pass, and all before it; the last one's ends the pass. One that
// is done already is not done again, and without a pass it says nothing.
func (s *Scheduler) LayerDone(layer int) {
	s.told(func(p *policy, now int64) { p.layerDone(now, layer) })
}

// DecodeStep begins a decode step over so many tokens, and ends what was under way.
func (s *Scheduler) DecodeStep(length int) error {
	if length < 1 || length > slack.LengthMax {
		return fmt.Errorf("%w: a decode step over %d tokens: want 1 to %d", ErrInvalid, length, slack.LengthMax)
	}
	s.told(func(p *policy, now int64) { p.decodeStep(now, length) })
	return nil
}

// EndPass says that nothing computes any more.
func (s *Scheduler) EndPass() { s.told((*policy).endPass) }

// Offer says whether a prefix of cached tokens before input new ones is to be restored, in a pass of so many layers.
func (s *Scheduler) Offer(input, cached, layers int) Offer {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policy.account(clock())
	return s.policy.offer(input, cached, layers)
}

// Stats is safe to call at any time.
func (s *Scheduler) Stats() SchedulerStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy.snapshot(clock())
}

// LayerBubbles is the time that compute stood before each layer, in all passes so far.
func (s *Scheduler) LayerBubbles() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policy.account(clock())
	return append([]time.Duration(nil), s.policy.bubbles...)
}

var _ pacer = (*Scheduler)(nil)

func (s *Scheduler) start(wake func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake = wake
}

func (s *Scheduler) writes(now int64, l *load) grant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy.writes(now, l)
}

func (s *Scheduler) readAhead(now int64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy.readAhead(now)
}

func (s *Scheduler) harvestBlocks(now int64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy.harvestBlocks(now)
}

func (s *Scheduler) note(e ioEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policy.note(e)
}

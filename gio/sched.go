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
	// Patience of those who wait for deferred writes to end (Finish): after it nothing waits for a window, whatever its
	// age. 0: PatienceDefault.
	Patience time.Duration

	// Switches for ablation. Off: reads and writes go whenever they like, and are counted. NoBudget: as much of either
	// is in flight as there is. ReadsNotFirst: writes do not wait for reads.
	Off, NoBudget, ReadsNotFirst bool
}

// Defaults of SchedulerConfig.
const (
	IdleDefault     = 5 * time.Millisecond
	MaxAgeDefault   = time.Second
	PatienceDefault = 100 * time.Millisecond
)

// Scheduler says what an executor may have in flight. It is told what compute does (by the session's user) and what
// I/O does (by the executor), and may be called from any thread; policy has its rules. A scheduler is of one executor:
// RingConfig.Scheduler.
//
// What compute does may be told ahead of it: what comes behind an event waits for that, and what is told later waits
// with it.
type Scheduler struct {
	order   sync.Mutex // held while something is told; before mu
	waiting []told
	passes  uint64 // that were begun, here or in waiting

	mu     sync.Mutex
	policy policy
	wake   func() // has the executor ask again
}

// Event is what a told thing may come behind: *cuda.Event is one.
type Event interface {
	// Query says whether it has come.
	Query() (done bool, err error)
}

// told is something that compute does.
type told struct {
	do    func(p *policy, now int64)
	event Event // it is done when this has come; nil: now
	pass  uint64
}

// NewScheduler checks the configuration.
func NewScheduler(c SchedulerConfig) (*Scheduler, error) {
	if c.Idle < 0 || c.MaxAge < 0 || c.Patience < 0 {
		return nil, fmt.Errorf("%w: idle %v, age %v, patience %v of a scheduler", ErrInvalid, c.Idle, c.MaxAge, c.Patience)
	}
	if c.Idle == 0 {
		c.Idle = IdleDefault
	}
	if c.MaxAge == 0 {
		c.MaxAge = MaxAgeDefault
	}
	if c.Patience == 0 {
		c.Patience = PatienceDefault
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

// tell has the policy told, at once or when all that was told before has come, and has the executor ask again.
func (s *Scheduler) tell(t told) {
	s.order.Lock()
	defer s.order.Unlock()
	t.pass = s.passes
	if s.waiting = append(s.waiting, t); t.event != nil {
		s.waker()() // its thread looks for it
		return
	}
	if len(s.waiting) == 1 {
		s.next(clock())
	}
}

// begins is tell of a pass. What the pass before the last one waits for is not looked at any more.
func (s *Scheduler) begins(do func(p *policy, now int64)) {
	s.order.Lock()
	s.passes++
	for len(s.waiting) > 0 && s.waiting[0].pass+2 <= s.passes {
		s.next(clock())
	}
	if len(s.waiting) > 0 {
		s.mu.Lock()
		s.policy.announced++
		s.mu.Unlock()
		begin := do
		do = func(p *policy, now int64) {
			p.announced--
			begin(p, now)
		}
	}
	s.order.Unlock()
	s.tell(told{do: do})
}

// next tells what is first. order is held.
func (s *Scheduler) next(now int64) {
	t := s.waiting[0]
	s.waiting[0] = told{}
	s.waiting = s.waiting[1:]
	s.mu.Lock()
	t.do(&s.policy, now)
	s.mu.Unlock()
	s.waker()()
}

func (s *Scheduler) waker() func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wake
}

// look tells what has come. It reports whether more is waited for. An event that cannot be asked for has come, since
// nobody will ever know better.
func (s *Scheduler) look(now int64) (more bool) {
	if !s.order.TryLock() {
		return true // somebody is telling something
	}
	defer s.order.Unlock()
	for len(s.waiting) > 0 {
		if event := s.waiting[0].event; event != nil {
			if done, err := event.Query(); err == nil && !done {
				return true
			}
		}
		s.next(now)
	}
	return false
}

// Prefill begins a pass of layers that are numbered below layers, over input new tokens behind prefix cached ones, and
// ends the one before.
// Reads that are issued from now on are for it; so are those that were issued while nothing was under way, or for
// layers that the pass before had behind it.
func (s *Scheduler) Prefill(input, prefix, layers int) error {
	if err := checkPass(input, prefix, layers); err != nil {
		return err
	}
	s.begins(func(p *policy, now int64) { p.prefill(now, input, prefix, layers) })
	return nil
}

func checkPass(input, prefix, layers int) error {
	if input < 1 || input > slack.LengthMax || prefix < 0 || prefix > slack.LengthMax || layers < 1 ||
		layers > schedLayersMax {
		return fmt.Errorf("%w: a pass of %d tokens behind %d, of %d layers: want 1 to %d, 0 to %d, 1 to %d", ErrInvalid,
			input, prefix, layers, slack.LengthMax, slack.LengthMax, schedLayersMax)
	}
	return nil
}

// LayerDone says that compute has done a layer of the pass, and all before it, or will have when an event has come; the
// last one's ends the pass. One that is done already is not done again, and without a pass it says nothing. The event
// was recorded before, and stays as it is until the second pass after this one begins. Only an executor on a GPU looks
// for events: on the CPU it is nil. What is stored says nothing of compute: it may be of a pass that is over.
func (s *Scheduler) LayerDone(layer int, after Event) {
	s.tell(told{do: func(p *policy, now int64) { p.layerDone(now, layer) }, event: after})
}

// DecodeStep begins a decode step over so many tokens, and ends what was under way.
func (s *Scheduler) DecodeStep(length int) error {
	if length < 1 || length > slack.LengthMax {
		return fmt.Errorf("%w: a decode step over %d tokens: want 1 to %d", ErrInvalid, length, slack.LengthMax)
	}
	s.begins(func(p *policy, now int64) { p.decodeStep(now, length) })
	return nil
}

// EndPass says that nothing computes any more, once what was told before has come.
func (s *Scheduler) EndPass() { s.tell(told{do: (*policy).endPass}) }

// Offer says whether a prefix of cached tokens before input new ones is to be restored, in a pass of so many layers.
// It refuses what Prefill refuses.
func (s *Scheduler) Offer(input, cached, layers int) (Offer, error) {
	if err := checkPass(input, cached, layers); err != nil {
		return Offer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policy.account(clock())
	return s.policy.offer(input, cached, layers), nil
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

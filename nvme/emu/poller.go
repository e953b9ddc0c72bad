package emu

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

// Backend names the way to the drive.
type Backend string

const (
	Auto  Backend = ""      // memory where the drive's bytes can be addressed, else the faster of the two measured
	URing Backend = "uring" // io_uring by raw system calls
	Pread Backend = "pread" // a pool of preadv/pwritev workers
)

// Times of the poller's loop.
const (
	napMax      = 50 * time.Microsecond
	ringWaitMax = 250 * time.Microsecond // for a transfer's completion; doorbells are seen after it
	spinDefault = 20 * time.Microsecond
	kickEvery   = time.Millisecond // how often Stop repeats its wake-up until the poller has ended
)

// PollerConfig of one polling thread (one or more per session).
type PollerConfig struct {
	Backend Backend
	// Armed is a count in shared memory that the executor raises before it rings and lowers when its work is done.
	// While it is not zero the poller naps at most 50 us; at zero it sleeps on Wake.
	Armed *uint32
	// Wake is a futex word in shared memory: the poller stores a number and sleeps; the executor, after raising Armed,
	// swaps in 0 and wakes if it was another (nvme.Wake). Without it the poller never sleeps but naps.
	Wake *uint32
	// Number tells the pollers apart that share Wake: 0 and up.
	Number uint32
	// Spin before napping; 0 means 20 us.
	Spin time.Duration
	// Beside is work that the poller's thread does in each step; true asks for the next one within a nap.
	Beside func(now time.Time) bool
	// Share bounds the session's commands in system calls; nil shares what is no session's own.
	Share *Share
}

// Poller serves queues on one OS thread. Methods are safe for concurrent use.
type Poller struct {
	cfg   PollerConfig
	event uint32 // futex of the nap: 1 while the poller waits on it
	stop  atomic.Bool
	ended chan struct{} // not nil while Run runs; closed at its end
	runMu sync.Mutex    // guards ended

	mu      sync.Mutex
	queues  []*Queue
	workers *workers
	ring    *ring
	ringErr error
	timers  timers
	phases  []*drivePhase
	now     time.Time  // when the step began
	first   int        // of queues: which is served first
	refused bool       // some queue, or what is beside, waits for its drive's phase
	blocked int        // commands that workers have
	extra   func() int // the admin queue's own work, after all queues
	closed  bool
}

// NewPoller makes a poller. It fails if the backend is demanded and not to be had.
func NewPoller(c PollerConfig) (*Poller, error) {
	switch c.Backend {
	case Auto, URing, Pread:
	default:
		return nil, fmt.Errorf("%w: unknown backend %q", ErrConfig, c.Backend)
	}
	if c.Spin == 0 {
		c.Spin = spinDefault
	}
	p := &Poller{cfg: c}
	p.workers = newWorkers(&p.event, c.Share)
	if c.Backend == URing {
		if p.ring, p.ringErr = newRing(ringEntries); p.ringErr != nil {
			return nil, fmt.Errorf("%w: io_uring: %w", ErrBackend, p.ringErr)
		}
	}
	return p, nil
}

// Add makes the poller serve q, for good: a queue leaves by Quiesce.
func (p *Poller) Add(q *Queue) {
	backend, reason := p.pick(q.controller)
	p.mu.Lock()
	p.add(q, backend, reason)
	p.mu.Unlock()
	p.kick()
}

// pick chooses the way to the controller's drive and makes sure that the poller has it.
func (p *Poller) pick(c *Controller) (Backend, string) {
	backend, reason := c.Choose(p.cfg.Backend)
	p.mu.Lock()
	defer p.mu.Unlock()
	if backend == URing && p.ring == nil && p.ringErr == nil && !p.closed {
		p.ring, p.ringErr = newRing(ringEntries)
	}
	if backend == URing && p.ring == nil {
		return Pread, fmt.Sprintf("no io_uring: %v", p.ringErr)
	}
	return backend, reason
}

func (p *Poller) add(q *Queue, backend Backend, reason string) {
	if !p.closed && q.poller.CompareAndSwap(nil, p) {
		q.backend, q.reason = backend, reason
		if q.admin == nil {
			q.phase = p.phaseOf(q.controller)
		}
		p.queues = append(p.queues, q)
	}
}

// Step serves what is there and returns the number of commands fetched and completed: the inner loop, also for benches
// that run both sides on one core.
func (p *Poller) Step() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.step()
}

func (p *Poller) step() int {
	start := time.Now()
	p.now, p.refused = start, false
	n, busy := p.reap(), 0
	// In turns: where a phase admits only so much, none is always the first.
	if p.first++; p.first >= len(p.queues) {
		p.first = 0
	}
	for i := range p.queues {
		if i += p.first; i >= len(p.queues) {
			i -= len(p.queues)
		}
		q := p.queues[i]
		q.worked = q.serve(p)
		n += q.worked
		busy += min(q.worked, 1)
	}
	if p.extra != nil {
		n += p.extra()
	}
	if p.ring != nil {
		p.ring.submit()
	}
	if p.cfg.Beside != nil && p.cfg.Beside(start) {
		p.refused = true
	}
	var end time.Time // asked for once, and only where it is needed
	if busy > 0 {
		end = time.Now()
	}
	p.settle(end)
	if busy > 0 {
		share := uint64(end.Sub(start)) / uint64(busy)
		for _, q := range p.queues {
			if q.worked > 0 {
				q.stats.BusyNanoseconds += share
				q.controller.stats.add(&q.stats)
			}
		}
	}
	return n
}

// reap takes what backends have finished and what is due.
func (p *Poller) reap() int {
	n := 0
	if p.workers.done.Load() != nil {
		for c := p.workers.done.Swap(nil); c != nil; n++ {
			next := c.next
			p.blocked--
			p.finish(c)
			c = next
		}
	}
	if p.ring != nil {
		n += p.ring.reap(p)
	}
	if len(p.timers) > 0 {
		now := time.Now()
		for len(p.timers) > 0 && !p.timers[0].due.After(now) {
			c := p.timers.pop()
			switch {
			case c.moved:
				c.queue.ready1(c)
			case c.held() || c.queue.phase != nil && !p.admits(c.queue.phase, c.sqe.Opcode, now):
				c.due = now.Add(napMax)
				p.timers.push(c)
				continue
			default:
				p.begin(c)
			}
			n++
		}
	}
	return n
}

// dispatch hands a command to the backend that can take it.
func (p *Poller) dispatch(c *command) {
	if c.queue.backend == URing && (c.kind == doRead || c.kind == doWrite) && !c.bounced() &&
		len(c.data.list) <= iovMax {
		p.ring.push(c)
		return
	}
	p.blocked++
	p.workers.submit(c)
}

// drop forgets the queue's commands that have not begun or whose completion was held back.
func (p *Poller) drop(q *Queue) {
	for i := 0; i < len(p.timers); {
		if c := p.timers[i]; c.queue == q {
			p.timers.remove(i)
			if !c.moved {
				c.moved, c.status = true, nvme.AbortRequested
			}
			q.ready1(c)
			i = 0
			continue
		}
		i++
	}
}

// Quiesce stops fetching from the queue, waits until no command of it is in flight (bounded by the deadline), and
// detaches it. After it returns nil nothing of this queue touches memory or drive any more. Commands that a fault
// delays and that have not begun never will. Without a running poller, Quiesce does the waiting steps itself.
func (q *Queue) Quiesce(deadline time.Time) error {
	p := q.poller.Load()
	for pause := 10 * time.Microsecond; p != nil; pause = min(2*pause, time.Millisecond) {
		p.mu.Lock()
		done := p.drain(q)
		p.mu.Unlock()
		if done {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: queue %d of drive %s", ErrQuiesce, q.id, q.controller.drive.Name())
		}
		time.Sleep(pause)
	}
	q.controller.detach(q)
	return nil
}

// drain takes one step towards the queue's end and is true once it has left the poller.
func (p *Poller) drain(q *Queue) bool {
	q.draining = true
	p.drop(q)
	p.reap()
	p.drop(q) // what a modelled drive has held back meanwhile
	p.leavePhases()
	if q.inflight > 0 {
		if p.ring != nil {
			p.ring.submit() // the rest of a transfer that came short, if nobody else steps
		}
		return false
	}
	if !q.dead.Load() && q.cq.poll() {
		q.publish()
	}
	q.controller.stats.add(&q.stats)
	for i, x := range p.queues {
		if x == q {
			p.queues = append(p.queues[:i], p.queues[i+1:]...)
			p.leavePhase(q)
			break
		}
	}
	return true
}

// kick wakes the poller from whatever it sleeps on.
func (p *Poller) kick() {
	nvme.Wake(&p.event)
	if w := p.cfg.Wake; w != nil {
		atomic.StoreUint32(w, 0)
		nvme.FutexWake(w)
	}
}

// Run loops until Stop; it locks its OS thread. It returns at once if the poller runs or has been stopped.
func (p *Poller) Run() {
	p.runMu.Lock()
	if p.ended != nil || p.stop.Load() {
		p.runMu.Unlock()
		return
	}
	ended := make(chan struct{})
	p.ended = ended
	p.runMu.Unlock()
	defer close(ended)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Timers of a thread may be late by its slack, 50 us by default: as long as a whole nap. 0 restores the default.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) }()

	var idle time.Time // since when there is nothing to do
	for !p.stop.Load() {
		p.mu.Lock()
		n, inKernel, wait := p.step(), p.ring != nil && p.ring.inflight > 0, p.untilDue(ringWaitMax)
		p.mu.Unlock()
		now := time.Now()
		switch {
		case n > 0:
			idle = time.Time{}
		case inKernel:
			// The next completion is the next thing to happen, unless an executor rings more: spinning for that, or
			// waking up at every nap's end to look, costs several times the transfers themselves.
			p.ring.wait(wait)
		case idle.IsZero():
			idle = now
		case now.Sub(idle) < p.cfg.Spin:
		case p.rest():
			idle = time.Time{}
		}
	}
}

// rest naps while work is expected and sleeps otherwise. It is true when there is or may be something to do.
func (p *Poller) rest() bool {
	p.mu.Lock()
	nap, backend, timed := p.untilDue(napMax), p.blocked > 0, len(p.timers) > 0 || p.refused
	p.mu.Unlock()
	wake := p.cfg.Wake
	if backend || wake == nil {
		p.awaitWorkers(nap)
		return false
	}
	armed := p.armed()
	if !armed && !timed {
		nap = 0 // until somebody wakes us
	}
	// The word is never taken back: several pollers may share it, and a number with nobody asleep costs the executor one
	// call.
	number := p.cfg.Number + 1
	atomic.StoreUint32(wake, number)
	if p.armed() != armed || p.stepAndLook() || p.stop.Load() {
		return true
	}
	return !nvme.FutexWait(wake, number, nap)
}

// stepAndLook is a step that is true also if it left something to come back for, which a sleep could miss.
func (p *Poller) stepAndLook() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.refused
	return p.step() > 0 || p.refused && !was
}

// untilDue shortens a sleep to the time until the first timer is due, and to a nap where a queue waits for its drive's
// phase. The caller holds the lock.
func (p *Poller) untilDue(most time.Duration) time.Duration {
	if p.refused {
		most = min(most, napMax)
	}
	if len(p.timers) == 0 {
		return most
	}
	return min(most, max(time.Until(p.timers[0].due), time.Microsecond))
}

// awaitWorkers sleeps until a worker has finished something, at most for a time. The look at their list after the
// announcement makes sure that none of them is overslept.
func (p *Poller) awaitWorkers(nap time.Duration) {
	atomic.StoreUint32(&p.event, 1)
	if p.workers.done.Load() == nil && !p.stop.Load() {
		nvme.FutexWait(&p.event, 1, nap)
	}
	atomic.StoreUint32(&p.event, 0)
}

// Await blocks until a drive has finished something, at most for a time; with nothing in flight it returns at once. It
// is for threads that Step themselves and have nothing else to do.
func (p *Poller) Await(timeout time.Duration) {
	p.mu.Lock()
	inKernel, blocked := p.ring != nil && p.ring.inflight > 0, p.blocked > 0 || p.refused
	timeout = p.untilDue(timeout)
	p.mu.Unlock()
	switch {
	case inKernel:
		p.ring.wait(timeout)
	case blocked:
		p.awaitWorkers(timeout)
	}
}

func (p *Poller) armed() bool { return p.cfg.Armed != nil && atomic.LoadUint32(p.cfg.Armed) != 0 }

// Stop ends Run and waits for it, and for everything that backends still have: after it returns the poller touches
// neither memory nor drives. Queues should be quiesced first; those that are not are left without service.
func (p *Poller) Stop() {
	p.stop.Store(true)
	p.runMu.Lock()
	ended := p.ended
	p.runMu.Unlock()
	for ended != nil {
		p.kick() // again and again: the executor may write the word, too
		select {
		case <-ended:
			ended = nil
		case <-time.After(kickEvery):
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	for _, q := range p.queues {
		q.draining = true
		p.drop(q)
	}
	p.workers.stop()
	p.reap()
	if p.ring != nil {
		for p.ring.inflight > 0 {
			p.ring.submit()
			p.ring.wait(time.Millisecond)
			p.reap()
		}
		p.ring.close()
		p.ring = nil
	}
	for _, ph := range p.phases {
		ph.Close(time.Now())
	}
	p.phases = nil
}

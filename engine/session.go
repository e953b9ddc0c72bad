package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/nvme"
)

// SessionOptions of the data path. Zero fields take defaults.
type SessionOptions struct {
	Lanes         int           // 4
	Depth         int           // entries of each queue, 256
	DMABytes      int           // memory that controllers reach: buffers made of Session.DMA lie in it; 256 MiB
	BounceBytes   int           // of it, for buffers elsewhere; 0: direct only
	ArenaBytes    int           // of metadata batches, 1 MiB; ranks that join each other's reservations use equal ones
	ChunkCommands int           // as in gio.RingConfig, 0: a batch is spread over all lanes
	Deadline      time.Duration // of every wait, 30 s
}

func (o SessionOptions) withDefaults() SessionOptions {
	for _, d := range []struct {
		p     *int
		value int
	}{{&o.Lanes, 4}, {&o.Depth, 256}, {&o.DMABytes, 256 << 20}, {&o.ArenaBytes, 1 << 20}} {
		if *d.p == 0 {
			*d.p = d.value
		}
	}
	if o.Deadline == 0 {
		o.Deadline = gio.DeadlineDefault
	}
	return o
}

func (o SessionOptions) validate() error {
	if o.Lanes < 0 || o.Depth < 0 || o.DMABytes < 0 || o.BounceBytes < 0 || o.ArenaBytes < 0 || o.Deadline < 0 ||
		o.ChunkCommands < 0 {
		return fmt.Errorf("%w: negative session option", ErrInvalid)
	}
	if o.BounceBytes > o.DMABytes {
		return fmt.Errorf("%w: %d bytes of bounce cells in %d bytes of DMA memory",
			ErrInvalid, o.BounceBytes, o.DMABytes)
	}
	return nil
}

// verbs is what pools ask of the ABI; *ioctl.Client does it.
type verbs interface {
	PoolOpen(a *ioctl.PoolOpen) error
	Layout(a *ioctl.Layout) error
	Rows(a *ioctl.Rows) error
	MapAck(a *ioctl.MapAck) error
	Peek(a *ioctl.Peek) error
	Pin(a *ioctl.Pin) error
	Release(a *ioctl.Release) error
	Reserve(a *ioctl.Reserve, flags uint16) error
	Commit(a *ioctl.Commit) error
	Abort(a *ioctl.Abort) error
	ReportBad(a *ioctl.ReportBad) error
}

// control is the metadata side of a session.
type control struct {
	verbs    verbs
	deadline time.Duration
	// mapWord moves when any pool's rows have changed.
	mapWord func() uint64
	// wait returns when a ticket has finished.
	wait func(ctx context.Context, ticket uint64) error

	mu    sync.Mutex // guards arena: one batch at a time
	arena []byte     // shared with the daemon; nil once closed
}

// call runs one verb that needs no arena.
func (c *control) call(f func() error) error {
	c.mu.Lock()
	closed := c.arena == nil
	c.mu.Unlock()
	if closed {
		return errClosed
	}
	return explain(f())
}

var errClosed = fmt.Errorf("%w: it was closed here", ErrGone)

// ticket waits for a ticket, at most the deadline.
func (c *control) ticket(id uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.deadline)
	defer cancel()
	err := c.wait(ctx, id)
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: after %v: %w", ErrAgain, c.deadline, err)
	}
	return explain(err)
}

// Pauses of retry.
const (
	retryFirst = 200 * time.Microsecond
	retryMost  = 50 * time.Millisecond
)

// retry repeats f while it says EAGAIN, at most until the deadline.
func (c *control) retry(f func() error) error {
	end := time.Now().Add(c.deadline)
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		err := f()
		if !errors.Is(err, ioctl.EAGAIN) || time.Now().After(end) {
			return explain(err)
		}
		time.Sleep(pause)
	}
}

// retryCall is retry for a verb that needs no arena.
func (c *control) retryCall(f func() error) error {
	return c.retry(func() error { return c.call(f) })
}

// Session is this process's membership in a session, with its ring.
type Session struct {
	control
	client *ioctl.Client
	attach *ioctl.Attachment
	ring   gio.Executor
	token  [ioctl.TokenBytes]byte
	id     uint32
	queues [][]gio.Queue

	stop    chan struct{}
	stopped chan struct{}
	once    sync.Once
	closed  error
}

// NewSession makes a session of which this process is the first member.
func (m *Mount) NewSession(o SessionOptions) (*Session, error) {
	return m.session(o, func(c *ioctl.Client, a *ioctl.Session) error { return c.SessionCreate(a) }, [16]byte{})
}

// JoinSession makes this process a member of the session with that token.
func (m *Mount) JoinSession(token [16]byte, o SessionOptions) (*Session, error) {
	return m.session(o, func(c *ioctl.Client, a *ioctl.Session) error { return c.SessionJoin(a) }, token)
}

// enter is SESSION_CREATE or SESSION_JOIN.
type enter func(*ioctl.Client, *ioctl.Session) error

func (m *Mount) session(o SessionOptions, enter enter, token [16]byte) (*Session, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	// A membership belongs to one open file, so every session has its own.
	client, err := openControl(m.path)
	if err != nil {
		return nil, explain(err)
	}
	a := ioctl.Session{Token: token, ArenaBytes: uint64(o.ArenaBytes)}
	s := &Session{client: client, stop: make(chan struct{}), stopped: make(chan struct{})}
	if err = enter(client, &a); err == nil {
		s.token, s.id = a.Token, a.ID
		s.attach, err = a.Attach(ioctl.AttachOptions{Lanes: o.Lanes, Depth: o.Depth, DMABytes: uint64(o.DMABytes)})
	}
	if err == nil {
		err = s.build(o)
	}
	if err != nil {
		close(s.stopped)
		_ = s.Close()
		return nil, fmt.Errorf("engine: session on %s: %w", m.path, explain(err))
	}
	go s.watch()
	return s, nil
}

// build makes the control side and the ring over what was attached.
func (s *Session) build(o SessionOptions) error {
	r := &s.attach.Reply
	s.control.verbs, s.control.deadline, s.control.arena = s.client, o.Deadline, s.attach.Arena
	s.control.mapWord = s.attach.MapGeneration
	s.control.wait = func(ctx context.Context, id uint64) error {
		_, err := s.client.WaitTicket(ctx, s.attach, id)
		return err
	}
	for l := range int(r.Lanes) {
		var lane []gio.Queue
		for d := range int(r.Drives) {
			memory, err := nvme.MapQueue(s.attach.Block(l, d), int(r.Depth))
			if err != nil {
				return err
			}
			lane = append(lane, gio.Queue{Memory: memory, Drive: r.DriveIndex[d], LBABytes: int(r.LBABytes[d])})
		}
		s.queues = append(s.queues, lane)
	}
	ring, err := gio.NewRing(gio.RingConfig{
		Lanes: s.queues, DMA: s.attach.DMA, DMABase: r.DMABase, SGL: r.SGL == 1,
		BounceBytes: o.BounceBytes, ChunkCommands: o.ChunkCommands, Deadline: o.Deadline,
		Armed: s.attach.Word(ioctl.ArmedWord), Wake: s.attach.Word(ioctl.WakeWord),
		Quiesce: s.attach.Quiesce,
		Reattach: func(lane int) ([]gio.Queue, error) {
			if err := s.attach.Reattach(lane); err != nil {
				return nil, err
			}
			return s.queues[lane], nil
		},
	})
	if err == nil {
		s.ring = ring
	}
	return err
}

// watchEvery is how soon the death of a daemon is noticed.
const watchEvery = 100 * time.Millisecond

// watch ends the ring's waits when the daemon is gone.
func (s *Session) watch() {
	defer close(s.stopped)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
			if !s.attach.Alive() {
				s.ring.Abandon(ErrGone)
				return
			}
		}
	}
}

// Token lets other processes join.
func (s *Session) Token() [16]byte { return s.token }

// ID is the session's number in status files.
func (s *Session) ID() uint32 { return s.id }

// Ring is the executor over this session's queues.
func (s *Session) Ring() gio.Executor { return s.ring }

// DMA is memory that controllers reach, beyond the bounce cells and what the ring needs itself.
func (s *Session) DMA() []byte { return s.ring.DMA() }

// Close ends what is in flight, leaves the session and frees everything. DMA memory must not be touched afterwards.
func (s *Session) Close() error {
	s.once.Do(func() {
		close(s.stop)
		<-s.stopped
		var errs []error
		switch {
		case s.ring == nil:
		case s.attach.Alive():
			errs = append(errs, s.ring.Close())
		default:
			s.ring.Abandon(ErrGone)
		}
		s.control.mu.Lock()
		s.control.arena = nil
		s.control.mu.Unlock()
		if s.attach != nil {
			errs = append(errs, s.attach.Close())
		}
		s.closed = errors.Join(append(errs, s.client.Close())...)
	})
	return s.closed
}

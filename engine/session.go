package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/stripe"
)

// SessionOptions of the data path. Zero fields take defaults.
type SessionOptions struct {
	Lanes int // 4; with a GPU 8
	Depth int // entries of each queue, 256; with a GPU 1024
	// DMABytes is memory that controllers reach: buffers made of Session.DMA lie in it. 256 MiB; with a GPU 24 MiB more
	// than BounceBytes; with StoreBytes so much more. An eighth, 8 MiB at most, is for trailers; with a GPU two thirds of
	// what is neither BounceBytes nor StoreBytes, 16 MiB at most.
	DMABytes int
	// BounceBytes of the DMA memory are for buffers elsewhere. 0: direct only; with GPU options 64 MiB.
	BounceBytes int
	// StoreBytes of the DMA memory are the store buffer: what is stored leaves its source for it at once, and goes to the
	// drives when they have time. It adds lanes to Lanes. 0: none, and a store holds its source until the drives have it.
	// StorePolicy is what becomes of a store when the buffer is full.
	StoreBytes  int
	StorePolicy gio.StorePolicy
	// KeepBytes of host memory, beside the DMA memory, are for blocks that the mount's admission policy declines: there
	// they serve their first reuse, by this session, and go to the drives then. Pools have it in the order in which they
	// are opened (PoolSpec.KeepBytes). It needs BounceBytes, and is for sessions of one process. 0: none.
	KeepBytes     int
	ArenaBytes    int           // of metadata batches, 1 MiB; ranks that join each other's reservations use equal ones
	ChunkCommands int           // as in gio.RingConfig, 0: a batch is spread over all lanes
	Deadline      time.Duration // of every wait, 30 s
	GPU           *GPUOptions   // nil: the CPU executor
	// Real asks for queue pairs of the SSDs themselves, where the mount allows it (-o real) and its daemon drives them by
	// VFIO; other drives stay mediated. Nothing checks the commands then: no block may be committed that was not written
	// whole. The polling executor has none.
	Real      bool
	Scheduler SchedulerOptions
}

// withDefaults fills the zero fields, for an executor on the GPU or on the CPU.
func (o SessionOptions) withDefaults(gpu bool) SessionOptions {
	orElse := func(p *int, value int) {
		if *p == 0 {
			*p = value
		}
	}
	orElse(&o.ArenaBytes, 1<<20)
	if o.GPU != nil {
		orElse(&o.BounceBytes, gpuBounceBytes)
	}
	if gpu {
		options := *o.GPU
		orElse(&options.StagingBytes, gio.StagingDefault)
		o.GPU = &options
		orElse(&o.Lanes, gpuLanes)
		orElse(&o.Depth, gpuDepth)
		orElse(&o.DMABytes, o.BounceBytes+o.StoreBytes+gpuDMABytes)
	}
	orElse(&o.Lanes, 4)
	orElse(&o.Depth, 256)
	orElse(&o.DMABytes, o.StoreBytes+256<<20)
	if o.Deadline == 0 {
		o.Deadline = gio.DeadlineDefault
	}
	return o
}

func (o SessionOptions) validate() error {
	if o.Lanes < 0 || o.Depth < 0 || o.DMABytes < 0 || o.BounceBytes < 0 || o.ArenaBytes < 0 || o.Deadline < 0 ||
		o.ChunkCommands < 0 || o.StoreBytes < 0 || o.KeepBytes < 0 {
		return fmt.Errorf("%w: negative session option", ErrInvalid)
	}
	if o.Real && o.GPU != nil && o.GPU.Polling {
		return fmt.Errorf("%w: the polling executor has no queue pairs of the SSDs themselves", ErrInvalid)
	}
	if g := o.GPU; g != nil && (g.StagingBytes < 0 || g.PollSMs < 0) {
		return fmt.Errorf("%w: negative GPU option", ErrInvalid)
	}
	if o.StoreBytes != 0 && (o.StoreBytes < StoreLeast || o.StoreBytes%stripe.UnitBytes != 0) {
		return fmt.Errorf("%w: a store buffer of %d bytes: whole pages from %s on are possible",
			ErrInvalid, o.StoreBytes, sizeText(StoreLeast))
	}
	if o.StorePolicy > gio.StoreRefuse || o.StorePolicy != 0 && o.StoreBytes == 0 {
		return fmt.Errorf("%w: store policy %d with a store buffer of %d bytes", ErrInvalid, o.StorePolicy, o.StoreBytes)
	}
	if o.KeepBytes != 0 && (o.KeepBytes < KeepLeast || o.KeepBytes%stripe.UnitBytes != 0) {
		return fmt.Errorf("%w: %d bytes for blocks that are declined: whole pages from %s on are possible",
			ErrInvalid, o.KeepBytes, sizeText(KeepLeast))
	}
	if o.KeepBytes != 0 && o.BounceBytes == 0 && o.GPU == nil {
		return fmt.Errorf("%w: memory for blocks that are declined needs bounce cells: set BounceBytes", ErrInvalid)
	}
	if need := o.BounceBytes + o.StoreBytes; need > 0 && o.DMABytes > 0 && need > o.DMABytes {
		return fmt.Errorf("%w: %d bytes of bounce cells and %d of store buffer in %d bytes of DMA memory",
			ErrInvalid, o.BounceBytes, o.StoreBytes, o.DMABytes)
	}
	return nil
}

// StoreLeast is the smallest store buffer of a session: some objects of any size.
const StoreLeast = 16 << 20

// storeLanes are the lanes of the store buffer, beside the others.
func (o *SessionOptions) storeLanes() int {
	switch {
	case o.StoreBytes == 0:
		return 0
	case o.GPU != nil:
		return gpuStoreLanes
	}
	return 2
}

// allowed compares with what the mount gives a process.
func (o *SessionOptions) allowed(h *ioctl.Hello) error {
	if uint64(o.DMABytes) > h.DMAMax || uint64(o.Lanes+o.storeLanes()) > uint64(h.LanesMax) {
		return fmt.Errorf("%w: %s of DMA memory (%s of it store buffer) and %d lanes (%d of them for it): the mount gives "+
			"a process at most %s and %d", ErrInvalid, sizeText(o.DMABytes), sizeText(o.StoreBytes),
			o.Lanes+o.storeLanes(), o.storeLanes(), sizeText(int(h.DMAMax)), h.LanesMax)
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
	Stats(a *ioctl.Stats) error
	Changes(a *ioctl.Changes) error
	Present(a *ioctl.Present) error
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
	paces  *gio.Scheduler // the ring
	gpu    gpuSide        // zero on the CPU
	about  string         // what Describe says
	// anyTable says that the scheduler's table may be of another model than a pool's.
	anyTable bool
	token    [ioctl.TokenBytes]byte
	id       uint32
	queues   [][]gio.Queue
	kept     *keptMemory // nil: what is declined is not kept

	opening sync.Mutex // one pool at a time
	keeping sync.Mutex // guards keepers
	keepers []*keeper  // of its pools, one each; who holds opening may read them

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
	if o.KeepBytes != 0 {
		return nil, fmt.Errorf("%w: memory for blocks that are declined is for sessions of one process", ErrInvalid)
	}
	return m.session(o, func(c *ioctl.Client, a *ioctl.Session) error { return c.SessionJoin(a) }, token)
}

// enter is SESSION_CREATE or SESSION_JOIN.
type enter func(*ioctl.Client, *ioctl.Session) error

func (m *Mount) session(o SessionOptions, enter enter, token [16]byte) (*Session, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	scheduler, err := o.Scheduler.open()
	if err != nil {
		return nil, err
	}
	s := &Session{paces: scheduler, anyTable: o.Scheduler.AnyTable, stop: make(chan struct{}),
		stopped: make(chan struct{})}
	if o.GPU != nil {
		if err := s.gpu.open(o.GPU); err != nil {
			return nil, err
		}
	}
	o = o.withDefaults(s.gpu.context != nil)
	if err := o.allowed(&m.hello); err != nil {
		return nil, errors.Join(err, s.gpu.close(nil))
	}
	// A membership belongs to one open file, so every session has its own.
	client, err := openControl(m.path)
	if err != nil {
		return nil, errors.Join(explain(err), s.gpu.close(nil))
	}
	a := ioctl.Session{Token: token, ArenaBytes: uint64(o.ArenaBytes)}
	s.client = client
	if err = enter(client, &a); err == nil {
		s.token, s.id = a.Token, a.ID
		s.attach, err = a.Attach(ioctl.AttachOptions{
			Lanes: o.Lanes + o.storeLanes(), Depth: o.Depth, DMABytes: uint64(o.DMABytes), Real: o.Real,
		})
		if o.Real && errors.Is(err, ioctl.EPERM) {
			err = fmt.Errorf("%w: the mount gives this user no queue pairs of its SSDs (mount -o real=...): %v", ErrInvalid, err)
		}
	}
	if err == nil {
		err = s.build(o)
	}
	if err == nil {
		if o.KeepBytes > 0 {
			s.about += fmt.Sprintf("; %s for blocks that are declined", sizeText(o.KeepBytes))
		}
		s.about += "; " + o.Scheduler.about(s.paces)
		err = s.checkMachine(&o.Scheduler)
	}
	if err != nil {
		close(s.stopped)
		_ = s.Close()
		return nil, fmt.Errorf("engine: session on %s: %w", m.path, explain(err))
	}
	s.publish()
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
	if o.KeepBytes > 0 {
		kept, err := newKeptMemory(&o, s.attach)
		if err != nil {
			return err
		}
		s.kept = kept
	}
	for l := range int(r.Lanes) {
		lane, err := s.lane(l)
		if err != nil {
			return err
		}
		s.queues = append(s.queues, lane)
	}
	config := gio.RingConfig{
		Lanes: s.queues, DMA: s.attach.DMA, DMABase: r.DMABase, SGL: r.SGL == 1,
		BounceBytes: o.BounceBytes, ChunkCommands: o.ChunkCommands, Deadline: o.Deadline,
		Scheduler:  s.paces,
		StoreBytes: o.StoreBytes, StoreLanes: o.storeLanes(), StorePolicy: o.StorePolicy,
		Armed: s.attach.Word(ioctl.ArmedWord), Wake: s.attach.Word(ioctl.WakeWord),
		Quiesce: s.quiesce,
		Reattach: func(lane int) ([]gio.Queue, error) {
			err := s.attach.Reattach(lane)
			if err == nil && s.kept != nil {
				err = s.kept.reattach(lane)
			}
			if err != nil {
				return nil, err
			}
			return s.lane(lane) // where queue pairs are an SSD's own, they have other doorbells now
		},
	}
	if !s.served() {
		config.Armed, config.Wake = nil, nil
	}
	if s.gpu.context != nil {
		// A request waits for its trailers before anything else: what fits is read beside the first layer.
		config.ScratchBytes = scratchOf(len(config.DMA) - config.BounceBytes - config.StoreBytes)
		return s.buildGPU(config, o.GPU)
	}
	ring, err := gio.NewRing(config)
	if err == nil {
		s.ring = ring
		s.about = "CPU executor, " + aboutRing(&config)
	}
	return err
}

// quiesce stops a lane.
func (s *Session) quiesce(lane int) error {
	err := s.attach.Quiesce(lane)
	if s.kept != nil {
		err = errors.Join(err, s.kept.quiesce(lane))
	}
	return err
}

// served says whether somebody polls for what is in flight: serves queues, or keeps drives' phases.
func (s *Session) served() bool {
	if s.kept != nil {
		return true
	}
	for d := range int(s.attach.Reply.Drives) {
		if share := s.attach.Share(d); share == nil || share.Phased() {
			return true
		}
	}
	return false
}

// lane is the queue pairs of a lane as they are now.
func (s *Session) lane(l int) ([]gio.Queue, error) {
	r := &s.attach.Reply
	lane := make([]gio.Queue, r.Drives)
	for d := range lane {
		memory, err := nvme.MapQueue(s.attach.Block(l, d), int(r.Depth))
		if err != nil {
			return nil, err
		}
		lane[d] = gio.Queue{Memory: memory, Drive: r.DriveIndex[d], LBABytes: int(r.LBABytes[d])}
		tail, head, err := s.attach.Bells(l, d)
		if err != nil {
			return nil, err
		}
		if tail != nil {
			lane[d].Memory.SQTail, lane[d].Memory.CQHead = tail, head
			lane[d].Device, lane[d].Namespace, lane[d].Gate = true, s.attach.DriveBells(d).NSID, s.attach.Share(d)
			terms := s.attach.DriveTerms(d)
			lane[d].Directive = gio.Directive{Type: uint8(terms.Directive), Specific: terms.Specific}
			tail, head, err := s.attach.Shadows(l, d)
			if err != nil {
				return nil, err
			}
			lane[d].TailShadow, lane[d].HeadShadow = nvme.Shadow(tail), nvme.Shadow(head)
		}
	}
	if s.kept == nil {
		return lane, nil
	}
	q, err := s.kept.queue(l)
	return append(lane, q), err
}

// aboutRing is the part of Describe that all executors share.
func aboutRing(c *gio.RingConfig) string {
	mode := "direct only"
	if c.BounceBytes > 0 {
		mode = "direct within DMA memory, bounce elsewhere"
	}
	descriptors := "PRP"
	if c.SGL {
		descriptors = "SGL"
	}
	drives := slices.DeleteFunc(slices.Clone(c.Lanes[0]), func(q gio.Queue) bool { return q.Drive == keptDrive })
	about := fmt.Sprintf("%s: %s%d lanes on %d drives, %d entries a queue, %s; bounce %s of %s DMA memory",
		mode, aboutQueues(drives), len(c.Lanes)-c.StoreLanes, len(drives), len(drives[0].Memory.SQ), descriptors,
		sizeText(c.BounceBytes), sizeText(len(c.DMA)))
	if c.StoreBytes > 0 {
		about += fmt.Sprintf(", store buffer %s of it with %d more lanes, policy %v",
			sizeText(c.StoreBytes), c.StoreLanes, c.StorePolicy)
	}
	return about
}

// aboutQueues says which drives serve their queues themselves.
func aboutQueues(lane []gio.Queue) string {
	var real []string
	for d := range lane {
		if lane[d].Device {
			real = append(real, fmt.Sprint(lane[d].Drive))
		}
	}
	switch {
	case len(real) == 0:
		return "mediated: "
	case len(real) == len(lane):
		return "real queue pairs of all drives: "
	}
	return "real queue pairs of drives " + strings.Join(real, ", ") + ", others mediated: "
}

// sizeText is a size in MiB, or in bytes where that is no whole number.
func sizeText(n int) string {
	if n%(1<<20) == 0 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
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
				_ = s.attach.Silence() // else the next daemon finds the SSDs in use until Close
				return
			}
			s.publish()
		}
	}
}

// Token lets other processes join.
func (s *Session) Token() [16]byte { return s.token }

// ID is the session's number in status files.
func (s *Session) ID() uint32 { return s.id }

// Ring is the executor over this session's queues.
func (s *Session) Ring() gio.Executor { return s.ring }

// GPU is the ring as the GPU's own, for device memory and streams; nil where the CPU is the executor.
func (s *Session) GPU() *gio.GPU { return s.gpu.ring }

// CUDA is the context of the session's GPU; nil where the CPU is the executor.
func (s *Session) CUDA() *cuda.Context { return s.gpu.context }

// Describe states the executor, the DMA mode in use and the memory that it has, for the log of the session's maker.
func (s *Session) Describe() string {
	if s.gpu.memory == nil {
		return s.about
	}
	return s.about + "; " + s.gpu.memory.String()
}

// DMA is memory that controllers reach, beyond the bounce cells and what the ring needs itself.
func (s *Session) DMA() []byte { return s.ring.DMA() }

// Close ends what is in flight, leaves the session and frees everything. DMA memory must not be touched afterwards.
func (s *Session) Close() error {
	s.once.Do(func() {
		close(s.stop)
		<-s.stopped
		var errs []error
		var ring error
		// The ring goes first, quiesced; then CUDA lets go of the shared memory, and only then is it unmapped.
		if s.ring != nil {
			alive := s.attach.Alive()
			if !alive {
				s.ring.Abandon(ErrGone)
			}
			if ring = s.ring.Close(); alive {
				errs = append(errs, ring)
			}
		}
		s.endKeepers()
		errs = append(errs, s.gpu.close(ring))
		s.control.mu.Lock()
		s.control.arena = nil
		s.control.mu.Unlock()
		if s.kept.stop(); !errors.Is(ring, gio.ErrStuck) { // else the GPU may write to it
			for _, k := range s.keepers {
				errs = append(errs, k.close())
			}
			errs = append(errs, s.kept.close())
		}
		if s.attach != nil {
			errs = append(errs, s.attach.Close())
		}
		s.closed = errors.Join(append(errs, s.client.Close())...)
	})
	return s.closed
}

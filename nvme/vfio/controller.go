package vfio

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/nvme"
)

// Options of Open. The zero value takes the defaults.
type Options struct {
	// Queues is how many I/O queue pairs are asked for; 0 means 128. The controller may grant fewer: Controller.Queues.
	Queues uint16
	// CommandTimeout is how long an I/O command may take before it is ended; 0 means 30 s.
	CommandTimeout time.Duration
	// AdminTimeout is the same for admin commands, Format NVM excepted; 0 means 60 s. The controller is reset after it.
	AdminTimeout time.Duration
	// RecoveryTimeout is how long an Abort or the deletion of a queue may take while a command is being ended, before
	// the controller is reset; 0 means 5 s.
	RecoveryTimeout time.Duration
	// FormatTimeout is for Format NVM; 0 means 15 min.
	FormatTimeout time.Duration
	// NoDoorbellBuffer leaves doorbells registers where the controller takes a doorbell buffer.
	NoDoorbellBuffer bool
}

func (o *Options) setDefaults() {
	for _, d := range []struct {
		v    *time.Duration
		then time.Duration
	}{
		{&o.CommandTimeout, 30 * time.Second}, {&o.AdminTimeout, 60 * time.Second},
		{&o.RecoveryTimeout, 5 * time.Second}, {&o.FormatTimeout, 15 * time.Minute},
	} {
		if *d.v == 0 {
			*d.v = d.then
		}
	}
	if o.Queues == 0 {
		o.Queues = 128
	}
}

const (
	adminEntries = 32
	// transferMax is the most that one command moves where the controller has no lower limit: what one page of a PRP
	// list describes.
	transferMax = PageBytes / 8 * PageBytes
	// readyGrace is added to what the controller says that it needs to become ready, or to stop.
	readyGrace = 5 * time.Second
	allOnes    = 0xffffffff
)

// Controller is one NVMe controller that this process drives.
type Controller struct {
	t     Transport
	o     Options
	cap   nvme.CAP
	admin *Queue
	page  *Buffer // two pages of admin data: the first for callers, the second for whoever has recovery

	pageMu   sync.Mutex // guards the first page
	recovery sync.Mutex // held by whoever makes queues anew, resets or closes

	mu     sync.Mutex
	id     nvme.IdentifyController
	queues map[uint16]*Queue // own ones
	pairs  map[uint16]*Pair  // handed out
	used   map[uint16]bool   // identifiers
	most   uint16            // I/O queue pairs granted
	resets uint64
	err    error // it serves no more
	ended  chan struct{}

	buffer      *doorbellBuffer // made once; nil where the controller takes none
	shadowed    atomic.Bool     // it looks there
	rung, saved atomic.Uint64   // writes of doorbell registers, and those that were not needed
}

// Open starts a controller up, whatever state it is in, and owns the transport from then on, also when it fails.
// Nothing else may be using the controller.
func Open(t Transport, o Options) (*Controller, error) {
	o.setDefaults()
	c := &Controller{t: t, o: o, queues: map[uint16]*Queue{}, pairs: map[uint16]*Pair{}, used: map[uint16]bool{},
		ended: make(chan struct{})}
	if err := c.open(); err != nil {
		if c.cap != 0 {
			_ = c.disable() // the first error is the one to report
		}
		return nil, errors.Join(err, c.release())
	}
	return c, nil
}

// release gives the transport back, and with it whatever the controller could reach; then nothing needs the memory.
func (c *Controller) release() error {
	c.shadowed.Store(false)
	err := c.t.Close()
	memory := []*Buffer{c.page}
	queues := c.own()
	if c.admin != nil {
		queues = append(queues, c.admin)
	}
	for _, q := range queues {
		memory = append(memory, q.pair.Memory)
	}
	for _, m := range memory {
		if m != nil {
			err = errors.Join(err, m.Free())
		}
	}
	c.mu.Lock()
	clear(c.queues)
	c.mu.Unlock()
	return errors.Join(err, c.buffer.free())
}

func (c *Controller) errorf(format string, args ...any) error {
	return fmt.Errorf("nvme %s: "+format, append([]any{c.t.Name()}, args...)...)
}

func (c *Controller) open() error {
	low, high := c.t.Load32(nvme.RegCAP), c.t.Load32(nvme.RegCAP+4)
	if low == allOnes && high == allOnes {
		return c.errorf("its registers read as all ones: %w", ErrGone)
	}
	c.cap = nvme.CAP(uint64(high)<<32 | uint64(low))
	switch {
	case c.cap.CSS()&nvme.CSSNVM == 0:
		return c.errorf("no NVM command set (CAP.CSS %#x): %w", c.cap.CSS(), ErrUnsuitable)
	case c.cap.PageMinShift() > 12:
		return c.errorf("memory pages of at least %d bytes: %w", 1<<c.cap.PageMinShift(), ErrUnsuitable)
	case c.cap.Entries() < nvme.QueueEntriesMin:
		return c.errorf("queues of %d entries: %w", c.cap.Entries(), ErrUnsuitable)
	case c.t.RegisterBytes() < nvme.CQHeadDoorbell(1, c.cap.Stride())+4:
		return c.errorf("%d bytes of registers have no doorbell of an I/O queue: %w", c.t.RegisterBytes(), ErrUnsuitable)
	}
	var err error
	if c.page, err = c.Alloc(2 * PageBytes); err != nil {
		return err
	}
	pair, err := c.newPair(0, adminEntries, nil)
	if err != nil {
		return err
	}
	c.admin = newQueue(c, pair, c.o.AdminTimeout)
	c.recovery.Lock()
	defer c.recovery.Unlock()
	if err := c.disable(); err != nil {
		return err
	}
	return c.start()
}

// disable resets the controller. After nil it touches no memory.
func (c *Controller) disable() error {
	if c.t.Load32(nvme.RegCC) != 0 || c.t.Load32(nvme.RegCSTS)&nvme.CSTSReady != 0 {
		c.t.Store32(nvme.RegCC, c.t.Load32(nvme.RegCC)&^uint32(nvme.CCEnable|nvme.CCShutdownMask))
	}
	return c.awaitReady(false)
}

// awaitReady waits for CSTS.RDY, at most as long as CAP.TO says and a little more.
func (c *Controller) awaitReady(want bool) error {
	end := time.Now().Add(time.Duration(c.cap.TimeoutMillis())*time.Millisecond + readyGrace)
	for p := (pause{}); ; p.wait() {
		csts := c.t.Load32(nvme.RegCSTS)
		switch {
		case csts == allOnes || c.t.Gone():
			return c.errorf("%w", ErrGone)
		case csts&nvme.CSTSReady != 0 == want && (csts&nvme.CSTSFatal == 0 || !want):
			return nil
		case want && csts&nvme.CSTSFatal != 0:
			return c.errorf("fatal status while it was being enabled (CSTS %#x)", csts)
		case time.Now().After(end):
			return c.errorf("CSTS.RDY did not become %t in time (CSTS %#x): %w", want, csts, ErrTimeout)
		}
	}
}

// start enables a controller that is disabled, and makes the process's own queues, if there are any. The caller holds
// recovery.
func (c *Controller) start() error {
	c.admin.restart()
	p := c.admin.pair
	c.store64(nvme.RegASQ, p.Memory.IOVA+sqOffset)
	c.store64(nvme.RegACQ, p.Memory.IOVA+cqOffset(adminEntries))
	c.t.Store32(nvme.RegAQA, nvme.MakeAQA(adminEntries, adminEntries))
	c.t.Store32(nvme.RegCC, uint32(nvme.MakeCC(true, 12)))
	if err := c.awaitReady(true); err != nil {
		return err
	}
	c.admin.resume()
	id, err := c.identifySelf()
	if err != nil {
		return err
	}
	c.mu.Lock()
	known := c.id
	c.id = id
	c.mu.Unlock()
	if known.SQES != 0 && known.SN != id.SN {
		return c.errorf("serial number %q was %q before the reset: %w", nvme.Text(id.SN[:]), nvme.Text(known.SN[:]),
			ErrUnsuitable)
	}
	if err := c.negotiate(); err != nil {
		return err
	}
	if err := c.startBuffer(); err != nil {
		return err
	}
	for _, q := range c.own() {
		if err := c.createOn(c.quick, q.pair); err != nil {
			return err
		}
		q.resume()
	}
	return nil
}

func (c *Controller) store64(off uint32, v uint64) {
	c.t.Store32(off, uint32(v))
	c.t.Store32(off+4, uint32(v>>32))
}

func (c *Controller) identifySelf() (id nvme.IdentifyController, err error) {
	var e nvme.SQE
	nvme.BuildIdentify(&e, 0, 0, nvme.CNSController, c.page.IOVA+PageBytes)
	if _, err := c.quick(e); err != nil {
		return id, c.errorf("identify: %w", err)
	}
	if err := id.UnmarshalBinary(c.page.Bytes[PageBytes:]); err != nil {
		return id, c.errorf("%w: %w", ErrUnsuitable, err)
	}
	return id, nil
}

// negotiate asks for I/O queues. Some controllers answer what they could give, others what was asked for; both may be
// more than one wanted, and the doorbells may be fewer.
func (c *Controller) negotiate() error {
	var e nvme.SQE
	nvme.BuildSetQueues(&e, 0, c.o.Queues)
	r, err := c.quick(e)
	if err != nil {
		return c.errorf("number of queues: %w", err)
	}
	bells := (c.t.RegisterBytes()-nvme.RegDoorbells)/(8<<c.cap.Stride()) - 1 // the admin queue has the first two
	most := min(uint32(c.o.Queues), uint32(r)&0xffff+1, uint32(r)>>16&0xffff+1, bells)
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range c.queues {
		if uint32(id) > most {
			return c.errorf("%d queues are granted, and queue %d is in use: %w", most, id, ErrUnsuitable)
		}
	}
	c.most = uint16(most)
	return nil
}

// own are the process's own I/O queues.
func (c *Controller) own() []*Queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.queues))
}

// Name is the controller's address.
func (c *Controller) Name() string { return c.t.Name() }

// Capabilities is the CAP register.
func (c *Controller) Capabilities() nvme.CAP { return c.cap }

// Identity is what the controller said of itself when it was started.
func (c *Controller) Identity() nvme.IdentifyController {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.id
}

// Queues is how many I/O queue pairs there can be.
func (c *Controller) Queues() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return int(c.most)
}

// Resets counts how often the controller was reset since Open.
func (c *Controller) Resets() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resets
}

// Err says why the controller serves no more: ErrClosed, ErrGone or ErrDead; nil while it does.
func (c *Controller) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Ended is closed by Close.
func (c *Controller) Ended() <-chan struct{} { return c.ended }

// TransferMax is the most bytes that one command may move (MDTS, or 2 MiB where that is less).
func (c *Controller) TransferMax() int {
	id := c.Identity()
	shift := uint(id.MDTS) + c.cap.PageMinShift()
	if id.MDTS == 0 || shift > 21 {
		return transferMax
	}
	return min(1<<shift, transferMax)
}

// HasSGL says whether commands may describe data by SGLs, and which multiple their addresses and lengths must be of.
func (c *Controller) HasSGL() (align uint32, ok bool) {
	id := c.Identity()
	switch id.SGLS & nvme.SGLSMask {
	case nvme.SGLSSupported:
		return 1, true
	case nvme.SGLSDwordAligned:
		return 4, true
	}
	return 0, false
}

// Requested is closed when the system wants the controller back.
func (c *Controller) Requested() <-chan struct{} { return c.t.Requested() }

// Doorbells is where the page of a pair's doorbells can be mapped from. All queues of the controller share it, the
// admin queue too: whoever maps it is trusted with the drive.
func (c *Controller) Doorbells() (fd int, offset int64, ok bool) { return c.t.Doorbells() }

// DoorbellBytes is how many bytes of registers, from nvme.RegDoorbells on, have the doorbells of all queues.
func (c *Controller) DoorbellBytes() int {
	return int(nvme.CQHeadDoorbell(uint16(c.Queues()), c.cap.Stride())) + 4 - nvme.RegDoorbells
}

// Close ends all queues, shuts the controller down in order, so that its caches are on the media, and gives it back.
// Commands that are still in flight end with ErrClosed.
func (c *Controller) Close() error {
	c.recovery.Lock()
	defer c.recovery.Unlock()
	was := c.Err()
	if errors.Is(was, ErrClosed) {
		return c.errorf("%w", ErrClosed)
	}
	var err error
	if was == nil {
		err = c.shutDown()
	}
	closed := c.errorf("%w", ErrClosed)
	if errors.Is(err, ErrQuarantined) {
		closed = errors.Join(closed, err) // until release unmaps everything, which is after they hear of it
	}
	c.lose(closed, err == nil && was == nil)
	close(c.ended)
	return errors.Join(err, c.release())
}

// shutDown is the orderly end (Base 2.0 section 3.6.1): queues, notification, disable.
func (c *Controller) shutDown() error {
	pairs := c.all()
	for _, q := range c.own() {
		q.hold()
		pairs = append(pairs, q.pair)
	}
	for _, p := range pairs {
		if err := c.deleteOn(c.quick, p, nil); err != nil {
			break // the rest of it ends with the reset below
		}
	}
	cc := c.t.Load32(nvme.RegCC) &^ uint32(nvme.CCShutdownMask)
	c.t.Store32(nvme.RegCC, cc|uint32(nvme.CCShutdown))
	err := c.awaitShutdown()
	return errors.Join(err, c.stop())
}

func (c *Controller) awaitShutdown() error {
	id := c.Identity()
	limit := max(time.Duration(id.RTD3E)*time.Microsecond, time.Duration(c.cap.TimeoutMillis())*time.Millisecond)
	end := time.Now().Add(limit + readyGrace)
	for p := (pause{}); ; p.wait() {
		csts := c.t.Load32(nvme.RegCSTS)
		switch {
		case csts == allOnes || c.t.Gone():
			return c.errorf("removed before it was shut down: %w", ErrGone)
		case csts&nvme.CSTSShutdownMask == nvme.CSTSShutdownComplete:
			return nil
		case time.Now().After(end):
			return c.errorf("no end of its shutdown (CSTS %#x): %w", csts, ErrTimeout)
		}
	}
}

// Package emu is the virtual NVMe controller: registers, admin queue and I/O queues in front of a file, a block device
// or memory. It serves queue pairs in shared memory of other processes and believes nothing that it has not copied; it
// abides by the specification, so that a driver's start-up runs against it.
//
// A Controller is one controller with one namespace. I/O queues come to it in two ways: Attach takes queue memory that
// the owner made for a session and that a Poller of the owner's serves; a driver creates others through the registers
// and the admin queue, and they are served by the controller's own poller. Either way a queue is owned by exactly one
// poller, and everything private of it (heads, tails, phase, commands) is guarded by that poller's lock.
//
// Lock order: Controller.mu, Poller.mu, then the leaves Controller.log.mu, workers.mu, the medium's and the phase's.
// Authority and fault hooks are called with Poller.mu held and must not call back into the package.
package emu

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/lifetime"
	"tuttifs/nvme"
	"tuttifs/phase"
)

var (
	// ErrConfig: a configuration that no controller or poller can have.
	ErrConfig = errors.New("emu: configuration")
	// ErrQueues: no more queues can be attached.
	ErrQueues = errors.New("emu: too many queues")
	// ErrQuiesce: commands were still in flight at the deadline. The queue fetches nothing any more; ask again.
	ErrQuiesce = errors.New("emu: commands still in flight at the deadline")
	// ErrBackend: a backend that was demanded is not to be had here.
	ErrBackend = errors.New("emu: backend")
)

// Memory translates I/O addresses of one session. An address is region base + offset; nil means not mapped.
// Implementations are immutable once in use.
type Memory interface {
	Translate(iova uint64, n uint32) []byte
}

// Region is a Memory of one piece.
type Region struct {
	Base  uint64 // I/O address of its first byte
	Bytes []byte
}

// Translate gives the bytes at an I/O address, and no capacity beyond them.
func (r *Region) Translate(iova uint64, n uint32) []byte {
	off := iova - r.Base
	if iova < r.Base || off > uint64(len(r.Bytes)) || uint64(n) > uint64(len(r.Bytes))-off {
		return nil
	}
	return r.Bytes[off : off+uint64(n) : off+uint64(n)]
}

// Access is what Authority granted: opaque to the controller.
type Access struct {
	Slot  uint32
	Index uint32         // authority's own
	Life  lifetime.Class // how long what is written will probably stay
	Ref   any            // must be a pointer type, so that no allocation happens
}

// Authority decides about each I/O command. lba and n are in 4-KiB units of the drive, whatever its LBA size; unaligned
// commands are refused before. Authorize is called right before data moves; Complete exactly once for every grant,
// after the last byte has moved and before the executor sees the completion. ok says that the units hold what the
// executor asked for: never after a deallocation, which may leave on the drive whatever was there before.
type Authority interface {
	Authorize(write bool, driveIndex uint16, unit uint64, units uint32) (Access, bool)
	Complete(a Access, ok bool)
}

// Limits and defaults of Config.
const (
	MDTSMax         = 13 // 32 MiB
	MDTSDefault     = 9  // 2 MiB
	QueuesDefault   = 1024
	PageBytes       = nvme.PageBytes
	QueueEntriesMax = nvme.QueueEntriesMax
)

// Config of a controller. Zero values of the limits take the defaults above.
type Config struct {
	Drive        drive.Drive
	Index        uint16 // the drive's index in its volume
	MDTS         uint8  // power of two of 4 KiB; 9 is 2 MiB
	QueueEntries uint32 // CAP.MQES+1, at most 4096
	Queues       uint16 // I/O queue pairs supported, in each of the two ways
	SGL          bool   // Identify says that SGLs are supported (PRPs always are)
	InOrder      bool   // complete in order (by default it does not)
	ReadOnly     bool   // the namespace is write protected
	Serial       string
	// Medium models a drive: reads and writes complete when it says so, or when they are done if that is later. Whoever
	// else uses the drive may share it. nil is as fast as the backend.
	Medium *drivemodel.Medium
	// Formats lets Format NVM choose among blocks of 512 and 4096 bytes; the namespace begins with those of the drive,
	// which takes writes of either size.
	Formats bool
	// DoorbellBuffer lets a driver ring in memory (Doorbell Buffer Config).
	DoorbellBuffer bool
	// Placement models the flash below the namespace, and lets writes say what goes together; nil for neither.
	Placement *Placement
	// DSM limits Dataset Management commands. Zero fields do not.
	DSM nvme.DSMLimits
	// Phase keeps reads and writes apart. All who use the drive share it. nil lets them mix.
	Phase *phase.Token
}

// Controller is one virtual controller with one namespace. Methods are safe for concurrent use.
type Controller struct {
	cfg      Config
	begun    time.Time
	drive    drive.Drive
	bytes    []byte // the drive's storage where it can be addressed
	written  pages  // of bytes, where they are a file's: those that pollers have written and mapped
	fd       int
	lbaShift atomic.Uint32 // changed by Format NVM
	dataMax  uint32        // bytes of one command
	memAlign uintptr
	flash    *flash // nil without Placement

	faults       atomic.Pointer[func(*nvme.SQE) *Fault]
	writeThrough atomic.Bool // the volatile write cache is disabled by feature 06h
	stats        counters
	log          errorLog
	measure      sync.Once
	measured     Backend
	measuredWhy  string

	mu       sync.Mutex
	attached map[*Queue]struct{}
	nextID   uint16
	regs     registers
	host     Memory
	admin    *admin // while enabled
}

// New makes a controller in front of c.Drive, which it does not close.
func New(c Config) (*Controller, error) {
	if c.MDTS == 0 {
		c.MDTS = MDTSDefault
	}
	if c.QueueEntries == 0 {
		c.QueueEntries = QueueEntriesMax
	}
	if c.Queues == 0 {
		c.Queues = QueuesDefault
	}
	var problems []error
	bad := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	if c.MDTS > MDTSMax {
		bad("MDTS %d, at most %d (4 KiB << %d)", c.MDTS, MDTSMax, MDTSMax)
	}
	if c.QueueEntries < 2 || c.QueueEntries > QueueEntriesMax {
		bad("queues of %d entries, want 2 to %d", c.QueueEntries, QueueEntriesMax)
	}
	if c.Queues == 0xffff {
		bad("%d queues, at most 65534", c.Queues)
	}
	if c.Drive == nil {
		bad("no drive")
		return nil, errors.Join(problems...)
	}
	lba := c.Drive.LBABytes()
	if lba != 512 && lba != 1024 && lba != 2048 && lba != 4096 {
		bad("drive %s: LBA of %d bytes, want 512 to 4096", c.Drive.Name(), lba)
	}
	if size := c.Drive.Size(); size <= 0 || size%PageBytes != 0 {
		bad("drive %s: %d bytes, want a positive multiple of %d", c.Drive.Name(), size, PageBytes)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	ct := &Controller{
		cfg: c, begun: time.Now(), drive: c.Drive, bytes: c.Drive.Bytes(), fd: c.Drive.Fd(),
		dataMax: PageBytes << c.MDTS, memAlign: 1, attached: map[*Queue]struct{}{},
	}
	ct.lbaShift.Store(uint32(bits.TrailingZeros(uint(lba))))
	if c.Drive.Direct() {
		ct.memAlign = uintptr(lba)
	}
	if c.Placement != nil {
		var err error
		if ct.flash, err = newFlash(*c.Placement, c.Drive.Size()); err != nil {
			return nil, err
		}
	}
	if ct.bytes != nil && ct.fd >= 0 {
		ct.written = newPages(len(ct.bytes))
	}
	ct.regs.reset(ct)
	return ct, nil
}

// shift is the size of a block as a power of two.
func (c *Controller) shift() uint8 { return uint8(c.lbaShift.Load()) }

// QueueConfig attaches an I/O queue pair whose memory the daemon made for a session.
type QueueConfig struct {
	Memory    nvme.QueueMemory
	DMA       Memory
	Authority Authority // nil allows everything (a trusted driver)
}

// Attach registers a queue pair; it is served by the Poller it is added to.
func (c *Controller) Attach(qc QueueConfig) (*Queue, error) {
	if err := qc.Memory.Validate(); err != nil {
		return nil, err
	}
	if qc.DMA == nil {
		return nil, fmt.Errorf("%w: a queue needs a DMA memory", ErrConfig)
	}
	if len(qc.Memory.SQ) > int(c.cfg.QueueEntries) {
		return nil, fmt.Errorf("%w: a queue of %d entries, the controller's limit is %d",
			ErrConfig, len(qc.Memory.SQ), c.cfg.QueueEntries)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.attached) >= int(c.cfg.Queues) {
		return nil, fmt.Errorf("%w: %d are attached, the controller's limit", ErrQueues, len(c.attached))
	}
	c.nextID++
	if c.nextID == 0 {
		c.nextID = 1
	}
	cq := &completionQueue{id: c.nextID, entries: qc.Memory.CQ, headBell: bell{value: qc.Memory.CQHead}, phase: 1}
	q := newQueue(c, c.nextID, qc.Memory.SQ, qc.Memory.SQTail, cq, qc.DMA, qc.Authority)
	c.attached[q] = struct{}{}
	return q, nil
}

func (c *Controller) detach(q *Queue) {
	c.mu.Lock()
	delete(c.attached, q)
	c.mu.Unlock()
}

// Stats are monotonic counters of a controller.
type Stats struct {
	Reads, Writes, Flushes, Errors, Refused uint64
	BytesRead, BytesWritten                 uint64
	QueuesKilled                            uint64
	BusyNanoseconds                         uint64 // time spent by pollers in Step that found work
}

// counters are what pollers add to, once a batch. Reads and writes count commands that moved their data; Errors those
// that completed with any other status than success; Refused those of them that the authority denied.
type counters struct {
	reads, writes, flushes, errors, refused atomic.Uint64
	bytesRead, bytesWritten                 atomic.Uint64
	killed, busy                            atomic.Uint64
}

// Stats returns the counters; each is exact, together they are not a snapshot.
func (c *Controller) Stats() Stats {
	s := &c.stats
	return Stats{
		Reads: s.reads.Load(), Writes: s.writes.Load(), Flushes: s.flushes.Load(), Errors: s.errors.Load(),
		Refused: s.refused.Load(), BytesRead: s.bytesRead.Load(), BytesWritten: s.bytesWritten.Load(),
		QueuesKilled: s.killed.Load(), BusyNanoseconds: s.busy.Load(),
	}
}

// add moves a queue's private counts into the controller's.
func (s *counters) add(t *Stats) {
	for _, p := range [...]struct {
		to *atomic.Uint64
		n  uint64
	}{
		{&s.reads, t.Reads}, {&s.writes, t.Writes}, {&s.flushes, t.Flushes}, {&s.errors, t.Errors},
		{&s.refused, t.Refused}, {&s.bytesRead, t.BytesRead}, {&s.bytesWritten, t.BytesWritten},
		{&s.busy, t.BusyNanoseconds},
	} {
		if p.n != 0 {
			p.to.Add(p.n)
		}
	}
	*t = Stats{}
}

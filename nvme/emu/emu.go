// Package emu is the virtual NVMe controller: registers, admin queue, I/O queues, in front of a file, a block device or memory.
// It believes nothing that it has not copied. It serves queue pairs in shared memory of other processes; it is spec-abiding, so that a driver's start-up runs against it.
package emu

import (
	"time"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// Memory translates I/O addresses of one session. An address is region base + offset; nil means not mapped. Implementations are immutable once in use.
type Memory interface {
	Translate(iova uint64, n uint32) []byte
}

// Access is what Authority granted: opaque to the controller.
type Access struct {
	Slot  uint32
	Index uint32 // authority's own
	Ref   any    // must be a pointer type, so that no allocation happens
}

// Authority decides about each I/O command. lba and n are in 4-KiB units of the drive, whatever its LBA size; unaligned commands are refused before.
type Authority interface {
	Authorize(write bool, driveIndex uint16, unit uint64, units uint32) (Access, bool)
	Complete(a Access, ok bool)
}

// Config of a controller.
type Config struct {
	Drive        drive.Drive
	Index        uint16 // the drive's index in its volume
	MDTS         uint8  // power of two of 4 KiB; 9 is 2 MiB
	QueueEntries uint32 // CAP.MQES+1, at most 4096
	Queues       uint16 // I/O queue pairs supported
	SGL          bool   // Identify says that SGLs are supported (PRPs always are)
	InOrder      bool   // complete in order (by default it does not)
	Serial       string
}

// Controller is one virtual controller with one namespace.
type Controller struct{ _ int }

func New(c Config) (*Controller, error) { panic("stub") }

// ReadRegister and WriteRegister are the BAR: offsets of Base 2.0 section 3.1.3, doorbells from 0x1000 with stride 4.
func (c *Controller) ReadRegister(off uint32, size int) uint64     { panic("stub") }
func (c *Controller) WriteRegister(off uint32, v uint64, size int) { panic("stub") }

// SetHostMemory is where admin queues and admin data live (the driver's own address space).
func (c *Controller) SetHostMemory(m Memory) { panic("stub") }

// QueueConfig attaches an I/O queue pair whose memory the daemon made for a session.
type QueueConfig struct {
	Memory    nvme.QueueMemory
	DMA       Memory
	Authority Authority // nil allows everything (a trusted driver)
}

// Queue is an attached queue pair.
type Queue struct{ _ int }

// Attach registers a queue pair; it is served by the Poller it is added to.
func (c *Controller) Attach(q QueueConfig) (*Queue, error) { panic("stub") }

// Quiesce stops fetching from the queue, waits until no command of it is in flight (bounded by the deadline), and detaches it. After it returns nil
// nothing of this queue touches memory or drive any more.
func (q *Queue) Quiesce(deadline time.Time) error { panic("stub") }

// Dead says that the queue was killed for a bad doorbell; other queues go on.
func (q *Queue) Dead() bool { panic("stub") }

// Backend names the way to the drive.
type Backend string

const (
	Auto  Backend = ""      // memory for memory drives, else the faster of the two measured
	URing Backend = "uring" // io_uring by raw system calls
	Pread Backend = "pread" // a pool of preadv/pwritev workers
)

// PollerConfig of one polling thread (one or more per session).
type PollerConfig struct {
	Backend Backend
	// Armed is a count in shared memory that the executor raises before it rings and lowers when its work is done. While it is not zero
	// the poller naps at most 50 us; at zero it sleeps on Wake.
	Armed *uint32
	// Wake is a futex word in shared memory: the poller stores 1 and sleeps; the executor, after raising Armed, swaps in 0 and wakes if it was 1.
	Wake *uint32
	// Spin before napping; 0 means 20 us.
	Spin time.Duration
}

// Poller serves queues on one OS thread.
type Poller struct{ _ int }

func NewPoller(c PollerConfig) (*Poller, error) { panic("stub") }
func (p *Poller) Add(q *Queue)                  { panic("stub") }

// Step serves what is there and returns the number of commands fetched and completed: the inner loop, also for benches that run both sides on one core.
func (p *Poller) Step() int { panic("stub") }

// Run loops until Stop; it locks its OS thread.
func (p *Poller) Run()  { panic("stub") }
func (p *Poller) Stop() { panic("stub") }

// Stats are monotonic counters of a controller.
type Stats struct {
	Reads, Writes, Flushes, Errors, Refused uint64
	BytesRead, BytesWritten                 uint64
	QueuesKilled                            uint64
	BusyNanoseconds                         uint64 // CPU time spent by pollers in Step that found work
}

func (c *Controller) Stats() Stats { panic("stub") }

// Faults are injected by tests: consulted for every I/O command.
type Fault struct {
	Status uint16        // complete with this status field instead of serving
	Delay  time.Duration // complete later
	Drop   bool          // never complete
	Double bool          // complete twice
	Short  uint32        // transfer this many bytes only, then report a data transfer error
}

// SetFaults installs a hook (nil removes it).
func (c *Controller) SetFaults(f func(sqe *nvme.SQE) *Fault) { panic("stub") }

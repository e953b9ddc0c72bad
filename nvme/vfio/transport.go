// Package vfio is an NVMe driver in user space. It starts a controller up, creates queue pairs in memory of its
// caller's choice, runs commands on queues of its own, and accounts for every command when a controller hangs, is reset
// or goes away. Drive makes a namespace a member of a volume.
//
// The driver proper knows a controller by its Transport alone: registers, and memory that the controller reaches. There
// are no interrupts; completions are polled for. Transports are VFIO groups with a type 1 IOMMU, the character devices
// of iommufd, and, in tests, the virtual controller of nvme/emu.
//
// Lock order: Controller.recovery, Controller.mu, Queue.mu. Methods are safe for concurrent use unless they say
// otherwise.
package vfio

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Transport is the way to one controller. Methods are safe for concurrent use.
type Transport interface {
	// Name is the controller's address, for messages.
	Name() string
	// Load32 reads a register, at a multiple of 4. What is not there, and everything of a controller that is gone,
	// reads as all ones.
	Load32(off uint32) uint32
	// Store32 writes a register. Writes to memory that came before it are seen by the controller first.
	Store32(off uint32, v uint32)
	// RegisterBytes is the size of the register space.
	RegisterBytes() uint32
	// Map makes memory of whole pages reachable for the controller, for reading and writing, at the address that it
	// returns.
	Map(b []byte) (iova uint64, err error)
	// MapAt does it at an address of the caller's choice, or is ErrTaken.
	MapAt(b []byte, iova uint64) error
	// Unmap ends that: once it has returned, the controller cannot reach the memory any more, whatever it tries.
	Unmap(b []byte, iova uint64) error
	// Gone asks the bus whether the controller is still there.
	Gone() bool
	// Reset resets the function from outside, where the controller does not do it itself.
	Reset() error
	// Requested is closed when the system wants the controller back: an orderly removal waits for Close.
	Requested() <-chan struct{}
	// Doorbells is where the pages of the doorbells can be mapped from: a descriptor, which stays the transport's, and
	// an offset; false where they cannot.
	Doorbells() (fd int, offset int64, ok bool)
	// Close gives everything back. Nothing is mapped afterwards.
	Close() error
}

var (
	// ErrUnsuitable: a controller, namespace or queue that this driver cannot use, or does not.
	ErrUnsuitable = errors.New("vfio: not usable")
	// ErrTimeout: a command took too long. It has been ended: the controller touches its memory no more.
	ErrTimeout = errors.New("vfio: command timed out")
	// ErrAborted: the command was ended together with its queue or controller, or by an Abort. The controller touches
	// its memory no more; whether it was carried out is not known.
	ErrAborted = errors.New("vfio: command ended before it completed")
	// ErrGone: the controller was removed.
	ErrGone = errors.New("vfio: the controller is gone")
	// ErrClosed: the controller or the queue was closed.
	ErrClosed = errors.New("vfio: closed")
	// ErrFull: a queue stayed full for as long as a command may take.
	ErrFull = errors.New("vfio: queue full")
	// ErrDead: the controller could neither be reset nor started again. If ErrQuarantined is not wrapped as well, it
	// is at least known to be quiet.
	ErrDead = errors.New("vfio: the controller is dead")
	// ErrQuarantined: the controller may still write to the memory of its commands. The memory must not be used for
	// anything else until it is unmapped.
	ErrQuarantined = errors.New("vfio: memory in quarantine: the controller may still write to it")
	// ErrTaken: memory was to be mapped at an address that is in use, or that the IOMMU does not have.
	ErrTaken = errors.New("vfio: the I/O address is taken")
)

// PageBytes is the controller's memory page. It is given memory in pages of the system, which may be larger.
const PageBytes = 4096

// Buffer is memory that the controller reaches.
type Buffer struct {
	Bytes []byte
	IOVA  uint64

	transport Transport
	ours      bool // allocated here
}

// Alloc makes a zeroed buffer of n bytes, rounded up to pages.
func (c *Controller) Alloc(n int) (*Buffer, error) {
	page := os.Getpagesize()
	size := (max(n, 1) + page - 1) &^ (page - 1)
	// Shared: a fork must not leave the controller with the child's pages.
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, c.errorf("memory of %d bytes: %w", size, err)
	}
	m, err := c.MapMemory(b)
	if err != nil {
		_ = unix.Munmap(b) // whole and ours
		return nil, err
	}
	m.ours = true
	return m, nil
}

// MapMemory makes memory of the caller reachable for the controller: whole pages, that stay mapped until Free.
func (c *Controller) MapMemory(b []byte) (*Buffer, error) {
	if page := os.Getpagesize(); len(b) == 0 || (len(b)|int(addressOf(b)))&(page-1) != 0 {
		return nil, c.errorf("memory of %d bytes at %#x is not made of pages: %w", len(b), addressOf(b), ErrUnsuitable)
	}
	iova, err := c.t.Map(b)
	if err != nil {
		return nil, c.errorf("make %d bytes reachable: %w", len(b), err)
	}
	return &Buffer{Bytes: b, IOVA: iova, transport: c.t}, nil
}

// Memory of engines is mapped at one address for all of a session's controllers: what is above handoverFirst is not
// where Map begins to look, and every IOMMU has addresses of 39 bits.
const (
	handoverFirst = uint64(1) << 36
	handoverEnd   = uint64(1) << 39
	handoverStep  = uint64(1) << 30
)

// MapCommon makes memory of the caller reachable for several controllers, at the same address for all of them. If it
// fails nothing is mapped. The caller names each controller once.
func MapCommon(controllers []*Controller, b []byte) ([]*Buffer, error) {
	page := os.Getpagesize()
	if len(b) == 0 || (len(b)|int(addressOf(b)))&(page-1) != 0 || uint64(len(b)) > handoverEnd-handoverFirst {
		return nil, fmt.Errorf("vfio: memory of %d bytes at %#x is not made of pages: %w", len(b), addressOf(b),
			ErrUnsuitable)
	}
	step := (uint64(len(b)) + handoverStep - 1) &^ (handoverStep - 1)
	var last error
	for at := handoverFirst; at <= handoverEnd-step; at += step {
		buffers, err := mapAllAt(controllers, b, at)
		if err == nil {
			return buffers, nil
		}
		// Only an address that is taken is a reason to try another one.
		if last = err; !errors.Is(err, ErrTaken) {
			break
		}
	}
	return nil, last
}

func mapAllAt(controllers []*Controller, b []byte, at uint64) ([]*Buffer, error) {
	var done []*Buffer
	for _, c := range controllers {
		if err := c.t.MapAt(b, at); err != nil {
			err = c.errorf("make %d bytes reachable at %#x: %w", len(b), at, err)
			for _, m := range done {
				err = errors.Join(err, m.Free())
			}
			return nil, err
		}
		done = append(done, &Buffer{Bytes: b, IOVA: at, transport: c.t})
	}
	return done, nil
}

// Part is n bytes of a buffer, from off on, for a pair. It has nothing to free.
func (b *Buffer) Part(off, n int) *Buffer {
	return &Buffer{Bytes: b.Bytes[off : off+n : off+n], IOVA: b.IOVA + uint64(off)}
}

// Free takes the memory from the controller, and gives it back to the system if Alloc made it. No command may be using
// it, unless the controller is dead or gone.
func (b *Buffer) Free() error {
	if b.transport == nil {
		return nil
	}
	if err := b.transport.Unmap(b.Bytes, b.IOVA); err != nil {
		return err // still reachable: better lost than reused
	}
	memory := b.Bytes
	b.transport, b.Bytes = nil, nil
	if b.ours {
		return unix.Munmap(memory)
	}
	return nil
}

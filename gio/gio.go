// Package gio is the rings: lanes, chunks, IOCBs, issue and wait, and the layer verbs, with an executor on the CPU.
//
// It turns (slot, object) into NVMe commands by the extent map, builds them into queue pairs in shared memory and
// matches their completions. It knows nothing of keys, pools or leases, and nothing of what consumes the queues.
//
// Invariants:
//   - A lane holds one chunk at a time; pipelining takes more lanes. A queue's completion entries fill in order, so the
//     phase bit of the chunk's last entry says that all are in.
//   - Every command id is matched and every status checked. A command id completes once.
//   - Memory of a chunk that did not complete is given back only after Quiesce has confirmed that nothing will touch
//     it.
//   - Targets of failed reads are zeroed before anybody is told.
//   - Nothing is allocated per object; a batch costs a fixed number of allocations.
//
// Lock order: lane.mu, Ring.mu, Ticket.mu.
package gio

import (
	"errors"
	"fmt"

	"tuttifs/nvme"
)

var (
	ErrTimeout  = errors.New("gio: deadline passed; the lane was quiesced")
	ErrStatus   = errors.New("gio: command failed")
	ErrChecksum = errors.New("gio: checksum mismatch")
	ErrDead     = errors.New("gio: controller is gone")
	ErrUnmapped = errors.New("gio: slot is not in the extent map")
	ErrMemory   = errors.New("gio: buffer is not registered or too small")
	// ErrProtocol: a completion that nobody asked for, or one that came twice; its lane was quiesced.
	ErrProtocol = errors.New("gio: controller broke the protocol; the lane was quiesced")
	// ErrBusy: memory that a batch in flight still uses.
	ErrBusy = errors.New("gio: memory is in use by a batch in flight; wait for its ticket first")
	// ErrClosed: the ring was closed.
	ErrClosed = errors.New("gio: ring is closed")
	// ErrInvalid: a request that can never be right.
	ErrInvalid = errors.New("gio: invalid argument")
	// ErrIncomplete: Finish before every layer was stored.
	ErrIncomplete = errors.New("gio: not every object was stored")
)

// IOCTXBytes is the size of an IOCTX.
const IOCTXBytes = 16

// IOCTX is one I/O of an IOCB.
type IOCTX struct {
	Desc   uint64 // memory descriptor: a value of Memory
	Slot   uint32
	Object uint16
	Flags  uint16 // 0 or FlagFlush
}

// FlagFlush makes an IOCTX of a write batch a Flush of the drive that holds the object; Desc is not used.
const FlagFlush uint16 = 1

// BatchMax is the most IOCTXs in one IOCB.
const BatchMax = 2048

// Result is the outcome of one IOCTX that failed.
type Result struct {
	Index int // in the batch
	Err   error
}

// StatusError is a command that its controller completed with a bad status: an ErrStatus, and the nvme.Status itself.
type StatusError struct {
	Status nvme.Status
	Drive  uint16
	Slot   uint32
	Object uint16
	Write  bool
}

func (e *StatusError) Error() string {
	verb := "read"
	if e.Write {
		verb = "write"
	}
	return fmt.Sprintf("%v: %s of slot %d object %d on drive %d: %v",
		ErrStatus, verb, e.Slot, e.Object, e.Drive, e.Status)
}

func (e *StatusError) Unwrap() []error { return []error{ErrStatus, e.Status} }

// Package gio is the rings: lanes, IOCBs, issue and wait, and the layer verbs, for executors on the CPU. It knows nothing of keys.
package gio

import (
	"errors"
	"time"

	"tuttifs/checksum"
	"tuttifs/nvme"
	"tuttifs/stripe"
)

var (
	ErrTimeout  = errors.New("gio: deadline passed; the lane was quiesced")
	ErrStatus   = errors.New("gio: command failed")
	ErrChecksum = errors.New("gio: checksum mismatch")
	ErrDead     = errors.New("gio: controller is gone")
	ErrUnmapped = errors.New("gio: slot is not in the extent map")
	ErrMemory   = errors.New("gio: buffer is not registered or too small")
)

// IOCTXBytes is the size of an IOCTX.
const IOCTXBytes = 16

// IOCTX is one I/O of an IOCB.
type IOCTX struct {
	Desc   uint64 // memory descriptor: a value of Memory
	Slot   uint32
	Object uint16
	Flags  uint16
}

// BatchMax is the most IOCTXs in one IOCB.
const BatchMax = 2048

// Map is the extent map of one pool as uploaded to executors: layout tables and rows; (slot, object) -> (drive, unit) by two table reads. Immutable; replaced when the pool's generation changes.
type Map struct{ _ int }

// MapRow is one row: unit addresses and drives of its W entries.
type MapRow struct {
	Number uint32
	Drives []uint16
	Units  []uint64
}

func NewMap(l *stripe.Layout, entryUnits uint64, rows []MapRow, generation uint64) (*Map, error) {
	panic("stub")
}
func (m *Map) Locate(slot uint32, object uint16) (drive uint16, unit uint64, units uint32, ok bool) {
	panic("stub")
}
func (m *Map) Layout() *stripe.Layout { panic("stub") }
func (m *Map) Generation() uint64     { panic("stub") }

// Queue is one queue pair of a lane, with the drive's LBA size.
type Queue struct {
	Memory   nvme.QueueMemory
	Drive    uint16
	LBABytes int
}

// RingConfig of an executor.
type RingConfig struct {
	// Lanes[l][d] is lane l's queue on the d-th drive.
	Lanes [][]Queue
	// DMA is memory that controllers reach, and its I/O address.
	DMA     []byte
	DMABase uint64
	// BounceBytes at the start of DMA are bounce cells, divided among the lanes; 0 means direct only.
	BounceBytes int
	Armed, Wake *uint32       // as in emu.PollerConfig; nil if nobody sleeps
	SGL         bool          // one SGL data block per command instead of PRPs
	Deadline    time.Duration // per wait, 30 s
	// Quiesce asks the controller's owner to stop lane l and confirms; called before a timed-out chunk's memory is given back.
	Quiesce func(lane int) error
	// Step, where set, is called by waits instead of yielding: it runs the controller on this thread (single-core benches and tests).
	Step func()
}

// Ring is the CPU executor. Safe for concurrent use; one lane serves one chunk at a time.
type Ring struct{ _ int }

func NewRing(c RingConfig) (*Ring, error) { panic("stub") }
func (r *Ring) Close() error              { panic("stub") }

// Memory is a registered range: Desc(offset) is the descriptor for a byte offset within it (descriptors are built once).
type Memory struct{ _ int }

// Register makes buf usable in IOCTXs. Inside DMA it is reached directly, elsewhere through bounce cells. Unregister gives everything back.
func (r *Ring) Register(buf []byte) (*Memory, error) { panic("stub") }
func (r *Ring) Unregister(m *Memory) error           { panic("stub") }
func (m *Memory) Desc(off int) uint64                { panic("stub") }

// Result is the outcome of one IOCTX that failed.
type Result struct {
	Index int // in the batch
	Err   error
}

// Ticket is a batch in flight. (The IOCB.)
type Ticket struct{ _ int }

// Issue queues a batch (any length; it is cut into chunks by lane). Reads land at the descriptors, payload length each object's own.
func (r *Ring) Issue(write bool, m *Map, ctxs []IOCTX) (*Ticket, error) { panic("stub") }

// Wait blocks until the batch is complete, at most the ring's deadline; it returns failed IOCTXs (empty when all is well) and zeroes their targets for reads.
func (r *Ring) Wait(t *Ticket) ([]Result, error) { panic("stub") }

// SlotIO is one slot of a layer verb.
type SlotIO struct {
	Slot uint32
	Seed checksum.Seed
}

// Layers is the layer verbs' state for one batch of slots and one rank: the slots' trailers (read and verified at first, or collected for a store).
type Layers struct{ _ int }

// OpenLayers prepares restoring (reads and verifies the rank's trailers of all slots: slots whose trailer is bad are reported by Failed) .
func (r *Ring) OpenLayers(m *Map, rank uint16, slots []SlotIO) (*Layers, error) { panic("stub") }

// CreateLayers prepares storing.
func (r *Ring) CreateLayers(m *Map, rank uint16, slots []SlotIO) (*Layers, error) { panic("stub") }

// RetrieveLayer reads the layer's objects of all slots into dst: dst[i*objectsOfLayer+j] is the descriptor for slot i, object j of the layer. It verifies each object's checksum; failed slots are zeroed and reported by Failed.
func (l *Layers) RetrieveLayer(layer uint16, dst []uint64) (*LayerTicket, error) { panic("stub") }

// StoreLayer writes the layer's objects of all slots and keeps their sums.
func (l *Layers) StoreLayer(layer uint16, src []uint64) (*LayerTicket, error) { panic("stub") }

// LayerTicket is a layer in flight; Wait completes and (for reads) verifies it.
type LayerTicket struct{ _ int }

func (t *LayerTicket) Wait() error { panic("stub") }

// Finish writes the trailers (store). Commit may follow.
func (l *Layers) Finish() error { panic("stub") }

// Failed has one error (or nil) a slot.
func (l *Layers) Failed() []error { panic("stub") }

// Close gives the trailers' memory back.
func (l *Layers) Close() { panic("stub") }

package gio

import (
	"math"
	"time"
)

// pacer says when deferred writes may go to the drives, how far reads may run ahead, and how much of the GPU moves may
// have. It decides nothing but that: executors see to order, completion and errors, and above the store buffer's high
// water they issue writes without asking.
//
// Methods are called by whatever moves the lanes on (the GPU's I/O thread, or any thread that is in the Ring), and note
// by callers of the executor too, some of them at the same time. None blocks, allocates or calls the executor, but for
// wake. Times are those of clock, in nanoseconds.
type pacer interface {
	// start is called once, before the other methods. wake has the executor ask again soon: the pacer calls it when it
	// would answer otherwise than before for a reason that the executor does not know of. It may be called from any
	// thread at any time, also after the executor's end, and does not block.
	start(wake func())
	// writes says how much of the deferred writes may be issued now. It is asked for each piece before it is issued;
	// l.next is that piece, which goes if it fits the grant as a whole, so that a grant below it grants nothing.
	writes(now int64, l *load) grant
	// readAhead is how many bytes of reads may be in flight beyond those of batches that are awaited, and of batches that
	// were issued before one that is. A batch that somebody waits for is never held back.
	readAhead(now int64) uint64
	// harvestBlocks is the grid of the next harvest or gather on a GPU; 0, or more than is configured, means what is
	// configured.
	harvestBlocks(now int64) int
	// note tells of what has happened.
	note(e ioEvent)
}

// ioSize is an amount of I/O: objects, and the bytes that drives move for them.
type ioSize struct{ objects, bytes uint64 }

// load is what there is to do when writes is asked.
type load struct {
	next     ioSize // the piece that would be issued
	deferred ioSize // all that wait in the store buffer, the piece included
	writing  ioSize // deferred writes in flight
	reads    ioSize // reads that may go and have not arrived: in flight, or waiting for lanes or by readAhead
	reading  ioSize // of them in flight
	oldest   int64  // when the oldest of those deferred came to the buffer
	awaited  int64  // since when somebody has waited for the end of deferred writes: Finish. 0: nobody
	// fill of so many bytes of the store buffer is taken, what is in flight included.
	fill, size uint64
}

// grant is the answer: what may be issued now, and when to ask again where that is not everything. The executor also
// asks earlier: when reads or writes have come, or have arrived, and when it is woken.
type grant struct {
	ioSize
	again int64
}

// everything is the grant that holds nothing back.
var everything = grant{ioSize: ioSize{objects: math.MaxUint64, bytes: math.MaxUint64}}

// allows says whether a piece may go.
func (g *grant) allows(piece ioSize) bool {
	return piece.objects <= g.objects && piece.bytes <= g.bytes
}

// noLayer marks events of batches that are no layer's: trailers, and those of Issue.
const noLayer = -1

// ioEvent is something that happened to a batch, or to a piece of one.
type ioEvent struct {
	kind  ioEventKind
	layer int32 // of the batch, noLayer
	ioSize
	at   int64 // when
	took int64 // nanoseconds, as the kind says
}

type ioEventKind uint8

const (
	// readQueued: a batch of reads may go: it was issued, and its event has come.
	readQueued ioEventKind = iota
	// readIssued: a piece was given to the drives.
	readIssued
	// readArrived: all of a piece is in, or has failed; took is the time since it was issued.
	readArrived
	// readAwaited: somebody begins to wait for a batch: a thread, or a stream by way of one.
	readAwaited
	// readEnded: a batch is in place or has failed, or on a GPU what brings it there is enqueued; took is the time since
	// it was awaited, 0 if it was not.
	readEnded
	// writeQueued: a deferred write lies in the store buffer.
	writeQueued
	// writeIssued and writeArrived are as for reads, of deferred writes.
	writeIssued
	writeArrived
)

// clockStart makes the times of this process small numbers.
var clockStart = time.Now()

// clock is the time of everything that a pacer sees: monotonic nanoseconds since the start of the process.
func clock() int64 { return int64(time.Since(clockStart)) }

// readsFirst is the pacer where there is no scheduler: it writes whenever no read is to be done.
type readsFirst struct{}

func (readsFirst) start(func()) {}

func (readsFirst) writes(_ int64, l *load) grant {
	if l.reads.objects > 0 {
		return grant{again: never}
	}
	return everything
}

func (readsFirst) readAhead(int64) uint64  { return math.MaxUint64 }
func (readsFirst) harvestBlocks(int64) int { return 0 }
func (readsFirst) note(ioEvent)            {}

package nvme

import (
	"errors"
	"fmt"
	"unsafe"
)

// QueueMemory is a queue pair as both sides see it in shared memory: entries and the two doorbells, each in a cache
// line of its own. Depth is a power of two, at most 4096 entries; both queues have the same.
type QueueMemory struct {
	SQ     []SQE
	CQ     []CQE
	SQTail *uint32 // written by the executor
	CQHead *uint32 // written by the executor
}

// QueueEntriesMax and QueueEntriesMin bound the entries of a queue.
const (
	QueueEntriesMax = 4096
	QueueEntriesMin = 2
)

// ErrQueueMemory: a depth or memory that cannot hold a queue pair.
var ErrQueueMemory = errors.New("nvme: queue memory")

// A queue pair in shared memory: one page of doorbells, then the submission entries, then the completion entries, each
// from a page's start. Doorbells are two cache lines apart, since processors fetch lines in pairs.
const (
	sqTailOffset = 0
	cqHeadOffset = 128
	entryOffset  = PageBytes
)

func pageUp(n int) int { return (n + PageBytes - 1) &^ (PageBytes - 1) }

func depthOK(depth int) bool {
	return depth >= QueueEntriesMin && depth <= QueueEntriesMax && depth&(depth-1) == 0
}

// QueueBytes is the shared memory that a queue pair of depth entries takes: a multiple of PageBytes, or 0 for a depth
// that is not a power of two of QueueEntriesMin..QueueEntriesMax.
func QueueBytes(depth int) int {
	if !depthOK(depth) {
		return 0
	}
	return entryOffset + pageUp(depth*SQEBytes) + pageUp(depth*CQEBytes)
}

// MapQueue lays a queue pair over b, which starts on a page and has at least QueueBytes(depth) bytes. b is not touched:
// fresh memory is zero, which is an empty queue, and memory that is used again has to be zeroed first.
func MapQueue(b []byte, depth int) (QueueMemory, error) {
	n := QueueBytes(depth)
	if n == 0 {
		return QueueMemory{}, fmt.Errorf("%w: depth %d is not a power of two of %d..%d",
			ErrQueueMemory, depth, QueueEntriesMin, QueueEntriesMax)
	}
	if len(b) < n {
		return QueueMemory{}, fmt.Errorf("%w: %d bytes, a depth of %d takes %d", ErrQueueMemory, len(b), depth, n)
	}
	base := unsafe.Pointer(unsafe.SliceData(b))
	if uintptr(base)%PageBytes != 0 {
		return QueueMemory{}, fmt.Errorf("%w: does not start on a page", ErrQueueMemory)
	}
	sq := unsafe.Add(base, entryOffset)
	return QueueMemory{
		SQ:     unsafe.Slice((*SQE)(sq), depth),
		CQ:     unsafe.Slice((*CQE)(unsafe.Add(sq, pageUp(depth*SQEBytes))), depth),
		SQTail: (*uint32)(unsafe.Add(base, sqTailOffset)),
		CQHead: (*uint32)(unsafe.Add(base, cqHeadOffset)),
	}, nil
}

// Validate checks that the four parts make a queue pair: equal, legal depths and both doorbells.
func (q QueueMemory) Validate() error {
	switch {
	case !depthOK(len(q.SQ)) || len(q.CQ) != len(q.SQ):
		return fmt.Errorf("%w: %d submission and %d completion entries, want equal powers of two of %d..%d",
			ErrQueueMemory, len(q.SQ), len(q.CQ), QueueEntriesMin, QueueEntriesMax)
	case q.SQTail == nil || q.CQHead == nil:
		return fmt.Errorf("%w: a doorbell is missing", ErrQueueMemory)
	}
	return nil
}

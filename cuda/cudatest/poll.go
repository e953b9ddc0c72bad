package cudatest

import (
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// poll serves all queues at once: a queue whose controller stands still must not use up the others' time.
func poll(p *cuda.PollParams) {
	var wg sync.WaitGroup
	begin := time.Now()
	for number := range p.Lanes * p.Drives {
		wg.Go(func() {
			pollQueue(p, number, begin)
			atomic.AddUint32(at[uint32](p.Done, 0), 1)
		})
	}
	wg.Wait()
}

// windowMax is the most commands that the polling kernel has in flight in one queue.
const windowMax = 1024

// poller is one block of tuttifs_poll and its queue. Commands count on; the one numbered c has slot c mod the window,
// which is its cell.
type poller struct {
	p       *cuda.PollParams
	number  uint32
	q       cuda.KernelQueue
	builder builder

	pending        []uint32 // the block's IOCTXs that are neither issued nor refused
	slots          []pollSlot
	issued, oldest uint32 // commands: all, the first that is not done
	inflight       uint32

	bounced        bool
	cells, cellsIO uint64
	room           uint64
}

type pollSlot struct {
	index       uint32
	outstanding bool
}

// pollQueue is one block's work.
func pollQueue(p *cuda.PollParams, number uint32, begin time.Time) {
	b := newPoller(p, number)
	outstanding, rest := cuda.OutcomeOK, cuda.OutcomeOK
	for b.inflight > 0 || len(b.pending) > 0 {
		if p.Stop != 0 && atomic.LoadUint32(at[uint32](p.Stop, 0)) != 0 ||
			uint64(time.Since(begin)) > p.DeadlineNanos {
			outstanding, rest = cuda.OutcomeTimeout, cuda.OutcomeTimeout
			break
		}
		b.issue()
		arrived, ok := b.complete()
		if !ok {
			outstanding, rest = cuda.OutcomeProtocol, cuda.OutcomePending
			break
		}
		if arrived == 0 {
			time.Sleep(10 * time.Microsecond)
		}
	}
	b.leave(outstanding, rest)
}

// newPoller finds the IOCTXs of the queue's lane and drive; drive 0's queue answers for those that lie nowhere.
func newPoller(p *cuda.PollParams, number uint32) *poller {
	b := &poller{p: p, number: number, q: *at[cuda.KernelQueue](p.Queues, uint64(number)), bounced: p.Cells != 0}
	b.builder = builder{
		tables: &p.Tables, prp: prpTable{p.PRPBase, p.PRPDMA}, write: p.Write != 0, sgl: p.SGL != 0,
	}
	lane, drive := number/p.Drives, number%p.Drives
	for i := lane; i < p.Count; i += p.Lanes {
		e := locate(&p.Tables, at[cuda.KernelIOCTX](p.IOCTXs, uint64(i)))
		if e.queue == int(drive) || e.queue < 0 && drive == 0 {
			b.pending = append(b.pending, i)
		}
	}
	fit := uint32(windowMax)
	if b.bounced {
		share := p.CellBytes / p.Drives &^ (unitBytes - 1)
		b.cells = *at[uint64](p.Cells, uint64(lane)) + uint64(drive*share)
		b.cellsIO = *at[uint64](p.CellsIO, uint64(lane)) + uint64(drive*share)
		if fit = share / p.CellStride; fit > 0 {
			b.room = uint64(p.CellStride)
		}
	}
	b.slots = make([]pollSlot, max(1, min(fit, p.Depth, b.q.Mask, windowMax)))
	return b
}

func (b *poller) slot(command uint32) *pollSlot { return &b.slots[command%uint32(len(b.slots))] }

// cell is the offset of a command's cell in the queue's.
func (b *poller) cell(command uint32) uint64 {
	return uint64(command%uint32(len(b.slots))) * uint64(b.p.CellStride)
}

func (b *poller) set(i uint32, outcome uint8, status uint16) {
	*at[uint8](b.p.Outcomes, uint64(i)) = outcome
	*at[uint16](b.p.Statuses, uint64(i)) = status
}

// issue makes commands of what is pending while there are slots, and rings.
func (b *poller) issue() {
	before := b.issued
	for len(b.pending) > 0 && b.issued-b.oldest < uint32(len(b.slots)) {
		i := b.pending[0]
		b.pending = b.pending[1:]
		b.command(i)
	}
	if b.issued != before {
		atomic.StoreUint32(at[uint32](b.q.SQTail, 0), b.q.Tail)
	}
}

// command issues one IOCTX, or refuses it.
func (b *poller) command(i uint32) {
	p := b.p
	ctx := at[cuda.KernelIOCTX](p.IOCTXs, uint64(i))
	cell, cellIO := uint64(0), uint64(0)
	if b.bounced {
		cell, cellIO = b.cells+b.cell(b.issued), b.cellsIO+b.cell(b.issued)
	}
	outcome := cuda.OutcomeUnmapped
	if e := locate(&p.Tables, ctx); e.queue >= 0 {
		sqe := at[nvme.SQE](b.q.SQ, uint64(b.q.Tail))
		outcome = b.builder.command(sqe, ctx, e, &b.q, uint16(b.q.FirstID+b.issued), cellIO, b.room)
	}
	if outcome != cuda.OutcomeOK {
		if p.Write == 0 {
			harvestObject(&p.Tables, &p.Sums, ctx, i, cell, outcome)
		}
		b.set(i, outcome, 0)
		return
	}
	if p.Write != 0 {
		gatherObject(&p.Tables, &p.Sums, ctx, i, cell)
	}
	*b.slot(b.issued) = pollSlot{index: i, outstanding: true}
	b.q.Tail = (b.q.Tail + 1) & b.q.Mask
	b.issued++
	b.inflight++
}

// next is the last word of the completion entry at the head, and whether it is in.
func (b *poller) next() (word uint32, ok bool) {
	word = atomic.LoadUint32(at[uint32](b.q.CQ+uint64(b.q.Head)*nvme.CQEBytes+12, 0))
	return word, word>>16&1 == b.q.Phase
}

// complete takes the completions that are in. ok is false after one that nobody waits for.
func (b *poller) complete() (arrived uint32, ok bool) {
	p := b.p
	for b.inflight > 0 {
		word, in := b.next()
		if !in {
			break
		}
		command := b.oldest + uint32(uint16(word)-uint16(b.q.FirstID+b.oldest))
		s := b.slot(command)
		if command-b.oldest >= b.issued-b.oldest || !s.outstanding {
			return arrived, false
		}
		s.outstanding = false
		b.inflight--
		arrived++
		if b.q.Head++; b.q.Head > b.q.Mask {
			b.q.Head, b.q.Phase = 0, b.q.Phase^1
		}
		outcome, status := cuda.OutcomeOK, uint16(word>>17)
		if status != 0 {
			outcome = cuda.OutcomeFailed
		}
		if p.Write == 0 {
			cell := uint64(0)
			if b.bounced {
				cell = b.cells + b.cell(command)
			}
			ctx := at[cuda.KernelIOCTX](p.IOCTXs, uint64(s.index))
			outcome = harvestObject(&p.Tables, &p.Sums, ctx, s.index, cell, outcome)
		}
		b.set(s.index, outcome, status)
		for b.oldest != b.issued && !b.slot(b.oldest).outstanding {
			b.oldest++
		}
	}
	if arrived > 0 {
		atomic.StoreUint32(at[uint32](b.q.CQHead, 0), b.q.Head)
	}
	return arrived, true
}

// leave gives what is outstanding one outcome and what was never issued another, and the queue back.
func (b *poller) leave(outstanding, rest uint8) {
	for c := b.oldest; c != b.issued; c++ {
		if s := b.slot(c); s.outstanding {
			b.set(s.index, outstanding, 0)
		}
	}
	for _, i := range b.pending {
		b.set(i, rest, 0)
	}
	if _, more := b.next(); more || b.inflight > 0 || outstanding == cuda.OutcomeProtocol {
		b.q.Phase = cuda.PhaseBad
	}
	q := at[cuda.KernelQueue](b.p.Queues, uint64(b.number))
	q.Tail, q.Head, q.Phase, q.FirstID = b.q.Tail, b.q.Head, b.q.Phase, (b.q.FirstID+b.issued)&0xffff
}

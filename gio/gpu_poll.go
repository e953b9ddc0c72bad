package gio

import (
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// The polling executor: a kernel serves a whole batch, from commands to bytes in their places, one block a queue. Its
// blocks hold their SMs as long as the batch lasts. It is here to be compared with.

// pollRun is a batch that a kernel serves, one in each direction at most.
type pollRun struct {
	write  bool
	stream *cuda.Stream
	memory *cuda.HostMemory
	queues []cuda.KernelQueue
	cells  []uint64 // GPU addresses of lanes' cells
	io     []uint64 // their I/O addresses
	stop   *uint32  // ends the kernel

	queuesGPU, cellsGPU, ioGPU, stopGPU uint64

	params cuda.PollParams
	t      *gpuTicket
	lanes  []*gpuLane // that it uses
	bad    []bool     // queues that the kernel left in disorder, though it knows of no IOCTX that suffers
	ended  bool       // the kernel has; lanes may be waiting to be quiesced
	lost   error      // the kernel never will
}

const pollThreads = 1024

func (r *pollRun) setUp(g *GPU, write bool, s *cuda.Stream) (err error) {
	r.write, r.stream = write, s
	lanes, drives := len(g.lanes), len(g.config.Lanes[0])
	c := carver{}
	r.carve(&c, lanes, drives)
	if r.memory, err = g.gpu.Context.AllocHost(c.at, false); err != nil {
		return err
	}
	r.carve(&carver{host: r.memory.Bytes, gpu: uint64(r.memory.GPU)}, lanes, drives)
	r.lanes, r.bad = make([]*gpuLane, 0, lanes), make([]bool, lanes*drives)
	return nil
}

func (r *pollRun) carve(c *carver, lanes, drives int) {
	r.queues, r.queuesGPU = carve[cuda.KernelQueue](c, lanes*drives)
	r.cells, r.cellsGPU = carve[uint64](c, lanes)
	r.io, r.ioGPU = carve[uint64](c, lanes)
	if stop, gpu := carve[uint32](c, 1); stop != nil {
		r.stop, r.stopGPU = &stop[0], gpu
	}
}

func (r *pollRun) close(g *GPU) {
	if r.memory != nil {
		_ = g.gpu.Context.FreeHost(r.memory)
	}
}

// planWhole makes one chunk of a batch: a polling kernel divides it itself. All of it is bounced if something must
// be.
func (p *planner) planWhole() {
	kinds := kindOf{t: p.t}
	for i := range p.ctxs {
		p.t.bounced = p.t.bounced || p.ctxs[i].Flags == 0 && !kinds.direct(&p.ctxs[i])
	}
	p.most = p.t.g.staging.bytes
	p.pack(1)
	// A harvest that zeroes what failed finds it in place.
	p.t.chunks = []gpuChunk{{t: p.t, count: uint32(p.t.n), slot: noSlot, direct: true, payload: p.payload(0, p.t.n)}}
}

// pollBatches launches kernels for batches whose turn it is, and ends those that are over. Writes leave a lane to
// reads.
func (th *ioThread) pollBatches(now int64) (moved bool, err error) {
	if !th.g.gpu.Polling {
		return false, nil
	}
	for i := range th.runs {
		r := &th.runs[i]
		if r.t != nil && r.ended && r.quiet() {
			th.endRun(r)
			moved = true
		}
		queue := &th.reads
		if r.write {
			queue = &th.writes
		}
		if r.t != nil || len(*queue) == 0 || th.flying == launchesMax || !th.takeLanes(r) {
			continue
		}
		r.t = (*queue)[0]
		*queue = append((*queue)[:0], (*queue)[1:]...)
		r.t.next = len(r.t.chunks)
		if err := th.launchRun(r, now); err != nil {
			return true, err
		}
		moved = true
	}
	return moved, nil
}

// takeLanes finds lanes for a batch: those that no other batch has, and for writes not all.
func (th *ioThread) takeLanes(r *pollRun) bool {
	r.lanes = r.lanes[:0]
	for _, l := range th.g.lanes {
		if l.state == laneQuiescing || l.state == laneReattaching {
			return false // it comes back soon
		}
		if l.state == laneIdle && !l.polled {
			r.lanes = append(r.lanes, l)
		}
	}
	if r.write {
		if len(th.reads) > 0 {
			return false
		}
		r.lanes = r.lanes[:min(len(r.lanes), int(writeLanes(th.g.alive.Load())))]
	}
	return len(r.lanes) > 0
}

func (th *ioThread) launchRun(r *pollRun, now int64) error {
	g, t := th.g, r.t
	drives := len(g.config.Lanes[0])
	cells := uint64(g.laneCells())
	for i, l := range r.lanes {
		l.polled = true
		r.io[i] = l.cellsBase
		r.cells[i] = g.dmaGPU + uint64(l.number)*cells
		for d := range l.queues {
			q, a := &l.queues[d], &l.addresses[d]
			r.queues[i*drives+d] = cuda.KernelQueue{
				SQ: a.sq, CQ: a.cq, SQTail: a.sqTail, CQHead: a.cqHead, Mask: q.mask, Tail: q.tail, Head: q.head,
				Phase: q.phase, FirstID: uint32(q.firstID), LBAShift: uint32(q.lbaShift), NSID: q.namespace,
			}
		}
	}
	atomic.StoreUint32(r.stop, 0)
	r.ended, r.lost = false, nil
	clear(r.bad)
	x := th.claim(launchPoll, t, 0, 0, now)
	x.run = r
	x.target = uint32(len(r.lanes) * drives)
	p := &r.params
	*p = cuda.PollParams{
		Tables: t.tables.tables, Sums: t.sums, IOCTXs: t.memory.ctxsGPU, Queues: r.queuesGPU,
		Outcomes: t.memory.outcomesGPU, Statuses: t.memory.statusesGPU, Done: x.doneGPU, Blocks: x.blocks,
		Stop:    r.stopGPU,
		PRPBase: g.prp.base, PRPDMA: g.prp.dma, DeadlineNanos: uint64(g.config.Deadline),
		Count: uint32(t.n), Lanes: uint32(len(r.lanes)), Drives: uint32(drives), Depth: uint32(g.depth),
	}
	if t.bounced {
		p.Cells, p.CellsIO = r.cellsGPU, r.ioGPU
		p.CellBytes, p.CellStride = uint32(min(cells, cellsMost)), max(pageBytes, t.cells.Stride)
	}
	if t.write {
		p.Write = 1
	}
	if g.config.SGL {
		p.SGL = 1
	}
	// The kernel rings, and cannot wake a poller that sleeps; one that is armed does not.
	g.arm()
	g.wakeUp()
	if err := r.stream.Launch(g.device.poll, x.target, pollThreads, 0, unsafe.Pointer(p)); err != nil {
		return err
	}
	if t.event != nil {
		if err := t.event.Record(r.stream); err != nil {
			return err
		}
	}
	t.tell()
	return nil
}

// polled takes the queues back from a kernel that has ended, and has those quiesced that it left in disorder.
func (th *ioThread) polled(r *pollRun) {
	g := th.g
	g.disarm()
	r.ended = true
	drives := len(g.config.Lanes[0])
	for i, l := range r.lanes {
		l.polled = false
		bad := false
		for d := range l.queues {
			q, k := &l.queues[d], &r.queues[i*drives+d]
			q.tail, q.head, q.firstID = k.Tail, k.Head, uint16(k.FirstID)
			r.bad[i*drives+d] = k.Phase > 1
			bad = bad || k.Phase > 1
			q.phase = k.Phase & 1
		}
		if bad && l.state == laneIdle && g.broken.Load() == nil {
			l.fail(fmt.Errorf("%w: lane %d", ErrProtocol, l.number))
		}
	}
}

// quiet says whether none of the run's lanes is being quiesced.
func (r *pollRun) quiet() bool {
	for _, l := range r.lanes {
		if l.state == laneQuiescing {
			return false
		}
	}
	return true
}

// endRun gives the batch's outcomes. Nothing touches its memory any more.
func (th *ioThread) endRun(r *pollRun) {
	t := r.t
	defer func() { r.t = nil }()
	zero, disorder, count := false, r.disorder(), &th.g.stats
	cause := t.over
	if broken := th.g.broken.Load(); broken != nil {
		cause = *broken
	}
	for i := range t.memory.outcomes {
		o := &t.memory.outcomes[i]
		err := cause
		switch *o {
		case cuda.OutcomeFailed:
			t.failed = append(t.failed, Result{Index: i, Err: t.statusError(i, nvme.Status(t.memory.statuses[i]))})
			continue
		case cuda.OutcomeTimeout:
			if count.timeouts.Add(1); err == nil {
				err = ErrTimeout
			}
		case cuda.OutcomeProtocol, cuda.OutcomePending:
			if err == nil {
				err = fmt.Errorf("%w: found by a kernel", ErrProtocol)
			}
		case cuda.OutcomeOK:
			if r.lost == nil && !(disorder && r.bad[r.queueOf(i)]) {
				count.commands.Add(1)
				continue
			}
			if err == nil {
				err = fmt.Errorf("%w: one more entry than commands", ErrProtocol)
			}
		default:
			continue
		}
		*o = cuda.OutcomeOK
		t.fail(i, err)
		zero = true
	}
	count.chunks.Add(1)
	if t.write {
		count.written.Add(t.chunks[0].payload)
	} else {
		count.read.Add(t.chunks[0].payload)
	}
	if zero && !t.write {
		t.sums = cuda.SumsParams{}
		th.list(&t.chunks[0])
		return
	}
	t.plain++
	th.settle(t, 1)
}

// queueOf is the queue of an IOCTX: its place in bad.
func (r *pollRun) queueOf(i int) int {
	t, lane := r.t, i%len(r.lanes)
	drive, _, _, ok := t.m.Locate(t.memory.ctxs[i].Slot, t.memory.ctxs[i].Object)
	if !ok || int(drive) >= len(t.g.drives) {
		return lane * len(t.g.config.Lanes[0])
	}
	return lane*len(t.g.config.Lanes[0]) + max(0, int(t.g.drives[drive]))
}

// disorder takes those queues out of bad of which an IOCTX has the outcome, and says whether any is left: what is in
// order there came before a completion that nobody had asked for.
func (r *pollRun) disorder() bool {
	if !slices.Contains(r.bad, true) {
		return false
	}
	for i, o := range r.t.memory.outcomes {
		if o == cuda.OutcomeTimeout || o == cuda.OutcomeProtocol || o == cuda.OutcomePending {
			r.bad[r.queueOf(i)] = false
		}
	}
	return slices.Contains(r.bad, true)
}

// statusError is the error of an IOCTX whose command had a bad status.
func (t *gpuTicket) statusError(i int, status nvme.Status) error {
	ctx := &t.memory.ctxs[i]
	drive, _, _, _ := t.m.Locate(ctx.Slot, ctx.Object)
	return &StatusError{Status: status, Drive: drive, Slot: ctx.Slot, Object: ctx.Object, Write: t.write}
}

// loseRun gives up on a kernel; its lanes are quiesced before its batch ends.
func (th *ioThread) loseRun(r *pollRun, err error) {
	if r.t == nil {
		return
	}
	if !r.ended {
		th.g.disarm()
	}
	r.ended, r.lost = true, err
	for _, l := range r.lanes {
		l.polled = false
		if l.state == laneIdle {
			l.fail(err)
		}
	}
}

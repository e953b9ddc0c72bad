package gio

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
)

// ioThread is what the I/O thread alone has.
type ioThread struct {
	g             *GPU
	live          []*gpuTicket // taken in and not ended
	held          []*gpuTicket // wait for an event of the engine's
	reads, writes []*gpuTicket // have chunks to be built, in order of issue
	evacs         []*gpuTicket // have chunks to be evacuated, in order of issue
	deferred      []*gpuTicket // have chunks to be built that lie in the store buffer
	listed        []*gpuTicket // have chunks that wait for a harvest or gather to be launched
	writers       int          // live batches of writes, but those of the store buffer
	flow          gpuFlow
	taken         [2]int // batches of reads and of writes so far
	launches      [launchesMax]launch
	flying        int      // launches under way
	harvests      int      // of them
	gathers       int      // likewise
	open          []bool   // by lane, while a build is put together
	load          []uint64 // likewise: bytes of the chunks it has
	least         uint64   // likewise: of what lanes have that a build is under way for
	carrying      int      // likewise: lanes with writes
	lane          int      // that had the last chunk
	rang          bool     // in this round: pollers that sleep are to be woken
	looks         bool     // the scheduler looks for events of compute's
	work          *cuda.HostMemory
	hung          bool  // the GPU may still be at work on what batches have
	failure       error // of a call of CUDA, where it could not be returned
	dead          bool  // CUDA has failed: nothing is asked of it any more
	closed        bool
	closeErrors   []error
	checked       int64 // when deadlines were looked at
	movedAt       int64 // when the end of a harvest or gather was seen
	queried       int64 // when kernels under way were asked for errors
	now           int64 // when the round began
	idle          int   // rounds in which nothing happened
	overdue       int   // grows with looks in a row for what is overdue
	oversleep     int64 // what naps last longer than asked for, nanoseconds
	buildParams   cuda.BuildParams
	harvestParams cuda.HarvestParams
	runs          [2]pollRun // of the polling executor
}

// waitDeadlines is how many deadlines a wait may last once a chunk has missed its own. Otherwise it lasts as long as
// there is progress.
const waitDeadlines = 4

// Times of the I/O thread, nanoseconds.
const (
	checkNanos  = int64(time.Millisecond)
	queryNanos  = int64(50 * time.Millisecond)
	spinRounds  = 4   // before the first nap
	quietRounds = 100 // before naps are long
	quietNanos  = 50_000

	overdueRounds = 4           // before the first nap for what is overdue
	overdueNanos  = int64(1024) // of that nap
)

func (th *ioThread) setUp(g *GPU) (err error) {
	th.g = g
	th.open, th.load = make([]bool, len(g.lanes)), make([]uint64, len(g.lanes))
	queues := len(g.lanes) * len(g.config.Lanes[0])
	c := carver{}
	th.carve(&c, queues)
	if th.work, err = g.gpu.Context.AllocHost(c.at, false); err != nil {
		return err
	}
	th.carve(&carver{host: th.work.Bytes, gpu: uint64(th.work.GPU)}, queues)
	if !g.gpu.Polling {
		return nil
	}
	if err := th.runs[0].setUp(g, false, g.device.pollIn); err != nil {
		return err
	}
	return th.runs[1].setUp(g, true, g.device.pollOut)
}

func (th *ioThread) carve(c *carver, queues int) {
	for i := range th.launches {
		l := &th.launches[i]
		if done, gpu := carve[uint32](c, 1); done != nil {
			l.done, l.doneGPU = &done[0], gpu
		}
		l.blocks = uint64(th.g.device.regions) + regionsBytes + uint64(i)*4
		l.queues, l.queuesGPU = carve[cuda.KernelQueue](c, queues)
	}
	for _, m := range [...]*mover{&th.g.in, &th.g.out} {
		if done, gpu := carve[uint32](c, 1); done != nil {
			m.done, m.doneGPU = &done[0], gpu
			*m.done = 0
		}
	}
}

func (th *ioThread) close() {
	for i := range th.runs {
		th.runs[i].close(th.g)
	}
	if th.work != nil {
		_ = th.g.gpu.Context.FreeHost(th.work)
	}
}

// run is the I/O thread.
func (g *GPU) run() {
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	defer close(g.ended)
	th := &g.thread
	g.stats.thread.Store(int32(unix.Gettid()))
	defer g.stats.thread.Store(0)
	setSlack(1)
	if err := g.gpu.Context.Bind(); err != nil {
		th.fatal(err)
	}
	for {
		th.now = g.now()
		g.beat.Store(th.now)
		moved := th.round(th.now)
		switch {
		case moved && g.in.count+g.out.count == 0:
			th.idle = 0
		case len(th.live) > 0 || th.looks:
			th.rest()
		case g.closing.Load() && th.closed && th.lanesStill():
			_ = g.gpu.Context.Unbind()
			return
		default:
			th.park()
		}
	}
}

// park sleeps until the bell rings.
func (th *ioThread) park() {
	g := th.g
	g.asleep.Store(true)
	if !g.pending.Load() {
		<-g.bell
	}
	g.beat.Store(g.now()) // before the watchdog takes it for awake
	g.asleep.Store(false)
	th.idle = 0
}

// rest passes a moment. While pieces are on their way the next thing to do comes with the end of one, and when that
// will be is known: a single nap costs a fraction of looking again and again. Otherwise somebody may be waiting for a
// kernel or a drive, and it looks a few times before it naps.
func (th *ioThread) rest() {
	th.idle++
	if len(th.live) == 0 { // events are looked for, and nothing else
		th.nap(quietNanos)
		return
	}
	if th.heldBack() {
		th.nap(min(max(th.flow.again-th.now, napNanoseconds), checkNanos))
		return
	}
	idle := !th.drivesBusy()
	if due := min(th.g.in.due(th.now, idle), th.g.out.due(th.now, idle)); due != never {
		if th.gathers > 0 && th.starved() {
			due = min(due, th.now+quietNanos)
		}
		th.napUntil(due)
		return
	}
	switch {
	case th.idle <= spinRounds:
	case th.idle > quietRounds:
		th.nap(quietNanos)
	default:
		th.nap(napNanoseconds)
	}
}

// drivesBusy says whether drives have enough to do for the time being: half of the lanes.
func (th *ioThread) drivesBusy() bool {
	rung := 0
	for _, l := range th.g.lanes {
		if l.state == laneRung && !l.store {
			rung++
		}
	}
	return 2*rung >= th.g.common()
}

// starved says whether a lane that is free waits for a gather.
func (th *ioThread) starved() bool {
	for _, l := range th.g.lanes {
		if l.state == laneIdle && len(l.ahead) > 0 && l.ahead[0].gathered == gatherRuns {
			return true
		}
	}
	return false
}

// nap sleeps for a time, or until somebody rings, which it reports.
func (th *ioThread) nap(nanoseconds int64) (rung bool) {
	g := th.g
	atomic.StoreUint32(&g.nap, 1)
	if !g.pending.Load() {
		sleep(&g.nap, 1, nanoseconds, g.procs)
	}
	return atomic.SwapUint32(&g.nap, 0) == 0
}

// napUntil sleeps until about due. What naps have lasted longer than asked for is asked for less. What is overdue is
// looked for again at once: a nap, however short, takes the time of several looks. What does not come then is looked
// for less and less often.
func (th *ioThread) napUntil(due int64) {
	asked := min(due-th.now-th.oversleep, checkNanos)
	switch {
	case asked > 0:
		th.overdue = 0
	case th.overdue < overdueRounds:
		th.overdue++
		return
	default:
		asked = min(overdueNanos<<(th.overdue-overdueRounds), napNanoseconds)
		th.overdue = min(th.overdue+2, overdueRounds+8)
	}
	if !th.nap(asked) {
		th.oversleep += (min(th.g.now()-th.now-asked, quietNanos) - th.oversleep) / 8
	}
}

func (th *ioThread) lanesStill() bool {
	for _, l := range th.g.lanes {
		if l.state == laneQuiescing || l.state == laneReattaching {
			return false
		}
	}
	return true
}

// round goes once over everything that can go on. It reports whether anything did.
func (th *ioThread) round(now int64) (moved bool) {
	g := th.g
	if g.pending.Load() {
		moved = th.takeIn()
	}
	if g.closing.Load() && !th.closed {
		th.closed = true
		moved = th.takeIn() || moved // what comes before Close may not have rung yet; nothing comes after it
		th.giveUpAll(ErrClosed)
	}
	if s := g.config.Scheduler; s != nil {
		th.looks = !th.dead && !th.closed && s.look(now)
	}
	if broken := g.broken.Load(); broken != nil && len(th.live) > 0 {
		th.giveUpAll(*broken)
	}
	m, err := th.advance(now)
	if err != nil {
		th.fatal(err)
	}
	for _, l := range g.lanes {
		m = l.poll(now) || m
	}
	if th.rang { // once a round: it is a system call, and most pollers are awake
		th.rang = false
		g.wakeUp()
	}
	if th.dead {
		th.endLost()
		return moved || m
	} else if len(th.live) == 0 {
		return moved || m
	}
	launched, err := th.launch(now)
	if err == nil {
		err = th.failure
	}
	if err != nil {
		th.fatal(err)
	}
	return moved || m || launched
}

// advance takes note of what the GPU has done.
func (th *ioThread) advance(now int64) (moved bool, err error) {
	if th.dead {
		return false, nil
	}
	if now-th.checked >= checkNanos {
		th.checked = now
		if err := th.check(now); err != nil {
			return false, err
		}
	}
	moved = th.collect(now)
	for _, m := range [...]*mover{&th.g.in, &th.g.out} {
		some, err := m.poll(now)
		if err != nil {
			return moved, err
		}
		moved = moved || some
	}
	return moved, nil
}

// launch gives the GPU what there is to do.
func (th *ioThread) launch(now int64) (moved bool, err error) {
	if th.writers > 0 {
		th.gatherAhead()
	}
	th.evacuate()
	for _, step := range [...]func(*ioThread, int64) (bool, error){
		(*ioThread).release, (*ioThread).build, (*ioThread).launchMoves, (*ioThread).pollBatches,
	} {
		some, err := step(th, now)
		if err != nil {
			return moved, err
		}
		moved = moved || some
	}
	for _, m := range [...]*mover{&th.g.in, &th.g.out} {
		some, err := m.submit(now)
		if err != nil {
			return moved, err
		}
		moved = moved || some
	}
	return moved, nil
}

// takeIn takes what others have left.
func (th *ioThread) takeIn() bool {
	g := th.g
	g.pending.Store(false)
	g.mu.Lock()
	incoming, requests := g.incoming, g.requests
	g.incoming, g.requests = nil, nil
	g.mu.Unlock()
	for _, f := range requests {
		f()
	}
	for _, t := range incoming {
		th.live = append(th.live, t)
		streams, nth := &g.device.harvestS, &th.taken[0]
		if t.write {
			streams, nth = &g.device.gatherS, &th.taken[1]
		}
		if !t.deferred {
			t.stream = streams[*nth%moveStreams]
			*nth++
		}
		alive := &g.alive
		switch {
		case t.deferred:
			th.flow.live++
			alive = &g.stores
		case t.writes != nil:
			alive = &g.stores
		case t.write:
			th.writers++
		}
		switch {
		case th.closed:
			th.giveUp(t, ErrClosed)
		case alive.Load() == 0 && !t.zeroing:
			th.giveUp(t, fmt.Errorf("%w: %w", ErrDead, errNoLane))
		case t.after != nil && !th.dead:
			th.held = append(th.held, t)
		default:
			th.admit(t)
		}
	}
	return len(incoming)+len(requests) > 0
}

// admit lets a batch begin.
func (th *ioThread) admit(t *gpuTicket) {
	t.began = true
	switch {
	case t.zeroing:
		t.next = len(t.chunks)
		for i := range t.chunks {
			t.chunks[i].failed = true
			th.list(&t.chunks[i])
		}
	case t.writes != nil:
		th.evacs = append(th.evacs, t)
	case t.deferred:
		for i := range t.chunks[:t.ready] {
			th.deferChunk(&t.chunks[i])
		}
	case t.write:
		th.writes = append(th.writes, t)
	default:
		th.reads = append(th.reads, t)
		th.queued(t)
	}
}

// release admits batches whose event has come. No kernel and no stream waits for it, since a stream that waits would
// hold others. The first of each direction is asked for: engines' events come in the order of their batches, mostly.
func (th *ioThread) release(int64) (moved bool, err error) {
	var asked [2]bool
	for i := 0; i < len(th.held); {
		t := th.held[i]
		direction := 0
		if t.write {
			direction = 1
		}
		if asked[direction] {
			i++
			continue
		}
		done, err := t.after.Query()
		if err != nil {
			// The engine's event may be at fault. If it is CUDA, the next call says so.
			moved = true
			th.giveUp(t, fmt.Errorf("%w: the event that the batch waits for: %w", ErrInvalid, err))
			continue
		}
		if !done {
			asked[direction] = true
			i++
			continue
		}
		moved = true
		th.held = append(th.held[:i], th.held[i+1:]...)
		th.admit(t)
	}
	return moved, nil
}

// rebuild has a chunk built again, before those that never were.
func (th *ioThread) rebuild(c *gpuChunk) {
	t := c.t
	t.again = slices.Insert(t.again, 0, c)
	queue := &th.reads
	switch {
	case t.deferred:
		queue = &th.deferred
	case t.write:
		queue = &th.writes
	}
	if !slices.Contains(*queue, t) {
		*queue = slices.Insert(*queue, 0, t)
	}
}

// unqueue takes a batch out of those that have chunks to be built.
func (th *ioThread) unqueue(t *gpuTicket) {
	for _, queue := range []*[]*gpuTicket{&th.reads, &th.writes, &th.held, &th.evacs, &th.deferred} {
		if i := slices.Index(*queue, t); i >= 0 {
			*queue = slices.Delete(*queue, i, i+1)
		}
	}
}

// giveUp ends a batch with an error: what is built but not rung is taken back, what is rung is quiesced, and what has
// arrived is let through.
func (th *ioThread) giveUp(t *gpuTicket, err error) {
	if t.over != nil {
		return
	}
	t.over = err
	th.unqueue(t)
	th.failRest(t, err)
	for i := range th.runs {
		if th.runs[i].t == t && !th.runs[i].ended {
			atomic.StoreUint32(th.runs[i].stop, 1)
		}
	}
	for _, l := range th.g.lanes {
		if slices.ContainsFunc(l.ahead, func(c *gpuChunk) bool { return c.t == t }) {
			l.rewinds = true
		}
		if l.state == laneRung && l.active.t == t && th.g.broken.Load() == nil && !l.arrived() {
			l.fail(err)
		}
	}
}

func (th *ioThread) giveUpAll(err error) {
	for _, t := range slices.Clone(th.live) {
		th.giveUp(t, err)
	}
}

// failRest fails the chunks that are in no lane.
func (th *ioThread) failRest(t *gpuTicket, err error) {
	if t.zeroing && !t.untouched() {
		if t.next == 0 {
			th.admit(t)
		}
		return
	}
	again := t.again
	first := t.next
	t.again, t.next = nil, len(t.chunks)
	for _, c := range again {
		th.g.failChunk(c, err)
	}
	for i := first; i < t.limit; i++ {
		th.g.failChunk(&t.chunks[i], err)
	}
	if t.writes != nil {
		th.g.store.unblock()
		th.failWrites(t.writes, first, err)
	}
}

// failStores fails what is stored, since no lane for it is left.
func (th *ioThread) failStores(err error) {
	for _, t := range slices.Clone(th.live) {
		if t.deferred || t.writes != nil {
			th.giveUp(t, err)
		}
	}
}

// failQueued fails what is in no lane, since none is left.
func (th *ioThread) failQueued(err error) {
	for _, t := range slices.Concat(th.reads, th.writes, th.held) {
		th.giveUp(t, err)
	}
}

// end tells that a batch is complete.
func (th *ioThread) end(t *gpuTicket) {
	th.live = slices.DeleteFunc(th.live, func(x *gpuTicket) bool { return x == t })
	switch {
	case t.deferred:
		th.flow.live--
	case t.write && t.writes == nil:
		th.writers--
	}
	t.kept = th.hung
	t.finish(nil)
}

// finish ends all waits for a batch, once.
func (t *gpuTicket) finish(hung error) {
	if !t.ended.CompareAndSwap(false, true) {
		return
	}
	if !t.aside {
		t.g.busy.Add(-1)
	}
	t.hung = hung
	t.tell()
	close(t.done)
}

// check looks for what takes too long.
func (th *ioThread) check(now int64) error {
	g := th.g
	for _, l := range g.lanes {
		if l.state == laneRung && now > l.deadline && !l.arrived() {
			g.stats.timeouts.Add(uint64(l.active.count))
			l.active.t.late = true
			l.fail(ErrTimeout)
		}
	}
	for _, t := range slices.Clone(th.live) {
		since := t.waiting.Load()
		if since == 0 || t.over != nil || t.kernels > 0 {
			continue // kernels have their own bound
		}
		// Chunks have a deadline of their own, which comes first.
		d := int64(g.config.Deadline)
		progress := t.progress
		if t.deferred || t.writes != nil { // others go before it: what counts is that any does
			progress = max(progress, th.flow.progress)
		}
		if now-max(since, progress) > d+d/4 || t.late && now-since > waitDeadlines*d {
			th.giveUp(t, ErrTimeout)
		}
	}
	if th.flying+g.in.count+g.out.count == 0 || now-th.queried < queryNanos {
		return nil
	}
	th.queried = now
	// What failed never counts its word up.
	for _, s := range [...]*cuda.Stream{g.device.harvestS[0], g.device.copyIn, g.device.copyOut} {
		if _, err := s.Query(); err != nil {
			return err
		}
	}
	for i := range th.launches {
		if l := &th.launches[i]; l.kind != launchFree && now-l.since > g.kernelBound() {
			return fmt.Errorf("%w: a kernel did not end", ErrStuck)
		}
	}
	return nil
}

// fatal gives the GPU up: its context is of no use any more. Lanes are quiesced, everything ends with ErrDead, and
// host memory is zeroed by the host.
func (th *ioThread) fatal(err error) {
	if th.dead {
		return
	}
	g := th.g
	th.dead = true
	th.hung = errors.Is(err, ErrStuck)
	err = fmt.Errorf("%w: %w", ErrDead, err)
	for _, l := range g.lanes {
		l.building, l.unbuilt = false, 0
		if l.active != nil {
			l.active.pieces = 0
		}
		if l.state == laneRung {
			l.fail(err)
		}
	}
	g.in.count, g.out.count = 0, 0
	g.breakWith(err)
	// What waited for kernels is over: nobody knows how far they came.
	flying := th.launches
	for i := range th.launches {
		th.launches[i].kind, th.launches[i].t = launchFree, nil
	}
	th.flying, th.harvests, th.gathers, th.listed = 0, 0, 0, nil
	for i := range flying {
		x := &flying[i]
		switch x.kind {
		case launchHarvest, launchGather:
			th.lost(x.t, x.from, x.to, err)
		}
	}
	for _, t := range slices.Clone(th.live) {
		th.lost(t, t.launched, t.listed, err)
		t.launched = t.listed
		th.loseMoves(t, err)
	}
	for i := range th.runs {
		th.loseRun(&th.runs[i], err)
	}
}

// endLost ends batches that kernels were polling for, once their lanes are quiet.
func (th *ioThread) endLost() {
	for i := range th.runs {
		if r := &th.runs[i]; r.t != nil && r.quiet() {
			th.endRun(r)
		}
	}
}

// lost ends chunks whose kernel will never be done.
func (th *ioThread) lost(t *gpuTicket, from, to int, err error) {
	for i := from; i < to; i++ {
		c := &t.chunks[t.chunks[i].nth]
		if t.writes != nil {
			th.loseEvacuation(c, err)
			continue
		}
		if t.write {
			c.gathered = gatherDone
			if !c.late {
				continue // its lane fails it
			}
		}
		for k := int(c.first); k < int(c.first+c.count); k++ {
			t.fail(k, err)
		}
		if !t.write {
			th.zeroOnHost(c)
		}
		th.settle(t, 1)
	}
}

// noteClose keeps what Close is to report.
func (th *ioThread) noteClose(err error) {
	if th.closed {
		th.closeErrors = append(th.closeErrors, err)
	}
}

// watch ends all waits when the I/O thread, or a call of the control thread, hangs in the driver. It calls nothing of
// CUDA.
func (g *GPU) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	hangs := 0 // looks in a row at which it seemed so: after a stop of the whole process it does, once
	for hangs < watchLooks {
		select {
		case <-g.down:
			return
		case <-tick.C:
		}
		beat, call := g.beat.Load(), g.control.since.Load()
		now := g.now()
		late := !g.asleep.Load() && !g.over() && now-beat > g.kernelBound()
		if late || call != 0 && now-call > g.kernelBound() {
			hangs++
		} else {
			hangs = 0
		}
	}
	g.giveUpGPU()
}

// over says whether the I/O thread has ended.
func (g *GPU) over() bool {
	select {
	case <-g.ended:
		return true
	default:
		return false
	}
}

// The watchdog looks this often, and believes what it sees so many times.
const (
	watchEvery = 100 * time.Millisecond
	watchLooks = 4
)

// giveUpGPU quiesces all lanes and ends all waits. What batches have in memory is never given back.
func (g *GPU) giveUpGPU() {
	err := fmt.Errorf("%w: %w", ErrDead, ErrStuck)
	g.broken.CompareAndSwap(nil, &err)
	g.failStore()
	for l := range g.config.Lanes {
		_ = g.quiesce(l)
	}
	close(g.stuck)
	g.mu.Lock()
	live := slices.Clone(g.live)
	g.mu.Unlock()
	for _, t := range live {
		t.finish(err)
	}
}

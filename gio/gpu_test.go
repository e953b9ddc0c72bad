package gio

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/nvme"
	"tuttifs/stripe"
)

// bench is a GPU executor on a fake driver, with a controller of a few lines that takes SGLs: drives are memory.
type bench struct {
	t      testing.TB
	fake   *cudatest.Fake
	ctx    *cuda.Context
	g      *GPU
	m      *Map
	lanes  [][]Queue
	blocks [][]byte
	dma    []byte
	drives [][]byte

	mu       sync.Mutex
	heads    []uint32 // by queue: submission entries taken, completion entries given
	tails    []uint32
	done     []uint16 // memory of serveQueue, which is to allocate nothing
	sqe      nvme.SQE
	hook     func(sqe *nvme.SQE, lane int) bool // whether to complete a command; may be nil
	quiesced atomic.Int32
	stop     chan struct{}
	ended    chan struct{}
}

type benchShape struct {
	lanes, drives, depth int
	bounce, store        int
	units                []int // of the objects
	config               func(c *GPUConfig)
	api                  func(a *cuda.API)
}

const benchDMA = 1 << 40

// newBench takes everything up; it is taken down with the test, which fails if the driver still holds anything then.
func newBench(t testing.TB, s benchShape) *bench {
	b := &bench{t: t, stop: make(chan struct{}), ended: make(chan struct{})}
	b.fake = cudatest.Start(t, cudatest.Config{Kernels: cudatest.Kernels(), Seed: 1})
	driver := b.fake.Driver()
	if s.api != nil {
		api := b.fake.API()
		s.api(api)
		var err error
		driver, err = cuda.NewDriver(api)
		require.NoError(t, err)
	}
	device, err := driver.Device(0)
	require.NoError(t, err)
	b.ctx, err = device.Primary()
	require.NoError(t, err)
	b.makeMap(s)
	b.dma = page(s.bounce + s.store + 1<<20)
	for l := range s.lanes {
		b.lanes = append(b.lanes, nil)
		for d := range s.drives {
			block := page(nvme.QueueBytes(s.depth))
			b.blocks = append(b.blocks, block)
			memory, err := nvme.MapQueue(block, s.depth)
			require.NoError(t, err)
			b.lanes[l] = append(b.lanes[l], Queue{Memory: memory, Drive: uint16(d), LBABytes: 4096})
		}
	}
	b.heads, b.tails = make([]uint32, len(b.blocks)), make([]uint32, len(b.blocks))
	c := GPUConfig{
		RingConfig: RingConfig{
			Lanes: b.lanes, DMA: b.dma, DMABase: benchDMA, BounceBytes: s.bounce, SGL: true,
			Deadline: 20 * time.Second, Quiesce: b.quiesce, Reattach: b.reattach, StoreBytes: s.store,
		},
		Context: b.ctx, StagingBytes: 8 << 20,
	}
	if s.config != nil {
		s.config(&c)
	}
	b.g, err = NewGPU(c)
	require.NoError(t, err)
	go b.serve()
	t.Cleanup(b.takeDown)
	return b
}

func (b *bench) takeDown() {
	_ = b.g.Close()
	close(b.stop)
	<-b.ended
	if b.fake.Broken() == cuda.Success {
		require.NoError(b.t, b.ctx.Close())
	}
}

func (b *bench) makeMap(s benchShape) {
	var g stripe.Geometry
	for i, n := range s.units {
		g.Objects = append(g.Objects, stripe.Object{
			Layer: uint16(i), Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: uint32(n * pageBytes)}},
		})
	}
	layout, err := stripe.NewLayout(g.WithTrailers(), s.drives)
	require.NoError(b.t, err)
	units := 64 * layout.SlotUnits()
	row := MapRow{}
	for d := range s.drives {
		row.Drives, row.Units = append(row.Drives, uint16(d)), append(row.Units, 0)
		b.drives = append(b.drives, make([]byte, units*pageBytes))
	}
	b.m, err = NewMap(layout, units, []MapRow{row}, 1)
	require.NoError(b.t, err)
}

// serve is the controller: it takes commands queue by queue, and completes what it has taken in random order.
func (b *bench) serve() {
	defer close(b.ended)
	random := rand.New(rand.NewPCG(7, 7))
	for {
		select {
		case <-b.stop:
			return
		default:
		}
		b.mu.Lock()
		busy := false
		for q := range b.heads {
			busy = b.serveQueue(q, random) || busy
		}
		b.mu.Unlock()
		if !busy {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

func (b *bench) serveQueue(q int, random *rand.Rand) bool {
	drives := len(b.drives)
	m := &b.lanes[q/drives][q%drives].Memory
	done, sqe := b.done[:0], &b.sqe
	for tail := atomic.LoadUint32(m.SQTail); b.heads[q] != tail; b.heads[q] = (b.heads[q] + 1) % uint32(len(m.SQ)) {
		*sqe = m.SQ[b.heads[q]]
		if b.hook != nil && !b.hook(sqe, q/drives) {
			continue
		}
		n := int(sqe.Blocks()) * 4096
		memory := b.dma[sqe.DPTR[0]-benchDMA:][:n]
		medium := b.drives[q%drives][sqe.LBA()*4096:][:n]
		if sqe.Opcode == nvme.IOWrite {
			copy(medium, memory)
		} else {
			copy(memory, medium)
		}
		done = append(done, sqe.CID)
	}
	random.Shuffle(len(done), func(i, j int) { done[i], done[j] = done[j], done[i] })
	for _, id := range done {
		depth := uint32(len(m.CQ))
		e := &m.CQ[b.tails[q]%depth]
		atomic.StoreUint32((*uint32)(unsafe.Pointer(&e.CID)), uint32(id)|(^(b.tails[q]/depth)&1)<<16)
		b.tails[q]++
	}
	b.done = done
	return len(done) > 0
}

func (b *bench) quiesce(int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.quiesced.Add(1)
	return nil
}

func (b *bench) reattach(lane int) ([]Queue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for d := range b.drives {
		q := lane*len(b.drives) + d
		clear(b.blocks[q])
		b.heads[q], b.tails[q] = 0, 0
	}
	return b.lanes[lane], nil
}

// setHook decides which commands are completed; nil completes all.
func (b *bench) setHook(f func(sqe *nvme.SQE, lane int) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hook = f
}

// target is host memory for n objects of the given units and the batch that moves them.
func (b *bench) target(n, object int) ([]byte, []IOCTX) {
	size := int(b.m.ObjectBytes(uint16(object)))
	buf := page(n * size)
	memory, err := b.g.Register(buf)
	require.NoError(b.t, err)
	ctxs := make([]IOCTX, n)
	for i := range ctxs {
		ctxs[i] = IOCTX{Desc: memory.Desc(i * size), Slot: uint32(i), Object: uint16(object)}
	}
	return buf, ctxs
}

func (b *bench) run(write bool, ctxs []IOCTX) []Result {
	b.t.Helper()
	ticket, err := b.g.Issue(write, b.m, ctxs)
	require.NoError(b.t, err)
	results, err := b.g.Wait(ticket)
	require.NoError(b.t, err)
	return results
}

func fillRandom(b []byte, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 3))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
}

// turnOver writes random bytes, reads them back and compares.
func (b *bench) turnOver(buf []byte, ctxs []IOCTX, seed uint64) {
	b.t.Helper()
	fillRandom(buf, seed)
	want := bytes.Clone(buf)
	require.Empty(b.t, b.run(true, ctxs))
	clear(buf)
	require.Empty(b.t, b.run(false, ctxs))
	require.True(b.t, bytes.Equal(want, buf))
}

// TestGPUPlansCover: whatever a batch is made of, chunks follow each other without gaps, hold no more than a lane
// can, and give every bounced IOCTX a cell of its own where the kernels' arithmetic looks for it.
func TestGPUPlansCover(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 12))
	for round := range 120 {
		g, m, n := &GPU{}, &Map{}, 1+random.IntN(300)
		g.lanes = make([]*gpuLane, 1+random.IntN(9))
		g.depth = 1 << random.IntN(10)
		g.staging.bytes = pageBytes * (1 + random.IntN(64))
		g.config.ChunkCommands = random.IntN(3) * random.IntN(20)
		for range 1 + random.IntN(8) {
			units := uint32(1 + random.IntN(9))
			m.objects = append(m.objects, objectPlace{units: uint16(units), bytes: units * pageBytes})
		}
		host := &Memory{buf: make([]byte, 1)}
		direct := &Memory{buf: make([]byte, 1<<20), direct: true}
		require.NoError(t, g.regions.add(host))
		require.NoError(t, g.regions.add(direct))
		ctxs := make([]IOCTX, n)
		for i := range ctxs {
			ctxs[i] = IOCTX{Desc: host.Desc(0), Object: uint16(i % len(m.objects))}
			if round%3 == 1 {
				ctxs[i].Object = uint16(random.IntN(len(m.objects) + 1))
			}
			if round%4 == 2 && random.IntN(5) == 0 {
				ctxs[i].Desc = direct.Desc(0)
			}
		}
		g.config.Lanes = make([][]Queue, len(g.lanes))
		p := planner{t: &gpuTicket{g: g, m: m, n: n, write: round%2 == 0}, ctxs: ctxs}
		p.plan()
		at := uint32(0)
		for k := range p.t.chunks {
			c := &p.t.chunks[k]
			require.Equal(t, k, c.index)
			require.Equal(t, at, c.first)
			require.Positive(t, c.count)
			require.LessOrEqual(t, int(c.count), max(1, g.depth))
			at += c.count
			checkCells(t, &p, c)
		}
		require.EqualValues(t, n, at)
	}
}

// TestGPUReadsFromRestAreShort: where nothing else is under way the chunks of a read are short, but whole groups.
func TestGPUReadsFromRestAreShort(t *testing.T) {
	const lane = 12 // pages of a lane's cells
	for _, c := range []struct {
		name  string
		write bool
		busy  int32
		units []int // of the objects of a group
		want  uint32
	}{
		{name: "from rest", units: []int{1}, want: lane / restParts},
		{name: "beside another batch", busy: 1, units: []int{1}, want: lane},
		{name: "write", write: true, units: []int{1}, want: lane},
		{name: "a group is more than that", units: []int{3, 4}, want: 7},
		{name: "an object is", units: []int{lane}, want: lane},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, m := &GPU{depth: 1024, lanes: make([]*gpuLane, 2)}, &Map{}
			g.config.Lanes = make([][]Queue, len(g.lanes))
			g.staging.bytes = lane * pageBytes
			g.busy.Store(c.busy)
			for _, n := range c.units {
				m.objects = append(m.objects, objectPlace{units: uint16(n), bytes: uint32(n) * pageBytes})
			}
			host := &Memory{buf: make([]byte, 1)}
			require.NoError(t, g.regions.add(host))
			ctxs := make([]IOCTX, 100*len(c.units))
			for i := range ctxs {
				ctxs[i] = IOCTX{Desc: host.Desc(0), Object: uint16(i % len(c.units))}
			}
			p := planner{t: &gpuTicket{g: g, m: m, n: len(ctxs), write: c.write}, ctxs: ctxs}
			p.plan()
			for i := range p.t.chunks[:len(p.t.chunks)-1] { // the last one is what is left
				require.Equal(t, c.want*pageBytes, p.t.chunks[i].bytes)
			}
		})
	}
}

// TestGPUEvacuationIsLong: what goes to the store buffer goes in pieces as long as may be, also where nothing else is
// under way: each costs a kernel.
func TestGPUEvacuationIsLong(t *testing.T) {
	g, m := &GPU{depth: 1024, lanes: make([]*gpuLane, 2)}, &Map{objects: []objectPlace{{units: 1, bytes: pageBytes}}}
	g.staging.slot = 20 * pageBytes
	g.store = &storeBuffer{piece: 16 * pageBytes}
	p := planner{t: &gpuTicket{g: g, m: m, n: 64, write: true}, ctxs: make([]IOCTX, 64)}
	p.planEvacuation()
	require.Len(t, p.t.chunks, 4)
	for i := range p.t.chunks {
		require.EqualValues(t, 16*pageBytes, p.t.chunks[i].bytes)
	}
}

// TestGPUStagingIsShared: chunks of reads go behind each other in a slot, and it is free with the last of them.
// Writes have slots of their own.
func TestGPUStagingIsShared(t *testing.T) {
	g := &GPU{}
	s := &g.staging
	*s = staging{slot: 4 * pageBytes, slots: 4, free: []int32{3, 2, 1, 0}, chunks: make([]uint16, 4), open: noSlot}
	chunk := func(write bool, pages uint32) *gpuChunk {
		return &gpuChunk{t: &gpuTicket{write: write}, bytes: pages * pageBytes, slot: noSlot}
	}
	a, b, c, d := chunk(false, 1), chunk(false, 2), chunk(false, 2), chunk(false, 2)
	w, whole := chunk(true, 1), chunk(false, 4)
	for _, x := range []*gpuChunk{a, b} {
		require.True(t, s.takeRead(x))
	}
	s.take(w)
	for _, x := range []*gpuChunk{c, d, whole} {
		require.True(t, s.takeRead(x))
	}
	require.Empty(t, s.free)
	places := map[uint64]int{}
	for i, x := range []*gpuChunk{a, b, w, c, d, whole} {
		for page := range x.bytes / pageBytes {
			at := s.address(x) + uint64(page)*pageBytes
			other, taken := places[at]
			require.False(t, taken, "chunks %d and %d", i, other)
			require.Less(t, at, uint64(s.slots*s.slot))
			places[at] = i
		}
	}
	require.Equal(t, a.slot, b.slot)
	require.Equal(t, c.slot, d.slot)
	require.NotEqual(t, w.slot, a.slot)
	require.False(t, s.takeRead(chunk(false, 1)), "no slot is left, and no room in the last one")
	g.giveSlot(a)
	require.Empty(t, s.free)
	require.False(t, s.takeRead(chunk(false, 1)), "room in front is not given again")
	for _, x := range []*gpuChunk{b, c, w, d, whole} {
		g.giveSlot(x)
		g.giveSlot(x) // once more is nothing
	}
	require.Len(t, s.free, s.slots)
	require.Zero(t, s.writes)
	require.True(t, s.takeRead(a))
	require.Zero(t, a.at, "a slot that is free again begins anew")
}

// checkCells lays a chunk's cells out as kernels do.
func checkCells(t *testing.T, p *planner, c *gpuChunk) {
	group, end := uint32(len(p.offsets)), uint32(0)
	kinds := kindOf{t: p.t}
	for k := range c.count {
		ctx := &p.ctxs[c.first+k]
		require.Equal(t, c.direct, kinds.direct(ctx))
		if c.direct {
			continue
		}
		require.Equal(t, k%group, (c.first+k)%group, "chunks begin at multiples of a group")
		from, n := k/group*p.stride+p.offsets[k%group], p.cellOf(ctx.Object)
		if n == 0 {
			continue
		}
		require.GreaterOrEqual(t, from, end, "cells do not overlap")
		end = from + n
		require.LessOrEqual(t, end, c.bytes)
	}
	require.LessOrEqual(t, int(c.bytes), p.t.g.staging.bytes)
}

// TestGPUQueuesWrap: queues, and command ids too, go round many times, whatever the depth.
func TestGPUQueuesWrap(t *testing.T) {
	for _, depth := range []int{2, 4, 8, 64} {
		t.Run(fmt.Sprint(depth), func(t *testing.T) {
			b := newBench(t, benchShape{lanes: 2, drives: 2, depth: depth, bounce: 1 << 20, units: []int{1}})
			buf, ctxs := b.target(48, 0)
			for round := range uint64(6) {
				b.turnOver(buf, ctxs, round)
			}
			require.Zero(t, b.quiesced.Load())
		})
	}
	b := newBench(t, benchShape{lanes: 1, drives: 1, depth: 64, bounce: 1 << 20, units: []int{1}})
	buf, ctxs := b.target(48, 0)
	require.NoError(t, b.g.onThread(func() error {
		b.g.lanes[0].queues[0].firstID = 65536 - 100
		return nil
	}))
	for round := range uint64(3) {
		b.turnOver(buf, ctxs, round)
	}
}

// TestGPUStagingRunsOut: with harvests held back, arrived chunks fill the staging and the lanes keep theirs; when
// harvests go on, everything does. Writes leave a quarter of the staging alone.
func TestGPUStagingRunsOut(t *testing.T) {
	b := newBench(t, benchShape{
		lanes: 4, drives: 1, depth: 64, bounce: 4 * 4 * pageBytes, units: []int{1},
		config: func(c *GPUConfig) { c.StagingBytes, c.HarvestBytes = 4*4*pageBytes, 1<<20 },
	})
	buf, ctxs := b.target(60, 0)
	b.turnOver(buf, ctxs, 1)
	hold := make(chan struct{})
	b.fake.Before(func(_ uintptr, op string) cuda.Result {
		if op == "tuttifs_harvest" {
			<-hold
		}
		return cuda.Success
	})
	clear(buf)
	ticket, err := b.g.Issue(false, b.m, ctxs)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		var left int
		require.NoError(t, b.g.onThread(func() error { left = len(b.g.staging.free); return nil }))
		return left == 0
	}, 10*time.Second, time.Millisecond)
	require.False(t, ticket.(*gpuTicket).Done())
	close(hold)
	results, err := b.g.Wait(ticket)
	require.NoError(t, err)
	require.Empty(t, results)
	want := make([]byte, len(buf))
	fillRandom(want, 1)
	require.True(t, bytes.Equal(want, buf))
	require.NoError(t, b.g.onThread(func() error {
		if len(b.g.staging.free) != b.g.staging.slots || b.g.staging.writes != 0 {
			return errors.New("slots are lost")
		}
		return nil
	}))
}

// TestGPUKernelsBesideLongOnes: while a harvest or gather of a batch waits for an SM, the batch has no other one, and
// what arrives meanwhile is one kernel's work; the batch that follows has another stream, and ends before it.
func TestGPUKernelsBesideLongOnes(t *testing.T) {
	for kernel, write := range map[string]bool{"tuttifs_harvest": false, "tuttifs_gather": true} {
		b := newBench(t, benchShape{
			lanes: 4, drives: 1, depth: 64, bounce: 4 * 4 * pageBytes, units: []int{1},
			config: func(c *GPUConfig) { c.StagingBytes, c.HarvestBytes = 64*4*pageBytes, 1 },
		})
		buf, ctxs := b.target(60, 0)
		b.turnOver(buf, ctxs, 1)
		var mu sync.Mutex
		var seen []uintptr // streams, in order of their first kernel
		launched := map[uintptr]int{}
		holds := []chan struct{}{make(chan struct{}), make(chan struct{})}
		b.fake.Before(func(stream uintptr, op string) cuda.Result {
			if op != kernel {
				return cuda.Success
			}
			mu.Lock()
			if launched[stream]++; launched[stream] == 1 {
				seen = append(seen, stream)
			}
			hold := holds[slices.Index(seen, stream)]
			mu.Unlock()
			<-hold
			return cuda.Success
		})
		ofFirst := func() int {
			mu.Lock()
			defer mu.Unlock()
			return launched[seen[0]]
		}
		launches := func() uint64 { s := b.g.Stats(); return s.Harvests + s.Gathers }
		before := launches()
		first, err := b.g.Issue(write, b.m, ctxs[:30])
		require.NoError(t, err)
		if write {
			require.Eventually(t, func() bool { return launches() == before+1 }, 10*time.Second, time.Millisecond)
		} else {
			require.Eventually(t, func() (all bool) {
				require.NoError(t, b.g.onThread(func() error {
					all = first.(*gpuTicket).listed == len(first.(*gpuTicket).chunks)
					return nil
				}))
				return all
			}, 10*time.Second, time.Millisecond)
		}
		second, err := b.g.Issue(write, b.m, ctxs[30:])
		require.NoError(t, err)
		close(holds[1])
		if !write { // writes of the second batch may wait for lanes that the first one has
			_, err = b.g.Wait(second)
			require.NoError(t, err)
			require.Equal(t, 1, ofFirst())
		}
		require.False(t, first.(*gpuTicket).Done())
		close(holds[0])
		for _, ticket := range []Ticket{first, second} {
			results, err := b.g.Wait(ticket)
			require.NoError(t, err)
			require.Empty(t, results)
		}
		require.Len(t, seen, 2)
		if !write {
			require.Equal(t, 2, ofFirst(), "what arrived while the first one waited is one kernel's work")
		}
		want := make([]byte, len(buf))
		fillRandom(want, 1)
		require.True(t, bytes.Equal(want, buf))
	}
}

// TestGPUStagingIsSmall: two slots are enough for any number of chunks.
func TestGPUStagingIsSmall(t *testing.T) {
	for slots := 2; slots <= 5; slots++ {
		b := newBench(t, benchShape{
			lanes: 4, drives: 1, depth: 64, bounce: 4 * 4 * pageBytes, units: []int{1},
			config: func(c *GPUConfig) { c.StagingBytes = slots * 4 * pageBytes },
		})
		buf, ctxs := b.target(60, 0)
		b.turnOver(buf, ctxs, 1)
	}
}

// TestGPUBuildsAgain: a lane that is quiesced loses what was built ahead of its doorbell, which is built again; only
// the chunk that was under way fails.
func TestGPUBuildsAgain(t *testing.T) {
	for _, write := range []bool{false, true} {
		b := newBench(t, benchShape{
			lanes: 2, drives: 2, depth: 64, bounce: 2 * 64 * pageBytes, units: []int{1},
			config: func(c *GPUConfig) { c.Deadline, c.ChunkCommands = 300*time.Millisecond, 4 },
		})
		buf, ctxs := b.target(56, 0)
		b.turnOver(buf, ctxs, 1)
		fillRandom(buf, 2)
		want := bytes.Clone(buf)
		if !write {
			require.Empty(t, b.run(true, ctxs))
			clear(buf)
		}
		lost := false
		b.setHook(func(*nvme.SQE, int) bool {
			first := !lost
			lost = true
			return !first
		})
		results := b.run(write, ctxs)
		require.NotEmpty(t, results)
		require.LessOrEqual(t, len(results), 4, "one chunk")
		require.EqualValues(t, 1, b.quiesced.Load())
		b.setHook(nil)
		if write {
			clear(buf)
			require.Empty(t, b.run(false, ctxs))
		}
		failed := map[int]bool{}
		for _, r := range results {
			require.ErrorIs(t, r.Err, ErrTimeout)
			failed[r.Index] = true
		}
		for i := range ctxs {
			got, is := buf[i*pageBytes:(i+1)*pageBytes], want[i*pageBytes:(i+1)*pageBytes]
			if !failed[i] {
				require.True(t, bytes.Equal(is, got), i)
			} else if !write {
				require.Equal(t, make([]byte, pageBytes), got)
			}
		}
		require.Equal(t, 2, b.g.Alive())
		b.turnOver(buf, ctxs, 3)
	}
}

// TestGPUDirectionsAtOnce: batches in both directions share lanes and staging, and the held writes of one leave the
// reads of the others alone.
func TestGPUDirectionsAtOnce(t *testing.T) {
	b := newBench(t, benchShape{
		lanes: 3, drives: 2, depth: 32, bounce: 3 * 16 * pageBytes, units: []int{1, 3, 2},
		config: func(c *GPUConfig) { c.StagingBytes, c.HarvestBytes = 6*16*pageBytes, 8*pageBytes },
	})
	var wg sync.WaitGroup
	for object := range 3 {
		buf, ctxs := b.target(40, object)
		wg.Go(func() {
			for round := range uint64(4) {
				fillRandom(buf, round)
				want := bytes.Clone(buf)
				for _, write := range []bool{true, false} {
					ticket, err := b.g.Issue(write, b.m, ctxs)
					if err == nil {
						var results []Result
						results, err = b.g.Wait(ticket)
						if len(results) > 0 {
							err = results[0].Err
						}
					}
					if err != nil {
						t.Error(err)
						return
					}
					if write {
						clear(buf)
					}
				}
				if !bytes.Equal(want, buf) {
					t.Errorf("object %d round %d: other bytes", object, round)
				}
			}
		})
	}
	wg.Wait()
}

// TestGPUFailsTyped: whichever call of CUDA fails, all waits end with ErrDead and the driver's error, and host memory
// is zero.
func TestGPUFailsTyped(t *testing.T) {
	for _, function := range []string{
		"LaunchKernel", "MemcpyHtoDAsync", "MemcpyDtoHAsync", "EventRecord", "EventQuery",
	} {
		for n := 1; n <= 3; n++ {
			for _, write := range []bool{false, true} {
				name := fmt.Sprintf("%s %d %v", function, n, write)
				b := newBench(t, benchShape{lanes: 2, drives: 1, depth: 64, bounce: 2 * 8 * pageBytes, units: []int{1}})
				buf, ctxs := b.target(40, 0)
				b.turnOver(buf, ctxs, 1)
				fillRandom(buf, 9)
				b.fake.Fail(function, n, cuda.ErrLaunchFailed)
				ticket, err := b.g.Issue(write, b.m, ctxs)
				require.NoError(t, err)
				results, err := b.g.Wait(ticket)
				if len(results) == 0 {
					require.NoError(t, err, name) // the direction does without that call
					continue
				}
				require.ErrorIs(t, err, ErrDead, name)
				require.ErrorIs(t, err, cuda.ErrLaunchFailed, name)
				for _, r := range results {
					require.ErrorIs(t, r.Err, ErrDead, name)
					if !write {
						require.Equal(t, make([]byte, pageBytes), buf[r.Index*pageBytes:(r.Index+1)*pageBytes], name)
					}
				}
				_, err = b.g.Issue(write, b.m, ctxs)
				require.ErrorIs(t, err, ErrDead, name)
			}
		}
	}
}

// TestGPUKernelNeverEnds: a kernel that is never done ends all waits, in bounded time.
func TestGPUKernelNeverEnds(t *testing.T) {
	for _, kernel := range []string{"tuttifs_build", "tuttifs_gather", "tuttifs_harvest"} {
		hold := make(chan struct{})
		b := newBench(t, benchShape{
			lanes: 2, drives: 1, depth: 64, bounce: 2 * 8 * pageBytes, units: []int{1},
			config: func(c *GPUConfig) { c.Deadline, c.grace = 200*time.Millisecond, 300*time.Millisecond },
		})
		_, ctxs := b.target(20, 0)
		b.fake.Before(func(_ uintptr, op string) cuda.Result {
			if op == kernel {
				<-hold
			}
			return cuda.Success
		})
		ticket, err := b.g.Issue(kernel == "tuttifs_gather", b.m, ctxs)
		require.NoError(t, err)
		results, err := b.g.Wait(ticket)
		require.ErrorIs(t, err, ErrDead)
		require.ErrorIs(t, err, ErrStuck)
		require.NotEmpty(t, results)
		require.ErrorIs(t, b.g.Unregister(b.g.regions.lookup(ctxs[0].Desc)), ErrBusy)
		require.ErrorIs(t, b.g.Close(), ErrDead)
		close(hold)
		b.giveBack()
	}
}

// TestGPUDriverHangs: a call of the driver that never returns ends all waits too: every lane is quiesced by a thread
// that calls nothing of CUDA, and what the batch has stays in use.
func TestGPUDriverHangs(t *testing.T) {
	hold, hanging := make(chan struct{}), atomic.Bool{}
	b := newBench(t, benchShape{
		lanes: 2, drives: 1, depth: 64, bounce: 2 * 8 * pageBytes, units: []int{1},
		config: func(c *GPUConfig) { c.Deadline, c.grace = 200*time.Millisecond, 300*time.Millisecond },
		api: func(a *cuda.API) {
			copyIn := a.MemcpyHtoDAsync
			a.MemcpyHtoDAsync = func(dst cuda.Pointer, src unsafe.Pointer, n uint64, stream uintptr) cuda.Result {
				if hanging.Load() {
					<-hold
				}
				return copyIn(dst, src, n, stream)
			}
		},
	})
	buf, ctxs := b.target(20, 0)
	b.turnOver(buf, ctxs, 1)
	m := b.g.regions.lookup(ctxs[0].Desc)
	hanging.Store(true)
	ticket, err := b.g.Issue(false, b.m, ctxs)
	require.NoError(t, err)
	results, err := b.g.Wait(ticket)
	require.ErrorIs(t, err, ErrStuck)
	require.Len(t, results, len(ctxs))
	require.EqualValues(t, 2, b.quiesced.Load())
	require.ErrorIs(t, b.g.Unregister(m), ErrBusy)
	_, err = b.g.Issue(false, b.m, ctxs)
	require.ErrorIs(t, err, ErrDead)
	require.ErrorIs(t, b.g.Close(), ErrDead)
	hanging.Store(false)
	close(hold)
	<-b.g.ended
	b.g.control.stuck = nil
	b.giveBack()
}

// giveBack gives the driver what Close could not.
func (b *bench) giveBack() {
	require.NoError(b.t, b.g.control.do(b.ctx.Synchronize))
	b.g.takeDown()
}

// TestGPUMapsAreKept: maps that come and go share memory of the device, which does not grow.
func TestGPUMapsAreKept(t *testing.T) {
	b := newBench(t, benchShape{lanes: 1, drives: 1, depth: 16, bounce: 1 << 20, units: []int{1}})
	buf, ctxs := b.target(8, 0)
	first := b.m
	var most uint64
	for round := range uint64(3 * mapsKept) {
		m := *first
		b.m = &m
		b.turnOver(buf, ctxs, round)
		if round == mapsKept {
			most = b.g.Stats().DeviceBytes
		}
	}
	require.Equal(t, most, b.g.Stats().DeviceBytes)
}

// TestGPUStats counts what was moved, and what it cost the thread.
func TestGPUStats(t *testing.T) {
	b := newBench(t, benchShape{lanes: 2, drives: 2, depth: 32, bounce: 1 << 20, units: []int{2}})
	buf, ctxs := b.target(30, 0)
	b.turnOver(buf, ctxs, 1)
	s := b.g.Stats()
	require.EqualValues(t, 60, s.Commands)
	require.EqualValues(t, len(buf), s.ReadBytes)
	require.EqualValues(t, len(buf), s.WrittenBytes)
	require.Positive(t, s.CPUNanos)
	require.Positive(t, s.Harvests)
	require.Positive(t, s.Gathers)
	require.NoError(t, b.g.Close())
	require.Zero(t, b.g.Stats().CPUNanos, "the thread is gone")
	require.Zero(t, b.g.Stats().DeviceBytes)
}

// TestGPUPagedCost: a paged registration costs 16 bytes a run, and gives them back; descriptors are arithmetic.
func TestGPUPagedCost(t *testing.T) {
	b := newBench(t, benchShape{lanes: 1, drives: 1, depth: 16, bounce: 1 << 20, units: []int{1}})
	const blocks, classes = 5000, 4
	p := Paged{Blocks: blocks}
	for c := range classes {
		base := uint64(1)<<44 + uint64(c)<<32
		p.Classes = append(p.Classes, []cuda.StridedRun{
			{Base: base, Stride: 131072, Bytes: 65536}, {Base: base + 65536, Stride: 131072, Bytes: 65536},
		})
	}
	before := b.g.Stats().DeviceBytes
	m, err := b.g.RegisterPaged(p)
	require.NoError(t, err)
	require.EqualValues(t, 16*2*blocks*classes, m.DeviceBytes())
	require.Equal(t, before+m.DeviceBytes(), b.g.Stats().DeviceBytes)
	require.Equal(t, m.Block(0, 0)+2*(3*blocks+7), m.Block(3, 7))
	for _, out := range []uint64{m.Block(-1, 0), m.Block(classes, 0), m.Block(0, blocks)} {
		results := b.run(false, []IOCTX{{Desc: out}})
		require.Len(t, results, 1)
		require.ErrorIs(t, results[0].Err, ErrMemory)
	}
	require.NoError(t, b.g.Unregister(m))
	require.Equal(t, before+b.mapBytes(), b.g.Stats().DeviceBytes)

	for name, spoil := range map[string]func(p *Paged){
		"overlapping blocks": func(p *Paged) { p.Classes[1][0].Stride = 65535 },
		"beyond the end":     func(p *Paged) { p.Classes[2][1].Stride = 1 << 62 },
		"too many blocks":    func(p *Paged) { p.Blocks = 1 << 43 },
		"no blocks":          func(p *Paged) { p.Blocks = 0 },
	} {
		bad := Paged{Blocks: p.Blocks}
		for _, class := range p.Classes {
			bad.Classes = append(bad.Classes, append([]cuda.StridedRun(nil), class...))
		}
		spoil(&bad)
		_, err := b.g.RegisterPaged(bad)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

func (b *bench) mapBytes() (n uint64) {
	for _, d := range b.g.maps.maps {
		n += d.capacity
	}
	return n
}

// TestGPUConfigIsChecked: what cannot work is refused, and nothing is left behind.
func TestGPUConfigIsChecked(t *testing.T) {
	b := newBench(t, benchShape{lanes: 1, drives: 1, depth: 16, bounce: 1 << 20, units: []int{1}})
	good := GPUConfig{RingConfig: b.g.config, Context: b.ctx}
	for name, spoil := range map[string]func(c *GPUConfig){
		"no context":     func(c *GPUConfig) { c.Context = nil },
		"no lanes":       func(c *GPUConfig) { c.Lanes = nil },
		"little staging": func(c *GPUConfig) { c.StagingBytes = 4096 },
		"negative":       func(c *GPUConfig) { c.MoveBytes = -1 },
		"large pieces":   func(c *GPUConfig) { c.MoveBytes = 1 << 32 },
		"many pieces":    func(c *GPUConfig) { c.Moves = MovesMax + 1 },
	} {
		c := good
		spoil(&c)
		_, err := NewGPU(c)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	live := b.fake.Live()
	goroutines := runtime.NumGoroutine()
	_, err := NewGPU(good)
	require.ErrorIs(t, err, ErrMemory, "the memory is registered already")
	require.Equal(t, live, b.fake.Live())
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > goroutines && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	require.LessOrEqual(t, runtime.NumGoroutine(), goroutines)
}

// TestGPUStartsWholly: whichever call fails while the executor is made, nothing is left behind.
func TestGPUStartsWholly(t *testing.T) {
	b := newBench(t, benchShape{lanes: 2, drives: 2, depth: 16, bounce: 1 << 20, units: []int{1}})
	require.NoError(t, b.g.Close())
	c := GPUConfig{RingConfig: b.g.config, Context: b.ctx, StagingBytes: 1 << 20}
	live := b.fake.Live()
	failed := 0
	for _, function := range []string{
		"CtxSetCurrent", "MemHostRegister", "MemHostGetDevicePointer", "ModuleLoadDataEx", "ModuleGetFunction",
		"CtxGetStreamPriorityRange", "StreamCreateWithPriority", "MemHostAlloc", "MemAlloc", "MemsetD8Async",
		"MemcpyHtoDAsync", "StreamSynchronize", "EventCreate",
	} {
		for n := range 8 {
			b.fake.Fail(function, n+1, cuda.ErrOutOfMemory)
			g, err := NewGPU(c)
			if err == nil {
				require.NoError(t, g.Close())
				continue
			}
			failed++
			require.ErrorIs(t, err, cuda.ErrOutOfMemory, "%s %d", function, n)
			require.Equal(t, live, b.fake.Live(), "%s %d", function, n)
		}
	}
	require.Greater(t, failed, 30)
}

// TestGPULayoutsAreTheKernels: what kernels read of the host's structs is where they look for it.
func TestGPULayoutsAreTheKernels(t *testing.T) {
	ctx := IOCTX{Desc: 1, Slot: 2, Object: 3, Flags: 4}
	require.Equal(t, cuda.KernelIOCTX{Desc: 1, Slot: 2, Object: 3, Flags: 4}, *(*cuda.KernelIOCTX)(unsafe.Pointer(&ctx)))
	place := objectPlace{offset: 1, bytes: 2, units: 3, position: 4}
	require.Equal(t, cuda.KernelObject{Offset: 1, Bytes: 2, Units: 3, Position: 4},
		*(*cuda.KernelObject)(unsafe.Pointer(&place)))
	require.Equal(t, unsafe.Sizeof(ctx), unsafe.Sizeof(cuda.KernelIOCTX{}))
	require.Equal(t, unsafe.Sizeof(place), unsafe.Sizeof(cuda.KernelObject{}))
}

// TestGPUAllocations: a batch costs a fixed number of allocations, however many objects it has. All of it is one chunk,
// one copy and one harvest, for the fake allocates by the operation.
func TestGPUAllocations(t *testing.T) {
	const few, many = 10, 1000
	for _, polling := range []bool{false, true} {
		b := newBench(t, benchShape{
			lanes: 1, drives: 1, depth: 1024, bounce: 1024 * pageBytes, units: []int{1},
			config: func(c *GPUConfig) { c.Polling = polling },
		})
		_, ctxs := b.target(many, 0)
		for i := range ctxs {
			ctxs[i].Slot %= 64
		}
		for _, write := range []bool{false, true} {
			// The rest is the fake's: slices that grow with a batch, and how often its controller looks, which is more
			// often on a busy machine. So the least of a few counts.
			cost := func(n int) float64 {
				least := math.Inf(1)
				for range 4 {
					least = min(least, testing.AllocsPerRun(4, func() { b.run(write, ctxs[:n]) }))
				}
				return least
			}
			small := cost(few)
			require.LessOrEqual(t, small, 60.0, "polling %v, write %v", polling, write)
			require.LessOrEqual(t, cost(many), small+(many-few)/10, "polling %v, write %v", polling, write)
		}
	}
}

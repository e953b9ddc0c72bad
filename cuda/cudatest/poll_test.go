//go:build !nogpu

package cudatest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// pollFault is what goes wrong with one command of a queue.
type pollFault int

const (
	faultNone pollFault = iota
	faultStatus
	faultLost
	faultTwice
	faultUnknown
)

// controller completes the commands of one queue out of order. It reads into cells and memory by translating I/O
// addresses back, and gives every object the bytes that its extent names.
type controller struct {
	w         *world
	q         cuda.KernelQueue
	random    *rand.Rand
	translate func(io uint64) uint64
	sqHead    uint32
	cqTail    uint32
	phase     uint32
	fault     pollFault
	at        int // the command that it hits
	seen      int
	waiting   []nvme.SQE
}

// extentBytes is what lies on a drive from a block on.
func extentBytes(lba uint64, n uint32) []byte {
	b, seed := make([]byte, n), [32]byte{}
	binary.LittleEndian.PutUint64(seed[:], lba)
	_, _ = rand.NewChaCha8(seed).Read(b)
	return b
}

func (c *controller) post(cid, status uint16) {
	e := c.q.CQ + uint64(c.cqTail)*nvme.CQEBytes
	*at[uint32](e, 0) = 0xdeadbeef
	atomic.StoreUint32(at[uint32](e, 3), uint32(cid)|(uint32(status)<<1|c.phase)<<16)
	if c.cqTail++; c.cqTail > c.q.Mask {
		c.cqTail, c.phase = 0, c.phase^1
	}
}

// step fetches what was rung and completes some of it.
func (c *controller) step() {
	tail := atomic.LoadUint32(at[uint32](c.q.SQTail, 0))
	for ; c.sqHead != tail; c.sqHead = (c.sqHead + 1) & c.q.Mask {
		c.waiting = append(c.waiting, *at[nvme.SQE](c.q.SQ, uint64(c.sqHead)))
	}
	for range c.random.IntN(1 + len(c.waiting)) {
		i := c.random.IntN(len(c.waiting))
		sqe := c.waiting[i]
		c.waiting = append(c.waiting[:i], c.waiting[i+1:]...)
		c.complete(&sqe)
	}
}

func (c *controller) complete(sqe *nvme.SQE) {
	c.seen++
	fault := faultNone
	if c.seen == c.at {
		fault = c.fault
	}
	switch fault {
	case faultLost:
		return
	case faultStatus:
		c.post(sqe.CID, 0x281)
		return
	case faultUnknown:
		c.post(sqe.CID-1000, 0)
		return
	}
	if sqe.Opcode == nvme.IORead {
		n := sqe.Blocks() * pageBytes >> c.q.LBAShift
		b := extentBytes(sqe.LBA()>>c.q.LBAShift, n)
		d := nvme.SGLFromWords(sqe.DPTR[0], sqe.DPTR[1])
		if d.Type() == nvme.SGLDataBlock {
			copy(bytesAt(c.translate(d.Addr), n), b)
		} else {
			entries := d.Addr - c.w.regions[4095].TableIO + c.w.table.entries
			for i := range uint64(d.Length / nvme.SGLDescriptorBytes) {
				e := at[cuda.KernelRun](entries, i)
				b = b[copy(bytesAt(c.translate(e.Address), e.Bytes), b):]
			}
		}
	}
	c.post(sqe.CID, 0)
	if fault == faultTwice {
		c.post(sqe.CID, 0)
	}
}

// pollWorld is a world with cells for polling.
type pollWorld struct {
	*world
	p       *cuda.PollParams
	cellsAt uint64
	bounced uint64 // PollParams.Cells where not direct
}

const pollCellBytes = 40 * cellMax

func newPollWorld(memory []byte, seed uint64, sums bool) *pollWorld {
	w := &pollWorld{world: newWorld(memory, seed, sums)}
	w.cellsAt = w.alloc(uint64(w.lanes)*pollCellBytes, pageBytes)
	gpu, io := make([]uint64, w.lanes), make([]uint64, w.lanes)
	for i := range gpu {
		gpu[i] = w.cellsAt + uint64(i)*pollCellBytes
		io[i] = gpu[i] + 1<<50
	}
	w.p = &cuda.PollParams{
		Tables: w.tables, Sums: w.sums, IOCTXs: w.ioctxs, Queues: w.queues, Outcomes: w.outcomes,
		Statuses: put(w.world, make([]uint16, w.count)), Done: w.done, Blocks: w.blocks,
		Cells: put(w.world, gpu), CellsIO: put(w.world, io),
		DeadlineNanos: uint64(20 * time.Second), Count: w.count, Lanes: w.lanes, Drives: w.drives,
		CellBytes: pollCellBytes, CellStride: cellMax, Depth: 1 + w.random.Uint32N(64),
		Write: uint8(w.random.IntN(2)), SGL: 1,
	}
	w.bounced = w.p.Cells
	if w.chance(3) {
		w.p.Cells = 0
	}
	for i := range w.lanes * w.drives {
		q := at[cuda.KernelQueue](w.queues, uint64(i))
		q.Mask = 1<<(1+w.random.IntN(6)) - 1
		q.Tail, q.Head, q.Phase = 0, 0, 1
		// Some of the sums are those of what the drives have.
		if w.p.Write == 0 && sums {
			w.expectDrives()
		}
	}
	return w
}

// expectDrives fills in the sums of what reads bring, but for a few.
func (w *pollWorld) expectDrives() {
	for i := range w.count {
		ctx := at[cuda.KernelIOCTX](w.ioctxs, uint64(i))
		e := locate(&w.tables, ctx)
		if e.queue < 0 || i%9 == 0 {
			continue
		}
		sum, place := (summer{&w.p.Sums}).sum(i, ctx.Object, extentBytes(e.unit, e.bytes)[:e.payload])
		*place = sum
	}
}

// translate undoes the I/O addresses of cells, flat memory and table runs.
func (w *pollWorld) translate(io uint64) uint64 {
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(w.memory))))
	inside := func(a uint64) bool { return a-base < uint64(len(w.memory)) }
	for _, a := range []uint64{io - 1<<50, io - w.regions[5].IO, io - w.regions[6].IO, io - w.regions[7].IO,
		io - w.regions[8].IO, io - w.regions[4095].IO} {
		if inside(a) {
			return a
		}
	}
	panic("a controller was given a wild address")
}

// run launches the kernel with controllers beside it.
func (w *pollWorld) run(launch launcher, block uint32, fault pollFault) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range w.lanes * w.drives {
		c := &controller{w: w.world, q: *at[cuda.KernelQueue](w.queues, uint64(i)), translate: w.translate, phase: 1,
			random: rand.New(rand.NewPCG(uint64(i), 3)), fault: fault, at: 3}
		wg.Go(func() {
			for {
				c.step()
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Microsecond):
				}
			}
		})
	}
	launch("tuttifs_poll", w.lanes*w.drives, block, unsafe.Pointer(w.p))
	close(stop)
	wg.Wait()
}

// requireRead checks what reads brought, or that it was zeroed.
func (w *pollWorld) requireRead(t *testing.T) {
	t.Helper()
	if w.p.Write != 0 {
		return
	}
	for i := range w.count {
		ctx := at[cuda.KernelIOCTX](w.ioctxs, uint64(i))
		e, outcome := locate(&w.tables, ctx), *at[uint8](w.outcomes, uint64(i))
		m, ok := lookup(&w.tables, ctx.Desc, e.payload)
		if !ok {
			require.NotEqual(t, cuda.OutcomeOK, outcome)
			continue
		}
		want := make([]byte, e.payload)
		if outcome == cuda.OutcomeOK {
			copy(want, extentBytes(e.unit, e.bytes))
		}
		got := m.gather(make([]byte, e.payload))
		require.True(t, bytes.Equal(want, got), "IOCTX %d, outcome %d: %s", i, outcome, difference(want, got))
	}
}

// results are what must be the same whatever the order of completions: targets, outcomes, statuses and sums.
func (w *pollWorld) results() [][]byte {
	r := [][]byte{bytesAt(w.outcomes, w.count), bytesAt(w.p.Statuses, 2*w.count), bytesAt(w.done, 4)}
	if w.sums.Seeds != 0 {
		r = append(r, bytesAt(w.sums.Sums, (w.count+w.sums.PerSlot-1)/w.sums.PerSlot*w.sums.PerSlot*8))
	}
	for i := range w.count {
		ctx := at[cuda.KernelIOCTX](w.ioctxs, uint64(i))
		payload, _ := payloadOf(&w.tables, ctx.Object)
		if m, ok := lookup(&w.tables, ctx.Desc, payload); ok {
			r = append(r, m.gather(make([]byte, payload)))
		}
	}
	for i := range w.lanes * w.drives {
		r = append(r, bytesAt(w.queues+uint64(i)*uint64(unsafe.Sizeof(cuda.KernelQueue{})),
			uint32(unsafe.Sizeof(cuda.KernelQueue{}))))
	}
	for i := range r {
		r[i] = bytes.Clone(r[i])
	}
	return r
}

// comparePoll runs the polling kernel and its mirror against the same controllers.
func comparePoll(t *testing.T, memory []byte, other launcher, rounds int, blocks []uint32) {
	for seed := range rounds {
		for _, sums := range []bool{false, true} {
			w := newPollWorld(memory, uint64(seed), sums)
			before := bytes.Clone(w.memory[:w.used])
			w.run(mirror, 0, faultNone)
			w.requireRead(t)
			want := w.results()
			copy(w.memory, before)
			w.run(other, blocks[w.random.IntN(len(blocks))], faultNone)
			w.requireRead(t)
			for i, got := range w.results() {
				require.True(t, bytes.Equal(want[i], got), "seed %d sums %v result %d of %d: %s",
					seed, sums, i, len(want), difference(want[i], got))
			}
		}
	}
}

// difference names the first byte that is another.
func difference(want, got []byte) string {
	for i := range want {
		if want[i] != got[i] {
			return fmt.Sprintf("byte %d is %#x, not %#x", i, got[i], want[i])
		}
	}
	return ""
}

// pollFaults checks what a fault in every queue leaves.
func pollFaults(t *testing.T, memory []byte, launch launcher, block uint32) {
	cases := []struct {
		name              string
		fault             pollFault
		one, others, rest uint8 // outcome of the command, of what is outstanding with it, and of what is never issued
		phase             bool  // the queue is left bad
	}{
		{"status", faultStatus, cuda.OutcomeFailed, cuda.OutcomeOK, cuda.OutcomeOK, false},
		{"lost", faultLost, cuda.OutcomeTimeout, cuda.OutcomeOK, cuda.OutcomeTimeout, true},
		{"twice", faultTwice, cuda.OutcomeProtocol, cuda.OutcomeProtocol, cuda.OutcomePending, true},
		{"unknown", faultUnknown, cuda.OutcomeProtocol, cuda.OutcomeProtocol, cuda.OutcomePending, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newPollWorld(memory, 4, false)
			w.lanes, w.p.Lanes, w.p.Cells = 1, 1, w.bounced
			if c.fault == faultLost {
				w.p.DeadlineNanos = uint64(time.Second)
			}
			w.run(launch, block, c.fault)
			hits := 0
			for number := range w.lanes * w.drives {
				allowed := []uint8{cuda.OutcomeOK, c.one, c.others, c.rest}
				commands, seen := uint32(0), map[uint8]int{}
				for i := number / w.drives; i < w.count; i += w.lanes {
					ctx := at[cuda.KernelIOCTX](w.ioctxs, uint64(i))
					o := *at[uint8](w.outcomes, uint64(i))
					if locate(&w.tables, ctx).queue != int(number%w.drives) ||
						o == cuda.OutcomeMemory || o == cuda.OutcomeInvalid {
						continue
					}
					commands++
					seen[o]++
					require.Contains(t, allowed, o)
				}
				q := at[cuda.KernelQueue](w.queues, uint64(number))
				if commands < 3 {
					continue
				}
				hits++
				require.Equal(t, c.phase, q.Phase == cuda.PhaseBad, "%v", seen)
				if c.fault == faultStatus {
					require.Equal(t, 1, seen[c.one])
				} else if c.fault == faultLost {
					require.GreaterOrEqual(t, seen[c.one], 1)
				}
			}
			require.Positive(t, hits, "queues with commands enough")
		})
	}
	t.Run("stop", func(t *testing.T) {
		w := newPollWorld(memory, 4, false)
		w.p.Stop = put(w.world, []uint32{1})
		launch("tuttifs_poll", w.lanes*w.drives, block, unsafe.Pointer(w.p))
		for i := range w.count {
			require.Contains(t, []uint8{cuda.OutcomeTimeout, cuda.OutcomeMemory, cuda.OutcomeUnmapped,
				cuda.OutcomeInvalid}, *at[uint8](w.outcomes, uint64(i)))
		}
	})
}

func TestMirrorPollFaults(t *testing.T) { pollFaults(t, mapWorld(t), mirror, 0) }

func TestEmulatedPoll(t *testing.T) {
	rounds := 4
	if testing.Short() {
		rounds = 3
	}
	memory, emulated := mapWorld(t), emulator(t)
	comparePoll(t, memory, emulated, rounds, []uint32{32, 96, 256})
	pollFaults(t, memory, emulated, 64)
}

package giotest

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// fault is one kind of misbehaviour and how it must come out.
type fault struct {
	name  string
	fault emu.Fault
	want  error
	alone bool // the others of the chunk succeed
}

// short is a deadline that a test waits for.
const short = 150 * time.Millisecond

var faults = []fault{
	{"bad status", emu.Fault{Status: uint16(nvme.InternalError)}, gio.ErrStatus, true},
	{"short transfer", emu.Fault{Short: 512}, gio.ErrStatus, true},
	{"lost completion", emu.Fault{Drop: true}, gio.ErrTimeout, false},
	{"late completion", emu.Fault{Delay: 3 * short}, gio.ErrTimeout, false},
	{"doubled completion", emu.Fault{Double: true}, gio.ErrProtocol, false},
}

// testFaults injects every fault into one command of a batch: its error is typed and its own, read targets are zeroed,
// what succeeded has its bytes, and the ring serves the same batch afterwards.
func testFaults(t *testing.T, s *Subject) {
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			waysAtOnce(t, s, func(t *testing.T, w way) {
				for _, write := range []bool{false, true} {
					f.run(t, s, w, write)
				}
			})
		})
	}
}

func (f *fault) run(t *testing.T, s *Subject, w way, write bool) {
	shape := w.shape()
	shape.Deadline, shape.ChunkCommands = short, 4
	if f.want != gio.ErrTimeout {
		shape.Deadline = 20 * time.Second
	}
	r := NewRig(t, s, shape)
	ctxs := all(r)
	store(r, ctxs, 1)
	a := w.memory(r, ctxs)
	a.fill(1)
	var armed atomic.Bool
	armed.Store(true)
	r.SetFaults(func(e *nvme.SQE) *emu.Fault {
		if armed.CompareAndSwap(true, false) {
			hit := f.fault
			return &hit
		}
		return nil
	})
	failed := r.Run(write, a.ctxs)
	r.SetFaults(nil)
	if f.fault.Double && len(failed) == 0 {
		// The second entry came after the chunk was done: the next chunk of that lane finds it.
		failed = r.Run(write, a.ctxs)
	}
	zeroed := map[int]bool{}
	for _, x := range failed {
		require.ErrorIs(t, x.Err, f.want)
		zeroed[x.Index] = !write
	}
	if f.alone {
		require.Len(t, failed, 1)
		require.Zero(t, r.Quiesced.Load())
		f.checkStatus(t, r, &a.ctxs[failed[0].Index], failed[0].Err, write)
	} else {
		require.NotEmpty(t, failed)
		// A busy machine may pass the deadline before a controller has any command: then there is nothing to quiesce.
		require.True(t, armed.Load() || r.Quiesced.Load() > 0, "quiesced before the memory was given back")
	}
	a.check(1, zeroed)
	a.recovers(2)
}

// checkStatus: the error says which command failed, and how.
func (f *fault) checkStatus(t *testing.T, r *Rig, ctx *gio.IOCTX, err error, write bool) {
	t.Helper()
	status := nvme.Status(f.fault.Status)
	if f.fault.Short > 0 {
		status = nvme.DataTransferError
	}
	require.ErrorIs(t, err, status)
	var e *gio.StatusError
	require.ErrorAs(t, err, &e)
	d, _, _ := r.extent(ctx.Slot, ctx.Object)
	require.Equal(t, gio.StatusError{Status: e.Status, Drive: d, Slot: ctx.Slot, Object: ctx.Object, Write: write}, *e)
}

// typed says whether an error is one that a fault of a controller may come to.
func typed(err error) bool {
	return errors.Is(err, gio.ErrStatus) || errors.Is(err, gio.ErrTimeout) || errors.Is(err, gio.ErrProtocol)
}

// weather gives most commands no fault, and the others any.
type weather struct {
	mu     sync.Mutex
	random *rand.Rand
	fair   bool
}

func (x *weather) hook(*nvme.SQE) *emu.Fault {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.fair {
		return nil
	}
	switch n := x.random.IntN(400); {
	case n < 12:
		return &emu.Fault{Status: uint16(nvme.UnrecoveredRead)}
	case n < 24:
		return &emu.Fault{Short: uint32(512 * x.random.IntN(20))}
	case n < 80:
		return &emu.Fault{Delay: time.Duration(x.random.IntN(1000)) * time.Microsecond}
	case n < 82:
		return &emu.Fault{Delay: 2 * short}
	case n < 84:
		return &emu.Fault{Drop: true}
	case n < 86:
		return &emu.Fault{Double: true}
	}
	return nil
}

// testStorm: all faults at once, in both directions, batch after batch. Whatever is not reported is right, whatever is
// reported is typed and zero, and afterwards everything works.
func testStorm(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		shape := w.randomShape(s.source(t, 1))
		shape.Deadline, shape.Lanes, shape.Rows = short, 2+shape.Random.IntN(3), 3
		shape.BounceBytes = min(shape.BounceBytes, shape.Lanes*65536)
		if w.kind != inDMA {
			shape.BounceBytes = shape.Lanes * 65536
		}
		r := NewRig(t, s, shape)
		ctxs := all(r)
		reads, writes := w.memory(r, ctxs[:len(ctxs)/2]), w.memory(r, ctxs[len(ctxs)/2:])
		x := weather{random: s.source(t, 2)}
		r.SetFaults(x.hook)
		for round := uint64(1); round <= uint64(s.rounds(4)); round++ {
			store(r, reads.ctxs, round)
			reads.set(0xee)
			writes.fill(round)
			read, err := r.Ring.Issue(false, r.Map, reads.ctxs)
			require.NoError(t, err)
			failedWrites := failures(t, r.Run(true, writes.ctxs))
			results, err := r.Ring.Wait(read)
			require.NoError(t, err)
			reads.check(round, failures(t, results))
			writes.check(round, nil)
			for i := range writes.ctxs {
				if !failedWrites[i] {
					r.checkStored(writes.ctxs[i].Slot, writes.ctxs[i].Object, round)
				}
			}
		}
		x.mu.Lock()
		x.fair = true
		x.mu.Unlock()
		reads.recovers(1000)
		writes.recovers(1001)
	})
}

// recovers sees that the ring works once each lane has met what a fault left behind: a queue that is gone, a completion
// that came twice. The tests' deadlines are short, and a busy machine may pass them as well: that costs another try.
func (a *arena) recovers(round uint64) {
	a.r.t.Helper()
	for range 10 * a.r.Shape.Lanes {
		a.fill(round)
		if len(failures(a.r.t, a.r.Run(true, a.ctxs))) > 0 {
			continue
		}
		a.onMedium(round)
		a.set(0)
		failed := failures(a.r.t, a.r.Run(false, a.ctxs))
		a.check(round, failed)
		if len(failed) == 0 {
			require.Equal(a.r.t, a.r.Shape.Lanes, a.r.Ring.Alive())
			return
		}
	}
	a.r.t.Fatalf("nothing works any more")
}

// failures checks that all results are typed and returns which they are.
func failures(t testing.TB, results []gio.Result) map[int]bool {
	t.Helper()
	failed := map[int]bool{}
	for i, x := range results {
		require.True(t, typed(x.Err), "%v", x.Err)
		require.True(t, i == 0 || results[i-1].Index < x.Index, "in the order of the batch, each once")
		failed[x.Index] = true
	}
	return failed
}

// stack holds every command back and lets them go one by one, the newest first: whatever a chunk or several lanes have
// in flight completes in the reverse order.
type stack struct {
	mu     sync.Mutex
	next   int
	held   []int
	last   time.Time // when the newest came
	most   int       // commands that were held at a time
	lifted int       // commands that were let go before one that had come earlier
}

func (x *stack) hook(*nvme.SQE) *emu.Fault {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.next++
	n := x.next
	x.held, x.last = append(x.held, n), time.Now()
	x.most = max(x.most, len(x.held))
	return &emu.Fault{Hold: func() bool { return x.lift(n) }}
}

// lift says whether command n may go: it is the newest, and no other seems to be coming.
func (x *stack) lift(n int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	top := len(x.held) - 1
	if x.held[top] != n || time.Since(x.last) < time.Millisecond {
		return false
	}
	if top > 0 {
		x.lifted++
	}
	x.held = x.held[:top]
	return true
}

// testOrder: commands complete in the reverse order, within each chunk and between the lanes.
func testOrder(t *testing.T, s *Subject) {
	const chunk = 4
	eachWay(t, s, func(t *testing.T, w way) {
		shape := w.shape()
		shape.Lanes, shape.ChunkCommands, shape.Depth, shape.Drives = 3, chunk, 8, 2
		r := NewRig(t, s, shape)
		ctxs := all(r)[:48]
		a := w.memory(r, ctxs)
		for _, write := range []bool{true, false} {
			// Whether several lanes are in flight when nothing more seems to be coming is a matter of time.
			for most, tries := 0, 0; most <= chunk; tries++ {
				require.Less(t, tries, 20, "commands of several lanes were never in flight together")
				a.set(0)
				if write {
					a.fill(1)
				}
				var x stack
				r.SetFaults(x.hook)
				r.runExactly(write, a.ctxs)
				a.check(1, nil)
				a.onMedium(1)
				x.mu.Lock()
				lifted := x.lifted
				most = x.most
				x.mu.Unlock()
				require.Positive(t, lifted)
			}
		}
	})
}

// testQuarantine: after a timed-out batch has returned, nothing of it reaches memory or drives any more.
func testQuarantine(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("nothing happens while nobody waits")
		}
		for _, write := range []bool{false, true} {
			shape := w.shape()
			shape.Deadline = short
			r := NewRig(t, s, shape)
			ctxs := all(r)
			store(r, ctxs, 1)
			a := w.memory(r, ctxs)
			a.fill(2)
			r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Delay: 4 * short} })
			failed := r.Run(write, a.ctxs)
			require.Len(t, failed, len(a.ctxs))
			for _, f := range failed {
				require.ErrorIs(t, f.Err, gio.ErrTimeout)
			}
			store(r, ctxs, 3)
			a.fill(4)
			time.Sleep(5 * short)
			a.check(4, nil)
			a.onMedium(3)
			r.SetFaults(nil)
			a.recovers(5)
		}
	})
}

// testLateLanding: commands of a lane that has timed out still land while it is being quiesced. Their chunk has failed
// all the same, and its targets are zeroed after that and not before.
func testLateLanding(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		shape := w.shape()
		shape.Deadline, shape.ChunkCommands = short, 8
		r := NewRig(t, s, shape)
		ctxs := all(r)
		store(r, ctxs, 1)
		a := w.memory(r, ctxs)
		a.set(0xee)
		var shut atomic.Bool
		var held, landed atomic.Int32
		shut.Store(true)
		r.SetFaults(func(*nvme.SQE) *emu.Fault {
			if !shut.Load() {
				return nil
			}
			held.Add(1)
			return &emu.Fault{Hold: func() bool {
				if shut.Load() {
					return false
				}
				landed.Add(1)
				return true
			}}
		})
		r.OnQuiesce = func() {
			shut.Store(false)
			for landed.Load() < held.Load() {
				r.poller.Step()
			}
			r.poller.Step() // which waits for the one that let the last go
		}
		failed := map[int]bool{}
		for _, f := range r.Run(false, a.ctxs) {
			require.ErrorIs(t, f.Err, gio.ErrTimeout)
			failed[f.Index] = true
		}
		require.NotEmpty(t, failed)
		require.Equal(t, held.Load(), landed.Load())
		a.check(1, failed)
		a.recovers(2)
	})
}

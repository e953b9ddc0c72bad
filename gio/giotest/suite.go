package giotest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// Run is the whole suite.
func Run(t *testing.T, construct Constructor) {
	for name, test := range map[string]func(*testing.T, Constructor){
		"Geometries":    testGeometries,
		"Neighbours":    testNeighbours,
		"Refused":       testRefused,
		"Faults":        testFaults,
		"Quarantine":    testQuarantine,
		"DeadQueue":     testDeadQueue,
		"DeadDaemon":    testDeadDaemon,
		"DeafDaemon":    testDeafDaemon,
		"HeldWrites":    testHeldWrites,
		"HeldTrailers":  testHeldTrailers,
		"Registration":  testRegistration,
		"Concurrent":    testConcurrent,
		"Layers":        testLayers,
		"LayerDamage":   testLayerDamage,
		"LayerMisuse":   testLayerMisuse,
		"LayerTimeouts": testLayerTimeouts,
		"Allocations":   testAllocations,
		"Flush":         testFlush,
		"Closed":        testClosed,
	} {
		t.Run(name, func(t *testing.T) { test(t, construct) })
	}
}

// way is how bytes reach memory.
type way struct {
	name    string
	bounce  bool
	padded  bool
	SGL     bool
	stepped bool
}

var ways = []way{
	{name: "direct, PRP", padded: true},
	{name: "direct, SGL", padded: true, SGL: true},
	{name: "bounce, PRP", bounce: true},
	{name: "bounce, SGL, one thread", bounce: true, SGL: true, stepped: true},
}

func eachWay(t *testing.T, f func(t *testing.T, w way)) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) { f(t, w) })
	}
}

func (w way) shape() Shape {
	s := Shape{SGL: w.SGL, Stepped: w.stepped}
	if w.bounce {
		s.BounceBytes = 4 << 20
	}
	return s
}

// arena is registered memory for a list of objects.
type arena struct {
	buf    []byte
	memory *gio.Memory
	offset []int
	ctxs   []gio.IOCTX
}

// memory makes room for objects (of slots) and the batch that moves them.
func (w way) memory(r *Rig, ctxs []gio.IOCTX) *arena {
	a := &arena{ctxs: slices.Clone(ctxs)}
	at := 0
	for i := range ctxs {
		a.offset = append(a.offset, at)
		n := r.Bytes(ctxs[i].Object)
		if w.padded {
			n = (n + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1)
		}
		at += n
	}
	var err error
	if w.padded {
		a.buf = r.dmaTake(at)
		a.memory, err = r.Ring.RegisterPadded(a.buf)
	} else {
		a.buf = make([]byte, at)
		a.memory, err = r.Ring.Register(a.buf)
	}
	require.NoError(r.t, err)
	for i := range a.ctxs {
		a.ctxs[i].Desc = a.memory.Desc(a.offset[i])
	}
	return a
}

func (a *arena) object(r *Rig, i int) []byte {
	return a.buf[a.offset[i] : a.offset[i]+r.Bytes(a.ctxs[i].Object)]
}

func (a *arena) fill(r *Rig, round uint64) {
	for i := range a.ctxs {
		Content(a.object(r, i), a.ctxs[i].Slot, a.ctxs[i].Object, round)
	}
}

// check compares all objects with the content of a round, and those in failed with zero.
func (a *arena) check(r *Rig, round uint64, failed map[int]bool) {
	r.t.Helper()
	for i := range a.ctxs {
		want := make([]byte, r.Bytes(a.ctxs[i].Object))
		if !failed[i] {
			Content(want, a.ctxs[i].Slot, a.ctxs[i].Object, round)
		}
		if !bytes.Equal(want, a.object(r, i)) {
			r.t.Fatalf("object %d of slot %d (index %d) holds other bytes", a.ctxs[i].Object, a.ctxs[i].Slot, i)
		}
	}
}

// all is every object of every slot, in random order.
func all(r *Rig) []gio.IOCTX {
	var ctxs []gio.IOCTX
	for _, slot := range r.Slots {
		for object := range r.Map.Layout().Objects() {
			ctxs = append(ctxs, gio.IOCTX{Slot: slot, Object: uint16(object)})
		}
	}
	rand.Shuffle(len(ctxs), func(i, j int) { ctxs[i], ctxs[j] = ctxs[j], ctxs[i] })
	return ctxs
}

// store puts the content of a round on the drives behind the executor's back.
func store(r *Rig, ctxs []gio.IOCTX, round uint64) {
	for i := range ctxs {
		payload, _ := r.Stored(ctxs[i].Slot, ctxs[i].Object)
		Content(payload, ctxs[i].Slot, ctxs[i].Object, round)
	}
}

// testGeometries moves everything there and back over random shapes, and looks at the medium in between.
func testGeometries(t *testing.T, construct Constructor) {
	eachWay(t, func(t *testing.T, w way) {
		for range 6 {
			s := w.shape()
			s.Drives = 1 + rand.IntN(5)
			s.Width = 1 + rand.IntN(s.Drives)
			s.Lanes = 1 + rand.IntN(4)
			s.Depth = 2 << rand.IntN(6)
			s.Rows = 1 + rand.IntN(4)
			s.LBABytes = []int{512, 4096}[rand.IntN(2)]
			s.InOrder = rand.IntN(2) == 0
			s.ChunkCommands = rand.IntN(10)
			s.Geometry = Uneven(1+rand.IntN(5), 1+rand.IntN(3))
			s.BounceBytes = min(s.BounceBytes, s.Lanes*65536)
			r := NewRig(t, construct, s)
			a := w.memory(r, all(r))
			for round := uint64(1); round <= 3; round++ {
				a.fill(r, round)
				require.Empty(t, r.Run(true, a.ctxs), "%+v", r.Shape)
				a.onMedium(r, round)
				clear(a.buf)
				require.Empty(t, r.Run(false, a.ctxs), "%+v", r.Shape)
				a.check(r, round, nil)
			}
		}
	})
}

func (a *arena) onMedium(r *Rig, round uint64) {
	r.t.Helper()
	for i := range a.ctxs {
		want := make([]byte, r.Bytes(a.ctxs[i].Object))
		Content(want, a.ctxs[i].Slot, a.ctxs[i].Object, round)
		if got, _ := r.Stored(a.ctxs[i].Slot, a.ctxs[i].Object); !bytes.Equal(want, got) {
			r.t.Fatalf("object %d of slot %d is not where the layout says", a.ctxs[i].Object, a.ctxs[i].Slot)
		}
	}
}

// testNeighbours: bounced objects of odd lengths at odd addresses touch nothing beside them, on neither side.
func testNeighbours(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{BounceBytes: 1 << 20})
	const object = 1 // 656*13+132 bytes
	n := r.Bytes(object)
	buf := make([]byte, n+4096)
	for _, at := range []int{1, 511, 4095} {
		m, err := r.Ring.Register(buf)
		require.NoError(t, err)
		ctxs := []gio.IOCTX{{Desc: m.Desc(at), Slot: r.Slots[0], Object: object}}
		payload, pad := r.Stored(r.Slots[0], object)
		for i := range buf {
			buf[i] = 0xa5
		}
		Content(buf[at:at+n], 0, object, uint64(at))
		require.Empty(t, r.Run(true, ctxs))
		require.Equal(t, buf[at:at+n], payload)
		require.Equal(t, make([]byte, len(pad)), pad, "no foreign bytes on the drive")
		for i := range pad {
			pad[i] = 0x5a
		}
		clear(buf[at : at+n])
		require.Empty(t, r.Run(false, ctxs))
		require.Equal(t, payload, buf[at:at+n])
		for i := range buf {
			if i < at || i >= at+n {
				require.EqualValues(t, 0xa5, buf[i], "byte %d beside the object", i)
			}
		}
		require.NoError(t, r.Ring.Unregister(m))
	}
}

// testRefused: what cannot be a command fails alone, and its target is zeroed.
func testRefused(t *testing.T, construct Constructor) {
	eachWay(t, func(t *testing.T, w way) {
		r := NewRig(t, construct, w.shape())
		good := []gio.IOCTX{{Slot: r.Slots[0], Object: 0}, {Slot: r.Slots[1], Object: 1}, {Slot: r.Slots[2], Object: 2}}
		store(r, good, 7)
		a := w.memory(r, append(slices.Clone(good), make([]gio.IOCTX, 6)...))
		gone, err := r.Ring.Register(r.Ring.DMA()[len(r.Ring.DMA())-65536:])
		require.NoError(t, err)
		require.NoError(t, r.Ring.Unregister(gone))
		a.ctxs[3].Slot = 0 // a hole in the map
		a.ctxs[4].Slot = 1 << 30
		a.ctxs[5] = gio.IOCTX{Desc: a.ctxs[5].Desc, Slot: r.Slots[0], Object: 999}
		a.ctxs[6] = gio.IOCTX{Desc: gone.Desc(0), Slot: r.Slots[0]}
		a.ctxs[7] = gio.IOCTX{Desc: a.memory.Desc(len(a.buf) - 5), Slot: r.Slots[0]}
		a.ctxs[8] = gio.IOCTX{Desc: a.ctxs[8].Desc, Slot: r.Slots[0], Flags: 0x80}
		for i := range a.buf {
			a.buf[i] = 0xee
		}
		for _, write := range []bool{true, false} {
			failed := r.Run(write, a.ctxs)
			want := []error{3: gio.ErrUnmapped, gio.ErrUnmapped, gio.ErrUnmapped,
				gio.ErrMemory, gio.ErrMemory, gio.ErrInvalid}
			require.Len(t, failed, 6)
			for k, f := range failed {
				require.Equal(t, 3+k, f.Index)
				require.ErrorIs(t, f.Err, want[f.Index])
			}
			if write {
				store(r, good, 7)
			}
		}
		a.ctxs = a.ctxs[:5]
		a.check(r, 7, map[int]bool{3: true, 4: true})
	})
}

// fault is one kind of misbehaviour and how it must come out.
type fault struct {
	name   string
	fault  emu.Fault
	want   error
	alone  bool // the others of the chunk succeed
	writes bool // a failed write may still have reached the drive
}

const short = 150 * time.Millisecond

var faults = []fault{
	{"bad status", emu.Fault{Status: uint16(nvme.InternalError)}, gio.ErrStatus, true, false},
	{"short transfer", emu.Fault{Short: 512}, gio.ErrStatus, true, true},
	{"lost completion", emu.Fault{Drop: true}, gio.ErrTimeout, false, true},
	{"late completion", emu.Fault{Delay: 3 * short}, gio.ErrTimeout, false, true},
	{"doubled completion", emu.Fault{Double: true}, gio.ErrProtocol, false, true},
}

// testFaults injects every fault into one command of a batch: its error is typed and its own, read targets are zeroed,
// what succeeded has its bytes, and the ring serves the same batch afterwards.
func testFaults(t *testing.T, construct Constructor) {
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, w way) {
				for _, write := range []bool{false, true} {
					f.run(t, construct, w, write)
				}
			})
		})
	}
}

func (f *fault) run(t *testing.T, construct Constructor, w way, write bool) {
	s := w.shape()
	s.Deadline, s.ChunkCommands = short, 4
	if f.want != gio.ErrTimeout {
		s.Deadline = 20 * time.Second
	}
	r := NewRig(t, construct, s)
	ctxs := all(r)
	store(r, ctxs, 1)
	a := w.memory(r, ctxs)
	a.fill(r, 1)
	var armed atomic.Bool
	armed.Store(true)
	r.SetFaults(func(*nvme.SQE) *emu.Fault {
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
	} else {
		require.NotEmpty(t, failed)
		require.NotZero(t, r.Quiesced.Load(), "quiesced before the memory was given back")
	}
	a.check(r, 1, zeroed)
	require.Empty(t, r.Run(write, a.ctxs), "the ring goes on")
	a.check(r, 1, nil)
	a.onMedium(r, 1)
}

// testQuarantine: after a timed-out batch has returned, nothing of it reaches memory or drives any more.
func testQuarantine(t *testing.T, construct Constructor) {
	eachWay(t, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("nothing happens while nobody waits")
		}
		for _, write := range []bool{false, true} {
			s := w.shape()
			s.Deadline = short
			r := NewRig(t, construct, s)
			ctxs := all(r)
			store(r, ctxs, 1)
			a := w.memory(r, ctxs)
			a.fill(r, 2)
			r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Delay: 4 * short} })
			require.Len(t, r.Run(write, a.ctxs), len(a.ctxs))
			store(r, ctxs, 3)
			a.fill(r, 4)
			time.Sleep(5 * short)
			a.check(r, 4, nil)
			a.onMedium(r, 3)
			r.SetFaults(nil)
			require.Empty(t, r.Run(false, a.ctxs))
			a.check(r, 3, nil)
		}
	})
}

// testDeadQueue: a controller kills a queue for a bad doorbell; its lane times out and comes back.
func testDeadQueue(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{Deadline: short, BounceBytes: 1 << 20})
	w := way{bounce: true}
	ctxs := all(r)
	store(r, ctxs, 1)
	a := w.memory(r, ctxs)
	atomic.StoreUint32(r.pages[0].SQTail, 1<<20)
	atomic.AddUint32(&r.armed, 1)
	nvme.Wake(&r.wake)
	require.Eventually(t, r.queues[0].Dead, 10*time.Second, time.Millisecond)
	atomic.AddUint32(&r.armed, ^uint32(0))
	failed := r.Run(false, a.ctxs)
	require.NotEmpty(t, failed)
	zeroed := map[int]bool{}
	for _, f := range failed {
		require.ErrorIs(t, f.Err, gio.ErrTimeout)
		zeroed[f.Index] = true
	}
	a.check(r, 1, zeroed)
	require.Empty(t, r.Run(false, a.ctxs))
	a.check(r, 1, nil)
}

// testDeadDaemon: waits end with ErrDead when the owner of the controllers is gone, whoever waits.
func testDeadDaemon(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{BounceBytes: 1 << 20})
	w := way{bounce: true}
	a := w.memory(r, all(r))
	for i := range a.buf {
		a.buf[i] = 0xee
	}
	r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
	var wg sync.WaitGroup
	for part := range 3 {
		ctxs := a.ctxs[len(a.ctxs)*part/3 : len(a.ctxs)*(part+1)/3]
		ticket, err := r.Ring.Issue(false, r.Map, ctxs)
		require.NoError(t, err)
		wg.Go(func() {
			failed, err := r.Ring.Wait(ticket)
			if !errors.Is(err, gio.ErrDead) || len(failed) != len(ctxs) {
				t.Errorf("%d of %d failed: %v", len(failed), len(ctxs), err)
			}
		})
	}
	r.Ring.Abandon(errors.New("connection lost"))
	wg.Wait()
	require.Equal(t, make([]byte, len(a.buf)), a.buf, "targets are zeroed")
	_, err := r.Ring.Issue(false, r.Map, a.ctxs)
	require.ErrorIs(t, err, gio.ErrDead)
}

// testDeafDaemon: when nobody confirms that a lane is quiet, the ring is given up whole.
func testDeafDaemon(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{BounceBytes: 1 << 20, Deadline: short})
	a := way{bounce: true}.memory(r, all(r))
	r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
	r.Deaf.Store(true)
	ticket, err := r.Ring.Issue(false, r.Map, a.ctxs)
	require.NoError(t, err)
	failed, err := r.Ring.Wait(ticket)
	require.ErrorIs(t, err, gio.ErrDead)
	require.Len(t, failed, len(a.ctxs))
	_, err = r.Ring.Issue(false, r.Map, a.ctxs)
	require.ErrorIs(t, err, gio.ErrDead)
}

// testRegistration: memory is given back when no batch uses it, stale descriptors lead nowhere, places are used again.
func testRegistration(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{Deadline: short})
	_, err := r.Ring.Register(make([]byte, 4096))
	require.ErrorIs(t, err, gio.ErrMemory, "no bounce cells")
	_, err = r.Ring.Register(nil)
	require.ErrorIs(t, err, gio.ErrInvalid)
	_, err = r.Ring.RegisterPadded(make([]byte, 4096))
	require.ErrorIs(t, err, gio.ErrInvalid)

	buf := r.Ring.DMA()[:8192]
	for range 2*gio.RegionsMax + 5 {
		m, err := r.Ring.Register(buf)
		require.NoError(t, err)
		require.NoError(t, r.Ring.Unregister(m))
		require.Error(t, r.Ring.Unregister(m))
	}
	r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
	m, err := r.Ring.Register(buf)
	require.NoError(t, err)
	ticket, err := r.Ring.Issue(false, r.Map, []gio.IOCTX{{Desc: m.Desc(0), Slot: r.Slots[0]}})
	require.NoError(t, err)
	require.ErrorIs(t, r.Ring.Unregister(m), gio.ErrBusy)
	failed, err := r.Ring.Wait(ticket)
	require.NoError(t, err)
	require.Len(t, failed, 1)
	require.NoError(t, r.Ring.Unregister(m))

	r.SetFaults(nil)
	odd, err := r.Ring.Register(r.Ring.DMA()[:16384])
	require.NoError(t, err)
	results := r.Run(false, []gio.IOCTX{
		{Desc: odd.Desc(0), Slot: r.Slots[0], Object: 1}, // would overwrite what follows
		{Desc: odd.Desc(2), Slot: r.Slots[0], Object: 0}, // no PRP can say that
		{Desc: odd.Desc(4), Slot: r.Slots[0], Object: 0},
	})
	require.Len(t, results, 2)
	require.ErrorIs(t, results[0].Err, gio.ErrMemory)
	require.ErrorIs(t, results[1].Err, gio.ErrMemory)
}

// testConcurrent: many goroutines share few lanes, some batches fail, and every batch gets its own bytes.
func testConcurrent(t *testing.T, construct Constructor) {
	eachWay(t, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		r := NewRig(t, construct, w.shape())
		ctxs := all(r)
		store(r, ctxs, 1)
		a := w.memory(r, ctxs)
		var calls atomic.Uint32
		r.SetFaults(func(*nvme.SQE) *emu.Fault {
			if calls.Add(1)%37 == 0 {
				return &emu.Fault{Status: uint16(nvme.InternalError)}
			}
			return nil
		})
		const parts = 6
		results := make([][]gio.Result, parts)
		var wg sync.WaitGroup
		for p := range parts {
			first, end := len(a.ctxs)*p/parts, len(a.ctxs)*(p+1)/parts
			wg.Go(func() {
				for range 20 {
					clear(a.buf[a.offset[first] : a.offset[end-1]+r.Bytes(a.ctxs[end-1].Object)])
					ticket, err := r.Ring.Issue(false, r.Map, a.ctxs[first:end])
					if err == nil {
						results[p], err = r.Ring.Wait(ticket)
					}
					if err != nil {
						t.Errorf("%v", err)
						return
					}
				}
			})
		}
		wg.Wait()
		failed := map[int]bool{}
		for p := range results {
			for _, f := range results[p] {
				require.ErrorIs(t, f.Err, nvme.InternalError)
				failed[len(a.ctxs)*p/parts+f.Index] = true
			}
		}
		a.check(r, 1, failed)
	})
}

// testAllocations: a batch costs a fixed number of allocations, however many objects it has.
func testAllocations(t *testing.T, construct Constructor) {
	eachWay(t, func(t *testing.T, w way) {
		s := w.shape()
		s.Stepped, s.Rows, s.Depth, s.Lanes = true, 4, 64, 1
		r := NewRig(t, construct, s)
		a := w.memory(r, all(r))
		cost := func(n int) float64 {
			return testing.AllocsPerRun(20, func() {
				if failed := r.Run(false, a.ctxs[:n]); len(failed) != 0 {
					t.Errorf("%v", failed[0].Err)
				}
			})
		}
		const few = 8
		require.Greater(t, len(a.ctxs), 10*few)
		// A chunk of the virtual controller's own may cost it something; an object must not.
		require.LessOrEqual(t, cost(len(a.ctxs)), cost(few)+float64(len(a.ctxs)-few)/20)
		require.LessOrEqual(t, cost(few), 8.0)
	})
}

// testFlush: a Flush is a command without bytes, for writes only.
func testFlush(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{})
	ctxs := []gio.IOCTX{{Slot: r.Slots[0], Flags: gio.FlagFlush}, {Slot: r.Slots[0], Object: 1, Flags: gio.FlagFlush}}
	require.Empty(t, r.Run(true, ctxs))
	flushes := uint64(0)
	for _, c := range r.Controllers {
		flushes += c.Stats().Flushes
	}
	require.EqualValues(t, 2, flushes)
	require.Len(t, r.Run(false, ctxs), 2)
}

// testClosed: Close quiesces what is in flight, ends waits, and refuses what comes after.
func testClosed(t *testing.T, construct Constructor) {
	r := NewRig(t, construct, Shape{BounceBytes: 1 << 20})
	a := way{bounce: true}.memory(r, all(r))
	r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
	ticket, err := r.Ring.Issue(false, r.Map, a.ctxs)
	require.NoError(t, err)
	require.NoError(t, r.Ring.Close())
	require.NotZero(t, r.Quiesced.Load())
	failed, err := r.Ring.Wait(ticket)
	require.NoError(t, err)
	require.Len(t, failed, len(a.ctxs))
	for _, f := range failed {
		require.ErrorIs(t, f.Err, gio.ErrClosed)
	}
	_, err = r.Ring.Issue(false, r.Map, a.ctxs)
	require.ErrorIs(t, err, gio.ErrClosed)
	_, err = r.Ring.Register(a.buf)
	require.ErrorIs(t, err, gio.ErrClosed)
	require.NoError(t, r.Ring.Close())
}

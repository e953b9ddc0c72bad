package giotest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// Run is the whole suite. Every test leaves behind what it found.
func Run(t *testing.T, s Subject) {
	t.Logf("seed %#x", s.Seed)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *Subject)
	}{
		{"Geometries", testGeometries},
		{"Extremes", testExtremes},
		{"Neighbours", testNeighbours},
		{"Mixed", testMixed},
		{"Order", testOrder},
		{"Refused", testRefused},
		{"Faults", testFaults},
		{"Storm", testStorm},
		{"Quarantine", testQuarantine},
		{"LateLanding", testLateLanding},
		{"DeadQueue", testDeadQueue},
		{"Stopped", testStopped},
		{"Disabled", testDisabled},
		{"DeadDaemon", testDeadDaemon},
		{"DeafDaemon", testDeafDaemon},
		{"HeldWrites", testHeldWrites},
		{"HeldTrailers", testHeldTrailers},
		{"Registration", testRegistration},
		{"DeviceRegistration", testDeviceRegistration},
		{"Concurrent", testConcurrent},
		{"Layers", testLayers},
		{"LayerDamage", testLayerDamage},
		{"LateTrailers", testLateTrailers},
		{"LayerMisuse", testLayerMisuse},
		{"LayerTimeouts", testLayerTimeouts},
		{"DeferredFaults", testDeferredFaults},
		{"DeferredHeld", testDeferredHeld},
		{"DeferredEnds", testDeferredEnds},
		{"DeferredClose", testDeferredClose},
		{"DeferredAgain", testDeferredAgain},
		{"DeferredQuarantine", testDeferredQuarantine},
		{"StoreFull", testStoreFull},
		{"PacedWrites", testPacedWrites},
		{"HighWater", testHighWater},
		{"ReadAhead", testReadAhead},
		{"Allocations", testAllocations},
		{"Flush", testFlush},
		{"Closed", testClosed},
	} {
		if s.Only != nil && !slices.Contains(s.Only, test.name) {
			continue
		}
		before := s.held()
		t.Run(test.name, func(t *testing.T) { test.run(t, &s) })
		s.checkGivenBack(t, before)
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
	r.random.Shuffle(len(ctxs), func(i, j int) { ctxs[i], ctxs[j] = ctxs[j], ctxs[i] })
	return ctxs
}

// store puts the content of a round on the drives behind the executor's back.
func store(r *Rig, ctxs []gio.IOCTX, round uint64) {
	for i := range ctxs {
		payload, _ := r.Stored(ctxs[i].Slot, ctxs[i].Object)
		Content(payload, ctxs[i].Slot, ctxs[i].Object, round)
	}
}

// thereAndBack writes everything, looks at the medium, and reads it again, with exactly the commands that this takes.
func (a *arena) thereAndBack(round uint64) {
	a.r.t.Helper()
	a.fill(round)
	a.r.runExactly(true, a.ctxs)
	a.onMedium(round)
	a.set(0)
	a.r.runExactly(false, a.ctxs)
	a.check(round, nil)
}

// randomShape leaves little as it is.
func (w way) randomShape(random *rand.Rand) Shape {
	s := w.shape()
	s.Drives = 1 + random.IntN(5)
	s.Width = 1 + random.IntN(s.Drives)
	s.Lanes = 1 + random.IntN(4)
	s.Depth = 2 << random.IntN(6)
	s.Rows = 1 + random.IntN(4)
	s.LBABytes = []int{512, 4096}[random.IntN(2)]
	s.InOrder = random.IntN(2) == 0
	s.ChunkCommands = random.IntN(10)
	s.Geometry = Uneven(1+random.IntN(5), 1+random.IntN(3))
	s.BounceBytes = min(s.BounceBytes, s.Lanes*65536)
	s.Random = random
	return s
}

// testGeometries moves everything there and back over random shapes.
func testGeometries(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		for n := range s.rounds(5) {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				r := NewRig(t, s, w.randomShape(s.source(t, 0)))
				a := w.memory(r, all(r))
				for round := uint64(1); round <= 3; round++ {
					a.thereAndBack(round)
				}
			})
		}
	})
}

// large is a geometry of objects as long as they may be, beside one of the shortest.
func large() stripe.Geometry {
	var g stripe.Geometry
	for _, runs := range [][]stripe.Run{
		{{Kind: stripe.RunKV, Bytes: 1 << 20}, {Kind: stripe.RunKV, Bytes: 1 << 20}},
		{{Kind: stripe.RunScale, Bytes: 8}},
		{{Kind: stripe.RunLatent, Bytes: 2<<20 - 4096 - 4}},
	} {
		g.Objects = append(g.Objects, stripe.Object{Runs: runs})
	}
	return g.WithTrailers()
}

// testExtremes is the shapes at the ends of what is possible. A subject that is to take little time is given each of
// them by every third way only, by others with another seed.
func testExtremes(t *testing.T, s *Subject) {
	shapes := map[string]Shape{
		"one command at a time": {Drives: 1, Lanes: 1, Depth: 2, BounceBytes: 65536},
		"shallow":               {Drives: 4, Width: 4, Lanes: 3, Depth: 2, BounceBytes: 3 * 65536},
		"64 lanes, 16 drives": {Drives: 16, Width: 4, Lanes: 64, Depth: 4, Rows: 8, DMABytes: 32 << 20,
			BounceBytes: 64 * 16 * 12288}, // the polling executor divides a lane's cells among its drives
		"deep":                {Drives: 2, Lanes: 2, Depth: 1024, Rows: 20, BounceBytes: 8 << 20},
		"longer than an IOCB": {Drives: 3, Lanes: 4, Depth: 64, Rows: 90, BounceBytes: 4 << 20, DMABytes: 48 << 20},
		"2 MiB":               {Width: 1, Lanes: 2, Rows: 1, Geometry: large(), DMABytes: 48 << 20, BounceBytes: 12 << 20},
		"2 MiB, one at a time": {Drives: 1, Lanes: 1, Rows: 1, Depth: 2, Geometry: large(), DMABytes: 32 << 20,
			BounceBytes: 2 << 20},
	}
	names := slices.Sorted(maps.Keys(shapes))
	waysAtOnce(t, s, func(t *testing.T, w way) {
		for i, name := range names {
			shape := shapes[name]
			if s.Rounds > 0 && (i+slices.Index(ways, w)+int(s.Seed%3))%3 != 0 {
				continue
			}
			t.Run(name, func(t *testing.T) {
				shape.SGL, shape.Stepped, shape.Peer = w.SGL, w.stepped, w.peer
				if w.kind == inDMA {
					shape.BounceBytes = 0
				}
				r := NewRig(t, s, shape)
				w.memory(r, all(r)).thereAndBack(1)
			})
		}
	})
}

// testNeighbours: bounced objects of odd lengths at odd addresses touch nothing beside them, on neither side.
func testNeighbours(t *testing.T, s *Subject) {
	r := NewRig(t, s, Shape{BounceBytes: 1 << 20})
	const object = 1 // 656*13+132 bytes
	n := r.Bytes(object)
	buf := r.hostMemory(n + 4096)
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

// testMixed: one batch names memory of every kind.
func testMixed(t *testing.T, s *Subject) {
	for _, sgl := range []bool{false, true} {
		r := NewRig(t, s, Shape{SGL: sgl, Rows: 4, BounceBytes: 4 << 20})
		ctxs := all(r)
		var arenas []*arena
		for k := inDMA; k <= paged; k++ {
			if w := (way{kind: k}); s.has(w) {
				arenas = append(arenas, w.memory(r, ctxs))
			}
		}
		// Each object lies in one of the arenas; the others' place for it is never touched.
		mixed := slices.Clone(ctxs)
		owner := make([]int, len(ctxs))
		for i := range mixed {
			owner[i] = r.random.IntN(len(arenas))
			mixed[i].Desc = arenas[owner[i]].ctxs[i].Desc
		}
		for round := uint64(1); round <= 2; round++ {
			for k, a := range arenas {
				a.fill(100 + uint64(k))
				for i := range ctxs {
					if owner[i] == k {
						Content(a.object(i), ctxs[i].Slot, ctxs[i].Object, round)
					}
				}
				a.push()
			}
			r.runExactly(true, mixed)
			arenas[0].onMedium(round)
			for _, a := range arenas {
				a.set(0)
			}
			r.runExactly(false, mixed)
			for k, a := range arenas {
				a.pull()
				for i := range ctxs {
					a.checkOne(i, round, owner[i] != k)
				}
			}
		}
	}
}

// testRefused: what cannot be a command fails alone, and its target is zeroed.
func testRefused(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		r := NewRig(t, s, w.shape())
		good := []gio.IOCTX{{Slot: r.Slots[0], Object: 0}, {Slot: r.Slots[1], Object: 1}, {Slot: r.Slots[2], Object: 2}}
		store(r, good, 7)
		a := w.memory(r, append(slices.Clone(good), make([]gio.IOCTX, 6)...))
		gone, err := r.Ring.Register(r.Ring.DMA()[len(r.Ring.DMA())-65536:])
		require.NoError(t, err)
		require.NoError(t, r.Ring.Unregister(gone))
		batch := slices.Clone(a.ctxs)
		batch[3].Slot = 0 // a hole in the map
		batch[4].Slot = 1 << 30
		batch[5] = gio.IOCTX{Desc: batch[5].Desc, Slot: r.Slots[0], Object: 999}
		batch[6] = gio.IOCTX{Desc: gone.Desc(0), Slot: r.Slots[0]}
		batch[7] = gio.IOCTX{Desc: a.beyond(), Slot: r.Slots[0]}
		batch[8] = gio.IOCTX{Desc: batch[8].Desc, Slot: r.Slots[0], Flags: 0x80}
		want := []error{3: gio.ErrUnmapped, gio.ErrUnmapped, gio.ErrUnmapped,
			gio.ErrMemory, gio.ErrMemory, gio.ErrInvalid}
		a.set(0xee)
		for _, write := range []bool{true, false} {
			failed := r.Run(write, batch)
			require.Len(t, failed, 6)
			for k, f := range failed {
				require.Equal(t, 3+k, f.Index)
				require.ErrorIs(t, f.Err, want[f.Index])
			}
			if write {
				store(r, good, 7)
			}
		}
		a.pull()
		for i := range 5 {
			a.checkOne(i, 7, i >= 3)
		}
		require.Empty(t, r.Run(false, nil), "a batch of nothing")
		_, err = r.Ring.Issue(false, nil, a.ctxs)
		require.ErrorIs(t, err, gio.ErrInvalid)
		_, err = r.Ring.Wait(nil)
		require.ErrorIs(t, err, gio.ErrInvalid)
		require.Zero(t, r.Quiesced.Load())
	})
}

// testConcurrent: many goroutines share few lanes, some batches fail, and every batch gets its own bytes.
func testConcurrent(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		r := NewRig(t, s, w.shape())
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
				for range 10 {
					err := a.clearPart(first, end)
					if err == nil {
						results[p], err = r.run(false, a.ctxs[first:end])
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
		a.check(1, failed)
	})
}

// testAllocations: a batch costs a fixed number of allocations, however many objects it has.
func testAllocations(t *testing.T, s *Subject) {
	if !s.Steps {
		t.Skip("its I/O thread and its driver allocate beside the batch; it counts for itself")
	}
	eachWay(t, s, func(t *testing.T, w way) {
		shape := w.shape()
		shape.Stepped, shape.Rows, shape.Depth, shape.Lanes = true, 4, 64, 1
		r := NewRig(t, s, shape)
		r.unhook()
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
func testFlush(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		r := NewRig(t, s, w.shape())
		a := w.memory(r, all(r)[:3])
		a.fill(1)
		ctxs := []gio.IOCTX{
			{Slot: r.Slots[0], Flags: gio.FlagFlush}, {Slot: r.Slots[0], Object: 1, Flags: gio.FlagFlush},
		}
		ctxs = append(ctxs, a.ctxs...)
		r.runExactly(true, ctxs)
		a.onMedium(1)
		require.Len(t, r.Run(false, ctxs), 2)
		a.check(1, nil)
	})
}

package giotest

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// eachStore runs a test in every way of a subject that has a store buffer.
func eachStore(t *testing.T, s *Subject, f func(t *testing.T, w way)) {
	if !s.Store {
		t.Skip("it has no store buffer")
	}
	eachWay(t, s, f)
}

// evacuate begins to store all layers and waits for their sources only.
func (r *layerRig) evacuate(round uint64) gio.Layers {
	r.t.Helper()
	r.a.fill(round)
	l, err := r.Ring.CreateLayers(r.Map, r.rank, r.slots)
	require.NoError(r.t, err)
	r.move(l.StoreLayer)
	return l
}

// fill says how much of the store buffer is taken; nothing may be once its writes are over.
func (r *Rig) fill() uint64 { return r.Ring.StoreStats().Fill }

// checkEmptied: what was stored is through the buffer.
func (r *Rig) checkEmptied() {
	r.t.Helper()
	s := r.Ring.StoreStats()
	require.Zero(r.t, s.Fill)
	require.Zero(r.t, s.Objects)
	require.Zero(r.t, s.Bytes)
	require.Zero(r.t, s.OldestNanos)
	require.Positive(r.t, s.Peak)
	require.LessOrEqual(r.t, s.Peak, s.Size)
	require.Positive(r.t, s.StoredBytes)
}

// await waits for a word that another goroutine writes.
func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	require.Eventually(t, is, 20*time.Second, 100*time.Microsecond, what)
}

// testDeferredFaults: a deferred write that fails is told by Finish, of its slot; the sources were free long before,
// and the buffer and its lanes serve the next store.
func testDeferredFaults(t *testing.T, s *Subject) {
	if !s.Store {
		t.Skip("it has no store buffer")
	}
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			waysAtOnce(t, s, func(t *testing.T, w way) { f.runDeferred(t, s, w) })
		})
	}
}

func (f *fault) runDeferred(t *testing.T, s *Subject, w way) {
	shape := w.shape()
	shape.ChunkCommands, shape.Rows = 4, 3
	if f.want == gio.ErrTimeout {
		shape.Deadline = 4 * short
	}
	r := newLayerRig(t, s, w, shape, 0)
	hit := f.fault
	if hit.Delay > 0 {
		hit.Delay = 3 * shape.Deadline
	}
	var n atomic.Int32
	r.SetFaults(func(e *nvme.SQE) *emu.Fault {
		if n.Add(1) == 6 {
			return &hit
		}
		return nil
	})
	l := r.evacuate(1)
	r.a.fill(9) // the sources are free
	err := l.Finish()
	failed := l.Failed()
	l.Close()
	r.SetFaults(nil)
	bad := 0
	for i, e := range failed {
		if e != nil {
			require.ErrorIs(t, e, f.want)
			bad++
			continue
		}
		for k := range r.a.ctxs {
			if r.a.ctxs[k].Slot == r.slots[i].Slot {
				r.checkStored(r.a.ctxs[k].Slot, r.a.ctxs[k].Object, 1)
			}
		}
	}
	if !f.fault.Double { // of which the lane's next chunk may be the first to know
		require.ErrorIs(t, err, f.want)
		require.Positive(t, bad)
		require.Less(t, bad, len(r.slots))
	}
	if f.alone {
		require.Equal(t, 1, bad)
		require.Zero(t, r.Quiesced.Load())
	}
	r.checkEmptied()
	for range 4 * r.Shape.Lanes { // until every lane has met what a fault left behind
		l := r.evacuate(2)
		err := l.Finish()
		l.Close()
		if err == nil {
			break
		}
		require.True(t, typed(err), "%v", err)
	}
	r.a.onMedium(2)
	r.checkEmptied()
	require.Equal(t, make([]error, len(r.slots)), r.retrieve())
	r.a.check(2, nil)
	require.Equal(t, r.Shape.Lanes, r.Ring.Alive())
}

// testDeferredHeld: stores leave their sources at once although drives hold all writes back, and restores have all
// lanes meanwhile.
func testDeferredHeld(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		const lanes = 3
		shape := w.shape()
		shape.Lanes, shape.ChunkCommands, shape.Rows = lanes, 1, 4
		r := newLayerRig(t, s, w, shape, 0)
		r.store(1)
		var writes valve
		var reading atomic.Int32
		writes.shut.Store(true)
		r.SetFaults(func(e *nvme.SQE) *emu.Fault {
			if e.Opcode != nvme.IORead {
				return writes.hook(e)
			}
			// The first reads are held until every lane carries one.
			reading.Add(1)
			return &emu.Fault{Hold: func() bool { return reading.Load() >= lanes }}
		})
		l := r.evacuate(2)
		await(t, "writes on their way", func() bool { return writes.held.Load() > 0 })
		finished := make(chan error, 1)
		go func() { finished <- l.Finish() }()
		// Some other files: those that are stored may not be read.
		half := len(r.a.ctxs) / 2
		store(r.Rig, r.a.ctxs[:half], 3)
		for range 5 {
			r.a.set(0xee)
			require.Empty(t, r.Run(false, r.a.ctxs[:half]))
			r.a.pull()
			for i := range half {
				r.a.checkOne(i, 3, false)
			}
		}
		require.Empty(t, finished)
		require.Positive(t, r.fill())
		writes.shut.Store(false)
		require.NoError(t, <-finished)
		l.Close()
		r.a.onMedium(2)
		r.checkEmptied()
	})
}

// testDeferredClose: layers that are closed without Finish leave nothing in the buffer, and nothing on its way.
func testDeferredClose(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		r := newLayerRig(t, s, w, w.shape(), 0)
		l := r.evacuate(1)
		l.Close()
		r.checkEmptied()
		require.Equal(t, make([]error, len(r.slots)), l.Failed())
		r.a.onMedium(1)
	})
}

// testDeferredAgain: slots that are stored into anew end up with what came last, whatever was deferred for them before.
func testDeferredAgain(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		r := newLayerRig(t, s, w, w.shape(), 0)
		var v valve
		v.shut.Store(true)
		r.SetFaults(v.hook)
		old := r.evacuate(1)
		await(t, "writes on their way", func() bool { return v.held.Load() > 0 })
		created := make(chan gio.Layers, 1)
		go func() {
			l, err := r.Ring.CreateLayers(r.Map, r.rank, r.slots[1:])
			if err != nil {
				t.Errorf("%v", err)
			}
			created <- l
		}()
		other, err := r.Ring.CreateLayers(r.Map, r.rank, nil)
		require.NoError(t, err)
		other.Close()
		require.Empty(t, created, "slots have writes deferred")
		v.shut.Store(false)
		l := <-created
		require.NotNil(t, l)
		r.checkEmptied()
		r.a.onMedium(1)
		l.Close()
		require.NoError(t, old.Finish())
		old.Close()
		r.store(2)
		r.a.onMedium(2)
	})
}

// testStoreFull: without room a store waits or is refused, as the policy says, and goes on when there is room again.
func testStoreFull(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		for _, policy := range []gio.StorePolicy{gio.StoreBlock, gio.StoreRefuse} {
			t.Run(policy.String(), func(t *testing.T) { runFull(t, s, w, policy) })
		}
	})
}

func runFull(t *testing.T, s *Subject, w way, policy gio.StorePolicy) {
	shape := w.shape()
	shape.StoreBytes, shape.StorePolicy, shape.Rows, shape.Geometry = gio.StoreLeast, policy, 12, Uneven(9, 1)
	r := newLayerRig(t, s, w, shape, 0)
	var v valve
	v.shut.Store(true)
	r.SetFaults(v.hook)
	r.a.fill(1)
	l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
	require.NoError(t, err)
	defer l.Close()
	var layers atomic.Int32
	store := func() error {
		for int(layers.Load()) < len(r.first) {
			layer := int(layers.Load())
			ticket, err := l.StoreLayer(uint16(layer), r.desc(layer))
			if err == nil {
				err = ticket.Wait()
			}
			if err != nil {
				return err
			}
			layers.Add(1)
		}
		return nil
	}
	stored := make(chan error, 1)
	go func() { stored <- store() }()
	if policy == gio.StoreRefuse {
		err := <-stored
		require.ErrorIs(t, err, gio.ErrStoreBuffer)
		require.EqualValues(t, 1, r.Ring.StoreStats().Refused)
		require.ErrorIs(t, l.Finish(), gio.ErrIncomplete)
		v.shut.Store(false)
		await(t, "room", func() bool {
			err := store()
			return err == nil || !errors.Is(err, gio.ErrStoreBuffer)
		})
	} else {
		await(t, "a store that waits for room", func() bool { return r.Ring.StoreStats().BlockedNanos > 0 })
		require.Empty(t, stored)
		v.shut.Store(false)
		require.NoError(t, <-stored)
	}
	require.NoError(t, l.Finish())
	r.a.onMedium(1)
	r.checkEmptied()
	require.Equal(t, make([]error, len(r.slots)), r.retrieve())
	r.a.check(1, nil)
}

// testDeferredEnds: Close and Abandon end deferred writes and what waits for them or for room, and after a Close
// nothing of them lands.
func testDeferredEnds(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		for _, want := range []error{gio.ErrClosed, gio.ErrDead} {
			shape := w.shape()
			shape.StoreBytes, shape.Rows, shape.Geometry = gio.StoreLeast, 12, Uneven(9, 1)
			r := newLayerRig(t, s, w, shape, 0)
			var v valve
			v.shut.Store(true)
			r.SetFaults(v.hook)
			r.a.fill(1)
			store(r.Rig, r.a.ctxs, 7)
			full, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
			require.NoError(t, err)
			few, err := r.Ring.CreateLayers(r.Map, 0, r.slots[:2])
			require.NoError(t, err)
			for layer := range r.first {
				desc := r.desc(layer)
				ticket, err := few.StoreLayer(uint16(layer), desc[:len(desc)/len(r.slots)*2])
				require.NoError(t, err)
				require.NoError(t, ticket.Wait())
			}
			ended := make(chan error, 2)
			go func() { ended <- few.Finish() }()
			go func() {
				for layer := range r.first {
					ticket, err := full.StoreLayer(uint16(layer), r.desc(layer))
					if err == nil {
						err = ticket.Wait()
					}
					if err != nil {
						ended <- err
						return
					}
				}
				ended <- full.Finish()
			}()
			await(t, "a store that waits for room", func() bool { return r.Ring.StoreStats().BlockedNanos > 0 })
			require.Empty(t, ended)
			if want == gio.ErrClosed {
				require.NoError(t, r.Ring.Close())
			} else {
				r.Ring.Abandon(errors.New("connection lost"))
			}
			for range 2 {
				if err := <-ended; !errors.Is(err, gio.ErrIncomplete) { // what waited for room told its slots
					require.ErrorIs(t, err, want)
				}
			}
			for i, err := range few.Failed() {
				require.ErrorIs(t, err, want, "slot %d", i)
			}
			_, err = full.StoreLayer(0, r.desc(0))
			require.ErrorIs(t, err, want)
			few.Close()
			full.Close()
			v.shut.Store(false)
			if want == gio.ErrClosed {
				for r.poller.Step() > 0 {
				}
				r.a.onMedium(7)
			}
		}
	})
}

// testDeferredQuarantine: the buffer's memory is used again only when nothing of a write that timed out can reach the
// drives any more.
func testDeferredQuarantine(t *testing.T, s *Subject) {
	if !s.Store {
		t.Skip("it has no store buffer")
	}
	waysAtOnce(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("nothing happens while nobody waits")
		}
		shape := w.shape()
		shape.Deadline = short
		r := newLayerRig(t, s, w, shape, 0)
		r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Delay: 4 * short} })
		l := r.evacuate(1)
		require.ErrorIs(t, l.Finish(), gio.ErrTimeout)
		for _, err := range l.Failed() {
			require.ErrorIs(t, err, gio.ErrTimeout)
		}
		l.Close()
		r.checkEmptied()
		r.SetFaults(nil)
		store(r.Rig, r.a.ctxs, 3)
		time.Sleep(5 * short)
		r.a.onMedium(3)
		r.a.recovers(5)
		r.store(6)
		r.a.onMedium(6)
	})
}

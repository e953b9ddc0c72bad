package gio_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/gio"
)

// TestGPUSeesCompute: layers are done when the events of LayerDone have come, and what was told behind them waits with
// them. Stores say nothing of compute, whatever they come behind: theirs may be over, and another pass under way.
func TestGPUSeesCompute(t *testing.T) {
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		var scheduler gio.TestScheduler
		s := w.sized(&sizes{}, testSeed(t), polling)
		inner := s.New
		s.New = func(c gio.RingConfig, peer bool) (gio.Executor, error) {
			c, scheduler = gio.WithScheduler(c)
			return inner(c, peer)
		}
		r := orderRigOf(t, w, &s)
		layers := func() uint64 { return scheduler.Stats().Layers }
		comes := func(n uint64) {
			t.Helper()
			require.Eventually(t, func() bool { return layers() == n }, 10*time.Second, time.Millisecond)
		}
		require.NoError(t, scheduler.Prefill(64, 0, len(r.layers)))
		r.holdEngine(nothing)
		scheduler.LayerDone(0, r.event)
		scheduler.EndPass()
		require.NoError(t, scheduler.Prefill(64, 64, len(r.layers)))
		time.Sleep(5 * time.Millisecond) // for a scheduler that does not wait
		require.Zero(t, layers())
		require.EqualValues(t, 1, scheduler.Stats().Passes)
		r.release()
		comes(1)
		require.Eventually(t, func() bool { return scheduler.Stats().Passes == 2 }, 10*time.Second, time.Millisecond)

		l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
		require.NoError(t, err)
		defer l.Close()
		for layer := range r.layers {
			r.holdEngine(nothing)
			ticket, err := l.(gio.GPULayers).StoreLayerAfter(uint16(layer), r.desc[layer], r.event)
			require.NoError(t, err)
			r.release()
			require.NoError(t, ticket.Wait())
			require.EqualValues(t, 1, layers())
		}
		for layer := range r.layers {
			r.holdEngine(nothing)
			scheduler.LayerDone(layer, r.event)
			time.Sleep(time.Millisecond)
			require.EqualValues(t, 1+layer, layers())
			r.release()
			comes(uint64(2 + layer))
		}

		// After the end of the executor nobody looks for events.
		require.NoError(t, r.Ring.Close())
		require.NoError(t, scheduler.Prefill(64, 0, len(r.layers)))
		before := layers()
		scheduler.LayerDone(0, r.event)
		scheduler.EndPass()
		require.Equal(t, before, layers())
		require.NoError(t, scheduler.Check())
	})
}

// TestGPUHostAhead: an engine that tells of whole passes before the device has begun them, restoring in one and storing
// in the next: everything arrives, deferred writes go, and the scheduler ends where the device does.
func TestGPUHostAhead(t *testing.T) {
	const passes = 8
	eachWorld(t, func(t *testing.T, w *world, polling bool) {
		if polling {
			t.Skip("it has no store buffer")
		}
		var scheduler gio.TestScheduler
		s := w.sized(&sizes{}, testSeed(t), polling)
		inner := s.New
		s.Store, s.New = true, func(c gio.RingConfig, peer bool) (gio.Executor, error) {
			c, scheduler = gio.WithScheduler(c)
			return inner(c, peer)
		}
		r := orderRigOf(t, w, &s)
		r.store()
		before := scheduler.Stats()
		var events [2][]*cuda.Event // of a pass and of the one before
		for i := range events {
			for range r.layers {
				r.do(func() error {
					e, err := w.context.NewEvent(false)
					events[i] = append(events[i], e)
					return err
				})
			}
		}
		defer func() {
			for _, e := range append(events[0], events[1]...) {
				r.do(e.Close)
			}
		}()
		var tickets []gio.LayerTicket
		var open []gio.Layers
		for pass := range passes {
			require.NoError(t, scheduler.Prefill(64, 64, len(r.layers)))
			storing := pass%2 == 1
			var l gio.Layers
			var err error
			if storing {
				l, err = r.Ring.CreateLayers(r.Map, 0, r.slots)
			} else {
				l, err = r.Ring.OpenLayers(r.Map, 0, r.slots)
			}
			require.NoError(t, err)
			open = append(open, l)
			for layer := range r.layers {
				event := events[pass%2][layer]
				if storing {
					r.do(func() error { return event.Record(r.engine) })
					ticket, err := l.(gio.GPULayers).StoreLayerAfter(uint16(layer), r.desc[layer], event)
					require.NoError(t, err)
					r.do(func() error { return ticket.WaitOn(r.engine) })
					scheduler.LayerDone(layer, event)
					tickets = append(tickets, ticket)
					continue
				}
				ticket, err := l.RetrieveLayer(uint16(layer), r.desc[layer])
				require.NoError(t, err)
				r.do(func() error {
					if err := ticket.(gio.GPULayerTicket).WaitOn(r.engine); err != nil {
						return err
					}
					return event.Record(r.engine)
				})
				scheduler.LayerDone(layer, event)
				tickets = append(tickets, ticket)
			}
			scheduler.EndPass()
			if storing { // a file is read again only when it is there
				for _, ticket := range tickets {
					require.NoError(t, ticket.Wait())
				}
				tickets = tickets[:0]
				require.NoError(t, l.Finish())
			}
		}
		for _, l := range open {
			require.Equal(t, make([]error, len(r.slots)), l.Failed())
			l.Close()
		}
		for layer := range r.layers {
			require.True(t, bytes.Equal(r.layers[layer], r.memory(layer)), "layer %d", layer)
		}
		require.Eventually(t, func() bool {
			now := scheduler.Stats()
			return now.Layers-before.Layers == uint64(passes*len(r.layers)) && now.Passes-before.Passes == passes
		}, 10*time.Second, time.Millisecond)
		require.NoError(t, scheduler.Check())
	})
}

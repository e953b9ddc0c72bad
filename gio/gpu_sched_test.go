package gio_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
)

// TestGPUSeesCompute: layers are done when their events have come, those of LayerDone and those of stores, and what was
// told behind them waits with them.
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
			time.Sleep(time.Millisecond)
			require.EqualValues(t, 1+layer, layers())
			r.release()
			comes(uint64(2 + layer))
			require.NoError(t, ticket.Wait())
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

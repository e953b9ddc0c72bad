package daemon

import (
	"reflect"
	"strconv"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// TestEngines: what sessions say of themselves is shown by session, whatever it is, and goes with the session.
func TestEngines(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	d := &Daemon{volume: w.volume, store: w.store, control: w.control, wear: newTestDaemon(t).wear}
	require.Empty(t, d.stats().Engines)
	first, second, silent := w.open(true), w.open(true), w.open(true)
	o := ioctl.AttachOptions{Lanes: 1, Depth: 32, DMABytes: 8192}
	s1, a1 := first.session(o)
	s2, a2 := second.session(o)
	silent.session(ioctl.AttachOptions{})
	require.Empty(t, d.stats().Engines, "nothing was written")

	c := ioctl.EngineCounters{Version: ioctl.EngineCountersVersion, Passes: 3, BubbleNanos: 1_500_000_000,
		IssuedDecodeBytes: 4096, KeptEvicted: 4, KeptFailed: 5, KeptBad: 6}
	c.Publish(a1.Queues)
	hostile := ioctl.EngineCounters{Version: ioctl.EngineCountersVersion}
	for v, i := reflect.ValueOf(&hostile).Elem(), 3; i < v.NumField(); i++ {
		v.Field(i).SetUint(1<<64 - 1)
	}
	hostile.Publish(a2.Queues)
	engines := d.stats().Engines
	require.Len(t, engines, 2)
	one := engines[strconv.Itoa(int(s1.ID))]
	require.Equal(t, EngineStats{Passes: 3, BubbleSeconds: 1.5, Issued: Issued{Decode: 4096}, KeptEvicted: 4,
		KeptFailed: 5, KeptBad: 6}, one)
	require.EqualValues(t, uint64(1<<64-1), engines[strconv.Itoa(int(s2.ID))].StoresRefused)
	_ = content(t, d, "stats")

	rank := w.open(true)
	join := ioctl.Session{Token: s1.Token}
	require.Zero(t, issue(rank, ioctl.CmdSessionJoin, &join, 0))
	a, err := join.Attach(o)
	require.NoError(t, err)
	c.Publish(a.Queues)
	require.EqualValues(t, 6, d.stats().Engines[strconv.Itoa(int(s1.ID))].Passes, "of both ranks")
	require.NoError(t, a.Close())

	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(newCollector(d)))
	families, err := registry.Gather()
	require.NoError(t, err)
	seen := 0
	for _, f := range families {
		for _, m := range engineMetrics {
			if f.GetName() == "tuttifs_engine_"+m.name {
				seen++
				require.Len(t, f.GetMetric(), 2)
			}
		}
	}
	require.Equal(t, len(engineMetrics), seen)
	fields := reflect.TypeFor[EngineStats]().NumField() - 1 + reflect.TypeFor[Issued]().NumField()
	require.Len(t, engineMetrics, fields, "Prometheus shows what the status file does")
	require.Equal(t, fields, reflect.TypeFor[ioctl.EngineCounters]().NumField()-3, "and both show what there is")
}

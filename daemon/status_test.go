package daemon

import (
	"encoding/json"
	"io"
	"net/http"
	"reflect"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/wear"
)

func newTestDaemon(t *testing.T) *Daemon {
	t.Helper()
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	d := &Daemon{options: Options{Version: "v"}, volume: w.volume, store: w.store, control: w.control}
	d.options.fill()
	d.wear = newWearWatch(w.volume, w.control.engineWrites, func(uint16) uint64 { return 0 },
		drive.ReadLog, wear.Ratings{})
	d.wear.run()
	t.Cleanup(d.wear.close)
	return d
}

// content decodes a status file.
func content(t *testing.T, d *Daemon, name string) map[string]any {
	t.Helper()
	for _, f := range d.statusFiles() {
		if f.Name == name {
			var v map[string]any
			require.NoError(t, json.Unmarshal(f.Content(), &v))
			require.EqualValues(t, StatusVersion, v["output_version"])
			return v
		}
	}
	t.Fatalf("no status file %s", name)
	return nil
}

func TestStatusFiles(t *testing.T) {
	d := newTestDaemon(t)
	require.Equal(t, "v", content(t, d, "version")["version"])
	require.Equal(t, "test", content(t, d, "volume")["label"])
	require.Len(t, content(t, d, "drives")["drives"], 2)
	require.Empty(t, content(t, d, "sessions")["sessions"])
	options := content(t, d, "options")
	require.Equal(t, "lru", options["policy"])
	require.Equal(t, "auto", options["discard"])
	require.Equal(t, "", options["metrics"])
	stats := content(t, d, "stats")
	require.Empty(t, stats["pools"])
	require.Len(t, stats["drives"], 2)
	require.Len(t, stats["wear"], 2)
}

// The drives document shows what is in effect of the discard option, whatever was asked for.
func TestDrivesShowDiscard(t *testing.T) {
	for _, asked := range []*bool{nil, new(true), new(false)} {
		drives := memoryDrives(t, 64<<20)
		_, err := extentmap.Format(drives, extentmap.FormatOptions{})
		require.NoError(t, err)
		w := openWorld(t, drives, extentmap.Options{Discard: asked}, gpufile.Options{},
			ControlOptions{})
		d := &Daemon{options: Options{Discard: asked}, volume: w.volume, store: w.store, control: w.control}
		d.options.fill()
		for _, e := range content(t, d, "drives")["drives"].([]any) {
			require.Equal(t, asked != nil && *asked, e.(map[string]any)["discard"], "memory is no block device")
		}
	}
}

// Every field of the counters is summed.
func TestTotalsCoverEveryField(t *testing.T) {
	fill := func(v reflect.Value) {
		for i := range v.NumField() {
			if f := v.Field(i); f.Kind() == reflect.Float64 {
				f.SetFloat(float64(i + 1))
			} else {
				f.SetUint(uint64(i + 1))
			}
		}
	}
	var pool, poolSum PoolStats
	fill(reflect.ValueOf(&pool).Elem())
	poolSum.add(&pool)
	require.Equal(t, pool, poolSum)
	var io, ioSum IOStats
	fill(reflect.ValueOf(&io).Elem())
	ioSum.add(&io)
	require.Equal(t, io, ioSum)
	require.Len(t, poolMetrics, reflect.TypeFor[PoolStats]().NumField(), "Prometheus shows what the status file does")
	require.Len(t, ioMetrics, reflect.TypeFor[IOStats]().NumField())
}

// Promise l: every metric exists at zero.
func TestMetricsAreThereFromTheStart(t *testing.T) {
	d := newTestDaemon(t)
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(newCollector(d)))
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		values[f.GetName()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
	}
	for _, m := range poolMetrics {
		require.Contains(t, values, "tuttifs_"+m.name)
		require.Zero(t, values["tuttifs_"+m.name], m.name)
	}
	for _, m := range ioMetrics {
		require.Contains(t, values, "tuttifs_io_"+m.name)
		require.Zero(t, values["tuttifs_io_"+m.name], m.name)
	}
	for _, m := range volumeMetrics {
		require.Contains(t, values, "tuttifs_"+m.name)
	}
	for _, m := range wearMetrics {
		require.Contains(t, values, "tuttifs_drive_"+m.name)
	}
	for _, m := range phaseMetrics {
		require.Contains(t, values, "tuttifs_drive_phase_"+m.name)
	}
	require.Zero(t, values["tuttifs_drive_phase_mixed_commands_total"])
	require.Positive(t, values["tuttifs_space_total_bytes"])
}

func TestMetricsServer(t *testing.T) {
	d := newTestDaemon(t)
	m, err := serveMetrics(d, "127.0.0.1:0")
	require.NoError(t, err)
	_, err = serveMetrics(d, m.address)
	require.ErrorContains(t, err, "metrics")
	r, err := http.Get("http://" + m.address + "/metrics")
	require.NoError(t, err)
	b, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Contains(t, string(b), "\ntuttifs_hits_total 0\n")
	require.NoError(t, m.close())
	_, err = http.Get("http://" + m.address + "/metrics")
	require.Error(t, err, "nothing listens any more")
}

package engine

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/daemon"
	"tuttifs/gio"
	"tuttifs/slack"
)

// slackTable is the file of a table, for the pool of mountSpec on another machine, as it is after a change.
func slackTable(t *testing.T, change func(*slack.Table)) string {
	t.Helper()
	way := slack.Direction{RingBytesPerSecond: 1e9, LatencyUS: 200}
	table := slack.Table{
		Version: slack.Version, Source: slack.Estimated,
		Fingerprint: slack.Fingerprint{
			Model: slack.Model{Name: "tiny", Layers: 3, Shape: slack.Shape{DType: "bf16"}, TensorParallel: 1,
				BlockTokens: 16},
			Machine: slack.Machine{GPU: "a GPU", Driver: "d", PCIe: "p", CPU: "c"},
		},
		IO: slack.IO{BytesPerToken: 1680, ObjectBytes: 16384, Read: way, Write: way, Harvest: slack.Harvest{SMs: 8,
			SMShareMax: 1, LaunchBytes: 1 << 20, Grids: []slack.Grid{{Blocks: 2, BytesPerSecond: 1e11}}}},
	}
	_, err := table.SetWindows([]slack.LayerTime{{Input: 1, Window: 2 * time.Millisecond}})
	require.NoError(t, err)
	change(&table)
	path := filepath.Join(t.TempDir(), "table.json")
	require.NoError(t, slack.Save(path, &table))
	return path
}

// engineStats is what the mount shows of a session.
func engineStats(t *testing.T, v *volume, id uint32) (e daemon.EngineStats, ok bool) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(v.mount(), ".tuttifs", "stats"))
	require.NoError(t, err)
	var doc daemon.StatsDocument
	require.NoError(t, json.Unmarshal(b, &doc))
	e, ok = doc.Engines[strconv.Itoa(int(id))]
	return e, ok
}

// TestMountScheduler: a session that tells of its passes stores and restores as ever, by both executors, and the mount
// shows what it has counted.
func TestMountScheduler(t *testing.T) {
	v := newVolume(t)
	o := mountOptions
	o.StoreBytes, o.DMABytes = StoreLeast, 16<<20+StoreLeast
	o.Scheduler = SchedulerOptions{Table: slackTable(t, func(*slack.Table) {}), AnyTable: true}
	withGPU := o
	withGPU.GPU = gpuMountOptions(startFake(t), "0").GPU
	for name, o := range map[string]SessionOptions{"CPU": o, "GPU": withGPU} {
		t.Run(name, func(t *testing.T) {
			u := newUser(t, v, o, nil)
			require.Contains(t, u.session.Describe(), "scheduler with a table of tiny on a GPU, estimated")
			require.Contains(t, u.session.Describe(), `GPU "a GPU", not`)
			s := u.session.Scheduler()
			keys, items := chain(uint64(len(name))+uint64(name[0]), 4)
			require.NoError(t, s.DecodeStep(64))
			u.store(1, keys, items, false)
			require.NoError(t, s.Prefill(16, 64, 3))
			u.restore(2, 0, keys, false)
			for layer := range 3 {
				require.NoError(t, u.session.LayerDone(layer, nil))
			}
			require.NoError(t, s.DecodeStep(80))
			s.EndPass()
			offer, err := s.Offer(16, 64, 3)
			require.NoError(t, err)
			require.True(t, offer.Known)
			require.True(t, offer.Load == (offer.Restore <= offer.Recompute))

			stats := s.Stats()
			require.EqualValues(t, 1, stats.Passes)
			require.EqualValues(t, 3, stats.Layers)
			require.Positive(t, stats.ReadHidden+stats.ReadExposed)
			require.EqualValues(t, 4*2*(3*2+1), stats.Deferred, "objects and trailers of both ranks")
			var shown daemon.EngineStats
			require.Eventually(t, func() bool {
				shown, _ = engineStats(t, v, u.session.ID())
				return shown.DecodeSteps == 2 && shown.Offers == 1
			}, 10*time.Second, 20*time.Millisecond)
			require.EqualValues(t, 1, shown.Passes)
			require.EqualValues(t, StoreLeast, shown.StoreBufferBytes)
			require.Equal(t, stats.DeferredBytes, shown.DeferredBytes)
			require.Zero(t, shown.BacklogBytes)
			id := u.session.ID()
			require.NoError(t, u.session.Close())
			require.Eventually(t, func() bool {
				_, there := engineStats(t, v, id)
				return !there
			}, 10*time.Second, 20*time.Millisecond)
		})
	}

	// Without a table, and switched off.
	o.Scheduler = SchedulerOptions{Off: true}
	u := newUser(t, v, o, nil)
	require.Contains(t, u.session.Describe(), "scheduler off")
	require.ErrorIs(t, u.session.LayerDone(0, new(cuda.Event)), ErrInvalid)
	keys, items := chain(900, 3)
	u.store(1, keys, items, false)
	u.restore(2, 1, keys, false)
	require.Equal(t, u.session.Scheduler().Stats().DeferredBytes, u.session.Scheduler().Stats().Issued[gio.CauseOff])

	o.Scheduler = SchedulerOptions{Table: filepath.Join(v.dir, "drive0")}
	_, err := u.mount.NewSession(o)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, err, slack.ErrTable)
}

// TestMountForeignTable: a table of another machine is refused when a session is made, and one of a model with another
// cache when a pool is opened; the errors say what differs and what to do.
func TestMountForeignTable(t *testing.T) {
	v := newVolume(t)
	withGPU := gpuMountOptions(startFake(t), "0")
	context, err := withGPU.GPU.openContext()
	require.NoError(t, err)
	name := context.Device().Name()
	require.NoError(t, context.Close())
	for _, o := range []SessionOptions{mountOptions, withGPU} {
		here := slack.Here("/", "")
		if o.GPU != nil {
			here.GPU = name
		}
		here.FillWords()
		open := func(any bool, change func(*slack.Table)) (*Session, error) {
			m, err := Open(v.mount())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, m.Close()) })
			o := o
			o.Scheduler = SchedulerOptions{AnyTable: any, Table: slackTable(t, func(x *slack.Table) {
				x.Fingerprint.Machine = here
				x.IO.BytesPerToken = 1 // no pool's
				change(x)
			})}
			s, err := m.NewSession(o)
			if err == nil {
				t.Cleanup(func() { require.NoError(t, s.Close()) })
			}
			return s, err
		}
		refused := func(err error, says string) {
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorIs(t, err, slack.ErrFingerprint)
			require.ErrorContains(t, err, says)
			require.ErrorContains(t, err, "profile this one")
		}
		_, err := open(false, func(x *slack.Table) { x.Fingerprint.Machine.GPU = "another GPU" })
		refused(err, `GPU "another GPU", not`)
		_, err = open(false, func(x *slack.Table) { x.Fingerprint.Machine.Drives = []string{"a", "b", "c", "d", "e"} })
		refused(err, "drives 5, not")
		s, err := open(false, func(*slack.Table) {})
		require.NoError(t, err)
		_, err = s.OpenPool(mountSpec())
		refused(err, "bytes of a token in a layer 1, not")
		s, err = open(true, func(x *slack.Table) { x.Fingerprint.Machine.CPU = "another CPU" })
		require.NoError(t, err)
		require.Contains(t, s.Describe(), `CPU "another CPU", not`)
		_, err = s.OpenPool(mountSpec())
		require.NoError(t, err)
		s, err = open(false, func(x *slack.Table) { x.Fingerprint.Model.TensorParallel, x.IO.BytesPerToken = 2, 1680 })
		require.NoError(t, err)
		_, err = s.OpenPool(mountSpec())
		require.NoError(t, err, "the pool's own model")
	}
}

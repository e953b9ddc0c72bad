package gio_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drivemodel"
	"tuttifs/gio"
	"tuttifs/gio/giotest"
	"tuttifs/phase"
	"tuttifs/stripe"
)

// The study at reduced scale: an engine whose layers are sleeps restores prefixes over drives that are slow, and
// collapse when reads and writes mix, while a backlog of stores waits to be written.
const (
	studyLayers  = 8
	studyObject  = 16 << 10
	studySlots   = 32
	studyDrives  = 2
	studyRead    = 25_000_000 // bytes/s of a drive
	studyWrite   = 12_000_000
	studyMixed   = 3_000_000
	studyBacklog = 6 // layers of all slots: 3 MiB, an eighth of a second of writing
	// studyWindow is what a layer of nothing cached takes; restoring one of everything takes a tenth.
	studyWindow = 100 * time.Millisecond
)

// studyWay is what is switched on.
type studyWay struct{ scheduler, phases bool }

func (w studyWay) String() string {
	return fmt.Sprintf("scheduler %-3s phases %s", onOff(w.scheduler), onOff(w.phases))
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// studyRow is what came of one way at one hit rate.
type studyRow struct {
	bubble  time.Duration // as the engine saw it
	counted gio.SchedulerStats
	mixed   uint64 // commands
}

func studyMedia(seed uint64) (media []*drivemodel.Medium) {
	latency := drivemodel.Latency{MinUS: 80, P50US: 100, P90US: 120, P99US: 150, P999US: 200, MaxUS: 300}
	for d := range studyDrives {
		media = append(media, drivemodel.NewMedium(&drivemodel.Profile{
			Version: drivemodel.Version, Name: "study", Of: "a slow drive",
			Read:  &drivemodel.Direction{BytesPerSecond: studyRead, Latency: latency},
			Write: &drivemodel.Direction{BytesPerSecond: studyWrite, Latency: latency},
			Mixed: &drivemodel.Mixed{WindowUS: 5000, Points: []drivemodel.MixedPoint{
				{WritePercent: 1, BytesPerSecond: studyMixed}, {WritePercent: 99, BytesPerSecond: studyMixed}}},
		}, seed+uint64(d)))
	}
	return media
}

// studyRig is an executor with memory for all layers of all slots, and the slots for a backlog besides.
type studyRig struct {
	*giotest.Rig
	t         *testing.T
	scheduler *gio.Scheduler
	tokens    []*phase.Token
	memory    *gio.Memory
}

func newStudyRig(t *testing.T, w studyWay) *studyRig {
	r := &studyRig{t: t}
	var err error
	r.scheduler, err = gio.NewScheduler(gio.SchedulerConfig{Off: !w.scheduler})
	require.NoError(t, err)
	for range studyDrives {
		r.tokens = append(r.tokens, phase.New(phase.Options{Off: !w.phases}))
	}
	s := giotest.Subject{
		New: func(c gio.RingConfig, _ bool) (gio.Executor, error) {
			c.Scheduler = r.scheduler
			return gio.NewRing(c)
		},
		Store: true, Seed: 1,
	}
	var g stripe.Geometry
	for layer := range studyLayers {
		g.Objects = append(g.Objects, stripe.Object{Layer: uint16(layer),
			Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: studyObject}}})
	}
	r.Rig = giotest.NewRig(t, &s, giotest.Shape{
		Drives: studyDrives, Rows: 32, Lanes: 4, Depth: 64, ChunkCommands: 8, DMABytes: 32 << 20, StoreBytes: 16 << 20,
		Geometry: g.WithTrailers(), Media: studyMedia(1), Phases: r.tokens, Deadline: time.Minute,
	})
	require.GreaterOrEqual(t, len(r.Slots), 2*studySlots)
	b := r.Ring.DMA()[:studyLayers*studySlots*studyObject]
	for i := range b {
		b[i] = byte(i * 131 >> 5)
	}
	r.memory, err = r.Ring.RegisterPadded(b)
	require.NoError(t, err)
	return r
}

func (r *studyRig) slots(first, n int) []gio.SlotIO {
	slots := make([]gio.SlotIO, n)
	for i := range slots {
		slots[i] = gio.SlotIO{Slot: r.Slots[first+i], Seed: checksum.Seed{byte(first + i), 7}}
	}
	return slots
}

// desc is where a layer of n slots lies.
func (r *studyRig) desc(layer, n int) []uint64 {
	desc := make([]uint64, n)
	for i := range desc {
		desc[i] = r.memory.Desc((layer*studySlots + i) * studyObject)
	}
	return desc
}

// store stores so many layers of slots, and returns when they lie in the store buffer.
func (r *studyRig) store(slots []gio.SlotIO, layers int) gio.Layers {
	l, err := r.Ring.CreateLayers(r.Map, 0, slots)
	require.NoError(r.t, err)
	for layer := range layers {
		ticket, err := l.StoreLayer(uint16(layer), r.desc(layer, len(slots)))
		require.NoError(r.t, err)
		require.NoError(r.t, ticket.Wait())
	}
	return l
}

// pass restores a prefix ahead of its layers, with a backlog of stores beside it.
func (r *studyRig) pass(cached int) (bubble time.Duration) {
	begin := time.Now()
	l, err := r.Ring.OpenLayers(r.Map, 0, r.slots(0, cached))
	require.NoError(r.t, err)
	bubble = time.Since(begin)
	fresh := studySlots - cached
	window := studyWindow * time.Duration(fresh) / studySlots
	require.NoError(r.t, r.scheduler.Prefill(fresh, cached, studyLayers))
	backlog := r.store(r.slots(studySlots, studySlots), studyBacklog)
	var tickets []gio.LayerTicket
	for layer := range studyLayers {
		ticket, err := l.RetrieveLayer(uint16(layer), r.desc(layer, cached))
		require.NoError(r.t, err)
		tickets = append(tickets, ticket)
	}
	for layer, ticket := range tickets {
		begin := time.Now()
		require.NoError(r.t, ticket.Wait())
		bubble += time.Since(begin)
		time.Sleep(window)
		r.scheduler.LayerDone(layer, nil)
	}
	require.Equal(r.t, make([]error, cached), l.Failed())
	l.Close()
	backlog.Close() // waits for its writes
	return bubble
}

// study runs one way at one hit rate.
func study(t *testing.T, w studyWay, cached int) (row studyRow) {
	r := newStudyRig(t, w)
	require.NoError(t, r.store(r.slots(0, studySlots), studyLayers).Finish())
	before := r.scheduler.Stats()
	stop := make(chan struct{})
	var io sync.WaitGroup
	io.Go(func() { // the engine's thread for I/O
		for {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
				r.Ring.(*gio.Ring).Poll()
			}
		}
	})
	for range 2 {
		row.bubble += r.pass(cached)
	}
	close(stop)
	io.Wait()
	row.counted = r.scheduler.Stats()
	require.EqualValues(t, 2*studyLayers, row.counted.Layers-before.Layers)
	for _, token := range r.tokens {
		row.mixed += token.Stats(time.Now()).Mixed
	}
	return row
}

// TestSchedulerStudy: the scheduler and the drives' phases keep what a restored prefix costs the model down, and
// commands apart. Times are a machine's of the moment: only their order is asserted, with margins.
func TestSchedulerStudy(t *testing.T) {
	if testing.Short() {
		t.Skip("it sleeps for ten seconds")
	}
	ways := []studyWay{{true, true}, {false, true}, {true, false}, {false, false}}
	sums := make([]time.Duration, len(ways))
	var lock sync.Mutex
	t.Run("ways", func(t *testing.T) {
		for i, w := range ways {
			t.Run(w.String(), func(t *testing.T) {
				t.Parallel() // they sleep, mostly
				for _, cached := range []int{16, 26, 30} {
					row := study(t, w, cached)
					lock.Lock()
					sums[i] += row.bubble
					lock.Unlock()
					t.Logf("%s, %4.1f %% cached: bubble %6.1f ms (counted %6.1f), exposed %6.1f, hidden %6.1f, mixed %d, beside %d",
						w, 100*float64(cached)/studySlots, ms(row.bubble), ms(row.counted.Bubble), ms(row.counted.ReadExposed),
						ms(row.counted.ReadHidden), row.mixed, row.counted.Beside)
					if w.phases {
						require.Zero(t, row.mixed, "commands that began beside those of the other direction")
					}
					if !w.scheduler && !w.phases {
						require.NotZero(t, row.mixed)
					}
					var issued uint64
					for _, n := range row.counted.Issued {
						issued += n
					}
					require.Equal(t, row.counted.DeferredBytes, issued)
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	require.Less(t, 2*sums[0], sums[3], "everything on, against everything off")
	require.Less(t, 2*sums[2], sums[3], "the scheduler alone, which keeps its own writes behind its reads")
	require.Less(t, sums[1], sums[3], "the phases alone")
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

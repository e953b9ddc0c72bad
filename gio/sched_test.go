package gio

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/slack"
)

// schedTable has windows of scale ns for a new token behind none, more behind many, and rates of the drives given.
func schedTable(t *testing.T, scale float64, d simDrives) *slack.Table {
	t.Helper()
	way := func(rate float64) slack.Direction {
		return slack.Direction{RingBytesPerSecond: rate, LatencyUS: float64(d.latency) / 1e3}
	}
	table := &slack.Table{
		Version: slack.Version, Source: slack.Measured,
		Fingerprint: slack.Fingerprint{
			Model:   slack.Model{Name: "m", Layers: 16, Shape: slack.Shape{DType: "bf16"}, TensorParallel: 1, BlockTokens: 16},
			Machine: slack.Machine{GPU: "g", Driver: "d", PCIe: "p", CPU: "c"},
		},
		IO: slack.IO{BytesPerToken: 4096, ObjectBytes: 64 << 10, Read: way(d.readRate), Write: way(d.writeRate),
			Harvest: slack.Harvest{SMs: 132, SMShareMax: 0.0125, LaunchBytes: 64 << 20, Grids: []slack.Grid{
				{Blocks: 8, BytesPerSecond: 235e9}, {Blocks: 16, BytesPerSecond: 429e9},
				{Blocks: 32, BytesPerSecond: 704e9}}}},
	}
	var times []slack.LayerTime
	for _, input := range []int{1, 256, 4096, 65536} {
		for _, prefix := range []int{0, 4096, 65536} {
			times = append(times, slack.LayerTime{Input: input, Prefix: prefix, Window: time.Duration(schedWindow(scale, input,
				prefix))})
		}
	}
	_, err := table.SetWindows(times)
	require.NoError(t, err)
	return table
}

// schedWindow is the truth of a simulated model, ns: what a token takes grows with what it attends to.
func schedWindow(scale float64, input, prefix int) int64 {
	return 30*us + int64(scale*float64(input)*(1+float64(prefix)/20000))
}

var schedDrives = simDrives{readRate: 12e9, writeRate: 5e9, latency: 100 * us}

// TestSchedulerRules runs random engines on random drives with random tables, right and wrong: the rules hold at every
// piece, everything is read and written, and restores lose little against drives that are asked for everything at once.
func TestSchedulerRules(t *testing.T) {
	seeds := 120
	if testing.Short() {
		seeds = 30
	}
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 77))
		pick := func(least, most float64) float64 { return least * math.Pow(most/least, random.Float64()) }
		d := simDrives{readRate: pick(1e9, 50e9), writeRate: pick(0.5e9, 12e9), latency: int64(pick(20, 300)) * us}
		scale := pick(20, 1500)
		var c SchedulerConfig
		if random.IntN(4) > 0 {
			wrong := d
			wrong.readRate *= pick(0.4, 2.5)
			wrong.writeRate *= pick(0.4, 2.5)
			c.Table = schedTable(t, scale*pick(0.4, 2.5), wrong)
		}
		if random.IntN(3) == 0 {
			c.MaxAge = time.Duration(pick(20, 1000)) * time.Millisecond
		}
		var passes []simPass
		for range 2 + random.IntN(5) {
			input, prefix := 64<<random.IntN(6), 4096*random.IntN(9)
			x := simPass{input: input, prefix: prefix, layers: 2 + random.IntN(20), jitter: 0.2 * random.Float64(),
				window: schedWindow(scale, input, prefix), reads: int64(prefix) * 512, stores: int64(input) * 4096,
				lazy: random.IntN(4) == 0, hosts: random.IntN(2) == 0}
			switch random.IntN(4) {
			case 0:
				x.idle = int64(pick(100, 30_000)) * us
			case 1:
				x.decode, x.window = true, 10*schedWindow(scale, 1, prefix)+2*ms
			}
			x.prefix = max(x.prefix, 1)
			passes = append(passes, x)
		}
		run := func(c SchedulerConfig) *sim {
			s := newSim(t, seed, c, d)
			s.size = 64 << (20 + seed%4)
			s.run(passes...)
			s.settle()
			return s
		}
		s := run(c)
		maxAge := int64(s.p.c.MaxAge)
		drain := int64(float64(s.size) * 1e9 / d.writeRate)
		require.LessOrEqual(t, s.oldest, maxAge+drain*(2*turnEvery)+turnEvery*turnNanos, "seed %d: starved", seed)
		st := s.p.snapshot(s.now)
		require.Equal(t, s.bubble/ms, int64(st.Bubble)/ms, "seed %d: the bubble that was counted", seed)
		require.EqualValues(t, s.layersDone, st.Layers)
		require.Zero(t, s.p.reads.left+s.p.reads.flying+s.p.reads.layer+s.p.write.flying+s.p.read.flying, "seed %d", seed)
		var issued uint64
		for _, n := range st.Issued {
			issued += n
		}
		require.Equal(t, st.DeferredBytes, issued, "seed %d: each byte was issued once, for one cause", seed)

		free := run(SchedulerConfig{NoBudget: true, MaxAge: c.MaxAge})
		require.LessOrEqual(t, float64(s.bubble), 1.25*float64(free.bubble)+float64(int64(len(passes))*20*ms),
			"seed %d: what the budget costs restores", seed)
	}
}

// TestSchedulerConverges: windows and rates come right within tens of layers from tables that are wrong by a factor of
// two, or nothing at all, in spite of noise and of single layers that take ten times as long.
func TestSchedulerConverges(t *testing.T) {
	const scale, input, prefix = 900, 4096, 4096
	truth := schedWindow(scale, input, prefix)
	for name, wrong := range map[string]float64{"half": 0.5, "double": 2, "right": 1, "none": 0} {
		t.Run(name, func(t *testing.T) {
			c := SchedulerConfig{}
			if wrong > 0 {
				bad := schedDrives
				bad.readRate *= wrong
				bad.writeRate /= wrong
				c.Table = schedTable(t, scale*wrong, bad)
			}
			s := newSim(t, 1, c, schedDrives)
			layers, good := 0, 0
			s.onLayer = func() {
				layers++
				if layers%9 == 5 {
					s.until(s.now+10*truth, nil) // something else had the GPU
				}
				w, _ := s.p.windows.layer(input, prefix)
				read := s.p.read.bytesPerSecond() / schedDrives.readRate
				if math.Abs(math.Log2(float64(w)/float64(truth))) < 0.15 && math.Abs(math.Log2(read)) < 0.25 {
					good++
				} else if layers > 24 {
					require.Failf(t, "not converged", "layer %d: window %d us of %d, read rate %.2f of the truth", layers,
						w/us, truth/us, read)
				}
			}
			for range 4 {
				s.run(simPass{input: input, prefix: prefix, layers: 16, window: truth, jitter: 0.05, reads: 16 << 20,
					stores: 8 << 20})
			}
			require.Greater(t, good, 40)
			s.settle()
			require.InDelta(t, 1, s.p.write.bytesPerSecond()/schedDrives.writeRate, 0.25)
		})
	}
}

// TestSchedulerWritesBesideReads: a write's rate is learned while nothing is read: not of one that waited for a read,
// whichever of them ended first or began first.
func TestSchedulerWritesBesideReads(t *testing.T) {
	const piece, alone, reading = 4 << 20, 2 * ms, 20 * ms
	type happens struct {
		kind ioEventKind
		at   int64
	}
	before := []happens{{readIssued, 0}, {writeIssued, 0}, {readArrived, reading}, {writeArrived, reading + alone}}
	within := []happens{{writeIssued, 0}, {readIssued, ms}, {readArrived, ms + reading}, {writeArrived, reading + alone}}
	after := []happens{{writeIssued, 0}, {readIssued, ms}, {writeArrived, reading + alone}, {readArrived, reading + alone}}
	beyond := []happens{{readIssued, 0}, {writeIssued, 0}, {writeArrived, reading + alone}, {readArrived, reading + alone}}
	for name, order := range map[string][]happens{"before": before, "within": within, "after": after, "beyond": beyond} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 1, SchedulerConfig{}, schedDrives)
			do := func(events ...happens) {
				begin := s.now
				for _, h := range events {
					s.now = begin + h.at
					s.note(h.kind, noLayer, piece)
				}
				s.now += 10 * ms
			}
			for range 10 {
				do(happens{writeIssued, 0}, happens{writeArrived, alone})
			}
			rate := s.p.write.bytesPerSecond()
			require.InEpsilon(t, piece*1e9/float64(alone), rate, 0.1)
			for range 10 {
				do(order...)
			}
			require.Equal(t, rate, s.p.write.bytesPerSecond())
		})
	}
}

// TestSchedulerWritesAmongReads: the rate of writes comes right also where reads come and go and nothing is ever idle,
// from a belief that is too great and from one that is too small: in passes of which each layer reads and stores, and
// in decode steps beside which reads come at any time.
func TestSchedulerWritesAmongReads(t *testing.T) {
	pass := simPass{input: 4096, prefix: 4096, layers: 16, window: 4 * ms, jitter: 0.1, reads: 4 << 20, stores: 4 << 20}
	lazy := pass
	lazy.lazy = true
	passes := func(x simPass) func(*sim) {
		return func(s *sim) {
			for range 10 {
				s.run(x)
			}
		}
	}
	for name, busy := range map[string]func(*sim){"passes": passes(pass), "lazy": passes(lazy), "steps": func(s *sim) {
		for range 400 {
			s.p.decodeStep(s.now, 4096)
			s.deferWrite(4 << 20)
			for end := s.now + 20*ms; s.now < end; s.until(s.now+s.random.Int64N(8*ms), nil) {
				s.read(0, s.random.Int64N(16<<20))
				s.until(s.now+60_000*ms, func() bool { return len(s.queue) == 0 })
			}
		}
	}} {
		for _, rate := range []float64{0.5e9, 5e9} {
			t.Run(fmt.Sprintf("%s, %v", name, rate), func(t *testing.T) {
				d := schedDrives
				d.writeRate = rate
				s := newSim(t, 1, SchedulerConfig{}, d)
				busy(s)
				require.InEpsilon(t, rate, s.p.write.bytesPerSecond(), 0.25)
				s.settle()
			})
		}
	}
}

// TestSchedulerOtherLengths: what was learned of one length serves others: with a table as a factor, without one as a
// bound from below.
func TestSchedulerOtherLengths(t *testing.T) {
	const scale = 900
	with := newSim(t, 1, SchedulerConfig{Table: schedTable(t, scale/2, schedDrives)}, schedDrives)
	without := newSim(t, 1, SchedulerConfig{}, schedDrives)
	for _, s := range []*sim{with, without} {
		w, sure := s.p.windows.layer(16384, 8192)
		require.Equal(t, s == with, sure)
		require.Equal(t, s == with, w > 0)
		s.run(simPass{input: 4096, prefix: 4096, layers: 32, window: schedWindow(scale, 4096, 4096)})
		w, sure = s.p.windows.layer(16384, 8192)
		truth := schedWindow(scale, 16384, 8192)
		require.Equal(t, s == with, sure)
		require.Positive(t, w)
		if s == with {
			require.InEpsilon(t, truth, w, 0.15)
		} else {
			require.Less(t, w, truth)
		}
	}
}

// TestSchedulerWindows: with a right table nothing that was granted for a window outlasts it, and nothing is granted
// between passes before they are known to be over.
func TestSchedulerWindows(t *testing.T) {
	const scale = 900
	s := newSim(t, 1, SchedulerConfig{Table: schedTable(t, scale, schedDrives)}, schedDrives)
	for range 6 {
		s.run(simPass{input: 4096, prefix: 4096, layers: 16, window: schedWindow(scale, 4096, 4096), reads: 8 << 20,
			stores: 8 << 20, hosts: true})
	}
	st := s.p.snapshot(s.now)
	require.Zero(t, st.Overruns)
	require.Zero(t, st.Beside)
	require.Greater(t, st.Issued[CauseWindow], st.DeferredBytes*9/10, "windows of 4 ms have room for 8 MiB")
	require.Zero(t, st.Issued[CauseAge]+st.Issued[CauseHigh]+st.Issued[CauseOff])
	s.settle()
}

// TestSchedulerDecode: a decode step has its budget and no more, and what fits no step waits for idleness or age.
func TestSchedulerDecode(t *testing.T) {
	const scale = 900
	truth := 16 * schedWindow(scale, 1, 4096)
	quick := schedDrives
	quick.latency = 5 * us
	s := newSim(t, 1, SchedulerConfig{Table: schedTable(t, scale, quick)}, quick)
	s.piece = 128 << 10
	step := simPass{decode: true, prefix: 4096, window: truth}
	s.run(step, step)
	s.deferWrite(256 << 20)
	before := s.p.snapshot(s.now).Issued[CauseDecode]
	budget := s.p.share(slack.Write, truth).Bytes
	require.Positive(t, budget)
	const steps = 20
	for range steps {
		s.run(step)
	}
	st := s.p.snapshot(s.now)
	gone := int64(st.Issued[CauseDecode] - before)
	require.LessOrEqual(t, gone, steps*(budget+s.piece))
	require.Greater(t, gone, steps*budget*8/10)
	require.Zero(t, st.Overruns)
	require.Zero(t, st.Issued[CauseIdle])
	require.EqualValues(t, steps+2, st.DecodeSteps)
	s.settle()
	require.NotZero(t, s.p.snapshot(s.now).Issued[CauseIdle])

	// Without a table, what a step takes is learned from the steps themselves.
	s = newSim(t, 1, SchedulerConfig{}, schedDrives)
	s.deferWrite(64 << 20)
	for range 30 {
		s.run(simPass{decode: true, prefix: 4096, window: 12 * ms, jitter: 0.1})
	}
	require.InEpsilon(t, 12*ms, s.p.pass.window, 0.1)
	require.NotZero(t, s.p.snapshot(s.now).Issued[CauseDecode])
	s.settle()
}

// TestSchedulerIdle: writes wait until nothing has computed for a while; what was never told of any pass is idle.
func TestSchedulerIdle(t *testing.T) {
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	s.deferWrite(1 << 20)
	s.until(s.now+ms, nil)
	require.Empty(t, s.buffer, "nothing ever computed")

	s.run(simPass{input: 64, layers: 2, window: 100 * us})
	end := s.now
	s.deferWrite(1 << 20)
	s.until(end+int64(IdleDefault)-us, nil)
	require.Len(t, s.buffer, 1)
	s.until(end+int64(IdleDefault)+ms, nil)
	require.Empty(t, s.buffer)

	// A pass that its engine never ends holds writes back until they are old, and no longer.
	s.p.prefill(s.now, 64, 0, 4)
	s.deferWrite(64 << 20)
	came := s.now
	s.until(came+int64(MaxAgeDefault)-ms, nil)
	require.Len(t, s.buffer, 64)
	s.until(came+int64(MaxAgeDefault)+100*ms, nil)
	require.Empty(t, s.buffer)
}

// TestSchedulerStarvation: reads without an end, and writes have their turns; reads keep nearly all of the time.
func TestSchedulerStarvation(t *testing.T) {
	s := newSim(t, 1, SchedulerConfig{Table: schedTable(t, 1, schedDrives)}, schedDrives)
	s.size = 32 << 20
	s.deferWrite(32 << 20)
	s.p.prefill(s.now, 64, 65536, 1000)
	begin, wrote := s.now, int64(0)
	for layer := 0; s.now < begin+3000*ms; layer++ {
		s.read(layer%1000, 64<<20)
		s.until(s.now+60_000*ms, func() bool { return len(s.queue) < 2 })
		if free := s.size - s.filled; free > 16<<20 {
			s.deferWrite(free)
			wrote += free
		}
	}
	require.Positive(t, wrote)
	require.Positive(t, s.beside)
	require.Less(t, float64(s.beside)/schedDrives.writeRate, 0.08*float64(s.now-begin)/1e9)
}

// finish waits for what is deferred and for trailers behind it, as Finish does, and returns how long that took. busy
// goes on with whatever else there is until stop says so.
func (s *sim) finish(busy func(stop func() bool)) int64 {
	begin := s.now
	s.awaited = begin
	defer func() { s.awaited = 0 }()
	gone := func() bool {
		pieces, _ := s.flying(true)
		return len(s.buffer)+pieces == 0
	}
	busy(gone)
	s.deferWrite(4096)
	busy(gone)
	require.True(s.t, gone())
	return s.now - begin
}

// TestSchedulerFinish: whoever waits in Finish in the middle of passes waits for Patience and for the writes
// themselves; beside reads without an end these have their turns and no more.
func TestSchedulerFinish(t *testing.T) {
	table := schedTable(t, 1, schedDrives)
	computing := func(s *sim) func(func() bool) { // in windows that are too short for any write
		return func(stop func() bool) {
			for layer := 0; !stop(); layer++ {
				if layer%16 == 0 {
					s.p.prefill(s.now, 1, 4096, 16)
				}
				s.until(s.now+30*us, stop)
				s.p.layerDone(s.now, layer%16)
			}
		}
	}
	reading := func(s *sim) func(func() bool) {
		s.p.prefill(s.now, 64, 65536, 1000)
		layer := 0
		return func(stop func() bool) {
			for ; !stop(); layer++ {
				s.read(layer, 64<<20)
				s.until(s.now+60_000*ms, func() bool { return len(s.queue) < 2 || stop() })
			}
		}
	}
	takes := func(bytes int64) int64 { return int64(float64(bytes) * 1e9 / schedDrives.writeRate) }
	turns := func(bytes int64) int64 { // the last one for the trailers
		return (1 + (takes(bytes)+turnNanos-1)/turnNanos) * turnEvery * turnNanos
	}
	for name, c := range map[string]struct {
		busy  func(*sim) func(func() bool)
		bytes int64
		most  int64
	}{
		"computing":                {computing, 32 << 20, takes(32<<20) + 10*ms},
		"reading":                  {reading, 32 << 20, turns(32<<20) + 50*ms},
		"reading, a large backlog": {reading, 320 << 20, turns(320<<20) + 50*ms},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 1, SchedulerConfig{Table: table}, schedDrives)
			busy := c.busy(s)
			s.deferWrite(c.bytes)
			took := s.finish(busy)
			t.Logf("%d MiB, which take %d ms alone: %d ms", c.bytes>>20, takes(c.bytes)/ms, took/ms)
			require.LessOrEqual(t, took, int64(PatienceDefault)+c.most)
			require.Greater(t, took, int64(PatienceDefault), "compute and reads went first")
			if s.beside > 0 {
				require.Less(t, float64(s.beside)/schedDrives.writeRate, 0.08*float64(took)/1e9, "the reads' part of the time")
			}
		})
	}
}

// TestSchedulerFull: what the executor issues without asking, since the buffer is nearly full, is counted as such.
func TestSchedulerFull(t *testing.T) {
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	s.size = 16 << 20
	s.p.prefill(s.now, 64, 0, 4)
	s.deferWrite(16 << 20)
	s.until(s.now+20*ms, nil)
	st := s.p.snapshot(s.now)
	require.NotZero(t, st.Issued[CauseHigh])
	require.LessOrEqual(t, s.filled, s.size*3/4)
	require.Equal(t, st.Issued[CauseHigh], uint64(s.size-s.filled))
}

// TestSchedulerOffer: a prefix is restored where that is faster, and what was estimated comes true.
func TestSchedulerOffer(t *testing.T) {
	const scale = 900
	slow := simDrives{readRate: 0.05e9, writeRate: 0.05e9, latency: 100 * us}
	for name, c := range map[string]struct {
		drives simDrives
		load   bool
	}{"fast drives": {schedDrives, true}, "slow drives": {slow, false}} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 1, SchedulerConfig{Table: schedTable(t, scale, c.drives)}, c.drives)
			const input, prefix, layers = 256, 4096, 16
			o := s.p.offer(input, prefix, layers)
			require.True(t, o.Known)
			require.Equal(t, c.load, o.Load, "%+v", o)
			require.InEpsilon(t, layers*schedWindow(scale, input+prefix, 0), int64(o.Recompute), 0.1)
			s.run(simPass{input: input, prefix: prefix, layers: layers, window: schedWindow(scale, input, prefix),
				reads: prefix * 4096})
			st := s.p.snapshot(s.now)
			require.EqualValues(t, 1, st.Estimates)
			require.InEpsilon(t, int64(st.Took), int64(o.Restore), 0.1)
			require.LessOrEqual(t, st.EstimateError, st.Took/10)
			require.EqualValues(t, 1, st.Offers)
			require.Equal(t, !c.load, st.Refused == 1)
		})
	}
	t.Run("learned", func(t *testing.T) {
		s := newSim(t, 1, SchedulerConfig{}, schedDrives)
		require.Equal(t, Offer{Load: true}, s.p.offer(256, 4096, 16), "nothing is known, so what is there is used")
		pass := simPass{input: 256, prefix: 4096, layers: 16, window: schedWindow(scale, 256, 4096), reads: 16 << 20}
		whole := simPass{input: 4352, layers: 16, window: schedWindow(scale, 4352, 0)}
		s.run(pass, whole, pass, pass)
		o := s.p.offer(256, 4096, 16)
		require.True(t, o.Known)
		st := s.p.snapshot(s.now)
		require.EqualValues(t, 2, st.Estimates)
		require.LessOrEqual(t, st.EstimateError, st.Took/5)
	})
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	require.Equal(t, Offer{Load: true}, s.p.offer(1, 0, 1), "of nothing")
	for _, n := range [][3]int{{0, 1, 1}, {1, -1, 1}, {1, 1, 0}, {slack.LengthMax + 1, 1, 1}, {1, slack.LengthMax + 1, 1},
		{1, 1, schedLayersMax + 1}} {
		var none Scheduler
		_, err := none.Offer(n[0], n[1], n[2])
		require.ErrorIs(t, err, ErrInvalid)
		require.Equal(t, none.Prefill(n[0], n[1], n[2]), err, "as a pass of it is refused")
	}
}

// TestSchedulerSwitches: each idea can be switched off alone.
func TestSchedulerSwitches(t *testing.T) {
	const scale = 900
	run := func(c SchedulerConfig) (*sim, SchedulerStats) {
		c.Table = schedTable(t, scale, schedDrives)
		s := newSim(t, 1, c, schedDrives)
		for range 3 {
			s.run(simPass{input: 256, prefix: 16384, layers: 16, window: schedWindow(scale, 256, 16384), reads: 64 << 20,
				stores: 4 << 20})
		}
		s.settle()
		return s, s.p.snapshot(s.now)
	}
	on, with := run(SchedulerConfig{})
	off, without := run(SchedulerConfig{Off: true})
	mixed, beside := run(SchedulerConfig{ReadsNotFirst: true})
	require.Zero(t, with.Beside)
	require.NotZero(t, without.Beside)
	require.NotZero(t, beside.Beside)
	require.Equal(t, without.DeferredBytes, without.Issued[CauseOff])
	require.Less(t, on.bubble, off.bubble, "writes that do not wait keep reads waiting")
	require.LessOrEqual(t, on.bubble, mixed.bubble)
	require.Equal(t, HarvestBlocksDefault, off.p.harvestBlocks(off.now))
}

// TestSchedulerHarvest: the smallest grid that keeps up while something computes, the fastest while it stands.
func TestSchedulerHarvest(t *testing.T) {
	link := simDrives{readRate: 50e9, writeRate: 50e9, latency: 250 * us}
	s := newSim(t, 1, SchedulerConfig{Table: schedTable(t, 900, link)}, link)
	require.Equal(t, HarvestBlocksDefault, s.p.harvestBlocks(s.now), "nobody knows of compute")
	for input, blocks := range map[int]int{1024: 16, 2048: 16, 8192: 8, 65536: 8} {
		s.p.prefill(s.now, input, 4096, 4)
		require.Equal(t, blocks, s.p.harvestBlocks(s.now), "windows of %d us", s.p.pass.window/us)
	}
	s.read(0, 1<<20)
	require.Equal(t, 32, s.p.harvestBlocks(s.now))
	none := newSim(t, 1, SchedulerConfig{}, schedDrives)
	none.p.prefill(none.now, 4096, 4096, 4)
	require.Zero(t, none.p.harvestBlocks(none.now))
}

// TestSchedulerStages: a later stage of a pipeline has layers that do not begin at 0.
func TestSchedulerStages(t *testing.T) {
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	for pass := range 3 {
		s.p.prefill(s.now, 64, 4096, 32)
		for l := 16; l < 32; l++ {
			s.read(l, 1<<20)
		}
		for l := 16; l < 32; l++ {
			if pass > 0 {
				require.Equal(t, l, s.p.pass.layer)
			}
			s.until(s.now+60_000*ms, func() bool { return !s.missing(l) })
			s.until(s.now+2*ms, nil)
			s.p.layerDone(s.now, l)
		}
		require.Equal(t, passNone, s.p.pass.kind)
	}
	window, sure := s.p.windows.layer(64, 4096)
	require.True(t, sure)
	require.InEpsilon(t, 2*ms, window, 0.1)
	st := s.p.snapshot(s.now)
	require.Positive(t, st.FirstBubble)
	require.Equal(t, st.Bubble, st.FirstBubble, "windows of 2 ms hide a MiB")
	require.InEpsilon(t, 16*2*ms, s.p.loaded(64, 4096, 32), 0.1)
}

// TestSchedulerProgress: reads go on whatever their user does: waits for layers of a pass that never computes, issues
// reads of the next pass while this one is under way, begins passes over and over, or computes layers out of order.
func TestSchedulerProgress(t *testing.T) {
	for seed := range uint64(60) {
		random := rand.New(rand.NewPCG(seed, 3))
		var c SchedulerConfig
		if seed%2 == 0 {
			c.Table = schedTable(t, math.Exp2(6*random.Float64()), schedDrives)
		}
		s := newSim(t, seed, c, schedDrives)
		s.disorder = true
		for range 200 {
			layer := random.IntN(12) - 1
			switch random.IntN(10) {
			case 0:
				s.p.prefill(s.now, 1+random.IntN(8192), random.IntN(65536), 1+random.IntN(10))
				s.host = noLayer
			case 1:
				s.p.decodeStep(s.now, 1+random.IntN(65536))
				s.host = noLayer
			case 2:
				s.p.endPass(s.now)
			case 3, 4, 5:
				s.p.layerDone(s.now, layer)
			case 6, 7:
				s.read(layer, 1+int64(random.IntN(8<<20)))
			case 8:
				s.deferWrite(1 + int64(random.IntN(8<<20)))
			}
			s.until(s.now+int64(random.IntN(3000))*us, nil)
		}
		s.until(s.now+60_000*ms, func() bool {
			if len(s.queue) > 0 && s.queue[0].layer > s.host { // somebody waits for them, after all
				s.host = s.queue[0].layer
				s.note(readAwaited, s.host, 0)
			}
			return len(s.queue) == 0
		})
		require.Empty(t, s.queue, "seed %d: reads were held back for good", seed)
		s.settle()
		require.Zero(t, s.p.reads.left+s.p.reads.flying+s.p.reads.layer, "seed %d", seed)
		for i := range s.p.reads.layers {
			for l, r := range s.p.reads.layers[i] {
				require.Zero(t, r, "seed %d: layer %d", seed, l)
			}
		}
	}
}

// TestEstimate: two of any five samples may be anything.
func TestEstimate(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var e estimate
		truth := 8 * (random.Float64() - 0.5)
		for i := range 40 {
			x := truth + 0.1*(random.Float64()-0.5)
			if i > 2 && i%5 < 2 {
				x = 1000 * (random.Float64() - 0.5)
			}
			e.note(x)
		}
		e.note(math.NaN())
		require.InDelta(t, truth, e.value, 0.2)
	}
}

// TestSchedulerLooksAreFree: the executor asks every round.
func TestSchedulerLooksAreFree(t *testing.T) {
	s, err := NewScheduler(SchedulerConfig{Table: schedTable(t, 900, schedDrives)})
	require.NoError(t, err)
	require.NoError(t, s.Prefill(4096, 65536, 32))
	now := clock()
	l := load{deferred: ioSize{1, 1 << 20}, next: ioSize{1, 1 << 20}, oldest: now}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		now += 1000
		s.note(ioEvent{kind: readQueued, layer: 40, ioSize: ioSize{1, 4096}, at: now})
		s.note(ioEvent{kind: readIssued, layer: 40, ioSize: ioSize{1, 4096}, at: now})
		_ = s.readAhead(now)
		_ = s.writes(now, &l)
		_ = s.harvestBlocks(now)
		s.note(ioEvent{kind: readArrived, layer: 40, ioSize: ioSize{1, 4096}, at: now})
		s.note(ioEvent{kind: readEnded, layer: 40, ioSize: ioSize{1, 4096}, at: now})
	}))
}

// schedEvent is an event of compute's.
type schedEvent struct {
	done  bool
	err   error
	asked int
}

func (e *schedEvent) Query() (bool, error) {
	e.asked++
	return e.done, e.err
}

// TestSchedulerEvents: what is told comes in its order, each when its event has come; and events of the pass before the
// last are left alone.
func TestSchedulerEvents(t *testing.T) {
	s, err := NewScheduler(SchedulerConfig{})
	require.NoError(t, err)
	rung := 0
	s.start(func() { rung++ })
	at := func() (passKind, int) { return s.policy.pass.kind, s.policy.pass.layer }
	want := func(kind passKind, layer int) {
		t.Helper()
		k, l := at()
		require.Equal(t, kind, k)
		require.Equal(t, layer, l)
	}
	require.NoError(t, s.Prefill(64, 0, 4))
	want(passPrefill, 0)
	require.Equal(t, 1, rung)
	var e [6]schedEvent
	s.LayerDone(0, &e[0])
	s.LayerDone(2, nil)
	require.Greater(t, rung, 1, "the executor's thread is to look for events")
	require.True(t, s.look(clock()))
	want(passPrefill, 0)
	e[0].done = true
	require.False(t, s.look(clock()))
	want(passPrefill, 3)

	// The host is a pass ahead of compute: its reads are for the pass to come.
	s.LayerDone(3, &e[1])
	s.EndPass()
	require.NoError(t, s.Prefill(64, 64, 4))
	s.note(ioEvent{kind: readQueued, layer: 3, ioSize: ioSize{1, 4096}, at: clock()})
	require.Zero(t, s.policy.reads.layers[0][3].left)
	want(passPrefill, 3)
	e[1].err = ErrInvalid
	require.False(t, s.look(clock()))
	want(passPrefill, 0)
	require.EqualValues(t, 4096, s.policy.reads.layers[0][3].left)
	require.Zero(t, s.policy.announced)

	s.LayerDone(0, &e[2])
	require.NoError(t, s.DecodeStep(64))
	require.True(t, s.look(clock()))
	asked := e[2].asked
	require.NoError(t, s.DecodeStep(65))
	require.False(t, s.look(clock()))
	require.Equal(t, asked, e[2].asked)
	want(passDecode, 0)
	require.EqualValues(t, 2, s.Stats().DecodeSteps)
	require.Zero(t, s.policy.announced)
}

func TestSchedulerRefuses(t *testing.T) {
	for _, c := range []SchedulerConfig{{Idle: -1}, {MaxAge: -1}, {Table: &slack.Table{}}} {
		_, err := NewScheduler(c)
		require.ErrorIs(t, err, ErrInvalid, "%+v", c)
	}
	s, err := NewScheduler(SchedulerConfig{})
	require.NoError(t, err)
	for _, n := range [][3]int{{0, 0, 1}, {1, -1, 1}, {1, 0, 0}, {1 << 25, 0, 1}, {1, 1 << 25, 1}, {1, 0, 1025}} {
		require.ErrorIs(t, s.Prefill(n[0], n[1], n[2]), ErrInvalid, fmt.Sprint(n))
	}
	require.ErrorIs(t, s.DecodeStep(0), ErrInvalid)
	require.ErrorIs(t, s.DecodeStep(1<<25), ErrInvalid)
	s.LayerDone(3, nil)
	s.EndPass()
	require.Zero(t, s.Stats().Layers)
	require.Empty(t, s.LayerBubbles())
}

// TestSchedulerDecodeConverges: what a step takes is learned however much longer it is than was believed, and however
// long it takes where nothing was; and once it is, nothing in a step passes for idleness. What is between the steps of
// two answers is not learned.
func TestSchedulerDecodeConverges(t *testing.T) {
	table := schedTable(t, 900, schedDrives)
	believed := 16 * schedWindow(900, 1, 4096)
	for name, c := range map[string]struct {
		table *slack.Table
		truth int64
	}{
		"half":        {table, believed / 2},
		"twice":       {table, 2 * believed},
		"7 ms":        {table, 7 * ms},
		"10 ms":       {table, 10 * ms},
		"1 s":         {table, 1000 * ms},
		"none, 4 ms":  {nil, 4 * ms},
		"none, 90 ms": {nil, 90 * ms},
		"none, 110ms": {nil, 110 * ms},
		"none, 3 s":   {nil, 3000 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 1, SchedulerConfig{Table: c.table, MaxAge: time.Hour}, schedDrives)
			step := simPass{decode: true, prefix: 4096, window: c.truth, jitter: 0.05}
			for range 40 {
				s.run(step)
			}
			s.p.decodeStep(s.now, 4096)
			require.InEpsilon(t, c.truth, s.p.pass.window, 0.1)
			s.deferWrite(512 << 20)
			for range 12 {
				s.run(step)
			}
			require.Zero(t, s.p.snapshot(s.now).Issued[CauseIdle])
			for range 8 {
				for range 6 {
					s.run(step)
				}
				s.until(s.now+10*c.truth+1000*ms, nil) // nobody says that the answer has ended
			}
			s.p.decodeStep(s.now, 4096)
			require.InEpsilon(t, c.truth, s.p.pass.window, 0.1)
		})
	}
}

// TestSchedulerDecodeMixed: steps of two kinds, of which one takes thirty times as long: after the first long one the
// others are not taken for idleness, while what is usual is what it was.
func TestSchedulerDecodeMixed(t *testing.T) {
	s := newSim(t, 1, SchedulerConfig{MaxAge: time.Hour}, schedDrives)
	short := simPass{decode: true, prefix: 4096, window: 10 * ms}
	long := short
	long.window *= 30
	for range 20 {
		s.run(short)
	}
	s.run(long)
	s.deferWrite(900 << 20)
	for range 4 {
		s.run(short, long, short)
	}
	require.InEpsilon(t, 10*ms, s.p.pass.window, 0.1)
	require.Zero(t, s.p.snapshot(s.now).Issued[CauseIdle])
	s.until(s.now+1000*ms, nil)
	require.NotZero(t, s.p.snapshot(s.now).Issued[CauseIdle], "the last one is over some time")

	// An end that is told late says nothing.
	for range 20 {
		s.run(short, short)
		s.until(s.now+3000*ms, nil)
		s.p.endPass(s.now)
	}
	s.p.decodeStep(s.now, 4096)
	require.InEpsilon(t, 10*ms, s.p.pass.window, 0.1)
}

// TestSchedulerDecodePauses: what is between two answers is no step, however few steps an answer has: the last one is
// over as soon as ever, where nobody says that it is, and reads are paced by nothing then.
func TestSchedulerDecodePauses(t *testing.T) {
	for _, steps := range []int{3, 5, 20} {
		t.Run(fmt.Sprint(steps), func(t *testing.T) {
			s := newSim(t, 1, SchedulerConfig{}, schedDrives)
			for answer := range 12 {
				for range steps {
					s.run(simPass{decode: true, prefix: 4096, window: 10 * ms, jitter: 0.1})
				}
				s.deferWrite(64 << 20)
				s.until(s.now+stepOver+50*ms, nil)
				if answer > 1 {
					require.InEpsilon(t, 10*ms, s.p.pass.window, 0.2)
				}
				require.NotZero(t, s.p.snapshot(s.now).Issued[CauseIdle], "answer %d", answer)
				require.Zero(t, len(s.buffer), "answer %d", answer)
				require.EqualValues(t, uint64(math.MaxUint64), s.p.readAhead(s.now))
				s.until(s.now+60_000*ms, nil)
			}
		})
	}
}

// TestSchedulerDecodeLong: steps that take longer than writes ever wait are learned as well: after the first few, none
// is taken for the last one.
func TestSchedulerDecodeLong(t *testing.T) {
	for name, table := range map[string]*slack.Table{"none": nil, "0.5 ms": schedTable(t, 900, schedDrives)} {
		t.Run(name, func(t *testing.T) {
			const truth = 3000 * ms
			s := newSim(t, 1, SchedulerConfig{Table: table}, schedDrives)
			for i := range 30 {
				s.p.decodeStep(s.now, 4096)
				s.until(s.now+truth, nil)
				s.p.account(s.now)
				require.True(t, s.p.pass.kind == passDecode || i < 12, "step %d, of %d ms", i, s.p.pass.window/ms)
			}
			require.InEpsilon(t, truth, s.p.pass.window, 0.1)
		})
	}
}

// TestSchedulerDecodeEnds: what is granted for a decode step ends in it: less is left of a step that has gone on for a
// while, or beside what is in flight.
func TestSchedulerDecodeEnds(t *testing.T) {
	const truth = 4 * ms
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	for range 10 {
		s.run(simPass{decode: true, prefix: 4096, window: truth})
	}
	s.p.decodeStep(s.now, 4096)
	begun := s.now
	granted := func(writing uint64) int64 {
		l := load{deferred: ioSize{64, 64 << 20}, next: ioSize{1, 1 << 20}, writing: ioSize{1, writing}, oldest: s.now}
		return int64(s.p.writes(s.now, &l).bytes)
	}
	whole := granted(0)
	require.Equal(t, s.p.share(slack.Write, s.p.pass.window).Bytes, whole)
	require.Equal(t, whole-1<<20, granted(1<<20))
	require.Zero(t, granted(40<<20))
	s.now = begun + s.p.pass.window/2
	require.Less(t, granted(0), whole/2)
	s.now = begun + s.p.pass.window*9/10
	require.LessOrEqual(t, s.p.write.takes(granted(0)), s.p.pass.window/10)
	require.Zero(t, granted(2<<20))
	s.now = begun + s.p.pass.window
	require.Zero(t, granted(0))
}

// TestSchedulerLastLayerOnly: a pass may be told by its last layer alone: all before it are done with it.
func TestSchedulerLastLayerOnly(t *testing.T) {
	const layers, window = 32, ms
	s := newSim(t, 1, SchedulerConfig{}, schedDrives)
	for range 8 {
		s.p.prefill(s.now, 4096, 0, layers)
		s.until(s.now+layers*window, nil)
		s.p.layerDone(s.now, layers-1)
		require.Equal(t, passNone, s.p.pass.kind)
	}
	require.EqualValues(t, 8*layers, s.p.snapshot(s.now).Layers)
	learned, sure := s.p.windows.layer(4096, 0)
	require.True(t, sure)
	require.InEpsilon(t, window, learned, 0.01)

	// What is told later layer by layer begins with the first one.
	s.run(simPass{input: 4096, layers: layers, window: window})
	require.EqualValues(t, 9*layers, s.p.snapshot(s.now).Layers)

	// A later stage of a pipeline is known by what it reads.
	s = newSim(t, 1, SchedulerConfig{}, schedDrives)
	for range 8 {
		s.p.prefill(s.now, 4096, 4096, layers)
		for l := layers / 2; l < layers; l++ {
			s.read(l, 64<<10)
		}
		s.until(s.now+60_000*ms, func() bool { return len(s.queue) == 0 })
		s.until(s.now+layers/2*window, nil)
		s.p.layerDone(s.now, layers-1)
	}
	require.EqualValues(t, 8*layers/2, s.p.snapshot(s.now).Layers)
	learned, sure = s.p.windows.layer(4096, 4096)
	require.True(t, sure)
	require.InEpsilon(t, window, learned, 0.1)
}

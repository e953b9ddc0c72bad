package slack

import (
	"math"
	"math/rand/v2"
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// facts are an H200's with the paper's pair of drives.
func facts() IO {
	return IO{
		BytesPerToken: 4096, ObjectBytes: 256 << 10,
		Read:  Direction{RingBytesPerSecond: 50e9, DrivesBytesPerSecond: 29e9, LatencyUS: 380},
		Write: Direction{RingBytesPerSecond: 50e9, DrivesBytesPerSecond: 12e9, LatencyUS: 290},
		Harvest: Harvest{SMs: 132, SMShareMax: 0.0125, LaunchBytes: 64 << 20,
			Grids: []Grid{{8, 265e9}, {16, 447e9}, {32, 573e9}}},
	}
}

func fingerprint() Fingerprint {
	return Fingerprint{
		Model: Model{Name: "llama3-8b", Layers: 32, TensorParallel: 1, BlockTokens: 64,
			Shape: Shape{Heads: 32, KVHeads: 8, HeadSize: 128, Hidden: 4096, FFN: 14336, DType: "bf16"}},
		Machine: Machine{GPU: "NVIDIA H200", Driver: "580.159.04", PCIe: "32.0 GT/s x16", CPU: "a CPU",
			Drives: []string{"paper", "paper"}},
	}
}

// table has the times that were measured on an H200, and their neighbours.
func table(t testing.TB) *Table {
	t.Helper()
	x := &Table{Version: Version, Fingerprint: fingerprint(), Source: Measured, MeasuringSeconds: 12.5,
		MakingSeconds: 0.001, IO: facts()}
	lowered, err := x.SetWindows([]LayerTime{
		{4096, 61440, 15700 * time.Microsecond}, {1024, 61440, 4600 * time.Microsecond},
		{4096, 0, 3200 * time.Microsecond}, {1024, 0, 800 * time.Microsecond},
	})
	require.NoError(t, err)
	require.Zero(t, lowered)
	return x
}

// randomFacts are of any machine that Validate lets pass.
func randomFacts(r *rand.Rand) IO {
	log := func(low, high float64) float64 { return low * math.Pow(high/low, r.Float64()) }
	direction := func() Direction {
		d := Direction{RingBytesPerSecond: log(1e8, 1e12), LatencyUS: log(0.1, 1e5)}
		if r.IntN(2) == 0 {
			d.DrivesBytesPerSecond = log(1e5, 1e12)
		}
		return d
	}
	io := IO{BytesPerToken: int64(log(1, 1e6)), ObjectBytes: int64(log(512, 1<<21)), Read: direction(),
		Write: direction(), Harvest: Harvest{SMs: 200, SMShareMax: log(1e-4, 1), LaunchBytes: int64(log(1, 1<<30))}}
	for blocks := 1 + r.IntN(8); blocks <= 200 && len(io.Harvest.Grids) < GridsMax; blocks += 1 + r.IntN(40) {
		io.Harvest.Grids = append(io.Harvest.Grids, Grid{blocks, log(1e9, 1e12)})
	}
	return io
}

// What a budget allows ends within the window and its harvest within its SMs; it is all that does with any grid but for
// one part in gridSpare, and no smaller grid brings as much.
func TestBudgetFitsAndIsTheMost(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		io := randomFacts(r)
		require.NoError(t, io.Validate())
		window := time.Duration(1e3 * math.Pow(6e7, r.Float64()))
		b := io.Budget(window)
		for way, s := range []Share{b.Read, b.Write} {
			way := Way(way)
			require.EqualValues(t, int64(s.Objects)*io.ObjectBytes, s.Bytes)
			require.LessOrEqual(t, io.Time(way, s), window)
			d := io.direction(way)
			require.LessOrEqual(t, float64(s.Bytes), d.RingBytesPerSecond*window.Seconds())
			if d.DrivesBytesPerSecond > 0 {
				require.LessOrEqual(t, float64(s.Bytes), d.DrivesBytesPerSecond*window.Seconds())
			}
			require.Equal(t, s.Objects == 0, s.Blocks == 0)
			for i := range io.Harvest.Grids {
				g := &io.Harvest.Grids[i]
				more := s.Objects + s.Objects/(gridSpare-1) + 1 // the least of which a part is more than there is
				require.False(t, more <= objectsMax && io.fits(way, more, g, window))
				if g.Blocks == s.Blocks {
					require.True(t, io.fits(way, s.Objects, g, window))
				} else if g.Blocks < s.Blocks {
					require.False(t, io.fits(way, s.Objects, g, window), "a smaller grid would do")
				}
			}
		}
	}
}

// A longer window has no smaller budget, and what reads leave is less than the whole.
func TestBudgetGrowsWithTheWindow(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 40 {
		io := randomFacts(r)
		before := Budget{}
		for window := time.Microsecond; window < WindowMax; window = window*9/7 + 1 {
			b := io.Budget(window)
			require.GreaterOrEqual(t, b.Read.Objects, before.Read.Objects)
			require.GreaterOrEqual(t, b.Write.Objects, before.Write.Objects)
			rest := io.Budget(window - io.Time(Read, b.Read))
			require.LessOrEqual(t, rest.Write.Objects, b.Write.Objects)
			before = b
		}
	}
}

func TestBudgetByHand(t *testing.T) {
	io := facts()
	require.Zero(t, io.Budget(0))
	require.Zero(t, io.Budget(-time.Second))
	require.Zero(t, io.Budget(380*time.Microsecond).Read, "the latency alone")
	require.Zero(t, io.Time(Read, Share{}))
	// 0.38 ms + 240 objects of 256 KiB at 29 GB/s + 60 MiB at 265 GB/s, in nanoseconds and rounded up.
	bytes := 240.0 * (256 << 10)
	want := time.Duration(math.Ceil(380e3 + bytes/29 + bytes/265))
	require.Equal(t, want, io.Time(Read, Share{Objects: 240, Blocks: 8}))
	require.Equal(t, want, io.Time(Read, Share{Objects: 240, Blocks: 7}), "an unknown grid counts as the slowest")
	require.GreaterOrEqual(t, io.Budget(want).Read.Objects, 240-240/gridSpare)
	require.Equal(t, 16, io.Objects(1024))
	require.Equal(t, 17, io.Objects(1025))
	require.Zero(t, io.Objects(0))
	// At the link's rate 8 blocks, half an SM each, take 0.57 % of the SMs, and 16 take 0.68.
	io.Read.DrivesBytesPerSecond, io.Harvest.SMShareMax = 0, 0.006
	require.Equal(t, 8, io.Budget(100*time.Millisecond).Read.Blocks)
	// Absurd facts saturate.
	io.Read.RingBytesPerSecond = 1e5
	require.Positive(t, io.Time(Read, Share{Objects: math.MaxInt, Blocks: 8}))
}

// The grid is the smallest whose harvest keeps up with what the window's I/O brings, within a few per cent: what a
// larger one saves at the end of the last harvest is little of a long window, and more of a short one.
func TestBudgetTakesTheSmallestGrid(t *testing.T) {
	for name, c := range map[string]struct {
		drives float64
		grids  map[time.Duration]int
	}{
		"the link alone": {0, map[time.Duration]int{
			time.Millisecond: 16, 2 * time.Millisecond: 16, 4 * time.Millisecond: 16, 6 * time.Millisecond: 8,
			15700 * time.Microsecond: 8}},
		"29 GB/s": {29e9, map[time.Duration]int{
			time.Millisecond: 16, 4 * time.Millisecond: 16, 6 * time.Millisecond: 8, 50 * time.Millisecond: 8}},
		"a harvest that is no faster than its I/O": {200e9, map[time.Duration]int{
			time.Millisecond: 32, 4 * time.Millisecond: 16, 15 * time.Millisecond: 8}},
	} {
		io := facts()
		io.Read.LatencyUS, io.Read.DrivesBytesPerSecond = 250, c.drives
		if c.drives > io.Read.RingBytesPerSecond {
			io.Read.RingBytesPerSecond = c.drives
		}
		io.Harvest.Grids = []Grid{{8, 235e9}, {16, 429e9}, {32, 704e9}}
		io.Harvest.SMShareMax = 1
		for window, blocks := range c.grids {
			s := io.Budget(window).Read
			require.Equal(t, blocks, s.Blocks, "%s, %v", name, window)
			largest := sort.Search(objectsMax, func(n int) bool { return !io.fits(Read, n+1, &io.Harvest.Grids[2], window) })
			require.GreaterOrEqual(t, s.Objects, largest-largest/gridSpare)
		}
	}
}

func TestLookup(t *testing.T) {
	x := table(t)
	for i, input := range x.Inputs {
		for j, prefix := range x.Prefixes {
			e := x.Lookup(input, prefix)
			require.EqualValues(t, x.WindowNS[i][j], e.Window)
			require.False(t, e.Extrapolated)
			require.Equal(t, x.IO.Budget(e.Window), e.Budget)
		}
	}
	e := x.Lookup(2560, 30720) // in the middle of all four
	require.Equal(t, (15700+4600+3200+800)*time.Microsecond/4, e.Window)
	for _, c := range []struct{ input, prefix, asInput, asPrefix int }{
		{1, 0, 1024, 0}, {-5, -5, 1024, 0}, {4097, 0, 4096, 0}, {1024, 61441, 1024, 61440},
		{math.MaxInt, math.MaxInt, 4096, 61440}, {math.MinInt, math.MaxInt, 1024, 61440},
	} {
		window, extrapolated := x.Window(c.input, c.prefix)
		inside, _ := x.Window(c.asInput, c.asPrefix)
		require.True(t, extrapolated, c)
		require.Equal(t, inside, window, c)
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { e = x.Lookup(2000, 2000) }))
}

// randomTable has any axes, and windows up to the bound.
func randomTable(t *testing.T, r *rand.Rand) *Table {
	x := &Table{Version: Version, Fingerprint: fingerprint(), Source: Estimated, IO: facts()}
	axis := func(least int) (all []int) {
		for n := least + r.IntN(100); len(all) == 0 || n <= LengthMax && len(all) < 1+r.IntN(8); {
			all = append(all, n)
			n = n*2 + 1 + r.IntN(LengthMax/9)
		}
		return all
	}
	var times []LayerTime
	inputs, prefixes := axis(1), axis(0)
	for _, input := range inputs {
		for _, prefix := range prefixes {
			window := WindowMin + time.Duration(r.Int64N(int64(WindowMax-WindowMin)+1))
			times = append(times, LayerTime{input, prefix, window})
		}
	}
	r.Shuffle(len(times), func(i, j int) { times[i], times[j] = times[j], times[i] })
	lowered, err := x.SetWindows(times)
	require.NoError(t, err)
	require.NoError(t, x.Validate())
	most := 0.0
	for _, l := range times {
		window, _ := x.Window(l.Input, l.Prefix)
		require.LessOrEqual(t, window, l.Window, "no window is longer than measured")
		most = max(most, 1-float64(window)/float64(l.Window))
	}
	require.InDelta(t, most, lowered, 1e-12)
	return x
}

// Interpolation is monotone, exact at the table's lengths, and between its neighbours everywhere else.
func TestInterpolation(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 100 {
		x := randomTable(t, r)
		for range 50 {
			input, prefix := 1+r.IntN(LengthMax), r.IntN(LengthMax)
			window, _ := x.Window(input, prefix)
			longer, _ := x.Window(input+r.IntN(1000), prefix+r.IntN(1000))
			require.GreaterOrEqual(t, longer, window)
			i, _, _, _ := place(x.Inputs, input)
			j, _, _, _ := place(x.Prefixes, prefix)
			require.GreaterOrEqual(t, int64(window), x.WindowNS[i][j])
			next := x.WindowNS[min(i+1, len(x.Inputs)-1)][min(j+1, len(x.Prefixes)-1)]
			require.LessOrEqual(t, int64(window), next)
		}
		for i, input := range x.Inputs {
			for j, prefix := range x.Prefixes {
				window, extrapolated := x.Window(input, prefix)
				require.EqualValues(t, x.WindowNS[i][j], window)
				require.False(t, extrapolated)
			}
		}
	}
}

// Of measurements that scatter, the least of more tokens counts.
func TestSetWindowsLowers(t *testing.T) {
	var x Table
	lowered, err := x.SetWindows([]LayerTime{{1, 0, 50e3}, {2, 0, 40e3}, {1, 8, 60e3}, {2, 8, 45e3}})
	require.NoError(t, err)
	require.Equal(t, [][]int64{{40e3, 45e3}, {40e3, 45e3}}, x.WindowNS)
	require.InDelta(t, 0.25, lowered, 1e-12)
}

func TestSetWindowsRefuses(t *testing.T) {
	var many []LayerTime
	for i := range LengthsMax + 1 {
		many = append(many, LayerTime{i + 1, 0, time.Second})
	}
	for says, times := range map[string][]LayerTime{
		"0 layer times":         nil,
		"given twice":           {{1, 0, 1e6}, {1, 0, 1e6}},
		"input 2 with prefix 0": {{1, 0, 1e6}, {1, 8, 1e6}, {2, 8, 1e6}},
		"want 2 inputs x 2":     {{1, 0, 1e6}, {1, 8, 1e6}, {2, 0, 1e6}},
		"inputs: 0":             {{0, 0, 1e6}},
		"prefixes: -1":          {{1, -1, 1e6}},
		"window of 0s":          {{1, 0, 0}},
		"window of 1m1s":        {{1, 0, 61e9}},
		"65 inputs":             many,
	} {
		var x Table
		_, err := x.SetWindows(times)
		require.ErrorIs(t, err, ErrTable, says)
		require.ErrorContains(t, err, says)
	}
}

// The estimate is of the right size where layers were measured, with the rates that those reached.
func TestEstimate(t *testing.T) {
	m := fingerprint().Model
	at := func(flops float64, input, prefix int) float64 {
		d, err := m.Estimate(Rates{flops, 4e12}, 2, input, prefix)
		require.NoError(t, err)
		return d.Seconds() * 1e3
	}
	require.InEpsilon(t, 105, at(607e12, 65536, 0), 0.02)
	require.InEpsilon(t, 15.7, at(385e12, 4096, 61440), 0.02)
	require.InEpsilon(t, 3.1, at(250e12, 512, 65024), 0.02)
	// A decode step reads weights and cache: 2 bytes of 218,103,808 weights, 4096 bytes of 1001 tokens.
	require.InEpsilon(t, 1e3*(2*218103808+4096*1001)/4e12, at(600e12, 1, 1000), 1e-5)
	whole := at(600e12, 4096, 0)
	m.TensorParallel = 2
	require.InEpsilon(t, whole/2, at(600e12, 4096, 0), 1e-5)

	all, err := m.EstimateAll(Rates{600e12, 4e12}, 2, []int{1, 512, 4096}, []int{0, 1024})
	require.NoError(t, err)
	var x Table
	lowered, err := x.SetWindows(all)
	require.NoError(t, err)
	require.Zero(t, lowered, "estimates are monotone")

	_, err = m.EstimateAll(Rates{math.NaN(), 4e12}, 2, []int{1}, []int{0})
	require.ErrorIs(t, err, ErrEstimate)
	_, err = m.Estimate(Rates{1e6, 4e12}, 2, 4096, 0)
	require.ErrorContains(t, err, "s a layer")
	m.FFN = 0
	_, err = m.Estimate(Rates{600e12, 4e12}, 2, 1, 0)
	require.ErrorContains(t, err, "no dense model")
}

package drivemodel

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const second = int64(time.Second)

// served is one command of a run in virtual time.
type servedInTest struct {
	at, served, done int64
	write            bool
	bytes            uint32
}

// closedLoop keeps commands in flight for a time, each replaced at its completion: readers and writers of them.
func closedLoop(m *Medium, readers, writers int, bytes uint32, duration int64) (out []servedInTest) {
	type actor struct {
		next  int64
		write bool
	}
	var actors []actor
	for i := range readers + writers {
		actors = append(actors, actor{0, i >= readers})
	}
	for {
		a := &actors[0]
		for i := range actors {
			if actors[i].next < a.next {
				a = &actors[i]
			}
		}
		if a.next >= duration {
			return out
		}
		at := a.next
		s, d := m.serve(at, a.write, bytes)
		out = append(out, servedInTest{at, s, d, a.write, bytes})
		a.next = d
	}
}

// rates are bytes a second of what completed within the run.
func rates(run []servedInTest, duration int64) (read, write float64) {
	for _, c := range run {
		switch {
		case c.done > duration:
		case c.write:
			write += float64(c.bytes)
		default:
			read += float64(c.bytes)
		}
	}
	scale := float64(second) / float64(duration)
	return read * scale, write * scale
}

// All shipped profiles give their bandwidth within 1 %, alone and mixed, at sizes of objects and enough depth.
func TestBandwidthIsTheProfiles(t *testing.T) {
	for _, name := range Names() {
		p, _ := Shipped(name)
		for _, bytes := range []uint32{32 << 10, 64 << 10, 128 << 10, 2 << 20} {
			duration := second / 10
			if p.CommandsInService > 0 {
				duration = second
			}
			r, w := rates(closedLoop(NewMedium(p, 1), 64, 0, bytes, duration), duration)
			require.Zero(t, w)
			slack := 64 * float64(bytes) * float64(second) / float64(duration) // what is still on its way at the end
			require.InDelta(t, p.RateAt(0, int(bytes)), r, 0.01*r+slack, "%s reads of %d", name, bytes)
			r, w = rates(closedLoop(NewMedium(p, 1), 0, 64, bytes, duration), duration)
			require.Zero(t, r)
			require.InDelta(t, p.RateAt(1, int(bytes)), w, 0.01*w+slack, "%s writes of %d", name, bytes)
		}
		for _, bytes := range []uint32{32 << 10, 64 << 10} {
			r, w := rates(closedLoop(NewMedium(p, 1), 64, 64, bytes, second), second)
			require.InDelta(t, 0.5, w/(r+w), 0.03, name)
			require.InDelta(t, 1, (r+w)/p.RateAt(w/(r+w), int(bytes)), 0.02, "%s mixed", name)
		}
	}
}

// Rates are exact where a command takes less than a hundred nanoseconds, too.
func TestFastDrive(t *testing.T) {
	for _, bytes := range []uint32{4096, 64 << 10} {
		p := &Profile{Version: Version, Name: "x", Of: "y", Read: &Direction{BytesPerSecond: 50_000_000_000,
			Latency: Latency{10, 20, 30, 40, 50, 60}}}
		require.NoError(t, p.Validate())
		r, _ := rates(closedLoop(NewMedium(p, 1), 512, 0, bytes, second/100), second/100)
		require.InEpsilon(t, 50e9, r, 0.01)
	}
}

func testProfile(r *rand.Rand) *Profile {
	direction := func() *Direction {
		d := &Direction{BytesPerSecond: 1e8 + r.Int64N(5e10)}
		if r.IntN(2) == 0 {
			d.CommandsPerSecond = 1000 + r.Int64N(1e6)
		}
		low := r.Float64() * 100
		d.Latency = Latency{low, 2 * low, 3 * low, 4 * low, 10 * low, 20 * low}
		return d
	}
	p := &Profile{Version: Version, Name: "x", Of: "y", Read: direction(), Write: direction()}
	if r.IntN(2) == 0 {
		p.CommandsInService = 1 + r.IntN(64)
	}
	if r.IntN(3) > 0 {
		p.Mixed = &Mixed{WindowUS: float64(r.IntN(1000))}
		for x := 1 + r.Float64()*20; x < 100; x += 5 + r.Float64()*30 {
			p.Mixed.Points = append(p.Mixed.Points, MixedPoint{x, 1e8 + r.Int64N(1e10)})
		}
	}
	return p
}

// arrivals are random bursts and gaps of commands of random sizes.
func arrivals(m *Medium, r *rand.Rand, n int) (out []servedInTest) {
	at := int64(0)
	for range n {
		if r.IntN(20) == 0 {
			at += r.Int64N(2_000_000)
		} else {
			at += r.Int64N(2000)
		}
		c := servedInTest{at: at, write: r.IntN(3) == 0, bytes: 4096 * uint32(1+r.IntN(512))}
		c.served, c.done = m.serve(at, c.write, c.bytes)
		out = append(out, c)
	}
	return out
}

// Over no window whatever does the medium serve more than its bandwidth, nor more commands than it may.
func TestNeverFaster(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 7))
		p := testProfile(r)
		require.NoError(t, p.Validate())
		fastest := math.Inf(1)
		for share := 0.0; share <= 1; share += 1.0 / 256 {
			fastest = min(fastest, p.nsPerByte(share))
		}
		if p.Mixed != nil {
			for _, x := range p.Mixed.Points {
				fastest = min(fastest, p.nsPerByte(x.WritePercent/100))
			}
		}
		run := arrivals(NewMedium(p, seed), r, 3000)
		// With the service of each command taken as the interval before it was served, the worst window begins and ends
		// with commands: sums of least times since the last rest must fit everywhere.
		rest, sum := run[0].at, 0.0
		for i, c := range run {
			if i > 0 && c.at > run[i-1].served {
				rest, sum = c.at, 0
			}
			d := p.Read
			if c.write {
				d = p.Write
			}
			least := fastest * float64(c.bytes)
			if d.CommandsPerSecond > 0 {
				least = max(least, 1e9/float64(d.CommandsPerSecond))
			}
			sum += least
			require.GreaterOrEqual(t, float64(c.served-rest)+1, sum, "seed %d, command %d", seed, i)
			if i > 0 {
				require.GreaterOrEqual(t, float64(c.served-run[i-1].served)+1, least, "one at a time")
			}
		}
	}
}

// The medium rests only while no command is in service.
func TestWorkConserving(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 9))
		p := testProfile(r)
		run := arrivals(NewMedium(p, seed), r, 3000)
		var done []int64 // completions so far, in order
		last := int64(0)
		for i, c := range run {
			begin := c.at
			if n := p.CommandsInService; n > 0 && len(done) >= n {
				begin = max(begin, done[len(done)-n]) // when one of the places is free
			}
			direction := p.Read
			if c.write {
				direction = p.Write
			}
			most := float64(c.bytes) / slowest(p)
			if direction.CommandsPerSecond > 0 {
				most = max(most, 1e9/float64(direction.CommandsPerSecond))
			}
			require.LessOrEqual(t, float64(c.served), float64(max(begin, last))+most+1, "seed %d, command %d", seed, i)
			require.GreaterOrEqual(t, c.served, max(begin, last), "not before its service began")
			last = c.served
			at, _ := slices.BinarySearch(done, c.done)
			done = slices.Insert(done, at, c.done)
		}
	}
}

// slowest is the least bandwidth of any mixture, in bytes a nanosecond.
func slowest(p *Profile) float64 {
	s := min(p.BytesPerSecond(0), p.BytesPerSecond(1))
	if p.Mixed != nil {
		for _, x := range p.Mixed.Points {
			s = min(s, float64(x.BytesPerSecond))
		}
	}
	return s / 1e9
}

// No more commands are in service than the profile has places, and one more waits for the first that completes.
func TestCommandsInService(t *testing.T) {
	p := &Profile{Version: Version, Name: "x", Of: "y", CommandsInService: 4,
		Read: &Direction{BytesPerSecond: 1e12, Latency: Latency{100, 100, 100, 100, 100, 100}}}
	require.NoError(t, p.Validate())
	duration := second / 10
	r, _ := rates(closedLoop(NewMedium(p, 0), 32, 0, 4096, duration), duration)
	require.InDelta(t, 40_000*4096, r, 0.01*r, "four at a time, each for 100 us")
	p.CommandsInService = 0
	r, _ = rates(closedLoop(NewMedium(p, 0), 32, 0, 4096, duration), duration)
	require.InDelta(t, 320_000*4096, r, 0.01*r)
}

// One command at a time takes its bytes' time and a latency; quantiles come out as they are in the profile.
func TestLatencyQuantiles(t *testing.T) {
	for _, name := range Names() {
		p, _ := Shipped(name)
		for _, write := range []bool{false, true} {
			m, d := NewMedium(p, 3), p.Read
			if write {
				d = p.Write
			}
			const n, bytes = 200_000, 64 << 10
			transfer := max(int64(bytes*1e9/float64(d.BytesPerSecond)), 1e9/max(d.CommandsPerSecond, 1))
			if d.CommandsPerSecond == 0 {
				transfer = int64(bytes * 1e9 / float64(d.BytesPerSecond))
			}
			var all []int64
			at := int64(0)
			for range n {
				_, done := m.serve(at, write, bytes)
				all = append(all, done-at-transfer)
				at = done
			}
			slices.Sort(all)
			want := d.Latency.quantiles()
			for i, q := range quantilePlaces {
				got := float64(all[min(int(q*n), n-1)]) / 1e3
				tolerance := 0.05*want[i] + 0.01
				if q == 0.999 || q == 1 {
					tolerance = 0.2 * want[i] // 200 samples lie beyond the first, and none need be near the end
				}
				require.InDelta(t, want[i], got, tolerance, "%s, write %v, quantile %v", name, write, q)
			}
		}
	}
}

func TestSeeds(t *testing.T) {
	p, _ := Shipped("paper")
	run := func(seed uint64) []servedInTest { return closedLoop(NewMedium(p, seed), 3, 3, 65536, second/1000) }
	require.Equal(t, run(1), run(1))
	require.NotEqual(t, run(1), run(2))
}

// Reads get all of the drive again as soon as the last write has left the window, and not before.
func TestCollapseEnds(t *testing.T) {
	p, _ := Shipped("paper")
	m := NewMedium(p, 0)
	read := func(at int64) float64 {
		before := max(m.free, at)
		served, _ := m.serve(at, false, 65536)
		return 65536 / float64(served-before) // GB/s
	}
	require.InDelta(t, 14.5, read(0), 0.01)
	m.serve(10_000, true, 1<<20)
	end := m.free
	require.Less(t, read(20_000), 6.1)
	require.Less(t, read(end), 6.1)
	require.InDelta(t, 14.5, read(end+201_000), 0.01)
}

func TestOldTimesAreHarmless(t *testing.T) {
	p, _ := Shipped("paper")
	m := NewMedium(p, 0)
	now := time.Unix(1000, 0)
	first := m.Serve(now, false, 65536)
	require.True(t, first.After(now))
	require.True(t, m.Serve(now.Add(-time.Second), false, 65536).After(now), "a poller that looked at its clock earlier")
	require.Same(t, p, m.Profile())
}

func TestServeDoesNotAllocate(t *testing.T) {
	p, _ := Shipped("cloud")
	m := NewMedium(p, 0)
	now := time.Unix(1000, 0)
	step := func() { now = m.Serve(now, false, 65536) }
	for range 100 {
		step()
	}
	require.Zero(t, testing.AllocsPerRun(1000, step))
}

func BenchmarkServe(b *testing.B) {
	p, _ := Shipped("paper")
	m := NewMedium(p, 0)
	now := time.Unix(1000, 0)
	for b.Loop() {
		now = now.Add(5 * time.Microsecond)
		m.Serve(now, false, 65536)
	}
}

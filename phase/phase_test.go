package phase_test

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/phase"
)

// clock is a virtual one.
type clock struct{ now time.Time }

func (c *clock) after(d time.Duration) time.Time {
	c.now = c.now.Add(d)
	return c.now
}

const (
	nap  = 50 * time.Microsecond
	long = time.Minute
)

func start(o phase.Options) (*phase.Token, *clock) { return phase.New(o), &clock{time.Now()} }

// step asks once, begins one command if it may, and settles.
func step(h *phase.Holder, d phase.Direction, now time.Time) bool {
	ok := h.Enter(d, now)
	if ok {
		h.Begin(d, 4096)
	}
	h.Settle(now)
	return ok
}

func end(h *phase.Holder, d phase.Direction, now time.Time) {
	h.End(d, 4096)
	h.Settle(now)
}

func TestOptions(t *testing.T) {
	require.NoError(t, phase.Options{}.Validate())
	o := phase.Options{}.WithDefaults()
	require.Equal(t, phase.PatienceDefault, o.Patience)
	require.Equal(t, o, phase.New(phase.Options{}).Options())
	for _, bad := range []phase.Options{
		{Patience: 1}, {Patience: 3 * time.Second}, {Metadata: 1}, {Metadata: time.Hour}, {Turn: 1}, {Turn: time.Hour},
		{Quiet: 1}, {Quiet: time.Second}, {Patience: time.Second, Stuck: time.Second}, {Patience: -1},
	} {
		require.Error(t, bad.Validate(), "%+v", bad)
	}
}

func TestReadsGoFirst(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.True(t, step(w, phase.Write, c.now))
	require.False(t, step(r, phase.Read, c.after(nap)))
	require.False(t, w.Enter(phase.Write, c.after(nap)), "a read is wanted")
	require.Equal(t, [2]int{1, 1}, token.Stats(c.now).Wanting)
	end(w, phase.Write, c.after(nap))
	require.True(t, step(r, phase.Read, c.after(nap)))
	require.False(t, step(w, phase.Write, c.after(nap)))
	end(r, phase.Read, c.after(nap))
	require.False(t, step(w, phase.Write, c.after(phase.QuietDefault-time.Microsecond)), "not quiet for long enough")
	require.True(t, step(w, phase.Write, c.after(time.Microsecond)))
	s := token.Stats(c.now)
	require.Equal(t, uint64(3), s.Switches)
	require.Equal(t, [2]uint64{1, 1}, s.Waits)
	require.Equal(t, 2*nap, s.Waited[phase.Read]-nap)
	require.Zero(t, s.Mixed+s.Turns+s.Stuck)
}

func TestATurn(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.True(t, step(r, phase.Read, c.now))
	require.False(t, step(w, phase.Write, c.after(nap)))
	require.True(t, step(r, phase.Read, c.after(phase.PatienceDefault-nap)))
	require.False(t, step(w, phase.Write, c.after(nap)), "reads are in flight; the turn is demanded")
	require.Equal(t, uint64(1), token.Stats(c.now).Turns)
	require.False(t, r.Enter(phase.Read, c.after(nap)), "no read begins any more")
	end(r, phase.Read, c.after(nap))
	r.End(phase.Read, 4096)
	require.False(t, r.Enter(phase.Read, c.now))
	r.Settle(c.now)
	require.True(t, step(w, phase.Write, c.after(nap)), "no quiet time is asked of a turn")
	begun := c.now
	for range 20 {
		require.False(t, step(r, phase.Read, c.after(nap)))
		require.True(t, step(w, phase.Write, c.now), "all the turn long")
	}
	c.now = begun
	require.False(t, w.Enter(phase.Write, c.after(phase.TurnDefault)), "it is over")
	require.False(t, step(r, phase.Read, c.now))
	for range 21 {
		w.End(phase.Write, 4096)
	}
	w.Settle(c.after(nap))
	require.True(t, step(r, phase.Read, c.now))
	lost := c.now.Sub(begun)
	// Reads have the drive for 36 times as long as they had to wait at least, however impatient writes are.
	require.False(t, step(w, phase.Write, c.now))
	require.False(t, step(w, phase.Write, c.after(phase.PatienceDefault)))
	require.Equal(t, phase.PatienceDefault > 37*lost, token.Stats(c.now).Turns == 2)
}

// A turn in which nobody wrote cost reads nothing before it was demanded: one that had waited for something else by
// then does not put off the next turn.
func TestATurnThatIsNotUsedCostsWhatItLasted(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	r, w, other := token.Holder(phase.Data), token.Holder(phase.Data), token.Holder(phase.Data)
	scrub := token.Holder(phase.Background)
	require.True(t, step(other, phase.Read, c.now))
	require.False(t, step(w, phase.Write, c.after(nap)))
	require.False(t, step(scrub, phase.Read, c.now), "it gives way to the write")
	for range 3 {
		require.False(t, step(w, phase.Write, c.after(50*time.Millisecond)))
		require.False(t, step(scrub, phase.Read, c.now))
	}
	require.False(t, step(w, phase.Write, c.after(50*time.Millisecond)))
	require.Equal(t, uint64(1), token.Stats(c.now).Turns)
	require.False(t, step(scrub, phase.Read, c.now))
	w.Close(c.after(nap))
	require.True(t, step(scrub, phase.Read, c.now), "the turn is over, and what it cost is reckoned")
	w = token.Holder(phase.Data)
	require.False(t, step(w, phase.Write, c.now))
	require.False(t, step(w, phase.Write, c.after(phase.PatienceDefault)))
	require.Equal(t, uint64(2), token.Stats(c.now).Turns, "the next one is due: the last cost a nap")
	require.False(t, step(r, phase.Read, c.now))
}

// Turns are for those who are there: one whose holder has gone, or does not come, holds nobody up.
func TestATurnThatIsNotUsed(t *testing.T) {
	demand := func() (*phase.Token, *clock, *phase.Holder, *phase.Holder) {
		token, c := start(phase.Options{Stuck: phase.StuckDefault})
		r, w := token.Holder(phase.Data), token.Holder(phase.Data)
		require.True(t, step(r, phase.Read, c.now))
		require.False(t, step(w, phase.Write, c.after(nap)))
		require.False(t, step(w, phase.Write, c.after(phase.PatienceDefault)))
		require.False(t, step(r, phase.Read, c.after(nap)))
		return token, c, r, w
	}
	t.Run("closed", func(t *testing.T) {
		_, c, r, w := demand()
		w.Close(c.now)
		require.True(t, step(r, phase.Read, c.after(nap)))
	})
	t.Run("does not ask any more", func(t *testing.T) {
		_, c, r, w := demand()
		w.Settle(c.after(nap))
		require.True(t, step(r, phase.Read, c.now))
	})
	t.Run("has enough", func(t *testing.T) {
		_, c, r, w := demand()
		end(r, phase.Read, c.after(nap))
		require.True(t, step(w, phase.Write, c.after(nap)))
		end(w, phase.Write, c.after(nap))
		require.False(t, step(r, phase.Read, c.now), "the next write may be a nap away")
		require.True(t, step(r, phase.Read, c.after(2*nap)))
	})
	t.Run("stands still", func(t *testing.T) {
		token, c, r, _ := demand()
		end(r, phase.Read, c.after(nap))
		require.False(t, step(r, phase.Read, c.after(nap)))
		require.True(t, step(r, phase.Read, c.after(phase.StuckDefault)))
		require.Equal(t, [2]int{0, 1}, token.Stats(c.now).Wanting)
	})
}

// A command that does not end holds up the other direction for a while, and again once it moves.
func TestStuckCommands(t *testing.T) {
	for d := phase.Read; d <= phase.Write; d++ {
		token, c := start(phase.Options{Stuck: time.Second})
		a, b := token.Holder(phase.Data), token.Holder(phase.Data)
		require.True(t, a.Enter(d, c.now))
		a.Begin(d, 4096)
		a.Begin(d, 4096)
		a.Settle(c.now)
		require.False(t, step(b, 1-d, c.after(nap)))
		require.True(t, step(b, 1-d, c.after(time.Second)))
		require.True(t, step(b, 1-d, c.after(time.Second)))
		s := token.Stats(c.now)
		require.Equal(t, uint64(1), s.Stuck)
		require.Equal(t, uint64(2), s.Mixed, "both commands met it")
		end(a, d, c.after(nap))
		require.False(t, b.Enter(1-d, c.after(nap)), "it moves, and counts")
		a.Close(c.now)
		require.True(t, b.Enter(1-d, c.after(time.Second)))
		b.Close(c.now)
		require.Zero(t, token.Stats(c.now).Inside)
	}
}

// The same holder may want both: its own commands of one direction keep it out of the other.
func TestOneHolderOfBoth(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	h := token.Holder(phase.Data)
	require.True(t, h.Enter(phase.Write, c.now))
	h.Begin(phase.Write, 4096)
	require.False(t, h.Enter(phase.Read, c.now))
	h.Settle(c.now)
	require.False(t, h.Enter(phase.Write, c.after(nap)))
	require.False(t, h.Enter(phase.Read, c.now))
	h.End(phase.Write, 4096)
	h.Settle(c.now)
	require.True(t, step(h, phase.Read, c.after(nap)))
	require.Zero(t, token.Stats(c.now).Mixed)
}

func TestFull(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	a, b := token.Holder(phase.Data), token.Holder(phase.Data)
	fill := func(h *phase.Holder) (n int) {
		require.True(t, h.Enter(phase.Write, c.now))
		for ; !h.Full(phase.Write); n++ {
			h.Begin(phase.Write, 1<<20)
		}
		h.Settle(c.now)
		return n
	}
	require.Equal(t, 8, fill(a))
	require.Equal(t, 4, fill(b), "it shares with the other")
	require.True(t, a.Full(phase.Write))
	require.False(t, a.Full(phase.Read))
	off := phase.New(phase.Options{Off: true}).Holder(phase.Data)
	off.Begin(phase.Write, math.MaxInt32)
	require.False(t, off.Full(phase.Write))
}

// Without phases all begin, and what mixes is counted.
func TestOff(t *testing.T) {
	token, c := start(phase.Options{Off: true})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.True(t, step(r, phase.Read, c.now))
	require.Zero(t, token.Stats(c.now).Mixed)
	for range 3 {
		require.True(t, step(w, phase.Write, c.now))
	}
	require.True(t, step(r, phase.Read, c.now))
	require.Equal(t, uint64(4), token.Stats(c.now).Mixed)
	for range 3 {
		end(w, phase.Write, c.now)
	}
	require.True(t, step(r, phase.Read, c.now))
	s := token.Stats(c.now)
	require.Equal(t, uint64(4), s.Mixed)
	require.Zero(t, s.Switches+s.Turns+s.Waits[0]+s.Waits[1])
}

// Mixing is counted where commands begin, whether or not the gate was asked.
func TestMixingIsCountedApart(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.True(t, step(r, phase.Read, c.now))
	w.Begin(phase.Write, 4096)
	w.Settle(c.now)
	require.Equal(t, uint64(1), token.Stats(c.now).Mixed)
}

// Threads of their own, pollers' and the mount's, for a while: what is in flight is counted by the test.
func TestManyThreads(t *testing.T) {
	token := phase.New(phase.Options{Patience: 2 * time.Millisecond, Metadata: time.Millisecond,
		Turn: 100 * time.Microsecond, Quiet: time.Microsecond, Stuck: long})
	const rounds = 60
	var flight [2]atomic.Int64
	var mixed atomic.Int64
	begin := func(d phase.Direction) {
		flight[d].Add(1)
		if flight[1-d].Load() > 0 {
			mixed.Add(1)
		}
	}
	var all sync.WaitGroup
	for i := range uint64(6) {
		all.Go(func() {
			random := rand.New(rand.NewPCG(i, 3))
			h := token.Holder(phase.Kind(random.IntN(int(phase.Kinds))))
			var out [2]int
			for done := [2]int{}; min(done[0], done[1]) < rounds; {
				for d := phase.Read; d <= phase.Write; d++ {
					for ; out[d] > 0 && random.IntN(3) > 0; out[d]-- {
						flight[d].Add(-1)
						h.End(d, 4096)
					}
					if out[1-d] == 0 && random.IntN(2) == 0 && h.Enter(d, time.Now()) {
						begin(d)
						h.Begin(d, 4096)
						out[d]++
						done[d]++
					}
				}
				h.Settle(time.Now())
				if random.IntN(4) == 0 {
					runtime.Gosched()
				}
			}
			for d := range out {
				flight[d].Add(int64(-out[d]))
			}
			h.Close(time.Now())
		})
	}
	gate := token.Gate(phase.Metadata)
	for i := range 8 {
		all.Go(func() {
			for n := range rounds {
				d := phase.Direction((i + n/10) % 2)
				gate.Enter(d, 4096)
				begin(d)
				runtime.Gosched()
				flight[d].Add(-1)
				gate.Leave(d, 4096)
			}
		})
	}
	all.Wait()
	s := token.Stats(time.Now())
	require.Zero(t, mixed.Load())
	require.Zero(t, s.Mixed)
	require.NotZero(t, s.Switches)
	require.Zero(t, s.Inside)
	require.Zero(t, s.Wanting)
}

// A gate lets in the whole queue, as many at a time as may write, and in order.
func TestGate(t *testing.T) {
	token := phase.New(phase.Options{Stuck: long, Patience: 2 * time.Second})
	r := token.Holder(phase.Data)
	require.True(t, step(r, phase.Read, time.Now()))
	gate := token.Gate(phase.Data)
	const writers = 12
	var entered atomic.Int32
	release := make(chan struct{})
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			gate.Enter(phase.Write, 4<<20)
			entered.Add(1)
			<-release
			gate.Leave(phase.Write, 4<<20)
		})
	}
	gate.Enter(phase.Read, 4096)
	require.Eventually(t, func() bool { return token.Stats(time.Now()).Wanting[phase.Write] == 1 }, 10*time.Second, nap)
	require.Zero(t, entered.Load())
	gate.Leave(phase.Read, 4096)
	require.Zero(t, entered.Load())
	end(r, phase.Read, time.Now())
	require.Eventually(t, func() bool { return entered.Load() == 2 }, 10*time.Second, nap)
	close(release)
	all.Wait()
	require.Equal(t, int32(writers), entered.Load())
	s := token.Stats(time.Now())
	require.Zero(t, s.Mixed)
	require.Zero(t, s.Inside)
}

func TestNothingIsAllocated(t *testing.T) {
	token, c := start(phase.Options{})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		step(r, phase.Read, c.after(nap))
		step(w, phase.Write, c.now)
		end(r, phase.Read, c.now)
		w.Settle(c.now)
	}))
}

// What a poller pays a step and drive, if it has commands.
func BenchmarkStep(b *testing.B) {
	h := phase.New(phase.Options{}).Holder(phase.Data)
	now := time.Now()
	for b.Loop() {
		h.Enter(phase.Read, now)
		h.Begin(phase.Read, 4096)
		h.End(phase.Read, 4096)
		h.Settle(now)
	}
}

package phase_test

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drivemodel"
	"tuttifs/phase"
)

// The simulation runs users of one modelled drive in virtual time: each does what a poller does, a step now and then,
// and has queues whose executors ring the next chunk when the last one is complete.

const commandBytes = 64 << 10

// lane is one queue and its executor.
type lane struct {
	way   phase.Direction
	chunk int                          // commands of one chunk
	gap   func(done int) time.Duration // between a chunk's completion and the next one; nil for none
	rung  time.Time                    // when the chunk is there
	left  int                          // commands not fetched
	out   int                          // commands in flight
	done  int                          // chunks
	bytes int

	slowest time.Duration // of its chunks, from when it was there
}

type user struct {
	holder *phase.Holder
	never  [2]int // commands that do not end
	lanes  []*lane
	step   time.Duration
	due    dues
	next   time.Time
}

type due struct {
	at   time.Time
	lane *lane
}

type dues []due

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].at.Before(d[j].at) }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any)        { *d = append(*d, x.(due)) }
func (d *dues) Pop() any          { x := (*d)[len(*d)-1]; *d = (*d)[:len(*d)-1]; return x }

type world struct {
	token  *phase.Token
	medium *drivemodel.Medium // nil: commands take no time
	begun  time.Time
	now    time.Time
	users  []*user
	random *rand.Rand
	flight [2]int
	mixed  int
}

func newWorld(o phase.Options, m *drivemodel.Medium) *world {
	now := time.Now()
	return &world{token: phase.New(o), medium: m, begun: now, now: now, random: rand.New(rand.NewPCG(1, 2))}
}

func (w *world) user(k phase.Kind, step time.Duration, lanes ...*lane) *user {
	u := &user{holder: w.token.Holder(k), lanes: lanes, step: step, next: w.now}
	for _, l := range lanes {
		l.left, l.rung = l.chunk, w.now
	}
	w.users = append(w.users, u)
	return u
}

// run lets virtual time pass.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for {
		u := w.users[0]
		for _, v := range w.users {
			if v.next.Before(u.next) {
				u = v
			}
		}
		if u.next.After(end) {
			w.now = end
			return
		}
		w.now = u.next
		w.step(u)
		u.next = w.now.Add(u.step/2 + time.Duration(w.random.Int64N(int64(u.step))))
	}
}

func (w *world) step(u *user) {
	for len(u.due) > 0 && !u.due[0].at.After(w.now) {
		l := heap.Pop(&u.due).(due).lane
		u.holder.End(l.way, commandBytes)
		w.flight[l.way]--
		l.bytes += commandBytes
		if l.out--; l.out == 0 && l.left == 0 {
			l.slowest = max(l.slowest, w.now.Sub(l.rung))
			l.left, l.rung = l.chunk, w.now
			if l.done++; l.gap != nil {
				l.rung = w.now.Add(l.gap(l.done))
			}
		}
	}
	var asked, open [2]bool
	u.lanes = append(u.lanes[1:], u.lanes[0]) // as a poller does: none is always the first
	for _, l := range u.lanes {
		for n := 0; n < 64 && l.left > 0 && !l.rung.After(w.now) && !u.holder.Full(l.way); n++ {
			if !asked[l.way] {
				asked[l.way], open[l.way] = true, u.holder.Enter(l.way, w.now)
			}
			if !open[l.way] {
				break
			}
			l.left--
			l.out++
			u.holder.Begin(l.way, commandBytes)
			if w.flight[l.way]++; w.flight[1-l.way] > 0 {
				w.mixed++
			}
			at := w.now
			if w.medium != nil {
				at = w.medium.Serve(w.now, l.way == phase.Write, commandBytes)
			}
			heap.Push(&u.due, due{at, l})
		}
	}
	u.holder.Settle(w.now)
}

// leave ends a user in the middle of whatever it does.
func (w *world) leave(u *user) {
	for _, d := range u.due {
		w.flight[d.lane.way]--
	}
	for d := range u.never {
		w.flight[d] -= u.never[d]
	}
	u.holder.Close(w.now)
	w.users = slices.DeleteFunc(w.users, func(x *user) bool { return x == u })
}

func (w *world) bytes(d phase.Direction) (n int) {
	for _, u := range w.users {
		for _, l := range u.lanes {
			if l.way == d {
				n += l.bytes
			}
		}
	}
	return n
}

// paper is the shipped profile at a fraction of its speed.
func paper(t testing.TB, fraction int64) *drivemodel.Medium {
	shipped, ok := drivemodel.Shipped("paper")
	require.True(t, ok)
	p := *shipped
	read, write, mixed := *p.Read, *p.Write, *p.Mixed
	read.BytesPerSecond /= fraction
	write.BytesPerSecond /= fraction
	mixed.Points = append([]drivemodel.MixedPoint(nil), mixed.Points...)
	for i := range mixed.Points {
		mixed.Points[i].BytesPerSecond /= fraction
	}
	p.Read, p.Write, p.Mixed = &read, &write, &mixed
	require.NoError(t, p.Validate())
	return drivemodel.NewMedium(&p, 7)
}

func lanes(n int, d phase.Direction, chunk int) (out []*lane) {
	for range n {
		out = append(out, &lane{way: d, chunk: chunk})
	}
	return out
}

// Whatever the drive's speed and the number of sessions that store permanently, permanent reads lose at most 5 %,
// nothing is ever mixed, and the stores get on. Without phases reads collapse.
func TestReadsBesideABacklogOfWrites(t *testing.T) {
	for _, c := range []struct {
		fraction int64 // of the drive's speed
		step     time.Duration
		time     time.Duration
	}{{1, 10 * time.Microsecond, 1500 * time.Millisecond}, {32, 50 * time.Microsecond, 8 * time.Second}} {
		alone := newWorld(phase.Options{}, paper(t, c.fraction))
		alone.user(phase.Data, c.step, lanes(6, phase.Read, 128)...)
		alone.run(c.time)
		require.Zero(t, alone.token.Stats(alone.now).Switches)
		for _, writers := range []int{1, 4} {
			for _, off := range []bool{false, true} {
				w := newWorld(phase.Options{Off: off}, paper(t, c.fraction))
				w.user(phase.Data, c.step, lanes(6, phase.Read, 128)...)
				for range writers {
					w.user(phase.Data, c.step, lanes(4, phase.Write, 128)...)
				}
				w.run(c.time)
				s := w.token.Stats(w.now)
				share := float64(w.bytes(phase.Read)) / float64(alone.bytes(phase.Read))
				t.Logf("1/%d of the speed, %d writers, off %v: reads %.1f %%, writes %d MiB; %+v", c.fraction, writers, off,
					100*share, w.bytes(phase.Write)>>20, s)
				require.Equal(t, off, s.Mixed > 0)
				require.Equal(t, off, w.mixed > 0, "the simulation's own count")
				require.Zero(t, s.Stuck)
				require.NotZero(t, w.bytes(phase.Write))
				if off {
					require.LessOrEqual(t, share, .6)
					continue
				}
				require.GreaterOrEqual(t, share, .95)
				require.NotZero(t, s.Turns)
				o := w.token.Options()
				require.Less(t, s.Longest[phase.Write], o.Patience+o.Stuck+time.Second)
				require.Less(t, s.Longest[phase.Read], o.Turn+time.Second)
			}
		}
	}
}

// A restore comes in chunks with gaps, shorter than the quiet time: no write slips into them but by a turn.
func TestGapsOfARestoreAreNotUsed(t *testing.T) {
	w := newWorld(phase.Options{}, paper(t, 1))
	read := &lane{way: phase.Read, chunk: 16, gap: func(int) time.Duration { return 300 * time.Microsecond }}
	w.user(phase.Data, 10*time.Microsecond, read)
	w.user(phase.Data, 10*time.Microsecond, lanes(1, phase.Write, 16)...)
	w.run(5 * time.Millisecond)
	require.NotZero(t, read.done)
	require.Zero(t, w.bytes(phase.Write))
	w.run(900 * time.Millisecond)
	s := w.token.Stats(w.now)
	require.NotZero(t, s.Turns)
	require.Equal(t, 2*s.Turns, s.Switches)
	// With longer gaps they have them.
	read.gap = func(int) time.Duration { return 3 * time.Millisecond }
	w.run(100 * time.Millisecond)
	require.Greater(t, w.token.Stats(w.now).Switches, s.Switches+20)
}

// Writes that nobody disturbs have the drive to themselves: no quiet time between them, no turns.
func TestWritesAlone(t *testing.T) {
	w := newWorld(phase.Options{}, paper(t, 1))
	w.user(phase.Data, 10*time.Microsecond, lanes(4, phase.Write, 128)...)
	w.run(500 * time.Millisecond)
	require.Greater(t, float64(w.bytes(phase.Write)), .97*.5*6e9)
	s := w.token.Stats(w.now)
	require.Zero(t, s.Turns)
	require.Zero(t, s.Waits)
}

// Metadata loses patience sooner; its turns are short, so that reads lose little by many of them.
func TestMetadataBesideReads(t *testing.T) {
	alone := newWorld(phase.Options{}, paper(t, 1))
	alone.user(phase.Data, 10*time.Microsecond, lanes(4, phase.Read, 64)...)
	alone.run(time.Second)
	w := newWorld(phase.Options{}, paper(t, 1))
	w.user(phase.Data, 10*time.Microsecond, lanes(4, phase.Read, 64)...)
	commit := &lane{way: phase.Write, chunk: 1}
	w.user(phase.Metadata, 50*time.Microsecond, commit)
	w.run(time.Second)
	s := w.token.Stats(w.now)
	require.Greater(t, commit.done, 10)
	require.Less(t, s.Longest[phase.Write], 110*time.Millisecond)
	require.GreaterOrEqual(t, float64(w.bytes(phase.Read)), .95*float64(alone.bytes(phase.Read)))
	require.Zero(t, s.Mixed)
}

// Beside permanent reads and a permanent backlog of stores metadata has short turns of its own: a commit now and then
// waits for its patience and for what reads have in flight, however lately the backlog had its turn. Permanent commits
// wait longer, and reads keep their part in any case.
func TestMetadataBesideABacklog(t *testing.T) {
	const fraction, step, length = 1, 10 * time.Microsecond, 1500 * time.Millisecond
	alone := newWorld(phase.Options{}, paper(t, fraction))
	alone.user(phase.Data, step, lanes(6, phase.Read, 128)...)
	alone.run(length)
	for _, c := range []struct{ pause, slowest time.Duration }{
		{150 * time.Millisecond, 20 * time.Millisecond}, {20 * time.Millisecond, 140 * time.Millisecond},
		{0, 190 * time.Millisecond},
	} {
		w := newWorld(phase.Options{}, paper(t, fraction))
		w.user(phase.Data, step, lanes(6, phase.Read, 128)...)
		w.user(phase.Data, step, lanes(4, phase.Write, 128)...)
		commit := &lane{way: phase.Write, chunk: 1, gap: func(n int) time.Duration {
			return c.pause + c.pause/20*time.Duration(n*7%20) // so that it meets all moments
		}}
		w.user(phase.Metadata, step, commit)
		w.run(length)
		s := w.token.Stats(w.now)
		share := float64(w.bytes(phase.Read)) / float64(alone.bytes(phase.Read))
		t.Logf("a commit each %v to %v: %d, the slowest %v; reads %.1f %%, writes %d MiB, %d turns", c.pause, 2*c.pause,
			commit.done, commit.slowest, 100*share, w.bytes(phase.Write)>>20, s.Turns)
		require.Greater(t, commit.done, 5)
		require.Less(t, commit.slowest, c.slowest)
		require.GreaterOrEqual(t, share, .95)
		require.Zero(t, s.Mixed)
		require.Zero(t, w.mixed)
	}
}

// Scrubbing gives way to stores, gets on all the same, and costs stores little.
func TestScrubbingBesideWrites(t *testing.T) {
	w := newWorld(phase.Options{}, paper(t, 1))
	scrub := &lane{way: phase.Read, chunk: 32}
	w.user(phase.Background, 50*time.Microsecond, scrub)
	w.user(phase.Data, 10*time.Microsecond, lanes(4, phase.Write, 128)...)
	w.run(2 * time.Second)
	require.Greater(t, scrub.done, 5)
	require.Greater(t, float64(w.bytes(phase.Write)), .9*2*6e9)
	require.Zero(t, w.token.Stats(w.now).Mixed)
}

// Random users come, read, write, are slow, lose commands, and go in the middle of whatever they do. Nothing is mixed
// while no direction is stuck; everybody who goes on asking gets in within the time that the package promises; and when
// all have gone nothing of them is left.
func TestRandomUsers(t *testing.T) {
	for seed := range uint64(6) {
		o := phase.Options{Stuck: 500 * time.Millisecond}
		w := newWorld(o, paper(t, 4))
		w.random = rand.New(rand.NewPCG(seed, 1))
		loses := seed%2 == 1
		var lost *user // has a command that never ends
		for range 80 {
			switch n := w.random.IntN(10); {
			case n < 5 && len(w.users) < 12:
				var list []*lane
				for range 1 + w.random.IntN(3) {
					l := &lane{way: phase.Direction(w.random.IntN(2)), chunk: 1 + w.random.IntN(100)}
					if idle := time.Duration(w.random.IntN(2000)) * time.Microsecond; w.random.IntN(2) == 0 {
						l.gap = func(int) time.Duration { return idle }
					}
					list = append(list, l)
				}
				w.user(phase.Kind(w.random.IntN(int(phase.Kinds))), 50*time.Microsecond, list...)
			case n < 7 && len(w.users) > 2:
				i := w.random.IntN(len(w.users))
				if w.users[i] == lost {
					lost = nil
				}
				w.leave(w.users[i])
			case n == 7 && loses && lost == nil && len(w.users) > 0:
				u := w.users[w.random.IntN(len(w.users))]
				if d := phase.Direction(w.random.IntN(2)); u.holder.Enter(d, w.now) {
					u.holder.Begin(d, 0)
					w.flight[d]++
					u.never[d]++
					lost = u
				}
			}
			if len(w.users) > 0 {
				w.run(time.Duration(1+w.random.IntN(20)) * time.Millisecond)
			}
			s := w.token.Stats(w.now)
			if s.Stuck == 0 {
				require.Zero(t, s.Mixed, "seed %d", seed)
				require.Zero(t, w.mixed, "seed %d", seed)
			}
			// Patience, the pause, the other direction's drain, and Stuck, of a modelled drive that serves what is in flight
			// in half a second.
			most := 200*time.Millisecond + o.Stuck + 500*time.Millisecond + o.Stuck
			require.Less(t, s.Age[phase.Read], most, "seed %d: %+v", seed, s)
			require.Less(t, s.Age[phase.Write], most, "seed %d: %+v", seed, s)
		}
		for len(w.users) > 0 {
			w.leave(w.users[0])
		}
		s := w.token.Stats(w.now)
		require.Zero(t, s.Inside, "seed %d", seed)
		require.Zero(t, s.Wanting, "seed %d", seed)
		for d := phase.Read; d <= phase.Write; d++ { // a turn that nobody uses any more holds up nobody
			h := w.token.Holder(phase.Data)
			require.True(t, h.Enter(d, w.now.Add(time.Second)), "seed %d", seed)
			h.Close(w.now.Add(time.Second))
			w.now = w.now.Add(time.Second)
		}
	}
}

package phase_test

import (
	"container/heap"
	"math/rand/v2"
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
}

type user struct {
	holder *phase.Holder
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
	for _, fraction := range []int64{1, 4, 32} {
		for _, writers := range []int{1, 4} {
			alone := newWorld(phase.Options{}, paper(t, fraction))
			alone.user(phase.Data, 10*time.Microsecond, lanes(6, phase.Read, 128)...)
			simulated := max(4*time.Second, time.Duration(fraction)*time.Second/2)
			alone.run(simulated)
			require.Zero(t, alone.token.Stats(alone.now).Switches)

			var reads [2]int
			for i, off := range []bool{false, true} {
				w := newWorld(phase.Options{Off: off}, paper(t, fraction))
				w.user(phase.Data, 10*time.Microsecond, lanes(6, phase.Read, 128)...)
				for range writers {
					w.user(phase.Data, 10*time.Microsecond, lanes(4, phase.Write, 128)...)
				}
				w.run(simulated)
				reads[i] = w.bytes(phase.Read)
				s := w.token.Stats(w.now)
				require.Equal(t, off, s.Mixed > 0)
				require.Equal(t, off, w.mixed > 0, "the simulation's own count")
				require.Zero(t, s.Stuck)
				t.Logf("1/%d, %d writers, off %v: reads %.1f %%, writes %d MiB; %+v", fraction, writers, off,
					100*float64(reads[i])/float64(alone.bytes(phase.Read)), w.bytes(phase.Write)>>20, s)
				if !off {
					require.NotZero(t, s.Turns)
					require.NotZero(t, w.bytes(phase.Write))
					o := w.token.Options()
					require.Less(t, s.Longest[phase.Write], o.Patience+o.Stuck+time.Second)
					require.Less(t, s.Longest[phase.Read], o.Turn+time.Second)
				}
			}
			require.GreaterOrEqual(t, float64(reads[0]), .95*float64(alone.bytes(phase.Read)))
			require.LessOrEqual(t, float64(reads[1]), .6*float64(alone.bytes(phase.Read)))
		}
	}
}

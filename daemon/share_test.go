package daemon

import (
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
	"tuttifs/phase"
)

// shareWorld is one drive in virtual time: engines with queue pairs of its own, and pollers.
type shareWorld struct {
	t      *testing.T
	token  *phase.Token
	now    time.Time
	random *rand.Rand
	shares []*driveShare
	flight [2]int // chunks of those that behave
	passed int
}

func newShareWorld(t *testing.T, seed uint64) *shareWorld {
	o := phase.Options{Patience: 20 * time.Millisecond, Metadata: time.Millisecond, Turn: 2 * time.Millisecond,
		Stuck: 200 * time.Millisecond}
	return &shareWorld{t: t, now: time.Now(), random: rand.New(rand.NewPCG(seed, 7)), token: phase.New(o)}
}

func (w *shareWorld) share() *driveShare {
	s := &driveShare{words: &ioctl.DriveShare{}, holder: w.token.Holder(phase.Data), stuck: w.token.Options().Stuck,
		log: func(string, ...any) { w.passed++ }}
	w.shares = append(w.shares, s)
	return s
}

// begins and ends count what the drive has in flight, of those who keep to the rules.
func (w *shareWorld) begins(d phase.Direction) {
	w.flight[d]++
	require.False(w.t, w.flight[phase.Read] > 0 && w.flight[phase.Write] > 0, "reads and writes at once: %v", w.flight)
}

func (w *shareWorld) ends(d phase.Direction) { w.flight[d]-- }

// shareLane is a lane of an engine on the drive.
type shareLane struct {
	w      *shareWorld
	words  *ioctl.DriveShare
	write  bool
	wanted bool
	busy   bool
	until  time.Time
	gap    time.Duration // between chunks, at most
	chunks int
}

const shareChunk = 1 << 20

func (l *shareLane) step() {
	d := phase.Direction(btoi(l.write))
	switch {
	case l.busy && l.w.now.After(l.until):
		l.w.ends(d)
		l.words.End(l.write, shareChunk, 8)
		l.busy = false
		l.chunks++
		l.until = l.w.now.Add(time.Duration(l.w.random.Int64N(int64(l.gap) + 1)))
	case !l.busy && l.w.now.After(l.until):
		if !l.words.Begin(l.write, shareChunk) {
			if !l.wanted {
				l.wanted = true
				l.words.Want(l.write, 1)
			}
			return
		}
		if l.wanted {
			l.wanted = false
			l.words.Want(l.write, -1)
		}
		l.w.begins(d)
		l.busy = true
		l.until = l.w.now.Add(time.Duration(100+l.w.random.IntN(400)) * time.Microsecond)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// sharePoller is a poller that serves queues of the drive.
type sharePoller struct {
	w      *shareWorld
	holder *phase.Holder
	d      phase.Direction
	until  time.Time
	busy   bool
	chunks int
}

func (p *sharePoller) step() {
	if p.busy && p.w.now.After(p.until) {
		p.w.ends(p.d)
		p.holder.End(p.d, 4096)
		p.busy = false
		p.chunks++
	}
	if !p.busy && p.holder.Enter(p.d, p.w.now) {
		p.holder.Begin(p.d, 4096)
		p.w.begins(p.d)
		p.busy = true
		p.until = p.w.now.Add(time.Duration(50+p.w.random.IntN(200)) * time.Microsecond)
	}
	p.holder.Settle(p.w.now)
}

// run lets virtual time pass. Everybody steps now and then, in any order.
func (w *shareWorld) run(d time.Duration, others ...func()) {
	for end := w.now.Add(d); w.now.Before(end); w.now = w.now.Add(5 * time.Microsecond) {
		if n := w.random.IntN(len(others)); true {
			others[n]()
		}
		if s := w.shares[w.random.IntN(len(w.shares))]; w.random.IntN(4) == 0 {
			w.step(s, false)
		}
	}
}

func (w *shareWorld) step(s *driveShare, gone bool) (again bool) {
	for d := phase.Read; d <= phase.Write; d++ {
		again = s.step(d, w.now, gone) || again
	}
	s.holder.Settle(w.now)
	return again
}

// TestSharesKeepToPhases: engines with queue pairs of a drive's own and pollers never read and write at once, and all
// get on; also beside an engine that leaves nothing when it is told, and one that was stopped with reads in flight.
func TestSharesKeepToPhases(t *testing.T) {
	for _, x := range []struct {
		name                      string
		hostile, stopped, babbles bool
	}{
		{name: "all behave"}, {name: "hostile", hostile: true}, {name: "stopped", stopped: true},
		{name: "says anything", babbles: true},
	} {
		t.Run(x.name, func(t *testing.T) {
			w := newShareWorld(t, 1)
			var steps []func()
			var lanes []*shareLane
			for i := range 3 {
				s := w.share()
				for n := range 4 {
					write := i == 2 || i == 1 && n == 0
					l := &shareLane{w: w, words: s.words, write: write, gap: time.Duration(i) * time.Millisecond}
					lanes, steps = append(lanes, l), append(steps, l.step)
				}
			}
			var pollers []*sharePoller
			for _, d := range []phase.Direction{phase.Read, phase.Write} {
				p := &sharePoller{w: w, holder: w.token.Holder(phase.Data), d: d}
				pollers, steps = append(pollers, p), append(steps, p.step)
			}
			if x.hostile {
				words := w.share().words // in both directions for ever, with commands that go on ending
				words.Wanted, words.Flight = [2]uint32{1, 1}, [2]uint32{1, 1}
				steps = append(steps, func() { words.Commands[0]++; words.Commands[1]++ })
			}
			if x.babbles {
				words := w.share().words
				steps = append(steps, func() {
					words.Wanted = [2]uint32{w.random.Uint32N(2), w.random.Uint32()}
					words.Flight = [2]uint32{w.random.Uint32(), w.random.Uint32N(2)}
					words.Commands, words.WriteBytes = [2]uint64{w.random.Uint64(), w.random.Uint64()}, w.random.Uint64()
				})
			}
			if x.stopped {
				words := w.share().words
				words.Want(false, 1)
				steps = append(steps, func() {
					if words.Wanted[0] == 1 && words.Begin(false, 4096) {
						words.Want(false, -1)
					}
				})
			}
			w.run(20*time.Second, steps...)
			for i, l := range lanes {
				require.Greater(t, l.chunks, 40, "lane %d", i)
			}
			for _, p := range pollers {
				require.Greater(t, p.chunks, 40)
			}
			require.Equal(t, x.hostile || x.stopped || x.babbles, w.passed > 0)
			if x.stopped {
				require.Less(t, w.passed, 3)
			}
		})
	}
}

// TestShareThatIsNotUsed: an engine that wants to begin and does not, as one that was stopped meanwhile, takes little
// of the others' time, and is given the drive when it goes on.
func TestShareThatIsNotUsed(t *testing.T) {
	for d, name := range []string{"reads", "writes"} {
		t.Run(name, func(t *testing.T) {
			chunks := func(frozen bool) int {
				w := newShareWorld(t, 1)
				others := w.share()
				lane := &shareLane{w: w, words: others.words, write: d == int(phase.Read)}
				poller := &sharePoller{w: w, holder: w.token.Holder(phase.Data), d: phase.Direction(1 - d)}
				words := w.share().words
				if frozen {
					words.Wanted[d] = 1
				}
				w.run(2*time.Second, lane.step, poller.step)
				n := min(lane.chunks, poller.chunks)
				if frozen {
					thawed := &shareLane{w: w, words: words, write: d == int(phase.Write), wanted: true}
					w.run(500*time.Millisecond, lane.step, poller.step, thawed.step)
					require.Greater(t, thawed.chunks, 10)
				}
				require.Zero(t, w.passed)
				return n
			}
			alone := chunks(false)
			require.Greater(t, chunks(true), alone*9/10)
		})
	}
}

// TestShareCountsWhatCanBe: bytes that an engine says it has moved are added up as far as a drive could have moved
// them, however often somebody looks.
func TestShareCountsWhatCanBe(t *testing.T) {
	now := time.Now()
	s := &driveShare{words: &ioctl.DriveShare{}, countedAt: now}
	var total realCounts
	for range 100 { // as fast as the fastest drives
		s.words.Bytes[0] += 28e9
		s.words.Bytes[1] += 14e9
		now = now.Add(time.Second)
		s.count(&total, now)
	}
	require.Equal(t, [2]uint64{100 * 28e9, 100 * 14e9}, total.bytes)
	now = now.Add(30 * time.Second) // nobody looked
	s.words.Bytes[1] += 30 * 14e9
	s.count(&total, now)
	require.EqualValues(t, 130*14e9, total.bytes[1])

	s = &driveShare{words: &ioctl.DriveShare{}, countedAt: now}
	total = realCounts{}
	for range 1000 {
		now = now.Add(time.Millisecond)
		for range 10 {
			s.words.Bytes[1] += 1 << 49
			s.count(&total, now)
		}
	}
	require.LessOrEqual(t, total.bytes[1], uint64(countRate), "it was a second")
	s.words.Bytes[1] -= 1 << 48 // and back
	s.count(&total, now.Add(time.Hour))
	require.LessOrEqual(t, total.bytes[1], uint64(61*countRate))
}

// TestShareGivesAndTakes goes through what one engine is told.
func TestShareGivesAndTakes(t *testing.T) {
	w := newShareWorld(t, 1)
	s := w.share()
	pass := func(d time.Duration) bool { w.now = w.now.Add(d); return w.step(s, false) }
	const nap = 50 * time.Microsecond
	require.False(t, pass(nap), "nothing to come back for")
	require.False(t, s.words.Begin(false, 4096))
	s.words.Want(false, 1)
	require.True(t, pass(nap))
	require.True(t, s.words.Begin(false, 4096))
	s.words.Want(false, -1)
	require.False(t, s.words.Begin(true, 4096))
	s.words.Want(true, 1)
	require.True(t, pass(nap))
	require.Zero(t, s.words.Grant[1], "its own reads are in flight")
	s.words.End(false, 4096, 1)
	require.True(t, pass(nap))
	require.True(t, s.words.Begin(false, 4096), "between two chunks there may be nothing")
	s.words.End(false, 4096, 1)
	for range 4 {
		pass(nap)
	}
	require.Zero(t, s.words.Grant[0])
	require.Zero(t, s.words.Grant[1], "reads were there a moment ago")
	pass(phase.QuietDefault)
	require.EqualValues(t, 8<<20, s.words.Grant[1])
	require.True(t, s.words.Begin(true, 16<<20), "alone, though it is large")
	require.False(t, s.words.Begin(true, 4096))
	s.words.Want(true, -1)
	require.Equal(t, []uint32{0, 1}, s.words.Flight[:])

	reader := w.token.Holder(phase.Data)
	require.False(t, reader.Enter(phase.Read, w.now))
	reader.Settle(w.now)
	require.True(t, pass(nap))
	require.Zero(t, s.words.Grant[1])
	require.False(t, reader.Enter(phase.Read, w.now), "the write is in flight")
	reader.Settle(w.now)
	s.words.End(true, 16<<20, 4)
	require.False(t, pass(nap))
	require.True(t, reader.Enter(phase.Read, w.now))
	reader.Begin(phase.Read, 4096)
	reader.Settle(w.now)
	require.Zero(t, s.passed.Load())

	reader.End(phase.Read, 4096)
	reader.Settle(w.now)
	s.words.Want(true, 1)
	pass(nap)
	pass(phase.QuietDefault)
	require.True(t, s.words.Begin(true, 4096))
	w.now = w.now.Add(nap)
	require.True(t, w.step(s, true), "its process is gone, and its queue pairs are not yet")
	require.Zero(t, s.words.Grant[1])
	s.holder.Close(w.now)
	require.True(t, reader.Enter(phase.Read, w.now), "now they are")
}

// realEngine loads a drive by queue pairs of its own, as one lane of an engine does that keeps to the rules.
type realEngine struct {
	*pair
	share *ioctl.DriveShare
	a     *ioctl.Attachment
	d     int
	write bool
}

func newRealEngine(t *testing.T, a *ioctl.Attachment, lane, d int, write bool) *realEngine {
	t.Helper()
	return &realEngine{newPair(t, a, lane, d), a.Share(d), a, d, write}
}

func (e *realEngine) run(chunks int) {
	armed := e.a.Word(ioctl.ArmedWord)
	for n := range chunks {
		atomic.AddUint32(armed, 1)
		if !e.share.Begin(e.write, drive.UnitBytes) {
			e.share.Want(e.write, 1)
			nvme.Wake(e.a.Word(ioctl.WakeWord))
			for !e.share.Begin(e.write, drive.UnitBytes) {
				runtime.Gosched()
			}
			e.share.Want(e.write, -1)
		}
		e.submit(unitAt(e.a, e.d, e.write, uint64(4096+n%64)))
		status, ok := e.completion()
		for ; !ok; status, ok = e.completion() {
			runtime.Gosched()
		}
		e.share.End(e.write, drive.UnitBytes, 1)
		atomic.AddUint32(armed, ^uint32(0))
		if !status.OK() {
			e.t.Errorf("%v", status)
		}
	}
}

// TestRealPairsKeepToPhases: reads and writes by queue pairs of an SSD's own, by virtual controllers and of metadata,
// from several sessions at once, never meet on the SSD, as it sees itself; and all of them are counted.
func TestRealPairsKeepToPhases(t *testing.T) {
	seen := phase.New(phase.Options{Off: true})
	ssd := newSSD(t, emu.Config{SGL: true, Phase: seen}, vfio.Options{})
	_, err := extentmap.Format([]drive.Drive{ssd.Drive}, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	o := Options{Phases: phase.Options{Patience: 2 * time.Millisecond, Metadata: time.Millisecond, Turn: time.Millisecond}}
	p := &phased{world: openWorldAs(t, o, []drive.Drive{ssd.Drive}, extentmap.Options{}, gpufile.Options{NoIO: true},
		ControlOptions{Real: Trust{user: true, uid: uint32(os.Geteuid())}})}
	p.keeper = p.open(true)
	_, p.a = p.keeper.session(ioctl.AttachOptions{})
	p.pool = p.keeper.pool(p.a, "p")
	p.keeper.store(p.a, p.pool, 1, 8)
	before := seen.Stats(time.Now()).Mixed

	stop, done := make(chan struct{}), new(atomic.Int64)
	var mediated, real sync.WaitGroup
	for _, write := range []bool{false, true} {
		a, extents := p.engineOf(write)
		mediated.Go(func() { _ = load(a, write, extents, done, stop) })
	}
	for range 2 {
		_, a := p.open(true).session(realOptions)
		require.True(t, a.Share(0).Phased())
		reads, writes := newRealEngine(t, a, 0, 0, false), newRealEngine(t, a, 1, 0, true)
		real.Go(func() { reads.run(100) })
		real.Go(func() { writes.run(50) })
	}
	for range 5 {
		p.commit(t)
	}
	real.Wait()
	close(stop)
	mediated.Wait()
	require.Positive(t, done.Load())
	require.Equal(t, before, seen.Stats(time.Now()).Mixed, "as the SSD sees it")
	require.Zero(t, p.phase(0).Mixed)
	require.Positive(t, p.phase(0).Switches)
	want := RealStats{Reads: 200, Writes: 100, BytesRead: 200 * 4096, BytesWritten: 100 * 4096, Pairs: 4}
	require.Equal(t, want, p.control.RealIO()[0])
	require.GreaterOrEqual(t, p.control.engineWrites()[0], want.BytesWritten)
	_, a := p.open(true).session(realOptions)
	a.Share(0).Commands = [2]uint64{1 << 60, 5}
	a.Share(0).Fail(true, 2)
	require.NoError(t, a.Close())
	want.Writes, want.FailedWrites = 105, 2
	require.Eventually(t, func() bool { return p.control.RealIO()[0] == want }, 10*time.Second, time.Millisecond,
		"what is made up is not added, what an engine has done stays when it has gone")
}

// TestRealPairsWithoutPhases: with phases off nobody is asked, and all is counted.
func TestRealPairsWithoutPhases(t *testing.T) {
	ssd := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	_, err := extentmap.Format([]drive.Drive{ssd.Drive}, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	w := openWorldAs(t, Options{Phases: phase.Options{Off: true}}, []drive.Drive{ssd.Drive}, extentmap.Options{},
		gpufile.Options{NoIO: true}, ControlOptions{Real: Trust{anybody: true}})
	_, a := w.open(true).session(realOptions)
	require.False(t, a.Share(0).Phased())
	q, s := newPair(t, a, 0, 0), a.Share(0)
	for _, write := range []bool{true, false} {
		require.True(t, s.Begin(write, 1<<30))
		require.Zero(t, q.do(unitAt(a, 0, write, 4096)))
	}
	s.End(true, 4096, 1)
	s.End(false, 4096, 1)
	require.Equal(t, RealStats{Reads: 1, Writes: 1, BytesRead: 4096, BytesWritten: 4096, Pairs: 2}, w.control.RealIO()[0])
}

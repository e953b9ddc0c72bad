package emu

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/nvme"
	"tuttifs/phase"
)

// patient never gives up on a machine that is slow for a while.
var patient = phase.Options{Stuck: time.Minute}

func phaseStats(t *phase.Token) phase.Stats { return t.Stats(time.Now()) }

// requireIdle says that nobody is in, and nobody waits.
func requireIdle(t testing.TB, token *phase.Token) {
	t.Helper()
	s := phaseStats(token)
	require.Zero(t, s.Inside)
	require.Zero(t, s.Wanting)
	require.Zero(t, s.Age)
}

// slowPaper is one of the paper's drives at a fraction of its speed.
func slowPaper(t testing.TB, fraction int64) *drivemodel.Medium {
	t.Helper()
	p, ok := drivemodel.Shipped("paper")
	require.True(t, ok)
	p.Read.BytesPerSecond /= fraction
	p.Write.BytesPerSecond /= fraction
	for i := range p.Mixed.Points {
		p.Mixed.Points[i].BytesPerSecond /= fraction
	}
	return drivemodel.NewMedium(p, 1)
}

// Two sessions, one that stores permanently and one that reads, each with pollers and executors of their own, on every
// kind of drive. With phases nothing is mixed, without it is; all bytes are right either way.
func TestPhasesOfTwoSessions(t *testing.T) {
	const chunk, part = 16, 1 << 20 // commands of 64 KiB
	file := fileDrive(t, 2*part)
	for _, c := range []struct {
		name   string
		drive  drive.Drive
		medium *drivemodel.Medium
		way    Backend
	}{
		{"memory", memoryDrive(t, 2*part), nil, Auto}, {"io_uring", file, nil, URing}, {"workers", file, nil, Pread},
		{"modelled memory", memoryDrive(t, 2*part), slowPaper(t, 32), Auto},
		{"modelled file", file, slowPaper(t, 32), Auto},
	} {
		for _, off := range []bool{false, true} {
			t.Run(map[bool]string{false: c.name, true: c.name + " off"}[off], func(t *testing.T) {
				o := patient
				o.Off = off
				token := phase.New(o)
				stop := make(chan struct{})
				var sessions sync.WaitGroup
				var rounds [2]atomic.Int64
				for session, write := range []bool{false, true} {
					controller, err := New(Config{Drive: c.drive, Medium: c.medium, Phase: token})
					require.NoError(t, err)
					var armed, wake uint32
					p, err := NewPoller(PollerConfig{Backend: c.way, Armed: &armed, Wake: &wake})
					if err != nil {
						t.Skip(err)
					}
					t.Cleanup(p.Stop)
					h := attachHost(t, controller, p, nil, 32, part+PageBytes)
					go p.Run()
					atomic.AddUint32(&armed, 1)
					sessions.Go(func() {
						// Each session has half of the drive. The reader's is written first.
						h.chunkOf(&wake, true, session, chunk)
						for {
							select {
							case <-stop:
								return
							default:
							}
							h.chunkOf(&wake, write, session, chunk)
							rounds[session].Add(1)
						}
					})
				}
				require.Eventually(t, func() bool {
					mixed := phaseStats(token).Mixed > 0
					return rounds[0].Load() > 4 && rounds[1].Load() > 1 && mixed == off
				}, 30*time.Second, time.Millisecond)
				close(stop)
				sessions.Wait()
				s := phaseStats(token)
				require.Equal(t, off, s.Mixed > 0)
				require.Zero(t, s.Stuck)
				require.Equal(t, off, s.Switches == 0)
			})
		}
	}
}

// chunkOf transfers a chunk of a session's half of the drive; what was read must be what the session wrote.
func (h *host) chunkOf(wake *uint32, write bool, session, commands int) {
	const size = 64 << 10
	blocks := uint32(size >> h.c.shift())
	want := make([]byte, size)
	for i := range commands {
		fill(want, uint64(session*commands+i))
		b := h.dma[i*size:][:size]
		if clear(b); write {
			copy(b, want)
		}
		h.put(h.rw(write, uint16(i), uint64(session*commands+i)*uint64(blocks), blocks, uint64(i*size)))
		h.ring() // one by one, as they share the list page
		nvme.Wake(wake)
		for end := time.Now().Add(30 * time.Second); len(h.reap()) == 0; runtime.Gosched() {
			if time.Now().After(end) {
				h.t.Errorf("session %d: no completion", session)
				return
			}
		}
		if !bytes.Equal(b, want) {
			h.t.Errorf("session %d: wrong bytes", session)
		}
	}
}

// side is a queue of its own session: controller, poller and executor.
func side(t *testing.T, token *phase.Token, d drive.Drive, m *drivemodel.Medium) *host {
	return newHost(t, Config{Drive: d, Medium: m, Phase: token}, 64, 1<<20)
}

// begin steps the poller until its command is on the drive, and leaves it there.
func (h *host) begin(write bool, cid uint16) {
	h.t.Helper()
	h.put(h.rw(write, cid, 0, 8, 0))
	h.ring()
	require.Eventually(h.t, func() bool {
		h.p.Step()
		return h.q.head == h.tail
	}, 20*time.Second, napMax)
}

// A held-back write stays in its queue and holds up nobody's reads; flushes go at any time.
func TestHeldBackWrites(t *testing.T) {
	token := phase.New(patient)
	d := memoryDrive(t, 1<<20)
	slow := side(t, token, d, fixedMedium(1e9, time.Hour))
	slow.begin(false, 1)
	other := side(t, token, d, nil)
	second := attachHost(t, other.c, other.p, nil, 16, 64<<10)
	other.put(other.rw(true, 1, 0, 8, 0))
	other.ring()
	for i := range uint16(20) {
		require.True(t, second.do(second.rw(false, i, 0, 8, 0)).OK())
		require.True(t, second.do(nvme.SQE{Opcode: nvme.IOFlush, NSID: 1, CID: 100 + i}).OK())
	}
	require.Empty(t, other.reap())
	require.Equal(t, [2]int{1, 0}, phaseStats(token).Inside)
	require.Equal(t, [2]int{0, 1}, phaseStats(token).Wanting)
	// What waits is changed by its executor: another command now, which need not wait.
	e := other.rw(false, 2, 0, 8, 0)
	other.qm.SQ[0] = e
	require.Equal(t, uint16(2), other.wait(1)[0].cid)
	other.p.Step()
	require.Zero(t, phaseStats(token).Wanting)
	require.NoError(t, slow.q.Quiesce(time.Now().Add(time.Minute)))
	requireIdle(t, token)
}

// The end of a queue, whatever it has, leaves its drive's phase to others: held back by a model, or waiting.
func TestPhasesOfQueuesThatEnd(t *testing.T) {
	for name, end := range map[string]func(*host){
		"quiesced": func(h *host) { require.NoError(h.t, h.q.Quiesce(time.Now().Add(time.Minute))) },
		"stopped":  func(h *host) { h.p.Stop() },
		"killed": func(h *host) {
			atomic.StoreUint32(h.qm.SQTail, 1<<20)
			h.p.Step()
			require.True(h.t, h.q.Dead())
		},
	} {
		t.Run(name, func(t *testing.T) {
			token := phase.New(patient)
			d := memoryDrive(t, 1<<20)
			reader := side(t, token, d, fixedMedium(1e9, time.Hour))
			waiting := side(t, token, d, nil)
			writer := side(t, token, d, nil)
			reader.begin(false, 1)
			for _, h := range []*host{waiting, writer} {
				h.put(h.rw(true, 1, 0, 8, 0))
				h.ring()
				h.p.Step()
				require.Empty(t, h.reap())
			}
			require.Equal(t, [2]int{0, 2}, phaseStats(token).Wanting)
			end(waiting)
			require.Equal(t, [2]int{0, 1}, phaseStats(token).Wanting)
			end(reader)
			require.True(t, writer.wait(1)[0].status.OK())
			requireIdle(t, token)
		})
	}
}

// Commands that faults delay, hold or lose are in no phase: they have not begun.
func TestFaultsHoldNoPhase(t *testing.T) {
	token := phase.New(patient)
	d := memoryDrive(t, 1<<20)
	faulty, healthy := side(t, token, d, nil), side(t, token, d, nil)
	var may atomic.Bool
	faulty.c.SetFaults(func(e *nvme.SQE) *Fault {
		switch e.CID {
		case 1:
			return &Fault{Drop: true}
		case 2:
			return &Fault{Hold: may.Load}
		}
		return &Fault{Delay: time.Hour}
	})
	for cid := range uint16(3) {
		faulty.begin(false, cid+1)
	}
	require.True(t, healthy.do(healthy.rw(true, 1, 0, 8, 0)).OK())
	requireIdle(t, token)
	// One that is let go meets its drive's phase again.
	slow := side(t, token, d, fixedMedium(1e9, time.Hour))
	slow.begin(true, 1)
	may.Store(true)
	for range 20 {
		faulty.p.Step()
		time.Sleep(napMax)
	}
	require.Empty(t, faulty.reap())
	require.Equal(t, [2]int{1, 0}, phaseStats(token).Wanting)
	slow.p.Stop()
	require.Equal(t, uint16(2), faulty.wait(1)[0].cid)
	require.Zero(t, phaseStats(token).Mixed)
	require.NoError(t, faulty.q.Quiesce(time.Now().Add(time.Minute)))
	requireIdle(t, token)
}

// hungDrive does not answer reads until it is let go.
type hungDrive struct {
	drive.Drive
	let chan struct{}
}

func (hungDrive) Fd() int       { return -1 }
func (hungDrive) Bytes() []byte { return nil }
func (d hungDrive) ReadAt(p []byte, off int64) error {
	<-d.let
	return d.Drive.ReadAt(p, off)
}

// A read that the drive does not answer, even one whose engine has gone, does not take writes along.
func TestPhasesOfADriveThatHangs(t *testing.T) {
	token := phase.New(phase.Options{Patience: time.Millisecond, Stuck: 100 * time.Millisecond})
	d := hungDrive{memoryDrive(t, 1<<20), make(chan struct{})}
	reader, writer := side(t, token, d, nil), side(t, token, d, nil)
	reader.begin(false, 1)
	require.ErrorIs(t, reader.q.Quiesce(time.Now().Add(10*time.Millisecond)), ErrQuiesce)
	require.Equal(t, [2]int{1, 0}, phaseStats(token).Inside)
	for i := range uint16(3) {
		require.True(t, writer.do(writer.rw(true, i, 0, 8, 0)).OK())
	}
	s := phaseStats(token)
	require.NotZero(t, s.Stuck)
	require.NotZero(t, s.Mixed)
	close(d.let)
	require.NoError(t, reader.q.Quiesce(time.Now().Add(time.Minute)))
	requireIdle(t, token)
}

// A poller that sleeps when it has nothing to do looks again at a queue that waits for its phase: nobody wakes it.
func TestWaitingQueuesAreLookedAt(t *testing.T) {
	token := phase.New(patient)
	d := memoryDrive(t, 1<<20)
	slow := side(t, token, d, fixedMedium(1e9, time.Hour))
	slow.begin(false, 1)
	c, err := New(Config{Drive: d, Phase: token})
	require.NoError(t, err)
	var armed, wake uint32
	p, err := NewPoller(PollerConfig{Armed: &armed, Wake: &wake})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	h := attachHost(t, c, p, nil, 16, 64<<10)
	go p.Run()
	h.put(h.rw(true, 1, 0, 8, 0))
	h.ring()
	nvme.Wake(&wake)
	require.Eventually(t, func() bool { return phaseStats(token).Wanting[phase.Write] == 1 }, 20*time.Second, napMax)
	time.Sleep(10 * time.Millisecond)
	slow.p.Stop()
	require.Eventually(t, func() bool { return len(h.reap()) == 1 }, 20*time.Second, napMax)
}

func TestPhasesDoNotAllocate(t *testing.T) {
	h := side(t, phase.New(patient), memoryDrive(t, 1<<20), nil)
	e := h.rw(true, 1, 0, 8, 0)
	step := func() {
		h.put(e)
		h.ring()
		h.wait(1)
	}
	step()
	require.LessOrEqual(t, testing.AllocsPerRun(50, step), 4.0, "the test's own lists of completions")
}

// Both sides of one queue on one core, without phases and with them: commands without data, and 4 KiB to memory.
func BenchmarkPhases(b *testing.B) {
	for _, token := range []*phase.Token{nil, phase.New(phase.Options{})} {
		name := map[bool]string{false: "none", true: "on"}[token != nil]
		b.Run("empty/"+name, func(b *testing.B) {
			h := newHost(b, Config{Drive: memoryDrive(b, 1<<20), Phase: token}, 256, 1<<20)
			b.ResetTimer()
			h.pump(b.N, 128, func() { h.p.Step() }, func(e *nvme.SQE, cid uint16) { nvme.BuildFlush(e, cid, 1) })
		})
		for _, inflight := range []int{1, 32} {
			b.Run(fmt.Sprintf("read-4K-%d/%s", inflight, name), func(b *testing.B) {
				const size = 4096
				h := newHost(b, Config{Drive: memoryDrive(b, benchSpan), SGL: true, Phase: token}, 64, 32*size)
				b.ResetTimer()
				h.pumpRW(b.N, false, size, inflight, func() { h.p.Step() })
			})
		}
	}
}

// busy keeps n transfers of 64 KiB in a queue, and counts the bytes that have moved.
func (h *host) busy(write bool, n int, sent, bytes *int) {
	const size = 64 << 10
	for _, c := range h.reap() {
		require.True(h.t, c.status.OK())
		*bytes += size
	}
	for ; *sent-*bytes/size < n; *sent++ {
		var e nvme.SQE
		cid := uint16(*sent % n)
		nvme.BuildRW(&e, write, cid, 1, uint64(cid)*(size>>h.c.shift()), size>>h.c.shift())
		require.NoError(h.t, e.SetSGL(dmaBase, size))
		h.put(e)
	}
	h.ring()
}

// The pollers themselves on the paper's drive at a 32nd of its speed, in virtual time: beside a session that stores
// permanently reads have at least 95 % of the bandwidth that they have alone, and collapse without phases.
func TestReadBandwidthBesideABacklog(t *testing.T) {
	reads := func(store, off bool) (bytes [2]int, s phase.Stats) {
		synctest.Test(t, func(t *testing.T) {
			token := phase.New(phase.Options{Off: off})
			d := memoryDrive(t, 64*64<<10)
			m := slowPaper(t, 32)
			var sides [2]*host
			var sent [2]int
			for i := range sides {
				sides[i] = newHost(t, Config{Drive: d, Medium: m, Phase: token, SGL: true, InOrder: true}, 64, 64<<10)
			}
			for begin := time.Now(); time.Since(begin) < 3*time.Second; time.Sleep(napMax) {
				for i, h := range sides {
					if i == 0 || store {
						h.busy(i == 1, 32, &sent[i], &bytes[i])
						h.p.Step()
					}
				}
			}
			s = phaseStats(token)
		})
		return bytes, s
	}
	alone, _ := reads(false, false)
	with, s := reads(true, false)
	require.Zero(t, s.Mixed)
	require.NotZero(t, s.Turns)
	require.NotZero(t, with[1])
	require.GreaterOrEqual(t, float64(with[0]), .95*float64(alone[0]))
	without, s := reads(true, true)
	require.NotZero(t, s.Mixed)
	require.LessOrEqual(t, float64(without[0]), .5*float64(alone[0]))
	t.Logf("reads %d MiB alone, %d beside a store with phases (written %d), %d without (written %d)", alone[0]>>20,
		with[0]>>20, with[1]>>20, without[0]>>20, without[1]>>20)
}

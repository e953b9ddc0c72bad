package emu

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
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
					return rounds[0].Load() > 20 && rounds[1].Load() > 2 && mixed == off
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
	blocks := uint32(size >> h.c.lbaShift)
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

package emu

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// More commands than the ring and the workers take at a time wait their turn, in both directions.
func TestMoreThanTheBackendTakes(t *testing.T) {
	const blocks, depth = 3000, 4096
	for _, b := range []Backend{URing, Pread} {
		t.Run(string(b), func(t *testing.T) {
			c, err := New(Config{Drive: fileDrive(t, 16<<20)})
			require.NoError(t, err)
			p, err := NewPoller(PollerConfig{Backend: b})
			if b == URing && err != nil {
				t.Skip(err)
			}
			require.NoError(t, err)
			t.Cleanup(p.Stop)
			h := attachHost(t, c, p, nil, depth, blocks*PageBytes+PageBytes)
			per := uint32(PageBytes >> c.shift())
			want := make([]byte, blocks*PageBytes)
			fill(want, 21)
			copy(h.dma, want)
			for _, write := range []bool{true, false} {
				for i := range uint64(blocks) {
					h.put(h.rw(write, uint16(i), i*uint64(per), per, i*PageBytes))
				}
				h.ring()
				for _, r := range h.wait(blocks) {
					require.True(t, r.status.OK(), "%v", r.status)
				}
				if write {
					clear(h.dma)
				}
			}
			require.True(t, bytes.Equal(want, h.dma[:len(want)]))
		})
	}
}

// unaware is a direct drive that claims not to be one, so that the kernel refuses what the controller sends as it is.
type unaware struct{ drive.Drive }

func (unaware) Direct() bool { return false }

func TestTransfersOfAFormThatTheKernelRefuses(t *testing.T) {
	for _, b := range []Backend{URing, Pread} {
		t.Run(string(b), func(t *testing.T) {
			c, err := New(Config{Drive: unaware{fileDrive(t, 4<<20)}, SGL: true})
			require.NoError(t, err)
			p, err := NewPoller(PollerConfig{Backend: b})
			if b == URing && err != nil {
				t.Skip(err)
			}
			require.NoError(t, err)
			t.Cleanup(p.Stop)
			h := attachHost(t, c, p, nil, 16, 1<<20)
			n := uint32(64 << 10)
			fill(h.dma[:n+1], 22)
			for i, write := range []bool{true, false} {
				var e nvme.SQE
				nvme.BuildRW(&e, write, uint16(i), 1, 0, n>>c.shift())
				require.NoError(t, e.SetSGL(dmaBase+uint64(i)<<19+1, n))
				e.CDW12 |= nvme.RWForceUnit
				require.Equal(t, nvme.Success, h.do(e))
			}
			require.True(t, bytes.Equal(h.dma[1:][:n], h.dma[1<<19+1:][:n]))
		})
	}
}

// Executors of several queues write and read back their own parts of one drive through one running poller.
func TestManyQueues(t *testing.T) {
	const queues, rounds, part = 4, 60, 1 << 20
	var armed, wake uint32
	for _, d := range []drive.Drive{memoryDrive(t, queues*part), fileDrive(t, queues*part)} {
		c, err := New(Config{Drive: d})
		require.NoError(t, err)
		p, err := NewPoller(PollerConfig{Armed: &armed, Wake: &wake})
		require.NoError(t, err)
		go p.Run()
		var all sync.WaitGroup
		for q := range uint64(queues) {
			h := attachHost(t, c, p, nil, 16, 512<<10)
			all.Go(func() {
				r := rand.New(rand.NewPCG(q, 9))
				bs := uint64(1) << c.shift()
				for range rounds {
					n := uint64(r.IntN(16)+1) * PageBytes
					lba := (q*part + uint64(r.IntN(part/PageBytes-16))*PageBytes) / bs
					fill(h.dma[:n], r.Uint64())
					for cid, write := range []bool{true, false} {
						h.put(h.rw(write, uint16(cid), lba, uint32(n/bs), uint64(cid)*256<<10))
						h.ring()
						nvme.Wake(&wake)
						for end := time.Now().Add(20 * time.Second); len(h.reap()) == 0; runtime.Gosched() {
							if time.Now().After(end) {
								t.Errorf("queue %d: no completion", q)
								return
							}
						}
					}
					if !bytes.Equal(h.dma[:n], h.dma[256<<10:][:n]) {
						t.Errorf("queue %d: wrong bytes", q)
					}
				}
			})
		}
		all.Wait()
		p.Stop()
		require.Equal(t, uint64(queues*rounds), c.Stats().Reads)
		require.NotZero(t, c.Stats().BusyNanoseconds)
	}
}

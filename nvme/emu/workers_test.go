package emu

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// stuckDrive holds flushes back until its gate opens, and counts those that wait.
type stuckDrive struct {
	drive.Drive
	gate    chan struct{}
	waiting atomic.Int32
}

func (d *stuckDrive) Bytes() []byte { return nil }
func (d *stuckDrive) Fd() int       { return -1 }

func (d *stuckDrive) Flush() error {
	d.waiting.Add(1)
	<-d.gate
	return nil
}

// TestThreadsAreBounded: however many pollers' commands block, they take a bounded number of threads; the others wait
// and are served.
func TestThreadsAreBounded(t *testing.T) {
	was := blocking
	blocking = make(chan struct{}, 3)
	t.Cleanup(func() { blocking = was })
	d := &stuckDrive{Drive: memoryDrive(t, 1<<20), gate: make(chan struct{})}
	c, err := New(Config{Drive: d})
	require.NoError(t, err)
	var hosts []*host
	for range 2 {
		p, err := NewPoller(PollerConfig{})
		require.NoError(t, err)
		t.Cleanup(p.Stop)
		h := attachHost(t, c, p, nil, 16, 64<<10)
		for cid := range uint16(5) {
			var e nvme.SQE
			nvme.BuildFlush(&e, cid, 1)
			h.put(e)
		}
		h.ring()
		p.Step()
		hosts = append(hosts, h)
	}
	require.Eventually(t, func() bool { return d.waiting.Load() == 3 }, 10*time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	require.EqualValues(t, 3, d.waiting.Load())
	close(d.gate)
	for _, h := range hosts {
		for _, done := range h.wait(5) {
			require.True(t, done.status.OK())
		}
	}
	require.EqualValues(t, 10, d.waiting.Load())
}

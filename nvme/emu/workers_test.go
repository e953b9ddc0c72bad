package emu

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// stuckDrive holds flushes and reads back until its gate opens, and counts those that wait.
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

func (d *stuckDrive) ReadAt(p []byte, off int64) error {
	d.waiting.Add(1)
	<-d.gate
	return d.Drive.ReadAt(p, off)
}

// TestLongListsAreBounded: an executor that describes its memory page by page, in each of a queue's commands, does not
// make the controller keep all that.
func TestLongListsAreBounded(t *testing.T) {
	const depth, pages = 128, 100
	d := &stuckDrive{Drive: memoryDrive(t, 1<<20), gate: make(chan struct{})}
	c, err := New(Config{Drive: d})
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	l := &ledger{deny: true}
	h := attachHost(t, c, p, l, depth, 1<<20)
	list := words(h.dma[1<<20-PageBytes:])
	for i := range uint64(pages) {
		list[i] = dmaBase + (pages-i)*PageBytes // no two that follow each other
	}
	submit := func() {
		for cid := range uint16(depth - 1) {
			var e nvme.SQE
			nvme.BuildRW(&e, false, cid, 1, 0, pages*PageBytes>>c.shift())
			e.DPTR = [2]uint64{dmaBase, dmaBase + 1<<20 - PageBytes}
			h.put(e)
		}
		h.ring()
		for range depth {
			p.Step()
		}
	}
	long := func() (n int) {
		for i := range h.q.commands {
			if cap(h.q.commands[i].data.list) > keepMax {
				n++
			}
		}
		return n
	}
	submit()
	require.Zero(t, long(), "nobody has reaped them, but they are over")
	for _, done := range h.wait(depth - 1) {
		require.Equal(t, nvme.AccessDenied, done.status.Code())
	}

	l.deny = false
	submit()
	require.Equal(t, depth/largeShare+1, long(), "in flight at a time")
	close(d.gate)
	for _, done := range h.wait(depth - 1) {
		require.True(t, done.status.OK())
	}
	require.Zero(t, long())
	require.Zero(t, h.q.large)
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

// TestShares: sessions whose drives do not answer hold what one may have, and what all together may have, and leave
// every other its own.
func TestShares(t *testing.T) {
	was := blocking
	blocking = make(chan struct{}, ShareMax)
	t.Cleanup(func() { blocking = was })
	var inside atomic.Int32
	enter := func(s *Share, n int, leave <-chan struct{}) *sync.WaitGroup {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				p := s.enter()
				inside.Add(1)
				<-leave
				inside.Add(-1)
				p.leave()
			})
		}
		return &wg
	}
	holds := func(n int32) {
		t.Helper()
		require.Eventually(t, func() bool { return inside.Load() == n }, 10*time.Second, time.Millisecond)
		time.Sleep(20 * time.Millisecond)
		require.EqualValues(t, n, inside.Load())
	}
	first, second, third := NewShare(), NewShare(), NewShare()
	stuck, more := make(chan struct{}), make(chan struct{})
	one := enter(first, 2*ShareMax, stuck)
	holds(ShareMax)
	two := enter(second, 2*ShareMax, stuck)
	holds(ShareMax + 2*ShareOwn)
	three := enter(third, 2*ShareOwn, more)
	holds(ShareMax + 3*ShareOwn)
	close(more)
	three.Wait()
	holds(ShareMax + 2*ShareOwn)
	close(stuck)
	one.Wait()
	two.Wait()
	require.Zero(t, len(blocking)+len(first.own)+len(first.borrowed)+len(second.own)+len(second.borrowed))
}

// TestStuckDriveLeavesWorkers: a drive that does not answer, with any number of commands, keeps one poller from no
// other drive.
func TestStuckDriveLeavesWorkers(t *testing.T) {
	stuck := &stuckDrive{Drive: memoryDrive(t, 1<<20), gate: make(chan struct{})}
	release := sync.OnceFunc(func() { close(stuck.gate) })
	p, err := NewPoller(PollerConfig{})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	t.Cleanup(release)
	attach := func(d drive.Drive) *host {
		c, err := New(Config{Drive: d})
		require.NoError(t, err)
		return attachHost(t, c, p, nil, 64, 64<<10)
	}
	flush := func(h *host, n uint16) {
		for cid := range n {
			var e nvme.SQE
			nvme.BuildFlush(&e, cid, 1)
			h.put(e)
		}
		h.ring()
		p.Step()
	}
	bad, good := attach(stuck), attach(memoryDrive(t, 1<<20))
	flush(bad, 40)
	require.Eventually(t, func() bool { return stuck.waiting.Load() == driveWorkersMax }, 10*time.Second,
		time.Millisecond)
	flush(good, 20)
	for _, done := range good.wait(20) {
		require.True(t, done.status.OK())
	}
	require.EqualValues(t, driveWorkersMax, stuck.waiting.Load())
	release()
	bad.wait(40)
}

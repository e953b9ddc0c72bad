package daemon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drivemodel"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/phase"
)

// slowPaper is the profile of the paper's drives at a fraction of their speed.
func slowPaper(t *testing.T, fraction int64) DriveProfiles {
	p, ok := drivemodel.Shipped("paper")
	require.True(t, ok)
	p.Read.BytesPerSecond /= fraction
	p.Write.BytesPerSecond /= fraction
	for i := range p.Mixed.Points {
		p.Mixed.Points[i].BytesPerSecond /= fraction
	}
	return DriveProfiles{All: p}
}

// minuteReads is a drive whose reads take a minute each, and whose writes take no time.
func minuteReads() DriveProfiles {
	const us = 60e6
	return DriveProfiles{All: &drivemodel.Profile{Version: drivemodel.Version, Name: "minute", Of: "a test",
		Read: &drivemodel.Direction{BytesPerSecond: 1e9,
			Latency: drivemodel.Latency{MinUS: us, P50US: us, P90US: us, P99US: us, P999US: us, MaxUS: us}}}}
}

func (w *world) phase(drive uint16) phase.Stats {
	_, use := useOf(w.volume.Drive(drive))
	return use.phase.Stats(time.Now())
}

// phased is a mount with a pool of n files, and a session of each of those who read and write it.
type phased struct {
	*world
	keeper *client
	a      *ioctl.Attachment
	pool   ioctl.Target
	next   byte
}

func newPhased(t *testing.T, as Options, x extentmap.Options) *phased {
	drives := memoryDrives(t, 64<<20)
	_, err := extentmap.Format(drives, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	p := &phased{world: openWorldAs(t, as, drives, x, gpufile.Options{NoIO: true}, ControlOptions{})}
	p.keeper = p.open(true)
	_, p.a = p.keeper.session(ioctl.AttachOptions{})
	p.pool = p.keeper.pool(p.a, "p")
	p.keeper.store(p.a, p.pool, 1, 8)
	return p
}

// commit stores one file more, which writes metadata and nothing else.
func (p *phased) commit(t *testing.T) ioctl.Commit {
	t.Helper()
	r := p.reserve(p.keeper, p.a, 1)
	c := ioctl.Commit{Target: p.pool, Reserve: r.Reserve}
	require.Zero(t, issue(p.keeper, ioctl.CmdCommit, &c, 0))
	return c
}

// reserve takes slots for n files of new keys.
func (p *phased) reserve(c *client, a *ioctl.Attachment, n int) ioctl.Reserve {
	s := items(a, n)
	p.next++
	for i := range ioctl.View[ioctl.ReserveItem](a.Arena, s) {
		it := &ioctl.View[ioctl.ReserveItem](a.Arena, s)[i]
		*it = ioctl.ReserveItem{Tokens: 16}
		binary.LittleEndian.PutUint64(it.Key[8:], uint64(p.next)<<8|uint64(i)+1)
	}
	r := ioctl.Reserve{Target: p.pool, Items: s, Grants: grantSpan, Reserve: uint64(p.next) + 1}
	c.reserve(&r)
	return r
}

// engineOf makes a session with leases on files: pinned ones to read, or reserved ones to write.
func (p *phased) engineOf(write bool) (*ioctl.Attachment, []ioctl.Extent) {
	const files = 8
	c := p.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 32, DMABytes: 1 << 20})
	if write {
		p.reserve(c, a, files)
	} else {
		pin := ioctl.Pin{Target: p.pool, Keys: keys(a, files), Grants: grantSpan, Request: 1}
		require.Zero(p.t, issue(c, ioctl.CmdPin, &pin, 0))
		require.Equal(p.t, uint32(files), pin.Count)
	}
	var extents []ioctl.Extent
	for _, g := range append([]ioctl.Grant(nil), ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:files]...) {
		x := ioctl.Extents{Target: p.pool, Slot: g.Slot, Extents: ioctl.Span{Bytes: 4096}}
		require.Zero(p.t, issue(c, ioctl.CmdExtents, &x, 0))
		extents = append(extents, ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count]...)
	}
	return a, extents
}

// load keeps a lane busy with transfers of the extents, for as long as it may; done counts those that have ended.
func load(a *ioctl.Attachment, write bool, extents []ioctl.Extent, done *atomic.Int64, stop <-chan struct{}) error {
	const inflight = 16
	type queue struct {
		nvme.QueueMemory
		extents    []ioctl.Extent
		sent, seen uint32
	}
	queues := make([]queue, a.Reply.Drives)
	for d := range queues {
		var err error
		if queues[d].QueueMemory, err = nvme.MapQueue(a.Block(0, d), int(a.Reply.Depth)); err != nil {
			return err
		}
		for _, e := range extents {
			if int(e.Drive) == d {
				queues[d].extents = append(queues[d].extents, e)
			}
		}
	}
	atomic.AddUint32(a.Word(ioctl.ArmedWord), 1)
	defer atomic.AddUint32(a.Word(ioctl.ArmedWord), ^uint32(0))
	for left := 1; left > 0; runtime.Gosched() {
		left = 0
		stopped := false
		select {
		case <-stop:
			stopped = true
		default:
			left = 1
		}
		for d := range queues {
			q := &queues[d]
			for ; !stopped && q.sent-q.seen < inflight && len(q.extents) > 0; q.sent++ {
				e := q.extents[q.sent%uint32(len(q.extents))]
				q.SQ[q.sent%a.Reply.Depth] = transfer(a, write, e, uint16(q.sent%4096))
			}
			atomic.StoreUint32(q.SQTail, q.sent%a.Reply.Depth)
			for {
				_, st, ok := q.CQ[q.seen%a.Reply.Depth].Poll(uint16(1 &^ (q.seen / a.Reply.Depth)))
				if !ok {
					break
				}
				if !st.OK() {
					return fmt.Errorf("a transfer failed: %v", st)
				}
				q.seen++
				done.Add(1)
			}
			atomic.StoreUint32(q.CQHead, q.seen%a.Reply.Depth)
			left += int(q.sent - q.seen)
		}
		nvme.Wake(a.Word(ioctl.WakeWord))
	}
	return nil
}

// One session reads permanently, another stores permanently, and metadata is committed all the while: with phases
// everybody gets on and no drive ever sees both, without phases they do.
func TestPhasesOfSessions(t *testing.T) {
	for _, off := range []bool{false, true} {
		t.Run(map[bool]string{false: "on", true: "off"}[off], func(t *testing.T) {
			p := newPhased(t, Options{Profiles: slowPaper(t, 256), Phases: phase.Options{Off: off}}, extentmap.Options{})
			stop := make(chan struct{})
			var done [2]atomic.Int64
			ended := make(chan error, 2)
			for d, write := range []bool{false, true} {
				a, extents := p.engineOf(write)
				go func() { ended <- load(a, write, extents, &done[d], stop) }()
			}
			const rounds = 4
			for n := int64(1); n <= rounds; n++ {
				c := p.commit(t)
				require.Equal(t, uint32(ioctl.TicketDone), p.keeper.wait(c.Ticket).State)
				require.Eventually(t, func() bool { return min(done[0].Load(), done[1].Load()) > 40*n }, time.Minute,
					time.Millisecond)
			}
			close(stop)
			require.NoError(t, errors.Join(<-ended, <-ended))
			mixed := uint64(0)
			for d := range uint16(2) {
				s := p.phase(d)
				t.Logf("drive %d: %+v", d, s)
				mixed += s.Mixed
				if off {
					require.Zero(t, s.Turns)
				}
				require.Equal(t, !off, s.Switches > 0)
			}
			require.Equal(t, off, mixed > 0)
		})
	}
}

// A session that ends, by whatever, leaves the phase that it is in, although the modelled drive is not through.
func TestPhaseOfAnEndedSession(t *testing.T) {
	p := newPhased(t, Options{Profiles: minuteReads()}, extentmap.Options{})
	reader, read := p.engineOf(false)
	writer, write := p.engineOf(true)
	d := read[0].Drive
	for write[0].Drive != d {
		write = write[1:]
	}
	ring(t, reader, 0, int(d), 0, transfer(reader, false, read[0], 1))
	require.Eventually(t, func() bool { return p.phase(d).Inside == [2]int{1, 0} }, 10*time.Second, time.Millisecond)
	ring(t, writer, 0, int(d), 0, transfer(writer, true, write[0], 1))
	require.Eventually(t, func() bool { return p.phase(d).Wanting == [2]int{0, 1} }, 10*time.Second, time.Millisecond)
	require.NoError(t, reader.Close())
	q, err := nvme.MapQueue(writer.Block(0, int(d)), int(writer.Reply.Depth))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, st, ok := q.CQ[0].Poll(1)
		return ok && st.OK()
	}, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return p.phase(d).Inside == [2]int{} }, 10*time.Second, time.Millisecond)
	require.Zero(t, p.phase(d).Stuck)
}

// helpReading is an engine with a read in flight that does not end.
func helpReading(t *testing.T, mount string) error {
	e, err := newEngine(mount)
	if err != nil {
		return err
	}
	if err := e.storeAndPin(8); err != nil {
		return err
	}
	pin := ioctl.Pin{Target: e.pool, Keys: keys(e.a, 1), Grants: grantSpan, Request: 2}
	if err := e.c.Pin(&pin); err != nil {
		return err
	}
	x := ioctl.Extents{Target: e.pool, Slot: ioctl.View[ioctl.Grant](e.a.Arena, grantSpan)[0].Slot,
		Extents: ioctl.Span{Bytes: 4096}}
	if err := e.c.Extents(&x); err != nil {
		return err
	}
	extent := ioctl.View[ioctl.Extent](e.a.Arena, x.Extents)[0]
	ring(t, e.a, 0, int(extent.Drive), 0, transfer(e.a, false, extent, 1))
	fmt.Println("reading:", extent.Drive)
	select {}
}

// kill -9 does it, too.
func TestPhaseOfAKilledEngine(t *testing.T) {
	needMount(t)
	p := newPhased(t, Options{Profiles: minuteReads()}, extentmap.Options{})
	dir := t.TempDir()
	p.mount(t, dir)
	cmd, lines := helper(t, "reading", dir)
	var d uint16
	_, err := fmt.Sscan(say(t, lines, "reading: "), &d)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.phase(d).Inside[phase.Read] == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Eventually(t, func() bool { return p.phase(d).Inside == [2]int{} }, 10*time.Second, time.Millisecond)
	c := p.commit(t)
	require.Equal(t, uint32(ioctl.TicketDone), p.keeper.wait(c.Ticket).State)
}

// The mount ends while an engine's write and metadata wait for a read that does not end.
func TestUnmountWhileWaiting(t *testing.T) {
	p := newPhased(t, Options{Profiles: minuteReads()}, extentmap.Options{})
	reader, read := p.engineOf(false)
	writer, write := p.engineOf(true)
	for d := range uint16(2) {
		for _, e := range read {
			if e.Drive == d {
				ring(t, reader, 0, int(d), 0, transfer(reader, false, e, 1))
				break
			}
		}
		require.Eventually(t, func() bool { return p.phase(d).Inside[phase.Read] == 1 }, 10*time.Second, time.Millisecond)
	}
	d := write[0].Drive
	ring(t, writer, 0, int(d), 0, transfer(writer, true, write[0], 1))
	p.commit(t)
	require.Eventually(t, func() bool { return p.phase(d).Wanting[phase.Write] == 2 }, 10*time.Second, time.Millisecond)
	began := time.Now()
	p.close()
	require.Less(t, time.Since(began), 50*time.Second, "nobody waited for the read")
}

// A drive that is given up while metadata waits for its phase is lost like any other; the mount goes on without it.
func TestDriveLossWhileWaiting(t *testing.T) {
	p := newPhased(t, Options{Profiles: minuteReads(), Phases: phase.Options{Patience: phase.PatienceMax}},
		extentmap.Options{DriveTimeout: time.Second})
	reader, read := p.engineOf(false)
	d := read[0].Drive
	ring(t, reader, 0, int(d), 0, transfer(reader, false, read[0], 1))
	require.Eventually(t, func() bool { return p.phase(d).Inside[phase.Read] == 1 }, 10*time.Second, time.Millisecond)
	c := p.commit(t)
	require.Equal(t, uint32(ioctl.TicketDone), p.keeper.wait(c.Ticket).State)
	require.True(t, p.volume.Info().Degraded)
	c = p.commit(t)
	require.Equal(t, uint32(ioctl.TicketDone), p.keeper.wait(c.Ticket).State)
}

package daemon

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
)

func TestAttachIsChecked(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{DMABytesMax: 1 << 20, SharedBytesMax: 8 << 20})
	c := w.open(true)
	var s ioctl.Session
	require.Zero(t, issue(c, ioctl.CmdSessionCreate, &s, 0))
	for _, x := range []struct {
		name string
		want error
		edit func(s *ioctl.Session, o *ioctl.AttachOptions)
	}{
		{"wrong token", ioctl.ENOENT, func(s *ioctl.Session, _ *ioctl.AttachOptions) { s.Token[5] ^= 1 }},
		{"no token", ioctl.ENOENT, func(s *ioctl.Session, _ *ioctl.AttachOptions) { s.Token = [16]byte{} }},
		{"wrong session", ioctl.ENOENT, func(s *ioctl.Session, _ *ioctl.AttachOptions) { s.ID++ }},
		{"wrong member", ioctl.ENOENT, func(s *ioctl.Session, _ *ioctl.AttachOptions) { s.Member++ }},
		{"too many lanes", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Lanes = 65 }},
		{"odd depth", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Depth = 100 }},
		{"no depth", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Depth = 0 }},
		{"too deep", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Depth = 8192 }},
		{"depth without lanes", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Lanes, o.DMABytes = 0, 0 }},
		{"memory without lanes", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.Lanes, o.Depth = 0, 0 }},
		{"odd memory", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.DMABytes = 4097 }},
		{"too much memory", ioctl.EINVAL, func(_ *ioctl.Session, o *ioctl.AttachOptions) { o.DMABytes = 2 << 20 }},
	} {
		t.Run(x.name, func(t *testing.T) {
			copied, o := s, ioctl.AttachOptions{Lanes: 1, Depth: 64, DMABytes: 4096}
			x.edit(&copied, &o)
			_, err := copied.Attach(o)
			require.ErrorIs(t, err, x.want)
		})
	}
	a, err := s.Attach(ioctl.AttachOptions{Lanes: 1, Depth: 64, DMABytes: 4096})
	require.NoError(t, err, "refusals leave the member as it was")
	defer a.Close()
	_, err = s.Attach(ioctl.AttachOptions{})
	require.ErrorIs(t, err, ioctl.EBUSY)

	other := w.open(true)
	require.Zero(t, issue(other, ioctl.CmdSessionCreate, &s, 0))
	_, err = s.Attach(ioctl.AttachOptions{Lanes: 64, Depth: 4096, DMABytes: 4096})
	require.ErrorIs(t, err, ioctl.ENOMEM, "all processes together may have 8 MiB")
}

// TestStrangersAreBounded: connections that do not attach leave room for those that do.
func TestStrangersAreBounded(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{MaxMembers: 4})
	dial := func() *net.UnixConn {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: w.control.SocketPath(), Net: "unixpacket"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	strangers := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			w.control.mu.Lock()
			defer w.control.mu.Unlock()
			return w.control.strangers[uint32(os.Getuid())] == n
		}, 10*time.Second, time.Millisecond)
	}
	first := dial()
	dial()
	strangers(2)
	_, err := dial().Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "refused")
	require.NoError(t, first.Close())
	strangers(1)
	for range 3 {
		w.open(true).session(ioctl.AttachOptions{})
		strangers(1)
	}
}

// TestAttachIsPrivate: nobody but the user reaches the socket, and what others send is refused without harm.
func TestAttachIsPrivate(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	st, err := os.Stat(w.control.SocketPath())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	for _, message := range [][]byte{{}, {1}, make([]byte, 120), make([]byte, 4096)} {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Connect(fd, &unix.SockaddrUnix{Name: w.control.SocketPath()}))
		require.NoError(t, unix.Sendmsg(fd, message, nil, nil, unix.MSG_NOSIGNAL))
		answer := make([]byte, 1024)
		n, err := unix.Read(fd, answer)
		require.NoError(t, err)
		if n > 0 { // an empty message looks like the end
			r, err := ioctl.ParseAttachReply(answer[:n])
			require.NoError(t, err)
			require.Equal(t, int32(ioctl.EINVAL), r.Errno)
			require.Zero(t, r.Descriptors)
		}
		require.NoError(t, unix.Close(fd))
	}
}

func TestSessionPage(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 3, Depth: 16, DMABytes: 1 << 20})
	require.Equal(t, w.volume.Info().Nonce, a.Nonce())
	require.Equal(t, uint32(ioctl.SessionLive), *a.Word(ioctl.StateWord))
	require.Equal(t, [3]uint32{3, 16, 2}, [3]uint32{a.Reply.Lanes, a.Reply.Depth, a.Reply.Drives})
	require.Len(t, a.DMA, 1<<20)
	require.Equal(t, uint64(4096+6*nvme.QueueBytes(16)), uint64(len(a.Queues)))
	before := a.Heartbeat()
	require.Eventually(t, func() bool { return a.Heartbeat() > before }, 10*time.Second, time.Millisecond)

	tickets, maps := atomic.LoadUint32(a.Word(ioctl.TicketWord)), a.MapGeneration()
	p := c.pool(a, "p")
	require.Greater(t, atomic.LoadUint32(a.Word(ioctl.TicketWord)), tickets)
	c.store(a, p, 1, 1)
	require.Eventually(t, func() bool { return a.MapGeneration() > maps }, 10*time.Second, time.Millisecond)

	require.NoError(t, w.control.Shutdown())
	require.Equal(t, uint32(ioctl.SessionClosed), *a.Word(ioctl.StateWord))
	require.Equal(t, ioctl.ESTALE, issue(c, ioctl.CmdHello, &ioctl.Hello{}, 0))
	require.False(t, a.Alive())
	_, err := os.Stat(w.control.SocketPath())
	require.ErrorIs(t, err, os.ErrNotExist)
}

// transfer is the command for one object, to or from the start of the DMA memory.
func transfer(a *ioctl.Attachment, write bool, e ioctl.Extent, cid uint16) (sqe nvme.SQE) {
	lba := uint64(a.Reply.LBABytes[e.Drive])
	nvme.BuildRW(&sqe, write, cid, 1, e.Unit*4096/lba, e.Units*4096/uint32(lba))
	sqe.Flags = nvme.FlagPSDTSGL
	sqe.DPTR = [2]uint64{ioctl.DMABase, uint64(e.Units) * 4096} // one SGL data block
	return sqe
}

// ring puts one command into a lane's queue and tells the poller.
func ring(t *testing.T, a *ioctl.Attachment, lane, d int, tail uint32, e nvme.SQE) nvme.QueueMemory {
	t.Helper()
	q, err := nvme.MapQueue(a.Block(lane, d), int(a.Reply.Depth))
	require.NoError(t, err)
	q.SQ[tail] = e
	atomic.AddUint32(a.Word(ioctl.ArmedWord), 1)
	atomic.StoreUint32(q.SQTail, tail+1)
	if atomic.SwapUint32(a.Word(ioctl.WakeWord), 0) != 0 {
		ioctl.FutexWake(a.Word(ioctl.WakeWord))
	}
	return q
}

// submit rings one command on a lane and returns its completion.
func submit(t *testing.T, a *ioctl.Attachment, lane, d int, tail uint32, e nvme.SQE) nvme.Status {
	t.Helper()
	q := ring(t, a, lane, d, tail, e)
	var status nvme.Status
	require.Eventually(t, func() bool {
		cid, st, ok := q.CQ[tail].Poll(1)
		status = st
		return ok && cid == e.CID
	}, 10*time.Second, 100*time.Microsecond)
	atomic.AddUint32(a.Word(ioctl.ArmedWord), ^uint32(0))
	return status
}

// TestQueuesServeLeases (invariant f): a reserved slot can be written, a pinned one read, and nothing else.
func TestQueuesServeLeases(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{Pollers: 2})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 2, Depth: 64, DMABytes: 1 << 20})
	p := c.pool(a, "p")
	r := ioctl.Reserve{Target: p, Items: items(a, 1), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	slot := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[0].Slot
	x := ioctl.Extents{Target: p, Slot: slot, Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(t, issue(c, ioctl.CmdExtents, &x, 0))
	extents := append([]ioctl.Extent(nil), ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count]...)

	tails := map[uint16]uint32{}
	do := func(write bool, e ioctl.Extent) nvme.Status {
		t.Helper()
		status := submit(t, a, 0, int(e.Drive), tails[e.Drive], transfer(a, write, e, uint16(tails[e.Drive])))
		tails[e.Drive]++
		return status
	}
	require.NotZero(t, do(false, extents[0]), "reading a reserved slot")
	commit := ioctl.Commit{Target: p, Reserve: 1}
	for i := range a.DMA {
		a.DMA[i] = byte(i * 7)
	}
	for _, e := range extents {
		require.Zero(t, do(true, e), "writing object %d", e.Object)
	}
	require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0))
	require.Equal(t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
	require.NotZero(t, do(true, extents[0]), "writing a committed slot")
	require.NotZero(t, do(false, extents[0]), "reading without a pin")
	pin := ioctl.Pin{Target: p, Keys: keys(a, 1), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, uint32(1), pin.Count)
	want := append([]byte(nil), a.DMA[:extents[0].Units*4096]...)
	clear(a.DMA)
	require.Zero(t, do(false, extents[0]))
	require.Equal(t, want, a.DMA[:len(want)])

	require.NoError(t, a.Quiesce(0))
	require.NoError(t, a.Quiesce(0), "again")
	require.ErrorIs(t, a.Reattach(1), ioctl.EBUSY, "the other lane runs")
	require.ErrorIs(t, a.Quiesce(2), ioctl.EINVAL)
	require.NoError(t, a.Reattach(0))
	tails = map[uint16]uint32{}
	require.Zero(t, do(false, extents[0]), "the lane serves again, from the start")
}

// forgetfulDrive takes no discards, as many a drive: the old bytes stay.
type forgetfulDrive struct{ drive.Drive }

func (forgetfulDrive) Discard(int64, int64) error { return drive.ErrNotSupported }

// TestDeallocatingIsNotWriting: a slot still holds an earlier tenant's bytes where its engine has only deallocated, so
// it must not be committed and read.
func TestDeallocatingIsNotWriting(t *testing.T) {
	drives := memoryDrives(t, 64<<20)
	for i := range drives {
		drives[i] = forgetfulDrive{drives[i]}
	}
	w := newWorldOn(t, drives, gpufile.Options{}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 1 << 20})
	p := c.pool(a, "p")
	r := ioctl.Reserve{Target: p, Items: items(a, 1), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	slot := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[0].Slot
	x := ioctl.Extents{Target: p, Slot: slot, Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(t, issue(c, ioctl.CmdExtents, &x, 0))
	tails := map[uint16]uint32{}
	for _, e := range ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count] {
		var sqe nvme.SQE
		nvme.BuildDSM(&sqe, uint16(tails[e.Drive]), 1, 1)
		sqe.DPTR[0] = ioctl.DMABase
		scale := drive.UnitBytes / uint64(w.volume.Drive(e.Drive).LBABytes())
		binary.LittleEndian.PutUint32(a.DMA[4:], e.Units*uint32(scale))
		binary.LittleEndian.PutUint64(a.DMA[8:], e.Unit*scale)
		require.Zero(t, submit(t, a, 0, int(e.Drive), tails[e.Drive], sqe))
		tails[e.Drive]++
	}
	require.Equal(t, ioctl.ENODATA, issue(c, ioctl.CmdCommit, &ioctl.Commit{Target: p, Reserve: 1}, 0))
	require.Zero(t, w.store.PoolByName("p").Stats().Files)
}

// gatedDrive holds writes back while its gate is shut: a drive that does not answer.
type gatedDrive struct {
	drive.Drive
	shut    atomic.Bool
	gate    chan struct{} // closed when writes may go on
	waiting atomic.Int32
}

func (d *gatedDrive) Kind() drive.Kind { return drive.File }
func (d *gatedDrive) Bytes() []byte    { return nil }

func (d *gatedDrive) WriteAt(p []byte, off int64) error {
	if d.shut.Load() {
		d.waiting.Add(1)
		<-d.gate
	}
	return d.Drive.WriteAt(p, off)
}

// TestDeathWaitsForCommands (invariant f): what a dead process has in flight keeps its slot and its memory until the
// drive has answered.
func TestDeathWaitsForCommands(t *testing.T) {
	drives := memoryDrives(t, 64<<20)
	slow := make([]*gatedDrive, len(drives))
	for i := range drives {
		slow[i] = &gatedDrive{Drive: drives[i], gate: make(chan struct{})}
		drives[i] = slow[i]
	}
	w := newWorldOn(t, drives, gpufile.Options{}, ControlOptions{QuiesceTimeout: 50 * time.Millisecond})
	keeper := w.open(true)
	_, b := keeper.session(ioctl.AttachOptions{})
	p := keeper.pool(b, "p")
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 1 << 20})
	r := ioctl.Reserve{Target: p, Items: items(a, 1), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	slot := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[0].Slot
	x := ioctl.Extents{Target: p, Slot: slot, Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(t, issue(c, ioctl.CmdExtents, &x, 0))
	e := ioctl.View[ioctl.Extent](a.Arena, x.Extents)[0]
	d := slow[e.Drive]
	d.shut.Store(true)
	ring(t, a, 0, int(e.Drive), 0, transfer(a, true, e, 1))
	require.Eventually(t, func() bool { return d.waiting.Load() > 0 }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, a.Quiesce(0), ioctl.ETIMEDOUT)
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool {
		m := w.control.Members()
		return len(m) == 2 && m[1].Ending
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, ioctl.ESTALE, issue(c, ioctl.CmdRelease, &ioctl.Release{Target: p}, 0))
	time.Sleep(200 * time.Millisecond) // longer than the time-out
	require.Len(t, w.control.Members(), 2, "the command is in flight")
	shared := sharedMappings(t)
	require.Equal(t, uint64(1), w.store.PoolByName("p").Stats().FilesReserved)

	d.shut.Store(false)
	close(d.gate)
	require.Eventually(t, func() bool { return len(w.control.Members()) == 1 }, 10*time.Second, time.Millisecond)
	require.Zero(t, w.store.PoolByName("p").Stats().FilesReserved)
	require.Equal(t, shared-3, sharedMappings(t), "arena, queues and DMA memory")
}

// TestIncompleteCommit (invariant m): a slot is committed only when all its objects were written.
func TestIncompleteCommit(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	p := c.pool(a, "p")
	r := ioctl.Reserve{Target: p, Items: items(a, 1), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	require.Equal(t, ioctl.ENODATA, issue(c, ioctl.CmdCommit, &ioctl.Commit{Target: p, Reserve: 1}, 0))
	require.Zero(t, w.store.PoolByName("p").Stats().Files)
}

// TestHangUpEndsTheMember, with its pins and reservations.
func TestHangUpEndsTheMember(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	keeper := w.open(true)
	_, b := keeper.session(ioctl.AttachOptions{})
	p := keeper.pool(b, "p")
	keeper.store(b, p, 1, 3)

	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 4096})
	pin := ioctl.Pin{Target: p, Keys: keys(a, 3), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, uint64(3), w.store.PoolByName("p").Stats().FilesPinned)
	require.Len(t, w.control.Members(), 2)
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool { return len(w.control.Members()) == 1 }, 10*time.Second, time.Millisecond)
	require.Zero(t, w.store.PoolByName("p").Stats().FilesPinned)
	require.Len(t, w.store.Sessions(), 1)
	require.Equal(t, ioctl.ESTALE, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, ioctl.EBUSY, issue(c, ioctl.CmdSessionCreate, &ioctl.Session{}, 0), "one membership a file")
}

// TestPollersShareQueues: no more pollers than queues, whatever lane these are of. What SSDs serve themselves is none
// of them.
func TestPollersShareQueues(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{Pollers: 64})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 3, Depth: 64, DMABytes: 1 << 20})
	drives := a.Reply.Drives
	require.Greater(t, drives, uint32(1))
	require.Equal(t, 3*drives, a.Reply.Pollers)
}

// TestQueuesAreDealt: the queues of a lane that the daemon serves go to as many pollers as there are, all pollers have
// equally many, but for one, and none has a queue that its SSD serves.
func TestQueuesAreDealt(t *testing.T) {
	for lanes := 1; lanes <= 9; lanes++ {
		for _, own := range []string{"-", "o", "--", "-o", "oo", "---", "o-o", "-oo-", "-----", "o--o--o", "--------",
			strings.Repeat("-o", ioctl.DrivesMax/2)} {
			for _, most := range []int{1, 2, 3, 4, 5, 8, 64, 1000} {
				m := member{c: &Control{o: ControlOptions{Pollers: most}}, lanes: make([]lane, lanes),
					drives: make([]driveController, len(own)), real: &realSide{}}
				for _, o := range own {
					m.real.drives = append(m.real.drives, o == 'o')
				}
				mediated := strings.Count(own, "-")
				require.Equal(t, mediated, m.mediated())
				m.pollers = make([]*poller, m.pollerCount())
				require.Len(t, m.pollers, max(1, min(most, lanes*mediated)))
				loads := make([]int, len(m.pollers))
				for i := range lanes {
					distinct := map[int]bool{}
					dealt := m.dealt(i)
					require.Len(t, dealt, len(own))
					for d, p := range dealt {
						require.Equal(t, own[d] == 'o', p == ownQueue)
						if p != ownQueue {
							distinct[p] = true
							loads[p]++
						}
					}
					require.Len(t, distinct, min(mediated, len(m.pollers)), "%d of %d lanes, %s, %d pollers", i, lanes, own, most)
				}
				require.LessOrEqual(t, slices.Max(loads)-slices.Min(loads), 1, "%d lanes, %s, %d pollers", lanes, own, most)
			}
		}
	}
}

package daemon

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
	"tuttifs/nvme/vfio"
)

// ssd is a drive as the driver of nvme/vfio has it, with a virtual controller for hardware.
type ssd struct {
	*vfio.Drive
	memory    drive.Drive
	transport *nvmetest.Emulated
	hold      atomic.Bool // commands do not end
}

const ssdQueues = 12

func newSSD(t testing.TB, c emu.Config, o vfio.Options) *ssd {
	t.Helper()
	s := &ssd{memory: c.Drive}
	if s.memory == nil {
		d, err := drive.NewMemory("ssd", 64<<20)
		require.NoError(t, err)
		s.memory, c.Drive = d, d
	}
	c.Queues = ssdQueues
	hardware, err := emu.New(c)
	require.NoError(t, err)
	hardware.SetFaults(func(e *nvme.SQE) *emu.Fault {
		if s.hold.Load() && e.Opcode == nvme.IOWrite {
			return &emu.Fault{Hold: func() bool { return s.hold.Load() }}
		}
		return nil
	})
	s.transport = nvmetest.NewEmulated(hardware)
	require.NoError(t, s.transport.ShareDoorbells())
	controller, err := vfio.Open(s.transport, o)
	require.NoError(t, err)
	s.Drive, err = vfio.NewDrive(controller, 1, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = s.Drive.Close()
		_ = controller.Close()
	})
	return s
}

// realWorld is a volume on SSDs; engines of this user may have queue pairs of theirs.
func realWorld(t testing.TB, g gpufile.Options, o ControlOptions, list ...*ssd) *world {
	t.Helper()
	drives := make([]drive.Drive, len(list))
	for i, s := range list {
		drives[i] = s.Drive
	}
	if o.Real == (Trust{}) {
		o.Real = Trust{user: true, uid: uint32(os.Geteuid())}
	}
	return newWorldOn(t, drives, g, o)
}

// pair drives one queue pair of an attachment, as an engine does.
type pair struct {
	t          *testing.T
	memory     nvme.QueueMemory
	tail, head *uint32
	sq, cq     uint32
	phase      uint16
}

func newPair(t *testing.T, a *ioctl.Attachment, lane, d int) *pair {
	t.Helper()
	p := &pair{t: t, phase: 1}
	var err error
	p.memory, err = nvme.MapQueue(a.Block(lane, d), int(a.Reply.Depth))
	require.NoError(t, err)
	p.tail, p.head, err = a.Bells(lane, d)
	require.NoError(t, err)
	require.NotNil(t, p.tail)
	return p
}

func (p *pair) submit(e nvme.SQE) {
	p.memory.SQ[p.sq] = e
	p.sq = (p.sq + 1) % uint32(len(p.memory.SQ))
	nvme.StoreRegister(p.tail, p.sq)
}

func (p *pair) do(e nvme.SQE) nvme.Status {
	p.t.Helper()
	p.submit(e)
	// By this goroutine: another one might still look when the memory is gone.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		status, ok := p.completion()
		if ok {
			return status
		}
		require.True(p.t, time.Now().Before(end), "no completion")
	}
}

// completion takes the next completion, if it is in.
func (p *pair) completion() (status nvme.Status, ok bool) {
	if _, status, ok = p.memory.CQ[p.cq].Poll(p.phase); !ok {
		return 0, false
	}
	if p.cq++; p.cq == uint32(len(p.memory.CQ)) {
		p.cq, p.phase = 0, p.phase^1
	}
	nvme.StoreRegister(p.head, p.cq)
	return status, true
}

// unitAt is the command that moves one unit of a drive by the first page of DMA memory.
func unitAt(a *ioctl.Attachment, d int, write bool, unit uint64) (e nvme.SQE) {
	scale := drive.UnitBytes / uint64(a.Reply.LBABytes[d])
	nvme.BuildRW(&e, write, uint16(unit), a.DriveBells(d).NSID, unit*scale, uint32(scale))
	e.DPTR[0] = a.Reply.DMABase
	return e
}

var realOptions = ioctl.AttachOptions{Lanes: 2, Depth: 16, DMABytes: 1 << 20, Real: true}

// extentsOf reserves one file and says where its objects lie.
func extentsOf(c *client, a *ioctl.Attachment, p ioctl.Target, reserve uint64) []ioctl.Extent {
	c.w.t.Helper()
	r := ioctl.Reserve{Target: p, Items: items(a, 1), Grants: grantSpan, Reserve: reserve}
	c.reserve(&r)
	x := ioctl.Extents{Target: p, Slot: ioctl.View[ioctl.Grant](a.Arena, grantSpan)[0].Slot,
		Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(c.w.t, issue(c, ioctl.CmdExtents, &x, 0))
	return append([]ioctl.Extent(nil), ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count]...)
}

// TestRealIsForTheTrusted: by default nobody gets queue pairs of an SSD, and who does not ask for them does not either.
func TestRealIsForTheTrusted(t *testing.T) {
	uid := uint32(os.Geteuid())
	for name, x := range map[string]struct {
		trust Trust
		want  error
	}{
		"off":          {Trust{}, ioctl.EPERM},
		"another user": {Trust{user: true, uid: uid + 1}, ioctl.EPERM},
		"this user":    {Trust{user: true, uid: uid}, nil},
		"on":           {Trust{anybody: true}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
			w := newWorldOn(t, []drive.Drive{s.Drive}, gpufile.Options{}, ControlOptions{Real: x.trust})
			_, a := w.open(true).session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 4096})
			require.EqualValues(t, ioctl.ModeMediated, a.Reply.Mode)
			require.Equal(t, ioctl.DMABase, a.Reply.DMABase)
			require.Zero(t, a.DriveBells(0))
			c := w.open(true)
			var session ioctl.Session
			require.Zero(t, issue(c, ioctl.CmdSessionCreate, &session, 0))
			b, err := session.Attach(realOptions)
			if x.want != nil {
				require.ErrorIs(t, err, x.want)
				return
			}
			require.NoError(t, err)
			defer b.Close()
			require.EqualValues(t, ioctl.ModeReal, b.Reply.Mode)
			infos := w.control.Members()
			require.Equal(t, []string{"mediated", "real"}, []string{infos[0].Mode, infos[1].Mode})
			require.Equal(t, []uint16{0}, infos[1].RealDrives)
			require.Equal(t, map[uint16]RealStats{0: {Pairs: 2}}, w.control.RealIO())
		})
	}
	for _, bad := range []string{"", "yes", "-1", "4294967296", "root"} {
		_, err := ParseTrust(bad)
		require.Error(t, err, bad)
	}
	for _, good := range []string{"off", "on", "0", "1000"} {
		trust, err := ParseTrust(good)
		require.NoError(t, err)
		require.Equal(t, good, trust.String())
	}
}

// TestRealQueuesReachTheDrive: bytes go between the session's memory and the SSD, and nobody else's hands are on them.
func TestRealQueuesReachTheDrive(t *testing.T) {
	one, two := emu.Config{SGL: true, MDTS: 5}, emu.Config{MDTS: 8}
	list := []*ssd{newSSD(t, one, vfio.Options{}), newSSD(t, two, vfio.Options{})}
	w := realWorld(t, gpufile.Options{}, ControlOptions{}, list...)
	c := w.open(true)
	_, a := c.session(realOptions)
	require.Less(t, a.Reply.DMABase, uint64(1)<<39)
	require.Zero(t, a.Reply.SGL, "the second one has none")
	require.EqualValues(t, 128<<10, a.Reply.CommandBytes, "the first one's limit")
	before := w.control.Controllers()[0].Stats()
	p := c.pool(a, "p")
	queues := []*pair{newPair(t, a, 0, 0), newPair(t, a, 0, 1)}
	extents := extentsOf(c, a, p, 1)
	for round := range 3 {
		for i, e := range extents {
			binary.LittleEndian.PutUint64(a.DMA, uint64(round<<32|i)|1<<63)
			require.Zero(t, queues[e.Drive].do(unitAt(a, int(e.Drive), true, e.Unit)))
			clear(a.DMA[:8])
			require.Zero(t, queues[e.Drive].do(unitAt(a, int(e.Drive), false, e.Unit)))
			require.Equal(t, uint64(round<<32|i)|1<<63, binary.LittleEndian.Uint64(a.DMA))
			b := make([]byte, 8)
			require.NoError(t, list[e.Drive].memory.ReadAt(b, int64(e.Unit)*drive.UnitBytes))
			require.Equal(t, a.DMA[:8], b)
		}
	}
	commit := ioctl.Commit{Target: p, Reserve: 1}
	require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0), "by the engine's word")
	require.Equal(t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
	require.Equal(t, uint64(1), w.store.PoolByName("p").Stats().Files)
	require.Equal(t, before, w.control.Controllers()[0].Stats(), "the virtual controller had nothing to do")

	outside := unitAt(a, 0, false, extents[0].Unit)
	outside.DPTR[0] = a.Reply.DMABase + a.Reply.DMABytes
	require.NotZero(t, queues[0].do(outside), "memory that was not mapped is not reached")
}

// TestRealBesideMediated: drives without a driver of ours stay mediated, in the same session and at the same addresses.
func TestRealBesideMediated(t *testing.T) {
	s := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	file, err := drive.NewMemory("file", 64<<20)
	require.NoError(t, err)
	w := newWorldOn(t, []drive.Drive{s.Drive, file}, gpufile.Options{}, ControlOptions{Real: Trust{anybody: true}})
	c := w.open(true)
	_, a := c.session(realOptions)
	require.NotZero(t, a.DriveBells(0))
	require.Zero(t, a.DriveBells(1))
	tail, _, err := a.Bells(0, 1)
	require.NoError(t, err)
	require.Nil(t, tail)
	p := c.pool(a, "p")
	extents := extentsOf(c, a, p, 1)
	own, tails := newPair(t, a, 0, 0), uint32(0)
	require.Equal(t, ioctl.ENODATA, issue(c, ioctl.CmdCommit, &ioctl.Commit{Target: p, Reserve: 1}, 0),
		"what should have gone by the daemon did not")
	extents = extentsOf(c, a, p, 2)
	for _, e := range extents {
		if e.Drive == 0 {
			require.Zero(t, own.do(unitAt(a, 0, true, e.Unit)))
			continue
		}
		sqe := transfer(a, true, e, uint16(tails))
		sqe.DPTR[0] = a.Reply.DMABase
		require.Zero(t, submit(t, a, 0, 1, tails, sqe))
		tails++
	}
	require.NotZero(t, tails)
	commit := ioctl.Commit{Target: p, Reserve: 2}
	require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0))
	require.Equal(t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
}

// TestRealLanesEnd: a quiesced lane's pairs are gone, those of the next are others, and a dead engine leaves nothing.
func TestRealLanesEnd(t *testing.T) {
	s := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	w := realWorld(t, gpufile.Options{}, ControlOptions{}, s)
	keeper := w.open(true)
	_, b := keeper.session(ioctl.AttachOptions{})
	p := keeper.pool(b, "p")
	mapped, shared := s.transport.Mapped(), sharedMappings(t)
	for range 3 { // more pairs than the controller has queues
		c := w.open(true)
		_, a := c.session(ioctl.AttachOptions{Lanes: ssdQueues - 1, Depth: 16, DMABytes: 1 << 20, Real: true})
		require.Equal(t, mapped+2, s.transport.Mapped(), "queues and DMA memory")
		e := extentsOf(c, a, p, 1)[0]
		q := newPair(t, a, 0, 0)
		require.Zero(t, q.do(unitAt(a, 0, true, e.Unit)))
		s.hold.Store(true)
		q.submit(unitAt(a, 0, true, e.Unit))
		require.NoError(t, a.Quiesce(0), "deleting the queue ends the command")
		require.NoError(t, a.Quiesce(0))
		s.hold.Store(false)
		require.NoError(t, a.Reattach(0))
		require.ErrorIs(t, a.Reattach(0), ioctl.EBUSY)
		require.Zero(t, newPair(t, a, 0, 0).do(unitAt(a, 0, false, e.Unit)), "from the start")

		other := w.open(true)
		var session ioctl.Session
		require.Zero(t, issue(other, ioctl.CmdSessionCreate, &session, 0))
		_, err := session.Attach(realOptions)
		require.ErrorIs(t, err, ioctl.EINVAL, "no queue is left")

		s.hold.Store(true)
		newest := newPair(t, a, 1, 0)
		newest.submit(unitAt(a, 0, true, e.Unit))
		require.Equal(t, uint64(1), w.store.PoolByName("p").Stats().FilesReserved)
		require.NoError(t, a.Close())
		require.Eventually(t, func() bool { return len(w.control.Members()) == 1 }, 10*time.Second, time.Millisecond)
		s.hold.Store(false)
		require.Zero(t, w.store.PoolByName("p").Stats().FilesReserved)
		require.Equal(t, mapped, s.transport.Mapped(), "the SSD reaches none of its memory any more")
		require.Equal(t, shared, sharedMappings(t))
	}
}

// TestRealControllerResets: its pairs are lost with it, the lane ends and begins again.
func TestRealControllerResets(t *testing.T) {
	s := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	w := realWorld(t, gpufile.Options{}, ControlOptions{}, s)
	c := w.open(true)
	_, a := c.session(realOptions)
	p := c.pool(a, "p")
	e := extentsOf(c, a, p, 1)[0]
	require.Zero(t, newPair(t, a, 0, 0).do(unitAt(a, 0, true, e.Unit)))
	require.NoError(t, s.Controller().Reset())
	require.NoError(t, a.Quiesce(0))
	require.NoError(t, a.Reattach(0))
	require.Zero(t, newPair(t, a, 0, 0).do(unitAt(a, 0, true, e.Unit)))
	s.transport.Remove()
	require.NoError(t, a.Quiesce(0), "what is gone touches nothing")
	require.Error(t, a.Reattach(0))
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool { return len(w.control.Members()) == 0 }, 10*time.Second, time.Millisecond)
	w.closeLost()
}

// closeLost ends a world whose only drive is lost.
func (w *world) closeLost() {
	w.t.Helper()
	require.NoError(w.t, w.control.Shutdown())
	w.store.Close()
	require.Error(w.t, w.volume.Close())
	w.volume = nil
}

// TestRealControllerHangs: a queue that is not deleted keeps its slots and its memory; the reset that the driver ends
// it with frees them.
func TestRealControllerHangs(t *testing.T) {
	s := newSSD(t, emu.Config{SGL: true}, vfio.Options{AdminTimeout: 500 * time.Millisecond,
		RecoveryTimeout: 100 * time.Millisecond})
	w := realWorld(t, gpufile.Options{}, ControlOptions{QuiesceTimeout: 50 * time.Millisecond}, s)
	c := w.open(true)
	_, a := c.session(realOptions)
	p := c.pool(a, "p")
	extentsOf(c, a, p, 1)
	mapped := s.transport.Mapped()
	var mute atomic.Bool
	mute.Store(true)
	s.transport.SetFaults(&nvmetest.Faults{Store: func(off, _ uint32) bool {
		return mute.Load() && off == nvme.RegDoorbells // the admin queue's: no command is heard
	}})
	require.ErrorIs(t, a.Quiesce(0), ioctl.ETIMEDOUT)
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool {
		m := w.control.Members()
		return len(m) == 1 && m[0].Ending
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, mapped, s.transport.Mapped())
	require.Equal(t, uint64(1), w.store.PoolByName("p").Stats().FilesReserved)
	mute.Store(false)
	require.Eventually(t, func() bool { return len(w.control.Members()) == 0 }, 20*time.Second, time.Millisecond)
	require.Zero(t, w.store.PoolByName("p").Stats().FilesReserved)
	require.Equal(t, mapped-2, s.transport.Mapped())
}

// TestRealControllerIsDead: memory that a controller may write to for ever is given to nobody.
func TestRealControllerIsDead(t *testing.T) {
	if testing.Short() {
		t.Skip("the driver gives a controller 15 s to stop")
	}
	s := newSSD(t, emu.Config{SGL: true}, vfio.Options{AdminTimeout: 200 * time.Millisecond,
		RecoveryTimeout: 100 * time.Millisecond})
	w := realWorld(t, gpufile.Options{}, ControlOptions{QuiesceTimeout: 50 * time.Millisecond}, s)
	c := w.open(true)
	_, a := c.session(realOptions)
	mapped, shared := s.transport.Mapped(), sharedMappings(t)
	s.transport.SetFaults(&nvmetest.Faults{
		Store: func(off, _ uint32) bool { return true },
		Reset: func() error { return os.ErrDeadlineExceeded },
	})
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool { return len(w.control.Members()) == 0 }, 30*time.Second, time.Millisecond)
	require.Equal(t, mapped, s.transport.Mapped())
	require.Equal(t, shared-3, sharedMappings(t), "the engine's; ours are there")
	w.closeLost()
	s.transport.SetFaults(nil)
}

// TestRealAfterRestart: whatever an engine left at a controller is gone before the next daemon gives a slot out.
func TestRealAfterRestart(t *testing.T) {
	memory, err := drive.NewMemory("ssd", 64<<20)
	require.NoError(t, err)
	first := newSSD(t, emu.Config{SGL: true, Drive: memory}, vfio.Options{})
	_, err = extentmap.Format([]drive.Drive{first.Drive}, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	hardware := first.transport
	controller := first.Controller()
	pairs := []*vfio.Pair{}
	for range 3 { // as if of an engine that goes on while its daemon was killed
		p, err := controller.NewPair(16, nil)
		require.NoError(t, err)
		pairs = append(pairs, p)
	}
	var e nvme.SQE
	nvme.BuildRW(&e, false, 7, 1, 0, 8)
	e.DPTR[0] = pairs[0].Memory.IOVA
	again, err := vfio.Open(keepOpen{hardware}, vfio.Options{})
	require.NoError(t, err)
	pairs[0].SQ[0] = e
	hardware.Store32(pairs[0].SQTail, 1)
	own, err := vfio.NewDrive(again, 1, drive.Options{})
	require.NoError(t, err)
	w := openWorld(t, []drive.Drive{own}, extentmap.Options{}, gpufile.Options{},
		ControlOptions{Real: Trust{anybody: true}})
	require.Equal(t, again.Queues(), ssdQueues)
	c := w.open(true)
	_, a := c.session(realOptions)
	p := c.pool(a, "p")
	extent := extentsOf(c, a, p, 1)[0]
	require.Zero(t, newPair(t, a, 0, 0).do(unitAt(a, 0, true, extent.Unit)))
	_, _, done := pairs[0].CQ[0].Poll(1)
	require.False(t, done, "the old queue is not there")
	w.close()
	require.NoError(t, again.Close())
}

// keepOpen is a transport that its first user still has.
type keepOpen struct{ *nvmetest.Emulated }

func (keepOpen) Close() error { return nil }

// TestRealReachesMemory: SSDs reach memory that a descriptor names, for as long as the engine wants, and no other.
func TestRealReachesMemory(t *testing.T) {
	ssd := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	w := realWorld(t, gpufile.Options{}, ControlOptions{}, ssd)
	mapped, shared := ssd.transport.Mapped(), sharedMappings(t)
	c := w.open(true)
	_, a := c.session(realOptions)
	own := ssd.transport.Mapped()
	fd, memory, err := ioctl.NewSharedMemory("reached", 8<<10)
	require.NoError(t, err)
	defer func() { require.NoError(t, errors.Join(unix.Close(fd), ioctl.Unmap(memory))) }()
	address, err := a.Reach(fd, 8<<10)
	require.NoError(t, err)
	require.Equal(t, own+1, ssd.transport.Mapped())
	require.EqualValues(t, 8<<10, w.control.Members()[0].ReachedBytes)

	q := newPair(t, a, 0, 0)
	memory[4096], memory[8191] = 1, 2
	e := unitAt(a, 0, true, 4096)
	e.DPTR[0] = address + 4096
	require.Zero(t, q.do(e))
	e = unitAt(a, 0, false, 4096)
	e.DPTR[0] = address
	require.Zero(t, q.do(e))
	require.Equal(t, memory[4096:], memory[:4096])

	file, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer file.Close()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	sealed, err := unix.MemfdCreate("sealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	defer unix.Close(sealed)
	require.NoError(t, unix.Ftruncate(sealed, 4096))
	_, err = unix.FcntlInt(uintptr(sealed), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.NoError(t, err)
	for name, x := range map[string]struct {
		fd    int
		bytes uint64
		want  error
	}{
		"no bytes": {fd, 0, ioctl.EINVAL}, "no page": {fd, 100, ioctl.EINVAL}, "all bytes": {fd, 1 << 63, ioctl.EINVAL},
		"a device": {int(null.Fd()), 4096, ioctl.EINVAL}, "not to be mapped": {sealed, 4096, ioctl.ENODEV},
	} {
		_, err := a.Reach(x.fd, x.bytes)
		require.ErrorIs(t, err, x.want, name)
	}
	require.ErrorIs(t, a.Release(address+4096), ioctl.ENOENT)
	require.NoError(t, a.Release(address))
	require.ErrorIs(t, a.Release(address), ioctl.ENOENT)
	require.Equal(t, own, ssd.transport.Mapped())
	require.Zero(t, w.control.Members()[0].ReachedBytes)
	e.DPTR[0] = address
	require.NotZero(t, q.do(e), "it is reached no more")

	_, err = a.Reach(fd, 8<<10)
	require.NoError(t, err)
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool { return len(w.control.Members()) == 0 }, 10*time.Second, time.Millisecond)
	require.Equal(t, mapped, ssd.transport.Mapped(), "it ends with the session")
	require.Equal(t, shared, sharedMappings(t))

	_, b := w.open(true).session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 4096})
	_, err = b.Reach(fd, 8<<10)
	require.ErrorIs(t, err, ioctl.EINVAL, "a virtual controller reaches the DMA memory alone")
}

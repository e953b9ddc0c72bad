package daemon

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"slices"
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
)

// lane is one queue pair used with many commands in flight.
type testLane struct {
	t     *testing.T
	a     *ioctl.Attachment
	q     nvme.QueueMemory
	drive int
	tail  uint32
	head  uint32
	phase uint16
}

func newTestLane(t *testing.T, a *ioctl.Attachment, n, drive int) *testLane {
	q, err := nvme.MapQueue(a.Block(n, drive), int(a.Reply.Depth))
	require.NoError(t, err)
	return &testLane{t: t, a: a, q: q, drive: drive, phase: 1}
}

// do runs commands, fewer than the queue has entries, and returns their statuses by command id, which it sets.
func (l *testLane) do(commands []nvme.SQE) []nvme.Status {
	l.t.Helper()
	depth := uint32(len(l.q.SQ))
	for i := range commands {
		commands[i].CID = uint16(i)
		l.q.SQ[l.tail] = commands[i]
		l.tail = (l.tail + 1) % depth
	}
	atomic.AddUint32(l.a.Word(ioctl.ArmedWord), 1)
	atomic.StoreUint32(l.q.SQTail, l.tail)
	if atomic.SwapUint32(l.a.Word(ioctl.WakeWord), 0) != 0 {
		ioctl.FutexWake(l.a.Word(ioctl.WakeWord))
	}
	status, n := make([]nvme.Status, len(commands)), 0
	require.Eventually(l.t, func() bool {
		for n < len(commands) {
			cid, st, ok := l.q.CQ[l.head].Poll(l.phase)
			if !ok {
				return false
			}
			status[cid] = st
			if l.head++; l.head == depth {
				l.head, l.phase = 0, l.phase^1
			}
			atomic.StoreUint32(l.q.CQHead, l.head)
			n++
		}
		return true
	}, 20*time.Second, 100*time.Microsecond, "%d of %d commands were answered", n, len(commands))
	atomic.AddUint32(l.a.Word(ioctl.ArmedWord), ^uint32(0))
	return status
}

// extents of a slot.
func (c *client) extents(a *ioctl.Attachment, pool ioctl.Target, slot uint32) []ioctl.Extent {
	x := ioctl.Extents{Target: pool, Slot: slot, Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(c.w.t, issue(c, ioctl.CmdExtents, &x, 0))
	return slices.Clone(ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count])
}

// fileDrive is a memory drive that has to be asked for each transfer, as files and block devices have.
type fileDrive struct{ drive.Drive }

func (fileDrive) Kind() drive.Kind { return drive.File }
func (fileDrive) Bytes() []byte    { return nil }

// secret fills the victim's files and memory, and is nowhere else.
var secret = bytes.Repeat([]byte("the victim's bytes; "), 205)[:4096]

// TestHostileEngine (invariant f): an engine sends any commands, with lists that change meanwhile. Nothing changes on
// the drives outside the slots that it has reserved, nor in another session's memory; nothing of what others have
// stored, or what was in its reserved slots before, comes into its memory; others are served meanwhile, and nothing of
// it is left when it has gone.
func TestHostileEngine(t *testing.T) {
	for name, wrap := range map[string]func(d drive.Drive) drive.Drive{
		"copied": func(d drive.Drive) drive.Drive { return d },
		"called": func(d drive.Drive) drive.Drive { return fileDrive{d} },
	} {
		t.Run(name, func(t *testing.T) { hostileEngine(t, wrap) })
	}
}

func hostileEngine(t *testing.T, wrap func(d drive.Drive) drive.Drive) {
	const rounds, files = 60, 12
	memory := memoryDrives(t, 64<<20)
	drives := []drive.Drive{wrap(memory[0]), wrap(memory[1])}
	_, err := extentmap.Format(drives, extentmap.FormatOptions{})
	require.NoError(t, err)
	w := openWorld(t, drives, extentmap.Options{CheckpointSeconds: 3600}, gpufile.Options{}, ControlOptions{})
	options := ioctl.AttachOptions{Lanes: 1, Depth: 64, DMABytes: 256 << 10}

	// The victim stores files, pins some, and unlinks some of which the attacker will get the slots.
	v := w.open(true)
	_, va := v.session(options)
	pool := v.pool(va, "p")
	lanes := []*testLane{newTestLane(t, va, 0, 0), newTestLane(t, va, 0, 1)}
	for i := 0; i < len(va.DMA); i += len(secret) {
		copy(va.DMA[i:], secret)
	}
	r := ioctl.Reserve{Target: pool, Items: items(va, files), Grants: grantSpan, Reserve: 1}
	v.reserve(&r)
	granted := slices.Clone(ioctl.View[ioctl.Grant](va.Arena, grantSpan)[:files])
	var victim []ioctl.Extent
	for _, g := range granted {
		for _, e := range v.extents(va, pool, g.Slot) {
			require.Zero(t, lanes[e.Drive].do([]nvme.SQE{transfer(va, true, e, 0)})[0])
			victim = append(victim, e)
		}
	}
	commit := ioctl.Commit{Target: pool, Reserve: 1}
	require.Zero(t, issue(v, ioctl.CmdCommit, &commit, 0))
	require.Zero(t, v.wait(commit.Ticket).Errno)
	pin := ioctl.Pin{Target: pool, Keys: keys(va, 4), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(v, ioctl.CmdPin, &pin, 0))
	last := ioctl.Span{Offset: keySpan.Offset + (files-4)*ioctl.KeyBytes, Bytes: 4 * ioctl.KeyBytes}
	keys(va, files)
	require.Zero(t, issue(v, ioctl.CmdUnlink, &ioctl.Unlink{Target: pool, Keys: last}, 0))
	p := w.store.PoolByName("p")
	require.Eventually(t, func() bool { s := p.Stats(); return s.SlotsFreeing == 0 && s.SlotsUsed == s.Files },
		10*time.Second, time.Millisecond)

	// The attacker reserves all the slots there are.
	c := w.open(true)
	_, a := c.session(options)
	n := int(p.Stats().SlotsFree)
	list := items(a, n)
	for i := range n {
		it := &ioctl.View[ioctl.ReserveItem](a.Arena, list)[i]
		it.Key[20], it.Parent = 7, [32]byte{}
	}
	r = ioctl.Reserve{Target: pool, Items: list, Grants: grantSpan, Reserve: 2}
	c.reserve(&r)
	allowed := map[[2]uint64]bool{} // drive, unit
	var own []ioctl.Extent
	for _, g := range slices.Clone(ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:n]) {
		for _, e := range c.extents(a, pool, g.Slot) {
			own = append(own, e)
			for u := range uint64(e.Units) {
				allowed[[2]uint64{uint64(e.Drive), e.Unit + u}] = true
			}
		}
	}
	used := 0
	for _, e := range victim {
		if allowed[[2]uint64{uint64(e.Drive), e.Unit}] {
			used++
		}
	}
	require.Positive(t, used, "the attacker has slots with the victim's old bytes")

	before := [][]byte{bytes.Clone(memory[0].Bytes()), bytes.Clone(memory[1].Bytes())}
	arena, dma := bytes.Clone(va.Arena), bytes.Clone(va.DMA)
	stop := make(chan struct{})
	wg := scribble(a.DMA[len(a.DMA)/2:], stop) // lists lie there
	rng := rand.New(rand.NewPCG(5, 6))
	attack := []*testLane{newTestLane(t, a, 0, 0), newTestLane(t, a, 0, 1)}
	succeeded := 0
	for round := range rounds {
		for d, l := range attack {
			commands := make([]nvme.SQE, 63)
			for i := range commands {
				commands[i] = hostileCommand(rng, a, uint16(d), own, victim, memory[d].Size())
			}
			for _, st := range l.do(commands) {
				if st.OK() {
					succeeded++
				}
			}
		}
		if round%10 == 0 {
			e := victim[0] // pinned
			require.Zero(t, lanes[e.Drive].do([]nvme.SQE{transfer(va, false, e, 0)})[0], "others are served")
		}
	}
	close(stop)
	wg.Wait()
	require.Positive(t, succeeded, "some commands were right")
	for d := range memory {
		for unit := 0; unit < len(before[d])/4096; unit++ {
			if !allowed[[2]uint64{uint64(d), uint64(unit)}] {
				require.True(t, bytes.Equal(before[d][unit*4096:][:4096], memory[d].Bytes()[unit*4096:][:4096]),
					"drive %d unit %d has changed", d, unit)
			}
		}
	}
	require.True(t, bytes.Equal(arena, va.Arena), "the victim's arena")
	require.True(t, bytes.Equal(dma, va.DMA), "the victim's memory")
	require.False(t, bytes.Contains(a.DMA, secret[:32]), "the victim's bytes are in the attacker's memory")
	require.NoError(t, a.Close())
	require.Eventually(t, func() bool {
		s := p.Stats()
		return len(w.control.Members()) == 1 && s.FilesReserved == 0 && s.SlotsUsed == s.Files && s.Files == files-4
	}, 10*time.Second, time.Millisecond)
}

// hostileCommand is a command that is nearly right, or not at all.
func hostileCommand(rng *rand.Rand, a *ioctl.Attachment, d uint16, own, victim []ioctl.Extent,
	size int64) (e nvme.SQE) {
	perUnit := 4096 / uint64(a.Reply.LBABytes[d])
	unit, units := rng.Uint64N(uint64(size)/4096), 1+rng.Uint32N(16)
	if among := [][]ioctl.Extent{own, victim, nil}[rng.IntN(3)]; among != nil {
		if x := among[rng.IntN(len(among))]; x.Drive == d {
			unit, units = x.Unit, x.Units
			switch rng.IntN(4) {
			case 0:
				units += rng.Uint32N(8)
			case 1:
				unit -= min(unit, rng.Uint64N(8))
			}
		}
	}
	half := uint64(len(a.DMA) / 2)
	address := func() uint64 {
		switch rng.IntN(8) {
		case 0:
			return rng.Uint64()
		case 1:
			return ioctl.DMABase + 2*half - 4096 + rng.Uint64N(8192)
		case 2:
			return ioctl.DMABase - rng.Uint64N(8192)
		case 3:
			return ioctl.DMABase + half + rng.Uint64N(half)&^15 // a list, perhaps
		}
		return ioctl.DMABase + rng.Uint64N(half)&^4095
	}
	nvme.BuildRW(&e, rng.IntN(2) == 0, 0, 1, unit*perUnit, units*uint32(perUnit))
	switch rng.IntN(12) {
	case 0:
		e.Opcode = byte(rng.Uint32())
	case 1:
		nvme.BuildWriteZeroes(&e, 0, 1, unit*perUnit, units*uint32(perUnit), true)
	case 2:
		nvme.BuildDSM(&e, 0, 1, 1+rng.IntN(3))
		at := rng.Uint64N(half/16) * 16
		binary.LittleEndian.PutUint32(a.DMA[at+4:], units*uint32(perUnit))
		binary.LittleEndian.PutUint64(a.DMA[at+8:], unit*perUnit)
		e.DPTR[0] = ioctl.DMABase + at
		return e
	}
	e.DPTR = [2]uint64{address(), address()}
	if rng.IntN(2) == 0 {
		e.Flags |= nvme.FlagPSDTSGL
		kinds := []uint8{nvme.SGLDataBlock, nvme.SGLDataBlock, nvme.SGLSegment, nvme.SGLLastSegment, nvme.SGLBitBucket}
		e.SetSGLDescriptor(nvme.MakeSGL(kinds[rng.IntN(len(kinds))], address(), units*4096>>(rng.IntN(3)*4)))
	}
	if rng.IntN(20) == 0 {
		*[]*uint32{&e.NSID, &e.CDW12, &e.CDW13, &e.CDW11}[rng.IntN(4)] ^= 1 << rng.IntN(32)
	}
	return e
}

// TestMemoryCannotBeTakenAway: an engine that has the descriptors of its memory can neither shrink nor grow it, which
// would end the daemon with SIGBUS; it can punch holes, and then has zeroes.
func TestMemoryCannotBeTakenAway(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	var s ioctl.Session
	require.Zero(t, issue(c, ioctl.CmdSessionCreate, &s, 0))
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: w.control.SocketPath(), Net: "unixpacket"})
	require.NoError(t, err)
	defer conn.Close()
	ask := ioctl.NewAttachRequest(ioctl.MessageAttach)
	ask.Session, ask.Member, ask.Token, ask.Lanes, ask.Depth, ask.DMABytes = s.ID, s.Member, s.Token, 1, 16, 1<<20
	_, err = conn.Write(ask.Bytes())
	require.NoError(t, err)
	b, oob := make([]byte, 1024), make([]byte, unix.CmsgSpace(3*4))
	_, n, _, _, err := conn.ReadMsgUnix(b, oob)
	require.NoError(t, err)
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	require.NoError(t, err)
	fds, err := unix.ParseUnixRights(&messages[0])
	require.NoError(t, err)
	require.Len(t, fds, 3)
	for _, fd := range fds {
		require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
		require.ErrorIs(t, unix.Ftruncate(fd, 1<<30), unix.EPERM)
		require.ErrorIs(t, unix.Fallocate(fd, unix.FALLOC_FL_COLLAPSE_RANGE, 0, 4096), unix.EOPNOTSUPP)
		require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20))
		require.NoError(t, unix.Close(fd))
	}
	require.Equal(t, ioctl.EINVAL, issue(c, ioctl.CmdPeek, &ioctl.Peek{Keys: ioctl.Span{Bytes: 32}}, 0))
	w.control.liveMembers()[0].beat(true)
}

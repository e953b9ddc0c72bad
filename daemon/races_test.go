package daemon

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// heldDrive holds reads and writes of one object back while it is shut: a controller that completes late.
type heldDrive struct {
	drive.Drive
	offset  atomic.Int64 // that is held; -1 for none
	gate    chan struct{}
	waiting atomic.Int32
}

func (d *heldDrive) Kind() drive.Kind { return drive.File }
func (d *heldDrive) Bytes() []byte    { return nil }

func (d *heldDrive) hold(off int64) {
	if off == d.offset.Load() {
		d.waiting.Add(1)
		<-d.gate
	}
}

func (d *heldDrive) ReadAt(p []byte, off int64) error {
	d.hold(off)
	return d.Drive.ReadAt(p, off)
}

func (d *heldDrive) WriteAt(p []byte, off int64) error {
	d.hold(off)
	return d.Drive.WriteAt(p, off)
}

// late is a pool with room for one file, an engine with a command on it that does not end, and another engine that
// wants the slot.
type late struct {
	t      *testing.T
	w      *world
	drives []*heldDrive
	pool   ioctl.Target
	mine   *client
	a      *ioctl.Attachment
	other  *client
	b      *ioctl.Attachment
	grant  ioctl.Grant
	extent ioctl.Extent
}

func newLate(t *testing.T) *late {
	l := &late{t: t}
	drives := memoryDrives(t, 64<<20)
	for i := range drives {
		d := &heldDrive{Drive: drives[i], gate: make(chan struct{})}
		d.offset.Store(-1)
		l.drives = append(l.drives, d)
		drives[i] = d
	}
	l.w = newWorldOn(t, drives, gpufile.Options{NoIO: true}, ControlOptions{QuiesceTimeout: 50 * time.Millisecond})
	l.mine, l.other = l.w.open(true), l.w.open(true)
	_, l.a = l.mine.session(ioctl.AttachOptions{Lanes: 1, Depth: 16, DMABytes: 1 << 20})
	_, l.b = l.other.session(ioctl.AttachOptions{})
	r := poolRequest(t, l.a.Arena, "p", testIdentity("full"), testGeometry(t, 1))
	r.MaxSlots = 1
	require.Zero(t, issue(l.mine, ioctl.CmdPoolOpen, &r, 0))
	require.Zero(t, l.mine.wait(r.Ticket).Errno)
	l.pool = r.Target
	reserve := ioctl.Reserve{Target: l.pool, Items: items(l.a, 1), Grants: grantSpan, Reserve: 1}
	l.mine.reserve(&reserve)
	l.grant = ioctl.View[ioctl.Grant](l.a.Arena, grantSpan)[0]
	x := ioctl.Extents{Target: l.pool, Slot: l.grant.Slot, Extents: ioctl.Span{Bytes: 4096}}
	require.Zero(t, issue(l.mine, ioctl.CmdExtents, &x, 0))
	l.extent = ioctl.View[ioctl.Extent](l.a.Arena, x.Extents)[0]
	return l
}

// stored commits the file with a content, and pins it.
func (l *late) stored(content byte) {
	l.t.Helper()
	l.fill(content)
	commit := ioctl.Commit{Target: l.pool, Reserve: 1}
	require.Zero(l.t, issue(l.mine, ioctl.CmdCommit, &commit, 0))
	require.Equal(l.t, uint32(ioctl.TicketDone), l.mine.wait(commit.Ticket).State)
	pin := ioctl.Pin{Target: l.pool, Keys: keys(l.a, 1), Grants: grantSpan, Request: 1}
	require.Zero(l.t, issue(l.mine, ioctl.CmdPin, &pin, 0))
	require.Equal(l.t, uint32(1), pin.Count)
}

func (l *late) at() (d *heldDrive, off int64, n int) {
	return l.drives[l.extent.Drive], int64(l.extent.Unit) * 4096, int(l.extent.Units) * 4096
}

// fill writes the object, beside all leases.
func (l *late) fill(content byte) {
	d, off, n := l.at()
	require.NoError(l.t, d.Drive.WriteAt(bytes.Repeat([]byte{content}, n), off))
}

func (l *late) onDrive() byte {
	d, off, n := l.at()
	b := drive.AlignedBuffer(n)
	require.NoError(l.t, d.Drive.ReadAt(b, off))
	require.Equal(l.t, bytes.Repeat(b[:1], n), b, "two contents in one object")
	return b[0]
}

func (l *late) memory() byte {
	_, _, n := l.at()
	require.Equal(l.t, bytes.Repeat(l.a.DMA[:1], n), l.a.DMA[:n], "two contents in one buffer")
	return l.a.DMA[0]
}

// wanted is another engine's reservation of the only slot, for another key.
func (l *late) wanted() ioctl.Errno {
	r := ioctl.Reserve{Target: l.pool, Items: items(l.b, 1), Grants: grantSpan, Reserve: 2}
	ioctl.View[ioctl.ReserveItem](l.b.Arena, r.Items)[0].Key = key(77)
	return issue(l.other, ioctl.CmdReserve, &r, 0)
}

// refused: the slot is not given to anybody else.
func (l *late) refused() {
	l.t.Helper()
	for range 20 {
		require.Contains(l.t, []ioctl.Errno{ioctl.EAGAIN, ioctl.ENOSPC}, l.wanted(), "a slot with a command in flight")
		time.Sleep(time.Millisecond)
	}
}

// given: now it is, as a new generation. Slots are used in turn, so it comes after some others.
func (l *late) given() {
	l.t.Helper()
	var next ioctl.Grant
	require.Eventually(l.t, func() bool {
		if l.wanted() != 0 {
			return false
		}
		if next = ioctl.View[ioctl.Grant](l.b.Arena, grantSpan)[0]; next.Slot != l.grant.Slot {
			require.Zero(l.t, issue(l.other, ioctl.CmdAbort, &ioctl.Abort{Target: l.pool, Reserve: 2}, 0))
			return false
		}
		return true
	}, 10*time.Second, 10*time.Microsecond, "the slot does not come back")
	require.Greater(l.t, next.Generation, l.grant.Generation)
	require.NotEqual(l.t, l.grant.Seed, next.Seed)
}

func (l *late) status(cid uint16, q nvme.QueueMemory) (st nvme.Status) {
	l.t.Helper()
	require.Eventually(l.t, func() bool {
		id, s, ok := q.CQ[0].Poll(1)
		st = s
		return ok && id == cid
	}, 10*time.Second, time.Millisecond)
	return st
}

// TestReuseWaitsForReaders (invariants f, j): a file is removed, and its pin released, while a read of it is on its
// way. It is a miss at once; its slot is another's only when the read has ended, which brings its own bytes.
func TestReuseWaitsForReaders(t *testing.T) {
	l := newLate(t)
	l.stored(0xaa)
	d, off, _ := l.at()
	d.offset.Store(off)
	q := ring(t, l.a, 0, int(l.extent.Drive), 0, transfer(l.a, false, l.extent, 1))
	require.Eventually(t, func() bool { return d.waiting.Load() == 1 }, 10*time.Second, time.Millisecond)
	unlink := ioctl.Unlink{Target: l.pool, Keys: keys(l.b, 1)}
	require.Zero(t, issue(l.other, ioctl.CmdUnlink, &unlink, 0))
	require.Equal(t, uint32(1), unlink.Count)
	peek := ioctl.Peek{Target: l.pool, Keys: keys(l.a, 1)}
	require.Zero(t, issue(l.mine, ioctl.CmdPeek, &peek, 0))
	require.Zero(t, peek.Count, "removed")
	l.refused()
	require.Zero(t, issue(l.mine, ioctl.CmdRelease, &ioctl.Release{Target: l.pool, Request: 1}, 0))
	l.refused()
	close(d.gate)
	require.True(t, l.status(1, q).OK())
	require.Equal(t, byte(0xaa), l.memory())
	l.given()
}

// TestReuseWaitsForWriters (invariant f): a reservation is aborted, and its lane given up, while a write is on its way.
// The lane does not begin again, and the slot is nobody else's, before the write has ended.
func TestReuseWaitsForWriters(t *testing.T) {
	l := newLate(t)
	d, off, n := l.at()
	copy(l.a.DMA, bytes.Repeat([]byte{0xbb}, n))
	d.offset.Store(off)
	ring(t, l.a, 0, int(l.extent.Drive), 0, transfer(l.a, true, l.extent, 1))
	require.Eventually(t, func() bool { return d.waiting.Load() == 1 }, 10*time.Second, time.Millisecond)
	require.Zero(t, issue(l.mine, ioctl.CmdAbort, &ioctl.Abort{Target: l.pool, Reserve: 1}, 0))
	require.ErrorIs(t, l.a.Quiesce(0), ioctl.ETIMEDOUT)
	require.ErrorIs(t, l.a.Reattach(0), ioctl.EBUSY)
	l.refused()
	close(d.gate)
	l.given()
	d.offset.Store(-1)
	l.fill(0xcc) // the new tenant
	require.NoError(t, l.a.Quiesce(0))
	require.NoError(t, l.a.Reattach(0))
	require.Equal(t, byte(0xcc), l.onDrive())
}

// TestHeldCommands (invariant f): a command that a controller begins only after its lease has ended, and its slot has
// another tenant, is refused: it moves nothing either way.
func TestHeldCommands(t *testing.T) {
	for _, write := range []bool{false, true} {
		t.Run(map[bool]string{false: "read", true: "write"}[write], func(t *testing.T) {
			l := newLate(t)
			_, _, n := l.at()
			if !write {
				l.stored(0xaa)
			}
			copy(l.a.DMA, bytes.Repeat([]byte{0x11}, n))
			var asked, free atomic.Bool
			for _, d := range l.w.control.driveList() {
				d.controller.SetFaults(func(*nvme.SQE) *emu.Fault {
					return &emu.Fault{Hold: func() bool { asked.Store(true); return free.Load() }}
				})
			}
			q := ring(t, l.a, 0, int(l.extent.Drive), 0, transfer(l.a, write, l.extent, 1))
			require.Eventually(t, asked.Load, 10*time.Second, time.Millisecond)
			if write {
				require.Zero(t, issue(l.mine, ioctl.CmdAbort, &ioctl.Abort{Target: l.pool, Reserve: 1}, 0))
			} else {
				require.Zero(t, issue(l.mine, ioctl.CmdRelease, &ioctl.Release{Target: l.pool, Request: 1}, 0))
			}
			l.given()
			l.fill(0xcc)
			free.Store(true)
			status := l.status(1, q)
			require.Equal(t, byte(0x11), l.memory(), "another tenant's bytes")
			require.Equal(t, byte(0xcc), l.onDrive(), "into another tenant's slot")
			require.False(t, status.OK())
		})
	}
}

// stressFor is how long a race is run: a second, or as long as make stress says.
func stressFor(t *testing.T) time.Duration {
	s := os.Getenv("TUTTIFS_STRESS_SECONDS")
	if s == "" {
		return time.Second
	}
	n, err := strconv.Atoi(s)
	require.NoError(t, err)
	return time.Duration(n) * time.Second
}

// jitter lets others in at places where the scheduler seldom does.
func jitter(r *rand.Rand) {
	switch r.IntN(4) {
	case 0:
		time.Sleep(time.Duration(r.IntN(200)) * time.Microsecond)
	case 1:
		for range r.IntN(2000) {
			_ = r.Uint64()
		}
	}
}

// racer is one process of a session. Its verbs return errors, because it has a goroutine of its own.
type racer struct {
	*client
	a *ioctl.Attachment
	r *rand.Rand
}

func (x *racer) reserve(pool ioctl.Target, reserve uint64, keys ...int) ([]ioctl.Grant, ioctl.Errno) {
	s := items(x.a, len(keys))
	for i, it := range ioctl.View[ioctl.ReserveItem](x.a.Arena, s) {
		it.Key, it.Parent, it.Position = key(keys[i]), [32]byte{}, 0
		ioctl.View[ioctl.ReserveItem](x.a.Arena, s)[i] = it
	}
	r := ioctl.Reserve{Target: pool, Items: s, Grants: grantSpan, Reserve: reserve}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		errno := issue(x.client, ioctl.CmdReserve, &r, 0)
		if errno != ioctl.EAGAIN || time.Now().After(end) {
			return append([]ioctl.Grant(nil), ioctl.View[ioctl.Grant](x.a.Arena, grantSpan)[:r.Count]...), errno
		}
	}
}

// outcome waits for a ticket.
func (x *racer) outcome(id uint64) (ioctl.Ticket, error) {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		k := ioctl.Ticket{ID: id}
		if errno := issue(x.client, ioctl.CmdTicket, &k, 0); errno != 0 {
			return k, errno
		}
		if k.State != ioctl.TicketPending {
			return k, nil
		}
	}
	return ioctl.Ticket{}, errors.New("a ticket without end")
}

// racers are two engines of two processes each, and a pool of two ranks.
func racers(t *testing.T, w *world) (engines [2][2]*racer, pool ioctl.Target) {
	for e := range engines {
		c := w.open(true)
		s, a := c.session(ioctl.AttachOptions{})
		d := w.open(true)
		seeded := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(uint64(e), n)) }
		engines[e] = [2]*racer{{c, a, seeded(1)}, {d, d.join(s), seeded(2)}}
		id := testIdentity("full")
		id.TP = 2
		for _, x := range engines[e] {
			r := poolRequest(t, x.a.Arena, "p", id, testGeometry(t, 2))
			require.Zero(t, issue(x.client, ioctl.CmdPoolOpen, &r, 0))
			require.Zero(t, x.wait(r.Ticket).Errno)
			pool = r.Target
		}
	}
	return engines, pool
}

// TestReserveRaces (invariants a, h): both ranks of two engines reserve the same keys at once. A key is one engine's
// alone, its ranks get the same slot, and the other is told that somebody is storing it.
func TestReserveRaces(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	engines, pool := racers(t, w)
	rounds, shared := 0, 0
	for end := time.Now().Add(stressFor(t)); time.Now().Before(end); rounds++ {
		mine := []int{4 * rounds, 4*rounds + 1, 4*rounds + 2}
		reserve := uint64(rounds) + 1
		var grants [2][2][]ioctl.Grant
		var wg sync.WaitGroup
		for e := range engines {
			for rank, x := range engines[e] {
				wg.Go(func() {
					jitter(x.r)
					// The second engine begins in the middle of the first one's keys.
					g, errno := x.reserve(pool, reserve, mine[e:]...)
					if errno != 0 {
						t.Errorf("engine %d rank %d: errno %d", e, rank, errno)
					}
					grants[e][rank] = g
				})
			}
		}
		wg.Wait()
		require.False(t, t.Failed())
		owners := map[int]int{}
		for e := range grants {
			for i, g := range grants[e][0] {
				h := grants[e][1][i]
				require.Equal(t, g.Slot, h.Slot)
				require.Equal(t, g.Generation, h.Generation)
				require.Equal(t, g.Seed, h.Seed)
				switch {
				case g.Status == ioctl.GrantPending:
					require.Equal(t, uint8(ioctl.GrantPending), h.Status)
				default: // one of them was first
					require.ElementsMatch(t, []uint8{ioctl.GrantNew, ioctl.GrantJoined}, []uint8{g.Status, h.Status})
					owners[mine[e+i]]++
				}
			}
		}
		require.Len(t, owners, 3)
		for k, n := range owners {
			require.Equal(t, 1, n, "key %d has two owners", k)
		}
		if grants[1][0][0].Status == ioctl.GrantPending {
			shared++
		}
		require.Equal(t, uint64(3), w.store.PoolByName("p").Stats().FilesReserved)
		for e := range engines {
			require.Zero(t, issue(engines[e][0].client, ioctl.CmdAbort, &ioctl.Abort{Target: pool, Reserve: reserve}, 0))
		}
	}
	t.Logf("%d rounds; the first engine was first in %d", rounds, shared)
	require.Zero(t, w.store.PoolByName("p").Stats().FilesReserved)
}

// TestCommitRaces (invariants a, h, m): one rank commits while the other aborts, or both commit, in any order. Either
// all of it is there and every rank was told so, or nothing of it, and nothing is left reserved.
func TestCommitRaces(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	engines, pool := racers(t, w)
	own := rand.New(rand.NewPCG(3, 3))
	rounds, stored := 0, 0
	for end := time.Now().Add(stressFor(t)); time.Now().Before(end); rounds++ {
		k, reserve := rounds%40, uint64(rounds)+1
		for _, x := range engines[0] {
			g, errno := x.reserve(pool, reserve, k)
			require.Zero(t, errno)
			require.Contains(t, []uint8{ioctl.GrantNew, ioctl.GrantJoined}, g[0].Status)
		}
		var wg sync.WaitGroup
		var told [2]bool
		for rank, x := range engines[0] {
			wg.Go(func() {
				jitter(x.r)
				c := ioctl.Commit{Target: pool, Reserve: reserve, Rank: uint16(rank)}
				switch errno := issue(x.client, ioctl.CmdCommit, &c, 0); errno {
				case 0:
					ticket, err := x.outcome(c.Ticket)
					if err != nil {
						t.Error(err)
					}
					told[rank] = ticket.State == ioctl.TicketDone
				case ioctl.ENOENT: // aborted before
				default:
					t.Errorf("commit of rank %d: errno %d", rank, errno)
				}
			})
		}
		jitter(own)
		aborted := issue(engines[0][rounds%2].client, ioctl.CmdAbort, &ioctl.Abort{Target: pool, Reserve: reserve}, 0)
		wg.Wait()
		require.False(t, t.Failed())
		there := w.store.PoolByName("p").Stats().Files
		require.Equal(t, told[0], told[1], "ranks are told different things")
		require.Equal(t, told[0], there == 1)
		require.Equal(t, told[0], aborted != 0, "abort: errno %d", aborted)
		require.Zero(t, w.store.PoolByName("p").Stats().FilesReserved)
		if told[0] {
			stored++
			unlink := ioctl.Unlink{Target: pool, Keys: keysOf(engines[0][1].a, k)}
			require.Zero(t, issue(engines[0][1].client, ioctl.CmdUnlink, &unlink, 0))
			require.Equal(t, uint32(1), unlink.Count)
		}
	}
	t.Logf("%d rounds; %d were committed", rounds, stored)
}

// keysOf puts one key into the arena.
func keysOf(a *ioctl.Attachment, k int) ioctl.Span {
	s := keys(a, 1)
	ioctl.View[[32]byte](a.Arena, s)[0] = key(k)
	return s
}

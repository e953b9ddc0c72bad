package daemon

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// join makes another process's member of a session. It is this process, which the handler cannot tell.
func (c *client) join(s *ioctl.Session) *ioctl.Attachment {
	c.w.t.Helper()
	j := ioctl.Session{Token: s.Token}
	require.Zero(c.w.t, issue(c, ioctl.CmdSessionJoin, &j, 0))
	require.Equal(c.w.t, s.ID, j.ID)
	require.NotEqual(c.w.t, s.Member, j.Member)
	a, err := j.Attach(ioctl.AttachOptions{})
	require.NoError(c.w.t, err)
	c.w.t.Cleanup(func() { _ = a.Close() })
	return a
}

// TestRanksCommitTogether (invariant h): two ranks join one reservation, and both tickets are done when the second
// has committed.
func TestRanksCommitTogether(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c, d := w.open(true), w.open(true)
	s, a := c.session(ioctl.AttachOptions{})
	b := d.join(s)
	id := testIdentity("full")
	id.TP = 2
	open := poolRequest(t, a.Arena, "p", id, testGeometry(t, 2))
	require.Zero(t, issue(c, ioctl.CmdPoolOpen, &open, 0))
	c.wait(open.Ticket)
	again := poolRequest(t, b.Arena, "p", id, testGeometry(t, 2))
	require.Zero(t, issue(d, ioctl.CmdPoolOpen, &again, 0), "idempotent")
	require.Equal(t, open.Target, again.Target)
	d.wait(again.Ticket)

	r := ioctl.Reserve{Target: open.Target, Items: items(a, 3), Grants: grantSpan, Reserve: 9}
	c.reserve(&r)
	r.Items = items(b, 3)
	d.reserve(&r)
	first, second := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:3], ioctl.View[ioctl.Grant](b.Arena, grantSpan)[:3]
	for i := range first {
		require.Equal(t, uint8(ioctl.GrantNew), first[i].Status)
		require.Equal(t, uint8(ioctl.GrantJoined), second[i].Status)
		require.Equal(t, first[i].Slot, second[i].Slot)
		require.Equal(t, first[i].Seed, second[i].Seed)
	}
	stranger := w.open(true)
	_, x := stranger.session(ioctl.AttachOptions{})
	r.Items = items(x, 3)
	stranger.reserve(&r)
	require.Equal(t, uint8(ioctl.GrantPending), ioctl.View[ioctl.Grant](x.Arena, grantSpan)[0].Status)
	require.Equal(t, ioctl.ENOENT, issue(stranger, ioctl.CmdAbort, &ioctl.Abort{Target: open.Target, Reserve: 10}, 0))

	one := ioctl.Commit{Target: open.Target, Reserve: 9, Rank: 0}
	require.Zero(t, issue(c, ioctl.CmdCommit, &one, 0))
	pending := ioctl.Ticket{ID: one.Ticket}
	require.Zero(t, issue(c, ioctl.CmdTicket, &pending, 0))
	require.Equal(t, uint32(ioctl.TicketPending), pending.State)
	require.Equal(t, ioctl.EINVAL, issue(d, ioctl.CmdCommit, &ioctl.Commit{Target: open.Target, Reserve: 9, Rank: 2}, 0))
	two := ioctl.Commit{Target: open.Target, Reserve: 9, Rank: 1}
	require.Zero(t, issue(d, ioctl.CmdCommit, &two, 0))
	require.Equal(t, uint32(ioctl.TicketDone), c.wait(one.Ticket).State)
	require.Equal(t, uint32(ioctl.TicketDone), d.wait(two.Ticket).State)
	require.Equal(t, uint64(3), w.store.PoolByName("p").Stats().Files)
}

// TestRankDeathAborts (invariant h): a reservation dies with any process that takes part in it, and the others hear
// of it by their tickets.
func TestRankDeathAborts(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c, d := w.open(true), w.open(true)
	s, a := c.session(ioctl.AttachOptions{})
	b := d.join(s)
	id := testIdentity("full")
	id.TP = 2
	open := poolRequest(t, a.Arena, "p", id, testGeometry(t, 2))
	require.Zero(t, issue(c, ioctl.CmdPoolOpen, &open, 0))
	c.wait(open.Ticket)
	r := ioctl.Reserve{Target: open.Target, Items: items(a, 3), Grants: grantSpan, Reserve: 9}
	c.reserve(&r)
	r.Items = items(b, 3)
	d.reserve(&r)
	one := ioctl.Commit{Target: open.Target, Reserve: 9}
	require.Zero(t, issue(c, ioctl.CmdCommit, &one, 0))
	require.NoError(t, b.Close())
	require.Equal(t, uint32(ioctl.TicketFailed), c.wait(one.Ticket).State)
	require.Equal(t, int32(ioctl.ENOENT), c.wait(one.Ticket).Errno)
	require.Equal(t, ioctl.ENOENT, issue(c, ioctl.CmdAbort, &ioctl.Abort{Target: open.Target, Reserve: 9}, 0))
	stats := w.store.PoolByName("p").Stats()
	require.Zero(t, stats.FilesReserved+stats.Files)
}

// TestFamily (invariant h): the pools of a family hit and commit together, grants lying [key][pool].
func TestFamily(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	var family ioctl.Target
	for _, group := range []string{"full", "swa"} {
		open := poolRequest(t, a.Arena, group, testIdentity(group), testGeometry(t, 1))
		require.True(t, ioctl.PutName(open.Family[:], "hybrid"))
		require.Zero(t, issue(c, ioctl.CmdPoolOpen, &open, 0))
		c.wait(open.Ticket)
		family = open.FamilyTarget
		require.Equal(t, uint16(ioctl.TargetFamily), family.Kind, "known before the pool is durable")
	}
	r := ioctl.Reserve{Target: family, Items: items(a, 4), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	require.Equal(t, [2]uint32{4, 2}, [2]uint32{r.Count, r.Pools})
	commit := ioctl.Commit{Target: family, Reserve: 1}
	require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0))
	require.Equal(t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
	pin := ioctl.Pin{Target: family, Keys: keys(a, 5), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, [2]uint32{4, 2}, [2]uint32{pin.Count, pin.Pools})
	for _, g := range ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:8] {
		require.Equal(t, uint8(ioctl.GrantPinned), g.Status)
	}
	info := ioctl.PoolInfo{}
	require.True(t, ioctl.PutName(info.Name[:], "swa"))
	require.Zero(t, issue(c, ioctl.CmdPoolInfo, &info, ioctl.PoolByName))
	require.Equal(t, family, info.FamilyTarget)
}

// TestBounds: sessions, processes, handles, pools and tickets are all limited.
func TestBounds(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true},
		ControlOptions{MaxSessions: 2, MaxMembers: 3, MaxHandles: 6, MaxPools: 1, Tickets: 2})
	c := w.open(true)
	s, a := c.session(ioctl.AttachOptions{})
	_, _ = w.open(true).session(ioctl.AttachOptions{})
	third := w.open(true)
	require.Equal(t, ioctl.EMFILE, issue(third, ioctl.CmdSessionCreate, &ioctl.Session{}, 0), "sessions")
	require.Zero(t, issue(third, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0))
	fourth := w.open(true)
	require.Equal(t, ioctl.EMFILE, issue(fourth, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0), "processes")
	c.pool(a, "p")
	r := poolRequest(t, a.Arena, "q", testIdentity("swa"), testGeometry(t, 1))
	require.Equal(t, ioctl.EMFILE, issue(c, ioctl.CmdPoolOpen, &r, 0), "pools")
	w.open(true)
	w.open(true)
	require.Zero(t, w.control.Open(1, 0, 0, true), "handles")

	_, err := NewControl(w.store, ControlOptions{Tickets: 3, SocketDir: socketDir(t)})
	require.ErrorContains(t, err, "power of two")
	_, err = NewControl(w.store, ControlOptions{Pollers: 1000, SocketDir: socketDir(t)})
	require.ErrorContains(t, err, "pollers")
	_, err = NewControl(w.store, ControlOptions{MaxMembers: 1025, Pollers: 4, SocketDir: socketDir(t)})
	require.ErrorContains(t, err, "threads")
	o := ControlOptions{Pollers: 64}
	o.setDefaults()
	require.NoError(t, o.validate())
	require.Equal(t, 64, o.MaxMembers)
}

// TestOneUserLeavesRoom: on a mount that several users may enter, one has at most half of everything, and has it
// again when it is given back.
func TestOneUserLeavesRoom(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true},
		ControlOptions{Shared: true, MaxSessions: 4, MaxMembers: 6, MaxHandles: 12, SharedBytesMax: 8 << 20})
	first := w.open(true)
	s, a := first.session(ioctl.AttachOptions{})
	second := w.open(true)
	require.Zero(t, issue(second, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
	third := w.open(true)
	require.Equal(t, ioctl.EMFILE, issue(third, ioctl.CmdSessionCreate, &ioctl.Session{}, 0), "sessions")
	large := ioctl.Session{Token: s.Token, ArenaBytes: 3 << 20}
	require.Zero(t, issue(third, ioctl.CmdSessionJoin, &large, 0))
	_, err := large.Attach(ioctl.AttachOptions{})
	require.ErrorIs(t, err, ioctl.ENOMEM, "its memory")
	members := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return len(w.control.Members()) == n }, 10*time.Second, time.Millisecond)
	}
	members(2)
	fourth := w.open(true)
	require.Zero(t, issue(fourth, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0))
	fifth := w.open(true)
	require.Equal(t, ioctl.EMFILE, issue(fifth, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0), "processes")
	w.open(true)
	require.Zero(t, w.control.Open(fifth.pid, uint32(os.Geteuid()), 0, true), "handles")

	const other = 12345
	handle := w.control.Open(fifth.pid, other, 0, true)
	require.NotZero(t, handle)
	require.Zero(t, issue(&client{w: w, handle: handle, pid: fifth.pid}, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
	w.control.Close(handle)
	require.NoError(t, a.Close())
	members(2)
	require.Zero(t, issue(fifth, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0), "again")
	w.control.mu.Lock()
	defer w.control.mu.Unlock()
	require.Equal(t, map[uint32]*usage{uint32(os.Geteuid()): {handles: 6, members: 3, sessions: 2}}, w.control.users)
}

// TestSessionsOfEnginesAreCounted: sessions that the mount makes for files that are copied in take no engine's place,
// and an engine's ends with its last process.
func TestSessionsOfEnginesAreCounted(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{MaxSessions: 2})
	for range 5 {
		own, err := w.store.NewSession(0)
		require.NoError(t, err)
		t.Cleanup(own.Close)
	}
	first, second := w.open(true), w.open(true)
	var s ioctl.Session
	require.Zero(t, issue(first, ioctl.CmdSessionCreate, &s, 0))
	rank := w.open(true)
	require.Zero(t, issue(rank, ioctl.CmdSessionJoin, &ioctl.Session{Token: s.Token}, 0))
	require.Zero(t, issue(second, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
	third := w.open(true)
	require.Equal(t, ioctl.EMFILE, issue(third, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
	require.Len(t, w.store.Sessions(), 7, "what was refused is gone")

	ended := func(c *client, members int) {
		w.control.Close(c.handle)
		require.Eventually(t, func() bool { return len(w.control.Members()) == members }, 10*time.Second, time.Millisecond)
	}
	ended(first, 2)
	require.Equal(t, ioctl.EMFILE, issue(third, ioctl.CmdSessionCreate, &ioctl.Session{}, 0), "a rank is still there")
	ended(rank, 1)
	require.Zero(t, issue(third, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
}

// TestEvictionsAreBounded: however many tickets all handles have, the keys of evictions take little memory.
func TestEvictionsAreBounded(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	p := c.pool(a, "p")
	under := func(n int) {
		w.control.mu.Lock()
		defer w.control.mu.Unlock()
		w.control.evictions = n
	}
	evict := ioctl.Evict{Target: p, Keys: keys(a, 3)}
	under(evictionsMax)
	require.Equal(t, ioctl.EAGAIN, issue(c, ioctl.CmdEvict, &evict, ioctl.EvictKeys))
	under(evictionsMax - 1)
	require.Zero(t, issue(c, ioctl.CmdEvict, &evict, ioctl.EvictKeys))
	c.wait(evict.Ticket)
	require.Eventually(t, func() bool {
		w.control.mu.Lock()
		defer w.control.mu.Unlock()
		return w.control.evictions == evictionsMax-1
	}, 10*time.Second, time.Millisecond)
}

func TestSocketDirectoryIsOurs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	require.NoError(t, makeSocketDir(dir, 0o700))
	require.NoError(t, makeSocketDir(dir, 0o711))
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o711), st.Mode().Perm(), "opened for the sockets of a shared mount")
	require.NoError(t, os.Chmod(dir, 0o777))
	require.ErrorContains(t, makeSocketDir(dir, 0o700), "choose one of your own")
	link := dir + "-link"
	require.NoError(t, os.Symlink(dir, link))
	require.ErrorContains(t, makeSocketDir(link, 0o700), "choose one of your own")
}

// TestMembersAreListed for the status files.
func TestMembersAreListed(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	s, a := c.session(ioctl.AttachOptions{Lanes: 2, Depth: 32, DMABytes: 8192})
	p := c.pool(a, "p")
	info := ioctl.PoolInfo{Target: p}
	require.Zero(t, issue(c, ioctl.CmdPoolInfo, &info, 0))
	require.Zero(t, issue(c, ioctl.CmdMapAck, &ioctl.MapAck{Target: p, MapGeneration: info.MapGeneration}, 0))
	members := w.control.Members()
	require.Len(t, members, 1)
	m := members[0]
	require.WithinDuration(t, time.Now(), m.Since, time.Hour)
	m.Since = time.Time{}
	require.Equal(t, MemberInfo{Member: s.Member, Session: s.ID, UID: m.UID, PID: c.pid, Attached: true,
		Mode: "mediated", Lanes: 2, Depth: 32, ArenaBytes: 1 << 20, DMABytes: 8192,
		MapGenerations: map[uint16]uint64{p.ID: info.MapGeneration}}, m)
	_, err := json.Marshal(members)
	require.NoError(t, err)
}

package daemon

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// TestMalformedVerbs is the table of what verbs answer to requests that the dispatcher passes and that are wrong
// nevertheless. What the dispatcher refuses is tested with it.
func TestMalformedVerbs(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	p := c.pool(a, "p")
	c.store(a, p, 1, 3)
	arena := uint64(len(a.Arena))
	gone := ioctl.Target{Kind: ioctl.TargetPool, ID: 999}
	none := ioctl.Target{}
	family := ioctl.Target{Kind: ioctl.TargetFamily, ID: 999}
	keys3 := keys(a, 3)

	pin := func(edit func(r *ioctl.Pin)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := ioctl.Pin{Target: p, Keys: keys3, Grants: grantSpan, Request: 77}
			edit(&r)
			return issue(c, ioctl.CmdPin, &r, 0)
		}
	}
	reserve := func(edit func(r *ioctl.Reserve)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := ioctl.Reserve{Target: p, Items: items(a, 3), Grants: grantSpan, Reserve: 77}
			edit(&r)
			return issue(c, ioctl.CmdReserve, &r, 0)
		}
	}
	changes := func(edit func(r *ioctl.Changes)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := ioctl.Changes{Target: p, Changes: ioctl.Span{Bytes: 40}}
			edit(&r)
			return issue(c, ioctl.CmdChanges, &r, 0)
		}
	}
	present := func(edit func(r *ioctl.Present)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := ioctl.Present{Target: p, Keys: keys3, Present: ioctl.Span{Bytes: 8}}
			edit(&r)
			return issue(c, ioctl.CmdPresent, &r, 0)
		}
	}
	open := func(edit func(r *ioctl.PoolOpen)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := poolRequest(t, a.Arena, "p", testIdentity("full"), testGeometry(t, 1))
			edit(&r)
			return issue(c, ioctl.CmdPoolOpen, &r, 0)
		}
	}
	identity := func(edit func(id *gpufile.Identity)) func() ioctl.Errno {
		return func() ioctl.Errno {
			id := testIdentity("full")
			edit(&id)
			r := poolRequest(t, a.Arena, "p", id, testGeometry(t, 1))
			return issue(c, ioctl.CmdPoolOpen, &r, 0)
		}
	}
	extents := func(edit func(r *ioctl.Extents)) func() ioctl.Errno {
		return func() ioctl.Errno {
			r := ioctl.Extents{Target: p, Extents: ioctl.Span{Bytes: 4096}}
			edit(&r)
			return issue(c, ioctl.CmdExtents, &r, 0)
		}
	}
	for _, x := range []struct {
		name string
		want ioctl.Errno
		call func() ioctl.Errno
	}{
		{"pin: no such pool", ioctl.ENOENT, pin(func(r *ioctl.Pin) { r.Target = gone })},
		{"pin: no such family", ioctl.ENOENT, pin(func(r *ioctl.Pin) { r.Target = family })},
		{"pin: no target", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Target = none })},
		{"pin: target kind", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Target.Kind = 3 })},
		{"pin: keys behind the arena", ioctl.EFAULT, pin(func(r *ioctl.Pin) { r.Keys.Offset = arena })},
		{"pin: keys overflow", ioctl.EFAULT, pin(func(r *ioctl.Pin) { r.Keys.Offset = ^uint64(7) })},
		{"pin: keys wrap", ioctl.EFAULT, pin(func(r *ioctl.Pin) { r.Keys = ioctl.Span{Offset: 64, Bytes: ^uint64(31)} })},
		{"pin: keys end outside", ioctl.EFAULT, pin(func(r *ioctl.Pin) { r.Keys.Offset = arena - 32 })},
		{"pin: keys unaligned", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Keys.Offset += 4 })},
		{"pin: half a key", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Keys.Bytes = 48 })},
		{"pin: no keys", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Keys.Bytes = 0 })},
		{"pin: no room for grants", ioctl.EOVERFLOW, pin(func(r *ioctl.Pin) { r.Grants.Bytes = 3*40 - 8 })},
		{"pin: grants outside", ioctl.EFAULT, pin(func(r *ioctl.Pin) { r.Grants.Offset = arena })},
		{"pin: grants unaligned", ioctl.EINVAL, pin(func(r *ioctl.Pin) { r.Grants.Offset++ })},
		{"peek: keys outside", ioctl.EFAULT, func() ioctl.Errno {
			return issue(c, ioctl.CmdPeek, &ioctl.Peek{Target: p, Keys: ioctl.Span{Offset: arena, Bytes: 32}}, 0)
		}},
		{"release: never pinned", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdRelease, &ioctl.Release{Target: p, Request: 12345}, 0)
		}},
		{"reserve: half an item", ioctl.EINVAL, reserve(func(r *ioctl.Reserve) { r.Items.Bytes -= 8 })},
		{"reserve: items outside", ioctl.EFAULT, reserve(func(r *ioctl.Reserve) { r.Items.Offset = arena - 8 })},
		{"reserve: no room for grants", ioctl.EOVERFLOW, reserve(func(r *ioctl.Reserve) { r.Grants.Bytes = 0 })},
		{"reserve: no such pool", ioctl.ENOENT, reserve(func(r *ioctl.Reserve) { r.Target = gone })},
		{"commit: no such reservation", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdCommit, &ioctl.Commit{Target: p, Reserve: 4711}, 0)
		}},
		{"abort: no such reservation", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdAbort, &ioctl.Abort{Target: p, Reserve: 4711}, 0)
		}},
		{"report bad: foreign slot", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdReportBad, &ioctl.ReportBad{Target: p, Slot: 1 << 30, Generation: 1}, 0)
		}},
		{"report bad: a family", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdReportBad, &ioctl.ReportBad{Target: family}, 0)
		}},
		{"evict: count of 0", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdEvict, &ioctl.Evict{Target: p}, ioctl.EvictCount)
		}},
		{"evict: count and keys", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdEvict, &ioctl.Evict{Target: p, Count: 1, Keys: keys3}, ioctl.EvictKeys)
		}},
		{"evict: keys outside", ioctl.EFAULT, func() ioctl.Errno {
			r := ioctl.Evict{Target: p, Keys: ioctl.Span{Offset: arena, Bytes: 32}}
			return issue(c, ioctl.CmdEvict, &r, ioctl.EvictPrefix)
		}},
		{"evict: no such pool", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdEvict, &ioctl.Evict{Target: gone, Count: 1}, ioctl.EvictCount)
		}},
		{"extents: foreign slot", ioctl.ENOENT, extents(func(r *ioctl.Extents) { r.Slot = 1 << 30 })},
		{"extents: old generation", ioctl.ENOENT, extents(func(r *ioctl.Extents) { r.Generation = 1 })},
		{"extents: first behind the last", ioctl.EINVAL, extents(func(r *ioctl.Extents) { r.First = 1 << 20 })},
		{"extents: span outside", ioctl.EFAULT, extents(func(r *ioctl.Extents) { r.Extents.Bytes = 1 << 40 })},
		{"rows: no room for one", ioctl.EOVERFLOW, func() ioctl.Errno {
			return issue(c, ioctl.CmdRows, &ioctl.Rows{Target: p, Rows: ioctl.Span{Bytes: 8}}, 0)
		}},
		{"stats: a family", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdStats, &ioctl.Stats{Target: family}, 0)
		}},
		{"stats: no such pool", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdStats, &ioctl.Stats{Target: gone}, 0)
		}},
		{"changes: a family", ioctl.EINVAL, changes(func(r *ioctl.Changes) { r.Target = family })},
		{"changes: no such pool", ioctl.ENOENT, changes(func(r *ioctl.Changes) { r.Target = gone })},
		{"changes: span outside", ioctl.EFAULT, changes(func(r *ioctl.Changes) { r.Changes.Offset = arena })},
		{"changes: half a change", ioctl.EINVAL, changes(func(r *ioctl.Changes) { r.Changes.Bytes = 20 })},
		{"changes: no room", ioctl.EINVAL, changes(func(r *ioctl.Changes) { r.Changes.Bytes = 0 })},
		{"changes: never answered", ioctl.EINVAL, changes(func(r *ioctl.Changes) { r.Since = 1 << 40 })},
		{"present: a family", ioctl.EINVAL, present(func(r *ioctl.Present) { r.Target = family })},
		{"present: no such pool", ioctl.ENOENT, present(func(r *ioctl.Present) { r.Target = gone })},
		{"present: keys outside", ioctl.EFAULT, present(func(r *ioctl.Present) { r.Keys.Offset = arena })},
		{"present: no keys", ioctl.EINVAL, present(func(r *ioctl.Present) { r.Keys.Bytes = 0 })},
		{"present: answers outside", ioctl.EFAULT, present(func(r *ioctl.Present) { r.Present.Offset = arena })},
		{"present: no room", ioctl.EOVERFLOW, present(func(r *ioctl.Present) { r.Present.Bytes = 2 })},
		{"drives: first behind the last", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdDrives, &ioctl.Drives{First: 99}, 0)
		}},
		{"events: first behind the last", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdEvents, &ioctl.Events{First: 99}, 0)
		}},
		{"pool info: index behind the last", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdPoolInfo, &ioctl.PoolInfo{Index: 1}, ioctl.PoolByIndex)
		}},
		{"pool info: no such name", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdPoolInfo, &ioctl.PoolInfo{Name: [64]byte{'q'}}, ioctl.PoolByName)
		}},
		{"pool info: bytes behind the name", ioctl.EINVAL, func() ioctl.Errno {
			return issue(c, ioctl.CmdPoolInfo, &ioctl.PoolInfo{Name: [64]byte{'p', 0, 'x'}}, ioctl.PoolByName)
		}},
		{"ticket: never given", ioctl.ENOENT, func() ioctl.Errno {
			return issue(c, ioctl.CmdTicket, &ioctl.Ticket{ID: 1 << 40}, 0)
		}},
		{"session: twice", ioctl.EBUSY, func() ioctl.Errno { return issue(c, ioctl.CmdSessionCreate, &ioctl.Session{}, 0) }},
		{"session: arena of odd size", ioctl.EINVAL, func() ioctl.Errno {
			return issue(w.open(true), ioctl.CmdSessionCreate, &ioctl.Session{ArenaBytes: 5000}, 0)
		}},
		{"session: huge arena", ioctl.EINVAL, func() ioctl.Errno {
			return issue(w.open(true), ioctl.CmdSessionCreate, &ioctl.Session{ArenaBytes: 1 << 40}, 0)
		}},
		{"join: no such token", ioctl.ESTALE, func() ioctl.Errno {
			return issue(w.open(true), ioctl.CmdSessionJoin, &ioctl.Session{}, 0)
		}},
		{"pool open: other identity", ioctl.EEXIST, identity(func(id *gpufile.Identity) { id.Revision = "r2" })},
		{"pool open: unknown identity", ioctl.EBADMSG, identity(func(id *gpufile.Identity) { id.DType = "auto" })},
		{"pool open: not JSON", ioctl.EBADMSG, open(func(r *ioctl.PoolOpen) { r.Identity.Bytes-- })},
		{"pool open: bad geometry", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Geometry.Bytes /= 2 })},
		{"pool open: empty geometry", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Geometry.Bytes = 0 })},
		{"pool open: no name", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Name = [64]byte{} })},
		{"pool open: hidden name", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Name = [64]byte{'.', 'x'} })},
		{"pool open: slash", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Name = [64]byte{'a', '/', 'x'} })},
		{"pool open: checksum", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) {
			r.Name, r.ChecksumAlg = [64]byte{'q'}, 99
		})},
		{"pool open: identity outside", ioctl.EFAULT, open(func(r *ioctl.PoolOpen) { r.Identity.Offset = arena })},
		{"pool open: long identity", ioctl.EINVAL, open(func(r *ioctl.PoolOpen) { r.Identity.Bytes = 1 << 20 })},
	} {
		t.Run(x.name, func(t *testing.T) { require.Equal(t, x.want, x.call()) })
	}
	require.Equal(t, uint64(3), w.store.PoolByName("p").Stats().Files, "nothing happened")
}

// TestVerbsWithoutSession: what needs a session, an arena or a writable handle says so.
func TestVerbsWithoutSession(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	require.Equal(t, ioctl.ENOTCONN, issue(c, ioctl.CmdPin, &ioctl.Pin{}, 0))
	require.Equal(t, ioctl.ENOTCONN, issue(c, ioctl.CmdRelease, &ioctl.Release{}, 0))
	require.Equal(t, ioctl.ENOTCONN, issue(c, ioctl.CmdArena, &ioctl.Arena{}, 0))
	var s ioctl.Session
	require.Zero(t, issue(c, ioctl.CmdSessionCreate, &s, 0))
	require.Equal(t, ioctl.ENXIO, issue(c, ioctl.CmdPin, &ioctl.Pin{}, 0))
	require.Equal(t, ioctl.ENXIO, issue(c, ioctl.CmdArena, &ioctl.Arena{}, 0))
	a, err := s.Attach(ioctl.AttachOptions{})
	require.NoError(t, err)
	defer a.Close()
	var arena ioctl.Arena
	require.Zero(t, issue(c, ioctl.CmdArena, &arena, 0))
	require.Equal(t, uint64(1<<20), arena.Bytes)
	require.Len(t, a.Arena, 1<<20)
	require.Equal(t, [2]uint32{s.ID, s.Member}, [2]uint32{arena.Session, arena.Member})
	require.NotZero(t, arena.Inode)

	reader := w.open(false)
	require.Zero(t, issue(reader, ioctl.CmdHello, &ioctl.Hello{}, 0))
	require.Equal(t, ioctl.EBADF, issue(reader, ioctl.CmdSessionCreate, &ioctl.Session{}, 0))
	require.Equal(t, ioctl.EBADF, issue(reader, ioctl.CmdEvict, &ioctl.Evict{Count: 1}, ioctl.EvictCount))
	require.Equal(t, int32(ioctl.EMFILE), w.control.Ioctl(0, 1, ioctl.CmdHello, 0, nil, nil), "no handle")

	w.control.Close(c.handle)
	require.Equal(t, int32(ioctl.EMFILE), w.control.Ioctl(c.handle, 1, ioctl.CmdHello, 0, nil, nil), "closed")
	require.Eventually(t, func() bool { return len(w.store.Sessions()) == 0 }, 10*time.Second, time.Millisecond)
}

// keptDrive stays open when its volume is closed.
type keptDrive struct{ drive.Drive }

func (keptDrive) Close() error { return nil }

// TestReadOnlyVolume: what is stored can be looked at and pinned, and nothing can be changed.
func TestReadOnlyVolume(t *testing.T) {
	drives := memoryDrives(t, 64<<20)
	for i, d := range drives {
		drives[i] = keptDrive{d}
		t.Cleanup(func() { _ = d.Close() })
	}
	w := newWorldOn(t, drives, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	c.store(a, c.pool(a, "p"), 1, 3)
	w.close()

	w = openWorld(t, drives, extentmap.Options{ReadOnly: true}, gpufile.Options{NoIO: true}, ControlOptions{})
	c = w.open(true)
	_, a = c.session(ioctl.AttachOptions{})
	var hello ioctl.Hello
	require.Zero(t, issue(c, ioctl.CmdHello, &hello, 0))
	require.NotZero(t, hello.State&ioctl.StateReadOnly)
	p := c.pool(a, "p")
	pin := ioctl.Pin{Target: p, Keys: keys(a, 3), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, uint32(3), pin.Count)

	r := poolRequest(t, a.Arena, "q", testIdentity("swa"), testGeometry(t, 1))
	require.Equal(t, ioctl.EROFS, issue(c, ioctl.CmdPoolOpen, &r, 0))
	reserve := ioctl.Reserve{Target: p, Items: items(a, 4), Grants: grantSpan, Reserve: 1}
	require.Equal(t, ioctl.EROFS, issue(c, ioctl.CmdReserve, &reserve, 0))
	require.Equal(t, ioctl.EROFS, issue(c, ioctl.CmdUnlink, &ioctl.Unlink{Target: p, Keys: keys(a, 1)}, 0))
	require.Equal(t, ioctl.EROFS, issue(c, ioctl.CmdEvict, &ioctl.Evict{Target: p, Count: 1}, ioctl.EvictCount))
}

// scribble writes all over memory until stop is closed: a hostile or broken engine.
func scribble(b []byte, stop <-chan struct{}) *sync.WaitGroup {
	var wg sync.WaitGroup
	wg.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		words := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for range 64 {
				words[r.IntN(len(words))] = r.Uint64() >> (r.IntN(2) * 56)
			}
		}
	})
	return &wg
}

// TestArenaChangesMeanwhile: while keys flip between two stored chains under the daemon's hands, every grant is a
// true one of one of the two, as if the request had been made of the copy.
func TestArenaChangesMeanwhile(t *testing.T) {
	const n, rounds = 256, 200
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	target := c.pool(a, "p")
	p := w.store.PoolByName("p")
	var seeds [2][n]ioctl.Grant
	for set := range seeds {
		r := ioctl.Reserve{Target: target, Items: items(a, n), Grants: grantSpan, Reserve: uint64(set + 1)}
		for i, list := 0, ioctl.View[ioctl.ReserveItem](a.Arena, r.Items); i < n; i++ {
			list[i].Key[30] = byte(set)
			if i > 0 {
				list[i].Parent[30] = byte(set)
			}
		}
		c.reserve(&r)
		copy(seeds[set][:], ioctl.View[ioctl.Grant](a.Arena, grantSpan))
		commit := ioctl.Commit{Target: target, Reserve: r.Reserve}
		require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0))
		require.Equal(t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
	}
	require.Equal(t, uint64(2*n), p.Stats().Files)
	list := keys(a, n)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for set := byte(0); ; set ^= 1 {
			select {
			case <-stop:
				return
			default:
			}
			for i := range n {
				ioctl.View[[32]byte](a.Arena, list)[i][30] = set
			}
		}
	})
	for round := range uint64(rounds) {
		pin := ioctl.Pin{Target: target, Keys: list, Grants: grantSpan, Request: round + 1}
		require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
		require.Equal(t, uint32(n), pin.Count, "every mix of the two is present")
		for i, g := range ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:n] {
			g.Status, g.Lifetime = ioctl.GrantNew, seeds[0][i].Lifetime // which is for those who write
			if g != seeds[0][i] && g != seeds[1][i] {
				t.Fatalf("round %d, key %d: %+v is neither %+v nor %+v", round, i, g, seeds[0][i], seeds[1][i])
			}
		}
		require.Zero(t, issue(c, ioctl.CmdRelease, &ioctl.Release{Target: target, Request: round + 1}, 0))
	}
	close(stop)
	wg.Wait()
}

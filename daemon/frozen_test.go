package daemon

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// frozenDrive answers nothing while it is frozen.
type frozenDrive struct {
	drive.Drive
	on   *atomic.Bool
	thaw chan struct{}
}

func (d *frozenDrive) Kind() drive.Kind { return drive.File }
func (d *frozenDrive) Bytes() []byte    { return nil }

func (d *frozenDrive) stop() {
	if d.on.Load() {
		<-d.thaw
	}
}

func (d *frozenDrive) ReadAt(p []byte, off int64) error  { d.stop(); return d.Drive.ReadAt(p, off) }
func (d *frozenDrive) WriteAt(p []byte, off int64) error { d.stop(); return d.Drive.WriteAt(p, off) }
func (d *frozenDrive) Flush() error                      { d.stop(); return d.Drive.Flush() }
func (d *frozenDrive) Discard(off, n int64) error        { d.stop(); return d.Drive.Discard(off, n) }
func (d *frozenDrive) WriteZeroes(off, n int64) error    { d.stop(); return d.Drive.WriteZeroes(off, n) }
func frozen(t *testing.T) (drives []drive.Drive, on *atomic.Bool, thaw func()) {
	on = new(atomic.Bool)
	gate := make(chan struct{})
	for _, d := range memoryDrives(t, 64<<20) {
		drives = append(drives, &frozenDrive{d, on, gate})
	}
	thaw = sync.OnceFunc(func() { on.Store(false); close(gate) })
	return drives, on, thaw
}

// TestVerbsWaitForNoDrive (invariant i): while no drive answers at all, every verb does. What needs a drive is left
// pending behind a ticket, and is done when the drives answer again.
func TestVerbsWaitForNoDrive(t *testing.T) {
	drives, on, thaw := frozen(t)
	w := newWorldOn(t, drives, gpufile.Options{NoIO: true}, ControlOptions{})
	t.Cleanup(thaw) // before the world ends
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	pool := c.pool(a, "p")
	const n = 5
	c.store(a, pool, 1, n)
	pin := ioctl.Pin{Target: pool, Keys: keys(a, n), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	grant := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[n-1]
	for i, it := range ioctl.View[ioctl.ReserveItem](a.Arena, items(a, 2)) {
		it.Key, it.Parent, it.Position = key(100+i), [32]byte{}, 0
		ioctl.View[ioctl.ReserveItem](a.Arena, items(a, 2))[i] = it
	}
	on.Store(true)

	var tickets []uint64
	done := make(chan string, 64)
	go func() {
		defer close(done)
		say := func(verb string, errno ioctl.Errno) {
			if errno != 0 {
				verb += ": " + errno.Error()
			}
			done <- verb
		}
		say("hello", issue(c, ioctl.CmdHello, &ioctl.Hello{}, 0))
		say("drives", issue(c, ioctl.CmdDrives, &ioctl.Drives{}, 0))
		say("peek", issue(c, ioctl.CmdPeek, &ioctl.Peek{Target: pool, Keys: keys(a, n)}, 0))
		there := ioctl.Present{Target: pool, Keys: keys(a, n), Present: ioctl.Span{Bytes: n}}
		say("present", issue(c, ioctl.CmdPresent, &there, 0))
		pin := ioctl.Pin{Target: pool, Keys: keys(a, n), Grants: grantSpan, Request: 2}
		say("pin", issue(c, ioctl.CmdPin, &pin, 0))
		say("release", issue(c, ioctl.CmdRelease, &ioctl.Release{Target: pool, Request: 2}, 0))
		for id := range uint64(2) {
			r := ioctl.Reserve{Target: pool, Items: items(a, 1), Grants: grantSpan, Reserve: 10 + id}
			ioctl.View[ioctl.ReserveItem](a.Arena, r.Items)[0].Key = key(100 + int(id))
			say("reserve", issue(c, ioctl.CmdReserve, &r, 0))
		}
		say("abort", issue(c, ioctl.CmdAbort, &ioctl.Abort{Target: pool, Reserve: 10}, 0))
		commit := ioctl.Commit{Target: pool, Reserve: 11}
		say("commit", issue(c, ioctl.CmdCommit, &commit, 0))
		// Promise a: a file is visible when its record is durable, and to nobody before.
		look := ioctl.Peek{Target: pool, Keys: keys(a, 1)}
		ioctl.View[[32]byte](a.Arena, look.Keys)[0] = key(101)
		say("look", issue(c, ioctl.CmdPeek, &look, 0))
		if look.Count != 0 {
			say("is visible", ioctl.EIO)
		}
		x := ioctl.Extents{Target: pool, Slot: grant.Slot, Extents: ioctl.Span{Bytes: 4096}}
		say("extents", issue(c, ioctl.CmdExtents, &x, 0))
		bad := ioctl.ReportBad{Target: pool, Slot: grant.Slot, Generation: grant.Generation}
		say("report", issue(c, ioctl.CmdReportBad, &bad, 0))
		say("unlink", issue(c, ioctl.CmdUnlink, &ioctl.Unlink{Target: pool, Keys: keys(a, 1)}, 0))
		say("release", issue(c, ioctl.CmdRelease, &ioctl.Release{Target: pool, Request: 1}, 0))
		evict := ioctl.Evict{Target: pool, Count: 1}
		say("evict", issue(c, ioctl.CmdEvict, &evict, ioctl.EvictCount))
		r := poolRequest(t, a.Arena, "q", testIdentity("full"), testGeometry(t, 1))
		say("pool", issue(c, ioctl.CmdPoolOpen, &r, 0))
		say("stats", issue(c, ioctl.CmdStats, &ioctl.Stats{Target: pool}, 0))
		say("events", issue(c, ioctl.CmdEvents, &ioctl.Events{}, 0))
		say("changes", issue(c, ioctl.CmdChanges, &ioctl.Changes{Target: pool, Changes: ioctl.Span{Bytes: 40}}, 0))
		tickets = append(tickets, commit.Ticket, r.Ticket, evict.Ticket, bad.Ticket)
		for i, id := range tickets {
			k := ioctl.Ticket{ID: id}
			say("ticket", issue(c, ioctl.CmdTicket, &k, 0))
			// An evicted file is a miss before that is durable.
			if i < 2 && k.State != ioctl.TicketPending {
				say("is not pending", ioctl.EIO)
			}
		}
	}()
	var said []string
	for open := true; open; {
		select {
		case verb, more := <-done:
			if open = more; more {
				said = append(said, verb)
			}
		case <-time.After(20 * time.Second):
			thaw()
			for range done { // it uses what ends with the test
				continue
			}
			require.Fail(t, "a verb waits for a drive", "after %v", said)
		}
	}
	require.Equal(t, []string{"hello", "drives", "peek", "present", "pin", "release", "reserve", "reserve", "abort",
		"commit", "look", "extents", "report", "unlink", "release", "evict", "pool", "stats", "events", "changes", "ticket",
		"ticket", "ticket", "ticket"}, said)
	thaw()
	for _, id := range tickets {
		require.Equal(t, uint32(ioctl.TicketDone), c.wait(id).State)
	}
	look := ioctl.Peek{Target: pool, Keys: keys(a, 1)}
	ioctl.View[[32]byte](a.Arena, look.Keys)[0] = key(101)
	require.Zero(t, issue(c, ioctl.CmdPeek, &look, 0))
	require.EqualValues(t, 1, look.Count)
}

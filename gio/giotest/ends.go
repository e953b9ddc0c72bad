package giotest

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// testDeadQueue: a controller kills a queue for a bad doorbell; its lane times out and comes back.
func testDeadQueue(t *testing.T, s *Subject) {
	w := s.main()
	shape := w.shape()
	shape.Deadline = short
	r := NewRig(t, s, shape)
	ctxs := all(r)
	store(r, ctxs, 1)
	a := w.memory(r, ctxs)
	atomic.StoreUint32(r.pages[0].SQTail, 1<<20)
	atomic.AddUint32(&r.armed, 1)
	nvme.Wake(&r.wake)
	require.Eventually(t, r.queues[0].Dead, 10*time.Second, time.Millisecond)
	atomic.AddUint32(&r.armed, ^uint32(0))
	failed := r.Run(false, a.ctxs)
	require.NotEmpty(t, failed)
	zeroed := map[int]bool{}
	for _, f := range failed {
		require.ErrorIs(t, f.Err, gio.ErrTimeout)
		zeroed[f.Index] = true
	}
	a.check(1, zeroed)
	a.recovers(2)
}

// testStopped: a controller stops in the middle of a batch and nobody tells the executor. When it is reset, its
// commands never complete; when its queues are deleted, those that it had fetched are aborted. The commands of the
// other controllers share their chunks' fate.
func testStopped(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		for _, write := range []bool{false, true} {
			for _, reset := range []bool{false, true} {
				shape := w.shape()
				shape.Deadline = short
				r := NewRig(t, s, shape)
				ctxs := all(r)
				store(r, ctxs, 1)
				a := w.memory(r, ctxs)
				a.fill(1)
				if !write {
					a.set(0xee)
				}
				results := r.stopOne(write, a.ctxs, reset)
				require.NotEmpty(t, results)
				failed := failures(t, results)
				for _, f := range results {
					if reset {
						require.ErrorIs(t, f.Err, gio.ErrTimeout)
					}
					failed[f.Index] = !write
				}
				a.check(1, failed)
				a.recovers(2)
			}
		}
	})
}

// stopOne stops the first controller while a batch is in flight.
func (r *Rig) stopOne(write bool, ctxs []gio.IOCTX, reset bool) []gio.Result {
	var shut atomic.Bool
	var held atomic.Int32
	shut.Store(true)
	r.setFaults(0, func(*nvme.SQE) *emu.Fault {
		held.Add(1)
		return &emu.Fault{Drop: reset, Hold: func() bool { return !shut.Load() }}
	})
	ticket, err := r.Ring.Issue(write, r.Map, ctxs)
	require.NoError(r.t, err)
	for held.Load() == 0 && !ticket.Done() { // a busy machine may pass the deadline before
		r.poller.Step()
	}
	for lane := range r.Shape.Lanes {
		require.NoError(r.t, r.queues[lane*r.Shape.Drives].Quiesce(time.Now().Add(10*time.Second)))
	}
	shut.Store(false)
	r.SetFaults(nil)
	results, err := r.Ring.Wait(ticket)
	require.NoError(r.t, err)
	return results
}

// testDeadDaemon: waits end with ErrDead when the owner of the controllers is gone, whoever waits; targets are zero,
// and bounced ones stay so although the controllers go on.
func testDeadDaemon(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		r := NewRig(t, s, w.shape())
		ctxs := all(r)
		store(r, ctxs, 1)
		a := w.memory(r, ctxs)
		a.set(0xee)
		var v valve
		v.reads = true
		v.shut.Store(true)
		r.SetFaults(v.hook)
		var wg sync.WaitGroup
		for part := range 3 {
			ctxs := a.ctxs[len(a.ctxs)*part/3 : len(a.ctxs)*(part+1)/3]
			ticket, err := r.Ring.Issue(false, r.Map, ctxs)
			require.NoError(t, err)
			wg.Go(func() {
				failed, err := r.Ring.Wait(ticket)
				if !errors.Is(err, gio.ErrDead) || len(failed) != len(ctxs) {
					t.Errorf("%d of %d failed: %v", len(failed), len(ctxs), err)
				}
				for _, f := range failed {
					if !errors.Is(f.Err, gio.ErrDead) {
						t.Errorf("index %d: %v", f.Index, f.Err)
					}
				}
			})
		}
		for v.held.Load() == 0 {
			time.Sleep(50 * time.Microsecond)
		}
		cause := errors.New("connection lost")
		r.Ring.Abandon(cause)
		wg.Wait()
		a.checkZero("targets are zeroed")
		_, err := r.Ring.Issue(false, r.Map, a.ctxs)
		require.ErrorIs(t, err, gio.ErrDead)
		require.ErrorIs(t, err, cause)
		require.Zero(t, r.Ring.Alive())
		v.shut.Store(false)
		if w.kind == host || w.kind != inDMA && !w.peer {
			for r.poller.Step() > 0 {
			}
			a.checkZero("targets are left alone")
		}
	})
}

// testDeafDaemon: when nobody confirms that a lane is quiet, the ring is given up whole.
func testDeafDaemon(t *testing.T, s *Subject) {
	waysAtOnce(t, s, func(t *testing.T, w way) {
		shape := w.shape()
		shape.Deadline = short
		r := NewRig(t, s, shape)
		a := w.memory(r, all(r))
		a.set(0xee)
		r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
		r.Deaf.Store(true)
		ticket, err := r.Ring.Issue(false, r.Map, a.ctxs)
		require.NoError(t, err)
		failed, err := r.Ring.Wait(ticket)
		require.ErrorIs(t, err, gio.ErrDead)
		require.Len(t, failed, len(a.ctxs))
		a.checkZero("targets are zeroed")
		_, err = r.Ring.Issue(false, r.Map, a.ctxs)
		require.ErrorIs(t, err, gio.ErrDead)
	})
}

// testClosed: Close quiesces what is in flight, ends waits, and refuses what comes after.
func testClosed(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		r := NewRig(t, s, w.shape())
		a := w.memory(r, all(r))
		a.set(0xee)
		r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
		ticket, err := r.Ring.Issue(false, r.Map, a.ctxs)
		require.NoError(t, err)
		require.NoError(t, r.Ring.Close())
		failed, err := r.Ring.Wait(ticket)
		require.NoError(t, err)
		require.Len(t, failed, len(a.ctxs))
		for _, f := range failed {
			require.ErrorIs(t, f.Err, gio.ErrClosed)
		}
		a.checkZero("targets are zeroed")
		_, err = r.Ring.Issue(false, r.Map, a.ctxs)
		require.ErrorIs(t, err, gio.ErrClosed)
		_, err = r.Ring.Register(make([]byte, 4096))
		require.Error(t, err)
		require.NoError(t, r.Ring.Close())
	})
}

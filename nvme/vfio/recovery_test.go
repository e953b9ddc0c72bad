package vfio_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
	"tuttifs/nvme/vfio"
)

// start opens a controller with a queue of 16 and some memory.
func start(t *testing.T, w *world, o vfio.Options) (*vfio.Controller, *vfio.Queue, *vfio.Buffer) {
	t.Helper()
	c := w.open(t, o)
	t.Cleanup(func() { _ = c.Close() })
	q, err := c.NewQueue(16)
	require.NoError(t, err)
	b, err := c.Alloc(64 << 10)
	require.NoError(t, err)
	return c, q, b
}

// read4k is a read of the first 4 KiB to a page of the buffer.
func read4k(b *vfio.Buffer, page int) (e nvme.SQE) {
	nvme.BuildRW(&e, false, 0, 1, 0, 8)
	_ = e.SetPRP(b.IOVA+uint64(page*4096), 4096, nil, 0)
	return e
}

// TestLostCompletions: a command whose completion never comes costs its queue, not the controller.
func TestLostCompletions(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	c, q, b := start(t, w, vfio.Options{CommandTimeout: 100 * time.Millisecond})
	other, err := c.NewQueue(8)
	require.NoError(t, err)
	p, err := c.NewPair(8, nil)
	require.NoError(t, err)
	var dropped atomic.Int32
	w.now.Controller.SetFaults(func(e *nvme.SQE) *emu.Fault {
		if dropped.Add(1) <= 3 {
			return &emu.Fault{Drop: true}
		}
		return nil
	})
	var group sync.WaitGroup
	var ended, failed atomic.Int32
	for i := range 12 {
		group.Go(func() {
			_, err := q.Do(read4k(b, i))
			if err != nil {
				failed.Add(1)
				if !errors.Is(err, vfio.ErrTimeout) && !errors.Is(err, vfio.ErrAborted) {
					t.Error(err)
				}
			}
			ended.Add(1)
		})
	}
	group.Wait()
	require.EqualValues(t, 12, ended.Load())
	require.Positive(t, failed.Load())
	require.Zero(t, c.Resets(), "deleting the queue was enough")
	select {
	case <-p.Lost():
		t.Fatal("other queues are left alone")
	default:
	}
	for _, q := range []*vfio.Queue{q, other} {
		_, err = q.Do(read4k(b, 0))
		require.NoError(t, err)
	}
}

// TestDeafAdminQueue: an admin queue that does not answer costs a reset.
func TestDeafAdminQueue(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	c, q, b := start(t, w, vfio.Options{AdminTimeout: 100 * time.Millisecond})
	var deaf atomic.Bool
	deaf.Store(true)
	w.now.SetFaults(&nvmetest.Faults{Store: func(off, v uint32) bool {
		if off == nvme.RegCC && v == 0 || off == nvme.RegCC && v&1 == 0 {
			deaf.Store(false)
		}
		return off == nvme.SQTailDoorbell(0, 0) && deaf.Load()
	}})
	_, err := c.SMART()
	require.ErrorIs(t, err, vfio.ErrTimeout)
	require.Equal(t, uint64(1), c.Resets())
	_, err = c.SMART()
	require.NoError(t, err)
	_, err = q.Do(read4k(b, 0))
	require.NoError(t, err, "queues of one's own are made anew")
}

// TestTimeoutOfBoth: neither the command nor the deletion of its queue ends.
func TestTimeoutOfBoth(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	c, q, b := start(t, w, vfio.Options{CommandTimeout: 100 * time.Millisecond, RecoveryTimeout: 100 * time.Millisecond})
	var deaf atomic.Bool
	w.now.SetFaults(&nvmetest.Faults{Store: func(off, v uint32) bool {
		if off == nvme.RegCC {
			deaf.Store(false)
		}
		return off == nvme.SQTailDoorbell(0, 0) && deaf.Load()
	}})
	w.hold.Store(true)
	deaf.Store(true)
	_, err := q.Do(read4k(b, 0))
	require.ErrorIs(t, err, vfio.ErrTimeout)
	require.Equal(t, uint64(1), c.Resets())
	w.hold.Store(false)
	_, err = q.Do(read4k(b, 0))
	require.NoError(t, err)
}

// TestFatalStatus: a controller that reports fatal status is reset without waiting for the commands' time to be over.
func TestFatalStatus(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	c, q, b := start(t, w, vfio.Options{CommandTimeout: time.Hour})
	w.hold.Store(true)
	ticket, err := q.Submit(read4k(b, 0))
	require.NoError(t, err)
	w.now.Store32(nvme.SQTailDoorbell(0, 0), 9999) // kills the admin queue: CSTS.CFS
	_, err = q.Wait(ticket)
	require.ErrorIs(t, err, vfio.ErrAborted)
	require.NotErrorIs(t, err, vfio.ErrTimeout)
	w.hold.Store(false)
	_, err = q.Do(read4k(b, 0))
	require.NoError(t, err)
	require.Equal(t, uint64(1), c.Resets())
}

// quickly makes the controller say that it needs no time for CC.EN: the driver's grace remains.
func quickly(f nvmetest.Faults) *nvmetest.Faults {
	f.Load = func(off uint32) (uint32, bool) {
		if off == nvme.RegCAP {
			return uint32(nvme.MakeCAP(64, true, 0, 0)), true
		}
		return 0, false
	}
	return &f
}

// TestStuck: a controller that does not obey CC.EN is reset from outside; if that fails too, its memory is in
// quarantine until it is unmapped.
func TestStuck(t *testing.T) {
	for name, outside := range map[string]error{"obeys from outside": nil, "obeys nobody": errors.New("no reset")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
			transport := w.transport(t)
			var stuck atomic.Bool
			transport.SetFaults(quickly(nvmetest.Faults{
				Store: func(off, v uint32) bool { return off == nvme.RegCC && stuck.Load() },
				Reset: func() error {
					stuck.Store(outside != nil)
					return outside
				},
			}))
			c, err := vfio.Open(transport, vfio.Options{})
			require.NoError(t, err)
			q, err := c.NewQueue(16)
			require.NoError(t, err)
			b, err := c.Alloc(4096)
			require.NoError(t, err)
			p, err := c.NewPair(4, nil)
			require.NoError(t, err)
			w.hold.Store(true)
			ticket, err := q.Submit(read4k(b, 0))
			require.NoError(t, err)
			stuck.Store(true)
			err = c.Reset()
			w.hold.Store(false)
			<-p.Lost()
			_, waited := q.Wait(ticket)
			if outside == nil {
				require.NoError(t, err)
				require.ErrorIs(t, waited, vfio.ErrAborted)
				_, err = q.Do(read4k(b, 0))
				require.NoError(t, err)
				require.NoError(t, p.Delete())
				require.NoError(t, c.Close())
				return
			}
			for _, err := range []error{err, waited, c.Err(), p.Delete(), q.Close()} {
				require.ErrorIs(t, err, vfio.ErrQuarantined)
				require.ErrorIs(t, err, vfio.ErrDead)
			}
			_, err = q.Do(read4k(b, 0))
			require.ErrorIs(t, err, vfio.ErrDead)
			_, err = c.NewQueue(4)
			require.ErrorIs(t, err, vfio.ErrDead)
			stuck.Store(false)
			require.NoError(t, c.Close())
			require.Zero(t, transport.Mapped())
			require.NoError(t, b.Free())
		})
	}
}

// TestCloseStuck: closing a controller that obeys nobody says so, and takes all memory from it all the same.
func TestCloseStuck(t *testing.T) {
	t.Parallel()
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	transport := w.transport(t)
	var stuck atomic.Bool
	transport.SetFaults(quickly(nvmetest.Faults{
		Store: func(off, v uint32) bool { return stuck.Load() },
		Reset: func() error { return errors.New("no reset") },
	}))
	c, err := vfio.Open(transport, vfio.Options{RecoveryTimeout: 100 * time.Millisecond})
	require.NoError(t, err)
	q, err := c.NewQueue(16)
	require.NoError(t, err)
	b, err := c.Alloc(4096)
	require.NoError(t, err)
	w.hold.Store(true)
	ticket, err := q.Submit(read4k(b, 0))
	require.NoError(t, err)
	stuck.Store(true)
	require.ErrorIs(t, c.Close(), vfio.ErrQuarantined)
	_, err = q.Wait(ticket)
	require.ErrorIs(t, err, vfio.ErrQuarantined)
	require.ErrorIs(t, err, vfio.ErrClosed)
	w.hold.Store(false)
	require.Zero(t, transport.Mapped())
	require.NoError(t, b.Free())
	require.ErrorIs(t, c.Close(), vfio.ErrClosed)
}

// TestUnusable: what the driver cannot use is refused, with the reason, and given back.
func TestUnusable(t *testing.T) {
	for name, c := range map[string]struct {
		load func(off uint32) (uint32, bool)
		cfg  emu.Config
		want error
	}{
		"gone": {load: func(uint32) (uint32, bool) { return 0xffffffff, true }, want: vfio.ErrGone},
		"no NVM command set": {load: func(off uint32) (uint32, bool) {
			return 0, off == nvme.RegCAP+4
		}, want: vfio.ErrUnsuitable},
		"large pages": {load: func(off uint32) (uint32, bool) {
			return uint32(nvme.MakeCAP(64, true, 1, nvme.CSSNVM)>>32) | 1<<16, off == nvme.RegCAP+4
		}, want: vfio.ErrUnsuitable},
		"doorbells beyond the registers": {load: func(off uint32) (uint32, bool) {
			return uint32(nvme.MakeCAP(64, true, 1, nvme.CSSNVM)>>32) | 12, off == nvme.RegCAP+4
		}, want: vfio.ErrUnsuitable},
		"fatal": {load: func(off uint32) (uint32, bool) {
			return nvme.CSTSFatal, off == nvme.RegCSTS
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.Drive = memoryDrive(t)
			w := &world{cfg: c.cfg}
			transport := w.transport(t)
			transport.SetFaults(&nvmetest.Faults{Load: c.load})
			_, err := vfio.Open(transport, vfio.Options{})
			require.Error(t, err)
			require.ErrorContains(t, err, "emulated")
			if c.want != nil {
				require.ErrorIs(t, err, c.want)
			}
			require.Zero(t, transport.Mapped())
			require.Error(t, transport.Close(), "closed already")
		})
	}
}

// TestTwice: a completion that comes twice is counted, and is no other command's.
func TestTwice(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	_, q, b := start(t, w, vfio.Options{})
	w.now.Controller.SetFaults(func(e *nvme.SQE) *emu.Fault { return &emu.Fault{Double: e.LBA() == 0} })
	for range 50 {
		_, err := q.Do(read4k(b, 0))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		e := read4k(b, 0)
		e.CDW10 = 8
		_, err := q.Do(e)
		return err == nil && q.Spurious() == 50
	}, 20*time.Second, time.Millisecond)
}

// TestDriveThroughResets: a drive's requests survive resets that others ask for.
func TestDriveThroughResets(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t), MDTS: 4}}
	c := w.open(t, vfio.Options{})
	d, err := vfio.NewDrive(c, 1, drive.Options{})
	require.NoError(t, err)
	var stop atomic.Bool
	var group sync.WaitGroup
	for k := range 3 {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(k), 0))
			p, got := make([]byte, 100_000), make([]byte, 100_000)
			for lap := 0; !stop.Load(); lap++ {
				off := int64(k)*1<<20 + int64(r.IntN(1000))
				for i := range p {
					p[i] = byte(lap + i)
				}
				// Four resets may hit one command: a drive that says so is right.
				if err := errors.Join(d.WriteAt(p, off), d.ReadAt(got, off)); err != nil {
					if !errors.Is(err, vfio.ErrAborted) {
						t.Error(err)
					}
				} else if !bytes.Equal(p, got) {
					t.Error("other bytes")
				}
			}
		})
	}
	for range 40 {
		require.NoError(t, c.Reset())
	}
	stop.Store(true)
	group.Wait()
	require.NoError(t, d.Flush())
	require.NoError(t, d.Close())
	require.NoError(t, c.Close())
	require.Zero(t, w.now.Mapped())
}

func TestDriveErrors(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t), ReadOnly: true}}
	c := w.open(t, vfio.Options{})
	defer func() { require.NoError(t, c.Close()) }()
	_, err := vfio.NewDrive(c, 1, drive.Options{})
	require.ErrorIs(t, err, drive.ErrReadOnly)
	_, err = vfio.NewDrive(c, 2, drive.Options{})
	require.ErrorIs(t, err, nvme.InvalidNamespace)
	d, err := vfio.NewDrive(c, 1, drive.Options{ReadOnly: true})
	require.NoError(t, err)
	require.ErrorIs(t, d.WriteAt(make([]byte, 1), 0), drive.ErrReadOnly)
	require.ErrorIs(t, d.Discard(0, 4096), drive.ErrReadOnly)
	require.ErrorIs(t, d.WriteZeroes(0, 4096), drive.ErrReadOnly)
	require.NoError(t, d.Flush())
	require.ErrorContains(t, d.ReadAt(nil, -1), "drive emulated/1")
	require.NoError(t, d.Close())
	_, err = c.MapMemory(make([]byte, 100))
	require.ErrorIs(t, err, vfio.ErrUnsuitable)
}

// TestDoAllocatesNothing: neither here nor in the controller.
func TestDoAllocatesNothing(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	_, q, b := start(t, w, vfio.Options{})
	w.now.Controller.SetFaults(nil)
	e := read4k(b, 0)
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if _, err := q.Do(e); err != nil {
			t.Error(err)
		}
	}))
}

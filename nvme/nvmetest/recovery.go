package nvmetest

import (
	"errors"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// abort: of what is not there, of what is too fast, and of what is held.
func abort(b *bench) {
	b.open(vfio.Options{})
	e := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	for range 20 {
		ticket, err := b.q.Submit(e)
		require.NoError(b, err)
		aborted, err := b.c.Abort(b.q, ticket)
		require.NoError(b, err)
		_, err = b.q.Wait(ticket)
		switch {
		case aborted, err != nil && b.qemu():
			require.ErrorIs(b, err, vfio.ErrAborted)
		default:
			require.NoError(b, err)
		}
	}
	if b.rig.Hold == nil {
		return
	}
	release := b.rig.Hold()
	defer release()
	ticket, err := b.q.Submit(e)
	require.NoError(b, err)
	require.Eventually(b, func() bool { // the Abort must not overtake the command
		aborted, err := b.c.Abort(b.q, ticket)
		require.NoError(b, err)
		return aborted
	}, 20*time.Second, time.Millisecond)
	_, err = b.q.Wait(ticket)
	require.ErrorIs(b, err, vfio.ErrAborted)
	require.NotErrorIs(b, err, vfio.ErrTimeout)
	require.ErrorIs(b, err, nvme.AbortRequested)
}

// submitAll fills the queue with reads of 4 KiB, each to a place of its own.
func (b *bench) submitAll() (tickets []vfio.Ticket) {
	b.Helper()
	for i := range b.q.Depth() {
		ticket, err := b.q.Submit(b.byPRP(b.rw(false, b.block(0), 4096), i*4096, 4096))
		require.NoError(b, err)
		tickets = append(tickets, ticket)
	}
	return tickets
}

// reset: an idle controller is reset, and everything goes on.
func reset(b *bench) {
	b.open(vfio.Options{})
	fill(b.buf.Bytes[:4096], 11)
	b.write(b.block(0), 0, 4096)
	for lap := range 3 {
		require.NoError(b, b.c.Reset())
		require.Equal(b, uint64(lap+1), b.c.Resets())
		b.read(b.block(0), 1<<20, 4096)
		require.True(b, b.same(0, 1<<20, 4096))
	}
}

// resetInFlight: commands in flight either complete or are told that they were ended; none is lost.
func resetInFlight(b *bench) {
	b.open(vfio.Options{})
	if b.qemu() {
		b.Skip("QEMU crashes when a controller is reset with commands in flight")
	}
	fill(b.buf.Bytes[1<<20:][:4096], 12)
	b.write(b.block(0), 1<<20, 4096)
	for lap := range 8 {
		clear(b.buf.Bytes[:1<<20])
		tickets := b.submitAll()
		require.NoError(b, b.c.Reset())
		require.Equal(b, uint64(lap+1), b.c.Resets())
		for i, ticket := range tickets {
			if _, err := b.q.Wait(ticket); err != nil {
				require.ErrorIs(b, err, vfio.ErrAborted)
			} else {
				require.True(b, b.same(i*4096, 1<<20, 4096))
			}
			_, err := b.q.Wait(ticket)
			require.ErrorIs(b, err, vfio.ErrUnsuitable, "once")
		}
		b.read(b.block(0), 2<<20, 4096)
		require.True(b, b.same(1<<20, 2<<20, 4096))
	}
	require.NoError(b, b.c.Err())
}

// heldReset: a reset ends commands that would never complete, and their memory is left alone from then on.
func heldReset(b *bench) {
	if b.rig.Hold == nil {
		b.Skip("the rig cannot hold commands")
	}
	b.open(vfio.Options{})
	fill(b.buf.Bytes[1<<20:][:4096], 13)
	b.write(b.block(0), 1<<20, 4096)
	clear(b.buf.Bytes[:1<<20])
	release := b.rig.Hold()
	defer release()
	tickets := b.submitAll()
	other, err := b.c.NewQueue(4)
	require.NoError(b, err)
	more, err := other.Submit(b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096))
	require.NoError(b, err)
	require.NoError(b, b.c.Reset())
	for _, ticket := range tickets {
		_, err := b.q.Wait(ticket)
		require.ErrorIs(b, err, vfio.ErrAborted)
	}
	_, err = other.Wait(more)
	require.ErrorIs(b, err, vfio.ErrAborted)
	release()
	b.read(b.block(0), 2<<20, 4096)
	_, err = other.Do(b.byPRP(b.rw(false, b.block(0), 4096), 2<<20, 4096))
	require.NoError(b, err)
	require.Equal(b, make([]byte, 1<<20), b.buf.Bytes[:1<<20])
}

// heldTimeout: a command that takes too long is ended, and everything goes on.
func heldTimeout(b *bench) {
	if b.rig.Hold == nil {
		b.Skip("the rig cannot hold commands")
	}
	b.open(vfio.Options{CommandTimeout: 100 * time.Millisecond, RecoveryTimeout: time.Second})
	release := b.rig.Hold()
	defer release()
	e := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	var group sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		group.Go(func() { _, errs[i] = b.q.Do(e) })
	}
	group.Wait()
	for _, err := range errs {
		require.True(b, errors.Is(err, vfio.ErrTimeout) || errors.Is(err, vfio.ErrAborted), "%v", err)
	}
	release()
	require.NoError(b, b.c.Err())
	b.read(b.block(0), 0, 4096)
	require.Zero(b, b.q.Spurious())
}

// heldClose: closing ends commands in flight.
func heldClose(b *bench) {
	if b.rig.Hold == nil {
		b.Skip("the rig cannot hold commands")
	}
	b.open(vfio.Options{})
	release := b.rig.Hold()
	defer release()
	tickets := b.submitAll()
	require.NoError(b, b.q.Close())
	for _, ticket := range tickets {
		_, err := b.q.Wait(ticket)
		require.True(b, errors.Is(err, vfio.ErrClosed) || errors.Is(err, vfio.ErrAborted), "%v", err)
	}
	var err error
	b.q, err = b.c.NewQueue(b.q.Depth() + 1)
	require.NoError(b, err)
	tickets = b.submitAll()
	require.NoError(b, b.c.Close())
	for _, ticket := range tickets {
		_, err := b.q.Wait(ticket)
		require.True(b, errors.Is(err, vfio.ErrClosed) || errors.Is(err, vfio.ErrAborted), "%v", err)
	}
}

// format: the other block size and back, where the controller can.
func format(b *bench) {
	b.openBare(vfio.Options{})
	was := b.ns.LBABytes()
	other := 512 + 4096 - was
	require.ErrorIs(b, b.c.Format(b.ns.ID, 1000), vfio.ErrUnsuitable)
	err := b.c.Format(b.ns.ID, other)
	if errors.Is(err, vfio.ErrUnsuitable) {
		b.Skipf("no other format here: %v", err)
	}
	require.NoError(b, err)
	ns, err := b.c.Namespace(b.ns.ID)
	require.NoError(b, err)
	require.Equal(b, other, ns.LBABytes())
	list, current := ns.Identity.Formats()
	require.Equal(b, other, list[current].Bytes())
	var e nvme.SQE
	nvme.BuildFormat(&e, 0, b.ns.ID, uint8(len(list)))
	_, err = b.c.Admin(e)
	requireStatus(b, err, nvme.FormatInvalid)
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	p, got := make([]byte, 10_000), make([]byte, 10_000)
	fill(p, 3)
	require.NoError(b, d.WriteAt(p, 777))
	require.NoError(b, d.ReadAt(got, 777))
	require.Equal(b, p, got)
	require.NoError(b, drive.FormatNVM(d, was))
	require.Error(b, d.ReadAt(got, 777), "it is to be opened anew")
	require.Error(b, drive.FormatNVM(d, was))
	require.NoError(b, d.Close())
	ns, err = b.c.Namespace(b.ns.ID)
	require.NoError(b, err)
	require.Equal(b, was, ns.LBABytes())
}

// removal: everything ends at once, nothing hangs, and closing says so without an error of its own.
func removal(b *bench) {
	if b.rig.Remove == nil {
		b.Skip("the rig cannot take the controller away")
	}
	b.open(vfio.Options{})
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	p, err := b.c.NewPair(4, nil)
	require.NoError(b, err)
	if b.rig.Hold != nil {
		release := b.rig.Hold()
		defer release()
	}
	tickets := b.submitAll()
	b.rig.Remove()
	for _, ticket := range tickets {
		if _, err := b.q.Wait(ticket); err != nil && !errors.Is(err, nvme.AbortRequested) {
			require.ErrorIs(b, err, vfio.ErrGone)
		}
	}
	_, err = b.q.Do(b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096))
	require.ErrorIs(b, err, vfio.ErrGone)
	require.ErrorIs(b, b.c.Err(), vfio.ErrGone)
	<-p.Lost()
	require.ErrorIs(b, d.ReadAt(make([]byte, 4096), 0), vfio.ErrGone)
	require.ErrorIs(b, d.Flush(), vfio.ErrGone)
	_, err = b.c.SMART()
	require.ErrorIs(b, err, vfio.ErrGone)
	require.ErrorIs(b, b.c.Reset(), vfio.ErrGone)
	require.NoError(b, p.Delete())
	require.NoError(b, d.Close())
	require.NoError(b, b.c.Close())
}

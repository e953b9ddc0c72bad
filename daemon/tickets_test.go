package daemon

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

func TestTicketsAreBoundedAndForgotten(t *testing.T) {
	tab := tickets{max: 4}
	_, errno := tab.query(1)
	require.Equal(t, ioctl.ENOENT, errno)
	var ids []uint64
	for range 4 {
		id, errno := tab.begin()
		require.Zero(t, errno)
		ids = append(ids, id)
	}
	_, errno = tab.begin()
	require.Equal(t, ioctl.EAGAIN, errno, "the oldest is unfinished")
	tab.finish(ids[1], 0, nil)
	_, errno = tab.begin()
	require.Equal(t, ioctl.EAGAIN, errno)
	tab.finish(ids[0], 7, nil)
	got, errno := tab.query(ids[0])
	require.Zero(t, errno)
	require.Equal(t, ticket{id: ids[0], state: ioctl.TicketDone, value: 7}, got)
	id, errno := tab.begin()
	require.Zero(t, errno)
	_, errno = tab.query(ids[0])
	require.Equal(t, ioctl.ENOENT, errno, "overwritten")
	tab.finish(id, 0, gpufile.ErrIncomplete)
	got, _ = tab.query(id)
	require.Equal(t, uint32(ioctl.TicketFailed), got.state)
	require.Equal(t, ioctl.ENODATA, got.errno)
	for _, bad := range []uint64{0, 1 << 63, ^uint64(0)} {
		_, errno := tab.query(bad)
		require.Equal(t, ioctl.ENOENT, errno)
	}
}

// A handle that has few tickets has a small table, and none before its first.
func TestTicketsGrowWithUse(t *testing.T) {
	tab := tickets{max: 1024}
	require.Zero(t, cap(tab.entries))
	for n := 1; n <= 3*tab.max; n++ {
		id, errno := tab.begin()
		require.Zero(t, errno)
		require.EqualValues(t, n, id)
		tab.finish(id, id, nil)
		if n <= 8 {
			require.LessOrEqual(t, cap(tab.entries), 8)
		}
		oldest := uint64(max(1, n-tab.max+1))
		got, errno := tab.query(oldest)
		require.Zero(t, errno, "max tickets are remembered")
		require.Equal(t, oldest, got.value)
		_, errno = tab.query(oldest - 1)
		require.Equal(t, ioctl.ENOENT, errno)
		_, errno = tab.query(id + 1)
		require.Equal(t, ioctl.ENOENT, errno)
	}
	require.Len(t, tab.entries, tab.max)
}

func TestTicketsFollow(t *testing.T) {
	tab := tickets{max: 4}
	var told atomic.Int32
	tab.setNotify(func() { told.Add(1) })
	done := extentmap.NewTicket()
	id, _ := tab.begin()
	tab.follow(id, done)
	got, _ := tab.query(id)
	require.Equal(t, uint32(ioctl.TicketPending), got.state)
	done.Complete(errors.New("broken"))
	require.Eventually(t, func() bool { got, _ := tab.query(id); return got.state == ioctl.TicketFailed },
		10*time.Second, time.Millisecond)
	got, _ = tab.query(id)
	require.Equal(t, ioctl.EIO, got.errno)
	id, _ = tab.begin()
	tab.follow(id, nil)
	require.Eventually(t, func() bool { return told.Load() == 2 }, 10*time.Second, time.Millisecond)
	tab.close()
	_, errno := tab.begin()
	require.Equal(t, ioctl.ESTALE, errno)
}

func TestErrnoOf(t *testing.T) {
	require.Zero(t, errnoOf(nil))
	require.Equal(t, ioctl.EIO, errnoOf(errors.New("anything")))
	require.Equal(t, ioctl.EBUSY, errnoOf(ioctl.EBUSY))
	for _, e := range errnos {
		require.Equal(t, e.errno, errnoOf(errors.Join(errors.New("at inode 7"), e.err)), e.err)
	}
}

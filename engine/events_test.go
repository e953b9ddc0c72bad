package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/ioctl"
)

// TestEvents: they come in order, as many at a time as fit the caller's room and the arena.
func TestEvents(t *testing.T) {
	for _, room := range []int{1, 3, 100} {
		p, _, _ := newPool(t, 400)
		out := make([]Event, room)
		n, next, lost, err := p.Events(0, out)
		require.NoError(t, err)
		require.Equal(t, []any{0, uint64(1), uint64(0)}, []any{n, next, lost})
		var all []Event
		for {
			if n, next, _, err = p.Events(next, out); n == 0 {
				break
			}
			require.LessOrEqual(t, n, min(room, 400/changeBytes))
			all = append(all, out[:n]...)
		}
		require.NoError(t, err)
		require.Len(t, all, 20)
		for i, e := range all {
			require.Equal(t, Event{Key: Key{byte(i + 1)}, Tenant: uint32(i+1) * 2, Removed: i%2 == 0}, e)
		}
	}
}

// TestEventsAnswers: no answer leads out of the arena, and errors are the room's.
func TestEventsAnswers(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	f.changes = func(a *ioctl.Changes) { a.Count, a.Next, a.Lost = 2, 9, 7 }
	_, _, _, err := p.Events(1, make([]Event, 1))
	require.ErrorIs(t, err, ErrInvalid)
	_, next, lost, err := p.Events(1, make([]Event, 2))
	require.NoError(t, err)
	require.Equal(t, []uint64{9, 7}, []uint64{next, lost})
	_, _, _, err = p.Events(1, nil)
	require.ErrorIs(t, err, ErrInvalid)
	f.bad = ioctl.ESTALE
	_, _, _, err = p.Events(1, make([]Event, 2))
	require.ErrorIs(t, err, ErrGone)
	p.control.arena = nil
	_, _, _, err = p.Events(1, make([]Event, 2))
	require.ErrorIs(t, err, ErrGone)
}

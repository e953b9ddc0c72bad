package gpufile

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
)

func TestScrub(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p, q := w.pool("a", 1, nil), w.pool("b", 1, nil)
	m := w.member()
	keys := chainKeys(1, 300)
	require.NoError(t, store(t, m, w.s.GroupOfPool(p.ID()), 0, chainItems(keys)))
	require.NoError(t, store(t, m, w.s.GroupOfPool(q.ID()), 0, chainItems(chainKeys(2, 10))))
	_, err := w.s.Scrub(context.Background(), 0, nil)
	require.ErrorIs(t, err, ErrInvalid, "nobody can verify")
	damaged, _, ok := p.Find(&keys[299])
	require.True(t, ok)
	away, _, ok := p.Find(&keys[150])
	require.True(t, ok)
	var seen atomic.Int64
	w.s.SetVerifier(func(r *Pool, slot uint32, _ checksum.Seed) Verdict {
		seen.Add(1)
		switch {
		case r == p && slot == damaged:
			return Damaged
		case r == p && slot == away:
			return Unreadable
		}
		return Intact
	})
	before := p.Stats()
	var told []ScrubCounts
	counts, err := w.s.Scrub(context.Background(), 0, func(n ScrubCounts) { told = append(told, n) })
	require.NoError(t, err)
	require.Equal(t, ScrubCounts{Total: 310, Files: 310, Bytes: 300*p.m.SlotBytes() + 10*q.m.SlotBytes(), Damaged: 1,
		Unreadable: 1}, counts)
	require.EqualValues(t, 310, seen.Load())
	require.NotEmpty(t, told)
	require.Equal(t, uint64(310), told[0].Total)
	st := p.Stats()
	require.EqualValues(t, 298, st.Files)
	require.EqualValues(t, 1, st.Bad)
	require.EqualValues(t, 1, st.FilesAway)
	require.Equal(t, [3]uint64{before.Lookups, before.Hits, before.FilesPinned},
		[3]uint64{st.Lookups, st.Hits, st.FilesPinned}, "it is no reader")
	_, _, ok = p.Find(&keys[299])
	require.False(t, ok)
	checkPool(t, p)

	counts, err = w.s.Scrub(context.Background(), 0, nil)
	require.NoError(t, err)
	require.EqualValues(t, 308, counts.Files)
	require.Zero(t, counts.Damaged+counts.Unreadable)
}

// A scrub that is as slow as it may be ends at once when it is told to.
func TestScrubEnds(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	require.NoError(t, store(t, w.member(), w.s.GroupOfPool(p.ID()), 0, chainItems(chainKeys(1, 50))))
	w.s.SetVerifier(func(*Pool, uint32, checksum.Seed) Verdict { return Intact })
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan struct{})
	var once atomic.Bool
	done := make(chan error)
	go func() {
		counts, err := w.s.Scrub(ctx, 1, func(ScrubCounts) {
			if once.CompareAndSwap(false, true) {
				close(first)
			}
		})
		if err != nil && counts.Files >= 50 {
			err = nil
		}
		done <- err
	}()
	<-first
	cancel()
	select {
	case err := <-done:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	require.Zero(t, p.Stats().FilesPinned)
	checkPool(t, p)
}

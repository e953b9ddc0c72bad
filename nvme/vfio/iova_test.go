package vfio

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestIOVAs allocates and frees at random: nothing overlaps, nothing is outside the ranges, nothing is lost.
func TestIOVAs(t *testing.T) {
	ranges := []span{{0xfef00000, 0x7fffffffff}, {0, 0xfedfffff}}
	v, err := newIOVAs(ranges)
	require.NoError(t, err)
	require.Equal(t, []span{{1 << 20, 0xfedfffff}, {0xfef00000, 0x7fffffffff}}, v.free)
	whole := slices.Clone(v.free)
	r := rand.New(rand.NewPCG(1, 1))
	var held []span
	for range 3000 {
		if len(held) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(held))
			v.release(held[i].first, held[i].last-held[i].first+1)
			held = slices.Delete(held, i, i+1)
			continue
		}
		n := uint64(1+r.IntN(64)) * PageBytes
		if r.IntN(8) == 0 {
			n = uint64(1+r.IntN(40)) * 16 << 20
		}
		at, err := v.alloc(n)
		require.NoError(t, err)
		require.Zero(t, at%PageBytes)
		if n >= largeBytes {
			require.Zero(t, at%largeBytes)
		}
		got := span{at, at + n - 1}
		require.True(t, slices.ContainsFunc(ranges, func(s span) bool { return s.first <= got.first && got.last <= s.last }))
		for _, h := range held {
			require.False(t, h.first <= got.last && got.first <= h.last, "%v and %v", h, got)
		}
		held = append(held, got)
	}
	for _, h := range held {
		v.release(h.first, h.last-h.first+1)
	}
	require.Equal(t, whole, v.free)
}

func TestIOVALimits(t *testing.T) {
	v, err := newIOVAs([]span{{1 << 20, 1<<20 + 3*PageBytes - 1}})
	require.NoError(t, err)
	_, err = v.alloc(4 * PageBytes)
	require.ErrorIs(t, err, ErrUnsuitable)
	_, err = v.alloc(0)
	require.ErrorIs(t, err, ErrUnsuitable)
	at, err := v.alloc(3 * PageBytes)
	require.NoError(t, err)
	require.Equal(t, uint64(1<<20), at)
	_, err = v.alloc(PageBytes)
	require.ErrorIs(t, err, ErrUnsuitable)
	top, err := newIOVAs([]span{{^uint64(0) - 2*PageBytes + 1, ^uint64(0)}})
	require.NoError(t, err, "to the end of the address space")
	for range 2 {
		_, err = top.alloc(PageBytes)
		require.NoError(t, err)
	}
	for _, bad := range [][]span{nil, {{0, 100}}, {{1 << 20, 1 << 30}, {1 << 25, 1 << 31}}} {
		_, err := newIOVAs(bad)
		require.ErrorIs(t, err, ErrUnsuitable)
	}
}

func TestIOVAsOfChoice(t *testing.T) {
	v, err := newIOVAs([]span{{1 << 20, 2<<20 - 1}, {4 << 20, 8<<20 - 1}})
	require.NoError(t, err)
	whole := slices.Clone(v.free)
	require.True(t, v.take(5<<20, PageBytes))
	for _, bad := range []span{
		{5 << 20, PageBytes}, {5<<20 - PageBytes, 2 * PageBytes}, {2 << 20, PageBytes}, {0, PageBytes},
		{8<<20 - PageBytes, 2 * PageBytes}, {4 << 20, 0}, {4 << 20, 1 << 63},
	} {
		require.False(t, v.take(bad.first, bad.last), "%d bytes at %#x", bad.last, bad.first)
	}
	require.True(t, v.take(4<<20, 1<<20))
	require.True(t, v.take(8<<20-PageBytes, PageBytes))
	v.release(5<<20, PageBytes)
	v.release(8<<20-PageBytes, PageBytes)
	v.release(4<<20, 1<<20)
	require.Equal(t, whole, v.free)
}

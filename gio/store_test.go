package gio

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func newTestBuffer(n int) *storeBuffer {
	m := &Memory{buf: make([]byte, n), base: 1 << 30, direct: true, padded: true}
	return newStoreBuffer(m, StoreBlock, 50*time.Millisecond)
}

// TestStoreBufferPlaces: places never overlap, are given whenever there is room in one piece, and all come back.
func TestStoreBufferPlaces(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for round := range 40 {
		s := newTestBuffer(StoreLeast + random.IntN(20)*pageBytes)
		owner := make([]int, len(s.taken)) // 0: free
		held := map[int]place{}
		peak := 0
		for step := 1; step < 400; step++ {
			if random.IntN(3) == 0 && len(held) > 0 {
				for id, p := range held { // any
					s.free(p)
					delete(held, id)
					for i := range owner {
						if owner[i] == id {
							owner[i] = 0
						}
					}
					break
				}
				continue
			}
			n := 1 + random.IntN(s.piece)
			grains := (n + s.grain - 1) / s.grain
			p, ok, err := s.take(n)
			require.NoError(t, err)
			require.Equal(t, longestFree(owner) >= grains, ok, "round %d step %d: %d grains", round, step, grains)
			if !ok {
				continue
			}
			require.EqualValues(t, grains, p.count)
			require.GreaterOrEqual(t, len(s.bytes(p)), n)
			for i := p.first; i < p.first+p.count; i++ {
				require.Zero(t, owner[i])
				owner[i] = step
			}
			held[step] = p
			peak = max(peak, len(owner)-count(owner, 0))
		}
		r := s.report()
		require.EqualValues(t, (len(owner)-count(owner, 0))*s.grain, r.Fill)
		require.EqualValues(t, peak*s.grain, r.Peak)
		for _, p := range held {
			s.free(p)
		}
		require.Zero(t, s.report().Fill)
		s.unblock()
		require.False(t, s.pressed())
	}
}

func count(list []int, x int) (n int) {
	for _, y := range list {
		if x == y {
			n++
		}
	}
	return n
}

func longestFree(owner []int) (longest int) {
	run := 0
	for _, o := range owner {
		if run++; o != 0 {
			run = 0
		}
		longest = max(longest, run)
	}
	return longest
}

// TestStoreBufferWaits: a wait for room ends with room, with the buffer's end, or when no write ends.
func TestStoreBufferWaits(t *testing.T) {
	s := newTestBuffer(StoreLeast)
	var places []place
	for range 4 {
		p, err := s.wait(s.piece, func() {})
		require.NoError(t, err)
		places = append(places, p)
	}
	require.True(t, s.pressed())
	called := 0
	_, err := s.wait(1, func() { called++ })
	require.ErrorIs(t, err, ErrTimeout)
	require.Equal(t, 1, called)
	require.Positive(t, s.report().BlockedNanos)
	got := make(chan error, 1)
	wait := func() {
		_, err := s.wait(s.piece, func() {})
		got <- err
	}
	go wait()
	s.free(places[2])
	require.NoError(t, <-got)
	go wait()
	gone := errors.New("gone")
	s.fail(gone)
	require.ErrorIs(t, <-got, gone)
	_, err = s.takeAll([]int{1})
	require.ErrorIs(t, err, gone)
}

// TestStoreBufferIsPressed: below high water too, when the room that there is, is not in one piece.
func TestStoreBufferIsPressed(t *testing.T) {
	s := newTestBuffer(StoreLeast)
	places, err := s.takeAll([]int{s.piece / 2, s.piece / 2, s.piece / 2, s.piece, s.piece, s.piece / 2})
	require.NoError(t, err)
	s.free(places[0])
	s.free(places[2])
	require.False(t, s.pressed())
	_, ok, err := s.take(s.piece)
	require.NoError(t, err)
	require.False(t, ok)
	require.True(t, s.pressed())
	s.free(places[1])
	_, ok, err = s.take(s.piece)
	require.NoError(t, err)
	require.True(t, ok)
	require.Positive(t, s.report().BlockedNanos)
}

// TestStoreBufferRefuses: a layer is taken whole or not at all.
func TestStoreBufferRefuses(t *testing.T) {
	s := newTestBuffer(StoreLeast)
	places, err := s.takeAll([]int{s.piece, 1, s.piece})
	require.NoError(t, err)
	require.Len(t, places, 3)
	fill := s.report().Fill
	_, err = s.takeAll([]int{s.piece, s.piece})
	require.ErrorIs(t, err, ErrStoreBuffer)
	require.Equal(t, fill, s.report().Fill)
	require.EqualValues(t, 1, s.report().Refused)
}

// TestStoreConfig: what cannot be is refused.
func TestStoreConfig(t *testing.T) {
	h := newHand(t, 8)
	good := h.ring.config
	good.Lanes = [][]Queue{{h.queue}, {h.queue}, {h.queue}}
	good.DMA, good.StoreBytes = page(4<<20), StoreLeast
	for name, f := range map[string]func(c *RingConfig){
		"too small":           func(c *RingConfig) { c.StoreBytes = StoreLeast - pageBytes },
		"no whole pages":      func(c *RingConfig) { c.StoreBytes = StoreLeast + 1 },
		"negative":            func(c *RingConfig) { c.StoreBytes = -StoreLeast },
		"no room":             func(c *RingConfig) { c.StoreBytes = 4 << 20 },
		"one lane":            func(c *RingConfig) { c.Lanes = c.Lanes[:1] },
		"all lanes":           func(c *RingConfig) { c.StoreLanes = 3 },
		"negative lanes":      func(c *RingConfig) { c.StoreLanes = -1 },
		"lanes for no buffer": func(c *RingConfig) { c.StoreBytes, c.StoreLanes = 0, 1 },
		"policy":              func(c *RingConfig) { c.StorePolicy = 2 },
	} {
		c := good
		f(&c)
		_, err := NewRing(c)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	r, err := NewRing(good)
	require.NoError(t, err)
	require.Equal(t, 3, r.Alive())
	require.NoError(t, r.Close())
}

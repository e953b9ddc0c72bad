package giotest

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
)

// Pacer says when an executor's deferred writes may go, and how far its reads may run ahead.
type Pacer interface {
	Allow(objects uint64)
	Ahead(bytes uint64)
	Written() uint64 // objects so far
	Early() uint64   // pieces of layers that were read before anybody waited for them, since Ahead
	Check() error    // of what it was told; nothing is under way
}

// testPacedWrites: deferred writes go when the pacer lets them, piece by piece, and restores go meanwhile.
func testPacedWrites(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if s.Pacer == nil || w.stepped {
			t.Skip("nobody paces it, or one thread only")
		}
		const piece = 4
		shape := w.shape()
		shape.ChunkCommands = piece
		r := newLayerRig(t, s, w, shape, 0)
		p := s.Pacer()
		l := r.evacuate(1)
		held := r.Ring.StoreStats()
		require.EqualValues(t, len(r.a.ctxs), held.Objects)
		require.Less(t, held.Fill, held.Size*3/4)
		store(r.Rig, r.a.ctxs, 2)
		r.a.set(0)
		require.Empty(t, r.Run(false, r.a.ctxs))
		r.a.check(2, nil)
		require.Zero(t, p.Written())
		p.Allow(piece)
		await(t, "one piece", func() bool { return p.Written() > 0 && r.Ring.StoreStats().Objects < held.Objects })
		require.LessOrEqual(t, p.Written(), uint64(piece))
		p.Allow(math.MaxUint32)
		require.NoError(t, l.Finish())
		l.Close()
		r.a.onMedium(1)
		r.checkEmptied()
		require.Equal(t, make([]error, len(r.slots)), r.retrieve())
		require.NoError(t, p.Check())
	})
}

// testHighWater: above three quarters of the buffer writes go without being let.
func testHighWater(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if s.Pacer == nil || w.stepped {
			t.Skip("nobody paces it, or one thread only")
		}
		shape := w.shape()
		shape.StoreBytes, shape.Rows, shape.Geometry = gio.StoreLeast, 12, Uneven(9, 1)
		r := newLayerRig(t, s, w, shape, 0)
		p := s.Pacer()
		l := r.evacuate(1)
		await(t, "low water", func() bool {
			x := r.Ring.StoreStats()
			return x.Fill <= x.Size*3/4
		})
		require.Positive(t, p.Written())
		require.Positive(t, r.Ring.StoreStats().Objects, "the rest waits")
		p.Allow(math.MaxUint32)
		require.NoError(t, l.Finish())
		l.Close()
		r.a.onMedium(1)
		r.checkEmptied()
		require.NoError(t, p.Check())
	})
}

// testReadAhead: reads that nobody waits for are held back as the pacer says, and those that are awaited never.
func testReadAhead(t *testing.T, s *Subject) {
	eachStore(t, s, func(t *testing.T, w way) {
		if s.Pacer == nil {
			t.Skip("nobody paces it")
		}
		shape := w.shape()
		shape.ChunkCommands, shape.Geometry = 4, Uneven(6, 1)
		r := newLayerRig(t, s, w, shape, 0)
		p := s.Pacer()
		p.Allow(math.MaxUint32)
		r.store(1)
		for _, ahead := range []uint64{0, 1, math.MaxUint64} {
			p.Ahead(ahead)
			require.Equal(t, make([]error, len(r.slots)), r.retrieve())
			r.a.check(1, nil)
			if ahead == 0 {
				require.Zero(t, p.Early())
			}
			if ahead == math.MaxUint64 {
				require.Positive(t, p.Early())
			}
			require.NoError(t, p.Check())
		}
	})
}

package emu

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// checkFlash looks at what must hold at any time.
func checkFlash(t *testing.T, f *flash) {
	t.Helper()
	valid := make([]uint32, len(f.units))
	for page, at := range f.places {
		if at != 0 {
			require.Equal(t, uint32(page+1), f.owners[at-1])
			valid[(at-1)/f.unitPages]++
		}
	}
	used := len(f.free)
	for u := range f.units {
		x := &f.units[u]
		require.Equal(t, valid[u], x.valid)
		require.LessOrEqual(t, x.valid, x.written)
		require.LessOrEqual(t, x.written, f.unitPages)
		if x.inUse || x.written > 0 {
			used++
		}
	}
	require.Equal(t, len(f.units), used, "a unit is free, or it is not")
	for _, u := range f.open {
		require.True(t, f.units[u].inUse)
		require.Less(t, f.units[u].written, f.unitPages)
	}
	require.Zero(t, f.media%PageBytes)
	require.Zero(t, f.erased%uint64(f.cfg.UnitBytes))
}

// Whatever is written, deallocated and renewed, there is always room, and no page is in two places.
func TestFlashModel(t *testing.T) {
	for seed, p := range []Placement{
		{Handles: 1, UnitBytes: 2 * PageBytes, Spare: 4},
		{Handles: 3, UnitBytes: 16 * PageBytes, Spare: 6},
		{Handles: 4, UnitBytes: 8 * PageBytes, Spare: 13, Isolated: true},
		{Handles: 2, UnitBytes: 64 * PageBytes},
	} {
		const pages = 200
		f, err := newFlash(p, pages*PageBytes)
		require.NoError(t, err)
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		host := uint64(0)
		for step := range 5000 {
			off := r.Int64N(pages)
			n := 1 + r.Int64N(min(8, pages-off))
			switch r.IntN(10) {
			case 0:
				f.deallocate(byteRange{off * PageBytes, n * PageBytes})
			case 1:
				require.True(t, f.update([]uint16{uint16(r.IntN(p.Handles))}).OK())
			default:
				f.write(uint16(r.IntN(p.Handles+1)), off*PageBytes, uint32(n*PageBytes))
				host += uint64(n) * PageBytes
			}
			if step%100 == 0 {
				checkFlash(t, f)
			}
		}
		checkFlash(t, f)
		s := f.stats()
		require.Equal(t, host, s.HostWritten[0])
		require.Greater(t, s.Amplification(), 1.0, "old pages had to be moved")
		require.Positive(t, s.MediaErased[0])
		require.False(t, f.update([]uint16{uint16(p.Handles)}).OK())
	}
}

func TestFlashConfig(t *testing.T) {
	for _, p := range []Placement{
		{}, {Handles: HandlesMax + 1, UnitBytes: 1 << 20}, {Handles: 1, UnitBytes: PageBytes},
		{Handles: 1, UnitBytes: 2*PageBytes + 512}, {Handles: 2, UnitBytes: 1 << 20, Spare: 4},
	} {
		_, err := newFlash(p, 1<<20)
		require.ErrorIs(t, err, ErrConfig)
	}
	_, err := newFlash(Placement{Handles: 1, UnitBytes: 1 << 30}, 1<<40)
	require.ErrorIs(t, err, ErrConfig)
}

// What is kept apart by its lifetime costs less: of what is written, half is overwritten soon and half late.
func TestFlashApart(t *testing.T) {
	const pages, unit = 8192, 64
	factor := func(handles int, cold uint16) float64 {
		f, err := newFlash(Placement{Handles: handles, UnitBytes: unit * PageBytes, Spare: 12}, pages*PageBytes)
		require.NoError(t, err)
		for i := range int64(8 * pages) { // two rings, a long one and a short one
			f.write(cold, (1024+i%(pages-1024))*PageBytes, PageBytes)
			f.write(0, i%1024*PageBytes, PageBytes)
		}
		s := f.stats()
		return s.Amplification()
	}
	mixed, apart := factor(1, 0), factor(2, 1)
	require.Less(t, apart, 1.1)
	require.Greater(t, mixed, apart*1.1)
	t.Logf("mixed %.2f, apart %.2f", mixed, apart)
}

package stripe

import (
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCodecRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 9))
	for range 200 {
		g := randomGeometry(r)
		b, err := g.MarshalBinary()
		require.NoError(t, err)
		require.Zero(t, len(b)%8)
		parsed, err := ParseGeometry(b)
		require.NoError(t, err)
		require.Equal(t, g, parsed)
		again, err := parsed.Clone().MarshalBinary()
		require.NoError(t, err)
		require.Equal(t, b, again)
	}
}

// TestCodecGolden pins the encoding of every preset: it is part of the format.
func TestCodecGolden(t *testing.T) {
	var got strings.Builder
	for _, m := range Models {
		g, err := m.KV(16, 2).Geometry()
		require.NoError(t, err)
		g.Objects = append(g.Objects[:2:2], g.Objects[len(g.Objects)-4:len(g.Objects)-2]...)
		b, err := g.WithTrailers().MarshalBinary()
		require.NoError(t, err)
		got.WriteString(m.Name + " " + hex.EncodeToString(b) + "\n")
	}
	path := filepath.Join("testdata", "geometry.golden")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		require.NoError(t, os.WriteFile(path, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

// TestCodecRefuses cuts, stretches and changes each byte of a good encoding: nothing but the very geometry it says
// is accepted.
func TestCodecRefuses(t *testing.T) {
	g := randomGeometry(rand.New(rand.NewPCG(10, 11)))
	b, err := g.MarshalBinary()
	require.NoError(t, err)
	for n := range b {
		_, err := ParseGeometry(b[:n])
		require.ErrorIs(t, err, ErrGeometry)
	}
	_, err = ParseGeometry(append(b[:len(b):len(b)], make([]byte, 8)...))
	require.ErrorIs(t, err, ErrGeometry)
	for i := range b {
		for _, bit := range []byte{1, 0x10, 0x80} {
			bad := append([]byte(nil), b...)
			bad[i] ^= bit
			requireCanonical(t, bad)
		}
		if i < codecHeaderBytes {
			bad := append([]byte(nil), b...)
			bad[i] ^= 0x40
			_, err := ParseGeometry(bad)
			require.ErrorIs(t, err, ErrGeometry)
		}
	}
}

// requireCanonical wants b refused, or to be the encoding of what it is parsed to.
func requireCanonical(t *testing.T, b []byte) {
	t.Helper()
	g, err := ParseGeometry(b)
	if err != nil {
		require.ErrorIs(t, err, ErrGeometry)
		require.Empty(t, g.Objects)
		return
	}
	again, err := g.MarshalBinary()
	require.NoError(t, err)
	require.Equal(t, b, again)
	l, err := NewLayout(g, 1+len(b)%MaxWidth)
	require.NoError(t, err)
	entry, unit := l.Locate(99, 0)
	index, object, _, ok := l.Resolve(entry, unit, 100)
	require.True(t, ok && index == 99 && object == 0)
}

func FuzzParseGeometry(f *testing.F) {
	for _, m := range Models {
		g, err := m.KV(16, 1).Geometry()
		require.NoError(f, err)
		b, err := g.MarshalBinary()
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { requireCanonical(t, b) })
}

package wear

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseEndurance(t *testing.T) {
	for text, want := range map[string]Endurance{
		"1dwpd": {DWPD: 1}, "0.3 DWPD": {DWPD: 0.3}, "14000tbw": {Bytes: 14e15}, "14PBW": {Bytes: 14e15},
	} {
		got, err := ParseEndurance(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
		require.True(t, got.Known())
	}
	for _, text := range []string{"", "1", "dwpd", "-1dwpd", "0tbw", "nandwpd", "infpbw", "1e300tbw", "1 2 dwpd x"} {
		_, err := ParseEndurance(text)
		require.ErrorIs(t, err, ErrInvalid, text)
	}
	require.False(t, Endurance{}.Known())
}

func TestRatings(t *testing.T) {
	var r Ratings
	require.False(t, r.Known())
	require.False(t, r.Of(0).Known())
	require.NoError(t, r.Set("1dwpd"))
	require.NoError(t, r.Set("2:600tbw"))
	for _, bad := range []string{"", "x", "x:1dwpd", "70000:1dwpd", "-1:1dwpd", "2:", ":"} {
		require.ErrorIs(t, r.Set(bad), ErrInvalid, bad)
	}
	require.True(t, r.Known())
	require.Equal(t, Endurance{DWPD: 1}, r.Of(0))
	require.Equal(t, Endurance{Bytes: 600e12}, r.Of(2))
}

// near allows for the rounding of units.
func near(a, b Endurance) bool {
	return math.Abs(a.DWPD-b.DWPD) <= 1e-12*a.DWPD && math.Abs(a.Bytes-b.Bytes) <= 1e-12*a.Bytes
}

func FuzzParseEndurance(f *testing.F) {
	for _, s := range []string{"1dwpd", "14000 TBW", "0.5pbw", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		e, err := ParseEndurance(text)
		if again, errAgain := ParseEndurance(e.String()); err == nil && (errAgain != nil || !near(e, again)) {
			t.Fatalf("%q: %v, and %v again: %v", text, e, again, errAgain)
		}
		if rated := e.Rated(1e12); (err == nil) != (rated > 0) || math.IsNaN(rated) || math.IsInf(rated, 0) {
			t.Fatalf("%q: %v, rated %v, %v", text, e, rated, err)
		}
	})
}

func TestYearsLeft(t *testing.T) {
	const capacity = 4_000_000_000_000
	day := DWPD(capacity/86400.0, capacity)
	require.InDelta(t, 1, day, 1e-9)
	one := Endurance{DWPD: 1}
	years, ok := one.YearsLeft(capacity, 0, capacity/86400.0)
	require.True(t, ok)
	require.InDelta(t, WarrantyYears, years, 1e-9, "a drive written as it is rated lasts its warranty")
	years, ok = one.YearsLeft(capacity, one.Rated(capacity)/2, capacity/86400.0)
	require.True(t, ok)
	require.InDelta(t, WarrantyYears/2.0, years, 1e-9)
	years, ok = one.YearsLeft(capacity, 2*one.Rated(capacity), 1)
	require.True(t, ok)
	require.Zero(t, years, "worn out")
	for _, rate := range []float64{0, -1, math.NaN()} {
		_, ok = one.YearsLeft(capacity, 0, rate)
		require.False(t, ok)
	}
	_, ok = Endurance{}.YearsLeft(capacity, 0, 1)
	require.False(t, ok)
	require.Zero(t, DWPD(1, 0))
	require.Equal(t, 2*one.Rated(capacity), Endurance{Bytes: 14.6e15}.Rated(1))
}

// More written or written faster never means longer.
func TestYearsLeftMonotone(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		e := Endurance{DWPD: 0.1 + rng.Float64()}
		capacity, written, rate := 1+rng.Uint64N(1<<44), rng.Float64()*1e15, 1+rng.Float64()*1e9
		years, ok := e.YearsLeft(capacity, written, rate)
		require.True(t, ok)
		faster, _ := e.YearsLeft(capacity, written, 2*rate)
		older, _ := e.YearsLeft(capacity, 2*written, rate)
		larger, _ := e.YearsLeft(2*capacity, written, rate)
		require.LessOrEqual(t, faster, years)
		require.LessOrEqual(t, older, years)
		require.GreaterOrEqual(t, larger, years)
		require.GreaterOrEqual(t, faster, 0.0)
	}
}

func TestAmplification(t *testing.T) {
	_, ok := Amplification(5, 0)
	require.False(t, ok)
	f, ok := Amplification(15, 10)
	require.True(t, ok)
	require.InDelta(t, 1.5, f, 1e-9)
}

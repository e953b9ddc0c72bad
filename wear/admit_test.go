package wear

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPolicies(t *testing.T) {
	for i, name := range Policies {
		p, err := ParsePolicy(name)
		require.NoError(t, err)
		require.Equal(t, Policy(i), p)
		require.Equal(t, name, p.String())
	}
	_, err := ParsePolicy("some")
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, "policy 9", Policy(9).String())

	var a Admissions
	require.NoError(t, a.Set("second-touch"))
	require.NoError(t, a.Set("chat:all"))
	require.NoError(t, a.Set("family-x:cost-aware"))
	for _, bad := range []string{"", ":all", "chat:", "chat:none"} {
		require.ErrorIs(t, a.Set(bad), ErrInvalid, bad)
	}
	require.Equal(t, SecondTouch, a.Of("other", ""))
	require.Equal(t, All, a.Of("chat", "family-x"), "the pool's own goes first")
	require.Equal(t, CostAware, a.Of("window", "family-x"))
	require.True(t, a.Uses(CostAware) && a.Uses(SecondTouch) && a.Uses(All) && a.Selective())
	require.False(t, (&Admissions{Named: map[string]Policy{"x": All}}).Selective())
}

func newFilter(t *testing.T, size int) *Filter {
	f, err := NewFilter(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

func TestFilterSizes(t *testing.T) {
	for _, size := range []int{-1, 0, FilterBytesMin - 1, FilterBytesMax + 1} {
		_, err := NewFilter(size)
		require.ErrorIs(t, err, ErrInvalid)
	}
	require.Len(t, newFilter(t, FilterBytesMin+1).raw, 2*FilterBytesMin)
}

// What was added lately is never missed, what was never added is seldom found, and what was added long ago is
// forgotten.
func TestFilter(t *testing.T) {
	f := newFilter(t, FilterBytesMin)
	rng := rand.New(rand.NewPCG(5, 6))
	capacity := FilterBytesMin / 2
	hashes := make([]uint64, 8*capacity)
	missed, found := 0, 0
	for i := range hashes {
		hashes[i] = rng.Uint64()
		if f.Touches(hashes[i]) > 0 {
			found++
		}
		f.Add(hashes[i])
		require.Positive(t, f.Touches(hashes[i]))
		if i >= capacity/2 && f.Touches(hashes[i-capacity/2]) == 0 {
			missed++
		}
	}
	require.Less(t, float64(found)/float64(len(hashes)), 1.5*FilterFalse)
	require.Less(t, float64(missed)/float64(len(hashes)), 0.01, "half of the capacity back")
	old := 0
	for _, h := range hashes[:capacity] {
		if f.Touches(h) > 0 {
			old++
		}
	}
	require.Less(t, float64(old)/float64(capacity), 0.01)
}

// A line keeps the last 32 different keys, in the order of their last use, and counts them.
func TestFilterLine(t *testing.T) {
	f := newFilter(t, FilterBytesMin)
	key := func(n uint64) uint64 { return n * (TouchesMax + 1) } // fingerprints of one line, zero among them
	for i := range uint64(lineKeys) {
		require.Zero(t, f.Touches(key(i)))
		f.Add(key(i))
		require.Equal(t, 1, f.Touches(key(i)))
	}
	for want := 2; want < 10; want++ {
		f.Add(key(0)) // refreshed
		require.Equal(t, min(want, TouchesMax), f.Touches(key(0)))
	}
	f.Add(key(1000))
	require.Equal(t, TouchesMax, f.Touches(key(0)))
	require.Zero(t, f.Touches(key(1)), "the oldest made room")
	require.Equal(t, 1, f.Touches(key(2)))
	require.Equal(t, 1, f.Touches(key(1000)))
}

func testKey(n uint64) (k [32]byte) {
	binary.LittleEndian.PutUint64(k[:], n)
	return k
}

func newGate(t *testing.T, o GateOptions) *Gate {
	g, err := NewGate(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

func ask(g *Gate, p Policy, space uint32, n uint64, tail bool) bool {
	key := testKey(n)
	asks := []Ask{{Policy: p, Space: space, Key: &key, Tokens: 512, Tail: tail, Bytes: 64 << 20}}
	admit := []bool{false}
	g.Admit(asks, admit)
	g.Asked(asks, admit)
	return admit[0]
}

func TestGateSecondTouch(t *testing.T) {
	g := newGate(t, GateOptions{Admissions: Admissions{Default: SecondTouch}, FilterBytes: FilterBytesMin})
	require.False(t, ask(g, SecondTouch, 1, 7, false))
	require.True(t, ask(g, SecondTouch, 1, 7, false))
	require.False(t, ask(g, SecondTouch, 2, 7, false), "another pool's key")
	require.True(t, ask(g, All, 1, 8, false))
	require.False(t, ask(g, SecondTouch, 1, 8, false), "a pool that admits all leaves no traces")
	key := testKey(9)
	asks, admit := []Ask{{Policy: SecondTouch, Key: &key}}, []bool{true}
	for range 3 {
		g.Admit(asks, admit)
		require.False(t, admit[0], "to look is no touch")
	}
}

func TestGateNone(t *testing.T) {
	g, err := NewGate(GateOptions{Admissions: Admissions{Named: map[string]Policy{"a": All}}})
	require.NoError(t, err)
	require.Nil(t, g)
	require.NoError(t, g.Close())
	require.Equal(t, All, g.Policy("a", ""))
	_, err = NewGate(GateOptions{Admissions: Admissions{Default: CostAware}, FilterBytes: 1})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = NewGate(GateOptions{Admissions: Admissions{Default: CostAware}, Prices: Prices{GPUs: -1}})
	require.ErrorIs(t, err, ErrInvalid)
}

// One key in two is asked for twice, tails never: cost-aware learns both, and goes by them.
func TestGateCostAware(t *testing.T) {
	prices := DefaultPrices()
	prices.DriveTB = 200 // a hit must be expected of two blocks in nine for the wear
	g := newGate(t, GateOptions{Admissions: Admissions{Default: CostAware}, Prices: prices})
	require.True(t, ask(g, CostAware, 1, 1<<40, true), "what is not known is stored")
	admitted := [2]int{}
	const n = 40_000
	for i := range uint64(n) {
		if ask(g, CostAware, 1, i, false) {
			admitted[0]++
		}
		if ask(g, CostAware, 1, n+i, true) {
			admitted[1]++
		}
		if old := i - 1000; i >= 1000 && old%2 == 0 {
			g.Hit(1, [][32]byte{testKey(old)})
		}
	}
	e := g.Expectation()
	require.InDelta(t, 0.5, e.Hits[0], 0.15)
	require.Less(t, e.Tail, 0.2)
	require.Less(t, e.Hits[1], 0.2, "nothing is asked for three times")
	require.Zero(t, e.Lost)
	require.Greater(t, admitted[0], n*9/10)
	require.Less(t, admitted[1], n/2)
	require.False(t, ask(g, CostAware, 1, 1<<41, true))
}

// Where most of what is evicted is asked for again, storing more costs hits.
func TestGateLearnsEvictions(t *testing.T) {
	g := newGate(t, GateOptions{Admissions: Admissions{Default: CostAware}})
	const room, reuse, n = 1000, 3000, 60_000
	var stored []uint64
	for i := range uint64(n) {
		for _, k := range []uint64{i, i - reuse} { // every block is used twice, when it is gone
			if k < n && ask(g, CostAware, 1, k, false) {
				stored = append(stored, k)
			}
		}
		for len(stored) > room {
			key := testKey(stored[0])
			g.Evicted(1, &key)
			stored = stored[1:]
		}
	}
	e := g.Expectation()
	require.Greater(t, e.Lost, 0.1)
	// The load changes: nothing is evicted, and every block is used. Losses are forgotten.
	for i := range uint64(4 * n) {
		ask(g, CostAware, 1, 1<<50+i, false)
		g.Hit(1, [][32]byte{testKey(1<<50 + i)})
	}
	require.Less(t, g.Expectation().Lost, e.Lost/2)
	require.Greater(t, g.Expectation().Hits[0], e.Hits[0])
	require.True(t, ask(g, CostAware, 1, 1<<51, false))
}

// Expectations stay within bounds and grow with what was seen, whatever comes.
func TestEstimateBounds(t *testing.T) {
	e, err := NewEstimate()
	require.NoError(t, err)
	defer e.Close()
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range 300_000 {
		hash := rng.Uint64() >> sampleBits
		if rng.IntN(2) == 0 {
			hash = uint64(rng.IntN(1000)) << 20
		}
		switch rng.IntN(4) {
		case 0:
			e.Hit(hash)
		case 1:
			e.Evicted(hash)
		default:
			e.Asked(hash, Class(rng.IntN(classes)))
			e.Stored(hash)
		}
		if i%1000 != 0 {
			continue
		}
		for c := range Class(classes) {
			require.GreaterOrEqual(t, e.Hits(c), 0.0)
			require.LessOrEqual(t, e.Hits(c), againMax/(1-againMax)+1e-9)
			require.LessOrEqual(t, e.again[c], e.seen[c]+forgetAfter)
			before := e.Hits(c)
			e.again[c]++
			require.GreaterOrEqual(t, e.Hits(c), before)
			e.again[c]--
		}
		require.GreaterOrEqual(t, e.Lost(), 0.0)
		require.LessOrEqual(t, e.Lost(), 1.0)
	}
}

// Cost-aware is monotone in everything that it weighs.
func TestPaysMonotone(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	yes := 0
	for range 20_000 {
		p := DefaultPrices()
		p.GPUHour, p.DriveTB = rng.Float64()*10, rng.Float64()*2000
		hits, lost := rng.Float64()*2, rng.Float64()
		tokens, bytes := uint32(1+rng.IntN(4096)), 1+rng.Uint64N(256<<20)
		if !p.Pays(hits, lost, tokens, bytes) {
			require.False(t, p.Pays(hits/2, lost, tokens, bytes))
			require.False(t, p.Pays(hits, lost+0.1, tokens, bytes))
			require.False(t, p.Pays(hits, lost, tokens, bytes*2))
			dear := p
			dear.DriveTB *= 2
			require.False(t, dear.Pays(hits, lost, tokens, bytes))
			continue
		}
		yes++
		require.True(t, p.Pays(hits*2, lost, tokens, bytes))
		require.True(t, p.Pays(hits, lost, tokens*2, bytes))
		lasting := p
		lasting.DWPD *= 3
		require.True(t, lasting.Pays(hits, lost, tokens, bytes))
	}
	require.Greater(t, yes, 1000)
	p := DefaultPrices()
	p.DriveTB = 0
	require.False(t, p.Pays(0, 0, 512, 1), "nothing saved is not worth the trouble")
	require.True(t, p.Pays(1e-6, 0, 1, 1<<30), "wear that costs nothing")
}

func TestGateAllocatesNothing(t *testing.T) {
	g := newGate(t, GateOptions{Admissions: Admissions{Default: CostAware}})
	keys := make([][32]byte, 256)
	asks, admit := make([]Ask, len(keys)), make([]bool, len(keys))
	for i := range keys {
		keys[i] = testKey(uint64(i))
		asks[i] = Ask{Policy: Policy(i % 3), Key: &keys[i], Tokens: 512, Bytes: 1 << 20}
	}
	require.Zero(t, testing.AllocsPerRun(10, func() {
		g.Admit(asks, admit)
		g.Asked(asks, admit)
		g.Hit(1, keys)
		g.Evicted(1, &keys[0])
	}))
}

func BenchmarkGate(b *testing.B) {
	g, err := NewGate(GateOptions{Admissions: Admissions{Default: CostAware}})
	require.NoError(b, err)
	defer g.Close()
	keys := make([][32]byte, 4096)
	asks, admit := make([]Ask, len(keys)), make([]bool, len(keys))
	n := uint64(0)
	for b.Loop() {
		for i := range keys {
			keys[i] = testKey(n)
			n++
			asks[i] = Ask{Policy: CostAware, Key: &keys[i], Tokens: 512, Bytes: 1 << 20}
		}
		g.Admit(asks, admit)
		g.Asked(asks, admit)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/key")
}

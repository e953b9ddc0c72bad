package checksum

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// methods are those that this processor has.
func methods() []method {
	all := []method{generic}
	for m := avx2; m <= bestMethod(); m++ {
		all = append(all, m)
	}
	return all
}

func testSeed(r *rand.Rand) Seed {
	var s Seed
	binary.LittleEndian.PutUint64(s[:8], r.Uint64())
	binary.LittleEndian.PutUint64(s[8:], r.Uint64())
	return s
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b[:n:n]
}

// plain is docs/checksum.md spelled out, word by word, sharing nothing but mix and the constants with the package.
func plain(seed Seed, rank, object uint16, payload []byte) uint64 {
	le := binary.LittleEndian
	id := mix(uint64(rank) + uint64(object)<<16 + 0x9e3779b97f4a7c15)
	s0 := mix(mix(le.Uint64(seed[:8])^id) + uint64(len(payload)))
	s1 := mix(mix(le.Uint64(seed[8:])^s0) + 0x9e3779b97f4a7c15)
	padded := append([]byte(nil), payload...)
	for len(padded)%1024 != 0 {
		padded = append(padded, 0)
	}
	var total uint64
	for j := 0; j*1024 < len(padded); j++ {
		var acc [8]uint64
		for i := range 128 {
			word := le.Uint64(padded[j*1024+i*8:])
			x := word ^ BlockKeys()[i]
			acc[i%8] += uint64(uint32(x)) * (x >> 32)
			acc[i%8^1] += word
		}
		h := s0 + uint64(j+1)*0x9e3779b97f4a7c15
		for _, a := range acc {
			h = (h ^ a) * 0xbf58476d1ce4e5b9
			h ^= h >> 32
		}
		total += mix(h ^ s1)
	}
	return mix(total ^ s0)
}

func TestMethodsAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for round := range 400 {
		n := r.IntN(40 << 10)
		if round < 80 {
			n = round * 64
		}
		p := randomBytes(r, n+1)[r.IntN(2):][:n]
		seed, rank, object := testSeed(r), uint16(r.Uint32()), uint16(r.Uint32())
		want := plain(seed, rank, object, p)
		require.Equal(t, want, Sum(seed, rank, object, p))
		for _, m := range methods() {
			require.Equal(t, want, sum(m, seed, rank, object, p), "method %d, %d bytes", m, n)
		}
	}
}

func FuzzMethodsAgree(f *testing.F) {
	f.Add([]byte{}, uint16(0), uint16(0))
	f.Add(make([]byte, 1025), uint16(1), uint16(65535))
	f.Add(randomBytes(rand.New(rand.NewPCG(2, 2)), 20000), uint16(3), uint16(4))
	f.Fuzz(func(t *testing.T, p []byte, rank, object uint16) {
		want := plain(Seed{1, 2, 3}, rank, object, p)
		for _, m := range methods() {
			require.Equal(t, want, sum(m, Seed{1, 2, 3}, rank, object, p))
		}
	})
}

// TestGolden pins the format: constants, seeds, sums and a trailer. docs/checksum.md quotes some of them.
func TestGolden(t *testing.T) {
	var got strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&got, format+"\n", args...) }
	for _, i := range []int{0, 1, 2, 126, 127} {
		line("key %d %016x", i, keys[i])
	}
	for i, k := range seedKeys {
		line("seed key %d %016x", i, k)
	}
	var identity, key [32]byte
	for i := range identity {
		identity[i], key[i] = byte(i), byte(255-i)
	}
	pool := NewPoolSeed(identity, 7)
	line("pool seed %x", pool)
	line("seed of zeroes %x", PoolSeed{}.Seed(&[32]byte{}, 0, 0))
	seed := pool.Seed(&key, 0x0123456789abcdef, 42)
	line("seed %x", seed)
	for _, n := range []int{0, 1, 8, 63, 64, 1023, 1024, 1025, 2048, 16384, 65536, 66000, 2 << 20} {
		p := make([]byte, n)
		line("sum rank 1 object 2 zeroes %d %016x", n, Sum(seed, 1, 2, p))
		for i := range p {
			p[i] = byte(i*i>>3 + i)
		}
		line("sum rank 1 object 2 pattern %d %016x", n, Sum(seed, 1, 2, p))
	}
	trailer := make([]byte, TrailerBytes(3))
	PutTrailer(trailer, seed, 1, 9, []uint64{1, 2, 1 << 63})
	line("trailer %x", trailer)

	path := filepath.Join("testdata", "checksum.golden")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		require.NoError(t, os.WriteFile(path, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

// TestDocument: the page that a GPU kernel is written from quotes what this package computes.
func TestDocument(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "docs", "checksum.md"))
	require.NoError(t, err)
	golden, err := os.ReadFile(filepath.Join("testdata", "checksum.golden"))
	require.NoError(t, err)
	values := make(map[string]string)
	for _, line := range strings.Split(strings.TrimSpace(string(golden)), "\n") {
		cut := strings.LastIndexByte(line, ' ')
		values[line[:cut]] = line[cut+1:]
	}
	for _, name := range []string{
		"key 0", "key 127", "seed key 0", "pool seed", "seed", "sum rank 1 object 2 zeroes 0", "sum rank 1 object 2 zeroes 1",
		"sum rank 1 object 2 zeroes 1024", "sum rank 1 object 2 zeroes 1025", "sum rank 1 object 2 pattern 65536",
	} {
		require.NotEmpty(t, values[name], name)
		require.Contains(t, string(page), "`"+values[name]+"`", name)
	}
}

// payloads are contents that a weak sum would confuse: random, zero, all ones, one word again and again, sparse,
// counting.
func payloads(r *rand.Rand, n int) map[string][]byte {
	m := map[string][]byte{"random": randomBytes(r, n), "zero": make([]byte, n), "ones": make([]byte, n),
		"same word": make([]byte, n), "sparse": make([]byte, n), "counting": make([]byte, n)}
	for i := range n {
		m["ones"][i] = 0xff
		m["same word"][i] = byte(i%8) * 37
		if i%97 == 0 {
			m["sparse"][i] = byte(i)
		}
		if i%8 == 0 {
			m["counting"][i], m["counting"][min(i+1, n-1)] = byte(i/8), byte(i>>11)
		}
	}
	return m
}

func TestEveryBitFlip(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for name, p := range payloads(r, 3*BlockBytes+200) {
		seed := testSeed(r)
		want := Sum(seed, 0, 5, p)
		for bit := range len(p) * 8 {
			p[bit/8] ^= 1 << (bit % 8)
			require.NotEqual(t, want, Sum(seed, 0, 5, p), "%s, bit %d", name, bit)
			p[bit/8] ^= 1 << (bit % 8)
		}
	}
}

// TestSwaps exchanges pieces of many sizes: words, stripes, blocks and odd ones.
func TestSwaps(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	for name, p := range payloads(r, 8*BlockBytes) {
		seed := testSeed(r)
		want := Sum(seed, 2, 5, p)
		for _, piece := range []int{1, 4, 8, 16, 32, 64, 128, 512, 1024, 2048} {
			for range 200 {
				a, b := r.IntN(len(p)/piece)*piece, r.IntN(len(p)/piece)*piece
				if string(p[a:a+piece]) == string(p[b:b+piece]) {
					continue
				}
				swapped := append([]byte(nil), p...)
				copy(swapped[a:], p[b:b+piece])
				copy(swapped[b:], p[a:a+piece])
				require.NotEqual(t, want, Sum(seed, 2, 5, swapped), "%s, %d bytes at %d and %d", name, piece, a, b)
			}
		}
	}
}

// TestAllStripeSwaps exchanges each two stripes of a block, and each two words of a lane: the lanes see the same
// words.
func TestAllStripeSwaps(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for name, p := range payloads(r, BlockBytes) {
		if name == "zero" || name == "ones" || name == "same word" {
			continue // all pieces are alike
		}
		seed := testSeed(r)
		want := Sum(seed, 0, 0, p)
		for _, piece := range []int{8, 64} {
			for a := 0; a < BlockBytes; a += piece {
				for b := a % stripeBytes; b < a; b += stripeBytes {
					if string(p[a:a+piece]) == string(p[b:b+piece]) {
						continue
					}
					swapped := append([]byte(nil), p...)
					copy(swapped[a:], p[b:b+piece])
					copy(swapped[b:], p[a:a+piece])
					require.NotEqual(t, want, Sum(seed, 0, 0, swapped), "%s, %d bytes at %d and %d", name, piece, a, b)
				}
			}
		}
	}
}

// TestBinding: the same bytes under another seed, rank, object or length have another sum, zeroes above all: that
// is how a lost write shows.
func TestBinding(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	for name, p := range payloads(r, 4096) {
		seen := make(map[uint64]string)
		add := func(what string, s uint64) {
			t.Helper()
			require.Empty(t, seen[s], "%s: %s", name, what)
			seen[s] = what
		}
		seed := testSeed(r)
		add("itself", Sum(seed, 0, 0, p))
		for bit := range 128 {
			other := seed
			other[bit/8] ^= 1 << (bit % 8)
			add(fmt.Sprint("seed bit ", bit), Sum(other, 0, 0, p))
		}
		for i := uint16(1); i != 0 && i < 300; i++ {
			add(fmt.Sprint("rank ", i), Sum(seed, i, 0, p))
			add(fmt.Sprint("object ", i), Sum(seed, 0, i, p))
		}
		for bit := range 16 {
			if i := uint16(1) << bit; i >= 512 {
				add(fmt.Sprint("rank ", i), Sum(seed, i, 0, p))
				add(fmt.Sprint("object ", i), Sum(seed, 0, i, p))
			}
		}
		for n := range 1500 {
			add(fmt.Sprint("length ", n), Sum(seed, 0, 0, p[:n]))
		}
		add("longer", Sum(seed, 0, 0, append(p[:len(p):len(p)], 0)))
	}
}

// TestSeedBinding: whatever goes into a seed changes about half of its bits.
func TestSeedBinding(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	flipped, trials := 0, 0
	seen := make(map[Seed]bool)
	for range 50 {
		var key, identity [32]byte
		copy(key[:], randomBytes(r, 32))
		copy(identity[:], randomBytes(r, 32))
		pool := NewPoolSeed(identity, 1)
		require.NotEqual(t, pool, NewPoolSeed(identity, 2))
		other := identity
		other[r.IntN(32)] ^= 1
		require.NotEqual(t, pool, NewPoolSeed(other, 1))
		nonce, generation := r.Uint64(), r.Uint64N(1000)
		want := pool.Seed(&key, nonce, generation)
		compare := func(s Seed) {
			t.Helper()
			require.False(t, seen[s])
			seen[s] = true
			trials += 128
			for i := range s {
				flipped += bits.OnesCount8(s[i] ^ want[i])
			}
		}
		for bit := range 128 {
			p := pool
			p[bit/8] ^= 1 << (bit % 8)
			compare(p.Seed(&key, nonce, generation))
		}
		for bit := range 256 {
			k := key
			k[bit/8] ^= 1 << (bit % 8)
			compare(pool.Seed(&k, nonce, generation))
		}
		for bit := range 64 {
			compare(pool.Seed(&key, nonce^1<<bit, generation))
			compare(pool.Seed(&key, nonce, generation^1<<bit))
		}
	}
	require.InDelta(t, 0.5, float64(flipped)/float64(trials), 0.005)
}

// TestAvalanche: each bit of the payload changes each bit of the sum about half of the time.
func TestAvalanche(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	const trials = 4000
	var counts [64]int
	for range trials {
		p := randomBytes(r, 1+r.IntN(3000))
		seed := testSeed(r)
		before := Sum(seed, 0, 0, p)
		bit := r.IntN(len(p) * 8)
		p[bit/8] ^= 1 << (bit % 8)
		for change := before ^ Sum(seed, 0, 0, p); change != 0; change &= change - 1 {
			counts[bits.TrailingZeros64(change)]++
		}
	}
	for bit, n := range counts {
		require.InDelta(t, 0.5, float64(n)/trials, 0.05, "bit %d", bit)
	}
}

func TestTrailer(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	for _, n := range []int{0, 1, 2, 61, 200} {
		sums, got := make([]uint64, n), make([]uint64, n)
		for i := range sums {
			sums[i] = r.Uint64()
		}
		seed := testSeed(r)
		b := make([]byte, 4096)
		for i := range b {
			b[i] = 0xee // what a recycled buffer holds
		}
		PutTrailer(b, seed, 3, 77, sums)
		require.True(t, ParseTrailer(b, seed, 3, 77, got))
		require.Equal(t, sums, got)
		length := TrailerBytes(n)
		require.EqualValues(t, 0xee, b[length])

		refuse := func(b []byte, seed Seed, rank, object uint16, n int) {
			t.Helper()
			got := make([]uint64, n)
			require.False(t, ParseTrailer(b, seed, rank, object, got))
			require.Equal(t, make([]uint64, n), got)
		}
		refuse(b, Seed{}, 3, 77, n)
		refuse(b, seed, 2, 77, n)
		refuse(b, seed, 3, 78, n)
		refuse(b, seed, 3, 77, n+1)
		refuse(make([]byte, length), seed, 3, 77, n)
		for cut := range length {
			refuse(b[:cut], seed, 3, 77, n)
		}
		for bit := range length * 8 {
			b[bit/8] ^= 1 << (bit % 8)
			refuse(b, seed, 3, 77, n)
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

func FuzzParseTrailer(f *testing.F) {
	good := make([]byte, TrailerBytes(2))
	PutTrailer(good, Seed{9}, 1, 2, []uint64{5, 6})
	f.Add(good, 2)
	f.Add([]byte{}, 0)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		sums := make([]uint64, max(0, n)%1000)
		if ParseTrailer(b, Seed{9}, 1, 2, sums) {
			again := make([]byte, TrailerBytes(len(sums)))
			PutTrailer(again, Seed{9}, 1, 2, sums)
			require.Equal(t, again, b[:len(again)])
		}
	})
}

func TestNoAllocation(t *testing.T) {
	p, trailer, sums := make([]byte, 70000), make([]byte, 4096), make([]uint64, 32)
	var key [32]byte
	require.Zero(t, testing.AllocsPerRun(20, func() {
		seed := PoolSeed{1}.Seed(&key, 2, 3)
		sums[0] = Sum(seed, 0, 0, p)
		PutTrailer(trailer, seed, 0, 32, sums)
		if !ParseTrailer(trailer, seed, 0, 32, sums) {
			t.Error("own trailer refused")
		}
	}))
}

func BenchmarkSum(b *testing.B) {
	names := []string{"generic", "avx2", "avx512"}
	for _, m := range methods() {
		for _, n := range []int{4 << 10, 64 << 10, 2 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", names[m], n>>10), func(b *testing.B) {
				p := randomBytes(rand.New(rand.NewPCG(1, 2)), n)
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					sum(m, Seed{}, 0, 0, p)
				}
			})
		}
	}
}

func BenchmarkSeed(b *testing.B) {
	var key [32]byte
	var sink byte
	b.ReportAllocs()
	for i := uint64(0); b.Loop(); i++ {
		s := PoolSeed{1}.Seed(&key, 1, i)
		sink ^= s[0]
	}
}

func BenchmarkTrailer(b *testing.B) {
	sums, t := make([]uint64, 64), make([]byte, 4096)
	for b.Loop() {
		PutTrailer(t, Seed{}, 0, 64, sums)
		ParseTrailer(t, Seed{}, 0, 64, sums)
	}
}

package emu

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// streamed is long enough to be streamed.
const streamed = 8192

// streamLengths are those around every boundary of stream, and some at random.
func streamLengths(r *rand.Rand) []int {
	lengths := []int{0, 1, 63, 64, 65, 4095, 4096, 4097, 4096 + 63, 4096 + 64, 4096 + 127, 4096 + 128, 4096 + 129,
		8191, 8192, 8193, 65535, 65536, 65537}
	for range 40 {
		lengths = append(lengths, r.IntN(20000))
	}
	return lengths
}

// Every length and alignment of either side ends as with copy, and nothing around it changes.
func TestStreamIsCopy(t *testing.T) {
	const margin, longest = 256, 65537
	r := rand.New(rand.NewPCG(1, 2))
	src, got := make([]byte, longest+2*margin), make([]byte, longest+2*margin)
	want := make([]byte, len(got))
	fill(src, 3)
	for _, n := range streamLengths(r) {
		for range 24 {
			to, from := r.IntN(margin), r.IntN(margin)
			used := to + n + margin
			fill(got[:used], 5)
			copy(want, got[:used])
			copy(want[to:to+n], src[from:])
			stream(got[to:to+n], src[from:from+n])
			if !bytes.Equal(want[:used], got[:used]) {
				t.Fatalf("%d bytes from offset %d to offset %d", n, from, to)
			}
		}
	}
}

// Pieces that end where memory does are neither read nor written beyond: the page after either buffer faults.
func TestStreamToTheEndOfMemory(t *testing.T) {
	const pages = 5 * PageBytes
	fenced := func() []byte {
		b, err := unix.Mmap(-1, 0, pages+PageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Munmap(b) })
		require.NoError(t, unix.Mprotect(b[pages:], unix.PROT_NONE))
		return b[:pages:pages]
	}
	src, dst := fenced(), fenced()
	fill(src, 7)
	for n := pages; n >= pages-300; n-- {
		clear(dst)
		stream(dst[pages-n:], src[pages-n:])
		require.True(t, bytes.Equal(src[pages-n:], dst[pages-n:]), "%d bytes", n)
	}
}

func TestStreamToShorter(t *testing.T) {
	src, dst := make([]byte, 3*streamed), make([]byte, 2*streamed)
	fill(src, 9)
	stream(dst[:streamed+1], src)
	require.Equal(t, src[:streamed+1], dst[:streamed+1])
	require.Equal(t, make([]byte, streamed-1), dst[streamed+1:], "nothing beyond the length, whatever the capacity")
	clear(dst)
	stream(dst, src[:streamed+1])
	require.Equal(t, src[:streamed+1], dst[:streamed+1])
	require.Equal(t, make([]byte, streamed-1), dst[streamed+1:])
}

// Blocks from a small buffer to random places of a drive that no cache holds, by copy and by stream in turns: a shared
// machine's speed changes from one second to the next, the ratio does not.
func BenchmarkStream(b *testing.B) {
	const span, small, turn = 1 << 30, 8 << 20, 4 << 20
	store, cells := memoryDrive(b, span).Bytes(), mmapTest(b, small)
	_ = unix.Madvise(store, unix.MADV_HUGEPAGE)
	fill(cells, 1)
	for i := 0; i < span; i += PageBytes {
		store[i] = 1
	}
	for _, size := range []int{4 << 10, 32 << 10, 64 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("%dK", size>>10), func(b *testing.B) {
			ways := []func(dst, src []byte){func(dst, src []byte) { copy(dst, src) }, stream}
			r := rand.New(rand.NewPCG(1, 1))
			var speeds [2][]float64
			var ratios []float64
			for range b.N {
				for i, way := range ways {
					start := time.Now()
					for k := 0; k < turn; k += size {
						way(store[r.IntN(span/size)*size:][:size], cells[k:k+size])
					}
					speeds[i] = append(speeds[i], turn/1e9/time.Since(start).Seconds())
				}
				n := len(speeds[0])
				ratios = append(ratios, speeds[1][n-1]/speeds[0][n-1])
			}
			for unit, x := range map[string][]float64{
				"copy-GB/s": speeds[0], "stream-GB/s": speeds[1], "stream/copy": ratios,
			} {
				slices.Sort(x)
				b.ReportMetric(x[len(x)/2], unit)
			}
		})
	}
}

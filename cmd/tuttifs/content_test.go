package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestContent(t *testing.T) {
	key, other := [32]byte{1}, [32]byte{31: 1}
	for _, n := range []int{0, 1, 7, 8, 9, 31, 32, 33, 63, 4096, 4099} {
		b := make([]byte, n)
		fillContent(b, &key, 3)
		require.True(t, checkContent(b, &key, 3), n)
		for i := range b {
			b[i] ^= 0x10
			require.False(t, checkContent(b, &key, 3), "%d bytes, byte %d flipped", n, i)
			b[i] ^= 0x10
		}
		if n >= 8 {
			require.False(t, checkContent(b, &key, 4), n)
			require.False(t, checkContent(b, &other, 3), n)
		}
	}
}

func TestContentWordsDiffer(t *testing.T) {
	seen := map[uint64]string{}
	for k := range 64 {
		for object := range uint16(64) {
			s := contentSeed(&[32]byte{byte(k)}, object)
			for range 16 {
				s += contentStep
				w := contentWord(s)
				at := fmt.Sprintf("key %d object %d", k, object)
				require.Empty(t, seen[w], at)
				seen[w] = at
			}
		}
	}
}

func BenchmarkCheckContent(b *testing.B) {
	buf, key := make([]byte, 64<<10), [32]byte{9}
	fillContent(buf, &key, 0)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		if !checkContent(buf, &key, 0) {
			b.Fatal("content differs")
		}
	}
}

func BenchmarkFillContent(b *testing.B) {
	buf, key := make([]byte, 64<<10), [32]byte{9}
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		fillContent(buf, &key, 0)
	}
}

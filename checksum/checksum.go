// Package checksum is the payload checksum of format version 1: seeds, object sums and trailers. docs/checksum.md
// defines every byte and constant, for whoever writes it again for a GPU.
//
// The sum of an object is a sum of independent hashes of its 1-KiB blocks, so that any thread can do any block in
// any order. It finds damage, exchanged and stale bytes. It is no defence against someone who can write to the
// drives.
package checksum

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
)

// The shape of a block: 16 stripes of 8 words, a lane being the words of equal place in their stripes.
const (
	BlockBytes    = 1024
	lanes         = 8
	stripeBytes   = 64
	blockWords    = BlockBytes / 8
	batchBlocks   = 16 // blocks whose lanes are accumulated before they are folded
	batchLanesLen = batchBlocks * lanes
)

// The constants of splitmix64.
const (
	golden = 0x9e3779b97f4a7c15
	mulA   = 0xbf58476d1ce4e5b9
	mulB   = 0x94d049bb133111eb
)

// keysState is where the splitmix64 stream of constants starts: "tuttifs1" as a little-endian word.
const keysState = 0x3173666974747574

// keys are the words that a block's words are combined with, by their place in the block.
var keys = func() (k [blockWords]uint64) {
	copy(k[:], stream(blockWords))
	return k
}()

// seedKeys follow keys in the stream.
var seedKeys = func() (k [8]uint64) {
	copy(k[:], stream(blockWords + len(k))[blockWords:])
	return k
}()

// stream is the first n outputs of splitmix64 from keysState.
func stream(n int) []uint64 {
	out := make([]uint64, n)
	state := uint64(keysState)
	for i := range out {
		state += golden
		out[i] = mix(state)
	}
	return out
}

// mix is the finaliser of splitmix64, a permutation of the 64-bit words.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * mulA
	z = (z ^ z>>27) * mulB
	return z ^ z>>31
}

// BlockKeys are the 128 key words of a block, for code that runs elsewhere.
func BlockKeys() [blockWords]uint64 { return keys }

// Seed binds a slot's bytes to pool identity, tenant, key and generation.
type Seed [16]byte

// PoolSeed is the part of a seed that all files of one pool and tenant share.
type PoolSeed [16]byte

// poolSeedDomain keeps these hashes apart from all others over the same bytes.
const poolSeedDomain = "tuttifs pool seed 1\n"

// NewPoolSeed hashes the pool's identity digest and the tenant (SHA-256, once per pool and tenant).
func NewPoolSeed(identity [32]byte, tenant uint32) PoolSeed {
	b := make([]byte, 0, len(poolSeedDomain)+len(identity)+4)
	b = append(b, poolSeedDomain...)
	b = append(b, identity[:]...)
	b = binary.LittleEndian.AppendUint32(b, tenant)
	h := sha256.Sum256(b)
	return PoolSeed(h[:16])
}

// Seed mixes in one file's key, mount nonce and generation. A few nanoseconds: thousands are made per pin.
func (p PoolSeed) Seed(key *[32]byte, nonce, generation uint64) Seed {
	p0, p1 := binary.LittleEndian.Uint64(p[:8]), binary.LittleEndian.Uint64(p[8:])
	k0, k1 := binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:16])
	k2, k3 := binary.LittleEndian.Uint64(key[16:24]), binary.LittleEndian.Uint64(key[24:])
	c := &seedKeys
	a := foldProduct(k0^p0^c[0], k1^p1^c[1]) + foldProduct(k2^nonce^c[2], k3^generation^c[3])
	b := foldProduct(k0^p1^c[4], k2^generation^c[5]) + foldProduct(k1^nonce^c[6], k3^p0^c[7])
	var s Seed
	binary.LittleEndian.PutUint64(s[:8], mix(a+p0))
	binary.LittleEndian.PutUint64(s[8:], mix(b+p1))
	return s
}

// foldProduct is both halves of the 128-bit product, in one word.
func foldProduct(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

// objectSeed binds a seed to one object and its length.
func objectSeed(seed Seed, rank, object uint16, length uint64) (s0, s1 uint64) {
	a, b := binary.LittleEndian.Uint64(seed[:8]), binary.LittleEndian.Uint64(seed[8:])
	id := mix((uint64(rank) | uint64(object)<<16) + golden)
	s0 = mix(mix(a^id) + length)
	s1 = mix(mix(b^s0) + golden)
	return s0, s1
}

// Sum is the 64-bit checksum of one object's payload (its length in bytes included).
func Sum(seed Seed, rank, object uint16, payload []byte) uint64 {
	return sum(bestMethod(), seed, rank, object, payload)
}

// method is one way to accumulate. All ways give the same lanes; which there are depends on the processor.
type method uint8

const (
	generic method = iota
	avx2
	avx512
)

// sum is Sum by the method of choice.
func sum(m method, seed Seed, rank, object uint16, payload []byte) uint64 {
	s0, s1 := objectSeed(seed, rank, object, uint64(len(payload)))
	var acc [batchLanesLen]uint64
	start, total := s0, uint64(0)
	for len(payload) >= BlockBytes {
		n := min(len(payload)/BlockBytes, batchBlocks)
		m.accumulate(&acc, payload[:n*BlockBytes])
		for block := range n {
			start += golden
			total += fold(start, s1, (*[lanes]uint64)(acc[block*lanes:]))
		}
		payload = payload[n*BlockBytes:]
	}
	if len(payload) > 0 {
		var last [BlockBytes]byte
		copy(last[:], payload)
		m.accumulate(&acc, last[:])
		total += fold(start+golden, s1, (*[lanes]uint64)(acc[:]))
	}
	return mix(total ^ s0)
}

// fold hashes the lanes of one block. start is s0 + (block number + 1) * golden. Every step is a permutation of h,
// so a change of one lane always changes the result.
func fold(start, s1 uint64, acc *[lanes]uint64) uint64 {
	h := start
	for _, lane := range acc {
		h = (h ^ lane) * mulA
		h ^= h >> 32
	}
	return mix(h ^ s1)
}

// accumulateGeneric fills the lanes of whole blocks, at most batchBlocks of them: len(p) is their bytes. It is the
// definition: word w of lane l at place i of the block adds lo32(w ^ keys[i]) * hi32(w ^ keys[i]) to lane l, and
// itself to lane l ^ 1, so that a factor of zero hides nothing.
func accumulateGeneric(acc *[batchLanesLen]uint64, p []byte) {
	for block := 0; len(p) >= BlockBytes; block++ {
		out := (*[lanes]uint64)(acc[block*lanes:])
		for lane := 0; lane < lanes; lane += 2 {
			var even, odd uint64
			for at := lane; at < blockWords; at += lanes {
				w := (*[16]byte)(p[at*8:])
				v0, v1 := binary.LittleEndian.Uint64(w[:8]), binary.LittleEndian.Uint64(w[8:])
				x0, x1 := v0^keys[at], v1^keys[at+1]
				even += (x0&0xffffffff)*(x0>>32) + v1
				odd += (x1&0xffffffff)*(x1>>32) + v0
			}
			out[lane], out[lane+1] = even, odd
		}
		p = p[BlockBytes:]
	}
}

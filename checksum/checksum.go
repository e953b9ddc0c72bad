// Package checksum is the payload checksum of format version 1: seeds, object sums and trailers.
package checksum

// Seed binds a slot's bytes to pool identity, tenant, key and generation.
type Seed [16]byte

// PoolSeed is the part of a seed that all files of one pool and tenant share.
type PoolSeed [16]byte

// NewPoolSeed hashes the pool's identity digest and the tenant (SHA-256, once per pool and tenant).
func NewPoolSeed(identity [32]byte, tenant uint32) PoolSeed { panic("stub") }

// Seed mixes in one file's key, mount nonce and generation. A few nanoseconds: thousands are made per pin.
func (p PoolSeed) Seed(key *[32]byte, nonce, generation uint64) Seed { panic("stub") }

// Sum is the 64-bit checksum of one object's payload (its length in bytes included).
func Sum(seed Seed, rank, object uint16, payload []byte) uint64 { panic("stub") }

// TrailerBytes is the payload length of the trailer of a rank with n objects.
func TrailerBytes(n int) int { panic("stub") }

// PutTrailer encodes the sums of a rank's objects, in the order of their object numbers, into b[:TrailerBytes(len(sums))].
// object is the trailer's own object number.
func PutTrailer(b []byte, seed Seed, rank, object uint16, sums []uint64) { panic("stub") }

// ParseTrailer verifies a trailer and fills sums; it reports false on any damage.
func ParseTrailer(b []byte, seed Seed, rank, object uint16, sums []uint64) bool { panic("stub") }

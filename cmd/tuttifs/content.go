package main

import (
	"encoding/binary"
	"math/bits"
)

// The content of a replayed object is a counter mix seeded from its key and object number, so that swapped, stale and
// foreign bytes differ from what is expected in every word, and so that it can be made and compared at memory speed.

const (
	contentStep = 0x9e3779b97f4a7c15 // odd: the counter visits every value
	contentMix  = 0xd6e8feb86659fd93
)

func contentSeed(key *[32]byte, object uint16) uint64 {
	s := uint64(object+1) * contentMix
	for i := 0; i < len(key); i += 8 {
		hi, lo := bits.Mul64(s^binary.LittleEndian.Uint64(key[i:]), contentStep)
		s = hi ^ lo ^ s<<7
	}
	return s
}

// contentWord mixes one counter value.
func contentWord(counter uint64) uint64 {
	hi, lo := bits.Mul64(counter, counter^contentMix)
	return hi ^ lo
}

// fillContent writes an object's content.
func fillContent(b []byte, key *[32]byte, object uint16) {
	s := contentSeed(key, object)
	for len(b) >= 8 {
		s += contentStep
		binary.LittleEndian.PutUint64(b, contentWord(s))
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], contentWord(s+contentStep))
		copy(b, last[:])
	}
}

// checkContent reports whether every byte is as fillContent wrote it.
func checkContent(b []byte, key *[32]byte, object uint16) bool {
	s, diff := contentSeed(key, object), uint64(0)
	for len(b) >= 32 {
		a := s + contentStep
		diff |= contentWord(a) ^ binary.LittleEndian.Uint64(b)
		a += contentStep
		diff |= contentWord(a) ^ binary.LittleEndian.Uint64(b[8:])
		a += contentStep
		diff |= contentWord(a) ^ binary.LittleEndian.Uint64(b[16:])
		a += contentStep
		diff |= contentWord(a) ^ binary.LittleEndian.Uint64(b[24:])
		s, b = a, b[32:]
	}
	for len(b) >= 8 {
		s += contentStep
		diff |= contentWord(s) ^ binary.LittleEndian.Uint64(b)
		b = b[8:]
	}
	var want, have [8]byte
	binary.LittleEndian.PutUint64(want[:], contentWord(s+contentStep))
	copy(have[:], b)
	for i := range b {
		diff |= uint64(want[i] ^ have[i])
	}
	return diff == 0
}

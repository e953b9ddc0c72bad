package checksum

import "encoding/binary"

// A trailer, little-endian:
//
//	offset  bytes  field
//	     0      4  magic "TTRL"
//	     4      2  version, 1
//	     6      2  rank
//	     8      2  the trailer's own object number
//	    10      2  zero
//	    12      4  n, the rank's objects
//	    16      8  zero
//	    24    8 n  their sums, in the order of their object numbers
//	24 + 8n      8  the Sum of all that comes before, with the trailer's rank and object number
const (
	trailerMagic       = 0x4c525454 // "TTRL"
	trailerVersion     = 1
	trailerHeaderBytes = 24
	sumBytes           = 8
)

// TrailerBytes is the payload length of the trailer of a rank with n objects.
func TrailerBytes(n int) int { return trailerHeaderBytes + n*sumBytes + sumBytes }

// PutTrailer encodes the sums of a rank's objects, in the order of their object numbers, into
// b[:TrailerBytes(len(sums))]. object is the trailer's own object number.
func PutTrailer(b []byte, seed Seed, rank, object uint16, sums []uint64) {
	b = b[:TrailerBytes(len(sums))]
	putHeader((*[trailerHeaderBytes]byte)(b), rank, object, uint32(len(sums)))
	for i, s := range sums {
		binary.LittleEndian.PutUint64(b[trailerHeaderBytes+i*sumBytes:], s)
	}
	body := b[:len(b)-sumBytes]
	binary.LittleEndian.PutUint64(b[len(body):], Sum(seed, rank, object, body))
}

func putHeader(h *[trailerHeaderBytes]byte, rank, object uint16, n uint32) {
	binary.LittleEndian.PutUint32(h[0:], trailerMagic)
	binary.LittleEndian.PutUint16(h[4:], trailerVersion)
	binary.LittleEndian.PutUint16(h[6:], rank)
	binary.LittleEndian.PutUint16(h[8:], object)
	binary.LittleEndian.PutUint16(h[10:], 0)
	binary.LittleEndian.PutUint32(h[12:], n)
	binary.LittleEndian.PutUint64(h[16:], 0)
}

// ParseTrailer verifies a trailer and fills sums; it reports false on any damage, and then leaves sums alone. Bytes
// of b behind TrailerBytes(len(sums)) are not looked at.
func ParseTrailer(b []byte, seed Seed, rank, object uint16, sums []uint64) bool {
	length := TrailerBytes(len(sums))
	if len(b) < length {
		return false
	}
	var want [trailerHeaderBytes]byte
	putHeader(&want, rank, object, uint32(len(sums)))
	body := b[:length-sumBytes]
	if [trailerHeaderBytes]byte(body) != want {
		return false
	}
	if binary.LittleEndian.Uint64(b[len(body):]) != Sum(seed, rank, object, body) {
		return false
	}
	for i := range sums {
		sums[i] = binary.LittleEndian.Uint64(b[trailerHeaderBytes+i*sumBytes:])
	}
	return true
}

package ondisk

import "encoding/binary"

// PayloadBytes is what a catalog or journal block carries of its stream.
const PayloadBytes = BlockBytes - HeaderBytes

// StreamBlocks is the number of blocks that n bytes of a stream need.
func StreamBlocks(n int) int { return (n + PayloadBytes - 1) / PayloadBytes }

// SealCatalog fills block i of a catalog area that begins at unit first. payload is at most PayloadBytes.
func SealCatalog(b []byte, first uint64, i uint32, tag, sequence uint64, payload []byte) {
	b = b[:BlockBytes]
	clear(b[copy(b[HeaderBytes:], payload)+HeaderBytes:])
	clear(b[32:HeaderBytes])
	le := binary.LittleEndian
	le.PutUint32(b[32:], i)
	le.PutUint32(b[36:], uint32(len(payload)))
	seal(b, Header{KindCatalog, Locate(RoleDrive, first+uint64(i)), tag, sequence})
}

// OpenCatalog returns what block i of a catalog area carries.
func OpenCatalog(b []byte, first uint64, i uint32, tag, sequence uint64) ([]byte, error) {
	h, err := open(b, KindCatalog, Locate(RoleDrive, first+uint64(i)), tag)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	n := le.Uint32(b[36:])
	switch {
	case h.Sequence != sequence || le.Uint32(b[32:]) != i:
		return nil, ErrAddress
	case n > PayloadBytes || !allZero(b[40:HeaderBytes]) || !allZero(b[HeaderBytes+n:]):
		return nil, fieldError("catalog: %d bytes or reserved bytes", n)
	}
	return b[HeaderBytes : HeaderBytes+n], nil
}

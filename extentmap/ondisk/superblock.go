package ondisk

import "encoding/binary"

// SuperblockSlots alternate: checkpoint n writes slot n mod 2.
const SuperblockSlots = 2

// Superblock names the state that the last checkpoint made durable, and where the journal goes on from it. Every
// metadata drive holds the same copy.
type Superblock struct {
	Unit          uint64 // self address
	Sequence      uint64 // of the checkpoint
	Volume        [16]byte
	Epoch         uint64
	Nonce         uint64 // of the epoch
	Tail          uint64 // sequence of the first journal block that the checkpoint does not contain
	Chain         uint32 // that block's Chain
	CatalogArea   uint32 // 0 or 1
	CatalogBlocks uint32
	CatalogCRC    uint32 // of the stream
	CatalogBytes  uint64 // length of the stream
	CatalogSeq    uint64 // sequence of the catalog's blocks
	NextCommit    uint64 // a commit sequence higher than any in the record tables
	Time          int64  // Unix nanoseconds
	JournalNonce  uint64 // of the epoch in which the mount began; journal blocks after the tail carry it
}

// Encode fills a block.
func (s *Superblock) Encode(b []byte) {
	b = b[:BlockBytes]
	clear(b)
	le := binary.LittleEndian
	copy(b[64:], s.Volume[:])
	le.PutUint64(b[80:], s.Epoch)
	le.PutUint64(b[88:], s.Nonce)
	le.PutUint64(b[96:], s.Tail)
	le.PutUint32(b[104:], s.Chain)
	le.PutUint32(b[108:], s.CatalogArea)
	le.PutUint32(b[112:], s.CatalogBlocks)
	le.PutUint32(b[116:], s.CatalogCRC)
	le.PutUint64(b[120:], s.CatalogBytes)
	le.PutUint64(b[128:], s.CatalogSeq)
	le.PutUint64(b[136:], s.NextCommit)
	le.PutUint64(b[144:], uint64(s.Time))
	le.PutUint64(b[152:], s.JournalNonce)
	seal(b, Header{KindSuperblock, Locate(RoleDrive, s.Unit), VolumeTag(s.Volume), s.Sequence})
}

// DecodeSuperblock reads the superblock that was found at a unit of a drive of a volume.
func DecodeSuperblock(b []byte, unit uint64, volume [16]byte) (*Superblock, error) {
	h, err := open(b, KindSuperblock, Locate(RoleDrive, unit), VolumeTag(volume))
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	s := &Superblock{
		Unit:          unit,
		Sequence:      h.Sequence,
		Volume:        [16]byte(b[64:]),
		Epoch:         le.Uint64(b[80:]),
		Nonce:         le.Uint64(b[88:]),
		Tail:          le.Uint64(b[96:]),
		Chain:         le.Uint32(b[104:]),
		CatalogArea:   le.Uint32(b[108:]),
		CatalogBlocks: le.Uint32(b[112:]),
		CatalogCRC:    le.Uint32(b[116:]),
		CatalogBytes:  le.Uint64(b[120:]),
		CatalogSeq:    le.Uint64(b[128:]),
		NextCommit:    le.Uint64(b[136:]),
		Time:          int64(le.Uint64(b[144:])),
		JournalNonce:  le.Uint64(b[152:]),
	}
	switch {
	case s.Volume != volume:
		return nil, ErrAddress
	case !allZero(b[32:64]) || !allZero(b[160:]):
		return nil, fieldError("superblock: reserved bytes")
	case s.CatalogArea > 1:
		return nil, fieldError("superblock: catalog area %d", s.CatalogArea)
	case s.CatalogBytes > uint64(s.CatalogBlocks)*PayloadBytes:
		return nil, fieldError("superblock: catalog of %d bytes in %d blocks", s.CatalogBytes, s.CatalogBlocks)
	}
	return s, nil
}

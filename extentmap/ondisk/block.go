package ondisk

import (
	"encoding/binary"
	"hash/crc32"
)

// HeaderBytes is the length of the common header of all metadata blocks but the label.
const HeaderBytes = 64

// Kind is the magic number of a block.
type Kind uint32

// The kinds of blocks with the common header; as bytes on the drive they read TSUP, TJRN, TCAT, TREC.
const (
	KindSuperblock Kind = 'T' | 'S'<<8 | 'U'<<16 | 'P'<<24
	KindJournal    Kind = 'T' | 'J'<<8 | 'R'<<16 | 'N'<<24
	KindCatalog    Kind = 'T' | 'C'<<8 | 'A'<<16 | 'T'<<24
	KindTable      Kind = 'T' | 'R'<<8 | 'E'<<16 | 'C'<<24
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC is the CRC32C of b.
func CRC(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// Header is the part that all metadata blocks but the label share.
type Header struct {
	Kind     Kind
	Address  Locator // where the block lies; drive RoleDrive for blocks of the metadata role
	Tag      uint64  // VolumeTag of the volume
	Sequence uint64  // of the checkpoint, or of the journal block
}

// VolumeTag folds a volume UUID to the 8 bytes that every block carries, so that blocks that an earlier volume left
// behind at the same address are never believed.
func VolumeTag(uuid [16]byte) uint64 {
	return binary.LittleEndian.Uint64(uuid[:8]) ^ binary.LittleEndian.Uint64(uuid[8:])
}

// seal writes the common header and, last, the checksum.
func seal(b []byte, h Header) {
	le := binary.LittleEndian
	le.PutUint32(b[4:], uint32(h.Kind))
	le.PutUint64(b[8:], uint64(h.Address))
	le.PutUint64(b[16:], h.Tag)
	le.PutUint64(b[24:], h.Sequence)
	le.PutUint32(b, CRC(b[4:BlockBytes]))
}

// open checks a block's kind, checksum, address and volume.
func open(b []byte, kind Kind, address Locator, tag uint64) (Header, error) {
	if len(b) != BlockBytes {
		return Header{}, ErrShort
	}
	le := binary.LittleEndian
	h := Header{
		Kind:     Kind(le.Uint32(b[4:])),
		Address:  Locator(le.Uint64(b[8:])),
		Tag:      le.Uint64(b[16:]),
		Sequence: le.Uint64(b[24:]),
	}
	switch {
	case h.Kind != kind:
		return h, ErrMagic
	case le.Uint32(b) != CRC(b[4:BlockBytes]):
		return h, ErrChecksum
	case h.Address != address || h.Tag != tag:
		return h, ErrAddress
	}
	return h, nil
}

package ondisk

import (
	"encoding/binary"
	"fmt"
)

// LabelMagic starts every label.
const LabelMagic = "tuttifs\x00"

// Version is the format version that this package writes and the newest that it reads.
const Version = 1

// Feature bits. An unknown compatible bit is kept and means nothing; an unknown read-only-compatible one forbids
// writing; an unknown incompatible one forbids mounting. docs/format.md, section 15, says which kind an addition needs.
const (
	// FeatureDraft (incompatible): written before version 1 was frozen. Never used again.
	FeatureDraft uint64 = 1 << 0

	KnownROCompat uint64 = 0
	KnownIncompat uint64 = 0
)

// DriveState is a member's state in the member table.
type DriveState uint8

const (
	DriveAbsent  DriveState = iota // the index was never used
	DriveActive                    // a member
	DriveRemoved                   // was a member; the index is never used again
)

// Member is one row of the label's member table.
type Member struct {
	UUID  [16]byte
	State DriveState
	Units uint64 // size of the drive
}

// Region is where things lie: the same on every drive of a volume, but for the number of segments.
type Region struct {
	SuperblockUnit uint64 // two slots
	JournalUnit    uint64
	JournalBlocks  uint64
	CatalogUnit    uint64 // two areas
	CatalogBlocks  uint64 // of one area
	SegmentUnit    uint64 // of segment 0
	SegmentUnits   uint32 // units in a segment, a power of two
	Segments       uint32
}

// Label is one drive's copy of what the whole volume must agree on. Two copies lie on the drive: in its first and its
// last unit.
type Label struct {
	Version      uint32
	Compat       uint64
	ROCompat     uint64
	Incompat     uint64
	Unit         uint64 // self address
	Volume       [16]byte
	Drive        [16]byte
	Index        uint16
	Width        uint16
	LBAShift     uint8 // 9 or 12
	Clean        bool  // the volume was unmounted after this label was written
	Units        uint64
	Region       Region
	Epoch        uint64 // counts read-write mounts
	Nonce        uint64 // of the epoch
	Predecessor  uint64 // nonce of the epoch that this one follows
	Base         uint64 // epoch of the superblock that was durable when the label was written
	Holders      uint64 // drives (bit by index) that took part in this epoch
	Metadata     uint64 // drives that hold journal, catalog and superblock
	Sequence     uint64 // counts writings of the label
	CreationTime int64  // Unix nanoseconds
	Name         string // volume label
	Members      [MaxDrives]Member
	Extension    [LabelExtensionBytes]byte // of features that this version does not know; the drive's own
}

// LabelExtensionBytes is the room that a label has for what features add to a drive. Who does not know the features
// keeps it as it is; without any feature it is zero.
const LabelExtensionBytes = BlockBytes - labelEnd

// Segments are 256 KiB to 1 GiB.
const (
	minSegmentUnits = 64
	maxSegmentUnits = 1 << 18
)

const (
	labelNameOff   = 232
	labelMemberOff = 512
	memberBytes    = 32
	labelEnd       = labelMemberOff + MaxDrives*memberBytes
	labelFlagClean = 1
)

// Encode fills a block.
func (l *Label) Encode(b []byte) {
	b = b[:BlockBytes]
	clear(b)
	le := binary.LittleEndian
	copy(b, LabelMagic)
	le.PutUint32(b[12:], l.Version)
	le.PutUint64(b[16:], l.Compat)
	le.PutUint64(b[24:], l.ROCompat)
	le.PutUint64(b[32:], l.Incompat)
	le.PutUint64(b[40:], l.Unit)
	copy(b[48:], l.Volume[:])
	copy(b[64:], l.Drive[:])
	le.PutUint16(b[80:], l.Index)
	le.PutUint16(b[82:], l.Width)
	b[84] = l.LBAShift
	if l.Clean {
		b[85] = labelFlagClean
	}
	b[86] = uint8(len(l.Name))
	le.PutUint32(b[88:], BlockBytes)
	le.PutUint32(b[92:], l.Region.SegmentUnits)
	le.PutUint64(b[96:], l.Units)
	le.PutUint64(b[104:], l.Region.SuperblockUnit)
	le.PutUint64(b[112:], l.Region.JournalUnit)
	le.PutUint64(b[120:], l.Region.JournalBlocks)
	le.PutUint64(b[128:], l.Region.CatalogUnit)
	le.PutUint64(b[136:], l.Region.CatalogBlocks)
	le.PutUint64(b[144:], l.Region.SegmentUnit)
	le.PutUint32(b[152:], l.Region.Segments)
	le.PutUint64(b[160:], l.Epoch)
	le.PutUint64(b[168:], l.Nonce)
	le.PutUint64(b[176:], l.Predecessor)
	le.PutUint64(b[184:], l.Base)
	le.PutUint64(b[192:], l.Holders)
	le.PutUint64(b[200:], l.Metadata)
	le.PutUint64(b[208:], l.Sequence)
	le.PutUint64(b[216:], uint64(l.CreationTime))
	copy(b[labelNameOff:labelNameOff+MaxNameBytes], l.Name)
	for i := range l.Members {
		m, p := &l.Members[i], b[labelMemberOff+i*memberBytes:]
		copy(p, m.UUID[:])
		le.PutUint64(p[16:], m.Units)
		p[24] = uint8(m.State)
	}
	copy(b[labelEnd:], l.Extension[:])
	le.PutUint32(b[8:], labelCRC(b))
}

// labelCRC covers the whole block but the checksum itself.
func labelCRC(b []byte) uint32 {
	return CRC(b[12:BlockBytes])
}

// DecodeLabel reads the label that was found at a unit. ErrMagic means that there is none. A label of a newer version
// or with unknown incompatible bits is returned together with the error, with only the fields up to Index filled in
// (bytes 0..81 never change their meaning), so that the drive can be named.
func DecodeLabel(b []byte, unit uint64) (*Label, error) {
	if len(b) != BlockBytes {
		return nil, ErrShort
	}
	le := binary.LittleEndian
	if string(b[:8]) != LabelMagic {
		return nil, ErrMagic
	}
	if le.Uint32(b[8:]) != labelCRC(b) {
		return nil, ErrChecksum
	}
	l := &Label{
		Version:  le.Uint32(b[12:]),
		Compat:   le.Uint64(b[16:]),
		ROCompat: le.Uint64(b[24:]),
		Incompat: le.Uint64(b[32:]),
		Unit:     le.Uint64(b[40:]),
		Volume:   [16]byte(b[48:]),
		Drive:    [16]byte(b[64:]),
		Index:    le.Uint16(b[80:]),
	}
	if l.Unit != unit {
		return nil, ErrAddress
	}
	if l.Version != Version {
		return l, fmt.Errorf("%w: %d (this version reads %d)", ErrVersion, l.Version, Version)
	}
	if l.Incompat&FeatureDraft != 0 {
		return l, ErrDraft
	}
	if x := l.Incompat &^ KnownIncompat; x != 0 {
		return l, fmt.Errorf("%w: bits %#x", ErrFeature, x)
	}
	if err := l.decodeRest(b); err != nil {
		return nil, err
	}
	return l, l.validate()
}

// decodeRest reads the fields whose meaning belongs to this version.
func (l *Label) decodeRest(b []byte) error {
	le := binary.LittleEndian
	l.Width = le.Uint16(b[82:])
	l.LBAShift = b[84]
	l.Clean = b[85] == labelFlagClean
	n := int(b[86])
	l.Region = Region{
		SegmentUnits:   le.Uint32(b[92:]),
		SuperblockUnit: le.Uint64(b[104:]),
		JournalUnit:    le.Uint64(b[112:]),
		JournalBlocks:  le.Uint64(b[120:]),
		CatalogUnit:    le.Uint64(b[128:]),
		CatalogBlocks:  le.Uint64(b[136:]),
		SegmentUnit:    le.Uint64(b[144:]),
		Segments:       le.Uint32(b[152:]),
	}
	l.Units = le.Uint64(b[96:])
	l.Epoch = le.Uint64(b[160:])
	l.Nonce = le.Uint64(b[168:])
	l.Predecessor = le.Uint64(b[176:])
	l.Base = le.Uint64(b[184:])
	l.Holders = le.Uint64(b[192:])
	l.Metadata = le.Uint64(b[200:])
	l.Sequence = le.Uint64(b[208:])
	l.CreationTime = int64(le.Uint64(b[216:]))
	for i := range l.Members {
		m, p := &l.Members[i], b[labelMemberOff+i*memberBytes:]
		m.UUID = [16]byte(p)
		m.Units = le.Uint64(p[16:])
		m.State = DriveState(p[24])
		if !allZero(p[25:memberBytes]) {
			return fieldError("label: reserved bytes of member %d", i)
		}
	}
	if b[85] > labelFlagClean || le.Uint32(b[88:]) != BlockBytes || n > MaxNameBytes ||
		b[87] != 0 || !allZero(b[156:160]) || !allZero(b[224:labelNameOff]) ||
		!allZero(b[labelNameOff+n:labelMemberOff]) {
		return fieldError("label: flags, unit size, name length or reserved bytes")
	}
	l.Extension = [LabelExtensionBytes]byte(b[labelEnd:])
	if l.Compat|l.ROCompat == 0 && l.Extension != ([LabelExtensionBytes]byte{}) {
		return fieldError("label: an extension without a feature")
	}
	l.Name = string(b[labelNameOff : labelNameOff+n])
	return nil
}

// validate checks that the fields fit together.
func (l *Label) validate() error {
	r := &l.Region
	su := uint64(r.SegmentUnits)
	switch {
	case l.Units < 16 || l.Units > MaxUnit:
		return fieldError("label: %d units", l.Units)
	case l.Unit != 0 && l.Unit != l.Units-1:
		return fieldError("label: at unit %d of %d", l.Unit, l.Units)
	case l.LBAShift != 9 && l.LBAShift != 12:
		return fieldError("label: LBA shift %d", l.LBAShift)
	case l.Width == 0 || l.Width > MaxWidth:
		return fieldError("label: width %d", l.Width)
	case su < minSegmentUnits || su > maxSegmentUnits || su&(su-1) != 0:
		return fieldError("label: segment of %d units", su)
	case r.SuperblockUnit != 1 || r.JournalUnit != 3:
		return fieldError("label: superblock at %d, journal at %d", r.SuperblockUnit, r.JournalUnit)
	case r.JournalBlocks < 8 || r.JournalBlocks >= l.Units || r.CatalogBlocks == 0 || r.CatalogBlocks >= l.Units:
		return fieldError("label: journal of %d blocks, catalog of %d", r.JournalBlocks, r.CatalogBlocks)
	case r.CatalogUnit != r.JournalUnit+r.JournalBlocks:
		return fieldError("label: catalog at unit %d", r.CatalogUnit)
	case r.SegmentUnit < r.CatalogUnit+2*r.CatalogBlocks || r.SegmentUnit%su != 0 || r.SegmentUnit >= l.Units:
		return fieldError("label: segments at unit %d", r.SegmentUnit)
	case r.Segments == 0 || uint64(r.Segments) > (l.Units-1-r.SegmentUnit)/su:
		return fieldError("label: %d segments", r.Segments)
	case !validName([]byte(l.Name)):
		return fieldError("label: volume label has control characters")
	}
	return l.validateMembers()
}

func (l *Label) validateMembers() error {
	active := uint64(0)
	for i := range l.Members {
		m := &l.Members[i]
		switch m.State {
		case DriveActive:
			active |= 1 << i
			if m.Units < 16 || m.Units > MaxUnit {
				return fieldError("label: member %d has %d units", i, m.Units)
			}
		case DriveAbsent:
			if *m != (Member{}) {
				return fieldError("label: absent member %d is not empty", i)
			}
		case DriveRemoved:
		default:
			return fieldError("label: member %d has state %d", i, m.State)
		}
	}
	if l.Index >= MaxDrives || active>>l.Index&1 == 0 || l.Members[l.Index].UUID != l.Drive ||
		l.Members[l.Index].Units != l.Units {
		return fieldError("label: own entry %d of the member table", l.Index)
	}
	if l.Metadata == 0 || l.Metadata&^active != 0 || l.Holders&^active != 0 {
		return fieldError("label: metadata drives %#x, holders %#x, members %#x", l.Metadata, l.Holders, active)
	}
	return nil
}

// Package ondisk is the byte layout of a tuttifs drive and its codecs. No I/O. docs/format.md is its prose.
//
// Everything is little-endian; every metadata block is 4096 bytes and carries a CRC32C (Castagnoli) and its own
// address. Decoders believe nothing: every length, reserved field and range is checked, and a decoded value encodes
// to the bytes that it came from.
package ondisk

import (
	"errors"
	"fmt"
)

// BlockBytes is the size of every metadata block, and of the allocation unit.
const BlockBytes = 4096

const (
	// MaxDrives bounds the members of a volume.
	MaxDrives = 64
	// MaxSegments bounds the segments of a drive.
	MaxSegments = 1 << 24
	// MaxWidth bounds W.
	MaxWidth = 64
	// MaxNameBytes bounds the names of pools, families and tenants, and the volume's label.
	MaxNameBytes = 64
	// MaxIdentityBytes bounds a pool's identity.
	MaxIdentityBytes = 16 << 10
	// MaxGeometryBytes bounds a pool's encoded geometry.
	MaxGeometryBytes = 1 << 20
)

var (
	// ErrMagic: the block is not of the expected kind.
	ErrMagic = errors.New("ondisk: not a block of this kind")
	// ErrChecksum: the block's CRC32C does not match.
	ErrChecksum = errors.New("ondisk: wrong checksum")
	// ErrAddress: a valid block that belongs elsewhere: another address, volume or row.
	ErrAddress = errors.New("ondisk: block belongs elsewhere")
	// ErrVersion: written by a newer version.
	ErrVersion = errors.New("ondisk: newer format version")
	// ErrFeature: an incompatible feature bit that this version does not know.
	ErrFeature = errors.New("ondisk: unknown incompatible feature")
	// ErrDraft: a volume from before the format was frozen, which had no promise to be read later.
	ErrDraft = errors.New("ondisk: a draft of the format")
	// ErrField: the checksum is right and a field is not: out of range, or reserved and not zero.
	ErrField = errors.New("ondisk: invalid field")
	// ErrShort: the bytes end inside an entry.
	ErrShort = errors.New("ondisk: truncated")
)

func fieldError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrField, fmt.Sprintf(format, args...))
}

// Locator is a unit of a drive: index << 48 | unit.
type Locator uint64

// RoleDrive is the drive index of blocks of which every metadata drive holds an identical copy at the same unit.
const RoleDrive = 0xffff

// NoLocator is no place.
const NoLocator = ^Locator(0)

// MaxUnit is the highest unit number of a drive.
const MaxUnit = 1<<48 - 1

// Locate makes a locator.
func Locate(drive uint16, unit uint64) Locator { return Locator(uint64(drive)<<48 | unit&MaxUnit) }

// Drive is the drive's index.
func (l Locator) Drive() uint16 { return uint16(l >> 48) }

// Unit is the drive's unit.
func (l Locator) Unit() uint64 { return uint64(l) & MaxUnit }

func (l Locator) String() string { return fmt.Sprintf("%d:%d", l.Drive(), l.Unit()) }

// allZero says whether a reserved range holds nothing.
func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func validName(b []byte) bool {
	for _, c := range b {
		if c < 0x20 || c == 0x7f || c == '/' {
			return false
		}
	}
	return true
}

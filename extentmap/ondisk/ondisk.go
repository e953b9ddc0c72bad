// Package ondisk is the byte layout of a tuttifs drive and its codecs. No I/O. docs/format.md is its prose.
//
// Everything is little-endian; every metadata block is 4096 bytes and carries a CRC32C (Castagnoli) and its own address.
package ondisk

// BlockBytes is the size of every metadata block.
const BlockBytes = 4096

// RecordBytes is one slot's record; RecordsPerBlock of them follow a 64-byte block header in a record-table block.
const (
	RecordBytes     = 128
	RecordsPerBlock = 31
)

// Key names a block's content.
type Key = [32]byte

// State of a record.
type State uint8

const (
	StateFree State = iota
	StateCommitted
)

// Record is the decoded form of a slot's 128-byte record.
type Record struct {
	Key        Key
	Parent     Key    // zero for a root
	Nonce      uint64 // of the mount that reserved the slot
	Generation uint64
	Sequence   uint64 // commit sequence: of two records with one key the higher wins
	CommitTime int64  // Unix nanoseconds
	LastHit    uint32 // Unix seconds, written at checkpoints only
	Hits       uint32 // likewise
	Tenant     uint32
	Owner      uint32 // uid of the session's creator
	Tokens     uint32 // fewer than B in a tail
	Position   uint32 // blocks before it in its chain
	State      State
	Flags      uint8
}

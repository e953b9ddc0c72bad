package ondisk

import "encoding/binary"

// Key names a block's content.
type Key = [32]byte

// State of a record.
type State uint8

const (
	StateFree State = iota
	StateCommitted
)

// RecordBytes is one slot's record on the drive.
const RecordBytes = 128

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

// Offsets within a record of what is read or written without decoding the rest.
const (
	RecordKeyOff      = 0
	RecordParentOff   = 32
	RecordNonceOff    = 64
	RecordGenOff      = 72
	RecordSeqOff      = 80
	RecordTimeOff     = 88
	RecordLastHitOff  = 96
	RecordHitsOff     = 100
	RecordTenantOff   = 104
	RecordTokensOff   = 112
	RecordPositionOff = 116
	RecordStateOff    = 120
)

// Encode fills b[:RecordBytes].
func (r *Record) Encode(b []byte) {
	b = b[:RecordBytes]
	le := binary.LittleEndian
	copy(b, r.Key[:])
	copy(b[RecordParentOff:], r.Parent[:])
	le.PutUint64(b[RecordNonceOff:], r.Nonce)
	le.PutUint64(b[RecordGenOff:], r.Generation)
	le.PutUint64(b[RecordSeqOff:], r.Sequence)
	le.PutUint64(b[RecordTimeOff:], uint64(r.CommitTime))
	le.PutUint32(b[RecordLastHitOff:], r.LastHit)
	le.PutUint32(b[RecordHitsOff:], r.Hits)
	le.PutUint32(b[RecordTenantOff:], r.Tenant)
	le.PutUint32(b[108:], r.Owner)
	le.PutUint32(b[RecordTokensOff:], r.Tokens)
	le.PutUint32(b[RecordPositionOff:], r.Position)
	b[RecordStateOff] = uint8(r.State)
	b[121] = r.Flags
	clear(b[122:])
}

// Decode reads b[:RecordBytes] without judging it; see ValidRecord.
func (r *Record) Decode(b []byte) {
	b = b[:RecordBytes]
	le := binary.LittleEndian
	r.Key = Key(b)
	r.Parent = Key(b[RecordParentOff:])
	r.Nonce = le.Uint64(b[RecordNonceOff:])
	r.Generation = le.Uint64(b[RecordGenOff:])
	r.Sequence = le.Uint64(b[RecordSeqOff:])
	r.CommitTime = int64(le.Uint64(b[RecordTimeOff:]))
	r.LastHit = le.Uint32(b[RecordLastHitOff:])
	r.Hits = le.Uint32(b[RecordHitsOff:])
	r.Tenant = le.Uint32(b[RecordTenantOff:])
	r.Owner = le.Uint32(b[108:])
	r.Tokens = le.Uint32(b[RecordTokensOff:])
	r.Position = le.Uint32(b[RecordPositionOff:])
	r.State = State(b[RecordStateOff])
	r.Flags = b[121]
}

// ValidRecord says whether an encoded record is one that Encode makes: committed with zero reserved bytes and no
// unknown flag, or free and all zero.
func ValidRecord(b []byte) bool {
	b = b[:RecordBytes]
	le := binary.LittleEndian
	if State(b[RecordStateOff]) == StateCommitted {
		return b[121] == 0 && le.Uint16(b[122:]) == 0 && le.Uint32(b[124:]) == 0
	}
	for i := 0; i < RecordBytes; i += 8 {
		if le.Uint64(b[i:]) != 0 {
			return false
		}
	}
	return true
}

package nvme

import (
	"encoding/binary"
	"fmt"
	"structs"
	"unsafe"
)

// Flexible Data Placement (Base 2.1 sections 3.2.4 and 8.1.10): the drive writes what is written with one placement
// handle to reclaim units of that handle alone, so that what is expected to go at the same time lies, and is erased,
// together.

// DirectivePlacement is the directive type (RWDirective in CDW12) of commands that name a placement identifier in
// CDW13.
const DirectivePlacement = 2

// SetDirective gives a Write that BuildRW made a directive: its type, and what is specific to it.
func (e *SQE) SetDirective(kind uint8, specific uint16) {
	e.CDW12 = e.CDW12&^RWDirective | uint32(kind)<<20&RWDirective
	e.CDW13 = e.CDW13&0xffff | uint32(specific)<<16
}

// Directive is the reverse of SetDirective.
func (e *SQE) Directive() (kind uint8, specific uint16) {
	return uint8(e.CDW12 & RWDirective >> 20), uint16(e.CDW13 >> 16)
}

// Management operations of I/O Management Receive and Send (CDW10 bits 7:0; Base 2.1 figures 469 and 474).
const (
	ManageHandleStatus = 1 // receive: what each of the namespace's placement handles writes to
	ManageHandleUpdate = 1 // send: handles begin new reclaim units
)

// BuildHandleStatus makes an I/O Management Receive of the status of a namespace's handles, into length bytes, a
// multiple of 4, of the data pointer, which is set afterwards.
func BuildHandleStatus(sqe *SQE, cid uint16, nsid, length uint32) {
	*sqe = SQE{Opcode: IOManageReceive, CID: cid, NSID: nsid, CDW10: ManageHandleStatus, CDW11: length/4 - 1}
}

// BuildHandleUpdate makes an I/O Management Send that has n placement identifiers (1..65536), 16 bits each in the data
// pointer, which is set afterwards, begin new reclaim units.
func BuildHandleUpdate(sqe *SQE, cid uint16, nsid, n uint32) {
	*sqe = SQE{Opcode: IOManageSend, CID: cid, NSID: nsid, CDW10: ManageHandleUpdate | (n-1)<<16}
}

// FDPHandle is one descriptor of a handle's status (32 bytes, Base 2.1 figure 472).
type FDPHandle struct {
	_           structs.HostLayout
	PlacementID uint16 // what a Write names
	Handle      uint16 // reclaim unit handle behind it
	Seconds     uint32 // until its reclaim unit may be replaced; 0: not said
	BlocksLeft  uint64 // of that reclaim unit
	_           [16]byte
}

const (
	// FDPHandleBytes is the size of a descriptor, and FDPHandlesBytes that of the header before the first one.
	FDPHandleBytes  = 32
	FDPHandlesBytes = 16
)

var (
	_ = [1]struct{}{}[unsafe.Sizeof(FDPStats{})-FDPStatsBytes]
	_ = [1]struct{}{}[unsafe.Sizeof(FDPHandle{})-FDPHandleBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(FDPHandle{}.BlocksLeft)-8]
)

// ParseFDPHandles decodes what I/O Management Receive gave. A list that is longer than b is cut off at its end.
func ParseFDPHandles(b []byte) ([]FDPHandle, error) {
	if len(b) < FDPHandlesBytes {
		return nil, fmt.Errorf("%w: FDP handles of %d bytes, %d are a header", ErrLog, len(b), FDPHandlesBytes)
	}
	n := min(int(binary.LittleEndian.Uint16(b[14:])), (len(b)-FDPHandlesBytes)/FDPHandleBytes)
	handles := make([]FDPHandle, n)
	for i := range handles {
		copy(wire(&handles[i]), b[FDPHandlesBytes+i*FDPHandleBytes:])
	}
	return handles, nil
}

// AppendBinary appends the descriptor's 32 bytes.
func (h *FDPHandle) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(h)...), nil }

// FDPStats is the FDP Statistics log of an endurance group (Base 2.1 figure 285): bytes since the group exists.
type FDPStats struct {
	_            structs.HostLayout
	HostWritten  [2]uint64 // with metadata, without padding
	MediaWritten [2]uint64 // whoever asked for it
	MediaErased  [2]uint64
	_            [16]byte
}

// FDPStatsBytes is its size.
const FDPStatsBytes = 64

// ParseFDPStats decodes the log.
func ParseFDPStats(b []byte) (l FDPStats, err error) {
	if len(b) < FDPStatsBytes {
		return l, fmt.Errorf("%w: FDP statistics of %d bytes, %d are defined", ErrLog, len(b), FDPStatsBytes)
	}
	copy(wire(&l), b)
	return l, nil
}

// AppendBinary appends the log's 64 bytes.
func (l *FDPStats) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(l)...), nil }

// Amplification is the write amplification of the group's life, or 0 when nothing was written.
func (l *FDPStats) Amplification() float64 {
	if host := Uint128(l.HostWritten); host > 0 {
		return Uint128(l.MediaWritten) / host
	}
	return 0
}

// FDPConfig is one configuration of an endurance group (Base 2.1 figure 279).
type FDPConfig struct {
	Valid        bool
	GroupBits    uint8  // of a placement identifier: its upper bits name the reclaim group
	Groups       uint32 // reclaim groups
	Handles      uint16 // reclaim unit handles
	PlacementIDs uint32 // a namespace may use at most
	Namespaces   uint32
	UnitBytes    uint64 // nominal size of a reclaim unit
	HandleTypes  []uint8
}

const (
	fdpHeaderBytes = 16
	fdpConfigBytes = 64 // of a descriptor, before its handles
	fdpHandleBytes = 4
)

// FDPConfigsBytes is how long the FDP Configurations log says that it is, or 0 without a whole header.
func FDPConfigsBytes(b []byte) int {
	if len(b) < fdpHeaderBytes {
		return 0
	}
	return int(binary.LittleEndian.Uint32(b[4:]))
}

// ParseFDPConfigs decodes the FDP Configurations log: a header, and descriptors of various sizes.
func ParseFDPConfigs(b []byte) (configs []FDPConfig, err error) {
	le := binary.LittleEndian
	if len(b) < fdpHeaderBytes {
		return nil, fmt.Errorf("%w: FDP configurations of %d bytes, %d are a header", ErrLog, len(b), fdpHeaderBytes)
	}
	if size := le.Uint32(b[4:]); size < fdpHeaderBytes || uint64(size) > uint64(len(b)) {
		return nil, fmt.Errorf("%w: FDP configurations of %d bytes say that they are %d", ErrLog, len(b), size)
	}
	n := int(le.Uint16(b)) + 1 // zero-based
	b = b[fdpHeaderBytes:le.Uint32(b[4:])]
	for i := range n {
		if len(b) < fdpConfigBytes {
			return nil, fmt.Errorf("%w: FDP configuration %d of %d is cut off", ErrLog, i, n)
		}
		c := FDPConfig{
			Valid: b[2]>>7 != 0, GroupBits: b[2] & 0xf, Groups: le.Uint32(b[4:]), Handles: le.Uint16(b[8:]),
			PlacementIDs: uint32(le.Uint16(b[10:])) + 1, Namespaces: le.Uint32(b[12:]), UnitBytes: le.Uint64(b[16:]),
		}
		size, least := int(le.Uint16(b)), fdpConfigBytes+int(c.Handles)*fdpHandleBytes
		if size < least || size > len(b) {
			return nil, fmt.Errorf("%w: FDP configuration %d has %d bytes, its %d handles take %d of %d",
				ErrLog, i, size, c.Handles, least, len(b))
		}
		for h := range int(c.Handles) {
			c.HandleTypes = append(c.HandleTypes, b[fdpConfigBytes+h*fdpHandleBytes])
		}
		configs, b = append(configs, c), b[size:]
	}
	return configs, nil
}

// AppendFDPConfigs appends the FDP Configurations log of at least one configuration.
func AppendFDPConfigs(b []byte, configs []FDPConfig) []byte {
	le, begin := binary.LittleEndian, len(b)
	b = append(b, make([]byte, fdpHeaderBytes)...)
	le.PutUint16(b[begin:], uint16(len(configs)-1))
	for _, c := range configs {
		size := fdpConfigBytes + int(c.Handles)*fdpHandleBytes
		d := make([]byte, size)
		le.PutUint16(d, uint16(size))
		if d[2] = c.GroupBits & 0xf; c.Valid {
			d[2] |= 1 << 7
		}
		le.PutUint32(d[4:], c.Groups)
		le.PutUint16(d[8:], c.Handles)
		le.PutUint16(d[10:], uint16(c.PlacementIDs-1))
		le.PutUint32(d[12:], c.Namespaces)
		le.PutUint64(d[16:], c.UnitBytes)
		for h, kind := range c.HandleTypes {
			d[fdpConfigBytes+h*fdpHandleBytes] = kind
		}
		b = append(b, d...)
	}
	le.PutUint32(b[begin+4:], uint32(len(b)-begin))
	return b
}

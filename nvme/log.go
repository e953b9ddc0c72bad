package nvme

import (
	"structs"
	"unsafe"
)

// ErrorLogEntry is one entry of the Error Information log (64 bytes, Base 2.0 figure 206).
type ErrorLogEntry struct {
	_        structs.HostLayout
	Count    uint64
	SQID     uint16
	CID      uint16
	Status   uint16 // as in a CQE, phase in bit 0
	Location uint16 // byte in bits 7:0, bit in 10:8 of the field at fault; ffffh: not one field
	LBA      uint64
	NSID     uint32
	Vendor   uint8
	TRType   uint8
	_        [2]byte
	Specific uint64
	TRInfo   uint16
	_        [22]byte
}

// SMARTLog is the SMART / Health Information log (512 bytes, Base 2.0 figure 207).
type SMARTLog struct {
	_                 structs.HostLayout
	Critical          uint8
	Temperature       [2]uint8 // kelvin, little-endian
	Spare             uint8    // percent
	SpareThreshold    uint8
	Used              uint8
	EnduranceCritical uint8
	_                 [25]byte
	DataUnitsRead     [2]uint64 // thousands of 512 bytes, rounded up; 128 bits, low word first
	DataUnitsWritten  [2]uint64
	HostReads         [2]uint64
	HostWrites        [2]uint64
	BusyMinutes       [2]uint64
	PowerCycles       [2]uint64
	PowerOnHours      [2]uint64
	UnsafeShutdowns   [2]uint64
	MediaErrors       [2]uint64
	ErrorLogEntries   [2]uint64
	WarningMinutes    uint32
	CriticalMinutes   uint32
	Sensors           [8]uint16
	_                 [296]byte
}

// Sizes of log pages.
const (
	ErrorLogEntryBytes = 64
	SMARTLogBytes      = 512
)

var (
	_ = [1]struct{}{}[unsafe.Sizeof(ErrorLogEntry{})-ErrorLogEntryBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(ErrorLogEntry{}.LBA)-16]
	_ = [1]struct{}{}[unsafe.Sizeof(SMARTLog{})-SMARTLogBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(SMARTLog{}.DataUnitsRead)-32]
	_ = [1]struct{}{}[unsafe.Offsetof(SMARTLog{}.Sensors)-200]
)

// AppendBinary appends the entry's 64 bytes.
func (e *ErrorLogEntry) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(e)...), nil }

// AppendBinary appends the log's 512 bytes.
func (l *SMARTLog) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(l)...), nil }

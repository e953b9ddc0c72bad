package nvme

import (
	"errors"
	"fmt"
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
	_ = [1]struct{}{}[unsafe.Sizeof(OCPLog{})-OCPLogBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(OCPLog{}.GUID)-496]
)

// DataUnitBytes is the unit of SMARTLog's DataUnits fields.
const DataUnitBytes = 512 * 1000

// ErrLog: bytes that are no log page of the kind that was asked for.
var ErrLog = errors.New("nvme: log page")

// ParseSMARTLog decodes the SMART / Health Information log.
func ParseSMARTLog(b []byte) (l SMARTLog, err error) {
	if len(b) < SMARTLogBytes {
		return l, fmt.Errorf("%w: SMART / health information of %d bytes, %d are defined", ErrLog, len(b), SMARTLogBytes)
	}
	copy(wire(&l), b)
	return l, nil
}

// HostBytesWritten is what hosts wrote to the drive in its life, to the data unit.
func (l *SMARTLog) HostBytesWritten() float64 { return Uint128(l.DataUnitsWritten) * DataUnitBytes }

// Uint128 is a counter of a log, low word first, as far as a float64 holds it.
func Uint128(v [2]uint64) float64 { return float64(v[0]) + float64(v[1])*(1<<64) }

// LogOCP is the SMART / Health Information Extended log of the Open Compute Project's datacenter NVMe SSD
// specification: a vendor-specific page that is known by its GUID.
const LogOCP = 0xc0

// OCPLog is the part of that log that tuttifs uses.
type OCPLog struct {
	_            structs.HostLayout
	MediaWritten [2]uint64 // bytes written to the media, whoever asked for it; 128 bits, low word first
	MediaRead    [2]uint64
	_            [462]byte
	Version      uint16
	GUID         [16]byte
}

// OCPLogBytes is its size.
const OCPLogBytes = 512

// ocpGUID is AFD514C9-7C6F-4F9C-A4F2-BFEA2810AFC5, little-endian.
var ocpGUID = [16]byte{0xc5, 0xaf, 0x10, 0x28, 0xea, 0xbf, 0xf2, 0xa4, 0x9c, 0x4f, 0x6f, 0x7c, 0xc9, 0x14, 0xd5, 0xaf}

// ParseOCPLog decodes the log. Page C0h of a drive that does not follow that specification is something else: ErrLog.
func ParseOCPLog(b []byte) (l OCPLog, err error) {
	if len(b) < OCPLogBytes {
		return l, fmt.Errorf("%w: OCP log of %d bytes, %d are defined", ErrLog, len(b), OCPLogBytes)
	}
	copy(wire(&l), b)
	if l.GUID != ocpGUID {
		return OCPLog{}, fmt.Errorf("%w: page %02xh is another vendor's", ErrLog, LogOCP)
	}
	return l, nil
}

// ParseErrorLog decodes the entries of the Error Information log that are in use, the newest first.
func ParseErrorLog(b []byte) (entries []ErrorLogEntry, err error) {
	if len(b)%ErrorLogEntryBytes != 0 {
		return nil, fmt.Errorf("%w: error information of %d bytes, entries have %d", ErrLog, len(b), ErrorLogEntryBytes)
	}
	for ; len(b) > 0; b = b[ErrorLogEntryBytes:] {
		var e ErrorLogEntry
		copy(wire(&e), b)
		if e.Count == 0 {
			break // the rest was never used
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// AppendBinary appends the log's 512 bytes.
func (l *OCPLog) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(l)...), nil }

// AppendBinary appends the entry's 64 bytes.
func (e *ErrorLogEntry) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(e)...), nil }

// AppendBinary appends the log's 512 bytes.
func (l *SMARTLog) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(l)...), nil }

package nvme

import "fmt"

// Status is the status field of a completion without its phase bit: SC in bits 7:0, SCT in 10:8, CRD in 12:11, More in
// 13, Do Not Retry in 14 (Base 2.0 figure 92). As an error it names itself; errors.Is compares type and code only.
type Status uint16

// Bits above the code.
const (
	StatusCodeMask Status = 0x07ff
	StatusMore     Status = 1 << 13
	StatusDNR      Status = 1 << 14
)

// Status code types.
const (
	SCTGeneric = 0
	SCTCommand = 1
	SCTMedia   = 2
	SCTPath    = 3
	SCTVendor  = 7
)

// Generic command status (Base 2.0 figure 94, NVM 1.0 figure 7).
const (
	Success             Status = 0x000
	InvalidOpcode       Status = 0x001
	InvalidField        Status = 0x002
	CIDConflict         Status = 0x003
	DataTransferError   Status = 0x004
	PowerLoss           Status = 0x005
	InternalError       Status = 0x006
	AbortRequested      Status = 0x007
	SQDeleted           Status = 0x008
	FusedFailed         Status = 0x009
	FusedMissing        Status = 0x00a
	InvalidNamespace    Status = 0x00b
	SequenceError       Status = 0x00c
	SGLSegmentInvalid   Status = 0x00d
	SGLCountInvalid     Status = 0x00e
	SGLLengthInvalid    Status = 0x00f
	SGLMetaLength       Status = 0x010
	SGLTypeInvalid      Status = 0x011
	CMBUseInvalid       Status = 0x012
	PRPOffsetInvalid    Status = 0x013
	AtomicUnitExceeded  Status = 0x014
	OperationDenied     Status = 0x015
	SGLOffsetInvalid    Status = 0x016
	SGLGranularity      Status = 0x01e
	WriteProtected      Status = 0x020
	CommandInterrupted  Status = 0x021
	TransientTransport  Status = 0x022
	FDPDisabled         Status = 0x029
	LBAOutOfRange       Status = 0x080
	CapacityExceeded    Status = 0x081
	NamespaceNotReady   Status = 0x082
	ReservationConflict Status = 0x083
	FormatInProgress    Status = 0x084
)

// Command specific status (Base 2.0 figure 95, NVM 1.0 figure 8).
const (
	CQInvalid           Status = 0x100
	QueueIDInvalid      Status = 0x101
	QueueSizeInvalid    Status = 0x102
	AbortLimit          Status = 0x103
	AsyncEventLimit     Status = 0x105
	VectorInvalid       Status = 0x108
	LogPageInvalid      Status = 0x109
	FormatInvalid       Status = 0x10a
	QueueDeletion       Status = 0x10c
	FeatureNotSaveable  Status = 0x10d
	FeatureNotChangable Status = 0x10e
	FeatureNotNamespace Status = 0x10f
	AttributesConflict  Status = 0x180
	ProtectionInvalid   Status = 0x181
	ReadOnlyRange       Status = 0x182
	SizeLimit           Status = 0x183
)

// Media and data integrity errors (Base 2.0 figure 96, NVM 1.0 figure 9).
const (
	WriteFault        Status = 0x280
	UnrecoveredRead   Status = 0x281
	GuardCheck        Status = 0x282
	ApplicationTag    Status = 0x283
	ReferenceTag      Status = 0x284
	CompareFailure    Status = 0x285
	AccessDenied      Status = 0x286
	DeallocatedOrUnwr Status = 0x287
)

var statusNames = map[Status]string{
	Success: "success", InvalidOpcode: "invalid command opcode", InvalidField: "invalid field in command",
	CIDConflict: "command id conflict", DataTransferError: "data transfer error",
	PowerLoss: "aborted by power loss", InternalError: "internal error", AbortRequested: "aborted by request",
	SQDeleted: "aborted by deletion of the submission queue", FusedFailed: "aborted: fused command failed",
	FusedMissing: "aborted: fused command missing", InvalidNamespace: "invalid namespace or format",
	SequenceError: "command sequence error", SGLSegmentInvalid: "invalid SGL segment descriptor",
	SGLCountInvalid: "invalid number of SGL descriptors", SGLLengthInvalid: "data SGL length invalid",
	SGLMetaLength: "metadata SGL length invalid", SGLTypeInvalid: "SGL descriptor type invalid",
	CMBUseInvalid: "invalid use of the controller memory buffer", PRPOffsetInvalid: "PRP offset invalid",
	AtomicUnitExceeded: "atomic write unit exceeded", OperationDenied: "operation denied",
	SGLOffsetInvalid: "SGL offset invalid", SGLGranularity: "SGL data block granularity invalid",
	WriteProtected: "namespace is write protected", CommandInterrupted: "command interrupted",
	TransientTransport: "transient transport error",
	FDPDisabled:        "flexible data placement is disabled", LBAOutOfRange: "LBA out of range",
	CapacityExceeded: "capacity exceeded", NamespaceNotReady: "namespace not ready",
	ReservationConflict: "reservation conflict", FormatInProgress: "format in progress",
	CQInvalid: "completion queue invalid", QueueIDInvalid: "invalid queue identifier",
	QueueSizeInvalid: "invalid queue size", AbortLimit: "abort command limit exceeded",
	AsyncEventLimit: "asynchronous event request limit exceeded", VectorInvalid: "invalid interrupt vector",
	LogPageInvalid: "invalid log page", FormatInvalid: "invalid format", QueueDeletion: "invalid queue deletion",
	FeatureNotSaveable: "feature not saveable", FeatureNotChangable: "feature not changeable",
	FeatureNotNamespace: "feature not namespace specific", AttributesConflict: "conflicting attributes",
	ProtectionInvalid: "invalid protection information", ReadOnlyRange: "attempted write to a read-only range",
	SizeLimit:  "command size limit exceeded",
	WriteFault: "write fault", UnrecoveredRead: "unrecovered read error", GuardCheck: "guard check error",
	ApplicationTag: "application tag check error", ReferenceTag: "reference tag check error",
	CompareFailure: "compare failure", AccessDenied: "access denied",
	DeallocatedOrUnwr: "deallocated or unwritten block",
}

// Code is the status without More, retry delay and Do Not Retry.
func (s Status) Code() Status { return s & StatusCodeMask }

// SCT is the status code type, SC the code within it.
func (s Status) SCT() uint8 { return uint8(s >> 8 & 7) }

// SC is the status code within its type.
func (s Status) SC() uint8 { return uint8(s) }

// OK says that the command succeeded.
func (s Status) OK() bool { return s.Code() == Success }

// String names the code.
func (s Status) String() string {
	if n, ok := statusNames[s.Code()]; ok {
		return n
	}
	return fmt.Sprintf("status type %d code %#02x", s.SCT(), s.SC())
}

// Error makes a failed status an error value: `return status` after checking OK.
func (s Status) Error() string {
	retry := ""
	if s&StatusDNR != 0 {
		retry = ", do not retry"
	}
	return fmt.Sprintf("nvme: %s (SCT %d, SC %#02x%s)", s.String(), s.SCT(), s.SC(), retry)
}

// Is compares type and code, so that errors.Is(err, nvme.LBAOutOfRange) ignores the retry bits.
func (s Status) Is(target error) bool {
	t, ok := target.(Status)
	return ok && t.Code() == s.Code()
}

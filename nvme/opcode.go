package nvme

// Admin commands (Base 2.0 figure 139).
const (
	AdminDeleteSQ      = 0x00
	AdminCreateSQ      = 0x01
	AdminGetLogPage    = 0x02
	AdminDeleteCQ      = 0x04
	AdminCreateCQ      = 0x05
	AdminIdentify      = 0x06
	AdminAbort         = 0x08
	AdminSetFeatures   = 0x09
	AdminGetFeatures   = 0x0a
	AdminAsyncEvent    = 0x0c
	AdminNSManagement  = 0x0d
	AdminFWCommit      = 0x10
	AdminFWDownload    = 0x11
	AdminSelfTest      = 0x14
	AdminNSAttachment  = 0x15
	AdminKeepAlive     = 0x18
	AdminDirectiveSend = 0x19
	AdminDirectiveRecv = 0x1a
	AdminDoorbellBuf   = 0x7c
	AdminFormatNVM     = 0x80
	AdminSecuritySend  = 0x81
	AdminSecurityRecv  = 0x82
	AdminSanitize      = 0x84
)

// I/O commands of the NVM command set (Base 2.0 figure 390, NVM 1.0 figure 17).
const (
	IOFlush              = 0x00
	IOWrite              = 0x01
	IORead               = 0x02
	IOWriteUncorrectable = 0x04
	IOCompare            = 0x05
	IOWriteZeroes        = 0x08
	IODSM                = 0x09
	IOVerify             = 0x0c
	IOReservationReg     = 0x0d
	IOReservationReport  = 0x0e
	IOReservationAcquire = 0x11
	IOManageReceive      = 0x12
	IOReservationRelease = 0x15
	IOCopy               = 0x19
	IOManageSend         = 0x1d
)

// Controller or Namespace Structure of Identify (Base 2.0 figure 273).
const (
	CNSNamespace        = 0x00
	CNSController       = 0x01
	CNSActiveNamespaces = 0x02
	CNSNSDescriptors    = 0x03
	CNSNamespaceIOCS    = 0x05 // I/O command set specific; CSI in CDW11 bits 31:24
	CNSControllerIOCS   = 0x06
)

// Namespace identification descriptor types (Base 2.0 figure 277).
const (
	NIDTEUI64 = 1
	NIDTNGUID = 2
	NIDTUUID  = 3
	NIDTCSI   = 4
)

// Feature identifiers (Base 2.0 figure 317).
const (
	FeatureArbitration      = 0x01
	FeaturePowerManagement  = 0x02
	FeatureTemperature      = 0x04
	FeatureErrorRecovery    = 0x05
	FeatureVolatileCache    = 0x06
	FeatureQueues           = 0x07
	FeatureCoalescing       = 0x08
	FeatureInterruptVector  = 0x09
	FeatureWriteAtomicity   = 0x0a
	FeatureAsyncEvent       = 0x0b
	FeatureFDP              = 0x1d
	FeatureSelectMask       = 0x07 // Get Features CDW10 bits 10:8
	FeatureSelectCurrent    = 0
	FeatureSelectDefault    = 1
	FeatureSelectSaved      = 2
	FeatureSelectSupported  = 3
	FeatureSupportChangable = 1 << 2 // result of FeatureSelectSupported
)

// Log page identifiers (Base 2.0 figure 202).
const (
	LogSupported = 0x00
	LogError     = 0x01
	LogSMART     = 0x02
	LogFirmware  = 0x03
	LogCommands  = 0x05
	LogFDPConfig = 0x20 // Flexible Data Placement: configurations of an endurance group (Base 2.1 section 5.1.12.1.28)
	LogFDPStats  = 0x22 // its statistics

	// LogRetainEvents is the RAE bit of CDW10: the page's events are not acknowledged by reading it.
	LogRetainEvents = 1 << 15
)

// Bits of Create I/O Submission/Completion Queue CDW11 (Base 2.0 figures 156 and 160).
const (
	QueueContiguous = 1 << 0 // PC
	QueueInterrupts = 1 << 1 // IEN, completion queues
)

// Bits of Read and Write CDW12 (NVM 1.0 figures 38 and 66).
const (
	RWLimitedRetry = 1 << 31
	RWForceUnit    = 1 << 30 // FUA
	RWPrInfoMask   = 0xf << 26
	RWStorageTag   = 1 << 24
	RWDirective    = 0xf << 20
	RWBlocksMask   = 0xffff // NLB, zero-based
)

// WZDeallocate is the DEAC bit of Write Zeroes CDW12 (NVM 1.0 figure 76).
const WZDeallocate = 1 << 25

// Dataset Management (NVM 1.0 figures 30 and 31).
const (
	DSMRangesMax  = 256 // NR is zero-based in CDW10 bits 7:0
	DSMRangeBytes = 16
	DSMDeallocate = 1 << 2 // AD in CDW11
)

// DSMRange is one range of a Dataset Management command.
type DSMRange struct {
	Context uint32
	Blocks  uint32
	LBA     uint64
}

// Asynchronous events (Base 2.0 figures 145 and 146): completion DW0 is type, information << 8 and log page << 16.
const (
	AsyncTypeError       = 0
	AsyncInvalidDoorbell = 0 // a doorbell of no queue
	AsyncInvalidValue    = 1 // a value that the doorbell cannot take
)

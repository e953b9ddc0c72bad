package ioctl

import (
	"errors"
	"fmt"
	"structs"
	"unsafe"
)

// The attach protocol gives a member its shared memory. It runs over a SOCK_SEQPACKET unix socket whose path
// SESSION_CREATE and SESSION_JOIN answer. The engine sends one AttachRequest and gets one AttachReply with up to three
// descriptors (SCM_RIGHTS): arena, queues, DMA memory; and one more for each drive whose own queue pairs it gets. The
// connection stays open: its end means that the process is gone. Later messages on it are AttachRequest and AttachReply
// too, without descriptors.
const (
	AttachMagic = 0x41545554 // "TUTA"

	MessageAttach   = 1 // first message: make the memory
	MessageQuiesce  = 2 // stop lane Lane: when the reply says 0 nothing of it touches memory or drives any more
	MessageReattach = 3 // begin lane Lane again with zeroed queues
	MessagePing     = 4 // answers 0
	MessageReach    = 5 // one descriptor comes along, a dma-buf or memfd: SSDs reach its memory at the reply's DMABase
	MessageRelease  = 6 // ends the mapping at MemoryAddress: nothing of the process names it any more

	// Modes of an attachment.
	ModeMediated = 0 // the daemon's virtual controllers serve all queues
	ModeReal     = 1 // SSDs that the daemon drives serve theirs, the rest is mediated; EPERM without -o real

	LanesMax = 64
	DepthMax = 4096
	// DMABase is the I/O address of the DMA memory's first byte.
	DMABase = uint64(1) << 40
)

// AttachRequest is what the engine sends.
type AttachRequest struct {
	_             structs.HostLayout
	Magic         uint32 // AttachMagic
	Version       uint16 // Version
	Kind          uint16 // Message*
	Size          uint32 // of this struct
	Session       uint32
	Member        uint32
	Lanes         uint32 // 0 for an arena alone, at most LanesMax
	Depth         uint32 // entries of each queue: a power of two, 2..DepthMax; 0 without lanes
	Lane          uint32 // for MessageQuiesce and MessageReattach
	DMABytes      uint64 // 0 without lanes
	Token         [TokenBytes]byte
	Mode          uint32 // Mode*
	Pad           uint32
	MemoryBytes   uint64 // for MessageReach: whole pages
	MemoryAddress uint64 // for MessageRelease
	Reserved      [5]uint64
}

// AttachReply is what the daemon answers.
type AttachReply struct {
	_               structs.HostLayout
	Magic           uint32
	Version         uint16
	Kind            uint16 // of the request
	Size            uint32 // of this struct
	Errno           int32  // 0, or a positive errno; then the rest is zero
	Descriptors     uint32 // sent along: arena, queues, DMA memory if DMABytes is not zero, drives with DriveBells
	Lanes           uint32
	Depth           uint32
	Drives          uint32
	ArenaBytes      uint64
	QueuesBytes     uint64 // of the queue memory: SessionPageBytes, Lanes x Drives x QueueBlockBytes, DriveShares
	QueueBlockBytes uint64 // one queue pair; nvme.QueueBytes(Depth)
	DMABytes        uint64
	DMABase         uint64
	Nonce           uint64            // of the mount, as in Hello
	SGL             uint32            // 1 if the controllers take SGL data blocks
	CommandBytes    uint32            // largest transfer of one command
	Pollers         uint32            // threads that may sleep on WakeWord: wake them all
	Mode            uint32            // ModeReal if a drive's own queue pairs were given
	DriveIndex      [DrivesMax]uint16 // of the d-th drive
	LBABytes        [DrivesMax]uint16 // of the d-th drive
	Reserved2       [4]uint64         // zero
}

// The queue memory begins with the session page; then, for lane l and the d-th drive, the block at SessionPageBytes +
// (l x Drives + d) x QueueBlockBytes holds a queue pair as nvme.MapQueue lays it out. Words of the session page, each
// in cache lines of its own; byte offsets:
const (
	SessionPageBytes = 4096

	ArmedWord         = 0   // u32: raised by the engine before it rings a doorbell, lowered when its work is done
	WakeWord          = 64  // u32: pollers store a number and sleep; the engine raises armed, swaps in 0, wakes if not 0
	HeartbeatWord     = 128 // u64: counted up by the daemon every HeartbeatMilliseconds
	NonceWord         = 136 // u64: of the mount
	StateWord         = 144 // u32: SessionLive, SessionClosed
	MapGenerationWord = 192 // u64: counted up when any pool's rows have changed
	TicketWord        = 256 // u32: counted up, and woken as a futex, when a ticket of this process finishes

	CountersOffset = 1024 // EngineCounters, written by the engine
	BellsOffset    = 2048 // DriveBells of each drive, written by the daemon before the reply

	TermsOffset = 3072 // DriveTerms of each drive, written by the daemon before the reply

	HeartbeatMilliseconds = 100

	SessionLive   = 1
	SessionClosed = 2
)

// DriveBells lie at BellsOffset of the session page, for one drive after the other: where the doorbells of queue pairs
// of the drive's own can be mapped from. Zero: its queues are the daemon's virtual controller's.
type DriveBells struct {
	_      structs.HostLayout
	Offset uint64 // to map the drive's descriptor at
	Bytes  uint32 // to map: whole pages
	NSID   uint32 // namespace that commands are for
}

// DriveTerms lie at TermsOffset of the session page, for one drive with DriveBells after the other: how its Writes are
// marked, and how it is rung.
type DriveTerms struct {
	_ structs.HostLayout
	// Directive of Writes, so that the SSD keeps apart what goes at different times: type, for CDW12 (0 for none), and
	// specific value, for CDW13, by lifetime.
	Directive uint16
	Specific  [Lifetimes]uint16
	// Buffer is 1 where the controller looks for doorbells in a doorbell buffer (NVMe Doorbell Buffer Config): its
	// descriptor follows the drive's. DoorbellBufferBytes are mapped: a page of shadow doorbells, and a page of event
	// indexes, where the controller says for which value it is to be told. Who rings stores the shadow, then loads the
	// event, with a full barrier between, and writes the register if the value has gone past the event.
	Buffer   uint16
	Reserved [2]uint16 // zero
}

// DoorbellBufferBytes are two pages of 4096 bytes.
const DoorbellBufferBytes = 8192

// PairBells lie at PairOffset of the queue block of a drive with DriveBells: offsets of the pair's doorbells in what
// was mapped, written by the daemon whenever the lane begins. The doorbells of nvme.MapQueue are not used then.
type PairBells struct {
	_      structs.HostLayout
	SQTail uint32
	CQHead uint32
	// The same in each page of the drive's doorbell buffer; 0 without one.
	TailShadow uint32
	HeadShadow uint32
}

// PairOffset is of a queue block, in its page of doorbells.
const PairOffset = 256

// DriveShare says how an engine shares a drive whose own queue pairs it has, since those pass the daemon by. Those of
// the drives lie one after the other behind the last queue block of a real attachment. Arrays are by direction: reads,
// writes. Chunks are what a lane has on the drive at a time. An engine whose chunk may begin, as it finds Grant, raises
// Flight and then looks at Grant again; if that is 0 now it lowers Flight and has begun nothing. One that may not begin
// raises Wanted until it has.
// The daemon sets Grant to 0 and then looks at Flight: so one of the two sees the other. It gives and takes
// Grant as its drive's phase says, and believes nothing but counts: who keeps others waiting is passed by.
type DriveShare struct {
	_          structs.HostLayout
	Wanted     [2]uint32 // by the engine: chunks that wait to begin
	Flight     [2]uint32 // by the engine: chunks that have begun and not ended
	WriteBytes uint64    // by the engine: of the writes among them
	Commands   [2]uint64 // by the engine: that have ended since it attached
	Bytes      [2]uint64 // by the engine: that they moved
	Failed     [2]uint64 // by the engine: of the commands, those with a bad status
	Reserved   [7]uint64 // zero
	// Grant, by the daemon: bytes that the chunks in flight may have, and one that is larger may be alone; 0: none begins.
	// GrantAlways is never taken back.
	Grant     [2]uint32
	Reserved2 [15]uint64 // zero
}

// GrantAlways is the Grant of a drive that knows no phases.
const GrantAlways = 1<<32 - 1

// EngineCounters lie at CountersOffset of the session page: what a process's scheduler and store buffer have counted
// since it attached. The process stores each field at once, some times a second, Version last. The daemon shows them
// with the session's and believes nothing of them. Later versions of the same number only add fields.
type EngineCounters struct {
	_                 structs.HostLayout
	Version           uint32 // EngineCountersVersion; 0: nothing was written
	Reserved          uint32 // zero
	Passes            uint64 // prefills begun
	Layers            uint64 // of them that were computed
	DecodeSteps       uint64
	Bubbles           uint64 // layers before which compute stood
	BubbleNanos       uint64 // time that compute stood for reads
	FirstBubbleNanos  uint64 // of it before first layers
	ReadHiddenNanos   uint64 // reads were in flight, and compute did not stand
	ReadExposedNanos  uint64 // reads were in flight, and compute stood
	WriteNanos        uint64 // deferred writes were in flight
	DeferredObjects   uint64 // stored by way of the store buffer
	DeferredBytes     uint64
	IssuedOffBytes    uint64 // of them that went to the drives because nothing held them back
	IssuedAgeBytes    uint64 // because they were too old to wait
	IssuedHighBytes   uint64 // because the store buffer was nearly full
	IssuedWindowBytes uint64 // in windows of layers
	IssuedDecodeBytes uint64 // in decode steps
	IssuedIdleBytes   uint64 // while nothing computed
	BacklogBytes      uint64 // that wait now
	BacklogAgeNanos   uint64 // of the oldest of them
	OldestAgeNanos    uint64 // that any has reached
	Overruns          uint64 // windows at whose end their writes were in flight
	Beside            uint64 // pieces of writes that were issued beside reads of this process
	Offers            uint64 // prefixes that were asked about
	OffersRefused     uint64 // of them that were not worth restoring
	Estimates         uint64 // passes whose time was estimated before
	EstimatedNanos    uint64 // sum of the estimates
	TookNanos         uint64 // sum of what those passes took
	ErrorNanos        uint64 // sum of the differences
	StoreBytes        uint64 // of the store buffer
	StoreFilledBytes  uint64 // of it in use now
	StoreRefused      uint64 // layers that it had no room for
	StoreBlockedNanos uint64 // time that stores waited for room
	DeclinedBlocks    uint64 // that the mount's admission policy did not want, where the process keeps such
	KeptBlocks        uint64 // of them committed into the process's memory
	KeptHits          uint64 // that were pinned there
	KeptWritten       uint64 // of them brought to the drives then
	KeptEvicted       uint64 // that had to go for others
	SparedBytes       uint64 // of those declined that were not brought to the drives
	DoorbellWrites    uint64 // of SSDs' own doorbell registers
	DoorbellsSaved    uint64 // that doorbell buffers made unnecessary
	KeptFailed        uint64 // of KeptHits, those that could not be brought to the drives
	KeptBad           uint64 // whose bytes were not right any more
}

// EngineCountersVersion is what this version writes.
const EngineCountersVersion = 1

// ErrMessage is what malformed messages are.
var ErrMessage = errors.New("ioctl: malformed attach message")

// QueueOffset is where the queue pair of a lane and the d-th drive lies in the queue memory.
func (r *AttachReply) QueueOffset(lane, d int) uint64 {
	return SessionPageBytes + (uint64(lane)*uint64(r.Drives)+uint64(d))*r.QueueBlockBytes
}

// ShareOffset is where the DriveShare of the d-th drive lies in the queue memory of a real attachment.
func (r *AttachReply) ShareOffset(d int) uint64 {
	return r.QueueOffset(int(r.Lanes), 0) + uint64(d)*uint64(unsafe.Sizeof(DriveShare{}))
}

// NewAttachRequest fills the fixed fields.
func NewAttachRequest(kind uint16) AttachRequest {
	return AttachRequest{Magic: AttachMagic, Version: Version, Kind: kind, Size: uint32(unsafe.Sizeof(AttachRequest{}))}
}

// Bytes is the message as it is sent; it aliases r.
func (r *AttachRequest) Bytes() []byte { return bytesOf(r) }

// ParseAttachRequest decodes a message and checks its fixed fields; limits are the daemon's to check. The errno is
// EPROTO for another version and EINVAL for anything else.
func ParseAttachRequest(b []byte) (AttachRequest, error) {
	var r AttachRequest
	if len(b) != int(unsafe.Sizeof(r)) {
		return r, fmt.Errorf("%w: %d bytes, want %d: %w", ErrMessage, len(b), unsafe.Sizeof(r), EINVAL)
	}
	copy(bytesOf(&r), b)
	switch {
	case r.Magic != AttachMagic:
		return r, fmt.Errorf("%w: magic %#x: %w", ErrMessage, r.Magic, EINVAL)
	case r.Version != Version:
		return r, fmt.Errorf("%w: version %d, this daemon speaks %d: %w", ErrMessage, r.Version, Version, EPROTO)
	case r.Size != uint32(unsafe.Sizeof(r)):
		return r, fmt.Errorf("%w: size field %d: %w", ErrMessage, r.Size, EINVAL)
	case r.Kind < MessageAttach || r.Kind > MessageRelease:
		return r, fmt.Errorf("%w: kind %d: %w", ErrMessage, r.Kind, EINVAL)
	case r.Mode > ModeReal:
		return r, fmt.Errorf("%w: mode %d: %w", ErrMessage, r.Mode, EINVAL)
	case r.Pad != 0 || r.Reserved != [5]uint64{} || r.MemoryBytes != 0 && r.Kind != MessageReach ||
		r.MemoryAddress != 0 && r.Kind != MessageRelease:
		return r, fmt.Errorf("%w: reserved field is not zero: %w", ErrMessage, EINVAL)
	}
	return r, nil
}

// NewAttachReply fills the fixed fields.
func NewAttachReply(kind uint16) AttachReply {
	return AttachReply{Magic: AttachMagic, Version: Version, Kind: kind, Size: uint32(unsafe.Sizeof(AttachReply{}))}
}

// Bytes is the message as it is sent; it aliases r.
func (r *AttachReply) Bytes() []byte { return bytesOf(r) }

// ParseAttachReply decodes a reply and checks its fixed fields and that its sizes fit together.
func ParseAttachReply(b []byte) (AttachReply, error) {
	var r AttachReply
	if len(b) != int(unsafe.Sizeof(r)) {
		return r, fmt.Errorf("%w: %d bytes, want %d", ErrMessage, len(b), unsafe.Sizeof(r))
	}
	copy(bytesOf(&r), b)
	if r.Magic != AttachMagic || r.Version != Version || r.Size != uint32(unsafe.Sizeof(r)) {
		return r, fmt.Errorf("%w: magic %#x version %d size %d", ErrMessage, r.Magic, r.Version, r.Size)
	}
	if r.Lanes > LanesMax || r.Depth > DepthMax || r.Drives > DrivesMax || r.QueueBlockBytes > 1<<24 ||
		r.QueuesBytes > 1<<40 || r.ArenaBytes > ArenaBytesMax || r.DMABytes > 1<<40 {
		return r, fmt.Errorf("%w: reply names more than its limits", ErrMessage)
	}
	if r.Mode > ModeReal {
		return r, fmt.Errorf("%w: reply names mode %d", ErrMessage, r.Mode)
	}
	need := r.QueueOffset(int(r.Lanes), 0)
	if r.Mode == ModeReal {
		need = r.ShareOffset(int(r.Drives))
	}
	if r.Errno == 0 && r.Kind == MessageAttach && need > r.QueuesBytes {
		return r, fmt.Errorf("%w: queues need %d bytes, reply names %d", ErrMessage, need, r.QueuesBytes)
	}
	return r, nil
}

// bytesOf is the memory of a fixed-size struct without pointers.
func bytesOf[T any](p *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p)) }

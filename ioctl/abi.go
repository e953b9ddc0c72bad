// Package ioctl is ABI v1 of a tuttifs mount: ioctl numbers, fixed-size structs, the dispatcher that checks them, the
// attach protocol over a unix socket, the generated C header and the Go client. It knows nothing of volumes or pools:
// the daemon answers through Handler.
//
// Every verb is one _IOWR ioctl on an open file of the mount; its struct begins with Header and is copied in and out
// whole. Integers are little-endian; every struct is a multiple of 8 bytes and has no hidden padding. Fields named
// Reserved must be zero on input. Fields marked out are ignored on input.
package ioctl

import "structs"

// Limits of version 1.
const (
	Version     = 1     // ABI version, in every Header
	StructBytes = 16376 // the largest struct FUSE carries, rounded down to 8

	NameBytes       = 64    // pool and family names, NUL-padded; the last byte may be used
	TokenBytes      = 16    // session tokens
	SocketPathBytes = 108   // sun_path
	BatchMax        = 65536 // keys, items or grants named by one verb
	ArenaBytesMax   = 64 << 20
	ArenaBytesMin   = 4096
	IdentityBytes   = 16384 // canonical JSON of a pool's identity
	GeometryBytes   = 8 << 20
	DrivesMax       = 64
	UnitBytes       = 4096 // addresses on drives count these, whatever the LBA size
	NoSlot          = ^uint32(0)
	DrivePage       = 64    // drives in one DRIVES answer
	EventPage       = 64    // pools in one EVENTS answer
	ChangesKept     = 65536 // of a pool: who is further behind loses some
)

// Header begins every struct.
type Header struct {
	_       structs.HostLayout
	Size    uint32 // of the whole struct
	Version uint16 // Version
	Flags   uint16 // of the verb; unknown bits are refused
}

// Target kinds.
const (
	TargetPool   = 1
	TargetFamily = 2 // all pools of a family: they hit and commit together
)

// Target is what a verb acts on.
type Target struct {
	_        structs.HostLayout
	Kind     uint16 // TargetPool or TargetFamily
	ID       uint16 // of the pool or the family
	Reserved uint32
}

// Span names bytes of the calling process's arena. The daemon copies an input span before it looks at it, and writes
// results into an output span; a span outside the arena is EFAULT.
type Span struct {
	_      structs.HostLayout
	Offset uint64 // from the arena's start, a multiple of 8
	Bytes  uint64
}

// Hello flags in Hello.State.
const (
	StateReadOnly = 1 << 0 // the volume is mounted read-only
)

// Hello describes mount and volume. It needs no session.
type Hello struct {
	_            structs.HostLayout
	Header       Header
	UUID         [16]byte `abi:"out"`
	Label        [64]byte `abi:"out"`
	Nonce        uint64   `abi:"out"` // of this mount: changes with every daemon
	Epoch        uint64   `abi:"out"` // of the volume
	SegmentBytes uint64   `abi:"out"`
	TotalBytes   uint64   `abi:"out"` // what files could occupy
	UsedBytes    uint64   `abi:"out"`
	FreeBytes    uint64   `abi:"out"`
	ArenaMax     uint64   `abi:"out"` // largest arena
	DMAMax       uint64   `abi:"out"` // most DMA memory of one process
	Width        uint32   `abi:"out"` // entries of a row
	Drives       uint32   `abi:"out"`
	Pools        uint32   `abi:"out"`
	State        uint32   `abi:"out"` // State* bits
	LanesMax     uint32   `abi:"out"`
	DepthMax     uint32   `abi:"out"`
	Tickets      uint32   `abi:"out"` // tickets of one process that may be outstanding
	CommandBytes uint32   `abi:"out"` // largest transfer of one command
	Reserved     [4]uint64
}

// Drive kinds.
const (
	DriveFile   = 0
	DriveBlock  = 1
	DriveMemory = 2
)

// Drive flags.
const (
	DriveDirect   = 1 << 0 // I/O bypasses the page cache
	DriveMetadata = 1 << 1 // holds a copy of journal and catalog
)

// DriveEntry describes one member drive.
type DriveEntry struct {
	_            structs.HostLayout
	UUID         [16]byte
	Name         [64]byte // tail of the path, NUL-padded
	Bytes        uint64
	ReadErrors   uint64
	WriteErrors  uint64
	Segments     uint32
	FreeSegments uint32
	LBABytes     uint32
	Index        uint16
	Kind         uint8 // Drive* kinds
	Flags        uint8 // Drive* flags
}

// Drives lists member drives from the First-th on.
type Drives struct {
	_        structs.HostLayout
	Header   Header
	First    uint32
	Reserved uint32
	Count    uint32                `abi:"out"` // entries filled
	Total    uint32                `abi:"out"`
	Entries  [DrivePage]DriveEntry `abi:"out"`
}

// Session is SESSION_CREATE and SESSION_JOIN: it makes the calling process a member of a new session, or of the one
// whose token it has. The membership belongs to this open file and to the process, and ends with either.
type Session struct {
	_          structs.HostLayout
	Header     Header
	Token      [TokenBytes]byte      // in for JOIN, out for CREATE
	ArenaBytes uint64                // wanted; 0 for 1 MiB. Out: what attaching will give
	ID         uint32                `abi:"out"`
	Member     uint32                `abi:"out"` // names this process in the attach request
	SocketPath [SocketPathBytes]byte `abi:"out"` // where to attach, NUL-terminated
	Pad        uint32                `abi:"out"` // zero
	Reserved   [2]uint64
}

// Arena tells which arena this open file's batches lie in. ENXIO before the process has attached.
type Arena struct {
	_       structs.HostLayout
	Header  Header
	Bytes   uint64   `abi:"out"`
	Inode   uint64   `abi:"out"` // st_ino of the arena's memfd: check that the mapping is the right one
	Session uint32   `abi:"out"`
	Member  uint32   `abi:"out"`
	Name    [64]byte `abi:"out"` // of the memfd, as /proc/PID/maps shows it
}

// PoolOpen opens or creates a pool. Equal name, identity and geometry open the existing one; anything else is EEXIST.
type PoolOpen struct {
	_             structs.HostLayout
	Header        Header
	Identity      Span // canonical or plain JSON, at most IdentityBytes
	Geometry      Span // as stripe.Geometry encodes it, trailers included
	MinBytes      uint64
	MaxBytes      uint64 // 0: no limit but the volume's
	TokensPerFile uint32
	TrailingHit   uint32 // hit rule in its family: 0 ALL, n TRAILING n
	MaxSlots      uint32 // 0: no limit
	ChecksumAlg   uint32 // 1
	Name          [NameBytes]byte
	Family        [NameBytes]byte // empty for none
	Ticket        uint64          `abi:"out"` // done when the pool is durable
	Target        Target          `abi:"out"` // the pool
	FamilyTarget  Target          `abi:"out"` // kind 0 for none
	Reserved      [4]uint64
}

// Selectors of PoolInfo, in Header.Flags: at most one. Without them Target selects.
const (
	PoolByName  = 1 << 0
	PoolByIndex = 1 << 1 // the Index-th pool, for listing; ENOENT behind the last
)

// PoolInfo describes a pool.
type PoolInfo struct {
	_             structs.HostLayout
	Header        Header
	Name          [NameBytes]byte // in with PoolByName
	Target        Target          // in without flags
	Index         uint32          // in with PoolByIndex
	Reserved      uint32
	Family        [NameBytes]byte `abi:"out"`
	Digest        [32]byte        `abi:"out"` // of the identity
	SlotBytes     uint64          `abi:"out"` // occupied by one file
	MinBytes      uint64          `abi:"out"`
	MaxBytes      uint64          `abi:"out"`
	MapGeneration uint64          `abi:"out"`
	TokensPerFile uint32          `abi:"out"`
	TrailingHit   uint32          `abi:"out"`
	MaxSlots      uint32          `abi:"out"`
	ChecksumAlg   uint32          `abi:"out"`
	Objects       uint32          `abi:"out"` // of one file, trailers included
	Ranks         uint32          `abi:"out"`
	FamilyTarget  Target          `abi:"out"` // kind 0 for none
}

// Layout fetches what turns (slot, object) into an address, except the rows.
type Layout struct {
	_             structs.HostLayout
	Header        Header
	Target        Target // a pool
	Geometry      Span   // out span; EOVERFLOW if it is too small, 0 bytes ask for GeometryBytes alone
	GeometryBytes uint64 `abi:"out"`
	EntryUnits    uint64 `abi:"out"`
	SlotUnits     uint64 `abi:"out"`
	MapGeneration uint64 `abi:"out"`
	SlotsPerRow   uint32 `abi:"out"`
	Slots         uint32 `abi:"out"` // one more than the highest slot that a row backs
	Width         uint32 `abi:"out"`
	ChecksumAlg   uint32 `abi:"out"`
}

// RowEntry is one of the W entries of a row.
type RowEntry struct {
	_        structs.HostLayout
	Unit     uint64 // first unit of the entry
	Drive    uint16
	Reserved [3]uint16
}

// RowHead begins a row in the arena; Width RowEntry follow.
type RowHead struct {
	_      structs.HostLayout
	Number uint32 // slot = Number x slots per row + index
	Width  uint32
}

// Rows fetches rows numbered First or more, in order. Pages that show different map generations do not fit together:
// begin again.
type Rows struct {
	_             structs.HostLayout
	Header        Header
	Target        Target // a pool
	Rows          Span   // out span: Count rows of RowBytes
	First         uint32
	Reserved      uint32
	MapGeneration uint64 `abi:"out"`
	RowBytes      uint32 `abi:"out"` // sizeof(RowHead) + Width x sizeof(RowEntry)
	Count         uint32 `abi:"out"`
	Total         uint32 `abi:"out"` // rows of the pool
	Next          uint32 `abi:"out"` // First of the next page; 0 behind the last row
}

// MapAck says that this process uses map generation MapGeneration or a later one.
type MapAck struct {
	_             structs.HostLayout
	Header        Header
	Target        Target // a pool
	MapGeneration uint64
	Current       uint64 `abi:"out"` // the pool's generation now
}

// Peek is the length of the longest prefix of keys that is present. It has no side effects.
type Peek struct {
	_        structs.HostLayout
	Header   Header
	Target   Target
	Keys     Span // KeyBytes each
	Tenant   uint32
	Reserved uint32
	Count    uint32 `abi:"out"` // leading keys present
	Pad      uint32 `abi:"out"` // zero
}

// KeyBytes is the size of one key in the arena.
const KeyBytes = 32

// Grant states.
const (
	GrantNone    = 0
	GrantPinned  = 1 // readable
	GrantNew     = 2 // reserved: write it
	GrantJoined  = 3 // reserved by another rank of this session under the same reserve id: write this rank's objects
	GrantExists  = 4 // committed already; nothing to write
	GrantPending = 5 // another engine is storing it
	// GrantDeclined: the admission policy does not want it on the drives; the reservation goes on without it
	GrantDeclined = 6
)

// Grant is one slot leased to the session. For a family, grants lie [key][pool], pools in the family's order.
type Grant struct {
	_          structs.HostLayout
	Slot       uint32 // NoSlot where Status says none
	Tokens     uint32
	Generation uint64
	Seed       [16]byte // of the slot's checksums
	Status     uint8    // Grant*
	Lifetime   uint8    // Lifetime*, of what is to be written
	Reserved   [6]uint8
}

// Lifetimes: how long what is written will probably stay, compared with what is written at the same time. Whoever
// writes by an SSD's own queue pairs looks the directive up in DriveTerms.
const (
	LifetimeNormal   = 0
	LifetimeMetadata = 1 // the daemon's own; no grant has it
	LifetimeShort    = 2
	LifetimeLong     = 3
	Lifetimes        = 4
)

// Pin leases the longest present prefix of keys for reading. A second PIN with one request id answers the same, for all
// processes of the session, until it is released. One that finds nothing keeps nothing: the next may find something.
type Pin struct {
	_             structs.HostLayout
	Header        Header
	Target        Target
	Keys          Span   // KeyBytes each
	Grants        Span   // out span with room for keys x pools grants
	Request       uint64 // chosen by the caller, unique in its session while pinned
	Tenant        uint32
	Reserved      uint32
	MapGeneration uint64 `abi:"out"` // sum over the target's pools: refresh the maps when it moved
	Count         uint32 `abi:"out"` // leading keys pinned
	Pools         uint32 `abi:"out"` // grants a key
}

// Release ends the pins of a request. Releasing twice, or what has expired, is ENOENT.
type Release struct {
	_       structs.HostLayout
	Header  Header
	Target  Target
	Request uint64
}

// ReserveItem is one file to be stored.
type ReserveItem struct {
	_        structs.HostLayout
	Key      [KeyBytes]byte
	Parent   [KeyBytes]byte // zero for a root
	Tokens   uint32
	Position uint32 // blocks before it in its chain
}

// ReservePartial, in Header.Flags, grants a leading run where not all fit.
const ReservePartial = 1 << 0

// Reserve leases slots for writing: all or nothing unless ReservePartial. Other ranks join by the same reserve id.
type Reserve struct {
	_             structs.HostLayout
	Header        Header
	Target        Target
	Items         Span // ReserveItem each
	Grants        Span // out span with room for items x pools grants
	Reserve       uint64
	Tenant        uint32
	Reserved      uint32
	MapGeneration uint64 `abi:"out"` // as in Pin
	Count         uint32 `abi:"out"` // leading items granted
	Pools         uint32 `abi:"out"`
}

// Commit says that this process has written all objects of Rank for every slot of the reservation.
type Commit struct {
	_        structs.HostLayout
	Header   Header
	Target   Target
	Reserve  uint64
	Rank     uint16
	Reserved [3]uint16
	Ticket   uint64 `abi:"out"` // done when the last rank's commit is durable
}

// Abort gives a reservation's uncommitted slots back.
type Abort struct {
	_       structs.HostLayout
	Header  Header
	Target  Target
	Reserve uint64
}

// ReportBad says that a reader found damage. The daemon rereads the slot, and evicts the file if it agrees.
type ReportBad struct {
	_          structs.HostLayout
	Header     Header
	Target     Target // a pool
	Slot       uint32
	Reserved   uint32
	Generation uint64
	Ticket     uint64 `abi:"out"`
}

// Evict flags: exactly one.
const (
	EvictCount  = 1 << 0 // up to Count files, by the policy's choice
	EvictKeys   = 1 << 1 // the named files
	EvictPrefix = 1 << 2 // the named files and their ancestors up to the first that another chain shares
)

// Evict frees files of a pool. The ticket's Value is how many. Pinned files are doomed or left, never torn away.
type Evict struct {
	_        structs.HostLayout
	Header   Header
	Target   Target // a pool
	Keys     Span   // KeyBytes each, for EvictKeys and EvictPrefix
	Count    uint32 // for EvictCount
	Reserved uint32
	Ticket   uint64 `abi:"out"`
}

// Unlink dooms files: a miss at once, the slot free at the last unpin.
type Unlink struct {
	_        structs.HostLayout
	Header   Header
	Target   Target // a pool
	Keys     Span   // KeyBytes each
	Count    uint32 `abi:"out"` // files that were there
	Pad      uint32 `abi:"out"` // zero
	Reserved uint64
}

// Extent is where one object lies.
type Extent struct {
	_      structs.HostLayout
	Unit   uint64
	Units  uint32
	Drive  uint16
	Object uint16
}

// Extents locates a slot's objects from First on.
type Extents struct {
	_          structs.HostLayout
	Header     Header
	Target     Target // a pool
	Extents    Span   // out span
	Generation uint64 // of the file; 0 for whatever the slot holds
	Slot       uint32
	First      uint32
	Count      uint32 `abi:"out"`
	Total      uint32 `abi:"out"`
}

// Stats are a pool's counters, monotonic since the mount, and gauges.
type Stats struct {
	_             structs.HostLayout
	Header        Header
	Target        Target // a pool
	Lookups       uint64 `abi:"out"` // blocks asked of PIN: hits + misses
	Hits          uint64 `abi:"out"`
	Misses        uint64 `abi:"out"`
	Reserved      uint64
	Reserves      uint64 `abi:"out"`
	Commits       uint64 `abi:"out"`
	Aborts        uint64 `abi:"out"`
	Evicted       uint64 `abi:"out"`
	Doomed        uint64 `abi:"out"`
	Bad           uint64 `abi:"out"`
	Files         uint64 `abi:"out"` // gauge, as all that follow
	FilesPinned   uint64 `abi:"out"`
	FilesReserved uint64 `abi:"out"`
	SlotsFree     uint64 `abi:"out"`
	SlotsFreeing  uint64 `abi:"out"`
	SlotsUsed     uint64 `abi:"out"`
	BytesUsed     uint64 `abi:"out"`
	BytesCapacity uint64 `abi:"out"`
}

// Event is what has happened to one pool since the mount.
type Event struct {
	_             structs.HostLayout
	Target        Target
	MapGeneration uint64
	Committed     uint64
	Evicted       uint64
	Doomed        uint64
	Bad           uint64
}

// Events polls all pools at once; compare with the last answer.
type Events struct {
	_        structs.HostLayout
	Header   Header
	First    uint32 // index of the first pool wanted
	Reserved uint32
	Count    uint32           `abi:"out"`
	Total    uint32           `abi:"out"`
	Events   [EventPage]Event `abi:"out"`
}

// Kinds of changes.
const (
	ChangeStored  = 1 // found from now on
	ChangeRemoved = 2 // a miss from now on: evicted, unlinked, damaged or on a lost drive
)

// Change is what happened to one file.
type Change struct {
	_        structs.HostLayout
	Key      [KeyBytes]byte
	Tenant   uint32
	Kind     uint8 // Change* kinds
	Reserved [3]uint8
}

// Changes tells what happened to a pool's files since it was asked last, in order. A pool keeps its last ChangesKept
// changes, from when it is first asked for them.
type Changes struct {
	_       structs.HostLayout
	Header  Header
	Target  Target // a pool
	Changes Span   // out span: Change each
	Since   uint64 // Next of the last answer; 0: from now on
	Next    uint64 `abi:"out"`
	Lost    uint64 `abi:"out"` // changes before these that are no longer kept
	Count   uint32 `abi:"out"`
	Pad     uint32 `abi:"out"` // zero
}

// Present says of each key whether its file is there, whatever is before it. It has no side effects.
type Present struct {
	_        structs.HostLayout
	Header   Header
	Target   Target // a pool
	Keys     Span   // KeyBytes each
	Present  Span   // out span: a byte for each key, 1 or 0
	Tenant   uint32
	Reserved uint32
	Count    uint32 `abi:"out"` // keys that are there
	Pad      uint32 `abi:"out"` // zero
}

// Ticket states.
const (
	TicketPending = 0
	TicketDone    = 1
	TicketFailed  = 2 // Errno says why
)

// Ticket asks for the state of what a verb started. A finished ticket is forgotten when as many newer ones exist as
// may be outstanding (Hello.Tickets).
type Ticket struct {
	_        structs.HostLayout
	Header   Header
	ID       uint64
	State    uint32 `abi:"out"` // Ticket*
	Errno    int32  `abi:"out"` // positive, with TicketFailed
	Value    uint64 `abi:"out"` // EVICT: files evicted. POOL_OPEN, COMMIT, REPORT_BAD: zero
	Reserved uint64
}

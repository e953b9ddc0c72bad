package cuda

// Parameters of the ring's kernels (ring.cu). Every kernel takes one of these structs by value; ring.cu has the same
// structs, and asserts their sizes. Addresses are what the GPU sees; structs are little-endian and padded by hand.

// KernelIOCTX is one I/O as kernels read it; gio.IOCTX has the same bytes.
type KernelIOCTX struct {
	Desc   uint64 // [63:56] generation, [55:44] region, [43:0] byte offset (flat) or index of the first run (table)
	Slot   uint32
	Object uint16
	Flags  uint16
}

// KernelObject is one object of the layout table; gio's objectPlace has the same bytes.
type KernelObject struct {
	Offset   uint32 // units from the set's base on its entry
	Bytes    uint32 // payload
	Units    uint16
	Position uint16 // in the layout's order, modulo the width
	_        uint32
}

// KernelRegion is one entry of the table of registered memory, indexed by a descriptor's region.
type KernelRegion struct {
	Base  uint64 // flat: address of byte 0; table: address of its KernelRun entries
	Limit uint64 // flat: bytes; table: entries
	// IO is added (modulo 2^64) to an address of the region to make it one that controllers know. Entries of a table
	// have it added already. 0 where not direct.
	IO uint64
	// TableIO and PRPIO are what controllers know the table's entries and its packed PRP lists by (ListBytes for each
	// entry; 0 without lists). Used where direct. A flat region that is direct with PRP lies in the DMA memory, for
	// which BuildParams has the windows.
	TableIO, PRPIO uint64
	ListBytes      uint32
	Kind           uint8 // RegionNone, RegionFlat, RegionTable
	Generation     uint8
	Direct         uint8 // controllers reach it
	Padded         uint8 // every object has room for whole units
}

// Kinds of regions.
const (
	RegionNone uint8 = iota
	RegionFlat
	RegionTable
)

// KernelRun is a contiguous range of registered memory: an SGL data block descriptor (NVMe Base 2.0 section 4.1.2)
// whose address is the GPU's own plus the region's IO. An object's payload fills consecutive entries; the last one may
// be longer than what is left of it. No entry is empty.
type KernelRun struct {
	Address uint64
	Bytes   uint32
	_       [3]byte
	Type    uint8 // 0: data block, address
}

// KernelTables is the extent map of one pool and the registered memory.
type KernelTables struct {
	Objects     uint64 // KernelObject[ObjectCount]
	Entries     uint64 // u64[EntryCount]: drive in the top 16 bits, first unit below; all ones where unmapped
	Drives      uint64 // i16[DriveCount]: a drive's place in a lane, -1 for none
	Regions     uint64 // KernelRegion[4096]
	SlotUnits   uint64
	EntryCount  uint64
	ObjectCount uint32
	DriveCount  uint32
	Width       uint32
	SlotsPerRow uint32
}

// KernelCells says where the cell of a batch's IOCTX lies within its chunk: with k its place in the chunk,
// (k / Group) * Stride + Offsets[k mod Group]. Chunks begin at multiples of Group.
type KernelCells struct {
	Offsets uint64 // u32[Group]
	Stride  uint32 // bytes, whole units
	Group   uint32 // IOCTXs
}

// KernelChunk is a piece of a batch. It is bounced as a whole, or direct as a whole: with Cells 0, an IOCTX whose
// memory controllers cannot reach as it is gets OutcomeMemory; otherwise every IOCTX has a cell, even one that could be
// direct.
type KernelChunk struct {
	Cells uint64 // build: I/O address of the lane's cells; harvest and gather: GPU address of the staging; 0: direct
	First uint32 // its first IOCTX
	Count uint32
	Lane  uint32
	_     uint32
}

// KernelQueue is the state of one queue pair. Build reads it and leaves it alone: the host counts on by Counts.
type KernelQueue struct {
	SQ, CQ         uint64 // entries, in pinned memory
	SQTail, CQHead uint64 // doorbells (polling kernel only)
	Mask           uint32
	Tail           uint32 // where the next command goes
	Head           uint32 // next completion entry (polling kernel only)
	Phase          uint32 // of the entry at Head, 0 or 1 (polling kernel only); PhaseBad: quiesce the queue first
	FirstID        uint32 // command id of the next command, modulo 2^16
	LBAShift       uint32 // of units: 0 or 3
	NSID           uint32 // namespace that commands are for
	_              uint32
}

// KernelCount is what a chunk has on one drive.
type KernelCount struct {
	Commands uint32
	Units    uint32 // that they move
}

// PhaseBad is the Phase of a queue that the polling kernel left with commands outstanding or after a completion that it
// did not expect.
const PhaseBad = 2

// BuildParams of tuttifs_build: writes the commands of a batch's chunks, in the order of the chunks, one block a queue
// (grid: lanes * drives; block lane*Drives+drive). Command k of a chunk on a drive is that of the k-th IOCTX that lies
// there and was not refused. A queue's commands of one launch must fit it: the host sees to that. It sets Outcomes of
// IOCTXs that can never be commands, writes Counts, makes all of it visible to the host and then counts its blocks in
// Done.
type BuildParams struct {
	Tables   KernelTables
	Cells    KernelCells
	IOCTXs   uint64 // KernelIOCTX[]
	Chunks   uint64 // KernelChunk[ChunkCount]
	Queues   uint64 // KernelQueue[Lanes*Drives], [lane*Drives+drive]
	Counts   uint64 // out: KernelCount[ChunkCount*Drives], [chunk*Drives+drive]
	Outcomes uint64 // u8[]: by IOCTX; written for refused ones only
	Done     uint64 // u32, in pinned memory: the last block to end adds the number of all
	Blocks   uint64 // u32, in device memory, 0: those that have ended
	// PRP windows over the DMA memory for bounced and flat direct transfers: I/O addresses of window 1 and of page 0
	// of the DMA memory, as gio's prpTable. Unused with SGL.
	PRPBase, PRPDMA uint64
	ChunkCount      uint32
	Lanes           uint32
	Drives          uint32
	CellBytes       uint32 // bytes of cells of a lane: a longer object is refused
	Write           uint8
	SGL             uint8
	_               [6]byte
}

// Outcomes of an IOCTX, a byte each. What is not OutcomeOK when harvest runs is zeroed.
const (
	OutcomeOK       uint8 = iota
	OutcomeUnmapped       // slot or object is not in the map, or its drive has no queue
	OutcomeMemory         // descriptor is not registered, too short, or cannot be reached in this mode
	OutcomeInvalid        // flags
	OutcomeFailed         // set by the host: bad status, time-out, protocol
	OutcomeChecksum       // set by harvest: another sum than expected
	OutcomeTimeout        // set by the polling kernel: no completion before the deadline
	OutcomeProtocol       // set by the polling kernel: was outstanding when an id came that was unknown or came twice
	OutcomePending        // set by the polling kernel: never issued, since its queue had ended with OutcomeProtocol
)

// SumsParams say where the checksums of a layer's objects are. IOCTX i is object Ordinals[i mod PerSlot] (an ordinal in
// the rank) of slot Active[i / PerSlot] (or i / PerSlot where Active is 0).
type SumsParams struct {
	Seeds    uint64 // two u64 a slot; 0: no checksums
	Sums     uint64 // u64[slot*RankObjects + ordinal]: read by harvest, written by gather
	Active   uint64 // u32[]
	Ordinals uint64 // u16[PerSlot]
	PerSlot  uint32
	RankObjs uint32
	Rank     uint32
	_        uint32
}

// MoveThreads is the largest block of harvest and gather, and the best one: it has half of an SM's registers, and so
// fits where one of two blocks of an attention kernel has ended. A block that needs all of them waits until an SM is
// empty, and with the greatest priority it keeps every SM that falls partly free from compute until then.
const MoveThreads = 256

// HarvestParams of tuttifs_harvest: for each IOCTX of the chunks, copies its payload from the staging to its runs,
// verifies its sum on the way, and zeroes the runs where Outcomes says that it failed or the sum is another. Direct
// chunks are verified in place. Any grid; blocks of at most MoveThreads.
type HarvestParams struct {
	Tables     KernelTables
	Cells      KernelCells
	Sums       SumsParams
	IOCTXs     uint64
	Chunks     uint64
	Outcomes   uint64
	Done       uint64 // as in BuildParams
	Blocks     uint64
	ChunkCount uint32
	_          uint32
}

// GatherParams of tuttifs_gather: the way back. Copies runs to the staging, zeroes what follows the payload up to the
// whole unit, and writes the sums. IOCTXs whose Outcome is not OutcomeOK are left out.
type GatherParams = HarvestParams

// StridedRun is one run of every block, as allocators lay them: block b's begins at Base + b*Stride.
type StridedRun struct {
	Base   uint64
	Stride uint64
	Bytes  uint32
	_      uint32
}

// RegisterParams of tuttifs_register: writes a table region. Entry (class*Blocks + block)*Runs + run is run number run
// of the class; and with Lists, the PRP list of each run, packed.
type RegisterParams struct {
	Strided   uint64 // StridedRun[Classes*Runs]
	Table     uint64 // out: KernelRun[Classes*Blocks*Runs]
	Lists     uint64 // out, or 0: ListBytes a run; entries are I/O addresses of the pages after the first
	IO        uint64 // as in KernelRegion
	Blocks    uint64
	Classes   uint32
	Runs      uint32
	ListBytes uint32
	_         uint32
}

// PollParams of tuttifs_poll, the polling executor: one block a queue serves the IOCTXs of its lane (i mod Lanes) and
// drive from build to harvest: writes commands, rings, polls its completion queue (thread i at head + i), copies
// between cells and runs itself. It ends when all are done, the deadline has passed or Stop is set; what is not done
// then is OutcomeTimeout. Outcomes and Statuses are written for all, and targets of reads that were refused, failed or
// have another sum are zeroed; those of OutcomeTimeout, OutcomeProtocol and OutcomePending are left for the host, since
// a controller may still write to them. Queues gives back tail, head, phase and first id; after PhaseBad the queue must
// be quiesced. Any block size that is a multiple of 32.
type PollParams struct {
	Tables          KernelTables
	Sums            SumsParams
	IOCTXs          uint64
	Queues          uint64 // KernelQueue[Lanes*Drives], read and written
	Cells           uint64 // u64[Lanes]: GPU address of each lane's cells, divided among its drives; 0: direct
	CellsIO         uint64 // u64[Lanes]: their I/O addresses
	Outcomes        uint64
	Statuses        uint64 // u16[]: status field of the completion, by IOCTX
	Done, Blocks    uint64 // as in BuildParams
	Stop            uint64 // u32 in pinned memory, or 0: not 0 ends the kernel as the deadline does
	PRPBase, PRPDMA uint64
	DeadlineNanos   uint64 // from the kernel's start, by globaltimer
	Count           uint32 // IOCTXs
	Lanes           uint32
	Drives          uint32
	CellBytes       uint32 // of a lane
	CellStride      uint32 // of one command
	Depth           uint32 // most commands in flight in one queue
	Write           uint8
	SGL             uint8
	_               [6]byte
}

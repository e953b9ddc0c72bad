// Package extentmap is the mounted volume: drives, labels, rows, record tables and journal. It is the only writer of metadata.
package extentmap

import (
	"errors"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

var (
	ErrMissing     = errors.New("extentmap: a member drive is missing")
	ErrForeign     = errors.New("extentmap: not a drive of this volume")
	ErrDuplicate   = errors.New("extentmap: two copies of one drive")
	ErrStale       = errors.New("extentmap: drive is older than the volume")
	ErrNewerFormat = errors.New("extentmap: format not understood by this version")
	ErrBusy        = errors.New("extentmap: volume is in use")
	ErrCorrupt     = errors.New("extentmap: metadata is damaged")
	ErrReadOnly    = errors.New("extentmap: volume is mounted read-only")
	ErrNoSpace     = errors.New("extentmap: no space left")
	// ErrAgain: space is being freed but not durably yet, or the journal is full; try again.
	ErrAgain    = errors.New("extentmap: try again")
	ErrExists   = errors.New("extentmap: exists with another identity or geometry")
	ErrMismatch = ErrExists
)

// FormatOptions of mkfs. Zero fields take defaults.
type FormatOptions struct {
	Label        string
	UUID         [16]byte
	Width        int    // W; 4, or the number of drives if fewer
	SegmentBytes uint64 // power of two; by default the largest drive / 16384 rounded up to a power of two, 256 KiB..1 GiB
	JournalBytes uint64
	Force        bool // overwrite a known signature
}

// FormatPlan is what Format will do or did: printed by mkfs and `mkfs -n`.
type FormatPlan struct {
	UUID          [16]byte
	Label         string
	Width         int
	SegmentBytes  uint64
	JournalBytes  uint64
	MetadataBytes uint64 // per drive
	UsableBytes   uint64
	Drives        []DriveInfo
}

// Plan computes the layout without writing.
func Plan(drives []drive.Drive, o FormatOptions) (*FormatPlan, error) { panic("stub") }

// Format writes labels, superblocks, an empty journal and catalog to the drives, and flushes.
func Format(drives []drive.Drive, o FormatOptions) (*FormatPlan, error) { panic("stub") }

// Options of Open.
type Options struct {
	ReadOnly bool
	// Open opens one path; tests put recording, faulty or memory drives here. nil means drive.Open.
	Open func(path string, o drive.Options) (drive.Drive, error)
	// Paths within the given drives' directories are searched for the other members unless NoScan.
	NoScan bool
	// Discard freed slots; nil means on for block devices, off for files.
	Discard *bool
	// CheckpointSeconds between checkpoints; 0 means 30. Journal pressure triggers them too.
	CheckpointSeconds int
	// FreeWatermark: see Pool.Alloc.
}

// Open mounts the volume whose members are found from any of the paths (devices or files; their directories are scanned).
func Open(paths []string, o Options) (*Volume, error) { panic("stub") }

// OpenDrives mounts from drives opened by the caller (memory drives of tests, benches and replay --metadata-only).
func OpenDrives(drives []drive.Drive, o Options) (*Volume, error) { panic("stub") }

// Volume is a mounted volume. Safe for concurrent use.
type Volume struct{ _ int }

// DriveInfo describes one member.
type DriveInfo struct {
	Index        uint16
	UUID         [16]byte
	Name         string
	Kind         drive.Kind
	Bytes        uint64
	LBABytes     int
	Direct       bool
	Metadata     bool // holds a copy of journal and catalog
	Segments     uint32
	FreeSegments uint32
	ReadErrors   uint64
	WriteErrors  uint64
}

// Info describes the volume.
type Info struct {
	UUID                           [16]byte
	Label                          string
	Epoch                          uint64
	Nonce                          uint64 // of this mount
	Width                          int
	SegmentBytes                   uint64
	ReadOnly                       bool
	Draft                          bool
	Drives                         []DriveInfo
	TotalBytes                     uint64 // what files could occupy if all segments were rows (metadata taken off)
	FreeBytes                      uint64 // unassigned segments
	JournalBytes, JournalUsedBytes uint64
	Checkpoints, Transactions      uint64
}

func (v *Volume) Info() Info                     { panic("stub") }
func (v *Volume) Drive(index uint16) drive.Drive { panic("stub") }

// Close checkpoints, marks the labels clean and releases the drives. Abandon releases them without writing (kill -9 in tests).
func (v *Volume) Close() error { panic("stub") }
func (v *Volume) Abandon()     { panic("stub") }

// Checkpoint writes all dirty metadata in place and advances the journal's head.
func (v *Volume) Checkpoint() error { panic("stub") }

// NextGeneration is unique in the volume's life: (mount nonce, epoch<<40 | counter).
func (v *Volume) NextGeneration() (nonce, generation uint64) { panic("stub") }

// PoolSpec is a pool's durable description.
type PoolSpec struct {
	Name           string // directory name: 1..64 bytes of [A-Za-z0-9._-], not starting with a dot
	IdentityDigest [32]byte
	Identity       []byte // canonical JSON, at most 16 KiB; opaque here
	Geometry       stripe.Geometry
	TokensPerFile  uint32
	Family         string // "" for none
	TrailingHit    uint32 // 0: ALL; n: TRAILING n
	MinBytes       uint64 // kept for this pool
	MaxBytes       uint64 // 0 means no limit but the volume
	MaxSlots       uint32 // cap on live files, 0 means by bytes only
	ChecksumAlg    uint8  // 1
}

// PoolID names a pool for the volume's life.
type PoolID uint16

// Tenant is a quota holder. ID 0 is the default tenant.
type Tenant struct {
	ID         uint32
	Name       string
	QuotaBytes uint64 // 0 means none
}

// Family is a set of pools that hit and commit together.
type Family struct {
	ID    uint16
	Name  string
	Pools []PoolID
}

func (v *Volume) Pools() []*Pool           { panic("stub") }
func (v *Volume) PoolByID(id PoolID) *Pool { panic("stub") }
func (v *Volume) Families() []Family       { panic("stub") }
func (v *Volume) Tenants() []Tenant        { panic("stub") }

// CreatePool is idempotent for an equal spec (name, digest, geometry); ErrExists otherwise. The pool is usable when the ticket is done.
func (v *Volume) CreatePool(spec PoolSpec) (*Pool, *Ticket, error) { panic("stub") }

// SetTenant adds or changes a tenant.
func (v *Volume) SetTenant(t Tenant) (*Ticket, error) { panic("stub") }

// SetPoolLimits changes minimum, maximum and slot cap.
func (v *Volume) SetPoolLimits(id PoolID, minBytes, maxBytes uint64, maxSlots uint32) (*Ticket, error) {
	panic("stub")
}

// Resolve finds whose bytes a unit of a drive holds. Lock-free: called for every command of the virtual controller.
func (v *Volume) Resolve(driveIndex uint16, unit uint64) (p *Pool, slot uint32, object uint16, within uint32, ok bool) {
	panic("stub")
}

// Pool is one pool's rows and records.
type Pool struct{ _ int }

func (p *Pool) ID() PoolID             { panic("stub") }
func (p *Pool) Spec() PoolSpec         { panic("stub") }
func (p *Pool) Layout() *stripe.Layout { panic("stub") }
func (p *Pool) SlotBytes() uint64      { panic("stub") } // occupied on the drives
func (p *Pool) SlotsPerRow() uint32    { panic("stub") }
func (p *Pool) EntryUnits() uint64     { panic("stub") }

// Slots is one more than the highest slot number that any row backs (slot = row x SlotsPerRow + index; rows may be absent).
func (p *Pool) Slots() uint32 { panic("stub") }

// Row is a row's number in its pool and where its entries lie.
type Row struct {
	Number uint32
	Drives []uint16 // W
	Units  []uint64 // W: first unit of each entry
}

// Rows returns all rows; Generation changes whenever they do.
func (p *Pool) Rows() []Row        { panic("stub") }
func (p *Pool) Generation() uint64 { panic("stub") }

// Extent locates one object: drive, first unit, units.
func (p *Pool) Extent(slot uint32, object uint16) (driveIndex uint16, unit uint64, units uint32, ok bool) {
	panic("stub")
}

// AddRow gives the pool another row from unassigned segments, preferring the drives with most free space.
// The row's slots are allocatable when the ticket is done. ErrNoSpace when no W segments-runs are free or the pool is at its maximum.
func (p *Pool) AddRow() (*Ticket, error) { panic("stub") }

// DropRow gives a row with no committed or reserved slot back to the volume (durably, then its segments are free).
func (p *Pool) DropRow(number uint32) (*Ticket, error) { panic("stub") }

// Alloc takes a free slot. With a parent slot (or NoSlot) it prefers the parent's drives and residue r+1. ok is false when none is free now:
// Freeing tells whether waiting helps.
func (p *Pool) Alloc(parent uint32) (slot uint32, ok bool) { panic("stub") }

// Unalloc returns a slot that was allocated and never committed; allocatable at once.
func (p *Pool) Unalloc(slot uint32) { panic("stub") }

// NoSlot is no slot.
const NoSlot = ^uint32(0)

// Counts of slots: Free can be allocated now; Freeing wait for durability or discard; Used are allocated or committed.
func (p *Pool) Counts() (free, freeing, used uint32) { panic("stub") }

// Record decodes a slot's durable record. The caller must know that the slot is committed and cannot be freed meanwhile (gpufile's lock).
func (p *Pool) Record(slot uint32) ondisk.Record { panic("stub") }

// RecordKey is the key alone, without decoding (the index compares it); aliases the table. Same rule as Record.
func (p *Pool) RecordKey(slot uint32) *ondisk.Key { panic("stub") }

// Touch notes a hit (atomic; durable at the next checkpoint).
func (p *Pool) Touch(slot uint32, unixSeconds uint32) { panic("stub") }

// HitInfo is what Touch wrote.
func (p *Pool) HitInfo(slot uint32) (lastHit uint32, hits uint32) { panic("stub") }

// Committed calls f for every committed slot (at Open of gpufile).
func (p *Pool) Committed(f func(slot uint32)) { panic("stub") }

// Transaction collects changes that become durable together.
type Transaction struct{ _ int }

func (v *Volume) Begin() *Transaction { panic("stub") }

// Put commits a record; Sequence is filled in. flush has a bit for every drive index whose payload writes must be durable first.
func (t *Transaction) Put(p *Pool, slot uint32, r *ondisk.Record, flush uint64) { panic("stub") }

// Free frees a committed slot: allocatable again only when durable (and discarded).
func (t *Transaction) Free(p *Pool, slot uint32) { panic("stub") }

// Submit queues the transaction for group commit and returns at once. done (may be nil) runs on the committer when the outcome is known: it must not block.
// ErrAgain if the journal has no room now (nothing was queued); ErrReadOnly.
func (t *Transaction) Submit(done func(err error)) (*Ticket, error) { panic("stub") }

// Order of a group commit: flush data drives, write the journal to its drives, flush those, apply to the record table in memory, run the callbacks.
// So a record is never in memory's table before it is durable, and a checkpoint never writes what the journal does not hold.

// Package gpufile is the pool as its users see it: reserve -> commit -> lookup, pin -> evict; prefix chains; sessions and leases.
// It knows nothing of queues and never touches KV bytes.
package gpufile

import (
	"errors"
	"time"

	"tuttifs/checksum"
	"tuttifs/extentmap"
)

type Key = [32]byte

var (
	ErrNotFound   = errors.New("gpufile: no such file")
	ErrPending    = errors.New("gpufile: another engine is storing this key")
	ErrNoSpace    = errors.New("gpufile: no space: everything is pinned or reserved")
	ErrAgain      = errors.New("gpufile: space is being freed, try again")
	ErrQuota      = errors.New("gpufile: tenant is over its quota")
	ErrReadOnly   = errors.New("gpufile: volume is mounted read-only")
	ErrSession    = errors.New("gpufile: session is gone")
	ErrLease      = errors.New("gpufile: not leased to this session")
	ErrIncomplete = errors.New("gpufile: not all objects were written")
	ErrIdentity   = errors.New("gpufile: identity is unknown or differs")
	ErrInvalid    = errors.New("gpufile: invalid argument")
)

// Identity is everything that decides whether two blocks of equal keys are interchangeable. Every field must be known: empty,
// "auto" and "unknown" are refused. The data-parallel rank is not part of it.
type Identity struct {
	Model        string `json:"model"`
	Revision     string `json:"revision"`
	WeightsEpoch uint64 `json:"weights_epoch"`
	DType        string `json:"dtype"`
	Quantisation string `json:"quantisation"` // "none" if none
	ScaleFormat  string `json:"scale_format"` // "none" if none
	Layout       string `json:"layout"`       // e.g. "NHD"
	PageBytes    uint64 `json:"page_bytes"`
	BlockTokens  uint32 `json:"block_tokens"` // the engine's block
	FileTokens   uint32 `json:"file_tokens"`  // B, a multiple of it
	TP           uint16 `json:"tp"`
	PP           uint16 `json:"pp"`
	CP           uint16 `json:"cp"`
	Group        string `json:"group"` // which pool of a hybrid model, "full" for plain attention
}

// Validate reports every unknown field. Digest hashes Canonical (sorted, compact JSON). ParseIdentity is strict: unknown JSON fields are refused.
func (i *Identity) Validate() error            { panic("stub") }
func (i *Identity) Canonical() []byte          { panic("stub") }
func (i *Identity) Digest() [32]byte           { panic("stub") }
func ParseIdentity(b []byte) (Identity, error) { panic("stub") }

// Options of Open.
type Options struct {
	Policy         string        // "lru" (default), "sieve", "s3fifo"
	PinTimeout     time.Duration // 60 s
	ReserveTimeout time.Duration // 60 s
	Now            func() time.Time
	// NoIO: nobody writes payloads (replay --metadata-only, bench meta); commits do not require written objects.
	NoIO bool
}

// Store is all pools of a mounted volume. Safe for concurrent use.
type Store struct{ _ int }

func Open(v *extentmap.Volume, o Options) (*Store, error) { panic("stub") }

// Close aborts all reservations and detaches; the volume stays open.
func (s *Store) Close()                             { panic("stub") }
func (s *Store) Volume() *extentmap.Volume          { panic("stub") }
func (s *Store) Pools() []*Pool                     { panic("stub") }
func (s *Store) PoolByName(n string) *Pool          { panic("stub") }
func (s *Store) PoolByID(id extentmap.PoolID) *Pool { panic("stub") }

// OpenPool opens or creates. Spec's Identity and IdentityDigest are filled from id.
func (s *Store) OpenPool(id Identity, spec extentmap.PoolSpec) (*Pool, *extentmap.Ticket, error) {
	panic("stub")
}

// Groups: a verb acts on a group, which is one pool or all pools of a family. Results are laid out [key][pool].
type Group struct{ _ int }

func (s *Store) GroupOfPool(id extentmap.PoolID) *Group { panic("stub") }
func (s *Store) GroupOfFamily(id uint16) *Group         { panic("stub") }
func (g *Group) Pools() []*Pool                         { panic("stub") }

// Token lets another process join a session.
type Token [16]byte

// Member is one process in a session; its Close (or death) frees what it held: its pins, and every uncommitted reservation of the session in which it took part.
// When the last member leaves, the session ends. A slot with a command in flight is freed only when the command has completed.
type Member struct{ _ int }

func (s *Store) NewSession(uid uint32) (*Member, error)    { panic("stub") }
func (s *Store) Join(t Token, uid uint32) (*Member, error) { panic("stub") }
func (m *Member) SessionID() uint32                        { panic("stub") }
func (m *Member) Token() Token                             { panic("stub") }
func (m *Member) Close()                                   { panic("stub") }

// Grant is one slot handed to a session.
type Grant struct {
	Slot       uint32 // extentmap.NoSlot where Status says none
	Status     GrantStatus
	Tokens     uint32
	Generation uint64
	Seed       checksum.Seed
}

type GrantStatus uint8

const (
	GrantNone    GrantStatus = iota
	GrantPinned              // readable
	GrantNew                 // reserved: write it
	GrantJoined              // reserved by another rank of this session under the same reserve id
	GrantExists              // already committed; nothing to write
	GrantPending             // another engine is storing it
)

// Peek is the length of the longest prefix of keys present. No side effects. A tenant sees its own files only.
func (m *Member) Peek(g *Group, tenant uint32, keys []Key) (int, error) { panic("stub") }

// Pin leases the longest present prefix of keys for reading: grants[:n*len(pools)] are filled. Idempotent by request id
// (a second Pin with one id returns the same grants). Counts as a hit; refreshes the policy leaf first.
func (m *Member) Pin(g *Group, tenant uint32, request uint64, keys []Key, grants []Grant) (n int, err error) {
	panic("stub")
}

// Release ends the pins of a request id.
func (m *Member) Release(g *Group, request uint64) error { panic("stub") }

// ReserveItem is one file to be stored.
type ReserveItem struct {
	Key      Key
	Parent   Key // zero for a root
	Tokens   uint32
	Position uint32
}

// Reserve leases slots for writing: all or nothing (ErrNoSpace, ErrAgain, ErrQuota) unless partial, which grants a leading run. Other ranks join by the same reserve id and get the
// same slots. Evicts as needed, leaf first, pinned never.
func (m *Member) Reserve(g *Group, tenant uint32, reserve uint64, items []ReserveItem, partial bool, grants []Grant) (n int, err error) {
	panic("stub")
}

// Commit says that this member has written all objects of rank for every slot of the reservation. When the last of the geometry's ranks has committed, the records are journaled (payload flush first) in one transaction for all pools of the group.
// The ticket is that transaction's; earlier ranks' tickets complete with it. ErrIncomplete if an object of that rank was not written; such a slot is aborted.
func (m *Member) Commit(g *Group, reserve uint64, rank uint16) (*extentmap.Ticket, error) {
	panic("stub")
}

// Abort gives the reservation's uncommitted slots back (when no command is in flight on them).
func (m *Member) Abort(g *Group, reserve uint64) error { panic("stub") }

// ReportBad: a reader found damage. verify is run outside all locks by the store's worker; when it confirms, the file is evicted.
func (m *Member) ReportBad(p *Pool, slot uint32, generation uint64) (*extentmap.Ticket, error) {
	panic("stub")
}

// SetVerifier installs the function that rereads a slot and says whether its bytes are intact.
func (s *Store) SetVerifier(verify func(p *Pool, slot uint32, seed checksum.Seed) bool) {
	panic("stub")
}

// Access is one authorised command in flight; Complete must be called exactly once.
type Access struct {
	_    int
	Slot uint32
}

// Authorize checks a command of this session against its leases: a pinned slot may only be read, a reserved one only written, and the range must lie in one object. Lock-light, no allocation.
func (m *Member) Authorize(write bool, driveIndex uint16, unit uint64, units uint32) (a Access, ok bool) {
	panic("stub")
}

// Complete ends an access; a successful write marks its object written when the whole object was covered.
func (m *Member) Complete(a Access, ok bool) { panic("stub") }

// MarkWritten marks all objects of a reserved slot as written (the daemon itself wrote them for the mount, or NoIO).
func (m *Member) MarkWritten(p *Pool, slot uint32) error { panic("stub") }

// Pool is one pool.
type Pool struct{ _ int }

func (p *Pool) ID() extentmap.PoolID { panic("stub") }
func (p *Pool) Name() string         { panic("stub") }
func (p *Pool) Identity() Identity   { panic("stub") }
func (p *Pool) Map() *extentmap.Pool { panic("stub") }
func (p *Pool) Created() time.Time   { panic("stub") }

// FileInfo describes one committed file.
type FileInfo struct {
	Key, Parent Key
	Slot        uint32
	Tenant      uint32
	Owner       uint32
	Tokens      uint32
	Position    uint32
	Children    uint32
	Pins        uint32
	Hits        uint32
	Generation  uint64
	Nonce       uint64
	CommitTime  int64 // Unix ns
	LastHit     int64 // Unix s, 0 for never
}

// Find looks a committed, not doomed file up, whoever its tenant (the mount's view).
func (p *Pool) Find(key *Key) (slot uint32, generation uint64, ok bool) { panic("stub") }

// Lookup fills slots (NoSlot for misses) for a batch and returns the number found. No side effects: bench meta's inner loop.
func (p *Pool) Lookup(keys []Key, slots []uint32) int { panic("stub") }

// Stat describes a slot if it still holds the file of that generation (only the low genBits bits of it are compared; 64 for all).
func (p *Pool) Stat(slot uint32, generation uint64, genBits int) (FileInfo, bool) { panic("stub") }
func (p *Pool) Seed(info *FileInfo) checksum.Seed                                 { panic("stub") }

// ListEntry is one row of a listing.
type ListEntry struct {
	Key        Key
	Slot       uint32
	Generation uint64
	CommitTime int64
	LastHit    int64
	Cookie     uint64 // resume after this entry
}

// List streams the files whose key starts with the byte shard, in a stable order, after cookie (0 = from the start). Files present throughout are listed exactly once, whatever comes and goes meanwhile. No allocation.
func (p *Pool) List(shard byte, cookie uint64, out []ListEntry) int { panic("stub") }

// ListTips streams the files that have no child, over all shards.
func (p *Pool) ListTips(cookie uint64, out []ListEntry) int { panic("stub") }

// Chain is the prefix of a block, root first, ending with key; it stops early where a parent is gone (complete false).
func (p *Pool) Chain(key *Key) (chain []Key, complete bool, ok bool) { panic("stub") }

// Unlink dooms a file: a miss at once; its slot is free at the last unpin.
func (p *Pool) Unlink(key *Key) error { panic("stub") }

// EvictPrefix evicts key and its ancestors up to the first one that another chain shares. It returns how many.
func (p *Pool) EvictPrefix(key *Key) (int, error) { panic("stub") }

// EvictCount evicts up to n files by policy.
func (p *Pool) EvictCount(n int) (int, error) { panic("stub") }

// HoldRead pins one file for the mount's own reader (no session); Release undoes it.
func (p *Pool) HoldRead(slot uint32, generation uint64, genBits int) (FileInfo, func(), bool) {
	panic("stub")
}

// Stats are monotonic counters and gauges of one pool; all present at zero. hits + misses == lookups.
type Stats struct {
	Lookups, Hits, Misses              uint64 // blocks asked of Pin
	Reserved, Committed, Aborted       uint64
	Evicted, Doomed, Bad               uint64
	Files, FilesPinned, FilesReserved  uint64 // gauges
	SlotsFree, SlotsFreeing, SlotsUsed uint64
	BytesUsed, BytesCapacity           uint64 // capacity: what the pool could hold now at its maximum
}

func (p *Pool) Stats() Stats { panic("stub") }

// SessionInfo for status files.
type SessionInfo struct {
	ID       uint32
	UID      uint32
	Members  int
	Pins     int
	Reserved int
	Since    time.Time
}

func (s *Store) Sessions() []SessionInfo { panic("stub") }

// Space is the truth behind df: Total is all that files could occupy, Used is committed and reserved slots, Free the rest, Available what a store could use without evicting.
type Space struct{ TotalBytes, UsedBytes, FreeBytes, AvailableBytes, Files, FilesMax uint64 }

func (s *Store) Space() Space { panic("stub") }

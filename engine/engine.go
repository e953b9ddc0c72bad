// Package engine is the engine's side in Go: a mount, its sessions and pools, and the way of KV bytes by gio. Metadata goes by ioctl, bytes by queue pairs in shared memory.
package engine

import (
	"time"

	"tuttifs/checksum"
	"tuttifs/gio"
	"tuttifs/stripe"
)

type Key = [32]byte

// Mount is an opened mount point.
type Mount struct{ _ int }

// Open opens a tuttifs mount point (any path in it) and checks the ABI version.
func Open(path string) (*Mount, error) { panic("stub") }
func (m *Mount) Close() error          { panic("stub") }

// SessionOptions of the data path. Zero fields take defaults.
type SessionOptions struct {
	Lanes       int // 4
	Depth       int // entries of each queue, 256
	DMABytes    int // memory that controllers reach: KV memory made by Session.Memory lies in it; 256 MiB
	BounceBytes int // 0: direct only
	ArenaBytes  int // 1 MiB
	Deadline    time.Duration
}

// Session is this process's membership in a session, with its ring.
type Session struct{ _ int }

func (m *Mount) NewSession(o SessionOptions) (*Session, error)                  { panic("stub") }
func (m *Mount) JoinSession(token [16]byte, o SessionOptions) (*Session, error) { panic("stub") }
func (s *Session) Token() [16]byte                                              { panic("stub") }
func (s *Session) Ring() *gio.Ring                                              { panic("stub") }
func (s *Session) DMA() []byte                                                  { panic("stub") } // beyond the bounce cells
func (s *Session) Close() error                                                 { panic("stub") }

// PoolSpec of OpenPool: Identity is canonical JSON (gpufile.Identity).
type PoolSpec struct {
	Name               string
	Identity           []byte
	Geometry           stripe.Geometry
	TokensPerFile      uint32
	Family             string
	TrailingHit        uint32
	MinBytes, MaxBytes uint64
	MaxSlots           uint32
}

// Pool is an opened pool.
type Pool struct{ _ int }

// OpenPool opens or creates, waits for it to be durable, and fetches layout and rows.
func (s *Session) OpenPool(spec PoolSpec) (*Pool, error) { panic("stub") }
func (p *Pool) Layout() *stripe.Layout                   { panic("stub") }
func (p *Pool) Map() *gio.Map                            { panic("stub") } // refreshed when the map generation moved

// Grant is a leased slot.
type Grant struct {
	Slot       uint32
	Status     uint8 // ioctl.Grant*
	Tokens     uint32
	Generation uint64
	Seed       checksum.Seed
}

func (p *Pool) Peek(tenant uint32, keys []Key) (int, error) { panic("stub") }
func (p *Pool) Pin(tenant uint32, request uint64, keys []Key, grants []Grant) (int, error) {
	panic("stub")
}
func (p *Pool) Release(request uint64) error { panic("stub") }

// Item is one file to store.
type Item struct {
	Key, Parent Key
	Tokens      uint32
	Position    uint32
}

// Reserve retries ErrAgain until the deadline.
func (p *Pool) Reserve(tenant uint32, reserve uint64, items []Item, partial bool, grants []Grant) (int, error) {
	panic("stub")
}

// Commit waits for durability.
func (p *Pool) Commit(reserve uint64, rank uint16) error       { panic("stub") }
func (p *Pool) Abort(reserve uint64) error                     { panic("stub") }
func (p *Pool) ReportBad(slot uint32, generation uint64) error { panic("stub") }

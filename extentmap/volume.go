package extentmap

import (
	"fmt"
	"math/bits"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

// Volume is a mounted volume. Safe for concurrent use.
type Volume struct {
	o            Options
	uuid         [16]byte
	tag          uint64
	name         string
	epoch, nonce uint64
	predecessor  uint64
	width        int
	segmentUnits uint32
	segmentsMax  uint64 // of all members, and of those that may be added in the mount
	readOnly     bool
	wasClean     bool // the volume had been unmounted
	ownDrives    bool // Close closes them

	members   []*member // by index, lost ones included; replaced as a whole under mu
	byIndex   [ondisk.MaxDrives]atomic.Pointer[member]
	metadata  []*member     // those with the metadata role; replaced as a whole under mu
	region    ondisk.Region // of all drives; Segments is none's
	losses    atomic.Uint64 // of drives
	timeouts  atomic.Uint64 // operations of drives that were given up
	rows      []atomic.Pointer[row]
	generated atomic.Uint64
	commits   atomic.Uint64 // next commit sequence

	creating     sync.Mutex    // pools go into the journal in the order of their IDs; before any other mutex
	changing     sync.Mutex    // one change of the drives at a time; before any other mutex
	retired      []drive.Drive // of members that came back by another way; changing
	checkpointMu sync.Mutex
	journalMu    sync.Mutex
	labelMu      sync.Mutex
	tablesMu     sync.Mutex   // while record tables are overwritten; before mu
	common       ondisk.Label // what all labels say, as last written; labelMu
	lastHits     time.Time    // of the last checkpoint that wrote hits; checkpointMu

	applyMu   sync.Mutex
	room      *sync.Cond // on applyMu: the tail moved, or the volume failed
	journal   ondisk.Journal
	head      uint64 // next journal block
	tail      uint64 // first block that the last checkpoint does not contain
	chain     uint32
	super     ondisk.Superblock // as last written
	catalog   []byte            // likewise
	dirtyRows []*row
	catDirty  bool
	vacated   []vacancy
	limbo     []*row // dropped rows whose space waits for a checkpoint

	mu            sync.Mutex
	pools         []*Pool // durable and pending, by ID
	families      map[uint16]*ondisk.Family
	tenants       map[uint32]ondisk.Tenant
	catalogBytes  int // of what is durable or pending
	limboSegments uint64
	freeRefs      []uint32
	nextRef       uint32

	queueMu    sync.Mutex
	queue      []*Transaction
	queueBytes int
	closing    bool

	failure       atomic.Pointer[error]
	drivesChanged atomic.Bool   // since the last checkpoint: copies of record tables are missing, or should lie elsewhere
	rowsChanged   chan struct{} // rows became available or unavailable
	wake          chan struct{} // committer
	kick          chan struct{} // checkpointer
	stop          chan struct{}
	background    sync.WaitGroup
	committing    sync.WaitGroup
	discards      *discarder
	checkpoints   atomic.Uint64
	transactions  atomic.Uint64
	damaged       atomic.Uint64
}

// maxRowRefs bounds row references: they share a word with the entry in member.owner.
const maxRowRefs = 1 << (32 - ownerEntryBits)

// DriveInfo describes one member.
type DriveInfo struct {
	Index        uint16
	UUID         [16]byte
	Name         string
	Kind         drive.Kind
	Bytes        uint64
	LBABytes     int
	Direct       bool
	Mapped       bool // its bytes are memory that is addressed (drive.Drive.Bytes)
	Metadata     bool // holds a copy of journal and catalog
	Discard      bool // is told what freed slots no longer hold; never where the volume is read-only
	Discards     DiscardCounts
	Segments     uint32
	FreeSegments uint32
	ReadErrors   uint64
	WriteErrors  uint64
	Timeouts     uint64 // operations that were given up
	MetaWritten  uint64 // bytes of metadata written since the mount, or since the drive came
	State        DriveState
	Held         bool   // given no rows yet: engines are attached that do not know it
	Cause        string // why it is lost
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
	Drives                         []DriveInfo
	DiscardsWaiting                uint64 // freed slots that are not allocatable yet because of their discard
	DiscardsSpared                 uint64 // freed slots that were handed out without, since the mount
	TotalBytes                     uint64 // what files could occupy if all segments were rows (metadata taken off)
	FreeBytes                      uint64 // unassigned segments
	JournalBytes, JournalUsedBytes uint64
	Checkpoints, Transactions      uint64
	DamagedBlocks                  uint64 // record-table blocks of which no copy was right, and records refused
	Degraded                       bool   // drives are lost, or the metadata has one copy where it could have two
	RowsUnavailable                uint64 // rows on lost drives
}

// Info describes the volume.
func (v *Volume) Info() Info {
	v.applyMu.Lock()
	used := v.head - v.tail
	v.applyMu.Unlock()
	i := Info{
		UUID: v.uuid, Label: v.name, Epoch: v.epoch, Nonce: v.nonce, Width: v.width,
		SegmentBytes: uint64(v.segmentUnits) * ondisk.BlockBytes, ReadOnly: v.readOnly,
		JournalBytes: v.journal.Blocks * ondisk.BlockBytes, JournalUsedBytes: used * ondisk.BlockBytes,
		Checkpoints: v.checkpoints.Load(), Transactions: v.transactions.Load(), DamagedBlocks: v.damaged.Load(),
	}
	i.DiscardsWaiting, i.DiscardsSpared = v.discards.queued()
	v.mu.Lock()
	defer v.mu.Unlock()
	online := 0
	for _, m := range v.members {
		d := DriveInfo{
			Index: m.index, UUID: m.uuid, Name: m.name(), Bytes: m.units * ondisk.BlockBytes, Metadata: m.role,
			Discard:  !v.readOnly && v.discards.asks(m),
			Discards: v.discards.countsOf(m.index),
			Segments: m.region.Segments, FreeSegments: m.free,
			ReadErrors: m.readErrors.Load(), WriteErrors: m.writeErrors.Load(), Timeouts: m.timeouts.Load(),
			MetaWritten: m.written.Load(),
			State:       DriveState(m.state.Load()), Held: m.held.Load(),
		}
		if m.dev != nil {
			d.Kind, d.Bytes, d.LBABytes, d.Direct = m.dev.Kind(), uint64(m.dev.Size()), m.dev.LBABytes(), m.dev.Direct()
			d.Mapped = len(m.dev.Bytes()) > 0
		}
		if m.cause != nil {
			d.Cause = m.cause.Error()
		}
		i.Drives = append(i.Drives, d)
		if m.lost() {
			i.Degraded = true
			continue
		}
		online++
		i.TotalBytes += uint64(int(m.region.Segments)-len(m.tables)) * i.SegmentBytes
		if m.usable() {
			i.FreeBytes += uint64(m.free) * i.SegmentBytes
		}
	}
	i.Degraded = i.Degraded || len(v.metadata) < min(online, metadataDrives)
	for _, p := range v.pools {
		i.RowsUnavailable += uint64(p.away)
	}
	return i
}

// Drive is the member of an index, or nil if there is none in use.
func (v *Volume) Drive(index uint16) drive.Drive {
	if m := v.member(index); m != nil && !m.lost() {
		return m.dev
	}
	return nil
}

// NextGeneration is unique in the volume's life: (mount nonce, epoch<<40 | counter).
func (v *Volume) NextGeneration() (nonce, generation uint64) {
	return v.nonce, v.epoch<<40 | v.generated.Add(1)
}

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

// Pools returns the durable pools, by ID.
func (v *Volume) Pools() []*Pool {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []*Pool
	for _, p := range v.pools {
		if p.durable {
			out = append(out, p)
		}
	}
	return out
}

// PoolByID returns a durable pool, or nil.
func (v *Volume) PoolByID(id PoolID) *Pool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p := v.pool(id); p != nil && p.durable {
		return p
	}
	return nil
}

// pool finds a pool, durable or not. Volume.mu.
func (v *Volume) pool(id PoolID) *Pool {
	i := sort.Search(len(v.pools), func(i int) bool { return v.pools[i].id >= id })
	if i < len(v.pools) && v.pools[i].id == id {
		return v.pools[i]
	}
	return nil
}

// Families returns the families and their pools, by ID; pools on their way to being durable belong to theirs already.
func (v *Volume) Families() []Family {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []Family
	for id, f := range v.families {
		e := Family{ID: id, Name: f.Name}
		for _, p := range v.pools {
			if p.family == id {
				e.Pools = append(e.Pools, p.id)
			}
		}
		if len(e.Pools) > 0 {
			out = append(out, e)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// Tenants returns the tenants that were set, by ID.
func (v *Volume) Tenants() []Tenant {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []Tenant
	for _, t := range v.tenants {
		out = append(out, Tenant{t.ID, t.Name, t.Quota})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

func validPoolName(n string) bool {
	if n == "" || len(n) > ondisk.MaxNameBytes || n[0] == '.' {
		return false
	}
	for _, c := range []byte(n) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// CreatePool is idempotent for an equal spec (name, digest, geometry); ErrExists otherwise. The pool is usable when
// the ticket is done.
func (v *Volume) CreatePool(spec PoolSpec) (*Pool, *Ticket, error) {
	geometry, err := v.checkSpec(&spec)
	if err != nil {
		return nil, nil, err
	}
	v.creating.Lock()
	defer v.creating.Unlock()
	v.mu.Lock()
	for _, p := range v.pools {
		if p.spec.Name != spec.Name {
			continue
		}
		v.mu.Unlock()
		if p.spec.IdentityDigest != spec.IdentityDigest || string(p.geometry) != string(geometry) {
			return nil, nil, fmt.Errorf("%w: pool %q", ErrExists, spec.Name)
		}
		return p, p.created, nil
	}
	p, t, err := v.addPool(&spec, geometry)
	v.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	p.created, err = t.Submit(func(err error) {
		if err != nil {
			v.forgetPool(p, len(t.buf))
		}
	})
	if err != nil {
		v.forgetPool(p, len(t.buf))
		return nil, nil, err
	}
	return p, p.created, nil
}

func (v *Volume) checkSpec(spec *PoolSpec) (geometry []byte, err error) {
	if v.readOnly {
		return nil, ErrReadOnly
	}
	switch {
	case !validPoolName(spec.Name):
		return nil, fmt.Errorf("%w: pool name %q; 1 to 64 of letters, digits, dot, dash, underscore, no dot in front",
			ErrInvalid, spec.Name)
	case spec.Family != "" && !validPoolName(spec.Family):
		return nil, fmt.Errorf("%w: family name %q", ErrInvalid, spec.Family)
	case len(spec.Identity) > ondisk.MaxIdentityBytes:
		return nil, fmt.Errorf("%w: identity of %d bytes; at most %d", ErrInvalid, len(spec.Identity),
			ondisk.MaxIdentityBytes)
	case spec.MaxBytes != 0 && spec.MinBytes > spec.MaxBytes:
		return nil, fmt.Errorf("%w: minimum %d above maximum %d", ErrInvalid, spec.MinBytes, spec.MaxBytes)
	}
	if err := spec.Geometry.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	geometry, err = spec.Geometry.MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if len(geometry) > ondisk.MaxGeometryBytes {
		return nil, fmt.Errorf("%w: geometry of %d bytes; at most %d", ErrInvalid, len(geometry),
			ondisk.MaxGeometryBytes)
	}
	return geometry, nil
}

// addPool makes a pending pool and the transaction that makes it durable. Volume.mu.
func (v *Volume) addPool(spec *PoolSpec, geometry []byte) (*Pool, *Transaction, error) {
	l, err := stripe.NewLayout(spec.Geometry, v.width)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	largest := uint32(0)
	for _, m := range v.members {
		largest = max(largest, m.region.Segments)
	}
	k, ok := stripe.EntryShift(l.SlotUnits(), uint64(v.segmentUnits), bits.Len32(largest)-1)
	if !ok {
		return nil, nil, fmt.Errorf("%w: a file of %d bytes does not fit the drives", ErrNoSpace,
			l.SlotUnits()*ondisk.BlockBytes)
	}
	id := uint16(1)
	if n := len(v.pools); n > 0 {
		id = uint16(v.pools[n-1].id) + 1
	}
	if id == 0xffff {
		return nil, nil, fmt.Errorf("%w: too many pools", ErrNoSpace)
	}
	t := v.Begin()
	family := v.familyID(spec.Family, t)
	e := ondisk.Pool{
		ID: id, Family: family, TokensPerFile: spec.TokensPerFile, TrailingHit: spec.TrailingHit,
		MaxSlots: spec.MaxSlots, MinBytes: spec.MinBytes, MaxBytes: spec.MaxBytes,
		CreationTime: v.o.Now().UnixNano(), SlotUnits: l.SlotUnits(),
		EntryShift: uint8(k), ChecksumAlg: spec.ChecksumAlg, Digest: spec.IdentityDigest, Name: spec.Name,
		Identity: spec.Identity, Geometry: geometry,
	}
	t.buf = e.Append(t.buf)
	p, err := v.newPool(&e)
	if err != nil {
		return nil, nil, err
	}
	v.pools = append(v.pools, p)
	if free, owed := v.freeSegments(), v.owedSegments(nil); owed > free && spec.MinBytes > 0 {
		v.pools = v.pools[:len(v.pools)-1]
		return nil, nil, fmt.Errorf("%w: the minimums of all pools would need %d segments and %d are free", ErrNoSpace,
			owed, free)
	}
	if !v.catalogHasRoom(len(t.buf)) {
		v.pools = v.pools[:len(v.pools)-1]
		return nil, nil, fmt.Errorf("%w: the catalog has no room for another pool", ErrNoSpace)
	}
	v.catalogBytes += len(t.buf)
	return p, t, nil
}

// familyID finds or makes a family by name. Its entry goes into every pool's transaction: one that is known may not be
// durable yet. Volume.mu.
func (v *Volume) familyID(name string, t *Transaction) uint16 {
	if name == "" {
		return 0
	}
	f := &ondisk.Family{ID: 1, Name: name}
	for id, known := range v.families {
		if known.Name == name {
			f = known
			break
		}
		f.ID = max(f.ID, id+1)
	}
	v.families[f.ID] = f
	t.buf = f.Append(t.buf)
	return f.ID
}

// forgetPool undoes addPool.
func (v *Volume) forgetPool(p *Pool, entryBytes int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, q := range v.pools {
		if q == p {
			v.pools = append(v.pools[:i], v.pools[i+1:]...)
			v.catalogBytes -= entryBytes
			return
		}
	}
}

func (v *Volume) catalogHasRoom(n int) bool {
	return v.catalogBytes+n <= int(v.region.CatalogBlocks)*ondisk.PayloadBytes
}

// SetTenant adds or changes a tenant.
func (v *Volume) SetTenant(tenant Tenant) (*Ticket, error) {
	if len(tenant.Name) > ondisk.MaxNameBytes || tenant.Name != "" && !validPoolName(tenant.Name) {
		return nil, fmt.Errorf("%w: tenant name %q", ErrInvalid, tenant.Name)
	}
	t := v.Begin()
	e := ondisk.Tenant{ID: tenant.ID, Quota: tenant.QuotaBytes, Name: tenant.Name}
	t.buf = e.Append(t.buf)
	v.mu.Lock()
	for _, o := range v.tenants {
		if o.ID != tenant.ID && o.Name == tenant.Name && tenant.Name != "" {
			v.mu.Unlock()
			return nil, fmt.Errorf("%w: tenant %q has ID %d", ErrExists, o.Name, o.ID)
		}
	}
	// A changed tenant counts twice until the next mount: an upper bound is all that is needed.
	if !v.catalogHasRoom(len(t.buf)) {
		v.mu.Unlock()
		return nil, fmt.Errorf("%w: the catalog has no room for another tenant", ErrNoSpace)
	}
	v.catalogBytes += len(t.buf)
	v.mu.Unlock()
	return t.Submit(nil)
}

// SetPoolLimits changes minimum, maximum and slot cap.
func (v *Volume) SetPoolLimits(id PoolID, minBytes, maxBytes uint64, maxSlots uint32) (*Ticket, error) {
	if maxBytes != 0 && minBytes > maxBytes {
		return nil, fmt.Errorf("%w: minimum %d above maximum %d", ErrInvalid, minBytes, maxBytes)
	}
	v.mu.Lock()
	p := v.pool(id)
	if p == nil || !p.durable {
		v.mu.Unlock()
		return nil, fmt.Errorf("%w: no pool %d", ErrInvalid, id)
	}
	old := p.limits
	p.limits.minBytes = minBytes
	free, owed := v.freeSegments(), v.owedSegments(nil)
	p.limits = old
	v.mu.Unlock()
	if owed > free && minBytes > old.minBytes {
		return nil, fmt.Errorf("%w: the minimums of all pools would need %d segments and %d are free", ErrNoSpace, owed,
			free)
	}
	t := v.Begin()
	e := ondisk.Limits{Pool: uint16(id), MaxSlots: maxSlots, MinBytes: minBytes, MaxBytes: maxBytes}
	t.buf = e.Append(t.buf)
	return t.Submit(nil)
}

// assignRef gives a row its volume-wide reference.
func (v *Volume) assignRef(r *row) {
	if n := len(v.freeRefs); n > 0 {
		r.ref, v.freeRefs = v.freeRefs[n-1], v.freeRefs[:n-1]
	} else {
		v.nextRef++
		r.ref = v.nextRef
	}
	v.rows[r.ref].Store(r)
}

func (v *Volume) freeRef(r *row) {
	v.rows[r.ref].Store(nil)
	v.freeRefs = append(v.freeRefs, r.ref)
}

func (p *Pool) newRow(number uint32) *row {
	return &row{
		pool: p, number: number, tables: [2]ondisk.Locator{ondisk.NoLocator, ondisk.NoLocator},
		dirty:   make([]uint64, (p.tableBlocks+63)/64),
		touched: make([]atomic.Uint64, (p.tableBlocks+63)/64),
		freeBy:  make([]uint32, p.v.width),
	}
}

func (r *row) setDrives() {
	for _, d := range r.drives {
		r.driveSet |= 1 << d
	}
}

// AddRow gives the pool another row from unassigned segments, preferring the drives with most free space.
// The row's slots are allocatable when the ticket is done. ErrNoSpace when no W runs of segments are free, the pool is
// at its maximum, or the rest is kept for other pools' minimums; ErrAgain when dropped rows are about to become free.
func (p *Pool) AddRow() (*Ticket, error) {
	v := p.v
	if v.readOnly {
		return nil, ErrReadOnly
	}
	r, err := p.prepareRow()
	if err != nil {
		return nil, err
	}
	t := v.Begin()
	e := ondisk.Row{Pool: uint16(p.id), Number: r.number, Tables: r.tables}
	for i := range r.drives {
		e.Entries = append(e.Entries, ondisk.Locate(r.drives[i], r.units[i]))
	}
	t.buf = e.Append(t.buf)
	undo := func(err error) {
		if err != nil {
			v.mu.Lock()
			p.forgetRow(r)
			v.mu.Unlock()
		}
	}
	ticket, err := t.Submit(undo)
	undo(err)
	return ticket, err
}

// capSlack is how many slots a pool may have beyond its cap on live files: they stand in for those whose freeing is not
// durable yet, so that a full pool need not wait at every store.
func capSlack(maxSlots uint32) uint32 { return min(maxSlots/32+1, 8192) }

// atMaximum says that the pool's maximum allows no more rows. Volume.mu.
func (p *Pool) atMaximum() bool {
	return p.limits.maxBytes != 0 && uint64(p.rowCount-p.away+1)*p.rowBytes() > p.limits.maxBytes
}

// atCap says that the pool has rows for all the files that it may have. Volume.mu.
func (p *Pool) atCap() bool {
	return p.limits.maxSlots != 0 && (p.rowCount-p.away)*p.slotsPerRow >= p.limits.maxSlots+capSlack(p.limits.maxSlots)
}

// MayGrow says whether the pool's own limits allow one more row, wherever it comes from.
func (p *Pool) MayGrow() bool {
	p.v.mu.Lock()
	defer p.v.mu.Unlock()
	return !p.atMaximum() && !p.atCap()
}

// prepareRow assigns number and space to a pending row.
func (p *Pool) prepareRow() (*row, error) {
	v := p.v
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case p.atMaximum():
		return nil, fmt.Errorf("%w: pool %s is at its maximum", ErrNoSpace, p.spec.Name)
	case p.atCap():
		return nil, fmt.Errorf("%w: pool %s has rows for all the files that it may have", ErrNoSpace, p.spec.Name)
	case !v.catalogHasRoom(ondisk.RowEntrySize(v.width)):
		return nil, fmt.Errorf("%w: the catalog has no room for another row", ErrNoSpace)
	}
	number := lowestZero(p.numbers)
	if number >= p.maxRows {
		return nil, fmt.Errorf("%w: pool %s has all the rows that it can have", v.noSpace(), p.spec.Name)
	}
	r := p.newRow(number)
	if err := v.takeRow(p, r); err != nil {
		if v.limboSegments > 0 {
			v.kickCheckpoint()
			err = fmt.Errorf("%w: dropped rows are being freed", ErrAgain)
		}
		return nil, err
	}
	if owed := v.owedSegments(p); v.freeSegments() < owed {
		v.giveBack(p, r)
		return nil, fmt.Errorf("%w: %d segments are kept for other pools' minimums", v.noSpace(), owed)
	}
	r.setDrives()
	p.numbers[number/64] |= 1 << (number % 64)
	p.pending[number] = r
	p.rowCount++
	v.catalogBytes += ondisk.RowEntrySize(v.width)
	return r, nil
}

// noSpace is ErrNoSpace, or ErrAgain while dropped rows wait for a checkpoint. Volume.mu.
func (v *Volume) noSpace() error {
	if v.limboSegments > 0 {
		v.kickCheckpoint()
		return ErrAgain
	}
	return ErrNoSpace
}

func lowestZero(words []uint64) uint32 {
	for i, w := range words {
		if w != ^uint64(0) {
			return uint32(i*64 + bits.TrailingZeros64(^w))
		}
	}
	return uint32(len(words) * 64)
}

// forgetRow undoes prepareRow. Volume.mu.
func (p *Pool) forgetRow(r *row) {
	if p.pending[r.number] != r {
		return
	}
	delete(p.pending, r.number)
	p.v.giveBack(p, r)
	p.numbers[r.number/64] &^= 1 << (r.number % 64)
	p.rowCount--
	p.v.catalogBytes -= ondisk.RowEntrySize(p.v.width)
}

// DropRow gives a row with no committed or reserved slot back to the volume. The ticket is done when that is durable
// and the row's segments are free (after the next checkpoint, which is started at once). ErrAgain if slots are in use
// or their freeing is not yet durable.
func (p *Pool) DropRow(number uint32) (*Ticket, error) {
	v := p.v
	if v.readOnly {
		return nil, ErrReadOnly
	}
	if number >= p.maxRows {
		return nil, fmt.Errorf("%w: no row %d", ErrInvalid, number)
	}
	r := p.byNumber[number].Load()
	if r == nil {
		return nil, fmt.Errorf("%w: no row %d", ErrInvalid, number)
	}
	p.mu.Lock()
	if r.dropping || r.away.Load() || r.free != p.slotsPerRow {
		p.mu.Unlock()
		return nil, fmt.Errorf("%w: row %d has slots in use", ErrAgain, number)
	}
	r.dropping = true
	free := append([]uint32(nil), r.freeBy...)
	for residue, n := range free {
		p.countFree(r, uint32(residue), -int32(n))
	}
	p.mu.Unlock()
	ticket := NewTicket()
	r.dropped = ticket.Complete
	t := v.Begin()
	t.buf = (&ondisk.DropRow{Pool: uint16(p.id), Number: number}).Append(t.buf)
	undo := func() {
		p.mu.Lock()
		r.dropping = false
		for residue, n := range free {
			p.countFree(r, uint32(residue), int32(n))
		}
		p.mu.Unlock()
	}
	_, err := t.Submit(func(err error) {
		if err != nil {
			undo()
			ticket.Complete(err)
		}
	})
	if err != nil {
		undo()
		return nil, err
	}
	return ticket, nil
}

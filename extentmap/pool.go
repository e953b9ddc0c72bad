package extentmap

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"

	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

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

// limits are the parts of a spec that change.
type limits struct {
	minBytes, maxBytes uint64
	maxSlots           uint32
}

// Pool is one pool's rows and records.
type Pool struct {
	v            *Volume
	id           PoolID
	spec         PoolSpec // without the limits
	family       uint16
	creationTime int64
	geometry     []byte
	layout       *stripe.Layout
	shift        uint8 // an entry is 2^shift segments
	entryUnits   uint64
	units        []uint32 // of each object

	slotsPerRow uint32
	setsPerRow  uint32
	setWords    uint32 // words of the free map for one residue of one row
	tableBlocks uint32 // of one row
	maxRows     uint32

	// Volume.mu. rowCount counts rows that are durable or being added or dropped.
	created   *Ticket
	durable   bool
	limits    limits
	rowCount  uint32
	away      uint32                // durable rows that are unavailable
	numbers   []uint64              // bit per row number in use
	pending   map[uint32]*row       // added and not durable
	byNumber  []atomic.Pointer[row] // durable rows
	highest   atomic.Uint32         // one more than the highest durable row number
	mapChange atomic.Uint64

	// Tables by slot, outside the collector's sight. The record table is exactly what the drives hold, but for the
	// blocks' headers and the hit fields. Guarded by Volume.applyMu for writing; see Record for reading.
	memory  []*reservation
	table   *reservation
	lastHit []uint32 // atomic
	hits    []uint32 // atomic

	mu       sync.Mutex
	busy     []uint64 // bit per slot that cannot be allocated: see bit
	hasFree  []uint64 // bit per row with free slots
	from     uint32   // where the search for a row begins
	residue  uint32   // of the next slot without parent
	slotCap  uint32   // limits.maxSlots
	nFree    uint32
	nFreeing uint32
	nUsed    uint32
}

// row is one row. Everything but dirty, touched, free and dropping is immutable once it is published.
type row struct {
	pool     *Pool
	number   uint32
	ref      uint32 // 1.., see Volume.rows
	drives   []uint16
	units    []uint64
	tables   [2]ondisk.Locator
	driveSet uint64

	dirty []uint64 // bit per block; Volume.applyMu
	// second has a bit for each dirty block whose second copy holds nothing worth keeping, nil for none: it is written
	// before the first, which is the only one. Volume.applyMu.
	second     []uint64
	fresh      uint8 // bit per copy of the table that is to be written whole; Volume.applyMu
	moved      bool  // the durable catalog names other places of the table; Volume.applyMu
	isDirty    bool  // in Volume.dirtyRows
	touched    []atomic.Uint64
	anyTouched atomic.Bool

	free     uint32   // Pool.mu
	freeBy   []uint32 // by residue
	used     uint32   // allocated or committed
	freeing  uint32
	dropping bool
	dropped  func(error)

	// away: it lies on a drive that is lost, and does not count. Changed under Volume.mu and Pool.mu.
	away atomic.Bool
	// noTable: its record table is on drives that were not there at the mount; nobody knows what it holds.
	noTable atomic.Bool
	// condemned: its drive is being forgotten, and no transaction may name its slots. Volume.queueMu.
	condemned bool
}

// Row is a row's number in its pool and where its entries lie.
type Row struct {
	Number uint32
	Drives []uint16 // W
	Units  []uint64 // W: first unit of each entry
	Away   bool     // it lies on a drive that is lost
	// Unknown: its records were on drives that were not there at the mount.
	Unknown bool
}

// NoSlot is no slot.
const NoSlot = ^uint32(0)

// newPool makes a pool without rows. Its tables are reserved for the most rows that the volume could ever give it.
func (v *Volume) newPool(e *ondisk.Pool) (*Pool, error) {
	g, err := stripe.ParseGeometry(e.Geometry)
	if err != nil {
		return nil, fmt.Errorf("geometry: %w", err)
	}
	l, err := stripe.NewLayout(g, v.width)
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	p := &Pool{
		v: v, id: PoolID(e.ID), family: e.Family, creationTime: e.CreationTime,
		geometry: append([]byte(nil), e.Geometry...),
		layout:   l, shift: e.EntryShift, entryUnits: uint64(v.segmentUnits) << e.EntryShift,
		limits: limits{e.MinBytes, e.MaxBytes, e.MaxSlots}, slotCap: e.MaxSlots, pending: map[uint32]*row{},
		spec: PoolSpec{
			Name: e.Name, IdentityDigest: e.Digest, Identity: append([]byte(nil), e.Identity...), Geometry: g,
			TokensPerFile: e.TokensPerFile, TrailingHit: e.TrailingHit, ChecksumAlg: e.ChecksumAlg,
		},
	}
	if e.SlotUnits != l.SlotUnits() {
		return nil, fmt.Errorf("slot of %d units; its geometry says %d", e.SlotUnits, l.SlotUnits())
	}
	p.units = make([]uint32, len(g.Objects))
	for i := range g.Objects {
		p.units[i] = g.Objects[i].Units()
	}
	if err := p.size(); err != nil {
		return nil, err
	}
	return p, p.reserveTables()
}

// size computes the pool's shape from layout and entry.
func (p *Pool) size() error {
	v := p.v
	w := uint32(v.width)
	p.slotsPerRow = p.layout.SlotsPerRow(p.entryUnits)
	if p.slotsPerRow == 0 {
		return fmt.Errorf("%w: a slot of %d units does not fit an entry of %d", ErrInvalid, p.layout.SlotUnits(),
			p.entryUnits)
	}
	p.setsPerRow = p.slotsPerRow / w
	p.setWords = (p.setsPerRow + 63) / 64
	p.tableBlocks = ondisk.TableBlocks(p.slotsPerRow)
	if p.tableBlocks > v.segmentUnits {
		return fmt.Errorf("%w: slots of %d units are too small: a row's record table needs %d blocks, a segment has %d",
			ErrInvalid, p.layout.SlotUnits(), p.tableBlocks, v.segmentUnits)
	}
	rows := v.segmentsMax / (uint64(w) << p.shift)
	p.maxRows = uint32(min(rows, uint64(NoSlot-1)/uint64(p.slotsPerRow), maxRowRefs-1))
	if p.maxRows == 0 {
		return fmt.Errorf("%w: a row takes %d segments and the volume has %d", ErrNoSpace, uint64(w)<<p.shift,
			v.segmentsMax)
	}
	return nil
}

func (p *Pool) reserveTables() error {
	slots := int(p.maxRows) * int(p.slotsPerRow)
	words := int(p.maxRows) * p.v.width * int(p.setWords)
	for _, n := range []int{int(p.maxRows) * p.rowTableBytes(), 4 * slots, 4 * slots, 8 * words} {
		r, err := reserve(n)
		if err != nil {
			p.release()
			return err
		}
		p.memory = append(p.memory, r)
	}
	p.table = p.memory[0]
	p.table.advise(0, len(p.table.b))
	p.lastHit, p.hits, p.busy = p.memory[1].uint32s(), p.memory[2].uint32s(), p.memory[3].uint64s()
	p.byNumber = make([]atomic.Pointer[row], p.maxRows)
	p.numbers = make([]uint64, (p.maxRows+63)/64)
	p.hasFree = make([]uint64, (p.maxRows+63)/64)
	// The memory is unmapped when nobody can reach the pool any more: Close only empties it, so that a late reader
	// sees zeroes and does not crash.
	runtime.AddCleanup(p, func(m []*reservation) {
		for _, r := range m {
			r.release()
		}
	}, p.memory)
	return nil
}

func (p *Pool) release() {
	for _, r := range p.memory {
		r.release()
	}
}

// empty gives the tables' memory back to the system.
func (p *Pool) empty() {
	for _, r := range p.memory {
		r.drop(0, len(r.b))
	}
}

func (p *Pool) rowTableBytes() int { return int(p.tableBlocks) * ondisk.BlockBytes }
func (p *Pool) rowBytes() uint64 {
	return p.rowSegments() * uint64(p.v.segmentUnits) * ondisk.BlockBytes
}

// rowTable is the part of the table that holds a row's records.
func (p *Pool) rowTable(number uint32) []byte {
	n := p.rowTableBytes()
	return p.table.b[int(number)*n:][:n:n]
}

func (p *Pool) recordOffset(slot uint32) int {
	return int(slot/p.slotsPerRow)*p.rowTableBytes() + ondisk.RecordOffset(slot%p.slotsPerRow)
}

func (p *Pool) record(slot uint32) []byte {
	off := p.recordOffset(slot)
	return p.table.b[off : off+ondisk.RecordBytes : off+ondisk.RecordBytes]
}

func (p *Pool) ID() PoolID             { return p.id }
func (p *Pool) Layout() *stripe.Layout { return p.layout }

// FamilyID is the pool's family, 0 for none; known before the pool is durable.
func (p *Pool) FamilyID() uint16 { return p.family }

// SlotBytes is what a slot occupies on the drives.
func (p *Pool) SlotBytes() uint64   { return p.layout.SlotUnits() * ondisk.BlockBytes }
func (p *Pool) SlotsPerRow() uint32 { return p.slotsPerRow }
func (p *Pool) EntryUnits() uint64  { return p.entryUnits }

// RowBytes is what a row takes from the volume, its record table not counted.
func (p *Pool) RowBytes() uint64 { return p.rowBytes() }

// CreationTime is in Unix nanoseconds.
func (p *Pool) CreationTime() int64 { return p.creationTime }

// Spec describes the pool, with the limits of now.
func (p *Pool) Spec() PoolSpec {
	p.v.mu.Lock()
	defer p.v.mu.Unlock()
	s := p.spec
	s.MinBytes, s.MaxBytes, s.MaxSlots = p.limits.minBytes, p.limits.maxBytes, p.limits.maxSlots
	if f := p.v.families[p.family]; f != nil {
		s.Family = f.Name
	}
	return s
}

// Slots is one more than the highest slot number that any row backs (slot = row x SlotsPerRow + index; rows may be
// absent).
func (p *Pool) Slots() uint32 { return p.highest.Load() * p.slotsPerRow }

// Capacity is how many slots the pool could have now: its rows and those that it could still be given, within its
// limits and the minimums of others.
func (p *Pool) Capacity() uint32 {
	v := p.v
	v.mu.Lock()
	defer v.mu.Unlock()
	have := uint64(p.rowCount - p.away)
	rows := have + v.roomForRows(p)
	if p.limits.maxBytes != 0 {
		rows = min(rows, max(p.limits.maxBytes/p.rowBytes(), have))
	}
	slots := uint32(min(rows, uint64(p.maxRows))) * p.slotsPerRow
	if p.limits.maxSlots != 0 {
		slots = min(slots, p.limits.maxSlots)
	}
	return slots
}

// Rows returns all rows; Generation changes whenever they do.
func (p *Pool) Rows() []Row {
	var out []Row
	for i := range p.highest.Load() {
		if r := p.byNumber[i].Load(); r != nil {
			out = append(out, Row{Number: r.number, Drives: append([]uint16(nil), r.drives...),
				Units: append([]uint64(nil), r.units...), Away: r.away.Load(), Unknown: r.noTable.Load()})
		}
	}
	return out
}

func (p *Pool) Generation() uint64 { return p.mapChange.Load() }

func (p *Pool) rowOf(slot uint32) *row {
	if n := slot / p.slotsPerRow; n < p.maxRows {
		return p.byNumber[n].Load()
	}
	return nil
}

// Extent locates one object: drive, first unit, units.
func (p *Pool) Extent(slot uint32, object uint16) (driveIndex uint16, unit uint64, units uint32, ok bool) {
	r := p.rowOf(slot)
	if r == nil || int(object) >= len(p.units) {
		return 0, 0, 0, false
	}
	e, u := p.layout.Locate(slot%p.slotsPerRow, object)
	return r.drives[e], r.units[e] + u, p.units[object], true
}

// Resolve finds whose bytes a unit of a drive holds. Lock-free: called for every command of the virtual controller.
func (v *Volume) Resolve(driveIndex uint16, unit uint64) (p *Pool, slot uint32, object uint16, within uint32, ok bool) {
	m := v.member(driveIndex)
	if m == nil || m.lost() {
		return nil, 0, 0, 0, false
	}
	s, ok := m.segmentOf(unit)
	if !ok {
		return nil, 0, 0, 0, false
	}
	owner := m.owner[s].Load()
	if owner == 0 {
		return nil, 0, 0, 0, false
	}
	r := v.rows[owner>>ownerEntryBits].Load()
	if r == nil {
		return nil, 0, 0, 0, false
	}
	e := int(owner & (1<<ownerEntryBits - 1))
	// The reference may have passed to another row since owner was read; that row's entry then does not hold the unit.
	if e >= len(r.units) || r.drives[e] != driveIndex || unit-r.units[e] >= r.pool.entryUnits {
		return nil, 0, 0, 0, false
	}
	p = r.pool
	index, object, within, ok := p.layout.Resolve(e, unit-r.units[e], p.slotsPerRow)
	return p, r.number*p.slotsPerRow + index, object, within, ok
}

// Counts of slots: Free can be allocated now; Freeing wait for durability or discard; Used are allocated or committed.
func (p *Pool) Counts() (free, freeing, used uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nFree, p.nFreeing, p.nUsed
}

// RowFree is how many slots of a row can be allocated now; 0 for a row that is not there.
func (p *Pool) RowFree(number uint32) uint32 {
	if number >= p.maxRows {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.byNumber[number].Load(); r != nil {
		return r.free
	}
	return 0
}

// Record decodes a slot's durable record. The caller must know that the slot is committed and cannot be freed
// meanwhile (gpufile's lock).
func (p *Pool) Record(slot uint32) ondisk.Record {
	var r ondisk.Record
	r.Decode(p.record(slot))
	r.LastHit, r.Hits = p.HitInfo(slot)
	return r
}

// RecordKey is the key alone, without decoding (the index compares it); aliases the table. Same rule as Record.
func (p *Pool) RecordKey(slot uint32) *ondisk.Key {
	return (*ondisk.Key)(p.table.b[p.recordOffset(slot)+ondisk.RecordKeyOff:])
}

// RecordTenant is the tenant alone: every lookup for a tenant checks it. Same rule as Record.
func (p *Pool) RecordTenant(slot uint32) uint32 {
	return binary.LittleEndian.Uint32(p.table.b[p.recordOffset(slot)+ondisk.RecordTenantOff:])
}

// RecordLease is what a lease says of a file: every pin reads it of all its files. Same rule as Record.
func (p *Pool) RecordLease(slot uint32) (tokens uint32, nonce, generation uint64) {
	b, le := p.record(slot), binary.LittleEndian
	return le.Uint32(b[ondisk.RecordTokensOff:]), le.Uint64(b[ondisk.RecordNonceOff:]), le.Uint64(b[ondisk.RecordGenOff:])
}

// Touch notes a hit. It is durable at the next checkpoint that writes hits: a clean close, Volume.Checkpoint, or one
// of the checkpoints by time every ten minutes. Writing them with every checkpoint would rewrite the table of every
// block that was merely read.
func (p *Pool) Touch(slot uint32, unixSeconds uint32) {
	r := p.rowOf(slot)
	if r == nil {
		return
	}
	atomic.StoreUint32(&p.lastHit[slot], unixSeconds)
	atomic.AddUint32(&p.hits[slot], 1)
	block := slot % p.slotsPerRow / ondisk.RecordsPerBlock
	if w, bit := &r.touched[block/64], uint64(1)<<(block%64); w.Load()&bit == 0 {
		w.Or(bit)
	}
	if !r.anyTouched.Load() {
		r.anyTouched.Store(true)
	}
}

// HitInfo is what Touch wrote.
func (p *Pool) HitInfo(slot uint32) (lastHit uint32, hits uint32) {
	return atomic.LoadUint32(&p.lastHit[slot]), atomic.LoadUint32(&p.hits[slot])
}

// IsCommitted says whether a slot has a durable record.
func (p *Pool) IsCommitted(slot uint32) bool {
	return p.rowOf(slot) != nil && ondisk.State(p.record(slot)[ondisk.RecordStateOff]) == ondisk.StateCommitted
}

// LastHit is the first part of HitInfo.
func (p *Pool) LastHit(slot uint32) uint32 { return atomic.LoadUint32(&p.lastHit[slot]) }

// Committed calls f for every committed slot.
func (p *Pool) Committed(f func(slot uint32)) {
	p.CommittedIn(0, p.highest.Load(), func(slot uint32, _ []byte) { f(slot) })
}

// CommittedIn calls f for every committed slot of the rows from up to, and not including, to, with its encoded record,
// which aliases the table; its hit fields are those of the last checkpoint that wrote them (at Open of gpufile).
func (p *Pool) CommittedIn(from, to uint32, f func(slot uint32, record []byte)) {
	for n := from; n < min(to, p.highest.Load()); n++ {
		if p.byNumber[n].Load() == nil {
			continue
		}
		t := p.rowTable(n)
		for i := range p.slotsPerRow {
			off := ondisk.RecordOffset(i)
			rec := t[off : off+ondisk.RecordBytes : off+ondisk.RecordBytes]
			if ondisk.State(rec[ondisk.RecordStateOff]) == ondisk.StateCommitted {
				f(n*p.slotsPerRow+i, rec)
			}
		}
	}
}

// bit is where a slot's bit lies in busy: by row, then residue (index mod W), then set. Slots of one residue are
// neighbours, so a free one is found by whole words.
func (p *Pool) bit(slot uint32) (word int, mask uint64, residue uint32) {
	w := uint32(p.v.width)
	n, i := slot/p.slotsPerRow, slot%p.slotsPerRow
	residue, set := i%w, i/w
	return int((n*w+residue)*p.setWords + set/64), 1 << (set % 64), residue
}

func (p *Pool) isBusy(slot uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	word, mask, _ := p.bit(slot)
	return p.busy[word]&mask != 0
}

// Alloc takes a free slot. With a parent slot (or NoSlot) it prefers the parent's drives and residue r+1. ok is false
// when none is free now: Freeing tells whether waiting helps.
func (p *Pool) Alloc(parent uint32) (slot uint32, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nFree == 0 || p.slotCap != 0 && p.nUsed >= p.slotCap {
		return NoSlot, false
	}
	w := uint32(p.v.width)
	want := p.residue
	if pr := p.parentRow(parent); pr != nil {
		want = (parent%p.slotsPerRow%w + 1) % w
		if pr.free > 0 && !pr.away.Load() {
			return p.take(pr, want), true
		}
		if r := p.rowOnDrives(pr.driveSet); r != nil {
			return p.take(r, want), true
		}
	} else {
		p.residue = (p.residue + 1) % w
	}
	r := p.firstRow()
	return p.take(r, want), true
}

func (p *Pool) parentRow(parent uint32) *row {
	if parent == NoSlot {
		return nil
	}
	return p.rowOf(parent)
}

// take assigns a slot of a row that has one, of the wanted residue or the next that is free.
func (p *Pool) take(r *row, residue uint32) uint32 {
	w := uint32(p.v.width)
	for r.freeBy[residue] == 0 {
		residue = (residue + 1) % w
	}
	base := int((r.number*w + residue) * p.setWords)
	for i := range int(p.setWords) {
		if free := ^p.busy[base+i]; free != 0 {
			b := uint32(bits.TrailingZeros64(free))
			p.busy[base+i] |= 1 << b
			p.countFree(r, residue, -1)
			p.count(r, 1, 0)
			return r.number*p.slotsPerRow + (uint32(i)*64+b)*w + residue
		}
	}
	panic("extentmap: free count of a row does not match its map")
}

// countFree keeps the counts of free slots. Pool.mu.
func (p *Pool) countFree(r *row, residue uint32, d int32) {
	r.freeBy[residue] += uint32(d)
	r.free += uint32(d)
	if r.away.Load() {
		return
	}
	p.nFree += uint32(d)
	if r.free == 0 {
		p.hasFree[r.number/64] &^= 1 << (r.number % 64)
	} else {
		p.hasFree[r.number/64] |= 1 << (r.number % 64)
		p.from = min(p.from, r.number)
	}
}

// count keeps the counts of slots that are not free. Pool.mu.
func (p *Pool) count(r *row, used, freeing int32) {
	r.used += uint32(used)
	r.freeing += uint32(freeing)
	if !r.away.Load() {
		p.nUsed += uint32(used)
		p.nFreeing += uint32(freeing)
	}
}

// countSlot is count for the row of a slot.
func (p *Pool) countSlot(slot uint32, used, freeing int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(p.rowOf(slot), used, freeing)
}

// review takes a row out of the counts when one of its drives is lost, and in again. Volume.mu.
func (p *Pool) review(r *row) {
	away := !p.v.rowUsable(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.away.Load() == away {
		return
	}
	word, bit := &p.hasFree[r.number/64], uint64(1)<<(r.number%64)
	if away {
		p.away++
		p.nFree, p.nUsed, p.nFreeing = p.nFree-r.free, p.nUsed-r.used, p.nFreeing-r.freeing
		*word &^= bit
	} else {
		p.away--
		p.nFree, p.nUsed, p.nFreeing = p.nFree+r.free, p.nUsed+r.used, p.nFreeing+r.freeing
		if r.free > 0 {
			*word |= bit
			p.from = min(p.from, r.number)
		}
	}
	r.away.Store(away)
	p.mapChange.Add(1)
}

// rowUsable says whether all of a row can be used. Volume.mu.
func (v *Volume) rowUsable(r *row) bool {
	for _, d := range r.drives {
		if m := v.member(d); m == nil || !m.is(DriveOnline) {
			return false
		}
	}
	return !r.noTable.Load()
}

// reviewRows looks at all rows that have to do with a drive whose state has changed. Volume.mu.
func (v *Volume) reviewRows(index uint16) {
	for _, p := range v.pools {
		for n := range p.highest.Load() {
			if r := p.byNumber[n].Load(); r != nil && r.driveSet>>index&1 != 0 {
				p.review(r)
			}
		}
	}
	select {
	case v.rowsChanged <- struct{}{}:
	default:
	}
}

// RowsChanged tells whoever receives that rows became available or unavailable.
func (v *Volume) RowsChanged() <-chan struct{} { return v.rowsChanged }

// Available says whether a slot's row can be used: none of its drives is lost.
func (p *Pool) Available(slot uint32) bool {
	r := p.rowOf(slot)
	return r != nil && !r.away.Load()
}

// firstRow is the lowest row with free slots; there is one. Low rows fill first, so high ones empty and can be dropped.
func (p *Pool) firstRow() *row {
	for i := p.from / 64; ; i++ {
		if x := p.hasFree[i]; x != 0 {
			p.from = i*64 + uint32(bits.TrailingZeros64(x))
			return p.byNumber[p.from].Load()
		}
	}
}

// rowScanMax bounds the search for a row on the parent's drives.
const rowScanMax = 64

func (p *Pool) rowOnDrives(set uint64) *row {
	seen := 0
	for i := int(p.from / 64); i < len(p.hasFree); i++ {
		for x := p.hasFree[i]; x != 0; x &= x - 1 {
			r := p.byNumber[i*64+bits.TrailingZeros64(x)].Load()
			if r.driveSet == set {
				return r
			}
			if seen++; seen == rowScanMax {
				return nil
			}
		}
	}
	return nil
}

// Unalloc returns a slot that was allocated and never committed; allocatable at once.
func (p *Pool) Unalloc(slot uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(p.rowOf(slot), -1, 0)
	p.setFree(slot)
}

// setFree makes a busy slot allocatable. Pool.mu.
func (p *Pool) setFree(slot uint32) {
	word, mask, residue := p.bit(slot)
	if p.busy[word]&mask == 0 {
		panic("extentmap: slot freed twice")
	}
	p.busy[word] &^= mask
	p.countFree(p.byNumber[slot/p.slotsPerRow].Load(), residue, 1)
}

// Hurry makes slots allocatable that wait for their discard, without it, and reports whether there were any: somebody
// needs them now.
func (p *Pool) Hurry() bool { return p.v.discards.give(p) }

// releaseFreed makes slots allocatable whose freeing is durable (and whose bytes are discarded).
func (p *Pool) releaseFreed(slots []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range slots {
		p.count(p.rowOf(s), 0, -1)
		p.setFree(s)
	}
}

// publish makes a durable row visible. Its table in memory is filled: slots without a committed record are free.
func (p *Pool) publish(r *row) {
	v := p.v
	v.assignRef(r)
	p.byNumber[r.number].Store(r)
	p.highest.Store(max(p.highest.Load(), r.number+1))
	if !v.rowUsable(r) {
		r.away.Store(true)
		p.away++
	}
	if !v.covered(r, 0) || !v.covered(r, 1) {
		v.drivesChanged.Store(true) // a drive was lost while the row was on its way
	}
	for e, d := range r.drives {
		m := v.member(d)
		s, _ := m.segmentOf(r.units[e])
		for i := range uint32(1) << p.shift {
			m.owner[s+i].Store(r.ref<<ownerEntryBits | uint32(e))
		}
	}
	p.mapChange.Add(1)
}

// deriveFree computes a row's free slots from its records, and takes the hits over from them. Nothing of the row can be
// allocated before its slots are counted free, so its part of the tables needs no lock.
func (p *Pool) deriveFree(r *row) {
	w := uint32(p.v.width)
	freeBy, used := make([]uint32, w), uint32(0)
	base := int(r.number*w) * int(p.setWords)
	words := p.busy[base : base+int(w*p.setWords)]
	for i := range words {
		words[i] = ^uint64(0)
	}
	t := p.rowTable(r.number)
	le := binary.LittleEndian
	for i := range p.slotsPerRow {
		slot := r.number*p.slotsPerRow + i
		rec := t[ondisk.RecordOffset(i):]
		if ondisk.State(rec[ondisk.RecordStateOff]) == ondisk.StateCommitted {
			// Zeroes are there already, and pages of files that were never hit take no memory.
			if hits := le.Uint32(rec[ondisk.RecordHitsOff:]); hits != 0 {
				p.hits[slot] = hits
			}
			if last := le.Uint32(rec[ondisk.RecordLastHitOff:]); last != 0 {
				p.lastHit[slot] = last
			}
			used++
			continue
		}
		word, mask, residue := p.bit(slot)
		p.busy[word] &^= mask
		freeBy[residue]++
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(r, int32(used), 0)
	for residue, n := range freeBy {
		if n > 0 {
			p.countFree(r, uint32(residue), int32(n))
		}
	}
}

// unpublish hides a row that is dropped.
func (p *Pool) unpublish(r *row) {
	v := p.v
	if r.away.Load() {
		p.away--
	}
	for e, d := range r.drives {
		m := v.member(d)
		s, _ := m.segmentOf(r.units[e])
		for i := range uint32(1) << p.shift {
			m.owner[s+i].Store(0)
		}
	}
	p.byNumber[r.number].Store(nil)
	v.freeRef(r)
	n := p.highest.Load()
	for n > 0 && p.byNumber[n-1].Load() == nil {
		n--
	}
	p.highest.Store(n)
	p.mapChange.Add(1)
}

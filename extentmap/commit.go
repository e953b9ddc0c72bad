package extentmap

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	// batchBlocks is what one group commit gathers; a single larger transaction makes a larger batch.
	batchBlocks = 1024
	// queueBytesMax bounds what waits for the committer; beyond it Submit says ErrAgain.
	queueBytesMax = 16 << 20
)

// Transaction collects changes that become durable together. It is used by one goroutine and submitted once.
type Transaction struct {
	v      *Volume
	buf    []byte // entries
	flush  uint64
	frees  []freed
	puts   []freed
	bad    error
	done   func(error)
	ticket *Ticket
}

type freed struct {
	pool *Pool
	slot uint32
}

// Begin starts a transaction.
func (v *Volume) Begin() *Transaction { return &Transaction{v: v} }

// Put commits the record of an allocated slot; Sequence is filled in. flush has a bit for every drive index whose
// payload writes must be durable first.
func (t *Transaction) Put(p *Pool, slot uint32, r *ondisk.Record, flush uint64) {
	if p.rowOf(slot) == nil {
		t.bad = fmt.Errorf("%w: pool %d has no slot %d", ErrInvalid, p.id, slot)
		return
	}
	if !p.isBusy(slot) {
		t.bad = fmt.Errorf("%w: slot %d of pool %d is not allocated", ErrInvalid, slot, p.id)
		return
	}
	r.Sequence = t.v.commits.Add(1) - 1
	r.State, r.Flags = ondisk.StateCommitted, 0
	t.buf = ondisk.AppendPut(t.buf, uint16(p.id), slot, r)
	t.puts = append(t.puts, freed{p, slot})
	t.flush |= flush
}

// Free frees a committed slot: allocatable again only when durable (and discarded).
func (t *Transaction) Free(p *Pool, slot uint32) {
	if p.rowOf(slot) == nil {
		t.bad = fmt.Errorf("%w: pool %d has no slot %d", ErrInvalid, p.id, slot)
		return
	}
	t.buf = ondisk.AppendFree(t.buf, uint16(p.id), slot)
	t.frees = append(t.frees, freed{p, slot})
}

// MaxTransactionBytes bounds the entries of one transaction (ondisk.PutBytes a Put, ondisk.FreeBytes a Free): half of
// the journal.
func (v *Volume) MaxTransactionBytes() int {
	return int(v.journal.Blocks/2) * ondisk.PayloadBytes
}

// Submit queues the transaction for group commit and returns at once. done (may be nil) runs on the committer when the
// outcome is known: it must not block. ErrAgain if the journal has no room now (nothing was queued); ErrReadOnly.
func (t *Transaction) Submit(done func(err error)) (*Ticket, error) {
	v := t.v
	switch {
	case v.readOnly:
		return nil, ErrReadOnly
	case t.bad != nil:
		return nil, t.bad
	case len(t.buf) > v.MaxTransactionBytes():
		return nil, fmt.Errorf("%w: transaction of %d bytes; at most %d", ErrInvalid, len(t.buf),
			v.MaxTransactionBytes())
	}
	if err := v.err(); err != nil {
		return nil, err
	}
	t.done = done
	ticket := NewTicket()
	t.ticket = ticket
	v.queueMu.Lock()
	defer v.queueMu.Unlock()
	if v.closing {
		return nil, ErrClosed
	}
	if v.queueBytes > 0 && v.queueBytes+len(t.buf) > queueBytesMax {
		v.kickCheckpoint()
		return nil, fmt.Errorf("%w: the journal is full", ErrAgain)
	}
	for _, f := range t.puts {
		if r := f.pool.rowOf(f.slot); r == nil || r.condemned {
			return nil, fmt.Errorf("%w: slot %d of pool %d is on a drive that was forgotten", ErrMissing, f.slot, f.pool.id)
		}
	}
	for _, f := range t.frees {
		if r := f.pool.rowOf(f.slot); r == nil || r.condemned {
			return nil, fmt.Errorf("%w: slot %d of pool %d is on a drive that was forgotten", ErrMissing, f.slot, f.pool.id)
		}
	}
	for _, f := range t.frees {
		f.pool.countSlot(f.slot, -1, 1)
	}
	v.queue = append(v.queue, t)
	v.queueBytes += len(t.buf)
	select {
	case v.wake <- struct{}{}:
	default:
	}
	return ticket, nil
}

// Err is why the volume accepts no more changes (ErrFailed with its cause, or ErrClosed), or nil.
func (v *Volume) Err() error { return v.err() }

// err is why nothing more is accepted, or nil.
func (v *Volume) err() error {
	if e := v.failure.Load(); e != nil {
		return *e
	}
	return nil
}

// fail stops the volume: after a failed metadata write nobody knows what the drives hold, so nothing more is
// acknowledged. The next mount finds out.
func (v *Volume) fail(err error) {
	v.failure.CompareAndSwap(nil, &err)
	v.applyMu.Lock()
	v.room.Broadcast()
	v.applyMu.Unlock()
}

// committer is the one goroutine that writes the journal.
func (v *Volume) committer() {
	defer v.committing.Done()
	c := &commit{v: v, buffer: drive.AlignedBuffer(min(batchBlocks, int(v.journal.Blocks/2)) * ondisk.BlockBytes)}
	defer func() { drive.FreeBuffer(c.buffer) }()
	for {
		batch, closing := v.takeBatch()
		if len(batch) == 0 {
			if closing {
				return
			}
			<-v.wake
			continue
		}
		c.run(batch)
	}
}

// takeBatch removes the transactions of the next group commit from the queue.
func (v *Volume) takeBatch() (batch []*Transaction, closing bool) {
	v.queueMu.Lock()
	defer v.queueMu.Unlock()
	limit := min(batchBlocks, int(v.journal.Blocks/2)) * ondisk.PayloadBytes
	n, size := 0, 0
	for n < len(v.queue) && (n == 0 || size+len(v.queue[n].buf) <= limit) {
		size += len(v.queue[n].buf)
		n++
	}
	batch = append(batch, v.queue[:n]...)
	clear(v.queue[:n])
	v.queue = v.queue[n:]
	if len(v.queue) == 0 {
		v.queue = nil
	}
	v.queueBytes -= size
	return batch, v.closing
}

// commit is the committer's state.
type commit struct {
	v      *Volume
	buffer []byte
}

func (c *commit) run(batch []*Transaction) {
	errs := make([]error, len(batch))
	c.flushPayload(batch, errs)
	if err := c.write(batch, errs); err != nil {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
	}
	for i, t := range batch {
		if errs[i] != nil {
			t.unfree()
		}
		if t.done != nil {
			t.done(errs[i])
		}
		t.ticket.Complete(errs[i])
	}
}

// unfree counts the slots of a failed transaction as used again.
func (t *Transaction) unfree() {
	for _, f := range t.frees {
		f.pool.countSlot(f.slot, 1, -1)
	}
}

// flushPayload makes durable what the batch's records promise. A drive that fails takes down only the transactions
// that need it.
func (c *commit) flushPayload(batch []*Transaction, errs []error) {
	var mask uint64
	for _, t := range batch {
		mask |= t.flush
	}
	if mask == 0 {
		return
	}
	var wg sync.WaitGroup
	var failed [ondisk.MaxDrives]error
	for x := mask; x != 0; x &= x - 1 {
		d := bits.TrailingZeros64(x)
		m := c.v.member(uint16(d))
		switch {
		case m == nil:
			failed[d] = fmt.Errorf("%w: no drive %d", ErrInvalid, d)
			continue
		case m.lost():
			failed[d] = fmt.Errorf("%w: drive %d", ErrMissing, d)
			continue
		}
		wg.Go(func() {
			// After a failed flush nobody can tell which writes were lost, and the kernel reports it only once.
			if failed[d] = m.flush(); failed[d] != nil {
				_ = c.v.lose(m, failed[d]) // whatever comes of it, this transaction fails with the flush's error
			}
		})
	}
	wg.Wait()
	for i, t := range batch {
		for x := t.flush; x != 0 && errs[i] == nil; x &= x - 1 {
			errs[i] = failed[bits.TrailingZeros64(x)]
		}
	}
}

// write journals the transactions that have no error yet, and applies them.
func (c *commit) write(batch []*Transaction, errs []error) error {
	v := c.v
	size := 0
	for i, t := range batch {
		if errs[i] == nil {
			size += len(t.buf)
		}
	}
	if size == 0 {
		return v.err()
	}
	count := ondisk.StreamBlocks(size)
	if err := v.waitRoom(uint64(count)); err != nil {
		return err
	}
	v.journalMu.Lock()
	defer v.journalMu.Unlock()
	v.applyMu.Lock()
	head, chain := v.head, v.chain // nobody else moves them
	v.applyMu.Unlock()
	if len(c.buffer) < count*ondisk.BlockBytes {
		drive.FreeBuffer(c.buffer)
		c.buffer = drive.AlignedBuffer(count * ondisk.BlockBytes)
	}
	chain = c.fill(batch, errs, head, chain, uint32(count))
	timeouts := v.timeouts.Load()
	err := v.writeJournal(c.buffer[:count*ondisk.BlockBytes], head)
	if v.timeouts.Load() != timeouts {
		c.buffer = nil // a stuck drive may still read it
	}
	if err != nil {
		return err
	}
	v.applyBatch(batch, errs, head+uint64(count), chain)
	return nil
}

// waitRoom waits until the journal has room for n blocks. A checkpoint writes no journal block, so it always can make
// room.
func (v *Volume) waitRoom(n uint64) error {
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	for v.head-v.tail+n > v.journal.Blocks {
		if err := v.err(); err != nil {
			return err
		}
		v.kickCheckpoint()
		v.room.Wait()
	}
	return v.err()
}

// fill packs the batch's entries into sealed blocks and returns the Chain of the block after them.
func (c *commit) fill(batch []*Transaction, errs []error, head uint64, chain uint32, count uint32) uint32 {
	j := &c.v.journal
	var payload [ondisk.PayloadBytes]byte
	n, index := 0, uint32(0)
	seal := func() {
		at := ondisk.BatchBlock{Sequence: head + uint64(index), Chain: chain, Index: index, Count: count}
		chain = j.Seal(c.buffer[int(index)*ondisk.BlockBytes:][:ondisk.BlockBytes], at, payload[:n])
		n, index = 0, index+1
	}
	for i, t := range batch {
		if errs[i] != nil {
			continue
		}
		for b := t.buf; len(b) > 0; {
			k := copy(payload[n:], b)
			n, b = n+k, b[k:]
			if n == len(payload) {
				seal()
			}
		}
	}
	if n > 0 {
		seal()
	}
	return chain
}

// writeJournal writes blocks from sequence head on to every metadata drive and flushes them.
func (v *Volume) writeJournal(b []byte, head uint64) error {
	return v.write(v.metadataMembers(), func(m *member) error {
		room := int(v.journal.Blocks-head%v.journal.Blocks) * ondisk.BlockBytes
		first := min(room, len(b))
		if err := m.writeAt(b[:first], v.journal.Unit(head)); err != nil {
			return err
		}
		if first < len(b) {
			if err := m.writeAt(b[first:], v.journal.First); err != nil {
				return err
			}
		}
		return m.flush()
	})
}

// applyBatch brings the durable batch into memory.
func (v *Volume) applyBatch(batch []*Transaction, errs []error, head uint64, chain uint32) {
	v.applyMu.Lock()
	v.head, v.chain = head, chain
	a := applier{v: v, live: true}
	for i, t := range batch {
		if errs[i] == nil {
			if err := ondisk.VisitEntries(t.buf, &a); err != nil {
				panic(fmt.Sprintf("extentmap: own journal entries are wrong: %v", err))
			}
			v.transactions.Add(1)
		}
	}
	half := v.head-v.tail > v.journal.Blocks/2
	limbo := len(v.limbo) > 0
	v.applyMu.Unlock()
	if half || limbo {
		v.kickCheckpoint()
	}
	a.releaseFrees()
}

func (v *Volume) kickCheckpoint() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// applier brings entries into memory: those of a transaction that became durable (live), of the catalog, or of the
// journal at mount. Volume.applyMu.
type applier struct {
	v       *Volume
	live    bool
	catalog bool // entries come from the catalog: rows have tables on the drives
	frees   []freed
	last    *Pool // of the entry before
	loaded  []*row
}

func (a *applier) pool(id uint16) (*Pool, error) {
	if a.last != nil && uint16(a.last.id) == id {
		return a.last, nil
	}
	a.v.mu.Lock()
	p := a.v.pool(PoolID(id))
	a.v.mu.Unlock()
	if p == nil {
		return nil, fmt.Errorf("pool %d does not exist", id)
	}
	a.last = p
	return p, nil
}

// Pool adds a pool.
func (a *applier) Pool(e *ondisk.Pool) error {
	v := a.v
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.pool(PoolID(e.ID))
	if !a.live {
		if n := len(v.pools); p != nil || n > 0 && uint16(v.pools[n-1].id) > e.ID {
			return fmt.Errorf("pool %d is there twice or out of order", e.ID)
		}
		var err error
		if p, err = v.newPool(e); err != nil {
			return fmt.Errorf("pool %d: %w", e.ID, err)
		}
		p.created = doneTicket(nil)
		v.pools = append(v.pools, p)
		v.catalogBytes += ondisk.EntrySize(len(e.Name) + len(e.Identity) + len(e.Geometry) + ondisk.PoolFixedBytes)
	}
	p.durable = true
	v.catDirty = true
	return nil
}

// Limits changes a pool's limits.
func (a *applier) Limits(e *ondisk.Limits) error {
	p, err := a.pool(e.Pool)
	if err != nil {
		return err
	}
	a.v.mu.Lock()
	p.limits = limits{e.MinBytes, e.MaxBytes, e.MaxSlots}
	a.v.mu.Unlock()
	p.mu.Lock()
	p.slotCap = e.MaxSlots
	p.mu.Unlock()
	a.v.catDirty = true
	return nil
}

// Family adds a family.
func (a *applier) Family(e *ondisk.Family) error {
	v := a.v
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.families[e.ID] == nil {
		v.catalogBytes += ondisk.EntrySize(8 + len(e.Name))
	}
	v.families[e.ID] = e
	v.catDirty = true
	return nil
}

// Tenant adds or changes a tenant.
func (a *applier) Tenant(e *ondisk.Tenant) error {
	v := a.v
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, ok := v.tenants[e.ID]; !ok && !a.live {
		v.catalogBytes += ondisk.EntrySize(16 + len(e.Name))
	}
	v.tenants[e.ID] = *e
	v.catDirty = true
	return nil
}

// Row adds a row.
func (a *applier) Row(e *ondisk.Row) error {
	v := a.v
	p, err := a.pool(e.Pool)
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	r := p.pending[e.Number]
	if !a.live {
		if r, err = p.claimEntry(e); err != nil {
			return fmt.Errorf("row %d of pool %d: %w", e.Number, e.Pool, err)
		}
	}
	delete(p.pending, e.Number)
	p.publish(r)
	v.catDirty = true
	if a.catalog {
		a.loaded = append(a.loaded, r)
		return nil
	}
	// A new table on the drives is whatever lay there before: all of it is written by the next checkpoint.
	p.clearTable(r.number)
	v.markAllDirty(r)
	if a.live {
		p.deriveFree(r)
	}
	return nil
}

// claimEntry makes a row from what the medium says, and takes its space. Volume.mu.
func (p *Pool) claimEntry(e *ondisk.Row) (*row, error) {
	v := p.v
	if e.Number >= p.maxRows || p.numbers[e.Number/64]>>(e.Number%64)&1 != 0 {
		return nil, fmt.Errorf("number out of range or there twice")
	}
	if len(e.Entries) != v.width {
		return nil, fmt.Errorf("%d entries in a volume of width %d", len(e.Entries), v.width)
	}
	r := p.newRow(e.Number)
	r.tables = e.Tables
	for _, l := range e.Entries {
		if l.Drive() >= ondisk.MaxDrives {
			return nil, fmt.Errorf("entry on drive %d", l.Drive())
		}
		r.drives, r.units = append(r.drives, l.Drive()), append(r.units, l.Unit())
	}
	if err := v.claimRow(p, r); err != nil {
		return nil, err
	}
	r.setDrives()
	p.numbers[e.Number/64] |= 1 << (e.Number % 64)
	p.rowCount++
	v.catalogBytes += ondisk.RowEntrySize(v.width)
	return r, nil
}

// DropRow hides a row; its space stays assigned until a later checkpoint is durable.
func (a *applier) DropRow(e ondisk.DropRow) error {
	v := a.v
	p, err := a.pool(e.Pool)
	if err != nil {
		return err
	}
	r := p.rowByNumber(e.Number)
	if r == nil {
		return fmt.Errorf("pool %d has no row %d", e.Pool, e.Number)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	p.unpublish(r)
	p.clearTable(r.number)
	p.rowCount--
	v.limbo = append(v.limbo, r)
	v.limboSegments += p.rowSegments()
	v.catDirty = true
	return nil
}

func (p *Pool) rowByNumber(n uint32) *row {
	if n >= p.maxRows {
		return nil
	}
	return p.byNumber[n].Load()
}

// clearTable empties a row's records and hits in memory.
func (p *Pool) clearTable(number uint32) {
	n := p.rowTableBytes()
	p.table.drop(int(number)*n, n)
	first, end := number*p.slotsPerRow, (number+1)*p.slotsPerRow
	clear(p.lastHit[first:end])
	clear(p.hits[first:end])
}

// Put stores a record.
func (a *applier) Put(e ondisk.Put) error {
	p, err := a.pool(e.Pool)
	if err != nil {
		return err
	}
	r := p.rowOf(e.Slot)
	if r == nil {
		return fmt.Errorf("pool %d has no slot %d", e.Pool, e.Slot)
	}
	copy(p.record(e.Slot), e.Record)
	le := binary.LittleEndian
	atomic.StoreUint32(&p.lastHit[e.Slot], le.Uint32(e.Record[ondisk.RecordLastHitOff:]))
	atomic.StoreUint32(&p.hits[e.Slot], le.Uint32(e.Record[ondisk.RecordHitsOff:]))
	a.v.markDirty(r, e.Slot%p.slotsPerRow/ondisk.RecordsPerBlock)
	if !a.live {
		s := le.Uint64(e.Record[ondisk.RecordSeqOff:])
		if s >= a.v.commits.Load() {
			a.v.commits.Store(s + 1)
		}
	}
	return nil
}

// Free empties a record.
func (a *applier) Free(e ondisk.Free) error {
	p, err := a.pool(e.Pool)
	if err != nil {
		return err
	}
	r := p.rowOf(e.Slot)
	if r == nil {
		return fmt.Errorf("pool %d has no slot %d", e.Pool, e.Slot)
	}
	rec := p.record(e.Slot)
	committed := ondisk.State(rec[ondisk.RecordStateOff]) == ondisk.StateCommitted
	clear(rec)
	atomic.StoreUint32(&p.lastHit[e.Slot], 0)
	atomic.StoreUint32(&p.hits[e.Slot], 0)
	a.v.markDirty(r, e.Slot%p.slotsPerRow/ondisk.RecordsPerBlock)
	if !a.live {
		return nil
	}
	if committed {
		a.frees = append(a.frees, freed{p, e.Slot})
		return nil
	}
	p.countSlot(e.Slot, 1, -1) // freed twice: the first time counts
	return nil
}

// releaseFrees passes durably freed slots on: to the discarder, or straight to the allocator.
func (a *applier) releaseFrees() {
	for len(a.frees) > 0 {
		p, n := a.frees[0].pool, 0
		slots := make([]uint32, 0, len(a.frees))
		for n < len(a.frees) && a.frees[n].pool == p {
			slots = append(slots, a.frees[n].slot)
			n++
		}
		a.frees = a.frees[n:]
		if !a.v.discards.add(p, slots) {
			p.releaseFreed(slots)
		}
	}
}

// markSecond notes a dirty block of which only the first copy is worth anything. Volume.applyMu.
func (v *Volume) markSecond(r *row, block uint32) {
	v.markDirty(r, block)
	if r.second == nil {
		r.second = make([]uint64, len(r.dirty))
	}
	r.second[block/64] |= 1 << (block % 64)
}

// markDirty notes a block that the next checkpoint must write. Volume.applyMu.
func (v *Volume) markDirty(r *row, block uint32) {
	r.dirty[block/64] |= 1 << (block % 64)
	if !r.isDirty {
		r.isDirty = true
		v.dirtyRows = append(v.dirtyRows, r)
	}
}

package engine

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/checksum"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/stripe"
	"tuttifs/wear"
)

// keeper is a pool's part of the memory for blocks that were declined.
//
// A reservation's item that the mount declines is given a slot in the memory, where there is room, and is written like
// any other. When all of its ranks are committed here it is there: for this session alone. Who pins it behind a prefix
// reads it from the memory; that is its second touch, so it is reserved for the drives then, and if it is admitted it
// is copied there by a goroutine of the keeper's, and forgotten here when it is durable there.
//
// Sums cover a seed that is new for each block, so that neither a slot that was not written whole nor one that was
// given to another block is ever taken for what it is not: it is a miss.
type keeper struct {
	pool   *Pool
	ring   gio.Executor
	layout *stripe.Layout
	memory []byte // the pool's part
	first  uint64 // unit of the memory at which the part begins
	perRow uint32 // slots
	rows   []gio.MapRow
	places *gio.Map // where slots lie in the session's memory
	nonce  [8]byte
	now    func() time.Time
	over   atomic.Bool // set with mu: the drives need the numbers, so nothing is kept any more

	mu     sync.Mutex
	index  *wear.Kept[*kept]
	pins   map[uint64]*keptPin   // by request
	stores map[uint64]*keptStore // by reservation
	sweeps time.Time             // when it is looked next for those whose time is up
	made   uint64                // blocks, ever
	queue  []*block              // that are to be copied to the drives
	wake   chan struct{}         // has one when the queue is not empty
	stats  KeepStats

	staging []byte // the copies'
	stop    chan struct{}
	ended   chan struct{}
}

type block = wear.KeptBlock[*kept]

// kept is what is known of a block.
type kept struct {
	item       Item
	generation uint64
	seed       checksum.Seed
	ready      bool // all ranks are committed
	queued     bool // it is to be copied to the drives, or is being
}

// keptStore is what a reservation was answered. Who joins it is answered the same, so that a block of it is written by
// all ranks or by none.
type keptStore struct {
	tenant uint32
	keys   []Key
	grants []Grant  // of those that the mount declined, by number; others are zero
	blocks []*block // that are new here
	ranks  []uint16 // that are committed
	until  time.Time
}

// same says whether items are those that were reserved; a part of a reservation may have failed, or come later.
func (s *keptStore) same(tenant uint32, items []Item) bool {
	for i := range min(len(items), len(s.keys)) {
		if items[i].Key != s.keys[i] {
			return false
		}
	}
	return tenant == s.tenant
}

// keptPin is what a request was answered: so many keys from the drives, and the blocks behind them from here.
type keptPin struct {
	tenant   uint32
	onDrives int
	blocks   []*block
	until    time.Time
}

// same says whether keys are those that were pinned.
func (p *keptPin) same(tenant uint32, keys []Key) bool {
	if tenant != p.tenant || len(keys) < p.onDrives+len(p.blocks) {
		return false
	}
	for i, b := range p.blocks {
		if b.Key.Key != keys[p.onDrives+i] {
			return false
		}
	}
	return true
}

// KeepStats are what a pool's memory for blocks that were declined holds and has done.
type KeepStats struct {
	Slots, Blocks uint64 // room for so many; how many are there now
	SlotBytes     uint64
	Declined      uint64 // blocks that the mount did not want on its drives
	Kept          uint64 // of them committed into the memory
	Hits          uint64 // blocks that were pinned there
	Written       uint64 // of them copied to the drives then
	Refused       uint64 // and declined once more
	Evicted       uint64 // blocks that had to go for others
	Bad           uint64 // whose bytes were not right any more
	Failed        uint64 // that could not be copied to the drives; they are tried again when they are pinned again
}

// Spared is the bytes of what was declined and not brought to the drives since.
func (s *KeepStats) Spared() uint64 { return (s.Declined - min(s.Written, s.Declined)) * s.SlotBytes }

// Leases here end as the mount's own do: a pin so long after it was made or repeated, a reservation after it was made.
// Whoever reads or writes a place all the same is found out by its sums.
const (
	keptTimeout = 60 * time.Second
	keptSweep   = time.Second // so often it is looked for them, when the memory is used
)

// keptRow is the number of the first row of the memory in a pool's map: beyond those of its drives, of which few pools
// ever have so many.
const keptRow = 1 << 16

// newKeeper takes a part of the session's memory for a pool, nil where not one slot fits.
func newKeeper(p *Pool, m *keptMemory, bytes int64, ring gio.Executor) (k *keeper, err error) {
	l := p.layout
	width, perRow := uint64(l.Width()), l.SlotsPerRow(p.entryUnits)
	set := width * l.SlotUnits() * stripe.UnitBytes // so many slots as there are entries lie in it
	from, n := m.share(bytes, int64(set))
	defer func() {
		if err != nil {
			m.giveBack(from)
		}
	}()
	slots := uint64(n) / set * width
	if slots == 0 {
		return nil, nil
	}
	if uint64(keptRow)*uint64(perRow)+slots > math.MaxUint32 {
		return nil, fmt.Errorf("%w: %d slots to keep, behind rows of %d", ErrInvalid, slots, perRow)
	}
	k = &keeper{
		pool: p, ring: ring, layout: l, memory: m.drive.Bytes()[from : from+n : from+n],
		first: uint64(from) / stripe.UnitBytes, perRow: perRow, index: wear.NewKept[*kept](uint32(slots)),
		pins: map[uint64]*keptPin{}, stores: map[uint64]*keptStore{}, wake: make(chan struct{}, 1),
		stop: make(chan struct{}), ended: make(chan struct{}), now: time.Now,
	}
	k.stats.Slots, k.stats.SlotBytes = slots, l.SlotUnits()*stripe.UnitBytes
	if _, err := rand.Read(k.nonce[:]); err != nil {
		return nil, err
	}
	// Of each entry only as much is used as the row's slots take, so that entries lie closer than they are long.
	unit := k.first
	for row := uint64(0); row*uint64(perRow) < slots; row++ {
		used := (min(uint64(perRow), slots-row*uint64(perRow)) + width - 1) / width * l.SlotUnits()
		r := gio.MapRow{Number: keptRow + uint32(row)}
		for range width {
			r.Drives, r.Units = append(r.Drives, keptDrive), append(r.Units, unit)
			unit += used
		}
		k.rows = append(k.rows, r)
	}
	k.places, err = gio.NewMap(l, p.entryUnits, k.rows, 0)
	return k, err
}

// behind adds the memory's rows to those of the drives. Where the drives have rows of these numbers nothing is kept any
// more. As long as somebody may then still write to the memory, those rows are left out, since he must not write to the
// drives instead; whole is false, and the rows are to be fetched again.
func (k *keeper) behind(rows []gio.MapRow) (_ []gio.MapRow, whole bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	taken := func(r gio.MapRow) bool { return r.Number >= keptRow }
	if slices.ContainsFunc(rows, taken) {
		k.over.Store(true)
	}
	if !k.over.Load() {
		return append(rows, k.rows...), true
	}
	k.sweep(k.now())
	for _, s := range k.stores {
		if len(s.blocks) > 0 {
			return slices.DeleteFunc(rows, taken), false
		}
	}
	return rows, true
}

// slot is the number of a place.
func (k *keeper) slot(place uint32) uint32 { return keptRow*k.perRow + place }

// owns says whether a slot is in the memory.
func (k *keeper) owns(slot uint32) bool {
	return k != nil && slot/k.perRow >= keptRow && !k.over.Load()
}

// sweep ends pins and reservations whose time is up. mu is held.
func (k *keeper) sweep(now time.Time) {
	if now.Before(k.sweeps) {
		return
	}
	k.sweeps = now.Add(keptSweep)
	for request, p := range k.pins {
		if now.After(p.until) {
			k.unpin(request)
		}
	}
	for reserve, s := range k.stores {
		if now.After(s.until) {
			k.giveUp(reserve)
		}
	}
}

// find is a block that is there. mu is held.
func (k *keeper) find(tenant uint32, key *Key) *block {
	if k.over.Load() {
		return nil
	}
	if b := k.index.Find(wear.KeptKey{Tenant: tenant, Key: *key}); b != nil && b.Value.ready {
		return b
	}
	return nil
}

// peek is the length of the longest prefix of keys that is there.
func (k *keeper) peek(tenant uint32, keys []Key) (n int) {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for n < len(keys) && k.find(tenant, &keys[n]) != nil {
		n++
	}
	return n
}

// present adds to answers those of blocks that are there.
func (k *keeper) present(tenant uint32, keys []Key, present []bool) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range keys {
		present[i] = present[i] || k.find(tenant, &keys[i]) != nil
	}
}

// onDrives is how many of a request's keys the drives are to be asked for: as many as they had when it was pinned,
// since what is copied to them meanwhile does not change the answer; all where that was not.
func (k *keeper) onDrives(tenant uint32, request uint64, keys []Key) (int, error) {
	if k == nil {
		return len(keys), nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sweep(k.now())
	p := k.pins[request]
	if p == nil {
		return len(keys), nil
	}
	if !p.same(tenant, keys) {
		return 0, fmt.Errorf("%w: this request id pins other keys", ErrInvalid)
	}
	return p.onDrives, nil
}

// pin leases what is there of the keys behind those that were found on the drives, and returns how many are pinned in
// all. It is the blocks' second touch.
func (k *keeper) pin(tenant uint32, request uint64, keys []Key, grants []Grant, onDrives int) int {
	if k == nil {
		return onDrives
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.pins[request]
	if p == nil {
		p = &keptPin{tenant: tenant, onDrives: onDrives, blocks: k.hold(tenant, keys[onDrives:])}
		if onDrives+len(p.blocks) == 0 {
			return 0 // the next may find something
		}
		k.pins[request] = p
	}
	if k.over.Load() || p.onDrives > onDrives || !p.same(tenant, keys) {
		return onDrives // where its lease on the drives has ended there is a gap
	}
	p.until = k.now().Add(keptTimeout)
	for i, b := range p.blocks {
		grants[p.onDrives+i] = k.grant(b, ioctl.GrantPinned)
	}
	return p.onDrives + len(p.blocks)
}

// hold touches and holds the longest prefix of keys that is there. mu is held.
func (k *keeper) hold(tenant uint32, keys []Key) (blocks []*block) {
	for i := range keys {
		b := k.find(tenant, &keys[i])
		if b == nil {
			break
		}
		k.index.Hold(b)
		k.index.Use(b)
		blocks = append(blocks, b)
		k.copies(b)
	}
	k.stats.Hits += uint64(len(blocks))
	return blocks
}

func (k *keeper) grant(b *block, status uint8) Grant {
	v := b.Value
	return Grant{Slot: k.slot(b.Place), Status: status, Tokens: v.item.Tokens, Generation: v.generation, Seed: v.seed}
}

// copies queues a block to be copied to the drives. mu is held.
func (k *keeper) copies(b *block) {
	if b.Value.queued {
		return
	}
	b.Value.queued = true
	k.index.Hold(b)
	k.queue = append(k.queue, b)
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// release ends a request's pins, and says whether it had none on the drives when it was pinned.
func (k *keeper) release(request uint64) (alone bool) {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.unpin(request)
	return p != nil && p.onDrives == 0
}

// unpin ends a request's pins and returns them, nil where there are none. mu is held.
func (k *keeper) unpin(request uint64) *keptPin {
	p := k.pins[request]
	if p == nil {
		return nil
	}
	delete(k.pins, request)
	for _, b := range p.blocks {
		k.index.Release(b)
	}
	return p
}

// reserve gives those of a reservation's items that were declined slots in the memory, as long as there are any; others
// stay declined. What is there already is not written again. Who joins is answered as the first was; what there is more
// of stays declined.
func (k *keeper) reserve(tenant uint32, reserve uint64, items []Item, grants []Grant) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	k.sweep(now)
	if k.over.Load() {
		return
	}
	s := k.stores[reserve]
	if s != nil && !s.same(tenant, items) { // the mount's has ended, and the id is another one's now
		k.giveUp(reserve)
		s = nil
	}
	if s != nil {
		for i := range min(len(items), len(s.grants)) {
			if grants[i].Status == ioctl.GrantDeclined && s.grants[i] != (Grant{}) {
				grants[i] = s.grants[i]
			}
		}
		return
	}
	s = &keptStore{tenant: tenant, keys: make([]Key, len(items)), grants: make([]Grant, len(items)),
		until: now.Add(keptTimeout)}
	declined := false
	for i := range items {
		s.keys[i] = items[i].Key
		b := k.index.Find(wear.KeptKey{Tenant: tenant, Key: items[i].Key})
		switch {
		case grants[i].Status == ioctl.GrantDeclined:
			declined = true
			k.answer(s, &items[i], b, &grants[i])
			s.grants[i] = grants[i]
		case grants[i].Status == ioctl.GrantNew && b != nil && b.Value.ready:
			k.index.Drop(b) // the drives will have it
		}
	}
	if declined {
		k.stores[reserve] = s
	}
}

// answer changes the grant of an item that was declined, of which there may be a block. mu is held.
func (k *keeper) answer(s *keptStore, item *Item, b *block, g *Grant) {
	if b != nil {
		if b.Value.ready {
			k.index.Use(b)
			*g = k.grant(b, ioctl.GrantExists)
		}
		return // else another reservation writes it
	}
	k.stats.Declined++
	if b = k.index.Put(wear.KeptKey{Tenant: s.tenant, Key: item.Key}, nil); b == nil {
		return
	}
	k.made++
	b.Value = &kept{item: *item, generation: k.made}
	copy(b.Value.seed[:], k.nonce[:])
	binary.LittleEndian.PutUint64(b.Value.seed[8:], k.made)
	k.index.Hold(b)
	s.blocks = append(s.blocks, b)
	*g = k.grant(b, ioctl.GrantNew)
}

// commit says that ranks of a reservation's blocks were written. When all are, the blocks are there.
func (k *keeper) commit(reserve uint64, ranks []uint16) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.stores[reserve]
	if s == nil {
		return
	}
	for _, rank := range ranks {
		if int(rank) < k.layout.Ranks() && !slices.Contains(s.ranks, rank) {
			s.ranks = append(s.ranks, rank)
		}
	}
	if len(s.ranks) < k.layout.Ranks() {
		return
	}
	delete(k.stores, reserve)
	for _, b := range s.blocks {
		b.Value.ready = true
		k.stats.Kept++
		k.index.Release(b)
	}
}

// abort gives a reservation's slots back.
func (k *keeper) abort(reserve uint64) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.giveUp(reserve)
}

// giveUp is abort. mu is held.
func (k *keeper) giveUp(reserve uint64) {
	s := k.stores[reserve]
	if s == nil {
		return
	}
	for _, b := range s.blocks {
		k.index.Drop(b)
		k.index.Release(b)
	}
	delete(k.stores, reserve)
}

// bad forgets a block whose bytes are not right.
func (k *keeper) bad(slot uint32, generation uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.pins {
		for _, b := range p.blocks {
			if k.slot(b.Place) == slot && b.Value.generation == generation {
				k.spoiled(b)
				return
			}
		}
	}
}

// spoiled drops a block whose bytes are not right. mu is held.
func (k *keeper) spoiled(b *block) {
	if k.index.Find(b.Key) == b {
		k.stats.Bad++
	}
	k.index.Drop(b)
}

// report is safe to call at any time.
func (k *keeper) report() KeepStats {
	if k == nil {
		return KeepStats{}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.stats
	s.Blocks, s.Evicted = uint64(k.index.Len()), k.index.Evicted()
	if k.over.Load() {
		s.Slots, s.Blocks = 0, 0
	}
	return s
}

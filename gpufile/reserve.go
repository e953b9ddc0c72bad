package gpufile

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"tuttifs/extentmap"
	"tuttifs/lifetime"
)

// ReserveItem is one file to be stored.
type ReserveItem struct {
	Key      Key
	Parent   Key // zero for a root
	Tokens   uint32
	Position uint32 // blocks before it; corrected where the store knows the parent
}

type reserveState uint8

const (
	reserveOpen       reserveState = iota
	reserveCommitting              // with the journal: the outcome is no longer ours
	reserveDone                    // kept for repeated commits until its deadline
)

// reservation is slots being written. The session's mutex guards it; pools refer to it from their pending keys, for
// which its keys, tenant and session do not change.
type reservation struct {
	ses     *session
	k       requestKey
	g       *Group
	tenant  uint32
	members []*Member
	items   []ReserveItem
	parents []int      // each item's parent among the items, or -1
	files   []resFile  // [item][pool]
	held    []heldSlot // committed parents, pinned until the outcome
	need    []int      // by pool: slots to allocate
	gate    gateAsks

	state     reserveState
	deadline  time.Time
	committed []bool // by rank
	left      int    // ranks that have not committed
	dropped   int    // items given up because a rank did not write them
	ticket    *extentmap.Ticket
	ender     *Member // who aborts it, if anybody does
	quiet     bool    // all ranks have said that they are done with writing
}

// resFile is one pool's part of an item.
type resFile struct {
	slot       uint32
	status     GrantStatus // as given to who reserved first
	life       lifetime.Class
	nonce      uint64
	generation uint64
	written    []atomic.Uint64 // a bit for every object; nil when nobody writes
	flush      atomic.Uint64   // drives that were written to
}

type heldSlot struct {
	p    *Pool
	slot uint32
}

func (r *reservation) file(item, pool int) *resFile { return &r.files[item*len(r.g.pools)+pool] }
func (r *reservation) has(m *Member) bool           { return slices.Contains(r.members, m) }

// putBytes bounds what a file takes in a transaction.
const putBytes = 160

// Reserve leases slots for writing: all or nothing (ErrNoSpace, ErrAgain, ErrQuota) unless partial, which grants a
// leading run. Other ranks join by the same reserve id and get the same slots. Evicts as needed, leaf first, pinned
// never. Parents come before their children among the items. Items that the admission policy does not want on the
// drives are granted as GrantDeclined.
func (m *Member) Reserve(
	g *Group, tenant uint32, reserve uint64, items []ReserveItem, partial bool, grants []Grant,
) (n int, err error) {
	if g != nil {
		err = checkBatch(g, len(items), len(grants), len(g.pools))
	} else {
		err = checkBatch(nil, 0, 0, 0)
	}
	if err != nil {
		return 0, err
	}
	if err := m.lock(); err != nil {
		return 0, err
	}
	ses := m.ses
	defer ses.mu.Unlock()
	k := requestKey{g.id, reserve}
	if r := ses.reservations[k]; r != nil && r.state != reserveDone {
		return r.join(m, tenant, items, grants)
	}
	if ses.s.readOnly {
		return 0, ErrReadOnly
	}
	if len(items) == 0 {
		return 0, nil
	}
	if len(ses.reservations) >= RequestsMax {
		return 0, fmt.Errorf("%w: the session has %d reservations; commit or abort some", ErrAgain, RequestsMax)
	}
	if n := ses.itemsNamed; n > 0 && len(items)*len(g.pools) > ReservedMax-n {
		return 0, fmt.Errorf("%w: the session's reservations name %d files, at most %d are allowed; commit or abort some",
			ErrAgain, ses.itemsNamed, ReservedMax)
	}
	r, err := newReservation(m, g, k, tenant, items)
	if err != nil {
		return 0, err
	}
	g.lock()
	defer g.unlock()
	if n, err = r.secure(partial); err != nil {
		return 0, err
	}
	ses.reservations[k] = r
	ses.itemsNamed += len(r.files)
	r.fill(m, grants)
	return n, nil
}

func newReservation(m *Member, g *Group, k requestKey, tenant uint32, items []ReserveItem) (*reservation, error) {
	r := &reservation{
		ses: m.ses, k: k, g: g, tenant: tenant, members: []*Member{m},
		items: slices.Clone(items), parents: make([]int, len(items)), need: make([]int, len(g.pools)),
		files:     make([]resFile, len(items)*len(g.pools)),
		committed: make([]bool, g.ranks()), left: g.ranks(),
		deadline: m.ses.s.now().Add(m.ses.s.o.ReserveTimeout),
		ticket:   extentmap.NewTicket(),
	}
	return r, r.validate()
}

// validate checks the items against each other and finds the parents among them.
func (r *reservation) validate() error {
	at := make(map[Key]int, len(r.items))
	for i := range r.items {
		it := &r.items[i]
		if it.Key == (Key{}) || it.Key == it.Parent {
			return fmt.Errorf("%w: item %d: its key is zero or its own parent", ErrInvalid, i)
		}
		if _, twice := at[it.Key]; twice {
			return fmt.Errorf("%w: item %d: key %x is given twice", ErrInvalid, i, it.Key[:8])
		}
		for _, p := range r.g.pools {
			if it.Tokens == 0 || it.Tokens > p.identity.FileTokens {
				return fmt.Errorf("%w: item %d: %d tokens in a file of pool %q, which holds 1 to %d",
					ErrInvalid, i, it.Tokens, p.Name(), p.identity.FileTokens)
			}
		}
		r.parents[i] = -1
		if j, ok := at[it.Parent]; ok {
			r.parents[i] = j
		}
		at[it.Key] = i
	}
	for i := range r.items {
		if j, ok := at[r.items[i].Parent]; ok && j > i {
			return fmt.Errorf("%w: item %d comes before its parent, item %d", ErrInvalid, i, j)
		}
	}
	return nil
}

// secure makes the reservation of all items, or of a leading run; the pools' mutexes are held. After an error but
// ErrAgain, nothing has changed. A run is shortened before anything is evicted for it, so that every file that goes
// makes room for one that is granted: now, or after ErrAgain, when the caller asks again and finds the room there.
func (r *reservation) secure(partial bool) (int, error) {
	if err := r.classify(); err != nil {
		return 0, err
	}
	r.admit()
	defer r.unprotect(r.protect())
	if q := r.ses.s.quotaBytes(r.tenant); q != 0 {
		r.ses.s.quotaMu.Lock() // from looking at the tenant's bytes until they are charged
		defer r.ses.s.quotaMu.Unlock()
	}
	n := len(r.items)
	if most := r.ses.s.v.MaxTransactionBytes() / putBytes / len(r.g.pools); n > most {
		if !partial {
			return 0, fmt.Errorf("%w: %d files in one reservation, the journal takes at most %d", ErrInvalid, n, most)
		}
		n = most
	}
	for {
		cut, err := r.makeRoom(n)
		if errors.Is(err, ErrAgain) {
			return 0, err // a run that fits now would leave unused what is being made for it
		}
		if err == nil {
			if cut = r.allocate(n); cut == 0 {
				break
			}
			err = ErrAgain
		}
		if n = r.shorten(n, cut); !partial || n == 0 {
			return 0, err
		}
	}
	r.trim(n)
	r.asked()
	r.grant()
	for _, p := range r.g.pools {
		p.freeAhead()
	}
	return n, nil
}

// shorten returns how many items remain when cut slots fewer are to be allocated in some pool.
func (r *reservation) shorten(n, cut int) int {
	for cut = max(cut, 1); n > 0 && cut > 0; n-- {
		for j := range r.g.pools {
			if r.file(n-1, j).status == GrantNew {
				cut--
				break
			}
		}
	}
	return n
}

func (r *reservation) trim(n int) {
	r.items, r.parents, r.files = r.items[:n], r.parents[:n], r.files[:n*len(r.g.pools)]
}

// classify finds each file's status, and numbers the items whose parent is known.
func (r *reservation) classify() error {
	keys := make([]Key, len(r.items))
	for i := range r.items {
		keys[i] = r.items[i].Key
	}
	slots := r.ses.scratchSlots(len(keys))
	for j, p := range r.g.pools {
		p.index.lookup(keys, slots)
		for i, slot := range slots {
			f := r.file(i, j)
			f.slot, f.status = slot, GrantNew
			if slot != none {
				f.status = GrantExists
				if p.m.RecordTenant(slot) != r.tenant {
					return foreign(i)
				}
				continue
			}
			if w, ok := p.pending[keys[i]]; ok {
				f.status = GrantPending
				if w.r.tenant != r.tenant {
					return foreign(i)
				}
			}
		}
	}
	for i := range r.items {
		r.items[i].Position = r.position(i)
	}
	return nil
}

func foreign(item int) error {
	return fmt.Errorf("%w: item %d: another tenant holds this key; keys must be seeded by tenant", ErrInvalid, item)
}

// position is an item's place in its chain, by its parent where that is known in any pool.
func (r *reservation) position(i int) uint32 {
	it := &r.items[i]
	if it.Parent == (Key{}) {
		return 0
	}
	if j := r.parents[i]; j >= 0 {
		return r.items[j].Position + 1
	}
	for _, p := range r.g.pools {
		if s := p.index.find(&it.Parent); s != none {
			return p.m.Record(s).Position + 1
		}
		if w, ok := p.pending[it.Parent]; ok {
			return w.r.items[w.file].Position + 1
		}
	}
	return max(it.Position, 1)
}

// protect pins what the reservation's own evictions must spare: parents that are there, kept until the outcome, and
// files that exist already, which it returns.
func (r *reservation) protect() []heldSlot {
	var exist []heldSlot
	for i := range r.items {
		for j, p := range r.g.pools {
			switch f := r.file(i, j); f.status {
			case GrantExists:
				p.pin(f.slot)
				exist = append(exist, heldSlot{p, f.slot})
			case GrantNew:
				if s := r.storedParent(i, j); s != none && p.nodes.s[s].pins() < pinsLimit {
					p.pin(s)
					r.held = append(r.held, heldSlot{p, s})
				}
			}
		}
	}
	return exist
}

// storedParent is an item's parent in a pool if it is committed and its own tenant's, or none.
func (r *reservation) storedParent(i, j int) uint32 {
	if k := r.parents[i]; k >= 0 {
		if f := r.file(k, j); f.status == GrantExists {
			return f.slot
		}
		return none
	}
	parent, p := &r.items[i].Parent, r.g.pools[j]
	if *parent == (Key{}) {
		return none
	}
	if s := p.index.find(parent); s != none && p.m.RecordTenant(s) == r.tenant {
		return s
	}
	return none
}

// unprotect ends the pins of existing files, and those of parents if nothing came of the reservation.
func (r *reservation) unprotect(exist []heldSlot) {
	for _, h := range exist {
		h.p.unpin(h.slot)
	}
	if r.granted() == 0 {
		r.unhold()
	}
}

func (r *reservation) unhold() {
	for _, h := range r.held {
		h.p.unpin(h.slot)
	}
	r.held = nil
}

// granted counts the slots that the reservation holds.
func (r *reservation) granted() int {
	n := 0
	for i := range r.files {
		if f := &r.files[i]; f.status == GrantNew && f.generation != 0 {
			n++
		}
	}
	return n
}

// makeRoom finds or makes room for the first n items. ErrAgain: it is on its way. Other errors come with how many slots
// are too many, and after them nothing has changed.
func (r *reservation) makeRoom(n int) (cut int, err error) {
	for j := range r.need {
		r.need[j] = 0
		for i := range n {
			if r.file(i, j).status == GrantNew {
				r.need[j]++
			}
		}
	}
	if cut, err = r.checkReach(); err != nil {
		return cut, err
	}
	cut, err = r.planQuota()
	for j, p := range r.g.pools {
		if err == nil {
			cut, err = p.planRoom(r.need[j])
		}
	}
	if err != nil {
		for _, p := range r.g.pools {
			p.undoPlan()
		}
		return cut, err
	}
	for _, p := range r.g.pools {
		p.applyPlan()
		p.flushFrees()
	}
	for j, p := range r.g.pools {
		free, _, _ := p.m.Counts()
		if int(free) < r.need[j] && p.m.Hurry() {
			free, _, _ = p.m.Counts()
		}
		if int(free) < r.need[j] {
			return 0, ErrAgain
		}
	}
	return 0, nil
}

// planQuota plans the eviction of the tenant's own files until its quota allows the reservation.
func (r *reservation) planQuota() (cut int, err error) {
	quota := r.ses.s.quotaBytes(r.tenant)
	if quota == 0 {
		return 0, nil
	}
	over, item := -int64(quota), int64(0)
	for j, p := range r.g.pools {
		over += int64(r.need[j]) * int64(p.m.SlotBytes())
		item += int64(p.m.SlotBytes())
	}
	over += r.ses.s.tenantBytes(r.tenant)
	for _, p := range r.g.pools {
		if over > 0 {
			size := int64(p.m.SlotBytes())
			over -= size * int64(p.planTenant(r.tenant, int((over+size-1)/size)))
		}
	}
	if over > 0 {
		return int((over + item - 1) / item), ErrQuota
	}
	return 0, nil
}

// allocate takes the slots of the first n items, each near its parent. If some are not to be had, because their row is
// being given back or for want of memory, it takes none and returns how many items are too many.
func (r *reservation) allocate(n int) (cut int) {
	for i := range n {
		for j, p := range r.g.pools {
			f := r.file(i, j)
			if f.status != GrantNew {
				continue
			}
			slot, ok := p.alloc(r.parentSlot(i, j))
			if !ok {
				r.unallocate(i, j)
				return n - i
			}
			f.slot = slot
		}
	}
	return 0
}

// unallocate undoes allocate up to one file.
func (r *reservation) unallocate(item, pool int) {
	for at := range item*len(r.g.pools) + pool {
		if f := &r.files[at]; f.status == GrantNew {
			r.g.pools[at%len(r.g.pools)].m.Unalloc(f.slot)
			f.slot = none
		}
	}
}

// parentSlot is where an item's parent lies or will lie in a pool, or none.
func (r *reservation) parentSlot(i, j int) uint32 {
	if k := r.parents[i]; k >= 0 {
		return r.file(k, j).slot
	}
	parent := &r.items[i].Parent
	if *parent == (Key{}) {
		return none
	}
	p := r.g.pools[j]
	if s := p.index.find(parent); s != none {
		return s
	}
	if w, ok := p.pending[*parent]; ok {
		for c, q := range w.r.g.pools {
			if q == p {
				return w.r.file(w.file, c).slot
			}
		}
	}
	return none
}

// grant turns the allocated slots into write leases under pending keys.
func (r *reservation) grant() {
	words := 0
	for at := range r.files {
		if r.files[at].status == GrantNew && !r.ses.s.o.NoIO {
			words += r.g.pools[at%len(r.g.pools)].writtenLen
		}
	}
	written := make([]atomic.Uint64, words)
	for at := range r.files {
		f, p := &r.files[at], r.g.pools[at%len(r.g.pools)]
		if f.status != GrantNew {
			f.slot = none
			continue
		}
		if !r.ses.s.o.NoIO {
			f.written, written = written[:p.writtenLen:p.writtenLen], written[p.writtenLen:]
		}
		f.nonce, f.generation = r.ses.s.v.NextGeneration()
		item := at / len(r.g.pools)
		f.life = r.lifetime(item, at%len(r.g.pools))
		p.pending[r.items[item].Key] = pendingFile{r: r, file: item}
		p.nodes.s[f.slot] = node{meta: flagReserved}
		p.reserved++
		p.charge(r.tenant, 1)
		p.count.reserved.Add(1)
		r.ses.reserved++
		l := r.ses.leases.add(leaseKey(p.m.ID(), f.slot))
		l.pool, l.r, l.file = p, r, f
		l.revive(leaseWrite)
	}
}

// join answers a reserve id that is in use: with the same slots, if it is for the same items.
func (r *reservation) join(m *Member, tenant uint32, items []ReserveItem, grants []Grant) (int, error) {
	if r.state == reserveCommitting {
		return 0, fmt.Errorf("%w: reservation %d is being committed", ErrLease, r.k.id)
	}
	if tenant != r.tenant || len(items) < len(r.items) {
		return 0, fmt.Errorf("%w: reservation %d is for other items", ErrInvalid, r.k.id)
	}
	for i := range r.items {
		if a, b := &items[i], &r.items[i]; a.Key != b.Key || a.Parent != b.Parent || a.Tokens != b.Tokens {
			return 0, fmt.Errorf("%w: reservation %d is for other items, from item %d on", ErrInvalid, r.k.id, i)
		}
	}
	if !r.has(m) {
		r.members = append(r.members, m)
	}
	r.g.lock()
	defer r.g.unlock()
	r.fill(m, grants)
	return len(r.items), nil
}

// fill makes the grants: new to who reserved first, joined to the others.
func (r *reservation) fill(m *Member, grants []Grant) {
	width := len(r.g.pools)
	for at := range r.files {
		f, p := &r.files[at], r.g.pools[at%width]
		it := &r.items[at/width]
		g := Grant{Slot: none, Status: f.status, Tokens: it.Tokens}
		if f.status == GrantNew {
			g.Slot, g.Generation, g.Life = f.slot, f.generation, f.life
			g.Seed = p.seed(r.tenant, &it.Key, f.nonce, f.generation)
			if m != r.members[0] {
				g.Status = GrantJoined
			}
		}
		grants[at] = g
	}
}

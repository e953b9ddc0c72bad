package gpufile

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/checksum"
	"tuttifs/extentmap"
	"tuttifs/extentmap/ondisk"
	"tuttifs/wear"
)

// Pool is one pool. Its mutex guards everything below it; verbs of a family take the mutexes of all its pools, in the
// order of their IDs.
type Pool struct {
	s        *Store
	m        *extentmap.Pool
	identity Identity
	digest   [32]byte
	group    *Group
	// admission is the policy of what is stored under the pool's own name or its family's; keySpace tells its keys from
	// those of other pools and families at the gate.
	admission wear.Policy
	keySpace  uint32
	created   time.Time

	// Tables made once from the geometry.
	objectUnits []uint32   // 4-KiB units by object
	rankObjects [][]uint16 // by rank, the trailer included
	writtenLen  int        // words of one slot's bitmap of written objects

	mu      sync.RWMutex
	index   *index
	nodes   nodes
	policy  policy
	orphans list // files whose parent is gone, by the time they were orphaned
	pending map[Key]pendingFile
	tenants map[uint32]*tenantUse
	victims []victim // the plan being made; kept for its memory
	// searching: the last plan ended because the policy gave up for now.
	searching bool
	// toFree are slots out of every table whose freeing the journal has not taken yet; freeWaiters complete with it.
	toFree      []uint32
	freeWaiters []*extentmap.Ticket
	growth      growth
	changes     changeLog

	files    uint64 // visible
	reserved uint64 // granted for writing and neither committed nor given back
	doomed   uint64 // unlinked or away, still pinned
	pinned   uint64 // visible, doomed or away with pins
	away     uint64 // files that are away
	awayRows map[uint32]away
	count    counters
}

// counters are read without the mutex.
type counters struct {
	lookups, hits, misses        atomic.Uint64
	reserved, committed, aborted atomic.Uint64
	evicted, doomed, bad         atomic.Uint64
	declined                     atomic.Uint64
	unreadable                   atomic.Uint64
}

// tenantUse is a tenant's part of a pool, for as long as it has one: tenants are numbers of the engines' choosing.
type tenantUse struct {
	slots uint64 // committed and reserved
	total *tenantTotal
	seed  checksum.PoolSeed
}

// pendingFile says which reservation holds a key that is not committed.
type pendingFile struct {
	r    *reservation
	file int
	// orphans were committed before this, their parent: they are adopted when it is committed.
	orphans []uint32
}

func (p *Pool) ID() extentmap.PoolID { return p.m.ID() }
func (p *Pool) Name() string         { return p.m.Spec().Name }
func (p *Pool) Identity() Identity   { return p.identity }
func (p *Pool) Map() *extentmap.Pool { return p.m }
func (p *Pool) Created() time.Time   { return p.created }

// Admission is the policy by which the pool's files are admitted to the drives.
func (p *Pool) Admission() wear.Policy { return p.admission }

// newPool makes the tables of a pool and loads its committed files.
func newPool(s *Store, m *extentmap.Pool) (*Pool, error) {
	spec := m.Spec()
	id, err := ParseIdentity(spec.Identity)
	if err != nil {
		return nil, fmt.Errorf("pool %q: %w", spec.Name, err)
	}
	p := &Pool{
		s: s, m: m, identity: id, digest: spec.IdentityDigest, created: time.Unix(0, m.CreationTime()),
		pending: make(map[Key]pendingFile), tenants: make(map[uint32]*tenantUse), awayRows: make(map[uint32]away),
		growth: growth{draining: none},
	}
	p.group = &Group{pools: []*Pool{p}, trailing: []uint32{0}, id: groupID(m.ID())}
	p.admission, p.keySpace = s.gate.Policy(spec.Name, spec.Family), groupID(m.ID())
	if family := m.FamilyID(); family != 0 {
		p.keySpace = familyGroup | uint32(family)
	}
	p.index = newIndex(m)
	p.orphans = newList(&p.nodes)
	if p.policy, err = newPolicy(s.o.Policy, p); err != nil {
		return nil, err
	}
	l := m.Layout()
	g := l.Geometry()
	p.objectUnits = make([]uint32, len(g.Objects))
	for i := range g.Objects {
		p.objectUnits[i] = g.Objects[i].Units()
	}
	p.rankObjects = make([][]uint16, l.Ranks())
	for r := range p.rankObjects {
		objects := append([]uint16(nil), l.RankObjects(uint16(r))...)
		p.rankObjects[r] = append(objects, l.TrailerObject(uint16(r)))
	}
	p.writtenLen = (len(g.Objects) + 63) / 64
	if err := p.load(); err != nil {
		p.close()
		return nil, fmt.Errorf("pool %q: %w", spec.Name, err)
	}
	p.reviewRows()
	return p, nil
}

// close lets the tables go; the pool is empty then.
func (p *Pool) close() {
	p.index.close()
	p.policy.close()
	p.nodes.close()
	p.policy, p.orphans = newLRU(&p.nodes), newList(&p.nodes)
	p.files, p.reserved, p.doomed, p.pinned, p.toFree = 0, 0, 0, 0, nil
	p.changes = changeLog{}
}

// charge counts slots that a tenant takes or gives back; the mutex is held for writing.
func (p *Pool) charge(tenant uint32, slots int64) {
	t := p.tenants[tenant]
	if t == nil {
		t = &tenantUse{total: p.s.joinTenant(tenant), seed: checksum.NewPoolSeed(p.digest, tenant)}
		p.tenants[tenant] = t
	}
	t.slots += uint64(slots)
	t.total.bytes.Add(slots * int64(p.m.SlotBytes()))
	if t.slots == 0 {
		delete(p.tenants, tenant)
		p.s.leaveTenant(tenant)
	}
}

func (p *Pool) tenantSlots(tenant uint32) uint64 {
	if t := p.tenants[tenant]; t != nil {
		return t.slots
	}
	return 0
}

func (p *Pool) tenantSeed(tenant uint32) checksum.PoolSeed {
	if t := p.tenants[tenant]; t != nil {
		return t.seed
	}
	return checksum.NewPoolSeed(p.digest, tenant)
}

func (p *Pool) seed(tenant uint32, key *Key, nonce, generation uint64) checksum.Seed {
	return p.tenantSeed(tenant).Seed(key, nonce, generation)
}

// Seed is what a file's checksums are made with.
func (p *Pool) Seed(info *FileInfo) checksum.Seed {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.seed(info.Tenant, &info.Key, info.Nonce, info.Generation)
}

// publish makes a file whose record is durable visible.
func (p *Pool) publish(slot uint32, r *ondisk.Record) {
	n := &p.nodes.s[slot]
	*n = node{meta: flagVisible, first: none, next: none, prev: none, older: none, newer: none}
	p.index.insert(&r.Key, slot)
	p.files++
	p.changes.note(&r.Key, r.Tenant, false)
	p.attach(slot, r)
}

// attach gives a visible file its place in its chain and in the policy, or among the orphans.
func (p *Pool) attach(slot uint32, r *ondisk.Record) {
	parent := none
	if r.Parent != (Key{}) {
		if parent = p.parent(r); parent == none {
			p.orphan(slot)
			p.awaitParent(slot, r)
			return
		}
		p.link(parent, slot)
	}
	p.policy.insert(slot, parent)
}

// detach is the opposite, for a file without children.
func (p *Pool) detach(slot uint32) {
	p.unlist(slot)
	p.unlink(slot)
}

// unlist takes a file out of the policy or the orphans.
func (p *Pool) unlist(slot uint32) {
	if n := &p.nodes.s[slot]; n.is(flagOrphan) {
		p.orphans.remove(slot)
		n.clear(flagOrphan)
	} else {
		p.policy.remove(slot)
	}
}

// pin holds a slot: it is not evicted, and not freed when doomed.
func (p *Pool) pin(slot uint32) {
	n := &p.nodes.s[slot]
	if n.pins() == 0 {
		p.pinned++
	}
	n.meta += pinOne
}

// unpin undoes pin; the caller flushes the frees.
func (p *Pool) unpin(slot uint32) {
	n := &p.nodes.s[slot]
	n.meta -= pinOne
	if n.pins() > 0 {
		return
	}
	p.pinned--
	switch {
	case n.is(flagDoomed):
		p.doomed--
		n.meta = 0
		p.toFree = append(p.toFree, slot)
	case n.is(flagAway):
		p.doomed--
	case n.is(flagVisible) && !n.is(flagOrphan):
		p.policy.unpinned(slot)
	}
}

// Find looks a committed, not doomed file up, whoever its tenant (the mount's view).
func (p *Pool) Find(key *Key) (slot uint32, generation uint64, ok bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if slot = p.index.find(key); slot == none {
		return none, 0, false
	}
	return slot, p.m.Record(slot).Generation, true
}

// Lookup fills slots (NoSlot for misses) for a batch and returns the number found. No side effects: bench meta's
// inner loop.
func (p *Pool) Lookup(keys []Key, slots []uint32) int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	p.index.lookup(keys, slots)
	found := 0
	for _, s := range slots[:len(keys)] {
		if s != none {
			found++
		}
	}
	return found
}

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

// Stat describes a slot if it still holds the file of that generation (only the low genBits bits of it are compared;
// 64 for all).
func (p *Pool) Stat(slot uint32, generation uint64, genBits int) (FileInfo, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if !p.holds(slot, generation, genBits) {
		return FileInfo{}, false
	}
	return p.info(slot), true
}

// holds says whether a slot holds the visible file of a generation.
func (p *Pool) holds(slot uint32, generation uint64, genBits int) bool {
	if int(slot) >= len(p.nodes.s) || !p.nodes.s[slot].is(flagVisible) {
		return false
	}
	mask := ^uint64(0)
	if genBits < 64 {
		mask = 1<<max(genBits, 0) - 1
	}
	return (p.m.Record(slot).Generation^generation)&mask == 0
}

func (p *Pool) info(slot uint32) FileInfo {
	r := p.m.Record(slot)
	n := &p.nodes.s[slot]
	return FileInfo{
		Key: r.Key, Parent: r.Parent, Slot: slot, Tenant: r.Tenant, Owner: r.Owner, Tokens: r.Tokens,
		Position: r.Position, Children: p.children(slot), Pins: n.pins(), Hits: r.Hits, Generation: r.Generation,
		Nonce: r.Nonce, CommitTime: r.CommitTime, LastHit: int64(r.LastHit),
	}
}

// HoldRead pins one file for the mount's own reader (no session); Release undoes it.
func (p *Pool) HoldRead(slot uint32, generation uint64, genBits int) (FileInfo, func(), bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.holds(slot, generation, genBits) || p.nodes.s[slot].pins() >= pinsLimit {
		return FileInfo{}, nil, false
	}
	info := p.info(slot)
	p.pin(slot)
	var once sync.Once
	return info, func() { once.Do(func() { p.drop(slot) }) }, true
}

// drop ends a pin that no session holds.
func (p *Pool) drop(slot uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.s.detached.Load() {
		return
	}
	p.unpin(slot)
	p.flushFrees()
}

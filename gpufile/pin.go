package gpufile

import (
	"fmt"
	"slices"
	"time"

	"tuttifs/checksum"
	"tuttifs/lifetime"
	"tuttifs/wear"
)

// Grant is one slot handed to a session.
type Grant struct {
	Slot       uint32 // extentmap.NoSlot where Status says none
	Status     GrantStatus
	Tokens     uint32
	Generation uint64
	Seed       checksum.Seed
	Life       lifetime.Class // of what is to be written
}

type GrantStatus uint8

const (
	GrantNone     GrantStatus = iota
	GrantPinned               // readable
	GrantNew                  // reserved: write it
	GrantJoined               // reserved by another rank of this session under the same reserve id
	GrantExists               // already committed; nothing to write
	GrantPending              // another engine is storing it
	GrantDeclined             // not admitted to the drives, by policy; nothing to write
)

// pinset is what one request id holds: immutable but for its owners and deadline, which the session's mutex guards.
type pinset struct {
	g        *Group
	tenant   uint32
	n        int
	slots    []uint32 // [key][pool]; none where the hit rule asks for nothing
	owners   []*Member
	deadline time.Time
}

func (ps *pinset) count() int {
	n := 0
	for _, s := range ps.slots {
		if s != none {
			n++
		}
	}
	return n
}

// leave takes an owner off and reports whether none is left.
func (ps *pinset) leave(m *Member) bool {
	if i := slices.Index(ps.owners, m); i >= 0 {
		ps.owners = slices.Delete(ps.owners, i, i+1)
	}
	return len(ps.owners) == 0
}

func checkBatch(g *Group, keys, grants, width int) error {
	switch {
	case g == nil || len(g.pools) == 0:
		return fmt.Errorf("%w: no such pool or family", ErrInvalid)
	case keys > KeysMax:
		return fmt.Errorf("%w: %d keys in one request, at most %d are allowed", ErrInvalid, keys, KeysMax)
	case grants < keys*width:
		return fmt.Errorf("%w: room for %d grants, %d are needed", ErrInvalid, grants, keys*width)
	}
	return nil
}

// scratchSlots returns n words of the session's own; its mutex is held.
func (ses *session) scratchSlots(n int) []uint32 {
	if cap(ses.scratch) < n {
		ses.scratch = make([]uint32, n)
	}
	return ses.scratch[:n]
}

// Peek is the length of the longest prefix of keys present. No side effects. A tenant sees its own files only.
func (m *Member) Peek(g *Group, tenant uint32, keys []Key) (int, error) {
	if err := checkBatch(g, len(keys), 0, 0); err != nil {
		return 0, err
	}
	if err := m.lock(); err != nil {
		return 0, err
	}
	defer m.ses.mu.Unlock()
	g.rlock()
	defer g.runlock()
	return g.hit(tenant, keys, m.ses.scratchSlots(len(keys)*len(g.pools))), nil
}

// Present says of each key whether its file is there, whatever is before it: present[i] of keys[i]. It returns how many
// are. No side effects. A tenant sees its own files only.
func (m *Member) Present(p *Pool, tenant uint32, keys []Key, present []bool) (n int, err error) {
	if err := checkBatch(p.group, len(keys), len(present), 1); err != nil {
		return 0, err
	}
	if err := m.lock(); err != nil {
		return 0, err
	}
	defer m.ses.mu.Unlock()
	p.mu.RLock()
	defer p.mu.RUnlock()
	slots := m.ses.scratchSlots(len(keys))
	p.lookupOwn(tenant, keys, slots)
	for i, s := range slots {
		if present[i] = s != none; present[i] {
			n++
		}
	}
	return n, nil
}

// Pin leases the longest present prefix of keys for reading: grants[:n*len(pools)] are filled. Idempotent by request id
// (a second Pin with one id returns the same grants). Counts as a hit; refreshes the policy leaf first.
func (m *Member) Pin(g *Group, tenant uint32, request uint64, keys []Key, grants []Grant) (n int, err error) {
	if g != nil {
		err = checkBatch(g, len(keys), len(grants), len(g.pools))
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
	g.lock()
	defer g.unlock()
	k := requestKey{g.id, request}
	if ps := ses.pins[k]; ps != nil {
		return ses.repin(m, ps, tenant, keys, grants)
	}
	if len(ses.pins) >= RequestsMax {
		return 0, fmt.Errorf("%w: the session has %d pins; release some", ErrInvalid, RequestsMax)
	}
	if n := ses.pinsNamed; n > 0 && len(keys)*len(g.pools) > PinnedMax-n {
		return 0, fmt.Errorf("%w: the session's pins name %d files, at most %d are allowed; release some",
			ErrInvalid, ses.pinsNamed, PinnedMax)
	}
	slots := ses.scratchSlots(len(keys) * len(g.pools))
	n = g.hit(tenant, keys, slots)
	for _, p := range g.pools {
		p.count.lookups.Add(uint64(len(keys)))
		p.count.hits.Add(uint64(n))
		p.count.misses.Add(uint64(len(keys) - n))
	}
	if n == 0 {
		return 0, nil
	}
	if p := g.pools[0]; p.admission == wear.CostAware {
		ses.s.gate.Hit(p.keySpace, keys[:n])
	}
	ps := &pinset{
		g: g, tenant: tenant, n: n, slots: make([]uint32, n*len(g.pools)),
		owners: []*Member{m}, deadline: ses.s.now().Add(ses.s.o.PinTimeout),
	}
	for j := range g.pools {
		ses.pinPool(ps, j, slots[j*len(keys):][:n])
	}
	ses.pins[k] = ps
	ses.pinsNamed += len(ps.slots)
	ps.fill(grants)
	return n, nil
}

// pinPool leases one pool's part of a pinset and refreshes its policy, leaf first.
func (ses *session) pinPool(ps *pinset, j int, slots []uint32) {
	p, width := ps.g.pools[j], len(ps.g.pools)
	from := 0
	if rule := ps.g.trailing[j]; rule != 0 {
		from = max(0, len(slots)-int(min(rule, uint32(len(slots)))))
	}
	for i := range from {
		ps.slots[i*width+j] = none
	}
	warm := uint64(0)
	for _, s := range slots[from:] {
		warm += uint64(p.nodes.s[s].meta) // all nodes' misses at once
	}
	keep(warm)
	now := uint32(ses.s.now().Unix())
	for i := len(slots) - 1; i >= from; i-- {
		s := slots[i]
		if p.nodes.s[s].is(flagOrphan) {
			p.adopt(s)
		}
		if !p.nodes.s[s].is(flagOrphan) {
			p.policy.touch(s)
		}
		p.m.Touch(s, now)
		ses.hold(p, s)
		ps.slots[i*width+j] = s
	}
}

// repin answers a request that was answered before.
func (ses *session) repin(m *Member, ps *pinset, tenant uint32, keys []Key, grants []Grant) (int, error) {
	if tenant != ps.tenant || !ps.same(keys) {
		return 0, fmt.Errorf("%w: this request id pins other keys", ErrInvalid)
	}
	if !slices.Contains(ps.owners, m) {
		ps.owners = append(ps.owners, m)
	}
	ps.deadline = ses.s.now().Add(ses.s.o.PinTimeout)
	ps.fill(grants)
	return ps.n, nil
}

// same says whether the pinset is that of keys.
func (ps *pinset) same(keys []Key) bool {
	if len(keys) < ps.n {
		return false
	}
	for i, s := range ps.slots {
		j := i % len(ps.g.pools)
		if s != none && *ps.g.pools[j].m.RecordKey(s) != keys[i/len(ps.g.pools)] {
			return false
		}
	}
	return true
}

// fill makes the grants of a pinset; pinned records do not change.
func (ps *pinset) fill(grants []Grant) {
	width := len(ps.g.pools)
	for j, p := range ps.g.pools {
		seed := p.tenantSeed(ps.tenant)
		for i := range ps.n {
			s := ps.slots[i*width+j]
			if s == none {
				grants[i*width+j] = Grant{Slot: none}
				continue
			}
			tokens, nonce, generation := p.m.RecordLease(s)
			grants[i*width+j] = Grant{
				Slot: s, Status: GrantPinned, Tokens: tokens, Generation: generation,
				Seed: seed.Seed(p.m.RecordKey(s), nonce, generation),
			}
		}
	}
}

// Release ends the pins of a request id.
func (m *Member) Release(g *Group, request uint64) error {
	if err := checkBatch(g, 0, 0, 0); err != nil {
		return err
	}
	if err := m.lock(); err != nil {
		return err
	}
	defer m.ses.mu.Unlock()
	k := requestKey{g.id, request}
	ps := m.ses.pins[k]
	if ps == nil {
		return fmt.Errorf("%w: request %d pins nothing (any more)", ErrNotFound, request)
	}
	m.ses.release(k, ps)
	return nil
}

// release ends a pinset; the session's mutex is held, no pool's is.
func (ses *session) release(k requestKey, ps *pinset) {
	ps.g.lock()
	defer ps.g.unlock()
	width := len(ps.g.pools)
	for i, s := range ps.slots {
		if s != none {
			ses.unhold(ps.g.pools[i%width], s)
		}
	}
	for _, p := range ps.g.pools {
		p.flushFrees()
	}
	delete(ses.pins, k)
	ses.pinsNamed -= len(ps.slots)
}

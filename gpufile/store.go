package gpufile

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/checksum"
	"tuttifs/extentmap"
	"tuttifs/wear"
)

// Options of Open. The zero value is the default.
type Options struct {
	Policy         string        // one of Policies; "lru" by default
	PinTimeout     time.Duration // how long a pin lasts unless it is repeated; 60 s by default
	ReserveTimeout time.Duration // how long a reservation may stay uncommitted; 60 s by default
	Now            func() time.Time
	// NoIO: nobody writes payloads (replay --metadata-only, bench meta); commits do not require written objects.
	NoIO bool
	// Admission says which files are admitted to the drives; all by default.
	Admission wear.GateOptions
}

// Times of the store's worker.
const (
	defaultTimeout = 60 * time.Second
	sweepEvery     = time.Second
	retryEvery     = 10 * time.Millisecond
	closeWait      = 10 * time.Second
)

// Store is all pools of a mounted volume. Safe for concurrent use.
type Store struct {
	v        *extentmap.Volume
	o        Options
	now      func() time.Time
	readOnly bool
	detached atomic.Bool // Close has let go of the pools' memory

	opening sync.Mutex // one OpenPool at a time; before any other mutex
	set     atomic.Pointer[poolSet]
	quotaMu sync.Mutex // after the pools' mutexes

	gate *wear.Gate // nil: everything is admitted

	tenantsMu sync.Mutex // a leaf
	tenants   map[uint32]*tenantTotal

	mu          sync.Mutex // last of all
	closed      bool
	sessions    map[uint32]*session
	lastSession uint32

	verify  atomic.Pointer[func(*Pool, uint32, checksum.Seed) Verdict]
	reports chan report
	wishes  chan wish
	giving  atomic.Bool // a row is on its way from a pool to the volume
	wake    chan struct{}
	quit    chan struct{}
	workers sync.WaitGroup
}

// poolSet is the store's pools, replaced as a whole when one is added.
type poolSet struct {
	list     []*Pool // by ID
	byID     []*Pool // by ID, with holes
	byName   map[string]*Pool
	families map[uint16]*Group
}

// Open loads all pools of a mounted volume: indexes, chains and policies are made from the records.
func Open(v *extentmap.Volume, o Options) (*Store, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.PinTimeout == 0 {
		o.PinTimeout = defaultTimeout
	}
	if o.ReserveTimeout == 0 {
		o.ReserveTimeout = defaultTimeout
	}
	s := &Store{
		v: v, o: o, now: o.Now, readOnly: v.Info().ReadOnly,
		sessions: make(map[uint32]*session),
		tenants:  make(map[uint32]*tenantTotal),
		reports:  make(chan report, reportsMax),
		wishes:   make(chan wish, 1),
		wake:     make(chan struct{}, 1),
		quit:     make(chan struct{}),
	}
	var err error
	if s.gate, err = wear.NewGate(o.Admission); err != nil {
		return nil, err
	}
	s.set.Store(&poolSet{byName: make(map[string]*Pool)})
	for _, m := range v.Pools() {
		if err := s.attach(m); err != nil {
			s.closePools()
			return nil, err
		}
	}
	s.workers.Add(4)
	go s.work()
	go s.watchRows()
	go s.workReports()
	go s.workRows()
	return s, nil
}

// attach makes a pool of the volume one of the store's.
func (s *Store) attach(m *extentmap.Pool) error {
	p, err := newPool(s, m)
	if err != nil {
		return err
	}
	old := s.set.Load()
	set := &poolSet{list: append(slices.Clone(old.list), p), byName: make(map[string]*Pool)}
	slices.SortFunc(set.list, func(a, b *Pool) int { return int(a.ID()) - int(b.ID()) })
	set.byID = make([]*Pool, int(set.list[len(set.list)-1].ID())+1)
	for _, p := range set.list {
		set.byID[p.ID()] = p
		set.byName[p.Name()] = p
	}
	set.families = make(map[uint16]*Group)
	for _, p := range set.list {
		id := p.m.FamilyID()
		if id == 0 {
			continue
		}
		g := set.families[id]
		if g == nil {
			g = &Group{id: familyGroup | uint32(id)}
			set.families[id] = g
		}
		g.pools, g.trailing = append(g.pools, p), append(g.trailing, p.m.Spec().TrailingHit)
	}
	s.set.Store(set)
	return nil
}

// Close aborts all reservations, ends all sessions and detaches; the volume stays open. What is with the journal is
// waited for.
func (s *Store) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.mu.Unlock()
	close(s.quit)
	s.workers.Wait()
	deadline := time.Now().Add(closeWait)
	for _, ses := range s.allSessions() {
		ses.shut(deadline)
	}
	for _, p := range s.set.Load().list {
		p.shut(deadline)
	}
	s.closePools()
}

// closePools lets the pools' memory go; whatever looks afterwards finds them empty.
func (s *Store) closePools() {
	s.detached.Store(true)
	for _, p := range s.set.Load().list {
		p.mu.Lock()
		p.close()
		p.mu.Unlock()
	}
	// The only possible failure is a range that is not mapped, which would be a fault of ours without remedy.
	_ = s.gate.Close()
}

// Expectation is what cost-aware admission believes now, if any pool has it.
func (s *Store) Expectation() (e wear.Expectation, ok bool) {
	for _, p := range s.set.Load().list {
		if p.admission == wear.CostAware && !s.detached.Load() {
			return s.gate.Expectation(), true
		}
	}
	return e, false
}

// shut closes all members and waits for what is being committed.
func (ses *session) shut(deadline time.Time) {
	ses.mu.Lock()
	var members []*Member
	for m := range ses.members {
		members = append(members, m)
	}
	var waiting []*extentmap.Ticket
	for _, r := range ses.reservations {
		if r.state == reserveCommitting {
			waiting = append(waiting, r.ticket)
		}
	}
	ses.mu.Unlock()
	for _, m := range members {
		m.Close()
	}
	for _, t := range waiting {
		waitUntil(t, deadline)
	}
}

// shut frees what is only held by pins that end now, so that unlinked files do not come back.
func (p *Pool) shut(deadline time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for slot := range p.nodes.s {
		if p.doomed == 0 {
			break
		}
		if n := &p.nodes.s[slot]; n.is(flagDoomed) {
			p.doomed--
			n.meta = 0
			p.toFree = append(p.toFree, uint32(slot))
		}
	}
	for p.flushFrees() && time.Now().Before(deadline) {
		time.Sleep(retryEvery)
	}
	completeAll(p.freeWaiters, ErrSession)
	p.freeWaiters = nil
}

func waitUntil(t *extentmap.Ticket, deadline time.Time) {
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-t.Done():
	case <-timer.C:
	}
}

func (s *Store) Volume() *extentmap.Volume { return s.v }

// Pools lists the pools, by ID.
func (s *Store) Pools() []*Pool { return slices.Clone(s.set.Load().list) }

// PoolByName returns nil if there is no such pool.
func (s *Store) PoolByName(n string) *Pool { return s.set.Load().byName[n] }

// PoolByID returns nil if there is no such pool.
func (s *Store) PoolByID(id extentmap.PoolID) *Pool { return s.pool(id) }

func (s *Store) pool(id extentmap.PoolID) *Pool {
	if set := s.set.Load(); int(id) < len(set.byID) {
		return set.byID[id]
	}
	return nil
}

// OpenPool opens or creates. Spec's Identity and IdentityDigest are filled from id, and its TokensPerFile if it is
// zero.
func (s *Store) OpenPool(id Identity, spec extentmap.PoolSpec) (*Pool, *extentmap.Ticket, error) {
	if err := id.Validate(); err != nil {
		return nil, nil, err
	}
	if spec.TokensPerFile == 0 {
		spec.TokensPerFile = id.FileTokens
	}
	if spec.TokensPerFile != id.FileTokens {
		return nil, nil, fmt.Errorf("%w: %d tokens a file, but file_tokens is %d",
			ErrInvalid, spec.TokensPerFile, id.FileTokens)
	}
	spec.Identity, spec.IdentityDigest = id.Canonical(), id.Digest()
	s.opening.Lock()
	defer s.opening.Unlock()
	if s.detached.Load() {
		return nil, nil, ErrSession
	}
	if s.readOnly {
		return s.openExisting(&spec)
	}
	m, ticket, err := s.v.CreatePool(spec)
	switch {
	case errors.Is(err, extentmap.ErrExists):
		return nil, nil, fmt.Errorf("%w: %w", ErrIdentity, err)
	case err != nil:
		return nil, nil, err
	}
	if p := s.pool(m.ID()); p != nil {
		return p, ticket, nil
	}
	if err := s.attach(m); err != nil {
		return nil, nil, err
	}
	return s.pool(m.ID()), ticket, nil
}

// openExisting opens a pool of a volume that cannot be changed.
func (s *Store) openExisting(spec *extentmap.PoolSpec) (*Pool, *extentmap.Ticket, error) {
	p := s.PoolByName(spec.Name)
	if p == nil {
		return nil, nil, fmt.Errorf("%w: pool %q cannot be created", ErrReadOnly, spec.Name)
	}
	have, err := p.m.Spec().Geometry.MarshalBinary()
	if err != nil {
		return nil, nil, err
	}
	want, err := spec.Geometry.MarshalBinary()
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if p.digest != spec.IdentityDigest || string(have) != string(want) {
		return nil, nil, fmt.Errorf("%w: pool %q has another identity or geometry", ErrIdentity, spec.Name)
	}
	t := extentmap.NewTicket()
	t.Complete(nil)
	return p, t, nil
}

// tenantTotal is what a tenant has in all pools, for as long as it has something.
type tenantTotal struct {
	bytes atomic.Int64 // of committed and reserved slots
	pools int          // that count into it; Store.tenantsMu
}

// joinTenant makes a pool count into a tenant's total, until leaveTenant.
func (s *Store) joinTenant(id uint32) *tenantTotal {
	s.tenantsMu.Lock()
	defer s.tenantsMu.Unlock()
	t := s.tenants[id]
	if t == nil {
		t = new(tenantTotal)
		s.tenants[id] = t
	}
	t.pools++
	return t
}

func (s *Store) leaveTenant(id uint32) {
	s.tenantsMu.Lock()
	defer s.tenantsMu.Unlock()
	if t := s.tenants[id]; t.pools > 1 {
		t.pools--
	} else {
		delete(s.tenants, id)
	}
}

// tenantBytes is what a tenant has in all pools.
func (s *Store) tenantBytes(id uint32) int64 {
	s.tenantsMu.Lock()
	defer s.tenantsMu.Unlock()
	if t := s.tenants[id]; t != nil {
		return t.bytes.Load()
	}
	return 0
}

// quotaBytes is a tenant's quota, 0 for none.
func (s *Store) quotaBytes(id uint32) uint64 {
	for _, t := range s.v.Tenants() {
		if t.ID == id {
			return t.QuotaBytes
		}
	}
	return 0
}

// allSessions lists the sessions, by ID.
func (s *Store) allSessions() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*session, 0, len(s.sessions))
	for _, ses := range s.sessions {
		all = append(all, ses)
	}
	slices.SortFunc(all, func(a, b *session) int { return int(int64(a.id) - int64(b.id)) })
	return all
}

// kick makes the worker retry frees that the journal had no room for.
func (s *Store) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// work sweeps sessions and retries frees.
func (s *Store) work() {
	defer s.workers.Done()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.quit:
			return
		case <-tick.C:
			s.sweep()
		case <-s.wake:
			select {
			case <-s.quit:
				return
			case <-time.After(retryEvery):
				s.retryFrees()
			}
		}
	}
}

func (s *Store) sweep() {
	now := s.now()
	for _, ses := range s.allSessions() {
		ses.sweep(now)
	}
}

func (s *Store) retryFrees() {
	for _, p := range s.set.Load().list {
		p.mu.Lock()
		p.flushFrees()
		p.mu.Unlock()
	}
}

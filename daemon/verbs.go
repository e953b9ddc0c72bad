package daemon

import (
	"errors"
	"unsafe"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// call is one ioctl being served: ioctl.Handler for one request of one open file.
type call struct {
	c   *Control
	h   *handle
	pid uint32 // the calling thread
}

// errnoOf is the one place where errors of the rooms below become errnos of the ABI.
func errnoOf(err error) ioctl.Errno {
	if err == nil {
		return 0
	}
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.errno
		}
	}
	var errno ioctl.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return ioctl.EIO
}

var errnos = []struct {
	err   error
	errno ioctl.Errno
}{
	{gpufile.ErrNotFound, ioctl.ENOENT},
	{gpufile.ErrPending, ioctl.EINPROGRESS},
	{gpufile.ErrNoSpace, ioctl.ENOSPC},
	{gpufile.ErrAgain, ioctl.EAGAIN},
	{gpufile.ErrQuota, ioctl.EDQUOT},
	{gpufile.ErrReadOnly, ioctl.EROFS},
	{gpufile.ErrSession, ioctl.ESTALE},
	{gpufile.ErrLease, ioctl.EPERM},
	{gpufile.ErrIncomplete, ioctl.ENODATA},
	{extentmap.ErrExists, ioctl.EEXIST}, // before ErrIdentity, which wraps it where identities differ
	{gpufile.ErrIdentity, ioctl.EBADMSG},
	{gpufile.ErrInvalid, ioctl.EINVAL},
	{extentmap.ErrInvalid, ioctl.EINVAL},
	{extentmap.ErrReadOnly, ioctl.EROFS},
	{extentmap.ErrNoSpace, ioctl.ENOSPC},
	{extentmap.ErrAgain, ioctl.EAGAIN},
	{extentmap.ErrMissing, ioctl.ENODEV},
	{extentmap.ErrCorrupt, ioctl.EUCLEAN},
}

// scratch holds one request's private copies of arena spans. It is recycled, so that large batches allocate nothing.
type scratch struct {
	keys    []gpufile.Key
	items   []gpufile.ReserveItem
	raw     []ioctl.ReserveItem
	grants  []gpufile.Grant
	changes []gpufile.Change
	present []bool
}

// resize returns s with length n, grown where it must be.
func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

func rawBytes[T any](s []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t)))
}

// member returns the handle's membership with its memory held mapped: call m.use.RUnlock when done with it.
func (k *call) member() (*member, ioctl.Errno) {
	k.h.mu.Lock()
	m := k.h.member
	k.h.mu.Unlock()
	if m == nil {
		return nil, ioctl.ENOTCONN
	}
	m.use.RLock()
	if m.gone.Load() {
		m.use.RUnlock()
		return nil, ioctl.ESTALE
	}
	return m, 0
}

// attachedMember is member, for verbs that use the arena.
func (k *call) attachedMember() (*member, ioctl.Errno) {
	m, errno := k.member()
	if errno == 0 && m.shared.arena == nil {
		m.use.RUnlock()
		return nil, ioctl.ENXIO
	}
	return m, errno
}

// span is the arena's bytes that a request names. Both sides may write them at any time: copy before looking.
func (m *member) span(s ioctl.Span) ([]byte, ioctl.Errno) {
	n := uint64(len(m.shared.arena))
	if s.Offset%8 != 0 {
		return nil, ioctl.EINVAL
	}
	if s.Offset > n || s.Bytes > n-s.Offset {
		return nil, ioctl.EFAULT
	}
	return m.shared.arena[s.Offset : s.Offset+s.Bytes : s.Offset+s.Bytes], 0
}

// batch is span for elements of a size: how many there are.
func (m *member) batch(s ioctl.Span, size uintptr) (b []byte, n int, errno ioctl.Errno) {
	b, errno = m.span(s)
	if errno != 0 {
		return nil, 0, errno
	}
	n = len(b) / int(size)
	if len(b)%int(size) != 0 || n == 0 || n > ioctl.BatchMax {
		return nil, 0, ioctl.EINVAL
	}
	return b, n, 0
}

// copyKeys copies a span of keys.
func (m *member) copyKeys(s *scratch, span ioctl.Span) ioctl.Errno {
	b, n, errno := m.batch(span, ioctl.KeyBytes)
	if errno != 0 {
		return errno
	}
	s.keys = resize(s.keys, n)
	copy(rawBytes(s.keys), b)
	return 0
}

// grantSpan is where n grants go, as elements in place.
func (m *member) grantSpan(s ioctl.Span, n int) ([]ioctl.Grant, ioctl.Errno) {
	b, errno := m.span(s)
	if errno != 0 {
		return nil, errno
	}
	if uint64(len(b)) < uint64(n)*uint64(unsafe.Sizeof(ioctl.Grant{})) {
		return nil, ioctl.EOVERFLOW
	}
	return unsafe.Slice((*ioctl.Grant)(unsafe.Pointer(unsafe.SliceData(b))), n), 0
}

// putGrants writes results into the arena; nothing is read back from there.
func putGrants(out []ioctl.Grant, grants []gpufile.Grant) {
	for i := range grants {
		g := &grants[i]
		out[i] = ioctl.Grant{Slot: g.Slot, Status: uint8(g.Status), Tokens: g.Tokens, Generation: g.Generation,
			Seed: g.Seed, Lifetime: uint8(g.Life)}
	}
}

// pool resolves a target that must be a pool.
func (k *call) pool(t ioctl.Target) (*gpufile.Pool, ioctl.Errno) {
	if t.Kind != ioctl.TargetPool {
		return nil, ioctl.EINVAL
	}
	if p := k.c.store.PoolByID(extentmap.PoolID(t.ID)); p != nil {
		return p, 0
	}
	return nil, ioctl.ENOENT
}

// group resolves a target that is a pool or a family.
func (k *call) group(t ioctl.Target) (g *gpufile.Group, errno ioctl.Errno) {
	switch t.Kind {
	case ioctl.TargetPool:
		g = k.c.store.GroupOfPool(extentmap.PoolID(t.ID))
	case ioctl.TargetFamily:
		g = k.c.store.GroupOfFamily(t.ID)
	default:
		return nil, ioctl.EINVAL
	}
	if g == nil || len(g.Pools()) == 0 {
		return nil, ioctl.ENOENT
	}
	return g, 0
}

func poolTarget(id extentmap.PoolID) ioctl.Target {
	return ioctl.Target{Kind: ioctl.TargetPool, ID: uint16(id)}
}

func (k *call) familyTarget(name string) ioctl.Target {
	if name == "" {
		return ioctl.Target{}
	}
	for _, f := range k.c.store.Volume().Families() {
		if f.Name == name {
			return ioctl.Target{Kind: ioctl.TargetFamily, ID: f.ID}
		}
	}
	return ioctl.Target{}
}

func (k *call) Hello(a *ioctl.Hello) ioctl.Errno {
	c := k.c
	info, space := c.store.Volume().Info(), c.store.Space()
	a.UUID = info.UUID
	copy(a.Label[:], info.Label)
	a.Nonce, a.Epoch, a.SegmentBytes = info.Nonce, info.Epoch, info.SegmentBytes
	a.TotalBytes, a.UsedBytes, a.FreeBytes = space.TotalBytes, space.UsedBytes, space.FreeBytes
	a.ArenaMax, a.DMAMax = c.o.ArenaBytesMax, c.o.DMABytesMax
	a.Width, a.Drives, a.Pools = uint32(info.Width), uint32(len(info.Drives)), uint32(len(c.store.Pools()))
	if info.ReadOnly {
		a.State |= ioctl.StateReadOnly
	}
	a.LanesMax, a.DepthMax = ioctl.LanesMax, ioctl.DepthMax
	a.Tickets, a.CommandBytes = uint32(c.o.Tickets), commandBytes
	return 0
}

func (k *call) Drives(a *ioctl.Drives) ioctl.Errno {
	drives := k.c.store.Volume().Info().Drives
	a.Total = uint32(len(drives))
	if a.First > a.Total {
		return ioctl.EINVAL
	}
	for i := range drives[a.First:] {
		if a.Count == ioctl.DrivePage {
			break
		}
		d := &drives[int(a.First)+i]
		e := &a.Entries[a.Count]
		*e = ioctl.DriveEntry{UUID: d.UUID, Bytes: d.Bytes, ReadErrors: d.ReadErrors, WriteErrors: d.WriteErrors,
			Segments: d.Segments, FreeSegments: d.FreeSegments, LBABytes: uint32(d.LBABytes), Index: d.Index,
			Kind: uint8(d.Kind)}
		copy(e.Name[:], d.Name[max(0, len(d.Name)-len(e.Name)):])
		if d.Direct {
			e.Flags |= ioctl.DriveDirect
		}
		if d.Metadata {
			e.Flags |= ioctl.DriveMetadata
		}
		a.Count++
	}
	return 0
}

func (k *call) SessionCreate(a *ioctl.Session) ioctl.Errno {
	return k.enter(a, func() (*gpufile.Member, error) { return k.c.store.NewSession(k.h.uid) })
}

func (k *call) SessionJoin(a *ioctl.Session) ioctl.Errno {
	return k.enter(a, func() (*gpufile.Member, error) { return k.c.store.Join(a.Token, k.h.uid) })
}

const arenaDefault = 1 << 20

// enter makes the calling process a member through its open file.
func (k *call) enter(a *ioctl.Session, leases func() (*gpufile.Member, error)) ioctl.Errno {
	arena := a.ArenaBytes
	if arena == 0 {
		arena = arenaDefault
	}
	if arena < ioctl.ArenaBytesMin || arena > k.c.o.ArenaBytesMax || arena%ioctl.UnitBytes != 0 {
		return ioctl.EINVAL
	}
	k.h.mu.Lock()
	defer k.h.mu.Unlock()
	if k.h.member != nil {
		return ioctl.EBUSY
	}
	l, err := leases()
	if err != nil {
		return errnoOf(err)
	}
	m, errno := k.c.newMember(k.h, k.pid, l, arena)
	if errno != 0 {
		return errno
	}
	k.h.member = m
	k.h.tickets.setNotify(m.ticketDone)
	a.Token, a.ID, a.Member, a.ArenaBytes = l.Token(), l.SessionID(), m.id, arena
	ioctl.PutName(a.SocketPath[:], k.c.path)
	return 0
}

func (k *call) Arena(a *ioctl.Arena) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	a.Bytes, a.Inode = uint64(len(m.shared.arena)), m.shared.inode
	a.Session, a.Member = m.leases.SessionID(), m.id
	ioctl.PutName(a.Name[:], m.memoryName()+"arena")
	return 0
}

func (k *call) PoolOpen(a *ioctl.PoolOpen) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	spec, identity, errno := k.poolSpec(m, a)
	if errno != 0 {
		return errno
	}
	s := k.c.store
	if s.PoolByName(spec.Name) == nil && len(s.Pools()) >= k.c.o.MaxPools {
		return ioctl.EMFILE
	}
	id, errno := k.h.tickets.begin()
	if errno != 0 {
		return errno
	}
	p, done, err := s.OpenPool(identity, spec)
	if err != nil {
		k.h.tickets.finish(id, 0, err)
		return errnoOf(err)
	}
	k.h.tickets.follow(id, done)
	a.Ticket, a.Target, a.FamilyTarget = id, poolTarget(p.ID()), k.familyTarget(spec.Family)
	return 0
}

// checksumAlg is the one payload checksum of this version.
const checksumAlg = 1

// poolSpec copies and decodes what POOL_OPEN names.
func (k *call) poolSpec(m *member, a *ioctl.PoolOpen) (
	spec extentmap.PoolSpec, id gpufile.Identity, errno ioctl.Errno,
) {
	name, ok1 := ioctl.Name(a.Name[:])
	family, ok2 := ioctl.Name(a.Family[:])
	if !ok1 || !ok2 || a.ChecksumAlg != checksumAlg {
		return spec, id, ioctl.EINVAL
	}
	if a.Identity.Bytes > ioctl.IdentityBytes || a.Geometry.Bytes > ioctl.GeometryBytes {
		return spec, id, ioctl.EINVAL
	}
	identityBytes, errno := m.span(a.Identity)
	if errno != 0 {
		return spec, id, errno
	}
	geometryBytes, errno := m.span(a.Geometry)
	if errno != 0 {
		return spec, id, errno
	}
	id, err := gpufile.ParseIdentity(append([]byte(nil), identityBytes...))
	if err != nil {
		return spec, id, errnoOf(errors.Join(gpufile.ErrIdentity, err))
	}
	geometry, err := stripe.ParseGeometry(append([]byte(nil), geometryBytes...))
	if err != nil {
		return spec, id, ioctl.EINVAL
	}
	spec = extentmap.PoolSpec{Name: name, Geometry: geometry, TokensPerFile: a.TokensPerFile, Family: family,
		TrailingHit: a.TrailingHit, MinBytes: a.MinBytes, MaxBytes: a.MaxBytes, MaxSlots: a.MaxSlots,
		ChecksumAlg: checksumAlg}
	return spec, id, 0
}

func (k *call) PoolInfo(a *ioctl.PoolInfo) ioctl.Errno {
	p, errno := k.selectPool(a)
	if errno != 0 {
		return errno
	}
	m := p.Map()
	spec, layout := m.Spec(), m.Layout()
	a.Target = poolTarget(p.ID())
	ioctl.PutName(a.Name[:], spec.Name)
	ioctl.PutName(a.Family[:], spec.Family)
	a.Digest, a.SlotBytes, a.MinBytes, a.MaxBytes = spec.IdentityDigest, m.SlotBytes(), spec.MinBytes, spec.MaxBytes
	a.MapGeneration, a.TokensPerFile, a.TrailingHit = m.Generation(), spec.TokensPerFile, spec.TrailingHit
	a.MaxSlots, a.ChecksumAlg = spec.MaxSlots, uint32(spec.ChecksumAlg)
	a.Objects, a.Ranks = uint32(layout.Objects()), uint32(layout.Ranks())
	a.FamilyTarget = k.familyTarget(spec.Family)
	return 0
}

func (k *call) selectPool(a *ioctl.PoolInfo) (*gpufile.Pool, ioctl.Errno) {
	switch a.Header.Flags {
	case ioctl.PoolByName:
		name, ok := ioctl.Name(a.Name[:])
		if !ok {
			return nil, ioctl.EINVAL
		}
		if p := k.c.store.PoolByName(name); p != nil {
			return p, 0
		}
		return nil, ioctl.ENOENT
	case ioctl.PoolByIndex:
		pools := k.c.store.Pools()
		if uint64(a.Index) >= uint64(len(pools)) {
			return nil, ioctl.ENOENT
		}
		return pools[a.Index], 0
	}
	return k.pool(a.Target)
}

func (k *call) Layout(a *ioctl.Layout) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	out, errno := m.span(a.Geometry)
	if errno != 0 {
		return errno
	}
	pm := p.Map()
	layout := pm.Layout()
	b, err := layout.Geometry().MarshalBinary()
	if err != nil {
		return errnoOf(err)
	}
	if len(out) > 0 && len(b) > len(out) {
		return ioctl.EOVERFLOW
	}
	copy(out, b)
	a.GeometryBytes, a.EntryUnits, a.SlotUnits = uint64(len(b)), pm.EntryUnits(), layout.SlotUnits()
	a.MapGeneration, a.SlotsPerRow, a.Slots = pm.Generation(), pm.SlotsPerRow(), pm.Slots()
	a.Width, a.ChecksumAlg = uint32(layout.Width()), uint32(pm.Spec().ChecksumAlg)
	return 0
}

func (k *call) Rows(a *ioctl.Rows) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	out, errno := m.span(a.Rows)
	if errno != 0 {
		return errno
	}
	pm := p.Map()
	width := pm.Layout().Width()
	a.RowBytes = uint32(unsafe.Sizeof(ioctl.RowHead{})) + uint32(width)*uint32(unsafe.Sizeof(ioctl.RowEntry{}))
	// The generation is read before the rows: if they change between, the caller finds an old one and looks again.
	a.MapGeneration = pm.Generation()
	rows := pm.Rows()
	a.Total = uint32(len(rows))
	if uint64(len(out)) < uint64(a.RowBytes) {
		return ioctl.EOVERFLOW
	}
	for i := range rows {
		r := &rows[i]
		if r.Number < a.First {
			continue
		}
		if len(out) < int(a.RowBytes) {
			a.Next = r.Number
			break
		}
		putRow(out, r)
		out = out[a.RowBytes:]
		a.Count++
	}
	return 0
}

func putRow(out []byte, r *extentmap.Row) {
	head := (*ioctl.RowHead)(unsafe.Pointer(unsafe.SliceData(out)))
	*head = ioctl.RowHead{Number: r.Number, Width: uint32(len(r.Drives))}
	out = out[unsafe.Sizeof(ioctl.RowHead{}):]
	entries := unsafe.Slice((*ioctl.RowEntry)(unsafe.Pointer(unsafe.SliceData(out))), len(r.Drives))
	for i := range entries {
		entries[i] = ioctl.RowEntry{Unit: r.Units[i], Drive: r.Drives[i]}
	}
}

func (k *call) MapAck(a *ioctl.MapAck) ioctl.Errno {
	m, errno := k.member()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	a.Current = p.Map().Generation()
	if a.MapGeneration > a.Current {
		return ioctl.EINVAL
	}
	m.setAck(p.ID(), a.MapGeneration)
	return 0
}

func (k *call) Peek(a *ioctl.Peek) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	g, errno := k.group(a.Target)
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	if errno := m.copyKeys(s, a.Keys); errno != 0 {
		return errno
	}
	n, err := m.leases.Peek(g, a.Tenant, s.keys)
	a.Count = uint32(n)
	return errnoOf(err)
}

func (k *call) Present(a *ioctl.Present) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	if errno := m.copyKeys(s, a.Keys); errno != 0 {
		return errno
	}
	out, errno := m.span(a.Present)
	if errno != 0 {
		return errno
	}
	if len(out) < len(s.keys) {
		return ioctl.EOVERFLOW
	}
	s.present = resize(s.present, len(s.keys))
	n, err := m.leases.Present(p, a.Tenant, s.keys, s.present)
	if err != nil {
		return errnoOf(err)
	}
	for i, there := range s.present {
		if out[i] = 0; there {
			out[i] = 1
		}
	}
	a.Count = uint32(n)
	return 0
}

func (k *call) Pin(a *ioctl.Pin) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	g, errno := k.group(a.Target)
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	if errno := m.copyKeys(s, a.Keys); errno != 0 {
		return errno
	}
	pools := len(g.Pools())
	out, errno := m.grantSpan(a.Grants, len(s.keys)*pools)
	if errno != 0 {
		return errno
	}
	s.grants = resize(s.grants, len(out))
	n, err := m.leases.Pin(g, a.Tenant, a.Request, s.keys, s.grants)
	if err != nil {
		return errnoOf(err)
	}
	putGrants(out, s.grants[:n*pools])
	a.MapGeneration, a.Count, a.Pools = mapGeneration(g.Pools()), uint32(n), uint32(pools)
	return 0
}

func (k *call) Release(a *ioctl.Release) ioctl.Errno {
	return k.lease(a.Target, func(m *member, g *gpufile.Group) error { return m.leases.Release(g, a.Request) })
}

// lease runs a verb on the leases of a group that needs no arena.
func (k *call) lease(t ioctl.Target, f func(m *member, g *gpufile.Group) error) ioctl.Errno {
	m, errno := k.member()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	g, errno := k.group(t)
	if errno != 0 {
		return errno
	}
	return errnoOf(f(m, g))
}

func (k *call) Reserve(a *ioctl.Reserve) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	g, errno := k.group(a.Target)
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	if errno := m.copyItems(s, a.Items); errno != 0 {
		return errno
	}
	pools := len(g.Pools())
	out, errno := m.grantSpan(a.Grants, len(s.items)*pools)
	if errno != 0 {
		return errno
	}
	s.grants = resize(s.grants, len(out))
	partial := a.Header.Flags&ioctl.ReservePartial != 0
	n, err := m.leases.Reserve(g, a.Tenant, a.Reserve, s.items, partial, s.grants)
	if err != nil {
		return errnoOf(err)
	}
	putGrants(out, s.grants[:n*pools])
	a.MapGeneration, a.Count, a.Pools = mapGeneration(g.Pools()), uint32(n), uint32(pools)
	return 0
}

// copyItems copies a span of files to store.
func (m *member) copyItems(s *scratch, span ioctl.Span) ioctl.Errno {
	b, n, errno := m.batch(span, unsafe.Sizeof(ioctl.ReserveItem{}))
	if errno != 0 {
		return errno
	}
	s.raw, s.items = resize(s.raw, n), resize(s.items, n)
	copy(rawBytes(s.raw), b)
	for i := range s.raw {
		r := &s.raw[i]
		s.items[i] = gpufile.ReserveItem{Key: r.Key, Parent: r.Parent, Tokens: r.Tokens, Position: r.Position}
	}
	return 0
}

func (k *call) Commit(a *ioctl.Commit) ioctl.Errno {
	id, errno := k.h.tickets.begin()
	if errno != 0 {
		return errno
	}
	errno = k.lease(a.Target, func(m *member, g *gpufile.Group) error {
		done, err := m.leases.Commit(g, a.Reserve, a.Rank)
		if err == nil {
			k.h.tickets.follow(id, done)
			a.Ticket = id
		}
		return err
	})
	if errno != 0 {
		k.h.tickets.finish(id, 0, errno)
	}
	return errno
}

func (k *call) Abort(a *ioctl.Abort) ioctl.Errno {
	return k.lease(a.Target, func(m *member, g *gpufile.Group) error { return m.leases.Abort(g, a.Reserve) })
}

func (k *call) ReportBad(a *ioctl.ReportBad) ioctl.Errno {
	m, errno := k.member()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	id, errno := k.h.tickets.begin()
	if errno != 0 {
		return errno
	}
	done, err := m.leases.ReportBad(p, a.Slot, a.Generation)
	if err != nil {
		k.h.tickets.finish(id, 0, err)
		return errnoOf(err)
	}
	k.h.tickets.follow(id, done)
	a.Ticket = id
	return 0
}

// Evict starts an eviction and answers a ticket: choosing victims among millions may take longer than an ioctl should.
func (k *call) Evict(a *ioctl.Evict) ioctl.Errno {
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	if k.c.store.Volume().Info().ReadOnly {
		return ioctl.EROFS
	}
	work, errno := k.eviction(p, a)
	if errno != 0 {
		return errno
	}
	id, errno := k.h.tickets.begin()
	if errno != 0 {
		return errno
	}
	if errno := k.c.evict(func() {
		n, err := work()
		k.h.tickets.finish(id, uint64(n), err)
	}); errno != 0 {
		k.h.tickets.finish(id, 0, errno)
		return errno
	}
	a.Ticket = id
	return 0
}

// eviction is what a well-formed EVICT will do.
func (k *call) eviction(p *gpufile.Pool, a *ioctl.Evict) (func() (int, error), ioctl.Errno) {
	if a.Header.Flags == ioctl.EvictCount {
		if a.Count == 0 || a.Keys != (ioctl.Span{}) {
			return nil, ioctl.EINVAL
		}
		return func() (int, error) { return p.EvictCount(int(a.Count)) }, 0
	}
	m, errno := k.attachedMember()
	if errno != 0 {
		return nil, errno
	}
	defer m.use.RUnlock()
	if a.Count != 0 {
		return nil, ioctl.EINVAL
	}
	var s scratch // lives as long as the eviction, so it is not a recycled one
	if errno := m.copyKeys(&s, a.Keys); errno != 0 {
		return nil, errno
	}
	one := func(key *gpufile.Key) (int, error) { return 1, p.Unlink(key) }
	if a.Header.Flags == ioctl.EvictPrefix {
		one = p.EvictPrefix
	}
	return func() (int, error) { return eachKey(s.keys, one) }, 0
}

// eachKey sums f over keys; keys that are not there count nothing, any other error ends it.
func eachKey(keys []gpufile.Key, f func(*gpufile.Key) (int, error)) (sum int, err error) {
	for i := range keys {
		n, err := f(&keys[i])
		switch {
		case err == nil:
			sum += n
		case !errors.Is(err, gpufile.ErrNotFound):
			return sum, err
		}
	}
	return sum, nil
}

func (k *call) Unlink(a *ioctl.Unlink) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	if errno := m.copyKeys(s, a.Keys); errno != 0 {
		return errno
	}
	n, err := eachKey(s.keys, func(key *gpufile.Key) (int, error) { return 1, p.Unlink(key) })
	a.Count = uint32(n)
	return errnoOf(err)
}

func (k *call) Extents(a *ioctl.Extents) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	if a.Generation != 0 {
		if _, ok := p.Stat(a.Slot, a.Generation, 64); !ok {
			return ioctl.ENOENT
		}
	}
	b, errno := m.span(a.Extents)
	if errno != 0 {
		return errno
	}
	pm := p.Map()
	a.Total = uint32(pm.Layout().Objects())
	size := int(unsafe.Sizeof(ioctl.Extent{}))
	if len(b)%size != 0 || a.First >= a.Total {
		return ioctl.EINVAL
	}
	room := min(len(b)/size, int(a.Total-a.First))
	out := unsafe.Slice((*ioctl.Extent)(unsafe.Pointer(unsafe.SliceData(b))), room)
	for i := range out {
		object := uint16(int(a.First) + i)
		d, unit, units, ok := pm.Extent(a.Slot, object)
		if !ok {
			return ioctl.ENOENT
		}
		out[i] = ioctl.Extent{Unit: unit, Units: units, Drive: d, Object: object}
	}
	a.Count = uint32(room)
	return 0
}

func (k *call) Stats(a *ioctl.Stats) ioctl.Errno {
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	s := p.Stats()
	a.Lookups, a.Hits, a.Misses = s.Lookups, s.Hits, s.Misses
	a.Reserves, a.Commits, a.Aborts = s.Reserved, s.Committed, s.Aborted
	a.Evicted, a.Doomed, a.Bad = s.Evicted, s.Doomed, s.Bad
	a.Files, a.FilesPinned, a.FilesReserved = s.Files, s.FilesPinned, s.FilesReserved
	a.SlotsFree, a.SlotsFreeing, a.SlotsUsed = s.SlotsFree, s.SlotsFreeing, s.SlotsUsed
	a.BytesUsed, a.BytesCapacity = s.BytesUsed, s.BytesCapacity
	return 0
}

func (k *call) Events(a *ioctl.Events) ioctl.Errno {
	pools := k.c.store.Pools()
	a.Total = uint32(len(pools))
	if a.First > a.Total {
		return ioctl.EINVAL
	}
	for _, p := range pools[a.First:] {
		if a.Count == ioctl.EventPage {
			break
		}
		s := p.Stats()
		a.Events[a.Count] = ioctl.Event{Target: poolTarget(p.ID()), MapGeneration: p.Map().Generation(),
			Committed: s.Committed, Evicted: s.Evicted, Doomed: s.Doomed, Bad: s.Bad}
		a.Count++
	}
	return 0
}

// What the ABI promises of changes is what pools keep.
var _ [ioctl.ChangesKept]struct{} = [gpufile.ChangesKept]struct{}{}

func (k *call) Changes(a *ioctl.Changes) ioctl.Errno {
	m, errno := k.attachedMember()
	if errno != 0 {
		return errno
	}
	defer m.use.RUnlock()
	p, errno := k.pool(a.Target)
	if errno != 0 {
		return errno
	}
	b, room, errno := m.batch(a.Changes, unsafe.Sizeof(ioctl.Change{}))
	if errno != 0 {
		return errno
	}
	s := k.c.scratch.Get().(*scratch)
	defer k.c.scratch.Put(s)
	s.changes = resize(s.changes, room)
	n, next, lost, err := p.Changes(a.Since, s.changes)
	if err != nil {
		return errnoOf(err)
	}
	out := unsafe.Slice((*ioctl.Change)(unsafe.Pointer(unsafe.SliceData(b))), room)
	for i, c := range s.changes[:n] {
		out[i] = ioctl.Change{Key: c.Key, Tenant: c.Tenant, Kind: ioctl.ChangeStored}
		if c.Removed {
			out[i].Kind = ioctl.ChangeRemoved
		}
	}
	a.Next, a.Lost, a.Count = next, lost, uint32(n)
	return 0
}

func (k *call) Ticket(a *ioctl.Ticket) ioctl.Errno {
	t, errno := k.h.tickets.query(a.ID)
	if errno != 0 {
		return errno
	}
	a.State, a.Errno, a.Value = t.state, int32(t.errno), t.value
	return 0
}

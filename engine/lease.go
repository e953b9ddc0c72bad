package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// Item is one file to store.
type Item struct {
	Key, Parent Key
	Tokens      uint32
	Position    uint32
}

const itemBytes = int(unsafe.Sizeof(ioctl.ReserveItem{}))

// batchMost bounds one call: larger batches are cut, so that no call keeps the mount busy for long. Ranks that join a
// reservation cut it at the same places as long as their arenas hold this much.
const batchMost = 4096

// batch is how many entries of n bytes fit one call.
func (c *control) batch(n int) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.arena == nil {
		return 0, errClosed
	}
	k := min(batchMost, len(c.arena)/n)
	if k == 0 {
		return 0, fmt.Errorf("%w: the arena of %d bytes holds no entry of %d", ErrInvalid, len(c.arena), n)
	}
	return k, nil
}

// partID names the k-th batch of a request or reservation. The first has the caller's id; the others are spread over
// all 64 bits, where a caller that counts its requests does not meet them.
func partID(id uint64, k int) uint64 {
	if k == 0 {
		return id
	}
	x := id + uint64(k)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// partKey keeps requests and reservations apart in Pool.parts.
func partKey(id uint64, reserve bool) uint64 {
	if reserve {
		return partID(id, 1<<32)
	}
	return id
}

// remember notes how many batches an id has; one is not noted.
func (p *Pool) remember(key uint64, parts int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if parts > 1 {
		p.parts[key] = parts
	} else {
		delete(p.parts, key)
	}
}

func (p *Pool) partsOf(key uint64) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(1, p.parts[key])
}

// Peek is the length of the longest prefix of keys that is present. It has no side effects.
func (p *Pool) Peek(tenant uint32, keys []Key) (int, error) {
	most, err := p.control.batch(ioctl.KeyBytes)
	if err != nil {
		return 0, err
	}
	found := 0
	for len(keys) > 0 {
		part := keys[:min(most, len(keys))]
		n, err := p.peek(tenant, part)
		if err != nil {
			return 0, explain(err)
		}
		found, keys = found+n, keys[n:]
		if n < len(part) {
			break
		}
	}
	return found + p.keeper.peek(tenant, keys), nil
}

func (p *Pool) peek(tenant uint32, keys []Key) (int, error) {
	c := p.control
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(len(keys) * ioctl.KeyBytes)
	if err != nil {
		return 0, err
	}
	c.putKeys(spans[0], keys)
	a := ioctl.Peek{Target: p.target, Keys: spans[0], Tenant: tenant}
	if err := c.verbs.Peek(&a); err != nil {
		return 0, err
	}
	return checkCount(a.Count, len(keys))
}

// Present says of each key whether its file is there, whatever is before it: present[i] of keys[i]. It has no side
// effects.
func (p *Pool) Present(tenant uint32, keys []Key, present []bool) error {
	if len(present) < len(keys) {
		return fmt.Errorf("%w: room for %d answers about %d keys", ErrInvalid, len(present), len(keys))
	}
	most, err := p.control.batch(ioctl.KeyBytes + 1)
	if err != nil {
		return err
	}
	for begin := 0; begin < len(keys); begin += most {
		end := min(begin+most, len(keys))
		if err := p.present(tenant, keys[begin:end], present[begin:end]); err != nil {
			return explain(err)
		}
	}
	p.keeper.present(tenant, keys, present)
	return nil
}

func (p *Pool) present(tenant uint32, keys []Key, present []bool) error {
	c := p.control
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(len(keys)*ioctl.KeyBytes, len(keys))
	if err != nil {
		return err
	}
	c.putKeys(spans[0], keys)
	a := ioctl.Present{Target: p.target, Keys: spans[0], Present: spans[1], Tenant: tenant}
	if err := c.verbs.Present(&a); err != nil {
		return err
	}
	for i, there := range c.bytes(spans[1]) {
		present[i] = there == 1
	}
	return nil
}

func (c *control) putKeys(s ioctl.Span, keys []Key) {
	b := c.bytes(s)
	for i := range keys {
		copy(b[i*ioctl.KeyBytes:], keys[i][:])
	}
}

// checkCount believes no count that leads out of the batch.
func checkCount(n uint32, most int) (int, error) {
	if uint64(n) > uint64(most) {
		return 0, fmt.Errorf("%w: %d answered for a batch of %d", ErrInvalid, n, most)
	}
	return int(n), nil
}

// Pin leases the longest present prefix of keys for reading; grants[:n] are filled. A repeated Pin with one request id
// answers the same. Release ends the lease.
func (p *Pool) Pin(tenant uint32, request uint64, keys []Key, grants []Grant) (int, error) {
	if len(grants) < len(keys) {
		return 0, fmt.Errorf("%w: %d grants for %d keys", ErrInvalid, len(grants), len(keys))
	}
	most, err := p.control.batch(ioctl.KeyBytes + grantBytes)
	if err != nil {
		return 0, err
	}
	onDrives, err := p.keeper.onDrives(tenant, request, keys)
	if err != nil {
		return 0, err
	}
	pinned, parts := 0, 0
	for begin := 0; begin < onDrives; {
		part := keys[begin:min(begin+most, onDrives)]
		var n int
		held := parts // of this call: an id that others have is refused, and what they pinned stays theirs
		err := p.control.retry(func() (err error) {
			var generation uint64
			if n, generation, err = p.pin(tenant, partID(request, parts), part, grants[begin:]); err != nil {
				return err
			}
			held = parts + 1
			return p.follow(generation)
		})
		if err != nil {
			if held > 0 {
				p.keeper.release(request)
			}
			_ = p.releaseParts(request, held)
			return 0, err
		}
		if n > 0 { // else there is nothing to release
			parts++
		}
		pinned, begin = pinned+n, begin+len(part)
		if n < len(part) {
			break
		}
	}
	p.remember(partKey(request, false), parts)
	return p.keeper.pin(tenant, request, keys, grants, pinned), nil
}

func (p *Pool) pin(tenant uint32, request uint64, keys []Key, grants []Grant) (int, uint64, error) {
	c := p.control
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(len(keys)*ioctl.KeyBytes, len(keys)*grantBytes)
	if err != nil {
		return 0, 0, err
	}
	c.putKeys(spans[0], keys)
	a := ioctl.Pin{Target: p.target, Keys: spans[0], Grants: spans[1], Request: request, Tenant: tenant}
	if err := c.verbs.Pin(&a); err != nil {
		return 0, 0, err
	}
	n, err := checkCount(a.Count, len(keys))
	if err != nil {
		return 0, 0, err
	}
	if a.Pools != 1 {
		return 0, 0, fmt.Errorf("%w: %d grants a key for one pool", ErrInvalid, a.Pools)
	}
	parseGrants(c.bytes(spans[1]), grants[:n])
	return n, a.MapGeneration, nil
}

// Release ends the pins of a request id.
func (p *Pool) Release(request uint64) error {
	key := partKey(request, false)
	parts := p.partsOf(key)
	p.remember(key, 0)
	kept := p.keeper.release(request)
	err := p.releaseParts(request, parts)
	if kept && errors.Is(err, ErrNotFound) {
		return nil // it had nothing else
	}
	return err
}

// releaseParts releases every batch of a request, whatever happens to the others.
func (p *Pool) releaseParts(request uint64, parts int) error {
	var errs []error
	for k := range parts {
		a := ioctl.Release{Target: p.target, Request: partID(request, k)}
		errs = append(errs, p.control.call(func() error { return p.control.verbs.Release(&a) }))
	}
	return errors.Join(errs...)
}

// Reserve leases slots for writing: all or nothing, or a leading run with partial. It retries while space is being
// freed, until the deadline. Items that the mount's admission policy does not want are granted as ioctl.GrantDeclined,
// and not written; or as ioctl.GrantNew, where the session keeps them in host memory. Other ranks of the session join
// by the same id; a join that fails changes nothing for them.
func (p *Pool) Reserve(tenant uint32, reserve uint64, items []Item, partial bool, grants []Grant) (int, error) {
	if len(grants) < len(items) {
		return 0, fmt.Errorf("%w: %d grants for %d items", ErrInvalid, len(grants), len(items))
	}
	most, err := p.control.batch(itemBytes + grantBytes)
	if err != nil {
		return 0, err
	}
	granted, parts := 0, 0
	for begin := 0; begin < len(items); parts++ {
		part := items[begin:min(begin+most, len(items))]
		var n int
		err := p.control.retry(func() (err error) {
			n, err = p.reserve(tenant, partID(reserve, parts), part, partial, grants[begin:])
			return err
		})
		if partial && granted > 0 && n == 0 && isShort(err) {
			break
		}
		if err != nil {
			p.undo(reserve, most, grants[:granted+n])
			return 0, p.sayShort(err, len(items))
		}
		granted, begin = granted+n, begin+len(part)
		if n < len(part) {
			parts++
			break
		}
	}
	p.remember(partKey(reserve, true), parts)
	p.keeper.reserve(tenant, reserve, items[:granted], grants)
	return granted, nil
}

// isShort says whether an error is for want of space, now or at all.
func isShort(err error) bool {
	return errors.Is(err, ErrNoSpace) || errors.Is(err, ErrQuota) || errors.Is(err, ErrAgain)
}

// sayShort says of ErrNoSpace what is in the way, by the pool's figures: its size, or what is pinned and reserved.
func (p *Pool) sayShort(err error, wanted int) error {
	if !errors.Is(err, ErrNoSpace) {
		return err
	}
	a, failed := p.Stats()
	if failed != nil || a.BytesCapacity == 0 {
		return err
	}
	size := p.layout.SlotUnits() * stripe.UnitBytes
	most, held := a.BytesCapacity/size, a.FilesPinned+a.FilesReserved
	if uint64(wanted) > most {
		return fmt.Errorf("%w; %d files are wanted, the pool has room for %d: store fewer at a time", err, wanted, most)
	}
	return fmt.Errorf("%w; %d files are wanted, the pool has room for %d, of which %d are pinned or reserved",
		err, wanted, most, held)
}

// undo aborts what a failed Reserve has made: of its parts, of most grants each, those with slots that were new to
// this process. A part that another rank made first is that rank's, and an Abort here would take it from all of them.
func (p *Pool) undo(reserve uint64, most int, grants []Grant) {
	for k := 0; len(grants) > 0; k++ {
		part := grants[:min(most, len(grants))]
		if slices.ContainsFunc(part, func(g Grant) bool { return g.Status == ioctl.GrantNew }) {
			_ = p.abortPart(reserve, k)
		}
		grants = grants[len(part):]
	}
}

func (p *Pool) reserve(tenant uint32, reserve uint64, items []Item, partial bool, grants []Grant) (int, error) {
	n, generation, err := p.reserveLocked(tenant, reserve, items, partial, grants)
	if err != nil {
		return 0, err
	}
	if err := p.follow(generation); err != nil {
		return n, err
	}
	p.expect(grants[:n])
	return n, nil
}

// expect notes how long what is to be written will probably stay.
func (p *Pool) expect(grants []Grant) {
	slots := p.extents.Load().Slots()
	for i := range grants {
		g := &grants[i]
		if (g.Status == ioctl.GrantNew || g.Status == ioctl.GrantJoined) && uint64(g.Slot) < slots {
			p.lives.Set(g.Slot, g.Lifetime)
		}
	}
}

func (p *Pool) reserveLocked(tenant uint32, reserve uint64, items []Item, partial bool, grants []Grant) (
	int, uint64, error) {
	c := p.control
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(len(items)*itemBytes, len(items)*grantBytes)
	if err != nil {
		return 0, 0, err
	}
	b := c.bytes(spans[0])
	for i := range items {
		e := b[i*itemBytes : (i+1)*itemBytes]
		copy(e, items[i].Key[:])
		copy(e[ioctl.KeyBytes:], items[i].Parent[:])
		binary.LittleEndian.PutUint32(e[2*ioctl.KeyBytes:], items[i].Tokens)
		binary.LittleEndian.PutUint32(e[2*ioctl.KeyBytes+4:], items[i].Position)
	}
	a := ioctl.Reserve{Target: p.target, Items: spans[0], Grants: spans[1], Reserve: reserve, Tenant: tenant}
	flags := uint16(0)
	if partial {
		flags = ioctl.ReservePartial
	}
	if err := c.verbs.Reserve(&a, flags); err != nil {
		return 0, 0, err
	}
	n, err := checkCount(a.Count, len(items))
	if err != nil {
		return 0, 0, err
	}
	if a.Pools != 1 || !partial && n != len(items) {
		return 0, 0, fmt.Errorf("%w: %d of %d items granted, %d grants each", ErrInvalid, n, len(items), a.Pools)
	}
	parseGrants(c.bytes(spans[1]), grants[:n])
	return n, a.MapGeneration, nil
}

// Commit says that all objects of rank are written, and waits until the files are durable: with several ranks, until
// the last of them has committed. Ranks of one process therefore commit side by side, or with CommitRanks.
func (p *Pool) Commit(reserve uint64, rank uint16) error {
	return p.CommitRanks(reserve, rank)
}

// CommitRanks commits several ranks that this process wrote, and waits until the files are durable.
func (p *Pool) CommitRanks(reserve uint64, ranks ...uint16) error {
	key := partKey(reserve, true)
	var tickets []uint64
	for _, rank := range ranks {
		for k := range p.partsOf(key) {
			a := ioctl.Commit{Target: p.target, Reserve: partID(reserve, k), Rank: rank}
			if err := p.control.retryCall(func() error { return p.control.verbs.Commit(&a) }); err != nil {
				p.keeper.abort(reserve)
				return err
			}
			tickets = append(tickets, a.Ticket)
		}
	}
	var errs []error
	for _, id := range tickets {
		errs = append(errs, p.control.ticket(id))
	}
	p.remember(key, 0) // not before: the other ranks commit as many parts meanwhile
	err := errors.Join(errs...)
	if err != nil {
		p.keeper.abort(reserve)
	} else {
		p.keeper.commit(reserve, ranks)
	}
	return err
}

// Abort gives a reservation's uncommitted slots back.
func (p *Pool) Abort(reserve uint64) error {
	key := partKey(reserve, true)
	parts := p.partsOf(key)
	p.remember(key, 0)
	p.keeper.abort(reserve)
	var errs []error
	for k := range parts {
		errs = append(errs, p.abortPart(reserve, k))
	}
	return errors.Join(errs...)
}

func (p *Pool) abortPart(reserve uint64, k int) error {
	a := ioctl.Abort{Target: p.target, Reserve: partID(reserve, k)}
	return p.control.call(func() error { return p.control.verbs.Abort(&a) })
}

// ReportBad says that a slot's bytes are damaged and waits for the daemon's own look at them: nil means that it has
// evicted the file, or found it whole.
func (p *Pool) ReportBad(slot uint32, generation uint64) error {
	if p.keeper.owns(slot) {
		p.keeper.bad(slot, generation)
		return nil
	}
	a := ioctl.ReportBad{Target: p.target, Slot: slot, Generation: generation}
	if err := p.control.retryCall(func() error { return p.control.verbs.ReportBad(&a) }); err != nil {
		return err
	}
	return p.control.ticket(a.Ticket)
}

// KeepStats are about blocks that were declined and are kept in host memory; zero where there is none for them. It is
// safe to call at any time.
func (p *Pool) KeepStats() KeepStats { return p.keeper.report() }

// Stats are the pool's counters and gauges.
func (p *Pool) Stats() (ioctl.Stats, error) {
	a := ioctl.Stats{Target: p.target}
	err := p.control.call(func() error { return p.control.verbs.Stats(&a) })
	return a, err
}

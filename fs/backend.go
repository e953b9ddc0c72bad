package fs

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

// files is what the tree asks of one pool: a *gpufile.Pool, or a stand-in of the tests.
type files interface {
	ID() extentmap.PoolID
	Name() string
	Identity() gpufile.Identity
	Created() time.Time
	Find(key *gpufile.Key) (slot uint32, generation uint64, ok bool)
	Stat(slot uint32, generation uint64, genBits int) (gpufile.FileInfo, bool)
	List(shard byte, cookie uint64, out []gpufile.ListEntry) int
	ListTips(cookie uint64, out []gpufile.ListEntry) int
	Chain(key *gpufile.Key) (chain []gpufile.Key, complete bool, ok bool)
	Unlink(key *gpufile.Key) error
	EvictPrefix(key *gpufile.Key) (int, error)
	HoldRead(slot uint32, generation uint64, genBits int) (gpufile.FileInfo, func(), bool)
}

// backend is the store behind the tree.
type backend interface {
	pools() []files
	// shape is what never changes in a pool's life: its layout, the bytes one slot occupies, and the tokens of a full
	// file.
	shape(p files) (l *stripe.Layout, slotBytes uint64, tokens uint32)
	space() gpufile.Space
	extent(p files, slot uint32, object uint16) (drive uint16, unit uint64, units uint32, ok bool)
	open(p files, info gpufile.FileInfo) (FileReader, error)
	// store reserves a slot, has write fill it, commits it and returns when it is durable.
	store(p files, uid, tenant uint32, item gpufile.ReserveItem, write func(FileWriter) error) error
	reportBad(p files, slot uint32, generation uint64)
	close()
}

var (
	// errExists: the key is stored already; what was copied in is not.
	errExists = errors.New("fs: a file of this key is stored already")
	// errNoPayload: the volume holds records only.
	errNoPayload = errors.New("fs: this mount has no access to payloads")
)

// againMax bounds how long a file being stored waits for slots that are being freed.
const againMax = 10 * time.Second

// storeBackend is the real store.
type storeBackend struct {
	s       *gpufile.Store
	payload Payload
	// reporter is the session in whose name damage found by readers is reported.
	reporter *gpufile.Member
}

func newStoreBackend(s *gpufile.Store, payload Payload) (*storeBackend, error) {
	m, err := s.NewSession(0)
	if err != nil {
		return nil, fmt.Errorf("fs: a session for the mount's own readers: %w", err)
	}
	return &storeBackend{s, payload, m}, nil
}

func (b *storeBackend) close() { b.reporter.Close() }

func (b *storeBackend) pools() []files {
	pools := b.s.Pools()
	out := make([]files, len(pools))
	for i, p := range pools {
		out[i] = p
	}
	return out
}

func (b *storeBackend) shape(p files) (*stripe.Layout, uint64, uint32) {
	m := p.(*gpufile.Pool).Map()
	return m.Layout(), m.SlotBytes(), m.Spec().TokensPerFile
}

func (b *storeBackend) space() gpufile.Space { return b.s.Space() }

func (b *storeBackend) extent(p files, slot uint32, object uint16) (uint16, uint64, uint32, bool) {
	return p.(*gpufile.Pool).Map().Extent(slot, object)
}

func (b *storeBackend) open(p files, info gpufile.FileInfo) (FileReader, error) {
	if b.payload == nil {
		return nil, errNoPayload
	}
	return b.payload.OpenFile(p.(*gpufile.Pool), info)
}

func (b *storeBackend) reportBad(p files, slot uint32, generation uint64) {
	// Nobody waits for the outcome: the store's worker rereads the file, and evicts it if the damage is there.
	b.reporter.ReportBad(p.(*gpufile.Pool), slot, generation)
}

func (b *storeBackend) store(
	f files, uid, tenant uint32, item gpufile.ReserveItem, write func(FileWriter) error,
) error {
	if b.payload == nil {
		return errNoPayload
	}
	p := f.(*gpufile.Pool)
	g := b.s.GroupOfPool(p.ID())
	if g == nil || len(g.Pools()) != 1 {
		return fmt.Errorf("fs: pool %s is no group of its own: %w", p.Name(), gpufile.ErrInvalid)
	}
	// A session for each file: it carries the owner, and closing it gives back what was not committed.
	m, err := b.s.NewSession(uid)
	if err != nil {
		return err
	}
	defer m.Close()
	m.AdmitAll() // a copy that somebody makes by hand is wanted, whatever the policy thinks of engines' blocks
	const reserve = 1
	grant, err := reserveOne(m, g, tenant, reserve, item)
	if err != nil {
		return err
	}
	if err := b.fill(m, p, grant, write); err != nil {
		return err
	}
	var ticket *extentmap.Ticket
	for rank := range p.Map().Layout().Ranks() {
		if ticket, err = m.Commit(g, reserve, uint16(rank)); err != nil {
			return err
		}
	}
	<-ticket.Done()
	return ticket.Err()
}

// fill writes a slot's objects and trailers. However slow the drives are, nobody else has the slot before they are
// done.
func (b *storeBackend) fill(
	m *gpufile.Member, p *gpufile.Pool, grant gpufile.Grant, write func(FileWriter) error,
) error {
	done, err := m.HoldWrite(p, grant.Slot)
	if err != nil {
		return err
	}
	defer done()
	w, err := b.payload.CreateFile(p, grant)
	if err != nil {
		return err
	}
	defer w.Close()
	if err := write(w); err != nil {
		return err
	}
	if err := w.Finish(); err != nil {
		return err
	}
	return m.MarkWritten(p, grant.Slot)
}

// reserveOne leases one slot, waiting while space is being freed.
func reserveOne(
	m *gpufile.Member, g *gpufile.Group, tenant uint32, reserve uint64, item gpufile.ReserveItem,
) (gpufile.Grant, error) {
	var grants [1]gpufile.Grant
	items := []gpufile.ReserveItem{item}
	for pause, end := time.Millisecond, time.Now().Add(againMax); ; pause = min(2*pause, 100*time.Millisecond) {
		_, err := m.Reserve(g, tenant, reserve, items, false, grants[:])
		if errors.Is(err, gpufile.ErrAgain) && time.Now().Before(end) {
			time.Sleep(pause)
			continue
		}
		if err != nil {
			return gpufile.Grant{}, err
		}
		switch grants[0].Status {
		case gpufile.GrantNew:
			return grants[0], nil
		case gpufile.GrantExists:
			return gpufile.Grant{}, errExists
		case gpufile.GrantPending:
			return gpufile.Grant{}, gpufile.ErrPending
		}
		return gpufile.Grant{}, fmt.Errorf("fs: reserve answered status %d: %w", grants[0].Status, gpufile.ErrInvalid)
	}
}

package fs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

// fakePool is a pool in plain maps: the tree's rules are tested against it without a volume.
type fakePool struct {
	id     extentmap.PoolID
	name   string
	layout *stripe.Layout
	limit  int // files that fit, 0 for any number

	mu       sync.Mutex
	files    []*fakeFile // by slot
	byKey    map[gpufile.Key]uint32
	shards   [256][]uint32 // slots ever used by a key of the shard, ascending
	free     []uint32
	next     uint64
	tips     []uint32
	reported []uint32
}

type fakeFile struct {
	info    gpufile.FileInfo
	payload []byte
	doomed  bool
	damaged map[uint16]bool
	fault   bool // reading it panics
	readers int
}

var fakeStart = time.Unix(1_700_000_000, 0)

func newFakePool(t testing.TB, id extentmap.PoolID, name string, g stripe.Geometry) *fakePool {
	l, err := stripe.NewLayout(g, 4)
	require.NoError(t, err)
	return &fakePool{id: id, name: name, layout: l, byKey: make(map[gpufile.Key]uint32)}
}

// smallGeometry has objects of odd sizes, so that no request is aligned with them.
func smallGeometry() stripe.Geometry {
	g := stripe.Geometry{Objects: []stripe.Object{
		{Layer: 0, Rank: 0, Runs: []stripe.Run{{Kind: stripe.RunK, Bytes: 4096}, {Kind: stripe.RunV, Bytes: 4096}}},
		{Layer: 0, Rank: 1, Runs: []stripe.Run{{Kind: stripe.RunLatent, Bytes: 656 * 7}}},
		{Layer: 1, Rank: 0, Runs: []stripe.Run{{Kind: stripe.RunIndexer, Bytes: 132}}},
		{Layer: 1, Rank: 1, Runs: []stripe.Run{{Kind: stripe.RunScale, Bytes: 1}, {Kind: stripe.RunState,
			Bytes: 70_000}}},
		{Layer: 2, Rank: 0, Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 300_001}}},
	}}
	return g.WithTrailers()
}

func (p *fakePool) ID() extentmap.PoolID { return p.id }
func (p *fakePool) Name() string         { return p.name }
func (p *fakePool) Created() time.Time   { return fakeStart }
func (p *fakePool) Identity() gpufile.Identity {
	return gpufile.Identity{Model: p.name, BlockTokens: 16, FileTokens: 64}
}
func (p *fakePool) size() int64 { return p.layout.Geometry().FileBytes() }
func (p *fakePool) live(slot uint32) *fakeFile {
	if int(slot) < len(p.files) && p.files[slot] != nil && !p.files[slot].doomed {
		return p.files[slot]
	}
	return nil
}

// add commits a file.
func (p *fakePool) add(item gpufile.ReserveItem, tenant uint32, payload []byte) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.byKey[item.Key]; ok {
		return 0, errExists
	}
	if p.limit > 0 && len(p.byKey) >= p.limit {
		return 0, gpufile.ErrNoSpace
	}
	slot := uint32(len(p.files))
	if n := len(p.free); n > 0 {
		slot, p.free = p.free[n-1], p.free[:n-1]
	} else {
		p.files = append(p.files, nil)
	}
	p.next++
	p.files[slot] = &fakeFile{payload: payload, info: gpufile.FileInfo{
		Key: item.Key, Parent: item.Parent, Slot: slot, Tenant: tenant, Tokens: item.Tokens, Position: item.Position,
		Generation: p.next, Hits: 3, Pins: 1, CommitTime: fakeStart.UnixNano() + int64(p.next),
	}}
	p.byKey[item.Key] = slot
	s := &p.shards[item.Key[0]]
	at := sort.Search(len(*s), func(i int) bool { return (*s)[i] >= slot })
	if at == len(*s) || (*s)[at] != slot {
		*s = append(*s, 0)
		copy((*s)[at+1:], (*s)[at:])
		(*s)[at] = slot
	}
	if parent, ok := p.byKey[item.Parent]; ok {
		p.files[parent].info.Children++
	}
	return slot, nil
}

func (p *fakePool) Find(key *gpufile.Key) (uint32, uint64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	slot, ok := p.byKey[*key]
	if !ok {
		return 0, 0, false
	}
	return slot, p.files[slot].info.Generation, true
}

func (p *fakePool) match(slot uint32, generation uint64, bits int) *fakeFile {
	f := p.live(slot)
	if f == nil || (f.info.Generation^generation)&(1<<bits-1) != 0 {
		return nil
	}
	return f
}

func (p *fakePool) Stat(slot uint32, generation uint64, bits int) (gpufile.FileInfo, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.match(slot, generation, bits); f != nil {
		return f.info, true
	}
	return gpufile.FileInfo{}, false
}

func (f *fakeFile) entry() gpufile.ListEntry {
	return gpufile.ListEntry{Key: f.info.Key, Slot: f.info.Slot, Generation: f.info.Generation,
		CommitTime: f.info.CommitTime, LastHit: f.info.LastHit, Cookie: uint64(f.info.Slot) + 1}
}

func (p *fakePool) List(shard byte, cookie uint64, out []gpufile.ListEntry) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.shards[shard]
	for i := sort.Search(len(s), func(i int) bool { return uint64(s[i]) >= cookie }); i < len(s) && n < len(out); i++ {
		if f := p.live(s[i]); f != nil && f.info.Key[0] == shard {
			out[n] = f.entry()
			n++
		}
	}
	return n
}

func (p *fakePool) ListTips(cookie uint64, out []gpufile.ListEntry) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for slot := cookie; slot < uint64(len(p.files)) && n < len(out); slot++ {
		if f := p.live(uint32(slot)); f != nil && f.info.Children == 0 {
			out[n] = f.entry()
			n++
		}
	}
	return n
}

func (p *fakePool) Chain(key *gpufile.Key) (chain []gpufile.Key, complete, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := *key; ; {
		slot, found := p.byKey[k]
		if !found {
			break
		}
		chain = append([]gpufile.Key{k}, chain...)
		if k = p.files[slot].info.Parent; k == (gpufile.Key{}) {
			complete = true
			break
		}
	}
	return chain, complete, len(chain) > 0
}

// remove dooms a file. p.mu is held.
func (p *fakePool) remove(slot uint32) {
	f := p.files[slot]
	f.doomed = true
	delete(p.byKey, f.info.Key)
	if parent, ok := p.byKey[f.info.Parent]; ok {
		p.files[parent].info.Children--
	}
	p.reuse(slot)
}

func (p *fakePool) reuse(slot uint32) {
	if f := p.files[slot]; f.doomed && f.readers == 0 {
		p.files[slot] = nil
		p.free = append(p.free, slot)
	}
}

func (p *fakePool) Unlink(key *gpufile.Key) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	slot, ok := p.byKey[*key]
	if !ok {
		return gpufile.ErrNotFound
	}
	p.remove(slot)
	return nil
}

func (p *fakePool) EvictPrefix(key *gpufile.Key) (n int, err error) {
	chain, _, ok := p.Chain(key)
	if !ok {
		return 0, gpufile.ErrNotFound
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(chain) - 1; i >= 0; i-- {
		slot := p.byKey[chain[i]]
		if p.files[slot].info.Children > 0 {
			break
		}
		p.remove(slot)
		n++
	}
	return n, nil
}

func (p *fakePool) HoldRead(slot uint32, generation uint64, bits int) (gpufile.FileInfo, func(), bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.match(slot, generation, bits)
	if f == nil {
		return gpufile.FileInfo{}, nil, false
	}
	f.readers++
	return f.info, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		f.readers--
		p.reuse(slot)
	}, true
}

// fakeBackend is a store of fake pools.
type fakeBackend struct {
	list []*fakePool
	// gate, if set, is read before a file is stored.
	gate chan struct{}
}

func (b *fakeBackend) pools() (out []files) {
	for _, p := range b.list {
		out = append(out, p)
	}
	return out
}

func (b *fakeBackend) shape(f files) (*stripe.Layout, uint64, uint32) {
	l := f.(*fakePool).layout
	return l, l.SlotUnits() * stripe.UnitBytes, 64
}

func (b *fakeBackend) space() gpufile.Space {
	return gpufile.Space{TotalBytes: 1 << 30, UsedBytes: 1 << 28, FreeBytes: 3 << 28, AvailableBytes: 1 << 29,
		Files: 7, FilesMax: 100}
}

func (b *fakeBackend) extent(_ files, slot uint32, object uint16) (uint16, uint64, uint32, bool) {
	return object % 4, uint64(slot)*1000 + uint64(object), 3, true
}

func (b *fakeBackend) close() {}

func (b *fakeBackend) reportBad(f files, slot uint32, _ uint64) {
	p := f.(*fakePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reported = append(p.reported, slot)
}

type fakeReader struct {
	p *fakePool
	f *fakeFile
}

var errFakeDamage = errors.New("checksum differs")

func (b *fakeBackend) open(f files, info gpufile.FileInfo) (FileReader, error) {
	p := f.(*fakePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	return &fakeReader{p, p.files[info.Slot]}, nil
}

func (r *fakeReader) offset(object uint16) (off int64) {
	objects := r.p.layout.Geometry().Objects
	for i := range objects[:object] {
		off += int64(objects[i].Bytes())
	}
	return off
}

func (r *fakeReader) ReadObject(object uint16, buf []byte) error {
	for i := range buf[len(buf):cap(buf)] {
		buf[:cap(buf)][len(buf)+i] = 0xee // the rest of a unit is anybody's
	}
	r.p.mu.Lock()
	damaged, fault := r.f.damaged[object], r.f.fault
	r.p.mu.Unlock()
	if fault {
		panic("a fault")
	}
	copy(buf, r.f.payload[r.offset(object):])
	// The work of verifying is part of what is measured.
	if checksum.Sum(checksum.Seed{}, 0, object, buf) == 0 || damaged {
		return errFakeDamage
	}
	return nil
}

func (r *fakeReader) Checksum() (string, error) { return "fake 00ff", nil }
func (r *fakeReader) Close()                    {}

type fakeWriter struct {
	fakeReader
	mu      sync.Mutex
	written int64
}

func (w *fakeWriter) WriteObject(object uint16, payload []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written += int64(copy(w.f.payload[w.offset(object):], payload))
	return nil
}

func (w *fakeWriter) Finish() error {
	if w.written != w.p.size() {
		return fmt.Errorf("%d of %d bytes were written", w.written, w.p.size())
	}
	return nil
}

func (b *fakeBackend) store(
	f files, _, tenant uint32, item gpufile.ReserveItem, write func(FileWriter) error,
) error {
	p := f.(*fakePool)
	if b.gate != nil {
		<-b.gate
	}
	w := &fakeWriter{fakeReader: fakeReader{p, &fakeFile{payload: make([]byte, p.size())}}}
	if err := write(w); err != nil {
		return err
	}
	if err := w.Finish(); err != nil {
		return err
	}
	_, err := p.add(item, tenant, w.f.payload)
	return err
}

// testKey makes the i-th key of a shard; its bytes look like a hash.
func testKey(shard byte, i int) (k gpufile.Key) {
	var seed [32]byte
	seed[0] = shard
	binary.LittleEndian.PutUint64(seed[8:], uint64(i))
	r := rand.NewChaCha8(seed)
	r.Read(k[:])
	k[0] = shard
	return k
}

func testPayload(n int64, seed int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), 1})
	r.Read(b)
	return b
}

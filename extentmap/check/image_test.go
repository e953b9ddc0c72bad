package check_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

const (
	mib   = 1 << 20
	block = ondisk.BlockBytes
)

// findings is what a run reports.
type findings []check.Finding

// run checks images and returns the outcome.
func run(t testing.TB, drives []drive.Drive, o check.Options) (check.Result, findings, error) {
	t.Helper()
	var list findings
	o.Report = func(f check.Finding) { list = append(list, f) }
	result, err := check.Run(context.Background(), drives, o)
	return result, list, err
}

func (list findings) of(s check.Severity) (out findings) {
	for _, f := range list {
		if f.Severity == s {
			out = append(out, f)
		}
	}
	return out
}

// requireClean wants nothing but notes.
func requireClean(t testing.TB, drives []drive.Drive, o check.Options) check.Result {
	t.Helper()
	result, list, err := run(t, drives, o)
	require.NoError(t, err)
	require.Empty(t, list.of(check.Error))
	require.Empty(t, list.of(check.Warning))
	require.Zero(t, result.Errors)
	return result
}

func key(n uint64) (k ondisk.Key) {
	binary.LittleEndian.PutUint64(k[:], n)
	return sha256.Sum256(k[:8])
}

// builder fills a volume through the engine.
type builder struct {
	t   testing.TB
	set *maptest.Set
	v   *extentmap.Volume
	r   *rand.Rand
}

func geometry(t testing.TB, layers, ranks int) stripe.Geometry {
	g, err := stripe.KV{Layers: layers, KVHeads: 2, HeadDim: 64, DTypeBytes: 2, Tokens: 16, Ranks: ranks}.Geometry()
	require.NoError(t, err)
	return g
}

// newVolume formats and mounts a set of memory drives.
func newVolume(t testing.TB, sizes ...int64) *builder {
	set := maptest.NewSet(sizes...)
	random := rand.NewChaCha8([32]byte{1})
	_, err := extentmap.Format(set.Drives(), extentmap.FormatOptions{Label: "test", Random: random})
	require.NoError(t, err)
	b := &builder{t: t, set: set, r: rand.New(rand.NewPCG(1, 2))}
	b.mount()
	return b
}

func (b *builder) mount() {
	v, err := extentmap.OpenDrives(b.set.Drives(), extentmap.Options{})
	require.NoError(b.t, err)
	b.v = v
	b.t.Cleanup(v.Abandon)
}

func (b *builder) wait(ticket *extentmap.Ticket, err error) {
	b.t.Helper()
	require.NoError(b.t, err)
	require.NoError(b.t, ticket.Wait())
}

func (b *builder) pool(name string, layers, ranks int) *extentmap.Pool {
	p, ticket, err := b.v.CreatePool(extentmap.PoolSpec{
		Name: name, IdentityDigest: sha256.Sum256([]byte(name)), Identity: []byte(`{}`), Family: "hybrid",
		Geometry: geometry(b.t, layers, ranks), TokensPerFile: 16, ChecksumAlg: 1,
	})
	b.wait(ticket, err)
	return p
}

// write stores a file's payload and trailers.
func (b *builder) write(p *extentmap.Pool, slot uint32, r *ondisk.Record) {
	seed := checksum.NewPoolSeed(p.Spec().IdentityDigest, r.Tenant).Seed(&r.Key, r.Nonce, r.Generation)
	l := p.Layout()
	put := func(object uint16, payload []byte) {
		d, unit, _, ok := p.Extent(slot, object)
		require.True(b.t, ok)
		require.NoError(b.t, b.v.Drive(d).WriteAt(payload, int64(unit)*block))
	}
	for rank := range uint16(l.Ranks()) {
		var sums []uint64
		for _, o := range l.RankObjects(rank) {
			payload := make([]byte, l.ObjectBytes(o))
			for i := range payload {
				payload[i] = byte(b.r.Uint32())
			}
			sums = append(sums, checksum.Sum(seed, rank, o, payload))
			put(o, payload)
		}
		trailer := make([]byte, checksum.TrailerBytes(len(sums)))
		checksum.PutTrailer(trailer, seed, rank, l.TrailerObject(rank), sums)
		put(l.TrailerObject(rank), trailer)
	}
}

// chain commits n files that follow each other, and returns their slots.
func (b *builder) chain(p *extentmap.Pool, start uint64, n int) (slots []uint32) {
	parent := extentmap.NoSlot
	for i := range n {
		slot, ok := p.Alloc(parent)
		if !ok {
			b.wait(p.AddRow())
			slot, ok = p.Alloc(parent)
			require.True(b.t, ok)
		}
		nonce, generation := b.v.NextGeneration()
		r := &ondisk.Record{Key: key(start + uint64(i)), Nonce: nonce, Generation: generation, CommitTime: 1,
			Tokens:   16,
			Position: uint32(i), Owner: 1000, Tenant: 3}
		if i > 0 {
			r.Parent = key(start + uint64(i) - 1)
		}
		b.write(p, slot, r)
		tx := b.v.Begin()
		tx.Put(p, slot, r, 1<<len(b.set.Drives())-1)
		b.wait(tx.Submit(nil))
		p.Touch(slot, 1000)
		slots = append(slots, slot)
		parent = slot
	}
	return slots
}

func (b *builder) free(p *extentmap.Pool, slots ...uint32) {
	tx := b.v.Begin()
	for _, s := range slots {
		tx.Free(p, s)
	}
	b.wait(tx.Submit(nil))
}

// fill makes two pools of a family with chains, tails, freed slots and a file whose parent is gone. It returns the
// number of files.
func (b *builder) fill() int {
	b.wait(b.v.SetTenant(extentmap.Tenant{ID: 3, Name: "three", QuotaBytes: 1 << 40}))
	small, wide := b.pool("small", 2, 1), b.pool("wide", 3, 2)
	n := 0
	for i := range 5 {
		slots := b.chain(small, uint64(i*100), 12)
		b.free(small, slots[10], slots[11])
		n += 10
	}
	slots := b.chain(wide, 0, 40)
	b.free(wide, slots[0], slots[20])
	require.NoError(b.t, b.v.Checkpoint())
	b.chain(wide, 1000, 9)
	b.free(wide, slots[39])
	return n + 37 + 9
}

// usedImages are the images of a volume of three drives that was used and unmounted.
func usedImages(t testing.TB) [][]byte {
	b := newVolume(t, 5*mib, 4*mib, 4*mib)
	b.fill()
	require.NoError(t, b.v.Close())
	return b.set.Images()
}

func label(t testing.TB, image []byte) *ondisk.Label {
	l, err := ondisk.DecodeLabel(image[:block], 0)
	require.NoError(t, err)
	return l
}

// newest is the newest superblock of an image.
func newest(t testing.TB, image []byte) *ondisk.Superblock {
	l := label(t, image)
	var best *ondisk.Superblock
	for _, unit := range []uint64{1, 2} {
		s, err := ondisk.DecodeSuperblock(unitOf(image, unit), unit, l.Volume)
		if err == nil && (best == nil || s.Sequence > best.Sequence) {
			best = s
		}
	}
	require.NotNil(t, best)
	return best
}

func unitOf(image []byte, unit uint64) []byte { return image[unit*block : (unit+1)*block] }

// catalog is the stream that the newest superblock names.
func catalog(t testing.TB, image []byte) []byte {
	l, s := label(t, image), newest(t, image)
	first := l.Region.CatalogUnit + uint64(s.CatalogArea)*l.Region.CatalogBlocks
	var stream []byte
	for i := range s.CatalogBlocks {
		p, err := ondisk.OpenCatalog(unitOf(image, first+uint64(i)), first, i, ondisk.VolumeTag(l.Volume),
			s.CatalogSeq)
		require.NoError(t, err)
		stream = append(stream, p...)
	}
	return stream
}

// setCatalog writes another stream, with right checksums, and the superblock that names it.
func setCatalog(t testing.TB, images [][]byte, stream []byte) {
	l := label(t, images[0])
	for i, image := range images {
		if l.Metadata>>i&1 == 0 {
			continue
		}
		s := newest(t, image)
		first := l.Region.CatalogUnit + uint64(s.CatalogArea)*l.Region.CatalogBlocks
		s.CatalogBytes, s.CatalogCRC = uint64(len(stream)), ondisk.CRC(stream)
		s.CatalogBlocks = uint32(ondisk.StreamBlocks(len(stream)))
		for n := range s.CatalogBlocks {
			payload := stream[int(n)*ondisk.PayloadBytes:]
			payload = payload[:min(len(payload), ondisk.PayloadBytes)]
			ondisk.SealCatalog(unitOf(image, first+uint64(n)), first, n, ondisk.VolumeTag(l.Volume), s.CatalogSeq,
				payload)
		}
		s.Encode(unitOf(image, s.Unit))
	}
}

// parts collects the entries of a catalog.
type parts struct {
	pools    []ondisk.Pool
	families []ondisk.Family
	tenants  []ondisk.Tenant
	rows     []ondisk.Row
}

func (p *parts) Pool(e *ondisk.Pool) error     { p.pools = append(p.pools, *e); return nil }
func (p *parts) Family(e *ondisk.Family) error { p.families = append(p.families, *e); return nil }
func (p *parts) Tenant(e *ondisk.Tenant) error { p.tenants = append(p.tenants, *e); return nil }
func (p *parts) Row(e *ondisk.Row) error       { p.rows = append(p.rows, *e); return nil }
func (p *parts) Limits(*ondisk.Limits) error   { return fmt.Errorf("limits in a catalog") }
func (p *parts) DropRow(ondisk.DropRow) error  { return fmt.Errorf("a dropped row in a catalog") }
func (p *parts) Put(ondisk.Put) error          { return fmt.Errorf("a record in a catalog") }
func (p *parts) Free(ondisk.Free) error        { return fmt.Errorf("a freed slot in a catalog") }
func (p *parts) encode() (b []byte) {
	for i := range p.families {
		b = p.families[i].Append(b)
	}
	for i := range p.tenants {
		b = p.tenants[i].Append(b)
	}
	for i := range p.pools {
		b = p.pools[i].Append(b)
	}
	for i := range p.rows {
		b = p.rows[i].Append(b)
	}
	return b
}

func parse(t testing.TB, images [][]byte) *parts {
	p := &parts{}
	require.NoError(t, ondisk.VisitEntries(catalog(t, images[0]), p))
	return p
}

// rowFiles are the slots of a row of a pool that hold files, in order.
func rowFiles(t testing.TB, images [][]byte, r *ondisk.Row) (indexes []uint32) {
	at := r.Tables[0]
	b := unitOf(images[at.Drive()], at.Unit())
	for i := range ondisk.RecordsPerBlock {
		if ondisk.State(ondisk.BlockRecord(b, i)[ondisk.RecordStateOff]) == ondisk.StateCommitted {
			indexes = append(indexes, uint32(i))
		}
	}
	return indexes
}

// editRecord changes a record of the first block of a row's table, in both copies, with right checksums.
func editRecord(t testing.TB, images [][]byte, r *ondisk.Row, index uint32, change func(*ondisk.Record)) {
	tag := ondisk.VolumeTag(label(t, images[0]).Volume)
	id := ondisk.TableID{Pool: r.Pool, Row: r.Number}
	for _, at := range r.Tables {
		b := unitOf(images[at.Drive()], at.Unit())
		sequence, err := ondisk.OpenTable(b, at, tag, id)
		require.NoError(t, err)
		var rec ondisk.Record
		rec.Decode(ondisk.BlockRecord(b, int(index)))
		change(&rec)
		rec.Encode(ondisk.BlockRecord(b, int(index)))
		ondisk.SealTable(b, at, tag, sequence, id)
	}
}

func cloneImages(images [][]byte) [][]byte {
	out := make([][]byte, len(images))
	for i := range images {
		out[i] = append([]byte(nil), images[i]...)
	}
	return out
}

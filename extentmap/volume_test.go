package extentmap_test

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

const mib = 1 << 20

// smallGeometry has n objects of 4 KiB on one rank, and its trailer.
func smallGeometry(n int) stripe.Geometry {
	var g stripe.Geometry
	for i := range n {
		g.Objects = append(g.Objects, stripe.Object{Layer: uint16(i),
			Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 4096}}})
	}
	return g.WithTrailers()
}

func spec(name string, objects int) extentmap.PoolSpec {
	return extentmap.PoolSpec{
		Name: name, IdentityDigest: sha256.Sum256([]byte(name)), Identity: []byte(`{"model":"test"}`),
		Geometry: smallGeometry(objects), TokensPerFile: 16, ChecksumAlg: 1,
	}
}

func format(t testing.TB, drives []drive.Drive, o extentmap.FormatOptions) *extentmap.FormatPlan {
	t.Helper()
	p, err := extentmap.Format(drives, o)
	require.NoError(t, err)
	return p
}

func open(t testing.TB, drives []drive.Drive, o extentmap.Options) *extentmap.Volume {
	t.Helper()
	v, err := extentmap.OpenDrives(drives, o)
	require.NoError(t, err)
	t.Cleanup(v.Abandon)
	return v
}

// Pools that are created at once lie in the journal in the order that a mount asks for; who finds one on its way gets
// its ticket.
func TestPoolsCreatedAtOnce(t *testing.T) {
	drives := maptest.NewSet(256*mib, 256*mib).Drives()
	format(t, drives, extentmap.FormatOptions{})
	v := open(t, drives, extentmap.Options{})
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			_, ticket, err := v.CreatePool(spec(fmt.Sprint("p", i/2), 3))
			if assert.NoError(t, err) && assert.NotNil(t, ticket) {
				assert.NoError(t, ticket.Wait())
			}
		})
	}
	wg.Wait()
	v.Abandon()
	require.Len(t, open(t, drives, extentmap.Options{}).Pools(), 32)
}

func createPool(t testing.TB, v *extentmap.Volume, s extentmap.PoolSpec) *extentmap.Pool {
	t.Helper()
	p, ticket, err := v.CreatePool(s)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	return p
}

func addRow(t testing.TB, p *extentmap.Pool) {
	t.Helper()
	ticket, err := p.AddRow()
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
}

func key(n uint64) (k ondisk.Key) {
	binary.LittleEndian.PutUint64(k[:], n)
	return sha256.Sum256(k[:8])
}

func record(v *extentmap.Volume, n uint64) *ondisk.Record {
	nonce, generation := v.NextGeneration()
	return &ondisk.Record{Key: key(n), Parent: key(n - 1), Nonce: nonce, Generation: generation, CommitTime: int64(n),
		Tokens: 16, Position: uint32(n), Owner: 1000}
}

// readLabel decodes copy A of a drive's label.
func readLabel(t testing.TB, set *maptest.Set, drive int) *ondisk.Label {
	t.Helper()
	b := make([]byte, ondisk.BlockBytes)
	require.NoError(t, set.Drives()[drive].ReadAt(b, 0))
	l, err := ondisk.DecodeLabel(b, 0)
	require.NoError(t, err)
	return l
}

func put(t testing.TB, p *extentmap.Pool, v *extentmap.Volume, slot uint32, n uint64) {
	t.Helper()
	tx := v.Begin()
	tx.Put(p, slot, record(v, n), 0)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
}

func free(t testing.TB, p *extentmap.Pool, v *extentmap.Volume, slot uint32) {
	t.Helper()
	tx := v.Begin()
	tx.Free(p, slot)
	ticket, err := tx.Submit(nil)
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
}

func committed(p *extentmap.Pool) map[uint32]ondisk.Key {
	out := map[uint32]ondisk.Key{}
	p.Committed(func(slot uint32) { out[slot] = *p.RecordKey(slot) })
	return out
}

func TestLifeOfAVolume(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib, 8*mib, 8*mib)
	plan := format(t, set.Drives(), extentmap.FormatOptions{Label: "kv0"})
	require.Equal(t, 4, plan.Width)
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("llama", 3))
	again, ticket, err := v.CreatePool(spec("llama", 3))
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.Same(t, p, again)
	_, _, err = v.CreatePool(spec("llama", 4))
	require.ErrorIs(t, err, extentmap.ErrExists)

	_, ok := p.Alloc(extentmap.NoSlot)
	require.False(t, ok)
	addRow(t, p)
	require.Equal(t, p.SlotsPerRow(), p.Slots())
	n := p.SlotsPerRow()
	parent := extentmap.NoSlot
	for i := range n {
		slot, ok := p.Alloc(parent)
		require.True(t, ok)
		if parent != extentmap.NoSlot && i < n/2 {
			require.Equal(t, (parent%4+1)%4, slot%4, "a child takes the next residue")
		}
		put(t, p, v, slot, uint64(i)+1)
		parent = slot
	}
	f, fr, u := p.Counts()
	require.Equal(t, [3]uint32{0, 0, n}, [3]uint32{f, fr, u})
	p.Touch(5, 777)
	p.Touch(5, 778)
	want := committed(p)
	r5 := p.Record(5)
	require.Equal(t, uint32(778), r5.LastHit)
	require.Equal(t, uint32(2), r5.Hits)
	require.NoError(t, v.Close())
	require.ErrorIs(t, v.Close(), extentmap.ErrClosed)

	for _, ro := range []bool{true, false} {
		before := set.Images()
		v, err = extentmap.OpenDrives(set.Drives(), extentmap.Options{ReadOnly: ro})
		require.NoError(t, err)
		require.Len(t, v.Pools(), 1)
		p = v.Pools()[0]
		require.Equal(t, want, committed(p))
		require.Equal(t, r5, p.Record(5))
		require.Equal(t, "llama", p.Spec().Name)
		if ro {
			_, err := p.AddRow()
			require.ErrorIs(t, err, extentmap.ErrReadOnly)
			_, err = v.Begin().Submit(nil)
			require.ErrorIs(t, err, extentmap.ErrReadOnly)
			require.NoError(t, v.Close())
			require.Equal(t, before, set.Images(), "a read-only mount writes nothing")
		}
	}
	free(t, p, v, 7)
	v.Abandon()
	v = open(t, set.Drives(), extentmap.Options{})
	p = v.Pools()[0]
	delete(want, 7)
	require.Equal(t, want, committed(p))
	slot, ok := p.Alloc(extentmap.NoSlot)
	require.True(t, ok)
	require.Equal(t, uint32(7), slot)
}

package daemon

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

// payloadIdentity names the pool of these tests.
func payloadIdentity() gpufile.Identity {
	return gpufile.Identity{Model: "m", Revision: "r", WeightsEpoch: 1, DType: "bf16", Quantisation: "none",
		ScaleFormat: "none",
		Layout:      "NHD", PageBytes: 4096, BlockTokens: 16, FileTokens: 16, TP: 2, PP: 1, CP: 1, Group: "full"}
}

// oddGeometry has two ranks and objects that end within a unit, on its edge and behind several.
func oddGeometry() stripe.Geometry {
	g := stripe.Geometry{}
	for rank := range uint16(2) {
		for layer, bytes := range []uint32{1, 4096, 10_000} {
			g.Objects = append(g.Objects, stripe.Object{Layer: uint16(layer), Rank: rank,
				Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: bytes}}})
		}
	}
	return g.WithTrailers()
}

// stored is one committed file, and what it holds.
type stored struct {
	*world
	payload payload
	pool    *gpufile.Pool
	info    gpufile.FileInfo
	bytes   map[uint16][]byte
}

func newStored(t *testing.T) *stored {
	t.Helper()
	s := &stored{world: newWorld(t, gpufile.Options{}, ControlOptions{}), bytes: map[uint16][]byte{}}
	s.payload = newPayload(s.volume, time.Minute)
	pool, ticket, err := s.store.OpenPool(payloadIdentity(), extentmap.PoolSpec{Name: "p", Geometry: oddGeometry(),
		TokensPerFile: 16, ChecksumAlg: 1})
	require.NoError(t, err)
	wait(t, ticket)
	s.pool = pool
	m, err := s.store.NewSession(0)
	require.NoError(t, err)
	t.Cleanup(m.Close)
	group := s.store.GroupOfPool(pool.ID())
	item := gpufile.ReserveItem{Key: gpufile.Key{1}, Tokens: 16}
	grants := make([]gpufile.Grant, 1)
	require.Eventually(t, func() bool {
		_, err := m.Reserve(group, 0, 1, []gpufile.ReserveItem{item}, false, grants)
		if err != nil {
			require.ErrorIs(t, err, gpufile.ErrAgain, "until the pool's first row is durable")
		}
		return err == nil
	}, 10*time.Second, time.Millisecond)

	w, err := s.payload.CreateFile(pool, grants[0])
	require.NoError(t, err)
	defer w.Close()
	require.ErrorContains(t, w.Finish(), "6 objects were not written")
	objects := pool.Map().Layout().Geometry().Objects
	for o := range objects {
		if objects[o].IsTrailer() {
			require.Error(t, w.WriteObject(uint16(o), make([]byte, objects[o].Bytes())), "trailers are not for callers")
			continue
		}
		s.bytes[uint16(o)] = bytes.Repeat([]byte{byte(o + 1)}, int(objects[o].Bytes()))
		require.Error(t, w.WriteObject(uint16(o), append(s.bytes[uint16(o)], 0)), "too long")
		require.NoError(t, w.WriteObject(uint16(o), s.bytes[uint16(o)]))
	}
	require.NoError(t, w.Finish())
	require.NoError(t, m.MarkWritten(pool, grants[0].Slot))
	for rank := range uint16(2) {
		ticket, err := m.Commit(group, 1, rank)
		require.NoError(t, err)
		if rank == 1 {
			wait(t, ticket)
		}
	}
	slot, generation, ok := pool.Find(&item.Key)
	require.True(t, ok)
	s.info, ok = pool.Stat(slot, generation, 64)
	require.True(t, ok)
	return s
}

func wait(t *testing.T, ticket *extentmap.Ticket) {
	t.Helper()
	if ticket != nil {
		<-ticket.Done()
		require.NoError(t, ticket.Err())
	}
}

// unit returns the bytes of an object's first unit on its memory drive.
func (s *stored) unit(object uint16) []byte {
	index, unit, _, ok := s.pool.Map().Extent(s.info.Slot, object)
	require.True(s.t, ok)
	return s.volume.Drive(index).Bytes()[unit*stripe.UnitBytes:]
}

func TestPayloadRoundTrip(t *testing.T) {
	s := newStored(t)
	r, err := s.payload.OpenFile(s.pool, s.info)
	require.NoError(t, err)
	defer r.Close()
	for object, want := range s.bytes {
		got := make([]byte, len(want))
		require.NoError(t, r.ReadObject(object, got))
		require.Equal(t, want, got)
		require.Error(t, r.ReadObject(object, got[:len(got)-1]), "too short")
	}
	sum, err := r.Checksum()
	require.NoError(t, err)
	require.Regexp(t, "^sums-1:[0-9a-f]{32}$", sum)
	require.Equal(t, gpufile.Intact, s.payload.verify(s.pool, s.info.Slot, s.pool.Seed(&s.info)))
}

// Promise b: any damage is a miss and a counter, never bytes.
func TestPayloadDamage(t *testing.T) {
	s := newStored(t)
	layout := s.pool.Map().Layout()
	seed := s.pool.Seed(&s.info)
	for object := range uint16(layout.Objects()) {
		place := s.unit(object)
		place[0] ^= 0x80
		require.Equal(t, gpufile.Damaged, s.payload.verify(s.pool, s.info.Slot, seed), "object %d", object)
		r, err := s.payload.OpenFile(s.pool, s.info)
		require.NoError(t, err)
		o := &layout.Geometry().Objects[object]
		for other, want := range s.bytes {
			got := bytes.Repeat([]byte{0xee}, len(want))
			hurt := other == object || o.IsTrailer() && layout.Geometry().Objects[other].Rank == o.Rank
			if err := r.ReadObject(other, got); hurt {
				require.ErrorIs(t, err, errDamaged)
				require.Equal(t, make([]byte, len(want)), got, "nothing of it is handed out")
			} else {
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
		}
		place[0] ^= 0x80
	}
	seed[0]++
	require.Equal(t, gpufile.Damaged, s.payload.verify(s.pool, s.info.Slot, seed), "another generation's bytes")
	require.Equal(t, gpufile.Damaged, s.payload.verify(s.pool, 1<<30, seed), "a slot that no row backs")
}

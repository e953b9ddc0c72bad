package giotest

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// layerRig is a rig with memory for whole layers of some slots.
type layerRig struct {
	*Rig
	rank  uint16
	slots []gio.SlotIO
	parts [][]gio.IOCTX // by layer: the IOCTXs of [slot][object]
	a     *arena
	first []int // by layer: its first index in the arena
}

func newLayerRig(t *testing.T, s *Subject, w way, shape Shape, rank uint16) *layerRig {
	r := &layerRig{Rig: NewRig(t, s, shape), rank: rank}
	for _, slot := range r.Slots {
		var seed checksum.Seed
		binary.LittleEndian.PutUint32(seed[:], slot*7919+1)
		r.slots = append(r.slots, gio.SlotIO{Slot: slot, Seed: seed})
	}
	var ctxs []gio.IOCTX
	layout := r.Map.Layout()
	for layer := range layout.Layers() {
		r.first = append(r.first, len(ctxs))
		for _, slot := range r.slots {
			for _, object := range layout.LayerObjects(uint16(layer), rank) {
				ctxs = append(ctxs, gio.IOCTX{Slot: slot.Slot, Object: object})
			}
		}
	}
	r.a = w.memory(r.Rig, ctxs)
	return r
}

// desc is the descriptors of a layer.
func (r *layerRig) desc(layer int) []uint64 {
	end := len(r.a.ctxs)
	if layer+1 < len(r.first) {
		end = r.first[layer+1]
	}
	var desc []uint64
	for i := r.first[layer]; i < end; i++ {
		desc = append(desc, r.a.ctxs[i].Desc)
	}
	return desc
}

// move runs all layers, a few of them in flight together.
func (r *layerRig) move(verb func(layer uint16, desc []uint64) (gio.LayerTicket, error)) {
	r.t.Helper()
	var flying []gio.LayerTicket
	for layer := range r.first {
		ticket, err := verb(uint16(layer), r.desc(layer))
		require.NoError(r.t, err)
		if flying = append(flying, ticket); len(flying) == 3 {
			require.NoError(r.t, flying[0].Wait())
			flying = flying[1:]
		}
	}
	for _, ticket := range flying {
		require.NoError(r.t, ticket.Wait())
	}
}

func (r *layerRig) store(round uint64) {
	r.t.Helper()
	r.a.fill(round)
	l, err := r.Ring.CreateLayers(r.Map, r.rank, r.slots)
	require.NoError(r.t, err)
	defer l.Close()
	r.move(l.StoreLayer)
	require.NoError(r.t, l.Finish())
}

// retrieve restores everything and returns the slots' errors.
func (r *layerRig) retrieve() []error {
	r.t.Helper()
	r.a.set(0xee)
	l, err := r.Ring.OpenLayers(r.Map, r.rank, r.slots)
	require.NoError(r.t, err)
	defer l.Close()
	r.move(l.RetrieveLayer)
	return l.Failed()
}

// zeroed is the arena's indexes of slots with an error.
func (r *layerRig) zeroed(failed []error) map[int]bool {
	bad := map[uint32]bool{}
	for i, err := range failed {
		bad[r.slots[i].Slot] = err != nil
	}
	zero := map[int]bool{}
	for i := range r.a.ctxs {
		zero[i] = bad[r.a.ctxs[i].Slot]
	}
	return zero
}

// testLayers stores and restores whole files of every rank, several layers in flight.
func testLayers(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		shape := w.shape()
		shape.Rows, shape.Geometry = 3, Uneven(6, 2)
		for rank := range uint16(2) {
			r := newLayerRig(t, s, w, shape, rank)
			for round := uint64(1); round <= 2; round++ {
				r.store(round)
				r.a.onMedium(round)
				require.Equal(t, make([]error, len(r.slots)), r.retrieve())
				r.a.check(round, nil)
			}
		}
	})
}

// damage breaks what is stored of victim; other is a slot that stays whole (or, for swaps, shares the fate).
var damages = []struct {
	name string
	do   func(r *layerRig, victim, other uint32)
	both bool
}{
	{"bit flip", func(r *layerRig, victim, _ uint32) {
		payload, _ := r.Stored(victim, r.Map.Layout().LayerObjects(1, r.rank)[1])
		payload[len(payload)-1] ^= 0x10
	}, false},
	{"hole", func(r *layerRig, victim, _ uint32) {
		payload, _ := r.Stored(victim, r.Map.Layout().LayerObjects(2, r.rank)[0])
		clear(payload)
	}, false},
	{"damaged trailer", func(r *layerRig, victim, _ uint32) {
		payload, _ := r.Stored(victim, r.Map.Layout().TrailerObject(r.rank))
		payload[len(payload)/2] ^= 1
	}, false},
	{"swapped payloads", func(r *layerRig, victim, other uint32) {
		object := r.Map.Layout().LayerObjects(0, r.rank)[0]
		a, _ := r.Stored(victim, object)
		b, _ := r.Stored(other, object)
		c := bytes.Clone(a)
		copy(a, b)
		copy(b, c)
	}, true},
	{"whole file of another slot", func(r *layerRig, victim, other uint32) {
		for object := range r.Map.Layout().Objects() {
			a, _ := r.Stored(victim, uint16(object))
			b, _ := r.Stored(other, uint16(object))
			copy(a, b)
		}
	}, false},
}

// testLayerDamage: damage on the medium is a typed error of its slot alone; its targets are zero, the others' are
// right.
func testLayerDamage(t *testing.T, s *Subject) {
	for _, d := range damages {
		t.Run(d.name, func(t *testing.T) {
			eachWay(t, s, func(t *testing.T, w way) {
				r := newLayerRig(t, s, w, w.shape(), 0)
				r.store(1)
				d.do(r, r.slots[1].Slot, r.slots[2].Slot)
				failed := r.retrieve()
				for i, err := range failed {
					if i == 1 || i == 2 && d.both {
						require.ErrorIs(t, err, gio.ErrChecksum)
					} else {
						require.NoError(t, err)
					}
				}
				// Layers before the damage may have been handed over whole.
				last := r.first[len(r.first)-1]
				zero := r.zeroed(failed)
				r.a.pull()
				for i := range r.a.ctxs {
					if i >= last || !zero[i] {
						r.a.checkOne(i, 1, zero[i])
					}
				}
			})
		})
	}
}

// testLateTrailers: layers that are asked for while the trailers are on their way are verified like others, and a bad
// trailer is its slot's error alone.
func testLateTrailers(t *testing.T, s *Subject) {
	eachWay(t, s, func(t *testing.T, w way) {
		r := newLayerRig(t, s, w, w.shape(), 0)
		r.store(1)
		object := r.Map.Layout().TrailerObject(r.rank)
		for d := range r.Controllers {
			late, perUnit := map[uint64]bool{}, uint64(drive.UnitBytes/r.Shape.LBABytes)
			for _, slot := range r.slots {
				if at, unit, _ := r.extent(slot.Slot, object); int(at) == d {
					late[unit*perUnit] = true
				}
			}
			r.setFaults(d, func(e *nvme.SQE) *emu.Fault {
				if e.Opcode == nvme.IORead && late[uint64(e.CDW11)<<32|uint64(e.CDW10)] {
					return &emu.Fault{Delay: 20 * time.Millisecond}
				}
				return nil
			})
		}
		payload, _ := r.Stored(r.slots[1].Slot, object)
		payload[0] ^= 1
		r.a.set(0xee)
		l, err := r.Ring.OpenLayers(r.Map, r.rank, r.slots)
		require.NoError(t, err)
		defer l.Close()
		var flying []gio.LayerTicket
		for layer := range r.first {
			ticket, err := l.RetrieveLayer(uint16(layer), r.desc(layer))
			require.NoError(t, err)
			flying = append(flying, ticket)
		}
		failed := l.Failed()
		for i, err := range failed {
			if i == 1 {
				require.ErrorIs(t, err, gio.ErrChecksum)
			} else {
				require.NoError(t, err)
			}
		}
		for _, ticket := range flying {
			require.NoError(t, ticket.Wait())
		}
		require.Equal(t, failed, l.Failed())
		r.a.check(1, r.zeroed(failed))
	})
}

// testLayerMisuse: wrong arguments are refused as a whole, and nothing is called stored that was not.
func testLayerMisuse(t *testing.T, s *Subject) {
	w := s.main()
	r := newLayerRig(t, s, w, w.shape(), 0)
	_, err := r.Ring.OpenLayers(r.Map, 9, r.slots)
	require.ErrorIs(t, err, gio.ErrInvalid)
	_, err = r.Ring.OpenLayers(nil, 0, r.slots)
	require.ErrorIs(t, err, gio.ErrInvalid)
	l, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
	require.NoError(t, err)
	_, err = l.RetrieveLayer(0, r.desc(0))
	require.ErrorIs(t, err, gio.ErrInvalid)
	_, err = l.StoreLayer(0, r.desc(0)[1:])
	require.ErrorIs(t, err, gio.ErrInvalid)
	_, err = l.StoreLayer(stripe.TrailerLayer, r.desc(0))
	require.ErrorIs(t, err, gio.ErrInvalid)
	ticket, err := l.StoreLayer(0, r.desc(0))
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.ErrorIs(t, l.Finish(), gio.ErrIncomplete)
	l.Close()
	_, err = l.StoreLayer(1, r.desc(1))
	require.ErrorIs(t, err, gio.ErrClosed)
}

// testLayerTimeouts: failed commands fail their slots: on a read the targets are zero, on a store Finish says no.
func testLayerTimeouts(t *testing.T, s *Subject) {
	for _, f := range faults[:3] {
		t.Run(f.name, func(t *testing.T) {
			waysAtOnce(t, s, func(t *testing.T, w way) { f.runLayers(t, s, w) })
		})
	}
}

func (f *fault) runLayers(t *testing.T, s *Subject, w way) {
	shape := w.shape()
	shape.ChunkCommands, shape.Lanes = 2, 1
	if f.want == gio.ErrTimeout {
		shape.Deadline = 4 * short // a busy machine must not pass it where nothing is lost
	}
	r := newLayerRig(t, s, w, shape, 0)
	r.store(1)
	r.a.set(0xee)
	l, err := r.Ring.OpenLayers(r.Map, 0, r.slots)
	require.NoError(t, err)
	defer l.Close()
	var n atomic.Int32
	hook := func(*nvme.SQE) *emu.Fault {
		if n.Add(1) == 3 {
			hit := f.fault
			return &hit
		}
		return nil
	}
	r.SetFaults(hook)
	ticket, err := l.RetrieveLayer(0, r.desc(0))
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	perSlot := len(r.desc(0)) / len(r.slots)
	bad := 0
	r.a.pull()
	for i, err := range l.Failed() {
		for j := range perSlot {
			r.a.checkOne(i*perSlot+j, 1, err != nil)
		}
		if err != nil {
			require.ErrorIs(t, err, f.want)
			bad++
		}
	}
	require.Positive(t, bad)
	require.Less(t, bad, len(r.slots))

	// Slots that failed are left out of the next layer, and zeroed there as well.
	ticket, err = l.RetrieveLayer(1, r.desc(1))
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	r.a.pull()
	for i, err := range l.Failed() {
		for j := range perSlot {
			r.a.checkOne(r.first[1]+i*perSlot+j, 1, err != nil)
		}
	}

	n.Store(0)
	store, err := r.Ring.CreateLayers(r.Map, 0, r.slots)
	require.NoError(t, err)
	defer store.Close()
	r.a.fill(1)
	r.move(store.StoreLayer)
	require.ErrorIs(t, store.Finish(), f.want)
}

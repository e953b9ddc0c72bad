package extentmap_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
)

// TestEverythingAtOnce lets goroutines store, free, add and drop rows, checkpoint, resolve and look on, all at once. No
// slot may be handed out twice, and a mount after the crash must agree with what every goroutine knows.
func TestEverythingAtOnce(t *testing.T) {
	set := maptest.NewSet(8*mib, 8*mib, 8*mib)
	format(t, set.Drives(), extentmap.FormatOptions{JournalBytes: 64 << 10})
	discard := true
	v := open(t, set.Drives(), extentmap.Options{Discard: &discard})
	pools := []*extentmap.Pool{createPool(t, v, spec("a", 3)), createPool(t, v, spec("b", 20))}
	s := &stress{t: t, v: v}
	var stop atomic.Bool
	var onlookers, workers sync.WaitGroup
	for _, p := range pools {
		onlookers.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(p.ID())))
			for !stop.Load() {
				s.look(p, rng)
			}
		})
		for w := range 3 {
			workers.Go(func() { s.work(p, rand.New(rand.NewPCG(uint64(w), uint64(p.ID())))) })
		}
	}
	workers.Wait()
	stop.Store(true)
	onlookers.Wait()
	require.NoError(t, v.Err())
	rows := [][]extentmap.Row{pools[0].Rows(), pools[1].Rows()}
	v.Abandon()

	v = open(t, set.Drives(), extentmap.Options{})
	for i, p := range v.Pools() {
		want := map[uint32]uint64{}
		s.held.Range(func(k, n any) bool {
			if h := k.(heldSlot); h.pool == p.ID() {
				want[h.slot] = n.(uint64)
			}
			return true
		})
		got := committed(p)
		require.Len(t, got, len(want))
		for slot, n := range want {
			require.Equal(t, key(n), got[slot])
		}
		require.Equal(t, rows[i], p.Rows())
	}
	checkSpace(t, v)
}

type heldSlot struct {
	pool extentmap.PoolID
	slot uint32
}

type stress struct {
	t    *testing.T
	v    *extentmap.Volume
	held sync.Map // heldSlot to the number of its file
	next atomic.Uint64
}

// work stores and frees files of its own.
func (s *stress) work(p *extentmap.Pool, rng *rand.Rand) {
	mine := map[uint32]bool{}
	parent := extentmap.NoSlot
	for range 200 {
		tx := s.v.Begin()
		var stored, freed []uint32
		for range rng.IntN(6) {
			slot, ok := p.Alloc(parent)
			if !ok {
				s.grow(p)
				break
			}
			n := s.next.Add(1)
			_, taken := s.held.Swap(heldSlot{p.ID(), slot}, n)
			if taken {
				s.t.Errorf("slot %d handed out twice", slot)
			}
			tx.Put(p, slot, record(s.v, n), 0)
			stored, parent = append(stored, slot), slot
		}
		for slot := range mine {
			if rng.IntN(4) == 0 {
				s.held.Delete(heldSlot{p.ID(), slot})
				delete(mine, slot)
				tx.Free(p, slot)
				freed = append(freed, slot)
			}
		}
		ticket, err := tx.Submit(nil)
		if err == nil {
			err = ticket.Wait()
		}
		if err != nil {
			s.t.Errorf("commit of %d, freeing of %d: %v", len(stored), len(freed), err)
			return
		}
		for _, slot := range stored {
			mine[slot] = true
			p.Touch(slot, 1)
		}
	}
}

func (s *stress) grow(p *extentmap.Pool) {
	ticket, err := p.AddRow()
	if err == nil {
		err = ticket.Wait()
	}
	if err != nil && !errors.Is(err, extentmap.ErrNoSpace) && !errors.Is(err, extentmap.ErrAgain) {
		s.t.Errorf("add row: %v", err)
	}
}

// look does what only reads, and drops empty rows.
func (s *stress) look(p *extentmap.Pool, rng *rand.Rand) {
	for _, r := range p.Rows() {
		slot := r.Number*p.SlotsPerRow() + rng.Uint32N(p.SlotsPerRow())
		d, unit, _, ok := p.Extent(slot, 1)
		if q, got, object, _, found := s.v.Resolve(d, unit); ok && found && q == p && (got != slot || object != 1) {
			s.t.Errorf("slot %d of pool %d is found as slot %d, object %d", slot, p.ID(), got, object)
		}
		if rng.IntN(50) == 0 {
			if ticket, err := p.DropRow(r.Number); err == nil {
				if err := ticket.Wait(); err != nil {
					s.t.Errorf("drop row: %v", err)
				}
			}
		}
	}
	if free, freeing, used := p.Counts(); free+freeing+used > 1<<20 {
		s.t.Errorf("counts are %d, %d, %d", free, freeing, used)
	}
	p.Capacity()
	s.v.Info()
	if rng.IntN(20) == 0 {
		if err := s.v.Checkpoint(); err != nil {
			s.t.Errorf("checkpoint: %v", err)
		}
	}
}

package extentmap_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// state is the durable content of a volume as text: pools, rows, committed slots, tenants.
func state(v *extentmap.Volume) string {
	var b strings.Builder
	for _, t := range v.Tenants() {
		fmt.Fprintf(&b, "tenant %d %s %d\n", t.ID, t.Name, t.QuotaBytes)
	}
	for _, p := range v.Pools() {
		s := p.Spec()
		fmt.Fprintf(&b, "pool %d %s %s %d %d\n", p.ID(), s.Name, s.Family, s.MinBytes, s.MaxBytes)
		for _, r := range p.Rows() {
			fmt.Fprintf(&b, "row %d %v %v\n", r.Number, r.Drives, r.Units)
		}
		set := committed(p)
		var slots []int
		for s := range set {
			slots = append(slots, int(s))
		}
		sort.Ints(slots)
		for _, s := range slots {
			r := p.Record(uint32(s))
			fmt.Fprintf(&b, "slot %d %x %d\n", s, r.Key[:6], r.Sequence)
		}
	}
	return b.String()
}

// crashWorkload changes a volume in every way, one durable step after another. states[i] is what step i left, and mark
// i in the log says that it was acknowledged.
type crashWorkload struct {
	t      *testing.T
	v      *extentmap.Volume
	set    *maptest.Set
	rng    *rand.Rand
	states []string
	n      uint64
}

func (w *crashWorkload) step(f func() (*extentmap.Ticket, error)) bool {
	ticket, err := f()
	if errors.Is(err, extentmap.ErrAgain) || errors.Is(err, extentmap.ErrNoSpace) {
		return false
	}
	require.NoError(w.t, err)
	require.NoError(w.t, ticket.Wait())
	w.states = append(w.states, state(w.v))
	w.set.Mark(len(w.states) - 1)
	return true
}

func (w *crashWorkload) run(steps int) {
	var pools []*extentmap.Pool
	for i, name := range []string{"a", "b"} {
		s := spec(name, 3+7*i)
		s.Family = "hybrid"
		w.step(func() (*extentmap.Ticket, error) {
			p, ticket, err := w.v.CreatePool(s)
			pools = append(pools, p)
			return ticket, err
		})
		w.n += 1000
	}
	for range steps {
		p := pools[w.rng.IntN(len(pools))]
		switch x := w.rng.IntN(20); {
		case x < 9:
			w.step(func() (*extentmap.Ticket, error) { return w.puts(p) })
		case x < 13:
			w.step(func() (*extentmap.Ticket, error) { return w.frees(pools) })
		case x < 15:
			w.step(func() (*extentmap.Ticket, error) { return p.AddRow() })
		case x == 15:
			w.step(func() (*extentmap.Ticket, error) {
				return w.v.SetTenant(extentmap.Tenant{ID: uint32(w.rng.IntN(3)), Name: fmt.Sprint("t", w.n),
					QuotaBytes: w.n})
			})
		case x == 16:
			w.step(func() (*extentmap.Ticket, error) { return w.v.SetPoolLimits(p.ID(), 0, 1<<30+w.n, 0) })
		case x == 17:
			require.NoError(w.t, w.v.Checkpoint())
		default:
			if rows := p.Rows(); len(rows) > 0 {
				w.emptyRow(p, rows[w.rng.IntN(len(rows))].Number)
			}
		}
		w.n++
	}
}

// puts commits up to five files of a pool in one transaction.
func (w *crashWorkload) puts(p *extentmap.Pool) (*extentmap.Ticket, error) {
	tx := w.v.Begin()
	for range 1 + w.rng.IntN(5) {
		slot, ok := p.Alloc(extentmap.NoSlot)
		if !ok {
			break
		}
		w.n++
		tx.Put(p, slot, record(w.v, w.n), 0)
	}
	return tx.Submit(nil)
}

// frees frees a few files of both pools in one transaction.
func (w *crashWorkload) frees(pools []*extentmap.Pool) (*extentmap.Ticket, error) {
	tx := w.v.Begin()
	for _, p := range pools {
		for slot := range committed(p) {
			if w.rng.IntN(4) == 0 {
				tx.Free(p, slot)
			}
		}
	}
	return tx.Submit(nil)
}

// emptyRow frees a row's files and drops it.
func (w *crashWorkload) emptyRow(p *extentmap.Pool, number uint32) {
	w.step(func() (*extentmap.Ticket, error) {
		tx := w.v.Begin()
		for slot := range committed(p) {
			if slot/p.SlotsPerRow() == number {
				tx.Free(p, slot)
			}
		}
		return tx.Submit(nil)
	})
	// Dropping is journaled before the ticket is done, and no other step runs meanwhile.
	w.step(func() (*extentmap.Ticket, error) { return p.DropRow(number) })
}

// TestCrashAtAnyWrite cuts the power after every operation of a workload and mounts what is left: the state must be
// that of a step that was acknowledged last, or of the one in flight.
func TestCrashAtAnyWrite(t *testing.T) {
	shapes := [][]int64{{4 * mib, 4 * mib}, {4 * mib}, {4 * mib, 5 * mib, 4 * mib}}
	for i, sizes := range shapes {
		t.Run(fmt.Sprint(len(sizes), " drives"), func(t *testing.T) {
			steps, every := 60, 1
			if testing.Short() {
				steps, every = 30, 5
			}
			// Sixteen journal blocks: the ring wraps, and checkpoints are forced.
			set := maptest.NewSet(sizes...)
			format(t, set.Drives(), extentmap.FormatOptions{JournalBytes: 64 << 10})
			crashTest(t, set.Snapshot(), steps, every, uint64(i), 1)
		})
	}
}

// crashTest works on what images hold, which may itself be what a crash left, and cuts. Of some cuts it goes on
// depth levels deeper, so that what one crash left unused in the journal could come to life after the next.
func crashTest(t *testing.T, images []*maptest.Image, steps, every int, seed uint64, depth int) {
	set := maptest.FromImages(images)
	before := set.Snapshot()
	set.Record()
	discard := true
	v := open(t, set.Drives(), extentmap.Options{Discard: &discard})
	w := &crashWorkload{t: t, v: v, set: set, rng: rand.New(rand.NewPCG(seed, 7))}
	w.states = []string{state(v)}
	set.Mark(0)
	w.run(steps)
	require.NoError(t, v.Close())

	cutter := maptest.NewCutter(before, set.Log(), seed)
	cuts := 0
	for n := 0; ; n++ {
		op, more := cutter.Step()
		if !more {
			break
		}
		if op.Kind == maptest.Mark || n%every != 0 {
			continue
		}
		cuts++
		acked := 0
		if m := cutter.Marks(); len(m) > 0 {
			acked = m[len(m)-1]
		}
		image := cutter.Cut()
		if depth > 0 && cuts%100 == 0 {
			crashTest(t, maptest.Clone(image), 6, 2, seed+uint64(n), depth-1)
		}
		checkCut(t, image, w.states, acked, n)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d cuts of %d steps", cuts, len(w.states))
}

// checkCut mounts an image read-only, then read-write, cuts the recovering mount too, and mounts once more.
func checkCut(t *testing.T, image []*maptest.Image, states []string, acked, n int) {
	legal := func(got string) bool {
		return got == states[acked] || acked+1 < len(states) && got == states[acked+1]
	}
	set := maptest.FromImages(image)
	ro, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{ReadOnly: true})
	require.NoErrorf(t, err, "cut at operation %d", n)
	first := state(ro)
	require.Zero(t, ro.Info().DamagedBlocks)
	ro.Abandon()
	require.Truef(t, legal(first), "cut at operation %d after step %d: state is\n%s\nlegal are\n%s\nand the next", n,
		acked, first, states[acked])

	base := set.Snapshot()
	set.Record()
	v, err := extentmap.OpenDrives(set.Drives(), extentmap.Options{})
	require.NoErrorf(t, err, "cut at operation %d", n)
	require.Equal(t, first, state(v), "read-only and read-write mounts agree")
	checkSpace(t, v)
	v.Abandon()

	again := maptest.NewCutter(base, set.Log(), uint64(n))
	stop := n % (len(set.Log()) + 1)
	for range stop {
		again.Step()
	}
	v, err = extentmap.OpenDrives(maptest.FromImages(again.Cut()).Drives(), extentmap.Options{})
	require.NoErrorf(t, err, "cut at operation %d, mount cut at %d", n, stop)
	require.Equal(t, first, state(v), "a cut mount changes nothing")
	v.Abandon()
}

// checkSpace makes sure that what is not committed can be allocated, once, and that no two rows share a segment.
func checkSpace(t *testing.T, v *extentmap.Volume) {
	type segment struct {
		drive uint16
		unit  uint64
	}
	seen := map[segment]bool{}
	for _, p := range v.Pools() {
		rows := p.Rows()
		for _, r := range rows {
			for i := range r.Drives {
				s := segment{r.Drives[i], r.Units[i]}
				require.False(t, seen[s], "two rows share a segment")
				seen[s] = true
			}
		}
		used := committed(p)
		total := uint32(len(rows)) * p.SlotsPerRow()
		for range total - uint32(len(used)) {
			slot, ok := p.Alloc(extentmap.NoSlot)
			require.True(t, ok)
			_, taken := used[slot]
			require.False(t, taken, "slot %d handed out twice", slot)
			used[slot] = ondisk.Key{}
		}
		_, ok := p.Alloc(extentmap.NoSlot)
		require.False(t, ok)
	}
}

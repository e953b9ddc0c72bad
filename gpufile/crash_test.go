package gpufile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// crashCuts is how many distinct cuts TestCrashPoints plays at least; TUTTIFS_CRASH_CUTS asks for more.
const crashCuts = 10_000

// TestCrashPoints (invariants a, b, e, f) cuts the power at every operation of workloads that do everything that a
// mount does, with what was not flushed lost in any combination and torn. Each time a mount must find exactly the files
// that were acknowledged, or what the operations in flight may have left; every byte of every file must verify; all
// slots must be accounted for; and the checker must find nothing.
func TestCrashPoints(t *testing.T) {
	want := uint64(crashCuts)
	if s := os.Getenv("TUTTIFS_CRASH_CUTS"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
		want = n
	} else if testing.Short() || raceDetector {
		want /= 20 // make test plays all of them without the detector
	}
	var seeds, cuts, checked atomic.Uint64
	var mu sync.Mutex
	done := map[string]int{}
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), 4) {
		workers.Go(func() {
			for cuts.Load() < want && !t.Failed() {
				seed := seeds.Add(1)
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
					c := playCrash(t, seed, func() bool { return cuts.Add(1) < want })
					checked.Add(c.checked)
					t.Logf("%d distinct cuts so far", cuts.Load())
					mu.Lock()
					defer mu.Unlock()
					for what, n := range c.w.done {
						done[what] += n
					}
				})
			}
		})
	}
	workers.Wait()
	t.Logf("%d distinct cuts in %d workloads, %d comparisons with what was acknowledged", cuts.Load(), seeds.Load(),
		checked.Load())
	for _, what := range slices.Sorted(maps.Keys(done)) {
		t.Logf("%8d %s", done[what], what)
	}
	require.GreaterOrEqual(t, cuts.Load(), want)
}

// TestCrashUnseen holds the harness to its word: what the store does behind the last look at its files is not judged.
// It evicts by itself when a pool wants a row of another, and may do so while a workload ends.
func TestCrashUnseen(t *testing.T) {
	c := playCuts(t, 1, func(w *crashWorld) {
		w.begin()
		for w.done["store"] < 3 {
			w.store()
		}
		w.look()
		for _, p := range w.s.Pools() {
			_, err := p.EvictCount(len(w.files))
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				_, freeing, used := p.m.Counts()
				return freeing+used == 0
			}, 10*time.Second, time.Millisecond)
		}
		w.kill()
		require.Less(t, len(w.log()), len(w.set.Log()))
	}, func() bool { return true })
	require.NotZero(t, c.must[0])
}

// crashCheck judges images against a workload's notes.
type crashCheck struct {
	t       *testing.T
	w       *crashWorld
	states  map[uint64][]uint64 // by image: the files that a mount finds, a bit each
	older   map[uint64][]uint64
	must    []uint64
	may     []uint64
	next    int // change
	played  int
	checked uint64
	sums    map[uint64][]*[ondisk.BlockBytes]byte // by generation: pages that verified
}

// playCrash runs a workload and cuts it everywhere. more says, at each new image, whether to go on.
func playCrash(t *testing.T, seed uint64, more func() bool) *crashCheck {
	return playCuts(t, seed, (*crashWorld).run, more)
}

func playCuts(t *testing.T, seed uint64, run func(*crashWorld), more func() bool) *crashCheck {
	w := newCrashWorld(t, seed)
	before := w.set.Snapshot()
	w.set.Record()
	run(w)
	slices.SortStableFunc(w.changes, func(a, b change) int { return cmp.Compare(a.mark, b.mark) })
	words := (len(w.files) + 63) / 64
	c := &crashCheck{t: t, w: w, states: map[uint64][]uint64{}, must: make([]uint64, words), may: make([]uint64, words),
		sums: map[uint64][]*[ondisk.BlockBytes]byte{}}
	cuts := maptest.NewCuts(before, w.log(), seed)
	mark := 0
	for going := true; going && cuts.Next(); {
		acknowledged := cuts.Mark() != mark
		mark = cuts.Mark()
		c.advance(mark)
		cuts.Each(acknowledged, func(hash uint64, images []*maptest.Image) bool {
			state, known := c.known(hash)
			if !known {
				state = c.mount(images, mark)
				c.states[hash] = state
				going = more()
			}
			c.checked++
			c.judge(state, mark)
			return going && !t.Failed()
		})
		going = going && !t.Failed()
	}
	return c
}

// known finds a recent image's state. Images come again soon or never.
func (c *crashCheck) known(hash uint64) ([]uint64, bool) {
	if s, ok := c.states[hash]; ok {
		return s, true
	}
	if s, ok := c.older[hash]; ok {
		c.states[hash] = s
		return s, true
	}
	if len(c.states) > 1<<14 {
		c.states, c.older = map[uint64][]uint64{}, c.states
	}
	return nil, false
}

// advance brings must and may to a mark.
func (c *crashCheck) advance(mark int) {
	for ; c.next < len(c.w.changes) && c.w.changes[c.next].mark <= mark; c.next++ {
		x := c.w.changes[c.next]
		word, bit := x.file/64, uint64(1)<<(x.file%64)
		c.must[word] &^= bit
		c.may[word] |= bit
		switch x.to {
		case present:
			c.must[word] |= bit
		case absent:
			c.may[word] &^= bit
		}
	}
}

func (c *crashCheck) judge(state []uint64, mark int) {
	for i := range state {
		lost, risen := c.must[i]&^state[i], state[i]&^c.may[i]
		if lost|risen == 0 {
			continue
		}
		for f := i * 64; f < min(len(c.w.files), i*64+64); f++ {
			if (lost|risen)>>(f%64)&1 != 0 {
				x := &c.w.files[f]
				c.t.Errorf("cut at mark %d: file %d (pool %d, slot %d, generation %x): acknowledged %v, there %v, may be %v",
					mark, f, x.poolID, x.slot, x.generation, c.must[i]>>(f%64)&1 != 0, state[i]>>(f%64)&1 != 0,
					c.may[i]>>(f%64)&1 != 0)
			}
		}
		return
	}
}

// mount looks at an image in all ways and returns the files that are there.
func (c *crashCheck) mount(images []*maptest.Image, mark int) []uint64 {
	o := crashOptions()
	o.ReadOnly = true
	drives := maptest.FromImages(images).Drives()
	v, err := extentmap.OpenDrives(labelled(drives), o)
	require.NoError(c.t, err, "cut at mark %d", mark)
	state := c.read(v, images, mark)
	c.count(v, mark)
	v.Abandon()
	c.check(labelled(drives), mark)
	c.played++
	if c.played%16 == 0 {
		c.recover(images, state, mark)
	}
	if lost := c.w.lostAt(mark); lost >= 0 && c.played%4 == 1 {
		c.without(images, lost, state, mark)
	}
	return state
}

func (w *crashWorld) lostAt(mark int) int {
	if mark < len(w.lost) {
		return w.lost[mark]
	}
	return -1
}

// read collects the files of a mount, and verifies each that can be read.
func (c *crashCheck) read(v *extentmap.Volume, images []*maptest.Image, mark int) []uint64 {
	state := make([]uint64, len(c.must))
	require.Zero(c.t, v.Info().DamagedBlocks, "cut at mark %d", mark)
	for _, p := range v.Pools() {
		digest := p.Spec().IdentityDigest
		p.Committed(func(slot uint32) {
			r := p.Record(slot)
			f, known := c.w.byGen[r.Generation]
			require.True(c.t, known && c.w.files[f].key == r.Key && c.w.files[f].poolID == p.ID() &&
				c.w.files[f].slot == slot, "cut at mark %d: pool %d slot %d holds a record that nobody wrote", mark, p.ID(), slot)
			state[f/64] |= 1 << (f % 64)
			if p.Available(slot) {
				seed := checksum.NewPoolSeed(digest, r.Tenant).Seed(&r.Key, r.Nonce, r.Generation)
				c.verify(p, slot, r.Generation, seed, images, mark)
			}
		})
	}
	return state
}

// verify reads a file's objects, one page each, unless these pages are known to be right.
func (c *crashCheck) verify(p *extentmap.Pool, slot uint32, generation uint64, seed checksum.Seed,
	images []*maptest.Image, mark int,
) {
	l := p.Layout()
	n := l.Objects()
	var room [8]*[ondisk.BlockBytes]byte
	pages := room[:0]
	for o := range n {
		d, unit, _, ok := p.Extent(slot, uint16(o))
		require.True(c.t, ok)
		pages = append(pages, images[d].Page(int64(unit)))
	}
	if slices.Equal(pages, c.sums[generation]) {
		return
	}
	sums := make([]uint64, len(l.RankObjects(0)))
	trailer := pages[l.TrailerObject(0)]
	good := trailer != nil && checksum.ParseTrailer(trailer[:], seed, 0, l.TrailerObject(0), sums)
	for i, o := range l.RankObjects(0) {
		good = good && pages[o] != nil && checksum.Sum(seed, 0, o, pages[o][:]) == sums[i]
	}
	if !good {
		c.t.Errorf("cut at mark %d: pool %d slot %d: a committed file does not verify", mark, p.ID(), slot)
	}
	c.sums[generation] = slices.Clone(pages)
}

// count wants every slot to be committed or free.
func (c *crashCheck) count(v *extentmap.Volume, mark int) {
	for _, p := range v.Pools() {
		rows, committed := uint32(0), uint32(0)
		for _, r := range p.Rows() {
			if !r.Away {
				rows++
			}
		}
		p.Committed(func(slot uint32) {
			if p.Available(slot) {
				committed++
			}
		})
		free, freeing, used := p.Counts()
		require.Equal(c.t, [3]uint32{rows*p.SlotsPerRow() - committed, 0, committed}, [3]uint32{free, freeing, used},
			"cut at mark %d: pool %d: slots are leaked", mark, p.ID())
	}
}

// check runs the checker.
func (c *crashCheck) check(drives []drive.Drive, mark int) {
	var findings []string
	r, err := check.Run(context.Background(), drives, check.Options{Report: func(f check.Finding) {
		if f.Severity == check.Error {
			findings = append(findings, f.String())
		}
	}})
	require.NoError(c.t, err, "cut at mark %d", mark)
	require.Zero(c.t, r.Errors, "cut at mark %d: %q", mark, findings)
}

// recover mounts for writing, and cuts that as well.
func (c *crashCheck) recover(images []*maptest.Image, state []uint64, mark int) {
	set := maptest.FromImages(images)
	before := set.Snapshot()
	set.Record()
	v, err := extentmap.OpenDrives(labelled(set.Drives()), crashOptions())
	require.NoError(c.t, err, "cut at mark %d", mark)
	require.Equal(c.t, state, c.read(v, set.Snapshot(), mark), "cut at mark %d: mounts differ", mark)
	require.False(c.t, v.Info().Degraded)
	c.count(v, mark)
	if c.played%512 == 0 {
		s, err := Open(v, Options{})
		require.NoError(c.t, err)
		for _, p := range s.Pools() {
			checkPool(c.t, p)
		}
		s.Close()
	}
	log := set.Log()
	v.Abandon()
	c.check(labelled(set.Drives()), mark)
	cuts := maptest.NewCuts(before, log, uint64(c.played))
	cuts.Bound, cuts.Random = 0, 1
	for range 1 + c.played%max(len(log), 1) {
		cuts.Next()
	}
	cuts.Each(true, func(_ uint64, again []*maptest.Image) bool {
		o := crashOptions()
		o.ReadOnly = c.played%32 == 0
		drives := maptest.FromImages(again).Drives()
		v, err := extentmap.OpenDrives(labelled(drives), o)
		require.NoError(c.t, err, "cut at mark %d, and its recovery", mark)
		if c.played%512 != 0 { // the store has freed what it found twice
			require.Equal(c.t, state, c.read(v, again, mark), "cut at mark %d: a mount that was cut changes nothing", mark)
		}
		v.Abandon()
		return !c.t.Failed()
	})
}

// without mounts what is left when the drive that was lost is taken out, unless it is coming back: then it counts.
func (c *crashCheck) without(images []*maptest.Image, lost int, state []uint64, mark int) {
	drives := maptest.FromImages(images).Drives()
	if newest := newestLabel(drives); newest.Holders>>lost&1 != 0 {
		return
	}
	drives = labelled(slices.Delete(drives, lost, lost+1))
	o := crashOptions()
	o.Degraded = true
	v, err := extentmap.OpenDrives(drives, o)
	if errors.Is(err, extentmap.ErrMissing) && len(drives) < 2 {
		return
	}
	require.NoError(c.t, err, "cut at mark %d, without drive %d", mark, lost)
	require.Equal(c.t, state, c.read(v, images, mark), "cut at mark %d, without drive %d", mark, lost)
	c.count(v, mark)
	v.Abandon()
}

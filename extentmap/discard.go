package extentmap

import (
	"errors"
	"slices"
	"sort"
	"sync"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	// discardQueueMax bounds the slots that wait for their discard. Discards are advice to the drive: beyond the bound
	// slots are handed out again without.
	discardQueueMax = 1 << 14
	// discardGather is how long freed slots wait for others to go with them, and discardSlots how many are enough, and go
	// together.
	discardGather = 200 * time.Millisecond
	discardSlots  = 256
	// discardUnits bounds what one command is about, so that none keeps a drive for long.
	discardUnits = 1 << 30 / ondisk.BlockBytes
)

// discarder tells the drives what freed slots no longer hold, in the background: many slots at a time, whose neighbours
// are joined, and many ranges a command where the drive takes that. A slot comes here when its freeing is durable, and
// with that no lease on it is left; it is allocatable only when the discard has ended, so that a late one never meets
// new bytes. Whoever needs slots at once is given those that still wait, without: they are written anew, which tells
// the drive as much. Where none wait, those that are being discarded end with the command that is under way. A crash
// loses what was waiting; nothing depends on it.
type discarder struct {
	v      *Volume
	on     [ondisk.MaxDrives]bool
	any    bool
	mu     sync.Mutex
	cond   *sync.Cond
	wait   []pending
	n      int  // slots in wait
	due    bool // what waits has waited long enough
	timing bool
	stop   bool
	hurry  bool      // somebody needs the slots that fly
	round  []pending // what is being discarded
	flying int       // slots in commands, or past commands that were given up
	counts [ondisk.MaxDrives]DiscardCounts
	spared uint64
}

// DiscardCounts are what one drive was told since the mount.
type DiscardCounts struct {
	Commands uint64 // one for each range where the drive takes no more
	Ranges   uint64
	Bytes    uint64
	Failed   uint64 // commands
}

type pending struct {
	pool  *Pool
	slots []uint32
}

func newDiscarder(v *Volume) *discarder {
	d := &discarder{v: v}
	d.cond = sync.NewCond(&d.mu)
	for _, m := range v.members {
		d.admit(m)
	}
	return d
}

// admit decides whether a drive is told about freed slots.
func (d *discarder) admit(m *member) {
	if m.dev == nil {
		return
	}
	on := m.dev.Kind() == drive.Block || m.dev.Kind() == drive.NVMe
	if d.v.o.Discard != nil {
		on = *d.v.o.Discard
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.on[m.index] = on
	d.any = d.any || on
}

// add queues slots; false means that the caller frees them itself, at once.
func (d *discarder) add(p *Pool, slots []uint32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.any || d.stop || d.n+d.flying+len(slots) > discardQueueMax {
		d.spare(len(slots))
		return false
	}
	d.wait = append(d.wait, pending{p, slots})
	d.n += len(slots)
	if d.n >= discardSlots {
		d.due = true
	} else if !d.timing {
		d.timing = true
		time.AfterFunc(discardGather, d.ring)
	}
	d.cond.Signal()
	return true
}

// spare counts slots that no drive is told about, though some drive is told about others.
func (d *discarder) spare(slots int) {
	if d.any {
		d.spared += uint64(slots)
	}
}

// ring ends the wait for more.
func (d *discarder) ring() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.timing, d.due = false, true
	d.cond.Signal()
}

// give frees the slots of a pool that still wait, and reports whether there were any; if not, those that fly are to be
// free soon.
func (d *discarder) give(p *Pool) bool {
	d.mu.Lock()
	var slots []uint32
	d.wait = slices.DeleteFunc(d.wait, func(w pending) bool {
		if w.pool == p {
			slots = append(slots, w.slots...)
		}
		return w.pool == p
	})
	d.n -= len(slots)
	d.spare(len(slots))
	d.hurry = d.hurry ||
		len(slots) == 0 && slices.ContainsFunc(d.round, func(w pending) bool { return w.pool == p })
	d.mu.Unlock()
	p.releaseFreed(slots)
	return len(slots) > 0
}

func (d *discarder) run() {
	defer d.v.background.Done()
	for {
		d.mu.Lock()
		for !d.stop && (len(d.wait) == 0 || !d.due) {
			d.cond.Wait()
		}
		work, n := d.take()
		stop := d.stop
		if stop {
			d.spare(n)
		}
		d.mu.Unlock()
		if stop {
			d.release(work, n)
			return
		}
		d.discardSlots(work, n)
	}
}

// take is what goes next: all if the end has come, else not many more than discardSlots. The caller holds the lock.
func (d *discarder) take() (work []pending, n int) {
	k := 0
	for ; k < len(d.wait) && (d.stop || n < discardSlots); k++ {
		n += len(d.wait[k].slots)
	}
	work, d.wait = d.wait[:k:k], d.wait[k:]
	d.n -= n
	d.flying += n
	d.due, d.hurry, d.round = len(d.wait) > 0, false, work
	return work, n
}

// release makes slots allocatable.
func (d *discarder) release(work []pending, n int) {
	for _, w := range work {
		w.pool.releaseFreed(w.slots)
	}
	d.mu.Lock()
	d.flying -= n
	d.mu.Unlock()
}

func (d *discarder) close() {
	d.mu.Lock()
	d.stop = true
	d.cond.Signal()
	d.mu.Unlock()
}

// discardSlots discards all objects of the slots and then frees them: those of a drive that was given up when it
// answers after all.
func (d *discarder) discardSlots(work []pending, n int) {
	var ranges [ondisk.MaxDrives][]drive.Range
	d.mu.Lock()
	on := d.on
	d.mu.Unlock()
	for _, w := range work {
		for _, s := range w.slots {
			for o := range w.pool.units {
				if index, unit, units, ok := w.pool.Extent(s, uint16(o)); ok && on[index] {
					ranges[index] = append(ranges[index], rangeOf(unit, uint64(units)))
				}
			}
		}
	}
	var late lateDiscards
	left := 0
	for index, list := range ranges {
		gaveUp, rest := d.discard(d.v.member(uint16(index)), mergeRanges(list), d.ends)
		late, left = append(late, gaveUp...), left+rest
	}
	d.mu.Lock()
	if d.round = nil; left > 0 {
		d.spare(n) // some of them wholly, but it does not matter which
	}
	d.mu.Unlock()
	late.then(func() { d.release(work, n) })
}

func rangeOf(unit, units uint64) drive.Range {
	return drive.Range{Off: int64(unit) * ondisk.BlockBytes, N: int64(units) * ondisk.BlockBytes}
}

// mergeRanges sorts ranges and joins neighbours.
func mergeRanges(list []drive.Range) []drive.Range {
	sort.Slice(list, func(i, j int) bool { return list[i].Off < list[j].Off })
	out := list[:0]
	for _, r := range list {
		if n := len(out); n > 0 && out[n-1].Off+out[n-1].N == r.Off {
			out[n-1].N += r.N
			continue
		}
		out = append(out, r)
	}
	return out
}

// lateDiscards end when commands do that were given up.
type lateDiscards []<-chan struct{}

// then calls f when all have ended: at once if there are none.
func (l lateDiscards) then(f func()) {
	if len(l) == 0 {
		f()
		return
	}
	go func() {
		for _, ended := range l {
			<-ended
		}
		f()
	}()
}

// asks says whether a drive is told about freed slots: it is to be, and has not answered that it cannot.
func (d *discarder) asks(m *member) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.on[m.index]
}

// discard tells one drive about ranges, as many at a time as a command holds: the bound is on one command, and on its
// wait for the drive's phase. A drive that cannot is not asked again. left are the ranges that ends said are not worth
// it.
func (d *discarder) discard(
	m *member, ranges []drive.Range, ends func() bool,
) (late lateDiscards, left int) {
	for len(ranges) > 0 && m != nil && !m.lost() && d.asks(m) {
		if ends() {
			return late, len(ranges)
		}
		k := commandRanges(ranges, drive.DiscardMost(m.dev))
		some := slices.Clone(ranges[:k])
		ranges = ranges[k:]
		ended := make(chan struct{})
		err := m.bounded(func() error {
			defer close(ended)
			commands, err := drive.DiscardRanges(m.dev, some)
			d.count(m, commands, some, err)
			return err
		})
		if errors.Is(err, ErrTimeout) {
			late = append(late, ended)
		}
		if err != nil && !errors.Is(err, drive.ErrNotSupported) {
			m.writeErrors.Add(1)
		}
	}
	return late, 0
}

func (d *discarder) stopping() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stop
}

// ends says that what flies is to be free without further commands.
func (d *discarder) ends() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stop || d.hurry
}

// count notes what came of a command, or of several where the drive takes one range each.
func (d *discarder) count(m *member, commands int, ranges []drive.Range, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := &d.counts[m.index]
	c.Commands += uint64(commands)
	switch {
	case err == nil:
		c.Ranges += uint64(len(ranges))
		for _, r := range ranges {
			c.Bytes += uint64(r.N)
		}
	case errors.Is(err, drive.ErrNotSupported):
		d.on[m.index] = false
	default:
		c.Failed++
	}
}

// commandRanges is how many ranges one command is about, of a drive that takes so many at most.
func commandRanges(ranges []drive.Range, most int) (k int) {
	bytes := int64(0)
	for k < min(len(ranges), most) && (k == 0 || bytes+ranges[k].N <= discardUnits*ondisk.BlockBytes) {
		bytes += ranges[k].N
		k++
	}
	return k
}

// countsOf are what a drive was told.
func (d *discarder) countsOf(index uint16) DiscardCounts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts[index]
}

// queued are the slots that wait or are in commands, and how many went without since the mount.
func (d *discarder) queued() (waiting, spared uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return uint64(d.n + d.flying), d.spared
}

package extentmap

import (
	"errors"
	"sort"
	"sync"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// discardQueueMax bounds the slots that wait for their discard. Discards are advice to the drive: beyond the bound
// slots are handed out again without.
const discardQueueMax = 1 << 14

// discarder tells the drives what freed slots no longer hold, in the background. A slot is allocatable only
// afterwards, so that a late discard never meets new bytes.
type discarder struct {
	v    *Volume
	on   [ondisk.MaxDrives]bool
	any  bool
	mu   sync.Mutex
	cond *sync.Cond
	wait []pending
	n    int
	stop bool
}

type pending struct {
	pool  *Pool
	slots []uint32
}

type discardRange struct{ unit, units uint64 }

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
	if !d.any || d.stop || d.n+len(slots) > discardQueueMax {
		return false
	}
	d.wait = append(d.wait, pending{p, slots})
	d.n += len(slots)
	d.cond.Signal()
	return true
}

func (d *discarder) run() {
	defer d.v.background.Done()
	for {
		d.mu.Lock()
		for len(d.wait) == 0 && !d.stop {
			d.cond.Wait()
		}
		work := d.wait
		d.wait = nil
		stop := d.stop
		d.mu.Unlock()
		if stop {
			for _, w := range work {
				w.pool.releaseFreed(w.slots)
			}
			return
		}
		d.discardSlots(work)
	}
}

func (d *discarder) close() {
	d.mu.Lock()
	d.stop = true
	d.cond.Signal()
	d.mu.Unlock()
}

// discardSlots discards all objects of the slots, neighbours joined, and then frees them.
func (d *discarder) discardSlots(work []pending) {
	var ranges [ondisk.MaxDrives][]discardRange
	n := 0
	d.mu.Lock()
	on := d.on
	d.mu.Unlock()
	for _, w := range work {
		for _, s := range w.slots {
			for o := range w.pool.units {
				if index, unit, units, ok := w.pool.Extent(s, uint16(o)); ok && on[index] {
					ranges[index] = append(ranges[index], discardRange{unit, uint64(units)})
				}
			}
		}
		n += len(w.slots)
	}
	for index, list := range ranges {
		for _, r := range mergeRanges(list) {
			d.discard(d.v.member(uint16(index)), r.unit, r.units)
		}
	}
	for _, w := range work {
		w.pool.releaseFreed(w.slots)
	}
	d.mu.Lock()
	d.n -= n
	d.mu.Unlock()
}

func mergeRanges(list []discardRange) []discardRange {
	sort.Slice(list, func(i, j int) bool { return list[i].unit < list[j].unit })
	out := list[:0]
	for _, r := range list {
		if n := len(out); n > 0 && out[n-1].unit+out[n-1].units == r.unit {
			out[n-1].units += r.units
			continue
		}
		out = append(out, r)
	}
	return out
}

// asks says whether a drive is told about freed slots: it is to be, and has not answered that it cannot.
func (d *discarder) asks(m *member) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.on[m.index]
}

// discard tells one drive about one range. A drive that cannot is not asked again.
func (d *discarder) discard(m *member, unit, units uint64) {
	if m == nil || m.lost() || !d.asks(m) {
		return
	}
	err := m.bounded(func() error {
		return m.dev.Discard(int64(unit)*ondisk.BlockBytes, int64(units)*ondisk.BlockBytes)
	})
	if err == nil {
		return
	}
	if !errors.Is(err, drive.ErrNotSupported) {
		m.writeErrors.Add(1)
		return
	}
	d.mu.Lock()
	d.on[m.index] = false
	d.mu.Unlock()
}

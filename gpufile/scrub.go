package gpufile

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tuttifs/extentmap"
)

const (
	// scrubReaders verify files at once.
	scrubReaders = 4
	// scrubStage is how many slots are chosen in one hold of the pool's mutex.
	scrubStage = 256
	// scrubInterval is the time between two tellings of how far it is.
	scrubInterval = 100 * time.Millisecond
)

// ScrubCounts is how far a scrub is, or what it came to.
type ScrubCounts struct {
	Total      uint64 // files at the start
	Files      uint64 // verified or given up; files that went meanwhile are not among them
	Bytes      uint64 // of those
	Damaged    uint64 // evicted, but on a read-only volume
	Unreadable uint64 // their drive does not give them; they are misses and stay
}

// scrub is a run over all files.
type scrub struct {
	s      *Store
	ctx    context.Context
	rate   uint64
	due    time.Time // when the rate allows the next file
	told   time.Time
	tell   func(ScrubCounts)
	work   chan scrubFile
	reader sync.WaitGroup

	mu      sync.Mutex
	counts  ScrubCounts
	evicted []*extentmap.Ticket
}

type scrubFile struct {
	p    *Pool
	slot uint32
}

// Scrub rereads all files, at most rate bytes a second (0 for no bound), and evicts those that are damaged. It is none
// of their readers: hits and the policy's order stay as they are. tell is told now and then how far it is.
func (s *Store) Scrub(ctx context.Context, rate uint64, tell func(ScrubCounts)) (ScrubCounts, error) {
	if s.verify.Load() == nil {
		return ScrubCounts{}, fmt.Errorf("%w: nothing here can verify files", ErrInvalid)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x := &scrub{s: s, ctx: ctx, rate: rate, tell: tell, work: make(chan scrubFile)}
	for _, p := range s.Pools() {
		x.counts.Total += p.Stats().Files
	}
	for range scrubReaders {
		x.reader.Go(x.read)
	}
	var err error
	for _, p := range s.Pools() {
		if err = x.pool(p); err != nil {
			break
		}
	}
	close(x.work)
	x.reader.Wait()
	for _, t := range x.evicted {
		if err == nil {
			err = x.wait(t)
		}
	}
	return x.sum(), err
}

// sum is the counts as they are.
func (x *scrub) sum() ScrubCounts {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.counts
}

// errScrubEnds: the mount is going away.
var errScrubEnds = errors.New("gpufile: the mount is going away")

// wait is for an eviction to be durable.
func (x *scrub) wait(t *extentmap.Ticket) error {
	select {
	case <-t.Done():
		return t.Err()
	case <-x.ctx.Done():
		return x.ctx.Err()
	case <-x.s.quit:
		return errScrubEnds
	}
}

// pool hands out the files of a pool.
func (x *scrub) pool(p *Pool) error {
	var slots [scrubStage]uint32
	for from, n := uint32(0), 0; ; {
		if n, from = p.visibleSlots(from, slots[:]); n == 0 {
			return nil
		}
		for _, slot := range slots[:n] {
			if err := x.pace(p.m.SlotBytes()); err != nil {
				return err
			}
			select {
			case x.work <- scrubFile{p, slot}:
			case <-x.ctx.Done():
				return x.ctx.Err()
			case <-x.s.quit:
				return errScrubEnds
			}
		}
	}
}

// visibleSlots are the next slots with files from a slot on, and where to go on.
func (p *Pool) visibleSlots(from uint32, out []uint32) (n int, next uint32) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for ; int(from) < len(p.nodes.s) && n < len(out); from++ {
		if p.nodes.s[from].is(flagVisible) {
			out[n] = from
			n++
		}
	}
	return n, from
}

// pace waits until the rate allows so many bytes more.
func (x *scrub) pace(bytes uint64) error {
	now := time.Now()
	if x.tell != nil && now.Sub(x.told) >= scrubInterval {
		x.told = now
		x.tell(x.sum())
	}
	if x.rate == 0 {
		return nil
	}
	if x.due.Before(now) {
		x.due = now
	}
	pause := x.due.Sub(now)
	x.due = x.due.Add(time.Duration(float64(bytes) / float64(x.rate) * float64(time.Second)))
	if pause == 0 {
		return nil
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-x.ctx.Done():
		return x.ctx.Err()
	case <-x.s.quit:
		return errScrubEnds
	}
}

// read verifies files until there are no more.
func (x *scrub) read() {
	for f := range x.work {
		r, ok := f.p.holdFile(f.slot)
		if !ok {
			continue
		}
		verdict := (*x.s.verify.Load())(r.p, r.slot, r.seed)
		r.settle(verdict)
		x.mu.Lock()
		x.counts.Files++
		x.counts.Bytes += f.p.m.SlotBytes()
		switch verdict {
		case Damaged:
			x.counts.Damaged++
			x.evicted = append(x.evicted, r.ticket)
		case Unreadable:
			x.counts.Unreadable++
		}
		x.mu.Unlock()
	}
}

// holdFile pins a file so that it can be verified.
func (p *Pool) holdFile(slot uint32) (report, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := &p.nodes.s[slot]
	if !n.is(flagVisible) || n.pins() >= pinsLimit {
		return report{}, false
	}
	return p.hold(slot), true
}

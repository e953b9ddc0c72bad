package main

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// Bounds of one load.
const (
	loadEntries  = 1024     // of the queue
	loadBytesMax = 64 << 20 // in flight
	// loadPatience is how long a drive may be silent.
	loadPatience = 30 * time.Second
	// rampShare is the part of a load that comes before counting: drives, and who limits them, begin with a burst.
	rampShare = 8
)

// driveLoad puts commands on a drive by the way that a mount would: a queue pair, the virtual controller and io_uring.
// One thread does it all and has the clock.
type driveLoad struct {
	d          drive.Drive
	area       int64 // commands lie in the drive's first bytes
	controller *emu.Controller
	poller     *emu.Poller
	queue      *emu.Queue
	memory     nvme.QueueMemory
	mapped     []byte
	data       []byte // a place for every command in flight
	tail, head uint32
	phase      uint16
	started    [loadEntries]time.Time // by command id
	writing    [loadEntries]bool
	free       []uint16
}

// newDriveLoad makes the queue. Without write, nothing is ever written.
func newDriveLoad(d drive.Drive, area int64, write bool) (l *driveLoad, err error) {
	l = &driveLoad{d: d, area: area, phase: 1}
	defer func() {
		if err != nil {
			l.close()
			l = nil
		}
	}()
	n := nvme.QueueBytes(loadEntries)
	if l.mapped, err = unix.Mmap(-1, 0, n+loadBytesMax, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return l, systemError{fmt.Errorf("%d bytes of memory: %w", n+loadBytesMax, err)}
	}
	l.data = l.mapped[n:]
	if _, err = crand.Read(l.data); err != nil { // bytes that no drive can make smaller
		return l, err
	}
	if l.memory, err = nvme.MapQueue(l.mapped, loadEntries); err != nil {
		return l, err
	}
	if l.controller, err = emu.New(emu.Config{Drive: d, SGL: true, ReadOnly: !write, Serial: "PROFILE"}); err != nil {
		return l, err
	}
	if l.poller, err = emu.NewPoller(emu.PollerConfig{}); err != nil {
		return l, err
	}
	if l.queue, err = l.controller.Attach(emu.QueueConfig{Memory: l.memory, DMA: benchMemory(l.data)}); err != nil {
		return l, err
	}
	l.poller.Add(l.queue)
	return l, nil
}

func (l *driveLoad) close() {
	if l.poller != nil {
		l.poller.Stop()
	}
	if l.mapped != nil {
		_ = unix.Munmap(l.mapped)
	}
}

// loadWork is what one load does: commands of one size at random multiples of it, so many in flight.
type loadWork struct {
	bytes        int
	depth        int
	writePercent int
	duration     time.Duration
	// inOrder goes through the area once, from its start, instead, for at most the duration.
	inOrder bool
	// ramp leaves the beginning out of the count.
	ramp bool
}

// loadResult is what came of it.
type loadResult struct {
	from, end     time.Time // what is completed between them counts
	seconds       float64
	read, written int64     // bytes completed in time
	filled        int64     // of work in order: bytes that were gone through, all of them completed
	latency       histogram // of all commands that were completed in time
	zeroes        bool      // of reads alone: all that is in their places was zero
}

func (r *loadResult) bytesPerSecond() float64 { return float64(r.read+r.written) / r.seconds }

// add joins another result of the same work.
func (r *loadResult) add(o *loadResult) {
	r.zeroes = o.zeroes && (r.zeroes || r.seconds == 0)
	r.seconds, r.read, r.written = r.seconds+o.seconds, r.read+o.read, r.written+o.written
	r.latency.merge(&o.latency)
}

func (r *loadResult) writeShare() float64 {
	return float64(r.written) / float64(max(r.read+r.written, 1))
}

// errSilent: nothing was completed for long.
var errSilent = errors.New("the drive does not answer")

// run keeps the depth in flight until the time is over, and waits for the rest, which does not count.
func (l *driveLoad) run(ctx context.Context, w loadWork) (r *loadResult, err error) {
	places := l.area / int64(w.bytes)
	depth := min(w.depth, loadBytesMax/w.bytes, loadEntries-1)
	if places < 1 {
		return nil, fmt.Errorf("an area of %d bytes is too small for commands of %d", l.area, w.bytes)
	}
	begin := time.Now()
	r = &loadResult{from: begin, end: begin.Add(w.duration)}
	if w.ramp {
		r.from = begin.Add(w.duration / rampShare)
	}
	if w.writePercent == 0 {
		clear(l.data[:depth*w.bytes]) // so that what is read shows
	}
	l.free = l.free[:0]
	for i := range depth {
		l.free = append(l.free, uint16(i))
	}
	heard, next := begin, int64(0)
	over := func(now time.Time) bool {
		return !now.Before(r.end) || ctx.Err() != nil || err != nil || w.inOrder && next == places
	}
	for now := begin; !over(now) || len(l.free) < depth; now = time.Now() {
		for len(l.free) > 0 && !over(now) {
			place := next
			next++
			if !w.inOrder {
				place = rand.Int64N(places)
			}
			write := w.writePercent > 0 && rand.IntN(100) < w.writePercent
			if err := l.submit(place*int64(w.bytes), w.bytes, write); err != nil {
				return nil, err
			}
		}
		atomic.StoreUint32(l.memory.SQTail, l.tail)
		if l.poller.Step() == 0 {
			l.poller.Await(time.Millisecond)
		}
		n, failure := l.reap(r, w.bytes)
		err = errors.Join(err, failure)
		switch {
		case n > 0:
			heard = now
		case now.Sub(heard) > loadPatience:
			return nil, fmt.Errorf("%s: %w for %v", l.d.Name(), errSilent, loadPatience)
		}
	}
	if w.inOrder {
		r.filled = next * int64(w.bytes)
	}
	r.seconds = min(time.Since(r.from), r.end.Sub(r.from)).Seconds()
	r.zeroes = w.writePercent == 0 && zeroes(l.data[:depth*w.bytes])
	return r, errors.Join(err, ctx.Err())
}

func (l *driveLoad) submit(off int64, bytes int, write bool) error {
	id := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	e := &l.memory.SQ[l.tail]
	lba := int64(l.d.LBABytes())
	nvme.BuildRW(e, write, id, 1, uint64(off/lba), uint32(int64(bytes)/lba))
	if err := e.SetSGL(benchDMABase+uint64(id)*uint64(bytes), uint32(bytes)); err != nil {
		return err
	}
	l.started[id], l.writing[id] = time.Now(), write
	l.tail = (l.tail + 1) % loadEntries
	return nil
}

// reap takes completions.
func (l *driveLoad) reap(r *loadResult, bytes int) (n int, err error) {
	for {
		id, status, ok := l.memory.CQ[l.head].Poll(l.phase)
		if !ok {
			break
		}
		if l.head++; l.head == loadEntries {
			l.head, l.phase = 0, l.phase^1
		}
		n++
		l.free = append(l.free, id)
		now := time.Now()
		switch {
		case !status.OK():
			err = fmt.Errorf("%s: %w", l.d.Name(), status)
		case now.Before(r.from) || now.After(r.end):
		case l.writing[id]:
			r.written += int64(bytes)
			r.latency.add(now.Sub(l.started[id]))
		default:
			r.read += int64(bytes)
			r.latency.add(now.Sub(l.started[id]))
		}
	}
	atomic.StoreUint32(l.memory.CQHead, l.head)
	return n, err
}

func zeroes(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

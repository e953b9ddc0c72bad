package check

import (
	"fmt"
	"sync"
	"sync/atomic"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

const (
	// parallelPerDrive objects are read at once from each drive by default, and parallelLeast in all.
	parallelPerDrive = 4
	parallelLeast    = 8
	// dataBatch is how many files a reader takes at once.
	dataBatch = 16
)

// file is one committed slot to be read.
type file struct {
	pool *pool
	row  *row
	slot uint32
	// record is as of when the file was handed out: others of its block may be given up meanwhile.
	record ondisk.Record
}

// checkData reads all payloads and verifies them against their trailers.
func (c *checker) checkData() error {
	work := make(chan []file)
	readers := c.o.Parallel
	if readers <= 0 {
		readers = max(parallelLeast, parallelPerDrive*c.result.Drives)
	}
	var group sync.WaitGroup
	counts := make([]struct{ objects, bytes uint64 }, readers)
	var crash atomic.Pointer[any]
	for i := range readers {
		group.Go(func() {
			defer func() { // a panic must reach the caller's recover, not end the process
				if v := recover(); v != nil {
					crash.CompareAndSwap(nil, &v)
					for range work {
						continue
					}
				}
			}()
			r := &dataReader{c: c, buffer: drive.AlignedBuffer(stripe.MaxObjectBytes),
				seeds: make(map[seedKey]checksum.PoolSeed)}
			defer drive.FreeBuffer(r.buffer)
			for batch := range work {
				for _, f := range batch {
					if r.verify(f) {
						c.giveUp(f)
					}
				}
			}
			counts[i].objects, counts[i].bytes = r.objects, r.bytes
		})
	}
	err := c.sendFiles(work)
	close(work)
	group.Wait()
	if v := crash.Load(); v != nil {
		panic(*v)
	}
	for _, n := range counts {
		c.result.Objects += n.objects
		c.result.Bytes += n.bytes
	}
	return err
}

// sendFiles hands out all committed slots.
func (c *checker) sendFiles(work chan<- []file) error {
	var batch []file
	done, total := uint64(0), c.result.Files
	var stop error
	flush := func() {
		select {
		case <-c.ctx.Done():
			stop = c.ctx.Err()
		case work <- batch:
			done += uint64(len(batch))
			c.progress(done, total)
		}
		batch = nil
	}
	for _, q := range c.sortedPools() {
		if q.layout == nil {
			continue
		}
		q.each(func(slot uint32, r *row, rec []byte) {
			if stop != nil {
				return
			}
			f := file{pool: q, row: r, slot: slot}
			f.record.Decode(rec)
			if batch = append(batch, f); len(batch) == dataBatch {
				flush()
			}
		})
	}
	if stop == nil && len(batch) > 0 {
		flush()
	}
	return stop
}

type seedKey struct {
	pool   uint16
	tenant uint32
}

// dataReader is one goroutine's state.
type dataReader struct {
	c       *checker
	buffer  []byte
	sums    []uint64
	seeds   map[seedKey]checksum.PoolSeed
	objects uint64
	bytes   uint64
}

// verify reads one file, rank by rank: the trailer first, then what it vouches for. It says whether to give it up.
func (r *dataReader) verify(f file) (giveUp bool) {
	rec := &f.record
	key := seedKey{f.pool.ID, rec.Tenant}
	poolSeed, known := r.seeds[key]
	if !known {
		poolSeed = checksum.NewPoolSeed(f.pool.Digest, rec.Tenant)
		r.seeds[key] = poolSeed
	}
	seed := poolSeed.Seed(&rec.Key, rec.Nonce, rec.Generation)
	l := f.pool.layout
	for rank := range uint16(l.Ranks()) {
		objects := l.RankObjects(rank)
		r.sums = append(r.sums[:0], make([]uint64, len(objects))...)
		trailer := l.TrailerObject(rank)
		b, bad := r.read(f, trailer)
		giveUp = giveUp || bad
		if b == nil {
			continue
		}
		if !checksum.ParseTrailer(b, seed, rank, trailer, r.sums) {
			giveUp = r.bad(f, trailer, fmt.Sprintf("the trailer of rank %d is damaged", rank)) || giveUp
			continue
		}
		for i, o := range objects {
			b, bad = r.read(f, o)
			giveUp = giveUp || bad
			if b != nil && checksum.Sum(seed, rank, o, b) != r.sums[i] {
				giveUp = r.bad(f, o, fmt.Sprintf("wrong checksum (layer %d, rank %d)", l.Geometry().Objects[o].Layer,
					rank)) || giveUp
			}
		}
	}
	return giveUp
}

// place is where an object of a file lies; m is nil if its drive is missing.
func (r *dataReader) place(f file, object uint16) (m *member, unit uint64) {
	entry, at := f.pool.layout.Locate(f.slot%f.pool.slotsPerRow, object)
	e := f.row.Entries[entry]
	return r.c.member(e.Drive()), e.Unit() + at
}

// read is the object's payload, nil if it could not be had. giveUp says that it never will: a drive that reads nothing
// at all any more may come back.
func (r *dataReader) read(f file, object uint16) (payload []byte, giveUp bool) {
	m, unit := r.place(f, object)
	if m == nil || m.lost.Load() {
		return nil, false
	}
	l := f.pool.layout
	err := read(m, r.buffer[:l.ObjectUnits(object)*ondisk.BlockBytes], unit)
	switch {
	case err != nil && !m.answers():
		if !m.lost.Swap(true) {
			r.c.volume(errorf("drive", "attach it again; its files are not judged",
				"%s reads nothing any more: %v", m.Name(), err))
			r.c.must(false, m.Name()+" reads nothing any more")
		}
		return nil, false
	case err != nil:
		return nil, r.bad(f, object, fmt.Sprintf("cannot be read: %v", err))
	}
	r.objects++
	r.bytes += uint64(l.ObjectBytes(object))
	return r.buffer[:l.ObjectBytes(object)], false
}

// answers says whether a drive still reads any of its label's places.
func (m *member) answers() bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	return read(m, b, 0) == nil || read(m, b, m.label.Units-1) == nil
}

// bad reports an object at its place. It says whether its file is given up.
func (r *dataReader) bad(f file, object uint16, what string) bool {
	m, unit := r.place(f, object)
	return r.c.at(m, unit, errorf("object", "reading it is a miss; evict the file to make room",
		"pool %d (%s): slot %d (file %x): object %d: %s", f.pool.ID, f.pool.Name, f.slot, f.record.Key[:8], object,
		what).ask("the file is given up"))
}

// giveUp drops the record of a damaged file.
func (c *checker) giveUp(f file) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(f.pool, f.slot)
}

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
	defaultParallel = 8
	// dataBatch is how many files a reader takes at once.
	dataBatch = 16
)

// file is one committed slot to be read.
type file struct {
	pool *pool
	row  *row
	slot uint32
}

// checkData reads all payloads and verifies them against their trailers.
func (c *checker) checkData() error {
	work := make(chan []file)
	readers := c.o.Parallel
	if readers <= 0 {
		readers = defaultParallel
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
					r.verify(f)
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
	done := uint64(0)
	var stop error
	flush := func() {
		select {
		case <-c.ctx.Done():
			stop = c.ctx.Err()
		case work <- batch:
			done += uint64(len(batch))
			c.progress(done, c.result.Files)
		}
		batch = nil
	}
	for _, q := range c.sortedPools() {
		q.each(func(slot uint32, r *row, _ []byte) {
			if stop != nil {
				return
			}
			if batch = append(batch, file{q, r, slot}); len(batch) == dataBatch {
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

// verify reads one file, rank by rank: the trailer first, then what it vouches for.
func (r *dataReader) verify(f file) {
	var rec ondisk.Record
	rec.Decode(f.pool.record(f.slot))
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
		b, ok := r.read(f, trailer)
		if !ok {
			continue
		}
		if !checksum.ParseTrailer(b, seed, rank, trailer, r.sums) {
			r.bad(f, trailer, fmt.Sprintf("the trailer of rank %d is damaged", rank))
			continue
		}
		for i, o := range objects {
			if b, ok = r.read(f, o); ok && checksum.Sum(seed, rank, o, b) != r.sums[i] {
				r.bad(f, o, fmt.Sprintf("wrong checksum (layer %d, rank %d)", l.Geometry().Objects[o].Layer, rank))
			}
		}
	}
}

// place is where an object of a file lies; m is nil if its drive is missing.
func (r *dataReader) place(f file, object uint16) (m *member, unit uint64) {
	entry, at := f.pool.layout.Locate(f.slot%f.pool.slotsPerRow, object)
	e := f.row.Entries[entry]
	return r.c.member(e.Drive()), e.Unit() + at
}

// read is the object's payload; ok is false if it could not be had.
func (r *dataReader) read(f file, object uint16) (payload []byte, ok bool) {
	m, unit := r.place(f, object)
	if m == nil {
		return nil, false
	}
	l := f.pool.layout
	if err := read(m, r.buffer[:l.ObjectUnits(object)*ondisk.BlockBytes], unit); err != nil {
		r.bad(f, object, fmt.Sprintf("cannot be read: %v", err))
		return nil, false
	}
	r.objects++
	r.bytes += uint64(l.ObjectBytes(object))
	return r.buffer[:l.ObjectBytes(object)], true
}

// bad reports an object at its place.
func (r *dataReader) bad(f file, object uint16, what string) {
	m, unit := r.place(f, object)
	r.c.at(m, unit, errorf("object", "reading it is a miss; evict the file to make room", "%s: object %d: %s",
		slotName(f.pool, f.slot), object, what))
}

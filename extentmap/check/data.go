package check

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

const (
	// parallelPerDrive reads are made at once of each drive by default, and parallelLeast in all.
	parallelPerDrive = 4
	parallelLeast    = 8
	// readBytes is the most that one read takes: as large as the largest object. Larger reads are slower on some drives.
	readBytes = stripe.MaxObjectBytes
	// readGap is how many units between two objects are read with them rather than have another read.
	readGap = 4
	// A batch of files ends with a stripe set, so that what lies together on a drive is read together: when it has
	// batchBytes on each entry, or batchObjects. With batchObjectsMax it ends anywhere.
	batchBytes      = 4 * readBytes
	batchObjects    = 1 << 13
	batchObjectsMax = 1 << 16
)

// file is one committed slot to be read.
type file struct {
	pool *pool
	row  *row
	slot uint32
	// record is as of when the file was handed out: others of its block may be given up meanwhile.
	record ondisk.Record
}

// batch is some files of one row. Readers begin batches that follow each other with different entries, so that not all
// of them are at one drive.
type batch struct {
	files []file
	first int // entry to begin with
}

// checkData reads all payloads and verifies them against their trailers.
func (c *checker) checkData() error {
	work := make(chan batch)
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
			r := &dataReader{c: c, buffer: drive.AlignedBuffer(readBytes), seeds: make(map[seedKey]checksum.PoolSeed)}
			defer drive.FreeBuffer(r.buffer)
			for b := range work {
				r.verify(b)
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

// sendFiles hands out all committed slots, in batches of one row each.
func (c *checker) sendFiles(work chan<- batch) error {
	var files []file
	batches := 0
	done, total := uint64(0), c.result.Files
	var stop error
	flush := func() {
		if stop != nil || len(files) == 0 {
			return
		}
		select {
		case <-c.ctx.Done():
			stop = c.ctx.Err()
		case work <- batch{files, batches}:
			done += uint64(len(files))
			c.progress(done, total)
		}
		files = nil
		batches++
	}
	for _, q := range c.sortedPools() {
		if q.layout == nil {
			continue
		}
		set := uint32(q.layout.Width())
		q.each(func(slot uint32, r *row, rec []byte) {
			if n := len(files); n > 0 && q.endsBatch(n, r != files[0].row, slot/set != files[n-1].slot/set) {
				flush()
			}
			f := file{pool: q, row: r, slot: slot}
			f.record.Decode(rec)
			files = append(files, f)
		})
		flush()
	}
	return stop
}

// endsBatch says whether a batch of n files is one before the next file, which may be of another row or set.
func (q *pool) endsBatch(n int, otherRow, otherSet bool) bool {
	objects := n * q.layout.Objects()
	full := uint64(n)*q.layout.SlotUnits()*ondisk.BlockBytes >= uint64(q.layout.Width())*batchBytes ||
		objects >= batchObjects
	return otherRow || otherSet && full || objects >= batchObjectsMax
}

type seedKey struct {
	pool   uint16
	tenant uint32
}

// dataReader is one goroutine's state. All behind sums is of the batch at hand: want, got and seen by file and object.
type dataReader struct {
	c       *checker
	buffer  []byte
	objects uint64
	bytes   uint64
	seeds   map[seedKey]checksum.PoolSeed
	sums    []uint64 // of one trailer

	files  []file
	first  int
	layout *stripe.Layout
	seed   []checksum.Seed
	giveUp []bool
	pieces []piece
	want   []uint64 // what the trailers say
	got    []uint64
	seen   []bool // read; of a trailer: read, and worth anything
}

// piece is one object of a file of the batch, and where it lies.
type piece struct {
	m      *member
	unit   uint64
	turn   uint8 // of its entry
	rank   uint16
	object uint16
	file   int32
}

// verify reads files of one row in the order in which they lie on the drives, and compares them with their trailers.
func (r *dataReader) verify(b batch) {
	r.plan(b)
	for pieces := r.pieces; len(pieces) > 0; {
		n := r.together(pieces)
		r.readTogether(pieces[:n])
		pieces = pieces[n:]
	}
	for i, f := range b.files {
		if r.judge(i); r.giveUp[i] {
			r.c.giveUp(f)
		}
	}
}

// resized is s with n elements of no particular value.
func resized[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

// plan lists what is to be read of a batch.
func (r *dataReader) plan(b batch) {
	l := b.files[0].pool.layout
	all := len(b.files) * l.Objects()
	r.files, r.first, r.layout, r.seed, r.pieces = b.files, b.first, l, r.seed[:0], r.pieces[:0]
	r.want, r.got, r.seen, r.giveUp = resized(r.want, all), resized(r.got, all), resized(r.seen, all),
		resized(r.giveUp, len(b.files))
	clear(r.seen)
	clear(r.giveUp)
	for i := range b.files {
		r.seed = append(r.seed, r.seedOf(&b.files[i]))
		for rank := range uint16(l.Ranks()) {
			r.pieces = r.append(r.pieces, i, rank, l.TrailerObject(rank))
			for _, o := range l.RankObjects(rank) {
				r.pieces = r.append(r.pieces, i, rank, o)
			}
		}
	}
	slices.SortFunc(r.pieces, func(a, b piece) int {
		return cmp.Or(cmp.Compare(a.turn, b.turn), cmp.Compare(a.unit, b.unit))
	})
}

// append adds an object, unless its drive is missing.
func (r *dataReader) append(list []piece, file int, rank, object uint16) []piece {
	f := &r.files[file]
	entry, at := r.layout.Locate(f.slot%f.pool.slotsPerRow, object)
	e := f.row.Entries[entry]
	m := r.c.member(e.Drive())
	if m == nil {
		return list
	}
	w := len(f.row.Entries)
	turn := (entry + w - r.first%w) % w
	return append(list, piece{m, e.Unit() + at, uint8(turn), rank, object, int32(file)})
}

func (r *dataReader) seedOf(f *file) checksum.Seed {
	rec := &f.record
	key := seedKey{f.pool.ID, rec.Tenant}
	poolSeed, known := r.seeds[key]
	if !known {
		poolSeed = checksum.NewPoolSeed(f.pool.Digest, rec.Tenant)
		r.seeds[key] = poolSeed
	}
	return poolSeed.Seed(&rec.Key, rec.Nonce, rec.Generation)
}

// units is the length of a piece.
func (r *dataReader) units(p *piece) uint64 { return uint64(r.layout.ObjectUnits(p.object)) }

// together is how many of the first pieces one read takes.
func (r *dataReader) together(pieces []piece) int {
	first, end := &pieces[0], pieces[0].unit
	for i := range pieces {
		p := &pieces[i]
		next := p.unit + r.units(p)
		if i > 0 && (p.turn != first.turn || p.unit > end+readGap ||
			(next-first.unit)*ondisk.BlockBytes > readBytes) {
			return i
		}
		end = next
	}
	return len(pieces)
}

// readTogether reads neighbours at once. Where that fails they are read one by one, to tell which of them are damaged.
func (r *dataReader) readTogether(pieces []piece) {
	first, last := &pieces[0], &pieces[len(pieces)-1]
	b := r.buffer[:(last.unit-first.unit+r.units(last))*ondisk.BlockBytes]
	whole := len(pieces) > 1 && !first.m.lost.Load() && read(first.m, b, first.unit) == nil
	for i := range pieces {
		p := &pieces[i]
		b := r.buffer
		if whole {
			b = b[(p.unit-first.unit)*ondisk.BlockBytes:]
		} else if !r.readOne(p) {
			continue
		}
		r.digest(p, b[:r.layout.ObjectBytes(p.object)])
	}
}

// readOne reads one object to the beginning of the buffer. A drive that reads nothing at all any more may come back:
// its files are not given up.
func (r *dataReader) readOne(p *piece) bool {
	if p.m.lost.Load() {
		return false
	}
	err := read(p.m, r.buffer[:r.units(p)*ondisk.BlockBytes], p.unit)
	switch {
	case err == nil:
		return true
	case p.m.answers():
		r.bad(p, fmt.Sprintf("cannot be read: %v", err))
	case !p.m.lost.Swap(true):
		r.c.volume(errorf("drive", "attach it again; its files are not judged",
			"%s reads nothing any more: %v", p.m.Name(), err))
		r.c.must(false, p.m.Name()+" reads nothing any more")
	}
	return false
}

// at is where want, got and seen have an object of a file.
func (r *dataReader) at(file int32, object uint16) int {
	return int(file)*r.layout.Objects() + int(object)
}

// digest takes the checksum of an object, and from a trailer those that it holds.
func (r *dataReader) digest(p *piece, payload []byte) {
	r.objects++
	r.bytes += uint64(len(payload))
	at, seed := r.at(p.file, p.object), r.seed[p.file]
	if p.object != r.layout.TrailerObject(p.rank) {
		r.got[at], r.seen[at] = checksum.Sum(seed, p.rank, p.object, payload), true
		return
	}
	objects := r.layout.RankObjects(p.rank)
	r.sums = resized(r.sums, len(objects))
	if !checksum.ParseTrailer(payload, seed, p.rank, p.object, r.sums) {
		r.bad(p, fmt.Sprintf("the trailer of rank %d is damaged", p.rank))
		return
	}
	r.seen[at] = true
	for i, o := range objects {
		r.want[r.at(p.file, o)] = r.sums[i]
	}
}

// judge compares what was read of a file with its trailers.
func (r *dataReader) judge(file int) {
	for rank := range uint16(r.layout.Ranks()) {
		if !r.seen[r.at(int32(file), r.layout.TrailerObject(rank))] {
			continue
		}
		for _, o := range r.layout.RankObjects(rank) {
			if at := r.at(int32(file), o); r.seen[at] && r.got[at] != r.want[at] {
				p := r.append(nil, file, rank, o)
				r.bad(&p[0], fmt.Sprintf("wrong checksum (layer %d, rank %d)", r.layout.Geometry().Objects[o].Layer,
					rank))
			}
		}
	}
}

// bad reports an object at its place, and has its file given up if that is agreed to.
func (r *dataReader) bad(p *piece, what string) {
	f := &r.files[p.file]
	if r.c.at(p.m, p.unit, errorf("object", "reading it is a miss; evict the file to make room",
		"pool %d (%s): slot %d (file %x): object %d: %s", f.pool.ID, f.pool.Name, f.slot, f.record.Key[:8], p.object,
		what).ask("the file is given up")) {
		r.giveUp[p.file] = true
	}
}

// answers says whether a drive still reads any of its label's places.
func (m *member) answers() bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	return read(m, b, 0) == nil || read(m, b, m.label.Units-1) == nil
}

// giveUp drops the record of a damaged file.
func (c *checker) giveUp(f file) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(f.pool, f.slot)
}

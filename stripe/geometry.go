package stripe

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"
)

// Limits of a geometry beyond the contract's.
const (
	// MaxRuns bounds the runs of one object.
	MaxRuns = 256
	// MaxRanks bounds the ranks of one file.
	MaxRanks = 1024
	// NoObject is no object's number.
	NoObject = MaxObjects
)

// The trailer's payload: a header and a checksum of its own around one sum for each object of the rank. The
// checksum room defines the bytes; a test there compares the lengths.
const (
	trailerFixedBytes = 32
	trailerSumBytes   = 8
)

// problemsMax bounds the problems that Validate lists: a hostile geometry must not cost megabytes of prose.
const problemsMax = 16

// ErrGeometry marks every complaint about a geometry.
var ErrGeometry = errors.New("stripe: bad geometry")

// Bytes is the payload length.
func (o *Object) Bytes() uint32 {
	var n uint32
	for i := range o.Runs {
		n += o.Runs[i].Bytes
	}
	return n
}

// bytesChecked is Bytes without overflow.
func (o *Object) bytesChecked() uint64 {
	var n uint64
	for i := range o.Runs {
		n += uint64(o.Runs[i].Bytes)
	}
	return n
}

// Units is Bytes rounded up to 4-KiB units.
func (o *Object) Units() uint32 {
	return uint32((uint64(o.Bytes()) + UnitBytes - 1) / UnitBytes)
}

// IsTrailer says whether the object is a trailer.
func (o *Object) IsTrailer() bool { return o.Layer == TrailerLayer }

// Clone copies the geometry, runs included. Objects that share their runs do so in the copy: what a small encoding
// says must not grow into gigabytes.
func (g Geometry) Clone() Geometry {
	objects := slices.Clone(g.Objects)
	copies := make(map[*Run][]Run)
	for i := range objects {
		runs := objects[i].Runs
		first := unsafe.SliceData(runs)
		same, known := copies[first]
		if !known || len(same) != len(runs) {
			same = slices.Clone(runs)
			copies[first] = same
		}
		objects[i].Runs = same
	}
	return Geometry{Objects: objects}
}

// ranks is one more than the highest rank of any object.
func (g Geometry) ranks() int {
	n := 0
	for i := range g.Objects {
		n = max(n, int(g.Objects[i].Rank)+1)
	}
	return n
}

// payloadObjects counts each rank's objects, trailers left out.
func (g Geometry) payloadObjects() []int {
	counts := make([]int, g.ranks())
	for i := range g.Objects {
		if o := &g.Objects[i]; !o.IsTrailer() {
			counts[o.Rank]++
		}
	}
	return counts
}

// WithTrailers returns g with one trailer a rank appended. Trailers that g already has are replaced.
func (g Geometry) WithTrailers() Geometry {
	counts := g.payloadObjects()
	objects := make([]Object, 0, len(g.Objects)+len(counts))
	for _, o := range g.Objects {
		if !o.IsTrailer() {
			objects = append(objects, o)
		}
	}
	for rank, n := range counts {
		objects = append(objects, Object{
			Layer: TrailerLayer,
			Rank:  uint16(rank),
			Runs:  []Run{{Kind: RunTrailer, Bytes: trailerBytes(n)}},
		})
	}
	return Geometry{Objects: objects}
}

func trailerBytes(objects int) uint32 { return uint32(trailerFixedBytes + trailerSumBytes*objects) }

// Validate reports all problems (the first problemsMax of them): no objects, empty or oversized objects or runs,
// ranks or layers out of range, trailers missing or misplaced. A valid geometry has objects of every rank below its
// highest.
func (g Geometry) Validate() error {
	p := problems{}
	if n := len(g.Objects); n == 0 || n > MaxObjects {
		p.add("%d objects, want 1 to %d", n, MaxObjects)
		return p.err()
	}
	ranks := g.ranks()
	if ranks > MaxRanks {
		p.add("rank %d, want less than %d", ranks-1, MaxRanks)
		return p.err()
	}
	for i := range g.Objects {
		g.Objects[i].validate(i, &p)
	}
	g.validateTrailers(&p)
	return p.err()
}

// validate reports what is wrong with one object by itself.
func (o *Object) validate(number int, p *problems) {
	if len(o.Runs) == 0 || len(o.Runs) > MaxRuns {
		p.add("object %d: %d runs, want 1 to %d", number, len(o.Runs), MaxRuns)
		return
	}
	for j, r := range o.Runs {
		if r.Kind > RunTrailer {
			p.add("object %d: run %d: unknown kind %d", number, j, r.Kind)
		}
		if (r.Kind == RunTrailer) != o.IsTrailer() {
			p.add("object %d: run %d: layer %d and kind %d contradict each other", number, j, o.Layer, r.Kind)
		}
		if r.Bytes == 0 {
			p.add("object %d: run %d is empty", number, j)
		}
	}
	if n := o.bytesChecked(); n > MaxObjectBytes {
		p.add("object %d: %d bytes, want at most %d: make it several objects", number, n, MaxObjectBytes)
	}
}

// validateTrailers wants the last objects to be one trailer a rank, in rank order, each as long as its rank's sums
// need.
func (g Geometry) validateTrailers(p *problems) {
	counts := g.payloadObjects()
	for rank, n := range counts {
		if n == 0 {
			p.add("rank %d has no objects", rank)
		}
	}
	first := len(g.Objects) - len(counts)
	for i := range g.Objects {
		o := &g.Objects[i]
		switch {
		case i < first && o.IsTrailer():
			p.add("object %d: a trailer before the last %d objects", i, len(counts))
		case i < first:
		case !o.IsTrailer():
			p.add("object %d: not a trailer, want the trailer of rank %d", i, i-first)
		case int(o.Rank) != i-first:
			p.add("object %d: the trailer of rank %d, want that of rank %d", i, o.Rank, i-first)
		case len(o.Runs) != 1 || o.Runs[0].Bytes != trailerBytes(counts[o.Rank]):
			p.add("object %d: a trailer of %d bytes in %d runs, want %d in 1", i, o.bytesChecked(), len(o.Runs),
				trailerBytes(counts[o.Rank]))
		}
	}
}

// FileBytes is the size of the GPU file as seen through the mount: all payloads, trailers not counted.
func (g Geometry) FileBytes() int64 {
	var n int64
	for i := range g.Objects {
		if o := &g.Objects[i]; !o.IsTrailer() {
			n += int64(o.Bytes())
		}
	}
	return n
}

// problems collects complaints, at most problemsMax.
type problems struct {
	list []error
	more int
}

func (p *problems) add(format string, args ...any) {
	if len(p.list) == problemsMax {
		p.more = p.more + 1
		return
	}
	p.list = append(p.list, fmt.Errorf("%w: "+format, append([]any{ErrGeometry}, args...)...))
}

func (p *problems) err() error {
	if p.more > 0 {
		p.list = append(p.list, fmt.Errorf("%w: and %d problems more", ErrGeometry, p.more))
	}
	return errors.Join(p.list...)
}

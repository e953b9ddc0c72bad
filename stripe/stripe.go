// Package stripe is the arithmetic of the layout: geometry -> (entry, offset). No I/O, no state.
//
// Words: an *object* is the unit of I/O, at most MaxObjectBytes, always one NVMe command. A *slot* holds one GPU
// file. A *row* is W *entries*; a *stripe set* is W consecutive slots of a row, and each entry holds one slot's
// worth of bytes of it. Object t of the r-th slot of a set lies on entry (r + i) mod W, i its position when the
// objects are sorted by (size, layer, rank), at set base + sum of the sizes before it in that order.
package stripe

// UnitBytes is the allocation unit.
const UnitBytes = 4096

// MaxObjectBytes bounds one object (one command).
const MaxObjectBytes = 2 << 20

// MaxObjects bounds the objects of one file; object numbers are u16.
const MaxObjects = 65535

// MaxWidth bounds W.
const MaxWidth = 64

// RunKind names what a run holds.
type RunKind uint8

const (
	RunKV RunKind = iota // K and V interleaved
	RunK
	RunV
	RunLatent  // MLA latent rows (e.g. 656-byte rows)
	RunScale   // quantisation scales
	RunIndexer // sparse-attention indexer rows (e.g. 132-byte rows)
	RunState   // state-space tensors
	RunOther
	RunTrailer // checksums; appended by WithTrailers only
)

// Run is one contiguous piece of an object's payload.
type Run struct {
	Kind  RunKind
	Bytes uint32
}

// Object is one layer's ordered runs for one rank. Trailers have Layer TrailerLayer.
type Object struct {
	Layer uint16
	Rank  uint16
	Runs  []Run
}

// TrailerLayer marks a trailer.
const TrailerLayer = 0xffff

// Geometry is the ordered object list of one GPU file, all ranks, trailers last (one a rank, in rank order).
type Geometry struct {
	Objects []Object
}

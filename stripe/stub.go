package stripe

// Bytes is the payload length.
func (o *Object) Bytes() uint32 { panic("stub") }

// Units is Bytes rounded up to 4-KiB units.
func (o *Object) Units() uint32 { panic("stub") }

// IsTrailer says whether the object is a trailer.
func (o *Object) IsTrailer() bool { panic("stub") }

// WithTrailers returns g with one trailer a rank appended (trailer payload: checksum.TrailerBytes of the rank's objects; the
// arithmetic is repeated here because stripe imports nothing).
func (g Geometry) WithTrailers() Geometry { panic("stub") }

// Validate reports all problems: no objects, empty or oversized objects or runs, ranks or layers out of range, trailers missing or misplaced.
func (g Geometry) Validate() error { panic("stub") }

// FileBytes is the size of the GPU file as seen through the mount: all payloads, trailers not counted.
func (g Geometry) FileBytes() int64 { panic("stub") }

// MarshalBinary encodes the geometry: the canonical form that is hashed, stored and sent over the ABI.
func (g Geometry) MarshalBinary() ([]byte, error) { panic("stub") }

// ParseGeometry decodes and validates bytes that we did not write.
func ParseGeometry(b []byte) (Geometry, error) { panic("stub") }

// KV describes a transformer's cache so that its geometry can be built.
type KV struct {
	Layers     int
	KVHeads    int // over all ranks
	HeadDim    int
	DTypeBytes int
	Tokens     int  // tokens of one file (B)
	Ranks      int  // tensor-parallel ranks; KVHeads is divided among them
	Split      bool // K and V as objects of their own
	LatentRow  int  // MLA: bytes of one token's latent row; replaces heads x dim, not divided among ranks
	ScaleRow   int  // bytes of scales per token, 0 for none
	IndexerRow int  // bytes of one token's indexer row, 0 for none
}

// Geometry builds the object list (trailers included); tensors over MaxObjectBytes become several objects.
func (k KV) Geometry() (Geometry, error) { panic("stub") }

// Layout is the layout of one geometry over rows of width W: tables only. Safe for concurrent use.
type Layout struct{ _ int }

// NewLayout builds the tables.
func NewLayout(g Geometry, width int) (*Layout, error) { panic("stub") }

func (l *Layout) Geometry() *Geometry { panic("stub") }
func (l *Layout) Width() int          { panic("stub") }
func (l *Layout) Objects() int        { panic("stub") }

// SlotUnits is the sum of all objects' units: what one slot occupies, and what a stripe set occupies on each entry.
func (l *Layout) SlotUnits() uint64 { panic("stub") }

// Position is object t's place in the (size, layer, rank) order.
func (l *Layout) Position(object uint16) int { panic("stub") }

// Offset is object t's first unit, relative to its set's base on its entry.
func (l *Layout) Offset(object uint16) uint64 { panic("stub") }

// Locate turns (index of the slot in its row, object) into (entry, first unit within the entry).
func (l *Layout) Locate(index uint32, object uint16) (entry int, unit uint64) { panic("stub") }

// Resolve is Locate's inverse: which slot of the row and which object holds a unit of an entry, and which unit of that object
// it is. ok is false for units that hold no object (the tail of an entry). slots is the row's slot count.
func (l *Layout) Resolve(entry int, unit uint64, slots uint32) (index uint32, object uint16, within uint32, ok bool) {
	panic("stub")
}

// EntryShift is k: the smallest k so that an entry of segmentUnits<<k wastes at most 1/16 behind whole stripe sets; if none up to maxShift does,
// the one that wastes least. ok is false if not even one set fits in segmentUnits<<maxShift.
func EntryShift(slotUnits, segmentUnits uint64, maxShift int) (k int, ok bool) { panic("stub") }

// SlotsPerRow is W x whole stripe sets that fit an entry.
func (l *Layout) SlotsPerRow(entryUnits uint64) uint32 { panic("stub") }

// LayerObjects lists the object numbers of one layer and rank, in order (tables made by NewLayout; do not modify).
func (l *Layout) LayerObjects(layer, rank uint16) []uint16 { panic("stub") }

// RankObjects lists all objects of one rank but its trailer; TrailerObject is that rank's trailer.
func (l *Layout) RankObjects(rank uint16) []uint16 { panic("stub") }
func (l *Layout) TrailerObject(rank uint16) uint16 { panic("stub") }

// OrdinalInRank is an object's index within RankObjects of its rank: its place in the trailer.
func (l *Layout) OrdinalInRank(object uint16) int { panic("stub") }
func (l *Layout) Ranks() int                      { panic("stub") }
func (l *Layout) Layers() int                     { panic("stub") }

package stripe

import (
	"errors"
	"fmt"
)

// KV describes a transformer's cache so that its geometry can be built.
type KV struct {
	Layers     int
	KVHeads    int // over all ranks
	HeadDim    int
	DTypeBytes int
	Tokens     int // tokens of one file (B)
	Ranks      int // tensor-parallel ranks; KVHeads is divided among them, or repeated if there are fewer heads
	// Split makes K and V objects of their own; scales and indexer rows then share a third.
	Split bool
	// LatentRow is MLA's: bytes of one token's latent row; replaces heads x dim, not divided among ranks. An engine
	// whose ranks hold the same latents stores them once by saying Ranks 1.
	LatentRow  int
	ScaleRow   int // bytes of scales per token, layer and rank, 0 for none
	IndexerRow int // bytes of one token's indexer row, per layer and rank, 0 for none
}

// Bounds far beyond any model; the product of all of them stays below 2^63.
const (
	kvFieldMax = 1 << 20
	kvHeadsMax = 1 << 16 // also the head dimension's
	// kvTensorMax bounds one tensor of one layer and rank.
	kvTensorMax = 1 << 32
)

// Validate reports all problems.
func (k KV) Validate() error {
	p := problems{}
	between := func(name string, value, low, high int) {
		if value < low || value > high {
			p.add("%s is %d, want %d to %d", name, value, low, high)
		}
	}
	between("layers", k.Layers, 1, TrailerLayer)
	between("tokens", k.Tokens, 1, kvFieldMax)
	between("ranks", k.Ranks, 1, MaxRanks)
	between("latent row", k.LatentRow, 0, kvFieldMax)
	between("scale row", k.ScaleRow, 0, kvFieldMax)
	between("indexer row", k.IndexerRow, 0, kvFieldMax)
	if k.LatentRow != 0 {
		if k.Split {
			p.add("latents have no K and V to split")
		}
		return p.err()
	}
	between("KV heads", k.KVHeads, 1, kvHeadsMax)
	between("head dimension", k.HeadDim, 1, kvHeadsMax)
	between("bytes of an element", k.DTypeBytes, 1, 16)
	if len(p.list) == 0 && k.KVHeads%k.Ranks != 0 && k.Ranks%k.KVHeads != 0 {
		p.add("%d KV heads cannot be divided among %d ranks", k.KVHeads, k.Ranks)
	}
	return p.err()
}

// tensor is a run before it is cut to objects.
type tensor struct {
	kind  RunKind
	bytes uint64
}

// groups are the tensors of one layer and rank; those of one group share objects.
func (k KV) groups() [][]tensor {
	rows := func(kind RunKind, rowBytes uint64) tensor { return tensor{kind, rowBytes * uint64(k.Tokens)} }
	var extra []tensor
	if k.ScaleRow > 0 {
		extra = append(extra, rows(RunScale, uint64(k.ScaleRow)))
	}
	if k.IndexerRow > 0 {
		extra = append(extra, rows(RunIndexer, uint64(k.IndexerRow)))
	}
	if k.LatentRow > 0 {
		return [][]tensor{append([]tensor{rows(RunLatent, uint64(k.LatentRow))}, extra...)}
	}
	row := uint64(max(1, k.KVHeads/k.Ranks)) * uint64(k.HeadDim) * uint64(k.DTypeBytes)
	kRun, vRun := rows(RunK, row), rows(RunV, row)
	if !k.Split {
		return [][]tensor{append([]tensor{kRun, vRun}, extra...)}
	}
	groups := [][]tensor{{kRun}, {vRun}}
	if len(extra) > 0 {
		groups = append(groups, extra)
	}
	return groups
}

// Geometry builds the object list (trailers included): layer by layer, rank by rank. What exceeds MaxObjectBytes
// becomes several objects of equal units but for the last; the runs of a layer's and rank's objects, one after
// another, are its tensors in order.
func (k KV) Geometry() (Geometry, error) {
	if err := k.Validate(); err != nil {
		return Geometry{}, err
	}
	var cut [][]Run // the objects of every layer and rank: all are alike
	for _, group := range k.groups() {
		runs, err := cutGroup(group)
		if err != nil {
			return Geometry{}, err
		}
		cut = append(cut, runs...)
	}
	if n := (len(cut)*k.Layers + 1) * k.Ranks; n > MaxObjects {
		return Geometry{}, fmt.Errorf("%w: %d objects, want at most %d: use fewer tokens or ranks", ErrGeometry, n,
			MaxObjects)
	}
	g := Geometry{Objects: make([]Object, 0, len(cut)*k.Layers*k.Ranks)}
	for layer := range k.Layers {
		for rank := range k.Ranks {
			for _, runs := range cut {
				g.Objects = append(g.Objects, Object{Layer: uint16(layer), Rank: uint16(rank), Runs: runs})
			}
		}
	}
	g = g.WithTrailers()
	return g, g.Validate()
}

var errTooLarge = errors.New("a layer's bytes on one rank exceed what this builder takes: use fewer tokens")

// cutGroup cuts the tensors, one after another, to objects.
func cutGroup(tensors []tensor) ([][]Run, error) {
	var total uint64
	for _, t := range tensors {
		if t.bytes > kvTensorMax {
			return nil, fmt.Errorf("%w: %w", ErrGeometry, errTooLarge)
		}
		total += t.bytes
	}
	count := (total + MaxObjectBytes - 1) / MaxObjectBytes
	each := ((total+count-1)/count + UnitBytes - 1) / UnitBytes * UnitBytes
	if count == 1 {
		each = total
	}
	var objects [][]Run
	var runs []Run
	room := each
	for _, t := range tensors {
		for t.bytes > 0 {
			n := min(t.bytes, room)
			runs = append(runs, Run{Kind: t.kind, Bytes: uint32(n)})
			t.bytes -= n
			if room -= n; room == 0 {
				objects, runs, room = append(objects, runs), nil, each
			}
		}
	}
	if runs != nil {
		objects = append(objects, runs)
	}
	return objects, nil
}

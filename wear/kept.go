package wear

// KeptKey names a block that is kept: tenants' keys are their own.
type KeptKey struct {
	Tenant uint32
	Key    [32]byte
}

// Kept is the index of a bounded host memory for blocks that were not admitted to the drives: it serves their first
// reuse. Each block has one of the places; when all are taken, the block that was used the longest ago and that nobody
// holds has to go. V is what the memory's owner notes of a block. Not safe for concurrent use.
type Kept[V any] struct {
	blocks  map[KeptKey]*KeptBlock[V]
	oldest  *KeptBlock[V] // in order of use
	newest  *KeptBlock[V]
	next    uint32   // places from here on were never given out
	places  uint32   // that there are
	free    []uint32 // places before next that no block has
	evicted uint64
}

// KeptBlock is a block of a Kept.
type KeptBlock[V any] struct {
	Key   KeptKey
	Place uint32
	Value V

	holds        int
	dropped      bool
	older, newer *KeptBlock[V]
}

// NewKept has places 0 to places-1, all of them free.
func NewKept[V any](places uint32) *Kept[V] {
	return &Kept[V]{blocks: map[KeptKey]*KeptBlock[V]{}, places: places}
}

// Len counts the blocks.
func (k *Kept[V]) Len() int { return len(k.blocks) }

// Evicted counts the blocks that had to go for others.
func (k *Kept[V]) Evicted() uint64 { return k.evicted }

// Find returns a block, nil where there is none. That is no use of it.
func (k *Kept[V]) Find(key KeptKey) *KeptBlock[V] { return k.blocks[key] }

// Use notes a use.
func (k *Kept[V]) Use(b *KeptBlock[V]) {
	if b.dropped || k.newest == b {
		return
	}
	k.unlink(b)
	k.link(b)
}

// Put makes a block of a key that has none. It returns nil where every place is held.
func (k *Kept[V]) Put(key KeptKey, value V) *KeptBlock[V] {
	place, ok := k.take()
	if !ok {
		b := k.oldest
		for b != nil && b.holds > 0 {
			b = b.newer
		}
		if b == nil {
			return nil
		}
		k.evicted++
		k.Drop(b)
		place, _ = k.take()
	}
	b := &KeptBlock[V]{Key: key, Place: place, Value: value}
	k.blocks[key] = b
	k.link(b)
	return b
}

// take returns a free place.
func (k *Kept[V]) take() (place uint32, ok bool) {
	if last := len(k.free) - 1; last >= 0 {
		place, k.free = k.free[last], k.free[:last]
		return place, true
	}
	if k.next == k.places {
		return 0, false
	}
	k.next++
	return k.next - 1, true
}

// Hold keeps a block's place from being given to another one, until as many calls of Release.
func (k *Kept[V]) Hold(b *KeptBlock[V]) { b.holds++ }

// Release undoes Hold.
func (k *Kept[V]) Release(b *KeptBlock[V]) {
	if b.holds--; b.holds == 0 && b.dropped {
		k.free = append(k.free, b.Place)
	}
}

// Drop takes a block out: it is not found any more. Its place is free when nobody holds it.
func (k *Kept[V]) Drop(b *KeptBlock[V]) {
	if b.dropped {
		return
	}
	b.dropped = true
	delete(k.blocks, b.Key)
	k.unlink(b)
	if b.holds == 0 {
		k.free = append(k.free, b.Place)
	}
}

func (k *Kept[V]) link(b *KeptBlock[V]) {
	if b.older, b.newer = k.newest, nil; k.newest == nil {
		k.oldest = b
	} else {
		k.newest.newer = b
	}
	k.newest = b
}

func (k *Kept[V]) unlink(b *KeptBlock[V]) {
	if b.older == nil {
		k.oldest = b.newer
	} else {
		b.older.newer = b.newer
	}
	if b.newer == nil {
		k.newest = b.older
	} else {
		b.newer.older = b.older
	}
	b.older, b.newer = nil, nil
}

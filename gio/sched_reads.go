package gio

// readBook has the reads of layers: of the pass that is under way (or, where none is, of the one that comes), and of
// the pass behind it. Batches of one layer begin and end in the order of their issue, so that this pass's come first.
type readBook struct {
	layers [2][]layerReads
	top    [2]int // no layer from here on has any
	flying int64  // bytes in flight, of all reads
	layer  int64  // of them those of layers
	left   int64  // of layers, that have not arrived
	// hostLayer and hostNext are the last layers of this pass and of the next that somebody blocks for, noLayer for none.
	hostLayer, hostNext int
}

// layerReads are bytes of a layer's reads: that are not in place, that have not arrived, that are in flight.
type layerReads struct{ pending, left, flying int64 }

func (b *readBook) setUp() {
	for i := range b.layers {
		b.layers[i] = make([]layerReads, schedLayersMax)
	}
	b.hostLayer, b.hostNext = noLayer, noLayer
}

// turn makes the next pass's reads this one's. What the pass before has left is waited for as well.
func (b *readBook) turn() {
	now, next := b.layers[0], b.layers[1]
	for i := range b.top[1] {
		now[i].pending += next[i].pending
		now[i].left += next[i].left
		now[i].flying += next[i].flying
		next[i] = layerReads{}
	}
	b.top = [2]int{max(b.top[0], b.top[1]), 0}
	for b.top[0] > 0 && now[b.top[0]-1] == (layerReads{}) {
		b.top[0]--
	}
	b.hostLayer, b.hostNext = b.hostNext, noLayer
}

func (b *readBook) queued(layer int, bytes int64, next bool) {
	if layer == noLayer {
		return
	}
	i := 0
	if next {
		i = 1
	}
	b.top[i] = max(b.top[i], layer+1)
	b.layers[i][layer].pending += bytes
	b.layers[i][layer].left += bytes
	b.left += bytes
}

func (b *readBook) issued(layer int, bytes int64) {
	b.flying += bytes
	if layer == noLayer {
		return
	}
	b.layer += bytes
	r := &b.layers[0][layer]
	if r.left-r.flying <= 0 {
		r = &b.layers[1][layer]
	}
	r.flying += bytes
}

// arrived says whether the reads are of a layer of this pass.
func (b *readBook) arrived(layer int, bytes int64) bool {
	b.flying = max(0, b.flying-bytes)
	if layer == noLayer {
		return false
	}
	b.layer = max(0, b.layer-bytes)
	b.left = max(0, b.left-bytes)
	r, this := &b.layers[0][layer], true
	if r.flying <= 0 && b.layers[1][layer].flying > 0 {
		r, this = &b.layers[1][layer], false
	}
	r.flying = max(0, r.flying-bytes)
	r.left = max(0, r.left-bytes)
	return this
}

// ended takes a batch out, whatever of it was issued.
func (b *readBook) ended(layer int, bytes int64) {
	if layer == noLayer {
		return
	}
	r := &b.layers[0][layer]
	if r.pending <= 0 {
		r = &b.layers[1][layer]
	}
	r.pending = max(0, r.pending-bytes)
	if never := r.left - r.pending; never > 0 { // it was given up before all of it was issued
		r.left -= never
		b.left = max(0, b.left-never)
	}
}

// behind is what is in flight behind a layer of this pass.
func (b *readBook) behind(layer int) int64 {
	n := b.layer
	for l := range min(layer+1, b.top[0]) {
		n -= b.layers[0][l].flying
	}
	return n
}

func (b *readBook) awaited(layer int) {
	if layer == noLayer {
		return
	}
	host := &b.hostLayer
	if b.layers[0][layer].pending == 0 && b.layers[1][layer].pending > 0 {
		host = &b.hostNext
	}
	*host = max(*host, layer)
}

package gio

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"tuttifs/cuda"
)

// GPULayerTicket is a layer in flight of a GPU executor.
type GPULayerTicket interface {
	LayerTicket
	// WaitOn is as for GPUTicket.
	WaitOn(s *cuda.Stream) error
}

// GPULayers are Layers whose verbs wait for an event of the engine's: the target's last reader, or the compute that
// produced the source. Nil waits for nothing. The event was recorded before, and stays alive until the ticket's Wait.
type GPULayers interface {
	Layers
	RetrieveLayerAfter(layer uint16, dst []uint64, after *cuda.Event) (GPULayerTicket, error)
	StoreLayerAfter(layer uint16, src []uint64, after *cuda.Event) (GPULayerTicket, error)
}

// gpuLayers is the layer verbs on the GPU: trailers pass by the host, sums are taken and compared by gather and
// harvest.
type gpuLayers struct {
	layerState
	g      *GPU
	pinned *pinned // of sums and seeds
	params cuda.SumsParams

	verified atomic.Bool   // the trailers: harvests wait for their sums
	opened   chan struct{} // closed then
}

// OpenLayers prepares restoring; see Ring.OpenLayers. The Layers are GPULayers. The trailers may be on their way when
// it returns: layers can be asked for already, and Failed waits.
func (g *GPU) OpenLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) {
	release, err := g.hold()
	if err != nil {
		return nil, err
	}
	l, err := g.newLayers(m, rank, slots, false)
	if err != nil {
		release()
		return nil, err
	}
	rest, err := l.open()
	if err != nil {
		l.Close()
		release()
		return nil, err
	}
	go func() {
		defer release()
		rest()
	}()
	return l, nil
}

// CreateLayers prepares storing. The Layers are GPULayers.
func (g *GPU) CreateLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) {
	release, err := g.hold()
	if err != nil {
		return nil, err
	}
	defer release()
	l, err := g.newLayers(m, rank, slots, true)
	if err != nil {
		return nil, err
	}
	l.own()
	return l, nil
}

func (g *GPU) newLayers(m *Map, rank uint16, slots []SlotIO, store bool) (*gpuLayers, error) {
	if err := g.usable(); err != nil {
		return nil, err
	}
	l := &gpuLayers{g: g, opened: make(chan struct{}),
		layerState: layerState{base: &g.base, issue: g.issueTrailers, store: store}}
	return l, l.init(m, rank, slots, l.pin)
}

// issueTrailers is as for Ring. What Close gives back is held.
func (g *GPU) issueTrailers(write bool, m *Map, ctxs []IOCTX) (wait func() ([]Result, error), err error) {
	t, err := g.issueHeld(write, m, ctxs, batchOptions{
		layer: noLayer, quiet: true, deferred: write && g.store != nil,
	})
	if err != nil {
		return nil, err
	}
	return func() ([]Result, error) { return g.wait(t) }, nil
}

// open begins to read the trailers; rest waits for them and verifies them. The first layer's bytes come beside them,
// and its harvest waits until their sums are known. They are issued before any layer, whose chunks might keep all lanes
// and all of the staging until then. What is more than one round would come behind, and is therefore read at once.
func (l *gpuLayers) open() (rest func(), err error) {
	s := l.base.scratchFor(false)
	s.mu.Lock()
	r, err := l.round(s)
	if err != nil || r.most < len(l.slots) || l.g.gpu.Polling {
		s.mu.Unlock()
		if err == nil {
			err = l.layerState.open()
		}
		l.verify()
		return func() {}, err
	}
	r.fill(0, false, nil)
	wait, err := l.issue(false, l.m, r.ctxs)
	if err != nil {
		s.mu.Unlock()
		l.verify()
		return nil, err
	}
	return func() {
		defer l.verify()
		defer s.mu.Unlock()
		failed, err := wait()
		if err == nil {
			r.settle(failed, false, l.verifyTrailer)
			return
		}
		for i := range l.slots {
			l.failSlot(i, err)
		}
	}, nil
}

// verify lets harvests begin.
func (l *gpuLayers) verify() {
	l.verified.Store(true)
	close(l.opened)
	l.g.ring()
}

// Failed has one error (or nil) a slot; see layerState.Failed. It waits for the trailers.
func (l *gpuLayers) Failed() []error {
	if !l.store {
		<-l.opened
	}
	return l.layerState.Failed()
}

// pin makes room for n sums where kernels reach them, and writes the seeds.
func (l *gpuLayers) pin(n int) ([]uint64, error) {
	if n == 0 {
		return nil, nil
	}
	var sums, seeds []uint64
	carveBoth := func(c *carver) {
		sums, l.params.Sums = carve[uint64](c, n)
		seeds, l.params.Seeds = carve[uint64](c, 2*len(l.slots))
	}
	measure := carver{}
	carveBoth(&measure)
	var err error
	if l.pinned, err = l.g.pool.get(l.g, measure.at); err != nil {
		return nil, err
	}
	carveBoth(&carver{host: l.pinned.memory.Bytes, gpu: uint64(l.pinned.memory.GPU)})
	clear(sums)
	for i := range l.slots {
		s := &l.slots[i].Seed
		seeds[2*i], seeds[2*i+1] = binary.LittleEndian.Uint64(s[:8]), binary.LittleEndian.Uint64(s[8:])
	}
	l.params.RankObjs, l.params.Rank = uint32(l.objects), uint32(l.rank)
	return sums, nil
}

// Finish writes the trailers; see layerState.Finish.
func (l *gpuLayers) Finish() error {
	release, err := l.g.hold()
	if err != nil {
		return err
	}
	defer release()
	return l.layerState.Finish()
}

// Close gives the trailers' memory back. Tickets must have been waited for.
func (l *gpuLayers) Close() {
	if !l.store {
		<-l.opened
	}
	l.layerState.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pinned != nil {
		l.g.pool.put(l.pinned)
		l.pinned = nil
	}
}

// gpuLayerTicket is a layer in flight.
type gpuLayerTicket struct {
	layerBatch
	layers *gpuLayers
	ticket *gpuTicket
	zeros  *gpuTicket // targets of slots that had failed before
}

// RetrieveLayer reads the layer's objects of all slots; see ringLayers.RetrieveLayer.
func (l *gpuLayers) RetrieveLayer(layer uint16, dst []uint64) (LayerTicket, error) {
	t, err := l.begin(layer, dst, nil, false)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// StoreLayer writes the layer's objects of all slots and keeps their sums. With a store buffer Wait and WaitOn are for
// their evacuation; what becomes of their writes is told by Finish.
func (l *gpuLayers) StoreLayer(layer uint16, src []uint64) (LayerTicket, error) {
	t, err := l.begin(layer, src, nil, true)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (l *gpuLayers) RetrieveLayerAfter(layer uint16, dst []uint64, after *cuda.Event) (GPULayerTicket, error) {
	t, err := l.begin(layer, dst, after, false)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (l *gpuLayers) StoreLayerAfter(layer uint16, src []uint64, after *cuda.Event) (GPULayerTicket, error) {
	t, err := l.begin(layer, src, after, true)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (l *gpuLayers) begin(layer uint16, desc []uint64, after *cuda.Event, store bool) (*gpuLayerTicket, error) {
	t := &gpuLayerTicket{layers: l}
	batch, ctxs, err := l.prepare(layer, desc, store)
	if err != nil {
		return nil, err
	}
	t.layerBatch = batch
	if !store && len(t.skipped) > 0 {
		if t.zeros, err = l.zero(&t.layerBatch, t.skipped, after); err != nil {
			return nil, err
		}
	}
	ordinals := make([]uint16, len(t.objects))
	for j, object := range t.objects {
		ordinals[j] = uint16(l.m.layout.OrdinalInRank(object))
	}
	t.ticket, err = l.g.issue(store, l.m, ctxs, batchOptions{
		layer: int32(layer), evacuate: store && l.g.store != nil, after: after, active: t.active, ordinals: ordinals,
		sums: &l.params, verified: &l.verified,
	})
	if err != nil {
		if t.zeros != nil {
			_, _ = l.g.wait(t.zeros)
		}
		return nil, err
	}
	if w := t.ticket.writes; w != nil {
		l.defers(&t.layerBatch, 0, w)
	}
	return t, nil
}

// zero has the targets of slots zeroed.
func (l *gpuLayers) zero(b *layerBatch, slots []uint32, after *cuda.Event) (*gpuTicket, error) {
	ctxs := make([]IOCTX, 0, len(slots)*len(b.objects))
	for _, i := range slots {
		ctxs = b.append(ctxs, &l.layerState, i)
	}
	return l.g.issue(false, l.m, ctxs, batchOptions{layer: noLayer, after: after, zeroing: true})
}

// WaitOn makes a stream wait for the layer; see GPUTicket.
func (t *gpuLayerTicket) WaitOn(s *cuda.Stream) error {
	if t.zeros != nil {
		if err := t.zeros.WaitOn(s); err != nil {
			return err
		}
	}
	return t.ticket.WaitOn(s)
}

// Wait completes the layer. Slots that failed are in Failed and zeroed; the error is for the whole: the ring is gone.
func (t *gpuLayerTicket) Wait() error {
	l := t.layers
	results, err := l.g.wait(t.ticket)
	if !l.store {
		<-l.opened // it may have been given up before
	}
	if t.zeros != nil {
		_, zeroed := l.g.wait(t.zeros)
		if err == nil {
			err = zeroed
		}
	}
	l.settle(&t.layerBatch, results, err)
	if l.store {
		return err
	}
	// An object that failed was zeroed at once; its slot's others are now.
	var slots []uint32
	for _, i := range t.active {
		if l.slotError(int(i)) != nil {
			slots = append(slots, i)
		}
	}
	if len(slots) == 0 {
		return err
	}
	zeros, failed := l.zero(&t.layerBatch, slots, nil)
	if failed == nil {
		_, failed = l.g.wait(zeros)
	}
	if err == nil && failed != nil {
		err = fmt.Errorf("gio: failed slots could not be zeroed: %w", failed)
	}
	return err
}

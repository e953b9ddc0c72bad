//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"unsafe"

	"tuttifs/checksum"
	"tuttifs/cuda"
	"tuttifs/engine"
	"tuttifs/gio"
	"tuttifs/stripe"
)

// layers is a batch of leased files and one rank of them, on the way in one direction.
type layers struct {
	gio.Layers
	session *session
	layout  *stripe.Layout
	rank    uint16
	store   bool
	count   int
	memory  *memory // paged, or nil where every layer says where it is
	blocks  []uint64

	mu      sync.Mutex
	flights map[*transfer]bool // begun and not waited for
	closed  bool
}

// transfer is a layer in flight.
type transfer struct {
	layers *layers
	ticket gio.LayerTicket
	once   sync.Once
	err    error
}

// wait completes a transfer, whoever asks for it first.
func (t *transfer) wait() error {
	t.once.Do(func() {
		t.err = t.ticket.Wait()
		t.layers.mu.Lock()
		delete(t.layers.flights, t)
		t.layers.mu.Unlock()
	})
	return t.err
}

// waitOn makes a stream wait for a transfer, or waits itself where the CPU is the executor.
func (t *transfer) waitOn(stream uintptr) error {
	if gpu, ok := t.ticket.(interface{ WaitOn(*cuda.Stream) error }); ok {
		return gpu.WaitOn(t.layers.session.CUDA().StreamFromHandle(stream))
	}
	return t.wait()
}

// drain waits for what is in flight.
func (l *layers) drain() error {
	l.mu.Lock()
	flights := slices.Collect(maps.Keys(l.flights))
	l.mu.Unlock()
	var errs []error
	for _, t := range flights {
		errs = append(errs, t.wait())
	}
	return errors.Join(errs...)
}

// whole waits for what is in flight and returns the first slot's error, if any failed.
func (l *layers) whole() error {
	if err := l.drain(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fmt.Errorf("%w: layers were closed", errHandle)
	}
	for _, err := range l.Failed() {
		if err != nil {
			return err
		}
	}
	return nil
}

// close waits for what is in flight and gives the layers back.
func (l *layers) close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	err := l.drain()
	l.Close()
	return err
}

// slotsOf are the slots of leases that may be used in a direction.
func slotsOf(leases []C.struct_tuttifs_lease, store bool) ([]gio.SlotIO, error) {
	slots := make([]gio.SlotIO, len(leases))
	for i := range leases {
		lease := &leases[i]
		written := lease.status == C.TUTTIFS_LEASE_NEW || lease.status == C.TUTTIFS_LEASE_JOINED
		if store != written || !store && lease.status != C.TUTTIFS_LEASE_PINNED {
			return nil, fmt.Errorf("%w: lease %d has status %d: only pinned files are retrieved, and only new and joined "+
				"ones stored", engine.ErrInvalid, i, uint32(lease.status))
		}
		slots[i] = gio.SlotIO{Slot: uint32(lease.slot), Seed: *(*checksum.Seed)(unsafe.Pointer(&lease.seed))}
	}
	return slots, nil
}

// fits checks that a paged memory has a class of the right length for each of the rank's objects, and the blocks.
func (l *layers) fits(m *memory, blocks []uint64) error {
	objects := l.layout.RankObjects(l.rank)
	if !m.paged() || len(m.classes) < len(objects) {
		return fmt.Errorf("%w: %d classes of paged memory for %d objects of a rank", engine.ErrInvalid, len(m.classes),
			len(objects))
	}
	for c, object := range objects {
		if have, want := m.classes[c].bytes, uint64(l.layout.ObjectBytes(object)); have != want {
			return fmt.Errorf("%w: class %d has %d bytes a block, its object has %d", engine.ErrInvalid, c, have, want)
		}
	}
	for i, b := range blocks {
		if b >= m.blocks {
			return fmt.Errorf("%w: slot %d goes to block %d of %d", engine.ErrInvalid, i, b, m.blocks)
		}
	}
	return nil
}

// openLayers makes the layers of a batch.
func openLayers(p *pool, rank uint16, store bool, slots []gio.SlotIO, m *memory, blocks []uint64) (*layers, error) {
	extents := p.Map()
	l := &layers{session: p.session, layout: extents.Layout(), rank: rank, store: store, count: len(slots), memory: m,
		blocks: blocks, flights: map[*transfer]bool{}}
	if int(rank) >= l.layout.Ranks() {
		return nil, fmt.Errorf("%w: rank %d of a pool with %d", engine.ErrInvalid, rank, l.layout.Ranks())
	}
	if m != nil {
		if m.session != p.session {
			return nil, fmt.Errorf("%w: memory registered with another session", engine.ErrInvalid)
		}
		if err := l.fits(m, blocks); err != nil {
			return nil, err
		}
	}
	open := p.session.Ring().OpenLayers
	if store {
		open = p.session.Ring().CreateLayers
	}
	inner, err := open(extents, rank, slots)
	l.Layers = inner
	return l, err
}

//export goLayersOpen
func goLayersOpen(h C.uintptr_t, rank C.uint16_t, flags C.uint32_t, leases *C.struct_tuttifs_lease, n C.uint64_t,
	mem C.uintptr_t, blocks *C.uint64_t, out *C.uintptr_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		if out == nil {
			return null("layers")
		}
		if flags&^C.TUTTIFS_STORE != 0 {
			return fmt.Errorf("%w: flags %#x of layers", engine.ErrInvalid, uint32(flags))
		}
		list, err := array(leases, n, "leases")
		if err != nil {
			return err
		}
		store := flags&C.TUTTIFS_STORE != 0
		slots, err := slotsOf(list, store)
		if err != nil {
			return err
		}
		var m *memory
		var table []uint64
		if mem != 0 {
			if m, err = find[*memory](uintptr(mem), "registered memory"); err != nil {
				return err
			}
			if table, err = array((*uint64)(unsafe.Pointer(blocks)), n, "blocks"); err != nil {
				return err
			}
			table = append([]uint64(nil), table...)
		} else if blocks != nil {
			return fmt.Errorf("%w: blocks without memory", engine.ErrInvalid)
		}
		l, err := openLayers(p, uint16(rank), store, slots, m, table)
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(l, uintptr(h)))
		return nil
	})
}

// blockDescs are the descriptors of a layer's objects in the batch's blocks.
func (l *layers) blockDescs(layer uint16) []uint64 {
	objects := l.layout.LayerObjects(layer, l.rank)
	desc := make([]uint64, 0, l.count*len(objects))
	for _, block := range l.blocks {
		for _, object := range objects {
			desc = append(desc, l.memory.block(l.layout.OrdinalInRank(object), block))
		}
	}
	return desc
}

// begin begins to move a layer whose objects are at the descriptors.
func (l *layers) begin(layer uint16, desc []uint64, after uintptr) (*transfer, error) {
	// Held until the transfer is among those in flight, so that close finds it.
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("%w: layers were closed", errHandle)
	}
	ticket, err := l.issue(layer, desc, after)
	if err != nil {
		return nil, err
	}
	t := &transfer{layers: l, ticket: ticket}
	l.flights[t] = true
	return t, nil
}

// give begins a transfer and gives its handle to the caller.
func (l *layers) give(h C.uintptr_t, layer uint16, desc []uint64, after C.uintptr_t, out *C.uintptr_t) error {
	t, err := l.begin(layer, desc, uintptr(after))
	if err == nil {
		*out = C.uintptr_t(newHandle(t, uintptr(h)))
	}
	return err
}

// issue hands a layer to the executor, behind an event where there is one.
func (l *layers) issue(layer uint16, desc []uint64, after uintptr) (gio.LayerTicket, error) {
	if after == 0 && l.store {
		return l.StoreLayer(layer, desc)
	} else if after == 0 {
		return l.RetrieveLayer(layer, desc)
	}
	gpu, ok := l.Layers.(gio.GPULayers)
	if !ok {
		return nil, fmt.Errorf("%w: an event of a stream, where the CPU is the executor", errSupport)
	}
	event := l.session.CUDA().EventFromHandle(after)
	var ticket gio.GPULayerTicket
	var err error
	if l.store {
		ticket, err = gpu.StoreLayerAfter(layer, desc, event)
	} else {
		ticket, err = gpu.RetrieveLayerAfter(layer, desc, event)
	}
	if err != nil {
		return nil, err
	}
	return ticket, nil
}

// direction refuses a verb of the other direction.
func (l *layers) direction(flags C.uint32_t) error {
	if l.store != (flags&C.TUTTIFS_STORE != 0) {
		return fmt.Errorf("%w: layers opened for the other direction", engine.ErrInvalid)
	}
	return nil
}

//export goMoveLayer
func goMoveLayer(h C.uintptr_t, flags C.uint32_t, layer C.uint16_t, after C.uintptr_t, out *C.uintptr_t,
	text *C.char) C.int {
	return onLayers(h, text, func(l *layers) error {
		if out == nil {
			return null("transfer")
		}
		if err := l.direction(flags); err != nil {
			return err
		}
		if l.memory == nil {
			return fmt.Errorf("%w: layers opened without memory and blocks: use the _at functions", engine.ErrInvalid)
		}
		return l.give(h, uint16(layer), l.blockDescs(uint16(layer)), after, out)
	})
}

//export goMoveLayerAt
func goMoveLayerAt(h C.uintptr_t, flags C.uint32_t, layer C.uint16_t, mem C.uintptr_t, offsets *C.uint64_t,
	n C.uint64_t, after C.uintptr_t, out *C.uintptr_t, text *C.char) C.int {
	return onLayers(h, text, func(l *layers) error {
		if out == nil {
			return null("transfer")
		}
		if err := l.direction(flags); err != nil {
			return err
		}
		m, err := find[*memory](uintptr(mem), "registered memory")
		if err != nil {
			return err
		}
		at, err := array((*uint64)(unsafe.Pointer(offsets)), n, "offsets")
		if err != nil {
			return err
		}
		if m.paged() || m.session != l.session {
			return fmt.Errorf("%w: paged memory, or another session's: flat memory of this session is wanted",
				engine.ErrInvalid)
		}
		objects := l.layout.LayerObjects(uint16(layer), l.rank)
		if len(at) != l.count*len(objects) {
			return fmt.Errorf("%w: %d offsets for %d slots of %d objects", engine.ErrInvalid, len(at), l.count, len(objects))
		}
		desc := make([]uint64, len(at))
		for i, offset := range at {
			need := uint64(l.layout.ObjectBytes(objects[i%len(objects)]))
			if need > m.bytes || offset > m.bytes-need {
				return fmt.Errorf("%w: offset %d of %d: an object of %d bytes does not fit the memory of %d",
					engine.ErrInvalid, i, offset, need, m.bytes)
			}
			desc[i] = m.whole.Desc(int(offset))
		}
		return l.give(h, uint16(layer), desc, after, out)
	})
}

//export goWaitOn
func goWaitOn(h C.uintptr_t, stream C.uintptr_t, text *C.char) C.int {
	return onTransfer(h, text, func(t *transfer) error { return t.waitOn(uintptr(stream)) })
}

//export goWait
func goWait(h C.uintptr_t, text *C.char) C.int {
	return onTransfer(h, text, func(t *transfer) error {
		if _, err := take[*transfer](uintptr(h), "transfer"); err != nil {
			return err // of several who wait, one has it
		}
		return t.wait()
	})
}

//export goFinish
func goFinish(h C.uintptr_t, text *C.char) C.int {
	return onLayers(h, text, func(l *layers) error { return l.Finish() })
}

//export goFailed
func goFailed(h C.uintptr_t, results *C.int32_t, n C.uint64_t, failed *C.uint64_t, text *C.char) C.int {
	return onLayers(h, text, func(l *layers) error {
		out, err := array(results, n, "codes")
		if err != nil {
			return err
		}
		errs := l.Failed()
		if len(out) != len(errs) {
			return fmt.Errorf("%w: %d codes for %d slots", engine.ErrInvalid, len(out), len(errs))
		}
		count := C.uint64_t(0)
		for i, err := range errs {
			out[i] = C.int32_t(codeOf(err))
			if err == nil {
				continue
			}
			if count++; count == 1 {
				say(text, err)
			}
		}
		if failed != nil {
			*failed = count
		}
		return nil
	})
}

//export goLayersClose
func goLayersClose(h C.uintptr_t, text *C.char) C.int {
	return onLayers(h, text, func(l *layers) error {
		if _, err := take[*layers](uintptr(h), "layers"); err != nil {
			return err
		}
		return l.close()
	})
}

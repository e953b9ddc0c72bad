//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"tuttifs/engine"
)

// keysOf are a caller's keys, 32 bytes each.
func keysOf(p *C.uint8_t, n C.uint64_t) ([]engine.Key, error) {
	return array((*engine.Key)(unsafe.Pointer(p)), n, "keys")
}

// grantMemory is what grants of one call pass by in: a prompt has a thousand, and their memory is used again.
var grantMemory = sync.Pool{New: func() any { return new([]engine.Grant) }}

// giveLeases gives the caller what an engine's verb grants, and how many that are.
func giveLeases(leases []C.struct_tuttifs_lease, count *C.uint64_t, verb func([]engine.Grant) (int, error)) error {
	memory := grantMemory.Get().(*[]engine.Grant)
	defer grantMemory.Put(memory)
	if cap(*memory) < len(leases) {
		*memory = make([]engine.Grant, len(leases))
	}
	grants := (*memory)[:len(leases)]
	granted, err := verb(grants)
	if err != nil {
		return err
	}
	for i := range grants[:granted] {
		g := &grants[i]
		leases[i] = C.struct_tuttifs_lease{slot: C.uint32_t(g.Slot), tokens: C.uint32_t(g.Tokens),
			generation: C.uint64_t(g.Generation), status: C.uint32_t(g.Status)}
		*(*[16]byte)(unsafe.Pointer(&leases[i].seed)) = g.Seed
	}
	*count = C.uint64_t(granted)
	return nil
}

//export goPeek
func goPeek(h C.uintptr_t, tenant C.uint32_t, keys *C.uint8_t, n C.uint64_t, found *C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		k, err := keysOf(keys, n)
		if err != nil {
			return err
		}
		if found == nil {
			return null("found")
		}
		hit, err := p.Peek(uint32(tenant), k)
		if err != nil {
			return err
		}
		*found = C.uint64_t(hit)
		return nil
	})
}

//export goPresent
func goPresent(h C.uintptr_t, tenant C.uint32_t, keys *C.uint8_t, n C.uint64_t, present *C.uint8_t,
	text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		k, err := keysOf(keys, n)
		if err != nil {
			return err
		}
		out, err := array((*bool)(unsafe.Pointer(present)), n, "answers")
		if err != nil {
			return err
		}
		return p.Present(uint32(tenant), k, out)
	})
}

//export goPin
func goPin(h C.uintptr_t, tenant C.uint32_t, request C.uint64_t, keys *C.uint8_t, n C.uint64_t,
	leases *C.struct_tuttifs_lease, pinned *C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		k, err := keysOf(keys, n)
		if err != nil {
			return err
		}
		out, err := array(leases, n, "leases")
		if err != nil {
			return err
		}
		if pinned == nil {
			return null("pinned")
		}
		return giveLeases(out, pinned, func(grants []engine.Grant) (int, error) {
			return p.Pin(uint32(tenant), uint64(request), k, grants)
		})
	})
}

//export goRelease
func goRelease(h C.uintptr_t, request C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error { return p.Release(uint64(request)) })
}

//export goReserve
func goReserve(h C.uintptr_t, tenant C.uint32_t, reserve C.uint64_t, items *C.struct_tuttifs_item, n C.uint64_t,
	flags C.uint32_t, leases *C.struct_tuttifs_lease, granted *C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		in, err := array(items, n, "items")
		if err != nil {
			return err
		}
		out, err := array(leases, n, "leases")
		if err != nil {
			return err
		}
		if granted == nil {
			return null("granted")
		}
		if flags&^C.TUTTIFS_PARTIAL != 0 {
			return fmt.Errorf("%w: flags %#x of a reservation", engine.ErrInvalid, uint32(flags))
		}
		list := make([]engine.Item, len(in))
		for i := range in {
			list[i] = engine.Item{Key: *(*engine.Key)(unsafe.Pointer(&in[i].key)),
				Parent: *(*engine.Key)(unsafe.Pointer(&in[i].parent)),
				Tokens: uint32(in[i].tokens), Position: uint32(in[i].position)}
		}
		return giveLeases(out, granted, func(grants []engine.Grant) (int, error) {
			return p.Reserve(uint32(tenant), uint64(reserve), list, flags&C.TUTTIFS_PARTIAL != 0, grants)
		})
	})
}

// ranksOf are the ranks of a commit.
func ranksOf(p *C.uint16_t, n C.uint64_t) ([]uint16, error) {
	ranks, err := array((*uint16)(unsafe.Pointer(p)), n, "ranks")
	if err == nil && len(ranks) == 0 {
		err = fmt.Errorf("%w: a commit of no rank", engine.ErrInvalid)
	}
	return slices.Clone(ranks), err
}

//export goCommit
func goCommit(h C.uintptr_t, reserve C.uint64_t, ranks *C.uint16_t, n C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		list, err := ranksOf(ranks, n)
		if err != nil {
			return err
		}
		return p.CommitRanks(uint64(reserve), list...)
	})
}

//export goCommitFrom
func goCommitFrom(h C.uintptr_t, reserve C.uint64_t, ranks *C.uint16_t, n C.uint64_t, loads *C.uintptr_t, m C.uint64_t,
	text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		list, err := ranksOf(ranks, n)
		if err != nil {
			return err
		}
		handles, err := array(loads, m, "loads")
		if err != nil {
			return err
		}
		from := make([]*layers, len(handles))
		for i, handle := range handles {
			if from[i], err = find[*layers](uintptr(handle), "load"); err != nil {
				return fmt.Errorf("load %d: %w", i, err)
			}
			if from[i].session != p.session || from[i].store {
				return fmt.Errorf("%w: load %d is another session's, or a store", engine.ErrInvalid, i)
			}
		}
		for _, l := range from {
			if err := l.whole(); err != nil {
				err = fmt.Errorf("given up, and not committed, because a load that it was computed from failed: %w", err)
				if failed := p.Abort(uint64(reserve)); failed != nil && !errors.Is(failed, engine.ErrNotFound) {
					err = fmt.Errorf("%w; and the reservation could not be aborted: %v", err, failed)
				}
				return err
			}
		}
		return p.CommitRanks(uint64(reserve), list...)
	})
}

//export goAbort
func goAbort(h C.uintptr_t, reserve C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error { return p.Abort(uint64(reserve)) })
}

//export goReportBad
func goReportBad(h C.uintptr_t, slot C.uint32_t, generation C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error { return p.ReportBad(uint32(slot), uint64(generation)) })
}

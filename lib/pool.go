//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"tuttifs/engine"
	"tuttifs/stripe"
)

// pool is an open pool.
type pool struct {
	*engine.Pool
	session *session
}

// geometry builds a geometry from flat arrays. Objects with the same runs share them.
func geometry(o *C.struct_tuttifs_pool_options) (g stripe.Geometry, err error) {
	objects, err := array(o.objects, C.uint64_t(o.object_count), "objects")
	if err != nil {
		return g, err
	}
	runs, err := array(o.runs, C.uint64_t(o.run_count), "runs")
	if err != nil {
		return g, err
	}
	if len(objects) > stripe.MaxObjects {
		return g, fmt.Errorf("%w: %d objects, at most %d are possible", engine.ErrInvalid, len(objects), stripe.MaxObjects)
	}
	all := make([]stripe.Run, len(runs))
	for i := range runs {
		if runs[i].kind > math.MaxUint8 {
			return g, fmt.Errorf("%w: run %d is of kind %d", engine.ErrInvalid, i, uint32(runs[i].kind))
		}
		all[i] = stripe.Run{Kind: stripe.RunKind(runs[i].kind), Bytes: uint32(runs[i].bytes)}
	}
	for i := range objects {
		c := &objects[i]
		end := uint64(c.first_run) + uint64(c.run_count)
		if c.run_count == 0 || end > uint64(len(all)) {
			return g, fmt.Errorf("%w: object %d has runs %d to %d of %d", engine.ErrInvalid, i, uint32(c.first_run),
				end, len(all))
		}
		g.Objects = append(g.Objects, stripe.Object{Layer: uint16(c.layer), Rank: uint16(c.rank),
			Runs: all[c.first_run:end:end]})
	}
	return g, nil
}

// poolSpec is what the caller's options say.
func poolSpec(o *C.struct_tuttifs_pool_options) (spec engine.PoolSpec, err error) {
	if o == nil {
		return spec, null("options")
	}
	if err := sized(unsafe.Pointer(o), o.size, unsafe.Sizeof(*o), "tuttifs_pool_options"); err != nil {
		return spec, err
	}
	if o.reserved != [3]C.uint64_t{} || o.keep_bytes > 1<<40 {
		return spec, fmt.Errorf("%w: keep_bytes %d or reserved fields of tuttifs_pool_options", engine.ErrInvalid,
			uint64(o.keep_bytes))
	}
	if o.name == nil || o.identity == nil {
		return spec, null("name or identity")
	}
	spec = engine.PoolSpec{
		Name: C.GoString(o.name), Identity: []byte(C.GoString(o.identity)), TokensPerFile: uint32(o.tokens_per_file),
		MinBytes: uint64(o.min_bytes), MaxBytes: uint64(o.max_bytes), MaxSlots: uint32(o.max_slots),
		TrailingHit: uint32(o.trailing_hit), KeepBytes: int64(o.keep_bytes),
	}
	if o.family != nil {
		spec.Family = C.GoString(o.family)
	}
	spec.Geometry, err = geometry(o)
	return spec, err
}

//export goPoolOpen
func goPoolOpen(h C.uintptr_t, o *C.struct_tuttifs_pool_options, out *C.uintptr_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if out == nil {
			return null("pool")
		}
		spec, err := poolSpec(o)
		if err != nil {
			return err
		}
		p, err := s.OpenPool(spec)
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(&pool{Pool: p, session: s}, uintptr(h)))
		return nil
	})
}

//export goPoolClose
func goPoolClose(h C.uintptr_t, text *C.char) C.int {
	return onPool(h, text, func(_ *pool) error {
		open := madeFrom[*layers](uintptr(h))
		if _, err := take[*pool](uintptr(h), "pool"); err != nil {
			return err
		}
		var errs []error
		for _, l := range open {
			errs = append(errs, l.close())
		}
		return errors.Join(errs...)
	})
}

//export goPoolStats
func goPoolStats(h C.uintptr_t, out *C.struct_tuttifs_pool_stats, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		if out == nil {
			return null("stats")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_pool_stats"); err != nil {
			return err
		}
		a, err := p.Stats()
		if err != nil {
			return err
		}
		*out = C.struct_tuttifs_pool_stats{
			size: out.size, hits: C.uint64_t(a.Hits), misses: C.uint64_t(a.Misses), commits: C.uint64_t(a.Commits),
			aborts: C.uint64_t(a.Aborts), evicted: C.uint64_t(a.Evicted), bad: C.uint64_t(a.Bad),
			files: C.uint64_t(a.Files), slots_used: C.uint64_t(a.SlotsUsed), slots_free: C.uint64_t(a.SlotsFree),
			bytes_used: C.uint64_t(a.BytesUsed), bytes_capacity: C.uint64_t(a.BytesCapacity),
		}
		return nil
	})
}

//export goKeepStats
func goKeepStats(h C.uintptr_t, out *C.struct_tuttifs_keep_stats, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		if out == nil {
			return null("stats")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_keep_stats"); err != nil {
			return err
		}
		k := p.KeepStats()
		*out = C.struct_tuttifs_keep_stats{
			size: out.size, slots: C.uint64_t(k.Slots), blocks: C.uint64_t(k.Blocks), slot_bytes: C.uint64_t(k.SlotBytes),
			declined: C.uint64_t(k.Declined), kept: C.uint64_t(k.Kept), hits: C.uint64_t(k.Hits),
			written: C.uint64_t(k.Written), refused: C.uint64_t(k.Refused), evicted: C.uint64_t(k.Evicted),
			bad: C.uint64_t(k.Bad), failed: C.uint64_t(k.Failed),
		}
		return nil
	})
}

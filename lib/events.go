//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"unsafe"

	"tuttifs/engine"
)

// eventsMost bounds what one call tells, and so what it allocates.
const eventsMost = 4096

//export goEvents
func goEvents(h C.uintptr_t, since *C.uint64_t, events *C.struct_tuttifs_kv_event, count C.uint64_t,
	told, lost *C.uint64_t, text *C.char) C.int {
	return onPool(h, text, func(p *pool) error {
		out, err := array(events, count, "events")
		if err != nil {
			return err
		}
		if since == nil || told == nil || lost == nil {
			return null("since, told or lost")
		}
		list := make([]engine.Event, min(len(out), eventsMost))
		n, next, gone, err := p.Events(uint64(*since), list)
		if err != nil {
			return err
		}
		for i, e := range list[:n] {
			out[i] = C.struct_tuttifs_kv_event{tenant: C.uint32_t(e.Tenant), kind: C.TUTTIFS_KV_STORED}
			if e.Removed {
				out[i].kind = C.TUTTIFS_KV_REMOVED
			}
			*(*engine.Key)(unsafe.Pointer(&out[i].key)) = e.Key
		}
		*since, *told, *lost = C.uint64_t(next), C.uint64_t(n), C.uint64_t(gone)
		return nil
	})
}

//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"fmt"
	"time"
	"unsafe"

	"tuttifs/gio"
)

// onScheduler runs f with a session's scheduler.
func onScheduler(h C.uintptr_t, text *C.char, f func(s *session, sched *gio.Scheduler) error) C.int {
	return onSession(h, text, func(s *session) error { return f(s, s.Scheduler()) })
}

//export goPrefill
func goPrefill(h C.uintptr_t, input, prefix, layers C.uint32_t, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error {
		return sched.Prefill(int(input), int(prefix), int(layers))
	})
}

//export goLayerDone
func goLayerDone(h C.uintptr_t, layer C.uint32_t, after C.uintptr_t, text *C.char) C.int {
	return onScheduler(h, text, func(s *session, _ *gio.Scheduler) error {
		if after == 0 {
			return s.LayerDone(int(layer), nil)
		}
		if s.GPU() == nil {
			return fmt.Errorf("%w: an event of a stream, where the CPU is the executor", errSupport)
		}
		return s.LayerDone(int(layer), s.CUDA().EventFromHandle(uintptr(after)))
	})
}

//export goDecodeStep
func goDecodeStep(h C.uintptr_t, length C.uint32_t, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error { return sched.DecodeStep(int(length)) })
}

//export goEndPass
func goEndPass(h C.uintptr_t, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error {
		sched.EndPass()
		return nil
	})
}

//export goOffer
func goOffer(h C.uintptr_t, input, cached, layers C.uint32_t, out *C.struct_tuttifs_offer, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error {
		if out == nil {
			return null("offer")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_offer"); err != nil {
			return err
		}
		o, err := sched.Offer(int(input), int(cached), int(layers))
		if err != nil {
			return err
		}
		*out = C.struct_tuttifs_offer{size: out.size, load: truth(o.Load), known: truth(o.Known),
			restore_ns: nanos(o.Restore), recompute_ns: nanos(o.Recompute)}
		return nil
	})
}

func truth(b bool) C.uint32_t {
	if b {
		return 1
	}
	return 0
}

func nanos(d time.Duration) C.uint64_t { return C.uint64_t(max(0, d)) }

//export goSchedulerStats
func goSchedulerStats(h C.uintptr_t, out *C.struct_tuttifs_scheduler_stats, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error {
		if out == nil {
			return null("stats")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_scheduler_stats"); err != nil {
			return err
		}
		s := sched.Stats()
		issued := func(c gio.Cause) C.uint64_t { return C.uint64_t(s.Issued[c]) }
		*out = C.struct_tuttifs_scheduler_stats{
			size: out.size, passes: C.uint64_t(s.Passes), layers: C.uint64_t(s.Layers),
			decode_steps: C.uint64_t(s.DecodeSteps), bubbles: C.uint64_t(s.Bubbles), bubble_ns: nanos(s.Bubble),
			first_bubble_ns: nanos(s.FirstBubble), read_hidden_ns: nanos(s.ReadHidden),
			read_exposed_ns: nanos(s.ReadExposed), write_ns: nanos(s.WriteTime),
			deferred_objects: C.uint64_t(s.Deferred), deferred_bytes: C.uint64_t(s.DeferredBytes),
			issued_off_bytes: issued(gio.CauseOff), issued_age_bytes: issued(gio.CauseAge),
			issued_high_bytes: issued(gio.CauseHigh), issued_window_bytes: issued(gio.CauseWindow),
			issued_decode_bytes: issued(gio.CauseDecode), issued_idle_bytes: issued(gio.CauseIdle),
			oldest_age_ns: nanos(s.OldestAge), overruns: C.uint64_t(s.Overruns), beside: C.uint64_t(s.Beside),
			offers: C.uint64_t(s.Offers), offers_refused: C.uint64_t(s.Refused), estimates: C.uint64_t(s.Estimates),
			estimated_ns: nanos(s.Estimated), took_ns: nanos(s.Took), error_ns: nanos(s.EstimateError),
			window_ns: nanos(s.Window), window_factor: C.double(s.WindowFactor), read_factor: C.double(s.ReadFactor),
			write_factor: C.double(s.WriteFactor),
		}
		return nil
	})
}

//export goLayerBubbles
func goLayerBubbles(h C.uintptr_t, out *C.uint64_t, n C.uint64_t, text *C.char) C.int {
	return onScheduler(h, text, func(_ *session, sched *gio.Scheduler) error {
		list, err := array(out, n, "nanoseconds")
		if err != nil {
			return err
		}
		clear(list)
		for layer, t := range sched.LayerBubbles() {
			if layer < len(list) {
				list[layer] = nanos(t)
			}
		}
		return nil
	})
}

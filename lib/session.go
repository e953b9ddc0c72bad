//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tuttifs/engine"
	"tuttifs/gio"
)

// session is an open session. Every call that uses it, or what was made from it, holds it meanwhile, so that nothing is
// unmapped under a call.
type session struct {
	*engine.Session
	mu     sync.RWMutex // held for writing while it is closed
	closed bool
}

//export goOpen
func goOpen(path *C.char, out *C.uintptr_t, text *C.char) C.int {
	return call(text, func() error {
		if path == nil || out == nil {
			return null("path or mount")
		}
		m, err := engine.Open(C.GoString(path))
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(m, 0))
		return nil
	})
}

//export goClose
func goClose(mount C.uintptr_t, text *C.char) C.int {
	return call(text, func() error {
		m, err := take[*engine.Mount](uintptr(mount), "mount")
		if err != nil {
			return err
		}
		return m.Close()
	})
}

// sessionFlags are those that there are.
const sessionFlags = C.TUTTIFS_GPU | C.TUTTIFS_GPU_AUTO | C.TUTTIFS_POLLING | C.TUTTIFS_STORE_REFUSE |
	C.TUTTIFS_NO_SCHEDULER | C.TUTTIFS_NO_BUDGET | C.TUTTIFS_READS_NOT_FIRST | C.TUTTIFS_ANY_SLACK_TABLE | C.TUTTIFS_REAL

// gpuFlags are those that mean something with a GPU only.
const gpuFlags = C.TUTTIFS_GPU_AUTO | C.TUTTIFS_POLLING

// cpuBounceBytes lets any host memory be registered with the CPU executor.
const cpuBounceBytes = 64 << 20

// sessionOptions are the caller's, or the defaults.
func sessionOptions(o *C.struct_tuttifs_session_options) (engine.SessionOptions, error) {
	if o == nil {
		return engine.SessionOptions{BounceBytes: cpuBounceBytes}, nil
	}
	var e engine.SessionOptions
	if err := sized(unsafe.Pointer(o), o.size, unsafe.Sizeof(*o), "tuttifs_session_options"); err != nil {
		return e, err
	}
	if o.flags&^sessionFlags != 0 || o.reserved != [1]C.uint64_t{} {
		return e, fmt.Errorf("%w: unknown flags %#x or reserved fields of tuttifs_session_options",
			engine.ErrInvalid, uint32(o.flags))
	}
	if o.flags&C.TUTTIFS_GPU == 0 && (o.flags&gpuFlags != 0 || o.device != nil || o.staging_bytes != 0) {
		return e, fmt.Errorf("%w: a device, staging memory or flags for a GPU, without TUTTIFS_GPU", engine.ErrInvalid)
	}
	for _, n := range []C.uint64_t{o.dma_bytes, o.bounce_bytes, o.staging_bytes, o.arena_bytes, C.uint64_t(o.lanes),
		C.uint64_t(o.depth), C.uint64_t(o.chunk_commands), o.store_bytes, o.keep_bytes} {
		if n > 1<<40 {
			return e, fmt.Errorf("%w: %d in tuttifs_session_options", engine.ErrInvalid, uint64(n))
		}
	}
	e = engine.SessionOptions{
		Lanes: int(o.lanes), Depth: int(o.depth), DMABytes: int(o.dma_bytes), BounceBytes: int(o.bounce_bytes),
		ArenaBytes: int(o.arena_bytes), ChunkCommands: int(o.chunk_commands),
		Deadline: time.Duration(o.deadline_ms) * time.Millisecond, StoreBytes: int(o.store_bytes),
		KeepBytes: int(o.keep_bytes),
	}
	e.Scheduler = engine.SchedulerOptions{Off: o.flags&C.TUTTIFS_NO_SCHEDULER != 0,
		NoBudget: o.flags&C.TUTTIFS_NO_BUDGET != 0, ReadsNotFirst: o.flags&C.TUTTIFS_READS_NOT_FIRST != 0,
		AnyTable: o.flags&C.TUTTIFS_ANY_SLACK_TABLE != 0}
	if o.slack_table != nil {
		e.Scheduler.Table = C.GoString(o.slack_table)
	}
	e.Real = o.flags&C.TUTTIFS_REAL != 0
	if o.flags&C.TUTTIFS_STORE_REFUSE != 0 {
		e.StorePolicy = gio.StoreRefuse
	}
	if o.flags&C.TUTTIFS_GPU != 0 {
		e.GPU = &engine.GPUOptions{StagingBytes: int(o.staging_bytes), Auto: o.flags&C.TUTTIFS_GPU_AUTO != 0,
			Polling: o.flags&C.TUTTIFS_POLLING != 0}
		if o.device != nil {
			e.GPU.Device = C.GoString(o.device)
		}
	} else if e.BounceBytes == 0 {
		e.BounceBytes = cpuBounceBytes
	}
	return e, nil
}

// enter makes or joins a session.
func enter(mount C.uintptr_t, o *C.struct_tuttifs_session_options, out *C.uintptr_t,
	f func(*engine.Mount, engine.SessionOptions) (*engine.Session, error)) error {
	m, err := find[*engine.Mount](uintptr(mount), "mount")
	if err != nil {
		return err
	}
	if out == nil {
		return null("session")
	}
	options, err := sessionOptions(o)
	if err != nil {
		return err
	}
	s, err := f(m, options)
	if err != nil {
		return err
	}
	*out = C.uintptr_t(newHandle(&session{Session: s}, 0))
	return nil
}

//export goSessionCreate
func goSessionCreate(mount C.uintptr_t, o *C.struct_tuttifs_session_options, out *C.uintptr_t, text *C.char) C.int {
	return call(text, func() error { return enter(mount, o, out, (*engine.Mount).NewSession) })
}

//export goSessionJoin
func goSessionJoin(mount C.uintptr_t, token *C.uint8_t, o *C.struct_tuttifs_session_options, out *C.uintptr_t,
	text *C.char) C.int {
	return call(text, func() error {
		if token == nil {
			return null("token")
		}
		join := func(m *engine.Mount, options engine.SessionOptions) (*engine.Session, error) {
			return m.JoinSession(*(*[16]byte)(unsafe.Pointer(token)), options)
		}
		return enter(mount, o, out, join)
	})
}

//export goSessionToken
func goSessionToken(h C.uintptr_t, token *C.uint8_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if token == nil {
			return null("token")
		}
		*(*[16]byte)(unsafe.Pointer(token)) = s.Token()
		return nil
	})
}

//export goSessionDescribe
func goSessionDescribe(h C.uintptr_t, about *C.char, n C.uint64_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if about == nil || n == 0 {
			return null("text, or its room,")
		}
		b := unsafe.Slice((*byte)(unsafe.Pointer(about)), min(uint64(n), countMax))
		b[copy(b[:len(b)-1], s.Describe())] = 0
		return nil
	})
}

//export goSessionDMA
func goSessionDMA(h C.uintptr_t, memory *C.uintptr_t, n *C.uint64_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if memory == nil || n == nil {
			return null("memory or bytes")
		}
		dma := s.DMA()
		*memory, *n = C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(dma)))), C.uint64_t(len(dma))
		return nil
	})
}

//export goSessionStats
func goSessionStats(h C.uintptr_t, out *C.struct_tuttifs_session_stats, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if out == nil {
			return null("stats")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_session_stats"); err != nil {
			return err
		}
		stats := C.struct_tuttifs_session_stats{size: out.size, lanes: C.uint32_t(s.Ring().Alive())}
		if gpu := s.GPU(); gpu != nil {
			g := gpu.Stats()
			stats.gpu = 1
			stats.commands, stats.chunks = C.uint64_t(g.Commands), C.uint64_t(g.Chunks)
			stats.bytes_read, stats.bytes_written = C.uint64_t(g.ReadBytes), C.uint64_t(g.WrittenBytes)
			stats.builds, stats.harvests, stats.gathers = C.uint64_t(g.Builds), C.uint64_t(g.Harvests), C.uint64_t(g.Gathers)
			stats.checksum_failures, stats.timeouts = C.uint64_t(g.Checksums), C.uint64_t(g.Timeouts)
			stats.io_thread_ns, stats.device_bytes = C.uint64_t(g.CPUNanos), C.uint64_t(g.DeviceBytes)
		}
		*out = stats
		return nil
	})
}

//export goStoreStats
func goStoreStats(h C.uintptr_t, out *C.struct_tuttifs_store_stats, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if out == nil {
			return null("stats")
		}
		if err := sized(unsafe.Pointer(out), out.size, unsafe.Sizeof(*out), "tuttifs_store_stats"); err != nil {
			return err
		}
		b := s.Ring().StoreStats()
		*out = C.struct_tuttifs_store_stats{
			size: out.size, refuse: C.uint32_t(b.Policy), bytes: C.uint64_t(b.Size), fill: C.uint64_t(b.Fill),
			peak: C.uint64_t(b.Peak), objects: C.uint64_t(b.Objects), object_bytes: C.uint64_t(b.Bytes),
			oldest_ns: C.uint64_t(b.OldestNanos), stored_objects: C.uint64_t(b.StoredObjects),
			stored_bytes: C.uint64_t(b.StoredBytes), refused: C.uint64_t(b.Refused), blocked_ns: C.uint64_t(b.BlockedNanos),
		}
		return nil
	})
}

//export goSessionClose
func goSessionClose(h C.uintptr_t, text *C.char) C.int {
	return call(text, func() error {
		s, err := take[*session](uintptr(h), "session")
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.closed = true
		return s.Close()
	})
}

// gpu is the session's GPU executor, or why it has none.
func (s *session) gpu() (*gio.GPU, error) {
	if g := s.GPU(); g != nil {
		return g, nil
	}
	return nil, fmt.Errorf("%w: the CPU is the executor of this session: %s", errSupport, s.Describe())
}

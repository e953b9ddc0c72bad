//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"tuttifs/cuda"
	"tuttifs/engine"
	"tuttifs/gio"
	"tuttifs/stripe"
)

// memory is registered memory: one flat range, or the blocks of a paged pool.
type memory struct {
	session *session
	whole   *gio.Memory // flat, or paged on a GPU
	bytes   uint64      // of flat memory
	classes []class     // paged
	blocks  uint64

	ending sync.Mutex // held by whoever gives it back
}

// class of a paged pool.
type class struct {
	bytes  uint64 // of one block, all runs
	host   *gio.Memory
	stride uint64 // of host
}

// paged says whether the memory has blocks.
func (m *memory) paged() bool { return m.classes != nil }

// block is the descriptor of a class's bytes in a block.
func (m *memory) block(c int, block uint64) uint64 {
	switch host := m.classes[c].host; {
	case host != nil:
		return host.Desc(int(block * m.classes[c].stride))
	case m.whole == nil:
		return 0 // an unregister gave a part back and is to be tried again: no region has the number 0
	}
	return m.whole.Block(c, block)
}

// registrations are those that the executor knows of.
func (m *memory) registrations() (list []*gio.Memory) {
	if m.whole != nil {
		list = append(list, m.whole)
	}
	for i := range m.classes {
		if m.classes[i].host != nil {
			list = append(list, m.classes[i].host)
		}
	}
	return list
}

// unregister gives everything back that nothing uses; it may be tried again.
func (m *memory) unregister() error {
	var errs []error
	ring := m.session.Ring()
	if m.whole != nil {
		return ring.Unregister(m.whole)
	}
	for i := range m.classes {
		if c := &m.classes[i]; c.host != nil {
			if err := ring.Unregister(c.host); err != nil {
				errs = append(errs, err)
			} else {
				c.host = nil
			}
		}
	}
	return errors.Join(errs...)
}

// hostBytes is memory of the caller's as Go sees it.
func hostBytes(p unsafe.Pointer, n uint64) ([]byte, error) {
	switch {
	case p == nil:
		return nil, null("memory")
	case n == 0 || n > math.MaxInt64/2:
		return nil, fmt.Errorf("%w: %d bytes of memory", engine.ErrInvalid, n)
	}
	return unsafe.Slice((*byte)(p), int(n)), nil
}

//export goRegisterHost
func goRegisterHost(h C.uintptr_t, p unsafe.Pointer, n C.uint64_t, flags C.uint32_t, out *C.uintptr_t,
	text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		b, err := hostBytes(p, uint64(n))
		if err != nil {
			return err
		}
		if out == nil {
			return null("registered")
		}
		register := s.Ring().Register
		switch {
		case flags == C.TUTTIFS_PADDED:
			register = s.Ring().RegisterPadded
		case flags != 0:
			return fmt.Errorf("%w: flags %#x of host memory", engine.ErrInvalid, uint32(flags))
		}
		m, err := register(b)
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(&memory{session: s, whole: m, bytes: uint64(n)}, uintptr(h)))
		return nil
	})
}

//export goRegisterDevice
func goRegisterDevice(h C.uintptr_t, p, n C.uint64_t, out *C.uintptr_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if out == nil {
			return null("registered")
		}
		gpu, err := s.gpu()
		if err != nil {
			return err
		}
		if p == 0 || n == 0 {
			return fmt.Errorf("%w: %d bytes of device memory at %#x", engine.ErrInvalid, uint64(n), uint64(p))
		}
		m, err := gpu.RegisterDevice(cuda.Pointer(p), uint64(n))
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(&memory{session: s, whole: m, bytes: uint64(n)}, uintptr(h)))
		return nil
	})
}

// pagedRuns are a caller's runs by class, checked.
func pagedRuns(p *C.struct_tuttifs_paged) ([][]cuda.StridedRun, error) {
	if p == nil {
		return nil, null("paged")
	}
	if err := sized(unsafe.Pointer(p), p.size, unsafe.Sizeof(*p), "tuttifs_paged"); err != nil {
		return nil, err
	}
	if p.reserved0 != 0 || p.reserved != [4]C.uint64_t{} {
		return nil, fmt.Errorf("%w: reserved fields of tuttifs_paged", engine.ErrInvalid)
	}
	per := int(p.runs_per_class)
	if p.classes == 0 || p.classes > stripe.MaxObjects || per == 0 || per > stripe.MaxRuns || p.blocks == 0 ||
		p.blocks > math.MaxUint32 {
		return nil, fmt.Errorf("%w: %d classes of %d runs in %d blocks", engine.ErrInvalid, uint32(p.classes), per,
			uint64(p.blocks))
	}
	runs, err := array(p.runs, C.uint64_t(p.classes)*C.uint64_t(per), "runs")
	if err != nil {
		return nil, err
	}
	list := make([][]cuda.StridedRun, p.classes)
	last := uint64(p.blocks) - 1
	for i := range runs {
		base, stride, n := uint64(runs[i].base), uint64(runs[i].stride), uint64(runs[i].bytes)
		const top = 1 << 62 // no address, nor the sum of two, is as high
		if base == 0 || n == 0 || n > math.MaxUint32 || base > top || stride > top/(last+1) || last*stride+n > top {
			return nil, fmt.Errorf("%w: run %d of class %d: %d bytes at %#x, stride %d", engine.ErrInvalid, i%per, i/per,
				n, base, stride)
		}
		list[i/per] = append(list[i/per], cuda.StridedRun{Base: base, Stride: stride, Bytes: uint32(n)})
	}
	return list, nil
}

// registerPaged registers a paged pool with the session's executor.
func registerPaged(s *session, runs [][]cuda.StridedRun, blocks uint64) (*memory, error) {
	m := &memory{session: s, classes: make([]class, len(runs)), blocks: blocks}
	for i := range runs {
		for j := range runs[i] {
			m.classes[i].bytes += uint64(runs[i][j].Bytes)
		}
	}
	if gpu := s.GPU(); gpu != nil {
		whole, err := gpu.RegisterPaged(gio.Paged{Blocks: blocks, Classes: runs})
		m.whole = whole
		return m, err
	}
	if len(runs[0]) != 1 {
		return nil, fmt.Errorf("%w: %d runs a class: the CPU executor takes one", errSupport, len(runs[0]))
	}
	for i := range runs {
		r := &runs[i][0]
		n := r.Stride*(blocks-1) + uint64(r.Bytes)
		// The address is the caller's, so of no memory that Go moves or frees.
		base := *(*unsafe.Pointer)(unsafe.Pointer(&r.Base))
		host, err := s.Ring().Register(unsafe.Slice((*byte)(base), int(n)))
		if err != nil {
			return nil, errors.Join(err, m.unregister())
		}
		m.classes[i].host, m.classes[i].stride = host, r.Stride
	}
	return m, nil
}

//export goRegisterPaged
func goRegisterPaged(h C.uintptr_t, p *C.struct_tuttifs_paged, out *C.uintptr_t, text *C.char) C.int {
	return onSession(h, text, func(s *session) error {
		if out == nil {
			return null("registered")
		}
		runs, err := pagedRuns(p)
		if err != nil {
			return err
		}
		m, err := registerPaged(s, runs, uint64(p.blocks))
		if err != nil {
			return err
		}
		*out = C.uintptr_t(newHandle(m, uintptr(h)))
		return nil
	})
}

//export goMemoryCost
func goMemoryCost(h C.uintptr_t, n *C.uint64_t, text *C.char) C.int {
	return onMemory(h, text, func(m *memory) error {
		if n == nil {
			return null("bytes")
		}
		*n = 0
		for _, r := range m.registrations() {
			*n += C.uint64_t(r.DeviceBytes())
		}
		return nil
	})
}

//export goUnregister
func goUnregister(h C.uintptr_t, text *C.char) C.int {
	return onMemory(h, text, func(m *memory) error {
		m.ending.Lock()
		defer m.ending.Unlock()
		if _, err := find[*memory](uintptr(h), "registered memory"); err != nil {
			return err // somebody else was first
		}
		if err := m.unregister(); err != nil {
			return err // the handle stays: it can be tried again
		}
		_, err := take[*memory](uintptr(h), "registered memory")
		return err
	})
}

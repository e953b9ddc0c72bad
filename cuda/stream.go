package cuda

import (
	"fmt"
	"sync"
	"unsafe"
)

// Stream is a queue of work. What is enqueued runs in order; streams run beside each other. It may be used by several
// goroutines at once.
type Stream struct {
	context *Context
	handle  uintptr
	owned   bool
	mu      sync.Mutex     // guards params
	params  unsafe.Pointer // of the launch that is being made: the driver wants the address of the address
}

// NewStream makes a stream that does not wait for the default stream; in a green context, of its SMs. A lower number is
// a higher priority (StreamPriorities).
func (c *Context) NewStream(priority int) (*Stream, error) {
	h := new(uintptr)
	if c.green != 0 {
		if r := c.api().GreenCtxStreamCreate(h, c.green, streamNonBlocking, int32(priority)); r != Success {
			return nil, c.failed(r, "cuGreenCtxStreamCreate")
		}
	} else if r := c.api().StreamCreateWithPriority(h, streamNonBlocking, int32(priority)); r != Success {
		return nil, c.failed(r, "cuStreamCreateWithPriority")
	}
	return &Stream{context: c, handle: *h, owned: true}, nil
}

// StreamFromHandle is a stream of somebody else's (CUstream), whose Close does nothing.
func (c *Context) StreamFromHandle(h uintptr) *Stream { return &Stream{context: c, handle: h} }

// Handle is the CUstream.
func (s *Stream) Handle() uintptr { return s.handle }

// Close destroys the stream when its work is done; it does not wait for that.
func (s *Stream) Close() error {
	if !s.owned {
		return nil
	}
	if r := s.context.api().StreamDestroy(s.handle); r != Success {
		return s.context.failed(r, "cuStreamDestroy")
	}
	return nil
}

// Launch runs a kernel of one parameter, a struct of which params is the address, or of none with nil. The driver
// copies the struct before Launch returns.
func (s *Stream) Launch(f *Function, grid, block, sharedBytes uint32, params unsafe.Pointer) error {
	s.mu.Lock()
	s.params = params
	r := s.context.api().LaunchKernel(f.handle, grid, 1, 1, block, 1, 1, sharedBytes, s.handle, &s.params)
	s.params = nil
	s.mu.Unlock()
	if r != Success {
		return s.context.failed(r, "cuLaunchKernel %s of %d blocks of %d threads", f.name, grid, block)
	}
	return nil
}

// CopyHtoD copies from pinned or registered host memory.
func (s *Stream) CopyHtoD(dst Pointer, src unsafe.Pointer, n uint64) error {
	if r := s.context.api().MemcpyHtoDAsync(dst, src, n, s.handle); r != Success {
		return s.context.failed(r, "cuMemcpyHtoDAsync of %d bytes to %#x", n, uint64(dst))
	}
	return nil
}

// CopyDtoH copies to pinned or registered host memory.
func (s *Stream) CopyDtoH(dst unsafe.Pointer, src Pointer, n uint64) error {
	if r := s.context.api().MemcpyDtoHAsync(dst, src, n, s.handle); r != Success {
		return s.context.failed(r, "cuMemcpyDtoHAsync of %d bytes from %#x", n, uint64(src))
	}
	return nil
}

// CopyDtoD copies within device memory.
func (s *Stream) CopyDtoD(dst, src Pointer, n uint64) error {
	if r := s.context.api().MemcpyDtoDAsync(dst, src, n, s.handle); r != Success {
		return s.context.failed(r, "cuMemcpyDtoDAsync of %d bytes from %#x to %#x", n, uint64(src), uint64(dst))
	}
	return nil
}

// Memset fills memory with a byte.
func (s *Stream) Memset(p Pointer, v byte, n uint64) error {
	if r := s.context.api().MemsetD8Async(p, v, n, s.handle); r != Success {
		return s.context.failed(r, "cuMemsetD8Async of %d bytes at %#x", n, uint64(p))
	}
	return nil
}

// CopyBatch makes many copies in one call, in any order among themselves. Host memory goes by the address that the CPU
// knows it by.
func (s *Stream) CopyBatch(dst, src []Pointer, sizes []uint64) error {
	if len(dst) != len(src) || len(dst) != len(sizes) {
		return fmt.Errorf("cuda: a batch of %d destinations, %d sources and %d sizes", len(dst), len(src), len(sizes))
	}
	if len(dst) == 0 {
		return nil
	}
	d := s.context.device.driver
	r := d.api.MemcpyBatchAsync(&dst[0], &src[0], &sizes[0], uint64(len(dst)), &d.batchAttributes, &d.batchFirst, 1,
		s.handle)
	if r != Success {
		return s.context.failed(r, "cuMemcpyBatchAsync of %d copies", len(dst))
	}
	return nil
}

// WaitEvent makes what is enqueued from now on wait for what the event recorded last.
func (s *Stream) WaitEvent(e *Event) error {
	if r := s.context.api().StreamWaitEvent(s.handle, e.handle, 0); r != Success {
		return s.context.failed(r, "cuStreamWaitEvent")
	}
	return nil
}

// Synchronize waits for all that is enqueued. An error may be that of any work of the context.
func (s *Stream) Synchronize() error {
	if r := s.context.api().StreamSynchronize(s.handle); r != Success {
		return s.context.failed(r, "cuStreamSynchronize")
	}
	return nil
}

// Query says whether all that is enqueued is done.
func (s *Stream) Query() (done bool, err error) {
	switch r := s.context.api().StreamQuery(s.handle); r {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	default:
		return false, s.context.failed(r, "cuStreamQuery")
	}
}

// WaitValue32 makes the stream wait until the word at p equals v, or with geq until word-v, as a signed number, is not
// negative.
func (s *Stream) WaitValue32(p Pointer, v uint32, geq bool) error {
	flags := uint32(waitValueEQ)
	if geq {
		flags = waitValueGEQ
	}
	if r := s.context.api().StreamWaitValue32(s.handle, p, v, flags); r != Success {
		return s.context.failed(r, "cuStreamWaitValue32 at %#x", uint64(p))
	}
	return nil
}

// WriteValue32 writes a word in the stream's order, after the writes that came before.
func (s *Stream) WriteValue32(p Pointer, v uint32) error {
	if r := s.context.api().StreamWriteValue32(s.handle, p, v, 0); r != Success {
		return s.context.failed(r, "cuStreamWriteValue32 at %#x", uint64(p))
	}
	return nil
}

// Event is a place in a stream.
type Event struct {
	context *Context
	handle  uintptr
}

// NewEvent makes an event, which is cheaper without timing.
func (c *Context) NewEvent(timing bool) (*Event, error) {
	h, flags := new(uintptr), uint32(eventDisableTiming)
	if timing {
		flags = 0
	}
	if r := c.api().EventCreate(h, flags); r != Success {
		return nil, c.failed(r, "cuEventCreate")
	}
	return &Event{c, *h}, nil
}

// EventFromHandle is an event of the engine's own, which stays the engine's to close.
func (c *Context) EventFromHandle(h uintptr) *Event { return &Event{c, h} }

// Handle is what the driver calls the event.
func (e *Event) Handle() uintptr { return e.handle }

// Record makes the event mean all that is enqueued in the stream now.
func (e *Event) Record(s *Stream) error {
	if r := e.context.api().EventRecord(e.handle, s.handle); r != Success {
		return e.context.failed(r, "cuEventRecord")
	}
	return nil
}

// Query says whether all of the last record is done. An event that never was recorded is done.
func (e *Event) Query() (done bool, err error) {
	switch r := e.context.api().EventQuery(e.handle); r {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	default:
		return false, e.context.failed(r, "cuEventQuery")
	}
}

// Synchronize waits, spinning, for the last record.
func (e *Event) Synchronize() error {
	if r := e.context.api().EventSynchronize(e.handle); r != Success {
		return e.context.failed(r, "cuEventSynchronize")
	}
	return nil
}

// Elapsed is the time between two events with timing, both of which are done.
func (e *Event) Elapsed(since *Event) (milliseconds float32, err error) {
	v := new(float32)
	if r := e.context.api().EventElapsedTime(v, since.handle, e.handle); r != Success {
		return 0, e.context.failed(r, "cuEventElapsedTime")
	}
	return *v, nil
}

// Close gives the event back; waits for it that are enqueued stay.
func (e *Event) Close() error {
	if r := e.context.api().EventDestroy(e.handle); r != Success {
		return e.context.failed(r, "cuEventDestroy")
	}
	return nil
}

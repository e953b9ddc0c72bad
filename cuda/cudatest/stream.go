package cudatest

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/cuda"
)

// stream runs operations one after another on a goroutine of its own.
type stream struct {
	handle  uintptr
	context *context

	mu      sync.Mutex
	changed sync.Cond
	queue   []operation
	running bool
	ended   bool // no more operations; the goroutine ends when those that are there are done
}

type operation struct {
	name string // of the function, or kernel; empty for what only marks a place
	run  func() cuda.Result
	mark *mark
}

// mark is a place in a stream.
type mark struct {
	done chan struct{}
	at   time.Time // when done is closed
}

// newStream makes a stream that is in no table. The lock is held.
func (f *Fake) newStream(c *context) *stream {
	s := &stream{handle: f.handle(), context: c}
	s.changed.L = &s.mu
	f.running.Go(func() { f.serve(s) })
	return s
}

func (s *stream) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.changed.Signal()
}

func (s *stream) enqueue(o operation) {
	s.mu.Lock()
	s.queue = append(s.queue, o)
	s.mu.Unlock()
	s.changed.Signal()
}

// mark marks the end of what is enqueued.
func (s *stream) mark(name string) *mark {
	m := &mark{done: make(chan struct{})}
	s.enqueue(operation{name: name, mark: m})
	return m
}

// next waits for an operation.
func (s *stream) next() (operation, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	for len(s.queue) == 0 {
		if s.ended {
			return operation{}, false
		}
		s.changed.Wait()
	}
	o := s.queue[0]
	s.queue = s.queue[1:]
	s.running = true
	return o, true
}

func (f *Fake) serve(s *stream) {
	debug.SetPanicOnFault(true)
	for {
		o, ok := s.next()
		if !ok {
			return
		}
		if r := f.perform(s, o); r != cuda.Success {
			f.Break(r)
		}
		if o.mark != nil {
			s.mu.Lock()
			s.running = false // whom the mark wakes finds the stream at rest, if nothing follows
			s.mu.Unlock()
			o.mark.at = time.Now()
			close(o.mark.done)
		}
	}
}

// perform runs an operation. After a failure no more are run.
func (f *Fake) perform(s *stream, o operation) (r cuda.Result) {
	f.mu.Lock()
	hook, broken, pause := f.before, f.broken, time.Duration(0)
	if f.config.Jitter > 0 && o.name != "" {
		pause = time.Duration(f.random.Int64N(int64(f.config.Jitter)))
	}
	f.mu.Unlock()
	if broken != cuda.Success {
		return broken
	}
	time.Sleep(pause)
	if hook != nil && o.name != "" {
		if r := hook(s.handle, o.name); r != cuda.Success {
			return r
		}
	}
	if o.run == nil {
		return cuda.Success
	}
	defer func() {
		if x := recover(); x != nil {
			f.mu.Lock()
			f.misused("%s: %v\n%s", o.name, x, debug.Stack())
			f.mu.Unlock()
			r = cuda.ErrLaunchFailed
			if _, address := x.(interface{ Addr() uintptr }); address {
				r = cuda.ErrIllegalAddress
			}
		}
	}()
	return o.run()
}

// marks marks the ends of all streams that are meant. The lock is held.
func (f *Fake) marks(meant func(*stream) bool) []*mark {
	var all []*mark
	for _, s := range f.streams {
		if meant(s) {
			all = append(all, s.mark(""))
		}
	}
	for _, c := range f.contexts {
		if meant(c.fallback) {
			all = append(all, c.fallback.mark(""))
		}
	}
	return all
}

// await waits until all is done. The lock is not held.
func (f *Fake) await(marks []*mark) cuda.Result {
	for _, m := range marks {
		select {
		case <-m.done:
		case <-f.quit:
		}
	}
	return f.Broken()
}

// addStream makes a stream for a caller.
func (f *Fake) addStream(h *uintptr, c *context, flags uint32) cuda.Result {
	if flags != 1 {
		f.misused("a stream that waits for the default stream")
		return cuda.ErrInvalidValue
	}
	s := f.newStream(c)
	f.streams[s.handle], *h = s, s.handle
	return cuda.Success
}

func (f *Fake) streamCreate(h *uintptr, flags uint32, _ int32) cuda.Result {
	c, r := f.enterBound("StreamCreateWithPriority")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	return f.addStream(h, c, flags)
}

// enterStream begins a call that concerns a stream, of the device that the thread's context is of.
func (f *Fake) enterStream(function string, h uintptr) (*stream, cuda.Result) {
	c, r := f.enterBound(function)
	if r != cuda.Success {
		return nil, r
	}
	s := f.streams[h]
	if h <= 2 { // the default stream by its three names
		s = c.fallback
	}
	if s == nil {
		f.misused("cu%s in a stream that is not there", function)
		return nil, cuda.ErrInvalidHandle
	}
	if s.context.device != c.device {
		f.misused("cu%s in a stream of device %d on a thread of device %d", function, s.context.device, c.device)
		return nil, cuda.ErrInvalidHandle
	}
	return s, cuda.Success
}

func (f *Fake) streamDestroy(h uintptr) cuda.Result {
	s, r := f.enterStream("StreamDestroy", h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if f.streams[h] == nil {
		f.misused("cuStreamDestroy of the default stream")
		return cuda.ErrInvalidHandle
	}
	delete(f.streams, h)
	s.end()
	return cuda.Success
}

func (f *Fake) streamSynchronize(h uintptr) cuda.Result {
	s, r := f.enterStream("StreamSynchronize", h)
	if r != cuda.Success {
		f.mu.Unlock()
		return r
	}
	m := s.mark("")
	f.mu.Unlock()
	return f.await([]*mark{m})
}

func (f *Fake) streamQuery(h uintptr) cuda.Result {
	s, r := f.enterStream("StreamQuery", h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || len(s.queue) != 0 {
		return cuda.ErrNotReady
	}
	return cuda.Success
}

// place is the region of an operation's bytes, of the kinds that it takes. The lock is held.
func (f *Fake) place(function string, address, n uint64, host, dev bool) bool {
	x := f.regions.find(address, n)
	switch {
	case x == nil:
		f.misused("cu%s of %d bytes at %#x: not within memory that lives and is registered", function, n, address)
		return false
	case x.kind == pinned || x.kind == registered:
		if !host {
			f.misused("cu%s: %#x is the host's", function, address)
		}
		return host
	}
	if !dev {
		f.misused("cu%s: %#x is the device's", function, address)
	}
	return dev
}

// moveBytes copies as hardware does, behind the back of the race detector (copy would tell it). Source and target are
// apart.
//
//go:norace
func moveBytes(dst, src unsafe.Pointer, n uint64) {
	const block = 4096
	i := uint64(0)
	for ; i+block <= n; i += block {
		*(*[block]byte)(unsafe.Add(dst, i)) = *(*[block]byte)(unsafe.Add(src, i))
	}
	for ; i < n; i++ {
		*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
	}
}

//go:norace
func setBytes(address uint64, v uint8, n uint64) {
	b := unsafe.Slice((*byte)(pointer(address)), n)
	for i := range b {
		b[i] = v
	}
}

// alive is whether memory still is what it was when the operation was enqueued.
func (f *Fake) alive(function string, address, n uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.regions.find(address, n) == nil {
		f.misused("cu%s: %d bytes at %#x were freed before it ran", function, n, address)
		return false
	}
	return true
}

func (f *Fake) copyAlive(function string, dst, src, n uint64) cuda.Result {
	if !f.alive(function, dst, n) || !f.alive(function, src, n) {
		return cuda.ErrIllegalAddress
	}
	moveBytes(pointer(dst), pointer(src), n)
	return cuda.Success
}

// transfer enqueues a copy between memory of the kinds that are given.
func (f *Fake) transfer(function string, h uintptr, dst, src, n uint64, toHost, fromHost bool) cuda.Result {
	s, r := f.enterStream(function, h)
	defer f.mu.Unlock()
	if r != cuda.Success || n == 0 {
		return r
	}
	if !f.place(function, dst, n, toHost, !toHost) || !f.place(function, src, n, fromHost, !fromHost) {
		return cuda.ErrInvalidValue
	}
	s.enqueue(operation{name: function, run: func() cuda.Result { return f.copyAlive(function, dst, src, n) }})
	return cuda.Success
}

func (f *Fake) copyIn(dst cuda.Pointer, src unsafe.Pointer, n uint64, h uintptr) cuda.Result {
	return f.transfer("MemcpyHtoDAsync", h, uint64(dst), uint64(uintptr(src)), n, false, true)
}

func (f *Fake) copyOut(dst unsafe.Pointer, src cuda.Pointer, n uint64, h uintptr) cuda.Result {
	return f.transfer("MemcpyDtoHAsync", h, uint64(uintptr(dst)), uint64(src), n, true, false)
}

func (f *Fake) copyWithin(dst, src cuda.Pointer, n uint64, h uintptr) cuda.Result {
	return f.transfer("MemcpyDtoDAsync", h, uint64(dst), uint64(src), n, false, false)
}

func (f *Fake) memset(p cuda.Pointer, v uint8, n uint64, h uintptr) cuda.Result {
	s, r := f.enterStream("MemsetD8Async", h)
	defer f.mu.Unlock()
	if r != cuda.Success || n == 0 {
		return r
	}
	if !f.place("MemsetD8Async", uint64(p), n, true, true) {
		return cuda.ErrInvalidValue
	}
	s.enqueue(operation{name: "MemsetD8Async", run: func() cuda.Result {
		if !f.alive("MemsetD8Async", uint64(p), n) {
			return cuda.ErrIllegalAddress
		}
		setBytes(uint64(p), v, n)
		return cuda.Success
	}})
	return cuda.Success
}

// copyBatch makes the copies in an order that is nobody's.
func (f *Fake) copyBatch(dsts, srcs *cuda.Pointer, sizes *uint64, n uint64, attributes *cuda.MemcpyAttributes,
	firsts *uint64, attributeCount uint64, h uintptr) cuda.Result {
	const function = "MemcpyBatchAsync"
	s, r := f.enterStream(function, h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	if h <= 2 || n == 0 || attributeCount != 1 || *firsts != 0 || attributes.SrcAccessOrder != 1 {
		f.misused("cu%s of %d copies with %d attributes in stream %#x", function, n, attributeCount, h)
		return cuda.ErrInvalidValue
	}
	type piece struct{ dst, src, n uint64 }
	pieces := make([]piece, n)
	for i := range pieces {
		x := piece{uint64(unsafe.Slice(dsts, n)[i]), uint64(unsafe.Slice(srcs, n)[i]), unsafe.Slice(sizes, n)[i]}
		if !f.place(function, x.dst, x.n, true, true) || !f.place(function, x.src, x.n, true, true) {
			return cuda.ErrInvalidValue
		}
		pieces[i] = x
	}
	f.random.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
	s.enqueue(operation{name: function, run: func() cuda.Result {
		for _, x := range pieces {
			if r := f.copyAlive(function, x.dst, x.src, x.n); r != cuda.Success {
				return r
			}
		}
		return cuda.Success
	}})
	return cuda.Success
}

// word is the word at an address, nil where none is. The lock is held.
func (f *Fake) word(function string, p cuda.Pointer) *uint32 {
	if p&3 != 0 {
		f.misused("cu%s at %#x, which is not aligned", function, uint64(p))
		return nil
	}
	if !f.place(function, uint64(p), 4, true, true) {
		return nil
	}
	return (*uint32)(pointer(uint64(p)))
}

// streamWaitValue looks at the word again and again. Flag 0 is greater or equal, 1 is equal.
func (f *Fake) streamWaitValue(h uintptr, p cuda.Pointer, v, flags uint32) cuda.Result {
	s, r := f.enterStream("StreamWaitValue32", h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	w := f.word("StreamWaitValue32", p)
	if w == nil || flags > 1 {
		return cuda.ErrInvalidValue
	}
	s.enqueue(operation{name: "StreamWaitValue32", run: func() cuda.Result {
		for x := atomic.LoadUint32(w); x != v && (flags == 1 || int32(x-v) < 0); x = atomic.LoadUint32(w) {
			select {
			case <-f.quit:
				return cuda.ErrDeinitialized
			case <-time.After(20 * time.Microsecond):
			}
		}
		return cuda.Success
	}})
	return cuda.Success
}

func (f *Fake) streamWriteValue(h uintptr, p cuda.Pointer, v, _ uint32) cuda.Result {
	s, r := f.enterStream("StreamWriteValue32", h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	w := f.word("StreamWriteValue32", p)
	if w == nil {
		return cuda.ErrInvalidValue
	}
	s.enqueue(operation{name: "StreamWriteValue32", run: func() cuda.Result {
		atomic.StoreUint32(w, v)
		return cuda.Success
	}})
	return cuda.Success
}

// event is the last place that was recorded.
type event struct {
	context *context
	timing  bool
	mark    *mark
}

func (f *Fake) eventCreate(h *uintptr, flags uint32) cuda.Result {
	c, r := f.enterBound("EventCreate")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	*h = f.handle()
	f.events[*h] = &event{context: c, timing: flags&2 == 0}
	return cuda.Success
}

// enterEvent begins a call that concerns an event.
func (f *Fake) enterEvent(function string, h uintptr) (*event, cuda.Result) {
	if _, r := f.enterBound(function); r != cuda.Success {
		return nil, r
	}
	return f.event(function, h)
}

func (f *Fake) event(function string, h uintptr) (*event, cuda.Result) {
	e := f.events[h]
	if e == nil {
		f.misused("cu%s of an event that is not there", function)
		return nil, cuda.ErrInvalidHandle
	}
	return e, cuda.Success
}

func (f *Fake) eventDestroy(h uintptr) cuda.Result {
	_, r := f.enterEvent("EventDestroy", h)
	defer f.mu.Unlock()
	delete(f.events, h)
	return r
}

func (f *Fake) eventRecord(h, in uintptr) cuda.Result {
	s, r := f.enterStream("EventRecord", in)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	e, r := f.event("EventRecord", h)
	if r != cuda.Success {
		return r
	}
	if e.context.device != s.context.device {
		f.misused("cuEventRecord of an event of device %d in a stream of device %d", e.context.device, s.context.device)
		return cuda.ErrInvalidHandle
	}
	e.mark = s.mark("EventRecord")
	return cuda.Success
}

func (f *Fake) streamWaitEvent(in, h uintptr, _ uint32) cuda.Result {
	s, r := f.enterStream("StreamWaitEvent", in)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	e, r := f.event("StreamWaitEvent", h)
	if r != cuda.Success || e.mark == nil {
		return r
	}
	m := e.mark
	s.enqueue(operation{name: "StreamWaitEvent", run: func() cuda.Result { return f.await([]*mark{m}) }})
	return cuda.Success
}

// reached is whether a mark was reached; never having been set is as good.
func (m *mark) reached() bool {
	if m == nil {
		return true
	}
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

func (f *Fake) eventQuery(h uintptr) cuda.Result {
	e, r := f.enterEvent("EventQuery", h)
	defer f.mu.Unlock()
	if r == cuda.Success && !e.mark.reached() {
		return cuda.ErrNotReady
	}
	return r
}

func (f *Fake) eventSynchronize(h uintptr) cuda.Result {
	e, r := f.enterEvent("EventSynchronize", h)
	if r != cuda.Success || e.mark == nil {
		f.mu.Unlock()
		return r
	}
	m := e.mark
	f.mu.Unlock()
	return f.await([]*mark{m})
}

func (f *Fake) eventElapsed(milliseconds *float32, from, to uintptr) cuda.Result {
	a, r := f.enterEvent("EventElapsedTime", from)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	b, r := f.event("EventElapsedTime", to)
	switch {
	case r != cuda.Success:
		return r
	case !a.timing || !b.timing || a.mark == nil || b.mark == nil:
		f.misused("cuEventElapsedTime of events without timing, or not recorded")
		return cuda.ErrInvalidHandle
	case !a.mark.reached() || !b.mark.reached():
		return cuda.ErrNotReady
	}
	*milliseconds = float32(b.mark.at.Sub(a.mark.at).Seconds() * 1000)
	return cuda.Success
}

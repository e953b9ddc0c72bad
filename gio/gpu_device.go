package gio

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
)

// worker is the control thread: it makes the calls of CUDA that may take long, for whoever asks, one at a time.
type worker struct {
	calls   chan func()
	stopped chan struct{} // closed by stop
	stuck   <-chan struct{}
	since   atomic.Int64 // when the call that runs began, 0: none does
	now     func() int64
}

func (w *worker) start(c *cuda.Context, stuck <-chan struct{}, now func() int64) error {
	w.calls, w.stopped, w.stuck, w.now = make(chan func()), make(chan struct{}), stuck, now
	bound := make(chan error, 1)
	go func() {
		// The thread is never unlocked, so that it ends with the goroutine.
		runtime.LockOSThread()
		err := c.Bind()
		bound <- err
		if err != nil {
			return
		}
		for {
			select {
			case f := <-w.calls:
				w.since.Store(max(1, w.now()))
				f()
				w.since.Store(0)
			case <-w.stopped:
				_ = c.Unbind()
				return
			}
		}
	}()
	return <-bound
}

// do runs f on the thread.
func (w *worker) do(f func() error) error {
	result := make(chan error, 1)
	select {
	case w.calls <- func() { result <- f() }:
	case <-w.stopped:
		return ErrClosed
	case <-w.stuck:
		return fmt.Errorf("%w: %w", ErrDead, ErrStuck)
	}
	select {
	case err := <-result:
		return err
	case <-w.stuck:
		return fmt.Errorf("%w: %w", ErrDead, ErrStuck)
	}
}

func (w *worker) stop() { close(w.stopped) }

// device is what the executor has made on the GPU.
type device struct {
	module                                 *cuda.Module
	build, harvest, gather, register, poll *cuda.Function
	buildS, controlS                       *cuda.Stream
	harvestS, gatherS                      [moveStreams]*cuda.Stream
	copyIn, copyOut                        *cuda.Stream
	pollIn, pollOut                        *cuda.Stream
	green                                  *cuda.Context    // of the polling executor, nil for the whole GPU
	regions                                cuda.Pointer     // KernelRegion[RegionsMax+1]
	drives                                 cuda.Pointer     // i16[len(base.drives)]
	small                                  *cuda.HostMemory // on its way to the two
}

// moveStreams are the streams that batches' harvests, and their gathers, take in turns. Beside a long kernel each of
// them waits for its end, and what comes behind it in the same stream waits for the end of the next one: so the last
// kernel of a batch and the first one of its successor are in different streams.
const moveStreams = 2

const regionsBytes = (RegionsMax + 1) * uint64(unsafe.Sizeof(cuda.KernelRegion{}))

// tableBytes is the table and, behind it, a word for every kernel under way, in which its blocks are counted.
const tableBytes = regionsBytes + launchesMax*4

// setUp loads the kernels and makes the streams. Kernels have streams of their own, so that none of them waits behind
// another kind, and the greatest priority, so that they get the SMs that fall free.
func (d *device) setUp(g *GPU) (err error) {
	c := g.gpu.Context
	if d.module, err = c.LoadModule(cuda.RingPTX); err != nil {
		return err
	}
	for _, f := range []struct {
		f    **cuda.Function
		name string
	}{
		{&d.build, "tuttifs_build"}, {&d.harvest, "tuttifs_harvest"}, {&d.gather, "tuttifs_gather"},
		{&d.register, "tuttifs_register"}, {&d.poll, "tuttifs_poll"},
	} {
		if f.f == &d.poll && !g.gpu.Polling {
			continue
		}
		if *f.f, err = d.module.Function(f.name); err != nil {
			return err
		}
	}
	_, greatest, err := c.StreamPriorities()
	if err != nil {
		return err
	}
	on := c
	if g.gpu.Polling && g.gpu.PollSMs > 0 {
		if d.green, err = c.Green(g.gpu.PollSMs, true); err != nil {
			return err
		}
		on = d.green
	}
	for _, s := range []struct {
		s  **cuda.Stream
		in *cuda.Context
	}{
		{&d.buildS, c}, {&d.harvestS[0], c}, {&d.harvestS[1], c}, {&d.gatherS[0], c}, {&d.gatherS[1], c},
		{&d.controlS, c}, {&d.copyIn, c}, {&d.copyOut, c}, {&d.pollIn, on}, {&d.pollOut, on},
	} {
		if *s.s, err = s.in.NewStream(greatest); err != nil {
			return err
		}
	}
	if d.small, err = c.AllocHost(max(int(unsafe.Sizeof(cuda.KernelRegion{})), 2*len(g.drives)), false); err != nil {
		return err
	}
	if d.regions, err = g.allocate(tableBytes); err != nil {
		return err
	}
	if d.drives, err = g.allocate(uint64(2 * len(g.drives))); err != nil {
		return err
	}
	if err := d.controlS.Memset(d.regions, 0, tableBytes); err != nil {
		return err
	}
	for i, v := range g.drives {
		*(*int16)(unsafe.Pointer(&d.small.Bytes[2*i])) = v
	}
	return d.upload(d.drives, d.small.Bytes[:2*len(g.drives)])
}

// upload copies pinned memory to the device and waits; on the control thread.
func (d *device) upload(to cuda.Pointer, b []byte) error {
	if err := d.controlS.CopyHtoD(to, unsafe.Pointer(&b[0]), uint64(len(b))); err != nil {
		return err
	}
	return d.controlS.Synchronize()
}

func (d *device) streams() []*cuda.Stream {
	return []*cuda.Stream{
		d.buildS, d.harvestS[0], d.harvestS[1], d.gatherS[0], d.gatherS[1], d.controlS, d.copyIn, d.copyOut,
		d.pollIn, d.pollOut,
	}
}

// drain waits for what is enqueued, on the control thread.
func (d *device) drain() {
	for _, s := range d.streams() {
		if s != nil {
			_ = s.Synchronize()
		}
	}
}

func (d *device) close(g *GPU) {
	for _, s := range d.streams() {
		if s != nil {
			_ = s.Close()
		}
	}
	if d.green != nil {
		_ = d.green.Close()
	}
	if d.regions != 0 {
		g.free(d.regions, tableBytes)
	}
	if d.drives != 0 {
		g.free(d.drives, uint64(2*len(g.drives)))
	}
	if d.small != nil {
		_ = g.gpu.Context.FreeHost(d.small)
	}
	if d.module != nil {
		_ = d.module.Close()
	}
}

// allocate and free count the device memory; on the control thread.
func (g *GPU) allocate(n uint64) (cuda.Pointer, error) {
	p, err := g.gpu.Context.Alloc(n)
	if err == nil {
		g.stats.device.Add(n)
	}
	return p, err
}

func (g *GPU) free(p cuda.Pointer, n uint64) {
	if g.gpu.Context.Free(p) == nil {
		g.stats.device.Add(-n)
	}
}

// pin is a range of the process's memory that is registered with CUDA.
type pin struct {
	memory *cuda.HostMemory
	start  uintptr
	users  int
}

func (p *pin) holds(start uintptr, n int) bool {
	return start >= p.start && n <= len(p.memory.Bytes) && start-p.start <= uintptr(len(p.memory.Bytes)-n)
}

// pins are all of them. CUDA registers a page once, so that ranges inside others share theirs.
type pins struct {
	mu   sync.Mutex
	pins []*pin
}

// add registers b; on the control thread.
func (p *pins) add(g *GPU, b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for _, x := range p.pins {
		if x.holds(start, len(b)) {
			x.users++
			return nil
		}
	}
	m, err := g.gpu.Context.RegisterHost(b)
	if errors.Is(err, cuda.ErrAlreadyRegistered) {
		return fmt.Errorf("%w: some of its pages are registered with CUDA already, for another range: %w",
			ErrMemory, err)
	} else if err != nil {
		return err
	}
	p.pins = append(p.pins, &pin{memory: m, start: start, users: 1})
	return nil
}

// remove undoes one add; on the control thread.
func (p *pins) remove(g *GPU, b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for i, x := range p.pins {
		if !x.holds(start, len(b)) {
			continue
		}
		if x.users--; x.users == 0 {
			_ = g.gpu.Context.UnregisterHost(x.memory)
			p.pins = append(p.pins[:i], p.pins[i+1:]...)
		}
		return
	}
}

// address is that by which the GPU knows pinned memory.
func (p *pins) address(b []byte) (uint64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for _, x := range p.pins {
		if x.holds(start, len(b)) {
			return uint64(x.memory.GPU) + uint64(start-x.start), true
		}
	}
	return 0, false
}

func (p *pins) close(g *GPU) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.pins {
		_ = g.gpu.Context.UnregisterHost(x.memory)
	}
	p.pins = nil
}

// queueBytes is the memory of a queue pair, from its doorbells to its last entry, as a whole: see nvme.MapQueue. Where
// the doorbells are a device's registers it is that of the entries: the host rings, and no kernel.
func queueBytes(q *Queue) []byte {
	m := &q.Memory
	start := min(uintptr(unsafe.Pointer(&m.SQ[0])), uintptr(unsafe.Pointer(&m.CQ[0])))
	if !q.Device {
		start = min(start, uintptr(unsafe.Pointer(m.SQTail)), uintptr(unsafe.Pointer(m.CQHead)))
	}
	start &^= pageBytes - 1
	last := unsafe.Pointer(&m.CQ[len(m.CQ)-1])
	end := uintptr(last) + unsafe.Sizeof(m.CQ[0])
	return unsafe.Slice((*byte)(unsafe.Add(last, -int(uintptr(last)-start))), int(end-start))
}

// pinnedPool keeps pinned memory of batches, by the powers of two of its sizes.
type pinnedPool struct {
	mu   sync.Mutex
	free [64][]*pinned
	all  []*cuda.HostMemory
}

type pinned struct {
	memory *cuda.HostMemory
	class  int
}

const pinnedLeast = 16 // 64 KiB

func (p *pinnedPool) get(g *GPU, n int) (*pinned, error) {
	class := max(pinnedLeast, bits.Len(uint(n-1)))
	p.mu.Lock()
	if free := p.free[class]; len(free) > 0 {
		x := free[len(free)-1]
		p.free[class] = free[:len(free)-1]
		p.mu.Unlock()
		return x, nil
	}
	p.mu.Unlock()
	x := &pinned{class: class}
	err := g.control.do(func() (err error) {
		x.memory, err = g.gpu.Context.AllocHost(1<<class, false)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, x.memory)
	return x, nil
}

func (p *pinnedPool) put(x *pinned) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free[x.class] = append(p.free[x.class], x)
}

func (p *pinnedPool) close(g *GPU) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.all {
		_ = g.gpu.Context.FreeHost(m)
	}
	p.all, p.free = nil, [64][]*pinned{}
}

// carver divides pinned memory. Without memory it only measures.
type carver struct {
	host []byte
	gpu  uint64
	at   int
}

// carveLine keeps what kernels write apart from what the host does.
const carveLine = 128

// carve takes n elements; gpu is the address of the first one on the GPU.
func carve[T any](c *carver, n int) (s []T, gpu uint64) {
	var t T
	at := c.at
	c.at += (n*int(unsafe.Sizeof(t)) + carveLine - 1) &^ (carveLine - 1)
	if c.host == nil || n == 0 {
		return nil, 0
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&c.host[at])), n), c.gpu + uint64(at)
}

// eventPool keeps events.
type eventPool struct {
	mu   sync.Mutex
	free []*cuda.Event
	all  []*cuda.Event
}

func (p *eventPool) get(g *GPU) (*cuda.Event, error) {
	p.mu.Lock()
	if n := len(p.free); n > 0 {
		e := p.free[n-1]
		p.free = p.free[:n-1]
		p.mu.Unlock()
		return e, nil
	}
	p.mu.Unlock()
	var e *cuda.Event
	err := g.control.do(func() (err error) {
		e, err = g.gpu.Context.NewEvent(false)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, e)
	return e, nil
}

func (p *eventPool) put(e *cuda.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, e)
}

func (p *eventPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.all {
		_ = e.Close()
	}
	p.all, p.free = nil, nil
}

// deviceMap is an extent map on the device.
type deviceMap struct {
	m        *Map
	memory   cuda.Pointer
	capacity uint64
	tables   cuda.KernelTables
	users    int
	used     uint64 // when last, by the cache's count
}

// mapCache has the extent maps that batches use, and the last few that they used.
type mapCache struct {
	mu    sync.Mutex
	maps  []*deviceMap
	count uint64
}

// mapsKept is how many maps stay on the device though no batch uses them: one for each pool that takes turns.
const mapsKept = 16

// get brings m to the device, if it is not there yet, and keeps it there until put.
func (c *mapCache) get(g *GPU, m *Map) (*deviceMap, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	for _, d := range c.maps {
		if d.m == m {
			d.users++
			d.used = c.count
			return d, nil
		}
	}
	d, err := c.upload(g, m)
	if err != nil {
		return nil, err
	}
	d.users, d.used = 1, c.count
	return d, nil
}

func (c *mapCache) put(d *deviceMap) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d.users--
}

// place finds room for a map of n bytes: that of the one that was not used for the longest time where there are many,
// else new.
func (c *mapCache) place(g *GPU, n uint64) (*deviceMap, error) {
	var old *deviceMap
	oldAt := 0
	for i, d := range c.maps {
		if d.users == 0 && (old == nil || d.used < old.used) {
			old, oldAt = d, i
		}
	}
	if len(c.maps) >= mapsKept && old != nil {
		if old.capacity >= n {
			old.m = nil
			return old, nil
		}
		c.maps = append(c.maps[:oldAt], c.maps[oldAt+1:]...)
		g.free(old.memory, old.capacity)
	}
	d := &deviceMap{capacity: 1 << bits.Len64(n-1)}
	var err error
	if d.memory, err = g.allocate(d.capacity); err != nil {
		return nil, err
	}
	c.maps = append(c.maps, d)
	return d, nil
}

func (c *mapCache) upload(g *GPU, m *Map) (d *deviceMap, err error) {
	objects, entries := len(m.objects)*int(unsafe.Sizeof(objectPlace{})), len(m.entries)*8
	x, err := g.pool.get(g, objects+max(entries, 8))
	if err != nil {
		return nil, err
	}
	defer g.pool.put(x)
	b := x.memory.Bytes[:objects+entries]
	copy(b, bytesOf(m.objects))
	copy(b[objects:], bytesOf(m.entries))
	err = g.control.do(func() error {
		if d, err = c.place(g, uint64(objects+max(entries, 8))); err != nil {
			return err
		}
		return g.device.upload(d.memory, b)
	})
	if err != nil {
		return nil, err
	}
	d.m = m
	d.tables = cuda.KernelTables{
		Objects: uint64(d.memory), Entries: uint64(d.memory) + uint64(objects),
		Drives: uint64(g.device.drives), Regions: uint64(g.device.regions),
		SlotUnits: m.slotUnits, EntryCount: uint64(len(m.entries)), ObjectCount: uint32(len(m.objects)),
		DriveCount: uint32(len(g.drives)), Width: m.width, SlotsPerRow: m.slotsPerRow,
	}
	return d, nil
}

func (c *mapCache) close(g *GPU) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.maps {
		g.free(d.memory, d.capacity)
	}
	c.maps = nil
}

// bytesOf is the memory of a slice.
func bytesOf[T any](s []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t)))
}

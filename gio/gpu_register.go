package gio

import (
	"fmt"
	"math"
	"unsafe"

	"tuttifs/cuda"
)

// Paged is a pool of KV blocks as an engine allocates it: every class (of objects: a layer, say) has its runs (K, V)
// in every block.
type Paged struct {
	Blocks  uint64
	Classes [][]cuda.StridedRun
	// Peer is as in GPUConfig, for this memory and its tables; nil: the executor's.
	Peer PeerFunc
}

// deviceRange is what registered memory is on the device.
type deviceRange struct {
	entry  cuda.KernelRegion
	pinned bool // host memory that was registered with CUDA for it
	paged  *paged
	memory cuda.Pointer // the table and its lists, 0 for flat memory
	bytes  uint64
	peers  []peerRange // what controllers were told to reach
}

// peerRange is memory that Peer said an address of.
type peerRange struct {
	p cuda.Pointer
	n uint64
}

// paged is the arithmetic of a paged registration.
type paged struct {
	blocks  uint64
	classes uint64
	runs    uint64
}

// Block is the descriptor of the runs that a class (of objects: a layer, say) has in a block, for memory of
// RegisterPaged. An object's payload fills them in order. Descriptors need no table on the host.
func (m *Memory) Block(class int, block uint64) uint64 {
	p := m.device.paged
	if p == nil || class < 0 || uint64(class) >= p.classes || block >= p.blocks {
		return m.id | (1<<offsetBits - 1) // no such entry: refused when it is used
	}
	return m.id | (uint64(class)*p.blocks+block)*p.runs
}

// DeviceBytes is the device memory that the registration costs.
func (m *Memory) DeviceBytes() uint64 { return m.device.bytes }

// Register makes host memory usable in IOCTXs: inside the DMA memory it is reached directly where an object's bytes
// fill whole 4-KiB units, elsewhere through bounce cells, and kernels bring the bytes to their place. The caller
// keeps buf alive until Unregister gives everything back.
func (g *GPU) Register(buf []byte) (*Memory, error) { return g.registerHost(buf, false) }

// RegisterPadded registers DMA memory in which every object has room for whole 4-KiB units; see Ring.RegisterPadded.
func (g *GPU) RegisterPadded(buf []byte) (*Memory, error) { return g.registerHost(buf, true) }

func (g *GPU) registerHost(buf []byte, padded bool) (*Memory, error) {
	m, err := g.newMemory(buf, padded)
	if err != nil {
		return nil, err
	}
	return g.register(m, func() error {
		if err := g.pins.add(g, buf); err != nil {
			return err
		}
		m.device.pinned = true
		return nil
	})
}

// RegisterDevice makes n bytes of device memory usable in IOCTXs; Desc takes byte offsets.
func (g *GPU) RegisterDevice(p cuda.Pointer, n uint64) (*Memory, error) {
	if p == 0 || n == 0 || n >= 1<<offsetBits || uint64(p)+n < uint64(p) {
		return nil, fmt.Errorf("%w: cannot register %d bytes at %#x", ErrInvalid, n, uint64(p))
	}
	m := &Memory{}
	e := &m.device.entry
	*e = cuda.KernelRegion{Base: uint64(p), Limit: n, Kind: cuda.RegionFlat}
	if g.config.SGL { // PRP lists are there for the DMA memory only
		if io, ok := g.peer(m, g.gpu.Peer, p, n); ok {
			e.IO, e.Direct, m.direct, m.base = io-uint64(p), 1, true, io
		}
	}
	if err := g.reachable(m); err != nil {
		return nil, err
	}
	return g.register(m, nil)
}

// peer asks how controllers reach memory that m needs.
func (g *GPU) peer(m *Memory, by PeerFunc, p cuda.Pointer, n uint64) (io uint64, ok bool) {
	if by == nil {
		return 0, false
	}
	if io, ok = by(p, n); ok {
		m.device.peers = append(m.device.peers, peerRange{p, n})
	}
	return io, ok
}

// unpeer is the end of what m needed.
func (g *GPU) unpeer(m *Memory) {
	for _, r := range m.device.peers {
		if g.gpu.Unpeer != nil {
			g.gpu.Unpeer(r.p, r.n)
		}
	}
	m.device.peers = nil
}

func (g *GPU) reachable(m *Memory) error {
	if !m.direct && g.config.BounceBytes == 0 {
		return fmt.Errorf("%w: controllers do not reach this device memory, and the ring has no bounce cells", ErrMemory)
	}
	return nil
}

func (p *Paged) validate() (entries uint64, err error) {
	bad := func(format string, a ...any) (uint64, error) {
		return 0, fmt.Errorf("%w: paged memory: "+format, append([]any{ErrInvalid}, a...)...)
	}
	if p.Blocks == 0 || len(p.Classes) == 0 || len(p.Classes[0]) == 0 {
		return bad("no blocks, classes or runs")
	}
	runs := len(p.Classes[0])
	for c, class := range p.Classes {
		if len(class) != runs {
			return bad("class %d has %d runs, class 0 has %d; register them apart", c, len(class), runs)
		}
		for i, r := range class {
			span := uint64(math.MaxUint64)
			if p.Blocks == 1 {
				span = uint64(r.Bytes)
			} else if r.Stride >= uint64(r.Bytes) && r.Stride <= (math.MaxUint64-uint64(r.Bytes))/(p.Blocks-1) {
				span = (p.Blocks-1)*r.Stride + uint64(r.Bytes)
			}
			if r.Base == 0 || r.Bytes == 0 || span > math.MaxUint64-r.Base {
				return bad("run %d of class %d: %d bytes at %#x, every %d", i, c, r.Bytes, r.Base, r.Stride)
			}
		}
	}
	each := uint64(len(p.Classes) * runs)
	if p.Blocks > (1<<offsetBits-1)/each {
		return bad("%d blocks of %d runs are too many", p.Blocks, each)
	}
	return p.Blocks * each, nil
}

// RegisterPaged makes a pool of KV blocks usable in IOCTXs as its engine has allocated it; Block makes descriptors.
// It costs 16 bytes a run on the device, and the PRP lists where controllers reach the memory and take no SGLs.
func (g *GPU) RegisterPaged(p Paged) (*Memory, error) {
	entries, err := p.validate()
	if err != nil {
		return nil, err
	}
	m := &Memory{}
	d := &m.device
	d.paged = &paged{blocks: p.Blocks, classes: uint64(len(p.Classes)), runs: uint64(len(p.Classes[0]))}
	d.entry = cuda.KernelRegion{Limit: entries, Kind: cuda.RegionTable}
	if p.Peer == nil {
		p.Peer = g.gpu.Peer
	}
	list, io, direct := g.pagedDirect(m, &p)
	if !direct {
		g.unpeer(m)
	}
	tableBytes := entries * uint64(unsafe.Sizeof(cuda.KernelRun{}))
	d.bytes = tableBytes
	if direct {
		d.bytes = (tableBytes+pageBytes-1)&^(pageBytes-1) + entries*list
		if g.gpu.Unpeer != nil { // an allocation of its own, which others can be told to reach
			d.bytes = (d.bytes + ownBytes - 1) &^ (ownBytes - 1)
		}
	}
	m.direct = direct
	return g.register(m, func() error {
		if d.memory, err = g.allocate(d.bytes); err != nil {
			return err
		}
		e := &d.entry
		e.Base = uint64(d.memory)
		lists := uint64(0)
		if direct {
			if at, ok := g.peer(m, p.Peer, d.memory, d.bytes); ok {
				e.IO, e.Direct, e.TableIO = io, 1, at
				if list > 0 {
					lists = uint64(d.memory) + d.bytes - entries*list
					e.PRPIO, e.ListBytes = at+d.bytes-entries*list, uint32(list)
				}
			} else {
				m.direct = false
				g.unpeer(m)
				if err := g.reachable(m); err != nil {
					return err
				}
			}
		} else if err := g.reachable(m); err != nil {
			return err
		}
		return g.writeTable(&p, e, lists)
	})
}

// ownBytes is what the driver aligns large allocations to, and gives no part of to others.
const ownBytes = 2 << 20

// pagedDirect says whether controllers reach all of the pool by one offset, what to add to addresses, and how many
// bytes of PRP list a run has: none with SGL. Lists serve runs of whole pages of which an object's are in one page.
func (g *GPU) pagedDirect(m *Memory, p *Paged) (list, io uint64, ok bool) {
	for c, class := range p.Classes {
		for i, r := range class {
			at, ok := g.peer(m, p.Peer, cuda.Pointer(r.Base), (p.Blocks-1)*r.Stride+uint64(r.Bytes))
			if c == 0 && i == 0 {
				io = at - r.Base
				list = uint64(r.Bytes) / pageBytes * 8
			}
			if !ok || at-r.Base != io || r.Base%4 != 0 || r.Stride%4 != 0 || r.Bytes%4 != 0 {
				return 0, 0, false
			}
			whole := (at|r.Stride|uint64(r.Bytes))%pageBytes == 0 && uint64(r.Bytes)/pageBytes*8 == list
			if !g.config.SGL && !whole {
				return 0, 0, false
			}
		}
	}
	if g.config.SGL {
		return 0, io, true
	}
	object := list * uint64(len(p.Classes[0]))
	return list, io, object <= pageBytes && pageBytes%object == 0
}

// writeTable has the table and the lists written by a kernel; on the control thread.
func (g *GPU) writeTable(p *Paged, e *cuda.KernelRegion, lists uint64) error {
	runs := len(p.Classes[0])
	strided := make([]cuda.StridedRun, 0, runs*len(p.Classes))
	for _, class := range p.Classes {
		strided = append(strided, class...)
	}
	c := carver{}
	carve[cuda.StridedRun](&c, len(strided))
	h, err := g.gpu.Context.AllocHost(c.at, false)
	if err != nil {
		return err
	}
	defer func() { _ = g.gpu.Context.FreeHost(h) }()
	c = carver{host: h.Bytes, gpu: uint64(h.GPU)}
	host, address := carve[cuda.StridedRun](&c, len(strided))
	copy(host, strided)
	params := &cuda.RegisterParams{
		Strided: address, Table: e.Base, Lists: lists, IO: e.IO, Blocks: p.Blocks,
		Classes: uint32(len(p.Classes)), Runs: uint32(runs), ListBytes: e.ListBytes,
	}
	blocks := (e.Limit + registerThreads - 1) / registerThreads
	blocks = min(blocks, uint64(registerBlocks*max(1, g.gpu.Context.SMs())))
	if err := g.device.controlS.Launch(g.device.register, uint32(blocks), registerThreads, 0,
		unsafe.Pointer(params)); err != nil {
		return err
	}
	return g.device.controlS.Synchronize()
}

// The grid of the kernel that writes tables: it strides over the entries.
const (
	registerThreads = 256
	registerBlocks  = 4 // an SM
)

// register runs make on the control thread, gives m its place and tells the device.
func (g *GPU) register(m *Memory, make func() error) (*Memory, error) {
	release, err := g.hold()
	if err != nil {
		return nil, err
	}
	defer release()
	g.registering.Lock()
	defer g.registering.Unlock()
	g.mu.Lock()
	closed := g.closed
	g.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if err := g.broken.Load(); err != nil {
		return nil, *err
	}
	if err := g.regions.add(m); err != nil {
		return nil, err
	}
	err = g.control.do(func() error {
		if make != nil {
			if err := make(); err != nil {
				return err
			}
		}
		return g.publish(m)
	})
	if err != nil {
		_ = g.regions.remove(m)
		_ = g.control.do(func() error { g.giveBack(m); return nil })
		return nil, err
	}
	return m, nil
}

// publish writes m's entry into the device's table; on the control thread.
func (g *GPU) publish(m *Memory) error {
	e := &m.device.entry
	if m.buf != nil {
		gpu, ok := g.pins.address(m.buf)
		if !ok {
			return fmt.Errorf("%w: host memory that is not pinned", ErrMemory)
		}
		*e = cuda.KernelRegion{Base: gpu, Limit: uint64(len(m.buf)), Kind: cuda.RegionFlat}
		if m.direct {
			e.IO, e.Direct = m.base-gpu, 1
		}
		if m.padded {
			e.Padded = 1
		}
	}
	e.Generation = uint8(m.id >> (offsetBits + regionBits))
	return g.writeEntry(m, e)
}

func (g *GPU) writeEntry(m *Memory, e *cuda.KernelRegion) error {
	n := copy(g.device.small.Bytes, bytesOf(unsafe.Slice(e, 1)))
	return g.device.upload(g.device.regions+cuda.Pointer(regionOf(m.id)*uint64(n)), g.device.small.Bytes[:n])
}

// giveBack frees what a registration holds; on the control thread.
func (g *GPU) giveBack(m *Memory) {
	g.unpeer(m)
	if m.device.memory != 0 {
		g.free(m.device.memory, m.device.bytes)
		m.device.memory = 0
	}
	if m.device.pinned {
		g.pins.remove(g, m.buf)
		m.device.pinned = false
	}
}

// Unregister gives the region and its device memory back; its descriptors are refused from then on. ErrBusy while a
// batch uses it.
func (g *GPU) Unregister(m *Memory) error {
	release, gone := g.hold()
	if gone != nil {
		return g.regions.remove(m) // Close has given back what it held
	}
	defer release()
	g.registering.Lock()
	defer g.registering.Unlock()
	if err := g.regions.remove(m); err != nil {
		return err
	}
	return g.control.do(func() error {
		err := g.writeEntry(m, &cuda.KernelRegion{})
		g.giveBack(m)
		return err
	})
}

// closeRegions gives back what is still registered; on the control thread.
func (g *GPU) closeRegions() {
	for i := range g.regions.places {
		if m := g.regions.places[i].memory.Load(); m != nil {
			g.giveBack(m)
		}
	}
}

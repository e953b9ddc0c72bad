package cudatest

import (
	"sync/atomic"
	"unsafe"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// The kernels of ring.cu in Go, for memory whose device addresses are host addresses. They are what the kernels must
// do, in the plainest way, and take the same parameters.

// Kernels are the kernels by name. A kernel returns when its grid would be done.
func Kernels() map[string]func(grid, block uint32, params unsafe.Pointer) {
	return map[string]func(grid, block uint32, params unsafe.Pointer){
		"tuttifs_build":    func(_, _ uint32, p unsafe.Pointer) { build((*cuda.BuildParams)(p)) },
		"tuttifs_harvest":  func(grid, _ uint32, p unsafe.Pointer) { move((*cuda.HarvestParams)(p), grid, false) },
		"tuttifs_gather":   func(grid, _ uint32, p unsafe.Pointer) { move((*cuda.GatherParams)(p), grid, true) },
		"tuttifs_register": func(_, _ uint32, p unsafe.Pointer) { register((*cuda.RegisterParams)(p)) },
		"tuttifs_poll":     func(_, _ uint32, p unsafe.Pointer) { poll((*cuda.PollParams)(p)) },
	}
}

const (
	pageBytes = nvme.PageBytes
	pageShift = 12
	unitBytes = 4096
	// Descriptors: [63:56] generation, [55:44] region, [43:0] offset.
	offsetBits = 44
	regionBits = 12
	// Packed entries of rows: drive above, unit below.
	unitBits = 48
	noEntry  = ^uint64(0)
	// flagFlush makes an IOCTX of a write a Flush.
	flagFlush = 1
)

// at is the i-th T of an array at an address.
func at[T any](address, i uint64) *T {
	var t T
	address += i * uint64(unsafe.Sizeof(t))
	return (*T)(*(*unsafe.Pointer)(unsafe.Pointer(&address)))
}

// bytesAt is n bytes at an address.
func bytesAt(address uint64, n uint32) []byte { return unsafe.Slice(at[byte](address, 0), n) }

// extent is where an object lies on the drives.
type extent struct {
	queue   int // the drive's place in a lane, negative where there is none
	unit    uint64
	bytes   uint32 // of a command, whole units
	payload uint32
}

// locate finds an IOCTX's extent by two table reads. queue is negative for what is not mapped.
func locate(t *cuda.KernelTables, ctx *cuda.KernelIOCTX) extent {
	e := extent{queue: -1}
	if uint32(ctx.Object) >= t.ObjectCount {
		return e
	}
	o := at[cuda.KernelObject](t.Objects, uint64(ctx.Object))
	e.bytes, e.payload = uint32(o.Units)*unitBytes, o.Bytes
	row, index := ctx.Slot/t.SlotsPerRow, ctx.Slot%t.SlotsPerRow
	set, r := index/t.Width, index%t.Width
	i := uint64(row)*uint64(t.Width) + uint64((r+uint32(o.Position))%t.Width)
	if i >= t.EntryCount {
		return e
	}
	entry := *at[uint64](t.Entries, i)
	drive := uint32(entry >> unitBits)
	if entry == noEntry || drive >= t.DriveCount {
		return e
	}
	e.queue = int(*at[int16](t.Drives, uint64(drive)))
	e.unit = entry&(1<<unitBits-1) + uint64(set)*t.SlotUnits + uint64(o.Offset)
	return e
}

// run is a piece of an object's memory.
type run struct {
	address uint64 // the GPU's
	bytes   uint32
}

// memory is what a descriptor names, for a payload of some length.
type memory struct {
	region *cuda.KernelRegion
	index  uint64 // table: of the first entry; flat: byte offset
	runs   int    // table: at their registered lengths; flat: one, up to the region's end
	total  uint64
}

// run is the i-th run.
func (m *memory) run(i int) run {
	r := m.region
	if r.Kind == cuda.RegionFlat {
		return run{r.Base + m.index, uint32(min(m.total, 1<<32-1))}
	}
	e := at[cuda.KernelRun](r.Base, m.index+uint64(i))
	return run{e.Address - r.IO, e.Bytes}
}

// lookup finds a descriptor's memory; ok is false if it is not registered or shorter than the payload.
func lookup(t *cuda.KernelTables, desc uint64, payload uint32) (m memory, ok bool) {
	r := at[cuda.KernelRegion](t.Regions, desc>>offsetBits&(1<<regionBits-1))
	if r.Kind == cuda.RegionNone || r.Generation != uint8(desc>>(offsetBits+regionBits)) {
		return m, false
	}
	m.region, m.index = r, desc&(1<<offsetBits-1)
	if r.Kind == cuda.RegionFlat {
		if m.index > r.Limit || r.Limit-m.index < uint64(payload) {
			return m, false
		}
		m.total, m.runs = r.Limit-m.index, 1
		return m, true
	}
	for i := m.index; m.total < uint64(payload); i++ {
		if i >= r.Limit {
			return m, false
		}
		n := at[cuda.KernelRun](r.Base, i).Bytes
		if n == 0 {
			return m, false
		}
		m.runs++
		m.total += uint64(n)
	}
	return m, true
}

// prpTable is gio's windows over the DMA memory.
type prpTable struct{ base, dma uint64 }

const (
	prpPerPage  = pageBytes / 8
	windowPages = prpPerPage - 1
	windowHalf  = windowPages / 2
)

// list is the address of a list of n entries, the first of which names the given page.
func (t *prpTable) list(page, n uint32) uint64 {
	j, i := 2*(page/windowPages+1), page%windowPages
	if i >= windowHalf {
		j, i = j+1, i-windowHalf
	}
	if i+n == prpPerPage {
		j--
		i += windowHalf + j&1
	}
	return t.base + uint64(j-1)*pageBytes + uint64(i)*8
}

// builder makes the commands of one launch.
type builder struct {
	tables *cuda.KernelTables
	prp    prpTable
	write  bool
	sgl    bool
}

// pages counts the pages that n bytes at an address touch.
func pages(address uint64, n uint32) uint32 {
	return (uint32(address)%pageBytes + n + pageBytes - 1) >> pageShift
}

// contiguous points a command at n bytes of bounce cells or flat memory.
func (b *builder) contiguous(sqe *nvme.SQE, address uint64, n uint32) {
	if b.sgl {
		sqe.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLDataBlock, address, n))
		return
	}
	sqe.DPTR = [2]uint64{address}
	switch p := pages(address, n); {
	case p == 2:
		sqe.DPTR[1] = address&^(pageBytes-1) + pageBytes
	case p > 2:
		sqe.DPTR[1] = b.prp.list(uint32((address-b.prp.dma)>>pageShift)+1, p-1)
	}
}

// direct points a command of n bytes at the memory itself, and says whether that is possible.
func (b *builder) direct(sqe *nvme.SQE, m *memory, n, payload uint32) bool {
	r := m.region
	if r.Direct == 0 || payload != n && r.Padded == 0 || m.total < uint64(n) {
		return false
	}
	for i := range m.runs {
		if x := m.run(i); x.address%4 != 0 || i+1 < m.runs && x.bytes%4 != 0 {
			return false
		}
	}
	switch address := m.run(0).address + r.IO; {
	case r.Kind == cuda.RegionFlat || b.sgl && m.runs == 1:
		b.contiguous(sqe, address, n)
	case b.sgl:
		if m.total != uint64(n) {
			return false // controllers get the table's entries as they are
		}
		segment := r.TableIO + m.index*uint64(unsafe.Sizeof(cuda.KernelRun{}))
		sqe.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLLastSegment, segment, uint32(m.runs)*nvme.SGLDescriptorBytes))
	default:
		return m.packed(sqe, n)
	}
	return true
}

// packed points a command at the runs by the region's PRP lists, if they are shaped like pages and their lists touch.
func (m *memory) packed(sqe *nvme.SQE, n uint32) bool {
	r := m.region
	total, left, second := uint32(0), n, uint64(0)
	for i := range m.runs {
		x, last := m.run(i), i+1 == m.runs
		k := min(x.bytes, left)
		p := pages(x.address+r.IO, k)
		if i > 0 && (x.address+r.IO)%pageBytes != 0 ||
			!last && ((x.address+r.IO+uint64(x.bytes))%pageBytes != 0 || p*8 != r.ListBytes) {
			return false
		}
		if i == 1 && total == 1 {
			second = x.address + r.IO
		}
		total += p
		left -= k
	}
	first := m.run(0).address + r.IO
	sqe.DPTR = [2]uint64{first}
	switch {
	case total == 1:
	case total == 2 && second != 0:
		sqe.DPTR[1] = second
	case total == 2:
		sqe.DPTR[1] = first&^(pageBytes-1) + pageBytes
	default:
		list := r.PRPIO + m.index*uint64(r.ListBytes)
		entries := uint64(total-1) * 8
		fits := entries <= uint64(m.runs)*uint64(r.ListBytes) && list%pageBytes+entries <= pageBytes
		if r.PRPIO == 0 || list%8 != 0 || !fits {
			return false
		}
		sqe.DPTR[1] = list
	}
	return true
}

// command builds an IOCTX's command, or says why it never can be one. cells are the I/O address of its cell and the
// bytes from there; 0 where direct.
func (b *builder) command(sqe *nvme.SQE, ctx *cuda.KernelIOCTX, e extent, q *cuda.KernelQueue, cid uint16,
	cell, room uint64) uint8 {

	if ctx.Flags == flagFlush && b.write {
		var made nvme.SQE
		nvme.BuildFlush(&made, cid, q.NSID)
		publish(sqe, &made)
		return cuda.OutcomeOK
	}
	if ctx.Flags != 0 {
		return cuda.OutcomeInvalid
	}
	m, ok := lookup(b.tables, ctx.Desc, e.payload)
	if !ok {
		return cuda.OutcomeMemory
	}
	var made nvme.SQE
	nvme.BuildRW(&made, b.write, cid, q.NSID, e.unit<<q.LBAShift, e.bytes/unitBytes<<q.LBAShift)
	switch {
	case cell == 0:
		ok = b.direct(&made, &m, e.bytes, e.payload)
	case uint64(e.bytes) > room:
		ok = false
	default:
		b.contiguous(&made, cell, e.bytes)
	}
	if !ok {
		return cuda.OutcomeMemory
	}
	publish(sqe, &made)
	return cuda.OutcomeOK
}

// publish writes a command into its queue, which Go code reads when the host has rung.
//
//go:norace
func publish(sqe, made *nvme.SQE) { *sqe = *made }

// cellOffset is where the cell of IOCTX k of a chunk begins.
func cellOffset(c *cuda.KernelCells, k uint32) uint64 {
	return uint64(k/c.Group)*uint64(c.Stride) + uint64(*at[uint32](c.Offsets, uint64(k%c.Group)))
}

func build(p *cuda.BuildParams) {
	b := &builder{
		tables: &p.Tables, prp: prpTable{p.PRPBase, p.PRPDMA}, write: p.Write != 0, sgl: p.SGL != 0,
	}
	for lane := range p.Lanes {
		for drive := range p.Drives {
			buildQueue(p, b, lane, drive)
			atomic.AddUint32(at[uint32](p.Done, 0), 1)
		}
	}
}

// buildQueue is one block's work.
func buildQueue(p *cuda.BuildParams, b *builder, lane, drive uint32) {
	q := at[cuda.KernelQueue](p.Queues, uint64(lane*p.Drives+drive))
	made := uint32(0)
	for c := range p.ChunkCount {
		chunk := at[cuda.KernelChunk](p.Chunks, uint64(c))
		if chunk.Lane != lane {
			continue
		}
		before, units := made, uint32(0)
		for k := range chunk.Count {
			i := uint64(chunk.First + k)
			ctx := at[cuda.KernelIOCTX](p.IOCTXs, i)
			e := locate(&p.Tables, ctx)
			if e.queue < 0 && drive == 0 {
				*at[uint8](p.Outcomes, i) = cuda.OutcomeUnmapped
			}
			if e.queue != int(drive) {
				continue
			}
			cell, room := uint64(0), uint64(0)
			if chunk.Cells != 0 {
				offset := cellOffset(&p.Cells, k)
				cell, room = chunk.Cells+offset, uint64(p.CellBytes)-min(offset, uint64(p.CellBytes))
			}
			sqe := at[nvme.SQE](q.SQ, uint64((q.Tail+made)&q.Mask))
			if o := b.command(sqe, ctx, e, q, uint16(q.FirstID+made), cell, room); o != cuda.OutcomeOK {
				*at[uint8](p.Outcomes, i) = o
				continue
			}
			made++
			if ctx.Flags == 0 {
				units += e.bytes / unitBytes
			}
		}
		*at[cuda.KernelCount](p.Counts, uint64(c*p.Drives+drive)) = cuda.KernelCount{Commands: made - before, Units: units}
	}
}

func register(p *cuda.RegisterParams) {
	n := uint64(p.Classes) * p.Blocks * uint64(p.Runs)
	for i := range n {
		number, block := i%uint64(p.Runs), i/uint64(p.Runs)%p.Blocks
		class := i / uint64(p.Runs) / p.Blocks
		s := at[cuda.StridedRun](p.Strided, class*uint64(p.Runs)+number)
		address := s.Base + block*s.Stride + p.IO
		*at[cuda.KernelRun](p.Table, i) = cuda.KernelRun{Address: address, Bytes: s.Bytes}
		if p.Lists == 0 {
			continue
		}
		next := uint64(0)
		if number+1 < uint64(p.Runs) {
			f := at[cuda.StridedRun](p.Strided, class*uint64(p.Runs)+number+1)
			next = f.Base + block*f.Stride + p.IO
		}
		registerList(p.Lists+i*uint64(p.ListBytes), uint64(p.ListBytes)/8, address, s.Bytes, next)
	}
}

// registerList writes the pages after a run's first, and then the address of the run that follows, so that the lists of
// an object's runs make one list where they fill their places.
func registerList(list, words, address uint64, n uint32, next uint64) {
	own := uint64(pages(address, n)) - 1
	for j := range words {
		e := uint64(0)
		switch {
		case j < own:
			e = address&^(pageBytes-1) + (j+1)*pageBytes
		case j == own:
			e = next
		}
		*at[uint64](list, j) = e
	}
}

package cudatest

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/cuda"
	"tuttifs/nvme"
)

// world is one memory with everything that kernels read and write, filled at random. Two implementations of a kernel
// that run on the same world must leave the same bytes.
type world struct {
	memory []byte
	used   int
	random *rand.Rand

	tables  cuda.KernelTables
	cells   cuda.KernelCells
	sums    cuda.SumsParams
	objects []cuda.KernelObject
	lanes   uint32
	drives  uint32
	count   uint32 // IOCTXs
	chunks  uint32

	ioctxs, chunksAt, queues, counts, outcomes, done, blocks uint64
	prpBase, prpDMA                                          uint64
	regions                                                  []cuda.KernelRegion
	flat                                                     [4]flatRegion
	table                                                    tableRegion
}

// worldBytes is the memory of a world, worldFilled what is filled at random of it.
const (
	worldBytes  = 48 << 20
	worldFilled = 24 << 20
)

const (
	objectBytesMax = 5*unitBytes + 17
	cellMax        = 6 * unitBytes
	queueDepth     = 1024
)

type flatRegion struct {
	base, at, bytes uint64
	id              uint64
	align           uint64
}

type tableRegion struct {
	entries uint64
	at      uint64
	limit   uint64
	id      uint64
}

// mapWorld is memory of no Go object.
func mapWorld(t testing.TB) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, worldBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b
}

func (w *world) alloc(n, align uint64) uint64 {
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(w.memory))))
	at := (base + uint64(w.used) + align - 1) &^ (align - 1)
	w.used = int(at - base + n)
	if w.used > len(w.memory) {
		panic("the world is full")
	}
	return at
}

// put copies a slice into the world.
func put[T any](w *world, s []T) uint64 {
	var t T
	at := w.alloc(uint64(len(s))*uint64(unsafe.Sizeof(t))+16, 64)
	for i := range s {
		*atPlace[T](at, i) = s[i]
	}
	return at
}

func atPlace[T any](address uint64, i int) *T { return at[T](address, uint64(i)) }

// chance is true once in n.
func (w *world) chance(n int) bool { return w.random.IntN(n) == 0 }

// newWorld makes a world of some lanes, drives and IOCTXs in memory that is zero.
func newWorld(memory []byte, seed uint64, sums bool) *world {
	w := &world{memory: memory, random: rand.New(rand.NewPCG(seed, 1))}
	fill := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = fill.Read(memory[:worldFilled])
	w.lanes, w.drives = 1+w.random.Uint32N(4), 1+w.random.Uint32N(5)
	w.count = 1 + w.random.Uint32N(300)
	w.makeObjects()
	w.makeMap()
	w.makeRegions()
	w.makeIOCTXs()
	w.makeQueues()
	w.outcomes = put(w, make([]uint8, w.count))
	w.done, w.blocks = put(w, []uint32{7}), put(w, []uint32{0})
	if sums {
		w.makeSums()
	}
	return w
}

func (w *world) makeObjects() {
	for range 1 + w.random.IntN(20) {
		n := 1 + w.random.Uint32N(objectBytesMax)
		switch w.random.IntN(4) {
		case 0:
			n = (n + unitBytes - 1) &^ (unitBytes - 1)
		case 1:
			n = (n + 15) &^ 15
		case 2:
			n = (n + 3) &^ 3
		}
		w.objects = append(w.objects, cuda.KernelObject{
			Offset: w.random.Uint32N(1000), Bytes: n, Units: uint16((n + unitBytes - 1) / unitBytes),
		})
	}
}

func (w *world) makeMap() {
	width := 1 + w.random.Uint32N(6)
	for i := range w.objects {
		w.objects[i].Position = uint16(w.random.Uint32N(width))
	}
	const rows = 5
	entries := make([]uint64, rows*width)
	for i := range entries {
		entries[i] = uint64(w.random.IntN(8))<<unitBits | w.random.Uint64()>>20
		if w.chance(20) {
			entries[i] = noEntry
		}
	}
	drives := make([]int16, 7)
	for i := range drives {
		drives[i] = int16(w.random.IntN(int(w.drives)+1)) - 1
		if !w.chance(3) {
			drives[i] = int16(w.random.IntN(int(w.drives)))
		}
	}
	w.tables = cuda.KernelTables{
		Objects: put(w, w.objects), Entries: put(w, entries), Drives: put(w, drives),
		SlotUnits: 1 + w.random.Uint64N(100), EntryCount: uint64(len(entries)),
		ObjectCount: uint32(len(w.objects)), DriveCount: uint32(len(drives)), Width: width,
		SlotsPerRow: 1 + w.random.Uint32N(40),
	}
}

// makeRegions registers flat memory of different alignments, direct and not, and one table.
func (w *world) makeRegions() {
	w.regions = make([]cuda.KernelRegion, 1<<regionBits)
	w.prpBase, w.prpDMA = w.random.Uint64()&^(pageBytes-1), w.random.Uint64()>>8&^(pageBytes-1)
	for i := range w.flat {
		f := &w.flat[i]
		f.align = []uint64{pageBytes, 16, 4, 1}[i]
		f.bytes = 2 << 20
		f.base = w.alloc(f.bytes, pageBytes)
		number := 5 + i
		w.regions[number] = cuda.KernelRegion{
			Base: f.base, Limit: f.bytes, IO: w.prpDMA - w.flat[0].base, Kind: cuda.RegionFlat, Generation: uint8(40 + i),
			Direct: uint8(w.random.IntN(2)), Padded: uint8(w.random.IntN(2)),
		}
		f.id = uint64(40+i)<<(offsetBits+regionBits) | uint64(number)<<offsetBits
	}
	w.table = tableRegion{at: w.random.Uint64N(500), limit: 4096, id: 99<<(offsetBits+regionBits) | 4095<<offsetBits}
	w.table.entries = w.alloc(w.table.limit*16, 64)
	clear(bytesAt(w.table.entries, uint32(w.table.limit*16)))
	r := cuda.KernelRegion{
		Base: w.table.entries, Limit: w.table.limit, IO: w.random.Uint64() &^ (pageBytes - 1),
		TableIO: w.random.Uint64() &^ 15, PRPIO: w.random.Uint64() &^ (pageBytes - 1), ListBytes: 8,
		Kind: cuda.RegionTable, Generation: 99, Direct: uint8(w.random.IntN(2)), Padded: uint8(w.random.IntN(2)),
	}
	if w.chance(4) {
		r.PRPIO = 0
	}
	if w.chance(2) {
		r.ListBytes = 8 << w.random.IntN(4)
	}
	w.regions[4095] = r
	w.tables.Regions = put(w, w.regions)
}

// descriptor gives an object memory of its own, of any shape; sometimes one that is wrong.
func (w *world) descriptor(payload uint32) uint64 {
	switch w.random.IntN(30) {
	case 0:
		return w.flat[0].id ^ 1<<(offsetBits+regionBits) // another generation
	case 1:
		return w.flat[1].id + w.flat[1].bytes - uint64(payload) + 1 // too short
	case 2:
		return w.random.Uint64()
	case 3:
		return w.table.id | w.table.limit - 1
	}
	if w.chance(2) {
		return w.runs(payload)
	}
	f := &w.flat[w.random.IntN(len(w.flat))]
	offset := f.at
	f.at += (uint64(payload+unitBytes)/f.align + 1) * f.align
	if f.at > f.bytes {
		return 0
	}
	return f.id + offset
}

// runs gives an object entries of the table: pages, or runs of one alignment.
func (w *world) runs(payload uint32) uint64 {
	index := w.table.at
	io := w.regions[4095].IO
	align := []uint32{pageBytes, 2048, 64, 16, 4, 1}[w.random.IntN(6)]
	whole := uint32(0)
	if w.chance(3) { // runs whose PRP lists make one
		align, whole = pageBytes, w.regions[4095].ListBytes/8*pageBytes
	}
	for left := int64(payload); left > 0; w.table.at++ {
		n := (1 + w.random.Uint32N(payload)/align) * align
		if w.chance(2) {
			n = max(align, uint32(left+int64(align)-1)/align*align)
		}
		if whole != 0 {
			n = whole
		}
		address := w.alloc(uint64(n)+uint64(w.random.IntN(2)*pageBytes), uint64(align))
		if w.table.at >= w.table.limit {
			return 0
		}
		*at[cuda.KernelRun](w.table.entries, w.table.at) = cuda.KernelRun{Address: address + io, Bytes: n}
		left -= int64(n)
	}
	if w.chance(3) {
		w.table.at++ // an empty entry
	}
	return w.table.id | index
}

func (w *world) makeIOCTXs() {
	ctxs := make([]cuda.KernelIOCTX, w.count)
	for i := range ctxs {
		object := w.random.IntN(len(w.objects))
		ctxs[i] = cuda.KernelIOCTX{
			Desc: w.descriptor(w.objects[object].Bytes), Slot: w.random.Uint32N(5 * w.tables.SlotsPerRow),
			Object: uint16(object),
		}
		switch w.random.IntN(40) {
		case 0:
			ctxs[i].Flags = flagFlush
		case 1:
			ctxs[i].Flags = uint16(w.random.Uint32())
		case 2:
			ctxs[i].Object = uint16(len(w.objects) + w.random.IntN(100))
		case 3:
			ctxs[i].Slot = w.random.Uint32()
		}
	}
	w.ioctxs = put(w, ctxs)
	group := 1 + w.random.Uint32N(4)
	offsets := make([]uint32, group)
	for i := range offsets {
		offsets[i] = uint32(i) * cellMax
	}
	w.cells = cuda.KernelCells{Offsets: put(w, offsets), Stride: group * cellMax, Group: group}
	var chunks []cuda.KernelChunk
	for first := uint32(0); first < w.count; {
		n := min(w.count-first, 1+w.random.Uint32N(100))
		chunk := cuda.KernelChunk{First: first, Count: n, Lane: w.random.Uint32N(w.lanes)}
		if !w.chance(3) {
			chunk.Cells = w.alloc(uint64(n)*cellMax, pageBytes)
		}
		chunks = append(chunks, chunk)
		first += n
	}
	w.chunks, w.chunksAt = uint32(len(chunks)), put(w, chunks)
	w.counts = put(w, make([]cuda.KernelCount, w.chunks*w.drives))
}

func (w *world) makeQueues() {
	queues := make([]cuda.KernelQueue, w.lanes*w.drives)
	for i := range queues {
		queues[i] = cuda.KernelQueue{
			SQ: w.alloc(queueDepth*nvme.SQEBytes, pageBytes), CQ: w.alloc(queueDepth*nvme.CQEBytes, pageBytes),
			Mask: queueDepth - 1, Tail: w.random.Uint32N(queueDepth), FirstID: w.random.Uint32N(1 << 16),
			LBAShift: 3 * w.random.Uint32N(2), NSID: 1 + w.random.Uint32N(3),
			SQTail: w.alloc(128, 128), CQHead: w.alloc(128, 128),
		}
		*at[uint32](queues[i].SQTail, 0), *at[uint32](queues[i].CQHead, 0) = 0, 0
		clear(bytesAt(queues[i].CQ, queueDepth*nvme.CQEBytes))
	}
	w.queues = put(w, queues)
}

// makeSums gives every IOCTX a sum of its own.
func (w *world) makeSums() {
	perSlot := 1 + w.random.Uint32N(5)
	slots := (w.count + perSlot - 1) / perSlot
	active, ordinals := make([]uint32, slots), make([]uint16, perSlot)
	for i, v := range w.random.Perm(int(slots)) {
		active[i] = uint32(v)
	}
	for i, v := range w.random.Perm(int(perSlot)) {
		ordinals[i] = uint16(v)
	}
	w.sums = cuda.SumsParams{
		Seeds: w.alloc(uint64(slots)*16, 16), Sums: w.alloc(uint64(slots*perSlot)*8, 16), Ordinals: put(w, ordinals),
		PerSlot: perSlot, RankObjs: perSlot, Rank: w.random.Uint32N(100),
	}
	if w.chance(2) {
		w.sums.Active = put(w, active)
	}
}

func (w *world) buildParams() *cuda.BuildParams {
	return &cuda.BuildParams{
		Tables: w.tables, Cells: w.cells, IOCTXs: w.ioctxs, Chunks: w.chunksAt, Queues: w.queues, Counts: w.counts,
		Outcomes: w.outcomes, Done: w.done, Blocks: w.blocks, PRPBase: w.prpBase, PRPDMA: w.prpDMA, ChunkCount: w.chunks,
		Lanes: w.lanes, Drives: w.drives, CellBytes: 90 * cellMax,
		Write: uint8(w.random.IntN(2)), SGL: uint8(w.random.IntN(2)),
	}
}

func (w *world) moveParams() *cuda.HarvestParams {
	return &cuda.HarvestParams{
		Tables: w.tables, Cells: w.cells, Sums: w.sums, IOCTXs: w.ioctxs, Chunks: w.chunksAt, Outcomes: w.outcomes,
		Done: w.done, Blocks: w.blocks, ChunkCount: w.chunks,
	}
}

// expectSums fills in the sums that harvest finds, but for a few.
func (w *world) expectSums(p *cuda.HarvestParams) {
	for c := range w.chunks {
		chunk := at[cuda.KernelChunk](p.Chunks, uint64(c))
		for k := range chunk.Count {
			i := chunk.First + k
			ctx := at[cuda.KernelIOCTX](p.IOCTXs, uint64(i))
			payload, _ := payloadOf(&p.Tables, ctx.Object)
			m, ok := lookup(&p.Tables, ctx.Desc, payload)
			if !ok || w.chance(10) {
				continue
			}
			b := []byte(nil)
			if chunk.Cells != 0 {
				b = bytesAt(chunk.Cells+cellOffset(&p.Cells, k), payload)
			} else {
				b = m.gather(make([]byte, payload))
			}
			sum, place := (summer{&p.Sums}).sum(i, ctx.Object, b)
			*place = sum
		}
	}
}

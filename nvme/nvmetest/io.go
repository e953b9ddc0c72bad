package nvmetest

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// pairs: a queue pair in the caller's memory, driven by the caller.
func pairs(b *bench) {
	b.open(vfio.Options{})
	const depth = 16
	memory, err := b.c.Alloc(nvme.QueueBytes(depth))
	require.NoError(b, err)
	fill(memory.Bytes, 1) // what lay there before is cleared
	p, err := b.c.NewPair(depth, memory)
	require.NoError(b, err)
	require.Len(b, p.SQ, depth)
	require.Len(b, p.CQ, depth)
	select {
	case <-p.Lost():
		b.Fatal("lost")
	default:
	}
	stride := b.c.Capabilities().Stride()
	require.Equal(b, nvme.SQTailDoorbell(p.ID, stride), p.SQTail)
	require.Equal(b, nvme.CQHeadDoorbell(p.ID, stride), p.CQHead)
	require.NotEqual(b, b.q.ID(), p.ID)
	e := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	e.CID = 0x77
	p.SQ[0] = e
	p.RingSQ(1)
	var status nvme.Status
	require.Eventually(b, func() bool {
		cid, st, ok := p.CQ[0].Poll(1)
		status = st
		return ok && cid == 0x77
	}, 20*time.Second, 100*time.Microsecond)
	require.Equal(b, nvme.Success, status)
	require.Equal(b, p.ID, p.CQ[0].SQID)
	p.RingCQ(1)
	require.NoError(b, p.Delete())
	require.ErrorIs(b, p.Delete(), vfio.ErrClosed)

	p, err = b.c.NewPair(2, nil)
	require.NoError(b, err)
	require.NoError(b, b.c.Reset())
	<-p.Lost()
	require.NoError(b, p.Delete(), "what is lost is deleted")
	again, err := b.c.NewPair(depth, memory)
	require.NoError(b, err)
	require.NoError(b, again.Delete())
	_, err = b.c.NewPair(depth, b.buf)
	require.NoError(b, err, "more memory than it takes")
	_, err = b.c.NewPair(4096, memory)
	require.ErrorIs(b, err, vfio.ErrUnsuitable, "less than it takes")
	require.NoError(b, memory.Free())
}

// prp: transfers of all lengths, from all offsets in a page, with lists that cross pages.
func prp(b *bench) {
	b.open(vfio.Options{})
	most := min(b.c.TransferMax(), 1<<20)
	const back = 2 << 20
	lengths := []int{b.ns.LBABytes(), 4096, 8192, 3 * 4096, 64 << 10, most}
	for i, n := range lengths {
		for _, off := range []int{0, 512, 4, 4092} {
			if n > most {
				continue
			}
			lba := b.block(uint64(i) * 8)
			fill(b.buf.Bytes[off:][:n], uint64(i*10+off))
			b.do(b.byPRP(b.rw(true, lba, n), off, n))
			clear(b.buf.Bytes[back:][:n+8192])
			b.do(b.byPRP(b.rw(false, lba, n), back+off, n))
			require.True(b, b.same(off, back+off, n), "%d bytes from %d", n, off)
			require.Zero(b, b.buf.Bytes[back+off+n], "nothing beyond it")
			b.read(lba, back, n)
			require.True(b, b.same(off, back, n), "in small pieces")
		}
	}
	// A list that begins in the middle of a page, and goes on in the next.
	words, at := b.list()
	const n, skip = 64 << 10, 4096/8 - 5
	if most < n {
		return
	}
	fill(b.buf.Bytes[:n], 5)
	b.write(b.block(0), 0, n)
	e := b.rw(false, b.block(0), n)
	require.NoError(b, e.SetPRP(b.buf.IOVA+back, n, words[skip:], at+skip*8))
	clear(b.buf.Bytes[back:][:n])
	b.do(e)
	require.True(b, b.same(0, back, n))
}

func prpStatus(b *bench) {
	b.open(vfio.Options{})
	words, at := b.list()
	two, three := b.rw(false, b.block(0), 8192), b.rw(false, b.block(0), 3*4096)
	two.DPTR = [2]uint64{b.buf.IOVA, b.buf.IOVA + 4096 + 512}
	b.refused(two, nvme.PRPOffsetInvalid)
	if b.c.TransferMax() < 3*4096 {
		return
	}
	words[0], words[1] = b.buf.IOVA+4096, b.buf.IOVA+8192+512
	three.DPTR = [2]uint64{b.buf.IOVA, at}
	b.refused(three, nvme.PRPOffsetInvalid)
	words[1] = b.buf.IOVA + 8192
	b.do(three)
}

// sgl: data blocks of all kinds, in one or several segments.
func sgl(b *bench) {
	b.open(vfio.Options{})
	align, ok := b.c.HasSGL()
	if !ok {
		e := b.rw(false, b.block(0), 4096)
		require.NoError(b, e.SetSGL(b.buf.IOVA, 4096))
		b.refused(e, nvme.InvalidField)
		b.Skip("no SGLs, and it says so")
	}
	const n, back = 64 << 10, 1 << 20
	total := min(n, b.c.TransferMax())
	fill(b.buf.Bytes[:total], 3)
	e := b.rw(true, b.block(0), total)
	require.NoError(b, e.SetSGL(b.buf.IOVA, uint32(total)))
	b.do(e)
	b.read(b.block(0), back, total)
	require.True(b, b.same(0, back, total))

	r := rand.New(rand.NewPCG(4, 4))
	for lap := range 20 {
		pieces := cut(r, total, 1+r.IntN(24), int(align))
		scattered := b.scatter(r, pieces, int(align))
		segments := 1 + lap%3
		if b.qemu() {
			segments = min(segments, 2)
		}
		e := b.rw(lap%2 == 0, b.block(0), total)
		b.chain(&e, scattered, segments)
		if lap%2 == 0 { // a write of what lies scattered
			for i, d := range scattered {
				fill(b.buf.Bytes[d.Addr-b.buf.IOVA:][:d.Length], uint64(lap*100+i))
			}
		}
		b.do(e)
		b.read(b.block(0), 0, total)
		at := 0
		for _, d := range scattered {
			require.True(b, b.same(at, int(d.Addr-b.buf.IOVA), int(d.Length)), "lap %d", lap)
			at += int(d.Length)
		}
	}
}

// cut divides n into pieces that are multiples of align.
func cut(r *rand.Rand, n, pieces, align int) (out []int) {
	for ; pieces > 1 && n > 2*align; pieces-- {
		k := (1 + r.IntN(n/align-1)) * align
		k = min(k, n-align)
		out, n = append(out, k), n-k
	}
	return append(out, n)
}

// scatter places pieces apart from each other, above the first MiB of the test's memory.
func (b *bench) scatter(r *rand.Rand, pieces []int, align int) (out []nvme.SGLDescriptor) {
	at := 2 << 20
	for _, n := range pieces {
		at += (1 + r.IntN(1000)) * align
		out = append(out, nvme.MakeSGL(nvme.SGLDataBlock, b.buf.IOVA+uint64(at), uint32(n)))
		at += n
	}
	return out
}

// chain writes descriptors into a list of segments and points the command at it.
func (b *bench) chain(e *nvme.SQE, descriptors []nvme.SGLDescriptor, segments int) {
	words, at := b.list()
	segments = min(segments, len(descriptors))
	each := (len(descriptors) + segments - 1) / segments
	type segment struct {
		at   uint64
		list []nvme.SGLDescriptor
	}
	var chain []segment
	for len(descriptors) > 0 {
		k := min(each, len(descriptors))
		chain = append(chain, segment{at, descriptors[:k]})
		descriptors, at = descriptors[k:], at+4096
	}
	_, base := b.list()
	pointer := func(i int) nvme.SGLDescriptor { // to segment i
		n, kind := len(chain[i].list), uint8(nvme.SGLLastSegment)
		if i < len(chain)-1 {
			n, kind = n+1, nvme.SGLSegment
		}
		return nvme.MakeSGL(kind, chain[i].at, uint32(n*nvme.SGLDescriptorBytes))
	}
	for i, s := range chain {
		list := s.list
		if i < len(chain)-1 {
			list = append(list[:len(list):len(list)], pointer(i+1))
		}
		for k, d := range list {
			w := words[(s.at-base)/8+uint64(2*k):]
			w[0], w[1] = d.Addr, uint64(d.Length)|uint64(d.ID)<<56
		}
	}
	e.SetSGLDescriptor(pointer(0))
}

func sglStatus(b *bench) {
	b.open(vfio.Options{})
	if _, ok := b.c.HasSGL(); !ok {
		b.Skip("no SGLs")
	}
	_, at := b.list()
	for _, c := range []struct {
		name string
		d    nvme.SGLDescriptor
		want []nvme.Status
	}{
		{"short data block", nvme.MakeSGL(nvme.SGLDataBlock, b.buf.IOVA, 4096-512), []nvme.Status{nvme.SGLLengthInvalid}},
		{"keyed", nvme.MakeSGL(nvme.SGLKeyed, b.buf.IOVA, 4096), b.perhaps(nvme.SGLSegmentInvalid, nvme.SGLTypeInvalid)},
		{"segment of no descriptors", nvme.MakeSGL(nvme.SGLLastSegment, at, 15), []nvme.Status{nvme.SGLSegmentInvalid}},
	} {
		e := b.rw(false, b.block(0), 4096)
		e.SetSGLDescriptor(c.d)
		_, err := b.q.Do(e)
		require.Error(b, err, c.name)
		requireStatus(b, err, c.want...)
	}
	// A segment that does not hold all of the command's bytes.
	e := b.rw(false, b.block(0), 8192)
	b.chain(&e, []nvme.SGLDescriptor{nvme.MakeSGL(nvme.SGLDataBlock, b.buf.IOVA, 4096)}, 1)
	b.refused(e, nvme.SGLLengthInvalid)
	both := b.rw(false, b.block(0), 4096)
	both.Flags = nvme.FlagPSDTMask
	both.DPTR[0] = b.buf.IOVA
	b.refused(both, nvme.InvalidField)
}

// transferLimit: what MDTS allows works, one block more does not.
func transferLimit(b *bench) {
	b.open(vfio.Options{})
	id := b.c.Identity()
	if id.MDTS == 0 || 4096<<id.MDTS > 2<<20 {
		b.Skipf("MDTS %d is more than the suite's memory", id.MDTS)
	}
	n := 4096 << id.MDTS
	require.Equal(b, n, b.c.TransferMax())
	fill(b.buf.Bytes[:n], 2)
	b.do(b.byPRP(b.rw(true, b.block(0), n), 0, n))
	b.do(b.byPRP(b.rw(false, b.block(0), n), 2<<20, n))
	require.True(b, b.same(0, 2<<20, n))
	more := n + b.ns.LBABytes()
	for _, write := range []bool{false, true} {
		b.refused(b.byPRP(b.rw(write, b.block(0), more), 0, more), nvme.InvalidField)
	}
}

func ioStatus(b *bench) {
	b.open(vfio.Options{})
	with := func(e nvme.SQE, f func(*nvme.SQE)) nvme.SQE { f(&e); return e }
	read := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	fill(b.buf.Bytes[:4096], 8)
	before := bytes.Clone(b.buf.Bytes[:4096])
	for _, c := range []struct {
		name string
		e    nvme.SQE
		want nvme.Status
	}{
		{"opcode", with(read, func(e *nvme.SQE) { e.Opcode = 0x7e }), nvme.InvalidOpcode},
		{"namespace 0", with(read, func(e *nvme.SQE) { e.NSID = 0 }), nvme.InvalidNamespace},
		{"all namespaces", with(read, func(e *nvme.SQE) { e.NSID = nvme.NSIDBroadcast }), nvme.InvalidNamespace},
		{"no such namespace", with(read, func(e *nvme.SQE) { e.NSID = b.c.Identity().NN + 1 }), nvme.InvalidNamespace},
		{"fused", with(read, func(e *nvme.SQE) { e.Flags = 1 }), nvme.InvalidField},
		{"behind the end", with(read, func(e *nvme.SQE) {
			e.CDW10, e.CDW11 = uint32(b.ns.Blocks), uint32(b.ns.Blocks>>32)
		}), nvme.LBAOutOfRange},
		{"across the end", with(b.byPRP(b.rw(false, b.ns.Blocks-1, 8192), 0, 8192), func(*nvme.SQE) {}), nvme.LBAOutOfRange},
		{"the highest block", with(read, func(e *nvme.SQE) { e.CDW10, e.CDW11 = 1<<32-1, 1<<32-1 }), nvme.LBAOutOfRange},
		{"flush of no namespace", nvme.SQE{Opcode: nvme.IOFlush, NSID: b.c.Identity().NN + 1}, nvme.InvalidNamespace},
	} {
		_, err := b.q.Do(c.e)
		require.Error(b, err, c.name)
		requireStatus(b, err, c.want)
	}
	require.Equal(b, before, b.buf.Bytes[:4096], "a refused command moves nothing")
	b.do(read)
}

func flush(b *bench) {
	b.open(vfio.Options{})
	var e nvme.SQE
	b.write(b.block(0), 0, 4096)
	nvme.BuildFlush(&e, 0, b.ns.ID)
	b.do(e)
	if id := b.c.Identity(); id.VWC&nvme.VWCFlushNSID == nvme.VWCFlushNSID {
		nvme.BuildFlush(&e, 0, nvme.NSIDBroadcast)
		b.do(e)
	}
	w := b.byPRP(b.rw(true, b.block(0), 4096), 0, 4096)
	w.CDW12 |= nvme.RWForceUnit
	b.do(w)
}

func writeZeroes(b *bench) {
	b.open(vfio.Options{})
	var e nvme.SQE
	blocks := uint32(16384 >> b.ns.LBAShift)
	nvme.BuildWriteZeroes(&e, 0, b.ns.ID, b.block(0)+uint64(4096>>b.ns.LBAShift), blocks, false)
	if id := b.c.Identity(); id.ONCS&nvme.ONCSWriteZeroes == 0 {
		b.refused(e, nvme.InvalidOpcode)
		b.Skip("no Write Zeroes, and it says so")
	}
	const n = 24576
	fill(b.buf.Bytes[:n], 6)
	b.write(b.block(0), 0, n)
	b.do(e)
	b.read(b.block(0), 1<<20, n)
	clear(b.buf.Bytes[4096:][:16384])
	require.True(b, b.same(0, 1<<20, n))
	nvme.BuildWriteZeroes(&e, 0, b.ns.ID, b.ns.Blocks-1, 2, false)
	b.refused(e, nvme.LBAOutOfRange)
}

// deallocate: what is deallocated may read as anything, its neighbours are what they were.
func deallocate(b *bench) {
	b.open(vfio.Options{})
	var e nvme.SQE
	ranges := b.buf.Bytes[1<<20:]
	for _, count := range []int{1, 7, 256} {
		const each = 8192 // a deallocated unit, and one that stays
		n := count * each
		fill(b.buf.Bytes[:min(n, 256<<10)], uint64(count))
		for at := 0; at < n; at += 256 << 10 {
			b.write(b.block(uint64(at>>b.ns.LBAShift)), 0, min(n-at, 256<<10))
		}
		for i := range count {
			nvme.PutDSMRange(ranges[i*nvme.DSMRangeBytes:], b.block(uint64(i*each>>b.ns.LBAShift)),
				uint32(4096>>b.ns.LBAShift))
		}
		nvme.BuildDSM(&e, 0, b.ns.ID, count)
		e = b.byPRP(e, 1<<20, count*nvme.DSMRangeBytes)
		if id := b.c.Identity(); id.ONCS&nvme.ONCSDSM == 0 {
			b.refused(e, nvme.InvalidOpcode)
			b.Skip("no Dataset Management, and it says so")
		}
		b.do(e)
		for i := range count {
			at := i*each + 4096
			b.read(b.block(uint64(at>>b.ns.LBAShift)), 2<<20, 4096)
			require.True(b, b.same(at%(256<<10), 2<<20, 4096), "unit beside range %d of %d", i, count)
			b.read(b.block(uint64(i*each>>b.ns.LBAShift)), 2<<20, 4096)
		}
	}
}

// compare: commands that a controller need not have are there if it says so.
func compare(b *bench) {
	b.open(vfio.Options{})
	fill(b.buf.Bytes[:4096], 4)
	b.write(b.block(0), 0, 4096)
	e := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	e.Opcode = nvme.IOCompare
	if id := b.c.Identity(); id.ONCS&nvme.ONCSCompare == 0 {
		b.refused(e, nvme.InvalidOpcode)
		return
	}
	b.do(e)
	b.buf.Bytes[100]++
	b.refused(e, nvme.CompareFailure)
}

// load: several queues, all of their depth, from several threads; every block is what was written to it last.
func load(b *bench) {
	b.open(vfio.Options{})
	const cells, laps = 24, 60
	queues := []*vfio.Queue{b.q}
	for range min(3, b.c.Queues()-1) {
		q, err := b.c.NewQueue(8)
		require.NoError(b, err)
		queues = append(queues, q)
	}
	var group sync.WaitGroup
	var failed atomic.Bool
	for cell := range cells {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(cell), 0))
			at := cell * 3 * 4096 // what is written, and what is read
			words := make([]uint64, 8)
			for range laps {
				q := queues[r.IntN(len(queues))]
				n := 4096 * (1 + r.IntN(2))
				lba := b.block(uint64((cell*2*4096 + r.IntN(2)*(8192-n)) >> b.ns.LBAShift))
				w, x := b.rw(true, lba, n), b.rw(false, lba, n)
				fill(b.buf.Bytes[at:][:n], r.Uint64())
				_ = w.SetPRP(b.buf.IOVA+uint64(at), uint32(n), words, 0)
				_ = x.SetPRP(b.buf.IOVA+uint64(at+1<<20), uint32(n), words, 0)
				_, err := q.Do(w)
				if err == nil {
					_, err = q.Do(x)
				}
				if err != nil || !b.same(at, at+1<<20, n) {
					b.Logf("cell %d, queue %d: %v", cell, q.ID(), err)
					failed.Store(true)
					return
				}
			}
		})
	}
	group.Wait()
	require.False(b, failed.Load())
	for _, q := range queues {
		require.Zero(b, q.Spurious())
	}
}

// mediaError: a block that cannot be read, or written, is an error of its own command, and of no other.
func mediaError(b *bench) {
	if b.rig.BadBlocks == 0 {
		b.Skip("the rig has no bad block")
	}
	b.open(vfio.Options{})
	n := b.ns.LBABytes()
	for range 2 {
		b.refused(b.byPRP(b.rw(false, b.rig.BadLBA, n), 0, n), nvme.UnrecoveredRead)
		b.read(b.block(0), 0, 4096)
	}
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	defer func() { require.NoError(b, d.Close()) }()
	err = d.ReadAt(make([]byte, n), int64(b.rig.BadLBA)<<b.ns.LBAShift)
	require.ErrorIs(b, err, nvme.UnrecoveredRead)
	if b.rig.WornLBA == 0 {
		return
	}
	fill(b.buf.Bytes[:4096], 21)
	for range 2 {
		b.refused(b.byPRP(b.rw(true, b.rig.WornLBA, n), 0, n), nvme.WriteFault)
		b.write(b.block(0), 0, 4096)
	}
	err = d.WriteAt(make([]byte, n), int64(b.rig.WornLBA)<<b.ns.LBAShift)
	require.ErrorIs(b, err, nvme.WriteFault)
	require.NoError(b, d.Flush(), "what was written is safe")
	b.read(b.block(0), 8192, 4096)
	require.True(b, b.same(0, 8192, 4096))
}

// discardRanges: many ranges go in few commands, and what lies between them is what it was.
func discardRanges(b *bench, d *vfio.Drive, base int64, model []byte) {
	var ranges []drive.Range
	for off := 1 << 20; off < len(model) && len(ranges) < nvme.DSMRangesMax; off += 4096 {
		ranges = append(ranges, drive.Range{Off: base + int64(off), N: 2048})
	}
	commands, err := drive.DiscardRanges(d, ranges)
	if id := b.c.Identity(); id.ONCS&nvme.ONCSDSM == 0 {
		require.ErrorIs(b, err, drive.ErrNotSupported)
		return
	}
	require.NoError(b, err)
	require.LessOrEqual(b, commands, (len(ranges)+d.DiscardMost()-1)/d.DiscardMost())
	whole := make([]byte, len(model))
	require.NoError(b, d.ReadAt(whole, base))
	for _, r := range ranges {
		at := int(r.Off - base + r.N)
		require.True(b, bytes.Equal(model[at:at+2048], whole[at:at+2048]), "behind the range at %d", r.Off-base)
	}
	ranges[7].Off = d.Size()
	_, err = drive.DiscardRanges(d, ranges)
	require.ErrorIs(b, err, drive.ErrRange)
}

// driveModel runs requests of every alignment against a plain slice that does the same.
func driveModel(b *bench) {
	b.openBare(vfio.Options{})
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	require.Equal(b, drive.NVMe, d.Kind())
	require.Equal(b, b.ns.LBABytes(), d.LBABytes())
	const size = 2 << 20
	base := int64(b.block(0)) << b.ns.LBAShift
	require.NoError(b, d.WriteZeroes(base, size))
	model := make([]byte, size)
	r := rand.New(rand.NewPCG(1, 2))
	steps := []int{1, 512, 4096}
	for range 150 {
		step := steps[r.IntN(len(steps))]
		n := r.IntN(300<<10/step) * step
		off := r.IntN((size-n)/step+1) * step
		switch r.IntN(5) {
		case 0, 1:
			p := make([]byte, n)
			for i := 0; i+8 <= n; i += 8 {
				binary.LittleEndian.PutUint64(p[i:], r.Uint64())
			}
			require.NoError(b, d.WriteAt(p, base+int64(off)))
			copy(model[off:], p)
		case 2:
			require.NoError(b, d.WriteZeroes(base+int64(off), int64(n)))
			clear(model[off : off+n])
		case 3:
			require.NoError(b, d.Flush())
		default:
			p := make([]byte, n)
			require.NoError(b, d.ReadAt(p, base+int64(off)))
			require.True(b, bytes.Equal(model[off:off+n], p), "read of %d at %d", n, off)
		}
	}
	whole := make([]byte, size)
	require.NoError(b, d.ReadAt(whole, base))
	require.True(b, bytes.Equal(model, whole))
	require.NoError(b, d.Discard(base+100, 64<<10))
	require.NoError(b, d.ReadAt(whole, base))
	require.True(b, bytes.Equal(model[100+64<<10:], whole[100+64<<10:]))
	discardRanges(b, d, base, model)
	require.ErrorIs(b, d.ReadAt(whole, d.Size()-1), drive.ErrRange)
	page := make([]byte, 512)
	require.NoError(b, drive.ReadLog(d, nvme.LogSMART, page))
	smart, err := nvme.ParseSMARTLog(page)
	require.NoError(b, err)
	require.NotZero(b, smart.HostWrites[0])
	require.ErrorIs(b, drive.ReadLog(d, 0xbe, page), drive.ErrNoLog)
	require.NoError(b, d.Close())
	require.Error(b, d.Flush())
}

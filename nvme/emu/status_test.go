package emu

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// unit is one authority's view: which units may be read and written, and what is held.
type ledger struct {
	deny   bool
	asked  int
	held   int
	failed int
	last   struct {
		write bool
		drive uint16
		unit  uint64
		units uint32
	}
}

func (l *ledger) Authorize(write bool, d uint16, unit uint64, units uint32) (Access, bool) {
	l.asked++
	l.last.write, l.last.drive, l.last.unit, l.last.units = write, d, unit, units
	if l.deny {
		return Access{}, false
	}
	l.held++
	return Access{Slot: uint32(unit), Ref: l}, true
}

func (l *ledger) Complete(a Access, ok bool) {
	l.held--
	if !ok {
		l.failed++
	}
}

const statusDrive = 1 << 20 // 2048 blocks of 512

// Every bad field has its own status, nothing moves, and the next command is served.
func TestStatusOfBadCommands(t *testing.T) {
	const base = dmaBase
	end := uint64(base) + 256<<10
	type edit func(h *host, e *nvme.SQE)
	sgl := func(kind uint8, addr uint64, n uint32) edit {
		return func(_ *host, e *nvme.SQE) { e.SetSGLDescriptor(nvme.MakeSGL(kind, addr, n)) }
	}
	// list puts descriptors into DMA memory at 64 KiB and points the command at them.
	list := func(kind uint8, ds ...nvme.SGLDescriptor) edit {
		return func(h *host, e *nvme.SQE) {
			w := words(h.dma[64<<10:])
			for i, d := range ds {
				var tmp nvme.SQE
				tmp.SetSGLDescriptor(d)
				w[2*i], w[2*i+1] = tmp.DPTR[0], tmp.DPTR[1]
			}
			e.SetSGLDescriptor(nvme.MakeSGL(kind, base+64<<10, uint32(len(ds)*16)))
		}
	}
	reserved := nvme.SGLFromWords(base, 4096|1<<40)
	keyed := nvme.SGLFromWords(base, 4096|uint64(0x01)<<56)
	block := func(n uint32) nvme.SGLDescriptor { return nvme.MakeSGL(nvme.SGLDataBlock, base, n) }
	many := make([]nvme.SGLDescriptor, SGLDescriptorsMax+1)
	for _, c := range []struct {
		name string
		cfg  Config
		edit edit
		want nvme.Status
	}{
		{"opcode", Config{}, func(_ *host, e *nvme.SQE) { e.Opcode = nvme.IOCompare }, nvme.InvalidOpcode},
		{"vendor opcode", Config{}, func(_ *host, e *nvme.SQE) { e.Opcode = 0xff }, nvme.InvalidOpcode},
		{"fused", Config{}, func(_ *host, e *nvme.SQE) { e.Flags |= 1 }, nvme.InvalidField},
		{"reserved flag", Config{}, func(_ *host, e *nvme.SQE) { e.Flags |= 4 }, nvme.InvalidField},
		{"PSDT 11b", Config{}, func(_ *host, e *nvme.SQE) { e.Flags |= 0xc0 }, nvme.InvalidField},
		{"PSDT 10b", Config{}, func(_ *host, e *nvme.SQE) { e.Flags |= 0x80 }, nvme.InvalidField},
		{"nsid 0", Config{}, func(_ *host, e *nvme.SQE) { e.NSID = 0 }, nvme.InvalidNamespace},
		{"nsid 2", Config{}, func(_ *host, e *nvme.SQE) { e.NSID = 2 }, nvme.InvalidNamespace},
		{"nsid broadcast", Config{}, func(_ *host, e *nvme.SQE) { e.NSID = nvme.NSIDBroadcast }, nvme.InvalidNamespace},
		{"directive", Config{}, func(_ *host, e *nvme.SQE) { e.CDW12 |= 1 << 20 }, nvme.InvalidField},
		{"reserved CDW12", Config{}, func(_ *host, e *nvme.SQE) { e.CDW12 |= 1 << 16 }, nvme.InvalidField},
		{"MDTS", Config{MDTS: 1}, func(_ *host, e *nvme.SQE) { e.CDW12 = 16 }, nvme.InvalidField},
		{"lba beyond", Config{}, func(_ *host, e *nvme.SQE) { e.CDW10 = 2048 }, nvme.LBAOutOfRange},
		{"lba across", Config{}, func(_ *host, e *nvme.SQE) { e.CDW10 = 2041 }, nvme.LBAOutOfRange},
		{"lba wraps", Config{}, func(_ *host, e *nvme.SQE) { e.CDW10, e.CDW11 = ^uint32(0), ^uint32(0) },
			nvme.LBAOutOfRange},
		{"PRP1 odd", Config{}, func(_ *host, e *nvme.SQE) { e.DPTR[0] = base + 2 }, nvme.PRPOffsetInvalid},
		{"PRP2 offset", Config{}, func(_ *host, e *nvme.SQE) { e.DPTR = [2]uint64{base + 8, base + 4096 + 8} },
			nvme.PRPOffsetInvalid},
		{"PRP2 empty", Config{}, func(_ *host, e *nvme.SQE) { e.DPTR = [2]uint64{base + 8, 0} },
			nvme.DataTransferError},
		{"PRP list odd", Config{}, func(_ *host, e *nvme.SQE) {
			e.CDW12, e.DPTR = 31, [2]uint64{base, base + 64<<10 + 4}
		}, nvme.PRPOffsetInvalid},
		{"PRP list entry offset", Config{}, func(h *host, e *nvme.SQE) {
			copy(words(h.dma[64<<10:]), []uint64{base + 4096, base + 8192 + 512, base + 12288})
			e.CDW12, e.DPTR = 31, [2]uint64{base, base + 64<<10}
		}, nvme.PRPOffsetInvalid},
		{"PRP list chain offset", Config{}, func(h *host, e *nvme.SQE) {
			words(h.dma[68<<10-8:])[0] = base + 72<<10 + 8
			e.CDW12, e.DPTR = 31, [2]uint64{base, base + 68<<10 - 8}
		}, nvme.PRPOffsetInvalid},
		{"PRP list unmapped", Config{}, func(_ *host, e *nvme.SQE) { e.CDW12, e.DPTR = 31, [2]uint64{base, end} },
			nvme.DataTransferError},
		{"PRP list entry unmapped", Config{}, func(h *host, e *nvme.SQE) {
			copy(words(h.dma[64<<10:]), []uint64{base + 4096, end, base + 12288})
			e.CDW12, e.DPTR = 31, [2]uint64{base, base + 64<<10}
		}, nvme.DataTransferError},
		{"PRP1 unmapped", Config{}, func(_ *host, e *nvme.SQE) { e.DPTR[0] = 4096 }, nvme.DataTransferError},
		{"PRP1 at the end of addresses", Config{}, func(_ *host, e *nvme.SQE) { e.DPTR[0] = ^uint64(0) &^ 0xfff },
			nvme.DataTransferError},
		{"SGL unsupported", Config{}, sgl(nvme.SGLDataBlock, base, 4096), nvme.InvalidField},
		{"SGL short", Config{SGL: true}, sgl(nvme.SGLDataBlock, base, 4095), nvme.SGLLengthInvalid},
		{"SGL long", Config{SGL: true}, sgl(nvme.SGLDataBlock, base, 4097), nvme.SGLLengthInvalid},
		{"SGL empty", Config{SGL: true}, sgl(nvme.SGLDataBlock, base, 0), nvme.SGLLengthInvalid},
		{"SGL unmapped", Config{SGL: true}, sgl(nvme.SGLDataBlock, end-4095, 4096), nvme.DataTransferError},
		{"SGL wraps", Config{SGL: true}, sgl(nvme.SGLDataBlock, ^uint64(0)-10, 4096), nvme.DataTransferError},
		{"SGL keyed", Config{SGL: true}, sgl(nvme.SGLKeyed, base, 4096), nvme.SGLTypeInvalid},
		{"SGL transport", Config{SGL: true}, sgl(nvme.SGLTransport, base, 4096), nvme.SGLTypeInvalid},
		{"SGL vendor", Config{SGL: true}, sgl(nvme.SGLVendor, base, 4096), nvme.SGLTypeInvalid},
		{"SGL sub type", Config{SGL: true}, func(_ *host, e *nvme.SQE) { e.SetSGLDescriptor(keyed) },
			nvme.SGLTypeInvalid},
		{"SGL reserved", Config{SGL: true}, func(_ *host, e *nvme.SQE) { e.SetSGLDescriptor(reserved) },
			nvme.InvalidField},
		{"segment length", Config{SGL: true}, sgl(nvme.SGLLastSegment, base, 24), nvme.SGLSegmentInvalid},
		{"segment empty", Config{SGL: true}, sgl(nvme.SGLSegment, base, 0), nvme.SGLSegmentInvalid},
		{"segment odd", Config{SGL: true}, sgl(nvme.SGLLastSegment, base+4, 16), nvme.SGLOffsetInvalid},
		{"segment unmapped", Config{SGL: true}, sgl(nvme.SGLLastSegment, end, 16), nvme.DataTransferError},
		{"segment without pointer", Config{SGL: true}, list(nvme.SGLSegment, block(2048), block(2048)),
			nvme.SGLSegmentInvalid},
		{"pointer amid segment", Config{SGL: true}, list(nvme.SGLSegment,
			nvme.MakeSGL(nvme.SGLLastSegment, base, 16), block(4096)), nvme.SGLSegmentInvalid},
		{"pointer in last segment", Config{SGL: true}, list(nvme.SGLLastSegment, block(2048),
			nvme.MakeSGL(nvme.SGLLastSegment, base, 16)), nvme.SGLSegmentInvalid},
		{"too many descriptors", Config{SGL: true}, list(nvme.SGLLastSegment, many...), nvme.SGLCountInvalid},
		{"segment loop", Config{SGL: true}, list(nvme.SGLSegment,
			nvme.MakeSGL(nvme.SGLSegment, base+64<<10, 16)), nvme.SGLCountInvalid},
		{"list short", Config{SGL: true}, list(nvme.SGLLastSegment, block(2048), block(1024)), nvme.SGLLengthInvalid},
		{"list long", Config{SGL: true}, list(nvme.SGLLastSegment, block(2048), block(2049)), nvme.SGLLengthInvalid},
		{"write zeroes beyond", Config{}, func(_ *host, e *nvme.SQE) {
			nvme.BuildWriteZeroes(e, 9, 1, 2040, 9, false)
		}, nvme.LBAOutOfRange},
		{"write zeroes reserved", Config{}, func(_ *host, e *nvme.SQE) {
			nvme.BuildWriteZeroes(e, 9, 1, 0, 8, false)
			e.CDW12 |= 1 << 17
		}, nvme.InvalidField},
		{"dsm reserved", Config{}, func(_ *host, e *nvme.SQE) {
			nvme.BuildDSM(e, 9, 1, 1)
			e.DPTR[0], e.CDW11 = base, e.CDW11|8
		}, nvme.InvalidField},
		{"dsm unmapped", Config{}, func(_ *host, e *nvme.SQE) { nvme.BuildDSM(e, 9, 1, 256) }, nvme.DataTransferError},
		{"dsm beyond", Config{}, func(h *host, e *nvme.SQE) {
			copy(words(h.dma[64<<10:]), []uint64{8 << 32, 0, 8 << 32, 2041})
			nvme.BuildDSM(e, 9, 1, 2)
			e.DPTR[0] = base + 64<<10
		}, nvme.LBAOutOfRange},
		{"write protected", Config{ReadOnly: true}, func(_ *host, e *nvme.SQE) { e.Opcode = nvme.IOWrite },
			nvme.WriteProtected},
		{"zeroes protected", Config{ReadOnly: true}, func(_ *host, e *nvme.SQE) {
			nvme.BuildWriteZeroes(e, 9, 1, 0, 8, true)
		}, nvme.WriteProtected},
	} {
		for _, opcode := range []uint8{nvme.IORead, nvme.IOWrite} {
			t.Run(c.name, func(t *testing.T) {
				c.cfg.Drive = memoryDrive(t, statusDrive)
				fill(c.cfg.Drive.Bytes(), 3)
				h := newHost(t, c.cfg, 16, 256<<10)
				fill(h.dma[:32<<10], 4)
				e := h.rw(false, 9, 8, 8, 0)
				e.Opcode = opcode
				c.edit(h, &e)
				dma, store := bytes.Clone(h.dma), bytes.Clone(c.cfg.Drive.Bytes())
				got := h.do(e)
				require.Equal(t, c.want, got.Code(), "%v", got)
				require.NotZero(t, got&nvme.StatusDNR)
				require.True(t, bytes.Equal(dma, h.dma), "refused, but data moved to the host")
				require.True(t, bytes.Equal(store, c.cfg.Drive.Bytes()), "refused, but data moved to the drive")
				s := h.c.Stats()
				require.Equal(t, uint64(1), s.Errors)
				require.Zero(t, s.BytesRead+s.BytesWritten)
				require.True(t, h.do(h.rw(false, 10, 8, 8, 0)).OK())
			})
		}
	}
}

func TestFlushTakesBroadcast(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, statusDrive), ReadOnly: true}, 16, 64<<10)
	for nsid, want := range map[uint32]nvme.Status{1: nvme.Success, nvme.NSIDBroadcast: nvme.Success,
		0: nvme.InvalidNamespace, 2: nvme.InvalidNamespace} {
		var e nvme.SQE
		nvme.BuildFlush(&e, 1, nsid)
		require.Equal(t, want, h.do(e).Code())
	}
}

func TestAuthority(t *testing.T) {
	c, err := New(Config{Drive: memoryDrive(t, statusDrive), Index: 5})
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	l := &ledger{}
	h := attachHost(t, c, p, l, 16, 256<<10)

	require.True(t, h.do(h.rw(true, 1, 16, 24, 0)).OK())
	require.Equal(t, ledger{asked: 1, last: l.last}, *l)
	require.True(t, l.last.write)
	require.Equal(t, uint16(5), l.last.drive)
	require.Equal(t, uint64(2), l.last.unit)
	require.Equal(t, uint32(3), l.last.units)

	for _, e := range []nvme.SQE{h.rw(false, 2, 1, 8, 0), h.rw(false, 2, 8, 9, 0)} {
		require.Equal(t, nvme.InvalidField, h.do(e).Code(), "parts of units are refused")
	}
	require.Equal(t, 1, l.asked)

	l.deny = true
	store := bytes.Clone(c.drive.Bytes())
	var wz, dsm nvme.SQE
	nvme.BuildWriteZeroes(&wz, 4, 1, 0, 16, true)
	nvme.BuildDSM(&dsm, 5, 1, 1)
	dsm.DPTR[0] = dmaBase + 64<<10
	copy(words(h.dma[64<<10:]), []uint64{16 << 32, 0})
	for _, e := range []nvme.SQE{h.rw(true, 2, 8, 8, 0), h.rw(false, 3, 8, 8, 0), wz, dsm} {
		require.Equal(t, nvme.AccessDenied, h.do(e).Code())
	}
	require.True(t, bytes.Equal(store, c.drive.Bytes()))
	require.Equal(t, uint64(4), c.Stats().Refused)
	require.Zero(t, l.held)
	require.Zero(t, l.failed)

	l.deny = false
	require.True(t, h.do(wz).OK())
	require.Zero(t, l.failed)
	require.True(t, h.do(dsm).OK())
	require.Equal(t, 1, l.failed, "deallocated units hold nothing of the executor's")
	require.Zero(t, l.held)
	c.SetFaults(func(*nvme.SQE) *Fault { return &Fault{Short: 4096} })
	require.Equal(t, nvme.DataTransferError, h.do(h.rw(true, 2, 8, 16, 0)).Code())
	require.Zero(t, l.held)
	require.Equal(t, 2, l.failed)
}

func TestWriteZeroesAndDeallocate(t *testing.T) {
	d := memoryDrive(t, statusDrive)
	h := newHost(t, Config{Drive: d}, 16, 256<<10)
	fill(d.Bytes(), 1)
	want := bytes.Clone(d.Bytes())
	var e nvme.SQE
	nvme.BuildWriteZeroes(&e, 1, 1, 3, 5, false)
	require.True(t, h.do(e).OK())
	clear(want[3*512 : 8*512])
	require.True(t, bytes.Equal(want, d.Bytes()))

	nvme.BuildDSM(&e, 2, 1, 3)
	e.DPTR[0] = dmaBase
	copy(words(h.dma), []uint64{8 << 32, 16, 0, 99, 8 << 32, 64})
	require.True(t, h.do(e).OK())
	// What deallocated blocks read as is undefined; everything else is not.
	for i := range want {
		if b := i / 512; b >= 16 && b < 24 || b >= 64 && b < 72 {
			want[i] = d.Bytes()[i]
		}
	}
	require.True(t, bytes.Equal(want, d.Bytes()))
	e.CDW11 = 1 // a hint, not a deallocation
	require.True(t, h.do(e).OK())
}

// A chain of segments with a bit bucket: bytes land where the list says, in its order.
func TestScatteredSGL(t *testing.T) {
	d := memoryDrive(t, statusDrive)
	fill(d.Bytes(), 8)
	h := newHost(t, Config{Drive: d, SGL: true}, 16, 256<<10)
	put := func(at int, ds ...nvme.SGLDescriptor) {
		for i, x := range ds {
			var e nvme.SQE
			e.SetSGLDescriptor(x)
			copy(words(h.dma[at+16*i:]), e.DPTR[:])
		}
	}
	put(128<<10, nvme.MakeSGL(nvme.SGLDataBlock, dmaBase+5000, 1000), nvme.MakeSGL(nvme.SGLBitBucket, 0, 96),
		nvme.MakeSGL(nvme.SGLSegment, dmaBase+144<<10, 32))
	put(144<<10, nvme.MakeSGL(nvme.SGLDataBlock, dmaBase+4000, 1000),
		nvme.MakeSGL(nvme.SGLLastSegment, dmaBase+160<<10, 48))
	put(160<<10, nvme.MakeSGL(nvme.SGLDataBlock, dmaBase+9000, 1999), nvme.MakeSGL(nvme.SGLDataBlock, 0, 0),
		nvme.MakeSGL(nvme.SGLDataBlock, dmaBase+12345, 1))
	var e nvme.SQE
	nvme.BuildRW(&e, false, 1, 1, 8, 8)
	e.SetSGLDescriptor(nvme.MakeSGL(nvme.SGLSegment, dmaBase+128<<10, 48))
	require.Equal(t, nvme.Success, h.do(e))
	src := d.Bytes()[4096:]
	require.True(t, bytes.Equal(src[:1000], h.dma[5000:6000]))
	require.True(t, bytes.Equal(src[1096:2096], h.dma[4000:5000]))
	require.True(t, bytes.Equal(src[2096:4095], h.dma[9000:10999]))
	require.Equal(t, src[4095], h.dma[12345])
	require.Zero(t, h.dma[6000])
	require.Zero(t, h.dma[3999])
}

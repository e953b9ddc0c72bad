package nvme

import (
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// Golden entries: the bytes that a controller of any maker expects.
func TestGolden(t *testing.T) {
	var rw, sgl, cq, sq, set, abort, wz, dsm SQE
	BuildRW(&rw, false, 0x1234, 1, 0x1_0000_0008, 16)
	require.NoError(t, rw.SetPRP(0x200010, 8192, make([]uint64, 8), 0x7000))
	BuildRW(&sgl, true, 2, 1, 5, 1)
	sgl.CDW12 |= RWForceUnit
	require.NoError(t, sgl.SetSGL(0xabcd000, 4096))
	BuildCreateCQ(&cq, 3, 1, 0x3000, 64)
	BuildCreateSQ(&sq, 4, 1, 1, 0x4000, 64)
	BuildSetQueues(&set, 5, 8)
	BuildAbort(&abort, 6, 2, 0xbeef)
	BuildWriteZeroes(&wz, 7, 1, 9, 256, true)
	BuildDSM(&dsm, 8, 1, 2)
	var cqe CQE
	cqe.Publish(0x1122334455667788, 3, 1, 0x1234, LBAOutOfRange|StatusDNR, 1)
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"read", wire(&rw), "0200341201000000 0000000000000000 0000000000000000 1000200000000000" +
			"0070000000000000 0800000001000000 0f00000000000000 0000000000000000"},
		{"write", wire(&sgl), "0140020001000000 0000000000000000 0000000000000000 00d0bc0a00000000" +
			"0010000000000000 0500000000000000 0000004000000000 0000000000000000"},
		{"create cq", wire(&cq), "0500030000000000 0000000000000000 0000000000000000 0030000000000000" +
			"0000000000000000 01003f0001000000 0000000000000000 0000000000000000"},
		{"create sq", wire(&sq), "0100040000000000 0000000000000000 0000000000000000 0040000000000000" +
			"0000000000000000 01003f0001000100 0000000000000000 0000000000000000"},
		{"set queues", wire(&set), "0900050000000000 0000000000000000 0000000000000000 0000000000000000" +
			"0000000000000000 0700000007000700 0000000000000000 0000000000000000"},
		{"abort", wire(&abort), "0800060000000000 0000000000000000 0000000000000000 0000000000000000" +
			"0000000000000000 0200efbe00000000 0000000000000000 0000000000000000"},
		{"write zeroes", wire(&wz), "0800070001000000 0000000000000000 0000000000000000 0000000000000000" +
			"0000000000000000 0900000000000000 ff00000200000000 0000000000000000"},
		{"dsm", wire(&dsm), "0900080001000000 0000000000000000 0000000000000000 0000000000000000" +
			"0000000000000000 0100000004000000 0000000000000000 0000000000000000"},
		{"cqe", wire(&cqe), "8877665544332211 0300010034120181"},
	} {
		require.Equal(t, strings.ReplaceAll(c.want, " ", ""), hex.EncodeToString(c.got), c.name)
	}
	require.Equal(t, uint64(0x1_0000_0008), rw.LBA())
	require.Equal(t, uint32(16), rw.Blocks())
	cid, status, ok := cqe.Poll(1)
	require.True(t, ok)
	require.Equal(t, uint16(0x1234), cid)
	require.ErrorIs(t, status, LBAOutOfRange)
	_, _, ok = cqe.Poll(0)
	require.False(t, ok)
}

// walkPRP resolves PRPs the way a controller does, from the list words alone.
func walkPRP(e *SQE, length uint32, listAddr uint64, list []uint64) (pages []uint64) {
	word := func(a uint64) uint64 { return list[(a-listAddr)/8] }
	left := int64(length) - int64(PageBytes-e.DPTR[0]%PageBytes)
	pages = append(pages, e.DPTR[0])
	if left <= 0 {
		return pages
	}
	if left <= PageBytes {
		return append(pages, e.DPTR[1])
	}
	for at := e.DPTR[1]; left > 0; at += 8 {
		w := word(at)
		if at%PageBytes == PageBytes-8 && left > PageBytes {
			at = w - 8
			continue
		}
		pages = append(pages, w)
		left -= PageBytes
	}
	return pages
}

func TestPRPCoversEveryPageOnce(t *testing.T) {
	list := make([]uint64, 2048)
	for _, length := range []uint32{4, 512, 4096, 4100, 8192, 8196, 12288, 64 << 10, 2 << 20, 2<<20 + 4, 4 << 20} {
		for _, off := range []uint64{0, 4, 512, 4092} {
			for _, listAddr := range []uint64{0x10000, 0x10008, 0x10f00, 0x10ff8} {
				addr := 0x4000000 + off
				var e SQE
				clear(list)
				require.NoError(t, e.SetPRP(addr, length, list, listAddr))
				pages := walkPRP(&e, length, listAddr, list)
				require.Len(t, pages, PRPPages(addr, length))
				require.Equal(t, addr, pages[0])
				for i, p := range pages[1:] {
					require.Equal(t, uint64(0x4000000+(i+1)*PageBytes), p)
				}
				n := PRPListEntries(addr, length, listAddr)
				if len(pages) <= 2 {
					require.Zero(t, n)
				} else {
					require.ErrorIs(t, e.SetPRP(addr, length, list[:n-1], listAddr), ErrPRPList)
				}
				for _, w := range list[n:] {
					require.Zero(t, w, "written beyond the list")
				}
			}
		}
	}
}

func TestBuildersRefuse(t *testing.T) {
	var e SQE
	require.ErrorIs(t, e.SetPRP(2, 512, nil, 0), ErrAddress)
	require.ErrorIs(t, e.SetPRP(0, 0, nil, 0), ErrAddress)
	require.ErrorIs(t, e.SetPRP(^uint64(0)-3, 512, nil, 0), ErrAddress)
	require.ErrorIs(t, e.SetPRP(0, 1<<20, make([]uint64, 1024), 12), ErrPRPList)
	require.ErrorIs(t, e.SetSGL(0, 0), ErrAddress)
	require.ErrorIs(t, e.SetSGL(^uint64(0)-3, 512), ErrAddress)
}

func TestSGLDescriptor(t *testing.T) {
	d := MakeSGL(SGLLastSegment, 0x1122334455667788, 48)
	require.Equal(t, "8877665544332211"+"30000000"+"000000"+"30", hex.EncodeToString(wire(&d)))
	w := d.words()
	got := SGLFromWords(w[0], w[1])
	require.Equal(t, d, got)
	require.Equal(t, uint8(SGLLastSegment), got.Type())
	require.Zero(t, got.SubType())
	bad := SGLFromWords(0, 0x5f0102_03_00000000)
	require.Equal(t, uint32(0x010203), bad.Reserved()&0xffffff)
}

func TestMapQueue(t *testing.T) {
	for depth := 0; depth <= 8192; depth++ {
		legal := depth >= 2 && depth <= 4096 && depth&(depth-1) == 0
		require.Equal(t, legal, QueueBytes(depth) != 0, depth)
	}
	require.Equal(t, 3*PageBytes, QueueBytes(2))
	require.Equal(t, 4096+4096*64+4096*16, QueueBytes(4096))
	raw := make([]byte, QueueBytes(64)+2*PageBytes)
	off := int(-uintptr(unsafe.Pointer(&raw[0])) % PageBytes)
	b := raw[off : off+QueueBytes(64)]
	q, err := MapQueue(b, 64)
	require.NoError(t, err)
	require.NoError(t, q.Validate())
	require.Len(t, q.SQ, 64)
	require.Len(t, q.CQ, 64)
	at := func(p unsafe.Pointer) int { return int(uintptr(p) - uintptr(unsafe.Pointer(&b[0]))) }
	require.Equal(t, 0, at(unsafe.Pointer(q.SQTail)))
	require.Equal(t, 128, at(unsafe.Pointer(q.CQHead)))
	require.Equal(t, 4096, at(unsafe.Pointer(&q.SQ[0])))
	require.Equal(t, 8192, at(unsafe.Pointer(&q.CQ[0])))
	for _, c := range []struct {
		b     []byte
		depth int
	}{{b, 63}, {b, 0}, {b, 8192}, {b[:len(b)-1], 64}, {raw[off+8:], 64}, {nil, 64}} {
		_, err := MapQueue(c.b, c.depth)
		require.ErrorIs(t, err, ErrQueueMemory)
	}
	require.ErrorIs(t, QueueMemory{SQ: q.SQ, CQ: q.CQ}.Validate(), ErrQueueMemory)
	require.ErrorIs(t, QueueMemory{SQ: q.SQ[:32], CQ: q.CQ, SQTail: q.SQTail, CQHead: q.CQHead}.Validate(),
		ErrQueueMemory)
}

func TestStatusNames(t *testing.T) {
	for s, name := range statusNames {
		require.Equal(t, name, s.String())
		require.Contains(t, (s | StatusDNR).Error(), name)
		require.ErrorIs(t, s|StatusDNR|StatusMore, s)
		require.Equal(t, s, Status(s.SCT())<<8|Status(s.SC()))
	}
	require.True(t, Success.OK())
	require.False(t, errors.Is(PRPOffsetInvalid, SGLTypeInvalid))
	require.Equal(t, "nvme: PRP offset invalid (SCT 0, SC 0x13, do not retry)", (PRPOffsetInvalid | StatusDNR).Error())
	require.Equal(t, "status type 7 code 0x42", Status(0x742).String())
}

func TestRegisters(t *testing.T) {
	c := MakeCAP(4096, true, 20, CSSNVM)
	require.Equal(t, CAP(0x20_1401_0fff), c)
	require.Equal(t, uint32(4096), c.Entries())
	require.True(t, c.ContiguousQueues())
	require.Equal(t, 10000, c.TimeoutMillis())
	require.Equal(t, uint8(CSSNVM), c.CSS())
	require.Equal(t, uint(12), c.PageMinShift())
	require.Equal(t, uint(12), c.PageMaxShift())
	cc := MakeCC(true, 12)
	require.Equal(t, CC(0x460001), cc)
	require.True(t, cc.Enabled())
	require.Equal(t, uint(6), cc.SQEShift())
	require.Equal(t, uint(4), cc.CQEShift())
	require.Equal(t, uint(12), cc.PageShift())
	sq, cq := AQAEntries(MakeAQA(64, 128))
	require.Equal(t, []uint32{64, 128}, []uint32{sq, cq})
	require.Equal(t, uint32(0x1010), SQTailDoorbell(2, 0))
	require.Equal(t, uint32(0x1014), CQHeadDoorbell(2, 0))
	require.Equal(t, uint32(0x1028), CQHeadDoorbell(2, 1))
}

func TestIdentifyCodec(t *testing.T) {
	var c, c2 IdentifyController
	c.SQES, c.CQES, c.MDTS, c.NN = 0x66, 0x44, 9, 1
	PadASCII(c.SN[:], "abc\n")
	b, err := c.AppendBinary(nil)
	require.NoError(t, err)
	require.Len(t, b, IdentifyBytes)
	require.Equal(t, "abc?                ", string(b[4:24]))
	require.NoError(t, c2.UnmarshalBinary(b))
	require.Equal(t, c, c2)
	require.ErrorIs(t, c2.UnmarshalBinary(b[1:]), ErrIdentify)
	require.ErrorIs(t, c2.UnmarshalBinary(make([]byte, IdentifyBytes)), ErrIdentify)

	var n, n2 IdentifyNamespace
	n.NSZE = 1 << 20
	n.SetFormats(0, 12)
	b, err = n.AppendBinary(nil)
	require.NoError(t, err)
	require.NoError(t, n2.UnmarshalBinary(b))
	require.Equal(t, n, n2)
	require.Equal(t, uint8(12), n2.Format().LBADS)
	require.ErrorIs(t, n2.UnmarshalBinary(nil), ErrIdentify)
	n.NSZE = 1 << 60
	b, _ = n.AppendBinary(nil)
	require.ErrorIs(t, n2.UnmarshalBinary(b), ErrIdentify)
	n.NSZE, n.LBAF[0].LBADS = 1, 13
	b, _ = n.AppendBinary(nil)
	require.ErrorIs(t, n2.UnmarshalBinary(b), ErrIdentify)
}

func FuzzIdentify(f *testing.F) {
	f.Add(make([]byte, IdentifyBytes))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		var c IdentifyController
		if c.UnmarshalBinary(b) == nil {
			out, _ := c.AppendBinary(nil)
			require.Equal(t, b, out)
		}
		var n IdentifyNamespace
		if n.UnmarshalBinary(b) == nil {
			out, _ := n.AppendBinary(nil)
			require.Equal(t, b, out)
			require.LessOrEqual(t, n.NSZE<<n.Format().LBADS, uint64(1)<<63)
		}
	})
}

func TestWakeCostsNoCallWhenAwake(t *testing.T) {
	var word uint32
	Wake(&word)
	require.Zero(t, word)
	slept := make(chan struct{})
	word = 1
	go func() {
		FutexWait(&word, 1, 0)
		close(slept)
	}()
	Wake(&word) // before or after the sleeper's look at the word: it returns either way
	<-slept
	require.Zero(t, word)
	require.False(t, FutexWait(&word, 1, 0)) // the word differs: returns at once
	require.True(t, FutexWait(&word, 0, 1))
}

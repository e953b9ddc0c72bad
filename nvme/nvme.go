// Package nvme is the wire: submission and completion entries, doorbells, PRP and SGL, Identify, registers and status
// codes. Types, codecs and builders only; nothing here owns a queue or waits for one, but for the futex of a sleeping
// poller (wake.go). Figures and sections refer to the NVM Express Base Specification 2.0 and the NVM Command Set
// Specification 1.0.
//
// Wire structs are cast onto memory, so the package supports little-endian machines only (amd64, arm64).
package nvme

import (
	"structs"
	"sync/atomic"
	"unsafe"
)

// SQE is a submission queue entry (64 bytes, Base 2.0 figure 87).
type SQE struct {
	_      structs.HostLayout
	Opcode uint8
	Flags  uint8 // FUSE in bits 1:0, PSDT in bits 7:6
	CID    uint16
	NSID   uint32
	CDW2   uint32
	CDW3   uint32
	MPTR   uint64
	DPTR   [2]uint64 // PRP1, PRP2 or one SGL descriptor
	CDW10  uint32
	CDW11  uint32
	CDW12  uint32
	CDW13  uint32
	CDW14  uint32
	CDW15  uint32
}

// CQE is a completion queue entry (16 bytes, Base 2.0 figure 89).
type CQE struct {
	_      structs.HostLayout
	DW0    uint32
	DW1    uint32
	SQHead uint16
	SQID   uint16
	CID    uint16
	Status uint16 // phase in bit 0, status field in bits 15:1
}

// Sizes of queue entries.
const (
	SQEBytes = 64
	CQEBytes = 16
)

// An index out of range here is a layout that no longer matches the specification.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(SQE{})-SQEBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.CID)-2]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.NSID)-4]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.CDW2)-8]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.MPTR)-16]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.DPTR)-24]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.CDW10)-40]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.CDW15)-60]
	_ = [1]struct{}{}[unsafe.Sizeof(CQE{})-CQEBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(CQE{}.SQHead)-8]
	_ = [1]struct{}{}[unsafe.Offsetof(CQE{}.SQID)-10]
	_ = [1]struct{}{}[unsafe.Offsetof(CQE{}.CID)-12]
	_ = [1]struct{}{}[unsafe.Offsetof(CQE{}.Status)-14]
)

// Bits of SQE.Flags (Base 2.0 figure 87, CDW0 bits 15:8).
const (
	FlagFuseMask     = 0x03 // fused operation; 0 is a normal command
	FlagReservedMask = 0x3c
	FlagPSDTMask     = 0xc0 // PRP or SGL for data transfer
	FlagPSDTPRP      = 0x00
	FlagPSDTSGL      = 0x40 // SGL for data, metadata (if any) in one contiguous buffer
	FlagPSDTSGLMeta  = 0x80 // SGL for data and for metadata
)

// NSIDBroadcast names all namespaces.
const NSIDBroadcast = 0xffffffff

// CopySQE copies an entry out of memory that another process may be writing. It loads whole 64-bit words atomically, so
// the copy is a mix of words that were there, never anything else, and what is checked in the copy stays checked.
func CopySQE(dst, src *SQE) {
	d := (*[SQEBytes / 8]uint64)(unsafe.Pointer(dst))
	s := (*[SQEBytes / 8]uint64)(unsafe.Pointer(src))
	for i := range d {
		d[i] = atomic.LoadUint64(&s[i])
	}
}

// Publish writes a completion into shared memory. The word with command id, status and phase goes last, by an atomic
// store, so that whoever sees the phase bit turned sees the rest of the entry. phase is 0 or 1.
func (e *CQE) Publish(result uint64, sqHead, sqID, cid uint16, status Status, phase uint16) {
	e.DW0, e.DW1 = uint32(result), uint32(result>>32)
	e.SQHead, e.SQID = sqHead, sqID
	last := uint32(cid) | uint32(uint16(status)<<1|phase&1)<<16
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&e.CID)), last)
}

// Poll looks at a completion in shared memory. It is valid when its phase bit is the one that the executor expects in
// this lap of the queue (1 in the first). Only then may the entry's other fields be read.
func (e *CQE) Poll(phase uint16) (cid uint16, status Status, ok bool) {
	w := atomic.LoadUint32((*uint32)(unsafe.Pointer(&e.CID)))
	s := uint16(w >> 16)
	return uint16(w), Status(s >> 1), s&1 == phase&1
}

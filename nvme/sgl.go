package nvme

import (
	"fmt"
	"structs"
	"unsafe"
)

// SGLDescriptor is one SGL descriptor (16 bytes, Base 2.0 figure 98).
type SGLDescriptor struct {
	_      structs.HostLayout
	Addr   uint64
	Length uint32
	_      [3]uint8 // reserved, zero
	ID     uint8    // type in bits 7:4, sub type in bits 3:0
}

// SGLDescriptorBytes is the size of a descriptor.
const SGLDescriptorBytes = 16

var (
	_ = [1]struct{}{}[unsafe.Sizeof(SGLDescriptor{})-SGLDescriptorBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(SGLDescriptor{}.ID)-15]
)

// Descriptor types (Base 2.0 figure 99).
const (
	SGLDataBlock   = 0x0
	SGLBitBucket   = 0x1
	SGLSegment     = 0x2
	SGLLastSegment = 0x3
	SGLKeyed       = 0x4
	SGLTransport   = 0x5
	SGLVendor      = 0xf
)

// SGLAddress is the only sub type of memory-based controllers: the address field is an address.
const SGLAddress = 0x0

// Type is the descriptor's type.
func (d *SGLDescriptor) Type() uint8 { return d.ID >> 4 }

// SubType is the descriptor's sub type.
func (d *SGLDescriptor) SubType() uint8 { return d.ID & 0xf }

// Reserved are the bytes that must be zero.
func (d *SGLDescriptor) Reserved() uint32 {
	w := *(*uint32)(unsafe.Pointer(uintptr(unsafe.Pointer(d)) + 12))
	return w & 0x00ffffff
}

// MakeSGL is a descriptor of the given type.
func MakeSGL(kind uint8, addr uint64, length uint32) SGLDescriptor {
	return SGLDescriptor{Addr: addr, Length: length, ID: kind << 4}
}

// words is the descriptor as it lies in SQE.DPTR.
func (d SGLDescriptor) words() [2]uint64 {
	return [2]uint64{d.Addr, uint64(d.Length) | uint64(d.Reserved())<<32 | uint64(d.ID)<<56}
}

// SGLFromWords is the descriptor in two little-endian words (SQE.DPTR or a copied segment).
func SGLFromWords(w0, w1 uint64) SGLDescriptor {
	return *(*SGLDescriptor)(unsafe.Pointer(&[2]uint64{w0, w1}))
}

// SetSGL points the command at length contiguous bytes of I/O addresses by one data block descriptor.
func (e *SQE) SetSGL(addr uint64, length uint32) error {
	if length == 0 || addr+uint64(length) < addr {
		return fmt.Errorf("%w: %d bytes at %#x", ErrAddress, length, addr)
	}
	e.SetSGLDescriptor(MakeSGL(SGLDataBlock, addr, length))
	return nil
}

// SetSGLDescriptor puts any descriptor into the command: a data block, or the (last) segment that a list starts with.
func (e *SQE) SetSGLDescriptor(d SGLDescriptor) {
	e.Flags = e.Flags&^FlagPSDTMask | FlagPSDTSGL
	e.DPTR = d.words()
}

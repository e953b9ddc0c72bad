package vfio

// Registers are read and written by one instruction of 32 bits each, which the compiler's own loads and stores need not
// be, and atomic ones are not: theirs lock the bus on some machines.

// mmioLoad32 reads a register. Loads of memory that come after it are not done before it.
//
//go:noescape
func mmioLoad32(p *uint32) uint32

// mmioStore32 writes a register. Stores to memory that came before it are seen by the device first.
//
//go:noescape
func mmioStore32(p *uint32, v uint32)

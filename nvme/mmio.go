package nvme

// Registers are read and written by one instruction of 32 bits each, which the compiler's own loads and stores need not
// be, and atomic ones are not: theirs lock the bus on some machines.

// LoadRegister reads a register. Loads of memory that come after it are not done before it.
//
//go:noescape
func LoadRegister(p *uint32) uint32

// StoreRegister writes a register. Stores to memory that came before it are seen by the device first.
//
//go:noescape
func StoreRegister(p *uint32, v uint32)

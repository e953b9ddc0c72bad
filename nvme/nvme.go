// Package nvme is the wire: submission and completion entries, doorbells, PRP and SGL, Identify. Types and codecs only.
// Figures and sections refer to the NVM Express Base Specification 2.0 and the NVM Command Set Specification 1.0.
package nvme

import "structs"

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

// QueueMemory is a queue pair as both sides see it in shared memory: entries and the two doorbells, each in a cache line of its own.
// Depth is a power of two, at most 4096 entries; both queues have the same.
type QueueMemory struct {
	SQ     []SQE
	CQ     []CQE
	SQTail *uint32 // written by the executor
	CQHead *uint32 // written by the executor
}

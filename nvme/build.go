package nvme

import "encoding/binary"

// BlocksMax is the most blocks of one Read, Write or Write Zeroes (NLB is 16 bits, zero-based).
const BlocksMax = 1 << 16

// BuildRW makes a Read or Write of nlb blocks (1..BlocksMax) from lba. The data pointer is set afterwards by SetPRP or
// SetSGL. nlb beyond the range is the caller's mistake and is masked.
func BuildRW(sqe *SQE, write bool, cid uint16, nsid uint32, lba uint64, nlb uint32) {
	*sqe = SQE{
		Opcode: IORead, CID: cid, NSID: nsid,
		CDW10: uint32(lba), CDW11: uint32(lba >> 32), CDW12: (nlb - 1) & RWBlocksMask,
	}
	if write {
		sqe.Opcode = IOWrite
	}
}

// BuildFlush makes a Flush.
func BuildFlush(sqe *SQE, cid uint16, nsid uint32) {
	*sqe = SQE{Opcode: IOFlush, CID: cid, NSID: nsid}
}

// BuildWriteZeroes makes a Write Zeroes; with deallocate the range may be given back to the drive.
func BuildWriteZeroes(sqe *SQE, cid uint16, nsid uint32, lba uint64, nlb uint32, deallocate bool) {
	BuildRW(sqe, true, cid, nsid, lba, nlb)
	sqe.Opcode = IOWriteZeroes
	if deallocate {
		sqe.CDW12 |= WZDeallocate
	}
}

// BuildDSM makes a Dataset Management command that deallocates ranges (1..DSMRangesMax) described by the data pointer,
// which is set afterwards.
func BuildDSM(sqe *SQE, cid uint16, nsid uint32, ranges int) {
	*sqe = SQE{Opcode: IODSM, CID: cid, NSID: nsid, CDW10: uint32(ranges-1) & 0xff, CDW11: DSMDeallocate}
}

// LBA is the starting block of a Read, Write or Write Zeroes.
func (e *SQE) LBA() uint64 { return uint64(e.CDW11)<<32 | uint64(e.CDW10) }

// Blocks is the number of blocks of a Read, Write or Write Zeroes.
func (e *SQE) Blocks() uint32 { return e.CDW12&RWBlocksMask + 1 }

// BuildCreateCQ makes an admin Create I/O Completion Queue: contiguous, without interrupts.
func BuildCreateCQ(sqe *SQE, cid, qid uint16, addr uint64, entries uint32) {
	*sqe = SQE{Opcode: AdminCreateCQ, CID: cid, DPTR: [2]uint64{addr},
		CDW10: uint32(qid) | (entries-1)<<16, CDW11: QueueContiguous}
}

// BuildCreateSQ makes an admin Create I/O Submission Queue: contiguous, completing to queue cqid.
func BuildCreateSQ(sqe *SQE, cid, qid, cqid uint16, addr uint64, entries uint32) {
	*sqe = SQE{Opcode: AdminCreateSQ, CID: cid, DPTR: [2]uint64{addr},
		CDW10: uint32(qid) | (entries-1)<<16, CDW11: uint32(cqid)<<16 | QueueContiguous}
}

// BuildDeleteQueue makes an admin Delete I/O Submission (or Completion) Queue.
func BuildDeleteQueue(sqe *SQE, cid, qid uint16, completion bool) {
	*sqe = SQE{Opcode: AdminDeleteSQ, CID: cid, CDW10: uint32(qid)}
	if completion {
		sqe.Opcode = AdminDeleteCQ
	}
}

// BuildIdentify makes an admin Identify into the page at addr.
func BuildIdentify(sqe *SQE, cid uint16, nsid uint32, cns uint8, addr uint64) {
	*sqe = SQE{Opcode: AdminIdentify, CID: cid, NSID: nsid, DPTR: [2]uint64{addr}, CDW10: uint32(cns)}
}

// BuildSetQueues makes an admin Set Features that asks for n I/O queue pairs.
func BuildSetQueues(sqe *SQE, cid, n uint16) {
	*sqe = SQE{Opcode: AdminSetFeatures, CID: cid, CDW10: FeatureQueues, CDW11: uint32(n-1)<<16 | uint32(n-1)}
}

// BuildAbort makes an admin Abort of command victim of submission queue qid.
func BuildAbort(sqe *SQE, cid, qid, victim uint16) {
	*sqe = SQE{Opcode: AdminAbort, CID: cid, CDW10: uint32(victim)<<16 | uint32(qid)}
}

// BuildGetLog makes an admin Get Log Page of length bytes, a multiple of 4, from offset, a multiple of 4, into the data
// pointer, which is set afterwards. The page's events stay unacknowledged.
func BuildGetLog(sqe *SQE, cid uint16, nsid uint32, page uint8, offset uint64, length uint32) {
	words := length/4 - 1
	*sqe = SQE{
		Opcode: AdminGetLogPage, CID: cid, NSID: nsid,
		CDW10: uint32(page) | LogRetainEvents | words<<16, CDW11: words >> 16,
		CDW12: uint32(offset), CDW13: uint32(offset >> 32),
	}
}

// BuildGetFeature makes an admin Get Features of the current value.
func BuildGetFeature(sqe *SQE, cid uint16, nsid uint32, feature uint8) {
	*sqe = SQE{Opcode: AdminGetFeatures, CID: cid, NSID: nsid, CDW10: uint32(feature)}
}

// BuildSetFeature makes an admin Set Features that is not saved.
func BuildSetFeature(sqe *SQE, cid uint16, nsid uint32, feature uint8, value uint32) {
	*sqe = SQE{Opcode: AdminSetFeatures, CID: cid, NSID: nsid, CDW10: uint32(feature), CDW11: value}
}

// BuildFormat makes an admin Format NVM to LBA format index, without metadata or secure erase. Everything that the
// namespace holds is lost.
func BuildFormat(sqe *SQE, cid uint16, nsid uint32, index uint8) {
	*sqe = SQE{Opcode: AdminFormatNVM, CID: cid, NSID: nsid, CDW10: uint32(index&0xf) | uint32(index>>4&3)<<12}
}

// PutDSMRange writes one range of a Dataset Management command into b, which has room for it.
func PutDSMRange(b []byte, lba uint64, blocks uint32) {
	binary.LittleEndian.PutUint32(b, 0)
	binary.LittleEndian.PutUint32(b[4:], blocks)
	binary.LittleEndian.PutUint64(b[8:], lba)
}

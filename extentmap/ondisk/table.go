package ondisk

import "encoding/binary"

// RecordsPerBlock records follow the header of a record-table block.
const RecordsPerBlock = 31

// tableHeaderBytes is what 31 records leave of a block.
const tableHeaderBytes = BlockBytes - RecordsPerBlock*RecordBytes

// TableBlocks is the number of blocks in the record table of a row.
func TableBlocks(slots uint32) uint32 { return (slots + RecordsPerBlock - 1) / RecordsPerBlock }

// TableID says which block of which row's record table a block is.
type TableID struct {
	Pool  uint16
	Row   uint32
	Block uint32
}

// RecordOffset is where the record of a slot index lies in its row's table: 31 records a block.
func RecordOffset(index uint32) int {
	return int(index/RecordsPerBlock)*BlockBytes + tableHeaderBytes + int(index%RecordsPerBlock)*RecordBytes
}

// SealTable writes the header of a block that already holds its 31 records. Records behind the row.s last slot are
// zero.
func SealTable(b []byte, at Locator, tag, sequence uint64, id TableID) {
	b = b[:BlockBytes]
	le := binary.LittleEndian
	clear(b[32:tableHeaderBytes])
	le.PutUint16(b[32:], id.Pool)
	le.PutUint32(b[36:], id.Row)
	le.PutUint32(b[40:], id.Block)
	seal(b, Header{KindTable, at, tag, sequence})
}

// OpenTable checks a block of a record table and returns its checkpoint sequence. The records themselves are judged
// one by one with ValidRecord.
func OpenTable(b []byte, at Locator, tag uint64, id TableID) (sequence uint64, err error) {
	h, err := open(b, KindTable, at, tag)
	if err != nil {
		return 0, err
	}
	le := binary.LittleEndian
	if le.Uint16(b[32:]) != id.Pool || le.Uint32(b[36:]) != id.Row || le.Uint32(b[40:]) != id.Block {
		return 0, ErrAddress
	}
	if le.Uint16(b[34:]) != 0 || !allZero(b[44:tableHeaderBytes]) {
		return 0, fieldError("record table: reserved bytes")
	}
	return h.Sequence, nil
}

// BlockRecord is the i-th record of a block.
func BlockRecord(b []byte, i int) []byte {
	off := tableHeaderBytes + i*RecordBytes
	return b[off : off+RecordBytes : off+RecordBytes]
}

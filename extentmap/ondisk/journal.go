package ondisk

import "encoding/binary"

// Journal is where a volume's journal lies and what its blocks must say.
//
// The journal is a ring of blocks, numbered through the life of the volume: block s lies at unit First + s mod Blocks.
// One group commit is a *batch*: consecutive blocks whose payloads, joined, are whole entries. A batch counts only if
// all its blocks are there. Each block holds the checksum of the one before it.
type Journal struct {
	First  uint64 // unit of the ring
	Blocks uint64
	Tag    uint64
	Nonce  uint64 // of the mount that writes
}

// BatchBlock is a block's place in its batch.
type BatchBlock struct {
	Sequence uint64
	Chain    uint32 // checksum field of the block before, or what the superblock says for the first
	Index    uint32 // in the batch
	Count    uint32 // blocks of the batch
}

// JournalNonce is the nonce that a block of some mount's journal carries.
func JournalNonce(b []byte) uint64 { return binary.LittleEndian.Uint64(b[32:]) }

// Unit is where block s lies.
func (j *Journal) Unit(s uint64) uint64 { return j.First + s%j.Blocks }

// Seal fills a block and returns the Chain of the next.
func (j *Journal) Seal(b []byte, at BatchBlock, payload []byte) uint32 {
	b = b[:BlockBytes]
	clear(b[copy(b[HeaderBytes:], payload)+HeaderBytes:])
	le := binary.LittleEndian
	le.PutUint64(b[32:], j.Nonce)
	le.PutUint32(b[40:], at.Chain)
	le.PutUint32(b[44:], at.Index)
	le.PutUint32(b[48:], at.Count)
	le.PutUint32(b[52:], uint32(len(payload)))
	clear(b[56:HeaderBytes])
	seal(b, Header{KindJournal, Locate(RoleDrive, j.Unit(at.Sequence)), j.Tag, at.Sequence})
	return le.Uint32(b)
}

// Open checks that b is block s of this mount's journal. Chain is the caller's to compare.
func (j *Journal) Open(b []byte, s uint64) (at BatchBlock, payload []byte, err error) {
	h, err := open(b, KindJournal, Locate(RoleDrive, j.Unit(s)), j.Tag)
	if err != nil {
		return at, nil, err
	}
	le := binary.LittleEndian
	at = BatchBlock{h.Sequence, le.Uint32(b[40:]), le.Uint32(b[44:]), le.Uint32(b[48:])}
	n := le.Uint32(b[52:])
	switch {
	case h.Sequence != s || le.Uint64(b[32:]) != j.Nonce:
		return at, nil, ErrAddress
	case n > PayloadBytes || at.Index >= at.Count || uint64(at.Index) > s || uint64(at.Count) > j.Blocks ||
		!allZero(b[56:HeaderBytes]) || !allZero(b[HeaderBytes+n:]):
		return at, nil, fieldError("journal: block %d of %d, %d bytes or reserved bytes", at.Index, at.Count, n)
	}
	return at, b[HeaderBytes : HeaderBytes+n], nil
}

// Scan is the outcome of reading a journal from its tail.
type Scan struct {
	Head  uint64 // sequence of the first block that is not part of a whole batch
	Chain uint32 // for that block
	// Damaged: a whole batch lies behind Head although Head's own is missing. A crash cannot leave that (a batch is
	// written only when the one before is durable), so acknowledged transactions were lost by the medium.
	Damaged bool
	Bad     int // copies of blocks of whole batches that were unreadable or wrong
}

// Replay reads the journal from block tail on and hands the joined entries of each whole batch to apply. copies are
// whole rings as read from each metadata drive (nil where one could not be read); of each block any valid copy will
// do. The bytes given to apply are valid during the call.
func (j *Journal) Replay(copies [][]byte, tail uint64, chain uint32,
	apply func(sequence uint64, entries []byte) error) (Scan, error) {
	out := Scan{Head: tail, Chain: chain}
	var batch []byte
	for {
		batch = batch[:0]
		next, link, count, bad := out.Head, out.Chain, uint32(1), 0
		for i := uint32(0); i < count; i++ {
			at, payload, crc, wrong := j.find(copies, next, link)
			if payload == nil || at.Index != i || i > 0 && at.Count != count || next-tail >= j.Blocks {
				out.Damaged = j.wholeBatchAfter(copies, out.Head, tail)
				return out, nil
			}
			batch = append(batch, payload...)
			next, link, count, bad = next+1, crc, at.Count, bad+wrong
		}
		if err := apply(out.Head, batch); err != nil {
			return out, err
		}
		out.Head, out.Chain, out.Bad = next, link, out.Bad+bad
	}
}

// find looks for a valid copy of block s that continues the chain; payload is nil if there is none, else not nil.
func (j *Journal) find(copies [][]byte, s uint64, chain uint32) (at BatchBlock, payload []byte, crc uint32, bad int) {
	off := s % j.Blocks * BlockBytes
	for _, ring := range copies {
		if uint64(len(ring)) < off+BlockBytes {
			bad++
			continue
		}
		b := ring[off : off+BlockBytes]
		a, p, err := j.Open(b, s)
		if err != nil || a.Chain != chain {
			bad++
			continue
		}
		if payload == nil {
			at, payload, crc = a, p, binary.LittleEndian.Uint32(b)
		}
	}
	return at, payload, crc, bad
}

// wholeBatchAfter says whether some block behind the batch that begins at head belongs to a later batch.
func (j *Journal) wholeBatchAfter(copies [][]byte, head, tail uint64) bool {
	for s := head + 1; s-tail < j.Blocks; s++ {
		off := s % j.Blocks * BlockBytes
		for _, ring := range copies {
			if uint64(len(ring)) < off+BlockBytes {
				continue
			}
			if at, _, err := j.Open(ring[off:off+BlockBytes], s); err == nil && s-uint64(at.Index) > head {
				return true
			}
		}
	}
	return false
}

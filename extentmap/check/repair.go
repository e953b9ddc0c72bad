package check

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// A repair is a mount, a checkpoint and an unmount in one: what the passes left in memory is made durable in the order
// of docs/format.md, section 10, under an epoch and a nonce of its own.
//
//  1. The labels name the new epoch, not clean, on every drive that is not behind. Copies that hold nothing are written
//     first, here and in all that follows: at any moment one copy of everything is whole.
//  2. Record tables: one copy of each block, flush; the other copy, flush.
//  3. The catalog, into the area not in use; flush.
//  4. The superblock, into the slot that does not hold the one that counts; flush. It ends the journal: the new nonce
//     keeps what is left in the ring from being believed. Then the other slot where it is not what it should be.
//  5. All labels, clean. Drives that were behind are named here first: until everything on them is right they stay
//     recognisable.
//
// Cut off anywhere, it leaves a volume that was not unmounted: the superblock names the state before or the one after,
// table blocks may be newer than the superblock, which replaying the journal sets right, and what was damaged is still
// there to be found.

// repairer writes what a checker found out.
type repairer struct {
	*checker
	super    ondisk.Superblock // the new one
	label    ondisk.Label      // what the new labels agree on
	metadata []*member
	sequence uint64 // of labels
	catalog  []byte
}

// repair writes what was accepted, unless something stands against it.
func (c *checker) repair() error {
	w, err := c.newRepairer()
	if err != nil {
		return err
	}
	if c.result.Obstacle = c.obstacle; c.obstacle != "" {
		return nil
	}
	for _, step := range []struct {
		what string
		run  func() error
	}{
		{"labels", w.beginLabels}, {"record tables", w.writeTables}, {"catalog", w.writeCatalog},
		{"superblock", w.writeSuperblocks}, {"journal", w.clearJournal}, {"labels", w.endLabels},
	} {
		if err := step.run(); err != nil {
			return fmt.Errorf("check: repair of the %s was cut off; check again: %w", step.what, err)
		}
	}
	c.result.Repaired, c.result.RepairedErrors, c.result.Clean = c.accepted, c.acceptedErrors, true
	return nil
}

func (c *checker) newRepairer() (*repairer, error) {
	if c.o.Random == nil {
		c.o.Random = rand.Reader
	}
	if c.o.Now == nil {
		c.o.Now = time.Now
	}
	var nonce [8]byte
	if _, err := io.ReadFull(c.o.Random, nonce[:]); err != nil {
		return nil, fmt.Errorf("check: no random bytes for the epoch's nonce: %w", err)
	}
	for _, q := range c.pools {
		q.number()
	}
	w := &repairer{checker: c, super: *c.super, label: *c.label, metadata: c.metadata(),
		catalog: c.encodeCatalog()}
	blocks := ondisk.StreamBlocks(len(w.catalog))
	if uint64(blocks) > c.label.Region.CatalogBlocks {
		c.must(false, fmt.Sprintf("the catalog needs %d blocks, an area has %d", blocks, c.label.Region.CatalogBlocks))
	}
	l, s := &w.label, &w.super
	l.Epoch = s.Epoch
	for _, m := range c.members {
		if m != nil {
			l.Epoch, w.sequence = max(l.Epoch, m.label.Epoch), max(w.sequence, m.label.Sequence)
		}
	}
	l.Epoch++
	l.Nonce = binary.LittleEndian.Uint64(nonce[:]) | 1
	l.Predecessor, l.Base = s.Nonce, s.Epoch
	s.Sequence++
	s.Epoch, s.Nonce, s.JournalNonce = l.Epoch, l.Nonce, l.Nonce
	s.Tail, s.Chain = c.head, 0
	s.CatalogArea ^= 1
	s.CatalogSeq, s.CatalogBytes, s.CatalogBlocks = s.Sequence, uint64(len(w.catalog)), uint32(blocks)
	s.CatalogCRC = ondisk.CRC(w.catalog)
	s.NextCommit = max(c.nextCommit, s.NextCommit, c.journaled)
	s.Time = c.o.Now().UnixNano()
	return w, nil
}

// writeUnits writes whole units of a member.
func writeUnits(m *member, b []byte, unit uint64) error {
	return m.WriteAt(b, int64(unit)*ondisk.BlockBytes)
}

// beginLabels names the new epoch on the drives that take part, those with the metadata role first.
func (w *repairer) beginLabels() error {
	w.label.Clean, w.label.Holders = false, 0
	var list []*member
	for i, m := range w.members {
		if m != nil && !m.behind {
			list = append(list, m)
			w.label.Holders |= 1 << i
		}
	}
	return w.writeLabels(list)
}

// endLabels says that the volume is whole, and that all drives take part.
func (w *repairer) endLabels() error {
	w.label.Clean, w.label.Base, w.label.Holders = true, w.label.Epoch, 0
	var list []*member
	for i, m := range w.members {
		if m != nil {
			list = append(list, m)
			w.label.Holders |= 1 << i
		}
	}
	return w.writeLabels(list)
}

func (w *repairer) writeLabels(list []*member) error {
	w.sequence++
	slices.SortStableFunc(list, func(a, b *member) int { return int(w.role(b)) - int(w.role(a)) })
	for _, m := range list {
		l := w.label
		l.Index, l.Drive, l.Units, l.LBAShift = m.label.Index, m.label.Drive, m.label.Units, m.label.LBAShift
		l.Region.Segments, l.Compat, l.Sequence = m.label.Region.Segments, m.label.Compat, w.sequence
		l.Extension = m.label.Extension
		places := []uint64{0, l.Units - 1}
		if m.badLast && !m.badFirst {
			slices.Reverse(places)
		}
		b := drive.AlignedBuffer(ondisk.BlockBytes)
		for _, unit := range places {
			l.Unit = unit
			l.Encode(b)
			if err := writeUnits(m, b, unit); err != nil {
				return err
			}
			if err := m.Flush(); err != nil {
				return err
			}
		}
		drive.FreeBuffer(b)
		m.badFirst, m.badLast = false, false
	}
	return nil
}

// role is 1 for a drive with the metadata role.
func (w *repairer) role(m *member) uint64 { return w.label.Metadata >> m.label.Index & 1 }

// writeTables writes the blocks that are to be written, one copy of each first: the one that holds nothing, if one
// does.
func (w *repairer) writeTables() error {
	buffer := drive.AlignedBuffer(readBlocks * ondisk.BlockBytes)
	defer drive.FreeBuffer(buffer)
	for second := range 2 {
		touched := make(map[*member]bool)
		for _, q := range w.sortedPools() {
			for _, r := range q.numbered {
				for number := range 2 {
					if err := w.writeCopy(r, number, second == 1, buffer, touched); err != nil {
						return err
					}
				}
			}
		}
		for m := range touched {
			if err := m.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// turn says whether a copy of a block is written, and whether in the second turn.
func (k copies) turn(number int) (written, second bool) {
	if k>>number&writeCopy == 0 {
		return false, false
	}
	if k&writeBoth != writeBoth {
		return true, false
	}
	if mine, other := k>>number&emptyCopy != 0, k>>(1-number)&emptyCopy != 0; mine != other {
		return true, other
	}
	return true, number == 1
}

// writeCopy writes the runs of one copy of a row's table that have their turn.
func (w *repairer) writeCopy(r *row, number int, second bool, buffer []byte, touched map[*member]bool) error {
	at := r.Tables[number]
	m := w.member(at.Drive())
	if m == nil { // missing, or a copy that has no place
		return nil
	}
	now := func(block int) bool {
		written, later := r.writes[block].turn(number)
		return written && later == second
	}
	for block := 0; block < len(r.writes); {
		if !now(block) {
			block++
			continue
		}
		n := 0
		for ; n < readBlocks && block+n < len(r.writes) && now(block+n); n++ {
			b := buffer[n*ondisk.BlockBytes:][:ondisk.BlockBytes]
			copy(b, r.table[(block+n)*ondisk.BlockBytes:])
			ondisk.SealTable(b, ondisk.Locate(at.Drive(), at.Unit()+uint64(block+n)), w.tag, w.super.Sequence,
				ondisk.TableID{Pool: r.Row.Pool, Row: r.Number, Block: uint32(block + n)})
		}
		if err := writeUnits(m, buffer[:n*ondisk.BlockBytes], at.Unit()+uint64(block)); err != nil {
			return err
		}
		touched[m] = true
		block += n
	}
	return nil
}

func (w *repairer) writeCatalog() error {
	s, r := &w.super, &w.label.Region
	first := r.CatalogUnit + uint64(s.CatalogArea)*r.CatalogBlocks
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	for _, m := range w.metadata {
		for i := range s.CatalogBlocks {
			payload := w.catalog[int(i)*ondisk.PayloadBytes:]
			payload = payload[:min(len(payload), ondisk.PayloadBytes)]
			ondisk.SealCatalog(b, first, i, w.tag, s.CatalogSeq, payload)
			if err := writeUnits(m, b, first+uint64(i)); err != nil {
				return err
			}
		}
		if err := m.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// writeSuperblocks writes the new one on all drives before it touches the one before.
func (w *repairer) writeSuperblocks() error {
	b, have := drive.AlignedBuffer(ondisk.BlockBytes), drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	defer drive.FreeBuffer(have)
	w.super.Unit = w.label.Region.SuperblockUnit + w.super.Sequence%ondisk.SuperblockSlots
	for _, s := range []*ondisk.Superblock{&w.super, w.checker.super} {
		s.Encode(b)
		for _, m := range w.metadata {
			if read(m, have, s.Unit) == nil && string(have) == string(b) {
				continue
			}
			if err := writeUnits(m, b, s.Unit); err != nil {
				return err
			}
			if err := m.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// clearJournal writes over what could not be read, so that the drive may put other sectors there.
func (w *repairer) clearJournal() error {
	for _, x := range w.unreadable {
		if err := x.m.WriteZeroes(int64(x.first)*ondisk.BlockBytes, int64(x.units)*ondisk.BlockBytes); err != nil {
			return err
		}
		if err := x.m.Flush(); err != nil {
			return err
		}
	}
	return nil
}

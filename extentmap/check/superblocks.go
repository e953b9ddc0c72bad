package check

import (
	"fmt"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// slotState is what one superblock slot of one drive holds.
type slotState struct {
	m     *member
	unit  uint64
	super *ondisk.Superblock
	err   error
	empty bool // never written
}

// checkSuperblocks finds the newest superblock and compares all copies.
func (c *checker) checkSuperblocks() error {
	var slots []slotState
	for _, m := range c.metadata() {
		for i := range uint64(ondisk.SuperblockSlots) {
			s := c.readSlot(m, c.label.Region.SuperblockUnit+i)
			slots = append(slots, s)
			if s.super != nil && (c.super == nil || s.super.Sequence > c.super.Sequence) {
				c.super = s.super
			}
		}
	}
	if c.super == nil {
		c.volume(errorf("superblock", "restore the metadata drives from a copy, or format the volume anew",
			"none on any metadata drive"))
		return ErrNotVolume
	}
	for i := range slots {
		c.checkSlot(&slots[i])
	}
	c.checkNewest()
	return nil
}

func (c *checker) readSlot(m *member, unit uint64) slotState {
	s := slotState{m: m, unit: unit}
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	if s.err = read(m, b, unit); s.err != nil {
		return s
	}
	if s.super, s.err = ondisk.DecodeSuperblock(b, unit, c.label.Volume); s.err != nil {
		s.super, s.empty = nil, allZero(b)
		return s
	}
	if at := c.label.Region.SuperblockUnit + s.super.Sequence%ondisk.SuperblockSlots; at != unit {
		s.super, s.err = nil, fmt.Errorf("%w: checkpoint %d belongs in block %d", ondisk.ErrAddress,
			s.super.Sequence, at)
	}
	return s
}

// formatSequence is the sequence of the superblock that formatting writes; the other slot is empty then.
const formatSequence = 2

// checkSlot wants the newest checkpoint in its slot, and in the other the one before or an older one.
func (c *checker) checkSlot(s *slotState) {
	newest := c.super.Sequence
	want := newest
	if (newest^s.unit^c.label.Region.SuperblockUnit)&1 != 0 {
		want-- // the other slot
	}
	const advice = "another copy is whole; the second next mount at the latest writes it anew"
	absent := s.super != nil || s.empty // in its place is something older, or nothing yet
	switch {
	case s.super != nil && s.super.Sequence == want:
		if want == newest && !sameCheckpoint(*s.super, *c.super) {
			c.at(s.m, s.unit, errorf("superblock", advice, "differs from the copies of the same checkpoint %d", newest))
		}
	case absent && want < formatSequence:
	case absent && want < newest:
		// A write that was cut off earlier. The slot is the next to be written, and nobody needs it meanwhile.
		c.at(s.m, s.unit, notef("superblock", "the next checkpoint writes it", "without checkpoint %d", want))
	case absent:
		c.at(s.m, s.unit, c.tornOr(errorf("superblock", advice, "without checkpoint %d, the newest", want)))
	default:
		c.at(s.m, s.unit, c.tornOr(errorf("superblock", advice, "bad: %v", s.err)))
	}
}

// sameCheckpoint compares two copies of one checkpoint; drives may be stamped one after another.
func sameCheckpoint(a, b ondisk.Superblock) bool {
	a.Time = b.Time
	return a == b
}

// checkNewest compares the newest superblock with the labels.
func (c *checker) checkNewest() {
	s, l := c.super, c.label
	m := c.metadata()[0]
	const advice = "do not mount it for writing; restore the metadata drives from a copy"
	if uint64(s.CatalogBlocks) > l.Region.CatalogBlocks {
		c.at(m, s.Unit, errorf("superblock", advice, "catalog of %d blocks, its area has %d", s.CatalogBlocks,
			l.Region.CatalogBlocks))
	}
	if l.Clean && s.Epoch != l.Epoch {
		c.at(m, s.Unit, errorf("superblock", advice, "of epoch %d, although the volume was unmounted in epoch %d",
			s.Epoch, l.Epoch))
	}
	if s.CatalogSeq > s.Sequence {
		c.at(m, s.Unit, errorf("superblock", advice, "names a catalog of checkpoint %d, itself being %d",
			s.CatalogSeq, s.Sequence))
	}
	c.checkEpochs()
}

// checkEpochs looks for drives that missed a part of the volume's history.
//
// A mount names its epoch in the labels of the metadata drives first, then in the others', and then in the
// superblock.
func (c *checker) checkEpochs() {
	s := c.super
	newest := uint64(0)
	for _, m := range c.metadata() {
		newest = max(newest, m.label.Epoch)
	}
	for _, m := range c.members {
		if m == nil {
			continue
		}
		l := m.label
		switch {
		case l.Epoch < s.Epoch:
			c.at(m, 0, errorf("label", "replace it with the drive that took part",
				"last mounted in epoch %d, the volume is in epoch %d", l.Epoch, s.Epoch))
		case l.Epoch > newest || l.Base > s.Epoch:
			c.at(m, 0, errorf("label", "the metadata drives are old copies: use those that took part",
				"has seen epoch %d, the metadata drives are in epoch %d", max(l.Epoch, l.Base), max(s.Epoch, newest)))
		case l.Epoch == s.Epoch && l.Nonce != s.Nonce:
			c.at(m, 0, errorf("label", "the halves have diverged: leave one of them out",
				"epoch %d was begun twice, apart from the other drives", l.Epoch))
		}
	}
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

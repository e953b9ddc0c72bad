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
			if s.super != nil && !m.behind && (c.super == nil || s.super.Sequence > c.super.Sequence) {
				c.super = s.super
			}
		}
	}
	if c.super == nil {
		c.volume(errorf("superblock", "restore the metadata drives from a copy, or format the volume anew",
			"none on any metadata drive"))
		return ErrNotVolume
	}
	c.newest = c.super.Sequence
	if !c.label.Clean {
		c.newest++ // one that was cut off
	}
	c.checkEpochs()
	for i := range slots {
		if !slots[i].m.behind {
			c.checkSlot(&slots[i], c.anyWhole(slots, slots[i].unit))
		}
	}
	c.checkNewest()
	return nil
}

// anyWhole says whether some drive has a superblock in that slot.
func (c *checker) anyWhole(slots []slotState, unit uint64) bool {
	for i := range slots {
		if s := &slots[i]; s.unit == unit && !s.m.behind && (s.super != nil || s.empty) {
			return true
		}
	}
	return false
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

// checkSlot wants the newest checkpoint in its slot, and in the other the one before or an older one. anyWhole says
// whether the slot is right on some drive.
func (c *checker) checkSlot(s *slotState, anyWhole bool) {
	newest := c.super.Sequence
	want := newest
	if (newest^s.unit^c.label.Region.SuperblockUnit)&1 != 0 {
		want-- // the other slot
	}
	const advice = "another copy is whole; the second next mount at the latest writes it anew"
	const fix = "it is written anew from another copy"
	absent := s.super != nil || s.empty // in its place is something older, or nothing yet
	p := errorf("superblock", advice, "bad: %v", s.err).safe(fix)
	switch {
	case s.super != nil && s.super.Sequence == want:
		if want == newest && !sameCheckpoint(*s.super, *c.super) {
			c.at(s.m, s.unit, errorf("superblock", advice, "differs from the copies of the same checkpoint %d",
				newest).ask("it is written as the other copy"))
		}
	case absent && want < formatSequence:
	case absent && want < newest:
		// A write that was cut off earlier. The slot is the next to be written, and nobody needs it meanwhile.
		c.at(s.m, s.unit, notef("superblock", "the next checkpoint writes it", "without checkpoint %d", want))
	case absent:
		c.at(s.m, s.unit, c.tornOr(errorf("superblock", advice, "without checkpoint %d, the newest", want).safe(fix)))
	case !anyWhole:
		// It may have been the newest. Then what the checkpoint before it knew counts, and the journal behind that.
		c.newest, c.noSlot = newest+1, true
		p = p.ask(fmt.Sprintf("checkpoint %d counts, and what the journal holds behind it", newest))
		p.advice = "if it was the newest, mounting goes on from the one before: files committed last may be lost"
		c.must(c.at(s.m, s.unit, c.tornOr(p)), "it is not known which superblock is the newest")
	default:
		c.at(s.m, s.unit, c.tornOr(p))
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
	if l.Clean && s.Epoch < l.Epoch {
		c.must(c.at(m, s.Unit, errorf("superblock", advice,
			"of epoch %d, although the volume was unmounted in epoch %d", s.Epoch, l.Epoch).
			ask("it counts: what happened since is lost")), "the newest superblock is missing")
	}
	if s.CatalogSeq > s.Sequence {
		c.at(m, s.Unit, errorf("superblock", advice, "names a catalog of checkpoint %d, itself being %d",
			s.CatalogSeq, s.Sequence).ask("the catalog is written anew"))
	}
}

// checkEpochs looks for drives that missed a part of the volume's history.
//
// A mount names its epoch in the labels of the metadata drives first, then in the others', and then in the
// superblock.
func (c *checker) checkEpochs() {
	s := c.super
	newest := uint64(0)
	for _, m := range c.metadata() {
		if !m.behind {
			newest = max(newest, m.label.Epoch)
		}
	}
	for _, m := range c.members {
		if m == nil {
			continue
		}
		l := m.label
		var p problem
		switch {
		case m.stale:
			c.at(m, 0, warningf("label", "the next mount takes it in again",
				"it was last in use in epoch %d, the volume went on without it in epoch %d", l.Epoch, c.label.Epoch).
				safe(fixBehind))
			continue
		case m.behind:
			p = errorf("label", "", "it contradicts %s, which is to be trusted: epoch %d, and %d there", c.o.Trust,
				l.Epoch, c.label.Epoch).ask(fixBehind)
		case c.label.Holders>>l.Index&1 == 0:
			p = errorf("label", adviceDiverged, "it went on in epoch %d without the others, which went on in epoch %d", l.Epoch,
				c.label.Epoch)
		case l.Epoch == s.Epoch && l.Nonce != s.Nonce || l.Epoch < s.Epoch && c.diverged(l):
			p = errorf("label", adviceDiverged, "epoch %d was begun twice, apart from the other drives", l.Epoch)
		case l.Epoch < s.Epoch:
			p = errorf("label", "replace it with the drive that took part, or have it repaired",
				"last mounted in epoch %d, the volume is in epoch %d", l.Epoch, s.Epoch).ask(fixBehind)
		case l.Epoch > newest || l.Base > s.Epoch:
			p = errorf("label", "use the metadata drives that took part, or go on from the old ones with --trust",
				"has seen epoch %d, the metadata drives are in epoch %d: they are old copies", max(l.Epoch, l.Base),
				max(s.Epoch, newest))
		default:
			continue
		}
		m.behind = c.must(c.at(m, 0, p), m.Name()+" has another history")
	}
}

const (
	fixBehind = "its metadata is written anew from the other drives; files on it that are no longer right are misses"

	adviceDiverged = "the halves have diverged: leave one of them out, or say with --trust DRIVE which one counts"
)

// diverged says whether a drive of an older epoch was mounted apart from the others, rather than left out by them: its
// epoch was held without a drive that is in the newest, or the newest followed another one.
func (c *checker) diverged(l *ondisk.Label) bool {
	ref := c.label
	return ref.Holders&^l.Holders&^c.joinedSince(l) != 0 || ref.Base == l.Epoch && ref.Predecessor != l.Nonce
}

// joinedSince has a bit for each drive that was no member when a label was written.
func (c *checker) joinedSince(l *ondisk.Label) (mask uint64) {
	for i := range c.label.Members {
		if c.label.Members[i].State == ondisk.DriveActive && l.Members[i].UUID != c.label.Members[i].UUID {
			mask |= 1 << i
		}
	}
	return mask
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

package check

import (
	"fmt"
	"math/bits"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// bareDrive has no readable label.
type bareDrive struct {
	drive.Drive
	err error
}

func (b *bareDrive) problem(advice string) problem { return errorf("label", advice, "%v", b.err) }

// adopt finds out which missing members the drives without label are. All that a label says is known from the others,
// but which drive it is: a drive's own record tables, which name it, or the newest superblock, which only one missing
// drive can have, are the proof.
func (c *checker) adopt(bare []bareDrive) error {
	var known *checker
	for i := range bare {
		b := &bare[i]
		if known == nil && c.anyMissing() {
			var err error
			if known, err = c.probe(bare); err != nil {
				return err
			}
			defer known.release()
		}
		m := c.recognise(b, known)
		if m == nil {
			c.at(b.Drive, 0, b.problem("leave the drive out, or restore it from a copy"))
			continue
		}
		p := b.problem("the volume's other drives know what belongs there: repair it")
		p.message += fmt.Sprintf("; it is drive %d, as other blocks on it show", m.label.Index)
		if c.at(m, 0, p.ask(fixLabel)) {
			c.join(m)
		}
	}
	return nil
}

func (c *checker) anyMissing() bool {
	for i := range c.label.Members {
		if c.label.Members[i].State == ondisk.DriveActive && c.members[i] == nil {
			return true
		}
	}
	return false
}

// probe checks the volume silently up to its rows, as it is without the drives that have no label. If all metadata
// drives are among those, whichever of them may be in whichever place: their blocks of that role are the same.
func (c *checker) probe(bare []bareDrive) (*checker, error) {
	k := newChecker(c.ctx, Options{Trust: c.o.Trust})
	k.label, k.tag, k.members = c.label, c.tag, c.members
	for i, m := range c.members {
		if m != nil {
			k.members[i] = &member{Drive: m.Drive, label: m.label, behind: m.behind}
		}
	}
	for i := range c.label.Members {
		if len(bare) > 0 && len(c.metadata()) == 0 && c.label.Metadata>>i&1 != 0 {
			k.members[i] = &member{Drive: bare[0].Drive, label: c.labelOf(bare[0].Drive, uint16(i))}
			bare = bare[1:]
		}
	}
	for _, pass := range []func() error{k.checkSuperblocks, k.checkCatalog, k.checkJournal} {
		if err := pass(); err != nil {
			if c.ctx.Err() != nil {
				k.release()
				return nil, c.ctx.Err()
			}
			break // what is known so far must do
		}
	}
	return k, nil
}

// recognise says which missing member a drive is, nil if that is not proven.
func (c *checker) recognise(b *bareDrive, known *checker) *member {
	for i := range c.label.Members {
		s := &c.label.Members[i]
		if s.State != ondisk.DriveActive || c.members[i] != nil || units(b.Drive) < s.Units {
			continue
		}
		m := &member{Drive: b.Drive, badFirst: true, badLast: true}
		if at := readLabelCopy(b.Drive, s.Units-1); at.err == nil && at.label.Drive == s.UUID &&
			at.label.Volume == c.label.Volume && int(at.label.Index) == i {
			m.label, m.badLast = at.label, false // a drive that grew
			return m
		}
		if known.super != nil && known.proves(b.Drive, uint16(i)) {
			m.label = c.labelOf(b.Drive, uint16(i))
			return m
		}
	}
	return nil
}

// proves looks for a block that only the drive of that index has.
func (c *checker) proves(d drive.Drive, index uint16) bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	if c.onlyMissingRole(index) {
		unit := c.super.Unit
		if read(d, b, unit) == nil {
			s, err := ondisk.DecodeSuperblock(b, unit, c.label.Volume)
			if err == nil && s.Sequence == c.super.Sequence && s.Nonce == c.super.Nonce {
				return true
			}
		}
	}
	for _, q := range c.pools {
		for _, r := range q.rows {
			for _, at := range r.Tables {
				for block := uint32(0); at.Drive() == index && block < q.tableBlocks; block++ {
					unit := at.Unit() + uint64(block)
					if unit < units(d) && read(d, b, unit) == nil &&
						c.openTable(r, b, ondisk.Locate(index, unit), block, nil) == nil {
						return true
					}
				}
			}
		}
	}
	return false
}

// onlyMissingRole says whether the drive of that index is the one metadata drive that is not there.
func (c *checker) onlyMissingRole(index uint16) bool {
	missing := c.label.Metadata
	for i, m := range c.members {
		if m != nil {
			missing &^= 1 << i
		}
	}
	return missing == 1<<index
}

// labelOf is the label of a member, made from the volume's.
func (c *checker) labelOf(d drive.Drive, index uint16) *ondisk.Label {
	l := *c.label
	clear(l.Extension[:]) // it is another drive's
	s := &l.Members[index]
	l.Index, l.Drive, l.Units = index, s.UUID, s.Units
	l.LBAShift = uint8(bits.TrailingZeros(uint(d.LBABytes())))
	r := &l.Region
	r.Segments = uint32(min((l.Units-1-r.SegmentUnit)/uint64(r.SegmentUnits), ondisk.MaxSegments))
	return &l
}

package check

import (
	"errors"
	"fmt"
	"math/bits"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const adviceCopy = "the other copy is whole, and the volume can be mounted; the next mount writes both"

// checkLabels finds out which drives are members and what the volume agrees on.
func (c *checker) checkLabels(drives []drive.Drive) error {
	var found []*member
	for _, d := range drives {
		l, err := c.readLabels(d)
		if err != nil {
			return err
		}
		if l != nil {
			found = append(found, &member{Drive: d, label: l})
		}
	}
	if len(found) == 0 {
		return ErrNotVolume
	}
	c.label = found[0].label
	for _, m := range found {
		if m.label.Volume == c.label.Volume && m.label.Sequence > c.label.Sequence {
			c.label = m.label
		}
	}
	c.tag = ondisk.VolumeTag(c.label.Volume)
	c.result.Volume, c.result.Label, c.result.Clean = c.label.Volume, c.label.Name, c.label.Clean
	for _, m := range found {
		c.admit(m)
	}
	for i := range c.label.Members {
		if s := &c.label.Members[i]; s.State == ondisk.DriveActive && c.members[i] == nil {
			c.volume(errorf("label", "attach the drive, or name its path", "drive %d (%s, %d bytes) is missing", i,
				formatUUID(s.UUID), s.Units*ondisk.BlockBytes))
		}
	}
	if !c.label.Clean {
		c.volume(notef("label", "",
			"the volume was not unmounted, or is mounted now: its journal is checked as well"))
	}
	return nil
}

// labelCopy is what lies at one of a label's two places.
type labelCopy struct {
	unit  uint64
	label *ondisk.Label
	err   error
}

func readLabelCopy(d drive.Drive, unit uint64) labelCopy {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	if err := read(d, b, unit); err != nil {
		return labelCopy{unit: unit, err: err}
	}
	l, err := ondisk.DecodeLabel(b, unit)
	return labelCopy{unit, l, err}
}

// readLabels compares both copies of a drive's label and returns the one that counts, nil if there is none.
func (c *checker) readLabels(d drive.Drive) (*ondisk.Label, error) {
	first := readLabelCopy(d, 0)
	last := readLabelCopy(d, units(d)-1)
	if l := first.label; first.err == nil && l.Units != units(d) {
		if l.Units > units(d) {
			c.at(d, NoBlock, errorf("label", "restore its size, or replace the drive",
				"%d bytes, the label says %d", d.Size(),
				l.Units*ondisk.BlockBytes))
		}
		last = readLabelCopy(d, l.Units-1) // a drive that grew has it inside
	}
	for _, copy := range []labelCopy{first, last} {
		if errors.Is(copy.err, ondisk.ErrVersion) || errors.Is(copy.err, ondisk.ErrFeature) {
			return nil, fmt.Errorf("%w: %s: %w", ErrNewer, d.Name(), copy.err)
		}
	}
	switch {
	case first.err != nil && last.err != nil:
		c.at(d, 0, errorf("label", "leave the drive out, or restore it from a copy",
			"no label: %v; and at block %d: %v",
			first.err, last.unit, last.err))
		return nil, nil
	case first.err != nil:
		c.at(d, first.unit, errorf("label", adviceCopy, "the first copy is bad: %v", first.err))
		return last.label, nil
	case last.err != nil:
		c.at(d, last.unit, errorf("label", adviceCopy, "the second copy is bad: %v", last.err))
		return first.label, nil
	}
	return c.compareCopies(d, first.label, last.label), nil
}

// compareCopies wants both copies of one drive equal. A writer makes the first durable before it begins the second.
func (c *checker) compareCopies(d drive.Drive, first, last *ondisk.Label) *ondisk.Label {
	a, b := *first, *last
	a.Unit, b.Unit = 0, 0
	switch {
	case a == b:
		return first
	case a.Volume == b.Volume && a.Drive == b.Drive && a.Sequence > b.Sequence &&
		(!a.Clean || a.Sequence == b.Sequence+1):
		c.at(d, last.Unit, notef("label", "the next mount writes both", "the second copy is older than the first"))
		return first
	}
	c.at(d, last.Unit, errorf("label", "mount and unmount the volume to write both",
		"the copies differ (writings %d and %d)", a.Sequence, b.Sequence))
	if b.Volume == a.Volume && b.Sequence > a.Sequence {
		return last
	}
	return first
}

// admit makes a drive a member if its label fits the volume's newest.
func (c *checker) admit(m *member) {
	l, ref := m.label, c.label
	if l.Volume != ref.Volume {
		c.at(m, 0, errorf("label", "leave it out", "belongs to volume %s, not %s", formatUUID(l.Volume),
			formatUUID(ref.Volume)))
		return
	}
	s := &ref.Members[l.Index]
	if s.State != ondisk.DriveActive || s.UUID != l.Drive {
		c.at(m, 0, errorf("label", "leave it out",
			"the volume's newest label does not list this drive (%s) as its drive %d", formatUUID(l.Drive), l.Index))
		return
	}
	if other := c.members[l.Index]; other != nil {
		c.at(m, 0, errorf("label", "leave the copy out", "%s is the same drive %d", other.Name(), l.Index))
		return
	}
	if !sameLayout(l, ref) {
		c.at(m, 0, errorf("label", "restore the label from the drive's other copy",
			"disagrees with the newest label about the layout"))
		return
	}
	c.members[l.Index] = m
	c.result.Drives++
	c.checkMember(m)
}

// checkMember compares what may change from writing to writing.
func (c *checker) checkMember(m *member) {
	l, ref := m.label, c.label
	if shift := bits.TrailingZeros(uint(m.LBABytes())); int(l.LBAShift) != shift && m.Kind() == drive.Block {
		c.at(m, 0, warningf("label", "", "formatted for blocks of %d bytes, the device has %d", 1<<l.LBAShift,
			m.LBABytes()))
	}
	if x := l.ROCompat &^ ondisk.KnownROCompat; x != 0 {
		c.at(m, 0, warningf("label", "use a newer version to write", "unknown features %#x: only for reading", x))
	}
	same := l.Epoch == ref.Epoch && l.Nonce == ref.Nonce && l.Clean == ref.Clean && l.Members == ref.Members &&
		l.Metadata == ref.Metadata && l.Holders == ref.Holders && l.Base == ref.Base && l.Name == ref.Name &&
		l.Predecessor == ref.Predecessor && l.CreationTime == ref.CreationTime
	switch {
	case l.Sequence < ref.Sequence:
		// Whether the drive missed something is for checkEpochs to say, once the superblock is known.
		c.at(m, 0, notef("label", "the next mount writes it", "%d writings behind the newest label",
			ref.Sequence-l.Sequence))
	case !same:
		c.at(m, 0, errorf("label", "use the drives that were mounted together",
			"writing %d of epoch %d contradicts that of drive %d", l.Sequence, l.Epoch, ref.Index))
	}
}

// sameLayout compares what is the same for the life of the volume.
func sameLayout(a, b *ondisk.Label) bool {
	x := a.Region
	x.Segments = b.Region.Segments
	return x == b.Region && a.Width == b.Width
}

func formatUUID(u [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

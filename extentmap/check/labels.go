package check

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	adviceCopy = "the other copy is whole, and the volume can be mounted; the next mount writes both"
	fixLabel   = "both copies are written anew"
)

// checkLabels finds out which drives are members and what the volume agrees on.
func (c *checker) checkLabels(drives []drive.Drive) error {
	var found []*member
	var bare []bareDrive
	for _, d := range drives {
		m, none, err := c.readLabels(d)
		switch {
		case err != nil:
			return err
		case m != nil:
			found = append(found, m)
		default:
			bare = append(bare, bareDrive{d, none})
		}
	}
	if len(found) == 0 {
		for _, b := range bare {
			c.at(b.Drive, 0, b.problem("leave the drive out, or restore it from a copy"))
		}
		return ErrNotVolume
	}
	if err := c.chooseLabel(found); err != nil {
		return err
	}
	for _, m := range found {
		c.admit(m)
	}
	if err := c.adopt(bare); err != nil {
		return err
	}
	c.checkMissing()
	if !c.label.Clean {
		c.volume(notef("label", "",
			"the volume was not unmounted, or is mounted now: its journal is checked as well").
			safe("the journal is brought into the record tables, and the volume is clean"))
	}
	return nil
}

// checkMissing names the members that are not there. A volume that went on without one leaves it behind no further by a
// repair; else that would be the first to.
func (c *checker) checkMissing() {
	behind := slices.ContainsFunc(c.members[:], func(m *member) bool { return m != nil && m.behind })
	for i := range c.label.Members {
		s := &c.label.Members[i]
		if s.State != ondisk.DriveActive || c.members[i] != nil {
			continue
		}
		what := fmt.Sprintf("drive %d (%s, %d bytes) is missing", i, formatUUID(s.UUID), s.Units*ondisk.BlockBytes)
		obstacle := fmt.Sprintf("drive %d is missing: a repair without it would leave it behind", i)
		if left := c.label.Holders>>i&1 == 0; left && !behind {
			c.volume(warningf("label", "attach the drive, or forget it",
				"%s, and the volume went on without it in epoch %d", what, c.label.Epoch))
			continue
		} else if left {
			obstacle = fmt.Sprintf("drive %d is missing, and may know more than one that is there and behind", i)
		}
		c.volume(errorf("label", "attach the drive, or name its path", "%s", what))
		c.must(false, obstacle)
	}
}

// chooseLabel finds the label that the volume goes by: the newest, of those the one that most copies agree with, or
// that of the drive to trust.
func (c *checker) chooseLabel(found []*member) error {
	c.label = found[0].label
	trusted := false
	for _, m := range found {
		switch {
		case c.o.Trust != "" && m.Name() == c.o.Trust:
			c.label, trusted = m.label, true
		case !trusted && m.label.Volume == c.label.Volume && newer(m.label, c.label):
			c.label = m.label
		}
	}
	if c.o.Trust != "" && !trusted {
		return fmt.Errorf("check: %s, which is to be trusted, is not among the drives with a label", c.o.Trust)
	}
	if !trusted {
		c.vote(found)
	}
	c.tag = ondisk.VolumeTag(c.label.Volume)
	c.result.Volume, c.result.Label, c.result.Clean = c.label.Volume, c.label.Name, c.label.Clean
	return nil
}

// vote replaces the newest label by one that more copies agree with, and each drive's by a copy that does, if one does.
func (c *checker) vote(found []*member) {
	newest, most := c.label, 0
	for _, m := range found {
		for _, l := range m.copies {
			if l.Volume != newest.Volume || newer(l, newest) || newer(newest, l) {
				continue
			}
			n := 0
			for _, other := range found {
				for _, x := range other.copies {
					if agree(l, x) {
						n++
					}
				}
			}
			if n > most {
				c.label, most = l, n
			}
		}
	}
	for _, m := range found {
		for _, l := range m.copies {
			if agree(l, c.label) && !agree(m.label, c.label) && l.Sequence == m.label.Sequence {
				m.label = l
			}
		}
	}
}

// agree compares what the labels of all drives have in common.
func agree(a, b *ondisk.Label) bool {
	return a.Volume == b.Volume && a.Epoch == b.Epoch && a.Nonce == b.Nonce && a.Sequence == b.Sequence &&
		sameCommon(a, b) && sameLayout(a, b)
}

// sameCommon compares what may change from writing to writing.
func sameCommon(l, ref *ondisk.Label) bool {
	return l.Clean == ref.Clean && l.Members == ref.Members && l.Metadata == ref.Metadata &&
		l.Holders == ref.Holders && l.Base == ref.Base && l.Name == ref.Name && l.Predecessor == ref.Predecessor &&
		l.CreationTime == ref.CreationTime
}

// newer compares labels of one volume: the epoch counts before the number of writings, which two halves count apart.
func newer(a, b *ondisk.Label) bool {
	return cmp.Or(cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Sequence, b.Sequence)) > 0
}

// labelCopy is what lies at one of a label's two places.
type labelCopy struct {
	unit  uint64
	label *ondisk.Label
	err   error
}

func readLabelCopy(d drive.Drive, unit uint64) labelCopy {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	if err := read(d, b, unit); err != nil {
		return labelCopy{unit: unit, err: err}
	}
	l, err := ondisk.DecodeLabel(b, unit)
	return labelCopy{unit, l, err}
}

// grower is a drive that can be made longer: a regular file.
type grower interface{ Grow(size int64) error }

// readLabels compares both copies of a drive's label and returns the one that counts. If there is none it returns why.
func (c *checker) readLabels(d drive.Drive) (m *member, none error, err error) {
	first := readLabelCopy(d, 0)
	last := readLabelCopy(d, units(d)-1)
	if l := first.label; first.err == nil && l.Units != units(d) {
		if l.Units > units(d) && !c.lengthen(d, l) {
			c.must(false, d.Name()+" is shorter than it was formatted")
		}
		last = readLabelCopy(d, l.Units-1) // a drive that grew has it inside
	}
	for _, copy := range []labelCopy{first, last} {
		if errors.Is(copy.err, ondisk.ErrDraft) {
			return nil, nil, fmt.Errorf("%w: %s", ErrDraft, d.Name())
		}
		if errors.Is(copy.err, ondisk.ErrVersion) || errors.Is(copy.err, ondisk.ErrFeature) {
			return nil, nil, fmt.Errorf("%w: %s: use a newer tuttifs: %w", ErrNewer, d.Name(), copy.err)
		}
	}
	m = &member{Drive: d, badFirst: first.err != nil, badLast: last.err != nil}
	for _, copy := range []labelCopy{first, last} {
		if copy.err == nil {
			m.copies = append(m.copies, copy.label)
		}
	}
	switch {
	case first.err != nil && last.err != nil:
		return nil, fmt.Errorf("no label: %w; and at block %d: %w", first.err, last.unit, last.err), nil
	case first.err != nil:
		c.at(d, first.unit, inWriting(last.label, errorf("label", adviceCopy, "the first copy is bad: %v",
			first.err)).safe(fixLabel))
		m.label = last.label
	case last.err != nil:
		c.at(d, last.unit, inWriting(first.label, errorf("label", adviceCopy, "the second copy is bad: %v",
			last.err)).safe(fixLabel))
		m.label = first.label
	default:
		m.label = c.compareCopies(d, first.label, last.label)
	}
	return m, nil, nil
}

// inWriting is a note where the good copy says that the volume was in use: the other may have been cut off while it was
// written, or never have been there on a drive that was being added.
func inWriting(good *ondisk.Label, p problem) problem {
	if !good.Clean {
		p.severity = Note
	}
	return p
}

// lengthen reports a drive that is shorter than its label says. A file can be made as long again; what lay behind its
// end is gone: copies of metadata are there a second time, files are not.
func (c *checker) lengthen(d drive.Drive, l *ondisk.Label) bool {
	p := errorf("label", "restore its size, or replace the drive", "%d bytes, the label says %d", d.Size(),
		l.Units*ondisk.BlockBytes)
	g, file := d.(grower)
	if !file || d.Kind() == drive.Block {
		c.at(d, NoBlock, p)
		return false
	}
	if !c.at(d, NoBlock, p.ask("the file is made as long again: files that lay behind its end are misses")) {
		return false
	}
	if err := g.Grow(int64(l.Units) * ondisk.BlockBytes); err != nil {
		c.at(d, NoBlock, errorf("label", "make room, and repair again", "cannot be made longer: %v", err))
		return false
	}
	return true
}

// compareCopies wants both copies of one drive equal. A writer makes one durable before it begins the other.
func (c *checker) compareCopies(d drive.Drive, first, last *ondisk.Label) *ondisk.Label {
	a, b := *first, *last
	a.Unit, b.Unit = 0, 0
	if a == b {
		return first
	}
	newer, older := first, last
	if b.Volume == a.Volume && b.Sequence > a.Sequence {
		newer, older = last, first
	}
	if newer.Volume == older.Volume && newer.Drive == older.Drive && newer.Sequence > older.Sequence &&
		(!newer.Clean || newer.Sequence == older.Sequence+1) {
		c.at(d, older.Unit, notef("label", "the next mount writes both", "older than the other copy").safe(fixLabel))
		return newer
	}
	c.at(d, older.Unit, errorf("label", "mount and unmount the volume to write both",
		"the copies differ (writings %d and %d)", a.Sequence, b.Sequence).safe(fixLabel))
	return newer
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
	if s.State == ondisk.DriveRemoved && s.UUID == l.Drive {
		c.at(m, 0, notef("label", "leave it out", "drive %d (%s) was removed from the volume", l.Index, formatUUID(l.Drive)))
		return
	}
	if s.State != ondisk.DriveActive || s.UUID != l.Drive {
		c.at(m, 0, errorf("label", "leave it out",
			"the volume's newest label does not list this drive (%s) as its drive %d", formatUUID(l.Drive), l.Index))
		return
	}
	if other := c.members[l.Index]; other != nil {
		c.at(m, 0, errorf("label", "leave the copy out", "%s is the same drive %d", other.Name(), l.Index))
		c.must(false, fmt.Sprintf("%s and %s are the same drive", other.Name(), m.Name()))
		return
	}
	if !sameLayout(l, ref) {
		if !c.must(c.at(m, 0, errorf("label", "restore the label from the drive's other copy",
			"disagrees with the newest label about the layout").ask("it is written as the newest label says")),
			m.Name()+" disagrees about the layout") {
			return
		}
		m.label = c.labelOf(m, l.Index)
	}
	c.join(m)
	c.checkMember(m)
}

func (c *checker) join(m *member) {
	c.members[m.label.Index] = m
	c.result.Drives++
	left := c.label.Holders>>m.label.Index&1 == 0
	m.stale = left && c.label.Holders&m.label.Holders != 0
	m.behind = m.stale || c.o.Trust != "" && (left || !sameHistory(m.label, c.label))
}

// sameHistory says whether a drive stands where the trusted one does, or a step before or behind it: a mount that died
// while it named its epoch acknowledged nothing.
func sameHistory(l, trusted *ondisk.Label) bool {
	switch {
	case l.Epoch == trusted.Epoch:
		return l.Nonce == trusted.Nonce
	case l.Epoch < trusted.Epoch:
		return !trusted.Clean && l.Epoch == trusted.Base && l.Nonce == trusted.Predecessor
	}
	return !l.Clean && l.Base == trusted.Epoch && l.Predecessor == trusted.Nonce
}

// checkMember compares what may change from writing to writing.
func (c *checker) checkMember(m *member) {
	l, ref := m.label, c.label
	device := m.Kind() == drive.Block || m.Kind() == drive.NVMe
	if shift := bits.TrailingZeros(uint(m.LBABytes())); int(l.LBAShift) != shift && device {
		c.at(m, 0, warningf("label", "", "formatted for blocks of %d bytes, the device has %d", 1<<l.LBAShift,
			m.LBABytes()))
	}
	if x := l.ROCompat &^ ondisk.KnownROCompat; x != 0 {
		c.at(m, 0, warningf("label", "use a newer version to write", "unknown features %#x: only for reading", x))
		c.must(false, fmt.Sprintf("%s has features %#x, which only a newer version may write to", m.Name(), x))
	}
	switch {
	case l.Epoch == ref.Epoch && l.Nonce != ref.Nonce:
		// For checkEpochs to say.
	case l.Sequence < ref.Sequence:
		// Whether the drive missed something is for checkEpochs to say, once the superblock is known.
		c.at(m, 0, notef("label", "the next mount writes it", "%d writings behind the newest label",
			ref.Sequence-l.Sequence))
	case !sameCommon(l, ref) && !m.behind:
		c.must(c.at(m, 0, errorf("label", "use the drives that were mounted together",
			"writing %d of epoch %d contradicts that of drive %d", l.Sequence, l.Epoch, ref.Index).
			ask("it is written as that of the other drive")), m.Name()+" contradicts the newest label")
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

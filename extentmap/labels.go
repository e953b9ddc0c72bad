package extentmap

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// readLabel reads a drive's label: of the two copies the newer valid one. The error is a *DriveError.
func readLabel(d drive.Drive) (*ondisk.Label, error) {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	last := uint64(d.Size())/ondisk.BlockBytes - 1
	if d.Size() < 2*ondisk.BlockBytes {
		return nil, &DriveError{Err: ErrForeign, Name: d.Name(), Index: -1, Advice: "too small to be a tuttifs drive"}
	}
	var best, named *ondisk.Label
	var problem error
	found := false
	for _, unit := range []uint64{0, last} {
		if err := d.ReadAt(b, int64(unit)*ondisk.BlockBytes); err != nil {
			problem = firstError(problem, err)
			continue
		}
		l, err := ondisk.DecodeLabel(b, unit)
		found = found || !errors.Is(err, ondisk.ErrMagic)
		switch {
		case err == nil && (best == nil || l.Sequence > best.Sequence):
			best = l
		case errors.Is(err, ondisk.ErrVersion) || errors.Is(err, ondisk.ErrFeature) || errors.Is(err, ondisk.ErrDraft):
			named, problem = l, err
		case err != nil && !errors.Is(err, ondisk.ErrMagic):
			problem = firstError(problem, err)
		}
	}
	switch {
	case named != nil && errors.Is(problem, ondisk.ErrDraft):
		return nil, &DriveError{Err: ErrDraftFormat, Name: d.Name(), Index: int(named.Index), UUID: named.Drive,
			Advice: "make the volume anew with tuttifs mkfs --force: its files are lost, and are computed again"}
	case named != nil:
		return nil, &DriveError{Err: ErrNewerFormat, Name: d.Name(), Index: int(named.Index), UUID: named.Drive,
			Advice: "use a newer tuttifs", Cause: problem}
	case best != nil:
		return best, nil
	case found || problem != nil:
		return nil, &DriveError{Err: ErrCorrupt, Name: d.Name(), Index: -1,
			Advice: "both copies of the label are damaged; run tuttifs fsck", Cause: problem}
	}
	return nil, &DriveError{Err: ErrForeign, Name: d.Name(), Index: -1,
		Advice: "no tuttifs label; format it with tuttifs mkfs"}
}

// candidate is a drive and its label.
type candidate struct {
	dev   drive.Drive
	label *ondisk.Label
	stale bool // it missed an epoch that was held without it
}

func (c *candidate) err(kind error, format string, args ...any) error {
	return &DriveError{Err: kind, Name: c.dev.Name(), Index: int(c.label.Index), UUID: c.label.Drive,
		Advice: fmt.Sprintf(format, args...)}
}

// newer orders labels: by epoch, then by writing.
func newer(a, b *ondisk.Label) int {
	return cmp.Or(cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Sequence, b.Sequence))
}

// forgets says whether a label says that another drive is no member any more.
func forgets(l, other *ondisk.Label) bool {
	m := &l.Members[other.Index]
	return m.State == ondisk.DriveRemoved && m.UUID == other.Drive
}

// selectMembers takes the candidates that make up the volume, each whole and there once. It leaves out what the others
// have forgotten, marks drives that missed something, and refuses halves that went on apart from each other. It returns
// the newest label, which counts.
func selectMembers(list []candidate, o *Options) ([]candidate, *ondisk.Label, error) {
	if err := checkOneVolume(list); err != nil {
		return nil, nil, err
	}
	list, err := dropForgotten(list)
	if err != nil {
		return nil, nil, err
	}
	newest := slices.MaxFunc(list, func(a, b candidate) int { return newer(a.label, b.label) }).label
	var have [ondisk.MaxDrives]*candidate
	for i := range list {
		c := &list[i]
		m := &newest.Members[c.label.Index]
		switch {
		case m.State != ondisk.DriveActive || m.UUID != c.label.Drive:
			return nil, nil, c.err(ErrForeign, "the volume's newest label does not list it; leave it out")
		case have[c.label.Index] != nil:
			return nil, nil, c.err(ErrDuplicate,
				"%s carries the same UUID; leave the copy out, or move it out of the directory",
				have[c.label.Index].dev.Name())
		case uint64(c.dev.Size())/ondisk.BlockBytes < c.label.Units:
			return nil, nil, c.err(ErrTruncated, "%d bytes, the label says %d; restore its size", c.dev.Size(),
				c.label.Units*ondisk.BlockBytes)
		case !o.ReadOnly && c.label.ROCompat&^ondisk.KnownROCompat != 0:
			return nil, nil, c.err(ErrNewerFormat,
				"read-only-compatible features %#x are unknown; mount read-only or use a newer tuttifs",
				c.label.ROCompat&^ondisk.KnownROCompat)
		case !sameLayout(&c.label.Region, &newest.Region) || c.label.Width != newest.Width:
			return nil, nil, c.err(ErrCorrupt,
				"its label and that of drive %d disagree about the layout; run tuttifs fsck", newest.Index)
		}
		have[c.label.Index] = c
		// Who held an epoch together with one that went on is behind; who held it with none of those went another way.
		if c.stale = newest.Holders>>c.label.Index&1 == 0; c.stale && newest.Holders&c.label.Holders == 0 {
			return nil, nil, c.err(ErrDiverged, "it went on in epoch %d without drive %d, which went on in epoch %d without "+
				"it; mount one half alone with -o degraded, and forget the other", c.label.Epoch, newest.Index, newest.Epoch)
		}
		if c.label.Epoch == newest.Epoch && c.label.Nonce != newest.Nonce {
			return nil, nil, c.err(ErrDiverged, "epoch %d was begun twice, apart from the other drives: the halves have "+
				"diverged; mount one half alone with -o degraded, and forget the other", c.label.Epoch)
		}
	}
	return list, newest, checkQuorum(newest, &have, o)
}

func checkOneVolume(list []candidate) error {
	for i := range list {
		if c := &list[i]; c.label.Volume != list[0].label.Volume {
			return c.err(ErrForeign, "it belongs to volume %s (%q), not %s; leave it out", FormatUUID(c.label.Volume),
				c.label.Name, FormatUUID(list[0].label.Volume))
		}
	}
	return nil
}

// dropForgotten leaves out what another drive has forgotten and that has not forgotten that one.
func dropForgotten(list []candidate) ([]candidate, error) {
	var out []candidate
	for i := range list {
		forgotten := false
		for j := range list {
			switch {
			case !forgets(list[j].label, list[i].label):
			case forgets(list[i].label, list[j].label):
				return nil, list[i].err(ErrDiverged, "it and %s have forgotten each other; name the drives of one half only",
					list[j].dev.Name())
			default:
				forgotten = true
			}
		}
		if !forgotten {
			out = append(out, list[i])
		}
	}
	if len(out) == 0 {
		return nil, list[0].err(ErrForeign, "it was removed from its volume; name a drive that is in it")
	}
	return out, nil
}

// checkQuorum refuses a volume with drives missing, unless it may be degraded, at least half of the drives are there,
// and one of them holds the newest metadata that any of them knows of.
func checkQuorum(newest *ondisk.Label, have *[ondisk.MaxDrives]*candidate, o *Options) error {
	members, here := 0, 0
	var missing *DriveError
	metadata := false
	for i := range newest.Members {
		m := &newest.Members[i]
		if m.State != ondisk.DriveActive {
			continue
		}
		members++
		if have[i] != nil {
			here++
			metadata = metadata || newest.Metadata>>i&1 != 0 && !have[i].stale
			continue
		}
		if missing == nil {
			missing = &DriveError{Err: ErrMissing, Index: i, UUID: m.UUID,
				Advice: fmt.Sprintf("%d bytes, of volume %s (%q); attach it, or name its path", m.Units*ondisk.BlockBytes,
					FormatUUID(newest.Volume), newest.Name)}
		}
	}
	switch {
	case missing == nil:
		return nil
	case !o.Degraded && 2*here >= members && metadata:
		missing.Advice += "; or mount without it, with -o degraded"
		return missing
	case !o.Degraded:
		return missing
	case 2*here < members:
		missing.Advice += fmt.Sprintf("; %d of %d drives are not half of them, which a degraded mount needs", here, members)
		return missing
	case !metadata:
		missing.Advice += fmt.Sprintf("; the metadata of epoch %d is on drives that are not here", newest.Epoch)
		return missing
	}
	return nil
}

func sameLayout(a, b *ondisk.Region) bool {
	x := *a
	x.Segments = b.Segments
	return x == *b
}

// checkEpochs refuses old copies among the drives that hold the newest epoch.
//
// An epoch is named in the labels of the metadata drives first, then in the others', and then in the superblock. So a
// drive behind the superblock is an old copy; a drive ahead of all metadata drives means that those are; and labels
// ahead of the superblock are a mount that died before its first checkpoint, or that lost a drive since the last.
func checkEpochs(list []candidate, metadata uint64, super *ondisk.Superblock) error {
	newestMeta := uint64(0)
	for _, c := range list {
		if metadata>>c.label.Index&1 != 0 && !c.stale {
			newestMeta = max(newestMeta, c.label.Epoch)
		}
	}
	for i := range list {
		c := &list[i]
		l := c.label
		switch {
		case c.stale:
		case l.Epoch < super.Epoch:
			return c.err(ErrStale, "it was last mounted in epoch %d and the volume is in epoch %d: it holds old data; "+
				"replace it with the drive that took part", l.Epoch, super.Epoch)
		case l.Epoch > newestMeta || l.Base > super.Epoch:
			return c.err(ErrStale,
				"the metadata drives are in epoch %d and this one has seen %d: the metadata drives are old copies",
				max(super.Epoch, newestMeta), max(l.Epoch, l.Base))
		case l.Epoch == super.Epoch && l.Nonce != super.Nonce:
			return c.err(ErrDiverged, "epoch %d was begun twice, apart from the other drives: the halves have diverged",
				l.Epoch)
		}
	}
	return nil
}

// claim begins a new epoch for the mount: its number and nonce are durable on all labels before anything is written
// under it. Drives that missed something do not hold it yet.
func (v *Volume) claim() error {
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	v.common.Epoch = max(v.common.Epoch, v.super.Epoch)
	if err := v.nextEpoch(); err != nil {
		return err
	}
	v.epoch, v.nonce = v.common.Epoch, v.common.Nonce
	return v.renewLabels(nil, func(l *ondisk.Label) { l.Base, l.Clean = v.super.Epoch, false })
}

// nextEpoch draws the next epoch, which the labels do not name yet. No superblock names it either, so the volume is not
// clean. Volume.labelMu.
func (v *Volume) nextEpoch() error {
	var nonce [8]byte
	if _, err := io.ReadFull(v.o.Random, nonce[:]); err != nil {
		return fmt.Errorf("%w: no random bytes for the epoch's nonce: %w", ErrFailed, err)
	}
	v.common.Predecessor = v.common.Nonce
	v.common.Nonce = binary.LittleEndian.Uint64(nonce[:]) | 1
	v.common.Epoch++
	v.common.Clean = false
	return nil
}

// renewLabels writes the labels of all drives in use anew: those of first, then those with metadata, then the others'.
// A drive that fails is lost, and what is left writes a new epoch. Volume.labelMu.
func (v *Volume) renewLabels(first []*member, change func(l *ondisk.Label)) error {
	change(&v.common)
	for {
		failed := v.writeLabels(first)
		for m, err := range failed {
			v.setLost(m, err)
		}
		if len(failed) == 0 {
			return nil
		}
		if len(v.metadataMembers()) == 0 {
			var err error
			for _, err = range failed {
			}
			err = fmt.Errorf("%w: labels: %w", ErrFailed, err)
			v.fail(err)
			return err
		}
		if err := v.nextEpoch(); err != nil {
			v.fail(err)
			return err
		}
	}
}

// writeLabels writes both copies on all drives in use, one copy durable before the other is touched. Volume.labelMu.
func (v *Volume) writeLabels(first []*member) (failed map[*member]error) {
	v.mu.Lock()
	members := v.members
	v.mu.Unlock()
	l := &v.common
	l.Sequence++
	l.Holders, l.Metadata = 0, 0
	groups := [3][]*member{slices.DeleteFunc(slices.Clone(first), (*member).lost)}
	for _, m := range members {
		if m.lost() {
			continue
		}
		if !m.stale {
			l.Holders |= 1 << m.index
		}
		if m.role {
			l.Metadata |= 1 << m.index
		}
		switch {
		case m.stale || slices.Contains(first, m):
		case m.role:
			groups[1] = append(groups[1], m)
		default:
			groups[2] = append(groups[2], m)
		}
	}
	failed = map[*member]error{}
	for _, group := range groups {
		for _, m := range group {
			m.label = v.labelOf(m)
		}
		for i, err := range eachMember(group, writeLabel) {
			if err != nil {
				failed[group[i]] = err
			}
		}
		if len(failed) > 0 {
			return failed
		}
	}
	return failed
}

// labelOf is the volume's label with what is a drive's own. Volume.labelMu.
func (v *Volume) labelOf(m *member) *ondisk.Label {
	l := v.common
	l.Drive, l.Index, l.Units, l.LBAShift = m.label.Drive, m.label.Index, m.label.Units, m.label.LBAShift
	l.Region.Segments = m.region.Segments
	l.Compat, l.ROCompat, l.Incompat = m.label.Compat, m.label.ROCompat, m.label.Incompat
	l.Extension = m.label.Extension
	return &l
}

// writeLabel writes one copy after the other. What changes from writing to writing lies in the first 512 bytes, so that
// a crash leaves each copy as it was or as it is to be, even if the other is damaged.
func writeLabel(m *member) error {
	for _, unit := range []uint64{0, m.label.Units - 1} {
		b := drive.AlignedBuffer(ondisk.BlockBytes)
		m.label.Unit = unit
		m.label.Encode(b)
		if err := m.writeAt(b, unit); err != nil {
			return err
		}
		if err := m.flush(); err != nil {
			return err
		}
	}
	return nil
}

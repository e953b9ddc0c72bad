package extentmap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

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
		case errors.Is(err, ondisk.ErrVersion) || errors.Is(err, ondisk.ErrFeature):
			named, problem = l, err
		case err != nil && !errors.Is(err, ondisk.ErrMagic):
			problem = firstError(problem, err)
		}
	}
	switch {
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
}

func (c *candidate) err(kind error, format string, args ...any) error {
	return &DriveError{Err: kind, Name: c.dev.Name(), Index: int(c.label.Index), UUID: c.label.Drive,
		Advice: fmt.Sprintf(format, args...)}
}

// checkMembers makes sure that the candidates are exactly the members of one volume, each whole and there once. It
// returns the newest label, whose member table counts.
func checkMembers(list []candidate, readOnly bool) (*ondisk.Label, error) {
	newest := list[0].label
	for i := range list {
		if list[i].label.Volume == newest.Volume && list[i].label.Sequence > newest.Sequence {
			newest = list[i].label
		}
	}
	var have [ondisk.MaxDrives]*candidate
	for i := range list {
		c := &list[i]
		m := &newest.Members[c.label.Index]
		switch {
		case c.label.Volume != newest.Volume:
			return nil, c.err(ErrForeign, "it belongs to volume %s (%q), not %s; leave it out",
				FormatUUID(c.label.Volume), c.label.Name, FormatUUID(newest.Volume))
		case m.State != ondisk.DriveActive || m.UUID != c.label.Drive:
			return nil, c.err(ErrForeign, "the volume's newest label no longer lists it; leave it out")
		case have[c.label.Index] != nil:
			return nil, c.err(ErrDuplicate,
				"%s carries the same UUID; leave the copy out, or move it out of the directory",
				have[c.label.Index].dev.Name())
		case uint64(c.dev.Size())/ondisk.BlockBytes < c.label.Units:
			return nil, c.err(ErrTruncated, "%d bytes, the label says %d; restore its size", c.dev.Size(),
				c.label.Units*ondisk.BlockBytes)
		case !readOnly && c.label.ROCompat&^ondisk.KnownROCompat != 0:
			return nil, c.err(ErrNewerFormat,
				"read-only-compatible features %#x are unknown; mount read-only or use a newer tuttifs",
				c.label.ROCompat&^ondisk.KnownROCompat)
		case !sameLayout(&c.label.Region, &newest.Region) || c.label.Width != newest.Width:
			return nil, c.err(ErrCorrupt, "its label and that of drive %d disagree about the layout; run tuttifs fsck",
				newest.Index)
		}
		have[c.label.Index] = c
	}
	for i := range newest.Members {
		if m := &newest.Members[i]; m.State == ondisk.DriveActive && have[i] == nil {
			return nil, &DriveError{Err: ErrMissing, Index: i, UUID: m.UUID,
				Advice: fmt.Sprintf("%d bytes, of volume %s (%q); attach it, or name its path",
					m.Units*ondisk.BlockBytes, FormatUUID(newest.Volume), newest.Name)}
		}
	}
	return newest, nil
}

func sameLayout(a, b *ondisk.Region) bool {
	x := *a
	x.Segments = b.Segments
	return x == *b
}

// checkEpochs refuses drives that missed a part of the volume's history.
//
// A mount names its epoch in the labels of the metadata drives first, then in the others', and then in the superblock.
// So a drive behind the superblock is stale; a drive ahead of all metadata drives means that those are; and labels
// ahead of the superblock are a mount that died before it had acknowledged anything.
func checkEpochs(list []candidate, metadata uint64, super *ondisk.Superblock) error {
	newestMeta := uint64(0)
	for _, c := range list {
		if metadata>>c.label.Index&1 != 0 {
			newestMeta = max(newestMeta, c.label.Epoch)
		}
	}
	for i := range list {
		c := &list[i]
		l := c.label
		switch {
		case l.Epoch < super.Epoch:
			return c.err(ErrStale, "it was last mounted in epoch %d and the volume is in epoch %d: it holds old data; "+
				"replace it with the drive that took part", l.Epoch, super.Epoch)
		case l.Epoch > newestMeta || l.Base > super.Epoch:
			return c.err(ErrStale,
				"the metadata drives are in epoch %d and this one has seen %d: the metadata drives are old copies",
				max(super.Epoch, newestMeta), max(l.Epoch, l.Base))
		case l.Epoch == super.Epoch && l.Nonce != super.Nonce:
			return c.err(ErrStale, "epoch %d was begun twice, apart from the other drives: the halves have diverged",
				l.Epoch)
		}
	}
	return nil
}

// claim begins a new epoch: its number and nonce are durable on all labels before anything is written under it.
func (v *Volume) claim() error {
	var nonce [8]byte
	if _, err := io.ReadFull(v.o.Random, nonce[:]); err != nil {
		return fmt.Errorf("extentmap: no random bytes for the epoch's nonce: %w", err)
	}
	v.nonce = binary.LittleEndian.Uint64(nonce[:]) | 1
	v.epoch = v.super.Epoch
	for _, m := range v.members {
		v.epoch = max(v.epoch, m.label.Epoch)
	}
	v.epoch++
	v.predecessor = v.super.Nonce
	return v.writeLabels(v.super.Epoch, false)
}

// writeLabels writes both copies on all drives, the metadata drives first: see checkEpochs. One copy is durable before
// the other is touched.
func (v *Volume) writeLabels(base uint64, clean bool) error {
	sequence := uint64(0)
	for _, m := range v.members {
		sequence = max(sequence, m.label.Sequence)
	}
	var others []*member
	for _, m := range v.members {
		if !m.role {
			others = append(others, m)
		}
		l := *m.label
		l.Epoch, l.Nonce, l.Predecessor = v.epoch, v.nonce, v.predecessor
		l.Base, l.Clean, l.Sequence = base, clean, sequence+1
		l.Holders = 0
		for _, h := range v.members {
			l.Holders |= 1 << h.index
		}
		m.label = &l
	}
	for _, group := range [][]*member{v.metadata, others} {
		if err := eachMember(group, writeLabel); err != nil {
			return fmt.Errorf("extentmap: label: %w", err)
		}
	}
	return nil
}

func writeLabel(m *member) error {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	for _, unit := range []uint64{0, m.label.Units - 1} {
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

package extentmap

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const (
	minSegmentBytes = 256 << 10
	minSegments     = 4 // of a drive
	maxSegmentBytes = 1 << 30
	minJournalBytes = 1 << 20 // by default
	leastJournal    = 64 << 10
	maxJournalBytes = 64 << 20
	// segmentsPerDrive is what the default segment size aims at.
	segmentsPerDrive = 16384
	// poolBudgetMin and poolBudgetMax bound the catalog's room for pools, families and tenants.
	poolBudgetMin = 256 << 10
	poolBudgetMax = 16 << 20
)

// FormatOptions of mkfs. Zero fields take defaults.
type FormatOptions struct {
	Label string
	UUID  [16]byte
	Width int // W; 4, or the number of drives if fewer
	// SegmentBytes is a power of two, 256 KiB to 1 GiB; by default the largest drive / 16384, rounded up.
	SegmentBytes uint64
	JournalBytes uint64 // by default the smallest drive / 256, 1..64 MiB
	Force        bool   // overwrite a known signature
	Now          func() time.Time
	Random       io.Reader // of UUIDs and nonces; crypto/rand if nil
}

// FormatPlan is what Format will do or did: printed by mkfs and `mkfs -n`.
type FormatPlan struct {
	UUID          [16]byte
	Label         string
	Width         int
	SegmentBytes  uint64
	JournalBytes  uint64
	MetadataBytes uint64 // per drive
	UsableBytes   uint64
	Drives        []DriveInfo

	region ondisk.Region // of a drive; Segments differs
}

func powerOfTwo(n uint64) bool { return n != 0 && n&(n-1) == 0 }

// ceilPowerOfTwo rounds up.
func ceilPowerOfTwo(n uint64) uint64 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len64(n-1)
}

// Plan computes the layout without writing.
func Plan(drives []drive.Drive, o FormatOptions) (*FormatPlan, error) {
	if err := checkFormat(drives, &o); err != nil {
		return nil, err
	}
	if !o.Force {
		for _, d := range drives {
			what, err := FindSignature(d)
			if err != nil {
				return nil, &DriveError{Err: ErrIO, Name: d.Name(), Index: -1, Advice: "cannot read the drive",
					Cause: err}
			}
			if what != "" {
				return nil, &DriveError{Err: ErrSignature, Name: d.Name(), Index: -1,
					Advice: fmt.Sprintf("it holds %s; use --force to overwrite it", what)}
			}
		}
	}
	p := &FormatPlan{UUID: o.UUID, Label: o.Label, Width: o.Width, SegmentBytes: o.SegmentBytes,
		JournalBytes: o.JournalBytes}
	if err := p.layOut(drives, &o); err != nil {
		return nil, err
	}
	return p, nil
}

// checkFormat refuses what cannot be formatted and fills in the defaults that need no layout.
func checkFormat(drives []drive.Drive, o *FormatOptions) error {
	if len(drives) == 0 || len(drives) > ondisk.MaxDrives {
		return fmt.Errorf("%w: %d drives; a volume has 1 to %d", ErrInvalid, len(drives), ondisk.MaxDrives)
	}
	for i, d := range drives {
		for _, e := range drives[:i] {
			if same, err := sameDrive(d, e); err != nil {
				return err
			} else if same {
				return &DriveError{Err: ErrDuplicate, Name: d.Name(), Index: -1,
					Advice: "given twice (also as " + e.Name() + ")"}
			}
		}
	}
	if o.Width == 0 {
		o.Width = min(4, len(drives))
	}
	if o.Width < 0 || o.Width > ondisk.MaxWidth {
		return fmt.Errorf("%w: width %d; 1 to %d", ErrInvalid, o.Width, ondisk.MaxWidth)
	}
	if len(o.Label) > ondisk.MaxNameBytes {
		return fmt.Errorf("%w: label of %d bytes; at most %d", ErrInvalid, len(o.Label), ondisk.MaxNameBytes)
	}
	for _, c := range []byte(o.Label) {
		if c < 0x20 || c == 0x7f || c == '/' {
			return fmt.Errorf("%w: label %q has a slash or control characters", ErrInvalid, o.Label)
		}
	}
	if o.SegmentBytes != 0 && (!powerOfTwo(o.SegmentBytes) || o.SegmentBytes < minSegmentBytes ||
		o.SegmentBytes > maxSegmentBytes) {
		return fmt.Errorf("%w: segment of %d bytes; a power of two, %d to %d", ErrInvalid, o.SegmentBytes,
			minSegmentBytes, maxSegmentBytes)
	}
	if o.JournalBytes != 0 && (o.JournalBytes%ondisk.BlockBytes != 0 || o.JournalBytes < leastJournal ||
		o.JournalBytes > 1<<30) {
		return fmt.Errorf("%w: journal of %d bytes; a multiple of 4096, %d to %d", ErrInvalid, o.JournalBytes,
			leastJournal, 1<<30)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Random == nil {
		o.Random = rand.Reader
	}
	return nil
}

// layOut computes the regions.
func (p *FormatPlan) layOut(drives []drive.Drive, o *FormatOptions) error {
	smallest, largest := uint64(1<<63), uint64(0)
	for _, d := range drives {
		smallest, largest = min(smallest, uint64(d.Size())), max(largest, uint64(d.Size()))
	}
	if p.SegmentBytes == 0 {
		p.SegmentBytes = min(max(ceilPowerOfTwo((largest+segmentsPerDrive-1)/segmentsPerDrive), minSegmentBytes),
			maxSegmentBytes)
	}
	if p.JournalBytes == 0 {
		p.JournalBytes = min(max(smallest/256&^(ondisk.BlockBytes-1), minJournalBytes), maxJournalBytes)
	}
	// The catalog has room for the most rows that the drives can hold, and for those of drives that are added later: as
	// many as a volume can have, each as large as the largest of these, as far as 1/128 of the smallest drive suffices.
	segments := uint64(0)
	for _, d := range drives {
		segments += uint64(d.Size()) / p.SegmentBytes
	}
	rowBytes := uint64(ondisk.RowEntrySize(p.Width))
	rows := segments / uint64(p.Width) * rowBytes
	later := ondisk.MaxDrives * (largest / p.SegmentBytes) / uint64(p.Width) * rowBytes
	rows = max(rows, min(later, smallest/128))
	budget := min(max(smallest/256, poolBudgetMin), poolBudgetMax)
	stream := rows + budget
	r := &p.region
	r.SuperblockUnit, r.JournalUnit = 1, 1+ondisk.SuperblockSlots
	r.JournalBlocks = p.JournalBytes / ondisk.BlockBytes
	r.CatalogUnit = r.JournalUnit + r.JournalBlocks
	r.CatalogBlocks = uint64(ondisk.StreamBlocks(int(stream)))
	r.SegmentUnits = uint32(p.SegmentBytes / ondisk.BlockBytes)
	su := uint64(r.SegmentUnits)
	r.SegmentUnit = (r.CatalogUnit + 2*r.CatalogBlocks + su - 1) / su * su
	p.MetadataBytes = (r.SegmentUnit + 1) * ondisk.BlockBytes
	for i, d := range drives {
		n := p.segmentsOf(d)
		if n < minSegments {
			need := (r.SegmentUnit+minSegments*su)*ondisk.BlockBytes + ondisk.BlockBytes
			return &DriveError{Err: ErrTooSmall, Name: d.Name(), Index: -1,
				Advice: fmt.Sprintf("%d bytes; with segments of %d bytes it needs at least %d", d.Size(),
					p.SegmentBytes, need)}
		}
		p.UsableBytes += n * p.SegmentBytes
		p.Drives = append(p.Drives, DriveInfo{
			Index: uint16(i), Name: d.Name(), Kind: d.Kind(), Bytes: uint64(d.Size()), LBABytes: d.LBABytes(),
			Direct: d.Direct(), Mapped: len(d.Bytes()) > 0, Metadata: i < metadataDrives,
			Segments: uint32(n), FreeSegments: uint32(n),
		})
	}
	return nil
}

// metadataDrives is how many drives hold the metadata role, where there are as many.
const metadataDrives = 2

func (p *FormatPlan) segmentsOf(d drive.Drive) uint64 {
	return uint64(segmentsOf(&p.region, uint64(d.Size())/ondisk.BlockBytes))
}

// segmentsOf is how many segments a drive of so many units has.
func segmentsOf(r *ondisk.Region, units uint64) uint32 {
	end := units - 1 // the last unit is the label's second copy
	if units == 0 || end <= r.SegmentUnit {
		return 0
	}
	return uint32(min((end-r.SegmentUnit)/uint64(r.SegmentUnits), ondisk.MaxSegments))
}

// Format writes labels, superblocks, an empty journal and catalog to the drives, and flushes.
func Format(drives []drive.Drive, o FormatOptions) (*FormatPlan, error) {
	p, err := Plan(drives, o)
	if err != nil {
		return nil, err
	}
	if err := checkFormat(drives, &o); err != nil {
		return nil, err
	}
	labels, err := p.newLabels(drives, &o)
	if err != nil {
		return nil, err
	}
	for i, d := range drives {
		if err := p.formatDrive(d, labels[i], o.Now()); err != nil {
			return nil, &DriveError{Err: ErrIO, Name: d.Name(), Index: i, UUID: labels[i].Drive,
				Advice: "cannot format", Cause: err}
		}
	}
	return p, nil
}

// newLabels draws the UUIDs and fills in each drive's label.
func (p *FormatPlan) newLabels(drives []drive.Drive, o *FormatOptions) ([]*ondisk.Label, error) {
	var err error
	draw := func(set [16]byte) [16]byte {
		for set == ([16]byte{}) && err == nil {
			_, err = io.ReadFull(o.Random, set[:])
			set[6], set[8] = set[6]&0x0f|0x40, set[8]&0x3f|0x80 // RFC 9562, version 4
		}
		return set
	}
	p.UUID = draw(p.UUID)
	l := ondisk.Label{
		Version: ondisk.Version, Volume: p.UUID, Width: uint16(p.Width), Clean: true,
		Region: p.region, Epoch: 1, Sequence: 1, Base: 1, CreationTime: o.Now().UnixNano(), Name: p.Label,
	}
	for i, d := range drives {
		p.Drives[i].UUID = draw([16]byte{})
		l.Members[i] = ondisk.Member{UUID: p.Drives[i].UUID, State: ondisk.DriveActive,
			Units: uint64(d.Size()) / ondisk.BlockBytes}
		l.Holders |= 1 << i
		if i < metadataDrives {
			l.Metadata |= 1 << i
		}
	}
	var nonce [8]byte
	if _, e := io.ReadFull(o.Random, nonce[:]); e != nil || err != nil {
		return nil, fmt.Errorf("extentmap: no random bytes for UUIDs: %w", firstError(err, e))
	}
	l.Nonce = binary.LittleEndian.Uint64(nonce[:]) | 1
	labels := make([]*ondisk.Label, len(drives))
	for i, d := range drives {
		c := l
		c.Drive, c.Index, c.Units = l.Members[i].UUID, uint16(i), l.Members[i].Units
		c.LBAShift = uint8(bits.TrailingZeros(uint(d.LBABytes())))
		c.Region.Segments = uint32(p.segmentsOf(d))
		labels[i] = &c
	}
	return labels, nil
}

// formatDrive first makes the drive unrecognisable, then writes everything but the labels, and the labels last, so
// that a drive whose formatting was cut off is never taken for a member.
func (p *FormatPlan) formatDrive(d drive.Drive, l *ondisk.Label, now time.Time) error {
	const block = ondisk.BlockBytes
	r := &l.Region
	if err := clearDrive(d, r); err != nil {
		return err
	}
	sb := ondisk.Superblock{Sequence: 2, Volume: l.Volume, Epoch: l.Epoch, Nonce: l.Nonce, NextCommit: 1,
		Time: now.UnixNano(), JournalNonce: l.Nonce}
	sb.Unit = r.SuperblockUnit + sb.Sequence%ondisk.SuperblockSlots
	b := drive.AlignedBuffer(block)
	sb.Encode(b)
	if l.Metadata>>l.Index&1 != 0 {
		if err := d.WriteAt(b, int64(sb.Unit)*block); err != nil {
			return err
		}
	}
	if err := d.Flush(); err != nil {
		return err
	}
	for _, unit := range []uint64{0, l.Units - 1} {
		c := *l
		c.Unit = unit
		c.Encode(b)
		if err := d.WriteAt(b, int64(unit)*block); err != nil {
			return err
		}
	}
	return d.Flush()
}

// wipeLabels makes a drive unrecognisable.
func wipeLabels(d drive.Drive) error {
	const block = ondisk.BlockBytes
	err := d.WriteZeroes(0, block)
	if err == nil {
		err = d.WriteZeroes(d.Size()/block*block-block, block)
	}
	if err == nil {
		err = d.Flush()
	}
	return err
}

// clearDrive empties a drive up to the first segment: also of what another filesystem left there.
func clearDrive(d drive.Drive, r *ondisk.Region) error {
	if err := wipeLabels(d); err != nil {
		return err
	}
	return d.WriteZeroes(ondisk.BlockBytes, int64(r.SegmentUnit-1)*ondisk.BlockBytes)
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

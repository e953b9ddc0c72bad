package check

import (
	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// journalBytesMax bounds the journal that is believed.
const journalBytesMax = 1 << 30

// checkJournal replays the journal into memory and compares its copies.
func (c *checker) checkJournal() error {
	defer c.checkClaims() // of the catalog's rows and the journal's
	r, s := &c.label.Region, c.super
	if r.JournalBlocks > journalBytesMax/ondisk.BlockBytes {
		c.volume(errorf("journal", "", "not checked: the label says that it has %d blocks", r.JournalBlocks))
		return nil
	}
	j := ondisk.Journal{First: r.JournalUnit, Blocks: r.JournalBlocks, Tag: c.tag, Nonce: s.Nonce}
	members := c.metadata()
	rings := make([][]byte, len(members))
	for i, m := range members {
		b := drive.AlignedBuffer(int(r.JournalBlocks) * ondisk.BlockBytes)
		defer drive.FreeBuffer(b)
		if c.readRing(m, b, j.First) {
			rings[i] = b
		}
		if err := c.ctx.Err(); err != nil {
			return err
		}
	}
	var batches []uint64
	scan, err := j.Replay(rings, s.Tail, s.Chain, func(sequence uint64, b []byte) error {
		batches = append(batches, sequence)
		if err := ondisk.VisitEntries(b, &entries{c: c, from: "journal"}); err != nil {
			c.volume(errorf("journal", "report this as a defect: the checksum is right", "block %d: %v", sequence,
				err))
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.result.Transactions = uint64(len(batches))
	if scan.Damaged {
		c.volume(errorf("journal", "files committed last are lost; save what is needed and format the volume anew",
			"block %d (unit %d) is whole on no metadata drive, and batches follow it", scan.Head, j.Unit(scan.Head)))
	}
	if c.label.Clean && len(batches) > 0 {
		c.volume(errorf("journal", "mount and unmount the volume",
			"%d batches after the last checkpoint of a volume that was unmounted",
			len(batches)))
	} else if len(batches) > 0 {
		c.volume(notef("journal", "", "%d batches are not yet in the record tables; they are taken into account",
			len(batches)))
	}
	c.compareRings(&j, members, rings, batches, scan.Head)
	return nil
}

// readRing reads a drive's journal block range by range: what cannot be read stays zero, which no journal block is.
func (c *checker) readRing(m *member, b []byte, first uint64) bool {
	const step = readBlocks * ondisk.BlockBytes
	some := false
	for at := 0; at < len(b); at += step {
		unit := first + uint64(at/ondisk.BlockBytes)
		if err := read(m, b[at:min(at+step, len(b))], unit); err != nil {
			c.at(m, unit, errorf("journal", "replace the drive", "cannot be read: %v", err))
			continue
		}
		some = true
	}
	return some
}

// compareRings replays each copy alone. All must hold every batch but the last, which may have been in writing.
func (c *checker) compareRings(j *ondisk.Journal, members []*member, rings [][]byte, batches []uint64, head uint64) {
	const advice = "another copy is whole; mount and unmount the volume to start the journal anew"
	for i, ring := range rings {
		if ring == nil {
			continue
		}
		scan, err := j.Replay([][]byte{ring}, c.super.Tail, c.super.Chain, func(uint64, []byte) error { return nil })
		if err != nil || scan.Head == head {
			continue
		}
		last := batches[len(batches)-1] // head is beyond scan.Head, so there is one
		p := errorf("journal", advice, "this copy ends at block %d, the other at %d", scan.Head, head)
		if scan.Head == last {
			p = c.tornOr(p)
		}
		c.at(members[i], j.Unit(scan.Head), p)
	}
}

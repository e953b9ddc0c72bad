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
	j := ondisk.Journal{First: r.JournalUnit, Blocks: r.JournalBlocks, Tag: c.tag, Nonce: s.JournalNonce}
	var members []*member
	for _, m := range c.metadata() {
		if !m.behind {
			members = append(members, m)
		}
	}
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
	batches, scan, gap, err := c.replay(&j, rings, s.Tail, s.Chain)
	if err != nil {
		return err
	}
	if c.noSlot && !gap {
		if batches, scan, gap, err = c.replayLater(j, rings, batches, scan); err != nil {
			return err
		}
	}
	c.head = scan.Head
	c.result.Transactions = uint64(len(batches))
	if c.label.Clean && len(batches) > 0 {
		c.volume(errorf("journal", "mount and unmount the volume",
			"%d batches after the last checkpoint of a volume that was unmounted", len(batches)).
			safe("they are brought into the record tables"))
	} else if len(batches) > 0 {
		c.volume(notef("journal", "", "%d batches are not yet in the record tables; they are taken into account",
			len(batches)))
	}
	if !gap {
		c.compareRings(&j, members, rings, batches, scan.Head)
	}
	return nil
}

// replay brings the journal's batches into memory. Where one is damaged on all drives and later ones are whole, those
// count if the repair is asked for: an entry says what a slot is, and not how it changed.
func (c *checker) replay(j *ondisk.Journal, rings [][]byte, tail uint64, chain uint32) (
	batches []uint64, scan ondisk.Scan, gap bool, err error) {
	for {
		scan, err = j.Replay(rings, tail, chain, func(sequence uint64, b []byte) error {
			batches = append(batches, sequence)
			if err := ondisk.VisitEntries(b, &entries{c: c, from: "journal"}); err != nil {
				c.must(c.volume(errorf("journal", "report this as a defect: the checksum is right",
					"block %d: %v", sequence, err).ask("the rest of its batch is left out")),
					"the journal cannot be read to its end")
			}
			return nil
		})
		if err != nil || !scan.Damaged {
			return batches, scan, gap, err
		}
		gap = true
		if !c.must(c.volume(errorf("journal", "files committed last are lost; have it repaired",
			"block %d (unit %d) is whole on no metadata drive, and batches follow it", scan.Head, j.Unit(scan.Head)).
			ask("its batch is given up, and those that follow count")), "batches of the journal are lost") {
			return batches, scan, gap, nil
		}
		if tail, chain = c.nextBatch(j, rings, scan.Head); tail == scan.Head {
			return batches, scan, gap, nil // a later block is whole, and its batch is not
		}
	}
}

// replayLater goes on with what a later mount wrote, whose first superblock is the one that is lost: its blocks carry
// another nonce, and follow in number and chain.
func (c *checker) replayLater(j ondisk.Journal, rings [][]byte, batches []uint64, scan ondisk.Scan) (
	[]uint64, ondisk.Scan, bool, error) {
	off := scan.Head % j.Blocks * ondisk.BlockBytes
	for _, ring := range rings {
		if ring == nil {
			continue
		}
		b := ring[off : off+ondisk.BlockBytes]
		j.Nonce = ondisk.JournalNonce(b)
		at, _, err := j.Open(b, scan.Head)
		if err != nil || at.Chain != scan.Chain || j.Nonce == c.super.JournalNonce {
			continue
		}
		if !c.must(c.volume(errorf("journal", "files committed last are lost; have it repaired",
			"batches of a later mount follow at block %d, and its superblock is lost", scan.Head).
			ask("they count")), "it is not known whether batches of a later mount count") {
			break
		}
		later, end, _, err := c.replay(&j, rings, scan.Head, scan.Chain)
		return append(batches, later...), end, true, err
	}
	return batches, scan, false, nil
}

// nextBatch is where a batch begins behind a damaged one, and the chain that its first block has; head if none does.
func (c *checker) nextBatch(j *ondisk.Journal, rings [][]byte, head uint64) (tail uint64, chain uint32) {
	for s := head + 1; s-c.super.Tail < j.Blocks; s++ {
		for _, ring := range rings {
			off := s % j.Blocks * ondisk.BlockBytes
			if ring == nil {
				continue
			}
			if at, _, err := j.Open(ring[off:off+ondisk.BlockBytes], s); err == nil && at.Index == 0 {
				return s, at.Chain
			}
		}
	}
	return head, 0
}

// extent is a range of a drive's units.
type extent struct {
	m     *member
	first uint64
	units uint64
}

// readRing reads a drive's journal: what cannot be read stays zero, which no journal block is.
func (c *checker) readRing(m *member, b []byte, first uint64) (some bool) {
	for at := 0; at < len(b); {
		n := min(readBlocks*ondisk.BlockBytes, len(b)-at)
		unit := first + uint64(at/ondisk.BlockBytes)
		if read(m, b[at:at+n], unit) == nil {
			some = true
		} else {
			some = c.readRingBlocks(m, b[at:at+n], unit) || some
		}
		at += n
	}
	return some
}

// readRingBlocks reads block by block, and reports each run that cannot be read.
func (c *checker) readRingBlocks(m *member, b []byte, first uint64) (some bool) {
	bad := extent{m: m}
	end := func() {
		if bad.units == 0 {
			return
		}
		c.at(m, bad.first, errorf("journal", "replace the drive", "%d blocks cannot be read", bad.units).
			safe("the journal is begun anew"))
		c.unreadable = append(c.unreadable, bad)
		bad.units = 0
	}
	for off := 0; off < len(b); off += ondisk.BlockBytes {
		block, unit := b[off:off+ondisk.BlockBytes], first+uint64(off/ondisk.BlockBytes)
		if read(m, block, unit) == nil {
			some = true
			end()
			continue
		}
		clear(block)
		if bad.units++; bad.units == 1 {
			bad.first = unit
		}
	}
	end()
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
		p := errorf("journal", advice, "this copy ends at block %d, the other at %d", scan.Head, head).
			safe("its batches are brought into the record tables, and the journal is begun anew")
		if scan.Head == last {
			p = c.tornOr(p)
		}
		c.at(members[i], j.Unit(scan.Head), p)
	}
}

package check

import (
	"encoding/binary"
	"fmt"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

const adviceLost = "restore the metadata drives from a copy, have it repaired, or format the volume anew"

// salvageCatalog goes on with a part of a catalog that is not whole on any drive: the entries before the damage, or all
// of the catalog before, which lies in the other area until it is needed. Whichever knows more. Rows that only the lost
// one knew are given up with their files; a row that was dropped since holds records whose payloads no longer verify.
func (c *checker) salvageCatalog(prefix []byte, p problem) error {
	former := c.formerCatalog()
	have, kept := prefix, tally(prefix)
	source := "the entries before it"
	if n := tally(former); n > kept {
		have, kept, source = former, n, "the catalog before this one"
	}
	if kept == 0 {
		source = "nothing"
	}
	fix := fmt.Sprintf("%s (%d pools and rows) is kept, and all that is not in it given up", source, kept)
	if !c.must(c.volume(p.ask(fix)), "the catalog is lost") {
		return nil
	}
	// The end may be in the middle of an entry.
	_ = ondisk.VisitEntries(have, &entries{c: c, from: "catalog"})
	return nil
}

// tally counts the pools and rows of a stream up to where it cannot be read.
func tally(stream []byte) int {
	var n counter
	_ = ondisk.VisitEntries(stream, &n) // what was counted before an error counts
	return int(n)
}

type counter int

func (n *counter) Pool(*ondisk.Pool) error     { *n++; return nil }
func (n *counter) Row(*ondisk.Row) error       { *n++; return nil }
func (n *counter) Limits(*ondisk.Limits) error { return nil }
func (n *counter) Family(*ondisk.Family) error { return nil }
func (n *counter) Tenant(*ondisk.Tenant) error { return nil }
func (n *counter) DropRow(ondisk.DropRow) error {
	return nil
}
func (n *counter) Put(ondisk.Put) error   { return nil }
func (n *counter) Free(ondisk.Free) error { return nil }

// formerCatalog reads what the area holds that the superblock does not name: whole, or nil.
func (c *checker) formerCatalog() []byte {
	r := &c.label.Region
	first := r.CatalogUnit + uint64(c.super.CatalogArea^1)*r.CatalogBlocks
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	for _, m := range c.metadata() {
		if m.behind || read(m, b, first) != nil {
			continue
		}
		sequence := binary.LittleEndian.Uint64(b[sequenceOff:])
		var stream []byte
		for i := uint32(0); uint64(i) < r.CatalogBlocks; i++ {
			p := c.formerBlock(b, first, i, sequence)
			if p == nil {
				break
			}
			stream = append(stream, p...)
			if len(p) < ondisk.PayloadBytes {
				break
			}
		}
		var n counter
		if len(stream) > 0 && ondisk.VisitEntries(stream, &n) == nil {
			return stream
		}
	}
	return nil
}

// sequenceOff is where a block's header has the sequence.
const sequenceOff = 24

// formerBlock is the payload of a block of a catalog, from whichever drive has it; it aliases b.
func (c *checker) formerBlock(b []byte, first uint64, i uint32, sequence uint64) []byte {
	for _, m := range c.metadata() {
		if m.behind || read(m, b, first+uint64(i)) != nil {
			continue
		}
		if p, err := ondisk.OpenCatalog(b, first, i, c.tag, sequence); err == nil {
			return p
		}
	}
	return nil
}

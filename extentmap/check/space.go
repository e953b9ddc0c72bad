package check

import (
	"cmp"
	"fmt"
	"slices"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// claim is a range of a drive's units and who has it.
type claim struct {
	first, units uint64
	row          *row
	table        bool
}

func (k *claim) String() string {
	what := "data"
	if k.table {
		what = "record table"
	}
	return fmt.Sprintf("%s of row %d of pool %d (units %d to %d)", what, k.row.Number, k.row.Row.Pool, k.first,
		k.first+k.units-1)
}

// claimRow checks that what a row is given exists on its drives, and notes it for checkClaims. It says whether the row
// can stay.
func (c *checker) claimRow(r *row) bool {
	q := r.pool
	name := fmt.Sprintf("row %d of pool %d", r.Number, r.Row.Pool)
	for i, l := range r.Entries {
		k := claim{first: l.Unit(), units: q.entryUnits(c.label), row: r}
		if c.claim(l.Drive(), k, k.units, fmt.Sprintf("%s: entry %d", name, i)) {
			return false
		}
	}
	for i, l := range r.Tables {
		if l == ondisk.NoLocator {
			c.volume(warningf("row", "the next checkpoint with room elsewhere writes it",
				"row %d of pool %d: record table %d has no place", r.Number, r.Row.Pool, i))
			continue
		}
		k := claim{first: l.Unit(), units: uint64(q.tableBlocks), row: r, table: true}
		if c.claim(l.Drive(), k, 1, fmt.Sprintf("%s: record table %d", name, i)) {
			return false
		}
	}
	if r.Tables[0] == ondisk.NoLocator || r.Tables[1] == ondisk.NoLocator ||
		r.Tables[0].Drive() != r.Tables[1].Drive() {
		return true
	}
	if r.Tables[0] == r.Tables[1] {
		return !c.badRow(nil, NoBlock, "%s: both record tables are on drive %d, in one place", name,
			r.Tables[0].Drive())
	}
	if c.label.Metadata&(c.label.Metadata-1) != 0 {
		// As it is after other drives were lost, until a checkpoint finds room on one that came back.
		c.volume(warningf("row", "the next checkpoint with room elsewhere moves one",
			"%s: both record tables are on drive %d", name, r.Tables[0].Drive()))
	}
	return true
}

// badRow reports a row that cannot be as it is. It says whether it is given up.
func (c *checker) badRow(m *member, unit uint64, format string, args ...any) bool {
	p := errorf("row", adviceEntry, format, args...).ask("the row is given up with its files")
	accepted := false
	if m == nil {
		accepted = c.volume(p)
	} else {
		accepted = c.at(m, unit, p)
	}
	return c.must(accepted, "rows have space that they cannot have")
}

// claim notes one range. align is what its distance from the first segment must be a multiple of. It says whether the
// row is given up.
func (c *checker) claim(index uint16, k claim, align uint64, what string) bool {
	if int(index) >= len(c.label.Members) || c.label.Members[index].State != ondisk.DriveActive {
		return c.badRow(nil, NoBlock, "%s is on drive %d, which is no member", what, index)
	}
	m := c.members[index]
	if m == nil {
		return false // missing drives were reported
	}
	r := &m.label.Region
	segment := uint64(r.SegmentUnits)
	end := r.SegmentUnit + uint64(r.Segments)*segment
	bad := false
	switch {
	case k.first < r.SegmentUnit || k.units > end || k.first > end-k.units:
		return c.badRow(m, k.first, "%s of %d units lies outside the segments (units %d to %d)", what, k.units,
			r.SegmentUnit, end-1)
	case (k.first-r.SegmentUnit)%align != 0:
		bad = c.badRow(m, k.first, "%s is not aligned to %d units", what, align)
	case k.table && (k.first-r.SegmentUnit)%segment+k.units > segment:
		bad = c.badRow(m, k.first, "%s crosses the end of its segment", what)
	}
	if !bad {
		m.claims = append(m.claims, k)
	}
	return bad
}

// checkClaims reports space that two rows have.
func (c *checker) checkClaims() {
	for _, m := range c.members {
		if m == nil {
			continue
		}
		slices.SortFunc(m.claims, func(a, b claim) int {
			return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.units, b.units))
		})
		said := make(map[[2]*row]bool)
		for c.overlaps(m, said) { // again without the row that was given up
		}
		m.claims = nil
	}
}

// overlaps compares neighbours, and ends with true when a row was given up.
func (c *checker) overlaps(m *member, said map[[2]*row]bool) bool {
	var far *claim // of those before, the one that reaches furthest
	for i := range m.claims {
		b := &m.claims[i]
		if b.row.gone {
			continue
		}
		if far != nil && far.first+far.units > b.first && !said[[2]*row{far.row, b.row}] {
			said[[2]*row{far.row, b.row}] = true
			if c.badRow(m, b.first, "%v overlaps %v", far, b) {
				c.dropRow(c.loser(far.row, b.row))
				return true
			}
		}
		if far == nil || b.first+b.units > far.first+far.units {
			far = b
		}
	}
	return false
}

// loser is which of two rows with the same space is given up: the one that the journal dropped, or the catalog's where
// the journal has a newer one, or the one whose record table is not there, or else the second.
func (c *checker) loser(a, b *row) *row {
	switch {
	case a == b || a.given != b.given && b.given:
		return b
	case a.given || b.fresh && !a.fresh:
		return a
	case b.fresh == a.fresh && !a.fresh && !c.anyTable(a) && c.anyTable(b):
		return a
	}
	return b
}

// anyTable says whether some block of a row's record table is where it should be.
func (c *checker) anyTable(r *row) bool {
	b := drive.AlignedBuffer(ondisk.BlockBytes)
	defer drive.FreeBuffer(b)
	for _, at := range r.Tables {
		m := c.member(at.Drive())
		for i := uint64(0); m != nil && i < uint64(r.pool.tableBlocks); i++ {
			if read(m, b, at.Unit()+i) == nil && c.openTable(r, b, ondisk.Locate(at.Drive(), at.Unit()+i),
				uint32(i), nil) == nil {
				return true
			}
		}
	}
	return false
}

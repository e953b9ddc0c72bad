package check

import (
	"cmp"
	"fmt"
	"slices"

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

// claimRow checks that what a row is given exists on its drives, and notes it for checkClaims.
func (c *checker) claimRow(r *row) {
	q := r.pool
	for i, l := range r.Entries {
		k := claim{first: l.Unit(), units: q.entryUnits(c.label), row: r}
		c.claim(l.Drive(), k, k.units, fmt.Sprintf("entry %d", i))
	}
	for i, l := range r.Tables {
		k := claim{first: l.Unit(), units: uint64(q.tableBlocks), row: r, table: true}
		c.claim(l.Drive(), k, 1, fmt.Sprintf("record table %d", i))
	}
	if c.label.Metadata&(c.label.Metadata-1) != 0 && r.Tables[0].Drive() == r.Tables[1].Drive() {
		c.volume(errorf("row", adviceRow, "row %d of pool %d: both record tables are on drive %d", r.Number,
			r.Row.Pool, r.Tables[0].Drive()))
	}
}

const adviceRow = "mount it read-only, save what is needed, and format it anew"

// claim notes one range. align is what its distance from the first segment must be a multiple of.
func (c *checker) claim(index uint16, k claim, align uint64, what string) {
	name := fmt.Sprintf("row %d of pool %d: %s", k.row.Number, k.row.Row.Pool, what)
	if int(index) >= len(c.label.Members) || c.label.Members[index].State != ondisk.DriveActive {
		c.volume(errorf("row", adviceRow, "%s is on drive %d, which is no member", name, index))
		return
	}
	m := c.members[index]
	if m == nil {
		return // missing drives were reported
	}
	r := &m.label.Region
	segment := uint64(r.SegmentUnits)
	end := r.SegmentUnit + uint64(r.Segments)*segment
	switch {
	case k.first < r.SegmentUnit || k.units > end || k.first > end-k.units:
		c.at(m, k.first, errorf("row", adviceRow, "%s of %d units lies outside the segments (units %d to %d)",
			name, k.units,
			r.SegmentUnit, end-1))
		return
	case (k.first-r.SegmentUnit)%align != 0:
		c.at(m, k.first, errorf("row", adviceRow, "%s is not aligned to %d units", name, align))
	case k.table && (k.first-r.SegmentUnit)%segment+k.units > segment:
		c.at(m, k.first, errorf("row", adviceRow, "%s crosses the end of its segment", name))
	}
	m.claims = append(m.claims, k)
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
		for i := 1; i < len(m.claims); i++ {
			a, b := &m.claims[i-1], &m.claims[i]
			if a.first+a.units > b.first {
				c.at(m, b.first, errorf("row", adviceRow, "%v overlaps %v", a, b))
			}
			if a.first+a.units > b.first+b.units { // keep the one that reaches further for the next comparison
				*b = claim{first: b.first, units: a.first + a.units - b.first, row: a.row, table: a.table}
			}
		}
		m.claims = nil
	}
}

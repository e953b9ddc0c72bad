package drive

// Range is a part of a drive, in bytes.
type Range struct{ Off, N int64 }

// rangeDiscarder is a drive that takes many ranges in one command.
type rangeDiscarder interface {
	DiscardMost() int
	DiscardRanges(ranges []Range) (commands int, err error)
}

// DiscardMost is how many ranges one command of the drive may be about: at least 1.
func DiscardMost(d Drive) int {
	if r, ok := d.(rangeDiscarder); ok {
		return r.DiscardMost()
	}
	return 1
}

// DiscardRanges is Discard of many ranges, and says in how many commands it went: one for DiscardMost of them, or
// several where the drive limits their bytes too. After an error some of them may have been discarded.
func DiscardRanges(d Drive, ranges []Range) (commands int, err error) {
	if r, ok := d.(rangeDiscarder); ok {
		return r.DiscardRanges(ranges)
	}
	for _, r := range ranges {
		commands++
		if err := d.Discard(r.Off, r.N); err != nil {
			return commands, err
		}
	}
	return commands, nil
}

package drive

// Range is a part of a drive, in bytes.
type Range struct{ Off, N int64 }

// DiscardRangesMax is the most ranges of one command (Dataset Management).
const DiscardRangesMax = 256

// rangeDiscarder is a drive that takes many ranges in one command.
type rangeDiscarder interface {
	DiscardRanges(ranges []Range) (commands int, err error)
}

// DiscardRanges is Discard of up to DiscardRangesMax ranges, and says in how many commands it went. After an error some
// of them may have been discarded.
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

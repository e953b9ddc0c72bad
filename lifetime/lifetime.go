// Package lifetime says how long bytes are expected to stay on a drive, so that drives which can (NVMe Flexible Data
// Placement) keep apart on the flash what goes at different times.
package lifetime

// Class is an expectation. The zero value is that of KV of which nothing more is known.
type Class uint8

const (
	// Normal is KV that goes when it has not been used for long.
	Normal Class = iota
	// Metadata is overwritten in place, again and again: journal, record tables, catalog, labels.
	Metadata
	// Short is KV that goes before other KV of its age.
	Short
	// Long is KV that outlives what was stored after it.
	Long
	// Classes is how many there are.
	Classes
)

var names = [Classes]string{"normal", "metadata", "short", "long"}

// known is the class, or Normal for what is none.
func (c Class) known() Class {
	if c < Classes {
		return c
	}
	return Normal
}

// String names the class.
func (c Class) String() string { return names[c.known()] }

// handles has, for a namespace of 1 to 4 placement handles, the one of each class. Normal is always the first, where
// also goes what is written without a directive. Where there are fewer handles than classes, what goes soon shares one,
// because metadata are few bytes, and then what stays.
var handles = [Classes][Classes]uint8{
	{0, 0, 0, 0},
	{0, 1, 1, 0},
	{0, 1, 1, 2},
	{0, 1, 2, 3},
}

// Handle is the placement handle of the class, of n that a namespace has.
func (c Class) Handle(n int) int {
	return int(handles[min(max(n, 1), int(Classes))-1][c.known()])
}

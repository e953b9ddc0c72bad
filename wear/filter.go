package wear

import (
	"fmt"
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// FilterBytes is the default size of a Filter: it remembers some two million keys.
	FilterBytes = 4 << 20
	// FilterBytesMin and FilterBytesMax bound it.
	FilterBytesMin = 64 << 10
	FilterBytesMax = 1 << 30
	// lineBytes is a cache line: what one key costs to look up.
	lineBytes = 64
	lineKeys  = lineBytes / 2
	// FilterFalse is how often a key that was never added is taken for one that was, at most: one of the 32 fingerprints
	// of its line is its own by chance.
	FilterFalse = float64(lineKeys) / (1 << fingerprintBits)

	fingerprintBits = 14
	// TouchesMax is as far as a Filter counts.
	TouchesMax = 3
)

// filterLine holds the last keys that fell on it, the newest first: a fingerprint above, how often it was added in
// the two lowest bits; 0 is none.
type filterLine [lineKeys]uint16

// Filter remembers keys by 16 bits each, and how often they were added, up to TouchesMax. A key is forgotten when 32
// others of its line were added after it, so a filter of n bytes remembers about the last n/2 keys. It never forgets
// earlier than that: no key among the last 32 of its line is missed. Not safe for concurrent use.
type Filter struct {
	lines []filterLine
	shift int
	raw   []byte
}

// NewFilter makes a filter of a size in bytes, rounded up to a power of two.
func NewFilter(size int) (*Filter, error) {
	if size < FilterBytesMin || size > FilterBytesMax {
		return nil, fmt.Errorf("%w: a filter of %d bytes: from %d to %d are possible", ErrInvalid, size, FilterBytesMin,
			FilterBytesMax)
	}
	size = 1 << bits.Len(uint(size-1))
	raw, err := anonymous(size)
	if err != nil {
		return nil, err
	}
	n := size / lineBytes
	return &Filter{unsafe.Slice((*filterLine)(unsafe.Pointer(&raw[0])), n), 64 - bits.Len(uint(n-1)), raw}, nil
}

// anonymous is zeroed memory that the garbage collector does not see.
func anonymous(size int) ([]byte, error) {
	raw, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("wear: %d bytes of memory: %w", size, err)
	}
	return raw, nil
}

// Close gives the memory back.
func (f *Filter) Close() error {
	raw := f.raw
	f.raw, f.lines = nil, nil
	if raw == nil {
		return nil
	}
	return unix.Munmap(raw)
}

// find is a key's line and its place in there, or lineKeys. Line and fingerprint are of different bits of the hash.
func (f *Filter) find(hash uint64) (l *filterLine, at int) {
	l = &f.lines[hash>>f.shift]
	fingerprint := uint16(hash) &^ TouchesMax
	for i, have := range l {
		if have&^TouchesMax == fingerprint && have&TouchesMax != 0 {
			return l, i
		}
	}
	return l, lineKeys
}

// Touches is how often a key was added lately, by its hash: 0 to TouchesMax.
func (f *Filter) Touches(hash uint64) int {
	l, at := f.find(hash)
	if at == lineKeys {
		return 0
	}
	return int(l[at] & TouchesMax)
}

// Add counts a key, and makes it the newest of its line.
func (f *Filter) Add(hash uint64) {
	l, at := f.find(hash)
	entry := uint16(hash)&^TouchesMax | 1
	if at < lineKeys {
		entry = l[at]&^TouchesMax | min(l[at]&TouchesMax+1, TouchesMax)
	} else {
		at--
	}
	copy(l[1:at+1], l[:at])
	l[0] = entry
}

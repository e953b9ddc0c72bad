package slack

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"
)

// ErrTable: a table that no model on any machine can have, or a file that is none.
var ErrTable = errors.New("slack: table")

// Version is the version of the file that this program reads and writes.
const Version = 1

// Bounds of a table. LengthMax * WindowMax stays below 2^60, so interpolation is exact in int64.
const (
	LengthsMax = 64               // of either axis
	LengthMax  = 1 << 24          // tokens
	WindowMax  = 60 * time.Second // of one layer
	WindowMin  = time.Microsecond // shorter is a wrong unit
	DrivesMax  = 64
	GridsMax   = 16
)

// Source says where the windows come from.
type Source string

// Measured windows are layer times of a GPU; estimated ones come from the model's shape.
const (
	Measured  Source = "measured"
	Estimated Source = "estimated"
)

// Table has the windows of one model on one machine. It does not change; any number of threads may look up.
type Table struct {
	Version          int         `json:"table_version"`
	Fingerprint      Fingerprint `json:"fingerprint"`
	Source           Source      `json:"source"`
	MeasuringSeconds float64     `json:"measuring_seconds"` // what the measurement took, 0 where it did not say
	MakingSeconds    float64     `json:"making_seconds"`    // what making the table took
	IO               IO          `json:"io"`
	Inputs           []int       `json:"inputs"`    // new tokens of a pass, rising
	Prefixes         []int       `json:"prefixes"`  // cached tokens before them, rising
	WindowNS         [][]int64   `json:"window_ns"` // [input][prefix]; never less for more tokens of either
}

// LayerTime is one measured or estimated time of one layer.
type LayerTime struct {
	Input  int
	Prefix int
	Window time.Duration
}

// Entry is the answer to a lookup.
type Entry struct {
	Window time.Duration `json:"window_ns"`
	// Extrapolated: a length lies outside of the table, and the nearest inside stands for it. Below the smallest input
	// the true window is shorter than this one.
	Extrapolated bool   `json:"extrapolated,omitempty"`
	Budget       Budget `json:"budget"`
}

// SetWindows takes the times of a full grid, in any order. Measurements scatter: where more tokens took less time, the
// lesser time counts for both, so that no window is longer than one that was measured. lowered is the largest part that
// a window lost to that.
func (t *Table) SetWindows(times []LayerTime) (lowered float64, err error) {
	if len(times) == 0 || len(times) > LengthsMax*LengthsMax {
		return 0, fmt.Errorf("%w: %d layer times, want 1 to %d", ErrTable, len(times), LengthsMax*LengthsMax)
	}
	axis := func(of func(x LayerTime) int) (all []int) {
		for _, x := range times {
			all = append(all, of(x))
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	inputs := axis(func(x LayerTime) int { return x.Input })
	prefixes := axis(func(x LayerTime) int { return x.Prefix })
	sorted := slices.SortedFunc(slices.Values(times), func(a, b LayerTime) int {
		return cmp.Or(cmp.Compare(a.Input, b.Input), cmp.Compare(a.Prefix, b.Prefix))
	})
	for i, x := range sorted {
		if i > 0 && x.Input == sorted[i-1].Input && x.Prefix == sorted[i-1].Prefix {
			return 0, fmt.Errorf("%w: input %d with prefix %d is given twice", ErrTable, x.Input, x.Prefix)
		}
		in, pre := inputs[i/len(prefixes)], prefixes[i%len(prefixes)]
		if x.Input != in || x.Prefix != pre {
			return 0, fmt.Errorf("%w: the time of input %d with prefix %d is missing: each input needs each prefix",
				ErrTable, in, pre)
		}
	}
	if n := len(inputs) * len(prefixes); len(sorted) != n {
		return 0, fmt.Errorf("%w: %d layer times, want %d inputs x %d prefixes", ErrTable, len(sorted), len(inputs),
			len(prefixes))
	}
	t.Inputs, t.Prefixes, t.WindowNS = inputs, prefixes, make([][]int64, len(inputs))
	for i := len(inputs) - 1; i >= 0; i-- {
		row := make([]int64, len(prefixes))
		for j := len(prefixes) - 1; j >= 0; j-- {
			measured := int64(sorted[i*len(prefixes)+j].Window)
			row[j] = measured
			if i+1 < len(inputs) {
				row[j] = min(row[j], t.WindowNS[i+1][j])
			}
			if j+1 < len(prefixes) {
				row[j] = min(row[j], row[j+1])
			}
			if measured > 0 {
				lowered = max(lowered, 1-float64(row[j])/float64(measured))
			}
		}
		t.WindowNS[i] = row
	}
	return lowered, t.checkWindows()
}

// Lookup is the window and the budget of one layer of a pass over input new tokens behind prefix cached ones. A decode
// step has an input of 1.
func (t *Table) Lookup(input, prefix int) Entry {
	window, extrapolated := t.Window(input, prefix)
	return Entry{Window: window, Extrapolated: extrapolated, Budget: t.IO.Budget(window)}
}

// Window is Lookup without the budget: bilinear between the table's lengths, rounded down.
func (t *Table) Window(input, prefix int) (window time.Duration, extrapolated bool) {
	i, iBelow, iSpan, iOut := place(t.Inputs, input)
	j, jBelow, jSpan, jOut := place(t.Prefixes, prefix)
	along := func(i int) int64 {
		row := t.WindowNS[i]
		return between(row[j], row[min(j+1, len(row)-1)], jBelow, jSpan)
	}
	ns := between(along(i), along(min(i+1, len(t.WindowNS)-1)), iBelow, iSpan)
	return time.Duration(ns), iOut || jOut
}

// place finds the last length that is not above x, and how far x is above it in the span to the next.
func place(lengths []int, x int) (i int, above, span int64, outside bool) {
	last := len(lengths) - 1
	if x < lengths[0] || x > lengths[last] {
		outside = true
		x = min(max(x, lengths[0]), lengths[last])
	}
	if i = sort.SearchInts(lengths, x+1) - 1; i == last {
		return i, 0, 1, outside
	}
	return i, int64(x - lengths[i]), int64(lengths[i+1] - lengths[i]), outside
}

// between is rounded down, which keeps it monotone in all but span.
func between(a, b, above, span int64) int64 { return (a*(span-above) + b*above) / span }

// Validate returns all problems.
func (t *Table) Validate() error {
	var errs []error
	if t.Version != Version {
		errs = append(errs, fmt.Errorf("%w: table_version %d; this program knows %d: make the table anew", ErrTable,
			t.Version, Version))
	}
	if t.Source != Measured && t.Source != Estimated {
		errs = append(errs, fmt.Errorf("%w: source %.80q, want %q or %q", ErrTable, t.Source, Measured, Estimated))
	}
	for _, s := range []float64{t.MeasuringSeconds, t.MakingSeconds} {
		if !(s >= 0 && s <= 1e9) {
			errs = append(errs, fmt.Errorf("%w: it took %v seconds", ErrTable, s))
		}
	}
	return errors.Join(append(errs, t.Fingerprint.Validate(), t.IO.Validate(), t.checkWindows())...)
}

func (t *Table) checkWindows() error {
	if err := errors.Join(checkAxis("inputs", t.Inputs, 1), checkAxis("prefixes", t.Prefixes, 0)); err != nil {
		return err
	}
	if len(t.WindowNS) != len(t.Inputs) {
		return fmt.Errorf("%w: %d rows of windows for %d inputs", ErrTable, len(t.WindowNS), len(t.Inputs))
	}
	for i, row := range t.WindowNS {
		if len(row) != len(t.Prefixes) {
			return fmt.Errorf("%w: %d windows of input %d for %d prefixes", ErrTable, len(row), t.Inputs[i], len(t.Prefixes))
		}
		for j, ns := range row {
			at := fmt.Sprintf("input %d with prefix %d", t.Inputs[i], t.Prefixes[j])
			if ns < int64(WindowMin) || ns > int64(WindowMax) {
				return fmt.Errorf("%w: a window of %v at %s, want %v to %v", ErrTable, time.Duration(ns), at, WindowMin,
					WindowMax)
			}
			if i > 0 && ns < t.WindowNS[i-1][j] || j > 0 && ns < row[j-1] {
				return fmt.Errorf("%w: the window at %s is shorter than one of fewer tokens", ErrTable, at)
			}
		}
	}
	return nil
}

func checkAxis(what string, lengths []int, least int) error {
	if len(lengths) == 0 || len(lengths) > LengthsMax {
		return fmt.Errorf("%w: %d %s, want 1 to %d", ErrTable, len(lengths), what, LengthsMax)
	}
	for i, n := range lengths {
		if n < least || n > LengthMax || i > 0 && n <= lengths[i-1] {
			return fmt.Errorf("%w: %s: %d, want %d to %d tokens, in rising order", ErrTable, what, n, least, LengthMax)
		}
	}
	return nil
}

// Validate returns the first problem.
func (io *IO) Validate() error {
	h := &io.Harvest
	switch {
	case io.BytesPerToken < 1 || io.BytesPerToken > 1<<32:
		return fmt.Errorf("%w: bytes_per_token %d", ErrTable, io.BytesPerToken)
	case io.ObjectBytes < 1 || io.ObjectBytes > 1<<32:
		return fmt.Errorf("%w: object_bytes %d", ErrTable, io.ObjectBytes)
	case h.SMs < 1 || h.SMs > 1<<16:
		return fmt.Errorf("%w: harvest on a GPU of %d SMs", ErrTable, h.SMs)
	case !(h.SMShareMax > 0 && h.SMShareMax <= 1):
		return fmt.Errorf("%w: sm_share_max %v, want more than 0, at most 1", ErrTable, h.SMShareMax)
	case h.LaunchBytes < 1 || h.LaunchBytes > 1<<40:
		return fmt.Errorf("%w: launch_bytes %d", ErrTable, h.LaunchBytes)
	case len(h.Grids) == 0 || len(h.Grids) > GridsMax:
		return fmt.Errorf("%w: %d grids of the harvest, want 1 to %d", ErrTable, len(h.Grids), GridsMax)
	}
	before := 0
	for _, g := range h.Grids {
		if g.Blocks <= before || g.Blocks > h.SMs {
			return fmt.Errorf("%w: a harvest of %d blocks, want 1 to %d, in rising order", ErrTable, g.Blocks, h.SMs)
		}
		if before = g.Blocks; !isRate(g.BytesPerSecond) {
			return fmt.Errorf("%w: a harvest of %v bytes a second", ErrTable, g.BytesPerSecond)
		}
	}
	return errors.Join(io.Read.validate("read"), io.Write.validate("write"))
}

// isRate: bytes a second that can be; others are of a wrong unit.
func isRate(r float64) bool { return r >= 1e5 && r <= 1e15 }

func (d *Direction) validate(what string) error {
	switch {
	case !isRate(d.RingBytesPerSecond):
		return fmt.Errorf("%w: %s: ring_bytes_per_second %v, want 1e5 to 1e15", ErrTable, what, d.RingBytesPerSecond)
	case d.DrivesBytesPerSecond != 0 && !(d.DrivesBytesPerSecond >= 1 && d.DrivesBytesPerSecond <= 1e15):
		return fmt.Errorf("%w: %s: drives_bytes_per_second %v, want 1 to 1e15, or none for no limit", ErrTable, what,
			d.DrivesBytesPerSecond)
	case !(d.LatencyUS >= 0 && d.LatencyUS <= 60e6):
		return fmt.Errorf("%w: %s: latency_us %v, want 0 to a minute", ErrTable, what, d.LatencyUS)
	}
	return nil
}

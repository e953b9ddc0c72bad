package wear

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// WarrantyYears is how long a rating in drive writes per day is meant to last. Drives with another warranty are given
	// by their terabytes written.
	WarrantyYears = 5
	daysPerYear   = 365
	secondsPerDay = 86400
	terabyte      = 1e12
)

// Endurance is how much a drive may be written according to its maker. One of the fields is set; the zero value is not
// known.
type Endurance struct {
	DWPD  float64 // drive writes per day over WarrantyYears
	Bytes float64 // written in all
}

// ParseEndurance reads what data sheets say: "1dwpd", "0.3 DWPD", "14000tbw", "14pbw". TB are 10^12 bytes.
func ParseEndurance(text string) (Endurance, error) {
	t := strings.ToLower(strings.ReplaceAll(strings.TrimSpace(text), " ", ""))
	for _, unit := range []struct {
		suffix string
		make   func(float64) Endurance
	}{
		{"dwpd", func(v float64) Endurance { return Endurance{DWPD: v} }},
		{"tbw", func(v float64) Endurance { return Endurance{Bytes: v * terabyte} }},
		{"pbw", func(v float64) Endurance { return Endurance{Bytes: v * 1000 * terabyte} }},
	} {
		number, ok := strings.CutSuffix(t, unit.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(number, 64)
		if err != nil || !(v > 0 && v <= 1e9) {
			break
		}
		return unit.make(v), nil
	}
	return Endurance{}, fmt.Errorf("%w: endurance %q: write drive writes per day or terabytes written, as in 1dwpd, "+
		"14000tbw or 14pbw", ErrInvalid, text)
}

// String is what ParseEndurance reads.
func (e Endurance) String() string {
	if e.Bytes > 0 {
		return strconv.FormatFloat(e.Bytes/terabyte, 'f', -1, 64) + "tbw"
	}
	return strconv.FormatFloat(e.DWPD, 'f', -1, 64) + "dwpd"
}

// Known says whether there is a rating.
func (e Endurance) Known() bool { return e.DWPD > 0 || e.Bytes > 0 }

// Rated is how many bytes a drive of a size may be written in all, 0 if that is not known.
func (e Endurance) Rated(capacity uint64) float64 {
	if e.Bytes > 0 {
		return e.Bytes
	}
	return e.DWPD * float64(capacity) * daysPerYear * WarrantyYears
}

// Ratings are the endurance of a volume's drives: of all, and of those that have another.
type Ratings struct {
	All   Endurance
	Drive map[uint16]Endurance // by index
}

// Set reads RATING or INDEX:RATING into the ratings.
func (r *Ratings) Set(text string) error {
	index, rating, one := strings.Cut(text, ":")
	if !one {
		rating = text
	}
	e, err := ParseEndurance(rating)
	if err != nil {
		return err
	}
	if !one {
		r.All = e
		return nil
	}
	n, err := strconv.ParseUint(index, 10, 16)
	if err != nil {
		return fmt.Errorf("%w: endurance %q: %q is not the index of a drive", ErrInvalid, text, index)
	}
	if r.Drive == nil {
		r.Drive = map[uint16]Endurance{}
	}
	r.Drive[uint16(n)] = e
	return nil
}

// Known says whether any drive has a rating.
func (r *Ratings) Known() bool { return r.All.Known() || len(r.Drive) > 0 }

// Of is a drive's rating, by its index.
func (r *Ratings) Of(index uint16) Endurance {
	if e, ok := r.Drive[index]; ok {
		return e
	}
	return r.All
}

// YearsLeft is how long it takes until a drive was written as much as it is rated for, at a rate in bytes a second,
// when it was written that much already. It says no where the rating is not known or nothing is being written.
func (e Endurance) YearsLeft(capacity uint64, written, rate float64) (years float64, ok bool) {
	rated := e.Rated(capacity)
	if rated <= 0 || !(rate > 0) {
		return 0, false
	}
	return max(0, rated-written) / rate / secondsPerDay / daysPerYear, true
}

// DWPD is a rate in bytes a second as drive writes per day.
func DWPD(rate float64, capacity uint64) float64 {
	if capacity == 0 {
		return 0
	}
	return rate * secondsPerDay / float64(capacity)
}

// Amplification is how many bytes were written for each one that was meant; it says no before there was one.
func Amplification(written, meant uint64) (factor float64, ok bool) {
	if meant == 0 {
		return 0, false
	}
	return float64(written) / float64(meant), true
}

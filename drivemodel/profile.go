// Package drivemodel says how fast a drive is: a profile, which is a small JSON file, and a medium, which turns the
// commands that a drive gets into the times at which it would complete them. It does no I/O and reads no clock.
// docs/drive-profiles.md has the format and the equations.
package drivemodel

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"tuttifs/strictjson"
)

// ErrProfile: a profile that no drive can have, or a file that is none.
var ErrProfile = errors.New("drivemodel: profile")

// Version is the version of the format that this program reads and writes.
const Version = 1

// Bounds of a profile. They keep all arithmetic far from its limits and say "wrong unit" to whoever is beyond them.
const (
	FileBytesMax         = 64 << 10
	BytesPerSecondMin    = 100_000           // a tenth of a megabyte
	BytesPerSecondMax    = 1_000_000_000_000 // a terabyte
	CommandsPerSecondMax = 1_000_000_000
	LatencyUSMax         = 60_000_000 // a minute
	WindowUSMax          = 100_000    // a tenth of a second
	CommandsInServiceMax = 65536
	MixedPointsMax       = 64
	MeasuredRowsMax      = 256
	textBytesMax         = 512
	nameBytesMax         = 64
)

// Profile describes one drive. Absent parts are no limit: a profile without Write is of a drive that nobody wrote to,
// and writes to its model take no time.
type Profile struct {
	Version           int        `json:"profile_version"`
	Name              string     `json:"name"`
	Of                string     `json:"of"`               // which drive the figures are of: one drive, never a set
	Source            string     `json:"source,omitempty"` // where they come from
	CommandsInService int        `json:"commands_in_service,omitempty"`
	Read              *Direction `json:"read,omitempty"`
	Write             *Direction `json:"write,omitempty"`
	Mixed             *Mixed     `json:"mixed,omitempty"`
	Measured          []Measured `json:"measured,omitempty"`
}

// Direction is what reads alone, or writes alone, get.
type Direction struct {
	BytesPerSecond    int64   `json:"bytes_per_second"`
	CommandsPerSecond int64   `json:"commands_per_second,omitempty"`
	Latency           Latency `json:"latency"`
}

// Latency is the distribution of a command's time on an idle drive, in microseconds, without the time that its bytes
// take at the drive's bandwidth. Between the quantiles it is linear.
type Latency struct {
	MinUS  float64 `json:"min_us"`
	P50US  float64 `json:"p50_us"`
	P90US  float64 `json:"p90_us"`
	P99US  float64 `json:"p99_us"`
	P999US float64 `json:"p999_us"`
	MaxUS  float64 `json:"max_us"`
}

// Mixed is what reads and writes at the same time get in all.
type Mixed struct {
	WindowUS float64      `json:"window_us,omitempty"` // how long what has been served still counts
	Points   []MixedPoint `json:"points"`              // by rising share of writes
}

// MixedPoint is the bandwidth in all where writes are this share of the bytes.
type MixedPoint struct {
	WritePercent   float64 `json:"write_percent"`
	BytesPerSecond int64   `json:"bytes_per_second"`
}

// Measured is one measurement that a profile was made from. The model does not use it.
type Measured struct {
	Verb           string  `json:"verb"` // "read", "write" or "mixed"
	CommandBytes   int     `json:"command_bytes"`
	Depth          int     `json:"depth"`
	WritePercent   float64 `json:"write_percent,omitempty"`
	Seconds        float64 `json:"seconds"`
	BytesPerSecond float64 `json:"bytes_per_second"`
	P50US          float64 `json:"p50_us"`
	P90US          float64 `json:"p90_us"`
	P99US          float64 `json:"p99_us"`
	P999US         float64 `json:"p999_us"`
	MaxUS          float64 `json:"max_us"`
}

// Parse reads a profile that we did not write, strictly: every field at most once under its exact name, no other,
// nothing behind; and validates it.
func Parse(b []byte) (*Profile, error) {
	if len(b) > FileBytesMax {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrProfile, FileBytesMax)
	}
	var p Profile
	if err := strictjson.Decode(b, &p); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProfile, err)
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	return &p, nil
}

// ValidName says whether a profile may be called so: 1 to 64 lower-case letters, digits and underscores.
func ValidName(name string) bool {
	return name != "" && len(name) <= nameBytesMax && strictjson.Name(name)
}

// Encode is the profile's file.
func (p *Profile) Encode() ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProfile, err)
	}
	return append(b, '\n'), nil
}

// Validate returns all problems.
func (p *Profile) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrProfile}, args...)...))
	}
	if p.Version != Version {
		bad("profile_version %d; this program knows %d", p.Version, Version)
	}
	if !ValidName(p.Name) {
		bad("name %.80q: want 1 to %d lower-case letters, digits and underscores", p.Name, nameBytesMax)
	}
	if p.Of == "" {
		bad("\"of\" is empty: say which drive the figures are of")
	}
	for _, text := range []string{p.Of, p.Source} {
		if len(text) > textBytesMax {
			bad("a text of %d bytes, at most %d", len(text), textBytesMax)
		}
	}
	if p.CommandsInService < 0 || p.CommandsInService > CommandsInServiceMax {
		bad("commands_in_service %d, want 1 to %d, or none for no limit", p.CommandsInService, CommandsInServiceMax)
	}
	if p.Read == nil && p.Write == nil {
		bad("neither read nor write")
	}
	p.Read.check("read", bad)
	p.Write.check("write", bad)
	switch {
	case p.Mixed == nil:
	case p.Read == nil || p.Write == nil:
		bad("mixed without read and write")
	default:
		p.Mixed.check(bad)
	}
	if len(p.Measured) > MeasuredRowsMax {
		bad("%d measured rows, at most %d", len(p.Measured), MeasuredRowsMax)
	}
	for i := range p.Measured {
		p.Measured[i].check(i, bad)
	}
	return errors.Join(errs...)
}

type badFunc func(format string, args ...any)

func checkRate(what string, rate int64, bad badFunc) {
	if rate < BytesPerSecondMin || rate > BytesPerSecondMax {
		bad("%s: bytes_per_second %d, want %d to %d", what, rate, BytesPerSecondMin, int64(BytesPerSecondMax))
	}
}

func (d *Direction) check(what string, bad badFunc) {
	if d == nil {
		return
	}
	checkRate(what, d.BytesPerSecond, bad)
	if d.CommandsPerSecond < 0 || d.CommandsPerSecond > CommandsPerSecondMax {
		bad("%s: commands_per_second %d, want 1 to %d, or none for no limit", what, d.CommandsPerSecond,
			CommandsPerSecondMax)
	}
	before := 0.0
	for _, us := range d.Latency.quantiles() {
		if !(us >= before && us <= LatencyUSMax) { // also no number
			bad("%s: latencies %v: want 0 to %d microseconds, none less than the one before", what,
				d.Latency.quantiles(), LatencyUSMax)
			return
		}
		before = us
	}
}

func (m *Mixed) check(bad badFunc) {
	if !(m.WindowUS >= 0 && m.WindowUS <= WindowUSMax) {
		bad("mixed: window_us %v, want 0 to %d", m.WindowUS, WindowUSMax)
	}
	if len(m.Points) == 0 || len(m.Points) > MixedPointsMax {
		bad("mixed: %d points, want 1 to %d", len(m.Points), MixedPointsMax)
	}
	before := 0.0
	for _, x := range m.Points {
		if !(x.WritePercent > before && x.WritePercent < 100) {
			bad("mixed: write_percent %v: want more than 0 and less than 100, in rising order", x.WritePercent)
			return
		}
		before = x.WritePercent
		checkRate("mixed", x.BytesPerSecond, bad)
	}
}

func (m *Measured) check(row int, bad badFunc) {
	figures := []float64{m.WritePercent, m.Seconds, m.BytesPerSecond, m.P50US, m.P90US, m.P99US, m.P999US, m.MaxUS}
	for _, f := range figures {
		if math.IsNaN(f) || f < 0 || f > 1e15 {
			bad("measured row %d: figure %v", row, f)
			return
		}
	}
	if m.Verb != "read" && m.Verb != "write" && m.Verb != "mixed" {
		bad("measured row %d: verb %.80q", row, m.Verb)
	}
	if m.CommandBytes < 1 || m.CommandBytes > 1<<30 || m.Depth < 1 || m.Depth > CommandsInServiceMax {
		bad("measured row %d: %d bytes at depth %d", row, m.CommandBytes, m.Depth)
	}
}

// BytesPerSecond is the bandwidth in all when this share of the bytes is written, 0 to 1; infinite for what the profile
// does not limit. Between the points, of which reads alone and writes alone are the outermost, the time per byte is
// linear: without a collapse the two directions share the drive's time, and that is what comes out.
func (p *Profile) BytesPerSecond(writeShare float64) float64 {
	return 1e9 / p.nsPerByte(writeShare)
}

// RateAt is the bytes a second of enough commands of one size at a time: by the bandwidth of the mixture, or by the
// commands a second of each direction where that is less.
func (p *Profile) RateAt(writeShare float64, commandBytes int) float64 {
	perByte := p.nsPerByte(writeShare)
	least := func(d *Direction) float64 { return max(perByte, d.nsPerCommand()/float64(commandBytes)) }
	return 1e9 / ((1-writeShare)*least(p.Read) + writeShare*least(p.Write))
}

// nsPerCommand is the least time of the drive for one command.
func (d *Direction) nsPerCommand() float64 {
	if d == nil || d.CommandsPerSecond == 0 {
		return 0
	}
	return 1e9 / float64(d.CommandsPerSecond)
}

func (p *Profile) nsPerByte(share float64) float64 {
	at := func(d *Direction) float64 {
		if d == nil {
			return 0
		}
		return 1e9 / float64(d.BytesPerSecond)
	}
	x0, y0 := 0.0, at(p.Read)
	if share <= 0 {
		return y0
	}
	if p.Mixed != nil {
		for _, m := range p.Mixed.Points {
			x1, y1 := m.WritePercent/100, 1e9/float64(m.BytesPerSecond)
			if share <= x1 {
				return y0 + (y1-y0)*(share-x0)/(x1-x0)
			}
			x0, y0 = x1, y1
		}
	}
	return y0 + (at(p.Write)-y0)*min((share-x0)/(1-x0), 1)
}

// Summary is the profile in one line.
func (p *Profile) Summary() string {
	gb := func(d *Direction) string {
		if d == nil {
			return "unlimited"
		}
		return fmt.Sprintf("%.3g GB/s", float64(d.BytesPerSecond)/1e9)
	}
	s := fmt.Sprintf("%s: %s read, %s write", p.Name, gb(p.Read), gb(p.Write))
	if p.Read != nil && p.Write != nil {
		s += fmt.Sprintf(", %.3g GB/s in all mixed half and half", p.BytesPerSecond(0.5)/1e9)
	}
	return s
}

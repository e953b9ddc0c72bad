package slack

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"tuttifs/strictjson"
)

// ErrTimes: a file of layer times that is none.
var ErrTimes = errors.New("slack: layer times")

// TimesVersion is the version of the JSON file that this program reads.
const TimesVersion = 1

// Times is a file of layer times. A CSV file has its rows only.
type Times struct {
	Version int       `json:"layer_times_version"`
	GPU     string    `json:"gpu,omitempty"`
	Driver  string    `json:"driver,omitempty"`
	Seconds float64   `json:"seconds,omitempty"` // what the measurement took
	Shape   *Shape    `json:"shape,omitempty"`   // of the layer that was measured
	Rows    []TimeRow `json:"rows"`
}

// TimeRow is one measurement.
type TimeRow struct {
	Input  int     `json:"input"`
	Prefix int     `json:"prefix"`
	MS     float64 `json:"ms"`
}

// ParseTimes reads layer times that we did not write: a JSON object, or CSV whose first line is input,prefix,ms.
func ParseTimes(b []byte) (*Times, error) {
	if len(b) > FileBytesMax {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrTimes, FileBytesMax)
	}
	t := &Times{Version: TimesVersion}
	var err error
	if text := bytes.TrimLeft(b, " \t\r\n"); len(text) > 0 && text[0] == '{' {
		t.Version = 0
		err = strictjson.Decode(b, t)
	} else {
		t.Rows, err = parseCSV(b)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrTimes, err)
	case t.Version != TimesVersion:
		return nil, fmt.Errorf("%w: layer_times_version %d; this program knows %d", ErrTimes, t.Version, TimesVersion)
	case !(t.Seconds >= 0 && t.Seconds <= 1e9):
		return nil, fmt.Errorf("%w: measured in %v seconds", ErrTimes, t.Seconds)
	case len(t.Rows) == 0:
		return nil, fmt.Errorf("%w: no rows", ErrTimes)
	}
	for i, r := range t.Rows {
		ms := float64(WindowMax) / 1e6
		if r.Input < 1 || r.Input > LengthMax || r.Prefix < 0 || r.Prefix > LengthMax || !(r.MS > 0 && r.MS <= ms) {
			return nil, fmt.Errorf("%w: row %d: input %d, prefix %d, %v ms: want 1 to %d tokens, 0 to %d, and up to %v ms",
				ErrTimes, i+1, r.Input, r.Prefix, r.MS, LengthMax, LengthMax, ms)
		}
	}
	return t, nil
}

func parseCSV(b []byte) (rows []TimeRow, err error) {
	r := csv.NewReader(bytes.NewReader(b))
	r.FieldsPerRecord, r.ReuseRecord, r.TrimLeadingSpace = 3, true, true
	head, err := r.Read()
	if err != nil || strings.Join(head, ",") != "input,prefix,ms" {
		return nil, errors.New(`neither a JSON object nor CSV: its first line must be "input,prefix,ms"`)
	}
	for {
		cells, err := r.Read()
		if errors.Is(err, io.EOF) {
			return rows, nil
		}
		if err != nil {
			return nil, err
		}
		input, errInput := strconv.Atoi(cells[0])
		prefix, errPrefix := strconv.Atoi(cells[1])
		ms, errMS := strconv.ParseFloat(cells[2], 64)
		if err := errors.Join(errInput, errPrefix, errMS); err != nil {
			line, _ := r.FieldPos(0)
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		rows = append(rows, TimeRow{input, prefix, ms})
	}
}

// LayerTimes are the rows as windows.
func (t *Times) LayerTimes() []LayerTime {
	all := make([]LayerTime, len(t.Rows))
	for i, r := range t.Rows {
		all[i] = LayerTime{r.Input, r.Prefix, time.Duration(r.MS * 1e6)}
	}
	return all
}

// CheckShape refuses times of a layer of another shape.
func (t *Times) CheckShape(want *Shape) error {
	if t.Shape == nil {
		return nil
	}
	for _, p := range t.Shape.pairs(want) {
		if p.has != p.want {
			return fmt.Errorf("%w: of a layer with %s %#v, and the model has %#v", ErrTimes, p.what, p.has, p.want)
		}
	}
	return nil
}

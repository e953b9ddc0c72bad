package drivemodel

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every shipped file is exactly what its profile is written as, under the name that it is found by.
func TestShippedProfiles(t *testing.T) {
	require.Equal(t, []string{"cloud", "paper", "pcie4"}, Names())
	for _, name := range Names() {
		golden, err := files.ReadFile(folder + "/" + name + ".json")
		require.NoError(t, err)
		p, ok := Shipped(name)
		require.True(t, ok)
		require.Equal(t, name, p.Name)
		require.NotEmpty(t, p.Source)
		again, err := p.Encode()
		require.NoError(t, err)
		require.Equal(t, string(golden), string(again))
		require.Contains(t, p.Summary(), name+": ")
	}
	_, ok := Shipped("../profiles/paper")
	require.False(t, ok)
	_, ok = Shipped("")
	require.False(t, ok)
}

// The paper gives its figures for a pair of drives.
func TestPaperIsHalfThePair(t *testing.T) {
	p, _ := Shipped("paper")
	require.EqualValues(t, 29e9, 2*p.Read.BytesPerSecond)
	require.EqualValues(t, 12e9, 2*p.Write.BytesPerSecond)
	for _, share := range []float64{0.1, 0.3, 0.5, 0.7, 0.9, 1} {
		require.InDelta(t, 12e9, 2*p.BytesPerSecond(share), 1)
	}
	require.InDelta(t, 29e9, 2*p.BytesPerSecond(0), 1)
}

func valid() Profile {
	p, _ := Shipped("paper")
	return *p
}

func TestValidate(t *testing.T) {
	p := valid()
	require.NoError(t, p.Validate())
	for name, spoil := range map[string]func(p *Profile){
		"version":       func(p *Profile) { p.Version = 2 },
		"no name":       func(p *Profile) { p.Name = "" },
		"name":          func(p *Profile) { p.Name = "a/b" },
		"long name":     func(p *Profile) { p.Name = strings.Repeat("a", 65) },
		"of":            func(p *Profile) { p.Of = "" },
		"long text":     func(p *Profile) { p.Source = strings.Repeat("a", 513) },
		"service":       func(p *Profile) { p.CommandsInService = -1 },
		"service high":  func(p *Profile) { p.CommandsInService = CommandsInServiceMax + 1 },
		"nothing":       func(p *Profile) { p.Read, p.Write, p.Mixed = nil, nil, nil },
		"mixed of one":  func(p *Profile) { p.Write = nil },
		"no rate":       func(p *Profile) { p.Read.BytesPerSecond = 0 },
		"rate":          func(p *Profile) { p.Write.BytesPerSecond = BytesPerSecondMax + 1 },
		"commands":      func(p *Profile) { p.Read.CommandsPerSecond = -1 },
		"latency":       func(p *Profile) { p.Read.Latency.P99US = 1 },
		"latency sign":  func(p *Profile) { p.Read.Latency.MinUS = -1 },
		"latency NaN":   func(p *Profile) { p.Write.Latency.MaxUS = math.NaN() },
		"latency unit":  func(p *Profile) { p.Write.Latency.MaxUS = LatencyUSMax + 1 },
		"window":        func(p *Profile) { p.Mixed.WindowUS = -1 },
		"no points":     func(p *Profile) { p.Mixed.Points = nil },
		"many points":   func(p *Profile) { p.Mixed.Points = make([]MixedPoint, MixedPointsMax+1) },
		"point order":   func(p *Profile) { p.Mixed.Points[1].WritePercent = 10 },
		"point":         func(p *Profile) { p.Mixed.Points[2].WritePercent = 100 },
		"point rate":    func(p *Profile) { p.Mixed.Points[0].BytesPerSecond = 1 },
		"measured":      func(p *Profile) { p.Measured = make([]Measured, MeasuredRowsMax+1) },
		"measured verb": func(p *Profile) { p.Measured = []Measured{{Verb: "x", CommandBytes: 1, Depth: 1}} },
		"measured size": func(p *Profile) { p.Measured = []Measured{{Verb: "read", Depth: 1}} },
		"measured NaN":  func(p *Profile) { p.Measured = []Measured{{Verb: "read", P50US: math.Inf(1)}} },
	} {
		p := valid()
		spoil(&p)
		require.ErrorIs(t, p.Validate(), ErrProfile, name)
		_, err := p.Encode()
		require.ErrorIs(t, err, ErrProfile, name)
	}
}

func TestParseIsStrict(t *testing.T) {
	p := valid()
	p.Measured = []Measured{{Verb: "mixed", CommandBytes: 65536, Depth: 32, WritePercent: 50, Seconds: 1, P50US: 3}}
	good, err := p.Encode()
	require.NoError(t, err)
	again, err := Parse(good)
	require.NoError(t, err)
	require.Equal(t, &p, again)

	text := string(good)
	for name, bad := range map[string]string{
		"empty":          "",
		"no object":      "[]",
		"cut off":        text[:len(text)/2],
		"behind":         text + "{}",
		"unknown":        strings.Replace(text, `"of"`, `"off"`, 1),
		"unknown inside": strings.Replace(text, `"p50_us"`, `"p51_us"`, 1),
		"another case":   strings.Replace(text, `"read"`, `"Read"`, 1),
		"twice":          strings.Replace(text, `"of"`, `"name"`, 1),
		"twice inside":   strings.Replace(text, `"p90_us"`, `"p50_us"`, 1),
		"null":           strings.Replace(text, `"window_us": 200`, `"window_us": null`, 1),
		"type":           strings.Replace(text, `"window_us": 200`, `"window_us": "200"`, 1),
		"fraction":       strings.Replace(text, `14500000000`, `0.5`, 1),
		"too large":      strings.Replace(text, `14500000000`, `1e400`, 1),
		"nested":         strings.Replace(text, `"window_us": 200`, `"window_us": `+strings.Repeat("[", 9), 1),
		"not UTF-8":      strings.Replace(text, "paper", "\xff", 1),
		"size":           text + strings.Repeat(" ", FileBytesMax),
	} {
		_, err := Parse([]byte(bad))
		require.ErrorIs(t, err, ErrProfile, name)
	}
}

// Without a collapse, reads and writes share the drive's time.
func TestMixtureWithoutCollapse(t *testing.T) {
	p := Profile{Read: &Direction{BytesPerSecond: 4e9}, Write: &Direction{BytesPerSecond: 1e9}}
	require.InDelta(t, 4e9, p.BytesPerSecond(0), 1)
	require.InDelta(t, 1e9, p.BytesPerSecond(1), 1)
	require.InDelta(t, 1.6e9, p.BytesPerSecond(0.5), 1, "a second of writes and a quarter of one of reads")
	p.Write = nil
	require.True(t, math.IsInf(p.BytesPerSecond(1), 1))
}

func FuzzParse(f *testing.F) {
	for _, name := range Names() {
		b, err := files.ReadFile(folder + "/" + name + ".json")
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add([]byte(`{"profile_version":1,"name":"x","of":"y","read":{"bytes_per_second":100000,"latency":{}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			require.ErrorIs(t, err, ErrProfile)
			return
		}
		out, err := p.Encode()
		require.NoError(t, err, "what was read can be written")
		var compact bytes.Buffer
		require.NoError(t, json.Compact(&compact, out))
		if compact.Len() <= FileBytesMax {
			again, err := Parse(compact.Bytes())
			require.NoError(t, err)
			twice, err := again.Encode()
			require.NoError(t, err)
			require.Equal(t, string(out), string(twice))
		}
		m := NewMedium(p, 1)
		last := int64(-1)
		for i := range 100 {
			served, done := m.serve(int64(i)*1000, i%3 == 0, uint32(i)*4096)
			require.GreaterOrEqual(t, served, max(last, int64(i)*1000))
			require.GreaterOrEqual(t, done, served)
			last = served
		}
	})
}

package slack

import (
	"flag"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden file anew")

const golden = "testdata/table.json"

// The file of version 1 stays what it is.
func TestGoldenFile(t *testing.T) {
	b, err := table(t).Encode()
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(golden, b, 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), string(b))
	x, err := Parse(want)
	require.NoError(t, err)
	require.Equal(t, table(t), x)
	f := fingerprint()
	require.Equal(t, "547df316b3adf56be799c1992ffd7a8d", f.Key(), "saved tables are found by it")
}

func TestParseIsStrict(t *testing.T) {
	b, err := table(t).Encode()
	require.NoError(t, err)
	for says, c := range map[string][2]string{
		"table_version 2":       {`"table_version": 1`, `"table_version": 2`},
		`unknown field "x"`:     {`"table_version"`, `"x": 1, "table_version"`},
		"given twice":           {`"table_version"`, `"table_version": 1, "table_version"`},
		`"Source"`:              {`"source"`, `"Source"`},
		"null":                  {`"measured"`, `null`},
		"behind its end":        {"\n}\n", "\n}\n{}"},
		`source "guessed"`:      {`"measured"`, `"guessed"`},
		"no JSON object":        {"{\n  \"table_version\"", "[\n  \"table_version\""},
		"shorter than one of":   {"15700000", "4599999"},
		"bytes_per_token 0":     {`"bytes_per_token": 4096`, `"bytes_per_token": 0`},
		"object_bytes":          {`"object_bytes": 262144`, `"object_bytes": -1`},
		"rising order":          {`"blocks": 16`, `"blocks": 8`},
		"sm_share_max 2":        {`"sm_share_max": 0.0125`, `"sm_share_max": 2`},
		"launch_bytes 0":        {`"launch_bytes": 67108864`, `"launch_bytes": 0`},
		"0 SMs":                 {`"sms": 132`, `"sms": 0`},
		"latency_us -1":         {`"latency_us": 380`, `"latency_us": -1`},
		"ring_bytes_per_second": {`"ring_bytes_per_second": 50000000000`, `"ring_bytes_per_second": 50`},
		"drives_bytes":          {`"drives_bytes_per_second": 29000000000`, `"drives_bytes_per_second": 0.5`},
		"layers 0":              {`"layers": 32`, `"layers": 0`},
		`model "../x"`:          {`"llama3-8b"`, `"../x"`},
		"a text of the":         {`"NVIDIA H200"`, `""`},
		"took -1 seconds":       {`"measuring_seconds": 12.5`, `"measuring_seconds": -1`},
	} {
		text := strings.Replace(string(b), c[0], c[1], 1)
		require.NotEqual(t, string(b), text, says)
		_, err := Parse([]byte(text))
		require.ErrorIs(t, err, ErrTable, says)
		require.ErrorContains(t, err, says)
	}
	_, err = Parse(make([]byte, FileBytesMax+1))
	require.ErrorIs(t, err, ErrTable)
	_, err = new(Table).Encode()
	require.ErrorIs(t, err, ErrTable)
}

func TestSaveAndLoad(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	x := table(t)
	path, err := Path(&x.Fingerprint)
	require.NoError(t, err)
	name := "tuttifs/slack/llama3-8b-" + x.Fingerprint.Key() + ".json"
	require.Equal(t, filepath.Join(os.Getenv("XDG_CACHE_HOME"), name), path)
	_, err = Load(path, &x.Fingerprint)
	require.ErrorIs(t, err, fs.ErrNotExist)
	for range 2 { // the second replaces the first
		require.NoError(t, Save(path, x))
		y, err := Load(path, &x.Fingerprint)
		require.NoError(t, err)
		require.Equal(t, x, y)
	}
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), st.Mode())
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is left")

	require.ErrorIs(t, Save(path, new(Table)), ErrTable)
	require.Error(t, Save(filepath.Join(path, "below a file"), x))
	blocked := filepath.Join(t.TempDir(), "directory")
	require.NoError(t, os.MkdirAll(filepath.Join(blocked, "full"), 0o700))
	require.Error(t, Save(blocked, x))
	left, err := filepath.Glob(filepath.Join(filepath.Dir(blocked), ".*"))
	require.NoError(t, err)
	require.Empty(t, left)

	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	_, err = Path(&x.Fingerprint)
	require.ErrorContains(t, err, "name a file")
}

// Every part of the fingerprint counts, in the key and in the error.
func TestFingerprint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	x := table(t)
	require.NoError(t, Save(path, x))
	keys := map[string]bool{x.Fingerprint.Key(): true}
	for says, change := range map[string]func(f *Fingerprint){
		`model "llama3-8b", not "b"`:             func(f *Fingerprint) { f.Model.Name = "b" },
		`layers 32, not 1`:                       func(f *Fingerprint) { f.Model.Layers = 1 },
		`heads 32, not 1`:                        func(f *Fingerprint) { f.Model.Heads = 1 },
		`kv heads 8, not 1`:                      func(f *Fingerprint) { f.Model.KVHeads = 1 },
		`head size 128, not 1`:                   func(f *Fingerprint) { f.Model.HeadSize = 1 },
		`hidden 4096, not 1`:                     func(f *Fingerprint) { f.Model.Hidden = 1 },
		`ffn 14336, not 1`:                       func(f *Fingerprint) { f.Model.FFN = 1 },
		`dtype "bf16", not "b"`:                  func(f *Fingerprint) { f.Model.DType = "b" },
		`tensor-parallel degree 1, not 2`:        func(f *Fingerprint) { f.Model.TensorParallel = 2 },
		`block tokens 64, not 1`:                 func(f *Fingerprint) { f.Model.BlockTokens = 1 },
		`GPU "NVIDIA H200", not "b"`:             func(f *Fingerprint) { f.Machine.GPU = "b" },
		`driver "580.159.04", not "b"`:           func(f *Fingerprint) { f.Machine.Driver = "b" },
		`PCIe link "32.0 GT/s x16", not "b"`:     func(f *Fingerprint) { f.Machine.PCIe = "b" },
		`CPU "a CPU", not "b"`:                   func(f *Fingerprint) { f.Machine.CPU = "b" },
		`drive profiles "paper,paper", not "b"`:  func(f *Fingerprint) { f.Machine.Drives = []string{"b"} },
		`drive profiles "paper,paper", not ""`:   func(f *Fingerprint) { f.Machine.Drives = nil },
		`layers 32, not 1; GPU "NVIDIA H200", n`: func(f *Fingerprint) { f.Model.Layers, f.Machine.GPU = 1, "b" },
	} {
		f := fingerprint()
		change(&f)
		_, err := Load(path, &f)
		require.ErrorIs(t, err, ErrFingerprint)
		require.ErrorContains(t, err, says)
		require.False(t, keys[f.Key()], says)
		keys[f.Key()] = true
	}
	f, g := fingerprint(), fingerprint()
	f.Machine.Drives, g.Machine.Drives = nil, []string{}
	require.Equal(t, f.Key(), g.Key())
	x.Fingerprint = f
	require.NoError(t, Save(path, x))
	_, err := Load(path, &g)
	require.NoError(t, err)
	for _, name := range []string{"", ".x", "a/b", "a b", strings.Repeat("a", 65)} {
		f.Model.Name = name
		require.ErrorIs(t, f.Validate(), ErrTable)
	}
	f = fingerprint()
	f.Machine.Drives = make([]string, DrivesMax+1)
	f.Machine.Drives[0] = "a,b" // would be taken for two
	f.Machine.CPU = "a\nb"
	require.ErrorContains(t, f.Validate(), "65 drives")
	require.ErrorContains(t, f.Validate(), `"a\nb"`)
	require.ErrorContains(t, f.Validate(), "comma")
}

const timesJSON = `{"layer_times_version": 1, "gpu": "NVIDIA H200", "driver": "580", "seconds": 12.5,
	"shape": {"heads": 32, "kv_heads": 8, "head_size": 128, "hidden": 4096, "ffn": 14336, "dtype": "bf16"},
	"rows": [{"input": 1, "prefix": 0, "ms": 0.5}, {"input": 512, "prefix": 1024, "ms": 3.25}]}`

const timesCSV = "input,prefix,ms\n1,0,0.5\n512, 1024,3.25\n"

func TestParseTimes(t *testing.T) {
	want := []LayerTime{{1, 0, 500 * time.Microsecond}, {512, 1024, 3250 * time.Microsecond}}
	for _, text := range []string{timesJSON, timesCSV} {
		x, err := ParseTimes([]byte(text))
		require.NoError(t, err)
		require.Equal(t, want, x.LayerTimes())
		shape := fingerprint().Model.Shape
		require.NoError(t, x.CheckShape(&shape))
		shape.FFN = 1
		if x.Shape != nil {
			require.ErrorContains(t, x.CheckShape(&shape), "ffn 14336, and the model has 1")
		}
	}
	for says, text := range map[string]string{
		"neither a JSON object": "",
		"first line must be":    "1,0,0.5\n",
		"no rows":               "input,prefix,ms\n",
		"line 2":                "input,prefix,ms\n1,0,x\n",
		"wrong number of":       "input,prefix,ms\n1,0\n",
		"row 1: input 0":        "input,prefix,ms\n0,0,1\n",
		"row 2: input 1":        "input,prefix,ms\n1,0,1\n1,-1,1\n",
		"NaN ms":                "input,prefix,ms\n1,0,NaN\n",
		"60001 ms":              "input,prefix,ms\n1,0,60001\n",
		"layer_times_version 0": `{"rows": [{"input": 1, "prefix": 0, "ms": 1}]}`,
		`unknown field "y"`:     `{"layer_times_version": 1, "y": 2}`,
		"in -1 seconds":         `{"layer_times_version": 1, "seconds": -1, "rows": []}`,
	} {
		_, err := ParseTimes([]byte(text))
		require.ErrorIs(t, err, ErrTimes, says)
		require.ErrorContains(t, err, says)
	}
	_, err := ParseTimes(make([]byte, FileBytesMax+1))
	require.ErrorIs(t, err, ErrTimes)
	_, err = ReadFile(t.TempDir())
	require.Error(t, err)
}

// What is parsed answers every question, and is written as what it was read as.
func FuzzParse(f *testing.F) {
	b, err := os.ReadFile(golden)
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(`{"table_version":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := Parse(b)
		if err != nil {
			require.ErrorIs(t, err, ErrTable)
			return
		}
		before := time.Duration(0)
		for _, n := range []int{math.MinInt, -1, 0, 1, 500, 4096, 1 << 20, math.MaxInt} {
			e := x.Lookup(n, n)
			require.GreaterOrEqual(t, e.Window, before)
			require.LessOrEqual(t, x.IO.Time(Read, e.Budget.Read), e.Window)
			require.LessOrEqual(t, x.IO.Time(Write, e.Budget.Write), e.Window)
			before = e.Window
		}
		again, err := x.Encode()
		require.NoError(t, err)
		y, err := Parse(again)
		require.NoError(t, err)
		bytes, err := y.Encode()
		require.NoError(t, err)
		require.Equal(t, string(again), string(bytes))
	})
}

// What is parsed can be made a table of, or is refused by it.
func FuzzParseTimes(f *testing.F) {
	f.Add([]byte(timesJSON))
	f.Add([]byte(timesCSV))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := ParseTimes(b)
		if err != nil {
			require.ErrorIs(t, err, ErrTimes)
			return
		}
		var y Table
		if _, err := y.SetWindows(x.LayerTimes()); err != nil {
			require.ErrorIs(t, err, ErrTable)
			return
		}
		for _, l := range x.LayerTimes() {
			window, extrapolated := y.Window(l.Input, l.Prefix)
			require.False(t, extrapolated)
			require.LessOrEqual(t, window, l.Window)
		}
	})
}

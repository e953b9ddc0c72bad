package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drivemodel"
	"tuttifs/slack"
	"tuttifs/stripe"
)

// modelProfiled runs 'tuttifs profile model' with flags in words.
func modelProfiled(t *testing.T, flags string, more ...string) (code int, out, errs string) {
	t.Helper()
	return runInProcess(t, append(append([]string{"tuttifs", "profile", "model"}, strings.Fields(flags)...), more...)...)
}

const h200Times = `{"layer_times_version": 1, "gpu": "NVIDIA H200", "driver": "580.159.04", "seconds": 12.5,
"rows": [{"input": 512, "prefix": 0, "ms": 0.4}, {"input": 4096, "prefix": 0, "ms": 3.3},
	{"input": 512, "prefix": 61440, "ms": 3.1}, {"input": 4096, "prefix": 61440, "ms": 15.7}]}`

// A table that was made in one process is found by another, and refused where the machine or the model is another.
func TestProfileModelIsReused(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	times := filepath.Join(t.TempDir(), "times.json")
	require.NoError(t, os.WriteFile(times, []byte(h200Times), 0o600))

	code, out, errs := modelProfiled(t, "--json --pcie gen5 --drive-profile paper --drive-profile paper --layer-times",
		times)
	require.Zero(t, code, errs)
	made := decode[modelProfileDocument](t, out)
	require.False(t, made.Reused)
	require.Equal(t, slack.Measured, made.Table.Source)
	require.Equal(t, "NVIDIA H200", made.Table.Fingerprint.Machine.GPU)
	require.InDelta(t, 12.5, made.Table.MeasuringSeconds, 0)
	require.Positive(t, made.Table.MakingSeconds)
	require.EqualValues(t, 4096, made.Table.IO.BytesPerToken)
	require.EqualValues(t, 256<<10, made.Table.IO.ObjectBytes)
	require.InDelta(t, 29e9, made.Table.IO.Read.DrivesBytesPerSecond, 1e3)
	require.InDelta(t, 12e9, made.Table.IO.Write.DrivesBytesPerSecond, 1e3)
	require.InDelta(t, defaultLatencyUS+130, made.Table.IO.Read.LatencyUS, 1e-9)
	require.Len(t, made.Rows, 4)
	last := made.Rows[3]
	require.EqualValues(t, 15700000, last.Window)
	require.Less(t, last.RestoreNS, int64(last.Window))
	require.Greater(t, last.Budget.Read.Objects, made.Table.IO.Objects(4096))

	fingerprint := "--pcie gen5 --drive-profile paper --drive-profile paper --driver 580.159.04 --gpu"
	r := execAs(t, "tuttifs", append(append([]string{"profile", "model", "--json"}, strings.Fields(fingerprint)...),
		"NVIDIA H200")...)
	require.Zero(t, r.code, r.stderr)
	again := decode[modelProfileDocument](t, r.stdout)
	require.True(t, again.Reused)
	made.Reused = true
	require.Equal(t, made, again)

	code, _, errs = modelProfiled(t, "--tp 2 "+fingerprint, "NVIDIA H200")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "no table of this model and machine was saved")
	code, _, errs = modelProfiled(t, "--model llama3-70b -o "+made.File+" "+fingerprint, "H100")
	require.Equal(t, 1, code)
	for _, says := range []string{made.File, `GPU "NVIDIA H200", not "H100"`, "layers 32, not 80", "hidden 4096, not 8"} {
		require.Contains(t, errs, says)
	}
}

func TestProfileModelEstimates(t *testing.T) {
	file := filepath.Join(t.TempDir(), "table.json")
	code, out, errs := modelProfiled(t, "--flops 600e12 --hbm 4e12 --inputs 512,4096 --prefixes 0,61440 -o", file)
	require.Zero(t, code, errs)
	require.Empty(t, errs)
	for _, says := range []string{"ESTIMATED", "drives without limit", "4096   61440", "saved as " + file, "took 0.0 s"} {
		require.Contains(t, out, says)
	}
	code, out, errs = modelProfiled(t, "-o", file)
	require.Zero(t, code, errs)
	require.Contains(t, out, "reused from "+file)
}

func TestProfileModelWarnsOfScatter(t *testing.T) {
	dir := t.TempDir()
	times := filepath.Join(dir, "times.csv")
	require.NoError(t, os.WriteFile(times, []byte("input,prefix,ms\n1,0,1\n2,0,0.75\n"), 0o600))
	code, out, errs := modelProfiled(t, "-o "+dir+"/table.json --layer-times", times)
	require.Zero(t, code, errs)
	require.Contains(t, out, "MEASURED")
	require.Contains(t, errs, "lowered by up to 25.0 %")
}

func TestProfileModelRefuses(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	times := filepath.Join(dir, "times.json")
	shape := `"shape": {"heads": 4, "kv_heads": 2, "head_size": 32, "hidden": 128, "ffn": 448, "dtype": "float32"}, "rows"`
	require.NoError(t, os.WriteFile(times, []byte(strings.Replace(h200Times, `"rows"`, shape, 1)), 0o600))
	hole := filepath.Join(dir, "hole.csv")
	require.NoError(t, os.WriteFile(hole, []byte("input,prefix,ms\n1,0,1\n2,8,1\n"), 0o600))
	for _, c := range []struct {
		flags string
		code  int
		says  string
	}{
		{"--layer-times x --flops 1e12", 2, "give one or the other"},
		{"--layer-times= --json", 2, "--layer-times is empty"},
		{"--flops 1e12", 2, "needs both"},
		{"--flops 0", 2, "needs both"},
		{"--layer-times x --flops 0", 2, "give one or the other"},
		{"--flops 0 --hbm 0", 2, "want positive numbers"},
		{"--flops 1e12 --hbm -1", 2, "want positive numbers"},
		{"--flops NaN --hbm 1e12", 2, "want positive numbers"},
		{"--inputs 1", 2, "--inputs is for an estimate"},
		{"--link 40", 2, "--link is of a new table"},
		{"--model x", 2, "one of deepseek-v3"},
		{"--tp 3", 2, "cannot be divided"},
		{"--block-tokens 0", 2, "tokens is 0"},
		{"--gpu " + strings.Repeat("a", 300), 2, "want 1 to 256 bytes"},
		{"--drive-profile nosuch", 1, "cloud, paper, pcie4"},
		{"--layer-times " + dir + "/none", 1, "no such file"},
		{"--layer-times " + times, 1, "heads 4, and the model has 32"},
		{"--layer-times " + hole, 1, "input 1 with prefix 8 is missing"},
		{"--model deepseek-v3 --flops 1e15 --hbm 4e12", 2, "measure its layer times"},
		{"--flops 1e15 --hbm 4e12 --inputs 0", 2, "inputs: 0"},
		{"--flops 1e15 --hbm 4e12 --inputs [1,128]", 2, `"[1" is not a number of tokens`},
		{"--flops 1e15 --hbm 4e12 --link 5e9", 2, "ring_bytes_per_second"},
		{"--flops 1e15 --hbm 4e12 --harvest 8", 2, `"8" is not BLOCKS:GB/s`},
		{"--flops 1e15 --hbm 4e12 --harvest 200:50", 2, "200 blocks, want 1 to 132"},
		{"--flops 1e15 --hbm 4e12 --sm-percent 0", 2, "sm_share_max 0"},
		{"--flops 1e15 --hbm 4e12 -o " + times + "/x", 1, "not a directory"},
		{"--flops 1e15 --hbm 4e12 -o " + times + "-none/x", 1, "its directory: no such file"},
		{"--flops 1e15 --hbm 4e12 --model llama3-8b --dtype fp8", 2, "fp8 has 1 bytes an element"},
	} {
		code, out, errs := modelProfiled(t, c.flags)
		require.Equal(t, c.code, code, c.flags+errs)
		require.Contains(t, errs, c.says)
		require.Empty(t, out)
	}
}

// Drives are as fast as the slowest times their number, for commands of the objects' size, and ranks share them.
func TestAddDrives(t *testing.T) {
	profiles := func(names ...string) (all []*drivemodel.Profile) {
		for _, name := range names {
			p, ok := drivemodel.Shipped(name)
			require.True(t, ok)
			all = append(all, p)
		}
		return all
	}
	facts := slack.IO{ObjectBytes: 16 << 10}
	addDrives(&facts, profiles("paper", "cloud"), 4)
	require.InEpsilon(t, 2*16000*(16<<10)/4, facts.Read.DrivesBytesPerSecond, 1e-9, "by the commands a second")
	require.InDelta(t, 1800, facts.Read.LatencyUS, 0)
	require.InDelta(t, 2200, facts.Write.LatencyUS, 0)

	readOnly := profiles("paper")[0]
	readOnly.Write, readOnly.Mixed = nil, nil
	facts = slack.IO{ObjectBytes: 256 << 10}
	addDrives(&facts, []*drivemodel.Profile{readOnly}, 1)
	require.InDelta(t, 14.5e9, facts.Read.DrivesBytesPerSecond, 1e3)
	require.Zero(t, facts.Write.DrivesBytesPerSecond, "nobody measured it: no limit")
	require.Zero(t, facts.Write.LatencyUS)
}

// Every preset has facts that pass, for objects of one layer and rank.
func TestFactsOfEveryModel(t *testing.T) {
	o := &profileModelOptions{link: defaultLinkGB, latency: defaultLatencyUS, harvest: defaultHarvest, sms: defaultSMs,
		smPercent: defaultSMPercent}
	for _, model := range stripe.Models {
		for _, ranks := range []int{1, 2} {
			facts, err := o.facts(model.KV(64, ranks), nil)
			require.NoError(t, err, model.Name)
			want := 2 * model.KVHeads / ranks * model.HeadDim * model.DTypeBytes
			if model.LatentRow > 0 {
				want = model.LatentRow + model.IndexerRow
			}
			require.EqualValues(t, want, facts.BytesPerToken, model.Name)
			require.EqualValues(t, 64*want, facts.ObjectBytes, model.Name)
		}
	}
}

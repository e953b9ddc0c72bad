package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gpufile"
	"tuttifs/wear"
)

func TestHostBuffer(t *testing.T) {
	var none *hostBuffer
	require.Equal(t, none, newHostBuffer(0))
	none.put(gpufile.Key{1})
	none.drop(gpufile.Key{1})
	require.False(t, none.has(gpufile.Key{1}))
	b := newHostBuffer(2)
	b.put(gpufile.Key{1})
	b.put(gpufile.Key{2})
	require.True(t, b.has(gpufile.Key{1}))
	b.put(gpufile.Key{3})
	require.False(t, b.has(gpufile.Key{2}), "used longest ago")
	require.True(t, b.has(gpufile.Key{1}))
	b.drop(gpufile.Key{1})
	b.put(gpufile.Key{3})
	require.Len(t, b.place, 1)
	require.Equal(t, 1, b.order.Len())
}

// Promises of the comparison on a trace: a buffer that holds everything gives every hit back and second touch still
// writes only what is asked for twice.
func TestReplayComparesAdmissions(t *testing.T) {
	trace := smallTrace(t, 400)
	doc := decode[admissionDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", "--admission",
		"second-touch,cost-aware,all", "--host-buffer", "0,1p", trace))
	require.Equal(t, 400, doc.Requests)
	require.Len(t, doc.Results, 5)
	all, second, buffered, aware := doc.Results[0], doc.Results[1], doc.Results[2], doc.Results[3]
	require.Equal(t, "all", all.Policy)
	require.Zero(t, all.Declined)
	require.Zero(t, all.Avoided)
	require.EqualValues(t, 1, all.HitsKept)
	require.Equal(t, all.StoredBlocks*doc.BlockBytes, all.BytesWritten)
	plain := decode[replayDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", trace))
	require.Equal(t, plain.HitBlocks, all.HitBlocks)
	require.Equal(t, plain.StoredBlocks, all.StoredBlocks)

	require.Equal(t, "second-touch", second.Policy)
	require.Zero(t, second.BufferBlocks)
	require.Less(t, second.HitBlocks, all.HitBlocks)
	require.Less(t, second.StoredBlocks, all.StoredBlocks)
	require.InDelta(t, 1-float64(second.StoredBlocks)/float64(all.StoredBlocks), second.Avoided, 1e-9)

	require.Equal(t, all.HitBlocks, buffered.HitBlocks, "every first reuse is served")
	require.Positive(t, buffered.BufferBlocks)
	require.Equal(t, second.StoredBlocks, buffered.StoredBlocks)
	require.Equal(t, all.HitBlocks-second.HitBlocks, buffered.BufferBlocks)

	require.Equal(t, "cost-aware", aware.Policy)
	require.NotNil(t, aware.Expectation)
	require.LessOrEqual(t, aware.StoredBlocks, all.StoredBlocks)

	// Wear that costs nothing: everything that is ever hit is worth it. Wear beyond all measure: nothing is.
	dear := filepath.Join(t.TempDir(), "prices.json")
	require.NoError(t, os.WriteFile(dear, []byte(`{"drive_dollars_per_tb": 1e9}`), 0o600))
	doc = decode[admissionDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", "--admission", "cost-aware",
		"--prices", dear, trace))
	require.Zero(t, doc.Results[1].StoredBlocks)
	require.EqualValues(t, 1, doc.Results[1].Avoided)
	require.Contains(t, tuttifs(t, "replay", "--metadata-only", "--admission", "second-touch", trace), "WRITES AVOIDED")
}

func TestReplayAdmissionUsage(t *testing.T) {
	trace := smallTrace(t, 2)
	refused(t, 2, "-o admission=all", "replay", "--admission", "all", trace, t.TempDir())
	refused(t, 2, "are for --admission", "replay", "--metadata-only", "--host-buffer", "1g", trace)
	refused(t, 2, `"some"`, "replay", "--metadata-only", "--admission", "some", trace)
	refused(t, 2, "not a size", "replay", "--metadata-only", "--admission", "all", "--host-buffer", "x", trace)
	refused(t, 1, "no such file", "replay", "--metadata-only", "--admission", "cost-aware", "--prices", "/none", trace)
}

func TestCostCommand(t *testing.T) {
	var doc costDocument
	doc = decode[costDocument](t, tuttifs(t, "cost", "--json"))
	prices := wear.DefaultPrices()
	require.Equal(t, prices, doc.Prices)
	require.Equal(t, prices.Costs(), doc.Costs)

	file := filepath.Join(t.TempDir(), "site.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"gpus": 8, "ssd_hit_rate": 0.5}`), 0o600))
	doc = decode[costDocument](t, tuttifs(t, "cost", "--json", "--ssd-hit-rate", "0.6", "--prices", file))
	prices.GPUs, prices.SSDHit = 8, 0.6
	require.Equal(t, prices, doc.Prices, "flags count more than the file, the file more than the defaults")

	out := tuttifs(t, "cost", "--tokens-per-second", "1000")
	for _, variant := range wear.Variants {
		require.Contains(t, out, variant)
	}
	require.Contains(t, out, "drive writes per day")
	refused(t, 2, "ssd_hit_rate", "cost", "--ssd-hit-rate", "2")
	refused(t, 2, "not a number", "cost", "--gpus", "many")
	refused(t, 2, "unexpected argument", "cost", "x")
	refused(t, 1, "unknown field", "cost", "--prices", smallTrace(t, 1))
}

func TestEnduranceFlag(t *testing.T) {
	var f enduranceFlag
	require.False(t, f.given())
	require.NoError(t, f.Set("1dwpd"))
	require.NoError(t, f.Set("2:600tbw"))
	for _, bad := range []string{"", "x", "x:1dwpd", "70000:1dwpd", "-1:1dwpd", "2:", ":"} {
		require.Error(t, f.Set(bad), bad)
	}
	require.True(t, f.given())
	require.Equal(t, wear.Endurance{DWPD: 1}, f.of(0))
	require.Equal(t, wear.Endurance{Bytes: 600e12}, f.of(2))
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
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
	require.Equal(t, 1, b.Len())
}

// Promises of the comparison on a trace: a buffer that holds everything gives every hit back and second touch still
// writes only what is asked for twice.
func TestReplayComparesAdmissions(t *testing.T) {
	trace := smallTrace(t, 100)
	doc := decode[admissionDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", "--admission",
		"second-touch,cost-aware,all", "--host-buffer", "0,1p", trace))
	require.Equal(t, 100, doc.Requests)
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
	refused(t, 2, "is for --admission", "replay", "--metadata-only", "--host-buffer", "1g", trace)
	refused(t, 2, "is one size", "replay", "--host-buffer", "1g,2g", trace, t.TempDir())
	refused(t, 2, "is for --admission", "replay", "--prices", "x", trace, t.TempDir())
	refused(t, 2, `"some"`, "replay", "--metadata-only", "--admission", "some", trace)
	refused(t, 2, "not a size", "replay", "--metadata-only", "--admission", "all", "--host-buffer", "x", trace)
	refused(t, 2, "for --admission cost-aware", "replay", "--metadata-only", "--admission", "all", "--prices", "x", trace)
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
	refused(t, 2, "gpus is 1e+308", "cost", "--gpus", "1e308")
	require.NotContains(t, tuttifs(t, "cost", "--gpu-dollars-per-hour", "0"), "NaN")
	refused(t, 2, "not a number", "cost", "--gpus", "many")
	refused(t, 1, "unknown field", "cost", "--prices", smallTrace(t, 1))
}

// On a mount: what is asked for once is not stored and fails nothing, what is asked for twice is, and what is written
// is counted by drive, in the status files, in 'info --wear' and in what a rating makes of it.
func TestAdmissionOfMount(t *testing.T) {
	paths := formatted(t, 2, "256m")
	dir := mounted(t, paths[0], "-o", "admission=second-touch,admission_memory=64k,admission=other:all")
	trace := smallTrace(t, 30)
	args := []string{"replay", "--json", "--scale", "1024", trace, dir}
	first := decode[replayDocument](t, tuttifs(t, args...))
	require.Zero(t, first.VerifyFailures)
	require.Positive(t, first.DeclinedBlocks)
	require.Equal(t, first.NotStoredBlocks, first.DeclinedBlocks)
	require.Equal(t, first.Blocks, first.HitBlocks+first.StoredBlocks+first.DeclinedBlocks)
	second := decode[replayDocument](t, tuttifs(t, args...))
	require.Zero(t, second.VerifyFailures+second.DeclinedBlocks)
	require.Equal(t, second.Blocks, second.HitBlocks+second.StoredBlocks)
	require.Equal(t, 1.0, decode[replayDocument](t, tuttifs(t, args...)).HitRate)

	var named daemon.OptionsDocument
	require.NoError(t, readStatus(dir, "options", &named))
	require.Equal(t, map[string]string{"other": "all"}, named.AdmissionOf)
	other := decode[replayDocument](t, tuttifs(t, append(args, "--pool", "other")...))
	require.Zero(t, other.DeclinedBlocks, "a pool with a policy of its own")
	info := decode[infoDocument](t, tuttifs(t, "info", "--wear", "--json", "--endurance", "1:600tbw", dir))
	written := uint64(0)
	for i := range info.Wear {
		written += info.Wear[i].PayloadWritten
	}
	require.GreaterOrEqual(t, written, first.BytesWritten+second.BytesWritten+other.BytesWritten)
	require.Len(t, info.Wear, 2)
	for i, w := range info.Wear {
		require.EqualValues(t, i, w.Index)
		require.Positive(t, w.PayloadWritten)
		require.Positive(t, w.MetadataWritten)
		require.Greater(t, w.Amplification, 1.0)
		require.Positive(t, w.HourRate)
		require.Positive(t, w.HourDWPD)
		require.Nil(t, w.Log)
		require.Equal(t, "not an NVMe drive", w.LogLack)
	}
	require.Nil(t, info.Wear[0].YearsLeft)
	require.EqualValues(t, 600e12, info.Wear[1].RatedBytes)
	require.Positive(t, *info.Wear[1].YearsLeft)
	for _, p := range info.Pools {
		require.Equal(t, map[string]string{"other": "all", "replay-llama3-8b": "second-touch"}[p.Name], p.Admission)
	}
	require.Equal(t, first.DeclinedBlocks, info.Stats["replay-llama3-8b"].Declined)
	out := tuttifs(t, "info", "--wear", "--endurance", "1dwpd", dir)
	for _, want := range []string{"FILES WRITTEN", "DWPD LAST HOUR", "YEARS LEFT", "not an NVMe drive"} {
		require.Contains(t, out, want)
	}
	refused(t, 2, "--endurance is for --wear", "info", "--endurance", "1dwpd", dir)
	refused(t, 2, "write drive writes per day", "info", "--wear", "--endurance", "5", dir)

	// A copy by hand is wanted, whatever the policy: a file whose block engines did not ask for twice.
	pool := filepath.Join(dir, "replay-llama3-8b")
	var key string
	for _, file := range strings.Fields(tuttifs(t, "ls", dir, "replay-llama3-8b")) {
		if len(file) == 64 {
			key = file
			break
		}
	}
	path := filepath.Join(pool, "blocks", key[:2], key)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	copied := key[:63] + map[bool]string{true: "1", false: "0"}[key[63] == '0']
	require.NoError(t, os.WriteFile(filepath.Join(pool, "blocks", copied[:2], copied), b, 0o600))
	tuttifs(t, "umount", dir)
	require.Contains(t, tuttifs(t, "info", "--wear", paths[0], paths[1]), "drive 1 has no log of its own")
	refused(t, 1, "admission", "mount", paths[0], dir, "-o", "admission=none")
	refused(t, 1, "from 64k to 1g", "mount", paths[0], dir, "-o", "admission_memory=1k")
	refused(t, 1, "no admission policy needs it", "mount", paths[0], dir, "-o", "admission_memory=1m")
	prices := filepath.Join(t.TempDir(), "prices.json")
	require.NoError(t, os.WriteFile(prices, []byte(`{"gpus": 8}`), 0o600))
	refused(t, 1, "for admission=cost-aware", "mount", paths[0], dir, "-o", "admission=second-touch,prices="+prices)
	refused(t, 1, "1dwpd", "mount", paths[0], dir, "-o", "endurance=5")
	dir = mounted(t, paths[0], "-o", "admission=cost-aware,endurance=1dwpd,prices="+prices)
	var options daemon.OptionsDocument
	require.NoError(t, readStatus(dir, "options", &options))
	require.Equal(t, "cost-aware", options.Admission)
	require.EqualValues(t, 8, options.Prices.GPUs)
	require.Equal(t, wear.FilterBytes, options.AdmissionMemory)
	var stats daemon.StatsDocument
	require.NoError(t, readStatus(dir, "stats", &stats))
	require.NotNil(t, stats.Expectation)
	require.Positive(t, stats.Wear["0"].RatedBytes)
	require.Contains(t, tuttifs(t, "info", "--wear", dir), "YEARS LEFT")
	tuttifs(t, "umount", dir)
}

// A host buffer that is used does what the simulated one says: it gives every hit back, with every byte verified, while
// the drives are written only what is asked for twice.
func TestReplayKeepsWhatIsDeclined(t *testing.T) {
	trace := smallTrace(t, 60)
	simulated := decode[admissionDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", "--admission",
		"second-touch", "--host-buffer", "0,1t", "--scale", "1024", trace)).Results
	all, without, with := simulated[0], simulated[1], simulated[2]
	require.Less(t, without.HitBlocks, all.HitBlocks)
	require.Equal(t, all.HitBlocks, with.HitBlocks)
	for _, c := range []struct {
		flags []string
		hits  uint64
	}{{nil, without.HitBlocks}, {[]string{"--host-buffer", "256m"}, all.HitBlocks}} {
		paths := formatted(t, 2, "256m")
		dir := mounted(t, paths[0], "-o", "admission=second-touch")
		r := replayed(t, trace, dir, c.flags...)
		require.Equal(t, c.hits, r.HitBlocks)
		require.Zero(t, r.VerifyFailures)
		if c.flags == nil {
			require.Nil(t, r.HostBuffer)
			continue
		}
		k := r.HostBuffer
		require.Equal(t, k.Declined, k.Kept)
		require.Positive(t, k.Hit)
		require.LessOrEqual(t, k.Written, k.Hit)
		require.Zero(t, k.Bad)
		require.Zero(t, k.Evicted)
		require.Positive(t, k.Spared)
		tuttifs(t, "umount", dir)
	}
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The bench runs and fills its report; how fast is not a test's business.
func TestBenchRings(t *testing.T) {
	o := &benchRingsOptions{json: true, size: 64 << 20, rounds: 1, period: 20 * time.Millisecond, dir: t.TempDir()}
	_, err := exec.LookPath("fio")
	o.skipFile = err != nil
	var out, warnings bytes.Buffer
	err = o.run(t.Context(), &env{stdout: &out, stderr: &warnings, prog: "tuttifs bench rings"})
	require.NoError(t, err)
	var r ringsReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Equal(t, outputVersion, r.OutputVersion)
	require.Positive(t, r.EmptyCommandsPerSecond)
	require.Positive(t, r.RAMVsMemcpy)
	require.Len(t, r.Empty, 2)
	for _, row := range append(r.RAM, r.File...) {
		require.Positive(t, row.RingGBs)
		require.Positive(t, row.OtherGBs)
		require.Positive(t, row.CPUPerGB)
	}
	if !o.skipFile {
		require.Len(t, r.File, 4*len(benchObjects))
		require.Positive(t, *r.FileVsFio)
	}
	o.json = false
	out.Reset()
	require.NoError(t, r.print(&env{stdout: &out, stderr: &warnings}))
	require.Contains(t, out.String(), "at worst")
}

func TestBenchRingsRefusesBadSizes(t *testing.T) {
	o := &benchRingsOptions{size: 1 << 20}
	var usage *usageError
	require.ErrorAs(t, o.run(t.Context(), &env{}), &usage)
	o = &benchRingsOptions{size: 1 << 30, threads: -1}
	require.ErrorAs(t, o.run(t.Context(), &env{}), &usage)
}

func TestPairs(t *testing.T) {
	var order string
	a, b, ratio, err := pairs(t.Context(), 3,
		func() (float64, error) { order += "a"; return float64(len(order)), nil },
		func() (float64, error) { order += "b"; return 2, nil })
	require.NoError(t, err)
	require.Equal(t, "abbaab", order)
	require.Equal(t, []float64{4, 2, 2}, []float64{a, b, ratio})

	fault := errors.New("fault")
	_, _, _, err = pairs(t.Context(), 1, func() (float64, error) { return 0, fault }, nil)
	require.ErrorIs(t, err, fault)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, _, err = pairs(ctx, 1, nil, nil)
	require.ErrorIs(t, err, context.Canceled)
}

func TestMedian(t *testing.T) {
	require.Zero(t, median(nil))
	require.Equal(t, 2.0, median([]float64{9, 1, 2}))
	require.Equal(t, 1.5, median([]float64{2, 9, 1, 0}))
}

// A modelled drive is never faster than its profile, however fast the machine is; how close it comes is for the bench.
func TestBenchRingsWithAProfile(t *testing.T) {
	o := &benchRingsOptions{json: true, size: 64 << 20, rounds: 1, period: 40 * time.Millisecond,
		profile: slowProfile(t, 2_000_000_000)}
	var out bytes.Buffer
	require.NoError(t, o.run(t.Context(), &env{stdout: &out, stderr: &out}))
	var r modelReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Equal(t, "slow", r.Profile.Name)
	require.Len(t, r.Rows, 3*len(benchObjects))
	for _, row := range r.Rows {
		require.Positive(t, row.MachineGBs)
		require.Positive(t, row.RingGBs)
		require.InDelta(t, 2, row.ProfileGBs, 1e-6)
		require.Less(t, row.Ratio, 1.001)
		require.Equal(t, row.Verb != "read", row.WriteShare > 0)
	}
	out.Reset()
	require.NoError(t, r.print(&env{stdout: &out}))
	require.Contains(t, out.String(), "slow: 2 GB/s read")
	o.profile = "nosuch"
	require.Error(t, o.run(t.Context(), &env{}))
}

package main

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHistogramBuckets(t *testing.T) {
	last := -1
	for _, ns := range []uint64{0, 1, 31, 32, 33, 63, 64, 65, 1000, 1 << 20, 1<<20 + 1<<15, 1 << 40, 1 << 62} {
		b := bucketOf(ns)
		require.Greater(t, b, last-1)
		require.GreaterOrEqual(t, uint64(bucketTop(b)), ns)
		require.LessOrEqual(t, uint64(bucketTop(b)), ns+ns/histogramSteps+1)
		last = b
	}
}

func TestHistogramQuantiles(t *testing.T) {
	var h histogram
	require.Zero(t, h.quantile(0.5))
	rng := rand.New(rand.NewPCG(1, 2))
	var all []time.Duration
	for range 10_000 {
		d := time.Duration(rng.ExpFloat64() * 1e6)
		h.add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0.01, 0.5, 0.9, 0.99} {
		require.InEpsilon(t, all[int(q*float64(len(all)))-1], h.quantile(q), 1.0/histogramSteps)
	}
	require.Equal(t, all[len(all)-1], h.quantile(1))
	require.Equal(t, all[len(all)-1], h.max)
}

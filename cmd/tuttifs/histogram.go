package main

import (
	"math/bits"
	"time"
)

// histogram counts durations in buckets of at most 1/32 relative width: constant memory for any number of samples.
// The zero value is empty.
type histogram struct {
	buckets [60 * histogramSteps]uint64
	count   uint64
	max     time.Duration
}

const (
	histogramBits  = 5
	histogramSteps = 1 << histogramBits
)

// bucketOf is the identity below histogramSteps nanoseconds; above, every octave has histogramSteps buckets.
func bucketOf(ns uint64) int {
	if ns < histogramSteps {
		return int(ns)
	}
	octave := bits.Len64(ns) - histogramBits - 1
	return octave<<histogramBits + int(ns>>octave)
}

// bucketTop is the largest duration of a bucket.
func bucketTop(b int) time.Duration {
	if b < histogramSteps {
		return time.Duration(b)
	}
	octave := b>>histogramBits - 1
	return time.Duration(uint64(b&(histogramSteps-1)|histogramSteps)+1)<<octave - 1
}

func (h *histogram) add(d time.Duration) {
	d = max(d, 0)
	h.buckets[bucketOf(uint64(d))]++
	h.count++
	h.max = max(h.max, d)
}

// merge adds the samples of another histogram.
func (h *histogram) merge(o *histogram) {
	for b, n := range o.buckets {
		h.buckets[b] += n
	}
	h.count += o.count
	h.max = max(h.max, o.max)
}

// quantile returns the upper end of the bucket that holds the q-quantile, at most the largest sample; 0 if empty.
func (h *histogram) quantile(q float64) time.Duration {
	rank := max(uint64(q*float64(h.count)+0.5), 1)
	for b, n := range h.buckets {
		if n >= rank {
			return min(bucketTop(b), h.max)
		}
		rank -= n
	}
	return h.max
}

// latencyDocument is a histogram in JSON, in microseconds.
type latencyDocument struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50_us"`
	P90   float64 `json:"p90_us"`
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

func (h *histogram) document() latencyDocument {
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	return latencyDocument{h.count, us(h.quantile(0.5)), us(h.quantile(0.9)), us(h.quantile(0.99)), us(h.max)}
}

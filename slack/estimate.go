package slack

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// ErrEstimate: a model whose layer times cannot be computed from what is known of it.
var ErrEstimate = errors.New("slack: no estimate")

// Rates are what a GPU reaches, not what its data sheet says.
type Rates struct {
	FLOPs float64 // floating point operations a second
	HBM   float64 // bytes a second
}

// Estimate computes the time of one layer on one rank: dense layers with a gated feed-forward network and grouped
// heads. The linear part and attention are each bound by operations or by memory, whichever takes longer.
func (m *Model) Estimate(r Rates, elementBytes, input, prefix int) (time.Duration, error) {
	switch {
	case m.Heads < 1 || m.KVHeads < 1 || m.HeadSize < 1 || m.Hidden < 1 || m.FFN < 1:
		return 0, fmt.Errorf("%w: %s is no dense model of grouped heads: measure its layer times", ErrEstimate, m.Name)
	case !(r.FLOPs >= 1e6 && r.FLOPs <= 1e20 && r.HBM >= 1e6 && r.HBM <= 1e20):
		return 0, fmt.Errorf("%w: %v operations and %v bytes a second, want 1e6 to 1e20 of either", ErrEstimate, r.FLOPs,
			r.HBM)
	}
	n, p, tp := float64(input), float64(prefix), float64(m.TensorParallel)
	q := float64(m.Heads*m.HeadSize) / tp
	kv := float64(max(1, m.KVHeads/m.TensorParallel) * m.HeadSize)    // ranks share a head where there are fewer
	weights := float64(m.Hidden) * (2*q + 2*kv + 3*float64(m.FFN)/tp) // Q, O; K, V; gate, up, down
	// A new token attends to the prefix, to those before it, and to itself.
	pairs := n*p + n*(n+1)/2
	// A multiplication and an addition count as two operations; attention has Q times K and scores times V.
	linear := max(2*weights*n/r.FLOPs, weights*float64(elementBytes)/r.HBM)
	attention := max(4*q*pairs/r.FLOPs, 2*kv*(n+p)*float64(elementBytes)/r.HBM)
	ns := 1e9 * (linear + attention)
	if !(ns <= float64(WindowMax)) {
		return 0, fmt.Errorf("%w: input %d with prefix %d would take %.3g s a layer", ErrEstimate, input, prefix, ns/1e9)
	}
	return max(WindowMin, time.Duration(math.Floor(ns))), nil
}

// EstimateAll fills a grid.
func (m *Model) EstimateAll(r Rates, elementBytes int, inputs, prefixes []int) (all []LayerTime, err error) {
	for _, input := range inputs {
		for _, prefix := range prefixes {
			window, err := m.Estimate(r, elementBytes, input, prefix)
			if err != nil {
				return nil, err
			}
			all = append(all, LayerTime{input, prefix, window})
		}
	}
	return all, nil
}

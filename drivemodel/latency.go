package drivemodel

import "math/rand/v2"

// quantiles are the figures at the places of quantilePlaces.
func (l *Latency) quantiles() [6]float64 {
	return [...]float64{l.MinUS, l.P50US, l.P90US, l.P99US, l.P999US, l.MaxUS}
}

var quantilePlaces = [6]float64{0, 0.5, 0.9, 0.99, 0.999, 1}

// sampler draws latencies, the same ones in the same order for the same seed.
type sampler struct {
	random rand.PCG
	ns     [6]float64
}

func newSampler(d *Direction, seed, stream uint64) (s sampler) {
	s.random = *rand.NewPCG(seed, stream)
	if d != nil {
		for i, us := range d.Latency.quantiles() {
			s.ns[i] = us * 1e3
		}
	}
	return s
}

// next is a latency in nanoseconds: the distribution's inverse at a uniform number.
func (s *sampler) next() int64 {
	u := float64(s.random.Uint64()>>11) / (1 << 53)
	i := 1
	for i < len(quantilePlaces)-1 && u >= quantilePlaces[i] {
		i++
	}
	x0, x1 := quantilePlaces[i-1], quantilePlaces[i]
	return int64(s.ns[i-1] + (s.ns[i]-s.ns[i-1])*(u-x0)/(x1-x0))
}

package gio

import (
	"time"

	"tuttifs/slack"
)

// Offer is the comparison of restoring a prefix with computing it again.
type Offer struct {
	// Load: restore it. True also where nothing is known.
	Load bool
	// Known: windows and rates are, and the times below say something.
	Known bool
	// Restore is the pass over the new tokens with the restore of the others; Recompute the pass over all of them.
	Restore, Recompute time.Duration
}

// offer weighs what checkPass lets pass.
func (p *policy) offer(input, cached, layers int) Offer {
	o := Offer{Load: true}
	if cached == 0 {
		return o
	}
	all, sure := p.windows.layer(min(input+cached, slack.LengthMax), 0)
	restore := p.loaded(input, cached, layers)
	if !sure || restore == 0 {
		return o
	}
	o.Known = true
	o.Restore = time.Duration(restore + p.read.takes(p.reads.left)) // what is queued comes first
	o.Recompute = time.Duration(int64(layers-p.begins(layers)) * all)
	p.stats.Offers++
	if o.Load = o.Restore <= o.Recompute; !o.Load {
		p.stats.Refused++
	}
	return o
}

// loaded is the time of a pass that restores its prefix ahead of its layers: the first layer's restore, which nothing
// hides; then each layer takes its window, or the next one's restore where that is longer. 0: not known.
func (p *policy) loaded(input, prefix, layers int) int64 {
	window, sure := p.windows.layer(input, prefix)
	if !sure || p.bytesAToken == 0 {
		return 0
	}
	restore := p.read.takes(int64(float64(prefix) * p.bytesAToken))
	first := int64(0)
	if restore > 0 {
		first = p.read.latency + restore
	}
	return first + int64(layers-p.begins(layers)-1)*max(window, restore) + window
}

// loadedLeast is how much of its prefix a pass must have read for its time to be compared with the estimate, in parts
// of 16: engines have some of a prefix in their own cache.
const loadedLeast = 15

// noteLoad compares the estimate of a pass that is done with what it took.
func (p *policy) noteLoad(now int64) {
	s := &p.pass
	if s.prefix == 0 || s.bytes == 0 {
		return
	}
	aToken := float64(s.bytes) / float64(s.prefix) / float64(s.layers-p.begins(s.layers))
	if p.c.Table == nil {
		p.bytesAToken = max(p.bytesAToken, aToken)
	}
	if s.predicted == 0 || aToken < p.bytesAToken*loadedLeast/16 {
		return
	}
	took := now - s.begin
	p.stats.Estimates++
	p.stats.Estimated += time.Duration(s.predicted)
	p.stats.Took += time.Duration(took)
	p.stats.EstimateError += time.Duration(max(took-s.predicted, s.predicted-took))
}

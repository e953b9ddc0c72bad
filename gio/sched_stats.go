package gio

import "time"

// SchedulerStats counts since the start.
type SchedulerStats struct {
	Passes, Layers, DecodeSteps uint64

	// Bubble is the time that compute stood because a layer's reads were not there, FirstBubble the part of first layers,
	// before which there is nothing to hide behind; Bubbles counts the layers.
	Bubble, FirstBubble time.Duration
	Bubbles             uint64

	// ReadHidden and ReadExposed are the time that reads were in flight while compute did not stand, and did. WriteTime
	// is that of deferred writes.
	ReadHidden, ReadExposed, WriteTime time.Duration

	Deferred      uint64         // objects that went through the store buffer
	DeferredBytes uint64         // and their bytes
	Issued        [causes]uint64 // bytes of deferred writes that went to the drives, by cause
	Backlog       uint64         // bytes that wait, as was last heard
	BacklogAge    time.Duration  // of the oldest of them
	OldestAge     time.Duration  // that any has reached

	// Overruns counts windows and decode steps at whose end writes were in flight that were to have ended. Beside counts
	// pieces of writes that were issued while reads of the session were in flight: turns of old ones, mostly.
	Overruns, Beside uint64

	// Offers were answered from what is known, Refused of them were not worth restoring. Estimates counts passes of
	// which the time was estimated before, with its sum, the sum of what they took and that of the errors' sizes.
	Offers, Refused, Estimates     uint64
	Estimated, Took, EstimateError time.Duration

	// What is learned, as factors: the truth for one of the table, or of the figures that stand for a table.
	WindowFactor, ReadFactor, WriteFactor float64
	// Window is that of the layer or decode step that is under way, or was last; 0: not known.
	Window time.Duration

	BacklogOldest time.Duration // when the oldest of the backlog came, on the executor's clock
}

// snapshot is what is counted up to now.
func (p *policy) snapshot(now int64) SchedulerStats {
	now = p.account(now)
	s := p.stats
	if s.Backlog > 0 {
		s.BacklogAge = max(0, time.Duration(now)-s.BacklogOldest)
	}
	s.WindowFactor, s.ReadFactor, s.WriteFactor = 1, p.read.rate.factor(), p.write.rate.factor()
	if p.c.Table != nil {
		s.WindowFactor = p.windows.last.factor()
	}
	s.Window = time.Duration(p.pass.window)
	return s
}

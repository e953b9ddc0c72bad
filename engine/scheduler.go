package engine

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/slack"
)

// SchedulerOptions of a session. What a user of the session never tells of compute is taken for idleness: reads then go
// at once, and deferred writes whenever there are none.
type SchedulerOptions struct {
	// Table is the file of a slack table, as "tuttifs profile model" makes it. Empty: windows and rates are learned.
	Table string
	// Switches for ablation, as in gio.SchedulerConfig.
	Off, NoBudget, ReadsNotFirst bool
}

// open reads the table and makes the scheduler.
func (o *SchedulerOptions) open() (*gio.Scheduler, error) {
	c := gio.SchedulerConfig{Off: o.Off, NoBudget: o.NoBudget, ReadsNotFirst: o.ReadsNotFirst}
	if o.Table != "" {
		b, err := slack.ReadFile(o.Table)
		if err == nil {
			c.Table, err = slack.Parse(b)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: slack table %s: %w", ErrInvalid, o.Table, err)
		}
	}
	return gio.NewScheduler(c)
}

// about is the part of Describe about it.
func (o *SchedulerOptions) about(s *gio.Scheduler) string {
	if o.Off {
		return "scheduler off"
	}
	about := "scheduler learns"
	if t := s.Table(); t != nil {
		f := &t.Fingerprint
		about = fmt.Sprintf("scheduler with a table of %s on %s, %s", f.Model.Name, f.Machine.GPU, t.Source)
	}
	if o.NoBudget {
		about += ", without budgets"
	}
	if o.ReadsNotFirst {
		about += ", reads not first"
	}
	return about
}

// Scheduler is told what compute does, and says what is worth restoring.
func (s *Session) Scheduler() *gio.Scheduler { return s.paces }

// errNoEvents: the CPU executor has no thread that could look for an event.
var errNoEvents = errors.New("engine: events of streams are for sessions with a GPU")

// LayerDone says that compute has done a layer of the pass, or will have when an event has come, if it is not nil. The
// event was recorded before, and is left alone until the second pass after this one begins.
func (s *Session) LayerDone(layer int, after *cuda.Event) error {
	switch {
	case after == nil:
		s.paces.LayerDone(layer, nil)
	case s.gpu.ring == nil:
		return fmt.Errorf("%w: %w", ErrInvalid, errNoEvents)
	default:
		s.paces.LayerDone(layer, after)
	}
	return nil
}

// publish shows the daemon what was counted.
func (s *Session) publish() {
	nanos := func(d time.Duration) uint64 { return uint64(max(0, d)) }
	c, b := s.paces.Stats(), s.ring.StoreStats()
	page := ioctl.EngineCounters{
		Version: ioctl.EngineCountersVersion, Passes: c.Passes, Layers: c.Layers, DecodeSteps: c.DecodeSteps,
		Bubbles: c.Bubbles, BubbleNanos: nanos(c.Bubble), FirstBubbleNanos: nanos(c.FirstBubble),
		ReadHiddenNanos: nanos(c.ReadHidden), ReadExposedNanos: nanos(c.ReadExposed), WriteNanos: nanos(c.WriteTime),
		DeferredObjects: c.Deferred, DeferredBytes: c.DeferredBytes,
		IssuedOffBytes: c.Issued[gio.CauseOff], IssuedAgeBytes: c.Issued[gio.CauseAge],
		IssuedHighBytes: c.Issued[gio.CauseHigh], IssuedWindowBytes: c.Issued[gio.CauseWindow],
		IssuedDecodeBytes: c.Issued[gio.CauseDecode], IssuedIdleBytes: c.Issued[gio.CauseIdle],
		BacklogBytes: b.Bytes, BacklogAgeNanos: b.OldestNanos, OldestAgeNanos: nanos(c.OldestAge),
		Overruns: c.Overruns, Beside: c.Beside, Offers: c.Offers, OffersRefused: c.Refused, Estimates: c.Estimates,
		EstimatedNanos: nanos(c.Estimated), TookNanos: nanos(c.Took), ErrorNanos: nanos(c.EstimateError),
		StoreBytes: b.Size, StoreFilledBytes: b.Fill, StoreRefused: b.Refused, StoreBlockedNanos: b.BlockedNanos,
	}
	page.Publish(s.attach.Queues)
}

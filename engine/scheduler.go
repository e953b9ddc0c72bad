package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/slack"
	"tuttifs/stripe"
)

// SchedulerOptions of a session. What a user of the session never tells of compute is taken for idleness: reads then go
// at once, and deferred writes whenever there are none.
type SchedulerOptions struct {
	// Table is the file of a slack table, as "tuttifs profile model" makes it. Empty: windows and rates are learned. One
	// of another machine, or of a model with another cache than a pool of the session, is refused: slack.ErrFingerprint.
	Table string
	// AnyTable takes it all the same. Session.Describe says what differs.
	AnyTable bool
	// Switches for ablation, as in gio.SchedulerConfig.
	Off, NoBudget, ReadsNotFirst bool
}

// open reads the table and makes the scheduler.
func (o *SchedulerOptions) open() (*gio.Scheduler, error) {
	if o.AnyTable && o.Table == "" {
		return nil, fmt.Errorf("%w: any slack table is allowed, but none is given", ErrInvalid)
	}
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

// checkMachine compares the table's machine with this one, and the GPU with the session's, if it has one.
func (s *Session) checkMachine(o *SchedulerOptions) error {
	t := s.paces.Table()
	if t == nil {
		return nil
	}
	var here slack.Machine
	if s.gpu.context != nil {
		device := s.gpu.context.Device()
		here = slack.Here("/", device.PCIBusID())
		here.GPU = device.Name()
	} else {
		here = slack.Here("/", "")
		here.FillWords() // a GPU that is not there is not the table's
	}
	err := t.Fingerprint.CheckMachine(&here, int(s.attach.Reply.Drives))
	switch {
	case err == nil:
		return nil
	case o.AnyTable:
		s.about += "; " + err.Error() + ", which was asked for"
		return nil
	}
	return fmt.Errorf("%w: slack table %s: %w, or give none, or allow any (AnyTable, TUTTIFS_ANY_SLACK_TABLE)", ErrInvalid,
		o.Table, err)
}

// checkModel compares the table's model with what a pool tells of its own.
func (s *Session) checkModel(spec *PoolSpec) error {
	t := s.paces.Table()
	if t == nil || s.anyTable {
		return nil
	}
	var identity struct {
		TP int `json:"tp"`
		PP int `json:"pp"`
	}
	if err := json.Unmarshal(spec.Identity, &identity); err != nil {
		return fmt.Errorf("%w: the pool's identity: %w", ErrInvalid, err)
	}
	layers, bytes := layersOf(&spec.Geometry)
	cache := slack.Cache{TensorParallel: identity.TP, BlockTokens: int(spec.TokensPerFile),
		BytesPerToken: bytes / int64(max(spec.TokensPerFile, 1))}
	if spec.Family == "" && identity.PP <= 1 {
		cache.Layers = layers
	}
	if err := t.CheckCache(&cache); err != nil {
		return fmt.Errorf("%w: slack table: %w, or make the session without a table, or allow any "+
			"(AnyTable, TUTTIFS_ANY_SLACK_TABLE)", ErrInvalid, err)
	}
	return nil
}

// layersOf counts the layers of rank 0, and has the bytes of each; 0 where they differ.
func layersOf(g *stripe.Geometry) (layers int, each int64) {
	bytes := map[uint16]int64{}
	for i := range g.Objects {
		if o := &g.Objects[i]; o.Rank == 0 && !o.IsTrailer() {
			bytes[o.Layer] += int64(o.Bytes())
		}
	}
	for _, n := range bytes {
		if each != 0 && n != each {
			return len(bytes), 0
		}
		each = n
	}
	return len(bytes), each
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
	s.countKept(&page)
	page.DoorbellWrites, page.DoorbellsSaved = s.ring.Doorbells()
	page.Publish(s.attach.Queues)
}

// countKept adds up what the session's pools have counted of blocks that were declined.
func (s *Session) countKept(page *ioctl.EngineCounters) {
	s.keeping.Lock()
	defer s.keeping.Unlock()
	for _, k := range s.keepers {
		x := k.report()
		page.DeclinedBlocks, page.KeptBlocks = page.DeclinedBlocks+x.Declined, page.KeptBlocks+x.Kept
		page.KeptHits, page.KeptWritten = page.KeptHits+x.Hits, page.KeptWritten+x.Written
		page.KeptEvicted, page.SparedBytes = page.KeptEvicted+x.Evicted, page.SparedBytes+x.Spared()
		page.KeptFailed, page.KeptBad = page.KeptFailed+x.Failed, page.KeptBad+x.Bad
	}
}

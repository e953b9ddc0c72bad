package daemon

import (
	"github.com/prometheus/client_golang/prometheus"

	"tuttifs/ioctl"
)

// EngineStats are what a session's processes say of their schedulers and store buffers, since they attached: figures
// that the mount shows and does not vouch for. What is read and written is in IOStats.
type EngineStats struct {
	Passes                 uint64  `json:"passes"`
	Layers                 uint64  `json:"layers"`
	DecodeSteps            uint64  `json:"decode_steps"`
	Bubbles                uint64  `json:"bubbles"`
	BubbleSeconds          float64 `json:"bubble_seconds"`
	FirstBubbleSeconds     float64 `json:"first_bubble_seconds"` // of them before first layers
	ReadHiddenSeconds      float64 `json:"read_hidden_seconds"`
	ReadExposedSeconds     float64 `json:"read_exposed_seconds"`
	WriteSeconds           float64 `json:"write_seconds"`
	DeferredObjects        uint64  `json:"deferred_objects"`
	DeferredBytes          uint64  `json:"deferred_bytes"`
	Issued                 Issued  `json:"issued_bytes"`
	BacklogBytes           uint64  `json:"backlog_bytes"`
	BacklogAgeSeconds      float64 `json:"backlog_age_seconds"`
	OldestAgeSeconds       float64 `json:"oldest_age_seconds"`
	Overruns               uint64  `json:"overruns"`
	WritesBesideReads      uint64  `json:"writes_beside_reads"`
	Offers                 uint64  `json:"offers"`
	OffersRefused          uint64  `json:"offers_refused"`
	Estimates              uint64  `json:"estimates"`
	EstimatedSeconds       float64 `json:"estimated_seconds"`
	EstimatesTookSeconds   float64 `json:"estimates_took_seconds"`
	EstimatesErrorSeconds  float64 `json:"estimates_error_seconds"`
	StoreBufferBytes       uint64  `json:"store_buffer_bytes"`
	StoreBufferFilledBytes uint64  `json:"store_buffer_filled_bytes"`
	StoresRefused          uint64  `json:"stores_refused"`
	StoresBlockedSeconds   float64 `json:"stores_blocked_seconds"`
	DeclinedBlocks         uint64  `json:"declined_blocks"` // where processes keep such in their memory
	KeptBlocks             uint64  `json:"kept_blocks"`
	KeptHits               uint64  `json:"kept_hits"`
	KeptWritten            uint64  `json:"kept_written"`
	KeptEvicted            uint64  `json:"kept_evicted"`
	KeptFailed             uint64  `json:"kept_failed"`
	KeptBad                uint64  `json:"kept_bad"`
	SparedBytes            uint64  `json:"spared_bytes"`
	DoorbellWrites         uint64  `json:"doorbell_writes"` // of registers of SSDs whose queue pairs it has
	DoorbellsSaved         uint64  `json:"doorbell_writes_saved"`
}

// Issued are bytes of deferred writes that went to the drives, by why they went when they did.
type Issued struct {
	Off    uint64 `json:"off"`    // nothing held them back
	Age    uint64 `json:"age"`    // they were too old to wait
	High   uint64 `json:"high"`   // the store buffer was nearly full
	Window uint64 `json:"window"` // a layer of a prefill left room
	Decode uint64 `json:"decode"` // a decode step did
	Idle   uint64 `json:"idle"`   // nothing computed
}

func newEngineStats(c *ioctl.EngineCounters) EngineStats {
	seconds := func(nanos uint64) float64 { return float64(nanos) / 1e9 }
	return EngineStats{
		Passes: c.Passes, Layers: c.Layers, DecodeSteps: c.DecodeSteps, Bubbles: c.Bubbles,
		BubbleSeconds: seconds(c.BubbleNanos), FirstBubbleSeconds: seconds(c.FirstBubbleNanos),
		ReadHiddenSeconds: seconds(c.ReadHiddenNanos), ReadExposedSeconds: seconds(c.ReadExposedNanos),
		WriteSeconds: seconds(c.WriteNanos), DeferredObjects: c.DeferredObjects, DeferredBytes: c.DeferredBytes,
		Issued: Issued{Off: c.IssuedOffBytes, Age: c.IssuedAgeBytes, High: c.IssuedHighBytes,
			Window: c.IssuedWindowBytes, Decode: c.IssuedDecodeBytes, Idle: c.IssuedIdleBytes},
		BacklogBytes: c.BacklogBytes, BacklogAgeSeconds: seconds(c.BacklogAgeNanos),
		OldestAgeSeconds: seconds(c.OldestAgeNanos), Overruns: c.Overruns, WritesBesideReads: c.Beside,
		Offers: c.Offers, OffersRefused: c.OffersRefused, Estimates: c.Estimates,
		EstimatedSeconds: seconds(c.EstimatedNanos), EstimatesTookSeconds: seconds(c.TookNanos),
		EstimatesErrorSeconds: seconds(c.ErrorNanos), StoreBufferBytes: c.StoreBytes,
		StoreBufferFilledBytes: c.StoreFilledBytes, StoresRefused: c.StoreRefused,
		StoresBlockedSeconds: seconds(c.StoreBlockedNanos), DeclinedBlocks: c.DeclinedBlocks, KeptBlocks: c.KeptBlocks,
		KeptHits: c.KeptHits, KeptWritten: c.KeptWritten, KeptEvicted: c.KeptEvicted, KeptFailed: c.KeptFailed,
		KeptBad: c.KeptBad, SparedBytes: c.SparedBytes, DoorbellWrites: c.DoorbellWrites,
		DoorbellsSaved: c.DoorbellsSaved,
	}
}

// Engines are what sessions' processes say of themselves, by session. Sessions that say nothing are left out.
func (c *Control) Engines() map[uint32]EngineStats {
	sums := map[uint32]*ioctl.EngineCounters{}
	for _, m := range c.liveMembers() {
		counters, ok := m.counters()
		if !ok {
			continue
		}
		if sum := sums[m.leases.SessionID()]; sum != nil {
			sum.Add(&counters)
		} else {
			sums[m.leases.SessionID()] = &counters
		}
	}
	all := make(map[uint32]EngineStats, len(sums))
	for id, sum := range sums {
		all[id] = newEngineStats(sum)
	}
	return all
}

// counters are what the process has written into its session page.
func (m *member) counters() (ioctl.EngineCounters, bool) {
	m.use.RLock()
	defer m.use.RUnlock()
	if m.shared.queues == nil {
		return ioctl.EngineCounters{}, false
	}
	return ioctl.ReadCounters(m.shared.queues)
}

// seconds is a counter of time.
func seconds[T any](name, help string, value func(*T) float64) metric[T] {
	return metric[T]{name, help, prometheus.CounterValue, value}
}

// issued is a counter of bytes of deferred writes.
func issued(cause, help string, value func(*Issued) uint64) metric[EngineStats] {
	return counter("deferred_issued_"+cause+"_bytes_total", "Bytes of deferred writes issued: "+help,
		func(s *EngineStats) uint64 { return value(&s.Issued) })
}

var engineMetrics = []metric[EngineStats]{
	counter("passes_total", "Prefills begun.", func(s *EngineStats) uint64 { return s.Passes }),
	counter("layers_total", "Layers of prefills that were computed.", func(s *EngineStats) uint64 { return s.Layers }),
	counter("decode_steps_total", "Decode steps.", func(s *EngineStats) uint64 { return s.DecodeSteps }),
	counter("bubbles_total", "Layers before which compute stood for reads.",
		func(s *EngineStats) uint64 { return s.Bubbles }),
	seconds("bubble_seconds_total", "Time that compute stood for reads.",
		func(s *EngineStats) float64 { return s.BubbleSeconds }),
	seconds("first_bubble_seconds_total", "Part of it before first layers, which nothing can hide.",
		func(s *EngineStats) float64 { return s.FirstBubbleSeconds }),
	seconds("read_hidden_seconds_total", "Time with reads in flight while compute did not stand.",
		func(s *EngineStats) float64 { return s.ReadHiddenSeconds }),
	seconds("read_exposed_seconds_total", "Time with reads in flight while compute stood.",
		func(s *EngineStats) float64 { return s.ReadExposedSeconds }),
	seconds("write_seconds_total", "Time with deferred writes in flight.",
		func(s *EngineStats) float64 { return s.WriteSeconds }),
	counter("deferred_objects_total", "Objects stored by way of the store buffer.",
		func(s *EngineStats) uint64 { return s.DeferredObjects }),
	counter("deferred_bytes_total", "Their bytes.", func(s *EngineStats) uint64 { return s.DeferredBytes }),
	issued("off", "nothing held them back.", func(i *Issued) uint64 { return i.Off }),
	issued("age", "they were too old to wait.", func(i *Issued) uint64 { return i.Age }),
	issued("high", "the store buffer was nearly full.", func(i *Issued) uint64 { return i.High }),
	issued("window", "a layer of a prefill left room.", func(i *Issued) uint64 { return i.Window }),
	issued("decode", "a decode step left room.", func(i *Issued) uint64 { return i.Decode }),
	issued("idle", "nothing computed.", func(i *Issued) uint64 { return i.Idle }),
	gauge("backlog_bytes", "Bytes of deferred writes that wait.", func(s *EngineStats) uint64 { return s.BacklogBytes }),
	{"backlog_age_seconds", "Age of the oldest of them.", prometheus.GaugeValue,
		func(s *EngineStats) float64 { return s.BacklogAgeSeconds }},
	{"oldest_age_seconds", "Greatest age that a deferred write has reached.", prometheus.GaugeValue,
		func(s *EngineStats) float64 { return s.OldestAgeSeconds }},
	counter("overruns_total", "Windows at whose end their writes were in flight.",
		func(s *EngineStats) uint64 { return s.Overruns }),
	counter("writes_beside_reads_total", "Pieces of writes issued beside reads of the process.",
		func(s *EngineStats) uint64 { return s.WritesBesideReads }),
	counter("offers_total", "Prefixes that were weighed: restore or compute.",
		func(s *EngineStats) uint64 { return s.Offers }),
	counter("offers_refused_total", "Of them those not worth restoring.",
		func(s *EngineStats) uint64 { return s.OffersRefused }),
	counter("estimates_total", "Passes whose time was estimated before.",
		func(s *EngineStats) uint64 { return s.Estimates }),
	seconds("estimated_seconds_total", "Sum of the estimates.",
		func(s *EngineStats) float64 { return s.EstimatedSeconds }),
	seconds("estimates_took_seconds_total", "Sum of what those passes took.",
		func(s *EngineStats) float64 { return s.EstimatesTookSeconds }),
	seconds("estimates_error_seconds_total", "Sum of the differences.",
		func(s *EngineStats) float64 { return s.EstimatesErrorSeconds }),
	gauge("store_buffer_bytes", "Size of the store buffers.", func(s *EngineStats) uint64 { return s.StoreBufferBytes }),
	gauge("store_buffer_filled_bytes", "Of them in use.",
		func(s *EngineStats) uint64 { return s.StoreBufferFilledBytes }),
	counter("stores_refused_total", "Layers for which a store buffer had no room.",
		func(s *EngineStats) uint64 { return s.StoresRefused }),
	seconds("stores_blocked_seconds_total", "Time that stores waited for room.",
		func(s *EngineStats) float64 { return s.StoresBlockedSeconds }),
	counter("declined_blocks_total", "Blocks that were not admitted to the drives, of sessions that keep such in memory.",
		func(s *EngineStats) uint64 { return s.DeclinedBlocks }),
	counter("kept_blocks_total", "Of them committed into that memory.",
		func(s *EngineStats) uint64 { return s.KeptBlocks }),
	counter("kept_hits_total", "Blocks that were pinned there.", func(s *EngineStats) uint64 { return s.KeptHits }),
	counter("kept_written_total", "Of them brought to the drives then.",
		func(s *EngineStats) uint64 { return s.KeptWritten }),
	counter("kept_evicted_total", "Blocks that had to go from there for others.",
		func(s *EngineStats) uint64 { return s.KeptEvicted }),
	counter("kept_failed_total", "Blocks pinned there that could not be brought to the drives.",
		func(s *EngineStats) uint64 { return s.KeptFailed }),
	counter("kept_bad_total", "Blocks there whose bytes were not right any more.",
		func(s *EngineStats) uint64 { return s.KeptBad }),
	gauge("spared_bytes", "Bytes of declined blocks that were not brought to the drives.",
		func(s *EngineStats) uint64 { return s.SparedBytes }),
	counter("doorbell_writes_total", "Writes of doorbell registers of SSDs.",
		func(s *EngineStats) uint64 { return s.DoorbellWrites }),
	counter("doorbell_writes_saved_total", "Writes of them that doorbell buffers made unnecessary.",
		func(s *EngineStats) uint64 { return s.DoorbellsSaved }),
}

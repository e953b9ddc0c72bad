package daemon

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tuttifs/extentmap"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// stats takes a snapshot of all counters: the status file and Prometheus show the same.
func (d *Daemon) stats() *StatsDocument {
	doc := &StatsDocument{
		OutputVersion: StatusVersion, UptimeSeconds: time.Since(d.started).Seconds(), Pools: map[string]PoolStats{},
		Drives: map[string]IOStats{}, DriveErrors: map[string]DriveErrs{}, Phases: map[string]PhaseStats{},
		Engines: map[string]EngineStats{}, Real: map[string]RealStats{},
		Discards: map[string]DiscardStats{}, Doorbells: map[string]DoorbellStats{},
	}
	for _, p := range d.store.Pools() {
		s := newPoolStats(p.Stats())
		doc.Pools[p.Name()] = s
		doc.Total.add(&s)
	}
	for index, c := range d.control.Controllers() {
		s := newIOStats(c.Stats())
		doc.Drives[strconv.Itoa(int(index))] = s
		doc.IO.add(&s)
	}
	if server := d.serving.Load(); server != nil {
		doc.Mount = MountStats(server.Stats())
	}
	doc.Space = SpaceStats(d.store.Space())
	sessions := map[uint32]bool{}
	for _, m := range d.control.Members() {
		sessions[m.Session] = true
		doc.Reached += m.ReachedBytes
	}
	doc.Sessions = uint64(len(sessions))
	for id, e := range d.control.Engines() {
		doc.Engines[strconv.FormatUint(uint64(id), 10)] = e
	}
	doc.Wear = d.wear.stats(time.Now())
	if e, ok := d.store.Expectation(); ok {
		doc.Expectation = &e
	}
	info, real := d.volume.Info(), d.control.RealIO()
	for index, r := range real {
		doc.Real[strconv.Itoa(int(index))] = r
	}
	for i := range info.Drives {
		dr := &info.Drives[i]
		doc.ReadErrors += dr.ReadErrors
		doc.WriteErrors += dr.WriteErrors
		e := DriveErrs{Online: 1, Reads: dr.ReadErrors, Writes: dr.WriteErrors, Timeouts: dr.Timeouts}
		if dr.State == extentmap.DriveLost {
			e.Online = 0
			doc.DrivesLost++
		}
		if d.modelledOn(dr.Index) != nil {
			e.Modelled = 1
		}
		name := strconv.Itoa(int(dr.Index))
		doc.DriveErrors[name] = e
		doc.Discards[name] = newDiscardStats(dr)
		dev, use := useOf(d.volume.Drive(dr.Index))
		if own, ok := dev.(*vfio.Drive); ok {
			doc.Doorbells[name] = newDoorbellStats(own.Controller())
		}
		if use != nil {
			p := newPhaseStats(use.phase.Stats(time.Now()))
			p.RealPairs = int(real[dr.Index].Pairs)
			doc.Phases[name] = p
		}
	}
	if info.Degraded {
		doc.Degraded = 1
	}
	doc.RowsAway = info.RowsUnavailable
	doc.DiscardsWaiting, doc.DiscardsSpared = info.DiscardsWaiting, info.DiscardsSpared
	doc.Transactions, doc.Checkpoints, doc.JournalUsed = info.Transactions, info.Checkpoints, info.JournalUsedBytes
	return doc
}

func newIOStats(s emu.Stats) IOStats {
	return IOStats{s.Reads, s.Writes, s.Flushes, s.BytesRead, s.BytesWritten, s.Errors, s.Refused, s.QueuesKilled,
		float64(s.BusyNanoseconds) / 1e9}
}

// metric is one value of a T in Prometheus.
type metric[T any] struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*T) float64
}

func counter[T any](name, help string, value func(*T) uint64) metric[T] {
	return metric[T]{name, help, prometheus.CounterValue, func(t *T) float64 { return float64(value(t)) }}
}

func gauge[T any](name, help string, value func(*T) uint64) metric[T] {
	return metric[T]{name, help, prometheus.GaugeValue, func(t *T) float64 { return float64(value(t)) }}
}

var poolMetrics = []metric[PoolStats]{
	counter("lookups_total", "Blocks asked of pin: hits and misses.", func(s *PoolStats) uint64 { return s.Lookups }),
	counter("hits_total", "Blocks that were there.", func(s *PoolStats) uint64 { return s.Hits }),
	counter("misses_total", "Blocks that were not there.", func(s *PoolStats) uint64 { return s.Misses }),
	counter("reserved_total", "Files reserved.", func(s *PoolStats) uint64 { return s.Reserved }),
	counter("committed_total", "Files committed.", func(s *PoolStats) uint64 { return s.Committed }),
	counter("aborted_total", "Reservations aborted.", func(s *PoolStats) uint64 { return s.Aborted }),
	counter("declined_total", "Files that the admission policy did not want on the drives.",
		func(s *PoolStats) uint64 { return s.Declined }),
	counter("evicted_total", "Files evicted for room.", func(s *PoolStats) uint64 { return s.Evicted }),
	counter("doomed_total", "Files removed by name.", func(s *PoolStats) uint64 { return s.Doomed }),
	counter("bad_total", "Files evicted because their bytes were damaged.", func(s *PoolStats) uint64 { return s.Bad }),
	counter("unreadable_total", "Files that became misses because a drive did not give their bytes.",
		func(s *PoolStats) uint64 { return s.Unreadable }),
	gauge("files_unavailable", "Files on lost drives or unreadable, now.",
		func(s *PoolStats) uint64 { return s.FilesAway }),
	gauge("files", "Files committed now.", func(s *PoolStats) uint64 { return s.Files }),
	gauge("files_pinned", "Files pinned now.", func(s *PoolStats) uint64 { return s.FilesPinned }),
	gauge("files_reserved", "Files being stored now.", func(s *PoolStats) uint64 { return s.FilesReserved }),
	gauge("slots_free", "Slots that can be reserved at once.", func(s *PoolStats) uint64 { return s.SlotsFree }),
	gauge("slots_freeing", "Slots whose freeing is not durable yet.", func(s *PoolStats) uint64 { return s.SlotsFreeing }),
	gauge("slots_used", "Slots committed or reserved.", func(s *PoolStats) uint64 { return s.SlotsUsed }),
	gauge("used_bytes", "Bytes occupied on the drives.", func(s *PoolStats) uint64 { return s.BytesUsed }),
	gauge("capacity_bytes", "Bytes that could be occupied.", func(s *PoolStats) uint64 { return s.BytesCapacity }),
}

var ioMetrics = []metric[IOStats]{
	counter("reads_total", "Read commands served.", func(s *IOStats) uint64 { return s.Reads }),
	counter("writes_total", "Write commands served.", func(s *IOStats) uint64 { return s.Writes }),
	counter("flushes_total", "Flush commands served.", func(s *IOStats) uint64 { return s.Flushes }),
	counter("read_bytes_total", "Bytes read by commands.", func(s *IOStats) uint64 { return s.BytesRead }),
	counter("written_bytes_total", "Bytes written by commands.", func(s *IOStats) uint64 { return s.BytesWritten }),
	counter("errors_total", "Commands that failed.", func(s *IOStats) uint64 { return s.Errors }),
	counter("refused_total", "Commands refused for want of a lease.", func(s *IOStats) uint64 { return s.Refused }),
	counter("queues_killed_total", "Queues killed for a bad doorbell.", func(s *IOStats) uint64 { return s.QueuesKilled }),
	{"busy_seconds_total", "CPU time of pollers that found work.", prometheus.CounterValue,
		func(s *IOStats) float64 { return s.BusySeconds }},
}

var driveMetrics = []metric[DriveErrs]{
	gauge("online", "1 while the drive is in use, 0 when it is lost.", func(s *DriveErrs) uint64 { return s.Online }),
	gauge("modelled", "1 if the drive is held back to a profile.", func(s *DriveErrs) uint64 { return s.Modelled }),
	counter("failed_reads_total", "Reads that failed.", func(s *DriveErrs) uint64 { return s.Reads }),
	counter("failed_writes_total", "Writes and flushes that failed.", func(s *DriveErrs) uint64 { return s.Writes }),
	counter("timeouts_total", "Operations that were given up.", func(s *DriveErrs) uint64 { return s.Timeouts }),
}

var doorbellMetrics = []metric[DoorbellStats]{
	gauge("doorbell_buffer", "1 where the controller looks for doorbells in memory.",
		func(s *DoorbellStats) uint64 { return s.Buffer }),
	counter("doorbell_writes_total", "Writes of doorbell registers by the daemon.",
		func(s *DoorbellStats) uint64 { return s.Written }),
	counter("doorbell_writes_saved_total", "Writes of them that the doorbell buffer made unnecessary.",
		func(s *DoorbellStats) uint64 { return s.Saved }),
}

var discardMetrics = []metric[DiscardStats]{
	gauge("discard_on", "1 while the drive is told what freed slots no longer hold.",
		func(s *DiscardStats) uint64 { return s.On }),
	counter("discard_commands_total", "Discards sent to the drive.", func(s *DiscardStats) uint64 { return s.Commands }),
	counter("discarded_ranges_total", "Ranges of them; several a command where the drive takes that.",
		func(s *DiscardStats) uint64 { return s.Ranges }),
	counter("discarded_bytes_total", "Bytes of them.", func(s *DiscardStats) uint64 { return s.Bytes }),
	counter("discard_failures_total", "Discards that failed.", func(s *DiscardStats) uint64 { return s.Failed }),
}

var phaseMetrics = []metric[PhaseStats]{
	counter("mixed_commands_total", "Commands that began while others of the other direction were in flight; 0 while "+
		"phases are on and the drive answers.", func(s *PhaseStats) uint64 { return s.Mixed }),
	counter("switches_total", "Changes between reading and writing.", func(s *PhaseStats) uint64 { return s.Switches }),
	counter("turns_total", "Turns that writes took after waiting longer than their patience.",
		func(s *PhaseStats) uint64 { return s.Turns }),
	counter("stuck_entries_total", "Entries past commands of the other direction that did not end.",
		func(s *PhaseStats) uint64 { return s.Stuck }),
	counter("read_waits_total", "Waits of pollers and others that wanted to read.",
		func(s *PhaseStats) uint64 { return s.ReadWaits }),
	counter("write_waits_total", "Waits of pollers and others that wanted to write.",
		func(s *PhaseStats) uint64 { return s.WriteWaits }),
	{"read_wait_seconds_total", "Time of those waits.", prometheus.CounterValue,
		func(s *PhaseStats) float64 { return s.ReadSeconds }},
	{"write_wait_seconds_total", "Time of those waits.", prometheus.CounterValue,
		func(s *PhaseStats) float64 { return s.WriteSeconds }},
	{"read_wait_longest_seconds", "The longest of them since the mount.", prometheus.GaugeValue,
		func(s *PhaseStats) float64 { return s.ReadLongest }},
	{"write_wait_longest_seconds", "The longest of them since the mount.", prometheus.GaugeValue,
		func(s *PhaseStats) float64 { return s.WriteLongest }},
	{"write_wait_now_seconds", "For how long the write that waits longest has waited; 0 if none does.",
		prometheus.GaugeValue, func(s *PhaseStats) float64 { return s.WriteAge }},
	gauge("real_queue_pairs", "Queue pairs of the drive's own that engines have now.",
		func(s *PhaseStats) uint64 { return uint64(s.RealPairs) }),
}

var realMetrics = []metric[RealStats]{
	counter("reads_total", "Read commands by queue pairs of the drive's own, as engines say.",
		func(s *RealStats) uint64 { return s.Reads }),
	counter("writes_total", "Write and flush commands by them.", func(s *RealStats) uint64 { return s.Writes }),
	counter("read_bytes_total", "Bytes read by them.", func(s *RealStats) uint64 { return s.BytesRead }),
	counter("written_bytes_total", "Bytes written by them.", func(s *RealStats) uint64 { return s.BytesWritten }),
	counter("failed_reads_total", "Reads by them that failed.", func(s *RealStats) uint64 { return s.FailedReads }),
	counter("failed_writes_total", "Writes and flushes by them that failed.",
		func(s *RealStats) uint64 { return s.FailedWrites }),
	counter("passed_by_total", "Times that an engine with queue pairs did not leave the drive to others when told.",
		func(s *RealStats) uint64 { return s.PassedBy }),
}

// logValue is a figure of a drive's own log, 0 where it has none.
func logValue(name, help string, kind prometheus.ValueType, value func(*DriveLog) float64) metric[DriveWear] {
	return metric[DriveWear]{"log_" + name, help, kind, func(s *DriveWear) float64 {
		if s.Log == nil {
			return 0
		}
		return value(s.Log)
	}}
}

var wearMetrics = []metric[DriveWear]{
	counter("payload_written_bytes_total", "Bytes of files written, by engines and by copies.",
		func(s *DriveWear) uint64 { return s.PayloadWritten }),
	counter("metadata_written_bytes_total", "Bytes of journal and tables written.",
		func(s *DriveWear) uint64 { return s.MetadataWritten }),
	{"write_amplification", "Bytes of files and metadata for a byte of files.", prometheus.GaugeValue,
		func(s *DriveWear) float64 { return s.Amplification }},
	{"writes_per_day_last_minute", "Drive writes per day at the rate of the last minute.", prometheus.GaugeValue,
		func(s *DriveWear) float64 { return s.MinuteDWPD }},
	{"writes_per_day_last_hour", "Drive writes per day at the rate of the last hour.", prometheus.GaugeValue,
		func(s *DriveWear) float64 { return s.HourDWPD }},
	{"rated_used_ratio", "Part of the rated endurance (-o endurance) that was written; 0 without a rating.",
		prometheus.GaugeValue, func(s *DriveWear) float64 { return s.RatedUsed }},
	{"rated_years_left", "Years until the rated endurance is written, at the last hour's rate; +Inf without either.",
		prometheus.GaugeValue, func(s *DriveWear) float64 {
			if s.YearsLeft == nil {
				return math.Inf(1)
			}
			return *s.YearsLeft
		}},
	{"log_available", "1 while the drive's own log can be read; the other drive_log series are 0 without.",
		prometheus.GaugeValue, func(s *DriveWear) float64 {
			if s.Log == nil {
				return 0
			}
			return 1
		}},
	logValue("host_written_bytes_total", "Bytes that hosts wrote in the drive's life, by its log.",
		prometheus.CounterValue, func(l *DriveLog) float64 { return l.HostWritten }),
	logValue("media_written_bytes_total", "Bytes written to the drive's media in its life, by its OCP log; 0 without.",
		prometheus.CounterValue, func(l *DriveLog) float64 { return l.MediaWritten }),
	logValue("media_write_amplification", "Media bytes for a byte of the host since the mount; 0 before a GiB.",
		prometheus.GaugeValue, func(l *DriveLog) float64 { return l.MediaFactor }),
	logValue("used_ratio", "Part of the drive's expected life that is used up, by its log; may exceed 1.",
		prometheus.GaugeValue, func(l *DriveLog) float64 { return float64(l.UsedPercent) / 100 }),
}

var volumeMetrics = []metric[StatsDocument]{
	{"uptime_seconds", "Time since the mount.", prometheus.GaugeValue,
		func(s *StatsDocument) float64 { return s.UptimeSeconds }},
	gauge("sessions", "Engines' sessions now.", func(s *StatsDocument) uint64 { return s.Sessions }),
	gauge("reached_bytes", "Memory of GPUs that SSDs of engines with real queue pairs read and write themselves.",
		func(s *StatsDocument) uint64 { return s.Reached }),
	gauge("space_total_bytes", "Size of the volume as df shows it.",
		func(s *StatsDocument) uint64 { return s.Space.TotalBytes }),
	gauge("space_used_bytes", "Bytes of committed and reserved files.",
		func(s *StatsDocument) uint64 { return s.Space.UsedBytes }),
	gauge("space_free_bytes", "Total less used.", func(s *StatsDocument) uint64 { return s.Space.FreeBytes }),
	gauge("space_available_bytes", "Bytes that can be stored without evicting.", func(s *StatsDocument) uint64 {
		return s.Space.AvailableBytes
	}),
	gauge("degraded", "1 while a drive is lost or the metadata lacks its second copy.",
		func(s *StatsDocument) uint64 { return s.Degraded }),
	gauge("drives_lost", "Drives that are lost.", func(s *StatsDocument) uint64 { return s.DrivesLost }),
	gauge("rows_unavailable", "Rows on lost drives.", func(s *StatsDocument) uint64 { return s.RowsAway }),
	gauge("discards_waiting_slots", "Freed slots that are not handed out yet because of their discard.",
		func(s *StatsDocument) uint64 { return s.DiscardsWaiting }),
	counter("discards_spared_slots_total", "Freed slots that were handed out without a discard, because they were needed.",
		func(s *StatsDocument) uint64 { return s.DiscardsSpared }),
	counter("drive_read_errors_total", "Reads that a drive failed.",
		func(s *StatsDocument) uint64 { return s.ReadErrors }),
	counter("drive_write_errors_total", "Writes that a drive failed.",
		func(s *StatsDocument) uint64 { return s.WriteErrors }),
	counter("mount_read_bytes_total", "Bytes verified and returned to readers of files.",
		func(s *StatsDocument) uint64 { return s.Mount.ReadBytes }),
	counter("mount_read_errors_total", "Objects that readers of files asked for and that were unreadable or damaged.",
		func(s *StatsDocument) uint64 { return s.Mount.ReadErrors }),
	counter("mount_stored_files_total", "Files copied in through the mount.",
		func(s *StatsDocument) uint64 { return s.Mount.StoredFiles }),
	counter("mount_stored_bytes_total", "Bytes copied in through the mount.",
		func(s *StatsDocument) uint64 { return s.Mount.StoredBytes }),
	counter("transactions_total", "Transactions that are durable.",
		func(s *StatsDocument) uint64 { return s.Transactions }),
	counter("checkpoints_total", "Checkpoints written.", func(s *StatsDocument) uint64 { return s.Checkpoints }),
	gauge("journal_used_bytes", "Bytes of the journal in use.", func(s *StatsDocument) uint64 { return s.JournalUsed }),
}

// collector turns one snapshot into samples at every scrape. Totals are there from the start; a pool's own series from
// its creation.
type collector struct {
	d           *Daemon
	description map[string]*prometheus.Desc
}

func newCollector(d *Daemon) *collector {
	c := &collector{d, map[string]*prometheus.Desc{}}
	describe := func(name, help string, labels ...string) {
		c.description[name] = prometheus.NewDesc("tuttifs_"+name, help, labels, nil)
	}
	for _, m := range poolMetrics {
		describe(m.name, m.help+" All pools.")
		describe("pool_"+m.name, m.help, "pool")
	}
	for _, m := range ioMetrics {
		describe("io_"+m.name, m.help+" All drives.")
		describe("drive_io_"+m.name, m.help, "drive")
	}
	for _, m := range driveMetrics {
		describe("drive_"+m.name, m.help, "drive")
	}
	for _, m := range doorbellMetrics {
		describe("drive_"+m.name, m.help, "drive")
	}
	for _, m := range discardMetrics {
		describe("drive_"+m.name, m.help, "drive")
	}
	for _, m := range phaseMetrics {
		describe("drive_phase_"+m.name, m.help, "drive")
	}
	for _, m := range realMetrics {
		describe("drive_real_"+m.name, m.help, "drive")
	}
	for _, m := range slices.Concat(wearMetrics, placementMetrics) {
		describe("drive_"+m.name, m.help, "drive")
	}
	for _, m := range volumeMetrics {
		describe(m.name, m.help)
	}
	for _, m := range engineMetrics {
		describe("engine_"+m.name, m.help+" As the session's processes say.", "session")
	}
	return c
}

func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range c.description {
		out <- desc
	}
}

// emit sends one sample a metric.
func emit[T any](c *collector, out chan<- prometheus.Metric, list []metric[T], prefix string, t *T, labels ...string) {
	for _, m := range list {
		out <- prometheus.MustNewConstMetric(c.description[prefix+m.name], m.kind, m.value(t), labels...)
	}
}

func (c *collector) Collect(out chan<- prometheus.Metric) {
	s := c.d.stats()
	emit(c, out, poolMetrics, "", &s.Total)
	for name, pool := range s.Pools {
		emit(c, out, poolMetrics, "pool_", &pool, name)
	}
	emit(c, out, ioMetrics, "io_", &s.IO)
	for index, io := range s.Drives {
		emit(c, out, ioMetrics, "drive_io_", &io, index)
	}
	for index, errs := range s.DriveErrors {
		emit(c, out, driveMetrics, "drive_", &errs, index)
	}
	for index, b := range s.Doorbells {
		emit(c, out, doorbellMetrics, "drive_", &b, index)
	}
	for index, d := range s.Discards {
		emit(c, out, discardMetrics, "drive_", &d, index)
	}
	for index, p := range s.Phases {
		emit(c, out, phaseMetrics, "drive_phase_", &p, index)
	}
	for index, r := range s.Real {
		emit(c, out, realMetrics, "drive_real_", &r, index)
	}
	for index, w := range s.Wear {
		emit(c, out, wearMetrics, "drive_", &w, index)
		emit(c, out, placementMetrics, "drive_", &w, index)
	}
	emit(c, out, volumeMetrics, "", s)
	for id, e := range s.Engines {
		emit(c, out, engineMetrics, "engine_", &e, id)
	}
}

// metricsServer answers GET /metrics.
type metricsServer struct {
	server  http.Server
	done    chan struct{}
	address string
}

// serveMetrics listens on address and nowhere else.
func serveMetrics(d *Daemon, address string) (*metricsServer, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(newCollector(d), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	m := &metricsServer{done: make(chan struct{}), address: listener.Addr().String()}
	m.server = http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		defer close(m.done)
		if err := m.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			d.options.Log.Error("metrics", "error", err)
		}
	}()
	return m, nil
}

func (m *metricsServer) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := m.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = m.server.Close()
	}
	<-m.done
	return err
}

package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"maps"
	"slices"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/nvme"
	"tuttifs/wear"
)

// DriveWear is what writing does to one drive. What is measured by the drive itself is in Log, for NVMe namespaces of
// the kernel's driver; the rest is what this mount has written since it was mounted.
type DriveWear struct {
	PayloadWritten  uint64  `json:"payload_bytes_written"`  // by engines' commands and by files copied in
	MetadataWritten uint64  `json:"metadata_bytes_written"` // journal, record tables, catalog, labels
	Amplification   float64 `json:"write_amplification"`    // of payload by metadata; 0 before any payload
	MinuteRate      float64 `json:"bytes_per_second_last_minute"`
	HourRate        float64 `json:"bytes_per_second_last_hour"` // or since the mount, if that is less
	MinuteDWPD      float64 `json:"drive_writes_per_day_last_minute"`
	HourDWPD        float64 `json:"drive_writes_per_day_last_hour"`
	Capacity        uint64  `json:"capacity_bytes"`

	// What the drive's rating says, where the mount knows it. Used so far is what the drive's own log says, without one
	// what was written since the mount.
	RatedBytes float64  `json:"rated_bytes,omitempty"`
	RatedUsed  float64  `json:"rated_used,omitempty"`       // part of 1; may be exceeded
	YearsLeft  *float64 `json:"rated_years_left,omitempty"` // at the last hour's rate; absent if nothing is written

	Placement *PlacementWear `json:"placement,omitempty"`

	Log     *DriveLog `json:"log,omitempty"`
	LogLack string    `json:"log_lack,omitempty"` // why there is no Log
}

// DriveLog is what an NVMe drive says of itself: of the whole drive and its whole life, whoever wrote to it.
type DriveLog struct {
	At           time.Time `json:"at"`                            // when it was read
	HostWritten  float64   `json:"host_bytes_written"`            // data units written, by SMART / health information
	MediaWritten float64   `json:"media_bytes_written,omitempty"` // by the OCP log, where there is one
	UsedPercent  uint8     `json:"used_percent"`                  // of the life that the maker expects; may exceed 100
	SparePercent uint8     `json:"spare_percent"`

	// Since the mount, by the same log. HostFactor is the host's writes for each byte that this mount wrote: more than 1
	// means that others write to the drive. MediaFactor is the drive's own amplification: media for a byte of the host.
	// 0: not known, or too little was written.
	HostSinceMount  float64 `json:"host_bytes_since_mount"`
	MediaSinceMount float64 `json:"media_bytes_since_mount,omitempty"`
	HostFactor      float64 `json:"host_write_factor,omitempty"`
	MediaFactor     float64 `json:"media_write_amplification,omitempty"`
	// MediaFactorLife is MediaFactor over the drive's life.
	MediaFactorLife float64 `json:"media_write_amplification_life,omitempty"`

	Placement *PlacementLog `json:"fdp,omitempty"` // of drives with Flexible Data Placement
}

// Rate says what a rating makes of what was written.
func (s *DriveWear) Rate(e wear.Endurance) {
	written := float64(s.PayloadWritten + s.MetadataWritten)
	if s.Log != nil {
		written = s.Log.HostWritten
	}
	s.RatedUsed, s.YearsLeft = 0, nil
	if s.RatedBytes = e.Rated(s.Capacity); s.RatedBytes > 0 {
		s.RatedUsed = written / s.RatedBytes
	}
	if years, ok := e.YearsLeft(s.Capacity, written, s.HourRate); ok {
		s.YearsLeft = &years
	}
}

const (
	// wearInterval is how often what was written is looked at.
	wearInterval = time.Second
	// logInterval is how often the drives' own logs are read.
	logInterval = time.Minute
	// factorBytesMin is the least that must have been written for a ratio to mean something: the drives count in units of
	// 512,000 bytes, and write some for themselves.
	factorBytesMin = 1 << 30
)

// logReader reads a log page of a drive: drive.ReadLog, or a test's.
type logReader func(d drive.Drive, page uint8, p []byte) error

// DriveLogOf asks a drive for its logs, or says why it has none.
func DriveLogOf(d drive.Drive) (l *DriveLog, lack string) {
	l, err := readDriveLog(d, drive.ReadLog, time.Now())
	if err != nil {
		return nil, logLack(err)
	}
	return l, ""
}

func readDriveLog(d drive.Drive, read logReader, now time.Time) (*DriveLog, error) {
	b := make([]byte, nvme.SMARTLogBytes)
	if err := read(d, nvme.LogSMART, b); err != nil {
		return nil, err
	}
	smart, err := nvme.ParseSMARTLog(b)
	if err != nil {
		return nil, err
	}
	l := &DriveLog{At: now, HostWritten: smart.HostBytesWritten(), UsedPercent: smart.Used, SparePercent: smart.Spare}
	l.Placement = readPlacementLog(d, read)
	b = make([]byte, nvme.OCPLogBytes)
	// Few drives have this page, and what page C0h is on others is theirs to say: either way there is no figure.
	if read(d, nvme.LogOCP, b) != nil {
		return l, nil
	}
	if ocp, err := nvme.ParseOCPLog(b); err == nil {
		l.MediaWritten = nvme.Uint128(ocp.MediaWritten)
		l.MediaFactorLife = factor(l.MediaWritten, l.HostWritten)
	}
	return l, nil
}

// factor is written/meant, or 0 where too little was meant.
func factor(written, meant float64) float64 {
	if meant < factorBytesMin {
		return 0
	}
	return written / meant
}

// since compares a log with the one of the mount's beginning.
func (l *DriveLog) since(first *DriveLog, ours uint64) {
	l.Placement.since(first.Placement)
	l.HostSinceMount = max(0, l.HostWritten-first.HostWritten)
	l.HostFactor = factor(l.HostSinceMount, float64(ours))
	if first.MediaWritten > 0 {
		l.MediaSinceMount = max(0, l.MediaWritten-first.MediaWritten)
		l.MediaFactor = factor(l.MediaSinceMount, l.HostSinceMount)
	}
}

// tally adds up a counter that may begin anew, as that of a drive does which was lost and came back.
type tally struct{ base, last uint64 }

func (t *tally) update(now uint64) uint64 {
	if now < t.last {
		t.base += t.last
	}
	t.last = now
	return t.base + now
}

// driveWear is what is kept of a drive.
type driveWear struct {
	commands, copies, metadata tally
	payload, meta              uint64
	meter                      wear.Meter
	capacity                   uint64
	first, log                 *DriveLog // the mount's first log and the last one; nil without
	lack                       string
	reading                    bool
	readAt                     time.Time
}

// wearWatch follows what is written to the drives.
type wearWatch struct {
	volume   *extentmap.Volume
	commands func() map[uint16]uint64 // bytes that engines wrote, by drive
	copies   func(index uint16) uint64
	read     logReader
	ratings  wear.Ratings

	mu      sync.Mutex
	drives  map[uint16]*driveWear
	counted time.Time // when the counters were last brought up to date
	stop    context.CancelFunc
	workers sync.WaitGroup
}

func newWearWatch(
	v *extentmap.Volume, commands func() map[uint16]uint64, copies func(uint16) uint64, read logReader,
	ratings wear.Ratings,
) *wearWatch {
	return &wearWatch{volume: v, commands: commands, copies: copies, read: read, ratings: ratings,
		drives: map[uint16]*driveWear{}}
}

// run begins to look, now and every second.
func (w *wearWatch) run() {
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	w.look(time.Now())
	w.workers.Go(func() {
		tick := time.NewTicker(wearInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				w.look(now)
			}
		}
	})
}

// close ends it. A log that is being read is waited for: it has a deadline of its own.
func (w *wearWatch) close() {
	w.stop()
	w.workers.Wait()
}

// look brings all drives up to date, and has their logs read where it is time.
func (w *wearWatch) look(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now = w.count(now)
	for index, d := range w.drives {
		if !d.reading && now.Sub(d.readAt) >= logInterval {
			d.reading, d.readAt = true, now
			w.workers.Go(func() { w.readLog(index, d, now) })
		}
	}
}

// count brings the counters up to date, and returns now, or the time of the last count if that is later: a tick may
// have waited. The mutex is held: counters that were read before it was taken could be older than those that were
// counted, and would look like a new beginning.
func (w *wearWatch) count(now time.Time) time.Time {
	if now.Before(w.counted) {
		now = w.counted
	}
	w.counted = now
	commands, info := w.commands(), w.volume.Info()
	known := map[uint16]bool{}
	for i := range info.Drives {
		index := info.Drives[i].Index
		known[index] = true
		d := w.drives[index]
		if d == nil {
			d = &driveWear{}
			w.drives[index] = d
		}
		d.capacity = info.Drives[i].Bytes
		d.payload = d.commands.update(commands[index]) + d.copies.update(w.copies(index))
		d.meta = d.metadata.update(info.Drives[i].MetaWritten)
		d.meter.Add(now, d.payload+d.meta)
	}
	for index := range w.drives {
		if !known[index] {
			delete(w.drives, index) // forgotten
		}
	}
	return now
}

// unrated are the indexes of ratings that no drive has: drives come and go, so that is no error.
func (w *wearWatch) unrated() (indexes []uint16) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, index := range slices.Sorted(maps.Keys(w.ratings.Drive)) {
		if w.drives[index] == nil {
			indexes = append(indexes, index)
		}
	}
	return indexes
}

// readLog reads one drive's log: without the mutex, because a drive may take its time.
func (w *wearWatch) readLog(index uint16, d *driveWear, now time.Time) {
	var l *DriveLog
	err := errDrive
	if dev, _ := useOf(w.volume.Drive(index)); dev != nil {
		l, err = readDriveLog(dev, w.read, now)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	d.reading = false
	if err != nil {
		d.log, d.lack = nil, logLack(err)
		return
	}
	if d.first == nil {
		d.first = l
	}
	l.since(d.first, d.payload+d.meta)
	d.log, d.lack = l, ""
}

// logLack says in a few words why a drive has no log.
func logLack(err error) string {
	switch {
	case errors.Is(err, drive.ErrNotNVMe):
		return "not an NVMe drive"
	case errors.Is(err, drive.ErrNoLog):
		return "the drive has no SMART / health log"
	}
	return err.Error()
}

// stats are the figures of now, by index.
func (w *wearWatch) stats(now time.Time) map[string]DriveWear {
	w.mu.Lock()
	defer w.mu.Unlock()
	now = w.count(now)
	out := make(map[string]DriveWear, len(w.drives))
	for index, d := range w.drives {
		s := DriveWear{PayloadWritten: d.payload, MetadataWritten: d.meta, Capacity: d.capacity,
			MinuteRate: d.meter.Minute(now), HourRate: d.meter.Hour(now), LogLack: d.lack}
		s.Amplification, _ = wear.Amplification(d.payload+d.meta, d.payload)
		s.MinuteDWPD, s.HourDWPD = wear.DWPD(s.MinuteRate, d.capacity), wear.DWPD(s.HourRate, d.capacity)
		if d.log != nil {
			l := *d.log
			if l.Placement != nil {
				p := *l.Placement
				l.Placement = &p
			}
			s.Log = &l
		}
		if dev, _ := useOf(w.volume.Drive(index)); dev != nil {
			s.Placement = placementWear(dev)
		}
		s.Rate(w.ratings.Of(index))
		out[fmt.Sprint(index)] = s
	}
	return out
}

// engineWrites are the bytes that engines' commands wrote, by drive.
func (c *Control) engineWrites() map[uint16]uint64 {
	out := map[uint16]uint64{}
	for index, controller := range c.Controllers() {
		out[index] = controller.Stats().BytesWritten
	}
	for index, r := range c.RealIO() {
		out[index] += r.BytesWritten
	}
	return out
}

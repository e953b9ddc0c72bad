package daemon

import (
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/nvme"
	"tuttifs/wear"
)

// logDrive answers Get Log Page as a drive would whose counters the test sets.
type logDrive struct {
	mu     sync.Mutex
	smart  nvme.SMARTLog
	ocp    nvme.OCPLog
	hasOCP bool
	fdp    *nvme.FDPStats
	err    error
}

func (l *logDrive) read(_ drive.Drive, page uint8, p []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.err != nil:
		return l.err
	case page == nvme.LogSMART:
		b, err := l.smart.AppendBinary(nil)
		copy(p, b)
		return err
	case page == nvme.LogOCP && l.hasOCP:
		b, err := l.ocp.AppendBinary(nil)
		copy(p, b)
		return err
	case page == nvme.LogFDPStats && l.fdp != nil:
		b, err := l.fdp.AppendBinary(nil)
		copy(p, b)
		return err
	}
	return drive.ErrNoLog
}

// ocpLog has the page's GUID, as drives send it.
func ocpLog(mediaWritten uint64) (l nvme.OCPLog) {
	l.MediaWritten[0], l.Version = mediaWritten, 3
	l.GUID = [16]byte{0xc5, 0xaf, 0x10, 0x28, 0xea, 0xbf, 0xf2, 0xa4, 0x9c, 0x4f, 0x6f, 0x7c, 0xc9, 0x14, 0xd5, 0xaf}
	return l
}

// settled looks and waits until no log is being read.
func (w *wearWatch) settled(t *testing.T, now time.Time) DriveWear {
	t.Helper()
	w.look(now)
	w.workers.Wait()
	s, ok := w.stats(now)["0"]
	require.True(t, ok)
	return s
}

func TestWearWatch(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	engines, copies := uint64(0), uint64(0)
	var log logDrive
	log.hasOCP, log.ocp = true, ocpLog(40<<30)
	log.smart.DataUnitsWritten[0], log.smart.Used, log.smart.Spare = 20<<30/nvme.DataUnitBytes, 3, 98
	watch := newWearWatch(w.volume, func() map[uint16]uint64 { return map[uint16]uint64{0: engines} },
		func(uint16) uint64 { return copies }, log.read, wear.Ratings{All: wear.Endurance{Bytes: 100 << 30}})
	now := time.Unix(1_700_000_000, 0)
	s := watch.settled(t, now)
	require.Zero(t, s.PayloadWritten)
	require.Zero(t, s.Amplification)
	require.EqualValues(t, 64<<20, s.Capacity)
	require.NotNil(t, s.Log)
	require.EqualValues(t, 3, s.Log.UsedPercent)
	require.InEpsilon(t, 20<<30, s.Log.HostWritten, 1e-3)
	require.InEpsilon(t, 2, s.Log.MediaFactorLife, 1e-3)
	require.Zero(t, s.Log.MediaFactor, "nothing was written yet")

	// A drive that is written once in a minute, with as much again by others, and an amplification of 1.5 in the drive.
	engines, copies = 6<<30, 2<<30
	log.smart.DataUnitsWritten[0] += 16 << 30 / nvme.DataUnitBytes
	log.ocp.MediaWritten[0] += 24 << 30
	now = now.Add(time.Minute)
	s = watch.settled(t, now)
	require.EqualValues(t, 8<<30, s.PayloadWritten)
	require.InEpsilon(t, 8<<30/60.0, s.MinuteRate, 1e-9)
	require.InEpsilon(t, 1440*128, s.MinuteDWPD, 1e-6)
	require.Equal(t, s.MinuteDWPD, s.HourDWPD, "no hour has passed")
	require.InDelta(t, 1, s.Amplification, 0.01)
	require.InEpsilon(t, 2, s.Log.HostFactor, 1e-3)
	require.InEpsilon(t, 1.5, s.Log.MediaFactor, 1e-3)
	require.InEpsilon(t, 0.36, s.RatedUsed, 1e-3, "36 of 100 GiB, by the drive's own log")
	require.InEpsilon(t, 64.0/8*60/(365*86400), *s.YearsLeft, 1e-3, "64 GiB at 8 a minute")

	// What is written between two looks shows at once.
	engines += 1 << 20
	require.EqualValues(t, 8<<30+1<<20, watch.stats(now)["0"].PayloadWritten)

	// The drive is lost and comes back with a controller that counts anew; its log cannot be read any more.
	engines = 1 << 30
	log.err = errors.New("no answer")
	s = watch.settled(t, now.Add(time.Minute))
	require.EqualValues(t, 9<<30+1<<20, s.PayloadWritten)
	require.Nil(t, s.Log)
	require.Equal(t, "no answer", s.LogLack)
	require.InEpsilon(t, 0.09, s.RatedUsed, 1e-3, "without a log only what this mount wrote is known")
}

// A drive with Flexible Data Placement says what its media took, of the group that it is in.
func TestWearByPlacement(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	log := logDrive{fdp: &nvme.FDPStats{HostWritten: [2]uint64{10 << 20}, MediaWritten: [2]uint64{20 << 20}}}
	watch := newWearWatch(w.volume, func() map[uint16]uint64 { return nil }, func(uint16) uint64 { return 0 }, log.read,
		wear.Ratings{})
	now := time.Unix(1_700_000_000, 0)
	s := watch.settled(t, now)
	require.InDelta(t, 2, s.Log.Placement.AmplificationLife, 1e-9)
	require.Zero(t, s.Log.Placement.Amplification, "nothing was written yet")
	log.fdp.HostWritten[0] += 8 << 20
	log.fdp.MediaWritten[0] += 10 << 20
	log.fdp.MediaErased[0] = 3 << 20
	s = watch.settled(t, now.Add(time.Minute))
	require.InDelta(t, 1.25, s.Log.Placement.Amplification, 1e-9)
	require.InDelta(t, 8<<20, s.Log.Placement.HostSinceMount, 0)
	require.InDelta(t, 3<<20, s.Log.Placement.MediaErased, 0)
	require.Nil(t, s.Placement, "memory is not told")
	log.fdp = nil
	require.Nil(t, watch.settled(t, now.Add(2*time.Minute)).Log.Placement)
}

// Logs are read once a minute, each by one reader at a time.
func TestWearWatchReadsSeldom(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	reads := make(chan struct{}, 100)
	hang := make(chan struct{})
	watch := newWearWatch(w.volume, w.control.engineWrites, func(uint16) uint64 { return 0 },
		func(drive.Drive, uint8, []byte) error {
			reads <- struct{}{}
			<-hang
			return drive.ErrNotNVMe
		}, wear.Ratings{})
	now := time.Unix(1_700_000_000, 0)
	for range 300 { // five minutes in which no drive answers
		watch.look(now)
		now = now.Add(time.Second)
	}
	require.Empty(t, watch.stats(now)["0"].LogLack)
	close(hang)
	watch.workers.Wait()
	require.Len(t, reads, 2, "one for each drive")
	require.Equal(t, "not an NVMe drive", watch.settled(t, now).LogLack)
}

// What the volume itself writes is counted, and what the mount's copies write: the bytes that reach the drives.
func TestWearCountsMetadata(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	watch := newWearWatch(w.volume, w.control.engineWrites, func(uint16) uint64 { return 0 },
		drive.ReadLog, wear.Ratings{})
	now := time.Unix(1_700_000_000, 0)
	before := watch.settled(t, now)
	require.Equal(t, "not an NVMe drive", before.LogLack)
	require.NoError(t, w.volume.Checkpoint())
	ticket, err := w.volume.SetTenant(extentmap.Tenant{ID: 1, Name: "t", QuotaBytes: 1 << 20})
	require.NoError(t, err)
	<-ticket.Done()
	after := watch.settled(t, now.Add(time.Second))
	require.Greater(t, after.MetadataWritten, before.MetadataWritten)
	require.Zero(t, after.PayloadWritten)
	b, err := json.Marshal(after)
	require.NoError(t, err)
	require.NotContains(t, string(b), `"log"`)
}

package daemon

import (
	"github.com/prometheus/client_golang/prometheus"

	"tuttifs/drive"
	"tuttifs/lifetime"
	"tuttifs/nvme"
)

// PlacementLog is what a drive with Flexible Data Placement counts, by its FDP statistics: of the endurance group that
// the drive is in, since the group exists, whoever writes to it.
type PlacementLog struct {
	HostWritten  float64 `json:"host_bytes_written"`
	MediaWritten float64 `json:"media_bytes_written"`
	MediaErased  float64 `json:"media_bytes_erased"`
	// Since the mount by the same log, and media bytes for one of the host: 0 while too little was written.
	HostSinceMount    float64 `json:"host_bytes_since_mount"`
	MediaSinceMount   float64 `json:"media_bytes_since_mount"`
	Amplification     float64 `json:"write_amplification,omitempty"`
	AmplificationLife float64 `json:"write_amplification_life,omitempty"`
}

// PlacementWear is what this mount wrote itself to a drive that it drives by nvme/vfio, by what it expected of it.
// Engines' own queue pairs are not counted.
type PlacementWear struct {
	Handles  int    `json:"handles"` // placement handles of the namespace; 0 where it does not place data
	Metadata uint64 `json:"metadata_bytes_written"`
	Short    uint64 `json:"short_bytes_written"`
	Normal   uint64 `json:"normal_bytes_written"`
	Long     uint64 `json:"long_bytes_written"`
}

// placedBytesMin is the least that the host must have written for a ratio: the log counts in bytes.
const placedBytesMin = 1 << 20

// readPlacementLog is nil for a drive without the log.
func readPlacementLog(d drive.Drive, read logReader) *PlacementLog {
	b := make([]byte, nvme.FDPStatsBytes)
	if read(d, nvme.LogFDPStats, b) != nil {
		return nil
	}
	s, err := nvme.ParseFDPStats(b)
	if err != nil {
		return nil
	}
	l := &PlacementLog{HostWritten: nvme.Uint128(s.HostWritten), MediaWritten: nvme.Uint128(s.MediaWritten),
		MediaErased: nvme.Uint128(s.MediaErased)}
	l.AmplificationLife = ratio(l.MediaWritten, l.HostWritten)
	return l
}

func ratio(media, host float64) float64 {
	if host < placedBytesMin {
		return 0
	}
	return media / host
}

// since compares the log with the one of the mount's beginning.
func (l *PlacementLog) since(first *PlacementLog) {
	if l == nil || first == nil {
		return
	}
	l.HostSinceMount = max(0, l.HostWritten-first.HostWritten)
	l.MediaSinceMount = max(0, l.MediaWritten-first.MediaWritten)
	l.Amplification = ratio(l.MediaSinceMount, l.HostSinceMount)
}

// placer is a drive that knows what it was told of lifetimes.
type placer interface {
	PlacementHandles() int
	Placed() [lifetime.Classes]uint64
}

// placementWear is nil for drives that cannot be told.
func placementWear(d drive.Drive) *PlacementWear {
	p, ok := d.(placer)
	if !ok {
		return nil
	}
	n := p.Placed()
	return &PlacementWear{Handles: p.PlacementHandles(), Metadata: n[lifetime.Metadata], Short: n[lifetime.Short],
		Normal: n[lifetime.Normal], Long: n[lifetime.Long]}
}

// placedValue is a figure of what was written by its lifetime, 0 for drives that cannot be told.
func placedValue(name, help string, kind prometheus.ValueType, value func(*PlacementWear) float64) metric[DriveWear] {
	return metric[DriveWear]{"placed_" + name, help, kind, func(s *DriveWear) float64 {
		if s.Placement == nil {
			return 0
		}
		return value(s.Placement)
	}}
}

// fdpValue is a figure of a drive's FDP statistics, 0 where it has none.
func fdpValue(name, help string, kind prometheus.ValueType, value func(*PlacementLog) float64) metric[DriveWear] {
	return logValue("fdp_"+name, help, kind, func(l *DriveLog) float64 {
		if l.Placement == nil {
			return 0
		}
		return value(l.Placement)
	})
}

var placementMetrics = []metric[DriveWear]{
	placedValue("handles", "Placement handles that the drive's writes are kept apart by; 0 for none.",
		prometheus.GaugeValue, func(p *PlacementWear) float64 { return float64(p.Handles) }),
	placedValue("metadata_bytes_total", "Bytes that the mount wrote as metadata.",
		prometheus.CounterValue, func(p *PlacementWear) float64 { return float64(p.Metadata) }),
	placedValue("short_bytes_total", "Bytes that the mount wrote as KV that goes soon.",
		prometheus.CounterValue, func(p *PlacementWear) float64 { return float64(p.Short) }),
	placedValue("normal_bytes_total", "Bytes that the mount wrote as KV of which nothing more is known.",
		prometheus.CounterValue, func(p *PlacementWear) float64 { return float64(p.Normal) }),
	placedValue("long_bytes_total", "Bytes that the mount wrote as KV that stays long.",
		prometheus.CounterValue, func(p *PlacementWear) float64 { return float64(p.Long) }),
	fdpValue("host_written_bytes_total", "Bytes that hosts wrote, by the drive's FDP statistics; 0 without.",
		prometheus.CounterValue, func(l *PlacementLog) float64 { return l.HostWritten }),
	fdpValue("media_written_bytes_total", "Bytes written to the media, by the drive's FDP statistics; 0 without.",
		prometheus.CounterValue, func(l *PlacementLog) float64 { return l.MediaWritten }),
	fdpValue("media_erased_bytes_total", "Bytes of the media erased, by the drive's FDP statistics; 0 without.",
		prometheus.CounterValue, func(l *PlacementLog) float64 { return l.MediaErased }),
	fdpValue("write_amplification", "Media bytes for a byte of the host since the mount, by the drive's FDP "+
		"statistics; 0 before a MiB.", prometheus.GaugeValue, func(l *PlacementLog) float64 { return l.Amplification }),
}

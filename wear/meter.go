package wear

import (
	"math"
	"time"
)

// meterSamples divide each window of a Meter.
const meterSamples = 60

// Meter turns a growing total into rates over the last minute and the last hour. Not safe for concurrent use.
type Meter struct {
	minute, hour window
}

// window keeps samples at least a sixtieth of its length apart.
type window struct {
	at    [meterSamples + 1]time.Time
	total [meterSamples + 1]uint64
	n     int    // samples taken so far
	last  uint64 // the newest total, sampled or not
}

// Add notes a total. One that is less than the last one is a new beginning.
func (m *Meter) Add(now time.Time, total uint64) {
	m.minute.add(now, total, time.Minute)
	m.hour.add(now, total, time.Hour)
}

func (w *window) add(now time.Time, total uint64, length time.Duration) {
	if w.n > 0 {
		sample := (w.n - 1) % len(w.at)
		if total < w.last || now.Before(w.at[sample]) {
			w.n = 0
		} else if now.Sub(w.at[sample]) < length/meterSamples {
			w.last = total
			return
		}
	}
	w.last = total
	w.at[w.n%len(w.at)], w.total[w.n%len(w.at)] = now, total
	w.n++
}

// Minute is the rate in bytes a second over the last minute, or since the first sample if that is less.
func (m *Meter) Minute(now time.Time) float64 { return m.minute.rate(now, time.Minute) }

// Hour is the same over the last hour.
func (m *Meter) Hour(now time.Time) float64 { return m.hour.rate(now, time.Hour) }

// rate is that from the oldest sample within the window to the newest total. What came after that counts as time in
// which nothing was written.
func (w *window) rate(now time.Time, length time.Duration) float64 {
	if w.n == 0 {
		return 0
	}
	newest := w.n - 1
	first := max(0, w.n-len(w.at))
	for first < newest && now.Sub(w.at[first%len(w.at)]) > length+length/meterSamples {
		first++
	}
	from := first % len(w.at)
	// A rate over less than a second would be the burst of a moment.
	return float64(w.last-w.total[from]) / math.Max(now.Sub(w.at[from]).Seconds(), 1)
}

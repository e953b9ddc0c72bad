package wear

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMeter(t *testing.T) {
	var m Meter
	now := time.Unix(1_700_000_000, 0)
	require.Zero(t, m.Minute(now))
	require.Zero(t, m.Hour(now))
	// 100 B/s for two hours, looked at every 700 ms.
	total := uint64(0)
	for range 2 * 3600 * 10 / 7 {
		m.Add(now, total)
		now, total = now.Add(700*time.Millisecond), total+70
	}
	require.InDelta(t, 100, m.Minute(now), 3)
	require.InDelta(t, 100, m.Hour(now), 3)
	// Ten minutes without a write: the minute knows of none, the hour of fifty minutes.
	for range 600 {
		m.Add(now, total)
		now = now.Add(time.Second)
	}
	require.Zero(t, m.Minute(now))
	require.InDelta(t, 100*50/60.0, m.Hour(now), 3)
	require.InDelta(t, 0, m.Hour(now.Add(100*time.Hour)), 1, "nobody looked for long")
	// A total that begins anew is no rate of 2^64.
	m.Add(now, 5)
	require.Zero(t, m.Minute(now))
	m.Add(now.Add(10*time.Second), 1005)
	require.InDelta(t, 100, m.Minute(now.Add(10*time.Second)), 1e-9)
}

// Whatever is added and when: no rate is negative, or more than all that was written in the shortest time there is.
func TestMeterBounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var m Meter
		now, total := time.Unix(1_700_000_000, 0), rng.Uint64N(1<<40)
		for range 500 {
			now = now.Add(time.Duration(rng.Int64N(int64(90 * time.Second))))
			if rng.IntN(50) == 0 {
				total = rng.Uint64N(1 << 40)
			}
			total += rng.Uint64N(1 << 30)
			m.Add(now, total)
			for _, rate := range []float64{m.Minute(now), m.Hour(now)} {
				require.GreaterOrEqual(t, rate, 0.0)
				require.LessOrEqual(t, rate, float64(total))
			}
		}
	}
}

// Package slack says how long a layer computes and how much I/O fits beside it: a table of windows by the lengths of
// input and prefix, and the arithmetic from a window to a budget. It reads no clock and schedules nothing.
// docs/slack.md has the formulas.
package slack

import (
	"math"
	"sort"
	"time"
)

// IO is what the budget of a window depends on, for one GPU.
type IO struct {
	BytesPerToken int64     `json:"bytes_per_token"` // of one layer and rank
	ObjectBytes   int64     `json:"object_bytes"`    // of the layer's largest object: one command
	Read          Direction `json:"read"`
	Write         Direction `json:"write"`
	Harvest       Harvest   `json:"harvest"`
}

// Direction is what reads alone, or writes alone, get; the two are never in flight together on a drive.
type Direction struct {
	RingBytesPerSecond   float64 `json:"ring_bytes_per_second"`             // between host and GPU
	DrivesBytesPerSecond float64 `json:"drives_bytes_per_second,omitempty"` // of all drives, for this rank; 0: no limit
	LatencyUS            float64 `json:"latency_us"`                        // fixed part of any amount of I/O
}

// Harvest is the kernel that verifies and scatters what was read, and gathers what is written.
type Harvest struct {
	SMs         int     `json:"sms"`          // of the GPU
	SMShareMax  float64 `json:"sm_share_max"` // most of the window's SM time that it may take, more than 0, at most 1
	LaunchBytes int64   `json:"launch_bytes"` // of one launch: what is left to do when the last byte has arrived
	Grids       []Grid  `json:"grids"`        // by rising number of blocks
}

// BlocksPerSM is how many blocks of the harvest share an SM: each has half of its registers.
const BlocksPerSM = 2

// Grid is the harvest's speed on so many blocks.
type Grid struct {
	Blocks         int     `json:"blocks"`
	BytesPerSecond float64 `json:"bytes_per_second"`
}

// Way is a direction of I/O.
type Way int

// Read restores, Write stores.
const (
	Read Way = iota
	Write
)

// Share is the I/O of one way that fits a window.
type Share struct {
	Objects int   `json:"objects"` // in flight at most: IOCTXs of one object each
	Bytes   int64 `json:"bytes"`   // in flight at most
	Blocks  int   `json:"blocks"`  // of the harvest's grid; 0 where nothing fits
}

// Budget has both ways of one window, each as if the window were its own. What reads leave to writes is the Budget of
// window - Time(Read, share).
type Budget struct {
	Read  Share `json:"read"`
	Write Share `json:"write"`
}

// gridSpare: one part in so many of what fits a window is left out, so that a grid that is smaller, and little slower,
// will do. The largest one would always bring a few objects more.
const gridSpare = 20

// objectsMax bounds the search for a share; no window holds so many objects.
const objectsMax = 1 << 30

func (io *IO) direction(way Way) *Direction {
	if way == Write {
		return &io.Write
	}
	return &io.Read
}

// rate is in bytes a second.
func (d *Direction) rate() float64 {
	if d.DrivesBytesPerSecond > 0 {
		return min(d.RingBytesPerSecond, d.DrivesBytesPerSecond)
	}
	return d.RingBytesPerSecond
}

// time of so many objects, rounded up: fixed latency, bytes at the slower of ring and drives, and the last harvest (of
// a store: the first gather), which nothing overlaps.
func (io *IO) time(way Way, objects int, g *Grid) time.Duration {
	if objects <= 0 {
		return 0
	}
	d, bytes := io.direction(way), float64(objects)*float64(io.ObjectBytes)
	ns := d.LatencyUS*1e3 + 1e9*bytes/d.rate() + 1e9*min(bytes, float64(io.Harvest.LaunchBytes))/g.BytesPerSecond
	if !(ns < math.MaxInt64/2) {
		return math.MaxInt64 / 2
	}
	return time.Duration(math.Ceil(ns))
}

// Time is what s.Objects take with a grid of s.Blocks, or with the slowest grid where that is none of the table's.
func (io *IO) Time(way Way, s Share) time.Duration {
	slowest := &io.Harvest.Grids[0]
	for i := range io.Harvest.Grids {
		g := &io.Harvest.Grids[i]
		if g.Blocks == s.Blocks {
			return io.time(way, s.Objects, g)
		}
		if g.BytesPerSecond < slowest.BytesPerSecond {
			slowest = g
		}
	}
	return io.time(way, s.Objects, slowest)
}

// Objects is how many objects of one layer hold so many tokens, at most LengthMax.
func (io *IO) Objects(tokens int) int {
	return int((int64(tokens)*io.BytesPerToken + io.ObjectBytes - 1) / io.ObjectBytes)
}

// fits says whether the objects end within the window, and their harvest within its SM time.
func (io *IO) fits(way Way, objects int, g *Grid, window time.Duration) bool {
	h := &io.Harvest
	busy := 1e9 * float64(objects) * float64(io.ObjectBytes) / g.BytesPerSecond // ns of g.Blocks
	return io.time(way, objects, g) <= window &&
		busy*float64(g.Blocks) <= h.SMShareMax*float64(BlocksPerSM*h.SMs)*float64(window)
}

// share is the most objects that fit with any grid, but for one part in gridSpare, and the smallest grid with which so
// many fit.
func (io *IO) share(way Way, window time.Duration) Share {
	n := 0
	for i := range io.Harvest.Grids {
		g := &io.Harvest.Grids[i]
		n = max(n, sort.Search(objectsMax, func(n int) bool { return !io.fits(way, n+1, g, window) }))
	}
	n -= n / gridSpare
	for i := range io.Harvest.Grids {
		if g := &io.Harvest.Grids[i]; n > 0 && io.fits(way, n, g, window) {
			return Share{Objects: n, Bytes: int64(n) * io.ObjectBytes, Blocks: g.Blocks}
		}
	}
	return Share{}
}

// Budget is what fits a window, which may be measured, corrected or what is left of one.
func (io *IO) Budget(window time.Duration) Budget {
	return Budget{Read: io.share(Read, window), Write: io.share(Write, window)}
}

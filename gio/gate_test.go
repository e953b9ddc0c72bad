package gio_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/gio/giotest"
)

// gate keeps reads and writes of a drive apart, refuses now and then for no reason, and notes what executors do wrong.
type gate struct {
	t      *testing.T
	mu     sync.Mutex
	random *rand.Rand
	flight [2]int // parts of chunks
	bytes  [2]uint64
	wanted [2]int
	ended  [2]uint64 // commands
	failed uint64
}

func way(write bool) int {
	if write {
		return 1
	}
	return 0
}

func (g *gate) Begin(write bool, bytes uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := way(write)
	if g.flight[1-d] > 0 || g.random.IntN(4) == 0 {
		return false
	}
	g.flight[d]++
	g.bytes[d] += bytes
	return true
}

func (g *gate) End(write bool, bytes, commands uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := way(write)
	g.flight[d]--
	g.bytes[d] -= bytes
	g.ended[d] += commands
	assert.GreaterOrEqual(g.t, g.flight[d], 0)
}

func (g *gate) Want(write bool, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wanted[way(write)] += n
	assert.GreaterOrEqual(g.t, g.wanted[way(write)], 0)
}

func (g *gate) Fail(_ bool, commands uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failed += commands
}

// gates are those of all executors of a test.
type gates struct {
	t    *testing.T
	seed uint64
	mu   sync.Mutex
	all  []*gate
}

// of gives every drive of a configuration a gate, also after lanes have begun again.
func (g *gates) of(c gio.RingConfig) gio.RingConfig {
	drives := make([]*gate, len(c.Lanes[0]))
	g.mu.Lock()
	for d := range drives {
		drives[d] = &gate{t: g.t, random: rand.New(rand.NewPCG(g.seed, uint64(len(g.all))))}
		g.all = append(g.all, drives[d])
	}
	g.mu.Unlock()
	gated := func(lane []gio.Queue) []gio.Queue {
		lane = append([]gio.Queue(nil), lane...)
		for d := range lane {
			lane[d].Gate = drives[d]
		}
		return lane
	}
	lanes := make([][]gio.Queue, len(c.Lanes))
	for l := range lanes {
		lanes[l] = gated(c.Lanes[l])
	}
	c.Lanes = lanes
	if reattach := c.Reattach; reattach != nil {
		c.Reattach = func(l int) ([]gio.Queue, error) {
			lane, err := reattach(l)
			return gated(lane), err
		}
	}
	return c
}

// gated are the tests of executors whose chunks are held back, a drive's part at a time.
var gated = []string{"Mixed", "Faults", "Concurrent", "Layers", "DeferredFaults", "Closed"}

// runGated: the suite goes on as ever, and when all is over nothing of a chunk is left at any gate.
func runGated(t *testing.T, s giotest.Subject, only []string, left bool) {
	g := &gates{t: t, seed: s.Seed}
	inner := s.New
	s.New = func(c gio.RingConfig, peer bool) (gio.Executor, error) { return inner(g.of(c), peer) }
	s.Only = only
	giotest.Run(t, s)
	require.NotEmpty(t, g.all)
	commands, failed := uint64(0), uint64(0)
	for _, x := range g.all {
		require.Equal(t, [2]int{}, x.wanted)
		if !left {
			require.Equal(t, [2]int{}, x.flight)
			require.Equal(t, [2]uint64{}, x.bytes)
		}
		commands += x.ended[0] + x.ended[1]
		failed += x.failed
	}
	require.LessOrEqual(t, failed, commands)
	if !left {
		require.Positive(t, failed)
	}
}

func TestRingGated(t *testing.T) {
	s := giotest.Subject{Steps: true, Store: true, Seed: testSeed(t), Rounds: 2,
		New: func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) }}
	runGated(t, s, gated, false)
	runGated(t, s, []string{"DeadDaemon", "Quarantine"}, true)
}

func TestGPUGatedOnFake(t *testing.T) {
	s := onFake(t).subject(testSeed(t), false)
	s.Store = true
	runGated(t, s, gated, false)
	runGated(t, onFake(t).subject(testSeed(t), false), []string{"DeadDaemon"}, true)
}

func TestGPUGated(t *testing.T) {
	s := gpuWorld(t).subject(testSeed(t), false)
	s.Store = true
	runGated(t, s, gated, false)
}

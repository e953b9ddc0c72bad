package gio_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/gio/giotest"
)

func TestRing(t *testing.T) {
	giotest.Run(t, giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true,
		Seed:  rand.Uint64(),
	})
}

// stored are the tests of what a store buffer changes.
var stored = []string{
	"Layers", "LayerMisuse", "LayerTimeouts", "HeldTrailers", "Closed", "DeferredFaults", "DeferredHeld", "DeferredEnds",
	"DeferredClose", "DeferredAgain", "DeferredQuarantine", "StoreFull",
}

// paced are those with a pacer.
var paced = []string{"PacedWrites", "HighWater", "ReadAhead"}

// withPacer gives all executors of a subject one.
func withPacer(s giotest.Subject) giotest.Subject {
	var last *gio.TestPacer
	inner := s.New
	s.New = func(c gio.RingConfig, peer bool) (gio.Executor, error) {
		c, last = gio.WithPacer(c)
		return inner(c, peer)
	}
	s.Pacer = func() giotest.Pacer { return last }
	s.Store, s.Only = true, paced
	return s
}

func TestRingPaced(t *testing.T) {
	giotest.Run(t, withPacer(giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true, Seed: rand.Uint64(),
	}))
}

// scheduled are the tests of executors with a scheduler.
var scheduled = []string{"Layers", "Concurrent", "DeferredFaults", "Closed", "DeadDaemon"}

// runScheduled runs the tests that a scheduler may change something about, beside somebody who computes.
func runScheduled(t *testing.T, s giotest.Subject) {
	var last atomic.Pointer[gio.TestScheduler]
	var mu sync.Mutex // tests run at once
	var all []gio.TestScheduler
	inner := s.New
	s.New = func(c gio.RingConfig, peer bool) (gio.Executor, error) {
		c, scheduler := gio.WithScheduler(c)
		mu.Lock()
		all = append(all, scheduler)
		mu.Unlock()
		last.Store(&scheduler)
		return inner(c, peer)
	}
	stop := make(chan struct{})
	var computes sync.WaitGroup
	computes.Go(func() {
		random := rand.New(rand.NewPCG(s.Seed, 1))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(random.IntN(500)) * time.Microsecond):
			}
			if x := last.Load(); x != nil {
				assert.NoError(t, x.Step(random))
			}
		}
	})
	s.Store, s.Only = true, scheduled
	giotest.Run(t, s)
	close(stop)
	computes.Wait()
	require.NotEmpty(t, all)
	for _, x := range all {
		require.NoError(t, x.Check())
	}
}

func TestRingScheduled(t *testing.T) {
	runScheduled(t, giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true, Seed: rand.Uint64(),
	})
}

func TestRingStores(t *testing.T) {
	giotest.Run(t, giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true, Store: true,
		Seed: rand.Uint64(),
	})
}

package gio_test

import (
	"math/rand/v2"
	"testing"

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

// stored are the tests that a store buffer may change something about.
var stored = []string{
	"Layers", "LayerDamage", "LayerMisuse", "LayerTimeouts", "HeldWrites", "HeldTrailers", "Concurrent", "Closed",
	"DeadDaemon", "DeafDaemon", "DeferredFaults", "DeferredHeld", "DeferredEnds", "DeferredClose",
	"DeferredQuarantine", "StoreFull",
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

func TestRingStores(t *testing.T) {
	giotest.Run(t, giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true, Store: true, Only: stored,
		Seed: rand.Uint64(),
	})
}

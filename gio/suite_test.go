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
	"DeadDaemon", "DeafDaemon",
}

func TestRingStores(t *testing.T) {
	giotest.Run(t, giotest.Subject{
		New:   func(c gio.RingConfig, _ bool) (gio.Executor, error) { return gio.NewRing(c) },
		Steps: true, Store: true, Only: stored,
		Seed: rand.Uint64(),
	})
}

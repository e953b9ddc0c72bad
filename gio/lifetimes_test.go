package gio

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/lifetime"
)

func TestLifetimes(t *testing.T) {
	var l Lifetimes
	model := map[uint32]lifetime.Class{}
	r := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		slot := r.Uint32N(1 << r.IntN(18))
		require.Equal(t, model[slot], l.of(slot))
		c := lifetime.Class(r.IntN(int(lifetime.Classes) + 1))
		l.Set(slot, c)
		if c < lifetime.Classes { // what is no class is not noted
			model[slot] = c
		}
	}
	for slot, c := range model {
		require.Equal(t, c, l.of(slot))
	}
	require.Zero(t, l.of(1<<32-1))
}

// What one thread has set it finds, whatever others set meanwhile.
func TestLifetimesConcurrent(t *testing.T) {
	var l Lifetimes
	var group sync.WaitGroup
	for n := range uint32(4) {
		group.Go(func() {
			for slot := n; slot < 20_000; slot += 4 {
				c := lifetime.Class(slot / 4 % uint32(lifetime.Classes))
				l.Set(slot, c)
				if l.of(slot) != c {
					t.Errorf("slot %d", slot)
				}
			}
		})
	}
	group.Wait()
}

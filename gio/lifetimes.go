package gio

import (
	"sync"
	"sync/atomic"

	"tuttifs/lifetime"
)

// Directive is what Writes to a drive carry, so that it keeps apart what goes at different times. The zero value is
// none.
type Directive struct {
	Type     uint8
	Specific [lifetime.Classes]uint16
}

// Lifetimes are what the mount expects of the slots of a pool that are to be written: two bits each. The zero value
// expects nothing. Safe for concurrent use; whoever writes a slot has set it before.
type Lifetimes struct {
	mu    sync.Mutex // of those who set
	words atomic.Pointer[[]atomic.Uint32]
}

const (
	lifetimeBits   = 2
	slotsPerWord   = 32 / lifetimeBits
	lifetimeMask   = 1<<lifetimeBits - 1
	lifetimesLeast = 64 // words
)

var _ = [1]struct{}{}[lifetime.Classes-1<<lifetimeBits]

// Set notes what is expected of a slot.
func (t *Lifetimes) Set(slot uint32, c lifetime.Class) {
	if c == t.of(slot) || c >= lifetime.Classes {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	words := t.words.Load()
	at := int(slot / slotsPerWord)
	if words == nil || at >= len(*words) {
		words = t.grow(words, at)
	}
	shift := slot % slotsPerWord * lifetimeBits
	w := &(*words)[at]
	w.Store(w.Load()&^(lifetimeMask<<shift) | uint32(c)<<shift)
}

// grow makes room for word at. Readers of the old words miss nothing that was set before.
func (t *Lifetimes) grow(old *[]atomic.Uint32, at int) *[]atomic.Uint32 {
	n := lifetimesLeast
	for n <= at {
		n *= 2
	}
	words := make([]atomic.Uint32, n)
	if old != nil {
		for i := range *old {
			words[i].Store((*old)[i].Load())
		}
	}
	t.words.Store(&words)
	return &words
}

func (t *Lifetimes) of(slot uint32) lifetime.Class {
	words := t.words.Load()
	if words == nil || int(slot/slotsPerWord) >= len(*words) {
		return lifetime.Normal
	}
	return lifetime.Class((*words)[slot/slotsPerWord].Load() >> (slot % slotsPerWord * lifetimeBits) & lifetimeMask)
}

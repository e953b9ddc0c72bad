package emu

import (
	"fmt"
	"sync"
	"time"

	"tuttifs/nvme"
)

// Fault is what a test does to one I/O command.
type Fault struct {
	Status uint16        // complete with this status field (phase not included) instead of serving
	Delay  time.Duration // serve later
	Hold   func() bool   // serve when it is true; asked again and again, under the same rules as the hook
	Drop   bool          // never complete; the command moves no data
	Double bool          // complete twice
	Short  uint32        // transfer this many bytes only, then report a data transfer error
}

// SetFaults installs a hook that is asked about every I/O command (nil removes it). It sees the private copy of the
// entry, is called on the polling thread, and must not call back into the controller.
func (c *Controller) SetFaults(f func(sqe *nvme.SQE) *Fault) {
	if f == nil {
		c.faults.Store(nil)
		return
	}
	c.faults.Store(&f)
}

// Model is a drive's bandwidth. Completions are held back so that no more than the given bytes a second go through;
// when reads and writes overlap, both share Mixed. A zero is no limit.
type Model struct {
	ReadBytesPerSecond  int64
	WriteBytesPerSecond int64
	MixedBytesPerSecond int64
	Latency             time.Duration // of every command, besides its share of the bandwidth
}

// Validate returns all problems.
func (m *Model) Validate() error {
	if m.ReadBytesPerSecond < 0 || m.WriteBytesPerSecond < 0 || m.MixedBytesPerSecond < 0 || m.Latency < 0 {
		return fmt.Errorf("%w: a model with negative figures: %+v", ErrConfig, *m)
	}
	return nil
}

// modelState is the medium of a modelled drive: it serves one byte after the other, whatever poller they come from.
type modelState struct {
	mu   sync.Mutex
	free time.Time    // when the medium has served everything so far
	last [2]time.Time // when the last read and the last write will have been served
}

// due is when a command that starts now would complete on the modelled medium.
func (m *modelState) due(cfg *Model, write bool, bytes uint32, now time.Time) time.Time {
	rate, self, other := cfg.ReadBytesPerSecond, 0, 1
	if write {
		rate, self, other = cfg.WriteBytesPerSecond, 1, 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if mixed := cfg.MixedBytesPerSecond; mixed > 0 && m.last[other].After(now) && (rate == 0 || mixed < rate) {
		rate = mixed
	}
	if m.free.Before(now) {
		m.free = now
	}
	if rate > 0 {
		m.free = m.free.Add(time.Duration(float64(bytes) / float64(rate) * float64(time.Second)))
	}
	m.last[self] = m.free
	return m.free.Add(cfg.Latency)
}

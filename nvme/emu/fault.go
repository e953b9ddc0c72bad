package emu

import (
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

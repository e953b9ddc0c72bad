package emu

import (
	"time"

	"tuttifs/nvme"
	"tuttifs/phase"
)

// drivePhase is a poller's part in the read/write phase of one drive: of all its queues to that drive. It asks for each
// direction once a step. The poller's lock guards it.
type drivePhase struct {
	*phase.Holder
	token  *phase.Token
	queues int
	asked  [2]bool // in this step
	open   [2]bool // the answers
}

// phaseOf is the poller's part in the phase of a controller's drive, or nil where it has none.
func (p *Poller) phaseOf(c *Controller) *drivePhase {
	if c.cfg.Phase == nil {
		return nil
	}
	for _, ph := range p.phases {
		if ph.token == c.cfg.Phase {
			ph.queues++
			return ph
		}
	}
	ph := &drivePhase{Holder: c.cfg.Phase.Holder(phase.Data), token: c.cfg.Phase, queues: 1}
	p.phases = append(p.phases, ph)
	return ph
}

// leavePhase is the end of a queue that the poller serves no more; nothing of it is in flight.
func (p *Poller) leavePhase(q *Queue) {
	ph := q.phase
	if ph == nil {
		return
	}
	if ph.queues--; ph.queues > 0 {
		return
	}
	ph.Close(time.Now())
	for i, x := range p.phases {
		if x == ph {
			p.phases = append(p.phases[:i], p.phases[i+1:]...)
			break
		}
	}
}

// admits says whether commands with an opcode may begin now. A refused queue is looked at again within a nap.
func (p *Poller) admits(ph *drivePhase, opcode uint8, now time.Time) bool {
	var d phase.Direction
	switch opcode {
	case nvme.IORead:
		d = phase.Read
	case nvme.IOWrite, nvme.IOWriteZeroes, nvme.IODSM:
		d = phase.Write
	default:
		return true
	}
	if ph.Full(d) {
		return false // until commands have ended, which wakes
	}
	if !ph.asked[d] {
		ph.asked[d], ph.open[d] = true, ph.Enter(d, now)
	}
	if !ph.open[d] {
		p.refused = true
	}
	return ph.open[d]
}

// settle ends a step for all drives' phases. The time may be zero, and is asked for then.
func (p *Poller) settle(now time.Time) {
	for _, ph := range p.phases {
		if !ph.Touched() {
			continue
		}
		if now.IsZero() {
			now = time.Now()
		}
		ph.asked = [2]bool{}
		ph.Settle(now)
	}
}

// leavePhases leaves what ended between the steps, as nobody may step any more.
func (p *Poller) leavePhases() {
	for _, ph := range p.phases {
		ph.asked = [2]bool{}
		ph.Leave(time.Now())
	}
}

// direction of a command that was decoded and moves data or changes it.
func (c *command) direction() phase.Direction {
	if c.kind == doRead {
		return phase.Read
	}
	return phase.Write
}

// enterPhase counts a command that begins, and leavePhase that it is over.
func (c *command) enterPhase() {
	c.running = true
	c.queue.phase.Begin(c.direction(), int(c.n))
}

func (c *command) leavePhase() {
	c.running = false
	c.queue.phase.End(c.direction(), int(c.n))
}

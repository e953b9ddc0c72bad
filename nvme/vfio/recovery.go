package vfio

import (
	"errors"
	"time"

	"tuttifs/nvme"
)

// How a command that does not end is ended: Abort; if it stays, its queue is deleted, which ends all its commands, and
// made anew; if that does not succeed, the controller is reset through CC.EN; if it does not even stop, its function is
// reset from outside. Each step either leaves the controller known not to touch the command's memory, or the next one
// follows. If the last one fails, the memory is in quarantine.

// quick runs an admin command for whoever has recovery: nothing recovers from it but its caller.
func (c *Controller) quick(e nvme.SQE) (uint64, error) {
	q, end := c.admin, time.Now().Add(c.o.RecoveryTimeout)
	var t Ticket
	sent := false
	for p := (pause{}); ; p.wait() {
		if !sent {
			var err error
			t, err = q.trySubmit(e, c.o.AdminTimeout)
			if err != nil && !errors.Is(err, ErrFull) {
				return 0, err
			}
			sent = err == nil
		}
		if sent {
			if r, err, done := q.take(t); done {
				return r, err
			}
		}
		if time.Now().After(end) || p.long() && !c.alive() {
			if sent {
				q.abandon(t)
			}
			return 0, c.errorf("admin command %02xh: %w", e.Opcode, ErrTimeout)
		}
	}
}

// alive says that the controller is there, enabled and not in fatal status.
func (c *Controller) alive() bool {
	csts := c.t.Load32(nvme.RegCSTS)
	return csts != allOnes && csts&(nvme.CSTSReady|nvme.CSTSFatal) == nvme.CSTSReady
}

// checkHealth is for those who have waited for a while: a controller that is gone or has failed is dealt with.
func (c *Controller) checkHealth() {
	if c.alive() {
		return
	}
	c.recovery.Lock()
	defer c.recovery.Unlock()
	if c.Err() != nil || c.alive() {
		return // somebody else was faster
	}
	_ = c.reset() // whoever waits hears of it by the end of the command
}

// expire ends a command whose time is over. It has ended when expire returns.
func (c *Controller) expire(q *Queue, t Ticket) {
	c.recovery.Lock()
	defer c.recovery.Unlock()
	if c.Err() != nil || !q.markExpired(t) {
		return
	}
	if q != c.admin && c.alive() && (c.abort(q, t) || c.renew(q) == nil) {
		return
	}
	_ = c.reset() // the command hears of it
}

// abort asks the controller to end one command, and is true if the command has ended.
func (c *Controller) abort(q *Queue, t Ticket) bool {
	var e nvme.SQE
	nvme.BuildAbort(&e, 0, q.pair.ID, t.cid)
	if r, err := c.quick(e); err != nil || r&1 != 0 {
		return false // bit 0: not aborted
	}
	for p, end := (pause{}), time.Now().Add(c.o.RecoveryTimeout); time.Now().Before(end); p.wait() {
		if !q.markExpired(t) {
			return true
		}
	}
	return false
}

// renew deletes a queue and makes it again. What was in flight has completed, or never will.
func (c *Controller) renew(q *Queue) error {
	q.hold()
	err := c.deleteOn(c.quick, q.pair, func() {
		q.end(c.errorf("queue %d was deleted: %w", q.pair.ID, ErrAborted), true)
	})
	if err != nil {
		return err
	}
	q.restart()
	if err := c.createOn(c.quick, q.pair); err != nil {
		return err
	}
	q.resume()
	return nil
}

// Reset resets the controller and starts it again. Commands in flight end with ErrAborted; pairs that were handed out
// are lost.
func (c *Controller) Reset() error {
	c.recovery.Lock()
	defer c.recovery.Unlock()
	if err := c.Err(); err != nil {
		return err
	}
	return c.reset()
}

// reset does it for whoever has recovery. Whatever happens, no command is in flight when it returns.
func (c *Controller) reset() error {
	c.mu.Lock()
	c.resets++ // who creates a queue meanwhile sees by that that it went
	lost := c.pairs
	c.pairs = map[uint16]*Pair{}
	queues := []*Queue{c.admin}
	for _, q := range c.queues {
		queues = append(queues, q)
	}
	c.mu.Unlock()
	for _, q := range queues {
		q.hold()
	}
	err := c.stop()
	if err != nil {
		c.lose(err, false)
	}
	c.mu.Lock()
	for id, p := range lost {
		delete(c.used, id)
		close(p.lost)
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	for _, q := range queues {
		q.end(c.errorf("the controller was reset: %w", ErrAborted), true)
		q.restart()
	}
	if err := c.start(); err != nil {
		if !errors.Is(err, ErrGone) {
			err = errors.Join(c.errorf("it does not start again after a reset: %w", ErrDead), err)
		}
		if stop := c.stop(); stop != nil {
			err = errors.Join(err, stop)
		}
		c.lose(err, false)
		return err
	}
	return nil
}

// stop makes sure that the controller touches no memory any more. The error is ErrGone, which is as good, or
// ErrQuarantined.
func (c *Controller) stop() error {
	err := c.disable()
	if err == nil || errors.Is(err, ErrGone) {
		return err
	}
	if again := c.t.Reset(); again != nil {
		err = errors.Join(err, again)
	} else if err = c.awaitReady(false); err == nil || errors.Is(err, ErrGone) {
		return err
	}
	return errors.Join(c.errorf("%w: %w", ErrDead, ErrQuarantined), err)
}

// lose ends everything for good. look says that completions which are there may be believed.
func (c *Controller) lose(err error, look bool) {
	c.mu.Lock()
	c.err = err
	lost := c.pairs
	c.pairs = map[uint16]*Pair{}
	c.mu.Unlock()
	for _, p := range lost {
		close(p.lost)
	}
	for _, q := range append(c.own(), c.admin) {
		q.endForGood(err, look)
	}
}

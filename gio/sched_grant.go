package gio

import (
	"math"
	"time"

	"tuttifs/slack"
)

// Cause is why a deferred write was issued.
type Cause uint8

// The causes.
const (
	CauseOff    Cause = iota // the scheduler is off, or has no budget
	CauseAge                 // it was older than MaxAge, or somebody had waited for Patience
	CauseHigh                // the store buffer was nearly full
	CauseWindow              // a layer of a prefill left room
	CauseDecode              // a decode step did
	CauseIdle                // nothing computed
	causes
)

// granted is what the last answer allowed.
type granted struct {
	bytes    int64
	cause    Cause
	windowed int64 // bytes in flight that were to end within the window or step that is under way
	turn     int64 // when old writes have their next turn beside reads
	turnLeft int64 // bytes of this one
}

// unlimited is more bytes than there ever are.
const unlimited = int64(math.MaxInt64 / 4)

// share is what of one way fits a window, at the rates that are now believed.
func (p *policy) share(way slack.Way, window int64) slack.Share {
	if window <= 0 {
		return slack.Share{}
	}
	io := p.io
	io.Read = slack.Direction{RingBytesPerSecond: p.read.bytesPerSecond(), LatencyUS: p.io.Read.LatencyUS}
	io.Write = slack.Direction{RingBytesPerSecond: p.write.bytesPerSecond(), LatencyUS: p.io.Write.LatencyUS}
	b := io.Budget(time.Duration(window))
	if way == slack.Write {
		return b.Write
	}
	return b.Read
}

// progress is what of writes fits a time in which no window counts: something in any case.
func (p *policy) progress(window int64) int64 {
	return max(p.share(slack.Write, window).Bytes, p.io.ObjectBytes)
}

// computeEnds is when the layer or step that is computed will be done, as far as is known: not before now.
func (p *policy) computeEnds(now int64) int64 {
	return max(now, p.pass.since+p.pass.stood+p.pass.window)
}

// left is what of writes fits the rest of the layer or step that is computed, those in flight included.
func (p *policy) left(now int64) int64 { return p.share(slack.Write, p.computeEnds(now)-now).Bytes }

// awaited is the last layer that compute waits for, or will have to wait for even if nothing but its reads is done from
// now on.
func (p *policy) awaited(now int64) int {
	s := &p.pass
	ends := p.computeEnds(now)
	var before int64 // what is to be read until a layer may begin
	for l := s.layer; l < p.reads.top[0]; l++ {
		left := p.reads.layers[0][l].left
		before += left
		if l <= s.layer || left == 0 {
			continue
		}
		if begins := ends + int64(l-s.layer-1)*s.window; now+p.read.latency+p.read.takes(before) >= begins {
			return l
		}
		break
	}
	return s.layer
}

// readAhead is what the layers behind those that somebody blocks for may have in flight: a layer that compute waits for
// as much as it has, and those behind it what fits the window.
func (p *policy) readAhead(now int64) uint64 {
	now = p.account(now)
	s := &p.pass
	if p.c.Off || p.c.NoBudget || s.kind == passNone || s.window == 0 {
		return math.MaxUint64
	}
	ahead := s.ahead.Bytes
	if p.reads.left > ahead && p.read.takes(ahead) < 2*p.read.latency {
		p.read.limited = true // what is measured now is not what the drives can do
	}
	if s.kind == passDecode { // nobody would ever wait for what is read beside decode steps
		return uint64(max(ahead, int64(p.io.Harvest.LaunchBytes)))
	}
	// What compute waits for is held back by nothing that is in flight behind it, and whoever blocks for it.
	last := p.awaited(now)
	var all, flying int64
	for l := range last + 1 {
		all += p.reads.layers[0][l].left
		flying += p.reads.layers[0][l].flying
	}
	if all > flying {
		return uint64(max(ahead, p.reads.behind(last)) + all)
	}
	for l := range min(p.reads.hostLayer, last) + 1 { // it is not counted
		flying -= p.reads.layers[0][l].flying
	}
	return uint64(ahead + flying)
}

// harvestBlocks is the grid that harvests are to have now, 0 where nothing says anything about grids.
func (p *policy) harvestBlocks(now int64) int {
	p.account(now)
	grids := p.io.Harvest.Grids
	switch {
	case p.c.Table == nil:
		return 0
	case p.c.Off || p.c.NoBudget || p.pass.kind == passNone:
		return HarvestBlocksDefault
	case p.stands():
		return grids[len(grids)-1].Blocks // nothing computes beside it
	}
	return max(p.pass.ahead.Blocks, grids[0].Blocks)
}

// writes says how much more of the backlog may be put in flight now.
func (p *policy) writes(now int64, l *load) grant {
	now = p.account(now)
	p.stats.Backlog, p.stats.BacklogOldest = l.deferred.bytes, time.Duration(l.oldest)
	p.granted.bytes = 0
	if l.deferred.objects == 0 {
		return grant{again: never}
	}
	p.stats.OldestAge = max(p.stats.OldestAge, time.Duration(now-l.oldest))
	more, cause, again := p.more(now, l)
	p.granted.bytes, p.granted.cause = max(0, more), cause
	return grant{ioSize{objects: math.MaxUint64, bytes: uint64(p.granted.bytes)}, again}
}

// more is the bytes of writes that may be added to those in flight, why, and when there may be more.
func (p *policy) more(now int64, l *load) (bytes int64, cause Cause, again int64) {
	s, writing := &p.pass, int64(l.writing.bytes)
	aged := l.oldest + int64(p.c.MaxAge)
	if l.awaited != 0 {
		aged = min(aged, l.awaited+int64(p.c.Patience))
	}
	switch {
	case p.c.Off:
		return unlimited, CauseOff, never
	case now >= aged && l.reads.objects > 0:
		if g := &p.granted; now >= g.turn {
			g.turn, g.turnLeft = now+turnEvery*turnNanos, max(p.progress(turnNanos), int64(l.next.bytes))
		}
		return p.granted.turnLeft, CauseAge, p.granted.turn
	case now >= aged:
		return p.atLeast(l, p.progress(turnNanos)-writing), CauseAge, now + turnNanos
	case l.reads.objects > 0 && !p.c.ReadsNotFirst:
		return 0, CauseAge, aged
	case p.c.NoBudget:
		return unlimited, CauseOff, never
	case s.kind == passPrefill:
		return p.left(now) - writing, CauseWindow, aged
	case s.kind == passDecode:
		return p.left(now) - writing, CauseDecode, min(aged, s.over+1)
	case now >= s.ended+int64(p.c.Idle):
		return p.atLeast(l, p.progress(idleNanos)-writing), CauseIdle, aged
	}
	return 0, CauseIdle, min(aged, s.ended+int64(p.c.Idle))
}

// atLeast makes room for the next piece where nothing is being written, however small the share: it would never go.
func (p *policy) atLeast(l *load, bytes int64) int64 {
	if l.writing.objects == 0 {
		return max(bytes, int64(l.next.bytes))
	}
	return bytes
}

// wrote takes note of a piece that was issued. What was not granted was issued because the store buffer is nearly full.
func (p *policy) wrote(bytes int64) {
	g, cause := &p.granted, CauseHigh
	if bytes <= g.bytes {
		g.bytes -= bytes
		cause = g.cause
	}
	p.stats.Issued[cause] += uint64(bytes)
	switch cause {
	case CauseAge:
		g.turnLeft = max(0, g.turnLeft-bytes)
	case CauseWindow, CauseDecode:
		g.windowed += bytes
	}
	if p.reads.flying > 0 {
		p.stats.Beside++
	}
}

package daemon

import (
	"sync/atomic"
	"time"
	"unsafe"

	"tuttifs/ioctl"
	"tuttifs/phase"
)

// Queue pairs of an SSD's own pass the daemon by, and with it their drive's phase. Their engines keep to it all the
// same: by the words of ioctl.DriveShare they ask for it, and are given and taken the right to begin. Of what an engine
// says only counts are believed, and those as far as the harm is its own: one that does not leave when it is told to
// holds others up for as long as a drive that does not answer would, and is then passed by for a multiple of that time.

const (
	// shareIdle is how many steps in a row without anything end a grant: between two chunks there may be nothing.
	shareIdle = 2
	// sharePassed is how many times as long as it held others up a member is passed by.
	sharePassed = 24
	// shareUnused is for how long a direction is the member's in which it begins nothing though it wants to: one that runs
	// begins within a fraction of that. Then its wish counts for nothing for as long, and for twice as long each time
	// again, up to shareIgnored: an engine that was stopped with its wish raised must not keep others out.
	shareUnused  = 5 * time.Millisecond
	shareIgnored = sharePassed * shareUnused
)

// driveShare is a member's part in the phase of a drive whose own queue pairs it has. One of its pollers steps it.
type driveShare struct {
	index  uint16
	words  *ioctl.DriveShare
	holder *phase.Holder // nil: the drive knows no phases
	stuck  time.Duration
	parts  [2]sharePart // by direction
	// passedUntil is until when the member may begin what it likes, and keeps nobody out.
	passedUntil time.Time
	log         func(format string, a ...any)
	passed      atomic.Uint64 // times that it was passed by
	// What was added up of it, until when, and how many bytes more are believed by direction; guarded by Control.realMu.
	counted   realCounts
	countedAt time.Time
	credit    [2]uint64
}

// sharePart is one direction.
type sharePart struct {
	granted   bool // the engine may begin
	begun     bool // the holder has it in flight
	idle      int  // steps in a row in which a granted part had nothing
	ended     uint64
	withdrawn time.Time // when the grant was taken back
	// unused is how long the grant has stood since something moved, up to seen; of the wish nothing is heard for ignored,
	// until ignoredUntil.
	unused, ignored    time.Duration
	seen, ignoredUntil time.Time
}

// shareDrives makes the member's part in the phases of drives whose own queue pairs it gets. The caller holds setup.
func (m *member) shareDrives() []*driveShare {
	var shares []*driveShare
	for d := range m.drives {
		if !m.real.has(d) {
			continue
		}
		s := &driveShare{index: m.drives[d].index, words: m.shareAt(d), countedAt: time.Now()}
		s.log = func(format string, a ...any) {
			m.c.o.Logf("session %d, process %d: "+format, append([]any{m.leases.SessionID(), m.pid()}, a...)...)
		}
		s.words.Grant = [2]uint32{ioctl.GrantAlways, ioctl.GrantAlways}
		if token := m.drives[d].phase; token != nil && !token.Options().Off {
			s.words.Grant = [2]uint32{}
			s.holder, s.stuck = token.Holder(phase.Data), token.Options().Stuck
		}
		shares = append(shares, s)
	}
	return shares
}

// shareAt is where the engine finds its words of the d-th drive.
func (m *member) shareAt(d int) *ioctl.DriveShare {
	at, _ := m.blockAt(int(m.shared.lanes), 0)
	return (*ioctl.DriveShare)(unsafe.Pointer(&m.shared.queues[at+d*int(unsafe.Sizeof(ioctl.DriveShare{}))]))
}

// stepShares goes on for all drives. It is true while there is something to come back for. A poller calls it, which is
// stopped before the memory goes.
func (m *member) stepShares(now time.Time) (again bool) {
	gone := m.gone.Load()
	for _, s := range m.shared.shares {
		if s.holder == nil {
			continue
		}
		for d := phase.Read; d <= phase.Write; d++ {
			again = s.step(d, now, gone) || again
		}
		s.holder.Settle(now)
	}
	return again
}

// step gives the engine the right to begin in one direction, or takes it.
func (s *driveShare) step(d phase.Direction, now time.Time, gone bool) (again bool) {
	p := &s.parts[d]
	flight, ended := atomic.LoadUint32(&s.words.Flight[d]), atomic.LoadUint64(&s.words.Commands[d])
	wanted := !gone && atomic.LoadUint32(&s.words.Wanted[d]) > 0
	moves := flight > 0 || ended != p.ended
	if p.idle++; wanted || moves {
		p.idle = 0
	}
	p.use(moves, now)
	if p.begun && ended != p.ended {
		s.holder.Moved(d)
	}
	p.ended = ended
	// Who has it asks again each step, so that it goes as soon as others are to have the drive.
	wish := wanted || p.granted && !gone && p.idle < shareIdle
	ask := wish && !now.Before(p.ignoredUntil)
	switch {
	case ask && (now.Before(s.passedUntil) || s.holder.Enter(d, now)):
		s.grant(d)
	case p.granted:
		p.granted, p.withdrawn = false, now
		atomic.StoreUint32(&s.words.Grant[d], 0)
		flight = atomic.LoadUint32(&s.words.Flight[d]) // after that: whoever begins from now on finds no grant
	}
	if p.begun && !p.granted {
		s.drain(d, flight, now)
	}
	return wish || p.begun // nobody else comes back for a wish that is ignored
}

// use notes whether the member uses what it was given, and when that is to be taken back.
func (p *sharePart) use(moves bool, now time.Time) {
	switch {
	case moves:
		p.unused, p.ignored, p.ignoredUntil = 0, 0, time.Time{}
	case p.granted:
		p.unused += now.Sub(p.seen)
	}
	if p.seen = now; p.unused >= shareUnused {
		p.unused, p.ignored = 0, min(max(2*p.ignored, shareUnused), shareIgnored)
		p.ignoredUntil = now.Add(p.ignored)
	}
}

// grant lets chunks begin. Of writes each holder has an equal part in flight.
func (s *driveShare) grant(d phase.Direction) {
	p := &s.parts[d]
	if !p.begun {
		p.begun = true
		s.holder.Begin(d, 0)
	}
	bytes := uint32(1)
	if d == phase.Write {
		bytes = uint32(s.holder.WriteShare())
	}
	p.granted = true
	atomic.StoreUint32(&s.words.Grant[d], bytes)
}

// drain leaves the drive when nothing is in flight any more, or that has taken too long.
func (s *driveShare) drain(d phase.Direction, flight uint32, now time.Time) {
	p := &s.parts[d]
	late := now.Sub(p.withdrawn)
	if flight > 0 && late < s.stuck {
		return
	}
	if flight > 0 {
		s.passed.Add(1)
		s.passedUntil = now.Add(sharePassed * late)
		s.log("%s of drive %d have not ended %v after the phase was taken from them: they are passed by for %v",
			[...]string{"reads", "writes"}[d], s.index, late.Round(time.Millisecond), (sharePassed * late).Round(time.Second))
	}
	p.begun = false
	s.holder.End(d, 0)
}

// closeShares leaves the phases and counts for the last time, when neither pollers nor queue pairs are left.
func (m *member) closeShares() {
	m.c.countReal(m)
	for _, s := range m.shared.shares {
		if s.holder != nil {
			s.holder.Close(time.Now())
		}
	}
}

// realCounts are what engines say of a drive's own queue pairs, by direction where they have one. The mount shows them,
// and takes what was written for worn.
type realCounts struct {
	commands, bytes, failed [2]uint64
	passed                  uint64
}

const (
	// countMost is more commands than an engine does between two looks: more than that were not counted but made up.
	countMost = 1 << 50
	// countRate is how many bytes a second are believed, a drive and direction: what PCIe 6 moves by four lanes. An engine
	// that says more writes, and so wears, no more than one could that writes for ever.
	countRate = 32 << 30
	// countSpan is for how long nobody may have looked without bytes being lost.
	countSpan = time.Minute
)

// countReal adds up what a member's queue pairs have done since the last time. Its memory is mapped.
func (c *Control) countReal(m *member) {
	c.realMu.Lock()
	defer c.realMu.Unlock()
	now := time.Now()
	for _, s := range m.shared.shares {
		total := c.real[s.index]
		s.count(&total, now)
		c.real[s.index] = total
	}
}

// count adds to the total what the engine counted since the last time, as far as that can be.
func (s *driveShare) count(total *realCounts, now time.Time) {
	add := func(total, before *uint64, value uint64) {
		if n := value - *before; n < countMost {
			*total += n
		}
		*before = value
	}
	earned := uint64(min(now.Sub(s.countedAt), countSpan).Seconds() * countRate)
	s.countedAt = now
	for d := range total.bytes {
		add(&total.commands[d], &s.counted.commands[d], atomic.LoadUint64(&s.words.Commands[d]))
		add(&total.failed[d], &s.counted.failed[d], atomic.LoadUint64(&s.words.Failed[d]))
		bytes := atomic.LoadUint64(&s.words.Bytes[d])
		s.credit[d] = min(s.credit[d]+earned, uint64(countSpan.Seconds()*countRate))
		n := min(bytes-s.counted.bytes[d], s.credit[d])
		s.counted.bytes[d] = bytes
		s.credit[d] -= n
		total.bytes[d] += n
	}
	add(&total.passed, &s.counted.passed, s.passed.Load())
}

// RealStats are what engines did by queue pairs of a drive's own, as they say.
type RealStats struct {
	Reads        uint64 `json:"reads"`
	Writes       uint64 `json:"writes"` // and flushes
	BytesRead    uint64 `json:"bytes_read"`
	BytesWritten uint64 `json:"bytes_written"`
	FailedReads  uint64 `json:"failed_reads"`
	FailedWrites uint64 `json:"failed_writes"`
	Pairs        uint64 `json:"queue_pairs"` // that there are now
	PassedBy     uint64 `json:"passed_by"`   // times that an engine did not leave the drive to others
}

// RealIO is what engines did by queue pairs of the drives' own since the mount, by the drive's index.
func (c *Control) RealIO() map[uint16]RealStats {
	pairs := map[uint16]uint64{}
	for _, m := range c.liveMembers() {
		m.use.RLock()
		if m.shared.queues != nil {
			c.countReal(m)
		}
		for _, s := range m.shared.shares {
			pairs[s.index] += uint64(m.shared.lanes)
		}
		m.use.RUnlock()
	}
	c.realMu.Lock()
	defer c.realMu.Unlock()
	all := make(map[uint16]RealStats, len(c.real))
	for index, n := range c.real {
		all[index] = RealStats{Reads: n.commands[phase.Read], Writes: n.commands[phase.Write],
			BytesRead: n.bytes[phase.Read], BytesWritten: n.bytes[phase.Write], FailedReads: n.failed[phase.Read],
			FailedWrites: n.failed[phase.Write], Pairs: pairs[index], PassedBy: n.passed}
	}
	return all
}

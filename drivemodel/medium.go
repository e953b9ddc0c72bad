package drivemodel

import (
	"sync"
	"time"
)

// Medium is one modelled drive. All who use the drive share it. Methods are safe for concurrent use.
//
// A command goes through three things:
//
//	service   it begins when it arrives, or when one of the drive's places for commands in service is free;
//	medium    its bytes are served in the order of arrival, at the bandwidth of the mixture that is under way, and in no
//	          less than the time of one command at the limit of commands a second;
//	latency   it completes when its bytes are served and its latency, drawn for it, has passed. Latencies pass side by
//	          side: they lengthen commands and cost no bandwidth.
//
// The medium never rests while a command is in service, and never serves two at a time.
type Medium struct {
	profile *Profile
	window  int64      // of the mixture, ns
	command [2]float64 // least time of the medium for one command, ns

	mu      sync.Mutex
	base    time.Time // of all times below, which are nanoseconds since
	free    int64     // when the medium has served everything that has arrived
	part    float64   // what free is short of, less than one nanosecond
	service places
	recent  recent
	latency [2]sampler // of reads, of writes
}

// NewMedium makes a drive of a valid profile. Drives of equal seeds draw equal latencies.
func NewMedium(p *Profile, seed uint64) *Medium {
	m := &Medium{profile: p}
	m.latency = [...]sampler{newSampler(p.Read, seed, 0), newSampler(p.Write, seed, 1)}
	m.command = [...]float64{p.Read.nsPerCommand(), p.Write.nsPerCommand()}
	if p.Mixed != nil {
		m.window = int64(p.Mixed.WindowUS * 1e3)
	}
	if p.CommandsInService > 0 {
		m.service = make(places, p.CommandsInService)
	}
	return m
}

// Profile is what the drive is modelled on.
func (m *Medium) Profile() *Profile { return m.profile }

// Serve is when a command that arrives now will have been completed. Times of several callers may be a little out of
// order; none of them makes the medium faster.
func (m *Medium) Serve(now time.Time, write bool, bytes uint32) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.base.IsZero() {
		m.base = now
	}
	_, done := m.serve(int64(now.Sub(m.base)), write, bytes)
	return m.base.Add(time.Duration(done))
}

// serve also says when the command's last byte is served.
func (m *Medium) serve(now int64, write bool, bytes uint32) (served, done int64) {
	direction := 0
	if write {
		direction = 1
	}
	begin := m.service.next(now)
	m.recent.forget(now - m.window)
	cost := max(float64(bytes)*m.profile.nsPerByte(m.recent.share(write, bytes)), m.command[direction])
	if m.free < begin {
		m.free, m.part = begin, 0
	}
	m.part += cost
	whole := int64(m.part)
	m.free, m.part = m.free+whole, m.part-float64(whole)
	m.recent.add(m.free, write, bytes)
	done = m.free + m.latency[direction].next()
	m.service.take(done)
	return m.free, done
}

// places is a binary heap of when each of the drive's places for commands becomes free, the first one in front. Without
// places there is no limit.
type places []int64

func (p places) next(now int64) int64 {
	if len(p) == 0 {
		return now
	}
	return max(now, p[0])
}

// take gives the place that is free first to a command that completes then.
func (p places) take(until int64) {
	for i := 0; i < len(p); {
		p[i] = until
		child := 2*i + 1
		if child+1 < len(p) && p[child+1] < p[child] {
			child++
		}
		if child >= len(p) || p[child] >= until {
			return
		}
		p[i], i = p[child], child
	}
}

// recent is the commands that decide about the mixture: those whose bytes are not served yet, and those whose last byte
// was served within the window. A ring that allocates only when it grows.
type recent struct {
	ring  []servedCommand // its length is a power of two
	first int
	n     int
	bytes [2]int64 // of reads, of writes
}

type servedCommand struct {
	until int64
	bytes uint32
	write bool
}

// share is the part of the bytes that are written, the given command's among them.
func (r *recent) share(write bool, bytes uint32) float64 {
	all, written := r.bytes[0]+r.bytes[1]+int64(bytes), r.bytes[1]
	if write {
		written += int64(bytes)
	}
	if all == 0 {
		return 0
	}
	return float64(written) / float64(all)
}

func (r *recent) add(until int64, write bool, bytes uint32) {
	if r.n == len(r.ring) {
		grown := make([]servedCommand, max(64, 2*r.n))
		for i := range r.n {
			grown[i] = r.ring[(r.first+i)&(r.n-1)]
		}
		r.ring, r.first = grown, 0
	}
	r.ring[(r.first+r.n)&(len(r.ring)-1)] = servedCommand{until, bytes, write}
	r.n++
	r.count(write, int64(bytes))
}

func (r *recent) count(write bool, bytes int64) {
	if write {
		r.bytes[1] += bytes
	} else {
		r.bytes[0] += bytes
	}
}

// forget drops what was served before.
func (r *recent) forget(before int64) {
	for r.n > 0 && r.ring[r.first].until <= before {
		c := &r.ring[r.first]
		r.count(c.write, -int64(c.bytes))
		r.first = (r.first + 1) & (len(r.ring) - 1)
		r.n--
	}
}

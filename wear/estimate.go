package wear

import (
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Class is what is known of a block when it is to be stored: how often it was asked for before, up to TouchesMax, and
// whether it is a tail, which only a prompt that ends at the same token can use.
type Class uint8

const (
	classTouches Class = TouchesMax
	classTail    Class = TouchesMax + 1
	classes            = 2 * (TouchesMax + 1)
)

// ClassOf makes a class.
func ClassOf(touches int, tail bool) Class {
	c := Class(min(touches, TouchesMax))
	if tail {
		c |= classTail
	}
	return c
}

// next is the class of a block of this class after one more touch.
func (c Class) next() Class {
	if c&classTouches < classTouches {
		c++
	}
	return c
}

const (
	// Of the keys one in 2^sampleBits is followed: what holds for those holds for all, because keys are hashes.
	sampleBits = 4
	// estimateBytes is the table of keys that are followed, 8 bytes each: 64 Ki of them stand for a million.
	estimateBytes = 512 << 10
	sampleLineLen = lineBytes / 8
	// After so many observations everything counts half, so that the estimate follows a load that changes.
	forgetAfter = 1 << 14
	// A class about which nothing is known is believed to be asked for again half of the time, with the weight of this
	// many observations: what is not known is stored.
	priorWeight = 32
	// againMax bounds the probability of one more hit, and so the number of hits that is believed in.
	againMax = 0.95
)

// A sample is a key that is followed: 32 bits of its hash above, its class and whether it was evicted below; 0 is none.
const (
	sampleUsed    = 1 << 8
	sampleEvicted = 1 << 7
	sampleClass   = classes - 1
	sampleMark    = 0xffffffff << 32
)

type sampleLine [sampleLineLen]uint64

// Estimate learns from a sample of the keys how often blocks of a class are hit after they were stored, and how many
// hits are lost by what storing a block evicts. Not safe for concurrent use.
type Estimate struct {
	lines []sampleLine
	shift int
	raw   []byte

	seen, again       [classes]uint64 // by class: blocks asked for, and how many of them once more
	stored, regretted uint64          // blocks stored; evicted blocks that were asked for
}

// NewEstimate makes one that knows nothing.
func NewEstimate() (*Estimate, error) {
	raw, err := anonymous(estimateBytes)
	if err != nil {
		return nil, err
	}
	n := estimateBytes / lineBytes
	return &Estimate{lines: unsafe.Slice((*sampleLine)(unsafe.Pointer(&raw[0])), n),
		shift: 64 - sampleBits - bits.Len(uint(n-1)), raw: raw}, nil
}

// Close gives the memory back.
func (e *Estimate) Close() error {
	raw := e.raw
	e.raw, e.lines = nil, nil
	if raw == nil {
		return nil
	}
	return unix.Munmap(raw)
}

// sampled says whether a key is followed.
func sampled(hash uint64) bool { return hash>>(64-sampleBits) == 0 }

// find moves a key's sample to the front of its line, where there is one, and returns the place.
func (e *Estimate) find(hash uint64) (sample *uint64, known bool) {
	l := &e.lines[hash>>e.shift]
	mark := hash << 32
	at := sampleLineLen - 1
	for i, s := range l {
		if s&sampleMark == mark && s&sampleUsed != 0 {
			at, known = i, true
			break
		}
	}
	found := l[at]
	copy(l[1:at+1], l[:at])
	if !known {
		found = mark
	}
	l[0] = found
	return &l[0], known
}

// Asked notes that a block of a class is to be stored.
func (e *Estimate) Asked(hash uint64, c Class) {
	if !sampled(hash) {
		return
	}
	s, known := e.find(hash)
	if known {
		was := Class(*s & sampleClass)
		if *s&sampleEvicted != 0 {
			e.regretted++
		} else {
			e.again[was]++
		}
		c = max(c&classTouches, was.next()&classTouches) | c&classTail
	}
	e.observe(s, c)
}

// Hit notes that a stored block was used.
func (e *Estimate) Hit(hash uint64) {
	if !sampled(hash) {
		return
	}
	s, known := e.find(hash)
	c := Class(1) // stored before anybody followed it
	if known {
		was := Class(*s & sampleClass)
		e.again[was]++
		c = was.next()
	}
	e.observe(s, c)
}

// observe gives a sample its class, as of now.
func (e *Estimate) observe(s *uint64, c Class) {
	*s = *s&sampleMark | sampleUsed | uint64(c)
	e.seen[c]++
	total := uint64(0)
	for _, n := range e.seen {
		total += n
	}
	if total < forgetAfter {
		return
	}
	for i := range e.seen {
		e.seen[i], e.again[i] = e.seen[i]/2, e.again[i]/2
	}
	e.stored, e.regretted = e.stored/2, e.regretted/2
}

// Stored notes that a block was admitted.
func (e *Estimate) Stored(hash uint64) {
	if sampled(hash) {
		e.stored++
	}
}

// Evicted notes that a stored block had to make room.
func (e *Estimate) Evicted(hash uint64) {
	if !sampled(hash) {
		return
	}
	s, _ := e.find(hash)
	*s |= sampleUsed | sampleEvicted
}

// probability of being asked for once more.
func (e *Estimate) probability(c Class) float64 {
	return min(againMax, (float64(e.again[c])+priorWeight/2)/(float64(e.seen[c])+priorWeight))
}

// Hits is how often a block of a class is expected to be hit if it is stored: once more with the probability of its
// class, again with that of the next one, and any number of times with that of the last.
func (e *Estimate) Hits(c Class) float64 {
	p := e.probability(c | classTouches)
	hits := p / (1 - p)
	for k := int(classTouches) - 1; k >= int(c&classTouches); k-- {
		hits = e.probability(c&classTail|Class(k)) * (1 + hits)
	}
	return hits
}

// Lost is how many hits one more block costs by what it evicts: evicted blocks that were asked for later, for each one
// stored. It is 0 while there is room, and at most 1: a block takes the place of one.
func (e *Estimate) Lost() float64 { return min(1, float64(e.regretted)/float64(e.stored+priorWeight)) }

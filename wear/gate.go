package wear

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
	"sync"
)

// GateOptions of NewGate. Zero fields take defaults.
type GateOptions struct {
	Admissions  Admissions
	FilterBytes int    // of the memory of keys
	Prices      Prices // what cost-aware reckons with
	// FileBytes is what a file takes on the drives, where that is not its slot (replays without bytes); 0: the slot.
	FileBytes uint64
}

// WithDefaults are the options as they take effect.
func (o GateOptions) WithDefaults() GateOptions {
	if o.FilterBytes == 0 {
		o.FilterBytes = FilterBytes
	}
	if o.Prices == (Prices{}) {
		o.Prices = DefaultPrices()
	}
	return o
}

// Gate decides which blocks are admitted to the drives. Safe for concurrent use: it is a leaf among locks, taken once
// for a batch of keys.
type Gate struct {
	admissions Admissions
	prices     Prices
	fileBytes  uint64
	seed       maphash.Seed

	mu       sync.Mutex
	filter   *Filter
	estimate *Estimate
}

// Ask is a block that somebody wants to store.
type Ask struct {
	Policy Policy
	Space  uint32 // keys of different spaces are different: a pool, or a family
	Key    *[32]byte
	Tokens uint32
	Tail   bool   // fewer tokens than a file has room for
	Bytes  uint64 // that it would take on the drives
}

// NewGate makes a gate, or nil where every policy admits all.
func NewGate(o GateOptions) (*Gate, error) {
	if !o.Admissions.Selective() {
		return nil, nil
	}
	o = o.WithDefaults()
	if err := o.Prices.Validate(); err != nil {
		return nil, err
	}
	g := &Gate{admissions: o.Admissions, prices: o.Prices, fileBytes: o.FileBytes, seed: maphash.MakeSeed()}
	var err error
	if g.filter, err = NewFilter(o.FilterBytes); err != nil {
		return nil, err
	}
	if g.estimate, err = NewEstimate(); err != nil {
		return nil, errors.Join(err, g.filter.Close())
	}
	return g, nil
}

// Close gives the gate's memory back. The gate admits nothing to be asked of it after that. A nil gate has none.
func (g *Gate) Close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return errors.Join(g.filter.Close(), g.estimate.Close())
}

// Policy of a pool of a family, "" for none.
func (g *Gate) Policy(pool, family string) Policy {
	if g == nil {
		return All
	}
	return g.admissions.Of(pool, family)
}

func (g *Gate) hash(space uint32, key *[32]byte) uint64 {
	var b [36]byte
	copy(b[:], key[:])
	binary.LittleEndian.PutUint32(b[32:], space)
	return maphash.Bytes(g.seed, b[:])
}

// Admit fills admit with the verdict for each ask, and changes nothing: whoever is refused room for other reasons asks
// again, and that is no second touch.
func (g *Gate) Admit(asks []Ask, admit []bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range asks {
		a := &asks[i]
		switch a.Policy {
		case All:
			admit[i] = true
		case SecondTouch:
			admit[i] = g.filter.Touches(g.hash(a.Space, a.Key)) > 0
		default:
			admit[i] = g.pays(a, ClassOf(g.filter.Touches(g.hash(a.Space, a.Key)), a.Tail))
		}
	}
}

func (g *Gate) pays(a *Ask, c Class) bool {
	bytes := a.Bytes
	if g.fileBytes > 0 {
		bytes = g.fileBytes
	}
	return g.prices.Pays(g.estimate.Hits(c), g.estimate.Lost(), a.Tokens, bytes)
}

// Asked remembers blocks that somebody wanted to store, admitted or not.
func (g *Gate) Asked(asks []Ask, admitted []bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range asks {
		a := &asks[i]
		if a.Policy == All {
			continue
		}
		hash := g.hash(a.Space, a.Key)
		if a.Policy == CostAware {
			g.estimate.Asked(hash, ClassOf(g.filter.Touches(hash), a.Tail))
			if admitted[i] {
				g.estimate.Stored(hash)
			}
		}
		g.filter.Add(hash)
	}
}

// Hit notes that stored blocks were used; only cost-aware learns from it.
func (g *Gate) Hit(space uint32, keys [][32]byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range keys {
		g.estimate.Hit(g.hash(space, &keys[i]))
	}
}

// Evicted notes that a stored block had to make room; only cost-aware learns from it.
func (g *Gate) Evicted(space uint32, key *[32]byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.estimate.Evicted(g.hash(space, key))
}

// Expectation is what cost-aware believes now: hits of a full block that is stored when it was asked for that often
// before, of a tail that is new, and hits that one more block costs by what it evicts.
type Expectation struct {
	Hits [TouchesMax + 1]float64 `json:"hits_by_earlier_touches"`
	Tail float64                 `json:"hits_of_new_tails"`
	Lost float64                 `json:"hits_lost_by_eviction"`
}

// Expectation of now.
func (g *Gate) Expectation() Expectation {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := Expectation{Tail: g.estimate.Hits(ClassOf(0, true)), Lost: g.estimate.Lost()}
	for touches := range e.Hits {
		e.Hits[touches] = g.estimate.Hits(ClassOf(touches, false))
	}
	return e
}

package fs

import (
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/gpufile"
)

// chainCache keeps the chains of the prefix directories that were looked at last, so that a walk over one directory of
// n names costs n steps and not n times n. A chain is kept for as long as the kernel may keep a name.
type chainCache struct {
	mu      sync.Mutex
	entries [chainsMax]chainEntry // guarded by mu
}

const chainsMax = 16

type chainEntry struct {
	dir   nodeID
	made  time.Time
	chain []gpufile.Key
}

func (c *chainCache) get(dir nodeID, age time.Duration) ([]gpufile.Key, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.entries {
		if e := &c.entries[i]; e.dir == dir && !e.made.IsZero() && time.Since(e.made) <= age {
			return e.chain, true
		}
	}
	return nil, false
}

func (c *chainCache) put(dir nodeID, chain []gpufile.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	oldest := &c.entries[0]
	for i := range c.entries {
		e := &c.entries[i]
		if e.dir == dir {
			oldest = e
			break
		}
		if e.made.Before(oldest.made) {
			oldest = e
		}
	}
	*oldest = chainEntry{dir, time.Now(), chain}
}

func (c *chainCache) drop(dir nodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.entries {
		if c.entries[i].dir == dir {
			c.entries[i] = chainEntry{}
		}
	}
}

// chainOf is the chain that a prefix directory shows, root first. The caller must not change it.
func (t *tree) chainOf(dir nodeID, fresh bool) (*poolNode, []gpufile.Key, fuse.Status) {
	p, info, st := t.stat(dir)
	if st != fuse.OK {
		return nil, nil, st
	}
	if !fresh {
		if chain, ok := t.chains.get(dir, t.o.EntryTimeout); ok {
			return p, chain, fuse.OK
		}
	}
	chain, _, ok := p.Chain(&info.Key)
	if !ok {
		return nil, nil, eSTALE
	}
	t.chains.put(dir, chain)
	return p, chain, fuse.OK
}

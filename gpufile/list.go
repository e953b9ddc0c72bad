package gpufile

// ListEntry is one row of a listing.
type ListEntry struct {
	Key        Key
	Slot       uint32
	Generation uint64
	CommitTime int64
	LastHit    int64
	Cookie     uint64 // resume after this entry; below 2^63
}

const (
	listStage = 256
	// tipsStage is how many slots are looked at in one hold of the pool's mutex.
	tipsStage = 1 << 16
)

// List streams the files whose key starts with the byte shard, in a stable order, after cookie (0 = from the start).
// Files present throughout are listed exactly once, whatever comes and goes meanwhile. No allocation.
func (p *Pool) List(shard byte, cookie uint64, out []ListEntry) int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var entries [listStage]uint64
	done := 0
	for done < len(out) {
		n := p.index.shards[shard].scan(cookie, entries[:min(listStage, len(out)-done)])
		if n == 0 {
			break
		}
		for i, e := range entries[:n] {
			cookie = e + 1
			out[done+i] = p.listEntry(uint32(e), cookie)
		}
		done += n
	}
	return done
}

func (p *Pool) listEntry(slot uint32, cookie uint64) ListEntry {
	r := p.m.Record(slot)
	return ListEntry{
		Key: r.Key, Slot: slot, Generation: r.Generation,
		CommitTime: r.CommitTime, LastHit: int64(r.LastHit), Cookie: cookie,
	}
}

// ListTips streams the files that have no child, over all shards, in the order of their slots.
func (p *Pool) ListTips(cookie uint64, out []ListEntry) int {
	done := 0
	for more := true; more && done < len(out); {
		var n int
		n, cookie, more = p.listTips(cookie, out[done:])
		done += n
	}
	return done
}

// listTips does one hold of the mutex: it returns where to go on, and whether there is more.
func (p *Pool) listTips(from uint64, out []ListEntry) (n int, next uint64, more bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if from >= uint64(len(p.nodes.s)) {
		return 0, from, false
	}
	end := min(from+tipsStage, uint64(len(p.nodes.s)))
	for ; from < end && n < len(out); from++ {
		if nd := &p.nodes.s[from]; nd.is(flagVisible) && nd.leaf() {
			out[n] = p.listEntry(uint32(from), from+1)
			n++
		}
	}
	return n, from, true
}

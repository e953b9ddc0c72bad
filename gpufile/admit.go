package gpufile

import "tuttifs/wear"

// gateAsks are the new items of a reservation as the gate sees them.
type gateAsks struct {
	asks  []wear.Ask
	admit []bool // the gate's verdict, and after it the reservation's
	items []int  // each ask's item
}

// admit asks the gate about the items that are new, and declines those that it does not want on the drives, in all
// pools of the group. So is what hangs on a file that is not there and will not be: nobody could hit it. The pools'
// mutexes are held.
func (r *reservation) admit() {
	policy := r.g.pools[0].admission
	if policy == wear.All || r.ses.admitAll {
		return
	}
	q := &r.gate
	for i := range r.items {
		if r.isNew(i) {
			q.items = append(q.items, i)
		}
	}
	q.asks, q.admit = make([]wear.Ask, len(q.items)), make([]bool, len(q.items))
	bytes := uint64(0)
	for _, p := range r.g.pools {
		bytes += p.m.SlotBytes()
	}
	first := r.g.pools[0]
	for k, i := range q.items {
		it := &r.items[i]
		q.asks[k] = wear.Ask{Policy: policy, Space: first.keySpace, Key: &it.Key, Tokens: it.Tokens,
			Tail: it.Tokens < first.identity.FileTokens, Bytes: bytes}
	}
	r.ses.s.gate.Admit(q.asks, q.admit)
	for k, i := range q.items {
		if q.admit[k] = q.admit[k] && r.reachable(i); !q.admit[k] {
			r.decline(i)
		}
	}
}

// isNew says whether an item would be written in some pool.
func (r *reservation) isNew(i int) bool {
	for j := range r.g.pools {
		if r.file(i, j).status == GrantNew {
			return true
		}
	}
	return false
}

func (r *reservation) decline(i int) {
	for j := range r.g.pools {
		if f := r.file(i, j); f.status == GrantNew {
			f.status = GrantDeclined
		}
	}
}

// reachable says whether an item's parent is there or being stored, in all pools, or will be by this reservation.
func (r *reservation) reachable(i int) bool {
	parent := &r.items[i].Parent
	if *parent == (Key{}) {
		return true
	}
	for j, p := range r.g.pools {
		if k := r.parents[i]; k >= 0 {
			if r.file(k, j).status == GrantDeclined {
				return false
			}
			continue
		}
		if _, pending := p.pending[*parent]; !pending && p.index.find(parent) == none {
			return false
		}
	}
	return true
}

// asked tells the gate what was asked for, when the reservation is made: of the items that are left of it.
func (r *reservation) asked() {
	q := &r.gate
	n := 0
	for n < len(q.items) && q.items[n] < len(r.items) {
		n++
	}
	if n > 0 {
		r.ses.s.gate.Asked(q.asks[:n], q.admit[:n])
		for _, i := range q.items[:n] {
			for j, p := range r.g.pools {
				if r.file(i, j).status == GrantDeclined {
					p.count.declined.Add(1)
				}
			}
		}
	}
	r.gate = gateAsks{}
}

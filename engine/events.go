package engine

import (
	"fmt"
	"unsafe"

	"tuttifs/ioctl"
)

// Event is what happened to one file of a pool: it is found from now on, or it is not any more.
type Event struct {
	Key     Key
	Tenant  uint32
	Removed bool
}

const changeBytes = int(unsafe.Sizeof(ioctl.Change{}))

// Events copies into out what happened to the pool's files since an earlier call, in order, whoever did it: n events,
// and the number to go on with. lost is how many before these nobody knows any more: what is held of the pool is to be
// looked up again then. It begins with since 0, which tells nothing and answers the number of what happens from now on;
// a new session begins anew. There may be more while n is not 0.
func (p *Pool) Events(since uint64, out []Event) (n int, next, lost uint64, err error) {
	if len(out) == 0 {
		return 0, 0, 0, fmt.Errorf("%w: no room for events", ErrInvalid)
	}
	c := p.control
	most, err := c.batch(changeBytes)
	if err != nil {
		return 0, 0, 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	spans, err := c.spans(min(len(out), most) * changeBytes)
	if err != nil {
		return 0, 0, 0, err
	}
	a := ioctl.Changes{Target: p.target, Changes: spans[0], Since: since}
	if err := c.verbs.Changes(&a); err != nil {
		return 0, 0, 0, explain(err)
	}
	if n, err = checkCount(a.Count, min(len(out), most)); err != nil {
		return 0, 0, 0, err
	}
	for i, change := range ioctl.View[ioctl.Change](c.arena, spans[0])[:n] {
		out[i] = Event{Key: change.Key, Tenant: change.Tenant, Removed: change.Kind == ioctl.ChangeRemoved}
	}
	return n, a.Next, a.Lost, nil
}

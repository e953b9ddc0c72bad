package phase

import (
	"sync"
	"time"
)

// gateLook is how often goroutines that wait are looked after.
const gateLook = 50 * time.Microsecond

// Gate is a Holder that goroutines share, each for one transfer at a time. Its methods are safe for concurrent use.
type Gate struct {
	mu      sync.Mutex // guards what follows
	holder  *Holder
	waiting [2][]waiter // by direction, the first one in front
	looking bool        // a goroutine looks after them
}

type waiter struct {
	bytes int
	begun chan struct{} // closed when its transfer has
}

// Gate makes a gate, which lives as long as the token.
func (t *Token) Gate(k Kind) *Gate { return &Gate{holder: t.Holder(k)} }

// Enter blocks until a transfer may begin, and begins it; Leave ends it. How long it may block is in the package's
// comment.
func (g *Gate) Enter(d Direction, bytes int) {
	g.mu.Lock()
	if len(g.waiting[d]) == 0 && g.begin(d, bytes, time.Now()) {
		g.mu.Unlock()
		return
	}
	w := waiter{bytes, make(chan struct{})}
	g.waiting[d] = append(g.waiting[d], w)
	if !g.looking {
		g.looking = true
		go g.look()
	}
	g.mu.Unlock()
	<-w.begun
}

// Leave is the end of a transfer that has entered.
func (g *Gate) Leave(d Direction, bytes int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holder.End(d, bytes)
	g.step()
}

func (g *Gate) begin(d Direction, bytes int, now time.Time) bool {
	if g.holder.Full(d) || !g.holder.Enter(d, now) {
		return false
	}
	g.holder.Begin(d, bytes)
	return true
}

// step asks for all who wait, and settles up. The caller holds the lock.
func (g *Gate) step() {
	now := time.Now()
	for d := Read; d <= Write; d++ {
		list := g.waiting[d]
		for len(list) > 0 && g.begin(d, list[0].bytes, now) {
			close(list[0].begun)
			list = list[1:]
		}
		g.waiting[d] = list
	}
	g.holder.Settle(now)
}

// look steps for as long as somebody waits.
func (g *Gate) look() {
	for {
		time.Sleep(gateLook)
		g.mu.Lock()
		g.step()
		if g.looking = len(g.waiting[Read])+len(g.waiting[Write]) > 0; !g.looking {
			g.mu.Unlock()
			return
		}
		g.mu.Unlock()
	}
}

package gpufile

import "tuttifs/extentmap"

// none is no slot in links between nodes.
const none = extentmap.NoSlot

// node is what a pool keeps of one slot beside its record: 24 bytes, no pointers, guarded by the pool's mutex.
type node struct {
	meta uint32 // flags below; pins above pinShift
	// Children form a list from first through next and prev. The prev of the first child is not needed to unlink it
	// (the parent is looked up by the record's parent key), so it holds the number of children.
	first, next, prev uint32
	older, newer      uint32 // the list of its policy, or the orphans'
}

const nodeBytes = 24

// Flags of node.meta.
const (
	flagVisible  uint32 = 1 << iota // committed, in the index
	flagDoomed                      // committed, no longer in the index, waiting for its last unpin
	flagLinked                      // in its parent's list of children
	flagOrphan                      // in the list of orphans: it has a parent key, but its parent is gone
	flagSecond                      // in the policy's second queue
	flagReserved                    // granted for writing
	refOne       uint32 = 1 << 6    // references counted by the policy: two bits
	refMask      uint32 = 3 << 6

	flagAway uint32 = 1 << 8 // committed, and a miss: it lies on a lost drive, or cannot be read

	pinShift        = 9
	pinOne   uint32 = 1 << pinShift
	pinsMax  uint32 = 1<<(32-pinShift) - 1
	// pinsLimit is where everybody's pins end but those of sessions' leases, one for each session.
	pinsLimit = pinsMax - 2*SessionsMax
)

func (n *node) pins() uint32        { return n.meta >> pinShift }
func (n *node) is(flag uint32) bool { return n.meta&flag != 0 }
func (n *node) set(flag uint32)     { n.meta |= flag }
func (n *node) clear(flag uint32)   { n.meta &^= flag }
func (n *node) leaf() bool          { return n.first == none }
func (n *node) refs() uint32        { return n.meta & refMask / refOne }

// list is a doubly linked list of slots through older and newer, by age.
type list struct {
	a              *nodes
	newest, oldest uint32
	n              int
}

func newList(a *nodes) list { return list{a: a, newest: none, oldest: none} }

func (l *list) pushNewest(s uint32) {
	n := &l.a.s[s]
	n.newer, n.older = none, l.newest
	if l.newest == none {
		l.oldest = s
	} else {
		l.a.s[l.newest].newer = s
	}
	l.newest = s
	l.n++
}

// load makes a list of slots, the oldest first, that are the words' bits in mask. The list is empty before.
func (l *list) load(words []uint64, mask uint64) {
	if len(words) == 0 {
		return
	}
	l.oldest, l.newest, l.n = uint32(words[0]&mask), uint32(words[len(words)-1]&mask), len(words)
	parallel(len(words), func(from, to int) {
		older := none
		if from > 0 {
			older = uint32(words[from-1] & mask)
		}
		for i := from; i < to; i++ {
			slot, newer := uint32(words[i]&mask), none
			if i+1 < len(words) {
				newer = uint32(words[i+1] & mask)
			}
			n := &l.a.s[slot]
			n.older, n.newer = older, newer
			older = slot
		}
	})
}

func (l *list) pushOldest(s uint32) {
	n := &l.a.s[s]
	n.older, n.newer = none, l.oldest
	if l.oldest == none {
		l.newest = s
	} else {
		l.a.s[l.oldest].older = s
	}
	l.oldest = s
	l.n++
}

// insertBehind puts s right behind (older than) at, which is in the list.
func (l *list) insertBehind(s, at uint32) {
	o := l.a.s[at].older
	if o == none {
		l.pushOldest(s)
		return
	}
	n := &l.a.s[s]
	n.newer, n.older = at, o
	l.a.s[at].older = s
	l.a.s[o].newer = s
	l.n++
}

// insertAhead puts s right ahead of (newer than) at, which is in the list.
func (l *list) insertAhead(s, at uint32) {
	if w := l.a.s[at].newer; w != none {
		l.insertBehind(s, w)
		return
	}
	l.pushNewest(s)
}

func (l *list) remove(s uint32) {
	n := &l.a.s[s]
	if n.newer == none {
		l.newest = n.older
	} else {
		l.a.s[n.newer].older = n.older
	}
	if n.older == none {
		l.oldest = n.newer
	} else {
		l.a.s[n.older].newer = n.newer
	}
	n.newer, n.older = none, none
	l.n--
}

func (l *list) toNewest(s uint32) {
	if l.newest != s {
		l.remove(s)
		l.pushNewest(s)
	}
}

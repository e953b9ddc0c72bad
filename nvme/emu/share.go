package emu

// Commands that are in system calls each take a thread, executors decide how many there are, and the Go runtime ends a
// process that has ten thousand. So all pollers together have blockingMax. Of these each session has ShareOwn for
// itself, and may hold ShareMax: whatever others do, and however many drives do not answer them, it goes on.
const (
	blockingMax = 2048
	// SharesMax is how many Shares there may be at a time.
	SharesMax = 256
	// ShareOwn is what nobody but the session itself can take.
	ShareOwn = 4
	// ShareMax is the most that one session holds.
	ShareMax = 256
)

// blocking is what is not any session's own.
var blocking = make(chan struct{}, blockingMax-SharesMax*ShareOwn)

// Share is one session's part of the system calls that may block at a time. All pollers of the session have the same.
type Share struct{ own, borrowed chan struct{} }

// NewShare makes the share of a session.
func NewShare() *Share {
	return &Share{own: make(chan struct{}, ShareOwn), borrowed: make(chan struct{}, ShareMax-ShareOwn)}
}

// enter waits for a place and returns how to leave it. A nil Share has none of its own.
func (s *Share) enter() place {
	if s == nil {
		blocking <- struct{}{}
		return place{blocking, nil}
	}
	select { // what is the session's own first: the others' need may be greater
	case s.own <- struct{}{}:
		return place{s.own, nil}
	default:
	}
	select {
	case s.own <- struct{}{}:
		return place{s.own, nil}
	case s.borrowed <- struct{}{}:
	}
	common := blocking
	select {
	case s.own <- struct{}{}:
		<-s.borrowed
		return place{s.own, nil}
	case common <- struct{}{}:
		return place{common, s.borrowed}
	}
}

// place is what one command in a system call holds.
type place struct{ in, borrowed chan struct{} }

func (p place) leave() {
	<-p.in
	if p.borrowed != nil {
		<-p.borrowed
	}
}

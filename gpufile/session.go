package gpufile

import (
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of sessions.
const (
	SessionsMax = 65536
	MembersMax  = 1024    // of one session
	KeysMax     = 1 << 16 // of one peek, pin or reserve
	RequestsMax = 1 << 16 // pins of one session, and as many reservations
	// Files that all pins, and all open reservations of one session name, those that exist already too. One request is
	// always let in.
	PinnedMax   = 1 << 22
	ReservedMax = 1 << 18
	doneMax     = 1024 // settled reservations that a session remembers for repeated commits
)

// Token lets another process join a session.
type Token [16]byte

// session is what its members share. Its mutex is taken before any pool's.
type session struct {
	s     *Store
	id    uint32
	uid   uint32
	token Token
	since time.Time

	leases leaseTable // read without the mutex

	mu           sync.Mutex
	members      map[*Member]struct{}
	ended        bool
	pins         map[requestKey]*pinset
	reservations map[requestKey]*reservation
	done         []requestKey // of settled reservations, the oldest first
	reserved     int          // slots granted for writing
	pinsNamed    int          // files that pins name
	itemsNamed   int          // files that open reservations name
	scratch      []uint32
	admitAll     bool // the admission policy is not asked
}

// requestKey names a request or a reservation: ids are the engine's, one space for each group.
type requestKey struct {
	group uint32
	id    uint64
}

// Member is one process in a session; its Close (or death) frees what it held: its pins, and every uncommitted
// reservation of the session in which it took part. When the last member leaves, the session ends. A slot with a
// command in flight is freed only when the command has completed.
type Member struct {
	ses    *session
	closed atomic.Bool

	// Guarded by the session's mutex.
	vouch map[uint16]bool         // drives that it writes to unseen; nil for none
	held  map[requestKey][]*lease // that it may be writing to, though the reservation has ended
}

// NewSession makes a session with one member.
func (s *Store) NewSession(uid uint32) (*Member, error) {
	ses := &session{
		s: s, uid: uid, since: s.now(),
		members:      make(map[*Member]struct{}),
		pins:         make(map[requestKey]*pinset),
		reservations: make(map[requestKey]*reservation),
	}
	_, _ = rand.Read(ses.token[:]) // never fails, by its contract
	ses.leases.init()
	m := &Member{ses: ses}
	ses.members[m] = struct{}{}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrSession
	}
	if len(s.sessions) >= SessionsMax {
		return nil, fmt.Errorf("%w: %d sessions are open, no more are allowed", ErrInvalid, SessionsMax)
	}
	for ses.id == 0 || s.sessions[ses.id] != nil {
		s.lastSession++
		ses.id = s.lastSession
	}
	s.sessions[ses.id] = ses
	return m, nil
}

// Join adds a process to the session of a token. Only the user who made it may join.
func (s *Store) Join(t Token, uid uint32) (*Member, error) {
	var ses *session
	s.mu.Lock()
	for _, c := range s.sessions {
		if subtle.ConstantTimeCompare(c.token[:], t[:]) == 1 {
			ses = c
		}
	}
	s.mu.Unlock()
	if ses == nil || (uid != ses.uid && uid != 0) {
		return nil, fmt.Errorf("%w: no session of yours has this token", ErrSession)
	}
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ses.ended {
		return nil, ErrSession
	}
	if len(ses.members) >= MembersMax {
		return nil, fmt.Errorf("%w: session %d has %d members, no more are allowed", ErrInvalid, ses.id, MembersMax)
	}
	m := &Member{ses: ses}
	ses.members[m] = struct{}{}
	return m, nil
}

func (m *Member) SessionID() uint32 { return m.ses.id }
func (m *Member) Token() Token      { return m.ses.token }

// AdmitAll makes the session's files admitted whatever the policy: for what a person stores by hand.
func (m *Member) AdmitAll() {
	m.ses.mu.Lock()
	defer m.ses.mu.Unlock()
	m.ses.admitAll = true
}

// Vouch makes the member's word count for the drives that it names: its commands to them go past Authorize and
// Complete, so objects there are written when it commits. What it may still be writing when a reservation ends without
// its doing is given to nobody else before it commits or aborts that reservation too, or is closed, its queues being
// gone.
func (m *Member) Vouch(drives []uint16) {
	m.ses.mu.Lock()
	defer m.ses.mu.Unlock()
	m.vouch = map[uint16]bool{}
	for _, d := range drives {
		m.vouch[d] = true
	}
}

// letGo ends what a vouching member holds of reservations that ended under it: of one, or of all.
func (m *Member) letGo(only *requestKey) {
	m.ses.mu.Lock()
	var leases []*lease
	for k, held := range m.held {
		if only == nil || k == *only {
			leases = append(leases, held...)
			delete(m.held, k)
		}
	}
	m.ses.mu.Unlock()
	for _, l := range leases {
		l.leave(m.ses)
	}
}

// lock takes the session's mutex; it fails for a member that has left.
func (m *Member) lock() error {
	m.ses.mu.Lock()
	if m.closed.Load() || m.ses.ended {
		m.ses.mu.Unlock()
		return ErrSession
	}
	return nil
}

// Close takes the member out of its session. Closing again does nothing.
func (m *Member) Close() {
	ses := m.ses
	ses.mu.Lock()
	if m.closed.Swap(true) {
		ses.mu.Unlock()
		return
	}
	delete(ses.members, m)
	last := len(ses.members) == 0
	for k, ps := range ses.pins {
		if ps.leave(m) || last {
			ses.release(k, ps)
		}
	}
	why := ErrSession
	if !last { // it goes on for the others
		why = fmt.Errorf("%w: a process of the session has left before all ranks had committed", ErrNotFound)
	}
	for _, r := range ses.reservations {
		if r.state == reserveOpen && (last || r.has(m)) {
			ses.abort(r, m, why)
		}
	}
	ses.ended = last
	ses.mu.Unlock()
	m.letGo(nil)
	if last {
		ses.s.mu.Lock()
		delete(ses.s.sessions, ses.id)
		ses.s.mu.Unlock()
	}
}

// remember keeps a settled reservation's outcome for a while, and forgets the oldest beyond doneMax.
func (ses *session) remember(k requestKey) {
	ses.done = append(ses.done, k)
	if len(ses.done) <= doneMax {
		return
	}
	if r := ses.reservations[ses.done[0]]; r != nil && r.state == reserveDone {
		delete(ses.reservations, ses.done[0])
	}
	ses.done = ses.done[1:]
}

// sweep ends pins and reservations whose time is up, and forgets finished ones.
func (ses *session) sweep(now time.Time) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	for k, ps := range ses.pins {
		if now.After(ps.deadline) {
			ses.release(k, ps)
		}
	}
	for k, r := range ses.reservations {
		if !now.After(r.deadline) {
			continue
		}
		switch r.state {
		case reserveOpen:
			ses.abort(r, nil, fmt.Errorf("%w: reservation %d timed out", ErrNotFound, k.id))
			delete(ses.reservations, k)
		case reserveDone:
			delete(ses.reservations, k)
		}
	}
}

// SessionInfo for status files.
type SessionInfo struct {
	ID       uint32
	UID      uint32
	Members  int
	Pins     int
	Reserved int
	Since    time.Time
}

// Sessions lists the sessions, by ID.
func (s *Store) Sessions() []SessionInfo {
	all := s.allSessions()
	infos := make([]SessionInfo, 0, len(all))
	for _, ses := range all {
		ses.mu.Lock()
		info := SessionInfo{
			ID: ses.id, UID: ses.uid, Members: len(ses.members), Reserved: ses.reserved, Since: ses.since,
		}
		for _, ps := range ses.pins {
			info.Pins += ps.count()
		}
		ses.mu.Unlock()
		infos = append(infos, info)
	}
	return infos
}

package daemon

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// member is one process of a session: its leases, its shared memory and the queues in it. It ends once, by the first
// of: its process is gone, its socket hung up, its file was closed, the mount goes away.
type member struct {
	c      *Control
	id     uint32
	uid    uint32
	leases *gpufile.Member
	proc   *process // nil where the process cannot be seen
	since  time.Time
	arena  uint64     // bytes that attaching will give
	share  *emu.Share // of the session

	gone   atomic.Bool // set first when it ends: verbs answer ESTALE
	ending sync.Once
	ended  chan struct{} // closed when everything is given back

	// use is held shared by verbs while they touch the shared memory, and alone to unmap it.
	use    sync.RWMutex
	shared shared

	// setup is held while memory or lanes are made or taken down.
	setup     sync.Mutex
	conn      *net.UnixConn // not nil once attached
	lanes     []lane
	pollers   []*poller
	drives    []driveController // that it has queues to, in the order of the attach reply
	depth     uint32
	dma       *emu.Region
	authority authority
	real      *realSide // nil: all is mediated

	acksMu sync.Mutex
	acks   map[uint16]uint64 // by pool, the map generation that the process says it uses
}

// session is what the processes of one session have together.
type session struct {
	uid     uint32 // who made it; root may join
	members int
	share   *emu.Share
}

// shared is a member's shared memory; slices are nil before it has attached.
type shared struct {
	arena, queues, dma []byte
	inode              uint64 // of the arena's memfd
	lanes, depth       uint32
	reached            uint64        // bytes of others' memory that its SSDs reach
	real               []uint16      // drives whose own queue pairs it was given
	shares             []*driveShare // of those
	total              uint64        // bytes charged against SharedBytesMax
}

// lane is one queue pair a drive: a virtual controller's, or the drive's own. Both are nil while quiesced.
type lane struct {
	queues []*emu.Queue
	pairs  []*realPair
	live   bool
}

// poller is one thread serving queues.
type poller struct {
	*emu.Poller
	done chan struct{}
}

// newMember binds leases to the calling process. It owns leases from here on, whatever it returns.
func (c *Control) newMember(h *handle, tid uint32, leases *gpufile.Member, arena uint64) (*member, ioctl.Errno) {
	proc, err := watchProcess(tid)
	if err != nil {
		leases.Close()
		if errors.Is(err, unix.ESRCH) {
			return nil, ioctl.ESTALE
		}
		c.o.Logf("%v", err)
		return nil, ioctl.EMFILE
	}
	m := &member{c: c, uid: h.uid, leases: leases, proc: proc, since: time.Now(), arena: arena,
		ended: make(chan struct{})}
	c.mu.Lock()
	s, u := c.sessions[leases.SessionID()], c.usageOf(h.uid)
	if c.closed || len(c.members) >= c.o.MaxMembers || uint64(u.members) >= c.most(uint64(c.o.MaxMembers)) ||
		s == nil && (len(c.sessions) >= c.o.MaxSessions || uint64(u.sessions) >= c.most(uint64(c.o.MaxSessions))) {
		c.settle(h.uid)
		c.mu.Unlock()
		proc.close()
		leases.Close()
		return nil, ioctl.EMFILE
	}
	c.nextMember++
	m.id = c.nextMember
	c.members[m.id] = m
	if s == nil {
		s = &session{uid: h.uid, share: emu.NewShare()}
		c.sessions[leases.SessionID()] = s
		u.sessions++
	}
	s.members++
	u.members++
	m.share = s.share
	c.mu.Unlock()
	if proc != nil {
		go func() {
			if proc.wait() {
				m.end("its process is gone")
			}
		}()
	}
	return m, 0
}

// end takes the member down in the background: queues first, so that nothing moves any more when leases and memory go.
func (m *member) end(why string) {
	m.ending.Do(func() {
		m.gone.Store(true)
		go m.takeDown(why)
	})
}

func (m *member) takeDown(why string) {
	m.proc.close()
	m.setup.Lock()
	if m.conn != nil {
		_ = m.conn.Close()
	}
	err := m.quiesceAll()
	m.setup.Unlock()
	if err != nil {
		// A command that does not end still owns its slot and its bytes of memory. Both stay until it ends.
		m.c.o.Logf("session %d, process %d: %s, but %v: waiting", m.leases.SessionID(), m.pid(), why, err)
		m.waitQuiet()
	}
	for _, p := range m.pollers {
		p.Stop()
		<-p.done
	}
	m.closeShares()
	m.leases.Close()
	free := m.unmapReal()
	m.use.Lock()
	if m.shared.queues != nil {
		atomic.StoreUint32(word32(m.shared.queues, ioctl.StateWord), ioctl.SessionClosed)
		ioctl.FutexWake(word32(m.shared.queues, ioctl.TicketWord))
	}
	if free {
		m.shared.unmap()
	}
	total := m.shared.total
	m.shared = shared{}
	m.use.Unlock()
	m.c.o.Logf("session %d, process %d: ended: %s", m.leases.SessionID(), m.pid(), why)

	m.c.mu.Lock()
	delete(m.c.members, m.id)
	s, u := m.c.sessions[m.leases.SessionID()], m.c.usageOf(m.uid)
	if s.members--; s.members == 0 {
		delete(m.c.sessions, m.leases.SessionID())
		m.c.usageOf(s.uid).sessions--
		m.c.settle(s.uid)
	}
	u.members--
	m.c.sharedBytes -= total
	u.sharedBytes -= total
	m.c.settle(m.uid)
	m.c.mu.Unlock()
	close(m.ended)
}

// waitQuiet tries until all commands in flight have ended.
func (m *member) waitQuiet() {
	for {
		m.setup.Lock()
		err := m.quiesceAll()
		m.setup.Unlock()
		if err == nil {
			return
		}
		time.Sleep(time.Second)
	}
}

// memoryName begins the names of the member's memfds.
func (m *member) memoryName() string {
	return fmt.Sprintf("tuttifs-%d-%d-", m.leases.SessionID(), m.id)
}

// quiesceAll stops every lane within one time-out for all. The caller holds setup.
func (m *member) quiesceAll() error {
	deadline := time.Now().Add(m.c.o.QuiesceTimeout)
	var errs []error
	for i := range m.lanes {
		errs = append(errs, m.lanes[i].quiesce(deadline))
	}
	return errors.Join(errs...)
}

// quiesce stops a lane's queues; after nil nothing of them touches memory or drives. It may be called again after an
// error.
func (l *lane) quiesce(deadline time.Time) error {
	var errs []error
	for i, q := range l.queues {
		if q == nil {
			continue
		}
		if err := q.Quiesce(deadline); err != nil {
			errs = append(errs, err)
			continue
		}
		l.queues[i] = nil
	}
	errs = append(errs, l.deletePairs(deadline))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	l.live = false
	return nil
}

func (m *member) pid() uint32 {
	if m.proc == nil {
		return 0
	}
	return m.proc.pid
}

func (m *member) info() MemberInfo {
	m.use.RLock()
	defer m.use.RUnlock()
	return MemberInfo{Member: m.id, Session: m.leases.SessionID(), UID: m.uid, PID: m.pid(),
		Attached: m.shared.arena != nil, Mode: m.shared.mode(), RealDrives: m.shared.real,
		ReachedBytes: m.shared.reached,
		Lanes:        m.shared.lanes, Depth: m.shared.depth,
		ArenaBytes: uint64(len(m.shared.arena)), DMABytes: uint64(len(m.shared.dma)),
		Since: m.since, Ending: m.gone.Load(), MapGenerations: m.allAcks()}
}

// beat counts the heartbeat and, where maps have changed, the map generation.
func (m *member) beat(mapsChanged bool) {
	m.use.RLock()
	defer m.use.RUnlock()
	if m.shared.queues == nil {
		return
	}
	atomic.AddUint64(word64(m.shared.queues, ioctl.HeartbeatWord), 1)
	if mapsChanged {
		atomic.AddUint64(word64(m.shared.queues, ioctl.MapGenerationWord), 1)
	}
}

// ticketDone tells sleepers that a ticket has finished. It may be called by a verb, which holds use already: then
// waiting for it behind someone who wants it alone would never end. Where that one is about to take the memory away,
// nobody needs to be told.
func (m *member) ticketDone() {
	if !m.use.TryRLock() {
		return
	}
	defer m.use.RUnlock()
	if m.shared.queues != nil {
		w := word32(m.shared.queues, ioctl.TicketWord)
		atomic.AddUint32(w, 1)
		ioctl.FutexWake(w)
	}
}

func word32(b []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&b[off])) }
func word64(b []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&b[off])) }

// descriptors are the memfds of a member's memory in the order of the attach reply; they are closed when sent.
type descriptors []int

func (d descriptors) close() {
	for _, fd := range d {
		_ = unix.Close(fd)
	}
}

// makeShared makes and maps arena, queues and DMA memory of the given sizes; dma may be 0.
func makeShared(name string, arena, queues, dma uint64) (s shared, fds descriptors, err error) {
	defer func() {
		if err != nil {
			fds.close()
			s.unmap()
			s, fds = shared{}, nil
		}
	}()
	for _, r := range []struct {
		kind  string
		to    *[]byte
		bytes uint64
	}{{"arena", &s.arena, arena}, {"queues", &s.queues, queues}, {"dma", &s.dma, dma}} {
		if r.bytes == 0 {
			continue
		}
		fd, b, err := ioctl.NewSharedMemory(name+r.kind, r.bytes)
		if err != nil {
			return s, fds, err
		}
		fds, *r.to = append(fds, fd), b
	}
	var st unix.Stat_t
	if err := unix.Fstat(fds[0], &st); err != nil {
		return s, fds, fmt.Errorf("daemon: arena: %w", err)
	}
	s.inode = st.Ino
	return s, fds, nil
}

func (s *shared) unmap() {
	for _, b := range []*[]byte{&s.arena, &s.queues, &s.dma} {
		_ = ioctl.Unmap(*b)
		*b = nil
	}
}

// authority lets controllers ask a member's leases about each command.
type authority struct{ leases *gpufile.Member }

func (a authority) Authorize(write bool, driveIndex uint16, unit uint64, units uint32) (emu.Access, bool) {
	access, ok := a.leases.Authorize(write, driveIndex, unit, units)
	return emu.Access(access), ok
}

func (a authority) Complete(e emu.Access, ok bool) { a.leases.Complete(gpufile.Access(e), ok) }

// attachLane begins a lane on every drive. The caller holds setup.
func (m *member) attachLane(i int) error {
	l := &m.lanes[i]
	l.queues, l.pairs = make([]*emu.Queue, len(m.drives)), make([]*realPair, len(m.drives))
	pollers := m.dealt(i)
	for d := range m.drives {
		b := m.block(i, d)
		if m.real.has(d) {
			if err := m.attachPair(i, d); err != nil {
				return errors.Join(err, l.quiesce(time.Now().Add(m.c.o.QuiesceTimeout)))
			}
			continue
		}
		clear(b)
		memory, err := nvme.MapQueue(b, int(m.depth))
		if err == nil {
			l.queues[d], err = m.drives[d].controller.Attach(
				emu.QueueConfig{Memory: memory, DMA: m.dma, Authority: m.authority})
		}
		if err != nil {
			err = fmt.Errorf("daemon: lane %d: %w", i, err)
			return errors.Join(err, l.quiesce(time.Now().Add(m.c.o.QuiesceTimeout)))
		}
		m.pollers[pollers[d]].Add(l.queues[d])
	}
	l.live = true
	return nil
}

func (m *member) block(lane, d int) []byte {
	off, n := m.blockAt(lane, d)
	return m.shared.queues[off : off+n : off+n]
}

func (m *member) blockAt(lane, d int) (off, n int) {
	n = nvme.QueueBytes(int(m.depth))
	return ioctl.SessionPageBytes + (lane*len(m.drives)+d)*n, n
}

// mediated is how many queues of a lane the daemon serves.
func (m *member) mediated() (n int) {
	for d := range m.drives {
		if !m.real.has(d) {
			n++
		}
	}
	return n
}

// dealt are the numbers of the pollers that serve a lane's queues, by drive, ownQueue where the SSD does. The queues of
// a lane go to different threads, so that its chunk arrives as soon as it can, and lane after lane all get as many.
func (m *member) dealt(lane int) []int {
	pollers, queue := make([]int, len(m.drives)), lane*m.mediated()
	for d := range pollers {
		if m.real.has(d) {
			pollers[d] = ownQueue
			continue
		}
		pollers[d] = queue % len(m.pollers)
		queue++
	}
	return pollers
}

// ownQueue is no poller.
const ownQueue = -1

// pollerCount is one for each queue that the daemon serves, as far as the options allow, and one where there is none,
// which speaks for real pairs.
func (m *member) pollerCount() int { return max(1, min(m.c.o.Pollers, len(m.lanes)*m.mediated())) }

// startPollers starts the threads that serve the member's queues. The caller holds setup.
func (m *member) startPollers() error {
	for i := range m.pollerCount() {
		c := emu.PollerConfig{Backend: m.c.o.Backend, Number: uint32(i), Share: m.share,
			Armed: word32(m.shared.queues, ioctl.ArmedWord), Wake: word32(m.shared.queues, ioctl.WakeWord)}
		if i == 0 && len(m.shared.shares) > 0 {
			c.Beside = m.stepShares
		}
		p, err := emu.NewPoller(c)
		if err != nil {
			return fmt.Errorf("daemon: poller: %w", err)
		}
		t := &poller{Poller: p, done: make(chan struct{})}
		m.pollers = append(m.pollers, t)
		go func() {
			defer close(t.done)
			t.Run()
		}()
	}
	return nil
}

// setAck notes the map generation that the process says it uses.
func (m *member) setAck(id extentmap.PoolID, generation uint64) {
	m.acksMu.Lock()
	defer m.acksMu.Unlock()
	if m.acks == nil {
		m.acks = map[uint16]uint64{}
	}
	m.acks[uint16(id)] = generation
}

func (m *member) allAcks() map[uint16]uint64 {
	m.acksMu.Lock()
	defer m.acksMu.Unlock()
	return maps.Clone(m.acks)
}

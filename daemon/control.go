package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
	"tuttifs/phase"
)

// ControlOptions of NewControl. Zero fields take defaults.
type ControlOptions struct {
	// SocketDir holds the attach socket, <volume UUID>.sock. By default /run/tuttifs for root, else a directory of
	// the user's own.
	SocketDir string
	// Shared lets other users' engines reach the socket (mounts with allow_other); tokens and credentials are checked
	// either way. One user then has at most half of the sessions, processes, handles and shared memory.
	Shared bool

	MaxSessions int // sessions of engines alive at once, 256, which is the most
	MaxMembers  int // processes in all sessions, 1024, fewer with more than four pollers each
	MaxHandles  int // open control handles, 65536
	MaxPools    int // pools that POOL_OPEN may lead to, 1024
	Tickets     int // outstanding tickets of one handle, a power of two, 1024

	ArenaBytesMax uint64 // of one process, ioctl.ArenaBytesMax
	DMABytesMax   uint64 // of one process, 8 GiB
	// SharedBytesMax bounds arenas, queues and DMA memory of all processes together, half of the machine's memory.
	SharedBytesMax uint64

	Pollers        int           // threads serving one process's queues, 1
	Backend        emu.Backend   // way to the drives
	InOrder        bool          // controllers complete in order
	QuiesceTimeout time.Duration // for commands in flight when a lane or a process ends, 5 s

	// Real says whose processes may have queue pairs of the SSDs themselves.
	Real Trust

	Logf func(format string, args ...any) // nil is silent
}

// pollersMax bounds the polling threads of all processes: of the ten thousand threads that the Go runtime allows, most
// are for what blocks.
const pollersMax = 4096

func (o *ControlOptions) setDefaults() {
	o.MaxSessions = cmp.Or(o.MaxSessions, 256)
	o.Pollers = cmp.Or(o.Pollers, 1)
	o.MaxMembers = cmp.Or(o.MaxMembers, min(1024, pollersMax/max(o.Pollers, 1)))
	o.MaxHandles = cmp.Or(o.MaxHandles, 65536)
	o.MaxPools = cmp.Or(o.MaxPools, 1024)
	o.Tickets = cmp.Or(o.Tickets, 1024)
	o.ArenaBytesMax = min(cmp.Or(o.ArenaBytesMax, ioctl.ArenaBytesMax), ioctl.ArenaBytesMax)
	o.DMABytesMax = cmp.Or(o.DMABytesMax, 8<<30)
	if o.SharedBytesMax == 0 {
		o.SharedBytesMax = machineBytes() / 2
	}
	o.QuiesceTimeout = cmp.Or(o.QuiesceTimeout, 5*time.Second)
	if o.Logf == nil {
		o.Logf = func(string, ...any) {}
	}
	if o.SocketDir == "" {
		o.SocketDir = defaultSocketDir()
	}
}

// machineBytes is the size of main memory; a small one where the kernel does not say.
func machineBytes() uint64 {
	var i unix.Sysinfo_t
	if err := unix.Sysinfo(&i); err != nil {
		return 4 << 30
	}
	return i.Totalram * uint64(i.Unit)
}

func (o *ControlOptions) validate() error {
	var errs []error
	if o.Tickets < 1 || o.Tickets > 1<<16 || o.Tickets&(o.Tickets-1) != 0 {
		errs = append(errs, fmt.Errorf("daemon: tickets a handle: %d is not a power of two of 1..65536", o.Tickets))
	}
	if o.Pollers < 1 || o.Pollers > ioctl.LanesMax {
		errs = append(errs, fmt.Errorf("daemon: pollers a process: %d is not of 1..%d", o.Pollers, ioctl.LanesMax))
	}
	if o.MaxSessions < 1 || o.MaxSessions > emu.SharesMax {
		errs = append(errs, fmt.Errorf("daemon: sessions: %d is not of 1..%d", o.MaxSessions, emu.SharesMax))
	}
	if o.MaxMembers < 1 || o.MaxMembers*o.Pollers > pollersMax {
		errs = append(errs, fmt.Errorf("daemon: %d processes with %d pollers each are more than %d threads", o.MaxMembers,
			o.Pollers, pollersMax))
	}
	return errors.Join(errs...)
}

func defaultSocketDir() string {
	if os.Geteuid() == 0 {
		return "/run/tuttifs"
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "tuttifs")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("tuttifs-%d", os.Geteuid()))
}

// member drive as sessions use it.
type driveController struct {
	index      uint16
	name       string
	lbaBytes   int
	controller *emu.Controller
	own        *vfio.Drive  // nil where no driver of ours is behind it
	phase      *phase.Token // nil where it has none
}

// Control answers the ABI of one mount: ioctls from fs (it is fs.Ioctler), attachments from the socket. It owns the
// virtual controllers and everything that sessions have in shared memory. Safe for concurrent use.
//
// Lock order: Control.mu is a leaf; member.setup before member.use; no lock is held over a call into gpufile but
// member.use, shared, which only keeps the arena mapped.
type Control struct {
	o        ControlOptions
	store    *gpufile.Store
	nonce    uint64
	uuid     [16]byte
	listener *net.UnixListener
	path     string // of the socket

	stop    chan struct{}  // closed by Shutdown
	workers sync.WaitGroup // accept loop, connections, heartbeat, evictions

	mu          sync.Mutex        // guards what follows
	drives      []driveController // replaced as a whole
	closed      bool
	handles     map[uint64]*handle
	members     map[uint32]*member
	sessions    map[uint32]*session
	nextHandle  uint64
	nextMember  uint32
	sharedBytes uint64
	evictions   int // under way
	connections map[*net.UnixConn]struct{}
	strangers   map[uint32]int // connections that have not attached, by user
	users       map[uint32]*usage

	realMu sync.Mutex            // guards real, and what of members is in it
	real   map[uint16]realCounts // of all members, by the drive's index

	scratch sync.Pool // of *scratch
}

// usage is what one user has of what is limited.
type usage struct {
	handles, members, sessions int
	sharedBytes                uint64
}

// usageOf is a user's usage, to be changed by who holds mu and given to settle afterwards.
func (c *Control) usageOf(uid uint32) *usage {
	u := c.users[uid]
	if u == nil {
		u = &usage{}
		c.users[uid] = u
	}
	return u
}

// settle forgets a user who has nothing any more. The caller holds mu.
func (c *Control) settle(uid uint32) {
	if u := c.users[uid]; u != nil && *u == (usage{}) {
		delete(c.users, uid)
	}
}

// most is how much one user may have of what all together may have most of.
func (c *Control) most(all uint64) uint64 {
	if c.o.Shared {
		return max(all/2, 1)
	}
	return all
}

// handle is one open file of the mount that takes ioctls.
type handle struct {
	id       uint64
	uid      uint32
	writable bool
	tickets  tickets

	mu     sync.Mutex // guards member
	member *member    // nil before SESSION_CREATE or SESSION_JOIN; never replaced
}

// NewControl makes one controller a drive and listens on the attach socket.
func NewControl(store *gpufile.Store, o ControlOptions) (*Control, error) {
	o.setDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	v := store.Volume()
	info := v.Info()
	c := &Control{o: o, store: store, nonce: info.Nonce, uuid: info.UUID, stop: make(chan struct{}),
		real: map[uint16]realCounts{}, handles: map[uint64]*handle{},
		members: map[uint32]*member{}, sessions: map[uint32]*session{},
		connections: map[*net.UnixConn]struct{}{}, strangers: map[uint32]int{},
		users: map[uint32]*usage{}}
	c.scratch.New = func() any { return new(scratch) }
	for _, d := range info.Drives {
		if d.State == extentmap.DriveLost {
			continue
		}
		dc, err := newController(v.Drive(d.Index), d.Index, info.ReadOnly, o)
		if err != nil {
			return nil, err
		}
		c.drives = append(c.drives, dc)
	}
	if err := c.listen(); err != nil {
		return nil, err
	}
	c.workers.Go(c.acceptLoop)
	c.workers.Go(c.heartbeat)
	c.workers.Go(c.chooseBackends)
	return c, nil
}

// chooseBackends measures the ways to the drives ahead of the first engine, one drive after the other, and then maps
// what those have that are memory.
func (c *Control) chooseBackends() {
	for _, d := range c.driveList() {
		select {
		case <-c.stop:
			return
		default:
			c.choose(d)
		}
	}
	for _, d := range c.driveList() {
		d.controller.Warm(c.stop)
	}
}

// choose settles the way to one drive, and says it.
func (c *Control) choose(d driveController) {
	backend, why := d.controller.Choose(c.o.Backend)
	c.o.Logf("drive %d (%s): commands go by %s (%s)", d.index, d.name, backend, why)
}

const commandBytes = 2 << 20 // MDTS of the virtual controllers

func newController(d drive.Drive, index uint16, readOnly bool, o ControlOptions) (driveController, error) {
	d, use := useOf(d)
	config := emu.Config{Drive: d, Index: index, MDTS: 9, QueueEntries: ioctl.DepthMax,
		Queues: 1<<16 - 2, SGL: true, ReadOnly: readOnly, InOrder: o.InOrder, Serial: fmt.Sprintf("tuttifs-%d", index)}
	if use != nil {
		config.Medium, config.Phase = use.medium, use.phase
	}
	ctl, err := emu.New(config)
	if err != nil {
		return driveController{}, fmt.Errorf("daemon: controller of drive %d (%s): %w", index, d.Name(), err)
	}
	own, _ := d.(*vfio.Drive)
	if use != nil && use.medium != nil || readOnly {
		own = nil // queue pairs of its own would be as fast as it is, or could write to it
	}
	return driveController{index: index, name: d.Name(), lbaBytes: d.LBABytes(), controller: ctl, own: own,
		phase: config.Phase}, nil
}

// evictionsMax bounds the evictions under way, each of which keeps up to 2 MiB of keys.
const evictionsMax = 64

// evict runs an eviction beside the verb that wants it.
func (c *Control) evict(work func()) ioctl.Errno {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return ioctl.ESTALE
	case c.evictions >= evictionsMax:
		return ioctl.EAGAIN
	}
	c.evictions++
	c.workers.Go(func() {
		work()
		c.mu.Lock()
		c.evictions--
		c.mu.Unlock()
	})
	return 0
}

// SocketPath is where engines attach.
func (c *Control) SocketPath() string { return c.path }

// Controllers lists the virtual controllers by drive index, for statistics.
func (c *Control) Controllers() map[uint16]*emu.Controller {
	drives := c.driveList()
	m := make(map[uint16]*emu.Controller, len(drives))
	for _, d := range drives {
		m[d.index] = d.controller
	}
	return m
}

// Open registers an open file (fs.Ioctler). 0 is no handle: every ioctl on it is EMFILE.
func (c *Control) Open(_ uint32, uid, _ uint32, writable bool) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.settle(uid)
	u := c.usageOf(uid)
	if c.closed || len(c.handles) >= c.o.MaxHandles || uint64(u.handles) >= c.most(uint64(c.o.MaxHandles)) {
		return 0
	}
	u.handles++
	c.nextHandle++
	h := &handle{id: c.nextHandle, uid: uid, writable: writable}
	h.tickets.max = c.o.Tickets
	c.handles[h.id] = h
	return h.id
}

// Close is RELEASE of an open file: it ends the membership made on it.
func (c *Control) Close(id uint64) {
	c.mu.Lock()
	h := c.handles[id]
	if h != nil {
		delete(c.handles, id)
		c.usageOf(h.uid).handles--
		c.settle(h.uid)
	}
	c.mu.Unlock()
	if h == nil {
		return
	}
	h.tickets.close()
	h.mu.Lock()
	m := h.member
	h.mu.Unlock()
	if m != nil {
		m.end("its file was closed")
	}
}

// Ioctl serves one ioctl (fs.Ioctler).
func (c *Control) Ioctl(id uint64, pid uint32, cmd uint32, _ uint64, in, out []byte) int32 {
	c.mu.Lock()
	h, closed := c.handles[id], c.closed
	c.mu.Unlock()
	switch {
	case closed:
		return int32(ioctl.ESTALE)
	case h == nil:
		return int32(ioctl.EMFILE)
	}
	return int32(ioctl.Dispatch(&call{c: c, h: h, pid: pid}, h.writable, cmd, in, out))
}

// Shutdown ends all memberships, quiesces their queues and removes the socket. Call it when the mount is gone and
// before the store is closed. It reports what could not be stopped in time.
func (c *Control) Shutdown() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	var members []*member
	for _, m := range c.members {
		members = append(members, m)
	}
	handles := c.handles
	c.handles = map[uint64]*handle{}
	c.mu.Unlock()

	close(c.stop)
	err := c.listener.Close()
	for _, m := range members {
		m.end("the mount is going away")
	}
	for _, h := range handles {
		h.tickets.close()
	}
	left := awaitEnds(members, c.o.QuiesceTimeout+time.Second)
	c.mu.Lock()
	for conn := range c.connections {
		_ = conn.Close()
	}
	c.mu.Unlock()
	c.workers.Wait()
	if left > 0 {
		err = errors.Join(err, fmt.Errorf("daemon: %d processes have commands in flight that do not end", left))
	}
	return err
}

// awaitEnds waits until the members are taken down and returns how many were not in time.
func awaitEnds(members []*member, patience time.Duration) (left int) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for i, m := range members {
		select {
		case <-m.ended:
		case <-timer.C:
			return len(members) - i
		}
	}
	return 0
}

// heartbeat counts in every session page and says when maps have changed.
func (c *Control) heartbeat() {
	tick := time.NewTicker(ioctl.HeartbeatMilliseconds * time.Millisecond)
	defer tick.Stop()
	var last uint64
	for {
		select {
		case <-c.stop:
			return
		case <-tick.C:
		}
		members := c.liveMembers()
		if len(members) == 0 {
			continue
		}
		now := mapGeneration(c.store.Pools())
		for _, m := range members {
			m.beat(now != last)
		}
		last = now
	}
}

func (c *Control) liveMembers() []*member {
	c.mu.Lock()
	defer c.mu.Unlock()
	members := make([]*member, 0, len(c.members))
	for _, m := range c.members {
		members = append(members, m)
	}
	return members
}

// mapGeneration is the sum over pools: it moves when any of them does, since each only grows.
func mapGeneration(pools []*gpufile.Pool) (sum uint64) {
	for _, p := range pools {
		sum += p.Map().Generation()
	}
	return sum
}

// MemberInfo describes one process of a session, for status files.
type MemberInfo struct {
	Member   uint32 `json:"member"`
	Session  uint32 `json:"session"`
	UID      uint32 `json:"uid"`
	PID      uint32 `json:"pid"`
	Attached bool   `json:"attached"`
	// Mode is "real" if the process has queue pairs of RealDrives' own, past the daemon; else "mediated".
	Mode       string   `json:"mode"`
	RealDrives []uint16 `json:"real_drives,omitempty"`
	// ReachedBytes are memory of others, a GPU's, that these drives read and write themselves; 0: all is bounced.
	ReachedBytes uint64    `json:"reached_bytes,omitempty"`
	Lanes        uint32    `json:"lanes"`
	Depth        uint32    `json:"depth"`
	ArenaBytes   uint64    `json:"arena_bytes"`
	DMABytes     uint64    `json:"dma_bytes"`
	Since        time.Time `json:"since"`
	Ending       bool      `json:"ending"`
	// MapGenerations are the map generations that the process has acknowledged, by pool.
	MapGenerations map[uint16]uint64 `json:"map_generations"`
}

// Members lists the processes of all sessions, by number.
func (c *Control) Members() []MemberInfo {
	infos := []MemberInfo{}
	for _, m := range c.liveMembers() {
		infos = append(infos, m.info())
	}
	slices.SortFunc(infos, func(a, b MemberInfo) int { return cmp.Compare(a.Member, b.Member) })
	return infos
}

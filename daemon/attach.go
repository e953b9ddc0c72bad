package daemon

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// attachPatience is how long a connection may take to say what it wants.
const attachPatience = 10 * time.Second

// listen makes the attach socket. A socket file left by a daemon that was killed is replaced: the volume's lock says
// that we are its only daemon.
func (c *Control) listen() error {
	dirMode, mode := os.FileMode(0o700), os.FileMode(0o600)
	if c.o.Shared {
		dirMode, mode = 0o711, 0o666
	}
	if err := makeSocketDir(c.o.SocketDir, dirMode); err != nil {
		return err
	}
	u := c.uuid
	name := fmt.Sprintf("%x-%x-%x-%x-%x.sock", u[0:4], u[4:6], u[6:8], u[8:10], u[10:])
	c.path = filepath.Join(c.o.SocketDir, name)
	if len(c.path) >= ioctl.SocketPathBytes {
		return fmt.Errorf("daemon: socket path %s is longer than %d bytes: choose a shorter directory",
			c.path, ioctl.SocketPathBytes-1)
	}
	if err := os.Remove(c.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("daemon: old socket: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: c.path, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("daemon: socket: %w", err)
	}
	l.SetUnlinkOnClose(true)
	if err := os.Chmod(c.path, mode); err != nil {
		return errors.Join(fmt.Errorf("daemon: socket: %w", err), l.Close())
	}
	c.listener = l
	return nil
}

// makeSocketDir makes the directory where it is missing. One that somebody else could change would let them put a
// socket of their own in our place.
func makeSocketDir(dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return fmt.Errorf("daemon: socket directory: %w (choose another)", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("daemon: socket directory %s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) || st.Mode&0o022 != 0 {
		return fmt.Errorf("daemon: socket directory %s can be changed by others: choose one of your own with mode 0700", dir)
	}
	if mode&0o011 != 0 && st.Mode&0o011 != 0o011 {
		if err := os.Chmod(dir, mode); err != nil {
			return fmt.Errorf("daemon: socket directory: %w", err)
		}
	}
	return nil
}

func (c *Control) acceptLoop() {
	for {
		conn, err := c.listener.AcceptUnix()
		if err != nil {
			select {
			case <-c.stop:
				return
			case <-time.After(50 * time.Millisecond): // out of descriptors, most likely
				continue
			}
		}
		cred, err := peer(conn)
		if err != nil || !c.admit(conn, cred.Uid) {
			_ = conn.Close()
			continue
		}
		c.workers.Go(func() { c.serve(conn, cred.Uid) })
	}
}

// admit lets a connection in that has not attached yet. One user's leave room for the others'.
func (c *Control) admit(conn *net.UnixConn, uid uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.connections) >= 2*c.o.MaxMembers || c.strangers[uid] >= max(c.o.MaxMembers/2, 1) {
		return false
	}
	c.connections[conn] = struct{}{}
	c.strangers[uid]++
	return true
}

// known counts a connection off that has attached, or ended.
func (c *Control) known(uid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.strangers[uid]--; c.strangers[uid] == 0 {
		delete(c.strangers, uid)
	}
}

// serve speaks the attach protocol on one connection until it ends.
func (c *Control) serve(conn *net.UnixConn, uid uint32) {
	known := sync.OnceFunc(func() { c.known(uid) })
	defer known()
	defer func() {
		c.mu.Lock()
		delete(c.connections, conn)
		c.mu.Unlock()
		_ = conn.Close()
	}()
	_ = conn.SetReadDeadline(time.Now().Add(attachPatience))
	r, sent, err := receive(conn)
	sent.close()
	if err != nil || r.Kind != ioctl.MessageAttach {
		refuse(conn, r.Kind, err)
		return
	}
	m, reply, fds, err := c.attach(conn, &r)
	if err != nil {
		refuse(conn, r.Kind, err)
		return
	}
	known() // before it hears so: it may go on to let another process attach
	err = send(conn, &reply, fds)
	fds.close()
	if err != nil {
		m.end("attaching: " + err.Error())
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	m.converse(conn)
}

// refuse answers an errno where the message could be read.
func refuse(conn *net.UnixConn, kind uint16, err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return
	}
	reply := ioctl.NewAttachReply(kind)
	reply.Errno = int32(ioctl.EINVAL)
	if err != nil {
		reply.Errno = int32(errnoOf(err))
	}
	_ = send(conn, &reply, nil)
}

// converse serves the lanes' messages until the other end hangs up, which ends the member.
func (m *member) converse(conn *net.UnixConn) {
	for {
		r, sent, err := receive(conn)
		if err != nil {
			sent.close()
			if errors.Is(err, ioctl.ErrMessage) {
				refuse(conn, 0, err)
			}
			m.end("its socket hung up")
			return
		}
		reply := ioctl.NewAttachReply(r.Kind)
		switch r.Kind {
		case ioctl.MessagePing:
		case ioctl.MessageQuiesce:
			err = m.quiesceLane(r.Lane)
		case ioctl.MessageReattach:
			err = m.reattachLane(r.Lane)
		case ioctl.MessageReach:
			reply.DMABase, err = m.reach(sent, r.MemoryBytes)
		case ioctl.MessageRelease:
			err = m.release(r.MemoryAddress)
		default:
			err = ioctl.EBUSY
		}
		sent.close()
		if err != nil {
			reply.Errno = int32(errnoOf(err))
		}
		if err := send(conn, &reply, nil); err != nil {
			m.end("its socket failed")
			return
		}
	}
}

func (m *member) quiesceLane(i uint32) error {
	m.setup.Lock()
	defer m.setup.Unlock()
	if i >= uint32(len(m.lanes)) {
		return ioctl.EINVAL
	}
	if err := m.lanes[i].quiesce(time.Now().Add(m.c.o.QuiesceTimeout)); err != nil {
		m.c.o.Logf("session %d: lane %d: %v", m.leases.SessionID(), i, err)
		return ioctl.ETIMEDOUT
	}
	return nil
}

func (m *member) reattachLane(i uint32) error {
	m.setup.Lock()
	defer m.setup.Unlock()
	switch {
	case m.gone.Load():
		return ioctl.ESTALE
	case i >= uint32(len(m.lanes)):
		return ioctl.EINVAL
	case m.lanes[i].live:
		return ioctl.EBUSY
	}
	return m.attachLane(int(i))
}

// receive reads one request, and the descriptor that may come along, which the caller closes whatever is returned. More
// of them are closed by the kernel: no room is given for them.
func receive(conn *net.UnixConn) (ioctl.AttachRequest, descriptors, error) {
	b := make([]byte, unsafe.Sizeof(ioctl.AttachRequest{})+1)
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil {
		return ioctl.AttachRequest{}, nil, err
	}
	var sent descriptors
	if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for i := range messages {
			if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
				sent = append(sent, fds...)
			}
		}
	}
	if n == 0 {
		return ioctl.AttachRequest{}, sent, io.EOF
	}
	r, err := ioctl.ParseAttachRequest(b[:n])
	return r, sent, err
}

func send(conn *net.UnixConn, reply *ioctl.AttachReply, fds descriptors) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_ = conn.SetWriteDeadline(time.Now().Add(attachPatience))
	_, _, err := conn.WriteMsgUnix(reply.Bytes(), oob, nil)
	return err
}

// attach checks who is asking for what, and makes it.
func (c *Control) attach(conn *net.UnixConn, r *ioctl.AttachRequest) (*member, ioctl.AttachReply, descriptors, error) {
	reply := ioctl.NewAttachReply(r.Kind)
	cred, err := peer(conn)
	if err != nil {
		return nil, reply, nil, err
	}
	m, err := c.claim(r, cred)
	if err != nil {
		return nil, reply, nil, err
	}
	if err := c.checkLimits(r); err != nil {
		return nil, reply, nil, err
	}
	if r.Mode == ioctl.ModeReal && !c.o.Real.allows(m.uid) {
		return nil, reply, nil, ioctl.EPERM
	}
	m.setup.Lock()
	defer m.setup.Unlock()
	switch {
	case m.gone.Load():
		return nil, reply, nil, ioctl.ESTALE
	case m.conn != nil:
		return nil, reply, nil, ioctl.EBUSY
	}
	fds, err := m.build(r)
	if err != nil {
		c.o.Logf("session %d, process %d: attach: %v", m.leases.SessionID(), m.pid(), err)
		m.end("attaching failed")
		return nil, reply, nil, err
	}
	m.conn = conn
	m.describe(&reply, fds)
	return m, reply, fds, nil
}

func peer(conn *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// claim finds the member that a request names. Someone who does not have the token learns nothing: ENOENT whatever is
// wrong.
func (c *Control) claim(r *ioctl.AttachRequest, cred *unix.Ucred) (*member, error) {
	c.mu.Lock()
	m := c.members[r.Member]
	c.mu.Unlock()
	if m == nil || m.leases.SessionID() != r.Session {
		return nil, ioctl.ENOENT
	}
	token := m.leases.Token()
	if subtle.ConstantTimeCompare(token[:], r.Token[:]) != 1 {
		return nil, ioctl.ENOENT
	}
	if cred.Uid != 0 && cred.Uid != m.uid {
		return nil, ioctl.EPERM
	}
	// A member is one process: another one of the session joins with the token first. Pids of 0 are in namespaces
	// that cannot be seen from here.
	if cred.Pid != 0 && m.pid() != 0 && uint32(cred.Pid) != m.pid() {
		return nil, ioctl.EPERM
	}
	return m, nil
}

func (c *Control) checkLimits(r *ioctl.AttachRequest) error {
	if r.Lanes == 0 {
		if r.Depth != 0 || r.DMABytes != 0 || r.Mode != ioctl.ModeMediated {
			return ioctl.EINVAL
		}
		return nil
	}
	page := uint64(os.Getpagesize())
	if r.Lanes > ioctl.LanesMax || nvme.QueueBytes(int(min(r.Depth, ioctl.DepthMax+1))) == 0 ||
		r.DMABytes > c.o.DMABytesMax || r.DMABytes%page != 0 {
		return ioctl.EINVAL
	}
	return nil
}

// entryCost is about what a controller keeps privately for one queue entry, its part of the long lists that a queue may
// have in flight included; it is charged like shared memory.
const entryCost = 2048

// build makes memory, pollers and lanes. The caller holds setup.
func (m *member) build(r *ioctl.AttachRequest) (descriptors, error) {
	c := m.c
	m.drives = c.driveList()
	block := uint64(nvme.QueueBytes(int(r.Depth)))
	queues := ioctl.SessionPageBytes + uint64(r.Lanes)*uint64(len(m.drives))*block
	if r.Mode == ioctl.ModeReal {
		page := uint64(os.Getpagesize())
		queues = (queues + uint64(len(m.drives))*uint64(unsafe.Sizeof(ioctl.DriveShare{})) + page - 1) &^ (page - 1)
	}
	entries := uint64(r.Lanes) * uint64(len(m.drives)) * uint64(r.Depth)
	total := m.arena + queues + r.DMABytes + entries*entryCost
	c.mu.Lock()
	u := c.usageOf(m.uid)
	if total > c.o.SharedBytesMax-c.sharedBytes || u.sharedBytes+total > c.most(c.o.SharedBytesMax) {
		c.mu.Unlock()
		return nil, fmt.Errorf("%w: %d bytes more than all processes together, or one user's, may have", ioctl.ENOMEM, total)
	}
	c.sharedBytes += total
	u.sharedBytes += total
	c.mu.Unlock()
	s, fds, err := makeShared(m.memoryName(), m.arena, queues, r.DMABytes)
	s.total, s.lanes, s.depth = total, r.Lanes, r.Depth
	m.use.Lock()
	m.shared = s
	m.use.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ioctl.ENOMEM, err)
	}
	*word64(s.queues, ioctl.NonceWord) = c.nonce
	*word32(s.queues, ioctl.StateWord) = ioctl.SessionLive
	m.depth = r.Depth
	m.dma, m.authority = &emu.Region{Base: ioctl.DMABase, Bytes: s.dma}, authority{leases: m.leases}
	if r.Mode == ioctl.ModeReal {
		if err := m.handOver(&fds); err != nil {
			fds.close()
			return nil, err
		}
	}
	m.lanes = make([]lane, r.Lanes)
	if err := m.startLanes(); err != nil {
		fds.close()
		return nil, err
	}
	return fds, nil
}

func (m *member) startLanes() error {
	if err := m.startPollers(); err != nil {
		return err
	}
	for i := range m.lanes {
		if err := m.attachLane(i); err != nil {
			return err
		}
	}
	return nil
}

// describe fills the reply to a successful attach. The caller holds setup.
func (m *member) describe(reply *ioctl.AttachReply, fds descriptors) {
	c := m.c
	reply.Descriptors = uint32(len(fds))
	reply.Lanes, reply.Depth, reply.Drives = uint32(len(m.lanes)), m.depth, uint32(len(m.drives))
	reply.ArenaBytes, reply.QueuesBytes = uint64(len(m.shared.arena)), uint64(len(m.shared.queues))
	reply.QueueBlockBytes = uint64(nvme.QueueBytes(int(m.depth)))
	reply.DMABytes, reply.DMABase = uint64(len(m.shared.dma)), ioctl.DMABase
	reply.Nonce, reply.SGL, reply.CommandBytes = c.nonce, 1, commandBytes
	if r := m.real; r != nil {
		reply.Mode, reply.DMABase, reply.CommandBytes = ioctl.ModeReal, m.dma.Base, r.commandBytes
		if !r.sgl {
			reply.SGL = 0
		}
	}
	reply.Pollers = uint32(len(m.pollers))
	for i, d := range m.drives {
		reply.DriveIndex[i], reply.LBABytes[i] = d.index, uint16(d.lbaBytes)
	}
}

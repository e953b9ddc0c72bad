package ioctl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AttachOptions of Client.Attach.
type AttachOptions struct {
	Lanes    int    // 0 for an arena alone
	Depth    int    // entries of each queue, a power of two
	DMABytes uint64 // memory that controllers reach
	Real     bool   // queue pairs of the SSDs themselves, where the daemon drives them
}

// Attachment is a member's end of its shared memory. Arena, Queues and DMA are mapped until Close.
type Attachment struct {
	Reply  AttachReply
	Arena  []byte
	Queues []byte // session page and queue blocks
	DMA    []byte // nil without

	bellsMu sync.RWMutex
	bells   [][]byte // by drive: registers that have its doorbells; nil for drives without queue pairs of their own
	shadows [][]byte // by drive: its doorbell buffer; nil without

	mu     sync.Mutex // guards the socket: one request and its reply at a time
	socket int        // -1 when closed
}

// Attach connects to the socket that SESSION_CREATE or SESSION_JOIN answered, and maps what the daemon makes.
func (s *Session) Attach(o AttachOptions) (*Attachment, error) {
	path := strings.TrimRight(string(s.SocketPath[:]), "\x00")
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("ioctl: attach: %w", err)
	}
	a := &Attachment{socket: socket}
	if err := a.bound(); err != nil {
		_ = a.Close()
		return nil, fmt.Errorf("ioctl: attach: %w", err)
	}
	if err := a.connect(path); err != nil {
		_ = a.Close()
		return nil, fmt.Errorf("ioctl: attach: connect %s: %w", path, err)
	}
	r := NewAttachRequest(MessageAttach)
	r.Session, r.Member, r.Token = s.ID, s.Member, s.Token
	r.Lanes, r.Depth, r.DMABytes = uint32(o.Lanes), uint32(o.Depth), o.DMABytes
	if o.Real {
		r.Mode = ModeReal
	}
	reply, fds, err := a.exchange(&r)
	if err == nil {
		a.Reply = reply
		err = a.mapAll(fds)
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		_ = a.Close()
		return nil, fmt.Errorf("ioctl: attach: %w", err)
	}
	return a, nil
}

// answerWithin bounds a request: a stopped daemon must not hang who wants to quiesce.
const answerWithin = 15 * time.Second

func (a *Attachment) bound() error {
	limit := unix.NsecToTimeval(int64(answerWithin))
	return errors.Join(unix.SetsockoptTimeval(a.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptTimeval(a.socket, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
}

func (a *Attachment) connect(path string) error {
	for {
		err := unix.Connect(a.socket, &unix.SockaddrUnix{Name: path})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// exchange sends one request and receives its reply with the descriptors that came along. Descriptors are returned
// even with an error, for the caller to close.
func (a *Attachment) exchange(r *AttachRequest, send ...int) (AttachReply, []int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.socket < 0 {
		return AttachReply{}, nil, os.ErrClosed
	}
	if err := sendMessage(a.socket, r.Bytes(), send); err != nil {
		return AttachReply{}, nil, err
	}
	b, fds, err := receiveMessage(a.socket, int(unsafe.Sizeof(AttachReply{})))
	if errors.Is(err, unix.EAGAIN) {
		// A late answer would be taken for the next request's: nothing more is said on this connection, which ends the
		// membership.
		_ = unix.Shutdown(a.socket, unix.SHUT_RDWR)
		return AttachReply{}, fds, fmt.Errorf("ioctl: no answer in %v: %w", answerWithin, err)
	}
	if err != nil {
		return AttachReply{}, fds, err
	}
	reply, err := ParseAttachReply(b)
	if err != nil {
		return reply, fds, err
	}
	if reply.Errno != 0 {
		return reply, fds, Errno(reply.Errno)
	}
	if int(reply.Descriptors) != len(fds) {
		return reply, fds, fmt.Errorf("%w: %d descriptors, reply names %d", ErrMessage, len(fds), reply.Descriptors)
	}
	return reply, fds, nil
}

func (a *Attachment) mapAll(fds []int) error {
	regions := []struct {
		to    *[]byte
		bytes uint64
	}{{&a.Arena, a.Reply.ArenaBytes}, {&a.Queues, a.Reply.QueuesBytes}, {&a.DMA, a.Reply.DMABytes}}
	if a.Reply.DMABytes == 0 {
		regions = regions[:2]
	}
	if len(fds) < len(regions) {
		return fmt.Errorf("%w: %d descriptors, want %d", ErrMessage, len(fds), len(regions))
	}
	for i, r := range regions {
		if r.bytes == 0 || r.bytes > math.MaxInt {
			return fmt.Errorf("%w: region of %d bytes", ErrMessage, r.bytes)
		}
		if err := checkSealed(fds[i], r.bytes); err != nil {
			return err
		}
		b, err := MapShared(fds[i], r.bytes)
		if err != nil {
			return fmt.Errorf("ioctl: map %d bytes: %w", r.bytes, err)
		}
		*r.to = b
	}
	return a.mapBells(fds[len(regions):])
}

// mapBells maps the doorbells of drives that have queue pairs of their own. A descriptor is not needed after that: it
// would keep the device from a daemon that starts again.
func (a *Attachment) mapBells(fds []int) error {
	a.bells, a.shadows = make([][]byte, a.Reply.Drives), make([][]byte, a.Reply.Drives)
	for d := range a.bells {
		at := a.DriveBells(d)
		if at.Bytes == 0 {
			continue
		}
		if len(fds) == 0 || a.Reply.Mode != ModeReal || at.Bytes > bellsMax || at.Offset > math.MaxInt64-bellsMax {
			return fmt.Errorf("%w: doorbells of drive %d: %d bytes at %#x, with %d descriptors left", ErrMessage,
				a.Reply.DriveIndex[d], at.Bytes, at.Offset, len(fds))
		}
		b, err := unix.Mmap(fds[0], int64(at.Offset), int(at.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("ioctl: map the doorbells of drive %d: %w", a.Reply.DriveIndex[d], err)
		}
		a.bells[d], fds = b, fds[1:]
		if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
			return fmt.Errorf("ioctl: doorbells of drive %d: %w", a.Reply.DriveIndex[d], err)
		}
		if a.DriveTerms(d).Buffer == 0 {
			continue
		}
		if len(fds) == 0 {
			return fmt.Errorf("%w: no descriptor of the doorbell buffer of drive %d", ErrMessage, a.Reply.DriveIndex[d])
		}
		if a.shadows[d], err = mapShadows(fds[0]); err != nil {
			return fmt.Errorf("ioctl: doorbell buffer of drive %d: %w", a.Reply.DriveIndex[d], err)
		}
		fds = fds[1:]
	}
	if len(fds) != 0 {
		return fmt.Errorf("%w: %d descriptors are left over", ErrMessage, len(fds))
	}
	return nil
}

// mapShadows maps a doorbell buffer, of which nobody can cut anything off.
func mapShadows(fd int) ([]byte, error) {
	page := uint64(os.Getpagesize())
	if err := checkSealed(fd, (DoorbellBufferBytes+page-1)&^(page-1)); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(fd, 0, DoorbellBufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return b, unix.Madvise(b, unix.MADV_DONTFORK)
}

// bellsMax bounds the doorbells of one controller: 65536 queues, 32 bytes apart.
const bellsMax = 4 << 20

// DriveBells says how the d-th drive's own queue pairs are rung, if it has any.
func (a *Attachment) DriveBells(d int) DriveBells {
	return *(*DriveBells)(unsafe.Pointer(&a.Queues[BellsOffset+d*int(unsafe.Sizeof(DriveBells{}))]))
}

// DriveTerms says how the d-th drive's own queue pairs are used.
func (a *Attachment) DriveTerms(d int) DriveTerms {
	return *(*DriveTerms)(unsafe.Pointer(&a.Queues[TermsOffset+d*int(unsafe.Sizeof(DriveTerms{}))]))
}

// Bells are the doorbells of a lane's queue pair on the d-th drive, which are registers; nil where the daemon's virtual
// controller serves the queue. They stay until Close, wherever Silence leaves what is written to them.
func (a *Attachment) Bells(lane, d int) (sqTail, cqHead *uint32, err error) {
	a.bellsMu.RLock()
	defer a.bellsMu.RUnlock()
	if a.bells == nil || a.bells[d] == nil {
		return nil, nil, nil
	}
	pair := *(*PairBells)(unsafe.Pointer(&a.Block(lane, d)[PairOffset]))
	b := a.bells[d]
	if last := int64(len(b) - 4); (pair.SQTail|pair.CQHead)%4 != 0 || int64(max(pair.SQTail, pair.CQHead)) > last {
		return nil, nil, fmt.Errorf("%w: doorbells at %#x and %#x of %d bytes", ErrMessage, pair.SQTail, pair.CQHead, len(b))
	}
	return (*uint32)(unsafe.Pointer(&b[pair.SQTail])), (*uint32)(unsafe.Pointer(&b[pair.CQHead])), nil
}

// ShadowBell is a doorbell in a doorbell buffer: its value, and the value that the controller wants to be told of.
type ShadowBell struct{ Doorbell, Event *uint32 }

// Shadows are the doorbells of a lane's queue pair on the d-th drive as they lie in the drive's doorbell buffer; nil
// where it has none. They stay as Bells do.
func (a *Attachment) Shadows(lane, d int) (sqTail, cqHead ShadowBell, err error) {
	a.bellsMu.RLock()
	defer a.bellsMu.RUnlock()
	if a.shadows == nil || a.shadows[d] == nil {
		return ShadowBell{}, ShadowBell{}, nil
	}
	pair := *(*PairBells)(unsafe.Pointer(&a.Block(lane, d)[PairOffset]))
	tail, head := pair.TailShadow, pair.HeadShadow
	if (tail|head)%4 != 0 || tail == 0 || head == 0 || max(tail, head) > DoorbellBufferBytes/2-4 {
		return ShadowBell{}, ShadowBell{}, fmt.Errorf("%w: doorbells at %#x and %#x of a doorbell buffer", ErrMessage, tail,
			head)
	}
	at := func(off uint32) ShadowBell {
		word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&a.shadows[d][off])) }
		return ShadowBell{word(off), word(off + DoorbellBufferBytes/2)}
	}
	return at(tail), at(head), nil
}

// Silence puts memory of nobody's where the doorbells were mapped: what is rung from then on is not heard, and the
// devices are free for the next daemon. For when the daemon is gone.
func (a *Attachment) Silence() error {
	a.bellsMu.Lock()
	defer a.bellsMu.Unlock()
	var errs []error
	for _, b := range slices.Concat(a.bells, a.shadows) {
		if b == nil {
			continue
		}
		_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Quiesce asks the daemon to stop a lane. After nil nothing of the lane touches memory or drives any more.
func (a *Attachment) Quiesce(lane int) error { return a.lane(MessageQuiesce, lane) }

// Reattach begins a quiesced lane again: its queues are zeroed, heads and tails 0, the phase as at first.
func (a *Attachment) Reattach(lane int) error { return a.lane(MessageReattach, lane) }

func (a *Attachment) lane(kind uint16, lane int) error {
	r := NewAttachRequest(kind)
	r.Lane = uint32(lane)
	_, fds, err := a.exchange(&r)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		return fmt.Errorf("ioctl: lane %d: %w", lane, err)
	}
	return nil
}

// Reach makes memory that a descriptor names reachable for the SSDs whose queue pairs the process has, and says by what
// address. The descriptor stays the caller's.
func (a *Attachment) Reach(fd int, bytes uint64) (address uint64, err error) {
	r := NewAttachRequest(MessageReach)
	r.MemoryBytes = bytes
	reply, fds, err := a.exchange(&r, fd)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		return 0, fmt.Errorf("ioctl: reach %d bytes: %w", bytes, err)
	}
	return reply.DMABase, nil
}

// Release ends what Reach made. Nothing in flight names it any more.
func (a *Attachment) Release(address uint64) error {
	r := NewAttachRequest(MessageRelease)
	r.MemoryAddress = address
	_, fds, err := a.exchange(&r)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		return fmt.Errorf("ioctl: release %#x: %w", address, err)
	}
	return nil
}

// Word is a 32-bit word of the session page.
func (a *Attachment) Word(offset int) *uint32 { return (*uint32)(unsafe.Pointer(&a.Queues[offset])) }

// Heartbeat, Nonce and MapGeneration read the session page.
func (a *Attachment) Heartbeat() uint64     { return a.word64(HeartbeatWord) }
func (a *Attachment) Nonce() uint64         { return a.word64(NonceWord) }
func (a *Attachment) MapGeneration() uint64 { return a.word64(MapGenerationWord) }

func (a *Attachment) word64(offset int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&a.Queues[offset])))
}

// Block is the queue pair memory of a lane and the d-th drive.
func (a *Attachment) Block(lane, d int) []byte {
	o := a.Reply.QueueOffset(lane, d)
	return a.Queues[o : o+a.Reply.QueueBlockBytes : o+a.Reply.QueueBlockBytes]
}

// Alive says whether the daemon still holds the other end.
func (a *Attachment) Alive() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.socket < 0 {
		return false
	}
	p := []unix.PollFd{{Fd: int32(a.socket), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(p, 0)
	return err != nil || n == 0 || p[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR) == 0
}

// WaitTicket waits until a ticket has finished: on the ticket word of the session page, so that no call is ever stuck
// in the mount. It returns the ticket's value, the ticket's own error, or the context's.
func (c *Client) WaitTicket(ctx context.Context, a *Attachment, id uint64) (value uint64, err error) {
	for {
		before := atomic.LoadUint32(a.Word(TicketWord))
		t := Ticket{ID: id}
		if err := c.Ticket(&t); err != nil {
			return 0, err
		}
		switch t.State {
		case TicketDone:
			return t.Value, nil
		case TicketFailed:
			return 0, fmt.Errorf("ioctl: ticket %d: %w", id, Errno(t.Errno))
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if !a.Alive() {
			return 0, fmt.Errorf("ioctl: ticket %d: the daemon is gone: %w", id, ESTALE)
		}
		// Waits are cut so that a cancelled context and a dead daemon are noticed.
		FutexWait(a.Word(TicketWord), before, 20*time.Millisecond)
	}
}

// FutexWait sleeps while *word is value, at most d.
func FutexWait(word *uint32, value uint32, d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// FutexWake wakes all sleepers of a shared word.
func FutexWake(word *uint32) {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, math.MaxInt32, 0, 0, 0)
}

// futex(2) operations, not private: the words are shared between processes.
const (
	futexWait = 0
	futexWake = 1
)

// Close unmaps everything and hangs up, which ends the membership. The caller must have quiesced its lanes or be done
// with them: a command in flight still moves its bytes.
func (a *Attachment) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	if a.socket >= 0 {
		errs = append(errs, unix.Close(a.socket))
		a.socket = -1
	}
	for _, b := range []*[]byte{&a.Arena, &a.Queues, &a.DMA} {
		errs = append(errs, Unmap(*b))
		*b = nil
	}
	a.bellsMu.Lock()
	defer a.bellsMu.Unlock()
	for _, b := range slices.Concat(a.bells, a.shadows) {
		errs = append(errs, Unmap(b))
	}
	a.bells, a.shadows = nil, nil
	return errors.Join(errs...)
}

// sendMessage sends one packet, with descriptors if there are any.
func sendMessage(socket int, b []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(socket, b, oob, nil, unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// ErrHangUp: the other end has closed the socket.
var ErrHangUp = errors.New("ioctl: the other end of the socket is gone")

// descriptorsMax bounds what one message may carry.
const descriptorsMax = 3 + DrivesMax

// receiveMessage receives one packet of at most n bytes; a longer one is an error. Descriptors that came along are
// returned even with an error, for the caller to close.
func receiveMessage(socket, n int) ([]byte, []int, error) {
	b := make([]byte, n+1)
	oob := make([]byte, unix.CmsgSpace(4*descriptorsMax))
	var got, oobn, flags int
	var err error
	for {
		got, oobn, flags, _, err = unix.Recvmsg(socket, b, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, nil, err
	}
	fds := rights(oob[:oobn])
	switch {
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || got > n:
		return nil, fds, fmt.Errorf("%w: longer than %d bytes", ErrMessage, n)
	case got == 0:
		return nil, fds, ErrHangUp
	}
	return b[:got], fds, nil
}

func rights(oob []byte) []int {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var fds []int
	for i := range messages {
		if more, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, more...)
		}
	}
	return fds
}

// PutName copies a name into a NUL-padded field; it reports false if it does not fit.
func PutName(field []byte, name string) bool {
	clear(field)
	return copy(field, name) == len(name)
}

// Name reads a NUL-padded field; ok is false if anything follows the first NUL.
func Name(field []byte) (name string, ok bool) {
	s := string(field)
	name, rest, _ := strings.Cut(s, "\x00")
	return name, strings.Trim(rest, "\x00") == ""
}

// View is the span's elements in place. The span must lie in the arena; its offset is a multiple of 8.
func View[T DriveEntry | RowHead | RowEntry | Grant | ReserveItem | Extent | Change | [KeyBytes]byte](
	arena []byte, s Span) []T {
	var t T
	size := uint64(unsafe.Sizeof(t))
	if s.Offset%8 != 0 || s.Offset > uint64(len(arena)) || s.Bytes > uint64(len(arena))-s.Offset || s.Bytes < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&arena[s.Offset])), s.Bytes/size)
}

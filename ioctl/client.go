package ioctl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ControlPath is the file of a mount that takes ioctls, relative to its root.
const ControlPath = ".tuttifs/control"

// ErrNotMount is what paths outside any tuttifs mount get.
var ErrNotMount = errors.New("ioctl: not inside a tuttifs mount")

// Client issues verbs on an open file of a mount. Its methods fill Header and may be called concurrently; each
// returns nil or an error that wraps an Errno.
//
// Interrupted calls are repeated: a FUSE request is interrupted only before the daemon has seen it or after it has
// answered, and verbs that lease or free name themselves by request or reserve id.
type Client struct{ f *os.File }

// NewClient uses an open file of a mount; Close closes it.
func NewClient(f *os.File) *Client { return &Client{f: f} }

// Open finds the mount that path lies in and opens its control file; ErrNotMount if there is none. A read-only client
// can look, not change.
func Open(path string, readOnly bool) (*Client, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("ioctl: %s: %w", path, err)
	}
	mode := unix.O_RDWR
	if readOnly {
		mode = unix.O_RDONLY
	}
	for dir := abs; ; dir = filepath.Dir(dir) {
		name := filepath.Join(dir, ControlPath)
		// Not os.OpenFile: the runtime would put the descriptor into its poller, which asks the mount about it.
		fd, err := openRetry(name, mode|unix.O_CLOEXEC)
		if err == nil {
			return check(&Client{f: os.NewFile(uintptr(fd), name)}, path)
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
			return nil, fmt.Errorf("ioctl: open %s: %w", name, err)
		}
		if dir == filepath.Dir(dir) {
			return nil, fmt.Errorf("%w: %s", ErrNotMount, path)
		}
	}
}

func openRetry(name string, flags int) (fd int, err error) {
	for {
		fd, err = unix.Open(name, flags, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// check asks for the version before anything else is tried.
func check(c *Client, path string) (*Client, error) {
	var h Hello
	err := c.Hello(&h)
	if err == nil {
		return c, nil
	}
	_ = c.Close()
	if errors.Is(err, ENOTTY) {
		return nil, fmt.Errorf("%w: %s", ErrNotMount, path)
	}
	return nil, err
}

// Close closes the file, which ends the membership made on it. With a daemon that is gone it had ended before: that is
// told by every verb, and no fault of closing.
func (c *Client) Close() error {
	if err := c.f.Close(); !errors.Is(err, unix.ENOTCONN) {
		return err
	}
	return nil
}

// File is the open file.
func (c *Client) File() *os.File { return c.f }

// Do issues one verb: a is one of this package's verb structs. flags are its Header.Flags.
func do[T any](c *Client, cmd uint32, name string, h *Header, flags uint16, a *T) error {
	*h = Header{Size: uint32(unsafe.Sizeof(*a)), Version: Version, Flags: flags}
	raw, err := c.f.SyscallConn()
	if err != nil {
		return fmt.Errorf("ioctl: %s: %w", name, err)
	}
	var errno Errno
	if err := raw.Control(func(fd uintptr) { errno = ioctlRetry(fd, cmd, unsafe.Pointer(a)) }); err != nil {
		return fmt.Errorf("ioctl: %s: %w", name, err)
	}
	runtime.KeepAlive(a)
	if errno != 0 {
		return fmt.Errorf("ioctl: %s: %w", name, errno)
	}
	return nil
}

func ioctlRetry(fd uintptr, cmd uint32, a unsafe.Pointer) Errno {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(cmd), uintptr(a))
		if errno != unix.EINTR {
			return errno
		}
	}
}

func (c *Client) Hello(a *Hello) error   { return do(c, CmdHello, "hello", &a.Header, 0, a) }
func (c *Client) Drives(a *Drives) error { return do(c, CmdDrives, "drives", &a.Header, 0, a) }
func (c *Client) SessionCreate(a *Session) error {
	return do(c, CmdSessionCreate, "session create", &a.Header, 0, a)
}
func (c *Client) SessionJoin(a *Session) error {
	return do(c, CmdSessionJoin, "session join", &a.Header, 0, a)
}
func (c *Client) Arena(a *Arena) error       { return do(c, CmdArena, "arena", &a.Header, 0, a) }
func (c *Client) PoolOpen(a *PoolOpen) error { return do(c, CmdPoolOpen, "pool open", &a.Header, 0, a) }

// PoolInfo selects by flags: 0, PoolByName or PoolByIndex.
func (c *Client) PoolInfo(a *PoolInfo, flags uint16) error {
	return do(c, CmdPoolInfo, "pool info", &a.Header, flags, a)
}
func (c *Client) Layout(a *Layout) error   { return do(c, CmdLayout, "layout", &a.Header, 0, a) }
func (c *Client) Rows(a *Rows) error       { return do(c, CmdRows, "rows", &a.Header, 0, a) }
func (c *Client) MapAck(a *MapAck) error   { return do(c, CmdMapAck, "map ack", &a.Header, 0, a) }
func (c *Client) Peek(a *Peek) error       { return do(c, CmdPeek, "peek", &a.Header, 0, a) }
func (c *Client) Pin(a *Pin) error         { return do(c, CmdPin, "pin", &a.Header, 0, a) }
func (c *Client) Release(a *Release) error { return do(c, CmdRelease, "release", &a.Header, 0, a) }

// Reserve takes flags 0 or ReservePartial.
func (c *Client) Reserve(a *Reserve, flags uint16) error {
	return do(c, CmdReserve, "reserve", &a.Header, flags, a)
}
func (c *Client) Commit(a *Commit) error { return do(c, CmdCommit, "commit", &a.Header, 0, a) }
func (c *Client) Abort(a *Abort) error   { return do(c, CmdAbort, "abort", &a.Header, 0, a) }
func (c *Client) ReportBad(a *ReportBad) error {
	return do(c, CmdReportBad, "report bad", &a.Header, 0, a)
}

// Evict takes one of EvictCount, EvictKeys, EvictPrefix.
func (c *Client) Evict(a *Evict, flags uint16) error {
	return do(c, CmdEvict, "evict", &a.Header, flags, a)
}
func (c *Client) Unlink(a *Unlink) error   { return do(c, CmdUnlink, "unlink", &a.Header, 0, a) }
func (c *Client) Extents(a *Extents) error { return do(c, CmdExtents, "extents", &a.Header, 0, a) }
func (c *Client) Stats(a *Stats) error     { return do(c, CmdStats, "stats", &a.Header, 0, a) }
func (c *Client) Events(a *Events) error   { return do(c, CmdEvents, "events", &a.Header, 0, a) }
func (c *Client) Ticket(a *Ticket) error   { return do(c, CmdTicket, "ticket", &a.Header, 0, a) }
func (c *Client) Changes(a *Changes) error { return do(c, CmdChanges, "changes", &a.Header, 0, a) }
func (c *Client) Present(a *Present) error { return do(c, CmdPresent, "present", &a.Header, 0, a) }

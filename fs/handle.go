package fs

import (
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// handle is one open file or directory of the mount; what it is of depends on which of the pointers is set.
type handle struct {
	node     nodeID
	writable bool // opened for writing

	file   *openFile // a GPU file being read
	upload *upload   // a file being copied in
	text   []byte    // identity.json and the files of /.tuttifs, as they were at open
	dir    *openDir

	control controlHandle
}

// handleTable gives open files their numbers. A number is never used twice.
type handleTable struct {
	last atomic.Uint64
	m    sync.Map // uint64 -> *handle
}

func (t *handleTable) add(h *handle) uint64 {
	fh := t.last.Add(1)
	t.m.Store(fh, h)
	return fh
}

func (t *handleTable) get(fh uint64) *handle {
	if v, ok := t.m.Load(fh); ok {
		return v.(*handle)
	}
	return nil
}

func (t *handleTable) remove(fh uint64) *handle {
	if v, ok := t.m.LoadAndDelete(fh); ok {
		return v.(*handle)
	}
	return nil
}

// controlHandle is the ioctl side of an open file: made at its first ioctl, because almost no open file sees one.
type controlHandle struct {
	mu     sync.Mutex
	opened bool
	number uint64
}

func (h *handle) controlNumber(c Ioctler, in *fuse.IoctlIn) uint64 {
	h.control.mu.Lock()
	defer h.control.mu.Unlock()
	if !h.control.opened {
		h.control.number = c.Open(in.Pid, in.Uid, in.Gid, h.writable)
		h.control.opened = true
	}
	return h.control.number
}

// closeControl tells the ioctl side that the last descriptor is gone.
func (h *handle) closeControl(c Ioctler) {
	h.control.mu.Lock()
	defer h.control.mu.Unlock()
	if h.control.opened {
		h.control.opened = false
		c.Close(h.control.number)
	}
}

// Ioctl hands a request to the dispatcher. The reply buffer is a recycled one: whatever the dispatcher leaves alone
// must not be bytes of somebody else's request.
func (t *tree) Ioctl(
	_ <-chan struct{}, in *fuse.IoctlIn, inbuf []byte, out *fuse.IoctlOut, outbuf []byte,
) fuse.Status {
	clear(outbuf)
	h := t.handles.get(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	if t.o.Control == nil {
		return eNOTTY
	}
	// A negative result becomes the caller's errno and still carries the reply; an errno here would drop it.
	out.Result = -t.o.Control.Ioctl(h.controlNumber(t.o.Control, in), in.Pid, in.Cmd, in.Arg, inbuf, outbuf)
	return fuse.OK
}

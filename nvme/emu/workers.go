package emu

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/lifetime"
	"tuttifs/nvme"
)

const (
	// driveWorkersMax is how many commands of one poller for one drive block in system calls at a time.
	driveWorkersMax = 16
	// workersMax is how many of one poller do for all drives: a drive that does not answer leaves some to the others.
	workersMax = driveWorkersMax + 4
)

// iovMax is the kernel's limit of segments of one system call (UIO_MAXIOV).
const iovMax = 1024

// workers serve what may block: everything that is not a plain read or write, whatever direct I/O does not take as it
// is, and all of it where io_uring is not used. They start when there is work and end with stop.
type workers struct {
	mu      sync.Mutex
	wake    sync.Cond
	drives  []*driveWork
	turn    int // of drives: where the search for work begins
	idle    int
	running int
	closed  bool
	all     sync.WaitGroup
	share   *Share

	done  atomic.Pointer[command] // finished, newest first; the poller takes the whole list
	event *uint32                 // wakes the poller from its nap
}

// driveWork is what waits for one drive.
type driveWork struct {
	controller  *Controller
	first, last *command // oldest first
	queued      int
	busy        int // commands in system calls
}

// of returns what waits for a command's drive.
func (w *workers) of(c *command) *driveWork {
	for _, d := range w.drives {
		if d.controller == c.queue.controller {
			return d
		}
	}
	d := &driveWork{controller: c.queue.controller}
	w.drives = append(w.drives, d)
	return d
}

// ready counts the commands that a worker could begin.
func (w *workers) ready() (n int) {
	for _, d := range w.drives {
		n += min(d.queued, driveWorkersMax-d.busy)
	}
	return n
}

// take removes the next command that can begin, drive by drive, or returns nil.
func (w *workers) take() (*command, *driveWork) {
	for i := range w.drives {
		d := w.drives[(w.turn+i)%len(w.drives)]
		c := d.first
		if c == nil || d.busy == driveWorkersMax {
			continue
		}
		w.turn = (w.turn + i + 1) % len(w.drives)
		if d.first = c.next; d.first == nil {
			d.last = nil
		}
		d.queued--
		d.busy++
		return c, d
	}
	return nil, nil
}

func newWorkers(event *uint32, share *Share) *workers {
	w := &workers{event: event, share: share}
	w.wake.L = &w.mu
	return w
}

// submit hands over a command; it never blocks on I/O.
func (w *workers) submit(c *command) {
	c.next = nil
	w.mu.Lock()
	d := w.of(c)
	if d.last == nil {
		d.first = c
	} else {
		d.last.next = c
	}
	d.last = c
	d.queued++
	switch {
	case w.idle >= w.ready():
		w.wake.Signal()
	case w.running < workersMax:
		w.running++
		w.all.Add(1)
		go w.run()
	}
	w.mu.Unlock()
}

func (w *workers) run() {
	defer w.all.Done()
	var bounce []byte
	defer func() {
		if bounce != nil {
			drive.FreeBuffer(bounce)
		}
	}()
	for {
		w.mu.Lock()
		c, d := w.take()
		for c == nil && !w.closed {
			w.idle++
			w.wake.Wait()
			w.idle--
			c, d = w.take()
		}
		if c == nil { // what may still wait for a busy drive is for those who serve that
			w.running--
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()

		place := w.share.enter()
		c.status = c.serveBlocking(&bounce)
		place.leave()
		w.mu.Lock()
		d.busy--
		w.mu.Unlock()
		for {
			c.next = w.done.Load()
			if w.done.CompareAndSwap(c.next, c) {
				break
			}
		}
		nvme.Wake(w.event)
	}
}

// stop ends the workers once their queue is empty.
func (w *workers) stop() {
	w.mu.Lock()
	w.closed = true
	w.wake.Broadcast()
	w.mu.Unlock()
	w.all.Wait()
}

// serveBlocking does a command by blocking calls on the worker's thread.
func (c *command) serveBlocking(bounce *[]byte) nvme.Status {
	ct := c.queue.controller
	var err error
	switch c.kind {
	case doFlush:
		return c.statusOf(ct.drive.Flush())
	case doZeroes, doDiscard:
		err = c.serveRanges()
	default:
		err = c.serveTransfer(bounce)
		if c.fua && ct.fd >= 0 && !c.bounced() {
			return c.statusOf(err) // it was written with RWF_DSYNC
		}
	}
	if err == nil && c.fua {
		err = ct.drive.Flush()
	}
	return c.statusOf(err)
}

func (c *command) serveRanges() error {
	d := c.queue.controller.drive
	for _, r := range c.ranges {
		var err error
		switch {
		case c.kind == doZeroes:
			err = d.WriteZeroes(r.off, r.n)
		case (r.off|r.n)%PageBytes == 0:
			// Deallocation is advice: a drive that cannot do it has done it.
			if err = d.Discard(r.off, r.n); errors.Is(err, drive.ErrNotSupported) {
				err = nil
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// bounced says whether the transfer goes through a worker's own aligned memory.
func (c *command) bounced() bool {
	ct := c.queue.controller
	return c.refused || c.data.bucket || ct.fd < 0 || !c.data.aligned(ct.memAlign)
}

// refusedAsIs says whether the kernel refused the transfer's form, before anything moved: direct I/O that wants more
// alignment than the drive's LBA, or a filesystem without synchronous writes. The drive's own calls do without.
func (c *command) refusedAsIs(err error) bool {
	if c.refused || c.progress > 0 || !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EOPNOTSUPP) {
		return false
	}
	c.refused = true
	return true
}

func (c *command) serveTransfer(bounce *[]byte) error {
	ct := c.queue.controller
	if !c.bounced() {
		if err := c.vectored(ct.fd); err == nil || !c.refusedAsIs(err) {
			return err
		}
	}
	if len(c.data.list) == 1 && !c.data.bucket && c.data.aligned(ct.memAlign) {
		return c.plain(c.data.bytesAt(0))
	}
	if *bounce == nil {
		*bounce = drive.AlignedBuffer(int(ct.dataMax))
	}
	b := (*bounce)[:c.n]
	if c.kind == doWrite {
		c.gather(b)
		return c.plain(b)
	}
	if err := c.plain(b); err != nil {
		return err
	}
	c.scatter(b)
	return nil
}

func (c *command) plain(b []byte) error {
	if c.kind == doWrite {
		return drive.WriteFor(c.queue.controller.drive, c.life(), b, c.off)
	}
	return c.queue.controller.drive.ReadAt(b, c.off)
}

// life is what the authority expects of what is written.
func (c *command) life() lifetime.Class {
	if len(c.grants) == 0 {
		return lifetime.Normal
	}
	return c.grants[0].Life
}

func (c *command) gather(b []byte) {
	for i := range c.data.list {
		b = b[copy(b, c.data.bytesAt(i)):]
	}
}

func (c *command) scatter(b []byte) {
	for i := range c.data.list {
		if c.data.list[i].Base != nil {
			copy(c.data.bytesAt(i), b)
		}
		b = b[c.data.list[i].Len:]
	}
}

// errShort: the drive ended before the command did.
var errShort = errors.New("emu: transfer ended early")

// vectored moves the data by preadv2 or pwritev2, straight from or to the executor's memory.
func (c *command) vectored(fd int) error {
	call, flags := uintptr(unix.SYS_PREADV2), uintptr(0)
	if c.kind == doWrite {
		call = unix.SYS_PWRITEV2
		if c.fua {
			flags = unix.RWF_DSYNC
		}
	}
	for c.progress < c.n {
		iov := c.data.list[c.first:]
		n, _, errno := syscall.Syscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))),
			uintptr(min(len(iov), iovMax)), uintptr(c.off)+uintptr(c.progress), 0, flags)
		switch {
		case errno == syscall.EINTR || errno == syscall.EAGAIN:
			continue
		case errno != 0:
			return errno
		case n == 0:
			return errShort
		}
		c.advance(uint32(n))
	}
	return nil
}

// advance steps over n transferred bytes. The list is the command's own, so that it may be consumed.
func (c *command) advance(n uint32) {
	c.progress += n
	for n > 0 && c.first < len(c.data.list) {
		v := &c.data.list[c.first]
		k := uint32(min(v.Len, uint64(n)))
		v.Len -= uint64(k)
		n -= k
		if v.Len == 0 {
			c.first++
			continue
		}
		v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), k))
	}
}

// statusOf names what went wrong on the drive.
func (c *command) statusOf(err error) nvme.Status {
	switch {
	case err == nil:
		return nvme.Success
	case errors.Is(err, drive.ErrReadOnly), errors.Is(err, syscall.EBADF), errors.Is(err, syscall.EROFS),
		errors.Is(err, syscall.EPERM):
		return nvme.WriteProtected | dnr
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return nvme.CapacityExceeded | dnr
	case errors.Is(err, drive.ErrRange):
		return nvme.LBAOutOfRange | dnr
	case c.kind == doRead:
		return nvme.UnrecoveredRead
	case errors.Is(err, drive.ErrNotSupported):
		return nvme.InvalidOpcode | dnr
	}
	return nvme.WriteFault
}

package emu

import (
	"encoding/binary"
	"runtime/debug"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// Inline is the way to a drive whose bytes can be addressed: the poller copies.
const Inline Backend = "memory"

// inline says whether the poller serves the command itself: transfers of such drives, and what asks the drive for
// nothing. Ranges
// go to workers even there, since they may be as long as the namespace.
func (c *command) inline() bool {
	if c.kind == doZeroes || c.kind == doDiscard {
		return len(c.ranges) == 0
	}
	return c.queue.backend == Inline || c.kind == doManage
}

// serveMemory moves a read or write between the drive's bytes and the executor; no flush has anything to do there. It
// is false where the bytes cannot be addressed: a file was made shorter, or its filesystem is full. Nothing is decided
// then: the drive's own calls do the transfer once more, and name what is wrong.
func (c *command) serveMemory() bool {
	if c.kind != doRead && c.kind != doWrite {
		return true
	}
	ct := c.queue.controller
	if c.kind == doWrite && !ct.written.all(c.off, int64(c.n)) {
		c.status = c.statusOf(c.writeFirst())
		return true
	}
	switch fault := c.moveMemory(); {
	case fault == nil:
	case within(fault, ct.bytes):
		return false
	default:
		c.status = nvme.DataTransferError // the executor's memory
	}
	return true
}

// writeFirst writes pages of a file that were not written before. A system call fills a new page, where a fault would
// clear it first, and one call maps them all, where there would be a fault for each: together that is a third less.
func (c *command) writeFirst() error {
	ct := c.queue.controller
	if err := c.vectored(ct.fd); err != nil {
		return err
	}
	end := c.off + int64(c.n)
	// Advice: without it (before Linux 5.14) faults map the pages.
	_ = unix.Madvise(ct.bytes[c.off&^int64(unix.Getpagesize()-1):end], unix.MADV_POPULATE_READ)
	ct.written.add(c.off, int64(c.n))
	return nil
}

// warmBytes is what Warm maps in one call: as long as others wait who map or unmap.
const warmBytes = 4 << 20

// Warm maps the pages that a mapped file has, until stop is closed. Without it the first transfers do, at a third more
// CPU time for reads, and several times as much for writes. Holes stay holes.
func (c *Controller) Warm(stop <-chan struct{}) {
	if c.written == nil {
		return
	}
	at, end, ok := drive.NextData(c.drive, 0)
	for ok {
		select {
		case <-stop:
			return
		default:
		}
		n := min(end-at, warmBytes)
		if unix.Madvise(c.bytes[at:at+n], unix.MADV_POPULATE_READ) != nil {
			return // faults do it
		}
		c.written.add(at, n)
		if at += n; at == end {
			at, end, ok = drive.NextData(c.drive, at)
		}
	}
}

// addressError is what a fault panics with.
type addressError interface {
	error
	Addr() uintptr
}

// within says whether the fault was in b.
func within(fault addressError, b []byte) bool {
	return fault.Addr()-uintptr(unsafe.Pointer(unsafe.SliceData(b))) < uintptr(len(b))
}

// moveMemory copies. The error is the fault of a page that is not to be had (SIGBUS), as mappings of files have them.
func (c *command) moveMemory() (fault addressError) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // otherwise such a fault ends the process
	defer func() {
		if r := recover(); r != nil {
			at, ok := r.(addressError)
			if !ok {
				panic(r)
			}
			fault = at
		}
	}()
	store := c.queue.controller.bytes[c.off : c.off+int64(c.n)]
	for i := range c.data.list {
		n := int(c.data.list[i].Len)
		if c.data.list[i].Base != nil {
			if c.kind == doRead {
				copy(c.data.bytesAt(i), store[:n])
			} else {
				stream(store[:n], c.data.bytesAt(i))
			}
		}
		store = store[n:]
	}
	return nil
}

// pages is a set of a file's pages, a bit each, that pollers share. A nil set is of a drive without a file, and holds
// all.
type pages []uint64

// pageShift is of the smallest page there is.
const pageShift = 12

func newPages(bytes int) pages { return make(pages, (bytes>>pageShift+63)/64) }

// all says whether the set holds the pages of [off, off+n).
func (p pages) all(off, n int64) bool {
	if p == nil {
		return true
	}
	for i := off >> pageShift; i <= (off+n-1)>>pageShift; i++ {
		if atomic.LoadUint64(&p[i/64])>>(i%64)&1 == 0 {
			return false
		}
	}
	return true
}

func (p pages) add(off, n int64) {
	for i := off >> pageShift; i <= (off+n-1)>>pageShift; i++ {
		atomic.OrUint64(&p[i/64], 1<<(i%64))
	}
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

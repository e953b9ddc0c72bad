package main

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/extentmap/check"
)

// fsckProgress tells how far a check is, as fsck(8) wants it with -C: a bar for descriptor 0, else lines on the
// descriptor.
type fsckProgress struct {
	e    *env
	draw bool
	bar  *progress
	pass check.Pass
	fd   int // for lines; 0 for none
	next time.Time
}

// newFsckProgress returns one that draws on a terminal if fd is negative and draw is set.
func newFsckProgress(e *env, fd int, draw bool) (*fsckProgress, error) {
	p := &fsckProgress{e: e, draw: draw && fd < 0}
	switch {
	case fd == 0:
		p.draw = true
	case fd > 0:
		// Descriptors that were handed to this process survive exec; those that do not are its own.
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err == nil && flags&unix.FD_CLOEXEC != 0 {
			err = unix.EBADF
		}
		if err != nil {
			return nil, usagef("-C %d: %v", fd, err)
		}
		p.fd = fd
	}
	return p, nil
}

// set is check.Options.Progress. The start and the end of a pass are always told.
func (p *fsckProgress) set(pass check.Pass, done, total uint64) {
	switch {
	case p.draw:
		if pass != p.pass {
			p.finish()
			p.pass, p.bar = pass, newProgress(p.e, fmt.Sprintf("pass %d: %v", pass, pass), total)
		}
		p.bar.total = total
		p.bar.set(done, "")
	case p.fd != 0:
		now := time.Now()
		if now.Before(p.next) && done != 0 && done != total {
			return
		}
		p.next = now.Add(progressInterval)
		// An os.File would close the descriptor when it is collected, and that may be standard output.
		if _, err := unix.Write(p.fd, fmt.Appendf(nil, "%d %d %d %v\n", pass, done, total, pass)); err != nil {
			p.fd = 0 // nobody listens any more
		}
	}
}

func (p *fsckProgress) finish() {
	if p.bar != nil {
		p.bar.finish()
	}
}

package daemon

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// process watches one process until it is gone. A forked child does not keep it alive, unlike sockets and open files.
type process struct {
	pid  uint32   // of the process, not of the thread that called
	file *os.File // pidfd
	once sync.Once
}

// watchProcess begins to watch the process that thread tid belongs to. A tid of 0 is a process in a pid namespace
// that the mount does not see: there is nothing to watch, and nil is returned.
func watchProcess(tid uint32) (*process, error) {
	if tid == 0 {
		return nil, nil
	}
	pid := processOf(tid)
	fd, err := unix.PidfdOpen(int(pid), unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("daemon: watch process %d: %w", pid, err)
	}
	// The descriptor does not block, so the runtime's poller waits for it and no thread is spent on a process.
	return &process{pid: pid, file: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// processOf is the thread group of a thread: FUSE names the calling thread, and a pidfd wants the process.
func processOf(tid uint32) uint32 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return tid
	}
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte("Tgid:")); ok {
			if n, err := strconv.ParseUint(string(bytes.TrimSpace(rest)), 10, 32); err == nil {
				return uint32(n)
			}
		}
	}
	return tid
}

// wait returns true when the process is gone, false after close.
func (p *process) wait() bool {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	err = raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n == 1
		return gone
	})
	return err == nil && gone
}

// close ends a wait.
func (p *process) close() {
	if p != nil {
		p.once.Do(func() { _ = p.file.Close() })
	}
}

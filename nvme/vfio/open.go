package vfio

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"tuttifs/drive"
)

// driveTimeout is of a drive's commands: less than what a volume waits before it gives a drive up, so that there is
// time to end them and to try again.
const driveTimeout = 10 * time.Second

// shared is a controller that drives of this process are open on. The kernel lets a device be opened once.
type shared struct {
	address string
	c       *Controller
	users   map[uint32]*lockState // of its namespaces
}

// lockState is how a namespace is locked among the drives of this process, as flock does it for files.
type lockState struct {
	readers int
	writer  bool
	others  int // without a lock
}

func (l *lockState) total() int {
	n := l.readers + l.others
	if l.writer {
		n++
	}
	return n
}

// SplitName takes an address apart: 0000:3b:00.0 is the first namespace of a controller, 0000:3b:00.0/2 number 2.
func SplitName(name string) (address string, nsid uint32, err error) {
	address, number, given := strings.Cut(name, "/")
	if !drive.IsAddress(name) {
		return "", 0, fmt.Errorf("vfio: %q is no address of a namespace, such as 0000:3b:00.0/1: %w", name, ErrUnsuitable)
	}
	if given {
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil || n == 0 || n >= 0xfffffffe {
			return "", 0, fmt.Errorf("vfio: %q: there is no namespace of that number: %w", name, ErrUnsuitable)
		}
		nsid = uint32(n)
	}
	return address, nsid, nil
}

// OpenDrive opens a namespace by its address. Drives on one controller share it.
func (m *Machine) OpenDrive(name string, o drive.Options) (drive.Drive, error) {
	address, nsid, err := SplitName(name)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.share(address)
	if err != nil {
		return nil, err
	}
	d, err := m.openOn(s, nsid, o)
	if err != nil {
		return nil, errors.Join(err, m.unshare(s))
	}
	d.name = name
	return d, nil
}

func (m *Machine) share(address string) (*shared, error) {
	if s := m.open[address]; s != nil {
		if s.c.Err() == nil {
			return s, nil
		}
		// It was taken out, or is dead. Its drives stay as they are, and what is at the address now is another one.
		if err := s.c.Close(); err != nil && !errors.Is(err, ErrClosed) {
			return nil, err
		}
		delete(m.open, address)
	}
	t, err := m.transport(address)
	if err != nil {
		return nil, err
	}
	c, err := Open(t, Options{CommandTimeout: driveTimeout})
	if err != nil {
		return nil, err
	}
	s := &shared{address: address, c: c, users: map[uint32]*lockState{}}
	m.open[address] = s
	go func() {
		select {
		case <-c.Requested():
			// The system waits until the controller is let go of. Its drives fail from now on, as lost ones do.
			_ = c.Close()
		case <-c.Ended():
		}
	}()
	return s, nil
}

// unshare closes a controller that no drive uses any more.
func (m *Machine) unshare(s *shared) error {
	for _, l := range s.users {
		if l.total() > 0 {
			return nil
		}
	}
	if m.open[s.address] == s {
		delete(m.open, s.address)
	}
	if err := s.c.Close(); err != nil && !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}

// openOn opens a namespace and locks it among this process's drives.
func (m *Machine) openOn(s *shared, nsid uint32, o drive.Options) (*Drive, error) {
	if nsid == 0 {
		ids, err := s.c.Namespaces()
		if err != nil {
			return nil, err
		}
		if len(ids) == 0 {
			return nil, s.c.errorf("it has no namespace: %w", ErrUnsuitable)
		}
		nsid = ids[0]
	}
	l := s.users[nsid]
	if l == nil {
		l = &lockState{}
		s.users[nsid] = l
	}
	count := &l.others
	switch {
	case o.NoLock:
	case l.writer || !o.ReadOnly && l.readers > 0:
		return nil, s.c.errorf("namespace %d is open already: %w", nsid, drive.ErrBusy)
	case o.ReadOnly:
		count = &l.readers
	default:
		count = nil
	}
	d, err := NewDrive(s.c, nsid, o)
	if err != nil {
		return nil, err
	}
	if count != nil {
		*count++
	} else {
		l.writer = true
	}
	d.end = func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if count != nil {
			*count--
		} else {
			l.writer = false
		}
		return m.unshare(s)
	}
	return d, nil
}

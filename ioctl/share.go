package ioctl

import (
	"sync/atomic"
	"unsafe"
)

// Share is the engine's part of the d-th drive's DriveShare; nil where its queues are the daemon's.
func (a *Attachment) Share(d int) *DriveShare {
	if a.Reply.Mode != ModeReal || a.DriveBells(d).Bytes == 0 {
		return nil
	}
	return (*DriveShare)(unsafe.Pointer(&a.Queues[a.Reply.ShareOffset(d)]))
}

// direction is an index of DriveShare's arrays.
func direction(write bool) int {
	if write {
		return 1
	}
	return 0
}

// Phased says whether the daemon ever takes a grant back.
func (s *DriveShare) Phased() bool {
	return atomic.LoadUint32(&s.Grant[0]) != GrantAlways || atomic.LoadUint32(&s.Grant[1]) != GrantAlways
}

// Begin begins a chunk, if it may; End ends it.
func (s *DriveShare) Begin(write bool, bytes uint64) bool {
	d := direction(write)
	grant := atomic.LoadUint32(&s.Grant[d])
	if grant == 0 {
		return false
	}
	if write && !s.fits(bytes, uint64(grant)) {
		return false
	}
	atomic.AddUint32(&s.Flight[d], 1)
	if atomic.LoadUint32(&s.Grant[d]) == 0 {
		s.lower(write, bytes)
		return false
	}
	return true
}

// fits adds the bytes of a write to those in flight, unless that exceeds the grant.
func (s *DriveShare) fits(bytes, grant uint64) bool {
	if n := atomic.AddUint64(&s.WriteBytes, bytes); n > bytes && n > grant {
		atomic.AddUint64(&s.WriteBytes, -bytes)
		return false
	}
	return true
}

func (s *DriveShare) lower(write bool, bytes uint64) {
	if write {
		atomic.AddUint64(&s.WriteBytes, -bytes)
	}
	atomic.AddUint32(&s.Flight[direction(write)], ^uint32(0))
}

// Want counts chunks that wait to begin up or down.
func (s *DriveShare) Want(write bool, n int) {
	atomic.AddUint32(&s.Wanted[direction(write)], uint32(n))
}

// End ends a chunk of which so many commands have completed: none of one that was cut off.
func (s *DriveShare) End(write bool, bytes, commands uint64) {
	d := direction(write)
	if commands > 0 {
		atomic.AddUint64(&s.Commands[d], commands)
		atomic.AddUint64(&s.Bytes[d], bytes)
	}
	s.lower(write, bytes)
}

// Fail counts commands that completed with a bad status.
func (s *DriveShare) Fail(write bool, commands uint64) {
	atomic.AddUint64(&s.Failed[direction(write)], commands)
}

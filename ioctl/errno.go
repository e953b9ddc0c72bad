package ioctl

import "golang.org/x/sys/unix"

// Errno is an errno of the ABI; it is an error.
type Errno = unix.Errno

// The errnos that verbs answer; docs/abi.md says when.
const (
	EPERM       = unix.EPERM       // not leased to this session, or being committed; another user's session
	ENOENT      = unix.ENOENT      // no such pool, family, slot, request, reservation, ticket or token
	EIO         = unix.EIO         // a drive failed
	ENXIO       = unix.ENXIO       // no arena: the process has not attached
	EBADF       = unix.EBADF       // the handle is read-only
	EAGAIN      = unix.EAGAIN      // space is being freed, or too many tickets are outstanding: try again
	EFAULT      = unix.EFAULT      // a span outside the arena
	EBUSY       = unix.EBUSY       // this handle has a session already; this member is attached already
	EEXIST      = unix.EEXIST      // pool exists with another identity or geometry
	ENODEV      = unix.ENODEV      // a member drive is missing
	EINVAL      = unix.EINVAL      // wrong size, unknown flag, reserved field not zero, value out of range
	ENOTTY      = unix.ENOTTY      // unknown ioctl number
	ENOSPC      = unix.ENOSPC      // more than the pool can hold, or everything else is pinned or reserved
	EROFS       = unix.EROFS       // the volume is mounted read-only
	ENODATA     = unix.ENODATA     // commit, but not all objects were written
	EPROTO      = unix.EPROTO      // another ABI version
	EOVERFLOW   = unix.EOVERFLOW   // the output span is too small
	EBADMSG     = unix.EBADMSG     // identity is incomplete or not understood
	EINPROGRESS = unix.EINPROGRESS // another engine is storing one of these keys
	ENOTCONN    = unix.ENOTCONN    // this handle has no session
	ESTALE      = unix.ESTALE      // the session is gone
	EDQUOT      = unix.EDQUOT      // tenant is over its quota
	EMFILE      = unix.EMFILE      // too many sessions, members or pools
	EUCLEAN     = unix.EUCLEAN     // metadata is damaged
	ETIMEDOUT   = unix.ETIMEDOUT   // a lane could not be quiesced in time; it still may move bytes
	ENOMEM      = unix.ENOMEM      // no memory for arena, queues or DMA
)

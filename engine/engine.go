// Package engine is the engine's side in Go: a mount, its sessions and pools, and the way of KV bytes by gio.
// Metadata goes by ioctl, bytes by queue pairs in shared memory; neither passes through the other.
//
// A block's way: Pin gives slots and seeds, gio.Layers restores them layer by layer, Release ends the lease. A store
// is Reserve, gio.Layers, Commit. Everything is safe for concurrent use. Every wait is bounded by the session's
// deadline, and ends with an error when the daemon dies; a new Mount and Session then begin again.
package engine

import (
	"errors"
	"fmt"

	"tuttifs/ioctl"
)

// Key names a block's content.
type Key = [32]byte

var (
	// ErrNotMount: the path lies in no tuttifs mount.
	ErrNotMount = ioctl.ErrNotMount
	// ErrNoSpace: it is more than the pool can hold, or everything else is pinned or reserved; Reserve says which.
	// Store less at a time, or release something.
	ErrNoSpace = errors.New("engine: no space")
	// ErrAgain: space was still being freed, or too much was outstanding, when the deadline passed.
	ErrAgain = errors.New("engine: still busy after the deadline, try again later")
	// ErrPending: another engine is storing one of these keys; it will be there soon.
	ErrPending = errors.New("engine: another engine is storing this key")
	// ErrQuota: the tenant is over its quota.
	ErrQuota = errors.New("engine: tenant is over its quota")
	// ErrReadOnly: the volume is mounted read-only, or the control file could only be opened for reading.
	ErrReadOnly = errors.New("engine: mount is read-only")
	// ErrNotFound: no such pool, request, reservation, slot or session; leases also end by time-out.
	ErrNotFound = errors.New("engine: not found, or expired")
	// ErrLease: the slot or reservation is not this session's, is being committed, or the session is another user's.
	ErrLease = errors.New("engine: not leased to this session")
	// ErrExists: a pool of this name has another identity or geometry. Choose another name.
	ErrExists = errors.New("engine: pool exists with another identity or geometry")
	// ErrIdentity: the identity is incomplete, so blocks of it must not be persisted.
	ErrIdentity = errors.New("engine: identity is incomplete or not understood")
	// ErrIncomplete: commit, but not every object was written; what was not is aborted.
	ErrIncomplete = errors.New("engine: not all objects were written")
	// ErrGone: the daemon, or this session with it, is gone. Open the mount again.
	ErrGone = errors.New("engine: daemon or session is gone, open the mount again")
	// ErrInvalid: an argument that can never be right.
	ErrInvalid = errors.New("engine: invalid argument")
	// ErrDrive: a drive failed or is missing.
	ErrDrive = errors.New("engine: a drive failed or is missing")
)

// meaning is what the ABI's errnos say to an engine.
var meaning = map[ioctl.Errno]error{
	ioctl.ENOSPC: ErrNoSpace, ioctl.EAGAIN: ErrAgain, ioctl.EINPROGRESS: ErrPending, ioctl.EDQUOT: ErrQuota,
	ioctl.EROFS: ErrReadOnly, ioctl.EBADF: ErrReadOnly, ioctl.ENOENT: ErrNotFound, ioctl.EPERM: ErrLease,
	ioctl.EEXIST: ErrExists, ioctl.EBADMSG: ErrIdentity, ioctl.ENODATA: ErrIncomplete, ioctl.ESTALE: ErrGone,
	ioctl.ENOTCONN: ErrGone, ioctl.EINVAL: ErrInvalid, ioctl.EOVERFLOW: ErrInvalid, ioctl.EIO: ErrDrive,
	ioctl.ENODEV: ErrDrive,
}

// explain adds what an errno means to the error that carries it.
func explain(err error) error {
	var errno ioctl.Errno
	if err == nil || !errors.As(err, &errno) {
		return err
	}
	if m := meaning[errno]; m != nil && !errors.Is(err, m) { // it may have been explained already
		return fmt.Errorf("%w: %w", m, err)
	}
	return err
}

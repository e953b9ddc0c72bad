package fs

import (
	"errors"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
)

const (
	eEXIST  = fuse.Status(syscall.EEXIST)
	eSTALE  = fuse.Status(syscall.ESTALE)
	eNOTTY  = fuse.Status(syscall.ENOTTY)
	eFBIG   = fuse.Status(syscall.EFBIG)
	eNOSPC  = fuse.Status(syscall.ENOSPC)
	eDQUOT  = fuse.Status(syscall.EDQUOT)
	eNAME   = fuse.Status(syscall.ENAMETOOLONG)
	eNOTSUP = fuse.Status(syscall.EOPNOTSUPP)
)

// errnos is the table of docs/mount.md. The first match counts; what matches none is EIO.
var errnos = []struct {
	err    error
	status fuse.Status
}{
	{gpufile.ErrNotFound, fuse.ENOENT},
	{errExists, eEXIST},
	{gpufile.ErrPending, fuse.EBUSY},
	{errShared, fuse.EBUSY},
	{gpufile.ErrAgain, fuse.EAGAIN},
	{extentmap.ErrAgain, fuse.EAGAIN},
	{gpufile.ErrNoSpace, eNOSPC},
	{extentmap.ErrNoSpace, eNOSPC},
	{gpufile.ErrQuota, eDQUOT},
	{gpufile.ErrReadOnly, fuse.EROFS},
	{extentmap.ErrReadOnly, fuse.EROFS},
	{gpufile.ErrInvalid, fuse.EINVAL},
	{errNoPayload, eNOTSUP},
	{errShort, fuse.EIO},
	{errTooLong, eFBIG},
	{errSealed, fuse.EPERM},
	{errScattered, fuse.EINVAL},
	{errTooMany, fuse.EAGAIN},
	{errInterrupted, fuse.EINTR},
}

// status turns an error of the rooms below into the errno that callers of the mount see.
func status(err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.status
		}
	}
	return fuse.EIO
}

package drive

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ioError names the drive, the operation and the place of a failed transfer.
func ioError(name, op string, off, n int64, err error) error {
	return fmt.Errorf("drive %s: %s of %d bytes at offset %d: %w", name, op, n, off, err)
}

// closedError is the answer of every method after Close.
func closedError(name, op string) error {
	return fmt.Errorf("drive %s: %s: %w", name, op, os.ErrClosed)
}

// checkRange refuses what does not lie inside [0, size). The comparison cannot overflow.
func checkRange(name, op string, off, n, size int64) error {
	if off < 0 || n < 0 || off > size || n > size-off {
		return fmt.Errorf("drive %s: %s of %d bytes at offset %d of %d: %w", name, op, n, off, size, ErrRange)
	}
	return nil
}

// inward shrinks [off, off+n) to multiples of align, a power of two; start >= end when nothing is left.
func inward(off, n, align int64) (start, end int64) {
	return (off + align - 1) &^ (align - 1), (off + n) &^ (align - 1)
}

// unsupported says whether err means that the operation does not exist here, rather than that it failed.
func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSYS) ||
		errors.Is(err, unix.ENOTTY)
}

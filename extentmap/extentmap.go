// Package extentmap is the mounted volume: drives, labels, rows, record tables and journal. It is the only writer of
// metadata. docs/format.md describes what it writes, byte by byte, and the rules of mounting.
//
// # Order of durability
//
// A group commit flushes the drives that payloads were written to, writes the journal to its drives, flushes those,
// applies the changes to the record table in memory, and runs the callbacks. So a record is never in memory's table
// before it is durable, and a checkpoint never writes what the journal does not hold.
//
// A checkpoint writes dirty blocks of the first copy of the record tables, flushes, then those of the second, flushes,
// then the catalog into the area not in use, flushes, and last the superblock into the older of its two slots.
//
// Space that a row gives back is not used again before a later checkpoint is durable: until then the catalog on the
// drives still names the row.
//
// # Drives that fail
//
// A drive that fails to write metadata, or to flush, is lost: nothing is asked of it any more, and the rows on it are
// unavailable. Before anything is acknowledged without it, the labels of the others durably name a new epoch and who
// holds it, so a later mount knows that the lost drive is behind.
//
// # Locks
//
// In this order; once the volume is mounted none but the first three is held across I/O, and no verb takes those:
//
//	Volume.checkpointMu  one checkpoint at a time
//	Volume.journalMu     one batch at a time, or a change of the drives
//	Volume.labelMu       the labels, and who holds the epoch
//	Volume.applyMu       the record tables in memory, dirty bits, what the journal's head is
//	Volume.mu            structure: pools, rows, tenants, families, segments
//	Pool.mu              which slots are free
//	Volume.queueMu       transactions waiting for the committer
package extentmap

import (
	"errors"
	"fmt"
)

var (
	ErrMissing = errors.New("extentmap: a member drive is missing")
	ErrForeign = errors.New("extentmap: not a drive of this volume")
	// ErrOpen: the drive's file cannot be opened, whatever is on it.
	ErrOpen = errors.New("extentmap: cannot open a drive")
	// ErrIO: the drive is open, and cannot be read or written.
	ErrIO        = errors.New("extentmap: cannot read or write a drive")
	ErrDuplicate = errors.New("extentmap: two copies of one drive")
	ErrStale     = errors.New("extentmap: drive is older than the volume")
	// ErrDiverged: the drives went on apart from each other; one part must be forgotten.
	ErrDiverged    = errors.New("extentmap: the drives have diverged")
	ErrDraftFormat = errors.New("extentmap: made before the format was frozen")
	ErrNewerFormat = errors.New("extentmap: format not understood by this version")
	ErrBusy        = errors.New("extentmap: volume is in use")
	ErrCorrupt     = errors.New("extentmap: metadata is damaged")
	ErrReadOnly    = errors.New("extentmap: volume is mounted read-only")
	ErrNoSpace     = errors.New("extentmap: no space left")
	// ErrAgain: space is being freed but not durably yet, or the journal is full; try again.
	ErrAgain  = errors.New("extentmap: try again")
	ErrExists = errors.New("extentmap: exists with another identity or geometry")
	// ErrInvalid: an argument that no volume could accept.
	ErrInvalid = errors.New("extentmap: invalid argument")
	// ErrSignature: the drive holds something that Format does not overwrite unless forced.
	ErrSignature = errors.New("extentmap: drive is not empty")
	// ErrTooSmall: the drive has no room for metadata and data.
	ErrTooSmall = errors.New("extentmap: drive is too small")
	// ErrTruncated: the drive is smaller than its label says.
	ErrTruncated = errors.New("extentmap: drive is truncated")
	// ErrClosed: the volume was closed or abandoned.
	ErrClosed = errors.New("extentmap: volume is closed")
	// ErrFailed: the last copy of the metadata could not be written; nothing more is accepted until the volume is mounted
	// again.
	ErrFailed = errors.New("extentmap: volume stopped after a metadata write error")
)

// DriveError is a failure that concerns one drive. errors.Is finds Err and Cause in it.
type DriveError struct {
	Err    error // one of the package's sentinels
	Name   string
	Index  int // -1 if unknown
	UUID   [16]byte
	Advice string // what is wrong in particular, and what to do
	Cause  error
}

func (e *DriveError) Error() string {
	s := e.Err.Error() + ":"
	if e.Name != "" {
		s += " " + e.Name
	}
	if e.Index >= 0 {
		s += fmt.Sprintf(" (drive %d, UUID %s)", e.Index, FormatUUID(e.UUID))
	}
	if e.Advice != "" {
		s += ": " + e.Advice
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

func (e *DriveError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Err}
	}
	return []error{e.Err, e.Cause}
}

// FormatUUID writes a UUID in its usual form.
func FormatUUID(u [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

package extentmap

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// MaxDrives of a volume.
const MaxDrives = ondisk.MaxDrives

// DriveState is how a mounted volume uses a member drive.
type DriveState uint32

const (
	// DriveOnline is in use.
	DriveOnline DriveState = iota
	// DriveLost has failed, or was not there at the mount. Nothing is asked of it; the rows on it are unavailable.
	DriveLost
	// DriveLeaving is being forgotten: its rows are given up.
	DriveLeaving
)

func (s DriveState) String() string {
	switch s {
	case DriveOnline:
		return "online"
	case DriveLost:
		return "lost"
	case DriveLeaving:
		return "leaving"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// member is one drive of the mounted volume and what its segments are used for. Data rows take segments from the
// bottom, record tables from the top, so that long runs stay whole in between. Guarded by Volume.mu, but for what is
// atomic or does not change.
type member struct {
	v      *Volume
	dev    drive.Drive // nil: it was not there at the mount
	index  uint16
	uuid   [16]byte
	label  *ondisk.Label // as last written, or as it must be if it was not there; Volume.labelMu
	region ondisk.Region
	units  uint64
	shift  int  // log2 of the segment's units
	role   bool // holds journal, catalog and superblock; Volume.labelMu

	state atomic.Uint32
	held  atomic.Bool // given no rows: the engines that are attached do not know it
	cause error       // why it was lost
	// stale: it missed an epoch that was held without it. Its record tables are older than others', and its payload is
	// right, because the rows on it were out of use meanwhile. rank orders what such drives know: the epoch in which each
	// was last in use.
	stale bool
	rank  uint64

	// owner says for each segment whose entry it belongs to: row reference << ownerEntryBits | entry; 0 for none.
	owner  []atomic.Uint32
	used   []uint64 // bit per segment: row, record tables, or given back and not yet free
	free   uint32
	tables []*tableSegment // highest segment first

	readErrors, writeErrors, timeouts atomic.Uint64
	written                           atomic.Uint64 // bytes of metadata
	stuck                             atomic.Int64  // operations that were given up and have not returned
}

// tableSegment is a segment that holds record tables.
type tableSegment struct {
	number uint32
	used   []uint64 // bit per unit
	free   uint32
}

const ownerEntryBits = 6 // W is at most 64

// rankCurrent is the rank of drives that missed nothing.
const rankCurrent = ^uint64(0)

func newMember(v *Volume, d drive.Drive, l *ondisk.Label) *member {
	m := &member{
		v: v, dev: d, index: l.Index, uuid: l.Drive, label: l, region: l.Region, units: l.Units, rank: rankCurrent,
		shift: bits.TrailingZeros32(l.Region.SegmentUnits),
		owner: make([]atomic.Uint32, l.Region.Segments),
		used:  make([]uint64, (l.Region.Segments+63)/64),
		free:  l.Region.Segments,
	}
	if tail := l.Region.Segments % 64; tail != 0 {
		m.used[len(m.used)-1] = ^uint64(0) << tail
	}
	if d == nil {
		m.state.Store(uint32(DriveLost))
	}
	return m
}

func (m *member) is(s DriveState) bool { return m.state.Load() == uint32(s) }
func (m *member) lost() bool           { return m.is(DriveLost) }

// usable says whether new rows and record tables may lie on the drive.
func (m *member) usable() bool { return m.is(DriveOnline) && !m.held.Load() }

func (m *member) name() string {
	if m.dev == nil {
		return ""
	}
	return m.dev.Name()
}

var (
	errLost = errors.New("the drive is lost")
	// ErrTimeout: a drive did not answer in time.
	ErrTimeout = errors.New("extentmap: the drive does not answer")
)

func (m *member) readAt(p []byte, unit uint64) error {
	if m.lost() {
		return errLost
	}
	err := m.bounded(func() error { return m.dev.ReadAt(p, int64(unit)*ondisk.BlockBytes) })
	if err != nil {
		m.readErrors.Add(1)
	}
	return err
}

func (m *member) writeAt(p []byte, unit uint64) error {
	err := m.write("write", func() error { return m.dev.WriteAt(p, int64(unit)*ondisk.BlockBytes) })
	if err == nil {
		m.written.Add(uint64(len(p)))
	}
	return err
}

func (m *member) flush() error { return m.write("flush", func() error { return m.dev.Flush() }) }

func (m *member) write(what string, f func() error) error {
	if m.lost() {
		return errLost
	}
	if err := m.bounded(f); err != nil {
		m.writeErrors.Add(1)
		return fmt.Errorf("drive %d (%s): %s: %w", m.index, m.name(), what, err)
	}
	return nil
}

// bounded waits for an operation as long as a drive may take. One that is given up goes on by itself: its buffer
// belongs to it, see Volume.freeBuffer.
func (m *member) bounded(f func() error) error {
	patience := m.v.o.DriveTimeout
	if patience < 0 {
		return f()
	}
	done := make(chan error, 1)
	m.stuck.Add(1)
	go func() {
		err := f()
		m.stuck.Add(-1)
		done <- err
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		m.timeouts.Add(1)
		m.v.timeouts.Add(1)
		return fmt.Errorf("%w for %v", ErrTimeout, patience)
	}
}

// freeBuffer gives a buffer back that drives were given, unless an operation was given up since v.timeouts had the
// given value: it may still use the buffer.
func (v *Volume) freeBuffer(b []byte, timeouts uint64) {
	if v.timeouts.Load() == timeouts {
		drive.FreeBuffer(b)
	}
}

// member is the member of an index, or nil.
func (v *Volume) member(index uint16) *member {
	if index >= ondisk.MaxDrives {
		return nil
	}
	return v.byIndex[index].Load()
}

// usable lists the drives that new rows may use, by index. Volume.mu.
func (v *Volume) usable() []*member {
	var out []*member
	for _, m := range v.members {
		if m.usable() {
			out = append(out, m)
		}
	}
	return out
}

// metadataMembers are the drives that journal, catalog and superblock are written to.
func (v *Volume) metadataMembers() []*member {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.metadata
}

// eachMember runs f for all members at once and returns each one's error.
func eachMember(members []*member, f func(*member) error) []error {
	errs := make([]error, len(members))
	var wg sync.WaitGroup
	for i, m := range members {
		if i == len(members)-1 {
			errs[i] = f(m)
			break
		}
		wg.Go(func() { errs[i] = f(m) })
	}
	wg.Wait()
	return errs
}

// write runs f for drives that must do it. One that fails is lost; when write returns without error, the labels of the
// others say so durably, and what f wrote may be acknowledged.
func (v *Volume) write(members []*member, f func(*member) error) error {
	return v.settle(members, eachMember(members, f))
}

// settle is the second half of write.
func (v *Volume) settle(members []*member, errs []error) error {
	for i, err := range errs {
		if err == nil {
			continue
		}
		if err := v.lose(members[i], err); err != nil {
			return err
		}
	}
	// Somebody else may be naming a loss of one of these at this moment.
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	return v.err()
}

// setLost stops using a drive. Volume.labelMu.
func (v *Volume) setLost(m *member, cause error) {
	v.tablesMu.Lock()
	defer v.tablesMu.Unlock()
	v.mu.Lock()
	defer v.mu.Unlock()
	m.state.Store(uint32(DriveLost))
	m.cause, m.role = cause, false
	v.metadata = without(v.metadata, m)
	v.drivesChanged.Store(true)
	v.losses.Add(1)
	v.reviewRows(m.index)
}

func without(list []*member, m *member) []*member {
	var out []*member
	for _, x := range list {
		if x != m {
			out = append(out, x)
		}
	}
	return out
}

// lose takes a failing drive out of use. Before it returns nil, the labels of the drives that are left durably name a
// new epoch and who holds it: that drive does not. It fails, and the volume with it, when no copy of the metadata is
// left.
func (v *Volume) lose(m *member, cause error) error {
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	if err := v.err(); err != nil {
		return err
	}
	if m.lost() {
		return nil
	}
	if !v.readOnly && m.role && len(v.metadataMembers()) == 1 {
		err := fmt.Errorf("%w: %w", ErrFailed, cause)
		v.fail(err)
		return err
	}
	v.setLost(m, cause)
	if v.readOnly {
		return nil
	}
	if err := v.nextEpoch(); err != nil {
		v.fail(err)
		return err
	}
	v.kickCheckpoint() // another drive may take over a copy of the metadata
	return v.renewLabels(nil, func(*ondisk.Label) {})
}

// LoseDrive takes a drive out of use that others found failing.
func (v *Volume) LoseDrive(index uint16, cause error) error {
	m := v.member(index)
	if m == nil {
		return fmt.Errorf("%w: no drive %d", ErrInvalid, index)
	}
	return v.lose(m, cause)
}

// Probe asks a drive whose reads or writes failed whether it is there at all: if no copy of its label can be read, it
// is lost.
func (v *Volume) Probe(index uint16) error {
	m := v.member(index)
	if m == nil || m.lost() {
		return nil
	}
	var problem error
	for _, unit := range []uint64{0, m.units - 1} {
		b := drive.AlignedBuffer(ondisk.BlockBytes)
		err := m.readAt(b, unit)
		if err == nil {
			_, err = ondisk.DecodeLabel(b, unit)
		}
		if err == nil {
			return nil
		}
		problem = err
	}
	return v.lose(m, fmt.Errorf("its label cannot be read any more: %w", problem))
}

// CountError notes that a transfer of payload failed on a drive.
func (v *Volume) CountError(index uint16, write bool) {
	m := v.member(index)
	switch {
	case m == nil:
	case write:
		m.writeErrors.Add(1)
	default:
		m.readErrors.Add(1)
	}
}

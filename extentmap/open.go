package extentmap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// Options of Open.
type Options struct {
	ReadOnly bool
	// Degraded mounts without drives that are missing, if at least half are there, one with the newest metadata among
	// them.
	Degraded bool
	// DriveTimeout is how long a drive may take for one operation before it is given up: 30 s by default, negative for no
	// bound.
	DriveTimeout time.Duration
	// Open opens one path; tests put recording, faulty or memory drives here. nil means drive.Open.
	Open func(path string, o drive.Options) (drive.Drive, error)
	// Paths within the given drives' directories are searched for the other members unless NoScan.
	NoScan bool
	// Discard freed slots; nil means on for block devices, off for files.
	Discard *bool
	// CheckpointSeconds between checkpoints; 0 means 30. Journal pressure triggers them too.
	CheckpointSeconds int
	// Now is the clock; time.Now if nil.
	Now func() time.Time
	// Random is where nonces come from; crypto/rand if nil.
	Random io.Reader
}

func (o *Options) setDefaults() {
	if o.Open == nil {
		o.Open = drive.Open
	}
	if o.CheckpointSeconds <= 0 {
		o.CheckpointSeconds = checkpointSeconds
	}
	if o.DriveTimeout == 0 {
		o.DriveTimeout = driveTimeout
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Random == nil {
		o.Random = rand.Reader
	}
}

// driveTimeout is the default of Options.DriveTimeout: what the kernel itself gives an NVMe command.
const driveTimeout = 30 * time.Second

// Open mounts the volume whose members are found from any of the paths (devices or files; their directories are
// scanned).
func Open(paths []string, o Options) (*Volume, error) {
	o.setDefaults()
	if len(paths) == 0 {
		return nil, fmt.Errorf("%w: no drive given", ErrInvalid)
	}
	all := paths
	if !o.NoScan {
		var err error
		if all, err = Scan(paths); err != nil {
			return nil, err
		}
	}
	var drives []drive.Drive
	closeAll := func() {
		for _, d := range drives {
			_ = d.Close()
		}
	}
	for _, path := range all {
		d, err := o.Open(path, drive.Options{ReadOnly: o.ReadOnly})
		if err != nil {
			closeAll()
			return nil, openError(path, err)
		}
		drives = append(drives, d)
	}
	v, err := OpenDrives(drives, o)
	if err != nil {
		closeAll()
		return nil, err
	}
	v.ownDrives = true
	for _, d := range drives {
		if !slices.ContainsFunc(v.members, func(m *member) bool { return m.dev == d }) {
			_ = d.Close() // found beside the others, and none of them
		}
	}
	return v, nil
}

func openError(path string, err error) error {
	e := &DriveError{Err: ErrOpen, Name: path, Index: -1, Cause: err}
	switch {
	case errors.Is(err, drive.ErrBusy):
		e.Err, e.Cause = ErrBusy, nil
		e.Advice = "another process has it mounted, checks it or claims it; unmount it there first"
		if l := peekLabel(path); l != nil {
			e.Index, e.UUID = int(l.Index), l.Drive
		}
	case errors.Is(err, fs.ErrNotExist):
		e.Err, e.Cause, e.Advice = ErrMissing, nil, "no such file or device"
	}
	return e
}

// Scan returns the paths of all members of the volume that the given paths belong to: those first, then what their
// directories hold. It reads nothing but labels, and locks nothing.
func Scan(paths []string) ([]string, error) {
	given := map[fileID]bool{}
	var out []string
	var volume [16]byte
	for i, path := range paths {
		id, err := identify(path)
		if err != nil {
			return nil, openError(path, err)
		}
		if given[id] {
			continue // one drive under two names
		}
		given[id] = true
		out = append(out, path)
		if l := peekLabel(path); l != nil && i == 0 {
			volume = l.Volume
		}
	}
	dirs := map[string]bool{}
	for _, path := range paths {
		if drive.IsAddress(path) {
			continue // controllers are not searched: looking at one means to start it
		}
		dirs[filepath.Dir(path)] = true
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs[filepath.Dir(real)] = true
		}
	}
	var found []string
	for dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // a directory that may be searched but not listed: the given paths must do
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			id, err := identify(path)
			if err != nil || given[id] {
				continue
			}
			if l := peekLabel(path); l != nil && l.Volume == volume {
				given[id] = true
				found = append(found, path)
			}
		}
	}
	sort.Strings(found)
	return append(out, found...), nil
}

// fileID tells files apart whatever their names: a block device by its number, a regular file by its inode.
// A namespace that has an address has only that.
type fileID struct {
	block    bool
	dev, ino uint64
	address  string
}

func identify(path string) (fileID, error) {
	if drive.IsAddress(path) {
		return fileID{address: path}, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fileID{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return idOf(&st, path)
}

func idOf(st *unix.Stat_t, path string) (fileID, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return fileID{block: true, dev: st.Rdev}, nil
	case unix.S_IFREG:
		return fileID{dev: st.Dev, ino: st.Ino}, nil
	}
	return fileID{}, &os.PathError{Op: "open", Path: path, Err: errors.New("neither a regular file nor a block device")}
}

// sameDrive says whether two opened drives are one.
func sameDrive(a, b drive.Drive) (bool, error) {
	if a.Fd() < 0 || b.Fd() < 0 {
		return a == b || len(a.Bytes()) > 0 && len(b.Bytes()) > 0 && &a.Bytes()[0] == &b.Bytes()[0], nil
	}
	var ids [2]fileID
	for i, d := range []drive.Drive{a, b} {
		var st unix.Stat_t
		err := unix.Fstat(d.Fd(), &st)
		if err == nil {
			ids[i], err = idOf(&st, d.Name())
		}
		if err != nil {
			return false, &DriveError{Err: ErrIO, Name: d.Name(), Index: -1, Cause: err}
		}
	}
	return ids[0] == ids[1], nil
}

// peekLabel reads a label without locking, to learn whose the drive is; nil if there is none. Whether the label is
// right in all its parts is decided when the drive is opened.
func peekLabel(path string) *ondisk.Label {
	if drive.IsAddress(path) {
		return nil // it would have to be started for that
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil || size < 2*ondisk.BlockBytes {
		return nil
	}
	b := make([]byte, ondisk.BlockBytes)
	for _, unit := range []int64{0, size/ondisk.BlockBytes - 1} {
		if _, err := f.ReadAt(b, unit*ondisk.BlockBytes); err != nil {
			continue
		}
		if l, _ := ondisk.DecodeLabel(b, uint64(unit)); l != nil {
			return l
		}
	}
	return nil
}

// OpenDrives mounts from drives opened by the caller (memory drives of tests, benches and replay --metadata-only).
// They stay the caller's: Close of the volume does not close them.
func OpenDrives(drives []drive.Drive, o Options) (*Volume, error) {
	o.setDefaults()
	if len(drives) == 0 {
		return nil, fmt.Errorf("%w: no drive given", ErrInvalid)
	}
	var list []candidate
	var unreadable error
	for _, d := range drives {
		l, err := readLabel(d)
		if o.Degraded && errors.Is(err, ErrCorrupt) {
			unreadable = err
			continue // as if it were missing
		}
		if err != nil {
			return nil, err
		}
		list = append(list, candidate{dev: d, label: l})
	}
	if len(list) == 0 {
		return nil, unreadable
	}
	list, newest, err := selectMembers(list, &o)
	if err != nil {
		return nil, err
	}
	v := newVolume(list, newest, o)
	if err := v.load(list); err != nil {
		v.emptyPools()
		return nil, err
	}
	if err := v.start(); err != nil {
		v.emptyPools()
		return nil, err
	}
	return v, nil
}

func newVolume(list []candidate, l *ondisk.Label, o Options) *Volume {
	v := &Volume{
		o: o, uuid: l.Volume, tag: ondisk.VolumeTag(l.Volume), name: l.Name, width: int(l.Width),
		segmentUnits: l.Region.SegmentUnits, readOnly: o.ReadOnly,
		wasClean: l.Clean, common: *l, region: l.Region, rowsChanged: make(chan struct{}, 1),
		families: map[uint16]*ondisk.Family{}, tenants: map[uint32]ondisk.Tenant{},
		wake: make(chan struct{}, 1), kick: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	v.room = sync.NewCond(&v.applyMu)
	var have [ondisk.MaxDrives]*candidate
	for i := range list {
		have[list[i].label.Index] = &list[i]
	}
	segments, largest := uint64(0), uint64(0)
	for i := range l.Members {
		if l.Members[i].State != ondisk.DriveActive {
			continue
		}
		var m *member
		if c := have[i]; c != nil {
			m = newMember(v, c.dev, c.label)
			m.role = l.Metadata>>i&1 != 0 && !c.stale
			if m.stale = c.stale; m.stale {
				m.rank = c.label.Epoch
			}
		} else {
			m = newMember(v, nil, missingLabel(l, i))
			m.cause = errors.New("it was not there at the mount")
		}
		v.members = append(v.members, m)
		v.byIndex[i].Store(m)
		if m.stale || m.lost() {
			v.drivesChanged.Store(true)
		}
		if m.role {
			v.metadata = append(v.metadata, m)
		}
		segments += uint64(m.region.Segments)
		largest = max(largest, uint64(m.region.Segments))
	}
	// Tables in memory never move: they are made for the drives that may be added until the next mount, too.
	v.segmentsMax = segments + drivesAddable*largest
	v.rows = make([]atomic.Pointer[row], min(v.segmentsMax/uint64(v.width)+2, maxRowRefs))
	r := &l.Region
	v.journal = ondisk.Journal{First: r.JournalUnit, Blocks: r.JournalBlocks, Tag: v.tag}
	v.discards = newDiscarder(v)
	v.lastHits = o.Now()
	return v
}

// drivesAddable is how many drives as large as the largest one a pool can make use of before the next mount.
const drivesAddable = 8

// missingLabel is what the label of a member says that is not here.
func missingLabel(l *ondisk.Label, i int) *ondisk.Label {
	c := *l
	c.Index, c.Drive, c.Units = uint16(i), l.Members[i].UUID, l.Members[i].Units
	c.Region.Segments = segmentsOf(&l.Region, c.Units)
	return &c
}

// start makes a loaded volume live. A read-only one needs nothing.
func (v *Volume) start() error {
	if v.readOnly {
		v.epoch, v.nonce = v.super.Epoch, 0
		return nil
	}
	if err := v.claim(); err != nil {
		return err
	}
	v.journal.Nonce = v.nonce
	// The first checkpoint makes what was replayed durable under the new nonce: nothing that an earlier mount left
	// half-written behind the journal's end can come to life later. It overwrites record tables in place, so each has
	// two copies that count before.
	err := v.exclusively(func() error {
		if err := v.repairTables(); err != nil {
			return err
		}
		if err := v.admitStale(); err != nil {
			return err
		}
		if err := v.checkpointLocked(false); err != nil {
			return err
		}
		return v.settleMembers()
	})
	if err != nil {
		return err
	}
	v.committing.Add(1)
	go v.committer()
	v.background.Add(2)
	go v.checkpointer()
	go v.discards.run()
	return nil
}

func (v *Volume) emptyPools() {
	for _, p := range v.pools {
		p.empty()
	}
}

// Close checkpoints, marks the labels clean and releases the drives. Whoever uses the volume must have stopped.
func (v *Volume) Close() error {
	if !v.beginClose() {
		return ErrClosed
	}
	var err error
	if !v.readOnly {
		v.stopWorkers()
		if err = v.err(); err == nil {
			err = v.markClean()
		}
	}
	return firstError(err, v.release())
}

// markClean checkpoints and has the labels say that the superblock knows all there is. A drive that is lost on the way
// begins an epoch that this superblock does not name: then another checkpoint does.
func (v *Volume) markClean() error {
	for {
		if err := v.checkpoint(true); err != nil {
			return err
		}
		v.labelMu.Lock()
		if v.common.Epoch == v.super.Epoch {
			if err := v.renewLabels(nil, func(l *ondisk.Label) { l.Base, l.Clean = l.Epoch, true }); err != nil {
				v.labelMu.Unlock()
				return err
			}
		}
		clean := v.common.Clean
		v.labelMu.Unlock()
		if clean {
			return nil
		}
	}
}

// Abandon releases the drives without writing (kill -9 in tests). What waits for the committer fails.
func (v *Volume) Abandon() {
	if !v.beginClose() {
		return
	}
	v.fail(ErrClosed)
	if !v.readOnly {
		v.stopWorkers()
	}
	_ = v.release()
}

func (v *Volume) beginClose() bool {
	v.queueMu.Lock()
	defer v.queueMu.Unlock()
	was := v.closing
	v.closing = true
	return !was
}

// stopWorkers lets the committer finish what is queued, which may need checkpoints, and then stops the others.
func (v *Volume) stopWorkers() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
	v.committing.Wait()
	close(v.stop)
	v.discards.close()
	v.background.Wait()
}

func (v *Volume) release() error {
	v.applyMu.Lock()
	limbo := v.limbo
	v.limbo = nil
	v.applyMu.Unlock()
	for _, r := range limbo {
		r.dropDone(ErrClosed)
	}
	v.emptyPools()
	if !v.ownDrives {
		return nil
	}
	var err error
	for _, m := range v.members {
		err = firstError(err, m.close())
	}
	for _, d := range v.retired {
		err = firstError(err, d.Close())
	}
	return err
}

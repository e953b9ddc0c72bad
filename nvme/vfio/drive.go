package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"tuttifs/drive"
	"tuttifs/lifetime"
	"tuttifs/nvme"
)

// Of the memory that a drive moves its data through. Callers beyond as many as there are cells wait.
const (
	cellBytes  = 256 << 10
	driveCells = 16
	driveDepth = 64
	retries    = 3 // of commands that ended with somebody else's reset, or that may be tried again
)

// Drive is a namespace as a drive.Drive, on a queue pair of its own. Data go through memory of its own, so that any
// memory and any alignment will do.
//
// Lock order: life, then edges.
type Drive struct {
	c     *Controller
	ns    *Namespace
	q     *Queue
	name  string
	write bool
	mem   *Buffer
	cells chan cell
	place placement
	dsm   dsmLimits
	end   func() error // gives back what the drive was opened with

	life  sync.RWMutex // held shared by every access, exclusively by Close
	open  bool         // guarded by life
	stale bool         // it has been formatted since, and is to be opened anew; guarded by life
	edges sync.RWMutex // as of a file: whole blocks shared, partial ones exclusive

	flushMu sync.Mutex
	flush   error // the first failure stays
}

var _ drive.Drive = (*Drive)(nil)

// cell is memory of one command: its data, and the PRP list that never changes.
type cell struct {
	b          []byte
	iova, list uint64
}

// NewDrive makes namespace nsid a drive. The controller stays the caller's, and is open for as long as the drive is.
func NewDrive(c *Controller, nsid uint32, o drive.Options) (*Drive, error) {
	ns, err := c.Namespace(nsid)
	if err != nil {
		return nil, err
	}
	d := &Drive{c: c, ns: ns, write: !o.ReadOnly, open: true, end: func() error { return nil },
		name: fmt.Sprintf("%s/%d", c.Name(), nsid)}
	switch {
	case ns.LBABytes() != 512 && ns.LBABytes() != 4096:
		return nil, c.errorf("namespace %d has blocks of %d bytes, want 512 or 4096: %w", nsid, ns.LBABytes(), ErrUnsuitable)
	case d.Size() == 0:
		return nil, c.errorf("namespace %d has %d bytes, less than a unit: %w", nsid, ns.Bytes(), ErrUnsuitable)
	case ns.ReadOnly && d.write:
		return nil, fmt.Errorf("drive %s: the namespace is write protected: %w", d.name, drive.ErrReadOnly)
	}
	if d.q, err = c.NewQueue(min(driveDepth, depthOf(c.cap.Entries()))); err != nil {
		return nil, err
	}
	if err := d.makeCells(); err != nil {
		return nil, errors.Join(err, d.q.Close())
	}
	if err := errors.Join(d.findPlacement(), d.findDSMLimits()); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// depthOf is the deepest queue of at most n entries.
func depthOf(n uint32) int {
	depth := nvme.QueueEntriesMin
	for depth < nvme.QueueEntriesMax && uint32(2*depth) <= n {
		depth *= 2
	}
	return depth
}

func (d *Drive) makeCells() (err error) {
	size := min(cellBytes, d.c.TransferMax())
	each := size + PageBytes
	if d.mem, err = d.c.Alloc(driveCells * each); err != nil {
		return err
	}
	d.cells = make(chan cell, driveCells)
	for i := range driveCells {
		at := i * each
		c := cell{b: d.mem.Bytes[at:][:size:size], iova: d.mem.IOVA + uint64(at)}
		c.list = c.iova + uint64(size)
		list := d.mem.Bytes[at+size:]
		for page := 1; page < size/PageBytes; page++ {
			binary.LittleEndian.PutUint64(list[(page-1)*8:], c.iova+uint64(page*PageBytes))
		}
		d.cells <- c
	}
	return nil
}

// point makes n bytes of the cell the command's data.
func (c *cell) point(e *nvme.SQE, n int) {
	e.DPTR = [2]uint64{c.iova}
	switch {
	case n > 2*PageBytes:
		e.DPTR[1] = c.list
	case n > PageBytes:
		e.DPTR[1] = c.iova + PageBytes
	}
}

// do runs a command; what ended through no fault of its own is tried again.
func (d *Drive) do(e nvme.SQE) error {
	for try := 0; ; try++ {
		_, err := d.q.Do(e)
		if err == nil || try == retries || !retriable(err) {
			return err
		}
	}
}

func retriable(err error) bool {
	if errors.Is(err, ErrTimeout) || errors.Is(err, ErrQuarantined) || errors.Is(err, ErrDead) {
		return false
	}
	for _, again := range []error{ErrAborted, nvme.CommandInterrupted, nvme.NamespaceNotReady, nvme.TransientTransport} {
		if errors.Is(err, again) {
			return true
		}
	}
	return false
}

func (d *Drive) errorf(op string, off, n int64, err error) error {
	return fmt.Errorf("drive %s: %s of %d bytes at offset %d: %w", d.name, op, n, off, shrunk(err))
}

// shrunk says of a controller that was let go of because the system wanted it back that it was taken out: it is closed
// under its drives.
func shrunk(err error) error {
	if errors.Is(err, ErrGone) || errors.Is(err, ErrClosed) {
		return fmt.Errorf("%w: %w", drive.ErrShrunk, err)
	}
	return err
}

func (d *Drive) checkRange(op string, off, n int64) error {
	if size := d.Size(); off < 0 || n < 0 || off > size || n > size-off {
		return d.errorf(op, off, n, drive.ErrRange)
	}
	return nil
}

// enter checks the range and keeps Close out until life is unlocked.
func (d *Drive) enter(op string, off, n int64, write bool) error {
	if err := d.checkRange(op, off, n); err != nil {
		return err
	}
	if write && !d.write {
		return d.errorf(op, off, n, drive.ErrReadOnly)
	}
	d.life.RLock()
	if !d.open || d.stale {
		d.life.RUnlock()
		return d.errorf(op, off, n, os.ErrClosed)
	}
	return nil
}

// span is the next piece of a request: the block it starts in, the bytes of that block before the request, and the
// whole blocks to move, at most a cell.
func (d *Drive) span(c *cell, n int, off int64) (start int64, skip, span int) {
	align := int64(d.ns.LBABytes())
	start = off &^ (align - 1)
	skip = int(off - start)
	return start, skip, int(min((int64(skip)+int64(n)+align-1)&^(align-1), int64(len(c.b))))
}

func (d *Drive) transfer(c *cell, write bool, start int64, n int, class lifetime.Class) error {
	var e nvme.SQE
	nvme.BuildRW(&e, write, 0, d.ns.ID, uint64(start)>>d.ns.LBAShift, uint32(n>>d.ns.LBAShift))
	if id, ok := d.place.id(class); ok && write {
		e.SetDirective(nvme.DirectivePlacement, id)
	}
	c.point(&e, n)
	return d.do(e)
}

// ReadAt fills p.
func (d *Drive) ReadAt(p []byte, off int64) error {
	if err := d.enter("read", off, int64(len(p)), false); err != nil {
		return err
	}
	defer d.life.RUnlock()
	if len(p) == 0 {
		return nil
	}
	c := <-d.cells
	defer func() { d.cells <- c }()
	for rest, at := p, off; len(rest) > 0; {
		start, skip, span := d.span(&c, len(rest), at)
		if err := d.transfer(&c, false, start, span, lifetime.Normal); err != nil {
			return d.errorf("read", off, int64(len(p)), err)
		}
		n := copy(rest, c.b[skip:span])
		rest, at = rest[n:], at+int64(n)
	}
	return nil
}

// WriteAt stores p; volatile until Flush.
func (d *Drive) WriteAt(p []byte, off int64) error { return d.WriteFor(lifetime.Normal, p, off) }

// store writes. Blocks that are written in part are read first.
func (d *Drive) store(class lifetime.Class, p []byte, off int64) error {
	if len(p) == 0 {
		return nil
	}
	align := int64(d.ns.LBABytes())
	if (off|int64(len(p)))&(align-1) == 0 {
		d.edges.RLock()
		defer d.edges.RUnlock()
	} else {
		d.edges.Lock()
		defer d.edges.Unlock()
	}
	c := <-d.cells
	defer func() { d.cells <- c }()
	for len(p) > 0 {
		start, skip, span := d.span(&c, len(p), off)
		n := min(len(p), span-skip)
		if skip != 0 || skip+n < span {
			if err := d.transfer(&c, false, start, span, class); err != nil {
				return err
			}
		}
		copy(c.b[skip:], p[:n])
		if err := d.transfer(&c, true, start, span, class); err != nil {
			return err
		}
		d.place.bytes[class].Add(uint64(span))
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// Flush makes what was written durable. A failure stays: nobody can tell which writes were lost.
func (d *Drive) Flush() error {
	if err := d.enter("flush", 0, 0, false); err != nil {
		return err
	}
	defer d.life.RUnlock()
	id := d.c.Identity()
	if !d.write || id.VWC&nvme.VWCPresent == 0 {
		return d.c.Err() // no cache: what has completed is durable
	}
	var e nvme.SQE
	nvme.BuildFlush(&e, 0, d.ns.ID)
	err := d.do(e)
	d.flushMu.Lock()
	defer d.flushMu.Unlock()
	if err != nil && d.flush == nil {
		d.flush = fmt.Errorf("drive %s: flush (writes may be lost; reopen the drive): %w", d.name, err)
	}
	return d.flush
}

// inward is the whole blocks of a range.
func (d *Drive) inward(off, n int64) (lba, blocks uint64) {
	start := (uint64(off) + uint64(d.ns.LBABytes()) - 1) >> d.ns.LBAShift
	end := uint64(off+n) >> d.ns.LBAShift
	return start, end - min(start, end)
}

// WriteZeroes lets the controller write zeroes where it can, and writes them where it cannot.
func (d *Drive) WriteZeroes(off, n int64) error {
	if err := d.enter("write zeroes", off, n, true); err != nil {
		return err
	}
	defer d.life.RUnlock()
	start, end := off, off // of what the controller does
	if id := d.c.Identity(); id.ONCS&nvme.ONCSWriteZeroes != 0 {
		if lba, blocks := d.inward(off, n); blocks > 0 {
			done, err := d.zeroBlocks(lba, blocks)
			if err != nil {
				return d.errorf("write zeroes", off, n, err)
			}
			start = int64(lba << d.ns.LBAShift)
			end = start + int64(done<<d.ns.LBAShift)
		}
	}
	err := d.storeZeroes(off, start-off)
	if err == nil {
		err = d.storeZeroes(end, off+n-end)
	}
	if err != nil {
		return d.errorf("write zeroes", off, n, err)
	}
	return nil
}

// zeroBlocks returns how many blocks the controller has zeroed before it refused one of the commands.
func (d *Drive) zeroBlocks(lba, blocks uint64) (done uint64, err error) {
	d.edges.RLock()
	defer d.edges.RUnlock()
	// Deallocation where the blocks read as zeroes after it, and the command does that.
	feat := d.ns.Identity.DLFEAT
	deallocate := feat&7 == nvme.DLFEATZeroes && feat&nvme.DLFEATWriteZeroes != 0
	for done < blocks {
		k := min(blocks-done, nvme.BlocksMax)
		var e nvme.SQE
		nvme.BuildWriteZeroes(&e, 0, d.ns.ID, lba+done, uint32(k), deallocate)
		err := d.do(e)
		if errors.Is(err, nvme.InvalidField) || errors.Is(err, nvme.InvalidOpcode) {
			return done, nil
		}
		if err != nil {
			return done, err
		}
		done += k
	}
	return done, nil
}

func (d *Drive) storeZeroes(off, n int64) error {
	if n == 0 {
		return nil
	}
	zeroes := make([]byte, min(n, cellBytes))
	for n > 0 {
		k := min(n, int64(len(zeroes)))
		if err := d.store(lifetime.Normal, zeroes[:k], off); err != nil {
			return err
		}
		off, n = off+k, n-k
	}
	return nil
}

// ReadLog reads a log page of the controller, for drive.ReadLog.
func (d *Drive) ReadLog(page uint8, p []byte) error {
	if err := d.enter("log page", 0, 0, false); err != nil {
		return err
	}
	defer d.life.RUnlock()
	nsid, group := uint32(nvme.NSIDBroadcast), uint16(0)
	if page == nvme.LogFDPStats { // of the endurance group
		nsid, group = 0, d.ns.Group
	}
	err := d.c.ReadLog(page, nsid, group, p)
	for _, none := range []nvme.Status{nvme.LogPageInvalid, nvme.InvalidField, nvme.InvalidOpcode, nvme.FDPDisabled} {
		if errors.Is(err, none) {
			return fmt.Errorf("drive %s: %w: %w", d.name, drive.ErrNoLog, err)
		}
	}
	return err
}

// Formats are the LBA formats that the namespace can have, and the index of the one that it has.
func (d *Drive) Formats() (list []nvme.LBAFormat, current int, err error) {
	list, current = d.ns.Identity.Formats()
	return list, current, nil
}

// FormatNVM gives the namespace another block size; everything on it is lost. The drive serves no more.
func (d *Drive) FormatNVM(lbaBytes int) error {
	if err := d.enter("format", 0, 0, true); err != nil {
		return err
	}
	d.life.RUnlock()
	d.life.Lock()
	defer d.life.Unlock()
	if !d.open || d.stale {
		return d.errorf("format", 0, 0, os.ErrClosed)
	}
	d.stale = true
	return d.c.Format(d.ns.ID, lbaBytes)
}

// Controller is the controller behind the drive.
func (d *Drive) Controller() *Controller { return d.c }

// Namespace is the namespace behind the drive.
func (d *Drive) Namespace() *Namespace { return d.ns }

func (d *Drive) Size() int64      { return d.ns.Bytes() &^ (drive.UnitBytes - 1) }
func (d *Drive) LBABytes() int    { return d.ns.LBABytes() }
func (d *Drive) Kind() drive.Kind { return drive.NVMe }
func (d *Drive) Direct() bool     { return true }
func (d *Drive) Name() string     { return d.name }
func (d *Drive) Fd() int          { return -1 }
func (d *Drive) Bytes() []byte    { return nil }

// Close waits for the accesses under way and ends the queue.
func (d *Drive) Close() error {
	d.life.Lock()
	defer d.life.Unlock()
	if !d.open {
		return fmt.Errorf("drive %s: close: %w", d.name, os.ErrClosed)
	}
	d.open = false
	err := d.q.Close()
	if errors.Is(err, ErrClosed) {
		err = nil // with its controller
	}
	if !errors.Is(err, ErrQuarantined) {
		err = errors.Join(err, d.mem.Free())
	}
	return errors.Join(err, d.end())
}

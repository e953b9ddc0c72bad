package drive

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// transferBytes bounds one system call: Linux moves at most 2 GiB less a page in one, and a multiple of every
// alignment keeps the rest of a longer request aligned.
const transferBytes = 1 << 30

// file is a regular file or a block device.
//
// Lock order: life, then edges.
type file struct {
	name     string
	kind     Kind
	size     int64
	lba      int
	readOnly bool

	direct      bool
	offsetAlign int // of offsets and lengths of direct I/O, 512 or 4096; 0 when buffered
	memoryAlign int // of addresses

	life   sync.RWMutex // held shared by every access, exclusively by Close
	fd     int
	fdOpen bool   // guarded by life
	bytes  []byte // the file itself where its filesystem is memory, else nil; guarded by life

	// edges keeps whole-block writes (shared) out while a partial block is read, changed and written (exclusive):
	// they would otherwise lose the neighbour's bytes.
	edges sync.RWMutex

	flushFailed failure
}

// failure is an error that stays: once a flush has failed nobody can tell which writes were lost, and the kernel
// reports it only once.
type failure struct {
	sync.Mutex
	err error
}

// enter checks the range and keeps Close out until leave.
func (f *file) enter(op string, off, n int64) error {
	if err := checkRange(f.name, op, off, n, f.size); err != nil {
		return err
	}
	f.life.RLock()
	if !f.fdOpen {
		f.life.RUnlock()
		return closedError(f.name, op)
	}
	return nil
}

// Grow makes a regular file longer; what is new reads as zeroes. Nobody else may use the drive meanwhile.
func (f *file) Grow(size int64) error {
	if f.kind != File || size < f.size || size%UnitBytes != 0 {
		return fmt.Errorf("drive %s: grow to %d bytes: %w", f.name, size, ErrNotSupported)
	}
	if err := f.enterWrite("grow", 0, 0); err != nil {
		return err
	}
	defer f.leave()
	err := retry(func() error { return unix.Ftruncate(f.fd, size) })
	if err == nil {
		err = retry(func() error { return unix.Fsync(f.fd) })
	}
	if err != nil {
		return ioError(f.name, "grow", f.size, size-f.size, err)
	}
	f.unmap()
	f.size = size
	f.mapMemory()
	return nil
}

// mapMemory makes the bytes of a file addressable if its filesystem is memory. Nothing is read or allocated by that.
// Without address space (RLIMIT_AS) the drive works by its descriptor, as others do.
func (f *file) mapMemory() {
	if f.kind != File || f.size != int64(int(f.size)) || !inPageCacheOnly(f.fd) {
		return
	}
	protection := unix.PROT_READ | unix.PROT_WRITE
	if f.readOnly {
		protection = unix.PROT_READ
	}
	if b, err := unix.Mmap(f.fd, 0, int(f.size), protection, unix.MAP_SHARED); err == nil {
		f.bytes = b
	}
}

func (f *file) unmap() {
	if f.bytes != nil {
		_ = unix.Munmap(f.bytes) // the mapping is ours and whole: munmap has nothing to refuse
		f.bytes = nil
	}
}

func (f *file) leave() { f.life.RUnlock() }

func (f *file) enterWrite(op string, off, n int64) error {
	if f.readOnly {
		return ioError(f.name, op, off, n, ErrReadOnly)
	}
	return f.enter(op, off, n)
}

// fits says whether direct I/O takes the request as it is.
func (f *file) fits(p []byte, off int64) bool {
	return f.wholeBlocks(int64(len(p)), off) && addressAligned(p, f.memoryAlign)
}

func (f *file) wholeBlocks(n, off int64) bool { return (off|n)&int64(f.offsetAlign-1) == 0 }

func (f *file) ReadAt(p []byte, off int64) error {
	if err := f.enter("read", off, int64(len(p))); err != nil {
		return err
	}
	defer f.leave()
	var err error
	if !f.direct || f.fits(p, off) {
		err = f.readFull(p, off)
	} else {
		err = f.readBounced(p, off)
	}
	if err != nil {
		return ioError(f.name, "read", off, int64(len(p)), err)
	}
	return nil
}

// readFull is pread until p is full. In direct mode p and off are aligned.
func (f *file) readFull(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pread(f.fd, p[:min(len(p), transferBytes)], off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0 || (f.direct && !f.wholeBlocks(int64(n), 0)):
			return ErrShrunk // a direct read ends inside a block only where the file does
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// readBounced reads whole blocks into pooled memory and copies the wanted bytes out.
func (f *file) readBounced(p []byte, off int64) error {
	bounce := bouncePool.Get().(*[]byte)
	defer bouncePool.Put(bounce)
	for len(p) > 0 {
		start, skip, span := f.span(len(p), off)
		b := (*bounce)[:span]
		if err := f.readFull(b, start); err != nil {
			return err
		}
		n := copy(p, b[skip:])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// span is the next piece of a bounced request: the block it starts in, the bytes of that block before the request,
// and the whole blocks to move, at most a bounce buffer.
func (f *file) span(n int, off int64) (start int64, skip, span int) {
	align := int64(f.offsetAlign)
	start = off &^ (align - 1)
	skip = int(off - start)
	whole := (int64(skip) + int64(n) + align - 1) &^ (align - 1)
	return start, skip, int(min(whole, bounceBytes))
}

func (f *file) WriteAt(p []byte, off int64) error {
	if err := f.enterWrite("write", off, int64(len(p))); err != nil {
		return err
	}
	defer f.leave()
	if err := f.write(p, off); err != nil {
		return ioError(f.name, "write", off, int64(len(p)), err)
	}
	return nil
}

// write stores p; life is held and the range is checked.
func (f *file) write(p []byte, off int64) error {
	if !f.direct {
		return f.writeFull(p, off)
	}
	if f.wholeBlocks(int64(len(p)), off) {
		f.edges.RLock()
		defer f.edges.RUnlock()
		if addressAligned(p, f.memoryAlign) {
			return f.writeFull(p, off)
		}
	} else {
		f.edges.Lock()
		defer f.edges.Unlock()
	}
	return f.writeBounced(p, off)
}

// writeFull is pwrite until all of p is stored. In direct mode p and off are aligned.
func (f *file) writeFull(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(f.fd, p[:min(len(p), transferBytes)], off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOSPC) && f.kind == Block:
			return ErrShrunk // a block device has no other space to run out of
		case err != nil:
			return err
		case n == 0 || (f.direct && !f.wholeBlocks(int64(n), 0)):
			return io.ErrShortWrite
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// writeBounced copies p into pooled memory and writes whole blocks. A block that p covers only in part is read
// first; the caller holds edges, exclusively if there is such a block.
func (f *file) writeBounced(p []byte, off int64) error {
	bounce := bouncePool.Get().(*[]byte)
	defer bouncePool.Put(bounce)
	align := f.offsetAlign
	for len(p) > 0 {
		start, skip, span := f.span(len(p), off)
		b := (*bounce)[:span]
		n := min(len(p), span-skip)
		if skip != 0 {
			if err := f.readFull(b[:align], start); err != nil {
				return err
			}
		}
		if last := span - align; skip+n < span && (last > 0 || skip == 0) {
			if err := f.readFull(b[last:], start+int64(last)); err != nil {
				return err
			}
		}
		copy(b[skip:], p[:n])
		if err := f.writeFull(b, start); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// Flush is fdatasync, which also empties a device's volatile cache. A failure stays: see failure.
func (f *file) Flush() error {
	if err := f.enter("flush", 0, 0); err != nil {
		return err
	}
	defer f.leave()
	if f.readOnly {
		return nil
	}
	err := retry(func() error { return unix.Fdatasync(f.fd) })
	f.flushFailed.Lock()
	defer f.flushFailed.Unlock()
	if err != nil && f.flushFailed.err == nil {
		f.flushFailed.err = fmt.Errorf("drive %s: flush (writes may be lost; reopen the drive): %w", f.name, err)
	}
	return f.flushFailed.err
}

// Discard punches a hole in a file or trims a device, for the whole blocks inside the range.
func (f *file) Discard(off, n int64) error {
	if err := f.enterWrite("discard", off, n); err != nil {
		return err
	}
	defer f.leave()
	start, end := inward(off, n, int64(max(f.lba, f.offsetAlign)))
	if start >= end {
		return nil
	}
	f.edges.RLock()
	err := f.discardBlocks(start, end-start)
	f.edges.RUnlock()
	if unsupported(err) {
		err = fmt.Errorf("%w (%w)", ErrNotSupported, err)
	}
	if err != nil {
		return ioError(f.name, "discard", off, n, err)
	}
	return nil
}

func (f *file) discardBlocks(off, n int64) error {
	if f.kind == Block {
		return blockRange(f.fd, unix.BLKDISCARD, off, n)
	}
	return retry(func() error {
		return unix.Fallocate(f.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
}

// WriteZeroes lets the device or the filesystem make zeroes, and writes them where neither can.
//
// A file gets a hole rather than reserved space: drive files are sparse from the start, and stay so.
func (f *file) WriteZeroes(off, n int64) error {
	if err := f.enterWrite("write zeroes", off, n); err != nil {
		return err
	}
	defer f.leave()
	if err := f.zero(off, n); err != nil {
		return ioError(f.name, "write zeroes", off, n, err)
	}
	return nil
}

func (f *file) zero(off, n int64) error {
	start, end := inward(off, n, int64(max(f.lba, f.offsetAlign)))
	if start >= end {
		return f.writeZeroBytes(off, n)
	}
	f.edges.RLock()
	err := f.zeroBlocks(start, end-start)
	f.edges.RUnlock()
	if unsupported(err) {
		return f.writeZeroBytes(off, n)
	}
	if err != nil {
		return err
	}
	if err := f.writeZeroBytes(off, start-off); err != nil {
		return err
	}
	return f.writeZeroBytes(end, off+n-end)
}

func (f *file) zeroBlocks(off, n int64) error {
	if f.kind == Block {
		return blockRange(f.fd, unix.BLKZEROOUT, off, n)
	}
	err := f.discardBlocks(off, n)
	if unsupported(err) {
		err = retry(func() error {
			return unix.Fallocate(f.fd, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		})
	}
	return err
}

func (f *file) writeZeroBytes(off, n int64) error {
	if n == 0 {
		return nil
	}
	zeroes := AlignedBuffer(int(min(n, bounceBytes)))
	for n > 0 {
		piece := zeroes[:min(n, int64(len(zeroes)))]
		if err := f.write(piece, off); err != nil {
			return err
		}
		off, n = off+int64(len(piece)), n-int64(len(piece))
	}
	return nil
}

// blockRange is one of the block ioctls that take {start, length} in bytes.
func blockRange(fd int, request uint, off, n int64) error {
	arg := [2]uint64{uint64(off), uint64(n)}
	return ioctlPointer(fd, request, unsafe.Pointer(&arg))
}

func (f *file) Size() int64   { return f.size }
func (f *file) LBABytes() int { return f.lba }
func (f *file) Kind() Kind    { return f.kind }
func (f *file) Direct() bool  { return f.direct }
func (f *file) Name() string  { return f.name }
func (f *file) Fd() int       { return f.fd }

func (f *file) Bytes() []byte {
	f.life.RLock()
	defer f.life.RUnlock()
	return f.bytes
}

// Close waits for the accesses under way, then releases the lock with the descriptor.
func (f *file) Close() error {
	f.life.Lock()
	defer f.life.Unlock()
	if !f.fdOpen {
		return closedError(f.name, "close")
	}
	f.fdOpen = false
	f.unmap()
	// close(2) on Linux always gives the descriptor back, interrupted or not: never repeated.
	if err := unix.Close(f.fd); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("drive %s: close: %w", f.name, err)
	}
	return nil
}

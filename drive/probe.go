package drive

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// measure is the length in bytes; a block device also tells its LBA size.
func (f *file) measure(st *unix.Stat_t) (int64, error) {
	if f.kind == File {
		return st.Size, nil
	}
	var size uint64
	if err := ioctlPointer(f.fd, unix.BLKGETSIZE64, unsafe.Pointer(&size)); err != nil {
		return 0, fmt.Errorf("drive %s: ask for its size: %w", f.name, err)
	}
	var lba int32
	if err := ioctlPointer(f.fd, unix.BLKSSZGET, unsafe.Pointer(&lba)); err != nil {
		return 0, fmt.Errorf("drive %s: ask for its LBA size: %w", f.name, err)
	}
	if lba != 512 && lba != 4096 {
		return 0, fmt.Errorf("drive %s: LBA size %d: reformat the namespace with 512 or 4096", f.name, lba)
	}
	f.lba = int(lba)
	return int64(size), nil
}

// probeDirect switches direct I/O on where it exists and works, and leaves buffered I/O otherwise.
func (f *file) probeDirect() error {
	if f.kind == File && inPageCacheOnly(f.fd) {
		return nil
	}
	offset, memory, known := f.directByStatx()
	if known && offset == 0 {
		return nil
	}
	if err := f.setDirect(true); err != nil {
		if errors.Is(err, unix.EINVAL) || unsupported(err) {
			return nil
		}
		return fmt.Errorf("drive %s: switch to direct I/O: %w", f.name, err)
	}
	for _, align := range []int{512, 4096} {
		if align < offset || align < f.lba {
			continue
		}
		if f.tryDirect(align) {
			f.direct = true
			f.offsetAlign = align
			f.memoryAlign = align
			if known && memory > 0 && memory < align {
				f.memoryAlign = memory
			}
			return nil
		}
	}
	if err := f.setDirect(false); err != nil {
		return fmt.Errorf("drive %s: switch back to buffered I/O: %w", f.name, err)
	}
	return nil
}

// directByStatx asks the kernel (6.1 and later); known is false if it or the filesystem does not say. offset 0
// means that direct I/O is refused.
func (f *file) directByStatx() (offset, memory int, known bool) {
	var sx unix.Statx_t
	err := unix.Statx(f.fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &sx)
	if err != nil || sx.Mask&unix.STATX_DIOALIGN == 0 {
		return 0, 0, false
	}
	return int(sx.Dio_offset_align), int(sx.Dio_mem_align), true
}

// tryDirect reads one block at the first offset that is a multiple of align and of nothing larger. Reading is the
// only trial that harms nothing.
func (f *file) tryDirect(align int) bool {
	b := AlignedBuffer(UnitBytes + align)[align:]
	off := int64(align) % UnitBytes
	err := retry(func() error {
		_, err := unix.Pread(f.fd, b[:align:align], off)
		return err
	})
	return !errors.Is(err, unix.EINVAL) && !unsupported(err) // a bad sector says nothing about alignment
}

func (f *file) setDirect(on bool) error {
	flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	flags &^= unix.O_DIRECT
	if on {
		flags |= unix.O_DIRECT
	}
	_, err = unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags)
	return err
}

// inPageCacheOnly knows the filesystems that accept O_DIRECT and ignore it: their page cache is all the storage
// they have.
func inPageCacheOnly(fd int) bool {
	t := filesystem(fd)
	return t == unix.TMPFS_MAGIC || t == unix.RAMFS_MAGIC
}

// filesystem is the type's magic number, 0 if the kernel does not say.
func filesystem(fd int) int64 {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return 0
	}
	return int64(fs.Type)
}

// chooseLBA settles the logical block size: the device's own, or for a file the wanted one, or the smallest that
// direct I/O takes.
func (f *file) chooseLBA(wanted int) error {
	switch {
	case f.kind == Block && wanted != 0 && wanted != f.lba:
		return fmt.Errorf("drive %s: LBA size %d was asked for, the device has %d", f.name, wanted, f.lba)
	case f.kind == Block:
	case wanted != 0:
		f.lba = wanted
	case f.direct:
		f.lba = f.offsetAlign
	default:
		f.lba = 512
	}
	return nil
}

// DirectAlign is what asynchronous I/O on d.Fd() must keep to: offsets and lengths in multiples of offset, memory at
// multiples of memory. Both are 1 for buffered and memory drives.
func DirectAlign(d Drive) (offset, memory int) {
	if f, ok := d.(*file); ok && f.direct {
		return f.offsetAlign, f.memoryAlign
	}
	return 1, 1
}

// NextData is the first range at or after off that holds data and is no hole, whole units; false if d does not know, or
// there is none.
func NextData(d Drive, off int64) (start, end int64, ok bool) {
	f, known := d.(*file)
	if !known || f.kind != File || f.enter("look for data", off, 0) != nil {
		return 0, 0, false
	}
	defer f.leave()
	if filesystem(f.fd) == unix.RAMFS_MAGIC {
		return 0, 0, false // it calls holes data
	}
	start, err := unix.Seek(f.fd, off, unix.SEEK_DATA)
	if err != nil || start >= f.size {
		return 0, 0, false
	}
	end, err = unix.Seek(f.fd, start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, false
	}
	return start &^ (UnitBytes - 1), min((end+UnitBytes-1)&^(UnitBytes-1), f.size), true
}

func ioctlPointer(fd int, request uint, arg unsafe.Pointer) error {
	return retry(func() error {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg)); errno != 0 {
			return errno
		}
		return nil
	})
}

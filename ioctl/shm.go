package ioctl

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// populateMax bounds what is faulted in up front: a first fault costs 25 us a page, but a huge region should not
// stall its maker for seconds.
const populateMax = 1 << 30

// NewSharedMemory makes a memfd of n bytes, sealed against shrinking, growing and further sealing, so that neither
// side can make the other fault, and maps it. The caller closes the descriptor when it has been sent, and unmaps with
// Unmap.
func NewSharedMemory(name string, n uint64) (fd int, b []byte, err error) {
	if n == 0 || n > 1<<46 {
		return -1, nil, fmt.Errorf("ioctl: shared memory of %d bytes: %w", n, EINVAL)
	}
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, nil, fmt.Errorf("ioctl: memfd %s: %w", name, err)
	}
	if err = unix.Ftruncate(fd, int64(n)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		b, err = MapShared(fd, n)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, nil, fmt.Errorf("ioctl: memfd %s of %d bytes: %w", name, n, err)
	}
	return fd, b, nil
}

// hugePage is the size from which memory is worth having in huge pages: direct I/O pins and maps a transfer's memory
// page by page, which for 4-KiB pages costs as much CPU time as the rest of a large transfer.
const hugePage = 2 << 20

// MapShared maps n bytes of a descriptor for reading and writing: in huge pages where the kernel gives them
// (transparent_hugepage/shmem_enabled), populated up front where the size is moderate. A forked child does not get the
// mapping: it is no member of the session, and would keep the memory of a dead one for as long as it lives.
func MapShared(fd int, n uint64) ([]byte, error) {
	b, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		_ = unix.Munmap(b)
		return nil, err
	}
	if n >= hugePage {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // advice: without it pages are small
	}
	if n <= populateMax {
		if err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); err != nil && !errors.Is(err, unix.EINVAL) {
			_ = unix.Munmap(b)
			return nil, err // EINVAL: a kernel before 5.14; first touches fault then
		}
	}
	return b, nil
}

// Unmap gives a mapping back.
func Unmap(b []byte) error {
	if b == nil {
		return nil
	}
	return unix.Munmap(b)
}

// checkSealed refuses a descriptor whose size could still change or is not n: a truncation later would be SIGBUS here.
func checkSealed(fd int, n uint64) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("ioctl: descriptor is not a memfd: %w", err)
	}
	const want = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if seals&want != want {
		return fmt.Errorf("ioctl: memfd is not sealed against resizing: %w", EINVAL)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("ioctl: memfd: %w", err)
	}
	if uint64(st.Size) != n {
		return fmt.Errorf("ioctl: memfd has %d bytes, reply names %d: %w", st.Size, n, EINVAL)
	}
	return nil
}

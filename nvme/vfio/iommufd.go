package vfio

import (
	"errors"
	"fmt"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
)

// The kernel's interface to I/O address spaces: linux/iommufd.h. All of its requests are _IO(';', 128 + n).
const (
	ioctlIOASAlloc = 0x3b81
	ioctlIOASMap   = 0x3b85
	ioctlIOASUnmap = 0x3b86

	ioasFixed    = 1 << 0
	ioasWritable = 1 << 1
	ioasReadable = 1 << 2
)

type bindIOMMUFD struct {
	argsz, flags uint32
	iommufd      int32
	outDevice    uint32
}

type attachIOAS struct{ argsz, flags, ioas uint32 }

type ioasAlloc struct{ size, flags, outIOAS uint32 }

type ioasMap struct {
	size, flags, ioas, _ uint32
	vaddr, length, iova  uint64
}

type ioasUnmap struct {
	size, ioas   uint32
	iova, length uint64
}

// ioas is an I/O address space of iommufd. The kernel chooses addresses.
type ioas struct {
	fd int
	id uint32
}

func openIOAS(path string) (*ioas, error) {
	fd, err := openNode(path)
	if err != nil {
		return nil, err
	}
	arg := ioasAlloc{size: uint32(unsafe.Sizeof(ioasAlloc{}))}
	if _, err := ioctlArg(fd, ioctlIOASAlloc, unsafe.Pointer(&arg)); err != nil {
		return nil, errors.Join(fmt.Errorf("iommufd: address space: %w", err), unix.Close(fd))
	}
	return &ioas{fd: fd, id: arg.outIOAS}, nil
}

func (s *ioas) mapDMA(b []byte) (uint64, error) {
	arg := ioasMap{size: uint32(unsafe.Sizeof(ioasMap{})), flags: ioasReadable | ioasWritable, ioas: s.id,
		vaddr: uint64(addressOf(b)), length: uint64(len(b))}
	if _, err := ioctlArg(s.fd, ioctlIOASMap, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("map %d bytes for devices: %w", len(b), err)
	}
	return arg.iova, nil
}

func (s *ioas) mapDMAAt(b []byte, iova uint64) error {
	arg := ioasMap{size: uint32(unsafe.Sizeof(ioasMap{})), flags: ioasFixed | ioasReadable | ioasWritable, ioas: s.id,
		vaddr: uint64(addressOf(b)), length: uint64(len(b)), iova: iova}
	_, err := ioctlArg(s.fd, ioctlIOASMap, unsafe.Pointer(&arg))
	switch {
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.EADDRINUSE), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %d bytes at %#x: %w", ErrTaken, len(b), iova, err) // taken, or no address of this IOMMU
	case err != nil:
		return fmt.Errorf("map %d bytes for devices: %w", len(b), err)
	}
	return nil
}

func (s *ioas) unmapDMA(iova, n uint64) error {
	arg := ioasUnmap{size: uint32(unsafe.Sizeof(ioasUnmap{})), ioas: s.id, iova: iova, length: n}
	if _, err := ioctlArg(s.fd, ioctlIOASUnmap, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("unmap %d bytes at %#x: %w", n, iova, err)
	}
	return nil
}

// close ends the address space; the device that was attached to it is closed by then.
func (s *ioas) close() error { return unix.Close(s.fd) }

// openByNode opens a device by its character device and attaches it to an address space of its own.
func (m *Machine) openByNode(d *Device) (*device, error) {
	s, err := openIOAS(filepath.Join(m.dev, "iommu"))
	if err != nil {
		return nil, fmt.Errorf("nvme %s: %w", d.Address, err)
	}
	fd, err := openNode(filepath.Join(m.dev, "vfio/devices", d.Node))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nvme %s: %w", d.Address, err), s.close())
	}
	bind := bindIOMMUFD{argsz: uint32(unsafe.Sizeof(bindIOMMUFD{})), iommufd: int32(s.fd)}
	attach := attachIOAS{argsz: uint32(unsafe.Sizeof(attachIOAS{})), ioas: s.id}
	if _, err = ioctlArg(fd, ioctlBindIOMMUFD, unsafe.Pointer(&bind)); err == nil {
		_, err = ioctlArg(fd, ioctlAttachIOAS, unsafe.Pointer(&attach))
	} else if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: %w", drive.ErrBusy, err) // all that can be wrong with it: somebody else bound it
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nvme %s: attach to iommufd: %w", d.Address, err), unix.Close(fd), s.close())
	}
	return newDevice(d.Address, fd, s)
}

package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// The kernel's interface to a device: linux/vfio.h. All of its requests are _IO(';', 100 + n).
const (
	ioctlAPIVersion   = 0x3b64
	ioctlExtension    = 0x3b65
	ioctlSetIOMMU     = 0x3b66
	ioctlGroupStatus  = 0x3b67
	ioctlSetContainer = 0x3b68
	ioctlDeviceFD     = 0x3b6a
	ioctlDeviceInfo   = 0x3b6b
	ioctlRegionInfo   = 0x3b6c
	ioctlSetIRQs      = 0x3b6e
	ioctlDeviceReset  = 0x3b6f
	ioctlIOMMUInfo    = 0x3b70
	ioctlMapDMA       = 0x3b71
	ioctlUnmapDMA     = 0x3b72
	ioctlBindIOMMUFD  = 0x3b76
	ioctlAttachIOAS   = 0x3b77
)

const (
	deviceResets     = 1 << 0 // flags of deviceInfo
	devicePCI        = 1 << 1
	regionMaps       = 1 << 2 // flags of regionInfo
	regionBAR0       = 0
	regionConfig     = 7
	irqRequest       = 4 // the system wants the device back
	irqDataEventFD   = 1 << 2
	irqActionTrigger = 1 << 5
)

type deviceInfo struct{ argsz, flags, regions, irqs uint32 }

type regionInfo struct {
	argsz, flags, index, capOffset uint32
	size, offset                   uint64
}

type irqSet struct {
	argsz, flags, index, start, count uint32
	eventfd                           int32
}

// dma is the address space of a device.
type dma interface {
	mapDMA(b []byte) (iova uint64, err error)
	mapDMAAt(b []byte, iova uint64) error
	unmapDMA(iova, n uint64) error
	close() error
}

// device is a PCI function behind VFIO, as a Transport.
type device struct {
	name      string
	fd        int
	dma       dma
	resets    bool
	bar       regionInfo
	config    regionInfo
	request   *os.File // eventfd
	requested chan struct{}

	life   sync.RWMutex // held shared by whoever uses registers or fd, exclusively by Close
	mapped []byte       // the registers; nil where they cannot be mapped: then they are read and written by calls
	closed bool
}

var _ Transport = (*device)(nil)

func ioctlArg(fd int, request uintptr, arg unsafe.Pointer) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
		switch errno {
		case 0:
			return int(r), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// newDevice takes a device descriptor and its address space, both of which it closes, also when it fails.
func newDevice(name string, fd int, space dma) (*device, error) {
	d := &device{name: name, fd: fd, dma: space, requested: make(chan struct{})}
	if err := d.prepare(); err != nil {
		return nil, errors.Join(fmt.Errorf("nvme %s: %w", name, err), d.Close())
	}
	return d, nil
}

func (d *device) prepare() error {
	info := deviceInfo{argsz: uint32(unsafe.Sizeof(deviceInfo{}))}
	if _, err := ioctlArg(d.fd, ioctlDeviceInfo, unsafe.Pointer(&info)); err != nil {
		return fmt.Errorf("device information: %w", err)
	}
	if info.flags&devicePCI == 0 {
		return fmt.Errorf("no PCI device: %w", ErrUnsuitable)
	}
	d.resets = info.flags&deviceResets != 0
	for index, r := range map[uint32]*regionInfo{regionBAR0: &d.bar, regionConfig: &d.config} {
		*r = regionInfo{argsz: uint32(unsafe.Sizeof(regionInfo{})), index: index}
		if _, err := ioctlArg(d.fd, ioctlRegionInfo, unsafe.Pointer(r)); err != nil {
			return fmt.Errorf("region %d: %w", index, err)
		}
	}
	if d.bar.size < 2*nvme.RegDoorbells || d.bar.size > 1<<30 || d.config.size < 64 {
		return fmt.Errorf("registers of %d bytes, configuration of %d: %w", d.bar.size, d.config.size, ErrUnsuitable)
	}
	if err := d.setCommand(); err != nil {
		return err
	}
	if d.bar.flags&regionMaps != 0 {
		// Without it registers are slower, and nobody else can ring doorbells.
		m, err := unix.Mmap(d.fd, int64(d.bar.offset), int(d.bar.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err == nil {
			d.mapped = m
		}
	}
	return d.watch()
}

// The command register of a PCI function (PCI 3.0 section 6.2.2).
const (
	configCommand  = 4
	configClass    = 8 // with the revision: all ones only when nobody answers
	commandMemory  = 1 << 1
	commandMaster  = 1 << 2
	commandNoINTx  = 1 << 10
	classNVMe      = 0x010802
	classMask      = 0xffffff
	classOfConfig8 = 8 // bits of the revision below the class
)

// setCommand lets the device answer at its registers and reach memory, and keeps its interrupt line still.
func (d *device) setCommand() error {
	var b [2]byte
	if err := d.pread(b[:], d.config.offset+configCommand); err != nil {
		return fmt.Errorf("PCI command register: %w", err)
	}
	v := binary.LittleEndian.Uint16(b[:]) | commandMemory | commandMaster | commandNoINTx
	binary.LittleEndian.PutUint16(b[:], v)
	if n, err := unix.Pwrite(d.fd, b[:], int64(d.config.offset+configCommand)); err != nil || n != len(b) {
		return fmt.Errorf("PCI command register: %w", errors.Join(err, ErrUnsuitable))
	}
	return nil
}

func (d *device) pread(b []byte, off uint64) error {
	n, err := unix.Pread(d.fd, b, int64(off))
	if err == nil && n != len(b) {
		err = unix.EIO
	}
	return err
}

// watch waits for the system's wish to have the device back. Kernels without it have no orderly removal.
func (d *device) watch() error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	d.request = os.NewFile(uintptr(fd), "vfio request")
	set := irqSet{argsz: uint32(unsafe.Sizeof(irqSet{})), flags: irqDataEventFD | irqActionTrigger, index: irqRequest,
		count: 1, eventfd: int32(fd)}
	if _, err := ioctlArg(d.fd, ioctlSetIRQs, unsafe.Pointer(&set)); err != nil {
		return nil
	}
	go func() {
		var b [8]byte
		if _, err := d.request.Read(b[:]); err == nil { // Close ends it with an error
			close(d.requested)
		}
	}()
	return nil
}

func (d *device) Name() string                { return d.name }
func (d *device) RegisterBytes() uint32       { return uint32(d.bar.size) }
func (d *device) Requested() <-chan struct{}  { return d.requested }
func (d *device) inside(off uint32) bool      { return off%4 == 0 && uint64(off) <= d.bar.size-4 }
func (d *device) register(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&d.mapped[off])) }

func (d *device) Load32(off uint32) uint32 {
	d.life.RLock()
	defer d.life.RUnlock()
	var b [4]byte
	switch {
	case d.closed || !d.inside(off):
		return allOnes
	case d.mapped != nil:
		return nvme.LoadRegister(d.register(off))
	case d.pread(b[:], d.bar.offset+uint64(off)) != nil:
		return allOnes
	}
	return binary.LittleEndian.Uint32(b[:])
}

func (d *device) Store32(off, v uint32) {
	d.life.RLock()
	defer d.life.RUnlock()
	switch {
	case d.closed || !d.inside(off):
	case d.mapped != nil:
		nvme.StoreRegister(d.register(off), v)
	default:
		var b [4]byte
		binary.LittleEndian.PutUint32(b[:], v)
		// A write that does not arrive is one to a device that is gone: what is read next tells.
		_, _ = unix.Pwrite(d.fd, b[:], int64(d.bar.offset)+int64(off))
	}
}

func (d *device) Map(b []byte) (uint64, error) {
	d.life.RLock()
	defer d.life.RUnlock()
	if d.closed {
		return 0, ErrClosed
	}
	// The child of a fork must not share pages that the device writes to.
	_ = unix.Madvise(b, unix.MADV_DONTFORK) // memory of other kinds than ours may refuse
	iova, err := d.dma.mapDMA(b)
	return iova, explainLimit(err)
}

func (d *device) MapAt(b []byte, iova uint64) error {
	d.life.RLock()
	defer d.life.RUnlock()
	if d.closed {
		return ErrClosed
	}
	_ = unix.Madvise(b, unix.MADV_DONTFORK) // as above
	return explainLimit(d.dma.mapDMAAt(b, iova))
}

func explainLimit(err error) error {
	if errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("%w: memory for devices is locked: raise the limit (LimitMEMLOCK=infinity, 'ulimit -l unlimited')",
			err)
	}
	return err
}

func (d *device) Unmap(b []byte, iova uint64) error {
	d.life.RLock()
	defer d.life.RUnlock()
	if d.closed {
		return nil // Close has unmapped everything
	}
	return d.dma.unmapDMA(iova, uint64(len(b)))
}

func (d *device) Gone() bool {
	d.life.RLock()
	defer d.life.RUnlock()
	var b [4]byte
	return d.closed || d.pread(b[:], d.config.offset+configClass) != nil || binary.LittleEndian.Uint32(b[:]) == allOnes
}

func (d *device) Reset() error {
	d.life.RLock()
	defer d.life.RUnlock()
	switch {
	case d.closed:
		return ErrClosed
	case !d.resets:
		return fmt.Errorf("nvme %s: the kernel knows no way to reset it: %w", d.name, ErrUnsuitable)
	}
	if _, err := ioctlArg(d.fd, ioctlDeviceReset, nil); err != nil {
		return fmt.Errorf("nvme %s: function reset: %w", d.name, err)
	}
	return d.setCommand()
}

func (d *device) Doorbells() (fd int, offset int64, ok bool) {
	return d.fd, int64(d.bar.offset) + nvme.RegDoorbells, d.mapped != nil
}

// Close ends the mappings before the device's descriptor: the device reaches nothing by then.
func (d *device) Close() error {
	d.life.Lock()
	defer d.life.Unlock()
	if d.closed {
		return fmt.Errorf("nvme %s: %w", d.name, ErrClosed)
	}
	d.closed = true
	var errs []error
	if d.request != nil {
		errs = append(errs, d.request.Close())
	}
	if d.mapped != nil {
		errs = append(errs, unix.Munmap(d.mapped))
	}
	errs = append(errs, unix.Close(d.fd), d.dma.close())
	return errors.Join(errs...)
}

// openNode opens a device node of VFIO and says what its errors mean.
func openNode(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, unix.EBUSY):
		return -1, fmt.Errorf("%s: %w", path, drive.ErrBusy)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return -1, fmt.Errorf("%s: %w: be root, or give the node to the daemon's user", path, err)
	}
	return -1, fmt.Errorf("%s: %w", path, err)
}

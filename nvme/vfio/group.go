package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	apiVersion      = 0
	iommuType1v2    = 3
	groupViable     = 1 << 0
	iommuInfoCaps   = 1 << 1
	capIOVARanges   = 1
	dmaRead         = 1 << 0
	dmaWrite        = 1 << 1
	iommuInfoBytes  = 4096
	iommuInfoHeader = 24
)

type groupStatus struct{ argsz, flags uint32 }

type dmaMap struct {
	argsz, flags      uint32
	vaddr, iova, size uint64
}

type dmaUnmap struct {
	argsz, flags uint32
	iova, size   uint64
}

// group is an IOMMU group in a container of its own: one address space for all of its devices. The kernel lets a group
// be opened once, so that devices of one group share it.
type group struct {
	machine   *Machine
	number    string
	fd        int
	container int
	iovas     *iovas

	mu     sync.Mutex            // serializes changes of the mappings
	common map[uint64]*commonMap // by address: what mapDMAAt mapped
	users  int                   // guarded by machine.groupsMu
}

// commonMap is memory that several devices of the group may have asked for.
type commonMap struct {
	at           uintptr
	bytes, users int
}

// openGroup opens a group, or shares one that is open.
func (m *Machine) openGroup(number string) (*group, error) {
	m.groupsMu.Lock()
	defer m.groupsMu.Unlock()
	if g := m.groups[number]; g != nil {
		g.users++
		return g, nil
	}
	g := &group{machine: m, number: number, fd: -1, container: -1, users: 1, common: map[uint64]*commonMap{}}
	if err := g.open(); err != nil {
		return nil, errors.Join(err, g.closeDescriptors())
	}
	m.groups[number] = g
	return g, nil
}

func (g *group) open() (err error) {
	dir := filepath.Join(g.machine.dev, "vfio")
	if g.container, err = openNode(filepath.Join(dir, "vfio")); err != nil {
		return fmt.Errorf("%w (is the module vfio_iommu_type1 loaded?)", err)
	}
	if v, err := ioctlInt(g.container, ioctlAPIVersion, 0); err != nil || v != apiVersion {
		return fmt.Errorf("VFIO version %d, want %d: %w", v, apiVersion, errors.Join(ErrUnsuitable, err))
	}
	if v, err := ioctlInt(g.container, ioctlExtension, iommuType1v2); err != nil || v == 0 {
		return fmt.Errorf("the kernel has no type 1 IOMMU for VFIO: %w", errors.Join(ErrUnsuitable, err))
	}
	if g.fd, err = openNode(filepath.Join(dir, g.number)); err != nil {
		return err
	}
	status := groupStatus{argsz: uint32(unsafe.Sizeof(groupStatus{}))}
	if _, err := ioctlArg(g.fd, ioctlGroupStatus, unsafe.Pointer(&status)); err != nil {
		return fmt.Errorf("IOMMU group %s: %w", g.number, err)
	}
	if status.flags&groupViable == 0 {
		return fmt.Errorf("IOMMU group %s: other devices of it are with drivers of the kernel: bind all of them to "+
			"vfio-pci, or put the drive into another slot: %w", g.number, ErrUnsuitable)
	}
	fd := int32(g.container)
	if _, err := ioctlArg(g.fd, ioctlSetContainer, unsafe.Pointer(&fd)); err != nil {
		return fmt.Errorf("IOMMU group %s: container: %w", g.number, err)
	}
	if _, err := ioctlInt(g.container, ioctlSetIOMMU, iommuType1v2); err != nil {
		return fmt.Errorf("IOMMU group %s: %w", g.number, err)
	}
	ranges, err := g.ranges()
	if err != nil {
		return err
	}
	g.iovas, err = newIOVAs(ranges)
	return err
}

func ioctlInt(fd int, request uintptr, arg uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}

// ranges asks which I/O addresses there are.
func (g *group) ranges() ([]span, error) {
	b := make([]byte, iommuInfoBytes)
	binary.LittleEndian.PutUint32(b, iommuInfoBytes)
	if _, err := ioctlArg(g.container, ioctlIOMMUInfo, unsafe.Pointer(&b[0])); err != nil {
		return nil, fmt.Errorf("IOMMU information: %w", err)
	}
	return parseIOMMUInfo(b)
}

// parseIOMMUInfo finds the ranges in struct vfio_iommu_type1_info and the capabilities behind it. Kernels that do not
// name them (before 5.6) are taken to have what every IOMMU has.
func parseIOMMUInfo(b []byte) ([]span, error) {
	le := binary.LittleEndian
	if len(b) < iommuInfoHeader {
		return nil, fmt.Errorf("IOMMU information of %d bytes: %w", len(b), ErrUnsuitable)
	}
	if le.Uint32(b[4:])&iommuInfoCaps == 0 {
		return []span{{0, 0xfedfffff}}, nil // below the interrupts' range, and within 32 bits
	}
	// Capabilities are a list by offsets, which only grow: a loop ends.
	last := uint32(0)
	for at := le.Uint32(b[16:]); at != 0; {
		if at <= last || uint64(at)+8 > uint64(len(b)) {
			return nil, fmt.Errorf("IOMMU information: capability at %d of %d bytes: %w", at, len(b), ErrUnsuitable)
		}
		c := b[at:]
		if le.Uint16(c) == capIOVARanges {
			if len(c) < 16 || uint64(len(c)-16) < 16*uint64(le.Uint32(c[8:])) {
				return nil, fmt.Errorf("IOMMU information: address ranges are cut off: %w", ErrUnsuitable)
			}
			var out []span
			for i := range int(le.Uint32(c[8:])) {
				r := c[16+16*i:]
				out = append(out, span{le.Uint64(r), le.Uint64(r[8:])})
			}
			return out, nil
		}
		last, at = at, le.Uint32(c[4:])
	}
	return []span{{0, 0xfedfffff}}, nil
}

func (g *group) mapDMA(b []byte) (uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	iova, err := g.iovas.alloc(uint64(len(b)))
	if err != nil {
		return 0, err
	}
	return iova, g.mapTaken(b, iova)
}

// mapDMAAt maps at an address of the caller's choice. Devices of one group reach what any of them has mapped, so the
// same memory at the same address is only counted.
func (g *group) mapDMAAt(b []byte, iova uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m := g.common[iova]; m != nil && m.at == addressOf(b) && m.bytes == len(b) {
		m.users++
		return nil
	}
	if !g.iovas.take(iova, uint64(len(b))) {
		return fmt.Errorf("%w: %d bytes at %#x", ErrTaken, len(b), iova)
	}
	if err := g.mapTaken(b, iova); err != nil {
		return err
	}
	g.common[iova] = &commonMap{at: addressOf(b), bytes: len(b), users: 1}
	return nil
}

// mapTaken maps at an address that was taken from the free ones, and gives it back when it fails.
func (g *group) mapTaken(b []byte, iova uint64) error {
	arg := dmaMap{argsz: uint32(unsafe.Sizeof(dmaMap{})), flags: dmaRead | dmaWrite, vaddr: uint64(addressOf(b)),
		iova: iova, size: uint64(len(b))}
	if _, err := ioctlArg(g.container, ioctlMapDMA, unsafe.Pointer(&arg)); err != nil {
		g.iovas.release(iova, uint64(len(b)))
		return fmt.Errorf("map %d bytes for devices: %w", len(b), err)
	}
	return nil
}

func (g *group) unmapDMA(iova, n uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m := g.common[iova]; m != nil {
		if m.users--; m.users > 0 {
			return nil
		}
		delete(g.common, iova)
	}
	arg := dmaUnmap{argsz: uint32(unsafe.Sizeof(dmaUnmap{})), iova: iova, size: n}
	if _, err := ioctlArg(g.container, ioctlUnmapDMA, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("unmap %d bytes at %#x: %w", n, iova, err)
	}
	g.iovas.release(iova, n)
	if arg.size != n {
		return fmt.Errorf("unmap %d bytes at %#x: only %d were mapped: %w", n, iova, arg.size, ErrUnsuitable)
	}
	return nil
}

// release gives one user's share back; the last one closes the group, which ends its mappings.
func (g *group) release() error {
	g.machine.groupsMu.Lock()
	defer g.machine.groupsMu.Unlock()
	if g.users--; g.users > 0 {
		return nil
	}
	delete(g.machine.groups, g.number)
	return g.closeDescriptors()
}

func (g *group) closeDescriptors() error {
	var errs []error
	for _, fd := range []int{g.fd, g.container} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// groupSpace is one device's part of a group's address space: what it mapped goes with it.
type groupSpace struct {
	g      *group
	mu     sync.Mutex
	mapped map[uint64]uint64 // bytes by address
}

func (s *groupSpace) mapDMA(b []byte) (uint64, error) {
	iova, err := s.g.mapDMA(b)
	if err == nil {
		s.mu.Lock()
		s.mapped[iova] = uint64(len(b))
		s.mu.Unlock()
	}
	return iova, err
}

func (s *groupSpace) mapDMAAt(b []byte, iova uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, twice := s.mapped[iova]; twice {
		return fmt.Errorf("%w: by this device, at %#x", ErrTaken, iova)
	}
	err := s.g.mapDMAAt(b, iova)
	if err == nil {
		s.mapped[iova] = uint64(len(b))
	}
	return err
}

func (s *groupSpace) unmapDMA(iova, n uint64) error {
	if err := s.g.unmapDMA(iova, n); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.mapped, iova)
	s.mu.Unlock()
	return nil
}

func (s *groupSpace) close() error {
	var errs []error
	for iova, n := range s.mapped {
		errs = append(errs, s.g.unmapDMA(iova, n))
	}
	return errors.Join(append(errs, s.g.release())...)
}

// openByGroup opens a device by its IOMMU group.
func (m *Machine) openByGroup(d *Device) (*device, error) {
	if d.Group == "" {
		return nil, fmt.Errorf("nvme %s: no IOMMU group: switch the IOMMU on (intel_iommu=on or amd_iommu=on, and in the "+
			"firmware): %w", d.Address, ErrUnsuitable)
	}
	g, err := m.openGroup(d.Group)
	if err != nil {
		return nil, fmt.Errorf("nvme %s: %w", d.Address, err)
	}
	name, err := unix.BytePtrFromString(d.Address)
	if err != nil {
		return nil, errors.Join(err, g.release())
	}
	fd, err := ioctlArg(g.fd, ioctlDeviceFD, unsafe.Pointer(name))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nvme %s: device of IOMMU group %s: %w", d.Address, d.Group, err), g.release())
	}
	unix.CloseOnExec(fd)
	return newDevice(d.Address, fd, &groupSpace{g: g, mapped: map[uint64]uint64{}})
}

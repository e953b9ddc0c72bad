package daemon

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"tuttifs/ioctl"
	"tuttifs/nvme/vfio"
)

// Memory of others that SSDs are to reach, a GPU's mostly, comes as a descriptor. The daemon maps it, and maps that in
// the IOMMU for the SSDs: what of the two works is the driver's that gave the descriptor, and the kernel's. Nothing
// here reads or writes it.

// reachMost bounds such mappings of a process.
const reachMost = 1024

// reached is memory of others that the SSDs of a member reach. member.setup guards it.
type reached struct {
	memory  []byte
	buffers []*vfio.Buffer // for each controller
}

// File systems of the descriptors that are mapped: who maps a file of another one may wait for its owner for ever.
const (
	dmaBufMagic = 0x444d4142 // statfs of a dma-buf
	memfdMagic  = unix.TMPFS_MAGIC
)

// reach maps the memory of a descriptor for the member's SSDs, and says by what address they reach it.
func (m *member) reach(sent descriptors, n uint64) (address uint64, err error) {
	m.setup.Lock()
	defer m.setup.Unlock()
	page := uint64(os.Getpagesize())
	switch {
	case m.gone.Load():
		return 0, ioctl.ESTALE
	case len(sent) != 1 || n == 0 || n%page != 0 || n > 1<<46:
		return 0, ioctl.EINVAL
	case m.real == nil || slices.Contains(m.real.drives, false):
		return 0, ioctl.EINVAL // a virtual controller reaches the DMA memory only
	case len(m.real.reached) >= reachMost:
		return 0, ioctl.EMFILE
	}
	x, err := mapReached(sent[0], n, slices.Collect(maps.Keys(m.real.queues)))
	if err != nil {
		m.c.o.Logf("session %d, process %d: %v", m.leases.SessionID(), m.pid(), err)
		return 0, err
	}
	address = x.buffers[0].IOVA
	if m.real.reached == nil {
		m.real.reached = map[uint64]*reached{}
	}
	m.real.reached[address] = x
	m.use.Lock()
	m.shared.reached += n
	m.use.Unlock()
	return address, nil
}

func mapReached(fd int, n uint64, controllers []*vfio.Controller) (*reached, error) {
	var system unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(fd, &system), unix.Fstat(fd, &st)); err != nil {
		return nil, fmt.Errorf("daemon: memory for SSDs: %w: %w", ioctl.EINVAL, err)
	}
	if system.Type != dmaBufMagic && (system.Type != memfdMagic || st.Mode&unix.S_IFMT != unix.S_IFREG) {
		return nil, fmt.Errorf("daemon: memory for SSDs: %w: neither a dma-buf nor a memfd", ioctl.EINVAL)
	}
	b, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("daemon: %w: memory for SSDs cannot be mapped here, its driver says: %w", ioctl.ENODEV, err)
	}
	buffers, err := vfio.MapCommon(controllers, b)
	if err != nil {
		_ = unix.Munmap(b)
		return nil, fmt.Errorf("daemon: %w: memory for SSDs cannot be mapped in the IOMMU: %w", ioctl.ENODEV, err)
	}
	return &reached{b, buffers}, nil
}

// release ends a mapping. The process says that nothing names it any more; what an SSD still wrote there the IOMMU
// would refuse.
func (m *member) release(address uint64) error {
	m.setup.Lock()
	defer m.setup.Unlock()
	if m.gone.Load() || m.real == nil || m.real.reached[address] == nil {
		return ioctl.ENOENT
	}
	x := m.real.reached[address]
	delete(m.real.reached, address)
	m.use.Lock()
	m.shared.reached -= uint64(len(x.memory))
	m.use.Unlock()
	if !m.freeReached(x) {
		return ioctl.EIO
	}
	return nil
}

// freeReached unmaps memory. It stays mapped here where an SSD cannot be kept from it.
func (m *member) freeReached(x *reached) bool {
	free := true
	for _, b := range x.buffers {
		if err := b.Free(); err != nil {
			m.c.o.Logf("session %d, process %d: memory of others is kept: %v", m.leases.SessionID(), m.pid(), err)
			free = false
		}
	}
	if free {
		_ = unix.Munmap(x.memory)
	}
	return free
}

package nvmetest_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
)

// TestDoorbellsComeBeforeRegisters: what one rings in memory, and then has another write a register, reaches the
// controller in this order, whoever looks at the memory.
func TestDoorbellsComeBeforeRegisters(t *testing.T) {
	d, err := drive.NewMemory("ssd", 1<<20)
	require.NoError(t, err)
	controller, err := emu.New(emu.Config{Drive: d})
	require.NoError(t, err)
	transport := nvmetest.NewEmulated(controller)
	defer func() { require.NoError(t, transport.Close()) }()
	require.NoError(t, transport.ShareDoorbells())
	fd, offset, ok := transport.Doorbells()
	require.True(t, ok)
	page, err := unix.Mmap(fd, offset, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(page)) }()

	var mu sync.Mutex
	var seen []uint32
	transport.SetFaults(&nvmetest.Faults{Store: func(off, v uint32) bool {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, off, v)
		return true
	}})
	const bell = 8 // of the first I/O submission queue
	var wanted []uint32
	for i := range uint32(2000) {
		atomic.StoreUint32((*uint32)(unsafe.Pointer(&page[bell])), i)
		transport.Store32(nvme.RegAQA, i)
		wanted = append(wanted, nvme.RegDoorbells+bell, i, nvme.RegAQA, i)
	}
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, wanted, seen)
}

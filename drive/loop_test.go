package drive

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// loopDevice is a loop device over a new sparse file, with the given sector size. It detaches at the last close, so
// that not even a killed test leaves it behind.
func loopDevice(t *testing.T, size int64, sector uint32) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no loop devices here: %v", err)
	}
	defer unix.Close(ctl)
	path := filepath.Join(t.TempDir(), "backing")
	require.NoError(t, Create(path, size))
	backing, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(backing)

	for range 32 { // another process may take the free device first
		number, err := unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skipf("no free loop device: %v", err)
		}
		name := "/dev/loop" + strconv.Itoa(number)
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skipf("no node for a free loop device: %v", err)
		}
		config := unix.LoopConfig{Fd: uint32(backing), Size: sector}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		if err := unix.IoctlLoopConfigure(fd, &config); err != nil {
			_ = unix.Close(fd)
			if err == unix.EBUSY {
				continue
			}
			t.Skipf("loop device with %d-byte sectors: %v", sector, err)
		}
		// The descriptor keeps the device attached until the test ends.
		t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
		return name
	}
	t.Skip("loop devices are taken faster than this test can")
	return ""
}

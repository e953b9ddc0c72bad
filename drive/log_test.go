package drive

import (
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// The command as the kernel's header lays it out, byte by byte, but for the address.
func TestLogCommand(t *testing.T) {
	buf := make([]byte, 512)
	c := logCommand(0xc0, 0, buf)
	require.Equal(t, uint64(uintptr(unsafe.Pointer(&buf[0]))), c.addr)
	c.addr = 0
	want := [72]byte{
		0: 0x02, 4: 0xff, 5: 0xff, 6: 0xff, 7: 0xff, // opcode, all namespaces
		37: 2,                       // 512 bytes
		40: 0xc0, 41: 0x80, 42: 127, // page, retain events, 128 words less one
		64: 0x88, 65: 0x13, // 5000 ms
	}
	require.Equal(t, want, *(*[72]byte)(unsafe.Pointer(&c)))

	c = logCommand(0x22, 0x0301, buf[:64])
	c.addr = 0
	want = [72]byte{0: 0x02, 36: 64, 40: 0x22, 41: 0x80, 42: 15, 46: 0x01, 47: 0x03, 64: 0x88, 65: 0x13}
	require.Equal(t, want, *(*[72]byte)(unsafe.Pointer(&c)), "of an endurance group, not of namespaces")
	c = identifyCommand(5, buf)
	c.addr = 0
	require.Equal(t, [72]byte{0: 0x06, 4: 5, 37: 16, 64: 0x88, 65: 0x13}, *(*[72]byte)(unsafe.Pointer(&c)))
}

// Of a status it is said what it is; only where a log page was asked for may it mean that there is none.
func TestAdminError(t *testing.T) {
	require.NoError(t, adminError(0))
	require.NoError(t, noLog(adminError(0)))
	for status, is := range map[uintptr]nvme.Status{0x001: nvme.InvalidOpcode, 0x002: nvme.InvalidField,
		0x109: nvme.LogPageInvalid, 0x4109: nvme.LogPageInvalid, 0x6002: nvme.InvalidField, 0x4029: nvme.FDPDisabled} {
		err := adminError(status)
		require.ErrorIs(t, err, is)
		require.NotErrorIs(t, err, ErrNoLog)
		require.ErrorIs(t, noLog(err), ErrNoLog)
	}
	err := noLog(adminError(0x4006))
	require.ErrorIs(t, err, nvme.InternalError)
	require.NotErrorIs(t, err, ErrNoLog)
}

func TestNamespaceNames(t *testing.T) {
	for _, yes := range []string{
		"../../devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1",
		"../../devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2",
		"../../devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n12",
		"../../devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0c1n1",
	} {
		require.True(t, namespaceName.MatchString(yes), yes)
	}
	for _, no := range []string{
		"", "../../devices/virtual/block/loop0", "../../devices/virtual/block/dm-0", "../../devices/x/nvme0/sda",
		"../../devices/pci0000:00/nvme/nvme0", "../../devices/x/xnvme0n1",
	} {
		require.False(t, namespaceName.MatchString(no), no)
	}
}

// Files and memory have no log page, and say so rather than fail.
func TestReadLogElsewhere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	require.NoError(t, Create(path, 1<<20))
	f, err := Open(path, Options{})
	require.NoError(t, err)
	defer f.Close()
	m, err := NewMemory("m", 1<<20)
	require.NoError(t, err)
	defer m.Close()
	for _, d := range []Drive{f, m} {
		require.ErrorIs(t, ReadLog(d, 2, make([]byte, 512)), ErrNotNVMe)
	}
}

// Another kind of block device has none either, and is never sent the command.
func TestReadLogLoop(t *testing.T) {
	d, err := Open(loopDevice(t, 1<<20, 512), Options{})
	require.NoError(t, err)
	defer d.Close()
	require.ErrorIs(t, ReadLog(d, 2, make([]byte, 512)), ErrNotNVMe)
	require.ErrorIs(t, ReadLog(d, 2, nil), ErrRange)
	require.ErrorIs(t, ReadLog(d, 2, make([]byte, 6)), ErrRange)
}

package vfio_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// TestMapCommon: memory has one address for all controllers of a session, and nothing is left of what fails.
func TestMapCommon(t *testing.T) {
	one, two := &world{cfg: emu.Config{Drive: memoryDrive(t)}}, &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	controllers := []*vfio.Controller{one.open(t, vfio.Options{}), two.open(t, vfio.Options{})}
	defer controllers[0].Close()
	defer controllers[1].Close()
	before := []int{one.now.Mapped(), two.now.Mapped()}
	b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer unix.Munmap(b)

	alone, err := vfio.MapCommon(controllers[1:], b)
	require.NoError(t, err)
	both, err := vfio.MapCommon(controllers, b)
	require.NoError(t, err)
	require.Equal(t, both[0].IOVA, both[1].IOVA)
	require.NotEqual(t, alone[0].IOVA, both[0].IOVA, "the second one's address was taken")
	require.Less(t, both[0].IOVA+uint64(len(b)), uint64(1)<<39)

	part := both[1].Part(8192, nvme.QueueBytes(64))
	require.Equal(t, both[1].IOVA+8192, part.IOVA)
	p, err := controllers[1].NewPair(64, part)
	require.NoError(t, err)
	require.NoError(t, p.Delete())
	require.NoError(t, part.Free(), "it is no mapping of its own")

	for _, m := range append(alone, both...) {
		require.NoError(t, m.Free())
	}
	require.Equal(t, before, []int{one.now.Mapped(), two.now.Mapped()})
	_, err = vfio.MapCommon(controllers, b[:100])
	require.ErrorIs(t, err, vfio.ErrUnsuitable)
	require.NoError(t, two.now.Close())
	_, err = vfio.MapCommon(controllers, b)
	require.Error(t, err)
	require.Equal(t, before[0], one.now.Mapped(), "what the first one had mapped is not there any more")
}

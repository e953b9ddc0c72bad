package vfio_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

const slot = "0000:02:00.0"

// machineOf opens drives on virtual controllers.
func machineOf(t *testing.T, w *world) *vfio.Machine {
	m := vfio.NewMachine(t.TempDir(), t.TempDir(), t.TempDir())
	m.SetTransport(func(address string) (vfio.Transport, error) {
		require.Equal(t, slot, address)
		return w.transport(t), nil
	})
	return m
}

// TestSharing: drives on one controller share it, and lock its namespaces as files are locked.
func TestSharing(t *testing.T) {
	m := machineOf(t, &world{cfg: emu.Config{Drive: memoryDrive(t)}})
	one, err := m.OpenDrive(slot, drive.Options{ReadOnly: true})
	require.NoError(t, err)
	require.Equal(t, slot, one.Name())
	two, err := m.OpenDrive(slot+"/1", drive.Options{ReadOnly: true})
	require.NoError(t, err, "readers share")
	require.Equal(t, 1, m.OpenControllers())
	_, err = m.OpenDrive(slot+"/1", drive.Options{})
	require.ErrorIs(t, err, drive.ErrBusy)
	look, err := m.OpenDrive(slot, drive.Options{NoLock: true, ReadOnly: true})
	require.NoError(t, err)
	_, err = m.OpenDrive(slot+"/2", drive.Options{})
	require.ErrorIs(t, err, nvme.InvalidNamespace)
	require.NoError(t, one.Close())
	require.NoError(t, two.Close())
	writer, err := m.OpenDrive(slot, drive.Options{})
	require.NoError(t, err)
	_, err = m.OpenDrive(slot, drive.Options{ReadOnly: true})
	require.ErrorIs(t, err, drive.ErrBusy)
	require.NoError(t, writer.WriteAt([]byte("kept"), 4096))
	require.NoError(t, look.Close())
	require.NoError(t, writer.Close())
	require.Zero(t, m.OpenControllers(), "the last one closes it")
	_, err = m.OpenDrive(slot+"/9", drive.Options{})
	require.Error(t, err)
	require.Zero(t, m.OpenControllers())
	again, err := m.OpenDrive(slot, drive.Options{ReadOnly: true})
	require.NoError(t, err)
	b := make([]byte, 4)
	require.NoError(t, again.ReadAt(b, 4096))
	require.Equal(t, "kept", string(b))
	require.NoError(t, again.Close())
}

// TestOrderlyRemoval: when the system wants a controller back it gets it, and its drives are as good as taken out.
func TestOrderlyRemoval(t *testing.T) {
	w := &world{cfg: emu.Config{Drive: memoryDrive(t)}}
	m := machineOf(t, w)
	d, err := m.OpenDrive(slot, drive.Options{})
	require.NoError(t, err)
	require.NoError(t, d.Flush())
	w.now.Request()
	require.Eventually(t, w.now.Gone, 20*time.Second, time.Millisecond, "it was let go of")
	b := make([]byte, 4096)
	require.ErrorIs(t, d.ReadAt(b, 0), drive.ErrShrunk)
	require.ErrorIs(t, d.WriteAt(b, 0), drive.ErrShrunk)
	require.Error(t, d.Flush())

	// It is put back while its drive is still open, as a volume's lost drive is.
	again, err := m.OpenDrive(slot, drive.Options{})
	require.NoError(t, err)
	require.NoError(t, again.ReadAt(b, 0))
	require.ErrorIs(t, d.ReadAt(b, 0), drive.ErrShrunk)
	require.NoError(t, d.Close())
	require.NoError(t, again.ReadAt(b, 0))
	require.Equal(t, 1, m.OpenControllers())
	require.NoError(t, again.Close())
	require.Zero(t, m.OpenControllers())
	require.Zero(t, w.now.Mapped())
}

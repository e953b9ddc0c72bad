package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
)

// storing are options with a store buffer.
func storing(o SessionOptions, policy gio.StorePolicy) SessionOptions {
	o.StoreBytes, o.StorePolicy = StoreLeast, policy
	o.DMABytes += o.StoreBytes
	return o
}

// TestMountStoreBuffer: what sessions store by way of a store buffer is there for others, whatever the executor.
func TestMountStoreBuffer(t *testing.T) {
	f := startFake(t)
	v := newVolume(t)
	cpu := newUser(t, v, storing(mountOptions, gio.StoreBlock), nil)
	require.Contains(t, cpu.session.Describe(), "2 lanes on")
	require.Contains(t, cpu.session.Describe(), "store buffer 16 MiB of it with 2 more lanes, policy block")
	gpu := newUser(t, v, storing(gpuMountOptions(f, ""), gio.StoreRefuse), nil)
	require.Contains(t, gpu.session.Describe(), "with 4 more lanes, policy refuse")
	keys, items := chain(1, 30)
	cpu.store(1, keys, items, true)
	more, moreItems := chain(2, 30)
	gpu.store(2, more, moreItems, false)
	cpu.restore(3, 0, more, false)
	gpu.restore(4, 1, keys, false)
	for _, u := range []*user{cpu, gpu} {
		s := u.session.Ring().StoreStats()
		require.EqualValues(t, StoreLeast, s.Size)
		require.Positive(t, s.StoredBytes)
		require.Zero(t, s.Fill)
		require.Zero(t, s.Objects)
		require.Zero(t, s.Refused)
	}
}

// TestMountStoreLimits: a store buffer that the mount, or an executor, cannot give is refused with the reason.
func TestMountStoreLimits(t *testing.T) {
	f := startFake(t)
	v := newVolume(t)
	m, err := Open(v.mount())
	require.NoError(t, err)
	hello := m.Hello()
	o := mountOptions
	o.DMABytes, o.StoreBytes = 0, int(hello.DMAMax)
	_, err = m.NewSession(o)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "the mount gives a process at most")
	o = storing(mountOptions, gio.StoreBlock)
	o.Lanes = int(hello.LanesMax)
	_, err = m.NewSession(o)
	require.ErrorIs(t, err, ErrInvalid)
	o = storing(gpuMountOptions(f, ""), gio.StoreBlock)
	o.GPU.Polling = true
	_, err = m.NewSession(o)
	require.ErrorContains(t, err, "the polling executor has no store buffer")
	require.NoError(t, m.Close())
}

package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/gio"
)

func TestSessionDefaults(t *testing.T) {
	cpu := SessionOptions{}.withDefaults(false)
	require.Equal(t, 4, cpu.Lanes)
	require.Equal(t, 256, cpu.Depth)
	require.Equal(t, 256<<20, cpu.DMABytes)
	require.Zero(t, cpu.BounceBytes, "direct only")
	asked := &GPUOptions{}
	gpu := SessionOptions{GPU: asked}.withDefaults(true)
	require.Equal(t, 8, gpu.Lanes)
	require.Equal(t, 1024, gpu.Depth)
	require.Equal(t, 64<<20, gpu.BounceBytes)
	require.Equal(t, 88<<20, gpu.DMABytes)
	require.Equal(t, gpuScratchBytes, scratchOf(gpu.DMABytes-gpu.BounceBytes), "no less than it can use")
	require.Equal(t, 8192, scratchOf(16384))
	require.Equal(t, gio.StagingDefault, gpu.GPU.StagingBytes)
	require.Zero(t, asked.StagingBytes, "the caller's own stay as they are")
	auto := SessionOptions{GPU: asked}.withDefaults(false)
	require.Equal(t, 64<<20, auto.BounceBytes, "what a GPU session can register, its CPU stand-in can")
	stores := SessionOptions{StoreBytes: 64 << 20, GPU: asked}.withDefaults(true)
	require.Equal(t, 152<<20, stores.DMABytes)
	own := SessionOptions{GPU: &GPUOptions{StagingBytes: 5}, Lanes: 1, Depth: 2, BounceBytes: 3, DMABytes: 4}
	require.Equal(t, own, func() SessionOptions {
		o := own.withDefaults(true)
		o.ArenaBytes, o.Deadline = 0, 0
		return o
	}())
	for _, bad := range []SessionOptions{{Lanes: -1}, {BounceBytes: 2, DMABytes: 1},
		{GPU: &GPUOptions{StagingBytes: -1}}, {GPU: &GPUOptions{PollSMs: -1}}, {StoreBytes: -1}, {StoreBytes: 1 << 20},
		{StoreBytes: StoreLeast + 1}, {StorePolicy: gio.StoreRefuse}, {StoreBytes: StoreLeast, StorePolicy: 7},
		{StoreBytes: StoreLeast, DMABytes: StoreLeast - 1}} {
		require.ErrorIs(t, bad.validate(), ErrInvalid)
	}
}

// TestMountNoGPU: without a GPU a session is refused clearly, or made on the CPU where that was allowed.
func TestMountNoGPU(t *testing.T) {
	if _, err := cuda.Open(); err == nil {
		t.Skip("there is a GPU here")
	}
	v := newVolume(t)
	o := mountOptions
	o.GPU = &GPUOptions{}
	m, err := Open(v.mount())
	require.NoError(t, err)
	_, err = m.NewSession(o)
	require.ErrorIs(t, err, ErrNoGPU)
	require.NoError(t, m.Close())
	o.GPU.Auto = true
	u := newUser(t, v, o, nil)
	require.Nil(t, u.session.GPU())
	require.Nil(t, u.session.CUDA())
	require.Contains(t, u.session.Describe(), "CPU executor")
	require.Contains(t, u.session.Describe(), "bounce 1 MiB of 16 MiB")
	keys, items := chain(1, 5)
	u.store(1, keys, items, false)
	u.restore(2, 0, keys, true)
	stats, err := u.pool.Stats()
	require.NoError(t, err)
	require.EqualValues(t, 5, stats.Files)
}

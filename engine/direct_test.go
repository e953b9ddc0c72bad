package engine

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/gio"
)

// otherDMA is the session's way to the GPU's memory, changed.
type otherDMA struct {
	DeviceDMA
	off   uint64 // added to addresses of blocks, which are asked for before those of tables
	err   error
	calls int
}

func (d *otherDMA) Reach(p cuda.Pointer, n uint64) (uint64, error) {
	if d.err != nil {
		return 0, d.err
	}
	address, err := d.DeviceDMA.Reach(p, n)
	if d.calls++; d.calls%2 == 1 {
		address += d.off
	}
	return address, err
}

func (d *otherDMA) Release(p cuda.Pointer, n uint64) { d.DeviceDMA.Release(p, n) }

// directOptions are of a session whose SSDs may reach the fake's memory.
func directOptions(f *cudatest.Fake) SessionOptions {
	o := realMountOptions
	o.DMABytes = 32 << 20
	o.GPU = &GPUOptions{Driver: f.Driver(), StagingBytes: 8 << 20}
	return o
}

// TestMountDirect: SSDs read and write device memory themselves once that was tried, and nothing of it stays mapped.
func TestMountDirect(t *testing.T) {
	f := startFake(t)
	v := newVolumeIn(t, "", 64<<20, ssdWay)
	u := newUser(t, v, directOptions(f), nil)
	require.Contains(t, u.session.Describe(), "GPU memory: direct by a mapping of its dma-buf")
	require.Zero(t, v.sessions().Processes[0].ReachedBytes, "what it was tried with is gone")
	spec := mountSpec() // one of the SSDs takes no SGLs, and so only whole pages
	spec.Name = "pages"
	for i := range spec.Geometry.Objects {
		spec.Geometry.Objects[i].Runs[0].Bytes = 16384
	}
	var err error
	u.pool, err = u.session.OpenPool(spec)
	require.NoError(t, err)
	l := u.deviceLayer(0, 0, 4)
	require.True(t, l.memory.Direct())
	require.Positive(t, v.sessions().Processes[0].ReachedBytes)
	l.free()
	require.Zero(t, v.sessions().Processes[0].ReachedBytes)
	keys, items := chain(1, 20)
	u.storeFromDevice(1, keys, items)
	u.restoreToDevice(2, 0, keys)
	u.restoreToDevice(3, 1, keys)
	require.NoError(t, u.session.Close())
	require.Equal(t, cudatest.Counts{}, f.Live())

	o := directOptions(f)
	o.KeepBytes = KeepLeast
	u = newUser(t, v, o, nil)
	require.Contains(t, u.session.Describe(), "GPU memory: bounced, blocks that are declined are kept in host memory")
	require.NoError(t, u.session.Close())
}

// TestMountBounces: where SSDs do not reach device memory, or reach another, it is bounced, and the session says why.
func TestMountBounces(t *testing.T) {
	for _, x := range []struct {
		name   string
		config func(c *cudatest.Config)
		dma    *otherDMA
		says   string
	}{
		{"no dma-buf", func(c *cudatest.Config) { c.NoDMABuf = true }, nil, "SSDs are given no address of it: "},
		{"refused", nil, &otherDMA{err: errors.New("no such way")}, "no such way"},
		{"elsewhere", nil, &otherDMA{off: 1 << 20}, "a block that was written from it and read back to it is another one"},
		{"nowhere", nil, &otherDMA{off: 1 << 40}, gio.ErrStatus.Error()},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := cudatest.Config{Kernels: cudatest.Kernels(), Devices: 1}
			if x.config != nil {
				x.config(&c)
			}
			f := cudatest.Start(t, c)
			v := newVolumeIn(t, "", 64<<20, ssdWay)
			o := directOptions(f)
			if x.dma != nil {
				o.GPU.DMA = x.dma
			}
			m, err := Open(v.mount())
			require.NoError(t, err)
			defer m.Close()
			s, err := m.NewSession(o)
			require.NoError(t, err)
			defer s.Close()
			u := &user{t: t, mount: m, session: s}
			if x.dma != nil {
				x.dma.DeviceDMA = &mappedDMA{context: s.gpu.context, attach: s.attach}
			}
			require.Contains(t, s.Describe(), "GPU memory: bounced, no pool was opened yet")
			u.pool, err = s.OpenPool(mountSpec())
			require.NoError(t, err)
			require.Contains(t, s.Describe(), "GPU memory: bounced, drive ")
			require.Contains(t, s.Describe(), x.says)
			l := u.deviceLayer(0, 0, 4)
			require.False(t, l.memory.Direct())
			l.free()
			keys, items := chain(1, 5)
			u.storeFromDevice(1, keys, items)
			u.restoreToDevice(2, 1, keys)
			require.Zero(t, v.sessions().Processes[0].ReachedBytes)
			require.NoError(t, s.Close())
			require.Equal(t, cudatest.Counts{}, f.Live())
		})
	}
}

package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda/cudatest"
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

// TestMountStoresEndWithTheDaemon: what lies in a store buffer when the daemon is killed is not called stored, every
// wait for it ends, and what was committed before is there afterwards.
func TestMountStoresEndWithTheDaemon(t *testing.T) {
	f := startFake(t)
	for name, o := range map[string]SessionOptions{
		"CPU": storing(mountOptions, gio.StoreBlock), "GPU": storing(gpuMountOptions(f, ""), gio.StoreBlock),
	} {
		t.Run(name, func(t *testing.T) {
			v := newVolume(t)
			u := newUser(t, v, o, nil)
			keys, items := chain(1, 20)
			u.store(1, keys, items, false)
			_, more := chain(2, 20)
			grants := make([]Grant, 20)
			_, err := u.pool.Reserve(0, 2, more, false, grants)
			require.NoError(t, err)
			var buffers []*layerBuffer
			for layer := range uint16(3) {
				buffers = append(buffers, u.buffer(layer, 0, len(grants), false))
			}
			stores := make(chan struct{}, 1)
			done := make(chan error, 1)
			go func() {
				for {
					if err := u.storeAgain(grants, buffers); err != nil {
						done <- err
						return
					}
					select {
					case stores <- struct{}{}:
					default:
					}
				}
			}()
			<-stores
			v.kill()
			endsWithDaemon(t, done)
			_ = u.session.Close() // the mount is gone; what matters is that it ends, and what it leaves
			require.Equal(t, cudatest.Counts{}, f.Live())
			v.start()
			again := newUser(t, v, mountOptions, nil)
			again.restore(1, 0, keys, true)
			n, err := again.pool.Peek(0, []Key{more[0].Key})
			require.NoError(t, err)
			require.Zero(t, n)
		})
	}
}

// storeAgain stores a rank of reserved slots once more.
func (u *user) storeAgain(grants []Grant, buffers []*layerBuffer) error {
	l, err := u.session.Ring().CreateLayers(u.pool.Map(), 0, slotsOf(grants))
	if err != nil {
		return err
	}
	defer l.Close()
	for layer, b := range buffers {
		ticket, err := l.StoreLayer(uint16(layer), b.desc)
		if err != nil {
			return err
		}
		if err := ticket.Wait(); err != nil {
			return err
		}
	}
	return l.Finish()
}

package engine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
)

// ssdWay makes the daemon of a volume drive it by nvme/vfio, with virtual controllers for hardware, and allow engines
// queue pairs of theirs.
const ssdWay = emu.Backend("ssd")

// useSSDs has the daemon drive the drive files of a directory as SSDs.
func useSSDs(o *daemon.Options, where string) (err error) {
	o.Paths = nvmetest.Addresses(3)
	drive.OpenAddress = nvmetest.SSDs(where)
	o.Real, err = daemon.ParseTrust(fmt.Sprint(os.Geteuid()))
	return err
}

var realMountOptions = SessionOptions{Lanes: 3, Depth: 32, DMABytes: 8 << 20, BounceBytes: 2 << 20,
	Deadline: 20 * time.Second, Real: true}

// checkReal: what went by queue pairs of the SSDs is counted, and met nothing of the other direction.
func (v *volume) checkReal() {
	v.t.Helper()
	b, err := os.ReadFile(filepath.Join(v.mount(), ".tuttifs", "stats"))
	require.NoError(v.t, err)
	var doc daemon.StatsDocument
	require.NoError(v.t, json.Unmarshal(b, &doc))
	require.Len(v.t, doc.Real, 3)
	for index, r := range doc.Real {
		require.Positive(v.t, r.BytesRead, index)
		require.Positive(v.t, r.BytesWritten, index)
		require.GreaterOrEqual(v.t, r.BytesRead, 4096*r.Reads)
		require.Positive(v.t, r.Pairs)
		require.Zero(v.t, r.FailedReads+r.FailedWrites+r.PassedBy)
		require.Zero(v.t, doc.Phases[index].Mixed)
		require.GreaterOrEqual(v.t, doc.Wear[index].PayloadWritten, r.BytesWritten)
	}
}

// TestMountReal: an engine on queue pairs of SSDs stores and restores, direct and bounced, beside one that is mediated;
// and it outlives its daemon.
func TestMountReal(t *testing.T) {
	v := newVolumeIn(t, "", 64<<20, ssdWay)
	u := newUser(t, v, realMountOptions, nil)
	require.Contains(t, u.session.Describe(), "real queue pairs of all drives: 3 lanes on 3 drives, ")
	require.Contains(t, u.session.Describe(), "PRP", "one of them has no SGLs")
	direct, items := chain(1, 9)
	u.store(1, direct, items, true)
	bounced, items := chain(2, 5)
	u.store(2, bounced, items, false)
	u.restore(1, 0, direct, false)
	u.restore(2, 1, bounced, true)
	written, saved := u.session.Ring().Doorbells()
	require.Positive(t, written)
	require.Positive(t, saved, "two of the three have doorbell buffers")

	mediated := newUser(t, v, mountOptions, nil)
	require.Contains(t, mediated.session.Describe(), "mediated: ")
	mediated.restore(1, 1, direct, true)
	other, items := chain(3, 4)
	mediated.store(1, other, items, true)
	u.restore(3, 0, other, true)

	large := mountSpec()
	large.Name = "large"
	large.Geometry.Objects[0].Runs[0].Bytes = 256 << 10
	_, err := u.session.OpenPool(large)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "commands of 131072")

	v.checkReal()
	_ = u.session.Close()
	u = newUser(t, v, realMountOptions, nil)
	u.restore(1, 0, direct, true)
	v.kill()
	require.Eventually(t, func() bool {
		_, err := u.session.Ring().Issue(false, u.pool.Map(), nil)
		return err != nil
	}, 15*time.Second, 10*time.Millisecond)
	_, err = u.session.Ring().Issue(false, u.pool.Map(), nil)
	require.ErrorIs(t, err, gio.ErrDead)
	tail, _, err := u.session.attach.Bells(0, 0)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return *tail == 0 }, 10*time.Second, time.Millisecond,
		"memory of nobody's is there")
	*tail = 7 // and nobody hears it
	v.start()
	again := newUser(t, v, realMountOptions, nil)
	again.restore(1, 1, direct, true)
	again.restore(2, 0, other, false)
}

// TestGPUProcessRealPairs: a GPU builds commands for queue pairs of the SSDs themselves, whose doorbells the host
// rings; and the session outlives its daemon.
func TestGPUProcessRealPairs(t *testing.T) {
	for _, k := range []gpuKind{{real: false}, {real: true}} {
		t.Run(k.String(), func(t *testing.T) {
			o := realMountOptions
			o.GPU = k.options(t).GPU
			o.DMABytes, o.StoreBytes = 32<<20, StoreLeast
			v := newVolumeIn(t, "", 64<<20, ssdWay)
			gpu := newUser(t, v, o, nil)
			require.Contains(t, gpu.session.Describe(), "GPU ring on device")
			require.Contains(t, gpu.session.Describe(), "real queue pairs of all drives: 3 lanes on 3 drives, ")
			t.Log(gpu.session.Describe())
			if !k.real {
				require.Contains(t, gpu.session.Describe(), "GPU memory: direct by a mapping of its dma-buf")
			}
			keys, items := chain(1, 20)
			gpu.storeFromDevice(1, keys, items)
			gpu.restoreToDevice(2, 0, keys)
			gpu.restore(3, 1, keys, true)
			cpu := newUser(t, v, mountOptions, nil)
			cpu.restore(1, 1, keys, false)
			more, moreItems := chain(2, 9)
			cpu.store(2, more, moreItems, true)
			gpu.restoreToDevice(4, 1, more)
			v.checkReal()
			v.kill()
			require.Eventually(t, func() bool {
				_, err := gpu.session.Ring().Issue(false, gpu.pool.Map(), nil)
				return err != nil
			}, 15*time.Second, 10*time.Millisecond)
			_, err := gpu.session.Ring().Issue(false, gpu.pool.Map(), nil)
			require.ErrorIs(t, err, gio.ErrDead)
			_ = gpu.session.Close()
			v.start()
			again := newUser(t, v, o, nil)
			again.restoreToDevice(1, 1, keys)
		})
	}
}

// TestMountRealIsRefused: a mount gives nobody queue pairs of its own accord, and has none where it drives no SSD.
func TestMountRealIsRefused(t *testing.T) {
	v := newVolume(t)
	m, err := Open(v.mount())
	require.NoError(t, err)
	defer m.Close()
	_, err = m.NewSession(realMountOptions)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "mount -o real=")
	gpu := realMountOptions
	gpu.GPU = &GPUOptions{Polling: true}
	_, err = m.NewSession(gpu)
	require.ErrorIs(t, err, ErrInvalid)
}

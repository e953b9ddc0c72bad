package emu

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// A block device behind the controller: the same bytes, deallocation and zeroes included.
func TestLoopDevice(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip("no loop devices here: ", err)
	}
	path := filepath.Join(t.TempDir(), "image")
	require.NoError(t, drive.Create(path, 16<<20))
	out, err := exec.Command("losetup", "--find", "--show", path).CombinedOutput()
	if err != nil {
		t.Skipf("losetup: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { _ = exec.Command("losetup", "--detach", dev).Run() })
	d, err := drive.Open(dev, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	for _, b := range []Backend{URing, Pread} {
		c, err := New(Config{Drive: d, SGL: true})
		require.NoError(t, err)
		p, err := NewPoller(PollerConfig{Backend: b})
		if b == URing && err != nil {
			continue
		}
		require.NoError(t, err)
		h := attachHost(t, c, p, nil, 16, 1<<20)
		n := uint32(256<<10) >> c.shift()
		fill(h.dma[:256<<10], uint64(len(b)))
		e := h.rw(true, 1, uint64(n), n, 0)
		e.CDW12 |= nvme.RWForceUnit
		require.Equal(t, nvme.Success, h.do(e))
		require.Equal(t, nvme.Success, h.do(h.rw(false, 2, uint64(n), n, 512<<10)))
		require.True(t, bytes.Equal(h.dma[:256<<10], h.dma[512<<10:][:256<<10]))
		require.Equal(t, nvme.Success, h.do(flush(3)))
		nvme.BuildWriteZeroes(&e, 4, 1, uint64(n), n/2, true)
		require.Equal(t, nvme.Success, h.do(e))
		require.Equal(t, nvme.Success, h.do(h.rw(false, 5, uint64(n), n, 512<<10)))
		require.Equal(t, make([]byte, 128<<10), h.dma[512<<10:][:128<<10])
		require.True(t, bytes.Equal(h.dma[128<<10:256<<10], h.dma[640<<10:][:128<<10]))
		nvme.BuildDSM(&e, 6, 1, 1)
		e.DPTR[0] = dmaBase + 960<<10
		copy(words(h.dma[960<<10:]), []uint64{uint64(n) << 32, uint64(n)})
		require.Equal(t, nvme.Success, h.do(e))
		p.Stop()
	}
}

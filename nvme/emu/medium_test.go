package emu

import (
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/nvme"
)

// fixedMedium serves at a rate, with the same latency for every command.
func fixedMedium(bytesPerSecond int64, latency time.Duration) *drivemodel.Medium {
	us := float64(latency) / 1e3
	d := &drivemodel.Direction{BytesPerSecond: bytesPerSecond, Latency: drivemodel.Latency{MinUS: us, P50US: us,
		P90US: us, P99US: us, P999US: us, MaxUS: us}}
	return drivemodel.NewMedium(&drivemodel.Profile{Version: drivemodel.Version, Name: "fixed", Of: "a test", Read: d,
		Write: d}, 0)
}

// No command completes before the modelled drive says so, whatever the way to the real one, and all do.
func TestModelledDrive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drive")
	require.NoError(t, drive.Create(path, 4<<20))
	file, err := drive.Open(path, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = file.Close() })
	for i, d := range []drive.Drive{memoryDrive(t, 4<<20), file, memoryDrive(t, 4<<20), file} {
		in := i >= 2
		for _, write := range []bool{false, true} {
			const n, bytes, rate = 64, 16 << 10, 100_000_000
			blocks := bytes / d.LBABytes()
			m := fixedMedium(rate, time.Millisecond)
			h := newHost(t, Config{Drive: d, Medium: m, InOrder: in}, 128, 2<<20)
			for i := range n {
				h.put(h.rw(write, uint16(i), uint64(i*blocks), uint32(blocks), 0))
			}
			least := time.Duration(n * bytes * int64(time.Second) / rate)
			begin := time.Now()
			h.ring()
			for _, c := range h.wait(n) {
				require.True(t, c.status.OK())
			}
			require.GreaterOrEqual(t, time.Since(begin), least+time.Millisecond)
		}
	}
}

// What moves no data is not held back, nor what was refused before it moved any.
func TestModelledDriveAndOtherCommands(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20), Medium: fixedMedium(1e9, time.Hour)}, 16, 64<<10)
	require.True(t, h.do(nvme.SQE{Opcode: nvme.IOFlush, NSID: 1, CID: 1}).OK())
	require.Equal(t, nvme.LBAOutOfRange|dnr, h.do(h.rw(false, 2, 1<<40, 8, 0)))
}

// Quiesce waits for the transfer, not for the modelled drive: nothing moves after it.
func TestModelledDriveQuiesces(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20), Medium: fixedMedium(1e9, time.Hour)}, 16, 64<<10)
	h.put(h.rw(true, 1, 0, 8, 0))
	h.ring()
	h.p.Step()
	require.Empty(t, h.reap())
	require.NoError(t, h.q.Quiesce(time.Now().Add(10*time.Second)))
	done := h.reap()
	require.Len(t, done, 1)
	require.True(t, done[0].status.OK())
}

// A drive that is slow by its model does not slow others of the same poller, which sleeps at times.
func TestModelledDriveBesideAnother(t *testing.T) {
	var armed, wake uint32
	p, err := NewPoller(PollerConfig{Armed: &armed, Wake: &wake})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	slow, err := New(Config{Drive: memoryDrive(t, 1<<20), Medium: fixedMedium(1e9, time.Hour)})
	require.NoError(t, err)
	fast, err := New(Config{Drive: memoryDrive(t, 1<<20)})
	require.NoError(t, err)
	hs, hf := attachHost(t, slow, p, nil, 16, 64<<10), attachHost(t, fast, p, nil, 16, 64<<10)
	go p.Run()
	atomic.AddUint32(&armed, 1)
	hs.put(hs.rw(false, 1, 0, 8, 0))
	hs.ring()
	nvme.Wake(&wake)
	for i := range 200 {
		hf.put(hf.rw(i%2 == 0, uint16(i), 0, 8, 0))
		hf.ring()
		nvme.Wake(&wake)
		require.Eventually(t, func() bool { return len(hf.reap()) == 1 }, 20*time.Second, 20*time.Microsecond)
	}
	require.Empty(t, hs.reap())
}

func TestModelledDriveDoesNotAllocate(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20), Medium: fixedMedium(1e12, time.Microsecond)}, 64, 64<<10)
	entries := make([]nvme.SQE, 32)
	for i := range entries {
		entries[i] = h.rw(i%2 == 0, uint16(i), 0, 8, 0)
	}
	step := func() {
		for i := range entries {
			h.put(entries[i])
		}
		h.ring()
		h.wait(len(entries))
	}
	step()
	require.LessOrEqual(t, testing.AllocsPerRun(50, step), 8.0, "the test's own list of completions as it grows")
}

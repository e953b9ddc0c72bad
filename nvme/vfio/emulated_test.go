package vfio_test

import (
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
	"tuttifs/nvme/vfio"
)

const (
	testBytes = 32 << 20
	wornLBA   = 50_000 // of 512 bytes: where writes fail if there is a bad block too
)

func memoryDrive(t *testing.T) drive.Drive {
	t.Helper()
	d, err := drive.NewMemory("ram", testBytes)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func fileDrive(t *testing.T) drive.Drive {
	t.Helper()
	path := filepath.Join(t.TempDir(), "drive")
	require.NoError(t, drive.Create(path, testBytes))
	d, err := drive.Open(path, drive.Options{LBABytes: 4096})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// world is virtual controllers over one drive, one after the other.
type world struct {
	cfg  emu.Config
	bad  uint64
	hold atomic.Bool
	now  *nvmetest.Emulated
}

func (w *world) open(t *testing.T, o vfio.Options) *vfio.Controller {
	t.Helper()
	c, err := vfio.Open(w.transport(t), o)
	require.NoError(t, err)
	return c
}

func (w *world) transport(t *testing.T) *nvmetest.Emulated {
	t.Helper()
	c, err := emu.New(w.cfg)
	require.NoError(t, err)
	c.SetFaults(w.fault)
	w.now = nvmetest.NewEmulated(c)
	t.Cleanup(func() { _ = w.now.Close() })
	return w.now
}

// fault holds what it is told to, and has one bad block, if there is one.
func (w *world) fault(e *nvme.SQE) *emu.Fault {
	switch {
	case w.hold.Load():
		return &emu.Fault{Hold: func() bool { return !w.hold.Load() }}
	case w.bad != 0 && e.Opcode == nvme.IORead && e.LBA() <= w.bad && w.bad < e.LBA()+uint64(e.Blocks()):
		return &emu.Fault{Status: uint16(nvme.UnrecoveredRead)}
	case w.bad != 0 && e.Opcode == nvme.IOWrite && e.LBA() <= wornLBA && wornLBA < e.LBA()+uint64(e.Blocks()):
		return &emu.Fault{Status: uint16(nvme.WriteFault)}
	}
	return nil
}

func (w *world) rig() nvmetest.Rig {
	r := nvmetest.Rig{
		Open: w.open,
		Hold: func() func() {
			w.hold.Store(true)
			return func() { w.hold.Store(false) }
		},
		Remove: func() { w.now.Remove() },
	}
	if w.bad != 0 {
		r.BadLBA, r.BadBlocks, r.WornLBA = w.bad, 1, wornLBA
	}
	return r
}

// TestEmulated is the conformance suite on virtual controllers.
func TestEmulated(t *testing.T) {
	for name, w := range map[string]*world{
		"512": {cfg: emu.Config{Drive: memoryDrive(t), MDTS: 7, SGL: true, Queues: 16, Formats: true, DoorbellBuffer: true,
			Placement: &emu.Placement{Handles: 3, UnitBytes: 1 << 20}}},
		"4096": {cfg: emu.Config{Drive: fileDrive(t), MDTS: 5, SGL: true, Queues: 16, QueueEntries: 1024, Formats: true,
			Placement: &emu.Placement{Handles: 5, UnitBytes: 2 << 20, Isolated: true}}},
		"bare":        {cfg: emu.Config{Drive: memoryDrive(t), MDTS: 1, InOrder: true, Queues: 4, QueueEntries: 32}},
		"no limit":    {cfg: emu.Config{Drive: memoryDrive(t), MDTS: 13, SGL: true, DoorbellBuffer: true}},
		"a bad block": {cfg: emu.Config{Drive: memoryDrive(t), SGL: true}, bad: 9},
	} {
		t.Run(name, func(t *testing.T) { nvmetest.Run(t, w.rig()) })
	}
}

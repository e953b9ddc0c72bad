package vfio_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// TestDiscardLimits: no command is about more than the controller takes, whether it tells its limits or not, and all
// that is to be discarded is.
func TestDiscardLimits(t *testing.T) {
	const lba, kib = 512, 1 << 10
	var ranges []drive.Range
	for i := range int64(40) {
		ranges = append(ranges, drive.Range{Off: i * 64 * kib, N: (1 + i%3) * 8 * kib})
	}
	blocks := 0
	for _, r := range ranges {
		blocks += int(r.N) / lba
	}
	for _, x := range []struct {
		name     string
		told     nvme.DSMLimits
		untold   int // ranges; 0: all limits are told
		commands int
		most     int
	}{
		{name: "none", commands: 1, most: 256},
		{name: "ranges", told: nvme.DSMLimits{Ranges: 7}, commands: 6, most: 7},
		{name: "blocks of a range", told: nvme.DSMLimits{RangeBlocks: 16, Ranges: 255}, commands: 1, most: 255},
		{name: "blocks", told: nvme.DSMLimits{Blocks: 16}, commands: blocks / 16, most: 256},
		{name: "all", told: nvme.DSMLimits{Ranges: 1, RangeBlocks: 8, Blocks: 8}, commands: blocks / 8, most: 1},
		{name: "an untold one", untold: 6, commands: 3 + 8, most: 5},
	} {
		t.Run(x.name, func(t *testing.T) {
			w := world{cfg: emu.Config{Drive: memoryDrive(t), DSM: x.told}}
			c := w.open(t, vfio.Options{})
			d, err := vfio.NewDrive(c, 1, drive.Options{})
			require.NoError(t, err)
			w.now.Controller.SetFaults(func(e *nvme.SQE) *emu.Fault {
				if e.Opcode == nvme.IODSM && x.untold != 0 && int(e.CDW10&0xff)+1 > x.untold {
					return &emu.Fault{Status: uint16(nvme.SizeLimit | nvme.StatusDNR)}
				}
				return nil
			})
			all := slices.Repeat([]byte{7}, 40*64*kib)
			require.NoError(t, d.WriteAt(all, 0))
			commands, err := drive.DiscardRanges(d, ranges)
			require.NoError(t, err)
			require.Equal(t, x.commands, commands)
			require.Equal(t, x.most, drive.DiscardMost(d))
			for _, r := range ranges {
				clear(all[r.Off:][:r.N])
			}
			now := make([]byte, len(all))
			require.NoError(t, d.ReadAt(now, 0))
			require.True(t, bytes.Equal(all, now))
			require.NoError(t, d.Close())
			require.NoError(t, c.Close())
		})
	}
}

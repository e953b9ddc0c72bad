package vfio_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme/nvmetest"
	"tuttifs/nvme/vfio"
)

// TestHardware is the conformance suite on controllers of the machine, through VFIO. TUTTIFS_NVME names them, and gives
// everything on them away: addresses, separated by commas, each perhaps with a namespace (/2), with blocks that cannot
// be read (@FIRST+COUNT), and one behind them that cannot be written (!BLOCK). With TUTTIFS_NVME_REMOVE, a shell
// command that takes the last one away by surprise, that is tested last.
func TestHardware(t *testing.T) {
	names := os.Getenv("TUTTIFS_NVME")
	if names == "" {
		t.Skip("no controller is named by TUTTIFS_NVME; the suite overwrites what it is given")
	}
	machine := vfio.NewMachine("/sys", "/dev", "/proc")
	list := strings.Split(names, ",")
	for i, name := range list {
		t.Run(name, func(t *testing.T) {
			var r nvmetest.Rig
			name, worn, found := strings.Cut(name, "!")
			if found {
				_, err := fmt.Sscanf(worn, "%d", &r.WornLBA)
				require.NoError(t, err, "%q is not a block", worn)
			}
			name, bad, found := strings.Cut(name, "@")
			if found {
				_, err := fmt.Sscanf(bad, "%d+%d", &r.BadLBA, &r.BadBlocks)
				require.NoError(t, err, "%q is not FIRST+COUNT", bad)
			}
			address, nsid, err := vfio.SplitName(name)
			require.NoError(t, err)
			r.NSID = nsid
			r.Open = func(t *testing.T, o vfio.Options) *vfio.Controller {
				t.Helper()
				transport, err := machine.Open(address)
				require.NoError(t, err)
				c, err := vfio.Open(transport, o)
				require.NoError(t, err)
				return c
			}
			if remove := os.Getenv("TUTTIFS_NVME_REMOVE"); remove != "" && i == len(list)-1 {
				r.Remove = func() {
					out, err := exec.Command("sh", "-c", remove).CombinedOutput()
					require.NoError(t, err, "%s", out)
				}
			}
			nvmetest.Run(t, r)
		})
	}
}

// TestHardwareRequest: TUTTIFS_NVME_REQUEST is a shell command by which the system takes the last controller of
// TUTTIFS_NVME away in order; it waits until the controller is let go of.
func TestHardwareRequest(t *testing.T) {
	names, request := os.Getenv("TUTTIFS_NVME"), os.Getenv("TUTTIFS_NVME_REQUEST")
	if names == "" || request == "" {
		t.Skip("TUTTIFS_NVME and TUTTIFS_NVME_REQUEST name no controller and no way to ask for it")
	}
	list := strings.Split(names, ",")
	name, _, _ := strings.Cut(list[len(list)-1], "@")
	m := vfio.NewMachine("/sys", "/dev", "/proc")
	d, err := m.OpenDrive(name, drive.Options{})
	require.NoError(t, err)
	b := make([]byte, 4096)
	require.NoError(t, d.ReadAt(b, 0))
	out, err := exec.Command("sh", "-c", request).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.ErrorIs(t, d.ReadAt(b, 0), drive.ErrShrunk)
	require.NoError(t, d.Close())
}

package daemon

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/lifetime"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// ends puts three files into the arena that are stored for different times: the head of a chain, a file far behind it
// and one that is not full.
func ends(a *ioctl.Attachment) ioctl.Span {
	s := ioctl.Span{Offset: keySpan.Offset, Bytes: 3 * uint64(unsafe.Sizeof(ioctl.ReserveItem{}))}
	list := ioctl.View[ioctl.ReserveItem](a.Arena, s)
	list[0] = ioctl.ReserveItem{Key: key(1), Tokens: 16}
	list[1] = ioctl.ReserveItem{Key: key(2), Parent: key(100), Position: 4096, Tokens: 16}
	list[2] = ioctl.ReserveItem{Key: key(3), Parent: key(100), Position: 7, Tokens: 9}
	return s
}

// TestPlacement: what the store expects of a file comes out at the handle of the drive, by way of the virtual
// controller, and engines that write by themselves are told the same.
func TestPlacement(t *testing.T) {
	s := newSSD(t, emu.Config{SGL: true, Placement: &emu.Placement{Handles: 4, UnitBytes: 1 << 20}}, vfio.Options{})
	bare := newSSD(t, emu.Config{SGL: true}, vfio.Options{})
	w := realWorld(t, gpufile.Options{}, ControlOptions{}, s, bare)
	require.Positive(t, s.Placed()[lifetime.Metadata], "the volume's own")
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 64, DMABytes: 64 << 10})
	p := c.pool(a, "p")
	r := ioctl.Reserve{Target: p, Items: ends(a), Grants: grantSpan, Reserve: 1}
	c.reserve(&r)
	lanes := []*testLane{newTestLane(t, a, 0, 0), newTestLane(t, a, 0, 1)}
	for i, want := range []lifetime.Class{lifetime.Long, lifetime.Normal, lifetime.Short} {
		grant := ioctl.View[ioctl.Grant](a.Arena, grantSpan)[i]
		require.EqualValues(t, want, grant.Lifetime)
		before, meant := s.Placed(), uint64(0)
		for _, e := range c.extents(a, p, grant.Slot) {
			command := unitAt(a, int(e.Drive), true, e.Unit)
			command.NSID = 1
			require.Equal(t, []nvme.Status{nvme.Success}, lanes[e.Drive].do([]nvme.SQE{command}))
			if e.Drive == 0 {
				meant += drive.UnitBytes
			}
		}
		require.Positive(t, meant)
		require.Equal(t, before[want]+meant, s.Placed()[want])
	}

	_, b := w.open(true).session(realOptions)
	place := b.DriveTerms(0)
	require.EqualValues(t, nvme.DirectivePlacement, place.Directive)
	require.Equal(t, [ioctl.Lifetimes]uint16{0, 1, 2, 3}, place.Specific)
	require.Zero(t, b.DriveTerms(1), "that drive places nothing")
}

package daemon

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// chats are conversations that share few beginnings, and go on or are given up for new ones.
type chats struct {
	*client
	a       *ioctl.Attachment
	pool    ioctl.Target
	lane    *testLane
	r       *rand.Rand
	chains  [][][32]byte
	serial  uint64
	reserve uint64
}

const (
	chatTokens = 512 // a file
	chatHead   = 8   // files that conversations share
	chatMost   = 40  // files of a conversation
	flashBytes = 24 << 20
)

func (c *chats) newKey() (k [32]byte) {
	c.serial++
	binary.LittleEndian.PutUint64(k[8:], c.serial)
	return k
}

// turn has a conversation go on by a few files, the last of which is not full.
func (c *chats) turn(heads [][][32]byte) {
	i := c.r.IntN(len(c.chains))
	if len(c.chains[i]) >= chatMost || len(c.chains[i]) == 0 {
		c.chains[i] = append([][32]byte(nil), heads[c.r.IntN(len(heads))]...)
	}
	for range 1 + c.r.IntN(3) {
		c.chains[i] = append(c.chains[i], c.newKey())
	}
	c.touch(c.chains[i])
	c.store(append(c.chains[i][:len(c.chains[i]):len(c.chains[i])], c.newKey()))
}

// touch uses what is there of a chain.
func (c *chats) touch(chain [][32]byte) {
	s := ioctl.Span{Offset: keySpan.Offset, Bytes: uint64(len(chain)) * ioctl.KeyBytes}
	copy(ioctl.View[[32]byte](c.a.Arena, s), chain)
	pin := ioctl.Pin{Target: c.pool, Keys: s, Grants: grantSpan, Request: 1}
	require.Zero(c.w.t, issue(c.client, ioctl.CmdPin, &pin, 0))
	if pin.Count > 0 {
		require.Zero(c.w.t, issue(c.client, ioctl.CmdRelease, &ioctl.Release{Target: c.pool, Request: 1}, 0))
	}
}

// store writes what is not there of a chain.
func (c *chats) store(chain [][32]byte) {
	s := ioctl.Span{Offset: keySpan.Offset, Bytes: uint64(len(chain)) * uint64(unsafe.Sizeof(ioctl.ReserveItem{}))}
	list := ioctl.View[ioctl.ReserveItem](c.a.Arena, s)
	for i := range list {
		list[i] = ioctl.ReserveItem{Key: chain[i], Tokens: chatTokens, Position: uint32(i)}
		if i > 0 {
			list[i].Parent = chain[i-1]
		}
	}
	list[len(list)-1].Tokens = chatTokens / 2
	c.reserve++
	r := ioctl.Reserve{Target: c.pool, Items: s, Grants: grantSpan, Reserve: c.reserve}
	c.client.reserve(&r)
	for _, g := range append([]ioctl.Grant(nil), ioctl.View[ioctl.Grant](c.a.Arena, grantSpan)[:r.Count]...) {
		if g.Status != ioctl.GrantNew {
			continue
		}
		var commands []nvme.SQE
		for _, e := range c.extents(c.a, c.pool, g.Slot) {
			scale := drive.UnitBytes / uint64(c.a.Reply.LBABytes[e.Drive])
			var command nvme.SQE
			nvme.BuildRW(&command, true, 0, 1, e.Unit*scale, uint32(uint64(e.Units)*scale))
			require.NoError(c.w.t, command.SetSGL(c.a.Reply.DMABase, e.Units*drive.UnitBytes))
			commands = append(commands, command)
		}
		for _, status := range c.lane.do(commands) {
			require.True(c.w.t, status.OK())
		}
	}
	commit := ioctl.Commit{Target: c.pool, Reserve: c.reserve}
	require.Zero(c.w.t, issue(c.client, ioctl.CmdCommit, &commit, 0))
	require.Equal(c.w.t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
}

// TestPlacementAmplifies is a volume on a drive with a model of flash below it, full, and with conversations that go
// on: what the drive writes for each byte of the mount, by its own statistics, without and with placement handles.
func TestPlacementAmplifies(t *testing.T) {
	if os.Getenv("TUTTIFS_AMPLIFICATION") == "" {
		t.Skip("a measurement of half a minute, for who sets TUTTIFS_AMPLIFICATION; minutes with the race detector")
	}
	factor := map[int]float64{}
	for _, handles := range []int{1, 2, 3, 4} {
		memory, err := drive.NewMemory("flash", flashBytes)
		require.NoError(t, err)
		s := newSSD(t, emu.Config{Drive: memory, SGL: true,
			Placement: &emu.Placement{Handles: handles, UnitBytes: 256 << 10, Spare: 12}}, vfio.Options{})
		w := newWorldOn(t, []drive.Drive{s.Drive}, gpufile.Options{}, ControlOptions{})
		c := w.open(true)
		_, a := c.session(ioctl.AttachOptions{Lanes: 1, Depth: 64, DMABytes: 64 << 10})
		id := testIdentity("full")
		id.FileTokens = chatTokens
		request := poolRequest(t, a.Arena, "chats", id, testGeometry(t, 1))
		request.TokensPerFile = chatTokens
		require.Zero(t, issue(c, ioctl.CmdPoolOpen, &request, 0))
		require.Zero(t, c.wait(request.Ticket).Errno)
		x := &chats{client: c, a: a, pool: request.Target, lane: newTestLane(t, a, 0, 0), r: rand.New(rand.NewPCG(1, 2)),
			chains: make([][][32]byte, 20)}
		heads := make([][][32]byte, 4)
		for i := range heads {
			for range chatHead {
				heads[i] = append(heads[i], x.newKey())
			}
		}
		stats := func() nvme.FDPStats {
			s, err := s.Controller().FDPStats(1)
			require.NoError(t, err)
			return s
		}
		for stats().HostWritten[0] < 2*flashBytes { // the volume is full, and the flash was written through
			x.turn(heads)
		}
		before := stats()
		for stats().HostWritten[0] < before.HostWritten[0]+2*flashBytes {
			x.turn(heads)
		}
		after := stats()
		factor[handles] = float64(after.MediaWritten[0]-before.MediaWritten[0]) /
			float64(after.HostWritten[0]-before.HostWritten[0])
		t.Logf("%d handles: %.2f", handles, factor[handles])
		w.close()
	}
	require.Less(t, factor[4], factor[1], "what is kept apart costs less")
}

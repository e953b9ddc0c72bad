package nvmetest

import (
	"encoding/binary"
	"errors"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/lifetime"
	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// handleStatus asks what the namespace's placement handles write to.
func (b *bench) handleStatus() []nvme.FDPHandle {
	b.Helper()
	var e nvme.SQE
	nvme.BuildHandleStatus(&e, 0, b.ns.ID, 4096)
	b.do(b.byPRP(e, 4<<20, 4096))
	handles, err := nvme.ParseFDPHandles(b.buf.Bytes[4<<20:][:4096])
	require.NoError(b, err)
	return handles
}

// renewHandles is an I/O Management Send that has handles begin new reclaim units.
func (b *bench) renewHandles(ids ...uint16) nvme.SQE {
	b.Helper()
	for i, id := range ids {
		binary.LittleEndian.PutUint16(b.buf.Bytes[4<<20+2*i:], id)
	}
	var e nvme.SQE
	nvme.BuildHandleUpdate(&e, 0, b.ns.ID, uint32(len(ids)))
	return b.byPRP(e, 4<<20, 2*len(ids))
}

// placement: writes go where their directive says, and the controller counts them.
func placement(b *bench) {
	b.open(vfio.Options{})
	if !b.c.HasFDP() || b.ns.Group == 0 {
		noPlacement(b)
	}
	state, err := b.c.FDPFeature(b.ns.Group)
	require.NoError(b, err)
	require.True(b, state.Enabled)
	configs, err := b.c.FDPConfigs(b.ns.Group)
	require.NoError(b, err)
	config := configs[state.Config]
	require.True(b, config.Valid)
	unit := config.UnitBytes >> b.ns.LBAShift
	handles := b.handleStatus()
	require.NotEmpty(b, handles)
	require.LessOrEqual(b, len(handles), int(config.PlacementIDs))

	const n = 32 << 10
	blocks := uint64(n >> b.ns.LBAShift)
	written := func(i int, change func(e *nvme.SQE)) {
		b.do(b.renewHandles(handles[i].PlacementID))
		before, stats := b.handleStatus(), b.placementStats()
		require.Equal(b, unit, before[i].BlocksLeft, "the unit is new")
		for at := 0; at < n; at += 4096 {
			e := b.byPRP(b.rw(true, b.block(uint64(at>>b.ns.LBAShift)), 4096), at, 4096)
			change(&e)
			b.do(e)
		}
		before[i].BlocksLeft -= blocks
		require.Equal(b, before, b.handleStatus())
		after := b.placementStats()
		require.Equal(b, stats.HostWritten[0]+n, after.HostWritten[0])
		require.GreaterOrEqual(b, after.MediaWritten[0], stats.MediaWritten[0]+n)
	}
	for i := range handles {
		written(i, func(e *nvme.SQE) { e.SetDirective(nvme.DirectivePlacement, handles[i].PlacementID) })
	}
	written(0, func(*nvme.SQE) {})
	written(0, func(e *nvme.SQE) { e.SetDirective(nvme.DirectivePlacement, 0xfff0) })
	_, err = b.q.Do(b.renewHandles(0xfff0))
	require.Error(b, err)
	read := b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096)
	b.do(read)
	driveWritesApart(b, handles)
}

func (b *bench) placementStats() nvme.FDPStats {
	b.Helper()
	s, err := b.c.FDPStats(b.ns.Group)
	require.NoError(b, err)
	return s
}

// noPlacement: a controller that does not place data says so in all its ways.
func noPlacement(b *bench) {
	_, err := b.c.FDPFeature(1)
	requireStatus(b, err, nvme.InvalidField)
	var e nvme.SQE
	nvme.BuildHandleStatus(&e, 0, b.ns.ID, 4096)
	_, err = b.q.Do(b.byPRP(e, 0, 4096))
	var st nvme.Status
	require.True(b, errors.As(err, &st), "%v", err)
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	require.Zero(b, d.PlacementHandles())
	kind, _ := d.Directive(lifetime.Short)
	require.Zero(b, kind)
	require.NoError(b, d.WriteFor(lifetime.Short, make([]byte, 4096), 0))
	require.NoError(b, d.Close())
	b.Skip("no placement of data, and it says so")
}

// driveWritesApart: what a drive is told of lifetimes comes out at the handles.
func driveWritesApart(b *bench, handles []nvme.FDPHandle) {
	if len(handles) < 2 {
		return // there is nothing to keep apart
	}
	d, err := vfio.NewDrive(b.c, b.ns.ID, drive.Options{})
	require.NoError(b, err)
	defer func() { require.NoError(b, d.Close()) }()
	require.Equal(b, len(handles), d.PlacementHandles())
	for c := range lifetime.Classes {
		id := handles[c.Handle(len(handles))].PlacementID
		kind, specific := d.Directive(c)
		require.Equal(b, uint8(nvme.DirectivePlacement), kind)
		require.Equal(b, id, specific)
		b.do(b.renewHandles(id))
		before := b.handleStatus()
		require.NoError(b, drive.WriteFor(d, c, make([]byte, 8192), 64<<10))
		require.Equal(b, uint64(8192), d.Placed()[c])
		before[c.Handle(len(handles))].BlocksLeft -= uint64(8192 >> b.ns.LBAShift)
		require.Equal(b, before, b.handleStatus())
	}
	page := make([]byte, nvme.FDPStatsBytes)
	require.NoError(b, drive.ReadLog(d, nvme.LogFDPStats, page))
	stats, err := nvme.ParseFDPStats(page)
	require.NoError(b, err)
	require.Equal(b, b.placementStats(), stats)
	require.GreaterOrEqual(b, stats.Amplification(), 1.0)
}

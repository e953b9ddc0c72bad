package nvmetest

import (
	"errors"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// startUp: a controller can be started again and again, and what was written stays.
func startUp(b *bench) {
	for lap := range 3 {
		b.open(vfio.Options{})
		caps, id := b.c.Capabilities(), b.c.Identity()
		require.GreaterOrEqual(b, caps.Entries(), uint32(2))
		require.NotZero(b, caps.CSS()&nvme.CSSNVM)
		require.Equal(b, 12, int(caps.PageMinShift()))
		require.NotEmpty(b, nvme.Text(id.MN[:]))
		require.NotEmpty(b, nvme.Text(id.SN[:]))
		require.Positive(b, b.c.Queues())
		require.GreaterOrEqual(b, b.c.TransferMax(), 4096)
		if lap > 0 {
			b.read(b.block(0), 0, 64<<10)
			fill(b.buf.Bytes[1<<20:][:64<<10], uint64(lap-1))
			require.True(b, b.same(0, 1<<20, 64<<10), "lap %d", lap)
		}
		fill(b.buf.Bytes[:64<<10], uint64(lap))
		b.write(b.block(0), 0, 64<<10)
		require.Zero(b, b.q.Spurious())
		require.NoError(b, b.c.Close())
		require.ErrorIs(b, b.c.Close(), vfio.ErrClosed)
		_, err := b.q.Do(b.byPRP(b.rw(false, 0, 4096), 0, 4096))
		require.ErrorIs(b, err, vfio.ErrClosed)
		_, err = b.c.SMART()
		require.ErrorIs(b, err, vfio.ErrClosed)
		require.NoError(b, b.buf.Free())
	}
}

func identify(b *bench) {
	b.openBare(vfio.Options{})
	b.c = reopenWith(b, vfio.Options{Queues: 1})
	require.Equal(b, 1, b.c.Queues(), "never more than what was asked for")
	require.Contains(b, []int{512, 4096}, b.ns.LBABytes())
	for _, cns := range []uint8{nvme.CNSNamespace, nvme.CNSController, nvme.CNSNSDescriptors} {
		_, err := b.c.IdentifyPage(b.ns.ID, cns)
		require.NoError(b, err)
	}
	list, err := b.c.IdentifyPage(b.ns.ID, nvme.CNSActiveNamespaces)
	require.NoError(b, err)
	ids, err := nvme.ParseNamespaceList(list)
	require.NoError(b, err)
	require.NotContains(b, ids, b.ns.ID, "only those after it")
	_, err = b.c.Namespace(b.c.Identity().NN + 1)
	requireStatus(b, err, nvme.InvalidNamespace)
	for _, bad := range []struct {
		nsid uint32
		cns  uint8
		want nvme.Status
	}{
		{1, 0x7f, nvme.InvalidField}, {0, nvme.CNSNamespace, nvme.InvalidNamespace},
		{nvme.NSIDBroadcast, nvme.CNSActiveNamespaces, nvme.InvalidNamespace},
	} {
		_, err := b.c.IdentifyPage(bad.nsid, bad.cns)
		require.Error(b, err, "%02xh of %#x", bad.cns, bad.nsid)
		requireStatus(b, err, bad.want)
	}
}

func reopenWith(b *bench, o vfio.Options) *vfio.Controller {
	require.NoError(b, b.c.Close())
	b.openBare(o)
	return b.c
}

func features(b *bench) {
	b.openBare(vfio.Options{Queues: 2})
	v, err := b.c.Feature(0, nvme.FeatureQueues)
	require.NoError(b, err)
	require.GreaterOrEqual(b, int(v&0xffff)+1, b.c.Queues())
	if id := b.c.Identity(); id.VWC&nvme.VWCPresent != 0 {
		was, err := b.c.Feature(0, nvme.FeatureVolatileCache)
		require.NoError(b, err)
		for _, v := range []uint32{0, 1, was & 1} {
			require.NoError(b, b.c.SetFeature(0, nvme.FeatureVolatileCache, v))
			got, err := b.c.Feature(0, nvme.FeatureVolatileCache)
			require.NoError(b, err)
			require.Equal(b, v, got&1)
		}
	}
	_, err = b.c.Feature(0, 0x7f)
	requireStatus(b, err, nvme.InvalidField)
	requireStatus(b, b.c.SetFeature(0, 0x7f, 0), nvme.InvalidField)
}

func logs(b *bench) {
	b.open(vfio.Options{})
	before, err := b.c.SMART()
	require.NoError(b, err)
	for range 20 {
		b.write(b.block(0), 0, 64<<10)
		b.read(b.block(0), 0, 64<<10)
	}
	after, err := b.c.SMART()
	require.NoError(b, err)
	require.Greater(b, after.HostWrites[0], before.HostWrites[0])
	require.Greater(b, after.HostReads[0], before.HostReads[0])
	require.Greater(b, after.DataUnitsWritten[0], before.DataUnitsWritten[0])
	b.refused(b.byPRP(b.rw(false, b.ns.Blocks, 4096), 0, 4096), nvme.LBAOutOfRange)
	_, err = b.c.Errors()
	require.NoError(b, err)
	require.NoError(b, b.c.ReadLog(nvme.LogFirmware, nvme.NSIDBroadcast, 0, make([]byte, 512)))
	err = b.c.ReadLog(0xbe, nvme.NSIDBroadcast, 0, make([]byte, 512))
	requireStatus(b, err, nvme.LogPageInvalid, nvme.InvalidField)
	require.ErrorIs(b, b.c.ReadLog(nvme.LogSMART, nvme.NSIDBroadcast, 0, make([]byte, 3)), vfio.ErrUnsuitable)
	if !b.c.HasFDP() || b.ns.Group == 0 {
		_, err = b.c.FDPStats(0)
		var st nvme.Status
		require.ErrorAs(b, err, &st)
		return
	}
	configs, err := b.c.FDPConfigs(b.ns.Group)
	require.NoError(b, err)
	require.NotEmpty(b, configs)
	_, err = b.c.FDPStats(b.ns.Group)
	require.NoError(b, err)
}

func adminStatus(b *bench) {
	b.openBare(vfio.Options{})
	for _, c := range []struct {
		name string
		e    nvme.SQE
		want nvme.Status
	}{
		{"unknown opcode", nvme.SQE{Opcode: 0xbf}, nvme.InvalidOpcode},
		{"fused", nvme.SQE{Opcode: nvme.AdminIdentify, Flags: 1, CDW10: nvme.CNSController}, nvme.InvalidField},
		{"SGL", nvme.SQE{Opcode: nvme.AdminIdentify, Flags: nvme.FlagPSDTSGL, CDW10: nvme.CNSController},
			nvme.InvalidField},
		{"Abort in no queue", nvme.SQE{Opcode: nvme.AdminAbort, CDW10: 0x00010000 | uint32(b.c.Queues()) + 1},
			nvme.InvalidField},
	} {
		_, err := b.c.Admin(c.e)
		require.Error(b, err, c.name)
		requireStatus(b, err, c.want)
	}
}

// doorbellBuffer: queues are rung in memory where the controller takes that, round and round, before and after a reset;
// nothing is overlooked, and register writes are saved.
func doorbellBuffer(b *bench) {
	b.open(vfio.Options{})
	id := b.c.Identity()
	var e nvme.SQE
	nvme.BuildDoorbellBuffer(&e, 0, b.buf.IOVA, b.buf.IOVA+4096)
	if id.OACS&nvme.OACSDoorbellBuffer == 0 {
		_, ok := b.c.DoorbellBuffer()
		require.False(b, ok)
		_, err := b.c.Admin(e)
		requireStatus(b, err, nvme.InvalidOpcode)
		_, saved := b.c.Rings()
		require.Zero(b, saved)
		b.Skip("no doorbell buffer, and it says so")
	}
	_, ok := b.c.DoorbellBuffer()
	require.True(b, ok)
	e.DPTR[1] += 8
	_, err := b.c.Admin(e)
	requireStatus(b, err, nvme.InvalidField, nvme.PRPOffsetInvalid)
	for lap := range 3 {
		before, was := b.c.Rings()
		submitted := uint64(0)
		for range 200 { // all at once, so that the controller has something to look for
			for _, ticket := range b.submitAll() {
				submitted++
				_, err := b.q.Wait(ticket)
				require.NoError(b, err)
			}
			if _, saved := b.c.Rings(); saved > was && submitted > 4*uint64(b.q.Depth()) {
				break
			}
		}
		written, saved := b.c.Rings()
		require.GreaterOrEqual(b, written-before+saved-was, submitted, "each command is rung, or need not be")
		require.Greater(b, saved, was, "lap %d", lap)
		q, err := b.c.NewQueue(2) // which has been another queue's
		require.NoError(b, err)
		for range 5 {
			_, err = q.Do(b.byPRP(b.rw(false, b.block(0), 4096), 0, 4096))
			require.NoError(b, err)
		}
		require.NoError(b, q.Close())
		require.NoError(b, b.c.Reset())
		_, ok := b.c.DoorbellBuffer()
		require.True(b, ok)
	}
	require.Zero(b, b.q.Spurious())
	require.NoError(b, b.c.Close())
	b.open(vfio.Options{NoDoorbellBuffer: true})
	b.write(b.block(0), 0, 64<<10)
	_, saved := b.c.Rings()
	require.Zero(b, saved)
	_, ok = b.c.DoorbellBuffer()
	require.False(b, ok)
}

// asyncEvents: as many wait as the controller says, and closing ends them.
func asyncEvents(b *bench) {
	b.openBare(vfio.Options{AdminTimeout: time.Hour})
	q, n := b.c.AdminQueue(), int(b.c.Identity().AERL)+1
	if n >= q.Depth() {
		b.Skipf("%d requests can wait, more than the admin queue holds", n)
	}
	var parked []vfio.Ticket
	for range n {
		ticket, err := q.Submit(nvme.SQE{Opcode: nvme.AdminAsyncEvent})
		require.NoError(b, err)
		parked = append(parked, ticket)
	}
	_, err := q.Do(nvme.SQE{Opcode: nvme.AdminAsyncEvent})
	requireStatus(b, err, nvme.AsyncEventLimit)
	require.NoError(b, b.c.Close())
	for _, ticket := range parked {
		_, err := q.Wait(ticket)
		// A controller may report an event that has been waiting.
		if err != nil {
			require.True(b, errors.Is(err, vfio.ErrClosed) || errors.Is(err, vfio.ErrAborted), "%v", err)
		}
	}
}

func queueStatus(b *bench) {
	b.open(vfio.Options{Queues: 4})
	m, err := b.c.Alloc(64 << 10)
	require.NoError(b, err)
	defer func() { require.NoError(b, m.Free()) }()
	if b.c.Queues() < 3 {
		b.Skipf("%d queues", b.c.Queues())
	}
	const cq, sq = nvme.AdminCreateCQ, nvme.AdminCreateSQ
	most := b.c.Capabilities().Entries()
	create := func(op uint8, id uint16, entries uint32, cdw11 uint32, at uint64) nvme.SQE {
		return nvme.SQE{Opcode: op, DPTR: [2]uint64{at}, CDW10: uint32(id) | (entries-1)<<16, CDW11: cdw11}
	}
	remove := func(op uint8, id uint16) nvme.SQE { return nvme.SQE{Opcode: op, CDW10: uint32(id)} }
	first := b.q.ID()
	for _, c := range []struct {
		name string
		e    nvme.SQE
		want []nvme.Status
	}{
		{"completion queue 0", create(cq, 0, 8, 1, m.IOVA), []nvme.Status{nvme.QueueIDInvalid}},
		{"taken", create(cq, first, 8, 1, m.IOVA), []nvme.Status{nvme.QueueIDInvalid}},
		{"beyond all", create(cq, 0xffff, 8, 1, m.IOVA), []nvme.Status{nvme.QueueIDInvalid}},
		{"one entry", create(cq, 2, 1, 1, m.IOVA), []nvme.Status{nvme.QueueSizeInvalid}},
		{"offset", create(cq, 2, 8, 1, m.IOVA+8), []nvme.Status{nvme.PRPOffsetInvalid, nvme.InvalidField}},
		{"submission queue 0", create(sq, 0, 8, uint32(first)<<16|1, m.IOVA), []nvme.Status{nvme.QueueIDInvalid}},
		{"submission queue taken", create(sq, first, 8, uint32(first)<<16|1, m.IOVA),
			[]nvme.Status{nvme.QueueIDInvalid}},
		{"to a queue that is not there", create(sq, 2, 8, 3<<16|1, m.IOVA), []nvme.Status{nvme.CQInvalid}},
		{"submission queue of one entry", create(sq, 2, 1, uint32(first)<<16|1, m.IOVA),
			[]nvme.Status{nvme.QueueSizeInvalid}},
		{"delete what is not there", remove(nvme.AdminDeleteSQ, 3), []nvme.Status{nvme.QueueIDInvalid}},
		{"delete the admin queue", remove(nvme.AdminDeleteSQ, 0), []nvme.Status{nvme.QueueIDInvalid}},
		{"delete no completion queue", remove(nvme.AdminDeleteCQ, 3), b.perhaps(nvme.CQInvalid, nvme.QueueIDInvalid)},
		{"delete one in use", remove(nvme.AdminDeleteCQ, first), []nvme.Status{nvme.QueueDeletion}},
	} {
		_, err := b.c.Admin(c.e)
		require.Error(b, err, c.name)
		requireStatus(b, err, c.want...)
	}
	if most < 1<<16 {
		_, err := b.c.Admin(create(cq, 2, most+1, 1, m.IOVA))
		requireStatus(b, err, nvme.QueueSizeInvalid)
	}
	if b.c.Capabilities().ContiguousQueues() {
		_, err := b.c.Admin(create(cq, 2, 8, 0, m.IOVA))
		requireStatus(b, err, nvme.InvalidField)
	}
	// Two submission queues may share a completion queue.
	for _, e := range []nvme.SQE{
		create(sq, 2, 24, uint32(first)<<16|1, m.IOVA), create(sq, 3, 7, uint32(first)<<16|1, m.IOVA+8192),
		remove(nvme.AdminDeleteSQ, 2), remove(nvme.AdminDeleteSQ, 3),
	} {
		_, err := b.c.Admin(e)
		require.NoError(b, err)
	}
	b.write(b.block(0), 0, 4096) // and the one that was there has noticed nothing
}

// queueLimits: as many queues as were granted, of all sizes; deleted ones can be had again.
func queueLimits(b *bench) {
	b.openBare(vfio.Options{Queues: 12})
	most := floorPower(b.c.Capabilities().Entries())
	for lap := range 3 {
		var queues []*vfio.Queue
		for i := range b.c.Queues() {
			q, err := b.c.NewQueue(max(2, most>>(i+lap)))
			require.NoError(b, err)
			queues = append(queues, q)
		}
		_, err := b.c.NewQueue(2)
		require.ErrorIs(b, err, vfio.ErrUnsuitable)
		buf, err := b.c.Alloc(4096)
		require.NoError(b, err)
		for _, q := range queues {
			var e nvme.SQE
			nvme.BuildRW(&e, false, 0, b.ns.ID, b.block(0), uint32(4096>>b.ns.LBAShift))
			require.NoError(b, e.SetPRP(buf.IOVA, 4096, nil, 0))
			for range 2*q.Depth() + 3 { // round at least once
				if q.Depth() > 64 {
					break
				}
				_, err := q.Do(e)
				require.NoError(b, err)
			}
			_, err := q.Do(e)
			require.NoError(b, err)
		}
		require.NoError(b, buf.Free())
		for _, q := range queues {
			require.Zero(b, q.Spurious())
			require.NoError(b, q.Close())
			require.ErrorIs(b, q.Close(), vfio.ErrClosed)
			_, err := q.Do(nvme.SQE{})
			require.ErrorIs(b, err, vfio.ErrClosed)
		}
	}
	for _, depth := range []int{0, 1, 3, 8192} {
		_, err := b.c.NewQueue(depth)
		require.ErrorIs(b, err, vfio.ErrUnsuitable)
	}
}

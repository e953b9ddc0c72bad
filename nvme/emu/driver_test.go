package emu

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// driver starts a controller up through its registers and admin queue, as a VFIO driver does: it has the BAR and its
// own memory, nothing else.
type driver struct {
	t     *testing.T
	c     *Controller
	mem   []byte
	admin pair
	cid   uint16
}

// pair is a queue pair in driver memory with doorbells in the BAR.
type pair struct {
	d          *driver
	id         uint16
	sq         []nvme.SQE
	cq         []nvme.CQE
	tail, head uint32
	phase      uint16
	seen       map[uint16]result // completions of others than the one waited for
}

type result struct {
	status nvme.Status
	dw0    uint32
}

// Places in driver memory.
const (
	asqAt  = 0x1000
	acqAt  = 0x3000
	dataAt = 0x10000
	ioAt   = 0x40000
	memEnd = 0x100000
)

func entriesAt[T nvme.SQE | nvme.CQE](t *testing.T, mem []byte, at uint64, n uint32) []T {
	e, ok := mapEntries[T](&Region{Bytes: mem}, at, n)
	require.True(t, ok)
	return e
}

func newDriver(t *testing.T, cfg Config) *driver {
	c, err := New(cfg)
	require.NoError(t, err)
	d := &driver{t: t, c: c, mem: mmapTest(t, memEnd)}
	c.SetHostMemory(&Region{Bytes: d.mem})
	t.Cleanup(c.Close)
	return d
}

func (d *driver) enable() {
	clear(d.mem[:dataAt])
	d.c.WriteRegister(nvme.RegAQA, uint64(nvme.MakeAQA(16, 32)), 4)
	d.c.WriteRegister(nvme.RegASQ, asqAt, 8)
	d.c.WriteRegister(nvme.RegACQ, acqAt, 4)
	d.c.WriteRegister(nvme.RegACQ+4, 0, 4)
	d.c.WriteRegister(nvme.RegCC, uint64(nvme.MakeCC(true, 12)), 4)
	require.Equal(d.t, uint64(nvme.CSTSReady), d.c.ReadRegister(nvme.RegCSTS, 4))
	d.admin = pair{d: d, sq: entriesAt[nvme.SQE](d.t, d.mem, asqAt, 16), cq: entriesAt[nvme.CQE](d.t, d.mem, acqAt, 32),
		phase: 1, seen: map[uint16]result{}}
}

func (p *pair) submit(e nvme.SQE) uint16 {
	p.d.cid++
	e.CID = p.d.cid
	p.sq[p.tail] = e
	p.tail = (p.tail + 1) % uint32(len(p.sq))
	p.d.c.WriteRegister(nvme.SQTailDoorbell(p.id, 0), uint64(p.tail), 4)
	return e.CID
}

// wait consumes completions until the command's own.
func (p *pair) wait(cid uint16) result {
	p.d.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		if r, ok := p.seen[cid]; ok {
			delete(p.seen, cid)
			return r
		}
		got, st, ok := p.cq[p.head].Poll(p.phase)
		if !ok {
			require.True(p.d.t, time.Now().Before(end), "command %d never completes", cid)
			time.Sleep(50 * time.Microsecond)
			continue
		}
		p.seen[got] = result{st, p.cq[p.head].DW0}
		if p.head++; p.head == uint32(len(p.cq)) {
			p.head, p.phase = 0, p.phase^1
		}
		p.d.c.WriteRegister(nvme.CQHeadDoorbell(p.id, 0), uint64(p.head), 4)
	}
}

func (p *pair) do(e nvme.SQE) result {
	p.d.t.Helper()
	return p.wait(p.submit(e))
}

func (d *driver) identify(nsid uint32, cns uint8) []byte {
	d.t.Helper()
	var e nvme.SQE
	nvme.BuildIdentify(&e, 0, nsid, cns, dataAt)
	require.Equal(d.t, nvme.Success, d.admin.do(e).status)
	return bytes.Clone(d.mem[dataAt:][:nvme.IdentifyBytes])
}

func (d *driver) createQueues(id uint16, entries uint32, at uint64) *pair {
	d.t.Helper()
	var e nvme.SQE
	nvme.BuildCreateCQ(&e, 0, id, at, entries)
	require.Equal(d.t, nvme.Success, d.admin.do(e).status)
	nvme.BuildCreateSQ(&e, 0, id, id, at+0x4000, entries)
	require.Equal(d.t, nvme.Success, d.admin.do(e).status)
	return &pair{d: d, id: id, cq: entriesAt[nvme.CQE](d.t, d.mem, at, entries),
		sq: entriesAt[nvme.SQE](d.t, d.mem, at+0x4000, entries), phase: 1, seen: map[uint16]result{}}
}

func TestDriverStartUp(t *testing.T) {
	disk := memoryDrive(t, 8<<20)
	fill(disk.Bytes(), 11)
	d := newDriver(t, Config{Drive: disk, MDTS: 5, QueueEntries: 128, Queues: 8, SGL: true, Serial: "S1"})
	caps := nvme.CAP(d.c.ReadRegister(nvme.RegCAP, 8))
	require.Equal(t, uint32(128), caps.Entries())
	require.Zero(t, caps.Stride())
	require.True(t, caps.ContiguousQueues())
	require.Equal(t, uint64(nvme.Version20), d.c.ReadRegister(nvme.RegVS, 4))
	require.Zero(t, d.c.ReadRegister(nvme.RegCSTS, 4))
	d.enable()

	var ctrl nvme.IdentifyController
	require.NoError(t, ctrl.UnmarshalBinary(d.identify(0, nvme.CNSController)))
	require.Equal(t, uint8(5), ctrl.MDTS)
	require.Equal(t, uint32(1), ctrl.NN)
	require.Equal(t, "S1                  ", string(ctrl.SN[:]))
	require.NotZero(t, ctrl.SGLS&nvme.SGLSSupported)
	require.NotZero(t, ctrl.VWC&nvme.VWCPresent)
	list := d.identify(0, nvme.CNSActiveNamespaces)
	require.Equal(t, []byte{1, 0, 0, 0, 0, 0, 0, 0}, list[:8])
	require.Equal(t, make([]byte, 4096), d.identify(1, nvme.CNSActiveNamespaces))
	var ns nvme.IdentifyNamespace
	require.NoError(t, ns.UnmarshalBinary(d.identify(1, nvme.CNSNamespace)))
	require.Equal(t, uint64(8<<20), ns.NSZE<<ns.Format().LBADS)
	desc := d.identify(1, nvme.CNSNSDescriptors)
	require.Equal(t, []byte{nvme.NIDTNGUID, 16, 0, 0}, desc[:4])
	require.Equal(t, ns.NGUID[:], desc[4:20])
	require.Equal(t, []byte{nvme.NIDTEUI64, 8, 0, 0}, desc[20:24])
	require.Equal(t, []byte{nvme.NIDTCSI, 1, 0, 0, 0, 0}, desc[32:38])

	var e nvme.SQE
	nvme.BuildSetQueues(&e, 0, 100)
	r := d.admin.do(e)
	require.Equal(t, result{nvme.Success, 7<<16 | 7}, r)

	// Two submission queues that share a completion queue, of a size that is no power of two.
	q := d.createQueues(3, 24, ioAt)
	nvme.BuildCreateSQ(&e, 0, 5, 3, ioAt+0x10000, 24)
	require.Equal(t, nvme.Success, d.admin.do(e).status)
	for lap := range 60 {
		nvme.BuildRW(&e, false, 0, 1, uint64(lap), 8)
		require.NoError(t, e.SetPRP(dataAt, 4096, nil, 0))
		require.Equal(t, nvme.Success, q.do(e).status)
		require.True(t, bytes.Equal(disk.Bytes()[lap*512:][:4096], d.mem[dataAt:][:4096]))
	}
	nvme.BuildSetQueues(&e, 0, 2)
	require.Equal(t, nvme.SequenceError, d.admin.do(e).status.Code())

	// Orderly end.
	del := func(id uint16, completion bool) nvme.Status {
		nvme.BuildDeleteQueue(&e, 0, id, completion)
		return d.admin.do(e).status.Code()
	}
	require.Equal(t, nvme.QueueDeletion, del(3, true), "submission queues still use it")
	require.Equal(t, nvme.Success, del(3, false))
	require.Equal(t, nvme.QueueIDInvalid, del(3, false))
	require.Equal(t, nvme.QueueDeletion, del(3, true))
	require.Equal(t, nvme.Success, del(5, false))
	require.Equal(t, nvme.Success, del(3, true))
	require.Equal(t, nvme.QueueIDInvalid, del(3, true))
	require.Equal(t, nvme.QueueIDInvalid, del(0, true))
	require.Equal(t, nvme.QueueIDInvalid, del(0, false))
	d.c.WriteRegister(nvme.RegCC, uint64(nvme.MakeCC(true, 12)|nvme.CCShutdown), 4)
	require.Equal(t, uint64(nvme.CSTSReady|nvme.CSTSShutdownComplete), d.c.ReadRegister(nvme.RegCSTS, 4))
	d.c.WriteRegister(nvme.RegCC, 0, 4)
	require.Zero(t, d.c.ReadRegister(nvme.RegCSTS, 4))

	d.enable() // a reset controller starts again, with queues of its own
	require.NoError(t, ctrl.UnmarshalBinary(d.identify(0, nvme.CNSController)))
	nvme.BuildDeleteQueue(&e, 0, 3, true)
	require.Equal(t, nvme.QueueIDInvalid, d.admin.do(e).status.Code())
}

func TestEnableRefuses(t *testing.T) {
	good := uint64(nvme.MakeCC(true, 12))
	for name, f := range map[string]func(d *driver) uint64{
		"page size":   func(*driver) uint64 { return good | 1<<7 },
		"command set": func(*driver) uint64 { return good | 7<<4 },
		"arbitration": func(*driver) uint64 { return good | 1<<11 },
		"admin queue of one entry": func(d *driver) uint64 {
			d.c.WriteRegister(nvme.RegAQA, 0, 4)
			return good
		},
		"unmapped queue": func(d *driver) uint64 {
			d.c.WriteRegister(nvme.RegASQ, 1<<40, 8)
			return good
		},
		"no memory": func(d *driver) uint64 {
			d.c.SetHostMemory(nil)
			return good
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDriver(t, Config{Drive: memoryDrive(t, 1<<20)})
			d.c.WriteRegister(nvme.RegAQA, uint64(nvme.MakeAQA(16, 16)), 4)
			d.c.WriteRegister(nvme.RegASQ, asqAt, 8)
			d.c.WriteRegister(nvme.RegACQ, acqAt, 8)
			d.c.WriteRegister(nvme.RegCC, f(d), 4)
			require.Equal(t, uint64(nvme.CSTSFatal), d.c.ReadRegister(nvme.RegCSTS, 4))
			d.c.WriteRegister(nvme.RegCC, 0, 4)
			require.Zero(t, d.c.ReadRegister(nvme.RegCSTS, 4))
			d.c.SetHostMemory(&Region{Bytes: d.mem})
			d.enable()
		})
	}
}

func TestRegisterAccess(t *testing.T) {
	d := newDriver(t, Config{Drive: memoryDrive(t, 1<<20)})
	c := d.c
	want := c.ReadRegister(nvme.RegCAP, 8)
	for off := uint32(0); off < 0x40; off += 4 {
		c.WriteRegister(nvme.RegCAP, ^uint64(0), 8)
	}
	require.Equal(t, want, c.ReadRegister(nvme.RegCAP, 8), "read only")
	require.Equal(t, want>>32, c.ReadRegister(nvme.RegCAP+4, 4))
	require.Zero(t, c.ReadRegister(nvme.RegCAP+4, 8), "misaligned")
	require.Zero(t, c.ReadRegister(nvme.RegVS, 2))
	require.Zero(t, c.ReadRegister(0xfffffff8, 8))
	c.WriteRegister(nvme.RegASQ, 0x1_2345_6fff, 8)
	require.Equal(t, uint64(0x1_2345_6000), c.ReadRegister(nvme.RegASQ, 8))
	c.WriteRegister(nvme.RegINTMS, 5, 4)
	c.WriteRegister(nvme.RegINTMC, 1, 4)
	require.Equal(t, uint64(4), c.ReadRegister(nvme.RegINTMS, 4))
	c.WriteRegister(nvme.SQTailDoorbell(0, 0), 1, 4) // nobody listens before it is enabled
	c.WriteRegister(0xfffffffc, 1, 4)
	d.enable()
	c.WriteRegister(0xfffffffc, 1, 4)
	c.WriteRegister(nvme.SQTailDoorbell(0, 0)+2, 1, 4)
	require.NotEmpty(t, d.identify(0, nvme.CNSController))
}

func TestAdminStatus(t *testing.T) {
	d := newDriver(t, Config{Drive: memoryDrive(t, 1<<20), QueueEntries: 64, Queues: 4})
	d.enable()
	build := func(opcode uint8, cdw10, cdw11 uint32, prp1 uint64) nvme.SQE {
		return nvme.SQE{Opcode: opcode, CDW10: cdw10, CDW11: cdw11, DPTR: [2]uint64{prp1}}
	}
	with := func(e nvme.SQE, f func(*nvme.SQE)) nvme.SQE { f(&e); return e }
	size := func(id, entries uint32) uint32 { return id | (entries-1)<<16 }
	const cq, sq = nvme.AdminCreateCQ, nvme.AdminCreateSQ
	require.Equal(t, nvme.Success, d.admin.do(build(cq, size(1, 64), 1, ioAt)).status)
	identify := build(nvme.AdminIdentify, nvme.CNSController, 0, dataAt)
	set, get := uint8(nvme.AdminSetFeatures), uint8(nvme.AdminGetFeatures)
	for _, c := range []struct {
		name string
		e    nvme.SQE
		want nvme.Status
	}{
		{"unknown opcode", build(nvme.AdminSanitize, 0, 0, 0), nvme.InvalidOpcode},
		{"fused", with(identify, func(e *nvme.SQE) { e.Flags = 1 }), nvme.InvalidField},
		{"sgl", with(identify, func(e *nvme.SQE) { e.Flags = 0x40 }), nvme.InvalidField},
		{"identify unmapped", with(identify, func(e *nvme.SQE) { e.DPTR[0] = memEnd }), nvme.DataTransferError},
		{"identify odd", with(identify, func(e *nvme.SQE) { e.DPTR[0] = dataAt + 1 }), nvme.PRPOffsetInvalid},
		{"identify cns", build(nvme.AdminIdentify, 0x77, 0, dataAt), nvme.InvalidField},
		{"identify namespace 0", build(nvme.AdminIdentify, nvme.CNSNamespace, 0, dataAt), nvme.InvalidNamespace},
		{"identify list", with(build(nvme.AdminIdentify, nvme.CNSActiveNamespaces, 0, dataAt),
			func(e *nvme.SQE) { e.NSID = nvme.NSIDBroadcast }), nvme.InvalidNamespace},
		{"identify command set", build(nvme.AdminIdentify, nvme.CNSControllerIOCS, 1<<24, dataAt), nvme.InvalidField},
		{"cq id 0", build(cq, size(0, 8), 1, ioAt), nvme.QueueIDInvalid},
		{"cq id taken", build(cq, size(1, 8), 1, ioAt), nvme.QueueIDInvalid},
		{"cq id beyond", build(cq, size(5, 8), 1, ioAt), nvme.QueueIDInvalid},
		{"cq of one entry", build(cq, size(2, 1), 1, ioAt), nvme.QueueSizeInvalid},
		{"cq too large", build(cq, size(2, 65), 1, ioAt), nvme.QueueSizeInvalid},
		{"cq scattered", build(cq, size(2, 8), 0, ioAt), nvme.InvalidField},
		{"cq reserved", build(cq, size(2, 8), 1|4, ioAt), nvme.InvalidField},
		{"cq vector", build(cq, size(2, 8), 3|100<<16, ioAt), nvme.VectorInvalid},
		{"cq offset", build(cq, size(2, 8), 1, ioAt+8), nvme.PRPOffsetInvalid},
		{"cq unmapped", build(cq, size(2, 8), 1, memEnd), nvme.DataTransferError},
		{"sq id 0", build(sq, size(0, 8), 1<<16|1, ioAt), nvme.QueueIDInvalid},
		{"sq to cq 0", build(sq, size(1, 8), 1, ioAt), nvme.QueueIDInvalid},
		{"sq to no cq", build(sq, size(1, 8), 2<<16|1, ioAt), nvme.CQInvalid},
		{"sq too large", build(sq, size(1, 65), 1<<16|1, ioAt), nvme.QueueSizeInvalid},
		{"sq scattered", build(sq, size(1, 8), 1<<16, ioAt), nvme.InvalidField},
		{"sq reserved", build(sq, size(1, 8), 1<<16|1|8, ioAt), nvme.InvalidField},
		{"sq unmapped", build(sq, size(1, 8), 1<<16|1, memEnd), nvme.DataTransferError},
		{"delete sq", build(nvme.AdminDeleteSQ, 1, 0, 0), nvme.QueueIDInvalid},
		{"feature unknown", build(get, 0x0f, 0, 0), nvme.InvalidField},
		{"feature select", build(get, nvme.FeatureQueues|4<<8, 0, 0), nvme.InvalidField},
		{"feature unknown", build(set, 0xff, 0, 0), nvme.InvalidField},
		{"feature saved", build(set, nvme.FeatureArbitration|1<<31, 0, 0), nvme.FeatureNotSaveable},
		{"power state", build(set, nvme.FeaturePowerManagement, 1, 0), nvme.InvalidField},
		{"write cache", build(set, nvme.FeatureVolatileCache, 2, 0), nvme.InvalidField},
		{"queues", build(set, nvme.FeatureQueues, 0xffff, 0), nvme.InvalidField},
		{"queues late", build(set, nvme.FeatureQueues, 0, 0), nvme.SequenceError},
		{"log page", build(nvme.AdminGetLogPage, 0x70|127<<16, 0, dataAt), nvme.LogPageInvalid},
		{"log too long", build(nvme.AdminGetLogPage, nvme.LogSMART, 0xffff, dataAt), nvme.InvalidField},
		{"log offset", with(build(nvme.AdminGetLogPage, nvme.LogSMART|127<<16, 0, dataAt),
			func(e *nvme.SQE) { e.CDW12 = 516 }), nvme.InvalidField},
		{"log namespace", with(build(nvme.AdminGetLogPage, nvme.LogSMART|127<<16, 0, dataAt),
			func(e *nvme.SQE) { e.NSID = 2 }), nvme.InvalidNamespace},
		{"abort of no queue", build(nvme.AdminAbort, 3, 0, 0), nvme.InvalidField},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := bytes.Clone(d.mem[dataAt:ioAt])
			got := d.admin.do(c.e).status
			require.Equal(t, c.want, got.Code(), "%v", got)
			require.True(t, bytes.Equal(before, d.mem[dataAt:ioAt]))
		})
	}
}

func TestFeaturesAndLogs(t *testing.T) {
	disk := &fake{Drive: memoryDrive(t, 1<<20)}
	d := newDriver(t, Config{Drive: disk})
	d.enable()
	do := func(opcode uint8, cdw10, cdw11 uint32) result {
		return d.admin.do(nvme.SQE{Opcode: opcode, CDW10: cdw10, CDW11: cdw11, DPTR: [2]uint64{dataAt}})
	}
	vwc := uint32(nvme.FeatureVolatileCache)
	require.Equal(t, result{nvme.Success, 1}, do(nvme.AdminGetFeatures, vwc, 0))
	require.Equal(t, nvme.Success, do(nvme.AdminSetFeatures, vwc, 0).status)
	require.Equal(t, []string{"flush"}, disk.calls, "what was cached is made durable")
	require.True(t, d.c.writeThrough.Load())
	require.Equal(t, result{nvme.Success, 0}, do(nvme.AdminGetFeatures, vwc, 0))
	require.Equal(t, result{nvme.Success, 1}, do(nvme.AdminGetFeatures, vwc|nvme.FeatureSelectDefault<<8, 0))
	require.Equal(t, result{nvme.Success, nvme.FeatureSupportChangable},
		do(nvme.AdminGetFeatures, vwc|nvme.FeatureSelectSupported<<8, 0))

	q := d.createQueues(1, 16, ioAt)
	var e nvme.SQE
	nvme.BuildRW(&e, false, 0, 1, 77, 8)
	require.NoError(t, e.SetPRP(memEnd, 4096, nil, 0))
	require.Equal(t, nvme.DataTransferError, q.do(e).status.Code())
	require.Equal(t, nvme.Success, do(nvme.AdminGetLogPage, nvme.LogError|31<<16, 0).status)
	log := d.mem[dataAt:]
	require.Equal(t, uint64(1), le64(log))
	require.Equal(t, []byte{1, 0}, log[8:10])
	require.Equal(t, uint16(nvme.DataTransferError|nvme.StatusDNR)<<1, uint16(le32(log[12:])))
	require.Equal(t, uint64(77), le64(log[16:]))
	require.Equal(t, make([]byte, 64), log[64:128])
	require.Equal(t, nvme.Success, do(nvme.AdminGetLogPage, nvme.LogSMART|127<<16, 0).status)
	require.Equal(t, uint64(1), le64(log[176:]), "error log entries")
	require.Equal(t, byte(100), log[3])
	d.c.SetFaults(func(*nvme.SQE) *Fault { return &Fault{Status: uint16(nvme.UnrecoveredRead)} })
	require.Equal(t, nvme.UnrecoveredRead, q.do(e).status.Code())
	require.Equal(t, nvme.Success, do(nvme.AdminGetLogPage, nvme.LogSMART|127<<16, 0).status)
	smart, err := nvme.ParseSMARTLog(log)
	require.NoError(t, err)
	require.Equal(t, [2]uint64{2, 0}, smart.ErrorLogEntries)
	require.Equal(t, [2]uint64{1, 0}, smart.MediaErrors, "of which one was the media's")
	require.Zero(t, smart.Used, "nothing is known of it")
	require.Equal(t, nvme.Success, do(nvme.AdminGetLogPage, nvme.LogFirmware|127<<16, 0).status)
	require.Equal(t, "1       ", string(log[8:16]))
}

func TestAsyncEvents(t *testing.T) {
	d := newDriver(t, Config{Drive: memoryDrive(t, 1<<20)})
	d.enable()
	var ids []uint16
	for range asyncMax {
		ids = append(ids, d.admin.submit(nvme.SQE{Opcode: nvme.AdminAsyncEvent}))
	}
	require.Equal(t, nvme.AsyncEventLimit, d.admin.do(nvme.SQE{Opcode: nvme.AdminAsyncEvent}).status.Code())

	d.c.WriteRegister(nvme.SQTailDoorbell(9, 0), 1, 4) // no such queue
	r := d.admin.wait(ids[0])
	require.Equal(t, result{nvme.Success, nvme.LogError << 16}, r)

	q := d.createQueues(1, 16, ioAt)
	d.c.WriteRegister(nvme.SQTailDoorbell(1, 0), 16, 4)
	// The second event waits until the first one's log is read.
	require.Equal(t, nvme.Success, d.admin.do(nvme.SQE{Opcode: nvme.AdminGetLogPage, CDW10: nvme.LogError | 15<<16,
		DPTR: [2]uint64{dataAt}}).status)
	r = d.admin.wait(ids[1])
	require.Equal(t, result{nvme.Success, nvme.AsyncInvalidValue<<8 | nvme.LogError<<16}, r)
	require.Equal(t, uint64(1), d.c.Stats().QueuesKilled)
	var e nvme.SQE
	nvme.BuildDeleteQueue(&e, 0, 1, false)
	require.Equal(t, nvme.Success, d.admin.do(e).status, "a dead queue can be deleted")
	_ = q

	nvme.BuildAbort(&e, 0, 0, ids[2])
	require.Equal(t, result{nvme.Success, 0}, d.admin.do(e))
	require.Equal(t, nvme.AbortRequested, d.admin.wait(ids[2]).status.Code())
	nvme.BuildAbort(&e, 0, 0, ids[2])
	require.Equal(t, result{nvme.Success, 1}, d.admin.do(e), "it is gone")
}

func TestAbortAndDeleteWithCommandsInFlight(t *testing.T) {
	disk := memoryDrive(t, 1<<20)
	d := newDriver(t, Config{Drive: disk})
	fill(disk.Bytes(), 1)
	d.enable()
	q := d.createQueues(1, 16, ioAt)
	d.c.SetFaults(func(*nvme.SQE) *Fault { return &Fault{Delay: time.Hour} })
	var e nvme.SQE
	nvme.BuildRW(&e, false, 0, 1, 0, 8)
	require.NoError(t, e.SetPRP(dataAt, 4096, nil, 0))
	one, two := q.submit(e), q.submit(e)
	for { // the abort must not overtake the fetch
		var abort nvme.SQE
		nvme.BuildAbort(&abort, 0, 1, one)
		if r := d.admin.do(abort); r.dw0 == 0 {
			require.Equal(t, nvme.Success, r.status)
			break
		}
	}
	require.Equal(t, nvme.AbortRequested, q.wait(one).status.Code())
	nvme.BuildDeleteQueue(&e, 0, 1, false)
	require.Equal(t, nvme.Success, d.admin.do(e).status)
	require.Equal(t, nvme.AbortRequested, q.wait(two).status.Code())
	require.Equal(t, make([]byte, 4096), d.mem[dataAt:][:4096])
}

func TestBadAdminDoorbellIsFatal(t *testing.T) {
	d := newDriver(t, Config{Drive: memoryDrive(t, 1<<20)})
	d.enable()
	d.c.WriteRegister(nvme.SQTailDoorbell(0, 0), 16, 4)
	for end := time.Now().Add(10 * time.Second); d.c.ReadRegister(nvme.RegCSTS, 4)&nvme.CSTSFatal == 0; {
		require.True(t, time.Now().Before(end))
		time.Sleep(100 * time.Microsecond)
	}
	d.c.WriteRegister(nvme.RegCC, 0, 4)
	d.enable()
	require.NotEmpty(t, d.identify(0, nvme.CNSController))
}

// Package giotest is the conformance suite of executors: whatever produces commands - goroutines on host memory,
// kernels on a GPU - runs the same tests against virtual controllers on memory drives.
package giotest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/phase"
	"tuttifs/stripe"
)

// dmaBase is an address that no process has, so that nobody mistakes one for the other.
const dmaBase = 0x10_0000_0000

// PeerBase and a device address are the I/O address of device memory.
const PeerBase = 1 << 60

// region is the DMA memory of one rig as controllers see it, device memory where they reach it, and queue memory where
// they are told its addresses.
type region struct {
	dma    emu.Region
	reach  func(address uint64, n uint32) []byte
	blocks [][]byte
}

func (m *region) Translate(iova uint64, n uint32) []byte {
	if iova >= PeerBase && m.reach != nil {
		return m.reach(iova-PeerBase, n)
	}
	if i, at := (iova-blockBase)>>blockShift, iova&(1<<blockShift-1); iova >= blockBase && i < uint64(len(m.blocks)) {
		if b := m.blocks[i]; at <= uint64(len(b)) && uint64(n) <= uint64(len(b))-at {
			return b[at : at+uint64(n)]
		}
		return nil
	}
	return m.dma.Translate(iova, n)
}

// sector gives a drive another logical block size.
type sector struct {
	drive.Drive
	bytes int
}

func (d sector) LBABytes() int { return d.bytes }

// Shape of a rig. Zero fields take small defaults.
type Shape struct {
	Drives, Width, Lanes, Depth int
	Rows                        int
	LBABytes                    int
	SGL, InOrder, Peer          bool
	DMABytes, BounceBytes       int
	StoreBytes                  int // of a subject with a store buffer, 4 MiB
	StorePolicy                 gio.StorePolicy
	ChunkCommands               int
	Deadline                    time.Duration
	Geometry                    stripe.Geometry
	// Media and Phases are the drives' models and phases; nil: as fast as memory, and no phases.
	Media  []*drivemodel.Medium
	Phases []*phase.Token
	// Stepped runs the controllers on the thread that waits.
	Stepped bool
	// Registers has queues made, deleted and rung by controllers' registers and admin queues.
	Registers bool
	// Random decides what is left open; nil is the test's own.
	Random *rand.Rand
}

func (s Shape) withDefaults() Shape {
	set := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	set(&s.Drives, 3)
	set(&s.Width, min(2, s.Drives))
	set(&s.Lanes, 2)
	set(&s.Depth, 16)
	set(&s.Rows, 2)
	set(&s.LBABytes, 512)
	set(&s.DMABytes, 16<<20)
	if s.Deadline == 0 {
		s.Deadline = 20 * time.Second
	}
	if len(s.Geometry.Objects) == 0 {
		s.Geometry = Uneven(3, 1)
	}
	return s
}

// storeLanes are what a subject's store buffer has.
const storeLanes = 2

// withStore makes room for a store buffer and its lanes.
func (s Shape) withStore(subject *Subject) Shape {
	if !subject.Store {
		s.StoreBytes = 0
		return s
	}
	if s.StoreBytes == 0 {
		s.StoreBytes = 4 << 20
	}
	s.Lanes += storeLanes
	s.DMABytes += s.StoreBytes
	return s
}

// Uneven is a geometry of layers x ranks whose objects have odd lengths and different sizes, trailers included.
func Uneven(layers, ranks int) stripe.Geometry {
	var g stripe.Geometry
	for layer := range layers {
		for rank := range ranks {
			for _, runs := range [][]stripe.Run{
				{{Kind: stripe.RunKV, Bytes: 8192}},
				{{Kind: stripe.RunLatent, Bytes: 656 * 13}, {Kind: stripe.RunIndexer, Bytes: uint32(132 + layer)}},
			} {
				g.Objects = append(g.Objects, stripe.Object{Layer: uint16(layer), Rank: uint16(rank), Runs: runs})
			}
		}
	}
	return g.WithTrailers()
}

// Rig is one executor joined to virtual controllers.
type Rig struct {
	Shape       Shape
	Ring        gio.Executor
	Map         *gio.Map
	Drives      []drive.Drive
	Controllers []*emu.Controller
	Slots       []uint32     // all that the map holds
	Quiesced    atomic.Int32 // lanes quiesced so far
	Deaf        atomic.Bool  // Quiesce fails, as when the daemon is gone
	OnQuiesce   func()       // called before queues are quiesced

	t          testing.TB
	subject    *Subject
	random     *rand.Rand
	recorder   recorder
	rows       []gio.MapRow
	dma        []byte
	region     *region
	blocks     [][]byte // queue memory, [lane*drives + drive]
	queues     []*emu.Queue
	pages      []nvme.QueueMemory
	poller     *emu.Poller
	bus        *bus // with Shape.Registers
	armed      uint32
	wake       uint32
	stop       chan struct{}
	entryUnits uint64
	taken      int // of the user's DMA memory
	want       []byte
	frees      []func() error
}

// takeDMA is n bytes of the user's DMA memory that nothing else of the test has.
func (r *Rig) takeDMA(n int) []byte {
	require.LessOrEqual(r.t, n, len(r.Ring.DMA())-r.taken)
	b := r.Ring.DMA()[r.taken : r.taken+n : r.taken+n]
	r.taken += (n + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1)
	return b
}

// hostMemory is n bytes of pages of their own, since a driver pins and maps whole ones.
func (r *Rig) hostMemory(n int) []byte {
	b := drive.AlignedBuffer(n)
	r.frees = append(r.frees, func() error { drive.FreeBuffer(b); return nil })
	return b[:n]
}

// scratch is n bytes for what is expected of an object, until it is asked for again. It is the test's own goroutine's.
func (r *Rig) scratch(n int) []byte {
	if n > cap(r.want) {
		r.want = make([]byte, 2*n)
	}
	return r.want[:n]
}

func (r *Rig) device() Device { return r.subject.Device(r.Ring) }

// NewRig builds drives, controllers, map and executor; everything is taken down with the test.
func NewRig(t testing.TB, subject *Subject, shape Shape) *Rig {
	t.Helper()
	r := &Rig{Shape: shape.withDefaults().withStore(subject), t: t, subject: subject, random: shape.Random,
		stop: make(chan struct{})}
	if r.random == nil {
		r.random = subject.source(t, 0)
	}
	r.makeMap()
	r.makeControllers()
	c := gio.RingConfig{
		DMA: r.dma, DMABase: dmaBase, BounceBytes: r.Shape.BounceBytes, SGL: r.Shape.SGL,
		ChunkCommands: r.Shape.ChunkCommands, Deadline: r.Shape.Deadline, Armed: &r.armed, Wake: &r.wake,
		Quiesce: r.quiesce, Reattach: r.reattach,
		StoreBytes: r.Shape.StoreBytes, StorePolicy: r.Shape.StorePolicy,
	}
	for l := range r.Shape.Lanes {
		c.Lanes = append(c.Lanes, r.laneQueues(l))
	}
	if r.Shape.Stepped {
		c.Step = func() { r.poller.Step() }
	}
	ring, err := subject.New(c, shape.Peer)
	if err != nil {
		r.free()
	}
	require.NoError(t, err)
	r.Ring = ring
	t.Cleanup(r.takeDown)
	if !r.Shape.Stepped {
		go func() { defer close(r.stop); r.poller.Run() }()
	}
	return r
}

func (r *Rig) takeDown() {
	if err := r.Ring.Close(); err != nil && !r.Deaf.Load() {
		r.t.Errorf("close: %v", err)
	}
	if r.bus != nil {
		r.bus.close()
	}
	if !r.Shape.Stepped {
		r.poller.Stop()
		<-r.stop
	}
	if n := atomic.LoadUint32(&r.armed); n != 0 {
		r.t.Errorf("armed is left at %d", n)
	}
	for _, free := range r.frees {
		if err := free(); err != nil {
			r.t.Errorf("%v", err)
		}
	}
	for _, d := range r.Drives {
		if err := d.Close(); err != nil {
			r.t.Errorf("%v", err)
		}
	}
	r.free()
}

func (r *Rig) free() {
	for _, b := range append(r.blocks, r.dma) {
		drive.FreeBuffer(b)
	}
}

// makeMap lays rows over the drives, rotated so that every drive holds entries, with holes between row numbers.
func (r *Rig) makeMap() {
	s := &r.Shape
	layout, err := stripe.NewLayout(s.Geometry, s.Width)
	require.NoError(r.t, err)
	r.entryUnits = layout.SlotUnits()*2 + 1
	next := make([]uint64, s.Drives)
	for i := range s.Rows {
		row := gio.MapRow{Number: uint32(2*i + 1)}
		for e := range s.Width {
			d := (i + e) % s.Drives
			row.Drives = append(row.Drives, uint16(d))
			row.Units = append(row.Units, 3+next[d])
			next[d] += r.entryUnits + 2
		}
		r.rows = append(r.rows, row)
	}
	r.Map, err = gio.NewMap(layout, r.entryUnits, r.rows, 1)
	require.NoError(r.t, err)
	for i := range r.rows {
		perRow := layout.SlotsPerRow(r.entryUnits)
		for k := range perRow {
			r.Slots = append(r.Slots, r.rows[i].Number*perRow+k)
		}
	}
	for d := range s.Drives {
		m, err := drive.NewMemory(fmt.Sprintf("memory%d", d), int64(3+next[d])*drive.UnitBytes)
		require.NoError(r.t, err)
		r.Drives = append(r.Drives, sector{m, s.LBABytes})
	}
}

func (r *Rig) makeControllers() {
	s := &r.Shape
	r.dma = drive.AlignedBuffer(s.DMABytes)
	var err error
	r.poller, err = emu.NewPoller(emu.PollerConfig{Armed: &r.armed, Wake: &r.wake})
	require.NoError(r.t, err)
	for d := range s.Drives {
		config := emu.Config{
			Drive: r.Drives[d], Index: uint16(d), MDTS: 9, QueueEntries: 4096, Queues: uint16(s.Lanes),
			SGL: true, InOrder: s.InOrder, Serial: "giotest",
		}
		if s.Media != nil {
			config.Medium = s.Media[d]
		}
		if s.Phases != nil {
			config.Phase = s.Phases[d]
		}
		c, err := emu.New(config)
		require.NoError(r.t, err)
		r.Controllers = append(r.Controllers, c)
	}
	r.region = &region{dma: emu.Region{Base: dmaBase, Bytes: r.dma}}
	if s.Peer {
		r.region.reach = r.subject.Reach
	}
	r.SetFaults(nil)
	r.queues = make([]*emu.Queue, s.Lanes*s.Drives)
	r.pages = make([]nvme.QueueMemory, s.Lanes*s.Drives)
	for i := range r.queues {
		r.blocks = append(r.blocks, drive.AlignedBuffer(nvme.QueueBytes(s.Depth)))
		r.pages[i], err = nvme.MapQueue(r.blocks[i], s.Depth)
		require.NoError(r.t, err)
	}
	if s.Registers {
		r.bus = newBus(r)
		go r.bus.carry()
	}
	for i := range r.queues {
		require.NoError(r.t, r.attach(i))
	}
}

func (r *Rig) attach(i int) error {
	if r.bus != nil {
		return r.bus.create(i)
	}
	q, err := r.Controllers[i%r.Shape.Drives].Attach(emu.QueueConfig{Memory: r.pages[i], DMA: r.region})
	if err == nil {
		r.queues[i] = q
		r.poller.Add(q)
	}
	return err
}

func (r *Rig) detach(i int) error {
	if r.bus != nil {
		return r.bus.remove(i)
	}
	return r.queues[i].Quiesce(time.Now().Add(10 * time.Second))
}

func (r *Rig) laneQueues(lane int) []gio.Queue {
	var queues []gio.Queue
	for d := range r.Shape.Drives {
		queues = append(queues, gio.Queue{
			Memory: r.pages[lane*r.Shape.Drives+d], Drive: uint16(d), LBABytes: r.Shape.LBABytes,
		})
	}
	return queues
}

func (r *Rig) quiesce(lane int) error {
	if r.Deaf.Load() {
		return errors.New("nobody answers")
	}
	r.Quiesced.Add(1)
	if r.OnQuiesce != nil {
		r.OnQuiesce()
	}
	var errs []error
	for d := range r.Shape.Drives {
		errs = append(errs, r.detach(lane*r.Shape.Drives+d))
	}
	return errors.Join(errs...)
}

func (r *Rig) reattach(lane int) ([]gio.Queue, error) {
	for d := range r.Shape.Drives {
		i := lane*r.Shape.Drives + d
		clear(r.blocks[i])
		if err := r.attach(i); err != nil {
			return nil, err
		}
	}
	return r.laneQueues(lane), nil
}

// SetFaults installs one hook on every controller, behind the recorder.
func (r *Rig) SetFaults(f func(sqe *nvme.SQE) *emu.Fault) {
	for d := range r.Controllers {
		r.setFaults(d, f)
	}
}

// setFaults installs a hook on the controller of one drive.
func (r *Rig) setFaults(d int, f func(sqe *nvme.SQE) *emu.Fault) {
	r.Controllers[d].SetFaults(func(e *nvme.SQE) *emu.Fault {
		r.recorder.see(r, uint16(d), e)
		if f == nil {
			return nil
		}
		return f(e)
	})
}

// extent is an object's place, found by the layout and the rows and not by the map under test.
func (r *Rig) extent(slot uint32, object uint16) (drive uint16, unit, units uint64) {
	layout := r.Map.Layout()
	perRow := layout.SlotsPerRow(r.entryUnits)
	row := r.rows[slot/perRow/2]
	entry, at := layout.Locate(slot%perRow, object)
	return row.Drives[entry], row.Units[entry] + at, uint64(layout.Geometry().Objects[object].Units())
}

// Stored is an object as its drive has it: its payload and the padding to the end of its last unit.
func (r *Rig) Stored(slot uint32, object uint16) (payload, pad []byte) {
	d, unit, units := r.extent(slot, object)
	b := r.Drives[d].Bytes()[unit*drive.UnitBytes : (unit+units)*drive.UnitBytes]
	n := r.Map.Layout().Geometry().Objects[object].Bytes()
	return b[:n], b[n:]
}

// checkStored compares what a drive holds of an object with the content of a round.
func (r *Rig) checkStored(slot uint32, object uint16, round uint64) {
	r.t.Helper()
	want := r.scratch(r.Bytes(object))
	Content(want, slot, object, round)
	if got, _ := r.Stored(slot, object); !bytes.Equal(want, got) {
		r.t.Fatalf("object %d of slot %d is not where the layout says", object, slot)
	}
}

// Bytes is an object's payload length.
func (r *Rig) Bytes(object uint16) int { return int(r.Map.ObjectBytes(object)) }

// Content fills b with what object of slot holds in a given round. It tells the race detector nothing, which would take
// longer than all the rest: only the test that compares b touches it, or memory of which the detector does not know.
//
//go:norace
func Content(b []byte, slot uint32, object uint16, round uint64) {
	x := uint64(slot)<<32 ^ uint64(object)<<16 ^ round*0x9e3779b97f4a7c15 | 1
	for ; len(b) >= 8; b = b[8:] {
		// Marsaglia's xorshift: a few instructions, since the tests compare gigabytes.
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b, x)
	}
	for i := range b {
		b[i] = byte(x >> (8*i + 3))
	}
}

// Run issues a batch and waits for it.
func (r *Rig) Run(write bool, ctxs []gio.IOCTX) []gio.Result {
	r.t.Helper()
	failed, err := r.run(write, ctxs)
	require.NoError(r.t, err)
	return failed
}

func (r *Rig) run(write bool, ctxs []gio.IOCTX) ([]gio.Result, error) {
	t, err := r.Ring.Issue(write, r.Map, ctxs)
	if err != nil {
		return nil, err
	}
	return r.Ring.Wait(t)
}

// unhook leaves the controllers without recorder and faults.
func (r *Rig) unhook() {
	for _, c := range r.Controllers {
		c.SetFaults(nil)
	}
}

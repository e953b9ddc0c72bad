package giotest

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/gio"
)

// kind is where objects lie in memory.
type kind int

const (
	inDMA  kind = iota // host memory that controllers reach, with room for whole units
	host               // other host memory
	device             // one range of device memory
	paged              // device memory in which each object lies in runs, as engines page their pools
)

// way is how bytes reach memory.
type way struct {
	name    string
	kind    kind
	SGL     bool
	stepped bool // the controllers run on the thread that waits
	peer    bool // controllers reach device memory
}

var ways = []way{
	{name: "direct, PRP", kind: inDMA},
	{name: "direct, SGL", kind: inDMA, SGL: true},
	{name: "bounce, PRP", kind: host},
	{name: "bounce, SGL, one thread", kind: host, SGL: true, stepped: true},
	{name: "device, PRP", kind: device},
	{name: "device, SGL, peer", kind: device, SGL: true, peer: true},
	{name: "paged, PRP, peer", kind: paged, peer: true},
	{name: "paged, SGL", kind: paged, SGL: true},
}

// has says whether the executor has this way.
func (s *Subject) has(w way) bool {
	onDevice := w.kind == device || w.kind == paged
	return (!w.stepped || s.Steps) && (!onDevice || s.Device != nil) && (!w.peer || s.Reach != nil)
}

func eachWay(t *testing.T, s *Subject, f func(t *testing.T, w way)) {
	for _, w := range ways {
		if s.has(w) {
			t.Run(w.name, func(t *testing.T) { f(t, w) })
		}
	}
}

// waysAtOnce is eachWay for tests that are long or mostly wait.
func waysAtOnce(t *testing.T, s *Subject, f func(t *testing.T, w way)) {
	eachWay(t, s, func(t *testing.T, w way) {
		t.Parallel()
		f(t, w)
	})
}

// main is the way of tests for which one is enough: bounced, to device memory where there is some.
func (s *Subject) main() way {
	for _, w := range ways {
		if w.kind == device && s.has(w) {
			return w
		}
	}
	return way{kind: host}
}

func (w way) shape() Shape {
	s := Shape{SGL: w.SGL, Stepped: w.stepped, Peer: w.peer}
	if w.kind != inDMA {
		s.BounceBytes = 4 << 20
	}
	return s
}

// arena is registered memory for a list of objects.
type arena struct {
	r      *Rig
	kind   kind
	buf    []byte // the objects one after the other: the memory itself, or what a test knows of the device's
	offset []int
	ctxs   []gio.IOCTX
	memory *gio.Memory
	image  *image // of device memory; nil where buf is the memory itself
}

// memory makes room for objects (of slots) and the batch that moves them.
func (w way) memory(r *Rig, ctxs []gio.IOCTX) *arena {
	a := &arena{r: r, kind: w.kind, ctxs: slices.Clone(ctxs)}
	at := 0
	for i := range ctxs {
		a.offset = append(a.offset, at)
		n := r.Bytes(ctxs[i].Object)
		if w.kind == inDMA {
			n = (n + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1)
		}
		at += n
	}
	var err error
	switch w.kind {
	case inDMA:
		a.buf = r.takeDMA(at)
		a.memory, err = r.Ring.RegisterPadded(a.buf)
	case host:
		a.buf = r.hostMemory(at)
		a.memory, err = r.Ring.Register(a.buf)
	case device, paged:
		a.buf = make([]byte, at)
		a.layOut()
		return a
	}
	require.NoError(r.t, err)
	for i := range a.ctxs {
		a.ctxs[i].Desc = a.memory.Desc(a.offset[i])
	}
	return a
}

// image is the device memory of an arena. What no object owns holds gapByte, and must always.
type image struct {
	address uint64
	bytes   []byte
	blank   []byte    // as long, gapByte alone
	pieces  [][]piece // by object, in the order of its bytes
}

type piece struct{ at, n int }

const gapByte = 0xa5

// layOut places the objects in device memory and registers it.
func (a *arena) layOut() {
	r, m := a.r, &image{pieces: make([][]piece, len(a.ctxs))}
	a.image = m
	var register func(d Device) (*gio.Memory, []uint64, error)
	size := 0
	if a.kind == device {
		size, register = a.layOutFlat()
	} else {
		size, register = a.layOutPaged()
	}
	d := r.device()
	var err error
	m.address, err = d.Alloc(size)
	require.NoError(r.t, err)
	r.frees = append(r.frees, func() error { return d.Free(m.address) })
	m.blank = bytes.Repeat([]byte{gapByte}, size)
	m.bytes = bytes.Clone(m.blank)
	a.sync()
	require.NoError(r.t, d.Upload(m.address, m.bytes))
	memory, desc, err := register(d)
	require.NoError(r.t, err)
	a.memory = memory
	for i := range a.ctxs {
		a.ctxs[i].Desc = desc[i]
	}
}

// gaps between objects, so that they begin at whole units, at odd bytes, and beside each other.
var gaps = []int{0, 0, 1, 16, 255, 4096}

func (a *arena) layOutFlat() (size int, register func(Device) (*gio.Memory, []uint64, error)) {
	desc := make([]uint64, len(a.ctxs))
	for i := range a.ctxs {
		size += gaps[a.r.random.IntN(len(gaps))]
		if a.r.random.IntN(3) == 0 {
			size = (size + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1)
		}
		n := a.r.Bytes(a.ctxs[i].Object)
		a.image.pieces[i] = []piece{{size, n}}
		size += n
	}
	return size, func(d Device) (*gio.Memory, []uint64, error) {
		m, err := d.Register(a.image.address, size)
		for i := range desc {
			if err == nil {
				desc[i] = m.Desc(a.image.pieces[i][0].at)
			}
		}
		return m, desc, err
	}
}

// layOutPaged gives each object number a class with runs of its own, and each of its slots a block.
func (a *arena) layOutPaged() (size int, register func(Device) (*gio.Memory, []uint64, error)) {
	random := a.r.random
	class, count := map[uint16]int{}, []uint64{}
	where := make([][2]uint64, len(a.ctxs)) // class and ordinal
	var objects []uint16
	blocks := uint64(0)
	for i := range a.ctxs {
		c, known := class[a.ctxs[i].Object]
		if !known {
			c = len(count)
			class[a.ctxs[i].Object] = c
			count, objects = append(count, 0), append(objects, a.ctxs[i].Object)
		}
		where[i] = [2]uint64{uint64(c), count[c]}
		count[c]++
		blocks = max(blocks, count[c])
	}
	blocks += random.Uint64N(3) // some belong to nobody
	place := random.Perm(int(blocks))
	runs := 1 + random.IntN(3)
	classes := make([][]StridedRun, len(objects))
	for c, object := range objects {
		for _, n := range split(random, a.r.Bytes(object), runs) {
			stride := n + gaps[random.IntN(len(gaps))]
			classes[c] = append(classes[c], StridedRun{Base: uint64(size), Stride: uint64(stride), Bytes: uint32(n)})
			size = (size + stride*int(blocks) + 255) &^ 255
		}
	}
	for i := range a.ctxs {
		b := uint64(place[where[i][1]])
		for _, run := range classes[where[i][0]] {
			a.image.pieces[i] = append(a.image.pieces[i], piece{int(run.Base + b*run.Stride), int(run.Bytes)})
		}
	}
	return size, func(d Device) (*gio.Memory, []uint64, error) {
		for c := range classes {
			for k := range classes[c] {
				classes[c][k].Base += a.image.address
			}
		}
		m, err := d.RegisterPaged(blocks, classes)
		desc := make([]uint64, len(a.ctxs))
		for i := range desc {
			if err == nil {
				desc[i] = m.Block(int(where[i][0]), uint64(place[where[i][1]]))
			}
		}
		return m, desc, err
	}
}

// split cuts n bytes into so many runs, none of them empty, mostly where 16 bytes end.
func split(random *rand.Rand, n, runs int) []int {
	grain := 16
	if random.IntN(4) == 0 || n < 16*runs {
		grain = 1
	}
	out := make([]int, 0, runs)
	for ; runs > 1; runs-- {
		most := (n - grain*(runs-1)) / grain
		k := grain * (1 + random.IntN(max(1, most)))
		out, n = append(out, k), n-k
	}
	return append(out, n)
}

// object is the bytes of an object, as of the last pull.
func (a *arena) object(i int) []byte {
	return a.buf[a.offset[i] : a.offset[i]+a.r.Bytes(a.ctxs[i].Object)]
}

// sync copies the objects into the image.
func (a *arena) sync() {
	for i, pieces := range a.image.pieces {
		b := a.object(i)
		for _, p := range pieces {
			b = b[copy(a.image.bytes[p.at:p.at+p.n], b):]
		}
	}
}

// push makes the memory what buf says.
func (a *arena) push() {
	a.r.t.Helper()
	if a.image != nil {
		a.sync()
		require.NoError(a.r.t, a.r.device().Upload(a.image.address, a.image.bytes))
	}
}

// clearPart zeroes the objects from first up to end, beside transfers of the others.
func (a *arena) clearPart(first, end int) error {
	for i := first; i < end; i++ {
		clear(a.object(i))
		if a.image == nil {
			continue
		}
		for _, p := range a.image.pieces[i] {
			if err := a.r.device().Upload(a.image.address+uint64(p.at), make([]byte, p.n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// pull makes buf what the memory holds, and sees that nothing was written beside the objects.
func (a *arena) pull() {
	a.r.t.Helper()
	if a.image == nil {
		return
	}
	require.NoError(a.r.t, a.r.device().Download(a.image.bytes, a.image.address))
	m := a.image
	for i, pieces := range m.pieces {
		b := a.object(i)
		for _, p := range pieces {
			own := m.bytes[p.at : p.at+p.n]
			b = b[copy(b, own):]
			copy(own, m.blank)
		}
	}
	if !bytes.Equal(m.bytes, m.blank) {
		a.r.t.Fatalf("byte %d of device memory, which is no object's, was overwritten",
			firstDifference(m.blank, m.bytes))
	}
}

// set gives all bytes of all objects one value.
func (a *arena) set(b byte) {
	a.r.t.Helper()
	setAll(a.buf, b)
	a.push()
}

// setAll is for long memory, whose every byte the race detector would look at.
//
//go:norace
func setAll(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// fill gives the objects the content of a round.
func (a *arena) fill(round uint64) {
	a.r.t.Helper()
	for i := range a.ctxs {
		Content(a.object(i), a.ctxs[i].Slot, a.ctxs[i].Object, round)
	}
	a.push()
}

// check compares all objects with the content of a round, and those in failed with zero.
func (a *arena) check(round uint64, failed map[int]bool) {
	a.r.t.Helper()
	a.pull()
	for i := range a.ctxs {
		a.checkOne(i, round, failed[i])
	}
}

// checkZero sees that all objects are.
func (a *arena) checkZero(what string) {
	a.r.t.Helper()
	a.pull()
	for i := range a.ctxs {
		b := a.object(i)
		want := a.r.scratch(len(b))
		if clear(want); !bytes.Equal(b, want) {
			a.r.t.Fatalf("%s: index %d is not zero", what, i)
		}
	}
}

// checkOne looks at one object, as of the last pull.
func (a *arena) checkOne(i int, round uint64, zero bool) {
	a.r.t.Helper()
	want := a.r.scratch(a.r.Bytes(a.ctxs[i].Object))
	if zero {
		clear(want)
	} else {
		Content(want, a.ctxs[i].Slot, a.ctxs[i].Object, round)
	}
	if got := a.object(i); !bytes.Equal(want, got) {
		a.r.t.Fatalf("object %d of slot %d (index %d, to be zero: %v) holds other bytes, from byte %d on",
			a.ctxs[i].Object, a.ctxs[i].Slot, i, zero, firstDifference(want, got))
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// onMedium compares what the drives hold with the content of a round.
func (a *arena) onMedium(round uint64) {
	a.r.t.Helper()
	for i := range a.ctxs {
		a.r.checkStored(a.ctxs[i].Slot, a.ctxs[i].Object, round)
	}
}

// beyond is a descriptor from which no object fits the memory.
func (a *arena) beyond() uint64 {
	switch a.kind {
	case device:
		return a.memory.Desc(len(a.image.bytes) - 5)
	case paged:
		return a.memory.Desc(1 << 40)
	}
	return a.memory.Desc(len(a.buf) - 5)
}

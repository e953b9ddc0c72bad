package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// fakeMount answers the verbs of one pool from an arena, as a daemon does.
type fakeMount struct {
	mu         sync.Mutex
	arena      []byte
	generation uint64
	word       uint64
	rows       []gio.MapRow
	pageRows   int    // rows of one answer
	moving     int    // answers after which the generation moves
	geometry   []byte // of the last PoolOpen
	identity   []byte
	layout     *stripe.Layout
	acked      uint64
	present    map[Key]bool
	pins       map[uint64]int
	reserved   map[uint64]int
	others     map[uint64]bool // reservations that another rank made
	refused    uint64          // a request whose id has other keys or items
	stuck      uint64          // a reservation that is told EAGAIN for ever
	capacity   uint64          // bytes
	held       int             // files reserved
	aborts     []uint64
	room       int // items that still fit
	declined   bool
	busy       int // EAGAINs before a reserve succeeds
	commits    []uint64
	calls      int
	bad        error
	rowsAnswer func(a *ioctl.Rows)    // instead of an honest one
	changes    func(a *ioctl.Changes) // likewise
}

const fakeEntry = 100_000

func (f *fakeMount) bytes(s ioctl.Span) []byte { return f.arena[s.Offset : s.Offset+s.Bytes] }

func (f *fakeMount) PoolOpen(a *ioctl.PoolOpen) error {
	f.geometry, f.identity = bytes.Clone(f.bytes(a.Geometry)), bytes.Clone(f.bytes(a.Identity))
	a.Target, a.Ticket = ioctl.Target{Kind: ioctl.TargetPool, ID: 7}, 99
	return nil
}

func (f *fakeMount) Layout(a *ioctl.Layout) error {
	g, err := stripe.ParseGeometry(f.geometry)
	if err != nil {
		return err
	}
	if f.layout, err = stripe.NewLayout(g, 2); err != nil {
		return err
	}
	a.GeometryBytes = uint64(copy(f.bytes(a.Geometry), f.geometry))
	a.EntryUnits, a.SlotUnits, a.Width, a.MapGeneration = fakeEntry, f.layout.SlotUnits(), 2, f.generation
	a.SlotsPerRow = f.layout.SlotsPerRow(fakeEntry)
	return nil
}

func (f *fakeMount) Rows(a *ioctl.Rows) error {
	f.calls++
	if f.rowsAnswer != nil {
		f.rowsAnswer(a)
		return nil
	}
	if f.moving > 0 {
		if f.moving--; f.moving == 0 {
			f.generation++
		}
	}
	a.MapGeneration, a.RowBytes, a.Total = f.generation, 8+2*16, uint32(len(f.rows))
	b := f.bytes(a.Rows)[:0]
	for _, r := range f.rows {
		if r.Number < a.First {
			continue
		}
		if int(a.Count) == f.pageRows {
			a.Next = r.Number
			break
		}
		b = binary.LittleEndian.AppendUint32(b, r.Number)
		b = binary.LittleEndian.AppendUint32(b, 2)
		for e := range 2 {
			b = binary.LittleEndian.AppendUint64(b, r.Units[e])
			b = binary.LittleEndian.AppendUint64(b, uint64(r.Drives[e]))
		}
		a.Count++
	}
	return nil
}

func (f *fakeMount) MapAck(a *ioctl.MapAck) error { f.acked = a.MapGeneration; return nil }

func (f *fakeMount) prefix(s ioctl.Span) (n int) {
	b := f.bytes(s)
	for ; len(b) > 0 && f.present[Key(b[:32])]; b = b[32:] {
		n++
	}
	return n
}

func (f *fakeMount) Present(a *ioctl.Present) error {
	f.calls++
	out := f.bytes(a.Present)
	for i, b := 0, f.bytes(a.Keys); len(b) > 0; i, b = i+1, b[32:] {
		if out[i] = 0; f.present[Key(b[:32])] {
			out[i] = 1
		}
	}
	return f.bad
}

func (f *fakeMount) Peek(a *ioctl.Peek) error {
	f.calls++
	a.Count = uint32(f.prefix(a.Keys))
	return f.bad
}

func (f *fakeMount) grants(s ioctl.Span, n int, status uint8) {
	b := f.bytes(s)
	for i := range n {
		g := b[i*40 : (i+1)*40]
		clear(g)
		binary.LittleEndian.PutUint32(g, uint32(f.calls*10000+i))
		binary.LittleEndian.PutUint64(g[8:], 5)
		g[16], g[32] = byte(i), status
	}
}

func (f *fakeMount) Pin(a *ioctl.Pin) error {
	f.calls++
	if f.bad != nil {
		return f.bad
	}
	if f.refused != 0 && a.Request == f.refused {
		return ioctl.EINVAL
	}
	n, again := f.pins[a.Request]
	if !again {
		n = f.prefix(a.Keys)
	}
	if n > 0 { // what finds nothing keeps nothing
		f.pins[a.Request] = n
	}
	f.grants(a.Grants, n, ioctl.GrantPinned)
	a.Count, a.Pools, a.MapGeneration = uint32(n), 1, f.generation
	return nil
}

func (f *fakeMount) Release(a *ioctl.Release) error {
	if _, ok := f.pins[a.Request]; !ok {
		return ioctl.ENOENT
	}
	delete(f.pins, a.Request)
	return nil
}

func (f *fakeMount) Reserve(a *ioctl.Reserve, flags uint16) error {
	f.calls++
	if f.busy > 0 {
		f.busy--
		return ioctl.EAGAIN
	}
	if f.stuck != 0 && a.Reserve == f.stuck {
		return ioctl.EAGAIN
	}
	n := int(a.Items.Bytes) / 72
	if f.refused != 0 && a.Reserve == f.refused {
		return ioctl.EINVAL
	}
	if f.others[a.Reserve] {
		f.grants(a.Grants, n, ioctl.GrantJoined)
		a.Count, a.Pools, a.MapGeneration = uint32(n), 1, f.generation
		return nil
	}
	if n > f.room && flags&ioctl.ReservePartial == 0 {
		return ioctl.ENOSPC
	}
	n = min(n, f.room)
	f.room -= n
	f.reserved[a.Reserve] = n
	status := uint8(ioctl.GrantNew)
	if f.declined {
		status = ioctl.GrantDeclined
	}
	f.grants(a.Grants, n, status)
	a.Count, a.Pools, a.MapGeneration = uint32(n), 1, f.generation
	return nil
}

func (f *fakeMount) Commit(a *ioctl.Commit) error {
	if _, ok := f.reserved[a.Reserve]; !ok {
		return ioctl.ENOENT
	}
	f.commits = append(f.commits, a.Reserve)
	a.Ticket = uint64(len(f.commits))
	return nil
}

func (f *fakeMount) Abort(a *ioctl.Abort) error {
	f.aborts = append(f.aborts, a.Reserve)
	n, ok := f.reserved[a.Reserve]
	if !ok {
		return ioctl.ENOENT
	}
	f.room += n
	delete(f.reserved, a.Reserve)
	return nil
}

func (f *fakeMount) Stats(a *ioctl.Stats) error {
	a.Files, a.BytesCapacity, a.FilesReserved = uint64(len(f.present)), f.capacity, uint64(f.held)
	return f.bad
}

// Changes tells a made-up history of twenty changes, as many at a time as there is room for.
func (f *fakeMount) Changes(a *ioctl.Changes) error {
	if f.changes != nil {
		f.changes(a)
		return f.bad
	}
	if a.Next = max(1, a.Since); a.Since == 0 {
		return f.bad
	}
	b := f.bytes(a.Changes)
	for ; len(b) >= changeBytes && a.Next <= 20; b = b[changeBytes:] {
		clear(b[:changeBytes])
		b[0] = byte(a.Next)
		binary.LittleEndian.PutUint32(b[ioctl.KeyBytes:], uint32(a.Next)*2)
		b[ioctl.KeyBytes+4] = ioctl.ChangeStored + byte(a.Next%2)
		a.Next, a.Count = a.Next+1, a.Count+1
	}
	return f.bad
}

func (f *fakeMount) ReportBad(a *ioctl.ReportBad) error { a.Ticket = 1234; return nil }

// newPool opens a pool on a fake mount with an arena of n bytes.
func newPool(t testing.TB, n int) (*Pool, *fakeMount, *[]uint64) {
	c, f, waited := newControl(n)
	g := stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 9000}}}}}
	p, err := c.openPool(PoolSpec{Name: "pool", Identity: []byte("{}"), Geometry: g}, keepNothing)
	require.NoError(t, err)
	return p, f, waited
}

// newControl is the metadata side of a session on a fake mount, and the tickets that it has waited for.
func newControl(n int) (*control, *fakeMount, *[]uint64) {
	f := &fakeMount{
		arena: make([]byte, n), generation: 3, pageRows: 2, room: 1 << 30,
		present: map[Key]bool{}, pins: map[uint64]int{}, reserved: map[uint64]int{},
	}
	for i := range uint32(5) {
		units := []uint64{uint64(i), uint64(i)}
		f.rows = append(f.rows, gio.MapRow{Number: 3 * i, Drives: []uint16{0, 1}, Units: units})
	}
	var waited []uint64
	c := &control{verbs: f, deadline: time.Second, arena: f.arena, mapWord: func() uint64 { return f.word },
		wait: func(_ context.Context, id uint64) error { waited = append(waited, id); return nil }}
	return c, f, &waited
}

func keys(n int) []Key {
	k := make([]Key, n)
	for i := range k {
		binary.LittleEndian.PutUint64(k[i][:], uint64(i)+1)
	}
	return k
}

func TestOpenPoolFetchesAllPages(t *testing.T) {
	p, f, waited := newPool(t, 4096)
	require.Equal(t, []uint64{99}, *waited, "durable before it is used")
	require.Equal(t, "{}", string(f.identity))
	require.Equal(t, 2, p.Layout().Objects(), "a trailer was appended")
	require.EqualValues(t, 3, p.Map().Generation())
	require.EqualValues(t, 3, f.acked)
	perRow := p.Layout().SlotsPerRow(fakeEntry)
	for number := range uint32(13) {
		_, _, _, ok := p.Map().Locate(number*perRow, 0)
		require.Equal(t, number%3 == 0, ok, "row %d", number)
	}
}

func TestMapFollowsGenerations(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	calls := f.calls
	require.EqualValues(t, 3, p.Map().Generation())
	require.Equal(t, calls, f.calls, "nothing is asked while nothing moves")

	f.word++ // another pool's rows
	require.EqualValues(t, 3, p.Map().Generation())
	require.Equal(t, calls+1, f.calls)

	f.word, f.generation, f.moving = f.word+1, 4, 2 // and once more between two pages
	require.EqualValues(t, 5, p.Map().Generation())
	require.EqualValues(t, 5, f.acked)

	f.generation = 9 // seen by a pin before the word is
	f.present[keys(1)[0]] = true
	n, err := p.Pin(0, 1, keys(1), make([]Grant, 1))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.EqualValues(t, 9, p.extents.Load().Generation())
}

// A pin that is refused releases what it has pinned itself, and nothing that was pinned before.
func TestRefusedPin(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	all := keys(500)
	for _, k := range all {
		f.present[k] = true
	}
	grants := make([]Grant, len(all))
	n, err := p.Pin(0, 1, all[:3], grants)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	f.refused = partID(1, 0) // the id has other keys
	_, err = p.Pin(0, 1, all[3:6], grants)
	require.ErrorIs(t, err, ErrInvalid)
	require.Len(t, f.pins, 1, "the first pin is as it was")
	require.NoError(t, p.Release(1))
	require.Empty(t, f.pins)

	f.refused = partID(2, 3)
	_, err = p.Pin(0, 2, all, grants)
	require.ErrorIs(t, err, ErrInvalid)
	require.Empty(t, f.pins, "what this one had pinned is released")
}

// Batches larger than the arena are cut and act as one.
func TestLargeBatches(t *testing.T) {
	p, f, waited := newPool(t, 4096)
	all := keys(500)
	for _, k := range all[:321] {
		f.present[k] = true
	}
	n, err := p.Peek(0, all)
	require.NoError(t, err)
	require.Equal(t, 321, n)
	present, turned := make([]bool, len(all)), slices.Clone(all)
	slices.Reverse(turned)
	require.NoError(t, p.Present(0, turned, present))
	for i, there := range present {
		require.Equal(t, i >= len(all)-321, there)
	}
	require.ErrorIs(t, p.Present(0, all, present[1:]), ErrInvalid)

	grants := make([]Grant, len(all))
	n, err = p.Pin(0, 42, all, grants)
	require.NoError(t, err)
	require.Equal(t, 321, n)
	require.Greater(t, len(f.pins), 4)
	slots := map[uint32]bool{}
	for _, g := range grants[:n] {
		require.EqualValues(t, ioctl.GrantPinned, g.Status)
		require.EqualValues(t, 5, g.Generation)
		slots[g.Slot] = true
	}
	require.Len(t, slots, 321)
	require.NoError(t, p.Release(42))
	require.Empty(t, f.pins)
	require.ErrorIs(t, p.Release(42), ErrNotFound)

	items := make([]Item, 500)
	for i := range items {
		items[i] = Item{Key: all[i], Tokens: 16, Position: uint32(i)}
	}
	f.busy = 3
	n, err = p.Reserve(0, 43, items, false, grants)
	require.NoError(t, err)
	require.Equal(t, 500, n)
	parts := len(f.reserved)
	require.Greater(t, parts, 4)
	*waited = nil
	require.NoError(t, p.Commit(43, 0))
	require.Len(t, f.commits, parts)
	require.Len(t, *waited, parts)
	slices.Sort(f.commits)
	require.Len(t, slices.Compact(f.commits), parts, "each part once")
}

// A rank that commits while another one waits for it commits all parts too.
func TestRanksCommitAllParts(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	items := make([]Item, 500)
	for i, key := range keys(500) {
		items[i] = Item{Key: key, Tokens: 16}
	}
	_, err := p.Reserve(0, 1, items, false, make([]Grant, 500))
	require.NoError(t, err)
	parts, waits := len(f.reserved), 0
	require.Greater(t, parts, 4)
	p.control.wait = func(context.Context, uint64) error {
		if waits++; waits == 1 {
			return p.Commit(1, 1)
		}
		return nil
	}
	require.NoError(t, p.Commit(1, 0))
	require.Len(t, f.commits, 2*parts)
	require.Empty(t, p.parts)
}

func TestReserveIsAllOrNothing(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	f.room = 300
	items, grants := make([]Item, 500), make([]Grant, 500)
	_, err := p.Reserve(0, 1, items, false, grants)
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorIs(t, err, ioctl.ENOSPC)
	require.Empty(t, f.reserved, "parts that fitted were given back")
	require.Equal(t, 300, f.room)

	n, err := p.Reserve(0, 2, items, true, grants)
	require.NoError(t, err)
	require.Equal(t, 300, n)
	require.NoError(t, p.Abort(2))
	require.Empty(t, f.reserved)
	require.Equal(t, 300, f.room)
}

// A part for which room is still being made at the deadline leaves those before it granted, where a part will do.
func TestPartialReserveEndsWhereItWaits(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	p.control.deadline, f.stuck = 5*time.Millisecond, partID(3, 2)
	items, grants := make([]Item, 500), make([]Grant, 500)
	_, err := p.Reserve(0, 3, items, false, grants)
	require.ErrorIs(t, err, ErrAgain)
	require.Empty(t, f.reserved)
	n, err := p.Reserve(0, 3, items, true, grants)
	require.NoError(t, err)
	require.Len(t, f.reserved, 2)
	require.Equal(t, f.reserved[partID(3, 0)]+f.reserved[partID(3, 1)], n)
	f.stuck = partID(4, 0)
	_, err = p.Reserve(0, 4, items, true, grants)
	require.ErrorIs(t, err, ErrAgain, "nothing at all")
}

// What is too large for the pool is told so, and not that others are in the way.
func TestNoSpaceSaysWhy(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	f.room, f.capacity = 0, 40*p.layout.SlotUnits()*stripe.UnitBytes
	_, err := p.Reserve(0, 1, make([]Item, 41), false, make([]Grant, 41))
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, "41 files are wanted, the pool has room for 40: store fewer")
	f.held = 30
	_, err = p.Reserve(0, 1, make([]Item, 20), false, make([]Grant, 20))
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, "room for 40, of which 30 are pinned or reserved")
}

func TestNotLeased(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	f.bad = ioctl.EPERM
	_, err := p.Pin(0, 1, keys(1), make([]Grant, 1))
	require.ErrorIs(t, err, ErrLease)
	require.ErrorIs(t, err, ioctl.EPERM)
}

// A rank that cannot join gives back what it made itself, and leaves the other ranks what is theirs.
func TestFailedJoinLeavesOtherRanksAlone(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	items, grants := make([]Item, 200), make([]Grant, 200)
	f.refused = partID(9, 0)
	_, err := p.Reserve(0, 9, items, false, grants)
	require.ErrorIs(t, err, ErrInvalid)
	require.Empty(t, f.aborts, "nothing was made")

	f.refused, f.others = partID(9, 2), map[uint64]bool{partID(9, 0): true}
	_, err = p.Reserve(0, 9, items, true, grants)
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, []uint64{partID(9, 1)}, f.aborts, "the first part was joined, the third refused")
	require.Empty(t, f.reserved)
	require.Equal(t, 1<<30, f.room)
}

func TestPinGivesBackWhenAPartFails(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	all := keys(200)
	for _, k := range all {
		f.present[k] = true
	}
	f.bad = ioctl.ESTALE
	_, err := p.Pin(0, 1, all, make([]Grant, 200))
	require.ErrorIs(t, err, ErrGone)
	require.Empty(t, f.pins)
	_, err = p.Pin(0, 1, all, make([]Grant, 199))
	require.ErrorIs(t, err, ErrInvalid)
}

func TestRetryEndsAtTheDeadline(t *testing.T) {
	p, f, _ := newPool(t, 4096)
	p.control.deadline, f.busy = 5*time.Millisecond, 1<<30
	_, err := p.Reserve(0, 1, make([]Item, 1), false, make([]Grant, 1))
	require.ErrorIs(t, err, ErrAgain)
}

func TestSmallArenaIsRefusedWithAdvice(t *testing.T) {
	f := &fakeMount{arena: make([]byte, 64)}
	c := &control{verbs: f, deadline: time.Second, arena: f.arena}
	g := stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 9000}}}}}
	_, err := c.openPool(PoolSpec{Name: "pool", Identity: make([]byte, 100), Geometry: g}, keepNothing)
	require.ErrorContains(t, err, "ArenaBytes")
	_, err = c.openPool(PoolSpec{Name: string(make([]byte, 65)), Geometry: g}, keepNothing)
	require.ErrorIs(t, err, ErrInvalid)
}

func TestPartIDsDoNotMeet(t *testing.T) {
	seen := map[uint64]bool{}
	for id := range uint64(300) {
		for k := range 50 {
			seen[partID(id, k)] = true
		}
	}
	require.Len(t, seen, 300*50)
}

func TestOpenRefusesOtherPaths(t *testing.T) {
	_, err := Open(t.TempDir())
	require.ErrorIs(t, err, ErrNotMount)
	_, err = Open("/proc/self/nothing/here")
	require.Error(t, err)
}

// FuzzRows gives any answer to ROWS: it becomes a map or an error.
func FuzzRows(f *testing.F) {
	f.Add(uint32(40), uint32(1), uint32(0), []byte{5, 0, 0, 0, 2, 0, 0, 0, 9})
	f.Add(uint32(40), uint32(1<<31), uint32(7), []byte{})
	f.Add(uint32(0), uint32(3), uint32(1), []byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, rowBytes, count, next uint32, b []byte) {
		p, mount, _ := newPool(t, 4096)
		asked := 0
		mount.rowsAnswer = func(a *ioctl.Rows) {
			copy(mount.bytes(a.Rows), b)
			a.RowBytes, a.Count, a.Next, a.MapGeneration = rowBytes, count, next, 50
			if asked++; asked > 1 {
				a.Next = 0
			}
		}
		mount.word++
		m := p.Map()
		require.NotNil(t, m)
		m.Locate(0, 0)
	})
}

// TestExplainOnce: several callers on the way of an error explain it, and it is said once.
func TestExplainOnce(t *testing.T) {
	once := explain(fmt.Errorf("commit: %w", ioctl.ENODATA))
	require.ErrorIs(t, once, ErrIncomplete)
	require.ErrorIs(t, once, ioctl.ENODATA)
	require.Equal(t, once, explain(once))
	require.NoError(t, explain(nil))
}

// keepNothing is for pools without memory for blocks that are declined.
func keepNothing(*Pool) error { return nil }

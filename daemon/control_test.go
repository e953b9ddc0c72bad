package daemon

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// world is a volume on memory drives with a Control over it: everything of a mount but the mount.
type world struct {
	t       testing.TB
	volume  *extentmap.Volume
	store   *gpufile.Store
	control *Control
}

func newWorld(t testing.TB, g gpufile.Options, o ControlOptions) *world {
	t.Helper()
	return newWorldOf(t, 64<<20, g, o)
}

func newWorldOf(t testing.TB, driveBytes int64, g gpufile.Options, o ControlOptions) *world {
	t.Helper()
	return newWorldOn(t, memoryDrives(t, driveBytes), g, o)
}

func memoryDrives(t testing.TB, driveBytes int64) []drive.Drive {
	t.Helper()
	drives := make([]drive.Drive, 2)
	for i := range drives {
		d, err := drive.NewMemory("memory"+string(rune('a'+i)), driveBytes)
		require.NoError(t, err)
		drives[i] = d
	}
	return drives
}

func newWorldOn(t testing.TB, drives []drive.Drive, g gpufile.Options, o ControlOptions) *world {
	t.Helper()
	_, err := extentmap.Format(drives, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	return openWorld(t, drives, extentmap.Options{}, g, o)
}

func openWorld(t testing.TB, drives []drive.Drive, x extentmap.Options, g gpufile.Options, o ControlOptions) *world {
	t.Helper()
	return openWorldAs(t, Options{}, drives, x, g, o)
}

// openWorldAs has what a mount of these options makes of its drives: with phases, and modelled where it has profiles.
func openWorldAs(t testing.TB, as Options, drives []drive.Drive, x extentmap.Options, g gpufile.Options,
	o ControlOptions) *world {
	t.Helper()
	w := &world{t: t}
	as.DriveTimeout = max(x.DriveTimeout, 0)
	as.fill()
	mounted := make([]drive.Drive, len(drives))
	for i, d := range drives {
		mounted[i] = &mountedDrive{Drive: d}
	}
	var err error
	w.volume, err = extentmap.OpenDrives(mounted, x)
	require.NoError(t, err)
	require.NoError(t, as.beginAll(w.volume))
	w.store, err = gpufile.Open(w.volume, g)
	require.NoError(t, err)
	w.store.SetVerifier(func(*gpufile.Pool, uint32, checksum.Seed) gpufile.Verdict { return gpufile.Damaged })
	if o.SocketDir == "" {
		o.SocketDir = socketDir(t)
	}
	if _, fuzz := t.(*testing.F); !fuzz { // a fuzz target's log is not for goroutines that outlive its inputs
		o.Logf = t.Logf
	}
	w.control, err = NewControl(w.store, o)
	require.NoError(t, err)
	t.Cleanup(w.close)
	return w
}

// close ends everything in the daemon's order. Closing again does nothing.
func (w *world) close() {
	if w.volume != nil {
		require.NoError(w.t, w.control.Shutdown())
		w.store.Close()
		require.NoError(w.t, w.volume.Close())
		w.volume = nil
	}
}

// socketDir is short: socket paths hold 107 bytes.
func socketDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "tuttifs-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// client is an open file of the mount without the mount: it calls the handler as fs does.
type client struct {
	w      *world
	handle uint64
	pid    uint32
}

func (w *world) open(writable bool) *client {
	uid := uint32(os.Geteuid())
	c := &client{w: w, pid: uint32(os.Getpid()), handle: w.control.Open(uint32(os.Getpid()), uid, 0, writable)}
	require.NotZero(w.t, c.handle)
	w.t.Cleanup(func() { w.control.Close(c.handle) })
	return c
}

func issue[T any](c *client, cmd uint32, a *T, flags uint16) ioctl.Errno {
	size := unsafe.Sizeof(*a)
	in := unsafe.Slice((*byte)(unsafe.Pointer(a)), size)
	*(*ioctl.Header)(unsafe.Pointer(a)) = ioctl.Header{Size: uint32(size), Version: ioctl.Version, Flags: flags}
	out := make([]byte, size)
	errno := ioctl.Errno(c.w.control.Ioctl(c.handle, c.pid, cmd, 0, append([]byte(nil), in...), out))
	if errno == 0 {
		copy(in, out)
	}
	return errno
}

// session makes a session and attaches.
func (c *client) session(o ioctl.AttachOptions) (*ioctl.Session, *ioctl.Attachment) {
	c.w.t.Helper()
	var s ioctl.Session
	require.Zero(c.w.t, issue(c, ioctl.CmdSessionCreate, &s, 0))
	a, err := s.Attach(o)
	require.NoError(c.w.t, err)
	c.w.t.Cleanup(func() { _ = a.Close() })
	return &s, a
}

func testIdentity(group string) gpufile.Identity {
	return gpufile.Identity{Model: "test/model", Revision: "r1", WeightsEpoch: 1, DType: "bf16", Quantisation: "none",
		ScaleFormat: "none", Layout: "NHD", PageBytes: 4096, BlockTokens: 16, FileTokens: 16,
		TP: 1, PP: 1, CP: 1, Group: group}
}

func testGeometry(t testing.TB, ranks int) stripe.Geometry {
	g, err := stripe.KV{Layers: 2, KVHeads: 2, HeadDim: 64, DTypeBytes: 2, Tokens: 16, Ranks: ranks}.Geometry()
	require.NoError(t, err)
	return g
}

// poolRequest puts identity and geometry into the arena.
func poolRequest(t testing.TB, arena []byte, name string, id gpufile.Identity, g stripe.Geometry) ioctl.PoolOpen {
	identity, err := json.Marshal(id)
	require.NoError(t, err)
	geometry, err := g.MarshalBinary()
	require.NoError(t, err)
	at := uint64(len(identity)+7) &^ 7
	copy(arena, identity)
	copy(arena[at:], geometry)
	a := ioctl.PoolOpen{Identity: ioctl.Span{Bytes: uint64(len(identity))},
		Geometry: ioctl.Span{Offset: at, Bytes: uint64(len(geometry))}, TokensPerFile: 16, ChecksumAlg: 1}
	require.True(t, ioctl.PutName(a.Name[:], name))
	return a
}

func (c *client) pool(a *ioctl.Attachment, name string) ioctl.Target {
	c.w.t.Helper()
	r := poolRequest(c.w.t, a.Arena, name, testIdentity("full"), testGeometry(c.w.t, 1))
	require.Zero(c.w.t, issue(c, ioctl.CmdPoolOpen, &r, 0))
	require.Zero(c.w.t, c.wait(r.Ticket).Errno)
	return r.Target
}

func (c *client) wait(id uint64) (t ioctl.Ticket) {
	c.w.t.Helper()
	require.Eventually(c.w.t, func() bool {
		t = ioctl.Ticket{ID: id}
		require.Zero(c.w.t, issue(c, ioctl.CmdTicket, &t, 0))
		return t.State != ioctl.TicketPending
	}, 10*time.Second, time.Millisecond)
	return t
}

// Spans of the tests' arenas (1 MiB): keys or items, and grants.
var (
	keySpan   = ioctl.Span{Offset: 256 << 10}
	grantSpan = ioctl.Span{Offset: 512 << 10, Bytes: 256 << 10}
)

func key(n int) (k [32]byte) {
	k[0], k[1], k[31] = byte(n), byte(n>>8), 1
	return k
}

// items puts a chain of n files into the arena.
func items(a *ioctl.Attachment, n int) ioctl.Span {
	s := ioctl.Span{Offset: keySpan.Offset, Bytes: uint64(n) * uint64(unsafe.Sizeof(ioctl.ReserveItem{}))}
	for i := range ioctl.View[ioctl.ReserveItem](a.Arena, s) {
		it := ioctl.ReserveItem{Key: key(i), Tokens: 16, Position: uint32(i)}
		if i > 0 {
			it.Parent = key(i - 1)
		}
		ioctl.View[ioctl.ReserveItem](a.Arena, s)[i] = it
	}
	return s
}

// keys puts the keys of that chain into the arena.
func keys(a *ioctl.Attachment, n int) ioctl.Span {
	s := ioctl.Span{Offset: keySpan.Offset, Bytes: uint64(n) * ioctl.KeyBytes}
	for i := range n {
		ioctl.View[[32]byte](a.Arena, s)[i] = key(i)
	}
	return s
}

// store reserves and commits a chain of n files; the store was opened with NoIO.
func (c *client) store(a *ioctl.Attachment, pool ioctl.Target, reserve uint64, n int) {
	c.w.t.Helper()
	r := ioctl.Reserve{Target: pool, Items: items(a, n), Grants: grantSpan, Reserve: reserve}
	c.reserve(&r)
	require.Equal(c.w.t, uint32(n), r.Count)
	commit := ioctl.Commit{Target: pool, Reserve: reserve}
	require.Zero(c.w.t, issue(c, ioctl.CmdCommit, &commit, 0))
	require.Equal(c.w.t, uint32(ioctl.TicketDone), c.wait(commit.Ticket).State)
}

// reserve repeats the verb while space is being made.
func (c *client) reserve(r *ioctl.Reserve) {
	c.w.t.Helper()
	require.Eventually(c.w.t, func() bool {
		errno := issue(c, ioctl.CmdReserve, r, 0)
		require.Contains(c.w.t, []ioctl.Errno{0, ioctl.EAGAIN}, errno)
		return errno == 0
	}, 10*time.Second, time.Millisecond)
}

// TestLifeOfAFile goes through every verb once.
func TestLifeOfAFile(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	pool := c.pool(a, "p")

	hello := ioctl.Hello{}
	require.Zero(t, issue(c, ioctl.CmdHello, &hello, 0))
	require.Equal(t, w.volume.Info().UUID, hello.UUID)
	require.Equal(t, uint32(2), hello.Drives)
	require.Equal(t, uint32(1), hello.Pools)
	name, ok := ioctl.Name(hello.Label[:])
	require.True(t, ok)
	require.Equal(t, "test", name)
	drives := ioctl.Drives{}
	require.Zero(t, issue(c, ioctl.CmdDrives, &drives, 0))
	require.Equal(t, [2]uint32{2, 2}, [2]uint32{drives.Count, drives.Total})
	require.Equal(t, uint8(ioctl.DriveMemory), drives.Entries[1].Kind)
	require.Equal(t, uint64(64<<20), drives.Entries[1].Bytes)

	const n = 5
	c.store(a, pool, 1, n)
	peek := ioctl.Peek{Target: pool, Keys: keys(a, n+1)}
	require.Zero(t, issue(c, ioctl.CmdPeek, &peek, 0))
	present := ioctl.Present{Target: pool, Keys: peek.Keys, Present: ioctl.Span{Offset: grantSpan.Offset, Bytes: n + 2}}
	copy(a.Arena[present.Present.Offset:], bytes.Repeat([]byte{9}, n+2))
	require.Zero(t, issue(c, ioctl.CmdPresent, &present, 0))
	want := append(bytes.Repeat([]byte{1}, n), 0, 9)
	require.Equal(t, want, a.Arena[present.Present.Offset:][:n+2])
	require.Equal(t, uint32(n), present.Count)
	require.Equal(t, uint32(n), peek.Count)

	pin := ioctl.Pin{Target: pool, Keys: keys(a, n+1), Grants: grantSpan, Request: 1}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0))
	require.Equal(t, [2]uint32{n, 1}, [2]uint32{pin.Count, pin.Pools})
	grants := append([]ioctl.Grant(nil), ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:n]...)
	for i, g := range grants {
		require.Equal(t, uint8(ioctl.GrantPinned), g.Status)
		require.Equal(t, uint32(16), g.Tokens)
		require.NotZero(t, g.Generation)
		require.NotZero(t, g.Seed)
		slot, generation, ok := w.store.PoolByName("p").Find(ptr(key(i)))
		require.True(t, ok)
		require.Equal(t, [2]uint64{uint64(slot), generation}, [2]uint64{uint64(g.Slot), g.Generation})
	}
	require.Zero(t, issue(c, ioctl.CmdPin, &pin, 0), "repeated")
	require.Equal(t, grants, ioctl.View[ioctl.Grant](a.Arena, grantSpan)[:n])
	checkMap(t, c, a, pool, grants)
	require.Zero(t, issue(c, ioctl.CmdRelease, &ioctl.Release{Target: pool, Request: 1}, 0))
	require.Equal(t, ioctl.ENOENT, issue(c, ioctl.CmdRelease, &ioctl.Release{Target: pool, Request: 1}, 0))

	last := ioctl.Span{Offset: keySpan.Offset + (n-1)*ioctl.KeyBytes, Bytes: 2 * ioctl.KeyBytes}
	unlink := ioctl.Unlink{Target: pool, Keys: last}
	require.Zero(t, issue(c, ioctl.CmdUnlink, &unlink, 0))
	require.Equal(t, uint32(1), unlink.Count, "the second key was never there")
	evict := ioctl.Evict{Target: pool, Count: 1}
	require.Zero(t, issue(c, ioctl.CmdEvict, &evict, ioctl.EvictCount))
	require.Equal(t, uint64(1), c.wait(evict.Ticket).Value)
	third := ioctl.Span{Offset: keySpan.Offset + 2*ioctl.KeyBytes, Bytes: ioctl.KeyBytes}
	evict = ioctl.Evict{Target: pool, Keys: third}
	require.Zero(t, issue(c, ioctl.CmdEvict, &evict, ioctl.EvictPrefix))
	require.Equal(t, uint64(3), c.wait(evict.Ticket).Value)

	c.store(a, pool, 2, 1)
	bad := ioctl.ReportBad{Target: pool}
	slot, generation, ok := w.store.PoolByName("p").Find(ptr(key(0)))
	require.True(t, ok)
	bad.Slot, bad.Generation = slot, generation
	require.Zero(t, issue(c, ioctl.CmdReportBad, &bad, 0))
	c.wait(bad.Ticket)

	stats := ioctl.Stats{Target: pool}
	require.Zero(t, issue(c, ioctl.CmdStats, &stats, 0))
	require.Equal(t, uint64(1), stats.Bad)
	require.Equal(t, stats.Lookups, stats.Hits+stats.Misses)
	require.Equal(t, uint64(n+1), stats.Commits)
	require.Zero(t, stats.Files)
	events := ioctl.Events{}
	require.Zero(t, issue(c, ioctl.CmdEvents, &events, 0))
	require.Equal(t, uint32(1), events.Count)
	require.Equal(t, pool, events.Events[0].Target)
	require.Equal(t, uint64(n+1), events.Events[0].Committed)
	require.NotZero(t, events.Events[0].MapGeneration)
}

// TestChanges: what is stored, evicted, unlinked and found damaged is told in order, to each reader by itself.
func TestChanges(t *testing.T) {
	w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	pool := c.pool(a, "p")
	c.store(a, pool, 1, 1)
	room := ioctl.Span{Offset: grantSpan.Offset, Bytes: 3 * uint64(unsafe.Sizeof(ioctl.Change{}))}
	ask := func(since uint64) (ioctl.Changes, []ioctl.Change) {
		r := ioctl.Changes{Target: pool, Changes: room, Since: since}
		require.Zero(t, issue(c, ioctl.CmdChanges, &r, 0))
		require.Zero(t, r.Lost)
		return r, slices.Clone(ioctl.View[ioctl.Change](a.Arena, room)[:r.Count])
	}
	begin, told := ask(0)
	require.Empty(t, told, "what was there before is looked up")
	require.NotZero(t, begin.Next)
	c.store(a, pool, 2, 3)
	unlink := ioctl.Unlink{Target: pool, Keys: keys(a, 1)}
	require.Zero(t, issue(c, ioctl.CmdUnlink, &unlink, 0))
	evict := ioctl.Evict{Target: pool, Count: 1}
	require.Zero(t, issue(c, ioctl.CmdEvict, &evict, ioctl.EvictCount))
	c.wait(evict.Ticket)
	slot, generation, ok := w.store.PoolByName("p").Find(ptr(key(1)))
	require.True(t, ok, "the last of a chain goes first")
	bad := ioctl.ReportBad{Target: pool, Slot: slot, Generation: generation}
	require.Zero(t, issue(c, ioctl.CmdReportBad, &bad, 0))
	c.wait(bad.Ticket)
	want := []ioctl.Change{
		{Key: key(1), Kind: ioctl.ChangeStored}, {Key: key(2), Kind: ioctl.ChangeStored},
		{Key: key(0), Kind: ioctl.ChangeRemoved}, {Key: key(2), Kind: ioctl.ChangeRemoved},
		{Key: key(1), Kind: ioctl.ChangeRemoved}}
	for range 2 { // two readers
		first, told := ask(begin.Next)
		require.Equal(t, want[:3], told)
		second, told := ask(first.Next)
		require.Equal(t, want[3:], told)
		third, told := ask(second.Next)
		require.Empty(t, told)
		require.Equal(t, second.Next, third.Next)
	}
}

func ptr[T any](v T) *T { return &v }

// checkMap: layout and rows lead to the same places as EXTENTS, and both to the volume's own.
func checkMap(t *testing.T, c *client, a *ioctl.Attachment, pool ioctl.Target, grants []ioctl.Grant) {
	layout := ioctl.Layout{Target: pool}
	require.Zero(t, issue(c, ioctl.CmdLayout, &layout, 0), "the length alone")
	layout.Geometry = ioctl.Span{Bytes: layout.GeometryBytes - 1}
	require.Equal(t, ioctl.EOVERFLOW, issue(c, ioctl.CmdLayout, &layout, 0))
	layout.Geometry = ioctl.Span{Bytes: layout.GeometryBytes}
	require.Zero(t, issue(c, ioctl.CmdLayout, &layout, 0))
	g, err := stripe.ParseGeometry(a.Arena[:layout.GeometryBytes])
	require.NoError(t, err)
	l, err := stripe.NewLayout(g, int(layout.Width))
	require.NoError(t, err)
	require.Equal(t, layout.SlotUnits, l.SlotUnits())

	rows := ioctl.Rows{Target: pool, Rows: ioctl.Span{Bytes: 64 << 10}}
	require.Zero(t, issue(c, ioctl.CmdRows, &rows, 0))
	require.Equal(t, rows.Total, rows.Count)
	require.Zero(t, rows.Next)
	require.Equal(t, layout.MapGeneration, rows.MapGeneration)
	entries := map[uint32][]ioctl.RowEntry{}
	for i := range uint64(rows.Count) {
		at := i * uint64(rows.RowBytes)
		head := ioctl.View[ioctl.RowHead](a.Arena, ioctl.Span{Offset: at, Bytes: 8})[0]
		entries[head.Number] = append([]ioctl.RowEntry(nil), ioctl.View[ioctl.RowEntry](a.Arena,
			ioctl.Span{Offset: at + 8, Bytes: uint64(rows.RowBytes) - 8})...)
	}
	for _, grant := range grants {
		x := ioctl.Extents{Target: pool, Slot: grant.Slot, Generation: grant.Generation,
			Extents: ioctl.Span{Bytes: 64 << 10}}
		require.Zero(t, issue(c, ioctl.CmdExtents, &x, 0))
		require.Equal(t, uint32(len(g.Objects)), x.Count)
		row := entries[grant.Slot/layout.SlotsPerRow]
		for _, e := range ioctl.View[ioctl.Extent](a.Arena, x.Extents)[:x.Count] {
			entry, unit := l.Locate(grant.Slot%layout.SlotsPerRow, e.Object)
			require.Equal(t, row[entry].Drive, e.Drive)
			require.Equal(t, row[entry].Unit+unit, e.Unit)
			require.Equal(t, g.Objects[e.Object].Units(), e.Units)
		}
	}
	one := ioctl.Rows{Target: pool, Rows: ioctl.Span{Bytes: uint64(rows.RowBytes)}}
	require.Zero(t, issue(c, ioctl.CmdRows, &one, 0))
	require.Equal(t, uint32(1), one.Count)
	require.Equal(t, one.Total > 1, one.Next != 0)
	ack := ioctl.MapAck{Target: pool, MapGeneration: rows.MapGeneration}
	require.Zero(t, issue(c, ioctl.CmdMapAck, &ack, 0))
	require.Equal(t, rows.MapGeneration, ack.Current)
	ack.MapGeneration++
	require.Equal(t, ioctl.EINVAL, issue(c, ioctl.CmdMapAck, &ack, 0))
}

func TestDefaultPollers(t *testing.T) {
	for _, x := range []struct{ drives, cores, want int }{
		{4, 1, 1}, {4, 2, 1}, {4, 15, 1}, {4, 16, 2}, {4, 32, 4}, {4, 128, 4}, {1, 128, 1}, {8, 48, 6},
	} {
		require.Equal(t, x.want, defaultPollers(x.drives, x.cores), "%d drives, %d cores", x.drives, x.cores)
	}
}

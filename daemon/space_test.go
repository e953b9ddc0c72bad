package daemon

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	library "tuttifs/engine"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/gio"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// How much TestSpace stores: as many times what the volume holds, in as many rounds.
const (
	spaceTimesVariable = "TUTTIFS_SPACE_TIMES"
	spaceTimes         = 10
	spaceEngines       = 8
	spaceChain         = 4 // files of one reservation
)

// spacePools are three pools of one volume: one has a minimum, one a cap on its files, the third takes what it gets.
var spacePools = []string{"minimum", "capped", "free"}

const (
	spaceMinimum = 5 << 20
	spaceCap     = 61
)

func spaceSpec(pool string) library.PoolSpec {
	identity := testIdentity("full")
	identity.Group = pool
	text, err := json.Marshal(identity)
	if err != nil {
		panic(err) // a constant that is wrong
	}
	s := library.PoolSpec{Name: pool, Identity: text, TokensPerFile: 16}
	objects := map[string][]uint32{"minimum": {28672, 4096}, "capped": {61440}, "free": {12288, 24576, 8192}}[pool]
	for layer, n := range objects {
		s.Geometry.Objects = append(s.Geometry.Objects,
			stripe.Object{Layer: uint16(layer), Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: n}}})
	}
	switch pool {
	case "minimum":
		s.MinBytes = spaceMinimum
	case "capped":
		s.MaxSlots = spaceCap
	}
	return s
}

// spaceReport is what one engine answers to one order.
type spaceReport struct {
	Stored  int // files
	Refused int // reservations, for want of space
	Pinned  int
	Error   string
	Statfs  unix.Statfs_t
	Hello   ioctl.Hello
	Stats   map[string]ioctl.Stats
}

// filler is an engine that stores what it is told to.
type filler struct {
	mount   *library.Mount
	path    string
	session *library.Session
	pools   map[string]*library.Pool
	memory  *gio.Memory
	stored  map[string][][]library.Key // by pool
	next    uint64
}

// helpFill is the body of an engine: each line of its standard input is an order, a verb with a pool and a number of
// chains, each of its output a report.
func helpFill(_ *testing.T, arg string) error {
	path, number, _ := strings.Cut(arg, "|")
	n, err := strconv.ParseUint(number, 10, 8)
	if err != nil {
		return err
	}
	x := &filler{path: path, pools: map[string]*library.Pool{}, stored: map[string][][]library.Key{}, next: n << 32}
	if x.mount, err = library.Open(path); err != nil {
		return err
	}
	defer x.mount.Close()
	x.session, err = x.mount.NewSession(library.SessionOptions{Lanes: 1, Depth: 32, DMABytes: 1 << 20,
		ArenaBytes: 64 << 10, Deadline: time.Minute})
	if err != nil {
		return err
	}
	defer x.session.Close()
	if x.memory, err = x.session.Ring().RegisterPadded(x.session.DMA()); err != nil {
		return err
	}
	for _, name := range spacePools {
		if x.pools[name], err = x.session.OpenPool(spaceSpec(name)); err != nil {
			return err
		}
	}
	fmt.Println("filler: ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var verb, pool string
		var chains int
		if _, err := fmt.Sscan(in.Text(), &verb, &pool, &chains); err != nil {
			return err
		}
		r := spaceReport{Stats: map[string]ioctl.Stats{}}
		if err := x.obey(&r, verb, pool, chains); err != nil {
			r.Error = err.Error()
		}
		b, err := json.Marshal(&r)
		if err != nil {
			return err
		}
		fmt.Printf("report: %s\n", b)
	}
	return nil
}

func (x *filler) obey(r *spaceReport, verb, pool string, chains int) (err error) {
	switch verb {
	case "store":
		for range chains {
			if err = x.store(r, pool); err != nil {
				return err
			}
		}
	case "pin": // everything that is stored, and what can be stored beside it
		for i, keys := range x.stored[pool] {
			n, err := x.pools[pool].Pin(0, uint64(i)+1, keys, make([]library.Grant, len(keys)))
			if err != nil {
				return err
			}
			r.Pinned += n
		}
	case "release":
		for i := range x.stored[pool] {
			if err := x.pools[pool].Release(uint64(i) + 1); err != nil && !errors.Is(err, library.ErrNotFound) {
				return err
			}
		}
	case "sample":
		// A checkpoint may change the space that the volume keeps for itself, so a sample counts when nothing moved.
		for range 100 {
			if err := x.sample(r); err != nil {
				return err
			}
			var after unix.Statfs_t
			if err := unix.Statfs(x.path, &after); err != nil || after == r.Statfs {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
		return errors.New("df does not come to rest")
	}
	return err
}

// sample asks df, the volume and the pools.
func (x *filler) sample(r *spaceReport) error {
	if err := unix.Statfs(x.path, &r.Statfs); err != nil {
		return err
	}
	again, err := library.Open(x.path)
	if err != nil {
		return err
	}
	defer again.Close()
	r.Hello = again.Hello()
	for name, p := range x.pools {
		if r.Stats[name], err = p.Stats(); err != nil {
			return err
		}
	}
	return nil
}

// store stores one chain of new files.
func (x *filler) store(r *spaceReport, pool string) error {
	p := x.pools[pool]
	keys, items := make([]library.Key, spaceChain), make([]library.Item, spaceChain)
	x.next++
	for i := range keys {
		binary.LittleEndian.PutUint64(keys[i][:], x.next*0x9e3779b97f4a7c15)
		binary.LittleEndian.PutUint64(keys[i][8:], x.next<<8|uint64(i))
		items[i] = library.Item{Key: keys[i], Tokens: 16, Position: uint32(i)}
		if i > 0 {
			items[i].Parent = keys[i-1]
		}
	}
	grants := make([]library.Grant, spaceChain)
	if _, err := p.Reserve(0, x.next, items, false, grants); errors.Is(err, library.ErrNoSpace) {
		r.Refused++
		return nil
	} else if err != nil {
		return err
	}
	if err := x.write(p, spaceSpec(pool).Geometry.Objects, grants); err != nil {
		return err
	}
	if err := p.CommitRanks(x.next, 0); err != nil {
		return err
	}
	r.Stored += spaceChain
	x.stored[pool] = append(x.stored[pool], keys)
	return nil
}

func (x *filler) write(p *library.Pool, objects []stripe.Object, grants []library.Grant) error {
	slots := make([]gio.SlotIO, len(grants))
	for i, g := range grants {
		slots[i] = gio.SlotIO{Slot: g.Slot, Seed: g.Seed}
	}
	l, err := x.session.Ring().CreateLayers(p.Map(), 0, slots)
	if err != nil {
		return err
	}
	defer l.Close()
	geometry := p.Layout().Geometry()
	for layer := range uint16(len(objects)) { // trailers go along
		var desc []uint64
		for i := range grants {
			at := i * int(geometry.Objects[layer].Units()) * stripe.UnitBytes
			binary.LittleEndian.PutUint64(x.session.DMA()[at:], x.next)
			desc = append(desc, x.memory.Desc(at))
		}
		ticket, err := l.StoreLayer(layer, desc)
		if err != nil {
			return err
		}
		if err := ticket.Wait(); err != nil {
			return err
		}
	}
	return l.Finish()
}

// pausedDrive writes only while it is not being copied.
type pausedDrive struct {
	drive.Drive
	copying *sync.RWMutex
}

func (d pausedDrive) WriteAt(b []byte, off int64) error {
	d.copying.RLock()
	defer d.copying.RUnlock()
	return d.Drive.WriteAt(b, off)
}

// spaceTest is a mount with its engines, and the drives below it.
type spaceTest struct {
	t       *testing.T
	w       *world
	drives  []drive.Drive
	images  []drive.Drive // copies of them
	copying sync.RWMutex
	engines []*fillerProcess
	last    []string // orders with everything pinned, and what came of them
}

type fillerProcess struct {
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Scanner
}

func newSpaceTest(t *testing.T) *spaceTest {
	needMount(t)
	x := &spaceTest{t: t, drives: memoryDrives(t, 16<<20), images: memoryDrives(t, 16<<20)}
	for i, d := range x.drives {
		x.drives[i] = pausedDrive{d, &x.copying}
	}
	for i, d := range x.images {
		x.images[i] = keptDrive{d}
		t.Cleanup(func() { _ = d.Close() })
	}
	_, err := extentmap.Format(x.drives, extentmap.FormatOptions{Label: "test"})
	require.NoError(t, err)
	x.w = openWorld(t, x.drives, extentmap.Options{CheckpointSeconds: 3600}, gpufile.Options{}, ControlOptions{})
	dir := t.TempDir()
	x.w.mount(t, dir)
	for i := range spaceEngines {
		p := &fillerProcess{cmd: exec.Command(os.Args[0], "-test.run=^TestHelper$", "-test.v")}
		p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=fill=%s|%d", helperVariable, dir, i+1))
		p.cmd.Stderr = os.Stderr
		in, err := p.cmd.StdinPipe()
		require.NoError(t, err)
		p.in, p.out = in, scanOutput(t, p.cmd)
		p.out.Buffer(nil, 1<<20)
		require.NoError(t, p.cmd.Start())
		t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
		say(t, p.out, "filler: ready")
		x.engines = append(x.engines, p)
	}
	return x
}

// order gives each engine an order and adds their reports up.
func (x *spaceTest) order(of func(engine int) string) (sum spaceReport) {
	x.t.Helper()
	for i, p := range x.engines {
		_, err := io.WriteString(p.in, of(i)+"\n")
		require.NoError(x.t, err)
	}
	for i, p := range x.engines {
		var r spaceReport
		require.NoError(x.t, json.Unmarshal([]byte(say(x.t, p.out, "report: ")), &r))
		require.Empty(x.t, r.Error, "engine %d: %s", i, of(i))
		sum.Stored += r.Stored
		sum.Refused += r.Refused
		sum.Pinned += r.Pinned
		if i == 0 {
			sum.Statfs, sum.Hello, sum.Stats = r.Statfs, r.Hello, r.Stats
		}
	}
	return sum
}

// watch looks at the daemon's own figures all the time, until stopped: they hold at any moment, not only between
// orders.
func (x *spaceTest) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			for ctx.Err() == nil {
				total := x.w.volume.Info().TotalBytes
				s := x.w.store.Space()
				if s.UsedBytes+s.FreeBytes != s.TotalBytes || s.UsedBytes > total || s.AvailableBytes > s.FreeBytes {
					return fmt.Errorf("df at one moment: %+v of %d", s, total)
				}
				for _, p := range x.w.store.Pools() {
					st, spec := p.Stats(), p.Map().Spec()
					if st.BytesUsed != (st.Files+st.FilesReserved)*p.Map().SlotBytes() || st.BytesUsed > st.BytesCapacity ||
						spec.MaxSlots > 0 && st.Files+st.FilesReserved > uint64(spec.MaxSlots) {
						return fmt.Errorf("pool %s at one moment: %+v", spec.Name, st)
					}
				}
				time.Sleep(time.Millisecond)
			}
			return nil
		}()
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(x.t, <-done)
	})
	x.t.Cleanup(stop)
	return stop
}

// settled says whether what was evicted is durably free, and the pools' figures.
func (x *spaceTest) settled() (all []gpufile.Stats, yes bool) {
	for _, p := range x.w.store.Pools() {
		s := p.Stats()
		if s.SlotsFreeing > 0 || s.SlotsUsed != s.Files {
			return nil, false
		}
		all = append(all, s)
	}
	return all, true
}

// sample is what an engine sees, and what a power cut would leave on the drives, at one moment: with no order under
// way, rows may still be moving from pool to pool.
func (x *spaceTest) sample() (r spaceReport) {
	x.t.Helper()
	require.Eventually(x.t, func() bool {
		before, yes := x.settled()
		if !yes {
			return false
		}
		r = x.order(func(int) string { return "sample all 0" })
		x.copying.Lock() // a checkpoint may be on its way
		defer x.copying.Unlock()
		for i, d := range x.drives {
			copy(x.images[i].Bytes(), d.Bytes())
		}
		after, yes := x.settled()
		return yes && slices.Equal(before, after)
	}, 20*time.Second, time.Millisecond, "the pools do not come to rest")
	return r
}

// String is what a wrong count is to be understood by: the budget, and what the pools make of it.
func (x *spaceTest) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "volume %+v\nspace %+v\n", x.w.volume.Info(), x.w.store.Space())
	for _, p := range x.w.store.Pools() {
		m := p.Map()
		fmt.Fprintf(&b, "pool %s: %d rows of %d slots, may grow: %v, unassigned for it: %d, %+v\n", p.Name(), len(m.Rows()),
			m.SlotsPerRow(), m.MayGrow(), m.Unassigned(), p.Stats())
	}
	b.WriteString(strings.Join(x.last, "\n"))
	return b.String()
}

// agree compares df, the statistics and the drives, to the block. With data every object is verified, too.
func (x *spaceTest) agree(data bool) spaceReport {
	t := x.t
	t.Helper()
	r := x.sample()
	var findings []string
	result, err := check.Run(t.Context(), x.images, check.Options{Data: data, Report: func(f check.Finding) {
		findings = append(findings, f.String())
	}})
	require.NoError(t, err)
	require.Zero(t, result.Errors, "%v", findings)
	v, err := extentmap.OpenDrives(x.images, extentmap.Options{ReadOnly: true})
	require.NoError(t, err)
	defer v.Close()

	used, rows := uint64(0), uint64(0)
	for _, p := range v.Pools() {
		name, files := p.Spec().Name, uint64(0)
		p.Committed(func(uint32) { files++ })
		st := r.Stats[name]
		require.Equal(t, files, st.Files, "%s: records and statistics", name)
		require.Equal(t, files*p.SlotBytes(), st.BytesUsed, name)
		require.Equal(t, uint64(len(p.Rows()))*uint64(p.SlotsPerRow()), st.SlotsFree+st.SlotsFreeing+st.SlotsUsed, name)
		require.Equal(t, st.Lookups, st.Hits+st.Misses)
		require.LessOrEqual(t, st.BytesUsed, st.BytesCapacity)
		require.GreaterOrEqual(t, st.BytesCapacity, files*p.SlotBytes())
		if p.Spec().MaxSlots > 0 {
			require.LessOrEqual(t, files, uint64(p.Spec().MaxSlots), name)
		}
		used += files * p.SlotBytes()
		rows += uint64(len(p.Rows())) * p.RowBytes()
	}
	info := v.Info()
	require.LessOrEqual(t, rows, info.TotalBytes-info.FreeBytes, "one budget")
	require.Equal(t, result.Files, r.Statfs.Files-r.Statfs.Ffree)
	fs, block := r.Statfs, uint64(r.Statfs.Bsize)
	require.Equal(t, used, (fs.Blocks-fs.Bfree)*block, "df and the drives")
	require.Equal(t, used, r.Hello.UsedBytes)
	require.Equal(t, [2]uint64{fs.Blocks * block, fs.Bfree * block}, [2]uint64{r.Hello.TotalBytes, r.Hello.FreeBytes})
	return r
}

// TestSpace (invariants d, l): eight engines store ten times what the volume holds into three pools of one mount. The
// budget holds, writes go on by eviction, the pools keep minimum and cap, and df, statistics and the drives agree to
// the block. With everything pinned stores are refused, all of them and at once, and go on after a release.
func TestSpace(t *testing.T) {
	times := spaceTimes
	if s := os.Getenv(spaceTimesVariable); s != "" {
		var err error
		times, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	x := newSpaceTest(t)
	stop := x.watch()
	// The pool with a minimum is filled first, and then left alone while the others need space.
	minimum := x.w.store.PoolByName("minimum")
	chains := int(spaceMinimum/minimum.Map().SlotBytes()) / spaceChain / spaceEngines
	stored := x.order(func(int) string { return fmt.Sprintf("store minimum %d", chains) }).Stored
	before := x.agree(false).Stats["minimum"]
	require.Zero(t, before.Evicted)

	capacity := 0
	for round := range times {
		pool := func(i int) string { return spacePools[1+(round+i)%2] }
		if round == 0 { // as much as the volume holds
			capacity = int(x.w.volume.Info().TotalBytes / x.w.store.PoolByName("free").Map().SlotBytes())
		}
		r := x.order(func(i int) string {
			return fmt.Sprintf("store %s %d", pool(i), capacity/spaceChain/spaceEngines+1)
		})
		require.Zero(t, r.Refused, "%v", x)
		stored += r.Stored
		s := x.agree(false)
		require.Equal(t, before.Files, s.Stats["minimum"].Files, "the others take nothing of its minimum")
		require.GreaterOrEqual(t, before.BytesCapacity, uint64(spaceMinimum))
		if round > 0 {
			require.Positive(t, s.Stats["capped"].Evicted)
			require.Positive(t, s.Stats["free"].Evicted)
		}
	}
	require.GreaterOrEqual(t, stored, times*capacity)

	// Everything that is there is pinned, and what still fits is stored and pinned, until nothing does.
	all := func(verb string, n int) (sum spaceReport) {
		for _, pool := range spacePools {
			r := x.order(func(int) string { return fmt.Sprintf("%s %s %d", verb, pool, n) })
			x.last = append(x.last, fmt.Sprintf("%s %s %d: %d files stored, %d refused, %d pinned", verb, pool, n, r.Stored,
				r.Refused, r.Pinned))
			sum.Pinned += r.Pinned
			sum.Stored += r.Stored
			sum.Refused += r.Refused
		}
		return sum
	}
	for left := 1; left > 0; {
		all("pin", 0)
		left = all("store", 1).Stored
	}
	r := all("store", 3)
	require.Equal(t, [2]int{0, 3 * spaceEngines * len(spacePools)}, [2]int{r.Stored, r.Refused}, "%v", x)
	s := x.agree(false)
	for name, st := range s.Stats {
		require.Equal(t, st.Files, st.FilesPinned, "%s: all is pinned", name)
	}
	all("release", 0)
	r = all("store", 2)
	require.Equal(t, [2]int{2 * spaceChain * spaceEngines * len(spacePools), 0}, [2]int{r.Stored, r.Refused}, "%v", x)
	stop()
	s = x.agree(true)
	t.Logf("%d files of %d stored: %d are there, %d were evicted", stored, capacity,
		s.Stats["minimum"].Files+s.Stats["capped"].Files+s.Stats["free"].Files,
		s.Stats["minimum"].Evicted+s.Stats["capped"].Evicted+s.Stats["free"].Evicted)
}

package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// The tests of this file use a real mount, whose daemon is this binary again in another process.

const (
	daemonVariable = "TUTTIFS_TEST_ENGINE_DAEMON"
	wayVariable    = "TUTTIFS_TEST_ENGINE_WAY"
	// admissionVariable is the mount's admission policy.
	admissionVariable = "TUTTIFS_TEST_ENGINE_ADMISSION"
)

// TestDaemonProcess is the body of the daemon's process.
func TestDaemonProcess(t *testing.T) {
	where := os.Getenv(daemonVariable)
	if where == "" {
		t.Skip("only run as the daemon of other tests")
	}
	options := daemon.Options{
		Paths: []string{filepath.Join(where, "drive0")}, Dir: filepath.Join(where, "mnt"),
		SocketDir: filepath.Join(where, "run"), CheckpointSeconds: 1, Backend: emu.Backend(os.Getenv(wayVariable)),
		Ready: func() { fmt.Println("ready") },
	}
	if options.Backend == ssdWay {
		options.Backend = emu.Auto
		require.NoError(t, useSSDs(&options, where))
	}
	if policy := os.Getenv(admissionVariable); policy != "" {
		require.NoError(t, options.Admission.Admissions.Set(policy))
	}
	run := func() error { return daemon.Run(context.Background(), options) }
	err := run()
	// The kernel keeps a killed daemon's drives open until their transfers have ended; tuttifs mount waits, too.
	for deadline := time.Now().Add(10 * time.Second); errors.Is(err, extentmap.ErrBusy) && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
		err = run()
	}
	require.NoError(t, err)
}

// volume is a formatted volume, mounted while a daemon runs.
type volume struct {
	t   testing.TB
	dir string
	way emu.Backend // of commands to the drives
	cmd *exec.Cmd
}

func newVolume(t *testing.T) *volume {
	t.Helper()
	return newVolumeIn(t, "", 64<<20, emu.Auto)
}

// newVolumeIn has its drives in a directory of where.
func newVolumeIn(t testing.TB, where string, driveBytes int64, way emu.Backend) *volume {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root here")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse")
	}
	// t.TempDir has the test's name in it, and a socket's path has 107 bytes at most.
	dir, err := os.MkdirTemp(where, "tuttifs")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	v := &volume{t: t, dir: dir, way: way}
	require.NoError(t, os.Mkdir(v.mount(), 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(v.dir, "run"), 0o700))
	var drives []drive.Drive
	for i := range 3 {
		path := filepath.Join(v.dir, fmt.Sprintf("drive%d", i))
		require.NoError(t, drive.Create(path, driveBytes))
		d, err := drive.Open(path, drive.Options{})
		require.NoError(t, err)
		drives = append(drives, d)
	}
	_, err = extentmap.Format(drives, extentmap.FormatOptions{Label: "engine"})
	require.NoError(t, err)
	for _, d := range drives {
		require.NoError(t, d.Close())
	}
	v.start()
	t.Cleanup(v.stop)
	return v
}

func (v *volume) mount() string { return filepath.Join(v.dir, "mnt") }

func (v *volume) start() {
	v.t.Helper()
	v.cmd = exec.Command(os.Args[0], "-test.run=^TestDaemonProcess$", "-test.v")
	v.cmd.Env = append(os.Environ(), daemonVariable+"="+v.dir, wayVariable+"="+string(v.way))
	v.cmd.Stderr = os.Stderr
	out, err := v.cmd.StdoutPipe()
	require.NoError(v.t, err)
	require.NoError(v.t, v.cmd.Start())
	said := make([]byte, 0, 4096)
	for b := make([]byte, 512); !strings.Contains(string(said), "ready\n"); {
		n, err := out.Read(b)
		said = append(said, b[:n]...)
		require.NoError(v.t, err, "the daemon said: %s", said)
	}
	go func() { _, _ = out.Read(make([]byte, 1<<20)) }()
}

// kill ends the daemon without warning and clears its mount away.
func (v *volume) kill() {
	_ = v.cmd.Process.Kill()
	_ = v.cmd.Wait()
	_ = unix.Unmount(v.mount(), unix.MNT_DETACH)
}

func (v *volume) stop() {
	for end := time.Now().Add(5 * time.Second); unix.Unmount(v.mount(), 0) == unix.EBUSY && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	_ = unix.Unmount(v.mount(), unix.MNT_DETACH)
	done := make(chan error, 1)
	go func() { done <- v.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		v.t.Error("the daemon did not end with its mount")
		_ = v.cmd.Process.Kill()
		<-done
	}
}

const mountIdentity = `{"model":"m","revision":"r","weights_epoch":1,"dtype":"bf16","quantisation":"none",` +
	`"scale_format":"none","layout":"NHD","page_bytes":4096,"block_tokens":16,"file_tokens":16,"tp":2,"pp":1,"cp":1,` +
	`"group":"full"}`

// mountSpec is a pool of two ranks and three layers, with objects of odd lengths.
func mountSpec() PoolSpec {
	var g stripe.Geometry
	for layer := range uint16(3) {
		for rank := range uint16(2) {
			for _, n := range []uint32{16384, 656 * 16} {
				run := stripe.Run{Kind: stripe.RunKV, Bytes: n}
				g.Objects = append(g.Objects, stripe.Object{Layer: layer, Rank: rank, Runs: []stripe.Run{run}})
			}
		}
	}
	return PoolSpec{Name: "pool", Identity: []byte(mountIdentity), Geometry: g, TokensPerFile: 16}
}

// user is an engine in this process.
type user struct {
	t       *testing.T
	mount   *Mount
	session *Session
	pool    *Pool
}

func newUser(t *testing.T, v *volume, o SessionOptions, token *[16]byte) *user {
	t.Helper()
	u := &user{t: t}
	var err error
	u.mount, err = Open(v.mount())
	require.NoError(t, err)
	if token == nil {
		u.session, err = u.mount.NewSession(o)
	} else {
		u.session, err = u.mount.JoinSession(*token, o)
	}
	require.NoError(t, err)
	t.Cleanup(u.close)
	u.pool, err = u.session.OpenPool(mountSpec())
	require.NoError(t, err)
	return u
}

func (u *user) close() {
	_ = u.session.Close()
	_ = u.mount.Close()
}

// chain is n keys of a prompt, with items to store them.
func chain(seed uint64, n int) ([]Key, []Item) {
	keys, items := make([]Key, n), make([]Item, n)
	for i := range keys {
		binary.LittleEndian.PutUint64(keys[i][:], seed)
		binary.LittleEndian.PutUint64(keys[i][8:], uint64(i)+1)
		items[i] = Item{Key: keys[i], Tokens: 16, Position: uint32(i)}
		if i > 0 {
			items[i].Parent = keys[i-1]
		}
	}
	return keys, items
}

// content is what an object of a key holds.
func content(b []byte, key *Key, object uint16) {
	seed, block := binary.LittleEndian.Uint64(key[:]), binary.LittleEndian.Uint64(key[8:])
	source := rand.New(rand.NewPCG(seed<<16|uint64(object), block))
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, source.Uint64())
	}
	for i := range b {
		b[i] = byte(source.Uint32())
	}
}

// layerBuffer is memory for one layer of some slots, registered.
type layerBuffer struct {
	memory  *gio.Memory
	buf     []byte
	desc    []uint64
	objects []uint16
	at      []int
}

func (u *user) buffer(layer, rank uint16, slots int, direct bool) *layerBuffer {
	l := u.pool.Layout()
	b := &layerBuffer{objects: l.LayerObjects(layer, rank)}
	n := 0
	for range slots {
		for _, object := range b.objects {
			b.at = append(b.at, n)
			n += int(l.Geometry().Objects[object].Units()) * stripe.UnitBytes
		}
	}
	var err error
	if direct {
		b.buf = u.session.DMA()[:n]
		b.memory, err = u.session.Ring().RegisterPadded(b.buf)
	} else {
		b.buf = hostMemory(u.t, n)
		b.memory, err = u.session.Ring().Register(b.buf)
	}
	require.NoError(u.t, err)
	for _, at := range b.at {
		b.desc = append(b.desc, b.memory.Desc(at))
	}
	return b
}

// hostMemory is memory that Go does not manage: kernels of a fake GPU write to it, which the race detector would take
// for a race.
func hostMemory(t *testing.T, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b
}

func (b *layerBuffer) object(u *user, slot, j int) []byte {
	at := b.at[slot*len(b.objects)+j]
	return b.buf[at : at+int(u.pool.Map().ObjectBytes(b.objects[j]))]
}

func slotsOf(grants []Grant) (slots []gio.SlotIO) {
	for _, g := range grants {
		slots = append(slots, gio.SlotIO{Slot: g.Slot, Seed: g.Seed})
	}
	return slots
}

// storeRank writes one rank's bytes of leased slots.
func (u *user) storeRank(rank uint16, keys []Key, grants []Grant, direct bool) {
	u.t.Helper()
	l, err := u.session.Ring().CreateLayers(u.pool.Map(), rank, slotsOf(grants))
	require.NoError(u.t, err)
	defer l.Close()
	for layer := range uint16(3) {
		b := u.buffer(layer, rank, len(keys), direct)
		for i := range keys {
			for j, object := range b.objects {
				content(b.object(u, i, j), &keys[i], object)
			}
		}
		ticket, err := l.StoreLayer(layer, b.desc)
		require.NoError(u.t, err)
		require.NoError(u.t, ticket.Wait())
		require.NoError(u.t, u.session.Ring().Unregister(b.memory))
	}
	require.NoError(u.t, l.Finish())
}

// store stores a chain whole.
func (u *user) store(reserve uint64, keys []Key, items []Item, direct bool) {
	u.t.Helper()
	grants := make([]Grant, len(items))
	n, err := u.pool.Reserve(0, reserve, items, false, grants)
	require.NoError(u.t, err)
	require.Equal(u.t, len(items), n)
	for rank := range uint16(2) {
		u.storeRank(rank, keys, grants, direct)
	}
	require.NoError(u.t, u.pool.CommitRanks(reserve, 0, 1))
}

// restore pins a chain, reads one rank of it and compares every byte.
func (u *user) restore(request uint64, rank uint16, keys []Key, direct bool) {
	u.t.Helper()
	grants := make([]Grant, len(keys))
	n, err := u.pool.Pin(0, request, keys, grants)
	require.NoError(u.t, err)
	require.Equal(u.t, len(keys), n)
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), rank, slotsOf(grants))
	require.NoError(u.t, err)
	defer l.Close()
	for layer := range uint16(3) {
		b := u.buffer(layer, rank, len(keys), direct)
		ticket, err := l.RetrieveLayer(layer, b.desc)
		require.NoError(u.t, err)
		require.NoError(u.t, ticket.Wait())
		require.Equal(u.t, make([]error, len(keys)), l.Failed())
		for i := range keys {
			for j, object := range b.objects {
				want := make([]byte, len(b.object(u, i, j)))
				content(want, &keys[i], object)
				require.True(u.t, bytes.Equal(want, b.object(u, i, j)), "key %d object %d", i, object)
			}
		}
		require.NoError(u.t, u.session.Ring().Unregister(b.memory))
	}
	require.NoError(u.t, u.pool.Release(request))
}

var mountOptions = SessionOptions{Lanes: 2, Depth: 32, DMABytes: 16 << 20, BounceBytes: 1 << 20, ArenaBytes: 8192,
	Deadline: 20 * time.Second}

// TestMountRoundTrip is one block's whole way, both DMA modes, ranks side by side, other sessions, and a remount.
func TestMountRoundTrip(t *testing.T) {
	v := newVolume(t)
	keys, items := chain(1, 150) // more than an arena of 8 KiB takes
	a := newUser(t, v, mountOptions, nil)
	require.Positive(t, a.session.ID())
	n, err := a.pool.Peek(0, keys)
	require.NoError(t, err)
	require.Zero(t, n)
	a.store(1, keys, items, true)
	more, moreItems := chain(2, 10)
	a.store(2, more, moreItems, false)

	b := newUser(t, v, mountOptions, nil)
	n, err = b.pool.Peek(0, append(keys[:149:149], Key{9}))
	require.NoError(t, err)
	require.Equal(t, 149, n)
	b.restore(1, 0, keys, false)
	b.restore(2, 1, keys, true)
	a.restore(3, 1, more, true)

	// The second rank joins the session and its reservation; each commits its own.
	token := a.session.Token()
	c := newUser(t, v, mountOptions, &token)
	keys3, items3 := chain(3, 5)
	grants := make([]Grant, 5)
	_, err = a.pool.Reserve(0, 77, items3, false, grants)
	require.NoError(t, err)
	joined := make([]Grant, 5)
	_, err = c.pool.Reserve(0, 77, items3, false, joined)
	require.NoError(t, err)
	var wg sync.WaitGroup
	commit := func(u *user, rank uint16) {
		if err := u.pool.Commit(77, rank); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	a.storeRank(0, keys3, grants, false)
	wg.Go(func() { commit(a, 0) })
	c.storeRank(1, keys3, joined, true)
	commit(c, 1)
	wg.Wait()
	b.restore(4, 0, keys3, false)
	b.restore(5, 1, keys3, false)

	for _, u := range []*user{a, b, c} {
		require.NoError(t, u.session.Close())
		require.NoError(t, u.mount.Close())
		require.ErrorIs(t, u.pool.Release(1), ErrGone)
	}
	v.stop()
	v.start()
	d := newUser(t, v, mountOptions, nil)
	d.restore(1, 1, keys, true)
}

// TestMountLeases: commands outside the session's leases fail, each alone, and damage reports are looked into.
func TestMountLeases(t *testing.T) {
	v := newVolume(t)
	u := newUser(t, v, mountOptions, nil)
	keys, items := chain(1, 3)
	u.store(1, keys, items, true)
	grants := make([]Grant, 3)
	n, err := u.pool.Pin(0, 5, keys[:2], grants)
	require.NoError(t, err)
	require.Equal(t, 2, n)

	memory, err := u.session.Ring().Register(make([]byte, 3*16384))
	require.NoError(t, err)
	run := func(write bool, slots ...uint32) (failed []gio.Result) {
		var ctxs []gio.IOCTX
		for i, slot := range slots {
			ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(i * 16384), Slot: slot})
		}
		ticket, err := u.session.Ring().Issue(write, u.pool.Map(), ctxs)
		require.NoError(t, err)
		failed, err = u.session.Ring().Wait(ticket)
		require.NoError(t, err)
		return failed
	}
	var foreign uint32 // the third file's, which is not pinned
	for foreign = range uint32(3) {
		if foreign != grants[0].Slot && foreign != grants[1].Slot {
			break
		}
	}
	failed := run(false, grants[0].Slot, foreign, grants[1].Slot)
	require.Len(t, failed, 1)
	require.Equal(t, 1, failed[0].Index)
	require.ErrorIs(t, failed[0].Err, gio.ErrStatus)
	require.Len(t, run(true, grants[0].Slot), 1, "a pinned slot cannot be written")
	require.NoError(t, u.pool.ReportBad(grants[0].Slot, grants[0].Generation), "it is whole, and stays")
	require.NoError(t, u.pool.Release(5))
	require.Len(t, run(false, grants[0].Slot), 1, "nor read after its release")
	u.restore(6, 0, keys, false)

	_, err = u.pool.Reserve(0, 9, items[:1], false, grants)
	require.NoError(t, err)
	require.EqualValues(t, ioctl.GrantExists, grants[0].Status)
	_, fresh := chain(8, 1)
	_, err = u.pool.Reserve(0, 10, fresh, false, grants)
	require.NoError(t, err)
	require.EqualValues(t, ioctl.GrantNew, grants[0].Status)
	require.Error(t, u.pool.CommitRanks(10, 0, 1), "nothing was written")
	spec := mountSpec()
	spec.Geometry.Objects = spec.Geometry.Objects[:4]
	_, err = u.session.OpenPool(spec)
	require.ErrorIs(t, err, ErrExists)
}

// TestMountLaneComesBack: a lane that the daemon has stopped times out, is attached again, and works.
func TestMountLaneComesBack(t *testing.T) {
	t.Run("mediated", func(t *testing.T) { laneComesBack(t, newVolume(t), mountOptions) })
	t.Run("real", func(t *testing.T) { laneComesBack(t, newVolumeIn(t, "", 64<<20, ssdWay), realMountOptions) })
}

func laneComesBack(t *testing.T, v *volume, o SessionOptions) {
	o.Lanes, o.Deadline = 1, 3*time.Second
	u := newUser(t, v, o, nil)
	keys, items := chain(1, 4)
	u.store(1, keys, items, true)
	grants := make([]Grant, 4)
	_, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	require.NoError(t, u.session.attach.Quiesce(0))
	memory, err := u.session.Ring().Register(bytes.Repeat([]byte{0xee}, 16384))
	require.NoError(t, err)
	ctxs := []gio.IOCTX{{Desc: memory.Desc(0), Slot: grants[0].Slot}}
	ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
	require.NoError(t, err)
	failed, err := u.session.Ring().Wait(ticket)
	require.NoError(t, err)
	require.Len(t, failed, 1)
	require.ErrorIs(t, failed[0].Err, gio.ErrTimeout)
	require.NoError(t, u.pool.Release(2))
	require.Equal(t, 1, u.session.Ring().Alive())
	u.restore(3, 0, keys, true)
}

// TestMountDaemonDies: waits end when the daemon is killed, everything closes, and a new session finds what was
// committed.
func TestMountDaemonDies(t *testing.T) {
	v := newVolume(t)
	u := newUser(t, v, mountOptions, nil)
	keys, items := chain(1, 20)
	u.store(1, keys, items, true)
	grants := make([]Grant, 20)
	_, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	memory, err := u.session.Ring().Register(make([]byte, 20*16384))
	require.NoError(t, err)
	var ctxs []gio.IOCTX
	for i, g := range grants {
		ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(i * 16384), Slot: g.Slot})
	}
	done := make(chan error, 1)
	go func() {
		for {
			ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
			if err == nil {
				_, err = u.session.Ring().Wait(ticket)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	time.Sleep(50 * time.Millisecond)
	v.kill()
	endsWithDaemon(t, done)
	_, err = u.pool.Peek(0, keys)
	require.Error(t, err)
	_ = u.session.Close() // the mount is gone; what matters is that it ends
	v.start()
	again := newUser(t, v, mountOptions, nil)
	again.restore(1, 0, keys, true)
}

// endsWithDaemon waits for the error of an engine whose daemon was killed.
func endsWithDaemon(t *testing.T, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		require.ErrorIs(t, err, gio.ErrDead)
		require.ErrorIs(t, err, ErrGone)
	case <-time.After(15 * time.Second):
		t.Fatal("a wait outlived the daemon")
	}
}

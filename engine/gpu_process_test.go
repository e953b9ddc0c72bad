package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/daemon"
	"tuttifs/gio"
	"tuttifs/stripe"
)

// The tests of this file join a real mount to sessions with a GPU, in processes of their own: the machine's, where it
// has one, and a fake of one everywhere.

// gpuKind is which GPU, and which executor on it.
type gpuKind struct {
	real, polling bool
}

func (k gpuKind) String() string {
	name := [...]string{"fake", "gpu"}[btoi(k.real)]
	return name + [...]string{", ring", ", polling"}[btoi(k.polling)]
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func eachGPU(t *testing.T, f func(t *testing.T, k gpuKind)) {
	for _, k := range []gpuKind{{false, false}, {false, true}, {true, false}, {true, true}} {
		t.Run(k.String(), func(t *testing.T) { f(t, k) })
	}
}

// options are a session's with that GPU. Without one the test is skipped; nothing of a fake lives at the test's end.
func (k gpuKind) options(t *testing.T) SessionOptions {
	o := mountOptions
	o.GPU = &GPUOptions{Polling: k.polling, StagingBytes: 8 << 20, Device: os.Getenv("TUTTIFS_GPU")}
	if !k.real {
		o.GPU.Driver = startFake(t).Driver()
	} else if _, err := cuda.Open(); errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("needs a GPU: %v", err)
	}
	return o
}

// onDevice runs f on a thread with the session's context, with a stream, and waits for what f enqueued.
func (u *user) onDevice(f func(c *cuda.Context, s *cuda.Stream) error) {
	u.t.Helper()
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c := u.session.CUDA()
		err := c.Bind()
		if err == nil {
			var s *cuda.Stream
			if s, err = c.NewStream(0); err == nil {
				err = f(c, s)
				err = errors.Join(err, s.Synchronize(), s.Close())
			}
			err = errors.Join(err, c.Unbind())
		}
		result <- err
	}()
	require.NoError(u.t, <-result)
}

// deviceLayer is device memory for one layer of some slots: each object's is in two runs, as K and V are.
type deviceLayer struct {
	u       *user
	p       cuda.Pointer
	pinned  *cuda.HostMemory
	memory  *gio.Memory
	objects []uint16
	first   []int // of each object, its two areas' offset
	slots   int
	desc    []uint64
}

func (u *user) deviceLayer(layer, rank uint16, slots int) *deviceLayer {
	u.t.Helper()
	l := u.pool.Layout()
	b := &deviceLayer{u: u, objects: l.LayerObjects(layer, rank), slots: slots}
	size := 0
	for _, object := range b.objects {
		b.first = append(b.first, size)
		size += slots * int(l.Geometry().Objects[object].Units()) * stripe.UnitBytes
	}
	u.onDevice(func(c *cuda.Context, _ *cuda.Stream) (err error) {
		if b.p, err = c.Alloc(uint64(size)); err == nil {
			b.pinned, err = c.AllocHost(size, false)
		}
		return err
	})
	pool := gio.Paged{Blocks: uint64(slots)}
	for j := range b.objects {
		half := uint64(b.bytes(j) / 2)
		base := uint64(b.p) + uint64(b.first[j])
		pool.Classes = append(pool.Classes, []cuda.StridedRun{
			{Base: base, Stride: half, Bytes: uint32(half)},
			{Base: base + half*uint64(slots), Stride: half, Bytes: uint32(half)},
		})
	}
	var err error
	b.memory, err = u.session.GPU().RegisterPaged(pool)
	require.NoError(u.t, err)
	for i := range slots {
		for j := range b.objects {
			b.desc = append(b.desc, b.memory.Block(j, uint64(i)))
		}
	}
	return b
}

func (b *deviceLayer) bytes(j int) int { return int(b.u.pool.Map().ObjectBytes(b.objects[j])) }

// runs are an object's two pieces in the pinned copy.
func (b *deviceLayer) runs(i, j int) [2][]byte {
	half := b.bytes(j) / 2
	at := b.first[j]
	return [2][]byte{
		b.pinned.Bytes[at+i*half : at+(i+1)*half],
		b.pinned.Bytes[at+(b.slots+i)*half : at+(b.slots+i+1)*half],
	}
}

func (b *deviceLayer) upload() {
	b.u.t.Helper()
	b.u.onDevice(func(_ *cuda.Context, s *cuda.Stream) error {
		return s.CopyHtoD(b.p, unsafe.Pointer(&b.pinned.Bytes[0]), uint64(len(b.pinned.Bytes)))
	})
}

func (b *deviceLayer) download() {
	b.u.t.Helper()
	b.u.onDevice(func(_ *cuda.Context, s *cuda.Stream) error {
		return s.CopyDtoH(unsafe.Pointer(&b.pinned.Bytes[0]), b.p, uint64(len(b.pinned.Bytes)))
	})
}

func (b *deviceLayer) fill(keys []Key) {
	b.u.t.Helper()
	for i := range keys {
		for j, object := range b.objects {
			whole := make([]byte, b.bytes(j))
			content(whole, &keys[i], object)
			for _, run := range b.runs(i, j) {
				whole = whole[copy(run, whole):]
			}
		}
	}
	b.upload()
}

// check compares an object, as of the last download, with its key's content, or with zero.
func (b *deviceLayer) check(key *Key, i, j int, zero bool) {
	b.u.t.Helper()
	want := make([]byte, b.bytes(j))
	if !zero {
		content(want, key, b.objects[j])
	}
	runs := b.runs(i, j)
	got := append(bytes.Clone(runs[0]), runs[1]...)
	require.True(b.u.t, bytes.Equal(want, got), "key %d object %d, to be zero: %v", i, b.objects[j], zero)
}

// free gives everything back; without a ring the registration is gone already.
func (b *deviceLayer) free() {
	b.u.t.Helper()
	require.NoError(b.u.t, b.u.session.GPU().Unregister(b.memory))
	b.freeMemory()
}

func (b *deviceLayer) freeMemory() {
	b.u.t.Helper()
	b.u.onDevice(func(c *cuda.Context, _ *cuda.Stream) error {
		return errors.Join(c.FreeHost(b.pinned), c.Free(b.p))
	})
}

// storeFromDevice stores a chain, both ranks of it.
func (u *user) storeFromDevice(reserve uint64, keys []Key, items []Item) {
	u.t.Helper()
	grants := make([]Grant, len(items))
	n, err := u.pool.Reserve(0, reserve, items, false, grants)
	require.NoError(u.t, err)
	require.Equal(u.t, len(items), n)
	for rank := range uint16(2) {
		l, err := u.session.Ring().CreateLayers(u.pool.Map(), rank, slotsOf(grants))
		require.NoError(u.t, err)
		for layer := range uint16(3) {
			b := u.deviceLayer(layer, rank, len(keys))
			b.fill(keys)
			ticket, err := l.StoreLayer(layer, b.desc)
			require.NoError(u.t, err)
			require.NoError(u.t, ticket.Wait())
			b.free()
		}
		require.NoError(u.t, l.Finish())
		l.Close()
	}
	require.NoError(u.t, u.pool.CommitRanks(reserve, 0, 1))
}

// restoreToDevice pins a chain, reads one rank of it and compares every byte.
func (u *user) restoreToDevice(request uint64, rank uint16, keys []Key) {
	u.t.Helper()
	grants := make([]Grant, len(keys))
	n, err := u.pool.Pin(0, request, keys, grants)
	require.NoError(u.t, err)
	require.Equal(u.t, len(keys), n)
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), rank, slotsOf(grants))
	require.NoError(u.t, err)
	defer l.Close()
	for layer := range uint16(3) {
		b := u.deviceLayer(layer, rank, len(keys))
		ticket, err := l.RetrieveLayer(layer, b.desc)
		require.NoError(u.t, err)
		require.NoError(u.t, ticket.Wait())
		require.Equal(u.t, make([]error, len(keys)), l.Failed())
		b.download()
		for i := range keys {
			for j := range b.objects {
				b.check(&keys[i], i, j, false)
			}
		}
		b.free()
	}
	require.NoError(u.t, u.pool.Release(request))
}

// TestGPUProcessRoundTrip: what a GPU stores, a GPU and a CPU restore, and the other way round.
func TestGPUProcessRoundTrip(t *testing.T) {
	eachGPU(t, func(t *testing.T, k gpuKind) {
		o := k.options(t)
		v := newVolume(t)
		gpu := newUser(t, v, o, nil)
		require.Contains(t, gpu.session.Describe(), "GPU")
		keys, items := chain(1, 20)
		gpu.storeFromDevice(1, keys, items)
		gpu.restoreToDevice(2, 0, keys)
		gpu.restore(3, 1, keys, false)
		gpu.restore(4, 1, keys, true)
		cpu := newUser(t, v, mountOptions, nil)
		cpu.restore(1, 0, keys, true)
		cpu.restore(2, 1, keys, false)
		more, moreItems := chain(2, 20)
		cpu.store(3, more, moreItems, false)
		gpu.restoreToDevice(5, 1, more)
	})
}

// TestGPUProcessDaemonDies: the daemon is killed under load. The engine's waits end with typed errors, what was to be
// read is zero, the session closes, and another one finds what was committed once the daemon runs again.
func TestGPUProcessDaemonDies(t *testing.T) {
	eachGPU(t, func(t *testing.T, k gpuKind) {
		o := k.options(t)
		v := newVolume(t)
		u := newUser(t, v, o, nil)
		keys, items := chain(1, 20)
		u.storeFromDevice(1, keys, items)
		grants := make([]Grant, len(keys))
		_, err := u.pool.Pin(0, 2, keys, grants)
		require.NoError(t, err)
		b := u.deviceLayer(0, 0, len(keys))
		var ctxs []gio.IOCTX
		for i, g := range grants {
			for j, object := range b.objects {
				ctxs = append(ctxs, gio.IOCTX{Desc: b.desc[i*len(b.objects)+j], Slot: g.Slot, Object: object})
			}
		}
		type outcome struct {
			failed []gio.Result
			err    error
		}
		rounds, done := make(chan struct{}, 1), make(chan outcome, 1)
		go func() {
			for {
				ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
				var failed []gio.Result
				if err == nil {
					failed, err = u.session.Ring().Wait(ticket)
				}
				if err != nil {
					done <- outcome{failed, err}
					return
				}
				select {
				case rounds <- struct{}{}:
				default:
				}
			}
		}()
		for range 3 {
			<-rounds
		}
		v.kill()
		end := <-done
		require.ErrorIs(t, end.err, gio.ErrDead)
		require.ErrorIs(t, end.err, ErrGone)
		b.download()
		for _, f := range end.failed {
			require.ErrorIs(t, f.Err, gio.ErrDead)
			i, j := f.Index/len(b.objects), f.Index%len(b.objects)
			b.check(&keys[i], i, j, true)
		}
		_, err = u.pool.Peek(0, keys)
		require.Error(t, err)
		_, err = u.session.Ring().Issue(false, u.pool.Map(), ctxs)
		require.ErrorIs(t, err, gio.ErrDead)
		b.free()
		_ = u.session.Close() // the mount is gone; what matters is that it ends and gives everything back
		v.start()
		again := newUser(t, v, o, nil)
		again.restoreToDevice(1, 0, keys)
	})
}

const engineVariable = "TUTTIFS_TEST_GPU_ENGINE"

// TestGPUEngine is the body of an engine's process: it keeps a committed chain pinned and restores it, and keeps
// another reserved and stores it, until it is killed.
func TestGPUEngine(t *testing.T) {
	where, flags, found := strings.Cut(os.Getenv(engineVariable), "|")
	if !found {
		t.Skip("only run as the engine of other tests")
	}
	k := gpuKind{real: strings.Contains(flags, "real"), polling: strings.Contains(flags, "polling")}
	u := newUser(t, &volume{t: t, dir: where}, k.options(t), nil)
	keys, items := chain(1, 20)
	u.storeFromDevice(1, keys, items)
	grants := make([]Grant, len(keys))
	_, err := u.pool.Pin(0, 2, keys, grants)
	require.NoError(t, err)
	other, otherItems := chain(2, 20)
	reserved := make([]Grant, len(other))
	_, err = u.pool.Reserve(0, 3, otherItems, false, reserved)
	require.NoError(t, err)
	b, c := u.deviceLayer(0, 0, len(keys)), u.deviceLayer(0, 1, len(other))
	c.fill(other)
	reader, err := u.session.Ring().OpenLayers(u.pool.Map(), 0, slotsOf(grants))
	require.NoError(t, err)
	writer, err := u.session.Ring().CreateLayers(u.pool.Map(), 1, slotsOf(reserved))
	require.NoError(t, err)
	for round := 0; ; round++ {
		read, err := reader.RetrieveLayer(0, b.desc)
		require.NoError(t, err)
		write, err := writer.StoreLayer(0, c.desc)
		require.NoError(t, err)
		if round == 3 {
			fmt.Println("busy")
		}
		require.NoError(t, read.Wait())
		require.NoError(t, write.Wait())
	}
}

// sessions is the mount's own account of its engines.
func (v *volume) sessions() (doc daemon.SessionsDocument) {
	v.t.Helper()
	b, err := os.ReadFile(filepath.Join(v.mount(), ".tuttifs", "sessions"))
	require.NoError(v.t, err)
	require.NoError(v.t, json.Unmarshal(b, &doc))
	return doc
}

// holds counts the daemon's descriptors, and its mappings of sessions' memory.
func (v *volume) holds() (descriptors, shared int) {
	v.t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(v.cmd.Process.Pid))
	names, err := os.ReadDir(filepath.Join(proc, "fd"))
	require.NoError(v.t, err)
	maps, err := os.ReadFile(filepath.Join(proc, "maps"))
	require.NoError(v.t, err)
	return len(names), strings.Count(string(maps), "memfd:tuttifs-")
}

// TestGPUProcessEngineDies: the engine is killed under load. The daemon keeps nothing of it: no session, lease, memory
// or descriptor. What was committed stays, what was reserved can be stored by the next engine.
func TestGPUProcessEngineDies(t *testing.T) {
	eachGPU(t, func(t *testing.T, k gpuKind) {
		o := k.options(t)
		v := newVolume(t)
		descriptors, shared := v.holds()
		cmd := exec.Command(os.Args[0], "-test.run=^TestGPUEngine$", "-test.v")
		flags := map[bool]string{true: "real"}[k.real] + map[bool]string{true: "polling"}[k.polling]
		cmd.Env = append(os.Environ(), engineVariable+"="+v.dir+"|"+flags)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		var said []byte
		for b := make([]byte, 4096); !strings.Contains(string(said), "busy\n"); {
			n, err := out.Read(b)
			said = append(said, b[:n]...)
			require.NoError(t, err, "the engine said: %s", said)
		}
		doc := v.sessions()
		require.Len(t, doc.Sessions, 1)
		require.Positive(t, doc.Sessions[0].Pins)
		require.Positive(t, doc.Sessions[0].Reserved)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		require.Eventually(t, func() bool {
			doc := v.sessions()
			fds, maps := v.holds()
			return len(doc.Sessions) == 0 && len(doc.Processes) == 0 && fds <= descriptors && maps == shared
		}, 20*time.Second, 10*time.Millisecond, "the daemon keeps something of a dead engine")

		u := newUser(t, v, o, nil)
		keys, _ := chain(1, 20)
		u.restoreToDevice(1, 0, keys)
		u.restoreToDevice(2, 1, keys)
		other, items := chain(2, 20)
		n, err := u.pool.Peek(0, other)
		require.NoError(t, err)
		require.Zero(t, n, "nothing of a reservation is visible")
		u.storeFromDevice(3, other, items)
		u.restoreToDevice(4, 1, other)
	})
}

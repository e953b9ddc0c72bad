package engine

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/gio"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// inMemory is a directory of tmpfs.
func inMemory(t testing.TB) string {
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("no tmpfs at /dev/shm")
	}
	return "/dev/shm"
}

// TestMountDrivesInMemory: drives that are files on tmpfs are mapped by the daemon. When somebody makes one shorter,
// what lay there fails to be read, and the daemon goes on.
func TestMountDrivesInMemory(t *testing.T) {
	v := newVolumeIn(t, inMemory(t), 64<<20, emu.Auto)
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", v.cmd.Process.Pid))
	require.NoError(t, err)
	for i := range 3 {
		require.Contains(t, string(maps), filepath.Join(v.dir, fmt.Sprintf("drive%d", i)))
	}
	u := newUser(t, v, mountOptions, nil)
	keys, items := chain(1, 60)
	u.store(1, keys, items, true)
	u.restore(2, 0, keys, true)
	u.restore(3, 1, keys, false)

	// Drive 2 has no copy of the metadata. Its first label stays, so that it is not lost.
	require.NoError(t, os.Truncate(filepath.Join(v.dir, "drive2"), 64<<10))
	grants := make([]Grant, len(keys))
	n, err := u.pool.Pin(0, 4, keys, grants)
	require.NoError(t, err)
	require.Equal(t, len(keys), n)
	var ctxs []gio.IOCTX
	memory, err := u.session.Ring().Register(hostMemory(t, len(keys)*16384))
	require.NoError(t, err)
	for i, g := range grants { // object 0 of each file, of 16 KiB
		ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(i * 16384), Slot: g.Slot})
	}
	ticket, err := u.session.Ring().Issue(false, u.pool.Map(), ctxs)
	require.NoError(t, err)
	failed, err := u.session.Ring().Wait(ticket)
	require.NoError(t, err)
	require.NotEmpty(t, failed)
	require.Less(t, len(failed), len(ctxs), "the other drives are whole")
	for _, f := range failed {
		require.ErrorIs(t, f.Err, gio.ErrStatus)
		require.ErrorContains(t, f.Err, "unrecovered read")
	}
	require.NoError(t, u.pool.Release(4))

	again, items := chain(2, 60) // writes make the drive as long again
	u.store(5, again, items, false)
	u.restore(6, 0, again, true)
}

// The shape of BenchmarkMountInMemory.
const (
	memoryFiles   = 384
	memoryObjects = 16
	memoryBytes   = 64 << 10 // of an object
	memoryBatch   = 1024     // objects
	memoryRounds  = 5
)

// memoryEngine is an engine on a volume in memory, with direct memory for a batch.
type memoryEngine struct {
	b       *testing.B
	way     emu.Backend
	v       *volume
	session *Session
	pool    *Pool
	ctxs    [2][]gio.IOCTX // to read and to write, each object once
	rate    [2][]float64   // bytes a second
	cpu     [2]float64     // CPU seconds of the daemon
	bytes   [2]float64
}

func newMemoryEngine(b *testing.B, way emu.Backend) *memoryEngine {
	m := &memoryEngine{b: b, way: way, v: newVolumeIn(b, inMemory(b), 512<<20, way)}
	mount, err := Open(m.v.mount())
	require.NoError(b, err)
	m.session, err = mount.NewSession(SessionOptions{Lanes: 4, Depth: 64, DMABytes: memoryBatch*memoryBytes + 8<<20})
	require.NoError(b, err)
	b.Cleanup(func() { _, _ = m.session.Close(), mount.Close() })
	spec := PoolSpec{Name: "pool", Identity: []byte(mountIdentity), TokensPerFile: 16}
	for layer := range uint16(memoryObjects) {
		spec.Geometry.Objects = append(spec.Geometry.Objects,
			stripe.Object{Layer: layer, Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: memoryBytes}}})
	}
	m.pool, err = m.session.OpenPool(spec)
	require.NoError(b, err)
	memory, err := m.session.Ring().RegisterPadded(m.session.DMA()[:memoryBatch*memoryBytes])
	require.NoError(b, err)

	keys, items := chain(1, memoryFiles)
	grants := make([]Grant, memoryFiles)
	_, err = m.pool.Reserve(0, 1, items, false, grants)
	require.NoError(b, err)
	l, err := m.session.Ring().CreateLayers(m.pool.Map(), 0, slotsOf(grants))
	require.NoError(b, err)
	desc := make([]uint64, memoryFiles)
	for i := range desc {
		desc[i] = memory.Desc(i * memoryBytes)
	}
	for layer := range uint16(memoryObjects) {
		ticket, err := l.StoreLayer(layer, desc)
		require.NoError(b, err)
		require.NoError(b, ticket.Wait())
	}
	require.NoError(b, l.Finish())
	l.Close()
	require.NoError(b, m.pool.CommitRanks(1, 0))

	_, err = m.pool.Pin(0, 2, keys, grants)
	require.NoError(b, err)
	m.ctxs[0] = memoryContexts(memory, grants)
	_, items = chain(2, memoryFiles)
	_, err = m.pool.Reserve(0, 3, items, false, grants)
	require.NoError(b, err)
	m.ctxs[1] = memoryContexts(memory, grants)
	return m
}

// memoryContexts is all objects of some slots in random order.
func memoryContexts(memory *gio.Memory, grants []Grant) (ctxs []gio.IOCTX) {
	for _, k := range rand.New(rand.NewPCG(1, 2)).Perm(len(grants) * memoryObjects) {
		ctxs = append(ctxs, gio.IOCTX{Desc: memory.Desc(len(ctxs) % memoryBatch * memoryBytes),
			Slot: grants[k/memoryObjects].Slot, Object: uint16(k % memoryObjects)})
	}
	return ctxs
}

// round moves every object once.
func (m *memoryEngine) round(direction int) {
	begin, used := time.Now(), m.daemonCPU()
	for ctxs := range slices.Chunk(m.ctxs[direction], memoryBatch) {
		ticket, err := m.session.Ring().Issue(direction == 1, m.pool.Map(), ctxs)
		require.NoError(m.b, err)
		failed, err := m.session.Ring().Wait(ticket)
		require.NoError(m.b, err)
		require.Empty(m.b, failed)
	}
	n := float64(len(m.ctxs[direction])) * memoryBytes
	m.rate[direction] = append(m.rate[direction], n/time.Since(begin).Seconds())
	m.cpu[direction] += m.daemonCPU() - used
	m.bytes[direction] += n
}

// daemonCPU is seconds.
func (m *memoryEngine) daemonCPU() float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.v.cmd.Process.Pid))
	require.NoError(m.b, err)
	_, rest, _ := strings.Cut(string(b), ") ") // the name may hold anything
	fields := strings.Fields(rest)
	var user, system float64
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	require.NoError(m.b, err)
	return (user + system) / 100 // USER_HZ
}

// BenchmarkMountInMemory is what an engine with the CPU executor gets from drives that are files in memory, by the ways
// that the daemon has to them, in turns. It reports medians, and CPU time of the daemon.
func BenchmarkMountInMemory(b *testing.B) {
	var engines []*memoryEngine
	for _, way := range []emu.Backend{emu.Auto, emu.URing, emu.Pread} {
		engines = append(engines, newMemoryEngine(b, way))
	}
	for _, m := range engines { // pages and threads come up
		m.round(0)
		m.round(1)
		m.rate, m.cpu, m.bytes = [2][]float64{}, [2]float64{}, [2]float64{}
	}
	for b.Loop() {
		for range memoryRounds {
			for _, m := range engines {
				m.round(0)
				m.round(1)
			}
		}
	}
	for _, m := range engines {
		way := cmp.Or(string(m.way), "mapped")
		for direction, verb := range []string{"read", "write"} {
			slices.Sort(m.rate[direction])
			b.ReportMetric(m.rate[direction][len(m.rate[direction])/2]/1e9, way+"-"+verb+"-GB/s")
			b.ReportMetric(m.cpu[direction]/m.bytes[direction]*1e9, way+"-"+verb+"-cpu-s/GB")
		}
	}
}

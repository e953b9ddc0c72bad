package emu

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// inMemory opens a new drive file in a directory of tmpfs.
func inMemory(t testing.TB, dir string, size int64) drive.Drive {
	t.Helper()
	path := filepath.Join(dir, "d")
	require.NoError(t, drive.Create(path, size))
	d, err := drive.Open(path, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func tmpfsDrive(t testing.TB, size int64) drive.Drive {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tuttifs-emu-")
	if err != nil {
		t.Skipf("no tmpfs at /dev/shm: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return inMemory(t, dir, size)
}

// smallTmpfs mounts a tmpfs of its own.
func smallTmpfs(t testing.TB, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting tmpfs needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tuttifs-test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// ways are the mapping, and the system calls that it must not differ from.
var ways = []struct {
	backend Backend
	taken   Backend
}{{Auto, Inline}, {Pread, Pread}}

func attachWay(t *testing.T, d drive.Drive, want, taken Backend) *host {
	t.Helper()
	c, err := New(Config{Drive: d, SGL: true})
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{Backend: want})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	h := attachHost(t, c, p, nil, 16, 4<<20)
	got, why := h.q.Backend()
	require.Equal(t, taken, got, why)
	return h
}

// TestMappedIsTheFile: the mapping and the descriptor show the same bytes, in both directions.
func TestMappedIsTheFile(t *testing.T) {
	d := tmpfsDrive(t, 8<<20)
	h := attachWay(t, d, Auto, Inline)
	const size = 256<<10 + 4096
	blocks := uint32(size) >> h.c.shift()
	fill(h.dma[:size], 1)
	for i, off := range []uint64{0, 12} { // of the executor's memory
		lba := uint64(i) * 2 * uint64(blocks)
		require.Equal(t, nvme.Success, h.do(h.rw(true, 1, lba, blocks, off)))
		got := make([]byte, size)
		require.NoError(t, d.ReadAt(got, int64(lba)<<h.c.shift()))
		require.True(t, bytes.Equal(h.dma[off:][:size], got))

		fill(got, 2)
		require.NoError(t, d.WriteAt(got, int64(lba)<<h.c.shift()))
		require.Equal(t, nvme.Success, h.do(h.rw(false, 2, lba, blocks, 1<<20+off)))
		require.True(t, bytes.Equal(got, h.dma[1<<20+off:][:size]))
	}
	require.NoError(t, d.WriteZeroes(0, size))
	require.Equal(t, nvme.Success, h.do(h.rw(false, 3, 0, blocks, 0)))
	require.Equal(t, make([]byte, size), h.dma[:size])
	require.Equal(t, nvme.Success, h.do(flush(4)))
	e := h.rw(true, 5, 0, 8, 0)
	e.CDW12 |= nvme.RWForceUnit
	require.Equal(t, nvme.Success, h.do(e))
	require.NoError(t, h.q.Quiesce(time.Now().Add(time.Second)))
	s := h.c.Stats()
	require.Equal(t, Stats{Reads: 3, Writes: 3, Flushes: 1, BytesRead: 3 * size, BytesWritten: 2*size + 8<<h.c.shift(),
		BusyNanoseconds: s.BusyNanoseconds}, s)
}

// TestWarm: what is there is mapped, and a hole stays one.
func TestWarm(t *testing.T) {
	d := tmpfsDrive(t, 16<<20)
	p := make([]byte, 6<<20)
	fill(p, 1)
	next := bytes.Clone(p[1<<20+64<<10:][:64<<10])
	require.NoError(t, d.WriteAt(p, 1<<20))
	h := attachWay(t, d, Auto, Inline)
	stopped := make(chan struct{})
	close(stopped)
	h.c.Warm(stopped)
	require.False(t, h.c.written.all(1<<20, 4096))
	h.c.Warm(nil)
	require.True(t, h.c.written.all(1<<20, 6<<20))
	for _, off := range []int64{1<<20 - 4096, 7 << 20} {
		require.False(t, h.c.written.all(off, 4096))
	}
	var st unix.Stat_t
	require.NoError(t, unix.Stat(d.Name(), &st))
	require.EqualValues(t, 6<<20, st.Blocks*512)
	fill(h.dma[:64<<10], 2)
	require.Equal(t, nvme.Success, h.do(h.rw(true, 1, 2<<20>>h.c.shift(), 64<<10>>h.c.shift(), 0)))
	require.NoError(t, d.ReadAt(p[:64<<10], 2<<20))
	require.True(t, bytes.Equal(h.dma[:64<<10], p[:64<<10]))
	require.NoError(t, d.ReadAt(p[:64<<10], 2<<20+64<<10))
	require.True(t, bytes.Equal(next, p[:64<<10]))

	memory, err := New(Config{Drive: memoryDrive(t, 1<<20)})
	require.NoError(t, err)
	memory.Warm(nil)
}

// TestMappedTruncated: somebody makes the file shorter under the mapping. Commands fail or succeed as they do by system
// calls, and those of the rest go on.
func TestMappedTruncated(t *testing.T) {
	for _, way := range ways {
		t.Run(string(way.taken), func(t *testing.T) {
			d := tmpfsDrive(t, 8<<20)
			h := attachWay(t, d, way.backend, way.taken)
			at := func(off int64) uint64 { return uint64(off) >> h.c.shift() }
			blocks := uint32(64<<10) >> h.c.shift()
			fill(h.dma, 1)
			for _, off := range []int64{0, 6 << 20} {
				require.Equal(t, nvme.Success, h.do(h.rw(true, 1, at(off), blocks, 0)))
			}
			require.NoError(t, os.Truncate(d.Name(), 4<<20))
			require.Equal(t, nvme.UnrecoveredRead, h.do(h.rw(false, 2, at(6<<20), blocks, 2<<20)))
			require.Equal(t, nvme.UnrecoveredRead, h.do(h.rw(false, 3, at(4<<20-4096), blocks, 2<<20)), "in part")
			require.Equal(t, nvme.Success, h.do(h.rw(false, 4, 0, blocks, 1<<20)))
			require.True(t, bytes.Equal(h.dma[:64<<10], h.dma[1<<20:][:64<<10]))

			// A write behind the end makes the file longer again, whether its pages were written before or not.
			for i, off := range []int64{4<<20 + 64<<10, 6 << 20} {
				fill(h.dma[:64<<10], uint64(i+2))
				require.Equal(t, nvme.Success, h.do(h.rw(true, 5, at(off), blocks, 0)))
				require.Equal(t, nvme.Success, h.do(h.rw(false, 6, at(off), blocks, 1<<20)))
				require.True(t, bytes.Equal(h.dma[:64<<10], h.dma[1<<20:][:64<<10]))
			}
			require.NoError(t, h.q.Quiesce(time.Now().Add(time.Second)))
			require.EqualValues(t, 2, h.c.Stats().Errors)
		})
	}
}

// TestMappedTruncatedMeanwhile: the file is made shorter and longer again while commands run. Each of them ends, as
// read and write errors at worst.
func TestMappedTruncatedMeanwhile(t *testing.T) {
	const size, commands = 4 << 20, 1000
	d := tmpfsDrive(t, size)
	h := attachWay(t, d, Auto, Inline)
	go h.p.Run()
	var stop atomic.Bool
	var group sync.WaitGroup
	group.Go(func() {
		r := rand.New(rand.NewPCG(5, 6))
		for !stop.Load() {
			for _, n := range []int64{r.Int64N(size), size} {
				if err := os.Truncate(d.Name(), n); err != nil {
					t.Error(err)
				}
			}
		}
	})
	r := rand.New(rand.NewPCG(7, 8))
	blocks := uint32(64<<10) >> h.c.shift()
	failed := 0
	for range commands {
		st := h.do(h.rw(r.IntN(2) == 0, 1, uint64(r.IntN(64))*uint64(blocks), blocks, 0))
		if !st.OK() {
			require.Contains(t, []nvme.Status{nvme.UnrecoveredRead, nvme.WriteFault}, st)
			failed++
		}
	}
	stop.Store(true)
	group.Wait()
	t.Logf("%d of %d commands failed", failed, commands)
	require.NoError(t, os.Truncate(d.Name(), size))
	fill(h.dma[:64<<10], 1)
	require.Equal(t, nvme.Success, h.do(h.rw(true, 2, 0, blocks, 0)))
	require.Equal(t, nvme.Success, h.do(h.rw(false, 3, 0, blocks, 1<<20)))
	require.True(t, bytes.Equal(h.dma[:64<<10], h.dma[1<<20:][:64<<10]))
}

// TestMappedFull: a hole is written and the filesystem is full.
func TestMappedFull(t *testing.T) {
	for _, way := range ways {
		t.Run(string(way.taken), func(t *testing.T) {
			dir := smallTmpfs(t, "size=1m")
			d := inMemory(t, dir, 8<<20)
			h := attachWay(t, d, way.backend, way.taken)
			at := func(off int64) uint64 { return uint64(off) >> h.c.shift() }
			blocks := uint32(512<<10) >> h.c.shift()
			fill(h.dma, 1)
			require.Equal(t, nvme.Success, h.do(h.rw(true, 1, 0, blocks, 0)))
			full := false
			for off := int64(1 << 20); off < 4<<20; off += 512 << 10 {
				st := h.do(h.rw(true, 2, at(off), blocks, 0))
				if full = full || !st.OK(); full {
					require.Equal(t, nvme.CapacityExceeded|dnr, st)
				}
			}
			require.True(t, full)
			require.Equal(t, nvme.Success, h.do(h.rw(true, 3, 0, blocks, 1<<20)), "where there are pages")
			require.Equal(t, nvme.Success, h.do(h.rw(false, 4, 0, blocks, 2<<20)))
			require.True(t, bytes.Equal(h.dma[1<<20:][:512<<10], h.dma[2<<20:][:512<<10]))
			require.Equal(t, nvme.Success, h.do(h.rw(false, 5, at(6<<20), blocks, 2<<20)), "a hole is zeroes")
			require.Equal(t, make([]byte, 512<<10), h.dma[2<<20:][:512<<10])

			// A page that was written before and has become a hole since.
			require.NoError(t, d.Discard(0, 512<<10))
			require.NoError(t, drive.Create(filepath.Join(dir, "rest"), 1<<20))
			rest, err := drive.Open(filepath.Join(dir, "rest"), drive.Options{})
			require.NoError(t, err)
			for off := int64(0); rest.WriteAt(make([]byte, 4096), off) == nil; off += 4096 {
				require.Less(t, off, int64(1<<20)-4096, "the filesystem has more room than it should")
			}
			require.NoError(t, rest.Close())
			require.Equal(t, nvme.CapacityExceeded|dnr, h.do(h.rw(true, 6, 0, blocks, 0)))
			require.NoError(t, h.q.Quiesce(time.Now().Add(time.Second)))
		})
	}
}

// TestMappedReadOnly: a drive opened for reading refuses writes, also by a controller that would let them pass.
func TestMappedReadOnly(t *testing.T) {
	w := tmpfsDrive(t, 1<<20)
	d, err := drive.Open(w.Name(), drive.Options{ReadOnly: true, NoLock: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	for _, way := range ways {
		h := attachWay(t, d, way.backend, way.taken)
		require.Equal(t, nvme.WriteProtected|dnr, h.do(h.rw(true, 1, 0, 8, 0)))
		require.Equal(t, nvme.Success, h.do(h.rw(false, 2, 0, 8, 0)))
	}
}

// TestFaultOfTheExecutorsMemory: a page of its memory that is not to be had fails the command, not the drive.
func TestFaultOfTheExecutorsMemory(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 1<<20), SGL: true}, 16, 1<<20)
	require.NoError(t, unix.Mprotect(h.dma[64<<10:][:4096], unix.PROT_NONE))
	defer func() { require.NoError(t, unix.Mprotect(h.dma, unix.PROT_READ|unix.PROT_WRITE)) }()
	for cid, write := range []bool{false, true} {
		require.Equal(t, nvme.DataTransferError, h.do(h.rw(write, uint16(cid), 0, 128<<10>>h.c.shift(), 0)))
		require.Equal(t, nvme.Success, h.do(h.rw(write, uint16(cid), 0, 64<<10>>h.c.shift(), 0)))
	}
}

// TestMappedFaults: what is injected into commands happens to those of mapped drives, too.
func TestMappedFaults(t *testing.T) {
	h := attachWay(t, tmpfsDrive(t, 1<<20), Auto, Inline)
	var f Fault
	h.c.SetFaults(func(*nvme.SQE) *Fault { return &f })
	fill(h.dma, 1)
	f = Fault{Status: uint16(nvme.WriteFault)}
	require.Equal(t, nvme.WriteFault, h.do(h.rw(true, 1, 0, 8, 0)))
	require.Equal(t, make([]byte, 4096), h.c.bytes[:4096])
	f = Fault{Short: 512}
	require.Equal(t, nvme.DataTransferError, h.do(h.rw(true, 2, 0, 8, 0)))
	require.True(t, bytes.Equal(h.dma[:512], h.c.bytes[:512]))
	require.Equal(t, make([]byte, 512), h.c.bytes[512:1024])
	f = Fault{Delay: time.Millisecond}
	begin := time.Now()
	require.Equal(t, nvme.Success, h.do(h.rw(true, 3, 0, 8, 0)))
	require.GreaterOrEqual(t, time.Since(begin), time.Millisecond)
}

package emu

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// pump keeps the queue full with prepared entries and consumes completions until n are done.
func (h *host) pump(n, inflight int, step func(), build func(e *nvme.SQE, cid uint16)) {
	depth := uint32(len(h.qm.SQ))
	free := make([]uint16, 0, inflight)
	for i := range inflight {
		free = append(free, uint16(i))
	}
	for sent, done := 0, 0; done < n; {
		for ; len(free) > 0 && sent < n; sent++ {
			build(&h.qm.SQ[h.tail], free[len(free)-1])
			free = free[:len(free)-1]
			h.tail = (h.tail + 1) & (depth - 1)
		}
		atomic.StoreUint32(h.qm.SQTail, h.tail)
		step()
		for {
			cid, st, ok := h.qm.CQ[h.head].Poll(h.phase)
			if !ok {
				break
			}
			if !st.OK() {
				h.t.Fatal(st)
			}
			free = append(free, cid)
			done++
			if h.head++; h.head == depth {
				h.head, h.phase = 0, h.phase^1
			}
		}
		atomic.StoreUint32(h.qm.CQHead, h.head)
	}
}

// Both sides of one queue on one core.
func BenchmarkEmpty(b *testing.B) {
	h := newHost(b, Config{Drive: memoryDrive(b, 1<<20)}, 256, 1<<20)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ResetTimer()
	h.pump(b.N, 128, func() { h.p.Step() }, func(e *nvme.SQE, cid uint16) { nvme.BuildFlush(e, cid, 1) })
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds()/1e6, "Mcmd/s")
}

const (
	benchSpan          = 64 << 20
	benchInMemoryBytes = 1 << 30
)

func (h *host) pumpRW(n int, write bool, size uint32, inflight int, step func()) {
	blocks := size >> h.c.shift()
	places := uint64(h.c.drive.Size()) / uint64(size)
	seq := uint64(0)
	h.pump(n, inflight, step, func(e *nvme.SQE, cid uint16) {
		nvme.BuildRW(e, write, cid, 1, seq%places*uint64(blocks), blocks)
		seq++
		_ = e.SetSGL(dmaBase+uint64(cid)*uint64(size), size)
	})
}

func BenchmarkMemory(b *testing.B) {
	d := memoryDrive(b, benchSpan)
	for _, size := range []uint32{32 << 10, 64 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("memcpy-%dK", size>>10), func(b *testing.B) {
			dst, src := mmapTest(b, 32*int(size)), d.Bytes()
			copy(dst, src)
			b.SetBytes(int64(size))
			b.ResetTimer()
			for i := range b.N {
				copy(dst[i%32*int(size):][:size], src[i%(benchSpan/int(size))*int(size):])
			}
		})
		for _, write := range []bool{false, true} {
			b.Run(fmt.Sprintf("write=%v-%dK", write, size>>10), func(b *testing.B) {
				h := newHost(b, Config{Drive: d, SGL: true}, 64, 32*int(size))
				fill(h.dma, 1)
				b.SetBytes(int64(size))
				b.ResetTimer()
				h.pumpRW(b.N, write, size, 32, func() { h.p.Step() })
			})
		}
	}
}

// The figure to hold against fio --ioengine=io_uring --direct=1 at equal block size and depth.
func BenchmarkFile(b *testing.B) {
	d := fileDrive(b, 1<<30)
	require.NoError(b, d.WriteZeroes(0, 1<<30))
	chunk := mmapTest(b, 1<<20)
	fill(chunk, 9)
	for off := int64(0); off < 1<<30; off += 1 << 20 {
		require.NoError(b, d.WriteAt(chunk, off))
	}
	for _, backend := range []Backend{URing, Pread} {
		for _, size := range []uint32{32 << 10, 64 << 10, 128 << 10} {
			for _, write := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/write=%v-%dK", backend, write, size>>10), func(b *testing.B) {
					c, err := New(Config{Drive: d, SGL: true})
					require.NoError(b, err)
					p, err := NewPoller(PollerConfig{Backend: backend})
					require.NoError(b, err)
					h := attachHost(b, c, p, nil, 64, 16*int(size))
					fill(h.dma, 1)
					b.SetBytes(int64(size))
					b.ResetTimer()
					start := cpuTime()
					// One thread does both sides, as fio does: what is compared is the work, not the luck of two
					// threads.
					h.pumpRW(b.N, write, size, 16, h.stepOrWait)
					b.StopTimer()
					reportCPU(b, start, size)
					p.Stop()
				})
			}
		}
	}
}

// stepOrWait is the poller's step, and where there was nothing to do its wait for the drive.
func (h *host) stepOrWait() {
	switch {
	case h.p.Step() > 0:
	case h.q.backend == URing:
		h.p.ring.wait(time.Second)
	default:
		nvme.FutexWait(&h.p.event, 0, napMax)
	}
}

// inMemoryWays are the ways to bytes in memory: a memory drive, and a file on tmpfs mapped and by system calls.
var inMemoryWays = []struct {
	name    string
	drive   func(testing.TB, int64) drive.Drive
	backend Backend
}{
	{"memory", memoryDrive, Auto},
	{"mapped", tmpfsDrive, Auto},
	{"mapped-huge", hugeDrive, Auto},
	{"uring", tmpfsDrive, URing},
	{"pread", tmpfsDrive, Pread},
}

// hugeDrive is a file on tmpfs in huge pages.
func hugeDrive(t testing.TB, size int64) drive.Drive {
	return inMemory(t, smallTmpfs(t, "size=2g,huge=within_size"), size)
}

func benchInMemory(b *testing.B, d drive.Drive, backend Backend, size uint32) *host {
	c, err := New(Config{Drive: d, SGL: true})
	require.NoError(b, err)
	p, err := NewPoller(PollerConfig{Backend: backend})
	require.NoError(b, err)
	b.Cleanup(p.Stop)
	h := attachHost(b, c, p, nil, 64, 16*int(size))
	fill(h.dma, 1)
	return h
}

// Reads and writes of pages that were written before.
func BenchmarkInMemory(b *testing.B) {
	for _, way := range inMemoryWays {
		d := way.drive(b, benchInMemoryBytes)
		for _, size := range []uint32{32 << 10, 64 << 10, 256 << 10} {
			for _, write := range []bool{true, false} {
				b.Run(fmt.Sprintf("%s/write=%v-%dK", way.name, write, size>>10), func(b *testing.B) {
					h := benchInMemory(b, d, way.backend, size)
					h.pumpRW(benchInMemoryBytes/int(size), true, size, 16, h.stepOrWait)
					b.SetBytes(int64(size))
					b.ResetTimer()
					start := cpuTime()
					h.pumpRW(b.N, write, size, 16, h.stepOrWait)
					b.StopTimer()
					reportCPU(b, start, size)
				})
			}
		}
	}
}

// First writes of a controller: to holes, and to pages that are there and that it has not reached before.
func BenchmarkFirstWrites(b *testing.B) {
	const size = 64 << 10
	for _, way := range inMemoryWays {
		d := way.drive(b, benchInMemoryBytes)
		for _, holes := range []bool{true, false} {
			b.Run(fmt.Sprintf("%s/holes=%v", way.name, holes), func(b *testing.B) {
				if way.backend == Auto && !holes && d.Fd() < 0 {
					b.Skip("memory has no pages that are not reached")
				}
				b.SetBytes(benchInMemoryBytes)
				var used time.Duration
				for b.Loop() {
					b.StopTimer()
					if holes {
						require.NoError(b, d.Discard(0, benchInMemoryBytes))
					} else if d.Fd() >= 0 {
						require.NoError(b, unix.Madvise(d.Bytes(), unix.MADV_DONTNEED)) // unmaps, drops nothing
					}
					h := benchInMemory(b, d, way.backend, size)
					start := cpuTime()
					b.StartTimer()
					h.pumpRW(benchInMemoryBytes/size, true, size, 16, h.stepOrWait)
					b.StopTimer()
					used += cpuTime() - start
					b.StartTimer()
				}
				b.ReportMetric(used.Seconds()/(float64(b.N)*benchInMemoryBytes/1e9), "cpu-s/GB")
			})
		}
	}
}

// The same through a running poller, as an engine in another process has it.
func BenchmarkRunningPoller(b *testing.B) {
	d := fileDrive(b, 1<<28)
	chunk := mmapTest(b, 1<<20)
	fill(chunk, 9)
	for off := int64(0); off < 1<<28; off += 1 << 20 {
		require.NoError(b, d.WriteAt(chunk, off))
	}
	const size = 64 << 10
	for _, depth := range []int{16, 64} {
		b.Run(fmt.Sprintf("uring-64K-%d", depth), func(b *testing.B) {
			var armed, wake uint32 = 1, 0
			c, err := New(Config{Drive: d, SGL: true})
			require.NoError(b, err)
			p, err := NewPoller(PollerConfig{Backend: URing, Armed: &armed, Wake: &wake})
			require.NoError(b, err)
			h := attachHost(b, c, p, nil, 128, depth*size)
			go p.Run()
			defer p.Stop()
			b.SetBytes(size)
			b.ResetTimer()
			start := cpuTime()
			var nap uint32
			h.pumpRW(b.N, false, size, depth, func() { nvme.FutexWait(&nap, 0, 10*time.Microsecond) })
			b.StopTimer()
			reportCPU(b, start, size)
		})
	}
}

// cpuTime is what the process has used so far, the kernel's part included.
func cpuTime() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func reportCPU(b *testing.B, start time.Duration, size uint32) {
	b.ReportMetric((cpuTime()-start).Seconds()/(float64(b.N)*float64(size)/1e9), "cpu-s/GB")
}

package emu

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
)

func words(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), len(b)/8)
}

func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

func TestReadBackMemory(t *testing.T) {
	h := newHost(t, Config{Drive: memoryDrive(t, 8<<20)}, 16, 4<<20)
	fill(h.dma[:64<<10], 1)
	bs := uint32(1) << h.c.shift()
	require.True(t, h.do(h.rw(true, 7, 3, 64<<10/bs, 0)).OK())
	require.True(t, h.do(h.rw(false, 8, 3, 64<<10/bs, 1<<20)).OK())
	require.True(t, bytes.Equal(h.dma[:64<<10], h.dma[1<<20:][:64<<10]))
	s := h.c.Stats()
	require.Equal(t, uint64(1), s.Reads)
	require.Equal(t, uint64(64<<10), s.BytesWritten)
}

func fileDrive(t testing.TB, size int64) drive.Drive {
	t.Helper()
	path := filepath.Join(t.TempDir(), "d")
	require.NoError(t, drive.Create(path, size))
	d, err := drive.Open(path, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// Every way to the drive moves the same bytes, aligned or not.
func TestBackendsMoveTheSameBytes(t *testing.T) {
	for _, b := range []Backend{URing, Pread, Auto} {
		t.Run("backend "+string(b), func(t *testing.T) {
			d := fileDrive(t, 16<<20)
			c, err := New(Config{Drive: d, SGL: true})
			require.NoError(t, err)
			p, err := NewPoller(PollerConfig{Backend: b})
			if b == URing && err != nil {
				t.Skip(err)
			}
			require.NoError(t, err)
			t.Cleanup(p.Stop)
			h := attachHost(t, c, p, nil, 64, 8<<20)
			bs := uint32(1) << h.c.shift()
			fill(h.dma[:2<<20], 2)
			for i, off := range []uint64{0, 4096, 12, 516} {
				for _, n := range []uint32{4096, 128 << 10, 2<<20 - 4096} {
					lba := uint64(i) * 4096
					require.Equal(t, nvme.Success, h.do(h.rw(true, 1, lba, n/bs, off)))
					require.Equal(t, nvme.Success, h.do(h.rw(false, 2, lba, n/bs, 4<<20+off)))
					require.True(t, bytes.Equal(h.dma[off:][:n], h.dma[4<<20+off:][:n]), "offset %d, %d bytes", off, n)
					clear(h.dma[4<<20 : 6<<20+4096])
				}
			}
			var e nvme.SQE
			nvme.BuildFlush(&e, 3, 1)
			require.True(t, h.do(e).OK())
			e = h.rw(true, 4, 0, 8, 0)
			e.CDW12 |= nvme.RWForceUnit
			require.True(t, h.do(e).OK())
			got, why := h.q.Backend()
			t.Log(got, why)
			require.NoError(t, h.q.Quiesce(time.Now().Add(time.Second)))
		})
	}
}

// A poller that has looked for the last time before its sleep hears of work that comes then, also when another poller
// of the same word announces its own sleep at once.
func TestWakeUpBetweenPollers(t *testing.T) {
	shared := words(mmapTest(t, PageBytes))
	armed := (*uint32)(unsafe.Pointer(&shared[0]))
	wake := (*uint32)(unsafe.Pointer(&shared[8]))
	p, err := NewPoller(PollerConfig{Armed: armed, Wake: wake, Number: 0})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	p.extra = func() int {
		atomic.AddUint32(armed, 1)
		nvme.Wake(wake)
		atomic.StoreUint32(wake, 2) // the poller of number 1
		return 0
	}
	woken := make(chan bool)
	go func() { woken <- p.rest() }()
	select {
	case more := <-woken:
		require.True(t, more)
	case <-time.After(10 * time.Second):
		p.kick()
		<-woken
		t.Fatal("a wake-up was lost")
	}
}

// The end of a nap is no wake-up, whatever number another poller of the same word has announced meanwhile: who takes it
// for one spins, at every nap's end.
func TestNapBesidePollers(t *testing.T) {
	shared := words(mmapTest(t, PageBytes))
	armed := (*uint32)(unsafe.Pointer(&shared[0]))
	wake := (*uint32)(unsafe.Pointer(&shared[8]))
	atomic.StoreUint32(armed, 1)
	p, err := NewPoller(PollerConfig{Armed: armed, Wake: wake, Number: 0})
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	var stop atomic.Bool
	var other sync.WaitGroup
	other.Go(func() {
		for !stop.Load() {
			atomic.StoreUint32(wake, 2) // the poller of number 1
			runtime.Gosched()
		}
	})
	defer other.Wait()
	defer stop.Store(true)
	for range 100_000 { // mostly it is announced too soon for the nap to begin
		if !p.rest() && atomic.LoadUint32(wake) == 2 {
			return
		}
	}
	t.Fatal("every nap's end was taken for a wake-up")
}

// The executor rings whenever the poller is just falling asleep, napping or awake: every command completes, or a
// wake-up was lost.
func TestNoWakeUpIsLost(t *testing.T) {
	shared := words(mmapTest(t, PageBytes))
	armed := (*uint32)(unsafe.Pointer(&shared[0]))
	wake := (*uint32)(unsafe.Pointer(&shared[8]))
	c, err := New(Config{Drive: memoryDrive(t, 8<<20)})
	require.NoError(t, err)
	p, err := NewPoller(PollerConfig{Armed: armed, Wake: wake, Spin: 5 * time.Microsecond})
	require.NoError(t, err)
	go p.Run()
	t.Cleanup(p.Stop)
	h := attachHost(t, c, p, nil, 16, 1<<20)
	r := rand.New(rand.NewPCG(3, 4))
	var nap uint32
	for i := range 1000 {
		atomic.AddUint32(armed, 1)
		h.put(flush(uint16(i)))
		h.ring()
		nvme.Wake(wake)
		for end := time.Now().Add(20 * time.Second); len(h.reap()) == 0; {
			require.True(t, time.Now().Before(end), "command %d: a wake-up was lost", i)
			runtime.Gosched()
		}
		atomic.AddUint32(armed, ^uint32(0))
		nvme.FutexWait(&nap, 0, time.Duration(r.IntN(80))*time.Microsecond+1)
	}
	require.NoError(t, h.q.Quiesce(time.Now().Add(time.Second)))
}

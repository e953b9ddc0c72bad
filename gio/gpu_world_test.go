package gio_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/gio"
	"tuttifs/gio/giotest"
)

// world is a GPU, or a fake of one, with a thread that makes the test's own calls.
type world struct {
	driver  *cuda.Driver
	fake    *cudatest.Fake // nil on a GPU
	context *cuda.Context
	calls   chan func()
	stream  *cuda.Stream
	pinned  *cuda.HostMemory // what uploads and downloads pass through
}

// pinnedBytes is the piece in which the test copies.
const pinnedBytes = 1 << 20

// newWorld takes the device up; it is given back with the test.
func newWorld(t testing.TB, driver *cuda.Driver, ordinal int) *world {
	t.Helper()
	w := &world{driver: driver, calls: make(chan func())}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for f := range w.calls {
			f()
		}
	}()
	err := w.do(func() error { return w.setUp(ordinal) })
	t.Cleanup(func() {
		if err := w.do(w.takeDown); err != nil {
			t.Errorf("%v", err)
		}
		close(w.calls)
	})
	require.NoError(t, err)
	return w
}

func (w *world) setUp(ordinal int) error {
	device, err := w.driver.Device(ordinal)
	if err != nil {
		return err
	}
	if w.context, err = device.Primary(); err != nil {
		return err
	}
	if err = w.context.Bind(); err != nil {
		return err
	}
	if w.stream, err = w.context.NewStream(0); err != nil {
		return err
	}
	w.pinned, err = w.context.AllocHost(pinnedBytes, false)
	return err
}

func (w *world) takeDown() error {
	var errs []error
	if w.pinned != nil {
		errs = append(errs, w.context.FreeHost(w.pinned))
	}
	if w.stream != nil {
		errs = append(errs, w.stream.Close())
	}
	if w.context != nil {
		errs = append(errs, w.context.Unbind(), w.context.Close())
	}
	return errors.Join(errs...)
}

// do runs f on the thread to which the context is bound.
func (w *world) do(f func() error) error {
	result := make(chan error, 1)
	w.calls <- func() { result <- f() }
	return <-result
}

func (w *world) Alloc(n int) (address uint64, err error) {
	err = w.do(func() error {
		p, err := w.context.Alloc(uint64(n))
		address = uint64(p)
		return err
	})
	return address, err
}

func (w *world) Free(address uint64) error {
	return w.do(func() error { return w.context.Free(cuda.Pointer(address)) })
}

func (w *world) Upload(address uint64, b []byte) error {
	return w.do(func() error {
		for len(b) > 0 {
			n := copy(w.pinned.Bytes, b)
			err := w.stream.CopyHtoD(cuda.Pointer(address), unsafe.Pointer(&w.pinned.Bytes[0]), uint64(n))
			if err == nil {
				err = w.stream.Synchronize()
			}
			if err != nil {
				return err
			}
			b, address = b[n:], address+uint64(n)
		}
		return nil
	})
}

func (w *world) Download(b []byte, address uint64) error {
	return w.do(func() error {
		for len(b) > 0 {
			n := min(len(b), pinnedBytes)
			err := w.stream.CopyDtoH(unsafe.Pointer(&w.pinned.Bytes[0]), cuda.Pointer(address), uint64(n))
			if err == nil {
				err = w.stream.Synchronize()
			}
			if err != nil {
				return err
			}
			copy(b, w.pinned.Bytes[:n])
			b, address = b[n:], address+uint64(n)
		}
		return nil
	})
}

// deviceOf is the world's memory as one executor knows it.
type deviceOf struct {
	*world
	g *gio.GPU
}

func (d deviceOf) Register(address uint64, n int) (*gio.Memory, error) {
	return d.g.RegisterDevice(cuda.Pointer(address), uint64(n))
}

func (d deviceOf) RegisterPaged(blocks uint64, classes [][]giotest.StridedRun) (*gio.Memory, error) {
	p := gio.Paged{Blocks: blocks}
	for _, runs := range classes {
		class := []cuda.StridedRun{}
		for _, x := range runs {
			class = append(class, cuda.StridedRun{Base: x.Base, Stride: x.Stride, Bytes: x.Bytes})
		}
		p.Classes = append(p.Classes, class)
	}
	return d.g.RegisterPaged(p)
}

// live is the sum of all that the fake has given.
func (w *world) live() int {
	n, counts := 0, reflect.ValueOf(w.fake.Live())
	for i := range counts.NumField() {
		if f := counts.Field(i); f.CanInt() {
			n += int(f.Int())
		} else {
			n += int(f.Uint())
		}
	}
	return n
}

// sizes draws the sizes of an executor: pieces and harvests that are small, large, and as they are by default.
type sizes struct {
	mu     sync.Mutex
	random *rand.Rand
}

// pick is any of some, the first without a source.
func (s *sizes) pick(of ...int) int {
	if s.random == nil {
		return of[0]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return of[s.random.IntN(len(of))]
}

// subject is the executor with build ahead, or the polling one, on this world.
func (w *world) subject(seed uint64, polling bool) giotest.Subject {
	return w.sized(&sizes{random: rand.New(rand.NewPCG(seed, 99))}, seed, polling)
}

func (w *world) sized(x *sizes, seed uint64, polling bool) giotest.Subject {
	s := giotest.Subject{
		Seed: seed,
		New: func(c gio.RingConfig, peer bool) (gio.Executor, error) {
			g := gio.GPUConfig{
				RingConfig: c, Context: w.context, Polling: polling,
				StagingBytes:  x.pick(8<<20, 12<<20, 16<<20),
				MoveBytes:     x.pick(64<<10, 1<<20, 0),
				Moves:         x.pick(0, 1, 3),
				HarvestBytes:  x.pick(1, 256<<10, 0),
				HarvestBlocks: x.pick(0, 1, 7),
				BuildPerChunk: x.pick(0, 0, 0, 1) == 1,
			}
			if peer {
				g.Peer = func(p cuda.Pointer, n uint64) (uint64, bool) { return giotest.PeerBase + uint64(p), true }
			}
			return gio.NewGPU(g)
		},
		Device: func(e gio.Executor) giotest.Device { return deviceOf{w, e.(*gio.GPU)} },
	}
	if w.fake != nil {
		s.Live, s.Rounds = w.live, 2
		s.Reach = func(address uint64, n uint32) []byte {
			return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
		}
	}
	return s
}

// fakeWorld is a GPU that every machine has. Its streams' operations are delayed at random.
func fakeWorld(t *testing.T, seed uint64) *world {
	fake := cudatest.Start(t, cudatest.Config{
		Kernels: cudatest.Kernels(), MemoryBytes: 8 << 30, Jitter: 20 * time.Microsecond, Seed: seed,
	})
	w := newWorld(t, fake.Driver(), 0)
	w.fake = fake
	return w
}

// gpuWorld is the machine's GPU, the one that TUTTIFS_GPU names by its number. Without one the test is skipped.
func gpuWorld(t *testing.T) *world {
	driver, err := cuda.Open()
	if errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	ordinal := 0
	if s := os.Getenv("TUTTIFS_GPU"); s != "" {
		ordinal, err = strconv.Atoi(s)
		require.NoError(t, err, "TUTTIFS_GPU")
	}
	return newWorld(t, driver, ordinal)
}

// testSeed is a new one each time, or the one of TUTTIFS_SEED, to run once more what failed.
func testSeed(t *testing.T) uint64 {
	s := os.Getenv("TUTTIFS_SEED")
	if s == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(s, 0, 64)
	require.NoError(t, err, "TUTTIFS_SEED")
	return seed
}

func executorName(polling bool) string {
	if polling {
		return "polling"
	}
	return "ring"
}

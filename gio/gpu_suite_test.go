package gio_test

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/gio/giotest"
)

// eachExecutor runs a test for both executors of a GPU, on one that every machine has and on the machine's own.
func eachExecutor(t *testing.T, on func(t *testing.T) *world, f func(t *testing.T, w *world, polling bool)) {
	for _, polling := range []bool{false, true} {
		t.Run(executorName(polling), func(t *testing.T) { f(t, on(t), polling) })
	}
}

// onFake is a world for eachExecutor.
func onFake(t *testing.T) *world { return fakeWorld(t, testSeed(t)) }

func TestGPUOnFake(t *testing.T) {
	eachExecutor(t, onFake, func(t *testing.T, w *world, polling bool) {
		s := w.subject(testSeed(t), polling)
		s.Store = !polling && s.Seed%2 == 0 // what a store buffer changes is tested below in any case
		giotest.Run(t, s)
	})
}

func TestGPU(t *testing.T) {
	eachExecutor(t, gpuWorld, func(t *testing.T, w *world, polling bool) {
		giotest.Run(t, w.subject(testSeed(t), polling))
	})
}

// TestGPUStoresOnFake and TestGPUStores are the ring with a store buffer. The polling executor has none.
func TestGPUStoresOnFake(t *testing.T) { testStores(t, onFake(t)) }
func TestGPUStores(t *testing.T)       { testStores(t, gpuWorld(t)) }

func TestGPUPacedOnFake(t *testing.T) { testPaced(t, onFake(t)) }
func TestGPUPaced(t *testing.T)       { testPaced(t, gpuWorld(t)) }

func TestGPUScheduledOnFake(t *testing.T) { runScheduled(t, onFake(t).subject(testSeed(t), false)) }
func TestGPUScheduled(t *testing.T)       { runScheduled(t, gpuWorld(t).subject(testSeed(t), false)) }

func testPaced(t *testing.T, w *world) { giotest.Run(t, withPacer(w.subject(testSeed(t), false))) }

func testStores(t *testing.T, w *world) {
	s := w.subject(testSeed(t), false)
	s.Store, s.Only = true, stored
	giotest.Run(t, s)
}

// crowded are the tests that run beside others' work.
var crowded = []string{
	"Geometries", "Mixed", "Order", "Faults", "Storm", "LateLanding", "HeldWrites", "Concurrent", "Layers",
	"LayerDamage", "Closed", "DeadDaemon",
}

// TestGPUBesideOthers runs beside an allocator that grows and shrinks in the same context, beside other processes on
// the same GPU, TUTTIFS_COMPANIONS of them (2 by default), and beside the program that TUTTIFS_BESIDE names with its
// arguments.
func TestGPUBesideOthers(t *testing.T) {
	eachExecutor(t, gpuWorld, func(t *testing.T, w *world, polling bool) {
		companions := 2
		if s := os.Getenv("TUTTIFS_COMPANIONS"); s != "" {
			n, err := strconv.Atoi(s)
			require.NoError(t, err, "TUTTIFS_COMPANIONS")
			companions = n
		}
		for range companions {
			beside(t, os.Args[0], "-test.run=^TestGPUCompanion$", "-test.v")
		}
		if args := strings.Fields(os.Getenv("TUTTIFS_BESIDE")); len(args) > 0 {
			beside(t, args[0], args[1:]...)
		}
		churn(t, w, 64<<20)
		s := w.subject(testSeed(t), polling)
		s.Only = crowded
		if polling {
			// A kernel that polls for writes which are held back keeps whoever frees memory in its context waiting,
			// and that keeps whoever launches: no read begins before the writes have ended (docs/rings.md).
			s.Only = slices.DeleteFunc(slices.Clone(crowded), func(name string) bool { return name == "HeldWrites" })
		}
		giotest.Run(t, s)
	})
}

// TestGPUBesideAllocator is the same for the fake: what an allocator does in the same context.
func TestGPUBesideAllocator(t *testing.T) {
	eachExecutor(t, onFake, func(t *testing.T, w *world, polling bool) {
		churn(t, w, 1<<20)
		s := w.subject(testSeed(t), polling)
		s.Live = nil // the allocator's own come and go
		s.Only = []string{"Concurrent"}
		giotest.Run(t, s)
	})
}

// churn allocates and frees device memory in the context of the test until its end, as allocators of frameworks do
// that grow and shrink: each free waits for the whole device.
func churn(t *testing.T, w *world, most int) {
	stop, ended := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		random := rand.New(rand.NewPCG(1, 2))
		var blocks []cuda.Pointer
		err := w.context.Bind()
		for running := true; running && err == nil; {
			select {
			case <-stop:
				running = false
			case <-time.After(200 * time.Microsecond):
			}
			for (len(blocks) > 8 || !running && len(blocks) > 0) && err == nil {
				i := random.IntN(len(blocks))
				err = w.context.Free(blocks[i])
				blocks[i] = blocks[len(blocks)-1]
				blocks = blocks[:len(blocks)-1]
			}
			if running && err == nil {
				var p cuda.Pointer
				p, err = w.context.Alloc(uint64(1 + random.IntN(most)))
				blocks = append(blocks, p)
			}
		}
		if err == nil {
			err = w.context.Unbind()
		}
		ended <- err
	}()
	t.Cleanup(func() {
		close(stop)
		require.NoError(t, <-ended)
	})
}

// beside runs a program until the end of the test. It says "ready" when it has begun, and ends when its input does.
func beside(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), companionEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		require.NoError(t, in.Close())
		require.NoError(t, cmd.Wait(), "%s", name)
	})
	var said []byte
	for b := make([]byte, 256); !strings.Contains(string(said), "ready"); {
		n, err := out.Read(b)
		said = append(said, b[:n]...)
		require.NoError(t, err, "%s ended: %s", name, said)
	}
	go func() {
		for b := make([]byte, 4096); ; {
			if _, err := out.Read(b); err != nil {
				return
			}
		}
	}()
}

// companionEnv marks the process that TestGPUCompanion is alone in.
const companionEnv = "TUTTIFS_COMPANION"

// TestGPUCompanion is no test but another process on the GPU: copies both ways, kernels that fill it, and memory that
// comes and goes, until its input ends.
func TestGPUCompanion(t *testing.T) {
	if os.Getenv(companionEnv) == "" {
		t.Skip("a helper of TestGPUBesideOthers")
	}
	w := gpuWorld(t)
	end := make(chan struct{})
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		close(end)
	}()
	_, err := os.Stdout.WriteString("ready\n")
	require.NoError(t, err)
	require.NoError(t, w.do(func() error { return w.keepBusy(end) }))
}

func (w *world) keepBusy(end chan struct{}) error {
	const n = 32 << 20
	module, err := w.context.LoadModule(cuda.BenchPTX)
	if err != nil {
		return err
	}
	defer func() { _ = module.Close() }()
	spin, err := module.Function("tuttifs_spin")
	if err != nil {
		return err
	}
	host, err := w.context.AllocHost(n, false)
	if err != nil {
		return err
	}
	defer func() { _ = w.context.FreeHost(host) }()
	for {
		select {
		case <-end:
			return nil
		default:
		}
		if err := w.busyRound(spin, host.Bytes); err != nil {
			return err
		}
	}
}

func (w *world) busyRound(spin *cuda.Function, host []byte) error {
	n := uint64(len(host))
	p, err := w.context.Alloc(n)
	if err != nil {
		return err
	}
	nanoseconds := uint64(500_000)
	for range 8 {
		if err = w.stream.CopyHtoD(p, unsafe.Pointer(&host[0]), n); err != nil {
			return err
		}
		blocks := uint32(w.context.Device().SMs() * 2)
		if err = w.stream.Launch(spin, blocks, 1024, 0, unsafe.Pointer(&nanoseconds)); err != nil {
			return err
		}
		if err = w.stream.CopyDtoH(unsafe.Pointer(&host[0]), p, n); err != nil {
			return err
		}
	}
	if err = w.stream.Synchronize(); err != nil {
		return err
	}
	return w.context.Free(p)
}

package cudatest

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

const testPTX = `
.version 9.0
.target sm_80
.address_size 64
.visible .entry add(.param .align 8 .b8 add_param_0[24]) { ret; }
.visible .entry nop()
{ ret; }
.visible .entry two(
	.param .u64 two_param_0,
	.param .u32 two_param_1
)
{ ret; }
.visible .entry absent() { ret; }
`

// addParams of the test's kernel: adds n to each of the words.
type addParams struct {
	words uint64
	count uint64
	n     uint32
	_     uint32
}

func testKernels() map[string]Kernel {
	return map[string]Kernel{
		"nop": func(uint32, uint32, unsafe.Pointer) {},
		"two": func(uint32, uint32, unsafe.Pointer) {},
		"add": func(_, _ uint32, p unsafe.Pointer) {
			a := (*addParams)(p)
			for i := range a.count {
				atomic.AddUint32((*uint32)(pointer(a.words+4*i)), a.n)
			}
		},
	}
}

// bind starts a driver and binds the test's thread to its first device.
func bind(t *testing.T, c Config) (*Fake, *cuda.Context) {
	t.Helper()
	f := Start(t, c)
	return f, bindDevice(t, f, 0)
}

func bindDevice(t *testing.T, f *Fake, ordinal int) *cuda.Context {
	t.Helper()
	g, err := f.Driver().Device(ordinal)
	require.NoError(t, err)
	c, err := g.Primary()
	require.NoError(t, err)
	runtime.LockOSThread()
	require.NoError(t, c.Bind())
	t.Cleanup(func() {
		if f.Broken() == cuda.Success {
			require.NoError(t, c.Unbind())
			require.NoError(t, c.Close())
		}
		runtime.UnlockOSThread()
	})
	return c
}

// misusedOnce takes back the one misuse that a test makes on purpose.
func misusedOnce(t *testing.T, f *Fake, want string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	require.Len(t, f.misuse, 1)
	require.Contains(t, f.misuse[0], want)
	f.misuse = nil
}

func newStream(t *testing.T, f *Fake, c *cuda.Context) *cuda.Stream {
	t.Helper()
	s, err := c.NewStream(0)
	require.NoError(t, err)
	t.Cleanup(func() {
		if f.Broken() == cuda.Success {
			require.NoError(t, c.Bind())
			require.NoError(t, s.Close())
		}
	})
	return s
}

func TestKernelsCopiesEvents(t *testing.T) {
	f, c := bind(t, Config{Kernels: testKernels(), Jitter: 2 * time.Millisecond, Seed: 7})
	const n = 1 << 16
	p, err := c.Alloc(n)
	require.NoError(t, err)
	h, err := c.AllocHost(n, false)
	require.NoError(t, err)
	m, err := c.LoadModule([]byte(testPTX))
	require.NoError(t, err)
	add, err := m.Function("add")
	require.NoError(t, err)
	in, out := newStream(t, f, c), newStream(t, f, c)
	e, err := c.NewEvent(false)
	require.NoError(t, err)

	params := &addParams{words: uint64(p), count: n / 4, n: 5}
	require.NoError(t, in.Memset(p, 0, n))
	for range 3 {
		require.NoError(t, in.Launch(add, 4, 256, 0, unsafe.Pointer(params)))
	}
	params.n = 1000 // the launches have copies
	require.NoError(t, e.Record(in))
	require.NoError(t, out.WaitEvent(e))
	require.NoError(t, out.CopyDtoH(unsafe.Pointer(&h.Bytes[0]), p, n))
	require.NoError(t, out.Synchronize())
	for _, w := range unsafe.Slice((*uint32)(unsafe.Pointer(&h.Bytes[0])), n/4) {
		require.EqualValues(t, 15, w)
	}
	done, err := e.Query()
	require.NoError(t, err)
	require.True(t, done)

	live := f.Live()
	require.Equal(t, Counts{Contexts: 1, Streams: 2, Events: 1, Modules: 1, Device: 1, DeviceBytes: n, Pinned: 1}, live)
	require.NoError(t, e.Close())
	require.NoError(t, m.Close())
	require.NoError(t, c.Free(p))
	require.NoError(t, c.FreeHost(h))
}

func TestModules(t *testing.T) {
	_, c := bind(t, Config{Kernels: testKernels()})
	_, err := c.LoadModule([]byte("nothing"))
	require.ErrorIs(t, err, cuda.ErrInvalidPTX)
	require.ErrorContains(t, err, "does not begin with .version")
	require.Equal(t, map[string]int{"add": 24, "nop": 0, "two": 12, "absent": 0}, entries(testPTX))
	m, err := c.LoadModule([]byte(testPTX))
	require.NoError(t, err)
	_, err = m.Function("nowhere")
	require.ErrorIs(t, err, cuda.ErrNotFound)
	require.NoError(t, m.Close())
}

// All of the embedded PTX's ring kernels have a twin in Go, and the other way round.
func TestKernelsAreTheRings(t *testing.T) {
	var ptx, twins []string
	for name := range entries(string(cuda.RingPTX)) {
		ptx = append(ptx, name)
	}
	for name := range Kernels() {
		twins = append(twins, name)
	}
	require.ElementsMatch(t, ptx, twins)
}

// The PTX's parameters are as long as the structs that are given to them.
func TestParametersAreTheKernels(t *testing.T) {
	sizes := map[string]uintptr{
		"tuttifs_build":    unsafe.Sizeof(cuda.BuildParams{}),
		"tuttifs_harvest":  unsafe.Sizeof(cuda.HarvestParams{}),
		"tuttifs_gather":   unsafe.Sizeof(cuda.GatherParams{}),
		"tuttifs_register": unsafe.Sizeof(cuda.RegisterParams{}),
		"tuttifs_poll":     unsafe.Sizeof(cuda.PollParams{}),
	}
	for name, n := range entries(string(cuda.RingPTX)) {
		require.EqualValues(t, sizes[name], n, name)
	}
}

// fixture is what misuse is made with.
type fixture struct {
	f      *Fake
	c      *cuda.Context
	s      *cuda.Stream
	m      *cuda.Module
	add    *cuda.Function
	device cuda.Pointer
	host   *cuda.HostMemory
}

const fixtureBytes = 8192

func newFixture(t *testing.T, config Config) *fixture {
	t.Helper()
	config.Kernels = testKernels()
	f, c := bind(t, config)
	x := &fixture{f: f, c: c, s: newStream(t, f, c)}
	var err error
	x.device, err = c.Alloc(fixtureBytes)
	require.NoError(t, err)
	x.host, err = c.AllocHost(fixtureBytes, false)
	require.NoError(t, err)
	x.m, err = c.LoadModule([]byte(testPTX))
	require.NoError(t, err)
	x.add, err = x.m.Function("add")
	require.NoError(t, err)
	t.Cleanup(func() {
		if f.Broken() == cuda.Success {
			require.NoError(t, c.Free(x.device))
			require.NoError(t, c.FreeHost(x.host))
			require.NoError(t, x.m.Close())
		}
	})
	return x
}

func (x *fixture) hostAddress() unsafe.Pointer { return unsafe.Pointer(&x.host.Bytes[0]) }

func TestMisuseIsRefused(t *testing.T) {
	var heap [64]byte
	for _, test := range []struct {
		name, want string
		misuse     func(x *fixture) error
	}{
		{"a copy past the end", "not within memory that lives", func(x *fixture) error {
			return x.s.CopyDtoH(x.hostAddress(), x.device+1, fixtureBytes)
		}},
		{"a copy of a length that overflows", "not within memory that lives", func(x *fixture) error {
			return x.s.CopyDtoH(x.hostAddress(), x.device, ^uint64(0))
		}},
		{"a copy from memory that is not registered", "not within memory that lives", func(x *fixture) error {
			return x.s.CopyHtoD(x.device, unsafe.Pointer(&heap), 64)
		}},
		{"a copy from the device as if from the host", "is the device's", func(x *fixture) error {
			return x.s.CopyHtoD(x.device, pointer(uint64(x.device)), 64)
		}},
		{"a copy to the host as if to the device", "is the host's", func(x *fixture) error {
			return x.s.CopyDtoD(x.host.GPU, x.device, 64)
		}},
		{"memset past the end", "not within memory that lives", func(x *fixture) error {
			return x.s.Memset(x.device+fixtureBytes-1, 0, 2)
		}},
		{"a batch past the end", "not within memory that lives", func(x *fixture) error {
			return x.s.CopyBatch([]cuda.Pointer{x.device}, []cuda.Pointer{x.host.GPU}, []uint64{fixtureBytes + 1})
		}},
		{"a batch in the default stream", "in stream 0x0", func(x *fixture) error {
			return x.c.StreamFromHandle(0).CopyBatch([]cuda.Pointer{x.device}, []cuda.Pointer{x.host.GPU}, []uint64{1})
		}},
		{"a word that is not aligned", "not aligned", func(x *fixture) error {
			return x.s.WaitValue32(x.device+2, 0, false)
		}},
		{"a stream of nobody", "stream that is not there", func(x *fixture) error {
			return x.c.StreamFromHandle(0x999).Synchronize()
		}},
		{"memory that nobody allocated", "no such memory begins", func(x *fixture) error {
			return x.c.Free(x.device + 256)
		}},
		{"memory freed twice", "no such memory begins", func(x *fixture) error {
			p, err := x.c.Alloc(64)
			if err != nil {
				return err
			}
			if err := x.c.Free(p); err != nil {
				return err
			}
			return x.c.Free(p)
		}},
		{"host memory freed as registered", "no such memory begins", func(x *fixture) error {
			return x.c.UnregisterHost(&cuda.HostMemory{Bytes: x.host.Bytes})
		}},
		{"a launch of no blocks", "a grid of 0x1x1 blocks", func(x *fixture) error {
			return x.s.Launch(x.add, 0, 32, 0, unsafe.Pointer(&addParams{}))
		}},
		{"a launch of too many threads", "of 1025x1x1 threads", func(x *fixture) error {
			return x.s.Launch(x.add, 1, 1025, 0, unsafe.Pointer(&addParams{}))
		}},
		{"a launch without parameters", "add wants 24 bytes of parameters", func(x *fixture) error {
			return x.s.Launch(x.add, 1, 1, 0, nil)
		}},
		{"a kernel without a twin", "absent is in the module, and not in Go", func(x *fixture) error {
			_, err := x.m.Function("absent")
			return err
		}},
		{"events without timing", "without timing", func(x *fixture) error {
			e, err := x.c.NewEvent(false)
			if err != nil {
				return err
			}
			_, err = e.Elapsed(e)
			if closed := e.Close(); closed != nil {
				return closed
			}
			return err
		}},
		{"an event that is closed", "event that is not there", func(x *fixture) error {
			e, err := x.c.NewEvent(false)
			if err != nil {
				return err
			}
			if err := e.Close(); err != nil {
				return err
			}
			return e.Record(x.s)
		}},
		{"a thread without a context", "cuMemGetInfo on a thread without a context", func(x *fixture) error {
			done := make(chan error)
			go func() {
				_, _, err := x.c.MemInfo()
				done <- err
			}()
			return <-done
		}},
		{"a function that is none", "call 1 of MemSwap cannot fail", func(x *fixture) error {
			x.f.Fail("MemSwap", 1, cuda.ErrUnknown)
			return cuda.ErrInvalidValue
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newFixture(t, Config{})
			require.Error(t, test.misuse(x))
			misusedOnce(t, x.f, test.want)
		})
	}
}

func TestContextThatEndsTooEarly(t *testing.T) {
	f, err := New(Config{})
	require.NoError(t, err)
	g, err := f.Driver().Device(0)
	require.NoError(t, err)
	c, err := g.Primary()
	require.NoError(t, err)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, c.Bind())
	_, err = c.NewStream(0)
	require.NoError(t, err)
	_, err = c.Alloc(1)
	require.NoError(t, err)
	require.Equal(t, Counts{Contexts: 1, Streams: 1, Device: 1, DeviceBytes: 1}, f.Live())
	require.NoError(t, c.Close())
	require.Equal(t, []string{"a context ended that 1 streams, 0 events, 0 modules and 1 allocations lived in"},
		f.Misuse())
	require.Error(t, c.Bind())
	require.NoError(t, f.Close())
}

// Memory that is freed under an operation is found out when the operation runs.
func TestHostMemoryFreedUnderACopy(t *testing.T) {
	x := newFixture(t, Config{})
	gate := make(chan struct{})
	x.f.Before(func(_ uintptr, op string) cuda.Result {
		if op == "MemcpyHtoDAsync" {
			<-gate
		}
		return cuda.Success
	})
	other, err := x.c.AllocHost(64, false)
	require.NoError(t, err)
	require.NoError(t, x.s.CopyHtoD(x.device, unsafe.Pointer(&other.Bytes[0]), 64))
	require.NoError(t, x.c.FreeHost(other))
	close(gate)
	require.ErrorIs(t, x.s.Synchronize(), cuda.ErrIllegalAddress)
	misusedOnce(t, x.f, "were freed before it ran")
	require.ErrorIs(t, x.c.Synchronize(), cuda.ErrIllegalAddress, "nothing mends a context")
}

func TestKernelThatFaults(t *testing.T) {
	kernels := testKernels()
	kernels["nop"] = func(uint32, uint32, unsafe.Pointer) { panic("a bug") }
	for name, want := range map[string]cuda.Result{"add": cuda.ErrIllegalAddress, "nop": cuda.ErrLaunchFailed} {
		t.Run(name, func(t *testing.T) {
			f, c := bind(t, Config{Kernels: kernels})
			m, err := c.LoadModule([]byte(testPTX))
			require.NoError(t, err)
			k, err := m.Function(name)
			require.NoError(t, err)
			p, err := c.Alloc(4096)
			require.NoError(t, err)
			require.NoError(t, c.Free(p))
			s, err := c.NewStream(0)
			require.NoError(t, err)
			require.NoError(t, s.Launch(k, 1, 1, 0, unsafe.Pointer(&addParams{words: uint64(p), count: 1, n: 1})))
			require.ErrorIs(t, s.Synchronize(), want)
			require.Equal(t, want, f.Broken())
			misusedOnce(t, f, name+": ")
		})
	}
}

func TestFailures(t *testing.T) {
	x := newFixture(t, Config{MemoryBytes: 1 << 20})
	x.f.Fail("MemAlloc", 2, cuda.ErrOutOfMemory)
	p, err := x.c.Alloc(64)
	require.NoError(t, err)
	_, err = x.c.Alloc(64)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.NoError(t, x.c.Free(p))
	p, err = x.c.Alloc(1<<20 - fixtureBytes)
	require.NoError(t, err, "all there is")
	_, err = x.c.Alloc(1)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	free, total, err := x.c.MemInfo()
	require.NoError(t, err)
	require.Equal(t, []uint64{0, 1 << 20}, []uint64{free, total})
	require.NoError(t, x.c.Free(p))

	// Host memory whose address the driver does not tell is given back.
	live := x.f.Live()
	x.f.Fail("MemHostGetDevicePointer", 1, cuda.ErrMapFailed)
	_, err = x.c.AllocHost(64, false)
	require.ErrorIs(t, err, cuda.ErrMapFailed)
	x.f.Fail("MemHostGetDevicePointer", 1, cuda.ErrMapFailed)
	_, err = x.c.RegisterHost(make([]byte, 64))
	require.ErrorIs(t, err, cuda.ErrMapFailed)
	x.f.Fail("CtxFromGreenCtx", 1, cuda.ErrUnknown)
	_, err = x.c.Green(8, false)
	require.ErrorIs(t, err, cuda.ErrUnknown)
	require.Equal(t, live, x.f.Live())

	// An operation that fails takes all that comes after with it.
	x.f.Before(func(_ uintptr, op string) cuda.Result {
		if op == "add" {
			return cuda.ErrLaunchTimeout
		}
		return cuda.Success
	})
	e, err := x.c.NewEvent(false)
	require.NoError(t, err)
	require.NoError(t, x.s.Launch(x.add, 1, 1, 0, unsafe.Pointer(&addParams{words: uint64(x.device)})))
	require.ErrorIs(t, x.s.Synchronize(), cuda.ErrLaunchTimeout)
	require.ErrorIs(t, e.Record(x.s), cuda.ErrLaunchTimeout)
	_, err = e.Query()
	require.ErrorIs(t, err, cuda.ErrLaunchTimeout)
}

// Close ends operations that would wait for ever.
func TestCloseEndsWaits(t *testing.T) {
	f, err := New(Config{})
	require.NoError(t, err)
	g, err := f.Driver().Device(0)
	require.NoError(t, err)
	c, err := g.Primary()
	require.NoError(t, err)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, c.Bind())
	s, err := c.NewStream(0)
	require.NoError(t, err)
	h, err := c.AllocHost(4, false)
	require.NoError(t, err)
	require.NoError(t, s.WaitValue32(h.GPU, 0, false))
	e, err := c.NewEvent(false)
	require.NoError(t, err)
	require.NoError(t, e.Record(s))
	other, err := c.NewStream(0)
	require.NoError(t, err)
	require.NoError(t, other.WaitEvent(e))
	require.NoError(t, f.Close())
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeinitialized)
}

func TestDevicesAreApart(t *testing.T) {
	f := Start(t, Config{Devices: 2, Kernels: testKernels()})
	require.Equal(t, 2, f.Driver().Devices())
	first := bindDevice(t, f, 0)
	s := newStream(t, f, first)
	second := bindDevice(t, f, 1)
	require.ErrorIs(t, s.Synchronize(), cuda.ErrInvalidHandle)
	misusedOnce(t, f, "in a stream of device 0 on a thread of device 1")
	e, err := second.NewEvent(false)
	require.NoError(t, err)
	require.NoError(t, first.Bind())
	require.ErrorIs(t, e.Record(s), cuda.ErrInvalidHandle)
	misusedOnce(t, f, "an event of device 1 in a stream of device 0")
	require.NoError(t, e.Close())
	require.NotEqual(t, first.Device().UUID(), second.Device().UUID())
	_, err = f.Driver().Device(2)
	require.ErrorContains(t, err, "there is no GPU 2: the process sees 2, from 0")
}

// Registered memory of the Go heap is moved by the driver without the race detector's knowledge, as by hardware.
func TestRegisteredHeap(t *testing.T) {
	x := newFixture(t, Config{})
	b := make([]byte, fixtureBytes)
	h, err := x.c.RegisterHost(b)
	require.NoError(t, err)
	require.NoError(t, x.s.Memset(x.device, 3, fixtureBytes))
	require.NoError(t, x.s.CopyDtoH(unsafe.Pointer(&b[0]), x.device, fixtureBytes))
	require.NoError(t, x.s.WriteValue32(x.host.GPU, 7))
	flag := (*uint32)(x.hostAddress())
	for atomic.LoadUint32(flag) != 7 {
		runtime.Gosched()
	}
	require.EqualValues(t, 3, b[fixtureBytes-1])
	require.NoError(t, x.s.Synchronize())
	require.NoError(t, x.c.UnregisterHost(h))
}

package cuda_test

import (
	_ "embed"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
)

// The driver's behaviour that the rings rely on. Every test runs on the fake driver, and on a GPU where there is one,
// so that the fake is known to be like the GPU.

//go:embed testdata/add.ptx
var addPTX []byte

// addParams is the parameter of kernel add.
type addParams struct {
	words uint64
	count uint64
	n     uint32
	_     uint32
}

// word is a word of memory that the GPU knows by an address, in this process.
func word(address uint64) *uint32 { return *(**uint32)(unsafe.Pointer(&address)) }

func fakeKernels() map[string]cudatest.Kernel {
	all := cudatest.Kernels()
	all["nop"] = func(uint32, uint32, unsafe.Pointer) {}
	all["add"] = func(_, _ uint32, p unsafe.Pointer) {
		a := (*addParams)(p)
		for i := range a.count {
			atomic.AddUint32(word(a.words+4*i), a.n)
		}
	}
	return all
}

// machine is a bound context and kernel add.
type machine struct {
	*cuda.Context
	t    *testing.T
	fake *cudatest.Fake // nil on a GPU

	module *cuda.Module
	add    *cuda.Function
}

// everywhere runs a test on the fake driver and on the first GPU.
func everywhere(t *testing.T, test func(t *testing.T, m *machine)) {
	t.Run("fake", func(t *testing.T) {
		f := cudatest.Start(t, cudatest.Config{Kernels: fakeKernels(), Jitter: time.Millisecond})
		test(t, start(t, f.Driver(), f))
	})
	t.Run("GPU", func(t *testing.T) {
		d, err := cuda.Open()
		if err != nil {
			t.Skip(err)
		}
		test(t, start(t, d, nil))
	})
}

func start(t *testing.T, d *cuda.Driver, f *cudatest.Fake) *machine {
	t.Helper()
	g, err := d.Device(0)
	require.NoError(t, err)
	c, err := g.Primary()
	require.NoError(t, err)
	runtime.LockOSThread()
	require.NoError(t, c.Bind())
	module, err := c.LoadModule(addPTX)
	require.NoError(t, err)
	add, err := module.Function("add")
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Bind())
		require.NoError(t, module.Close())
		require.NoError(t, c.Unbind())
		require.NoError(t, c.Close())
		runtime.UnlockOSThread()
	})
	return &machine{c, t, f, module, add}
}

func (m *machine) stream() *cuda.Stream {
	m.t.Helper()
	s, err := m.NewStream(0)
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, s.Close()) })
	return s
}

func (m *machine) event(timing bool) *cuda.Event {
	m.t.Helper()
	e, err := m.NewEvent(timing)
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, e.Close()) })
	return e
}

func (m *machine) memory(n uint64) cuda.Pointer {
	m.t.Helper()
	p, err := m.Alloc(n)
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, m.Free(p)) })
	return p
}

func (m *machine) pinned(n int) *cuda.HostMemory {
	m.t.Helper()
	h, err := m.AllocHost(n, false)
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, m.FreeHost(h)) })
	return h
}

func address(h *cuda.HostMemory) unsafe.Pointer { return unsafe.Pointer(&h.Bytes[0]) }

func wordsOf(h *cuda.HostMemory) []uint32 {
	return unsafe.Slice((*uint32)(address(h)), len(h.Bytes)/4)
}

// require that all words are of a value.
func requireAll(t *testing.T, words []uint32, v uint32) {
	t.Helper()
	require.Equal(t, -1, slices.IndexFunc(words, func(w uint32) bool { return w != v }), "a word is not %#x", v)
}

func TestDevice(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		g := m.Device()
		t.Logf("%s, %d SMs, %d bytes, %s, UUID %x", g.Name(), g.SMs(), g.TotalBytes(), g.PCIBusID(), g.UUID())
		require.NotEmpty(t, g.Name())
		require.Positive(t, g.SMs())
		require.Equal(t, g.SMs(), m.SMs())
		require.NotZero(t, g.UUID())
		require.Regexp(t, `^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.0$`, g.PCIBusID())
		major, err := g.Attribute(cuda.AttributeComputeMajor)
		require.NoError(t, err)
		require.GreaterOrEqual(t, major, 8, "the kernels are for compute capability 8.0 and newer")
		free, total, err := m.MemInfo()
		require.NoError(t, err)
		require.LessOrEqual(t, free, total)
		require.LessOrEqual(t, total, g.TotalBytes())
		least, greatest, err := m.StreamPriorities()
		require.NoError(t, err)
		require.LessOrEqual(t, greatest, least)
	})
}

func TestCopiesInOrder(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const n = 1 << 20
		a, b, in, out := m.memory(n), m.memory(n), m.pinned(n), m.pinned(n)
		s := m.stream()
		for i := range in.Bytes {
			in.Bytes[i] = byte(i * 7 >> 3)
		}
		require.NoError(t, s.CopyHtoD(a, address(in), n))
		require.NoError(t, s.CopyDtoD(b, a, n))
		require.NoError(t, s.Memset(b+4096, 0x5a, 8192))
		require.NoError(t, s.CopyDtoH(address(out), b, n))
		require.NoError(t, s.Synchronize())
		done, err := s.Query()
		require.NoError(t, err)
		require.True(t, done)
		copy(in.Bytes[4096:], strings.Repeat("\x5a", 8192))
		require.Equal(t, in.Bytes, out.Bytes)

		base, size, err := m.PointerRange(a + 4242)
		require.NoError(t, err)
		require.Equal(t, a, base)
		require.EqualValues(t, n, size)
		kind, err := m.PointerType(a + 1)
		require.NoError(t, err)
		require.Equal(t, cuda.MemoryDevice, kind)
		kind, err = m.PointerType(in.GPU)
		require.NoError(t, err)
		require.Equal(t, cuda.MemoryHost, kind)
	})
}

func TestBatchOfCopies(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const piece, count = 4096, 64
		d, in, out := m.memory(piece*count), m.pinned(piece*count), m.pinned(piece*count)
		for i := range in.Bytes {
			in.Bytes[i] = byte(i*31 + i>>12)
		}
		var dst, src, back []cuda.Pointer
		var sizes []uint64
		for i := range count {
			dst = append(dst, d+cuda.Pointer(i*piece))
			src = append(src, cuda.Pointer(uintptr(unsafe.Pointer(&in.Bytes[(count-1-i)*piece]))))
			back = append(back, cuda.Pointer(uintptr(unsafe.Pointer(&out.Bytes[i*piece]))))
			sizes = append(sizes, uint64(piece-i))
		}
		s := m.stream()
		require.NoError(t, s.Memset(d, 0xee, piece*count))
		require.NoError(t, s.CopyBatch(dst, src, sizes))
		require.NoError(t, s.CopyBatch(back, dst, sizes))
		require.NoError(t, s.CopyBatch(nil, nil, nil), "of none")
		require.NoError(t, s.Synchronize())
		for i := range count {
			n := piece - i
			require.Equal(t, in.Bytes[(count-1-i)*piece:][:n], out.Bytes[i*piece:][:n], "copy %d", i)
		}
		require.ErrorContains(t, s.CopyBatch(dst, src[1:], sizes), "64 destinations, 63 sources and 64 sizes")
	})
}

func TestLaunchesAndEvents(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const count = 1 << 16
		d, out := m.memory(4*count), m.pinned(4*count)
		s, other := m.stream(), m.stream()
		from, to, plain := m.event(true), m.event(true), m.event(false)
		done, err := plain.Query()
		require.NoError(t, err)
		require.True(t, done, "what was never recorded is done")

		p := &addParams{words: uint64(d), count: count, n: 3}
		require.NoError(t, s.Memset(d, 0, 4*count))
		require.NoError(t, from.Record(s))
		for range 5 {
			require.NoError(t, s.Launch(m.add, count/256, 256, 0, unsafe.Pointer(p)))
		}
		*p = addParams{} // launches have their copies
		require.NoError(t, to.Record(s))
		require.NoError(t, other.WaitEvent(to))
		require.NoError(t, other.CopyDtoH(address(out), d, 4*count))
		require.NoError(t, plain.Record(other))
		require.NoError(t, plain.Synchronize())
		requireAll(t, wordsOf(out), 15)
		took, err := to.Elapsed(from)
		require.NoError(t, err)
		require.GreaterOrEqual(t, took, float32(0))
		nop, err := m.module.Function("nop")
		require.NoError(t, err)
		require.NoError(t, s.Launch(nop, 1, 1, 0, nil))
		require.NoError(t, m.Synchronize())
	})
}

func TestModules(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		ring, err := m.LoadModule(cuda.RingPTX)
		require.NoError(t, err)
		defer func() { require.NoError(t, ring.Close()) }()
		register, err := ring.Function("tuttifs_register")
		require.NoError(t, err)
		require.Equal(t, "tuttifs_register", register.Name())
		const blocks = 5
		runs := []cuda.StridedRun{{Base: 1 << 20, Stride: 1 << 16, Bytes: 4096}, {Base: 1 << 30, Stride: 512, Bytes: 512}}
		in, table, out := m.pinned(4096), m.memory(4096), m.pinned(4096)
		copy(unsafe.Slice((*cuda.StridedRun)(address(in)), len(runs)), runs)
		s := m.stream()
		p := &cuda.RegisterParams{Strided: uint64(in.GPU), Table: uint64(table), IO: 7, Blocks: blocks, Classes: 1, Runs: 2}
		require.NoError(t, s.Launch(register, 2, 32, 0, unsafe.Pointer(p)))
		require.NoError(t, s.CopyDtoH(address(out), table, 4096))
		require.NoError(t, s.Synchronize())
		var want []cuda.KernelRun
		for b := range uint64(blocks) {
			for _, r := range runs {
				want = append(want, cuda.KernelRun{Address: r.Base + b*r.Stride + 7, Bytes: r.Bytes})
			}
		}
		require.Equal(t, want, unsafe.Slice((*cuda.KernelRun)(address(out)), len(want)))

		for _, ptx := range [][]byte{cuda.RingPTX, cuda.BenchPTX} { // each as often as anybody likes
			again, err := m.LoadModule(ptx)
			require.NoError(t, err)
			require.NoError(t, again.Close())
		}

		_, err = ring.Function("tuttifs_nothing")
		require.ErrorIs(t, err, cuda.ErrNotFound)
		require.ErrorContains(t, err, `"tuttifs_nothing"`)
		_, err = m.LoadModule([]byte(".version 9.0\n.target sm_80\nthis is no PTX\n"))
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.NotEmpty(t, e.Name)
		require.Contains(t, err.Error(), "\n", "the compiler's log is there")
	})
}

// Kernels and copies use host memory, pinned or registered, by the address that the GPU knows.
func TestHostMemory(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const n = 1 << 20
		mapped, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
		require.NoError(t, err)
		defer func() { require.NoError(t, unix.Munmap(mapped)) }()
		registered, err := m.RegisterHost(mapped)
		require.NoError(t, err)
		_, err = m.RegisterHost(mapped[:4096])
		require.ErrorIs(t, err, cuda.ErrAlreadyRegistered)
		combined, err := m.AllocHost(4096, true)
		require.NoError(t, err)
		s, d := m.stream(), m.memory(n)
		for _, h := range []*cuda.HostMemory{registered, m.pinned(n)} {
			clear(h.Bytes)
			p := &addParams{words: uint64(h.GPU), count: n / 4, n: 77}
			require.NoError(t, s.Launch(m.add, n/4/256, 256, 0, unsafe.Pointer(p)))
			require.NoError(t, s.CopyHtoD(d, address(h), n))
			require.NoError(t, s.Memset(d, 1, 4))
			require.NoError(t, s.CopyDtoH(address(h), d, 4096))
			require.NoError(t, s.Synchronize())
			require.EqualValues(t, 0x01010101, wordsOf(h)[0])
			requireAll(t, wordsOf(h)[1:], 77)
		}
		combined.Bytes[0] = 1
		require.NoError(t, s.CopyHtoD(d, address(combined), 4096))
		require.NoError(t, s.Synchronize())
		require.NoError(t, m.FreeHost(combined))
		require.NoError(t, m.UnregisterHost(registered))
		require.Nil(t, registered.Bytes)
		again, err := m.RegisterHost(mapped)
		require.NoError(t, err)
		require.NoError(t, m.UnregisterHost(again))
		_, err = m.RegisterHost(nil)
		require.Error(t, err)
		_, err = m.AllocHost(0, false)
		require.Error(t, err)
	})
}

// A stream waits for a word that the host, or another stream, writes.
func TestStreamMemoryOperations(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		h, d, out := m.pinned(4096), m.memory(4096), m.pinned(4096)
		clear(h.Bytes)
		first, second := m.stream(), m.stream()
		require.NoError(t, second.Memset(d, 0, 4096))
		require.NoError(t, second.Synchronize())
		require.NoError(t, first.WaitValue32(h.GPU, 5, true))
		require.NoError(t, first.WriteValue32(d+8, 0xdecade))
		require.NoError(t, first.WriteValue32(h.GPU+4, 99))
		require.NoError(t, second.WaitValue32(h.GPU+4, 99, false))
		require.NoError(t, second.CopyDtoH(address(out), d, 4096))
		for _, s := range []*cuda.Stream{first, second} {
			done, err := s.Query()
			require.NoError(t, err)
			require.False(t, done, "nobody has written the word yet")
		}
		atomic.StoreUint32(&wordsOf(h)[0], 6)
		require.NoError(t, second.Synchronize())
		require.EqualValues(t, 0xdecade, wordsOf(out)[2])
		require.EqualValues(t, 99, atomic.LoadUint32(&wordsOf(h)[1]))
	})
}

// Priorities are hints; what is tested is that they are taken.
func TestPriorities(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		least, greatest, err := m.StreamPriorities()
		require.NoError(t, err)
		for _, p := range []int{least, greatest} {
			s, err := m.NewStream(p)
			require.NoError(t, err)
			require.NoError(t, s.Synchronize())
			// Somebody else's handle of the same stream, which is not theirs to close.
			borrowed := m.StreamFromHandle(s.Handle())
			require.NoError(t, borrowed.Synchronize())
			require.NoError(t, borrowed.Close())
			require.NoError(t, s.Synchronize())
			require.NoError(t, s.Close())
		}
	})
}

// A green context has some of the SMs; modules, memory and events of the primary one serve it too.
func TestGreenContext(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const count = 1 << 16
		d, out, e := m.memory(4*count), m.pinned(4*count), m.event(false)
		for _, ignore := range []bool{false, true} {
			green, err := m.Green(2, ignore)
			require.NoError(t, err)
			t.Logf("asked for 2 SMs, ignoring co-scheduling %v: %d", ignore, green.SMs())
			require.GreaterOrEqual(t, green.SMs(), 2)
			require.Less(t, green.SMs(), m.SMs())
			s, err := green.NewStream(0)
			require.NoError(t, err)
			p := &addParams{words: uint64(d), count: count, n: 4}
			// By a thread of the primary context, and by one of the green.
			require.NoError(t, s.Memset(d, 0, 4*count))
			require.NoError(t, s.Launch(m.add, count/256, 256, 0, unsafe.Pointer(p)))
			require.NoError(t, e.Record(s))
			require.NoError(t, green.Bind())
			require.NoError(t, s.Launch(m.add, count/256, 256, 0, unsafe.Pointer(p)))
			require.NoError(t, s.CopyDtoH(address(out), d, 4*count))
			require.NoError(t, s.Synchronize())
			require.NoError(t, green.Synchronize())
			require.NoError(t, m.Bind())
			done, err := e.Query()
			require.NoError(t, err)
			require.True(t, done)
			requireAll(t, wordsOf(out), 8)
			require.NoError(t, s.Close())
			require.NoError(t, green.Close())
		}
		_, err := m.Green(0, false)
		require.Error(t, err)
		_, err = m.Green(m.SMs()+1, false)
		require.Error(t, err)
	})
}

// What cannot be is an error, and the context lives on.
func TestErrors(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		_, err := m.Alloc(1 << 50)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
		require.ErrorContains(t, err, fmt.Sprintf("cuMemAlloc of %d bytes on device 0: out of memory", uint64(1)<<50))
		_, err = m.PointerType(8)
		require.ErrorIs(t, err, cuda.ErrInvalidValue)
		_, _, err = m.PointerRange(8)
		require.Error(t, err)

		from, to := m.event(true), m.event(true)
		s, h := m.stream(), m.pinned(4096)
		clear(h.Bytes)
		require.NoError(t, from.Record(s))
		require.NoError(t, s.WaitValue32(h.GPU, 1, false))
		require.NoError(t, to.Record(s))
		_, err = to.Elapsed(from)
		require.ErrorIs(t, err, cuda.ErrNotReady)
		done, err := to.Query()
		require.NoError(t, err)
		require.False(t, done)
		atomic.StoreUint32(&wordsOf(h)[0], 1)
		require.NoError(t, to.Synchronize())
		_, err = to.Elapsed(from)
		require.NoError(t, err)
		require.NoError(t, m.Synchronize(), "the context is as good as before")
	})
}

// Device memory as a dma-buf, where the platform has them.
func TestDMABuf(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		const n = 2 << 20
		p := m.memory(n)
		supported, err := m.Device().Attribute(cuda.AttributeDMABuf)
		require.NoError(t, err)
		fd, err := m.ExportDMABuf(p, n)
		if supported == 0 {
			require.Error(t, err)
			var e *cuda.Error
			require.ErrorAs(t, err, &e)
			t.Logf("not supported here: %v", err)
			return
		}
		require.NoError(t, err)
		require.NoError(t, unix.Close(fd))
		_, err = m.ExportDMABuf(p+1, n)
		require.Error(t, err, "not whole pages")
	})
	f := cudatest.Start(t, cudatest.Config{Kernels: fakeKernels(), NoDMABuf: true})
	m := start(t, f.Driver(), f)
	_, err := m.ExportDMABuf(m.memory(4096), 4096)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
}

// sharedBytes of memory that two processes see; the first byte of each side's pattern.
const (
	sharedBytes = 4 << 20
	parentWord  = 0x11223344
	childByte   = 0x77
	shareEnv    = "TUTTIFS_TEST_SHARED_MEMORY"
)

func TestMemoryOfAnotherProcess(t *testing.T) {
	everywhere(t, func(t *testing.T, m *machine) {
		p, out, s := m.memory(sharedBytes), m.pinned(sharedBytes), m.stream()
		params := &addParams{words: uint64(p), count: sharedBytes / 4, n: parentWord}
		require.NoError(t, s.Memset(p, 0, sharedBytes))
		require.NoError(t, s.Launch(m.add, sharedBytes/4/256, 256, 0, unsafe.Pointer(params)))
		require.NoError(t, s.Synchronize())
		handle, err := m.IPCHandle(p)
		require.NoError(t, err)
		_, err = m.OpenIPC(handle)
		require.Error(t, err, "it is this process' own")

		kind := "GPU"
		if m.fake != nil {
			kind = "fake"
		}
		child := exec.Command(os.Args[0], "-test.run=^TestOtherProcess$", "-test.v")
		child.Env = append(os.Environ(), shareEnv+"="+kind+":"+hex.EncodeToString(handle[:]))
		words, err := child.CombinedOutput()
		require.NoError(t, err, "%s", words)
		require.Contains(t, string(words), "PASS: TestOtherProcess")
		require.NoError(t, s.CopyDtoH(address(out), p, sharedBytes))
		require.NoError(t, s.Synchronize())
		requireAll(t, wordsOf(out), childByte*0x01010101)
	})
}

// The other process of TestMemoryOfAnotherProcess.
func TestOtherProcess(t *testing.T) {
	kind, text, ok := strings.Cut(os.Getenv(shareEnv), ":")
	if !ok {
		t.Skip("only in a process that TestMemoryOfAnotherProcess starts")
	}
	var handle cuda.IPCHandle
	_, err := hex.Decode(handle[:], []byte(text))
	require.NoError(t, err)
	var m *machine
	if kind == "fake" {
		f := cudatest.Start(t, cudatest.Config{Kernels: fakeKernels()})
		m = start(t, f.Driver(), f)
	} else {
		d, err := cuda.Open()
		require.NoError(t, err)
		m = start(t, d, nil)
	}
	p, err := m.OpenIPC(handle)
	require.NoError(t, err)
	out, s := m.pinned(sharedBytes), m.stream()
	require.NoError(t, s.CopyDtoH(address(out), p, sharedBytes))
	require.NoError(t, s.Synchronize())
	requireAll(t, wordsOf(out), parentWord)
	require.NoError(t, s.Memset(p, childByte, sharedBytes))
	require.NoError(t, s.Synchronize())
	require.NoError(t, m.CloseIPC(p))
}

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

func newStream(t *testing.T, c *cuda.Context) *cuda.Stream {
	t.Helper()
	s, err := c.NewStream(0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
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
	in, out := newStream(t, c), newStream(t, c)
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

//go:build !nogpu

package cuda

import (
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"
)

// clib is the library of testdata/driver.c.
type clib struct {
	path string
	api  *API
	seen *struct {
		name      *byte
		count     int64
		arguments [16]int64
	}
	answer           *Result
	version, devices *int32
}

// compile makes a library of C.
func compile(t *testing.T, source string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to compile a library with")
	}
	path := filepath.Join(t.TempDir(), "libtest.so")
	out, err := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-o", path, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

func data[T any](t *testing.T, library uintptr, name string) *T {
	t.Helper()
	p, err := purego.Dlsym(library, name)
	require.NoError(t, err)
	return *(**T)(unsafe.Pointer(&p))
}

func openC(t *testing.T) *clib {
	t.Helper()
	c := &clib{path: compile(t, "testdata/driver.c")}
	library, err := purego.Dlopen(c.path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	require.NoError(t, err)
	c.api, err = load(library)
	require.NoError(t, err)
	c.seen = data[struct {
		name      *byte
		count     int64
		arguments [16]int64
	}](t, library, "test_seen")
	c.answer = data[Result](t, library, "test_answer")
	c.version, c.devices = data[int32](t, library, "test_version"), data[int32](t, library, "test_devices")
	*c.version, *c.devices = VersionNeeded, 1
	return c
}

// argument makes an argument that tells every bit of its type, and what C sees of it.
func argument(t reflect.Type, i int) (v reflect.Value, seen []int64) {
	const pattern = 0xf1e2d3c4b5a69788
	v = reflect.New(t).Elem()
	x := uint64(pattern) + uint64(i)
	switch t.Kind() {
	case reflect.Int32:
		v.SetInt(int64(int32(x)))
		return v, []int64{int64(int32(x))}
	case reflect.Uint8:
		v.SetUint(uint64(uint8(x)))
		return v, []int64{int64(uint8(x))}
	case reflect.Uint32:
		v.SetUint(uint64(uint32(x)))
		return v, []int64{int64(uint32(x))}
	case reflect.Uint64, reflect.Uintptr:
		v.SetUint(x)
		return v, []int64{int64(x)}
	case reflect.UnsafePointer:
		p := unsafe.Pointer(new([8]uint64))
		v.SetPointer(p)
		return v, []int64{int64(uintptr(p))}
	}
	v.Set(reflect.New(t.Elem()))
	if h, handle := v.Interface().(*IPCHandle); handle && i == 1 {
		for j := range h {
			h[j] = byte(j + 1)
		}
		for _, w := range (*[8]int64)(unsafe.Pointer(h)) {
			seen = append(seen, w)
		}
		return v, seen
	}
	return v, []int64{int64(v.Pointer())}
}

// Every function of the table gives the driver all of its arguments, where C looks for them, and takes its answer.
func TestEveryCallArrives(t *testing.T) {
	c := openC(t)
	table := reflect.ValueOf(c.api).Elem()
	for i := range table.NumField() {
		name, f := table.Type().Field(i).Name, table.Field(i)
		if f.Type().NumOut() != 1 || f.Type().Out(0) != reflect.TypeFor[Result]() {
			continue // names and texts
		}
		t.Run(name, func(t *testing.T) {
			var in []reflect.Value
			want := []int64{}
			for j := range f.Type().NumIn() {
				v, seen := argument(f.Type().In(j), j)
				in, want = append(in, v), append(want, seen...)
			}
			if name == "LaunchKernel" {
				want = append(want, 0) // extra
			}
			*c.answer = -Result(i) - 1
			require.Equal(t, *c.answer, Result(f.Call(in)[0].Int()))
			symbol := "cu" + name
			if s := cString(c.seen.name); s != symbol {
				require.Contains(t, []string{symbol + "_v2", symbol + "_v3"}, s)
			}
			require.Equal(t, want, c.seen.arguments[:c.seen.count])
		})
	}
}

func cString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

func TestErrorsHaveTheDriversWords(t *testing.T) {
	c := openC(t)
	d, err := NewDriver(c.api)
	require.NoError(t, err)
	require.Equal(t, VersionNeeded, d.Version())
	require.Equal(t, 1, d.Devices())
	x := &Context{device: &Device{driver: d, Ordinal: 3}}

	*c.answer = ErrOutOfMemory
	_, err = x.Alloc(4096)
	require.ErrorIs(t, err, ErrOutOfMemory)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, Error{"cuMemAlloc of 4096 bytes on device 3", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}, *e)
	require.EqualError(t, err,
		"cuda: cuMemAlloc of 4096 bytes on device 3: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)")

	*c.answer = 12345
	require.EqualError(t, x.Synchronize(), "cuda: cuCtxSynchronize on device 3: CUDA error 12345")
	require.NotErrorIs(t, x.Synchronize(), ErrOutOfMemory)
}

func TestOpenSaysWhatToDo(t *testing.T) {
	_, err := openLibrary([]string{"/nowhere/libcuda.so.1", "/nowhere/else/libcuda.so.1"})
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "/nowhere/libcuda.so.1")
	require.ErrorContains(t, err, "install the NVIDIA driver; without a GPU the CPU executor is used")

	c := openC(t)
	paths := []string{"/nowhere/libcuda.so.1", c.path}
	d, err := openLibrary(paths)
	require.NoError(t, err)
	require.NotNil(t, d)

	*c.version = 12040
	_, err = openLibrary(paths)
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "it is of CUDA 12.4, and 13.0 or newer is needed")

	*c.version, *c.devices = 13010, 0
	_, err = openLibrary(paths)
	require.ErrorIs(t, err, ErrNoDevice)

	*c.answer = ErrDeviceAbsent
	_, err = openLibrary(paths)
	require.ErrorIs(t, err, ErrNoDevice)
	require.ErrorIs(t, err, ErrDeviceAbsent)

	*c.answer = ErrUnknown
	_, err = openLibrary(paths)
	require.ErrorIs(t, err, ErrNoDriver)
}

func TestOpenNamesWhatIsMissing(t *testing.T) {
	_, err := openLibrary([]string{compile(t, "testdata/old.c")})
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "cuGetErrorName is missing: install a newer NVIDIA driver")
}

// What a ring calls for each chunk allocates nothing.
func TestCallsDoNotAllocate(t *testing.T) {
	c := openC(t)
	d, err := NewDriver(c.api)
	require.NoError(t, err)
	x := &Context{device: &Device{driver: d}}
	s, e, f := &Stream{context: x, handle: 16}, &Event{x, 32}, &Function{"k", 48}
	params, host := &BuildParams{}, make([]byte, 64)
	dst, src, sizes := make([]Pointer, 4), make([]Pointer, 4), make([]uint64, 4)
	calls := map[string]func() error{
		"Launch":       func() error { return s.Launch(f, 1, 256, 0, unsafe.Pointer(params)) },
		"CopyHtoD":     func() error { return s.CopyHtoD(4096, unsafe.Pointer(&host[0]), 64) },
		"CopyDtoH":     func() error { return s.CopyDtoH(unsafe.Pointer(&host[0]), 4096, 64) },
		"CopyDtoD":     func() error { return s.CopyDtoD(4096, 8192, 64) },
		"CopyBatch":    func() error { return s.CopyBatch(dst, src, sizes) },
		"Memset":       func() error { return s.Memset(4096, 0, 64) },
		"WaitEvent":    func() error { return s.WaitEvent(e) },
		"WaitValue32":  func() error { return s.WaitValue32(4096, 1, true) },
		"WriteValue32": func() error { return s.WriteValue32(4096, 1) },
		"Record":       func() error { return e.Record(s) },
		"Stream.Query": func() error { _, err := s.Query(); return err },
		"Event.Query":  func() error { _, err := e.Query(); return err },
		"Bind":         x.Bind,
	}
	for name, call := range calls {
		var failed error
		n := testing.AllocsPerRun(200, func() {
			if err := call(); err != nil {
				failed = err
			}
		})
		require.NoError(t, failed, name)
		require.Zero(t, n, "%s allocates", name)
	}
	*c.answer = ErrNotReady
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if done, err := e.Query(); done || err != nil {
			panic("an event that is not ready is neither done nor an error")
		}
	}))
}

func BenchmarkTrivialCall(b *testing.B) {
	if _, err := exec.LookPath("gcc"); err != nil {
		b.Skip("no gcc to compile a library with")
	}
	path := filepath.Join(b.TempDir(), "libtest.so")
	out, err := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-o", path, "testdata/driver.c").CombinedOutput()
	require.NoError(b, err, "%s", strings.TrimSpace(string(out)))
	library, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	require.NoError(b, err)
	api, err := load(library)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		api.EventQuery(32)
	}
}

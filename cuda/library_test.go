//go:build !nogpu

package cuda

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The linker reads LD_LIBRARY_PATH when a process starts, so the libraries are opened in one of its own.
const librariesVariable = "TUTTIFS_TEST_LIBRARIES"

func TestLibraries(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("gcc is not installed")
	}
	folder := t.TempDir()
	for library, define := range map[string]string{
		"libcublas.so.13": "-DBLAS", "libcublasLt.so.13": "-DNOTHING", "libcufile.so.0": "-DCUFILE",
	} {
		out, err := exec.Command(gcc, "-shared", "-fPIC", define, "-o", filepath.Join(folder, library),
			"testdata/libraries.c").CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestLibrariesOpened$", "-test.v")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+folder, librariesVariable+"=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestLibrariesOpened")
}

func TestLibrariesOpened(t *testing.T) {
	if os.Getenv(librariesVariable) == "" {
		t.Skip("TestLibraries runs it")
	}
	blas, err := OpenBLAS()
	require.NoError(t, err)
	stream := &Stream{handle: 0x2222}
	require.NoError(t, blas.MultiplyBF16(stream, 640, 0xa0000000a, 0xb0000000b, 0xc0000000c))
	require.ErrorContains(t, blas.MultiplyBF16(stream, 641, 0xa0000000a, 0xb0000000b, 0xc0000000c),
		"cublasGemmEx: cublasStatus_t 2")
	require.ErrorContains(t, blas.MultiplyBF16(&Stream{}, 640, 0, 0, 0), "cublasSetStream: cublasStatus_t 7")
	require.NoError(t, blas.Close())

	file, err := OpenCUFile()
	require.NoError(t, err)
	_, err = OpenCUFile()
	require.ErrorContains(t, err, "cuFileDriverOpen: CUfileOpError 5001")
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	h, err := file.Register(f)
	require.NoError(t, err)
	buffer := make([]byte, 64)
	p := Pointer(uintptr(unsafe.Pointer(&buffer[0])))
	require.NoError(t, file.RegisterBuffer(p, 64))
	require.ErrorContains(t, file.RegisterBuffer(p, 65), "cuFileBufRegister: CUfileOpError 5012, CUresult 201")
	require.NoError(t, h.ReadAt(p, 8, 4, 3))
	require.Equal(t, "3456", string(buffer[8:12]))
	require.ErrorContains(t, h.ReadAt(p, 0, 4, 8), "2 bytes of 4")
	h.Close()
	require.ErrorContains(t, h.ReadAt(p, 0, 4, 0), "error -1")
	require.NoError(t, file.UnregisterBuffer(p))
	require.NoError(t, file.Close())
	require.ErrorContains(t, file.Close(), "cuFileDriverClose: CUfileOpError 5002")
}

func TestLibrariesNotInstalled(t *testing.T) {
	_, err := loadLibrary("libtuttifs-no-such.so.1")
	require.True(t, errors.Is(err, ErrNoLibrary))
	require.ErrorContains(t, err, "libtuttifs-no-such.so.1")
}

// TestLinkerErrorsAreTheCallers: an error has the name that its caller asked for, whatever others ask for meanwhile and
// on whichever thread goroutines go on.
func TestLinkerErrorsAreTheCallers(t *testing.T) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			name := fmt.Sprintf("libtuttifs-no-such-%d.so", i)
			for range 200 {
				_, err := dlopen(name, purego.RTLD_NOW)
				if !assert.ErrorContains(t, err, name) {
					return
				}
				runtime.Gosched()
			}
		})
	}
	all.Wait()
}

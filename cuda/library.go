//go:build !nogpu

package cuda

import (
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/ebitengine/purego"
)

// libraryFolders are where CUDA's libraries lie if the linker does not know them: the toolkit's, and those of the
// packages that PyTorch brings.
var libraryFolders = []string{
	"/usr/local/cuda/lib64",
	"/usr/local/cuda-*/lib64",
	"/usr/lib/python3*/*-packages/nvidia/*/lib",
	"/usr/local/lib/python3*/*-packages/nvidia/*/lib",
	"/opt/*/lib/python3*/*-packages/nvidia/*/lib",
}

// dlopen is purego's with the error that belongs to it: the linker keeps one for each thread.
func dlopen(path string, mode int) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlopen(path, mode)
}

// dlsym is likewise.
func dlsym(library uintptr, name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlsym(library, name)
}

// loadLibrary loads a library by its soname. It stays loaded.
func loadLibrary(name string) (uintptr, error) {
	lib, err := dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err == nil {
		return lib, nil
	}
	for _, folder := range libraryFolders {
		paths, _ := filepath.Glob(filepath.Join(folder, name))
		for _, path := range paths {
			if lib, err := dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL); err == nil {
				return lib, nil
			}
		}
	}
	return 0, fmt.Errorf("%w: %w (LD_LIBRARY_PATH may name its folder)", ErrNoLibrary, err)
}

// bindAll sets functions, given by their addresses, to the library's.
func bindAll(lib uintptr, functions map[string]any) error {
	for name, f := range functions {
		address, err := dlsym(lib, name)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNoLibrary, err)
		}
		purego.RegisterFunc(f, address)
	}
	return nil
}

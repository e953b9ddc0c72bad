//go:build !nogpu

package cuda

import (
	"fmt"
	"path/filepath"

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

// loadLibrary loads a library by its soname. It stays loaded.
func loadLibrary(name string) (uintptr, error) {
	lib, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err == nil {
		return lib, nil
	}
	for _, folder := range libraryFolders {
		paths, _ := filepath.Glob(filepath.Join(folder, name))
		for _, path := range paths {
			if lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL); err == nil {
				return lib, nil
			}
		}
	}
	return 0, fmt.Errorf("%w: %w (LD_LIBRARY_PATH may name its folder)", ErrNoLibrary, err)
}

// bindAll sets functions, given by their addresses, to the library's.
func bindAll(lib uintptr, functions map[string]any) error {
	for name, f := range functions {
		address, err := purego.Dlsym(lib, name)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNoLibrary, err)
		}
		purego.RegisterFunc(f, address)
	}
	return nil
}

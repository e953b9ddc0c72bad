//go:build nogpu

package cuda

func loadLibrary(string) (uintptr, error) { return 0, ErrNoLibrary }

func bindAll(uintptr, map[string]any) error { return ErrNoLibrary }

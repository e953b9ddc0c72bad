//go:build nogpu

package cuda

import "fmt"

// Open says that this binary knows no GPUs: it is the static one.
func Open() (*Driver, error) {
	return nil, fmt.Errorf("%w: this binary was built without it; 'make build' makes one that has it", ErrNoDriver)
}

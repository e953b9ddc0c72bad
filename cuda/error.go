package cuda

import (
	"errors"
	"fmt"
)

// Errors of Open, OpenBLAS and OpenCUFile.
var (
	// ErrNoDriver: libcuda.so.1 is not installed, or lacks something that is needed.
	ErrNoDriver = errors.New("cuda: no usable CUDA driver")
	// ErrNoDevice: the driver sees no GPU.
	ErrNoDevice = errors.New("cuda: the driver sees no GPU")
	// ErrNoLibrary: a library that only benches use is not installed.
	ErrNoLibrary = errors.New("cuda: library is not installed")
)

// Result is CUresult. It is the error below an *Error, so that errors.Is(err, cuda.ErrOutOfMemory) tells.
type Result int32

// Results that callers tell apart.
const (
	Success              Result = 0
	ErrInvalidValue      Result = 1
	ErrOutOfMemory       Result = 2
	ErrNotInitialized    Result = 3
	ErrDeinitialized     Result = 4
	ErrDeviceAbsent      Result = 100
	ErrInvalidDevice     Result = 101
	ErrInvalidContext    Result = 201
	ErrMapFailed         Result = 205
	ErrInvalidPTX        Result = 218
	ErrInvalidHandle     Result = 400
	ErrNotFound          Result = 500
	ErrNotReady          Result = 600
	ErrIllegalAddress    Result = 700
	ErrLaunchTimeout     Result = 702
	ErrAlreadyRegistered Result = 712
	ErrNotRegistered     Result = 713
	ErrLaunchFailed      Result = 719
	ErrNotPermitted      Result = 800
	ErrNotSupported      Result = 801
	ErrUnknown           Result = 999
)

// Error is the code alone: the driver's words for it are in Error.
func (r Result) Error() string { return fmt.Sprintf("CUDA error %d", int32(r)) }

// Error is a driver call that failed: what was being done, the code, the driver's own name and text.
type Error struct {
	Op   string // "cuMemAlloc of 4096 bytes on device 0"
	Code Result
	Name string // CUDA_ERROR_OUT_OF_MEMORY
	Text string // out of memory
}

func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("cuda: %s: %v", e.Op, e.Code)
	}
	return fmt.Sprintf("cuda: %s: %s (%s, %d)", e.Op, e.Text, e.Name, int32(e.Code))
}

// Unwrap is the code.
func (e *Error) Unwrap() error { return e.Code }

// failed makes the error of a call. It is called after failures only: on other paths its arguments cost nothing.
func (d *Driver) failed(r Result, op string, args ...any) error {
	return &Error{Op: fmt.Sprintf(op, args...), Code: r, Name: d.api.GetErrorName(r), Text: d.api.GetErrorString(r)}
}

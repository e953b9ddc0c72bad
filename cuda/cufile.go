package cuda

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

// CUFile is NVIDIA's own way from files to a GPU, to compare with.
type CUFile struct {
	register    func(handle *uintptr, description unsafe.Pointer) uint64
	deregister  func(handle uintptr)
	bufRegister func(p uint64, n uint64, flags int32) uint64
	bufDrop     func(p uint64) uint64
	read        func(handle uintptr, p uint64, n uint64, fileOffset, bufferOffset int64) int64
	closeDriver func() uint64
}

// CUFileHandle is a file that cuFile knows.
type CUFileHandle struct {
	lib    *CUFile
	handle uintptr
}

// cuFileDescription is CUfileDescr_t with a file descriptor.
type cuFileDescription struct {
	kind int32
	_    int32
	fd   int32
	_    int32
	ops  uintptr
}

// OpenCUFile loads cuFile and opens its driver. Where the nvidia-fs module is not loaded, it copies through memory of
// the host (compatibility mode).
func OpenCUFile() (*CUFile, error) {
	lib, err := loadLibrary("libcufile.so.0")
	if err != nil {
		return nil, err
	}
	f := &CUFile{}
	var open func() uint64
	err = bindAll(lib, map[string]any{
		"cuFileDriverOpen": &open, "cuFileDriverClose": &f.closeDriver, "cuFileHandleRegister": &f.register,
		"cuFileHandleDeregister": &f.deregister, "cuFileBufRegister": &f.bufRegister,
		"cuFileBufDeregister": &f.bufDrop, "cuFileRead": &f.read,
	})
	if err != nil {
		return nil, err
	}
	if err := cuFileError("cuFileDriverOpen", open()); err != nil {
		return nil, err
	}
	return f, nil
}

// cuFileError reads a CUfileError_t: cuFile's code in the low half, the driver's in the high one.
func cuFileError(op string, status uint64) error {
	if code := int32(status); code != 0 {
		return fmt.Errorf("cuda: %s: CUfileOpError %d, CUresult %d", op, code, int32(status>>32))
	}
	return nil
}

// Register makes a file usable. It stays open as long as the handle.
func (c *CUFile) Register(f *os.File) (*CUFileHandle, error) {
	const descriptor = 1 // CU_FILE_HANDLE_TYPE_OPAQUE_FD
	d := cuFileDescription{kind: descriptor, fd: int32(f.Fd())}
	h := &CUFileHandle{lib: c}
	err := cuFileError("cuFileHandleRegister of "+f.Name(), c.register(&h.handle, unsafe.Pointer(&d)))
	runtime.KeepAlive(f)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Close forgets the file.
func (h *CUFileHandle) Close() { h.lib.deregister(h.handle) }

// RegisterBuffer prepares device memory as the target of reads.
func (c *CUFile) RegisterBuffer(p Pointer, n uint64) error {
	return cuFileError("cuFileBufRegister", c.bufRegister(uint64(p), n, 0))
}

// UnregisterBuffer undoes that.
func (c *CUFile) UnregisterBuffer(p Pointer) error {
	return cuFileError("cuFileBufDeregister", c.bufDrop(uint64(p)))
}

// ReadAt reads n bytes of the file to an offset of a registered buffer. A short read is an error.
func (h *CUFileHandle) ReadAt(buffer Pointer, bufferOffset int64, n uint64, offset int64) error {
	switch got := h.lib.read(h.handle, uint64(buffer), n, offset, bufferOffset); {
	case got < 0:
		return fmt.Errorf("cuda: cuFileRead: error %d", got)
	case uint64(got) != n:
		return fmt.Errorf("cuda: cuFileRead: %d bytes of %d", got, n)
	}
	return nil
}

// Close closes cuFile's driver.
func (c *CUFile) Close() error { return cuFileError("cuFileDriverClose", c.closeDriver()) }

//go:build !nogpu

package cuda

import (
	"unsafe"

	"github.com/ebitengine/purego"
)

// openIPC calls cuIpcOpenMemHandle(pointer, handle, flags). A struct of more than 16 bytes passed by value is a copy of
// which the address is passed (AAPCS64, section 6.8.2, rule B.4).
func openIPC(f uintptr, p *Pointer, h *IPCHandle, flags uint32) Result {
	handle := new(IPCHandle)
	*handle = *h
	return result(purego.SyscallN(f, uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(handle)), uintptr(flags)))
}

//go:build !nogpu

package cuda

import (
	"unsafe"

	"github.com/ebitengine/purego"
)

// openIPC calls cuIpcOpenMemHandle(pointer, handle, flags). A struct of more than 16 bytes passed by value lies on the
// stack (System V ABI for AMD64, section 3.2.3, class MEMORY), where SyscallN's arguments from the seventh on go. The
// others take the first of the six registers, in order.
func openIPC(f uintptr, p *Pointer, h *IPCHandle, flags uint32) Result {
	w := (*[8]uintptr)(unsafe.Pointer(h))
	return result(purego.SyscallN(f, uintptr(unsafe.Pointer(p)), uintptr(flags), 0, 0, 0, 0,
		w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]))
}

//go:build cgo

package main

// #cgo CFLAGS: -I${SRCDIR}/../include
// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"runtime/debug"
	"unsafe"

	"tuttifs/contentkey"
	"tuttifs/engine"
	"tuttifs/gio"
	"tuttifs/stripe"
)

var (
	errHandle  = errors.New("libtuttifs: bad handle")
	errDefect  = errors.New("libtuttifs: a defect of the library")
	errSupport = errors.New("libtuttifs: not with this executor")
)

// codes are the numbers of errors. The first that matches counts: those about the whole come first.
var codes = []struct {
	err  error
	code C.int
}{
	{errHandle, C.TUTTIFS_EBADF}, {errDefect, C.TUTTIFS_EDEFECT}, {errSupport, C.TUTTIFS_ENOTSUP},
	{engine.ErrNotMount, C.TUTTIFS_ENOTMOUNT}, {engine.ErrNoGPU, C.TUTTIFS_ENODEV},
	{engine.ErrGone, C.TUTTIFS_ESTALE}, {gio.ErrDead, C.TUTTIFS_ESTALE}, {gio.ErrClosed, C.TUTTIFS_ESTALE},
	{engine.ErrNoSpace, C.TUTTIFS_ENOSPC}, {engine.ErrAgain, C.TUTTIFS_EAGAIN},
	{engine.ErrPending, C.TUTTIFS_EINPROGRESS}, {engine.ErrQuota, C.TUTTIFS_EDQUOT},
	{engine.ErrReadOnly, C.TUTTIFS_EROFS}, {engine.ErrNotFound, C.TUTTIFS_ENOENT},
	{engine.ErrLease, C.TUTTIFS_EPERM}, {engine.ErrExists, C.TUTTIFS_EEXIST}, {engine.ErrIdentity, C.TUTTIFS_EBADMSG},
	{engine.ErrIncomplete, C.TUTTIFS_ENODATA}, {gio.ErrIncomplete, C.TUTTIFS_ENODATA},
	{gio.ErrStoreBuffer, C.TUTTIFS_ENOBUFS},
	{gio.ErrTimeout, C.TUTTIFS_ETIMEDOUT}, {gio.ErrChecksum, C.TUTTIFS_EILSEQ}, {gio.ErrUnmapped, C.TUTTIFS_ENOENT},
	{gio.ErrMemory, C.TUTTIFS_ENOMEM}, {gio.ErrBusy, C.TUTTIFS_EBUSY}, {gio.ErrInvalid, C.TUTTIFS_EINVAL},
	{engine.ErrInvalid, C.TUTTIFS_EINVAL}, {stripe.ErrGeometry, C.TUTTIFS_EINVAL},
	{contentkey.ErrPrompt, C.TUTTIFS_EINVAL},
	{engine.ErrDrive, C.TUTTIFS_EIO}, {gio.ErrStatus, C.TUTTIFS_EIO}, {gio.ErrProtocol, C.TUTTIFS_EIO},
}

// codeOf is an error's negative number, 0 for nil.
func codeOf(err error) C.int {
	if err == nil {
		return 0
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return -c.code
		}
	}
	return -C.TUTTIFS_EIO
}

// say puts an error's text into a thread's text.
func say(text *C.char, err error) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(text)), C.TEXT_BYTES)
	b[copy(b[:len(b)-1], err.Error())] = 0
}

// call runs the body of one function of the interface. A panic goes no further than here.
func call(text *C.char, body func() error) (code C.int) {
	defer func() {
		if p := recover(); p != nil {
			err := fmt.Errorf("%w: %v; please report it with this: %s", errDefect, p, debug.Stack())
			say(text, err)
			code = codeOf(err)
		}
	}()
	err := body()
	if err != nil {
		say(text, err)
	}
	return codeOf(err)
}

// null is the error of an argument that must not be NULL.
func null(what string) error { return fmt.Errorf("%w: %s is NULL", engine.ErrInvalid, what) }

// countMax bounds arrays: more than a mount could use, and little enough that what is allocated for a wrong count does
// not end the process.
const countMax = 1 << 24

// array is a C array of the caller's.
func array[T any](p *T, n C.uint64_t, what string) ([]T, error) {
	switch {
	case n == 0:
		return nil, nil
	case p == nil:
		return nil, null(what)
	case n > countMax:
		return nil, fmt.Errorf("%w: %d %s", engine.ErrInvalid, uint64(n), what)
	}
	return unsafe.Slice(p, int(n)), nil
}

// sized checks the size field of a structure of which n bytes are known. A caller of a later version may give more, as
// long as what is not known here is zero.
func sized(p unsafe.Pointer, size C.uint32_t, n uintptr, what string) error {
	if uintptr(size) < n || size > 1<<16 {
		return fmt.Errorf("%w: %s has size %d, this library knows %d: set .size to sizeof", engine.ErrInvalid, what,
			uint32(size), n)
	}
	for _, b := range unsafe.Slice((*byte)(p), int(size))[n:] {
		if b != 0 {
			return fmt.Errorf("%w: %s asks for what only a later version of the library has", engine.ErrInvalid, what)
		}
	}
	return nil
}

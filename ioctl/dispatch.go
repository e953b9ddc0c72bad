package ioctl

import (
	"math/bits"
	"reflect"
	"unsafe"
)

// Handler answers verbs for one open file. Each method gets a private copy of the struct, checked as far as this
// package can: size, version, flags, reserved fields, and out fields zeroed. It fills the out fields and returns 0,
// or returns an errno and nothing of the struct reaches the caller. No method may wait on a drive.
type Handler interface {
	Hello(*Hello) Errno
	Drives(*Drives) Errno
	SessionCreate(*Session) Errno
	SessionJoin(*Session) Errno
	Arena(*Arena) Errno
	PoolOpen(*PoolOpen) Errno
	PoolInfo(*PoolInfo) Errno
	Layout(*Layout) Errno
	Rows(*Rows) Errno
	MapAck(*MapAck) Errno
	Peek(*Peek) Errno
	Pin(*Pin) Errno
	Release(*Release) Errno
	Reserve(*Reserve) Errno
	Commit(*Commit) Errno
	Abort(*Abort) Errno
	ReportBad(*ReportBad) Errno
	Evict(*Evict) Errno
	Unlink(*Unlink) Errno
	Extents(*Extents) Errno
	Stats(*Stats) Errno
	Events(*Events) Errno
	Ticket(*Ticket) Errno
	Changes(*Changes) Errno
	Present(*Present) Errno
}

// access says which handles may use a verb.
type access uint8

const (
	looks   access = iota // any handle
	changes               // refused with EBADF on a read-only handle
)

// verb is what the dispatcher knows of one ioctl number.
type verb struct {
	name   string
	typ    reflect.Type
	access access
	flags  uint16 // allowed bits
	choose choice // how many of them
	// zero and out are byte ranges of the struct: reserved fields and out fields.
	zero, out []fieldRange
	call      func(v *verb, h Handler, in, out []byte) Errno
}

// choice says how many of a verb's flags may be set together.
type choice uint8

const (
	anyFlags choice = iota
	atMostOne
	exactlyOne
)

type fieldRange struct{ from, to uintptr }

// verbs is indexed by verb number; read-only.
var verbs = [nrEnd]verb{
	nrHello:         newVerb("HELLO", looks, Handler.Hello),
	nrDrives:        newVerb("DRIVES", looks, Handler.Drives),
	nrSessionCreate: newVerb("SESSION_CREATE", changes, Handler.SessionCreate),
	nrSessionJoin:   newVerb("SESSION_JOIN", changes, Handler.SessionJoin),
	nrArena:         newVerb("ARENA", looks, Handler.Arena),
	nrPoolOpen:      newVerb("POOL_OPEN", changes, Handler.PoolOpen),
	nrPoolInfo:      newVerb("POOL_INFO", looks, Handler.PoolInfo).with(PoolByName|PoolByIndex, atMostOne),
	nrLayout:        newVerb("LAYOUT", looks, Handler.Layout),
	nrRows:          newVerb("ROWS", looks, Handler.Rows),
	nrMapAck:        newVerb("MAP_ACK", changes, Handler.MapAck),
	nrPeek:          newVerb("PEEK", looks, Handler.Peek),
	nrPin:           newVerb("PIN", changes, Handler.Pin),
	nrRelease:       newVerb("RELEASE", changes, Handler.Release),
	nrReserve:       newVerb("RESERVE", changes, Handler.Reserve).with(ReservePartial, anyFlags),
	nrCommit:        newVerb("COMMIT", changes, Handler.Commit),
	nrAbort:         newVerb("ABORT", changes, Handler.Abort),
	nrReportBad:     newVerb("REPORT_BAD", changes, Handler.ReportBad),
	nrEvict:         newVerb("EVICT", changes, Handler.Evict).with(EvictCount|EvictKeys|EvictPrefix, exactlyOne),
	nrUnlink:        newVerb("UNLINK", changes, Handler.Unlink),
	nrExtents:       newVerb("EXTENTS", looks, Handler.Extents),
	nrStats:         newVerb("STATS", looks, Handler.Stats),
	nrEvents:        newVerb("EVENTS", looks, Handler.Events),
	nrTicket:        newVerb("TICKET", looks, Handler.Ticket),
	nrChanges:       newVerb("CHANGES", looks, Handler.Changes),
	nrPresent:       newVerb("PRESENT", looks, Handler.Present),
}

func newVerb[T any](name string, a access, method func(Handler, *T) Errno) verb {
	t := reflect.TypeFor[T]()
	v := verb{name: name, typ: t, access: a}
	v.collect(t, 0)
	v.call = func(v *verb, h Handler, in, out []byte) Errno {
		a := new(T)
		b := bytesOf(a)
		copy(b, in)
		for _, r := range v.zero {
			if !allZero(b[r.from:r.to]) {
				return EINVAL
			}
		}
		for _, r := range v.out {
			clear(b[r.from:r.to])
		}
		if errno := method(h, a); errno != 0 {
			return errno
		}
		copy(out, b)
		return 0
	}
	return v
}

// collect notes the struct's reserved and out fields.
func (v *verb) collect(t reflect.Type, base uintptr) {
	for i := range t.NumField() {
		f := t.Field(i)
		at := base + f.Offset
		switch {
		case f.Type.Size() == 0:
		case f.Tag.Get("abi") == "out":
			v.out = append(v.out, fieldRange{at, at + f.Type.Size()})
		case f.Name == "Reserved":
			v.zero = append(v.zero, fieldRange{at, at + f.Type.Size()})
		case f.Type.Kind() == reflect.Struct:
			v.collect(f.Type, at)
		}
	}
}

func (v verb) with(flags uint16, c choice) verb {
	v.flags, v.choose = flags, c
	return v
}

// Dispatch serves one ioctl. in is the caller's struct, already private to this process; out is what goes back, as
// long as in. It is cleared first, because the mount's buffers are recycled. With an errno the caller's own bytes go
// back: FUSE copies the output whatever the result, and a request that can be repeated must survive its EAGAIN.
// Checks are made in this order: number, version, size, flags, the handle's rights, reserved fields; then the verb's
// own.
func Dispatch(h Handler, writable bool, cmd uint32, in, out []byte) Errno {
	clear(out)
	errno := dispatch(h, writable, cmd, in, out)
	if errno != 0 {
		copy(out, in)
	}
	return errno
}

func dispatch(h Handler, writable bool, cmd uint32, in, out []byte) Errno {
	nr := cmd & 0xff
	if nr >= nrEnd || verbs[nr].call == nil || cmd&^(iocSizeMask<<iocSizeShift) != iocBase|nr {
		return ENOTTY
	}
	v := &verbs[nr]
	var head Header
	if len(in) < int(unsafe.Sizeof(head)) {
		return EINVAL
	}
	copy(bytesOf(&head), in)
	if head.Version != Version {
		return EPROTO
	}
	size := v.typ.Size()
	if uintptr(cmd>>iocSizeShift&iocSizeMask) != size || uintptr(len(in)) != size || uintptr(len(out)) != size ||
		uintptr(head.Size) != size {
		return EINVAL
	}
	if !v.flagsValid(head.Flags) {
		return EINVAL
	}
	if v.access == changes && !writable {
		return EBADF
	}
	return v.call(v, h, in, out)
}

func (v *verb) flagsValid(f uint16) bool {
	n := bits.OnesCount16(f)
	switch {
	case f&^v.flags != 0:
		return false
	case v.choose == exactlyOne:
		return n == 1
	case v.choose == atMostOne:
		return n <= 1
	}
	return true
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

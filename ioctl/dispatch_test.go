package ioctl

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"reflect"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// fake answers every verb: it fills the out bytes of the struct it got with 0xee and remembers what it saw.
type fake struct {
	errno Errno
	seen  []byte
}

func answer[T any](f *fake, a *T) Errno {
	b := bytesOf(a)
	f.seen = append(f.seen[:0], b...)
	for i := range verbs {
		if v := &verbs[i]; v.typ == reflect.TypeFor[T]() {
			for _, r := range v.out {
				for j := r.from; j < r.to; j++ {
					b[j] = 0xee
				}
			}
		}
	}
	return f.errno
}

func (f *fake) Hello(a *Hello) Errno           { return answer(f, a) }
func (f *fake) Drives(a *Drives) Errno         { return answer(f, a) }
func (f *fake) SessionCreate(a *Session) Errno { return answer(f, a) }
func (f *fake) SessionJoin(a *Session) Errno   { return answer(f, a) }
func (f *fake) Arena(a *Arena) Errno           { return answer(f, a) }
func (f *fake) PoolOpen(a *PoolOpen) Errno     { return answer(f, a) }
func (f *fake) PoolInfo(a *PoolInfo) Errno     { return answer(f, a) }
func (f *fake) Layout(a *Layout) Errno         { return answer(f, a) }
func (f *fake) Rows(a *Rows) Errno             { return answer(f, a) }
func (f *fake) MapAck(a *MapAck) Errno         { return answer(f, a) }
func (f *fake) Peek(a *Peek) Errno             { return answer(f, a) }
func (f *fake) Pin(a *Pin) Errno               { return answer(f, a) }
func (f *fake) Release(a *Release) Errno       { return answer(f, a) }
func (f *fake) Reserve(a *Reserve) Errno       { return answer(f, a) }
func (f *fake) Commit(a *Commit) Errno         { return answer(f, a) }
func (f *fake) Abort(a *Abort) Errno           { return answer(f, a) }
func (f *fake) ReportBad(a *ReportBad) Errno   { return answer(f, a) }
func (f *fake) Evict(a *Evict) Errno           { return answer(f, a) }
func (f *fake) Unlink(a *Unlink) Errno         { return answer(f, a) }
func (f *fake) Extents(a *Extents) Errno       { return answer(f, a) }
func (f *fake) Stats(a *Stats) Errno           { return answer(f, a) }
func (f *fake) Events(a *Events) Errno         { return answer(f, a) }
func (f *fake) Ticket(a *Ticket) Errno         { return answer(f, a) }
func (f *fake) Changes(a *Changes) Errno       { return answer(f, a) }
func (f *fake) Present(a *Present) Errno       { return answer(f, a) }

// request is a well-formed request of a verb.
func request(nr int) (cmd uint32, in []byte) {
	size := verbs[nr].typ.Size()
	in = make([]byte, size)
	binary.LittleEndian.PutUint32(in, uint32(size))
	binary.LittleEndian.PutUint16(in[4:], Version)
	if verbs[nr].choose == exactlyOne {
		in[6] = 1
	}
	return uint32(iocBase) | uint32(size)<<iocSizeShift | uint32(nr), in
}

func eachVerb(t *testing.T, f func(t *testing.T, nr int, cmd uint32, in []byte)) {
	for nr := 1; nr < nrEnd; nr++ {
		t.Run(verbs[nr].name, func(t *testing.T) {
			cmd, in := request(nr)
			f(t, nr, cmd, in)
		})
	}
}

func TestWellFormed(t *testing.T) {
	eachVerb(t, func(t *testing.T, nr int, cmd uint32, in []byte) {
		for _, r := range verbs[nr].out {
			for i := r.from; i < r.to; i++ {
				in[i] = 0xdd // what a caller left there must not reach the handler
			}
		}
		out := make([]byte, len(in))
		f := &fake{}
		require.Zero(t, Dispatch(f, true, cmd, in, out))
		for _, r := range verbs[nr].out {
			for i := r.from; i < r.to; i++ {
				require.Zero(t, f.seen[i])
				require.Equal(t, byte(0xee), out[i])
			}
		}
		f.errno = ENOSPC
		require.Equal(t, ENOSPC, Dispatch(f, true, cmd, in, out))
		require.Equal(t, in, out, "an error must leave the caller's struct as it was")
	})
}

// TestMalformed is the table of what docs/abi.md promises for every malformed request, on every verb.
func TestMalformed(t *testing.T) {
	resize := func(b []byte, n int) []byte { return append(b, make([]byte, 64)...)[:n] }
	cases := []struct {
		name string
		want Errno
		edit func(cmd uint32, in []byte) (uint32, []byte)
	}{
		{"unknown number", ENOTTY, func(c uint32, in []byte) (uint32, []byte) { return c&^0xff | nrEnd, in }},
		{"number zero", ENOTTY, func(c uint32, in []byte) (uint32, []byte) { return c &^ 0xff, in }},
		{"other type", ENOTTY, func(c uint32, in []byte) (uint32, []byte) { return c&^0xff00 | 'f'<<8, in }},
		{"read only direction", ENOTTY, func(c uint32, in []byte) (uint32, []byte) { return c &^ (1 << 30), in }},
		{"no direction", ENOTTY, func(c uint32, in []byte) (uint32, []byte) { return c &^ (3 << 30), in }},
		{"size in number", EINVAL, func(c uint32, in []byte) (uint32, []byte) { return c + 8<<iocSizeShift, in }},
		{"empty", EINVAL, func(c uint32, in []byte) (uint32, []byte) { return c, nil }},
		{"shorter than a header", EINVAL, func(c uint32, in []byte) (uint32, []byte) { return c, in[:7] }},
		{"short", EINVAL, func(c uint32, in []byte) (uint32, []byte) { return c, in[:len(in)-8] }},
		{"long", EINVAL, func(c uint32, in []byte) (uint32, []byte) { return c, resize(in, len(in)+8) }},
		{"size field", EINVAL, func(c uint32, in []byte) (uint32, []byte) { in[0]++; return c, in }},
		{"version 0", EPROTO, func(c uint32, in []byte) (uint32, []byte) { in[4] = 0; return c, in }},
		{"version 2", EPROTO, func(c uint32, in []byte) (uint32, []byte) { in[4] = 2; return c, in }},
		{"longer struct of a newer version", EPROTO, func(c uint32, in []byte) (uint32, []byte) {
			in[4] = 2
			return c + 8<<iocSizeShift, resize(in, len(in)+8)
		}},
		{"unknown flag", EINVAL, func(c uint32, in []byte) (uint32, []byte) { in[7] = 0x80; return c, in }},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			eachVerb(t, func(t *testing.T, _ int, cmd uint32, in []byte) {
				cmd, in = c.edit(cmd, in)
				out := make([]byte, len(in))
				for i := range out {
					out[i] = 0xaa // recycled
				}
				f := &fake{}
				require.Equal(t, c.want, Dispatch(f, true, cmd, in, out))
				require.Nil(t, f.seen, "the handler was reached")
				require.True(t, bytes.Equal(in, out), "a recycled buffer must not leak")
			})
		})
	}
}

func TestShortOutput(t *testing.T) {
	cmd, in := request(nrHello)
	require.Equal(t, EINVAL, Dispatch(&fake{}, true, cmd, in, nil))
}

func TestReservedFields(t *testing.T) {
	eachVerb(t, func(t *testing.T, nr int, cmd uint32, in []byte) {
		for _, r := range verbs[nr].zero {
			for i := r.from; i < r.to; i++ {
				in[i] = 1
				require.Equal(t, EINVAL, Dispatch(&fake{}, true, cmd, in, make([]byte, len(in))), "byte %d", i)
				in[i] = 0
			}
		}
	})
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		nr    int
		flags byte
		want  Errno
	}{
		{nrReserve, 0, 0}, {nrReserve, ReservePartial, 0}, {nrReserve, 2, EINVAL},
		{nrEvict, 0, EINVAL}, {nrEvict, EvictCount, 0}, {nrEvict, EvictPrefix, 0}, {nrEvict, EvictCount | EvictKeys, EINVAL},
		{nrPoolInfo, 0, 0}, {nrPoolInfo, PoolByName, 0}, {nrPoolInfo, PoolByName | PoolByIndex, EINVAL},
		{nrPin, 1, EINVAL},
	} {
		cmd, in := request(c.nr)
		in[6] = c.flags
		require.Equal(t, c.want, Dispatch(&fake{}, true, cmd, in, make([]byte, len(in))), "%s %d", verbs[c.nr].name, c.flags)
	}
}

func TestReadOnlyHandle(t *testing.T) {
	looking := map[int]bool{nrHello: true, nrDrives: true, nrArena: true, nrPoolInfo: true, nrLayout: true, nrRows: true,
		nrPeek: true, nrExtents: true, nrStats: true, nrEvents: true, nrTicket: true, nrChanges: true,
		nrPresent: true}
	eachVerb(t, func(t *testing.T, nr int, cmd uint32, in []byte) {
		want := EBADF
		if looking[nr] {
			want = 0
		}
		require.Equal(t, want, Dispatch(&fake{}, false, cmd, in, make([]byte, len(in))))
	})
}

// TestCommands: the constants, the verb table and the numbers in the structs' Go types agree.
func TestCommands(t *testing.T) {
	commands := []uint32{CmdHello, CmdDrives, CmdSessionCreate, CmdSessionJoin, CmdArena, CmdPoolOpen, CmdPoolInfo,
		CmdLayout, CmdRows, CmdMapAck, CmdPeek, CmdPin, CmdRelease, CmdReserve, CmdCommit, CmdAbort, CmdReportBad, CmdEvict,
		CmdUnlink, CmdExtents, CmdStats, CmdEvents, CmdTicket, CmdChanges, CmdPresent}
	require.Len(t, commands, nrEnd-1)
	for i, c := range commands {
		cmd, _ := request(i + 1)
		require.Equal(t, cmd, c, verbs[i+1].name)
	}
}

func FuzzDispatch(f *testing.F) {
	for nr := 1; nr < nrEnd; nr++ {
		cmd, in := request(nr)
		f.Add(cmd, in, true)
		f.Add(cmd, in[:len(in)/2], false)
	}
	f.Fuzz(func(t *testing.T, cmd uint32, in []byte, writable bool) {
		private := append([]byte{}, in...)
		out := make([]byte, len(in))
		rand.NewChaCha8([32]byte{}).Read(out)
		h := &fake{}
		errno := Dispatch(h, writable, cmd, in, out)
		require.True(t, bytes.Equal(private, in), "the request was written to")
		if errno != 0 {
			require.True(t, bytes.Equal(in, out))
			return
		}
		v := &verbs[cmd&0xff]
		require.Len(t, in, int(v.typ.Size()))
		require.Equal(t, uint16(Version), (*Header)(unsafe.Pointer(&h.seen[0])).Version)
		for _, r := range v.zero {
			require.True(t, allZero(h.seen[r.from:r.to]))
		}
	})
}

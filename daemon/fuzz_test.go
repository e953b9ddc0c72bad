package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// documentedErrnos are those of docs/abi.md that verbs answer here.
var documentedErrnos = func() map[ioctl.Errno]bool {
	m := map[ioctl.Errno]bool{0: true}
	for _, e := range []ioctl.Errno{ioctl.EPERM, ioctl.ENOENT, ioctl.ENXIO, ioctl.EBADF, ioctl.EAGAIN, ioctl.EFAULT,
		ioctl.EBUSY, ioctl.EEXIST, ioctl.EINVAL, ioctl.ENOTTY, ioctl.ENOSPC, ioctl.ENODATA, ioctl.EPROTO, ioctl.EOVERFLOW,
		ioctl.EBADMSG, ioctl.EINPROGRESS, ioctl.ENOTCONN, ioctl.ESTALE, ioctl.EDQUOT, ioctl.EMFILE} {
		m[e] = true
	}
	return m
}()

// FuzzVerbs drives the real handler with any bytes, on a handle with a session, on a new one and on one that may only
// look, while the arena changes under it. Nothing may crash or answer an errno that is not documented; at the end no
// slot is lost.
func FuzzVerbs(f *testing.F) {
	w := newWorld(f, gpufile.Options{NoIO: true}, ControlOptions{Tickets: 16})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	p := c.pool(a, "p")
	c.store(a, p, 1, 3)
	for _, cmd := range []uint32{ioctl.CmdHello, ioctl.CmdDrives, ioctl.CmdSessionCreate, ioctl.CmdSessionJoin,
		ioctl.CmdArena, ioctl.CmdPoolOpen, ioctl.CmdPoolInfo, ioctl.CmdLayout, ioctl.CmdRows, ioctl.CmdMapAck, ioctl.CmdPeek,
		ioctl.CmdPin, ioctl.CmdRelease, ioctl.CmdReserve, ioctl.CmdCommit, ioctl.CmdAbort, ioctl.CmdReportBad,
		ioctl.CmdEvict, ioctl.CmdUnlink, ioctl.CmdExtents, ioctl.CmdStats, ioctl.CmdEvents,
		ioctl.CmdTicket, ioctl.CmdChanges, ioctl.CmdPresent} {
		body := make([]byte, cmd>>16&0x3fff-8)
		if len(body) >= 8 {
			*(*ioctl.Target)(unsafe.Pointer(&body[0])) = p
		}
		if len(body) >= 40 {
			*(*ioctl.Span)(unsafe.Pointer(&body[8])) = ioctl.Span{Offset: keySpan.Offset, Bytes: 96}
			*(*ioctl.Span)(unsafe.Pointer(&body[24])) = grantSpan
		}
		f.Add(cmd, uint16(0), body, byte(0))
		f.Add(cmd, uint16(1), body, byte(0))
		f.Add(cmd, uint16(0), body, byte(1))
		f.Add(cmd, uint16(4), body[:len(body)/2], byte(2))
	}
	stop := make(chan struct{})
	wg := scribble(a.Arena, stop)
	f.Cleanup(func() {
		close(stop)
		wg.Wait()
		require.NoError(f, w.control.Shutdown())
		for _, p := range w.store.Pools() {
			require.Eventually(f, func() bool {
				s := p.Stats()
				return s.FilesPinned+s.FilesReserved+s.SlotsFreeing == 0 && s.SlotsUsed == s.Files
			}, 10*time.Second, time.Millisecond, "slots are lost: %+v", p.Stats())
		}
	})
	f.Fuzz(func(t *testing.T, cmd uint32, flags uint16, body []byte, who byte) {
		handle := c.handle
		if who %= 3; who > 0 {
			handle = w.control.Open(c.pid, uint32(os.Geteuid()), 0, who == 1)
			defer w.control.Close(handle)
		}
		in := make([]byte, 8+len(body))
		*(*ioctl.Header)(unsafe.Pointer(&in[0])) = ioctl.Header{Size: uint32(len(in)), Version: ioctl.Version, Flags: flags}
		copy(in[8:], body)
		errno := ioctl.Errno(w.control.Ioctl(handle, c.pid, cmd, 0, in, make([]byte, len(in))))
		require.True(t, documentedErrnos[errno], "errno %d", errno)
	})
}

// FuzzAttach sends any messages to the attach socket, some of them with a right head or a right token. Each is answered
// or ends the connection, and when that has ended nothing of the member is left.
func FuzzAttach(f *testing.F) {
	w := newWorld(f, gpufile.Options{NoIO: true}, ControlOptions{DMABytesMax: 1 << 20, SharedBytesMax: 16 << 20})
	const head, token = 1, 2 // of a message's first byte; the second is its length
	message := func(what byte, edit func(r *ioctl.AttachRequest)) []byte {
		r := ioctl.NewAttachRequest(ioctl.MessageAttach)
		edit(&r)
		return append([]byte{what, byte(unsafe.Sizeof(r))}, r.Bytes()...)
	}
	attach := message(head|token, func(r *ioctl.AttachRequest) { r.Lanes, r.Depth, r.DMABytes = 2, 16, 4096 })
	for _, kind := range []uint16{ioctl.MessagePing, ioctl.MessageQuiesce, ioctl.MessageReattach, ioctl.MessageAttach} {
		next := message(head, func(r *ioctl.AttachRequest) { r.Kind, r.Lane = kind, 1 })
		f.Add(append(append([]byte{}, attach...), next...))
		f.Add(next)
	}
	f.Add(message(0, func(r *ioctl.AttachRequest) { r.Lanes, r.Depth = 64, 4096 }))
	f.Add([]byte{0, 3, 1, 2, 3, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		handle := w.control.Open(uint32(os.Getpid()), uint32(os.Geteuid()), 0, true)
		c := &client{w: w, handle: handle, pid: uint32(os.Getpid())}
		var s ioctl.Session
		require.Zero(t, issue(c, ioctl.CmdSessionCreate, &s, 0))
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: w.control.SocketPath(), Net: "unixpacket"})
		require.NoError(t, err)
		require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
		for len(in) >= 2 {
			what, n := in[0], min(int(in[1]), len(in)-2)
			b := bytes.Clone(in[2 : 2+n])
			in = in[2+n:]
			if what&(head|token) != 0 {
				var r ioctl.AttachRequest
				copy(r.Bytes(), b)
				if what&head != 0 {
					right := ioctl.NewAttachRequest(r.Kind)
					r.Magic, r.Version, r.Size = right.Magic, right.Version, right.Size
				}
				if what&token != 0 {
					r.Session, r.Member, r.Token = s.ID, s.Member, s.Token
				}
				b = r.Bytes()
			}
			if _, err := conn.Write(b); err != nil {
				break
			}
			answer := make([]byte, 1024)
			n, err := conn.Read(answer)
			if err != nil {
				require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "no answer to % x", b)
				break
			}
			r, err := ioctl.ParseAttachReply(answer[:n])
			require.NoError(t, err)
			require.True(t, documentedErrnos[ioctl.Errno(r.Errno)] || ioctl.Errno(r.Errno) == ioctl.ENOMEM, "errno %d", r.Errno)
		}
		require.NoError(t, conn.Close())
		w.control.Close(handle)
		require.Eventually(t, func() bool {
			w.control.mu.Lock()
			defer w.control.mu.Unlock()
			return len(w.control.members)+len(w.control.sessions)+len(w.control.connections) == 0 && w.control.sharedBytes == 0
		}, 20*time.Second, 100*time.Microsecond)
	})
}

// FuzzDriveRequests sends anything to the drives' socket: it is answered in JSON, and the volume goes on.
func FuzzDriveRequests(f *testing.F) {
	for _, s := range []string{`{"version":1,"verb":"add","path":"relative"}`,
		`{"version":1,"verb":"scrub","rate":1000000}`,
		`{"version":1,"verb":"replace","index":9,"path":"/nowhere"}`, `{"version":1,"verb":"forget","index":65535}`,
		`{"version":2}`, `{"version":1,"verb":"add","path":"/nowhere","force":true}`, `[]`, `{`, "\x00", `{"rate":-1}`, ``} {
		f.Add([]byte(s))
	}
	f.Add(bytes.Repeat([]byte{' '}, 2*driveRequestMax))
	f.Add(bytes.Repeat([]byte{'x'}, 2*driveRequestMax))
	w := newWorld(f, gpufile.Options{}, ControlOptions{})
	d := &Daemon{options: Options{SocketDir: socketDir(f)}, volume: w.volume, store: w.store, control: w.control}
	d.options.fill()
	s, err := serveDrives(d)
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, s.close()) })
	path := DriveSocketPath(d.options.SocketDir, extentmap.FormatUUID(w.volume.Info().UUID))
	f.Fuzz(func(t *testing.T, in []byte) {
		var r DriveRequest
		if json.NewDecoder(bytes.NewReader(in)).Decode(&r) == nil {
			if _, err := os.Stat(r.Path); err == nil || r.Verb == "forget" && s.known(r.Index) == nil {
				t.Skip("this machine's files and the volume's drives are needed")
			}
		}
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
		_, _ = conn.Write(in) // the answer may come before all of it is written
		answers := json.NewDecoder(conn)
		if r.Verb == "scrub" {
			var last ScrubReply
			for err == nil && !last.Done && last.Error == "" {
				err = answers.Decode(&last)
			}
			require.NoError(t, err)
		} else {
			_ = conn.CloseWrite()
			var reply DriveReply
			require.NoError(t, answers.Decode(&reply))
			require.NotEmpty(t, reply.Error)
			_, err = answers.Token()
			require.True(t, errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET), "%v", err) // not all of it was read
		}
		require.NoError(t, w.volume.Err())
		require.Len(t, w.volume.Info().Drives, 2)
	})
}

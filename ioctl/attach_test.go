package ioctl

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestAttachRequestRoundTrip(t *testing.T) {
	r := NewAttachRequest(MessageAttach)
	r.Session, r.Member, r.Lanes, r.Depth, r.DMABytes = 1, 2, 4, 256, 1<<20
	r.Token[3] = 7
	got, err := ParseAttachRequest(r.Bytes())
	require.NoError(t, err)
	require.Equal(t, r, got)
}

func TestAttachRequestMalformed(t *testing.T) {
	for _, c := range []struct {
		name string
		want Errno
		edit func(r *AttachRequest) []byte
	}{
		{"short", EINVAL, func(r *AttachRequest) []byte { return r.Bytes()[:100] }},
		{"long", EINVAL, func(r *AttachRequest) []byte { return append(r.Bytes()[:len(r.Bytes()):len(r.Bytes())], 0) }},
		{"magic", EINVAL, func(r *AttachRequest) []byte { r.Magic++; return r.Bytes() }},
		{"version", EPROTO, func(r *AttachRequest) []byte { r.Version++; return r.Bytes() }},
		{"size", EINVAL, func(r *AttachRequest) []byte { r.Size++; return r.Bytes() }},
		{"kind 0", EINVAL, func(r *AttachRequest) []byte { r.Kind = 0; return r.Bytes() }},
		{"kind 9", EINVAL, func(r *AttachRequest) []byte { r.Kind = 9; return r.Bytes() }},
		{"reserved", EINVAL, func(r *AttachRequest) []byte { r.Reserved[4] = 1; return r.Bytes() }},
		{"memory", EINVAL, func(r *AttachRequest) []byte { r.MemoryBytes = 1; return r.Bytes() }},
		{"address", EINVAL, func(r *AttachRequest) []byte { r.MemoryAddress = 1; return r.Bytes() }},
	} {
		r := NewAttachRequest(MessagePing)
		_, err := ParseAttachRequest(c.edit(&r))
		require.ErrorIs(t, err, c.want, c.name)
		require.ErrorIs(t, err, ErrMessage, c.name)
	}
}

func FuzzAttachRequest(f *testing.F) {
	r := NewAttachRequest(MessageAttach)
	f.Add(r.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseAttachRequest(b)
		if err == nil {
			require.Equal(t, b, r.Bytes())
		}
	})
}

func FuzzAttachReply(f *testing.F) {
	r := NewAttachReply(MessageAttach)
	r.Lanes, r.Drives, r.QueueBlockBytes, r.QueuesBytes = 2, 2, 4096, 5*4096
	f.Add(r.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseAttachReply(b)
		if err == nil && r.Errno == 0 && r.Kind == MessageAttach {
			require.LessOrEqual(t, r.QueueOffset(int(r.Lanes), 0), r.QueuesBytes)
		}
	})
}

// TestSharedMemoryIsSealed: neither side can resize it under the other.
func TestSharedMemoryIsSealed(t *testing.T) {
	fd, b, err := NewSharedMemory("tuttifs-test", 8192)
	require.NoError(t, err)
	defer unix.Close(fd)
	defer Unmap(b)
	require.Len(t, b, 8192)
	require.ErrorIs(t, unix.Ftruncate(fd, 4096), unix.EPERM)
	require.ErrorIs(t, unix.Ftruncate(fd, 1<<20), unix.EPERM)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, unix.EPERM)
	require.NoError(t, checkSealed(fd, 8192))
	require.Error(t, checkSealed(fd, 4096))

	open, err := unix.MemfdCreate("tuttifs-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	defer unix.Close(open)
	require.NoError(t, unix.Ftruncate(open, 8192))
	require.Error(t, checkSealed(open, 8192))
}

func TestMessagesCarryDescriptors(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(pair[1])
	fd, b, err := NewSharedMemory("tuttifs-test", 4096)
	require.NoError(t, err)
	defer unix.Close(fd)
	defer Unmap(b)
	require.NoError(t, sendMessage(pair[0], []byte("hello"), []int{fd}))
	got, fds, err := receiveMessage(pair[1], 16)
	require.NoError(t, err)
	require.Equal(t, "hello", string(got))
	require.Len(t, fds, 1)
	c, err := MapShared(fds[0], 4096)
	require.NoError(t, err)
	b[17] = 42
	require.Equal(t, byte(42), c[17])
	require.NoError(t, Unmap(c))
	require.NoError(t, unix.Close(fds[0]))

	require.NoError(t, sendMessage(pair[0], make([]byte, 17), nil))
	_, _, err = receiveMessage(pair[1], 16)
	require.ErrorIs(t, err, ErrMessage)
	require.NoError(t, unix.Close(pair[0]))
	_, _, err = receiveMessage(pair[1], 16)
	require.ErrorIs(t, err, ErrHangUp)
}

func TestNames(t *testing.T) {
	var f [8]byte
	require.True(t, PutName(f[:], "abc"))
	n, ok := Name(f[:])
	require.True(t, ok)
	require.Equal(t, "abc", n)
	require.True(t, PutName(f[:], "12345678"))
	n, ok = Name(f[:])
	require.True(t, ok)
	require.Equal(t, "12345678", n)
	require.False(t, PutName(f[:], "123456789"))
	copy(f[:], "a\x00b\x00\x00\x00\x00\x00")
	_, ok = Name(f[:])
	require.False(t, ok)
}

func TestView(t *testing.T) {
	arena := make([]byte, 4096)
	require.Len(t, View[Grant](arena, Span{Offset: 8, Bytes: 80}), 2)
	require.Nil(t, View[Grant](arena, Span{Offset: 4, Bytes: 80}))
	require.Nil(t, View[Grant](arena, Span{Offset: 4088, Bytes: 80}))
	require.Nil(t, View[Grant](arena, Span{Offset: 8, Bytes: ^uint64(0)}))
	require.Nil(t, View[Grant](arena, Span{Offset: ^uint64(0) &^ 7, Bytes: 80}))
	require.Equal(t, 120, int(unsafe.Sizeof(DriveEntry{})))
}

// Doorbells in a doorbell buffer lie in both of its pages, or are refused.
func TestShadows(t *testing.T) {
	a := Attachment{Queues: make([]byte, 2*SessionPageBytes), Reply: AttachReply{Drives: 1, QueueBlockBytes: 4096}}
	tail, head, err := a.Shadows(0, 0)
	require.NoError(t, err)
	require.Equal(t, [2]ShadowBell{}, [2]ShadowBell{tail, head}, "there is no buffer")
	b := make([]byte, DoorbellBufferBytes)
	a.shadows = [][]byte{b}
	pair := (*PairBells)(unsafe.Pointer(&a.Block(0, 0)[PairOffset]))
	for _, bad := range [][2]uint32{{0, 12}, {8, 0}, {9, 12}, {8, 4096}, {1 << 31, 12}} {
		pair.TailShadow, pair.HeadShadow = bad[0], bad[1]
		_, _, err := a.Shadows(0, 0)
		require.ErrorIs(t, err, ErrMessage, "%v", bad)
	}
	pair.TailShadow, pair.HeadShadow = 8, 4092
	tail, head, err = a.Shadows(0, 0)
	require.NoError(t, err)
	*tail.Doorbell, *tail.Event, *head.Doorbell, *head.Event = 1, 2, 3, 4
	require.Equal(t, []byte{1, 2, 3, 4}, []byte{b[8], b[4096+8], b[4092], b[8188]})
}

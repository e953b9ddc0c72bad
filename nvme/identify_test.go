package nvme

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseNamespaceList(t *testing.T) {
	list := func(ids ...uint32) []byte {
		b := make([]byte, 0, IdentifyBytes)
		for _, id := range ids {
			b = binary.LittleEndian.AppendUint32(b, id)
		}
		return b[:IdentifyBytes]
	}
	ids, err := ParseNamespaceList(list(1, 2, 7))
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 2, 7}, ids)
	full := make([]uint32, IdentifyBytes/4)
	for i := range full {
		full[i] = uint32(i + 1)
	}
	ids, err = ParseNamespaceList(list(full...))
	require.NoError(t, err)
	require.Equal(t, full, ids)
	for _, bad := range [][]byte{list(2, 1), list(1, 1), list(NSIDBroadcast), make([]byte, 100)} {
		_, err = ParseNamespaceList(bad)
		require.ErrorIs(t, err, ErrIdentify)
	}
}

func TestParseNamespaceNames(t *testing.T) {
	page := func(parts ...[]byte) []byte {
		b := make([]byte, 0, IdentifyBytes)
		for _, p := range parts {
			b = append(b, p...)
		}
		return b[:IdentifyBytes]
	}
	eui := []byte{NIDTEUI64, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}
	names, err := ParseNamespaceNames(page(eui, []byte{77, 2, 0, 0, 9, 9}, []byte{NIDTCSI, 1, 0, 0, 2}))
	require.NoError(t, err)
	require.Equal(t, NamespaceNames{EUI64: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}, CommandSet: 2}, names)
	_, err = ParseNamespaceNames(page([]byte{NIDTEUI64, 16, 0, 0}))
	require.ErrorIs(t, err, ErrIdentify)
	_, err = ParseNamespaceNames(make([]byte, 4095))
	require.ErrorIs(t, err, ErrIdentify)
	long := make([]byte, IdentifyBytes)
	for i := 0; i+4 < len(long); i += 104 {
		long[i], long[i+1] = 99, 100
	}
	_, err = ParseNamespaceNames(long)
	require.ErrorIs(t, err, ErrIdentify, "the last one crosses the end")
}

func TestFormatOf(t *testing.T) {
	n := IdentifyNamespace{NLBAF: 4}
	copy(n.LBAF[:], []LBAFormat{{LBADS: 9, RP: 2}, {LBADS: 12, MS: 8}, {LBADS: 12, RP: 1}, {LBADS: 12}, {LBADS: 9, RP: 1}})
	at, ok := n.FormatOf(12)
	require.True(t, ok)
	require.Equal(t, uint8(3), at)
	at, ok = n.FormatOf(9)
	require.True(t, ok)
	require.Equal(t, uint8(4), at)
	_, ok = n.FormatOf(10)
	require.False(t, ok)
}

func TestText(t *testing.T) {
	require.Equal(t, "QEMU NVMe", Text([]byte("QEMU NVMe   ")))
	require.Equal(t, "a?[31mb", Text([]byte("a\x1b[31mb \x00\x00")))
	require.Empty(t, Text(make([]byte, 20)))
}

// FuzzIdentifyPages: bytes of a drive make a value or an error, and nothing that is out of what they can hold.
func FuzzIdentifyPages(f *testing.F) {
	c := IdentifyController{SQES: 0x66, CQES: 0x44}
	b, _ := c.AppendBinary(nil)
	f.Add(b)
	n := IdentifyNamespace{NSZE: 1 << 20}
	n.SetFormats(0, 12)
	b, _ = n.AppendBinary(nil)
	f.Add(b)
	f.Add(append([]byte{NIDTNGUID, 16}, make([]byte, IdentifyBytes-2)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c IdentifyController
		if c.UnmarshalBinary(b) == nil {
			for _, s := range []string{Text(c.SN[:]), Text(c.MN[:]), Text(c.FR[:])} {
				if len(s) > 40 {
					t.Fatal("long")
				}
			}
		}
		var n IdentifyNamespace
		if n.UnmarshalBinary(b) == nil && n.NSZE != 0 {
			if shift := n.Format().LBADS; int64(n.NSZE<<shift) <= 0 {
				t.Fatal("size")
			}
			if at, ok := n.FormatOf(12); ok && at > n.NLBAF {
				t.Fatal("format")
			}
		}
		if ids, err := ParseNamespaceList(b); err == nil && len(ids) > IdentifyBytes/4 {
			t.Fatal("list")
		}
		_, _ = ParseNamespaceNames(b)
		if l, err := ParseDSMLimits(b); err == nil {
			again := bytes.Clone(b)
			if l.Put(again); !bytes.Equal(again, b) {
				t.Fatal("limits")
			}
		}
	})
}

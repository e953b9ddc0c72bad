package ioctl

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGoldenBytes pins what programs compiled years ago send and expect, byte by byte.
func TestGoldenBytes(t *testing.T) {
	pin := Pin{Header: Header{Size: 80, Version: 1, Flags: 0x0203}, Target: Target{Kind: TargetFamily, ID: 0x1122},
		Keys: Span{Offset: 0x0102030405060708, Bytes: 0x20}, Grants: Span{Offset: 0x1000, Bytes: 0x28},
		Request: 0x1122334455667788, Tenant: 7, MapGeneration: 9, Count: 1, Pools: 2}
	grant := Grant{Slot: 1, Tokens: 16, Generation: 0x0a0b0c0d, Seed: [16]byte{0xaa, 15: 0xbb}, Status: GrantPinned}
	request := NewAttachRequest(MessageAttach)
	request.Session, request.Member, request.Lanes, request.Depth, request.DMABytes = 1, 2, 4, 256, 1<<28
	request.Token[0], request.Token[15] = 0xfe, 0xef
	for _, x := range []struct {
		name string
		got  []byte
		want string
	}{
		{"pin", bytesOf(&pin), "5000000001000302" + "0200221100000000" +
			"0807060504030201" + "2000000000000000" + "0010000000000000" + "2800000000000000" +
			"8877665544332211" + "0700000000000000" + "0900000000000000" + "0100000002000000"},
		{"grant", bytesOf(&grant), "0100000010000000" + "0d0c0b0a00000000" +
			"aa000000000000000000000000" + "0000bb" + "0100000000000000"},
		{"attach request", request.Bytes(), "5455544101000100" + "7800000001000000" + "0200000004000000" +
			"0001000000000000" + "0000001000000000" + "fe0000000000000000000000000000ef" +
			hex.EncodeToString(make([]byte, 64))},
	} {
		require.Equal(t, x.want, hex.EncodeToString(x.got), x.name)
	}
}

package nvme

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseSMARTLog(t *testing.T) {
	in := SMARTLog{Used: 7, Spare: 100, DataUnitsWritten: [2]uint64{3, 0}}
	b, err := in.AppendBinary(nil)
	require.NoError(t, err)
	require.Equal(t, byte(7), b[5])
	require.Equal(t, byte(3), b[48])
	out, err := ParseSMARTLog(b)
	require.NoError(t, err)
	require.Equal(t, in, out)
	require.InDelta(t, 3*512000, out.HostBytesWritten(), 0)
	_, err = ParseSMARTLog(b[:SMARTLogBytes-1])
	require.ErrorIs(t, err, ErrLog)
	require.InEpsilon(t, 36893488147419103232+5.0, Uint128([2]uint64{5, 2}), 1e-12)
}

func TestParseOCPLog(t *testing.T) {
	in := OCPLog{MediaWritten: [2]uint64{1 << 40, 0}, Version: 3, GUID: ocpGUID}
	b, err := in.AppendBinary(nil)
	require.NoError(t, err)
	require.Equal(t, byte(3), b[494])
	require.Equal(t, byte(0xc5), b[496])
	require.Equal(t, byte(0xaf), b[511])
	out, err := ParseOCPLog(b)
	require.NoError(t, err)
	require.Equal(t, in, out)
	b[500]++
	_, err = ParseOCPLog(b)
	require.ErrorIs(t, err, ErrLog, "another vendor's page of this number")
	_, err = ParseOCPLog(b[:100])
	require.ErrorIs(t, err, ErrLog)
}

func FuzzParseLogs(f *testing.F) {
	in := OCPLog{GUID: ocpGUID}
	b, err := in.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(b)
	f.Add(make([]byte, 511))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSMARTLog(b)
		if (err == nil) != (len(b) >= SMARTLogBytes) || s.HostBytesWritten() < 0 {
			t.Fatal(err)
		}
		if l, err := ParseOCPLog(b); err == nil && l.GUID != ocpGUID {
			t.Fatal("accepted")
		}
	})
}

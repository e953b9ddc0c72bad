package nvme

import (
	"encoding/binary"
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

func TestParseErrorLog(t *testing.T) {
	var b []byte
	for _, e := range []ErrorLogEntry{{Count: 9, SQID: 3, LBA: 77}, {Count: 8}, {}} {
		b, _ = e.AppendBinary(b)
	}
	entries, err := ParseErrorLog(b)
	require.NoError(t, err)
	require.Equal(t, []ErrorLogEntry{{Count: 9, SQID: 3, LBA: 77}, {Count: 8}}, entries)
	_, err = ParseErrorLog(b[:100])
	require.ErrorIs(t, err, ErrLog)
}

// fdpConfigs is a log of one configuration with two handles, and one without.
func fdpConfigs() []byte {
	le := binary.LittleEndian
	b := make([]byte, 16+72+64)
	le.PutUint16(b, 1)
	le.PutUint32(b[4:], uint32(len(b)))
	c := b[16:]
	le.PutUint16(c, 72)
	c[2] = 0x80
	le.PutUint32(c[4:], 3)
	le.PutUint16(c[8:], 2)
	le.PutUint16(c[10:], 7)
	le.PutUint32(c[12:], 5)
	le.PutUint64(c[16:], 16<<20)
	c[64], c[68] = 1, 2
	le.PutUint16(c[72:], 64)
	return b
}

func TestParseFDP(t *testing.T) {
	configs, err := ParseFDPConfigs(fdpConfigs())
	require.NoError(t, err)
	require.Equal(t, []FDPConfig{{Valid: true, Groups: 3, Handles: 2, PlacementIDs: 8, Namespaces: 5,
		UnitBytes: 16 << 20, HandleTypes: []uint8{1, 2}}, {PlacementIDs: 1}}, configs)
	for name, spoil := range map[string]func(b []byte) []byte{
		"short":                func(b []byte) []byte { return b[:15] },
		"longer than read":     func(b []byte) []byte { return b[:len(b)-1] },
		"a third one":          func(b []byte) []byte { b[0] = 2; return b },
		"handles without room": func(b []byte) []byte { b[16+8] = 3; return b },
		"descriptor of none":   func(b []byte) []byte { b[16] = 0; return b },
		"descriptor past":      func(b []byte) []byte { b[16+72] = 65; return b },
	} {
		_, err := ParseFDPConfigs(spoil(fdpConfigs()))
		require.ErrorIs(t, err, ErrLog, name)
	}
	stats := FDPStats{HostWritten: [2]uint64{100}, MediaWritten: [2]uint64{150}}
	got, err := ParseFDPStats(wire(&stats))
	require.NoError(t, err)
	require.InDelta(t, 1.5, got.Amplification(), 1e-9)
	_, err = ParseFDPStats(make([]byte, 63))
	require.ErrorIs(t, err, ErrLog)
	require.Zero(t, new(FDPStats).Amplification())
}

func FuzzParseLogs(f *testing.F) {
	in := OCPLog{GUID: ocpGUID}
	b, err := in.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(b)
	f.Add(make([]byte, 511))
	f.Add(fdpConfigs())
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSMARTLog(b)
		if (err == nil) != (len(b) >= SMARTLogBytes) || s.HostBytesWritten() < 0 {
			t.Fatal(err)
		}
		if l, err := ParseOCPLog(b); err == nil && l.GUID != ocpGUID {
			t.Fatal("accepted")
		}
		if entries, err := ParseErrorLog(b); err == nil && len(entries) > len(b)/ErrorLogEntryBytes {
			t.Fatal("more entries than bytes")
		}
		if configs, err := ParseFDPConfigs(b); err == nil && len(configs) > len(b)/fdpConfigBytes {
			t.Fatal("more configurations than bytes")
		}
		if l, err := ParseFDPStats(b); err == nil && l.Amplification() < 0 {
			t.Fatal("amplification")
		}
	})
}

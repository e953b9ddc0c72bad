package emu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// TestChoose: a drive that answers is measured; one that does not, or fails, holds nobody up and gets a way all the
// same.
func TestChoose(t *testing.T) {
	c, err := New(Config{Drive: fileDrive(t, 16<<20)})
	require.NoError(t, err)
	held, failing := &Fault{Hold: func() bool { return false }}, &Fault{Status: uint16(nvme.UnrecoveredRead)}
	for _, test := range []struct {
		fault   *Fault
		backend []Backend
		why     string
	}{
		{nil, []Backend{URing, Pread}, "measured: 64 reads|io_uring could not be measured"},
		{held, []Backend{URing, Pread}, "not compared: .*too slow.* 0 of 64 reads|io_uring could not be measured"},
		{failing, []Backend{Pread}, "io_uring could not be measured: .*(unrecovered read error|io_uring)"},
	} {
		if test.fault != nil {
			c.SetFaults(func(*nvme.SQE) *Fault { return test.fault })
		}
		backend, why := c.compare()
		require.Contains(t, test.backend, backend)
		require.Regexp(t, test.why, why)
	}
}

package daemon

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
)

// Quotas that are named are set, taken away with 0, and stay where they are not named; a tenant keeps its name.
func TestSetQuotas(t *testing.T) {
	w := newWorld(t, gpufile.Options{}, ControlOptions{})
	ticket, err := w.volume.SetTenant(extentmap.Tenant{ID: 7, Name: "lora", QuotaBytes: 5})
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	require.NoError(t, setQuotas(w.volume, map[uint32]uint64{7: 1 << 20, 9: 3 << 20}))
	want := []extentmap.Tenant{{ID: 7, Name: "lora", QuotaBytes: 1 << 20}, {ID: 9, QuotaBytes: 3 << 20}}
	require.Equal(t, want, w.volume.Tenants())
	require.NoError(t, setQuotas(w.volume, nil))
	require.Equal(t, want, w.volume.Tenants())
	require.NoError(t, setQuotas(w.volume, map[uint32]uint64{7: 0, 9: 3 << 20}))
	require.Zero(t, w.volume.Tenants()[0].QuotaBytes)
	require.Equal(t, want[1], w.volume.Tenants()[1])
}

package daemon

import (
	"fmt"
	"maps"
	"slices"

	"tuttifs/extentmap"
)

// setQuotas gives tenants the quotas that the mount's options name. The volume keeps them, and those of tenants that
// are not named. 0: none.
func setQuotas(v *extentmap.Volume, quotas map[uint32]uint64) error {
	have := map[uint32]extentmap.Tenant{}
	for _, t := range v.Tenants() {
		have[t.ID] = t
	}
	for _, id := range slices.Sorted(maps.Keys(quotas)) {
		t := have[id]
		if t.ID, t.QuotaBytes = id, quotas[id]; t == have[id] {
			continue
		}
		ticket, err := v.SetTenant(t)
		if err == nil {
			err = ticket.Wait()
		}
		if err != nil {
			return fmt.Errorf("daemon: the quota of tenant %d (-o quota): %w", id, err)
		}
	}
	return nil
}

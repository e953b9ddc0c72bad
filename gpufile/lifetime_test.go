package gpufile

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/lifetime"
)

// The head of a chain stays longest, its end and what lies behind a window go first; and who writes is told by the
// grant and, command by command, by the lease.
func TestLifetimes(t *testing.T) {
	_, g, m := familyWorld(t)
	const files = headTokens/64 + 3
	items := chainItems(chainKeys(1, files))
	items[files-1].Tokens = 63
	grants, err := reserve(t, m, g, 0, 1, items)
	require.NoError(t, err)
	for at, gr := range grants {
		want := lifetime.Normal
		switch {
		case at/2 == files-1 || at%2 == 1:
			want = lifetime.Short
		case at/2 < files-3:
			want = lifetime.Long
		}
		require.Equal(t, want, gr.Life, "file %d of pool %d", at/2, at%2)
		d, unit, units := access(g.pools[at%2], gr.Slot, 0)
		a, ok := m.Authorize(true, d, unit, units)
		require.True(t, ok)
		require.Equal(t, want, a.Life)
		m.Complete(a, true)
	}
}

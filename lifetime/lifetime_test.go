package lifetime

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Whatever a namespace offers, no class goes to a handle that is not there, all handles that help are used, and what
// is of no class goes where the normal goes.
func TestHandles(t *testing.T) {
	for n := -1; n < 200; n++ {
		used := map[int]bool{}
		for c := range Classes {
			h := c.Handle(n)
			require.GreaterOrEqual(t, h, 0)
			require.Less(t, h, max(n, 1))
			used[h] = true
		}
		require.Len(t, used, min(max(n, 1), int(Classes)))
		require.Zero(t, Normal.Handle(n))
		require.Equal(t, Normal.Handle(n), Class(200).Handle(n), "what is no class does no harm")
	}
	require.Equal(t, Short.Handle(2), Metadata.Handle(2))
	require.NotEqual(t, Long.Handle(3), Short.Handle(3))
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for c := range Classes {
		require.NotEmpty(t, c.String())
		seen[c.String()] = true
	}
	require.Len(t, seen, int(Classes))
	require.Equal(t, "normal", Class(9).String())
}

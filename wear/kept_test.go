package wear

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKept compares with a plain list, for random calls: which block goes is the one used the longest ago that nobody
// holds, and no place is ever two blocks'.
func TestKept(t *testing.T) {
	const places = 6
	random := rand.New(rand.NewPCG(1, 2))
	k := NewKept[int](places)
	key := func(i int) KeptKey { return KeptKey{Tenant: uint32(i % 2), Key: [32]byte{byte(i)}} }
	var order []int // the last used behind
	held := map[*KeptBlock[int]]int{}
	taken := map[uint32]*KeptBlock[int]{} // places of blocks that are there, or held
	evicted := 0
	for step := range 20_000 {
		i := random.IntN(12)
		b := k.Find(key(i))
		at := slices.Index(order, i)
		require.Equal(t, at >= 0, b != nil)
		if b != nil {
			require.Equal(t, i, b.Value)
			require.Same(t, b, taken[b.Place])
		}
		switch n := random.IntN(10); {
		case b == nil && n < 6:
			goes, room := -1, len(taken) < places
			for j := 0; !room && j < len(order); j++ {
				if x := k.Find(key(order[j])); held[x] == 0 {
					goes, room = j, true
					delete(taken, x.Place)
				}
			}
			if goes >= 0 {
				order = slices.Delete(order, goes, goes+1)
				evicted++
			}
			made := k.Put(key(i), i)
			require.Equal(t, room, made != nil, "step %d", step)
			if made != nil {
				require.Less(t, made.Place, uint32(places))
				require.Nil(t, taken[made.Place])
				taken[made.Place] = made
				order = append(order, i)
			}
		case b != nil && n < 3:
			k.Use(b)
			order = append(slices.Delete(order, at, at+1), i)
		case b != nil && n < 6:
			k.Hold(b)
			held[b]++
		case b != nil && n < 7:
			k.Drop(b)
			k.Drop(b)
			order = slices.Delete(order, at, at+1)
			if held[b] == 0 {
				delete(taken, b.Place)
			}
		default:
			for x, n := range held {
				if n > 0 {
					k.Release(x)
					if held[x]--; held[x] == 0 && k.Find(x.Key) != x {
						delete(taken, x.Place)
					}
					break
				}
			}
		}
		require.Equal(t, len(order), k.Len())
		require.EqualValues(t, evicted, k.Evicted())
	}
	require.NotZero(t, evicted)
	none := NewKept[int](0)
	require.Nil(t, none.Put(key(1), 1))
}

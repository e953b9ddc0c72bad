package gpufile

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

func traceKey(id uint64) (k Key) {
	binary.LittleEndian.PutUint64(k[0:], id*0x9e3779b97f4a7c15)
	binary.LittleEndian.PutUint64(k[8:], id+1)
	binary.LittleEndian.PutUint64(k[24:], ^id)
	return k
}

// conversation reads the Mooncake conversation trace's blocks, or skips the test.
func conversation(t testing.TB) [][]uint64 {
	dir := os.Getenv("TUTTIFS_TRACES")
	if dir == "" {
		dir = filepath.Join("..", "..", "shared", "traces")
	}
	f, err := os.Open(filepath.Join(dir, "conversation_trace.jsonl"))
	if err != nil {
		t.Skipf("no trace (TUTTIFS_TRACES names its directory): %v", err)
	}
	defer f.Close()
	var requests [][]uint64
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var r struct {
			HashIDs []uint64 `json:"hash_ids"`
		}
		require.NoError(t, json.Unmarshal(in.Bytes(), &r))
		requests = append(requests, r.HashIDs)
	}
	require.NoError(t, in.Err())
	return requests
}

// synthetic makes conversations: chains that are extended again and again, with shared roots.
func synthetic(requests int) [][]uint64 {
	rng := rand.New(rand.NewPCG(1, 2))
	next := uint64(1)
	var chats [][]uint64
	var out [][]uint64
	for range requests {
		var ids []uint64
		if len(chats) > 0 && rng.IntN(4) != 0 {
			ids = chats[max(0, len(chats)-1-rng.IntN(200))]
		} else {
			ids = []uint64{0}
		}
		ids = append([]uint64(nil), ids...)
		for range 1 + rng.IntN(8) {
			ids = append(ids, next)
			next++
		}
		chats = append(chats, ids)
		out = append(out, ids)
	}
	return out
}

// replayPool runs a trace and returns hit blocks and all blocks.
func replayPool(t testing.TB, w *world, p *Pool, requests [][]uint64) (hit, all int) {
	m := w.member()
	g := w.s.GroupOfPool(p.ID())
	var keys []Key
	for i, ids := range requests {
		keys = keys[:0]
		for _, id := range ids {
			keys = append(keys, traceKey(id))
		}
		grants := make([]Grant, len(keys))
		n, err := m.Pin(g, 0, uint64(i), keys, grants)
		require.NoError(t, err)
		hit += n
		all += len(keys)
		if items := chainItems(keys); n < len(keys) {
			require.NoError(t, store(t, m, g, 0, items[n:]))
		}
		if n > 0 {
			require.NoError(t, m.Release(g, uint64(i)))
		}
	}
	m.Close()
	return hit, all
}

// lruModel is the plain count: one list, touched leaf first, evicting one for one.
func lruModel(requests [][]uint64, capacity int) (hit, all int) {
	type entry struct{ prev, next uint64 }
	const head = ^uint64(0)
	list := map[uint64]*entry{head: {head, head}}
	drop := func(id uint64) {
		e := list[id]
		list[e.prev].next, list[e.next].prev = e.next, e.prev
		delete(list, id)
	}
	for _, ids := range requests {
		all += len(ids)
		for _, id := range ids {
			if list[id] == nil {
				break
			}
			hit++
		}
		for i := len(ids) - 1; i >= 0; i-- {
			if list[ids[i]] != nil {
				drop(ids[i])
			}
			list[ids[i]] = &entry{head, list[head].next}
			list[list[head].next].prev = ids[i]
			list[head].next = ids[i]
			if len(list)-1 > capacity {
				drop(list[head].prev)
			}
		}
	}
	return hit, all
}

func replayWorld(t testing.TB, policy string, capacity int) (*world, *Pool) {
	w := newWorld(t, 4, int64(capacity)*16384*3/8+64*mib, Options{NoIO: true, Policy: policy})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = uint32(capacity) })
	return w, p
}

func TestConversationTrace(t *testing.T) {
	requests := conversation(t)
	if testing.Short() {
		t.Skip("the whole trace takes seconds")
	}
	for capacity, want := range map[int]float64{10_000: 21.2, 50_000: 35.5} {
		if raceDetector && capacity > 10_000 {
			continue
		}
		w, p := replayWorld(t, "lru", capacity)
		hit, all := replayPool(t, w, p, requests)
		require.InDelta(t, want, 100*float64(hit)/float64(all), 0.06, "%d files", capacity)
		t.Logf("%d files: %.3f %%", capacity, 100*float64(hit)/float64(all))
		require.LessOrEqual(t, p.Stats().Files, uint64(capacity))
		checkPool(t, p)
	}
}

func TestSyntheticTrace(t *testing.T) {
	requests := synthetic(3000)
	const capacity = 2000
	modelHit, _ := lruModel(requests, capacity)
	for _, policy := range Policies {
		w, p := replayWorld(t, policy, capacity)
		hit, all := replayPool(t, w, p, requests)
		t.Logf("%s: %d of %d blocks hit; plain LRU %d", policy, hit, all, modelHit)
		require.Greater(t, hit, all/4, policy)
		if policy == "lru" {
			require.InDelta(t, modelHit, hit, 0.005*float64(all))
		}
		require.EqualValues(t, capacity, p.Stats().Files, policy)
		checkPool(t, p)
	}
}

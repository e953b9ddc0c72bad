package gpufile

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/wear"
)

var propertySeeds = flag.Int("property-seeds", 2, "random histories per policy")

// model is the pool as a map: what was committed, and may since have been evicted; what was unlinked cannot come back.
type model struct {
	w       *world
	p       *Pool
	g       *Group
	m       *Member
	rng     *rand.Rand
	parents map[Key]Key
	alive   map[Key]bool     // committed by us and not seen gone
	pins    map[uint64][]Key // by request
	open    map[uint64][]ReserveItem
	chains  [][]Key
	told    *follower
}

// TestHistories plays random operations against the model, checks all invariants after each, and mounts again in
// between.
func TestHistories(t *testing.T) {
	for _, policy := range Policies {
		for seed := range *propertySeeds {
			t.Run(fmt.Sprintf("%s/%d", policy, seed), func(t *testing.T) {
				history(t, Options{Policy: policy}, uint64(seed))
			})
		}
	}
}

// TestHistoriesOfAdmission does the same where not every file is admitted.
func TestHistoriesOfAdmission(t *testing.T) {
	for _, policy := range wear.Policies[1:] {
		for seed := range (*propertySeeds + 1) / 2 {
			t.Run(fmt.Sprintf("%s/%d", policy, seed), func(t *testing.T) { history(t, admission(policy), uint64(seed)) })
		}
	}
}

func history(t *testing.T, o Options, seed uint64) {
	o.NoIO = seed%2 == 0
	w := newWorld(t, 2, 24*mib, o)
	x := &model{
		w: w, rng: rand.New(rand.NewPCG(seed, 1)), parents: make(map[Key]Key), alive: make(map[Key]bool),
		pins: make(map[uint64][]Key), open: make(map[uint64][]ReserveItem),
	}
	w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 120 })
	x.attach(t)
	for step := range 300 {
		x.step(t)
		if step%10 == 0 {
			x.check(t)
		}
		if step%100 == 99 {
			x.remount(t)
		}
	}
	x.check(t)
}

func (x *model) attach(t *testing.T) {
	x.p = x.w.s.PoolByName("a")
	x.g = x.w.s.GroupOfPool(x.p.ID())
	x.m = x.w.member()
	clear(x.pins)
	clear(x.open)
	x.told = follow(t, x.p, x.visible())
}

func (x *model) remount(t *testing.T) {
	before := x.visible()
	if x.rng.IntN(2) == 0 {
		x.w.reopen()
		x.attach(t)
		require.Equal(t, before, x.visible(), "the same files after a mount")
		checkPool(t, x.p)
		return
	}
	// The daemon dies: what was committed is there, and of what was freed a little before, some may be again.
	x.w.kill()
	x.w.open()
	x.attach(t)
	after := x.visible()
	for k := range before {
		require.True(t, after[k], "a committed file is lost")
	}
	for k := range after {
		_, committed := x.parents[k]
		require.True(t, committed)
	}
	x.alive = after
	checkPool(t, x.p)
}

func (x *model) visible() map[Key]bool {
	seen := make(map[Key]bool)
	out := make([]ListEntry, 7)
	for shard := range 256 {
		for cookie := uint64(0); ; {
			n := x.p.List(byte(shard), cookie, out)
			if n == 0 {
				break
			}
			for _, e := range out[:n] {
				if seen[e.Key] || int(e.Key[0]) != shard {
					panic("listed twice or in the wrong place")
				}
				seen[e.Key] = true
			}
			cookie = out[n-1].Cookie
		}
	}
	return seen
}

// chain returns a random chain's keys: an old one, a branch of one, or a new one.
func (x *model) chain() []Key {
	n := len(x.chains)
	if n == 0 || x.rng.IntN(4) == 0 {
		x.chains = append(x.chains, chainKeys(uint64(n), 1+x.rng.IntN(12)))
	} else if x.rng.IntN(3) == 0 {
		old := x.chains[x.rng.IntN(n)]
		cut := x.rng.IntN(len(old)) + 1
		x.chains = append(x.chains, append(append([]Key(nil), old[:cut]...), chainKeys(uint64(n), 1+x.rng.IntN(6))...))
	} else {
		return x.chains[x.rng.IntN(n)]
	}
	return x.chains[len(x.chains)-1]
}

func (x *model) step(t *testing.T) {
	keys := x.chain()
	key := keys[x.rng.IntN(len(keys))]
	switch x.rng.IntN(12) {
	case 0, 1, 2, 3:
		x.store(t, keys)
	case 4, 5, 6:
		id := nextID()
		n, err := x.m.Pin(x.g, 0, id, keys, make([]Grant, len(keys)))
		require.NoError(t, err)
		if n > 0 {
			x.pins[id] = keys[:n]
		}
	case 7, 8:
		for id := range x.pins {
			require.NoError(t, x.m.Release(x.g, id))
			delete(x.pins, id)
			break
		}
	case 9:
		_, _, found := x.p.Find(&key)
		err := x.p.Unlink(&key)
		require.Equal(t, found, err == nil)
		delete(x.alive, key)
		_, _, found = x.p.Find(&key)
		require.False(t, found)
		require.ErrorIs(t, x.p.Unlink(&key), ErrNotFound)
	case 10:
		n, err := x.p.EvictCount(x.rng.IntN(4))
		require.NoError(t, err)
		require.LessOrEqual(t, n, 3)
	case 11:
		tip := keys[len(keys)-1]
		before := x.p.Stats().Files
		n, err := x.p.EvictPrefix(&tip)
		if err != nil {
			require.ErrorIs(t, err, ErrNotFound)
		}
		require.Equal(t, before-uint64(n), x.p.Stats().Files)
	}
}

func (x *model) store(t *testing.T, keys []Key) {
	n, err := x.m.Peek(x.g, 0, keys)
	require.NoError(t, err)
	id, items := nextID(), chainItems(keys)[n:]
	if len(items) == 0 {
		return
	}
	before := x.p.Stats()
	waiting := make(map[Key]bool) // to be committed by another reservation
	for key := range x.p.pending {
		waiting[key] = true
	}
	grants, err := reserve(t, x.m, x.g, 0, id, items)
	if errors.Is(err, ErrNoSpace) {
		after := x.p.Stats()
		require.Equal(t, before.Files, after.Files, "no side effects")
		require.Equal(t, before.FilesReserved, after.FilesReserved)
		return
	}
	require.NoError(t, err)
	for i, gr := range grants {
		if parent := items[i].Parent; x.p.Admission() != wear.All && gr.Status == GrantNew && parent != (Key{}) {
			_, _, found := x.p.Find(&parent)
			reachable := found || waiting[parent] || i > 0 && grants[i-1].Status == GrantNew
			require.True(t, reachable, "nobody could hit what hangs on a file that is not there")
		}
		if gr.Status == GrantNew {
			require.NoError(t, x.m.MarkWritten(x.p, gr.Slot))
			x.parents[items[i].Key] = items[i].Parent
		}
	}
	switch x.rng.IntN(6) {
	case 0:
		require.NoError(t, x.m.Abort(x.g, id))
	case 1:
		x.open[id] = items
	default:
		x.commit(t, id, items)
	}
	if len(x.open) > 3 {
		for id, items := range x.open {
			delete(x.open, id)
			x.commit(t, id, items)
			break
		}
	}
}

func (x *model) commit(t *testing.T, id uint64, items []ReserveItem) {
	ticket, err := x.m.Commit(x.g, id, 0)
	require.NoError(t, err)
	x.w.done(ticket)
	for _, it := range items {
		x.alive[it.Key] = true
	}
}

// check compares pool and model: what is visible was committed and not unlinked, what is pinned is still there unless
// it was unlinked, and everything about a file is as it was given.
func (x *model) check(t *testing.T) {
	t.Helper()
	checkPool(t, x.p)
	st := x.p.Stats()
	require.LessOrEqual(t, st.Files+st.FilesReserved, uint64(120))
	visible := x.visible()
	x.told.check(t, visible)
	for k := range visible {
		require.True(t, x.alive[k], "a file that was unlinked or never committed")
		slot, generation, ok := x.p.Find(&k)
		require.True(t, ok)
		info, ok := x.p.Stat(slot, generation, 20)
		require.True(t, ok)
		require.Equal(t, x.parents[k], info.Parent)
	}
	for k := range x.alive {
		if !visible[k] {
			delete(x.alive, k)
		}
	}
	for id, keys := range x.pins {
		ps := x.m.ses.pins[requestKey{x.g.id, id}]
		for i, k := range keys {
			require.Equal(t, k, *x.p.m.RecordKey(ps.slots[i]), "a pinned slot keeps its file")
			n := &x.p.nodes.s[ps.slots[i]]
			require.True(t, n.is(flagVisible) != n.is(flagDoomed))
		}
	}
	sp := x.w.s.Space()
	require.Equal(t, sp.TotalBytes, sp.UsedBytes+sp.FreeBytes)
	require.Equal(t, st.BytesUsed, sp.UsedBytes)
	require.LessOrEqual(t, sp.AvailableBytes, sp.FreeBytes)
}

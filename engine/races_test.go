package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/ioctl"
)

const (
	raceChains = 12 // of three files each, in a pool of raceSlots
	raceSlots  = 16
)

// raceUser is an engine, with ids of requests that nobody else has.
type raceUser struct {
	*user
	r    *rand.Rand
	next uint64
}

func (u *raceUser) id() uint64 { u.next++; return u.next }

// TestMountRaces (invariants a, b, f, j, m): engines store the same few chains in a pool that is too small for them,
// and restore them, while files are removed, evicted, and reservations aborted. Every object that is read without an
// error has its own bytes. Some engines release their pins while the read is on its way.
func TestMountRaces(t *testing.T) {
	length := 2 * time.Second
	if s := os.Getenv("TUTTIFS_STRESS_SECONDS"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		length = time.Duration(n) * time.Second
	}
	v := newVolume(t)
	o := rankOptions
	spec := mountSpec()
	spec.MaxSlots = raceSlots
	var users []*raceUser
	for i := range 4 {
		u := &user{t: t}
		var err error
		u.mount, err = Open(v.mount())
		require.NoError(t, err)
		u.session, err = u.mount.NewSession(o)
		require.NoError(t, err)
		t.Cleanup(u.close)
		u.pool, err = u.session.OpenPool(spec)
		require.NoError(t, err)
		users = append(users, &raceUser{user: u, r: rand.New(rand.NewPCG(uint64(i), uint64(length)))})
	}
	var stored, whole, late, removed atomic.Int64
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for i, u := range users {
		wg.Go(func() {
			for time.Now().Before(end) && !t.Failed() {
				keys, items := chain(uint64(u.r.IntN(raceChains))+1, 3)
				if i < 2 {
					u.storeRace(keys, items, &stored)
				} else {
					u.readRace(keys, i == 3, &whole, &late)
				}
			}
		})
	}
	wg.Go(func() {
		for r := rand.New(rand.NewPCG(9, 9)); time.Now().Before(end); {
			time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			keys, _ := chain(uint64(r.IntN(raceChains))+1, 3)
			err := os.Remove(keyPath(v.dir, &keys[r.IntN(3)]))
			if err == nil {
				removed.Add(1)
			} else if !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	t.Logf("%d chains stored, %d read, %d reads lost their pins, %d files removed",
		stored.Load(), whole.Load(), late.Load(), removed.Load())
	stats, err := users[0].pool.Stats()
	require.NoError(t, err)
	require.Zero(t, stats.FilesReserved+stats.FilesPinned+stats.Bad)
	require.LessOrEqual(t, stats.Files, uint64(raceSlots))
}

// storeRace stores a chain of which others may have, or be storing, any part; now and then it changes its mind.
func (u *raceUser) storeRace(keys []Key, items []Item, stored *atomic.Int64) {
	grants := make([]Grant, len(items))
	id := u.id()
	n, err := u.pool.Reserve(0, id, items, false, grants)
	if errors.Is(err, ErrNoSpace) || errors.Is(err, ErrAgain) {
		return
	}
	if err != nil || n != len(items) {
		u.t.Errorf("reserve: %d, %v", n, err)
		return
	}
	var mine []Key
	var leased []Grant
	for i, g := range grants {
		if g.Slot != ioctl.NoSlot {
			mine, leased = append(mine, keys[i]), append(leased, g)
		}
	}
	if len(mine) > 0 {
		err = errors.Join(u.writeRank(0, mine, leased), u.writeRank(1, mine, leased))
	}
	switch {
	case err != nil:
		u.t.Error(err)
	case u.r.IntN(4) == 0:
		err = u.pool.Abort(id)
	default:
		if err = u.pool.CommitRanks(id, 0, 1); err == nil {
			stored.Add(1)
		}
	}
	if err != nil {
		u.t.Error(err)
	}
}

// readRace restores what is there of a chain. Who lets its pin go early may get errors, and never wrong bytes.
func (u *raceUser) readRace(keys []Key, early bool, whole, late *atomic.Int64) {
	grants := make([]Grant, len(keys))
	id := u.id()
	n, err := u.pool.Pin(0, id, keys, grants)
	if err != nil {
		u.t.Error(err)
		return
	}
	if n == 0 {
		return
	}
	// Its pin goes beside the first reads, and others have some time to take the slots before the next ones.
	released := make(chan error, 1)
	pause := time.Duration(u.r.IntN(500)) * time.Microsecond
	if early {
		go func() {
			time.Sleep(pause)
			released <- u.pool.Release(id)
		}()
	}
	err = u.readLayers(uint16(u.r.IntN(2)), keys[:n], grants[:n], func(layer uint16) {
		if early && layer > 0 {
			time.Sleep(20 * pause)
		}
	})
	if !early {
		released <- u.pool.Release(id)
	}
	if e := <-released; e != nil {
		u.t.Error(e)
	}
	switch {
	case err == nil:
		whole.Add(1)
	case early && !errors.Is(err, errWrong):
		late.Add(1)
	default:
		u.t.Error(fmt.Errorf("a pinned chain: %w", err))
	}
}

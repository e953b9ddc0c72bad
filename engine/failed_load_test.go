package engine

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/ioctl"
)

// TestFailedLoadIsNotStored (promises h, m): a step of two ranks restores a prefix of which one object is damaged, and
// has reserved what it computes from it. The rank whose load failed aborts; whether the other has committed before or
// does afterwards, it is told, and nothing of the step is stored. The damaged file is evicted and stored anew, and then
// the whole chain is right.
func TestFailedLoadIsNotStored(t *testing.T) {
	for _, other := range []string{"commits before", "commits afterwards"} {
		t.Run(other, func(t *testing.T) {
			v := newVolume(t)
			u := newUser(t, v, mountOptions, nil)
			token := u.session.Token()
			rank1 := newUser(t, v, mountOptions, &token)
			keys, items := chain(1, 8)
			const prefix, bad = 6, 2
			u.store(1, keys[:prefix], items[:prefix], true)
			v.spoil(&keys[bad], 0) // an object of rank 0

			pinned := make([]Grant, prefix)
			for _, m := range []*user{u, rank1} {
				n, err := m.pool.Pin(0, 2, keys[:prefix], pinned)
				require.NoError(t, err)
				require.Equal(t, prefix, n)
			}
			fresh := make([]Grant, len(keys)-prefix)
			for _, m := range []*user{u, rank1} {
				_, err := m.pool.Reserve(0, 3, items[prefix:], false, fresh)
				require.NoError(t, err)
			}
			require.ErrorIs(t, u.readRank(0, keys[:prefix], pinned), gio.ErrChecksum)
			require.NoError(t, rank1.readRank(1, keys[:prefix], pinned), "its objects are whole")
			require.NoError(t, u.writeRank(0, keys[prefix:], fresh))
			require.NoError(t, rank1.writeRank(1, keys[prefix:], fresh))

			// As Pool.Commit does, in two steps.
			commit := ioctl.Commit{Target: rank1.pool.target, Reserve: partID(3, 0), Rank: 1}
			if other == "commits before" {
				require.NoError(t, rank1.pool.control.verbs.Commit(&commit))
			}
			require.NoError(t, u.pool.Abort(3))
			if other == "commits before" {
				require.ErrorIs(t, rank1.pool.control.ticket(commit.Ticket), ErrNotFound)
			} else {
				require.ErrorIs(t, rank1.pool.Commit(3, 1), ErrNotFound)
			}

			require.NoError(t, u.pool.ReportBad(pinned[bad].Slot, pinned[bad].Generation))
			n, err := u.pool.Peek(0, keys)
			require.NoError(t, err)
			require.Equal(t, bad, n, "the damaged file is a miss, and what was computed from it is not there")
			for _, m := range []*user{u, rank1} {
				_ = m.pool.Release(2) // the other rank's release may have ended it
			}

			// Computed anew. What was stored behind the damaged file by an earlier step is right, and exists.
			grants := make([]Grant, len(keys)-bad)
			_, err = u.pool.Reserve(0, 4, items[bad:], false, grants)
			require.NoError(t, err)
			var again []Key
			var leased []Grant
			for i, g := range grants {
				if g.Status == ioctl.GrantNew {
					again, leased = append(again, keys[bad+i]), append(leased, g)
				}
			}
			require.Equal(t, []Key{keys[bad], keys[6], keys[7]}, again)
			for rank := range uint16(2) {
				require.NoError(t, u.writeRank(rank, again, leased))
			}
			require.NoError(t, u.pool.CommitRanks(4, 0, 1))
			u.restore(5, 0, keys, true)
			rank1.restore(6, 1, keys, true)
		})
	}
}

// spoil flips a bit of an object on the drives, under the mount.
func (v *volume) spoil(key *Key, object uint16) {
	v.t.Helper()
	spec := mountSpec()
	want := make([]byte, spec.Geometry.Objects[object].Bytes())
	content(want, key, object)
	for i := range 3 {
		name := filepath.Join(v.dir, fmt.Sprintf("drive%d", i))
		image, err := os.ReadFile(name)
		require.NoError(v.t, err)
		at := bytes.Index(image, want)
		if at < 0 {
			continue
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		require.NoError(v.t, err)
		_, err = f.WriteAt([]byte{want[0] ^ 4}, int64(at))
		require.NoError(v.t, err)
		require.NoError(v.t, f.Sync())
		require.NoError(v.t, f.Close())
		return
	}
	require.Fail(v.t, "the object is on no drive")
}

package gpufile

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
)

// follower holds what it has been told of a pool: the files that were there when it began, and every change since.
type follower struct {
	p     *Pool
	next  uint64
	files map[Key]bool
}

// follow begins with files, which are there already.
func follow(t *testing.T, p *Pool, files map[Key]bool) *follower {
	n, next, lost, err := p.Changes(0, make([]Change, 1))
	require.NoError(t, err)
	require.Zero(t, n)
	require.Zero(t, lost)
	f := &follower{p: p, next: next, files: make(map[Key]bool)}
	for k := range files {
		f.files[k] = true
	}
	return f
}

// check reads on to the end: a file is stored when it was not there, and removed when it was; what is left is what is
// visible.
func (f *follower) check(t *testing.T, visible map[Key]bool) {
	t.Helper()
	out := make([]Change, 3)
	for {
		n, next, lost, err := f.p.Changes(f.next, out)
		require.NoError(t, err)
		require.Zero(t, lost)
		require.Equal(t, f.next+uint64(n), next)
		if n == 0 {
			break
		}
		f.next = next
		for _, c := range out[:n] {
			require.Equal(t, c.Removed, f.files[c.Key], "a change that is none")
			if c.Removed {
				delete(f.files, c.Key)
			} else {
				f.files[c.Key] = true
			}
		}
	}
	require.Equal(t, visible, f.files)
}

// TestChangesOfTenants: a change has the tenant whose file it is.
func TestChangesOfTenants(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	g, m := w.s.GroupOfPool(p.ID()), w.member()
	f := follow(t, p, nil)
	key := chainKeys(1, 1)
	require.NoError(t, store(t, m, g, 7, chainItems(key)))
	require.NoError(t, p.Unlink(&key[0]))
	out := make([]Change, 5)
	n, _, _, err := p.Changes(f.next, out)
	require.NoError(t, err)
	require.Equal(t, []Change{{Key: key[0], Tenant: 7}, {Key: key[0], Tenant: 7, Removed: true}}, out[:n])
}

// TestChangesAreLost: who is too far behind is told how much is missing, and goes on with the oldest that is kept.
func TestChangesAreLost(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) { s.MaxSlots = 40 })
	f := follow(t, p, nil)
	p.mu.Lock()
	for i := range uint64(ChangesKept + 5) {
		key := Key{byte(i), byte(i >> 8), byte(i >> 16)}
		p.changes.note(&key, 0, false)
	}
	p.mu.Unlock()
	out := make([]Change, 2)
	n, next, lost, err := p.Changes(f.next, out)
	require.NoError(t, err)
	require.Equal(t, []any{2, uint64(5), f.next + 7}, []any{n, lost, next})
	require.Equal(t, []Key{{5}, {6}}, []Key{out[0].Key, out[1].Key})
	_, next, lost, err = p.Changes(next, make([]Change, ChangesKept))
	require.NoError(t, err)
	require.Equal(t, []uint64{f.next + ChangesKept + 5, 0}, []uint64{next, lost})
	for _, since := range []uint64{next + 1, ^uint64(0)} {
		_, _, _, err = p.Changes(since, out)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

// TestChangesOfAPoolThatNobodyFollows: they are not kept, and no number but 0 is one of them.
func TestChangesOfAPoolThatNobodyFollows(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{NoIO: true})
	p := w.pool("a", 1, nil)
	require.NoError(t, store(t, w.member(), w.s.GroupOfPool(p.ID()), 0, chainItems(chainKeys(1, 3))))
	require.Nil(t, p.changes.ring)
	_, _, _, err := p.Changes(1, make([]Change, 1))
	require.ErrorIs(t, err, ErrInvalid)
	_, next, _, err := p.Changes(0, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, next)
}

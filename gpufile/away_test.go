package gpufile

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

var errBroken = errors.New("broken")

// twoByTwo is a world of four drives in rows of two.
func twoByTwo(t *testing.T) *world {
	w := &world{t: t, clock: time.Unix(1_700_000_000, 0)}
	for i := range 4 {
		d, err := drive.NewMemory(fmt.Sprintf("mem%d", i), 16*mib)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		w.drives = append(w.drives, d)
	}
	_, err := extentmap.Format(w.drives, extentmap.FormatOptions{Width: 2})
	require.NoError(t, err)
	w.open()
	t.Cleanup(w.close)
	return w
}

func peek(t *testing.T, m *Member, g *Group, keys []Key) int {
	t.Helper()
	n, err := m.Peek(g, 0, keys)
	require.NoError(t, err)
	return n
}

// onDrive stores chains of one file until one lies on a row with the drive and one on a row without.
func onDrive(t *testing.T, w *world, p *Pool, m *Member, index uint16) (with, without []Key) {
	g := w.s.GroupOfPool(p.ID())
	for chain := uint64(1); len(with) == 0 || len(without) == 0; chain++ {
		keys := chainKeys(chain, 1)
		require.NoError(t, store(t, m, g, 0, chainItems(keys)))
		slot, _, ok := p.Find(&keys[0])
		require.True(t, ok)
		to := &without
		for _, r := range p.m.Rows() {
			if r.Number == slot/p.m.SlotsPerRow() && (r.Drives[0] == index || r.Drives[1] == index) {
				to = &with
			}
		}
		*to = append(*to, keys[0])
	}
	return with, without
}

func setOf(lists ...[]Key) map[Key]bool {
	all := make(map[Key]bool)
	for _, list := range lists {
		for _, k := range list {
			all[k] = true
		}
	}
	return all
}

// A lost drive takes its files along, and only these; nothing of them is freed. They are back when the drive is.
func TestLostDrive(t *testing.T) {
	w := twoByTwo(t)
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	with, without := onDrive(t, w, p, m, 0)
	files := p.Stats().Files
	told := follow(t, p, setOf(with, without))
	_, err := m.Pin(g, 0, 77, with[:1], make([]Grant, 1))
	require.NoError(t, err)
	require.NoError(t, w.v.LoseDrive(0, errBroken))
	require.Eventually(t, func() bool { return p.Stats().FilesAway == uint64(len(with)) }, 10*time.Second,
		time.Millisecond)
	checkPool(t, p)
	for i := range with {
		require.Zero(t, peek(t, m, g, with[i:i+1]))
	}
	for i := range without {
		require.Equal(t, 1, peek(t, m, g, without[i:i+1]))
	}
	require.EqualValues(t, files-uint64(len(with)), p.Stats().Files)
	require.Zero(t, p.Stats().Evicted)
	told.check(t, setOf(without))
	// One of the lost is stored again, elsewhere.
	again := with[len(with)-1:]
	require.NoError(t, store(t, m, g, 0, chainItems(again)))
	require.Equal(t, 1, peek(t, m, g, again))
	if len(with) > 1 {
		require.NoError(t, m.Release(g, 77))
	}
	_, err = w.v.AddDrive(keepOpen{w.drives[0]}, extentmap.AddOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.Stats().FilesAway == 0 }, 10*time.Second, time.Millisecond)
	for i := range with {
		require.Equal(t, 1, peek(t, m, g, with[i:i+1]))
	}
	require.EqualValues(t, files, p.Stats().Files, "the older of the two went")
	told.check(t, setOf(with, without))
	require.NoError(t, w.done2(p))
	checkPool(t, p)
	w.reopen()
	require.EqualValues(t, files, w.s.Pools()[0].Stats().Files)
	checkPool(t, w.s.Pools()[0])
}

// done2 waits until nothing of a pool is on its way to be freed.
func (w *world) done2(p *Pool) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, freeing, _ := p.m.Counts(); freeing == 0 {
			return nil
		}
		if time.Now().After(end) {
			return errors.New("slots are not freed")
		}
	}
}

// Forgetting a drive waits for those who read from it, and then its files are gone and its rows too.
func TestForgetDrive(t *testing.T) {
	w := twoByTwo(t)
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	with, without := onDrive(t, w, p, m, 1)
	_, err := m.Pin(g, 0, 77, with[:1], make([]Grant, 1))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, w.s.ForgetDrive(ctx, 1), ErrAgain, "a reader is there")
	require.Zero(t, peek(t, m, g, with[:1]), "a miss at once")
	require.NoError(t, m.Release(g, 77))
	require.NoError(t, w.s.ForgetDrive(t.Context(), 1))
	require.Empty(t, p.m.RowsOn(1))
	require.Zero(t, p.Stats().FilesAway)
	require.EqualValues(t, len(without), p.Stats().Files)
	require.Len(t, w.v.Info().Drives, 3)
	for i := range without {
		require.Equal(t, 1, peek(t, m, g, without[i:i+1]))
	}
	checkPool(t, p)
	require.NoError(t, store(t, m, g, 0, chainItems(with)), "rows are made of what is left")
	w.drives = append(w.drives[:1:1], w.drives[2:]...)
	w.reopen()
	require.EqualValues(t, len(with)+len(without), w.s.Pools()[0].Stats().Files)
}

// What a drive does not give is a miss, and is not evicted.
func TestReportUnreadable(t *testing.T) {
	w := newWorld(t, 2, 64*mib, Options{})
	p := w.pool("a", 1, nil)
	g := w.s.GroupOfPool(p.ID())
	m := w.member()
	keys := chainKeys(1, 3)
	require.NoError(t, store(t, m, g, 0, chainItems(keys)))
	slot, generation, _ := p.Find(&keys[1])
	w.s.SetVerifier(func(*Pool, uint32, checksum.Seed) Verdict { return Unreadable })
	ticket, err := m.ReportBad(p, slot, generation)
	require.NoError(t, err)
	w.done(ticket)
	require.Equal(t, 1, peek(t, m, g, keys))
	st := p.Stats()
	require.EqualValues(t, 1, st.Unreadable)
	require.EqualValues(t, 1, st.FilesAway)
	require.EqualValues(t, 2, st.Files)
	require.Zero(t, st.Bad+st.Doomed)
	require.True(t, p.m.IsCommitted(slot))
	checkPool(t, p)
	w.reopen()
	require.EqualValues(t, 3, w.s.Pools()[0].Stats().Files, "tried anew")
}

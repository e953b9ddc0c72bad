package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/gio"
	"tuttifs/stripe"
)

const (
	manyFiles       = 100_000
	manyBatch       = 1000 // files of a chain
	manyDescriptors = 256  // that the daemon and the engine may have
	manyRead        = 50   // files of a chain that are read through the mount
	manyBytes       = 4000 // of a file's only object
	manyFileMost    = 400  // bytes of the daemon's memory for a file
	manySlack       = 64 << 20
)

// TestManyFiles (promises i, k): with 256 descriptors for the daemon and as many for the engine, a hundred thousand
// files are stored, restored, listed and read through the mount; some are removed and stored again. Neither has more
// descriptors in the end than after the first chain, and the daemon's memory grows by what their index takes.
// The daemon's CPU time for the first and the last chains is in the log: it stays the same.
func TestManyFiles(t *testing.T) {
	files := manyFiles
	if raceDetector {
		files /= 10
	}
	v := newVolumeIn(t, "", (int64(files)*2*stripe.UnitBytes*2/3+(64<<20))&^(stripe.UnitBytes-1), "")
	few := unix.Rlimit{Cur: manyDescriptors, Max: manyDescriptors}
	require.NoError(t, unix.Prlimit(v.cmd.Process.Pid, unix.RLIMIT_NOFILE, &few, nil))
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: manyDescriptors, Max: before.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()

	m := newManyUser(t, v)
	chains := files / manyBatch
	m.phase("store", chains, m.storeChain)
	m.phase("restore", chains, m.restoreChain)
	m.listAll(files)
	m.phase("read", chains, m.readFiles)
	again := chains / 10
	m.phase("remove and store", again, func(n int) {
		m.removeChain(n)
		m.storeChain(n)
	})
	stats, err := m.pool.Stats()
	require.NoError(t, err)
	require.Zero(t, stats.FilesPinned+stats.FilesReserved+stats.Bad+stats.Evicted)
	require.EqualValues(t, files, stats.Files)
	require.EqualValues(t, files+again*manyBatch, stats.Commits)
}

// manyUser is an engine with a pool of files of one small object.
type manyUser struct {
	*user
	v        *volume
	memory   *gio.Memory
	buf      []byte
	desc     []uint64
	grants   []Grant
	requests uint64
}

func newManyUser(t *testing.T, v *volume) *manyUser {
	u := &user{t: t}
	var err error
	u.mount, err = Open(v.mount())
	require.NoError(t, err)
	u.session, err = u.mount.NewSession(SessionOptions{Lanes: 2, DMABytes: 16 << 20})
	require.NoError(t, err)
	t.Cleanup(u.close)
	run := []stripe.Run{{Kind: stripe.RunKV, Bytes: manyBytes}}
	u.pool, err = u.session.OpenPool(PoolSpec{Name: "many", TokensPerFile: 16,
		Identity: []byte(strings.Replace(mountIdentity, `"tp":2`, `"tp":1`, 1)),
		Geometry: stripe.Geometry{Objects: []stripe.Object{{Runs: run}}}})
	require.NoError(t, err)
	m := &manyUser{user: u, v: v, grants: make([]Grant, manyBatch), buf: u.session.DMA()[:manyBatch*stripe.UnitBytes]}
	m.memory, err = u.session.Ring().RegisterPadded(m.buf)
	require.NoError(t, err)
	for i := range manyBatch {
		m.desc = append(m.desc, m.memory.Desc(i*stripe.UnitBytes))
	}
	return m
}

// phase does something to so many chains and sees that nothing grows with their number but the index.
func (m *manyUser) phase(name string, chains int, each func(n int)) {
	m.t.Helper()
	var first manyHeld
	begin, tenth := m.held(), max(1, chains/10)
	var spent []int64
	for n := range chains {
		each(n)
		if n == 0 {
			first = m.held()
		}
		if (n+1)%tenth == 0 {
			m.stays(first, name, n)
			now := m.held()
			spent = append(spent, now.ticks-begin.ticks)
			begin = now
		}
	}
	last := m.held()
	most := int64(chains*manyBatch*manyFileMost) + manySlack
	require.Less(m.t, last.bytes-first.bytes, most, "%s: the daemon's memory", name)
	m.t.Logf("%s: the daemon went from %+v to %+v; its CPU time by tenths, in 10 ms: %v", name, first, last, spent)
}

// manyHeld is what daemon and engine hold, and the CPU time that the daemon has had.
type manyHeld struct {
	descriptors, threads, own int
	bytes, ticks              int64
}

func (m *manyUser) held() (h manyHeld) {
	h.descriptors, _ = m.v.holds()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", m.v.cmd.Process.Pid))
	require.NoError(m.t, err)
	h.threads = len(tasks)
	own, err := os.ReadDir("/proc/self/fd")
	require.NoError(m.t, err)
	h.own = len(own)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.v.cmd.Process.Pid))
	require.NoError(m.t, err)
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	_, err = fmt.Sscan(rest, &h.bytes)
	require.NoError(m.t, err)
	h.bytes <<= 10
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.v.cmd.Process.Pid))
	require.NoError(m.t, err)
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // from the third on
	require.Greater(m.t, len(fields), 12)
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		require.NoError(m.t, err)
		h.ticks += n
	}
	return h
}

// stays: what a mount has open when it rests is what it had open at first. The kernel lets go of some things late.
func (m *manyUser) stays(first manyHeld, phase string, n int) {
	m.t.Helper()
	var now manyHeld
	settled := func() bool {
		now = m.held()
		return now.descriptors <= first.descriptors && now.own <= first.own
	}
	for end := time.Now().Add(settleMax); !settled(); time.Sleep(time.Millisecond) {
		require.True(m.t, time.Now().Before(end), "%s: %+v at first, %+v after chain %d", phase, first, now, n)
	}
	require.Less(m.t, now.threads, threadsMost)
}

func (m *manyUser) chain(n int) ([]Key, []Item) {
	keys, items := chain(uint64(n)+1, manyBatch)
	for i := range keys { // spread over all directories, as hashes are
		k := &keys[i]
		binary.BigEndian.PutUint64(k[16:], uint64(n*manyBatch+i))
		k[0], k[31] = byte(i), k[0]
		items[i].Key = *k
		if i > 0 {
			items[i].Parent = keys[i-1]
		}
	}
	return keys, items
}

func (m *manyUser) object(i int) []byte { return m.buf[i*stripe.UnitBytes:][:manyBytes] }

func (m *manyUser) storeChain(n int) {
	keys, items := m.chain(n)
	m.requests++
	id := m.requests
	got, err := m.pool.Reserve(0, id, items, false, m.grants)
	require.NoError(m.t, err)
	require.Equal(m.t, manyBatch, got)
	l, err := m.session.Ring().CreateLayers(m.pool.Map(), 0, slotsOf(m.grants))
	require.NoError(m.t, err)
	defer l.Close()
	for i := range keys {
		content(m.object(i), &keys[i], 0)
	}
	ticket, err := l.StoreLayer(0, m.desc)
	require.NoError(m.t, err)
	require.NoError(m.t, ticket.Wait())
	require.NoError(m.t, l.Finish())
	require.NoError(m.t, m.pool.Commit(id, 0))
}

func (m *manyUser) restoreChain(n int) {
	keys, _ := m.chain(n)
	m.requests++
	id := m.requests
	got, err := m.pool.Pin(0, id, keys, m.grants)
	require.NoError(m.t, err)
	require.Equal(m.t, manyBatch, got)
	l, err := m.session.Ring().OpenLayers(m.pool.Map(), 0, slotsOf(m.grants))
	require.NoError(m.t, err)
	defer l.Close()
	clear(m.buf)
	ticket, err := l.RetrieveLayer(0, m.desc)
	require.NoError(m.t, err)
	require.NoError(m.t, ticket.Wait())
	require.NoError(m.t, errors.Join(l.Failed()...))
	want := make([]byte, manyBytes)
	for i := range keys {
		content(want, &keys[i], 0)
		require.True(m.t, bytes.Equal(want, m.object(i)), "chain %d, file %d", n, i)
	}
	require.NoError(m.t, m.pool.Release(id))
}

func (m *manyUser) path(key *Key) string {
	return filepath.Join(m.v.mount(), "many", "blocks", fmt.Sprintf("%02x", key[0]), fmt.Sprintf("%x", key[:]))
}

// readFiles reads some files of a chain through the mount.
func (m *manyUser) readFiles(n int) {
	keys, _ := m.chain(n)
	want := make([]byte, manyBytes)
	for i := 0; i < manyBatch; i += manyBatch / manyRead {
		got, err := os.ReadFile(m.path(&keys[i]))
		require.NoError(m.t, err)
		content(want, &keys[i], 0)
		require.True(m.t, bytes.Equal(want, got), "chain %d, file %d", n, i)
	}
}

func (m *manyUser) removeChain(n int) {
	keys, _ := m.chain(n)
	for i := range keys {
		require.NoError(m.t, os.Remove(m.path(&keys[i])))
	}
}

// listAll counts the names of all directories; a few at a time, as an open directory gives them.
func (m *manyUser) listAll(files int) {
	total := 0
	for shard := range 256 {
		d, err := os.Open(filepath.Join(m.v.mount(), "many", "blocks", fmt.Sprintf("%02x", shard)))
		require.NoError(m.t, err)
		for err == nil {
			var names []string
			names, err = d.Readdirnames(100)
			total += len(names)
		}
		require.ErrorIs(m.t, err, io.EOF)
		require.NoError(m.t, d.Close())
	}
	require.Equal(m.t, files, total)
}

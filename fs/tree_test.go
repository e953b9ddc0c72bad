package fs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"

	"tuttifs/gpufile"
)

// newTestTree is a tree with one pool of small odd objects, called without a kernel.
func newTestTree(t testing.TB, o Options) (*tree, *fakePool, *fakeBackend) {
	if o.Logf == nil {
		o.Logf = func(string, ...any) {}
	}
	p := newFakePool(t, 3, "llama", smallGeometry())
	b := &fakeBackend{list: []*fakePool{p}}
	tr := newTree(b, o)
	t.Cleanup(tr.OnUnmount)
	return tr, p, b
}

func header(n nodeID) fuse.InHeader {
	return fuse.InHeader{NodeId: uint64(n), Caller: fuse.Caller{Pid: 77}}
}

// walk looks a path up, name by name.
func walk(t *tree, names ...string) (fuse.EntryOut, fuse.Status) {
	out := fuse.EntryOut{NodeId: uint64(nodeRoot)}
	for _, name := range names {
		h := header(nodeID(out.NodeId))
		out = fuse.EntryOut{}
		if st := t.Lookup(nil, &h, name, &out); st != fuse.OK {
			return out, st
		}
	}
	return out, fuse.OK
}

func mustWalk(t testing.TB, tr *tree, names ...string) nodeID {
	t.Helper()
	out, st := walk(tr, names...)
	require.Equal(t, fuse.OK, st, "%v", names)
	return nodeID(out.NodeId)
}

func blockPath(k gpufile.Key) []string {
	return []string{"llama", "blocks", shardName(k[0]), keyName(&k)}
}

// addFile stores a file straight into the pool.
func addFile(t testing.TB, p *fakePool, key, parent gpufile.Key, seed int) []byte {
	payload := testPayload(p.size(), seed)
	_, err := p.add(gpufile.ReserveItem{Key: key, Parent: parent, Tokens: 64}, 0, payload)
	require.NoError(t, err)
	return payload
}

func TestNodeIDs(t *testing.T) {
	for range 1000 {
		kind, pool := nodeKind(rand.IntN(5)), rand.IntN(poolsMax)
		generation, slot := rand.Uint64(), rand.Uint32()
		n := makeNode(kind, pool, generation, slot)
		require.Equal(t, kind, n.kind())
		require.Equal(t, pool, n.pool())
		require.Equal(t, generation&genMask, n.generation())
		require.Equal(t, slot, n.slot())
	}
	require.Equal(t, kindFixed, nodeRoot.kind())
	require.True(t, (nodeUpload + 5).upload())
	require.False(t, (nodeText + 5).upload())
	require.NotEqual(t, ^nodeID(0), makeNode(kindLink, poolsMax-1, ^uint64(0), ^uint32(0)), "reserved by go-fuse")
}

func TestWalk(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{UID: 5, GID: 6, Status: []StatusFile{{"version",
		func() []byte { return []byte("1\n") }}}})
	key := testKey(0xab, 1)
	addFile(t, p, key, gpufile.Key{}, 1)
	other := testKey(0xab, 2)

	for _, path := range [][]string{
		{".tuttifs"}, {".tuttifs", "version"}, {".tuttifs", "control"}, {"llama"}, {"llama", "identity.json"},
		{"llama", "blocks"}, {"llama", "blocks", "00"}, {"llama", "blocks", "ff"}, blockPath(key),
		{"llama", "prefixes"}, {"llama", "prefixes", keyName(&key)},
		{"llama", "prefixes", keyName(&key), linkName(0, &key)},
	} {
		out, st := walk(tr, path...)
		require.Equal(t, fuse.OK, st, "%v", path)
		require.Equal(t, out.NodeId, out.Ino)
		require.Equal(t, fuse.Owner{Uid: 5, Gid: 6}, out.Owner)
		h := header(nodeID(out.NodeId))
		var attr fuse.AttrOut
		require.Equal(t, fuse.OK, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: h}, &attr))
		if out.AttrValid != 0 { // /.tuttifs/* carry the time of the question
			require.Equal(t, out.Attr, attr.Attr, "%v", path)
		}
	}
	for _, path := range [][]string{
		{"nobody"}, {"llama", "x"}, {"llama", ""}, {"llama", "blocks", "0"}, {"llama", "blocks", "AB"},
		{"llama", "blocks", "0g"},
		{"llama", "blocks", "000"}, blockPath(other), {"llama", "blocks", "ac", keyName(&key)},
		{"llama", "blocks", "ab", keyName(&key) + "0"}, {"llama", "prefixes", keyName(&other)}, {".tuttifs", "stats"},
		{"llama", "prefixes", keyName(&key), linkName(1, &key)}, {"llama", "prefixes", keyName(&key),
			linkName(0, &other)},
		{"llama", "prefixes", keyName(&key), "0_" + keyName(&key)},
	} {
		_, st := walk(tr, path...)
		require.Equal(t, fuse.ENOENT, st, "%v", path)
	}
	h := header(mustWalk(t, tr, "llama", "blocks"))
	require.Equal(t, eNAME, tr.Lookup(nil, &h, string(make([]byte, 256)), &fuse.EntryOut{}))
	h = header(mustWalk(t, tr, "llama", "identity.json"))
	require.NotEqual(t, fuse.OK, tr.Lookup(nil, &h, "x", &fuse.EntryOut{}))
}

func TestNewPoolsAppear(t *testing.T) {
	tr, _, b := newTestTree(t, Options{})
	_, st := walk(tr, "qwen", "blocks")
	require.Equal(t, fuse.ENOENT, st)
	b.list = append([]*fakePool{newFakePool(t, 1, "qwen", smallGeometry())}, b.list...)
	first := mustWalk(t, tr, "llama")
	mustWalk(t, tr, "qwen", "blocks")
	require.Equal(t, first, mustWalk(t, tr, "llama"), "a pool keeps its number")
	names, _ := listAll(t, tr, nodeRoot, 4096, false)
	require.Equal(t, []string{".", "..", "llama", "qwen"}, names)
}

func TestAttributes(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(1, 1)
	addFile(t, p, key, gpufile.Key{}, 1)
	out, _ := walk(tr, blockPath(key)...)
	require.EqualValues(t, syscall.S_IFREG|0o600, out.Mode)
	require.EqualValues(t, p.size(), out.Size)
	require.EqualValues(t, p.layout.SlotUnits()*8, out.Blocks)
	require.EqualValues(t, 1, out.Nlink)
	require.EqualValues(t, fakeStart.Unix(), out.Mtime)
	require.Equal(t, out.Mtime, out.Atime, "never hit")
	require.Equal(t, time.Second, out.EntryTimeout())
	require.Equal(t, time.Second, out.AttrTimeout())
	p.files[0].info.LastHit = 1_800_000_000
	out, _ = walk(tr, blockPath(key)...)
	require.EqualValues(t, 1_800_000_000, out.Atime)

	out, _ = walk(tr, "llama", "prefixes", keyName(&key))
	require.EqualValues(t, syscall.S_IFDIR|0o700, out.Mode)
	out, _ = walk(tr, "llama", "prefixes", keyName(&key), linkName(0, &key))
	require.EqualValues(t, syscall.S_IFLNK|0o777, out.Mode)
	h := header(nodeID(out.NodeId))
	target, st := tr.Readlink(nil, &h)
	require.Equal(t, fuse.OK, st)
	require.Equal(t, "../../blocks/01/"+keyName(&key), string(target))
	require.EqualValues(t, len(target), out.Size)

	open, _, _ := newTestTree(t, Options{Umask: UmaskNone, AttrTimeout: -1, EntryTimeout: time.Minute})
	out, _ = walk(open, "llama", "blocks")
	require.EqualValues(t, syscall.S_IFDIR|0o777, out.Mode)
	require.Zero(t, out.AttrTimeout())
	require.Equal(t, time.Minute, out.EntryTimeout())
}

// A node id outlives its file; the slot's next file must not be taken for it.
func TestStaleNode(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	old, next := testKey(9, 1), testKey(9, 2)
	addFile(t, p, old, gpufile.Key{}, 1)
	n := mustWalk(t, tr, blockPath(old)...)
	require.NoError(t, p.Unlink(&old))
	addFile(t, p, next, gpufile.Key{}, 2)
	m := mustWalk(t, tr, blockPath(next)...)
	require.Equal(t, n.slot(), m.slot(), "the slot is reused")
	require.NotEqual(t, n, m)

	h := header(n)
	require.Equal(t, eSTALE, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: h}, &fuse.AttrOut{}))
	require.Equal(t, eSTALE, tr.Open(nil, &fuse.OpenIn{InHeader: h}, &fuse.OpenOut{}))
	_, st := tr.GetXAttr(nil, &h, "user.tuttifs.key", make([]byte, 100))
	require.Equal(t, eSTALE, st)
	// Node ids that nobody gave out.
	for _, n := range []nodeID{nodeText + 99, nodeUpload + 99, makeNode(kindPool, 1000, 0, 0),
		makeNode(kindBlock, 1000, 0, 0),
		makeNode(kindPool, 0, 0, 99), makeNode(kindBlock, 0, 0, 1<<31), makeNode(7, 0, 0, 0)} {
		h := header(n)
		require.Equal(t, eSTALE, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: h}, &fuse.AttrOut{}), "%x", n)
		require.NotEqual(t, fuse.OK, tr.Open(nil, &fuse.OpenIn{InHeader: h}, &fuse.OpenOut{}), "%x", n)
		require.NotEqual(t, fuse.OK, tr.OpenDir(nil, &fuse.OpenIn{InHeader: h}, &fuse.OpenOut{}), "%x", n)
	}
}

// listAll reads a directory to its end in replies of size bytes.
func listAll(t testing.TB, tr *tree, dir nodeID, size int, plus bool) (names []string, entries []fuse.EntryOut) {
	t.Helper()
	var open fuse.OpenOut
	require.Equal(t, fuse.OK, tr.OpenDir(nil, &fuse.OpenIn{InHeader: header(dir)}, &open))
	defer tr.ReleaseDir(&fuse.ReleaseIn{Fh: open.Fh})
	buf := make([]byte, size)
	for off := uint64(0); ; {
		list := fuse.NewDirEntryList(buf, off)
		in := &fuse.ReadIn{InHeader: header(dir), Fh: open.Fh, Offset: off, Size: uint32(size)}
		var got []fuse.DirEntry
		var outs []fuse.EntryOut
		var err error
		if plus {
			require.Equal(t, fuse.OK, tr.ReadDirPlus(nil, in, list))
			got, outs, err = fuse.ParseDirLookupEntries(list.Bytes())
		} else {
			require.Equal(t, fuse.OK, tr.ReadDir(nil, in, list))
			got, err = fuse.ParseDirEntries(list.Bytes())
		}
		require.NoError(t, err)
		if len(got) == 0 {
			return names, entries
		}
		for _, e := range got {
			require.Greater(t, e.Off, off, "offsets ascend")
			require.LessOrEqual(t, e.Off, uint64(1)<<63-1)
			off = e.Off
			names = append(names, e.Name)
		}
		entries = append(entries, outs...)
	}
}

func TestListing(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{Status: []StatusFile{{"a", nil}, {"b", nil}}})
	var keys []string
	parent := gpufile.Key{}
	for i := range 1000 {
		k := testKey(0x42, i)
		addFile(t, p, k, parent, i)
		if i < 20 {
			parent = k
		}
		keys = append(keys, keyName(&k))
	}
	blocks := mustWalk(t, tr, "llama", "blocks", "42")
	for _, plus := range []bool{false, true} {
		for _, size := range []int{300, 1000, 4096, 32 << 10, 1 << 20} {
			names, entries := listAll(t, tr, blocks, size, plus)
			require.Equal(t, append([]string{".", ".."}, keys...), names, "size %d plus %v", size, plus)
			for i, e := range entries {
				if i < 2 {
					require.Zero(t, e.NodeId)
					continue
				}
				want, _ := walk(tr, "llama", "blocks", "42", names[i])
				require.Equal(t, want, e)
			}
		}
	}
	names, _ := listAll(t, tr, mustWalk(t, tr, "llama", "prefixes"), 4096, true)
	require.Len(t, names, 2+1000-20, "tips only")
	chain, entries := listAll(t, tr, mustWalk(t, tr, "llama", "prefixes", keys[20]), 1000, true)
	require.Len(t, chain, 2+21)
	for i, name := range chain[2:] {
		require.Equal(t, fmt.Sprintf("%05d_%s", i, keys[i]), name)
		want, _ := walk(tr, "llama", "prefixes", keys[20], name)
		require.Equal(t, want, entries[i+2])
	}
	shards, _ := listAll(t, tr, mustWalk(t, tr, "llama", "blocks"), 500, true)
	require.Len(t, shards, 2+256)
	top, _ := listAll(t, tr, mustWalk(t, tr, "llama"), 4096, false)
	require.Equal(t, []string{".", "..", "blocks", "prefixes", "identity.json"}, top)
	root, _ := listAll(t, tr, nodeRoot, 4096, false)
	require.Equal(t, []string{".", "..", "llama"}, root, ".tuttifs is not listed")
	status, _ := listAll(t, tr, nodeStatus, 4096, false)
	require.Equal(t, []string{".", "..", "a", "b", "control"}, status)
}

// Files that are there throughout are listed exactly once, whatever comes and goes between two replies.
func TestListingWhileChanging(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	stay := make(map[string]int)
	var leave []gpufile.Key
	for i := range 600 {
		k := testKey(7, i)
		addFile(t, p, k, gpufile.Key{}, i)
		if i%3 == 0 {
			leave = append(leave, k)
		} else {
			stay[keyName(&k)] = 0
		}
	}
	dir := mustWalk(t, tr, "llama", "blocks", "07")
	var open fuse.OpenOut
	require.Equal(t, fuse.OK, tr.OpenDir(nil, &fuse.OpenIn{InHeader: header(dir)}, &open))
	for off, next := uint64(0), 1000; ; next++ {
		list := fuse.NewDirEntryList(make([]byte, 2000), off)
		in := &fuse.ReadIn{InHeader: header(dir), Fh: open.Fh, Offset: off, Size: 2000}
		require.Equal(t, fuse.OK, tr.ReadDir(nil, in, list))
		got, err := fuse.ParseDirEntries(list.Bytes())
		require.NoError(t, err)
		if len(got) == 0 {
			break
		}
		for _, e := range got {
			if _, ok := stay[e.Name]; ok {
				stay[e.Name]++
			}
			off = e.Off
		}
		if len(leave) > 0 {
			require.NoError(t, p.Unlink(&leave[0]))
			leave = leave[1:]
			addFile(t, p, testKey(7, next), gpufile.Key{}, next)
		}
	}
	for name, n := range stay {
		require.Equal(t, 1, n, name)
	}
}

func openFileOf(t testing.TB, tr *tree, n nodeID) uint64 {
	t.Helper()
	var out fuse.OpenOut
	require.Equal(t, fuse.OK, tr.Open(nil, &fuse.OpenIn{InHeader: header(n)}, &out))
	require.NotZero(t, out.OpenFlags&fuse.FOPEN_DIRECT_IO)
	return out.Fh
}

func readAt(tr *tree, fh uint64, off int64, size int) ([]byte, fuse.Status) {
	buf := make([]byte, size)
	r, st := tr.Read(nil, &fuse.ReadIn{Fh: fh, Offset: uint64(off), Size: uint32(size)}, buf)
	if st != fuse.OK {
		return nil, st
	}
	defer r.Done()
	if s, ok := r.(interface {
		Slices() ([][]byte, fuse.Status)
	}); ok {
		pieces, _ := s.Slices()
		return append([]byte{}, bytes.Join(pieces, nil)...), fuse.OK
	}
	got, st := r.Bytes(buf)
	return append([]byte{}, got...), st
}

func TestReadAnywhere(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	fh := openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...))
	check := func(off int64, size int) {
		got, st := readAt(tr, fh, off, size)
		require.Equal(t, fuse.OK, st)
		end := min(off+int64(size), int64(len(want)))
		if off >= end {
			require.Empty(t, got)
			return
		}
		require.True(t, bytes.Equal(want[off:end], got), "off %d size %d", off, size)
	}
	for range 300 {
		check(rand.Int64N(p.size()+1000), rand.IntN(int(p.size())+1000))
	}
	for _, step := range []int{1 << 20, 128 << 10, 4096, 999} {
		for off := int64(0); off < p.size()+int64(step); off += int64(step) {
			check(off, step)
		}
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for off := int64(i) * 1000; off < p.size(); off += 4000 {
				got, st := readAt(tr, fh, off, 1000)
				if st != fuse.OK || !bytes.Equal(got, want[off:min(off+1000, p.size())]) {
					t.Errorf("off %d: %v", off, st)
				}
			}
		})
	}
	wg.Wait()
	require.NotZero(t, tr.counter.stats().ReadBytes)
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	tr.closing.Wait()
	require.Zero(t, tr.buffers.inUse.Load(), "every buffer came back")
	require.Zero(t, tr.flight.used)
	require.Zero(t, p.files[0].readers, "the slot is let go")
	require.Empty(t, tr.open)
}

// Thousands of tiny objects in one request make more pieces than writev(2) takes.
func TestReadTinyObjects(t *testing.T) {
	g := smallGeometry()
	g.Objects = g.Objects[:3]
	for range 1500 {
		g.Objects = append(g.Objects, g.Objects[2])
	}
	p := newFakePool(t, 1, "llama", g.WithTrailers())
	tr := newTree(&fakeBackend{list: []*fakePool{p}}, Options{})
	defer tr.OnUnmount()
	key := testKey(0, 1)
	want := addFile(t, p, key, gpufile.Key{}, 1)
	got, st := readAt(tr, openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...)), 0, len(want))
	require.Equal(t, fuse.OK, st)
	require.True(t, bytes.Equal(want, got))
}

// Without memory for reading ahead, readers are served all the same.
func TestReadWithoutAhead(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	tr.buffers.inUse.Add(aheadBytesMax)
	fh := openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...))
	for off := 0; off < len(want); off += 5000 {
		got, st := readAt(tr, fh, int64(off), 5000)
		require.Equal(t, fuse.OK, st)
		require.True(t, bytes.Equal(want[off:min(off+5000, len(want))], got))
	}
}

// The buffers of reads that the kernel has not taken are bounded: the next read waits, and an interrupt ends its wait.
func TestReadsInFlightAreBounded(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	tr.flight.max = 1 // each read asks for more, and has it when it is alone
	n := mustWalk(t, tr, blockPath(key)...)
	in := func(off int) *fuse.ReadIn {
		return &fuse.ReadIn{Fh: openFileOf(t, tr, n), Offset: uint64(off), Size: 1000}
	}
	first, st := tr.Read(nil, in(0), nil)
	require.Equal(t, fuse.OK, st)

	cancel := make(chan struct{})
	interrupted := make(chan fuse.Status)
	go func() {
		_, st := tr.Read(cancel, in(3000), nil)
		interrupted <- st
	}()
	waiting := func(n int) func() bool {
		return func() bool {
			tr.flight.mu.Lock()
			defer tr.flight.mu.Unlock()
			return len(tr.flight.queue) == n
		}
	}
	require.Eventually(t, waiting(1), time.Minute, time.Millisecond)
	results := make(chan []byte)
	for range 5 {
		go func() {
			got, st := readAt(tr, openFileOf(t, tr, n), 2000, 1000)
			if st != fuse.OK {
				t.Errorf("read: %v", st)
			}
			results <- got
		}()
	}
	require.Eventually(t, waiting(6), time.Minute, time.Millisecond)
	close(cancel)
	require.Equal(t, fuse.EINTR, <-interrupted)
	require.Eventually(t, waiting(5), time.Minute, time.Millisecond, "the first still has its share")

	first.Done()
	for range 5 {
		require.True(t, bytes.Equal(want[2000:3000], <-results))
	}
	require.Zero(t, tr.flight.used)
}

// While much memory is in use, readers keep nothing for their next request.
func TestNothingIsKeptWhenMemoryIsShort(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	tr.buffers.inUse.Add(keepBytesMax)
	fh := openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...))
	for off := 0; off < len(want); off += 5000 {
		got, st := readAt(tr, fh, int64(off), 5000)
		require.Equal(t, fuse.OK, st)
		require.True(t, bytes.Equal(want[off:min(off+5000, len(want))], got))
		require.EqualValues(t, keepBytesMax, tr.buffers.inUse.Load())
	}
}

func TestReadBudget(t *testing.T) {
	b := readBudget{max: 10}
	require.True(t, b.take(25, nil), "alone")
	got := make(chan int64, 3)
	for i, n := range []int64{8, 3, 2} {
		go func() {
			b.take(n, nil)
			got <- n
		}()
		require.Eventually(t, func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return len(b.queue) == i+1
		}, time.Minute, time.Millisecond)
	}
	b.give(25)
	require.EqualValues(t, 8, <-got)
	b.mu.Lock()
	require.EqualValues(t, 8, b.used)
	require.Len(t, b.queue, 2, "2 would fit, but 3 was first")
	b.mu.Unlock()
	b.give(8)
	require.EqualValues(t, 5, <-got+<-got)
	b.give(5)
	require.Zero(t, b.used)
	require.Empty(t, b.queue)

	// Those behind an interrupted one go on, and a share given at the moment of the interrupt is not lost.
	cancel := make(chan struct{})
	require.True(t, b.take(6, nil))
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if b.take(7, cancel) {
				b.give(7)
			}
		})
		wg.Go(func() {
			b.take(2, nil)
			b.give(2)
		})
	}
	close(cancel)
	b.give(6)
	wg.Wait()
	require.Zero(t, b.used)
	require.Empty(t, b.queue)
}

func TestDamageIsNeverBytes(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	p.files[0].damaged = map[uint16]bool{3: true}
	pool := tr.poolByName("llama")
	fh := openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...))
	for range 2 {
		_, st := readAt(tr, fh, 0, int(p.size()))
		require.Equal(t, fuse.EIO, st)
		_, st = readAt(tr, fh, pool.starts[4]-1, 1)
		require.Equal(t, fuse.EIO, st)
		got, st := readAt(tr, fh, 0, int(pool.starts[3]))
		require.Equal(t, fuse.OK, st, "whole objects before the damage")
		require.True(t, bytes.Equal(want[:pool.starts[3]], got))
	}
	require.NotZero(t, tr.counter.stats().ReadErrors)
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.reported) == 1
	}, time.Minute, time.Millisecond, "reported once")
	p.mu.Lock()
	p.files[0].damaged = nil
	p.mu.Unlock()
	// A read ahead that began before may still bring the damage.
	var got []byte
	require.Eventually(t, func() (ok bool) {
		var st fuse.Status
		got, st = readAt(tr, fh, 0, len(want))
		return st == fuse.OK
	}, time.Minute, time.Millisecond, "the next request tries again")
	require.True(t, bytes.Equal(want, got))
}

func TestFaultsOfReadersAreErrors(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(0, 5)
	addFile(t, p, key, gpufile.Key{}, 5)
	p.files[0].fault = true
	_, st := readAt(tr, openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...)), 0, 1000)
	require.Equal(t, fuse.EIO, st)
}

// A reader holds its file: removal meanwhile is a miss for others and nothing to the reader.
func TestRemoveWhileReading(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key, next := testKey(8, 5), testKey(8, 6)
	want := addFile(t, p, key, gpufile.Key{}, 5)
	n := mustWalk(t, tr, blockPath(key)...)
	fh := openFileOf(t, tr, n)
	h := header(mustWalk(t, tr, "llama", "blocks", "08"))
	require.Equal(t, fuse.OK, tr.Unlink(nil, &h, keyName(&key)))
	require.Equal(t, fuse.ENOENT, tr.Unlink(nil, &h, keyName(&key)))
	_, st := walk(tr, blockPath(key)...)
	require.Equal(t, fuse.ENOENT, st)
	addFile(t, p, next, gpufile.Key{}, 6)
	got, st := readAt(tr, fh, 0, len(want))
	require.Equal(t, fuse.OK, st)
	require.True(t, bytes.Equal(want, got))
	var attr fuse.AttrOut
	require.Equal(t, fuse.OK, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(n)}, &attr))
	require.Zero(t, attr.Nlink)
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	tr.closing.Wait()
	require.Equal(t, eSTALE, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(n)}, &attr))
}

func TestStoredFilesDoNotOpenForWriting(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{Status: []StatusFile{{"version", func() []byte { return []byte("1\n") }}}})
	key := testKey(0, 5)
	addFile(t, p, key, gpufile.Key{}, 5)
	for _, path := range [][]string{blockPath(key), {"llama", "identity.json"}, {".tuttifs", "version"}} {
		h := header(mustWalk(t, tr, path...))
		for _, flags := range []uint32{syscall.O_WRONLY, syscall.O_RDWR} {
			require.Equal(t, fuse.EPERM, tr.Open(nil, &fuse.OpenIn{InHeader: h, Flags: flags}, &fuse.OpenOut{}))
		}
	}
}

func TestTextFiles(t *testing.T) {
	text := "one\n"
	tr, _, _ := newTestTree(t, Options{Status: []StatusFile{{"stats", func() []byte { return []byte(text) }}}})
	n := mustWalk(t, tr, ".tuttifs", "stats")
	fh := openFileOf(t, tr, n)
	text = "one, two\n"
	got, st := readAt(tr, fh, 0, 100)
	require.Equal(t, fuse.OK, st)
	require.Equal(t, "one\n", string(got), "as it was at open")
	var attr fuse.AttrOut
	require.Equal(t, fuse.OK, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(n), Flags_: fuse.FUSE_GETATTR_FH,
		Fh_: fh}, &attr))
	require.EqualValues(t, 4, attr.Size)
	require.Equal(t, fuse.OK, tr.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(n)}, &attr))
	require.EqualValues(t, 9, attr.Size)
	got, _ = readAt(tr, fh, 2, 1)
	require.Equal(t, "e", string(got))
	got, _ = readAt(tr, fh, 4, 100)
	require.Empty(t, got)
	got, _ = readAt(tr, openFileOf(t, tr, mustWalk(t, tr, "llama", "identity.json")), 0, 4096)
	require.Contains(t, string(got), `"model": "llama"`)
	got, _ = readAt(tr, openFileOf(t, tr, mustWalk(t, tr, ".tuttifs", "control")), 0, 100)
	require.Empty(t, got)
}

func TestStatFs(t *testing.T) {
	tr, _, _ := newTestTree(t, Options{})
	var out fuse.StatfsOut
	h := header(nodeRoot)
	require.Equal(t, fuse.OK, tr.StatFs(nil, &h, &out))
	require.Equal(t, fuse.StatfsOut{Blocks: 1 << 18, Bfree: 3 << 16, Bavail: 1 << 17, Files: 100, Ffree: 93,
		Bsize: 4096, Frsize: 4096, NameLen: 255}, out)
}

// fakeControl answers every ioctl with its number and marks what it was told.
type fakeControl struct {
	mu     sync.Mutex
	opened []string
	closed []uint64
	errno  int32
}

func (c *fakeControl) Open(pid, uid, gid uint32, writable bool) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.opened = append(c.opened, fmt.Sprint(pid, uid, gid, writable))
	return uint64(len(c.opened))
}

func (c *fakeControl) Close(handle uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = append(c.closed, handle)
}

func (c *fakeControl) Ioctl(handle uint64, pid, cmd uint32, arg uint64, in, out []byte) int32 {
	copy(out, fmt.Sprintf("%d:%d:%x:%d:%s", handle, pid, cmd, arg, in))
	return c.errno
}

func TestIoctl(t *testing.T) {
	c := &fakeControl{}
	tr, p, _ := newTestTree(t, Options{Control: c})
	key := testKey(0, 5)
	addFile(t, p, key, gpufile.Key{}, 5)
	file := openFileOf(t, tr, mustWalk(t, tr, blockPath(key)...))
	var dir, control fuse.OpenOut
	require.Equal(t, fuse.OK, tr.OpenDir(nil, &fuse.OpenIn{InHeader: header(nodeRoot)}, &dir))
	n := mustWalk(t, tr, ".tuttifs", "control")
	require.Equal(t, fuse.OK, tr.Open(nil, &fuse.OpenIn{InHeader: header(n), Flags: syscall.O_RDWR}, &control))
	require.Empty(t, c.opened, "handles are made at the first ioctl")

	call := func(fh uint64, in string) (string, int32, fuse.Status) {
		out := bytes.Repeat([]byte("x"), 32) // a recycled buffer
		var result fuse.IoctlOut
		st := tr.Ioctl(nil, &fuse.IoctlIn{InHeader: header(n), Fh: fh, Cmd: 0x5401, Arg: 9}, []byte(in), &result, out)
		return string(bytes.TrimRight(out, "\x00")), result.Result, st
	}
	for i, fh := range []uint64{file, dir.Fh, control.Fh, file} {
		got, result, st := call(fh, "in")
		require.Equal(t, fuse.OK, st)
		require.Zero(t, result)
		require.Equal(t, fmt.Sprintf("%d:77:5401:9:in", i%3+1), got)
	}
	require.Equal(t, []string{"77 0 0 false", "77 0 0 false", "77 0 0 true"}, c.opened)
	c.errno = int32(syscall.EBADMSG)
	got, result, st := call(control.Fh, "")
	require.Equal(t, fuse.OK, st, "an errno would drop the reply")
	require.Equal(t, -int32(syscall.EBADMSG), result)
	require.Equal(t, "3:77:5401:9:", got)
	_, _, st = call(999, "")
	require.Equal(t, fuse.EBADF, st)
	tr.Release(nil, &fuse.ReleaseIn{Fh: file})
	tr.ReleaseDir(&fuse.ReleaseIn{Fh: dir.Fh})
	require.Equal(t, []uint64{1, 2}, c.closed)
	tr.OnUnmount()
	require.Equal(t, []uint64{1, 2, 3}, c.closed, "what the kernel never released")
	_, _, st = call(file, "")
	require.Equal(t, fuse.EBADF, st)

	none, _, _ := newTestTree(t, Options{})
	require.Equal(t, fuse.OK, none.OpenDir(nil, &fuse.OpenIn{InHeader: header(nodeRoot)}, &dir))
	require.Equal(t, eNOTTY, none.Ioctl(nil, &fuse.IoctlIn{Fh: dir.Fh}, nil, &fuse.IoctlOut{}, nil))
}

func FuzzNames(f *testing.F) {
	k := testKey(1, 1)
	f.Add(keyName(&k))
	f.Add(linkName(0, &k))
	f.Add(linkName(1234567, &k))
	f.Add("00000_")
	f.Add("ff")
	f.Fuzz(func(t *testing.T, name string) {
		if key, ok := parseKey(name); ok {
			require.Equal(t, name, keyName(&key))
		}
		if i, key, ok := parseLink(name); ok {
			require.Equal(t, name, linkName(i, &key))
		}
		if hh, ok := parseShard(name); ok {
			require.Equal(t, name, shardName(hh))
		}
	})
}

// A listing allocates for its reply, not for its entries.
func TestListingAllocates(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	for i := range 400 {
		addFile(t, p, testKey(1, i), gpufile.Key{}, 0)
	}
	dir := mustWalk(t, tr, "llama", "blocks", "01")
	var open fuse.OpenOut
	require.Equal(t, fuse.OK, tr.OpenDir(nil, &fuse.OpenIn{InHeader: header(dir)}, &open))
	buf := make([]byte, 1<<20)
	for _, plus := range []bool{false, true} {
		entries := 0
		allocs := testing.AllocsPerRun(10, func() {
			list := fuse.NewDirEntryList(buf, offParent)
			in := &fuse.ReadIn{InHeader: header(dir), Fh: open.Fh, Offset: offParent, Size: 1 << 20}
			require.Equal(t, fuse.OK, tr.readDir(in, list, plus))
			entries = len(list.Bytes())
		})
		require.Greater(t, entries, 400*(direntBytes+keyChars)-1)
		require.Less(t, allocs, 20.0, "plus %v", plus)
	}
}

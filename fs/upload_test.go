package fs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/gpufile"
)

func create(tr *tree, dir nodeID, name string) (n nodeID, fh uint64, st fuse.Status) {
	var out fuse.CreateOut
	st = tr.Create(nil, &fuse.CreateIn{InHeader: header(dir), Flags: syscall.O_WRONLY}, name, &out)
	return nodeID(out.NodeId), out.Fh, st
}

func mustCreate(t testing.TB, tr *tree, dir nodeID, name string) (nodeID, uint64) {
	t.Helper()
	n, fh, st := create(tr, dir, name)
	require.Equal(t, fuse.OK, st)
	require.True(t, n.upload())
	return n, fh
}

func writeAll(t testing.TB, tr *tree, fh uint64, data []byte, step int) {
	t.Helper()
	for off := 0; off < len(data); off += step {
		piece := data[off:min(off+step, len(data))]
		n, st := tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: uint64(off)}, piece)
		require.Equal(t, fuse.OK, st)
		require.EqualValues(t, len(piece), n)
	}
}

// closeFile is what close(2) of the last descriptor sends.
func closeFile(tr *tree, fh uint64) fuse.Status {
	st := tr.Flush(nil, &fuse.FlushIn{Fh: fh})
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	return st
}

func setX(tr *tree, n nodeID, name, value string) fuse.Status {
	return tr.SetXAttr(nil, &fuse.SetXAttrIn{InHeader: header(n), Size: uint32(len(value))}, name, []byte(value))
}

func getX(tr *tree, n nodeID, name string) (string, fuse.Status) {
	h := header(n)
	size, st := tr.GetXAttr(nil, &h, name, nil)
	if st != fuse.ERANGE {
		return "", st
	}
	buf := make([]byte, size)
	size, st = tr.GetXAttr(nil, &h, name, buf)
	return string(buf[:size]), st
}

func listX(t testing.TB, tr *tree, n nodeID) []string {
	h := header(n)
	buf := make([]byte, 4096)
	size, st := tr.ListXAttr(nil, &h, buf)
	require.Equal(t, fuse.OK, st)
	return strings.Split(strings.TrimSuffix(string(buf[:size]), "\x00"), "\x00")
}

// requireIdle: nothing of an upload is left.
func requireIdle(t testing.TB, tr *tree) {
	t.Helper()
	tr.writes.mu.Lock()
	defer tr.writes.mu.Unlock()
	require.Empty(t, tr.writes.nodes)
	require.Empty(t, tr.writes.names)
	require.Zero(t, tr.writes.bytes)
}

func TestCopyIn(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	parent, key := testKey(2, 1), testKey(3, 1)
	addFile(t, p, parent, gpufile.Key{}, 1)
	p.files[0].info.Position = 41
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	data := testPayload(p.size(), 7)

	n, fh := mustCreate(t, tr, dir, keyName(&key))
	_, _, st := create(tr, dir, keyName(&key))
	require.Equal(t, eEXIST, st)
	out, st := walk(tr, blockPath(key)...)
	require.Equal(t, fuse.OK, st, "seen while it is being copied in")
	require.Equal(t, n, nodeID(out.NodeId))
	require.Zero(t, out.EntryTimeout()+out.AttrTimeout(), "the kernel may not keep it")
	writeAll(t, tr, fh, data, 10_000)
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.parent", keyName(&parent)))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tenant", "9"))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tokens", "33"))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.slot", "1234"), "cp carries all along")
	require.Equal(t, fuse.ENOTSUP, setX(tr, n, "user.other", "1"))
	require.Equal(t, fuse.ENOTSUP, setX(tr, n, "user.tuttifs.other", "1"))
	names, _ := listAll(t, tr, dir, 4096, true)
	require.Equal(t, []string{".", "..", keyName(&key)}, names)
	_, _, found := p.Find(&key)
	require.False(t, found, "nothing is stored before the close")
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	requireIdle(t, tr)

	n = mustWalk(t, tr, blockPath(key)...)
	require.Equal(t, kindBlock, n.kind())
	got, st := readAt(tr, openFileOf(t, tr, n), 0, len(data))
	require.Equal(t, fuse.OK, st)
	require.True(t, bytes.Equal(data, got))
	info := p.files[n.slot()].info
	require.Equal(t, parent, info.Parent)
	require.EqualValues(t, 9, info.Tenant)
	require.EqualValues(t, 33, info.Tokens)
	require.EqualValues(t, 42, info.Position, "one more than its parent's")
	require.Equal(t, Stats{ReadBytes: uint64(len(data)), StoredFiles: 1, StoredBytes: uint64(len(data))},
		tr.counter.stats())

	_, _, st = create(tr, dir, keyName(&key))
	require.Equal(t, eEXIST, st)
}

func TestCopyInRefused(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(3, 1)
	for _, path := range [][]string{{}, {".tuttifs"}, {"llama"}, {"llama", "blocks"}, {"llama", "prefixes"}} {
		_, _, st := create(tr, mustWalk(t, tr, path...), "x")
		require.Equal(t, fuse.EPERM, st, "%v", path)
	}
	_, _, st := create(tr, mustWalk(t, tr, "llama", "blocks", "04"), keyName(&key))
	require.Equal(t, fuse.EINVAL, st, "the key belongs to 03")
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	_, _, st = create(tr, dir, strings.ToUpper("03aa"+keyName(&key)[4:]))
	require.Equal(t, fuse.EINVAL, st, "keys are lower case")
	_, _, st = create(tr, dir, strings.Repeat("x", 256))
	require.Equal(t, eNAME, st)

	// Short: nothing is stored, whatever the last written byte is.
	for _, at := range []int64{0, 1000, p.size() - 10} {
		n, fh := mustCreate(t, tr, dir, keyName(&key))
		_, st = tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: uint64(at)}, make([]byte, 10))
		require.Equal(t, fuse.OK, st)
		_, st = tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: uint64(p.size() - 9)}, make([]byte, 10))
		require.Equal(t, eFBIG, st)
		_, st = tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: ^uint64(0) - 5}, make([]byte, 10))
		require.Equal(t, eFBIG, st)
		require.Equal(t, fuse.OK, tr.Fsync(nil, &fuse.FsyncIn{Fh: fh}))
		for name, bad := range map[string][]string{"tenant": {"", "-1", "x", "4294967296"}, "tokens": {"0",
			"65", "1 "}, "parent": {"", "ab", "ROOT"},
			"position": {"-1"}} {
			for _, value := range bad {
				require.Equal(t, fuse.EINVAL, setX(tr, n, "user.tuttifs."+name, value), "%s %q", name, value)
			}
		}
		require.Equal(t, fuse.EIO, closeFile(tr, fh))
		requireIdle(t, tr)
	}
	require.Empty(t, p.byKey)
}

func TestCopyInOutOfOrder(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(3, 1)
	data := testPayload(p.size(), 7)
	_, fh := mustCreate(t, tr, mustWalk(t, tr, "llama", "blocks", "03"), keyName(&key))
	const piece = 5000
	order := rand.Perm((len(data) + piece - 1) / piece)
	for _, i := range order {
		end := min((i+1)*piece+100, len(data)) // overlapping
		_, st := tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: uint64(i * piece)}, data[i*piece:end])
		require.Equal(t, fuse.OK, st)
	}
	got, st := readAt(tr, fh, 100, 50)
	require.Equal(t, fuse.OK, st)
	require.Equal(t, data[100:150], got, "a writer reads what it wrote")
	require.Equal(t, fuse.OK, tr.Fsync(nil, &fuse.FsyncIn{Fh: fh}), "stores")
	_, _, found := p.Find(&key)
	require.True(t, found)
	_, st = tr.Write(nil, &fuse.WriteIn{Fh: fh}, data[:1])
	require.Equal(t, fuse.EPERM, st, "stored files do not change")
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	require.True(t, bytes.Equal(data, p.files[0].payload))

	// Too many pieces.
	other := testKey(3, 2)
	_, fh = mustCreate(t, tr, mustWalk(t, tr, "llama", "blocks", "03"), keyName(&other))
	st = fuse.OK
	for i := 0; i <= gapsMax && st == fuse.OK; i++ {
		_, st = tr.Write(nil, &fuse.WriteIn{Fh: fh, Offset: uint64(2 * i)}, data[:1])
	}
	require.Equal(t, fuse.EINVAL, st)
	require.Equal(t, fuse.EIO, closeFile(tr, fh))
	requireIdle(t, tr)
}

func rename(tr *tree, dir nodeID, from string, to nodeID, name string, flags uint32) fuse.Status {
	return tr.Rename(nil, &fuse.RenameIn{InHeader: header(dir), Newdir: uint64(to), Flags: flags}, from, name)
}

func TestTemporaryName(t *testing.T) {
	tr, p, b := newTestTree(t, Options{})
	b.list = append(b.list, newFakePool(t, 9, "qwen", smallGeometry()))
	key := testKey(3, 1)
	data := testPayload(p.size(), 7)
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	temp := "." + keyName(&key) + ".Xy12Zz"
	n, fh := mustCreate(t, tr, dir, temp)
	writeAll(t, tr, fh, data[:100], 100)
	require.Equal(t, fuse.EIO, closeFile(tr, fh), "short")
	requireIdle(t, tr)

	n, fh = mustCreate(t, tr, dir, temp)
	writeAll(t, tr, fh, data, 1<<20)
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	_, _, found := p.Find(&key)
	require.False(t, found)
	// rsync sets attributes by name, between close and rename.
	require.Equal(t, n, mustWalk(t, tr, "llama", "blocks", "03", temp))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tenant", "4"))
	require.Equal(t, []string{"user.tuttifs.tenant"}, listX(t, tr, n))
	h := header(n)
	require.Equal(t, fuse.OK, tr.RemoveXAttr(nil, &h, "user.tuttifs.tenant"))
	require.Equal(t, fuse.ENODATA, tr.RemoveXAttr(nil, &h, "user.tuttifs.tenant"))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tenant", "5"))
	require.Equal(t, fuse.OK, tr.SetAttr(nil, &fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{InHeader: h,
		Valid: fuse.FATTR_MODE | fuse.FATTR_UID | fuse.FATTR_MTIME, Mode: 0o644, Owner: fuse.Owner{Uid: 12}}},
		&fuse.AttrOut{}))

	elsewhere := mustWalk(t, tr, "llama", "blocks", "04")
	require.Equal(t, fuse.EINVAL, rename(tr, dir, temp, dir, "other", 0))
	require.Equal(t, fuse.EINVAL, rename(tr, dir, temp, elsewhere, keyName(&key), 0))
	require.Equal(t, fuse.EXDEV, rename(tr, dir, temp, mustWalk(t, tr, "qwen", "blocks", "03"), keyName(&key), 0))
	require.Equal(t, fuse.EPERM, rename(tr, dir, temp, mustWalk(t, tr, "llama"), keyName(&key), 0))
	require.Equal(t, fuse.EPERM, rename(tr, dir, "nothing", dir, keyName(&key), 0))
	require.Equal(t, fuse.EPERM, rename(tr, dir, temp, dir, keyName(&key), unix.RENAME_EXCHANGE))
	require.Equal(t, fuse.OK, rename(tr, dir, temp, dir, keyName(&key), 0))
	requireIdle(t, tr)
	stored := mustWalk(t, tr, blockPath(key)...)
	value, _ := getX(tr, stored, "user.tuttifs.tenant")
	require.Equal(t, "5", value)
	require.Equal(t, fuse.EPERM, rename(tr, dir, keyName(&key), dir, "back", 0))

	// Once more: the same bytes are fine, others are not.
	_, fh = mustCreate(t, tr, dir, temp)
	writeAll(t, tr, fh, data, 1<<20)
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	require.Equal(t, eEXIST, rename(tr, dir, temp, dir, keyName(&key), unix.RENAME_NOREPLACE))
	require.Equal(t, fuse.OK, rename(tr, dir, temp, dir, keyName(&key), 0))
	requireIdle(t, tr)
	_, fh = mustCreate(t, tr, dir, temp)
	data[len(data)-1] ^= 1
	writeAll(t, tr, fh, data, 1<<20)
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	require.Equal(t, eEXIST, rename(tr, dir, temp, dir, keyName(&key), 0))
	h = header(dir)
	require.Equal(t, fuse.OK, tr.Unlink(nil, &h, temp))
	require.Equal(t, fuse.ENOENT, tr.Unlink(nil, &h, temp))
	requireIdle(t, tr)
}

func TestCopyInWithoutSpace(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	p.limit = 1
	addFile(t, p, testKey(0, 0), gpufile.Key{}, 1)
	key := testKey(3, 1)
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	_, fh := mustCreate(t, tr, dir, keyName(&key))
	writeAll(t, tr, fh, testPayload(p.size(), 1), 1<<20)
	require.Equal(t, eNOSPC, tr.Flush(nil, &fuse.FlushIn{Fh: fh}))
	p.mu.Lock()
	p.limit = 2
	p.mu.Unlock()
	require.Equal(t, fuse.OK, tr.Flush(nil, &fuse.FlushIn{Fh: fh}), "another close tries again")
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	requireIdle(t, tr)

	// Memory for files being copied in is bounded too.
	tr.writes.bytes = uploadBytesMax
	_, _, st := create(tr, dir, "x")
	require.Equal(t, fuse.EAGAIN, st)
}

// An interrupted close goes on waiting for a while, then leaves the commit to itself.
func TestCloseInterrupted(t *testing.T) {
	tr, p, b := newTestTree(t, Options{})
	b.gate = make(chan struct{})
	key := testKey(3, 1)
	n, fh := mustCreate(t, tr, mustWalk(t, tr, "llama", "blocks", "03"), keyName(&key))
	writeAll(t, tr, fh, testPayload(p.size(), 1), 1<<20)
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tenant", "5"))
	cancel := make(chan struct{})
	close(cancel)
	require.Equal(t, fuse.EINTR, tr.Flush(cancel, &fuse.FlushIn{Fh: fh}))
	_, st := tr.Write(nil, &fuse.WriteIn{Fh: fh}, []byte{1})
	require.Equal(t, fuse.EPERM, st, "its bytes are on their way")
	h := header(n)
	require.Equal(t, fuse.EPERM, tr.RemoveXAttr(nil, &h, "user.tuttifs.tenant"), "and what is said of them")
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	u := tr.writes.all()
	require.Len(t, u, 1)
	b.gate <- struct{}{}
	<-u[0].done
	_, _, found := p.Find(&key)
	require.True(t, found)
}

// A file that is unlinked while it is being stored is not there afterwards.
func TestUnlinkWhileStoring(t *testing.T) {
	tr, p, b := newTestTree(t, Options{})
	b.gate = make(chan struct{})
	key := testKey(3, 1)
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	_, fh := mustCreate(t, tr, dir, keyName(&key))
	writeAll(t, tr, fh, testPayload(p.size(), 1), 1<<20)
	cancel := make(chan struct{})
	close(cancel)
	require.Equal(t, fuse.EINTR, tr.Flush(cancel, &fuse.FlushIn{Fh: fh}))
	h := header(dir)
	require.Equal(t, fuse.OK, tr.Unlink(nil, &h, keyName(&key)))
	_, st := walk(tr, "llama", "blocks", "03", keyName(&key))
	require.Equal(t, fuse.ENOENT, st)
	tr.Release(nil, &fuse.ReleaseIn{Fh: fh})
	b.gate <- struct{}{}
	tr.closing.Wait()
	_, _, found := p.Find(&key)
	require.False(t, found)
	requireIdle(t, tr)
}

// A rename that was interrupted goes on: a second one must not take the first one's outcome for its own.
func TestRenameAfterInterrupted(t *testing.T) {
	tr, p, b := newTestTree(t, Options{})
	b.gate = make(chan struct{})
	first, second := testKey(3, 1), testKey(3, 2)
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	_, fh := mustCreate(t, tr, dir, ".temp")
	writeAll(t, tr, fh, testPayload(p.size(), 1), 1<<20)
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	cancel := make(chan struct{})
	close(cancel)
	in := fuse.RenameIn{InHeader: header(dir), Newdir: uint64(dir)}
	require.Equal(t, fuse.EINTR, tr.Rename(cancel, &in, ".temp", keyName(&first)))
	require.Equal(t, fuse.EPERM, tr.Rename(cancel, &in, ".temp", keyName(&second)))
	b.gate <- struct{}{}
	tr.closing.Wait()
	_, _, found := p.Find(&first)
	require.True(t, found)
	_, _, found = p.Find(&second)
	require.False(t, found)
	requireIdle(t, tr)
}

func TestUnlinkWhileCopyingIn(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(3, 1)
	dir := mustWalk(t, tr, "llama", "blocks", "03")
	_, fh := mustCreate(t, tr, dir, keyName(&key))
	writeAll(t, tr, fh, testPayload(p.size(), 1), 1<<20)
	h := header(dir)
	require.Equal(t, fuse.OK, tr.Unlink(nil, &h, keyName(&key)))
	writeAll(t, tr, fh, []byte("for nobody"), 10)
	_, fh2 := mustCreate(t, tr, dir, keyName(&key))
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	require.Empty(t, p.byKey, "what was removed is not stored")
	require.Equal(t, fuse.EIO, closeFile(tr, fh2))
	requireIdle(t, tr)
}

func TestTruncate(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(3, 1)
	n, fh := mustCreate(t, tr, mustWalk(t, tr, "llama", "blocks", "03"), keyName(&key))
	truncate := func(n nodeID, size uint64) fuse.Status {
		in := &fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{InHeader: header(n), Valid: fuse.FATTR_SIZE,
			Size: size}}
		return tr.SetAttr(nil, in, &fuse.AttrOut{})
	}
	require.Equal(t, fuse.OK, truncate(n, uint64(p.size())))
	require.Equal(t, fuse.EIO, tr.Flush(nil, &fuse.FlushIn{Fh: fh}), "room is no content")
	writeAll(t, tr, fh, make([]byte, 100), 100)
	require.Equal(t, fuse.EINVAL, truncate(n, 50))
	require.Equal(t, eFBIG, truncate(n, uint64(p.size())+1))
	require.Equal(t, fuse.OK, truncate(n, 0))
	data := testPayload(p.size(), 4)
	writeAll(t, tr, fh, data, 1<<20)
	require.Equal(t, fuse.OK, closeFile(tr, fh))
	require.Equal(t, fuse.EPERM, truncate(mustWalk(t, tr, blockPath(key)...), 0))
}

func TestXattrs(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	parent, key := testKey(2, 1), testKey(3, 1)
	addFile(t, p, parent, gpufile.Key{}, 1)
	addFile(t, p, key, parent, 2)
	n := mustWalk(t, tr, blockPath(key)...)
	want := map[string]string{"key": keyName(&key), "parent": keyName(&parent), "tenant": "0", "tokens": "64",
		"position": "0",
		"slot":     "1", "generation": "2", "hits": "3", "pins": "1"}
	require.Len(t, listX(t, tr, n), len(want))
	for _, name := range listX(t, tr, n) {
		value, st := getX(tr, n, name)
		require.Equal(t, fuse.OK, st)
		require.Equal(t, want[strings.TrimPrefix(name, "user.tuttifs.")], value, name)
	}
	value, st := getX(tr, n, "user.tuttifs.checksum")
	require.Equal(t, fuse.OK, st)
	require.Equal(t, "fake 00ff", value)
	value, _ = getX(tr, n, "user.tuttifs.extents")
	lines := strings.Split(strings.TrimSuffix(value, "\n"), "\n")
	require.Len(t, lines, p.layout.Objects())
	require.Equal(t, "1 1 1001 3", lines[1])
	value, _ = getX(tr, mustWalk(t, tr, blockPath(parent)...), "user.tuttifs.parent")
	require.Equal(t, "root", value)

	for _, name := range []string{"user.mime_type", "security.selinux", "trusted.x", "user.tuttifs.",
		"user.tuttifs.other", "weird"} {
		_, st := getX(tr, n, name)
		require.Equal(t, fuse.ENODATA, st, name)
		h := header(n)
		if !strings.HasPrefix(name, xattrPrefix) {
			require.Equal(t, fuse.ENODATA, tr.RemoveXAttr(nil, &h, name), name)
		}
		require.Equal(t, fuse.ENOTSUP, setX(tr, n, name, "x"), name)
	}
	for _, path := range [][]string{{}, {"llama"}, {"llama", "identity.json"}, {"llama", "prefixes", keyName(&key)}} {
		_, st := getX(tr, mustWalk(t, tr, path...), "user.tuttifs.key")
		require.Equal(t, fuse.ENODATA, st)
		require.Equal(t, []string{""}, listX(t, tr, mustWalk(t, tr, path...)))
	}
	h := header(n)
	_, st = tr.GetXAttr(nil, &h, "user.tuttifs.key", make([]byte, 63))
	require.Equal(t, fuse.ERANGE, st)
	_, st = tr.ListXAttr(nil, &h, make([]byte, 5))
	require.Equal(t, fuse.ERANGE, st)

	// A stored file does not change; what is so may be said.
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.tenant", "0"))
	require.Equal(t, fuse.EPERM, setX(tr, n, "user.tuttifs.tenant", "1"))
	require.Equal(t, fuse.EPERM, setX(tr, n, "user.tuttifs.key", keyName(&parent)))
	require.Equal(t, fuse.OK, setX(tr, n, "user.tuttifs.hits", "0"))
	require.Equal(t, fuse.EPERM, tr.RemoveXAttr(nil, &h, "user.tuttifs.tenant"))
}

func FuzzAttributes(f *testing.F) {
	k := testKey(1, 1)
	f.Add("parent", keyName(&k))
	f.Add("parent", "root")
	f.Add("tokens", "64")
	f.Add("tenant", "4294967295")
	f.Add("position", "007")
	f.Fuzz(func(t *testing.T, name, value string) {
		var a uploadAttrs
		if name != "parent" && a.field(name) == nil {
			return // not settable
		}
		err := a.set(name, value, 64)
		got, ok := a.get(name)
		switch {
		case err != nil || value == "root":
			require.False(t, ok, "nothing was said")
		case name == "parent" && ok:
			require.Equal(t, value, got)
		case ok:
			require.Equal(t, strings.TrimLeft(value, "0"), strings.TrimLeft(got, "0"))
		}
	})
}

func TestExtentsOfManyObjects(t *testing.T) {
	g := smallGeometry()
	g.Objects = g.Objects[:1]
	for range 9000 {
		g.Objects = append(g.Objects, g.Objects[0])
	}
	p := newFakePool(t, 1, "llama", g.WithTrailers())
	tr := newTree(&fakeBackend{list: []*fakePool{p}}, Options{})
	text, err := tr.extents(tr.poolByName("llama"), &gpufile.FileInfo{Slot: 123456})
	require.NoError(t, err)
	require.LessOrEqual(t, len(text), xattrValueMax)
	require.True(t, strings.HasSuffix(text, "\n...\n"))
}

func TestRemovePrefix(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	var chain []gpufile.Key
	parent := gpufile.Key{}
	for i := range 5 {
		k := testKey(byte(i), i)
		addFile(t, p, k, parent, i)
		chain, parent = append(chain, k), k
	}
	fork := testKey(9, 9)
	addFile(t, p, fork, chain[1], 9)
	prefixes := header(mustWalk(t, tr, "llama", "prefixes"))
	tip := chain[4]
	dir := mustWalk(t, tr, "llama", "prefixes", keyName(&tip))
	names, _ := listAll(t, tr, dir, 4096, true)
	h := header(dir)
	for i, name := range names[2:] {
		require.Equal(t, linkName(i, &chain[i]), name)
		require.Equal(t, fuse.OK, tr.Unlink(nil, &h, name))
	}
	require.Equal(t, fuse.ENOENT, tr.Unlink(nil, &h, linkName(4, &fork)))
	require.Len(t, p.byKey, 6, "names in a prefix are a view")
	require.Equal(t, fuse.EBUSY, tr.Rmdir(nil, &prefixes, keyName(&chain[1])), "two chains go on from it")
	require.Equal(t, fuse.OK, tr.Rmdir(nil, &prefixes, keyName(&tip)))
	require.Equal(t, fuse.ENOENT, tr.Rmdir(nil, &prefixes, keyName(&tip)))
	require.Equal(t, fuse.ENOENT, tr.Rmdir(nil, &prefixes, "x"))
	require.Len(t, p.byKey, 3)
	mustWalk(t, tr, blockPath(chain[1])...)
	_, st := walk(tr, blockPath(chain[2])...)
	require.Equal(t, fuse.ENOENT, st)
	root := header(nodeRoot)
	require.Equal(t, fuse.EPERM, tr.Rmdir(nil, &root, "llama"))
	require.Equal(t, fuse.EPERM, tr.Unlink(nil, &root, "llama"))
}

func TestNothingElseChanges(t *testing.T) {
	tr, p, _ := newTestTree(t, Options{})
	key := testKey(3, 1)
	addFile(t, p, key, gpufile.Key{}, 1)
	var e fuse.EntryOut
	h := header(mustWalk(t, tr, "llama", "blocks", "03"))
	require.Equal(t, fuse.EPERM, tr.Mkdir(nil, &fuse.MkdirIn{InHeader: h}, "x", &e))
	require.Equal(t, fuse.EPERM, tr.Mknod(nil, &fuse.MknodIn{InHeader: h}, "x", &e))
	require.Equal(t, fuse.EPERM, tr.Symlink(nil, &h, "x", "y", &e))
	require.Equal(t, fuse.EPERM, tr.Link(nil, &fuse.LinkIn{InHeader: h}, "x", &e))
	require.Equal(t, eNOTSUP, tr.Fallocate(nil, &fuse.FallocateIn{InHeader: h}))
	for _, path := range [][]string{blockPath(key), {"llama"}, {"llama", "identity.json"}} {
		out, _ := walk(tr, path...)
		set := func(valid uint32, mode, uid, gid uint32) fuse.Status {
			return tr.SetAttr(nil,
				&fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{InHeader: header(nodeID(out.NodeId)),
					Valid: valid, Mode: mode, Owner: fuse.Owner{Uid: uid, Gid: gid}}}, &fuse.AttrOut{})
		}
		require.Equal(t, fuse.OK, set(fuse.FATTR_MODE, out.Mode, 0, 0))
		require.Equal(t, fuse.EPERM, set(fuse.FATTR_MODE, 0o644, 0, 0))
		require.Equal(t, fuse.OK, set(fuse.FATTR_UID|fuse.FATTR_GID, 0, 0, 0))
		require.Equal(t, fuse.EPERM, set(fuse.FATTR_UID, 0, 1, 0))
		require.Equal(t, fuse.EPERM, set(fuse.FATTR_GID, 0, 0, 1))
		require.Equal(t, fuse.OK, set(fuse.FATTR_ATIME|fuse.FATTR_MTIME, 0, 0, 0))
	}
	ro, q, _ := newTestTree(t, Options{ReadOnly: true})
	addFile(t, q, key, gpufile.Key{}, 1)
	_, _, st := create(ro, mustWalk(t, ro, "llama", "blocks", "03"), "x")
	require.Equal(t, fuse.EROFS, st)
}

func TestIntervals(t *testing.T) {
	for range 200 {
		var have [64]bool
		var list []interval
		for range 30 {
			from := rand.Int64N(64)
			to := from + rand.Int64N(64-from+1)
			var ok bool
			list, ok = addInterval(list, interval{from, to})
			require.True(t, ok)
			for i := from; i < to; i++ {
				have[i] = true
			}
		}
		var got [64]bool
		last := int64(-1)
		for _, i := range list {
			require.Greater(t, i.from, last, "apart and ascending")
			require.Greater(t, i.to, i.from)
			last = i.to
			for j := i.from; j < i.to; j++ {
				got[j] = true
			}
		}
		require.Equal(t, have, got)
	}
}

func TestStatus(t *testing.T) {
	require.Equal(t, fuse.OK, status(nil))
	for _, e := range errnos {
		require.Equal(t, e.status, status(fmt.Errorf("somewhere: %w", e.err)))
	}
	require.Equal(t, fuse.EIO, status(errFakeDamage))
}

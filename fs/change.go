package fs

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"tuttifs/gpufile"
)

// listedUpload is a row of a listing.
type listedUpload struct {
	number uint64
	name   uploadName
}

func sortUploads(l []listedUpload) {
	slices.SortFunc(l, func(a, b listedUpload) int { return cmp.Compare(a.number, b.number) })
}

// shardOf says which directory of blocks a node is.
func (t *tree) shardOf(n nodeID) (p *poolNode, hh byte, ok bool) {
	if n.kind() != kindPool || n.slot() < poolShard || n.slot() >= poolShard+256 {
		return nil, 0, false
	}
	p = t.poolOf(n)
	return p, byte(n.slot() - poolShard), p != nil
}

// Create begins a file in blocks/<hh>. A name that is a key must belong there.
func (t *tree) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	p, hh, ok := t.shardOf(nodeID(in.NodeId))
	switch {
	case !ok:
		return fuse.EPERM
	case t.o.ReadOnly:
		return fuse.EROFS
	case len(name) > nameMax:
		return eNAME
	}
	if key, isKey := parseKey(name); isKey {
		if key[0] != hh {
			return fuse.EINVAL
		}
		if _, _, stored := p.Find(&key); stored {
			return eEXIST
		}
	} else if _, isKey := parseKey(strings.ToLower(name)); isKey {
		return fuse.EINVAL // as a temporary name it would never be stored, and its writer not be told
	}
	u, err := t.writes.begin(t, p, uploadName{p.index, hh, name}, in.Uid)
	if err != nil {
		return status(err)
	}
	t.entryUpload(u, &out.EntryOut)
	out.Fh = t.handles.add(&handle{node: u.node(), writable: true, upload: u})
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (t *tree) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := t.handles.get(in.Fh)
	if h == nil || !h.writable {
		return 0, fuse.EBADF
	}
	if h.upload == nil {
		return 0, fuse.EINVAL // control takes ioctls only
	}
	if err := h.upload.writeAt(data, in.Offset); err != nil {
		return 0, status(err)
	}
	return uint32(len(data)), fuse.OK
}

// Flush is a close(2). One whose name is a key is stored here, and close tells the outcome.
func (t *tree) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	h := t.handles.get(in.Fh)
	if h == nil || h.upload == nil || !h.writable {
		return fuse.OK
	}
	u := h.upload
	if key, ok := parseKey(u.name.name); ok {
		return status(u.commit(key, cancel))
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state == uploadOpen && !u.whole() {
		return status(errShort)
	}
	return fuse.OK
}

// Fsync stores a whole file under a key, as Flush does. Before that there is nothing that could be durable: the file
// comes into being with its commit.
func (t *tree) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := t.handles.get(in.Fh)
	if h == nil || h.upload == nil {
		return fuse.OK
	}
	h.upload.mu.Lock()
	whole := h.upload.whole() || h.upload.state != uploadOpen
	h.upload.mu.Unlock()
	key, ok := parseKey(h.upload.name.name)
	if !whole || !ok {
		return fuse.OK
	}
	return status(h.upload.commit(key, cancel))
}

// Fallocate is refused: files of a pool are of one size, and tools that ask do without.
func (t *tree) Fallocate(<-chan struct{}, *fuse.FallocateIn) fuse.Status { return eNOTSUP }

// Rename turns a file under a temporary name into a stored one. Onto a key that is stored already it succeeds if the
// bytes are the same, so that copying a tree in again is no error.
func (t *tree) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	from, oldShard, ok := t.shardOf(nodeID(in.NodeId))
	to, newShard, ok2 := t.shardOf(nodeID(in.Newdir))
	switch {
	case !ok || !ok2 || in.Flags&^unix.RENAME_NOREPLACE != 0:
		return fuse.EPERM
	case from != to:
		return fuse.EXDEV
	}
	u := t.writes.byName(uploadName{from.index, oldShard, oldName})
	if _, isKey := parseKey(oldName); u == nil || isKey {
		return fuse.EPERM // stored files have the name of their key
	}
	key, isKey := parseKey(newName)
	if !isKey || key[0] != newShard {
		return fuse.EINVAL
	}
	if _, _, stored := to.Find(&key); stored {
		if in.Flags&unix.RENAME_NOREPLACE != 0 || !t.same(u, &key) {
			return eEXIST
		}
		t.giveUp(u)
		return fuse.OK
	}
	return status(u.commit(key, cancel))
}

// same compares a whole file being copied in with the stored one of that key, byte by byte.
func (t *tree) same(u *upload, key *gpufile.Key) bool {
	slot, generation, ok := u.p.Find(key)
	if !ok {
		return false
	}
	info, release, ok := u.p.HoldRead(slot, generation, 64)
	if !ok {
		return false
	}
	defer release()
	r, err := t.b.open(u.p.files, info)
	if err != nil {
		return false
	}
	defer r.Close()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state != uploadOpen || !u.whole() {
		return false
	}
	for i := range u.p.objects() {
		want := u.buf[u.p.starts[i]:u.p.starts[i+1]]
		got := t.buffers.get(len(want), true)
		err := r.ReadObject(uint16(i), got)
		equal := err == nil && bytes.Equal(got, want)
		t.buffers.put(got)
		if !equal {
			return false
		}
	}
	return true
}

// Unlink removes a stored file: a miss at once, its slot free when the last reader and the last pin are gone. In
// prefixes/<key>/ the names are a view: removing one says yes and changes nothing, so that rm -r gets to the rmdir.
func (t *tree) Unlink(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	dir := nodeID(header.NodeId)
	if dir.kind() == kindPrefix {
		_, chain, st := t.chainOf(dir, false)
		if st != fuse.OK {
			return st
		}
		if i, key, ok := parseLink(name); !ok || i >= len(chain) || chain[i] != key {
			return fuse.ENOENT
		}
		if t.o.ReadOnly {
			return fuse.EROFS
		}
		return fuse.OK
	}
	p, hh, ok := t.shardOf(dir)
	if !ok {
		return fuse.EPERM
	}
	if key, isKey := parseKey(name); isKey && key[0] == hh {
		if _, _, stored := p.Find(&key); stored {
			return status(p.Unlink(&key))
		}
	}
	u := t.writes.byName(uploadName{p.index, hh, name})
	if u == nil {
		return fuse.ENOENT
	}
	t.remove(u)
	return fuse.OK
}

// Rmdir of prefixes/<key> evicts the file and its ancestors up to the first that another chain needs.
func (t *tree) Rmdir(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	dir := nodeID(header.NodeId)
	p := t.poolOf(dir)
	if p == nil || dir.kind() != kindPool || dir.slot() != poolPrefixes {
		return fuse.EPERM
	}
	key, ok := parseKey(name)
	if !ok {
		return fuse.ENOENT
	}
	slot, generation, ok := p.Find(&key)
	if !ok {
		return fuse.ENOENT
	}
	n, err := p.EvictPrefix(&key)
	t.chains.drop(makeNode(kindPrefix, p.index, generation, slot))
	if err == nil && n == 0 {
		err = errShared
	}
	return status(err)
}

// SetAttr changes nothing of a stored file. Times are taken without complaint, since no tool that copies can do
// without, and owner or mode if they say what is so already. A file being copied in takes any owner and mode: it has
// the mount's once it is stored.
func (t *tree) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := nodeID(in.NodeId)
	keep, st := t.attr(n, &out.Attr)
	if st != fuse.OK {
		return st
	}
	if n.upload() {
		if size, ok := in.GetSize(); ok {
			if st := t.truncate(n, size); st != fuse.OK {
				return st
			}
			keep, st = t.attr(n, &out.Attr)
			return st
		}
		return fuse.OK
	}
	if _, ok := in.GetSize(); ok && n != nodeText+nodeID(len(t.o.Status)) {
		return fuse.EPERM
	}
	if mode, ok := in.GetMode(); ok && mode != out.Attr.Mode&0o7777 {
		return fuse.EPERM
	}
	if uid, ok := in.GetUID(); ok && uid != out.Attr.Uid {
		return fuse.EPERM
	}
	if gid, ok := in.GetGID(); ok && gid != out.Attr.Gid {
		return fuse.EPERM
	}
	if keep {
		out.SetTimeout(t.o.AttrTimeout)
	}
	return fuse.OK
}

// truncate lets a writer begin again, or announce the one size that files of the pool have; that writes nothing.
func (t *tree) truncate(n nodeID, size uint64) fuse.Status {
	u := t.writes.byNode(n)
	if u == nil {
		return eSTALE
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.state != uploadOpen:
		return fuse.EPERM
	case size > uint64(u.p.size()):
		return eFBIG
	case size == uint64(u.p.size()) || size == uint64(u.end()):
		return fuse.OK
	case size == 0:
		u.free()
		return fuse.OK
	}
	return fuse.EINVAL
}

// What makes no sense here is refused by name: the default, ENOSYS, would read as "this kernel cannot".

func (t *tree) Mknod(<-chan struct{}, *fuse.MknodIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

func (t *tree) Mkdir(<-chan struct{}, *fuse.MkdirIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

func (t *tree) Link(<-chan struct{}, *fuse.LinkIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

func (t *tree) Symlink(<-chan struct{}, *fuse.InHeader, string, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

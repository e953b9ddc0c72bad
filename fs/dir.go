package fs

import (
	"math"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/gpufile"
)

// Offsets of a directory stream, which the kernel takes for signed. 0 is the start, 1 and 2 lie behind "." and "..". A
// listing that gpufile streams has cookie + cookieBase behind each entry, and gpufile's cookies (30 bits of a hash
// before a slot) end at 1 << 62; the files being copied in follow from uploadOffset on.
const (
	offSelf      = 1
	offParent    = 2
	cookieBase   = 2
	uploadOffset = 3 << 61
)

// listBatch is how many entries are taken from gpufile at once: a full reply of names alone has 372 in 32 KiB.
const listBatch = 512

// firstPlus is how many files the first reply with attributes has. The kernel asks for it whoever is reading, and makes
// an inode of each entry; if the reader looks at them, the next replies carry attributes as well.
const firstPlus = 16

// openDir is the state of an open directory: what one READDIR needs, but nothing about where the reader is.
type openDir struct {
	mu    sync.Mutex // a directory read by several threads at once
	batch []gpufile.ListEntry
	chain []gpufile.Key // of a prefix directory, as it was when the stream began
	name  [keyChars]byte
}

var batches = sync.Pool{New: func() any {
	b := make([]gpufile.ListEntry, listBatch)
	return &b
}}

func (t *tree) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n := nodeID(in.NodeId)
	if !n.dir() {
		return fuse.ENOTDIR
	}
	d := &openDir{}
	switch {
	case n == nodeRoot:
		t.refreshPools()
	case n.kind() == kindPrefix:
		_, chain, st := t.chainOf(n, true)
		if st != fuse.OK {
			return st
		}
		d.chain = chain
	case n.kind() == kindPool && t.poolOf(n) == nil:
		return eSTALE
	}
	// No FOPEN_CACHE_DIR: files come and go without the kernel's knowledge, and a listing must not be older than its
	// open.
	out.Fh = t.handles.add(&handle{node: n, dir: d})
	return fuse.OK
}

func (t *tree) ReleaseDir(in *fuse.ReleaseIn) {
	if h := t.handles.remove(in.Fh); h != nil && t.o.Control != nil {
		h.closeControl(t.o.Control)
	}
}

func (t *tree) FsyncDir(<-chan struct{}, *fuse.FsyncIn) fuse.Status { return fuse.OK }

func (t *tree) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return t.readDir(in, out, false)
}

func (t *tree) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return t.readDir(in, out, true)
}

// dirStream adds entries to one reply.
type dirStream struct {
	t    *tree
	p    *poolNode
	out  *fuse.DirEntryList
	plus bool
	room int // streamed entries that fit, or that are wanted, at most
}

// The lengths of a reply's pieces, for judging how many entries to ask for: fuse_dirent and fuse_entry_out.
const (
	direntBytes   = 24
	entryOutBytes = 128
)

func (t *tree) readDir(in *fuse.ReadIn, out *fuse.DirEntryList, plus bool) fuse.Status {
	h := t.handles.get(in.Fh)
	if h == nil || h.dir == nil {
		return fuse.EBADF
	}
	if in.Offset > math.MaxInt64 {
		return fuse.EINVAL
	}
	h.dir.mu.Lock()
	defer h.dir.mu.Unlock()
	per := direntBytes + keyChars
	if plus {
		per += entryOutBytes
	}
	s := &dirStream{t: t, p: t.poolOf(h.node), out: out, plus: plus, room: int(in.Size)/per + 1}
	if plus && in.Offset == 0 {
		s.room = firstPlus
	}
	if !s.dots(h.node, in.Offset) {
		return fuse.OK
	}
	switch n := h.node; {
	case n == nodeRoot:
		s.root()
	case n == nodeStatus:
		s.status()
	case n.kind() == kindPrefix:
		s.chain(h.dir.chain)
	case n.slot() == poolTop:
		s.top()
	case n.slot() == poolBlocks:
		s.shards()
	case n.slot() == poolPrefixes:
		s.stream(h.dir, kindPrefix, s.p.ListTips)
	default:
		hh := byte(n.slot() - poolShard)
		s.blocks(h.dir, hh)
	}
	return fuse.OK
}

// dots adds "." and "..", which carry no attributes. It reports whether there is room behind them.
func (s *dirStream) dots(n nodeID, off uint64) bool {
	for ; off < offParent; off++ {
		name := ".."[:off+1]
		if !s.bare(fuse.DirEntry{Name: name, Ino: uint64(n), Mode: syscall.S_IFDIR, Off: off + 1}) {
			return false
		}
	}
	return true
}

// bare appends a name without attributes: whoever wants them looks it up.
func (s *dirStream) bare(e fuse.DirEntry) bool {
	if s.plus {
		return s.out.AddDirLookupEntry(e) != nil
	}
	return s.out.AddDirEntry(e)
}

// add appends an entry that is no stored file. Entries that are gone are passed over.
func (s *dirStream) add(n nodeID, name string, mode uint32, off uint64) bool {
	e := fuse.DirEntry{Name: name, Ino: uint64(n), Mode: mode, Off: off}
	if !s.plus || n.kind() == kindFixed && !n.upload() {
		return s.bare(e) // attributes of /.tuttifs/* take making their text
	}
	var entry fuse.EntryOut
	if s.t.entry(n, &entry) != fuse.OK {
		return true
	}
	out := s.out.AddDirLookupEntry(e)
	if out == nil {
		return false
	}
	*out = entry
	return true
}

// fixed adds the entries from a table: the i-th has offset offParent + i + 1.
func (s *dirStream) fixed(count int, at func(i int) (n nodeID, name string, mode uint32)) {
	for i := int(s.out.Offset - offParent); i >= 0 && i < count; i++ {
		n, name, mode := at(i)
		if !s.add(n, name, mode, offParent+uint64(i)+1) {
			return
		}
	}
}

// root lists the pools; /.tuttifs is reached by name only.
func (s *dirStream) root() {
	s.t.mu.Lock()
	n := s.t.npools
	s.t.mu.Unlock()
	s.fixed(n, func(i int) (nodeID, string, uint32) {
		p := s.t.pools[i].Load()
		return p.fixed(poolTop), p.Name(), syscall.S_IFDIR
	})
}

func (s *dirStream) status() {
	files := s.t.o.Status
	s.fixed(len(files)+1, func(i int) (nodeID, string, uint32) {
		if i == len(files) {
			return nodeText + nodeID(i), controlName, syscall.S_IFREG
		}
		return nodeText + nodeID(i), files[i].Name, syscall.S_IFREG
	})
}

func (s *dirStream) top() {
	s.fixed(3, func(i int) (nodeID, string, uint32) {
		switch i {
		case 0:
			return s.p.fixed(poolBlocks), blocksName, syscall.S_IFDIR
		case 1:
			return s.p.fixed(poolPrefixes), prefixesName, syscall.S_IFDIR
		}
		return s.p.fixed(poolIdentity), identityName, syscall.S_IFREG
	})
}

func (s *dirStream) shards() {
	s.fixed(256, func(i int) (nodeID, string, uint32) {
		return s.p.shard(byte(i)), shardName(byte(i)), syscall.S_IFDIR
	})
}

// chain lists prefixes/<key>/. Files of the chain that were removed since the open are left out.
func (s *dirStream) chain(chain []gpufile.Key) {
	for i := int(s.out.Offset - offParent); i >= 0 && i < len(chain); i++ {
		var entry fuse.EntryOut
		if s.t.lookupFile(s.p, kindLink, &chain[i], &entry) != fuse.OK {
			continue
		}
		e := fuse.DirEntry{Name: linkName(i, &chain[i]), Ino: entry.NodeId, Mode: syscall.S_IFLNK,
			Off: offParent + uint64(i) + 1}
		if !s.plus {
			if !s.out.AddDirEntry(e) {
				return
			}
		} else if out := s.out.AddDirLookupEntry(e); out != nil {
			*out = entry
		} else {
			return
		}
	}
}

// blocks lists blocks/<hh>: the stored files, then the ones being copied in.
func (s *dirStream) blocks(d *openDir, hh byte) {
	if s.out.Offset < uploadOffset {
		full := s.stream(d, kindBlock, func(cookie uint64, out []gpufile.ListEntry) int {
			return s.p.List(hh, cookie, out)
		})
		if full {
			return
		}
	}
	after := uint64(0)
	if s.out.Offset > uploadOffset {
		after = s.out.Offset - uploadOffset
	}
	for _, u := range s.t.writes.list(s.p.index, hh, after) {
		n := nodeUpload + nodeID(u.number)
		if !s.add(n, u.name.name, syscall.S_IFREG, uploadOffset+u.number) {
			return
		}
	}
}

// stream lists files from gpufile; what each entry shows is in the list, so nothing is looked up again. It reports
// whether the reply is full.
func (s *dirStream) stream(d *openDir, kind nodeKind, list func(uint64, []gpufile.ListEntry) int) (full bool) {
	if d.batch == nil {
		b := batches.Get().(*[]gpufile.ListEntry)
		d.batch = *b
		defer func() {
			d.batch = nil
			batches.Put(b)
		}()
	}
	mode := uint32(syscall.S_IFREG)
	if kind == kindPrefix {
		mode = syscall.S_IFDIR
	}
	for s.room > 0 {
		cookie := s.out.Offset - cookieBase
		batch := d.batch[:min(s.room, len(d.batch))]
		n := list(cookie, batch)
		if n == 0 {
			return false
		}
		s.room -= n
		for i := range batch[:n] {
			e := &batch[i]
			node := makeNode(kind, s.p.index, e.Generation, e.Slot)
			entry := fuse.DirEntry{Name: keyText(&d.name, &e.Key), Ino: uint64(node), Mode: mode,
				Off: e.Cookie + cookieBase}
			if !s.plus {
				if !s.out.AddDirEntry(entry) {
					return true
				}
				continue
			}
			out := s.out.AddDirLookupEntry(entry)
			if out == nil {
				return true
			}
			s.t.attrFile(&out.Attr, node, s.p, e.CommitTime, e.LastHit)
			s.t.entryDone(node, e.Generation, true, out)
		}
	}
	return true
}

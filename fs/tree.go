package fs

import (
	"encoding/json"
	"log"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

const (
	statusName   = ".tuttifs"
	controlName  = "control"
	blocksName   = "blocks"
	prefixesName = "prefixes"
	identityName = "identity.json"

	// blockBytes is the unit of statfs, preferredBytes what stat recommends for one read or write.
	blockBytes     = 4096
	preferredBytes = 1 << 20
	nameMax        = 255
)

// tree is the filesystem as go-fuse calls it. What a method does not find here is ENOSYS by the embedded default.
type tree struct {
	fuse.RawFileSystem

	o       Options
	b       backend
	start   time.Time // of the mount: the time of directories that are nobody's
	handles handleTable
	writes  uploads
	chains  chainCache
	buffers objectBuffers
	flight  readBudget
	counter counters
	closing sync.WaitGroup // open files, and stores that nobody waits for any more

	mu     sync.Mutex
	pools  [poolsMax]atomic.Pointer[poolNode] // filled in order under mu, read without it
	npools int                                // guarded by mu
	open   map[nodeID]*openNode               // guarded by mu; GPU files that are open
}

// openNode keeps an open file's attributes: the file may be removed meanwhile, and fstat goes on to work.
type openNode struct {
	info gpufile.FileInfo
	refs int
}

// poolNode is a pool with what the tree needs of it at every call; nothing in it changes.
type poolNode struct {
	files
	index     int
	layout    *stripe.Layout
	slotBytes uint64
	tokens    uint32 // of a full file
	// starts is the first byte of each object in the file as it is shown, and at the end the file's size. Trailers
	// are not shown and have no entry.
	starts   []int64
	identity []byte // the text of identity.json
	created  time.Time
}

func newTree(b backend, o Options) *tree {
	o.setDefaults()
	t := &tree{RawFileSystem: fuse.NewDefaultRawFileSystem(), o: o, b: b, start: time.Now()}
	t.open = make(map[nodeID]*openNode)
	t.flight.max = flightBytesMax
	t.writes.init()
	t.refreshPools()
	return t
}

func (o *Options) setDefaults() {
	if o.Name == "" {
		o.Name = "tuttifs"
	}
	if o.Logf == nil {
		o.Logf = log.Printf
	}
	switch o.Umask {
	case 0:
		o.Umask = 0o077
	case UmaskNone:
		o.Umask = 0
	}
	for _, d := range []*time.Duration{&o.EntryTimeout, &o.AttrTimeout} {
		if *d == 0 {
			*d = time.Second
		}
		*d = max(*d, 0)
	}
}

func (t *tree) String() string { return "tuttifs" }

// refreshPools takes pools in that were made since the last look. Their numbers are those of this mount, given in the
// order in which they are seen.
func (t *tree) refreshPools() {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := make(map[extentmap.PoolID]bool, t.npools)
	for i := range t.npools {
		known[t.pools[i].Load().ID()] = true
	}
	for _, f := range t.b.pools() {
		if known[f.ID()] {
			continue
		}
		if t.npools == poolsMax {
			t.o.Logf("pool %s is not shown: a mount shows at most %d pools", f.Name(), poolsMax)
			return
		}
		t.pools[t.npools].Store(newPoolNode(t.b, f, t.npools))
		t.npools++
	}
}

func newPoolNode(b backend, f files, index int) *poolNode {
	p := &poolNode{files: f, index: index, created: f.Created()}
	p.layout, p.slotBytes, p.tokens = b.shape(f)
	end := int64(0)
	objects := p.layout.Geometry().Objects
	for i := range objects {
		if objects[i].IsTrailer() {
			break
		}
		p.starts = append(p.starts, end)
		end += int64(objects[i].Bytes())
	}
	p.starts = append(p.starts, end)
	id := f.Identity()
	text, err := json.MarshalIndent(&id, "", "  ")
	if err != nil { // plain strings and numbers: cannot happen
		text = id.Canonical()
	}
	p.identity = append(text, '\n')
	return p
}

// size is the file's length as it is shown; objects counts those that are shown.
func (p *poolNode) size() int64  { return p.starts[len(p.starts)-1] }
func (p *poolNode) objects() int { return len(p.starts) - 1 }

// objectAt is the object that holds byte off of the file, 0 <= off < size.
func (p *poolNode) objectAt(off int64) int {
	return sort.Search(p.objects(), func(i int) bool { return p.starts[i+1] > off })
}

func (p *poolNode) fixed(which uint32) nodeID         { return makeNode(kindPool, p.index, 0, which) }
func (p *poolNode) shard(hh byte) nodeID              { return p.fixed(poolShard + uint32(hh)) }
func (p *poolNode) block(gen uint64, s uint32) nodeID { return makeNode(kindBlock, p.index, gen, s) }

func (t *tree) poolByName(name string) *poolNode {
	for range 2 {
		for i := range t.pools {
			p := t.pools[i].Load()
			if p == nil {
				break
			}
			if p.Name() == name {
				return p
			}
		}
		t.refreshPools()
	}
	return nil
}

// poolOf is the pool of a node id, nil if the kernel made it up.
func (t *tree) poolOf(n nodeID) *poolNode {
	if n.kind() == kindFixed {
		return nil
	}
	return t.pools[n.pool()].Load()
}

// stat describes the file behind a node id of kindBlock, kindPrefix or kindLink, if it is still that file.
func (t *tree) stat(n nodeID) (*poolNode, gpufile.FileInfo, fuse.Status) {
	p := t.poolOf(n)
	if p == nil || n.kind() == kindPool {
		return nil, gpufile.FileInfo{}, eSTALE
	}
	info, ok := p.Stat(n.slot(), n.generation(), genBits)
	if !ok {
		return p, info, eSTALE
	}
	return p, info, fuse.OK
}

// --- attributes

func (t *tree) attrBase(a *fuse.Attr, n nodeID, mode uint32) {
	*a = fuse.Attr{Ino: uint64(n), Nlink: 1, Blksize: preferredBytes, Owner: fuse.Owner{Uid: t.o.UID, Gid: t.o.GID}}
	switch mode {
	case syscall.S_IFDIR:
		// The C library sizes its reads of a directory by st_blksize. Small ones are better: the kernel asks for the
		// first with attributes, which make an inode of each entry, and for the rest only if somebody looks at them.
		a.Mode, a.Nlink, a.Blksize = mode|0o777&^t.o.Umask, 2, blockBytes
	case syscall.S_IFLNK:
		a.Mode = mode | 0o777
	default:
		a.Mode = mode | 0o666&^t.o.Umask
	}
}

func setTimes(a *fuse.Attr, change time.Time) {
	a.SetTimes(&change, &change, &change)
}

// attrDir fills in a directory that is no file's: its time is the pool's creation, or the mount's start.
func (t *tree) attrDir(a *fuse.Attr, n nodeID, change time.Time, subdirs int) {
	t.attrBase(a, n, syscall.S_IFDIR)
	a.Nlink += uint32(subdirs)
	setTimes(a, change)
}

// attrText fills in a generated file. Its blocks are zero: it occupies nothing.
func (t *tree) attrText(a *fuse.Attr, n nodeID, size int, change time.Time) {
	t.attrBase(a, n, syscall.S_IFREG)
	a.Size = uint64(size)
	setTimes(a, change)
}

// attrFile fills in what is shown of a GPU file: as itself, as the directory of its chain, or as a link to it.
func (t *tree) attrFile(a *fuse.Attr, n nodeID, p *poolNode, commitNS, lastHit int64) {
	switch n.kind() {
	case kindBlock:
		t.attrBase(a, n, syscall.S_IFREG)
		a.Size, a.Blocks = uint64(p.size()), p.slotBytes/512
	case kindPrefix:
		t.attrBase(a, n, syscall.S_IFDIR)
	case kindLink:
		t.attrBase(a, n, syscall.S_IFLNK)
		a.Size = uint64(len("../../blocks/hh/") + keyChars)
	}
	a.Mtime, a.Mtimensec = uint64(commitNS/1e9), uint32(commitNS%1e9)
	a.Ctime, a.Ctimensec = a.Mtime, a.Mtimensec
	a.Atime, a.Atimensec = a.Mtime, a.Mtimensec
	if lastHit > commitNS/1e9 { // hits are kept to the second: none is shown before the commit
		a.Atime, a.Atimensec = uint64(lastHit), 0
	}
}

// attr fills in any node. known is false for nodes whose attributes may not be kept by the kernel.
func (t *tree) attr(n nodeID, a *fuse.Attr) (keep bool, st fuse.Status) {
	switch {
	case n == nodeRoot:
		t.mu.Lock()
		pools := t.npools
		t.mu.Unlock()
		t.attrDir(a, n, t.start, pools)
		return true, fuse.OK
	case n == nodeStatus:
		t.attrDir(a, n, t.start, 0)
		return true, fuse.OK
	case n.upload():
		u := t.writes.byNode(n)
		if u == nil {
			return false, eSTALE
		}
		t.attrUpload(a, u)
		return false, fuse.OK
	case n.kind() == kindFixed:
		return false, t.attrStatus(n, a)
	case n.kind() == kindPool:
		return t.attrPool(n, a)
	}
	p, info, st := t.stat(n)
	if st == fuse.OK {
		t.attrFile(a, n, p, info.CommitTime, info.LastHit)
		return true, fuse.OK
	}
	if p == nil {
		return false, st
	}
	t.mu.Lock()
	open, ok := t.open[n]
	t.mu.Unlock()
	if !ok {
		return false, st
	}
	// Removed, but somebody still has it open.
	t.attrFile(a, n, p, open.info.CommitTime, open.info.LastHit)
	a.Nlink = 0
	return false, fuse.OK
}

func (t *tree) attrPool(n nodeID, a *fuse.Attr) (keep bool, st fuse.Status) {
	p := t.poolOf(n)
	if p == nil {
		return false, eSTALE
	}
	switch which := n.slot(); {
	case which == poolTop:
		t.attrDir(a, n, p.created, 2)
	case which == poolBlocks:
		t.attrDir(a, n, p.created, 256)
	case which == poolPrefixes:
		t.attrDir(a, n, p.created, 0)
	case which == poolIdentity:
		t.attrText(a, n, len(p.identity), p.created)
	case which >= poolShard && which < poolShard+256:
		t.attrDir(a, n, p.created, 0)
	default:
		return false, eSTALE
	}
	return true, fuse.OK
}

// attrStatus makes a status file's text to know its size: these files change at any time, and few people look.
func (t *tree) attrStatus(n nodeID, a *fuse.Attr) fuse.Status {
	text, ok := t.statusText(n)
	if !ok {
		return eSTALE
	}
	t.attrText(a, n, len(text), time.Now())
	return fuse.OK
}

// statusText is the text of a node of /.tuttifs.
func (t *tree) statusText(n nodeID) ([]byte, bool) {
	i := int(n - nodeText)
	switch {
	case n < nodeText || i > len(t.o.Status):
		return nil, false
	case i == len(t.o.Status):
		return nil, true // control is empty: only its ioctls mean something
	}
	return t.o.Status[i].Content(), true
}

func (t *tree) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := nodeID(in.NodeId)
	if in.Flags()&fuse.FUSE_GETATTR_FH != 0 {
		// An open text keeps the size that it was opened with.
		if h := t.handles.get(in.Fh()); h != nil && h.text != nil {
			t.attrText(&out.Attr, n, len(h.text), t.start)
			return fuse.OK
		}
	}
	keep, st := t.attr(n, &out.Attr)
	if keep {
		out.SetTimeout(t.o.AttrTimeout)
	}
	return st
}

// entry fills in a lookup's answer for a node that is no stored file.
func (t *tree) entry(n nodeID, out *fuse.EntryOut) fuse.Status {
	keep, st := t.attr(n, &out.Attr)
	if st != fuse.OK {
		return st
	}
	t.entryDone(n, 1, keep, out)
	return fuse.OK
}

func (t *tree) entryDone(n nodeID, generation uint64, keep bool, out *fuse.EntryOut) {
	out.NodeId, out.Generation = uint64(n), generation
	if keep {
		out.SetEntryTimeout(t.o.EntryTimeout)
		out.SetAttrTimeout(t.o.AttrTimeout)
	}
}

// --- names

func (t *tree) Lookup(_ <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if len(name) > nameMax {
		return eNAME
	}
	dir := nodeID(header.NodeId)
	switch {
	case dir == nodeRoot:
		if name == statusName {
			return t.entry(nodeStatus, out)
		}
		if p := t.poolByName(name); p != nil {
			return t.entry(p.fixed(poolTop), out)
		}
		return fuse.ENOENT
	case dir == nodeStatus:
		return t.lookupStatus(name, out)
	case dir.kind() == kindPool:
		if p := t.poolOf(dir); p != nil {
			return t.lookupPool(p, dir.slot(), name, out)
		}
		return eSTALE
	case dir.kind() == kindPrefix:
		return t.lookupLink(dir, name, out)
	}
	return fuse.ENOTDIR
}

func (t *tree) lookupStatus(name string, out *fuse.EntryOut) fuse.Status {
	if name == controlName {
		return t.entry(nodeText+nodeID(len(t.o.Status)), out)
	}
	for i := range t.o.Status {
		if t.o.Status[i].Name == name {
			return t.entry(nodeText+nodeID(i), out)
		}
	}
	return fuse.ENOENT
}

func (t *tree) lookupPool(p *poolNode, which uint32, name string, out *fuse.EntryOut) fuse.Status {
	switch {
	case which == poolTop:
		for i, n := range [...]string{poolBlocks: blocksName, poolPrefixes: prefixesName, poolIdentity: identityName} {
			if n == name && i != poolTop {
				return t.entry(p.fixed(uint32(i)), out)
			}
		}
	case which == poolBlocks:
		if hh, ok := parseShard(name); ok {
			return t.entry(p.shard(hh), out)
		}
	case which == poolPrefixes:
		if key, ok := parseKey(name); ok {
			return t.lookupFile(p, kindPrefix, &key, out)
		}
	case which >= poolShard:
		return t.lookupBlock(p, byte(which-poolShard), name, out)
	}
	return fuse.ENOENT
}

// lookupBlock finds a file of blocks/<hh>, stored or being copied in.
func (t *tree) lookupBlock(p *poolNode, hh byte, name string, out *fuse.EntryOut) fuse.Status {
	if key, ok := parseKey(name); ok && key[0] == hh {
		if st := t.lookupFile(p, kindBlock, &key, out); st != fuse.ENOENT {
			return st
		}
	}
	if u := t.writes.byName(uploadName{p.index, hh, name}); u != nil {
		t.entryUpload(u, out)
		return fuse.OK
	}
	return fuse.ENOENT
}

// lookupFile finds a stored file by its key, to be shown as kind.
func (t *tree) lookupFile(p *poolNode, kind nodeKind, key *gpufile.Key, out *fuse.EntryOut) fuse.Status {
	slot, generation, ok := p.Find(key)
	if !ok {
		return fuse.ENOENT
	}
	info, ok := p.Stat(slot, generation, 64)
	if !ok || info.Key != *key {
		return fuse.ENOENT // removed in this moment
	}
	n := makeNode(kind, p.index, generation, slot)
	t.attrFile(&out.Attr, n, p, info.CommitTime, info.LastHit)
	t.entryDone(n, generation, true, out)
	return fuse.OK
}

// lookupLink finds a name of prefixes/<key>/.
func (t *tree) lookupLink(dir nodeID, name string, out *fuse.EntryOut) fuse.Status {
	i, key, ok := parseLink(name)
	if !ok {
		return fuse.ENOENT
	}
	p, chain, st := t.chainOf(dir, false)
	if st != fuse.OK {
		return st
	}
	if i >= len(chain) || chain[i] != key {
		return fuse.ENOENT
	}
	return t.lookupFile(p, kindLink, &key, out)
}

func (t *tree) Readlink(_ <-chan struct{}, header *fuse.InHeader) ([]byte, fuse.Status) {
	n := nodeID(header.NodeId)
	if n.kind() != kindLink {
		return nil, fuse.EINVAL
	}
	_, info, st := t.stat(n)
	if st != fuse.OK {
		return nil, st
	}
	return []byte(linkTarget(&info.Key)), fuse.OK
}

// StatFs tells the store's budget: what no file could ever occupy is in none of the figures.
func (t *tree) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	s := t.b.space()
	*out = fuse.StatfsOut{
		Blocks: s.TotalBytes / blockBytes, Bfree: s.FreeBytes / blockBytes, Bavail: s.AvailableBytes / blockBytes,
		Files: s.FilesMax, Ffree: s.FilesMax - min(s.Files, s.FilesMax),
		Bsize: blockBytes, Frsize: blockBytes, NameLen: nameMax,
	}
	return fuse.OK
}

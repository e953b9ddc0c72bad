package fs

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"tuttifs/gpufile"
)

const (
	// uploadBytesMax bounds the memory of files being copied in, for the whole mount; one file is always let in.
	uploadBytesMax = 512 << 20
	// uploadKeep is how long a whole file under a temporary name waits for its rename after it was closed.
	uploadKeep = 10 * time.Minute
	// gapsMax bounds the pieces of a file that is written out of order.
	gapsMax = 1024
	// patience is how long a caller that was interrupted is still made to wait for its commit: signals that are no
	// wish to leave (a Go program's preemption) must not turn a good store into an error.
	patience = 2 * time.Second
)

// uploadName is where a file being copied in is seen: blocks/<hh>/<name> of a pool.
type uploadName struct {
	pool int
	hh   byte
	name string
}

// upload is a file being copied in. It is held in memory until it is whole, because its checksums cover what cp tells
// last (the tenant); then it is reserved, written and committed in one go: at close if its name is a key, at rename if
// it has a temporary name. A file that is not whole by then was never there.
type upload struct {
	t      *tree
	p      *poolNode
	number uint64 // of the node id, and of the place in listings
	uid    uint32
	begun  time.Time
	name   uploadName

	mu sync.Mutex
	// guarded by mu; the file's bytes outside the garbage collector's sight, nil before the first write
	buf     []byte
	written []interval    // guarded by mu; ascending, neither overlapping nor touching
	attrs   uploadAttrs   // guarded by mu; final while the file is being stored
	opens   int           // guarded by mu
	state   uploadState   // guarded by mu
	key     gpufile.Key   // guarded by mu: of the last attempt to store it
	removed bool          // guarded by mu: unlinked while it was being stored
	err     error         // guarded by mu: why the last attempt failed
	done    chan struct{} // guarded by mu: closed when the attempt under way has ended
}

type uploadState uint8

const (
	uploadOpen    uploadState = iota // collecting bytes
	uploadStoring                    // buf is being written to the drives: nobody changes or frees it
	uploadStored                     // committed; buf is gone
	uploadGone                       // removed or given up; buf is gone
)

// interval is the bytes [from, to).
type interval struct{ from, to int64 }

// uploadAttrs is what the xattrs say of a file before it is stored; nil means not said.
type uploadAttrs struct {
	parent                   gpufile.Key
	tenant, tokens, position *uint32
}

var (
	errShort   = errors.New("fs: the file is not whole")
	errShared  = errors.New("fs: other chains go on from this file")
	errTooMany = fmt.Errorf("fs: more files are being copied in than %d MiB hold", uploadBytesMax>>20)
)

// uploads is all files being copied in.
type uploads struct {
	mu    sync.Mutex
	last  uint64
	nodes map[nodeID]*upload
	names map[uploadName]*upload
	bytes int64 // charged for all of them
}

func (w *uploads) init() {
	w.nodes, w.names = make(map[nodeID]*upload), make(map[uploadName]*upload)
}

func (w *uploads) byNode(n nodeID) *upload {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[n]
}

func (w *uploads) byName(n uploadName) *upload {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names[n]
}

// list gives the files of one directory that come after a number, in order.
func (w *uploads) list(pool int, hh byte, after uint64) (list []listedUpload) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, u := range w.names {
		if name.pool == pool && name.hh == hh && u.number > after {
			list = append(list, listedUpload{u.number, name})
		}
	}
	sortUploads(list)
	return list
}

// all gives every file that is known.
func (w *uploads) all() (list []*upload) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, u := range w.nodes {
		list = append(list, u)
	}
	return list
}

// begin takes a new name in.
func (w *uploads) begin(t *tree, p *poolNode, name uploadName, uid uint32) (*upload, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names[name] != nil {
		return nil, errExists
	}
	if w.bytes > 0 && w.bytes+p.size() > uploadBytesMax {
		return nil, errTooMany
	}
	w.bytes += p.size()
	w.last++
	u := &upload{t: t, p: p, number: w.last, uid: uid, begun: time.Now(), name: name, opens: 1}
	w.nodes[u.node()] = u
	w.names[name] = u
	return u, nil
}

// hide takes a file's name away; its open files still reach it.
func (w *uploads) hide(u *upload) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names[u.name] == u {
		delete(w.names, u.name)
	}
}

// forget takes the last trace of a file away.
func (w *uploads) forget(u *upload) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names[u.name] == u {
		delete(w.names, u.name)
	}
	if w.nodes[u.node()] == u {
		delete(w.nodes, u.node())
		w.bytes -= u.p.size()
	}
}

func (u *upload) node() nodeID { return nodeUpload + nodeID(u.number) }

// open adds an open file to it.
func (u *upload) open() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state == uploadGone {
		return false
	}
	u.opens++
	return true
}

// writeAt takes bytes in.
func (u *upload) writeAt(data []byte, off uint64) error {
	end := off + uint64(len(data))
	if end > uint64(u.p.size()) || end < off {
		return errTooLong
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch u.state {
	case uploadGone:
		return nil // removed meanwhile: the writer goes on for nobody, as on any filesystem
	case uploadStoring, uploadStored:
		return errSealed
	}
	if u.buf == nil {
		buf, err := unix.Mmap(-1, 0, int(u.p.size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return fmt.Errorf("fs: %d bytes for a file being copied in: %w", u.p.size(), err)
		}
		u.buf = buf
	}
	merged, ok := addInterval(u.written, interval{int64(off), int64(end)})
	if !ok {
		return errScattered
	}
	u.written = merged
	copy(u.buf[off:], data)
	return nil
}

var (
	errTooLong   = errors.New("fs: longer than a file of this pool")
	errSealed    = errors.New("fs: stored files do not change")
	errScattered = fmt.Errorf("fs: written in more than %d pieces", gapsMax)
)

// addInterval merges a piece into an ascending list; ok is false if it grew too long.
func addInterval(list []interval, add interval) (out []interval, ok bool) {
	if add.from == add.to {
		return list, true
	}
	if n := len(list); n > 0 && list[n-1].to == add.from { // in order, as nearly always
		list[n-1].to = add.to
		return list, true
	}
	i := 0
	for i < len(list) && list[i].to < add.from {
		i++
	}
	j := i
	for ; j < len(list) && list[j].from <= add.to; j++ {
		add.from, add.to = min(add.from, list[j].from), max(add.to, list[j].to)
	}
	if len(list)-(j-i)+1 > gapsMax {
		return list, false
	}
	out = append(append(append(make([]interval, 0, len(list)+1), list[:i]...), add), list[j:]...)
	return out, true
}

// end is how far the file reaches now. u.mu is held.
func (u *upload) end() int64 {
	if u.state == uploadStored {
		return u.p.size()
	}
	if n := len(u.written); n > 0 {
		return u.written[n-1].to
	}
	return 0
}

// whole says whether every byte was written. Holes do not count: a file with holes is one whose writer died as
// likely as one that was written so. u.mu is held.
func (u *upload) whole() bool {
	return len(u.written) == 1 && u.written[0] == interval{0, u.p.size()}
}

// short says what is missing. u.mu is held.
func (u *upload) short() error {
	n := int64(0)
	for _, i := range u.written {
		n += i.to - i.from
	}
	return fmt.Errorf("%w: %d of %d bytes were written, in %d pieces; holes are not accepted (cp --sparse=never)",
		errShort, n, u.p.size(), len(u.written))
}

// readAt copies out what is there; bytes not written yet read as zero.
func (u *upload) readAt(p []byte, off uint64) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.buf == nil || off >= uint64(u.end()) {
		return 0
	}
	return copy(p, u.buf[off:u.end()])
}

// commit stores the file under key and waits for it. It may be called again after a failure.
func (u *upload) commit(key gpufile.Key, cancel <-chan struct{}) error {
	u.mu.Lock()
	switch u.state {
	case uploadOpen:
		if !u.whole() {
			err := u.short()
			u.mu.Unlock()
			u.t.o.Logf("pool %s: key %x is not stored: %v", u.p.Name(), key[:], err)
			return err
		}
		u.state, u.key, u.done = uploadStoring, key, make(chan struct{})
		u.opens++ // the task's own hold
		u.t.closing.Add(1)
		go u.store(key, u.buf, u.item(key))
	case uploadGone:
		u.mu.Unlock()
		return nil
	case uploadStoring, uploadStored:
		if u.key != key { // an interrupted rename goes on
			u.mu.Unlock()
			return errSealed
		}
		if u.state == uploadStored {
			u.mu.Unlock()
			return nil
		}
	}
	done := u.done
	u.mu.Unlock()

	select {
	case <-done:
	case <-cancel:
		select {
		case <-done:
		case <-time.After(patience):
			return errInterrupted // it goes on, and is stored or not
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state == uploadStored {
		return nil
	}
	return u.err
}

var errInterrupted = errors.New("fs: interrupted; the file may yet be stored")

// item is what is reserved. u.mu is held.
func (u *upload) item(key gpufile.Key) gpufile.ReserveItem {
	item := gpufile.ReserveItem{Key: key, Parent: u.attrs.parent, Tokens: u.p.tokens}
	if u.attrs.tokens != nil {
		item.Tokens = *u.attrs.tokens
	}
	if u.attrs.position != nil {
		item.Position = *u.attrs.position
	} else if slot, generation, ok := u.p.Find(&item.Parent); ok {
		if parent, ok := u.p.Stat(slot, generation, 64); ok {
			item.Position = parent.Position + 1
		}
	}
	return item
}

func (a *uploadAttrs) tenantID() uint32 {
	if a.tenant == nil {
		return 0
	}
	return *a.tenant
}

// store runs on its own goroutine. State uploadStoring keeps buf as it is.
func (u *upload) store(key gpufile.Key, buf []byte, item gpufile.ReserveItem) {
	defer u.t.closing.Done()
	err := guard(func() error {
		return u.t.b.store(u.p.files, u.uid, u.attrs.tenantID(), item, func(w FileWriter) error {
			return writeObjects(u.p, w, buf)
		})
	})
	u.mu.Lock()
	u.err = err
	if err == nil {
		u.state = uploadStored
		u.free()
		u.t.counter.storedFiles.Add(1)
		u.t.counter.storedBytes.Add(uint64(u.p.size()))
	} else {
		u.state = uploadOpen
		if u.removed {
			u.state = uploadGone
			u.free()
		}
		u.t.o.Logf("pool %s: key %x is not stored: %v", u.p.Name(), key[:], err)
	}
	removed, done := u.removed, u.done
	u.mu.Unlock()
	if err == nil {
		u.t.writes.hide(u)
	}
	if err == nil && removed {
		if err := u.p.Unlink(&key); err != nil && !errors.Is(err, gpufile.ErrNotFound) {
			u.t.o.Logf("pool %s: key %x was removed while it was being stored, and stays: %v", u.p.Name(), key[:], err)
		}
	}
	u.t.released(u)
	close(done) // last, so that who has waited finds the name free
}

// writersMax is how many objects of one file are written at once.
const writersMax = 8

// writeObjects hands a whole file's objects over.
func writeObjects(p *poolNode, w FileWriter, buf []byte) error {
	var wg sync.WaitGroup
	errs := make([]error, min(writersMax, p.objects()))
	for i := range errs {
		wg.Go(func() {
			for o := i; o < p.objects() && errs[i] == nil; o += len(errs) {
				errs[i] = guard(func() error { return w.WriteObject(uint16(o), buf[p.starts[o]:p.starts[o+1]]) })
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// free unmaps the file's bytes. u.mu is held.
func (u *upload) free() {
	if u.buf != nil {
		unix.Munmap(u.buf)
		u.buf = nil
	}
	u.written = nil
}

// released takes one open file off. What nobody can reach or finish any more is given up.
func (t *tree) released(u *upload) {
	_, isKey := parseKey(u.name.name)
	u.mu.Lock()
	u.opens--
	idle := u.opens == 0
	keep := idle && u.state == uploadOpen && u.whole() && !isKey
	u.mu.Unlock()
	switch {
	case keep:
		time.AfterFunc(uploadKeep, func() {
			u.mu.Lock()
			waiting := u.opens == 0 && u.state == uploadOpen
			u.mu.Unlock()
			if waiting {
				t.giveUp(u)
			}
		})
	case idle:
		t.giveUp(u)
	}
}

// remove is an unlink: what is being stored is removed when it has been.
func (t *tree) remove(u *upload) {
	u.mu.Lock()
	u.removed = u.removed || u.state == uploadStoring
	u.mu.Unlock()
	t.giveUp(u)
}

// giveUp removes a file that was not stored; of a stored one only the traces go.
func (t *tree) giveUp(u *upload) {
	t.writes.hide(u)
	u.mu.Lock()
	switch u.state {
	case uploadStoring:
		// Its task has the last word: released comes again.
		u.mu.Unlock()
		return
	case uploadOpen:
		u.state = uploadGone
		u.free()
	}
	last := u.opens <= 0
	u.mu.Unlock()
	if last {
		t.writes.forget(u)
	}
}

func (t *tree) attrUpload(a *fuse.Attr, u *upload) {
	u.mu.Lock()
	size := u.end()
	u.mu.Unlock()
	t.attrText(a, u.node(), int(size), u.begun)
}

// entryUpload is an answer that the kernel may not keep: the name soon means a stored file.
func (t *tree) entryUpload(u *upload, out *fuse.EntryOut) {
	t.attrUpload(&out.Attr, u)
	t.entryDone(u.node(), 1, false, out)
}

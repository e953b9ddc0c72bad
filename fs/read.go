package fs

import (
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/gpufile"
)

const (
	// aheadBytes is how far a sequential reader is served ahead of its requests: two of the largest, so that the next
	// request's bytes are verified while this one's are copied.
	aheadBytes = 2 << 20
	// taskBytes is what one goroutine reads and verifies: small objects are taken together.
	taskBytes = 256 << 10
	// piecesMax bounds the buffers of one reply; a reply of more (tiny objects) is copied together.
	piecesMax = 256
)

// openFile is one open GPU file: it holds the slot from open to release, so removal and reuse do not touch it.
//
// Objects are verified whole before a byte of them is returned. A reader that goes through the file from its start, or
// on from where its last request ended, finds the objects behind its request read already.
type openFile struct {
	t       *tree
	p       *poolNode
	node    nodeID
	info    gpufile.FileInfo
	r       FileReader
	release func()

	mu      sync.Mutex
	changed sync.Cond       // an object is loaded, or inflight fell to zero
	objects map[int]*object // guarded by mu: what the window holds, by object number
	next    int64           // guarded by mu: the end of the last request
	loading int             // guarded by mu: tasks that run
	damaged bool            // guarded by mu: damage was reported
}

// object is one object's bytes in memory.
type object struct {
	number int
	buf    []byte
	refs   int  // guarded by openFile.mu: the window's, and one for each reply that is made of it
	loaded bool // guarded by openFile.mu: buf and err are final
	err    error
}

// openBlock opens a stored file for reading.
func (t *tree) openBlock(n nodeID) (*openFile, fuse.Status) {
	p := t.poolOf(n)
	if p == nil {
		return nil, eSTALE
	}
	info, release, ok := p.HoldRead(n.slot(), n.generation(), genBits)
	if !ok {
		return nil, eSTALE
	}
	f := &openFile{t: t, p: p, node: n, info: info, release: release, objects: make(map[int]*object)}
	f.changed.L = &f.mu
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.open[n]
	if o == nil {
		o = &openNode{info: info}
		t.open[n] = o
	}
	o.refs++
	t.closing.Add(1)
	return f, fuse.OK
}

// reader makes the FileReader at the first read: most opens are for attributes and ioctls only.
func (f *openFile) reader() (FileReader, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.r == nil {
		r, err := f.t.b.open(f.p.files, f.info)
		if err != nil {
			return nil, err
		}
		f.r = r
	}
	return f.r, nil
}

// close gives everything back when the last task has ended. It does not wait for it.
func (f *openFile) close() {
	t := f.t
	t.mu.Lock()
	if o := t.open[f.node]; o != nil {
		if o.refs--; o.refs == 0 {
			delete(t.open, f.node)
		}
	}
	t.mu.Unlock()
	go func() {
		defer t.closing.Done()
		f.mu.Lock()
		for f.loading > 0 {
			f.changed.Wait()
		}
		for _, o := range f.objects {
			f.drop(o)
		}
		r := f.r
		f.mu.Unlock()
		if r != nil {
			r.Close()
		}
		f.release()
	}()
}

// drop takes an object out of the window. f.mu is held.
func (f *openFile) drop(o *object) {
	delete(f.objects, o.number)
	f.unref(o)
}

// unref gives a buffer back when nobody looks at it any more. f.mu is held.
func (f *openFile) unref(o *object) {
	if o.refs--; o.refs == 0 {
		f.t.buffers.put(o.buf)
		o.buf = nil
	}
}

// share is the memory of the objects that [off, end) lies in.
func (f *openFile) share(off, end int64) (n int64) {
	starts, last := f.p.starts, f.p.objectAt(end-1)
	for i := f.p.objectAt(off); i <= last; i++ {
		n += bufferBytes(int(starts[i+1] - starts[i]))
	}
	return n
}

// read returns up to size bytes from off: fewer only at the end of the file. It waits while the reads in flight take
// all the memory that they may.
func (f *openFile) read(cancel <-chan struct{}, off int64, size int, buf []byte) (fuse.ReadResult, fuse.Status) {
	if off < 0 || off >= f.p.size() || size == 0 {
		return fuse.ReadResultData(nil), fuse.OK
	}
	r, err := f.reader()
	if err != nil {
		return nil, status(err)
	}
	end := min(off+int64(size), f.p.size())
	reply := &readReply{f: f, size: int(end - off), share: f.share(off, end)}
	if !f.t.flight.take(reply.share, cancel) {
		return nil, fuse.EINTR
	}
	f.mu.Lock()
	now, later := f.plan(off, end, reply)
	f.mu.Unlock()
	for _, task := range later {
		go f.load(r, task)
	}
	f.load(r, now)
	f.mu.Lock()
	for _, o := range reply.objects {
		for !o.loaded {
			f.changed.Wait()
		}
		if err == nil {
			err = o.err
		}
	}
	f.mu.Unlock()
	if err != nil {
		reply.Done()
		return nil, status(err)
	}
	reply.cut(off, end)
	f.t.counter.readBytes.Add(uint64(reply.size))
	if len(reply.pieces) <= piecesMax {
		return reply, fuse.OK
	}
	n := 0
	for _, piece := range reply.pieces {
		n += copy(buf[n:], piece)
	}
	reply.Done()
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

// plan puts the objects of [off, end) into the reply and returns what has to be read: one task for the caller itself,
// if the reply waits for any, and the others. f.mu is held.
func (f *openFile) plan(off, end int64, reply *readReply) (now []*object, later [][]*object) {
	first, last := f.p.objectAt(off), f.p.objectAt(end-1)
	sequential := off == f.next || off == 0
	f.next = end
	ahead := last
	if sequential && end < f.p.size() {
		ahead = f.p.objectAt(min(end+aheadBytes, f.p.size()) - 1)
	}
	for _, o := range f.objects {
		if o.number < first || o.number > ahead {
			f.drop(o)
		}
	}
	var task []*object
	var tasks [][]*object
	wanted, bytes := 0, 0 // wanted: tasks with objects of this reply
	for i := first; i <= ahead; i++ {
		o := f.objects[i]
		if o == nil {
			if o = f.fetch(i, i <= last); o == nil {
				break // no memory for reading ahead
			}
			task = append(task, o)
			if bytes += len(o.buf); bytes >= taskBytes {
				tasks, task, bytes = append(tasks, task), nil, 0
			}
		}
		if i <= last {
			o.refs++
			reply.objects = append(reply.objects, o)
		}
		if i == last {
			if task != nil {
				tasks, task, bytes = append(tasks, task), nil, 0 // what is waited for does not wait for what is not
			}
			wanted = len(tasks)
		}
	}
	if task != nil {
		tasks = append(tasks, task)
	}
	f.loading += len(tasks)
	if wanted > 0 {
		return tasks[0], tasks[1:]
	}
	return nil, tasks
}

// fetch puts an object that is to be read into the window. f.mu is held.
func (f *openFile) fetch(i int, must bool) *object {
	buf := f.t.buffers.get(int(f.p.starts[i+1]-f.p.starts[i]), must)
	if buf == nil {
		return nil
	}
	// The window's reference, and the task's.
	o := &object{number: i, buf: buf, refs: 2}
	f.objects[i] = o
	return o
}

// load reads and verifies the objects of one task.
func (f *openFile) load(r FileReader, task []*object) {
	if task == nil {
		return
	}
	for _, o := range task {
		err := guard(func() error { return r.ReadObject(uint16(o.number), o.buf) })
		f.mu.Lock()
		o.err, o.loaded = err, true
		if err != nil {
			f.report(o.number, err)
			if f.objects[o.number] == o {
				f.drop(o) // the next request tries again
			}
		}
		f.unref(o)
		f.changed.Broadcast()
		f.mu.Unlock()
	}
	f.mu.Lock()
	f.loading--
	f.changed.Broadcast()
	f.mu.Unlock()
}

// guard turns a fault of this program into an error of one file: on a goroutine of its own it would end the daemon.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("fs: a fault of this program: %v\n%s", v, debug.Stack())
		}
	}()
	return f()
}

// report counts damage and has the store look at the file, once an open. f.mu is held.
func (f *openFile) report(number int, err error) {
	f.t.counter.readErrors.Add(1)
	if f.damaged {
		return
	}
	f.damaged = true
	f.t.o.Logf("pool %s: key %x: object %d: %v", f.p.Name(), f.info.Key[:], number, err)
	go f.t.b.reportBad(f.p.files, f.info.Slot, f.info.Generation)
}

// readReply is a reply made of the window's buffers, which go to the kernel without being copied together.
type readReply struct {
	f       *openFile
	objects []*object
	pieces  [][]byte
	size    int
	share   int64 // of readBudget, until Done
}

func (r *readReply) cut(off, end int64) {
	r.pieces = make([][]byte, len(r.objects))
	for i, o := range r.objects {
		start := r.f.p.starts[o.number]
		r.pieces[i] = o.buf[max(off-start, 0):min(end-start, int64(len(o.buf)))]
	}
}

// Size, Bytes, Slices and Done are fuse.ReadResult and its scatter-gather form.
func (r *readReply) Size() int { return r.size }

func (r *readReply) Slices() ([][]byte, fuse.Status) { return r.pieces, fuse.OK }

func (r *readReply) Bytes(buf []byte) ([]byte, fuse.Status) {
	buf = buf[:0]
	for _, p := range r.pieces {
		buf = append(buf, p...)
	}
	return buf, fuse.OK
}

func (r *readReply) Done() {
	f := r.f
	f.mu.Lock()
	keep := f.t.buffers.inUse.Load() <= keepBytesMax
	for _, o := range r.objects {
		if !keep && f.objects[o.number] == o {
			f.drop(o)
		}
		f.unref(o)
	}
	r.objects = nil
	f.mu.Unlock()
	f.t.flight.give(r.share)
	r.share = 0
}

// --- the calls

func (t *tree) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n := nodeID(in.NodeId)
	h := &handle{node: n, writable: in.Flags&syscall.O_ACCMODE != syscall.O_RDONLY}
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	switch {
	case n.upload():
		u := t.writes.byNode(n)
		if u == nil || !u.open() {
			return eSTALE
		}
		h.upload = u
	case n.kind() == kindFixed:
		text, ok := t.statusText(n)
		if !ok {
			return eSTALE
		}
		if h.writable && n != nodeText+nodeID(len(t.o.Status)) {
			return fuse.EPERM
		}
		h.text = append([]byte{}, text...)
	case h.writable:
		return fuse.EPERM // what is stored never changes
	case n.kind() == kindPool && n.slot() == poolIdentity:
		p := t.poolOf(n)
		if p == nil {
			return eSTALE
		}
		h.text = p.identity
	case n.kind() == kindBlock:
		f, st := t.openBlock(n)
		if st != fuse.OK {
			return st
		}
		h.file = f
	default:
		return fuse.EINVAL
	}
	out.Fh = t.handles.add(h)
	return fuse.OK
}

func (t *tree) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	h := t.handles.get(in.Fh)
	if h == nil {
		return nil, fuse.EBADF
	}
	switch {
	case h.file != nil:
		return h.file.read(cancel, int64(in.Offset), int(in.Size), buf)
	case h.upload != nil:
		return fuse.ReadResultData(buf[:h.upload.readAt(buf, in.Offset)]), fuse.OK
	}
	if in.Offset >= uint64(len(h.text)) {
		return fuse.ReadResultData(nil), fuse.OK
	}
	return fuse.ReadResultData(h.text[in.Offset:min(uint64(len(h.text)), in.Offset+uint64(in.Size))]), fuse.OK
}

func (t *tree) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	h := t.handles.remove(in.Fh)
	if h == nil {
		return
	}
	if t.o.Control != nil {
		h.closeControl(t.o.Control)
	}
	if h.file != nil {
		h.file.close()
	}
	if h.upload != nil {
		t.released(h.upload)
	}
}

// counters of the mount; see Stats.
type counters struct {
	readBytes, readErrors, storedFiles, storedBytes atomic.Uint64
}

// Stats of a mount's own readers and writers since it was mounted.
type Stats struct {
	ReadBytes   uint64 // returned to readers of GPU files, verified
	ReadErrors  uint64 // objects that could not be read or verified
	StoredFiles uint64 // copied in and committed
	StoredBytes uint64
}

func (c *counters) stats() Stats {
	return Stats{c.readBytes.Load(), c.readErrors.Load(), c.storedFiles.Load(), c.storedBytes.Load()}
}

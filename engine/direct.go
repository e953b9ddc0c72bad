package engine

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// SSDs whose own queue pairs a session has may reach its GPU's memory themselves, past the bounce cells: where a
// DeviceDMA gives them addresses of it, and a block that was written from it and read back into it is the same. That
// is tried with the first pool that is opened, on each of the drives. Whatever does not work, memory is bounced, and
// Describe says why.

// DeviceDMA makes memory of a GPU reachable for SSDs. Its methods are safe for concurrent use.
type DeviceDMA interface {
	// Reach says by what I/O address the session's SSDs reach n bytes of device memory.
	Reach(p cuda.Pointer, n uint64) (address uint64, err error)
	// Release ends a Reach of the same arguments.
	Release(p cuda.Pointer, n uint64)
	// String names the way, in a few words.
	String() string
}

// mappedDMA is a DeviceDMA by what driver and kernel have in common: the driver gives a dma-buf of an allocation,
// which the daemon maps as memory of its own, and that in the IOMMU of the SSDs as any other (type 1).
type mappedDMA struct {
	context *cuda.Context
	attach  *ioctl.Attachment

	mu     sync.Mutex
	ranges []*reachedRange
}

// reachedRange is an allocation that SSDs reach.
type reachedRange struct {
	base    cuda.Pointer
	bytes   uint64
	address uint64
	users   int
}

func (r *reachedRange) has(p cuda.Pointer, n uint64) bool {
	return p >= r.base && n <= r.bytes && uint64(p-r.base) <= r.bytes-n
}

func (d *mappedDMA) String() string { return "a mapping of its dma-buf" }

func (d *mappedDMA) Reach(p cuda.Pointer, n uint64) (uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.ranges {
		if r.has(p, n) {
			r.users++
			return r.address + uint64(p-r.base), nil
		}
	}
	r, err := d.reach(p, n)
	if err != nil {
		return 0, err
	}
	d.ranges = append(d.ranges, r)
	return r.address + uint64(p-r.base), nil
}

// reach maps the allocation that the memory lies in.
func (d *mappedDMA) reach(p cuda.Pointer, n uint64) (*reachedRange, error) {
	r, fd := &reachedRange{users: 1}, -1
	err := onContext(d.context, func() (err error) {
		if r.base, r.bytes, err = d.context.PointerRange(p); err != nil {
			return err
		}
		page := uint64(os.Getpagesize())
		if !r.has(p, n) || (uint64(r.base)|r.bytes)%page != 0 {
			return fmt.Errorf("%w: %d bytes at %#x lie in an allocation of %d bytes at %#x, which has to hold them, and to be "+
				"made of pages", ErrInvalid, n, uint64(p), r.bytes, uint64(r.base))
		}
		fd, err = d.context.ExportDMABuf(r.base, r.bytes)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	r.address, err = d.attach.Reach(fd, r.bytes)
	return r, err
}

func (d *mappedDMA) Release(p cuda.Pointer, n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, r := range d.ranges {
		if !r.has(p, n) {
			continue
		}
		if r.users--; r.users == 0 {
			d.ranges = append(d.ranges[:i], d.ranges[i+1:]...)
			_ = d.attach.Release(r.address) // or the session's end does it
		}
		return
	}
}

// onContext runs f on a thread that has the context.
func onContext(c *cuda.Context, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.Bind()
		if err == nil {
			err = errors.Join(f(), c.Unbind())
		}
		result <- err
	}()
	return <-result
}

// deviceMemory is how a session's SSDs reach its GPU's memory.
type deviceMemory struct {
	dma     DeviceDMA // nil: they do not
	probing sync.Once

	mu     sync.Mutex
	proven bool
	why    string // they do not
}

// newDeviceMemory says what can be tried: nothing, where not all drives are real or writes could arrive late.
func (s *Session) newDeviceMemory(o *GPUOptions) *deviceMemory {
	d := &deviceMemory{why: "no pool was opened yet, with which to try whether SSDs reach it"}
	if s.kept != nil {
		d.why = "blocks that are declined are kept in host memory (KeepBytes), whose controller does not reach it"
		return d
	}
	for i := range int(s.attach.Reply.Drives) {
		if s.attach.Share(i) == nil {
			d.why = "not all drives have queue pairs of their own"
			return d
		}
	}
	ordering, err := s.gpu.context.Device().Attribute(cuda.AttributeGPUDirectRDMAOrdering)
	if err != nil || ordering < cuda.DirectOrderedOwner {
		d.why = fmt.Sprintf("the GPU does not order writes of others before its own kernels (%d)", ordering)
		return d
	}
	if d.dma = o.DMA; d.dma == nil {
		d.dma = &mappedDMA{context: s.gpu.context, attach: s.attach}
	}
	return d
}

// peer is gio's question, and unpeer the end of what it was told.
func (d *deviceMemory) peer(p cuda.Pointer, n uint64) (uint64, bool) {
	d.mu.Lock()
	proven := d.proven
	d.mu.Unlock()
	if !proven {
		return 0, false
	}
	address, err := d.dma.Reach(p, n)
	return address, err == nil
}

func (d *deviceMemory) unpeer(p cuda.Pointer, n uint64) { d.dma.Release(p, n) }

func (d *deviceMemory) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.proven {
		return fmt.Sprintf("GPU memory: direct by %v", d.dma)
	}
	return "GPU memory: bounced, " + d.why
}

// prove tries it with a pool, once.
func (d *deviceMemory) prove(s *Session, p *Pool) {
	if d.dma == nil {
		return
	}
	d.probing.Do(func() {
		err := d.probe(s, p)
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.proven = err == nil; err != nil {
			d.why = err.Error()
		}
	})
}

// probe writes a slot of the pool's that nobody has, from the GPU's memory, and reads it back there, an object on each
// drive.
func (d *deviceMemory) probe(s *Session, p *Pool) (err error) {
	if stats, err := p.Stats(); err != nil {
		return err
	} else if stats.BytesUsed >= stats.BytesCapacity {
		return errors.New("the pool had no free slot to try it with")
	}
	item, grant := [1]Item{{Tokens: 1}}, [1]Grant{}
	_, _ = rand.Read(item[0].Key[:]) // it never fails
	reserve := binary.LittleEndian.Uint64(item[0].Key[:])
	if _, err := p.Reserve(0, reserve, item[:], false, grant[:]); err != nil {
		return fmt.Errorf("no slot to try it with: %w", err)
	}
	defer func() { err = errors.Join(err, p.Abort(reserve)) }()
	if grant[0].Status != ioctl.GrantNew {
		return errors.New("the mount's admission policy gives no slot to try it with")
	}
	tried := map[uint16]bool{}
	for object := range p.layout.Objects() {
		drive, _, _, ok := p.Map().Locate(grant[0].Slot, uint16(object))
		if !ok || tried[drive] || p.layout.ObjectBytes(uint16(object))%stripe.UnitBytes != 0 {
			continue
		}
		tried[drive] = true
		if err := d.probeObject(s, p, gio.IOCTX{Slot: grant[0].Slot, Object: uint16(object)}); err != nil {
			return fmt.Errorf("drive %d: %w", drive, err)
		}
	}
	if n := int(s.attach.Reply.Drives); len(tried) < n {
		return fmt.Errorf("objects of whole pages in one slot are on %d of %d drives: the others could not be tried",
			len(tried), n)
	}
	return nil
}

// errShape: lists of pages would have to be in more than one.
var errShape = errors.New("an object of the pool is too long for one list of pages")

// probeObject does it with one object.
func (d *deviceMemory) probeObject(s *Session, p *Pool, ctx gio.IOCTX) (err error) {
	n := int(p.layout.ObjectUnits(ctx.Object)) * stripe.UnitBytes
	b := probeMemory{context: s.gpu.context, n: n, want: make([]byte, n)}
	_, _ = rand.Read(b.want)
	if err := onContext(b.context, b.make); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, onContext(b.context, b.free)) }()
	// Two blocks, the second one behind the first: what is written, and where it is read to.
	var unreached error
	memory, err := s.gpu.ring.RegisterPaged(gio.Paged{
		Blocks: 2, Classes: [][]cuda.StridedRun{{{Base: uint64(b.p), Stride: uint64(n), Bytes: uint32(n)}}},
		Peer: func(p cuda.Pointer, n uint64) (uint64, bool) {
			address, err := d.dma.Reach(p, n)
			unreached = errors.Join(unreached, err)
			return address, err == nil
		},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.gpu.ring.Unregister(memory)) }()
	if !memory.Direct() {
		return fmt.Errorf("SSDs are given no address of it: %w", cmp.Or(unreached, errShape))
	}
	for block, write := range []bool{true, false} {
		ctx.Desc = memory.Block(0, uint64(block))
		ticket, err := s.ring.Issue(write, p.Map(), []gio.IOCTX{ctx})
		if err != nil {
			return err
		}
		failed, err := s.ring.Wait(ticket)
		if err != nil {
			return err
		}
		if len(failed) > 0 {
			return failed[0].Err
		}
	}
	if err := onContext(b.context, b.read); err != nil {
		return err
	}
	if got := b.host.Bytes[n : 2*n]; !bytes.Equal(got, b.want) {
		return errors.New("a block that was written from it and read back to it is another one")
	}
	return nil
}

// probeMemory is device memory for two blocks, in an allocation of its own.
type probeMemory struct {
	context *cuda.Context
	n       int
	want    []byte
	p       cuda.Pointer
	host    *cuda.HostMemory
	stream  *cuda.Stream
}

// probeBytes is the least that the driver gives as an allocation of its own.
const probeBytes = 2 << 20

func (b *probeMemory) bytes() uint64 {
	return uint64(max(probeBytes, (2*b.n+probeBytes-1)&^(probeBytes-1)))
}

// make allocates, and fills the first block; the second one is zero.
func (b *probeMemory) make() (err error) {
	if b.p, err = b.context.Alloc(b.bytes()); err != nil {
		return err
	}
	if b.host, err = b.context.AllocHost(2*b.n, false); err != nil {
		return errors.Join(err, b.free())
	}
	if b.stream, err = b.context.NewStream(0); err != nil {
		return errors.Join(err, b.free())
	}
	copy(b.host.Bytes, b.want)
	clear(b.host.Bytes[b.n:])
	err = b.stream.CopyHtoD(b.p, unsafe.Pointer(&b.host.Bytes[0]), uint64(2*b.n))
	if err = errors.Join(err, b.stream.Synchronize()); err != nil {
		return errors.Join(err, b.free())
	}
	return nil
}

// read brings both blocks to the host.
func (b *probeMemory) read() error {
	clear(b.host.Bytes)
	return errors.Join(b.stream.CopyDtoH(unsafe.Pointer(&b.host.Bytes[0]), b.p, uint64(2*b.n)), b.stream.Synchronize())
}

func (b *probeMemory) free() error {
	var errs []error
	if b.stream != nil {
		errs = append(errs, b.stream.Close())
	}
	if b.host != nil {
		errs = append(errs, b.context.FreeHost(b.host))
	}
	return errors.Join(append(errs, b.context.Free(b.p))...)
}

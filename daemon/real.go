package daemon

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/ioctl"
	"tuttifs/lifetime"
	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// Trust says whose engines may have queue pairs of the SSDs themselves. The zero value is nobody's. Whoever has one
// reads and writes every block of the drive, other tenants' and the volume's metadata included, and through the
// doorbells disturbs every queue of the controller: trust is that of the daemon itself.
type Trust struct {
	anybody bool
	user    bool
	uid     uint32
}

// ParseTrust reads "off", "on" (whoever can use the mount) or the number of a user.
func ParseTrust(s string) (Trust, error) {
	switch s {
	case "off":
		return Trust{}, nil
	case "on":
		return Trust{anybody: true}, nil
	}
	uid, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return Trust{}, fmt.Errorf("%q is not off, on or the number of a user", s)
	}
	return Trust{user: true, uid: uint32(uid)}, nil
}

func (t Trust) String() string {
	switch {
	case t.anybody:
		return "on"
	case t.user:
		return strconv.FormatUint(uint64(t.uid), 10)
	}
	return "off"
}

func (t Trust) allows(uid uint32) bool { return t.anybody || t.user && t.uid == uid }

// realSide is what a member has of SSDs whose own queue pairs it was given. member.setup guards it.
type realSide struct {
	drives       []bool // by the member's drives
	queues       map[*vfio.Controller]*vfio.Buffer
	mapped       []*vfio.Buffer // queue and DMA memory, for each controller
	sgl          bool
	commandBytes uint32
	reached      map[uint64]*reached // memory of others, by its address
	quarantined  atomic.Bool         // a controller that is dead may still write to the memory
}

// has says whether the d-th drive's queues are its own.
func (r *realSide) has(d int) bool { return r != nil && r.drives[d] }

// handOver makes queue and DMA memory reachable for the SSDs that have a driver of ours, and adds the descriptors from
// which their doorbells are mapped. Where there are none all stays mediated. The caller holds setup.
func (m *member) handOver(fds *descriptors) error {
	r := &realSide{drives: make([]bool, len(m.drives)), queues: map[*vfio.Controller]*vfio.Buffer{}, sgl: true,
		commandBytes: commandBytes}
	var controllers []*vfio.Controller
	var indices []uint16
	for d := range m.drives {
		own := m.drives[d].own
		if own == nil {
			continue
		}
		c := own.Controller()
		fd, offset, ok := c.Doorbells()
		if !ok || c.Err() != nil {
			continue // no page of doorbells that others can map, or a drive that is lost
		}
		if err := m.shareBells(d, fd, offset, fds); err != nil {
			return err
		}
		if _, known := r.queues[c]; !known {
			r.queues[c] = nil
			controllers = append(controllers, c)
		}
		_, sgl := c.HasSGL()
		r.sgl, r.commandBytes = r.sgl && sgl, min(r.commandBytes, uint32(c.TransferMax()))
		r.drives[d] = true
		indices = append(indices, m.drives[d].index)
	}
	if len(controllers) == 0 {
		return nil
	}
	m.real = r
	if err := m.mapReal(controllers); err != nil {
		return err
	}
	m.leases.Vouch(indices)
	shares := m.shareDrives()
	m.use.Lock()
	m.shared.real, m.shared.shares = indices, shares
	m.use.Unlock()
	return nil
}

// shareBells puts into the session page where the doorbells of a drive's controller are mapped: no more of its
// registers than the pages that have them.
func (m *member) shareBells(d, fd int, offset int64, fds *descriptors) error {
	own := m.drives[d].own
	page := int64(os.Getpagesize())
	copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%w: descriptor of drive %d: %w", ioctl.EMFILE, m.drives[d].index, err)
	}
	*fds = append(*fds, copied)
	first := offset &^ (page - 1)
	last := (offset + int64(own.Controller().DoorbellBytes()) + page - 1) &^ (page - 1)
	at := ioctl.BellsOffset + d*int(unsafe.Sizeof(ioctl.DriveBells{}))
	*(*ioctl.DriveBells)(unsafe.Pointer(&m.shared.queues[at])) = ioctl.DriveBells{
		Offset: uint64(first), Bytes: uint32(last - first), NSID: own.Namespace().ID}
	terms := termsOf(own)
	if buffer, ok := own.Controller().DoorbellBuffer(); ok {
		copied, err := unix.FcntlInt(uintptr(buffer), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%w: doorbell buffer of drive %d: %w", ioctl.EMFILE, m.drives[d].index, err)
		}
		*fds = append(*fds, copied)
		terms.Buffer = 1
	}
	at = ioctl.TermsOffset + d*int(unsafe.Sizeof(terms))
	*(*ioctl.DriveTerms)(unsafe.Pointer(&m.shared.queues[at])) = terms
	return nil
}

// termsOf has the directive that an engine's writes to a drive carry.
func termsOf(own *vfio.Drive) (t ioctl.DriveTerms) {
	for c := range lifetime.Classes {
		kind, specific := own.Directive(c)
		t.Directive, t.Specific[c] = uint16(kind), specific
	}
	return t
}

// The ABI numbers what the store expects.
var (
	_ = [1]struct{}{}[ioctl.LifetimeNormal-lifetime.Normal]
	_ = [1]struct{}{}[ioctl.LifetimeMetadata-lifetime.Metadata]
	_ = [1]struct{}{}[ioctl.LifetimeShort-lifetime.Short]
	_ = [1]struct{}{}[ioctl.LifetimeLong-lifetime.Long]
	_ = [1]struct{}{}[ioctl.Lifetimes-lifetime.Classes]
)

// mapReal makes the memory reachable at one address for all.
func (m *member) mapReal(controllers []*vfio.Controller) error {
	r := m.real
	queues, err := vfio.MapCommon(controllers, m.shared.queues)
	if err != nil {
		return fmt.Errorf("%w: %w", ioctl.ENOMEM, err)
	}
	r.mapped = queues
	for i, c := range controllers {
		r.queues[c] = queues[i]
	}
	if len(m.shared.dma) == 0 {
		return nil
	}
	dma, err := vfio.MapCommon(controllers, m.shared.dma)
	if err != nil {
		return fmt.Errorf("%w: %w", ioctl.ENOMEM, err)
	}
	r.mapped = append(r.mapped, dma...)
	m.dma.Base = dma[0].IOVA
	return nil
}

// attachPair begins a lane on a drive with a queue pair of its own, and says where it is rung. The caller holds setup.
func (m *member) attachPair(i, d int) error {
	own := m.drives[d].own
	c := own.Controller()
	off, n := m.blockAt(i, d)
	p, err := c.NewPair(int(m.depth), m.real.queues[c].Part(off, n))
	if err != nil {
		if errors.Is(err, vfio.ErrQuarantined) {
			m.real.quarantined.Store(true)
		}
		errno := ioctl.EIO
		if errors.Is(err, vfio.ErrUnsuitable) {
			errno = ioctl.EINVAL // too deep, or too many
		}
		return fmt.Errorf("daemon: lane %d: drive %d: %w: %w", i, m.drives[d].index, errno, err)
	}
	m.lanes[i].pairs[d] = &realPair{Pair: p, controller: c, side: m.real}
	_, offset, _ := c.Doorbells()
	skip := uint32(offset & int64(os.Getpagesize()-1)) // of the first page that is mapped
	bells := ioctl.PairBells{SQTail: p.SQTail - nvme.RegDoorbells + skip, CQHead: p.CQHead - nvme.RegDoorbells + skip}
	if _, ok := c.DoorbellBuffer(); ok {
		bells.TailShadow, bells.HeadShadow = p.SQTail-nvme.RegDoorbells, p.CQHead-nvme.RegDoorbells
	}
	*(*ioctl.PairBells)(unsafe.Pointer(&m.shared.queues[off+ioctl.PairOffset])) = bells
	return nil
}

// realPair is a queue pair of an SSD's own that an engine has.
type realPair struct {
	*vfio.Pair
	controller *vfio.Controller
	side       *realSide
	ended      chan error // not nil once it is being deleted
}

// begin starts to delete the pair. The driver ends that in bounded time, but may have to reset the controller for it.
func (p *realPair) begin() {
	if p.ended == nil {
		p.ended = make(chan error, 1)
		go func() { p.ended <- p.delete() }()
	}
}

// delete ends the pair: when it returns nil the controller touches its memory no more, or is dead and may for ever.
func (p *realPair) delete() error {
	err := p.Delete()
	if err != nil && !errors.Is(err, vfio.ErrQuarantined) {
		err = p.controller.Reset() // it does not do as it is told; afterwards it serves none but the daemon's own queues
	}
	if errors.Is(err, vfio.ErrQuarantined) {
		p.side.quarantined.Store(true)
		return nil
	}
	if err != nil && p.controller.Err() == nil {
		return err
	}
	return nil // it serves nobody any more
}

// errDeleting: a controller has not ended a queue pair yet.
var errDeleting = errors.New("daemon: queue pairs of an SSD's own are still being deleted")

// deletePairs ends the lane's own pairs. It may be called again after an error.
func (l *lane) deletePairs(deadline time.Time) error {
	for _, p := range l.pairs {
		if p != nil {
			p.begin()
		}
	}
	late := time.NewTimer(time.Until(deadline))
	defer late.Stop()
	for d, p := range l.pairs {
		if p == nil {
			continue
		}
		select {
		case err := <-p.ended:
			if err != nil {
				p.ended = nil
				return err
			}
			l.pairs[d] = nil
		case <-late.C:
			return errDeleting
		}
	}
	return nil
}

// unmapReal takes the memory from the controllers, when no pair is left. It says whether the memory may be reused.
func (m *member) unmapReal() bool {
	if m.real == nil {
		return true
	}
	if m.real.quarantined.Load() {
		m.c.o.Logf("session %d, process %d: a dead controller may still write to its memory, which is kept",
			m.leases.SessionID(), m.pid())
		return false
	}
	free := true
	for _, x := range m.real.reached {
		m.freeReached(x) // nobody waits for it
	}
	for _, b := range m.real.mapped {
		if err := b.Free(); err != nil {
			m.c.o.Logf("session %d, process %d: memory is kept: %v", m.leases.SessionID(), m.pid(), err)
			free = false
		}
	}
	return free
}

func (s *shared) mode() string {
	if len(s.real) > 0 {
		return "real"
	}
	return "mediated"
}

package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/stripe"
)

// Blocks that the mount's admission policy declines are kept in host memory, if the session has some for them, and
// serve their first reuse. To the executors that memory is one more drive, with a queue pair in each lane and a virtual
// controller in this process: what moves bytes, takes and verifies sums and waits is the same for all blocks.

// keptDrive is the number of the memory among a session's drives. No volume has as many.
const keptDrive = ioctl.DrivesMax

// KeepLeast is the least memory for blocks that are declined.
const KeepLeast = 1 << 20

// keptPollers serve the memory's queues; they sleep while the session has nothing in flight.
const keptPollers = 2

// keptMemory is a session's memory for blocks that were declined.
type keptMemory struct {
	drive      drive.Drive
	controller *emu.Controller
	pollers    []*emu.Poller
	running    sync.WaitGroup
	dma        emu.Region
	depth      int
	deadline   time.Duration
	queues     []byte       // of all lanes
	attached   []*emu.Queue // by lane

	mu   sync.Mutex
	used int64 // bytes that pools have
}

// newKeptMemory makes the memory and its queues, one for each lane of what was attached.
func newKeptMemory(o *SessionOptions, a *ioctl.Attachment) (k *keptMemory, err error) {
	r := &a.Reply
	k = &keptMemory{dma: emu.Region{Base: r.DMABase, Bytes: a.DMA}, depth: int(r.Depth), deadline: o.Deadline,
		attached: make([]*emu.Queue, r.Lanes)}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close())
		}
	}()
	if k.drive, err = drive.NewMemory("kept blocks", int64(o.KeepBytes)); err != nil {
		return k, err
	}
	size := int(r.Lanes) * nvme.QueueBytes(k.depth)
	if k.queues, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return k, fmt.Errorf("engine: %d bytes for queues: %w", size, err)
	}
	k.controller, err = emu.New(emu.Config{Drive: k.drive, Index: keptDrive, MDTS: emu.MDTSMax, SGL: true,
		Queues: uint16(r.Lanes), Serial: "KEPT"})
	if err != nil {
		return k, err
	}
	for i := range keptPollers {
		p, err := emu.NewPoller(emu.PollerConfig{Armed: a.Word(ioctl.ArmedWord), Wake: a.Word(ioctl.WakeWord),
			Number: keptPollerNumber + uint32(i)})
		if err != nil {
			return k, err
		}
		k.pollers = append(k.pollers, p)
		k.running.Go(p.Run)
	}
	for lane := range int(r.Lanes) {
		if err := k.attach(lane); err != nil {
			return k, err
		}
	}
	return k, nil
}

// keptPollerNumber is beyond those of the daemon's pollers, which share the words.
const keptPollerNumber = 1 << 16

// block is the memory of a lane's queue pair.
func (k *keptMemory) block(lane int) []byte {
	n := nvme.QueueBytes(k.depth)
	return k.queues[lane*n : (lane+1)*n]
}

// queue is a lane's queue pair.
func (k *keptMemory) queue(lane int) (gio.Queue, error) {
	memory, err := nvme.MapQueue(k.block(lane), k.depth)
	return gio.Queue{Memory: memory, Drive: keptDrive, LBABytes: k.drive.LBABytes()}, err
}

// attach has a lane's queue pair served.
func (k *keptMemory) attach(lane int) error {
	memory, err := nvme.MapQueue(k.block(lane), k.depth)
	if err != nil {
		return err
	}
	q, err := k.controller.Attach(emu.QueueConfig{Memory: memory, DMA: &k.dma})
	if err != nil {
		return err
	}
	k.attached[lane] = q
	k.pollers[lane%len(k.pollers)].Add(q)
	return nil
}

// quiesce ends a lane's queue pair; nothing of it is in flight then.
func (k *keptMemory) quiesce(lane int) error {
	return k.attached[lane].Quiesce(time.Now().Add(k.deadline))
}

// reattach gives a lane that was quiesced a new one.
func (k *keptMemory) reattach(lane int) error {
	clear(k.block(lane))
	return k.attach(lane)
}

// share is the next n bytes of the memory, as many as there are if there are less, in whole units of some size.
func (k *keptMemory) share(n, unit int64) (from, bytes int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if left := k.drive.Size() - k.used; n == 0 || n > left {
		n = left
	}
	from, bytes = k.used, n/unit*unit
	k.used += bytes
	return from, bytes
}

// giveBack undoes the share that began at from, and those after it.
func (k *keptMemory) giveBack(from int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.used = from
}

// stop ends the pollers, after the ring and before the words that they sleep on are unmapped.
func (k *keptMemory) stop() {
	if k == nil {
		return
	}
	for _, p := range k.pollers {
		p.Stop()
	}
	k.running.Wait()
}

// keep gives a pool a part of the memory: the one that it has, if it was opened before. opening is held.
func (s *Session) keep(p *Pool, spec *PoolSpec) error {
	if spec.KeepBytes < 0 {
		return fmt.Errorf("%w: %d bytes to keep", ErrInvalid, spec.KeepBytes)
	}
	if s.kept == nil {
		return nil
	}
	s.keeping.Lock()
	defer s.keeping.Unlock()
	select {
	case <-s.stop:
		return errClosed
	default:
	}
	for _, k := range s.keepers {
		if k.pool.target == p.target { // no other pool of the volume ever has its number
			p.keeper = k
			return nil
		}
	}
	k, err := newKeeper(p, s.kept, spec.KeepBytes, s.ring)
	if k == nil || err != nil {
		return err
	}
	p.keeper = k
	s.keepers = append(s.keepers, k)
	go k.run()
	return nil
}

// unkeep ends keepers from the n-th on: of a pool that could not be opened after all. opening is held.
func (s *Session) unkeep(n int) {
	s.keeping.Lock()
	defer s.keeping.Unlock()
	select {
	case <-s.stop:
		return // Close ends them
	default:
	}
	for _, k := range s.keepers[n:] {
		close(k.stop)
		<-k.ended
		s.kept.giveBack(int64(k.first) * stripe.UnitBytes)
	}
	s.keepers = slices.Delete(s.keepers, n, len(s.keepers))
}

// endKeepers waits for what keepers do. The ring was closed.
func (s *Session) endKeepers() {
	s.keeping.Lock()
	defer s.keeping.Unlock()
	for _, k := range s.keepers {
		close(k.stop)
		<-k.ended
	}
}

// close gives everything back. Nothing touches it any more.
func (k *keptMemory) close() (err error) {
	if k == nil {
		return nil
	}
	k.stop()
	if k.queues != nil {
		err = unix.Munmap(k.queues)
	}
	if k.drive != nil {
		err = errors.Join(err, k.drive.Close())
	}
	return err
}

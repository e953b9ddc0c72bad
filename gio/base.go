package gio

import (
	"errors"
	"fmt"
	"unsafe"

	"tuttifs/nvme"
)

// base is what all executors have: a configuration that was checked, the DMA memory as it is divided, and the memory
// that was registered.
type base struct {
	config  RingConfig
	drives  []int16 // index of a drive's queue in a lane, -1 for none
	prp     prpTable
	user    []byte     // what is left of DMA
	scratch [2]scratch // for reads and for writes, so that a write that is held back delays no read
	regions regionTable
	store   *storeBuffer // nil: stores go through the lanes' cells
	owners  storeOwners
	pacer   pacer
	wake    func() // has the pacer asked again
	bells   doorbells
}

// Doorbells counts the writes of SSDs' doorbell registers, and those that doorbell buffers have saved.
func (b *base) Doorbells() (written, saved uint64) {
	return b.bells.written.Load(), b.bells.saved.Load()
}

// configure checks the configuration, fills its defaults in and lays the DMA memory out: bounce cells, PRP lists,
// scratch, the user's.
func (b *base) configure(c RingConfig) error {
	if err := c.validate(); err != nil {
		return err
	}
	if c.Deadline == 0 {
		c.Deadline = DeadlineDefault
	}
	if c.ScratchBytes == 0 {
		c.ScratchBytes = min(scratchDefault, len(c.DMA)/8&^(pageBytes-1))
	}
	if c.StoreBytes > 0 && c.StoreLanes == 0 {
		c.StoreLanes = min(storeLanesDefault, len(c.Lanes)-1)
	}
	if c.Scheduler != nil && c.pacer == nil {
		c.pacer = c.Scheduler
	}
	if b.pacer = c.pacer; b.pacer == nil {
		b.pacer = readsFirst{}
	}
	b.config = c
	if err := b.layOut(); err != nil {
		return err
	}
	b.mapDrives()
	return nil
}

// DMA is the part of the DMA memory that the executor leaves to its user: buffers in it are reached directly.
func (b *base) DMA() []byte { return b.user }

// common is how many lanes carry everything but deferred writes: the first ones.
func (b *base) common() int { return len(b.config.Lanes) - b.config.StoreLanes }

// laneCells is the bytes of bounce cells of each lane; those of deferred writes have none.
func (b *base) laneCells() int { return b.config.BounceBytes / b.common() &^ (pageBytes - 1) }

// cells are a lane's bounce cells and their I/O address.
func (b *base) cells(lane int) (cells []byte, address uint64) {
	if lane >= b.common() {
		return nil, 0
	}
	n := b.laneCells()
	return b.config.DMA[lane*n : (lane+1)*n], b.config.DMABase + uint64(lane*n)
}

func (c *RingConfig) validate() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, a...)...))
	}
	if len(c.Lanes) == 0 || len(c.Lanes) > LanesMax {
		bad("%d lanes, 1 to %d are possible", len(c.Lanes), LanesMax)
	}
	for l, queues := range c.Lanes {
		if len(queues) == 0 || len(queues) != len(c.Lanes[0]) {
			bad("lane %d has %d queues, lane 0 has %d", l, len(queues), len(c.Lanes[0]))
			continue
		}
		for d := range queues {
			if err := queues[d].validate(); err != nil {
				bad("lane %d queue %d: %v", l, d, err)
			}
			if queues[d].Drive != c.Lanes[0][d].Drive {
				bad("lane %d queue %d is of drive %d, lane 0 has drive %d there",
					l, d, queues[d].Drive, c.Lanes[0][d].Drive)
			}
		}
	}
	if len(c.DMA) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(c.DMA)))%pageBytes != 0 || c.DMABase%pageBytes != 0 {
		bad("DMA memory of %d bytes at %#x does not begin on a page", len(c.DMA), c.DMABase)
	}
	if c.BounceBytes < 0 || c.ChunkCommands < 0 || c.Deadline < 0 ||
		c.ScratchBytes < 0 || c.ScratchBytes%pageBytes != 0 {
		bad("bounce %d, scratch %d, chunk %d, deadline %v: negative or no whole pages",
			c.BounceBytes, c.ScratchBytes, c.ChunkCommands, c.Deadline)
	}
	if (c.Armed == nil) != (c.Wake == nil) {
		bad("Armed and Wake go together")
	}
	if err := c.validateStore(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *RingConfig) validateStore() error {
	switch {
	case c.StoreBytes == 0 && c.StoreLanes == 0:
		return nil
	case c.StoreBytes < StoreLeast || c.StoreBytes%pageBytes != 0:
		return fmt.Errorf("%w: a store buffer of %d bytes, whole pages from %d bytes on are possible",
			ErrInvalid, c.StoreBytes, StoreLeast)
	case c.StoreLanes < 0 || len(c.Lanes) < 2 || c.StoreLanes >= len(c.Lanes):
		return fmt.Errorf("%w: %d of %d lanes for deferred writes: one of each kind is the least",
			ErrInvalid, c.StoreLanes, len(c.Lanes))
	case c.StorePolicy > StoreRefuse:
		return fmt.Errorf("%w: store policy %d", ErrInvalid, c.StorePolicy)
	}
	return nil
}

func (q *Queue) validate() error {
	m := &q.Memory
	if err := m.Validate(); err != nil {
		return err
	}
	if uintptr(unsafe.Pointer(&m.SQ[0]))%nvme.SQEBytes != 0 || uintptr(unsafe.Pointer(&m.CQ[0]))%nvme.CQEBytes != 0 {
		return errors.New("entries are not aligned")
	}
	if q.LBABytes != 512 && q.LBABytes != 4096 {
		return fmt.Errorf("logical blocks of %d bytes", q.LBABytes)
	}
	return nil
}

// layOut divides the DMA memory.
func (b *base) layOut() error {
	c := &b.config
	at := c.BounceBytes &^ (pageBytes - 1)
	lists := 0
	if !c.SGL {
		lists = prpTableBytes(len(c.DMA))
	}
	if at+c.StoreBytes+lists+c.ScratchBytes >= len(c.DMA) || c.ScratchBytes < 2*pageBytes {
		return fmt.Errorf("%w: DMA memory of %d bytes is too small: %d of bounce cells, %d of store buffer, "+
			"%d of PRP lists, %d of scratch", ErrInvalid, len(c.DMA), at, c.StoreBytes, lists, c.ScratchBytes)
	}
	if c.StoreBytes > 0 {
		m, err := b.ownMemory(at, c.StoreBytes)
		if err != nil {
			return err
		}
		b.store = newStoreBuffer(m, c.StorePolicy, c.Deadline)
		at += c.StoreBytes
	}
	if !c.SGL {
		b.prp = newPRPTable(c.DMA[at:at+lists], c.DMABase+uint64(at), c.DMABase, len(c.DMA))
		at += lists
	}
	for i := range b.scratch {
		half := c.ScratchBytes / 2 &^ (pageBytes - 1)
		m, err := b.ownMemory(at, half)
		if err != nil {
			return err
		}
		at += half
		b.scratch[i].memory = m
	}
	b.user = c.DMA[at:]
	return nil
}

// ownMemory registers a part of the DMA memory that is the executor's own.
func (b *base) ownMemory(at, n int) (*Memory, error) {
	c := &b.config
	m := &Memory{buf: c.DMA[at : at+n : at+n], base: c.DMABase + uint64(at), direct: true, padded: true}
	return m, b.regions.add(m)
}

func (b *base) mapDrives() {
	queues := b.config.Lanes[0]
	highest := uint16(0)
	for d := range queues {
		highest = max(highest, queues[d].Drive)
	}
	b.drives = make([]int16, int(highest)+1)
	for i := range b.drives {
		b.drives[i] = -1
	}
	for d := range queues {
		b.drives[queues[d].Drive] = int16(d)
	}
}

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
	b.config = c
	if err := b.layOut(); err != nil {
		return err
	}
	b.mapDrives()
	return nil
}

// DMA is the part of the DMA memory that the executor leaves to its user: buffers in it are reached directly.
func (b *base) DMA() []byte { return b.user }

// laneCells is the bytes of bounce cells of each lane.
func (b *base) laneCells() int { return b.config.BounceBytes / len(b.config.Lanes) &^ (pageBytes - 1) }

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
	return errors.Join(errs...)
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
	if at+lists+c.ScratchBytes >= len(c.DMA) || c.ScratchBytes < 2*pageBytes {
		return fmt.Errorf("%w: DMA memory of %d bytes is too small: %d of bounce cells, %d of PRP lists, %d of scratch",
			ErrInvalid, len(c.DMA), at, lists, c.ScratchBytes)
	}
	if !c.SGL {
		b.prp = newPRPTable(c.DMA[at:at+lists], c.DMABase+uint64(at), c.DMABase, len(c.DMA))
		at += lists
	}
	for i := range b.scratch {
		half := c.ScratchBytes / 2 &^ (pageBytes - 1)
		m := &Memory{buf: c.DMA[at : at+half : at+half], base: c.DMABase + uint64(at), direct: true, padded: true}
		at += half
		if err := b.regions.add(m); err != nil {
			return err
		}
		b.scratch[i].memory = m
	}
	b.user = c.DMA[at:]
	return nil
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

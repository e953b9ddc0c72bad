package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/checksum"
	"tuttifs/gio"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

// Copying blocks from the memory to the drives, once they were asked for again.

const (
	keptBatch      = 8        // blocks that are copied at a time
	keptStagingMax = 64 << 20 // bytes of them; one is copied in any case
)

// keptCopier has the memory from which blocks are stored: it is registered with the ring, as the whole memory is not.
type keptCopier struct {
	*keeper
	registered *gio.Memory // staging
	most       int         // blocks
}

// run copies what is queued, until the keeper is stopped.
func (k *keeper) run() {
	defer close(k.ended)
	slot := int(k.layout.SlotUnits()) * stripe.UnitBytes
	c := &keptCopier{keeper: k, most: max(1, min(keptBatch, keptStagingMax/slot))}
	for {
		select {
		case <-k.stop:
			return
		case <-k.wake:
		}
		for blocks := k.next(c.most); len(blocks) > 0; blocks = k.next(c.most) {
			c.copy(blocks)
			select {
			case <-k.stop:
				return
			default:
			}
		}
	}
}

// close gives the staging memory back. The ring was closed.
func (k *keeper) close() error {
	if k.staging == nil {
		return nil
	}
	return unix.Munmap(k.staging)
}

// next takes blocks off the queue, which hold their places until done.
func (k *keeper) next(most int) []*block {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := min(most, len(k.queue))
	blocks := k.queue[:n:n]
	k.queue = k.queue[n:]
	return blocks
}

// copy brings blocks to the drives that the mount admits. Any that cannot be brought there stay as they are: they are
// tried again when they are asked for again. One that is spoiled is dropped, and the others are begun with anew.
func (c *keptCopier) copy(blocks []*block) {
	defer c.done(blocks)
	for len(blocks) > 0 {
		n := 1 // a reservation is of one tenant
		for n < len(blocks) && blocks[n].Key.Tenant == blocks[0].Key.Tenant {
			n++
		}
		for left := c.there(blocks[:n]); len(left) > 0; left = c.there(left) {
			err := c.bring(left)
			if errors.Is(err, errSpoiled) {
				continue
			}
			if err != nil {
				c.failed(len(left))
			}
			break
		}
		blocks = blocks[n:]
	}
}

// there are those of blocks that were not dropped meanwhile.
func (c *keptCopier) there(blocks []*block) (left []*block) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range blocks {
		if c.index.Find(b.Key) == b {
			left = append(left, b)
		}
	}
	return left
}

func (c *keptCopier) failed(blocks int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Failed += uint64(blocks)
}

// bring reserves blocks and stores those that are admitted.
func (c *keptCopier) bring(blocks []*block) error {
	items, grants := make([]Item, len(blocks)), make([]Grant, len(blocks))
	for i, b := range blocks {
		items[i] = b.Value.item
	}
	id := rand.Uint64()
	n, err := c.reserve(blocks[0].Key.Tenant, id, items, grants)
	if err == nil {
		err = c.write(id, blocks[:n], grants[:n])
	}
	if err != nil {
		_ = c.pool.abortPart(id, 0) // it may not be there
		return err
	}
	c.failed(len(blocks) - n) // the drives had no room for them
	return nil
}

// reserve repeats a reservation while space is being freed, until the deadline or the keeper's end.
func (c *keptCopier) reserve(tenant uint32, id uint64, items []Item, grants []Grant) (n int, err error) {
	end := time.Now().Add(c.pool.control.deadline)
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		n, err = c.pool.reserve(tenant, id, items, true, grants)
		if !errors.Is(err, ioctl.EAGAIN) || time.Now().After(end) {
			return n, err
		}
		select {
		case <-c.stop:
			return 0, err
		case <-time.After(pause):
		}
	}
}

// write stores what is new of a reservation, and commits it.
func (c *keptCopier) write(id uint64, blocks []*block, grants []Grant) error {
	var fresh []*block
	var slots []gio.SlotIO
	gone, refused := []*block{}, 0
	for i, b := range blocks {
		switch grants[i].Status {
		case ioctl.GrantNew:
			fresh, slots = append(fresh, b), append(slots, gio.SlotIO{Slot: grants[i].Slot, Seed: grants[i].Seed})
		case ioctl.GrantExists:
			gone = append(gone, b)
		case ioctl.GrantDeclined:
			refused++
		}
	}
	ranks := make([]uint16, c.layout.Ranks())
	for rank := range ranks {
		ranks[rank] = uint16(rank)
		if len(fresh) == 0 {
			continue
		}
		if err := c.storeRank(uint16(rank), fresh, slots); err != nil {
			return err
		}
	}
	if err := c.pool.CommitRanks(id, ranks...); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Written += uint64(len(fresh))
	c.stats.Refused += uint64(refused)
	for _, b := range append(gone, fresh...) {
		c.index.Drop(b)
	}
	return nil
}

// storeRank verifies one rank's bytes and stores them. Sums are taken anew, from bytes that were compared with theirs.
func (c *keptCopier) storeRank(rank uint16, blocks []*block, slots []gio.SlotIO) error {
	if err := c.prepare(); err != nil {
		return err
	}
	for i, b := range blocks {
		if err := c.load(i, rank, b); err != nil {
			return err
		}
	}
	layers, err := c.ring.CreateLayers(c.pool.Map(), rank, slots)
	if err != nil {
		return err
	}
	defer layers.Close()
	for layer := range c.layout.Layers() {
		objects := c.layout.LayerObjects(uint16(layer), rank)
		if len(objects) == 0 {
			continue
		}
		var source []uint64
		for i := range blocks {
			for _, object := range objects {
				source = append(source, c.registered.Desc(c.at(i, object)))
			}
		}
		t, err := layers.StoreLayer(uint16(layer), source)
		if err != nil {
			return err
		}
		if err := t.Wait(); err != nil {
			return err
		}
	}
	return layers.Finish()
}

// prepare makes and registers the staging memory, when it is used first.
func (c *keptCopier) prepare() error {
	if c.registered != nil {
		return nil
	}
	size := c.most * int(c.layout.SlotUnits()) * stripe.UnitBytes
	staging, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("engine: %d bytes for copies: %w", size, err)
	}
	registered, err := c.ring.Register(staging)
	if err != nil {
		return errors.Join(err, unix.Munmap(staging)) // the next copy makes it anew
	}
	c.staging, c.registered = staging, registered
	return nil
}

// at is where an object of the i-th block lies in the staging memory.
func (c *keptCopier) at(i int, object uint16) int {
	return (i*int(c.layout.SlotUnits()) + int(c.layout.Offset(object))) * stripe.UnitBytes
}

var errSpoiled = errors.New("engine: a block that was kept is not what was stored")

// load copies one rank of a block to the staging memory, and compares it there with its sums.
func (c *keptCopier) load(i int, rank uint16, b *block) error {
	objects := c.layout.RankObjects(rank)
	sums := make([]uint64, len(objects))
	trailer := c.layout.TrailerObject(rank)
	whole := checksum.ParseTrailer(c.bytes(b, trailer), b.Value.seed, rank, trailer, sums)
	for _, object := range objects {
		at := c.at(i, object)
		payload := c.staging[at : at+copy(c.staging[at:], c.bytes(b, object))]
		whole = whole && checksum.Sum(b.Value.seed, rank, object, payload) == sums[c.layout.OrdinalInRank(object)]
	}
	if !whole {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.spoiled(b)
		return errSpoiled
	}
	return nil
}

// bytes is an object of a block in the memory.
func (c *keptCopier) bytes(b *block, object uint16) []byte {
	_, unit, _, _ := c.places.Locate(c.slot(b.Place), object) // all places are mapped
	from := int(unit-c.first) * stripe.UnitBytes
	return c.memory[from : from+int(c.layout.ObjectBytes(object))]
}

// done ends what was queued, whatever has become of it.
func (c *keptCopier) done(blocks []*block) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range blocks {
		b.Value.queued = false
		c.index.Release(b)
	}
}

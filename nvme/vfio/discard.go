package vfio

import (
	"errors"
	"fmt"
	"sync/atomic"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// dsmLimits are what one command of the drive may be about.
type dsmLimits struct {
	ranges      atomic.Int32 // 1 to nvme.DSMRangesMax
	rangeBlocks uint64
	blocks      uint64
}

// findDSMLimits asks the controller for its limits. One that refuses to say has none, or is older than they are.
func (d *Drive) findDSMLimits() error {
	d.dsm.ranges.Store(nvme.DSMRangesMax)
	d.dsm.rangeBlocks, d.dsm.blocks = 1<<31, 1<<63
	if id := d.c.Identity(); id.ONCS&nvme.ONCSDSM == 0 {
		return nil
	}
	b, err := d.c.IdentifyPage(0, nvme.CNSControllerIOCS)
	var st nvme.Status
	switch {
	case errors.As(err, &st):
		return nil
	case err != nil:
		return fmt.Errorf("drive %s: limits of discards: %w", d.name, err)
	}
	l, err := nvme.ParseDSMLimits(b)
	if err != nil {
		return d.c.errorf("%w: %w", ErrUnsuitable, err)
	}
	if l.Ranges != 0 {
		d.dsm.ranges.Store(int32(l.Ranges))
	}
	if l.RangeBlocks != 0 {
		d.dsm.rangeBlocks = min(d.dsm.rangeBlocks, uint64(l.RangeBlocks))
	}
	if l.Blocks != 0 {
		d.dsm.blocks = l.Blocks
		d.dsm.rangeBlocks = min(d.dsm.rangeBlocks, l.Blocks)
	}
	return nil
}

// Discard deallocates the whole blocks inside the range.
func (d *Drive) Discard(off, n int64) error {
	_, err := d.DiscardRanges([]drive.Range{{Off: off, N: n}})
	return err
}

// DiscardMost is how many ranges one command may be about.
func (d *Drive) DiscardMost() int { return int(d.dsm.ranges.Load()) }

// DiscardRanges deallocates the whole blocks inside the ranges, as many ranges a command as it may be about.
func (d *Drive) DiscardRanges(ranges []drive.Range) (commands int, err error) {
	for _, r := range ranges {
		if err := d.checkRange("discard", r.Off, r.N); err != nil {
			return 0, err
		}
	}
	if err := d.enter("discard", 0, 0, true); err != nil {
		return 0, err
	}
	defer d.life.RUnlock()
	if id := d.c.Identity(); id.ONCS&nvme.ONCSDSM == 0 {
		return 0, d.errorf("discard", 0, 0, drive.ErrNotSupported)
	}
	for list := d.dsmRanges(ranges); len(list) > 0; {
		k := d.dsm.fit(list)
		commands++
		err := d.deallocate(list[:k])
		switch {
		case err == nil:
			list = list[k:]
		case errors.Is(err, nvme.SizeLimit) && k > 1: // of a limit that it did not tell
			d.dsm.ranges.Store(int32(k / 2))
		default:
			return commands, fmt.Errorf("drive %s: discard of %d ranges: %w", d.name, k, shrunk(err))
		}
	}
	return commands, nil
}

// dsmRanges are the blocks of ranges, in pieces that the controller takes.
func (d *Drive) dsmRanges(ranges []drive.Range) (list []nvme.DSMRange) {
	for _, r := range ranges {
		for lba, blocks := d.inward(r.Off, r.N); blocks > 0; {
			k := min(blocks, d.dsm.rangeBlocks)
			list = append(list, nvme.DSMRange{Blocks: uint32(k), LBA: lba})
			lba, blocks = lba+k, blocks-k
		}
	}
	return list
}

// fit is how many of the ranges one command may be about: at least 1.
func (l *dsmLimits) fit(list []nvme.DSMRange) (k int) {
	blocks := uint64(0)
	for k < min(len(list), int(l.ranges.Load())) && blocks+uint64(list[k].Blocks) <= l.blocks {
		blocks += uint64(list[k].Blocks)
		k++
	}
	return k
}

// deallocate is one command; its ranges fit a page.
func (d *Drive) deallocate(list []nvme.DSMRange) error {
	d.edges.RLock()
	defer d.edges.RUnlock()
	c := <-d.cells
	defer func() { d.cells <- c }()
	for i, r := range list {
		nvme.PutDSMRange(c.b[i*nvme.DSMRangeBytes:], r.LBA, r.Blocks)
	}
	var e nvme.SQE
	nvme.BuildDSM(&e, 0, d.ns.ID, len(list))
	c.point(&e, len(list)*nvme.DSMRangeBytes)
	return d.do(e)
}

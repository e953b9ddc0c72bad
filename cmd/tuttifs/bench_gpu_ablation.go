package main

import (
	"errors"
	"fmt"
	"slices"

	"tuttifs/gio"
)

// gpuAblation is the ring with one thing changed.
type gpuAblation struct {
	Change   string  `json:"change"`
	Alone    float64 `json:"alone_gb_per_second"`
	Beside   float64 `json:"beside_attention_gb_per_second"`
	Slower   float64 `json:"attention_slower_percent"`
	Interval float64 `json:"interval_points"`
}

// gpuChange is one change of the ring.
type gpuChange struct {
	name  string
	plain bool // no checksums
	setup gpuSetup
}

// changes are the ideas off in turn, and sizes. The first is the ring as it is, and no other one is the same.
func (b *gpuBench) changes() []gpuChange {
	config := func(name string, change func(c *gio.GPUConfig)) gpuChange {
		return gpuChange{name: name, setup: gpuSetup{change: change}}
	}
	all := []gpuChange{
		{name: "none"},
		config("a build for each chunk", func(c *gio.GPUConfig) { c.BuildPerChunk = true }),
		config("a harvest for each chunk", func(c *gio.GPUConfig) { c.HarvestBytes = 1 }),
		{name: "no checksums", plain: true},
		{name: "completions in order", setup: gpuSetup{inOrder: true}},
	}
	sms := b.gpu.device.SMs() // more blocks than these are as many
	blocks := min(b.o.blocks, sms)
	for _, n := range others(blocks, max(1, blocks/4), max(1, blocks/2), min(2*blocks, sms), sms) {
		all = append(all, config(fmt.Sprintf("blocks of harvest: %d", n), func(c *gio.GPUConfig) { c.HarvestBlocks = n }))
	}
	for _, n := range others(int(b.o.move), 512<<10, 2<<20, 4<<20) {
		all = append(all, config("pieces of "+humanBytes(uint64(n)), func(c *gio.GPUConfig) { c.MoveBytes = n }))
	}
	for _, n := range others(b.o.moves, 1, 2) {
		all = append(all, config(fmt.Sprintf("pieces outstanding: %d", n), func(c *gio.GPUConfig) { c.Moves = n }))
	}
	for _, n := range others(b.o.lanes, 1, 2) {
		all = append(all, gpuChange{name: fmt.Sprintf("lanes: %d", n), setup: gpuSetup{lanes: n}})
	}
	staging, bounce := int(b.o.staging), int(b.o.bounce)
	stagings := []int{staging / 4, staging / 2, staging * 2}
	bounces := []int{bounce / 4, bounce / 2, bounce * 2, bounce * 4}
	if !b.o.scale.sizes {
		stagings, bounces = stagings[:1], bounces[3:]
	}
	for _, size := range stagings {
		all = append(all, config("staging of "+humanBytes(uint64(size)), func(c *gio.GPUConfig) {
			c.StagingBytes, c.HarvestBytes = size, min(gio.HarvestDefault, size/4)
		}))
	}
	for _, size := range bounces {
		change := gpuChange{name: "bounce memory of " + humanBytes(uint64(size)), setup: gpuSetup{bounce: size}}
		all = append(all, change)
	}
	return all
}

// others are the values, rising ones, without what is there anyway and once each.
func others(now int, values ...int) []int {
	return slices.Compact(slices.DeleteFunc(values, func(n int) bool { return n == now }))
}

// ablation measures restores of 64-KiB objects with one thing changed at a time.
func (b *gpuBench) ablation() (err error) {
	attention, err := b.attentionWork(b.gpu.context)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, attention.close()) }()
	if err := b.calibrate(b.gpu.context, attention); err != nil {
		return err
	}
	timer, err := b.newTimer(b.gpu.context)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, timer.close()) }()
	for _, change := range b.changes() {
		row := gpuAblation{Change: change.name}
		err := b.withRig(b.o.shape(gpuObjects[0]), change.setup, func(r *gpuRig) error {
			if err := b.once(r, false, !change.plain); err != nil {
				return err
			}
			s, err := r.sample(false, !change.plain, b.o.scale.period)
			if err != nil {
				return err
			}
			row.Alone = s.rate()
			way := b.ringWay(r, change.name, false, !change.plain, false)
			beside, err := b.besideBriefly(way, attention, timer)
			row.Beside, row.Slower, row.Interval = beside.GBs, beside.Slower, beside.Interval
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", change.name, err)
		}
		b.report.Ablation = append(b.report.Ablation, row)
	}
	return nil
}

// besideBriefly is beside with a few pairs.
func (b *gpuBench) besideBriefly(way *gpuWay, w *gpuWork, timer *gpuTimer) (gpuBeside, error) {
	saved := b.o.scale
	defer func() { b.o.scale = saved }()
	b.o.scale.others, b.o.scale.pairs = 2*saved.period, 2
	return b.beside(way, w, timer, timer, w)
}

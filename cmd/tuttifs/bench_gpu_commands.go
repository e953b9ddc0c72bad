package main

import (
	"fmt"
	"time"

	"tuttifs/gio"
)

// Bars of commands a second, and of CPU time.
const (
	gpuEmptyBar = 50 // million
	gpuSmallBar = 5
	gpuCPUBar   = 30 // microseconds of the I/O thread for each 16 MiB in 64-KiB objects
	gpuSmall    = 4 << 10
)

// gpuCommands is a rate of commands.
type gpuCommands struct {
	Way      string  `json:"way"`
	Bytes    int     `json:"bytes"` // of a command
	Millions float64 `json:"million_per_second"`
}

// gpuExecutors are those whose commands are counted.
var gpuExecutors = []struct {
	name   string
	change func(c *gio.GPUConfig)
}{
	{"ring", nil},
	{"polling kernel", func(c *gio.GPUConfig) { c.Polling = true }},
}

// smallShape is a layer of 4-KiB objects, in a quarter of the bytes.
func (b *gpuBench) smallShape() gpuShape {
	s := b.o.shape(gpuSmall)
	s.slots = max(1, s.slots/4)
	s.runs = 1
	return s
}

// smallDepth is of queues for small commands.
const smallDepth = 4096

// commands counts commands without bytes and of 4 KiB.
func (b *gpuBench) commands() error {
	for _, way := range gpuExecutors {
		err := b.withRig(b.smallShape(), gpuSetup{depth: smallDepth, change: way.change}, func(r *gpuRig) error {
			empty, err := b.countEmpty(r)
			if err != nil {
				return err
			}
			row, err := b.rate(r, "commands", way.name, false, false)
			if err != nil {
				return err
			}
			small := row.GBs * 1e9 / gpuSmall / 1e6
			b.report.Commands = append(b.report.Commands, gpuCommands{way.name, 0, empty},
				gpuCommands{way.name, gpuSmall, small})
			if way.change == nil { // what is promised is of the ring
				b.report.atLeast("empty commands", empty, gpuEmptyBar, "M/s")
				b.report.atLeast("4-KiB commands", small, gpuSmallBar, "M/s")
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	return nil
}

// countEmpty issues commands without bytes and returns how many millions of them a second were completed.
func (b *gpuBench) countEmpty(r *gpuRig) (float64, error) {
	ctxs := make([]gio.IOCTX, b.o.scale.commands)
	for i := range ctxs {
		ctxs[i] = gio.IOCTX{Slot: uint32(i % r.image.shape.slots), Flags: gio.FlagFlush}
	}
	var rates []float64
	for range b.o.scale.rounds {
		n, begin := 0, time.Now()
		more := lasting(begin, b.o.scale.period/2)
		var flying []gio.Ticket
		for {
			if len(flying) < 2 && more() {
				t, err := r.ring.Issue(true, r.image.m, ctxs)
				if err != nil {
					return 0, err
				}
				flying = append(flying, t)
				continue
			}
			if len(flying) == 0 {
				break
			}
			failed, err := r.ring.Wait(flying[0])
			if flying = flying[1:]; err == nil && len(failed) > 0 {
				err = failed[0].Err
			}
			if err != nil {
				return 0, err
			}
			n += len(ctxs)
		}
		rates = append(rates, float64(n)/time.Since(begin).Seconds()/1e6)
	}
	return median(rates), b.ctx.Err()
}

// cpuObjects are those of the part cpu: 64, 256 and 4,096 of them in 16 MiB.
var cpuObjects = []int{256 << 10, 64 << 10, gpuSmall}

// cpu measures the CPU time of the I/O thread by the number of objects.
func (b *gpuBench) cpu() error {
	for _, object := range cpuObjects {
		shape, setup := b.o.shape(object), gpuSetup{}
		if object == gpuSmall {
			shape, setup.depth = b.smallShape(), smallDepth
		}
		err := b.withRig(shape, setup, func(r *gpuRig) error {
			for _, write := range []bool{false, true} {
				row, err := b.rate(r, "cpu", "ring", write, true)
				if err != nil {
					return err
				}
				b.report.Rates = append(b.report.Rates, row)
				if object == gpuObjects[0] {
					b.report.atMost("I/O thread, "+row.Verb+", for 16 MiB of 64-KiB objects", row.CPUMicros, gpuCPUBar, "us")
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s objects: %w", humanBytes(uint64(object)), err)
		}
	}
	return nil
}

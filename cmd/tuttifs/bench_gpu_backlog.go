package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"tuttifs/gio"
	"tuttifs/phase"
)

// gpuBacklogBar is what restores keep of their rate during a backlog of stores, per cent.
const gpuBacklogBar = 95

// gpuStoreBuffer is the store buffer of the part backlog.
const gpuStoreBuffer = 256 << 20

// gpuBacklog is restores while stores are always waiting to be written.
type gpuBacklog struct {
	Phases      bool    `json:"phases"`       // the drives' reads and writes are kept apart
	StoreBuffer bool    `json:"store_buffer"` // stores go to host memory first; else straight to the drives
	Scheduler   bool    `json:"scheduler"`    // says when they go on from there; else they do when nothing is read
	ReadOnly    float64 `json:"read_only_gb_per_second"`
	Read        float64 `json:"read_gb_per_second"`
	Kept        float64 `json:"read_kept_percent"` // median of pairs
	Write       float64 `json:"write_gb_per_second"`
	WriteOnly   float64 `json:"write_only_gb_per_second"`
	Mixed       uint64  `json:"mixed_commands"` // that met the other direction on their drive
	Pairs       int     `json:"pairs"`
	Verified    bool    `json:"verified"`
}

// backlog measures restores alone and beside stores without end, in turns, with each switch on and off.
func (b *gpuBench) backlog() error {
	if b.o.scale.layers < 2 {
		return errors.New("it takes two layers: one is restored, one stored")
	}
	for _, row := range []gpuBacklog{
		{Phases: true, StoreBuffer: true, Scheduler: true}, {Phases: true, StoreBuffer: true}, {StoreBuffer: true},
		{Phases: true}, {},
	} {
		setup := gpuSetup{phases: &phase.Options{Off: !row.Phases}}
		if row.StoreBuffer {
			setup.store = min(gpuStoreBuffer, int(b.o.layer))
		}
		if row.Scheduler {
			scheduler, err := gio.NewScheduler(gio.SchedulerConfig{})
			if err != nil {
				return err
			}
			setup.change = func(c *gio.GPUConfig) { c.Scheduler = scheduler }
		}
		err := b.withRig(b.o.shape(gpuObjects[0]), setup, func(r *gpuRig) error { return b.backlogRow(r, &row) })
		if err != nil {
			return fmt.Errorf("%s: %w", row.switches(), err)
		}
		b.report.Backlog = append(b.report.Backlog, row)
		if row.Scheduler {
			b.report.promise(gpuBar{Name: "restores keep during a backlog of stores", Got: row.Kept, Wanted: gpuBacklogBar,
				Unit: "%", Met: row.Kept >= gpuBacklogBar})
			b.report.promise(gpuBar{Name: "  commands that met the other direction", Got: float64(row.Mixed), Unit: "commands",
				Most: true, Met: row.Mixed == 0})
		}
	}
	return nil
}

// switches names what is on.
func (row *gpuBacklog) switches() string {
	on := func(yes bool) string {
		if yes {
			return "on"
		}
		return "off"
	}
	return "phases " + on(row.Phases) + ", store buffer " + on(row.StoreBuffer) + ", scheduler " + on(row.Scheduler)
}

// backlogRow restores the first half of the layers, and stores the other half.
func (b *gpuBench) backlogRow(r *gpuRig, row *gpuBacklog) (err error) {
	half := r.image.shape.layers / 2
	reads, writes := gpuSpan{0, half}, gpuSpan{half, r.image.shape.layers - half}
	if err := b.restoreOnce(r, true); err != nil {
		return err
	}
	layer := r.image.shape.layerBytes()
	if err := r.gpu.set(r.pool, 0xa5, uint64(half*layer)); err != nil {
		return err
	}
	if err := b.refillLayers(r, writes); err != nil {
		return err
	}
	t := b.begin(r.backlogWay(writes))
	restored, err := b.backlogRates(r, row, t, reads)
	if err := errors.Join(err, t.end()); err != nil {
		return err
	}
	row.Mixed = r.mixed()
	// Each layer is stored once more: the backlog may have ended before it came to all of them.
	if err := r.storeLayers(writes); err != nil {
		return err
	}
	if err := errors.Join(b.verifyLayers(r, gpuSpan{0, min(restored, half)}), b.verifyLayers(r, writes)); err != nil {
		return err
	}
	row.Verified = true
	r.image.seal()
	return nil
}

// backlogWay stores layers for as long as it is let.
func (r *gpuRig) backlogWay(span gpuSpan) *gpuWay {
	return &gpuWay{
		bytes: func() uint64 { return r.ring.Stats().WrittenBytes },
		run: func(rounds func(round gpuRound) error) error {
			layers, err := r.openLayers(true, true)
			if err != nil {
				return err
			}
			defer layers.Close()
			return rounds(func(more func() bool) error {
				_, _, err := r.streamLayers(span, true, layers, more)
				return err
			})
		},
	}
}

// storeLayers stores each layer once, and waits until they are on the drives. Trailers are left as they are.
func (r *gpuRig) storeLayers(span gpuSpan) error {
	layers, err := r.openLayers(true, true)
	if err != nil {
		return err
	}
	defer layers.Close() // which is what waits
	left := span.count
	_, _, err = r.streamLayers(span, true, layers, func() bool { left--; return left >= 0 })
	return err
}

// backlogRates measures in turns. It returns how many layers were restored, from the first.
func (b *gpuBench) backlogRates(r *gpuRig, row *gpuBacklog, t *gpuTraffic, reads gpuSpan) (restored int, err error) {
	idle := func() error { time.Sleep(time.Millisecond); return nil }
	// written is the rate of stores while f runs. Afterwards the store buffer is empty.
	written := func(f func() error) (rate float64, err error) {
		if err := b.start(t, idle); err != nil {
			return 0, err
		}
		before, at := t.way.bytes(), time.Now()
		err = f()
		rate = float64(t.way.bytes()-before) / time.Since(at).Seconds() / 1e9
		stored := func() bool { return r.ring.StoreStats().Objects == 0 }
		return rate, errors.Join(err, b.stop(t, idle), b.settle(t, stored, idle))
	}
	if row.WriteOnly, err = written(func() error { time.Sleep(b.o.scale.period); return nil }); err != nil {
		return 0, err
	}
	var alone, beside, kept, writes []float64
	for range b.o.scale.rounds {
		first, err := r.sampleLayers(reads, false, true, b.o.scale.period)
		if err != nil {
			return 0, err
		}
		var second gpuSample
		rate, err := written(func() (err error) {
			second, err = r.sampleLayers(reads, false, true, b.o.scale.period)
			return err
		})
		if err != nil {
			return 0, err
		}
		restored = max(restored, first.layers, second.layers)
		alone, beside, writes = append(alone, first.rate()), append(beside, second.rate()), append(writes, rate)
		kept = append(kept, 100*second.rate()/first.rate())
	}
	row.ReadOnly, row.Read, row.Kept, row.Write = median(alone), median(beside), median(kept), median(writes)
	row.Pairs = len(kept)
	return restored, b.ctx.Err()
}

// mixed is the commands so far that began while others of the other direction were in flight on their drive.
func (r *gpuRig) mixed() (n uint64) {
	now := time.Now()
	for _, token := range r.phases {
		n += token.Stats(now).Mixed
	}
	return n
}

func (r *gpuReport) printBacklog(w io.Writer, i int) {
	row := &r.Backlog[i]
	fmt.Fprintf(w, "  %s\t%.2f\t%.2f\t%.1f %%\t%.2f\t%.2f\t%d\n", row.switches(), row.ReadOnly, row.Read, row.Kept,
		row.Write, row.WriteOnly, row.Mixed)
}

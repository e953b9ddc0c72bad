package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/nvme/emu"
)

// Shape of the part with a modelled drive: enough in flight that neither a lane's last command nor a poller's nap
// leaves the drive without work.
const (
	modelDrives = 1
	modelLanes  = 16
)

// modelReport is the document of bench rings with --drive-profile.
type modelReport struct {
	OutputVersion int                 `json:"output_version"`
	Cores         int                 `json:"cores"`
	Profile       *drivemodel.Profile `json:"profile"`
	Rows          []modelRow          `json:"rows"`
	Worst         *float64            `json:"worst_deviation"` // of the ratio from 1, where the machine is fast enough
}

// modelRow compares what came over the rings with what the profile says.
type modelRow struct {
	Verb        string  `json:"verb"`
	ObjectBytes int     `json:"object_bytes"`
	Sessions    int     `json:"sessions"`
	Depth       int     `json:"depth"` // in flight, of all sessions together
	WriteShare  float64 `json:"write_share"`
	RingGBs     float64 `json:"ring_gb_per_second"`
	ProfileGBs  float64 `json:"profile_gb_per_second"`
	Ratio       float64 `json:"ratio"`
	MachineGBs  float64 `json:"machine_gb_per_second"` // the same without the profile
	Counts      bool    `json:"counts"`                // the machine is well above the profile
}

// machineReserve is how much faster than the profile the machine must be for a row to count.
const machineReserve = 1.15

// benchModel measures RAM-backed drives that are held back to a profile, by several sessions at once.
func (o *benchRingsOptions) benchModel(ctx context.Context, e *env) error {
	p, err := loadProfile(o.profile)
	if err != nil {
		return err
	}
	report := &modelReport{OutputVersion: outputVersion, Cores: runtime.GOMAXPROCS(0), Profile: p}
	drives, closeAll, err := memoryDrives(modelDrives, int64(o.size)/modelDrives)
	if err != nil {
		return err
	}
	defer closeAll()
	for _, object := range benchObjects {
		for _, verb := range []string{"read", "write", "mixed"} {
			// Each session has two threads. Where these share cores, the drive is left without work at times.
			sessions := max(o.threads, runtime.GOMAXPROCS(0)/2, 1)
			if verb == "mixed" {
				sessions = max(sessions&^1, 2)
			}
			row, err := o.modelRow(ctx, drives, p, verb, object, sessions)
			if err != nil {
				return fmt.Errorf("modelled drive, %s: %w", verb, err)
			}
			report.Rows = append(report.Rows, row)
			if d := math.Abs(row.Ratio - 1); row.Counts && (report.Worst == nil || d > *report.Worst) {
				report.Worst = &d
			}
		}
	}
	if o.json {
		return printJSON(e.stdout, report)
	}
	return report.print(e)
}

// modelRow measures without the profile, then with it.
func (o *benchRingsOptions) modelRow(ctx context.Context, drives []drive.Drive, p *drivemodel.Profile, verb string,
	object, sessions int) (row modelRow, err error) {
	row = modelRow{Verb: verb, ObjectBytes: object, Sessions: sessions, Depth: sessions * modelLanes * ramChunk}
	if row.MachineGBs, _, err = o.modelRate(ctx, drives, nil, verb, object, sessions); err != nil {
		return row, err
	}
	var rings, shares, profiles, ratios []float64
	for range o.rounds {
		rate, m, err := o.modelRate(ctx, drives, p, verb, object, sessions)
		if err != nil {
			return row, err
		}
		rings, shares, profiles = append(rings, rate), append(shares, m.writeShare()), append(profiles, m.rate())
		ratios = append(ratios, rate/m.rate())
	}
	row.RingGBs, row.WriteShare = median(rings), median(shares)
	row.ProfileGBs, row.Ratio = median(profiles), median(ratios)
	row.Counts = row.MachineGBs > machineReserve*row.ProfileGBs
	return row, nil
}

// modelRate streams with a thread and a poller for each session. Mixed, every other session writes.
func (o *benchRingsOptions) modelRate(ctx context.Context, drives []drive.Drive, p *drivemodel.Profile, verb string,
	object, sessions int) (rate float64, m *mixMeter, err error) {
	b, err := newBenchDrives(drives, object, p)
	if err != nil {
		return 0, nil, err
	}
	w := &ramWork{b: b, object: object, seconds: o.period}
	if p == nil {
		w.seconds = o.period / 4
	}
	defer w.close()
	all := b.shuffled()
	dma := max(int(o.size)/4/sessions, 2*modelLanes*ramChunk*object) / object * object
	for i := range sessions {
		r, err := newBenchRig(b, benchShape{lanes: modelLanes, depth: ramDepth, chunk: ramChunk, dmaBytes: dma})
		if err != nil {
			return 0, nil, err
		}
		w.rigs = append(w.rigs, r)
		part := all[len(all)*i/sessions : len(all)*(i+1)/sessions]
		r.place(part, object, dma)
		w.parts = append(w.parts, part)
	}
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	m = &mixMeter{profile: p, object: object, controllers: b.controllers}
	stop := m.follow()
	rate, err = w.run(w.byVerb(verb))
	stop()
	if err == nil && m.all == [2]uint64{} {
		err = errors.New("nothing was moved")
	}
	return rate, m, err
}

// mixMeter follows the mixture. Sessions that share cores take turns, and what the profile gives then is the bandwidth
// of each moment's mixture, not that of the average.
type mixMeter struct {
	profile     *drivemodel.Profile // nil: only bytes are counted
	object      int
	controllers []*emu.Controller
	all         [2]uint64 // bytes read and written
	seconds     float64   // that the profile gives them
}

// mixEvery is short against a second, and not against what is in flight.
const mixEvery = 2 * time.Millisecond

// follow looks until it is told to stop.
func (m *mixMeter) follow() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(mixEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				m.look()
			case <-quit:
				m.look()
				return
			}
		}
	}()
	return func() { close(quit); <-done }
}

func (m *mixMeter) look() {
	var now [2]uint64
	for _, c := range m.controllers {
		s := c.Stats()
		now[0] += s.BytesRead
		now[1] += s.BytesWritten
	}
	read, written := float64(now[0]-m.all[0]), float64(now[1]-m.all[1])
	if m.profile != nil && read+written > 0 {
		m.seconds += (read + written) / m.profile.RateAt(written/(read+written), m.object) / float64(len(m.controllers))
	}
	m.all = now
}

// rate is the profile's GB/s of all that was moved.
func (m *mixMeter) rate() float64 { return float64(m.all[0]+m.all[1]) / m.seconds / 1e9 }

func (m *mixMeter) writeShare() float64 {
	return float64(m.all[1]) / float64(max(m.all[0]+m.all[1], 1))
}

// byVerb is one worker a session.
func (w *ramWork) byVerb(verb string) (workers []func(func() bool) (int, error)) {
	for i, r := range w.rigs {
		write := verb == "write" || verb == "mixed" && i%2 != 0
		workers = append(workers, func(more func() bool) (int, error) {
			return r.stream(write, w.parts[i], modelBatch, more)
		})
	}
	return workers
}

// modelBatch is small, so that all sessions end together.
const modelBatch = 2 * modelLanes * ramChunk

func (r *modelReport) print(e *env) error {
	e.printf("%d cores, a modelled drive\n  %s\n  of %s\n\n", r.Cores, r.Profile.Summary(), r.Profile.Of)
	t := table(e.stdout)
	fmt.Fprintf(t, "  object\tverb\twritten\tsessions\tdepth\tring GB/s\tprofile GB/s\tratio\tmachine GB/s\n")
	for _, row := range r.Rows {
		mark := ""
		if !row.Counts {
			mark = "\t(the machine is not fast enough for this to count)"
		}
		fmt.Fprintf(t, "  %s\t%s\t%.0f%%\t%d\t%d\t%.3f\t%.3f\t%.3f\t%.2f%s\n", humanBytes(uint64(row.ObjectBytes)), row.Verb,
			100*row.WriteShare, row.Sessions, row.Depth, row.RingGBs, row.ProfileGBs, row.Ratio, row.MachineGBs, mark)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Worst == nil {
		e.printf("\nno row counts: this machine is slower than the profile\n")
		return nil
	}
	e.printf("\nworst deviation  %.3f (0.03 wanted)\n", *r.Worst)
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"

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
	var rings, shares, ratios []float64
	for range o.rounds {
		rate, share, err := o.modelRate(ctx, drives, p, verb, object, sessions)
		if err != nil {
			return row, err
		}
		rings, shares = append(rings, rate), append(shares, share)
		ratios = append(ratios, rate/(p.RateAt(share, object)*modelDrives/1e9))
	}
	row.RingGBs, row.WriteShare, row.Ratio = median(rings), median(shares), median(ratios)
	row.ProfileGBs = p.RateAt(row.WriteShare, object) * modelDrives / 1e9
	row.Counts = row.MachineGBs > machineReserve*row.ProfileGBs
	return row, nil
}

// modelRate streams with a thread and a poller for each session. Mixed, every other session writes.
func (o *benchRingsOptions) modelRate(ctx context.Context, drives []drive.Drive, p *drivemodel.Profile, verb string,
	object, sessions int) (rate, writeShare float64, err error) {
	b, err := newBenchDrives(drives, object, p)
	if err != nil {
		return 0, 0, err
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
			return 0, 0, err
		}
		w.rigs = append(w.rigs, r)
		part := all[len(all)*i/sessions : len(all)*(i+1)/sessions]
		r.place(part, object, dma)
		w.parts = append(w.parts, part)
	}
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	if rate, err = w.run(w.byVerb(verb)); err != nil {
		return 0, 0, err
	}
	var stats emu.Stats
	for _, c := range b.controllers {
		s := c.Stats()
		stats.BytesRead += s.BytesRead
		stats.BytesWritten += s.BytesWritten
	}
	if stats.BytesRead+stats.BytesWritten == 0 {
		return 0, 0, errors.New("nothing was moved")
	}
	return rate, float64(stats.BytesWritten) / float64(stats.BytesRead+stats.BytesWritten), nil
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

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"time"
)

type benchRingsOptions struct {
	json       bool
	quick      bool
	requireFio bool
	dir        string
	size       sizeFlag
	threads    int
	skipFile   bool
	profile    string

	rounds int           // pairs of measurements
	period time.Duration // of one with files; with RAM-backed drives they are shorter and more
}

func newBenchRings() *command {
	o := &benchRingsOptions{size: 1 << 30}
	f := newFlags("bench rings")
	f.StringVar(&o.dir, "dir", "", "directory `DIR` for the temporary drive files (default: that of the system)")
	f.Var(&o.size, "size", "bytes of all drives together, and of the engine's memory with RAM-backed drives")
	f.IntVar(&o.threads, "threads", 0, "threads with RAM-backed drives (default: 1, and one a core)")
	f.BoolVar(&o.quick, "quick", false, "fewer and shorter rounds")
	f.BoolVar(&o.skipFile, "no-files", false, "leave file-backed drives out")
	f.BoolVar(&o.requireFio, "require-fio", false, "fail if fio is not installed")
	f.StringVar(&o.profile, "drive-profile", "",
		"measure drives held back to a profile, a `NAME` or a file, and nothing else")
	f.BoolVar(&o.json, "json", false, "print the figures as JSON")
	return &command{
		name: "bench rings", synopsis: flagsOnly, summary: "measure queues and drives",
		exits: &plainExits, flags: f,
		long: `
Measures the way of a KV block's bytes: commands that an executor writes into NVMe queue pairs and that the virtual
controller serves, without a mount. Three parts:

  commands without bytes, both sides on one core and one queue;
  random objects of RAM-backed drives, against memcpy of the same bytes in the same order by the same number of threads;
  random objects of file-backed drives by direct I/O, against fio with io_uring at equal block size, depth and files.

Comparisons run in alternating pairs, and the median of the pairs' ratios counts. Executor and controller share as many
threads as the other side has; with a thread for each, rows are for information. The controller's CPU time includes the
executor's where they share a thread. Part three needs fio (Debian's package is called fio) and is left out without
it.

With --drive-profile, a RAM-backed drive that is held back to the profile is measured instead, by reads, writes and both
at once, against what the profile says: this shows whether a modelled mount can be believed on this machine. A drive
that is faster than the machine cannot be modelled there; such rows do not count.`,
		example: `
tuttifs bench rings
tuttifs bench rings --drive-profile pcie4
tuttifs bench rings --quick --dir /mnt/nvme --json`,
		run: func(ctx context.Context, e *env, _ []string) error { return o.run(ctx, e) },
	}
}

// plan sets the rounds and their length.
func (o *benchRingsOptions) plan() {
	if o.rounds == 0 {
		o.rounds, o.period = 5, 2*time.Second
		if o.quick {
			o.rounds, o.period = 3, time.Second
		}
	}
}

// benchObjects are the object sizes.
var benchObjects = []int{32 << 10, 64 << 10, 128 << 10}

// ringsReport is the command's document.
type ringsReport struct {
	OutputVersion          int        `json:"output_version"`
	Cores                  int        `json:"cores"`
	EmptyCommandsPerSecond float64    `json:"empty_commands_per_second"`
	RAMVsMemcpy            float64    `json:"ram_vs_memcpy"`
	RAMVsMemcpyCPU         float64    `json:"ram_vs_memcpy_by_cpu_time"`
	FileVsFio              *float64   `json:"file_vs_fio"`
	ControllerCPUPerGB     float64    `json:"controller_cpu_seconds_per_gb"`
	Empty                  []emptyRow `json:"empty"`
	RAM                    []rateRow  `json:"ram"`
	File                   []rateRow  `json:"file"`
	Notes                  []string   `json:"notes,omitempty"`
}

// emptyRow is commands without bytes.
type emptyRow struct {
	Arrangement       string  `json:"arrangement"`
	Threads           int     `json:"threads"`
	CommandsPerSecond float64 `json:"commands_per_second"`
}

// rateRow compares two ways of moving the same bytes.
type rateRow struct {
	Arrangement   string  `json:"arrangement"`
	Verb          string  `json:"verb"`
	ObjectBytes   int     `json:"object_bytes"`
	Threads       int     `json:"threads"`
	Depth         int     `json:"depth"`
	RingGBs       float64 `json:"ring_gb_per_second"`
	OtherGBs      float64 `json:"other_gb_per_second"`
	Ratio         float64 `json:"ratio"`
	CPUPerGB      float64 `json:"controller_cpu_seconds_per_gb"`
	PollerPerGB   float64 `json:"poller_cpu_seconds_per_gb,omitempty"` // of CPUPerGB, the poller's thread
	OtherCPUPerGB float64 `json:"other_cpu_seconds_per_gb,omitempty"`  // of memcpy's threads, of fio's job
	Counts        bool    `json:"counts"`                              // in the worst ratio
	Split         bool    `json:"split"`                               // a thread for each side, as in a mount
}

func (o *benchRingsOptions) run(ctx context.Context, e *env) error {
	if o.size < 64<<20 || o.size > 1<<40 {
		return usagef("--size is %d, want 64m to 1t", uint64(o.size))
	}
	if o.threads < 0 || o.threads > 256 {
		return usagef("--threads is %d, want 1 to 256", o.threads)
	}
	if o.dir != "" { // its files' part comes last
		if st, err := os.Stat(o.dir); err != nil {
			return err
		} else if !st.IsDir() {
			return usagef("--dir %s is not a directory", o.dir)
		}
	}
	o.plan()
	if o.profile != "" {
		return o.benchModel(ctx, e)
	}
	fio, err := exec.LookPath("fio")
	if err != nil && o.requireFio {
		return systemError{errors.New("fio is not installed: Debian has it in the package fio (apt-get install fio)")}
	}
	r := &ringsReport{OutputVersion: outputVersion, Cores: runtime.GOMAXPROCS(0)}
	if r.Empty, err = o.benchEmpty(ctx); err != nil {
		return fmt.Errorf("commands without bytes: %w", err)
	}
	if r.RAM, err = o.benchRAM(ctx); err != nil {
		return fmt.Errorf("RAM-backed drives: %w", err)
	}
	switch {
	case o.skipFile:
		r.Notes = append(r.Notes, "file-backed drives were left out (--no-files)")
	case fio == "":
		r.Notes = append(r.Notes, "file-backed drives were left out: fio is not installed (Debian's package fio)")
	default:
		if r.File, err = o.benchFiles(ctx, fio); err != nil {
			return fmt.Errorf("file-backed drives: %w", err)
		}
	}
	r.summarise()
	if o.json {
		return printJSON(e.stdout, r)
	}
	return r.print(e)
}

func (r *ringsReport) summarise() {
	r.EmptyCommandsPerSecond = r.Empty[0].CommandsPerSecond
	r.RAMVsMemcpy, r.RAMVsMemcpyCPU = worst(r.RAM), math.Inf(1)
	for _, row := range r.RAM {
		if row.Counts {
			r.RAMVsMemcpyCPU = min(r.RAMVsMemcpyCPU, row.OtherCPUPerGB/row.CPUPerGB)
		}
	}
	if len(r.File) > 0 {
		w := worst(r.File)
		r.FileVsFio = &w
	}
	for _, rows := range [][]rateRow{r.RAM, r.File} {
		for _, row := range rows {
			if row.Split {
				r.ControllerCPUPerGB = max(r.ControllerCPUPerGB, row.CPUPerGB)
			}
		}
	}
}

func worst(rows []rateRow) float64 {
	w := math.Inf(1)
	for _, row := range rows {
		if row.Counts {
			w = min(w, row.Ratio)
		}
	}
	return w
}

func (r *ringsReport) print(e *env) error {
	e.printf("%d cores\n\nCommands without bytes, one queue\n", r.Cores)
	t := table(e.stdout)
	for _, row := range r.Empty {
		fmt.Fprintf(t, "  %s\t%d threads\t%.2f M/s\n", row.Arrangement, row.Threads, row.CommandsPerSecond/1e6)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, part := range []struct {
		title, other string
		rows         []rateRow
	}{{"RAM-backed drives", "memcpy", r.RAM}, {"File-backed drives, direct I/O", "fio", r.File}} {
		if len(part.rows) == 0 {
			continue
		}
		e.printf("\n%s\n", part.title)
		fmt.Fprintf(t, "  object\tverb\tarrangement\tthreads\tdepth\tring GB/s\t%[1]s GB/s\tratio\t"+
			"controller CPU s/GB\tpoller\t%[1]s CPU s/GB\n", part.other)
		for _, row := range part.rows {
			mark := ""
			if !row.Counts {
				mark = " (for information)"
			}
			fmt.Fprintf(t, "  %s\t%s\t%s%s\t%d\t%d\t%.2f\t%.2f\t%.3f\t%.4f\t%.4f\t%.4f\n",
				humanBytes(uint64(row.ObjectBytes)), row.Verb, row.Arrangement, mark, row.Threads, row.Depth,
				row.RingGBs, row.OtherGBs, row.Ratio, row.CPUPerGB, row.PollerPerGB, row.OtherCPUPerGB)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	e.printf("\nempty commands   %.2f M/s a core and queue (2 wanted)\n", r.EmptyCommandsPerSecond/1e6)
	e.printf("RAM vs. memcpy   %.3f at worst (0.80 wanted), %.3f by CPU time\n", r.RAMVsMemcpy, r.RAMVsMemcpyCPU)
	if r.FileVsFio != nil {
		e.printf("files vs. fio    %.3f at worst (0.90 wanted)\n", *r.FileVsFio)
	}
	e.printf("controller CPU   %.4f s/GB at worst, with a thread of its own\n", r.ControllerCPUPerGB)
	for _, n := range r.Notes {
		e.warnf("%s", n)
	}
	return nil
}

// median of some figures.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// pairs runs two measurements in alternating pairs and returns the medians of both and of their ratio. Which of the two
// begins alternates as well.
func pairs(ctx context.Context, n int, ring, other func() (float64, error)) (a, b, ratio float64, err error) {
	var rings, others, ratios []float64
	for i := range n {
		if err := ctx.Err(); err != nil {
			return 0, 0, 0, err
		}
		var x, y float64
		for _, first := range []bool{i%2 == 0, i%2 != 0} {
			if first {
				x, err = ring()
			} else {
				y, err = other()
			}
			if err != nil {
				return 0, 0, 0, err
			}
		}
		rings, others, ratios = append(rings, x), append(others, y), append(ratios, x/y)
	}
	return median(rings), median(others), median(ratios), nil
}

// benchDir makes a directory for drive files that is gone afterwards.
func (o *benchRingsOptions) benchDir() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(o.dir, "tuttifs-bench-rings-")
	return dir, func() { _ = os.RemoveAll(dir) }, err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"tuttifs/cuda"
	"tuttifs/drivemodel"
	"tuttifs/gio"
)

type benchGPUOptions struct {
	json    bool
	quick   bool
	only    []string
	profile string
	drives  int
	device  int
	gpus    int
	pollers int
	runs    int
	lanes   int
	layer   sizeFlag
	staging sizeFlag
	bounce  sizeFlag
	move    sizeFlag
	moves   int
	blocks  int
	dir     string
	output  string
	limit   time.Duration

	open  func() (*cuda.Driver, error)
	scale gpuScale
}

// gpuScale is how long and how large the parts are.
type gpuScale struct {
	rounds      int           // of what is measured alone
	period      time.Duration // of one
	window      time.Duration // of compute: a quarter of a sample
	ours        time.Duration // most time for the pairs of one of tuttifs' own ways beside one kind of compute
	others      time.Duration // likewise for other ways
	pairs       int           // at least
	layers      int           // of the model; each has --layer bytes
	objects     []int         // sizes where three of them would only take longer
	sizes       bool          // all sizes of staging and bounce memory
	gemm        int           // rows and columns
	tokens      int           // new ones of the attention
	cached      int
	heads       int // of a model like Llama 3 8B
	kvHeads     int
	steps       int // of decoding, each time
	stepRows    int // of a step's matrix
	commands    int // of a batch without bytes
	tensors     int // registered
	fileBytes   int // of cuFile's file
	memcpyBytes int // of a thread's buffer
}

func newBenchGPU() *command {
	o := &benchGPUOptions{
		layer: 512 << 20, staging: gio.StagingDefault, bounce: 64 << 20, move: gio.MoveDefault, open: cuda.Open,
	}
	f := newFlags("bench gpu")
	f.StringSliceVar(&o.only, "only", nil, "`PARTS` to run, separated by commas (default: all that apply)")
	f.StringVar(&o.profile, "drive-profile", "", "hold each drive back to this `PROFILE`, a name or a file")
	f.IntVar(&o.drives, "drives", 4, "RAM-backed drives")
	f.IntVar(&o.device, "device", 0, "the first GPU")
	f.IntVar(&o.gpus, "gpus", 1, "GPUs for the part gpus")
	f.IntVar(&o.pollers, "pollers", 0, "threads that serve the drives of a GPU (default: by cores, at most 12)")
	f.IntVar(&o.lanes, "lanes", 8, "lanes of the ring")
	f.IntVar(&o.runs, "runs", 2, "runs of an object in the pool: 1, or 2 (K and V apart)")
	f.Var(&o.layer, "layer", "bytes of a layer")
	f.Var(&o.staging, "staging", "device memory between the copy engine and the pool")
	f.Var(&o.bounce, "bounce", "memory of the bounce cells")
	f.Var(&o.move, "move", "a piece of the copy engine's work")
	f.IntVar(&o.moves, "moves", gio.MovesDefault, "pieces outstanding in each direction")
	f.IntVar(&o.blocks, "blocks", gio.HarvestBlocksDefault, "grid of harvest and gather")
	f.StringVar(&o.dir, "dir", "", "directory `DIR` on ext4 for cuFile's file (default: that of the system)")
	f.DurationVar(&o.limit, "limit", 0, "`TIME` after which what is left is left out (default 8m, with --quick 3m)")
	f.BoolVar(&o.quick, "quick", false, "fewer and shorter rounds")
	f.StringVarP(&o.output, "output", "o", "", "write the figures to `FILE` as JSON as well, after each part")
	f.BoolVar(&o.json, "json", false, "print the figures as JSON")
	return &command{
		name: "bench gpu", synopsis: flagsOnly, summary: "measure the ring on a GPU",
		exits: &plainExits, flags: f,
		long: `
Measures the way of KV blocks between a GPU's memory and four RAM-backed drives, whose virtual controllers run in
this process. Every part compares the bytes that it moved with the drives' images. The parts are:

` + gpuPartsHelp() + `

With --drive-profile the drives are modelled, and only the parts that say something of drives are run: those
marked with a star.

Compute is measured in turns of some ten milliseconds, undisturbed, disturbed and undisturbed again, since clocks drift;
the interval is that of 95 % confidence. Needs a GPU, its driver, and for the GEMM cuBLAS 13.`,
		example: `
tuttifs bench gpu
tuttifs bench gpu --only restore,store --json
tuttifs bench gpu --drive-profile paper --drives 2
tuttifs bench gpu --only gpus --gpus 2`,
		run: func(ctx context.Context, e *env, _ []string) error { return o.run(ctx, e) },
	}
}

// gpuPart is one part of the bench.
type gpuPart struct {
	name, what string
	run        func(b *gpuBench) error
	modelled   bool // it says something of drives that are held back to a profile
}

// gpuParts are in the order in which they run: where time is short, the last ones are left out.
func gpuParts() []gpuPart {
	return []gpuPart{
		{"restore", "layers of 32-, 64- and 128-KiB objects to a paged pool", (*gpuBench).restore, true},
		{"store", "the way back", (*gpuBench).store, true},
		{"compute", "transfers beside a GEMM and beside an attention prefill", (*gpuBench).compute, true},
		{"backlog", "restores while stores never end: scheduler, store buffer and phases of the drives on and off",
			(*gpuBench).backlog, true},
		{"decode", "restore beside decode-like steps", (*gpuBench).decode, true},
		{"commands", "commands a second, empty and of 4 KiB", (*gpuBench).commands, false},
		{"cpu", "CPU time of the I/O thread and of the pollers", (*gpuBench).cpu, false},
		{"sums", "the same with checksums and without, in turns", (*gpuBench).sums, false},
		{"others", "the same objects by CPU and copy engine, and by cuFile", (*gpuBench).others, false},
		{"gpus", "several GPUs at once (with --gpus 2 or more)", (*gpuBench).several, false},
		{"register", "registration of 1.5 million tensors", (*gpuBench).register, false},
		{"descriptors", "SGL against PRP", (*gpuBench).descriptors, false},
		{"ablation", "each idea off in turn, and sizes of staging and bounce memory", (*gpuBench).ablation, false},
	}
}

func gpuPartsHelp() string {
	var b strings.Builder
	for _, p := range gpuParts() {
		mark := " "
		if p.modelled {
			mark = "*"
		}
		fmt.Fprintf(&b, "  %-12s%s %s\n", p.name, mark, p.what)
	}
	return strings.TrimRight(b.String(), "\n")
}

// plan sets what depends on --quick.
func (o *benchGPUOptions) plan() {
	if o.pollers == 0 {
		o.pollers = max(1, min(12, runtime.GOMAXPROCS(0)*3/4/o.gpus))
	}
	if o.limit == 0 {
		o.limit = 8 * time.Minute
		if o.quick {
			o.limit = 3 * time.Minute
		}
	}
	if o.scale.rounds != 0 {
		return
	}
	o.scale = gpuScale{
		rounds: 5, period: 400 * time.Millisecond, window: 20 * time.Millisecond,
		ours: 10 * time.Second, others: 3 * time.Second, pairs: 12,
		layers: 4, gemm: 8192, tokens: 4096, cached: 61440, heads: 32, kvHeads: 8,
		steps: 3000, stepRows: 32768, commands: 65536, tensors: 1500000,
		objects: gpuObjects, sizes: true, fileBytes: 256 << 20, memcpyBytes: 256 << 20,
	}
	if o.quick {
		s := &o.scale
		s.rounds, s.period = 3, 200*time.Millisecond
		s.ours, s.others, s.pairs = 4*time.Second, 1200*time.Millisecond, 8
		s.steps, s.fileBytes = 1000, 64<<20
		s.objects, s.sizes = gpuObjects[:1], false
	}
}

func (o *benchGPUOptions) validate() error {
	known, modelled := partNames(false), partNames(true)
	for _, name := range o.only {
		if !slices.Contains(known, name) {
			return usagef("--only: there is no part %q; the parts are %s", name, strings.Join(known, ", "))
		}
		if o.profile != "" && !slices.Contains(modelled, name) {
			return usagef("--only: %s says nothing of modelled drives (--drive-profile); these do: %s", name,
				strings.Join(modelled, ", "))
		}
	}
	const least, most = 1 << 20, 1 << 36
	switch {
	case o.device < 0 || o.gpus < 1 || o.gpus > 64:
		return usagef("--device is %d and --gpus %d, want 0 or more and 1 to 64", o.device, o.gpus)
	case o.drives < 1 || o.drives > gpuDrivesMax:
		return usagef("--drives is %d, want 1 to %d", o.drives, gpuDrivesMax)
	case o.pollers < 0 || o.pollers > 256:
		return usagef("--pollers is %d, want 1 to 256", o.pollers)
	case o.lanes < 1 || o.lanes > gio.LanesMax:
		return usagef("--lanes is %d, want 1 to %d", o.lanes, gio.LanesMax)
	case o.limit < 0:
		return usagef("--limit is %v, want a positive time", o.limit)
	case o.runs != 1 && o.runs != 2:
		return usagef("--runs is %d, want 1 or 2", o.runs)
	case o.layer < least || o.layer > most || o.layer%least != 0:
		return usagef("--layer is %d, want a multiple of 1m up to 64g", uint64(o.layer))
	case o.staging < least || o.staging > most || o.bounce < least || o.bounce > most:
		return usagef("--staging is %d and --bounce %d, want 1m to 64g", uint64(o.staging), uint64(o.bounce))
	case o.blocks < 1 || o.blocks > 1024:
		return usagef("--blocks is %d, want 1 to 1024", o.blocks)
	case o.move < 4096 || o.move > 1<<30 || o.moves < 1 || o.moves > gio.MovesMax:
		return usagef("--move is %d and --moves %d, want 4k to 1g and 1 to %d", uint64(o.move), o.moves, gio.MovesMax)
	}
	return nil
}

// partNames are those of all parts, or only of those that say something of modelled drives.
func partNames(modelled bool) (names []string) {
	for _, p := range gpuParts() {
		if p.modelled || !modelled {
			names = append(names, p.name)
		}
	}
	return names
}

// wanted says whether a part is to be run.
func (o *benchGPUOptions) wanted(p *gpuPart) bool {
	switch {
	case len(o.only) > 0:
		return slices.Contains(o.only, p.name)
	case o.profile != "":
		return p.modelled
	default:
		return p.name != "gpus" || o.gpus > 1
	}
}

// gpuBench is a run of the bench.
type gpuBench struct {
	o       *benchGPUOptions
	ctx     context.Context
	driver  *cuda.Driver
	profile *drivemodel.Profile // of each drive; nil: as fast as memory is
	gpu     *gpuDevice
	volume  *gpuVolume
	scratch *cuda.HostMemory // of a layer, for comparing
	report  *gpuReport
	last    *gpuImage // what the drives hold
	salt    uint64    // of the last pattern in a pool
	checked bool      // the attention kernel computes what it should
}

func (o *benchGPUOptions) run(ctx context.Context, e *env) (err error) {
	if err := o.validate(); err != nil {
		return err
	}
	if err := checkOutput(o.output); err != nil {
		return err
	}
	o.plan()
	var profile *drivemodel.Profile
	if o.profile != "" {
		if profile, err = loadProfile(o.profile); err != nil {
			return err
		}
	}
	driver, err := o.open()
	if err != nil {
		return fmt.Errorf("this needs an NVIDIA GPU: %w", err)
	}
	// CUDA's contexts are per thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	limited, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	b := &gpuBench{o: o, ctx: limited, driver: driver, profile: profile}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(); err != nil {
		return err
	}
	// A part that fails is reported, and the others have their turn.
	var failed []error
	for _, part := range gpuParts() {
		if !o.wanted(&part) {
			continue
		}
		begin := time.Now()
		err := b.ctx.Err()
		if err == nil {
			err = part.run(b)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if b.ctx.Err() != nil && !errors.Is(err, errGPUBytes) {
			b.report.note("the time is over (--limit %v): %s is not complete", o.limit, part.name)
			err = nil
		}
		took := time.Since(begin).Seconds()
		b.report.Seconds = append(b.report.Seconds, gpuSeconds{part.name, took})
		if err != nil {
			err = fmt.Errorf("%s: %w", part.name, err)
			failed = append(failed, err)
			b.report.Failures = append(b.report.Failures, err.Error())
		}
		if !o.json {
			e.warnf("%s took %.1f s", part.name, took)
		}
		if o.output != "" {
			failed = append(failed, b.report.save(o.output))
		}
	}
	if o.json {
		err = printJSON(e.stdout, b.report)
	} else {
		err = b.report.print(e)
	}
	return errors.Join(append(failed, err)...)
}

// open finds the GPU and makes the drives.
func (b *gpuBench) open() error {
	if n, last := b.driver.Devices(), b.o.device+b.o.gpus; last > n {
		return fmt.Errorf("there are %d GPUs, number %d is asked for (--device, --gpus)", n, last-1)
	}
	var err error
	if b.gpu, err = openGPUDevice(b.driver, b.o.device); err != nil {
		return err
	}
	if b.volume, err = newGPUVolume(b.o, b.profile); err != nil {
		return err
	}
	if b.scratch, err = b.gpu.context.AllocHost(int(b.o.layer), false); err != nil {
		return err
	}
	b.report = &gpuReport{
		OutputVersion: outputVersion, GPU: b.gpu.device.Name(), DriverVersion: b.driver.Version(),
		Cores: runtime.GOMAXPROCS(0), Pollers: b.o.pollers, Lanes: b.o.lanes, Drives: b.o.drives, Runs: b.o.runs,
		Profile:      b.profile,
		StagingBytes: uint64(b.o.staging), BounceBytes: uint64(b.o.bounce), LayerBytes: uint64(b.o.layer),
		MoveBytes: uint64(b.o.move), Moves: b.o.moves, HarvestBlocks: b.o.blocks,
		Layers: b.o.scale.layers,
	}
	return nil
}

func (b *gpuBench) close() error {
	var errs []error
	if b.volume != nil {
		b.volume.close()
	}
	if b.scratch != nil {
		errs = append(errs, b.gpu.context.FreeHost(b.scratch))
	}
	if b.gpu != nil {
		errs = append(errs, b.gpu.close())
	}
	return errors.Join(errs...)
}

// objects are the sizes of the layer verbs.
var gpuObjects = []int{64 << 10, 32 << 10, 128 << 10}

// interval is the mean of some figures and half the width of its interval of 95 % confidence, by Student's t.
func interval(v []float64) (mean, half float64) {
	if len(v) == 0 {
		return math.NaN(), math.Inf(1)
	}
	for _, x := range v {
		mean += x / float64(len(v))
	}
	if len(v) == 1 {
		return mean, math.Inf(1)
	}
	squares := 0.0
	for _, x := range v {
		squares += (x - mean) * (x - mean)
	}
	n := float64(len(v))
	return mean, student(len(v)-1) * math.Sqrt(squares/(n-1)/n)
}

// student is the 97.5 % quantile of Student's distribution.
func student(freedom int) float64 {
	table := [...]float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
		2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	return 1.96 + 2.5/float64(freedom) // within 0.003
}

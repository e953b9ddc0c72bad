package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"tuttifs/drivemodel"
	"tuttifs/slack"
	"tuttifs/stripe"
)

type profileModelOptions struct {
	layerTimes string
	rates      slack.Rates
	inputs     []int
	prefixes   []int

	model       string
	dtype       string
	tp          int
	blockTokens int
	machine     slack.Machine
	drives      []string

	link      float64
	latency   float64
	harvest   string
	sms       int
	smPercent float64

	output string
	json   bool
	flags  *pflag.FlagSet
}

// Facts of the ring and the harvest where no flag says otherwise: measured on an H200 (docs/measurements.md).
const (
	defaultLinkGB    = 50
	defaultLatencyUS = 250
	defaultHarvest   = "8:235,16:429,32:704"
	defaultSMs       = 132
	defaultSMPercent = 1.25 // 16 blocks at 50 GB/s take 0.7
	launchBytes      = 64 << 20
)

func newProfileModel() *command {
	o := &profileModelOptions{
		inputs:   []int{1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536},
		prefixes: []int{0, 1024, 4096, 16384, 32768, 65536, 131072},
	}
	f := newFlags("profile model")
	o.flags = f
	f.StringVar(&o.layerTimes, "layer-times", "", "a JSON or CSV `FILE` of measured times: scripts/layer_times.py")
	f.Float64Var(&o.rates.FLOPs, "flops", 0, "without measurements: `N` operations a second that the GPU reaches")
	f.Float64Var(&o.rates.HBM, "hbm", 0, "likewise: `N` bytes a second of its memory")
	f.Var((*lengthsFlag)(&o.inputs), "inputs", "likewise: the table's `LENGTHS` of input, in new tokens")
	f.Var((*lengthsFlag)(&o.prefixes), "prefixes", "likewise: its `LENGTHS` of prefix, in cached tokens")
	f.StringVar(&o.model, "model", "llama3-8b", "`MODEL`, one of "+strings.Join(modelNames(), ", "))
	f.StringVar(&o.dtype, "dtype", "", "`TYPE` of its cache's elements (default: bf16 or fp8, by their size)")
	f.IntVar(&o.tp, "tp", 1, "tensor-parallel degree: ranks, which share the drives")
	f.IntVar(&o.blockTokens, "block-tokens", 64, "tokens of a file")
	f.StringVar(&o.machine.GPU, "gpu", "", "`NAME` of the GPU (default: that of the layer times, or of this machine)")
	f.StringVar(&o.machine.Driver, "driver", "", "`VERSION` of its driver (default: likewise)")
	f.StringVar(&o.machine.PCIe, "pcie", "", "`LINK` of the GPU, as in \"32.0 GT/s x16\" (default: this machine's)")
	f.StringVar(&o.machine.CPU, "cpu", "", "`NAME` of the CPU (default: this machine's)")
	f.StringArrayVar(&o.drives, "drive-profile", nil,
		"a drive's profile, `NAME|FILE`; once for each drive (default: no limit)")
	f.Float64Var(&o.link, "link", defaultLinkGB, "`GB/s` that the ring reaches between host and GPU, either way")
	f.Float64Var(&o.latency, "latency", defaultLatencyUS, "fixed `MICROSECONDS` of a layer's I/O, but for the drives'")
	f.StringVar(&o.harvest, "harvest", defaultHarvest, "`BLOCKS:GB/s,...`: the harvest's speed by its grid")
	f.IntVar(&o.sms, "sms", defaultSMs, "SMs of the GPU")
	f.Float64Var(&o.smPercent, "sm-percent", defaultSMPercent, "of a window's SM time, at most `N` for the harvest")
	f.StringVarP(&o.output, "output", "o", "", "keep the table in this `FILE`, not in the user's cache directory")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "profile model", synopsis: flagsOnly, summary: "how much I/O hides behind a model's layers",
		exits: &plainExits, flags: f,
		long: `
Makes the slack table of a model on a machine: for lengths of input (new tokens) and prefix (cached
tokens), how long a layer computes, and the most I/O that ends within that. It is saved in
$XDG_CACHE_HOME/tuttifs/slack/ by the fingerprint of both, or in the file of -o.

--layer-times takes measured times; scripts/layer_times.py makes such a file on a machine with a GPU.
--flops with --hbm computes them from the model's shape instead; such a table says "estimated". Give
what the GPU reaches, not what its data sheet says: of 989e12, 600e12 in long passes, 250e12 in short
ones.

With neither, the saved table of this fingerprint is shown, and one that is of another model or machine
is refused. docs/slack.md has the formulas.`,
		example: `
tuttifs profile model --layer-times h200.json --drive-profile paper --drive-profile paper
tuttifs profile model --model llama3-8b --flops 600e12 --hbm 4e12 --gpu "NVIDIA H200" -o slack.json
tuttifs profile model --json`,
		run: o.run,
	}
}

// modelProfileDocument is the command's document.
type modelProfileDocument struct {
	OutputVersion int               `json:"output_version"`
	File          string            `json:"file"`
	Reused        bool              `json:"reused"`
	Table         *slack.Table      `json:"table"`
	Lowered       float64           `json:"lowered,omitempty"`
	Rows          []modelProfileRow `json:"rows"`
}

// modelProfileRow is one place of the table.
type modelProfileRow struct {
	Input     int   `json:"input"`
	Prefix    int   `json:"prefix"`
	RestoreNS int64 `json:"restore_ns"` // what restoring one layer of the prefix takes
	slack.Entry
}

func (o *profileModelOptions) run(_ context.Context, e *env, _ []string) error {
	begin := time.Now()
	estimate := o.flags.Changed("flops") || o.flags.Changed("hbm")
	if err := o.checkFlags(estimate); err != nil {
		return err
	}
	times, err := o.readTimes()
	if err != nil {
		return err
	}
	t := &slack.Table{Version: slack.Version}
	model, kv, profiles, err := o.describe(t, times)
	if err != nil {
		return err
	}
	doc := &modelProfileDocument{OutputVersion: outputVersion, File: o.output, Reused: times == nil && !estimate}
	if doc.File == "" {
		if doc.File, err = slack.Path(&t.Fingerprint); err != nil {
			return err
		}
	}
	if doc.Reused {
		if t, err = o.load(doc.File, &t.Fingerprint); err != nil {
			return err
		}
		doc.Table = t
		return doc.print(e, o.json)
	}
	if err := checkOutput(o.output); err != nil {
		return err
	}
	if t.IO, err = o.facts(kv, profiles); err != nil {
		return err
	}
	if doc.Lowered, err = o.windows(t, times, model); err != nil {
		return err
	}
	t.MakingSeconds = time.Since(begin).Seconds()
	if err := t.Validate(); err != nil {
		return usagef("%v", err)
	}
	if err := slack.Save(doc.File, t); err != nil {
		return fmt.Errorf("saving the table: %w", err)
	}
	doc.Table = t
	return doc.print(e, o.json)
}

func (o *profileModelOptions) checkFlags(estimate bool) error {
	measured := o.layerTimes != ""
	switch {
	case measured && estimate:
		return usagef("--layer-times are measured, --flops and --hbm estimate: give one or the other")
	case estimate && !(o.flags.Changed("flops") && o.flags.Changed("hbm")):
		return usagef("an estimate needs both --flops and --hbm")
	case estimate && !(o.rates.FLOPs > 0 && o.rates.HBM > 0):
		return usagef("--flops is %v and --hbm %v, want positive numbers", o.rates.FLOPs, o.rates.HBM)
	}
	for _, name := range []string{"inputs", "prefixes"} {
		if o.flags.Changed(name) && !estimate {
			return usagef("--%s is for an estimate: give --flops and --hbm", name)
		}
	}
	for _, name := range []string{"link", "latency", "harvest", "sms", "sm-percent"} {
		if o.flags.Changed(name) && !estimate && !measured {
			return usagef("--%s is of a new table: give --layer-times, or --flops and --hbm", name)
		}
	}
	return nil
}

// readTimes returns nil where there are none.
func (o *profileModelOptions) readTimes() (*slack.Times, error) {
	if o.layerTimes == "" {
		return nil, nil
	}
	b, err := slack.ReadFile(o.layerTimes)
	if err != nil {
		return nil, err
	}
	times, err := slack.ParseTimes(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.layerTimes, err)
	}
	return times, nil
}

// dtypeBytes are the sizes of common types. Others are names that tell tables apart.
var dtypeBytes = map[string]int{"fp8": 1, "int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}

// describe fills in the fingerprint: what flags say, then what the layer times say, then what this machine is.
func (o *profileModelOptions) describe(t *slack.Table, times *slack.Times) (stripe.Model, stripe.KV,
	[]*drivemodel.Profile, error) {
	model, ok := stripe.FindModel(o.model)
	if !ok {
		return model, stripe.KV{}, nil, usagef("unknown model %q: one of %s", o.model, strings.Join(modelNames(), ", "))
	}
	kv := model.KV(o.blockTokens, o.tp)
	if err := kv.Validate(); err != nil {
		return model, kv, nil, usagef("%v", err)
	}
	dtype := o.dtype
	if dtype == "" {
		dtype = map[int]string{1: "fp8", 2: "bf16"}[model.DTypeBytes]
	}
	if n, known := dtypeBytes[dtype]; known && n != model.DTypeBytes {
		return model, kv, nil, usagef("--dtype %s has %d bytes an element, and the cache of %s has %d", dtype, n, model.Name,
			model.DTypeBytes)
	}
	f := &t.Fingerprint
	f.Model = slack.Model{Name: model.Name, Layers: model.Layers, TensorParallel: o.tp, BlockTokens: o.blockTokens,
		Shape: slack.Shape{Heads: model.Heads, KVHeads: model.KVHeads, HeadSize: model.HeadDim, Hidden: model.Hidden,
			FFN: model.FFN, DType: dtype}}
	f.Machine = o.machine
	if times != nil {
		if err := times.CheckShape(&f.Model.Shape); err != nil {
			return model, kv, nil, fmt.Errorf("%s: %w", o.layerTimes, err)
		}
		f.Machine.Fill(&slack.Machine{GPU: times.GPU, Driver: times.Driver})
	}
	here := slack.Here("/", "")
	f.Machine.Fill(&here)
	f.Machine.FillWords()
	var profiles []*drivemodel.Profile
	for _, name := range o.drives {
		p, err := loadProfile(name)
		if err != nil {
			return model, kv, nil, err
		}
		profiles = append(profiles, p)
		f.Machine.Drives = append(f.Machine.Drives, p.Name)
	}
	if err := f.Validate(); err != nil {
		return model, kv, nil, usagef("%v", err)
	}
	return model, kv, profiles, nil
}

// facts are what budgets are computed from.
func (o *profileModelOptions) facts(kv stripe.KV, profiles []*drivemodel.Profile) (facts slack.IO, err error) {
	geometry, err := kv.Geometry()
	if err != nil {
		return facts, usagef("%v", err)
	}
	var layerBytes uint64 // of layer 0 of rank 0 of a file
	for _, object := range geometry.Objects {
		if object.Layer != 0 || object.Rank != 0 {
			continue
		}
		var bytes uint64
		for _, run := range object.Runs {
			bytes += uint64(run.Bytes)
		}
		layerBytes += bytes
		facts.ObjectBytes = max(facts.ObjectBytes, int64(bytes))
	}
	facts.BytesPerToken = int64(layerBytes) / int64(kv.Tokens)
	facts.Read = slack.Direction{RingBytesPerSecond: o.link * 1e9, LatencyUS: o.latency}
	facts.Write = facts.Read
	addDrives(&facts, profiles, kv.Ranks)
	facts.Harvest = slack.Harvest{SMs: o.sms, SMShareMax: o.smPercent / 100, LaunchBytes: launchBytes}
	facts.Harvest.Grids, err = parseGrids(o.harvest)
	if err != nil {
		return facts, err
	}
	if err := facts.Validate(); err != nil {
		return facts, usagef("%v", err)
	}
	return facts, nil
}

// addDrives: objects are spread evenly, so the slowest drive holds up all others, and ranks share them evenly. Of the
// latencies it is the 99th percentile that counts, since a layer waits for its last command.
func addDrives(facts *slack.IO, profiles []*drivemodel.Profile, ranks int) {
	for _, way := range []struct {
		to         *slack.Direction
		writeShare float64
		of         func(p *drivemodel.Profile) *drivemodel.Direction
	}{
		{&facts.Read, 0, func(p *drivemodel.Profile) *drivemodel.Direction { return p.Read }},
		{&facts.Write, 1, func(p *drivemodel.Profile) *drivemodel.Direction { return p.Write }},
	} {
		slowest, latency := math.Inf(1), 0.0
		for _, p := range profiles {
			if d := way.of(p); d != nil { // else that direction has no limit
				slowest = min(slowest, p.RateAt(way.writeShare, int(facts.ObjectBytes)))
				latency = max(latency, d.Latency.P99US)
			}
		}
		if !math.IsInf(slowest, 1) {
			way.to.DrivesBytesPerSecond = slowest * float64(len(profiles)) / float64(ranks)
		}
		way.to.LatencyUS += latency
	}
}

// lengthsFlag is a pflag.Value for lengths such as 1,128,4096.
type lengthsFlag []int

func (l *lengthsFlag) Type() string { return "LENGTHS" }

func (l *lengthsFlag) String() string {
	words := make([]string, len(*l))
	for i, n := range *l {
		words[i] = strconv.Itoa(n)
	}
	return strings.Join(words, ",")
}

func (l *lengthsFlag) Set(text string) error {
	var lengths []int
	for _, word := range strings.Split(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil {
			return fmt.Errorf("%q is not a number of tokens: want some, as in 1,128,4096", word)
		}
		lengths = append(lengths, n)
	}
	*l = lengths
	return nil
}

// parseGrids reads 8:235,16:429.
func parseGrids(text string) (grids []slack.Grid, err error) {
	for _, part := range strings.Split(text, ",") {
		blocks, rate, _ := strings.Cut(part, ":")
		n, errBlocks := strconv.Atoi(blocks)
		gb, errRate := strconv.ParseFloat(rate, 64)
		if errBlocks != nil || errRate != nil {
			return nil, usagef("--harvest: %q is not BLOCKS:GB/s", part)
		}
		grids = append(grids, slack.Grid{Blocks: n, BytesPerSecond: gb * 1e9})
	}
	return grids, nil
}

// windows also returns how much measurements were lowered by, to be monotone.
func (o *profileModelOptions) windows(t *slack.Table, times *slack.Times, model stripe.Model) (lowered float64,
	err error) {
	if times != nil {
		t.Source, t.MeasuringSeconds = slack.Measured, times.Seconds
		if lowered, err = t.SetWindows(times.LayerTimes()); err != nil {
			return 0, fmt.Errorf("%s: %w", o.layerTimes, err)
		}
		return lowered, nil
	}
	t.Source = slack.Estimated
	all, err := t.Fingerprint.Model.EstimateAll(o.rates, model.DTypeBytes, o.inputs, o.prefixes)
	if err == nil {
		_, err = t.SetWindows(all)
	}
	if err != nil {
		return 0, usagef("%v", err)
	}
	return 0, nil
}

func (o *profileModelOptions) load(path string, want *slack.Fingerprint) (*slack.Table, error) {
	t, err := slack.Load(path, want)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: no table of this model and machine was saved; make one with --layer-times, or with "+
			"--flops and --hbm", err)
	}
	return t, err
}

func (d *modelProfileDocument) print(e *env, asJSON bool) error {
	t := d.Table
	for _, input := range t.Inputs {
		for _, prefix := range t.Prefixes {
			entry := t.Lookup(input, prefix)
			need := slack.Share{Objects: t.IO.Objects(prefix), Blocks: entry.Budget.Read.Blocks}
			d.Rows = append(d.Rows, modelProfileRow{input, prefix, int64(t.IO.Time(slack.Read, need)), entry})
		}
	}
	if asJSON {
		return printJSON(e.stdout, d)
	}
	m, at := &t.Fingerprint.Model, &t.Fingerprint.Machine
	drives := strings.Join(at.Drives, ", ")
	if drives == "" {
		drives = "without limit"
	}
	e.printf("%s, %d layers, %s, tensor parallel %d, %d tokens a file: %d bytes a token, layer and rank\n", m.Name,
		m.Layers, m.DType, m.TensorParallel, m.BlockTokens, t.IO.BytesPerToken)
	e.printf("%s, driver %s, PCIe %s; %s; drives %s\n", at.GPU, at.Driver, at.PCIe, at.CPU, drives)
	e.printf("windows of one layer, %s\n\n", strings.ToUpper(string(t.Source)))
	w := table(e.stdout)
	fmt.Fprint(w, "INPUT\tPREFIX\tWINDOW MS\tRESTORE MS\tHIDES\tREAD OBJECTS\tMIB\tBLOCKS\tWRITE OBJECTS\tMIB\tBLOCKS\n")
	for _, r := range d.Rows {
		hides := "no"
		if r.RestoreNS <= int64(r.Window) {
			hides = "yes"
		}
		fmt.Fprintf(w, "%d\t%d\t%.3f\t%.3f\t%s", r.Input, r.Prefix, r.Window.Seconds()*1e3, float64(r.RestoreNS)/1e6,
			hides)
		for _, s := range []slack.Share{r.Budget.Read, r.Budget.Write} {
			fmt.Fprintf(w, "\t%d\t%.1f\t%d", s.Objects, float64(s.Bytes)/(1<<20), s.Blocks)
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	verb := "saved as"
	if d.Reused {
		verb = "reused from"
	}
	e.printf("\n%s %s; measuring took %.1f s, making the table %.1f ms\n", verb, d.File, t.MeasuringSeconds,
		t.MakingSeconds*1e3)
	if d.Lowered > 0.001 {
		e.warnf("some layer times were longer than ones of more tokens; they were lowered by up to %.1f %%", 100*d.Lowered)
	}
	return nil
}

package main

import (
	"bytes"
	"fmt"
	"io"

	"tuttifs/drivemodel"
	"tuttifs/wholefile"
)

// gpuReport is the command's document.
type gpuReport struct {
	OutputVersion int    `json:"output_version"`
	GPU           string `json:"gpu"`
	DriverVersion int    `json:"cuda_driver_version"` // 13000 is 13.0
	Cores         int    `json:"cores"`
	Pollers       int    `json:"pollers"`
	Lanes         int    `json:"lanes"`
	Drives        int    `json:"drives"`
	Runs          int    `json:"runs_per_object"`
	Layers        int    `json:"layers"`
	LayerBytes    uint64 `json:"layer_bytes"`
	StagingBytes  uint64 `json:"staging_bytes"`
	BounceBytes   uint64 `json:"bounce_bytes"`
	MoveBytes     uint64 `json:"move_bytes"`
	Moves         int    `json:"moves"`
	HarvestBlocks int    `json:"harvest_blocks"`

	Profile *drivemodel.Profile `json:"profile,omitempty"` // of each drive; without one they are as fast as memory is

	Rates         []gpuRate         `json:"rates,omitempty"`
	Sums          []gpuSumsCost     `json:"sums,omitempty"`
	Beside        []gpuBeside       `json:"beside_compute,omitempty"`
	Decode        []gpuDecode       `json:"beside_decode,omitempty"`
	Others        []gpuOther        `json:"others,omitempty"`
	Commands      []gpuCommands     `json:"commands,omitempty"`
	Registrations []gpuRegistration `json:"registrations,omitempty"`
	Ablation      []gpuAblation     `json:"ablation,omitempty"`
	Backlog       []gpuBacklog      `json:"backlog,omitempty"`
	Several       *gpuSeveral       `json:"several_gpus,omitempty"`
	Bars          []gpuBar          `json:"bars"`
	Seconds       []gpuSeconds      `json:"seconds"`
	Notes         []string          `json:"notes,omitempty"`
	Failures      []string          `json:"failures,omitempty"` // of parts
}

// gpuBar is a figure that was promised: of drives without a profile, if nothing else is said.
type gpuBar struct {
	Name   string  `json:"name"`
	Got    float64 `json:"got"`
	Wanted float64 `json:"wanted"`
	Unit   string  `json:"unit,omitempty"`
	Most   bool    `json:"at_most"` // otherwise at least
	Met    bool    `json:"met"`
}

// gpuSeconds is how long a part took.
type gpuSeconds struct {
	Part    string  `json:"part"`
	Seconds float64 `json:"seconds"`
}

// promise adds a figure that was promised of any drives.
func (r *gpuReport) promise(bar gpuBar) { r.Bars = append(r.Bars, bar) }

func (r *gpuReport) atLeast(name string, got, wanted float64, unit string) {
	if r.Profile == nil {
		r.promise(gpuBar{name, got, wanted, unit, false, got >= wanted})
	}
}

func (r *gpuReport) atMost(name string, got, wanted float64, unit string) {
	if r.Profile == nil {
		r.promise(gpuBar{name, got, wanted, unit, true, got <= wanted})
	}
}

func (r *gpuReport) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// save writes the document to a file.
func (r *gpuReport) save(path string) error {
	var b bytes.Buffer
	if err := printJSON(&b, r); err != nil {
		return err
	}
	return wholefile.Write(path, b.Bytes(), 0o644)
}

// print writes the tables of what was measured.
func (r *gpuReport) print(e *env) error {
	e.printf("%s, CUDA driver %d.%d, %d cores, %d pollers, %d lanes of %d RAM-backed drives\n", r.GPU,
		r.DriverVersion/1000, r.DriverVersion%1000/10, r.Cores, r.Pollers, r.Lanes, r.Drives)
	e.printf("%d layers of %s, %d runs an object, staging %s, bounce %s, %d pieces of %s, %d blocks\n", r.Layers,
		humanBytes(r.LayerBytes), r.Runs, humanBytes(r.StagingBytes), humanBytes(r.BounceBytes), r.Moves,
		humanBytes(r.MoveBytes), r.HarvestBlocks)
	if r.Profile != nil {
		e.printf("drives are MODELLED, each one: %s\n  of %s\n", r.Profile.Summary(), r.Profile.Of)
	}
	for _, part := range []struct {
		title, head string
		rows        int
		row         func(w io.Writer, i int)
	}{
		{"Layers", "part\tway\tverb\tobjects\tchecksums\tGB/s\tworst\tI/O thread us/16 MiB\tpollers s/GB\tbusy\t" +
			"harvest or gather ms/GB\t" +
			"registration", len(r.Rates), r.printRate},
		{"Checksums", "verb\tobjects\tGB/s with\twithout\tcost", len(r.Sums), r.printSums},
		{"Beside compute", "way\tverb\tcompute\tms alone\tGB/s\tslower\tinterval\tpairs", len(r.Beside), r.printBeside},
		{"Beside decode-like steps", "way\tGB/s\tp50 alone\tbeside\tp99 alone\tbeside", len(r.Decode), r.printDecode},
		{"Other ways", "way\tverb\tobject\tGB/s\tthread us/16 MiB\tcalls us/16 MiB\tring GB/s\t", len(r.Others),
			r.printOther},
		{"Commands", "way\tbytes\tM/s", len(r.Commands), r.printCommands},
		{"Registration", "way\ttensors\tbytes\tseconds\tdevice memory\ta tensor\tunregister", len(r.Registrations),
			r.printRegistration},
		{"Ablation, restore of 64-KiB objects", "change\tGB/s alone\tbeside attention\tattention slower\tinterval",
			len(r.Ablation), r.printAblation},
		{"Restores during a backlog of stores", "switches\talone GB/s\tbeside it\tkept\tstores GB/s\talone\tmixed commands",
			len(r.Backlog), r.printBacklog},
		{"Bars", "figure\tgot\twanted\t", len(r.Bars), r.printBar},
	} {
		if part.rows == 0 {
			continue
		}
		e.printf("\n%s\n", part.title)
		t := table(e.stdout)
		fmt.Fprintf(t, "  %s\n", part.head)
		for i := range part.rows {
			part.row(t, i)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if s := r.Several; s != nil {
		e.printf("\n%d GPUs: alone %.1f GB/s, together %.1f, sum %.1f\n", s.GPUs, s.Alone, s.Together, s.Sum)
		e.printf("  bounds: %.1f times one GPU %.1f GB/s, the host's memory by memcpy of all cores %.1f GB/s; %s apply\n",
			gpuSeveralBar*float64(s.GPUs), s.LinksGBs, s.MemcpyGBs, s.LimitedBy)
	}
	for _, n := range r.Notes {
		e.warnf("%s", n)
	}
	return nil
}

func (r *gpuReport) printRate(w io.Writer, i int) {
	row, sums := &r.Rates[i], "no"
	if row.Sums {
		sums = "yes"
	}
	fmt.Fprintf(w, "  %s\t%s\t%s\t%s x %d\t%s\t%.2f\t%.2f\t%.1f\t%.3f\t%.3f\t%.2f\t%s\n", row.Part, row.Way, row.Verb,
		humanBytes(uint64(row.ObjectBytes)), row.Objects, sums, row.GBs, row.Worst, row.CPUMicros, row.PollerPerGB,
		row.BusyPerGB, row.MovingPerGB, humanBytes(row.DeviceBytes))
}

func (r *gpuReport) printSums(w io.Writer, i int) {
	row := &r.Sums[i]
	fmt.Fprintf(w, "  %s\t%s\t%.2f\t%.2f\t%.1f %%\n", row.Verb, humanBytes(uint64(row.ObjectBytes)), row.With, row.Without,
		row.Cost)
}

func (r *gpuReport) printBeside(w io.Writer, i int) {
	row := &r.Beside[i]
	fmt.Fprintf(w, "  %s\t%s\t%s\t%.3f\t%.2f\t%.2f %%\t+-%.2f\t%d\n", row.Way, row.Verb, row.Compute, row.Millis, row.GBs,
		row.Slower, row.Interval, row.Pairs)
}

func (r *gpuReport) printDecode(w io.Writer, i int) {
	row := &r.Decode[i]
	fmt.Fprintf(w, "  %s\t%.2f\t%.1f us\t%.1f us\t%.1f us\t%.1f us\n", row.Way, row.GBs, row.Alone50, row.Beside50,
		row.Alone99, row.Beside99)
}

func (r *gpuReport) printOther(w io.Writer, i int) {
	row := &r.Others[i]
	fmt.Fprintf(w, "  %s\t%s\t%s\t%.2f\t%.0f\t%.0f\t%.2f\t%s\n", row.Way, row.Verb, humanBytes(uint64(row.ObjectBytes)),
		row.GBs, row.CPUMicros, row.CallMicros, row.Ring, row.Note)
}

func (r *gpuReport) printCommands(w io.Writer, i int) {
	row := &r.Commands[i]
	fmt.Fprintf(w, "  %s\t%d\t%.2f\n", row.Way, row.Bytes, row.Millions)
}

func (r *gpuReport) printRegistration(w io.Writer, i int) {
	row := &r.Registrations[i]
	fmt.Fprintf(w, "  %s\t%d\t%s\t%.3f\t%s\t%.1f bytes\t%.3f s\n", row.Way, row.Tensors, humanBytes(row.PoolBytes),
		row.Seconds, humanBytes(row.DeviceBytes), row.PerTensor, row.UnregisterSec)
}

func (r *gpuReport) printAblation(w io.Writer, i int) {
	row := &r.Ablation[i]
	fmt.Fprintf(w, "  %s\t%.2f\t%.2f\t%.2f %%\t+-%.2f\n", row.Change, row.Alone, row.Beside, row.Slower, row.Interval)
}

func (r *gpuReport) printBar(w io.Writer, i int) {
	bar, met, relation := &r.Bars[i], "MISSED", ">="
	if bar.Met {
		met = "met"
	}
	if bar.Most {
		relation = "<="
	}
	if bar.Unit == "" { // a yes or no
		fmt.Fprintf(w, "  %s\t\t\t%s\n", bar.Name, met)
		return
	}
	fmt.Fprintf(w, "  %s\t%.2f %s\t%s %.4g %s\t%s\n", bar.Name, bar.Got, bar.Unit, relation, bar.Wanted, bar.Unit, met)
}

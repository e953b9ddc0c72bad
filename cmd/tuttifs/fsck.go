package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
)

// fsckErrorsLeft is the bit of fsck(8) for damage that was not repaired.
const fsckErrorsLeft = 4

// fsckBusyRuns is how often a volume in use is checked before what was found is believed.
const fsckBusyRuns = 3

type fsckOptions struct {
	readOnly         bool
	preen, auto, yes bool
	force, verbose   bool
	quiet, json      bool
	data             bool
	parallel         int
	progress         int
}

func newFsck() *command {
	o := &fsckOptions{}
	f := newFlags("fsck")
	f.BoolVarP(&o.readOnly, "no", "n", false, "only report; also checks a volume in use")
	f.BoolVarP(&o.preen, "preen", "p", false, "for fsck(8): report, and fail with 4 when a person is needed")
	f.BoolVarP(&o.auto, "auto", "a", false, "the same as -p")
	f.BoolVarP(&o.yes, "yes", "y", false, "accepted; there is no repair yet, so the same as -p")
	f.BoolVarP(&o.force, "force", "f", false, "accepted: everything is always checked")
	f.BoolVar(&o.data, "data", false, "also read all files and verify their checksums")
	f.IntVar(&o.parallel, "parallel", 8, "files that --data reads at once")
	f.IntVarP(&o.progress, "progress", "C", -1,
		"progress to descriptor `FD`, one 'pass done total structure' a line; 0 draws a bar")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "also print counts")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print nothing but warnings and errors")
	f.BoolVar(&o.json, "json", false, "print one JSON document")
	return &command{
		name: "fsck", synopsis: "[FLAGS] DRIVE... | UUID=... | LABEL=...", summary: "check a volume",
		exits: &fsckExits, flags: f,
		long: `
Checks the volume that the drives are members of: labels, superblocks, catalog, journal, record
tables and records, all copies of each. The other members are found in the directories of the
given ones. Nothing is ever written: this version finds damage and does not repair it.

A volume that was not unmounted is no error: its journal is replayed in memory before the tables
are judged. A volume in use is refused with status 8, unless -n is given: then what is found may
be due to changes made meanwhile, and the check is repeated when it finds errors.`,
		example: `
tuttifs fsck -n /dev/nvme1n1
tuttifs fsck -n --data --json /var/lib/tuttifs/d0`,
		run: o.run,
	}
}

func (o *fsckOptions) validate(args []string) error {
	modes := 0
	for _, mode := range []bool{o.readOnly, o.preen || o.auto, o.yes} {
		if mode {
			modes++
		}
	}
	switch {
	case modes > 1:
		return usagef("-n, -p and -y exclude each other")
	case len(args) == 0:
		return usagef("name a drive of the volume")
	case o.parallel < 1 || o.parallel > 1024:
		return usagef("--parallel %d: 1 to 1024", o.parallel)
	}
	return nil
}

func (o *fsckOptions) run(ctx context.Context, e *env, args []string) (err error) {
	if err := o.validate(args); err != nil {
		return err
	}
	tell, err := newFsckProgress(e, o.progress)
	if err != nil {
		return err
	}
	paths, err := newMountSettings().resolve(args)
	if err != nil {
		return err
	}
	members, err := check.Open(paths, o.readOnly)
	if errors.Is(err, drive.ErrBusy) {
		return fmt.Errorf("%w; unmount the volume, or look at it with -n", err)
	}
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := members.Close(); err == nil {
			err = closeErr
		}
	}()
	if len(members.Busy) > 0 {
		e.warnf("in use: %s: what is found may be due to changes made meanwhile", strings.Join(members.Busy, ", "))
	}
	r := &fsckReport{o: o, e: e, busy: len(members.Busy) > 0}
	progress := func(p check.Pass, done, total uint64) {
		r.enter(p)
		tell.set(p, done, total)
	}
	for r.runs = 1; ; r.runs++ {
		r.result, err = check.Run(ctx, members.Drives, check.Options{
			Report: r.add, Progress: progress, Data: o.data, Parallel: o.parallel,
		})
		if !r.busy || r.runs == fsckBusyRuns || err != nil || r.result.Errors == 0 {
			break
		}
		r.findings, r.pass = nil, 0
	}
	tell.finish()
	return r.finish(err)
}

// fsckReport prints findings and what comes of them. Those of a volume in use are kept until it is known which run
// counts.
type fsckReport struct {
	o        *fsckOptions
	e        *env
	busy     bool
	runs     int
	pass     check.Pass // printed last
	findings []check.Finding
	result   check.Result
}

func (r *fsckReport) add(f check.Finding) {
	if r.o.json || r.busy {
		r.findings = append(r.findings, f)
		return
	}
	r.print(f)
}

func (r *fsckReport) silent() bool { return r.o.quiet || r.o.preen || r.o.auto }

// enter names a pass when it begins, unless findings are kept.
func (r *fsckReport) enter(p check.Pass) {
	if !r.o.json && !r.busy {
		r.name(p)
	}
}

func (r *fsckReport) name(p check.Pass) {
	if p != r.pass && !r.silent() {
		r.e.printf("Pass %d: %v\n", p, p)
	}
	r.pass = p
}

func (r *fsckReport) print(f check.Finding) {
	if f.Severity == check.Note && r.silent() {
		return
	}
	r.name(f.Pass)
	r.e.printf("%v: %v\n", f.Severity, f)
}

// finish says the outcome, and turns it into the error that carries the exit status.
func (r *fsckReport) finish(err error) error {
	status := 0
	if r.result.Errors > 0 {
		status = fsckErrorsLeft
	}
	if err != nil {
		if r.o.json {
			r.printJSON(status|fsckExits.code(err), err)
		} else {
			r.printKept()
		}
		if status == 0 {
			return err
		}
		fmt.Fprint(r.e.stderr, message(r.e.prog, err))
		return exitStatus(status | fsckExits.code(err))
	}
	if r.o.json {
		r.printJSON(status, nil)
	} else {
		r.printKept()
		r.summary()
	}
	if status != 0 {
		return exitStatus(status)
	}
	return nil
}

func (r *fsckReport) printKept() {
	for _, f := range r.findings {
		r.print(f)
	}
}

func (r *fsckReport) summary() {
	v := &r.result
	name := extentmap.FormatUUID(v.Volume)
	if v.Label != "" {
		name = v.Label + " (" + name + ")"
	}
	if v.Errors > 0 {
		r.e.printf("%s: DAMAGED: %d errors, %d warnings; repair needs a person: follow the advice of each error\n",
			name,
			v.Errors, v.Warnings)
		return
	}
	if r.silent() {
		return
	}
	state := "clean"
	if !v.Clean {
		state = "consistent, not unmounted"
	}
	r.e.printf("%s: %s: %d files in %d pools on %d drives\n", name, state, v.Files, v.Pools, v.Drives)
	if r.o.verbose {
		r.e.printf("  %d rows with %d slots, %d transactions in the journal, %d warnings\n", v.Rows, v.Slots,
			v.Transactions,
			v.Warnings)
	}
	if r.o.data {
		r.e.printf("  %d objects of %s verified\n", v.Objects, humanBytes(v.Bytes))
	}
}

type fsckFinding struct {
	Severity  string  `json:"severity"`
	Pass      int     `json:"pass"`
	Structure string  `json:"structure"`
	Drive     string  `json:"drive,omitempty"`
	Block     *uint64 `json:"block,omitempty"`
	Message   string  `json:"message"`
	Advice    string  `json:"advice,omitempty"`
}

type fsckDocument struct {
	OutputVersion int           `json:"output_version"`
	UUID          string        `json:"uuid"`
	Label         string        `json:"label"`
	Unmounted     bool          `json:"unmounted"`
	InUse         bool          `json:"in_use"`
	ExitStatus    int           `json:"exit_status"`
	Failure       string        `json:"failure,omitempty"`
	Errors        uint64        `json:"errors"`
	Warnings      uint64        `json:"warnings"`
	Notes         uint64        `json:"notes"`
	Drives        int           `json:"drives"`
	Pools         int           `json:"pools"`
	Rows          int           `json:"rows"`
	Transactions  uint64        `json:"journal_transactions"`
	Slots         uint64        `json:"slots"`
	Files         uint64        `json:"files"`
	Objects       uint64        `json:"objects_verified"`
	Bytes         uint64        `json:"bytes_verified"`
	Findings      []fsckFinding `json:"findings"`
}

func (r *fsckReport) printJSON(status int, failure error) {
	v := &r.result
	doc := fsckDocument{
		OutputVersion: outputVersion, UUID: extentmap.FormatUUID(v.Volume), Label: v.Label, Unmounted: v.Clean,
		InUse:      r.busy,
		ExitStatus: status, Errors: v.Errors, Warnings: v.Warnings, Notes: v.Notes, Drives: v.Drives,
		Pools: v.Pools, Rows: v.Rows,
		Transactions: v.Transactions, Slots: v.Slots, Files: v.Files, Objects: v.Objects, Bytes: v.Bytes,
		Findings: []fsckFinding{},
	}
	if failure != nil {
		doc.Failure = failure.Error()
	}
	for _, f := range r.findings {
		x := fsckFinding{Severity: f.Severity.String(), Pass: int(f.Pass), Structure: f.Structure, Drive: f.Drive,
			Message: f.Message,
			Advice:  f.Advice}
		if f.Block != check.NoBlock {
			x.Block = &f.Block
		}
		doc.Findings = append(doc.Findings, x)
	}
	if err := printJSON(r.e.stdout, &doc); err != nil {
		r.e.warnf("cannot print: %v", err)
	}
}

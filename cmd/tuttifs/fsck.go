package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
)

// Bits of fsck(8) for damage that was repaired, and damage that was not.
const (
	fsckCorrected  = 1
	fsckErrorsLeft = 4
)

// fsckBusyRuns is how often a volume in use is checked before what was found is believed.
const fsckBusyRuns = 3

type fsckOptions struct {
	readOnly         bool
	preen, auto, yes bool
	force, verbose   bool
	quiet, json      bool
	data             bool
	trust            string
	parallel         int
	progress         int
}

func newFsck() *command {
	o := &fsckOptions{}
	f := newFlags("fsck")
	f.BoolVarP(&o.readOnly, "no", "n", false, "only report; also checks a volume in use")
	f.BoolVarP(&o.preen, "preen", "p", false, "repair what is safe without asking; skip a volume that is clean")
	f.BoolVarP(&o.auto, "auto", "a", false, "the same as -p")
	f.BoolVarP(&o.yes, "yes", "y", false, "repair everything that can be, without asking")
	f.BoolVarP(&o.force, "force", "f", false, "check everything although the volume is clean")
	f.BoolVar(&o.data, "data", false, "also read all files and verify their checksums")
	f.StringVar(&o.trust, "trust", "", "where drives were mounted apart, `DRIVE` is right and the others are not")
	f.IntVar(&o.parallel, "parallel", 0, "reads that --data makes at once (default 4 for each drive, and 8 at least)")
	f.IntVarP(&o.progress, "progress", "C", -1,
		"progress to descriptor `FD`, one 'pass done total structure' a line; 0 draws a bar")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "also print counts")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print nothing but warnings and errors")
	f.BoolVar(&o.json, "json", false, "print one JSON document")
	return &command{
		name: "fsck", synopsis: "[FLAGS] DRIVE... | UUID=... | LABEL=...", summary: "check and repair a volume",
		exits: &fsckExits, flags: f,
		long: `
Checks the volume that the drives are members of: labels, superblocks, catalog, journal, record
tables and records, all copies of each. The other members are found in the directories of the
given ones. What is there a second time is repaired from there; what is not is given up, and
nothing else with it: files are misses then, and never wrong bytes.

Without -n, -p and -y each repair is asked for on a terminal, and elsewhere nothing is repaired.
Repairs are written when everything has been checked, in an order that may be cut off anywhere.
-p makes those that lose nothing and says which, and looks no further than the journal of a volume
that was unmounted unless -f is given.

A volume that was not unmounted is no error: its journal is replayed in memory before the tables
are judged. A volume in use is never written to: it is refused with status 8, unless -n is given.
Then what is found may be due to changes made meanwhile, and the check is repeated when it finds
errors; tuttifs scrub verifies the files of a mounted volume.`,
		example: `
tuttifs fsck -n /dev/nvme1n1
tuttifs fsck -y --data /dev/nvme1n1
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
	case o.parallel < 0 || o.parallel > 1024:
		return usagef("--parallel %d: 1 to 1024", o.parallel)
	case o.parallel > 0 && !o.data:
		return usagef("--parallel is for --data")
	}
	return nil
}

// silent: neither passes nor a volume that is as it should be are worth a word. Repairs are, but for -q.
func (o *fsckOptions) silent() bool { return o.quiet || o.preen || o.auto }

// access is what the drives are opened for. asks says whether there is somebody to ask.
func (o *fsckOptions) access(asks bool) check.Access {
	switch {
	case o.readOnly:
		return check.ReadBusy
	case o.preen || o.auto || o.yes || asks:
		return check.Write
	}
	return check.Read
}

func (o *fsckOptions) run(ctx context.Context, e *env, args []string) (err error) {
	if err := o.validate(args); err != nil {
		return err
	}
	tell, err := newFsckProgress(e, o.progress, !o.silent() && !o.json)
	if err != nil {
		return err
	}
	paths, err := newMountSettings().resolve(args)
	if err != nil {
		return err
	}
	asks := !o.readOnly && !o.preen && !o.auto && !o.yes && !o.json && isTerminal(e.stdin) && isTerminal(e.stdout)
	members, err := check.Open(paths, o.access(asks))
	if errors.Is(err, drive.ErrBusy) {
		return inUseError(paths[0], err)
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
	trust, err := o.trusted(members)
	if err != nil {
		return err
	}
	r := &fsckReport{o: o, e: e, busy: len(members.Busy) > 0, tell: tell}
	options := check.Options{
		Report: r.add, Data: o.data, Parallel: o.parallel, Trust: trust,
		Quick: (o.preen || o.auto) && !o.force && !o.data,
		Progress: func(p check.Pass, done, total uint64) {
			r.enter(p)
			tell.set(p, done, total)
		},
	}
	switch {
	case o.yes:
		options.Repair = func(check.Finding) bool { return true }
	case o.preen || o.auto:
		options.Repair = func(f check.Finding) bool { return f.Repair == check.RepairSafe }
	case asks:
		r.answers = bufio.NewReader(e.stdin)
		options.Repair = r.ask
	}
	for r.runs = 1; ; r.runs++ {
		r.result, err = check.Run(ctx, members.Drives, options)
		if !r.busy || r.runs == fsckBusyRuns || err != nil || r.result.Errors == 0 {
			break
		}
		r.findings, r.pass = nil, 0
	}
	tell.finish()
	return r.finish(explainFull(err))
}

// inUseError says where the volume is mounted, if it is.
func inUseError(path string, err error) error {
	if m, ok := mountOfDrive(path, false); ok {
		return fmt.Errorf("%w; it is mounted on %s: unmount it, or look at it with -n", err, m.describe())
	}
	return fmt.Errorf("%w; unmount the volume, or look at it with -n", err)
}

// trusted finds the member that --trust names, under whatever name.
func (o *fsckOptions) trusted(members *check.Members) (string, error) {
	if o.trust == "" {
		return "", nil
	}
	want, err := os.Stat(o.trust)
	if err != nil {
		return "", err
	}
	for _, d := range members.Drives {
		if have, err := os.Stat(d.Name()); err == nil && os.SameFile(want, have) {
			return d.Name(), nil
		}
	}
	return "", usagef("--trust %s: not among the drives", o.trust)
}

func isTerminal(stream any) bool {
	if o, ok := stream.(*output); ok {
		stream = o.w
	}
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// fsckReport prints findings and what comes of them. Those of a volume in use are kept until it is known which run
// counts.
type fsckReport struct {
	o        *fsckOptions
	e        *env
	busy     bool
	tell     *fsckProgress
	answers  *bufio.Reader
	always   int // what was answered for all that follows: 'a' or 'e', 0 for nothing
	asked    bool
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
	if r.asked { // it was printed with the question
		r.asked = false
		return
	}
	r.print(f)
}

// ask prints a finding and asks whether to repair it.
func (r *fsckReport) ask(f check.Finding) bool {
	r.print(f)
	r.asked = true
	for r.always == 0 {
		r.e.printf("  repair: %s? [y]es, [n]o, [a]ll yes, [e]nd: all no: ", f.Fix)
		line, err := r.answers.ReadString('\n')
		switch strings.ToLower(strings.TrimSpace(line)) {
		case "y", "yes":
			return true
		case "n", "no":
			return false
		case "a", "all":
			r.always = 'a'
		case "e", "end":
			r.always = 'e'
		default:
			if err != nil { // nobody there any more
				r.always = 'e'
			}
		}
	}
	return r.always == 'a'
}

// enter names a pass when it begins, unless findings are kept.
func (r *fsckReport) enter(p check.Pass) {
	if !r.o.json && !r.busy {
		r.name(p)
	}
}

func (r *fsckReport) name(p check.Pass) {
	if p != r.pass && !r.o.silent() {
		r.tell.finish()
		r.e.printf("Pass %d: %v\n", p, p)
	}
	r.pass = p
}

func (r *fsckReport) print(f check.Finding) {
	if f.Severity == check.Note && r.o.silent() && (r.o.quiet || !f.Accepted) {
		return
	}
	r.tell.finish()
	r.name(f.Pass)
	r.e.printf("%v: %v\n", f.Severity, f)
}

// status is the bits of what was found and what became of it.
func (r *fsckReport) status() (status int) {
	if r.result.Repaired > 0 {
		status |= fsckCorrected
	}
	if r.result.Errors > r.result.RepairedErrors {
		status |= fsckErrorsLeft
	}
	return status
}

// finish says the outcome, and turns it into the error that carries the exit status.
func (r *fsckReport) finish(err error) error {
	status := r.status()
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
	left := v.Errors - v.RepairedErrors
	if left > 0 {
		r.e.printf("%s: DAMAGED: %d errors, %d warnings", name, v.Errors, v.Warnings)
		switch {
		case v.Obstacle != "":
			r.e.printf("; nothing was repaired: %s\n", v.Obstacle)
		case v.Repaired > 0:
			r.e.printf("; %d repaired, %d left: -y repairs what can be\n", v.RepairedErrors, left)
		case r.o.yes:
			r.e.printf("; none can be repaired here: follow the advice of each\n")
		default:
			r.e.printf("; -y repairs what can be\n")
		}
		return
	}
	if r.o.silent() && v.Errors == 0 && (r.o.quiet || v.Repaired == 0) {
		return
	}
	state := "clean"
	switch {
	case v.Repaired > 0:
		state = fmt.Sprintf("repaired, %d errors, %d files given up", v.Errors, v.GivenUp)
	case v.Skipped:
		state = "clean by its labels, not checked further"
	case !v.Clean:
		state = "consistent, not unmounted"
	}
	r.e.printf("%s: %s: %d files in %d pools on %d drives\n", name, state, v.Files, v.Pools, v.Drives)
	if r.o.verbose {
		r.e.printf("  %d rows with %d slots, %d transactions in the journal, %d warnings\n", v.Rows, v.Slots,
			v.Transactions, v.Warnings)
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
	Repair    string  `json:"repair"`
	Fix       string  `json:"fix,omitempty"`
	Repaired  bool    `json:"repaired"`
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
	Skipped       bool          `json:"skipped"`
	Repaired      uint64        `json:"repaired"`
	ErrorsLeft    uint64        `json:"errors_left"`
	Obstacle      string        `json:"obstacle,omitempty"`
	Drives        int           `json:"drives"`
	Pools         int           `json:"pools"`
	Rows          int           `json:"rows"`
	Transactions  uint64        `json:"journal_transactions"`
	Slots         uint64        `json:"slots"`
	Files         uint64        `json:"files"`
	GivenUp       uint64        `json:"files_given_up"`
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
		Skipped: v.Skipped, Repaired: v.Repaired, ErrorsLeft: v.Errors - v.RepairedErrors, Obstacle: v.Obstacle,
		GivenUp: v.GivenUp, Findings: []fsckFinding{},
	}
	if failure != nil {
		doc.Failure = failure.Error()
	}
	for _, f := range r.findings {
		x := fsckFinding{Severity: f.Severity.String(), Pass: int(f.Pass), Structure: f.Structure, Drive: f.Drive,
			Message: f.Message,
			Advice:  f.Advice, Repair: f.Repair.String(), Fix: f.Fix, Repaired: f.Accepted && v.Repaired > 0}
		if f.Block != check.NoBlock {
			x.Block = &f.Block
		}
		doc.Findings = append(doc.Findings, x)
	}
	_ = printJSON(r.e.stdout, &doc) // the output keeps why not
}

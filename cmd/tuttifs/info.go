package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

type infoOptions struct {
	json, wear bool
	endurance  enduranceFlag
}

func newInfo() *command {
	o := &infoOptions{}
	f := newFlags("info")
	f.BoolVar(&o.wear, "wear", false, "show what writing does to the drives instead")
	f.Var(&o.endurance, "endurance",
		"rating of the drives, or of one, for --wear: 1dwpd (over five years), 14000tbw, 14pbw; may be repeated "+
			"(default: the mount's)")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "info", synopsis: "[FLAGS] MOUNT | DRIVE...", summary: "show a volume: geometry, drives, pools, space",
		exits: &plainExits, flags: f,
		long: `
Describes the volume that is mounted on a directory, or that a drive is a member of. A volume that
is not mounted is opened read-only; nothing is written.

With --wear: what was written to each drive since the mount, how much of it was metadata, the
drive writes per day of the last minute and hour, and what NVMe drives say of themselves: bytes
written in their life, the part of it that is used up, and the bytes that reached the media where
they tell. With --endurance also how long they last at that rate. Drives tell root only.`,
		example: `
tuttifs info /mnt/kv
tuttifs info --wear --endurance 1dwpd --endurance 2:14000tbw /mnt/kv
tuttifs info --json /dev/nvme1n1`,
		run: o.run,
	}
}

// infoDocument joins what the status files of a mount say.
type infoDocument struct {
	daemon.VolumeDocument
	Mount  string                      `json:"mount,omitempty"`
	Drives []daemon.DriveDocument      `json:"drives"`
	Space  daemon.SpaceStats           `json:"space"`
	Stats  map[string]daemon.PoolStats `json:"pool_stats"`
	Wear   []wearDocument              `json:"wear,omitempty"` // with --wear
	// Phases are there for a mount.
	Phases       map[string]daemon.PhaseStats `json:"phases,omitempty"` // by index
	PhaseOptions *daemon.PhaseOptions         `json:"phase_options,omitempty"`
	// Real is what engines did by queue pairs of the drives' own, by index.
	Real map[string]daemon.RealStats `json:"real,omitempty"`
	// Processes are engines', of a mount; each with its mode.
	Processes []daemon.MemberInfo `json:"processes,omitempty"`

	wear map[string]daemon.DriveWear
}

func (o *infoOptions) run(_ context.Context, e *env, args []string) error {
	switch {
	case len(args) == 0:
		return usagef("name a mount point or drives")
	case len(args) > 1 && slices.ContainsFunc(args, isMount):
		return usagef("name one mount point, or drives: not both, and not two")
	case o.endurance.Known() && !o.wear:
		return usagef("--endurance is for --wear")
	}
	var doc *infoDocument
	var err error
	if len(args) == 1 && isMount(args[0]) {
		doc, err = mountInfo(args[0])
	} else {
		if st, statErr := os.Stat(args[0]); statErr == nil && st.IsDir() {
			return fmt.Errorf("%s is a directory and no tuttifs mount: mount the volume, or name one of its drives", args[0])
		}
		doc, err = driveInfo(args)
	}
	if err != nil {
		return err
	}
	if o.wear {
		if err := o.endurance.check(doc.Drives); err != nil {
			return err
		}
		doc.Wear = wearOf(doc.Drives, doc.wear, &o.endurance.Ratings)
	}
	switch {
	case o.json:
		return printJSON(e.stdout, doc)
	case o.wear:
		printWear(e, doc.Wear, doc.Mount != "")
		return nil
	}
	doc.print(e)
	return nil
}

func mountInfo(dir string) (*infoDocument, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	doc := &infoDocument{Mount: abs}
	var drives daemon.DrivesDocument
	var stats daemon.StatsDocument
	var options daemon.OptionsDocument
	var sessions daemon.SessionsDocument
	for name, v := range map[string]any{"volume": &doc.VolumeDocument, "drives": &drives, "stats": &stats,
		"options": &options, "sessions": &sessions} {
		if err := readStatus(dir, name, v); err != nil {
			return nil, err
		}
	}
	doc.Drives, doc.Space, doc.Stats, doc.wear = drives.Drives, stats.Space, stats.Pools, stats.Wear
	doc.Phases, doc.PhaseOptions, doc.Processes = stats.Phases, &options.Phases, sessions.Processes
	doc.Real = stats.Real
	return doc, nil
}

// driveInfo opens a volume that is not mounted.
func driveInfo(paths []string) (doc *infoDocument, err error) {
	v, err := extentmap.Open(paths, extentmap.Options{ReadOnly: true, Degraded: true})
	if errors.Is(err, drive.ErrBusy) || errors.Is(err, extentmap.ErrBusy) {
		return nil, fmt.Errorf("%w; or ask its mount point instead", err)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	info := v.Info()
	doc = &infoDocument{VolumeDocument: *daemon.NewVolumeDocument(v), Drives: daemon.NewDriveDocuments(info.Drives),
		Stats: map[string]daemon.PoolStats{}, wear: logsOf(v, info.Drives)}
	space := &doc.Space
	space.TotalBytes = info.TotalBytes
	for _, p := range v.Pools() {
		_, _, used := p.Counts()
		bytes := uint64(used) * p.SlotBytes()
		doc.Stats[p.Spec().Name] = daemon.PoolStats{Files: uint64(used), SlotsUsed: uint64(used), BytesUsed: bytes}
		space.UsedBytes += bytes
		space.Files += uint64(used)
	}
	space.FreeBytes = space.TotalBytes - min(space.UsedBytes, space.TotalBytes)
	space.AvailableBytes = space.FreeBytes
	return doc, nil
}

func (d *infoDocument) print(e *env) {
	w := table(e.stdout)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("volume", "%s", d.UUID)
	row("label", "%s", orDash(d.Label))
	if d.Mount != "" {
		row("mounted on", "%s", d.Mount)
	}
	var marks []string
	if slices.ContainsFunc(d.Drives, func(dr daemon.DriveDocument) bool { return dr.Modelled != nil }) {
		marks = append(marks, "MODELLED DRIVES")
	}
	if d.ReadOnly {
		marks = append(marks, "read-only")
	}
	if d.Degraded {
		marks = append(marks, "degraded")
	}
	if len(marks) == 0 {
		marks = append(marks, "healthy")
	}
	row("state", "%s", strings.Join(marks, ", "))
	row("epoch", "%d", d.Epoch)
	row("rows", "of %d entries, segments of %s", d.Width, humanBytes(d.SegmentBytes))
	row("journal", "%s, %s in use", humanBytes(d.JournalBytes), humanBytes(d.JournalUsedBytes))
	row("space", "%s, of which %s used by %d files", humanBytes(d.Space.TotalBytes), humanBytes(d.Space.UsedBytes),
		d.Space.Files)
	w.Flush()
	e.printf("\n")
	fmt.Fprintf(w, "DRIVE\tNAME\tSTATE\tKIND\tSIZE\tBLOCKS\tI/O\tNOT IN POOLS\tERRORS\n")
	for _, dr := range d.Drives {
		mode := "buffered"
		switch {
		case dr.Mapped:
			mode = "mapped"
		case dr.Direct:
			mode = "direct"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%.0f%%\t%d\n", dr.Index, orDash(dr.Name), driveState(&dr), dr.Kind,
			humanBytes(dr.Bytes), dr.LBABytes, mode, 100*ratio(uint64(dr.FreeSegments), uint64(dr.Segments)),
			dr.ReadErrors+dr.WriteErrors)
	}
	w.Flush()
	for _, dr := range d.Drives {
		if dr.Modelled != nil {
			e.printf("drive %d is held back to a profile: %s (%s)\n", dr.Index, dr.Modelled.Summary(), dr.Modelled.Of)
		}
		if dr.Cause != "" {
			e.printf("drive %d is %s: %s\n", dr.Index, dr.State, dr.Cause)
		}
	}
	d.printPhases(e)
	d.printProcesses(e)
	d.printReal(e)
	if d.RowsUnavailable > 0 {
		e.printf("%d rows are on lost drives; their files are misses until 'tuttifs drive add' brings the drives back\n",
			d.RowsUnavailable)
	}
	if len(d.Pools) == 0 {
		e.printf("\nno pools yet: engines make them\n")
		return
	}
	e.printf("\n")
	fmt.Fprintf(w, "POOL\tFILES\tUSED\tFILE\tTOKENS\tOBJECTS\tRANKS\tROWS\n")
	for _, p := range d.Pools {
		s := d.Stats[p.Name]
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%d\t%d\t%d\t%d\n", p.Name, s.Files, humanBytes(s.BytesUsed),
			humanBytes(uint64(p.FileBytes)),
			p.TokensPerFile, p.Objects, p.Ranks, p.Rows)
	}
	w.Flush()
}

// printPhases shows how reads and writes of the drives were kept apart.
func (d *infoDocument) printPhases(e *env) {
	o := d.PhaseOptions
	if o == nil || len(d.Phases) == 0 {
		return
	}
	if o.On {
		span := func(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }
		e.printf("\nreads and writes are kept apart: writes begin when reads were quiet for %v; those that have waited %v "+
			"(metadata %v) take a turn of %v\n", span(o.QuietSeconds), span(o.PatienceSeconds), span(o.MetadataSeconds),
			span(o.TurnSeconds))
	} else {
		e.printf("\nreads and writes may mix (-o phases=off)\n")
	}
	w := table(e.stdout)
	fmt.Fprintf(w, "DRIVE\tSWITCHES\tTURNS\tREADS WAITED\tLONGEST\tWRITES WAITED\tLONGEST\tNOW\tSTUCK\tMIXED\n")
	ms := func(seconds float64) string { return fmt.Sprintf("%.1f ms", 1e3*seconds) }
	for i := range d.Drives {
		name := strconv.Itoa(int(d.Drives[i].Index))
		p, ok := d.Phases[name]
		if !ok {
			continue
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%.2f s\t%s\t%.2f s\t%s\t%s\t%d\t%d\n", name, p.Switches, p.Turns, p.ReadSeconds,
			ms(p.ReadLongest), p.WriteSeconds, ms(p.WriteLongest), ms(p.WriteAge), p.Stuck, p.Mixed)
	}
	w.Flush()
}

// printProcesses shows the engines' processes, and how they reach the drives.
func (d *infoDocument) printProcesses(e *env) {
	if len(d.Processes) == 0 {
		return
	}
	e.printf("\n")
	w := table(e.stdout)
	fmt.Fprintf(w, "SESSION\tPROCESS\tUSER\tMODE\tLANES\tDMA MEMORY\n")
	for _, p := range d.Processes {
		mode := p.Mode
		if len(p.RealDrives) > 0 {
			mode += " on drives " + strings.Trim(fmt.Sprint(p.RealDrives), "[]")
			if p.ReachedBytes > 0 {
				mode += fmt.Sprintf(", which reach %s of GPU memory", humanBytes(p.ReachedBytes))
			}
		}
		fmt.Fprintf(w, "%d\t%d\t%d\t%s\t%d\t%s\n", p.Session, p.PID, p.UID, mode, p.Lanes, humanBytes(p.DMABytes))
	}
	w.Flush()
}

// printReal shows what engines did by queue pairs of the drives' own.
func (d *infoDocument) printReal(e *env) {
	if len(d.Real) == 0 {
		return
	}
	e.printf("\nqueue pairs of the drives' own, as engines say:\n")
	w := table(e.stdout)
	fmt.Fprintf(w, "DRIVE\tPAIRS\tREADS\tREAD\tWRITES\tWRITTEN\tFAILED\tPASSED BY\n")
	for i := range d.Drives {
		name := strconv.Itoa(int(d.Drives[i].Index))
		r, ok := d.Real[name]
		if !ok {
			continue
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%d\t%s\t%d\t%d\n", name, r.Pairs, r.Reads, humanBytes(r.BytesRead), r.Writes,
			humanBytes(r.BytesWritten), r.FailedReads+r.FailedWrites, r.PassedBy)
	}
	w.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

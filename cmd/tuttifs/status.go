package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"tuttifs/daemon"
)

type statusOptions struct{ json bool }

func newStatus() *command {
	o := &statusOptions{}
	f := newFlags("status")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "status", synopsis: "[FLAGS] MOUNT", summary: "show what a mount is doing: hits, sessions, I/O, errors",
		exits: &plainExits,
		flags: f,
		long: `
Shows the counters since the mount and the gauges of now. The same values are in
MOUNT/.tuttifs/stats and, with 'tuttifs mount --metrics', in Prometheus.`,
		example: `tuttifs status /mnt/kv`,
		run:     o.run,
	}
}

type statusDocument struct {
	daemon.StatsDocument
	SessionList []daemon.SessionDocument `json:"session_list"`
}

func (o *statusOptions) run(_ context.Context, e *env, args []string) error {
	if len(args) != 1 {
		return usagef("name one mount point")
	}
	var doc statusDocument
	var sessions daemon.SessionsDocument
	if err := readStatus(args[0], "stats", &doc.StatsDocument); err != nil {
		return err
	}
	if err := readStatus(args[0], "sessions", &sessions); err != nil {
		return err
	}
	doc.SessionList = sessions.Sessions
	if o.json {
		return printJSON(e.stdout, doc)
	}
	doc.print(e)
	return nil
}

func (d *statusDocument) print(e *env) {
	w := table(e.stdout)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	t, io, sp := &d.Total, &d.IO, &d.Space
	row("up", "%v", (time.Duration(d.UptimeSeconds) * time.Second))
	row("lookups", "%d blocks, %.1f %% hit", t.Lookups, 100*ratio(t.Hits, t.Lookups))
	row("files", "%d, of which %d pinned; %d being stored", t.Files, t.FilesPinned, t.FilesReserved)
	row("since the mount", "%d committed, %d evicted, %d removed, %d damaged, %d aborted", t.Committed, t.Evicted,
		t.Doomed, t.Bad, t.Aborted)
	if t.Declined > 0 {
		row("not admitted", "%d files, by the admission policy", t.Declined)
	}
	row("space", "%s of %s used", humanBytes(sp.UsedBytes), humanBytes(sp.TotalBytes))
	row("commands", "%d reads of %s, %d writes of %s, %d failed, %d refused", io.Reads, humanBytes(io.BytesRead),
		io.Writes, humanBytes(io.BytesWritten), io.Errors, io.Refused)
	row("drive errors", "%d reading, %d writing", d.ReadErrors, d.WriteErrors)
	if d.Degraded != 0 {
		row("degraded", "%d drives lost, %d rows and %d files unavailable; see 'tuttifs drive list'", d.DrivesLost,
			d.RowsAway, t.FilesAway)
	}
	modelled := uint64(0)
	for _, dr := range d.DriveErrors {
		modelled += dr.Modelled
	}
	if modelled > 0 {
		row("MODELLED", "%d drives are held back to profiles; see 'tuttifs info'", modelled)
	}
	row("journal", "%s in use, %d transactions, %d checkpoints", humanBytes(d.JournalUsed), d.Transactions, d.Checkpoints)
	w.Flush()
	if len(d.Pools) > 0 {
		fmt.Fprintf(w, "\nPOOL\tLOOKUPS\tHIT\tFILES\tEVICTED\tUSED\n")
		for _, name := range slices.Sorted(maps.Keys(d.Pools)) {
			p := d.Pools[name]
			fmt.Fprintf(w, "%s\t%d\t%.1f%%\t%d\t%d\t%s\n", name, p.Lookups, 100*ratio(p.Hits, p.Lookups), p.Files, p.Evicted,
				humanBytes(p.BytesUsed))
		}
		w.Flush()
	}
	if len(d.SessionList) > 0 {
		fmt.Fprintf(w, "\nSESSION\tUID\tMEMBERS\tPINS\tRESERVED\tSINCE\n")
		for _, s := range d.SessionList {
			fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%d\t%s\n", s.ID, s.UID, s.Members, s.Pins, s.Reserved, s.Since.Format(time.DateTime))
		}
		w.Flush()
	}
}

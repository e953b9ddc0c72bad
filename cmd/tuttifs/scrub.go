package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"tuttifs/daemon"
)

type scrubOptions struct {
	rate string
	json bool
}

func newScrub() *command {
	o := &scrubOptions{}
	f := newFlags("scrub")
	f.StringVar(&o.rate, "rate", "200m", "read at most `SIZE` bytes a second; 0 for as fast as it goes")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "scrub", synopsis: "[FLAGS] MOUNT", summary: "verify the files of a mounted volume",
		exits: &scrubExits, flags: f,
		long: `
Has the daemon reread every file and verify its checksums, while the volume is in use. Damaged files
are evicted: they are misses from then on, and are stored again when they are next wanted. Files that
a drive does not give are not damaged: they are counted apart, are misses, and come back with the
drive. Readers and the policy that chooses victims take no notice.

It ends with this command: interrupted, it stops. What is on the drives besides files is for
'tuttifs fsck', which needs the volume unmounted.`,
		example: `
tuttifs scrub /mnt/kv
tuttifs scrub --rate 2g --json /mnt/kv`,
		run: o.run,
	}
}

// scrubResult is what --json prints.
type scrubResult struct {
	OutputVersion int     `json:"output_version"`
	ExitStatus    int     `json:"exit_status"`
	Files         uint64  `json:"files"`
	Bytes         uint64  `json:"bytes"`
	Damaged       uint64  `json:"damaged"`
	Unreadable    uint64  `json:"unreadable"`
	Seconds       float64 `json:"seconds"`
}

func (o *scrubOptions) run(ctx context.Context, e *env, args []string) error {
	if len(args) != 1 {
		return usagef("name a mount point")
	}
	rate, err := parseSize(o.rate)
	if err != nil {
		return usagef("--rate %s: %v", o.rate, err)
	}
	start := time.Now()
	last, readOnly, err := scrub(ctx, e, args[0], rate)
	if err != nil {
		return err
	}
	r := scrubResult{OutputVersion: outputVersion, Files: last.Files, Bytes: last.Bytes, Damaged: last.Damaged,
		Unreadable: last.Unreadable, Seconds: time.Since(start).Seconds()}
	if last.Damaged > 0 && !readOnly {
		r.ExitStatus |= fsckCorrected
	}
	if last.Unreadable > 0 || last.Damaged > 0 && readOnly {
		r.ExitStatus |= fsckErrorsLeft
	}
	if err := o.print(e, &r, readOnly); err != nil {
		return err
	}
	if r.ExitStatus != 0 {
		return exitStatus(r.ExitStatus)
	}
	return nil
}

func (o *scrubOptions) print(e *env, r *scrubResult, readOnly bool) error {
	if o.json {
		return printJSON(e.stdout, r)
	}
	e.printf("%d files of %s verified in %v", r.Files, humanBytes(r.Bytes),
		time.Duration(r.Seconds*float64(time.Second)).Round(time.Millisecond))
	switch {
	case r.Damaged > 0 && readOnly:
		e.printf("; %d are damaged and stay, because the mount is read-only", r.Damaged)
	case r.Damaged > 0:
		e.printf("; %d were damaged, and are evicted", r.Damaged)
	}
	if r.Unreadable > 0 {
		e.printf("; %d could not be read: 'tuttifs drive list' shows which drive fails", r.Unreadable)
	}
	e.printf("\n")
	return nil
}

// scrub has the daemon do it, and follows how far it is.
func scrub(ctx context.Context, e *env, mount string, rate uint64) (last daemon.ScrubReply, readOnly bool, err error) {
	conn, readOnly, err := dialDaemon(ctx, mount)
	if err != nil {
		return last, false, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	err = json.NewEncoder(conn).Encode(&daemon.DriveRequest{Version: daemon.DriveProtocol, Verb: "scrub", Rate: rate})
	if err != nil {
		return last, false, err
	}
	in := json.NewDecoder(conn)
	bar := newProgress(e, "scrub", 0)
	defer bar.finish()
	for !last.Done {
		last = daemon.ScrubReply{}
		switch err := in.Decode(&last); {
		case ctx.Err() != nil:
			return last, false, ctx.Err()
		case err != nil:
			return last, false, fmt.Errorf("the daemon went away: %w", err)
		case last.Error != "":
			return last, false, errors.New(last.Error)
		}
		bar.total = last.Total
		bar.set(min(last.Files, last.Total), fmt.Sprintf("%s, %d damaged", humanBytes(last.Bytes), last.Damaged))
	}
	return last, readOnly, nil
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"tuttifs/daemon"
	"tuttifs/drive"
)

// driveOptions are those of all verbs about drives.
type driveOptions struct{ force, json bool }

// driveResult is what the verbs print with --json.
type driveResult struct {
	OutputVersion int    `json:"output_version"`
	Index         uint16 `json:"index"`
}

func newDriveAdd() *command {
	o := &driveOptions{}
	f := newFlags("drive add")
	f.BoolVarP(&o.force, "force", "f", false, "overwrite what the drive holds")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "drive add", synopsis: "[FLAGS] MOUNT PATH", summary: "give a mounted volume another drive",
		exits: &plainExits, flags: f,
		long: `
Makes PATH a drive of the mounted volume: a new one, which must be empty unless --force is given, or
one of its own that was lost and is there again. A new drive takes new files. One that comes back
brings its files back, and its copy of the metadata is written anew.

Engines that are attached do not know a drive that was added. It gets no files before the last of
them has ended or attached anew: that is said, and until then 'tuttifs drive list' shows it as
waiting.`,
		example: `tuttifs drive add /mnt/kv /dev/nvme4n1`,
		run: func(ctx context.Context, e *env, args []string) error {
			if len(args) != 2 {
				return usagef("name a mount point and a drive")
			}
			return o.change(ctx, e, args[0], &daemon.DriveRequest{Verb: "add", Path: args[1]}, "drive %d added\n")
		},
	}
}

func newDriveReplace() *command {
	o := &driveOptions{}
	f := newFlags("drive replace")
	f.BoolVarP(&o.force, "force", "f", false, "overwrite what the drive holds")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "drive replace", synopsis: "[FLAGS] MOUNT DRIVE PATH", summary: "put a drive in another one's place",
		exits: &plainExits, flags: f,
		long: `
Adds PATH to the mounted volume and forgets DRIVE, a number that 'tuttifs drive list' shows: what
'tuttifs drive add' and 'tuttifs drive forget' do, in this order. No file is copied: those on DRIVE,
and those in rows that it shares with other drives, are evicted, and are stored again when they are
next computed. All other files stay, and so does the metadata, which moves to another drive.`,
		example: `tuttifs drive replace /mnt/kv 2 /dev/nvme4n1`,
		run: func(ctx context.Context, e *env, args []string) error {
			if len(args) != 3 {
				return usagef("name a mount point, the number of a drive, and a drive")
			}
			index, err := driveNumber(args[1])
			if err != nil {
				return err
			}
			return o.change(ctx, e, args[0], &daemon.DriveRequest{Verb: "replace", Index: index, Path: args[2]},
				"drive %d is in its place\n")
		},
	}
}

func newDriveForget() *command {
	o := &driveOptions{}
	f := newFlags("drive forget")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "drive forget", synopsis: "[FLAGS] MOUNT DRIVE", summary: "take a drive out of a mounted volume",
		exits: &plainExits, flags: f,
		long: `
Takes DRIVE, a number that 'tuttifs drive list' shows, out of the mounted volume, whether it is lost
or in use. The files on it, and those in rows that it shares with other drives, are evicted; readers
of them are waited for, for up to two minutes. A copy of the metadata on it moves to another drive.
When it returns, the drive is empty for others to use; a lost one is passed over by later mounts.`,
		example: `tuttifs drive forget /mnt/kv 2`,
		run: func(ctx context.Context, e *env, args []string) error {
			if len(args) != 2 {
				return usagef("name a mount point and the number of a drive")
			}
			index, err := driveNumber(args[1])
			if err != nil {
				return err
			}
			return o.change(ctx, e, args[0], &daemon.DriveRequest{Verb: "forget", Index: index}, "drive %d forgotten\n")
		},
	}
}

func newDriveList() *command {
	o := &driveOptions{}
	f := newFlags("drive list")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "drive list", synopsis: "[FLAGS] MOUNT", summary: "list the drives of a mounted volume and their state",
		exits: &plainExits, flags: f,
		long: `
Lists the drives: whether they are online, lost (they failed, or were not there at the mount; nothing
is asked of them), leaving (being forgotten), or waiting (added, and without files until the engines
that do not know them have ended), modelled (held back to a profile), and what each has failed to do
since the mount.`,
		example: `tuttifs drive list /mnt/kv`,
		run: func(_ context.Context, e *env, args []string) error {
			if len(args) != 1 {
				return usagef("name a mount point")
			}
			var doc daemon.DrivesDocument
			if err := readStatus(args[0], "drives", &doc); err != nil {
				return err
			}
			if o.json {
				return printJSON(e.stdout, doc)
			}
			w := table(e.stdout)
			fmt.Fprintf(w, "DRIVE\tSTATE\tMETADATA\tSIZE\tREADS FAILED\tWRITES FAILED\tTIMED OUT\tNAME\n")
			for i := range doc.Drives {
				d := &doc.Drives[i]
				metadata := "-"
				if d.Metadata {
					metadata = "copy"
				}
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%d\t%d\t%d\t%s\n", d.Index, driveState(d), metadata, humanBytes(d.Bytes),
					d.ReadErrors, d.WriteErrors, d.Timeouts, orDash(d.Name))
			}
			return w.Flush()
		},
	}
}

// driveState is a word for people, or two.
func driveState(d *daemon.DriveDocument) string {
	state := d.State
	if state == "online" && d.Held {
		state = "waiting"
	}
	if d.Modelled != nil {
		state += ", modelled"
	}
	return state
}

func driveNumber(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, usagef("%q is not the number of a drive; 'tuttifs drive list' shows them", text)
	}
	return uint16(n), nil
}

// change sends a request to the daemon of a mount and waits for its answer.
func (o *driveOptions) change(ctx context.Context, e *env, mount string, r *daemon.DriveRequest, done string) error {
	r.Version, r.Force = daemon.DriveProtocol, o.force
	if r.Path != "" && !drive.IsAddress(r.Path) {
		abs, err := filepath.Abs(r.Path)
		if err != nil {
			return err
		}
		if r.Path, err = filepath.EvalSymlinks(abs); err != nil {
			return err
		}
		if err := refuseMounted(r.Path); err != nil {
			return err
		}
		if err := refuseMember(r.Path); err != nil {
			return err
		}
	}
	if r.Verb != "add" {
		warnEvicted(e, mount, r.Index)
	}
	reply, err := askDaemon(ctx, mount, r)
	if err != nil {
		return err
	}
	if r.Path != "" {
		warnWaiting(e, mount, reply.Index)
	}
	if o.json {
		return printJSON(e.stdout, driveResult{outputVersion, reply.Index})
	}
	e.printf(done, reply.Index)
	return nil
}

// refuseMember reports a drive that a mounted volume has in use. One that it has lost may come back.
func refuseMember(path string) error {
	m, ok := mountOfDrive(path, false)
	var doc daemon.DrivesDocument
	if !ok || readStatus(m.dir, "drives", &doc) != nil {
		return nil
	}
	for _, d := range doc.Drives {
		if d.State == "online" && sameFile(d.Name, path) {
			return fmt.Errorf("%s is drive %d of the volume that is mounted on %s", path, d.Index, m.describe())
		}
	}
	return nil
}

// warnEvicted says, before a drive goes, what goes with it.
func warnEvicted(e *env, mount string, index uint16) {
	if d := driveDocument(mount, index); d != nil {
		e.warnf("drive %d (%s): its files, and those in rows that it shares with other drives, are evicted; none is "+
			"copied. All other files and the metadata stay", index, orDash(d.Name))
	}
}

// warnWaiting says that a drive that was added is not in use yet.
func warnWaiting(e *env, mount string, index uint16) {
	if d := driveDocument(mount, index); d != nil && d.Held {
		e.warnf("engines are attached that do not know drive %d: it gets files when the last of them has ended or "+
			"attached anew; 'tuttifs drive list %s' shows it as waiting until then", index, mount)
	}
}

// driveDocument is what a mount says about one of its drives, nil if it has none of that number.
func driveDocument(mount string, index uint16) *daemon.DriveDocument {
	var doc daemon.DrivesDocument
	if readStatus(mount, "drives", &doc) != nil {
		return nil
	}
	for i := range doc.Drives {
		if doc.Drives[i].Index == index {
			return &doc.Drives[i]
		}
	}
	return nil
}

// askDaemon speaks to the daemon of a mount.
func askDaemon(ctx context.Context, mount string, r *daemon.DriveRequest) (reply daemon.DriveReply, err error) {
	conn, readOnly, err := dialDaemon(ctx, mount)
	if err != nil {
		return reply, err
	}
	defer conn.Close()
	if readOnly {
		return reply, fmt.Errorf("%s is mounted read-only: its drives cannot be changed", mount)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return reply, err
	}
	if err := json.NewDecoder(conn).Decode(&reply); err != nil {
		if ctx.Err() != nil {
			return reply, ctx.Err()
		}
		return reply, fmt.Errorf("the daemon gave no answer: %w", err)
	}
	if reply.Error != "" {
		return reply, errors.New(reply.Error)
	}
	return reply, nil
}

// dialDaemon connects to the daemon of a mount, and says whether that is read-only.
func dialDaemon(ctx context.Context, mount string) (conn net.Conn, readOnly bool, err error) {
	var volume daemon.VolumeDocument
	var options daemon.OptionsDocument
	if err := readStatus(mount, "volume", &volume); err != nil {
		return nil, false, err
	}
	if err := readStatus(mount, "options", &options); err != nil {
		return nil, false, err
	}
	conn, err = (&net.Dialer{}).DialContext(ctx, "unix", daemon.DriveSocketPath(options.SocketDir, volume.UUID))
	if errors.Is(err, os.ErrPermission) {
		err = fmt.Errorf("%w (the one who mounted it may, and root)", err)
	}
	return conn, volume.ReadOnly, err
}

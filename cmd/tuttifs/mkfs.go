package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

type mkfsOptions struct {
	size    sizeFlag
	label   string
	uuid    string
	width   int
	segment sizeFlag
	journal sizeFlag
	force   bool
	dryRun  bool
	quiet   bool
	json    bool

	lbaSize   lbaSizeFlag
	formatNVM bool
	flags     *pflag.FlagSet
}

func newMkfs() *command {
	o := &mkfsOptions{}
	f := newFlags("mkfs")
	o.flags = f
	f.Var(&o.size, "size", "make drive files that do not exist, of this size each (suffixes k, m, g, t: powers of 1024)")
	f.StringVarP(&o.label, "label", "L", "", "volume `LABEL`, at most 64 bytes")
	f.SetAnnotation("label", mayBeEmpty, nil)
	f.StringVarP(&o.uuid, "uuid", "U", "", "volume `UUID` instead of a random one")
	f.IntVar(&o.width, "width", 0,
		"entries of a row: drives that a stripe set is spread over (default 4, or all if fewer)")
	f.Var(&o.segment, "segment", "unit of space given to pools, a power of two (default: by the size of the drives)")
	f.Var(&o.journal, "journal", "size of the journal (default: by the size of the drives)")
	f.Var(&o.lbaSize, "lba-size", "blocks that NVMe namespaces are to have; 'list' shows which there are")
	f.BoolVar(&o.formatNVM, "format-nvm", false,
		"with --lba-size: format namespaces that have other blocks; all that they hold is lost")
	f.BoolVarP(&o.force, "force", "f", false, "overwrite a drive that holds something known")
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "show what would be done and change nothing")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print nothing")
	f.BoolVar(&o.json, "json", false, "print the geometry as JSON")
	return &command{
		name: "mkfs", synopsis: "[FLAGS] DRIVE...", summary: "format drives as a new volume", exits: &plainExits, flags: f,
		long: `
Formats 1 to 64 drives together as one volume: block devices, NVMe namespaces or regular files. All
that they held is lost. A drive that is mounted, in use or that holds a known signature is refused;
--force overrides the last. A regular file that does not exist is made, sparse, when --size is
given.

An NVMe namespace has blocks of 512 or 4096 bytes, and its maker says which of them performs better:
--lba-size list shows it, and changes nothing. --lba-size 4096 wants such blocks; with --format-nvm
namespaces that have others are formatted first (Format NVM, which may take minutes). A drive in use
is never formatted, nor one whose controller would format other namespaces too.`,
		example: `
tuttifs mkfs -L kv0 /dev/nvme1n1 /dev/nvme2n1 /dev/nvme3n1 /dev/nvme4n1
tuttifs mkfs --lba-size 4096 --format-nvm /dev/nvme1n1 /dev/nvme2n1
tuttifs mkfs --size 16g /var/lib/tuttifs/d0 /var/lib/tuttifs/d1`,
		run: o.run,
	}
}

// drivesMax is the number of drives that a volume may have.
const drivesMax = 64

func (o *mkfsOptions) run(_ context.Context, e *env, args []string) (err error) {
	if len(args) == 0 || len(args) > drivesMax {
		return usagef("name 1 to %d drives", drivesMax)
	}
	if o.formatNVM && o.lbaSize.bytes == 0 {
		return usagef("--format-nvm is for --lba-size 512 or 4096")
	}
	if o.flags.Changed("size") && o.size < drive.UnitBytes {
		return usagef("--size %d: drives have at least %d bytes", uint64(o.size), drive.UnitBytes)
	}
	fo := extentmap.FormatOptions{
		Label: o.label, Width: o.width, SegmentBytes: uint64(o.segment), JournalBytes: uint64(o.journal), Force: o.force,
	}
	if fo.UUID, err = parseUUID(o.uuid); err != nil {
		return err
	}
	drives, made, err := o.openDrives(args)
	defer func() {
		for _, d := range drives {
			if d != nil {
				err = errors.Join(err, d.Close())
			}
		}
		if err != nil {
			for _, path := range made {
				err = errors.Join(err, os.Remove(path))
			}
		}
	}()
	if err != nil {
		return err
	}
	if o.lbaSize.list {
		return o.listFormats(e, drives)
	}
	if o.lbaSize.bytes != 0 {
		if err := o.chooseBlocks(args, drives, fo); err != nil {
			return err
		}
	}
	format := extentmap.Format
	if o.dryRun {
		format = extentmap.Plan
	}
	plan, err := format(drives, fo)
	switch {
	case errors.Is(err, extentmap.ErrInvalid): // a flag that no drives could do justice to
		return usagef("%s", strings.TrimPrefix(err.Error(), extentmap.ErrInvalid.Error()+": "))
	case err != nil:
		return explainFull(err)
	}
	if !o.quiet {
		o.warn(e, drives, made)
	}
	switch {
	case o.quiet:
	case o.json:
		return printJSON(e.stdout, planJSON(plan, o.dryRun))
	default:
		printPlan(e, plan, o.dryRun)
	}
	return nil
}

// warn tells what --size did not do: files that exist keep their size, and sparse ones hold no space.
func (o *mkfsOptions) warn(e *env, drives []drive.Drive, made []string) {
	isMade := func(d drive.Drive) bool { return slices.Contains(made, d.Name()) }
	want := int64(o.size) &^ (drive.UnitBytes - 1)
	for _, d := range drives {
		if d.Kind() == drive.File && want != 0 && d.Size() != want && !isMade(d) {
			e.warnf("%s exists and keeps its %s: --size is for files that do not exist", d.Name(),
				humanBytes(uint64(d.Size())))
		}
	}
	for _, d := range drives {
		if bytes, than, now := betterFormat(d); bytes != 0 {
			e.warnf("%s: its maker calls blocks of %d bytes %s, and those of %d, which it has, %s: see --lba-size", d.Name(),
				bytes, than, d.LBABytes(), now)
		}
	}
	for _, s := range sparseSpace(drives) {
		if s.promised > s.free {
			e.warnf("drive files are sparse: those on the filesystem of %s may grow by %s, and only %s are free there: storing "+
				"fails when that is full", s.beside, humanBytes(s.promised), humanBytes(s.free))
		}
	}
}

// fileSpace is what drive files on one filesystem may yet grow by, and what is free there.
type fileSpace struct {
	device         uint64
	beside         string
	promised, free uint64
}

func sparseSpace(drives []drive.Drive) (list []fileSpace) {
	for _, d := range drives {
		var st unix.Stat_t
		var fs unix.Statfs_t
		if d.Kind() != drive.File || unix.Fstat(d.Fd(), &st) != nil || unix.Fstatfs(d.Fd(), &fs) != nil {
			continue
		}
		i := slices.IndexFunc(list, func(s fileSpace) bool { return s.device == st.Dev })
		if i < 0 {
			i = len(list)
			list = append(list, fileSpace{device: st.Dev, beside: d.Name(), free: fs.Bavail * uint64(fs.Bsize)})
		}
		list[i].promised += uint64(max(d.Size()-st.Blocks*512, 0)) // stat(2) counts blocks of 512 bytes, whatever there are
	}
	return list
}

// openDrives opens all, making missing files first (in memory only for a dry run). It returns what it opened and made
// even on failure.
func (o *mkfsOptions) openDrives(paths []string) (drives []drive.Drive, made []string, err error) {
	for i, path := range paths {
		is := func(other string) bool { return other == path || sameFile(other, path) }
		if at := slices.IndexFunc(paths[:i], is); at >= 0 {
			return drives, made, usagef("%s is named twice (before as %s)", path, paths[at])
		}
		_, statErr := os.Stat(path)
		missing := errors.Is(statErr, os.ErrNotExist) && !drive.IsAddress(path)
		switch {
		case missing && o.size == 0:
			return drives, made, fmt.Errorf("%s does not exist: give --size to make it as a file", path)
		case missing && (o.dryRun || o.lbaSize.list):
			d, err := drive.NewMemory(path, int64(o.size)&^(drive.UnitBytes-1))
			if err != nil {
				return drives, made, err
			}
			drives = append(drives, d)
			continue
		case missing:
			if err := drive.Create(path, int64(o.size)&^(drive.UnitBytes-1)); err != nil {
				return drives, made, err
			}
			made = append(made, path)
		}
		if err := refuseMounted(path); err != nil {
			return drives, made, err
		}
		if m, ok := mountOfDrive(path, false); ok {
			return drives, made, fmt.Errorf("%s is part of the volume that is mounted on %s: unmount it first", path,
				m.describe())
		}
		d, err := drive.Open(path, drive.Options{ReadOnly: o.dryRun || o.lbaSize.list})
		if errors.Is(err, drive.ErrBusy) {
			return drives, made, fmt.Errorf("%s is in use: unmount its volume first: %w", path, err)
		}
		if err != nil {
			return drives, made, err
		}
		drives = append(drives, d)
	}
	return drives, made, nil
}

// parseUUID accepts the usual 36 characters, or 32 without hyphens. Empty means none.
func parseUUID(text string) (id [16]byte, err error) {
	if text == "" {
		_, err = rand.Read(id[:])
		id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // RFC 9562: version 4
		return id, err
	}
	b, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(b) != len(id) {
		return id, usagef("%q is not a UUID", text)
	}
	return [16]byte(b), nil
}

type planDocument struct {
	OutputVersion int                    `json:"output_version"`
	DryRun        bool                   `json:"dry_run"`
	UUID          string                 `json:"uuid"`
	Label         string                 `json:"label"`
	Width         int                    `json:"width"`
	SegmentBytes  uint64                 `json:"segment_bytes"`
	JournalBytes  uint64                 `json:"journal_bytes"`
	MetadataBytes uint64                 `json:"metadata_bytes_per_drive"`
	UsableBytes   uint64                 `json:"usable_bytes"`
	Drives        []daemon.DriveDocument `json:"drives"`
}

func planJSON(p *extentmap.FormatPlan, dryRun bool) planDocument {
	return planDocument{outputVersion, dryRun, extentmap.FormatUUID(p.UUID), p.Label, p.Width, p.SegmentBytes,
		p.JournalBytes, p.MetadataBytes, p.UsableBytes, planDrives(p)}
}

// planDrives describes the drives. A dry run has memory in place of the files that it would make.
func planDrives(p *extentmap.FormatPlan) []daemon.DriveDocument {
	list := daemon.NewDriveDocuments(p.Drives)
	for i := range list {
		if list[i].Kind == "memory" {
			list[i].Kind = "file"
		}
	}
	return list
}

func printPlan(e *env, p *extentmap.FormatPlan, dryRun bool) {
	w := table(e.stdout)
	label := p.Label
	if label == "" {
		label = "-"
	}
	fmt.Fprintf(w, "volume\t%s\n", extentmap.FormatUUID(p.UUID))
	fmt.Fprintf(w, "label\t%s\n", label)
	fmt.Fprintf(w, "drives\t%d, rows of %d entries\n", len(p.Drives), p.Width)
	fmt.Fprintf(w, "segment\t%s\n", humanBytes(p.SegmentBytes))
	fmt.Fprintf(w, "journal\t%s\n", humanBytes(p.JournalBytes))
	fmt.Fprintf(w, "metadata\t%s a drive\n", humanBytes(p.MetadataBytes))
	fmt.Fprintf(w, "usable\t%s\n", humanBytes(p.UsableBytes))
	for _, d := range planDrives(p) {
		fmt.Fprintf(w, "drive %d\t%s, %s, %s, %d-byte blocks\n", d.Index, d.Name, d.Kind, humanBytes(d.Bytes), d.LBABytes)
	}
	w.Flush()
	if dryRun {
		e.printf("dry run: nothing was written\n")
	}
}
